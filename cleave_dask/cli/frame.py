"""What all commands share: options, errors as one line with their exit code, quiet logs."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cleave_dask.cli.interrupts import EXIT_CODE, Interrupts
from cleave_dask.errors import CleaveError, InputError
from cleave_dask.graph.ir import WIRES
from cleave_dask.resources import graphs_folder

if TYPE_CHECKING:
    from rich.console import Console

    from cleave_dask.views.picture import Picture

Function = TypeVar("Function", bound=Callable[..., Any])

_DEBUG = "cleave_dask.debug"


class CleaveGroup(click.Group):
    """A group whose commands end with one line on stderr and an exit code, whoever calls it: `cleave` or `dask`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections: dict[str, tuple[click.Command, ...]] = {}

    def add_section(self, title: str, commands: tuple[click.Command, ...]) -> None:
        """Add commands that belong together; help lists them in this order."""
        self._sections[title] = commands
        for command in commands:
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands section by section."""
        wide = max((len(command.name or "") for section in self._sections.values() for command in section), default=0)
        for title, commands in self._sections.items():
            with formatter.section(title):
                rows = [(f"{command.name:<{wide}}", command.get_short_help_str(90)) for command in commands]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        with Interrupts() as interrupts:
            ctx.obj = interrupts
            try:
                return super().invoke(ctx)
            except (click.exceptions.Exit, click.exceptions.Abort, click.ClickException):
                raise
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has left; so do we
                ctx.exit(1)
            except (KeyboardInterrupt, Exception) as error:
                if ctx.meta.get(_DEBUG):
                    traceback.print_exc()
                if interrupts.count or isinstance(error, KeyboardInterrupt):
                    click.echo("interrupted", err=True)
                    ctx.exit(EXIT_CODE)
                known = next((cause for cause in _causes(error) if isinstance(cause, CleaveError)), None)
                click.echo(f"error: {known or _unexpected(error)}", err=True)
                ctx.exit(known.exit_code if known else 1)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: Dask wraps what goes wrong while a cluster starts."""
    while error is not None:
        yield error
        error = error.__cause__


def _unexpected(error: BaseException) -> str:
    """An error that is not one of ours, for a person."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("cleave_dask"):
        return f"this command needs {error.name}; install it with: pip install 'cleave-dask[train]'"
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error}; set CLEAVE_DEBUG=1 to see where it comes from"


def debug_option(function: Function) -> Function:
    """`--debug`, before or after the name of the command."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    return click.option(
        "--debug",
        is_flag=True,
        envvar="CLEAVE_DEBUG",
        expose_value=False,
        callback=remember,
        help="Show where an error comes from.",
    )(function)


def json_option(function: Function) -> Function:
    """`--json`: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, nothing else.")(function)


def recipe_argument(function: Function) -> Function:
    """The recipe: a file, or the name of one that ships with the package."""
    return click.argument("recipe", metavar="RECIPE", shell_complete=_complete_recipe)(function)


def recipe_option(function: Function) -> Function:
    """The recipe of something that was trained before."""
    return click.option(
        "--recipe",
        required=True,
        metavar="RECIPE",
        shell_complete=_complete_recipe,
        help="The recipe that it was trained with.",
    )(function)


def fleet_option(*, required: bool, explain: str) -> Callable[[Function], Function]:
    """The fleet: a file, or the name of one that ships with the package."""
    return click.option("--fleet", metavar="FLEET", required=required, shell_complete=_complete_fleet, help=explain)


def wire_option(function: Function) -> Function:
    """`--wire`: half the bytes for the same step."""
    return click.option(
        "--wire",
        type=click.Choice(WIRES),
        help="Round numbers of gemms to it on their way between server and devices.  [default: the recipe's]",
    )(function)


def plot_option(explain: str) -> Callable[[Function], Function]:
    """`--plot`: a picture, SVG or PNG by its name."""

    def named(_: click.Context, __: click.Parameter, file: Path | None) -> Path | None:
        if file is not None and file.suffix not in (".svg", ".png"):
            better = str(file.with_suffix(".png")) if file.stem else "picture.png"
            raise InputError(f"cannot draw {str(file)!r}: pictures are SVG or PNG; name it {better!r}")
        return file

    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--plot", metavar="FILE.svg|.png", type=path, callback=named, help=explain)


def write_picture(file: Path, picture: Picture) -> None:
    """A picture in the format that the name of its file says."""
    try:
        file.write_bytes(picture.svg.encode() if file.suffix == ".svg" else picture.png)
    except OSError as error:
        raise InputError(f"cannot write {str(file)!r}: {error.strerror}; choose another --plot") from error


def _complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _completions("", incomplete)


def _complete_fleet(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _completions("fleets", incomplete)


def _completions(folder: str, incomplete: str) -> list[CompletionItem]:
    """Names that ship with the package, then files."""
    names = sorted(path.stem for path in (graphs_folder() / folder).glob("*.toml"))
    shipped = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return shipped or [CompletionItem(incomplete, type="file")]


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout, at once."""
    click.echo(json.dumps(value))


def on_terminal() -> bool:
    """Whether stdout is a terminal that can redraw a line."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what takes its time, and for how long it has, to whoever looks at a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def make_console(*, width: int = 100) -> Console:
    """A rich console on stdout: no colours, no control characters and so wide unless it is a terminal.

    Names are printed as they are: a device may be called "[/b]".
    """
    from rich.console import Console

    if on_terminal():
        return Console(highlight=False, markup=False, emoji=False)
    return Console(
        force_terminal=False,
        color_system=None,
        highlight=False,
        markup=False,
        emoji=False,
        width=width,
        soft_wrap=True,
    )


def quiet_libraries() -> None:
    """Keep logs and bars of Dask and transformers off the terminal, unless --debug or the user's settings want them.

    What goes wrong is told in one line by the command itself, and processes of a fleet have log files. To be called
    before these libraries are imported, which is when they read this.
    """
    import dask.config

    if click.get_current_context().meta.get(_DEBUG):
        return
    warnings.filterwarnings("ignore", "Mismatched versions found")  # devices are strangers; ours are compared elsewhere
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not any(dask.config.get(key, None) for key in ("logging", "distributed.logging", "logging-file-config")):
        names = ("distributed", "distributed.client", "distributed.gc", "tornado.application", "asyncio")
        dask.config.set({"logging": dict.fromkeys(names, "critical")})
