"""`pagoda bench depth`: what it reports, not how fast anything is."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pagoda
import pytest
from pagoda.cli import main
from pagoda.cli.bench import depth
from pagoda.cli.console import kept


def test_every_model_format_and_depth_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 4 has layers that do not store K, and DeepSeek V3 stores no V."""
    arguments = [
        "bench",
        "depth",
        "--models",
        "shipped,gemma-4-12b,deepseek-v3",
        "--formats",
        "f16,q8_0/q4_0",
        "--depths",
        "70,100",
    ]
    arguments += ["--tokens", "2", "--threads", "2", "--memory", "1MiB"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["threads"] == 2
    rows = document["depth"]
    assert [(row["model"], row["format"], row["depth"]) for row in rows] == list(
        itertools.product(["shipped", "gemma-4-12b", "deepseek-v3"], ["f16", "q8_0/q4_0"], [70, 100])
    )
    assert all(row["tokens"] == 2 and row["tokens_per_second"] > 0 <= row["deviation"] for row in rows)
    assert main([*arguments[:-2], "--memory", "100MiB"]) == 0
    printed = capsys.readouterr().out
    assert "tg2 @ d70" in printed
    assert "gemma-4-12b" in printed


@pytest.mark.parametrize(
    ("speed", "deviation", "said"),
    [
        (1234.56, 7.0, "1,234.6 ± 7.0"),
        (14.84, 0.26, "14.8 ± 0.3"),
        (1.449, 0.051, "1.45 ± 0.05"),
        (0.1234, 0.004, "0.123 ± 0.004"),
    ],
)
def test_slow_speeds_are_told_apart(speed: float, deviation: float, said: str) -> None:
    assert depth.cell({"tokens_per_second": speed, "deviation": deviation}) == said


def test_speeds_are_of_the_whole_model_or_of_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "language_model", lambda *_: [0.5, 1.0, 2.0])
    monkeypatch.setattr(depth, "attention", lambda *_: [0.25] * 3)
    arguments = ["--models", "shipped,llama-3.1-8b", "--formats", "f16", "--depths", "70", "--memory", "1MiB"]
    arguments += ["--window-size", "1k", "--sink-positions", "cache"]
    assert main(["bench", "depth", *arguments, "--tokens", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["depth"]
    assert [row["retention"] for row in rows] == ["64 + last 1,024, cache positions"] * 2
    # Of 4, 2 and 1 tokens a second, and of 8 each time.
    shown = [(row["tokens_per_second"], row["deviation"]) for row in rows]
    assert shown == [pytest.approx((7 / 3, (7 / 3) ** 0.5)), (8, 0)]


def test_a_window_bounds_what_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens precede the timed ones."""
    held, timed = [], depth.timed

    def counted(spec: pagoda.ModelSpec, before: int, tokens: int, options: dict[str, Any], write: Any) -> list[float]:
        def look(cache: pagoda.Cache, branch: pagoda.Sequence) -> float:
            taken: float = write(cache, branch)
            held.append((len(branch), cache.stats().used_bytes("device")))
            return taken

        return timed(spec, before, tokens, options, look)

    monkeypatch.setattr(depth, "timed", counted)
    arguments = ["--models", "shipped,gemma-4-12b", "--formats", "f16", "--depths", "3k,9k", "--memory", "1MiB"]
    arguments += ["--tokens", "2", "--window-size", "1k", "--sink-tokens", "8"]
    assert main(["bench", "depth", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["depth"]
    assert [row["retention"] for row in rows] == ["8 + last 1,024"] * 4
    runs = depth.RUNS + 1
    for model in (held[: 2 * runs], held[2 * runs :]):
        assert [tokens for tokens, _ in model] == [3074] * runs + [9218] * runs
        assert len({used for _, used in model}) == 1
    arguments[1], arguments[5] = "shipped", "70"
    assert main(["bench", "depth", *arguments]) == 0
    assert "shipped, kept: 8 + last 1,024" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("keep", "named"),
    [
        (None, "all"),
        (pagoda.SinkWindow(0, 1024), "last 1,024"),
        (pagoda.SinkWindow(8, 1024, "cache"), "8 + last 1,024, cache positions"),
    ],
)
def test_what_is_kept_has_a_name(keep: pagoda.SinkWindow | None, named: str) -> None:
    assert kept(keep) == named


def test_a_folder_may_have_brackets_in_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}
    for name in ("llama[red]", "llama[/bold]"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(small))
        assert main(["bench", "depth", "--models", name, "--formats", "f16", "--depths", "70", "--tokens", "1"]) == 0
        assert f"{name}, attention alone" in " ".join(capsys.readouterr().out.split())


def test_layers_that_are_not_run_count_like_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a second at each reading: a layer's call takes one second, as does the time between two."""
    spec, options = pagoda.ModelSpec.preset("gemma-4-12b"), {"k_dtype": "f16", "v_dtype": "f16", "threads": 1}
    clock = itertools.count()
    monkeypatch.setattr(depth, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for memory, run in ((1, 2), (1 << 30, 48)):
        part = depth.run_layers(spec, 10, memory, "f16", "f16")
        assert depth.attention(spec, part, 10, 3, options) == [3 * (48 + run) + 1] * depth.RUNS


def test_kinds_of_layers_share_the_memory_equally() -> None:
    """A page of 64 tokens has 32 KiB in f16 in a layer of two heads, and 64 KiB in one of four."""
    few, many = (pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=heads, head_dim=64) for heads in (2, 4))
    spec = pagoda.ModelSpec([few, many] * 6)
    # Of 191 or 192 KiB each.
    for memory, counts in ((1, (1, 1)), (382 << 10, (5, 2)), (384 << 10, (6, 3)), (1 << 30, (6, 6))):
        layers = depth.run_layers(spec, 64, memory, "f16", "f16").layers
        assert (layers.count(few), layers.count(many)) == counts


def test_a_cache_has_room_for_a_sequence_and_a_branch_of_it() -> None:
    spec, options = pagoda.ModelSpec.preset("llama-3.1-8b"), {"k_dtype": "f16", "v_dtype": "f16"}
    with depth.cache_for(spec, 131_072, 16, options) as cache:
        (blocks,) = cache.stats().device
        assert blocks.free * 64 > 131_072 + 2 * 16


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "shipped,nothing"],
        ["--formats", "f16,q9"],
        ["--depths", "many"],
        ["--depths", "2k,0"],
        ["--depths", "5000m"],
        ["--formats", "f16/"],
        ["--tokens", "0"],
        ["--threads", "0"],
        ["--models", "shipped,narrow.json"],
        ["--memory", "much"],
        ["--window-size", "much"],
        ["--window-size", "0"],
        ["--sink-tokens", "4"],
        ["--models", "shipped", "--sink-positions", "cache"],
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Its rows are too short for the scales of some formats, but the first formats have none.
    narrow = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 24}
    (tmp_path / "narrow.json").write_text(json.dumps(narrow))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(depth, "timed", lambda *_: pytest.fail("something is measured"))
    refused("bench", "depth", *arguments)


def test_more_tokens_than_a_sequence_may_have_are_refused(refused: Callable[..., str]) -> None:
    """2047 * 2^20 and 2^20 - 1 are together as many as a sequence may have."""
    for tokens, argument in (((1 << 20) - 1, "--depths: "), (1 << 20, "--tokens = 1048576, --depths = '2047m': ")):
        said = refused("bench", "depth", "--models", "shipped", "--depths", "2047m", "--tokens", str(tokens))
        assert said.startswith(argument)


@pytest.mark.parametrize("model", ["shipped", "llama-3.1-8b"])
def test_more_than_memory_holds_is_refused(
    model: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "timed", lambda *_: pytest.fail("something is measured"))
    said = refused("bench", "depth", "--models", model, "--formats", "f16", "--depths", "2047m")
    assert re.fullmatch(rf"--depths: 2,146,435,072 tokens of {model} have .*; .* of RAM are free", said)
