"""`cleave train`: from a recipe to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import log
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from cleave_dask.cli import checkpoints, fleets, progress
from cleave_dask.cli.frame import debug_option, fleet_option, json_option, quiet_libraries, recipe_argument, wire_option
from cleave_dask.cli.interrupts import Interrupts
from cleave_dask.errors import BatchError, CheckpointError, CleaveError, InputError, StepError
from cleave_dask.formatting import duration, quantity

if TYPE_CHECKING:
    from distributed import Client

    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.recipes import Recipe
    from cleave_dask.runtime.trainer import Trainer
    from cleave_dask.views.scalars import Scalars

DEVICES = 4
"""Devices of the fleet that training starts on this machine, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    recipe: str
    fleet: str | None
    wire: str | None
    steps: int | None
    scheduler: str | None
    devices: int | None
    resume: bool
    checkpoint: Path | None
    save_every: int
    tensorboard: Path | None
    as_json: bool

    def check(self) -> None:
        """Options that contradict each other."""
        given = [f"--{name}" for name in ("fleet", "scheduler", "devices") if getattr(self, name) is not None]
        if len(given) > 1:
            raise click.UsageError(
                f"{' and '.join(given)} each say which devices to use; give one of them. --devices and --fleet start "
                "them on this machine, --scheduler takes those that have joined there."
            )


@click.command()
@recipe_argument
@fleet_option(
    required=False, explain="Emulate the devices of this fleet on this machine, held to their links and speeds."
)
@click.option(
    "--devices",
    type=click.IntRange(1, fleets.MOST_DEVICES),
    help=f"Start this many equal devices on this machine.  [default: {DEVICES}]",
)
@wire_option
@click.option("--scheduler", metavar="ADDRESS", help="Use the devices that have joined this scheduler.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Train up to this step.  [default: the recipe's; a longer run stretches its learning rate schedule]",
)
@click.option("--resume", is_flag=True, help="Go on from the newest saved step, of the latest run of this recipe.")
@click.option(
    "--checkpoint",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where weights and optimizer state are saved.  [default: a new folder in checkpoints/]",
)
@click.option(
    "--save-every", metavar="N", type=click.IntRange(1), default=50, show_default=True, help="Steps between saves."
)
@click.option(
    "--tensorboard",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write loss, seconds and bytes of each step there too.",
)
@json_option
@debug_option
@click.pass_obj
def train(interrupts: Interrupts, /, **given: Any) -> None:
    """Train the model of RECIPE.

    RECIPE is a file, or a name such as tiny-llama. Without --scheduler it runs on this machine: a real scheduler, a
    real server and one process per device. Ctrl-C saves what there is and leaves no process behind; --resume goes on
    from there.
    """
    options = Options(**given)
    options.check()
    recipe, fleet = _read(options)
    quiet_libraries()
    if options.scheduler is not None:
        fleets.probe(options.scheduler)  # before the seconds that building a model takes
    with progress.choose(as_json=options.as_json) as view:
        asked = replace(recipe, train=replace(recipe.train, steps=options.steps or recipe.train.steps))
        view.say(str(asked))
        _train(options, recipe, fleet, view=view, interrupts=interrupts)


def _read(options: Options) -> tuple[Recipe, Fleet | int]:
    """The recipe, with as many steps as asked for, and the fleet to start."""
    from cleave_dask.fleet.devices import Fleet
    from cleave_dask.graph.recipes import Recipe

    recipe = Recipe.load(options.recipe).over(options.wire)
    longest = max(options.steps or 0, recipe.train.steps)
    recipe = replace(recipe, train=replace(recipe.train, steps=longest))
    if options.fleet is None:
        return recipe, options.devices or DEVICES
    fleet = Fleet.load(options.fleet)
    if len(fleet) > fleets.MOST_DEVICES:
        raise InputError(
            f"fleet {options.fleet!r} has {len(fleet):,} devices, and each would be a process on this machine; "
            f"give one of at most {fleets.MOST_DEVICES}, or look at it with: "
            f"cleave plan {quote(options.recipe)} --fleet {quote(options.fleet)}"
        )
    return recipe, fleet


def _train(
    options: Options, recipe: Recipe, fleet: Fleet | int, *, view: progress.View, interrupts: Interrupts
) -> None:
    """Build, connect, train."""
    with ExitStack() as stack:
        if options.scheduler is None:
            folder = stack.enter_context(checkpoints.claimed(options.checkpoint, recipe.name, resume=options.resume))

        from cleave_dask.graph.building import build_model, build_optimizer, build_schedule
        from cleave_dask.runtime.cluster import inspect
        from cleave_dask.runtime.trainer import Trainer

        module = build_model(recipe)
        if options.scheduler is None and options.resume:
            checkpoints.check_model(folder, module)
        optimizer = build_optimizer(recipe, module)
        schedule = build_schedule(recipe, optimizer)
        client = stack.enter_context(_connected(options, fleet, view))
        if options.scheduler is not None:
            folder = stack.enter_context(_folder_of(client, options, recipe))
        trainer = Trainer(
            module,
            optimizer,
            client,
            checkpoint=folder,
            schedule=schedule,
            clip_norm=recipe.train.clip_norm,
            accumulate=recipe.train.accumulate,
            wire=recipe.train.wire,
        )
        scalars = stack.enter_context(_scalars(options.tensorboard))
        with trainer:
            parameters = sum(parameter.numel() for parameter in module.parameters())
            size = f"{quantity(parameters, '').strip()} parameters, {recipe.tokens_per_step:,} tokens a step"
            view.say(f"{size}, devices: {len(inspect(client).devices)}")
            view.say(f"dashboard: {client.dashboard_link}")
            view.say(f"checkpoint: {folder}, every {options.save_every} steps")
            Run(trainer, recipe, folder, options, view, interrupts, scalars).go()


