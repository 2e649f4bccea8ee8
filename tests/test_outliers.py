"""Centring and rotation: what they must not change, and what they are for."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from mirror import center_of, kept_of, layer
from pagoda.attention.reference import attention

Array = npt.NDArray[Any]

SHAPE = layer(num_q_heads=4, num_kv_heads=2, head_dim=64)


def rows(tokens: int, regime: str, seed: int = 0) -> tuple[Array, Array, Array]:
    """Queries, keys and values. Keys have a constant offset in a few channels, which queries see hardly or like any other, or
    channels that vary wildly."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, heads, 64), np.float32) for heads in (4, 2, 2))
    if "offset" in regime:
        k[..., [3, 40]] += 60
        if regime == "offset":
            q[..., [3, 40]] *= 0.1
    elif regime == "wild":
        k[..., [7, 50]] *= 30
        q[..., [7, 50]] /= 30
    return q, k, v


def run(q: Array, k: Array, v: Array, k_dtype: str, shape: pagoda.AttentionLayer = SHAPE, **options: Any) -> Any:
    """Attention of the last 10 tokens, after the others were appended in two chunks."""
    spec = pagoda.ModelSpec([shape])
    with pagoda.Cache(spec, k_dtype=k_dtype, device_memory="8MiB", host_memory=0, **options) as cache:
        sequence = cache.create()
        for part in (slice(0, 100), slice(100, len(q) - 10)):
            with cache.step([sequence], [len(q[part])]) as step:
                step.append(0, k[part], v[part])
        with cache.step([sequence], [10]) as step:
            return step.forward(0, q[-10:], k[-10:], v[-10:], return_lse=True)


def error(regime: str, k_dtype: str, **options: Any) -> float:
    """Root mean square error of results."""
    q, k, v = rows(400, regime)
    out, lse = run(q, k, v, k_dtype, v_dtype="f32", **options)
    right, right_lse = attention(q[-10:], k, v)
    assert np.abs(lse - right_lse).max() < 4
    return float(np.sqrt(np.mean((out - right) ** 2)))


@pytest.mark.parametrize("k_dtype", ["fp8_e4m3", "int8", "q8_0", "q5_0", "q4_0", "mxfp4", "nvfp4"])
def test_a_constant_offset_costs_nothing_once_it_is_taken_off(k_dtype: str) -> None:
    # Formats with exponents lose little to an offset that queries hardly see.
    regime, times = ("offset, seen", 3) if k_dtype == "fp8_e4m3" else ("offset", 4)
    plain = error(regime, k_dtype, center=None, rotate=False)
    by_default, without = error(regime, k_dtype), error("", k_dtype)
    assert by_default < plain / times
    assert by_default < 1.5 * without


@pytest.mark.parametrize("k_dtype", ["int8", "q8_0", "q5_0", "q4_0"])
def test_rotation_spreads_what_is_wild(k_dtype: str) -> None:
    assert error("wild", k_dtype) < error("wild", k_dtype, rotate=False) / 1.5


def test_a_centre_that_is_given_is_exact() -> None:
    """Rows that are the centre plus small integers are stored exactly: results equal those of float64."""
    q, _, v = rows(300, "")
    rng = np.random.default_rng(2)
    center = rng.standard_normal((2, 64)).astype(np.float32) * 50
    k = rng.integers(-127, 128, (300, 2, 64)).astype(np.float32)
    k[..., 0] = 127
    k += center
    q *= 0.02
    out, lse = run(q, k, v, "int8", v_dtype="f32", center=[center], rotate=False)
    right, right_lse = attention(q[-10:], k, v)
    np.testing.assert_allclose(out, right, atol=3e-4)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5)


@pytest.mark.parametrize("k_dtype", ["q8_0", "fp8_e4m3", "nvfp4"])
def test_a_centre_is_of_means_that_stand_out(k_dtype: str) -> None:
    """By at least two standard deviations: alternating 1 and 3 qualify, 1 and 3.01 or numbers around zero do not."""
    q, k, v = rows(300, "")
    k[::2, :, 7], k[1::2, :, 7] = 1, 3
    k[::2, 1, 9], k[1::2, 1, 9] = 1, 3.01
    k[..., 11] += 2.5
    mean = k[:100].mean(0, np.float64)
    center = np.where(np.isin(np.arange(64), [7, 11]), mean, 0)
    np.testing.assert_array_equal(center, center_of(k[:100]))
    given, all_means, none = (run(q, k, v, k_dtype, center=[c])[0] for c in (center, mean, 0 * mean))
    found, _ = run(q, k, v, k_dtype, center="first")
    np.testing.assert_array_equal(found, given)
    assert (found != all_means).any()
    assert (found != none).any()


