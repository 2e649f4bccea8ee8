"""`pagoda bench quality`: the effect of row formats and retention on attention and on the shipped language model."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagoda.cache import Cache
from pagoda.cli.console import kept, results
from pagoda.cli.options import Commands, format_pair
from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS
from pagoda.measuring import machine
from pagoda.quality import plot
from pagoda.quality.heads import DISTANCES, OUTLIERS, Head, recall_head
from pagoda.quality.language import TOKENS, ShippedText
from pagoda.quality.measure import TOKEN_BYTES, CacheOf, Recall, streaming
from pagoda.retention import SinkWindow
from pagoda.sizes import format_size, format_tokens, parse_tokens
from pagoda.spec import ModelSpec

Row = dict[str, Any]

STREAM_CONTEXTS = (8192, 32768, 131072)
WINDOW = 1024
RETENTION: dict[str, dict[str, Any]] = {
    "all": {},
    f"last {WINDOW:,}": {"window": WINDOW},
    f"4 + last {WINDOW:,}": {"keep": SinkWindow(4, WINDOW)},
}
"""What the head with a sink keeps, as arguments of `streaming`. A layer's own window has no sinks."""
KEPT = (SinkWindow(0, WINDOW), SinkWindow(4, WINDOW), SinkWindow(64, 4 * WINDOW))
"""What the language model keeps, if not everything."""
RETAINED = ("q8_0", "q4_0")
"""Formats in which retention is measured besides float32, if they are among those asked for."""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("quality", help="what formats and retention cost in recall and predictions")
    parser.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help="row formats, or pairs K/V of them, comma-separated; %(default)s by default",
    )
    parser.add_argument("--plain", action="store_true", help="neither centre nor rotate rows before quantising")
    parser.add_argument(
        "--contexts",
        default="4k,32k,128k",
        help="tokens of the recall heads, at least 2k; k is 1024; %(default)s by default",
    )
    parser.add_argument("--plot", type=Path, help="draw into this file, in the format of its suffix; needs matplotlib")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    caches = {name: cache_of(name, plain=arguments.plain) for name in arguments.formats.split(",")}
    contexts = list(dict.fromkeys(parse_tokens(part, "--contexts") for part in arguments.contexts.split(",")))
    heads = [recall_head(context, outliers) for context in contexts for outliers in OUTLIERS]
    wanted, (ram, _) = max(contexts) * TOKEN_BYTES, machine.ram()
    if wanted > ram:
        limit = f"{max(contexts):,} tokens take {format_size(wanted)}, and {format_size(ram)} of RAM are free"
        raise InvalidArgument(f"--contexts = {arguments.contexts!r}: {limit}")
    if arguments.plot is not None:
        plot.check_path(arguments.plot)
    with Console(stderr=True).status("") as status:
        report: Row = {"build": machine.build(), **measure(caches, heads, status.update)}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        draw(report, contexts, results())
    # Last, so that results are not lost if the plot cannot be written.
    if arguments.plot is not None:
        plot.draw(report, arguments.plot)
    return 0


def cache_of(name: str, *, plain: bool = False) -> CacheOf:
    """A function that makes caches of a format or a pair K/V. plain: neither centre nor rotate. Raises InvalidArgument."""
    k_dtype, v_dtype = format_pair(name)
    options: dict[str, Any] = {"center": None, "rotate": False} if plain else {}
    return lambda spec, keep: Cache(spec, k_dtype=k_dtype, v_dtype=v_dtype, retention=keep, **options)


def bits(name: str, spec: ModelSpec) -> float:
    """Bits that a model stores for an element of K or V, scales included."""
    return 32 * spec.bytes_per_token(*format_pair(name)) / spec.bytes_per_token("f32", "f32")


