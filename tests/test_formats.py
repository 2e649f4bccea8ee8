"""Row formats against other implementations: ggml's own Python package, ml_dtypes, and NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import example, given
from hypothesis import strategies as st
from mirror import INTEGER_ISAS, Mirror, layer
from pagoda import _core, formats
from pagoda.cli.bench import depth, longcontext, quality
from pagoda.measuring import calibration

Rows = npt.NDArray[np.float32]

GGML = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q5_0": gguf.GGMLQuantizationType.Q5_0}
GGML["q4_0"] = gguf.GGMLQuantizationType.Q4_0
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def samples(dim: int = 256) -> Rows:
    """Rows of many scales, with zeros, single outliers, equal steps and exact ties."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((300, dim)) * 10.0 ** rng.uniform(-6, 3, (300, 1))
    normal[::7] *= rng.random((43, dim)) < 0.1
    normal += 0.0  # In blocks of zeros ggml and its Python package differ about the sign of the scale of -0.
    outliers = rng.standard_normal((50, dim))
    outliers[np.arange(50), rng.integers(0, dim, 50)] *= 1000
    steps = rng.integers(-8, 9, (50, dim)) * 0.25
    return np.concatenate([normal, outliers, steps, np.zeros((1, dim)), -np.ones((1, dim))]).astype(np.float32)


@pytest.mark.parametrize("name", GGML)
def test_blocks_are_those_of_ggml(name: str) -> None:
    x = samples()
    theirs = quantize(x, GGML[name])
    ours = formats.encode(x, name)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(formats.decode(ours, name, x.shape), dequantize(theirs, GGML[name]))


ORDERS = GGML | {"mxfp4": gguf.GGMLQuantizationType.MXFP4, "nvfp4": gguf.GGMLQuantizationType.NVFP4}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dim", [64, 256, 1024])
def test_ggml_s_order_is_left_and_taken(name: str, dim: int) -> None:
    """ggml's blocks represent the same numbers as our rows and scales, and the conversion back gives the same bytes."""
    x = samples(dim).reshape(2, -1, dim)
    theirs = quantize(x, GGML[name]) if name in GGML else formats.encode(x, name)
    kept = theirs.copy()
    rows, scales = formats.from_ggml(theirs, name)
    assert rows.shape[:-1] == scales.shape[:-1] == x.shape[:-1]
    numbers = _core.decode_rows(rows.reshape(-1, rows.shape[-1]), scales.reshape(-1, scales.shape[-1]), name, dim)
    np.testing.assert_array_equal(numbers.reshape(x.shape), dequantize(theirs, ORDERS[name]))
    np.testing.assert_array_equal(formats.to_ggml(rows, scales, name), theirs)
    np.testing.assert_array_equal(theirs, kept)
    # Views with gaps, one row, and none.
    np.testing.assert_array_equal(formats.to_ggml(rows[:, ::2], scales[:, ::2], name), theirs[:, ::2])
    np.testing.assert_array_equal(formats.from_ggml(theirs[0, 3], name)[1], scales[0, 3])
    none = formats.from_ggml(theirs[:0], name)
    assert formats.to_ggml(*none, name).shape == theirs[:0].shape


