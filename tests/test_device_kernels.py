"""The kernels of cuda/ on the emulator, against formulas in float64."""

from __future__ import annotations

import ctypes
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import pytest
from pagoda.kernels import arguments
from pagoda.kernels.arguments import Division, Sight
from world import TILE, Common, Sequence, Shape, Span, World, check_append, compiled, one

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
    Shape("Q8_0", "Q4_0", "BF16", 128, 128, "deterministic"),
    Shape("F32", "PartOfK", "F32", 320, 256, "cores"),
    Shape("Q8_0", "PartOfK", "F16", 96, 64, "few"),
    Shape("Nvfp4", "PartOfK", "F32", 96, 64, "deterministic"),
    Shape("Q8_0", "Q8_0", "BF16", 512, 256, "few"),
    Shape("Q5_0", "PartOfK", "F16", 96, 64, "few"),
]
FROM_V = [shape for shape in SHAPES if shape.k_from_v]
FOLDED = [
    shape
    for shape in SHAPES
    if shape.engine in ("prefill", "stacked columns", "wide") and "Nvfp4" in (shape.k, shape.v)
]
"""Shapes in which the engine for many queries decodes rows multiplied by their scales."""
BY_SHARE = [SHAPES[1], SHAPES[9], SHAPES[23], SHAPES[24]]
"""Decoding and prefill, with 16-bit and with quantised rows."""
APPENDS = [("F16", "F16", "F32"), ("BF16", "F32", "F16"), ("F32", "F16", "BF16"), ("BF16", "F16", "F32")]
APPENDS += [("Q8_0", "Q4_0", "F32"), ("Fp8E4m3", "F16", "BF16"), ("BF16", "Int8", "F16"), ("F16", "Mxfp4", "F32")]
APPENDS += [("Q5_0", "Q4_0", "BF16"), ("F32", "F32", "F32")]


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return compiled(SHAPES, APPENDS)


def test_arguments_are_laid_out_as_the_kernels_read_them(library: emulator.Library) -> None:
    for name in ("Rows", "Plane", "Pages", "Append", "Attend", "Center"):
        assert ctypes.sizeof(getattr(arguments, name)) == library.constant(f"sizeof_{name}")
    assert arguments.SPAN.itemsize == library.constant("sizeof_Span")
    assert arguments.QUERY_BLOCK.itemsize == library.constant("sizeof_QueryBlock")


