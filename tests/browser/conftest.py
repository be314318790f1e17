"""A browser for the tests of pages: Chromium as the system has it, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

SCREENSHOTS = Path(__file__).parent / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
REMEDY = "install chromium (Debian: apt-get install chromium) or set CLEAVE_BROWSER to a Chromium or Chrome"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with its module: while it is there, playwright's event loop keeps other tests from running theirs."""
    given = os.environ.get("CLEAVE_BROWSER")
    found = given or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed here; {REMEDY}")
    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=list(QUIET), timeout=120_000)
        except Error as error:
            pytest.skip(f"{found} does not start ({error.message.splitlines()[0]}); {REMEDY}")
        yield browser
        browser.close()
