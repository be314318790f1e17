from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.errors import InputError
from cleave_dask.graph.ir import Gemm, Input, Op, Operand, Ref, StepGraph, TorchConstant, Value

NAMES = st.text(min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
VALUES = st.builds(Value, NAMES, SHAPES, SHAPES, st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
KINDS = st.sampled_from(["dtype", "device", "layout", "memory_format"])
LITERALS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.complex_numbers(allow_nan=False),
    st.builds(Ref, NAMES),
    st.builds(TorchConstant, KINDS, NAMES),
)
ARGUMENTS = st.recursive(LITERALS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple))
OPS = st.builds(
    Op,
    name=NAMES,
    target=NAMES,
    args=st.lists(ARGUMENTS, max_size=3).map(tuple),
    kwargs=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=2).map(tuple),
    value=st.none() | VALUES,
    random=st.booleans(),
)
OPERANDS = st.builds(Operand, st.lists(VALUES, min_size=1, max_size=3).map(tuple), st.integers(0, 1))
SIZES = st.integers(1, 2**20)
GEMMS = st.builds(
    Gemm,
    name=NAMES,
    kind=st.sampled_from(["gemm", "bmm", "attention", "attention_backward"]),
    role=st.sampled_from(["forward", "dX", "dW"]),
    level=SIZES,
    m=SIZES,
    n=SIZES,
    k=SIZES,
    flops=st.floats(0, 1e30),
    dtype=st.just("float32"),
    inputs=st.lists(OPERANDS, min_size=2, max_size=3).map(tuple),
    outputs=st.lists(VALUES, min_size=1, max_size=3).map(tuple),
    out_axis=st.integers(0, 1),
    biases=st.lists(st.none() | VALUES, max_size=2).map(tuple),
    causal=st.booleans(),
    scale=st.none() | st.floats(0, 1),
    wire=st.sampled_from([None, "bfloat16"]),
)
PAIRS = st.lists(st.tuples(NAMES, NAMES), max_size=3).map(tuple)
GRAPHS = st.builds(
    StepGraph,
    name=NAMES,
    inputs=st.lists(
        st.builds(Input, st.sampled_from(["param", "buffer", "batch", "constant"]), NAMES, VALUES), max_size=3
    ).map(tuple),
    steps=st.lists(OPS | GEMMS, max_size=4).map(tuple),
    loss=NAMES,
    grads=PAIRS,
    buffers=PAIRS,
    batch=st.text(max_size=10),
    constants=st.dictionaries(NAMES, st.binary(max_size=9), max_size=2),
)


def matrix(name: str, rows: int = 2, cols: int = 2) -> Value:
    return Value(name, (rows, cols), (cols, 1), "float32")


def gemm(name: str, a: str, b: str, c: str, **fields: Any) -> Gemm:
    inputs = (Operand((matrix(a),)), Operand((matrix(b),)))
    base = Gemm(name, "gemm", "forward", 1, 2, 2, 2, 16.0, "float32", inputs, (matrix(c),))
    return replace(base, **fields)


@pytest.fixture
def graph() -> StepGraph:
    return StepGraph(
        name="<Model>",
        inputs=(Input("param", "w", matrix("w")), Input("batch", "args[0]", matrix("x"))),
        steps=(
            gemm("fc", "x", "w", "y"),
            Op("loss", "aten.sum.default", (Ref("y"),), (), Value("loss", (), (), "float32")),
            gemm("fc:dW", "x", "y", "dw", role="dW", level=2, flops=2e9),
            gemm("fc:dX", "y", "w", "dx", role="dX", level=2),
        ),
        loss="loss",
        grads=(("w", "dw"),),
        buffers=(),
        batch="{}",
        constants={"c": b"\x00\xff"},
    )


@given(GRAPHS)
def test_json_round_trip(graph: StepGraph) -> None:
    copy = StepGraph.from_json(graph.to_json())
    assert copy == graph
    assert copy.digest == graph.digest
    assert hash(copy) == hash(graph)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 1.0, 1, True])
def test_numbers_keep_their_kind(graph: StepGraph, number: float) -> None:
    op = Op("o", "aten.full.default", ([2], number), (("fill", [[number]]),), None)
    copy = StepGraph.from_json(replace(graph, steps=(op,)).to_json()).steps[0]
    assert copy == op
    assert repr(copy) == repr(op)


def test_arguments_are_frozen() -> None:
    assert Op("o", "t", ([1, [Ref("x")]],), (("k", [2]),), None) == Op(
        "o", "t", ((1, (Ref("x"),)),), (("k", (2,)),), None
    )


def test_an_op_reads_what_its_arguments_refer_to() -> None:
    op = Op("o", "aten.index.Tensor", (Ref("x"), [None, Ref("i")]), (("out", Ref("x")),), None)
    assert op.reads == ("x", "i")


def test_different_graphs_have_different_digests(graph: StepGraph) -> None:
    others = [
        replace(graph, loss="y"),
        replace(graph, constants={"c": b"\x00"}),
        replace(graph, steps=graph.steps[:-1]),
    ]
    assert len({graph.digest, *(other.digest for other in others)}) == 4


def test_numbers_that_are_wider_travel_as_halves(graph: StepGraph) -> None:
    halves = graph.over("bfloat16")
    assert graph.over(None) is graph
    assert {gemm.tile_dtype for gemm in halves.gemms} == {"bfloat16"}
    assert {gemm.dtype for gemm in halves.gemms} == {"float32"}
    assert halves.digest != graph.digest
    narrow = replace(graph, steps=tuple(replace(gemm, dtype="float16") for gemm in graph.gemms))
    assert narrow.over("bfloat16") == narrow
    with pytest.raises(InputError, match="cannot travel as 'int8'; give 'bfloat16', or None"):
        graph.over("int8")


def test_values_are_freed_after_their_last_use(graph: StepGraph) -> None:
    assert graph.frees == ((), (), ("x",), ("y", "w", "dx"))  # neither the loss nor the gradient


def test_sums_over_gemms(graph: StepGraph) -> None:
    assert graph.flops == 2e9 + 32
    assert graph.levels == 2
    assert graph.gemm("fc:dX").role == "dX"
    with pytest.raises(KeyError, match="fc:dY"):
        graph.gemm("fc:dY")


def test_text_names_the_work_and_each_shape_once(graph: StepGraph) -> None:
    twice = replace(graph, steps=(*graph.steps, gemm("again", "x", "w", "z")))
    assert str(twice).splitlines() == [
        "<Model>: 2 GFLOP in 4 gemms on 2 levels, 1 other ops",
        "role     kind  m  n  k  dtype    count  work",
        "forward  gemm  2  2  2  float32  2      32 FLOP",
        "dX       gemm  2  2  2  float32  1      16 FLOP",
        "dW       gemm  2  2  2  float32  1      2 GFLOP",
    ]
    assert repr(twice) == "<StepGraph <Model>: 2 GFLOP in 4 gemms on 2 levels, 1 other ops>"


def test_html_is_escaped(graph: StepGraph) -> None:
    html = graph._repr_html_()
    assert "&lt;Model&gt;: 2 GFLOP" in html
    assert html.count("<tr>") == 4


def test_graphs_can_be_pickled(graph: StepGraph) -> None:
    assert pickle.loads(pickle.dumps(graph)) == graph


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "name": "x", "inputs": 3}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"not the JSON of a step graph.*write it with to_json"):
        StepGraph.from_json(text)


def test_another_format_is_refused() -> None:
    with pytest.raises(InputError, match="format 99, not 1: capture it again"):
        StepGraph.from_json('{"format": 99}')
