"""The page of a live run in a real browser, and the report of it from a file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from distributed import Client
from playwright.sync_api import Browser, Page, expect

from cleave_dask.cli import cleave
from cleave_dask.simulation.local import LocalFleet
from tests.browser.conftest import SCREENSHOTS
from tests.browser.training import FLEET, BackgroundTraining

SOON = 120_000  # milliseconds; on a busy machine everything takes its time
GREY = "rgb(184, 184, 184)"

SOURCES = """
() => {
  const find = name => Bokeh.documents[0].get_model_by_name(name)
  const loss = find("loss").renderers[0].data_source.data
  const timeline = find("timeline").children
  const labels = timeline[0].renderers[0].data_source.data
  const tiles = timeline[1].renderers.find(r => "gemm" in r.data_source.data).data_source.data
  const table = find("devices").source.data
  const list = values => Array.from(values ?? [])
  return {
    losses: list(loss.loss), names: list(labels.name), colours: list(labels.colour),
    devices: list(table.device), states: list(table.state), shares: list(table.share),
    done_by: list(tiles.device), planned_for: list(tiles.planned), predicted: list(tiles.p_compute),
  }
}
"""


@dataclass(frozen=True)
class Live:
    """A fleet with a page that was opened before any training began."""

    fleet: LocalFleet
    client: Client
    page: Page
    errors: list[str]

    def facts(self) -> dict[str, Any]:
        """What the page has been sent."""
        found: dict[str, Any] = self.page.evaluate(SOURCES)
        return found

    def until(self, condition: str, *, argument: Any = None) -> None:
        """Wait until a condition on those facts holds, in JavaScript; `f` are the facts, `a` the argument."""
        code = f"a => {{ const f = ({SOURCES.strip()})(); return {condition} }}"
        self.page.wait_for_function(code, arg=argument, timeout=SOON, polling=250)


def new_page(browser: Browser) -> Page:
    page = browser.new_page(viewport={"width": 1400, "height": 1180})
    page.set_default_timeout(SOON)  # opening it may take long, too
    return page


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "tiny"


@pytest.fixture(scope="module")
def live(browser: Browser) -> Iterator[Live]:
    with LocalFleet(FLEET, shaping="buckets") as fleet, fleet.get_client() as client:
        page = new_page(browser)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield Live(fleet, client, page, errors)
        page.close()


def address(client: Client) -> str:
    link: str = client.dashboard_link
    return link.removesuffix("/status")


def test_the_page_is_one_of_dasks(live: Live) -> None:
    """Linked from the navigation bar of the others; parts of it are where JupyterLab's extension looks for them."""
    status = urlopen(f"{address(live.client)}/status", timeout=60).read().decode()
    assert '<a href="cleave">Cleave</a>' in status
    listed = json.load(urlopen(f"{address(live.client)}/individual-plots.json", timeout=60))
    parts = {name: path for name, path in listed.items() if "Cleave" in name}
    assert len(parts) == 5
    for path in ["/cleave", *parts.values()]:
        html = urlopen(f"{address(live.client)}{path}", timeout=60).read().decode()
        assert 'src="/' not in html, "behind a proxy only relative addresses work"
        assert 'href="/' not in html


def test_a_killed_device_turns_grey_and_others_do_its_tiles(live: Live, checkpoint: Path) -> None:
    page = live.page
    page.goto(f"{address(live.client)}/cleave")
    expect(page.locator(".empty").first).to_contain_text("no run yet", timeout=SOON)
    page.screenshot(path=SCREENSHOTS / "no-run.png")
    with BackgroundTraining(live.client, str(checkpoint)) as training:
        live.until("f.losses.length >= 2")
        before = live.facts()
        live.until("f.losses.length > a", argument=len(before["losses"]))
        assert len(set(live.facts()["losses"])) > 1, "the loss does not move"
        assert before["names"] == before["devices"] == [device.name for device in FLEET.devices]
        assert set(before["states"]) == {"here"}
        assert all(number is not None for number in before["predicted"][:5])
        live.until("f.shares.every(share => share > 0)")
        page.screenshot(path=SCREENSHOTS / "training.png", full_page=True)
        a_hidden_page_is_sent_nothing(live, training)

        training.began.clear()
        assert training.began.wait(120), "the next step does not begin"
        Event().wait(0.3 * min(training.steps))  # into the middle of it, where the device has tiles to do
        os.kill(live.fleet.pids["device-1"], signal.SIGKILL)
        live.until("f.states[1] === 'left'")
        live.until("f.planned_for.some((name, at) => name === 'device-1' && f.done_by[at] !== 'device-1')")
        after = live.facts()
        assert after["names"][1] == "device-1 (left)"
        assert after["colours"][1] != after["colours"][0], "its name is not grey"
        cell = page.locator("#cleave-devices .slick-row", has_text="device-1").locator("span").first
        expect(cell).to_have_css("color", GREY, timeout=SOON)
        left = page.locator("#cleave-events li[data-kind=left]")
        expect(left).to_contain_text("device-1 has left", timeout=SOON)
        expect(left).to_contain_text("of its tiles done by others", timeout=SOON)
        done = len(after["losses"])
        live.until("f.losses.length > a", argument=done)  # and it goes on
        expect(page.locator(".says")).to_contain_text("binds", timeout=SOON)
        page.screenshot(path=SCREENSHOTS / "killed.png", full_page=True)
    assert live.errors == []


HIDE = """
hidden => {
  Object.defineProperty(document, "hidden", {value: hidden, configurable: true})
  document.dispatchEvent(new Event("visibilitychange"))
}
"""


def a_hidden_page_is_sent_nothing(live: Live, training: BackgroundTraining) -> None:
    """While its tab is not the one that is shown; then it shows all that it has missed."""
    live.page.evaluate(HIDE, True)
    known = []
    for _ in range(2):  # what was on its way has arrived when the next step begins
        training.began.clear()
        assert training.began.wait(120), "the next step does not begin"
        known.append(len(live.facts()["losses"]))
    assert known[0] == known[1]
    live.page.evaluate(HIDE, False)
    live.until("f.losses.length > a", argument=known[1] + 1)


def test_the_report_opens_from_a_file(browser: Browser, checkpoint: Path, tmp_path: Path) -> None:
    if not checkpoint.exists():
        pytest.skip("it is of the run of the test before, which was not run")
    file = tmp_path / "report.html"
    result = CliRunner().invoke(cleave, ["report", str(checkpoint), "-o", str(file), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    page = new_page(browser)
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    expect(page.locator("[data-card=loss] .value")).to_have_text(f"{facts['loss']:.4f}", timeout=SOON)
    expect(page.locator("#cleave-events li[data-kind=left]")).to_contain_text("device-1", timeout=SOON)
    expect(page.locator("#cleave-devices .slick-row")).to_have_count(3, timeout=SOON)
    drawn = page.evaluate(SOURCES)
    assert drawn["losses"][-1] == facts["loss"]
    assert len(drawn["losses"]) == facts["step"]
    assert drawn["states"] == ["here", "left", "here"]
    assert len(drawn["done_by"]) > 0
    page.screenshot(path=SCREENSHOTS / "report.png", full_page=True)
    page.close()
    assert errors == []
    outside = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    assert outside == []
