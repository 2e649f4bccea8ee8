"""Decode attention on the CPU compared with other libraries, in one run.

    python -m venv peers && peers/bin/pip install numpy rich safetensors onnx onnxruntime openvino torch
    PYTHONPATH=python peers/bin/python benches/attention_peers --threads 1
    PYTHONPATH=python peers/bin/python benches/attention_peers --threads 1 --format q8_0 --ik-llama build/ggml/src/libggml.so

One query token, batch 1. Layers are rotated over at least 512 MB, so that no cache helps. Each library stores keys and values
in the layout that suits it best: Pagoda and OpenVINO in pages, the others in one piece, torch with the query heads of a K/V
head as query rows. A library that is not installed, or does not have the format, is left out.

In q8_0 Pagoda and ggml have a scale for 32 values, 8.5 bits a value; OpenVINO has u8 with a scale and a zero point for 32
tokens of a channel of K and for a row of V, 9.25 bits at 128-wide heads; ONNX Runtime has int8 with a scale for each channel,
8 bits. In q4_0 it is the same with 4 bits: 4.5, 5.25, 4. torch has neither.

A cell has GB/s, microseconds for a layer, and in brackets the largest error over the largest value. GB/s count every byte of
K and V once, including scales, as that library stores them. These bytes differ between libraries, so times are compared: that
of the fastest other library over that of Pagoda. The error is relative to float64 over the f16 rows that all were given; in
q8_0 and q4_0 it is mostly that of the format.

ggml and ik_llama are the libggml.so of llama.cpp and of ik_llama.cpp, which has its own kernels. In the sources of either:

    cmake -B build -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF
    cmake --build build --target ggml
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from functools import partial

import numpy as np
from case import BITS, Attention, Case, Data, LeftOut, Prepare
from libraries import ggml, onnxruntime, openvino, pagoda, torch


def measure(case: Case, data: Data, attention: Attention, seconds: float) -> tuple[float, float]:
    """(median seconds for a layer, largest error over the largest value)."""
    expected = data.reference()
    error = float(np.abs(attention.run(0).astype(np.float64) - expected).max() / np.abs(expected).max())
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 2 * case.layers or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        attention.run(len(times) % case.layers)
        times.append(time.perf_counter() - before)
    return statistics.median(times[case.layers // 2 :]), error


def cell(case: Case, data: Data, prepare: Prepare, seconds: float) -> tuple[str, float]:
    """(the cell of the table, seconds for a layer: infinite if the library is left out)."""
    try:
        attention = prepare(case, data)
    except ModuleNotFoundError:
        return "not installed", math.inf
    except LeftOut as lack:
        return str(lack), math.inf
    taken, error = measure(case, data, attention, seconds)
    return f"{attention.layer_bytes / taken / 1e9:.1f}, {taken * 1e6:.0f} ({error:.0e})", taken


def main() -> None:
    libraries: dict[str, Prepare] = {
        "pagoda": pagoda.prepare,
        "openvino": openvino.prepare,
        "onnxruntime": onnxruntime.prepare,
        "torch": torch.prepare,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--format", choices=BITS, default="f16", help="of keys and values")
    parser.add_argument("--contexts", default="4096,32768,131072")
    parser.add_argument("--shapes", default="32/8x128,8/2x256", help="query heads / KV heads x head size")
    parser.add_argument("--libraries", help=f"of {', '.join(libraries)}, ggml, ik_llama; all that are there by default")
    parser.add_argument("--ggml", metavar="PATH", help="libggml.so of llama.cpp")
    parser.add_argument("--ik-llama", metavar="PATH", help="libggml.so of ik_llama.cpp")
    parser.add_argument("--seconds", type=float, default=3.0, help="of samples for each figure")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(arguments.threads):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": str(arguments.threads)})
    for name in ("ggml", "ik_llama"):
        if path := getattr(arguments, name):
            libraries[name] = partial(ggml.prepare, path)
    names = arguments.libraries.split(",") if arguments.libraries else list(libraries)
    if set(names) - set(libraries):
        parser.error(f"--libraries {arguments.libraries}: there are {', '.join(libraries)}")
    contexts = arguments.contexts.split(",")
    if not all(part.isdecimal() and int(part) for part in contexts):
        parser.error(f"--contexts {arguments.contexts}: numbers of tokens above 0")
    kind = f"{arguments.threads} thread(s), {arguments.format}"
    print(f"| {kind} | context |", " | ".join(names), "| pagoda / best other |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for shape in arguments.shapes.split(","):
        heads, dim = shape.split("x")
        q_heads, kv_heads = (int(part) for part in heads.split("/"))
        for context in map(int, contexts):
            case = Case(q_heads, kv_heads, int(dim), context, arguments.format, arguments.threads)
            data = Data.draw(case)
            seen = {name: cell(case, data, libraries[name], arguments.seconds) for name in names}
            cells = [text for text, _ in seen.values()]
            times = {name: taken for name, (_, taken) in seen.items() if taken < math.inf}
            others = [taken for name, taken in times.items() if name != "pagoda"]
            ratio = f"{min(others) / times['pagoda']:.1f} x" if others and "pagoda" in times else "-"
            print(f"| {shape} | {context} |", " | ".join(cells), f"| {ratio} |", flush=True)


if __name__ == "__main__":
    main()
