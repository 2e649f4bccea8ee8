"""Pinned memory beside the budgets that pages on disk pass through: a stage on their way between device and disk, and a ring
on their way to attention.

It is pinned when the cache is opened, since to pin memory is to write to it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pagoda import _core
from pagoda._core import DISK_ALIGN
from pagoda.device.driver import Driver

PART_BYTES = 16 << 20
"""Of the stage: enough for the threads of a disk to have work, and for the copy engine to be fast."""

PARTS = 4
"""Some are copied while others are written or read."""


def stored_bytes(size: int) -> int:
    """Bytes of a layer of a page as the ring has it."""
    return -(-size // DISK_ALIGN) * DISK_ALIGN


@dataclass(frozen=True)
class PassageBytes:
    """How much there is.

    part: of the stage, of which there is one for calls that wait, the first, and `PARTS` for plans. slot: of the ring, which
    is not there if that is 0.
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
    """What a cache has. device_bytes: of the device's memory, those that pages lie in."""
    # No part is larger than what there is to move, and any block fits one.
    return PassageBytes(stored_bytes(max(*block_bytes, min(PART_BYTES, device_bytes))), slot)


class Passage:
    """Of one cache. part: bytes of a part of the stage. zeroes: whether parts of the stage are zeroed after use."""

    def __init__(self, driver: Driver, size: PassageBytes, *, zeroes: bool) -> None:
        self.part, self._zeroes = size.part, zeroes
        self.memory = driver.host_arena(size.stage + size.ring, size.stage + size.ring)
        self.memory.pin(self.memory.address, size.stage + size.ring)
        self.stage = self.memory.address, size.stage, size.part
        self.ring = self.memory.address + size.stage, size.ring, max(1, size.slot)

    @property
    def address(self) -> int:
        """Of the stage."""
        return self.memory.address

    def clear(self, part: int) -> None:
        """Zeroes a part of the stage in a cache with zero_on_free. Nothing may be under way in it."""
        if self._zeroes:
            ctypes.memset(self.address + part * self.part, 0, self.part)

    def close(self) -> None:
        """Gives the memory back. Nothing may be under way that uses it."""
        self.memory.close()
