"""Networks of namespaces: what the kernel is told, who has which address, and that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cleave_dask.errors import ClusterError
from cleave_dask.fleet.devices import Device, Fleet, Link, Server
from cleave_dask.simulation import network
from cleave_dask.simulation.local import LocalFleet
from cleave_dask.simulation.network import PAYLOAD, Network, remove_leftovers

SLOW, FAST = 2.5e5, 1e6  # bytes per second
FLEET = Fleet(
    Server(),
    tuple(Device(f"home-{n}", 1e9, 1e9, Link(FAST, 0.01), Link(SLOW, 0.01)) for n in range(2)),
)

namespaces = pytest.mark.skipif(Network.why_not() is not None, reason=str(Network.why_not()))


def spaces() -> set[str]:
    """The namespaces of this machine; other processes may have some, too."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


SEND = (
    "import socket,sys; s=socket.create_connection((sys.argv[1],int(sys.argv[2]))); s.sendall(bytes(int(sys.argv[3])))"
)
TAKE = """
import socket, time
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
start, got = None, 0
while data := connection.recv(1 << 16):
    start = start or time.monotonic()
    got += len(data)
print(got, time.monotonic() - start, flush=True)
"""


def send(shaped: Network, to: str | None, by: str | None, nbytes: int) -> tuple[int, float]:
    """Send bytes from one end of a link to the other; how many came, and in how many seconds."""
    taker = subprocess.Popen([*shaped.enter(to), sys.executable, "-c", TAKE], stdout=subprocess.PIPE, text=True)
    try:
        assert taker.stdout is not None
        port = taker.stdout.readline().strip()
        sender = [*shaped.enter(by), sys.executable, "-c", SEND, shaped.address(to), port, str(nbytes)]
        subprocess.run(sender, check=True, timeout=60)
        got, seconds = taker.stdout.readline().split()
        return int(got), float(seconds)
    finally:
        taker.kill()
        taker.communicate()


@namespaces
def test_links_carry_what_they_should_in_each_direction_and_no_more() -> None:
    with Network(FLEET) as shaped:
        before = shaped.carried("home-0")
        down, down_seconds = send(shaped, "home-0", None, 1_000_000)
        up, up_seconds = send(shaped, None, "home-0", 250_000)
        after = shaped.carried("home-0")
        assert (down, up) == (1_000_000, 250_000)
        # No faster than the link, but for what its bucket and queue hold; how much slower is the machine's business.
        assert down_seconds > 0.8 * down / (PAYLOAD * FAST)
        assert up_seconds > 0.7 * up / (PAYLOAD * SLOW)
        assert after[0] - before[0] > down
        assert after[1] - before[1] > up
        assert shaped.carried("home-1")[0] < down / 10, "another device's link carries none of it"


@namespaces
def test_every_device_has_a_place_of_its_own_and_all_go_with_the_network() -> None:
    with Network(FLEET) as shaped:
        entered = {shaped.enter(who)[-1] for who in (None, "home-0", "home-1")}
        addresses = {shaped.address(who) for who in (None, "home-0", "home-1")}
        assert len(entered) == len(addresses) == 3
        assert entered <= spaces()
    assert not entered & spaces()
    shaped.close()  # again: there is nothing left to do


@namespaces
def test_two_networks_share_no_address() -> None:
    with Network(FLEET) as one, Network(FLEET) as other:
        assert one.address() != other.address()
        assert one.enter() != other.enter()


@namespaces
def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphan = f"cleave-{dead.pid}-0-server"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    with Network(FLEET) as living:
        assert orphan not in spaces(), "a new network did not remove it"
        assert orphan not in remove_leftovers()
        assert living.enter()[-1] in spaces()


@namespaces
def test_a_network_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = spaces()
    monkeypatch.setattr(network, "_SUBNETS", range(0))
    with pytest.raises(ClusterError, match="end some of the emulated fleets"), Network(FLEET):
        pass
    assert not {space for space in spaces() - before if space.startswith(f"cleave-{os.getpid()}-")}


def test_a_bucket_holds_three_frames_at_least_and_more_on_fast_links() -> None:
    assert "rate 2000000bit burst 4542 " in network._shaped("eth0", Link(SLOW, 0.0))
    assert "burst 400000 " in network._shaped("eth0", Link(1e8, 0.0))


def test_a_train_of_packets_fits_the_largest_bucket_and_the_kernel() -> None:
    links = [Link(1.25e7, 0.01), Link(2.5e6, 0.01)]
    assert 11_000 < network._train(links) < network._bucket(links[0]) == 12_500
    assert network._train([Link(1e9, 0.01)]) == 65_536


def test_without_the_tools_it_says_which_one_and_falls_back_only_where_it_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Network.why_not() == "there is no `ip` here; install iproute2"
    with pytest.raises(ClusterError, match="no `ip` here; install iproute2; or emulate links with shaping='buckets'"):
        LocalFleet(FLEET, shaping="namespaces")
