"""What links are said to carry: what is counted, what is kept, and when it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pagoda
import pytest
from pagoda import _core, calibration
from pagoda.calibration import Calibration
from pagoda.cli import main

PART = 16 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little is read, and nothing of the user's is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "MEMORY_BYTES", 2 << 20)
    monkeypatch.setattr(calibration, "DISK_BYTES", 1)
    monkeypatch.setattr(calibration, "SECONDS", 0.02)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a disk tier would be."""
    made = tmp_path / "pages"
    made.mkdir(mode=0o700)
    return made


def kept(directory: Path, threads: int = 2) -> Calibration:
    """One that no machine would come to."""
    made = Calibration(threads, str(directory), {"memory": 3.0, "disk": 5.0}, {"memory": 2.0, "disk": 4.0})
    calibration.keep(made)
    return made


def test_doctor_keeps_what_it_measures(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    measured = calibration.kept()
    assert measured is not None
    assert measured.directory == str(directory)
    for rates in (measured.alone, measured.together):
        assert rates.keys() == {"memory", "disk"}
        assert min(rates.values()) > 0
    for link in ("memory", "disk"):
        assert f"{measured.alone[link] / 1e9:.1f} GB/s" in findings[f"{link} reads"]["found"]
    assert str(directory) in findings["disk"]["found"]
    assert str(calibration.place()) in findings["calibration"]["found"]
    assert list(directory.iterdir()) == [], "its files go with it"
    assert list(calibration.place().parent.iterdir()) == [calibration.place()]


def test_doctor_measures_nothing_unless_asked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(directory), "--json"]) == 0
    assert "memory reads" not in capsys.readouterr().out
    assert calibration.kept() is None


def test_a_calibration_that_cannot_be_kept_is_shown(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert main(["doctor", "--calibrate", "--disk", str(directory), "--json"]) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert not findings["calibration"]["fine"]
    assert findings["memory reads"]["fine"]


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pagoda.TierIOError, match="nowhere"):
        _core.time_disk_reads(str(tmp_path / "nowhere" / "at all"), 1, timedelta(seconds=0.01))
    assert main(["doctor", "--calibrate", "--disk", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pagoda: disk = ")
    assert captured.err.count("\n") == 1
    assert main(["doctor", "--disk", str(tmp_path / "nowhere")]) == 0


@pytest.mark.parametrize("size", [1, PART, PART + 1])
def test_whole_parts_are_read_for_as_long_as_asked(size: int, directory: Path) -> None:
    read, seconds = _core.time_disk_reads(str(directory), size, timedelta(seconds=0.05))
    assert read > 0
    assert read % PART == 0
    assert seconds >= 0.05
    assert list(directory.iterdir()) == []


def test_what_reads_memory_reads_all_of_it() -> None:
    """By arithmetic: K and V of 2 heads of 128 in 4 layers, two bytes each, and of the token that looks."""
    with calibration._memory_reader(1) as reader:
        tokens = (2 << 20) // (4 * 2 * 2 * 128 * 2)
        for _ in range(3):
            assert reader.read().bytes == (tokens + 1) * 4 * 2 * 2 * 128 * 2


def test_rates_at_once_are_of_passes_that_met_the_disk() -> None:
    spans = [calibration._Span(start, start + 1, 10 * (start + 1)) for start in range(5)]
    met = calibration._beside(spans, calibration._Span(1.5, 3.0, 0))
    assert met == spans[1:3]
    assert calibration._rate(met) == 25


def test_what_is_kept_comes_back_and_holds_for_threads_and_a_file_system(directory: Path) -> None:
    made = kept(directory)
    assert calibration.kept() == made
    assert calibration.ceilings(2, directory) == made.alone
    assert calibration.ceilings(2, None) == {"memory": 3.0}
    assert made.is_of(2, directory.parent)
    assert not made.is_of(1, directory)
    assert not replace(made, directory="/proc").is_of(2, directory)
    assert not replace(made, directory=str(directory / "gone")).is_of(2, directory)
    measured = calibration.ceilings(1, directory)
    assert measured.keys() == {"memory", "disk"}
    assert min(measured.values()) > 1e3
    assert calibration.ceilings(1, None).keys() == {"memory"}
    assert calibration.kept() == made, "a bench keeps nothing"


@pytest.mark.parametrize("text", ["", "[]", "3", '{"threads": 2}', '{"another": "version"}'])
def test_what_cannot_be_read_is_not_there(text: str, directory: Path) -> None:
    kept(directory)
    calibration.place().write_text(text)
    assert calibration.kept() is None
