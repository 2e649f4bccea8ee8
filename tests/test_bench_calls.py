"""`pagoda bench`: what its figures measure, not how large they are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pagoda.cache import Cache
from pagoda.cli import main
from pagoda.cli.bench import calls, depth, longcontext, quality
from pagoda.lm import ContiguousCache


def test_figures_are_medians(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow run, as the first one often is, changes nothing; the table and JSON agree. 4,096 tokens are read each time."""
    runs = [(1.0, 10.0), (300.0, 3000.0), (200.0, 2000.0), (4.0, 40.0), (6.0, 50.0), (5.0, 60.0)]
    expected = {
        "read 4,096 tokens over pages, tok/s": 200.0,
        "write 64 tokens after them over pages, tok/s": 2000.0,
        "read 4,096 tokens over plain arrays, tok/s": 5.0,
        "write 64 tokens after them over plain arrays, tok/s": 50.0,
    }
    monkeypatch.setattr(calls, "ROUNDS", 1)

    def printed(*options: str) -> str:
        following, over = iter(runs), []

        def speeds(model: Any, cache: Any, prompt: Any) -> tuple[float, float]:
            assert len(prompt) == 4096
            over.append(type(cache))
            return next(following)

        monkeypatch.setattr(calls, "speeds", speeds)
        assert main(["bench", *options]) == 0
        assert over == [Cache] * 3 + [ContiguousCache] * 3
        return capsys.readouterr().out

    figures = json.loads(printed("--json"))["figures"]
    assert expected.items() <= figures.items()
    rows = [line.split("\u2502") for line in printed().splitlines() if "tok/s" in line]
    assert {row[1].strip(): float(row[2].replace(",", "")) for row in rows} == expected


def test_reading_and_writing_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by an eighth of a second per token that is read, and by a second per token in the loop that writes:
    the first, which is given, and all that are written but the last."""
    now = 100.0

    def loop(model: Any, cache: Any, sequence: Any, prompt: Any, new_tokens: int, sampler: Any) -> Iterator[None]:
        nonlocal now
        now += len(prompt) / 8 if new_tokens == 0 else len(prompt) + new_tokens - 1
        yield

    monkeypatch.setattr(calls, "generate", loop)
    monkeypatch.setattr(calls, "time", SimpleNamespace(perf_counter=lambda: now))
    cache: Any = SimpleNamespace(create=lambda: None)
    model: Any = None
    assert calls.speeds(model, cache, np.zeros(160, np.int64)) == (8.0, 1.0)


def test_calls_are_timed_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls together take 4, 20 and 6 seconds, one call 3, 1 and 2."""
    now = 100.0

    def after(*seconds: float) -> Callable[[], None]:
        following = iter(seconds)

        def call() -> None:
            nonlocal now
            now += next(following)

        return call

    monkeypatch.setattr(calls, "ROUNDS", 3)
    monkeypatch.setattr(calls, "time", SimpleNamespace(perf_counter=lambda: now))
    assert calls.median_us(after(1, 3, 10, 10, 4, 2), 2) == 3e6
    assert calls.median_us(after(3, 1, 2)) == 2e6


def test_calls_do_what_their_figures_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the pages in use and the tokens of a sequence, before each call and after it."""
    caches = []

    class Noted(Cache):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            caches.append(self)

    def effect(call: Callable[[], object], repeat: int = 1) -> list[tuple[int, int]]:
        def state() -> tuple[int, int]:
            (blocks,) = caches[-1].stats().device
            return blocks.used, caches[-1]._core.length(0)

        before = state()
        call()
        return [before, state()]

    monkeypatch.setattr(calls, "Cache", Noted)
    monkeypatch.setattr(calls, "median_us", effect)
    full, one_more, long = (256 * 16, 1024), (256 * 17, 1025), (2048, 131_072)
    figures: dict[str, Any] = calls.bookkeeping()
    assert figures == {
        "reserve + rollback, 256 sequences that begin a page, us": [full, full],
        "reserve, block_table, slot_mapping and commit, 256 sequences, us": [full, one_more],
        "cheapest call: length of a sequence, us": [one_more, one_more],
        "empty append, us": [one_more, one_more],
        "empty attend, us": [one_more, one_more],
        "fork and release of 131,072 tokens, us": [long, long],
    }


@pytest.mark.parametrize("part", [depth, longcontext, quality], ids=lambda part: part.__name__)
def test_json_may_be_asked_for_before_the_part_and_after_it(part: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(arguments: argparse.Namespace) -> int:
        asked.append(arguments.json)
        return 0

    monkeypatch.setattr(part, "run", run)
    name = part.__name__.rsplit(".", 1)[-1]
    for arguments in (["--json", name], [name, "--json"], [name]):
        assert main(["bench", *arguments]) == 0
    assert asked == [True, True, False]
