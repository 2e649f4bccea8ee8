"""The live view of a run of `pagoda generate`."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagoda.cache import Cache
from pagoda.errors import BackendUnavailable
from pagoda.lm import Read
from pagoda.report import StepReport
from pagoda.sizes import format_size
from pagoda.stats import Stats

REFRESH_SECONDS = 0.1


@dataclass
class View:
    """Live output on a terminal that can be drawn over, lines elsewhere, and a report for machines."""

    cache: Cache | None
    device: str
    prompt_tokens: int
    kept: int
    """Tokens of the prompt that were already in the cache."""
    quiet: bool
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    _digest: Any = field(default_factory=hashlib.sha256)
    _step: Any = None
    _last: StepReport | None = None
    """The report of the last step, if it has one."""
    _attended: Counter[str] = field(default_factory=Counter)
    """Bytes that attention has read, by link."""
    _waited: float = 0.0
    _read_seconds: float = 0.0
    _write_seconds: float = 0.0
    _drawn: float = 0.0
    _live: Live | None = None

    def __enter__(self) -> View:
        console = Console()
        # On other terminals (TERM=dumb) rich would print nothing before the end.
        if console.is_interactive and not self.quiet:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.__exit__(*error)
        elif not self.quiet:
            if self.tokens:
                print()  # Ends the text.
            if error[0] is None:
                print(self._summary())

    def watch(self, events: Iterator[Any]) -> Iterator[Any]:
        """Passes events on, records them, and draws now and then. Only the time that it takes to produce events counts, not
        the time between them."""
        while True:
            start = time.perf_counter()
            event = next(events, None)
            now = time.perf_counter()
            if event is None:
                return
            self._show(event, now - start, now)
            yield event

    def _show(self, event: Any, seconds: float, now: float) -> None:
        self._note(event.step)
        if isinstance(event, Read):
            self.read = event.tokens
            self._read_seconds += seconds
        else:
            self.tokens.append(event.token)
            self.text += event.text
            self._digest.update(np.ascontiguousarray(event.logits).tobytes())
            self._write_seconds += seconds
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
        """The run in numbers: seconds, bytes, and a digest of all logits that tokens were chosen from."""
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
            if tokens < 1 or seconds <= 0:
                return "-"
            speed = tokens / seconds
            return f"{speed:,.{0 if speed >= 10 else 2}f} tok/s"

        # The step that reads the end of the prompt gives the first token; each other token takes a step of its own.
        return rate(self.read, self._read_seconds), rate(len(self.tokens) - 1, self._write_seconds)

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
