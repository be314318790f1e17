"""The head of a language model by vocabulary: a pure pass after which logits are on no link and in nobody's memory.

    logits = X W^T     loss = nll(log_softmax(logits), targets)     D = dlogits     dX = D W     dW = D^T X

needs of the logits no more than two numbers for each row: their logsumexp and the target's. So the three products
become (`steps.Gemm` says what each reads and makes)

    logit_sums   rows of X and a range of the vocabulary -> logsumexp over the range, the target's logit if it is in it
    logit_dx     the same and each row's logsumexp and slope; D is made again -> a summand of those rows of dX
    logit_dw     a range of the vocabulary and rows of X, in the same way     -> a summand of that range of dW

with names, cuboids, roles, levels and results of those that they stand for. The slope is the loss's gradient for the
row's log-likelihood, c, so that D = c (1 at the target - softmax). Between them the same ops of ATen run on a matrix of
one column: the log-likelihoods, all of class 0; targets that are ignored stay ignored, those out of range an error.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from cleave_dask.graph.annotating import in_order
from cleave_dask.graph.ir import Gemm, Op, Operand, Ref, Step, StepGraph, TorchConstant, Value
from cleave_dask.graph.simplifying import CAST, VIEWS, drop_dead

_SOFTMAX, _SOFTMAX_BACKWARD = "aten._log_softmax.default", "aten._log_softmax_backward_data.default"
_LOSS, _LOSS_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"


def by_vocabulary(graph: StepGraph) -> StepGraph | None:
    """The same step with its heads by vocabulary; None if it has none whose logits are for the loss alone.

    Logits that something else reads (a model output, a penalty), class weights, smoothed labels and biases are left
    as they are.
    """
    uses = _Uses(graph)
    softmaxes = [step for step in graph.steps if isinstance(step, Op) and step.target == _SOFTMAX]
    heads = [head for step in softmaxes if (head := uses.head(step))]
    if not heads:
        return None
    steps: dict[float, Step] = dict(enumerate(graph.steps))
    place = {name: index for index, step in enumerate(graph.steps) for name in step.writes}
    for head in heads:
        for name in head.dropped:
            del steps[place[name]]
        for name, step in head.replaced().items():
            steps[place[name]] = step
        first = place[head.loss.name]
        for number, op in enumerate(head.ops()):
            steps[first - 1 + (number + 1) / 100] = op
        steps[place[head.slopes.name] + 0.5] = head.slope_op()
    order = sorted(steps)
    return drop_dead(replace(graph, steps=tuple(in_order((steps[index] for index in order), range(len(order))))))


@dataclass(frozen=True)
class _Head:
    """One head as it was found."""

    product: Gemm
    weight: Value  # W[vocabulary, width]
    softmax: Op
    loss: Op
    slopes: Op  # of the loss for each log-likelihood
    backward: Op
    sums: tuple[Gemm, ...]  # dX and dW
    dropped: tuple[str, ...]  # values that there are no more

    @property
    def target(self) -> str:
        """The value that has each row's class."""
        return str(self.loss.args[1].name)

    def replaced(self) -> dict[str, Step]:
        """Steps in place of others, by a value that those wrote."""
        column, rest = (Ref(f"{self._name}.column"), Ref(f"{self._name}.class")), self.slopes.args[3:]
        slope = self.slopes.value
        assert slope is not None
        narrow = replace(slope, shape=(slope.shape[0], 1), strides=(1, 1))
        return {
            self.product.outputs[0].name: self._sums(),
            self.loss.name: replace(self.loss, args=(*column, *self.loss.args[2:])),
            self.slopes.name: replace(self.slopes, args=(self.slopes.args[0], *column, *rest), value=narrow),
            **{gemm.outputs[0].name: self._back(gemm) for gemm in self.sums},
        }

    def ops(self) -> list[Op]:
        """The log-likelihood of each row as a column, and the class of each: 0, or ignored."""
        name, rows, target = self._name, self.product.m, Ref(self.target)
        ignored, words = self.loss.args[4], self.product.n

        def op(which: str, target: str, args: tuple[object, ...], dtype: str, shape: tuple[int, ...] = (rows,)) -> Op:
            value = Value(f"{name}.{which}", shape, (1,) * len(shape), dtype)
            return Op(value.name, target, args, (), value)

        dtype, wide = self._dtype, (("dtype", TorchConstant("dtype", "float64")),)  # the only numbers that travel
        return [
            replace(op("word", CAST, (target,), "float64"), kwargs=wide),
            op("likelihood", "aten.sub.Tensor", (Ref(f"{name}.target"), Ref(f"{name}.logsumexp")), dtype),
            op("column", "aten.unsqueeze.default", (Ref(f"{name}.likelihood"), 1), dtype, (rows, 1)),
            op("within", "aten.remainder.Scalar", (target, words), "int64"),
            op("beyond", "aten.sub.Tensor", (target, Ref(f"{name}.within")), "int64"),
            op("ignored", "aten.eq.Scalar", (target, ignored), "bool"),
            op("class", "aten.where.self", (Ref(f"{name}.ignored"), target, Ref(f"{name}.beyond")), "int64"),
        ]

    def slope_op(self) -> Op:
        """The slopes as a vector."""
        value = Value(f"{self._name}.slope", (self.product.m,), (1,), self._dtype)
        return Op(value.name, "aten.squeeze.dim", (Ref(self.slopes.name), 1), (), value)

    @property
    def _name(self) -> str:
        return self.product.outputs[0].name

    @property
    def _dtype(self) -> str:
        return "float64" if self.product.dtype == "float64" else "float32"

    def _vector(self, which: str) -> Value:
        return Value(f"{self._name}.{which}", (self.product.m,), (1,), self._dtype)

    def _inputs(self, *vectors: Value) -> tuple[Operand, ...]:
        target = Value(f"{self._name}.word", (self.product.m,), (1,), "float64")
        sides = self.product.inputs[0], Operand((self.weight,)), Operand((target,))
        return (*sides, *(Operand((vector,)) for vector in vectors))

    def _sums(self) -> Gemm:
        vectors = self._vector("logsumexp"), self._vector("target")
        return replace(self.product, kind="logit_sums", inputs=self._inputs(), outputs=vectors)

    def _back(self, gemm: Gemm) -> Gemm:
        x, w, *rest = self._inputs(self._vector("logsumexp"), self._vector("slope"))
        if gemm.m == self.product.m and gemm.inputs[1].parts[0].name == self.weight.name:
            return replace(gemm, kind="logit_dx", flops=2 * gemm.flops, inputs=(x, w, *rest))
        return replace(gemm, kind="logit_dw", flops=2 * gemm.flops, inputs=(w, x, *rest))


