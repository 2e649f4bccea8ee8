"""`pagoda doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

from pagoda import _core, build_info, rates
from pagoda.cli.console import results
from pagoda.cli.options import Commands, directory
from pagoda.device import cuda
from pagoda.device.driver import Driver
from pagoda.disk import DISK_TIMEOUT
from pagoda.errors import PagodaError
from pagoda.kernels import instances, loader
from pagoda.kernels.arguments import Unpack
from pagoda.measuring import calibration, machine
from pagoda.sizes import format_size

CUPY_MIN = (14, 2)
"""The first CuPy that keeps compiled templates on disk with every driver."""


class Finding(NamedTuple):
    """The result of one check."""

    what: str
    fine: bool
    found: str
    remedy: str = ""


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("doctor", help="what this machine has and lacks")
    parser.add_argument(
        "--disk",
        type=directory,
        help="the directory to look at; by default that of temporary files",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the read bandwidth of memory and disk and, for the first GPU, of host pages, alone and at once; keep "
        f"the result for caches on that GPU; writes {format_size(calibration.DISK_BYTES)} to the disk, twice",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings."""
    # Not a default of the option: `gettempdir` raises if no folder can be written to, and other commands need none.
    disk = arguments.disk or Path(tempfile.gettempdir())
    findings = examine(disk)
    if arguments.calibrate:
        fine = any(finding.what == "GPU kernels" and finding.fine for finding in findings)
        # Device 0, on which `examine` has run a kernel.
        findings += calibrate(disk, [cuda.open_driver(0)] if fine else [])
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return 0
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        state = "[green]ok[/]" if finding.fine else "[yellow]--[/]"
        table.add_row(state, finding.what, escape(finding.found), escape(finding.remedy))
    results().print(table)
    return 0


def examine(directory: Path) -> list[Finding]:
    """Makes all checks. directory: where a disk tier might be."""
    return [_module(), _kernels(), *_gpu(), _memory(), _huge_pages(), _disk(directory)]


def calibrate(directory: Path, gpus: list[Driver]) -> list[Finding]:
    """Measures the bandwidth of links and stores it; results for other GPUs are kept. Raises TierIOError."""
    before = rates.kept()
    measured = calibration.measure(_core.cores(), directory, gpus)
    found = {
        link: f"{alone / 1e9:.1f} GB/s, and {measured.together[link] / 1e9:.1f} GB/s beside the other"
        for link, alone in measured.alone.items()
    }
    findings = [
        Finding("memory reads", True, f"{found['memory']}, by attention on {measured.threads} threads"),
        Finding("disk reads", True, f"{found['disk']}, in order in {directory}"),
        *(_routes(gpu, routes) for gpu, routes in measured.gpus.items()),
    ]
    try:
        rates.keep(replace(measured, gpus=(before.gpus if before else {}) | measured.gpus))
    except OSError as error:
        return [*findings, Finding("calibration", False, str(error), "XDG_CACHE_HOME names a folder to keep it in")]
    return [*findings, Finding("calibration", True, f"kept in {rates.place()}")]


def _routes(gpu: str, routes: rates.Routes) -> Finding:
    names = {"ring": "copies", "mapped": "reads in place", "memory": f"the CPU with {routes.threads} threads"}
    lines = [
        ", ".join(f"{names[route]} {rate / 1e9:.1f}" for route, rate in measured.items()) for measured in routes.rates
    ]
    formats = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in routes.formats.items())
    return Finding(
        f"host pages, {gpu}", True, f"GB/s: {'; at once '.join(lines)}; the CPU alone over rows of {formats}"
    )


def _module() -> Finding:
    info = build_info()
    python = f"Python {platform.python_version()}, {platform.machine()}"
    remedy = "build with --release: this is a debug build, many times slower" if info["debug"] else ""
    return Finding("module", not info["debug"], f"pagoda {info['version']}, {python}", remedy)


def _kernels() -> Finding:
    info = machine.build()
    found = f"{info['isa']} of {', '.join(info['isas'])}, {_core.cores()} cores"
    if info["isa"] != build_info()["isa"]:
        return Finding("CPU kernels", False, found, "unset PAGODA_CPU_ISA: this CPU has better ones")
    fine = info["isa"] != "scalar"
    return Finding("CPU kernels", fine, found, "" if fine else "attention is slow on CPUs without AVX2 or NEON")


