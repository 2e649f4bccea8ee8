"""Quantised rows of a cache on a device and on the CPU: the same bytes, and the same attention over them.

The device is emulated unless `--device` names another.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import EmulatedDriver, install_driver
from mirror import INTEGER_ISAS, center_of, kept_of, layer
from pagoda import formats
from pagoda.attention.reference import attention
from pagoda.kernels import instances

Array = npt.NDArray[Any]

PAIRS = [("q8_0", "q4_0"), ("fp8_e4m3", "fp8_e4m3"), ("int8", "int8"), ("f16", "q8_0"), ("q4_0", "bf16")]
PAIRS += [("mxfp4", "nvfp4"), ("nvfp4", "mxfp4")]
"""Formats of K and V: every quantised format, and quantised ones next to 16-bit ones."""

SHAPE = layer(num_q_heads=4, num_kv_heads=2, head_dim=96, v_head_dim=64)


@pytest.fixture(autouse=True)
def kind(request: pytest.FixtureRequest, _device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of device that "cuda" is. Nothing may be written beyond memory of an emulated one."""
    kind = str(request.config.getoption("--device"))
    if kind != "cpu":
        yield kind
        return
    driver = install_driver(monkeypatch, EmulatedDriver())
    yield "emulated"
    driver.check()


def bytes_at(address: int, size: int, *, of_gpu: bool) -> npt.NDArray[np.uint8]:
    """Bytes of device or host memory."""
    if not of_gpu:
        return np.frombuffer(ctypes.string_at(address, size), np.uint8)
    import cupy

    held = np.empty(size, np.uint8)
    cupy.cuda.runtime.memcpy(held.ctypes.data, address, size, cupy.cuda.runtime.memcpyDeviceToHost)
    return held


def cache_on(device: str, shapes: list[pagoda.AttentionLayer], pair: tuple[str, str], **options: Any) -> pagoda.Cache:
    defaults: dict[str, Any] = {"page_size": 16, "device_memory": "2MiB", "host_memory": "2MiB"}
    spec = pagoda.ModelSpec(shapes)
    return pagoda.Cache(spec, device=device, k_dtype=pair[0], v_dtype=pair[1], **(defaults | options))


