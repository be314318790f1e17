"""The page `/cleave` of Dask's own dashboard: preload of a stock scheduler, beside the plugin.

    dask scheduler --preload cleave_dask.runtime.scheduler --preload cleave_dask.views.dashboard

It needs bokeh, as Dask's dashboard does. Parts of it are pages of their own, `/individual-cleave-...`, which the Dask
extension of JupyterLab lists. All pages of a scheduler share one feed, which asks for facts only while a page is open,
and no more often than that it takes SHARE of a core.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import Scheduler

from cleave_dask.runtime.watching import Feed
from cleave_dask.views.story import Story

if TYPE_CHECKING:
    from bokeh.document import Document

logger = logging.getLogger(__name__)

SHARE = 0.005
"""Of one core that all open pages of a scheduler may take, server included; with more to show they are slower."""

SHORTEST, LONGEST = 0.5, 10.0  # seconds between two looks
CHECK = 250  # milliseconds between two questions whether there is something new to show

PAGE = "/cleave"
PARTS = ("headline", "loss", "binding", "timeline", "devices", "events")


class Live:
    """One story for all pages of a scheduler, kept true while one of them is open."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.story = Story()
        self.viewers = 0
        self.spent = 0.0  # seconds of CPU since the last look
        self._feed = Feed(scheduler)
        self._watching: asyncio.Task[None] | None = None

    def opened(self, document: Document) -> None:
        """A page was opened; facts are asked for until the last one is closed."""
        self.viewers += 1
        document.on_session_destroyed(self._closed)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    def _closed(self, _: Any) -> None:
        self.viewers -= 1

    async def _watch(self) -> None:
        try:
            while self.viewers:
                began = thread_time()
                facts = await self._feed.look()
                self.story.take(facts)
                self.spent += thread_time() - began + facts.get("run", {}).get("cpu", 0.0)
                pause = min(max(SHORTEST, self.spent / SHARE), LONGEST)
                self.spent = 0.0
                await asyncio.sleep(pause)
        except Exception as error:  # a page must never be the end of a run
            logger.exception("The page %s is not kept up to date any more", PAGE)
            self.story.why = f"this page is broken: {type(error).__name__}: {error}; reload it"
            self.story.version += 1
        finally:
            self._watching = None


_LIVE: WeakKeyDictionary[Scheduler, Live] = WeakKeyDictionary()


def live_of(scheduler: Scheduler) -> Live:
    """The story of a scheduler."""
    found = _LIVE.get(scheduler)
    if found is None:
        found = _LIVE[scheduler] = Live(scheduler)
    return found


def show(parts: tuple[str, ...], scheduler: Scheduler, extra: dict[str, Any], document: Document) -> None:
    """Put parts of the page into a document and keep them up to date."""
    from cleave_dask.views.layout import Page

    live = live_of(scheduler)
    page = Page(parts)
    shown = -1

    def refresh() -> None:
        nonlocal shown
        if live.story.version != shown:
            began = thread_time()
            shown = live.story.version
            page.show(live.story)
            live.spent += 2 * (thread_time() - began)  # what it takes to send it comes on top

    page.fill(document, extra)
    refresh()
    document.add_periodic_callback(refresh, CHECK)
    live.opened(document)


def _register() -> bool:
    """Add the pages to those that Dask's dashboard is about to serve; False where there is no bokeh."""
    try:
        from distributed.dashboard.scheduler import applications
    except ImportError as error:
        logger.warning("No page %s: %s; install it with: pip install 'cleave-dask[train]'", PAGE, error)
        return False
    applications[PAGE] = partial(show, PARTS)
    for part in PARTS[1:]:
        applications[f"/individual-cleave-{part}"] = partial(show, (part,))
    return True


_REGISTERED = _register()  # a scheduler imports its preloads before it starts its dashboard


def dask_setup(scheduler: Scheduler) -> None:
    """Link the page from the navigation bar of Dask's pages."""
    if not _REGISTERED:
        return
    from distributed.dashboard.scheduler import template_variables

    pages = template_variables(scheduler)["pages"]
    name = PAGE.strip("/")
    if name not in pages:
        pages.insert(1, name)
