"""Device code on its way to the device: NVRTC compiles it at its first use, through CuPy, which keeps the result on disk."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from pagoda.errors import PagodaError
from pagoda.kernels.instances import Kernel

SOURCES = Path(__file__).parent / "cuda"
"""The folder that `#include <pagoda/...>` is looked up in."""

OPTIONS = ("--std=c++17",)


class KernelCompileError(PagodaError):
    """NVRTC refused a kernel: which, and its first complaints."""


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """A hash of all device code: caches of compiled kernels see only the file that includes it."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def program(header: str) -> str:
    """The text that is compiled for kernels of a header."""
    return f"// {fingerprint()}\n#include <pagoda/{header}>\n"


def load(kernel: Kernel) -> Any:
    """The kernel as CuPy calls it, for the current device. Raises KernelCompileError."""
    import cupy

    try:
        module = cupy.RawModule(
            code=program(kernel.header),
            options=(*OPTIONS, f"-I{SOURCES}"),
            name_expressions=[kernel.expression],
        )
        module.compile()
        return module.get_function(kernel.expression)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelCompileError(f"{kernel.expression}: {str(error)[:2000]}") from error
