"""ggml's flash_attn_ext, of llama.cpp or of ik_llama.cpp: one piece, head after head, rounded up to 256 tokens, which a
mask hides. A graph of one operator for each layer, through the C interface of a shared library.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from case import Array, Attention, Case, Data

PAD = 256
ALIGN = 64
MASK_ROWS = 64
"""As many as any version asks for, whatever the queries."""
NODES = 8
"""Room in a graph."""
F32, F16 = 0, 1
TYPES = {"f16": F16, "q8_0": 8, "q4_0": 2}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(ctypes.Structure):
    """ggml_cplan; its other fields differ between versions."""

    _fields_ = [("work_size", c_size_t), ("work_data", c_void_p), ("rest", c_char * 112)]


# Only one of the two libraries has the last argument of quantize_chunk and of graph_plan: it is null; the other ignores it.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_new_tensor_4d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_tensor_alloc": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "ggml_flash_attn_ext": (c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_plan": (Plan, [c_void_p, c_int, c_void_p]),
    "ggml_graph_compute": (c_int, [c_void_p, c_void_p]),
}


def prepare(library: str, case: Case, data: Data) -> Attention:
    """library: the path of libggml.so."""
    ggml = ctypes.CDLL(library)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments

    size = case.layers * (4 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(NODES, False)) + (1 << 20)
    context = ggml.ggml_init(InitParams(size, None, True))
    padded = -(-case.context // PAD) * PAD
    held: list[Array] = []

    def place(tensor: int, array: Array) -> int:
        buffer = ggml.ggml_backend_cpu_buffer_from_ptr(array.ctypes.data, array.nbytes)
        ggml.ggml_backend_tensor_alloc(buffer, tensor, array.ctypes.data)
        held.append(array)
        return tensor

    def tensor(kind: int, shape: tuple[int, int, int], array: Array) -> int:
        return place(ggml.ggml_new_tensor_4d(context, kind, *shape, 1), array)

    def encoded(rows: Array) -> Array:
        heads = np.zeros((case.kv_heads, padded, case.dim), np.float32)
        heads[:, : case.context] = rows.swapaxes(0, 1)
        kind, count = TYPES[case.format], case.kv_heads * padded
        out = aligned(count * ggml.ggml_row_size(kind, case.dim))
        source, target = heads.ctypes.data, out.ctypes.data
        ggml.ggml_quantize_chunk(kind, source, target, 0, count, case.dim, None, None)
        return out

    def copy(array: Array) -> Array:
        out = aligned(array.nbytes)
        out[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return out

    hidden = np.zeros((MASK_ROWS, padded), np.float16)
    hidden[:, case.context :] = -np.inf
    mask = tensor(F16, (padded, MASK_ROWS, 1), copy(hidden))
    q = tensor(F32, (case.dim, 1, case.q_heads), copy(data.q))
    rows = [encoded(part) for part in (data.k, data.v)]
    result = aligned(data.q.nbytes)
    graphs = []
    for _ in range(case.layers):
        k, v = (tensor(TYPES[case.format], (case.dim, padded, case.kv_heads), copy(part)) for part in rows)
        out = place(ggml.ggml_flash_attn_ext(context, q, k, v, mask, case.dim**-0.5, 0.0, 0.0), result)
        graph = ggml.ggml_new_graph_custom(context, NODES, False)
        ggml.ggml_build_forward_expand(graph, out)
        graphs.append(graph)
    plan = ggml.ggml_graph_plan(graphs[0], case.threads, None)
    work = aligned(plan.work_size)
    plan.work_data = work.ctypes.data

    def run(index: int) -> Array:
        ggml.ggml_graph_compute(graphs[index], ctypes.byref(plan))
        return result.view(np.float32).reshape(case.q_heads, case.dim)

    return Attention(run, sum(part.nbytes for part in rows), [*held, work])


def aligned(size: int) -> Array:
    room = np.empty(size + ALIGN, np.uint8)
    start = -room.ctypes.data % ALIGN
    return room[start : start + size]
