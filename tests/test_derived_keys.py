"""Gemma 4's attention_k_eq_v: only V is stored and K derived from it, against float64 and against stored K."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import EmulatedDriver, install_driver
from hypothesis import given
from hypothesis import strategies as st
from mirror import derived, through, tolerance_of
from pagoda.attention.reference import attention
from pagoda.formats import FORMATS
from pagoda.kernels import instances
from pagoda.rope import ProportionalScaling, Rope, YarnScaling

Array = npt.NDArray[Any]

SUMS = 1e-4
"""How far a device's results may be from others, relative to the largest: tensor cores truncate sums of 512 products."""
GEMMA_4 = next(layer for layer in pagoda.ModelSpec.preset("gemma-4-12b").attention_layers if layer.k_eq_v)
"""16 query heads on one K/V head of 512 elements, a quarter of which is rotated."""

ROPES = [
    None,
    Rope(theta=100.0),
    Rope(theta=100.0, interleaved=True),
    Rope(theta=50.0, rotary_dim=24),
    Rope(theta=1e4, scaling=ProportionalScaling(0.25)),
    Rope(theta=100.0, rotary_dim=24, scaling=YarnScaling(4.0, 64)),
]


class Pair:
    """A cache that derives K, and one on the CPU that stores it as f32, with the same V; every call is made on both."""

    def __init__(self, layer: pagoda.AttentionLayer, v_dtype: str, seed: int = 0, **options: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.layer, self.v_dtype = layer, v_dtype
        self.weight = self.rng.uniform(0.2, 2, layer.head_dim).astype(np.float32)
        spec = pagoda.ModelSpec([layer])
        common: dict[str, Any] = {
            "v_dtype": v_dtype,
            "device_memory": "32MiB",
            "rotate": False,
        } | options
        self.derived = pagoda.Cache(spec, k_norms=[self.weight], **common)
        # On the CPU, K may be f32 whatever the format of V.
        self.stored = pagoda.Cache(spec.storing_k(), k_dtype="f32", device="cpu", **common)
        self.tolerance = tolerance_of(self.stored, 2e-5 if self.derived._device is None else SUMS)
        self.caches = [self.derived, self.stored]

    def create(self) -> list[pagoda.Sequence]:
        return [cache.create() for cache in self.caches]

    def rows(self, tokens: int) -> tuple[Array, Array]:
        """Queries, and values as after a norm."""
        q, v = (
            self.rng.standard_normal((tokens, heads, self.layer.head_dim), np.float32)
            for heads in (self.layer.num_q_heads, self.layer.num_kv_heads)
        )
        return q * 0.5, v

    def step(self, batch: list[list[pagoda.Sequence]], counts: list[int], *, attend: bool = True) -> None:
        """Appends random rows, and compares the two results."""
        q, v = self.rows(sum(counts))
        results = []
        for index, cache in enumerate(self.caches):
            with cache.step([pair[index] for pair in batch], counts) as step:
                k = derived(through(v, self.v_dtype), self.weight, self.layer.rope, step.positions).astype(np.float32)
                step.append(0, k if index else None, v)
                if attend:
                    results.append(step.attend(0, q, return_lse=True))
            cache.audit()
        if attend:
            (out, lse), (right, right_lse) = results
            np.testing.assert_allclose(out, right, rtol=0, atol=self.tolerance * np.abs(right).max())
            np.testing.assert_allclose(lse, right_lse, rtol=0, atol=self.tolerance * max(1, np.abs(right_lse).max()))


@pytest.fixture
def stored_there(request: pytest.FixtureRequest, v_dtype: str) -> None:
    """Skips formats that the device does not store."""
    if request.config.getoption("--device") != "cpu" and v_dtype not in instances.STORED:
        pytest.skip(f"a device does not store {v_dtype}")


@pytest.mark.usefixtures("stored_there")
@pytest.mark.parametrize("v_dtype", FORMATS)
def test_gemma_4s_derived_k_agrees_with_k_stored(v_dtype: str, emulated: bool) -> None:
    """With the model's own shape, over more than a run of pages: a prompt in chunks, then tokens of two branches."""
    pair = Pair(GEMMA_4, v_dtype)
    first, other = pair.create(), pair.create()
    pair.step([first, other], [90 if emulated else 4080, 3], attend=False)
    pair.step([first, other], [3, 2] if emulated else [40, 20])
    branch = [sequence.fork() for sequence in first]
    for _ in range(2):
        pair.step([first, branch, other], [1, 1, 1])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("v_dtype", ["f32", "bf16", "q8_0"])
def test_derived_k_against_float64(rope: Rope | None, v_dtype: str) -> None:
    layer = pagoda.AttentionLayer(6, 2, 96, rope=rope, k_eq_v=True, softcap=4.0)
    pair = Pair(layer, v_dtype)
    with pair.derived.step([pair.derived.create()], [300]) as step:
        q, v = pair.rows(300)
        out, lse = step.forward(0, q, v=v, return_lse=True)
        values = through(v, v_dtype)
        k = derived(values, pair.weight, rope, step.positions)
    right, right_lse = attention(q, k, values, softcap=4.0)
    np.testing.assert_allclose(out, right, rtol=0, atol=tolerance_of(pair.derived, 1e-5))
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=1e-5)


