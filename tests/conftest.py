"""Settings of all tests: seeds are printed, machines without a GPU skip aloud."""

from __future__ import annotations

import os
from collections.abc import Iterator

import emulator
import hypothesis
import pytest
from emulator.driver import EmulatedDriver
from pagoda import device
from pagoda.device import cuda

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.register_profile(
    "emulated", deadline=None, print_blob=True, max_examples=12, stateful_step_count=25
)
hypothesis.settings.load_profile(os.environ.get("PAGODA_HYPOTHESIS", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "emulated"], default="cpu", help='what device="auto" is in tests')


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "emulated":
        # A new shape of attention takes g++ two seconds.
        hypothesis.settings.load_profile("emulated")


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With --device=emulated caches are on a device whose kernels run on the CPU: every test of the API runs on both."""
    drivers: list[EmulatedDriver] = []

    def open_driver(index: int) -> EmulatedDriver:
        drivers.append(EmulatedDriver(seed=index))
        return drivers[-1]

    if request.config.getoption("--device") == "emulated":
        emulator.require()
        monkeypatch.setattr(device, "AUTO", "cuda")
        monkeypatch.setattr(cuda, "open_driver", open_driver)
    yield
    for driver in drivers:
        driver.check()


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> bool:
    """Whether caches are on an emulated device: attention takes it a thousand times as long."""
    return bool(request.config.getoption("--device") == "emulated")


@pytest.fixture(autouse=True)
def _gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `gpu` where there is none, unless PAGODA_REQUIRE_GPU=1 says that there must be."""
    if request.node.get_closest_marker("gpu") is None:
        return
    lack = cuda.lack()
    if lack is None:
        return
    if os.environ.get("PAGODA_REQUIRE_GPU") == "1":
        pytest.fail(f"PAGODA_REQUIRE_GPU=1, but {lack.found}; {lack.remedy}")
    pytest.skip(lack.found)
