from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from cleave_dask.errors import CaptureError
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import Op, StepGraph
from tests import models
from tests.graph import small_models
from tests.graph.small_models import Layer, square


def count_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return square(self, x)


def count_anew(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count = self.count + 1
    loss: torch.Tensor = square(self, x) * self.count
    return loss


def grow_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = torch.zeros(7)
    return square(self, x)


X = torch.ones(2, 4)

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "opt": (lambda: models.opt(dropout=0.1), models.tokens()),
    "llama": (models.llama, models.tokens()),
    "gpt2": (models.gpt2, models.tokens()),
    "mlp": (models.mlp, models.points()),
    "bert": (small_models.bert, models.tokens()),
    "encoder": (lambda: small_models.Encoder(0.1), small_models.classes(4, 16)),
    "checkpointed": (small_models.Checkpointed, small_models.classes(16)),
}


@pytest.fixture(scope="module", params=CASES)
def graph(request: pytest.FixtureRequest) -> StepGraph:
    build, batch = CASES[request.param]
    return capture(build(), **batch)


def test_every_value_is_written_once_and_before_it_is_read(graph: StepGraph) -> None:
    known = [entry.value.name for entry in graph.inputs]
    for step in graph.steps:
        assert set(step.reads) <= set(known)
        known.extend(step.writes)
    assert len(known) == len(set(known))
    assert {graph.loss, *dict(graph.grads).values(), *dict(graph.buffers).values()} <= set(known)


def test_nothing_is_dead_but_draws(graph: StepGraph) -> None:
    results = {graph.loss, *dict(graph.grads).values(), *dict(graph.buffers).values()}
    read = results.union(*(step.reads for step in graph.steps))
    assert not [
        step for step in graph.steps if not read.intersection(step.writes) and not getattr(step, "random", False)
    ]


def test_gemms_have_names_of_their_own_and_levels_above_what_they_wait_for(graph: StepGraph) -> None:
    assert len({gemm.name for gemm in graph.gemms}) == len(graph.gemms)
    levels: dict[str, int] = {}
    for step in graph.steps:
        before = max((levels.get(name, 0) for name in step.reads), default=0)
        if not isinstance(step, Op):
            assert step.level > before
            before = step.level
        levels.update(dict.fromkeys(step.writes, before))


def test_shapes_of_gemms_agree_with_their_operands(graph: StepGraph) -> None:
    for gemm in graph.gemms:
        if gemm.kind == "gemm":
            assert [operand.shape for operand in gemm.inputs] == [(gemm.m, gemm.k), (gemm.k, gemm.n)]
            joined = sum(output.shape[gemm.out_axis] for output in gemm.outputs)
            assert joined == (gemm.m, gemm.n)[gemm.out_axis]
            assert gemm.flops == 2.0 * gemm.m * gemm.n * gemm.k


def test_json_round_trip(graph: StepGraph) -> None:
    assert StepGraph.from_json(graph.to_json()) == graph


def test_roles_and_names_of_a_llama() -> None:
    graph = capture(models.llama(layers=1), **models.tokens())
    layer = "model.layers.0"
    forward = [
        f"{layer}.self_attn.q_proj+k_proj+v_proj",
        "attention.0",
        f"{layer}.self_attn.o_proj",
        f"{layer}.mlp.gate_proj+up_proj",
        f"{layer}.mlp.down_proj",
        "lm_head",
    ]
    names = {role: [gemm.name for gemm in graph.gemms if gemm.role == role] for role in ("forward", "dX", "dW")}
    assert names["forward"] == forward
    assert sorted(names["dX"]) == sorted(f"{name}:dX" for name in forward)
    assert sorted(names["dW"]) == sorted(f"{name}:dW" for name in forward if name != "attention.0")
    attention, backward = graph.gemm("attention.0"), graph.gemm("attention.0:dX")
    assert attention.flops == 4 * 3 * 4 * 17 * 17 * 8 / 2
    assert backward.flops == 2.5 * attention.flops
    assert [value.shape for value in attention.outputs] == [(3, 4, 17, 8), (3, 4, 17)]
    assert [value.shape for value in backward.outputs] == [(3, 4, 17, 8), (3, 2, 17, 8), (3, 2, 17, 8)]
    assert attention.outputs[0].strides == (17 * 32, 8, 32, 1)


@pytest.mark.parametrize("surroundings", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_modules_without_data(surroundings: Callable[[], AbstractContextManager[Any]], inside: bool) -> None:
    context = surroundings()
    with context:
        module = models.llama()
        batch = {"input_ids": torch.zeros(3, 17, dtype=torch.long), "labels": torch.zeros(3, 17, dtype=torch.long)}
    with context if inside else nullcontext():
        graph = capture(module, **batch)
    assert graph == capture(models.llama(), **models.tokens())


def test_a_large_llama_needs_neither_memory_nor_minutes() -> None:
    """Two of the eighty layers of Llama-2-70B: 4.5 GB of weights, none of them there."""
    sizes: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8))
        ids = torch.zeros(128, 1024, dtype=torch.long)
    graph = capture(model, input_ids=ids, labels=ids)
    attention = graph.gemm("attention.1")
    assert (attention.m, attention.n) == (128, 8)
    assert graph.gemm("model.layers.1.mlp.gate_proj+up_proj:dW").k == 128 * 1024


def test_the_module_is_left_as_it_was() -> None:
    module = models.opt(dropout=0.1)
    config: Any = module.config
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    settings, stream = dict(vars(config)), torch.get_rng_state()
    capture(module, **models.tokens())
    assert vars(config) == settings
    assert torch.equal(torch.get_rng_state(), stream)
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert all(param.grad is None for param in module.parameters())


