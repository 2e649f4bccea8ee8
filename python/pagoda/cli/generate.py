"""`pagoda generate`: a language model reads a text and writes on, its K and V in pages over several tiers."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagoda import device as devices
from pagoda.cache import Cache
from pagoda.errors import InvalidArgument
from pagoda.lm import ContiguousCache, LanguageModel, Read, Sampler, generate
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.retention import SinkWindow
from pagoda.sizes import format_size, parse_tokens

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

REFRESH_SECONDS = 0.1


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("generate", help="read a text with a language model and write on")
    parser.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, help="a checkpoint folder; the shipped model by default"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, help="a file to read; the shipped text by default")
    source.add_argument("--prompt", help="text to read")
    parser.add_argument("--read", help="read so many tokens of the text at most; k is 1024")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write")
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda or cuda:1, of the cache and the model; auto is what it is for a cache",
    )
    parser.add_argument("--device-memory", default="2GiB", help="budget of the device tier")
    parser.add_argument("--host-memory", default="8GiB", help="budget of the host tier")
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page")
    parser.add_argument("--cache-type-k", default="f16", help="row format of K")
    parser.add_argument("--cache-type-v", default="f16", help="row format of V")
    parser.add_argument("--no-kv-cache-paged", action="store_true", help="keep K and V in plain arrays, for comparison")
    parser.add_argument("--window-size", help="keep so many tokens and the first ones: memory stops growing; k is 1024")
    parser.add_argument("--sink-tokens", help="how many of the first tokens are kept with --window-size; 64 by default")
    parser.add_argument(
        "--sink-positions",
        choices=["original", "cache"],
        help="where the first tokens are seen: where they were (default), or right before the window",
    )
    parser.add_argument("--chunk", type=int, default=512, help="tokens a step reads")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU workers; all cores by default")
    parser.add_argument("--deterministic", action="store_true", help="the same bits wherever pages lie")
    parser.add_argument("--json", action="store_true", help="print JSON at the end, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reads and writes."""
    if arguments.tokens < 0:
        raise InvalidArgument(f"--tokens = {arguments.tokens}: at least 0")
    device = _device(arguments)
    model = LanguageModel.load(arguments.model, device)
    prompt = model.tokenizer.encode(_text(arguments))
    if arguments.read is not None:
        prompt = prompt[: parse_tokens(arguments.read, "--read")]
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    cache = _cache(arguments, model, device)
    view = View(cache if isinstance(cache, Cache) else None, device, len(prompt), quiet=arguments.json)
    with view:
        for event in generate(model, cache, cache.create(), prompt, arguments.tokens, sampler, chunk=arguments.chunk):
            view.show(event)
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
    """Of the model and the cache."""
    plain, device = arguments.no_kv_cache_paged, str(arguments.device)
    if device == "auto":
        return "cpu" if plain else devices.AUTO
    if plain and device != "cpu":
        raise InvalidArgument(f"--device = {device!r}: cpu, with --no-kv-cache-paged, whose arrays are NumPy's")
    return device


def _retention(arguments: argparse.Namespace) -> SinkWindow | None:
    window, sinks, positions = arguments.window_size, arguments.sink_tokens, arguments.sink_positions
    for option, value in (("--window-size", window), ("--sink-tokens", sinks), ("--sink-positions", positions)):
        if value is not None and arguments.no_kv_cache_paged:
            raise InvalidArgument(f"{option} = {value!r}: not with --no-kv-cache-paged, whose arrays keep every token")
        if value is not None and window is None:
            raise InvalidArgument(f"{option} = {value!r}: only with --window-size")
    if window is None:
        return None
    kept = SinkWindow.sinks if sinks is None else parse_tokens(sinks, "--sink-tokens")
    return SinkWindow(kept, parse_tokens(window, "--window-size"), positions or "original")


def _cache(arguments: argparse.Namespace, model: LanguageModel, device: str) -> Any:
    types = {"k_dtype": arguments.cache_type_k, "v_dtype": arguments.cache_type_v}
    retention = _retention(arguments)
    if arguments.no_kv_cache_paged:
        return ContiguousCache(model.spec, **types)
    return Cache(
        model.spec,
        page_size=arguments.page_size,
        device=device,
        device_memory=arguments.device_memory,
        host_memory=arguments.host_memory,
        threads=arguments.threads,
        deterministic=arguments.deterministic,
        retention=retention,
        **types,
    )


