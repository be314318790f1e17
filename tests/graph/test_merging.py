from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from cleave_dask.graph.annotating import annotate, find_levels, in_order, join_names
from cleave_dask.graph.capture import capture
from cleave_dask.graph.ir import Gemm, Input, Op, Operand, Ref, Role, Step, StepGraph, Value
from cleave_dask.graph.merging import merge, merge_columns, merge_rows, merge_sums
from cleave_dask.graph.simplifying import simplify
from cleave_dask.runtime.interpreter import execute
from tests import models
from tests.graph import small_models

SIDE = 3


def matrix(name: str, strides: tuple[int, int] = (SIDE, 1)) -> Value:
    return Value(name, (SIDE, SIDE), strides, "float64")


def gemm(c: str, a: Value, b: Value, role: Role = "forward") -> Gemm:
    flops = 2.0 * SIDE**3
    inputs = (Operand((a,)), Operand((b,)))
    return Gemm(c, "gemm", role, 0, SIDE, SIDE, SIDE, flops, "float64", inputs, (matrix(c),))


def add(c: str, a: str, b: str) -> Op:
    return Op(c, "aten.add.Tensor", (Ref(a), Ref(b)), (), matrix(c))


def transposed(c: str, a: Value) -> Op:
    return Op(c, "aten.t.default", (Ref(a.name),), (), matrix(c, (a.strides[1], a.strides[0])))


def program(*steps: Step, grads: tuple[str, ...]) -> StepGraph:
    """Steps over three matrices, with a loss in front that they can depend on."""
    scalar = Value("loss", (), (), "float64")
    opening = (
        Op("loss", "aten.sum.default", (Ref("x"),), (), scalar),
        Op("seed", "aten.ones_like.default", (Ref("loss"),), (), replace(scalar, name="seed")),
    )
    return StepGraph(
        name="program",
        inputs=tuple(Input("batch", name, matrix(name)) for name in "xyz"),
        steps=opening + steps,
        loss="loss",
        grads=tuple((name, name) for name in grads),
        buffers=(),
        batch="{}",
    )


def results(graph: StepGraph) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator) for name in "xyz"}
    return execute(graph, {}, {}, batch)[1]


def assert_same(before: StepGraph, after: StepGraph) -> None:
    torch.testing.assert_close(results(before), results(after), rtol=1e-9, atol=1e-9)


X, Y, Z = map(matrix, "xyz")


def test_gemms_with_the_same_left_side_are_joined_by_columns() -> None:
    bias = Value("loss", (SIDE,), (0,), "float64")
    graph = program(gemm("a", X, Y), replace(gemm("b", X, Z), biases=(bias,)), gemm("c", Y, Z), grads=("a", "b", "c"))
    joined, alone = merge_columns(graph).gemms
    assert [part.name for part in joined.inputs[1].parts] == ["y", "z"]
    assert (joined.inputs[1].axis, joined.out_axis, joined.n, joined.flops) == (1, 1, 2 * SIDE, 4.0 * SIDE**3)
    assert joined.writes == ("a", "b")
    assert joined.biases == (None, bias)
    assert alone.writes == ("c",)


def test_weight_gradients_with_the_same_right_side_are_joined_by_rows() -> None:
    graph = program(gemm("a", X, Z, "dW"), gemm("b", Y, Z, "dW"), gemm("c", X, Z, "dX"), grads=("a", "b", "c"))
    joined, alone = merge_rows(graph).gemms
    assert [part.name for part in joined.inputs[0].parts] == ["y", "x"]  # as forward: gradients come in reverse
    assert joined.writes == ("b", "a")
    assert (joined.inputs[0].axis, joined.out_axis, joined.m) == (0, 0, 2 * SIDE)
    assert alone.writes == ("c",)
    assert_same(graph, merge_rows(graph))


def test_input_gradients_that_are_added_up_become_one_gemm() -> None:
    graph = program(
        gemm("a", X, Y, "dX"),
        gemm("b", Y, Z, "dX"),
        add("ab", "a", "b"),
        gemm("c", Z, X, "dX"),
        add("abc", "ab", "c"),
        grads=("abc",),
    )
    merged = merge_sums(graph)
    [total] = merged.gemms
    assert [part.name for part in total.inputs[0].parts] == ["z", "y", "x"]
    assert [(operand.axis, operand.shape) for operand in total.inputs] == [(1, (SIDE, 9)), (0, (9, SIDE))]
    assert (total.k, total.writes) == (9, ("abc",))
    assert len(merged.steps) == 3
    assert_same(graph, merged)


def test_other_summands_stay_and_so_does_the_way_into_the_sum() -> None:
    ta, tb = transposed("ta", matrix("a")), transposed("tb", matrix("b"))
    graph = program(
        gemm("a", X, Y, "dX"),
        ta,
        transposed("tz", Z),
        add("s", "ta", "tz"),
        gemm("b", Y, Z, "dX"),
        tb,
        add("total", "s", "tb"),
        grads=("total",),
    )
    columns = {step.name: matrix(step.name, (1, SIDE)) for step in graph.steps if step.name in {"s", "total"}}
    steps = [
        replace(step, value=columns[step.name]) if isinstance(step, Op) and step.name in columns else step
        for step in graph.steps
    ]
    merged = merge_sums(replace(graph, steps=tuple(steps)))
    assert [step.name for step in merged.steps[2:]] == ["a", "ta", "tz", "total"]
    assert_same(graph, merged)


