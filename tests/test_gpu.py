"""What only a GPU can show: arrays of CuPy and torch on streams that lag behind, graphs, pools of many gigabytes,
copies in flight.

Wherever a missing fence or a wrong stream would show, a spinning kernel delays a stream's work. Everything is run once
without it first, because the host waits while kernels are compiled and tables grow.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pagoda
import pytest
from gpu_arrays import Array, delay, memory, to_device, to_host
from gpu_driver import CopyingDriver
from graphs import Model
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from mirror import DTYPES
from pagoda import _core, device, rates
from pagoda.attention.reference import attention
from pagoda.device import cuda
from pagoda.device.cuda import open_driver as open_gpu
from pagoda.device.engine import DeviceEngine
from pagoda.rates import Routes
from test_stateful import CacheMachine
from unfenced import tickets_finish_at_once

# Other libraries may warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
LAYER = pagoda.AttentionLayer(Q_HEADS, KV_HEADS, DIM)

ERROR = {"f32": 3e-5, "f16": 4e-3, "bf16": 3e-2}
"""Largest error of results by the type of queries, for values around 1: their rounding and that of weights."""


@pytest.fixture
def cp() -> Any:
    import cupy

    return cupy


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def open_cache(*layers: pagoda.AttentionLayer, **options: Any) -> pagoda.Cache:
    defaults: dict[str, Any] = {"device": "cuda", "device_memory": "256MiB", "host_memory": "256MiB"}
    return pagoda.Cache(pagoda.ModelSpec(layers=layers or [LAYER]), **(defaults | options))


def engine(cache: pagoda.Cache) -> DeviceEngine:
    assert cache._device is not None
    return cache._device


def draw(rng: np.random.Generator, count: int, dtype: str = "f16") -> list[Array]:
    """Q, K and V of `count` tokens."""
    return [
        rng.standard_normal((count, heads, DIM), np.float32).astype(DTYPES[dtype])
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    ]


def stored(rows: Array, dtype: str = "f16") -> Array:
    """Rows as a cache stores them."""
    return rows.astype(np.float32).astype(DTYPES[dtype]).astype(np.float64)


def named(dtype: str) -> str | None:
    """The argument `dtype` of append and attend."""
    return "bf16" if dtype == "bf16" else None


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_arrays_of_cupy_on_a_stream_that_is_behind(cp: Any, dtype: str, by_name: bool) -> None:
    rng = np.random.default_rng(0)
    stream = cp.cuda.Stream(non_blocking=True)
    with open_cache() as cache:
        for milliseconds in (0, 50):
            q, k, v = draw(rng, 200, dtype)
            sources = [to_device(rows) for rows in (q, k, v)]
            arrays = [to_device(np.full_like(rows, np.nan)) for rows in (q, k, v)]
            cp.cuda.runtime.deviceSynchronize()
            with stream:
                delay(milliseconds)
                for array, source in zip(arrays, sources, strict=True):
                    array[...] = source
            with contextlib.nullcontext() if by_name else stream:
                with cache.step([cache.create()], [200], stream=stream if by_name else None) as step:
                    step.append(0, *arrays[1:], dtype=named(dtype))
                    out, lse = step.attend(0, arrays[0], return_lse=True, dtype=named(dtype))
            with stream:
                result, logs = to_host(out, dtype), lse.get()
            expected, expected_lse = attention(q, stored(k), stored(v))
            np.testing.assert_allclose(result.astype(np.float64), expected, rtol=0, atol=ERROR[dtype])
            np.testing.assert_allclose(logs, expected_lse, rtol=0, atol=ERROR[dtype])


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_tensors_of_torch_on_a_stream_that_is_behind(torch: Any, name: str, by_name: bool) -> None:
    """Slices of one fused tensor."""
    dtype, short = getattr(torch, name), {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[name]
    stream = torch.cuda.Stream()
    heads = [Q_HEADS, KV_HEADS, KV_HEADS]
    with open_cache(k_dtype="bf16", v_dtype="bf16") as cache:
        for cycles in (0, 100_000_000):
            source = torch.randn(200, sum(heads), DIM, device="cuda").to(dtype)
            fused = torch.full_like(source, float("nan"))
            q, k, v = fused.split(heads, 1)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                fused.copy_(source)
            with contextlib.nullcontext() if by_name else torch.cuda.stream(stream):
                with cache.step([cache.create()], [200], stream=stream if by_name else None) as step:
                    out = step.forward(0, q, k, v)
            stream.synchronize()
            assert out.dtype == dtype
            rows = [part.double().cpu().numpy() for part in source.split(heads, 1)]
            expected, _ = attention(rows[0], stored(rows[1], "bf16"), stored(rows[2], "bf16"))
            # With 16-bit queries, weights have the type of the rows: an error of 2^-9 each, for values up to 5.
            error = 1.2e-2 if short == "f16" else ERROR[short]
            np.testing.assert_allclose(out.double().cpu().numpy(), expected, rtol=0, atol=error)


def test_a_graph_of_torch(torch: Any) -> None:
    """Captured over three sequences; replayed after one has left and two have joined."""
    stream = torch.cuda.Stream()
    heads = [Q_HEADS, KV_HEADS, KV_HEADS]
    held: dict[pagoda.Sequence, list[Array]] = {}
    with open_cache() as cache:
        cache.declare(sequences=4, new_tokens=1, context=256)
        fused = torch.empty(4, sum(heads), DIM, device="cuda", dtype=torch.float16)
        q, k, v = fused.split(heads, 1)
        out = torch.empty(4, Q_HEADS, DIM, device="cuda", dtype=torch.float16)
        graph = torch.cuda.CUDAGraph()

        def forward(step: pagoda.Step) -> None:
            step.append(0, k, v)
            step.attend(0, q, out=out)

        def capture(step: pagoda.Step) -> None:
            with torch.cuda.graph(graph, stream=stream):
                forward(step)
            with torch.cuda.stream(stream):
                graph.replay()

        def run(batch: list[pagoda.Sequence], launch: Callable[[pagoda.Step], object]) -> None:
            torch.cuda.synchronize()
            fused.normal_()
            fused[len(batch) :] = float("nan")
            torch.cuda.synchronize()
            with cache.step(batch, [1] * len(batch), stream=stream) as step:
                launch(step)
            torch.cuda.synchronize()
            rows = [part.cpu().numpy() for part in fused.split(heads, 1)]
            for index, sequence in enumerate(batch):
                kept = held.setdefault(sequence, [np.zeros((0, KV_HEADS, DIM), np.float16)] * 2)
                for plane in range(2):
                    kept[plane] = np.concatenate([kept[plane], rows[1 + plane][index : index + 1]])
                expected, _ = attention(rows[0][index : index + 1], *kept)
                np.testing.assert_allclose(out[index].cpu().numpy(), expected[0], rtol=0, atol=ERROR["f16"])

        live = [cache.create() for _ in range(3)]
        run(live, forward)
        run(live, capture)
        live = [*live[1:], cache.create(), cache.create()]
        for _ in range(5):
            run(live, lambda step: step.replay(graph.replay))
            run(live[2:], lambda step: step.replay(graph.replay))


@pytest.mark.parametrize("new_tokens", [1, 3, 12])
def test_one_graph_serves_batches_that_grow_and_shrink(cp: Any, new_tokens: int) -> None:
    Model(cp, cp.cuda.Stream(non_blocking=True), new_tokens, new_tokens).live(40)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_long_contexts(cp: Any, page_size: int, dtype: str) -> None:
    """Decoding and prefill over contexts of 0 to 40,000 tokens in one batch, with 16-bit and 32-bit queries."""
    rng = np.random.default_rng(1)
    lengths, last = [0, 1, 1000, 40_000], [1, 0, 130, 1]
    with open_cache(page_size=page_size, k_dtype=dtype, v_dtype=dtype, device_memory="512MiB") as cache:
        batch = [cache.create() for _ in lengths]
        held: list[list[Array]] = []
        for sequence, length in zip(batch, lengths, strict=True):
            _, k, v = draw(rng, length, dtype)
            for start in range(0, length, 9000):
                part = slice(start, min(length, start + 9000))
                with cache.step([sequence], [part.stop - start]) as step:
                    step.append(0, to_device(k[part]), to_device(v[part]), dtype=named(dtype))
            held.append([k, v])
        for kind in ("f32", dtype):
            q, k, v = draw(rng, sum(last), dtype)
            q = q.astype(DTYPES[kind])
            with cache.step(batch, last) as step:
                step.append(0, to_device(k), to_device(v), dtype=named(dtype))
                out = step.attend(0, to_device(q), dtype=named(kind))
                step.commit([0] * len(batch))
            result = to_host(out, kind).astype(np.float64)
            start = 0
            for rows, count in zip(held, last, strict=True):
                part = slice(start, start + count)
                keys = [np.concatenate([old, new[part]]) for old, new in zip(rows, (k, v), strict=True)]
                expected, _ = attention(q[part], *keys)
                np.testing.assert_allclose(result[part], expected, rtol=0, atol=ERROR[kind])
                start += count


@pytest.mark.parametrize("count", [1, 70])
def test_sums_of_half_a_million_rows_lose_little(cp: Any, count: int) -> None:
    """Tensor cores truncate sums, which shows in values around 1: added up at once, they would lose as much as 7e-3."""
    rng = np.random.default_rng(2)
    rows = [rng.normal(mean, 1, (1 << 19, 1, DIM)).astype(np.float16) for mean in (0, 1)]
    with open_cache(pagoda.AttentionLayer(4, 1, DIM), device_memory="512MiB") as cache:
        sequence = cache.create()
        for start in range(0, len(rows[0]) - count, 1 << 16):
            k, v = (part[:-count][start : start + (1 << 16)] for part in rows)
            with cache.step([sequence], [len(k)]) as step:
                step.append(0, to_device(k), to_device(v))
        q = rng.standard_normal((count, 4, DIM), np.float32)
        with cache.step([sequence], [count]) as step:
            out = to_host(step.forward(0, to_device(q), *(to_device(part[-count:]) for part in rows)), "f32")
    expected, _ = attention(q[-1:], *rows)
    np.testing.assert_allclose(out[-1:], expected, rtol=1.5e-4)


@pytest.mark.parametrize("counts", [[0, 0], [0, 5, 0], [0]])
def test_sequences_without_tokens(cp: Any, counts: list[int]) -> None:
    rng = np.random.default_rng(2)
    with open_cache() as cache:
        batch = [cache.create() for _ in counts]
        for _ in range(2):
            q, k, v = draw(rng, sum(counts), "f32")
            with cache.step(batch, counts) as step:
                out, lse = step.forward(0, *map(to_device, (q, k, v)), return_lse=True)
                step.commit([0] * len(counts))
            expected, expected_lse = attention(q, stored(k), stored(v))
            np.testing.assert_allclose(out.get(), expected, rtol=0, atol=ERROR["f32"])
            np.testing.assert_allclose(lse.get(), expected_lse, rtol=0, atol=ERROR["f32"])


def test_bits_do_not_depend_on_batch_or_chunks(cp: Any) -> None:
    """In deterministic mode: 3,000 tokens in one step, in pieces, and in pieces batched with others."""
    rng = np.random.default_rng(3)
    rows = [to_device(part) for part in draw(rng, 3000)]

    def run(pieces: list[int], crowd: int) -> Array:
        with open_cache(deterministic=True) as cache:
            sequence, others = cache.create(), [cache.create() for _ in range(crowd)]
            outs, start = [], 0
            for piece in pieces:
                noise = [to_device(part) for part in draw(rng, 7 * crowd)]
                part = [cp.concatenate([n, r[start : start + piece]]) for n, r in zip(noise, rows, strict=True)]
                with cache.step([*others, sequence], [7] * crowd + [piece]) as step:
                    outs.append(step.forward(0, *part)[7 * crowd :].get())
                start += piece
            return np.concatenate(outs)

    alone = run([3000], 0)
    for pieces, crowd in ([1000, 1999, 1], 0), ([1, 1, 2, 4, 992, 2000], 0), ([300, 2400, 150, 50, 100], 20):
        np.testing.assert_array_equal(run(pieces, crowd).view(np.uint16), alone.view(np.uint16))


def test_pages_at_the_far_end_of_a_large_pool(cp: Any) -> None:
    """More than 2**31 elements and 2**32 bytes, full of NaN, with scattered pages and tables that end in garbage."""
    rng = np.random.default_rng(4)
    size, page = 12 << 30, 64
    pages = size // (page * 4 * KV_HEADS * DIM)
    with open_cache(page_size=page, device_memory=size, host_memory=0) as cache:
        cache.declare(sequences=64, new_tokens=8 * page, context=1 << 16)
        tables = engine(cache)._tables
        table = tables.groups[0]
        entries = memory(table.table, 4 * tables.room.sequences * table.columns, cache).view(np.int32)
        entries.fill(2_147_480_000)
        cp.cuda.runtime.deviceSynchronize()
        nan = cp.full((64 * page, KV_HEADS, DIM), np.nan, np.float16)
        fillers = [cache.create() for _ in range(pages)]
        for start in range(0, pages, 64):
            some = fillers[start : start + 64]
            with cache.step(some, [page] * len(some)) as step:
                step.append(0, nan[: page * len(some)], nan[: page * len(some)])
        for index in {*rng.choice(np.arange(pages // 2, pages), 300, replace=False).tolist(), 0, 1, pages - 1}:
            fillers[index].release()
        batch = [cache.create() for _ in range(3)]
        held = [[np.zeros((0, KV_HEADS, DIM), np.float16)] * 2 for _ in batch]
        furthest = 0
        for _ in range(15):
            counts = rng.integers(1, 4 * page, len(batch)).tolist()
            q, k, v = draw(rng, sum(counts))
            with cache.step(batch, counts) as step:
                out = step.forward(0, *map(to_device, (q, k, v)))
                furthest = max(furthest, int(step.table(0).block_table.max()))
            start = 0
            for rows, count in zip(held, counts, strict=True):
                part = slice(start, start + count)
                rows[:] = [np.concatenate([old, new[part]]) for old, new in zip(rows, (k, v), strict=True)]
                start += count
                last = slice(start - 1, start)
                expected, _ = attention(q[last], *rows)
                np.testing.assert_allclose(out[last].get(), expected, rtol=0, atol=ERROR["f16"])
        elements = furthest * page * 2 * KV_HEADS * DIM
        assert elements > 1 << 31, f"block {furthest} of {pages}, which has two bytes an element"


def test_tables_drive_flashinfer(cp: Any, torch: Any) -> None:
    """Its HND layout as strided tensors over Pagoda's pages: K and V of a head are contiguous rows."""
    flashinfer = pytest.importorskip("flashinfer")
    rng = np.random.default_rng(5)
    page, batch_size = 16, 5
    with open_cache(page_size=page) as cache, torch.cuda.stream(torch.cuda.Stream()):
        batch = [cache.create() for _ in range(batch_size)]
        for counts in ([33, 1, 16, 700, 15], [1] * batch_size):
            q, k, v = (torch.from_numpy(rows).cuda() for rows in draw(rng, sum(counts)))
            with cache.step(batch, counts) as step:
                out = step.forward(0, q, k, v)
                table = step.table(0)
                csr = [torch.from_numpy(part.copy()) for part in table.csr]
                arena = engine(cache)._memory.bases[0]
        plane = KV_HEADS * page * DIM
        blocks = int(csr[1].max()) + 1
        pool = torch.as_tensor(memory(arena, blocks * 2 * plane * 2, cache).view(np.float16), device="cuda")
        shape, strides = (blocks, KV_HEADS, page, DIM), (2 * plane, page * DIM, DIM, 1)
        planes = tuple(torch.as_strided(pool, shape, strides, offset) for offset in (0, plane))
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            *csr, Q_HEADS, KV_HEADS, DIM, page, q_data_type=torch.float16, kv_data_type=torch.float16
        )  # fmt: skip
        theirs = wrapper.run(q, planes)
        torch.cuda.synchronize()
        torch.testing.assert_close(theirs, out, rtol=0, atol=ERROR["f16"])


