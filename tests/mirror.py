"""A naive cache next to the real one: lists of rows, rounded as the row formats say, attended to in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pagoda
from pagoda import _core
from pagoda.attention.reference import attention
from pagoda.stats import Stats

Array = npt.NDArray[Any]

DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
"""Types that round a value as storing it does, by NumPy and ml_dtypes, not by our code. For the other formats,
tests/test_formats.py compares the codec with other implementations."""

TOLERANCE = 3e-6
"""Float32 arithmetic against float64 on the same stored values, relative to the largest value."""
TENSOR_CORES = 1e-5
"""The same on a device, where sums of products are truncated, not rounded."""
INTEGER_ISAS = {"avx512bf16", "avx512vnni", "avxvnni", "avx2madd", "neondot"}
"""Instruction sets that multiply quantised rows as integers; the others convert them to floats."""
INTEGERS = 3e-4
"""The tolerance where rows may be multiplied as integers: queries and weights are rounded to 16 bits first."""
BYTES = 5e-2
"""The same for rows of 4 or 5 bits: queries and weights are rounded to a byte."""
BF16 = 1e-2
"""The tolerance where fp8_e4m3 rows are multiplied as bfloat16: queries and weights are rounded to it."""


def layer(**changes: Any) -> pagoda.AttentionLayer:
    """A small attention layer."""
    fields: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return pagoda.AttentionLayer(**(fields | changes))


@dataclass
class Tokens:
    """One sequence, and the K and V rows accepted so far, by layer."""

    sequence: pagoda.Sequence
    k: list[Array]
    v: list[Array]

    def __len__(self) -> int:
        return len(self.k[0])

    def fork(self) -> Tokens:
        return replace(self, sequence=self.sequence.fork(), k=list(self.k), v=list(self.v))

    def keep(self, tokens: npt.NDArray[np.bool_]) -> None:
        self.k = [rows[tokens] for rows in self.k]
        self.v = [rows[tokens] for rows in self.v]


@dataclass
class Mirror:
    """A cache, and the rows that it must hold."""

    cache: pagoda.Cache
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    q_scale: float = 1.0
    """Factor of random queries."""
    k_norms: Sequence[Array | None] = ()
    """Those of the cache."""
    live: list[Tokens] = field(default_factory=list)
    last: pagoda.Step | None = None
    """The step that ended last."""

    def create(self) -> Tokens:
        empty = [np.zeros((0, layer.num_kv_heads, layer.head_dim)) for layer in self._layers()]
        values = [np.zeros((0, layer.num_kv_heads, layer.v_dim)) for layer in self._layers()]
        tokens = Tokens(self.cache.create(), empty, values)
        self.live.append(tokens)
        return tokens

    def fork(self, tokens: Tokens) -> Tokens:
        child = tokens.fork()
        self.live.append(child)
        return child

    def release(self, tokens: Tokens) -> None:
        tokens.sequence.release()
        self.live.remove(tokens)

    def step(
        self, batch: list[Tokens], new: list[int], accepted: list[int] | None = None, junk: int = 0
    ) -> list[Array]:
        """Appends random rows and checks the attention of every layer; returns its outputs, layer by layer.

        After the new tokens of each sequence come `junk` tokens of NaN, which are rejected: they poison rows that must not
        be read.
        """
        counts = [count + junk for count in new]
        keep = accepted or new
        with self.cache.step([tokens.sequence for tokens in batch], counts) as step:
            assert step.cu_seqlens.tolist() == [0, *np.cumsum(counts).tolist()]
            bounds = step.cu_seqlens
            stored: list[tuple[Array, Array]] = []
            outputs: list[Array] = []
            for index, layer in enumerate(self._layers()):
                k, v, q = self._rows(layer, int(bounds[-1]))
                for number, count in enumerate(new):
                    k[bounds[number] + count : bounds[number + 1]] = np.nan
                    v[bounds[number] + count : bounds[number + 1]] = np.nan
                sinks = self.rng.normal(0, 3, layer.num_q_heads).astype(np.float32) if layer.sinks else None
                given = (None if layer.k_eq_v else k, None if layer.v_alias else v) if layer.kv_owner is None else ()
                out, lse = step.forward(index, q, *given, sink_logits=sinks, return_lse=True)
                outputs.append(out)
                if layer.kv_owner is None:
                    k, v = self._stored(layer, k, v)
                    if layer.k_eq_v:
                        k = derived(v, self.k_norms[index], layer.rope, step.positions)
                    stored.append((k, v))
                else:
                    stored.append(stored[layer.kv_owner])
                k, v = stored[index]
                for number, tokens in enumerate(batch):
                    part = slice(bounds[number], bounds[number] + new[number])
                    keys = np.concatenate([tokens.k[index], k[part]])
                    values = np.concatenate([tokens.v[index], v[part]])
                    right = expected(layer, q[part], keys, values, sinks, self.cache.retention)
                    check(out[part], lse[part], *right, tolerance_of(self.cache))
                    kept = slice(bounds[number], bounds[number] + keep[number])
                    tokens.k[index] = np.concatenate([tokens.k[index], k[kept]])
                    tokens.v[index] = np.concatenate([tokens.v[index], v[kept]])
            if junk or accepted is not None:
                step.commit(accepted=keep)
        self.cache.audit()
        self.last = step
        return outputs

    def look(self) -> None:
        """Checks every sequence: attends with one token each, which is then rejected."""
        if self.live:
            self.step(self.live, [1] * len(self.live), accepted=[0] * len(self.live))
            for tokens in self.live:
                assert len(tokens.sequence) == len(tokens)

    def truncate(self, tokens: Tokens, length: int) -> None:
        tokens.sequence.truncate(length)
        tokens.keep(np.arange(len(tokens)) < length)

    def drop(self, tokens: Tokens, start: int, stop: int) -> None:
        tokens.sequence.drop(start, stop)
        at = np.arange(len(tokens))
        tokens.keep((at < start) | (at >= stop))

    def _layers(self) -> list[pagoda.AttentionLayer]:
        return [layer for layer in self.cache.spec.layers if isinstance(layer, pagoda.AttentionLayer)]

    def _rows(self, layer: pagoda.AttentionLayer, count: int) -> tuple[Array, Array, Array]:
        def rows(heads: int, dim: int) -> Array:
            return self.rng.standard_normal((count, heads, dim), np.float32)

        k = rows(layer.num_kv_heads, layer.head_dim)
        v = rows(layer.num_kv_heads, layer.v_dim)
        return k, v, rows(layer.num_q_heads, layer.head_dim) * np.float32(self.q_scale)

    def _stored(self, layer: pagoda.AttentionLayer, k: Array, v: Array) -> tuple[Array, Array]:
        """K and V as the cache stores them."""
        k_dtype, v_dtype = self.cache.dtypes[0]
        k, v = through(k, k_dtype), through(v, v_dtype)
        return k, k[..., : layer.v_dim] if layer.v_alias else v


def through(rows: Array, dtype: str) -> Array:
    """Rows after a round trip through a format."""
    if dtype in DTYPES:
        stored: Array = rows.astype(DTYPES[dtype]).astype(np.float64)
        return stored
    dim = rows.shape[-1]
    data, scales = _core.encode_rows(rows.reshape(-1, dim), dtype)
    return _core.decode_rows(data, scales, dtype, dim).reshape(rows.shape).astype(np.float64)


def expected(
    layer: pagoda.AttentionLayer,
    q: Array,
    k: Array,
    v: Array,
    sink_logits: Array | None = None,
    retention: pagoda.SinkWindow | None = None,
) -> tuple[Array, Array]:
    """Output and log-sum-exp of a layer's attention in float64, over those of all rows that it keeps."""
    options: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "sink_logits": sink_logits}
    if layer.window is not None or retention is None:
        return attention(q, k, v, window=layer.window, **options)
    options |= {"window": retention.window, "sinks": retention.sinks}
    if retention.positions == "original" or layer.rope is None:
        return attention(q, k, v, **options)
    results = [attention(q[:0], k, v)]
    for row in range(len(q)):
        end = len(k) - len(q) + row + 1
        keys = k[:end].copy()
        # Sinks are seen right before the window: the distance shrinks by the tokens in between.
        first = keys[: retention.sinks]
        keys[: retention.sinks] = rotated(first, layer.rope, max(0, end - retention.window - retention.sinks))
        results.append(attention(q[row : row + 1], keys, v[:end], **options))
    return np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results])


