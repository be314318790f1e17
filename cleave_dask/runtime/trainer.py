"""The trainer: a torch module and its optimizer, trained step by step on a fleet.

    with LocalFleet(4) as fleet, fleet.get_client() as client:
        trainer = Trainer(module, torch.optim.AdamW(module.parameters()), client)
        loss = trainer.step(input_ids=ids, labels=ids)

The first step captures the module, plans it on the fleet and moves the weights to the server, where they stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch
from dask.typing import Key
from distributed import Client, Future
from distributed.protocol import to_serialize
from distributed.spans import SpanMetadata

from cleave_dask import config
from cleave_dask.errors import (
    CheckpointError,
    CleaveError,
    ClusterError,
    DistrustedError,
    InputError,
    StepError,
)
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import html_table, quantity
from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.capture_batch import micro_batches
from cleave_dask.graph.ir import StepGraph, check_wire
from cleave_dask.planning.adapting import Adapter
from cleave_dask.planning.adapting import Planner as Planner  # part of the trainer's own signature
from cleave_dask.planning.calibration import corrected
from cleave_dask.planning.planner import plan as default_plan
from cleave_dask.planning.values import Plan
from cleave_dask.resources import expect, shown
from cleave_dask.runtime.calling import ask
from cleave_dask.runtime.cluster import check_client, facts_of, how_to_join, inspect, is_closed
from cleave_dask.runtime.interrupted import Interrupted, better_plan
from cleave_dask.runtime.lowering import Lowered, Skeleton, StepExpression, finish_key, lower
from cleave_dask.runtime.optimizers import check_kind, pack
from cleave_dask.runtime.trace import MOST_ROWS, Trace
from cleave_dask.runtime.wire import to_wire
from cleave_dask.runtime.wire_torch import from_wire

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds between two looks at the cluster while a step runs."""


