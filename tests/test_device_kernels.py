"""The kernels of cuda/ on the emulator, against formulas in float64.

Pages lie in random places on two tiers, rows that no query sees are NaN, table entries past the end point nowhere, and every
array that a kernel may write lies between canaries.
"""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from emulator import Guarded
from pagoda import _core
from pagoda.device.derived import turns_of
from pagoda.kernels import arguments, instances
from pagoda.kernels.arguments import Division, Sight

Array = npt.NDArray[Any]

TILE, RUN_TILES = 64, 64
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTISED = {name: ours for ours, name in instances.QUANTISED.items()}
"""Formats of quantised rows, as the CPU's codec has them: tests/test_formats.py holds that against others."""
NOWHERE = 0xBFFFFFF0
"""A table entry of the disk tier, which has no memory."""


def stored(rows: Array, kind: str) -> tuple[Array, Array, Array]:
    """Rows [n, dim] in a format: their bytes and those of their scales, and the numbers that they stand for."""
    if kind in QUANTISED:
        name, dim = QUANTISED[kind], rows.shape[1]
        data, scales = _core.encode_rows(np.ascontiguousarray(rows, np.float32), name)
        return data, scales, _core.decode_rows(data, scales, name, dim).astype(np.float64)
    limit = 65504 if kind == "F16" else np.inf
    plain = np.clip(rows.astype(np.float32), -limit, limit).astype(DTYPES[kind])
    return plain.view(np.uint8), np.zeros((len(rows), 0), np.uint8), plain.astype(np.float64)


