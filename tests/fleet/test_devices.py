"""Fleets: values, files, samples."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave_dask.errors import FleetError
from cleave_dask.fleet.devices import WORKER_DEFAULTS, Device, Fleet, Link, Server
from cleave_dask.resources import graphs_folder
from tests.strategies import devices, fleets

LINK = Link(bandwidth=1e6, latency=0.01)
PI = Device(name="pi", flops=1e9, memory=1e9, down=LINK, up=LINK)
SECONDS = 2.0
"""What loading or sampling the largest shipped fleet may take, in a process that collects others' garbage meanwhile."""

DEVICE = '[[device]]\nname = "pi"\nflops = "1 GFLOP/s"\nmemory = "1 GB"\ndown = "1 MB/s"\nup = "1 MB/s"\n'


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "fleet.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_values_are_frozen_and_copied_with_replace() -> None:
    with pytest.raises(FrozenInstanceError):
        PI.flops = 2.0  # type: ignore[misc]
    fleet = Fleet(Server(), (PI,))
    faster = replace(fleet, devices=(replace(PI, flops=2e9),))
    assert faster.device("pi").flops == 2e9
    assert fleet.device("pi").flops == 1e9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(0.0, 0.0), "bandwidth is 0.0"),
        (lambda: Link(1.0, -1.0), "latency is -1.0"),
        (lambda: Link(float("nan"), 0.0), "bandwidth is nan"),
        (lambda: replace(PI, name=" "), "name is ' '"),
        (lambda: replace(PI, flops=-1.0), "'pi': flops is -1.0"),
        (lambda: replace(PI, memory=float("inf")), "'pi': memory is inf"),
        (lambda: replace(PI, memory=True), "'pi': memory is True"),
        (lambda: replace(PI, down=1e6), "'pi': down is 1000000.0; give a Link"),  # type: ignore[arg-type]
        (lambda: Server(egress=0.0), "egress is 0.0"),
        (lambda: Server(processes=0), "processes is 0; give a whole number above zero"),
        (lambda: Server(shared_cores=0), "shared_cores is 0; give a whole number above zero"),
        (lambda: Server(pace=0.0), "pace is 0.0; give 0.01 or more"),
        (lambda: Server(pace="slow"), "pace is 'slow'; give 0.01 or more"),  # type: ignore[arg-type]
        (lambda: Fleet(Server(), ()), "0 devices; give it at least one"),
        (lambda: Fleet(Server(), (PI, PI)), "two devices are called 'pi'"),
        (lambda: Fleet(None, (PI,)), "server is None"),  # type: ignore[arg-type]
        (lambda: Fleet.sample(0), "number of devices is 0"),
        (lambda: Fleet.sample(10**9), "number of devices is 1000000000"),
        (lambda: Fleet.sample(2, seed=-1), "seed of a sampled fleet is -1"),
        (lambda: Fleet(Server(), (PI,)).device("po"), "no device is called 'po'; did you mean 'pi'"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(FleetError, match=words):
        make()


@given(fleets())
def test_a_fleet_finds_its_devices_and_survives_a_pickle(fleet: Fleet) -> None:
    assert all(fleet.device(device.name) is device for device in fleet)
    assert pickle.loads(pickle.dumps(fleet)) == fleet
    assert hash(fleet) == hash(replace(fleet))
    assert len(fleet) == len(fleet.devices)
    assert fleet.total_up == pytest.approx(sum(device.up.bandwidth for device in fleet))


@given(devices(names=st.just("<b>x</b>")))
def test_html_is_escaped(device: Device) -> None:
    assert "<b>" not in Fleet(Server(), (device,))._repr_html_()


def test_a_fleet_prints_its_totals() -> None:
    fleet = Fleet.load("lab-8")
    assert str(fleet) == "8 devices (56 GFLOP/s, 10 GB, 150 MB/s down, 60 MB/s up); server 125 MB/s out, 125 MB/s in"
    assert "<td>laptop</td><td>4</td><td>10 GFLOP/s</td>" in fleet._repr_html_()
    assert len(repr(Fleet.load("home-8192"))) < 200


@pytest.mark.parametrize(
    ("name", "count"),
    [("lab-8", 8), ("phones-512", 512), ("home-1024", 1024), ("mixed-1024", 1024), ("home-8192", 8192)],
)
def test_shipped_fleets_load_fast_and_explain_themselves(name: str, count: int) -> None:
    start = time.process_time()
    fleet = Fleet.load(name)
    assert time.process_time() - start < SECONDS
    assert len(fleet) == count
    assert (graphs_folder() / "fleets" / f"{name}.toml").read_text().startswith("# ")
    # A server that binds is a choice to make in the file, not the accident of a shipped one.
    if count > 8:
        assert fleet.server.egress >= fleet.total_down
        assert fleet.server.ingress >= fleet.total_up


def test_every_shipped_fleet_is_tested() -> None:
    names = {path.stem for path in (graphs_folder() / "fleets").glob("*.toml")}
    assert names == {"lab-8", "phones-512", "home-1024", "mixed-1024", "home-8192"}


def test_home_1024_is_as_stated() -> None:
    device = Fleet.load("home-1024").device("home-1024")
    assert (device.flops, device.memory, device.down.bandwidth, device.up.bandwidth) == (5e12, 512e6, 50e6, 7.5e6)


def test_mixed_1024_spans_its_links() -> None:
    downs = [device.down.bandwidth for device in Fleet.load("mixed-1024")]
    assert (min(downs), max(downs)) == (5e6, 100e6)


def test_a_file_expands_counts_and_fills_in_defaults(tmp_path: Path) -> None:
    fleet = Fleet.load(write(tmp_path, DEVICE + DEVICE.replace('"pi"', '"many"\ncount = 2')))
    assert [device.name for device in fleet] == ["pi", "many-0001", "many-0002"]
    assert fleet.server == Server()
    assert fleet.device("pi").up == Link(1e6, WORKER_DEFAULTS["latency"])
    half = Fleet.load(write(tmp_path, '[server]\negress = "1 GB/s"\n' + DEVICE))
    assert half.server == Server(egress=1e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 devices"),
        ("device = 3", "write each device as a"),
        ("device = [3]", "write each device as a"),
        ("server = 3\n" + DEVICE, "write it as a"),
        ("[sever]\n" + DEVICE, "unknown table 'sever'; did you mean 'server'"),
        ("[server]\negres = 1\n" + DEVICE, r"\[server\] has no key 'egres'; did you mean 'egress'"),
        ("[server]\nprocesses = 1.5\n" + DEVICE, "processes is 1.5; give a whole number above zero"),
        ("[server]\npace = -1\n" + DEVICE, "pace is -1; give 0.01 or more"),
        ('[server]\negress = "quick"\n' + DEVICE, r"\[server\] egress is 'quick'"),
        (DEVICE + "fflops = 3", "'pi' has no key 'fflops'; did you mean 'flops'"),
        (DEVICE + "count = 0", "count is 0"),
        (DEVICE + "count = 1_000_000_000", "number of devices is 1000000000"),
        (DEVICE + 'count = "2"', "count is '2'"),
        (DEVICE.replace('up = "1 MB/s"', ""), "'pi' has no 'up'; add it"),
        (DEVICE.replace('name = "pi"', ""), "number 1 has no 'name'"),
        (DEVICE.replace('"1 MB/s"', '"-1 MB/s"'), "'pi': down is '-1 MB/s'"),
        (DEVICE.replace('"1 MB/s"', "1e-300"), "'pi': down is 1e-300; it must be from 1 to 1e\\+24 bytes/s"),
        (DEVICE.replace('"1 GB"', "0x" + "f" * 5000), "'pi': memory is <int too long to print>"),
        (DEVICE.replace('"1 GB"', "9" * 5000), "cannot be read"),
        (DEVICE.replace('"pi"', "1979-05-27"), "name is datetime.date"),
        (DEVICE + DEVICE, "two devices are called 'pi'"),
        ("x = " + "[" * 5000, "nested too deeply"),
        (b"\xff\xfe", "cannot be read"),
        ("not toml", "cannot be read"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_file_is_named_with_the_remedy(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FleetError, match=words) as caught:
        Fleet.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["lab8", "", "no/such.toml", "a\0b", "x" * 5000, "."])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(FleetError):
        Fleet.load(name)


def test_a_misspelled_name_gets_a_hint() -> None:
    with pytest.raises(FleetError, match=r"there is no file 'lab8', .* did you mean 'lab-8'"):
        Fleet.load("lab8")


KEYS = st.sampled_from(["name", "count", "flops", "memory", "down", "up", "latency", "egress", "processes", "x"])
VALUES = st.one_of(
    st.sampled_from(['"pi"', '"1 GB"', '"1 MB/s"', '"5 ms"', "1", "-1", "0", "nan", "inf", "true", "[]", "{}", "1e9"]),
    st.sampled_from(["1979-05-27", "07:32:00", '""', "9" * 40, "0x" + "f" * 5000, '"1 GFLOP/s"', '"\\u0000"']),
)
LINES = st.one_of(
    st.sampled_from(["[server]", "[[device]]", "[device]", "[[server]]", DEVICE]),
    st.builds("{} = {}".format, KEYS, VALUES),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(LINES, max_size=12).map("\n".join).map(str.encode), st.binary(max_size=60)))
def test_fuzzed_files_give_a_fleet_or_a_fleet_error(tmp_path: Path, text: bytes) -> None:
    with suppress(FleetError):
        assert len(Fleet.load(write(tmp_path, text))) >= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_follows_its_stated_distributions(seed: int) -> None:
    start = time.process_time()
    fleet = Fleet.sample(8192, seed=seed)
    assert time.process_time() - start < SECONDS
    shares = {kind: sum(d.name.startswith(kind) for d in fleet) / 8192 for kind in ("phone", "laptop", "mini-pc")}
    assert shares == pytest.approx({"phone": 0.5, "laptop": 0.3, "mini-pc": 0.2}, abs=0.02)
    assert all(5e6 <= d.down.bandwidth <= 100e6 for d in fleet)
    assert all(2 <= d.down.bandwidth / d.up.bandwidth <= 10 for d in fleet)
    assert all(0.005 <= d.down.latency == d.up.latency <= 0.05 for d in fleet)
    assert all(0.5e9 <= d.memory <= 16e9 for d in fleet)
    assert all(1.5e12 / 4 <= d.flops <= 20e12 for d in fleet)
    assert fleet.server.egress >= fleet.total_down


def test_same_seed_same_sample() -> None:
    assert Fleet.sample(20, seed=3) == Fleet.sample(20, seed=3) != Fleet.sample(20, seed=4)


def test_workers_become_devices_with_defaults_for_what_they_left_out() -> None:
    fleet = Fleet.from_workers(
        {"a": {"flops": 1e9, "memory": 2e9, "down": 3e6, "up": 4e5, "latency": 0.1}, "b": {"cores": 4}}
    )
    assert fleet.device("a") == Device("a", 1e9, 2e9, Link(3e6, 0.1), Link(4e5, 0.1))
    assert fleet.device("b").memory == WORKER_DEFAULTS["memory"]
    assert fleet.server == Server(processes=1)


def test_a_live_server_is_what_it_has_published() -> None:
    assert Server.from_facts({}) == Server(processes=1)
    facts = {"role": "server", "porters": ["tcp://a", "tcp://b"], "pace": 1.5, "shared_cores": 2, "cores": 8}
    assert Server.from_facts(facts) == Server(processes=3, pace=1.5, shared_cores=2)


@pytest.mark.parametrize("info", [{"flops": -1}, {"down": "x"}, {"memory": None}, None, 3, [1]])
def test_what_a_worker_published_is_checked(info: Any) -> None:
    with pytest.raises(FleetError, match="'a'"):
        Fleet.from_workers({"a": info})
