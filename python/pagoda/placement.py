"""Which pages leave a tier when it is full: those of the sequence that has rested longest, oldest first.

Every step attends to every token, so the pages of one sequence are read in a cycle. Recency among them means nothing; only
recency between sequences does. So the pages of a sequence stay where they are while it grows. They move only when it steps
again after others have, or when others are released: then as many pages as fit are brought in once, in the place of resting
pages, and the rest are read from disk at every step. A page that was written to disk keeps its copy there while it is in
memory again, as long as there is room, so that it is written only once.

The core knows which sequences have pages to move, so the cost of making room depends on what is moved, not on how many rest.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.engine import SECONDS_MAX, Engine
from pagoda.errors import InvalidArgument, OutOfBlocks, PagodaError, TierIOError, UseAfterRelease
from pagoda.stats import TIERS

LOW_WATER = 1 / 64
"""Below this free fraction of a tier pages leave it in the background; sooner if a step could need more."""

BATCH_WATER = 1 / 32
"""The free fraction up to which pages of the batch are moved, or what two steps may need if that is more. It is small because
every step reads these pages, and reads them more slowly from the next tier."""

HIGH_WATER = 1 / 8
"""The free fraction up to which pages of resting sequences are moved."""

PAUSE_STEPS = 256
"""Steps during which pages do not leave a tier ahead of need, after a failed write (the drive may be full or broken) or after
a search of all sequences that found nothing to move."""

OVERTAKEN = InvalidArgument, OutOfBlocks, UseAfterRelease
"""Raised by a move if another thread has released the sequence, changed or moved its pages, or taken the room."""

log = logging.getLogger("pagoda")

Handles = npt.NDArray[np.uint64]
Pair = tuple[str, str]


class Spill:
    """Moves pages to slower tiers when one is full, ahead of need if possible, and back when a step needs them.

    below: the tiers below the device to which pages may be moved without being asked, fastest first. Several threads may
    call, and may release, change or move the same pages meanwhile; such pages are then left alone.
    """

    def __init__(self, core: Engine, below: list[str]) -> None:
        self._core = core
        self._pairs: list[Pair] = list(zip(["device", *below], below, strict=False))
        self._blocks = {source: core.free_blocks(source) for source, _ in self._pairs}
        self._block_bytes: list[int] = core.stats()["block_bytes"]
        self._under_way: dict[Pair, set[_core.Ticket]] = {pair: set() for pair in self._pairs}
        self._memory = [source for source, _ in reversed(self._pairs)]
        self._has_disk = "disk" in below
        self._pauses = dict.fromkeys(self._pairs, 0)
        self._stepped: tuple[frozenset[int], int] | None = None

    def ahead(self, batch: Handles) -> None:
        """Starts moving pages when free blocks run low; pages of `batch` are the last to go to disk. Returns at once."""
        for pair in self._pairs:
            if self._pauses[pair]:
                self._pauses[pair] -= 1
                continue
            free, whole = self._core.free_blocks(pair[0]), self._blocks[pair[0]]
            # Each sequence of a step may begin a page.
            pages = [min(len(batch), int(blocks * HIGH_WATER)) for blocks in whole]
            low = [
                group
                for group, blocks in enumerate(whole)
                if blocks and free[group] < max(int(blocks * LOW_WATER) + 1, pages[group])
            ]
            # `_pending` also notices failed moves, which set a pause.
            if not low or self._pending(pair) or self._pauses[pair]:
                continue
            for group in low:
                resting = int(whole[group] * HIGH_WATER) - free[group]
                of_batch = max(int(whole[group] * BATCH_WATER), 2 * pages[group]) - free[group]
                self._demote(pair, group, max(1, resting, of_batch), batch, of_batch=max(1, of_batch))

    def make_room(self, blocks: int, batch: Handles) -> bool:
        """Makes room for about `blocks` blocks on the device, or below it so that pages can leave the device; returns whether
        it did."""
        if self.spare("device", blocks) or self._await_leaving("device"):
            return True
        for pair in self._pairs:
            has_room_below = all(self._core.free_blocks(pair[1]))
            if self._settle(pair) or self._demote_now(pair, blocks, batch):
                return True
            if has_room_below:
                # There is room below, but no page may leave: more room there would not help.
                break
            if self._await_leaving(pair[1]):
                return True
        # Pages that are being moved or copied may leave once that has ended.
        return self._await(permutations(TIERS, 2), keep=True)

    def drain(self, before: int) -> bool:
        """Waits for the steps and reads that draining blocks wait for; returns whether more than `before` have drained."""
        self._core.finish_draining()
        return self._core.drained_blocks() > before

    def spare(self, tier: str, blocks: int, but_of: int | None = None) -> bool:
        """Drops copies on a tier that no sequence needs there, of at most `blocks` pages of each layer group, and of no page
        that sequence `but_of` holds; returns whether there were any."""
        groups = range(len(self._core.free_blocks(tier)))
        return any([self._core.drop_copies(tier, group, blocks, but_of=but_of) for group in groups])

    def may_bring_in(self, batch: Handles) -> bool:
        """Whether pages on disk of the open step of `batch` may find room now: only in the first step with these sequences,
        and in the first since any sequence was released."""
        if not self._has_disk:
            return False
        before, self._stepped = self._stepped, (frozenset(batch.tolist()), self._core.ended_sequences())
        return before != self._stepped and self._core.pages_on_disk() > 0

    def bring_in(self, batch: Handles) -> None:
        """Brings pages of a batch from disk into memory, as many as fit, in the place of pages of resting sequences."""
        for tier in self._memory:
            while left := self._promote(batch, tier):
                pair = (tier, "disk")
                if pair not in self._pairs or not (
                    self._settle(pair) or self._demote_now(pair, left, batch, resting_only=True)
                ):
                    break
            else:
                return

    def settle(self) -> None:
        """Waits for all moves under way."""
        for pair in self._pairs:
            self._settle(pair)

    def _promote(self, batch: Handles, tier: str) -> int:
        """Moves pages of a batch from disk to `tier`, as many as fit; returns how many are left on disk."""
        core, tickets = self._core, set[_core.Ticket]()
        pages = core.movable("disk", tier, batch)
        for handle, group in pages:
            spare = core.free_blocks(tier)[group] - int(self._blocks[tier][group] * BATCH_WATER)
            plan = partial(core.plan, handle, tier, None, [group], only_from="disk", keep=True, newest_first=True)
            with suppress(*OVERTAKEN):
                self._start(plan(pages_max=[max(0, spare)]), tickets)
        failures: list[PagodaError] = []
        for ticket in tickets:
            self._wait(ticket, ("disk", tier))
            try:
                core.ticket_done(ticket)
            except PagodaError as error:
                # Ask all tickets: a failure not reported here would be raised by the next step, which may be anybody's.
                failures.append(error)
        if failures:
            # Popped so that no local name keeps the error: its traceback refers to this frame and the caller's.
            raise failures.pop()
        rest = (core.plan(handle, tier, None, [group], only_from="disk") for handle, group in pages)
        return sum(map(len, rest))

    def _await_leaving(self, source: str) -> bool:
        """Waits for moves from a tier to slower ones; returns whether there were any."""
        return self._await(((source, target) for target in TIERS[TIERS.index(source) + 1 :]), keep=False)

    def _await(self, pairs: Iterable[Pair], *, keep: bool) -> bool:
        """Waits for moves between tiers, including those that callers started, and with `keep` for those that leave a copy;
        returns whether there were any. No move ends while a step is open."""
        if self._core.step_is_open():
            return False
        under_way = [(pair, ticket) for pair in pairs for ticket in self._core.moves_between(*pair, keep=keep)]
        for pair, ticket in under_way:
            self._wait(ticket, pair)
        return bool(under_way)

    def _demote_now(self, pair: Pair, blocks: int, batch: Handles, *, resting_only: bool = False) -> bool:
        """Moves at least one and about `blocks` pages of each layer group; returns whether that freed any block.

        resting_only: no pages that a sequence of the batch holds. While a step is open nothing is moved, because the blocks
        of moved pages would stay taken.
        """
        if self._core.step_is_open():
            return False
        groups = range(len(self._blocks[pair[0]]))
        asked = max(1, blocks)
        of_batch = 0 if resting_only else asked
        freed = [self._demote(pair, group, asked, batch, of_batch=of_batch) for group in groups]
        return self._settle(pair) or any(freed)

    def _demote(self, pair: Pair, group: int, asked: int, batch: Handles, *, of_batch: int) -> int:
        """Starts moving about `asked` pages of a layer group; pages of the batch only while fewer than `of_batch` are moved.
        Returns how many blocks became free at once, by dropping copies that no sequence needs."""
        core, (source, target) = self._core, pair
        moved = freed = core.drop_copies(source, group, asked)
        # Shared pages and pages of the batch go to disk only if there is nothing else.
        if target == "disk":
            resting = core.resting(source, target, group, asked - moved, batch, unshared=True)
            moved += self._move_from(resting, pair, group, asked - moved, unshared=True)
        if of_batch:
            resting = core.resting(source, target, group, asked - moved, batch)
            moved += self._move_from(resting, pair, group, asked - moved)
            # Sealed pages only: the next step of the batch appends to the open ones.
            moved += self._move_from(batch.tolist(), pair, group, of_batch - moved, sealed=True)
            if not moved:
                self._pauses[pair] = PAUSE_STEPS
        return freed

    def _move_from(self, handles: list[int], pair: Pair, group: int, wanted: int, **which: Any) -> int:
        """Starts moving up to `wanted` pages of sequences, as many as fit; returns how many.

        Pages with a copy on the target need no room. For others, copies on the target are dropped; those of the same sequence
        only if nothing could be moved otherwise.
        """
        core, (source, target) = self._core, pair
        left, lacking, given_up = wanted, 0, 0
        for handle in handles:
            if left <= 0:
                break
            plan = partial(core.plan, handle, target, None, [group], only_from=source, **which)
            with suppress(*OVERTAKEN):
                made = plan(pages_max=[left])
                if (short := self._blocks_of(made, group) - core.free_blocks(target)[group]) > 0:
                    if not lacking:
                        # Blocks given up may have to drain first, so never give up more than all pages would need.
                        most = min(short, wanted - given_up)
                        copies = core.drop_copies(target, group, most, but_of=handle)
                        given_up, lacking = given_up + copies, 0 if copies else short
                    made = plan(pages_max=[self._fitting(plan, len(made), target, group)])
                left -= self._start(made, self._under_way[pair])
        if lacking and left == wanted and not given_up:
            core.drop_copies(target, group, lacking)
            if core.free_blocks(target)[group]:
                return self._move_from(handles, pair, group, wanted, **which)
        return wanted - left

    def _fitting(self, plan: Callable[..., _core.Plan], pages: int, target: str, group: int) -> int:
        """How many of the first `pages` pages of a plan fit on the target."""
        free = self._core.free_blocks(target)[group]
        return bisect(range(1, pages + 1), free, key=lambda first: self._blocks_of(plan(pages_max=[first]), group))

    def _blocks_of(self, plan: _core.Plan, group: int) -> int:
        """How many blocks the pages of a plan need; all are of one layer group."""
        return plan.bytes // self._block_bytes[group]

    def _start(self, plan: _core.Plan, tickets: set[_core.Ticket]) -> int:
        """Starts moving the pages of a plan; returns how many."""
        if len(plan):
            tickets.add(self._core.execute(plan))
        return len(plan)

    def _pending(self, pair: Pair) -> bool:
        """Whether moves are under way."""
        for ticket in tuple(self._under_way[pair]):
            if self._arrived(pair, ticket) is not False:
                self._under_way[pair].discard(ticket)
        return bool(self._under_way[pair])

    def _settle(self, pair: Pair) -> bool:
        """Waits for moves under way; returns whether any arrived."""
        under_way = tuple(self._under_way[pair])
        for ticket in under_way:
            self._wait(ticket, pair)
        self._under_way[pair].difference_update(under_way)
        return any([self._arrived(pair, ticket) for ticket in under_way])

    def _wait(self, ticket: _core.Ticket, pair: Pair) -> None:
        """Sleeps until a move has ended; one to or from disk while the disk does anything, and `disk_timeout` more."""
        if "disk" in pair:
            self._core.wait_patiently(ticket)
        else:
            self._core.wait(ticket, SECONDS_MAX)

    def _arrived(self, pair: Pair, ticket: _core.Ticket) -> bool | None:
        """Whether a move has ended well; None if it failed, and its pages stayed where they were."""
        try:
            return self._core.ticket_done(ticket)
        except TierIOError as error:
            log.warning("pages stay in memory: %s", error)
            self._pauses[pair] = PAUSE_STEPS
            return None
