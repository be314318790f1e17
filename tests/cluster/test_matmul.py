"""`matmul`: a drop-in for `a @ b` on dask arrays."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

from cleave_dask.errors import ClusterError, InputError
from cleave_dask.runtime.cluster import inspect
from cleave_dask.runtime.matmul import matmul
from tests.waiting import until, until_tasks


def arrays(dtype: str = "float32", m: int = 130, k: int = 70, n: int = 90) -> tuple[da.Array, da.Array]:
    source = da.random.default_rng(0)
    return (
        source.random((m, k), chunks=(50, 30)).astype(dtype),
        source.random((k, n), chunks=(40, 45)).astype(dtype),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("grid", [None, (3, 2, 1), (2, 2, 3), (1, 1, 1)])
def test_it_equals_the_plain_product(client: Client, dtype: str, grid: tuple[int, int, int] | None) -> None:
    a, b = arrays(dtype)
    product = matmul(a, b, grid=grid)
    assert (product.shape, product.dtype) == ((130, 90), np.dtype(dtype))
    a, b = client.compute([a, b], sync=True)
    np.testing.assert_allclose(product.compute(), a @ b, rtol=1e-5)


def test_it_goes_on_as_a_dask_array_and_is_forgotten(client: Client) -> None:
    a, b = arrays("float64")
    total = (matmul(a, b) + 1).T[:20].sum()
    plain = ((a @ b) + 1).T[:20].sum()
    assert total.compute() == pytest.approx(plain.compute())
    until_tasks(client, 0)
    until(lambda: products_on_server(client) == 0, "the server lets go of the product")


def products_on_server(client: Client) -> int:
    def count(dask_worker: object) -> int | None:
        return len(getattr(dask_worker.extensions["cleave"], "products", ()))  # type: ignore[attr-defined]

    return sum(client.run(count, workers=[inspect(client).server]).values())


def test_other_arrays_are_left_to_dask(client: Client) -> None:
    whole = da.arange(12, chunks=5).reshape(3, 4)
    assert (matmul(whole, whole.T).compute() == (whole @ whole.T).compute()).all()


def test_shapes_that_do_not_fit(client: Client) -> None:
    a, _ = arrays()
    with pytest.raises(InputError, match=r"cannot multiply \(130, 70\) by \(130, 70\): 70 columns against 130 rows"):
        matmul(a, a)


def test_a_scheduler_without_the_plugin() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(ClusterError, match=r"dask scheduler .*--preload cleave_dask\.runtime\.scheduler"),
    ):
        matmul(*arrays(), client=client)
