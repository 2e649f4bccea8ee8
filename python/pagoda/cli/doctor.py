"""`pagoda doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from pagoda import build_info
from pagoda.device import cuda
from pagoda.sizes import format_size

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    fine: bool
    found: str
    remedy: str = ""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("doctor", help="what this machine has and lacks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings."""
    findings = examine()
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return 0
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.fine else "[yellow]--[/]", finding.what, finding.found, finding.remedy)
    Console().print(table)
    return 0


def examine() -> list[Finding]:
    """Looks at everything."""
    return [_module(), _kernels(), _gpu(), _memory(), _locked_memory(), _huge_pages(), _io_uring(), _disk()]


def _module() -> Finding:
    info = build_info()
    python = f"Python {platform.python_version()}, {platform.machine()}"
    remedy = "build with --release: this is a debug build, many times slower" if info["debug"] else ""
    return Finding("module", not info["debug"], f"pagoda {info['version']}, {python}", remedy)


def _kernels() -> Finding:
    info = build_info()
    fine = info["isa"] != "scalar"
    remedy = "" if fine else "attention is slow on CPUs without AVX2 or NEON"
    return Finding("CPU kernels", fine, f"{info['isa']} of {', '.join(info['isas'])}, {os.cpu_count()} cores", remedy)


def _gpu() -> Finding:
    try:
        import cupy
    except ImportError:
        return Finding(
            "GPU",
            False,
            "CuPy is not installed",
            "pip install 'pagoda-kv[cuda13]' or [cuda12]",
        )
    if not cupy.cuda.is_available():
        return Finding("GPU", False, "CuPy finds no device", "install or update the NVIDIA driver")
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    capability = (properties["major"], properties["minor"])
    found = (
        f"{properties['name'].decode()}, {format_size(properties['totalGlobalMem'])}, compute capability {capability}"
    )
    fine = capability >= cuda.CAPABILITY_MIN
    return Finding("GPU", fine, found, "" if fine else f"kernels need compute capability {cuda.CAPABILITY_MIN}")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(rows["MemAvailable"].split()[0]) * 1024
    return Finding("RAM", True, f"{format_size(available)} free of {format_size(total)}")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("pinned memory", True, "no limit")
    return Finding(
        "pinned memory",
        False,
        f"at most {format_size(soft)}",
        "ulimit -l unlimited, for a pinned host tier (GPU only)",
    )


def _huge_pages() -> Finding:
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    fine = "[never]" not in setting and bool(setting)
    remedy = "" if fine else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: 5 to 15 % faster reads"
    return Finding("huge pages", fine, setting or "not known", remedy)


def _io_uring() -> Finding:
    setting = _read("/proc/sys/kernel/io_uring_disabled")
    return Finding(
        "io_uring",
        setting in ("", "0"),
        {"0": "on", "": "not known"}.get(setting, "restricted"),
        "not used yet",
    )


def _disk() -> Finding:
    usage = shutil.disk_usage(".")
    return Finding(
        "disk",
        True,
        f"{format_size(usage.free)} free of {format_size(usage.total)}",
        "there is no disk tier yet",
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
