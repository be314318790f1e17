"""The settings of `cleave.yaml`, under the key `cleave` of Dask's configuration.

Importing this module registers the defaults, as Dask's own projects do: values from the user's files, the environment
and `dask.config.set` win over them, whether they were set before or after. Read settings in the command line, the
trainer and the preloads only; everything below takes values as arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from cleave_dask.errors import InputError

_FILE = Path(__file__).with_name("cleave.yaml")

dask.config.ensure_file(source=str(_FILE))  # a commented-out copy for the user to edit; never overwrites one
dask.config.update_defaults(yaml.safe_load(_FILE.read_text()))


def get(key: str) -> Any:
    """The setting `cleave.<key>`: `get("device.window")` is 3 unless somebody says otherwise."""
    try:
        return dask.config.get(f"cleave.{key}")
    except KeyError:
        raise InputError(f"there is no setting 'cleave.{key}'; {_FILE.name} lists all of them") from None


def whole(key: str) -> int:
    """A setting that is a whole number, 1 or more."""
    found = whole_or_none(key)
    if found is None:
        raise InputError(f"setting 'cleave.{key}' is None; give a whole number, 1 or more")
    return found


def whole_or_none(key: str) -> int | None:
    """The same of a setting that may be left open."""
    value = get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"setting 'cleave.{key}' is {value!r}; give a whole number, 1 or more")
    return value


def nbytes(key: str) -> int:
    """A setting that is an amount of memory, in bytes: 256 MB is 256000000."""
    value = get(key)
    try:
        return int(parse_bytes(value))
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"setting 'cleave.{key}' is {value!r}; give a size such as 256 MB") from None


def number(key: str, *, least: float) -> float:
    """A setting that is a number, `least` or more."""
    value = get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
        raise InputError(f"setting 'cleave.{key}' is {value!r}; give a number, {least:g} or more")
    return float(value)


def seconds(key: str) -> float:
    """A setting that is a duration, in seconds: 500ms is 0.5."""
    value = get(key)
    try:
        return float(parse_timedelta(value))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"setting 'cleave.{key}' is {value!r}; give a duration such as 10s or 500ms") from None
