"""The sizes from which one way to bytes of the host beats another, measured once for each device, at first use, if there is
memory to measure with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagoda.device.driver import Driver, Event, Stream
from pagoda.device.mover import KERNEL_THREADS, RUN_BYTES, WORD, Mover, list_runs
from pagoda.device.ring import SLOTS
from pagoda.errors import BackendUnavailable
from pagoda.kernels import arguments, instances

MEASURED_RUNS = [1 << shift for shift in range(14, 23)]
"""16 KiB to 4 MiB."""

MEASURED_BYTES = 16 << 20
REPEATS = 3

MEASURED_LAYER_BYTES = [1 << shift for shift in range(16, 23)]
"""64 KiB to 4 MiB."""

MEASURED_LAYERS = 8

RING_MEMORY_BYTES = (SLOTS + 1) * MEASURED_LAYER_BYTES[-1]
"""Device memory of the measurement: the slots, and where kernels write to."""

COPY_ENGINE_BYTES = 512 << 10
"""Without a measurement: the value of an H200 (docs/benchmarks/gpu.md)."""

RING_BYTES = 1 << 20
"""Without a measurement: an H200 reads in place at 0.7 of the link's bandwidth (docs/benchmarks/gpu.md). For a MiB that loses
8 us, the cost of a copy and its events."""


class Threshold(functools.cached_property[int]):
    """An attribute of a driver: the result of `measure`, which is called once. While the device has fewer than `memory` bytes
    free to measure with, the value is `otherwise`."""

    def __init__(self, measure: Callable[[Driver], int], memory: int, otherwise: int) -> None:
        super().__init__(measure)
        self._memory, self._otherwise = memory, otherwise

    def __get__(self, driver: Any, owner: Any = None) -> Any:
        # Do not just try: before CuPy refuses memory, it empties its pool and collects garbage.
        if driver is not None and driver.free_bytes < self._memory:
            return self._otherwise
        try:
            return super().__get__(driver, owner)
        except BackendUnavailable:
            # The caller has set a limit, or somebody else has taken the memory.
            vars(driver)[self.attrname] = self._otherwise
            return self._otherwise


def copy_engine_bytes(driver: Driver) -> int:
    """The size from which the copy engine beats the kernel at copying runs from pinned memory, as `Mover` uses them.

    Copies MEASURED_BYTES in runs of each size by both; returns the smallest size at which the copy engine is not slower, or
    twice the largest. Measures the time that the caller waits, because issuing a copy is a part of its cost.
    """
    device, host = driver.memory(MEASURED_BYTES), driver.pinned(MEASURED_BYTES)
    stream, mover = driver.stream(), Mover(driver, None)
    for size in MEASURED_RUNS:
        places = np.arange(0, MEASURED_BYTES, size, dtype=np.uint64)
        ends = [places + np.uint64(host.address), places + np.uint64(device.address)]
        runs = np.stack([*ends, np.full(len(places), size, np.uint64)], 1)
        by_engine, by_kernel = (
            seconds(stream, functools.partial(copy, stream, runs)) for copy in (mover.by_engine, mover.by_kernel)
        )
        if by_engine <= by_kernel:
            return size
    return 2 * MEASURED_RUNS[-1]


def seconds(stream: Stream, copy: Callable[[], None]) -> float:
    """Seconds of the fastest of some repeats; the first one may compile and is not counted."""
    best = float("inf")
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        copy()
        stream.record().wait()
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def ring_bytes(driver: Driver) -> int:
    """The bytes of a layer from which the ring beats reading in place, if every byte is read once.

    Goes over a row of layers of each size both ways, with a kernel that only reads and writes; returns the smallest size at
    which the ring is not slower, or twice the largest. The rest of a step would hide copies but not reads, so the ring is not
    chosen too early. Takes about 20 ms.
    """
    largest = MEASURED_LAYER_BYTES[-1]
    ring, host = driver.memory(RING_MEMORY_BYTES), driver.pinned(largest)
    sink = ring.address + SLOTS * largest
    stream, copying = driver.stream(), driver.stream()
    for size in MEASURED_LAYER_BYTES:
        # One piece for each thread block.
        piece = -(-size // driver.multiprocessors // WORD) * WORD
        starts = range(0, size, piece)
        runs = [
            (source + at, sink + at, min(piece, size - at))
            for source in (host.address, *(ring.address + slot * largest for slot in range(SLOTS)))
            for at in starts
        ]
        listed = driver.pinned(RUN_BYTES * len(runs))
        list_runs(listed, runs)
        calls = [
            arguments.Move(listed.address + RUN_BYTES * len(starts) * number, len(starts))
            for number in range(1 + SLOTS)
        ]

        def read(number: int, calls: list[arguments.Move] = calls) -> None:
            stream.launch(instances.MOVE, driver.multiprocessors, KERNEL_THREADS, calls[number])

        def in_place() -> None:
            for _ in range(MEASURED_LAYERS):
                read(0)

        def by_ring(size: int = size) -> None:
            ends: list[Event] = []
            for layer in range(MEASURED_LAYERS):
                slot = layer % SLOTS
                if layer >= SLOTS:
                    copying.follow(ends[layer - SLOTS])
                copying.copy(ring.address + slot * largest, host.address, size)
                stream.follow(copying.record())
                read(1 + slot)
                ends.append(stream.record())

        if seconds(stream, by_ring) <= seconds(stream, in_place):
            return size
    return 2 * largest
