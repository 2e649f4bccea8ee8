"""Which pages leave the device tier when it is full: those of the sequence that rested longest, oldest first.

Every token is attended to at every step, so the pages of one sequence are read in a cycle and recency among them says
nothing; between sequences it does.
"""

from __future__ import annotations

from collections.abc import Callable

from pagoda import _core
from pagoda.device.engine import DeviceEngine
from pagoda.errors import OutOfBlocks

LOW_WATER = 1 / 32
"""The free fraction of the device tier below which pages leave it in the background."""

HIGH_WATER = 1 / 8
"""The free fraction that they make."""


class Spill:
    """Moves pages from the device to the host tier, ahead of need if it can."""

    def __init__(self, core: _core.Cache | DeviceEngine, *, enabled: bool) -> None:
        self._core, self._enabled = core, enabled
        self._under_way: list[_core.Ticket] = []
        self._blocks = core.free_blocks("device")

    def ahead(self) -> None:
        """Starts moving pages when free blocks run low. Returns at once."""
        if not self._enabled:
            return
        free = self._core.free_blocks("device")
        low = [left < whole * LOW_WATER for left, whole in zip(free, self._blocks, strict=True)]
        if not any(low) or self._pending():
            return
        for group, (left, whole) in enumerate(zip(free, self._blocks, strict=True)):
            if low[group]:
                self._demote(group, int(whole * HIGH_WATER) - left)

    def make_room(self, error: OutOfBlocks, retry: Callable[[], None]) -> None:
        """Makes room and retries, as long as that helps; raises what the last try raised."""
        while self._enabled:
            arrived = self._settle()
            if not arrived and not self._demote_some(error.blocks_short):
                break
            self._settle()
            try:
                return retry()
            except OutOfBlocks as again:
                error = again
        raise error

    def _demote_some(self, blocks: int) -> bool:
        moved = [self._demote(group, blocks) for group in range(len(self._blocks))]
        return any(moved)

    def _demote(self, group: int, blocks: int) -> bool:
        """Starts moving at least one and about `blocks` pages of a layer group; says whether there was one to move."""
        core, wanted = self._core, max(1, blocks)
        for handle in core.by_recency():
            room = core.free_blocks("host")[group]
            plan = core.plan(handle, "host", (0, core.length(handle)), [group], pages_max=min(wanted, room))
            count = len(plan.copies)
            if count:
                self._under_way.append(core.execute(plan))
                wanted -= count
            if wanted <= 0:
                return True
        return wanted < max(1, blocks)

    def _pending(self) -> bool:
        self._under_way = [ticket for ticket in self._under_way if not self._core.ticket_done(ticket)]
        return bool(self._under_way)

    def _settle(self) -> bool:
        """Waits for moves under way; says whether there were any."""
        under_way, self._under_way = self._under_way, []
        for ticket in under_way:
            while not self._core.wait(ticket, 60.0):
                pass
            self._core.ticket_done(ticket)
        return bool(under_way)
