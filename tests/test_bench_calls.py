"""`pagoda bench`: what its figures measure, not how large they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pagoda.cli import main
from pagoda.cli.bench import calls


def test_figures_are_medians(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow run, as the first one often is, changes nothing; the table and JSON agree."""
    runs = [(1.0, 10.0), (300.0, 3000.0), (200.0, 2000.0), (4.0, 40.0), (6.0, 50.0), (5.0, 60.0)]
    expected = {
        "read 4,096 tokens over pages, tok/s": 200.0,
        "write 64 tokens after them over pages, tok/s": 2000.0,
        "read 4,096 tokens over plain arrays, tok/s": 5.0,
        "write 64 tokens after them over plain arrays, tok/s": 50.0,
    }
    monkeypatch.setattr(calls, "ROUNDS", 1)

    def printed(*options: str) -> str:
        following = iter(runs)
        monkeypatch.setattr(calls, "speeds", lambda *_: next(following))
        assert main(["bench", *options]) == 0
        return capsys.readouterr().out

    figures = json.loads(printed("--json"))["figures"]
    assert expected.items() <= figures.items()
    rows = [line.split("\u2502") for line in printed().splitlines() if "tok/s" in line]
    assert {row[1].strip(): float(row[2].replace(",", "")) for row in rows} == expected


def test_reading_and_writing_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by an eighth of a second per prompt token, and by a second per written token."""
    now = 0.0

    def loop(model: Any, cache: Any, sequence: Any, prompt: Any, new_tokens: int, sampler: Any) -> Iterator[None]:
        nonlocal now
        now += len(prompt) / 8 if new_tokens == 0 else new_tokens
        yield

    monkeypatch.setattr(calls, "generate", loop)
    monkeypatch.setattr(calls, "time", SimpleNamespace(perf_counter=lambda: now))
    cache: Any = SimpleNamespace(create=lambda: None)
    model: Any = None
    assert calls.speeds(model, cache, np.zeros(160, np.int64)) == (8.0, 1.0)
