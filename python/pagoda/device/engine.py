"""A cache on a device: implements `pagoda.engine` with the arguments and errors that `pagoda._core.Cache` has on the CPU.

The core decides; the engine executes. It uploads the changes of a step to the tables, launches kernels on the caller's
stream, copies pages on a stream of its own, and tells the core when copies and steps have ended. Events order the streams: a
copy follows the step that wrote its source, and a step follows the step before. The core reuses a block only after every step
and copy that may touch it has been seen to end.

Once maxima are declared, only the contents of tables change from step to step, not the arguments of kernels. So a graph of
the kernels of one step, captured by the caller, can do every later step within the maxima. Steps with more new tokens of a
sequence are launched without a graph.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda import _core
from pagoda._core import RUN_ROWS
from pagoda.device.appends import Appends, Centers, Misfits
from pagoda.device.arrays import Arrays
from pagoda.device.attends import Attends, Maxima
from pagoda.device.derived import derived_keys
from pagoda.device.driver import Driver, Event, Pending, Stream
from pagoda.device.layers import LayerKernels
from pagoda.device.memory import CacheMemory
from pagoda.device.mover import Mover
from pagoda.device.partials import Partials
from pagoda.device.passage import passage_bytes
from pagoda.device.plans import Plans
from pagoda.device.ring import SLOTS, ring_slots
from pagoda.device.streaming import Streams, Traffic
from pagoda.device.tables import Room, StepTables
from pagoda.disk import DiskArguments
from pagoda.engine import SECONDS_MAX
from pagoda.errors import BackendUnavailable, InvalidArgument, OutOfBlocks, PagodaError
from pagoda.geometry import Geometry, owners_of
from pagoda.rates import Routes

T = TypeVar("T")
P = ParamSpec("P")

POLL_SECONDS = 2e-4
"""Sleep between two queries of an event, in waits with a timeout."""

SPANS_DECLARED = 8
"""Spans per sequence that declared maxima leave room for: each `drop` adds one, and sinks are one. Each may begin and end
inside of a page."""


def in_turn(
    call: Callable[Concatenate[DeviceEngine, P], T],
) -> Callable[Concatenate[DeviceEngine, P], T]:
    """Makes calls exclusive on their engine: neither other threads nor code that interrupts one can enter another."""

    @functools.wraps(call)
    def in_its_turn(engine: DeviceEngine, /, *given: P.args, **options: P.kwargs) -> T:
        return engine.core.in_turn(call, engine, *given, **options)

    return in_its_turn


class DeviceEngine:
    """The `Engine` of a cache whose memory and kernels are on a device.

    routes: measured bandwidths of the ways to pages of the host tier, by which attention over them is divided; without them,
    and in a deterministic cache, the CPU has no part in it. isa: the instruction set of that part, the best by default.

    Calls take turns, as those of the core do; one that waits for copies lets others run. Raises BackendUnavailable for layers
    that no kernel supports.
    """

    def __init__(
        self,
        driver: Driver,
        geometry: Geometry,
        *,
        memory: list[tuple[int, int]],
        deterministic: bool,
        checked: bool,
        zero_on_free: bool,
        disk: DiskArguments | None,
        routes: Routes | None = None,
        isa: str | None = None,
    ) -> None:
        layers, page_size, layouts = geometry.layers, geometry.page_size, geometry.layouts
        self._driver, self._layers, self._page_size, self._deterministic = driver, layers, page_size, deterministic
        kernels = [
            LayerKernels(layer, deterministic=deterministic, shared_bytes_max=driver.shared_bytes_max)
            for layer in layers
        ]
        (device_bytes, extent_bytes), host_tier = memory
        tiers = {"host": host_tier[0] > 0, "disk": disk is not None}
        sinks = max(layer["keeps"].sinks if layer["keeps"] else 0 for layer in layers)
        slots = ring_slots(
            geometry.layer_bytes, page_size, device_bytes, **tiers, deterministic=deterministic, sinks=sinks
        )
        self._device_memory, self._enough_for_disk = device_bytes, slots.enough
        memory = [(device_bytes - SLOTS * slots.bytes, extent_bytes), host_tier]
        beside = passage_bytes([layout.block_bytes for layout in layouts], memory[0][0], slots.read)
        self._memory = CacheMemory(driver, memory, beside if disk else None, zeroes=zero_on_free)
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
                device=self._memory.for_core,
                disk=disk,
            )
        except BaseException:
            # Pinned memory has to be unpinned before it is freed.
            self._memory.close()
            raise
        centers, misfits = Centers(driver, layers), Misfits(driver) if checked else None
        derived = derived_keys(driver, layers)
        self._checked = checked
        for index, (layer, owner, one) in enumerate(zip(layers, owners_of(layers), kernels, strict=True)):
            layout = layouts[layer["group"]]
            planes = layout.planes[owner]
            misfit = None if misfits is None else misfits.address
            one.place(
                layout, planes, page_size, self._memory.bases, centers.addresses.get(index), misfit, derived.get(index)
            )
        self._copying = driver.stream()
        self._mover = Mover(driver, self._memory.host)
        self._zeroing = driver.stream() if zero_on_free else None
        self._zeroed: Event | None = None
        self._tables = StepTables(driver, self.core, layers, {work for one in kernels for work in one.works.values()})
        self._plans = Plans(self.core, self._mover, self._copying, self._follow_steps, self._memory)
        partials = None
        if routes is not None and not deterministic:
            partials = Partials(driver, self.core, layers, centers.addresses, routes, isa)
        self._streams = Streams(driver, self.core, geometry, self._memory, self._mover, slots.bytes, partials)
        self._arrays = Arrays(driver, lambda: self._now)
        self._appends = Appends(driver, kernels, centers, misfits)
        self._attends = Attends(
            driver,
            kernels,
            self._tables,
            self._streams,
            page_size=page_size,
            deterministic=deterministic,
            finish_steps=self._wait_for_steps,
        )
        self._maxima: Maxima | None = None
        self._epochs: deque[tuple[int, Event]] = deque()
        """Steps whose end on the device has not been seen yet, oldest first."""
        self._noted = self.core.ended_epoch()
        """The epoch of the last step that was noted, in `_epochs` or as retired."""
        self._last_step: Event | None = None
        self._copies_now = False
        """Whether copies may be under way that a call waits for."""
        self._stream: Stream | None = None
        """Of the open step."""
        # Forwarded unchanged: bookkeeping that touches no memory.
        core = self.core
        self.create, self.fork, self.length, self.rewind_limit = core.create, core.fork, core.length, core.rewind_limit
        self.release, self.truncate, self.drop = core.release, core.truncate, core.drop
        self.positions, self.cu_seqlens, self.table, self.csr_table = (
            core.positions,
            core.cu_seqlens,
            core.table,
            core.csr_table,
        )
        self.resting, self.movable, self.audit, self.isa = core.resting, core.movable, core.audit, core.isa
        self.drop_copies, self.pages_on_disk, self.attended = core.drop_copies, core.pages_on_disk, core.attended
        self.step_is_open, self.drained_blocks = core.step_is_open, core.drained_blocks
        self.ended_sequences = core.ended_sequences
        self.forget, self.saved, self.meta, self.lost = core.forget, core.saved, core.meta, core.lost
        self.check_save = core.check_save

    @in_turn
    def declare(self, sequences: int, new_tokens: int, context: int, tokens: int) -> None:
        """See `Cache.declare`."""
        if self._checked:
            raise BackendUnavailable("declare: not in a cache with checked=True, whose steps wait for the device")
        if self._stream is not None:
            raise InvalidArgument("declare: inside a step; before or after one")
        if self._maxima is not None:
            raise InvalidArgument("declare: a second time; graphs that were captured since the first use its tables")
        self._wait_for_steps()
        # Pages that have left a window leave the table a run at a time.
        passed = RUN_ROWS if any(layer["keeps"] for layer in self._layers) else 0
        columns = -(-(context + passed) // self._page_size) + 2 * SPANS_DECLARED
        maxima, spans = Maxima(sequences, new_tokens, context, tokens), sequences * SPANS_DECLARED
        # Trailing spans need angles for each query.
        trails = any(layer["keeps"] and layer["keeps"].trailing for layer in self._layers)
        self._tables.place(Room(sequences, tokens, columns, spans, angles=spans + tokens * trails))
        self._attends.declare(maxima)
        self._tables.fixed = True
        self._maxima = maxima

    @in_turn
    def reserve(
        self,
        number: int,
        sequences: npt.NDArray[np.uint64],
        new_tokens: npt.NDArray[np.int64],
        stream: Stream | None = None,
    ) -> None:
        """Opens a step on a stream, the caller's current one by default; on return the upload of its tables has started."""
        chosen = self.caller_stream(None) if stream is None else stream
        if chosen.capturing:
            raise InvalidArgument("step: on a stream that is captured; begin to capture inside of the step")
        self._refuse_in_capture("step")
        try:
            self._once_more(lambda: self.core.reserve(number, sequences, new_tokens, self._copy_now))
        except BaseException:
            # A step ends if one of its copies fails. Its blocks drain as after any other step.
            if self._stream is None:
                self._note_epoch()
            raise
        try:
            maxima = self._maxima
            in_graph = maxima is not None and bool(np.maximum.reduce(new_tokens, initial=0) <= maxima.new_tokens)
            self._enter(number, chosen, in_graph=in_graph)
        except BaseException:
            self._roll_back(number)
            raise

    def caller_stream(self, given: object) -> Stream:
        """The stream that the caller means. Raises InvalidArgument."""
        return self._driver.caller_stream(given)

    @in_turn
    def append(self, number: int, layer: int, k: Any = None, v: Any = None, dtype: str | None = None) -> None:
        """See `Step.append`."""
        self.core.check_append(number, layer, k is not None, v is not None)
        self._refuse_in_another_capture("append")
        shape = self._layers[layer]
        heads = shape["num_kv_heads"]
        # A layer whose keys are derived from V stores V in the place of K.
        name, stored = ("v", v) if k is None else ("k", k)
        keys = values = self._arrays.rows(name, stored, (heads, shape["head_dim"]), dtype)
        if k is not None and v is not None:
            values = self._arrays.rows("v", v, (heads, shape["v_head_dim"]), dtype)
        if keys.dtype != values.dtype:
            raise InvalidArgument(f"v = dtype {values.dtype}: {keys.dtype}, the type of k")
        tables = self._tables.groups[shape["group"]]
        self._appends.append(layer, keys, values, tables, self._now)
        self.core.appended(layer)

    @in_turn
    def attend(
        self,
        number: int,
        layer: int,
        q: Any,
        out: Any = None,
        return_lse: bool = False,
        dtype: str | None = None,
        sink_logits: Any = None,
    ) -> tuple[Any, Any]:
        """See `Step.attend`."""
        self.core.check_attend(number, layer, sink_logits is not None)
        self._refuse_in_another_capture("attend")
        shape, arrays, lse = self._layers[layer], self._arrays, None
        heads, dim = shape["num_q_heads"], shape["v_head_dim"]
        queries = arrays.rows("q", q, (heads, shape["head_dim"]), dtype)
        if out is None or return_lse:
            # Allocate on the step's stream, so that a pool hands out no memory that another stream may still use.
            with self._now.current():
                out = self._driver.empty((*queries.shape[:2], dim), q) if out is None else out
                lse = self._driver.empty(queries.shape[:2], q, "f32") if return_lse else None
        result = arrays.output("out", out, (heads, dim), queries, dtype)
        sums = None if lse is None else arrays.rows("lse", lse, (heads,), None, kinds=("f32",)).address
        sinks = None if sink_logits is None else arrays.floats("sink_logits", sink_logits, heads)
        self._attends.attend(layer, queries, result, sums, sinks, self._now)
        return out, lse

    @in_turn
    def replay(self, number: int, launch: Callable[[], object]) -> None:
        """See `Step.replay`."""
        if self._maxima is None:
            raise InvalidArgument("replay: maxima declared first, by Cache.declare")
        if not self._attends.in_graph:
            raise InvalidArgument(
                f"replay: new_tokens = {np.diff(self.core.cu_seqlens(number)).max()} of a sequence in this step: at most "
                f"{self._maxima.new_tokens}, the maximum declared for graphs"
            )
        storing = [layer for layer, shape in enumerate(self._layers) if shape["kv_owner"] is None]
        for layer in storing:
            shape = self._layers[layer]
            derives = shape["k_norm"] is not None
            self.core.check_append(number, layer, not derives, derives or not shape["v_alias"])
        if on_disk := self._on_disk():
            raise InvalidArgument(
                f"replay: {on_disk} pages of this step are on disk; a graph reads none there, promote them"
            )
        with contextlib.nullcontext() if self._stream is None else self._stream.current():
            launch()
        for layer in storing:
            self.core.appended(layer)
        for layer in range(len(self._layers)):
            self._streams.read_in_place(layer)

    @in_turn
    def commit(self, number: int, accepted: npt.NDArray[np.int64] | None = None) -> None:
        """See `Step.commit`."""
        if self._captured:
            raise InvalidArgument("commit: on a stream that is captured; end the capture inside of the step")
        self.core.commit(number, accepted)
        self._end()

    @in_turn
    def rollback(self, number: int) -> None:
        """Closes the step as if it had never been opened."""
        self._roll_back(number)

    def _roll_back(self, number: int) -> None:
        if self._stream is not None and self._last_step is not None:
            # Ctrl-C may have come before the stream followed. A failed device raises when the step ends.
            with contextlib.suppress(Exception):
                if not self._captured:
                    self._stream.follow(self._last_step)
        try:
            self.core.rollback(number)
        finally:
            # Also if Ctrl-C came after the core had closed the step, but not if another one is open by now.
            if not self.core.step_is_open():
                self._leave()

    @in_turn
    def plan(self, *given: Any, **options: Any) -> _core.Plan:
        """See `Cache.plan`."""
        self._poll()
        return self.core.plan(*given, **options)

    @in_turn
    def execute(self, plan: _core.Plan) -> _core.Ticket:
        """Starts the copies of a plan."""
        self._poll()
        ticket = self.core.execute(plan)
        if self._captured:
            # The first call after the capture starts the copies.
            return ticket
        try:
            self._plans.advance()
        except BackendUnavailable:
            while (rest := self._plans.waits_for(ticket)) is not None:
                rest.wait()
                self._plans.advance()
            with contextlib.suppress(PagodaError):  # The exception under way reports the failure.
                self.core.ticket_done(ticket)
            raise
        return ticket

    @in_turn
    def under_way(self, sequence: int) -> list[_core.Ticket]:
        """Plans under way that move pages of a sequence."""
        self._poll()
        return self.core.under_way(sequence)

    @in_turn
    def moves_between(self, source: str, target: str, *, keep: bool) -> list[_core.Ticket]:
        """See `Engine.moves_between`."""
        self._poll()
        return self.core.moves_between(source, target, keep=keep)

    @in_turn
    def ticket_done(self, ticket: _core.Ticket) -> bool:
        """Whether a ticket's copies have arrived; raises if they failed."""
        self._poll()
        return self.core.ticket_done(ticket)

    def wait(self, ticket: _core.Ticket, seconds: float) -> bool:
        """Sleeps until a ticket's copies have ended or `seconds` have passed; returns whether they have ended."""
        deadline = time.monotonic() + seconds
        while (rest := self._waits_for(ticket)) is not None:
            if seconds >= SECONDS_MAX:
                rest.wait()
            elif not rest.done():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL_SECONDS)
            self._advance()
        return True

    def wait_patiently(self, ticket: _core.Ticket) -> None:
        """Sleeps until a ticket's copies have ended, while the disk does anything, and `disk_timeout` more."""
        while (rest := self._waits_for(ticket)) is not None:
            if isinstance(rest, _core.DiskCopies):
                rest.wait_patiently()
            else:
                rest.wait()
            self._advance()

    @in_turn
    def save(self, sequence: int, key: str, meta: bytes) -> None:
        """See `Cache.save`."""
        self._refuse_in_capture("save")
        self._once_more(lambda: self.core.save(sequence, key, meta, self._copy_now))

    @in_turn
    def load(self, key: str) -> _core.Handle | None:
        """See `Cache.load`."""
        self._refuse_in_capture("load")
        return self._once_more(lambda: self.core.load(key, self._copy_now))

    @in_turn
    def free_blocks(self, tier: str) -> list[int]:
        """How many blocks of each group a tier could hand out now."""
        self._poll()
        return self.core.free_blocks(tier)

    @in_turn
    def finish_draining(self) -> None:
        """Waits for whatever draining blocks of any tier wait for."""
        self._wait_for_steps()
        self.core.finish_draining()

    @in_turn
    def stats(self) -> dict[str, Any]:
        """See `Cache.stats`."""
        self._poll()
        return self.core.stats()

    @in_turn
    def close(self) -> None:
        """Waits for the device, then gives everything back. Raises as `Cache.close` does. Closing twice is no error."""
        if self._memory.closed:
            return
        # A failed device refuses every call, and any device does so in a forked child: nothing is under way then.
        with contextlib.suppress(Exception):
            # Kernels of an open step use the memory, too.
            self._mark_end()
            self._wait_for_steps()
        with contextlib.suppress(Exception):
            self._plans.close()
        with contextlib.suppress(Exception):
            if self._zeroing is not None:
                self._streams.ring.clear()
            self._streams.finish()
        with contextlib.suppress(Exception):
            if self._zeroing is not None:
                self._zeroing.zero(self._memory.bases[0], self._memory.device_bytes)
                self._zeroing.record().wait()
        try:
            self.core.close()
        finally:
            self._streams.close()
            self._tables.close()
            self._mover.close()
            self._attends.close()
            # Last, so that a second `close` continues if Ctrl-C interrupted the first.
            self._memory.close()

    def __del__(self) -> None:
        # Kernels and copies may still use the memory that is freed now. A failed device runs none.
        with contextlib.suppress(Exception):
            if not self._memory.closed:
                self._mark_end()
                if self._last_step is not None:
                    self._last_step.wait()
                self._streams.finish()
                for stream in filter(None, (self._copying, self._zeroing)):
                    stream.record().wait()

    @in_turn
    def _waits_for(self, ticket: _core.Ticket) -> Pending | None:
        """What a plan has to wait for next; None when the plan has ended."""
        self._refuse_in_capture("wait")
        return self._plans.waits_for(ticket)

    @in_turn
    def _advance(self) -> None:
        """Starts whatever can continue."""
        self._plans.advance()

    @property
    def traffic(self) -> Traffic:
        """Bytes that attention of the open step, or of the last one, has read outside of device memory."""
        return self._streams.traffic

    @property
    def attends_to_disk(self) -> bool:
        """Whether steps may read pages on disk."""
        return bool(self._streams.ring)

    @property
    def _now(self) -> Stream:
        assert self._stream is not None
        return self._stream

    @property
    def _captured(self) -> bool:
        """Whether the stream of the step is captured: events would be part of the graph, and waiting for them an error."""
        return self._stream is not None and self._stream.capturing

    def _refuse_in_capture(self, call: str) -> None:
        """Raises InvalidArgument in a capture, for calls that query events: that would end it, on whichever thread."""
        if self._captured:
            raise InvalidArgument(f"{call}: while the stream of the last step is captured; end the capture first")

    def _refuse_in_another_capture(self, call: str) -> None:
        """Raises InvalidArgument where the caller captures another stream than that of the step: the graph would lack the
        kernels, and its replays would change nothing."""
        if self._maxima is not None and self._driver.captures_another(self._now):
            raise InvalidArgument(
                f"{call}: while the current stream is captured, but not that of the step; open the step with stream="
            )

    def _enter(self, number: int, stream: Stream, *, in_graph: bool) -> None:
        """Sends the tables of the open step. in_graph: whether a graph may do it.

        Raises InvalidArgument if there are pages on disk but no ring to stream them through.
        """
        self._mark_end()
        self._stream = stream
        if self._last_step is not None:
            self._now.follow(self._last_step)
        if self._zeroed is not None:
            self._now.follow(self._zeroed)
        bounds = self.core.cu_seqlens(number)
        tokens = int(bounds[-1])
        tokens_max = tokens if self._maxima is None else self._maxima.tokens
        self._arrays.tokens, self._arrays.tokens_max = tokens, tokens_max
        centers = self.core.step_centers()
        self._appends.enter(tokens_max, centers=centers, in_graph=in_graph)
        self._attends.enter(bounds, tokens_max, in_graph=in_graph)
        if not self._tables.fits():
            self._wait_for_steps()
            self._tables.grow()
        copies = self.core.step_transfers()
        if len(copies):
            self._mover.copy(self._now, copies)
        try:
            words = self._tables.stage()
            if not self._streams.ring and (on_disk := self._on_disk()):
                raise InvalidArgument(
                    f"device_memory = {self._device_memory}: at least {self._enough_for_disk} bytes for steps over pages on "
                    f"disk; this one has {on_disk} there: promote them"
                )
            more = self._streams.plan(bounds, centers=centers)
            if not self._streams.fits(more):
                self._wait_for_steps()
                self._streams.grow(more)
            self._tables.upload(self._now, words + more, self._streams.place(self._tables))
        except BaseException:
            self._tables.forget()
            raise

    def _on_disk(self) -> int:
        """Pages on disk that attention of the open step reads, for a layer of each group."""
        return sum(self.core.on_disk()) if self._memory.passage else 0

    def _leave(self) -> None:
        """Ends the step, unless its stream is captured; `_poll` then does so later."""
        if not self._captured:
            self._end()

    def _end(self) -> None:
        """Marks the end of the step in its stream, and notices what else has ended."""
        self._mark_end()
        with contextlib.suppress(BackendUnavailable):  # Of copies; their tickets report it. The step itself has ended.
            self._poll()

    def _note_epoch(self) -> None:
        """Notes the epoch of the step that ended last, unless that has been done; it retires when everything that the step
        launched has ended."""
        epoch = self.core.ended_epoch()
        if epoch == self._noted:
            return
        if self._last_step is None:
            # Nothing was launched: Ctrl-C came first, or a copy failed.
            self.core.retire(epoch)
        else:
            self._epochs.append((epoch, self._streams.behind(self._last_step)))
        # Last, so that the epoch is noted again, rather than never, if Ctrl-C comes before this.
        self._noted = epoch

    def _mark_end(self) -> None:
        """Marks the end of what a step has launched, unless that has been done."""
        if self._stream is not None:
            self._last_step = self._stream.record()
            self._tables.used_until(self._last_step)
            self._stream = None

    def _poll(self) -> None:
        """Tells the core what has ended. Does nothing during a capture, which querying events would end."""
        if self._captured:
            return
        self._finish_copies()
        if self._stream is not None and not self.core.step_is_open():
            self._leave()
        self._note_epoch()
        while self._epochs and self._epochs[0][1].done():
            # In this order a Ctrl-C in between makes the core retire an epoch twice, rather than never.
            self.core.retire(self._epochs[0][0])
            self._epochs.popleft()
        self._plans.advance()
        if self._zeroing is not None:
            self._zero(self._zeroing)

    def _zero(self, stream: Stream) -> None:
        """Zeroes freed blocks, and the ring if pages off the device were freed; later steps and copies follow."""
        self._streams.give_back()
        ranges, off_device = self.core.zero()
        on_host = self._memory.zero(ranges, stream)
        if len(ranges):
            self._zeroed = stream.record()
        if off_device or on_host:
            self._streams.ring.clear()
        if len(ranges) or off_device:
            # Last, so that everything is done again if Ctrl-C comes before this.
            self.core.zeroed(ranges)

    def _follow_steps(self) -> None:
        """Makes later copies follow the steps and the zeroing so far."""
        for event in (self._last_step, self._zeroed):
            if event is not None:
                self._copying.follow(event)

    def _copy_now(self, transfers: npt.NDArray[np.uint64]) -> None:
        """Copies between the device and pinned memory, and waits; for pages that are moved within a call."""
        self._follow_steps()
        self._copies_now = True
        try:
            self._mover.copy(self._copying, transfers)
        finally:
            self._copying.record().wait()
            self._copies_now = False

    def _finish_copies(self) -> None:
        """Waits for copies of a call that Ctrl-C ended before it had waited: their blocks are free by now."""
        if self._copies_now:
            self._copying.record().wait()
            if self._memory.passage is not None:
                self._memory.passage.clear(0)
            self._copies_now = False

    def _once_more(self, call: Callable[[], T]) -> T:
        """Makes a call, and if blocks are short once more, after the steps that blocks may drain for have ended."""
        self._poll()
        try:
            return call()
        except OutOfBlocks:
            if not self._wait_for_steps():
                raise
            return call()

    def _wait_for_steps(self) -> bool:
        """Sleeps until every step has ended; returns whether there was one that blocks may drain for."""
        if self._last_step is not None:
            self._last_step.wait()
        waited = bool(self._epochs)
        if waited:
            self._epochs[-1][1].wait()
            self._poll()
        return waited
