"""Measured rates of links: what is counted, what is kept, and when it is valid."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulator
import numpy as np
import pagoda
import pytest
from emulator.driver import EmulatedDriver
from pagoda import _core, rates
from pagoda.cli import doctor, main
from pagoda.cli.doctor import Finding
from pagoda.device import cuda
from pagoda.kernels import instances
from pagoda.measuring import calibration, gpu
from pagoda.measuring.backends import CpuBackend
from pagoda.rates import Calibration, Routes
from test_device_streaming import Clocked, ClockedStream

PART = 16 << 20
LONG = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps measurements short, and leaves the user's files alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "MEMORY_BYTES", 2 << 20)
    monkeypatch.setattr(calibration, "DISK_BYTES", 1)
    monkeypatch.setattr(calibration, "SECONDS", 0.02)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory for a disk tier."""
    made = tmp_path / "pages"
    made.mkdir(mode=0o700)
    return made


def kept(directory: Path, threads: int = 2) -> Calibration:
    """A kept calibration with rates that no machine has."""
    made = Calibration(threads, str(directory), {"memory": 3.0, "disk": 5.0}, {"memory": 2.0, "disk": 4.0})
    rates.keep(made)
    return made


def test_doctor_keeps_what_it_measures(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    measured = rates.kept()
    assert measured is not None
    assert measured.directory == str(directory)
    for carried in (measured.alone, measured.together):
        assert carried.keys() == {"memory", "disk"}
        assert min(carried.values()) > 0
    for link in ("memory", "disk"):
        assert f"{measured.alone[link] / 1e9:.1f} GB/s" in findings[f"{link} reads"]["found"]
    assert str(directory) in findings["disk"]["found"]
    assert str(rates.place()) in findings["calibration"]["found"]
    assert list(directory.iterdir()) == [], "its files go with it"
    assert list(rates.place().parent.iterdir()) == [rates.place()]


def test_doctor_measures_nothing_unless_asked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(directory), "--json"]) == 0
    assert "memory reads" not in capsys.readouterr().out
    assert rates.kept() is None


