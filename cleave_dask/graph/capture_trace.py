"""A module's training step as one pure torch.fx graph: (parameters, buffers, batch) -> (loss, gradients, buffers).

The module runs once, forward and backward, on tensors that have a shape and no data, whatever its own tensors are:
real, on the meta device, or fake. It is left as it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from cleave_dask.errors import CaptureError
from cleave_dask.graph.capture_batch import has_data
from cleave_dask.graph.capture_knowledge import Knowledge
from cleave_dask.graph.torch_ops import is_random

aten = torch.ops.aten

CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]
Source = tuple[Literal["param", "buffer", "batch"], str]
Call = Callable[[Mapping[str, torch.Tensor]], Any]
"""Runs the module on the leaves of a batch, by path."""


@dataclass(frozen=True)
class Trace:
    """The fx graph of a step, and what its placeholders and outputs stand for."""

    program: fx.GraphModule
    inputs: tuple[Source, ...]  # one per placeholder
    grads: tuple[str, ...]  # the outputs: the loss, the gradients of these parameters,
    buffers: tuple[str, ...]  # and these buffers after the step


@contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Whatever happens to the module's attributes within this context is undone at its end."""
    stores: list[dict[str, Any]] = [
        store for part in module.modules() for store in (vars(part), part._parameters, part._buffers, part._modules)
    ]
    before = [dict(store) for store in stores]
    try:
        yield
    finally:
        for store, content in zip(stores, before, strict=True):
            store.clear()
            store.update(content)


def trace(module: torch.nn.Module, call: Call, batch: Tensors, known: Tensors, knowledge: Knowledge) -> Trace:
    """Run the step once and record it. `known` are leaves of the batch whose value every batch has."""
    params = dict(module.named_parameters())  # tied weights appear once
    buffers = dict(module.named_buffers())
    trained = [name for name, param in params.items() if param.requires_grad]
    with _traceable(), FakeTensorMode(allow_non_fake_inputs=True), untouched(module):
        attributes = _attributes(module)
        empty = {id(tensor): _stand_in(tensor) for tensor in attributes.values() if not has_data(tensor)}
        state = {name: _stand_in(tensor) for name, tensor in (params | buffers).items()}
        leaves = {path: _stand_in(leaf) for path, leaf in batch.items()}
        for path, value in known.items():
            knowledge.declare(leaves[path], value)

        def step(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
            fakes = dict(zip(state, tensors, strict=False))
            swaps = empty | {id(params[name]): fakes[name] for name in params}
            swaps |= {id(buffers[name]): fakes[name].clone() for name in buffers}  # the module may write to them
            with knowledge:
                _install(module, swaps)
                loss = _loss(call(dict(zip(batch, tensors[len(state) :], strict=True))))
                seed = torch.ones_like(loss)
                grads = torch.autograd.grad(loss, [fakes[name] for name in trained], seed, allow_unused=True)
                return [loss, *grads, *_buffers_after(module, fakes, buffers)]

        flat = [*state.values(), *leaves.values()]
        program = make_fx(step)(*flat)
        _refuse_replaced(attributes, _attributes(module), program)
        program = _purify(program, flat, knowledge.tickets)
    inputs: list[Source] = [("param", name) for name in params]
    inputs += [("buffer", name) for name in buffers]
    inputs += [("batch", path) for path in batch]
    return Trace(program, tuple(inputs), tuple(trained), tuple(buffers))


@contextmanager
def _traceable() -> Iterator[None]:
    """Torch in a state in which a trace shows everything, whatever the caller's state; undone at the end."""
    with ExitStack() as stack:
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)  # or an LSTM is one opaque op
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))  # random ops move the stream on, as if they ran
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)
        yield


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with the same shape, layout and dtype, and no data. Runs under a FakeTensorMode."""
    like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # without overlapping memory
    fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _attributes(module: torch.nn.Module) -> Tensors:
    """The tensors that a module has as plain attributes, neither parameters nor buffers."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


def _refuse_replaced(before: Tensors, after: Tensors, program: fx.GraphModule) -> None:
    """Raise if the step reads a plain attribute and then replaces it: the next step would read the old one again."""
    read = {id(getattr(program, node.target)) for node in program.graph.find_nodes(op="get_attr")}
    for name, tensor in before.items():
        if id(tensor) in read and after.get(name) is not tensor:
            raise CaptureError(f"the step replaces '{name}', a plain attribute: make it a buffer with register_buffer")


