"""Runs the device code of cuda/ on the CPU: g++ compiles it against `include/`, which gives CUDA's words a meaning there.

Test-only. Threads are fibers, barriers are counted, asynchronous copies arrive when they are waited for and not before, and
the order in which threads and blocks run is drawn from a seed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

HERE = Path(__file__).parent
DEVICE_CODE = HERE.parent.parent / "cuda"
INCLUDE = HERE / "include"
FLAGS = ["-O1", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# What x86 forgives, or answers in another way than a GPU: emulator.cpp says so.
FLAGS += ["-fsanitize=alignment,shift-exponent,float-cast-overflow"]
# Where AddressSanitizer is loaded (`make test-memory`), a byte that is read outside of an array ends the process. Stacks are
# those of fibers, of which it knows nothing.
FORBID = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
FLAGS += ["-fsanitize=address", "--param", "asan-stack=0"] if FORBID else []
CANARY = 4096
POISON = 0xFF


class EmulatorError(Exception):
    """What a kernel did wrong."""


class Library:
    """Compiled kernels and constants."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def launch(
        self, name: str, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0, seed: int = 0
    ) -> None:
        """Runs a kernel to its end. Raises EmulatorError."""
        function = getattr(self._library, f"launch_{name}")
        function.restype = ctypes.c_char_p
        function.argtypes = [
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]
        size = ctypes.sizeof(arguments)
        error = function(grid, threads, shared_bytes, seed, ctypes.addressof(arguments), size)
        if error:
            raise EmulatorError(error.decode())

    def constant(self, name: str) -> int:
        """The value of a constant."""
        function = getattr(self._library, f"constant_{name}")
        function.restype = ctypes.c_longlong
        return int(function())


def require() -> None:
    """Skips a test where there is no compiler; with PAGODA_REQUIRE_EMULATOR=1 it fails."""
    if shutil.which("g++") is None:
        if os.environ.get("PAGODA_REQUIRE_EMULATOR") == "1":
            pytest.fail("g++ is not installed")
        pytest.skip("g++ is not installed")


def compile(
    source: str,
    kernels: Mapping[str, str],
    constants: Mapping[str, str] | None = None,
    *,
    device_code: Path = DEVICE_CODE,
) -> Library:
    """Compiles kernels, each a template instance that takes one struct, and constants. The result is kept on disk."""
    require()
    text = f"{source}\n{LAUNCHER}"
    for name, kernel in kernels.items():
        text += f"LAUNCHER({name}, ({kernel}))\n"
    for name, constant in (constants or {}).items():
        text += f'extern "C" long long constant_{name}() {{ return {constant}; }}\n'
    machine = _emulator()
    known = [machine.name, *_contents(device_code)]
    return Library(_built("so", text, known, [f"-I{device_code}", "-include", "emulator.h", "-shared", str(machine)]))


def _emulator() -> Path:
    """The emulator's own object file: to compile it takes as long as a kernel."""
    return _built("o", (HERE / "emulator.cpp").read_text(), _contents(INCLUDE), ["-c"])


def _contents(folder: Path) -> list[str]:
    """The name and text of every file, the same wherever the folder lies."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [part for path in files for part in (str(path.relative_to(folder)), path.read_text())]


def _built(suffix: str, program: str, known: list[str], arguments: list[str]) -> Path:
    """What g++ makes of a program, kept on disk by a hash of it, of FLAGS and of what else is known. Raises EmulatorError."""
    folder = Path(tempfile.gettempdir()) / f"pagoda-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = hashlib.sha256("\0".join([program, *known, *FLAGS]).encode())
    path = folder / f"{key.hexdigest()[:32]}.{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = Path(scratch, path.name)
            command = ["g++", *FLAGS, f"-I{INCLUDE}", "-x", "c++", "-", "-x", "none", *arguments, "-o", str(result)]
            done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulatorError(done.stderr[:4000])
            result.replace(path)
    return path


LAUNCHER = r"""
#include <string>
template <class Arguments>
const char* launch(void (*kernel)(Arguments), unsigned grid, unsigned threads, size_t shared, uint64_t seed,
                   const void* arguments, size_t bytes) {
    static std::string error;
    error = bytes == sizeof(Arguments) ? "" : "arguments have " + std::to_string(bytes) + " bytes, not " +
                                                  std::to_string(sizeof(Arguments));
    if (error.empty()) {
        error = emulator::launch({grid}, threads, shared, seed,
                                 [&] { kernel(*static_cast<const Arguments*>(arguments)); });
    }
    return error.empty() ? nullptr : error.c_str();
}
#define UNWRAP(...) __VA_ARGS__
#define LAUNCHER(name, kernel)                                                                                  \
    extern "C" const char* launch_##name(unsigned grid, unsigned threads, size_t shared, uint64_t seed,         \
                                         const void* arguments, size_t bytes) {                                 \
        return launch(UNWRAP kernel, grid, threads, shared, seed, arguments, bytes);                            \
    }
"""


class Guarded:
    """An array of poison (NaN in every float format) between canaries."""

    def __init__(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._bytes = np.full(size + 2 * CANARY + 4096, 0xFF, np.uint8)
        self._start = CANARY + -(self._bytes.ctypes.data + CANARY) % 4096
        self._size = size
        self._canary = (np.arange(len(self._bytes)) * 7 + 13).astype(np.uint8)
        outside = np.ones(len(self._bytes), bool)
        outside[self._start : self._start + size] = False
        self._outside = outside
        self._bytes[outside] = self._canary[outside]
        if FORBID:
            for first, last in ((0, self._start), (self._start + size, len(self._bytes))):
                FORBID(ctypes.c_void_p(self._bytes.ctypes.data + first), ctypes.c_size_t(last - first))
        self.array: npt.NDArray[Any] = self._bytes[self._start : self._start + size].view(dtype).reshape(shape)

    @property
    def address(self) -> int:
        """Of the first byte; aligned to 4096, as a disk wants it."""
        return int(self._bytes.ctypes.data + self._start)

    def check(self) -> None:
        """Raises EmulatorError if a byte around the array has changed."""
        wrong = np.flatnonzero(self._outside & (self._bytes != self._canary))
        if len(wrong):
            raise EmulatorError(f"wrote {int(wrong[0]) - self._start} bytes from the start of an array of {self._size}")
