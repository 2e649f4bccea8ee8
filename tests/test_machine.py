"""What is said of this machine: its memory, against psutil and on systems that say less than Linux does, and its kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pagoda
import psutil
import pytest
from pagoda.measuring import machine

TOTAL = psutil.virtual_memory().total
LARGE = 256 << 20


def test_memory_is_what_psutil_says() -> None:
    """Others take and give back memory meanwhile."""
    free, total = machine.ram()
    assert total == pytest.approx(TOTAL, rel=0.02)
    assert free == pytest.approx(psutil.virtual_memory().available, abs=TOTAL / 10)
    assert machine.resident() == pytest.approx(psutil.Process().memory_info().rss, abs=LARGE / 4)


def test_memory_that_is_taken_is_resident_and_the_peak_outlives_it() -> None:
    """Systems count pages of memory with some delay."""
    before = machine.resident()
    taken = np.ones(LARGE, np.uint8)
    assert machine.resident() - before == pytest.approx(LARGE, rel=0.2)
    del taken
    assert machine.resident() - before < LARGE / 4
    assert machine.peak_resident() - before > 0.8 * LARGE
    if Path("/proc/self/clear_refs").exists():
        machine.forget_peak()
        assert machine.peak_resident() - before < LARGE / 4


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in place of /proc, with what a system says; at first nothing."""
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
    return tmp_path


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc(system: str, unit: int, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a process has now, nothing is known but what it has had at most, which macOS gives in bytes."""
    usage = SimpleNamespace(ru_maxrss=5000)
    monkeypatch.setattr(machine, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage))
    monkeypatch.setattr(sys, "platform", system)
    machine.forget_peak()
    assert machine.peak_resident() == machine.resident() == 5000 * unit
    free, total = machine.ram()
    assert free == total == pytest.approx(TOTAL, rel=0.02)


def test_a_proc_that_says_little(proc: Path) -> None:
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemFree:  100 kB\n")
    free, total = machine.ram()
    assert free == total
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:  300 kB\n")
    assert machine.ram() == (300 * 1024, total)


def test_kernels_are_those_that_caches_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_CPU_ISA", raising=False)
    assert machine.build() == pagoda.build_info()
    monkeypatch.setenv("PAGODA_CPU_ISA", "scalar")
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(1, 1, 64)])
    with pagoda.Cache(spec, device_memory="1MiB", host_memory=0) as cache:
        assert machine.build() == pagoda.build_info() | {"isa": cache._core.isa}