def measure(caches: dict[str, CacheOf], heads: list[Head], show: Callable[[str], object]) -> dict[str, list[Row]]:
    """Measures every head and the shipped text in every format, and retention over float32 and the formats of `RETAINED`."""
    reference = cache_of("f32")
    recalls, streams, texts = [], [], []
    for head in heads:
        test = Recall(head)
        for name, cache in caches.items():
            show(f"recall over {format_tokens(head.context)}, outliers {head.outliers}, {name}")
            place = {"format": name, "context": head.context, "outliers": head.outliers, "beta": head.beta}
            recalls.append({**place, **asdict(test.fidelity(cache))})
    retained = {"f32": reference} | {name: caches[name] for name in RETAINED if name in caches}
    for context, (policy, options), (name, cache) in itertools.product(
        STREAM_CONTEXTS, RETENTION.items(), retained.items()
    ):
        show(f"head with a sink over {format_tokens(context)}, kept: {policy}, {name}")
        place = {"format": name, "context": context, "retention": policy}
        streams.append({**place, **asdict(streaming(context, cache, **options))})
    show("shipped text, f32")
    text = ShippedText(reference)
    for name, cache, keep in [
        *((*item, None) for item in caches.items()),
        *((*item, keep) for keep in KEPT for item in retained.items()),
    ]:
        show(f"shipped text, {name}, kept: {kept(keep)}")
        place = {"format": name, "retention": kept(keep), "bits": bits(name, text.model.spec)}
        texts += [{**place, **asdict(row)} for row in text.divergence(cache, keep=keep)]
    return {"heads": recalls, "streaming": streams, "language": texts}


def draw(report: Row, contexts: list[int], console: Console) -> None:
    """Prints the report for people."""
    for context in contexts:
        console.print(heads_table([row for row in report["heads"] if row["context"] == context]))
    console.print(streaming_table(report["streaming"]))
    console.print(text_table(report["language"]))


def heads_table(rows: list[Row]) -> Table:
    """Recall with graded margins, of one context."""
    title = f"associative recall, {format_tokens(rows[0]['context'])}; the law's figures in brackets"
    table = Table("outliers", "format", title=title)
    columns = ("sigma", "KL, nats", "output error", "needle weight", "found")
    for column in (*columns, *(f"{distance} off" for distance in DISTANCES)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["outliers"],
            row["format"],
            f"{row['sigma']:.2g} ({row['sigma_law']:.2g})",
            f"{row['kl']:.1e}",
            f"{row['output_error']:.1e}",
            f"{row['needle_weight']:.3f} ({row['needle_weight_law']:.3f})",
            f"{row['found']:.3f}",
            *(f"{row['recall'][distance]:.2f} ({row['recall_law'][distance]:.2f})" for distance in DISTANCES),
        )
    return table


def streaming_table(rows: list[Row]) -> Table:
    """The head with a sink."""
    table = Table("context", "kept", "format", title="needles and a sink; the law's figure in brackets")
    for column in ("needles found, kept", "dropped", "answers invented", "weight off the sink"):
        table.add_column(column, justify="right")
    for row in rows:
        beyond = row["recall_beyond"]
        table.add_row(
            format_tokens(row["context"]),
            row["retention"],
            row["format"],
            f"{row['recall_within']:.3f}",
            "-" if beyond is None else f"{beyond:.3f}",
            f"{row['invented']:.3f}",
            f"{row['presence']:.2g} ({row['presence_law']:.2g})",
        )
    return table


def text_table(rows: list[Row]) -> Table:
    """The shipped language model."""
    table = Table("format", "bits", "kept", title=f"shipped model, {TOKENS:,} bytes token by token, against f32")
    for column in ("after", "bits a byte", "perplexity, %", "KLD, nats", "99.9 %", "same top, %"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["format"],
            f"{row['bits']:.2f}",
            row["retention"],
            format_tokens(row["start"]),
            f"{row['bits_per_byte']:.4f}",
            f"{100 * row['perplexity']:.2f}",
            f"{row['kld']:.1e}",
            f"{row['kld_999']:.1e}",
            f"{100 * row['same_top']:.2f}",
        )
    return table
