"""The tables of a step on a device: where they lie, how large they may be, and how changes get there.

Every table keeps its address from step to step. The core writes down the changes of a step as words; one copy from pinned
memory and one kernel put the words in their places. There are buffers for two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.driver import Driver, Event, Memory, Stream
from pagoda.errors import InvalidArgument
from pagoda.geometry import CoreLayer
from pagoda.kernels import arguments, instances


class Work(NamedTuple):
    """How queries of some layers are cut: one work list for all of these layers.

    few: a sequence with up to this many new tokens is decoded. queries: in a block; common_queries: in a block over pages
    that several sequences share, 0 if each sequence goes over all of its pages by itself.
    """

    group: int
    window: int | None
    prefill: bool
    few: int
    queries: int
    common_queries: int
    by_runs: bool

    @property
    def new_tokens(self) -> tuple[int, int]:
        """The least and the most new tokens of sequences that the list is for."""
        return (self.few + 1, (1 << 32) - 1) if self.prefill else (1, self.few)


class Room(NamedTuple):
    """How much the tables can hold: sequences, new tokens, pages of a sequence, spans of all, rows of angles of a layer."""

    sequences: int = 0
    tokens: int = 0
    columns: int = 0
    spans: int = 0
    angles: int = 0

    def covers(self, need: Iterable[int]) -> bool:
        """Whether there is room for all of it."""
        return all(map(ge, self, need))

    def grown(self, need: Iterable[int]) -> Room:
        """A room that covers the need as well; what grows becomes a power of two."""
        pairs = zip(self, need, strict=True)
        return Room(*(1 << (value - 1).bit_length() if value > room else room for room, value in pairs))


@dataclass
class GroupTables:
    """Addresses of a layer group's tables, and the columns of its block table."""

    table: int
    columns: int
    spans: int
    slots: int
    tokens: int

    @property
    def centering(self) -> int:
        """The address, right after `tokens`, of the number of tokens whose rows determine the centre of K."""
        return self.tokens + 4


@dataclass
class ListTables:
    """Addresses of a work list: see `ListPlaces` in crates/pagoda-py. rows: which parts results start from."""

    blocks: int
    prefix: int
    totals: int
    rows: int


@dataclass
class WorkTables:
    """Work lists over the pages of each sequence and, if there is such a list, over common pages.

    members: the address of the list of queries that share common pages. blocks_max, members_max: the most entries of the
    first list and of the list of these queries.
    """

    own: ListTables
    common: ListTables | None
    members: int
    blocks_max: int
    members_max: int


class Staging:
    """The buffers of an upload. used: the end of its step."""

    def __init__(self, driver: Driver, words: int) -> None:
        self.host, self.device = driver.pinned(4 * words), driver.memory(4 * words)
        self.words: npt.NDArray[np.uint32] = self.host.array.view(np.uint32)
        self.call = arguments.Unpack(self.device.address)
        self.used: Event | None = None


