"""When the server makes what a lost device had in flight."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cleave_dask.planning.mending import SOON, mends
from cleave_dask.planning.parcels import Figures, Work

SIZES = st.floats(1.0, 1e12)


def test_a_result_that_takes_long_to_send_is_made_at_home_and_a_long_product_is_not() -> None:
    phone = Figures(flops=1e10, down=5e6, up=5e5, latency=0.005)
    small = Work(flops=2 * 256**3, down_bytes=5e5, up_bytes=256 * 256 * 4, alone_bytes=5e5)
    assert mends(small, phone.seconds(small), 5e10)
    large = Work(flops=2e14, down_bytes=5e5, up_bytes=256 * 256 * 4, alone_bytes=5e5)
    assert not mends(large, phone.seconds(large), 1e10), "a server no faster than the device"


@given(flops=SIZES, up=SIZES, speed=SIZES, at_home=SIZES)
def test_it_never_takes_longer_than_the_device_would_have(
    flops: float, up: float, speed: float, at_home: float
) -> None:
    work, device = Work(flops=flops, up_bytes=up), Figures(flops=speed, down=1e6, up=1e6)
    if mends(work, device.seconds(work), at_home):
        assert flops / at_home <= SOON * device.seconds(work) * (1 + 1e-9)
