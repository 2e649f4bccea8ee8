"""Decode attention on the CPU beside other libraries, in one run.

    python -m venv peers && peers/bin/pip install numpy rich safetensors onnx onnxruntime openvino torch
    PYTHONPATH=python peers/bin/python benches/attention_peers.py --threads 1

One query token, batch 1, f16 keys and values; layers are rotated over at least 512 MB, so that no cache helps. Each
library holds its keys and values the way it likes best: Pagoda and OpenVINO in pages, ONNX Runtime and torch in one piece,
torch with the query heads of a K/V head as query rows. GB/s count every byte of K and V once, in brackets is the largest
error over the largest value. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    q_heads: int
    kv_heads: int
    dim: int
    context: int
    threads: int

    @property
    def layer_bytes(self) -> int:
        return self.context * self.kv_heads * self.dim * 2 * 2

    @property
    def layers(self) -> int:
        return max(2, -(-COLD_BYTES // self.layer_bytes))


@dataclass
class Data:
    """K and V [context, kv_heads, dim] of one layer, which every layer holds a copy of, and a query [q_heads, dim]."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def draw(cls, case: Case) -> Data:
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((case.context, case.kv_heads, case.dim), np.float32) for _ in range(2)]
        q = rng.standard_normal((case.q_heads, case.dim), np.float32)
        return cls(q, rows[0].astype(np.float16), rows[1].astype(np.float16))

    def reference(self) -> Array:
        """The result in float64."""
        heads, group = self.k.shape[1], len(self.q) // self.k.shape[1]
        out = []
        for head in range(heads):
            q = self.q[head * group : (head + 1) * group].astype(np.float64)
            scores = q @ self.k[:, head].astype(np.float64).T * self.q.shape[1] ** -0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ self.v[:, head].astype(np.float64))
        return np.concatenate(out)


Run = Callable[[int], Array]
"""Attends over one layer: [q_heads, dim]."""


def pagoda(case: Case, data: Data) -> Run:
    import pagoda

    layer = pagoda.AttentionLayer(case.q_heads, case.kv_heads, case.dim)
    memory = case.layers * case.layer_bytes * 9 // 8 + (64 << 20)
    cache = pagoda.Cache(
        pagoda.ModelSpec([layer] * case.layers), device_memory=memory, host_memory=0, threads=case.threads
    )
    sequence = cache.create()
    with cache.step([sequence], [case.context - 1]) as step:
        for index in range(case.layers):
            step.append(index, data.k[:-1], data.v[:-1])
    step = cache.step([sequence], [1]).__enter__()
    for index in range(case.layers):
        step.append(index, data.k[-1:], data.v[-1:])
    q, out = data.q[None], np.empty_like(data.q)[None]
    return lambda index: step.attend(index, q, out=out)[0]  # type: ignore[no-any-return]


