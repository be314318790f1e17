"""What training shows while it runs: a bar on a terminal, plain lines on a pipe, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from cleave_dask.cli.frame import make_console, on_terminal, print_json
from cleave_dask.formatting import duration, quantity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

KEYS = ("step", "loss", "seconds", "down_bytes", "up_bytes", "tiles", "retries", "rejected")
"""What is told of each step, in JSON."""

_LINES = 20  # plain lines of a whole run, if steps are quick
_SILENCE = 10.0  # seconds without a line before the next step gets one

Record = Mapping[str, Any]


class View:
    """Shows how training goes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()

    def begin(self, done: int, total: int, tokens: int) -> None:
        """Training goes from step `done` to step `total`, with that many tokens in each."""
        self.first, self.total, self.tokens = done + 1, total, tokens

    def end(self) -> None:
        """Training is over, for good or ill."""

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        raise NotImplementedError

    def step(self, record: Record) -> None:
        """A step is done."""
        raise NotImplementedError


class JsonLines(View):
    """One object for each step on stdout; everything else goes to stderr."""

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        click.echo(text, err=True)

    def step(self, record: Record) -> None:
        """A step is done."""
        print_json({key: record[key] for key in KEYS})


class PlainLines(View):
    """A line every few steps, and at least one in a while, without colours or control characters."""

    _printed = 0.0

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        click.echo(text)

    def step(self, record: Record) -> None:
        """A step is done."""
        number = record["step"]
        every = max(1, (self.total - self.first + 1) // _LINES)
        silent = monotonic() - self._printed >= _SILENCE
        if silent or number in (self.first, self.total) or number % every == 0:
            self._printed = monotonic()
            click.echo(f"step {number:>{len(str(self.total))}}/{self.total}  {_facts(record, self.tokens)}")


class Bar(View):
    """A progress bar, and below it the latest step."""

    def __enter__(self) -> Self:
        self._console = make_console()
        self._progress: Progress | None = None
        return self

    def end(self) -> None:
        """Training is over, for good or ill: the bar stays as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def begin(self, done: int, total: int, tokens: int) -> None:
        """Training goes from step `done` to step `total`, with that many tokens in each."""
        super().begin(done, total, tokens)
        self._progress = _make_bar(self._console)
        self._task = self._progress.add_task("step", total=total, completed=done, facts="")
        self._progress.start()

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        self._console.print(text, markup=False)

    def step(self, record: Record) -> None:
        """A step is done."""
        assert self._progress is not None
        self._progress.update(self._task, completed=record["step"], facts=_facts(record, self.tokens))


def choose(*, as_json: bool) -> View:
    """The way to show progress on this stdout."""
    if as_json:
        return JsonLines()
    return Bar() if on_terminal() else PlainLines()


def _facts(record: Record, tokens: int) -> str:
    """One step in one line."""
    facts = [
        f"loss {record['loss']:.4f}",
        f"{tokens / record['seconds']:,.0f} tokens/s",
        f"{quantity(record['down_bytes'], 'B')} down",
        f"{quantity(record['up_bytes'], 'B')} up",
        f"{record['tiles']:,} tiles",
        f"{duration(record['seconds'])}",
    ]
    return "  ".join(facts + [f"{record[key]:,} {key}" for key in ("retries", "rejected", "reused") if record.get(key)])


def _make_bar(console: Console) -> Progress:
    """A bar with the times on its line and the facts of the latest step below, so that both fit into 80 columns."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class TwoLines(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            yield from (Text(task.fields["facts"]) for task in self.tasks if task.fields["facts"])

    left = TimeRemainingColumn(compact=True)
    return TwoLines(
        "step", MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), "gone,", left, "left", console=console
    )