@given(
    layer=st.builds(
        pagoda.AttentionLayer,
        num_q_heads=st.sampled_from([2, 4, 14]),
        num_kv_heads=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([32, 40, 96]),
        window=st.sampled_from([None, None, 7, 70]),
        rope=st.sampled_from(ROPES),
        k_eq_v=st.just(True),
    ),
    page_size=st.sampled_from([8, 16, 64]),
    trailing=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_whatever_happens_to_sequences(layer: pagoda.AttentionLayer, page_size: int, trailing: bool, seed: int) -> None:
    """Forks, drops, truncations, migrations, windows and trailing sinks."""
    quantised = layer.head_dim % 32 == 0
    trailing = trailing and layer.window is None and layer.rope is not None
    retention = pagoda.SinkWindow(5, 60, "cache") if trailing else None
    rng = np.random.default_rng(seed)
    v_dtype = str(
        rng.choice([name for name in FORMATS if name in instances.STORED] if quantised else ["f32", "f16", "bf16"])
    )
    pair = Pair(layer, v_dtype, seed, page_size=page_size, headroom=64, retention=retention)
    live = [pair.create()]
    for _ in range(8):
        count = int(rng.choice([1, 1, 9, 60]))
        pair.step(live, [count] * len(live))
        sequence = live[int(rng.integers(len(live)))]
        length = len(sequence[0])
        start = length - int(rng.integers(min(length, 30)))
        for cache, own in zip(pair.caches, sequence, strict=True):
            match seed % 4:
                case 0 if sequence[0].rewind_limit == 0:
                    own.drop(start // 2, start)
                case 1 if start >= own.rewind_limit:
                    own.truncate(start)
                case 2:
                    cache.demote(own).wait()
                case 3 if len(live) < 3 and cache is pair.derived:
                    live.append([one.fork() for one in sequence])


@pytest.mark.parametrize("v_dtype", ["f16", "q8_0", "nvfp4"])
@pytest.mark.usefixtures("names_the_cpu")
def test_decode_and_prefill_agree_to_the_bit(v_dtype: str) -> None:
    """In deterministic mode, for any chunks, number of threads and batch, and wherever pages lie."""
    layer = replace(GEMMA_4, num_q_heads=4, head_dim=128)
    rng = np.random.default_rng(5)
    weight = rng.uniform(0.2, 2, 128).astype(np.float32)
    q, v = (rng.standard_normal((4200, heads, 128), np.float32) for heads in (4, 1))
    results = []
    for threads, chunks in ((1, [4150, 50]), (2, [4150, *[1] * 50]), (2, [4090, 73, 1, 36])):
        with pagoda.Cache(
            pagoda.ModelSpec([layer]),
            k_norms=[weight],
            v_dtype=v_dtype,
            device="cpu",
            threads=threads,
            deterministic=True,
        ) as cache:
            sequence, outs = cache.create(), []
            for end, count in zip(np.cumsum(chunks), chunks, strict=True):
                rows = slice(end - count, end)
                with cache.step([sequence], [count]) as step:
                    step.append(0, v=v[rows])
                    if end > 4150:
                        outs.append(step.attend(0, q[rows]))
                if threads == 2:
                    cache.demote(sequence, (0, 640)).wait()
            results.append(np.concatenate(outs)[-36:])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_layers_may_read_derived_keys_of_another() -> None:
    layer = pagoda.AttentionLayer(4, 2, 64, rope=Rope(theta=50.0), k_eq_v=True)
    spec = pagoda.ModelSpec([layer, replace(layer, num_q_heads=2, kv_owner=0)])
    rng = np.random.default_rng(0)
    q, v = (rng.standard_normal((90, heads, 64), np.float32) for heads in (4, 2))
    weight = rng.uniform(0.2, 2, 64).astype(np.float32)
    with pagoda.Cache(spec, v_dtype="f32", k_norms=[weight, None]) as cache:
        with cache.step([cache.create()], [90]) as step:
            step.append(0, v=v)
            out = step.attend(1, q[:, :2])
            k = derived(v, weight, layer.rope, step.positions)
    np.testing.assert_allclose(out, attention(q[:, :2], k, v)[0], rtol=0, atol=1e-5)


def test_only_v_takes_memory() -> None:
    pair = Pair(GEMMA_4, "q8_0")
    first = pair.create()
    pair.step([first], [640], attend=False)
    used = [cache.stats().used_bytes("device") for cache in pair.caches]
    assert used == [640 * 544, 640 * (544 + 2048)]
    assert used[0] == 640 * pair.derived.spec.bytes_per_token("f32", "q8_0")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"k_norms\[0\] = None: finite numbers \[32\].*storing_k"),
        ({"k_norms": []}, "k_norms = 0 arrays: 1"),
        ({"k_norms": [np.ones(31)]}, r"k_norms\[0\] = shape \[31\]"),
        ({"k_norms": [np.full(32, -np.inf)]}, r"k_norms\[0\] = -inf among others: finite numbers \[32\].*storing_k"),
    ],
)
def test_weights_that_cannot_be(options: dict[str, Any], named: str) -> None:
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(2, 1, 32, k_eq_v=True)])
    with pytest.raises(pagoda.InvalidArgument, match=named):
        pagoda.Cache(spec, **options)
    with pytest.raises(pagoda.InvalidArgument, match=r"k_norms\[0\] = an array: None"):
        pagoda.Cache(spec.storing_k(), k_norms=[np.ones(32)])


