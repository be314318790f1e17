"""What an owner lends: settings in, a device's limits out; bad ones are named."""

from __future__ import annotations

from math import inf

import dask.config
import pytest

from cleave_dask.errors import FleetError, InputError
from cleave_dask.runtime.lending import Lent, read_settings


def lent(**settings: object) -> Lent:
    with dask.config.set({f"cleave.device.{name.replace('__', '.')}": value for name, value in settings.items()}):
        return read_settings(cores=4, memory=10**9)


def test_without_settings_everything_is_lent_and_measured() -> None:
    all_of_it = lent()
    assert (all_of_it.cores, all_of_it.memory) == (4, 10**9)
    assert all_of_it.missing == ("flops", "down", "up", "latency")
    assert all_of_it.links.down.bandwidth == all_of_it.links.up.bandwidth == inf


def test_an_owner_lends_less() -> None:
    some = lent(cores=2, memory="256 MB", max_down="8 Mbit/s", max_up="1 Mbit/s", down="100 Mbit/s", up="0.5 Mbit/s")
    assert (some.cores, some.memory) == (2, 256_000_000)
    assert (some.links.down.bandwidth, some.links.up.bandwidth) == (1e6, 0.125e6)
    assert some.figures == {"down": 1e6, "up": 0.0625e6}, "planned with no more than is lent, and no more than there is"
    assert some.missing == ("flops", "latency")


def test_nobody_lends_more_than_there_is() -> None:
    assert lent(memory="64 GB").memory == 10**9


def test_an_emulated_device_is_held_to_its_figures_and_to_its_owner() -> None:
    held = lent(emulate__down="10 MB/s", emulate__up="1 MB/s", emulate__latency="20 ms", max_down="5 MB/s")
    assert (held.links.down.bandwidth, held.links.down.latency) == (5e6, 0.02)
    assert (held.links.up.bandwidth, held.links.up.latency) == (1e6, 0.02)
    assert held.figures == {}, "what it is held to is not what it says"


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("cores", 0, InputError, "'cleave.device.cores' is 0; give a whole number of cores"),
        ("cores", "two", InputError, "give a whole number of cores"),
        ("memory", "512 apples", FleetError, "'cleave.device.memory' is '512 apples', which does not read as bytes"),
        ("max_up", "fast", FleetError, "'cleave.device.max_up' is 'fast', which does not read as bytes/s"),
        ("emulate__flops", -1, FleetError, "'cleave.device.emulate.flops' is -1; it must be finite and above zero"),
    ],
)
def test_bad_settings_are_named(setting: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lent(**{setting: value})


def test_a_limit_below_the_process_itself_is_no_device() -> None:
    with pytest.raises(InputError, match="leaves nothing for tiles; give a higher --memory-limit"):
        read_settings(cores=1, memory=-5)
