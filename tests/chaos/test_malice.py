"""Two of eight devices lie, one from the start, one from the middle: both are caught at once, and no bit changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, Worker

from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trace import ACCEPTED, Trace
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet
from tests import models
from tests.waiting import until, until_tasks

STEPS = 6
CHECKERS = 2  # tiles that the server looks at at once
PRELOAD = str(Path(__file__).with_name("lying.py"))


@contextmanager
def liars(fleet: LocalFleet, client: Client, files: dict[str, Path]) -> Iterator[None]:
    """Devices that lie while their file is there, beside those of a fleet."""
    model = fleet.worker_spec["device-0"]
    processes = []
    for name, file in files.items():
        spec = model["options"]["spec"]
        spec = replace(
            spec,
            options=(*spec.options, "--preload", PRELOAD),
            settings={**spec.settings, "CLEAVE_TEST_LIES": str(file)},
        )
        process = model["cls"](fleet.scheduler_address, **{**model["options"], "name": name, "spec": spec})
        fleet.sync(process.start)  # type: ignore[no-untyped-call]
        processes.append(process)
    try:
        until(lambda: set(files) <= set(facts_of(client)["device"]), "the liars have joined", seconds=120)
        yield
    finally:
        for process in processes:
            fleet.sync(process.close)  # type: ignore[no-untyped-call]


def train(client: Client, middle: Path | None = None) -> tuple[list[float], list[dict[str, Any]], Trace]:
    """Losses, records and trace of a short run on a fixed grid; from its middle on, a file is there."""
    module = models.llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    with Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(2, 2, 2))) as trainer:
        for step in range(STEPS):
            if middle is not None and step == STEPS // 2:
                middle.touch()
            losses.append(trainer.step(**models.tokens(seed=step)))
        return losses, trainer.records, trainer.trace


def test_two_of_eight_devices_lie(tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    early.touch()
    with LocalFleet(6) as fleet, fleet.get_client() as client:
        calm, _, _ = train(client)
        with liars(fleet, client, {"early": early, "late": late}):
            losses, records, trace = train(client, late)
            facts = facts_of(client)
        until_tasks(client, 0)
    assert losses == calm
    assert set(facts["quarantined"]) == {"early", "late"}
    assert not {"early", "late"} & set(facts["device"])
    assert all("is not the product of its operands" in why for why in facts["quarantined"].values())
    assert sum(record["rejected"] for record in records) >= 2
    assert records[-1]["rejected"] == 0
    wrong = Counter(row.device for row in trace if "is not the product" in row.outcome)
    assert set(wrong) == {"early", "late"}, "an honest device was accused"
    assert max(wrong.values()) <= CHECKERS, "asked again after its first wrong tile"
    taken = Counter(row.device for row in trace if row.outcome == ACCEPTED)
    assert taken["early"] == 0
    assert taken["late"] > 0


def catch_when_believed(dask_worker: Worker, device: str) -> None:
    """On the server: a device is caught with its next tile that is not checked."""
    runtime = dask_worker.extensions["cleave"]
    policy = runtime.trust.checks

    def checks(identity: str, chance: float) -> bool:
        check: bool = policy(identity, chance)
        if identity == device and not check:
            runtime.caught = asyncio.ensure_future(runtime._quarantine(identity, "it was seen to cheat"))
        return check

    runtime.trust.checks = checks


def test_a_step_that_believed_a_device_is_done_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_CLEAVE__VERIFY", "trust")
    with LocalFleet(2) as fleet, fleet.get_client() as client:
        calm, _, _ = train(client)
        (server,) = facts_of(client)["server"].values()
        client.run(catch_when_believed, device="device-1", workers=[server["address"]])
        losses, records, trace = train(client)
        facts = facts_of(client)
    assert losses == calm
    assert facts["quarantined"] == {"device-1": "it was seen to cheat"}
    assert set(records[0]["tiles_of"]) == {"device-0"}, "the first step was done again, by the other device"
    assert any(row.device == "device-1" and row.outcome == ACCEPTED for row in trace)
