"""`pagoda bench` without a PART: what calls cost through Python, on this machine."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from pagoda.cache import Cache
from pagoda.cli.console import results
from pagoda.lm import ContiguousCache, LanguageModel, Sampler, generate
from pagoda.measuring import machine
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.spec import AttentionLayer, ModelSpec

ROUNDS, RUNS = 301, 3
"""Repetitions of calls, and runs of the shipped model."""
SMALL = AttentionLayer(num_q_heads=8, num_kv_heads=2, head_dim=64)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    figures = {**bookkeeping(), **language_model()}
    if arguments.json:
        print(json.dumps({"build": machine.build(), "figures": figures}, indent=2))
        return 0
    table = Table("what", "median", title=f"{machine.build()['isa']}, one caller")
    for what, figure in figures.items():
        table.add_row(what, f"{figure:,.2f}")
    results().print(table)
    return 0


def median_us(call: Callable[[], Any], repeat: int = 1) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        times.append((time.perf_counter() - start) / repeat * 1e6)
    return statistics.median(times)


def bookkeeping() -> dict[str, float]:
    """Steps, forks and calls of a cache, without a model."""
    figures = {}
    with Cache(ModelSpec([SMALL]), device_memory="1GiB", host_memory="1GiB") as cache:
        sequences = [cache.create() for _ in range(256)]
        batch, ones = cache.batch(sequences), np.ones(256, np.int64)
        # Whole pages, so that each reserve, which is rolled back, begins a page for every sequence.
        with cache.step(batch, np.full(256, 16 * cache.page_size)) as step:
            step.table(0)

        def decode() -> None:
            with cache.step(batch, ones) as step:
                step.table(0)

        core = cache._core

        def decode_core() -> None:
            core.reserve(0, batch.ids, ones)
            core.rollback(0)

        figures["reserve + rollback, 256 sequences that begin a page, us"] = median_us(decode_core)
        figures["reserve, block_table, slot_mapping and commit, 256 sequences, us"] = median_us(decode)
        figures["cheapest call: length of a sequence, us"] = median_us(lambda: core.length(0), 1000)
        q, k = np.zeros((0, 8, 64), np.float32), np.zeros((0, 2, 64), np.float32)
        out = np.empty_like(q)
        with cache.step(batch, np.zeros(256, np.int64)) as step:
            figures["empty append, us"] = median_us(lambda: core.append(step._number, 0, k, k), 100)
            figures["empty attend, us"] = median_us(lambda: core.attend(step._number, 0, q, out), 100)
    with Cache(ModelSpec([SMALL]), device_memory="1GiB", host_memory="1GiB") as cache:
        parent = cache.create()
        with cache.step([parent], [131_072]) as step:
            step.table(0)
        figures["fork and release of 131,072 tokens, us"] = median_us(lambda: parent.fork().release())
    return figures


def language_model() -> dict[str, float]:
    """Tokens a second of the shipped model, over pages and over plain arrays."""
    model = LanguageModel.load(SHIPPED_MODEL)
    prompt = model.tokenizer.encode(SHIPPED_TEXT.read_text()[:4096])
    figures = {}
    for name, cache in (("pages", Cache(model.spec)), ("plain arrays", ContiguousCache(model.spec))):
        read, written = zip(*(speeds(model, cache, prompt) for _ in range(RUNS)), strict=True)
        figures[f"read 4,096 tokens over {name}, tok/s"] = statistics.median(read)
        figures[f"write 64 tokens after them over {name}, tok/s"] = statistics.median(written)
    return figures


def speeds(model: LanguageModel, cache: Any, prompt: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Tokens a second of a new sequence, for reading a prompt and for writing 64 more tokens."""
    sequence = cache.create()
    start = time.perf_counter()
    for _ in generate(model, cache, sequence, prompt, 0, Sampler()):
        pass
    middle = time.perf_counter()
    for _ in generate(model, cache, sequence, prompt[:1], 64, Sampler()):
        pass
    return len(prompt) / (middle - start), 64 / (time.perf_counter() - middle)
