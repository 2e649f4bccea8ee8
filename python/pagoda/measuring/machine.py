"""The memory of this machine and of this process, and the kernels of this build."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagoda import build_info
from pagoda.engine import forced_isa


def ram() -> tuple[int, int]:
    """Free bytes (all, if the system does not say), and all bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _said("/proc/meminfo", "MemAvailable")
    return total if free is None else free, total


def forget_peak() -> None:
    """Resets `peak_resident`, if the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """The most bytes of RAM that this process has had. On Linux the peak of the program that started it may count, too."""
    said = _said("/proc/self/status", "VmHWM")
    if said is not None:
        return said
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident() -> int:
    """Bytes of RAM that this process has; if the system does not say, the most that it has had."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_resident()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _said(path: str, row: str) -> int | None:
    """The number of bytes in a row of a file of /proc; None if there is no such file or row."""
    if not Path(path).exists():
        return None
    rows = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(rows[row].split()[0]) * 1024 if row in rows else None


def build() -> dict[str, Any]:
    """`pagoda.build_info`, with "isa" as caches use it: PAGODA_CPU_ISA in the environment may override it."""
    info = build_info()
    return info | {"isa": forced_isa() or info["isa"]}
