"""How kernels are loaded: the messages meanwhile and on failure, and on a GPU what CuPy keeps on disk."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pagoda.kernels import instances, loader


class CompileException(Exception):
    """CuPy's."""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Installs a CuPy whose compiling is a function of the test; returns the list of its calls' arguments."""

    def install(compiling: Callable[[], None], patience: float = 60.0) -> list[dict[str, Any]]:
        asked = []

        class RawModule:
            def __init__(self, **options: Any) -> None:
                asked.append(options)

            def get_function(self, expression: str) -> str:
                compiling()
                return f"compiled {expression}"

        cuda = SimpleNamespace(
            compiler=SimpleNamespace(CompileException=CompileException),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 2)),
            Device=lambda: SimpleNamespace(compute_capability="90"),
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule, cuda=cuda))
        monkeypatch.setattr(loader, "PATIENCE_S", patience)
        monkeypatch.setenv("CUPY_CACHE_DIR", "/kept/here")
        return asked

    return install


def until(said: Callable[[], object]) -> Callable[[], None]:
    """Compiles until a message about it has appeared."""

    def compiling() -> None:
        deadline = time.monotonic() + 60
        while not said():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return compiling


def test_cupy_is_asked_for_what_the_fingerprint_covers(cupy: Any) -> None:
    asked = cupy(lambda: None)
    assert loader.load(instances.UNPACK) == "compiled pagoda::unpack"
    (options,) = asked
    assert options["code"].startswith(f"// {loader.fingerprint()}\n")
    assert options["name_expressions"] == ["pagoda::unpack"]
    assert f"-I{loader.SOURCES}" in options["options"]


def test_compiling_is_logged(cupy: Any, caplog: pytest.LogCaptureFixture) -> None:
    cupy(until(lambda: caplog.records), patience=0.0)
    with caplog.at_level(logging.INFO, "pagoda.kernels"):
        loader.load(instances.append("f16", "bf16", "f32", 64))
    before, after = [record.getMessage() for record in caplog.records]
    assert before == "compiling append<F16, BF16, F32> (first use; kept in /kept/here)"
    assert re.fullmatch(r"compiled append<F16, BF16, F32>: [\d.]+ s", after)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_compiling_shows_on_a_terminal_and_vanishes(
    cupy: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    cupy(until(lambda: "compiling" in terminal.getvalue()), patience=0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with caplog.at_level(logging.INFO, "pagoda.kernels"):
        loader.load(instances.append("f16", "bf16", "f32", 64))
    assert "compiling append<F16, BF16, F32> (first use; kept in /kept/here)" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
    assert not caplog.records


def test_nothing_is_said_of_kernels_from_the_disk(cupy: Any, caplog: pytest.LogCaptureFixture) -> None:
    cupy(lambda: None)
    with caplog.at_level(logging.INFO, "pagoda.kernels"):
        loader.load(instances.UNPACK)
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            CompileException(
                f'{loader.SOURCES}/pagoda/unit.cuh(7): error: expected a ";"\n  int x\n       ^\n\n1 error'
            ),
            ['  pagoda/unit.cuh(7): error: expected a ";"'],
        ),
        (
            RuntimeError("Failed to find CUDA headers."),
            ["  Failed to find CUDA headers.", f"  CUDA's headers are missing: {loader.TOOLKIT}"],
        ),
        (OSError(28, "No space left on device"), ["  [Errno 28] No space left on device"]),
    ],
)
def test_what_fails_is_readable(error: Exception, lines: list[str], cupy: Any) -> None:
    def fail() -> None:
        raise error

    cupy(fail)
    with pytest.raises(loader.KernelCompileError) as caught:
        loader.load(instances.UNPACK)
    assert str(caught.value).splitlines() == ["unpack for sm_90:", *lines]


def test_kernels_are_kept_where_cupy_keeps_them_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    assert loader.cache_folder() == Path("~/.cupy/kernel_cache")
    monkeypatch.setenv("CUPY_CACHE_DIR", "~/kernels")
    assert loader.cache_folder() == Path("~/kernels")


@pytest.mark.gpu
def test_compiled_kernels_are_kept_on_disk(tmp_path: Path) -> None:
    """A second process writes no file, and a damaged one is compiled again."""
    script = "from pagoda.kernels import instances, loader; loader.load(instances.append('f16', 'f16', 'f32', 64))"

    def load() -> dict[Path, int]:
        environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        return {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    first = load()
    assert len(first) == 1
    assert load() == first
    (path,) = first
    path.write_bytes(path.read_bytes()[:-1])
    assert load()[path] > first[path]
