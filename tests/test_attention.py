"""Attention over pages against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pagoda
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror import DTYPES, Mirror, check, layer, tolerance_of
from pagoda.attention.reference import attention
from pagoda.formats import FORMATS
from pagoda.kernels import instances

SEED = st.integers(0, 2**32 - 1)


def small_cache(layers: list[pagoda.AttentionLayer], **options: Any) -> pagoda.Cache:
    defaults: dict[str, Any] = {"device_memory": "8MiB", "host_memory": "8MiB", "threads": 2}
    return pagoda.Cache(pagoda.ModelSpec(layers=layers), **(defaults | options))


@st.composite
def layers(draw: st.DrawFn, unit: int = 8, scale_max: float = 0.5) -> pagoda.AttentionLayer:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim, v_head_dim = (unit * draw(st.integers(1, 160 // unit)) for _ in range(2))
    return layer(
        num_q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16])),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        v_alias=v_head_dim <= head_dim and draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 150)),
        scale=draw(st.none() | st.floats(0.01, scale_max)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        sinks=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> list[pagoda.AttentionLayer]:
    """One to three layers; later ones may read the K and V of the first."""
    first, *others = draw(st.lists(layers(), min_size=1, max_size=3))
    shared: dict[str, Any] = {"kv_owner": 0}
    shared |= {name: getattr(first, name) for name in ("num_kv_heads", "head_dim", "v_head_dim", "v_alias")}

    def reader(own: pagoda.AttentionLayer) -> pagoda.AttentionLayer:
        window = first.window and draw(st.integers(1, first.window))
        heads = first.num_kv_heads * (own.num_q_heads // own.num_kv_heads)
        return replace(own, **shared, num_q_heads=heads, window=window or own.window)

    return [first, *(reader(own) if draw(st.booleans()) else own for own in others)]


@given(
    layers=models(),
    page_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtypes=st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES))),
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 7, -1, 0x10, 0x11]), min_size=2, max_size=2),
        min_size=1,
        max_size=5,
    ),
    junk=st.integers(0, 9),
    seed=SEED,
)
def test_tiled_attention_matches_full_attention(
    layers: list[pagoda.AttentionLayer],
    page_size: int,
    dtypes: tuple[str, str],
    steps: list[list[int]],
    junk: int,
    seed: int,
) -> None:
    """Random shapes, formats, windows, caps, sinks and owners; ragged lengths around the page size; NaN beyond the end."""
    lengths = {-1: page_size - 1, 0x10: page_size, 0x11: page_size + 1}
    with small_cache(layers, page_size=page_size, k_dtype=dtypes[0], v_dtype=dtypes[1], device_memory="64MiB") as cache:
        mirror = Mirror(cache, np.random.default_rng(seed))
        batch = [mirror.create(), mirror.create()]
        for counts in steps:
            mirror.step(batch, [lengths.get(count, count) for count in counts], junk=junk)


@given(
    # Where queries are rounded to a byte, larger scales mean larger errors of scores.
    layer=layers(32, scale_max=0.1),
    page_size=st.sampled_from([8, 16, 64]),
    pair=st.sampled_from([(name, name) for name in instances.QUANTISED] + [("bf16", "q8_0"), ("q8_0", "q4_0")]),
    steps=st.lists(st.lists(st.sampled_from([0, 1, 2, 7, 15, 16, 40]), min_size=2, max_size=2), min_size=1, max_size=5),
    junk=st.integers(0, 9),
    seed=SEED,
)
def test_quantised_rows_are_what_their_codes_say(
    layer: pagoda.AttentionLayer, page_size: int, pair: tuple[str, str], steps: list[list[int]], junk: int, seed: int
) -> None:
    """Formats that every device stores, in layers of any kind; NaN beyond the end."""
    options: dict[str, Any] = {"center": None, "rotate": False}
    with small_cache([layer], page_size=page_size, k_dtype=pair[0], v_dtype=pair[1], **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(seed))
        batch = [mirror.create(), mirror.create()]
        for counts in steps:
            mirror.step(batch, counts, junk=junk)


@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_paged_matches_monolithic(page_size: int) -> None:
    """A prefill of 1,000 tokens over pages equals attention over one array."""
    rng = np.random.default_rng(0)
    shape = layer(num_q_heads=8, num_kv_heads=2, head_dim=64)
    q, k, v = (rng.standard_normal((1000, heads, 64), np.float32) for heads in (8, 2, 2))
    with small_cache([shape], page_size=page_size, k_dtype="f32", v_dtype="f32") as cache:
        with cache.step([cache.create()], [1000]) as step:
            out, lse = step.forward(0, q, k, v, return_lse=True)
        check(out, lse, *attention(q, k, v))


def test_blocks_of_32_tokens_match_blocks_of_256() -> None:
    """Page size changes where rows lie, not what attention sees."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((700, heads, 32), np.float32) for heads in (4, 2, 2))
    results = []
    for page_size in (32, 256):
        with small_cache([layer(head_dim=32)], page_size=page_size, deterministic=True) as cache:
            with cache.step([cache.create()], [700]) as step:
                results.append(step.forward(0, q, k, v))
    np.testing.assert_array_equal(results[0], results[1])


