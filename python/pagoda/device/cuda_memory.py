"""Memory of a GPU, and memory of the host that it reaches, by CuPy: see `Memory`, `Pinned` and `HostArena` of driver.py."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.errors import BackendUnavailable

TOUCH_THREADS = 8
"""Threads that write to memory before it is registered: the system clears pages as they are first written, and one thread
clears some 3 GB/s."""

MAP_NORESERVE = 0x4000
"""Of Linux: address space is not memory yet. Python names it from 3.13 on."""

MADV_WIPEONFORK = 18
"""Of Linux: a forked child finds zeros there. Python has no name for it."""

NO_MEMORY = 2
"""cudaErrorMemoryAllocation."""

PIECE_BYTES = 256 << 20
"""Host memory that is registered at a time, about."""


class DeviceMemory:
    """Zeroed bytes of the current device, from CuPy's pool or what the caller has in its place. Raises BackendUnavailable."""

    def __init__(self, size: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            self._memory = cupy.cuda.alloc(max(1, size))
        except (MemoryError, runtime.CUDARuntimeError) as error:
            # Pools raise the first, allocators without one what CUDA says.
            if getattr(error, "status", NO_MEMORY) != NO_MEMORY:
                raise
            raise BackendUnavailable(f"device_memory: {size} bytes ({error})") from error
        # A pool hands out memory again that kernels on the stream where it was freed may still use.
        runtime.deviceSynchronize()
        runtime.memset(self._memory.ptr, 0, size)
        # Callers' streams do not wait for the default stream, on which the memory was zeroed.
        runtime.streamSynchronize(0)
        self.address = int(self._memory.ptr)


class PinnedMemory:
    """Bytes of the host that the device reaches at the same addresses, from CuPy's pool. Raises BackendUnavailable."""

    def __init__(self, size: int) -> None:
        import cupy

        try:
            self._memory = cupy.cuda.alloc_pinned_memory(max(1, size))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"host_memory: {size} pinned bytes ({error})") from error
        self.address = int(self._memory.ptr)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, size)


class RegisteredArena:
    """Address space that is registered with the driver piece by piece, as it is used."""

    def __init__(self, size: int, piece: int) -> None:
        import cupy

        # Pieces begin and end at pages of the system: no page can be registered twice.
        piece = math.lcm(piece, mmap.PAGESIZE)
        self.piece = piece * max(1, PIECE_BYTES // piece)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise BackendUnavailable(f"host_memory = {size}: {error}") from error
        # A fork would copy all that is pinned. Older kernels leave the copies to the parent: what is written there from then
        # on the device would never see. gVisor does not know the advice.
        with contextlib.suppress(OSError):
            self._map.madvise(MADV_WIPEONFORK)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._pinned: set[int] = set()
        # Registration outlives the memory, and whoever gets the same addresses later could not register them. So it ends with
        # the array, which is collected last: an engine that nobody has closed has waited for its kernels by then.
        runtime = cupy.cuda.runtime
        self._unregister = weakref.finalize(self._bytes, _unregister, runtime, self.address, self._pinned, self.piece)
        self._unregister.atexit = False

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Registers the pieces that runs of bytes touch."""
        # What lies before the arena comes out far behind it.
        starts = np.array(addresses, np.uint64, ndmin=1) - np.uint64(self.address)
        inside: npt.NDArray[np.bool_] = starts < len(self._bytes)
        if not inside.any():
            return inside
        lasts = starts + np.asarray(sizes, np.uint64) - np.uint64(1)
        begin, end = (places[inside].astype(np.intp) // self.piece for places in (starts, lasts))
        pieces = -(-len(self._bytes) // self.piece)
        # How many runs each piece is touched by, from where they begin and end.
        touched = np.bincount(begin, minlength=pieces + 1) - np.bincount(end + 1, minlength=pieces + 1)
        for index in np.flatnonzero(touched.cumsum()).tolist():
            if index not in self._pinned:
                self._register(index)
        inside &= starts % self.piece == 0
        return inside

    def _register(self, index: int) -> None:
        import cupy

        piece = self._bytes[index * self.piece : (index + 1) * self.piece]
        share = -(-len(piece) // TOUCH_THREADS)
        with ThreadPoolExecutor(TOUCH_THREADS) as pool:
            list(pool.map(_touch, (piece[at : at + share] for at in range(0, len(piece), share))))
        runtime = cupy.cuda.runtime
        try:
            # 1: for every context; 2: mapped, so that kernels reach it.
            runtime.hostRegister(piece.ctypes.data, len(piece), 1 | 2)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(
                f"host_memory: {len(piece)} bytes more cannot be pinned ({error}); {len(self._pinned)} pieces are"
            ) from error
        self._pinned.add(index)

    def close(self) -> None:
        """Ends the registration; the memory goes with this object."""
        self._unregister()


def _unregister(runtime: Any, address: int, pinned: set[int], piece: int) -> None:
    while pinned:
        # Refused alone by a device that has failed, and to a forked child.
        with contextlib.suppress(runtime.CUDARuntimeError):
            runtime.hostUnregister(address + pinned.pop() * piece)


def _touch(piece: npt.NDArray[np.uint8]) -> None:
    """Makes the system take memory for it."""
    piece[:: mmap.PAGESIZE] = 0


class AllocatedArena:
    """Memory of the host that CUDA allocates, all at once. Some devices have another address for memory that is registered
    (WSL 2, Tegra), none for this."""

    def __init__(self, size: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            # Not from CuPy's pool, which would round it up to a power of two.
            self._memory = cupy.cuda.PinnedMemory(size + mmap.PAGESIZE, runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"host_memory: {size} pinned bytes ({error})") from error
        # The disk wants pages of the system; CUDA aligns to less.
        self.address = -(-int(self._memory.ptr) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.piece = size

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Says which runs begin with its first byte: all of it is pinned already."""
        begins: npt.NDArray[np.bool_] = np.array(addresses, np.uint64, ndmin=1) == self.address
        return begins

    def close(self) -> None:
        """The memory goes with this object: a drive may still answer for it."""
