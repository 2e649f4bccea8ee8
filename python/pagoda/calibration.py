"""What the links of this machine carry: the ceilings that figures are set against. Measured once, and kept for the user."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagoda import _core
from pagoda.cache import Cache, Sequence
from pagoda.errors import TierIOError
from pagoda.filling import fill
from pagoda.spec import AttentionLayer, ModelSpec

SECONDS = 1.0
"""How long each measurement reads."""

MEMORY_BYTES = 512 << 20
"""K and V that are attended to, more than caches of a CPU hold."""

DISK_BYTES = 1 << 30
"""The file that is read."""

READER = ModelSpec([AttentionLayer(num_q_heads=8, num_kv_heads=2, head_dim=128)] * 4)
"""Attention in f16 with so few queries on a K/V head that it waits for memory."""


@dataclass(frozen=True)
class Calibration:
    """Bytes a second by link, named as in `StepReport.bytes`."""

    threads: int
    """Of the CPU that read memory."""
    directory: str
    """Where the file was."""
    alone: dict[str, float]
    """Each link, the other one at rest."""
    together: dict[str, float]
    """Both at once."""

    def is_of(self, threads: int, directory: Path) -> bool:
        """Whether it was measured with as many threads and on the file system of `directory`."""
        try:
            same = Path(self.directory).stat().st_dev == directory.stat().st_dev
        except OSError:
            return False
        return same and threads == self.threads


def measure(threads: int, directory: Path) -> Calibration:
    """Measures alone and together; writes `DISK_BYTES` there twice. Raises TierIOError."""
    alone = {"disk": _read_disk(directory).rate}
    with _memory_reader(threads) as reader, ThreadPoolExecutor(1) as pool:
        alone["memory"] = _rate(reader.read_for(SECONDS))
        under_way, passes = pool.submit(_read_disk, directory), []
        while not under_way.done():
            passes.append(reader.read())
        disk = under_way.result()
    together = {"disk": disk.rate, "memory": _rate(_beside(passes, disk))}
    return Calibration(threads, str(directory.absolute()), alone, together)


def ceilings(threads: int, directory: Path | None) -> dict[str, float]:
    """Bytes a second of memory, and of the disk if there is a directory, each alone: as kept if that was for as many threads
    and this file system, else measured now."""
    before = kept()
    if before is not None and before.is_of(threads, directory or Path(before.directory)):
        return {link: rate for link, rate in before.alone.items() if link != "disk" or directory is not None}
    with _memory_reader(threads) as reader:
        rates = {"memory": _rate(reader.read_for(SECONDS))}
    return rates if directory is None else rates | {"disk": _read_disk(directory).rate}


def place() -> Path:
    """The file that a calibration is kept in: one for each machine that shares the folder."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser()
    return folder / "pagoda" / f"calibration-{platform.node()}.json"


def keep(calibration: Calibration) -> None:
    """Keeps it, in the place of an earlier one. Raises OSError."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(asdict(calibration), indent=2))
    fresh.replace(path)


def kept() -> Calibration | None:
    """What was kept; None if nothing was, or it cannot be read."""
    try:
        return Calibration(**json.loads(place().read_text()))
    except (OSError, ValueError, TypeError):
        return None


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

    def read_for(self, seconds: float) -> list[_Span]:
        """Reads it until so many seconds have passed, after once that is not counted."""
        self.read()
        start = time.perf_counter()
        spans: list[_Span] = []
        while not spans or spans[-1].stop < start + seconds:
            spans.append(self.read())
        return spans


@contextmanager
def _memory_reader(threads: int) -> Iterator[_MemoryReader]:
    tokens = MEMORY_BYTES // READER.bytes_per_token()
    with Cache(READER, device="cpu", device_memory=2 * MEMORY_BYTES, host_memory=0, threads=threads) as cache:
        sequence = cache.create()
        fill(cache, sequence, tokens)
        yield _MemoryReader(cache, sequence)


def _read_disk(directory: Path) -> _Span:
    try:
        with tempfile.TemporaryDirectory(prefix="pagoda-", dir=directory) as scratch:
            size, seconds = _core.time_disk_reads(scratch, DISK_BYTES, timedelta(seconds=SECONDS))
            stop = time.perf_counter()
    except OSError as error:
        raise TierIOError(f"disk = {str(directory)!r}: {error}") from error
    return _Span(stop - seconds, stop, size)
