"""Pages, in memory and on disk, read with NumPy as docs/layout.md describes them, against what was appended."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror import layer
from pagoda import _core, formats
from pagoda.geometry import Geometry, core_layers, formats_stored, group_layers, tier_memory
from pagoda.outliers import Outliers
from pagoda.presets import PRESETS
from pagoda.retention import keeps_by_layer

Array = npt.NDArray[Any]

NEAR = {"fp8_e4m3": 0.04, "int8": 0.01, "q8_0": 0.01, "q5_0": 0.08, "q4_0": 0.15, "mxfp4": 0.3, "nvfp4": 0.2}
"""Largest error of a row in a format, relative to the row's length."""


def rotated_back(rows: Array) -> Array:
    """Undoes the rotation of stored rows."""
    dim = rows.shape[-1]
    z = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ z >> np.uint64(31)) & np.uint64(1)
    size = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rows.reshape(*rows.shape[:-1], -1, size) @ matrix / np.sqrt(size)
    return np.asarray(np.where(odd, -1, 1) * blocks.reshape(rows.shape))


@pytest.mark.parametrize(("name", "dim"), [*((name, 96) for name in NEAR), ("int8", 80), ("q4_0", 128), ("q8_0", 64)])
def test_rows_are_found_in_pages_centred_and_rotated(name: str, dim: int) -> None:
    """Two layers in a block, rows head by head, scales after the rows of all heads."""
    rng = np.random.default_rng(5)
    heads, page_size, tokens = 3, 16, 40
    spec = pagoda.ModelSpec([layer(num_q_heads=heads, num_kv_heads=heads, head_dim=dim)] * 2)
    centers: list[Array] = [rng.normal(0, 9, (heads, dim)).astype(np.float32) for _ in range(2)]
    given = rng.standard_normal((2, 2, tokens, heads, dim), np.float32)
    given[:, 0] += np.array(centers)[:, None]
    options: dict[str, Any] = {"center": centers, "rotate": True, "device_memory": "1MiB", "host_memory": 0}
    with (
        pagoda.Cache(spec, page_size=page_size, device="cpu", k_dtype=name, v_dtype=name, **options) as cache,
        cache.step([cache.create()], [tokens]) as step,
    ):
        for index in range(2):
            step.append(index, *given[index])
        (size,) = cache.stats().block_bytes
        pages = [np.frombuffer(ctypes.string_at(int(at), size), np.uint8) for at in step.table(1).pointers[0]]
    row, scales = formats.FORMATS[name].row_bytes(dim), formats.FORMATS[name].scales_bytes(dim)
    count = heads * page_size
    for page, start in zip(pages, range(0, tokens, page_size), strict=True):
        at = 0
        for index in range(2):
            for which, center in enumerate([centers[index], np.zeros(dim)]):
                rows = page[at : at + count * row].reshape(count, row)
                at += -(-count * row // 16) * 16
                behind = page[at : at + count * scales].reshape(count, scales)
                at += -(-count * scales // 16) * 16
                stored = _core.decode_rows(rows, behind, name, dim).reshape(heads, page_size, dim).swapaxes(0, 1)
                part = given[index, which, start : start + page_size]
                read = rotated_back(stored[: len(part)]) + center
                error = np.linalg.norm(read - part, axis=-1) / np.linalg.norm(part - center, axis=-1)
                assert error.max() < NEAR[name]
        assert at == size


class Words:
    """Bytes of a file, read in order."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def word(self) -> int:
        return int(self.take("Q")[0])


def lines_of(index: Words) -> Iterator[bytes]:
    """The bodies of all lines; checksums have their own tests."""
    while index.at < len(index.data):
        size, _, _ = index.take("IIQ")
        yield index.take(f"{size}s")[0]
        index.word()


def kept_rows(
    folder: Path, key: str, page_size: int, groups: list[list[int]]
) -> tuple[int, bytes, list[dict[int, bytes]]]:
    """The sequence kept under a key: tokens, `meta`, and the bytes of K and V of each layer by position. Layers have one head
    and f32 rows, of the same length for K and V."""
    index, file = Words((folder / "index").read_bytes()), (folder / "pages").read_bytes()
    magic, version, numbers = index.take("8sII")
    assert (magic, version) == (b"PAGODAIX", 2)
    index.take("16sQQI")
    extent, segment, *rest = index.take(f"{numbers}Q")
    index.word()
    for line in lines_of(index):
        body = Words(line)
        kind, size = body.take("II")
        count, _ = body.take("II") if kind == 1 else (0, 0)
        if body.take(f"{size}s")[0] == key.encode():
            places, found = iter([body.take("IIQQ") for _ in range(count)]), body
    tokens, group_count = found.take("QQ")
    assert group_count == len(groups)
    result: list[dict[int, bytes]] = [{} for layers in groups for _ in layers]
    for group, layers in enumerate(groups):
        assert rest.pop(0) == len(layers)
        sizes = [rest.pop(0) for _ in layers]
        block_bytes = sum(sizes)
        slots = extent // block_bytes
        _, _, span_count, entries = found.take("QQQQ")
        spans = [found.take("QQQQ") for _ in range(span_count)]
        pages: list[tuple[int, list[bytes]] | None] = []
        for code in found.take(f"{entries}Q"):
            if code == 0:
                pages.append(None)
                continue
            group_of_page, block, generation, _ = next(places)
            number = block * block_bytes // extent
            slot = block - -(-number * extent // block_bytes)
            header = file[number * segment + slot * 4096 :][:64]
            assert struct.unpack_from("<8sII", header) == (b"PAGODAPG", 2, group)
            assert struct.unpack_from("<IIQQ", header, 32) == (block, len(layers), generation, block_bytes)
            assert group_of_page == group
            begin, parts = number * segment + slots * 4096, []
            for size in sizes:
                room = -(-size // 4096) * 4096
                parts.append(file[begin + slot * room :][:size])
                begin += slots * room
            pages.append((page_size if code == 1 else code - 2, parts))
        for first, skip, count, position in spans:
            for token in range(count):
                page, row = pages[first + (skip + token) // page_size], (skip + token) % page_size
                assert page is not None, "a token of a page that has left"
                assert row < page[0], "a token behind what is filled"
                for at, part in zip(layers, page[1], strict=True):
                    half = len(part) // 2
                    bytes_of_row = half // page_size
                    k, v = (part[start + row * bytes_of_row :][:bytes_of_row] for start in (0, half))
                    result[at][position + token] = k + v
    assert next(places, None) is None
    return tokens, found.data[found.at :], result


@pytest.mark.parametrize("retention", [None, pagoda.SinkWindow(sinks=11, window=20, positions="cache")])
def test_a_kept_sequence_is_read_from_its_files(tmp_path: Path, retention: pagoda.SinkWindow | None) -> None:
    """With dropped tokens, windows that pages have left and blocks of three sizes, after the cache is closed."""
    rng, page_size, tokens = np.random.default_rng(6), 8, 90
    shape: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "rope": pagoda.Rope()}
    layers = [
        layer(head_dim=dim, window=window, **shape) for dim, window in ((32, None), (24, 17), (32, None), (40, None))
    ]
    spec = pagoda.ModelSpec(layers)
    memory: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0, "disk_memory": "64MiB"}
    options: dict[str, Any] = {"k_dtype": "f32", "v_dtype": "f32", "disk": tmp_path, "resume": True, **memory}
    given = [rng.standard_normal((tokens, 2, 1, one.head_dim), np.float32) for one in layers]
    with pagoda.Cache(spec, page_size=page_size, device="cpu", retention=retention, **options) as cache:
        sequence = cache.create()
        for start, stop in ((0, 30), (30, 70), (70, 90)):
            if start == 30:
                sequence.drop(4, 9)
            with cache.step([sequence], [stop - start]) as step:
                assert step.positions[0] == start
                for index, rows in enumerate(given):
                    step.append(index, rows[start:stop, 0], rows[start:stop, 1])
            cache.save(sequence, "some", meta=b"%d tokens" % stop)
        cache.save(sequence, "other")
        cache.forget("other")
    length, meta, found = kept_rows(tmp_path, "some", page_size, [[0, 2], [1], [3]])
    assert (length, meta) == (tokens - 5, b"90 tokens")
    everything = {*range(4), *range(9, tokens)}
    for index, one in enumerate(layers):
        assert found[index] == {at: given[index][at].tobytes() for at in found[index]}
        if one.window is None and retention is None:
            assert set(found[index]) == everything
        else:
            sinks, window = (0, one.window) if one.window is not None else (11, 20)
            kept = sorted(everything)
            assert {*kept[:sinks], *kept[-window:]} <= set(found[index]) < everything


def test_where_the_layers_of_a_block_lie() -> None:
    """In 16 bits, pages of 16 tokens: full layers, one that reads the first, a windowed one, and one with V in rows of K."""
    full = pagoda.AttentionLayer(2, 2, 64)
    reader, windowed = replace(full, kv_owner=0, scale=0.5), pagoda.AttentionLayer(2, 2, 32, window=40)
    spec = pagoda.ModelSpec([full, windowed, reader, full, pagoda.AttentionLayer(2, 1, 64, 32, v_alias=True)])
    outliers = Outliers(None, False, 5, deterministic=False)
    layers = core_layers(spec, [("f16", "f16")] * 5, outliers, keeps_by_layer(spec, None, 16), None)
    assert [layer["scale"] for layer in layers] == [1 / 8, pytest.approx(32**-0.5), 0.5, 1 / 8, 1 / 8]
    geometry = Geometry(layers, 16)
    assert [layout.block_bytes for layout in geometry.layouts] == [2 * 8192, 4096, 2048]
    assert geometry.layer_bytes == [8192, 4096, 2048]
    starts = [(run.start, run.bytes) for run in geometry.runs]
    assert starts == [(0, 8192), (0, 4096), (0, 8192), (8192, 8192), (0, 2048)]


def test_groups_have_a_limit() -> None:
    layers = [pagoda.AttentionLayer(1, 1, 8, window=window) for window in range(1, 66)]
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0, "threads": 1}
    pagoda.Cache(pagoda.ModelSpec(layers[:64]), **options).close()
    with pytest.raises(pagoda.InvalidArgument, match=r"^spec = layers of 65 shapes, windows and formats: at most 64$"):
        pagoda.Cache(pagoda.ModelSpec(layers), **options)


def test_v_in_rows_of_k_has_their_format() -> None:
    layer = pagoda.AttentionLayer(4, 1, 64, 40, v_alias=True)
    assert formats_stored(0, layer, "f16", "q8_0") == ("f16", "q8_0")
    with pytest.raises(pagoda.InvalidArgument, match=r"^layers\[3\]\.v_head_dim = 40: a multiple of 32, for q8_0"):
        formats_stored(3, layer, "q8_0", "f16")


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_loses_memory_at_the_borders_of_extents(name: str, dtype: str) -> None:
    spec = pagoda.ModelSpec.preset(name)
    groups = group_layers(spec, [(dtype, dtype)] * len(spec.layers))
    layers = [
        layer.bytes_per_token(dtype, dtype) if isinstance(layer, pagoda.AttentionLayer) else 0 for layer in spec.layers
    ]
    sizes = [64 * sum(layers[index] for index in group) for group in groups]
    budget, extent = tier_memory("device_memory", 8 * GIB, sizes, needed=True)
    assert (budget, [extent % size for size in sizes]) == (8 * GIB, [0] * len(sizes))
    assert extent * 8 * len(sizes) <= budget


@pytest.mark.parametrize(
    ("sizes", "budget", "extent"),
    [
        ([4 << 10], GIB, 32 * MIB),
        ([3 * MIB], GIB, 30 * MIB),
        ([40 * MIB], GIB, 40 * MIB),
        # Eight extents for each group.
        ([MIB], 64 * MIB, 8 * MIB),
        ([MIB, MIB], 64 * MIB, 4 * MIB),
        # A multiple of all sizes, up to four times as large.
        ([6 * MIB, 4 * MIB], GIB, 36 * MIB),
        ([9 * MIB, 8 * MIB], 2 * GIB, 72 * MIB),
        ([4 * MIB, 31 * MIB], 2 * GIB, 124 * MIB),
        ([8 * MIB, 31 * MIB], 8 * GIB, 8 * 31 * MIB),
        ([9 * MIB, 31 * MIB], 8 * GIB, 2 * 31 * MIB),
        # Gemma-3-27B: 130 MiB fit eight times for each group, or they do not.
        ([26 * MIB, 5 * MIB], 2080 * MIB, 130 * MIB),
        ([26 * MIB, 5 * MIB], 2080 * MIB - 1, 52 * MIB),
    ],
)
def test_sizes_of_extents(sizes: list[int], budget: int, extent: int) -> None:
    assert tier_memory("device_memory", budget, sizes, needed=True) == (budget, extent)


@given(
    sizes=st.lists(st.integers(1, 40).map(lambda size: size * MIB), min_size=1, max_size=4),
    more=st.integers(0, 4 * GIB),
)
def test_every_extent_has_room_for_a_block_of_any_group(sizes: list[int], more: int) -> None:
    budget, extent = tier_memory("host_memory", 2 * len(sizes) * max(sizes) + more, sizes, needed=False)
    assert extent % max(sizes) == 0
    assert extent * len(sizes) <= budget
    for start in range(0, budget - extent + 1, extent):
        assert all(-(-start // size) * size + size <= start + extent for size in sizes)


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ([16], 16, 16 << 30),
        ([16, 1 << 10], 2 << 10, 16 << 30),
        ([MIB], MIB, 32 * MIB << 20),
        ([GIB], GIB, 1 << 48),
        ([26 * MIB, 5 * MIB], 104 * MIB, 52 * MIB << 20),
        ([MIB, MIB, 4 * MIB], 12 * MIB, 32 * MIB << 20),
    ],
)
def test_budgets_have_room_for_a_block_of_each_group_and_an_end(sizes: list[int], least: int, most: int) -> None:
    """At most 2^30 blocks of a group, 2^20 extents and 2^48 bytes."""
    for budget in (least, most):
        assert tier_memory("device_memory", budget, sizes, needed=True)[0] == budget
    groups = f"one page of each of {len(sizes)} layer group"
    for budget, needed in ((1, False), (least - 1, False), (most + 1, False), (0, True)):
        zero = "" if needed else "0, or "
        limit = rf"^host_memory = {budget}: {zero}from {least} bytes, {groups}\(s\), to {most}$"
        with pytest.raises(pagoda.InvalidArgument, match=limit):
            tier_memory("host_memory", budget, sizes, needed=needed)
    assert tier_memory("host_memory", 0, sizes, needed=False)[0] == 0