def test_the_module_is_left_as_it_was_when_capture_fails() -> None:
    def forgetful(self: Any, x: torch.Tensor) -> Any:
        self.cache = self.linear(x)
        self.seen = self.seen + 1
        raise RuntimeError("halfway")

    module = Layer(forgetful)
    weight = module.linear.weight
    with pytest.raises(CaptureError, match="Layer cannot be captured: RuntimeError: halfway"):
        capture(module, X)
    assert module.linear.weight is weight
    assert not hasattr(module, "cache")
    assert module.seen.item() == 0


def test_a_buffer_that_is_replaced_is_a_buffer_that_changes() -> None:
    def counting(self: Any, x: torch.Tensor) -> Any:
        self.seen = self.seen + x.shape[0]
        return square(self, x)

    assert [name for name, _ in capture(Layer(counting), X).buffers] == ["seen"]


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_capture_works_where_gradients_are_off(surroundings: Callable[[], AbstractContextManager[Any]]) -> None:
    module = Layer(square)
    with surroundings():
        assert len(capture(module, X).grads) == 2


def test_a_loss_of_one_element_will_do_and_attributes_may_be_left_behind() -> None:
    def logging(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = square(self, x)
        self.count = loss.detach()
        return loss.reshape(1)

    module = Layer(logging)
    assert capture(module, X).levels == 2
    assert module.count.item() == 0


def test_control_flow_over_constants_is_no_obstacle() -> None:
    def constant(self: Any, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(3).sum()
        if steps == 3 and not (torch.rand([]) < 0.0) and torch.equal(torch.ones(2), torch.ones(2)):
            return square(self, x)
        raise AssertionError("unreachable")

    graph = capture(Layer(constant), X)
    assert [step.target for step in graph.steps if isinstance(step, Op) and step.random] == ["aten.rand.default"]


def write_a_view(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(2)
    row = mask[0]
    row.copy_(x[0, 0])
    return mask.sum() > 0


def write_a_draw(x: torch.Tensor) -> torch.Tensor:
    return torch.rand([]).mul_(9) < 1


@pytest.mark.parametrize("decide", [write_a_view, write_a_draw])
def test_what_is_written_in_place_is_not_known(decide: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def written(self: Any, x: torch.Tensor) -> torch.Tensor:
        return square(self, x) if decide(x) else -square(self, x)

    with pytest.raises(CaptureError, match="looks at the numbers in a tensor"):
        capture(Layer(written), X)


def test_a_mask_that_the_module_computes_is_obeyed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.llama()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=(input_ids > 20).long(), labels=labels)

    graph = small_models.assert_same_step(Masked, models.tokens())
    assert not [gemm for gemm in graph.gemms if gemm.kind == "attention"]


def test_transformers_is_not_imported_for_those_who_do_not_use_it() -> None:
    program = (
        "import sys, torch; from cleave_dask.graph.capture import capture; "
        "capture(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)), torch.ones(1, 2)); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


FAILURES: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (
        lambda self, x: square(self, x) if x.sum() > 0 else -square(self, x),
        r"looks at the numbers in a tensor \(aten\._local_scalar_dense.*use torch\.where.*test_capture\.py:\d+: ",
    ),
    "item": (lambda self, x: square(self, x) * x.sum().item(), r"\.item\(\).*decide outside of the module"),
    "select": (lambda self, x: self.linear(x)[x[:, :3] > 0].sum(), r"shape.*aten\.nonzero.*depends.*torch\.where"),
    "shape": (lambda self, x: self.linear(x), r"loss has shape \(2, 3\), not one number: reduce it with \.mean\(\)"),
    "detached": (
        lambda self, x: square(self, x).detach(),
        r"loss does not depend on any parameter.*look for detach\(\)",
    ),
    "none": (lambda self, x: None, r"returned NoneType without a loss.*needs labels"),
    "empty": (lambda self, x: {"logits": x}, r"returned dict without a loss: return a scalar tensor"),
    "arguments": (
        lambda self: self.linear(X).sum(),
        r"Layer cannot be captured: TypeError.*takes 1 positional argument",
    ),
    "generator": (
        lambda self, x: square(self, x) * torch.rand((), generator=torch.Generator()),
        r"takes a Generator, which cannot be sent to the server.*seed the global one",
    ),
    "write": (count_in_place, r"aten\.add_\.Tensor writes to a tensor of shape \(\).*register_buffer"),
    "replace": (count_anew, r"step replaces 'count', a plain attribute: make it a buffer with register_buffer"),
    "buffer": (
        grow_buffer,
        r"buffer 'seen' changes from \(\).*to \(7,\).*give it its final shape",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_captured(name: str) -> None:
    loss, message = FAILURES[name]
    module = Layer(loss)
    with pytest.raises(CaptureError, match=message):
        capture(module, X)
    assert module.count.item() == 0


def test_a_module_without_parameters() -> None:
    with pytest.raises(CaptureError, match="Flatten has no parameter to train: give it one"):
        capture(nn.Flatten(), X)
    with pytest.raises(CaptureError, match="no parameter to train"):
        capture(Layer(square).requires_grad_(False), X)


def test_a_parameter_that_is_hidden_in_a_list() -> None:
    hidden = [nn.Parameter(torch.ones(3))]
    with pytest.raises(CaptureError, match=r"parameter of shape \(3,\) is used from outside.*ParameterList"):
        capture(Layer(lambda self, x: (self.linear(x) * hidden[0]).sum()), X)


def test_random_depth() -> None:
    module: Any = models.opt()
    module.model.decoder.layerdrop = 0.1
    with pytest.raises(CaptureError, match=r"set layerdrop to 0.*modeling_opt\.py:\d+: if dropout_probability"):
        capture(module, **models.tokens())
