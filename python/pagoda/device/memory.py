"""The memory that a cache on a device has for all of its life: the arenas of its tiers, and the passage to the disk."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.device.driver import Driver, HostArena, Memory, Stream
from pagoda.device.passage import Passage, PassageBytes


class CacheMemory:
    """For one cache. tiers: bytes and extent bytes of the device and the host tier; with 0 bytes there is no host arena.
    beside: sizes of the passage, None without a disk. zeroes: whether the passage is zeroed after use."""

    def __init__(
        self, driver: Driver, tiers: list[tuple[int, int]], beside: PassageBytes | None, *, zeroes: bool
    ) -> None:
        self._driver = driver
        (self.device_bytes, _), (host_bytes, extent_bytes) = tiers
        # No block crosses a border between extents, so none crosses one between pieces of pinned memory.
        self.host: HostArena | None = driver.host_arena(host_bytes, extent_bytes) if host_bytes else None
        device = driver.memory(self.device_bytes)
        self._device: Memory | None = device
        self.bases = (device.address, self.host.address if self.host else 0)
        """Addresses of the arenas; 0 if there is no host arena."""
        self.on_host = range(self.bases[1], self.bases[1] + host_bytes)
        """The addresses of the host arena."""
        self.passage = None if beside is None else Passage(driver, beside, zeroes=zeroes)

    @property
    def for_core(self) -> dict[str, Any]:
        """The argument of `pagoda._core.Cache`. Its `owners` are kept while a drive may still access their memory."""
        passage, nothing = self.passage, (0, 0, 1)
        return {
            "bases": self.bases,
            "stage": passage.stage if passage else nothing,
            "ring": passage.ring if passage else nothing,
            "owners": [self.host, passage.memory if passage else None],
        }

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._device is None

    def zero(self, ranges: npt.NDArray[np.uint64], stream: Stream) -> bool:
        """Zeroes each [address, bytes]: on the host now, on the device in a stream. Returns whether any was on the host."""
        on_host = False
        for address, size in ranges.reshape(-1, 2).tolist():
            if address in self.on_host:
                ctypes.memset(address, 0, size)
                on_host = True
            else:
                stream.zero(address, size)
        return on_host

    def close(self) -> None:
        """Gives the memory back. Memory that a drive may still access is kept by the core, but no longer pinned."""
        if self.host is not None:
            self.host.close()
        if self.passage is not None:
            self.passage.close()
        self._device = self.host = self.passage = None
        self._driver.give_back()