class World:
    """A sequence of full pages whose appends come after a delay on the first of two streams."""

    def __init__(self, cp: Any, device_pages: int = 16) -> None:
        self.streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.rng = np.random.default_rng(6)
        page = 64 * 4 * KV_HEADS * DIM
        self.cache = open_cache(spill=False, device_memory=device_pages * page, host_memory=16 * page)
        self.k = self.v = np.zeros((0, KV_HEADS, DIM), np.float16)
        # Compiles kernels, pins memory and grows tables now, since all of these wait for the device.
        with self.cache.create() as self.sequence:
            self.k, self.v = self.append(self.sequence, 192, self.streams[0])
            self.look(self.streams[0])
            assert self.cache.demote(self.sequence).wait()
            assert self.cache.promote(self.sequence).wait()
        cp.cuda.runtime.deviceSynchronize()
        self.sequence = self.cache.create()
        self.k, self.v = self.append(self.sequence, 192, self.streams[0], late=True)

    def append(self, sequence: pagoda.Sequence, count: int, stream: Any, late: bool = False) -> list[Array]:
        _, k, v = draw(self.rng, count)
        with stream:
            arrays = [to_device(rows) for rows in (k, v)]
            stream.synchronize()
            if late:
                delay(200)
        with self.cache.step([sequence], [count], stream=stream) as step:
            step.append(0, *arrays)
        return [k, v]

    def look(self, stream: Any) -> None:
        """Attends with one more token, and compares the result."""
        q, k, v = draw(self.rng, 1)
        with stream:
            arrays = [to_device(rows) for rows in (q, k, v)]
            stream.synchronize()
            with self.cache.step([self.sequence], [1]) as step:
                out = step.forward(0, *arrays)
                step.commit([0])
            result = out.get()
        expected, _ = attention(q, *(np.concatenate(pair) for pair in ((self.k, k), (self.v, v))))
        np.testing.assert_allclose(result, expected, rtol=0, atol=ERROR["f16"])