def test_latent_rows_are_read_once_as_k_and_as_v() -> None:
    """Rows of multi-head latent attention: one K/V head of 576 elements, the first 512 of which are V."""
    rng = np.random.default_rng(5)
    shape = layer(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, v_alias=True)
    q, k = rng.standard_normal((100, 16, 576), np.float32), rng.standard_normal((100, 1, 576), np.float32)
    with small_cache([shape], k_dtype="bf16", v_dtype="f16") as cache:
        assert cache.spec.bytes_per_token("bf16", "f16") == 576 * 2
        with cache.step([cache.create()], [100]) as step:
            out, lse = step.forward(0, q, k, return_lse=True)
        stored = k.astype(ml_dtypes.bfloat16).astype(np.float64)
        check(out, lse, *attention(q, stored, stored[..., :512]), tolerance_of(cache))


BY_BLOCKS = [name for name, form in FORMATS.items() if form.block or not form.quantised]
"""Formats in which part of a row is stored as it would be alone."""


@pytest.mark.parametrize("dtype", BY_BLOCKS)
def test_v_read_out_of_the_stored_row_has_the_bits_of_v_stored_beside_it(dtype: str) -> None:
    rng = np.random.default_rng(7)
    shape = layer(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, v_alias=True)
    q, k = rng.standard_normal((170, 16, 576), np.float32), rng.standard_normal((170, 1, 576), np.float32)
    results = []
    for shape_of, v in ((shape, None), (replace(shape, v_alias=False), k[..., :512])):
        options: dict[str, Any] = {"k_dtype": dtype, "v_dtype": dtype, "center": None, "rotate": False, "device": "cpu"}
        with small_cache([shape_of], page_size=16, device_memory="8MiB", **options) as cache:
            sequence, outs = cache.create(), []
            for rows in (slice(0, 150), slice(150, 169), slice(169, 170)):
                with cache.step([sequence], [rows.stop - rows.start]) as step:
                    outs.append(step.forward(0, q[rows], k[rows], None if v is None else v[rows]))
            results.append(np.concatenate(outs))
    np.testing.assert_array_equal(results[0], results[1])


def test_many_small_terms_are_not_lost_beside_a_large_one() -> None:
    """One heavy key, then 100,000 light ones that together weigh half as much."""
    rng = np.random.default_rng(6)
    count = 100_000
    k = np.zeros((count, 1, 32), np.float32)
    k[0, 0, 0] = np.log(2 * count) * 32**0.5
    q = np.zeros((1, 1, 32), np.float32)
    q[..., 0] = 1
    v = rng.random((count, 1, 32), np.float32)
    shape = layer(num_q_heads=1, num_kv_heads=1, head_dim=32)
    with small_cache([shape], k_dtype="f32", v_dtype="f32", device="cpu", device_memory="64MiB", threads=1) as cache:
        sequence = cache.create()
        with cache.step([sequence], [count - 1]) as step:
            step.append(0, k[:-1], v[:-1])
        with cache.step([sequence], [1]) as step:
            out = step.forward(0, q, k[-1:], v[-1:])
    right, _ = attention(q, k, v)
    assert np.abs(out - right).max() < 5e-6