def rotated(rows: Array, rope: pagoda.Rope, positions: int | Array) -> Array:
    """K rows as if stored `positions` later, in float64. positions: one for all rows, or [tokens, 1, 1]."""
    inv_freq = rope.inv_freq(rows.shape[-1]).astype(np.float64)
    pairs = len(inv_freq)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope.interleaved
        else (
            slice(0, pairs),
            slice(pairs, 2 * pairs),
        )
    )
    turned = (rows[..., first] + 1j * rows[..., second]) * np.exp(1j * positions * inv_freq)
    result = rows.astype(np.float64)
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def derived(v: Array, weight: Array | None, rope: pagoda.Rope | None, positions: Array) -> Array:
    """K of a layer with k_eq_v, derived from stored V at the given positions, in float64."""
    k = v * np.asarray(weight, np.float64)
    if rope is None:
        return k
    k = rotated(k, rope, positions[:, None, None])
    k[..., : rope.dim_of(k.shape[-1])] *= rope.attention_factor
    return k


def center_of(k: Array) -> Array:
    """The centre that the first K rows give, float64 [K/V heads, head_dim]: their means, where these stand out."""
    mean = k.mean(0, np.float64)
    return np.where(np.abs(mean) >= 2 * k.std(0, dtype=np.float64), mean, 0)