def a_step_follows_the_step(cp: Any) -> None:
    world = World(cp)
    world.look(world.streams[1])


def a_copy_follows_the_step(cp: Any) -> None:
    world = World(cp)
    assert world.cache.demote(world.sequence).wait()
    world.look(world.streams[0])


def a_block_waits_for_its_copy(cp: Any) -> None:
    """Without it, a device block is handed out again while the copy from it is under way."""
    world = World(cp, device_pages=4)
    cp.cuda.runtime.deviceSynchronize()
    with engine(world.cache)._copying.current():
        delay(200)
    ticket = world.cache.demote(world.sequence)
    other = world.cache.create()
    try:
        world.append(other, 192, world.streams[1])
    except pagoda.OutOfBlocks:
        assert ticket.wait()
        world.append(other, 192, world.streams[1])
    world.streams[1].synchronize()
    ticket.wait()
    other.release()
    world.look(world.streams[1])


def four_on_the_host(cache: pagoda.Cache, rng: np.random.Generator) -> list[pagoda.Sequence]:
    """Four sequences of 16K tokens each, with all pages on the host."""
    batch = [cache.create() for _ in range(4)]
    for sequence in batch:
        for _ in range(4):
            _, k, v = draw(rng, 4096)
            with cache.step([sequence], [4096]) as step:
                step.append(0, to_device(k), to_device(v))
            cache.demote(sequence).wait()
    return batch


