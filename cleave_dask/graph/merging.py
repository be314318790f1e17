"""Fewer, larger gemms: pure passes over a step graph that join gemms which share an operand or are only added up.

Only gemms of one level are joined. A chain of dependencies raises the level at each gemm, so there is none between two
gemms of one level, and a joined gemm stays on that level: no sequence of such joins can make a circle.
Gemms before the loss are not joined with gemms after it: activation checkpointing repeats them to save memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cleave_dask.graph.annotating import find_levels, in_order
from cleave_dask.graph.ir import Gemm, Op, Operand, Ref, Step, StepGraph, Value
from cleave_dask.graph.simplifying import CAST, VIEWS, seed_index, written


def merge(graph: StepGraph) -> StepGraph:
    """The same step with QKV, gate and up, and whatever else belongs together as one gemm each, in each role."""
    return merge_sums(merge_rows(merge_columns(graph)))


def merge_columns(graph: StepGraph) -> StepGraph:
    """Gemms with the same left side: A [B1 B2 ...] gives all their results side by side."""
    return _merge_groups(graph, lambda gemm: (gemm.inputs[0], gemm.role), _join_columns)


def merge_rows(graph: StepGraph) -> StepGraph:
    """Weight gradients with the same right side: [A1; A2; ...] B gives all their results one above the other."""

    def right_side(gemm: Gemm) -> Operand | None:
        return gemm.inputs[1] if gemm.role == "dW" and not gemm.biases else None

    return _merge_groups(graph, right_side, _join_rows)


def merge_sums(graph: StepGraph) -> StepGraph:
    """Input gradients that are only added up: [A1 A2 ...] [B1; B2; ...] is their sum, and the additions disappear."""
    program = _Program(graph)
    for root in program.roots():
        program.merge_tree(root)
    return _reordered(graph, program.steps)


def _is_simple(step: Step) -> bool:
    """Whether a step is a gemm that is not joined already."""
    return isinstance(step, Gemm) and step.kind == "gemm" and all(len(side.parts) == 1 for side in step.inputs)


def _merge_groups(
    graph: StepGraph, key: Callable[[Gemm], Hashable], join: Callable[[Sequence[Gemm]], Gemm]
) -> StepGraph:
    """Join the gemms that have the same key, other than None, on the same level."""
    seed, levels = seed_index(graph), find_levels(graph)
    groups: dict[Hashable, list[int]] = {}
    for index, step in enumerate(graph.steps):
        if isinstance(step, Gemm) and _is_simple(step) and key(step) is not None:
            groups.setdefault((key(step), step.dtype, levels[index], index > seed), []).append(index)
    steps = dict(enumerate(graph.steps))
    for first, *others in groups.values():
        if others:
            steps[first] = join([step for index in (first, *others) if isinstance(step := steps[index], Gemm)])
            for index in others:
                del steps[index]
    return _reordered(graph, steps)


def _reordered(graph: StepGraph, steps: Mapping[int, Step]) -> StepGraph:
    """The graph with these steps, by their place in the program of before."""
    return replace(graph, steps=tuple(in_order(steps.values(), steps.keys())))


def _join_columns(gemms: Sequence[Gemm]) -> Gemm:
    biases = tuple(gemm.biases[0] if gemm.biases else None for gemm in gemms)
    return replace(
        gemms[0],
        n=sum(gemm.n for gemm in gemms),
        flops=sum(gemm.flops for gemm in gemms),
        inputs=(gemms[0].inputs[0], _side(gemms, 1, axis=1)),
        outputs=tuple(gemm.outputs[0] for gemm in gemms),
        out_axis=1,
        biases=biases if any(biases) else (),
    )


def _join_rows(gemms: Sequence[Gemm]) -> Gemm:
    forward = gemms[::-1]  # gradients come the other way round: so parts are in the order of the forward gemm's
    return replace(
        gemms[0],
        m=sum(gemm.m for gemm in gemms),
        flops=sum(gemm.flops for gemm in gemms),
        inputs=(_side(forward, 0, axis=0), gemms[0].inputs[1]),
        outputs=tuple(gemm.outputs[0] for gemm in forward),
        out_axis=0,
    )


def _join_sum(gemms: Sequence[Gemm]) -> Gemm:
    forward = gemms[::-1]  # as in `_join_rows`
    return replace(
        gemms[0],
        k=sum(gemm.k for gemm in gemms),
        flops=sum(gemm.flops for gemm in gemms),
        inputs=(_side(forward, 0, axis=1), _side(forward, 1, axis=0)),
    )


def _side(gemms: Iterable[Gemm], number: int, *, axis: int) -> Operand:
    """The left or right sides of several gemms joined along an axis."""
    return Operand(tuple(gemm.inputs[number].parts[0] for gemm in gemms), axis)


@dataclass(frozen=True)
class _Term:
    """A summand that is a gemm's result, with the ops that reshape or cast it on its way into the sum."""

    gemm: int
    chain: tuple[int, ...]


