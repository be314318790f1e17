"""Memory of processes as Linux counts it: resident bytes, and their peak since a reset."""

from __future__ import annotations

import ctypes
from pathlib import Path


def resident(pid: int | str = "self") -> int:
    """Resident bytes of a process."""
    return _status(pid, "VmRSS")


def peak(pid: int | str = "self") -> int:
    """Peak resident bytes of a process, since it began or since `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int | str = "self") -> None:
    """Let the peak begin anew with what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def give_back() -> None:
    """Return freed memory of this process to the system, so that it does not count."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/{pid}/status: the process has ended")
