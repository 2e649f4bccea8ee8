"""`pagoda generate`: a language model reads a text and continues it, with its K and V in pages on several tiers."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda import device as devices
from pagoda.cache import Cache
from pagoda.cli.options import Commands, add_cache_types, add_retention, directory, retention
from pagoda.cli.view import View
from pagoda.errors import InvalidArgument, OutOfBlocks
from pagoda.lm import ContiguousCache, LanguageModel, Read, Sampler, generate
from pagoda.lm.model import is_folder
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.retention import keeps_by_layer
from pagoda.sizes import format_size, parse_size, parse_tokens
from pagoda.stats import TIERS

MARK_COUNT = 8
"""Bytes of the number of tokens in `_mark`, before the hash."""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("generate", help="read a text with a language model and continue it")
    parser.add_argument(
        "--model", type=directory, default=SHIPPED_MODEL, help="a checkpoint folder; the shipped model by default"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, help="a file to read; the shipped text by default")
    source.add_argument("--prompt", help="text to read")
    parser.add_argument("--read", help="the most tokens to read of the text; k is 1024")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write; %(default)s by default")
    parser.add_argument(
        "--device",
        default="auto",
        help="where the cache and the model are: cpu, cuda or cuda:1; auto by default, the CPU for now",
    )
    parser.add_argument("--device-memory", default="2GiB", help="budget of the device tier; %(default)s by default")
    parser.add_argument("--host-memory", default="8GiB", help="budget of the host tier; %(default)s by default")
    parser.add_argument(
        "--disk",
        type=directory,
        help="a directory for a disk tier, for pages that memory cannot hold; needs --disk-memory",
    )
    parser.add_argument("--disk-memory", default="0", help="budget of the disk tier; %(default)s by default")
    parser.add_argument(
        "--session",
        metavar="KEY",
        help="save the text that was read to disk under this name; a later run of the same model whose text begins with it "
        "reads only the rest. Needs --disk-memory for all of it; quantised K is then not centred",
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page; %(default)s by default")
    add_cache_types(parser)
    parser.add_argument(
        "--no-kv-cache-paged",
        action="store_true",
        help="keep K and V in plain arrays, for comparison: options for pages, tiers and threads, and --deterministic, have "
        "no effect",
    )
    add_retention(parser)
    parser.add_argument("--chunk", type=int, default=512, help="tokens that a step reads; %(default)s by default")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 by default, the likeliest token")
    parser.add_argument("--top-k", type=int, help="sample from this many of the likeliest tokens; from all by default")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="and from the likeliest that together have this probability; %(default)s by default",
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling; %(default)s by default")
    parser.add_argument("--threads", type=int, help="CPU workers; one for each available core by default")
    parser.add_argument("--deterministic", action="store_true", help="the same bits wherever pages lie")
    parser.add_argument("--json", action="store_true", help="print JSON at the end and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reads the text and writes tokens."""
    if arguments.tokens < 0:
        raise InvalidArgument(f"--tokens = {arguments.tokens}: at least 0")
    device = _device(arguments)
    if not is_folder(arguments.model):
        raise InvalidArgument(f"--model = {str(arguments.model)!r}: a folder with config.json and model.safetensors")
    model = LanguageModel.load(arguments.model, device)
    prompt = model.tokenizer.encode(_text(arguments))
    if arguments.read is not None:
        prompt = prompt[: parse_tokens(arguments.read, "--read")]
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    cache = _cache(arguments, model, device)
    with cache if isinstance(cache, Cache) else contextlib.nullcontext():
        sequence = _sequence(arguments, cache, prompt)
        _check_room(arguments, cache, len(sequence), len(prompt))
        kept, rest = len(sequence), prompt[len(sequence) :]
        view = View(cache if isinstance(cache, Cache) else None, device, len(prompt), kept, quiet=arguments.json)
        with view:
            try:
                events = generate(model, cache, sequence, rest, arguments.tokens, sampler, chunk=arguments.chunk)
                for event in view.watch(events):
                    if isinstance(event, Read) and event.tokens == event.total and arguments.session is not None:
                        cache.save(sequence, arguments.session, meta=_mark(arguments.model, prompt))
            except OutOfBlocks as error:
                given = ", ".join(f"--{tier}-memory = {getattr(arguments, f'{tier}_memory')}" for tier in TIERS)
                limit = f"more, or fewer tokens a step by --chunk = {arguments.chunk}"
                raise InvalidArgument(f"{given}: {limit} ({error})") from error
        if arguments.json:
            print(json.dumps(view.report(), indent=2))
    return 0