def _install(module: torch.nn.Module, swaps: Mapping[int, torch.Tensor]) -> None:
    """Put stand-ins where the module keeps its tensors."""
    for part in module.modules():
        stores: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]
        for store in stores:
            for name, tensor in store.items():
                if id(tensor) in swaps:
                    store[name] = swaps[id(tensor)]


def _loss(output: Any) -> torch.Tensor:
    """The scalar loss in what the module returned."""
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"the module returned {type(output).__name__} without a loss: return a scalar tensor, or an object with "
            ".loss; a Hugging Face model needs labels=... to compute one"
        )
    if loss.numel() != 1:
        raise CaptureError(f"the loss has shape {tuple(loss.shape)}, not one number: reduce it with .mean() or .sum()")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: "
            "look for detach(), torch.no_grad() or frozen parameters between them"
        )
    return loss.reshape(()) if loss.ndim else loss


def _buffers_after(module: torch.nn.Module, fakes: Tensors, buffers: Tensors) -> list[torch.Tensor]:
    """The buffers when the step is over, also those that were replaced instead of changed in place."""
    after = dict(module.named_buffers(remove_duplicate=False))
    for name in buffers:
        old, new = fakes[name], after.get(name, fakes[name])
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise CaptureError(
                f"buffer '{name}' changes from {tuple(old.shape)} {old.dtype} to {tuple(new.shape)} {new.dtype} "
                "within a step: give it its final shape before"
            )
    return [after.get(name, fakes[name]) for name in buffers]


def _purify(program: fx.GraphModule, flat: Sequence[torch.Tensor], tickets: Sequence[str]) -> fx.GraphModule:
    """The same program without ops that write in place, without repeated draws, and without dead code."""
    draws = [node for node in program.graph.nodes if is_random(node.target)]
    for node, ticket in zip(draws, tickets, strict=True):
        node.meta["ticket"] = ticket
    _declare_batch_norm(program.graph)
    _fold_dropout(program.graph)
    _unify_draws(program.graph)
    if any(_is_mutable(node) for node in program.graph.nodes):
        program.recompile()
        with torch.no_grad():
            program = make_fx(torch.func.functionalize(program))(*[tensor.detach() for tensor in flat])
    _drop_copies_of_inputs(program.graph)
    program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_random(node.target))
    return program


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _declare_batch_norm(graph: fx.Graph) -> None:
    """Batch norm in training writes its running statistics, which only this variant of the op admits."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm.default and node.args[5] and node.args[3] is not None:
            node.target = aten._native_batch_norm_legit.default


def _fold_dropout(graph: fx.Graph) -> None:
    """Dropout draws its mask with empty_like, bernoulli_ and div_: make that one pure op."""
    for node in list(graph.nodes):
        if node.target is not aten.bernoulli_.float or len(node.args) != 2:
            continue
        fresh, keep = node.args
        if fresh.target is not aten.empty_like.default or len(fresh.users) != 1 or len(fresh.args) != 1:
            continue
        last, scale = node, None
        users = list(node.users)
        if len(users) == 1 and users[0].target is aten.div_.Scalar:
            last, scale = users[0], users[0].args[1]
        with graph.inserting_before(node):
            mask = graph.call_function(torch.ops.cleave.dropout_mask.default, (fresh.args[0], keep, scale))
        mask.meta = last.meta | {"ticket": node.meta["ticket"]}
        last.replace_all_uses_with(mask)
        for dead in dict.fromkeys((last, node, fresh)):
            graph.erase_node(dead)


def _unify_draws(graph: fx.Graph) -> None:
    """Draws of the same numbers become one: a checkpointed region is run again from the same random state."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if "ticket" not in node.meta:
            continue
        layout = tuple((str(leaf.shape), leaf.stride()) for leaf in tree_leaves(node.meta["val"]))
        same = first.setdefault((node.meta["ticket"], node.target, layout), node)
        if same is not node and not _is_mutable(node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _drop_copies_of_inputs(graph: fx.Graph) -> None:
    """Buffers were copied because the module might write to them; in a pure program nothing does."""
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or node.args[0].op != "placeholder":
            continue
        if node.meta["val"].stride() == node.args[0].meta["val"].stride():
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
