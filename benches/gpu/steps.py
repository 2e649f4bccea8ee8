"""Whole decode steps of 64 sequences and 32 layers, and their parts: as they are, and replayed as one graph.

Median host microseconds of each part; `step` is the wall time of a step including the wait for it. Then append alone, its
kernels inside a graph, compared with copies of as many bytes: 64 new tokens, and 8,192.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pagoda
import torch
from harness import DIM, KV_HEADS, REPEATS, STREAM, Report, median_of, seconds

LAYERS, SEQUENCES, CONTEXT, Q_HEADS = 32, 64, 1024, 32


class Model:
    """Appends and attends of all layers, on fixed arrays."""

    def __init__(self, sequences: int, new: int, context: int, attends: bool, rows: str = "f16") -> None:
        spec = pagoda.ModelSpec([pagoda.AttentionLayer(Q_HEADS, KV_HEADS, DIM)] * LAYERS)
        self.cache = pagoda.Cache(spec, k_dtype=rows, v_dtype=rows, device="cuda", device_memory="24GiB", host_memory=0)
        self.batch = self.cache.batch([self.cache.create() for _ in range(sequences)])
        self.counts, self.attends = [new] * sequences, attends
        kind = {"device": "cuda", "dtype": torch.float16}
        count = sequences * new
        self.q, self.out = (torch.randn(count, Q_HEADS, DIM, **kind) for _ in range(2))
        self.k, self.v = (torch.randn(max(count, 512 * sequences), KV_HEADS, DIM, **kind) for _ in range(2))
        torch.cuda.synchronize()
        while len(self.batch.sequences[0]) < context:
            with self.cache.step(self.batch, [512] * sequences, stream=STREAM) as step:
                for layer in range(LAYERS):
                    step.append(layer, self.k, self.v)
        self.k, self.v = self.k[:count], self.v[:count]
        self.cache.declare(sequences=sequences, new_tokens=new, context=context + 4096 + 3 * new)
        self.graph: Any = torch.cuda.CUDAGraph()
        self.run(self.forward)
        self.run(self.capture)

    def forward(self, step: pagoda.Step) -> None:
        for layer in range(LAYERS):
            step.append(layer, self.k, self.v)
            if self.attends:
                step.attend(layer, self.q, out=self.out)

    def capture(self, step: pagoda.Step) -> None:
        with torch.cuda.graph(self.graph, stream=STREAM, capture_error_mode="relaxed"):
            self.forward(step)
        with torch.cuda.stream(STREAM):
            self.graph.replay()

    def replay(self, step: pagoda.Step) -> None:
        step.replay(self.graph.replay)

    def run(self, launch: Callable[[pagoda.Step], None], accepted: list[int] | None = None) -> list[float]:
        """Seconds of reserve, launches and commit, and of the whole step until the device has ended."""
        clock = time.perf_counter
        start = clock()
        step = self.cache.step(self.batch, self.counts, stream=STREAM).__enter__()
        reserved = clock()
        launch(step)
        launched = clock()
        step.commit(accepted)
        committed = clock()
        STREAM.synchronize()
        return [reserved - start, launched - reserved, committed - launched, clock() - start]


def main() -> None:
    report = Report("steps")
    model = Model(SEQUENCES, 1, CONTEXT, attends=True)
    for name, launch in (("as it is", model.forward), ("a graph", model.replay)):
        times = [model.run(launch) for _ in range(200)]
        parts = [1e6 * statistics.median(part) for part in zip(*times, strict=True)]
        reserve, launches, commit, step = parts
        report.line("64 x 1K, 32 layers", name, reserve=reserve, launches=launches, commit=commit, step=step)
    model.cache.close()
    for sequences, new in ((64, 1), (1, 8192)):
        for rows in ("f16", "fp8_e4m3", "q8_0", "q4_0"):
            append(report, sequences, new, rows)


def append(report: Report, sequences: int, new: int, rows: str) -> None:
    """Append alone, compared with a copy of the bytes that it reads and writes."""
    model = Model(sequences, new, 0, attends=False, rows=rows)
    times = []
    for _ in range(REPEATS):
        step = model.cache.step(model.batch, model.counts, stream=STREAM).__enter__()
        times.append(median_of(model.graph.replay, 1) / LAYERS)
        step.__exit__(InterruptedError, None, None)
    case, taken = f"append {sequences} x {new} {rows}", statistics.median(times)
    written = sequences * new * model.cache.spec.bytes_per_token(rows, rows) // LAYERS
    moved = 2 * model.k.nbytes + written
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(source)
    ceiling = seconds([lambda: there.copy_(source)] * LAYERS)
    report.line(case, "a copy", us=ceiling * 1e6, TBs=moved / ceiling / 1e12)
    report.line(case, "pagoda", us=taken * 1e6, TBs=moved / taken / 1e12, of_ceiling=ceiling / taken)
    model.cache.close()


if __name__ == "__main__":
    main()
