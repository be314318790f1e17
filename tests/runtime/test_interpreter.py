from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils._pytree import tree_leaves

from cleave_dask.errors import InputError
from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.ir import Gemm, Op, Operand, Ref, StepGraph, TorchConstant, Value
from cleave_dask.runtime.interpreter import empty_output, execute, run_gemm, run_op
from tests import models
from tests.graph import small_models
from tests.graph.small_models import assert_close, assert_same_step


def attentions(graph: StepGraph) -> int:
    return sum(gemm.kind.startswith("attention") for gemm in graph.gemms)


def draws(graph: StepGraph) -> int:
    return sum(step.random for step in graph.steps if isinstance(step, Op))


def test_opt_with_dropout_draws_what_torch_draws() -> None:
    graph = assert_same_step(lambda: models.opt(dropout=0.2), models.tokens())
    assert attentions(graph) == 4
    assert draws(graph) == 6  # two for each layer's dropout, and one that decides whether the layer is dropped


def test_llama_with_grouped_heads_and_tied_weights() -> None:
    graph = assert_same_step(models.llama, models.tokens())
    attention = graph.gemm("attention.0")
    assert (attention.m, attention.n, attention.k, attention.causal) == (3, 2, 1, True)
    assert [operand.shape for operand in attention.inputs] == [(3, 4, 17, 8), (3, 2, 17, 8), (3, 2, 17, 8)]
    assert "lm_head.weight" not in {entry.source for entry in graph.inputs}


def test_gpt2() -> None:
    assert attentions(assert_same_step(models.gpt2, models.tokens())) == 4


def test_qwen2() -> None:
    assert attentions(assert_same_step(small_models.qwen2, models.tokens())) == 2


