"""GPU memory, and host memory that the GPU can access, by CuPy: see `Memory`, `Pinned` and `HostArena` of driver.py."""

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
"""Threads that write to memory before it is registered: the system clears a page when it is first written, about 3 GB/s with
one thread."""

MAP_NORESERVE = 0x4000
"""Linux: reserves address space without memory. Python has it from 3.13 on."""

MADV_WIPEONFORK = 18
"""Linux: a forked child finds zeros in this memory. Python has no name for it."""

NO_MEMORY = 2
"""cudaErrorMemoryAllocation."""

PIECE_BYTES = 256 << 20
"""About how much host memory is registered at a time."""


class DeviceMemory:
    """Zeroed bytes of the current device, from CuPy's pool or the caller's allocator. Raises BackendUnavailable."""

    def __init__(self, size: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            self._memory = cupy.cuda.alloc(max(1, size))
        except (MemoryError, runtime.CUDARuntimeError) as error:
            # Pools raise MemoryError, allocators without a pool CUDA's error.
            if getattr(error, "status", NO_MEMORY) != NO_MEMORY:
                raise
            raise BackendUnavailable(f"device_memory: {size} bytes ({error})") from error
        # A pool may hand out memory that kernels on the stream where it was freed still use.
        runtime.deviceSynchronize()
        runtime.memset(self._memory.ptr, 0, size)
        # Callers' streams do not wait for the default stream, on which the memory was zeroed.
        runtime.streamSynchronize(0)
        self.address = int(self._memory.ptr)


class PinnedMemory:
    """Host bytes that the device accesses at the same addresses, from CuPy's pool. Raises BackendUnavailable."""

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

        # Pieces begin and end at pages of the system, as no page can be registered twice.
        piece = math.lcm(piece, mmap.PAGESIZE)
        self.piece = piece * max(1, PIECE_BYTES // piece)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise BackendUnavailable(f"host_memory = {size}: {error}") from error
        # Otherwise a fork would copy all pinned memory, and with older kernels the parent would get the copies: the device
        # would never see what is written there. gVisor does not know this advice.
        with contextlib.suppress(OSError):
            self._map.madvise(MADV_WIPEONFORK)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._pinned: set[int] = set()
        # Registration outlives the memory, and a later owner of the same addresses could not register them. So it ends with
        # the array, which is collected last: even an engine that was never closed has waited for its kernels by then.
        runtime = cupy.cuda.runtime
        self._unregister = weakref.finalize(self._bytes, _unregister, runtime, self.address, self._pinned, self.piece)
        self._unregister.atexit = False

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Registers the pieces that runs of bytes touch."""
        # Unsigned: addresses before the arena wrap around to far beyond its end.
        starts = np.array(addresses, np.uint64, ndmin=1) - np.uint64(self.address)
        inside: npt.NDArray[np.bool_] = starts < len(self._bytes)
        if not inside.any():
            return inside
        lasts = starts + np.asarray(sizes, np.uint64) - np.uint64(1)
        begin, end = (places[inside].astype(np.intp) // self.piece for places in (starts, lasts))
        pieces = -(-len(self._bytes) // self.piece)
        # The cumulative sum is the number of runs that touch each piece.
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
            # 1: portable, for every context; 2: mapped, so that kernels can access it.
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
        # Fails only on a failed device and in a forked child.
        with contextlib.suppress(runtime.CUDARuntimeError):
            runtime.hostUnregister(address + pinned.pop() * piece)


def _touch(piece: npt.NDArray[np.uint8]) -> None:
    """Makes the system allocate memory for it."""
    piece[:: mmap.PAGESIZE] = 0


class AllocatedArena:
    """Host memory that CUDA allocates, all at once. Some devices see registered memory at another address (WSL 2, Tegra), but
    none this memory."""

    def __init__(self, size: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        try:
            # Not from CuPy's pool, which would round the size up to a power of two.
            self._memory = cupy.cuda.PinnedMemory(size + mmap.PAGESIZE, runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailable(f"host_memory: {size} pinned bytes ({error})") from error
        # The disk needs the alignment of system pages; CUDA guarantees less.
        self.address = -(-int(self._memory.ptr) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.piece = size

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Returns which runs begin with the first byte of the arena. All of it is already pinned."""
        begins: npt.NDArray[np.bool_] = np.array(addresses, np.uint64, ndmin=1) == self.address
        return begins

    def close(self) -> None:
        """Does nothing: a drive may still write to the memory, which goes with this object."""
