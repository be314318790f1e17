"""Whose results are checked, and who gets no more work: a policy without clock, chance or I/O of its own.

Under "always" every result is checked. Under "trust" the rule is BOINC's: a device with N valid results in a row is
checked while N < 10 (where BOINC would compute them twice), and from then on one result in N. A wrong result ends that
for good: the device is quarantined, and everything of it that nobody checked must be done again.

A device is known by whatever its caller takes for its identity: a certificate's name where there is one.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from cleave_dask.errors import InputError

Mode = Literal["always", "trust"]

PROBATION = 10
"""Valid results in a row from which on a device is not checked every time."""


class Trust:
    """What is known of devices by their results."""

    def __init__(self, mode: Mode = "always") -> None:
        if mode not in get_args(Mode):
            raise InputError(f"setting 'cleave.verify' is {mode!r}; give one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self.quarantined: dict[str, str] = {}  # reasons, by identity
        self._valid: Counter[str] = Counter()  # in a row, by identity

    def checks(self, identity: str, chance: float) -> bool:
        """Whether a device's next result is checked; `chance` is drawn from [0, 1) where the device cannot see it."""
        valid = self._valid[identity]
        return self.mode == "always" or valid < PROBATION or chance * valid < 1.0

    def passed(self, identity: str) -> None:
        """A result was checked and is right."""
        self._valid[identity] += 1

    def caught(self, identity: str, why: str) -> bool:
        """A result is wrong; whether it is the first of this device."""
        del self._valid[identity]
        first = identity not in self.quarantined
        self.quarantined.setdefault(identity, why)
        return first
