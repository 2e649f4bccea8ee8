"""A cache as kernels of attention see it, made by hand: pages, tables, work lists, and the expected results.

Pages lie in random places on two tiers, rows that no query sees are NaN, table entries past the end and of pages that a
span skips point nowhere, and every array that a kernel may write is surrounded by canaries.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import numpy.typing as npt
from emulator import Guarded
from pagoda import _core
from pagoda.device.derived import turns_of
from pagoda.kernels import arguments, instances
from pagoda.kernels.arguments import Division, Sight

Array = npt.NDArray[Any]

TILE, RUN_TILES = 64, 64
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTISED = {name: ours for ours, name in instances.QUANTISED.items()}
"""Formats of quantised rows, by the CPU's codec, which tests/test_formats.py compares with others."""
LEAST_MISFIT = {"F32": np.inf, "F16": 65520.0, "BF16": float.fromhex("0x1.ffp127")}
"""The smallest numbers whose nearest ones in a format are infinite."""
NOWHERE = 0xBFFFFFF0
"""A table entry of the disk tier, which has no memory."""


def stored(rows: Array, kind: str) -> tuple[Array, Array, Array]:
    """Rows [n, dim] in a format: their bytes, the bytes of their scales, and the numbers that both represent."""
    if kind in QUANTISED:
        name, dim = QUANTISED[kind], rows.shape[1]
        data, scales = _core.encode_rows(np.ascontiguousarray(rows, np.float32), name)
        return data, scales, _core.decode_rows(data, scales, name, dim).astype(np.float64)
    limit = 65504 if kind == "F16" else np.inf
    plain = np.clip(rows.astype(np.float32), -limit, limit).astype(DTYPES[kind])
    return plain.view(np.uint8), np.zeros((len(rows), 0), np.uint8), plain.astype(np.float64)


