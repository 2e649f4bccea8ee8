"""`pagoda bench longcontext`: what it says was read, against arithmetic; not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from pagoda.cli import longcontext, main
from pagoda.cli.longcontext import Weights, budgets_of
from pagoda.planner import Planner
from pagoda.rates import Calibration, keep

BYTES = 6 * 2 * 2 * 256
"""Elements of K and V that the small hybrid stores of a token."""
PAGE = 64
MOVING_MAX = 4
"""Pages that tiers as small as those of these tests make room for ahead of need."""


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Ceilings that a calibration of one thread has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = {"memory": 7e9, "disk": 2e8}
    keep(Calibration(1, str(tmp_path), rates, rates))
    return rates


def bench(*arguments: str) -> list[str]:
    return ["bench", "longcontext", "--threads", "1", *arguments]


@pytest.mark.parametrize(("name", "size"), [("f16", 2), ("q8_0", 34 / 32)])
def test_what_is_read_and_what_could_be(
    name: str, size: float, rates: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contexts, tokens, weights = [700, 2048], 3, 1_000_000
    arguments = bench("--contexts", "700,2k", "--tokens", "3", "--weights", "1MB", "--format", name)
    tiers = ["--device-memory", "4MiB", "--host-memory", "3MiB", "--disk", str(tmp_path / "pages")]
    assert main([*arguments, *tiers, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ceilings"] == rates
    assert document["weights_bytes"] == weights
    for row, context in zip(document["longcontext"], contexts, strict=True):
        assert (row["context"], row["tokens"]) == (context, tokens)
        # One token is written before those that are timed; each of these sees itself and all before it.
        seen = np.mean([context + 1 + written for written in range(1, tokens + 1)])
        assert row["bytes_per_token"]["memory"] == pytest.approx(weights + seen * BYTES * size)
        page = PAGE * BYTES * size
        pages = [held / page for held in row["tier_bytes"].values()]
        # Pages that move right then are on two tiers.
        assert 0 <= sum(pages) - -(-(context + 1 + tokens) // PAGE) <= MOVING_MAX
        assert abs(row["bytes_per_token"]["disk"] / page - pages[2]) <= MOVING_MAX
        roofline = min(rates[link] / row["bytes_per_token"][link] for link in rates if row["bytes_per_token"][link])
        assert row["roofline_tokens_per_second"] == pytest.approx(roofline)
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        assert row["achieved"] == pytest.approx(row["tokens_per_second"] / roofline)
        assert 0 <= row["waited_seconds_per_token"] <= row["seconds"] / tokens
        assert row["peak_resident_bytes"] > 16 << 20
    on_disk = [row["tier_bytes"]["disk"] for row in document["longcontext"]]
    assert on_disk[-1] > 0
    assert list((tmp_path / "pages").iterdir()) == []


def test_for_so_many_seconds(rates: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*bench("--contexts", "300", "--seconds", "0.05", "--weights", "0"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    assert 1 <= row["tokens"] <= 52
    assert row["tokens"] == 52 or row["seconds"] >= 0.05
    assert row["bytes_per_token"]["disk"] == row["tier_bytes"]["disk"] == 0


def test_a_table_for_people(
    rates: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert main(bench("--contexts", "300", "--tokens", "1", "--weights", "0")) == 0
    printed = capsys.readouterr().out
    assert "ceilings: memory 7.0 GB/s\n" in printed
    assert "Qwen3.5-0.8B" in printed
    assert "achieved" in printed


def test_weights_are_all_read_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer its share, in parts for each thread."""
    shares: list[list[npt.NDArray[np.uint64]]] = []
    monkeypatch.setattr(np, "ones", lambda count, dtype: np.arange(count, dtype=dtype))

    def note(_: object, parts: list[npt.NDArray[np.uint64]]) -> list[int]:
        shares.append(parts)
        return []

    with Weights(8 * 1000, 7, 3) as weights:
        monkeypatch.setattr(weights._pool, "map", note)
        for layer in range(7):
            weights.read(layer)
    assert [len(parts) for parts in shares] == [3] * 7
    assert np.concatenate([part for parts in shares for part in parts]).tolist() == list(range(1000))
    assert max(sum(map(len, parts)) for parts in shares) == -(-1000 // 7)


GIB = 1 << 30


def planner() -> Planner:
    return Planner(longcontext.MODELS[longcontext.HYBRID][0])


@pytest.mark.parametrize(
    ("given", "ram", "disk"),
    [
        ({}, 64 * GIB, None),
        ({}, 64 * GIB, GIB),
        ({}, 4 * GIB, 40 * GIB),
        ({}, 0, 40 * GIB),
        ({"host_memory": GIB}, 64 * GIB, 40 * GIB),
        ({"device_memory": 2 * GIB, "host_memory": GIB, "disk_memory": 13 * GIB}, 0, 0),
    ],
)
def test_tiers_have_room_for_every_page(given: dict[str, int], ram: int, disk: int | None) -> None:
    tokens = 1 << 20
    pages = tokens * BYTES * 2
    budgets = budgets_of(planner(), tokens, given, ram, disk)
    assert sum(budgets.values()) >= pages
    assert budgets.keys() == {"device_memory", "host_memory", *(["disk_memory"] if disk is not None else [])}
    assert given.items() <= budgets.items()
    if not given:
        assert budgets["device_memory"] == pages // 10
        assert ram == 0 or budgets["device_memory"] + budgets["host_memory"] < ram
    if disk:
        assert budgets["disk_memory"] <= disk


@pytest.mark.parametrize(
    ("given", "ram", "disk", "hint"),
    [({}, 4 * GIB, None, "--disk names"), ({}, 4 * GIB, GIB, ""), ({"disk_memory": GIB}, 4 * GIB, 40 * GIB, "")],
)
def test_tiers_without_room(given: dict[str, int], ram: int, disk: int | None, hint: str) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=rf"--contexts: 1,048,576 tokens have 12.0 GiB; .*{hint}"):
        budgets_of(planner(), 1 << 20, given, ram, disk)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "q9"],
        ["--contexts", "many"],
        ["--contexts", "2k,0"],
        ["--contexts", "1m", "--host-memory", "1MiB"],
        ["--tokens", "0"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--threads", "0"],
        ["--weights", "much"],
        ["--weights", "1000TiB"],
        ["--host-memory", "much"],
        ["--disk", "/nowhere/at/all"],
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr(longcontext, "ceilings", nothing)
    assert main(["bench", "longcontext", "--contexts", "2k", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pagoda: --" if arguments[0] != "--format" else "pagoda: ")
    assert captured.err.count("\n") == 1
