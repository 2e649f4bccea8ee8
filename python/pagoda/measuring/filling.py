"""Sequences of random rows, for measurements. No model computes them, so filling is as fast as pages are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.cache import Cache, Sequence
from pagoda.spec import AttentionLayer

Rows = npt.NDArray[np.float32]
Convert = Callable[[Rows], Any]
"""Converts an array of the host to one that a step takes."""

CHUNK = 4096
"""Tokens appended at a time."""


def fill(cache: Cache, sequence: Sequence, tokens: int, chunk: int = CHUNK, convert: Convert = np.asarray) -> None:
    """Appends `tokens` tokens of random rows in all layers, `chunk` at a time; every chunk has the same rows."""
    layers, rng = cache.spec.attention_layers, np.random.default_rng(1)
    rows = {layer: rows_of(layer, min(chunk, tokens), rng, convert) for layer in layers}
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        with cache.step([sequence], [count]) as step:
            for index, layer in enumerate(layers):
                k, v = rows[layer]
                step.append(index, k if k is None else k[:count], v if v is None else v[:count])


def rows_of(
    layer: AttentionLayer, count: int, rng: np.random.Generator, convert: Convert = np.asarray
) -> tuple[Any, Any]:
    """Random K and V; None for one that the layer does not store."""
    k, v = (rng.standard_normal((count, layer.num_kv_heads, dim), np.float32) for dim in (layer.head_dim, layer.v_dim))
    return None if layer.k_eq_v else convert(k), None if layer.v_alias else convert(v)
