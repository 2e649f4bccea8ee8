"""The kernels of cuda/ as compiled by NVRTC, instruction by instruction, against formulas in float64.

tests/test_device_kernels.py covers the corner cases, from source. This file covers the assembly in the sources, CUDA's
headers and what the compiler makes of both. Shared memory is watched for races, as by compute-sanitizer's racecheck on
a GPU, and for bank conflicts of matrix rows.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import emulator
import pytest
from emulator import EmulatorError, ptx
from pagoda.kernels.arguments import Division, Sight
from test_device_kernels import APPENDS, LENGTHS, SHAPES
from world import Common, Sequence, Shape, Span, World, check_append, compiled, one

AT_ONCE = {ptx.ARCH: (1, 9, 18, 19, 30, 38, 46, 54), "compute_120": (13, 24, 34)}
"""Indices of shapes by architecture: from compute_100 on NVRTC emits other instructions. They cover every engine and most
formats; compiling all shapes takes minutes."""


def batch(shape: Shape) -> list[Sequence]:
    """Sequences of one span and of several, with spans that have moved and spans that every query sees."""
    pieces = [Span(0, 21, 500, position=7), Span(5, 70, 40, position=5 << 30), Span(3, 100, position=(5 << 30) + 150)]
    sinks = Sequence([Span(0, 21, 30, Sight.TRAILING, 60, 4), Span(5, 70, position=400)], 2)
    return [one(200, 5), one(90), one(70, 2), sinks, Sequence(pieces, 40 if shape.rows > 16 else 4)]


def check(shape: Shape, library: emulator.Library) -> None:
    """Uses every feature of a kernel, over few tokens."""
    options: dict[str, Any] = {"rope": (min(32, shape.dim // 2), False), "page_size": 8}
    options |= {"group": 4, "sets": 2, "kv_heads": 1 if shape.dim > 256 else 2}
    commons = [Common([1, 2], 0, 32)]
    world = World(shape, batch(shape), softcap=3.0, sinks=True, commons=commons, **options)
    world.compare(library, 3, stops=[64, 130])
    World(shape, batch(shape), window=37, **options).compare(library, 5, stretch=1)
    for division in (Division.RUNS, Division.UNITS):
        World(shape, batch(shape)[:2], **options).compare(library, 2, division=division)


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        pytest.param(arch, shape, id=f"{arch}-{shape.name}", marks=[] if number in numbers else pytest.mark.long)
        for arch, numbers in AT_ONCE.items()
        for number, shape in enumerate(SHAPES)
    ],
)
def test_attention(arch: str, shape: Shape) -> None:
    library = compiled([shape], [], ptx.compile, arch=arch)
    World(shape, LENGTHS[:3] if shape.dim > 256 else LENGTHS, group=2).compare(library, 5)
    check(shape, library)


def test_teams_that_go_on_with_their_queries_have_their_own_pads() -> None:
    """No barrier of the thread block separates the writing of the zeros after short K rows from the reading."""
    shape = SHAPES[35]
    library = compiled([shape], [], ptx.compile)
    World(shape, [one(900)], group=2, kv_heads=1).compare(library, 1, stretch=1)


@pytest.mark.parametrize("arch", AT_ONCE)
def test_append(arch: str) -> None:
    library = compiled([], APPENDS, ptx.compile, arch=arch)
    for formats in APPENDS:
        for page_size in (8, 64, 256):
            check_append(formats, page_size, library)


BROKEN = {
    "halves of b are exchanged": ("machine.cuh", r"\{%8, %9\}", "{%9, %8}"),
    "rows and columns are exchanged": ("machine.cuh", r"x4\.trans", "x4"),
    "copies of what is not there": ("machine.cuh", "16, %2;", "16, 16;"),
    "rows in the same banks": ("shared_rows.cuh", r"TURNS = .*;", "TURNS = 1;"),
    "no barrier of a warp after copies": ("tensor_cores.cuh", r"team_barrier<Shape::WARPS>\(\);", ""),
    "no barrier before results": ("tensor_cores.cuh", r"(copy_wait<0>\(\);)\s*__syncthreads\(\);", r"\1"),
    "no barrier behind results": ("tensor_cores.cuh", r"(give\(\);)\s*__syncthreads\(\);", r"\1"),
    "no barrier before queries": ("tensor_cores.cuh", r"(load_queries\(.*\{)\s*__syncthreads\(\);", r"\1"),
    "no barrier before parts are published": ("unit.cuh", r"(is_last\(.*\{)\s*__syncthreads\(\);", r"\1"),
    "parts are published to nobody": ("machine.cuh", r"atom\.acq_rel", "atom.relaxed"),
}
"""Patterns in the sources and their replacements: defects that kernels compiled from source show never or only sometimes."""


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_is_noticed(broken: str, tmp_path: Path) -> None:
    name, pattern, new = BROKEN[broken]
    folder = tmp_path / "cuda"
    shutil.copytree(emulator.DEVICE_CODE, folder)
    text = (folder / "pagoda" / name).read_text()
    assert re.search(pattern, text)
    (folder / "pagoda" / name).write_text(re.sub(pattern, new, text))
    # Queries that are already in registers cannot be overwritten.
    shape = SHAPES[38 if broken == "no barrier before queries" else 1]
    library = compiled([shape], [], ptx.compile, device_code=folder)
    with pytest.raises((AssertionError, EmulatorError)):
        check(shape, library)