def openvino(case: Case, data: Data) -> Run:
    import openvino as ov
    from openvino import opset13 as ops
    from openvino.op import _PagedAttentionExtension

    block = 32
    f32, i32 = np.float32, np.int32

    def parameter(kind: Any, rank: int) -> Any:
        return ops.parameter([-1] * rank, kind)

    q, k, v = (parameter(f32, 2) for _ in range(3))
    caches = [ops.parameter([-1] * 4, ov.Type.dynamic) for _ in range(2)]
    past, begins, indices, index_begins = (parameter(i32, 1) for _ in range(4))
    empty = [np.zeros(0, kind) for kind in (f32, i32)]
    constants = [
        np.array(case.dim**-0.5, f32),
        np.array(0, i32),
        empty[0],
        np.array(case.context, i32),
        np.array(0, i32),
        empty[1],
        np.zeros((0, 0), i32),
        np.zeros((0, 0), f32),
        empty[0],
        np.array(0, i32),
        np.array(0, i32),
        empty[0],
        np.array(0, i32),
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
        "KV_CACHE_PRECISION": "f16",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": case.threads,
    }
    compiled = ov.Core().compile_model(ov.Model([op.output(0)], inputs), "CPU", config)
    blocks = -(-case.context // block)
    pages = []
    for rows in (data.k, data.v):
        paged = np.zeros((blocks * block, case.kv_heads, case.dim), np.float16)
        paged[: case.context] = rows
        pages.append(np.ascontiguousarray(paged.reshape(blocks, block, case.kv_heads, case.dim).swapaxes(1, 2)))
    shuffled = np.random.default_rng(1).permutation(blocks)
    requests = []
    for _ in range(case.layers):
        request = compiled.create_infer_request()
        values = [data.q.reshape(1, -1), data.k[-1:].reshape(1, -1).astype(f32), data.v[-1:].reshape(1, -1).astype(f32)]
        held = []
        for page in pages:
            placed = np.empty_like(page)
            placed[shuffled] = page
            held.append(ov.Tensor(placed))
        tensors = [ov.Tensor(np.ascontiguousarray(value)) for value in values] + held
        tensors += [ov.Tensor(np.array(value, i32)) for value in ([case.context - 1], [0, 1], shuffled, [0, blocks])]
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        requests.append((request, tensors))

    def run(index: int) -> Array:
        requests[index][0].infer()
        out: Array = requests[index][0].get_output_tensor(0).data
        return out.reshape(case.q_heads, case.dim)

    return run


def onnxruntime(case: Case, data: Data) -> Run:
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    half, past = TensorProto.FLOAT16, [1, case.kv_heads, case.context, case.dim]
    width, kv_width = case.q_heads * case.dim, case.kv_heads * case.dim
    names = ["q", "k", "v", "past_k", "past_v", "seqlens_k", "total"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["out", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=case.q_heads,
        kv_num_heads=case.kv_heads,
        scale=case.dim**-0.5,
    )
    inputs = [value("q", half, [1, 1, width]), value("k", half, [1, 1, kv_width]), value("v", half, [1, 1, kv_width])]
    inputs += [value("past_k", half, past), value("past_v", half, past)]
    inputs += [value("seqlens_k", TensorProto.INT32, [1]), value("total", TensorProto.INT32, [1])]
    outputs = [value("out", half, [1, 1, width]), value("present_k", half, past), value("present_v", half, past)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=False)
    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    new = {"q": data.q.astype(np.float16).reshape(1, 1, -1)}
    new |= {"k": data.k[-1:].reshape(1, 1, -1), "v": data.v[-1:].reshape(1, 1, -1)}
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, width), np.float16))
    bindings = []
    for _ in range(case.layers):
        binding = session.io_binding()
        held = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(rows)) for name, rows in new.items()}
        for name, rows in (("k", data.k), ("v", data.v)):
            held[f"past_{name}"] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(rows.swapaxes(0, 1)[None]))
        held["seqlens_k"] = ort.OrtValue.ortvalue_from_numpy(np.array([case.context - 1], np.int32))
        held["total"] = ort.OrtValue.ortvalue_from_numpy(np.array([case.context], np.int32))
        for name, array in held.items():
            binding.bind_ortvalue_input(name, array)
        binding.bind_ortvalue_output("out", out)
        for name in ("k", "v"):
            binding.bind_ortvalue_output(f"present_{name}", held[f"past_{name}"])
        bindings.append((binding, held))

    def run(index: int) -> Array:
        session.run_with_iobinding(bindings[index][0])
        return out.numpy().reshape(case.q_heads, case.dim)  # type: ignore[no-any-return]

    return run


def torch(case: Case, data: Data) -> Run:
    import torch as pytorch

    pytorch.set_num_threads(case.threads)
    attend = pytorch.nn.functional.scaled_dot_product_attention
    q = pytorch.from_numpy(data.q.astype(np.float16)).reshape(1, case.kv_heads, -1, case.dim)
    rows = [[pytorch.from_numpy(np.ascontiguousarray(part.swapaxes(0, 1)[None])) for part in (data.k, data.v)]]
    rows += [[part.clone() for part in rows[0]] for _ in range(case.layers - 1)]

    def run(index: int) -> Array:
        out: Array = attend(q, *rows[index]).reshape(case.q_heads, case.dim).numpy()
        return out

    return run


LIBRARIES: dict[str, Callable[[Case, Data], Run]] = {
    "pagoda": pagoda,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "torch": torch,
}


def measure(case: Case, data: Data, make: Callable[[Case, Data], Run], seconds: float) -> tuple[float, float]:
    """(median GB/s, largest error over the largest value)."""
    run = make(case, data)
    expected = data.reference()
    error = float(np.abs(run(0).astype(np.float64) - expected).max() / np.abs(expected).max())
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 2 * case.layers or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run(len(times) % case.layers)
        times.append(time.perf_counter() - before)
    return case.layer_bytes / statistics.median(times[case.layers // 2 :]) / 1e9, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", default="4096,32768,131072")
    parser.add_argument("--shapes", default="32/8x128,8/2x256", help="query heads / KV heads x head size")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of samples for each figure")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(arguments.threads):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": str(arguments.threads)})
    names = arguments.libraries.split(",")
    print(f"| {arguments.threads} thread(s), f16 | context |", " | ".join(names), "| pagoda / best other |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for shape in arguments.shapes.split(","):
        heads, dim = shape.split("x")
        q_heads, kv_heads = (int(part) for part in heads.split("/"))
        for context in (int(part) for part in arguments.contexts.split(",")):
            case = Case(q_heads, kv_heads, int(dim), context, arguments.threads)
            data = Data.draw(case)
            rates, cells = {}, []
            for name in names:
                if importlib.util.find_spec(name) is None:
                    cells.append("not installed")
                    continue
                rates[name], error = measure(case, data, LIBRARIES[name], arguments.seconds)
                cells.append(f"{rates[name]:.1f} ({error:.0e})")
            others = [rate for name, rate in rates.items() if name != "pagoda"]
            ratio = f"{rates['pagoda'] / max(others):.1f} x" if others and "pagoda" in rates else "-"
            print(f"| {shape} | {context} |", " | ".join(cells), f"| {ratio} |", flush=True)


if __name__ == "__main__":
    main()
