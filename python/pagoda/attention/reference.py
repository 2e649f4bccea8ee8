"""Exact attention in float64, written to be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    softcap: float | None = None,
    sink_logits: Array | None = None,
) -> tuple[Float64, Float64]:
    """Causal attention of the last `len(q)` tokens of one sequence over all of its tokens.

    q: [n, num_q_heads, head_dim]. k: [tokens, num_kv_heads, head_dim]. v: [tokens, num_kv_heads, v_head_dim]. Query i is
    token `tokens - n + i`; of the tokens up to itself it sees the last `window` and the first `sinks`. Returns float64
    (out [n, num_q_heads, v_head_dim], natural log-sum-exp of the scores [n, num_q_heads]); 0 and -inf for queries that see
    nothing. The formula is softmax(q k^T * scale) v, https://arxiv.org/abs/1706.03762, with the key head of query head h
    being h // (num_q_heads // num_kv_heads), https://arxiv.org/abs/2305.13245. With softcap scores become
    softcap * tanh(score / softcap), https://arxiv.org/abs/2408.00118. sink_logits [num_q_heads] add one score per head, of a
    token whose V is 0 (https://arxiv.org/abs/2508.10925); the log-sum-exp does not include it.
    """
    queries, heads, head_dim = q.shape
    tokens, kv_heads, v_head_dim = v.shape
    scale = head_dim**-0.5 if scale is None else scale
    at = np.arange(tokens - queries, tokens)[:, None]
    key = np.arange(tokens)[None, :]
    seen = (key <= at) & ((key > at - (tokens if window is None else window)) | (key < sinks))
    out = np.zeros((queries, heads, v_head_dim))
    lse = np.full((queries, heads), -np.inf)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = q[:, head].astype(np.float64) @ k[:, kv_head].astype(np.float64).T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores, -np.inf)
        if not tokens:
            continue
        peak = scores.max(axis=1, keepdims=True)
        weights = np.where(seen, np.exp(scores - np.where(np.isfinite(peak), peak, 0.0)), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        sink: Any = 0.0
        if sink_logits is not None:
            # If exp overflows, the sum is infinite and the result 0.
            with np.errstate(over="ignore"):
                sink = np.exp(float(sink_logits[head]) - np.where(np.isfinite(peak), peak, 0.0))
        out[:, head] = weights @ v[:, kv_head].astype(np.float64) / np.where(total > 0, total + sink, 1.0)
        with np.errstate(divide="ignore"):
            lse[:, head] = (peak + np.log(total))[:, 0]
    return out, lse
