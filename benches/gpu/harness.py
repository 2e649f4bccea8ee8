"""What the programs in this folder share: a cache full of tokens, times of kernels, the ceiling, and where results go.

Times are device times inside a CUDA graph: the calls of all layers follow each other, and all layers together hold so
much that none finds its rows in the L2 cache. K and V of token t are row t modulo 1024 of one random array in every
layer and sequence, so that the right result is attention over 1024 rows, whatever the context.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pagoda
import torch
from pagoda.device.cuda import open_driver
from pagoda.device.driver import Stream
from pagoda.formats import check_not_forced
from pagoda.measuring.gpu import Reader

check_not_forced()

STREAM = torch.cuda.Stream()
"""Of everything that is timed."""

ROWS, DIM, KV_HEADS = 1024, 128, 8
COLD_BYTES = 256 << 20
FILL_TOKENS = 1 << 15
REPEATS = 30


def seconds(calls: Collection[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Device seconds of one call: the median over replays of a graph of all calls, which are run once before."""
    # STREAM does not wait for the stream that their arrays were made on.
    torch.cuda.synchronize()
    with torch.cuda.stream(STREAM):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=STREAM, capture_error_mode="relaxed"):
        for call in calls:
            call()
    return median_of(graph.replay, repeats) / len(calls)


def median_of(launch: Callable[[], object], repeats: int = REPEATS) -> float:
    """Device seconds of `launch`, from the end of one to the end of the next: the host is ahead, so that its own time for a
    launch is not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 4)]
    with torch.cuda.stream(STREAM):
        for event in events:
            launch()
            event.record()
    events[-1].synchronize()
    times: list[float] = [start.elapsed_time(end) / 1e3 for start, end in pairwise(events[3:])]
    return statistics.median(times)


@lru_cache(maxsize=1)
def _reader() -> tuple[Reader, Stream]:
    driver = open_driver(0)
    return Reader(driver), driver.caller_stream(STREAM)


def read(address: int, size: int) -> Callable[[], None]:
    """Reads device memory and does nothing with it: the ceiling of attention."""
    reader, stream = _reader()
    return lambda: reader.read(stream, address, size)


class Filled:
    """A cache with sequences of given lengths, without the last `new` tokens of each; the open step has those.

    dtype: of queries and new rows. formats: of stored K and V rows; dtype if None. shared: tokens that all
    sequences have in common, as forks of one.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        dtype: str,
        page_size: int,
        q_heads: int,
        new: int = 1,
        shared: int = 0,
        formats: tuple[str, str] | None = None,
    ) -> None:
        assert all(length % ROWS == 0 for length in [*lengths, shared])
        self.lengths, self.page_size, self.q_heads, self.new = lengths, page_size, q_heads, new
        self.kind = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        layer = pagoda.AttentionLayer(q_heads, KV_HEADS, DIM)
        k_dtype, v_dtype = formats or (dtype, dtype)
        self.token_bytes = pagoda.ModelSpec([layer]).bytes_per_token(k_dtype, v_dtype)
        held = shared + sum(length - shared for length in lengths)
        self.held_bytes = held * self.token_bytes
        self.layers = max(2, -(-COLD_BYTES // self.held_bytes))
        torch.manual_seed(0)
        self.k, self.v = (torch.randn(ROWS, KV_HEADS, DIM, device="cuda").to(self.kind) for _ in range(2))
        self.q = torch.randn(len(lengths) * new, q_heads, DIM, device="cuda").to(self.kind)
        self.out = torch.empty_like(self.q)
        block = page_size * self.layers * self.token_bytes
        blocks = (
            sum(-(-length // page_size) + 2 for length in lengths)
            if not shared
            else held // page_size + 4 * len(lengths)
        )
        self.cache = pagoda.Cache(
            pagoda.ModelSpec([layer] * self.layers),
            page_size=page_size,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
            device="cuda",
            device_memory=blocks * block * 11 // 10 + (1 << 28),
            host_memory=0,
        )
        if shared:
            root = self.cache.create()
            self._append([root], [0], [shared])
            self.batch = [root.fork() for _ in lengths]
            root.release()
        else:
            self.batch = [self.cache.create() for _ in lengths]
        self._append(self.batch, [shared] * len(lengths), [length - new for length in lengths])
        self.step = self.cache.step(self.batch, [new] * len(lengths), stream=STREAM).__enter__()
        rows = self._rows([length - new for length in lengths], [new] * len(lengths))
        k, v = self.k[rows], self.v[rows]
        # STREAM does not wait for the stream that these are made on.
        torch.cuda.synchronize()
        for index in range(self.layers):
            self.step.append(index, k, v)
        torch.cuda.synchronize()
        assert self.cache._device is not None
        self.arena = self.cache._device._memory.bases[0]

    def close(self) -> None:
        self.step.__exit__(None, None, None)
        self.cache.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def calls(self) -> list[Callable[[], object]]:
        """Attention of each layer."""
        return [partial(self.step.attend, layer, self.q, out=self.out) for layer in range(self.layers)]

    def reads(self, size: int) -> list[Callable[[], object]]:
        """The ceiling: reads of one layer's bytes each."""
        return [read(self.arena + layer * size, size) for layer in range(self.layers)]

    def error(self, out: Any) -> float:
        """The largest error of the last query of each sequence, against float64."""
        q = self.q[self.new - 1 :: self.new].double().unflatten(1, (KV_HEADS, -1))
        scores = torch.einsum("bhgd,rhd->bhgr", q, self.k.double()) * DIM**-0.5
        right = torch.einsum("bhgr,rhd->bhgd", scores.softmax(-1), self.v.double()).flatten(1, 2)
        return float((out[self.new - 1 :: self.new].double() - right).abs().max())

    def _rows(self, starts: list[int], counts: list[int]) -> Any:
        rows = [np.arange(start, start + count) % ROWS for start, count in zip(starts, counts, strict=True)]
        return torch.from_numpy(np.concatenate(rows)).cuda()

    def _append(self, batch: list[pagoda.Sequence], starts: list[int], ends: list[int]) -> None:
        """Some tokens of every sequence in turn, so that their pages alternate."""
        done = list(starts)
        while done != ends:
            behind = sum(at < end for at, end in zip(done, ends, strict=True))
            counts = [min(end - at, FILL_TOKENS // behind) for at, end in zip(done, ends, strict=True)]
            rows = self._rows(done, counts)
            k, v = self.k[rows], self.v[rows]
            torch.cuda.synchronize()
            with self.cache.step(batch, counts, stream=STREAM) as step:
                for layer in range(self.layers):
                    step.append(layer, k, v)
            torch.cuda.synchronize()
            done = [at + count for at, count in zip(done, counts, strict=True)]


class Report:
    """Lines of JSON in the file PAGODA_RESULTS, and a table."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        print(f"\n{bench}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {machine()}", flush=True)

    def line(self, case: str, what: str, **figures: float | str) -> None:
        """One measurement."""
        shown = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        print(f"{case:44} {what:14} {shown}", flush=True)
        with Path(os.environ["PAGODA_RESULTS"]).open("a") as file:
            file.write(json.dumps({"bench": self._bench, "case": case, "what": what, **figures}) + "\n")


def machine() -> str:
    """The GPU, its driver and clocks, as they are now."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{done.stdout.strip()}, CuPy {cupy.__version__}, torch {torch.__version__}"
