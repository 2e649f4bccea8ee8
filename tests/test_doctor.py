"""What `pagoda doctor` and `device="cuda"` report about a machine, over a stand-in for CuPy that answers as there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulator
import pagoda
import pytest
from emulator.driver import EmulatedDriver, Stream
from pagoda.cli import doctor, main
from pagoda.cli.doctor import Finding
from pagoda.device import cuda
from pagoda.kernels import loader
from pagoda.measuring import machine as measured

OPEN_DRIVER = cuda.open_driver
"""The real function, whatever --device is."""

NO_DEVICE = "cudaErrorNoDevice: no CUDA-capable device is detected"
TOO_OLD = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


class RuntimeFailure(RuntimeError):
    """CuPy's CUDARuntimeError."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Machine:
    """A machine that has everything; tests take things away."""

    def __init__(self, headers: Path) -> None:
        self.driver, self.runtime = 13010, 13020
        self.failure: Exception | None = None
        self.capability = "90"
        self.nvrtc: tuple[int, int] | None = (13, 2)
        self.version = "14.2.0"
        self.headers: Path | None = headers

    def _count(self) -> int:
        if self.failure:
            raise self.failure
        return 1

    def _nvrtc(self) -> tuple[int, int]:
        if self.nvrtc is None:
            raise RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"')
        return self.nvrtc

    def modules(self) -> dict[str, Any]:
        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            driverGetVersion=lambda: self.driver,
            runtimeGetVersion=lambda: self.runtime,
            getDeviceCount=self._count,
            getDeviceProperties=lambda index: {"name": b"NVIDIA H200", "totalGlobalMem": 139 << 30},
            deviceGetPCIBusId=lambda index: "FFFF:00:00.0",
        )
        device = SimpleNamespace(
            compute_capability=self.capability, attributes={"MaxSharedMemoryPerBlockOptin": 227 << 10}
        )
        cupy = SimpleNamespace(
            __version__=self.version,
            cuda=SimpleNamespace(
                runtime=runtime, Device=lambda index=0: device, nvrtc=SimpleNamespace(getVersion=self._nvrtc)
            ),
        )
        find = SimpleNamespace(find_nvidia_header_directory=lambda name: self.headers and str(self.headers))
        return {"cupy": cupy, "cuda.pathfinder": find}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("cuda_fp16.h", "cuda_bf16.h"):
        (tmp_path / name).touch()
    return Machine(tmp_path)


def examine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    for name, module in machine.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return {finding.what: finding for finding in doctor.examine(Path(tempfile.gettempdir()))}


