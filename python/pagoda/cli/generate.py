"""`pagoda generate`: a language model reads a text and writes on, its K and V in pages over several tiers."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagoda import device as devices
from pagoda.cache import Cache
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.lm import ContiguousCache, LanguageModel, Read, Sampler, generate
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.report import StepReport
from pagoda.retention import SinkWindow
from pagoda.sizes import format_size, parse_tokens
from pagoda.stats import Stats

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

REFRESH_SECONDS = 0.1

MARK_COUNT = 8
"""Bytes of the number of tokens, before the hash of what is kept."""


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
    parser.add_argument("--disk", type=Path, help="a directory for a disk tier, where pages go that memory cannot hold")
    parser.add_argument("--disk-memory", default="0", help="budget of the disk tier")
    parser.add_argument(
        "--session",
        metavar="KEY",
        help="keep the text, once it has been read, on disk under this name; a later run of the same model whose text begins "
        "with what is kept there reads only the rest. Wants a --disk-memory for all of it; quantised K is then not centred",
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page")
    parser.add_argument("--cache-type-k", default="f16", help="row format of K")
    parser.add_argument("--cache-type-v", default="f16", help="row format of V")
    parser.add_argument(
        "--no-kv-cache-paged",
        action="store_true",
        help="keep K and V in plain arrays, for comparison: what is said of pages, tiers and threads has no effect",
    )
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
    with cache if isinstance(cache, Cache) else contextlib.nullcontext():
        sequence = _sequence(arguments, cache, prompt)
        kept, rest = len(sequence), prompt[len(sequence) :]
        view = View(cache if isinstance(cache, Cache) else None, device, len(prompt), kept, quiet=arguments.json)
        with view:
            for event in generate(model, cache, sequence, rest, arguments.tokens, sampler, chunk=arguments.chunk):
                if isinstance(event, Read) and event.tokens == event.total and arguments.session is not None:
                    cache.save(sequence, arguments.session, meta=_mark(arguments.model, prompt))
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


def _sequence(arguments: argparse.Namespace, cache: Any, prompt: npt.NDArray[np.int64]) -> Any:
    """What is kept under --session if the text begins with it, but never the last token of the text; or nothing."""
    if arguments.session is None:
        return cache.create()
    mark = cache.saved().get(arguments.session, b"")
    kept = int.from_bytes(mark[:MARK_COUNT], "little")
    sequence = cache.load(arguments.session) if mark == _mark(arguments.model, prompt[:kept]) else None
    if sequence is None:
        return cache.create()
    # What the last token says of the next one is not kept.
    sequence.truncate(min(kept, len(prompt) - 1))
    return sequence


def _mark(folder: Path, tokens: npt.NDArray[np.int64]) -> bytes:
    """What a kept text is known by: how many tokens, and a hash of them and of the files of the model that has read them."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    model = [(path.name, stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return len(tokens).to_bytes(MARK_COUNT, "little") + hashlib.sha256(repr(model).encode() + tokens.tobytes()).digest()


def _cache(arguments: argparse.Namespace, model: LanguageModel, device: str) -> Any:
    types = {"k_dtype": arguments.cache_type_k, "v_dtype": arguments.cache_type_v}
    retention = _retention(arguments)
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
        retention=retention,
        **types,
    )


@dataclass
class View:
    """What is seen of a run: a live picture on a terminal, lines elsewhere, a report for machines."""

    cache: Cache | None
    device: str
    prompt_tokens: int
    kept: int
    """Tokens of the prompt that were there before."""
    quiet: bool
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    _digest: Any = field(default_factory=hashlib.sha256)
    _step: Any = None
    _last: StepReport | None = None
    """Of the last step, if it makes one."""
    _attended: Counter[str] = field(default_factory=Counter)
    """Bytes that attention has read, by link."""
    _waited: float = 0.0
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
        self._note(event.step)
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

    def _note(self, step: Any) -> None:
        if self.cache is None or step is self._step:
            return
        self._step = step
        with contextlib.suppress(BackendUnavailable):
            self._last = step.report
            self._attended.update(self._last.bytes)
            self._waited += self._last.waited

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
            "kept_tokens": self.kept,
            "read_tokens": self.read,
            "read_seconds": round(self._read_seconds, 3),
            "tokens": self.tokens,
            "text": self.text,
            "write_seconds": round(self._write_seconds, 3),
            "logits_sha256": self._digest.hexdigest(),
        }
        if self.cache is not None:
            stats = self.cache.stats()
            report["pages"] = {tier: self._pages(stats, tier) for tier in self._tiers(stats)}
            report["bytes"] = {tier: stats.used_bytes(tier) for tier in self._tiers(stats)}
            report["moved_bytes"] = {f"{source} to {target}": n for (source, target), n in stats.moved_bytes.items()}
        if self._last is not None:
            report["attended_bytes"] = dict(self._attended)
            report["waited_seconds"] = round(self._waited, 3)
        return report

    @staticmethod
    def _tiers(stats: Stats) -> list[str]:
        return ["device", "host", *(["disk"] if stats.disk else [])]

    @staticmethod
    def _pages(stats: Stats, tier: str) -> int:
        return sum(counts.used for counts in getattr(stats, tier))

    def _rates(self) -> tuple[str, str]:
        def rate(tokens: int, seconds: float) -> str:
            return f"{tokens / seconds:,.0f} tok/s" if seconds > 0 else "-"

        return rate(self.read, self._read_seconds), rate(len(self.tokens), self._write_seconds)

    def _summary(self) -> str:
        read, written = self._rates()
        line = f"read {self.read:,} of {self.prompt_tokens:,} tokens, {read}"
        if self.kept:
            line += f"; {self.kept:,} were kept"
        if self.tokens:
            line += f"; wrote {len(self.tokens):,}, {written}"
        if self.cache is not None:
            stats = self.cache.stats()
            pages = [f"{self._pages(stats, tier):,} on {tier}" for tier in self._tiers(stats)]
            moved = sum(stats.moved_bytes.values())
            line += f"; pages {', '.join(pages)}; {format_size(moved)} moved"
            if self._attended["disk"]:
                line += f"; {format_size(self._attended['disk'])} read from disk, {self._waited:.1f} s waited for it"
        return line

    def _picture(self) -> Group:
        read, written = self._rates()
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.prompt_tokens), completed=self.kept + self.read, width=40)
        table.add_row("read", bar, f"{self.kept + self.read:,} of {self.prompt_tokens:,} tokens", read)
        table.add_row("written", "", f"{len(self.tokens):,} tokens", written)
        if self.cache is not None:
            stats = self.cache.stats()
            for tier in self._tiers(stats):
                used = stats.used_bytes(tier)
                free = min(
                    size * counts.free for size, counts in zip(stats.block_bytes, getattr(stats, tier), strict=True)
                )
                bar = ProgressBar(total=max(1, used + free), completed=used, width=40)
                share = used / max(1, sum(map(stats.used_bytes, self._tiers(stats))))
                table.add_row(tier, bar, f"{self._pages(stats, tier):,} pages, {format_size(used)}", f"{share:.0%}")
            for (source, target), moved in stats.moved_bytes.items():
                if moved:
                    table.add_row("moved", f"{source} to {target}", format_size(moved), "")
        if self._last is not None:
            over = ", ".join(f"{format_size(size)} of {link}" for link, size in self._last.bytes.items() if size)
            table.add_row("last step", "read", over, f"waited {self._last.waited:.2f} s")
        return Group(table, Text("…" + self.text[-1200:] if len(self.text) > 1200 else self.text))