@pytest.mark.parametrize(
    ("last", "grads"),
    [
        (add("s", "a", "b"), ("s", "a")),  # a is a result itself
        (add("s", "a", "a"), ("s", "b")),  # a is there twice
        (replace(add("s", "a", "b"), kwargs=(("alpha", 2),)), ("s",)),
        (Op("s", "aten.mul.Tensor", (Ref("a"), Ref("b")), (), matrix("s")), ("s",)),
    ],
)
def test_other_sums_are_left_alone(last: Op, grads: tuple[str, ...]) -> None:
    graph = program(gemm("a", X, Y, "dX"), gemm("b", Y, Z, "dX"), last, grads=grads)
    assert merge_sums(graph) == graph


def test_gemms_that_wait_for_each_other_are_not_joined() -> None:
    first = gemm("a", X, Y)
    graph = program(first, gemm("b", X, first.outputs[0]), grads=("b",))
    assert merge(graph) == graph


@st.composite
def programs(draw: st.DrawFn) -> StepGraph:
    """Programs of products, sums and transposes in which anything may depend on anything before it."""
    values = [X, Y, Z]
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 14))):
        name = f"v{number}"
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        kind = draw(st.sampled_from(["gemm", "gemm", "gemm", "add", "t"]))
        if kind == "gemm":
            steps.append(gemm(name, a, b, draw(st.sampled_from(["forward", "dX", "dW"]))))
        elif kind == "t":
            steps.append(transposed(name, a))
        elif a.strides == b.strides:
            steps.append(replace(add(name, a.name, b.name), value=matrix(name, (a.strides[0], a.strides[1]))))
        else:
            continue
        step = steps[-1]
        values.append(step.outputs[0] if isinstance(step, Gemm) else step.value or X)
    names = [value.name for value in values[3:]]
    grads = draw(st.lists(st.sampled_from(names), unique=True, max_size=4)) if names else []
    return program(*steps, grads=tuple(dict.fromkeys([*grads, *names[-1:]])))


@given(programs())
def test_merging_never_changes_the_result(graph: StepGraph) -> None:
    merged = merge(graph)
    assert_same(graph, merged)
    assert sum(gemm.flops for gemm in merged.gemms) == graph.flops
    assert len(merged.steps) <= len(graph.steps)
    assert max(find_levels(merged)) <= max(find_levels(graph))
    assert merge(merged) == merged


@given(programs())
def test_simplifying_and_annotating_never_change_the_result(graph: StepGraph) -> None:
    assert_same(graph, annotate(merge(annotate(simplify(graph)))))


@given(programs(), st.randoms())
def test_any_order_can_be_put_right(graph: StepGraph, random: Any) -> None:
    positions = list(range(len(graph.steps)))
    shuffled = random.sample(positions, len(positions))
    assert in_order([graph.steps[index] for index in shuffled], shuffled) == list(graph.steps)


def test_views_that_lead_back_are_dropped() -> None:
    once = transposed("t", X)
    assert once.value is not None
    twice = transposed("tt", once.value)
    graph = simplify(program(once, twice, add("s", "tt", "y"), transposed("u", Z), grads=("s", "t")))
    assert [step.name for step in graph.steps if step.name not in {"loss", "seed"}] == ["t", "s"]
    assert graph.steps[-1].reads == ("x", "y")


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["a.q", "a.k", "a.v"], "a.q+k+v"),
        (["a.q"], "a.q"),
        (["q", "k"], "q+k"),
        (["a.b.q", "a.c.q"], "a.b.q+c.q"),
        (["a", "a.b"], "a+a.b"),
        (["a.q", "a.q"], "a.q"),
    ],
)
def test_names_are_joined_after_what_they_share(names: list[str], joined: str) -> None:
    assert join_names(names) == joined


def counts(graph: StepGraph) -> tuple[int, int]:
    """Products before and after merging, without attention."""
    gemms = [gemm for gemm in graph.gemms if gemm.kind == "gemm"]
    return sum(max(len(operand.parts) for operand in gemm.inputs) for gemm in gemms), len(gemms)


def opt_1_3b() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_hidden_layers": 24}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=32, vocab_size=50272))


def llama2_7b(layers: int) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, vocab_size=32000))


@pytest.mark.parametrize(
    ("build", "before", "after", "levels"),
    [
        (opt_1_3b, 435, 291, 242),
        (lambda: llama2_7b(2), 21 * 2 + 3, 12 * 2 + 3, 10 * 2 + 2),  # all 32 layers: 675 -> 387 on 322 levels
    ],
    ids=["opt-1.3b", "llama2-7b"],
)
def test_gemms_of_real_models(build: Callable[[], nn.Module], before: int, after: int, levels: int) -> None:
    with FakeTensorMode():
        module, ids = build(), torch.zeros(1, 1024, dtype=torch.long)
    graph = capture(module, input_ids=ids, labels=ids)
    assert counts(graph) == (before, after)
    assert graph.levels == levels
    roles = Counter(gemm.role for gemm in graph.gemms if gemm.kind == "gemm")
    assert roles == dict.fromkeys(("forward", "dX", "dW"), after // 3)


def test_recomputed_gemms_are_not_joined_with_those_before_the_loss() -> None:
    graph = capture(small_models.Checkpointed(), **small_models.classes(16))
    assert counts(graph)[0] == counts(graph)[1]


def test_biases_go_with_their_columns() -> None:
    graph = capture(models.opt(), **models.tokens())
    qkv = graph.gemm("model.decoder.layers.0.self_attn.k_proj+v_proj+q_proj")
    assert qkv.biases[0] is not None
    assert [bias and bias.name for bias in qkv.biases] == [
        f"param:model.decoder.layers.0.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")
    ]