class Trainer:
    """Trains `module` with `optimizer` on the fleet behind `client`.

    `checkpoint` is the folder of its zarr store, on the server's disk; a relative path is taken from where this process
    runs. `schedule` is a torch LR scheduler over the optimizer, stepped once per update. `clip_norm` bounds the norm of
    all gradients together. With `accumulate=n` the batch of a step is cut into n micro-batches along its first axis and
    their gradients are averaged. `plan` cuts the step graph into tiles for the fleet. `wire` is what numbers of gemms
    are rounded to on their way, "bfloat16": half the bytes, products a little less precise.

    Between two steps, tiles of devices that left go to others, and devices that joined get some. With `replan` the
    step is also cut anew, by the same `plan`, when devices turn out to be so different from what they said that it
    pays. Another grid rounds differently: with `replan=False` the loss is bit for bit that of the first plan,
    whatever devices do.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        client: Client,
        checkpoint: str | Path | None = None,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        plan: Planner = default_plan,
        replan: bool = True,
        wire: str | None = None,
    ) -> None:
        expect(module, torch.nn.Module, what="the module", remedy="give an instance of torch.nn.Module")
        check_kind(optimizer)
        if not isinstance(accumulate, int) or accumulate < 1:
            raise InputError(
                f"accumulate is {shown(accumulate)}; give the number of micro-batches of a step, 1 or more"
            )
        check_wire(wire)
        self.client = client
        self.checkpoint = Path(checkpoint).absolute() if checkpoint is not None else None
        self.records: list[dict[str, Any]] = []
        self._module = module
        self._accumulate = accumulate
        self._planner = plan
        self._wire = wire
        self.interrupted: Interrupted | None = None  # the step to go on with after a resume
        self._resumed = False  # whether the step is one that was interrupted
        self._replan = replan
        self._adapter: Adapter | None = None
        self._lowered: Lowered | None = None
        self._detour = False  # whether it runs on the grid of one that was interrupted, not on the trainer's own
        self._passes = 0
        self._closed = False
        self._deserted = False  # whether the user was told that no device is left
        self._trace, self._traced = Trace.of(()), 0  # rows fetched so far, and the next to ask for
        self._run = uuid4().hex[:12]
        self._cluster = inspect(client)
        self._open(optimizer, schedule, clip_norm)

    # Training

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One optimizer update on a batch, given as the module's forward takes it; returns the loss."""
        if self._adapter is not None and self._adapter.step_begins(self._fleet()):
            self._load()
        while True:
            try:
                record = self._update(args, kwargs)
            except DistrustedError as error:
                logger.warning("%s", error)
            else:
                break
        self._return()
        self.records.append(record)
        loss: float = record["loss"]
        return loss

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All micro-batches of a step, one after the other; the record of the last, which has updated the weights."""
        for number, (micro_args, micro_kwargs) in enumerate(micro_batches(args, kwargs, self._accumulate)):
            if self._adapter is None:
                graph = capture(self._module, *micro_args, **micro_kwargs).over(self._wire)
                self._adapter = Adapter(graph, self._planner, self._fleet(), new_grids=self._replan)
                self._load()
            self._take_up()
            record = self._pass(flatten_batch(self.graph, micro_args, micro_kwargs), first=number == 0)
        return record

    def _pass(self, batch: Mapping[str, torch.Tensor], *, first: bool) -> dict[str, Any]:
        """Forward, loss and backward of one micro-batch; the last one of a step also updates the weights."""
        step = self._passes
        self._passes += 1
        wired = {source: (to_serialize(to_wire(tensor)), _dtype(tensor)) for source, tensor in batch.items()}
        self._call("cleave_begin", step=step, batch=wired, first=first)
        future = submit(self.client, self._run, step, replace(self.lowered.skeleton, resumed=self._resumed))
        try:
            return self._wait(future)
        finally:
            future.cancel()

    def _wait(self, future: Future[Any]) -> dict[str, Any]:
        """The record of a step; looks at the cluster now and then, so that a lost server is no silent hang."""
        while True:
            try:
                record: dict[str, Any] = future.result(timeout=PATIENCE)
            except TimeoutError:
                self._check_cluster()
            except CleaveError:
                raise
            except Exception as error:
                raise StepError(f"a task of the step failed: {type(error).__name__}: {error}") from error
            else:
                if self._deserted:  # the device that came back was through before the next look
                    self._check_cluster()
                return record

    def _check_cluster(self) -> None:
        """Raise if the step cannot go on; say so if it must wait. Devices may come and go, the server may not."""
        facts = facts_of(self.client)
        if facts["broken"]:
            raise ClusterError(f"the scheduler's plugin is broken: {facts['broken']}; restart the scheduler and resume")
        if self._cluster.server not in {server["address"] for server in facts["server"].values()}:
            raise ClusterError(
                f"the server at {self._cluster.server} has left, and with it the weights of this run; "
                "start it again and resume from the last checkpoint"
            )
        present = set(facts["device"]) - set(facts["silent"])
        if bool(present) == self._deserted:
            self._deserted = not present
            if self._deserted:
                logger.warning("No device is left: the step waits until one joins; %s", how_to_join(self.client))
            else:
                logger.warning("%s is back: the step goes on", ", ".join(sorted(present)[:3]))

    # What can be looked at

    @property
    def graph(self) -> StepGraph:
        """The step graph in the form that is planned; there is none before the first step."""
        return self._ready().graph

    @property
    def plan(self) -> Plan:
        """The plan in use; there is none before the first step."""
        return self._ready().plan

    @property
    def lowered(self) -> Lowered:
        """The Dask graph of a step; there is none before the first step."""
        return self._ready()

    @property
    def trace(self) -> Trace:
        """What happened since this trainer began, one row per tile attempt."""
        answer = self._call("cleave_trace", since=self._traced)
        self._traced = answer["next"]
        names = {name: tuple(values) for name, values in answer["names"].items()}
        everything = Trace.joined([self._trace, Trace(answer["columns"], names)])
        self._trace = everything.where(slice(-MOST_ROWS, None))
        return self._trace

    def _ready(self) -> Lowered:
        if self._lowered is None:
            raise InputError("the step graph is captured from the first batch; call step(...) first")
        return self._lowered

    def _repr_html_(self) -> str:
        latest = self.records[-5:]
        rows = [(r["step"], f"{r['loss']:.4f}", f"{r['seconds']:.3g}", r["tiles"]) for r in latest]
        moved = quantity(sum(r["down_bytes"] + r["up_bytes"] for r in self.records), "B")
        caption = f"Trainer of {type(self._module).__name__}: {len(self.records)} steps, {moved} moved"
        return html_table(("step", "loss", "seconds", "tiles"), rows, caption=caption)

    # Weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers as they are now on the server, under the module's own names."""
        canonical = _canonical_names(self._module)
        fetched: dict[str, torch.Tensor] = {}
        for name in self._module.state_dict():
            known = canonical[name]
            if known not in fetched:
                answer = self._call("cleave_get", name=known)
                fetched[known] = from_wire(answer["array"], answer["dtype"])
        return {name: fetched[canonical[name]].clone() for name in self._module.state_dict()}

    def save(self) -> int:
        """Write weights and optimizer state to the checkpoint; returns the step they belong to."""
        saved: int = self._call("cleave_save", folder=self._folder(), limits=_limits())["step"]
        return saved

    def resume(self) -> int:
        """Go on from the newest whole step of the checkpoint; returns its number.

        If the step after it was interrupted, tiles of it that are on disk are used when the next step is that step.
        """
        answer = self._call("cleave_restore", folder=self._folder(), step=None, limits=_limits())
        found = answer["interrupted"]
        self.interrupted = None if found is None else Interrupted.of(found)
        step: int = answer["step"]
        return step

    def close(self) -> None:
        """Free the server of this run's weights; it frees itself of those whose client is closed."""
        if not self._closed and not is_closed(self.client):
            self._call("cleave_close")
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, ClusterError):
            self.close()

    # Talking to the server

    def _open(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None,
        clip_norm: float | None,
    ) -> None:
        """Move weights, optimizer and random state to the server."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        packed = pack(optimizer, schedule, names)
        settings = {"clip_norm": clip_norm, "accumulate": self._accumulate}
        random_state = torch.get_rng_state().numpy().tobytes()
        self._call("cleave_open", client=self.client.id, settings=settings, random_state=random_state)
        for name, parameter in self._module.named_parameters():
            self._put(name, parameter.detach(), "param" if parameter.requires_grad else "frozen")
        for name, buffer in self._module.named_buffers():
            self._put(name, buffer, "buffer")
        self._call("cleave_optimizer", packed=packed)

    def _put(self, name: str, tensor: torch.Tensor, role: str) -> None:
        self._call("cleave_put", name=name, array=to_serialize(to_wire(tensor)), dtype=_dtype(tensor), role=role)

    def _fleet(self) -> Fleet:
        """The fleet as it is now: who takes tiles, with the figures that tiles have shown; nobody there: as it was."""
        facts = facts_of(self.client)
        there = {name for name, device in facts["device"].items() if device["running"]} - set(facts["silent"])
        devices = {name: device for name, device in facts["device"].items() if name in there}
        if devices:
            self._cluster = replace(self._cluster, devices=devices)
        known: dict[str, dict[str, float]] = self.records[-1]["figures"] if self.records else {}
        seen = {
            name: figures for name, figures in known.items() if self._cluster.devices.get(name, {}).get("calibrate")
        }
        return corrected(self._cluster.fleet, seen)

    def _load(self) -> None:
        """Hand the program to the server."""
        assert self._adapter is not None
        self._use(self._adapter.plan)

    def _use(self, plan: Plan) -> None:
        self._lowered = lower(plan.graph, plan)
        self._call("cleave_program", plan=to_serialize(plan))

    def _take_up(self) -> None:
        """Go on with the grid of a step that was interrupted, for that one step, if it pays."""
        if self.interrupted is not None:
            self._resumed = True
            plan = better_plan(self.interrupted, self.graph, self._fleet(), self.plan)
            self.interrupted = None
            if plan is not None:
                self._detour = True
                self._use(plan)

    def _return(self) -> None:
        """Go back to this trainer's own plan after a step on another grid."""
        self._resumed = False
        if self._detour:
            self._detour = False
            self._load()

    def _call(self, call: str, **kwargs: Any) -> Any:
        """A call of the server's, for this run."""
        if self._closed:
            raise ClusterError("this trainer is closed; build a new one; if there is a checkpoint, resume() from it")
        check_client(self.client)
        try:
            return self.client.sync(ask, self.client, self._cluster.server, call, {"run": self._run, **kwargs})
        except OSError as error:
            raise ClusterError(
                f"the server at {self._cluster.server} does not answer ({error}); "
                "is it running, and can this client reach that address?"
            ) from error

    def _folder(self) -> str:
        if self.checkpoint is None:
            raise CheckpointError("this trainer has no checkpoint folder; give one: Trainer(..., checkpoint='run')")
        return str(self.checkpoint)


def _limits() -> dict[str, Any]:
    """What a run may leave on disk, by the settings."""
    most = config.get("checkpoint.max_bytes")
    return {
        "keep": int(config.get("checkpoint.keep")),
        "max_bytes": None if most is None else config.nbytes("checkpoint.max_bytes"),
        "tiles": config.nbytes("checkpoint.tiles"),
    }


def submit(client: Client, run: str, step: int, skeleton: Skeleton) -> Future[Any]:
    """Send a step to the scheduler as one expression; the future is of its record."""
    key = finish_key(run, step)
    futures: dict[Key, Future[Any]] = client._graph_to_futures(
        StepExpression(run, step, skeleton),
        [key],
        span_metadata=SpanMetadata(collections=[{"type": "cleave_dask.StepExpression"}]),
        internal_priority={key: 0},  # the plugin ranks the rest; an empty mapping would have Dask order them all
    )
    return futures[key]


def _canonical_names(module: torch.nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, tied ones included, the one that the server knows it by."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for named in both:
        for name, tensor in named:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
