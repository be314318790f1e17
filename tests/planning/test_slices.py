"""Slices that tiles share: what each needs that those before it did not have."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.planning.slices import newly, segments

SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=14)


@given(SPANS)
def test_only_what_nobody_of_the_group_had_is_new(spans: list[tuple[int, int, int]]) -> None:
    group, start, length = (np.array(column) for column in zip(*spans, strict=True))
    here: dict[int, set[int]] = {}
    for got, (of, first, size) in zip(newly(group, start, start + length).tolist(), spans, strict=True):
        fresh = set(range(first, first + size)) - here.setdefault(of, set())
        here[of] |= fresh
        assert got == len(fresh)


@given(SPANS)
def test_segments_of_a_range_follow_each_other_and_are_shared(spans: list[tuple[int, int, int]]) -> None:
    group, start, length = (np.array(column) for column in zip(*spans, strict=True))
    place, segment, size = segments(group, start, start + length)
    assert np.bincount(place, size, minlength=len(spans)).tolist() == length.tolist()
    assert len(set(zip(group[place].tolist(), segment.tolist(), strict=True))) == len(set(segment.tolist()))
