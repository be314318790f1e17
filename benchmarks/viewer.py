"""Somebody who looks at a page of the dashboard: python benchmarks/viewer.py URL [--browser].

Each line on stdin has the page "open", before somebody's eyes, or "hidden" behind another tab; the answer on stdout is
that line. The end of stdin is the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClosedError, websocket_connect


class Reader:
    """Takes all that the page is sent, as a browser does, and draws nothing."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket: Any = None
        self._root = ""  # id of the first part of the page, which knows whether it is hidden

    async def open(self) -> None:
        """Get the page and connect to its session."""
        page = (await AsyncHTTPClient().fetch(self.url, request_timeout=120)).body.decode()
        token, root = (re.search(pattern, page) for pattern in (r'"token":"([^"]+)"', r'"roots":{"(\w+)"'))
        assert token is not None, f"{self.url} is no page of bokeh"
        assert root is not None
        self._root = root[1]
        address = HTTPRequest(self.url.replace("http", "ws", 1) + "/ws", connect_timeout=120)
        self._socket = await websocket_connect(address, subprotocols=["bokeh", token[1]])
        await self._socket.read_message()  # it is there, and can be talked to
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        with suppress(WebSocketClosedError):
            while await self._socket.read_message() is not None:
                pass

    async def hide(self, hidden: bool) -> None:
        """Say what a browser says when another tab is shown, or this one again."""
        change = {"kind": "ModelChanged", "model": {"id": self._root}, "attr": "tags", "new": ["hidden"] * hidden}
        for part in ({"msgid": "1", "msgtype": "PATCH-DOC"}, {}, {"events": [change]}):
            await self._socket.write_message(json.dumps(part))


class Drawer:
    """The page in a headless Chromium."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._page: Any = None

    async def open(self) -> None:
        """Go to the page."""
        from playwright.async_api import async_playwright

        flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        program = os.environ.get("CLEAVE_BROWSER", "/usr/bin/chromium")
        playwright = await async_playwright().start()
        self._page = await (await playwright.chromium.launch(executable_path=program, args=flags)).new_page()
        await self._page.goto(self.url)

    async def hide(self, hidden: bool) -> None:
        """Have the page believe that another tab is shown, or this one again."""
        believe = f'Object.defineProperty(document, "hidden", {{value: {json.dumps(hidden)}, configurable: true}})'
        await self._page.evaluate(f'{believe}; document.dispatchEvent(new Event("visibilitychange"))')


async def obey(viewer: Reader | Drawer) -> None:
    """Open, hide and show as told."""
    await viewer.open()
    while line := await asyncio.to_thread(sys.stdin.readline):
        await viewer.hide(line.strip() == "hidden")
        print(line, end="", flush=True)


class Viewer:
    """Such a process, as others see it."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process

    def turn(self, state: str) -> None:
        """Have the page "open" or "hidden"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{state}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != state:
            raise SystemExit("nobody can look at the page")


@contextmanager
def viewer(url: str, *, browser: bool = False) -> Iterator[Viewer]:
    """Somebody who can look at a page while the block runs."""
    program = [sys.executable, str(Path(__file__)), url, *(["--browser"] if browser else [])]
    with Popen(program, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield Viewer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(obey((Drawer if "--browser" in sys.argv else Reader)(sys.argv[1])))
    os._exit(0)  # a browser would be waited for
