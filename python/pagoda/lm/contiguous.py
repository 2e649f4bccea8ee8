"""A contiguous cache, with one array per sequence and layer, to compare the paged cache with."""

from __future__ import annotations

from collections.abc import Sequence as Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagoda._core import TOKENS_MAX
from pagoda.checks import check_list, integers
from pagoda.errors import InvalidArgument
from pagoda.formats import decode, encode, formats_by_layer
from pagoda.spec import AttentionLayer, ModelSpec, check_spec

Float32 = npt.NDArray[np.float32]

SCORES_BYTES = 8 << 20
"""Queries are processed in pieces whose scores fit into this many bytes."""


@dataclass
class ContiguousSequence:
    """One sequence: per layer, K and V float32 [kv_heads, capacity, dim], with room to grow."""

    keys: list[Float32]
    values: list[Float32]
    length: int = 0

    def __len__(self) -> int:
        return self.length


class ContiguousCache:
    """Does the work of `pagoda.Cache` for a forward pass, in plain NumPy and float32, over contiguous memory.

    Rows are rounded to the row formats, as in a paged cache that neither centres nor rotates. It cannot fork or move
    sequences. Raises InvalidArgument for an unknown format, and for layers that it does not support: with soft-cap or sinks,
    or without K and V of their own.
    """

    def __init__(self, spec: ModelSpec, *, k_dtype: str = "f16", v_dtype: str = "f16") -> None:
        check_spec("spec", spec)
        for index, layer in enumerate(spec.layers):
            if not isinstance(layer, AttentionLayer):
                raise InvalidArgument(f"layers[{index}] = {type(layer).__name__}: an AttentionLayer, in plain arrays")
            for name in ("softcap", "sinks", "kv_owner", "v_alias", "k_eq_v"):
                value = getattr(layer, name)
                if value is not None and value is not False:
                    raise InvalidArgument(f"layers[{index}].{name} = {value}: none, in plain arrays")
        self.spec = spec
        (self.k_dtype, self.v_dtype), *_ = formats_by_layer(k_dtype, v_dtype, len(spec.layers))

    def create(self) -> ContiguousSequence:
        """A new, empty sequence."""
        layers = self.spec.attention_layers
        return ContiguousSequence(
            [np.zeros((layer.num_kv_heads, 0, layer.head_dim), np.float32) for layer in layers],
            [np.zeros((layer.num_kv_heads, 0, layer.v_dim), np.float32) for layer in layers],
        )

    def step(self, batch: Collection[ContiguousSequence], new_tokens: Collection[int]) -> ContiguousStep:
        """A step that appends `new_tokens[i]` tokens to the i-th sequence. Raises InvalidArgument, as `pagoda.Cache`."""
        check_list("batch", batch, "sequences")
        for index, sequence in enumerate(batch):
            if not isinstance(sequence, ContiguousSequence):
                raise InvalidArgument(f"batch[{index}] = {sequence!r}: a sequence of a ContiguousCache")
        counts = integers("new_tokens", new_tokens, "a list of integers, one a sequence").tolist()
        if len(counts) != len(batch) or not all(0 <= count <= TOKENS_MAX for count in counts):
            limit = f"{len(batch)} counts, one a sequence in batch, each from 0 to {TOKENS_MAX}"
            raise InvalidArgument(f"new_tokens = {counts}: {limit}")
        if len({id(sequence) for sequence in batch}) != len(batch):
            raise InvalidArgument("sequences: each at most once in a step")
        return ContiguousStep(self, list(batch), counts)


@dataclass
class ContiguousStep:
    """One forward pass; leaving it without an exception commits."""

    cache: ContiguousCache
    batch: list[ContiguousSequence]
    new_tokens: list[int]
    cu_seqlens: npt.NDArray[np.int32] = field(init=False)
    positions: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.cu_seqlens = np.cumsum([0, *self.new_tokens]).astype(np.int32)
        ranges = [np.arange(len(s), len(s) + n) for s, n in zip(self.batch, self.new_tokens, strict=True)]
        self.positions = np.concatenate([np.zeros(0, np.int64), *ranges])

    def __enter__(self) -> ContiguousStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for sequence, count in zip(self.batch, self.new_tokens, strict=True):
                sequence.length += count

    def forward(self, layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
        """Appends K and V and attends: [tokens, heads, dim] each, as `pagoda.Step.forward`."""
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        for index, (sequence, count) in enumerate(zip(self.batch, self.new_tokens, strict=True)):
            part = slice(self.cu_seqlens[index], self.cu_seqlens[index + 1])
            end = len(sequence) + count
            keys = _store(sequence.keys, layer, len(sequence), k[part], self.cache.k_dtype)[:, :end]
            values = _store(sequence.values, layer, len(sequence), v[part], self.cache.v_dtype)[:, :end]
            self._attend(layer, q[part], keys, values, out[part])
        return out

    def _attend(self, layer: int, q: Float32, keys: Float32, values: Float32, out: Float32) -> None:
        """Attention of the last tokens' queries [n, q_heads, dim] over keys and values [kv_heads, tokens, dim], to `out`."""
        shape = self.cache.spec.attention_layers[layer]
        group, end, window = shape.num_q_heads // shape.num_kv_heads, keys.shape[1], shape.window
        scale = np.float32(shape.head_dim**-0.5 if shape.scale is None else shape.scale)
        width = end if window is None else min(end, window + len(q))
        rows = max(1, SCORES_BYTES // (4 * group * max(1, width)))
        for start in range(0, len(q), rows):
            piece = q[start : start + rows] * scale
            stop = end - len(q) + start + len(piece)
            at = np.arange(stop - len(piece), stop)[:, None]
            first = 0 if window is None else max(0, int(at[0, 0]) + 1 - window)
            # Without a window, every query of the piece sees all keys before the piece.
            seen = stop - len(piece) if window is None else first
            key = np.arange(seen, stop)
            hidden = key > at if window is None else (key > at) | (key <= at - window)
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
            for head in range(shape.num_kv_heads):
                heads = slice(head * group, (head + 1) * group)
                rows_of_q = piece[:, heads].transpose(1, 0, 2).reshape(-1, shape.head_dim)
                scores = rows_of_q @ keys[head, first:stop].T
                scores.reshape(group, len(piece), -1)[:, :, seen - first :] += mask
                scores -= scores.max(axis=1, keepdims=True)
                np.exp(scores, out=scores)
                mixed = scores @ values[head, first:stop]
                mixed /= scores.sum(axis=1, keepdims=True)
                out[start : start + rows, heads] = mixed.reshape(group, len(piece), -1).transpose(1, 0, 2)


def _store(arrays: list[Float32], layer: int, start: int, rows: Float32, dtype: str) -> Float32:
    """Writes rows [tokens, kv_heads, dim] from token `start` on, rounded to their format; a full array is doubled."""
    array, end = arrays[layer], start + len(rows)
    if end > array.shape[1]:
        grown = np.zeros((array.shape[0], max(2 * array.shape[1], end), array.shape[2]), np.float32)
        grown[:, :start] = array[:, :start]
        arrays[layer] = array = grown
    array[:, start:end] = _rounded(rows, dtype).transpose(1, 0, 2)
    return array


def _rounded(rows: Float32, dtype: str) -> Float32:
    return rows if dtype == "f32" else decode(encode(rows, dtype), dtype, rows.shape)