class _Program:
    """The steps of a graph by place, while sums of gemms are folded into gemms."""

    def __init__(self, graph: StepGraph) -> None:
        self.steps: dict[int, Step] = dict(enumerate(graph.steps))
        self.levels = find_levels(graph)
        self.writer = {name: index for index, step in enumerate(graph.steps) for name in step.writes}
        self.value = {entry.value.name: entry.value for entry in graph.inputs}
        self.value |= {value.name: value for step in graph.steps for value in written(step)}
        self.uses = Counter(name for step in graph.steps for name in step.reads)
        self.uses.update([graph.loss, *(value for _, value in graph.grads), *(value for _, value in graph.buffers)])

    def roots(self) -> list[int]:
        """Additions whose result is not only a summand of another addition."""
        adds = [index for index, step in self.steps.items() if self._is_add(step)]
        inner = {
            self.writer[name]
            for index in adds
            for name in self.steps[index].reads
            if self.uses[name] == 1 and self._is_add(self._writing(name))
        }
        return [index for index in adds if index not in inner]

    def merge_tree(self, root: int) -> None:
        """Fold the gemms of one sum that can be one gemm into one."""
        adds, leaves = [root], list[str]()
        self._unfold(root, adds, leaves)
        terms = {name: term for name in leaves if leaves.count(name) == 1 and (term := self._term(name)) is not None}
        groups: dict[Hashable, list[str]] = {}
        for name, term in terms.items():
            groups.setdefault(self._signature(term), []).append(name)
        groups = {key: names for key, names in groups.items() if len(names) > 1}
        layouts = {_layout(self.value[name]) for name in (*leaves, *(self.steps[add].writes[0] for add in adds))}
        if not groups or len(layouts) > 1:
            return
        for names in groups.values():
            self._fold([terms[name] for name in names])
            leaves = [name for name in leaves if name not in names[1:]]
        self._refold(sorted(adds), leaves)

    def _unfold(self, add: int, adds: list[int], leaves: list[str]) -> None:
        """Collect the additions below one, and what they add up."""
        for name in self._summands(add):
            writer = self._writing(name)
            if self.uses[name] == 1 and self._is_add(writer):
                adds.append(self.writer[name])
                self._unfold(self.writer[name], adds, leaves)
            else:
                leaves.append(name)

    def _fold(self, terms: Sequence[_Term]) -> None:
        """Put one gemm in place of several; it goes the way of the first."""
        gemms = [step for term in terms if isinstance(step := self.steps[term.gemm], Gemm)]
        self.steps[terms[0].gemm] = _join_sum(gemms)
        for term in terms[1:]:
            for index in (term.gemm, *term.chain):
                del self.steps[index]

    def _refold(self, adds: Sequence[int], leaves: Sequence[str]) -> None:
        """Add up what is left, with as few of the additions as that takes; the last of them has the sum's name."""
        spare = len(adds) - (len(leaves) - 1)
        for index in adds[: min(spare, len(adds) - 1)]:
            del self.steps[index]
        total = leaves[0]
        for index, name in zip(adds[spare:], leaves[1:], strict=True):
            step = self.steps[index]
            assert isinstance(step, Op)
            self.steps[index] = replace(step, args=(Ref(total), Ref(name)))
            total = step.name
        if len(leaves) == 1:
            self._rename_result(leaves[0], adds[-1])

    def _rename_result(self, name: str, root: int) -> None:
        """Let the step that makes the only summand left make the sum itself."""
        sum_value = self.value[self.steps.pop(root).writes[0]]
        index = self.writer[name]
        step = self.steps[index]
        if isinstance(step, Gemm):
            self.steps[index] = replace(step, outputs=(sum_value,))
        else:
            self.steps[index] = replace(step, name=sum_value.name, value=sum_value)

    def _term(self, name: str) -> _Term | None:
        """The gemm behind a summand, if nothing else uses it or what is made of it on the way."""
        chain: list[int] = []
        while self.uses[name] == 1 and name in self.writer:
            step = self._writing(name)
            if isinstance(step, Gemm):
                fits = _is_simple(step) and step.role == "dX" and not step.biases
                return _Term(self.writer[name], tuple(reversed(chain))) if fits else None
            if step is None or not (step.target in VIEWS or step.target == CAST):
                return None
            chain.append(self.writer[name])
            name = step.reads[0]
        return None

    def _signature(self, term: _Term) -> Hashable:
        """Equal for terms whose gemms can be one: same level, and the same way into the sum."""
        gemm = self.steps[term.gemm]
        ops = [step for index in term.chain if isinstance(step := self.steps[index], Op)]
        way = tuple((op.target, op.args[1:], op.kwargs, op.value and _layout(op.value)) for op in ops)
        return self.levels[term.gemm], _layout(written(gemm)[0]), way

    def _summands(self, add: int) -> Iterator[str]:
        step = self.steps[add]
        assert isinstance(step, Op)
        return (argument.name for argument in step.args)

    def _writing(self, name: str) -> Step | None:
        return self.steps.get(self.writer[name]) if name in self.writer else None

    def _is_add(self, step: Step | None) -> bool:
        """Whether a step adds two tensors of one shape, neither broadcast nor scaled."""
        if not isinstance(step, Op) or step.target != "aten.add.Tensor" or step.kwargs or step.value is None:
            return False
        if len(step.args) != 2 or not all(isinstance(argument, Ref) for argument in step.args):
            return False
        return all(self.value[name].shape == step.value.shape for name in step.reads)


def _layout(value: Value) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return value.shape, value.strides, value.dtype
