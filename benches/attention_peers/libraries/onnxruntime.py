"""ONNX Runtime's GroupQueryAttention: one piece, head after head; int8 and int4 with a scale for each channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from case import BITS, Array, Attention, Case, Data


def prepare(case: Case, data: Data) -> Attention:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    rows, scales = {}, {}
    for name, part in (("k", data.k), ("v", data.v)):
        rows[name] = np.ascontiguousarray(part.swapaxes(0, 1)[None])
        if case.format != "f16":
            rows[name], scales[f"{name}_scale"] = quantised(rows[name], BITS[case.format])
    session = ort.InferenceSession(model(case, rows["k"].shape[-1]), options, providers=["CPUExecutionProvider"])
    new = {"q": data.q.astype(np.float16), "k": data.k[-1:], "v": data.v[-1:]}
    shared = {name: part.reshape(1, 1, -1) for name, part in new.items()} | scales
    shared |= {"seqlens_k": np.array([case.context - 1], np.int32), "total": np.array([case.context], np.int32)}
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, data.q.size), np.float16))
    bindings = []
    for _ in range(case.layers):
        binding = session.io_binding()
        held = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(part)) for name, part in shared.items()}
        held |= {f"past_{name}": ort.OrtValue.ortvalue_from_numpy(part.copy()) for name, part in rows.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("out", out)
        for name in rows:
            binding.bind_ortvalue_output(f"present_{name}", held[f"past_{name}"])
        bindings.append((binding, held))

    def run(index: int) -> Array:
        session.run_with_iobinding(bindings[index][0])
        return out.numpy().reshape(case.q_heads, case.dim)  # type: ignore[no-any-return]

    return Attention(run, sum(part.nbytes for part in (*rows.values(), *scales.values())))


def quantised(rows: Array, bits: int) -> tuple[Array, Array]:
    """(values, scales) of rows [1, heads, tokens, dim]: int8, or uint8 of two values with 8 added to each, the first in the
    low half; float32 [1, heads, 1, dim].
    """
    top = (1 << bits - 1) - 1
    scale = np.abs(rows).max(2, keepdims=True).astype(np.float32) / top
    values = np.rint(rows / scale).astype(np.int8)
    if bits == 8:
        return values, scale
    halves = (values + 8).astype(np.uint8)
    return halves[..., ::2] | halves[..., 1::2] << 4, scale


def model(case: Case, row: int) -> bytes:
    """A graph of this operator alone. row: elements of one token and head."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    half, i32 = TensorProto.FLOAT16, TensorProto.INT32
    held = {"f16": half, "q8_0": TensorProto.INT8, "q4_0": TensorProto.UINT8}[case.format]
    past = [1, case.kv_heads, case.context, row]
    width, kv_width = case.q_heads * case.dim, case.kv_heads * case.dim
    names = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
    inputs = [value("q", half, [1, 1, width]), value("k", half, [1, 1, kv_width]), value("v", half, [1, 1, kv_width])]
    inputs += [value("past_k", held, past), value("past_v", held, past)]
    inputs += [value("seqlens_k", i32, [1]), value("total", i32, [1])]
    attributes: dict[str, Any] = {}
    if case.format != "f16":
        attributes = {
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
            "kv_cache_bit_width": BITS[case.format],
        }
        for name in ("k_scale", "v_scale"):
            inputs.append(value(name, TensorProto.FLOAT, [1, case.kv_heads, 1, case.dim]))
        names += [*[""] * 5, "k_scale", "v_scale"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["out", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=case.q_heads,
        kv_num_heads=case.kv_heads,
        scale=case.dim**-0.5,
        **attributes,
    )
    outputs = [value("out", half, [1, 1, width]), value("present_k", held, past), value("present_v", held, past)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(made, full_check=False)
    return made.SerializeToString()  # type: ignore[no-any-return]
