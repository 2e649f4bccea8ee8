"""Pages that are not on the device, and the routes by which attention reads them.

"ring": copies through device memory, ahead of the kernels (ring.py). "mapped": kernels read pinned memory of the host tier in
place. That costs no launches and no memory, but every block of queries transfers the pages over the link again, and only
while attention runs. "memory": the CPU attends to pages of the host tier where they lie (partials.py). If the rates of all
routes were measured and kept, work is divided by them. Otherwise the CPU has no part, and the driver knows from how many
bytes the ring is faster than reading in place (thresholds.py). Pages on disk can only go through the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.driver import Driver, Event, Memory, Stream, View
from pagoda.device.memory import CacheMemory
from pagoda.device.mover import Mover
from pagoda.device.partials import Asked, Partials
from pagoda.device.reads import Found, Reads
from pagoda.device.ring import Ring, Slot
from pagoda.device.tables import ListTables, StepTables, Work
from pagoda.geometry import Geometry


@dataclass
class Traffic:
    """Bytes that attention of a step has read outside of device memory, by route.

    ring: copies, including those made ahead for the next step. mapped: an upper bound of what kernels read in place: they
    skip rows outside of windows, and read common pages once. memory: rows that the CPU has read.
    """

    ring: int = 0
    mapped: int = 0
    memory: int = 0


@dataclass(frozen=True)
class GroupPasses:
    """How the pages of a group are streamed in the open step.

    table, columns: a block table with the places of pages in their passes. copies: for each pass [block, blocks, place] of
    adjacent blocks of the host tier, place being that of the first one in the slot. on_disk: how many pages of each pass come
    from disk; they follow those of the host. works: for each pass a work list, and one over common pages; None if there is no
    work. begins: for each sequence, the CPU attends to all tokens before this one. row: among the parts, the row with the
    CPU's result for the first query of the batch. in_place: pages that kernels read in place, once for each block of queries.
    """

    table: int
    columns: int
    copies: list[npt.NDArray[np.int64]]
    on_disk: list[int]
    works: dict[Work, list[tuple[ListTables | None, ListTables | None]]]
    begins: npt.NDArray[np.uint32]
    row: int
    in_place: int


class Streams:
    """The streaming of a cache: the ring, and the tables of the open step for it. slot_size: bytes of a slot of the ring."""

    def __init__(
        self,
        driver: Driver,
        core: _core.Cache,
        geometry: Geometry,
        memory: CacheMemory,
        mover: Mover,
        slot_size: int,
        partials: Partials | None,
    ) -> None:
        self._driver, self._core, self._host, self._mover, self._partials = driver, core, memory.host, mover, partials
        self._layers, self._layouts, self._runs = geometry.layers, geometry.layouts, geometry.runs
        self._widths = geometry.layer_bytes
        self._rooms = [slot_size // width for width in self._widths]
        self._copying = driver.stream()
        self._reads = Reads(core, self._copying) if memory.passage else None
        self.ring = Ring(driver, slot_size, self._copying, self._reads, self._bring)
        self._tables: Memory | None = None
        self._room = 0
        self._stamp = 0
        self._pages: dict[int, dict[str, int]] = {}
        self._placed: list[tuple[int, dict[str, Any]]] = []
        self._copies: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._on_disk = [0] * len(self._layouts)
        self._groups: dict[int, GroupPasses] = {}
        self._order: list[tuple[int, int]] = []
        self._items: dict[tuple[int, int], int] = {}
        self._bounds = np.zeros(1, np.int32)
        self.traffic = Traffic()

    @property
    def in_passes(self) -> bool:
        """Whether a step may go over pages in passes."""
        return bool(self.ring) or self._partials is not None

    def plan(self, bounds: npt.NDArray[np.int32], *, centers: bool) -> int:
        """Divides the work of each group of the staged step; returns how many words its tables add to the upload.

        bounds: where the new tokens of each sequence begin, and where the last ones end. centers: whether their rows
        determine centres of K.
        """
        self.traffic, self._bounds, self._placed = Traffic(), bounds, []
        if centers and self._partials is not None:
            self._partials.forget_centers()
        self._pages = self._core.host_pages()
        if self._reads is not None:
            self._on_disk = self._core.on_disk()
        if not self._pages and not any(self._on_disk):
            return 0
        chosen = [way for group in range(len(self._rooms)) if (way := self._way(group)) is not None]
        if not chosen:
            return 0
        words, stamp, groups = self._core.stream(chosen)
        self._placed = [(int(way["group"]), placed) for way, placed in zip(chosen, groups, strict=True)]
        if stamp != self._stamp:
            self._copies = {
                group: [self._side_by_side(group, blocks.astype(np.int64)) for blocks, _ in placed["passes"]]
                for group, placed in self._placed
            }
            self.ring.forget()
            # Last, so that the copies are found again if Ctrl-C comes before this.
            self._stamp = stamp
        return words

    def fits(self, words: int) -> bool:
        """Whether there is room for the tables."""
        return words <= self._room

    def grow(self, words: int) -> None:
        """Makes room. Nothing may be under way that uses the old tables."""
        room = 1 << (words - 1).bit_length()
        self._tables = self._driver.memory(4 * room)
        self._room = room

    def place(self, tables: StepTables) -> int:
        """Returns the address for the words; from now on passes can be `brought`."""
        base = 0 if self._tables is None else self._tables.address
        if not self._placed and not self._groups:
            # Nothing is streamed, and nothing was in the step before.
            return base
        self._groups = {group: self._group(group, base, placed, tables) for group, placed in self._placed}
        self._order = [
            (layer, number)
            for layer in range(len(self._layers))
            if (passes := self.group(layer)) is not None
            for number, (copies, on_disk) in enumerate(zip(passes.copies, passes.on_disk, strict=True))
            if len(copies) or on_disk
        ]
        self._items = {one: item for item, one in enumerate(self._order)}
        # Numbered in the same order as in crates/pagoda-py/src/passes.rs.
        on_disk = [item for item, (layer, number) in enumerate(self._order) if self._pages_on_disk(layer, number)]
        self.ring.enter(len(self._order), {item: place for place, item in enumerate(on_disk)})
        return base

    def group(self, layer: int) -> GroupPasses | None:
        """How the pages of a layer are streamed; None if they are read in place, in one pass."""
        return self._groups.get(self._layers[layer]["group"])

    def read_in_place(self, layer: int) -> None:
        """Counts what attention over a layer reads from pinned memory if none of the layer is streamed."""
        if pages := self._pages.get(self._layers[layer]["group"]):
            self.traffic.mapped += pages["reads"] * self._runs[layer].bytes

    def ask(self, layer: int, q: View, stream: Stream) -> Asked | None:
        """Begins attention over a streamed layer; returns what the CPU has to `answer` before the last pass, if anything."""
        passes = self._groups[self._layers[layer]["group"]]
        self.traffic.mapped += passes.in_place * self._runs[layer].bytes
        if self._partials is None or not passes.begins.any():
            return None
        return self._partials.ask(stream, layer, q, passes.begins, self._bounds)

    def answer(self, asked: Asked, stream: Stream, parts: int) -> None:
        """Computes the CPU's part and sends it to the device. parts: the address of parts of results there."""
        assert self._partials is not None
        layer = self._layers[asked.layer]
        row = 4 * layer["num_q_heads"] * (layer["v_head_dim"] + 2)
        target = parts + self._groups[layer["group"]].row * row
        self.traffic.memory += self._partials.answer(stream, asked, target)

    @contextmanager
    def brought(self, layer: int, number: int, stream: Stream) -> Iterator[tuple[int, int]]:
        """The base address and pitch at which kernels launched inside, on the stream, find the pages that a pass brings;
        zeros if it brings none."""
        run, item = self._runs[layer], self._items.get((layer, number))
        if item is None:
            yield 0, 0
            return
        with self.ring.brought(item, stream) as address:
            # A slot holds one layer of each block, and kernels add that layer's offset in a whole block.
            yield address - run.start, run.bytes

    def give_back(self) -> None:
        """Gives back the pinned memory of pages from disk that have been copied on."""
        if self._reads is not None:
            self._reads.give_back()

    def behind(self, step: Event) -> Event:
        """The event at which a step and all copies so far have ended."""
        if not self.ring:
            return step
        self._copying.follow(step)
        return self._copying.record()

    def finish(self) -> None:
        """Waits for the copies."""
        self._copying.record().wait()

    def close(self) -> None:
        """Gives the memory back. No copy may be under way."""
        self.ring.close()
        self._tables = self._partials = None

    def _way(self, group: int) -> dict[str, float] | None:
        """How the group is streamed; None if its pages are read in place, in one pass."""
        size, on_disk, pages = self._widths[group], self._on_disk[group], self._pages.get(group)
        way = {"group": group, "room": self._rooms[group], "on_cpu": 0.0, "in_place": 0.0}
        if pages is None:
            return way if on_disk else None
        if self._partials is None:
            enough = bool(self.ring) and pages["reads"] * size >= self._driver.ring_bytes
            return way if on_disk or enough else None
        shares = self._partials.divide(group, pages, size, ring=bool(self.ring))
        ring, mapped, memory = (shares.get(route, 0.0) for route in ("ring", "mapped", "memory"))
        if not ring and not memory and not on_disk:
            return None
        if memory:
            way["on_cpu"] = memory / (pages["divisible"] * size)
        return way | {"in_place": mapped / (ring + mapped) if ring else 1.0}

    def _group(self, group: int, base: int, placed: dict[str, Any], tables: StepTables) -> GroupPasses:
        def lists(parts: list[dict[str, int] | None]) -> list[ListTables | None]:
            return [
                None if part is None else ListTables(**{name: base + place for name, place in part.items()})
                for part in parts
            ]

        keys = list(tables.works)
        works = {
            keys[work["work"]]: list(zip(lists(work["own"]), lists(work["common"]), strict=True))
            for work in placed["works"]
        }
        table, columns, copies = base + placed["table"], placed["columns"], self._copies[group]
        on_disk = [on_disk for _, on_disk in placed["passes"]]
        begins, row, in_place = placed["begins"], placed["row"], placed["in_place"]
        return GroupPasses(table, columns, copies, on_disk, works, begins, row, in_place)

    def _side_by_side(self, group: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Runs of adjacent blocks in one piece of pinned memory, as [block, blocks, place]."""
        if self._host is None or not len(blocks):
            return np.zeros((0, 3), np.int64)
        block_bytes = self._layouts[group].block_bytes
        apart = (np.diff(blocks) != 1) | (blocks[1:] * block_bytes % self._host.piece == 0)
        places = np.concatenate([[0], np.flatnonzero(apart) + 1])
        return np.stack([blocks[places], np.diff([*places, len(blocks)]), places], 1)

    def _pages_on_disk(self, layer: int, number: int) -> int:
        return self._groups[self._layers[layer]["group"]].on_disk[number]

    def _bring(self, slot: Slot, item: int, found: Found | None) -> Event:
        """Starts to copy a pass into a slot. found: the pages of the pass that were read from disk."""
        layer, number = self._order[item]
        group, run = self._layers[layer]["group"], self._runs[layer]
        block_bytes, host = self._layouts[group].block_bytes, 0 if self._host is None else self._host.address
        passes = self._groups[group]
        sources = [
            (host + block * block_bytes + run.start, block_bytes, n, at)
            for block, n, at in passes.copies[number].tolist()
        ]
        if found is not None:
            behind = sum(pages for _, _, pages, _ in sources)
            sources.append((found.address, found.stride, passes.on_disk[number], behind))
        few, large = [], self._driver.copy_engine_bytes
        for source, pitch, pages, place in sources:
            target = slot.address + place * run.bytes
            if pages * run.bytes >= large:
                self._copying.copy_rows(target, run.bytes, source, pitch, run.bytes, pages)
            else:
                few += [(source + i * pitch, target + i * run.bytes, run.bytes) for i in range(pages)]
            self.traffic.ring += pages * run.bytes
        if few:
            self._mover.copy(self._copying, np.array(few, np.uint64))
        return self._copying.record()