def test_no_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert 'pip install "pagoda-kv[cuda13]" (or [cuda12])' in printed
    states = {row[1].strip(): row[0].strip() for line in printed.splitlines() if len(row := line.split("│")[1:]) > 1}
    assert (states["module"], states["GPU"]) == ("ok", "--")
    assert cuda.lack() == ("CuPy is not installed", 'pip install "pagoda-kv[cuda13]" (or [cuda12])')


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        ("ImportError('Failed to import CuPy.')", "CuPy does not load (Failed to import CuPy.)", "pip install"),
        ("PermissionError(13, 'Permission denied', '/x')", "CuPy cannot make its folder", "CUPY_CACHE_DIR"),
    ],
)
def test_a_cupy_that_does_not_load(
    error: str, found: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text(f"raise {error}\n")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    lack = cuda.lack()
    assert lack is not None
    assert lack.found.startswith(found)
    assert remedy in lack.remedy


@pytest.mark.parametrize(
    ("driver", "failure", "visible", "found", "remedy"),
    [
        (0, RuntimeFailure(35, TOO_OLD), None, "there is no NVIDIA driver", "--gpus all"),
        (
            12040,
            RuntimeFailure(35, TOO_OLD),
            None,
            "the NVIDIA driver is for CUDA 12.4, CuPy for CUDA 13.2",
            "[cuda12]",
        ),
        (13010, RuntimeFailure(100, NO_DEVICE), "", "CUDA_VISIBLE_DEVICES = '' leaves no device", "unset it"),
        (13010, RuntimeFailure(100, NO_DEVICE), None, f"CuPy finds no device ({NO_DEVICE})", "nvidia-smi"),
    ],
)
def test_no_device(
    machine: Machine,
    driver: int,
    failure: Exception,
    visible: str | None,
    found: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.driver, machine.failure = driver, failure
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    findings = examine(machine, monkeypatch)
    assert findings["GPU"][1:3] == (False, found)
    assert remedy in findings["GPU"].remedy
    # Checks that need no device are still made.
    assert findings["NVRTC"].fine
    assert findings["CUDA headers"].fine
    assert "GPU kernels" not in findings
    with pytest.raises(pagoda.BackendUnavailable) as caught:
        OPEN_DRIVER(0)
    assert str(caught.value) == f"device = cuda: {found}; {findings['GPU'].remedy}"


def test_a_gpu_that_is_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.capability = "75"
    findings = examine(machine, monkeypatch)
    assert not findings["GPU 0"].fine
    assert "compute capability 7.5" in findings["GPU 0"].found
    assert "8.0" in findings["GPU 0"].remedy
    assert "GPU kernels" not in findings
    with pytest.raises(pagoda.BackendUnavailable, match=r"cuda:0: compute capability \(7, 5\)"):
        OPEN_DRIVER(0)
    with pytest.raises(pagoda.InvalidArgument, match="cuda:1: from cuda:0 to cuda:0"):
        OPEN_DRIVER(1)


def test_no_nvrtc(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nvrtc = None
    findings = examine(machine, monkeypatch)
    assert findings["NVRTC"] == Finding("NVRTC", False, "not found", loader.TOOLKIT)
    assert "GPU kernels" not in findings


def test_no_headers_of_cuda(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.headers is not None
    (machine.headers / "cuda_bf16.h").unlink()
    partly = examine(machine, monkeypatch)["CUDA headers"]
    assert partly == Finding("CUDA headers", False, f"cuda_bf16.h not in {machine.headers}", loader.TOOLKIT)
    machine.headers = None
    findings = examine(machine, monkeypatch)
    assert findings["CUDA headers"] == Finding("CUDA headers", False, "not found", loader.TOOLKIT)
    assert "GPU kernels" not in findings


def test_a_cupy_that_keeps_no_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.version = "14.1.1"
    finding = examine(machine, monkeypatch)["CuPy"]
    assert (finding.fine, finding.found) == (False, "14.1.1 for CUDA 13.2, driver for CUDA 13.1")
    assert "14.2" in finding.remedy


def test_a_machine_that_has_everything(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.require()
    monkeypatch.setattr(cuda, "open_driver", EmulatedDriver)
    findings = examine(machine, monkeypatch)
    gpu = findings["GPU 0"].found
    assert gpu == "NVIDIA H200, 139.0 GiB, compute capability 9.0, 227.0 KiB of shared memory a thread block"
    assert findings["NVRTC"].found.startswith("13.2, ")
    assert findings["GPU kernels"].found.startswith("one was loaded and run")
    names = ["GPU 0", "CuPy", "NVRTC", "CUDA headers", "GPU kernels"]
    assert all(findings[name].fine and not findings[name].remedy for name in names)


def test_a_kernel_that_does_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "open_driver", EmulatedDriver)
    monkeypatch.setattr(Stream, "launch", lambda *arguments, **options: None)
    finding = examine(machine, monkeypatch)["GPU kernels"]
    assert (finding.fine, finding.found) == (False, "one ran and did nothing")
    # Nothing is measured on such a GPU.
    monkeypatch.setattr(doctor, "calibrate", lambda disk, gpus: [Finding("GPUs", True, str(len(gpus)))])
    assert main(["doctor", "--calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["found"] == "0"


@pytest.mark.parametrize(
    ("isa", "remedy"), [("avx2", ""), ("scalar", "attention is slow on CPUs without AVX2 or NEON")]
)
def test_kernels_of_a_cpu(isa: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pagoda.build_info() | {"isa": isa, "isas": [isa]}
    monkeypatch.setattr(doctor, "build_info", lambda: build)
    monkeypatch.setattr(measured, "build", lambda: build)
    (finding,) = [found for found in doctor.examine(Path(tempfile.gettempdir())) if found.what == "CPU kernels"]
    assert (finding.fine, finding.remedy) == (not remedy, remedy)


@pytest.mark.parametrize(
    ("setting", "fine", "found"),
    [
        ("always [madvise] never", True, "always [madvise] never"),
        ("always madvise [never]", False, "always madvise [never]"),
        ("", False, "not known"),
    ],
)
def test_huge_pages(setting: str, fine: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: setting)
    (finding,) = [found for found in doctor.examine(Path(tempfile.gettempdir())) if found.what == "huge pages"]
    assert (finding.fine, finding.found) == (fine, found)
    assert finding.remedy.startswith("" if fine else "echo madvise")


def test_kernels_that_do_not_load(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> Any:
        raise loader.KernelCompileError("unpack for sm_90:\n  machine.cuh(5): error: nonsense")

    monkeypatch.setattr(cuda, "open_driver", fail)
    finding = examine(machine, monkeypatch)["GPU kernels"]
    assert (finding.fine, finding.found) == (False, "unpack for sm_90:\n  machine.cuh(5): error: nonsense")


@pytest.mark.gpu
def test_this_machine() -> None:
    assert {finding.what: finding for finding in doctor.examine(Path(tempfile.gettempdir()))}["GPU kernels"].fine


@pytest.mark.parametrize(
    "command",
    [["doctor", "--disk"], ["generate", "--disk"], ["generate", "--model"], ["bench", "longcontext", "--disk"]],
)
def test_a_directory_without_a_name_is_not_the_working_directory(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty name comes, for example, from an unset variable in a script."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*command, ""])
    assert f"argument {command[-1]}: invalid directory value: ''" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_a_directory_in_memory_is_no_disk(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rates would be those of memory, and pages in it take memory."""
    (finding,) = [found for found in doctor.examine(in_memory) if found.what == "disk"]
    assert not finding.fine
    assert "a drive: the directory is in memory" in finding.remedy
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(1, 1, 16)])
    pagoda.Cache(spec, device_memory="1MiB", host_memory=0, disk=in_memory / "pages", disk_memory="1MiB").close()
    assert f"disk = {in_memory / 'pages'}: without a drive: the directory is in memory" in caplog.text


def test_nowhere_to_write_is_no_matter_of_other_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example in a container with a read-only file system."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert main(["plan", "qwen3-8b"]) == 0
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "pagoda: [Errno 2] No usable temporary directory found\n"
