"""`pagoda bench longcontext`: tokens a second with more before them than memory holds, against what the links carry."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pagoda import build_info, machine
from pagoda.cache import Cache
from pagoda.calibration import ceilings
from pagoda.cli.quality import pair
from pagoda.errors import InvalidArgument
from pagoda.filling import CHUNK, fill, rows_of
from pagoda.planner import Planner
from pagoda.report import StepReport
from pagoda.sizes import format_size, format_tokens, parse_size, parse_tokens
from pagoda.spec import AttentionLayer, ModelSpec

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Row = dict[str, Any]

HYBRID = "hybrid-6x2x256"

MODELS: dict[str, tuple[ModelSpec, int]] = {
    HYBRID: (ModelSpec([AttentionLayer(num_q_heads=16, num_kv_heads=2, head_dim=256)] * 6, HYBRID), 850_000_000),
    "qwen3-8b": (ModelSpec.preset("qwen3-8b"), 7_570_000_000),
    "llama-3.1-8b": (ModelSpec.preset("llama-3.1-8b"), 7_500_000_000),
}
"""Attention layers, and the bytes of weights that a token reads: one for each, none for the table of input embeddings."""

ABOUT = f"""{HYBRID} stands for a small hybrid model like Qwen3.5-0.8B: its six full-attention layers, of 2 K/V heads of 256,
but with 16 query heads. Its other layers keep a state of fixed size, and are here as weights alone."""

PAGES_MIN = 16
"""Pages that a tier has room for at least, if its budget is not given."""

TOKENS_A_SECOND = 1024
"""More than are written in a second: how much room --seconds is given."""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "longcontext",
        help="tokens a second over three tiers, against what memory and disk carry",
        description="Times the decode loop of a real geometry, its pages over device, host and disk. The cache is filled "
        f"with the same random rows over and over, up to {CHUNK} tokens of them: no prefill is computed, nor anything of a "
        "model but attention. Weights are memory that is read layer by layer, before each one's attention.",
        epilog=ABOUT,
    )
    parser.add_argument("--model", choices=MODELS, default=HYBRID, help="whose attention layers")
    parser.add_argument("--contexts", default="32k,200k,1m", help="tokens before those that are timed; k is 1024")
    parser.add_argument("--format", default="f16", help="row format, or a pair K/V of them")
    parser.add_argument("--device-memory", help="budget of the device tier; a tenth of the pages by default")
    parser.add_argument("--host-memory", help="of the host tier; by default what is left, as far as free RAM has room")
    parser.add_argument("--disk", type=Path, help="a directory for the disk tier")
    parser.add_argument("--disk-memory", help="budget of the disk tier; by default what is left")
    parser.add_argument(
        "--weights", help="bytes of weights that a token reads; by default those of the model, 0 for none"
    )
    parser.add_argument("--threads", type=int, help="CPU workers; all cores by default")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, default=4, help="tokens that are timed, after one that is not")
    length.add_argument("--seconds", type=float, help="write tokens for so long instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    spec, weight_bytes = MODELS[arguments.model]
    k_dtype, v_dtype = pair(arguments.format)
    contexts = [parse_tokens(part, "--contexts") for part in arguments.contexts.split(",")]
    seconds, most = arguments.seconds, arguments.tokens
    if seconds is not None and not 0 < seconds <= 3600:
        raise InvalidArgument(f"--seconds = {seconds}: above 0, at most 3600")
    if most < 1 or not all(contexts):
        raise InvalidArgument(f"--tokens = {most}, --contexts = {arguments.contexts!r}: numbers of tokens above 0")
    if seconds is not None:
        most = 1 + int(seconds * TOKENS_A_SECOND)
    threads = os.cpu_count() or 1 if arguments.threads is None else arguments.threads
    if threads < 1:
        raise InvalidArgument(f"--threads = {threads}: at least 1")
    if arguments.weights is not None:
        weight_bytes = parse_size(arguments.weights, "--weights")
    ram, _ = machine.ram()
    if weight_bytes > ram:
        raise InvalidArgument(f"--weights = {weight_bytes}: at most the RAM that is free, {ram}")
    place = None if arguments.disk is None else existing(arguments.disk)
    disk = None if place is None else shutil.disk_usage(place).free
    given = {
        name: parse_size(size, f"--{name.replace('_', '-')}")
        for name in ("device_memory", "host_memory", "disk_memory")
        if (size := getattr(arguments, name)) is not None
    }
    planner = Planner(spec, k_dtype, v_dtype)
    # All budgets are found before anything is measured.
    budgets = [budgets_of(planner, context + 1 + most, given, ram - weight_bytes, disk) for context in contexts]
    rows = []
    with Console(stderr=True).status("ceilings") as status, Weights(weight_bytes, len(spec.layers), threads) as weights:
        rates = ceilings(threads, place)
        for context, budget in zip(contexts, budgets, strict=True):
            status.update(f"{format_tokens(context)} tokens")
            options = {**budget, "k_dtype": k_dtype, "v_dtype": v_dtype, "disk": arguments.disk, "threads": threads}
            row = measure(spec, context, weights, most, seconds, options)
            rows.append(row | against(rates, row))
    document = {
        "build": build_info(),
        "model": arguments.model,
        "format": arguments.format,
        "threads": threads,
        "weights_bytes": weight_bytes,
        "ceilings": rates,
        "longcontext": rows,
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        draw(document, Console())
    return 0


class Weights:
    """A model's weights as memory sees them: each layer reads its share, on as many threads as attention has."""

    def __init__(self, size: int, layers: int, threads: int) -> None:
        self.bytes = size
        words = np.ones(size // 8, np.uint64)
        self._shares = [np.array_split(share, threads) for share in np.array_split(words, layers)]
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def read(self, layer: int) -> None:
        """Reads those of one layer."""
        if self.bytes:
            list(self._pool.map(np.add.reduce, self._shares[layer]))


def existing(directory: Path) -> Path:
    """The directory, or the one that it will be made in. Raises InvalidArgument where neither is there."""
    for place in (directory.absolute(), directory.absolute().parent):
        if place.is_dir():
            return place
    raise InvalidArgument(f"--disk = {str(directory)!r}: a directory, or a new one in one that is there")


def budgets_of(
    planner: Planner, tokens: int, given: dict[str, int], free_ram: int, free_disk: int | None
) -> dict[str, int]:
    """Budgets of the tiers, as `Cache` takes them, for so many tokens.

    As given; else a tenth of the pages on the device, and the others on the host and then on disk as there is room.
    free_disk: None without a disk tier. Raises InvalidArgument where there is no room.
    """
    page = planner.bytes_per_token * planner.page_size
    left = pages = planner.footprint(tokens).paged_bytes
    device = given.get("device_memory", max(pages // 10, PAGES_MIN * page))
    left = max(0, left - device)
    # The last tier has more than it needs: blocks come in extents, those on disk are padded, and steps want some free.
    spare = left // 4 + PAGES_MIN * page
    room = max(0, free_ram * 3 // 4 - device)
    host = given.get("host_memory", min(left + spare, room) if left else 0)
    left = max(0, left - host)
    budgets = {"device_memory": device, "host_memory": host}
    if free_disk is not None:
        budgets["disk_memory"] = given.get("disk_memory", min(left + spare, free_disk))
        left = max(0, left - budgets["disk_memory"])
    if left:
        sizes = ", ".join(f"{name} = {format_size(size)}" for name, size in budgets.items())
        where = "" if free_disk is not None else "; --disk names a directory for more"
        raise InvalidArgument(
            f"--contexts: {tokens:,} tokens have {format_size(pages)}; there is room for {sizes}{where}"
        )
    return budgets | given


def measure(
    spec: ModelSpec, context: int, weights: Weights, most: int, seconds: float | None, options: dict[str, Any]
) -> Row:
    """Writes `most` tokens after `context` others, or until so many seconds have passed: what was read, in what time."""
    layers, rng = spec.attention_layers, np.random.default_rng(0)
    queries = {layer: rng.standard_normal((1, layer.num_q_heads, layer.head_dim), np.float32) for layer in layers}
    rows = {layer: rows_of(layer, 1, rng) for layer in layers}
    # Half of the device tier, or steps would wait for their own pages to leave.
    chunk = options["device_memory"] // (2 * spec.bytes_per_token(options["k_dtype"], options["v_dtype"]))
    with Cache(spec, device="cpu", **options) as cache:
        sequence = cache.create()

        def write() -> StepReport:
            with cache.step([sequence], [1]) as step:
                for index, layer in enumerate(layers):
                    weights.read(index)
                    step.forward(index, queries[layer], *rows[layer])
            return step.report

        fill(cache, sequence, context, min(CHUNK, max(1, chunk)))
        # What moved while the cache was filled arrives first.
        write()
        reports: list[StepReport] = []
        before, start = machine.resident(), time.perf_counter()
        while len(reports) < most and (seconds is None or time.perf_counter() < start + seconds):
            reports.append(write())
        took, grown = time.perf_counter() - start, machine.resident() - before
        stats = cache.stats()
    tokens = len(reports)
    read = {link: sum(report.bytes[link] for report in reports) / tokens for link in ("memory", "disk")}
    return {
        "context": context,
        "tokens": tokens,
        "seconds": took,
        "tokens_per_second": tokens / took,
        "waited_seconds_per_token": sum(report.waited for report in reports) / tokens,
        "bytes_per_token": {**read, "memory": read["memory"] + weights.bytes},
        "tier_bytes": {tier: stats.used_bytes(tier) for tier in ("device", "host", "disk")},
        "peak_resident_bytes": machine.peak_resident(),
        "grown_bytes": grown,
    }


def against(rates: dict[str, float], row: Row) -> Row:
    """The roofline: tokens a second if every link carried what it can, all at once; and how much of that was reached."""
    slowest = max(size / rates[link] for link, size in row["bytes_per_token"].items() if size)
    return {
        "roofline_tokens_per_second": 1 / slowest,
        "achieved": row["tokens_per_second"] * slowest,
    }


def draw(document: Row, console: Console) -> None:
    """Prints it for people."""
    links = ", ".join(f"{link} {rate / 1e9:.1f} GB/s" for link, rate in document["ceilings"].items())
    weights = f"{document['weights_bytes'] / 1e9:.2f} GB of weights a token"
    console.print(
        f"{document['model']}, {document['format']}, {weights}, {document['threads']} threads; ceilings: {links}"
    )
    table = Table("context", "tok/s", "roofline", "achieved", caption=ABOUT if document["model"] == HYBRID else None)
    for column in ("memory a token", "disk a token", "waited", "on device, host, disk", "peak RSS", "grown"):
        table.add_column(column, justify="right")
    for row in document["longcontext"]:
        table.add_row(
            format_tokens(row["context"]),
            f"{row['tokens_per_second']:.2f}",
            f"{row['roofline_tokens_per_second']:.2f}",
            f"{row['achieved']:.0%}",
            *(f"{row['bytes_per_token'][link] / 1e9:.2f} GB" for link in ("memory", "disk")),
            f"{row['waited_seconds_per_token']:.3f} s",
            ", ".join(map(format_size, row["tier_bytes"].values())),
            format_size(row["peak_resident_bytes"]),
            format_size(row["grown_bytes"]),
        )
    console.print(table)
