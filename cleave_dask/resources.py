"""Files that a user names: shipped recipes and fleets found by name, TOML read with errors that name the remedy."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from cleave_dask.errors import CleaveError, InputError

_PACKAGE = Path(__file__).parent
_LONGEST = 60  # characters of a given value that an error repeats


def graphs_folder() -> Path:
    """The folder of the shipped recipes and fleets: inside an installed package, or at the top of a source tree."""
    for folder in (_PACKAGE / "_graphs", _PACKAGE.parent / "graphs"):
        if folder.is_dir():
            return folder
    raise CleaveError(f"the recipes that ship with cleave_dask are missing beside {_PACKAGE}; reinstall the package")


def read_toml(given: str | os.PathLike[str], *, shipped: Path, error: type[InputError]) -> tuple[Path, dict[str, Any]]:
    """Find a TOML file by its path, or by its bare name among the `shipped` ones, and read it: its path and tables."""
    path = _find(given, shipped, error)
    try:
        return path, tomllib.loads(path.read_bytes().decode("utf-8"))
    except RecursionError:
        raise error(f"{path} is nested too deeply; a TOML file needs a few tables only") from None
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read: {reason}; give a TOML file such as those in {shipped}") from None


def shown(value: object) -> str:
    """A value as an error repeats it: its repr, cut short. Never fails, whatever the value is."""
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def expect(
    value: object, kind: type | tuple[type, ...], *, what: str, remedy: str, error: type[InputError] = InputError
) -> None:
    """Refuse a value of another kind: "the fleet is []; give a Fleet"."""
    if not isinstance(value, kind):
        raise error(f"{what} is {shown(value)}; {remedy}")


def is_number(value: object, *, least: float, most: float = inf) -> bool:
    """Whether a value is a finite number, from `least` on and below `most`."""
    number: Any = value
    return isinstance(value, Real) and bool(least <= number < most)


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint for a misspelled word: "did you mean 'hidden'? valid: 'ffn', 'hidden', ..."."""
    words = sorted(known)
    close = get_close_matches(given[:_LONGEST], words, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(map(repr, words)) or 'nothing'}"


def _find(given: str | os.PathLike[str], shipped: Path, error: type[InputError]) -> Path:
    """The file of that path, or else the shipped one of that bare name."""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise error(f"{shown(given)} is not the name of a file; give a path or one of the names in {shipped}")
    candidates = [text]
    if Path(text).name == text:
        candidates += [os.path.join(shipped, text), os.path.join(shipped, f"{text}.toml")]
    for candidate in candidates:
        if os.path.isfile(candidate):  # os.path, not Path: false for any name, however long or strange
            return Path(candidate)
    names = [path.stem for path in shipped.glob("*.toml")]
    raise error(f"there is no file {shown(text)}, nor anything shipped under that name; {nearest(text, names)}")
