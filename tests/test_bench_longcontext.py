"""`pagoda bench longcontext`: the bytes that it reports as read, against arithmetic; not how fast anything is."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_arrays
import numpy as np
import pagoda
import pytest
from device_arrays import StrictDriver
from emulator.driver import CallerStream
from pagoda.cli import main
from pagoda.cli.bench import longcontext
from pagoda.cli.bench.longcontext import budgets_of
from pagoda.cli.console import results
from pagoda.device import cuda
from pagoda.kernels.instances import Kernel
from pagoda.measuring import machine
from pagoda.measuring.backends import CpuBackend
from pagoda.planner import Planner
from pagoda.rates import Calibration, keep
from rich.console import Console
from shares import Shares

BYTES = 6 * 2 * 2 * 256
"""Elements of K and V that the small hybrid stores per token."""
PAGE = 64
GIB = 1 << 30
MOVING_MAX = 4
"""Pages for which tiers as small as these make room ahead of need."""


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Fake measured ceilings. The kept calibration has other rates and must not be used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep(Calibration(1, str(tmp_path), {"memory": 1e9, "disk": 1e9}, {"memory": 1e9, "disk": 1e9}))
    drives = itertools.cycle([1e8, 3e8])  # Before the tokens and after them.

    def memory(threads: int) -> float:
        assert threads == 1
        return 7e9

    monkeypatch.setattr(longcontext, "memory_ceiling", memory)
    monkeypatch.setattr(longcontext, "disk_ceiling", lambda directory, seconds: next(drives))
    return {"memory": 7e9, "disk": 2e8}


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
    assert document["device"] == "cpu"
    assert document["weights_bytes"] == weights
    for row, context in zip(document["longcontext"], contexts, strict=True):
        assert (row["context"], row["tokens"], row["ceilings"]) == (context, tokens, rates)
        # One token is written before the timed ones; each of these sees itself and all tokens before it.
        seen = np.mean([context + 1 + written for written in range(1, tokens + 1)])
        assert row["bytes_per_token"]["memory"] == pytest.approx(weights + seen * BYTES * size)
        page = PAGE * BYTES * size
        pages = [held / page for held in row["tier_bytes"].values()]
        # Pages being moved at that moment are on two tiers.
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


def test_a_token_is_written_however_few_the_seconds(
    rates: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*bench("--contexts", "300", "--seconds", "1e-9", "--weights", "0"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    assert row["tokens"] == 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is that of the process")
def test_the_peak_is_of_the_row(
    rates: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory used before the row, or while the disk's ceiling is measured, does not count."""
    most, measured = machine.resident() + (256 << 20), list[float]()

    def much(*_: object) -> float:
        np.ones(2 * (256 << 20), np.uint8)
        assert machine.peak_resident() > most
        measured.append(1e9)
        return measured[-1]

    monkeypatch.setattr(longcontext, "disk_ceiling", much)
    much()
    arguments = bench("--contexts", "300", "--tokens", "1", "--weights", "0", "--disk", str(tmp_path / "pages"))
    assert main([*arguments, "--json"]) == 0
    assert len(measured) == 3
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    assert row["peak_resident_bytes"] < most


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is that of the process")
@pytest.mark.parametrize("when", ["filling", "writing"])
def test_the_peak_is_that_of_filling_or_of_writing(
    when: str, rates: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is taken in between, and given back, counts; what the process has grown by does not have it."""
    most, before = 256 << 20, machine.resident()

    def also_takes(call: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*given: Any) -> Any:
            np.ones(most, np.uint8)
            return call(*given)

        return taking

    owner, name = (longcontext, "fill") if when == "filling" else (CpuBackend, "finish")
    monkeypatch.setattr(owner, name, also_takes(getattr(owner, name)))
    assert main([*bench("--contexts", "300", "--tokens", "1", "--weights", "0"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    assert row["peak_resident_bytes"] > before + most // 2
    assert row["grown_bytes"] < most // 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
def test_the_peak_is_of_the_process_and_not_of_what_started_it() -> None:
    large = np.ones(512 << 20, np.uint8)
    command = [sys.executable, "-c", "from pagoda.measuring import machine; print(machine.peak_resident())"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert 1 << 20 < int(said) < len(large)


def test_a_narrow_terminal_loses_no_digit(
    rates: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell has the same text as in a wide terminal, over more lines."""
    assert main([*bench("--contexts", "300", "--tokens", "1", "--weights", "0"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen = []
    for columns in ("80", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        longcontext.draw(document, results())
        printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        lines = [line.split("│")[1:-1] for line in printed if line.startswith("│")]
        seen.append((len(lines), ["".join("".join(cell).split()) for cell in zip(*lines, strict=True)]))
    (narrow, cells), (wide, expected) = seen
    assert narrow > wide == 1
    assert cells == expected


def test_figures_stand_under_their_headings(capsys: pytest.CaptureFixture[str]) -> None:
    """Links carry 100, 10 and 2 GB/s, and a token takes 3, 2 and 1 GB over them: at most two tokens a second."""
    row: dict[str, Any] = {"context": 1 << 20, "tokens_per_second": 0.5, "waited_seconds_per_token": 1.25}
    row |= {"ceilings": {"device": 100e9, "pcie": 10e9, "disk": 2e9}, "fill_seconds": 12.5, "grown_bytes": 3 << 10}
    row |= {"bytes_per_token": {"disk": 1e9, "pcie": 2e9, "device": 3e9}, "peak_resident_bytes": 5 << 30}
    row |= {"tier_bytes": {"device": 5 << 20, "host": 6 << 20, "disk": 7 << 20}}
    row |= {"planned_bytes": {"ring": 1 << 20, "device": 2 << 20, "host": 3 << 20, "disk": 4 << 20}}
    document = {"model": longcontext.HYBRID, "format": "q8_0/q4_0", "device": "cuda", "threads": 3}
    document |= {"weights_bytes": 1_230_000_000, "longcontext": [row | longcontext.against(row)]}
    longcontext.draw(document, Console(width=400))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].strip() == f"{longcontext.HYBRID}, q8_0/q4_0, 1.23 GB of weights a token, cuda, 3 threads"
    headings, cells = (
        [cell.strip() for cell in line.split(line[0])[1:-1]] for line in printed if line.startswith(("┃", "│"))
    )
    assert dict(zip(headings, cells, strict=True)) == {
        "context": "1m",
        "tok/s": "0.50",
        "roofline": "2.00",
        "achieved": "25%",
        "device a token": "3.00 GB, 1.5 of 100.0 GB/s",
        "pcie a token": "2.00 GB, 1.0 of 10.0 GB/s",
        "disk a token": "1.00 GB, 0.5 of 2.0 GB/s",
        "waited": "1.250 s",
        "planned: ring, device, host, disk": "1.0 MiB, 2.0 MiB, 3.0 MiB, 4.0 MiB",
        "on device, host, disk": "5.0 MiB, 6.0 MiB, 7.0 MiB",
        "peak RSS": "5.0 GiB",
        "grown": "3.0 KiB",
        "filled in": "12.5 s",
    }
    assert "Qwen3.5-0.8B" in "".join(printed[5:])
    longcontext.draw(document | {"model": "llama-3.1-8b"}, Console(width=400))
    assert "Qwen" not in capsys.readouterr().out


def test_a_table_for_people(rates: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench("--contexts", "300", "--tokens", "1", "--weights", "0")) == 0
    assert "of 7.0 GB/s" in " ".join(capsys.readouterr().out.split())


def test_the_ring_of_a_gpu_is_room_for_no_page() -> None:
    """384 MB on the device and the exact rest of a million tokens on the host; only the host tier takes RAM."""
    tokens, device = 1 << 20, 384 * 10**6
    ring = 2 * (16 << 20)
    left = tokens * BYTES * 2 - (device - ring)
    given = {"device_memory": device, "host_memory": left}
    assert budgets_of(planner(), tokens, given, 0, None, on_gpu=True) == given
    with pytest.raises(pagoda.InvalidArgument, match="there is room for"):
        budgets_of(planner(), tokens, given | {"host_memory": left - 1}, 0, None, on_gpu=True)
    ram = 4 * GIB
    budgets = budgets_of(planner(), tokens, {"device_memory": device}, ram, 40 * GIB, on_gpu=True)
    assert budgets["host_memory"] == ram * 3 // 4
    assert budgets["disk_memory"] >= left - budgets["host_memory"]
    # If everything fits on the device, there is no ring and no other tier.
    everything = {"device_memory": 2 * BYTES * 1024}
    assert budgets_of(planner(), 1024, everything, ram, None, on_gpu=True) == everything | {"host_memory": 0}


SMALL = pagoda.ModelSpec([pagoda.AttentionLayer(4, 2, 64)] * 3, "small")
LAYER_ELEMENTS = 2 * 2 * 64
"""Elements of K and V that one of its layers stores per token."""


@pytest.fixture
def gpu(rates: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictDriver]:
    """An emulated GPU, and a model small enough for it."""
    driver = device_arrays.install(monkeypatch, longcontext)
    monkeypatch.setattr("pagoda.measuring.gpu.PIECE_BYTES", 1 << 12)
    monkeypatch.setattr("pagoda.measuring.gpu.READ_BYTES", 1 << 12)
    monkeypatch.setattr("pagoda.measuring.gpu.READ_REPEATS", 1)
    monkeypatch.setattr("pagoda.measuring.gpu.READ_THREADS", 32)
    monkeypatch.setitem(longcontext.MODELS, "small", (SMALL, 10_000))
    yield driver
    driver.check()


def on_gpu(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The only row of the result."""
    assert main([*bench("--device", "cuda", "--model", "small"), *arguments, "--json"]) == 0
    row: dict[str, Any]
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    return row


@pytest.mark.parametrize(("name", "size"), [("f16", 2), ("q8_0", 34 / 32)])
@pytest.mark.parametrize("way", ["in place", "ring", "disk", "divided"])
def test_what_a_gpu_reads_over_which_link(
    way: str,
    name: str,
    size: float,
    gpu: StrictDriver,
    rates: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """640 tokens, ten pages, plus those written: a few pages fit on the device next to the ring, the others lie elsewhere."""
    layer_page = int(PAGE * LAYER_ELEMENTS * size)
    page, context, tokens = 3 * layer_page, 640, 3
    device = int(5.4 * page)
    arguments = ["--contexts", str(context), "--tokens", str(tokens), "--format", name, "--device-memory", str(device)]
    ring = 0
    if way != "in place":
        monkeypatch.setattr("pagoda.device.ring.SLOT_BYTES_MIN", 1)
        ring = 2 * (device // 16 // 256 * 256)
        assert layer_page <= ring // 2 < 2 * layer_page, "a page of a layer at a time"
    if way == "disk":
        arguments += ["--host-memory", "0", "--disk", str(tmp_path / "pages")]
    if way == "divided":
        thirds = Shares(ring=1 / 3, mapped=1 / 3, memory=1 / 3)
        monkeypatch.setattr(pagoda.rates, "routes_of", lambda gpu, threads: thirds)
    row = on_gpu(capsys, *arguments)
    ceilings = row["ceilings"]
    assert ceilings.keys() == {"device", "pcie", "memory", "disk"} - ({"disk"} if way != "disk" else set())
    assert ceilings["memory"] == rates["memory"]

    held = {tier: row["tier_bytes"][tier] / page for tier in ("device", "host", "disk")}
    assert sum(held.values()) == 11
    assert 3 <= held["device"] <= (device - ring) / page
    assert held["disk" if way == "disk" else "host"] == 11 - held["device"]
    read = {link: round(carried * tokens) for link, carried in row["bytes_per_token"].items()}
    away, on_disk = (held["host"] + held["disk"]) * page * tokens, held["disk"] * tokens
    # Two slots may be filled ahead for a step that never comes.
    assert 0 <= read["pcie"] + read["memory"] - away <= (2 * layer_page if ring else 0)
    assert (read["memory"] > 0) == (way == "divided")
    stored = -(-layer_page // 4096) * 4096
    assert 0 <= read["disk"] - 3 * on_disk * stored <= (2 * stored if on_disk else 0)
    seen = sum(context + 1 + written for written in range(1, tokens + 1)) * 3 * LAYER_ELEMENTS * size
    assert read["device"] == 10_000 * tokens + seen - read["pcie"] - read["memory"]
    roofline = min(ceilings[link] / carried for link, carried in row["bytes_per_token"].items() if carried)
    assert row["roofline_tokens_per_second"] == pytest.approx(roofline)
    assert row["achieved"] == pytest.approx(row["tokens_per_second"] / roofline)
    if way != "disk":
        there = (device - ring) // page * page
        assert row["planned_bytes"] == {"ring": ring, "device": there, "host": 11 * page - there, "disk": 0}


def test_a_gpu_with_room_for_everything(gpu: StrictDriver, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of the tokens begins a sixth page."""
    row = on_gpu(capsys, "--contexts", "318", "--tokens", "2", "--device-memory", "4MiB")
    seen = np.mean([320, 321]) * 3 * LAYER_ELEMENTS * 2
    assert row["bytes_per_token"] == {"device": 10_000 + seen, "pcie": 0, "memory": 0, "disk": 0}
    assert row["planned_bytes"] == {"ring": 0, "device": 6 * PAGE * 3 * LAYER_ELEMENTS * 2, "host": 0, "disk": 0}


def test_weights_are_read_before_each_layer(
    gpu: StrictDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the steps' stream."""
    launched: list[str] = []
    launch = CallerStream.launch

    def note(stream: CallerStream, kernel: Kernel, *given: Any, **options: Any) -> None:
        launched.append(kernel.header.split(".")[0])
        launch(stream, kernel, *given, **options)

    monkeypatch.setattr(CallerStream, "launch", note)
    on_gpu(capsys, "--contexts", "128", "--tokens", "2", "--device-memory", "4MiB")
    of_layers = [name for name in launched if name != "unpack"]
    assert of_layers == ["append"] * 3 + ["read", "append", "attend"] * 3 * 3


def test_the_plan_is_that_of_pagoda_plan(capsys: pytest.CaptureFixture[str]) -> None:
    tokens, budgets = 1 << 20, {"device_memory": 384 * 10**6, "host_memory": 8 * GIB, "disk_memory": 200 * GIB}
    sizes = [text for tier, size in budgets.items() for text in (f"--{tier.replace('_', '-')}", str(size))]
    assert main(["plan", "qwen3-8b", "--device", "cuda", "--context", str(tokens), *sizes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (split,) = document["contexts"][0]["budgets"].values()
    planner = Planner(longcontext.MODELS["qwen3-8b"][0])
    assert longcontext.plan_of(planner, tokens, budgets, on_gpu=True) == {
        "ring": planner.rings(384 * 10**6, host=True, disk=True, on_gpu=True).device_bytes,
        **{tier: split[f"{tier}_bytes"] for tier in ("device", "host", "disk")},
    }


def test_more_than_a_gpu_has(gpu: StrictDriver, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setattr(gpu, "free_bytes", 3 * GIB - 1)
    sizes = ["--weights", "2GiB", "--device-memory", "1GiB"]
    named = f"--weights, --device-memory = {2 * GIB}, {GIB}: together at most what the device has free, {3 * GIB - 1}"
    assert refused(*bench("--device", "cuda", "--contexts", "300"), *sizes) == named


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu", "cuda:x"])
def test_a_device_that_is_not_there_is_refused_as_everywhere(device: str, refused: Callable[..., str]) -> None:
    if device in ("cuda", "cuda:1") and cuda.lack() is None:
        pytest.skip("there is a device")
    said = refused("generate", "--device", device)
    assert said.startswith("device = ")
    assert refused(*bench("--device", device, "--contexts", "300")) == said


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["f16", "q8_0"])
def test_on_a_gpu(name: str, rates: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """4K tokens of the small hybrid, most of them on the host."""
    arguments = bench("--device", "cuda", "--contexts", "4k", "--weights", "64MB", "--format", name, "--json")
    assert main([*arguments, "--device-memory", "24MiB"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["longcontext"]
    slots = row["planned_bytes"]["ring"]
    assert row["tier_bytes"]["host"] <= row["bytes_per_token"]["pcie"] <= row["tier_bytes"]["host"] + slots
    assert row["achieved"] < 1.1
    assert row["ceilings"]["device"] > row["ceilings"]["pcie"]


def planner() -> Planner:
    return Planner(longcontext.MODELS[longcontext.HYBRID][0])


@pytest.mark.parametrize(
    ("given", "ram", "disk"),
    [
        ({}, 64 * GIB, None),
        ({}, 64 * GIB, GIB),
        ({}, 4 * GIB, 40 * GIB),
        ({}, GIB, 40 * GIB),
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
        assert budgets["device_memory"] == pages // 10 or ram < 2 * pages // 10
        smallest = longcontext.PAGES_MIN * 64 * BYTES * 2
        assert budgets["device_memory"] + budgets["host_memory"] <= max(ram, smallest)
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
    ("arguments", "named"),
    [
        (["--device-memory", "1B"], "device_memory = 1: from "),
        (["--host-memory", "1B", "--device-memory", "1GiB"], "host_memory = 1: 0, or from "),
        (["--disk-memory", "1GiB"], "disk_memory = 1073741824: nothing without disk="),
        (["--disk", "pages", "--disk-memory", "1B", "--device-memory", "1GiB"], "disk_memory = 1: at least "),
    ],
)
def test_what_a_cache_refuses_is_refused_before_anything_is_measured(
    arguments: list[str], named: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(longcontext, "memory_ceiling", lambda _: pytest.fail("something is measured"))
    assert refused(*bench("--contexts", "2k", "--weights", "0", *arguments)).startswith(named)


def test_there_is_room_for_the_tokens_that_are_written(refused: Callable[..., str]) -> None:
    """The context, one token that is not timed, and those that are."""
    memory = ["--device-memory", "1MiB", "--host-memory", "1MiB"]
    said = refused(*bench("--contexts", "1m", "--tokens", "7", "--weights", "0", *memory))
    assert said.startswith(f"--contexts: {(1 << 20) + 8:,} tokens have 12.0 GiB; ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", str((1 << 20) - 2)], "--contexts: 2,147,483,647 tokens have "),
        (["--tokens", str((1 << 20) - 1)], "--tokens = 1048575, --contexts = '2047m': "),
        (["--seconds", "3600"], "--tokens = 3686401, --contexts = '2047m': "),
        (["--seconds", "3600.1"], "--seconds = 3600.1: above 0, at most 3600"),
    ],
)
def test_more_tokens_than_a_sequence_may_have_are_refused(
    arguments: list[str], said: str, refused: Callable[..., str]
) -> None:
    """2047 * 2^20, one that is not timed and 2^20 - 2 are as many as a sequence may have."""
    assert refused(*bench("--contexts", "2047m", "--weights", "0", *arguments)).startswith(said)


def test_the_file_that_measures_the_disk_has_room_beside_the_tier(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 2 GiB that are free, it takes one."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2 * GIB))
    memory = ["--device-memory", "1MiB", "--host-memory", "1MiB", "--disk", str(tmp_path)]
    assert refused(*bench("--contexts", "1m", "--weights", "0", *memory)).endswith(", disk_memory = 1.0 GiB")


def test_budgets_whose_pages_are_too_few_are_named(rates: dict[str, float], refused: Callable[..., str]) -> None:
    """Five pages of 768 KiB fit in 4 MiB, but each half holds only two."""
    memory = ["--device-memory", "2MiB", "--host-memory", "2MiB"]
    said = refused(*bench("--contexts", "256", "--tokens", "1", "--weights", "0", *memory))
    page = PAGE * BYTES * 2
    assert said.startswith(
        f"--device-memory = {2 << 20}, --host-memory = {2 << 20}: together at least {page} bytes more"
    )


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
        ["--threads", "1025"],
        ["--contexts", "2047m", "--tokens", "2000000"],
        ["--weights", "much"],
        ["--weights", "1000TiB"],
        ["--host-memory", "much"],
        ["--disk", "/nowhere/at/all"],
        ["--disk", "x" * 300],
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longcontext, "memory_ceiling", lambda _: pytest.fail("something is measured"))
    said = refused("bench", "longcontext", "--contexts", "2k", *arguments)
    assert said.startswith("--") or arguments[0] == "--format"
