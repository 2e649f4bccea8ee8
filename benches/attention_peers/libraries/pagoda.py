"""Pagoda: pages."""

from __future__ import annotations

import numpy as np
from case import Attention, Case, Data


def prepare(case: Case, data: Data) -> Attention:
    import pagoda

    pagoda.formats.check_not_forced()
    layer = pagoda.AttentionLayer(case.q_heads, case.kv_heads, case.dim)
    layer_bytes = case.context * layer.bytes_per_token(case.format, case.format)
    cache = pagoda.Cache(
        pagoda.ModelSpec([layer] * case.layers),
        k_dtype=case.format,
        v_dtype=case.format,
        center=None,
        rotate=False,
        device_memory=case.layers * layer_bytes * 9 // 8 + (64 << 20),
        host_memory=0,
        threads=case.threads,
    )
    sequence = cache.create()
    with cache.step([sequence], [case.context - 1]) as step:
        for index in range(case.layers):
            step.append(index, data.k[:-1], data.v[:-1])
    step = cache.step([sequence], [1]).__enter__()
    for index in range(case.layers):
        step.append(index, data.k[-1:], data.v[-1:])
    q, out = data.q[None], np.empty_like(data.q)[None]
    return Attention(lambda index: step.attend(index, q, out=out)[0], layer_bytes)
