"""Somebody who looks at a page of the dashboard until stdin is closed: python benchmarks/viewer.py URL [--browser]."""

from __future__ import annotations

import os
import sys
from threading import Thread


def read(url: str) -> None:
    """Take all that the page is sent, as a browser does, and draw nothing."""
    from bokeh.client import pull_session

    with pull_session(url=url) as session:
        print("open", flush=True)
        Thread(target=leave, daemon=True).start()
        session._connection.loop_until_closed()


def leave() -> None:
    """End this process when nobody wants it any more."""
    sys.stdin.read()
    os._exit(0)


def draw(url: str) -> None:
    """Open the page in a headless Chromium."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        program = os.environ.get("CLEAVE_BROWSER", "/usr/bin/chromium")
        page = playwright.chromium.launch(executable_path=program, args=flags).new_page()
        page.goto(url)
        print("open", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    (draw if "--browser" in sys.argv else read)(sys.argv[1])