@dataclass
class View:
    """What is seen of a run: a live picture on a terminal, lines elsewhere, a report for machines."""

    cache: Cache | None
    device: str
    prompt_tokens: int
    quiet: bool
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    _digest: Any = field(default_factory=hashlib.sha256)
    _start: float = 0.0
    _read_seconds: float = 0.0
    _write_seconds: float = 0.0
    _drawn: float = 0.0
    _live: Live | None = None

    def __enter__(self) -> View:
        self._start = time.perf_counter()
        console = Console()
        if console.is_terminal and not self.quiet:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.__exit__(*error)
        elif not self.quiet:
            print()
            if error[0] is None:
                print(self._summary())

    def show(self, event: Any) -> None:
        """Takes note of an event, and draws now and then."""
        now = time.perf_counter()
        if isinstance(event, Read):
            self.read = event.tokens
            self._read_seconds = now - self._start
        else:
            self.tokens.append(event.token)
            self.text += event.text
            self._digest.update(np.ascontiguousarray(event.logits).tobytes())
            self._write_seconds = now - self._start - self._read_seconds
        due = now - self._drawn > (REFRESH_SECONDS if self._live else 2.0)
        if self._live is not None and due:
            self._drawn = now
            self._live.update(self._picture(), refresh=True)
        elif self._live is None and not self.quiet:
            self._print(event, due, now)

    def _print(self, event: Any, due: bool, now: float) -> None:
        if not isinstance(event, Read):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif due or event.tokens == event.total:
            self._drawn = now
            print(self._summary(), flush=True)

    def report(self) -> dict[str, Any]:
        """The run in numbers. Seconds and bytes; logits as the digest of all that tokens were chosen by."""
        report: dict[str, Any] = {
            "device": self.device,
            "prompt_tokens": self.prompt_tokens,
            "read_tokens": self.read,
            "read_seconds": round(self._read_seconds, 3),
            "tokens": self.tokens,
            "text": self.text,
            "write_seconds": round(self._write_seconds, 3),
            "logits_sha256": self._digest.hexdigest(),
        }
        if self.cache is not None:
            stats = self.cache.stats()
            report["pages"] = {tier: self._pages(stats, tier) for tier in ("device", "host")}
            report["bytes"] = {tier: stats.used_bytes(tier) for tier in ("device", "host")}
            report["moved_bytes"] = {f"{source} to {target}": n for (source, target), n in stats.moved_bytes.items()}
        return report

    @staticmethod
    def _pages(stats: Any, tier: str) -> int:
        return sum(counts.used for counts in getattr(stats, tier))

    def _rates(self) -> tuple[str, str]:
        def rate(tokens: int, seconds: float) -> str:
            return f"{tokens / seconds:,.0f} tok/s" if seconds > 0 else "-"

        return rate(self.read, self._read_seconds), rate(len(self.tokens), self._write_seconds)

    def _summary(self) -> str:
        read, written = self._rates()
        line = f"read {self.read:,} of {self.prompt_tokens:,} tokens, {read}"
        if self.tokens:
            line += f"; wrote {len(self.tokens):,}, {written}"
        if self.cache is not None:
            stats = self.cache.stats()
            pages = [f"{self._pages(stats, tier):,} on {tier}" for tier in ("device", "host")]
            moved = sum(stats.moved_bytes.values())
            line += f"; pages {', '.join(pages)}; {format_size(moved)} moved"
        return line

    def _picture(self) -> Group:
        read, written = self._rates()
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.prompt_tokens), completed=self.read, width=40)
        table.add_row("read", bar, f"{self.read:,} of {self.prompt_tokens:,} tokens", read)
        table.add_row("written", "", f"{len(self.tokens):,} tokens", written)
        if self.cache is not None:
            stats = self.cache.stats()
            for tier in ("device", "host"):
                used = stats.used_bytes(tier)
                free = min(
                    size * counts.free for size, counts in zip(stats.block_bytes, getattr(stats, tier), strict=True)
                )
                bar = ProgressBar(total=max(1, used + free), completed=used, width=40)
                share = used / max(1, stats.used_bytes("device") + stats.used_bytes("host"))
                table.add_row(tier, bar, f"{self._pages(stats, tier):,} pages, {format_size(used)}", f"{share:.0%}")
            for (source, target), moved in stats.moved_bytes.items():
                table.add_row("moved", f"{source} to {target}", format_size(moved), "")
        return Group(table, Text("…" + self.text[-1200:] if len(self.text) > 1200 else self.text))
