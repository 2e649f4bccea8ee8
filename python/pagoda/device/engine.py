"""A cache on a device: the calls that `pagoda._core.Cache` answers on the CPU, with the same arguments and errors.

The core decides, this does: it sends what a step changes of the tables, launches kernels on the caller's stream, copies
pages on a stream of its own, and tells the core when copies and steps have ended. Between streams stand events:
a copy follows the step that wrote its source, a step follows the step before, and the core hands a block out again only
when every step and copy that may touch it has been seen to end.

Once maxima are declared, nothing that a kernel is told changes from step to step but what lies in its tables: a graph of the
kernels of one step, captured by the caller, does every later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda.device.driver import Driver, Event, Memory, Stream, View
from pagoda.device.movement import Mover
from pagoda.device.moves import Moves
from pagoda.device.partials import Partials
from pagoda.device.passage import Passage, passage_bytes
from pagoda.device.streaming import RUN_ROWS, SLOTS, GroupPasses, Streams, Traffic, layer_runs, ring_slots
from pagoda.device.tables import ListTables, Room, StepTables, Work
from pagoda.disk import DiskArguments
from pagoda.errors import BackendUnavailable, InvalidArgument, OutOfBlocks, PagodaError
from pagoda.geometry import BlockLayout, CoreLayer
from pagoda.kernels import arguments, instances
from pagoda.kernels.arguments import Division
from pagoda.rates import Routes

T = TypeVar("T")

LOG2_E = math.log2(math.e)

DECODE_ROWS = 16
"""Query rows of a sequence up to which its stored rows are split between warps, and above which its queries are."""

QUERY_TYPES = ("f32", "f16", "bf16")

FOREVER = 1e6
"""Seconds from which on a wait has no end."""

POLL_SECONDS = 2e-4
"""Sleep between two looks at an event, where a wait has an end."""

SPANS_DECLARED = 8
"""Spans of a sequence that there is room for once maxima are declared: `drop` leaves one more each time, sinks are one."""

BROUGHT = 2
"""The tier, to kernels, of what has been brought from the host for a launch."""

WINDOW_MAX = 1 << 30
"""Tokens that a query sees where there is no window."""

APPEND_THREADS = 256
"""Of a thread block of `append` and `append_rows`."""

APPEND_ROWS_BYTES = APPEND_THREADS // 32 * 4 * 1024
"""Shared memory of `append_rows`: the largest row for each warp."""

CENTER_THREADS = 512
"""Of the one thread block of `center`."""


@dataclass(frozen=True)
class Maxima:
    """What the caller has declared of all steps to come."""

    sequences: int
    new_tokens: int
    context: int


class Scratch:
    """Device memory for partial results, which every launch may overwrite, and for counters, which are 0 between launches."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._partials: Memory | None = None
        self._counters: Memory | None = None
        self._parts: Memory | None = None
        self._sizes = (0, 0, 0)
        self.partials = self.counters = self.parts = 0

    def covers(self, sizes: tuple[int, int, int]) -> bool:
        """Whether there are so many bytes of partial results, counters and parts that launches leave for others."""
        return all(have >= want for have, want in zip(self._sizes, sizes, strict=True))

    def grow(self, sizes: tuple[int, int, int]) -> None:
        """Makes room. Nothing may be under way that uses the old memory."""
        have = self._sizes
        partials, counters, parts = map(max, have, sizes)
        if partials > have[0]:
            self._partials = self._driver.memory(partials)
            self.partials = self._partials.address
        if counters > have[1]:
            self._counters = self._driver.memory(counters)
            self.counters = self._counters.address
        if parts > have[2]:
            self._parts = self._driver.memory(parts)
            self.parts = self._parts.address
        self._sizes = (partials, counters, parts)