def through_the_ring(cp: Any, late: str) -> None:
    """Attends to four sequences of 16 slots each on the host, while the ring's copies or the kernels reading it are late."""
    rng, stream = np.random.default_rng(3), cp.cuda.Stream(non_blocking=True)
    with open_cache(device_memory="64MiB", host_memory="512MiB") as cache:
        batch = four_on_the_host(cache, rng)
        rows = [to_device(part) for part in draw(rng, 4)]
        results = []
        for least, delayed in ((1 << 62, False), (0, False), (0, True)):
            driver: Any = engine(cache)._driver
            driver.ring_bytes = least
            if delayed and late == "copies":
                with engine(cache)._streams._copying.current():
                    delay(100)
            with stream, cache.step(batch, [1] * 4) as step:
                if delayed and late == "kernels":
                    delay(100)
                results.append(step.forward(0, *rows))
                step.commit([0] * 4)
            traffic = engine(cache).traffic
            assert (traffic.ring > 0) == (traffic.mapped == 0) == (least == 0)
            cp.cuda.runtime.deviceSynchronize()
        in_place, *others = (to_host(result, "f16").astype(np.float32) for result in results)
        for other in others:
            np.testing.assert_allclose(other, in_place, rtol=0, atol=1e-3)


def kernels_follow_the_ring(cp: Any) -> None:
    through_the_ring(cp, "copies")


