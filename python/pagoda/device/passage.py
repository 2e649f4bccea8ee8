"""Pinned memory beside the budgets that pages on disk pass through: a stage on their way between device and disk, and a ring
on their way to attention.

It is pinned when the cache is opened, since to pin memory is to write to it.
"""

from __future__ import annotations

from pagoda import _core
from pagoda.device.driver import Driver

PART_BYTES = 16 << 20
"""Of the stage: enough for the threads of a disk to have work, and for the copy engine to be fast."""

PARTS = 4
"""Some are copied while others are written or read."""

ALIGN = 4096
"""Of a layer of a page on disk: docs/layout.md."""


def stored_bytes(size: int) -> int:
    """Bytes of a layer of a page as the ring has it."""
    return -(-size // ALIGN) * ALIGN


class Passage:
    """Of one cache.

    part: bytes of a part of the stage, of which there is one for calls that wait, the first, and `PARTS` for plans. slot:
    bytes of a slot of the ring, which is not there if they are 0.
    """

    def __init__(self, driver: Driver, block_bytes: list[int], device_bytes: int, slot: int) -> None:
        # No part is larger than what there is to move, and any block fits one.
        self.part = stored_bytes(max(*block_bytes, min(PART_BYTES, device_bytes)))
        stage, ring = (1 + PARTS) * self.part, _core.ring_bytes(slot) if slot else 0
        self.memory = driver.host_arena(stage + ring, stage + ring)
        self.memory.pin(self.memory.address, stage + ring)
        self.stage = self.memory.address, stage, self.part
        self.ring = self.memory.address + stage, ring, max(1, slot)

    @property
    def address(self) -> int:
        """Of the stage."""
        return self.memory.address

    def close(self) -> None:
        """Gives the memory back. Nothing may be under way that uses it."""
        self.memory.close()