def test_a_calibration_that_cannot_be_kept_is_shown(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert not findings["calibration"]["fine"]
    assert findings["memory reads"]["fine"]


def test_a_directory_that_is_not_there(tmp_path: Path, refused: Callable[..., str]) -> None:
    with pytest.raises(pagoda.TierIOError, match="nowhere"):
        _core.time_disk_reads(str(tmp_path / "nowhere" / "at all"), 1, timedelta(seconds=0.01), LONG)
    assert refused("doctor", "--calibrate", "--disk", str(tmp_path / "nowhere")).startswith("disk = ")
    assert main(["doctor", "--disk", str(tmp_path / "nowhere")]) == 0


@pytest.mark.parametrize("size", [1, PART, PART + 1])
def test_whole_parts_are_read_for_as_long_as_asked(size: int, directory: Path) -> None:
    read, seconds = _core.time_disk_reads(str(directory), size, timedelta(seconds=0.05), LONG)
    assert read > 0
    assert read % PART == 0
    assert seconds >= 0.05
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(("name", "row"), [("f16", 256), ("q8_0", 136), ("q4_0", 72)])
def test_what_reads_memory_reads_all_of_it(name: str, row: int) -> None:
    """K and V of 2 heads of 128 in 4 layers, including those of the token that attends."""
    with calibration._memory_reader(1, name) as reader:
        tokens = (2 << 20) // (4 * 2 * 2 * row)
        for _ in range(3):
            assert reader.read().bytes == (tokens + 1) * 4 * 2 * 2 * row


def test_reads_go_on_for_as_long_as_asked_after_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes ten seconds, as nothing is warm, and each later one two."""
    now = 0.0

    def read() -> calibration._Span:
        nonlocal now
        start = now
        now += 2 if now else 10
        return calibration._Span(start, now, 1)

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: now))
    assert calibration._read_for(5.0, read) == [(10, 12, 1), (12, 14, 1), (14, 16, 1)]


def test_rates_at_once_are_of_passes_that_met_the_disk() -> None:
    spans = [calibration._Span(start, start + 1, 10 * (start + 1)) for start in range(5)]
    met = calibration._beside(spans, calibration._Span(1.5, 3.0, 0))
    assert met == spans[1:3]
    assert calibration._rate(met) == 25


def test_what_met_nothing_is_measured_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it can happen that no pass over memory overlaps with the disk reads."""
    beside = calibration._beside
    met: list[list[calibration._Span]] = []

    def late(passes: list[calibration._Span], disk: calibration._Span) -> list[calibration._Span]:
        met.append(beside(passes, disk) if met else [])
        return met[-1]

    monkeypatch.setattr(calibration, "_beside", late)
    assert calibration.measure(1, directory).together["memory"] == calibration._rate(met[-1])
    assert len(met) > 1


def test_a_bench_measures_its_ceilings_and_keeps_nothing(directory: Path) -> None:
    made = kept(directory)
    assert rates.kept() == made
    start = time.perf_counter()
    assert calibration.disk_ceiling(directory, 0.2) > 1e3
    assert time.perf_counter() >= start + 0.2
    assert calibration.memory_ceiling(2) > 1e3
    assert rates.kept() == made


@pytest.mark.parametrize(("by_attention", "in_order"), [(6.0, 8.0), (6.0, 5.0)])
def test_memory_gives_what_the_fastest_reader_gets(
    by_attention: float, in_order: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are read in order, pages by attention; the ceiling is the faster of the two."""

    def attended(reader: calibration._MemoryReader) -> calibration._Span:
        now = time.perf_counter()
        return calibration._Span(now, now + 1, int(by_attention))

    monkeypatch.setattr(calibration._MemoryReader, "read", attended)
    monkeypatch.setattr(calibration, "_rate_in_order", lambda threads: in_order)
    assert calibration.memory_ceiling(1) == pytest.approx(max(by_attention, in_order))


def test_reading_in_order_reads_every_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes one second: it reads the clock as it begins and as it ends."""
    read: list[int] = []
    clock = itertools.count()

    def note(backend: CpuBackend, layer: int) -> None:
        read.append(sum(len(share) for share in backend._shares[layer]))

    monkeypatch.setattr(CpuBackend, "read_weights", note)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert calibration._rate_in_order(3) == 2 << 20
    assert set(read) == {(2 << 20) // 8}


def test_a_user_without_a_home_has_no_calibration_and_is_told_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    assert rates.kept() is None
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    (finding,) = [each for each in json.loads(capsys.readouterr().out) if each["what"] == "calibration"]
    assert not finding["fine"]
    assert "home directory" in finding["found"]
    assert "XDG_CACHE_HOME" in finding["remedy"]


@pytest.mark.parametrize(("system", "folder"), [("linux", ".cache"), ("darwin", "Library/Caches")])
def test_where_a_system_keeps_it(system: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    assert rates.place().parent == tmp_path / folder / "pagoda"


@pytest.mark.parametrize("text", ["", "[]", "3", '{"threads": 2}', '{"another": "version"}', "[" * 100_000])
def test_what_cannot_be_read_is_not_there(text: str, directory: Path) -> None:
    kept(directory)
    rates.place().write_text(text)
    assert rates.kept() is None


ROUTES = Routes(
    2,
    [{"ring": 50e9}, {"mapped": 45e9}, {"memory": 60e9}, {"ring": 30e9, "memory": 40e9}],
    {"ring": 1e-5, "mapped": 0.0, "memory": 0.0},
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["directory"], 5),
        (["threads"], 2.0),
        (["alone"], {}),
        (["alone", "disk"], 0),
        (["together", "memory"], -1.0),
        (["together", "memory"], float("nan")),
        (["together", "disk"], float("inf")),
        (["alone", "memory"], "fast"),
        (["alone"], 5),
        (["gpus", "one", "threads"], None),
        (["gpus", "one", "rates"], 5),
        (["gpus", "one", "rates"], []),
        (["gpus", "one", "rates", 0, "ring"], 0),
        (["gpus", "one", "rates", 3, "nvlink"], 1.0),
        (["gpus", "one", "rates", 3], {}),
        (["gpus", "one", "start"], {"ring": 1e-5}),
        (["gpus", "one", "start", "ring"], float("inf")),
        (["gpus", "one", "formats"], {"f16": 0.0}),
        (["gpus"], []),
    ],
    ids=str,
)
def test_what_cannot_be_reckoned_with_is_not_there(path: list[Any], value: Any, directory: Path) -> None:
    """Another version may have written it, and caches divide by these numbers."""
    rates.keep(replace(kept(directory), gpus={"one": ROUTES}))
    assert rates.kept() is not None
    document = inner = json.loads(rates.place().read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    rates.place().write_text(json.dumps(document))
    assert rates.kept() is None


def test_routes_of_a_gpu_come_back_and_hold_for_threads(directory: Path) -> None:
    made = replace(kept(directory), gpus={"0000:01:00.0": ROUTES})
    rates.keep(made)
    assert rates.kept() == made
    assert rates.routes_of("0000:01:00.0", 2) == ROUTES
    assert rates.routes_of("0000:01:00.0", 4) is None
    assert rates.routes_of("0000:02:00.0", 2) is None
    assert ROUTES.ceilings == {"pcie": 50e9, "memory": 60e9}
    # The format before GPUs were measured.
    before = asdict(made)
    del before["gpus"]
    rates.place().write_text(json.dumps(before))
    assert rates.kept() == replace(made, gpus={})


def test_rates_over_rows_of_other_formats() -> None:
    """The CPU's rate beside others is limited to its rate alone with that format; the others' rates do not change."""
    routes = replace(ROUTES, formats={"f16": 60e9, "q8_0": 45e9, "q4_0": 20e9})
    assert routes.over({"f16": 512}) == routes
    assert [each.get("memory") for each in routes.over({"q8_0": 272}).rates] == [None, None, 45e9, 40e9]
    assert [each.get("memory") for each in routes.over({"q4_0": 144}).rates] == [None, None, 20e9, 20e9]
    # 300 bytes at 60 and 300 at 20 take 20 ns.
    assert [each.get("memory") for each in routes.over({"f16": 300, "q4_0": 300}).rates][2:] == pytest.approx(
        [30e9] * 2
    )
    assert routes.over({"q4_0": 144}).rates[3]["ring"] == 30e9
    assert routes.over({"f16": 512, "int8": 260}).rates == routes.rates[:2]
    # The format before row formats were measured.
    assert ROUTES.over({"f16": 512}).rates == routes.rates[:2]


def test_the_share_of_the_cpu_follows_its_rate() -> None:
    start = {"ring": 0.0, "memory": 0.0}
    routes = Routes(2, [{"ring": 30.0, "memory": 40.0}], start, {"f16": 60.0, "q8_0": 30.0, "q4_0": 10.0})
    for name, share in {"f16": 4 / 7, "q8_0": 1 / 2, "q4_0": 1 / 4}.items():
        divided = routes.over({name: 100}).divide(840.0, {"ring": 1, "memory": 1}, {})
        assert divided == pytest.approx({"ring": 840 * (1 - share), "memory": 840 * share})


def test_routes_that_begin_late_and_routes_that_end_early() -> None:
    routes = Routes(1, [{"ring": 10.0, "memory": 20.0}], {"ring": 0.0, "memory": 1.0})
    for size, most, shares in (
        (5.0, {}, (5.0, 0.0)),
        (40.0, {}, (20.0, 20.0)),
        (40.0, {"memory": 10.0}, (30.0, 10.0)),
        (25.0, {"ring": 5.0}, (5.0, 20.0)),
        (25.0, {"ring": 5.0, "memory": 20.0}, (5.0, 20.0)),
    ):
        divided = routes.divide(size, {"ring": 1, "memory": 1}, most)
        assert divided == pytest.approx(dict(zip(("ring", "memory"), shares, strict=True))), (size, most)
    assert routes.divide(26.0, {"ring": 1, "memory": 1}, {"ring": 5.0, "memory": 20.0}) == {}


class Seen(ClockedStream):
    """A stream with events that can be queried."""

    def record(self) -> Any:
        event = super().record()
        event.done = lambda: self.driver.now >= event.time
        return event


class Watched(Clocked):
    """A device with such streams, and a name."""

    name = "clocked"

    def stream(self) -> Seen:
        return Seen(self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clocked], None]:
    """Makes a driver's clock the machine's clock."""

    def make(driver: Clocked) -> None:
        def sleep(seconds: float) -> None:
            driver.now += seconds

        monkeypatch.setattr(time, "perf_counter", lambda: driver.now)
        monkeypatch.setattr(time, "sleep", sleep)

    return make


def test_each_way_is_timed_alone_and_beside_the_others(clock: Callable[[Clocked], None]) -> None:
    """A simulated device: 50 GB/s by copies, 45 in place, 8 us for an empty copy."""
    driver: Any = Watched(45e9, 50e9)
    clock(driver)
    routes = gpu.measure(driver, 3, lambda: None, 1 << 20)
    assert routes.threads == 3
    assert [set(measured) for measured in routes.rates] == [
        {"ring"},
        {"mapped"},
        {"memory"},
        {"ring", "mapped"},
        {"ring", "memory"},
        {"mapped", "memory"},
        {"ring", "mapped", "memory"},
    ]
    for measured in routes.rates:
        assert measured.get("ring", 50e9) == pytest.approx(50e9, rel=0.02)
        assert measured.get("mapped", 45e9) == pytest.approx(45e9, rel=0.02)
        assert measured.get("memory", 1.0) > 0
    assert routes.start == pytest.approx({"ring": 8e-6, "mapped": 0.0, "memory": 8e-6}, abs=1e-7)


def test_a_piece_is_read_in_place_once_by_all_multiprocessors_together(clock: Callable[[Clocked], None]) -> None:
    """Three of them cannot divide it evenly."""
    driver: Any = Watched(45e9, 50e9)
    driver.multiprocessors = 3
    clock(driver)
    gpu.measure(driver, 3, lambda: None, 1 << 20)
    host, listed = driver.lists
    *runs, (_, _, word) = listed.view(np.uint64).reshape(-1, 3).tolist()
    starts = [sum(size for *_, size in runs[:index]) for index in range(4)]
    assert starts[3] == len(host) == 256 << 20
    assert [source - host.ctypes.data for source, _, _ in runs] == starts[:3]
    assert [target - runs[0][1] for _, target, _ in runs] == starts[:3]
    assert all(start % 16 == 0 for start in starts)
    assert max(size for *_, size in runs) - min(size for *_, size in runs) <= 3 * 16
    assert word == 16, "the start of a kernel is timed with almost no bytes"


def test_rates_of_ways_that_share_a_link(clock: Callable[[Clocked], None]) -> None:
    """Each transfer waits for all earlier ones, as on one link: together they carry as much as one alone."""
    driver: Any = Watched(45e9, 50e9)
    clock(driver)
    size = 64 << 20
    stream, host, device = driver.stream(), driver.pinned(size), driver.memory(size)

    def begin() -> Any:
        stream.copy(device.address, host.address, size)
        return stream.record()

    alone = gpu.at_once({"one": gpu.Way(begin, size)})
    both = gpu.at_once({name: gpu.Way(begin, size) for name in ("one", "other")})
    assert alone["one"] == pytest.approx(size / (8e-6 + size / 50e9), rel=0.1)
    assert sum(both.values()) == pytest.approx(alone["one"], rel=0.1)


def test_what_a_reader_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise pagoda.TierIOError("gone")

    monkeypatch.setattr(gpu, "SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool, pytest.raises(pagoda.TierIOError, match="gone"):
        gpu.at_once({"memory": gpu.Way(lambda: gpu.Read(pool.submit(broken)), 1)})


def test_doctor_measures_a_gpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An emulated GPU, on which a kernel ran."""
    emulator.require()
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(gpu, "SECONDS", 0.01)
    monkeypatch.setattr(doctor, "_gpu", lambda: [Finding("GPU kernels", True, "one ran")])
    monkeypatch.setattr(cuda, "open_driver", lambda index: EmulatedDriver(index))
    rates.keep(replace(kept(directory), gpus={"another": ROUTES}))
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    measured = rates.kept()
    assert measured is not None
    assert measured.gpus.keys() == {"another", "emulated"}
    assert measured.gpus["another"] == ROUTES
    routes = measured.gpus["emulated"]
    assert min(rate for each in routes.rates for rate in each.values()) > 0
    found = findings["host pages, emulated"]["found"]
    assert f"copies {routes.ceilings['pcie'] / 1e9:.1f}" in found or "reads in place" in found
    assert rates.routes_of("emulated", routes.threads) == routes
    assert routes.formats.keys() == instances.NAMES.keys() | instances.QUANTISED.keys()
    for name, rate in routes.formats.items():
        assert f"{name} {rate / 1e9:.1f}" in found
