"""Settings of all tests: seeds are printed; on machines without a GPU, tests are skipped with a message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import emulator
import hypothesis
import pytest
from emulator.driver import EmulatedDriver, of_ptx, of_sources
from gpu_driver import CopyingDriver
from pagoda import device, rates
from pagoda.cli import main
from pagoda.device import cuda, ring
from pagoda.device.cuda import open_driver as open_gpu
from pagoda.device.driver import Driver
from shares import Shares

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.register_profile("device", deadline=None, print_blob=True, max_examples=12, stateful_step_count=25)
hypothesis.settings.register_profile("ptx", deadline=None, print_blob=True, max_examples=6, stateful_step_count=25)
hypothesis.settings.load_profile(os.environ.get("PAGODA_HYPOTHESIS", "default"))

DEVICES = ["cpu", "emulated", "ptx", "streamed", "divided", "copied", "cuda"]
"""Values of `--device`. emulated: kernels run on the CPU, and NumPy arrays are device arrays. ptx: the same with kernels
compiled by NVRTC. streamed: emulated, with a ring so small that every cache has one. divided: as streamed, and the CPU takes
a share. cuda: a GPU; arrays are copied to it and back. copied: as cuda, with the emulated device in place of the GPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=DEVICES, default="cpu", help='what device="auto" is in tests')


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        # Compiling a new shape of attention takes two seconds, and eight by way of PTX.
        hypothesis.settings.load_profile("ptx" if config.getoption("--device") == "ptx" else "device")
    if config.getoption("--device") == "cuda" and (lack := cuda.lack()):
        raise pytest.UsageError(f"--device=cuda: {lack.found}; {lack.remedy}")


def pytest_runtest_logfinish() -> None:
    """Ends a pytest-xdist worker whose GPU context a kernel has broken, which is permanent; xdist starts a new worker."""
    runtime = sys.modules["cupy"].cuda.runtime if "cupy" in sys.modules else None
    if runtime is not None and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as error:
            if error.status not in (cuda.NO_DEVICE, cuda.DRIVER_TOO_OLD):
                os._exit(1)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts caches on the device that `--device` names, so that API tests run on any of them, with NumPy arrays.

    Tests marked `gpu` choose a GPU themselves and use arrays on it.
    """
    kind = "cpu" if request.node.get_closest_marker("gpu") else request.config.getoption("--device")
    emulated: list[EmulatedDriver] = []

    def open_driver(index: int) -> Driver:
        if kind == "cuda":
            return CopyingDriver(open_gpu(index))
        emulated.append(EmulatedDriver(seed=index, compile=of_ptx if kind == "ptx" else of_sources))
        return CopyingDriver(emulated[-1]) if kind == "copied" else emulated[-1]

    if kind in ("streamed", "divided"):
        monkeypatch.setattr(ring, "SLOT_BYTES_MIN", 1)
    if kind == "divided":
        thirds = Shares(ring=1 / 3, mapped=1 / 3, memory=1 / 3)
        monkeypatch.setattr(rates, "routes_of", lambda gpu, threads: thirds)
    if kind != "cpu":
        if kind != "cuda":
            emulator.require()
        monkeypatch.setattr(device, "AUTO", "cuda")
        monkeypatch.setattr(cuda, "open_driver", open_driver)
    yield
    for driver in emulated:
        driver.check()


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps earlier measurements of the user's machine from influencing tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what the user has set from deciding whether rich takes captured output for a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must refuse its arguments, with exactly one line of output; returns the text after "pagoda: "."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err[:8], err.find("\n")) == ("", "pagoda: ", len(err) - 1)
        return err[8:-1]

    return run


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> bool:
    """Whether caches are on an emulated device, where attention takes a thousand times as long."""
    return request.config.getoption("--device") in ("emulated", "ptx", "streamed", "divided")


@pytest.fixture
def on_cpu(request: pytest.FixtureRequest) -> bool:
    """Whether caches are on the CPU, where steps are fastest."""
    return bool(request.config.getoption("--device") == "cpu")


@pytest.fixture
def names_the_cpu(request: pytest.FixtureRequest) -> None:
    """For tests that choose the CPU themselves: skips them under other devices, as one run is enough."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("runs on the CPU, whatever --device says")


@pytest.fixture(autouse=True)
def _gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `gpu` if there is no GPU; with PAGODA_REQUIRE_GPU=1 it fails."""
    if request.node.get_closest_marker("gpu") is None:
        return
    lack = cuda.lack()
    if lack is None:
        return
    if os.environ.get("PAGODA_REQUIRE_GPU") == "1":
        pytest.fail(f"PAGODA_REQUIRE_GPU=1, but {lack.found}; {lack.remedy}")
    pytest.skip(lack.found)
