"""Copies between tiers: neighbours in one go, large runs by the copy engine, small ones by a kernel.

The copy engine takes microseconds for each copy, whatever its size; a kernel that reads and writes pinned memory in place
takes one launch for all of them, and multiprocessors from others. The driver knows from what size on the engine is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.device.driver import Driver, Event, HostArena, Pinned, Stream
from pagoda.kernels import arguments, instances

WORD = 16
"""Bytes that a thread of the kernel copies at a time."""

KERNEL_BLOCKS, KERNEL_THREADS = 16, 256
"""Of the kernel. Each block has 16 KiB under way: 256 KiB in all, where 55 GB/s times 1.3 us of latency are 72."""

RUN_BYTES = 24
"""Of a run as the kernel reads it."""

Run = tuple[int, int, int]
"""Source, target, bytes."""


def list_runs(pinned: Pinned, runs: Sequence[Run]) -> arguments.Move:
    """Writes runs into pinned memory, and says where to the kernel."""
    words = np.array(runs, np.uint64)
    pinned.array[: words.nbytes] = words.view(np.uint8).ravel()
    return arguments.Move(pinned.address, len(runs))


@dataclass
class RunList:
    """Runs for the kernel, in pinned memory, until it has read them. lent: while it is launched."""

    runs: Pinned
    used: Event | None = None
    lent: bool = False


class Mover:
    """Copies bytes between addresses of the device and of pinned memory."""

    def __init__(self, driver: Driver, host: HostArena | None) -> None:
        self._driver, self._host = driver, host
        self._lists: deque[RunList] = deque()
        self._lost: list[RunList] = []

    def copy(self, stream: Stream, transfers: npt.NDArray[np.uint64]) -> None:
        """Copies on a stream. transfers: [source, target, bytes] of each; no two overlap.

        Raises BackendUnavailable when memory of the host tier cannot be pinned.
        """
        runs = self._merged(transfers)
        by_kernel: list[Run] = []
        by_engine: list[Run] = []
        for source, target, size in runs:
            # A kernel is no faster for a single run.
            few_bytes = len(runs) > 1 and size < self._driver.copy_engine_bytes
            if few_bytes and not any(x % WORD for x in (source, target, size)):
                by_kernel.append((source, target, size))
            else:
                by_engine.append((source, target, size))
        # The kernel first: it may need memory that is refused, and then no copy may be under way.
        if by_kernel:
            self._launch(stream, by_kernel)
        for source, target, size in by_engine:
            stream.copy(target, source, size)

    def close(self) -> None:
        """Gives the memory back."""
        self._lists.clear()
        self._lost.clear()

    def _merged(self, transfers: npt.NDArray[np.uint64]) -> list[Run]:
        """Runs; none crosses a border between pieces of host memory that were pinned one by one."""
        runs: list[Run] = []
        for source, target, size in transfers.reshape(-1, 3).tolist():
            borders = [] if self._host is None else [self._host.pin(address, size) for address in (source, target)]
            if runs and not any(borders):
                before, there, length = runs[-1]
                if before + length == source and there + length == target:
                    runs[-1] = (before, there, length + size)
                    continue
            runs.append((source, target, size))
        return runs

    def _launch(self, stream: Stream, runs: list[Run]) -> None:
        chosen = self._next_list(RUN_BYTES * len(runs))
        call = list_runs(chosen.runs, runs)
        chosen.lent = True
        stream.launch(instances.MOVE, KERNEL_BLOCKS, KERNEL_THREADS, call)
        chosen.used = stream.record()
        chosen.lent = False

    def _next_list(self, size: int) -> RunList:
        """One that no kernel reads any more, or a new one. Those that are too small by then are given up."""
        while self._lists:
            oldest = self._lists[0]
            if oldest.lent:
                # Ctrl-C came during the launch, so nobody knows when the list will have been read: it is never used again.
                self._lost.append(oldest)
            elif oldest.used is not None and not oldest.used.done():
                break
            elif len(oldest.runs.array) >= size:
                self._lists.rotate(-1)
                return oldest
            self._lists.popleft()
        self._lists.append(RunList(self._driver.pinned(max(1 << 12, 1 << (size - 1).bit_length()))))
        return self._lists[-1]