class _Uses:
    """Who writes and who reads each value of a graph."""

    def __init__(self, graph: StepGraph) -> None:
        self.writer: dict[str, Step] = {name: step for step in graph.steps for name in step.writes}
        self.readers: dict[str, list[Step]] = defaultdict(list)
        for step in graph.steps:
            for name in step.reads:
                self.readers[name].append(step)
        self.values = {entry.value.name: entry.value for entry in graph.inputs}
        self.values |= {step.name: step.value for step in graph.steps if isinstance(step, Op) and step.value}
        self.values |= {value.name: value for gemm in graph.gemms for value in gemm.outputs}
        self.results = {graph.loss, *(value for _, value in graph.grads + graph.buffers)}

    def head(self, softmax: Op) -> _Head | None:
        """The head whose logits this is the softmax of."""
        found = self._product(softmax)
        readers = {step.target: step for step in self.readers[softmax.name] if isinstance(step, Op)}
        wanted = {_LOSS, _LOSS_BACKWARD, _SOFTMAX_BACKWARD}
        if found is None or readers.keys() != wanted or len(self.readers[softmax.name]) != len(wanted):
            return None
        product, weight, before = found
        loss, slopes, backward = readers[_LOSS], readers[_LOSS_BACKWARD], readers[_SOFTMAX_BACKWARD]
        plain = (
            loss.args[0] == Ref(softmax.name)
            and loss.args[2] is None
            and slopes.args[1:6] == (Ref(softmax.name), *loss.args[1:])
            and backward.args[:2] == (Ref(slopes.name), Ref(softmax.name))
            and self.readers[slopes.name] == [backward]
            and self.values[loss.args[1].name].dtype == "int64"
            and len(self.values[loss.args[1].name].shape) == 1
        )
        sums = self._sums(backward.name, product, weight) if plain else None
        dropped = {*before, softmax.name, backward.name, *(sums[1] if sums else ())}
        if sums is None or not dropped.isdisjoint(self.results) or slopes.name in self.results:
            return None
        return _Head(product, weight, softmax, loss, slopes, backward, sums[0], tuple(dropped))

    def _product(self, softmax: Op) -> tuple[Gemm, Value, list[str]] | None:
        """The gemm that makes logits, its weight, and the values on the way from the one to the softmax."""
        value, before = self.values[softmax.args[0].name], list[str]()
        while not isinstance(step := self.writer.get(value.name), Gemm):
            if step is None or step.target not in VIEWS | {CAST} or not self._only(value):
                return None
            before.append(value.name)
            value = self.values[step.reads[0]]
        softmaxed = self.values[softmax.name]
        simple = step.kind == "gemm" and len(step.outputs) == 1 and not step.biases
        if not simple or any(len(side.parts) > 1 for side in step.inputs) or not self._only(value):
            return None
        along = softmaxed.shape == (step.m, step.n) and softmax.args[1] in (1, -1)
        if not along or not all(map(self._straight, [*before, value.name])):
            return None
        turned = self.writer.get(step.inputs[1].parts[0].name)
        if not isinstance(turned, Op) or turned.target not in ("aten.t.default", "aten.transpose.int"):
            return None
        wide = "float64" if step.dtype == "float64" else "float32"
        weight = self.values[turned.reads[0]]
        fits = softmaxed.dtype == wide and weight.shape == (step.n, step.k) and value.name not in self.results
        return (step, weight, before) if fits else None

    def _sums(self, start: str, product: Gemm, weight: Value) -> tuple[tuple[Gemm, ...], list[str]] | None:
        """The gemms that read the logits' gradient, and the other names it goes by; None if anything else reads it."""
        names, gemms, x = [start], list[Gemm](), product.inputs[0].parts[0].name
        for name in names:
            for step in self.readers[name]:
                if isinstance(step, Op):
                    if step.target not in VIEWS | {CAST}:
                        return None
                    names.append(step.name)
                    continue
                sides = [tuple(part.name for part in side.parts) for side in step.inputs]
                value, plain = self.values[name], step.kind == "gemm" and len(step.outputs) == 1 and not step.biases
                straight = sides == [(name,), (weight.name,)] and self._straight(name)
                turned = sides == [(name,), (x,)] and value.strides == (1, product.n)
                if not plain or not ((straight and step.m == product.m) or (turned and step.m == product.n)):
                    return None
                gemms.append(step)
        return (tuple(gemms), names[1:]) if gemms else None

    def _only(self, value: Value) -> bool:
        return len(self.readers[value.name]) == 1

    def _straight(self, name: str) -> bool:
        """Whether a value's numbers are in the order of its own rows."""
        value, stride = self.values[name], 1
        for extent, given in zip(reversed(value.shape), reversed(value.strides), strict=True):
            if extent != 1 and given != stride:
                return False
            stride *= extent
        return True