def _text(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    path = arguments.text or SHIPPED_TEXT
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise InvalidArgument(f"--text = {str(path)!r}: a readable file ({error})") from error


def _device(arguments: argparse.Namespace) -> str:
    """The device of the model and the cache."""
    plain, device = arguments.no_kv_cache_paged, str(arguments.device)
    if device == "auto":
        return "cpu" if plain else devices.AUTO
    if plain and device != "cpu":
        raise InvalidArgument(f"--device = {device!r}: cpu, with --no-kv-cache-paged, whose arrays are NumPy's")
    return device


def _sequence(arguments: argparse.Namespace, cache: Any, prompt: npt.NDArray[np.int64]) -> Any:
    """The sequence kept under --session if the text begins with it, without the last token of the text; else an empty one."""
    if arguments.session is None:
        return cache.create()
    mark = cache.meta(arguments.session) or b""
    kept = int.from_bytes(mark[:MARK_COUNT], "little")
    sequence = cache.load(arguments.session) if mark == _mark(arguments.model, prompt[:kept]) else None
    if sequence is None:
        return cache.create()
    # Logits are not kept, so the last token is read again to predict the next one.
    sequence.truncate(min(kept, len(prompt) - 1))
    return sequence


def _check_room(arguments: argparse.Namespace, cache: Any, kept: int, tokens: int) -> None:
    """Raises InvalidArgument if the disk tier has no room to save a text, of which `kept` tokens are there already. Called
    before the text is read."""
    if arguments.session is None:
        return
    stats, keeps = cache.stats(), keeps_by_layer(cache.spec, cache.retention, cache.headroom)
    wanted, shares = 0, []
    for members, size, counts in zip(cache._groups, stats.block_bytes, stats.disk, strict=True):
        keep = keeps[members[0]]
        # A lower bound: a window may touch one page more, and kept pages may have left it.
        held = tokens if keep is None else min(tokens, keep.tokens)
        pages = max(0, -(-held // cache.page_size) - kept // cache.page_size)
        wanted += pages * size
        shares.append(pages / counts.free if counts.free else float(pages))
    used, budget = stats.used_bytes("disk"), parse_size(arguments.disk_memory, "--disk-memory")
    # Groups share the free extents; free blocks in extents that belong to a group come on top.
    if used + wanted > budget or max(shares) > 1 or (not used and sum(shares) > 1):
        limit = f"more than {format_size(used + wanted)}, to keep the text for --session beside what is kept"
        raise InvalidArgument(f"--disk-memory = {arguments.disk_memory!r}: {limit}")


def _mark(folder: Path, tokens: npt.NDArray[np.int64]) -> bytes:
    """Identifies a kept text: its number of tokens, and a hash of them and of the model's files (names, sizes, times)."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    model = [(path.name, stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return len(tokens).to_bytes(MARK_COUNT, "little") + hashlib.sha256(repr(model).encode() + tokens.tobytes()).digest()


def _cache(arguments: argparse.Namespace, model: LanguageModel, device: str) -> Any:
    types = {"k_dtype": arguments.cache_type_k, "v_dtype": arguments.cache_type_v}
    keep = retention(arguments)
    if keep is not None and arguments.no_kv_cache_paged:
        limit = "not with --no-kv-cache-paged, whose arrays keep every token"
        raise InvalidArgument(f"--window-size = {arguments.window_size!r}: {limit}")
    if arguments.session is not None and arguments.disk is None:
        raise InvalidArgument(f"--session = {arguments.session!r}: only with --disk")
    if arguments.session == "":
        raise InvalidArgument("--session = '': a name")
    if arguments.no_kv_cache_paged:
        if arguments.disk is not None:
            raise InvalidArgument(
                f"--disk = {str(arguments.disk)!r}: not with --no-kv-cache-paged, whose arrays are in memory"
            )
        return ContiguousCache(model.spec, **types)
    return Cache(
        model.spec,
        page_size=arguments.page_size,
        device=device,
        device_memory=arguments.device_memory,
        host_memory=arguments.host_memory,
        disk=arguments.disk,
        disk_memory=arguments.disk_memory,
        resume=arguments.session is not None,
        center="auto" if arguments.session is None else None,
        threads=arguments.threads,
        deterministic=arguments.deterministic,
        retention=keep,
        **types,
    )