def rows(tokens: int, shape: pagoda.AttentionLayer = SHAPE, seed: int = 0) -> tuple[Array, Array, Array]:
    """Queries, keys with an offset in two channels, and values."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, shape.num_q_heads, shape.head_dim), np.float32)
    k = rng.standard_normal((tokens, shape.num_kv_heads, shape.head_dim), np.float32)
    k[..., [3, 40]] += 20
    return q, k, rng.standard_normal((tokens, shape.num_kv_heads, shape.v_dim), np.float32)


def odd_rows(tokens: int, dim: int) -> Array:
    """Rows of every kind that is difficult to round."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, 2, dim)) * 10.0 ** rng.uniform(-6, 4, (tokens, 2, 1))
    # Exact ties; numbers below 2^-126, alone and among others; too large numbers, infinities and NaN in some blocks.
    x[0::9] = rng.integers(-8, 9, x[0::9].shape) * 0.25
    x[1::9] = rng.integers(-127, 128, x[1::9].shape) + rng.choice([0, 0.5], x[1::9].shape)
    # The number below a half that a sum with a half rounds up to 1.
    x[1::9, :, 0], x[1::9, :, 1] = 127, np.nextafter(np.float32(0.5), np.float32(0))
    # A sixth of this is below the middle of two E4M3, and its product with the float nearest to a sixth is not.
    x[1::9, :, 48:49] = np.nextafter(np.float32(228), np.float32(0))
    x[2::9] *= rng.random(x[2::9].shape) < 0.1
    x[3::9] = 1e-40 * rng.standard_normal(x[3::9].shape)
    x[4::9, :, ::7] = 1e-39
    x[5::9] = np.where(rng.random(x[5::9].shape) < 0.05, 3e38, x[5::9])
    x[6::9, 1] = np.where(rng.random(x[6::9, 1].shape) < 0.05, -np.inf, x[6::9, 1])
    x[7::9, 0] = np.where(rng.random(x[7::9, 0].shape) < 0.02, np.nan, x[7::9, 0])
    x[8::9] = rng.choice([0.0, -0.0], x[8::9].shape)
    # Ties among the smallest E4M3: of codes in a row with a scale of 1, and of the scales of nvfp4.
    half = rng.integers(0, 8, (*x[9::18, 0].shape[:1], dim // 16)).repeat(16, -1) + 0.5
    x[9::18, 0], x[9::18, 1] = half / 512 * rng.choice([-1, 1], half.shape), half / 512 * 6
    x[9::18, 0, 0] = 448
    # Numbers on both sides of 2^-126.
    x[3::18, 1] = 1e-38 * rng.standard_normal(x[3::18, 1].shape)
    # Only a few times 2^-149: scales are rounded so much that quotients are beyond the largest codes.
    x[12::18] = 1e-42 * rng.standard_normal(x[12::18].shape)
    with np.errstate(over="ignore"):
        given = x.astype(np.float32)
    # NaN of either sign, quiet or not: which one it was is not stored.
    missing = np.isnan(given)
    given.view(np.uint32)[missing] = rng.choice([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], missing.sum())
    return given


def pages(
    cache: pagoda.Cache, k: Array, v: Array, chunks: list[int], *, of_gpu: bool, others: Sequence[Array] = ()
) -> Array:
    """The bytes of a sequence's pages after appending it in chunks; tokens fill whole pages. others: the rows of K of further
    layers, which are those of V, too."""
    sequence, start = cache.create(), 0
    layers = [(k, v), *((other, other) for other in others)]
    for chunk in chunks:
        with cache.step([sequence], [chunk]) as step:
            for index, (keys, values) in enumerate(layers):
                step.append(index, keys[start : start + chunk], values[start : start + chunk])
            pointers, size = step.table(0).pointers[0], cache.stats().block_bytes[0]
            start += chunk
    if cache._device is not None:
        cache._device._wait_for_steps()
    return np.array([bytes_at(int(pointer), size, of_gpu=of_gpu) for pointer in pointers if pointer])


GIVEN = [np.float32, np.float32, np.float16, ml_dtypes.bfloat16, np.float16, np.float32, np.float16]


@pytest.mark.parametrize(("pair", "given"), [*zip(PAIRS, GIVEN, strict=True)])
@pytest.mark.parametrize("center", [None, "first", "given"])
def test_pages_are_byte_for_byte_those_of_the_cpu(
    pair: tuple[str, str], given: Any, center: str | None, kind: str
) -> None:
    """Layout and rounding are the same for any numbers, with and without centring and rotation."""
    k, v = odd_rows(64, 96), odd_rows(64, 64)[::-1]
    if set(pair) & {"f16", "bf16"}:
        # A 16-bit NaN may have other bits.
        k, v = (np.where(np.abs(x) < 1e30, x, np.float32(1)) for x in (k, v))
    with np.errstate(over="ignore"):
        k, v = k.astype(given), v.astype(given)
    means = np.random.default_rng(2).standard_normal((2, 96)).astype(np.float32)
    options = {"center": [means] if center == "given" else center, "rotate": center is not None}
    held = []
    for device in ("cpu", "cuda"):
        with cache_on(device, [SHAPE], pair, **options) as cache:
            held.append(pages(cache, k, v, [40, 24], of_gpu=(device, kind) == ("cuda", "cuda")))
    assert held[0].shape == (4, held[0].shape[1])
    np.testing.assert_array_equal(held[0], held[1])


@pytest.mark.parametrize(
    ("pair", "dims"),
    [
        (("q8_0", "q5_0"), (128, 512)),
        (("q5_0", "int8"), (256, 80)),
        (("fp8_e4m3", "q4_0"), (16, 192)),
        (("nvfp4", "mxfp4"), (512, 384)),
        (("int8", "nvfp4"), (208, 256)),
    ],
)
def test_rows_of_any_length_are_those_of_the_cpu(pair: tuple[str, str], dims: tuple[int, int], kind: str) -> None:
    """A rotation mixes blocks of 16 to 512 elements: over some lanes of a warp, over all, or with several registers each."""
    shape = layer(num_q_heads=2, num_kv_heads=2, head_dim=dims[0], v_head_dim=dims[1])
    k, v = odd_rows(32, dims[0]), odd_rows(32, dims[1])[::-1]
    means = np.random.default_rng(2).standard_normal((2, dims[0])).astype(np.float32)
    held = []
    for device in ("cpu", "cuda"):
        with cache_on(device, [shape], pair, center=[means], rotate=True) as cache:
            held.append(pages(cache, k, v, [32], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])


def test_no_centre_of_few_rows_or_of_numbers_out_of_range(kind: str) -> None:
    """As on the CPU: with fewer than 8 first rows, or an unusable mean, K is never centred."""
    _, k, v = rows(64)
    infinite, missing, absurd, large = k.copy(), k.copy(), k.copy(), k.copy()
    infinite[5, 1, 7], missing[5, 1, 7], absurd[5, 1, 7], large[:40, 1, 7] = np.inf, np.nan, 1e20, -65536
    cases = (k, [7, 57], False), *((x, [40, 24], False) for x in (infinite, missing, absurd, large))
    for keys, chunks, warm in (*cases, (large, [7, 57], True)):
        held = []
        for device, center in (("cpu", "first"), ("cuda", "first"), ("cuda", None)):
            with cache_on(device, [SHAPE], PAIRS[0], center=center, rotate=False) as cache:
                if warm:
                    # There is a centre before, which is nearer to the mean than 0 is.
                    with cache.create() as scratch, cache.step([scratch], [40]) as step:
                        step.append(0, k[:40], v[:40])
                held.append(pages(cache, keys, v, chunks, of_gpu=(device, kind) == ("cuda", "cuda")))
        np.testing.assert_array_equal(held[0], held[1])
        np.testing.assert_array_equal(held[0], held[2])


@pytest.mark.parametrize("place", [(0, 0, 7), (0, 2, 150), (0, 3, 60)])
def test_no_centre_of_many_elements_of_which_one_is_out_of_range(place: tuple[int, ...], kind: str) -> None:
    """A thread has one or two of them. The last one stands out, too."""
    shape = layer(num_q_heads=4, num_kv_heads=4, head_dim=192, v_head_dim=64)
    _, k, v = rows(32, shape)
    k[..., -1] += 20
    k[place] = 1e20
    held = []
    for device, center in (("cpu", "first"), ("cuda", "first"), ("cuda", None)):
        with cache_on(device, [shape], PAIRS[0], center=center, rotate=False) as cache:
            held.append(pages(cache, k, v, [32], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])
    np.testing.assert_array_equal(held[0], held[2])


@pytest.mark.parametrize(
    ("number", "given"), [(65504, np.float32), (65504, np.float16), (20, np.float32), (20, ml_dtypes.bfloat16)]
)
def test_a_centre_of_eight_rows_up_to_the_largest(number: float, given: Any, kind: str) -> None:
    """It equals a given centre of the elements that stand out; alternating 1 and 3 just does."""
    _, k, v = rows(64)
    k[..., 7] = number
    k[::2, :, 9], k[1::2, :, 9] = 1, 3
    k[::2, :, 10], k[1::2, :, 10] = 1, 3.01
    k, v = k.astype(given), v.astype(given)
    assert [*center_of(k[:8])[1, [7, 9, 10]]] == [number, 2, 0]
    held = []
    for device, center in (("cpu", "first"), ("cuda", "first"), ("cpu", [center_of(k[:8])])):
        with cache_on(device, [SHAPE], PAIRS[0], center=center, rotate=False) as cache:
            held.append(pages(cache, k, v, [8, 56], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])
    np.testing.assert_array_equal(held[0], held[2])


@pytest.mark.parametrize("given", [False, True])
def test_each_layer_has_a_centre_of_its_own(given: bool, kind: str) -> None:
    """Layers of any sizes: each is centred by its own rows, or by what was given for it."""
    shapes = [
        SHAPE,
        layer(num_q_heads=2, num_kv_heads=1, head_dim=64),
        layer(num_q_heads=3, num_kv_heads=3, head_dim=128),
    ]
    (_, k, v), *others = (rows(64, shape, seed) for seed, shape in enumerate(shapes))
    more = [other[1] - 7 for other in others]
    center: Any = [center_of(x[:40]) for x in (k, *more)] if given else "first"
    held = []
    for device in ("cpu", "cuda"):
        with cache_on(device, shapes, ("q8_0", "q8_0"), center=center, rotate=False) as cache:
            of_gpu = (device, kind) == ("cuda", "cuda")
            held.append(pages(cache, k, v, [40, 24], of_gpu=of_gpu, others=more))
    np.testing.assert_array_equal(held[0], held[1])


def test_a_centre_below_all_normal_numbers(kind: str) -> None:
    """CuPy compiles kernels to treat numbers below 2^-126 as 0."""
    _, k, v = rows(64)
    k = (np.abs(k) * 1e-40).astype(np.float32)
    assert 0 < center_of(k[:40]).max() < 2.0**-126
    held = []
    for device in ("cpu", "cuda"):
        with cache_on(device, [SHAPE], ("int8", "int8"), center="first", rotate=False) as cache:
            held.append(pages(cache, k, v, [40, 24], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])


def test_no_rows_are_not_the_first(kind: str) -> None:
    """A step without new tokens leaves the centre to the next step."""
    _, k, v = rows(64)
    for device in ("cpu", "cuda"):
        held = []
        for chunks in ([0, 64], [64]):
            with cache_on(device, [SHAPE], PAIRS[0], center="first", rotate=False) as cache:
                held.append(pages(cache, k, v, chunks, of_gpu=(device, kind) == ("cuda", "cuda")))
        np.testing.assert_array_equal(held[0], held[1])


@pytest.mark.parametrize("how", ["rolled back", "released"])
def test_an_empty_cache_is_centred_by_what_comes_next(how: str, kind: str) -> None:
    """Whatever was stored before, the bytes are those of a new cache."""
    _, k, v = rows(64)
    held = []
    for device, warm in (("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)):
        with cache_on(device, [SHAPE], PAIRS[0], center="first", rotate=False) as cache:
            if warm:
                with cache.create() as scratch, cache.step([scratch], [40]) as step:
                    step.append(0, np.zeros_like(k[:40]), v[:40])
                    if how == "rolled back":
                        step.rollback()
            held.append(pages(cache, k, v, [40, 24], of_gpu=(device, kind) == ("cuda", "cuda")))
    for other in held[1:]:
        np.testing.assert_array_equal(other, held[0])


@pytest.mark.parametrize("size", [1, 1e-40])
def test_few_rows_take_a_part_of_the_centre_before(size: float, kind: str) -> None:
    """The bytes are those of a cache that is given that part; also below 2^-126, which CuPy's kernels treat as 0."""
    _, k, v = rows(64)
    other = rows(40, seed=1)[1]
    other[..., 7], other[..., 8] = other[..., 7] + 20, other[..., 8] - 20
    k[..., 8], k[:, 1, 40] = k[..., 8] + 20, k[:, 1, 40] - 15
    k, other = ((x * size).astype(np.float32) for x in (k, other))
    # The centre before is as far from the mean of 9 as 0 is, and from that of 10 nearer by less than floats tell.
    k[..., 9:11] = 3 * size
    other[..., 9:11] = 2 * k[0, 0, 9]
    k[2, :, 10] = np.nextafter(k[0, 0, 9], np.float32(np.inf))
    before = center_of(other).astype(np.float32)
    center = kept_of(before, k[:5])
    assert [list(np.flatnonzero(head)) for head in before] == [[3, 7, 8, 9, 10, 40]] * 2
    assert [list(np.flatnonzero(head)) for head in center] == [[3, 10, 40], [3, 10]]
    held = []
    for device, choice in (("cpu", "first"), ("cuda", "first"), ("cpu", [center])):
        with cache_on(device, [SHAPE], ("int8", "int8"), center=choice, rotate=False) as cache:
            if choice == "first":
                with cache.create() as scratch, cache.step([scratch], [40]) as step:
                    step.append(0, other, v[:40])
            held.append(pages(cache, k, v, [5, 59], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])
    np.testing.assert_array_equal(held[0], held[2])


def test_rows_that_are_refused_leave_the_centre_before(kind: str) -> None:
    """Few rows that come next take their part of it."""
    _, k, v = rows(64)
    other, spoilt = rows(40, seed=1)[1], rows(40, seed=2)[1] - 30
    spoilt[9, 1, 5] = np.nan
    center = kept_of(center_of(other).astype(np.float32), k[:5])
    assert [list(np.flatnonzero(head)) for head in center] == [[3, 40]] * 2
    held = []
    for device, choice in (("cpu", "first"), ("cuda", "first"), ("cpu", [center])):
        options: dict[str, Any] = {"center": choice, "rotate": False, "checked": True}
        with cache_on(device, [SHAPE], ("int8", "int8"), **options) as cache:
            if choice == "first":
                with cache.create() as scratch, cache.step([scratch], [40]) as step:
                    step.append(0, other, v[:40])
                with cache.create() as scratch, cache.step([scratch], [40]) as step:
                    with pytest.raises(pagoda.InvalidArgument, match="row format"):
                        step.append(0, spoilt, v[:40])
                    step.rollback()
            held.append(pages(cache, k, v, [5, 59], of_gpu=(device, kind) == ("cuda", "cuda")))
    np.testing.assert_array_equal(held[0], held[1])
    np.testing.assert_array_equal(held[0], held[2])


HEAD = layer(num_q_heads=2, num_kv_heads=1, head_dim=64)


def out_of_range() -> list[Array]:
    """Rows with numbers too large for a rotation: alone, in pairs of opposite signs, everywhere."""
    spoilt = np.random.default_rng(5).standard_normal((6, 1, 64)).astype(np.float32)
    spoilt[0, 0, 9] = np.inf
    spoilt[1, 0, [3, 40]] = np.inf, -np.inf
    spoilt[2] = np.copysign(np.inf, spoilt[2])
    spoilt[3] = -np.inf
    spoilt[4, 0, [1, 2, 30, 60]] = 3e38, 3e38, -3e38, 3e38
    spoilt[5] = np.copysign(3e38, spoilt[5])
    return list(spoilt)


def turned(x: Array) -> Array:
    """The rotation of rows of 64 from crates/pagoda-cpu/src/transform.rs, with the same rounding."""
    z = np.arange(1, 65, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = np.where((z ^ (z >> np.uint64(31))) & np.uint64(1), -x, x)
    for half in (1, 2, 4, 8, 16, 32):
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], -2).reshape(x.shape)
    return x * np.float32(0.125)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q5_0", "q4_0"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_out_of_range_saturates_before_it_is_rotated(
    name: str, which: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device, with the same bytes: results are those over rows that were clipped, rotated and encoded."""
    q, k, v = rows(64, HEAD)
    {"k": k, "v": v}[which][10:64:10] = out_of_range()

    def stored(x: Array) -> Array:
        x = turned(np.clip(x, np.float32(-(2.0**23)), np.float32(2.0**23)))
        return formats.decode(formats.encode(x, name), name, x.shape)

    right = attention(turned(q.astype(np.float64)), stored(k), stored(v))[0]
    right = right @ turned(np.eye(64)).T
    held = []
    for device in ("cpu", "cuda"):
        isas = pagoda.build_info()["isas"] if device == "cpu" else ["scalar"]
        for isa in isas:
            monkeypatch.setenv("PAGODA_CPU_ISA", isa)
            with cache_on(device, [HEAD], (name, name), center=None) as cache:
                held.append(pages(cache, k, v, [64], of_gpu=(device, kind) == ("cuda", "cuda")))
                with cache.step([cache.create()], [64]) as step:
                    out, lse = step.forward(0, q, k, v, return_lse=True)
            assert np.isfinite(out).all(), isa
            assert np.isfinite(lse).all(), isa
            np.testing.assert_array_equal(held[-1], held[0])
            if isa not in INTEGER_ISAS:
                largest = np.abs(right).max(-1, keepdims=True)
                np.testing.assert_allclose(out / largest, right / largest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q5_0", "q4_0"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_out_of_range_is_refused_where_it_is_checked(name: str, device: str) -> None:
    _, k, v = rows(16, HEAD)
    missing = np.where(np.arange(64) == 5, np.float32(np.nan), v[7])
    with cache_on(device, [HEAD], (name, name), checked=True, center=None) as cache:
        for bad in [*out_of_range(), missing]:
            for which in range(2):
                changed = [k.copy(), v.copy()]
                changed[which][7] = bad
                with pytest.raises(pagoda.InvalidArgument), cache.step([cache.create()], [16]) as step:
                    step.append(0, *changed)
        with cache.step([cache.create()], [16]) as step:
            step.append(0, k, v)


@pytest.mark.parametrize("name", ["int8", "q8_0", "q5_0", "q4_0"])
def test_nan_stays_in_a_row_that_is_rotated(name: str) -> None:
    q, k, v = rows(64, HEAD)
    v[40, 0, 5], v[40, 0, 6] = np.nan, np.inf
    for device in ("cpu", "cuda"):
        with cache_on(device, [HEAD], (name, name)) as cache, cache.step([cache.create()], [64]) as step:
            out = step.forward(0, q, k, v)
        assert np.isfinite(out[:40]).all()
        assert np.isnan(out[40:]).all()


@pytest.mark.parametrize(("name", "size"), [("fp8_e4m3", 64), ("mxfp4", 32), ("nvfp4", 16)])
def test_nan_stays_in_a_block(name: str, size: int) -> None:
    """In elements that share its scale, and in all results of queries that see it in a key; for many queries and for one."""
    for device in ("cpu", "cuda"):
        for which, place in (("v", slice(0, size)), ("k", slice(0, 64))):
            q, k, v = rows(64, HEAD)
            {"k": k, "v": v}[which][40, 0, 5] = np.nan
            with cache_on(device, [HEAD], (name, name), center=None) as cache:
                sequence = cache.create()
                with cache.step([sequence], [64]) as step:
                    out = step.forward(0, q, k, v)
                with cache.step([sequence], [1]) as step:
                    out = np.concatenate([out, step.forward(0, q[:1], k[:1], v[:1])])
            right = np.zeros((65, 2, 64), bool)
            right[40:, :, place] = True
            np.testing.assert_array_equal(np.isnan(out), right)
            assert np.isfinite(out[~right]).all()


ROPE = pagoda.Rope(theta=50.0)
LAYERS = {
    "plain": [SHAPE],
    "rope": [layer(num_q_heads=4, num_kv_heads=2, head_dim=64, rope=ROPE)],
    # A lane has several parts of such rows.
    "window, sinks, cap": [
        layer(num_q_heads=6, num_kv_heads=2, head_dim=160, v_head_dim=256, window=50, sinks=True, softcap=3.0)
    ],
    "latent": [layer(num_q_heads=4, num_kv_heads=1, head_dim=96, v_head_dim=64, v_alias=True)],
    "shared": [SHAPE, layer(num_q_heads=2, num_kv_heads=2, head_dim=96, v_head_dim=64, kv_owner=0)],
}


def attended(device: str, shapes: list[pagoda.AttentionLayer], pair: tuple[str, str], **options: Any) -> list[Array]:
    """Results of a prefill, of diverging forks, of drops if the layer has a rope, with some pages on another tier, and of 14
    query rows a K/V head."""
    results: list[Array] = []
    seed = 0
    with cache_on(device, shapes, pair, **options) as cache:

        def forward(sequences: list[pagoda.Sequence], counts: list[int]) -> None:
            nonlocal seed
            seed += 1
            with cache.step(sequences, counts) as step:
                for index, shape in enumerate(shapes):
                    q, k, v = rows(sum(counts), shape, seed)
                    # What the last lanes of a warp have also takes part in the centre.
                    k[..., -9] -= 15
                    sinks = np.arange(shape.num_q_heads, dtype=np.float32) if shape.sinks else None
                    given = () if shape.kv_owner is not None else (k,) if shape.v_alias else (k, v)
                    results.extend(step.forward(index, q, *given, sink_logits=sinks, return_lse=True))

        first = cache.create()
        forward([first], [100])
        second = first.fork()
        forward([first, second], [1, 3])
        if shapes[0].rope is not None:
            first.drop(20, 50)
            first.drop(30, 33)
        cache.demote(second, (0, 48)).wait()
        forward([first, second], [2, 20])
        forward([first], [7])
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_that_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Centred and rotated by default, over the same bytes. With floats on the CPU, only the order of sums differs."""
    isas: list[str] = pagoda.build_info()["isas"]
    monkeypatch.setenv("PAGODA_CPU_ISA", next(isa for isa in isas if isa not in INTEGER_ISAS))
    pairs = PAIRS[:4:3] if name == "plain" else PAIRS[:1]
    for pair in pairs:
        for one, other in zip(*(attended(device, LAYERS[name], pair) for device in ("cpu", "cuda")), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [np.float32, np.float16])
def test_deterministic_bits_of_quantised_rows(queries: type) -> None:
    """In chunks or all at once, the bits are the same if the centre is given."""
    q, k, v = rows(90)
    q = q.astype(queries)
    center = [k.mean(0)]
    outs = []
    for chunks in ([90], [70, 19, 1]):
        with cache_on("cuda", [SHAPE], PAIRS[0], center=center, deterministic=True) as cache:
            sequence, start, out = cache.create(), 0, []
            for chunk in chunks:
                part = slice(start, start + chunk)
                with cache.step([sequence], [chunk]) as step:
                    out.append(step.forward(0, q[part], k[part], v[part]))
                start += chunk
            outs.append(np.concatenate(out))
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("name", instances.QUANTISED)
def test_the_likeliest_of_a_short_context_is_that_of_float32(name: str) -> None:
    """Each query looks for one key, and values are one-hot: the largest element of a result shows which was found."""
    rng = np.random.default_rng(3)
    shape = layer(num_q_heads=2, num_kv_heads=1, head_dim=64, v_head_dim=64)
    k = rng.standard_normal((64, 1, 64), np.float32)
    k[..., 5] += 10
    q = np.repeat(k[rng.permutation(64)] * np.float32(0.7), 2, axis=1)
    q[..., 5] = 0
    v = np.eye(64, dtype=np.float32)[rng.permutation(64)][:, None]
    with cache_on("cuda", [shape], (name, name)) as cache:
        sequence = cache.create()
        with cache.step([sequence], [64]) as step:
            step.append(0, k, v)
        with cache.step([sequence], [1]) as step:
            out = step.forward(0, q[:1], k[:1], v[:1])
        again = sequence.fork()
        again.truncate(64)
        with cache.step([again], [64]) as step:
            last = step.forward(0, q, k, v)[-1:]
    for result, query, twice in ((out, q[:1], 1), (last, q[-1:], 64)):
        right, _ = attention(query, np.concatenate([k, k[:twice]]), np.concatenate([v, v[:twice]]))
        np.testing.assert_array_equal(result.argmax(-1), right.argmax(-1))


def test_what_does_not_fit_is_refused_where_it_is_checked() -> None:
    _, k, v = rows(16)
    cases = (PAIRS[0], 1e8), (PAIRS[0], np.nan), (PAIRS[1], np.inf), (PAIRS[2], np.nan), (("nvfp4", "nvfp4"), 2700)
    for pair, bad in cases:
        with cache_on("cuda", [SHAPE], pair, checked=True, center=None) as cache:
            with cache.step([cache.create()], [16]) as step:
                step.append(0, k, v)
            for which in range(2):
                changed = [k.copy(), v.copy()]
                changed[which][7, 1, 9] = bad
                with pytest.raises(pagoda.InvalidArgument, match="layer 0"), cache.step([cache.create()], [16]) as step:
                    step.append(0, *changed)


HALF = float(np.finfo(np.float32).max) / 2
LARGEST = [
    ("fp8_e4m3", False, HALF),
    ("int8", False, HALF),
    ("mxfp4", False, HALF),
    ("q8_0", False, 127 * 65504),
    ("q5_0", False, 16 * 65504),
    ("q4_0", False, 8 * 65504),
    ("nvfp4", False, 6 * 448),
    ("int8", True, 2**23),
]
"""The largest numbers that fit: largest code times largest scale, or half of the largest float where that is less. Those that
are rotated go up to 2^23."""


@pytest.mark.parametrize(("name", "rotate", "number"), LARGEST)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_largest_number_fits_and_the_next_does_not(name: str, rotate: bool, number: float, device: str) -> None:
    largest = np.float32(number)
    _, k, v = rows(4, HEAD)
    with cache_on(device, [HEAD], (name, name), checked=True, center=None, rotate=rotate) as cache:
        for x in (k, v):
            for sign in (1, -1):
                for bad in (False, True):
                    x[2, 0, 37] = sign * (np.nextafter(largest, np.float32(np.inf)) if bad else largest)
                    limited = (
                        pytest.raises(pagoda.InvalidArgument, match="row format") if bad else contextlib.nullcontext()
                    )
                    with limited, cache.step([cache.create()], [4]) as step:
                        step.append(0, k, v)
            x[2, 0, 37] = 1


@pytest.mark.parametrize("pair", [("f32", "q8_0"), ("q5_0", "f32")])
def test_what_a_device_does_not_store(pair: tuple[str, str]) -> None:
    named = f"{', '.join(pair)}: on a device f32 goes with f32, f16, bf16 only"
    with pytest.raises(pagoda.BackendUnavailable, match=named):
        cache_on("cuda", [SHAPE], pair)
    assert set(instances.NAMES) | set(instances.QUANTISED) == set(formats.FORMATS)


def as_it_is(cache: pagoda.Cache, given: list[Array]) -> None:
    """Makes a step that loads the kernels, so that a graph can be captured; the cache is empty again afterwards."""
    with cache.create() as sequence, cache.step([sequence], [len(given[0])]) as step:
        step.forward(0, *given)


def test_a_graph_takes_the_centre_once(kind: str) -> None:
    """A captured step may find the cache empty, but a replay takes a centre only if the cache is empty again."""
    if kind != "emulated":
        pytest.skip("graphs of NumPy arrays are emulated ones")
    shape = layer(num_q_heads=2, num_kv_heads=1, head_dim=32)
    q, k, v = rows(48, layer(num_q_heads=2, num_kv_heads=1, head_dim=64))
    q, k, v = (x[..., 8:40].copy() for x in (q, k, v))
    k[24:] += 30
    outs: list[list[Array]] = [[], []]
    for replayed in (False, True):
        with cache_on("cuda", [shape], ("q8_0", "q8_0")) as cache:
            stream: Any = cache._device.caller_stream(None)  # type: ignore[union-attr]
            cache.declare(sequences=1, new_tokens=24, context=64)
            given = [np.zeros((24, *x.shape[1:]), np.float32) for x in (q, k, v)]
            out = np.zeros_like(given[0])
            launch: Callable[[], object] | None = None
            as_it_is(cache, given)
            for offset in (0, -300):
                with cache.create() as sequence:
                    for part in (slice(0, 24), slice(24, 48)):
                        for array, rest in zip(given, (q, k + offset, v), strict=True):
                            array[:] = rest[part]
                        with cache.step([sequence], [24]) as step:
                            if replayed and launch is not None:
                                step.replay(launch)
                            else:
                                if replayed:
                                    stream.begin_capture()
                                step.append(0, given[1], given[2])
                                step.attend(0, given[0], out=out)
                                if replayed:
                                    launch = stream.end_capture().launch
                                    launch()
                        outs[replayed].append(out.copy())
    np.testing.assert_array_equal(outs[0], outs[1])


def test_a_graph_has_the_centre_of_the_step_that_it_does(kind: str) -> None:
    """Captured with stored rows, replayed in an empty cache: the new rows give the centre."""
    if kind != "emulated":
        pytest.skip("graphs of NumPy arrays are emulated ones")
    shape = layer(num_q_heads=2, num_kv_heads=1, head_dim=32)
    q, k, v = (np.ascontiguousarray(x[..., 32:64]) for x in rows(48, layer(num_q_heads=2, num_kv_heads=1, head_dim=64)))
    with cache_on("cuda", [shape], ("q8_0", "q8_0")) as cache:
        stream: Any = cache._device.caller_stream(None)  # type: ignore[union-attr]
        cache.declare(sequences=1, new_tokens=24, context=64)
        given = [x[:24].copy() for x in (q, k, v)]
        out = np.zeros_like(given[0])
        with cache.create() as scratch:
            with cache.step([scratch], [24]) as step:
                step.forward(0, *given, out=out)
            with cache.step([scratch], [24]) as step:
                stream.begin_capture()
                step.forward(0, *given, out=out)
                graph = stream.end_capture()
                step.rollback()
        sequence = cache.create()
        given[1] += 5
        with cache.step([sequence], [24]) as step:
            step.replay(graph.launch)
        # Later rows have the same centre.
        with cache.step([sequence], [24]) as step:
            last = step.forward(0, q[24:], k[24:] + 5, v[24:])
    center = [center_of(given[1])]
    with cache_on("cuda", [shape], ("q8_0", "q8_0"), center=center) as cache:
        sequence = cache.create()
        for part, found in ((slice(0, 24), out), (slice(24, 48), last)):
            with cache.step([sequence], [24]) as step:
                np.testing.assert_array_equal(step.forward(0, q[part], k[part] + 5, v[part]), found)


def test_a_graph_that_was_never_launched_takes_no_centre(kind: str) -> None:
    """Captured work has not run: rows stored before its launch set the centre and keep it."""
    if kind != "emulated":
        pytest.skip("graphs of NumPy arrays are emulated ones")
    q, k, v = (np.ascontiguousarray(x[..., 32:64]) for x in rows(48, layer(num_q_heads=2, num_kv_heads=1, head_dim=64)))
    k[24:] += 30
    outs = []
    for captured in (False, True):
        with cache_on("cuda", [layer(num_q_heads=2, num_kv_heads=1, head_dim=32)], ("q8_0", "q8_0")) as cache:
            stream: Any = cache._device.caller_stream(None)  # type: ignore[union-attr]
            cache.declare(sequences=1, new_tokens=24, context=64)
            sequence = cache.create()
            given = [x[:24].copy() for x in (q, k, v)]
            out = np.zeros_like(given[0])
            as_it_is(cache, given)
            if captured:
                with contextlib.suppress(KeyError), cache.step([sequence], [24]) as step:
                    stream.begin_capture()
                    step.forward(0, *given, out=out)
                    launch: Callable[[], object] = stream.end_capture().launch
                    raise KeyError
            with cache.step([sequence], [24]) as step:
                step.forward(0, *given, out=out)
            for array, rest in zip(given, (q, k, v), strict=True):
                array[:] = rest[24:]
            with cache.step([sequence], [24]) as step:
                if captured:
                    step.replay(launch)
                else:
                    step.forward(0, *given, out=out)
            outs.append(out.copy())
    np.testing.assert_array_equal(outs[0], outs[1])
