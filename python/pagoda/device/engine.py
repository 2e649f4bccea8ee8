"""A cache on a device: the calls that `pagoda._core.Cache` answers on the CPU, with the same arguments and errors.

The core decides, this does: it uploads what a step changes of the tables, launches kernels on the caller's stream, copies
pages on a stream of its own, and tells the core when copies and steps have ended. Between streams stand events:
a copy follows the step that wrote its source, a step follows the step before, and the core hands a block out again only
when every step and copy that may touch it has been seen to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.driver import Driver, Event, Memory, Pinned, Stream, View
from pagoda.errors import InvalidArgument, OutOfBlocks
from pagoda.geometry import CoreLayer
from pagoda.kernels import arguments, instances

LOG2_E = math.log2(math.e)

DECODE_ROWS = 16
"""Query rows of a sequence up to which its stored rows are split between warps, and above which its queries are."""

BLOCKS_PER_MULTIPROCESSOR = 2
"""Thread blocks of an attention kernel on each multiprocessor."""

FOREVER = 1e6
"""Seconds from which on a wait has no end."""

POLL_SECONDS = 2e-4
"""Sleep between two looks at an event, where a wait has an end."""

WINDOW_MAX = 1 << 30
"""Tokens that a query sees where there is no window."""


@dataclass(frozen=True)
class Work:
    """How queries of some layers are cut. rows: query rows of a unit."""

    group: int
    heads: int
    window: int | None
    prefill: bool
    rows: int


@dataclass
class Room:
    """How much the tables on the device can hold."""

    sequences: int = 0
    tokens: int = 0
    columns: int = 0
    spans: int = 0

    def covers(self, other: dict[str, int]) -> bool:
        """Whether there is room for all of it."""
        return all(getattr(self, name) >= value for name, value in other.items())

    def grow(self, other: dict[str, int]) -> None:
        """Makes room, in powers of two."""
        for name, value in other.items():
            if value > getattr(self, name):
                setattr(self, name, 1 << (value - 1).bit_length())


@dataclass
class GroupTables:
    """Addresses of a layer group's tables."""

    table: int
    columns: int
    span_starts: int
    spans: int
    slots: int


@dataclass
class WorkTables:
    """Addresses of a work list, and its blocks at most."""

    blocks: int
    prefix: int
    count: int
    blocks_max: int


@dataclass
class Staging:
    """One of two uploads under way."""

    host: Pinned
    device: Memory
    words: int
    used: Event | None = None