def the_ring_follows_kernels(cp: Any) -> None:
    through_the_ring(cp, "kernels")


def no_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda._Stream, "follow", lambda self, event: None)


SCENES = [
    (a_step_follows_the_step, no_follow),
    (a_copy_follows_the_step, no_follow),
    (a_block_waits_for_its_copy, tickets_finish_at_once),
    (kernels_follow_the_ring, no_follow),
    (the_ring_follows_kernels, no_follow),
]


@pytest.mark.parametrize("scene", [scene for scene, _ in SCENES])
def test_fences_hold(cp: Any, scene: Callable[[Any], None]) -> None:
    scene(cp)


@pytest.mark.parametrize(("scene", "broken"), SCENES)
def test_a_missing_fence_is_noticed(
    cp: Any, scene: Callable[[Any], None], broken: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        scene(cp)


def test_pages_move_while_steps_go_on(cp: Any) -> None:
    """Steps on two streams that sometimes lag, while pages move up and down; results are read at the end."""
    rng = np.random.default_rng(7)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    page = 16 * 4 * KV_HEADS * DIM
    with open_cache(page_size=16, device_memory=80 * page, host_memory=200 * page) as cache:
        live: dict[pagoda.Sequence, list[Array]] = {}
        results: list[tuple[Any, Any, Array]] = []
        for _ in range(120):
            if len(live) < 4:
                live[cache.create()] = [np.zeros((0, KV_HEADS, DIM), np.float16)] * 2
            sequence = list(live)[rng.integers(len(live))]
            action = rng.integers(6)
            if action == 0 and len(live) < 6:
                live[sequence.fork()] = list(live[sequence])
            elif action == 1 and len(live[sequence][0]) > 300:
                sequence.release()
                del live[sequence]
                continue
            elif action in (2, 3):
                with contextlib.suppress(pagoda.OutOfBlocks):
                    (cache.demote if action == 2 else cache.promote)(sequence)
            batch = [s for s in live if rng.integers(2)]
            counts = rng.integers(0, 30, len(batch)).tolist()
            rows = draw(rng, sum(counts))
            stream = streams[rng.integers(2)]
            with stream:
                arrays = [to_device(part) for part in rows]
                if rng.integers(4) == 0:
                    delay(float(rng.uniform(0, 20)))
                try:
                    with cache.step(batch, counts) as step:
                        out = step.forward(0, *arrays)
                except pagoda.OutOfBlocks:
                    continue
            q, k, v = rows
            expected, start = [np.zeros((0, Q_HEADS, DIM))], 0
            for sequence, count in zip(batch, counts, strict=True):
                part = slice(start, start + count)
                live[sequence] = [
                    np.concatenate([old, new[part]]) for old, new in zip(live[sequence], (k, v), strict=True)
                ]
                expected.append(attention(q[part], *live[sequence])[0])
                start += count
            results.append((arrays, out, np.concatenate(expected)))
        cp.cuda.runtime.deviceSynchronize()
        cache.audit()
        assert len(results) > 60
        for _, out, expected_rows in results:
            np.testing.assert_allclose(out.get(), expected_rows, rtol=0, atol=ERROR["f16"])


@pytest.mark.long
def test_random_calls_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state machine of the Python API, compared with the naive mirror."""
    monkeypatch.setattr(device, "AUTO", "cuda")
    monkeypatch.setattr(cuda, "open_driver", lambda index: CopyingDriver(open_gpu(index)))
    end = time.monotonic() + 60
    chosen = settings(max_examples=5, stateful_step_count=40, deadline=None, database=None)
    while time.monotonic() < end:
        run_state_machine_as_test(CacheMachine, settings=chosen)


def test_host_memory_is_pinned_as_it_is_used(cp: Any) -> None:
    rng = np.random.default_rng(8)
    with open_cache(device_memory="512MiB", host_memory="4GiB") as cache:
        host: Any = engine(cache)._memory.host
        assert not host._pinned
        sequence = cache.create()
        _, k, v = draw(rng, 90_000)
        for start in range(0, 90_000, 9000):
            with cache.step([sequence], [9000]) as step:
                step.append(0, *(to_device(rows[start : start + 9000]) for rows in (k, v)))
        assert cache.demote(sequence, (0, 1000)).wait()
        assert len(host._pinned) == 1
        assert cache.demote(sequence).wait()
        assert 2 <= len(host._pinned) <= 3, "368 MB in pieces of 256 MiB"
        for move in (cache.demote, cache.promote):
            assert move(sequence).wait()
            q, new_k, new_v = draw(rng, 1)
            with cache.step([sequence], [1]) as step:
                out = step.forward(0, *map(to_device, (q, new_k, new_v)))
                step.commit([0])
            expected, _ = attention(q, np.concatenate([k, new_k]), np.concatenate([v, new_v]))
            np.testing.assert_allclose(out.get(), expected, rtol=0, atol=ERROR["f16"])


@pytest.mark.parametrize("others", [{"ring": 1.0}, {"mapped": 1.0}])
def test_the_cpu_takes_a_part(cp: Any, others: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 64K tokens, by made-up rates: the result equals that of the GPU alone."""
    start = {"ring": 0.0, "mapped": 0.0, "memory": 0.0}
    routes = Routes(_core.cores(), [{"memory": 1.0, **others}], start, {"f16": 1.0})
    monkeypatch.setattr(rates, "routes_of", lambda gpu, threads: routes)
    rng, stream = np.random.default_rng(3), cp.cuda.Stream(non_blocking=True)
    with open_cache(device_memory="64MiB", host_memory="512MiB") as cache:
        batch = four_on_the_host(cache, rng)
        rows = [to_device(part) for part in draw(rng, 4)]
        results = []
        for divided in (True, True, False):
            if not divided:
                monkeypatch.setattr(engine(cache)._streams, "_partials", None)
            with stream, cache.step(batch, [1] * 4) as step:
                # Makes the queries late.
                delay(100)
                results.append(step.forward(0, *rows))
                step.commit([0] * 4)
            assert (engine(cache).traffic.memory > 0) == divided
            cp.cuda.runtime.deviceSynchronize()
        first, second, alone = (to_host(result, "f16").astype(np.float32) for result in results)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, rtol=0, atol=1e-3)