class Centers:
    """What the K rows of each layer are centred by, on the device; zeros where the first rows have yet to say.

    of: the address for each layer that has a centre, its own or that of its owner.
    """

    def __init__(self, driver: Driver, layers: list[CoreLayer]) -> None:
        own = {
            index: layer["num_kv_heads"] * layer["head_dim"]
            for index, layer in enumerate(layers)
            if layer["kv_owner"] is None and (layer["center_first"] or layer["center"] is not None)
        }
        self._first = {index for index in own if layers[index]["center_first"]}
        starts = dict(zip(own, accumulate([len(layers), *own.values()]), strict=False))
        words = len(layers) + sum(own.values())
        # Whether the centre of each layer is settled, and the centres.
        self._memory = driver.memory(4 * words)
        self.of = {
            index: self._memory.address + 4 * starts[owner]
            for index, layer in enumerate(layers)
            if (owner := index if layer["kv_owner"] is None else layer["kv_owner"]) in own
        }
        given = driver.pinned(4 * words)
        numbers = given.array.view(np.float32)[:words]
        numbers[:] = 0
        for index, start in starts.items():
            if index not in self._first:
                numbers[start : start + own[index]] = layers[index]["center"]
        stream = driver.stream()
        stream.copy(self._memory.address, given.address, 4 * words)
        stream.record().wait()

    def settle(self, layer: int) -> bool:
        """Whether the rows that are appended now are the first of a layer that takes its centre from them."""
        first = layer in self._first
        self._first.discard(layer)
        return first

    def settled(self, layer: int) -> int:
        """The address of the flag of a layer, which the kernel `center` sets."""
        return self._memory.address + 4 * layer


