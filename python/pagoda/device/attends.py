"""Attention on a device: which sequences are decoded and which prefilled, one pass over pages or several, and the launches.

A launch goes over a work list of `tables.py` (pages on the device, or read in place) or of `streaming.py` (one pass over
streamed pages). Pages that sequences have in common are attended to first; the launch over each sequence's own pages starts
from those results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda._core import RUN_ROWS
from pagoda.device.driver import Driver, Stream, View
from pagoda.device.layers import Kind, LayerKernels
from pagoda.device.scratch import Scratch
from pagoda.device.streaming import GroupPasses, Streams
from pagoda.device.tables import ListTables, StepTables
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.kernels import arguments, instances
from pagoda.kernels.arguments import Attend, Division

STRETCH = 128
"""The most tiles that a team of warps adds up before it puts its sums aside: tensor cores that truncate sums lose up to
1.4e-8 of them with each row."""

BROUGHT = 2
"""The number by which kernels know the slot of streamed pages, as if it were a tier."""


@dataclass(frozen=True)
class Maxima:
    """The declared maxima of all steps. new_tokens: of a sequence, in steps that a graph does; tokens: of all sequences."""

    sequences: int
    new_tokens: int
    context: int
    tokens: int


class Attends:
    """The launches that attend. finish_steps: waits until no step is under way, so that memory can be replaced."""

    def __init__(
        self,
        driver: Driver,
        layers: Sequence[LayerKernels],
        tables: StepTables,
        streams: Streams,
        *,
        page_size: int,
        deterministic: bool,
        finish_steps: Callable[[], object],
    ) -> None:
        self._driver, self._layers, self._tables, self._streams = driver, layers, tables, streams
        self._page_size, self._deterministic = page_size, deterministic
        self._finish_steps = finish_steps
        self._scratch = Scratch(driver)
        self._maxima: Maxima | None = None
        self.in_graph = False
        """Whether a graph may do the open step, or the last one; all such steps launch the same kernels."""
        self._bounds: npt.NDArray[np.int32] = np.zeros(1, np.int32)
        self._tokens_max = 0
        self._most_of: dict[int, tuple[int, int]] = {}
        """For the open step, by `few` of a layer: the most new tokens of a decoded sequence, and of a prefilled one."""
        self._covered: set[tuple[Kind, str, bool, bool]] = set()
        """The cases for which the open step has scratch memory: kind of layer, type of queries, whether they are prefilled,
        whether pages are streamed."""

    def declare(self, maxima: Maxima) -> None:
        """Makes room for every step to come. Nothing may be under way."""
        self._maxima, self._tokens_max = maxima, maxima.tokens
        try:
            sizes = [
                self._scratch_bytes(kernels, q, kernels.attention(mode, q), prefill, streamed=True)
                for kernels in self._layers
                for prefill, q in kernels.works
                for mode in (("prefill",) if prefill else ("decode", "verify"))
            ]
            partials, counters, parts = map(max, zip(*sizes, strict=True))
            self._scratch.grow((partials, counters, parts), exactly=True)
        except BaseException:
            self._maxima = None
            raise

    def enter(self, bounds: npt.NDArray[np.int32], tokens_max: int, *, in_graph: bool) -> None:
        """A step begins. bounds: where the new tokens of each sequence begin, and where the last ones end. tokens_max: rows
        that arrays may have. in_graph: whether a graph may do the step."""
        self._bounds, self._tokens_max, self.in_graph = bounds, tokens_max, in_graph
        self._most_of.clear()
        self._covered.clear()

    def attend(
        self, layer: int, queries: View, result: View, lse: int | None, sinks: int | None, stream: Stream
    ) -> None:
        """Attention over one layer. lse, sinks: addresses of arrays of the caller."""
        kernels, streamed = self._layers[layer], self._streams.group(layer)
        if lack := kernels.lacks.get(queries.dtype):
            raise BackendUnavailable(f"q = dtype {queries.dtype}: {lack}")
        if streamed is not None and stream.capturing:
            raise InvalidArgument(
                f"attend: layer {layer} in a graph: not in a step that streams pages of the host tier"
            )
        if self._maxima is not None and not self.in_graph and stream.capturing:
            raise InvalidArgument(
                f"attend: layer {layer} in a graph: not in a step with more than {self._maxima.new_tokens} new tokens of a "
                "sequence, the maximum declared for graphs"
            )
        kinds = [prefill for prefill, most in zip((False, True), self._most(kernels.few), strict=True) if most]
        for prefill in kinds:
            self._make_room(kernels, queries.dtype, prefill, stream, streamed=streamed is not None)
        tables, call = self._tables.groups[kernels.shape["group"]], kernels.attend()
        pages = call.pages
        pages.table, pages.columns = tables.table, tables.columns
        pages.spans = tables.spans
        call.q = arguments.Rows(queries.address, queries.strides[0], queries.strides[1])
        call.out = arguments.Rows(result.address, result.strides[0], result.strides[1])
        call.lse, call.sinks, call.angles = lse, sinks, self._tables.angles.get(layer)
        call.partials, call.pending = self._scratch.partials, self._scratch.counters
        call.parts = self._scratch.parts or None
        call.stretch = STRETCH
        if streamed is not None:
            self._in_passes(layer, queries, kinds, call, streamed, stream)
            return
        self._streams.read_in_place(layer)
        for prefill in kinds:
            work = self._tables.works[kernels.works[prefill, queries.dtype]]
            common = work.common if self._tables.members or self._maxima is not None else None
            self._launch(kernels, queries.dtype, prefill, call, work.own, common, stream)

    def close(self) -> None:
        """Gives the memory back."""
        self._scratch = Scratch(self._driver)

    def _in_passes(
        self, layer: int, queries: View, kinds: list[bool], call: Attend, streamed: GroupPasses, stream: Stream
    ) -> None:
        """Launches pass after pass, each continuing where the one before stopped."""
        kernels = self._layers[layer]
        call.pages.table, call.pages.columns = streamed.table, streamed.columns
        asked = self._streams.ask(layer, queries, stream)
        for number in range(len(streamed.copies)):
            if asked is not None and number == len(streamed.copies) - 1:
                self._streams.answer(asked, stream, self._scratch.parts)
            with self._streams.brought(layer, number, stream) as place:
                call.pages.bases[BROUGHT], call.pages.pitches[BROUGHT] = place
                for prefill in kinds:
                    own, common = streamed.works[kernels.works[prefill, queries.dtype]][number]
                    self._launch(kernels, queries.dtype, prefill, call, own, common, stream)

    def _most(self, few: int) -> tuple[int, int]:
        """The most new tokens of a decoded sequence (one with up to `few`) and of a prefilled one: in this step or, if a
        graph may do it, in any such step. 0 if there is no such sequence."""
        if (found := self._most_of.get(few)) is not None:
            return found
        if self._maxima is None or not self.in_graph:
            counts = np.diff(self._bounds)
            most = int(counts.max(initial=0))
            decoded = most if most <= few else int(counts.max(where=counts <= few, initial=0))
        else:
            most = self._maxima.new_tokens
            decoded = min(most, few)
        self._most_of[few] = decoded, most if most > few else 0
        return self._most_of[few]

    def _chosen(self, kernels: LayerKernels, q: str, prefill: bool) -> instances.Attention:
        """The instance for one kind of queries."""
        if prefill:
            return kernels.attention("prefill", q)
        most, _ = self._most(kernels.few)
        single = most <= 1 or most * kernels.heads <= instances.FEW_ROWS
        return kernels.attention("decode" if single else "verify", q)

    def _launch(
        self,
        kernels: LayerKernels,
        q: str,
        prefill: bool,
        call: Attend,
        own: ListTables | None,
        common: ListTables | None,
        stream: Stream,
    ) -> None:
        """Launches attention for one kind of queries: over common pages first, then over each sequence's own."""
        if common is not None:
            call.members = self._tables.works[kernels.works[prefill, q]].members
            call.division = Division.TILES
            self._launch_list(kernels, kernels.attention("common", q), call, common, stream)
            call.members = None
        if own is not None:
            runs = Division.UNITS if prefill else Division.RUNS
            call.division = runs if self._deterministic else Division.TILES
            self._launch_list(kernels, self._chosen(kernels, q, prefill), call, own, stream)

    def _launch_list(
        self, kernels: LayerKernels, chosen: instances.Attention, call: Attend, work: ListTables, stream: Stream
    ) -> None:
        call.blocks, call.prefix, call.totals, call.part_rows = work.blocks, work.prefix, work.totals, work.rows
        call.sets = kernels.shape["num_kv_heads"] * chosen.sets
        call.group = kernels.heads // chosen.sets
        call.set_shift = chosen.sets.bit_length() - 1
        stream.launch(chosen.kernel, self._grid(chosen), chosen.threads, call, shared_bytes=chosen.shared_bytes)

    def _grid(self, chosen: instances.Attention) -> int:
        return self._driver.multiprocessors * chosen.resident(self._driver.shared_bytes_max)

    def _make_room(self, kernels: LayerKernels, q: str, prefill: bool, stream: Stream, *, streamed: bool) -> None:
        """Makes sure of scratch memory for attention over a layer, and over all others of its kind in this step."""
        covered = kernels.kind, q, prefill, streamed
        if covered in self._covered:
            return
        sizes = self._scratch_bytes(kernels, q, self._chosen(kernels, q, prefill), prefill, streamed=streamed)
        if not self._scratch.covers(sizes):
            if stream.capturing:
                raise InvalidArgument(
                    "attend: in a graph, which allocates no memory: maxima declared first, by Cache.declare"
                )
            self._finish_steps()
            stream.record().wait()
            # If memory is refused, the scratch memory of other kinds may be gone, too.
            self._covered.clear()
            self._scratch.grow(sizes, exactly=False)
        self._covered.add(covered)

    def _scratch_bytes(
        self, kernels: LayerKernels, q: str, chosen: instances.Attention, prefill: bool, *, streamed: bool
    ) -> tuple[int, int, int]:
        """Bytes of partial results, counters and parts for attention over a layer by an instance: in the open step, or in any
        step once maxima are declared."""
        work = self._tables.works[kernels.works[prefill, q]]
        shape = kernels.shape
        sets, room = shape["num_kv_heads"] * chosen.sets, self._tables.room
        floats, units, rows = 2 * self._grid(chosen) * chosen.partial, work.blocks_max * sets, 0
        if self._deterministic and not prefill:
            # Runs of each block, whose sequence fills its table at most, and one more for each span that begins inside a run.
            runs = work.blocks_max * (room.columns * self._page_size // RUN_ROWS + 1) + room.spans
            floats = runs * sets * chosen.partial
        any_step = self._maxima is not None
        if work.common is not None:
            rows = work.members_max if any_step else self._tables.members
            common = kernels.attention("common", q)
            floats = max(floats, 2 * self._grid(common) * common.partial if rows else 0)
            units = max(units, rows * shape["num_kv_heads"] * common.sets)
        if self._streams.in_passes and (any_step or streamed):
            # As crates/pagoda-py/src/passes.rs numbers them.
            members = self._tables.members_max if any_step else self._tables.members
            rows = 3 * (members + self._tokens_max)
        return 4 * floats, 4 * units, 4 * rows * shape["num_q_heads"] * (shape["v_head_dim"] + 2)
