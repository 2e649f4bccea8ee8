"""Prefill attention on the CPU compared with torch, in one run.

    PYTHONPATH=python peers/bin/python benches/prefill_peers.py --threads 1     # an environment as in attention_peers

2,048 new tokens at the end of 32,768, causal, 32 query and 8 K/V heads of 128. Torch gets K and V repeated for each query
head, and the mask in the form that it adds, so that neither is made in the measured time. 4 flop for each query, visible key
and element. In brackets is the largest error over the largest value, of 64 rows against float64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import torch

Array = npt.NDArray[Any]

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXT, NEW = 32768, 2048


def paged(dtype: str, threads: int, q: Array, k: Array, v: Array) -> Callable[[], Array]:
    pagoda.formats.check_not_forced()
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(Q_HEADS, KV_HEADS, DIM)])
    cache = pagoda.Cache(spec, k_dtype=dtype, v_dtype=dtype, device_memory="1GiB", host_memory=0, threads=threads)
    sequence = cache.create()
    with cache.step([sequence], [CONTEXT - NEW]) as step:
        step.append(0, k[:-NEW], v[:-NEW])
    step = cache.step([sequence], [NEW]).__enter__()
    step.append(0, k[-NEW:], v[-NEW:])
    out = np.empty_like(q)
    return lambda: step.attend(0, q, out=out)


def sdpa(dtype: str, threads: int, q: Array, k: Array, v: Array) -> Callable[[], Array]:
    torch.set_num_threads(threads)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    group = Q_HEADS // KV_HEADS
    queries = torch.from_numpy(q).transpose(0, 1)[None].to(kind).contiguous()
    rows = [torch.from_numpy(x).transpose(0, 1).repeat_interleave(group, 0)[None].to(kind).contiguous() for x in (k, v)]
    hidden = torch.arange(CONTEXT)[None] > torch.arange(CONTEXT - NEW, CONTEXT)[:, None]
    mask = torch.zeros(NEW, CONTEXT, dtype=kind).masked_fill(hidden, float("-inf"))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(queries, *rows, attn_mask=mask)[0].transpose(0, 1).float().numpy()


def expected(rows: Array, q: Array, k: Array, v: Array) -> Array:
    """The rows of the result in float64: [rows, q_heads, dim]."""
    out = np.empty((len(rows), Q_HEADS, DIM))
    for i, row in enumerate(rows):
        end = CONTEXT - NEW + row + 1
        for head in range(Q_HEADS):
            kv = head // (Q_HEADS // KV_HEADS)
            scores = k[:end, kv].astype(np.float64) @ q[row, head].astype(np.float64) * DIM**-0.5
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[:end, kv].astype(np.float64) / weights.sum()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3)
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(arguments.threads):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": str(arguments.threads)})
    rng = np.random.default_rng(0)
    shapes = [(NEW, Q_HEADS), (CONTEXT, KV_HEADS), (CONTEXT, KV_HEADS)]
    q, k, v = (rng.standard_normal((tokens, heads, DIM), np.float32) for tokens, heads in shapes)
    checked = np.arange(0, NEW, NEW // 64)
    flops = 4.0 * Q_HEADS * DIM * NEW * (CONTEXT - (NEW - 1) / 2)
    print(f"| {arguments.threads} thread(s) | pagoda, GFLOP/s | torch, GFLOP/s | pagoda / torch |\n|---|---|---|---|")
    for dtype, bits in (("f32", 23), ("f16", 10), ("bf16", 7)):
        # Rounded to the format beforehand, so that the error is that of the arithmetic.
        parts = [np.frexp(x) for x in (k, v)]
        held: list[Array] = [np.ldexp(np.round(np.ldexp(m, bits)), e - bits).astype(np.float32) for m, e in parts]
        right = expected(checked, q, *held)
        rates, cells = [], []
        for make in (paged, sdpa):
            run = make(dtype, arguments.threads, q, *held)
            error = float(np.abs(run()[checked] - right).max() / np.abs(right).max())
            times = []
            for _ in range(arguments.samples):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            rates.append(flops / statistics.median(times) / 1e9)
            cells.append(f"{rates[-1]:.0f} ({error:.0e})")
        print(f"| {dtype} | {cells[0]} | {cells[1]} | {rates[0] / rates[1]:.1f} x |", flush=True)


if __name__ == "__main__":
    main()