def test_the_centre_stays_what_the_first_rows_said() -> None:
    q, k, v = rows(300, "offset")
    with pagoda.Cache(pagoda.ModelSpec([SHAPE]), k_dtype="q8_0", device_memory="8MiB", host_memory=0) as cache:
        first, second = cache.create(), cache.create()
        # A step without rows does not set the centre.
        with cache.step([first], [0]) as step:
            step.append(0, k[:0], v[:0])
        with cache.step([first], [300]) as step:
            step.append(0, k, v)
        # Rows with another mean: the centre is wrong for them, but no less exact than none.
        with cache.step([second], [300]) as step:
            out = step.forward(0, q, k - 60, v)
        assert np.abs(out - attention(q, k - 60, v)[0]).max() < 1
        with cache.step([first], [1]) as step:
            out = step.forward(0, q[:1], k[:1], v[:1])
        right, _ = attention(q[:1], np.concatenate([k, k[:1]]), np.concatenate([v, v[:1]]))
        assert np.abs(out - right).max() < 0.05


def forward(cache: pagoda.Cache, sequence: pagoda.Sequence, rows: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    q, k, v = rows
    with cache.step([sequence], [len(q)]) as step:
        out, lse = step.forward(0, q, k, v, return_lse=True)
    return out, lse


def warm_up(cache: pagoda.Cache, how: str, tokens: int = 100) -> None:
    """A warm-up as engines do it before serving: a step over zeros, or over distant noise, that leaves no tokens."""
    q, k, v = rows(tokens, "")
    k = k - 200 if "noise" in how else np.zeros_like(k)
    scratch = cache.create()
    with cache.step([scratch], [tokens]) as step:
        step.forward(0, q, k, v)
        if "rolled back" in how:
            step.rollback()
        elif "accepted nothing" in how:
            step.commit(accepted=[0])
    if "truncated" in how:
        scratch.truncate(0)
    elif "released" in how:
        scratch.release()


WARM_UPS = ["rolled back", "accepted nothing", "truncated", "released", "noise, released", "let go of"]


@pytest.mark.parametrize("how", WARM_UPS)
def test_what_has_left_nothing_says_nothing_of_the_centre(how: str) -> None:
    """Rows with a constant offset, which q4_0 stores badly if it is not taken off, are centred as without a warm-up."""
    given = rows(300, "offset")
    right, _ = attention(*given)
    errors = {}
    for center in ("first", None):
        for warm in (False, True):
            with pagoda.Cache(
                pagoda.ModelSpec([SHAPE]), k_dtype="q4_0", v_dtype="f16", center=center, device_memory="8MiB"
            ) as cache:
                if warm:
                    warm_up(cache, how)
                out, _ = forward(cache, cache.create(), given)
            errors[center, warm] = float(np.sqrt(np.mean((out - right) ** 2)))
    assert errors["first", False] < errors[None, False] / 4
    assert errors["first", True] == errors["first", False]
    assert errors[None, True] == errors[None, False]


@pytest.mark.parametrize("left", ["a fork", "a token", "a page on the host"])
def test_the_centre_stays_as_long_as_a_page_does(left: str) -> None:
    """Its rows would have other values without it: a wrong centre would shift the log-sum-exp."""
    q, k, v = rows(200, "offset")
    with pagoda.Cache(
        pagoda.ModelSpec([SHAPE]), k_dtype="int8", v_dtype="f16", page_size=16, device_memory="8MiB", host_memory="8MiB"
    ) as cache:
        sequence, held = cache.create(), 100
        forward(cache, sequence, (q[:100], k[:100], v[:100]))
        if left == "a fork":
            fork = sequence.fork()
            sequence.release()
            sequence = fork
        elif left == "a token":
            held = 1
            sequence.truncate(1)
        else:
            held = 16
            sequence.truncate(16)
            cache.demote(sequence).wait()
        # The next rows are another sequence's and have another mean.
        forward(cache, cache.create(), (q[100:], k[100:] - 200, v[100:]))
        out, lse = forward(cache, sequence, (q[100:], k[100:], v[100:]))
    right = attention(q[100:], np.concatenate([k[:held], k[100:]]), np.concatenate([v[:held], v[100:]]))
    np.testing.assert_allclose(out, right[0], atol=0.1)
    np.testing.assert_allclose(lse, right[1], atol=0.1)


def test_few_rows_leave_the_centre_as_it_was() -> None:
    """For the few first rows of an emptied cache, the earlier centre is better than none."""
    q, k, v = rows(300, "offset")
    right, _ = attention(q, k, v)
    errors = []
    for before in (False, True):
        with pagoda.Cache(pagoda.ModelSpec([SHAPE]), k_dtype="q4_0", v_dtype="f16", device_memory="8MiB") as cache:
            if before:
                with cache.create() as other:
                    forward(cache, other, rows(100, "offset", seed=1))
            sequence = cache.create()
            parts = [forward(cache, sequence, (q[part], k[part], v[part])) for part in (slice(0, 5), slice(5, 300))]
            out = np.concatenate([out for out, _ in parts])
        errors.append(float(np.sqrt(np.mean((out - right) ** 2))))
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize(
    "how", [f"noise, {how}" for how in ("rolled back", "accepted nothing", "truncated", "released")]
)
@pytest.mark.parametrize("few", [1, 7])
def test_few_rows_take_nothing_of_what_a_warm_up_said(few: int, how: str) -> None:
    """Their values are nowhere near that centre."""
    q, k, v = rows(70, "")
    results = []
    for warm in (False, True):
        with pagoda.Cache(pagoda.ModelSpec([SHAPE]), k_dtype="int8", v_dtype="f16", device_memory="8MiB") as cache:
            if warm:
                warm_up(cache, how)
            sequence = cache.create()
            parts = [forward(cache, sequence, (q[part], k[part], v[part])) for part in (slice(few), slice(few, 70))]
        results.append(np.concatenate([out for out, _ in parts]))
    np.testing.assert_array_equal(results[0], results[1])


def test_few_rows_take_of_the_centre_what_brings_them_nearer_to_zero() -> None:
    """Element by element, an earlier centre is kept if it has their mean's sign and is less than twice as large."""
    q, k, v = rows(70, "")
    other = rows(100, "", seed=1)
    other[1][..., 3:9] += np.array([60, -60, 60, 60, 9, 60], np.float32)
    # Offset of element 3: as in the other rows; 4: none; 5: opposite sign; 6: just near enough; 7: just too far.
    k[..., 3:9] += np.array([60, 0, -60, 32, 4, 90], np.float32)
    k[:5, :, 6:8] = [32, 4]
    center = kept_of(center_of(other[1]), k[:5])
    assert [list(np.flatnonzero(head)) for head in center] == [[3, 6, 8], [3, 6, 8]]
    results = []
    for choice in ("first", [center]):
        with pagoda.Cache(
            pagoda.ModelSpec([SHAPE]), k_dtype="q8_0", v_dtype="f16", center=choice, device_memory="8MiB"
        ) as cache:
            if choice == "first":
                with cache.create() as scratch:
                    forward(cache, scratch, other)
            sequence = cache.create()
            parts = [forward(cache, sequence, (q[part], k[part], v[part])) for part in (slice(5), slice(5, 70))]
            results.append(np.concatenate([out for out, _ in parts]))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("first", [7, 8])
def test_how_many_rows_are_enough(first: int) -> None:
    """A short prompt, or the first chunk of a longer one, sets the centre of later rows if it has 8 rows."""
    q, k, v = rows(300, "offset")
    right, _ = attention(q, k, v)
    errors = []
    for center in ("first", None):
        with pagoda.Cache(
            pagoda.ModelSpec([SHAPE]), k_dtype="q4_0", v_dtype="f16", center=center, device_memory="8MiB"
        ) as cache:
            short = cache.create()
            forward(cache, short, rows(first, "offset", seed=1))
            out, _ = forward(cache, cache.create(), (q, k, v))
        errors.append(float(np.sqrt(np.mean((out - right) ** 2))))
    assert errors[0] < errors[1] / 4 if first == 8 else errors[0] == errors[1]


@pytest.mark.parametrize("k_dtype", ["fp8_e4m3", "int8", "q8_0", "q4_0", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("absurd", [1e20, -1e30])
def test_an_absurd_row_makes_no_centre(k_dtype: str, absurd: float) -> None:
    """Rows of another sequence are stored as without a centre."""
    given = rows(100, "")
    spoilt = given[1].copy()
    spoilt[30, :, ::3] = absurd
    results = []
    for center in ("first", None):
        with pagoda.Cache(
            pagoda.ModelSpec([SHAPE]), k_dtype=k_dtype, v_dtype="f16", center=center, device_memory="8MiB"
        ) as cache:
            first = cache.create()
            out, lse = forward(cache, first, (given[0], spoilt, given[2]))
            assert np.isfinite(out).all()
            assert np.isfinite(lse).all()
            results.append(forward(cache, cache.create(), given)[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_allclose(results[0], attention(*given)[0], atol=0.5)


def test_layers_that_read_the_keys_of_another_know_its_centre() -> None:
    """The log-sum-exp shows it: weights do not depend on a common part of all keys."""
    q, k, v = rows(100, "offset")
    spec = pagoda.ModelSpec([SHAPE, replace(SHAPE, kv_owner=0)])
    with pagoda.Cache(spec, k_dtype="q8_0", device_memory="8MiB", host_memory=0) as cache:
        with cache.step([cache.create()], [100]) as step:
            owner = step.forward(0, q, k, v, return_lse=True)
            reader = step.attend(1, q, return_lse=True)
    for mine, theirs in zip(owner, reader, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("bad", [np.nan, 1e38])
@pytest.mark.parametrize("count", [7, 40])
def test_rows_that_are_refused_say_nothing_of_the_centre(bad: float, count: int) -> None:
    q, k, v = rows(100, "offset")
    results = []
    for refused in (False, True):
        with pagoda.Cache(
            pagoda.ModelSpec([SHAPE, replace(SHAPE, kv_owner=0)]),
            k_dtype="q4_0",
            v_dtype="q4_0",
            checked=True,
            device_memory="8MiB",
            host_memory=0,
        ) as cache:
            if refused:
                misfit = k[:count].copy()
                misfit[3] = bad
                with cache.step([cache.create()], [count]) as step:
                    with pytest.raises(pagoda.InvalidArgument, match="k"):
                        step.append(0, misfit, v[:count])
                    step.rollback()
            with cache.step([cache.create()], [100]) as step:
                results.append([step.forward(0, q, k, v), step.attend(1, q)])
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("count", [5, 40])
def test_rows_that_are_refused_leave_the_centre_as_it_was(count: int) -> None:
    """Few rows take the earlier centre, as if nothing had been refused in between."""
    q, k, v = rows(40, "offset")
    misfit = k[:count].copy()
    misfit[3] = np.nan
    results = []
    for refused in (False, True):
        with pagoda.Cache(pagoda.ModelSpec([SHAPE]), k_dtype="q4_0", checked=True, device_memory="8MiB") as cache:
            with cache.create() as other:
                forward(cache, other, rows(100, "offset", seed=1))
            if refused:
                with cache.step([cache.create()], [count]) as step:
                    with pytest.raises(pagoda.InvalidArgument, match="k"):
                        step.append(0, misfit, v[:count])
                    step.rollback()
            results.append(forward(cache, cache.create(), (q[:5], k[:5], v[:5]))[0])
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("center", ["auto", [np.full((2, 64), 50.0)]])
@pytest.mark.parametrize("k_dtype", ["int8", "q4_0"])
def test_deterministic_bits_do_not_depend_on_what_came_first(k_dtype: str, center: Any) -> None:
    q, k, v = rows(100, "offset")
    options: dict[str, Any] = {"k_dtype": k_dtype, "center": center, "device_memory": "8MiB", "host_memory": 0}
    results = []
    for first in ("nothing", "another sequence", "a step that is rolled back"):
        with pagoda.Cache(pagoda.ModelSpec([SHAPE]), deterministic=True, **options) as cache:
            if first != "nothing":
                with contextlib.suppress(KeyError), cache.step([cache.create()], [100]) as step:
                    step.append(0, k - 45, v)
                    if first != "another sequence":
                        raise KeyError
            with cache.step([cache.create()], [100]) as step:
                results.append(step.forward(0, q, k, v))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("options", [{}, {"center": None}, {"rotate": False}])
def test_spans_that_have_moved(options: dict[str, Any]) -> None:
    """Queries are rotated back for each span, so centring adds a different number to the scores of each."""
    rope = pagoda.Rope(theta=50.0)
    shape = layer(num_q_heads=4, num_kv_heads=2, head_dim=64, rope=rope)
    q, k, v = rows(300, "offset")
    results = []
    for k_dtype in ("f32", "q8_0"):
        with pagoda.Cache(
            pagoda.ModelSpec([shape]), k_dtype=k_dtype, v_dtype="f32", device_memory="8MiB", **options
        ) as cache:
            sequence = cache.create()
            with cache.step([sequence], [299]) as step:
                step.append(0, k[:299], v[:299])
            sequence.drop(50, 120)
            sequence.drop(100, 110)
            with cache.step([sequence], [1]) as step:
                results.append(step.forward(0, q[299:], k[299:], v[299:], return_lse=True))
    loose = 5e-1 if options.get("center", "auto") is None else 3e-2
    np.testing.assert_allclose(results[1][0], results[0][0], atol=loose)
    np.testing.assert_allclose(results[1][1], results[0][1], atol=loose)


def test_what_is_left_alone() -> None:
    """Unquantised formats, and rows that are both K and V: the bits do not depend on the options."""
    latent = pagoda.AttentionLayer(8, 1, 96, v_head_dim=64, v_alias=True)
    for shape, dtype in ((SHAPE, "f16"), (latent, "q8_0")):
        rng = np.random.default_rng(3)
        q = rng.standard_normal((40, shape.num_q_heads, shape.head_dim), np.float32)
        k = rng.standard_normal((40, shape.num_kv_heads, shape.head_dim), np.float32)
        k[:, :, 5] += 30
        v = None if shape.v_alias else k
        results = []
        for options in ({"center": None, "rotate": False}, {"center": "first", "rotate": True}):
            kept: dict[str, Any] = {"k_dtype": dtype, "v_dtype": dtype, "threads": 1, **options}
            with pagoda.Cache(pagoda.ModelSpec([shape]), **kept) as cache:
                with cache.step([cache.create()], [40]) as step:
                    results.append(step.forward(0, q, k, v).tobytes())
        assert results[0] == results[1], dtype


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"center": "mean"}, "center = 'mean'"),
        ({"center": [None, None]}, "center = 2 arrays"),
        ({"center": [np.zeros((2, 32))]}, r"center\[0\] = shape \[2, 32\]"),
        ({"center": [np.full((2, 64), np.nan)]}, r"center\[0\] = nan among others: finite numbers \[2, 64\]"),
        (
            {"center": [np.diag([-65536.0, *[1.0] * 63])[:2]]},
            r"center\[0\] = -65536.0 among others: numbers from -65504 to 65504",
        ),
        ({"center": "first", "deterministic": True}, 'center = "first": not with deterministic=True'),
        ({"rotate": "yes"}, "rotate = 'yes'"),
    ],
)
def test_choices_that_cannot_be(options: dict[str, Any], named: str) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=named):
        pagoda.Cache(pagoda.ModelSpec([SHAPE]), k_dtype="q8_0", **options)


def test_centres_may_be_one_array_of_all_layers() -> None:
    for number in (0, -65504):
        pagoda.Cache(
            pagoda.ModelSpec([pagoda.AttentionLayer(8, 2, 64)]), k_dtype="q8_0", center=np.full((1, 2, 64), number)
        ).close()
    with pytest.raises(pagoda.InvalidArgument, match="center = 2 arrays: 1"):
        pagoda.Cache(
            pagoda.ModelSpec([pagoda.AttentionLayer(8, 2, 64)]), k_dtype="q8_0", center=np.zeros((2, 2, 64), np.float32)
        )
