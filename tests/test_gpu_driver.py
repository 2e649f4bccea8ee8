"""The device for tests of the API on a GPU, over the emulated one: arrays go there and results come back."""

from __future__ import annotations

import ctypes
from typing import Any

import emulator
import numpy as np
import pagoda
import pytest
from emulator.driver import EmulatedDriver
from gpu_driver import CopyingDriver
from mirror import Mirror, layer
from numpy.lib.array_utils import byte_bounds
from pagoda.attention.reference import attention
from pagoda.device import cuda
from pagoda.device.driver import View


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    emulator.require()
    inner = EmulatedDriver()
    monkeypatch.setattr(cuda, "open_driver", lambda index: CopyingDriver(inner))
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device="cuda", device_memory="1MiB", host_memory="1MiB") as cache:
        yield cache
    inner.check()


def brought_back(driver: CopyingDriver) -> None:
    for copied in driver.copied.values():
        copied.fetch()


def test_kernels_get_the_copy_and_nothing_else() -> None:
    driver = CopyingDriver(EmulatedDriver())
    base = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    view = driver.view("k", base[::-1, 1:3], driver.stream())
    low, high = view.bytes
    assert base.ctypes.data + base.nbytes <= low or high <= base.ctypes.data
    assert view.strides == (-6 * 8 * 4, 8 * 4, 4)
    there = np.ctypeslib.as_array((ctypes.c_float * 8).from_address(view.address))
    np.testing.assert_array_equal(there, base[3, 1])


@pytest.mark.parametrize(
    "place", [np.s_[:], np.s_[::-1, 1:3], np.s_[1:, ::-2, :5], np.s_[2:3, :, 1:], np.s_[:0]], ids=str
)
def test_where_the_bytes_of_an_array_lie(place: Any) -> None:
    array = np.zeros((4, 6, 8), np.float16)[place]
    view = View(array.ctypes.data, array.shape, array.strides, "f16")
    assert view.bytes == (byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data))


def test_only_what_a_kernel_changed_comes_back() -> None:
    """The caller may meanwhile have written to other elements through an array over the same memory."""
    driver = CopyingDriver(EmulatedDriver())
    base = np.zeros((2, 4), np.float32)
    view = driver.view("out", base[:, :2], driver.stream())
    np.ctypeslib.as_array((ctypes.c_float * 2).from_address(view.address))[:] = 5
    base[:, 2:] = 7
    brought_back(driver)
    np.testing.assert_array_equal(base, [[5, 5, 7, 7], [0, 0, 7, 7]])
    base[0] = 1
    brought_back(driver)
    assert (base[0] == 1).all(), "brought back once"


def test_a_write_to_a_read_only_array_is_noticed() -> None:
    driver = CopyingDriver(EmulatedDriver())
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    view = driver.view("q", array, driver.stream())
    np.ctypeslib.as_array((ctypes.c_float * 1).from_address(view.address))[:] = 5
    with pytest.raises(AssertionError, match="read-only"):
        brought_back(driver)


def test_slices_backwards_and_forwards(cache: pagoda.Cache) -> None:
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((40, 8, 32), np.float32)
    q, k, v, result = fused[:, :4, :16], fused[::-1, 4:6, :16], fused[:, 6:, 16:], np.empty((40, 4, 32), np.float32)
    before = fused.copy()
    with cache.step([cache.create()], [40]) as step:
        out, lse = step.forward(0, q, k, v, out=result[::-1, ::-1, 16:], return_lse=True)
    expected, expected_lse = attention(q, *(rows.astype(np.float16).astype(np.float64) for rows in (k, v)))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_array_equal(fused, before)


def test_random_steps(cache: pagoda.Cache) -> None:
    mirror = Mirror(cache, np.random.default_rng(1))
    live = [mirror.create(), mirror.create()]
    for counts in ([30, 0], [1, 50], [2, 1], [40, 40]):
        mirror.step(live, counts, junk=2)
    live.append(mirror.fork(live[0]))
    cache.demote(live[1].sequence).wait()
    mirror.step(live, [1, 1, 30])
    mirror.look()
