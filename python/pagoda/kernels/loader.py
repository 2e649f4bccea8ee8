"""Compiles and loads device code: NVRTC compiles it at first use, through CuPy, which keeps the result on disk.

CuPy (from 14.2 on) names a result after the text of `program`, the expression, the options, the architecture and the version
of NVRTC; if a file does not verify, it compiles again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagoda.errors import PagodaError
from pagoda.kernels.instances import Kernel

SOURCES = Path(__file__).parent / "cuda"
"""The include folder of `#include <pagoda/...>`."""

OPTIONS = ("--std=c++17",)

TOOLKIT = 'pip install "pagoda-kv[cuda13]" (or [cuda12]), or set CUDA_PATH to the folder of a CUDA toolkit'
"""How to get NVRTC and CUDA's headers."""

PATIENCE_S = 0.5
"""If loading takes longer than this, the kernel is being compiled: loading from disk takes some milliseconds."""

ERRORS_SHOWN = 3
"""Later ones mostly follow from the first."""

_log = logging.getLogger("pagoda.kernels")


class KernelCompileError(PagodaError):
    """A kernel does not compile or load. The message names the kernel, the first errors and, for known causes, a remedy."""


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """A hash of all device code. It is part of `program`, because CuPy's cache does not look into included files."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def program(header: str) -> str:
    """The text that is compiled for kernels of a header."""
    return f"// {fingerprint()}\n#include <pagoda/{header}>\n"


def load(kernel: Kernel) -> Any:
    """The kernel as a CuPy function, for the current device. Raises KernelCompileError."""
    import cupy

    options = (*OPTIONS, f"-I{SOURCES}")
    module = cupy.RawModule(code=program(kernel.header), options=options, name_expressions=[kernel.expression])
    try:
        with _announced(kernel):
            return module.get_function(kernel.expression)
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        arch = f"sm_{cupy.cuda.Device().compute_capability}"
        raise KernelCompileError(explain(kernel, str(error), arch, nvrtc_version())) from error


def nvrtc_version() -> tuple[int, int] | None:
    """The version of the NVRTC that CuPy finds; None if it finds none."""
    import cupy

    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
    except RuntimeError:
        return None
    return major, minor


def explain(kernel: Kernel, log: str, arch: str, nvrtc: tuple[int, int] | None) -> str:
    """The message of a KernelCompileError. log: the output of NVRTC or CuPy. nvrtc: the version of NVRTC."""
    lines = [line.strip() for line in log.replace(f"{SOURCES}/", "").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror: ", line)] or lines
    message = [f"{kernel.short} for {arch}:", *errors[:ERRORS_SHOWN]]
    if nvrtc is None:
        message.append(f"NVRTC is missing: {TOOLKIT}")
    elif re.search(r'cannot open source file "cuda_\w+\.h"|Failed to find CUDA headers', log):
        message.append(f"CUDA's headers are missing: {TOOLKIT}")
    elif re.search(r"invalid value for --gpu-architecture|CUDA_ERROR_NO_BINARY_FOR_GPU", log):
        message.append(f"NVRTC {nvrtc[0]}.{nvrtc[1]} has no code for {arch}: install a newer CUDA, or CuPy for one")
    return "\n  ".join(message)


@contextlib.contextmanager
def _announced(kernel: Kernel) -> Iterator[None]:
    """Announces the compilation if loading takes long."""
    shown = contextlib.ExitStack()
    timer = threading.Timer(PATIENCE_S, lambda: shown.enter_context(_compiling(kernel)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        shown.close()


@contextlib.contextmanager
def _compiling(kernel: Kernel) -> Iterator[None]:
    """Shows a line that vanishes on a terminal; elsewhere logs two records to `pagoda.kernels`."""
    text = f"compiling {kernel.short} (first use; kept in {cache_folder()})"
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(text)):
            yield
        return
    _log.info("%s", text)
    start = time.monotonic() - PATIENCE_S
    yield
    _log.info("compiled %s: %.1f s", kernel.short, time.monotonic() - start)


def cache_folder() -> Path:
    """Where CuPy keeps compiled kernels. Like CuPy, expands ~ only in the default, and only if there is a home."""
    return Path(os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")))  # noqa: PTH111
