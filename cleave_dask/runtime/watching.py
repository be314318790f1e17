"""What a page on the scheduler's dashboard shows: facts of plugin and server, asked for while somebody looks."""

from __future__ import annotations

import asyncio
from time import thread_time
from typing import Any

import numpy as np
from distributed import Scheduler

PATIENCE = 10.0
"""Seconds that the server may take for an answer; it may be in the middle of a long op."""


class Feed:
    """Asks for what is new since it last asked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._run: str | None = None
        self._since = {"rows": 0, "records": 0, "program": 0}
        self._heard = 0.0  # when the last event happened that was told

    async def look(self) -> dict[str, Any]:
        """Devices, events and the newest run, as they are now.

        "devices" and "late" are complete; "events" and what is under "run" is new since the last look. "why" says what
        is missing if there is no run to look at. "cpu" are the seconds that scheduler and server spent on it.
        """
        began = thread_time()
        facts, servers = self._own_facts()
        facts["cpu"] = thread_time() - began  # not over the wait for an answer: the scheduler does other things then
        if servers:
            answer = await self._ask(servers[0])
            facts["cpu"] += answer.get("run", {}).get("cpu", 0.0)
            facts |= answer
        return facts

    def _own_facts(self) -> tuple[dict[str, Any], list[str]]:
        """What the scheduler itself knows, and where its servers are."""
        plugin: Any = self.scheduler.plugins.get("cleave-steering")
        if plugin is None:
            preload = "--preload cleave_dask.runtime.scheduler"
            return {"why": f"this scheduler steers no training; start it with {preload}"}, []
        info = plugin.info()
        facts = {
            "devices": info["device"],
            "silent": info["silent"],
            "late": info["late"],
            "quarantined": info["quarantined"],
            "events": self._events(),
            "scheduler": self._load(),
        }
        servers = [server["address"] for server in info["server"].values()]
        if not servers:
            facts["why"] = "no server has joined; `cleave serve` and `cleave train` start one"
        return facts, servers

    async def _ask(self, server: str) -> dict[str, Any]:
        try:
            call = self.scheduler.rpc(server).cleave_watch(run=self._run, since=self._since)
            answer: dict[str, Any] | None = await asyncio.wait_for(call, PATIENCE)
        except (OSError, TimeoutError) as error:
            return {"why": f"the server at {server} does not answer ({type(error).__name__})"}
        if answer is None or answer.get("run") is None:
            return {"why": "no run yet: start one with `cleave train tiny-llama`, or with a Trainer of your own"}
        self._run, self._since = answer["run"], answer.pop("next")
        columns = answer.get("rows", {}).items()  # plain bytes: a scheduler deserialises nothing
        answer["rows"] = {name: np.frombuffer(numbers, dtype) for name, (dtype, numbers) in columns} or None
        return {"run": answer}

    def _events(self) -> list[tuple[float, dict[str, Any]]]:
        """What happened to the fleet since the last look, oldest first."""
        events = self.scheduler.get_events("cleave")
        new = []
        for when, event in reversed(events):
            if when <= self._heard:
                break
            new.append((when, event))
        self._heard = new[0][0] if new else self._heard
        return new[::-1]

    def _load(self) -> float:
        """How busy the scheduler's one thread is, of 1."""
        recent = self.scheduler.monitor.quantities["cpu"]
        return float(recent[-1]) / 100 if recent else 0.0
