"""Compiles device kernels by NVRTC, without a GPU: `make kernels` does every instance for every architecture.

    .venv/bin/python tools/compile_kernels.py [--archs sm_80,sm_90] [--covering]

Prints registers, spills and the size of each. Fails where one spills registers to memory. Needs the wheels nvidia-cuda-nvrtc,
nvidia-cuda-runtime (headers) and cuda-bindings, which are among the development dependencies.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from pagoda.errors import BackendUnavailable
from pagoda.kernels import instances, loader
from pagoda.kernels.instances import Kernel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SHARED_MAX = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that a thread block can have (CUDA C++ Programming Guide, technical specifications)."""

MODES = ("decode", "prefill", "decode-deterministic")


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel. spilled: bytes of stores and loads."""

    expression: str
    arch: str
    registers: int
    spilled: int
    cubin_bytes: int


def every(arch: str) -> list[Kernel]:
    """All instances of the head sizes of today's models that fit an architecture."""
    kernels = [instances.UNPACK]
    kernels += [instances.append(k, v, given) for k, v, given in product(instances.NAMES, repeat=3)]
    sizes = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512), (576, 512)]
    for (dim, v_dim), (k, v, q), mode in product(sizes, product(instances.NAMES, repeat=3), MODES):
        kernels += _fitting(arch, k, v, q, dim, v_dim, mode)
    return sorted(set(kernels), key=lambda kernel: kernel.expression)


def covering(arch: str) -> list[Kernel]:
    """A few of each kind: at most 60."""
    kernels = [instances.UNPACK, instances.append("f16", "bf16", "f32"), instances.append("f32", "f16", "bf16")]
    sizes = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)]
    for (dim, v_dim), mode in product(sizes, MODES):
        for formats in (("f16", "f16", "f32"), ("bf16", "bf16", "bf16")):
            kernels += _fitting(arch, *formats, dim, v_dim, mode)
    kernels += _fitting(arch, "f32", "f32", "f32", 128, 128, "decode")
    kernels += _fitting(arch, "f32", "f16", "bf16", 256, 256, "decode")
    return sorted(set(kernels), key=lambda kernel: kernel.expression)


def _fitting(arch: str, k: str, v: str, q: str, dim: int, v_dim: int, mode: str) -> list[Kernel]:
    try:
        return [instances.attend(k, v, q, dim, v_dim, 4, mode, SHARED_MAX[arch] << 10).kernel]
    except BackendUnavailable:
        return []


def compile_for(arch: str, header: str, expressions: list[str]) -> list[Compiled]:
    """Compiles instances of one header. Raises KernelCompileError with the first complaints."""
    import nvidia.cu13
    from cuda.bindings import nvrtc

    includes = [loader.SOURCES, Path(nvidia.cu13.__path__[0]) / "include"]
    options = [f"--gpu-architecture={arch}", *loader.OPTIONS, *(f"-I{path}" for path in includes), "--ptxas-options=-v"]
    _, program = nvrtc.nvrtcCreateProgram(loader.program(header).encode(), header.encode(), 0, [], [])
    for expression in expressions:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode().rstrip("\0")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise loader.KernelCompileError(f"{header} for {arch}: {text[:2000]}")
    size = int(nvrtc.nvrtcGetCUBINSize(program)[1])
    used = {}
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    for name, stores, loads, registers in re.findall(pattern, text, re.S):
        used[name] = (int(registers), int(stores) + int(loads))
    names = {text: nvrtc.nvrtcGetLoweredName(program, text.encode())[1].decode() for text in expressions}
    return [Compiled(text, arch, *used[names[text]], size // len(expressions)) for text in expressions]


def _cached(arch: str, header: str, expressions: list[str]) -> list[Compiled]:
    """`compile_for`, remembered by a hash of all sources."""
    key = hashlib.sha256("\0".join([loader.fingerprint(), arch, header, *expressions]).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"pagoda-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.json"
    if path.exists():
        return [Compiled(**entry) for entry in json.loads(path.read_text())]
    compiled = compile_for(arch, header, expressions)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(json.dumps([asdict(entry) for entry in compiled]))
    Path(file.name).replace(path)
    return compiled


def _pieces(kernels: dict[str, list[Kernel]]) -> Iterator[tuple[str, str, list[str]]]:
    """Work for one process: a few instances of one header and architecture."""
    for arch, wanted in kernels.items():
        headers = defaultdict(list)
        for kernel in wanted:
            headers[kernel.header].append(kernel.expression)
        for header, expressions in headers.items():
            for start in range(0, len(expressions), 8):
                yield arch, header, expressions[start : start + 8]


def compile_all(kernels: dict[str, list[Kernel]]) -> list[Compiled]:
    """Compiles kernels of each architecture in two processes."""
    with ProcessPoolExecutor(2) as pool:
        done = pool.map(_cached, *zip(*_pieces(kernels), strict=True))
        return [entry for entries in done for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=",".join(ARCHS))
    parser.add_argument("--covering", action="store_true", help="only the instances that the tests compile")
    arguments = parser.parse_args()
    choose = covering if arguments.covering else every
    compiled = compile_all({arch: choose(arch) for arch in arguments.archs.split(",")})
    for entry in compiled:
        print(f"{entry.arch:>7} {entry.registers:>4} registers {entry.spilled:>5} spilled  {entry.expression}")
    spilling = [entry for entry in compiled if entry.spilled]
    print(f"{len(compiled)} kernels, {len(spilling)} spill")
    sys.exit(bool(spilling))


if __name__ == "__main__":
    main()
