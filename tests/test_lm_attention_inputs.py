"""What a forward pass passes to attention, and what plain arrays make of it, against formulas in float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from pagoda.lm import ContiguousCache, LanguageModel, contiguous
from pagoda.spec import StateLayer

Array = npt.NDArray[Any]

DIM, THETA = 16, 1000.0
POSITIONS = np.array([0, 1, 5, 63, 64, 1000, 131_071, 1_000_000, 1_048_575])
TOKENS = np.arange(len(POSITIONS)) * 29 % 256


class Recorder:
    """A step at chosen positions that keeps the queries and keys of the first layer."""

    def __init__(self, positions: Array) -> None:
        self.positions = positions
        self.cu_seqlens = np.array([0, len(positions)], np.int32)
        self.first: tuple[Array, Array] | None = None

    def forward(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        if self.first is None:
            self.first = q.copy(), k.copy()
        return np.zeros_like(q)


def first_layer(model: LanguageModel, positions: Array) -> tuple[Array, Array]:
    step = Recorder(positions)
    model.forward(TOKENS, step)
    assert step.first is not None
    return step.first


def linear(pair: int) -> float:
    return float(THETA ** (-2 * pair / DIM)) / 4


def llama3(pair: int) -> float:
    """https://arxiv.org/abs/2407.21783: wavelengths above the old context are stretched, those below a quarter of it stay."""
    frequency = THETA ** (-2 * pair / DIM)
    wavelength = 2 * np.pi / frequency
    if wavelength < 64 / 4:
        return float(frequency)
    if wavelength > 64 / 1:
        return float(frequency / 8)
    smooth = (64 / wavelength - 1) / (4 - 1)
    return float((1 - smooth) * frequency / 8 + smooth * frequency)


def yarn(pair: int) -> float:
    """https://arxiv.org/abs/2309.00071, section 3.2, with the bounds, in pairs, rounded as in transformers."""

    def pair_that_turns(times: float) -> float:
        return DIM * float(np.log(64 / (times * 2 * np.pi))) / (2 * float(np.log(THETA)))

    low, high = max(int(np.floor(pair_that_turns(32))), 0), min(int(np.ceil(pair_that_turns(1))), DIM - 1)
    stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
    frequency = float(THETA ** (-2 * pair / DIM))
    return frequency / 4 * stretched + frequency * (1 - stretched)


def longrope(pair: int) -> float:
    """https://arxiv.org/abs/2402.13753: each pair has its own factor."""
    return float(THETA ** (-2 * pair / DIM)) / (1 + pair)


