"""Measures the bandwidth of this machine's links: the ceilings that figures are compared with. rates.py stores them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagoda import _core
from pagoda.cache import Cache, Sequence
from pagoda.device.driver import Driver
from pagoda.disk import DISK_TIMEOUT
from pagoda.formats import check_not_forced
from pagoda.kernels import instances
from pagoda.measuring import gpu
from pagoda.measuring.backends import CpuBackend
from pagoda.measuring.filling import fill
from pagoda.rates import READER_ROWS, Calibration
from pagoda.spec import AttentionLayer, ModelSpec

SECONDS = 1.0
"""Duration of each measurement."""

MEMORY_BYTES = 512 << 20
"""Size of the K and V that are attended to: more than the caches of a CPU hold."""

DISK_BYTES = 1 << 30
"""Size of the file that is read."""

READER = ModelSpec([AttentionLayer(num_q_heads=2 * READER_ROWS, num_kv_heads=2, head_dim=128)] * 4)
"""Attention with so few queries per K/V head that it is bound by memory in f16."""

READER_DTYPE = "f16"
"""The row format in which READER measures memory."""

STORED = tuple(instances.NAMES | instances.QUANTISED)
"""Row formats that a cache on a GPU may have."""


def measure(threads: int, directory: Path, gpus: Iterable[Driver] = ()) -> Calibration:
    """Measures memory and disk, alone and together, and for each GPU the routes to pages of the host tier. Writes
    `DISK_BYTES` to `directory` twice.

    Raises TierIOError, and InvalidArgument if the environment forces a format.
    """
    check_not_forced()
    alone = {"disk": _read_disk(directory).rate}
    with _memory_reader(threads) as reader:
        spans = _read_for(SECONDS, reader.read)
        alone["memory"] = _rate(spans)
        met: list[_Span] = []
        while not met:  # On a busy machine this thread may not have run at all while the disk was read.
            disk, met = _both(reader, directory)
        routes = {driver.name: gpu.measure(driver, threads, reader.read, spans[-1].bytes) for driver in gpus}
    if routes:
        formats = {name: alone["memory"] if name == READER_DTYPE else _rate_of(name, threads) for name in STORED}
        routes = {name: replace(one, formats=formats) for name, one in routes.items()}
    together = {"disk": disk.rate, "memory": _rate(met)}
    return Calibration(threads, str(directory.absolute()), alone, together, routes)


def _rate_of(dtype: str, threads: int) -> float:
    """Bytes a second of attention over rows of a format."""
    with _memory_reader(threads, dtype) as reader:
        return _rate(_read_for(SECONDS, reader.read))


def memory_ceiling(threads: int) -> float:
    """Bytes a second of memory alone, measured now, by attention or by reading in order, whichever is faster.

    Attention does not only wait for memory.
    """
    with _memory_reader(threads) as reader:
        by_attention = _rate(_read_for(SECONDS, reader.read))
    return max(by_attention, _rate_in_order(threads))


def disk_ceiling(directory: Path, seconds: float) -> float:
    """Bytes a second of reading a file of `DISK_BYTES` in order for `seconds`, measured now. Raises TierIOError."""
    return _read_disk(directory, seconds).rate


def _rate_in_order(threads: int) -> float:
    """Bytes a second of memory that is read in the way of weights."""
    with CpuBackend(MEMORY_BYTES, 1, threads) as words:

        def read() -> _Span:
            start = time.perf_counter()
            words.read_weights(0)
            return _Span(start, time.perf_counter(), MEMORY_BYTES)

        return _rate(_read_for(SECONDS, read))


class _Span(NamedTuple):
    """Bytes that were read between two times of the clock, in seconds."""

    start: float
    stop: float
    bytes: int

    @property
    def rate(self) -> float:
        return self.bytes / (self.stop - self.start)


def _rate(spans: list[_Span]) -> float:
    """Bytes a second, without the time between spans."""
    return sum(span.bytes for span in spans) / sum(span.stop - span.start for span in spans)


def _read_for(seconds: float, read: Callable[[], _Span]) -> list[_Span]:
    """Reads repeatedly until `seconds` have passed, after one read that is not counted."""
    read()
    start = time.perf_counter()
    spans: list[_Span] = []
    while not spans or spans[-1].stop < start + seconds:
        spans.append(read())
    return spans


def _both(reader: _MemoryReader, directory: Path) -> tuple[_Span, list[_Span]]:
    """Reads disk and memory at the same time; returns the span of the disk, and the passes over memory that overlap it."""
    with ThreadPoolExecutor(1) as pool:
        under_way, passes = pool.submit(_read_disk, directory), []
        while not under_way.done():
            passes.append(reader.read())
    disk = under_way.result()
    return disk, _beside(passes, disk)


def _beside(passes: list[_Span], disk: _Span) -> list[_Span]:
    """The passes over memory while the disk was read; before that, the file was written."""
    return [each for each in passes if each.stop > disk.start and each.start < disk.stop]


class _MemoryReader:
    """A sequence in memory, for attending to it over and over."""

    def __init__(self, cache: Cache, sequence: Sequence) -> None:
        self._cache, self._sequence = cache, sequence
        layer, rng = READER.attention_layers[0], np.random.default_rng(0)
        self._q, self._row = (
            rng.standard_normal((1, heads, layer.head_dim), np.float32)
            for heads in (layer.num_q_heads, layer.num_kv_heads)
        )

    def read(self) -> _Span:
        """Attends to all of it once."""
        with self._cache.step([self._sequence], [1]) as step:
            start = time.perf_counter()
            for index in range(len(READER.layers)):
                step.forward(index, self._q, self._row, self._row)
            stop = time.perf_counter()
            step.commit([0])
        return _Span(start, stop, step.report.bytes["memory"])


@contextmanager
def _memory_reader(threads: int, dtype: str = READER_DTYPE) -> Iterator[_MemoryReader]:
    tokens = MEMORY_BYTES // READER.bytes_per_token(dtype, dtype)
    with Cache(
        READER,
        device="cpu",
        k_dtype=dtype,
        v_dtype=dtype,
        device_memory=2 * MEMORY_BYTES,
        host_memory=0,
        threads=threads,
    ) as cache:
        sequence = cache.create()
        fill(cache, sequence, tokens)
        yield _MemoryReader(cache, sequence)


def _read_disk(directory: Path, seconds: float = SECONDS) -> _Span:
    limits = timedelta(seconds=seconds), timedelta(seconds=DISK_TIMEOUT)
    size, took = _core.time_disk_reads(str(directory), DISK_BYTES, *limits)
    stop = time.perf_counter()
    return _Span(stop - took, stop, size)
