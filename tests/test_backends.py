"""The stand-in for a model's weights in measurements: that all of it is read, and by whom."""

from __future__ import annotations

import ctypes
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import device_arrays
import emulator
import numpy as np
import numpy.typing as npt
import pytest
from emulator.driver import CallerStream, EmulatedDriver
from pagoda.kernels import arguments, instances
from pagoda.kernels.instances import Kernel
from pagoda.lm.arrays import Library
from pagoda.measuring import backends, gpu
from pagoda.measuring.backends import CpuBackend, GpuBackend
from pagoda.report import StepReport
from test_device_streaming import Clocked, ClockedStream

WORD = 16


def test_each_thread_of_the_cpu_reads_its_part_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[list[npt.NDArray[np.uint64]]] = []
    monkeypatch.setattr(np, "ones", lambda count, dtype: np.arange(count, dtype=dtype))

    def note(_: object, parts: list[npt.NDArray[np.uint64]]) -> list[int]:
        shares.append(parts)
        return []

    with CpuBackend(8 * 1000, 7, 3) as backend:
        monkeypatch.setattr(backend._pool, "map", note)
        for layer in range(7):
            backend.read_weights(layer)
    assert [len(parts) for parts in shares] == [3] * 7
    assert np.concatenate([part for parts in shares for part in parts]).tolist() == list(range(1000))
    assert max(sum(map(len, parts)) for parts in shares) == -(-1000 // 7)


def test_weights_have_been_read_when_the_cpu_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def slowly(words: npt.NDArray[np.uint64]) -> None:
        time.sleep(0.02)
        read.append(len(words))

    with CpuBackend(8 * 12, 2, 3) as backend:
        monkeypatch.setattr(backends, "np", SimpleNamespace(add=SimpleNamespace(reduce=slowly)))
        backend.read_weights(1)
        assert read == [2, 2, 2]


@pytest.mark.parametrize("count", [1, 31, 32, 8 * 64 - 1, 8 * 64, 20 * 64 + 5])
def test_the_kernel_reads_every_word(count: int) -> None:
    """A thread reports the one nonzero word, wherever it is, and none reads past the end, or what another reads."""
    emulator.require()
    driver = EmulatedDriver()
    stream = driver.stream()
    memory, found = driver.memory(WORD * (count + 64)), driver.memory(4)
    memory.array[:] = 0
    words, seen = memory.array.view(np.uint32), found.array.view(np.uint32)
    # Who reads one of those past the end reports it, or not what there is.
    words[4 * count :: 4] = 4711
    rng = np.random.default_rng(count)
    for place in {0, 4 * count - 1, *rng.integers(0, 4 * count, 12).tolist()}:
        words[place], seen[:] = 4711, 0
        stream.launch(instances.READ, 2, 32, arguments.Read(memory.address, count, found.address, 4711))
        stream.record().wait()
        assert seen[0] == 4711
        words[place] = 0
    if count > 32:
        # The words of two threads: only who reads both has what is sought.
        words[0], words[4 * 32] = 1, 4711 ^ 1
    stream.launch(instances.READ, 2, 32, arguments.Read(memory.address, count, found.address, 4711))
    seen[:] = 0
    stream.record().wait()
    assert seen[0] == 0


class Noted(CallerStream):
    """A caller's stream that records launches."""

    def __init__(self, driver: EmulatedDriver) -> None:
        super().__init__(driver)
        self.launched: list[tuple[Kernel, int, int, Any]] = []

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        self.launched.append((kernel, grid, threads, arguments))


@pytest.mark.parametrize(("size", "layers"), [(16 * 1000, 7), (16 * 5, 7), (16 * 7 + 15, 7), (0, 3)])
def test_a_gpu_reads_its_weights_layer_by_layer(size: int, layers: int) -> None:
    """Every whole word exactly once, on the stream of the steps, by all multiprocessors."""
    driver = EmulatedDriver()
    stream = driver._default = Noted(driver)
    backend = GpuBackend(driver, Library(device_arrays.xp, device_arrays.device), size, layers)
    for layer in range(layers):
        backend.read_weights(layer)
    calls = [call for *_, call in stream.launched]
    read = [(call.words, call.words + WORD * call.count) for call in calls]
    assert all(stop == start for (_, stop), (start, _) in pairwise(read))
    assert sum(stop - start for start, stop in read) == size // WORD * WORD
    if size:
        assert read[0][0] == backend._weights.address
        counts = [call.count for call in calls] + [0] * (layers - len(calls))
        assert max(counts) - min(counts) <= 1
        kernel, grid, threads, call = stream.launched[0]
        assert (kernel, grid, threads) == (instances.READ, 2 * driver.multiprocessors, 512)
        assert call.sought, "weights are zeros"


def test_what_a_step_of_a_gpu_has_read() -> None:
    """Of 1,000 bytes of rows, 600 came over the link and the CPU read 100; weights lie on the device."""
    driver = EmulatedDriver()
    backend = GpuBackend(driver, Library(device_arrays.xp, device_arrays.device), 5000, 2)
    report = StepReport(1.0, 0.0, {"pcie": 600, "memory": 100, "disk": 200})
    assert backend.moved(report, 1000) == {"device": 5300, "pcie": 600, "memory": 100, "disk": 200}
    # Copies ahead for a step that never came can exceed the total.
    assert backend.moved(StepReport(1.0, 0.0, {"pcie": 1100, "memory": 0, "disk": 0}), 1000)["device"] == 5000


def test_arrays_of_a_gpu_are_f16_on_the_device() -> None:
    driver = device_arrays.StrictDriver()
    with GpuBackend(driver, Library(device_arrays.xp, device_arrays.device), 0, 1) as backend:
        array = backend.array(np.ones((2, 3), np.float32))
    assert isinstance(array, device_arrays.DeviceArray)
    assert array.shape == (2, 3)
    assert array.dtype == np.float16
    assert device_arrays.device.depth == 0


class TimedReads(ClockedStream):
    """Device memory at 4 TB/s."""

    def launch(self, kernel: Any, grid: int, threads: int, call: Any) -> None:
        assert kernel == instances.READ
        self.time = max(self.time, self.driver.now) + self.driver.launch_seconds + WORD * call.count / 4e12


class Timed(Clocked):
    """A device with such streams."""

    def stream(self) -> TimedReads:
        return TimedReads(self)


def test_ceilings_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device with copies of 50 GB/s; the cost of launches and waits is negligible."""
    driver: Any = Timed(45e9, 50e9)
    monkeypatch.setattr(time, "perf_counter", lambda: driver.now)
    assert gpu.ceilings(driver) == pytest.approx({"device": 4e12, "pcie": 50e9}, rel=0.02)