FACTORS = [1.0 + pair for pair in range(DIM // 2)]
LONG = {"rope_type": "longrope", "factor": 4.0, "long_factor": FACTORS, "short_factor": FACTORS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = {"original_max_position_embeddings": 64}
SCALINGS: dict[str, tuple[Any, Any, float]] = {
    "plain": (None, lambda pair: THETA ** (-2 * pair / DIM), 1.0),
    "linear": ({"rope_type": "linear", "factor": 4.0}, linear, 1.0),
    "llama3": (LLAMA3 | OLD, llama3, 1.0),
    "yarn": ({"rope_type": "yarn", "factor": 4.0} | OLD, yarn, 0.1 * np.log(4.0) + 1),
    "longrope": (LONG | OLD | {"max_position_embeddings": 256}, longrope, np.sqrt(1 + np.log(4.0) / np.log(64.0))),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_up_to_a_million_tokens(name: str, tmp_path: Path) -> None:
    """Rotated rows are the unrotated ones times exp(i p f), with f a float32 as in transformers."""
    scaling, frequency, factor = SCALINGS[name]
    config, _ = checkpoints.make(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = LanguageModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    scaled = LanguageModel.load(tmp_path)
    turned = first_layer(scaled, POSITIONS)
    for before, after in zip(first_layer(plain, np.zeros_like(POSITIONS)), turned, strict=True):
        for pair in range(DIM // 2):
            turn = factor * np.exp(1j * POSITIONS * float(np.float32(frequency(pair))))
            expected = (before[..., pair] + 1j * before[..., pair + DIM // 2]) * turn[:, None]
            found = after[..., pair] + 1j * after[..., pair + DIM // 2]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_queries_of_global_layers_grow(tmp_path: Path) -> None:
    config, _ = checkpoints.make(tmp_path, "smollm3")
    changes = {"no_rope_layers": [0, 1, 1, 1], "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    q, k = first_layer(LanguageModel.load(tmp_path), POSITIONS)
    scale = {"pagoda_query_log_scale": {"floor": 100.0, "coefficient": 0.3}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes | scale))
    grown, same = first_layer(LanguageModel.load(tmp_path), POSITIONS)
    np.testing.assert_array_equal(same, k)
    for row, position in enumerate(POSITIONS.tolist()):
        factor = 1 + 0.3 * np.log((position + 1) / 100) if position >= 100 else 1.0
        np.testing.assert_allclose(grown[row], q[row] * factor, rtol=1e-6)


def naive(q: Array, k: Array, v: Array, window: int | None, scale: float | None) -> Array:
    """Attention of the last len(q) tokens over all tokens, one query and one head at a time, in float64."""
    out = np.empty((len(q), q.shape[1], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale
    for row in range(len(q)):
        position = len(k) - len(q) + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            seen = slice(first, position + 1)
            scores = k[seen, head // group].astype(np.float64) @ q[row, head] * scale
            chances = np.exp(scores - scores.max())
            out[row, head] = chances / chances.sum() @ v[seen, head // group]
    return out


@pytest.mark.parametrize("scores_bytes", [1, 700, 8 << 20])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (1, None), (5, None), (64, None), (None, 12.0)])
def test_plain_arrays_attend_exactly(
    window: int | None, scale: float | None, scores_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged steps of two sequences, with scores cut into pieces of any size. With a scale of 12, scores of two queries are
    so far apart that e to their difference is 0."""
    monkeypatch.setattr(contiguous, "SCORES_BYTES", scores_bytes)
    layer = pagoda.AttentionLayer(6, 2, 16, 8, window=window, scale=scale)
    atol = 2e-6 if scale is None else 1e-4
    cache = ContiguousCache(pagoda.ModelSpec([layer]), k_dtype="f32", v_dtype="f32")
    rng = np.random.default_rng(11)
    sequences = [cache.create(), cache.create()]
    seen: list[list[Array]] = [[np.zeros((0, 2, 16)), np.zeros((0, 2, 8))] for _ in sequences]
    for counts in ([7, 0], [1, 30], [40, 1], [1, 1]):
        total = sum(counts)
        q, k, v = (rng.standard_normal((total, *shape)).astype(np.float32) for shape in ((6, 16), (2, 16), (2, 8)))
        with cache.step(sequences, counts) as step:
            out = step.forward(0, q, k, v)
        positions = [
            token for old, new in zip(seen, counts, strict=True) for token in range(len(old[0]), len(old[0]) + new)
        ]
        assert (step.positions.dtype, step.positions.tolist()) == (np.dtype(np.int64), positions)
        for index, part in enumerate((slice(0, counts[0]), slice(counts[0], total))):
            seen[index] = [np.concatenate([old, new[part]]) for old, new in zip(seen[index], (k, v), strict=True)]
            if counts[index]:
                keys, values = seen[index]
                np.testing.assert_allclose(out[part], naive(q[part], keys, values, window, scale), rtol=0, atol=atol)
    assert [len(sequence) for sequence in sequences] == [49, 32]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"softcap": 2.0}, r"\.softcap = 2\.0: none"),
        ({"sinks": True}, r"\.sinks = True: none"),
        ({"v_alias": True}, r"\.v_alias = True: none"),
        ({"k_eq_v": True}, r"\.k_eq_v = True: none"),
        ({"kv_owner": 0}, r"\.kv_owner = 0: none"),
        (None, " = StateLayer: an AttentionLayer"),
    ],
)
def test_layers_that_plain_arrays_do_not_have(change: dict[str, Any] | None, shown: str) -> None:
    plain = pagoda.AttentionLayer(4, 2, 16)
    other = StateLayer(8) if change is None else dataclasses.replace(plain, **change)
    with pytest.raises(pagoda.InvalidArgument, match=rf"^layers\[1\]{shown}, in plain arrays"):
        ContiguousCache(pagoda.ModelSpec([plain, other]))


def test_steps_of_plain_arrays_that_cannot_be() -> None:
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(2, 1, 16)])
    cache = ContiguousCache(spec)
    sequence = cache.create()
    for batch, counts in (([sequence], [1, 2]), ([sequence], [-1]), ([sequence, sequence], [1, 1])):
        with pytest.raises(pagoda.InvalidArgument, match=r"new_tokens|sequences"):
            cache.step(batch, counts)
    with pytest.raises(pagoda.InvalidArgument, match="v_dtype = 'f12'"):
        ContiguousCache(spec, v_dtype="f12")
    rows = np.ones((2, 1, 16), np.float32)
    with pytest.raises(RuntimeError, match="on purpose"), cache.step([sequence], [2]) as step:
        step.forward(0, np.ones((2, 2, 16), np.float32), rows, rows)
        raise RuntimeError("on purpose")
    assert len(sequence) == 0