@contextmanager
def _scalars(folder: Path | None) -> Iterator[Scalars | None]:
    """What writes for TensorBoard, if anything does."""
    if folder is None:
        yield None
        return
    from cleave_dask.views.scalars import Scalars

    with closing(Scalars(folder)) as scalars:
        yield scalars


@contextmanager
def _connected(options: Options, fleet: Fleet | int, view: progress.View) -> Iterator[Client]:
    """A client of the devices that were asked for."""
    if options.scheduler is not None:
        with fleets.joined(options.scheduler) as client:
            yield client
        return
    from cleave_dask.simulation.local import LocalFleet

    count = fleet if isinstance(fleet, int) else len(fleet)
    view.say(f"starting scheduler, server and {count} device{'s' * (count > 1)} on this machine")
    with (
        fleets.started(lambda: LocalFleet(fleet, dashboard="127.0.0.1:0")) as cluster,
        cluster.get_client() as client,
    ):
        yield client


def _folder_of(client: Client, options: Options, recipe: Recipe) -> AbstractContextManager[Path]:
    """The checkpoint's folder on the disk of a server that is already running."""
    from distributed.comm import get_address_host

    from cleave_dask.runtime.cluster import inspect

    if fleets.is_local(get_address_host(inspect(client).server)):
        return checkpoints.claimed(options.checkpoint, recipe.name, resume=options.resume)
    return nullcontext(checkpoints.elsewhere(options.checkpoint, recipe.name, resume=options.resume))


@dataclass
class Run:
    """One training run, from its first step to its last."""

    trainer: Trainer
    recipe: Recipe
    folder: Path
    options: Options
    view: progress.View
    interrupts: Interrupts
    scalars: Scalars | None = None
    saved: int = 0  # the newest step in the checkpoint
    done: int = 0  # the newest step

    def go(self) -> None:
        """Train up to the last step, saving now and then; what is not saved when something goes wrong is saved then."""
        total = self.total
        if self.options.resume:
            self.saved = self.done = self.trainer.resume()
            kept = self.trainer.interrupted
            with_tiles = f"; {kept.done:,} tiles of the next step are there" if kept is not None else ""
            self.view.say(f"resumed at step {self.done}{with_tiles}")
        if self.done >= total:
            self.view.say(f"step {total} is done already; give a higher number of --steps to go on")
            return
        self.view.begin(self.done, total, self.recipe.tokens_per_step)
        try:
            for batch in islice(_batches(self.recipe, self.done), total - self.done):
                self.trainer.step(**batch)
                record = self.trainer.records[-1]
                self.done = record["step"]
                self.view.step(record)
                if self.scalars is not None:
                    self.scalars.write([record])
                if self.done == total:
                    self.save()
                elif self.done % self.options.save_every == 0:
                    self._try_to_save()
        except BaseException as error:
            self.view.end()
            if isinstance(error, KeyboardInterrupt | StepError | BatchError):  # the server's weights are whole
                self._rescue()
            self._announce()
            raise
        self.view.end()
        self._conclude()

    @property
    def total(self) -> int:
        """The last step."""
        return self.options.steps or self.recipe.train.steps

    def save(self) -> None:
        """Save the newest step; Ctrl-C waits until it is on disk."""
        with self.interrupts.held():
            self.saved = self.trainer.save()

    def _try_to_save(self) -> None:
        """Save on the way; a disk that is full or read-only is no reason to lose the weights in the server's memory."""
        try:
            self.save()
        except CheckpointError as error:
            following = min(self.done + self.options.save_every, self.total)
            self.view.say(f"{error}; training goes on, and step {following} is tried next")

    def _rescue(self) -> None:
        """Save what there is before leaving, if the server still answers."""
        if self.done > self.saved:
            self.view.say(f"saving step {self.done}")
            try:
                self.save()
            except CleaveError as error:
                self.view.say(f"step {self.done} could not be saved: {error}")

    def _announce(self) -> None:
        """What is on disk when a run ends before its time, and how to go on."""
        if self.saved:
            self.view.say(f"checkpoint: {self.folder} (step {self.saved})")
            again = f"cleave train {quote(self.options.recipe)} --checkpoint {quote(str(self.folder))} --resume"
            self.view.say(f"to go on: {again}")

    def _conclude(self) -> None:
        """What came out, and what can be done with it."""
        records = self.trainer.records
        first, last = records[0]["loss"], records[-1]["loss"]
        seconds = sum(record["seconds"] for record in records)
        self.view.say(f"loss {first:.4f} -> {last:.4f} in {len(records)} steps, {duration(seconds)}")
        if self.recipe.data.byte_level:
            uniform = log(256)
            verdict = "below" if last < uniform else "not below"
            self.view.say(f"{verdict} ln(256) = {uniform:.3f}, the loss of guessing every byte alike")
        self.view.say(f"checkpoint: {self.folder} (step {self.saved})")
        recipe, output = self.options.recipe, f"{self.folder.name}-step-{self.saved}"
        self.view.say(f"to use it: cleave export {quote(str(self.folder))} --recipe {quote(recipe)} -o {quote(output)}")


def _batches(recipe: Recipe, start: int) -> Iterator[dict[str, Any]]:
    """The whole batch of each step, from step number `start` on; the trainer cuts it into micro-batches again."""
    from cleave_dask.graph.building import batches

    parts = batches(recipe, start_step=start)
    while True:
        micro = list(islice(parts, recipe.train.accumulate))
        step = {}
        for name, first in micro[0].items():
            whole = first.new_empty((len(micro), *first.shape))
            for number, part in enumerate(micro):
                whole[number] = part[name]
            step[name] = whole.flatten(0, 1)
        yield step
