"""The scheduler's plugin, as far as it needs no scheduler: whom it refuses, and what ends a step."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Client

from cleave_dask._version import __version__
from cleave_dask.errors import ClusterError
from cleave_dask.runtime import cluster


@pytest.fixture
def preload() -> Any:
    """The scheduler's preload, imported when a test needs it.

    On import it guards whatever its process connects to. pytest collects this file also where only tests of clusters
    run, whose attackers and whose stock Dask must stay unguarded.
    """
    return import_module("cleave_dask.runtime.scheduler")


def test_another_version_of_scheduler_or_server_is_told_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scheduler of another version says may lack everything that is asked for next."""
    ours = {"version": __version__, "device": {"device-0": {}}, "stranger": {}}
    server = {"cleave-server": {"address": "tcp://127.0.0.1:1", "version": "0.0.1"}}
    client = cast(Client, None)
    for facts, role in (({"version": "0.0.1"}, "scheduler"), ({**ours, "server": server}, "server")):
        monkeypatch.setattr(cluster, "facts_of", lambda _, facts=facts: facts)
        with pytest.raises(ClusterError, match=rf"the {role} runs cleave-dask 0\.0\.1, this client .*; install"):
            cluster.inspect(client)


def test_a_message_that_cannot_be_written_ends_the_step_too(preload: Any) -> None:
    def broken(_: object) -> dict[str, Any]:
        raise RuntimeError("out of order")

    steering = preload.SteeringPlugin.__new__(preload.SteeringPlugin)
    steering.broken, steering._stock_message = None, broken
    with pytest.raises(RuntimeError, match="out of order"):
        steering.message(None)
    assert steering.broken == "_message failed with RuntimeError: out of order"


def test_a_scheduler_without_what_steering_stands_on_is_refused(preload: Any) -> None:
    with pytest.raises(SystemExit, match=r"steers through Scheduler\.is_rootish, which distributed .* does not have"):
        preload.dask_setup(SimpleNamespace())