def test_the_first_step_may_have_no_sequences() -> None:
    with small_cache([layer(), layer(kv_owner=0)]) as cache:
        mirror = Mirror(cache, np.random.default_rng(8))
        mirror.step([], [])
        mirror.step([mirror.create()], [20])


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float16, 5e-3), (ml_dtypes.bfloat16, 1e-2)])
@pytest.mark.parametrize("v_dtype", ["f16", "bf16"])
def test_light_rows_are_not_lost_beside_a_heavy_one_without_a_value(
    v_dtype: str, dtype: Any, tolerance: float, count: int
) -> None:
    """As in models with sinks: the first token takes nearly all of the weight but adds nothing; the result is the others'."""
    rng = np.random.default_rng(7)
    k = np.zeros((500, 1, 64), np.float32)
    v = rng.uniform(1000, 2000, (500, 1, 64)).astype(np.float32)
    v[0] = 0
    for gap in (10, 14, 18):
        k[0, 0, 0] = gap * 8
        q = np.zeros((count, 4, 64), dtype)
        q[..., 0] = 1
        with small_cache([layer(num_kv_heads=1, head_dim=64)], k_dtype=v_dtype, v_dtype=v_dtype) as cache:
            sequence = cache.create()
            with cache.step([sequence], [500 - count]) as step:
                step.append(0, k[:-count], v[:-count])
            with cache.step([sequence], [count]) as step:
                out = step.forward(0, q, k[-count:], v[-count:])
        right, _ = attention(q, k, v.astype(DTYPES[v_dtype]))
        np.testing.assert_allclose(out.astype(np.float64), right, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_of_every_type_and_stride(dtype: Any) -> None:
    """K, V and Q may be slices of one fused array; the result has the type of Q."""
    rng = np.random.default_rng(2)
    fused = rng.standard_normal((50, 8, 24), np.float32).astype(dtype)
    q, k, v = fused[:, :4, :16], fused[:, 4:6, 8:], fused[::-1, 6:, :16]
    with (
        small_cache([layer()], k_dtype="f32", v_dtype="f32") as cache,
        cache.step([cache.create()], [50]) as step,
    ):
        out = step.forward(0, q, k, v)
        expected, _ = attention(q, k, v)
        assert out.dtype == dtype
        bits = {2: 3e-3 if dtype == np.float16 else 2e-2, 4: 3e-6}[np.dtype(dtype).itemsize]
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=bits)


@pytest.mark.usefixtures("names_the_cpu")
def test_sink_logits_of_every_address_and_stride() -> None:
    """They may be a field of records whose size is no multiple of a float's. A device takes only contiguous ones."""
    logits = np.array([2, -1, 0.5, 3], np.float32)
    records = np.zeros(4, np.dtype([("logit", "f4"), ("byte", "u1")]))
    records["logit"] = logits
    odd = np.frombuffer(b"?" + logits.tobytes(), np.float32, offset=1)
    both = np.stack([logits, -logits], axis=1)
    backwards = np.ascontiguousarray(logits[::-1])[::-1]
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((20, heads, 16), np.float32) for heads in (4, 2, 2))
    with small_cache([layer(sinks=True)]) as cache, cache.step([cache.create()], [20]) as step:
        right = step.forward(0, q, k, v, sink_logits=logits)
        for sinks in (records["logit"], records["logit"][::-1][::-1], odd, both[:, 0], backwards):
            np.testing.assert_array_equal(step.attend(0, q, sink_logits=sinks), right)


def test_bits_of_bfloat16_come_as_uint16() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((20, heads, 16), np.float32).astype(ml_dtypes.bfloat16) for heads in (4, 2, 2))
    results = []
    for as_bits in (False, True):
        arrays = [rows.view(np.uint16) if as_bits else rows for rows in (q, k, v)]
        with small_cache([layer()]) as cache, cache.step([cache.create()], [20]) as step:
            out = step.forward(0, *arrays, dtype="bf16" if as_bits else None)
            results.append(out.view(np.uint16))
    np.testing.assert_array_equal(results[0], results[1])