@dataclass
class Plane:
    """K or V of a layer inside a block: where rows and scales begin, and the bytes per row of each."""

    offset: int
    page_size: int
    heads: int
    row_bytes: int
    scale_bytes: int

    @classmethod
    def of(cls, kind: str, dim: int, offset: int, page_size: int, heads: int) -> Plane:
        data, scales, _ = stored(np.zeros((1, dim), np.float32), kind)
        return cls(offset, page_size, heads, data.shape[1], scales.shape[1])

    @property
    def scales(self) -> int:
        return self.offset + self.page_size * self.heads * self.row_bytes

    @property
    def end(self) -> int:
        """Rounded up: strips begin at multiples of 16, and only scales may end elsewhere."""
        return -(-(self.scales + self.page_size * self.heads * self.scale_bytes) // 16) * 16

    @property
    def argument(self) -> arguments.Plane:
        strips = (self.offset, self.page_size * self.row_bytes), (self.scales, self.page_size * self.scale_bytes)
        return arguments.Plane(*(arguments.Strip(*strip) for strip in strips))

    def write(self, block: Array, head: int, row: int, data: Array, scales: Array) -> None:
        """Writes a row and its scales into the bytes of a block."""
        place = head * self.page_size + row
        for start, part in (
            (self.offset + place * self.row_bytes, data),
            (self.scales + place * self.scale_bytes, scales),
        ):
            block[start : start + len(part)] = part


@dataclass(frozen=True)
class Shape:
    """One instance of a kernel: formats, head sizes, and how an engine cuts its work."""

    k: str
    v: str
    q: str
    dim: int
    v_dim: int
    engine: str = "decode"
    """"cores", or a key of CUTS."""

    @property
    def name(self) -> str:
        return f"{self.k}_{self.v}_{self.q}_{self.dim}_{self.v_dim}_{self.engine}".replace(" ", "_")

    @property
    def type(self) -> str:
        formats = f"pagoda::{self.k}, pagoda::{self.v}, pagoda::{self.q}, {self.dim}, {self.v_dim}"
        if self.engine == "cores":
            return f"pagoda::CudaCores<pagoda::CoreShape<{formats}, 16>>"
        name = "Few" if self.engine in FEW else "Many"
        return f"pagoda::{name}Queries<pagoda::{name}Shape<{formats}, {CUTS[self.engine]}>>"

    @property
    def rows(self) -> int:
        rows = {"few": 8, "prefill": 64, "stacked": 128, "stacked columns": 32, "wide": 64, "wide columns": 64}
        return rows.get(self.engine, 16)

    @property
    def v_in_k(self) -> bool:
        return self.v == "PartOfK"

    @property
    def k_from_v(self) -> bool:
        return self.k == "FromV"


FEW = {"few": "1, 3", "decode": "2, 3"}
"""Template arguments of engines for few queries: blocks of queries, stages."""

CUTS = FEW | {
    "prefill": "4, 1, 1, 2",
    "stacked": "4, 1, 2, 2",
    "deterministic": "1, 1, 1, 2",
    "columns": "4, 4, 1, 2",
    "stacked columns": "4, 4, 2, 2",
    "wide": "8, 2, 1, 2",
    "wide columns": "8, 4, 2, 2",
}
"""Template arguments of all engines on tensor cores; those for many queries have warps, columns, stack, stages."""


def append_kernel(formats: tuple[str, ...]) -> str:
    names = ", ".join(f"pagoda::{name}" for name in formats)
    return f"pagoda::append_rows<{names}, 2>" if set(formats) & set(QUANTISED) else f"pagoda::append<{names}>"


def compiled(
    shapes: list[Shape],
    appends: list[tuple[str, str, str]],
    compile: Callable[..., emulator.Library] = emulator.compile,
    **options: Any,
) -> emulator.Library:
    """Kernels that attend, named by shape, and that append, named by their formats, with constants."""
    kernels, constants = {}, {}
    for shape in shapes:
        kernels[shape.name] = f"pagoda::attend<{shape.type}>"
        for constant in ("SHARED_BYTES", "THREADS", "PARTIAL"):
            constants[f"{shape.name}_{constant}"] = f"{shape.type}::Shape::{constant}"
    for formats in appends:
        kernels["_".join(formats)] = append_kernel(formats)
    for name in ("Rows", "Plane", "Pages", "Append", "Attend", "Center", "Span", "QueryBlock"):
        constants[f"sizeof_{name}"] = f"sizeof(pagoda::{name})"
    source = "#include <pagoda/append_rows.cuh>\n#include <pagoda/attend.cuh>\n#include <pagoda/center.cuh>"
    return compile(source, kernels, constants, **options)


@dataclass
class Span:
    skip: int
    count: int
    offset: int = 0
    sight: Sight = Sight.IN_WINDOW
    start: int = 0
    """For a trailing span: queries after this position see it nearer."""
    position: int = 0
    """With which its first token was stored, where keys are derived from values."""

    def offset_for(self, position: int) -> int:
        return self.offset + (max(0, position - self.start) if self.sight == Sight.TRAILING else 0)


@dataclass
class Sequence:
    """Spans of stored tokens; the last `new` tokens are the queries."""

    spans: list[Span]
    new: int = 1

    @property
    def length(self) -> int:
        return sum(span.count for span in self.spans)


def one(count: int, new: int = 1) -> Sequence:
    return Sequence([Span(0, count)], new)


@dataclass
class Common:
    """Whole pages, tokens [low, high), that several sequences, each of one span, share."""

    members: list[int]
    low: int
    high: int


@dataclass
class World:
    """A cache of two layers in two arenas, filled with random rows, and the tables of a step."""

    shape: Shape
    sequences: list[Sequence]
    kv_heads: int = 2
    group: int = 3
    sets: int = 1
    page_size: int = 16
    window: int | None = None
    rope: tuple[int, bool] | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0
    commons: list[Common] = field(default_factory=list)
    mean: float = 0.0
    """Of the stored rows."""
    query_size: float = 1.0
    """Queries are larger by this factor, which the scale of scores takes back."""
    pitch: int = 0
    """Bytes from block to block, and from token to token of queries and results, at least. Memory between them is not
    poisoned."""
    head_pitch: int = 0
    """If not 0, bytes from head to head of queries and results instead of those from token to token."""
    keep: list[Guarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, len(self.sequences)])
        page, heads = self.page_size, self.kv_heads
        # Planes are the second layer's, after as many bytes of the first.
        k, v = self.shape.k, self.shape.k if self.shape.v_in_k else self.shape.v
        # Stored rows: K and V, only K, or only V.
        self.kinds = [] if self.shape.k_from_v else [(k, self.shape.dim)]
        self.kinds += [] if self.shape.v_in_k else [(v, self.shape.v_dim)]
        layer_bytes = 0
        for kind, dim in self.kinds:
            layer_bytes = Plane.of(kind, dim, layer_bytes, page, heads).end
        self.block_bytes = max(2 * layer_bytes, self.pitch)
        self.k_plane = self.v_plane = Plane.of(*self.kinds[0], layer_bytes, page, heads)
        if len(self.kinds) > 1:
            self.v_plane = Plane.of(*self.kinds[1], self.k_plane.end, page, heads)
        self.inv_freq = 10000.0 ** -(np.arange(self.rope[0]) / self.rope[0]) if self.rope else np.zeros(0)
        self.key_weight = np.random.default_rng(self.seed).uniform(-2, 2, self.shape.dim).astype(np.float32)
        pages = [[-(-(span.skip + span.count) // page) for span in sequence.spans] for sequence in self.sequences]
        self.place_pages([sum(counts) for counts in pages], rng)
        self.keys: list[Array] = []
        self.values: list[Array] = []
        spans, starts = [], [0]
        for index, sequence in enumerate(self.sequences):
            self.keys.append(np.zeros((sequence.length, heads, self.shape.dim)))
            self.values.append(np.zeros((sequence.length, heads, self.shape.v_dim)))
            page_index = before = 0
            # The rows of a sequence do not depend on the other sequences.
            content = np.random.default_rng([self.seed, index, 1])
            for span, count in zip(sequence.spans, pages[index], strict=True):
                self.write_rows(index, span, page_index, before, content)
                self.table.array[index, page_index : page_index + span.skip // page] = NOWHERE
                spans.append([page_index, span.skip, span.count, before, span.offset, span.position, span.sight])
                page_index += count
                before += span.count
            starts.append(len(spans))
        self.share_common_pages()
        offsets, token = [span[4] for span in spans], 0
        for index, sequence in enumerate(self.sequences):
            for number, span in enumerate(sequence.spans):
                if span.sight == Sight.TRAILING:
                    spans[starts[index] + number][4] = len(offsets) - token
                    queries = range(sequence.length - sequence.new, sequence.length)
                    offsets += [span.offset_for(position) for position in queries]
            token += sequence.new
        angles = np.array(offsets)[:, None] * self.inv_freq
        self.angles = self.filled(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))
        self.spans = self.filled(np.array([tuple(span) for span in spans], arguments.SPAN))
        self.first_spans = starts
        self.tokens = sum(sequence.new for sequence in self.sequences)
        q_heads = heads * self.group
        q = self.query_size * rng.standard_normal((self.tokens, q_heads, self.shape.dim))
        q = q.astype(DTYPES[self.shape.q])
        self.q = apart(q.shape, q.dtype, self.pitch, self.head_pitch)
        self.keep.append(self.q)
        self.q.array[...] = q
        self.sink_logits = self.filled(rng.normal(0, 2, q_heads).astype(np.float32))

    def place_pages(self, counts: list[int], rng: np.random.Generator) -> None:
        """Gives each page of each sequence its own block, anywhere in the arenas."""
        blocks = sum(counts) + 3
        fill = 0 if self.pitch else emulator.POISON
        self.arenas = [self.guarded((blocks * self.block_bytes,), np.uint8, fill) for _ in range(2)]
        places = [tier << 30 | block for tier in range(2) for block in range(blocks)]
        order = rng.permutation(len(places))
        self.table = self.guarded((len(self.sequences), max(counts, default=0) + 5), np.uint32)
        self.table.array[:] = NOWHERE
        at = 0
        for row, count in zip(self.table.array, counts, strict=True):
            row[:count] = [places[place] for place in order[at : at + count]]
            at += count

    def write_rows(self, index: int, span: Span, page_index: int, before: int, content: np.random.Generator) -> None:
        """Writes random rows of a span to its blocks and, as stored, to `keys` and `values`."""
        page, keys, values = self.page_size, self.keys[index], self.values[index]
        planes = [self.k_plane, self.v_plane][-len(self.kinds) :]
        for t in range(span.count):
            if self.holder(index, before + t) != index:
                continue
            row = span.skip + t
            tier, block = divmod(int(self.table.array[index, page_index + row // page]), 1 << 30)
            place = self.arenas[tier].array[block * self.block_bytes :]
            rows = [stored(content.normal(self.mean, 1, (self.kv_heads, dim)), kind) for kind, dim in self.kinds]
            values[before + t] = rows[-1][2][:, : self.shape.v_dim]
            if self.shape.k_from_v:
                made = values[before + t] * self.key_weight
                keys[before + t] = [self.turned(key, -(span.position + t)) for key in made]
            else:
                keys[before + t] = rows[0][2]
            for plane, (data, scales, _) in zip(planes, rows, strict=True):
                for head in range(self.kv_heads):
                    plane.write(place, head, row % page, data[head], scales[head])

    def share_common_pages(self) -> None:
        """Gives all members of a common prefix the first one's pages."""
        for common in self.commons:
            first, *others = common.members
            pages = slice(common.low // self.page_size, common.high // self.page_size)
            tokens = slice(common.low, common.high)
            for other in others:
                self.table.array[other, pages] = self.table.array[first, pages]
                self.keys[other][tokens] = self.keys[first][tokens]
                self.values[other][tokens] = self.values[first][tokens]

    def spoil(self, token: int, column: int, number: float) -> None:
        """Makes an element of V infinite or NaN, in all heads of the first sequence, which has one span. Where V is a part of
        K, it may be one of K."""
        page, plane = self.page_size, self.v_plane
        tier, block = divmod(int(self.table.array[0, token // page]), 1 << 30)
        for head in range(self.kv_heads):
            start = block * self.block_bytes + plane.offset + (head * page + token % page) * plane.row_bytes
            row = self.arenas[tier].array[start : start + plane.row_bytes]
            row.view(DTYPES[self.kinds[-1][0]])[column] = number
            if column < self.shape.v_dim:
                self.values[0][token, head, column] = number
            if self.shape.v_in_k:
                self.keys[0][token, head, column] = number

    @property
    def scale(self) -> float:
        return float(self.shape.dim**-0.5 / self.query_size)

    @property
    def set_heads(self) -> int:
        """Query heads per unit."""
        return self.group // self.sets

    def guarded(self, shape: tuple[int, ...], dtype: npt.DTypeLike, fill: int = emulator.POISON) -> Guarded:
        array = Guarded(shape, dtype, fill)
        self.keep.append(array)
        return array

    def filled(self, values: Array) -> Guarded:
        array = self.guarded(values.shape, values.dtype)
        array.array[...] = values
        return array

    def holder(self, index: int, token: int) -> int:
        """The first sequence that holds a token's page."""
        held = [c.members[0] for c in self.commons if index in c.members and c.low <= token < c.high]
        return held[0] if held else index

    def common_work(self, rows: int) -> tuple[Array, Array, Array]:
        """Blocks, prefix and members of the work over common pages."""
        blocks, prefix = [], [0]
        members: list[int] = []
        tokens = np.cumsum([0, *(sequence.new for sequence in self.sequences)])
        for common in self.commons:
            start = len(members)
            members += [token for m in common.members for token in range(tokens[m], tokens[m + 1])]
            for first in range(start, len(members), rows // self.set_heads):
                queries = min(rows // self.set_heads, len(members) - first)
                position, seen = common.high - 1, (0, common.low, common.high)
                sequence = common.members[0]
                block = (sequence, self.first_spans[sequence], first, queries, position, *seen, 0, 0, first)
                blocks.append(block)
                prefix.append(prefix[-1] + len({t // TILE for t in range(common.low, common.high)}))
        return np.array(blocks, arguments.QUERY_BLOCK), np.array(prefix, np.int32), np.array(members, np.int32)

    def work(self, by_runs: bool, tokens: range, carried: dict[int, int]) -> tuple[Array, Array, Array]:
        """The work list as `pagoda_core::work::WorkList` makes it, for a launch over `tokens`: blocks, prefix, rows of parts.
        carried: the part that an earlier launch left for a block, by the block's first query."""
        blocks, prefix, token = [], [0], 0
        part_rows: list[int] = []
        members = self.common_work(self.shape.rows)[2].tolist()
        most = self.shape.rows // self.set_heads
        for index, sequence in enumerate(self.sequences):
            for first in range(0, sequence.new, most):
                queries = min(most, sequence.new - first)
                position = sequence.length - sequence.new + first
                low = 0 if self.window is None else max(0, position + 1 - self.window)
                query, high = token + first, position + queries
                parts = [i for i, member in enumerate(members) if member == query]
                low = max([low, *(common.high for common in self.commons if index in common.members)])
                units, before = set(), 0
                for number, span in enumerate(sequence.spans):
                    first_seen = before if span.sight else max(low, before)
                    seen = range(first_seen, min(high, before + span.count))
                    unit = TILE * RUN_TILES if by_runs else TILE
                    units |= {(number, (t - before + span.skip) // unit) for t in seen if t in tokens}
                    before += span.count
                if not units:
                    continue
                parts = [carried[query]] if query in carried else parts
                target = -1 if high <= tokens.stop else len(members) + query
                if target == carried.get(query):
                    target += self.tokens
                carried[query] = target
                seen = range(max(low, tokens.start), min(high, tokens.stop))
                axis = position, tokens.start, seen.start, seen.stop
                parts_here = len(part_rows), len(parts), target
                blocks.append((index, self.first_spans[index], query, queries, *axis, *parts_here))
                part_rows += parts
                prefix.append(prefix[-1] + len(units))
            token += sequence.new
        return (
            np.array(blocks, arguments.QUERY_BLOCK),
            np.array(prefix, np.int32),
            np.array(part_rows, np.int32),
        )

    def pages(self) -> arguments.Pages:
        bases = (ctypes.c_void_p * 3)(self.arenas[0].address, self.arenas[1].address, None)
        return arguments.Pages(
            self.table.address,
            self.table.array.shape[1],
            bases,
            (ctypes.c_int64 * 3)(self.block_bytes, self.block_bytes, 0),
            int(math.log2(self.page_size)),
            self.spans.address,
        )

    def attend(
        self,
        library: emulator.Library,
        grid: int,
        *,
        division: Division = Division.TILES,
        stretch: int = 1 << 30,
        seed: int = 0,
        stops: Iterable[int] = (),
    ) -> tuple[Array, Array]:
        """Output and log-sum-exp of the kernel. stretch: tiles that a team adds up at once. stops: tokens at which one launch
        ends and the next continues."""
        heads = self.kv_heads * self.group
        out = apart((self.tokens, heads, self.shape.v_dim), DTYPES[self.shape.q], self.pitch, self.head_pitch)
        self.keep.append(out)
        lse = self.guarded((self.tokens, heads), np.float32)

        def rows(array: Guarded) -> arguments.Rows:
            return arguments.Rows(array.address, array.array.strides[0], array.array.strides[1])

        call = arguments.Attend(
            pages=self.pages(),
            k_plane=self.k_plane.argument,
            v_plane=self.v_plane.argument,
            q=rows(self.q),
            out=rows(out),
            lse=lse.address,
            sets=self.kv_heads * self.sets,
            group=self.set_heads,
            set_shift=int(math.log2(self.sets)),
            window=_core.TOKENS_MAX if self.window is None else self.window,
            division=division,
            stretch=stretch,
            scale=self.scale * (math.log2(math.e) if self.softcap is None else 1 / self.softcap),
            softcap=0.0 if self.softcap is None else self.softcap * math.log2(math.e),
            sinks=self.sink_logits.address if self.sinks else None,
            angles=self.angles.address if self.rope else None,
            rotary_pairs=self.rope[0] if self.rope else 0,
            interleaved=self.rope[1] if self.rope else 0,
        )
        if self.shape.k_from_v:
            call.key_weight = self.filled(self.key_weight).address
            call.turns = self.filled(turns_of(self.inv_freq.tolist())).address if self.rope else None
        blocks, prefix, members = self.common_work(self.shape.rows)
        rows_of_parts = len(members) + 2 * self.tokens
        call.parts = self.guarded((rows_of_parts, heads, self.shape.v_dim + 2), np.float32).address
        if self.commons:
            call.members = self.filled(members).address
            self.launch(library, call, blocks, prefix, grid, seed)
            call.members = None
        carried: dict[int, int] = {}
        for start, stop in pairwise([0, *stops, 1 << 30]):
            blocks, prefix, part_rows = self.work(division != Division.TILES, range(start, stop), carried)
            call.part_rows = self.filled(part_rows).address
            self.launch(library, call, blocks, prefix, grid, seed)
        return out.array, lse.array

    def launch(
        self, library: emulator.Library, call: arguments.Attend, blocks: Array, prefix: Array, grid: int, seed: int
    ) -> None:
        name = self.shape.name
        threads = library.constant(f"{name}_THREADS")
        partial = library.constant(f"{name}_PARTIAL")
        slots = int(prefix[-1]) * self.kv_heads * self.sets if call.division == Division.RUNS else 2 * grid
        call.partials = self.guarded((slots, partial), np.float32).address
        pending = self.filled(np.zeros(len(blocks) * self.kv_heads * self.sets, np.int32))
        call.pending = pending.address
        # Behind the last is what earlier steps have left.
        call.blocks, call.prefix = self.filled(blocks).address, self.filled(np.pad(prefix, (0, 40))).address
        call.totals = self.filled(np.array([len(blocks), prefix[-1]], np.int32)).address
        options = {"shared_bytes": library.constant(f"{name}_SHARED_BYTES"), "seed": seed}
        library.launch(name, grid, threads, call, **options)
        for array in self.keep:
            array.check()
        assert not pending.array.any(), "counters are as they were, for the next launch"

    def expected(self) -> tuple[Array, Array]:
        """Output and log-sum-exp in float64."""
        heads = self.kv_heads * self.group
        out = np.zeros((self.tokens, heads, self.shape.v_dim))
        lse = np.full((self.tokens, heads), -np.inf)
        token = 0
        for sequence, keys, values in zip(self.sequences, self.keys, self.values, strict=True):
            spans = [span for span in sequence.spans for _ in range(span.count)]
            for position in range(sequence.length - sequence.new, sequence.length):
                first = 0 if self.window is None else max(0, position + 1 - self.window)
                seen = [t for t in range(position + 1) if t >= first or spans[t].sight]
                for head in range(heads):
                    q = self.q.array[token, head].astype(np.float64)
                    turned = np.stack([self.turned(q, spans[t].offset_for(position)) for t in seen])
                    k = keys[seen, head // self.group].astype(np.float64)
                    scores = (turned * k).sum(1) * self.scale
                    if self.softcap is not None:
                        scores = self.softcap * np.tanh(scores / self.softcap)
                    weights = np.exp(scores - scores.max())
                    sink = math.exp(self.sink_logits.array[head] - scores.max()) if self.sinks else 0.0
                    v = values[seen, head // self.group].astype(np.float64)
                    out[token, head] = weights @ v / (weights.sum() + sink)
                    lse[token, head] = scores.max() + np.log(weights.sum())
                token += 1
        return out, lse

    def turned(self, q: Array, offset: int) -> Array:
        """A query rotated back by `offset` positions."""
        if not self.rope or offset == 0:
            return q
        pairs, interleaved = self.rope
        result = q.copy()
        i = np.arange(pairs)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        turn = (q[a] + 1j * q[b]) * np.exp(-1j * offset * self.inv_freq)
        result[a], result[b] = turn.real, turn.imag
        return result

    def compare(self, library: emulator.Library, grid: int, **options: Any) -> Array:
        """Attends, compares with `expected`, and returns its outputs: what is not finite has to be not finite."""
        out, lse = self.attend(library, grid, **options)
        right, right_lse = self.expected()
        finite = np.isfinite(right)
        np.testing.assert_array_equal(np.isfinite(out.astype(np.float64)), finite)
        # Accuracy is that of the queries' type.
        tolerance = {"F32": 3e-5, "F16": 2e-3, "BF16": 2e-2}[self.shape.q]
        # For 16-bit queries, keys derived from values are f16.
        of_scores = 4 if self.shape.k_from_v else 10
        np.testing.assert_allclose(out[finite].astype(np.float64), right[finite], rtol=0, atol=tolerance)
        np.testing.assert_allclose(lse, right_lse, rtol=0, atol=max(1e-4, tolerance / of_scores))
        return right


def apart(shape: tuple[int, int, int], dtype: npt.DTypeLike, pitch: int, head_pitch: int) -> Guarded:
    """Rows [token, head, element] of heads that lie `head_pitch` bytes apart or, if that is 0, of tokens that lie `pitch`
    bytes apart; side by side if both are 0."""
    if not pitch and not head_pitch:
        return Guarded(shape, dtype)
    tokens, heads, size = shape
    first, second = (heads, tokens) if head_pitch else (tokens, heads)
    memory = Guarded((first, head_pitch or pitch), np.uint8, 0)
    used = memory.array[:, : second * size * np.dtype(dtype).itemsize].view(dtype).reshape(first, second, size)
    memory.array = used.swapaxes(0, 1) if head_pitch else used
    return memory


def check_append(
    formats: tuple[str, str, str], page_size: int, library: emulator.Library, pitch: int = 0, head_pitch: int = 0
) -> None:
    """Appends rows to pages in random order, and compares every byte. pitch: bytes from block to block and from token to
    token at least; those that this adds are not looked at. Numbers of slots and offsets in blocks are beyond 32 bits then.
    head_pitch: if not 0, bytes from head to head instead of those from token to token."""
    rng = np.random.default_rng(0)
    k_kind, v_kind = formats[:2]
    given = DTYPES[formats[2]]
    quantised = bool(set(formats) & set(QUANTISED))
    tokens, heads, blocks = 10 if pitch else 37, 3, 9
    dim, v_dim = (224, 64) if quantised else (40, 24)
    k_plane = Plane.of(k_kind, dim, 32, page_size, heads)
    v_plane = Plane.of(v_kind, v_dim, k_plane.end, page_size, heads)
    block_bytes = max(v_plane.end, pitch)
    # Zeros take no memory.
    fill = 0 if pitch else emulator.POISON
    arena = Guarded((blocks, block_bytes), np.uint8, fill)
    # K and V are columns of one array, as from a fused projection, aligned to one element, two or several.
    more = 8 if page_size > 8 else 2 if formats[2] == "F16" else 3
    fused = apart((tokens, heads, dim + v_dim + more), given, pitch, head_pitch)
    with np.errstate(over="ignore"):
        fused.array[...] = (rng.standard_normal(fused.array.shape) * 1000).astype(given)
        fused.array[8, 2] = (1e30 * rng.choice([-1, 1], dim + v_dim + more)).astype(given)
    fused.array[3, 1, 5] = np.nan
    fused.array[4, 1, 6] = np.inf
    fused.array[6, 0, 4] = -np.inf
    fused.array[5, 2, 7] = np.asarray(65519.0).astype(given)
    slots = Guarded(tokens, np.int64)
    # The first row and the last are among those that are written. What is written nowhere need not fit.
    slots.array[:] = 1 + rng.permutation(blocks * page_size - 2)[:tokens]
    slots.array[[1, 2]] = 0, blocks * page_size - 1
    slots.array[[0, 9]] = -1
    places = slots.array.copy()
    # Blocks before the arena's have no memory, nor has the beginning of each block.
    before, lead = ((1 << 32) // page_size, 1 << 33) if pitch else (0, 0)
    slots.array[places >= 0] += before * page_size
    fused.array[[0, 9]] = np.nan
    count = Guarded(1, np.int32)
    count.array[:] = tokens
    misfit = Guarded(1, np.int32)
    misfit.array[:] = 0
    strides = fused.array.strides
    rows = [arguments.Rows(fused.address + at * strides[2], strides[0], strides[1]) for at in (0, dim)]
    call = arguments.Append(
        k=rows[0],
        v=rows[1],
        slots=slots.address,
        tokens=count.address,
        kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        base=arena.address - before * block_bytes - lead,
        block_bytes=block_bytes,
        page_shift=int(math.log2(page_size)),
        k_plane=k_plane.argument,
        v_plane=v_plane.argument,
        misfit=misfit.address,
    )
    for strip in (call.k_plane.rows, call.k_plane.scales, call.v_plane.rows, call.v_plane.scales):
        strip.offset += lead
    # Of the warps that write rows each has one head of K or V, or four share it.
    library.launch("_".join(formats), 3 if page_size == 8 and not pitch else 9, 96, call)
    for array in (arena, fused, slots, misfit):
        array.check()
    right = np.full((blocks, v_plane.end), fill, np.uint8)
    for token, slot in enumerate(places):
        for head in range(heads):
            for plane, kind, part in ((k_plane, k_kind, slice(0, dim)), (v_plane, v_kind, slice(dim, dim + v_dim))):
                row = fused.array[token, head, part].astype(np.float32)
                data, scales, _ = stored(row[None], kind)
                if slot >= 0:
                    plane.write(right[slot // page_size], head, slot % page_size, data[0], scales[0])
    if k_kind in DTYPES:
        # NaN may have other bits.
        kind = np.dtype(DTYPES[k_kind])
        at = k_plane.offset + (page_size + places[3] % page_size) * k_plane.row_bytes + 5 * kind.itemsize
        place = places[3] // page_size, slice(at, at + kind.itemsize)
        assert np.isnan(arena.array[place].view(kind)[0])
        right[place] = arena.array[place]
    np.testing.assert_array_equal(arena.array[:, : v_plane.end], right)
    assert misfit.array[0] == 1
    fused.array[3, 1, 5] = fused.array[4, 1, 6] = fused.array[6, 0, 4] = fused.array[8, 2] = 1
    misfit.array[:] = 0
    library.launch("_".join(formats), 1, 32, call)
    assert misfit.array[0] == 0
    # Each of the elements that a thread has, and of V.
    cases: list[tuple[Any, int, bool]] = [(np.nan, column, True) for column in (*range(8), dim + 3)]
    cases += [(np.inf, dim + 4, True), (-np.inf, 6, True)]
    if given is np.float32 and k_kind in LEAST_MISFIT:
        least = np.float32(LEAST_MISFIT[k_kind])
        cases += [(least, 6, True), (np.nextafter(least, np.float32(0)), 6, False)]
    for number, column, misfits in cases:
        before = fused.array[7, 1, column]
        fused.array[7, 1, column] = number
        library.launch("_".join(formats), 1, 32, call)
        assert misfit.array[0] == misfits
        fused.array[7, 1, column], misfit.array[:] = before, 0
    # Caches that are not checked have nobody to tell.
    call.misfit = None
    fused.array[7, 1] = np.nan
    library.launch("_".join(formats), 1, 32, call)
