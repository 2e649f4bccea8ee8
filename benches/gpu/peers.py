"""Other libraries' attention over pages, for the batch of a `Filled` cache: one call a layer, on their own memory.

A library that is missing or refuses raises; callers report that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import DIM, KV_HEADS, ROWS, Filled

Calls = tuple[list[Callable[[], object]], Callable[[], Any]]
"""A call for each layer, and what the last has come to: where a library makes the array, no copy of it is timed."""


class Pages:
    """The tokens of a batch in pages [pages, page_size, heads, dim] in random order, separately for each layer."""

    def __init__(self, filled: Filled) -> None:
        size = filled.page_size
        counts = [-(-length // size) for length in filled.lengths]
        order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
        # Page p of a sequence holds the tokens from p * size on: rows repeat after ROWS.
        of_rows = torch.cat([torch.arange(count) for count in counts]).cuda() % (ROWS // size)
        content = torch.empty(sum(counts), dtype=torch.int64, device="cuda")
        content[order.long()] = of_rows
        planes = [plane.unflatten(0, (ROWS // size, size)) for plane in (filled.k, filled.v)]
        self.layers = [[plane[content] for plane in planes] for _ in range(filled.layers)]
        self.indices = order
        starts = [sum(counts[:index]) for index in range(len(counts))]
        self.indptr = torch.tensor([*starts, sum(counts)], dtype=torch.int32)
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.table[index, :count] = order[start : start + count]
        self.last = torch.tensor([(length - 1) % size + 1 for length in filled.lengths], dtype=torch.int32)
        self.lengths = torch.tensor(filled.lengths, dtype=torch.int32, device="cuda")
        self.starts_q = torch.arange(len(counts) + 1, dtype=torch.int32, device="cuda") * filled.new


def flash_attention_3(filled: Filled, pages: Pages) -> Calls:
    """The library of vLLM, `_vllm_fa3_C.abi3.so`, whose path is in PAGODA_FA3."""
    torch.ops.load_library(os.environ["PAGODA_FA3"])
    ops, out = torch.ops._vllm_fa3_C, torch.empty_like(filled.q)
    batch, longest = len(filled.lengths), max(filled.lengths)
    plan = ops.get_scheduler_metadata(
        batch, filled.new, longest, filled.q_heads, KV_HEADS, DIM, DIM, filled.kind, pages.lengths, pages.starts_q,
        None, None, None, None, filled.page_size, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip

    def call(k: Any, v: Any) -> object:
        return ops.fwd(
            filled.q, k, v, None, None, None, out, pages.starts_q, None, None, None, pages.lengths, filled.new, longest,
            pages.table, None, None, None, None, None, None, None, None, DIM**-0.5, True, -1, -1, 0.0, True, plan, 0,
            None, 0, None, 1, 0, None,
        )  # fmt: skip

    return [partial(call, *layer) for layer in pages.layers], lambda: out


def flashinfer(filled: Filled, pages: Pages) -> Calls:
    """Its tensor cores: decoding for one new token, prefill for more."""
    import flashinfer

    out = torch.empty_like(filled.q)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    shape = (filled.q_heads, KV_HEADS, DIM, filled.page_size)
    types = {"q_data_type": filled.kind, "kv_data_type": filled.kind}
    if filled.new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(pages.indptr, pages.indices, pages.last, *shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts = pages.starts_q.cpu()
        wrapper.plan(starts, pages.indptr, pages.indices, pages.last, *shape, causal=True, **types)
    return [partial(wrapper.run, filled.q, tuple(layer), out=out) for layer in pages.layers], lambda: out


def xformers(filled: Filled, pages: Pages) -> Calls:
    """Its Triton kernel that splits K and V, for one new token."""
    from xformers.ops import fmha

    if filled.new != 1:
        raise NotImplementedError("more than one new token")
    batch, group = len(filled.lengths), filled.q_heads // KV_HEADS
    bias = fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * batch, kv_seqlen=filled.lengths, block_tables=pages.table, page_size=filled.page_size
    ).to(filled.q.device)
    q, last = filled.q.view(1, batch, KV_HEADS, group, DIM), [filled.q]

    def call(k: Any, v: Any) -> None:
        rows = [plane.view(1, -1, KV_HEADS, 1, DIM).expand(-1, -1, -1, group, -1) for plane in (k, v)]
        last[0] = fmha.memory_efficient_attention_forward(q, *rows, attn_bias=bias, op=fmha.triton_splitk.FwOp)

    return [partial(call, *layer) for layer in pages.layers], lambda: last[0].reshape(filled.q.shape)


def sdpa(filled: Filled, pages: Pages) -> Calls:
    """torch, over contiguous K and V: one new token, all sequences equally long."""
    if filled.new != 1 or len(set(filled.lengths)) != 1:
        raise NotImplementedError("ragged, or more than one new token")
    length, batch = filled.lengths[0], len(filled.lengths)
    at = torch.arange(length, device="cuda") % ROWS
    layers = [
        [plane[at].transpose(0, 1).expand(batch, -1, -1, -1).contiguous() for plane in (filled.k, filled.v)]
        for _ in range(filled.layers)
    ]
    q = filled.q[:, :, None]
    last = [q]

    def call(k: Any, v: Any) -> None:
        last[0] = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return [partial(call, *layer) for layer in layers], lambda: last[0][:, :, 0]


PEERS: dict[str, Callable[[Filled, Pages], Calls]] = {
    "FlashAttention-3": flash_attention_3,
    "FlashInfer": flashinfer,
    "xformers": xformers,
    "torch SDPA": sdpa,
}
