"""Plans under way: what a stream copies between the device and the host tier, and pages on their way to disk and back.

The disk is written and read by threads of `pagoda._core`, from and to memory of the host. Pages of the host tier lie there;
those of the device pass through a stage of pinned memory, a part of it at a time: copied by the copy engine and then written,
or read, verified and then copied. Neither begins before the other has ended, and nobody waits for that: whichever call of the
cache comes next starts what can go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device import passage
from pagoda.device.driver import HostArena, Stream
from pagoda.device.movement import Mover
from pagoda.device.passage import Passage

Rows = npt.NDArray[np.uint64]


class Wait(Protocol):
    """What has to end before something goes on."""

    def done(self) -> bool:
        """Whether it has."""

    def wait(self) -> None:
        """Sleeps until it has."""


class Nothing:
    """Nothing has to end."""

    def done(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """It has."""


@dataclass(eq=False)
class Plan:
    """A plan under way: copies before the first that failed, parts that have not ended, and why one failed."""

    ticket: _core.Ticket
    copied: int
    left: set[Part] = field(default_factory=set)
    why: _core.DiskCopies | None = None

    def failed(self, number: int, why: _core.DiskCopies | None) -> None:
        """A copy has not arrived."""
        if number < self.copied:
            self.copied, self.why = number, why


@dataclass(eq=False)
class Part:
    """Some of a plan's copies, by number, and what is done about them: it yields what has to end first.

    at: where its part of the stage begins, if it needs one and has it.
    """

    plan: Plan
    numbers: list[int]
    work: Iterator[Wait]
    waits_for: Wait = field(default_factory=Nothing)
    at: int | None = None


class Moves:
    """Of one cache. copying: the stream that copies are made on. through: None without a disk."""

    def __init__(
        self,
        core: _core.Cache,
        mover: Mover,
        copying: Stream,
        host: HostArena | None,
        on_host: range,
        through: Passage | None,
    ) -> None:
        self._core, self._mover, self._copying = core, mover, copying
        self._host, self._on_host, self._through = host, on_host, through
        self._under_way: list[Part] = []
        self._queue: deque[Part] = deque()
        self._free = set(range(1, 1 + passage.PARTS))

    def start(self, ticket: _core.Ticket) -> None:
        """Starts the copies of a plan. Raises BackendUnavailable when memory of the host tier cannot be pinned."""
        rows = ticket.transfers.reshape(-1, 3)
        if not len(rows):
            return
        plan = Plan(ticket, len(rows))
        on_disk = (rows[:, :2] == 0).any(1)
        ends = rows[:, :2].max(1)
        staged = on_disk & ((ends < self._on_host.start) | (ends >= self._on_host.stop))
        by_link, by_threads = np.flatnonzero(~on_disk), np.flatnonzero(on_disk & ~staged)
        parts = []
        if len(by_link):
            parts.append(Part(plan, by_link.tolist(), self._by_link(rows[by_link])))
        if len(by_threads):
            parts.append(Part(plan, by_threads.tolist(), self._of_host(plan, by_threads.tolist(), rows[by_threads])))
        queue = list(self._cut(plan, rows, np.flatnonzero(staged).tolist()))
        plan.left.update(parts, queue)
        self._queue += queue
        self._under_way += parts
        for part in parts:
            self._go_on(part)
        self._start_queued()

    def waits_for(self, ticket: _core.Ticket) -> Wait | None:
        """What has to end next for the sake of a plan; None when it has ended."""
        if part := next((part for part in self._under_way if part.plan.ticket is ticket), None):
            return part.waits_for
        return self._under_way[0].waits_for if any(part.plan.ticket is ticket for part in self._queue) else None

    def advance(self) -> None:
        """Starts what can go on, and tells the core of plans that have ended."""
        for part in list(self._under_way):
            while part.waits_for.done() and self._go_on(part):
                pass
        self._start_queued()

    def close(self) -> None:
        """Waits for the device's copies and starts nothing more. What threads of the disk do is for the core to wait for."""
        self._copying.record().wait()
        self._under_way.clear()
        self._queue.clear()

    def _cut(self, plan: Plan, rows: Rows, numbers: list[int]) -> Iterator[Part]:
        """Copies between device and disk, as many at a time as fit a part of the stage."""
        chosen: list[int] = []
        size = 0
        for number in numbers:
            assert self._through is not None
            more = int(rows[number, 2])
            if size + more > self._through.part:
                yield self._staged(plan, rows, chosen)
                chosen, size = [], 0
            chosen.append(number)
            size += more
        if chosen:
            yield self._staged(plan, rows, chosen)

    def _staged(self, plan: Plan, rows: Rows, numbers: list[int]) -> Part:
        part = Part(plan, numbers, iter(()))
        part.work = self._by_stage(part, rows[numbers])
        return part

    def _by_stage(self, part: Part, rows: Rows) -> Iterator[Wait]:
        assert self._through is not None
        assert part.at is not None
        offsets = part.at + np.concatenate([[0], np.cumsum(rows[:-1, 2], dtype=np.int64)])
        middle = self._through.address + offsets
        to_disk = not rows[0, 1]
        rows = rows.copy()
        rows[:, 1 if to_disk else 0] = middle
        if to_disk:
            yield from self._by_link(rows)
            yield from self._by_threads(part.plan, part.numbers, offsets.tolist())
        else:
            arrived = yield from self._by_threads(part.plan, part.numbers, offsets.tolist())
            if arrived:
                yield from self._by_link(rows[:arrived])

    def _of_host(self, plan: Plan, numbers: list[int], rows: Rows) -> Iterator[Wait]:
        # To pin memory is to write to it, so that comes before anything that is read from disk.
        for address, size in zip(rows[:, :2].max(1).tolist(), rows[:, 2].tolist(), strict=True):
            if self._host is not None:
                self._host.pin(address, size)
        yield from self._by_threads(plan, numbers, [0] * len(numbers))

    def _by_link(self, rows: Rows) -> Iterator[Wait]:
        self._mover.copy(self._copying, rows)
        yield from _ended(self._copying.record())

    def _by_threads(self, plan: Plan, numbers: list[int], offsets: list[int]) -> Generator[Wait, None, int]:
        """Returns how many of the first have arrived."""
        copies = self._core.start_on_disk(plan.ticket, numbers, offsets)
        yield from _ended(copies)
        arrived = copies.copied
        assert arrived is not None
        if arrived < len(numbers):
            plan.failed(numbers[arrived], copies)
        return arrived

    def _start_queued(self) -> None:
        """Gives parts of the stage to those that need one. After a failure copies that come later are not made."""
        while self._queue and self._free:
            part = self._queue.popleft()
            if part.numbers[0] > part.plan.copied:
                self._end(part)
                continue
            assert self._through is not None
            part.at = self._free.pop() * self._through.part
            self._under_way.append(part)
            self._go_on(part)

    def _go_on(self, part: Part) -> bool:
        """Says whether the part has more to wait for."""
        try:
            part.waits_for = next(part.work)
        except StopIteration:
            self._end(part)
            self._under_way.remove(part)
            return False
        except BaseException:
            # Nothing may be under way in a part of the stage that others get.
            self._copying.record().wait()
            part.plan.failed(part.numbers[0], None)
            self._end(part)
            self._under_way.remove(part)
            raise
        return True

    def _end(self, part: Part) -> None:
        """Ctrl-C may come in between: to do it again makes no difference."""
        if part.at is not None and self._through is not None:
            self._free.add(part.at // self._through.part)
        plan = part.plan
        plan.left.discard(part)
        if not plan.left and plan.copied == len(plan.ticket.transfers) // 3:
            plan.ticket.finish()
        elif not plan.left:
            self._core.fail(plan.ticket, plan.copied, plan.why)


def _ended(wait: Wait) -> Iterator[Wait]:
    """Goes on when something has ended, whoever has looked before."""
    while not wait.done():
        yield wait
