"""The ring: slots of device memory that pages pass through on their way to attention, and what is in them.

While one slot is read the next is filled, ahead of need and on a stream of its own, with what comes next of the layer, of
the next layer, or of the first layer of the next step. That is known before it is asked for, for pages on the host never
change. Events stand between streams both ways: no kernel reads a slot before its copies have arrived, and none are made into
it before its last reader has ended. Pages on disk come the same way, once they have been read (reads.py); a slot is filled
ahead of need as far as that has happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pagoda._core import RUN_ROWS, TILE
from pagoda.device.driver import Driver, Event, Stream
from pagoda.device.passage import stored_bytes
from pagoda.device.reads import Found, Reads

SLOTS = 2
"""One is read while the other is filled; more would only be filled earlier."""

SLOT_BYTES = 16 << 20
"""A copy of so much takes some 300 us at the speed of a link, a launch a few."""

SLOT_BYTES_MIN = 1 << 20
"""Smaller slots would have launches cost more than they hide."""

RING_SHARE = 8
"""The ring has this part of the device memory at most."""


@dataclass(frozen=True)
class RingSlots:
    """Of the ring, in bytes.

    bytes: of a slot in device memory, 0 where there is no room for one that is of use. read: of a slot of pinned memory that
    pages on disk are read to, so that it has all that the other can hold of them. enough: the device memory from which on
    there is a ring.
    """

    bytes: int
    read: int
    enough: int


def ring_slots(
    widths: list[int], page_size: int, device_bytes: int, *, host: bool, disk: bool, deterministic: bool
) -> RingSlots:
    """What a cache has. widths: bytes of a layer in a block, by layer group. host, disk: whether there are these tiers."""
    # A slot has to hold a whole stretch of any layer, since passes do not end inside one.
    stretch = max(RUN_ROWS if deterministic else TILE, page_size) // page_size * max(widths)
    # Host pages can be read without a ring, so a small ring is useless for them; pages on disk need one.
    least = stretch if disk else max(stretch, SLOT_BYTES_MIN)
    size = min(max(SLOT_BYTES, stretch), device_bytes // (SLOTS * RING_SHARE)) // 256 * 256
    if not (host or disk) or size < least:
        size = 0
    read = max(size // width * stored_bytes(width) for width in widths)
    return RingSlots(size, read, SLOTS * RING_SHARE * -(-least // 256) * 256)


@dataclass
class Slot:
    """A part of the ring, and what its last reader leaves behind."""

    address: int
    read: Event | None = None


@dataclass(frozen=True)
class Brought:
    """A pass that is in a slot, or on its way there. item: its place in the order of a step."""

    item: int
    slot: Slot
    arrived: Event


class Ring:
    """The slots of a cache. bring: starts to copy what comes at a place of the order of a step into a slot, on the stream
    `copying`; it is told where what of that is on disk has been read to. reads: None without a disk."""

    def __init__(
        self,
        driver: Driver,
        slot_bytes: int,
        copying: Stream,
        reads: Reads | None,
        bring: Callable[[Slot, int, Found | None], Event],
    ) -> None:
        self.slot_bytes, self._copying, self._reads, self._bring = slot_bytes, copying, reads, bring
        self._memory = driver.memory(SLOTS * slot_bytes) if slot_bytes else None
        self._all: list[Slot] = []
        if self._memory is not None:
            self._all = [Slot(self._memory.address + number * slot_bytes) for number in range(SLOTS)]
        self._free = deque(self._all)
        self._ahead: deque[Brought] = deque()
        self._next = self._count = 0
        self._on_disk: Mapping[int, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, count: int, on_disk: Mapping[int, int]) -> None:
        """A step begins. count: how many times it fills a slot. on_disk: by the place in that order, which of the reads of
        the step has pages for it."""
        self._count, self._on_disk = count, on_disk

    @contextmanager
    def brought(self, item: int, stream: Stream) -> Iterator[int]:
        """The address of the slot with what comes at a place, for kernels that are launched on the stream inside."""
        if len(self._free) + len(self._ahead) != len(self._all):
            # Ctrl-C came between taking and giving back slots. This stream follows whatever has read them.
            self._ahead.clear()
            self._free = deque(self._all)
            for slot in self._all:
                slot.read = stream.record()
        if not self._ahead or self._ahead[0].item != item:
            self.forget()
            self._next = item
        self._fill(wait=not self._ahead)
        now = self._ahead.popleft()
        stream.follow(now.arrived)
        try:
            yield now.slot.address
        finally:
            now.slot.read = stream.record()
            self._free.append(now.slot)
        self._fill()

    def forget(self) -> None:
        """What was brought ahead is not what is wanted."""
        self._free.extend(brought.slot for brought in self._ahead)
        self._ahead.clear()

    def clear(self) -> None:
        """Zeroes all slots: pages are gone that may be in them. Not inside of `brought`."""
        self.forget()
        if self._memory is None:
            return
        for slot in self._all:
            if slot.read is not None:
                self._copying.follow(slot.read)
        self._copying.zero(self._memory.address, len(self._all) * self.slot_bytes)

    def close(self) -> None:
        """Gives the memory back. No copy may be under way."""
        self._memory = None
        self._all.clear()

    def _fill(self, wait: bool = False) -> None:
        """Brings what comes next into the slots that nobody needs, up to what has yet to be read from disk. wait: for what is
        the first. Raises CorruptPage and TierIOError, with `wait` alone."""
        while self._free:
            found = None
            if (place := self._on_disk.get(self._next)) is not None:
                assert self._reads is not None
                found = self._reads.take(place, wait)
                if found is None:
                    return
            try:
                slot = self._free[0]
                if slot.read is not None:
                    self._copying.follow(slot.read)
                arrived = self._bring(slot, self._next, found)
            finally:
                if found is not None and self._reads is not None:
                    self._reads.copied(found.slot)
            self._ahead.append(Brought(self._next, self._free.popleft(), arrived))
            self._next = (self._next + 1) % self._count
            wait = False
