"""The page `/cleave` of Dask's own dashboard: preload of a stock scheduler, beside the plugin.

    dask scheduler --preload cleave_dask.runtime.scheduler --preload cleave_dask.views.dashboard

It needs bokeh, as Dask's dashboard does. Parts of it are pages of their own, `/individual-cleave-...`, which the Dask
extension of JupyterLab lists. All pages of a scheduler share one feed, which asks for facts only while somebody has one
of them before their eyes, and no more often than that it takes SHARE of a core.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import Scheduler

from cleave_dask.runtime.watching import Feed
from cleave_dask.views.story import Story

if TYPE_CHECKING:
    from bokeh.document import Document

    from cleave_dask.views.layout import Page

logger = logging.getLogger(__name__)

SHARE = 0.005
"""Of one core that all open pages of a scheduler may take, server included; with more to show they are slower."""

SHORTEST, LONGEST = 0.5, 10.0  # seconds between two looks
CHECK = 0.25  # seconds between two questions whether somebody looks again
SENDING = 1.0  # seconds of CPU to send what took a second to make

PAGE = "/cleave"
PARTS = ("headline", "loss", "binding", "timeline", "devices", "events")


class View:
    """One open page: shows the story when there is something new, and its browser is there and not hidden."""

    def __init__(self, live: Live, page: Page, document: Document) -> None:
        self._live, self._page, self._document = live, page, document
        self._waiting = False  # whether it is about to show something
        document.on_session_destroyed(self._closed)

    @property
    def watched(self) -> bool:
        """Whether a browser has it before somebody's eyes; a closed one is forgotten only half a minute later."""
        context: Any = self._document.session_context
        session = context and context.session
        return bool(session and session.connection_count) and not self._page.hidden

    def refresh(self) -> None:
        """Show the story soon; a browser that is slow to take what it is sent gets the next one when it has."""
        if self.watched and not self._waiting:
            self._waiting = True
            self._document.add_next_tick_callback(self._show)

    def _show(self) -> None:
        self._waiting = False
        began = thread_time()
        self._page.show(self._live.story)
        self._live.spent += (1 + SENDING) * (thread_time() - began)

    def _closed(self, _: Any) -> None:
        self._live.views.discard(self)


class Live:
    """One story for all pages of a scheduler, kept true while somebody looks at one of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.story = Story()
        self.views: set[View] = set()
        self.spent = 0.0  # seconds of CPU since the last look
        self.feed = Feed(scheduler)
        self._watching: asyncio.Task[None] | None = None

    def opened(self, document: Document, page: Page) -> None:
        """A page was opened; facts are asked for until the last one is closed."""
        self.views.add(View(self, page, document))
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    @property
    def watched(self) -> bool:
        """Whether somebody looks."""
        return any(view.watched for view in self.views)

    async def _watch(self) -> None:
        last = -LONGEST
        try:
            while self.views:
                pause = min(max(SHORTEST, self.spent / SHARE), LONGEST)
                if monotonic() >= last + pause and self.watched:
                    last = monotonic()
                    await self._look()
                await asyncio.sleep(CHECK)
        except Exception as error:  # a page must never be the end of a run
            logger.exception("The page %s is not kept up to date any more", PAGE)
            self.story.why = f"this page is broken: {type(error).__name__}: {error}; reload it"
            self._refresh()
        finally:
            self._watching = None

    async def _look(self) -> None:
        facts = await self.feed.look()
        began = thread_time()
        self.story.take(facts)
        self.spent = facts["cpu"] + thread_time() - began  # what showing it takes is added when it is shown
        self._refresh()

    def _refresh(self) -> None:
        for view in tuple(self.views):
            view.refresh()


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
    page.fill(document, extra)
    page.show(live.story)
    live.opened(document, page)


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