class DeviceEngine:
    """Answers the calls of `pagoda._core.Cache` for a cache whose memory and kernels are on a device.

    routes: what the ways to pages of the host tier carry, by which work on them is divided; without that, and in a
    deterministic cache, the CPU has no part in it. isa: the instruction set of that part, the best by default.

    Not to be called from two threads at once. Raises BackendUnavailable for layers that no kernel does.
    """

    def __init__(
        self,
        driver: Driver,
        layers: list[CoreLayer],
        *,
        page_size: int,
        layouts: list[BlockLayout],
        memory: list[tuple[int, int]],
        deterministic: bool,
        checked: bool,
        zero_on_free: bool,
        disk: DiskArguments | None,
        routes: Routes | None = None,
        isa: str | None = None,
    ) -> None:
        self._driver, self._layers, self._layouts = driver, layers, layouts
        self._deterministic, self._page_size = deterministic, page_size
        kinds = product(range(len(layers)), (False, True), QUERY_TYPES)
        self._works = {kind: self._work(*kind) for kind in kinds}
        # No block lies across a border between extents, so none lies across one between pieces of pinned memory.
        host = driver.host_arena(*memory[1]) if memory[1][0] else None
        runs = layer_runs(layers, layouts)
        # Layers of a group are of one shape.
        widths = {layer["group"]: run.bytes for layer, run in zip(layers, runs, strict=True)}
        tiers = {"host": host is not None, "disk": disk is not None}
        slots = ring_slots([*widths.values()], page_size, memory[0][0], **tiers, deterministic=deterministic)
        self._device_memory, self._enough_for_disk = memory[0][0], slots.enough
        memory = [(memory[0][0] - SLOTS * slots.bytes, memory[0][1]), memory[1]]
        arena = driver.memory(memory[0][0])
        self._bases = (arena.address, host.address if host else 0)
        self._arena: Memory | None = arena
        self._host = host
        self._arena_bytes = memory[0][0]
        self._on_host = range(host.address, host.address + memory[1][0]) if host else range(0)
        blocks = [layout.block_bytes for layout in layouts]
        beside = passage_bytes(blocks, self._arena_bytes, slots.read)
        self._passage = Passage(driver, beside, zeroes=zero_on_free) if disk else None
        passage, nothing = self._passage, (0, 0, 1)
        try:
            self.core = _core.Cache(
                layers,
                page_size=page_size,
                memory=memory,
                threads=1,
                deterministic=deterministic,
                checked=checked,
                isa=None,
                zero_on_free=zero_on_free,
                device={
                    "bases": self._bases,
                    "stage": passage.stage if passage else nothing,
                    "ring": passage.ring if passage else nothing,
                    "owners": [host, passage.memory if passage else None],
                },
                disk=disk,
            )
        except BaseException:
            # Memory that is gone must not be pinned.
            if passage is not None:
                passage.close()
            raise
        self._centers = Centers(driver, layers)
        self._misfit = driver.memory(4) if checked else None
        self._misfit_seen = driver.pinned(4) if checked else None
        self._copying = driver.stream()
        self._mover = Mover(driver, host)
        self._zeroing = driver.stream() if zero_on_free else None
        self._zeroed: Event | None = None
        self._tables = StepTables(driver, self.core, layers, set(self._works.values()))
        self._moves = Moves(self.core, self._mover, self._copying, self._follow_steps, host, self._on_host, passage)
        partials = None
        if routes is not None and not deterministic:
            partials = Partials(driver, self.core, layers, self._centers.of, routes, isa)
        self._streams = Streams(
            driver, self.core, layers, layouts, host, self._mover, runs, slots.bytes, partials, from_disk=tiers["disk"]
        )
        self._scratch = Scratch(driver)
        self._maxima: Maxima | None = None
        self._epochs: deque[tuple[int, Event]] = deque()
        """Steps that the device has not been seen to end, oldest first."""
        self._last_step: Event | None = None
        self._stream: Stream | None = None
        self._kinds: dict[int, tuple[int, int]] = {}
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
        self.drop_copies, self.pages_on_disk, self.attended = core.drop_copies, core.pages_on_disk, core.attended
        self.forget, self.saved, self.lost, self.check_key = core.forget, core.saved, core.lost, core.check_key

    def declare(self, sequences: int, new_tokens: int, context: int) -> None:
        """See `Cache.declare`."""
        if self._misfit is not None:
            raise BackendUnavailable("declare: not in a cache with checked=True, whose steps wait for the device")
        if self._stream is not None:
            raise InvalidArgument("declare: inside a step; before or after one")
        for name, value in (("sequences", sequences), ("new_tokens", new_tokens), ("context", context)):
            if value < 1:
                raise InvalidArgument(f"{name} = {value}: at least 1")
        self._wait_for_steps()
        passed = RUN_ROWS if any(layer["keeps"] for layer in self._layers) else 0
        columns = -(-(context + passed) // self._page_size) + SPANS_DECLARED
        tokens, spans = sequences * new_tokens, sequences * SPANS_DECLARED
        room = Room(sequences, tokens, columns, spans, angles=spans + tokens)
        self._tables.place(room)
        self._tables.fixed = True
        self._maxima = Maxima(sequences, new_tokens, context)
        for layer in range(len(self._layers)):
            for prefill in (False, True):
                for q in QUERY_TYPES:
                    self._scratch.grow(self._scratch_bytes(layer, q, prefill, all_members=True))

    def reserve(self, sequences: npt.NDArray[np.uint64], new_tokens: npt.NDArray[np.int64]) -> None:
        """Opens a step on the stream chosen by `use_stream`; its tables are on their way when this returns."""
        if self._maxima is not None and len(new_tokens) and int(new_tokens.max()) > self._maxima.new_tokens:
            raise InvalidArgument(
                f"new_tokens = {int(new_tokens.max())}: at most {self._maxima.new_tokens}, the maximum declared"
            )
        self._once_more(lambda: self.core.reserve(sequences, new_tokens, self._copy_now))
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

    def append(self, layer: int, k: Any, v: Any = None, dtype: str | None = None) -> None:
        """See `Step.append`."""
        self.core.check_append(layer, v is not None)
        shape = self._layers[layer]
        heads, v_head_dim = shape["num_kv_heads"], 0 if v is None else shape["v_head_dim"]
        keys = values = self._rows("k", k, (heads, shape["head_dim"]), dtype)
        if v is not None:
            values = self._rows("v", v, (heads, v_head_dim), dtype)
        if keys.dtype != values.dtype:
            raise InvalidArgument(f"v = dtype {values.dtype}: {keys.dtype}, the type of k")
        tables = self._tables.groups[shape["group"]]
        k_plane, v_plane, block_bytes = self._planes(layer)
        rotate_k, rotate_v = shape["rotate"]
        call = arguments.Append(
            k=arguments.Rows(keys.address, keys.strides[0], keys.strides[1]),
            v=arguments.Rows(values.address, values.strides[0], values.strides[1]),
            slots=tables.slots,
            tokens=tables.tokens,
            kv_heads=heads,
            head_dim=shape["head_dim"],
            v_head_dim=v_head_dim,
            base=self._bases[0],
            block_bytes=block_bytes,
            page_shift=self._page_size.bit_length() - 1,
            k_plane=k_plane,
            v_plane=v_plane,
            center=self._centers.of.get(layer),
            rotate_k=rotate_k,
            rotate_v=rotate_v,
            misfit=self._misfit.address if self._misfit else None,
        )
        first = self._centers.settle(layer)
        if self._rows_max:
            if first:
                centering = arguments.Center(
                    k=call.k,
                    tokens=tables.tokens,
                    kv_heads=heads,
                    head_dim=shape["head_dim"],
                    center=call.center,
                    settled=self._centers.settled(layer),
                )
                self._now.launch(instances.center(keys.dtype), 1, CENTER_THREADS, centering)
            self._launch_append(layer, keys.dtype, call)
            self._check_fit(layer)
        self.core.appended(layer)

    def attend(
        self, layer: int, q: Any, out: Any, lse: Any = None, dtype: str | None = None, sink_logits: Any = None
    ) -> None:
        """See `Step.attend`."""
        self.core.check_attend(layer, sink_logits is not None)
        shape = self._layers[layer]
        heads = shape["num_q_heads"]
        queries = self._rows("q", q, (heads, shape["head_dim"]), dtype)
        result = self._output("out", out, (heads, shape["v_head_dim"]), queries, dtype)
        if lse is not None:
            lse = self._rows("lse", lse, (heads,), None, kinds=("f32",))
        sinks = None if sink_logits is None else self._floats("sink_logits", sink_logits, heads)
        tables = self._tables.groups[shape["group"]]
        k_plane, v_plane, block_bytes = self._planes(layer)
        rope = shape["rope"]
        call = arguments.Attend(
            pages=arguments.Pages(
                tables.table,
                tables.columns,
                (ctypes.c_void_p * arguments.TIERS)(*self._bases, None),
                (ctypes.c_int64 * arguments.TIERS)(block_bytes, block_bytes, 0),
                self._page_size.bit_length() - 1,
                tables.span_starts,
                tables.spans,
            ),
            k_plane=k_plane,
            v_plane=v_plane,
            q=arguments.Rows(queries.address, queries.strides[0], queries.strides[1]),
            out=arguments.Rows(result.address, result.strides[0], result.strides[1]),
            lse=None if lse is None else lse.address,
            window=WINDOW_MAX if shape["window"] is None else shape["window"],
            **_scales(shape),
            sinks=sinks,
            angles=self._tables.angles.get(layer),
            rotary_pairs=len(rope[0]) if rope else 0,
            interleaved=bool(rope and rope[1]),
            center=self._centers.of.get(layer),
            rotate_k=shape["rotate"][0],
            rotate_v=shape["rotate"][1],
        )
        streamed = self._streams.group(layer)
        if streamed is None:
            self._streams.read_in_place(layer)
            for prefill in (False, True):
                if self._most(layer, prefill):
                    work = self._tables.works[self._works[layer, prefill, queries.dtype]]
                    call.members = work.members or None
                    common = work.common if self._tables.members or self._maxima is not None else None
                    self._launch_attention(layer, queries.dtype, prefill, call, work.own, common)
        else:
            self._stream_attention(layer, queries, call, streamed)

    def replay(self, launch: Callable[[], object]) -> None:
        """See `Step.replay`."""
        if self._maxima is None:
            raise InvalidArgument("replay: maxima declared first, by Cache.declare")
        if on_disk := self._on_disk():
            raise InvalidArgument(
                f"replay: {on_disk} pages of this step are on disk; a graph reads none there, promote them"
            )
        storing = [layer for layer, shape in enumerate(self._layers) if shape["kv_owner"] is None]
        for layer in storing:
            self.core.check_append(layer, not self._layers[layer]["v_alias"])
        with contextlib.nullcontext() if self._stream is None else self._stream.current():
            launch()
        for layer in storing:
            self.core.appended(layer)
        for layer in range(len(self._layers)):
            self._streams.read_in_place(layer)

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
        """Starts the copies of a plan."""
        self._poll()
        ticket = self.core.execute(plan)
        try:
            self._moves.advance()
        except BackendUnavailable:
            self.wait(ticket, FOREVER)
            with contextlib.suppress(PagodaError):  # Told by the exception that goes on.
                self.core.ticket_done(ticket)
            raise
        return ticket

    def ticket_done(self, ticket: _core.Ticket) -> bool:
        """Whether a ticket's copies have arrived; raises if they failed."""
        self._poll()
        return self.core.ticket_done(ticket)

    def wait(self, ticket: _core.Ticket, seconds: float) -> bool:
        """Sleeps until a ticket's copies have arrived, or no more will, or `seconds` have passed; says which."""
        deadline = time.monotonic() + seconds
        while (rest := self._moves.waits_for(ticket)) is not None:
            if seconds >= FOREVER:
                rest.wait()
            elif not rest.done():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL_SECONDS)
            self._moves.advance()
        return True

    def wait_patiently(self, ticket: _core.Ticket) -> None:
        """Sleeps until a ticket's copies have ended, as long as the disk does anything, and `disk_timeout` more."""
        while (rest := self._moves.waits_for(ticket)) is not None:
            if isinstance(rest, _core.DiskCopies):
                rest.wait_patiently()
            else:
                rest.wait()
            self._moves.advance()

    def save(self, sequence: int, key: str, meta: bytes) -> None:
        """See `Cache.save`."""
        self._once_more(lambda: self.core.save(sequence, key, meta, self._copy_now))

    def load(self, key: str) -> _core.Handle | None:
        """See `Cache.load`."""
        return self._once_more(lambda: self.core.load(key, self._copy_now))

    def free_blocks(self, tier: str) -> list[int]:
        """Blocks of each group that a tier could hand out now."""
        self._poll()
        return self.core.free_blocks(tier)

    def stats(self) -> dict[str, Any]:
        """See `Cache.stats`."""
        self._poll()
        return self.core.stats()

    def close(self) -> None:
        """Waits for the device, then gives everything back. Raises TierIOError as `Cache.close` does. Twice is no error."""
        if self._arena is None:
            return
        with contextlib.suppress(Exception):
            self._wait_for_steps()
        with contextlib.suppress(Exception):
            self._moves.close()
        self._streams.close()
        if self._zeroing is not None:
            self._zeroing.zero(self._bases[0], self._arena_bytes)
            self._zeroing.record().wait()
        try:
            self.core.close()
        finally:
            # Memory that a drive has yet to answer for is held by the core; it is pinned no more.
            if self._host is not None:
                self._host.close()
            self._tables.close()
            self._mover.close()
            if self._passage is not None:
                self._passage.close()
            self._arena = self._host = self._passage = None
            self._scratch = Scratch(self._driver)

    def empty(self, q: Any, dim: int | None) -> Any:
        """An output for queries `q` [tokens, heads, head_dim], or with dim=None a log-sum-exp."""
        shape = self._driver.view("q", q).shape
        if len(shape) != 3:
            raise InvalidArgument(f"q = {list(shape)}: an array [tokens, heads, dim]")
        # On the step's stream: an array that it may have had before is still in use on no other.
        with contextlib.nullcontext() if self._stream is None else self._stream.current():
            return self._driver.empty(shape[:2], q, "f32") if dim is None else self._driver.empty((*shape[:2], dim), q)

    @property
    def traffic(self) -> Traffic:
        """What attention of the open step, or of the last one, has brought over the link."""
        return self._streams.traffic

    @property
    def attends_to_disk(self) -> bool:
        """Whether steps may have pages there."""
        return self._streams.ring

    @property
    def _now(self) -> Stream:
        assert self._stream is not None
        return self._stream

    @property
    def _rows_max(self) -> int:
        """Rows of the arrays of the open step, as kernels have to expect them."""
        return self._tokens if self._maxima is None else self._maxima.sequences * self._maxima.new_tokens

    def _planes(self, layer: int) -> tuple[arguments.Plane, arguments.Plane, int]:
        """K plane, V plane and block bytes of a layer."""
        owner = self._layers[layer]["kv_owner"]
        layout = self._layouts[self._layers[layer]["group"]]
        planes = layout.planes[layer if owner is None else owner]
        k, v = (
            arguments.Plane(*(arguments.Strip(strip.offset, strip.head_stride) for strip in (plane.rows, plane.scales)))
            for plane in planes
        )
        return k, v, layout.block_bytes

    def _work(self, layer: int, prefill: bool, q: str) -> Work:
        """The work list of a layer for queries of a type; those that are decoded are cut alike for all types."""
        shape = self._layers[layer]
        together = not (prefill or self._deterministic) and shape["window"] is None
        return Work(
            group=shape["group"],
            window=shape["window"],
            prefill=prefill,
            few=self._few(layer),
            queries=self._queries(layer, "prefill", [q]) if prefill else self._queries(layer, "verify", QUERY_TYPES),
            common_queries=self._queries(layer, "common", QUERY_TYPES) if together else 0,
            by_runs=self._deterministic,
        )

    def _attention(self, layer: int, q: str, mode: str) -> instances.Attention:
        shape = self._layers[layer]
        if self._deterministic:
            mode = "prefill-deterministic" if mode == "prefill" else "decode-deterministic"
        sizes = shape["head_dim"], shape["v_head_dim"]
        return instances.attend(
            *self._formats(layer), q, *sizes, self._heads(layer), mode, self._driver.shared_bytes_max
        )

    def _queries(self, layer: int, mode: str, types: Collection[str]) -> int:
        """Of a block: as many as fit a unit, of whichever of the types."""
        chosen = [self._attention(layer, q, mode) for q in types]
        return min(one.rows // (self._heads(layer) // one.sets) for one in chosen)

    def _formats(self, layer: int) -> tuple[str, str]:
        """Row formats of K and V."""
        shape = self._layers[layer]
        return shape["k_dtype"], instances.PART_OF_K if shape["v_alias"] else shape["v_dtype"]

    def _heads(self, layer: int) -> int:
        """Query heads of a K/V head."""
        return self._layers[layer]["num_q_heads"] // self._layers[layer]["num_kv_heads"]

    def _few(self, layer: int) -> int:
        """New tokens of a sequence up to which it is decoded."""
        return max(1, DECODE_ROWS // self._heads(layer))

    def _most(self, layer: int, prefill: bool) -> int:
        """New tokens of a sequence of the kind at most: in the step, or in any once maxima are declared. 0 if it has none."""
        few = self._few(layer)
        if self._maxima is not None:
            most = self._maxima.new_tokens
            return (most if most > few else 0) if prefill else min(most, few)
        if few not in self._kinds:
            counts = self._counts
            self._kinds[few] = (
                int(counts.max(where=counts <= few, initial=0)),
                int(counts.max(where=counts > few, initial=0)),
            )
        return self._kinds[few][prefill]

    def _mode(self, layer: int, prefill: bool) -> str:
        """Of `instances.attend`."""
        if prefill:
            return "prefill"
        most = self._most(layer, prefill)
        return "decode" if most <= 1 or most * self._heads(layer) <= instances.FEW_ROWS else "verify"

    def _launch_append(self, layer: int, given: str, call: arguments.Append) -> None:
        """Warps have rows, or where nothing is quantised threads have 8 elements."""
        formats = self._formats(layer)
        rows, shared = self._rows_max * call.kv_heads, 0
        if any(name in instances.QUANTISED for name in formats):
            threads, shared = 32 * rows * (2 if call.v_head_dim else 1), APPEND_ROWS_BYTES
        else:
            threads = rows * (call.head_dim + call.v_head_dim) // 8
        grid = min(-(-threads // APPEND_THREADS), 4 * self._driver.multiprocessors)
        self._now.launch(instances.append(*formats, given), grid, APPEND_THREADS, call, shared_bytes=shared)

    def _stream_attention(self, layer: int, queries: View, call: arguments.Attend, streamed: GroupPasses) -> None:
        """Pass after pass, each where the one before has stopped."""
        if self._now.capturing:
            raise InvalidArgument(
                f"attend: layer {layer} in a graph: not in a step that streams pages of the host tier"
            )
        kinds = [prefill for prefill in (False, True) if self._most(layer, prefill)]
        for prefill in kinds:
            self._make_room(layer, queries.dtype, prefill)
        call.pages.table, call.pages.columns = streamed.table, streamed.columns
        asked = self._streams.ask(layer, queries, self._now)
        for number in range(len(streamed.copies)):
            if asked is not None and number == len(streamed.copies) - 1:
                self._streams.answer(asked, self._now, self._scratch.parts)
            with self._streams.brought(layer, number, self._now) as place:
                call.pages.bases[BROUGHT], call.pages.pitches[BROUGHT] = place
                for prefill in kinds:
                    key = self._works[layer, prefill, queries.dtype]
                    call.members = self._tables.works[key].members or None
                    self._launch_attention(layer, queries.dtype, prefill, call, *streamed.works[key][number])

    def _launch_attention(
        self,
        layer: int,
        q: str,
        prefill: bool,
        call: arguments.Attend,
        own: ListTables | None,
        common: ListTables | None,
    ) -> None:
        """One kind of queries: what they have in common with others, then what is their own."""
        self._make_room(layer, q, prefill)
        call.partials, call.pending = self._scratch.partials, self._scratch.counters
        call.parts = self._scratch.parts or None
        if common is not None:
            call.division = Division.TILES
            self._launch(layer, self._attention(layer, q, "common"), call, common)
        call.members = None
        if own is not None:
            runs = Division.UNITS if prefill else Division.RUNS
            call.division = runs if self._deterministic else Division.TILES
            self._launch(layer, self._attention(layer, q, self._mode(layer, prefill)), call, own)

    def _make_room(self, layer: int, q: str, prefill: bool) -> None:
        """Scratch memory for attention over a layer."""
        sizes = self._scratch_bytes(layer, q, prefill, all_members=self._maxima is not None)
        if not self._scratch.covers(sizes):
            self._wait_for_steps()
            self._now.record().wait()
            self._scratch.grow(sizes)

    def _launch(self, layer: int, chosen: instances.Attention, call: arguments.Attend, work: ListTables) -> None:
        call.blocks, call.prefix, call.block_count, call.part_rows = work.blocks, work.prefix, work.count, work.rows
        call.sets = self._layers[layer]["num_kv_heads"] * chosen.sets
        call.group = self._heads(layer) // chosen.sets
        call.set_shift = chosen.sets.bit_length() - 1
        self._now.launch(chosen.kernel, self._grid(chosen), chosen.threads, call, shared_bytes=chosen.shared_bytes)

    def _grid(self, chosen: instances.Attention) -> int:
        return self._driver.multiprocessors * chosen.resident(self._driver.shared_bytes_max)

    def _scratch_bytes(self, layer: int, q: str, prefill: bool, *, all_members: bool) -> tuple[int, int, int]:
        """Partial results, counters and parts of attention over a layer. all_members: for whatever step."""
        work = self._tables.works[self._works[layer, prefill, q]]
        chosen = self._attention(layer, q, self._mode(layer, prefill))
        shape = self._layers[layer]
        sets, room = shape["num_kv_heads"] * chosen.sets, self._tables.room
        floats, units, rows = 2 * self._grid(chosen) * chosen.partial, work.blocks_max * sets, 0
        if self._deterministic and prefill:
            floats = self._grid(chosen) * 3 * chosen.rows * chosen.v_dim
        elif self._deterministic:
            runs = room.columns * self._page_size // RUN_ROWS + room.spans + 1
            floats = work.blocks_max * runs * sets * chosen.partial
        if work.common is not None:
            members = work.members_max if all_members else self._tables.members
            common = self._attention(layer, q, "common")
            floats = max(floats, 2 * self._grid(common) * common.partial if members else 0)
            units = max(units, members * shape["num_kv_heads"] * common.sets)
            rows = members
        if self._streams.in_passes and (all_members or self._streams.group(layer) is not None):
            # As crates/pagoda-py/src/passes.rs numbers them.
            members = self._tables.members_max if all_members else self._tables.members
            rows = 3 * (members + self._rows_max)
        return 4 * floats, 4 * units, 4 * rows * shape["num_q_heads"] * (shape["v_head_dim"] + 2)

    def _enter(self) -> None:
        """Sends the tables of the open step. Raises InvalidArgument for pages on disk that have nothing to come through."""
        if self._last_step is not None:
            self._now.follow(self._last_step)
        if self._zeroed is not None:
            self._now.follow(self._zeroed)
        self._counts = np.diff(self.core.cu_seqlens())
        self._tokens = int(self._counts.sum())
        self._kinds.clear()
        if not self._tables.fits():
            self._wait_for_steps()
            self._tables.grow()
        copies = self.core.step_transfers()
        if len(copies):
            self._mover.copy(self._now, copies)
        words = self._tables.stage()
        try:
            if not self._streams.ring and (on_disk := self._on_disk()):
                raise InvalidArgument(
                    f"device_memory = {self._device_memory}: at least {self._enough_for_disk} bytes for steps over pages on "
                    f"disk; this one has {on_disk} there: promote them"
                )
            more = self._streams.plan()
            if not self._streams.fits(more):
                self._wait_for_steps()
                self._streams.grow(more)
            self._tables.upload(self._now, words + more, self._streams.place(self._tables))
        except BaseException:
            self._tables.forget()
            raise

    def _on_disk(self) -> int:
        """Pages on disk that attention of the open step may read."""
        return sum(self.core.on_disk()) if self._passage else 0

    def _leave(self) -> None:
        """Marks the end of the step in its stream."""
        self._last_step = self._now.record()
        self._stream = None
        epoch = self.core.ended_epoch()
        if epoch is not None:
            self._epochs.append((epoch, self._streams.behind(self._last_step)))
        self._poll()

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
        while self._epochs and self._epochs[0][1].done():
            self.core.retire(self._epochs.popleft()[0])
        self._moves.advance()
        if self._zeroing is not None:
            self._zero(self._zeroing)

    def _zero(self, stream: Stream) -> None:
        """Zeroes freed blocks, and what pages on disk were read to; steps and copies to come follow."""
        self._streams.give_back()
        ranges = self.core.zero().reshape(-1, 2).tolist()
        for address, size in ranges:
            if address in self._on_host:
                ctypes.memset(address, 0, size)
            else:
                stream.zero(address, size)
        if ranges:
            self._zeroed = stream.record()

    def _follow_steps(self) -> None:
        """Copies to come follow the steps and the zeroing so far."""
        for event in (self._last_step, self._zeroed):
            if event is not None:
                self._copying.follow(event)

    def _copy_now(self, transfers: npt.NDArray[np.uint64]) -> None:
        """Copies between the device and pinned memory, and waits: on the way of pages that are moved at once."""
        self._follow_steps()
        try:
            self._mover.copy(self._copying, transfers)
        finally:
            self._copying.record().wait()

    def _once_more(self, call: Callable[[], T]) -> T:
        """What a call says; when blocks are short, once steps have ended that they may drain for."""
        self._poll()
        try:
            return call()
        except OutOfBlocks:
            if not self._wait_for_steps():
                raise
            return call()

    def _wait_for_steps(self) -> bool:
        """Sleeps until every step has ended; says whether there was one."""
        waited = bool(self._epochs)
        if waited:
            self._epochs[-1][1].wait()
            self._poll()
        return waited

    def _rows(
        self,
        name: str,
        array: Any,
        row: tuple[int, ...],
        dtype: str | None,
        kinds: Collection[str] = ("f32", "f16", "bf16"),
    ) -> View:
        """Checks an array of the caller [sum(new), *row], or one that has room for more once maxima are declared."""
        if dtype not in (None, "bf16"):
            raise InvalidArgument(f'dtype = {dtype!r}: None, or "bf16" for 16-bit integers')
        view = self._driver.view(name, array)
        if view.shape[1:] != row or not self._tokens <= view.shape[0] <= self._rows_max:
            more = "" if self._maxima is None else f", or up to {self._rows_max} tokens"
            raise InvalidArgument(f"{name} = shape {list(view.shape)}: {[self._tokens, *row]}{more}")
        kind = "bf16" if view.dtype == "u16" and dtype == "bf16" else view.dtype
        if kind not in kinds:
            raise InvalidArgument(f'{name} = dtype {view.dtype}: {", ".join(kinds)} (or u16 with dtype="bf16")')
        size = 4 if kind == "f32" else 2
        strides = view.strides
        if math.prod(view.shape) and (strides[-1] != size or any(stride % size for stride in strides)):
            raise InvalidArgument(f"{name} = strides {strides}: a contiguous last dimension")
        return View(view.address, view.shape, strides, kind, view.writeable)

    def _floats(self, name: str, array: Any, length: int) -> int:
        """The address of an array of the caller: float32 [length], contiguous."""
        view = self._driver.view(name, array)
        if view.dtype != "f32" or view.shape != (length,) or view.strides != (4,):
            given = f"dtype {view.dtype}, shape {list(view.shape)}, strides {list(view.strides)}"
            raise InvalidArgument(f"{name} = {given}: f32 [{length}], contiguous")
        return view.address

    def _output(self, name: str, array: Any, row: tuple[int, ...], like: View, dtype: str | None) -> View:
        """Checks an array that results are written to: of the queries' type, and nothing twice."""
        view = self._rows(name, array, row, dtype, kinds=(like.dtype,))
        if not view.writeable:
            raise InvalidArgument(f"{name} = read-only: a writeable array")
        reach = view.shape[-1] * (4 if view.dtype == "f32" else 2)
        axes = sorted(
            (abs(stride), length)
            for stride, length in zip(view.strides[:-1], view.shape[:-1], strict=True)
            if length > 1
        )
        for stride, length in axes:
            if math.prod(view.shape) and stride < reach:
                raise InvalidArgument(f"{name} = strides {view.strides}: rows that do not overlap")
            reach = stride * length
        (low, high), (theirs_low, theirs_high) = view.bytes, like.bytes
        if low < theirs_high and theirs_low < high:
            raise InvalidArgument(f"{name} = memory of q: memory of its own")
        return view


def _scales(layer: CoreLayer) -> dict[str, float]:
    """`scale` and `softcap` of a kernel, whose scores are base-2 logarithms."""
    if layer["softcap"] is None:
        return {"scale": layer["scale"] * LOG2_E, "softcap": 0.0}
    return {"scale": layer["scale"] / layer["softcap"], "softcap": layer["softcap"] * LOG2_E}
