"""Runs the device code of cuda/ on the CPU: g++ compiles it against `include/`, which defines CUDA's words there.

Test-only. Threads are fibers, barriers are counted, asynchronous copies arrive when they are waited for and not before,
and the order in which threads and blocks run is drawn from a seed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

HERE = Path(__file__).parent
DEVICE_CODE = HERE.parent.parent / "cuda"
INCLUDE = HERE / "include"
FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# Operations that x86 allows or computes otherwise than a GPU; emulator.cpp reports them.
FLAGS += ["-fsanitize=alignment,shift-exponent,float-cast-overflow"]
# Under AddressSanitizer (`make test-memory`), a read outside an array ends the process. Stacks are left out: they are those
# of fibers, which it does not know.
FORBID = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
FLAGS += ["-fsanitize=address", "--param", "asan-stack=0"] if FORBID else []
CANARY = 4096
POISON = 0xFF


class EmulatorError(Exception):
    """An error of a kernel."""


class Library:
    """Compiled kernels and constants, of one program or several."""

    def __init__(self, path: Path) -> None:
        self._programs: list[ctypes.CDLL] = []
        self.add(path)

    def add(self, path: Path) -> None:
        """Adds another program."""
        self._programs.append(ctypes.CDLL(str(path)))

    def launch(
        self, name: str, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0, seed: int = 0
    ) -> None:
        """Runs a kernel to its end. Raises EmulatorError."""
        function = self._function(f"launch_{name}")
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
        function = self._function(f"constant_{name}")
        function.restype = ctypes.c_longlong
        return int(function())

    def _function(self, name: str) -> Any:
        return next(getattr(program, name) for program in self._programs if hasattr(program, name))


def require() -> None:
    """Skips the test if there is no compiler; with PAGODA_REQUIRE_EMULATOR=1 it fails."""
    if shutil.which("g++") is None:
        lack("g++ is not installed")


def lack(what: str) -> None:
    """Skips or fails a test that the emulator cannot run here."""
    if os.environ.get("PAGODA_REQUIRE_EMULATOR") == "1":
        pytest.fail(what)
    pytest.skip(what)


def compile(
    source: str,
    kernels: Mapping[str, str],
    constants: Mapping[str, str] | None = None,
    *,
    device_code: Path = DEVICE_CODE,
    optimise: str = "-O1",
) -> Library:
    """Compiles kernels, each a template instance that takes one struct, and constants. The result is cached on disk.

    optimise: "-O0" compiles faster, and its kernels run slower."""
    for name, kernel in kernels.items():
        source += f"\nLAUNCHER({name}, ({kernel}))"
    source = with_constants(source, constants or {})
    return Library(program(source, contents(device_code), [f"-I{device_code}"], optimise))


def with_constants(source: str, constants: Mapping[str, str]) -> str:
    """A source with added functions that return constants."""
    functions = [f'extern "C" long long constant_{name}() {{ return {value}; }}' for name, value in constants.items()]
    return "\n".join([source, *functions])


def program(source: str, known: list[str], options: list[str], optimise: str) -> Path:
    """Compiles C++ that has LAUNCHER(name, (kernel)) for each kernel. known: all that it includes besides the emulator."""
    require()
    # A precompiled header: parsing it takes a quarter of the time that a kernel takes.
    header = _built(
        "h.gch", "#include <emulator.h>\n#include <launcher.h>", [*contents(INCLUDE), _version()], [optimise]
    )
    # An object file of its own: compiling the emulator takes as long as a kernel.
    machine = _built("o", (HERE / "emulator.cpp").read_text(), contents(INCLUDE), ["-O3", "-c"])
    options = [optimise, *options, "-include", str(header.with_suffix("")), "-shared", str(machine)]
    return _built("so", source, known, options)


@cache
def _version() -> str:
    """The compiler's version: it rejects headers that another one has compiled."""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def contents(folder: Path) -> list[str]:
    """The relative path and text of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [part for path in files for part in (str(path.relative_to(folder)), path.read_text())]


def _built(suffix: str, source: str, known: list[str], options: list[str]) -> Path:
    """Compiles a program with g++. known: the other inputs, for the hash. Raises EmulatorError."""
    language = "c++-header" if suffix.endswith("gch") else "c++"

    def build(path: Path) -> None:
        written = path.with_name("kernel.cpp")
        written.write_text(source)
        command = ["g++", *FLAGS, f"-I{INCLUDE}", "-x", language, str(written), "-x", "none", *options, "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulatorError(done.stderr[:4000])

    # The contents of include folders are hashed, not their paths.
    flags = [option for option in (*FLAGS, *options) if not option.startswith("-I")]
    return kept(suffix, [source, *known, *flags], build)


def kept(suffix: str, inputs: list[str], make: Callable[[Path], None]) -> Path:
    """A file cached on disk under a hash of its inputs."""
    folder = Path(tempfile.gettempdir()) / f"pagoda-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:32]}.{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = Path(scratch, path.name)
            make(result)
            result.replace(path)
    return path


class Guarded:
    """An array between canaries, filled with poison (NaN in every float format) or another byte."""

    def __init__(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike, fill: int = POISON) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Zeros take no memory until they are touched.
        self._bytes = np.zeros(size + 2 * CANARY + 4096, np.uint8)
        if fill:
            self._bytes.fill(fill)
        self._start = CANARY + -(self._bytes.ctypes.data + CANARY) % 4096
        self._size = size
        self._around = [(-self._start, self._bytes[: self._start]), (size, self._bytes[self._start + size :])]
        for _, part in self._around:
            part[:] = _canary(len(part))
        if FORBID:
            for first, last in ((0, self._start), (self._start + size, len(self._bytes))):
                FORBID(ctypes.c_void_p(self._bytes.ctypes.data + first), ctypes.c_size_t(last - first))
        self.array: npt.NDArray[Any] = self._bytes[self._start : self._start + size].view(dtype).reshape(shape)

    @property
    def address(self) -> int:
        """Of the first byte; aligned to 4096, as the disk tier needs it."""
        return int(self._bytes.ctypes.data + self._start)

    def check(self) -> None:
        """Raises EmulatorError if a byte around the array has changed."""
        for first, part in self._around:
            wrong = np.flatnonzero(part != _canary(len(part)))
            if len(wrong):
                raise EmulatorError(f"wrote {first + int(wrong[0])} bytes from the start of an array of {self._size}")


def _canary(size: int) -> npt.NDArray[np.uint8]:
    return (np.arange(size) * 7 + 13).astype(np.uint8)
