"""OpenVINO's PagedAttention: blocks of 32 tokens; u8 and u4 with a scale and a zero point for each channel of a block of K
and for each row of V, which the operator writes itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from case import Array, Attention, Case, Data

BLOCK = 32
FILL = 4 * BLOCK
"""Tokens that are written at a time."""
PRECISION = {"f16": "f16", "q8_0": "u8", "q4_0": "u4"}
F32, I32 = np.float32, np.int32


def prepare(case: Case, data: Data) -> Attention:
    import openvino as ov

    compiled = compile_op(case)
    blocks = -(-case.context // BLOCK)
    kinds = [port.get_element_type() for port in compiled.inputs[3:5]]
    shapes = [[blocks, *(size.get_length() for size in list(port.partial_shape)[1:])] for port in compiled.inputs[3:5]]
    table = np.random.default_rng(1).permutation(blocks).astype(I32)

    def bind(caches: list[Array], rows: tuple[Array, Array, Array], past: int, table: Array) -> tuple[Any, list[Any]]:
        """A request over new tokens (q, k, v) [tokens, heads, dim], and its inputs, which must outlive it."""
        tensors = [ov.Tensor(np.ascontiguousarray(part.reshape(len(part), -1), F32)) for part in rows]
        tensors += [ov.Tensor(*parts) for parts in zip(caches, shapes, kinds, strict=True)]
        tensors += [ov.Tensor(np.array(part, I32)) for part in ([past], [0, len(rows[0])], table, [0, len(table)])]
        request = compiled.create_infer_request()
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        return request, [*tensors, *caches]

    # What is written does not depend on earlier tokens: each part is its own sequence, or time would grow quadratically.
    sizes = [math.prod(shape) * kind.bitwidth // 8 for shape, kind in zip(shapes, kinds, strict=True)]
    filled = [np.zeros(size, np.uint8) for size in sizes]
    for start in range(0, case.context - 1, FILL):
        stop = min(start + FILL, case.context - 1)
        q = np.zeros((stop - start, *data.q.shape), F32)
        rows = (q, data.k[start:stop], data.v[start:stop])
        bind(filled, rows, 0, table[start // BLOCK : -(-stop // BLOCK)])[0].infer()
    last = (data.q[None], data.k[-1:], data.v[-1:])
    requests = [bind([cache.copy() for cache in filled], last, case.context - 1, table) for _ in range(case.layers)]

    def run(index: int) -> Array:
        requests[index][0].infer()
        out: Array = requests[index][0].get_output_tensor(0).data
        return out.reshape(case.q_heads, case.dim)

    return Attention(run, sum(cache.nbytes for cache in filled))


def compile_op(case: Case) -> Any:
    """A model of this operator alone: 28 inputs, of which those that it needs are parameters."""
    import openvino as ov
    from openvino import opset13 as ops
    from openvino.op import _PagedAttentionExtension

    def parameter(kind: Any, rank: int) -> Any:
        return ops.parameter([-1] * rank, kind)

    q, k, v = (parameter(F32, 2) for _ in range(3))
    caches = [parameter(ov.Type.dynamic, 4) for _ in range(2)]
    past, begins, indices, index_begins = (parameter(I32, 1) for _ in range(4))
    empty = [np.zeros(0, kind) for kind in (F32, I32)]
    constants = [
        np.array(case.dim**-0.5, F32),
        np.array(0, I32),
        empty[0],
        np.array(case.context, I32),
        np.array(0, I32),
        empty[1],
        np.zeros((0, 0), I32),
        np.zeros((0, 0), F32),
        empty[0],
        np.array(0, I32),
        np.array(0, I32),
        empty[0],
        np.array(0, I32),
        empty[1],
        empty[1],
        empty[1],
        empty[1],
        np.zeros(0, np.uint8),
        empty[1],
    ]
    inputs = [q, k, v, *caches, past, begins, indices, index_begins]
    nodes = [*inputs, *(ops.constant(value) for value in constants)]
    op = _PagedAttentionExtension([node.output(0) for node in nodes])
    info = op.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = case.kv_heads
    info["k_head_size"] = info["v_head_size"] = case.dim
    config = {
        "KV_CACHE_PRECISION": PRECISION[case.format],
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": case.threads,
    }
    return ov.Core().compile_model(ov.Model([op.output(0)], inputs), "CPU", config)
