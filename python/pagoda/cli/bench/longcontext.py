"""`pagoda bench longcontext`: tokens a second with contexts larger than memory, compared with the bandwidth of links."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pagoda._core import TOKENS_MAX, cores
from pagoda.cache import Cache
from pagoda.checks import check_threads
from pagoda.cli.console import results
from pagoda.cli.options import Commands, directory, format_pair
from pagoda.cli.plan import describe
from pagoda.device import cuda, device_index
from pagoda.errors import InvalidArgument, OutOfBlocks
from pagoda.lm.arrays import library
from pagoda.measuring import machine
from pagoda.measuring.backends import Backend, CpuBackend, GpuBackend
from pagoda.measuring.calibration import DISK_BYTES, disk_ceiling, memory_ceiling
from pagoda.measuring.filling import CHUNK, fill, rows_of
from pagoda.planner import Planner
from pagoda.sizes import format_size, format_tokens, parse_size, parse_tokens
from pagoda.spec import AttentionLayer, ModelSpec
from pagoda.stats import TIERS

Row = dict[str, Any]

HYBRID = "hybrid-6x2x256"

MODELS: dict[str, tuple[ModelSpec, int]] = {
    HYBRID: (ModelSpec([AttentionLayer(num_q_heads=16, num_kv_heads=2, head_dim=256)] * 6, HYBRID), 850_000_000),
    "qwen3-8b": (ModelSpec.preset("qwen3-8b"), 7_570_000_000),
    "llama-3.1-8b": (ModelSpec.preset("llama-3.1-8b"), 7_500_000_000),
}
"""Attention layers, and bytes of weights that a token reads: one byte per weight, none for the input embeddings."""

ABOUT = f"""{HYBRID} stands for a small hybrid model like Qwen3.5-0.8B: its six full-attention layers, of 2 K/V heads of 256,
but with 16 query heads. Its other layers keep a state of fixed size, and are here as weights alone."""

PAGES_MIN = 16
"""The least number of pages that a tier has room for if its budget is not given."""

DISK_SECONDS = 4.0
"""How long the disk's ceiling is measured, before the tokens and after them: a drive's bandwidth drifts within seconds."""

TOKENS_A_SECOND = 1024
"""An upper bound of tokens a second, for the room that --seconds needs."""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "longcontext",
        help="tokens a second over three tiers, against the bandwidth of the links between them",
        description="Times the decode loop of a real geometry, its pages over device, host and disk. The cache is filled "
        f"with the same random rows over and over, up to {CHUNK} tokens of them: of a model only attention is computed, "
        "without prefill. Weights stand for the rest: memory (on a GPU its own) that is read before the attention of each "
        "layer. Ceilings are measured too: memory first, by attention or in order, whichever is faster, and a file on the "
        "disk, read in order, right before and right after the tokens.",
        epilog=ABOUT,
    )
    parser.add_argument(
        "--model", choices=MODELS, default=HYBRID, help="whose attention layers; %(default)s by default"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the cache, the weights and the loop are: cpu, cuda or cuda:1; %(default)s by default",
    )
    parser.add_argument(
        "--contexts",
        default="32k,200k,1m",
        help="tokens before the timed ones; k is 1024; %(default)s by default",
    )
    parser.add_argument("--format", default="f16", help="row format, or a pair K/V of them; %(default)s by default")
    parser.add_argument("--device-memory", help="budget of the device tier; a tenth of the pages by default")
    parser.add_argument(
        "--host-memory", help="budget of the host tier; by default the other pages, as far as free RAM allows"
    )
    parser.add_argument("--disk", type=directory, help="a directory for the disk tier")
    parser.add_argument("--disk-memory", help="budget of the disk tier; by default the rest of the pages")
    parser.add_argument(
        "--weights", help="bytes of weights that a token reads; by default those of the model, 0 for none"
    )
    parser.add_argument("--threads", type=int, help="CPU workers; one for each available core by default")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens", type=int, default=4, help="tokens to time, after one that is not; %(default)s by default"
    )
    length.add_argument("--seconds", type=float, help="generate tokens for this long instead")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    spec, weight_bytes = MODELS[arguments.model]
    k_dtype, v_dtype = format_pair(arguments.format, "--format")
    contexts = [parse_tokens(part, "--contexts") for part in arguments.contexts.split(",")]
    seconds, most = arguments.seconds, arguments.tokens
    if seconds is not None and not 0 < seconds <= 3600:
        raise InvalidArgument(f"--seconds = {seconds}: above 0, at most 3600")
    if seconds is not None:
        most = 1 + int(seconds * TOKENS_A_SECOND)
    if most < 1 or not all(0 < context <= TOKENS_MAX - 1 - most for context in contexts):
        limit = f"numbers of tokens above 0, together below {TOKENS_MAX}"
        raise InvalidArgument(f"--tokens = {most}, --contexts = {arguments.contexts!r}: {limit}")
    threads = cores() if arguments.threads is None else arguments.threads
    check_threads("--threads", threads)
    if arguments.weights is not None:
        weight_bytes = parse_size(arguments.weights, "--weights")
    index, arrays = device_index(arguments.device), library(arguments.device)
    driver = None if index is None else cuda.open_driver(index)
    on_gpu = driver is not None
    ram, _ = machine.ram()
    if driver is None:
        if weight_bytes > ram:
            raise InvalidArgument(f"--weights = {weight_bytes}: at most the RAM that is free, {ram}")
        ram -= weight_bytes
    place = None if arguments.disk is None else existing(arguments.disk)
    disk = None if place is None else max(0, shutil.disk_usage(place).free - DISK_BYTES)
    given = {
        name: parse_size(size, f"--{name.replace('_', '-')}")
        for name in ("device_memory", "host_memory", "disk_memory")
        if (size := getattr(arguments, name)) is not None
    }
    planner = Planner(spec, k_dtype, v_dtype)
    # Compute all budgets before measuring anything.
    budgets = [budgets_of(planner, context + 1 + most, given, ram, disk, on_gpu=on_gpu) for context in contexts]
    if driver is not None:
        largest, free = max(budget["device_memory"] for budget in budgets), driver.free_bytes
        if weight_bytes + largest > free:
            raise InvalidArgument(
                f"--weights, --device-memory = {weight_bytes}, {largest}: together at most what the device has free, {free}"
            )
    options: dict[str, Any] = {
        "device": arguments.device,
        "k_dtype": k_dtype,
        "v_dtype": v_dtype,
        "disk": arguments.disk,
        "threads": threads,
    }
    for budget in budgets:
        # Make each cache once, so that arguments are refused now and not in the middle of measurements.
        Cache(spec, **(options | budget)).close()
    layers, rows = len(spec.layers), []
    backend: Backend = (
        CpuBackend(weight_bytes, layers, threads)
        if driver is None
        else GpuBackend(driver, arrays, weight_bytes, layers)
    )
    with Console(stderr=True).status("ceilings") as status, backend:
        rates = backend.ceilings() | {"memory": memory_ceiling(threads)}
        for context, budget in zip(contexts, budgets, strict=True):
            status.update(f"{format_tokens(context)} tokens")
            try:
                row = measure(spec, context, backend, most, seconds, rates, options | budget)
            except OutOfBlocks as error:
                sizes = ", ".join(f"--{name.replace('_', '-')} = {size}" for name, size in budget.items())
                limit = f"together at least {error.bytes_short} bytes more, for {context:,} tokens"
                raise InvalidArgument(f"{sizes}: {limit} ({error})") from error
            planned = plan_of(planner, context + 1 + most, budget, on_gpu=on_gpu)
            rows.append(row | against(row) | {"planned_bytes": planned})
    document = {
        "build": machine.build(),
        "model": arguments.model,
        "format": arguments.format,
        "device": arguments.device,
        "threads": threads,
        "weights_bytes": weight_bytes,
        "longcontext": rows,
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        draw(document, results())
    return 0


def existing(directory: Path) -> Path:
    """The directory, or its parent if it is yet to be made. Raises InvalidArgument if neither exists."""
    with contextlib.suppress(OSError):
        for place in (directory.absolute(), directory.absolute().parent):
            if place.is_dir():
                return place
    raise InvalidArgument(f"--disk = {str(directory)!r}: a directory, or a new one in one that is there")


def budgets_of(
    planner: Planner, tokens: int, given: dict[str, int], free_ram: int, free_disk: int | None, *, on_gpu: bool = False
) -> dict[str, int]:
    """Budgets of the tiers, as `Cache` takes them, for `tokens` tokens.

    Budgets that are not given: room for a tenth of the pages on the device (on the CPU at most half of the free RAM), and for
    the others on the host and then on disk, as far as there is room. If there are other tiers, the ring takes a part of a
    GPU's memory. free_disk: None without a disk tier. Raises InvalidArgument if there is not enough room.
    """
    page = planner.bytes_per_token * planner.page_size
    pages = planner.footprint(tokens).paged_bytes
    device = max(pages // 10 if on_gpu else min(pages // 10, free_ram // 2), PAGES_MIN * page)
    device = given.get("device_memory", device)
    left = max(0, pages - device)
    if on_gpu and left:
        tiers = {"host": given.get("host_memory") != 0, "disk": free_disk is not None}
        left += planner.rings(device, **tiers, on_gpu=True).device_bytes
    # The last tier gets more than its pages take: blocks come in extents, are padded on disk, and steps need free ones.
    spare = left // 4 + PAGES_MIN * page
    room = max(0, free_ram * 3 // 4 - (0 if on_gpu else device))
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


def plan_of(planner: Planner, tokens: int, budgets: dict[str, int], *, on_gpu: bool) -> dict[str, int]:
    """Bytes by tier, and of the ring, as `pagoda plan` predicts them for these tokens and budgets."""
    by_tier = {tier: budgets.get(f"{tier}_memory", 0) for tier in TIERS}
    document = describe(planner, [tokens], 1, by_tier, on_gpu=on_gpu)
    (rings,), (split,) = document["rings"].values(), document["contexts"][0]["budgets"].values()
    return {"ring": rings["device_bytes"], **{tier: split[f"{tier}_bytes"] for tier in TIERS}}


def measure(
    spec: ModelSpec,
    context: int,
    backend: Backend,
    most: int,
    seconds: float | None,
    rates: dict[str, float],
    options: dict[str, Any],
) -> Row:
    """Writes `most` tokens after `context` others, or until `seconds` have passed; returns what was read, and in what time.

    rates: ceilings that are known. The disk's is measured here, in the directory of the tier, if there is one.
    """
    layers, rng, convert = spec.attention_layers, np.random.default_rng(0), backend.array
    shapes = {layer: (1, layer.num_q_heads, layer.head_dim) for layer in layers}
    queries = {layer: convert(rng.standard_normal(shape, np.float32)) for layer, shape in shapes.items()}
    rows = {layer: rows_of(layer, 1, rng, convert) for layer in layers}
    token_bytes = spec.bytes_per_token(options["k_dtype"], options["v_dtype"])
    # At most half of the device tier, or steps would wait for their own pages to leave.
    chunk = options["device_memory"] // (2 * token_bytes)
    # Forget the peak of measuring ceilings and of other contexts.
    machine.forget_peak()
    with Cache(spec, **options) as cache:
        sequence = cache.create()

        def write() -> tuple[dict[str, int], float]:
            with cache.step([sequence], [1]) as step:
                for index, layer in enumerate(layers):
                    backend.read_weights(index)
                    step.forward(index, queries[layer], *rows[layer])
            backend.finish()
            return backend.moved(step.report, len(sequence) * token_bytes), step.report.waited

        start = time.perf_counter()
        fill(cache, sequence, context, min(CHUNK, chunk), convert)
        filled = time.perf_counter() - start
        # Once without timing: kernels are compiled, and moves of pages that had to make room end.
        write()
        cache._spill.settle()
        peak = machine.peak_resident()
        disk = options["disk"]
        drive = [] if disk is None else [disk_ceiling(disk, DISK_SECONDS)]
        machine.forget_peak()
        moved, waited = Counter[str](), list[float]()
        before, start = machine.resident(), time.perf_counter()
        while len(waited) < most and (not waited or seconds is None or time.perf_counter() < start + seconds):
            links, wait = write()
            moved.update(links)
            waited.append(wait)
        took, grown = time.perf_counter() - start, machine.resident() - before
        peak = max(peak, machine.peak_resident())
        if disk is not None:
            drive.append(disk_ceiling(disk, DISK_SECONDS))
        stats = cache.stats()
    tokens = len(waited)
    return {
        "context": context,
        "tokens": tokens,
        "seconds": took,
        "fill_seconds": filled,
        "tokens_per_second": tokens / took,
        "waited_seconds_per_token": sum(waited) / tokens,
        "bytes_per_token": {link: size / tokens for link, size in moved.items()},
        "ceilings": rates | ({"disk": sum(drive) / len(drive)} if drive else {}),
        "tier_bytes": {tier: stats.used_bytes(tier) for tier in TIERS},
        "peak_resident_bytes": peak,
        "grown_bytes": grown,
    }


def against(row: Row) -> Row:
    """The roofline (tokens a second if every link ran at its ceiling, all at once), and how much of it was achieved."""
    slowest = max(size / row["ceilings"][link] for link, size in row["bytes_per_token"].items() if size)
    return {
        "roofline_tokens_per_second": 1 / slowest,
        "achieved": row["tokens_per_second"] * slowest,
    }


def draw(document: Row, console: Console) -> None:
    """Prints the document for people."""
    links = document["longcontext"][0]["ceilings"]
    weights = f"{document['weights_bytes'] / 1e9:.2f} GB of weights a token"
    on = f"{document['device']}, {document['threads']} threads"
    console.print(f"{document['model']}, {document['format']}, {weights}, {on}")
    table = Table("context", "tok/s", "roofline", "achieved", caption=ABOUT if document["model"] == HYBRID else None)
    for link in links:
        table.add_column(f"{link} a token", justify="right")
    tiers = ", ".join(TIERS)
    for column in ("waited", f"planned: ring, {tiers}", f"on {tiers}", "peak RSS", "grown", "filled in"):
        table.add_column(column, justify="right")
    for row in document["longcontext"]:
        sizes = {link: row["bytes_per_token"][link] / 1e9 for link in links}
        table.add_row(
            format_tokens(row["context"]),
            f"{row['tokens_per_second']:.2f}",
            f"{row['roofline_tokens_per_second']:.2f}",
            f"{row['achieved']:.0%}",
            *(
                f"{size:.2f} GB, {size * row['tokens_per_second']:.1f} of {row['ceilings'][link] / 1e9:.1f} GB/s"
                for link, size in sizes.items()
            ),
            f"{row['waited_seconds_per_token']:.3f} s",
            *(", ".join(map(format_size, row[key].values())) for key in ("planned_bytes", "tier_bytes")),
            format_size(row["peak_resident_bytes"]),
            format_size(row["grown_bytes"]),
            f"{row['fill_seconds']:.1f} s",
        )
    console.print(table)
