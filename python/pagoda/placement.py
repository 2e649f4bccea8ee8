"""Which pages leave a tier when it is full: those of the sequence that rested longest, oldest first.

Every token is attended to at every step, so the pages of one sequence are read in a cycle and recency among them says
nothing; between sequences it does. To disk go only pages that the next step can do without: of sequences that are not in the
batch, and that no other sequence holds. A page that was written stays there while it is in memory again, as long as there is
room, so that it is written once.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.engine import DeviceEngine
from pagoda.errors import OutOfBlocks, PagesOnDisk, PagodaError, TierIOError

LOW_WATER = 1 / 32
"""The free fraction of a tier below which pages leave it in the background."""

HIGH_WATER = 1 / 8
"""The free fraction that they make."""

REST_STEPS = 256
"""Steps after a failed write to disk until the next one ahead of need: the drive may be full, or broken."""

log = logging.getLogger("pagoda")

Handles = npt.NDArray[np.uint64]
Pair = tuple[str, str]


class Spill:
    """Moves pages to slower tiers when one is full, ahead of need if it can, and back when a step needs them.

    below: the tiers under the device that pages may go to by themselves, the fastest first.
    """

    def __init__(self, core: _core.Cache | DeviceEngine, below: list[str]) -> None:
        self._core = core
        self._pairs: list[Pair] = list(zip(["device", *below], below, strict=False))
        self._blocks = {source: core.free_blocks(source) for source, _ in self._pairs}
        self._under_way: dict[Pair, list[_core.Ticket]] = {pair: [] for pair in self._pairs}
        self._resting = 0

    def ahead(self, batch: Handles) -> None:
        """Starts moving pages when free blocks run low, to disk none of the sequences in `batch`. Returns at once."""
        self._resting = max(0, self._resting - 1)
        for pair in self._pairs:
            free, whole = self._core.free_blocks(pair[0]), self._blocks[pair[0]]
            low = [left < blocks * LOW_WATER for left, blocks in zip(free, whole, strict=True)]
            if not any(low) or self._pending(pair) or (pair[1] == "disk" and self._resting):
                continue
            for group, (left, blocks) in enumerate(zip(free, whole, strict=True)):
                if low[group]:
                    self._demote(pair, group, int(blocks * HIGH_WATER) - left, batch)

    def relieve(self, lack: OutOfBlocks | PagesOnDisk, batch: Handles) -> None:
        """Does something about what a step of `batch` lacks; raises it, or an OutOfBlocks of its own, when nothing helps."""
        if isinstance(lack, PagesOnDisk):
            self._bring_in(lack, batch)
        else:
            self._make_room(lack, batch)

    def warm(self, handle: int) -> None:
        """Brings pages of a sequence from disk into memory, as many as fit; all that come have been verified."""
        if self._pairs:
            self._promote(np.array([handle], np.uint64), max(source for source, _ in self._pairs))

    def settle(self) -> None:
        """Waits for all moves under way."""
        for pair in self._pairs:
            self._settle(pair)

    def _make_room(self, error: OutOfBlocks, batch: Handles) -> None:
        """Makes room on the device, or below it so that there can be some; raises `error` when nothing helps."""
        for pair in self._pairs:
            if self._settle(pair) or self._demote_now(pair, error.blocks_short, batch):
                return
        raise error

    def _bring_in(self, error: PagesOnDisk, batch: Handles) -> None:
        """Brings the pages of a batch from disk into memory. Raises OutOfBlocks when there is no room for all of them."""
        if not self._pairs:
            raise error
        left = error.pages
        # Kernels read either; the host has the room that the device needs for new tokens.
        for tier in sorted({source for source, _ in self._pairs}, reverse=True):
            while left := self._promote(batch, tier):
                pair = (tier, "disk")
                if pair not in self._pairs or not (self._settle(pair) or self._demote_now(pair, left, batch)):
                    break
            else:
                return
        message = f"{error}: {left} of them find no room in memory"
        raise OutOfBlocks(message, blocks_short=left, bytes_short=error.bytes * left // error.pages) from error

    def _promote(self, batch: Handles, tier: str) -> int:
        """Moves pages of a batch from disk to `tier`, as many as fit; returns how many are left on disk."""
        core, tickets = self._core, []
        pages = [(handle, group) for handle in batch.tolist() for group in range(len(core.free_blocks(tier)))]
        for handle, group in pages:
            room, tokens = core.free_blocks(tier)[group], (0, core.length(handle))
            plan = core.plan(handle, tier, tokens, [group], pages_max=room, only_from="disk", keep=True)
            if plan.copies:
                tickets.append(core.execute(plan))
        failures: list[PagodaError] = []
        for ticket in tickets:
            self._wait(ticket)
            try:
                core.ticket_done(ticket)
            except PagodaError as error:
                # All are asked: a failure that nobody is told of would be that of the next step, whosever that is.
                failures.append(error)
        if failures:
            raise failures[0]
        rest = (core.plan(handle, tier, (0, core.length(handle)), [group], only_from="disk") for handle, group in pages)
        return sum(len(plan.copies) for plan in rest)

    def _demote_now(self, pair: Pair, blocks: int, batch: Handles) -> bool:
        """Moves at least one and about `blocks` pages of each layer group; says whether any has arrived."""
        for group in range(len(self._blocks[pair[0]])):
            self._demote(pair, group, blocks, batch)
        return self._settle(pair)

    def _demote(self, pair: Pair, group: int, blocks: int, batch: Handles) -> None:
        """Starts moving at least one and about `blocks` pages of a layer group."""
        core, wanted, (source, target) = self._core, max(1, blocks), pair
        to_disk = target == "disk"
        spared = set(batch.tolist()) if to_disk else set()
        if to_disk and (short := wanted - core.free_blocks(target)[group]) > 0:
            assert isinstance(core, _core.Cache)
            core.drop_copies(target, group, short)
        for handle in core.by_recency():
            if handle in spared or wanted <= 0:
                continue
            pages_max, tokens = min(wanted, core.free_blocks(target)[group]), (0, core.length(handle))
            plan = core.plan(handle, target, tokens, [group], pages_max=pages_max, only_from=source, unshared=to_disk)
            if plan.copies:
                self._under_way[pair].append(core.execute(plan))
                wanted -= len(plan.copies)

    def _pending(self, pair: Pair) -> bool:
        self._under_way[pair] = [ticket for ticket in self._under_way[pair] if self._arrived(ticket) is False]
        return bool(self._under_way[pair])

    def _settle(self, pair: Pair) -> bool:
        """Waits for moves under way; says whether any arrived."""
        under_way, self._under_way[pair] = self._under_way[pair], []
        for ticket in under_way:
            self._wait(ticket)
        return any([self._arrived(ticket) for ticket in under_way])

    def _wait(self, ticket: _core.Ticket) -> None:
        while not self._core.wait(ticket, 60.0):
            pass

    def _arrived(self, ticket: _core.Ticket) -> bool | None:
        """Whether a move has ended well; None if it failed: its pages are where they were."""
        try:
            return self._core.ticket_done(ticket)
        except TierIOError as error:
            log.warning("pages stay in memory: %s", error)
            self._resting = REST_STEPS
            return None
