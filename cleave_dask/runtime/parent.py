"""Ends a process when the one that started it is gone, however it went. Preload of local fleets.

A process that is killed with SIGKILL cannot clean up after itself, so its children look for themselves.
"""

from __future__ import annotations

import os
from threading import Thread
from time import sleep
from typing import Any

VARIABLE = "CLEAVE_PARENT"
"""Environment variable with the process id to live with."""


def dask_setup(_: Any) -> None:
    """Watch the parent from a thread of its own."""
    Thread(target=_watch, args=(int(os.environ[VARIABLE]),), daemon=True, name="cleave-parent").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        sleep(0.5)
    os._exit(1)
