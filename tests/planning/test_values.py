"""Tiles as values: parcels have every tile once, in an order that is the same everywhere."""

from __future__ import annotations

import pickle

import numpy as np
from dask.tokenize import tokenize
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.planning.values import Tiles

NAMES = ("a", "b", "c")


def tiles_of(owners: list[int], together: int = 1) -> Tiles:
    starts = np.arange(len(owners), dtype=np.int32)
    zeros, ones = np.zeros_like(starts), np.ones_like(starts)
    ranges = np.stack([starts, starts + 1, zeros, ones, zeros, ones], axis=1)
    return Tiles("g", ranges, np.array(owners, dtype=np.int32), NAMES, together)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9))
def test_parcels_have_every_tile_of_a_device_once(owners: list[int], together: int) -> None:
    tiles = tiles_of(owners, together)
    parcels = tiles.parcels()
    assert sorted(number for _, numbers in parcels for number in numbers) == list(range(len(owners)))
    rounds = [sum(device == name for device, _ in parcels[:place]) for place, (name, _) in enumerate(parcels)]
    assert rounds == sorted(rounds)
    for place, name in enumerate(NAMES):
        own = [numbers for device, numbers in parcels if device == name]
        assert [number for numbers in own for number in numbers] == [n for n, who in enumerate(owners) if who == place]
        assert all(len(numbers) == together for numbers in own[:-1])
        assert all(1 <= len(numbers) <= together for numbers in own[-1:])


def test_parcels_are_part_of_the_value() -> None:
    owners = [0, 1, 0, 0, 1, 2]
    assert tiles_of(owners, 2).parcels() == [("a", (0, 2)), ("b", (1, 4)), ("c", (5,)), ("a", (3,))]
    assert tiles_of(owners).together == 1
    assert tiles_of(owners, 2) == tiles_of(owners, 2) != tiles_of(owners, 3)
    assert tokenize(tiles_of(owners, 2)) == tokenize(tiles_of(owners, 2)) != tokenize(tiles_of(owners, 3))
    assert pickle.loads(pickle.dumps(tiles_of(owners, 2))).together == 2