@pytest.mark.parametrize("name", GGML)
def test_pages_go_to_ggml_and_come_from_it(name: str) -> None:
    """A page holds what ggml makes of the rows, and a page written from ggml's blocks gives the same attention."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((16, heads, 64), np.float32) for heads in (4, 2, 2))
    wanted = [quantize(np.ascontiguousarray(x.swapaxes(0, 1)), GGML[name]) for x in (k, v)]
    spec = pagoda.ModelSpec([layer(num_q_heads=4, num_kv_heads=2, head_dim=64)])
    options: dict[str, Any] = {"center": None, "rotate": False, "page_size": 16, "device_memory": "1MiB"}
    outs = []
    for written in (False, True):
        with (
            pagoda.Cache(spec, device="cpu", k_dtype=name, v_dtype=name, host_memory=0, **options) as cache,
            cache.step([cache.create()], [16]) as step,
        ):
            if written:
                parts = [part for blocks in wanted for part in formats.from_ggml(blocks, name)]
                page = np.concatenate([part.ravel() for part in parts])
                ctypes.memmove(int(step.table(0).pointers[0, 0]), page.tobytes(), page.size)
            else:
                step.append(0, k, v)
                address, size = int(step.table(0).pointers[0, 0]), cache.stats().block_bytes[0]
                page = np.frombuffer(ctypes.string_at(address, size), np.uint8)
                # [K, V], each with [head][token][row], then [head][token][scales of a row].
                row = formats.FORMATS[name].row_bytes(64)
                rows, scales = np.split(page.reshape(2, -1), [2 * 16 * row], axis=1)
                blocks = formats.to_ggml(rows.reshape(2, 2, 16, row), scales.reshape(2, 2, 16, -1), name)
                np.testing.assert_array_equal(blocks, wanted)
            outs.append(step.attend(0, q))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_mxfp4_is_that_of_the_standard() -> None:
    x = samples()
    blocks = x.reshape(len(x), -1, 32)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(blocks).max(axis=2))) - 2
    exponent = np.maximum(exponent, -127)
    values = np.clip(blocks / np.exp2(exponent)[..., None].astype(np.float32), -6, 6).astype(E2M1).astype(np.float32)
    expected = (values * np.exp2(exponent)[..., None]).reshape(x.shape)
    packed = formats.encode(x, "mxfp4")
    np.testing.assert_array_equal(formats.decode(packed, "mxfp4", x.shape), expected)
    # ggml's package reads the same blocks in its own layout.
    np.testing.assert_array_equal(dequantize(packed, gguf.GGMLQuantizationType.MXFP4), expected)


def test_nvfp4_is_e2m1_times_e4m3() -> None:
    x = samples()
    blocks = x.reshape(len(x), -1, 16)
    largest = np.minimum(np.abs(blocks).max(axis=2), np.float32(6 * 448))
    scale = (largest / np.float32(6)).astype(E4M3).astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.clip(np.where(scale == 0, 0, np.clip(blocks, -2688, 2688) / scale), -6, 6)
    expected = (values.astype(E2M1).astype(np.float32) * scale).reshape(x.shape)
    packed = formats.encode(x, "nvfp4")
    np.testing.assert_array_equal(formats.decode(packed, "nvfp4", x.shape), expected)
    np.testing.assert_array_equal(dequantize(packed, gguf.GGMLQuantizationType.NVFP4), expected)


def test_fp8_is_that_of_ml_dtypes() -> None:
    x = samples()
    scale = (np.abs(x).max(axis=1, keepdims=True) / np.float32(448)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale == 0, 0, x / scale).clip(-448, 448).astype(E4M3)
    packed = formats.encode(x, "fp8_e4m3")
    np.testing.assert_array_equal(packed[:, -4:].copy().view(np.float32), scale)
    np.testing.assert_array_equal(packed[:, :-4], codes.view(np.uint8))
    np.testing.assert_array_equal(formats.decode(packed, "fp8_e4m3", x.shape), codes.astype(np.float32) * scale)


def test_int8_rounds_to_nearest() -> None:
    x = samples()
    scale = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(np.where(scale == 0, 0, x / scale)).astype(np.int8)
    packed = formats.encode(x, "int8")
    np.testing.assert_array_equal(packed[:, :-4].view(np.int8), codes)
    np.testing.assert_array_equal(formats.decode(packed, "int8", x.shape), codes * scale)


@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_plain_formats(name: str, dtype: Any) -> None:
    x = np.concatenate([samples().ravel(), [1e-8, -1e-40, 65519, 3.3e38 if name != "f16" else 1, 0, -0.0, 1, 2]])
    rows = x.astype(np.float32).reshape(-1, 8)
    packed = formats.encode(rows, name)
    np.testing.assert_array_equal(packed, rows.astype(dtype).view(np.uint8))
    np.testing.assert_array_equal(formats.decode(packed, name, rows.shape), rows.astype(dtype).astype(np.float32))


ERRORS = {"f32": 0, "f16": 2e-3, "bf16": 1e-2, "fp8_e4m3": 4e-2, "int8": 1e-2, "q8_0": 1e-2, "q5_0": 7e-2, "q4_0": 0.13}
ERRORS |= {"mxfp4": 0.26, "nvfp4": 0.24}
"""The largest error relative to the largest number of a block: roughly half a step."""
LEAST = {"nvfp4": 6 * 2.0**-10}
"""An error that is always allowed: that of the largest code with half the smallest step of a scale."""


@given(name=st.sampled_from(list(formats.FORMATS)), seed=st.integers(0, 2**32 - 1), power=st.integers(-2, 2))
@example(name="nvfp4", seed=183, power=-2)
def test_what_is_stored_is_near(name: str, seed: int, power: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((3, 64)) * 10.0**power).astype(np.float32)
    packed = formats.encode(x, name)
    assert packed.shape == (3, formats.FORMATS[name].bytes(64))
    again = formats.decode(packed, name, x.shape)
    near = max((ERRORS[name] + 1e-7) * np.abs(x).max(), LEAST.get(name, 0))
    assert np.abs(again - x).max() <= near + 2**-24


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if formats.FORMATS[name].scale_bytes])
def test_nan_and_infinity_in_a_block(name: str) -> None:
    x = np.ones((1, 128), np.float32)
    x[0, 3] = np.nan
    again = formats.decode(formats.encode(x, name), name, x.shape)
    size = formats.FORMATS[name].block or 128
    assert np.isnan(again[0, :size]).all()
    np.testing.assert_allclose(again[0, size:], 1, rtol=0.04)
    x[0, 3] = -np.inf
    again = formats.decode(formats.encode(x, name), name, x.shape)
    assert np.isfinite(again).all()
    assert again[0, 3] < -2000


@pytest.mark.parametrize("name", formats.FORMATS)
def test_numbers_at_an_odd_address(name: str) -> None:
    """For example in a file after a header of one byte."""
    right = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    odd = np.frombuffer(b"?" + right.tobytes(), np.float32, offset=1).reshape(3, 64)
    assert not odd.flags.aligned
    np.testing.assert_array_equal(formats.encode(odd, name), formats.encode(right, name))


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if formats.FORMATS[name].scale_bytes])
def test_numbers_next_to_nothing_keep_their_signs(name: str) -> None:
    steps = np.random.default_rng(0).integers(-200, 201, (200, 64)) * np.arange(1, 201)[:, None] // 200
    x = steps.astype(np.float32) * np.float32(2**-149)
    again = formats.decode(formats.encode(x, name), name, x.shape)
    assert np.abs(again).max() < 2**-125
    assert (np.sign(again) * np.sign(x) >= 0).all()


@pytest.mark.parametrize(
    ("name", "most"),
    [("nvfp4", 6 * 2.0**-10), ("q8_0", 127 * 2.0**-25), ("q5_0", 16 * 2.0**-25), ("q4_0", 8 * 2.0**-25)],
)
def test_what_is_too_small_for_any_scale_is_nothing(name: str, most: float) -> None:
    x = np.full((1, 64), most, np.float32)
    assert not formats.decode(formats.encode(x, name), name, x.shape).any()
    assert formats.decode(formats.encode(np.nextafter(x, np.float32(1)), name), name, x.shape).all()


def test_what_cannot_be() -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: formats.encode(np.ones((2, 32)), "q9_0"), "name = 'q9_0'"),
        (lambda: formats.encode(np.ones((2, 40)), "q8_0"), "multiple of 32"),
        (lambda: formats.encode(np.ones((2, 32)), "nvfp4"), "multiple of 64"),
        (lambda: formats.encode(np.float32(1), "f16"), "shape"),
        (lambda: formats.encode(np.full((2, 32), 1e39), "f32"), "numbers up to 1e\\+39"),
        (lambda: formats.encode(np.full((2, 32), 1e39, ">f8"), "f32"), "numbers up to 1e\\+39"),
        (lambda: formats.encode(np.full((2, 32), 1e39, np.longdouble), "f32"), "numbers up to 1e\\+39"),
        (lambda: formats.decode(np.ones((2, 33), np.uint8), "q8_0", (2, 32)), r"rows = uint8 \[2, 33\]"),
        (lambda: formats.decode(np.ones((2, 34), np.int8), "q8_0", (2, 32)), "rows = int8"),
        (
            lambda: formats.to_ggml(np.ones((2, 32), np.uint8), np.ones((2, 4), np.uint8), "int8"),
            "name = 'int8': one of",
        ),
        (
            lambda: formats.to_ggml(np.ones((2, 33), np.uint8), np.ones((2, 2), np.uint8), "q8_0"),
            r"rows = uint8 \[2, 33\]",
        ),
        (lambda: formats.to_ggml(np.ones((2, 24), np.uint8), np.ones((2, 2), np.uint8), "q5_0"), "multiple of 32"),
        (lambda: formats.to_ggml(np.ones((2, 16), np.uint8), np.ones((2, 2), np.uint8), "nvfp4"), "multiple of 64"),
        (lambda: formats.to_ggml(np.ones((2, 32), np.int8), np.ones((2, 2), np.uint8), "q8_0"), "rows = int8"),
        (
            lambda: formats.to_ggml(np.ones((2, 32), np.uint8), np.ones((2, 4), np.uint8), "q8_0"),
            r"scales = uint8 \[2, 4\]: uint8 \[2, 2\]",
        ),
        (
            lambda: formats.to_ggml(np.ones((2, 32), np.uint8), np.ones((2, 1), np.float16), "q8_0"),
            r"scales = float16 \[2, 1\]",
        ),
        (lambda: formats.from_ggml(np.ones((2, 35), np.uint8), "q8_0"), r"blocks = uint8 \[2, 35\]: uint8 \[2, 34\]"),
        (lambda: formats.from_ggml(np.ones((2, 33), np.uint8), "q8_0"), r"blocks = uint8 \[2, 33\]: .* up to 1024"),
        (lambda: formats.from_ggml(np.ones(33 * 34, np.uint8), "q8_0"), r"blocks = uint8 \[1122\]: .* up to 1024"),
        (lambda: formats.from_ggml(np.uint8(1), "q8_0"), "blocks = uint8"),  # type: ignore[arg-type]
        (lambda: formats.from_ggml([[1] * 34], "q8_0"), "blocks = list"),  # type: ignore[arg-type]
    ]
    for call, named in calls:
        with pytest.raises(pagoda.InvalidArgument, match=named):
            call()


@given(
    dtypes=st.tuples(*[st.sampled_from(list(formats.FORMATS))] * 2),
    dims=st.tuples(*[st.sampled_from([32, 64, 96, 160])] * 2),
    page_size=st.sampled_from([8, 16, 64]),
    alias=st.booleans(),
    group=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_over_every_pair(
    dtypes: tuple[str, str], dims: tuple[int, int], page_size: int, alias: bool, group: int, seed: int
) -> None:
    """Attention sees the rows as the codec stores them; rows that must not be read hold NaN."""
    shape = layer(num_q_heads=2 * group, num_kv_heads=2, head_dim=max(dims), v_head_dim=min(dims), v_alias=alias)
    spec = pagoda.ModelSpec([shape])
    with pagoda.Cache(
        spec,
        k_dtype=dtypes[0],
        v_dtype=dtypes[1],
        center=None,
        rotate=False,
        page_size=page_size,
        device_memory="8MiB",
        host_memory=0,
        threads=2,
    ) as cache:
        mirror = Mirror(cache, np.random.default_rng(seed))
        batch = [mirror.create(), mirror.create()]
        for counts in ([70, 3], [1, 1], [20, 0], [1, 5]):
            mirror.step(batch, counts, junk=2)


def test_products_of_bfloat16_are_of_those_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8_e4m3: rounding queries and weights to bfloat16 costs exactly what ml_dtypes' rounding costs."""
    if "avx512bf16" not in pagoda.build_info()["isas"]:
        pytest.skip("this CPU does not multiply bfloat16 numbers")
    monkeypatch.setenv("PAGODA_CPU_ISA", "avx512bf16")
    rng = np.random.default_rng(3)
    q = rng.standard_normal((50, 4, 128)).astype(np.float32)
    k, v = rng.standard_normal((2, 50, 1, 128)).astype(np.float32)
    spec = pagoda.ModelSpec([layer(num_q_heads=4, num_kv_heads=1, head_dim=128)])
    options: dict[str, Any] = {"device": "cpu", "device_memory": "1MiB", "host_memory": 0, "threads": 1}
    with (
        pagoda.Cache(spec, k_dtype="fp8_e4m3", v_dtype="fp8_e4m3", center=None, rotate=False, **options) as cache,
        cache.create() as sequence,
    ):
        # For many queries, rows would be decoded.
        for new in (range(49), range(49, 50)):
            with cache.step([sequence], [len(new)]) as step:
                out = step.forward(0, q[new], k[new], v[new])[-1]
    keys = formats.decode(formats.encode(k[:, 0], "fp8_e4m3"), "fp8_e4m3", (50, 128))
    packed = formats.encode(v[:, 0], "fp8_e4m3")
    scales = packed[:, 128:].copy().view(np.float32)[:, 0]
    codes = packed[:, :128].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def rounded(x: Any) -> Any:
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    # Scores are in base 2.
    scores = rounded(q[-1] * np.float32(np.log2(np.e) / np.sqrt(128))) @ keys.T.astype(np.float64)
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    expected = rounded(weights * scales) @ codes / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "largest"), [("q8_0", 32639), ("q5_0", 127), ("q4_0", 127), ("mxfp4", 127), ("nvfp4", 127)]
)
def test_products_of_integers_are_of_those_integers(name: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding queries and weights costs exactly what it costs in NumPy, and nothing else is lost."""
    isas = [isa for isa in pagoda.build_info()["isas"] if isa in INTEGER_ISAS]
    if not isas:
        pytest.skip("rows are multiplied as floats")
    rng, dim = np.random.default_rng(3), 128 if name == "nvfp4" else 96
    q = rng.standard_normal((50, 4, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 50, 1, dim)).astype(np.float32)
    shape = layer(num_q_heads=4, num_kv_heads=1, head_dim=dim)
    options: dict[str, Any] = {"device": "cpu", "device_memory": "1MiB", "host_memory": 0, "threads": 1}
    spec, outs = pagoda.ModelSpec([shape]), []
    for isa in isas:
        monkeypatch.setenv("PAGODA_CPU_ISA", isa)
        with (
            pagoda.Cache(spec, k_dtype=name, v_dtype=name, center=None, rotate=False, **options) as cache,
            cache.step([cache.create()], [50]) as step,
        ):
            outs.append(step.forward(0, q, k, v)[-1])
    keys, packed = formats.decode(formats.encode(k[:, 0], name), name, (50, dim)), formats.encode(v[:, 0], name)
    if name == "nvfp4":
        scales = packed.reshape(100, -1)[:, :4].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif name == "mxfp4":
        scales = np.exp2(packed.reshape(150, -1)[:, 0].astype(np.float64) - 127)
    else:
        scales = packed.reshape(150, -1)[:, :2].copy().view(np.float16).astype(np.float64)
    scales = scales.reshape(50, -1)
    codes = formats.decode(packed, name, (50, dim)).reshape(*scales.shape, -1) / scales[..., None]

    def rounded(x: npt.NDArray[np.float64], axis: int) -> Any:
        unit = np.abs(x).max(axis, keepdims=True) / largest
        return np.rint(x / unit) * unit

    queries = rounded(q[-1].astype(np.float64).reshape(4, -1, 32), 2).reshape(4, dim)
    scores = queries @ keys.T.astype(np.float64) / np.sqrt(dim)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    integers = rounded(weights[:, :, None] * scales, 1)
    expected = np.einsum("hts,tsi->hsi", integers, codes).reshape(4, dim) / weights.sum(1, keepdims=True)
    for out in outs:
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_a_cache_of_every_format_is_the_size_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=2, head_dim=64)
    spec = pagoda.ModelSpec([layer])
    for name in formats.FORMATS:
        with pagoda.Cache(
            spec, k_dtype=name, v_dtype="f16", page_size=16, device_memory="1MiB", host_memory=0
        ) as cache:
            assert cache.stats().block_bytes[0] == 16 * spec.bytes_per_token(name, "f16")
    monkeypatch.setenv("PAGODA_KV_DTYPE", "q8_0, q4_0")
    with pagoda.Cache(spec, device_memory="1MiB", host_memory=0) as cache:
        assert cache.dtypes == [("q8_0", "q4_0")]
    monkeypatch.setenv("PAGODA_KV_DTYPE", "q8_0,f12")
    with pytest.raises(pagoda.InvalidArgument, match="PAGODA_KV_DTYPE = 'f12'"):
        pagoda.Cache(spec)
    narrow = pagoda.ModelSpec([pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=2, head_dim=40)])
    monkeypatch.setenv("PAGODA_KV_DTYPE", "f16,q4_0")
    with pytest.raises(
        pagoda.InvalidArgument, match=r"v_head_dim = 40: a multiple of 32, for q4_0, as PAGODA_KV_DTYPE"
    ):
        pagoda.Cache(narrow)
    monkeypatch.delenv("PAGODA_KV_DTYPE")
    with pytest.raises(pagoda.InvalidArgument, match=r"for q4_0$"):
        pagoda.Cache(narrow, v_dtype="q4_0")


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize(
    "command",
    [
        "bench quality --formats f16",
        "bench depth --formats f16",
        "bench longcontext --format f16",
        "doctor --calibrate",
        "plan qwen3-8b",
    ],
)
def test_what_measures_or_plans_formats_by_name_takes_no_others(
    command: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGODA_KV_DTYPE", "q4_0")
    for module, name in (
        (quality, "measure"),
        (depth, "timed"),
        (longcontext, "memory_ceiling"),
        (calibration, "_read_disk"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something is measured"))
    place = ["--disk", str(tmp_path)] if "longcontext" in command or "doctor" in command else []
    said = refused(*command.split(), *place)
    assert said == "PAGODA_KV_DTYPE = 'q4_0': unset, for what measures formats that it names, or plans with them"


def test_formats_by_layer() -> None:
    """Layers with different formats are different groups, in one budget."""
    layer = pagoda.AttentionLayer(num_q_heads=2, num_kv_heads=1, head_dim=32)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((100, heads, 32), np.float32) for heads in (2, 1, 1))
    names = ["q8_0", "f32", "q8_0"]
    with pagoda.Cache(
        pagoda.ModelSpec([layer] * 3), k_dtype=names, v_dtype="f32", device_memory="4MiB", host_memory="4MiB"
    ) as cache:
        assert len(cache.stats().block_bytes) == 2
        sequence = cache.create()
        with cache.step([sequence], [100]) as step:
            outs = [step.forward(layer, q, k, v) for layer in range(3)]
        np.testing.assert_array_equal(outs[0], outs[2])
        assert np.abs(outs[0] - outs[1]).max() > 1e-5
        cache.execute(cache.plan(sequence, "host", layers=[1])).wait()
        cache.audit()
    with pytest.raises(pagoda.InvalidArgument, match="k_dtype = 2 formats"):
        pagoda.Cache(pagoda.ModelSpec([layer] * 3), k_dtype=["f16", "f16"])
