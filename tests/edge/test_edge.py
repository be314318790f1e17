"""The benchmark beside the peers, as far as it needs no network: settings, order of devices, clock, rows, report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import dask
import numpy as np
import pytest
import torch

from benchmarks.edge import peers, report, rows, stock
from benchmarks.edge.__main__ import main
from benchmarks.edge.ours import STATES, spent, union_seconds
from benchmarks.edge.pipeline import Stage
from benchmarks.edge.rank import BUILDERS, Job
from benchmarks.edge.rows import Row
from benchmarks.edge.settings import SETTINGS, TINY
from benchmarks.edge.systems import systems
from benchmarks.edge.timing import Effort, timed
from cleave_dask.runtime.trace import Trace


def test_every_setting_asks_for_systems_that_exist() -> None:
    known = systems()
    assert set(BUILDERS) <= set(known)
    for setting in SETTINGS.values():
        assert set(setting.systems) <= set(known), setting.name


def test_a_capped_device_cannot_hold_the_weights_of_a_layer() -> None:
    (capped,) = (setting for setting in SETTINGS.values() if setting.cap is not None)
    sizes = capped.llama
    layer = 4 * (4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.intermediate)
    assert {device.memory for device in capped.fleet.devices} == {capped.cap}
    assert capped.cap is not None
    assert capped.cap < layer


def test_slow_links_are_at_the_ends_of_one_pipeline_and_in_the_middle_of_two() -> None:
    setting = SETTINGS["mixed-8"]
    ups = [round(device.up.bandwidth * 8e-6) for device in peers.ranked("gpipe", setting)]
    assert ups == [4, 5, 10, 20, 20, 10, 5, 4]
    two = [round(device.up.bandwidth * 8e-6) for device in peers.ranked("data-pipeline", setting)]
    assert two == [20, 5, 4, 10] * 2
    for system in BUILDERS:
        names = [device.name for device in peers.ranked(system, setting)]
        assert len(set(names)) == len(names) == 8, system


def test_a_pipeline_has_no_more_stages_than_halves_and_no_fewer_micro_batches() -> None:
    assert len(peers.ranked("gpipe", SETTINGS["edge-32"])) == 8
    for setting in SETTINGS.values():
        stages = len(peers.ranked("1f1b", setting))
        counts = [int(variant.partition("/")[2]) for variant in peers.variants("1f1b", setting)]
        assert all(stages <= count <= setting.llama.batch for count in counts)


def test_stages_one_after_another_are_the_model() -> None:
    whole, cut = TINY.module(), TINY.module()
    hidden: torch.Tensor = TINY.tokens(0)["input_ids"]
    expected = whole(input_ids=hidden).logits
    for index in range(3):
        hidden = Stage(cut, index, 3)(hidden)
    torch.testing.assert_close(hidden, expected)


@pytest.mark.parametrize("variant", stock.VARIANTS)
def test_stock_products_are_products(variant: str) -> None:
    chance = np.random.default_rng(0)
    a, b = chance.normal(size=(19, 7)), chance.normal(size=(7, 10))
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_allclose(stock.PRODUCTS[variant](a, b, parts=8).compute(), a @ b)


def test_steps_are_counted_after_the_first() -> None:
    calls: list[int] = []

    def step(batch: dict[str, torch.Tensor]) -> float:
        calls.append(100)
        return float(len(calls))

    seen = timed(step, TINY, Effort(3, 1e6), counters=lambda: (sum(calls), 0))
    assert (seen.losses, len(seen.seconds), seen.counted, seen.warm) == ((1.0, 2.0, 3.0, 4.0), 3, (100, 0), True)
    cold = timed(step, TINY, Effort(3, 0.0), counters=lambda: (sum(calls),))
    assert (len(cold.losses), len(cold.seconds), cold.counted, cold.warm) == (1, 1, (100,), False)


def test_a_long_first_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.edge.timing.LONG", 0.0)
    seen = timed(lambda batch: 1.0, TINY, Effort(3, 1e6))
    assert (len(seen.losses), len(seen.seconds), seen.warm) == (3, 3, False)


def test_a_job_survives_its_way_to_the_process() -> None:
    job = Job("gpipe", ("gpipe/4",), TINY, Effort(3, 60.0), 1, 8, "10.64.0.1", 29500, "1.json", None)
    assert Job.of(json.dumps(asdict(job))) == job


def test_rows_are_kept_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert rows.load(file) == []
    first = Row("edge-8", "ddp", 64.0, 3, losses=(8.4, 8.3), down=(1.0, 2.0), up=(3.0, 4.0), memory=(5, 6))
    other = Row.failed("edge-8", "fsdp", "out of memory")
    rows.save(file, [first, other])
    assert rows.load(file) == [first, other]
    again = Row("edge-8", "ddp", 60.0, 3)
    assert rows.replaced(rows.load(file), again) == [other, again]


def test_a_wrong_loss_is_seen() -> None:
    true = (8.4, 8.3)
    assert rows.same_loss(Row("s", "ddp", losses=(8.4, 8.30001)), true)
    assert not rows.same_loss(Row("s", "ddp", losses=(8.4, 8.4)), true)
    assert rows.same_loss(Row("s", "ddp-bf16", losses=(8.4, 8.4)), true)
    assert not rows.same_loss(Row("s", "ddp"), true)


def test_the_report_shows_losers_and_failures_and_keeps_the_rest_of_the_document() -> None:
    setting = SETTINGS["edge-8"]
    made = [
        replace(
            Row("edge-8", "cleave", 30.0, 3, losses=(8.4,), down=(1e6,), up=(2e6,)),
            plan_seconds=25.0,
            bound_seconds=20.0,
            apart_seconds=24.0,
        ),
        Row("edge-8", "cleave-trust", 29.4, 3, losses=(8.4,)),
        Row("edge-8", "ddp", 60.0, 1, warm=False, losses=(9.4,)),
        Row.failed("edge-8", "fsdp", "RuntimeError: no memory"),
    ]
    titles = {name: system.title for name, system in systems().items()}
    text = report.markdown(setting, made, titles, (8.4,))
    assert "| cleave_dask, fp32 | 30 | 3 | 1.20 | 1.50 | 1.25 | 1 MB | 2 MB |  | same (0e+00) |" in text
    assert "1, cold" in text
    assert "DIFFERS" in text
    assert "- FSDP2: RuntimeError: no memory" in text
    assert "- checking every tile instead of few: 2.0% of a step's seconds" in text
    document = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.written(document, report.section(["new"])) == (
        f"before\n{report.BEGIN}\n\nnew\n{report.END}\nafter\n"
    )
    with pytest.raises(ValueError, match="no place"):
        report.written("nothing", "new")


def test_every_second_of_a_device_is_told_once() -> None:
    assert union_seconds(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0])) == 4.0
    tile = (1, "g", 0, "pi", 0.0, 1.0, 2.0, 3.0, 4.0, 0.5, "accepted", 1, 1)  # ends at 10.5
    beside = (1, "g", 1, "pi", 3.0, 0.0, 0.0, 4.0, 2.0, 0.0, "accepted", 1, 1)  # computes 3-7, uploads 7-9
    told = spent(Trace.of([tile, beside]), 12.0)
    assert list(told) == list(STATES)
    assert told == pytest.approx({"upload": 4.0, "compute": 3.0, "download": 2.0, "queued": 1.0, "nothing": 2.0})


def test_without_namespaces_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip` there
    monkeypatch.setattr(sys, "argv", ["edge", "--quick"])
    assert main() == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "install iproute2" in said
    assert "root" in said
    assert "--buckets" in said
