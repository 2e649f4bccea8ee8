"""The GPU driver, over a stand-in for CuPy and torch: every line of it runs on a machine that has neither."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cupy_stand_in
import emulator
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from cupy_stand_in import Device, DLPackArray, Event, NdArray, Stream, on_default, registered
from gpu_driver import CopyingDriver
from interrupts import interrupted
from mirror import Mirror, layer
from pagoda.device import cuda, cuda_memory, thresholds
from pagoda.device.driver import View
from pagoda.kernels import arguments, instances


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    emulator.require()
    # An installed torch would take the stand-in's streams for its own.
    monkeypatch.setitem(sys.modules, "torch", None)
    return cupy_stand_in.install(monkeypatch)


@pytest.fixture
def copying(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets caches on a GPU take NumPy arrays."""
    open_driver = cuda.open_driver
    monkeypatch.setattr(cuda, "open_driver", lambda index: CopyingDriver(open_driver(index)))
    # Measurements are meaningless here.
    monkeypatch.setattr(cuda.CudaDriver, "copy_engine_bytes", 1 << 10)
    monkeypatch.setattr(cuda.CudaDriver, "ring_bytes", 0)


def open_cache(device: str = "cuda", **options: Any) -> pagoda.Cache:
    memory = {"device_memory": "64KiB", "host_memory": "1MiB"}
    return pagoda.Cache(pagoda.ModelSpec([layer()]), device=device, page_size=16, **(memory | options))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("copy_engine_bytes", [0, 1 << 20])
