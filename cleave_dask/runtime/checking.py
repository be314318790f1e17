"""What the fields of a message from a device may be: a value in, the value that is acted on out, or `Refused`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from math import isfinite
from typing import Any

from cleave_dask.runtime.decoding import OPAQUE, Refused

Message = dict[str, Any]
Check = Callable[[Any], Any]

LONGEST = 2000
"""Letters of a text at most."""

MANY = 4096
"""Entries of a list at most."""

REASON: Mapping[str, tuple[float, float]] = {
    "flops": (1e3, 1e24),
    "down": (1.0, 1e15),
    "up": (1.0, 1e15),
    "latency": (0.0, 3600.0),
    "memory": (1e6, 1e18),
    "cores": (0.0, 1e6),
}
"""Within which a device's figures are planned with, in base units: others would only break what is computed of them."""

LONGEST_TASK = 1e7
"""Seconds that a task may say it took."""

_ADDRESS = re.compile(r"(?:tls|tcp)://(?:\[([0-9a-f:.]+)\]|([0-9.]+)):([1-9][0-9]{0,4})")


def text(value: Any) -> str:
    """A text of bounded length."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise Refused(f"{_shown(value)} where a text was expected")
    return value


def whole(value: Any) -> int:
    """A whole number, not below zero."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise Refused(f"{_shown(value)} where a whole number was expected")
    return value


def number(value: Any) -> float:
    """A number within reason."""
    if type(value) not in (int, float) or not isfinite(value):
        raise Refused(f"{_shown(value)} where a number was expected")
    return float(value)


def address(value: Any) -> str:
    """Where a worker listens, in the one way to write it: Dask would take names of workers and hosts for it too."""
    told = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if told is not None:
        host = told[1] or told[2]
        try:
            if str(ip_address(host)) == host and int(told[3]) < 1 << 16:
                return told[0]
        except ValueError:
            pass
    return str(_refuse(value, "an address such as tls://192.0.2.10:40000"))


def said(value: Any) -> str:
    """What is shown to people: one line, without what a terminal would act on."""
    return "".join(letter if letter.isprintable() else " " for letter in str(value)[:500])


def flag(value: Any) -> bool:
    """Yes or no."""
    return bool(value) if type(value) in (bool, int) else _refuse(value, "yes or no")


def span(value: Any) -> tuple[int, int]:
    """A range: start and stop."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise Refused(f"{_shown(value)} where a range was expected")
    return whole(value[0]), whole(value[1])


def wholes(value: Any) -> list[int]:
    """A list of whole numbers."""
    if not isinstance(value, tuple) or len(value) > 64 * MANY:
        raise Refused(f"{_shown(value)} where a list was expected")
    return [whole(one) for one in value]


def listed(value: Any) -> list[Any]:
    """A list of arrays; what each is, is looked at where it is used."""
    return list(value) if isinstance(value, tuple) and len(value) <= 64 else _refuse(value, "a list of arrays")


def plain(value: Any, depth: int = 4) -> Any:
    """Numbers and short texts, in small groups; anything else is left out."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= LONGEST):
        return value
    if isinstance(value, int | float):
        return value if -(2**63) <= value <= 2**63 else 0
    if depth and isinstance(value, dict) and len(value) <= MANY:
        return {name: plain(one, depth - 1) for name, one in value.items() if isinstance(name, str) and len(name) < 200}
    if depth and isinstance(value, tuple) and len(value) <= MANY:
        return [plain(one, depth - 1) for one in value]
    return None


def group(value: Any) -> dict[str, Any]:
    """A dict of plain values."""
    told: dict[str, Any] = plain(value) if isinstance(value, dict) else _refuse(value, "a group of values")
    return told


def key(value: Any) -> Any:
    """The name of a task."""
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > 8 or not all(type(part) is int or (isinstance(part, str) and len(part) <= 200) for part in parts):
        raise Refused(f"{_shown(value)} where the name of a task was expected")
    return value


def _refuse(value: Any, wanted: str) -> Any:
    raise Refused(f"{_shown(value)} where {wanted} was expected")


def _shown(value: Any) -> str:
    return "something unreadable" if value is OPAQUE else f"{type(value).__name__} {repr(value)[:40]}"


def metrics(value: Any) -> dict[str, Any]:
    """What a device says of its own load, without what the scheduler would add up without end."""
    told = group(value)
    bandwidth = told.get("bandwidth")
    total = bandwidth.get("total") if isinstance(bandwidth, dict) else None
    told["bandwidth"] = {"total": total if isinstance(total, int | float) else 0.0, "workers": {}, "types": {}}
    told["digests_total_since_heartbeat"] = {}
    for name in ("memory", "cpu", "managed_bytes", "event_loop_interval", "time"):
        told[name] = told[name] if type(told.get(name)) in (int, float) else 0
    for name, wanted in (("task_counts", ()), ("spilled_bytes", ("memory", "disk")), ("transfer", _TRANSFER)):
        counts = told.get(name) if isinstance(told.get(name), dict) else {}
        numbers = {one: many for one, many in (counts or {}).items() if type(many) in (int, float)}
        told[name] = dict.fromkeys(wanted, 0) | numbers
    return told


_TRANSFER = ("incoming_bytes", "incoming_count", "incoming_count_total", "outgoing_bytes", "outgoing_count")


def facts(value: Any) -> dict[str, Any]:
    """What a device says of itself as it joins: that it is a device, and its figures."""
    told = group(value).get("cleave")
    if told is None:
        return {}
    if not isinstance(told, dict) or told.get("role") != "device":
        raise Refused("a device that says it is something else")
    for figure, (least, most) in REASON.items():
        if figure in told and not least <= number(told[figure]) <= most:
            raise Refused(f"{figure} of {told[figure]}")
    return {"cleave": {**told, "version": text(told.get("version")), "kernel": text(told.get("kernel"))}}


def startstops(value: Any) -> list[dict[str, Any]]:
    """When a task was computed; nothing else is timed."""
    given = value if isinstance(value, tuple) and len(value) <= 64 else ()
    timed = [one for one in given if isinstance(one, dict) and one.get("action") == "compute"]
    spans = [(number(one.get("start")), number(one.get("stop"))) for one in timed]
    return [
        {"action": "compute", "start": start, "stop": stop}
        for start, stop in spans
        if 0 <= start <= stop <= start + LONGEST_TASK
    ]


def status(value: Any) -> str:
    """What a worker may become."""
    known = ("init", "running", "paused", "closing_gracefully", "closing")
    return value if isinstance(value, str) and value in known else _refuse(value, "a status")


def replaced_by(value: Any) -> Check:
    """A field that the sender has no say in."""
    return lambda _: value


def optional(check: Check) -> Check:
    """A field that may be missing or empty."""
    return lambda value: None if value is None else check(value)


def chosen(message: Mapping[str, Any], fields: Mapping[str, Check]) -> Message:
    """The fields of a message, each as its check gives it; one that is unknown or missing is refused."""
    more = message.keys() - fields.keys()
    if more:
        raise Refused(f"a message with a field {_shown(min(map(str, more)))}")
    missing = [name for name in fields if name not in message]
    if missing:
        raise Refused(f"a message without {missing[0]}")
    return {name: check(message[name]) for name, check in fields.items()}