@dataclass
class Carve:
    """Hands out pieces of one allocation; with a base of 0 it only counts."""

    base: int = 0
    size: int = 0

    def take(self, size: int) -> int:
        """The address of so many bytes, aligned to 256."""
        start = -(-self.size // 256) * 256
        self.size = start + size
        return self.base + start


@dataclass
class Pending:
    """Tickets and epochs that the device has not been seen to finish, oldest first."""

    epochs: deque[tuple[int, Event]] = field(default_factory=deque)
    tickets: list[tuple[_core.Ticket, Event]] = field(default_factory=list)


class DeviceEngine:
    """Answers the calls of `pagoda._core.Cache` for a cache whose memory and kernels are on a device.

    Not to be called from two threads at once. Raises BackendUnavailable for layers that no kernel does.
    """

    def __init__(
        self,
        driver: Driver,
        layers: list[CoreLayer],
        *,
        page_size: int,
        dtypes: tuple[str, str],
        memory: list[tuple[int, int]],
        deterministic: bool,
        checked: bool,
    ) -> None:
        self._driver, self._layers, self._dtypes = driver, layers, dtypes
        self._deterministic, self._page_size = deterministic, page_size
        for layer in range(len(layers)):
            for prefill in (False, True):
                self._attention(layer, "f32", prefill)
        arena, host = driver.memory(memory[0][0]), driver.pinned(memory[1][0]) if memory[1][0] else None
        self._bases = (arena.address, host.address if host else 0)
        # Everything that is given back when the cache closes.
        self._held: list[Memory | Pinned] = [arena] if host is None else [arena, host]
        self.core = _core.Cache(
            layers,
            page_size=page_size,
            k_dtype=dtypes[0],
            v_dtype=dtypes[1],
            memory=memory,
            threads=1,
            deterministic=deterministic,
            checked=checked,
            isa=None,
            bases=self._bases,
        )
        self._misfit = driver.memory(4) if checked else None
        self._misfit_seen = driver.pinned(4) if checked else None
        self._copying = driver.stream()
        self._pending = Pending()
        self._last_step: Event | None = None
        self._stream: Stream | None = None
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._grid = driver.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        self._planes = self._lay_out()
        self._room = Room()
        self._works: dict[Work, WorkTables] = {}
        self._groups: list[GroupTables] = []
        self._angles: dict[int, int] = {}
        self._tables: Memory | None = None
        self._staging: deque[Staging] = deque()
        self._scratch: Memory | None = None
        self._scratch_floats = self._scratch_units = 0
        # Forwarded as they are: bookkeeping that touches no memory.
        core = self.core
        self.create, self.fork, self.length, self.rewind_limit = core.create, core.fork, core.length, core.rewind_limit
        self.release, self.truncate, self.drop = core.release, core.truncate, core.drop
        self.positions, self.cu_seqlens, self.table, self.csr_table = (
            core.positions,
            core.cu_seqlens,
            core.table,
            core.csr_table,
        )
        self.by_recency, self.audit, self.threads, self.isa = core.by_recency, core.audit, 0, None

    def reserve(self, sequences: npt.NDArray[np.uint64], new_tokens: npt.NDArray[np.int64]) -> None:
        """Opens a step on the stream chosen by `use_stream`; its tables are on their way when this returns."""
        self._poll()
        try:
            self.core.reserve(sequences, new_tokens)
        except OutOfBlocks:
            if not self._wait_for_steps():
                raise
            self.core.reserve(sequences, new_tokens)
        try:
            self._enter()
        except BaseException:
            self.rollback()
            raise

    def caller_stream(self, given: object) -> Stream:
        """The stream that the caller means. Raises InvalidArgument."""
        return self._driver.caller_stream(given)

    def use_stream(self, stream: Stream) -> None:
        """The stream of the next step."""
        self._stream = stream

    def append(self, layer: int, k: Any, v: Any, dtype: str | None = None) -> None:
        """See `Step.append`."""
        self.core.check_append(layer)
        shape = self._layers[layer]
        heads = shape["num_kv_heads"]
        keys = self._rows("k", k, (self._tokens, heads, shape["head_dim"]), dtype)
        values = self._rows("v", v, (self._tokens, heads, shape["v_head_dim"]), dtype)
        if keys.dtype != values.dtype:
            raise InvalidArgument(f"v = dtype {values.dtype}: {keys.dtype}, the type of k")
        tables = self._groups[shape["group"]]
        k_plane, v_plane, block_bytes = self._planes[layer]
        call = arguments.Append(
            k=arguments.Rows(keys.address, keys.strides[0], keys.strides[1]),
            v=arguments.Rows(values.address, values.strides[0], values.strides[1]),
            slots=tables.slots,
            tokens=self._tokens,
            kv_heads=heads,
            head_dim=shape["head_dim"],
            v_head_dim=shape["v_head_dim"],
            base=self._bases[0],
            block_bytes=block_bytes,
            page_shift=self._page_size.bit_length() - 1,
            k_plane=k_plane,
            v_plane=v_plane,
            misfit=self._misfit.address if self._misfit else None,
        )
        chunks = self._tokens * heads * (shape["head_dim"] + shape["v_head_dim"]) // 8
        if chunks:
            kernel = instances.append(*self._dtypes, keys.dtype)
            self._now.launch(kernel, min(-(-chunks // 256), 4 * self._driver.multiprocessors), 256, call)
            self._check_fit(layer)
        self.core.appended(layer)

    def attend(self, layer: int, q: Any, out: Any, lse: Any = None, dtype: str | None = None) -> None:
        """See `Step.attend`."""
        self.core.check_attend(layer)
        shape = self._layers[layer]
        heads, kv_heads = shape["num_q_heads"], shape["num_kv_heads"]
        queries = self._rows("q", q, (self._tokens, heads, shape["head_dim"]), dtype)
        result = self._output("out", out, (self._tokens, heads, shape["v_head_dim"]), queries, dtype)
        if lse is not None:
            lse = self._rows("lse", lse, (self._tokens, heads), None, kinds=("f32",))
        tables = self._groups[shape["group"]]
        k_plane, v_plane, block_bytes = self._planes[layer]
        rope = shape["rope"]
        call = arguments.Attend(
            pages=arguments.Pages(
                tables.table,
                tables.columns,
                (ctypes.c_void_p * arguments.TIERS)(*self._bases, None),
                block_bytes,
                self._page_size.bit_length() - 1,
                tables.span_starts,
                tables.spans,
            ),
            k_plane=k_plane,
            v_plane=v_plane,
            q=arguments.Rows(queries.address, queries.strides[0], queries.strides[1]),
            out=arguments.Rows(result.address, result.strides[0], result.strides[1]),
            lse=None if lse is None else lse.address,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            window=WINDOW_MAX if shape["window"] is None else shape["window"],
            by_runs=self._deterministic,
            scale=shape["scale"] * LOG2_E,
            angles=self._angles.get(layer),
            rotary_pairs=len(rope[0]) if rope else 0,
            interleaved=bool(rope and rope[1]),
        )
        for prefill in (False, True):
            if not self._has(layer, prefill):
                continue
            chosen = self._attention(layer, queries.dtype, prefill)
            work = self._works[self._work(layer, prefill)]
            self._make_scratch(layer, chosen, work)
            call.blocks, call.prefix, call.block_count = work.blocks, work.prefix, work.count
            assert self._scratch is not None
            call.pending = self._scratch.address
            call.partials = self._scratch.address + 4 * self._scratch_units
            self._now.launch(chosen.kernel, self._grid, chosen.threads, call, shared_bytes=chosen.shared_bytes)

    def commit(self, accepted: npt.NDArray[np.int64] | None = None) -> None:
        """See `Step.commit`."""
        self.core.commit(accepted)
        self._leave()

    def rollback(self) -> None:
        """Closes the step as if it had never been opened."""
        self.core.rollback()
        self._leave()

    def plan(self, *given: Any, **options: Any) -> _core.Plan:
        """See `Cache.plan`."""
        self._poll()
        return self.core.plan(*given, **options)

    def execute(self, plan: _core.Plan) -> _core.Ticket:
        """Starts the copies of a plan on the copying stream."""
        self._poll()
        ticket = self.core.execute(plan)
        transfers = ticket.transfers
        if len(transfers):
            if self._last_step is not None:
                self._copying.follow(self._last_step)
            self._copy(self._copying, transfers)
            self._pending.tickets.append((ticket, self._copying.record()))
        return ticket

    def ticket_done(self, ticket: _core.Ticket) -> bool:
        """Whether a ticket's copies have arrived; raises if they failed."""
        self._poll()
        return self.core.ticket_done(ticket)

    def wait(self, ticket: _core.Ticket, seconds: float) -> bool:
        """Sleeps until a ticket's copies have arrived, or `seconds` have passed; says which."""
        event = next((event for waiting, event in self._pending.tickets if waiting is ticket), None)
        deadline = time.monotonic() + seconds
        while event is not None and not event.done():
            if seconds >= FOREVER:
                event.wait()
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(POLL_SECONDS)
        return self.ticket_done(ticket)

    def free_blocks(self, tier: str) -> list[int]:
        """Blocks of each group that a tier could hand out now."""
        self._poll()
        return self.core.free_blocks(tier)

    def stats(self) -> dict[str, Any]:
        """See `Cache.stats`."""
        self._poll()
        return self.core.stats()

    def close(self) -> None:
        """Waits for the device, then gives everything back."""
        with contextlib.suppress(Exception):
            self._wait_for_steps()
        for _, event in self._pending.tickets:
            event.wait()
        self.core.close()
        self._held.clear()
        self._staging.clear()
        self._tables = self._scratch = None

    def empty(self, q: Any, dim: int | None) -> Any:
        """An output for queries `q` [tokens, heads, head_dim], or with dim=None a log-sum-exp."""
        shape = self._driver.view("q", q).shape
        if len(shape) != 3:
            raise InvalidArgument(f"q = {list(shape)}: an array [tokens, heads, dim]")
        return self._driver.empty(shape[:2], q, "f32") if dim is None else self._driver.empty((*shape[:2], dim), q)

    @property
    def _now(self) -> Stream:
        assert self._stream is not None
        return self._stream

    def _lay_out(self) -> list[tuple[arguments.Plane, arguments.Plane, int]]:
        """K plane, V plane and block bytes of each layer: docs/layout.md, in the order of `layout.rs`."""
        sizes = [4 if name == "f32" else 2 for name in self._dtypes]
        ends: dict[int, int] = {}
        planes = []
        for shape in self._layers:
            pair = []
            for size, dim in zip(sizes, (shape["head_dim"], shape["v_head_dim"]), strict=True):
                row = dim * size
                start = ends.get(shape["group"], 0)
                pair.append(arguments.Plane(start, row * self._page_size, row))
                ends[shape["group"]] = start + row * self._page_size * shape["num_kv_heads"]
            planes.append(pair)
        return [(k, v, ends[shape["group"]]) for (k, v), shape in zip(planes, self._layers, strict=True)]

    def _work(self, layer: int, prefill: bool) -> Work:
        shape = self._layers[layer]
        heads = shape["num_q_heads"] // shape["num_kv_heads"]
        rows = self._attention(layer, "f32", prefill).rows
        return Work(shape["group"], heads, shape["window"], prefill, rows)

    def _attention(self, layer: int, q: str, prefill: bool) -> instances.Attention:
        shape = self._layers[layer]
        mode = ("prefill" if prefill else "decode") + ("-deterministic" if self._deterministic else "")
        heads = shape["num_q_heads"] // shape["num_kv_heads"]
        sizes = shape["head_dim"], shape["v_head_dim"]
        return instances.attend(*self._dtypes, q, *sizes, heads, mode, self._driver.shared_bytes_max)

    def _few(self, layer: int) -> int:
        """New tokens of a sequence up to which it is decoded."""
        shape = self._layers[layer]
        return max(1, DECODE_ROWS // (shape["num_q_heads"] // shape["num_kv_heads"]))

    def _has(self, layer: int, prefill: bool) -> bool:
        """Whether the step has sequences of the kind."""
        most = self._few(layer)
        if most not in self._kinds:
            few = (self._counts > 0) & (self._counts <= most)
            self._kinds[most] = bool(few.any()), bool((self._counts > most).any())
        return self._kinds[most][prefill]

    def _enter(self) -> None:
        """Uploads the tables of the open step."""
        if self._last_step is not None:
            self._now.follow(self._last_step)
        self._counts = np.diff(self.core.cu_seqlens())
        self._tokens = int(self._counts.sum())
        self._kinds.clear()
        self._copy(self._now, self.core.step_transfers())
        need = self.core.table_room()
        if not self._room.covers(need):
            self._room.grow(need)
            self._place_tables()
        words = self.core.stage()
        staging = self._next_staging(words)
        self.core.staged(staging.host.array.view(np.uint32)[:words])
        self._now.copy(staging.device.address, staging.host.address, 4 * words)
        call = arguments.Unpack(staging.device.address)
        self._now.launch(instances.UNPACK, self._driver.multiprocessors, 256, call)
        staging.used = self._now.record()

    def _leave(self) -> None:
        """Marks the end of the step in its stream."""
        self._last_step = self._now.record()
        self._stream = None
        epoch = self.core.ended_epoch()
        if epoch is not None:
            self._pending.epochs.append((epoch, self._last_step))
        self._poll()

    def _place_tables(self) -> None:
        """New tables with room for the open step; work under way keeps the old ones until it has ended."""
        self._wait_for_steps()
        room = self._room
        works = {self._work(layer, prefill) for layer in range(len(self._layers)) for prefill in (False, True)}
        ropes = {layer: shape["rope"] for layer, shape in enumerate(self._layers) if shape["rope"]}
        groups = 1 + max(shape["group"] for shape in self._layers)
        carve = Carve()
        for _ in range(2):
            carve = Carve(self._tables.address if self._tables and carve.size else 0)
            self._groups = [
                GroupTables(
                    table=carve.take(4 * room.sequences * room.columns),
                    columns=room.columns,
                    span_starts=carve.take(4 * (room.sequences + 1)),
                    spans=carve.take(arguments.SPAN.itemsize * room.spans),
                    slots=carve.take(8 * room.tokens),
                )
                for _ in range(groups)
            ]
            self._works = {}
            for work in works:
                # What is decoded is one block a sequence.
                more = room.tokens // (work.rows // work.heads) if work.prefill else 0
                blocks = room.sequences + more
                tables = (
                    carve.take(arguments.QUERY_BLOCK.itemsize * blocks),
                    carve.take(4 * (blocks + 1)),
                    carve.take(4),
                )
                self._works[work] = WorkTables(*tables, blocks)
            self._angles = {
                layer: carve.take(8 * room.spans * len(rope[0])) for layer, rope in ropes.items() if rope is not None
            }
            if carve.base == 0:
                self._tables = self._driver.memory(carve.size)
        self.core.place_tables(
            [vars(tables) for tables in self._groups],
            [
                {
                    "group": work.group,
                    "new_tokens": self._bounds(work),
                    "queries": work.rows // work.heads,
                    "window": work.window,
                    "by_runs": self._deterministic,
                    "blocks": tables.blocks,
                    "prefix": tables.prefix,
                    "count": tables.count,
                }
                for work, tables in self._works.items()
            ],
            [{"layer": layer, "angles": address} for layer, address in self._angles.items()],
        )

    @staticmethod
    def _bounds(work: Work) -> tuple[int, int]:
        """New tokens of the sequences that the work list is for."""
        most = max(1, DECODE_ROWS // work.heads)
        return (most + 1, (1 << 32) - 1) if work.prefill else (1, most)

    def _next_staging(self, words: int) -> Staging:
        """A pair of buffers that no upload reads any more."""
        if len(self._staging) == 2:
            staging = self._staging.popleft()
            if staging.used is not None:
                staging.used.wait()
            if staging.words >= words:
                self._staging.append(staging)
                return staging
        size = max(1 << 10, 1 << (words - 1).bit_length())
        staging = Staging(self._driver.pinned(4 * size), self._driver.memory(4 * size), size)
        self._staging.append(staging)
        return staging

    def _make_scratch(self, layer: int, chosen: instances.Attention, work: WorkTables) -> None:
        """Room for partial results and counters, which are 0 between launches."""
        kv_heads = self._layers[layer]["num_kv_heads"]
        slots = 2 * self._grid
        if self._deterministic:
            runs = self._room.columns * self._page_size // (64 * 64) + self._room.spans + 1
            slots = work.blocks_max * runs * kv_heads
        units = -(-work.blocks_max * kv_heads // 64) * 64
        floats = slots * chosen.partial
        if self._scratch is None or units > self._scratch_units or floats > self._scratch_floats:
            self._wait_for_steps()
            self._now.record().wait()
            self._scratch_units = max(units, self._scratch_units)
            self._scratch_floats = max(floats, self._scratch_floats)
            self._scratch = self._driver.memory(4 * (self._scratch_units + self._scratch_floats))

    def _copy(self, stream: Stream, transfers: npt.NDArray[np.uint64]) -> None:
        """Copies, neighbours in one go."""
        merged: list[list[int]] = []
        for source, target, size in transfers.reshape(-1, 3).tolist():
            if merged and merged[-1][0] + merged[-1][2] == source and merged[-1][1] + merged[-1][2] == target:
                merged[-1][2] += size
            else:
                merged.append([source, target, size])
        for source, target, size in merged:
            stream.copy(target, source, size)

    def _check_fit(self, layer: int) -> None:
        """In a checked cache: waits, and raises for values that did not fit."""
        if self._misfit is None or self._misfit_seen is None:
            return
        seen = self._misfit_seen.array.view(np.int32)
        self._now.copy(self._misfit_seen.address, self._misfit.address, 4)
        self._now.record().wait()
        if seen[0]:
            seen[0] = 0
            self._now.copy(self._misfit.address, self._misfit_seen.address, 4)
            self._now.record().wait()
            raise InvalidArgument(f"k, v = values of layer {layer}: finite ones that fit their row formats")

    def _poll(self) -> None:
        """Tells the core what has ended."""
        while self._pending.epochs and self._pending.epochs[0][1].done():
            self.core.retire(self._pending.epochs.popleft()[0])
        waiting = []
        for ticket, event in self._pending.tickets:
            if event.done():
                ticket.finish()
            else:
                waiting.append((ticket, event))
        self._pending.tickets = waiting

    def _wait_for_steps(self) -> bool:
        """Sleeps until every step has ended; says whether there was one."""
        waited = bool(self._pending.epochs)
        if waited:
            self._pending.epochs[-1][1].wait()
            self._poll()
        return waited

    def _rows(
        self,
        name: str,
        array: Any,
        shape: tuple[int, ...],
        dtype: str | None,
        kinds: Collection[str] = ("f32", "f16", "bf16"),
    ) -> View:
        """Checks an array of the caller."""
        if dtype not in (None, "bf16"):
            raise InvalidArgument(f'dtype = {dtype!r}: None, or "bf16" for 16-bit integers')
        view = self._driver.view(name, array)
        if view.shape != shape:
            raise InvalidArgument(f"{name} = shape {list(view.shape)}: {list(shape)}")
        kind = "bf16" if view.dtype == "u16" and dtype == "bf16" else view.dtype
        if kind not in kinds:
            raise InvalidArgument(f'{name} = dtype {view.dtype}: {", ".join(kinds)} (or u16 with dtype="bf16")')
        size = 4 if kind == "f32" else 2
        strides = view.strides
        if math.prod(shape) and (strides[-1] != size or any(stride % size for stride in strides)):
            raise InvalidArgument(f"{name} = strides {strides}: a contiguous last dimension")
        return View(view.address, view.shape, strides, kind, view.writeable)

    def _output(self, name: str, array: Any, shape: tuple[int, ...], like: View, dtype: str | None) -> View:
        """Checks an array that results are written to: of the queries' type, and nothing twice."""
        view = self._rows(name, array, shape, dtype, kinds=(like.dtype,))
        if not view.writeable:
            raise InvalidArgument(f"{name} = read-only: a writeable array")
        row = view.shape[-1] * (4 if view.dtype == "f32" else 2)
        axes = sorted(
            (abs(stride), length)
            for stride, length in zip(view.strides[:-1], view.shape[:-1], strict=True)
            if length > 1
        )
        reach = row
        for stride, length in axes:
            if math.prod(shape) and stride < reach:
                raise InvalidArgument(f"{name} = strides {view.strides}: rows that do not overlap")
            reach = stride * length
        (low, high), (theirs_low, theirs_high) = view.bytes, like.bytes
        if low < theirs_high and theirs_low < high:
            raise InvalidArgument(f"{name} = memory of q: memory of its own")
        return view