def test_layers_that_cannot_be() -> None:
    with pytest.raises(pagoda.InvalidArgument, match="v_head_dim = 16"):
        pagoda.AttentionLayer(2, 1, 32, 16, k_eq_v=True)
    with pytest.raises(pagoda.InvalidArgument, match="v_alias = True"):
        pagoda.AttentionLayer(2, 1, 32, v_alias=True, k_eq_v=True)
    owner = pagoda.AttentionLayer(2, 1, 32, rope=Rope(), k_eq_v=True)
    for change in ({"rope": None}, {"k_eq_v": False}):
        with pytest.raises(pagoda.InvalidArgument, match=rf"layers\[1\].{next(iter(change))}"):
            pagoda.ModelSpec([owner, replace(owner, kv_owner=0, **change)])


def test_rows_that_cannot_be() -> None:
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(2, 1, 32, k_eq_v=True), pagoda.AttentionLayer(2, 1, 32)])
    rows = np.zeros((3, 1, 32), np.float32)
    with pagoda.Cache(spec, k_norms=[np.ones(32), None], checked=True) as cache:
        step = cache.step([cache.create()], [3])
        step.__enter__()
        for given_rows, named in (
            ((rows, rows), "k = an array: None, for a layer with k_eq_v"),
            ((rows,), "k = an array"),
            ((), r"v = None: an array \[sum\(new\), 1, 32\]"),
            ((None, rows[:2]), "v = "),
            ((None, rows * np.nan), r"v\[0, 0\]|k, v = values of layer 0"),
        ):
            with pytest.raises(pagoda.InvalidArgument, match=named):
                step.append(0, *given_rows)
        with pytest.raises(pagoda.InvalidArgument, match=r"k = None: an array \[sum\(new\), 1, 32\]"):
            step.append(1, None, rows)


def test_queries_that_a_device_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 640 elements in q8_0 with 32-bit queries need more than 99 KB of shared memory; 16-bit queries fit."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    monkeypatch.setattr(driver, "shared_bytes_max", 99 << 10)
    spec, rows = pagoda.ModelSpec([replace(GEMMA_4, head_dim=640)]), np.ones((1, 16, 640), np.float16)
    memory: dict[str, Any] = {"device_memory": "8MiB", "host_memory": 0}
    norms = [np.ones(640)]
    with pagoda.Cache(spec, device="cuda", v_dtype="q8_0", k_norms=norms, **memory) as cache:
        with cache.step([cache.create()], [1]) as step:
            step.append(0, v=rows[:, :1])
            with pytest.raises(
                pagoda.BackendUnavailable, match=r"q = dtype f32: .* needs 125648 bytes of shared memory"
            ):
                step.attend(0, rows.astype(np.float32))
            np.testing.assert_array_equal(step.attend(0, rows), rows)
    wide = pagoda.ModelSpec([replace(GEMMA_4, head_dim=1024)])
    with pytest.raises(pagoda.BackendUnavailable, match="shared memory"):
        pagoda.Cache(wide, device="cuda", v_dtype="q8_0", k_norms=[np.ones(1024)], **memory)
