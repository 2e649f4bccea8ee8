"""The ring: slots of device memory that pages pass through on their way to attention, and what is in them.

While one slot is read the next is filled, ahead of need and on a stream of its own: with the next pages of the layer, of the
next layer, or of the first layer of the next step. These are known in advance, because pages on the host never change.
Events order the streams both ways: no kernel reads a slot before its copies have arrived, and no copies are made into it
before its last reader has ended. Pages on disk take the same way once they have been read (reads.py); slots are filled ahead
of need as far as reads have got.
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
"""One is read while the other is filled; with more, slots would only be filled earlier."""

SLOT_BYTES = 16 << 20
"""A copy of this size takes some 300 us at the speed of a link, a launch only a few."""

SLOT_BYTES_MIN = 1 << 20
"""With smaller slots launches would cost more than they hide."""

RING_SHARE = 8
"""The ring takes at most 1/RING_SHARE of the device memory."""


@dataclass(frozen=True)
class RingSlots:
    """Sizes of the ring, in bytes.

    bytes: of a slot in device memory, 0 if there is no room for a useful one. read: of a slot of pinned memory that pages on
    disk are read into, enough for as many as fit a slot in device memory. enough: the least device memory for a ring.
    """

    bytes: int
    read: int
    enough: int


def ring_slots(
    widths: list[int],
    page_size: int,
    device_bytes: int,
    *,
    host: bool,
    disk: bool,
    deterministic: bool,
    sinks: int,
) -> RingSlots:
    """The sizes for a cache. widths: bytes of a layer in a block, by layer group. host, disk: whether it has these tiers.
    sinks: the most that any layer keeps."""
    # A slot has to hold a whole stretch of any layer, since passes do not end inside one.
    pages = max(RUN_ROWS if deterministic else TILE, page_size) // page_size
    if sinks:
        # The last stretch of the sinks may begin anywhere in a page, and share its last page with the window's first.
        pages += min(pages, (2 * page_size - 2 + sinks) // page_size) - 1
    stretch = pages * max(widths)
    # Host pages can be read without a ring, so a small ring is useless for them; pages on disk need one.
    least = stretch if disk else max(stretch, SLOT_BYTES_MIN)
    size = min(max(SLOT_BYTES, stretch), device_bytes // (SLOTS * RING_SHARE)) // 256 * 256
    if not (host or disk) or size < least:
        size = 0
    read = max(size // width * stored_bytes(width) for width in widths)
    return RingSlots(size, read, SLOTS * RING_SHARE * -(-least // 256) * 256)


@dataclass
class Slot:
    """A slot of the ring. read: when its last reader has ended."""

    address: int
    read: Event | None = None


@dataclass(frozen=True)
class Brought:
    """A pass that is in a slot or on its way there. item: its place in the order of a step."""

    item: int
    slot: Slot
    arrived: Event


class Ring:
    """The slots of a cache. bring: starts to copy a pass, given by its place in the order of a step, into a slot, on the
    stream `copying`; `Found` has the pages of the pass that are on disk. reads: None without a disk."""

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
        """A step begins. count: how many passes it brings into slots. on_disk: for passes with pages on disk, by their place
        in the order, the number of the step's read that has these pages."""
        self._count, self._on_disk = count, on_disk

    @contextmanager
    def brought(self, item: int, stream: Stream) -> Iterator[int]:
        """The address of the slot with the pass at a place, for kernels that are launched inside, on the stream."""
        if len(self._free) + len(self._ahead) != len(self._all):
            # Ctrl-C came between taking and giving back slots. This stream comes after whatever has read them.
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
        """Forgets what was brought ahead of need."""
        self._free.extend(brought.slot for brought in self._ahead)
        self._ahead.clear()

    def clear(self) -> None:
        """Zeroes all slots, because they may hold pages that were freed. Not inside of `brought`."""
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
        """Brings the next passes into free slots, as far as their pages have been read from disk. wait: until the first one
        has been read. Raises CorruptPage and TierIOError, only with `wait`."""
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