def test_what_f16_cannot_hold_saturates_or_is_refused() -> None:
    k = np.full((1, 2, 16), 1e6, np.float32)
    q, v = np.full((1, 4, 16), 1e-6, np.float32), np.ones((1, 2, 16), np.float32)
    with small_cache([layer()]) as cache, cache.step([cache.create()], [1]) as step:
        _, lse = step.forward(0, q, k, v, return_lse=True)
        np.testing.assert_allclose(lse, 65504e-6 * 16 * 16**-0.5, rtol=1e-5)
    with small_cache([layer()], checked=True) as cache:
        for bad in (k, np.full_like(k, np.nan), np.full_like(k, -np.inf)):
            with pytest.raises(pagoda.InvalidArgument), cache.step([cache.create()], [1]) as step:
                step.append(0, bad, v)
        cache.audit()


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_results_that_f16_cannot_hold_saturate(value: float) -> None:
    k, v = np.zeros((30, 2, 16), np.float32), np.full((30, 2, 16), value, np.float32)
    q = np.ones((30, 4, 16), np.float16)
    with small_cache([layer()], k_dtype="bf16", v_dtype="bf16") as cache, cache.step([cache.create()], [30]) as step:
        assert (step.forward(0, q, k, v) == np.copysign(65504, value)).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_context_shift_rotates_queries_not_keys(interleaved: bool) -> None:
    """After `drop`, tokens before the gap are seen as if they stood right before the tokens after it; no key is changed."""
    rng = np.random.default_rng(4)
    rope = pagoda.Rope(theta=100.0, interleaved=interleaved)
    shape = layer(head_dim=16, rope=rope)
    inv_freq = 100.0 ** (-np.arange(8) / 8)

    def rotate(rows: Any, positions: Any) -> Any:
        pairs = (rows[..., 0::2], rows[..., 1::2]) if interleaved else (rows[..., :8], rows[..., 8:])
        angle = positions[:, None, None] * inv_freq
        turned = (
            pairs[0] * np.cos(angle) - pairs[1] * np.sin(angle),
            pairs[1] * np.cos(angle) + pairs[0] * np.sin(angle),
        )
        return np.stack(turned, -1).reshape(rows.shape) if interleaved else np.concatenate(turned, -1)

    k, v = (rng.standard_normal((101, 2, 16)) for _ in range(2))
    q = rng.standard_normal((101, 4, 16))
    at = np.arange(101)
    with small_cache([shape], k_dtype="f32", v_dtype="f32", page_size=16) as cache:
        sequence = cache.create()
        with cache.step([sequence], [100]) as step:
            step.append(0, *(rows[:100].astype(np.float32) for rows in (rotate(k, at), v)))
        sequence.drop(10, 40)
        sequence.drop(30, 33)
        with cache.step([sequence], [1]) as step:
            assert step.positions.tolist() == [100]
            new = [rows[100:].astype(np.float32) for rows in (rotate(q, at), rotate(k, at), v)]
            out, lse = step.forward(0, *new, return_lse=True)
    left = np.r_[0:10, 40:60, 63:101]
    shifted = np.r_[33:43, 43:63, 63:101]
    check(out, lse, *attention(rotate(q[100:], at[100:]), rotate(k[left], shifted), v[left]))


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "page_size"), [("f16", 64), ("f32", 16), ("bf16", 128), ("q8_0", 16), ("q4_0", 64), ("fp8_e4m3", 32)]
)
def test_pages_in_common_are_read_once(dtype: str, page_size: int, deterministic: bool) -> None:
    """A tree of forks, one of them truncated inside a common page, and an unrelated sequence. In deterministic caches each
    sequence reads its own pages: the bits are those of a sequence alone."""
    spec = pagoda.ModelSpec([layer(head_dim=32), layer(head_dim=32, softcap=20.0)])
    options: dict[str, Any] = {"center": None, "rotate": False, "deterministic": deterministic, "threads": 2}
    with pagoda.Cache(
        spec, page_size=page_size, k_dtype=dtype, v_dtype=dtype, device_memory="64MiB", host_memory=0, **options
    ) as cache:
        mirror = Mirror(cache, np.random.default_rng(7))
        root, alone = mirror.create(), mirror.create()
        mirror.step([root, alone], [1300, 50])
        long = mirror.fork(root)
        mirror.step([long], [1200])
        twin, cut = mirror.fork(long), mirror.fork(root)
        mirror.truncate(cut, 700)
        batch = [long, alone, cut, root, twin]

        def step(new: list[int], spared: int) -> None:
            mirror.step(batch, new)
            assert mirror.last is not None
            tokens = sum(map(len, batch)) - (0 if deterministic else spared)
            assert mirror.last.report.bytes["memory"] == tokens * spec.bytes_per_token(dtype, dtype)

        first, second, third = (length // page_size * page_size for length in (700, 1300, 2500))
        all_of_it = 3 * first + 2 * (second - first) + (third - second)
        step([1, 2, 3, 1, 1], all_of_it)
        step([2, 1, 1, 5, 16], all_of_it)
        # A sequence with that many queries reads its pages alone; what the others share after `first` saves too little.
        step([1, 1, 1, 1, 17], 2 * first)
        mirror.truncate(twin, first + 3)
        step([1, 1, 1, 1, 1], 3 * first)
        mirror.drop(long, 5, 6)
        step([1, 1, 1, 1, 1], 2 * first)
        # Spans that begin inside a page have other pages than as many tokens from its start.
        mirror.truncate(root, second)
        mirror.drop(root, 0, 5)
        shifted = mirror.fork(root)
        mirror.step([root, shifted], [40, 40])
        mirror.step([root, shifted], [1, 1])


@pytest.mark.parametrize("threads", [1, 3])
def test_many_holes(threads: int) -> None:
    """More short spans than are processed at once, and one long span."""
    rng = np.random.default_rng(5)
    long, total = 4500, 6000
    k, v = (rng.standard_normal((total, 2, 16)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((1, 4, 16)).astype(np.float32)
    with small_cache([layer(head_dim=16)], k_dtype="f32", v_dtype="f32", page_size=16, threads=threads) as cache:
        sequence = cache.create()
        with cache.step([sequence], [total - 1]) as step:
            step.append(0, k[:-1], v[:-1])
        holes = range(long, total - 20, 13)
        for hole in reversed(holes):
            sequence.drop(hole, hole + 2)
        with cache.step([sequence], [1]) as step:
            out, lse = step.forward(0, q, k[-1:], v[-1:], return_lse=True)
    left = np.setdiff1d(np.arange(total), [token for hole in holes for token in (hole, hole + 1)])
    check(out, lse, *attention(q, k[left], v[left]))


@given(seed=SEED, chunks=st.lists(st.integers(1, 120), min_size=1, max_size=4), threads=st.integers(1, 3))
def test_deterministic_bits_do_not_depend_on_chunks_batch_threads_or_tiers(
    seed: int, chunks: list[int], threads: int
) -> None:
    rng = np.random.default_rng(seed)
    total = sum(chunks)
    layers = [
        layer(num_q_heads=6, num_kv_heads=2, head_dim=24, window=window, softcap=9.0, sinks=True)
        for window in (None, 100)
    ]
    rows = [[rng.standard_normal((total, heads, 24), np.float32) for heads in (6, 2, 2)] for _ in layers]
    sinks = rng.standard_normal(6).astype(np.float32)

    def run(pieces: list[int], threads: int, crowd: int, migrate: bool) -> list[Any]:
        with small_cache(layers, page_size=16, threads=threads, deterministic=True, device_memory="32MiB") as cache:
            others = [cache.create() for _ in range(crowd)]
            sequence = cache.create()
            outs: list[list[Any]] = [[], []]
            start = 0
            for piece in pieces:
                with cache.step([*others, sequence], [3] * crowd + [piece]) as step:
                    for index in range(2):
                        noise = [rng.standard_normal((3 * crowd, *part.shape[1:]), np.float32) for part in rows[index]]
                        part = [p[start : start + piece] for p in rows[index]]
                        both = [np.concatenate(pair) for pair in zip(noise, part, strict=True)]
                        outs[index].append(step.forward(index, *both, sink_logits=sinks)[3 * crowd :])
                start += piece
                if migrate:
                    cache.demote(sequence, (0, int(rng.integers(0, start + 1)))).wait()
                    cache.promote(sequence, (0, int(rng.integers(0, start + 1)))).wait()
            return [np.concatenate(out) for out in outs]

    once = run([total], 2, 0, False)
    again = run(chunks, threads, 2, True)
    np.testing.assert_array_equal(once[0], again[0])
    np.testing.assert_array_equal(once[1], again[1])
