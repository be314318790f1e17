"""What the server keeps while a step runs: weights, and at each op the values that later ones still read.

A value is there from the op that makes it to the last that reads it, gradients until the update; a view costs nothing.
The most of that, in program order, is what a step needs beside the optimizer's state (two numbers a weight for Adam).
The server runs ops in nearly that order: gradients of weights may come later, and keep their operands until then.
"""

from __future__ import annotations

from collections import defaultdict

from cleave_dask.graph.ir import Op, Step, StepGraph
from cleave_dask.graph.simplifying import VIEWS, written

_ALSO_VIEWS = ("aten.select.int", "aten.slice.Tensor")  # of a part of their input


def kept_bytes(graph: StepGraph) -> int:
    """Bytes that the server holds at most during a step."""
    weights = sum(entry.value.nbytes for entry in graph.inputs)
    origin: dict[str, str] = {}  # of each view: the value whose numbers it shows
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, step in enumerate(graph.steps):
        for name in step.reads:
            last[origin.get(name, name)] = place
        for value in written(step):
            if _shows(step):
                origin[value.name] = origin.get(step.reads[0], step.reads[0])
            else:
                size[value.name], last[value.name] = value.nbytes, place
    results = [graph.loss, *(value for _, value in (*graph.grads, *graph.buffers))]
    stay = {origin.get(name, name) for name in results}
    freed: defaultdict[int, int] = defaultdict(int)
    for name, nbytes in size.items():
        if name not in stay:
            freed[last[name]] += nbytes
    held = most = 0
    for place, step in enumerate(graph.steps):
        held += sum(size.get(value.name, 0) for value in written(step))
        most = max(most, held)
        held -= freed[place]
    return weights + most


def _shows(step: Step) -> bool:
    """Whether a step makes no numbers of its own."""
    return isinstance(step, Op) and (step.target in VIEWS or step.target in _ALSO_VIEWS)