def test_what_folds_is_exact_in_16_bits() -> None:
    """Each code of nvfp4 times each scale is exact as f16 in units of 2^-14 and as bf16."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for dtype, unit in ((np.float16, 2.0**-14), (ml_dtypes.bfloat16, 1.0)):
        products = (codes * unit).astype(dtype)[:, None] * scales.astype(dtype)
        assert np.array_equal(products.astype(np.float64), codes[:, None] * scales * unit)


LENGTHS = [one(1), one(15), one(16), one(17), one(63), one(64), one(130, 3), one(200)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_engine_and_head_size(shape: Shape, library: emulator.Library) -> None:
    few = [one(1), one(17), one(130, 2)] if shape.dim > 256 else LENGTHS
    World(shape, few, group=2 if shape.dim > 256 else 3).compare(library, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_soft_caps_and_sinks(shape: Shape, library: emulator.Library) -> None:
    """In every engine and each division of work: results in one part and in several, and with common pages."""
    group = 2 if shape.dim > 256 else 3
    batch = [one(1), one(150, 3), one(90, 40 if "stacked" in shape.engine else 1)]
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
    """Scores at the cap, and NaN, which the cap must let through. Scores far below it, as exact as without."""
    for shape in (SHAPES[0], SHAPES[9], SHAPES[12]):
        World(shape, [one(90, 3)], softcap=1e4).compare(library, 3)
        world = World(shape, [one(90, 3)], softcap=0.01)
        world.compare(library, 3)
        world.q.array[1, 2] = np.nan
        out, _ = world.attend(library, 3)
        assert np.isnan(out.astype(np.float32)).all(-1).sum() == np.isnan(out.astype(np.float32)).any(-1).sum() == 1


class Tanh(ctypes.Structure):
    """The argument of a kernel that computes `count` hyperbolic tangents."""

    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("count", ctypes.c_int))


def test_tanh() -> None:
    """To 5e-7 of itself, never beyond 1, and NaN for NaN."""
    source = """
        #include <pagoda/unit.cuh>
        struct Tanh { const float* x; float* y; int count; };
        __global__ void tanhs(const Tanh args) {
            for (int i = threadIdx.x; i < args.count; i += blockDim.x) args.y[i] = pagoda::tanh_fast(args.x[i]);
        }"""
    sizes = np.concatenate([[0, np.inf], np.geomspace(1e-30, 1e30, 2000), np.linspace(0.01, 12, 20000)])
    x = np.concatenate([sizes, -sizes, [np.nan]]).astype(np.float32)
    y = np.zeros_like(x)
    emulator.compile(source, {"tanhs": "tanhs"}).launch("tanhs", 1, 32, Tanh(x.ctypes.data, y.ctypes.data, len(x)))
    assert np.isnan(y[-1])
    assert np.abs(y[:-1]).max() == 1
    np.testing.assert_allclose(y[:-1], np.tanh(x[:-1].astype(np.float64)), rtol=5e-7)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8], *FROM_V[:2]], ids=lambda shape: shape.name)
def test_queries_next_to_nothing(shape: Shape, library: emulator.Library) -> None:
    """f16 holds such queries only scaled up, and scores are divided by the factor. All visible rows weigh the same. A scale
    of 1e-18 divided by the factor is not 0, which times -inf would be NaN."""
    for softcap, query_size in ((None, 1.0), (2.0, 1.0), (None, 2.0**57)):
        world = World(shape, [one(17, 3), one(70)], softcap=softcap, query_size=query_size)
        for head, size in enumerate([0, 1e-38, 1e-30, 1e-20, 1e-10]):
            world.q.array[:, head] *= size
        world.compare(library, 3)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8], SHAPES[23], FROM_V[0]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("size", [2.0**-56, 2.0**-24, 2.0**24])
def test_queries_of_any_size(shape: Shape, size: float, library: emulator.Library) -> None:
    """Float queries that no f16 is as small or as large as."""
    World(shape, [one(17, 2), one(70)], query_size=size).compare(library, 3)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[9]], ids=lambda shape: shape.name)
def test_a_maximum_that_rises_for_one_query_alone(shape: Shape, library: emulator.Library) -> None:
    """Then weights relative to the one before are beyond f16, and the warp has to notice whose row it is."""
    world = World(shape, [one(300)], group=16, kv_heads=1)
    queries = 6 * world.q.array
    for head in range(16):
        world.q.array[...] = 0
        world.q.array[:, head] = queries[:, head]
        world.compare(library, 1)


@pytest.mark.parametrize("shape", [SHAPES[21], SHAPES[36]], ids=lambda shape: shape.name)
def test_scores_that_are_all_minus_infinity(shape: Shape, library: emulator.Library) -> None:
    """A result is 0 then, as if nothing was seen."""
    world = World(shape, [one(20, 2)], kv_heads=1, group=2)
    for token in range(20):
        world.spoil(token, shape.v_dim + 1, -np.inf)
    world.q.array[..., shape.v_dim + 1] = 1
    out, lse = world.attend(library, 1)
    assert not out.any()
    assert (lse == -np.inf).all()


UNSEEN = [SHAPES[number] for number in (1, 3, 8, 9, 11, 12, 15, 19, 21, 34)]
"""Every engine, over values that may be infinite or NaN; rows of V with an odd number of 8 elements among them."""


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", UNSEEN, ids=lambda shape: shape.name)
def test_what_a_query_does_not_see_may_be_anything(shape: Shape, window: int | None, library: emulator.Library) -> None:
    """Values that other queries of its block see are infinite or NaN: their results are not finite, and its are right."""
    group = 1 if shape.dim > 256 else 3
    new, last = (30, 8) if shape.rows > 16 else (15 // group, shape.v_dim - 1)
    world = World(shape, [one(153, new)], group=group, kv_heads=1, window=window)
    # 152 is in the second half of the rows of a product, the others in the first.
    spoilt = [(152, 16, np.nan), (151, 1, np.inf), (150, 6, -np.inf), (150, 7, np.nan), (149, last, np.nan)]
    if window is not None:
        # Which later queries no longer see.
        spoilt += [(153 - new - 38, 2, np.nan), (153 - new - 37, 3, np.inf)]
    for token, column, number in spoilt:
        # As a key what is infinite makes scores so.
        world.spoil(token, column, np.nan if shape.v_in_k else number)
    with np.errstate(invalid="ignore"):
        right = world.compare(library, 3)
    assert 0.4 < np.isfinite(right).mean() < 1


@pytest.mark.parametrize("shape", UNSEEN, ids=lambda shape: shape.name)
def test_the_first_of_two_queries_does_not_see_the_second(shape: Shape, library: emulator.Library) -> None:
    """Nor its value, which is NaN. What both see is NaN in a result however light it is."""
    world = World(shape, [one(40, 2)], group=4, kv_heads=1)
    world.q.array[...] *= 4
    world.spoil(39, 1, np.nan)
    if not shape.v_in_k:
        for token in range(8):
            world.spoil(token, 8 + token, np.nan)
    world.compare(library, 1)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 37, 100])
def test_pages_and_windows(page_size: int, window: int | None, library: emulator.Library) -> None:
    for shape in [*BY_SHARE, SHAPES[12]]:
        # With a window of 37 the last two see from places 65 and 64 on: one row behind the border of a tile, and on it.
        batch = [one(300, 3), one(5), one(64, 2), one(129, 70 if shape.rows > 16 else 1), one(102), one(102, 2)]
        World(shape, batch, page_size=page_size, window=window).compare(library, 7)


@pytest.mark.parametrize("grid", [1, 2, 3, 4, 9, 33, 200])
def test_any_grid_and_any_order(grid: int, library: emulator.Library) -> None:
    """One long sequence among short ones: shares begin and end anywhere, and the last thread block merges."""
    for seed in range(3):
        batch = [one(700), *[one(20 + 7 * i) for i in range(5)]]
        World(SHAPES[1], batch, seed=seed).compare(library, grid, seed=seed)


def test_more_parts_than_a_thread_reads_at_once(library: emulator.Library) -> None:
    """A thread asks for 17 parts at a time when it merges them."""
    World(SHAPES[1], [one(2300)], kv_heads=1, group=1).compare(library, 40)


def test_more_blocks_of_queries_than_a_warp_has_lanes(library: emulator.Library) -> None:
    """Lanes look at every second or third block of the list, and then at those between."""
    for count in (33, 70):
        World(SHAPES[1], [one(1 + 3 * i) for i in range(count)], kv_heads=1, group=1, sets=1).compare(library, 11)


FAR = (1 << 30) + 4096
"""So many bytes apart, the third and the fifth thing lie beyond what 31 and 32 bits count."""


@pytest.mark.parametrize("head_pitch", [0, 2 * FAR])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[9], SHAPES[12]], ids=lambda shape: shape.name)
def test_pages_and_queries_far_apart(shape: Shape, head_pitch: int, library: emulator.Library) -> None:
    """Queries and results of tokens, or of heads: then one stride alone is beyond 31 bits."""
    group = 3 if head_pitch else 1
    world = World(shape, [one(200, 5)], page_size=64, pitch=FAR, head_pitch=head_pitch, kv_heads=1, group=group, seed=1)
    assert {2, 4} <= set((world.table.array[0, :4] % (1 << 30)).tolist())
    world.compare(library, 2)


@pytest.mark.parametrize("rope", [None, (32, False), (16, True), (32, True)])
def test_spans(rope: tuple[int, bool] | None, library: emulator.Library) -> None:
    """After dropped tokens a sequence has several spans, which begin and end inside pages and have moved. The table's entries
    of pages that have left point nowhere."""
    pieces = [Span(0, 21, 500), Span(5, 90, 40), Span(18, 11, 500), Span(3, 1, 7), Span(1, 70)]
    for shape in [*BY_SHARE, SHAPES[12]]:
        new = 60 if shape.rows > 16 else 4
        batch = [Sequence(pieces, new), one(40), Sequence(pieces[1:], 2)]
        for window in (None, 75):
            World(shape, batch, rope=rope, window=window).compare(library, 6)


@pytest.mark.parametrize("sight", [Sight.ALWAYS, Sight.TRAILING])
@pytest.mark.parametrize("rope", [None, (32, False), (16, True)])
def test_sinks(rope: tuple[int, bool] | None, sight: Sight, library: emulator.Library) -> None:
    """Spans that every query sees, some nearer than they are; table entries before a span whose pages have left."""
    sinks = [Span(0, 21, 500, sight, 60), Span(5, 10, 40, sight, -30)]
    for shape in BY_SHARE:
        new = 60 if shape.rows > 16 else 4
        batch = [one(40), Sequence([*sinks, Span(70, 90)], new), Sequence([sinks[1], Span(0, 50, 7), Span(0, 30)], 2)]
        for window in (None, 25):
            World(shape, batch, rope=rope, window=window).compare(library, 6)
        # A span whose offset is the number of the angles of the one before, if that trails.
        world = World(shape, [Sequence([Span(0, 21, 2, sight, 60), Span(5, 70, 2)], new)], rope=rope)
        assert (world.spans.array["offset"] == 2).all()
        world.compare(library, 1)


@pytest.mark.parametrize("rope", [None, (24, False), (16, True), (32, True)])
@pytest.mark.parametrize("shape", FROM_V, ids=lambda shape: shape.name)
def test_keys_that_are_made_from_values(shape: Shape, rope: tuple[int, bool] | None, library: emulator.Library) -> None:
    """They are rotated by their tokens' original positions, wherever the tokens have moved: after dropped ones, beyond 2^32,
    in spans that every query sees, and in shared pages."""
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
    """The query heads of a K/V head take several units; results in one part and in several, also with common pages."""
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
        (Shape("Q8_0", "Q4_0", "BF16", 128, 128, "deterministic"), Shape("Q8_0", "Q4_0", "BF16", 128, 128, "stacked")),
        (FROM_V[2], FROM_V[6]),
    ],
)
def test_bits_depend_on_the_sequence_alone(shape: Shape, prefill: Shape, library: emulator.Library) -> None:
    """Divided by runs: not on the batch, the grid, the order, the places of pages, or the engine."""
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


@pytest.mark.parametrize("window", [None, 200, 100])
def test_runs_of_several_spans(window: int | None, library: emulator.Library) -> None:
    """A span that ends where a run does, spans before the window, which have no runs, and a window of few tiles in two
    runs."""
    batch = [Sequence([Span(0, 4096), Span(9, 150), Span(0, 70)], 2), one(40), one(4200)]
    world = World(SHAPES[10], batch, kv_heads=1, group=1, window=window)
    for division in (Division.RUNS, Division.UNITS):
        world.compare(library, 2, division=division)


@pytest.mark.parametrize("shape", [*BY_SHARE, SHAPES[12]], ids=lambda shape: shape.name)
def test_launches_go_on_where_others_have_stopped(shape: Shape, library: emulator.Library) -> None:
    """Anywhere: inside tiles, inside spans that every query sees, after windows."""
    sinks = Sequence([Span(0, 21, 0, Sight.ALWAYS), Span(5, 120)], 2)
    batch = [one(300, 60 if shape.rows > 16 else 4), one(90), sinks, one(5)]
    for grid, stops, window in ((1, [64], None), (4, [10, 64, 130, 290], None), (7, [15, 64, 65], 100), (3, [100], 1)):
        World(shape, batch, window=window, sinks=True).compare(library, grid, stops=stops)
    World(shape, batch[:2], commons=[Common([0, 1], 0, 32)]).compare(library, 4, stops=[40, 64])


def test_bits_do_not_depend_on_where_launches_stop(library: emulator.Library) -> None:
    """If they stop between runs."""
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
"""One level, some of the sequences only, and a tree with borders inside tiles."""


@pytest.mark.parametrize("commons", COMMONS)
@pytest.mark.parametrize("shape", [*BY_SHARE, SHAPES[12]], ids=lambda shape: shape.name)
def test_common_pages_are_read_once(commons: list[Common], shape: Shape, library: emulator.Library) -> None:
    """Sequences that share a prefix, with one query or a few each: parts of common pages are merged with their own."""
    batch = [one(300), one(250, 3), one(241), one(260, 2), one(290)]
    for grid in (1, 4, 50):
        World(shape, batch, commons=commons).compare(library, grid, seed=grid)


@pytest.mark.parametrize("shape", [*BY_SHARE, SHAPES[12]], ids=lambda shape: shape.name)
def test_sums_are_put_aside(shape: Shape, library: emulator.Library) -> None:
    """After every tile of a team or every second one, in units that a thread block does alone, ends or begins."""
    batch = [one(300), one(700, 20 if shape.rows > 16 else 2), one(5), one(260, 2)]
    for grid, stretch in ((1, 1), (3, 2), (7, 1)):
        World(shape, batch, sinks=True).compare(library, grid, stretch=stretch, seed=grid)
        World(shape, batch, group=2, window=190).compare(library, grid, stretch=stretch, stops=[130, 450], seed=grid)
    commons = [Common([0, 1, 3], 0, 208)]
    World(shape, batch, commons=commons).compare(library, 2, stretch=1)
    # Also where the next tile is of a span that has moved by more or less.
    moved = Sequence([Span(0, 64, 500), Span(0, 60, 40), Span(5, 70)], 20 if shape.rows > 16 else 2)
    World(shape, [moved, one(90)], rope=(16, True)).compare(library, 2, stretch=1)


def test_long_sums_lose_little(library: emulator.Library) -> None:
    """Tensor cores truncate sums: the loss grows with the number of rows that are added up at once."""
    world = World(SHAPES[8], [one(16384)], kv_heads=1, group=1, mean=1.0)
    right, _ = world.expected()

    def lost(stretch: int) -> float:
        return float(np.abs(world.attend(library, 1, stretch=stretch)[0] / right - 1).max())

    assert lost(16) < 16 * TILE * 1.4e-8 < 1e-4 < lost(256)


@pytest.mark.parametrize("grid", [1, 3, 20])
def test_whole_units(grid: int, library: emulator.Library) -> None:
    batch = [one(130, 3), one(5), one(9000), one(64, 2)]
    World(SHAPES[1], batch, group=2, kv_heads=1).compare(library, grid, division=Division.UNITS)


@pytest.mark.parametrize("formats", APPENDS, ids="_".join)
@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_append(formats: tuple[str, str, str], page_size: int, library: emulator.Library) -> None:
    check_append(formats, page_size, library)


@pytest.mark.parametrize("head_pitch", [0, 2 * FAR])
@pytest.mark.parametrize("formats", [APPENDS[0], APPENDS[4]], ids="_".join)
def test_append_rows_far_apart_to_pages_far_apart(
    formats: tuple[str, str, str], head_pitch: int, library: emulator.Library
) -> None:
    """Rows of tokens, or of heads."""
    check_append(formats, 8, library, pitch=FAR // 2, head_pitch=head_pitch)


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
    "no mask": ("many_queries.cuh", "row >= seen.y)", "row >= seen.y + 4096)"),
    "no mask for few": ("few_queries.cuh", "row >= seen.y)", "row >= seen.y + 4096)"),
    "rows of another's tiles": ("ring.cuh", "(walk.tile + tiles) * TILE)", "(walk.tile + tiles + 1) * TILE)"),
    "another page of a stage": ("ring.cuh", "const int first = wanted.first + run;", "const int first = wanted.first;"),
    "the entry of another page": ("ring.cuh", "(first >> shift) % WARP", "((first >> shift) + 1) % WARP"),
    "values of an old maximum": ("many_queries.cuh", "values[r / 2][n][r % 2 * 2] *= decay[r];", ""),
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
    "nothing put aside": ("unit.cuh", "if (begun) {", "if (begun && args.stretch > 1) {"),
    "maxima before sums were read": (
        "unit.cuh",
        "// Not before all threads have read what sums of a row were relative to.\n        __syncthreads();",
        "",
    ),
    "what a unit begins with in every part": (
        "unit.cuh",
        "} else if (whole) {",
        "} else if (whole || args.stretch > 0) {",
    ),
    "sums of two units in one place": ("attend.cuh", "block_here()) + now.begins", "block_here())"),
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
    "elements in another order": ("tensor_cores.cuh", "place_of(first + i)", "first + 2 * i"),
    "columns in another order": ("many_queries.cuh", "element_at(place) : place", "place : place"),
    "columns in another order for few": ("few_queries.cuh", "column_at(place) : place", "place : place"),
    "halves of bytes": ("quantised.cuh", "step == 0 ? scale : sixteenth", "scale"),
    "values in units": ("many_queries.cuh", "% 2] / unit_of_values<V>();", "% 2];"),
    "values in units for few": ("few_queries.cuh", "% 2] / unit_of_values<V>();", "% 2];"),
}
"""The same for quantised rows."""

BROKEN_FOLDS = {
    "folded scales of other rows": ("quantised.cuh", "scales + row * Format", "scales + (row ^ 1) * Format"),
    "the folded scale of another step": ("quantised.cuh", "piece * STEPS + step)", "piece * STEPS)"),
    "folded scales past the fill": ("many_queries.cuh", "CAREFUL && !Shape::DecodedV::SCALED", "false"),
    "folded scales past the fill, of one query": ("many_queries.cuh", "(!V::QUANTISED && ", "("),
}
"""The same for rows that are decoded multiplied by their scales."""

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
"""The same for keys that are derived from values."""


@pytest.mark.parametrize("broken", [*BROKEN, *BROKEN_CODES, *BROKEN_FOLDS, *BROKEN_KEYS])
def test_what_is_broken_is_noticed(broken: str, tmp_path: Path) -> None:
    """Negative controls: each barrier, wait and bound in the kernels is needed, and the tests notice its absence."""
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
    # The first shape reveals most defects, so the second is compiled only when needed.
    library_of = cache(lambda shape: compiled([shape], [], device_code=folder, optimise="-O0"))
    for seed, shape, page_size in product(range(8), shapes, (8, 32)):
        library = library_of(shape)
        commons = [Common([1, 2], 0, 32)]
        sinks = Sequence([Span(0, 21, 0, Sight.ALWAYS), Span(5, 70, position=400)], 2)
        batch = [one(300, 40 if broken in BROKEN_KEYS else 5), one(90), one(70, 2), sinks]
        options: dict[str, Any] = {"softcap": 3.0, "sinks": True, "commons": commons, "group": 4, "sets": 2}
        options["rope"] = (32, False) if broken in BROKEN_KEYS else None
        world = World(shape, batch, page_size=page_size, seed=seed, **options)
        try:
            world.compare(library, 3, seed=seed, stops=[64, 130], stretch=1 if seed % 2 else 1 << 30)
        except (AssertionError, emulator.EmulatorError):
            return
    pytest.fail("nothing is noticed")
