"""`pagoda bench depth`: the speed of writing tokens by context depth and row format."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagoda._core import TOKENS_MAX, cores
from pagoda.cache import Cache, Sequence
from pagoda.checks import check_threads
from pagoda.cli.console import kept, results
from pagoda.cli.options import Commands, add_retention, format_pair, load_spec, retention
from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS
from pagoda.lm import LanguageModel
from pagoda.measuring import machine
from pagoda.measuring.filling import CHUNK, fill, rows_of
from pagoda.models import SHIPPED_MODEL
from pagoda.planner import Planner
from pagoda.sizes import format_size, parse_size, parse_tokens
from pagoda.spec import AttentionLayer, ModelSpec

Row = dict[str, Any]

SHIPPED = "shipped"
"""The shipped model, whose whole forward pass is run; of other models only attention is."""
RUNS = 3


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("depth", help="tokens a second by context depth and row format")
    parser.add_argument(
        "--models",
        default=f"{SHIPPED},llama-3.1-8b",
        help="the shipped model, or presets and configs whose attention is run; %(default)s by default",
    )
    parser.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help="row formats, or pairs K/V of them, comma-separated; %(default)s by default",
    )
    parser.add_argument(
        "--depths", default="2k,32k,128k", help="tokens before the timed ones; k is 1024; %(default)s by default"
    )
    parser.add_argument("--tokens", type=int, default=16, help=f"tokens to time, {RUNS} times; %(default)s by default")
    parser.add_argument(
        "--memory",
        default="1GiB",
        help="budget for K and V of presets: as many layers are run as fit, and the others are counted at their speed; "
        "should be more than the CPU's caches hold; %(default)s by default",
    )
    add_retention(parser)
    parser.add_argument("--threads", type=int, help="CPU workers; one for each available core by default")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    formats = {name: format_pair(name) for name in arguments.formats.split(",")}
    depths = list(dict.fromkeys(parse_tokens(part, "--depths") for part in arguments.depths.split(",")))
    memory, tokens = parse_size(arguments.memory, "--memory"), arguments.tokens
    if tokens < 1 or not all(0 < depth <= TOKENS_MAX - tokens for depth in depths):
        limit = f"numbers of tokens above 0, together at most {TOKENS_MAX}"
        raise InvalidArgument(f"--tokens = {tokens}, --depths = {arguments.depths!r}: {limit}")
    threads = cores() if arguments.threads is None else arguments.threads
    check_threads("--threads", threads)
    keep = retention(arguments)
    # Look everything up, and check that there is room, before measuring anything.
    specs = {name: load_spec(str(SHIPPED_MODEL) if name == SHIPPED else name) for name in arguments.models.split(",")}
    ram, _ = machine.ram()
    cases: list[tuple[str, str, int, ModelSpec, dict[str, Any]]] = []
    for (model, spec), (name, dtypes), depth in itertools.product(specs.items(), formats.items(), depths):
        options = {"k_dtype": dtypes[0], "v_dtype": dtypes[1], "threads": threads, "retention": keep}
        held = depth if keep is None else min(depth, keep.sinks + keep.window)
        part = spec if model == SHIPPED else run_layers(spec, held, memory, *dtypes)
        planner = Planner(part, dtypes[0], dtypes[1], retention=keep)
        size = planner.footprint(depth + tokens).paged_bytes
        if size > ram:
            raise InvalidArgument(
                f"--depths: {depth:,} tokens of {model} have {format_size(size)}; {format_size(ram)} of RAM are free"
            )
        # Make each cache once, so that arguments are refused now and not in the middle of measurements.
        cache_for(part, depth, tokens, options).close()
        cases.append((model, name, depth, part, options))
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for model, name, depth, part, options in cases:
            status.update(escape(f"{model}, {name}, {depth:,} tokens"))
            if model == SHIPPED:
                seconds = language_model(depth, tokens, options)
            else:
                seconds = attention(specs[model], part, depth, tokens, options)
            speeds = [tokens / taken for taken in seconds]
            rows.append(
                {
                    "model": model,
                    "format": name,
                    "depth": depth,
                    "retention": kept(keep),
                    "tokens": tokens,
                    "tokens_per_second": statistics.mean(speeds),
                    "deviation": statistics.stdev(speeds),
                }
            )
    if arguments.json:
        print(json.dumps({"build": machine.build(), "threads": threads, "depth": rows}, indent=2))
        return 0
    for model in specs:
        results().print(table(model, [row for row in rows if row["model"] == model]))
    return 0


def table(model: str, rows: list[Row]) -> Table:
    """Tokens a second of one model: a row for each format, a column for each depth, as llama-bench names them."""
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    what = "" if model == SHIPPED else ", attention alone"
    tests = [f"tg{rows[0]['tokens']} @ d{depth}" for depth in depths]
    if rows[0]["retention"] != kept(None):
        what += f", kept: {rows[0]['retention']}"
    result = Table("format", *tests, title=escape(f"{model}{what}: tokens a second"))
    for name in dict.fromkeys(row["format"] for row in rows):
        result.add_row(name, *(cell(row) for row in rows if row["format"] == name))
    return result


def cell(row: Row) -> str:
    """The speed with at least three digits, down to a token in ten seconds."""
    digits = 1 if row["tokens_per_second"] >= 10 else 2 if row["tokens_per_second"] >= 1 else 3
    return f"{row['tokens_per_second']:,.{digits}f} ± {row['deviation']:,.{digits}f}"


def language_model(depth: int, tokens: int, options: dict[str, Any]) -> list[float]:
    """Seconds in which the shipped model writes `tokens` tokens, for each run."""
    model = LanguageModel.load(SHIPPED_MODEL)

    def write(cache: Cache, sequence: Sequence) -> float:
        start, token = time.perf_counter(), 0
        for _ in range(tokens):
            with cache.step([sequence], [1]) as step:
                token = int(model.forward(np.array([token]), step)[0].argmax())
        return time.perf_counter() - start

    return timed(model.spec, depth, tokens, options, write)


def kinds_of(spec: ModelSpec) -> Counter[AttentionLayer]:
    """The kinds of attention layers of a model, each as if it stored its own K and V, and the number of layers of each."""
    return Counter(replace(layer, kv_owner=None) for layer in spec.attention_layers)


def run_layers(spec: ModelSpec, depth: int, memory: int, k_dtype: str, v_dtype: str) -> ModelSpec:
    """The layers to run: of each kind as many as fit an equal share of `memory` with `depth` kept tokens, at least one and at
    most those of the model."""
    kinds = kinds_of(spec)

    def room(kind: AttentionLayer) -> int:
        planner = Planner(ModelSpec([kind]), k_dtype, v_dtype)
        return max(1, memory // len(kinds) // planner.footprint(depth).paged_bytes)

    return ModelSpec([kind for kind, count in kinds.items() for _ in range(min(count, room(kind)))])


def attention(spec: ModelSpec, part: ModelSpec, depth: int, tokens: int, options: dict[str, Any]) -> list[float]:
    """Seconds in which all attention layers of a model append and attend for `tokens` tokens, for each run.

    part: the layers that are run (`run_layers`); the others are assumed to be as fast as these.
    """
    kinds, layers = kinds_of(spec), part.attention_layers
    counts = Counter(layers)
    rng = np.random.default_rng(0)
    queries = {kind: rng.standard_normal((1, kind.num_q_heads, kind.head_dim), np.float32) for kind in kinds}
    given = {kind: rows_of(kind, 1, rng) for kind in kinds}
    sinks = {kind: np.zeros(kind.num_q_heads, np.float32) if kind.sinks else None for kind in kinds}

    def write(cache: Cache, sequence: Sequence) -> float:
        start, of_layers, of_all = time.perf_counter(), 0.0, 0.0
        for _ in range(tokens):
            with cache.step([sequence], [1]) as step:
                for index, kind in enumerate(layers):
                    before = time.perf_counter()
                    step.forward(index, queries[kind], *given[kind], sink_logits=sinks[kind])
                    took = time.perf_counter() - before
                    of_layers += took
                    of_all += took * kinds[kind] / counts[kind]
        return time.perf_counter() - start - of_layers + of_all

    return timed(part, depth, tokens, options, write)


def cache_for(spec: ModelSpec, depth: int, tokens: int, options: dict[str, Any]) -> Cache:
    """A cache with room for a sequence of `depth` tokens and branches of it that write `tokens` more."""
    planner = Planner(spec, options["k_dtype"], options["v_dtype"], retention=options.get("retention"))
    # Generous, as CPU memory is allocated as it is used: steps hold more than windows, and branches have open pages.
    budget = 2 * planner.footprint(depth + tokens).paged_bytes + 2 * CHUNK * planner.bytes_per_token + (256 << 20)
    norms = [np.ones(layer.head_dim, np.float32) if layer.k_eq_v else None for layer in spec.attention_layers]
    return Cache(spec, device="cpu", device_memory=budget, host_memory=0, k_norms=norms, **options)


def timed(
    spec: ModelSpec, depth: int, tokens: int, options: dict[str, Any], write: Callable[[Cache, Sequence], float]
) -> list[float]:
    """The results of `write` for branches of a sequence of `depth` random tokens, without that of the first."""
    with cache_for(spec, depth, tokens, options) as cache:
        sequence = cache.create()
        fill(cache, sequence, depth)
        results = []
        for _ in range(RUNS + 1):
            with sequence.fork() as branch:
                results.append(write(cache, branch))
        return results[1:]
