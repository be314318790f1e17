"""Peers from outside: which processes of theirs run on which device, and what becomes of their answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.edge.processes import PeerError, Processes
from benchmarks.edge.rank import Job
from benchmarks.edge.rows import Row, best
from benchmarks.edge.settings import Setting
from benchmarks.edge.timing import Effort
from cleave_dask.fleet.devices import Device
from cleave_dask.simulation.network import Network

PORT = 29500
START = 300.0
"""Seconds that processes may take to import torch and to find each other, on a busy machine."""

MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back to the system, so that peaks are of what is in use."""


def variants(system: str, setting: Setting) -> tuple[str, ...]:
    """The ways in which a system is run; the fastest is its row."""
    batch, stages = setting.llama.batch, len(ranked(system, setting))
    if system == "gpipe":
        return tuple(f"gpipe/{number}" for number in (4, 8, 16) if number <= batch)
    if system == "1f1b":
        return tuple(f"1f1b/{number}" for number in (8, 16) if stages <= number <= batch)
    if system == "data-pipeline":
        return tuple(f"{name}/{number}" for name in ("gpipe", "1f1b") for number in (4, 8) if number <= batch // 2)
    return ("",)


def ranked(system: str, setting: Setting) -> list[Device]:
    """Devices by rank. Of pipelines as many as there are halves of layers, each in the place that suits it best.

    A stage in the middle of one pipeline sends hidden states both ways, one at an end only one way: slow links go to
    the ends. Of two pipelines the ends exchange the gradients of embedding and head: slow links go to the middle.
    """
    devices = sorted(setting.fleet.devices, key=lambda device: device.up.bandwidth)
    halves = 2 * setting.llama.layers
    if system in ("gpipe", "1f1b"):
        devices = devices[-halves:]
        return [*devices[::2], *reversed(devices[1::2])]
    if system == "data-pipeline":
        devices = devices[-2 * halves :][len(devices) % 2 :]
        fast = devices[::-1]
        rows = [fast[replica::2] for replica in range(2)]
        return [device for row in rows for device in (*row[::2], *reversed(row[1::2]))]
    return list(setting.fleet.devices)


def run(system: str, setting: Setting, effort: Effort) -> Row:
    """One peer on one setting, in a network of its own."""
    devices, ways = ranked(system, setting), variants(system, setting)
    if not ways:
        return Row.failed(setting.name, system, f"{len(devices)} stages need as many micro-batches")
    with Network(setting.fleet) as network, Processes() as processes:
        files = [processes.folder / f"{rank}.json" for rank in range(len(devices))]
        for rank, (device, file) in enumerate(zip(devices, files, strict=True)):
            job = Job(
                *(system, ways, setting.llama, effort, rank, len(devices)),
                *(network.address(devices[0].name), PORT, str(file), setting.cap),
            )
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.edge.rank", json.dumps(asdict(job))]
            surroundings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **MALLOC}
            processes.start(f"rank {rank}", [*network.enter(device.name), *command], surroundings)
        processes.wait(START + len(ways) * 3 * effort.budget)
        return _row(system, setting, _answers(files, processes))


def _answers(files: Iterable[Path], processes: Processes) -> list[Any]:
    """What every rank says; if one could not, the first that failed is the reason."""
    answers = [json.loads(file.read_text()) for file in files if file.exists()]
    errors = sorted((answer for answer in answers if "error" in answer), key=lambda answer: float(answer["at"]))
    if errors:
        raise PeerError(errors[0]["error"])
    if ended := processes.failed():
        raise PeerError(f"{ended[0]} ended: {processes.last_words(ended[0])}")
    return answers


def _row(system: str, setting: Setting, answers: list[Any]) -> Row:
    """The fastest variant; the others are named beside it."""
    by_variant = list(zip(*(answer["variants"] for answer in answers), strict=True))
    seconds = [(str(ranks[0]["variant"]), ranks[0]["seconds"]) for ranks in by_variant]
    place = best(seconds)
    ranks = by_variant[place]
    others = ", ".join(f"{name} {median(took):.1f} s" for name, took in seconds if name != seconds[place][0])
    known = [
        [loss for loss in losses if loss is not None] for losses in zip(*(r["losses"] for r in ranks), strict=True)
    ]
    missing = len(setting.fleet) - len(ranks)
    notes = (
        f"{seconds[place][0]} micro-batches" if seconds[place][0] else "",
        f"others: {others}" if others else "",
        f"{missing} devices idle: it has {2 * setting.llama.layers} halves of layers" if missing else "",
    )
    return Row(
        setting.name,
        system,
        seconds=median(seconds[place][1]),
        steps=len(seconds[place][1]),
        warm=ranks[0]["warm"],
        losses=tuple(sum(losses) / len(losses) for losses in known),
        down=tuple(rank["down"] for rank in ranks),
        up=tuple(rank["up"] for rank in ranks),
        memory=tuple(rank["memory"] for rank in ranks),
        note="; ".join(note for note in notes if note),
    )