def _gpu() -> list[Finding]:
    lack = cuda.lack()
    findings = [Finding("GPU", False, *lack)] if lack else [_device(index) for index in range(cuda.count())]
    if sys.modules.get("cupy"):
        findings.append(_cupy())
        findings += [_nvrtc(), _headers()] if findings[-1].fine else []
    return [*findings, _proof()] if all(finding.fine for finding in findings) else findings


def _cupy() -> Finding:
    import cupy

    driver = cupy.cuda.runtime.driverGetVersion()
    found = f"{cupy.__version__} for CUDA {cuda.version(cupy.cuda.runtime.runtimeGetVersion())}"
    found += f", driver for CUDA {cuda.version(driver)}" if driver else ""
    fine = tuple(map(int, cupy.__version__.split(".")[:2])) >= CUPY_MIN
    return Finding(
        "CuPy", fine, found, "" if fine else "upgrade to 14.2: older ones may compile kernels in every process"
    )


def _device(index: int) -> Finding:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    shared = cupy.cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"]
    link = Path("/sys/bus/pci/devices") / cupy.cuda.runtime.deviceGetPCIBusId(index).lower()
    speed, width = _read(f"{link}/current_link_speed"), _read(f"{link}/current_link_width")
    found = [
        properties["name"].decode(),
        format_size(properties["totalGlobalMem"]),
        "compute capability {}.{}".format(*cuda.capability(index)),
        f"{format_size(shared)} of shared memory a thread block",
        *([f"PCIe {speed.removesuffix(' PCIe')} x{width} now"] if speed else []),
    ]
    fine = cuda.capability(index) >= cuda.CAPABILITY_MIN
    remedy = "" if fine else "kernels need compute capability {}.{} (Ampere) or newer".format(*cuda.CAPABILITY_MIN)
    return Finding(f"GPU {index}", fine, ", ".join(found), remedy)


def _nvrtc() -> Finding:
    version = loader.nvrtc_version()
    if version is None:
        return Finding("NVRTC", False, "not found", loader.TOOLKIT)
    return Finding("NVRTC", True, "{}.{}, kernels are kept in {}".format(*version, loader.cache_folder()))


def _headers() -> Finding:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        return Finding("CUDA headers", False, "not found", loader.TOOLKIT)
    missing = [name for name in ("cuda_fp16.h", "cuda_bf16.h") if not (Path(folder) / name).exists()]
    if missing:
        return Finding("CUDA headers", False, f"{' and '.join(missing)} not in {folder}", loader.TOOLKIT)
    return Finding("CUDA headers", True, folder)


def _proof() -> Finding:
    """Runs a kernel that writes one word, and checks the result."""
    started = time.monotonic()
    try:
        driver = cuda.open_driver(0)
        pinned = driver.pinned(28)
        words, target = pinned.array.view(np.uint32), pinned.address + 24
        words[:] = [1, target & 0xFFFFFFFF, target >> 32, 0, 1, 4711, 0]
        stream = driver.stream()
        stream.launch(instances.UNPACK, 1, 32, Unpack(pinned.address))
        stream.record().wait()
    except (PagodaError, RuntimeError) as error:
        return Finding("GPU kernels", False, str(error))
    fine = bool(words[6] == 4711)
    found = f"one was loaded and run in {time.monotonic() - started:.1f} s" if fine else "one ran and did nothing"
    return Finding("GPU kernels", fine, found)


def _memory() -> Finding:
    available, total = machine.ram()
    return Finding("RAM", True, f"{format_size(available)} free of {format_size(total)}")


def _huge_pages() -> Finding:
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    fine = "[never]" not in setting and bool(setting)
    remedy = "" if fine else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: memory is then read faster"
    return Finding("huge pages", fine, setting or "not known", remedy)


def _disk(directory: Path) -> Finding:
    try:
        access = _core.disk_access(str(directory), timedelta(seconds=DISK_TIMEOUT))
    except (OSError, PagodaError) as error:
        return Finding("disk", False, str(error), "a directory that can be written to, for a disk tier")
    works = [name for name, there in (("O_DIRECT", access["direct"]), ("io_uring", access["io_uring"])) if there]
    space = f"{format_size(access['free_bytes'])} free of {format_size(access['total_bytes'])} in {directory}"
    found = f"{space}; {' and '.join(works) or 'page cache'}"
    return Finding("disk", not access["refused"], found, "; ".join(access["refused"]))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