def kept_of(center: Array, k: Array) -> Array:
    """The part of a centre that first K rows use if they are too few to give one: where it brings their mean nearer to 0."""
    mean = k.mean(0, np.float64)
    return np.where(np.abs(mean - center) < np.abs(mean), center, 0)


def settled(cache: pagoda.Cache) -> Stats:
    """Statistics of a cache once the device is known to have ended its steps; blocks that they freed drain until then."""
    while True:
        stats = cache.stats()
        if not any(counts.draining for counts in (*stats.device, *stats.host, *stats.disk)):
            return stats


def nameless(place: Path) -> Path:
    """The unnamed file that this process has open in a directory."""
    there = [fd for fd in Path("/proc/self/fd").iterdir() if str(fd.resolve()).startswith(f"{place}/.pagoda-")]
    (only,) = there
    return only


def tolerance_of(cache: pagoda.Cache, of_floats: float = TOLERANCE) -> float:
    """How far results may be from float64, relative to the largest."""
    if cache._device is not None:
        return max(of_floats, TENSOR_CORES)
    names = {name for pair in cache.dtypes for name in pair}
    if cache._core.isa == "avx512bf16" and "fp8_e4m3" in names:
        of_floats = max(of_floats, BF16)
    if cache._core.isa not in INTEGER_ISAS or names <= set(DTYPES):
        return of_floats
    return max(of_floats, BYTES if names & {"q5_0", "q4_0", "mxfp4", "nvfp4"} else INTEGERS)


def check(out: Array, lse: Array, expected: Array, expected_lse: Array, tolerance: float = TOLERANCE) -> None:
    """Compares an attention result with the reference."""
    assert out.shape == expected.shape
    assert lse.shape == expected_lse.shape
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))
    largest = np.abs(expected_lse[np.isfinite(expected_lse)]).max(initial=1)
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance * largest)
