"""Measures what the links of this machine carry: the ceilings that figures are set against. rates.py keeps it."""

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
"""How long each measurement reads."""

MEMORY_BYTES = 512 << 20
"""K and V that are attended to, more than caches of a CPU hold."""

DISK_BYTES = 1 << 30
"""The file that is read."""

READER = ModelSpec([AttentionLayer(num_q_heads=2 * READER_ROWS, num_kv_heads=2, head_dim=128)] * 4)
"""Attention with so few queries on a K/V head that in f16 it waits for memory."""

READER_DTYPE = "f16"
"""Of the rows that it reads to know how fast memory is."""

STORED = tuple(instances.NAMES | instances.QUANTISED)
"""Formats of rows that a GPU may have on the host."""


def measure(threads: int, directory: Path, gpus: Iterable[Driver] = ()) -> Calibration:
    """Measures alone and together, and for each GPU the ways to pages of the host tier; writes `DISK_BYTES` there twice.

    Raises TierIOError, and InvalidArgument where formats are not to be chosen.
    """
    check_not_forced()
    alone = {"disk": _read_disk(directory).rate}
    with _memory_reader(threads) as reader:
        spans = _read_for(SECONDS, reader.read)
        alone["memory"] = _rate(spans)
        met: list[_Span] = []
        while not met:  # A busy machine may have kept this thread from memory for as long as the disk was read.
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
    """Bytes a second of memory alone, measured now, by attention or in order, whichever is faster.

    Attention does not wait for memory alone.
    """
    with _memory_reader(threads) as reader:
        by_attention = _rate(_read_for(SECONDS, reader.read))
    return max(by_attention, _rate_in_order(threads))


def disk_ceiling(directory: Path, seconds: float) -> float:
    """Bytes a second of a file of `DISK_BYTES` that is read in order for so long, measured now. Raises TierIOError."""
    return _read_disk(directory, seconds).rate


def _rate_in_order(threads: int) -> float:
    """Bytes a second of memory that is read as weights are."""
    with CpuBackend(MEMORY_BYTES, 1, threads) as words:

        def read() -> _Span:
            start = time.perf_counter()
            words.read_weights(0)
            return _Span(start, time.perf_counter(), MEMORY_BYTES)

        return _rate(_read_for(SECONDS, read))


class _Span(NamedTuple):
    """Bytes that were read from `start` to `stop`, in seconds of the clock."""

    start: float
    stop: float
    bytes: int

    @property
    def rate(self) -> float:
        return self.bytes / (self.stop - self.start)


def _rate(spans: list[_Span]) -> float:
    """Bytes a second, what was between the spans not counted."""
    return sum(span.bytes for span in spans) / sum(span.stop - span.start for span in spans)


def _read_for(seconds: float, read: Callable[[], _Span]) -> list[_Span]:
    """Reads again and again until so many seconds have passed, after once that is not counted."""
    read()
    start = time.perf_counter()
    spans: list[_Span] = []
    while not spans or spans[-1].stop < start + seconds:
        spans.append(read())
    return spans


def _both(reader: _MemoryReader, directory: Path) -> tuple[_Span, list[_Span]]:
    """Reads the disk, and memory meanwhile; the passes over memory that met the disk."""
    with ThreadPoolExecutor(1) as pool:
        under_way, passes = pool.submit(_read_disk, directory), []
        while not under_way.done():
            passes.append(reader.read())
    disk = under_way.result()
    return disk, _beside(passes, disk)


def _beside(passes: list[_Span], disk: _Span) -> list[_Span]:
    """Passes over memory while the disk was read: before that the file is written."""
    return [each for each in passes if each.stop > disk.start and each.start < disk.stop]


class _MemoryReader:
    """A sequence in memory that is attended to over and over."""

    def __init__(self, cache: Cache, sequence: Sequence) -> None:
        self._cache, self._sequence = cache, sequence
        layer, rng = READER.attention_layers[0], np.random.default_rng(0)
        self._q, self._row = (
            rng.standard_normal((1, heads, layer.head_dim), np.float32)
            for heads in (layer.num_q_heads, layer.num_kv_heads)
        )

    def read(self) -> _Span:
        """Reads it all once."""
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