def test_the_size_from_which_the_ring_is_faster() -> None:
    assert 1 << 16 <= open_gpu(0).ring_bytes <= 1 << 23


def test_the_size_from_which_the_copy_engine_is_faster() -> None:
    size = open_gpu(0).copy_engine_bytes
    assert size in {1 << shift for shift in range(14, 22)}


def test_memory_of_a_closed_cache_is_free() -> None:
    driver = open_gpu(0)
    with open_cache(device_memory="1GiB"):
        held = driver.free_bytes
    assert driver.free_bytes >= held + (1 << 30)


@pytest.mark.parametrize("declared", [True, False])
def test_steps_allocate_no_device_memory(cp: Any, declared: bool) -> None:
    rng = np.random.default_rng(9)
    with open_cache() as cache:
        if declared:
            cache.declare(sequences=16, new_tokens=1, context=4096)
        batch = cache.batch([cache.create() for _ in range(16)])
        q, k, v = (to_device(rows) for rows in draw(rng, 16))
        out = cp.empty_like(q)
        pool = cp.get_default_memory_pool()
        held = []
        gc.collect()
        for _ in range(60):
            with cache.step(batch, [1] * 16) as step:
                step.append(0, k, v)
                step.attend(0, q, out=out)
                held.append((pool.used_bytes(), pool.total_bytes()))
        assert len(set(held[5:])) == 1, "the first steps make tables and scratch memory"
