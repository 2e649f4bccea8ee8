"""`pagoda plan`: how much memory a model's context takes, and what fits."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pagoda._core import TOKENS_MAX
from pagoda.checks import check_page_size
from pagoda.cli.console import results
from pagoda.cli.options import Commands, add_cache_types, load_spec
from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS, check_not_forced
from pagoda.geometry import tier_memory
from pagoda.kernels.instances import check_formats
from pagoda.planner import Planner
from pagoda.sizes import format_size, format_tokens, parse_size, parse_tokens
from pagoda.stats import TIERS

CARDS = ("8GiB", "12GiB", "16GiB", "24GiB")
"""Budgets shown when none is given: the memory of common cards."""

BAR_WIDTH = 40


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("plan", help="memory by context, tier and format")
    parser.add_argument("model", help="a preset such as llama-3.1-8b, or the path of a config.json or its folder")
    parser.add_argument(
        "--context",
        default="32k,200k,1m",
        help="tokens, comma-separated; k is 1024, m 1024 * 1024; %(default)s by default",
    )
    add_cache_types(parser)
    parser.add_argument("--store-k", action="store_true", help="store K even where it can be derived from V")
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page; %(default)s by default")
    parser.add_argument("--batch", type=int, default=1, help="sequences of that length; %(default)s by default")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the cache is; %(default)s by default"
    )
    parser.add_argument(
        "--device-memory", help="budget of the device tier for KV, like 12GiB; by default those of common cards"
    )
    parser.add_argument("--host-memory", default="0", help="budget of the host tier; %(default)s by default")
    parser.add_argument("--disk-memory", default="0", help="budget of the disk tier; %(default)s by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan."""
    check_not_forced()
    spec = load_spec(arguments.model)
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        check_formats(arguments.cache_type_k, arguments.cache_type_v)
    if arguments.store_k:
        spec = spec.storing_k()
    check_page_size("--page-size", arguments.page_size)
    planner = Planner(spec, arguments.cache_type_k, arguments.cache_type_v, arguments.page_size)
    contexts = [parse_tokens(part, "--context") for part in arguments.context.split(",")]
    if not all(0 < context <= TOKENS_MAX for context in contexts):
        raise InvalidArgument(f"--context = {arguments.context!r}: numbers of tokens from 1 to {TOKENS_MAX}")
    budgets = {
        name: parse_size(size, f"--{name}-memory")
        for name in TIERS
        if (size := getattr(arguments, f"{name}_memory")) is not None
    }
    check_budgets(planner, budgets)
    document = describe(planner, contexts, arguments.batch, budgets, on_gpu=on_gpu)
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        draw(document, results())
    return 0


def check_budgets(planner: Planner, budgets: dict[str, int]) -> None:
    """Raises InvalidArgument, naming the option, for a budget that a cache would refuse."""
    sizes = planner.block_bytes()
    for name in ("device", "host"):
        if name in budgets and sizes:
            tier_memory(f"--{name}-memory", budgets[name], sizes, needed=name == "device")
    try:
        planner.room_on_disk(budgets["disk"])
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("disk_memory", "--disk-memory", 1)) from error


def describe(
    planner: Planner, contexts: list[int], batch: int, budgets: dict[str, int], *, on_gpu: bool = False
) -> dict[str, Any]:
    """Everything that is printed, as a JSON document. Sizes are in bytes. Without a budget for the device, plans for common
    devices.

    On a GPU the ring takes a part of device memory from pages; without a ring no pages can be on disk.
    """
    spec, formats = planner.spec, (planner.k_dtype, planner.v_dtype)
    devices = (
        {format_size(budgets["device"]): budgets["device"]}
        if "device" in budgets
        else {card: parse_size(card, "card") for card in CARDS}
    )
    tiers = {"host": budgets["host"] > 0, "disk": budgets["disk"] > 0}
    rings = {name: planner.rings(size, **tiers, on_gpu=on_gpu) for name, size in devices.items()}
    on_host, on_disk = planner.room(budgets["host"]), planner.room_on_disk(budgets["disk"])
    budgets_of = {}
    for name, size in devices.items():
        left = size - rings[name].device_bytes
        state = min(left, spec.state_bytes() * batch)
        on_device = state + planner.room(left - state)
        budgets_of[name] = (on_device, on_host, on_disk if rings[name].reaches_disk else 0)
    by_format = {}
    for name in FORMATS:
        # The rows of some models are no multiple of a format's unit.
        with contextlib.suppress(InvalidArgument):
            by_format[name] = Planner(spec, name, name, planner.page_size)
    rows = []
    for context in contexts:
        footprint = planner.footprint(context, batch)
        splits = {name: planner.split(footprint, *sizes) for name, sizes in budgets_of.items()}
        rows.append(
            {
                "tokens": context,
                "paged_bytes": footprint.paged_bytes,
                "state_bytes": footprint.state_bytes,
                "total_bytes": footprint.total_bytes,
                "by_format": {name: other.footprint(context, batch).paged_bytes for name, other in by_format.items()},
                "budgets": {name: asdict(split) for name, split in splits.items()},
            }
        )
    return {
        "model": spec.name,
        "k_dtype": planner.k_dtype,
        "v_dtype": planner.v_dtype,
        "page_size": planner.page_size,
        "batch": batch,
        "layers": {
            "full": sum(layer.window is None and layer.kv_owner is None for layer in spec.attention_layers),
            "windowed": sum(layer.window is not None and layer.kv_owner is None for layer in spec.attention_layers),
            "sharing": sum(layer.kv_owner is not None for layer in spec.attention_layers),
            "recurrent": len(spec.layers) - len(spec.attention_layers),
        },
        "k_derived": sum(layer.k_eq_v and layer.kv_owner is None for layer in spec.attention_layers),
        "bytes_per_token": spec.bytes_per_token(*formats),
        "full_bytes_per_token": spec.full_bytes_per_token(*formats),
        "window_bytes": spec.window_bytes(*formats),
        "state_bytes": spec.state_bytes(),
        "rings": {name: asdict(ring) for name, ring in rings.items()},
        "longest_context": {name: planner.longest_context(*sizes, batch=batch) for name, sizes in budgets_of.items()},
        "contexts": rows,
    }


