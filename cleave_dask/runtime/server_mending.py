"""Tiles of a lost device, made on the server as the device would have made them (`planning/mending` says when)."""

from __future__ import annotations

from time import perf_counter, time

from cleave_dask.runtime.kernels import Kernel
from cleave_dask.runtime.multiplying import multiplied
from cleave_dask.runtime.server_gathering import Attempt
from cleave_dask.runtime.server_products import Product
from cleave_dask.runtime.server_training import Training
from cleave_dask.runtime.tiles import ParcelSpec, slice_names
from cleave_dask.runtime.trace import HERE


def mend(run: Training | Product, parcel: ParcelSpec, kernel: Kernel) -> int:
    """Make what nobody has delivered of a parcel, by the kernel of the device that was lost; how many tiles.

    They are checked like all others: a kernel that multiplies wrongly here is as wrong as one there.
    """
    made = 0
    for spec in parcel.specs():
        if not run.wanted(spec.step, spec.job, [spec.tile]):
            continue
        start = perf_counter()
        spans = [(first, second) for *_, first, second in slice_names(spec)]
        try:
            operands = run.operands(spec.step, spec.job, spans)
        except KeyError:
            if run.wanted(spec.step, spec.job, [spec.tile]):
                raise
            continue  # somebody has delivered the last of them meanwhile, and the operands are gone
        results = multiplied(kernel, spec, operands)
        attempt = Attempt(HERE, 0.0, perf_counter() - start, arrived=time())
        made += run.accept(spec.step, spec.job, spec.tile, list(results), attempt)
    return made