def test_a_cache_lives(device: str, copy_engine_bytes: int, copying: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, moves by both ways of copying, and zeroing, whichever device is current."""
    monkeypatch.setattr(cuda.CudaDriver, "copy_engine_bytes", copy_engine_bytes)
    with open_cache(device, zero_on_free=True) as cache:
        mirror = Mirror(cache)
        live = [mirror.create(), mirror.create()]
        # The sequences' pages alternate, so that moves have several runs.
        for _ in range(3):
            mirror.step(live, [16, 16])
        live.append(mirror.fork(live[0]))
        assert cache.demote(live[0].sequence).wait()
        assert registered
        mirror.step(live, [1, 30, 2])
        assert cache.promote(live[0].sequence).wait()
        mirror.step(live, [1, 1, 1])
        mirror.release(live[1])
        mirror.look()
    assert Device.current == 0
    assert not registered
    assert on_default == {int(device.partition(":")[2] or 0)}, (
        "default streams of other devices have no order with ours"
    )


def test_pages_of_the_host_come_through_a_ring(copying: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.device.ring.SLOT_BYTES_MIN", 1)
    with open_cache(device_memory="256KiB") as cache:
        mirror = Mirror(cache)
        one = mirror.create()
        mirror.step([one], [200])
        assert cache.demote(one.sequence).wait()
        mirror.step([one], [1])
        assert cache._device is not None
        assert cache._device.traffic.ring > 0


def test_memory_that_cannot_be_registered_is_allocated(
    copying: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get host addresses, for pages of the host tier and of the disk."""
    monkeypatch.setattr(Device, "host_pointers", 0)
    with open_cache(device_memory="256KiB", disk=tmp_path / "kept", disk_memory="1MiB") as cache:
        mirror = Mirror(cache)
        one = mirror.create()
        mirror.step([one], [200])
        for tier in ("host", "disk"):
            assert cache.demote(one.sequence, to=tier).wait()
            mirror.step([one], [1])
        assert cache.promote(one.sequence).wait()
        mirror.look()
    assert not registered


def test_memory_that_is_allocated_holds_all_of_the_arena(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is aligned to a system page, wherever CUDA's memory begins, and is one piece."""
    monkeypatch.setattr(Device, "host_pointers", 0)
    whole = []

    class PinnedMemory(cupy_stand_in.PinnedMemory):
        def __init__(self, size: int, flags: int = 0) -> None:
            super().__init__(size, flags)
            whole.append((self.ptr, self.ptr + size))

    monkeypatch.setattr(cupy.cuda, "PinnedMemory", PinnedMemory)
    arena = cuda.open_driver(0).host_arena(3 * mmap.PAGESIZE, 64)
    [(start, stop)] = whole
    assert arena.address % mmap.PAGESIZE == 0
    assert start <= arena.address <= arena.address + 3 * mmap.PAGESIZE <= stop
    assert arena.pin([arena.address, arena.address + 64], [64, 64]).tolist() == [True, False]


def test_a_fork_copies_nothing_that_is_pinned(cupy: Any) -> None:
    """A child finds zeros."""
    arena = cuda.open_driver(0).host_arena(1 << 20, 1 << 16)
    arena.pin(arena.address, 1)
    ctypes.memset(arena.address, 1, 1)
    with warnings.catch_warnings():
        # Python 3.12 and newer warn if there is more than one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(ctypes.string_at(arena.address, 1)[0])
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(arena.address, 1) == b"\1"


def test_pieces_are_registered_that_are_touched(cupy: Any) -> None:
    """Pieces touched by any of many runs, in any order; not pieces in between, nor for other memory."""
    arena = cuda.open_driver(0).host_arena(8 * cuda_memory.PIECE_BYTES, 1 << 16)
    start, piece = arena.address, cuda_memory.PIECE_BYTES
    places = np.array([start + 5 * piece, start - 64, start + piece - 32, start + 8 * piece, 1 << 62], np.uint64)
    begins = arena.pin(places, np.full(5, 64, np.uint64))
    assert begins.tolist() == [True, False, False, False, False]
    assert sorted((address - start) // piece for address in registered) == [0, 1, 5]
    assert not arena.pin(start + 5 * piece - 1, 2 * piece)
    assert sorted((address - start) // piece for address in registered) == [0, 1, 4, 5, 6]
    arena.close()
    assert not registered


def test_a_system_that_does_not_know_the_advice_has_a_host_arena(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "MADV_WIPEONFORK", 999)
    arena = cuda.open_driver(0).host_arena(1 << 20, 1 << 16)
    assert arena.pin(arena.address, 1)


def test_a_cache_on_a_device_that_has_failed_can_be_closed(
    cupy: Any, copying: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on every CUDA call fails. No step stays open, and the directory is released."""
    disk: dict[str, Any] = {"disk": tmp_path / "kept", "disk_memory": "1MiB", "resume": True}
    cache = open_cache(zero_on_free=True, **disk)
    mirror = Mirror(cache)
    one = mirror.create()
    mirror.step([one], [200])
    assert cache.demote(one.sequence).wait()

    def failed(*_: Any, **options: Any) -> Any:
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 700)
    for name in ("deviceSynchronize", "hostUnregister", "memcpyAsync", "memcpy2DAsync", "memsetAsync"):
        monkeypatch.setattr(cupy.cuda.runtime, name, failed)
    for place, name in ((Event, "record"), (Event, "synchronize"), (Stream, "wait_event")):
        monkeypatch.setattr(place, name, failed)
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", failed)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        mirror.step([one], [1])
    one.sequence.release()
    cache.close()
    open_cache("cpu", **disk).close()


def test_arrays_of_the_device_go_in_and_one_comes_out(cupy: Any) -> None:
    """mypy accepts them too: a class with the interface that is not NumPy's."""
    q, k = NdArray(np.ones((2, 4, 16), np.float32)), NdArray(np.zeros((2, 2, 16), np.float32))
    v = NdArray(np.array([1, 3], np.float32).repeat(32).reshape(2, 2, 16))
    with open_cache() as cache:
        with cache.step([cache.create()], [2]) as step:
            out = step.forward(0, q, k, v)
    assert isinstance(out, NdArray)
    np.testing.assert_allclose(out.hidden[:, 0, 0], [1, 2], rtol=1e-6)


def test_memory_of_a_closed_cache_is_free_whoever_asks_first(copying: None) -> None:
    """Otherwise CuPy's pool would give the next caller a piece of it, and leave no block large enough for a second cache."""
    others = []
    for _ in range(2):
        with open_cache(device_memory=cupy_stand_in.DEVICE_BYTES * 5 // 8):
            pass
        others.append(cuda.open_driver(0).memory(cupy_stand_in.DEVICE_BYTES // 8))


def test_what_measures_a_gpu_runs_on_it(cupy: Any) -> None:
    driver = cuda.open_driver(0)
    assert driver.name == "0000:00:00.0"
    assert driver.copy_engine_bytes >= 1 << 14
    assert driver.ring_bytes >= 1 << 16


def test_what_there_is_no_memory_to_measure_is_taken_for_granted(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a nearly full GPU, pages move and steps spill and read host pages with default thresholds, to be measured later."""
    open_driver, drivers = cuda.open_driver, list[Any]()

    def opened(index: int) -> CopyingDriver:
        drivers.append(open_driver(index))
        return CopyingDriver(drivers[-1])

    monkeypatch.setattr(cuda, "open_driver", opened)
    monkeypatch.setattr("pagoda.device.ring.SLOT_BYTES_MIN", 1)
    with open_cache(device_memory="128KiB", spill=True) as cache:
        mirror = Mirror(cache)
        live = [mirror.create(), mirror.create()]
        for _ in range(3):
            mirror.step(live, [16, 16])
        pool = cupy_stand_in.pool
        pool.free_all_blocks()
        hog = pool.alloc(cupy_stand_in.DEVICE_BYTES - pool.held - (8 << 20))
        assert cache.demote(live[0].sequence).wait()
        for _ in range(8):
            mirror.step(live, [64, 64])
        assert pool.refusals == 0
        assert cache.stats().host[0].used > 3
        driver = drivers[0]
        assert (driver.copy_engine_bytes, driver.ring_bytes) == (thresholds.COPY_ENGINE_BYTES, thresholds.RING_BYTES)
        del hog
        pool.free_all_blocks()
        kept = {"copy_engine_bytes", "ring_bytes"}
        assert not vars(driver).keys() & kept
        assert driver.copy_engine_bytes
        assert driver.ring_bytes
        assert vars(driver).keys() >= kept


def test_memory_to_measure_with_that_is_refused_is_not_asked_for_again(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's free memory does not reflect a limit that the caller has set on the pool."""
    pool = cupy_stand_in.pool
    hog = pool.alloc(cupy_stand_in.DEVICE_BYTES - (8 << 20))
    monkeypatch.setattr(cuda.CudaDriver, "free_bytes", 1 << 40)
    driver = cuda.open_driver(0)
    for _ in range(3):
        assert (driver.copy_engine_bytes, driver.ring_bytes) == (thresholds.COPY_ENGINE_BYTES, thresholds.RING_BYTES)
    assert pool.refusals == 2
    del hog


def test_host_memory_of_a_forgotten_cache_is_not_registered_any_more(copying: None) -> None:
    cache = open_cache()
    mirror = Mirror(cache)
    tokens = mirror.create()
    mirror.step([tokens], [40])
    assert cache.demote(tokens.sequence).wait()
    assert registered
    del cache, mirror, tokens
    gc.collect()
    assert not registered


def test_memory_is_registered_until_what_is_forgotten_has_waited(cupy: Any) -> None:
    """A cache that was not closed is a reference cycle, and waits for its kernels in `__del__`."""
    seen = []

    class Forgotten:
        def __init__(self) -> None:
            self.me, self.arena = self, cuda.open_driver(0).host_arena(1 << 20, 1 << 16)
            self.arena.pin(self.arena.address, 1)

        def __del__(self) -> None:
            seen.append(len(registered))

    Forgotten()
    gc.collect()
    assert seen == [1]
    assert not registered


def test_the_oldest_gpu_that_will_do(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "compute_capability", "80")
    assert cuda.gpu(1).id == 1


def test_a_device_that_has_failed_is_not_taken_for_one_at_work(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    event = cuda.open_driver(0).stream().record()
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: cuda.NOT_READY)
    assert not event.done()
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 700)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        event.done()
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 0)
    assert event.done()


def test_a_device_that_has_failed_is_not_taken_for_one_that_captures(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's CUDA errors are RuntimeErrors, like its error for an invalid capture."""

    def failed(stream: Stream) -> bool:
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    stream = cuda.open_driver(0).stream()
    monkeypatch.setattr(Stream, "is_capturing", failed)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        assert stream.capturing


def test_memory_is_of_the_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is current. The device ends its work before memory changes hands, and zeroes it before it is used."""
    seen: list[Any] = []
    monkeypatch.setattr(Device, "host_pointers", 0)

    def note(place: Any, name: str) -> None:
        call = getattr(place, name)

        def noted(*given: Any) -> Any:
            seen.append((name, Device.current))
            return call(*given)

        monkeypatch.setattr(place, name, noted)

    for place, name in (
        (cupy.cuda, "alloc"),
        (cupy.cuda, "alloc_pinned_memory"),
        (cupy.cuda, "PinnedMemory"),
        (cupy.cuda.runtime, "deviceSynchronize"),
        (cupy.cuda.runtime, "memset"),
        (cupy.cuda.runtime, "streamSynchronize"),
        (cupy_stand_in.pool, "free_all_blocks"),
    ):
        note(place, name)
    driver = cuda.open_driver(1)
    driver.memory(1)
    assert seen == [("alloc", 1), ("deviceSynchronize", 1), ("memset", 1), ("streamSynchronize", 1)]
    seen.clear()
    driver.pinned(1)
    driver.host_arena(1, 1)
    assert seen == [("alloc_pinned_memory", 1), ("PinnedMemory", 1)]
    seen.clear()
    driver.give_back()
    assert seen == [("deviceSynchronize", 1), ("free_all_blocks", 1)]


def test_memory_that_is_refused_says_whose(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cuda.open_driver(0)

    def fail(place: Any, name: str, error: Exception) -> None:
        def failed(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(place, name, failed)

    arena, refused = driver.host_arena(1 << 20, 1 << 16), cupy.cuda.runtime.CUDARuntimeError(2)
    for place, name in (
        (cupy.cuda, "alloc_pinned_memory"),
        (cupy.cuda, "PinnedMemory"),
        (cupy.cuda.runtime, "hostRegister"),
    ):
        fail(place, name, refused)
    with pytest.raises(pagoda.BackendUnavailable, match=r"device_memory: 1099511627776 bytes \("):
        driver.memory(1 << 40)
    with pytest.raises(pagoda.BackendUnavailable, match=r"host_memory: 100 pinned bytes \(status 2\)"):
        driver.pinned(100)
    # Allocators set by the caller: CuPy's without a pool, and other libraries'.
    for error in (refused, MemoryError("status 2")):
        fail(cupy.cuda, "alloc", error)
        with pytest.raises(pagoda.BackendUnavailable, match=r"device_memory: 100 bytes \(status 2\)"):
            driver.memory(100)
    fail(cupy.cuda, "alloc", cupy.cuda.runtime.CUDARuntimeError(700))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="status 700"):
        driver.memory(100)
    for _ in range(2):
        with pytest.raises(
            pagoda.BackendUnavailable, match=r"1048576 bytes more cannot be pinned \(status 2\); 0 pieces"
        ):
            arena.pin(arena.address, 1)
    with pytest.raises(pagoda.BackendUnavailable, match="host_memory = 4611686018427387904: "):
        driver.host_arena(1 << 62, 1 << 16)
    monkeypatch.setattr(Device, "host_pointers", 0)
    with pytest.raises(pagoda.BackendUnavailable, match=r"host_memory: 100 pinned bytes \(status 2\)"):
        cuda.open_driver(0).host_arena(100, 1)


def test_a_kernel_has_the_shared_memory_that_it_asks_for(cupy: Any) -> None:
    """More than the 48 KiB that CUDA allows by default."""
    stream = cuda.open_driver(0).stream()
    stream.launch(instances.MOVE, 1, 32, arguments.Move(0, 0), shared_bytes=100 << 10)


def view_of(array: Any, index: int = 0) -> View:
    driver = cuda.open_driver(index)
    return driver.view("k", array, driver.stream())


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.zeros((3, 2, 8), np.float16), "f16"),
        (np.zeros((3, 4, 8), np.float32)[:, ::2], "f32"),
        (np.zeros((3, 2, 8), ml_dtypes.bfloat16), "bf16"),
        (np.zeros((3, 2, 8), np.uint16), "u16"),
        (np.zeros((0, 2, 8), np.float16), "f16"),
    ],
)
def test_arrays_of_cupy(array: Any, kind: str, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that have memory are read without their array interface, which would take longer than all else."""
    if array.size:
        monkeypatch.setattr(NdArray, "__cuda_array_interface__", property(lambda _: pytest.fail("takes microseconds")))
    view = view_of(NdArray(array))
    assert (view.shape, view.dtype, view.writeable) == (array.shape, kind, True)
    if array.size:
        assert (view.address, view.strides) == (array.ctypes.data, array.strides)
    with pytest.raises(pagoda.InvalidArgument, match="k = ndarray: an array of CuPy or torch on the device"):
        view_of(array)


def test_arrays_by_dlpack(cupy: Any) -> None:
    """Arrays without CUDA's array interface are taken through CuPy, except host arrays and types that CuPy lacks."""
    q, k = DLPackArray(np.ones((2, 4, 16), np.float32)), DLPackArray(np.zeros((2, 2, 16), np.float32))
    v = np.array([1, 3], np.float32).repeat(32).reshape(2, 2, 16)
    with open_cache() as cache, cache.step([cache.create()], [2]) as step:
        out = step.forward(0, q, k, DLPackArray(v, kind=13))
        with pytest.raises(pagoda.InvalidArgument, match="q = DLPackArray: an array of CuPy or torch on the device"):
            step.attend(0, DLPackArray(np.ones((2, 4, 16), np.float32), kind=1))
        with pytest.raises(
            pagoda.InvalidArgument, match=r"q = DLPackArray: one that CuPy takes by DLPack \(characters\)"
        ):
            step.attend(0, DLPackArray(np.ones((2, 4, 16), "S1")))
    assert isinstance(out, NdArray)
    np.testing.assert_allclose(out.hidden[:, 0, 0], [1, 2], rtol=1e-6)


def test_an_array_by_dlpack_is_waited_for_on_the_stream_of_the_step(cupy: Any) -> None:
    """Not on CuPy's current stream: the kernels that read it are on the step's."""
    stream, other = Stream(non_blocking=True), Stream(non_blocking=True)
    q, k, v = (DLPackArray(np.ones((2, heads, 16), np.float32)) for heads in (4, 2, 2))
    with open_cache() as cache, cache.step([cache.create()], [2], stream=stream) as step, other:
        step.forward(0, q, k, v)
    assert [array.stream for array in (q, k, v)] == [stream.ptr] * 3


class Tensor:
    """A torch tensor over host memory that behaves like one on a GPU. slow: whether its array interface was read, which takes
    torch microseconds."""

    kinds: ClassVar = {"float32": "<f4", "float16": "<f2", "uint16": "<u2", "bfloat16": "<V2", "int16": "<i2"}

    def __init__(self, hidden: npt.NDArray[Any], dtype: str, index: int = 0, layout: str = "strided") -> None:
        self.hidden, self.dtype, self.layout = hidden, f"torch.{dtype}", layout
        self.device, self.is_cuda = SimpleNamespace(type="cuda", index=index), index >= 0
        self.shape, self.slow, self.negative = hidden.shape, False, False

    def get_device(self) -> int:
        return int(self.device.index)

    def data_ptr(self) -> int:
        assert self.layout == "strided", "torch raises"
        return self.hidden.ctypes.data if self.hidden.size else 0

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.hidden.itemsize for stride in self.hidden.strides)

    def is_neg(self) -> bool:
        return self.negative

    def detach(self) -> Tensor:
        return self

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.hidden, dtype.removeprefix("torch."))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.slow = True
        if not self.is_cuda or self.layout != "strided":
            raise AttributeError("torch has none of these")
        # torch has no name for some of its types.
        typestr = self.kinds[self.dtype.removeprefix("torch.")]
        contiguous = self.hidden.flags.c_contiguous
        strides, data = None if contiguous else self.hidden.strides, (self.data_ptr(), False)
        return {"shape": self.shape, "typestr": typestr, "strides": strides, "data": data, "version": 2}


class Parameter(Tensor):
    pass


class Subclass(Tensor):
    pass


@pytest.fixture
def tensors(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the part of torch that concerns tensors."""
    names = {name: f"torch.{name}" for name in Tensor.kinds}
    torch = SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(Parameter=Parameter), strided="strided", **names)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize("kind", [Tensor, Parameter, Subclass])
@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16"), ("uint16", "u16")]
)
def test_tensors_of_torch(dtype: str, name: str, kind: type[Tensor], tensors: None) -> None:
    """Both ways of reading give the same; the array interface is used only if a subclass may have changed it."""
    whole = np.zeros((3, 4, 8), np.float32 if dtype == "float32" else np.uint16)
    for hidden in (whole, whole[:, ::2], whole[1:, :, 4:], whole[:1, ::4], whole[:1, :1].transpose(1, 0, 2)):
        tensor = kind(hidden, dtype)
        view = view_of(tensor)
        strides = np.empty(hidden.shape, hidden.dtype).strides if hidden.flags.c_contiguous else hidden.strides
        assert view == View(hidden.ctypes.data, hidden.shape, strides, name)
        assert tensor.slow == (kind is Subclass and dtype != "bfloat16")
    assert view_of(kind(whole[:0], dtype)).shape == (0, 4, 8)


def test_tensors_that_are_refused(tensors: None) -> None:
    rows = np.zeros((3, 2, 8), np.float32)
    negative = Tensor(rows, "float32")
    negative.negative = True
    for tensor, why in (
        (Tensor(rows, "float8_e4m3fn"), r"k = dtype torch\.float8_e4m3fn"),
        (Tensor(rows, "float32", index=1), "k = an array on cuda:1: on cuda:0, the device of the cache"),
        (Tensor(rows, "float32", index=-1), "k = Tensor: an array of CuPy or torch on the device"),
        (Tensor(rows, "float32", layout="sparse_coo"), "k = Tensor: an array of CuPy or torch on the device"),
        (negative, r"k = a tensor that is yet to be negated: what its resolve_neg\(\) returns"),
    ):
        with pytest.raises(pagoda.InvalidArgument, match=why):
            view_of(tensor)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": None},
        {"shape": 5},
        {"shape": (3.5, 2.0, 8.0)},
        {"shape": (3, -2, 8)},
        {"typestr": 5},
        {"typestr": "<f4 "},
        {"data": None},
        {"data": (4096,)},
        {"data": ("4096", False)},
        {"data": (-4096, False)},
        {"data": (0, False)},
        {"data": (1 << 64, False)},
        {"strides": (32,)},
        {"strides": ()},
        {"strides": (64.5, 32.0, 4.0)},
        {"mask": SimpleNamespace()},
    ],
    ids=str,
)
def test_an_array_interface_that_cannot_be(cupy: Any, change: dict[str, Any]) -> None:
    right: dict[str, Any] = {"shape": (3, 2, 8), "typestr": "<f4", "data": (4096, False), "version": 3}
    assert view_of(SimpleNamespace(__cuda_array_interface__=right)).strides == (64, 32, 4)
    empty = right | {"shape": (0, 2, 8), "data": (0, False)}
    assert view_of(SimpleNamespace(__cuda_array_interface__=empty)).address == 0
    refused: list[Any] = [right | change, {}, [], 5]
    for interface in refused:
        with pytest.raises(pagoda.InvalidArgument, match="k = an array whose __cuda_array_interface__ is "):
            view_of(SimpleNamespace(__cuda_array_interface__=interface))


def test_an_array_of_another_gpu_is_refused(cupy: Any) -> None:
    with Device(1):
        array = NdArray(np.zeros((3, 2, 8), np.float16))
    assert view_of(array, 1).shape == (3, 2, 8)
    with pytest.raises(pagoda.InvalidArgument, match="k = an array on cuda:1: on cuda:0, the device of the cache"):
        view_of(array)


def test_an_event_is_recorded_again_when_nobody_has_it(cupy: Any) -> None:
    stream = cuda.open_driver(0).stream()
    first, second = stream.record(), stream.record()
    given: list[Any] = [first, second]
    kept = [event.event for event in given]
    assert kept[0] is not kept[1]
    del first, given
    third, fourth = stream.record(), stream.record()
    assert third.event is kept[0]  # type: ignore[attr-defined]
    assert fourth.event is not kept[0]  # type: ignore[attr-defined]
    assert fourth.event is not kept[1]  # type: ignore[attr-defined]


def test_streams_wait_for_each_other_by_events_of_cuda(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in does all work at once, so no other test would notice missing events."""
    seen: list[Any] = []
    for kind, name in ((Event, "record"), (Event, "synchronize"), (Stream, "wait_event")):
        monkeypatch.setattr(kind, name, lambda *given, name=name: seen.append((name, *given)))
    driver = cuda.open_driver(0)
    first: Any = driver.stream()
    second: Any = driver.stream()
    event: Any = first.record()
    second.follow(event)
    event.wait()
    assert seen == [
        ("record", event.event, first._stream),
        ("wait_event", second._stream, event.event),
        ("synchronize", event.event),
    ]


def test_ctrl_c_anywhere_in_recording_leaves_no_half_of_an_event(cupy: Any) -> None:
    stream, came, after = cuda.open_driver(0).stream(), True, 0
    while came:
        # An exception in a finaliser is a warning, and warnings are errors.
        came = interrupted(stream.record, after)
        after += 1
    assert after > 10


def test_a_thread_that_has_called_nothing_yet_launches(cupy: Any) -> None:
    """It launches kernels that another thread has loaded."""
    rows = NdArray(np.zeros((1, 2, 16), np.float32))
    with open_cache() as cache, ThreadPoolExecutor(1) as pool:
        tokens = cache.create()
        with cache.step([tokens], [1]) as step:
            step.append(0, rows, rows)
        with cache.step([tokens], [1]) as step:
            pool.submit(step.append, 0, rows, rows).result()


def test_streams_of_cupy(cupy: Any) -> None:
    driver = cuda.open_driver(0)
    stream = Stream(non_blocking=True)
    assert driver.caller_stream(stream)._stream is stream  # type: ignore[attr-defined]
    assert driver.caller_stream(4712)._stream.ptr == 4712  # type: ignore[attr-defined]
    assert driver.caller_stream(None)._stream.ptr == 0  # type: ignore[attr-defined]
    with stream:
        assert driver.caller_stream(None)._stream is stream  # type: ignore[attr-defined]
    with pytest.raises(pagoda.InvalidArgument, match="stream = 'it'"):
        driver.caller_stream("it")


def test_a_stream_that_is_another_in_each_thread_is_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's current one, with CUPY_CUDA_PER_THREAD_DEFAULT_STREAM set, torch's, or a given one."""
    driver, refused = (
        cuda.open_driver(0),
        pytest.raises(pagoda.InvalidArgument, match="stream = 2, cudaStreamPerThread: one"),
    )
    stream = Stream(null=True)
    stream.ptr = 2
    for given in (stream, 2, SimpleNamespace(cuda_stream=2, device_index=0)):
        with refused:
            driver.caller_stream(given)
    with stream, refused:
        driver.caller_stream(None)
    torch = Torch(initialized=True)
    torch.now = SimpleNamespace(cuda_stream=2)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with refused:
        driver.caller_stream(None)


def test_a_stream_of_another_gpu_is_refused(cupy: Any) -> None:
    """Before a step is opened on it, which could not be closed again."""
    with Device(1):
        other = Stream(non_blocking=True)
    with open_cache() as cache:
        for stream in (other, SimpleNamespace(cuda_stream=4712, device_index=1)):
            with pytest.raises(pagoda.InvalidArgument, match="a stream of cuda:1: of cuda:0, the device of the cache"):
                with cache.step([cache.create()], [1], stream=stream):
                    pass
        for stream in (Stream(non_blocking=True), SimpleNamespace(cuda_stream=4712, device_index=0)):
            with cache.step([cache.create()], [1], stream=stream) as step:
                step.append(0, *[NdArray(np.ones((1, 2, 16), np.float32))] * 2)


def test_a_capture_that_has_failed_is_one_until_it_is_ended(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that CUDA refuses invalidates the capture, and CuPy raises if asked about it. The first error is reported."""

    def invalid(stream: Stream) -> bool:
        raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")

    with open_cache() as cache, monkeypatch.context() as captured:
        with pytest.raises(ZeroDivisionError):
            with cache.step([cache.create()], [1]):
                captured.setattr(Stream, "is_capturing", invalid)
                captured.setattr(Event, "record", lambda *_: pytest.fail("an event of the graph"))
                raise ZeroDivisionError
        captured.undo()
        with cache.step([cache.create()], [1]) as step:
            step.append(0, *[NdArray(np.ones((1, 2, 16), np.float32))] * 2)


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_is_captured_and_replayed(waits: bool, cupy: Any) -> None:
    """With launches only, and without calls that CUDA refuses during a capture. waits: whether the stream, which is not the
    current one, waits for the default stream."""
    stream, graphs = Stream(non_blocking=True), list[Any]()
    stream.waits = waits
    q, k, v, out = (NdArray(np.ones((2, heads, 16), np.float32)) for heads in (4, 2, 2, 4))
    v.hidden[1] = 3

    def forward(step: pagoda.Step) -> None:
        step.forward(0, q, k, v, out=out)

    def capture(step: pagoda.Step) -> None:
        stream.begin_capture()
        forward(step)
        graphs.append(stream.end_capture())
        graphs[0].launch()

    with open_cache() as cache:
        cache.declare(sequences=2, new_tokens=1, context=64)
        batch = [cache.create() for _ in range(2)]
        for launch in (forward, capture, lambda step: step.replay(graphs[0].launch)):
            out.hidden[:] = 0
            with cache.step(batch, [1, 1], stream=stream) as step:
                launch(step)
            np.testing.assert_allclose(out.hidden, v.hidden.repeat(2, 1), rtol=1e-6)


@pytest.mark.parametrize("call", ["append", "attend"])
def test_kernels_are_not_left_out_of_a_graph(call: str, cupy: Any) -> None:
    """They would run once, on the stream of the step, and in no replay."""
    other = Stream(non_blocking=True)
    q, k, out = (NdArray(np.ones((1, heads, 16), np.float32)) for heads in (4, 2, 4))
    with open_cache() as cache:
        cache.declare(sequences=1, new_tokens=1, context=64)
        with cache.step([cache.create()], [1]) as step:
            calls: dict[str, Callable[[], object]] = {
                "append": lambda: step.append(0, k, k),
                "attend": lambda: step.attend(0, q, out=out),
            }
            if call == "attend":
                calls["append"]()
            other.begin_capture()
            with (
                other,
                pytest.raises(pagoda.InvalidArgument, match=f"{call}: while the current stream is captured, but"),
            ):
                calls[call]()
            assert not other.end_capture().launches
            step.forward(0, q, k, k, out=out) if call == "append" else calls[call]()


def test_a_step_asks_nothing_of_cuda_that_it_knows(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes microseconds: a device that is current is not made so, and what has ended is not waited for."""
    q, k = (NdArray(np.ones((2, heads, 16), np.float32)) for heads in (4, 2))
    seen: list[str] = []

    def note(kind: Any, name: str) -> None:
        call = getattr(kind, name)

        def noted(*given: Any) -> Any:
            seen.append(f"{kind.__name__}.{name}")
            return call(*given)

        monkeypatch.setattr(kind, name, noted)

    with open_cache() as cache:
        batch, out = [cache.create() for _ in range(2)], NdArray(np.empty((2, 4, 16), np.float32))
        for number in range(5):
            if number == 4:
                for kind, name in (
                    (Device, "__enter__"),
                    (Event, "record"),
                    (Event, "synchronize"),
                    (Stream, "wait_event"),
                ):
                    note(kind, name)
            with cache.step(batch, [1, 1]) as step:
                step.forward(0, q, k, k, out=out)
        assert seen == ["Event.record"]


def test_a_stream_works_on_its_device(cupy: Any) -> None:
    """Whichever device is current. Address 0 means the current device's default stream."""
    driver = cuda.open_driver(1)
    stream, memory = driver.caller_stream(None), driver.memory(512)
    there = np.ctypeslib.as_array((ctypes.c_uint8 * 512).from_address(memory.address))
    there[:] = right = np.arange(512, dtype=np.uint16).astype(np.uint8)
    stream.zero(memory.address + 64, 100)
    stream.copy(memory.address + 256, memory.address + 40, 8)
    stream.copy_rows(memory.address + 300, 20, memory.address + 400, 32, 10, 3)
    stream.follow(stream.record())
    assert not stream.capturing
    moved = right[40:48].copy(), right[400:496].reshape(3, 32)[:, :10].copy()
    right[64:164] = 0
    right[256:264], right[300:360].reshape(3, 20)[:, :10] = moved
    np.testing.assert_array_equal(there, right)
    with stream.current():
        assert Device.current == 1
    assert Device.current == 0
    assert on_default == {1}


def test_rows_that_are_further_apart_than_a_copy_of_rows_takes(cupy: Any) -> None:
    pitch = 1 << 31
    source, target = np.zeros(2 * pitch + 64, np.uint8), np.zeros(3 * 64, np.uint8)
    for row in range(3):
        source[row * pitch :][:64] = row + 1
    stream = cuda.open_driver(0).stream()
    stream.copy_rows(target.ctypes.data, 64, source.ctypes.data, pitch, 64, 3)
    np.testing.assert_array_equal(target.reshape(3, 64), np.arange(1, 4)[:, None].repeat(64, 1))


class Torch:
    """torch's streams. As in torch, an external stream at address 0 is a new one, and odd addresses are refused."""

    def __init__(self, *, initialized: bool) -> None:
        self.now = SimpleNamespace(cuda_stream=0)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: initialized,
            current_stream=lambda device: self.now,
            default_stream=lambda device: SimpleNamespace(cuda_stream=0),
            ExternalStream=self._external,
            stream=self._stream,
        )

    def _external(self, address: int, device: int) -> Any:
        if address % 2:
            raise RuntimeError(f"invalid StreamId{address}")
        return SimpleNamespace(cuda_stream=address or 9999)

    @contextlib.contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def test_steps_are_on_the_stream_of_torch(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(initialized=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver = cuda.open_driver(0)
    for address in (0, 4712):
        torch.now = SimpleNamespace(cuda_stream=address)
        stream = driver.caller_stream(None)
        torch.now = SimpleNamespace(cuda_stream=17)
        with stream.current():
            assert torch.now.cuda_stream == address
            assert cupy_stand_in.get_current_stream().ptr == address
        assert torch.now.cuda_stream == 17
    assert driver.caller_stream(SimpleNamespace(cuda_stream=4712))._stream.ptr == 4712  # type: ignore[attr-defined]


def test_a_stream_that_is_current_in_torch_is_not_made_so(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it current would take longer than a launch."""
    torch = Torch(initialized=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch.cuda.stream = lambda stream: pytest.fail("it is")
    for address, now in ((4712, 4712), (0, 0), (1, 0)):
        torch.now = SimpleNamespace(cuda_stream=now)
        with cuda.open_driver(0).caller_stream(address).current():
            assert cupy_stand_in.get_current_stream().ptr == address


def test_what_does_not_become_current_leaves_what_was(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, stream = Torch(initialized=True), cuda.open_driver(1).stream()
    torch.cuda.ExternalStream = lambda address, device: 1 // 0
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ZeroDivisionError):
        stream.current()
    assert (Device.current, Stream.entered) == (0, [])


def test_the_default_stream_has_two_addresses(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """0, and 1, which is cudaStreamLegacy."""
    torch = Torch(initialized=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for address in (0, 1):
        torch.now = SimpleNamespace(cuda_stream=17)
        with cuda.open_driver(0).caller_stream(address).current():
            assert torch.now.cuda_stream == 0


def test_a_torch_without_a_gpu_is_left_alone(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(initialized=False)
    del torch.cuda.stream, torch.cuda.current_stream, torch.cuda.ExternalStream
    monkeypatch.setitem(sys.modules, "torch", torch)
    with cuda.open_driver(0).caller_stream(None).current():
        pass


def test_the_stand_in_asks_nothing_that_cupy_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("cupy")
    ours = cupy_stand_in.install(monkeypatch)
    assert cupy_stand_in.differences(ours, real) == []
