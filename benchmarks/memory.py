"""Memory of processes as Linux counts it: resident bytes, their peak since a reset, and a hard limit."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path


def resident(pid: int | str = "self") -> int:
    """Resident bytes of a process."""
    return _status(pid, "VmRSS")


def peak(pid: int | str = "self") -> int:
    """Peak resident bytes of a process, since it began or since `reset_peak`."""
    return _status(pid, "VmHWM")


def data(pid: int | str = "self") -> int:
    """Bytes that a process has asked for, touched or not: what `limit_data` limits."""
    return _status(pid, "VmData")


def reset_peak(pid: int | str = "self") -> None:
    """Let the peak begin anew with what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def limit_data(nbytes: int, pid: int = 0) -> None:
    """From here on, whoever would have more than so many bytes gets an error instead. 0 is this process."""
    resource.prlimit(pid or os.getpid(), resource.RLIMIT_DATA, (nbytes, resource.RLIM_INFINITY))


def give_back() -> None:
    """Return freed memory of this process to the system, so that it does not count."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/{pid}/status: the process has ended")