def draw(document: dict[str, Any], console: Console) -> None:
    """Prints the document for people."""
    layers = ", ".join(f"{count} {kind}" for kind, count in document["layers"].items() if count)
    formats = f"K {document['k_dtype']}, V {document['v_dtype']}, pages of {document['page_size']} tokens"
    console.print(f"[bold]{document['model']}[/]: {layers} layers; {formats}")
    full = document["full_bytes_per_token"]
    console.print(f"{document['bytes_per_token']:,} bytes a token, {full:,} of them in layers without a window")
    if document["k_derived"]:
        derived = f"{document['k_derived']} layers store V alone and derive K from it"
        console.print(f"{derived}; with --store-k they store both.")
    if document["state_bytes"]:
        console.print(f"{format_size(document['state_bytes'])} of recurrent state a sequence")
    if document["layers"]["windowed"]:
        console.print(
            f"Windowed layers need {format_size(document['window_bytes'])} a sequence for their windows, and less than three "
            "pages a layer more; their older pages are freed."
        )
    for part, what in (
        ("disk_bytes", "Pages on disk come to attention through memory beside the budgets"),
        ("stage_bytes", "Pages move between disk and device through memory beside the budgets"),
        (
            "device_bytes",
            "Pages of other tiers come to attention through a part of the device's memory, which holds none",
        ),
    ):
        sizes = {name: format_size(rings[part]) for name, rings in document["rings"].items() if rings[part]}
        alike = len(set(sizes.values())) == 1
        parts = set(sizes.values()) if alike else (f"{size} with {name}" for name, size in sizes.items())
        if sizes:
            console.print(f"{what}: {', '.join(parts)}.")
    if lacking := [name for name, rings in document["rings"].items() if not rings["reaches_disk"]]:
        console.print(f"No page goes to disk with {', '.join(lacking)}: too few for what it would come back through.")
    devices = document["longest_context"]
    table = Table("context", "memory", *(f"in {name}" for name in devices))
    for row in document["contexts"]:
        table.add_row(
            format_tokens(row["tokens"]),
            format_size(row["total_bytes"]),
            *map(_place, row["budgets"].values()),
        )
    table.add_section()
    table.add_row("longest", "", *(f"{tokens:,}" for tokens in devices.values()))
    console.print(table)
    table = Table("K and V both in", *(format_tokens(row["tokens"]) for row in document["contexts"]))
    for name in document["contexts"][0]["by_format"]:
        table.add_row(name, *(format_size(row["by_format"][name]) for row in document["contexts"]))
    console.print(table)
    most = max(row["total_bytes"] for row in document["contexts"])
    for row in document["contexts"]:
        bar = "█" * max(1, round(BAR_WIDTH * row["total_bytes"] / max(most, 1)))
        console.print(f"{format_tokens(row['tokens']):>8} [cyan]{bar}[/] {format_size(row['total_bytes'])}")


def _place(split: dict[str, int]) -> str:
    if split["lacking_bytes"]:
        return f"[red]lacks {format_size(split['lacking_bytes'])}[/]"
    below = [f"{format_size(split[f'{tier}_bytes'])} on {tier}" for tier in ("host", "disk") if split[f"{tier}_bytes"]]
    return f"{format_size(split['device_bytes'])} + {' + '.join(below)}" if below else "[green]fits[/]"
