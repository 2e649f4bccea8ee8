"""Pinned memory, not counted in the budgets, through which pages on disk pass: a stage between device and disk, and a ring on
their way to attention.

It is pinned when the cache is opened, because pinning memory writes to it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pagoda import _core
from pagoda._core import DISK_ALIGN
from pagoda.device.driver import Driver

PART_BYTES = 16 << 20
"""Bytes of a part of the stage: enough to keep the disk's threads busy, and for the copy engine to be fast."""

PARTS = 4
"""Parts for plans: some are copied while others are written or read."""


def stored_bytes(size: int) -> int:
    """Bytes that a layer of a page takes in the ring."""
    return -(-size // DISK_ALIGN) * DISK_ALIGN


@dataclass(frozen=True)
class PassageBytes:
    """Sizes of the passage, in bytes.

    part: of a part of the stage; the first is for calls that wait, the other `PARTS` are for plans. slot: of a slot of the
    ring; 0 means no ring.
    """

    part: int
    slot: int

    @property
    def stage(self) -> int:
        """All parts."""
        return (1 + PARTS) * self.part

    @property
    def ring(self) -> int:
        """All slots."""
        return _core.ring_bytes(self.slot) if self.slot else 0


def passage_bytes(block_bytes: list[int], device_bytes: int, slot: int) -> PassageBytes:
    """Sizes for a cache. device_bytes: device memory for pages."""
    # A part is no larger than all that there is to move, and any block fits into one.
    return PassageBytes(stored_bytes(max(*block_bytes, min(PART_BYTES, device_bytes))), slot)


class Passage:
    """The passage of one cache. part: bytes of a part of the stage. zeroes: whether these parts are zeroed after use."""

    def __init__(self, driver: Driver, size: PassageBytes, *, zeroes: bool) -> None:
        self.part, self._zeroes = size.part, zeroes
        self.memory = driver.host_arena(size.stage + size.ring, size.stage + size.ring)
        self.memory.pin(self.memory.address, size.stage + size.ring)
        self.stage = self.memory.address, size.stage, size.part
        self.ring = self.memory.address + size.stage, size.ring, max(1, size.slot)

    @property
    def address(self) -> int:
        """Address of the stage."""
        return self.memory.address

    def clear(self, part: int) -> None:
        """Zeroes a part of the stage in a cache with zero_on_free. Nothing may be under way in it."""
        if self._zeroes:
            ctypes.memset(self.address + part * self.part, 0, self.part)

    def close(self) -> None:
        """Gives the memory back. Nothing may be under way that uses it."""
        self.memory.close()
