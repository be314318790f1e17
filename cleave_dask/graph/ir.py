"""The step graph: one training step (forward, loss, backward) as plain, frozen data.

A `StepGraph` is a program: a list of steps in program order, each either an `Op` that only the server can run or a
`Gemm` that may be cut into tiles and sent out. Values are tensors, known by name. Nothing here imports torch: a step
graph can be planned, simulated, printed and stored on a machine without it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

from cleave_dask.errors import InputError
from cleave_dask.formatting import html_table, quantity
from cleave_dask.graph.step_json import from_gemm, from_op, from_value, to_gemm, to_op, to_value
from cleave_dask.graph.steps import (
    BACKWARD_WORK,
    ITEMSIZE,
    LOGITS,
    Gemm,
    Input,
    Kind,
    Op,
    Operand,
    Range,
    Ref,
    Role,
    Step,
    TorchConstant,
    Value,
)

__all__ = [
    "BACKWARD_WORK",
    "ITEMSIZE",
    "LOGITS",
    "Gemm",
    "Input",
    "Kind",
    "Op",
    "Operand",
    "Range",
    "Ref",
    "Role",
    "Step",
    "StepGraph",
    "TorchConstant",
    "Value",
    "check_wire",
]

WIRES = ("bfloat16",)
"""What numbers may be rounded to for their way between server and devices."""

FORMAT = 1
"""Version of the JSON that `StepGraph.to_json` writes."""


@dataclass(frozen=True)
class StepGraph:
    """The whole training step of one module on one batch shape."""

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]  # in program order
    loss: str  # name of the value that is the loss
    grads: tuple[tuple[str, str], ...]  # (parameter, value) for each parameter that has a gradient
    buffers: tuple[tuple[str, str], ...]  # (buffer, value) for each buffer that the step changes
    batch: str  # structure of the batch, with every argument that is not a tensor spelled out
    constants: Mapping[str, bytes] = field(default_factory=dict)  # raw bytes of each constant input

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """Everything that may be sent out, in program order."""
        return tuple(step for step in self.steps if isinstance(step, Gemm))

    @cached_property
    def flops(self) -> float:
        """Floating point operations of all gemms of the step."""
        return sum(gemm.flops for gemm in self.gemms)

    @cached_property
    def levels(self) -> int:
        """Length of the longest chain of gemms that wait for each other."""
        return max((gemm.level for gemm in self.gemms), default=0)

    @cached_property
    def frees(self) -> tuple[tuple[str, ...], ...]:
        """For each step, the values that nothing needs after it: neither a later step nor the result."""
        results = {self.loss, *(value for _, value in self.grads), *(value for _, value in self.buffers)}
        seen, frees = set(results), []
        for step in reversed(self.steps):
            last = tuple(name for name in dict.fromkeys(step.reads + step.writes) if name not in seen)
            seen.update(last)
            frees.append(last)
        return tuple(reversed(frees))

    @cached_property
    def digest(self) -> str:
        """A hash of the content: equal graphs have equal digests, on any machine."""
        return blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def over(self, wire: str | None) -> StepGraph:
        """The same step with gemms whose numbers travel as `wire`, "bfloat16": half the bytes, rounded on the way.

        Devices multiply the rounded numbers, add in float32 and round the result; everything on the server stays as
        it is. Gemms that travel in no more bytes than that already are left alone; None leaves all.
        """
        check_wire(wire)
        if wire is None:
            return self
        wide = {name for name, size in ITEMSIZE.items() if size > ITEMSIZE[wire]}
        steps = (
            replace(step, wire=wire) if isinstance(step, Gemm) and step.dtype in wide else step for step in self.steps
        )
        return replace(self, steps=tuple(steps))

    def gemm(self, name: str) -> Gemm:
        """The gemm of that name."""
        for gemm in self.gemms:
            if gemm.name == name:
                return gemm
        raise KeyError(name)

    def to_json(self) -> str:
        """The graph as one JSON object, from which `from_json` makes an equal graph."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "inputs": [[entry.kind, entry.source, from_value(entry.value)] for entry in self.inputs],
            "steps": [from_op(step) if isinstance(step, Op) else from_gemm(step) for step in self.steps],
            "loss": self.loss,
            "grads": self.grads,
            "buffers": self.buffers,
            "batch": self.batch,
            "constants": {name: b64encode(self.constants[name]).decode() for name in sorted(self.constants)},
        }
        return json.dumps(content, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> StepGraph:
        """The graph that `to_json` wrote."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise InputError(f"step graph has format {content['format']}, not {FORMAT}: capture it again")
            return cls(
                name=content["name"],
                inputs=tuple(Input(kind, source, to_value(value)) for kind, source, value in content["inputs"]),
                steps=tuple(to_op(step) if "target" in step else to_gemm(step) for step in content["steps"]),
                loss=content["loss"],
                grads=tuple((name, value) for name, value in content["grads"]),
                buffers=tuple((name, value) for name, value in content["buffers"]),
                batch=content["batch"],
                constants={name: b64decode(data) for name, data in content["constants"].items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is not the JSON of a step graph ({error!r}): write it with to_json()") from error

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __repr__(self) -> str:
        return f"<StepGraph {self._headline}>"

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._shapes]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self._headline, *lines])

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._shapes, caption=self._headline)

    @property
    def _headline(self) -> str:
        """The graph in one line."""
        ops = len(self.steps) - len(self.gemms)
        work = quantity(self.flops, "FLOP")
        return f"{self.name}: {work} in {len(self.gemms)} gemms on {self.levels} levels, {ops} other ops"

    @property
    def _shapes(self) -> list[tuple[str, ...]]:
        """One row for each distinct shape of gemm: by role, then by work, the most first."""
        counts = Counter((gemm.role, gemm.kind, gemm.m, gemm.n, gemm.k, gemm.dtype, gemm.flops) for gemm in self.gemms)
        order = sorted(counts.items(), key=lambda item: (_ROLES.index(item[0][0]), -item[1] * item[0][-1]))
        return [
            (role, kind, str(m), str(n), str(k), dtype, str(count), quantity(count * flops, "FLOP"))
            for (role, kind, m, n, k, dtype, flops), count in order
        ]


def check_wire(wire: str | None) -> None:
    """Raise InputError unless numbers can travel so."""
    if wire not in (None, *WIRES):
        raise InputError(f"numbers cannot travel as {wire!r}; give {' or '.join(map(repr, WIRES))}, or None")


_ROLES = ("forward", "dX", "dW")
_COLUMNS = ("role", "kind", "m", "n", "k", "dtype", "count", "work")
