"""Plans under way: copies of a stream between the device and the host tier, and pages on their way to disk and back.

Threads of `pagoda._core` write and read the disk, from and to host memory. Pages of the host tier already lie there. Pages of
the device pass through a stage of pinned memory, one part of it at a time: copied by the copy engine and then written, or
read, verified and then copied. The second action begins after the first has ended, but nobody waits for that: the next call
of the cache, whichever it is, starts whatever can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device import passage
from pagoda.device.driver import Pending, Stream
from pagoda.device.memory import CacheMemory
from pagoda.device.mover import Mover

Rows = npt.NDArray[np.uint64]

LINK = ("link",)
"""The ways of copies that need no disk: only the copying stream."""


class Nothing:
    """A `Pending` that has already ended."""

    def done(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """It has."""


@dataclass(eq=False)
class Part:
    """Some of a plan's copies, by number.

    ways: how they are made, one way after the other: "link" by the copying stream, "threads" by those of the disk. staged:
    whether it needs a part of the stage. at: which one it has. now: the current way, and what has to end before the next one;
    None if the current way has not begun.
    """

    numbers: list[int]
    ways: tuple[str, ...]
    staged: bool = False
    at: int | None = None
    now: tuple[int, Pending | None] = (0, None)

    @property
    def begun(self) -> bool:
        """Whether any of its copies have been started."""
        return self.now != (0, None)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.now[0] == len(self.ways)

    def end(self) -> None:
        """Leaves nothing to do."""
        self.now = len(self.ways), None


@dataclass(eq=False)
class Plan:
    """A plan under way. first: a part before which all have ended. copied: the number of copies before the first that failed;
    `why` is the reason or has it. end: what it waits for when all parts have ended."""

    rows: Rows
    parts: list[Part]
    copied: int
    first: int = 0
    why: _core.DiskCopies | str | None = None
    end: Pending | None = None

    @property
    def follows(self) -> bool:
        """Whether only copies are left that have been queued on the copying stream."""
        part = self.parts[-1]
        return part.ways == LINK and part.now[1] is not None

    def failed(self, number: int, why: _core.DiskCopies | str) -> None:
        """Notes that a copy has failed."""
        if number < self.copied:
            self.copied, self.why = number, why

    def left(self) -> Iterator[Part]:
        """The parts that have not ended."""
        while self.first < len(self.parts) and self.parts[self.first].ended:
            self.first += 1
        for number in range(self.first, len(self.parts)):
            if not self.parts[number].ended:
                yield self.parts[number]


class Plans:
    """The plans of one cache. copying: the stream for copies. follow: makes that stream wait for whatever may use the pages.

    Ctrl-C may come between any two lines. So the core keeps track of tickets, and of the copies that its threads were given.
    Everything else is repeated unless it was seen to be done, which is harmless: copies are made from pages that do not
    change, to blocks that nobody reads yet.
    """

    def __init__(
        self,
        core: _core.Cache,
        mover: Mover,
        copying: Stream,
        follow: Callable[[], None],
        memory: CacheMemory,
    ) -> None:
        self._core, self._mover, self._copying, self._follow = core, mover, copying, follow
        self._memory = memory
        self._under_way: dict[_core.Ticket, Plan] = {}

    def waits_for(self, ticket: _core.Ticket) -> Pending | None:
        """What a plan has to wait for next; None when the plan has ended."""
        self._take_in()
        if ticket not in self._under_way:
            return None
        own = self._under_way[ticket]
        if own.end is not None:
            return own.end
        for plan in (own, *self._under_way.values()):
            for part in plan.left():
                if part.now[1] is not None:
                    return part.now[1]
                if not part.begun:
                    break
        return Nothing()

    def advance(self) -> None:
        """Starts whatever can continue, and tells the core of plans that have ended.

        Raises BackendUnavailable if memory of the host tier cannot be pinned.
        """
        self._take_in()
        if not self._under_way:
            return
        staged = (plan for plan in self._under_way.values() if plan.parts[-1].staged)
        free = set(range(1, 1 + passage.PARTS)) - {part.at for plan in staged for part in _begun(plan)}
        link_is_busy = False
        for ticket, plan in list(self._under_way.items()):
            if plan.follows and link_is_busy:
                # The stream makes its copies in order, so these have not ended either.
                continue
            for part in plan.left():
                if part.staged and not part.begun and part.numbers[0] > plan.copied:
                    # After a failure later copies are not made.
                    part.end()
                elif part.staged and part.at is None:
                    if not free:
                        break
                    part.at = free.pop()
                if self._go_on(ticket, plan, part) and part.at is not None:
                    free.add(part.at)
            link_is_busy |= plan.follows
            if next(plan.left(), None) is None:
                plan.end = self._core.end_copies(ticket, plan.copied, plan.why)
                if plan.end.done():
                    del self._under_way[ticket]

    def close(self) -> None:
        """Waits for the device's copies and starts no others. The core waits for the threads of the disk."""
        self._copying.record().wait()
        self._under_way.clear()

    def _take_in(self) -> None:
        """Takes in new plans."""
        if not (moving := self._core.moving()):
            return
        fresh = [ticket for ticket in moving if ticket not in self._under_way]
        if fresh:
            self._follow()
        for ticket in fresh:
            rows = ticket.transfers.reshape(-1, 3)
            self._under_way[ticket] = Plan(rows, list(self._cut(rows)), len(rows))

    def _cut(self, rows: Rows) -> Iterator[Part]:
        """The parts of a plan; one for as many copies between device and disk as fit a part of the stage."""
        on_disk = (rows[:, :2] == 0).any(1)
        ends = rows[:, :2].max(1)
        on_host = self._memory.on_host
        staged = on_disk & ((ends < on_host.start) | (ends >= on_host.stop))
        if len(by_link := np.flatnonzero(~on_disk)):
            yield Part(by_link.tolist(), LINK)
        if len(by_threads := np.flatnonzero(on_disk & ~staged)):
            yield Part(by_threads.tolist(), ("threads",))
        by_stage, through = np.flatnonzero(staged), self._memory.passage
        if not len(by_stage):
            return
        assert through is not None
        ways = ("threads", "link") if rows[by_stage[0], 1] else ("link", "threads")
        chosen: list[int] = []
        room = through.part
        for number, size in zip(by_stage.tolist(), rows[by_stage, 2].tolist(), strict=True):
            if size > room:
                yield Part(chosen, ways, staged=True)
                chosen, room = [], through.part
            chosen.append(number)
            room -= size
        yield Part(chosen, ways, staged=True)

    def _go_on(self, ticket: _core.Ticket, plan: Plan, part: Part) -> bool:
        """Advances a part as far as possible now; returns whether it has ended."""
        while not part.ended:
            way, wait = part.now
            if wait is None:
                try:
                    wait = self._begin(ticket, plan, part, part.ways[way])
                except Exception as error:
                    # No copy may be under way in a part of the stage that others get.
                    self._copying.record().wait()
                    plan.failed(part.numbers[0], str(error))
                    self._end(part)
                    raise
                part.now = way, wait
            if not wait.done():
                return False
            if isinstance(wait, _core.DiskCopies) and (wait.copied or 0) < len(part.numbers):
                plan.failed(part.numbers[wait.copied or 0], wait)
            if way + 1 == len(part.ways):
                self._end(part)
            else:
                part.now = way + 1, None
        return True

    def _end(self, part: Part) -> None:
        """Ends a part that has nothing under way any more."""
        if part.at is not None and self._memory.passage is not None:
            self._memory.passage.clear(part.at)
        part.end()

    def _begin(self, ticket: _core.Ticket, plan: Plan, part: Part, way: str) -> Pending:
        """Starts copies; doing so again is harmless."""
        rows, offsets = plan.rows[part.numbers], [0] * len(part.numbers)
        if part.at is not None:
            through = self._memory.passage
            assert through is not None
            begins = part.at * through.part + np.concatenate([[0], np.cumsum(rows[:-1, 2], dtype=np.int64)])
            offsets = begins.tolist()
            rows[:, int(rows[0, 1] == 0)] = through.address + begins
        if way == "link":
            return self._by_link(rows)
        if part.at is None:
            self._pin(rows)
        return self._core.start_on_disk(ticket, part.numbers, offsets)

    def _pin(self, rows: Rows) -> None:
        """Pins memory of the host tier before threads of the disk use it, because pinning writes to it."""
        if self._memory.host is not None:
            self._memory.host.pin(rows[:, :2].max(1), rows[:, 2])

    def _by_link(self, rows: Rows) -> Pending:
        self._mover.copy(self._copying, rows)
        return self._copying.record()


def _begun(plan: Plan) -> Iterator[Part]:
    """The parts that have been begun and have not ended."""
    for part in plan.left():
        if part.staged and part.at is None:
            return
        yield part