@dataclass
class Carve:
    """Hands out pieces of one allocation; with a base of 0 it only counts."""

    base: int = 0
    size: int = 0

    def take(self, size: int) -> int:
        """The address of the next `size` bytes, aligned to 256."""
        start = -(-self.size // 256) * 256
        self.size = start + size
        return self.base + start


class StepTables:
    """The tables of one cache."""

    def __init__(self, driver: Driver, core: _core.Cache, layers: list[CoreLayer], works: Collection[Work]) -> None:
        self._driver, self._core, self._layers = driver, core, layers
        self._memory: Memory | None = None
        self._staging: deque[Staging] = deque()
        self.room = Room()
        self.fixed = False
        self.groups: list[GroupTables] = []
        self.works: dict[Work, WorkTables] = {}
        self._work_keys = tuple(works)
        self.angles: dict[int, int] = {}
        """Addresses of the angles of spans, by layer."""
        self.members = 0
        """The most queries of the open step with common pages, over all work lists."""

    @property
    def members_max(self) -> int:
        """The most such queries that there is room for in any step."""
        return max(tables.members_max for tables in self.works.values())

    def fits(self) -> bool:
        """Whether the open step fits. Raises InvalidArgument if the room is fixed and too small."""
        need = self._core.table_room()
        if self.room.covers(need):
            return True
        if self.fixed:
            rooms = zip(Room._fields, need, self.room, strict=True)
            name, value, limit = next((name, value, limit) for name, value, limit in rooms if value > limit)
            names = {"columns": "pages of a sequence", "tokens": "new tokens", "angles": "rotations of queries"}
            what = names.get(name, name)
            raise InvalidArgument(f"step = {value} {what}: at most {limit}, which the maxima declared allow")
        return False

    def grow(self) -> None:
        """Makes new tables with room for the open step. Nothing may be under way that uses the old ones."""
        self.place(self.room.grown(self._core.table_room()))

    def place(self, room: Room) -> None:
        """Makes new, empty tables. Nothing may be under way that uses the old ones."""
        self._lay_out(room, counted := Carve())
        memory = self._driver.memory(counted.size)
        # Ctrl-C may come at any line: no step fits until the core knows the new tables, too.
        self.room, self._memory = Room(), memory
        self.groups, self.works, self.angles = self._lay_out(room, Carve(memory.address))
        self.forget()
        self.room = room

    def forget(self) -> None:
        """Tells the core that the tables are empty, because they are new or changes may not have been uploaded."""
        self._core.place_tables(
            [vars(tables) for tables in self.groups],
            [
                {
                    "group": work.group,
                    "new_tokens": work.new_tokens,
                    "queries": work.queries,
                    "window": work.window,
                    "by_runs": work.by_runs,
                    "own": vars(tables.own),
                    "common": None if tables.common is None else vars(tables.common),
                    "common_queries": work.common_queries,
                    "members": tables.members,
                }
                for work, tables in self.works.items()
            ],
            [{"layer": layer, "angles": address} for layer, address in self.angles.items()],
        )

    def stage(self) -> int:
        """Has the core write down the changes of the open step; returns how many words they are."""
        words, self.members = self._core.stage()
        return words

    def upload(self, stream: Stream, words: int, streams: int) -> None:
        """Sends the changes. streams: the address for the tables of streamed pages."""
        staging = self._next_staging(words)
        self._core.staged(staging.words[:words], streams)
        stream.copy(staging.device.address, staging.host.address, 4 * words)
        stream.launch(instances.UNPACK, self._driver.multiprocessors, 256, staging.call)

    def used_until(self, end: Event) -> None:
        """Notes the end of the step of the last upload."""
        if self._staging:
            self._staging[-1].used = end

    def close(self) -> None:
        """Gives the memory back."""
        self._memory = None
        self._staging.clear()

    def _lay_out(self, room: Room, carve: Carve) -> tuple[list[GroupTables], dict[Work, WorkTables], dict[int, int]]:
        """Tables by group and by work list, and tables of angles by layer."""
        groups = [
            GroupTables(
                table=carve.take(4 * room.sequences * room.columns),
                columns=room.columns,
                spans=carve.take(arguments.SPAN.itemsize * room.spans),
                slots=carve.take(8 * room.tokens),
                tokens=carve.take(8),
            )
            for _ in range(1 + max(shape["group"] for shape in self._layers))
        ]
        works = {work: self._work_tables(room, work, carve) for work in self._work_keys}
        angles = {
            layer: carve.take(8 * room.angles * len(shape["rope"][0]))
            for layer, shape in enumerate(self._layers)
            if shape["rope"]
        }
        return groups, works, angles

    def _work_tables(self, room: Room, work: Work, carve: Carve) -> WorkTables:
        # A decoded sequence has one block.
        blocks = room.sequences + (room.tokens // work.queries if work.prefill else 0)

        def list_of(blocks: int, rows: int) -> ListTables:
            size = arguments.QUERY_BLOCK.itemsize
            taken = [carve.take(bytes_) for bytes_ in (size * blocks, 4 * (blocks + 1), 8, 4 * rows)]
            return ListTables(*taken)

        if not work.common_queries:
            return WorkTables(list_of(blocks, 0), None, 0, blocks, 0)
        levels, most = _core.COMMON_LEVELS_MAX, _core.COMMON_NEW_TOKENS_MAX if work.prefill else work.few
        members = levels * min(room.tokens, room.sequences * most)
        # Blocks over common pages are of one query each, at worst.
        own, common = list_of(blocks, levels * blocks), list_of(members, 0)
        return WorkTables(own, common, carve.take(4 * members), blocks, members)

    def _next_staging(self, words: int) -> Staging:
        """Buffers that no upload reads any more, because its step has ended."""
        if len(self._staging) == 2:
            staging = self._staging[0]
            if staging.used is not None:
                staging.used.wait()
            self._staging.popleft()
            if len(staging.words) >= words:
                self._staging.append(staging)
                return staging
        staging = Staging(self._driver, max(1 << 10, 1 << (words - 1).bit_length()))
        self._staging.append(staging)
        return staging
