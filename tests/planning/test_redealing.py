"""Tiles of devices that are not there: each goes to somebody who is, once, and nobody gets much more than his share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.planning.cost import AT_ONCE
from cleave_dask.planning.parcels import Figures, Work
from cleave_dask.planning.redealing import TOGETHER, Dealt, Planned, redeal, scatter

FIGURES = Figures(flops=1e12, down=1e6, up=1e5)


def strips(device: str, first: int, widths: list[int], *, together: int) -> list[Planned]:
    """The parcels of a device that has strips of columns, 64 rows high and 32 deep, in numbers of 4 bytes."""
    edges = np.cumsum([first, *widths]).tolist()
    cut = [(0, 64, *span, 0, 32) for span in pairwise(edges)]
    parcels = []
    for start in range(0, len(cut), together):
        ranges = np.array(cut[start : start + together])
        width = int((ranges[:, 3] - ranges[:, 2]).sum())
        down = 4.0 * 32 * (width + 64)
        parcels.append(Planned(device, Work(2.0 * 64 * 32 * width, down, 4.0 * 64 * width, down), ranges))
    return parcels


def dealt_of(parcels: list[Planned], present: set[str], kind: str = "gemm") -> list[Dealt]:
    """All parcels as they go out, those that nothing happens to too."""
    groups = list(redeal(kind, parcels, dict.fromkeys(present, FIGURES), {}))
    touched = {number for numbers, _ in groups for number in numbers}
    rest = [(number, parcel) for number, parcel in enumerate(parcels) if number not in touched]
    same = [Dealt(p.device or "", p.work, tuple((n, k) for k in range(len(p.ranges))), n) for n, p in rest]
    return same + [each for _, dealt in groups for each in dealt]


@given(
    fleet=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=9), min_size=2, max_size=6),
    together=st.integers(1, 4),
    kind=st.sampled_from(["gemm", "attention"]),
    data=st.data(),
)
def test_every_tile_goes_to_somebody_who_is_there(
    fleet: list[list[int]], together: int, kind: str, data: st.DataObject
) -> None:
    names = [f"device-{number}" for number in range(len(fleet))]
    present = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=len(names) - 1))
    parcels, first = [], 0
    for name, widths in zip(names, fleet, strict=True):
        parcels += strips(name, first, widths, together=together)
        first += sum(widths)
    dealt = dealt_of(parcels, present, kind)
    assert {each.device for each in dealt} <= present
    tiles = [tile for each in dealt for tile in each.tiles]
    assert sorted(tiles) == [(n, place) for n, parcel in enumerate(parcels) for place in range(len(parcel.ranges))]
    assert len(dealt) >= len(parcels), "a task of the step's graph would be left without tiles"
    assert all(each.tiles for each in dealt)
    kept = Counter(each.parcel for each in dealt if each.parcel is not None)
    assert kept == {n: 1 for n, parcel in enumerate(parcels) if parcel.device in present}
    for name in ("flops", "up_bytes"):
        assert sum(getattr(each.work, name) for each in dealt) == pytest.approx(
            sum(getattr(parcel.work, name) for parcel in parcels)
        )


def test_the_largest_tile_of_a_lost_device_makes_nobody_last() -> None:
    """Seven devices for the work of eight, in tiles of which the largest is a third: within 6% of even shares."""
    widths = [2, 2, 4, 10, 30, 130, 160, 100, 70]
    parcels = []
    for number in range(8):
        parcels += strips(f"device-{number}", number * sum(widths), widths, together=4)
    sent: Counter[str] = Counter()
    for each in dealt_of(parcels, {f"device-{number}" for number in range(7)}):
        sent[each.device] += round(each.work.up_bytes)
    whole = 4 * 64 * sum(widths)
    assert sum(sent.values()) == 8 * whole
    assert max(sent.values()) < 1.06 * 8 / 7 * whole
    assert whole * (1 + 160 / sum(widths)) > 1.1 * 8 / 7 * whole, "as it is if somebody takes that tile on top"


def test_a_lost_device_among_many_concerns_its_neighbours_alone() -> None:
    parcels = []
    for number in range(10 * TOGETHER):
        parcels += strips(f"device-{number}", number * 30, [10, 20], together=2)
    present = {f"device-{number}" for number in range(1, 10 * TOGETHER)}
    ((numbers, _),) = redeal("gemm", parcels, dict.fromkeys(present, FIGURES), {})
    assert len(numbers) == TOGETHER


def test_filler_goes_by_parcels_to_whoever_has_the_least_ahead() -> None:
    parcels = [parcel for n in range(4) for parcel in strips(f"device-{n}", n * 40, [10, 10, 10, 10], together=2)]
    takers = {f"device-{number}": FIGURES for number in range(3)}
    ahead = {name: Work(up_bytes=0.0 if name == "device-2" else 1e6) for name in takers}
    ((_, dealt),) = redeal("gemm", parcels, takers, ahead)
    lost = {number for number, parcel in enumerate(parcels) if parcel.device == "device-3"}
    got = {each.device: each for each in dealt if each.parcel is None and {n for n, _ in each.tiles} <= lost}
    assert set(got) == {"device-2"}


def test_nobody_gets_a_tile_beyond_his_memory() -> None:
    parcels = [parcel for n in range(4) for parcel in strips(f"device-{n}", n * 200, [10, 90, 100], together=3)]
    large = AT_ONCE * 4 * (32 * (64 + 90) + 64 * 90)
    takers = {f"device-{n}": replace(FIGURES, memory=1e9 if n == 2 else large - 1) for n in range(3)}
    ((_, dealt),) = redeal("gemm", parcels, takers, {})
    foreign = [(each.device, place) for each in dealt if each.parcel is None for _, place in each.tiles]
    assert {device for device, place in foreign if place > 0} == {"device-2"}
    free = dict.fromkeys(takers, FIGURES)
    ((_, dealt),) = redeal("gemm", parcels, free, {})
    assert {each.device for each in dealt if each.parcel is None} > {"device-2"}, "memory is what decided"


def test_nobody_there_leaves_all_as_it_is() -> None:
    assert not list(redeal("gemm", strips("gone", 0, [1, 2], together=1), {}, {}))


def test_tiles_that_come_back_go_out_one_by_one_the_largest_first() -> None:
    (parcel,) = strips("late", 0, [3, 50, 20], together=3)
    singles = scatter("gemm", parcel)
    assert [each.tiles for each in singles] == [((0, 1),), ((0, 2),), ((0, 0),)]
    assert [each.work.down_bytes for each in singles] == [4 * 32 * (64 + width) for width in (50, 20, 3)]
    assert sum(each.work.up_bytes for each in singles) == pytest.approx(parcel.work.up_bytes)