def test_mistral_keeps_its_window() -> None:
    graph = assert_same_step(small_models.mistral, models.tokens())
    assert attentions(graph) == 0  # attention with a mask stays on the server


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bert_adds_gradients_of_gemms_and_of_the_residual(dropout: float) -> None:
    graph = assert_same_step(lambda: small_models.bert(dropout), models.tokens())
    joined = "query+key" if dropout else "query+key+value"  # without one attention op, values are ready before the rest
    assert f"bert.encoder.layer.0.attention.self.{joined}:dX" in {gemm.name for gemm in graph.gemms}
    assert attentions(graph) == (0 if dropout else 2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder(dropout: float) -> None:
    assert_same_step(lambda: small_models.Encoder(dropout), small_models.classes(4, 16))


def test_perceptron_with_batch_norm_frozen_layer_and_constants() -> None:
    graph = assert_same_step(small_models.Perceptron, small_models.classes(16))
    statistics = ["running_mean", "running_var", "num_batches_tracked"]
    assert [name for name, _ in graph.buffers] == [f"layers.1.{name}" for name in statistics]
    assert not [name for name, _ in graph.grads if name.startswith("frozen")]
    assert len(graph.constants) == 2


def test_checkpointing_repeats_products_and_not_draws() -> None:
    graph = assert_same_step(small_models.Checkpointed, small_models.classes(16))
    assert draws(graph) == 3
    assert [gemm.name for gemm in graph.gemms if gemm.role == "forward"] == [
        *("blocks.0.0", "blocks.1.0", "blocks.2.0"),
        *("blocks.2.0#2", "blocks.1.0#2", "blocks.0.0#2"),
    ]


def test_checkpointing_of_a_hugging_face_model() -> None:
    def build() -> nn.Module:
        module = models.opt(dropout=0.1)
        model: Any = module
        model.config.use_cache = False
        model.gradient_checkpointing_enable()
        return module

    graph = assert_same_step(build, models.tokens())
    assert attentions(graph) == 6


def test_autocast() -> None:
    graph = assert_same_step(lambda: small_models.Autocast(models.llama()), models.tokens(), atol=2e-2, rtol=2e-2)
    assert {gemm.dtype for gemm in graph.gemms} == {"bfloat16"}
    *inputs, logsumexp = graph.gemm("attention.0:dX").inputs
    assert {operand.parts[0].dtype for operand in inputs} == {"bfloat16"}
    assert logsumexp.parts[0].dtype == "float32"


def test_a_graph_that_was_written_and_read() -> None:
    assert_same_step(
        lambda: models.opt(dropout=0.1), models.tokens(), through=lambda graph: StepGraph.from_json(graph.to_json())
    )


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


@pytest.mark.parametrize("build", [models.opt, models.llama])
def test_the_joint_graph_of_aot_autograd_agrees(build: Callable[[], nn.Module]) -> None:
    module = Loss(build()).eval()
    batch = tuple(models.tokens().values())
    params = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    graph = capture(module, *batch)
    loss, grads, _ = execute(graph, params, buffers, flatten_batch(graph, batch, {}))

    joint_loss, joint_grads = run_joint_graph(module, batch, {**params, **buffers})
    canonical = {id(param): name for name, param in module.named_parameters()}
    summed: dict[str, torch.Tensor] = {}
    for name, grad in joint_grads:  # tied weights are two inputs there
        name = canonical[id(params[name])]
        summed[name] = summed[name] + grad if name in summed else grad
    torch.testing.assert_close(loss, joint_loss, atol=1e-6, rtol=0)
    assert_close(grads, summed, atol=1e-6, rtol=1e-5)


def run_joint_graph(
    module: nn.Module, batch: tuple[torch.Tensor, ...], state: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """The loss and the gradients by parameter that AOT autograd's graph of the step computes."""

    def given(node: torch.fx.Node) -> torch.Tensor:
        match node.meta["desc"]:
            case descriptors.ParamAOTInput(target=name) | descriptors.BufferAOTInput(target=name):
                return state[name].detach()
            case descriptors.PlainAOTInput(idx=index):
                return batch[index]
        return torch.ones(())  # the loss's own gradient

    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, batch).graph_module
    with torch.no_grad():
        values = map(given, joint.graph.find_nodes(op="placeholder"))
        outputs = tree_leaves(torch.fx.Interpreter(joint).run(*values, enable_io_processing=False))
    described = list(zip(joint.graph.output_node().meta["desc"], outputs, strict=True))
    [loss] = [output for what, output in described if isinstance(what, descriptors.PlainAOTOutput)]
    grads = []
    for what, output in described:
        if isinstance(what, descriptors.GradAOTOutput) and isinstance(what.grad_of, descriptors.ParamAOTInput):
            grads.append((what.grad_of.target, output))
    return loss, grads


def test_an_op_gets_torch_objects_for_their_names() -> None:
    op = Op(
        name="out",
        target="aten._to_copy.default",
        args=(Ref("x"),),
        kwargs=(("dtype", TorchConstant("dtype", "bfloat16")),),
        value=Value("out", (2,), (1,), "bfloat16"),
    )
    assert run_op(op, {"x": torch.ones(2, requires_grad=True)}).dtype == torch.bfloat16


def test_lists_of_tensors_are_arguments_too() -> None:
    op = Op("out", "aten.cat.default", ((Ref("x"), Ref("y")), 0), (), Value("out", (4,), (1,), "float32"))
    assert run_op(op, {"x": torch.zeros(2), "y": torch.ones(2)}).tolist() == [0, 0, 1, 1]


def test_an_op_that_torch_does_not_have() -> None:
    with pytest.raises(InputError, match=r"no op 'aten\.nonsense\.default': capture the step with this torch"):
        run_op(Op("out", "aten.nonsense.default", (), (), None), {})


def test_an_output_is_laid_out_as_traced() -> None:
    assert empty_output(Value("c", (2, 3), (1, 2), "float16")).stride() == (1, 2)


def value(name: str, *shape: int) -> Value:
    return Value(name, shape, (shape[1], 1), "float64")


def product(**fields: Any) -> Gemm:
    base = Gemm("g", "gemm", "forward", 1, 4, 5, 3, 0.0, "float64", (), ())
    return replace(base, **fields)


@pytest.fixture
def env() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a": (4, 3), "a2": (4, 3), "b": (3, 5), "b2": (3, 2), "b3": (3, 5)}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return tensors | {"bias": torch.randn(5, dtype=torch.float64)}


def test_columns_of_a_joined_gemm(env: dict[str, torch.Tensor]) -> None:
    gemm = product(
        inputs=(Operand((value("a", 4, 3),)), Operand((value("b", 3, 5), value("b2", 3, 2)), axis=1)),
        outputs=(value("c", 4, 5), value("c2", 4, 2)),
        biases=(Value("bias", (5,), (1,), "float64"), None),
    )
    first, second = run_gemm(gemm, env)
    torch.testing.assert_close(first, env["a"] @ env["b"] + env["bias"])
    torch.testing.assert_close(second, env["a"] @ env["b2"])


def test_rows_of_a_joined_gemm(env: dict[str, torch.Tensor]) -> None:
    gemm = product(
        inputs=(Operand((value("a", 4, 3), value("a2", 4, 3)), axis=0), Operand((value("b", 3, 5),))),
        outputs=(value("c", 4, 5), Value("c2", (4, 5), (1, 4), "float64")),
        out_axis=0,
    )
    first, second = run_gemm(gemm, env)
    torch.testing.assert_close(first, env["a"] @ env["b"])
    torch.testing.assert_close(second, env["a2"] @ env["b"])
    assert second.stride() == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sum_of_products(env: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    gemm = product(
        inputs=(
            Operand((value("a", 4, 3), value("a2", 4, 3)), axis=1),
            Operand((value("b", 3, 5), value("b3", 3, 5)), axis=0),
        ),
        outputs=(value("c", 4, 5),),
    )
    [total] = run_gemm(gemm, {name: tensor.to(dtype) for name, tensor in env.items()})
    expected = env["a"] @ env["b"] + env["a2"] @ env["b3"]
    torch.testing.assert_close(total.double(), expected, atol=0.0 if dtype == torch.float64 else 0.1, rtol=1e-2)


def test_gradients_can_be_changed_in_place() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b).square().sum() + self.c.sum() + (x * self.c).sum()

    module, batch = Shared(), torch.arange(3.0)
    graph = capture(module, batch)
    _, grads, _ = execute(graph, dict(module.named_parameters()), {}, flatten_batch(graph, (batch,), {}))
    before = {name: grad.clone() for name, grad in grads.items()}
    grads["a"].zero_()
    grads["c"].mul_(2)
    assert torch.equal(grads["b"], before["b"])
    assert torch.equal(batch, torch.arange(3.0))


def test_a_graph_without_numbers_for_its_constants_cannot_run() -> None:
    with torch.device("meta"):
        module = small_models.Perceptron()
    module.shift = torch.empty(5, device="meta")  # transformers has linspace make numbers even on the meta device
    graph = capture(module, **small_models.classes(16))
    assert [entry.kind for entry in graph.inputs].count("constant") == 2
    with pytest.raises(InputError, match=r"has no numbers.*not on the meta device"):
        execute(graph, {}, {}, {})
