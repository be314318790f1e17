"""What churn costs systems that hold state on the devices: expected seconds per batch.

Devices leave or stall at `rate` per device and hour (slow ones are let off), so n devices fail F = n rate / 3600 times
a second. A batch takes T seconds in calm. Two published remedies, and a system gets the better one that it can use:

    restart      the batch begins again from a checkpoint of its start, which is granted to cost nothing to write, after
                 R seconds: E = (exp(F T) - 1) (1/F + R)                               Daly 2006, eq. 13
    recompute    another device takes the lost one's layers from a replica and computes again what was lost, in C
                 seconds for which all wait: E = T / (1 - F C)         Thorpe et al. 2023 (Bamboo), Jang et al. 2023

A failure is noticed after NOTICED seconds. A remedy that takes longer than failures leave time for never ends.
"""

from __future__ import annotations

from dataclasses import replace
from math import expm1, inf

from cleave_dask.fleet.churn import HARMFUL
from cleave_dask.formatting import duration
from cleave_dask.simulation.baselines.values import Result, infeasible

NOTICED = 1.0
"""Seconds until a lost device is noticed: quick, to be fair."""

_NEVER = 50.0  # failures per batch beyond which a restarted batch does not end: exp(50) tries


def restarted(calm: float, failures: float, reload: float) -> float:
    """Expected seconds of a batch that begins again at each failure; `failures` per second."""
    if failures <= 0:
        return calm
    if failures * calm > _NEVER:
        return inf
    return expm1(failures * calm) * (1 / failures + NOTICED + reload)


def recomputed(calm: float, failures: float, repair: float) -> float:
    """Expected seconds of a batch that waits at each failure until the lost part is there again."""
    left = 1 - failures * (NOTICED + repair)
    return calm / left if left > 0 else inf


def under_churn(result: Result, rate: float | None, *, reload: float, repair: float = inf) -> Result:
    """A result with the better remedy's cost; `reload` and `repair` are seconds after each failure.

    What one failure costs is noted whether there are any: a restart loses half a batch on average.
    """
    if result.seconds is None:
        return result
    again = NOTICED + reload + result.seconds / 2
    result = replace(result, restart=again, repair=NOTICED + repair if repair < inf else None)
    if not rate or result.seconds is None:
        return result
    failures = result.devices_used * rate * HARMFUL / 3600
    ways = {
        "restarts from checkpoints": restarted(result.seconds, failures, reload),
        "recomputes what is lost": recomputed(result.seconds, failures, repair),
    }
    way = min(ways, key=lambda name: ways[name])
    if ways[way] == inf:
        every, takes = duration(1 / failures), duration(result.seconds)
        return infeasible(
            result.system,
            f"a device of {result.devices_used:,} is lost every {every}, and a batch takes {takes}: "
            "neither restarts nor repairs come to an end",
        )
    return replace(result, seconds=ways[way], configuration=f"{result.configuration}; {way}")