@dataclass
class Plane:
    """K or V of a layer inside a block: where rows and scales begin, and the bytes of one of each."""

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
        """Strips begin at multiples of 16; only scales may end elsewhere."""
        return -(-(self.scales + self.page_size * self.heads * self.scale_bytes) // 16) * 16

    @property
    def argument(self) -> arguments.Plane:
        strips = (self.offset, self.page_size * self.row_bytes), (self.scales, self.page_size * self.scale_bytes)
        return arguments.Plane(*(arguments.Strip(*strip) for strip in strips))

    def write(self, block: Array, head: int, row: int, data: Array, scales: Array) -> None:
        """A row and its scales into the bytes of a block."""
        place = head * self.page_size + row
        for start, part in (
            (self.offset + place * self.row_bytes, data),
            (self.scales + place * self.scale_bytes, scales),
        ):
            block[start : start + len(part)] = part


@dataclass
class Shape:
    """One instance of a kernel: formats, head sizes, and how an engine cuts its work."""

    k: str
    v: str
    q: str
    dim: int
    v_dim: int
    engine: str = "decode"
    """"cores", or one of CUTS."""

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
"""Blocks of queries, and stages."""

CUTS = FEW | {
    "prefill": "4, 1, 1, 2",
    "stacked": "4, 1, 2, 2",
    "deterministic": "1, 1, 1, 2",
    "columns": "4, 4, 1, 2",
    "stacked columns": "4, 4, 2, 2",
    "wide": "8, 2, 1, 2",
    "wide columns": "8, 4, 2, 2",
}
"""And for many queries warps, columns, stack and stages: engines on tensor cores."""

SHAPES = [
    Shape("F16", "F16", "F32", 128, 128),
    Shape("F16", "F16", "F16", 64, 64),
    Shape("BF16", "BF16", "BF16", 96, 96),
    Shape("BF16", "BF16", "F32", 80, 80),
    Shape("BF16", "F16", "F32", 72, 40),
    Shape("F16", "BF16", "F32", 8, 24),
    Shape("F16", "F16", "F32", 256, 256),
    Shape("F16", "F16", "F32", 192, 128),
    Shape("F16", "F16", "F32", 128, 128, "prefill"),
    Shape("BF16", "BF16", "BF16", 64, 64, "stacked"),
    Shape("F16", "F16", "F32", 128, 128, "deterministic"),
    Shape("F16", "F16", "F32", 576, 512, "columns"),
    Shape("F32", "F32", "F32", 128, 128, "cores"),
    Shape("F32", "F16", "BF16", 72, 136, "cores"),
    Shape("BF16", "PartOfK", "F32", 80, 64),
    Shape("F16", "PartOfK", "F32", 576, 512, "columns"),
    Shape("F32", "PartOfK", "F32", 72, 40, "cores"),
    Shape("F16", "F16", "F16", 128, 128, "stacked"),
    Shape("F16", "F16", "F16", 128, 128, "deterministic"),
    Shape("BF16", "F16", "BF16", 72, 96, "stacked columns"),
    Shape("F16", "F16", "F32", 64, 32, "wide"),
    Shape("BF16", "PartOfK", "BF16", 576, 512, "wide columns"),
    Shape("Q8_0", "Q8_0", "BF16", 128, 128),
    Shape("Q4_0", "Q4_0", "F32", 96, 32, "prefill"),
    Shape("Fp8E4m3", "Q4_0", "F16", 80, 64),
    Shape("Q8_0", "PartOfK", "F32", 96, 64, "deterministic"),
    Shape("F16", "Int8", "F32", 64, 80, "prefill"),
    Shape("Q4_0", "Fp8E4m3", "F32", 320, 512, "columns"),
    Shape("Q8_0", "Q4_0", "F32", 64, 192, "wide"),
    Shape("Q4_0", "Q4_0", "F32", 96, 32, "deterministic"),
    Shape("Mxfp4", "Nvfp4", "F32", 96, 64),
    Shape("Nvfp4", "Mxfp4", "BF16", 64, 160, "prefill"),
    Shape("Q8_0", "Q4_0", "BF16", 128, 128, "stacked"),
    Shape("Fp8E4m3", "Nvfp4", "F16", 64, 256, "stacked columns"),
    Shape("BF16", "BF16", "BF16", 128, 128, "few"),
    Shape("BF16", "F16", "F32", 72, 40, "few"),
    Shape("F16", "PartOfK", "F16", 576, 512, "few"),
    Shape("Q8_0", "Q8_0", "BF16", 128, 128, "few"),
    Shape("Q4_0", "Q4_0", "F32", 96, 96, "few"),
    Shape("Nvfp4", "Int8", "F16", 64, 256, "few"),
    Shape("FromV", "F16", "F32", 72, 72, "prefill"),
    Shape("FromV", "BF16", "BF16", 64, 64, "stacked"),
    Shape("FromV", "Q4_0", "F32", 64, 64, "deterministic"),
    Shape("FromV", "F32", "F32", 40, 40, "cores"),
    Shape("FromV", "Q8_0", "F32", 512, 512, "columns"),
    Shape("FromV", "Nvfp4", "F16", 64, 64, "wide"),
    Shape("FromV", "Q4_0", "F32", 64, 64, "prefill"),
    Shape("Q5_0", "Q5_0", "BF16", 128, 128, "few"),
    Shape("Q5_0", "Q5_0", "F32", 96, 160),
    Shape("Q8_0", "Q5_0", "F16", 64, 32, "few"),
    Shape("Q5_0", "PartOfK", "F32", 96, 64, "deterministic"),
    Shape("Q5_0", "Q4_0", "BF16", 32, 64, "stacked"),
    Shape("FromV", "Q5_0", "F32", 64, 64, "wide"),
]
FROM_V = [shape for shape in SHAPES if shape.k_from_v]
FOLDED = [
    shape
    for shape in SHAPES
    if shape.engine in ("prefill", "stacked columns", "wide") and "Nvfp4" in (shape.k, shape.v)
]
"""Whose rows the engine for many queries decodes times their scales."""
BY_SHARE = [SHAPES[1], SHAPES[9], SHAPES[23], SHAPES[24]]
"""Decoding and prefill, of 16-bit rows and of quantised ones."""
APPENDS = [("F16", "F16", "F32"), ("BF16", "F32", "F16"), ("F32", "F16", "BF16"), ("BF16", "F16", "F32")]
APPENDS += [("Q8_0", "Q4_0", "F32"), ("Fp8E4m3", "F16", "BF16"), ("BF16", "Int8", "F16"), ("F16", "Mxfp4", "F32")]
APPENDS += [("Q5_0", "Q4_0", "BF16")]


def append_kernel(formats: tuple[str, ...]) -> str:
    name = "append_rows" if set(formats) & set(QUANTISED) else "append"
    return f"pagoda::{name}<{', '.join(f'pagoda::{name}' for name in formats)}>"


def compiled(shapes: list[Shape], **options: Any) -> emulator.Library:
    kernels, constants = {}, {}
    for shape in shapes:
        kernels[shape.name] = f"pagoda::attend<{shape.type}>"
        for constant in ("SHARED_BYTES", "THREADS", "PARTIAL"):
            constants[f"{shape.name}_{constant}"] = f"{shape.type}::Shape::{constant}"
    for formats in APPENDS:
        kernels["_".join(formats)] = append_kernel(formats)
    for name in ("Rows", "Plane", "Pages", "Append", "Attend", "Center", "Span", "QueryBlock"):
        constants[f"sizeof_{name}"] = f"sizeof(pagoda::{name})"
    source = "#include <pagoda/append_rows.cuh>\n#include <pagoda/attend.cuh>\n#include <pagoda/center.cuh>"
    return emulator.compile(source, kernels, constants, **options)


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return compiled(SHAPES)


def test_arguments_are_laid_out_as_the_kernels_read_them(library: emulator.Library) -> None:
    for name in ("Rows", "Plane", "Pages", "Append", "Attend", "Center"):
        assert ctypes.sizeof(getattr(arguments, name)) == library.constant(f"sizeof_{name}")
    assert arguments.SPAN.itemsize == library.constant("sizeof_Span")
    assert arguments.QUERY_BLOCK.itemsize == library.constant("sizeof_QueryBlock")


@dataclass
class Span:
    skip: int
    count: int
    offset: int = 0
    sight: Sight = Sight.IN_WINDOW
    start: int = 0
    """Of a span that trails: queries behind this place see it nearer."""
    position: int = 0
    """That its first token was stored with, where keys are made from values."""

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
    """Whole pages, tokens [low, high), that several sequences of one span hold."""

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
    keep: list[Guarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, len(self.sequences)])
        page, heads = self.page_size, self.kv_heads
        # Of the second layer, behind as many bytes of the first.
        k, v = self.shape.k, self.shape.k if self.shape.v_in_k else self.shape.v
        # The rows that are stored: of K and V, of K alone, or of V alone.
        self.kinds = [] if self.shape.k_from_v else [(k, self.shape.dim)]
        self.kinds += [] if self.shape.v_in_k else [(v, self.shape.v_dim)]
        layer_bytes = 0
        for kind, dim in self.kinds:
            layer_bytes = Plane.of(kind, dim, layer_bytes, page, heads).end
        self.block_bytes = 2 * layer_bytes
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
            # What a sequence holds does not depend on the others.
            content = np.random.default_rng([self.seed, index, 1])
            for span, count in zip(sequence.spans, pages[index], strict=True):
                self.write_rows(index, span, page_index, before, content)
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
        self.span_starts = self.filled(np.array(starts, np.int32))
        self.tokens = sum(sequence.new for sequence in self.sequences)
        q_heads = heads * self.group
        q = rng.standard_normal((self.tokens, q_heads, self.shape.dim)).astype(DTYPES[self.shape.q])
        self.q = self.filled(q)
        self.sink_logits = self.filled(rng.normal(0, 2, q_heads).astype(np.float32))

    def place_pages(self, counts: list[int], rng: np.random.Generator) -> None:
        """Gives each page of each sequence a block of its own, anywhere in the arenas."""
        blocks = sum(counts) + 3
        self.arenas = [self.guarded((blocks * self.block_bytes,), np.uint8) for _ in range(2)]
        places = [tier << 30 | block for tier in range(2) for block in range(blocks)]
        order = rng.permutation(len(places))
        self.table = self.guarded((len(self.sequences), max(counts, default=0) + 5), np.uint32)
        self.table.array[:] = NOWHERE
        at = 0
        for row, count in zip(self.table.array, counts, strict=True):
            row[:count] = [places[place] for place in order[at : at + count]]
            at += count

    def write_rows(self, index: int, span: Span, page_index: int, before: int, content: np.random.Generator) -> None:
        """Random rows for a span of a sequence, into its blocks and, as they are stored, into `keys` and `values`."""
        page, keys, values = self.page_size, self.keys[index], self.values[index]
        planes = [self.k_plane, self.v_plane][-len(self.kinds) :]
        for t in range(span.count):
            if self.holder(index, before + t) != index:
                continue
            row = span.skip + t
            tier, block = divmod(int(self.table.array[index, page_index + row // page]), 1 << 30)
            place = self.arenas[tier].array[block * self.block_bytes :]
            rows = [stored(content.standard_normal((self.kv_heads, dim)), kind) for kind, dim in self.kinds]
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
        """Members of a common prefix have the pages of the first of them."""
        for common in self.commons:
            first, *others = common.members
            pages = slice(common.low // self.page_size, common.high // self.page_size)
            tokens = slice(common.low, common.high)
            for other in others:
                self.table.array[other, pages] = self.table.array[first, pages]
                self.keys[other][tokens] = self.keys[first][tokens]
                self.values[other][tokens] = self.values[first][tokens]

    @property
    def set_heads(self) -> int:
        """Query heads of a unit."""
        return self.group // self.sets

    def guarded(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Guarded:
        array = Guarded(shape, dtype)
        self.keep.append(array)
        return array

    def filled(self, values: Array) -> Guarded:
        array = self.guarded(values.shape, values.dtype)
        array.array[...] = values
        return array

    def holder(self, index: int, token: int) -> int:
        """The first of the sequences that hold a token's page."""
        held = [c.members[0] for c in self.commons if index in c.members and c.low <= token < c.high]
        return held[0] if held else index

    def common_work(self, rows: int) -> tuple[Array, Array, Array]:
        """Blocks, prefix and members of what goes over common pages."""
        blocks, prefix = [], [0]
        members: list[int] = []
        tokens = np.cumsum([0, *(sequence.new for sequence in self.sequences)])
        for common in self.commons:
            start = len(members)
            members += [token for m in common.members for token in range(tokens[m], tokens[m + 1])]
            for first in range(start, len(members), rows // self.set_heads):
                queries = min(rows // self.set_heads, len(members) - first)
                position, seen = common.high - 1, (0, common.low, common.high)
                block = (common.members[0], first, queries, position, *seen, 0, 0, first)
                blocks.append(block)
                prefix.append(prefix[-1] + len({t // TILE for t in range(common.low, common.high)}))
        return np.array(blocks, arguments.QUERY_BLOCK), np.array(prefix, np.int32), np.array(members, np.int32)

    def work(self, by_runs: bool, tokens: range, carried: dict[int, int]) -> tuple[Array, Array, Array]:
        """What `pagoda_core::work::WorkList` makes of the batch, as far as a launch goes over some tokens: blocks, prefix,
        rows of parts. carried: the part of each block, by its first query, if an earlier launch has left one."""
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
                blocks.append((index, query, queries, *axis, len(part_rows), len(parts), target))
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
            self.span_starts.address,
            self.spans.address,
        )

    def attend(
        self,
        library: emulator.Library,
        grid: int,
        *,
        division: Division = Division.TILES,
        seed: int = 0,
        stops: Iterable[int] = (),
    ) -> tuple[Array, Array]:
        """Output and log-sum-exp of the kernel. stops: tokens at which one launch stops, and the next goes on."""
        heads = self.kv_heads * self.group
        out = self.guarded((self.tokens, heads, self.shape.v_dim), DTYPES[self.shape.q])
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
            window=1 << 30 if self.window is None else self.window,
            division=division,
            scale=self.shape.dim**-0.5 * (math.log2(math.e) if self.softcap is None else 1 / self.softcap),
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
        slots = 2 * grid if call.division == Division.TILES else int(prefix[-1]) * self.kv_heads * self.sets
        if call.division == Division.UNITS:
            slots, partial = grid, 2 * self.shape.rows * self.shape.v_dim
        call.partials = self.guarded((slots, partial), np.float32).address
        pending = self.filled(np.zeros(len(blocks) * self.kv_heads * self.sets, np.int32))
        call.pending = pending.address
        call.blocks, call.prefix = self.filled(blocks).address, self.filled(prefix).address
        call.block_count = self.filled(np.array([len(blocks)], np.int32)).address
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
                    scores = (turned * k).sum(1) * self.shape.dim**-0.5
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

    def compare(self, library: emulator.Library, grid: int, **options: Any) -> None:
        out, lse = self.attend(library, grid, **options)
        right, right_lse = self.expected()
        # Float queries get float accuracy; 16-bit ones that of their own type.
        tolerance = {"F32": 3e-5, "F16": 2e-3, "BF16": 2e-2}[self.shape.q]
        # To 16-bit queries keys that are made from values are f16.
        of_scores = 4 if self.shape.k_from_v else 10
        np.testing.assert_allclose(out.astype(np.float64), right, rtol=0, atol=tolerance)
        np.testing.assert_allclose(lse, right_lse, rtol=0, atol=max(1e-4, tolerance / of_scores))


def test_what_folds_is_exact_in_16_bits() -> None:
    """Each code of nvfp4 times each scale, as f16 in units of 2^-14 and as bf16: nothing is rounded."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for dtype, unit in ((np.float16, 2.0**-14), (ml_dtypes.bfloat16, 1.0)):
        products = (codes * unit).astype(dtype)[:, None] * scales.astype(dtype)
        assert np.array_equal(products.astype(np.float64), codes[:, None] * scales * unit)


LENGTHS = [one(1), one(15), one(16), one(17), one(63), one(64), one(130, 2), one(200)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_engine_and_head_size(shape: Shape, library: emulator.Library) -> None:
    few = [one(1), one(17), one(130, 2)] if shape.dim > 256 else LENGTHS
    World(shape, few, group=2 if shape.dim > 256 else 3).compare(library, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_soft_caps_and_sinks(shape: Shape, library: emulator.Library) -> None:
    """In every engine, and each way of dividing work: results in one part and in several, with parts in common."""
    group = 2 if shape.dim > 256 else 3
    batch = [one(1), one(150, 2), one(90, 40 if "stacked" in shape.engine else 1)]
    options: dict[str, Any] = {"group": group, "kv_heads": 1, "page_size": 8}
    for softcap, sinks in ((0.7, False), (None, True), (2.0, True)):
        world = World(shape, batch, softcap=softcap, sinks=sinks, window=70, **options)
        world.compare(library, 1)
        world.compare(library, 5)
    world = World(shape, batch, sinks=True, **options)
    for division in (Division.RUNS, Division.UNITS):
        world.compare(library, 2, division=division)
    commons = [Common([1, 2], 0, 32)]
    World(shape, [one(70), one(60), one(50)], softcap=1.0, sinks=True, commons=commons, **options).compare(library, 3)


def test_scores_beyond_a_cap(library: emulator.Library) -> None:
    """What the cap cuts off entirely, and NaN, which it does not."""
    for shape in (SHAPES[0], SHAPES[9], SHAPES[12]):
        world = World(shape, [one(90, 3)], softcap=0.01)
        world.compare(library, 3)
        world.q.array[1, 2] = np.nan
        out, _ = world.attend(library, 3)
        assert np.isnan(out.astype(np.float32)).all(-1).sum() == np.isnan(out.astype(np.float32)).any(-1).sum() == 1


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8], *FROM_V[:2]], ids=lambda shape: shape.name)
def test_queries_next_to_nothing(shape: Shape, library: emulator.Library) -> None:
    """Those that f16 holds only as multiples, by which scores are divided: as all rows that are seen weigh the same."""
    world = World(shape, [one(17, 2), one(70)])
    for head, size in enumerate([0, 1e-38, 1e-30, 1e-20, 1e-10]):
        world.q.array[:, head] *= size
    world.compare(library, 3)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 37, 100])
def test_pages_and_windows(page_size: int, window: int | None, library: emulator.Library) -> None:
    for shape in BY_SHARE:
        batch = [one(300, 3), one(5), one(64, 2), one(129, 70 if shape.rows > 16 else 1)]
        World(shape, batch, page_size=page_size, window=window).compare(library, 7)


@pytest.mark.parametrize("grid", [1, 2, 3, 4, 9, 33, 200])
def test_any_grid_and_any_order(grid: int, library: emulator.Library) -> None:
    """One long sequence among short ones: shares begin and end anywhere, and whoever is last merges."""
    for seed in range(3):
        batch = [one(700), *[one(20 + 7 * i) for i in range(5)]]
        World(SHAPES[1], batch, seed=seed).compare(library, grid, seed=seed)


@pytest.mark.parametrize("rope", [None, (32, False), (16, True), (32, True)])
def test_spans(rope: tuple[int, bool] | None, library: emulator.Library) -> None:
    """Dropped tokens: a sequence of several spans, which begin and end inside pages and have moved."""
    pieces = [Span(0, 21, 500), Span(5, 90, 40), Span(3, 1, 7), Span(0, 70)]
    for shape in BY_SHARE:
        new = 60 if shape.rows > 16 else 4
        batch = [Sequence(pieces, new), one(40), Sequence(pieces[1:], 2)]
        for window in (None, 75):
            World(shape, batch, rope=rope, window=window).compare(library, 6)


@pytest.mark.parametrize("sight", [Sight.ALWAYS, Sight.TRAILING])
@pytest.mark.parametrize("rope", [None, (32, False), (16, True)])
def test_sinks(rope: tuple[int, bool] | None, sight: Sight, library: emulator.Library) -> None:
    """Spans that every query sees, some of them nearer than others; entries before a span whose pages have left."""
    sinks = [Span(0, 21, 500, sight, 60), Span(5, 10, 40, sight, -30)]
    for shape in BY_SHARE:
        new = 60 if shape.rows > 16 else 4
        batch = [one(40), Sequence([*sinks, Span(70, 90)], new), Sequence([sinks[1], Span(0, 50, 7), Span(0, 30)], 2)]
        for window in (None, 25):
            World(shape, batch, rope=rope, window=window).compare(library, 6)


@pytest.mark.parametrize("rope", [None, (24, False), (16, True), (32, True)])
@pytest.mark.parametrize("shape", FROM_V, ids=lambda shape: shape.name)
def test_keys_that_are_made_from_values(shape: Shape, rope: tuple[int, bool] | None, library: emulator.Library) -> None:
    """Rotated by the positions that their tokens came with, wherever these have gone: behind what was dropped, beyond 2^32,
    in spans that every query sees; and whoever shares their pages."""
    if rope and 2 * rope[0] > shape.dim:
        rope = (shape.dim // 2, rope[1])
    pieces = [Span(0, 21, 500, position=7), Span(5, 70, 40, position=5 << 30), Span(9, 30, position=(5 << 30) + 150)]
    sinks = [Span(0, 21, 30, Sight.TRAILING, 60, 4), Span(40, 70, position=25)]
    options: dict[str, Any] = {"rope": rope, "group": 2, "kv_heads": 1 if shape.dim > 256 else 2, "page_size": 8}
    batch = [Sequence(pieces, 20 if shape.rows > 16 else 3), one(40), Sequence(sinks, 2)]
    World(shape, batch, window=60, **options).compare(library, 5)
    commons = [Common([0, 1], 0, 64)]
    World(shape, [one(70), one(66, 2)], commons=commons, softcap=2.0, **options).compare(library, 3, stops=[48])


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
def test_any_group(group: int, library: emulator.Library) -> None:
    for shape in (SHAPES[1], SHAPES[9]):
        World(shape, [one(70, 3), one(100)], group=group, kv_heads=3).compare(library, 4)


@pytest.mark.parametrize(("number", "group", "sets"), [(0, 32, 2), (0, 64, 8), (12, 32, 4), (20, 128, 2), (21, 128, 2)])
def test_more_heads_than_a_unit_has_rows(number: int, group: int, sets: int, library: emulator.Library) -> None:
    """The query heads of a K/V head in several units, in one part and in several, with common pages."""
    shape = SHAPES[number]
    batch = [one(50), one(70, 1 if shape.dim > 256 else 3)]
    options: dict[str, Any] = {"group": group, "sets": sets, "kv_heads": 1 if shape.dim > 256 else 2, "page_size": 8}
    for commons in ([], [Common([0, 1], 0, 24)]):
        for grid in (2, 7):
            World(shape, batch, commons=commons, sinks=True, **options).compare(library, grid, seed=grid)


def test_no_query_at_all(library: emulator.Library) -> None:
    World(SHAPES[1], [one(10, 0), one(70, 2), one(3, 0)]).compare(library, 4)


@pytest.mark.parametrize(
    ("shape", "prefill"),
    [
        (SHAPES[10], Shape("F16", "F16", "F32", 128, 128, "prefill")),
        (Shape("F16", "F16", "F16", 128, 128, "deterministic"), Shape("F16", "F16", "F16", 128, 128, "stacked")),
        (Shape("Q4_0", "Q4_0", "F32", 96, 32, "deterministic"), SHAPES[23]),
        (FROM_V[2], FROM_V[6]),
    ],
)
def test_bits_depend_on_the_sequence_alone(shape: Shape, prefill: Shape, library: emulator.Library) -> None:
    """By runs: another batch, another grid, another order, other places, chunks or one token at a time."""
    pieces = [Span(0, 4200), Span(9, 150)]
    alone = World(shape, [Sequence(pieces, 2)], kv_heads=1, group=2, seed=1)
    out, lse = alone.attend(library, 3, division=Division.RUNS)
    right, _ = alone.expected()
    np.testing.assert_allclose(out, right, rtol=0, atol=3e-5 if shape.q == "F32" else 1e-3)
    for other, division, grid, seed in (
        (shape, Division.RUNS, 1, 2),
        (prefill, Division.RUNS, 5, 3),
        (shape, Division.UNITS, 2, 4),
        (prefill, Division.UNITS, 3, 5),
    ):
        among = World(other, [Sequence(pieces, 2), one(90)], kv_heads=1, group=2, seed=1)
        among.q.array[:2] = alone.q.array
        again, again_lse = among.attend(library, grid, division=division, seed=seed)
        np.testing.assert_array_equal(again[:2], out)
        np.testing.assert_array_equal(again_lse[:2], lse)


@pytest.mark.parametrize("shape", [*BY_SHARE, SHAPES[12]], ids=lambda shape: shape.name)
def test_launches_go_on_where_others_have_stopped(shape: Shape, library: emulator.Library) -> None:
    """Anywhere: inside tiles, of which the others then have no part, inside spans that every query sees, behind windows."""
    sinks = Sequence([Span(0, 21, 0, Sight.ALWAYS), Span(5, 120)], 2)
    batch = [one(300, 60 if shape.rows > 16 else 4), one(90), sinks, one(5)]
    for grid, stops, window in ((1, [64], None), (4, [10, 64, 130, 290], None), (7, [15, 64, 65], 100), (3, [100], 1)):
        World(shape, batch, window=window, sinks=True).compare(library, grid, stops=stops)
    World(shape, batch[:2], commons=[Common([0, 1], 0, 32)]).compare(library, 4, stops=[40, 64])


def test_bits_do_not_depend_on_where_launches_stop(library: emulator.Library) -> None:
    """Between runs."""
    for division in (Division.RUNS, Division.UNITS):
        world = World(SHAPES[10], [one(9000, 2), one(70)], kv_heads=1, group=2)
        out, lse = world.attend(library, 3, division=division)
        right, _ = world.expected()
        np.testing.assert_allclose(out, right, rtol=0, atol=3e-5)
        again, again_lse = world.attend(library, 2, division=division, stops=[4096, 8192], seed=1)
        assert again.tobytes() == out.tobytes()
        assert again_lse.tobytes() == lse.tobytes()


COMMONS = [
    [Common([0, 1, 2, 3, 4], 0, 64)],
    [Common([0, 2, 3], 0, 208)],
    [Common([0, 1, 2, 3, 4], 0, 80), Common([1, 2], 80, 240), Common([3, 4], 80, 96)],
]
"""Of one level, of some sequences only, and as a tree whose borders lie inside tiles."""


@pytest.mark.parametrize("commons", COMMONS)
@pytest.mark.parametrize("shape", [*BY_SHARE, SHAPES[12]], ids=lambda shape: shape.name)
def test_common_pages_are_read_once(commons: list[Common], shape: Shape, library: emulator.Library) -> None:
    """Sequences that share a prefix, a query or a few each: parts of common pages are added to each one's own."""
    batch = [one(300), one(250, 3), one(241), one(260, 2), one(290)]
    for grid in (1, 4, 50):
        World(shape, batch, commons=commons).compare(library, grid, seed=grid)


@pytest.mark.parametrize("grid", [1, 3, 20])
def test_whole_units(grid: int, library: emulator.Library) -> None:
    batch = [one(130, 3), one(5), one(9000), one(64, 2)]
    World(SHAPES[1], batch, group=2, kv_heads=1).compare(library, grid, division=Division.UNITS)


@pytest.mark.parametrize("formats", APPENDS, ids="_".join)
@pytest.mark.parametrize("page_size", [8, 64])
def test_append(formats: tuple[str, str, str], page_size: int, library: emulator.Library) -> None:
    rng = np.random.default_rng(0)
    k_kind, v_kind = formats[:2]
    given = DTYPES[formats[2]]
    quantised = bool(set(formats) & set(QUANTISED))
    tokens, heads, blocks = 37, 3, 9
    dim, v_dim = (96, 64) if quantised else (40, 24)
    k_plane = Plane.of(k_kind, dim, 32, page_size, heads)
    v_plane = Plane.of(v_kind, v_dim, k_plane.end, page_size, heads)
    block_bytes = v_plane.end
    arena = Guarded((blocks, block_bytes), np.uint8)
    # Columns of one array, as a fused projection gives them.
    fused = Guarded((tokens, heads, dim + v_dim + 3), given)
    with np.errstate(over="ignore"):
        fused.array[...] = (rng.standard_normal(fused.array.shape) * 1000).astype(given)
    fused.array[3, 1, 5] = np.nan
    fused.array[4, 1, 6] = np.inf
    fused.array[5, 2, 7] = np.asarray(65519.0).astype(given)
    slots = Guarded(tokens, np.int64)
    slots.array[:] = rng.permutation(blocks * page_size)[:tokens]
    slots.array[[0, 9]] = -1
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
        base=arena.address,
        block_bytes=block_bytes,
        page_shift=int(math.log2(page_size)),
        k_plane=k_plane.argument,
        v_plane=v_plane.argument,
        misfit=misfit.address,
    )
    shared = 3 * 4 * dim if quantised else 0
    library.launch("_".join(formats), 3, 96, call, shared_bytes=shared)
    for array in (arena, fused, slots, misfit):
        array.check()
    right = np.full((blocks, block_bytes), 0xFF, np.uint8)
    for token, slot in enumerate(slots.array):
        for head in range(heads):
            for plane, kind, part in ((k_plane, k_kind, slice(0, dim)), (v_plane, v_kind, slice(dim, dim + v_dim))):
                row = fused.array[token, head, part].astype(np.float32)
                data, scales, _ = stored(row[None], kind)
                if slot >= 0:
                    plane.write(right[slot // page_size], head, slot % page_size, data[0], scales[0])
    wrong = np.flatnonzero(arena.array != right)
    # NaN may carry other bits, but in scales.
    assert len(wrong) <= 4 * (not set(formats[:2]) <= set(QUANTISED)), wrong
    assert misfit.array[0] == 1
    fused.array[3, 1, 5] = fused.array[4, 1, 6] = 1
    misfit.array[:] = 0
    library.launch("_".join(formats), 1, 32, call, shared_bytes=shared)
    assert misfit.array[0] == 0


BROKEN = {
    "no wait for copies": ("tensor_cores.cuh", "copy_wait<STAGES - 2>();", ""),
    "one stage too early": ("tensor_cores.cuh", "copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    "no barrier after copies": ("tensor_cores.cuh", "team_barrier<Shape::WARPS>();", ""),
    "no barrier before the exchange": (
        "tensor_cores.cuh",
        "copy_wait<0>();\n        __syncthreads();",
        "copy_wait<0>();",
    ),
    "no barrier after the exchange": ("tensor_cores.cuh", "give();\n        __syncthreads();", "give();"),
    "no barrier between units": (
        "attend.cuh",
        "__syncthreads();\n        now.at += now.count;",
        "now.at += now.count;",
    ),
    "queries before they are there": (
        "tensor_cores.cuh",
        "copy_queries(span);\n        }\n        __syncthreads();",
        "copy_queries(span);\n        }",
    ),
    "counters stay": ("unit.cuh", "if (last) args.pending[unit] = 0;", ""),
    "rows past the fill": ("ring.cuh", "byte / ROW_BYTES < here.high", "true"),
    "rows past the fill of a whole stage": ("ring.cuh", "high >= rows", "high > 0 * rows"),
    "no mask": ("many_queries.cuh", "if (!seen)", "if (!seen && args.window < 0)"),
    "no mask for few": ("few_queries.cuh", "if (!seen)", "if (!seen && args.window < 0)"),
    "rows of another's tiles": ("ring.cuh", "(walk.tile + tiles) * TILE)", "(walk.tile + tiles + 1) * TILE)"),
    "another page of a stage": ("ring.cuh", "const int first = wanted.first + run;", "const int first = wanted.first;"),
    "the entry of another page": ("ring.cuh", "(first >> shift) % WARP", "((first >> shift) + 1) % WARP"),
    "values of an old maximum": ("many_queries.cuh", "if (__all_sync(~0u, same)) return;", "return;"),
    "values of an old maximum for few": ("few_queries.cuh", "[i % 4] *= decay[", "[i % 4] *= 1.0f + 0.0f * decay["),
    "a maximum that some lanes do not know": (
        "few_queries.cuh",
        "for (int step = 4; step < WARP; step *= 2) highest",
        "for (int step = 4; step < 16; step *= 2) highest",
    ),
    "weights that are not turned": ("few_queries.cuh", "= transpose(turned[i / 2][i % 2]);", "= turned[i / 2][i % 2];"),
    "the first queries twice": (
        "few_queries.cuh",
        "const int row = split * Shape::ROWS + q * 8 + lane % 8;",
        "const int row = split * Shape::ROWS + q * 0 + lane % 8;",
    ),
    "the rows of another head": ("unit.cuh", "return set >> args.set_shift;", "return set;"),
    "no common parts": ("unit.cuh", "i < block().parts", "i < 0"),
    "no sink": ("unit.cuh", "if (args.sinks != nullptr)", "if (false)"),
    "a sink twice": ("unit.cuh", "total += exp2_fast(fmaf(", "total += 2.0f * exp2_fast(fmaf("),
    "a sink in every common part": (
        "unit.cuh",
        "part[DV], part[DV + 1]};",
        "part[DV], part[DV + 1] + exp2_fast(args.sinks[head_of(row)] * LOG2_E - part[DV])};",
    ),
    "a sink in the log-sum-exp": ("unit.cuh", "log2f(sum.total)", "log2f(total)"),
    "the sinks of other heads": ("unit.cuh", "args.sinks[query_head]", "args.sinks[0]"),
    "a cap behind the mask": (
        "many_queries.cuh",
        "if (!whole) mask(scores, note, first);",
        "if (!whole) mask(scores, note, first);\n        if (args.softcap > 0.0f) cap(scores);",
    ),
    "no cap": ("many_queries.cuh", "if (args.softcap > 0.0f) cap(scores);", ""),
    "no cap for few": ("few_queries.cuh", "if (args.softcap > 0.0f) cap<COUNT>(scores);", ""),
    "parts stay behind": ("unit.cuh", "block().target >= 0", "args.members != nullptr"),
    "what every query sees twice": ("tables.cuh", "span.always() ? from : low", "span.always() ? from * 0 : low"),
    "common parts of other queries": ("unit.cuh", "args.part_rows[block().first_part + i]", "0"),
}

BROKEN_CODES = {
    "the scales of other rows": ("quantised.cuh", "scales + i % ROWS * ", "scales + (i % ROWS ^ 1) * "),
    "the scales of other values": ("many_queries.cuh", "block, row + 8)", "block, row)"),
    "the scale of another block": ("many_queries.cuh", "scales(keys, block, ", "scales(keys, 0 * block, "),
    "scales of the rows above": (
        "few_queries.cuh",
        "high.next(scales + 8 * SCALE_BYTES, block)",
        "high.next(scales, block)",
    ),
    "keys of the rows above": (
        "few_queries.cuh",
        "high.next(scales + 8 * K::scale_bytes(D), block)",
        "high.next(scales, block)",
    ),
    "the first scale of a piece": (
        "few_queries.cuh",
        "Format::scale_of(words[at / 4] >> at % 4 * 8)",
        "Format::scale_of(words[0])",
    ),
    "no scales where a span begins": (
        "ring.cuh",
        "(byte + BYTES - 1) / ROW_BYTES >= here.low",
        "byte / ROW_BYTES >= here.low",
    ),
    "no barrier after decoding": ("many_queries.cuh", "team_barrier<Shape::WARPS>();", ""),
    "pieces of another row": ("quantised.cuh", "i / 8 / PIECES * 8 + i % 8", "i / 8 / PIECES * 8 + i % 7"),
    "scales past the fill": ("many_queries.cuh", "!CAREFUL || x != 0.0f", "true"),
    "scales past the fill for few": ("few_queries.cuh", "!CAREFUL || scaled[j] != 0.0f", "true"),
    "elements in another order": ("tensor_cores.cuh", "real ? x[element_at(place)]", "real ? x[place]"),
    "columns in another order": ("many_queries.cuh", "element_at(place) : place", "place : place"),
    "columns in another order for few": ("few_queries.cuh", "column_at(place) : place", "place : place"),
    "halves of bytes": ("quantised.cuh", "step == 0 ? scale : sixteenth", "scale"),
    "values in units": ("many_queries.cuh", "% 2] / unit_of_values<V>();", "% 2];"),
    "values in units for few": ("few_queries.cuh", "% 2] / unit_of_values<V>();", "% 2];"),
    "queries of the row behind": (
        "tensor_cores.cuh",
        "__syncwarp();\n    }\n\n    /// Writes two elements",
        "}\n\n    /// Writes two elements",
    ),
}
"""The same of quantised rows."""

BROKEN_FOLDS = {
    "folded scales of other rows": ("quantised.cuh", "scales + row * Format", "scales + (row ^ 1) * Format"),
    "the folded scale of another step": ("quantised.cuh", "piece * STEPS + step)", "piece * STEPS)"),
    "folded scales past the fill": ("many_queries.cuh", "CAREFUL && !Shape::DecodedV::SCALED", "false"),
    "folded scales past the fill, of one query": ("many_queries.cuh", "(!V::QUANTISED && ", "("),
}
"""The same of rows that are decoded times their scales."""

BROKEN_KEYS = {
    "one position": ("derived.cuh", "position + row", "position"),
    "places of the axis": ("derived.cuh", "args.pages.spans[span].position +", "args.pages.spans[span].before +"),
    "turned back": ("derived.cuh", "x = from * angle.x - y", "x = from * angle.x + y"),
    "half a turn": ("derived.cuh", "parts >> 32", "parts >> 33"),
    "the weight of another": ("derived.cuh", "args.key_weight[second]", "args.key_weight[first]"),
    "elements in order": ("many_queries.cuh", "place_of(e)", "e"),
    "the first scale": ("many_queries.cuh", "e / BLOCK, row", "e / BLOCK / 2, row"),
    "keys in units of values": ("many_queries.cuh", "row) / unit_of_values<V>();", "row);"),
    "no rests of keys": ("many_queries.cuh", "(s == 0 ? Shape::KEY_PARTS : 1)", "1"),
    "no barrier before keys are made": (
        "many_queries.cuh",
        "VALUES_START;\n            team_barrier<Shape::WARPS>();",
        "VALUES_START;",
    ),
    "no barrier behind that": (
        "many_queries.cuh",
        "KEYS_START;\n            team_barrier<Shape::WARPS>();",
        "KEYS_START;",
    ),
    "no zeros behind keys": ("derived.cuh", "i < DEPTH / 2", "i < DIM / 2"),
}
"""The same of keys that are made from values."""


@pytest.mark.parametrize("broken", [*BROKEN, *BROKEN_CODES, *BROKEN_FOLDS, *BROKEN_KEYS])
def test_what_is_broken_is_noticed(broken: str, tmp_path: Path) -> None:
    """Negative controls: each barrier, wait and bound that the kernels have is needed, and the tests see it."""
    name, old, new = (BROKEN | BROKEN_CODES | BROKEN_FOLDS | BROKEN_KEYS)[broken]
    folder = tmp_path / "cuda"
    shutil.copytree(emulator.DEVICE_CODE, folder)
    text = (folder / "pagoda" / name).read_text()
    assert old in text
    (folder / "pagoda" / name).write_text(text.replace(old, new))
    shapes = [SHAPES[1], SHAPES[9]]
    if broken in BROKEN_CODES:
        shapes = [Shape("Q8_0", "Q4_0", "F32", 64, 96), SHAPES[23]]
    elif broken in BROKEN_FOLDS:
        shapes = FOLDED
    elif broken in BROKEN_KEYS:
        shapes = [FROM_V[0], FROM_V[6]]
    library = compiled(shapes, device_code=folder)
    with pytest.raises((AssertionError, emulator.EmulatorError)):
        for seed in range(8):
            for shape in shapes:
                for page_size in (8, 32):
                    commons = [Common([1, 2], 0, 32)]
                    sinks = Sequence([Span(0, 21, 0, Sight.ALWAYS), Span(5, 70, position=400)], 2)
                    batch = [one(300, 40 if broken in BROKEN_KEYS else 5), one(90), one(70, 2), sinks]
                    options: dict[str, Any] = {"softcap": 3.0, "sinks": True, "commons": commons, "group": 4, "sets": 2}
                    options["rope"] = (32, False) if broken in BROKEN_KEYS else None
                    world = World(shape, batch, page_size=page_size, seed=seed, **options)
                    world.compare(library, 3, seed=seed, stops=[64, 130])
