"""Copies between tiers: neighbours are merged, large runs copied by the copy engine, small ones by a kernel.

The copy engine takes microseconds for each copy, whatever its size. A kernel that reads and writes pinned memory in place
takes one launch for all copies, but occupies multiprocessors. The driver knows from which size the copy engine is faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.device.driver import Driver, Event, HostArena, Pinned, Stream
from pagoda.kernels import arguments, instances

WORD = 16
"""Bytes that a thread of the kernel copies at a time."""

KERNEL_BLOCKS, KERNEL_THREADS = 16, 256
"""Of the kernel. Each block has 16 KiB under way, 256 KiB in all; 55 GB/s times 1.3 us of latency are 72."""

RUN_BYTES = 24
"""Bytes of a run as the kernel reads it."""

PIECE_BYTES = 64 << 10
"""The longest run for a thread block: longer ones are cut, so that all thread blocks have about the same amount of work."""

Runs = npt.NDArray[np.uint64]
"""[source, target, bytes] of each run."""


def list_runs(pinned: Pinned, runs: npt.ArrayLike) -> arguments.Move:
    """Writes runs into pinned memory; returns the kernel's arguments."""
    rows = np.asarray(runs, np.uint64)
    pinned.array[: rows.nbytes].view(np.uint64).reshape(rows.shape)[:] = rows
    return arguments.Move(pinned.address, len(rows))


def cut(runs: Runs) -> Runs:
    """The same bytes in runs of at most PIECE_BYTES."""
    counts = (-(-runs[:, 2].astype(np.int64) // PIECE_BYTES)).astype(np.intp)
    total = int(counts.sum())
    if total == len(runs):
        return runs
    pieces = runs.repeat(counts, 0)
    before = (np.arange(total) - (counts.cumsum() - counts).repeat(counts)).astype(np.uint64) * np.uint64(PIECE_BYTES)
    pieces[:, :2] += before[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - before, PIECE_BYTES)
    return pieces


@dataclass
class RunList:
    """Runs for the kernel, in pinned memory. used: when the kernel has read them. lent: while the kernel is launched."""

    runs: Pinned
    used: Event | None = None
    lent: bool = False


class Mover:
    """Copies bytes between addresses of the device and of pinned memory."""

    def __init__(self, driver: Driver, host: HostArena | None) -> None:
        self._driver, self._host = driver, host
        self._lists: deque[RunList] = deque()
        self._lost: list[RunList] = []

    def copy(self, stream: Stream, transfers: Runs) -> None:
        """Copies on a stream; no two transfers may overlap. Raises BackendUnavailable if memory of the host tier cannot be
        pinned."""
        runs = self._merged(transfers.reshape(-1, 3))
        if len(runs) < 2:
            # A kernel is no faster for a single run.
            self.by_engine(stream, runs)
            return
        small = (runs[:, 2] < self._driver.copy_engine_bytes) & ((runs[:, 0] | runs[:, 1] | runs[:, 2]) % WORD == 0)
        # The kernel first: it may need memory, and if that is refused no copy may be under way.
        if small.all():
            self.by_kernel(stream, runs)
            return
        if small.any():
            self.by_kernel(stream, runs[small])
        self.by_engine(stream, runs[~small])

    def by_engine(self, stream: Stream, runs: Runs) -> None:
        """Copies runs one by one."""
        for source, target, size in runs.tolist():
            stream.copy(target, source, size)

    def by_kernel(self, stream: Stream, runs: Runs) -> None:
        """Copies runs in one launch. All numbers are multiples of WORD."""
        pieces = cut(runs)
        chosen = self._next_list(RUN_BYTES * len(pieces))
        call = list_runs(chosen.runs, pieces)
        chosen.lent = True
        stream.launch(instances.MOVE, KERNEL_BLOCKS, KERNEL_THREADS, call)
        chosen.used = stream.record()
        chosen.lent = False

    def close(self) -> None:
        """Gives the memory back."""
        self._lists.clear()
        self._lost.clear()

    def _merged(self, transfers: Runs) -> Runs:
        """Merges neighbours, but never across a border between pieces of host memory that were pinned one by one."""
        # Contiguous columns are several times as fast.
        *ends, sizes = np.ascontiguousarray(transfers.T)
        apart = np.zeros(len(transfers), bool)
        for places in ends:
            if self._host is not None:
                apart |= self._host.pin(places, sizes)
            apart[1:] |= places[:-1] + sizes[:-1] != places[1:]
        apart[:1] = True
        if apart.all():
            return transfers
        starts = np.flatnonzero(apart)
        runs = transfers[starts]
        runs[:, 2] = np.add.reduceat(sizes, starts)
        return runs

    def _next_list(self, size: int) -> RunList:
        """A list that no kernel reads any more, or a new one. Lists that are too small are given up."""
        while self._lists:
            oldest = self._lists[0]
            if oldest.lent:
                # Ctrl-C came during the launch, so nobody knows when the list has been read: never use it again.
                self._lost.append(oldest)
            elif oldest.used is not None and not oldest.used.done():
                break
            elif len(oldest.runs.array) >= size:
                self._lists.rotate(-1)
                return oldest
            self._lists.popleft()
        self._lists.append(RunList(self._driver.pinned(max(1 << 12, 1 << (size - 1).bit_length()))))
        return self._lists[-1]
