"""Compiles device kernels by NVRTC, without a GPU: `make kernels` does what `every` lists, for every architecture.

    .venv/bin/python tools/compile_kernels.py [--archs sm_80,sm_90 | --covering]

Prints registers, spilled bytes and code size of each. Fails if one spills registers to memory, or has arrays there. Needs
the wheels nvidia-cuda-nvrtc, nvidia-cuda-runtime (headers) and cuda-bindings, which are among the development dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from pagoda.errors import BackendUnavailable
from pagoda.kernels import instances, loader
from pagoda.kernels.instances import Kernel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COVERED = ("sm_80", "sm_90", "sm_120")
"""Those that the tests compile for."""

SHARED_MAX = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that a thread block can have (CUDA C++ Programming Guide, technical specifications)."""

SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512), (576, 512))
"""Elements of a K and of a V row in today's models."""

PART_SIZES = ((128, 128), (576, 512))
"""Those where V can be the first elements of K."""

Layer = tuple[tuple[str, str, str], tuple[int, int]]
"""Types of K, V and queries, and elements of a K and of a V row."""

Attend = tuple[Layer, int, str]
"""A layer, query heads of a K/V head, and the mode."""

MODES = ("decode", "verify", "prefill", "common", "decode-deterministic", "prefill-deterministic")
GROUPS = (1, 4, 8, 16)
"""Query heads of a K/V head."""

QUANTISED = (
    *((name, name) for name in instances.QUANTISED),
    ("f16", "q8_0"),
    ("bf16", "q8_0"),
    ("q8_0", "q5_0"),
    ("q8_0", "q4_0"),
    ("fp8_e4m3", "q4_0"),
)
"""Formats of K and V that are worth it: one for both, or K a step above V."""

QUANTISED_SIZES = ((64, 64), (128, 128), (256, 256), (512, 512))

DERIVED = (512, 512)
"""Of rows where K is made from V."""

DERIVED_GROUPS = (8, 16)

LATENT_GROUPS = (16, 128)
"""Those where V is a part of K."""

OPTIONS = (*loader.OPTIONS, "-ftz=true", "--device-as-default-execution-space")
"""The options of the loader, and those that CuPy adds."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. spilled: bytes of stack, of stores and of loads that a thread needs for lack of registers."""

    expression: str
    arch: str
    registers: int
    spilled: int
    cubin_bytes: int


def every(arch: str) -> list[Kernel]:
    """What today's models need on an architecture. Queries have K's type or f32; over quantised rows bf16 or f32."""
    halves = ("f16", "bf16")
    types = [(k, v, q) for k, v in product(halves, repeat=2) for q in (k, "f32")] + [("f32", "f32", "f32")]
    quantised = [(k, v, q) for (k, v), q in product(QUANTISED, ("bf16", "f32"))]
    parts = [(k, instances.PART_OF_K, q) for k in halves for q in (k, "f32")]
    parts += [(k, instances.PART_OF_K, "bf16") for k in instances.QUANTISED]
    derived = [(instances.FROM_V, v, q) for v, q in product((*halves, *instances.QUANTISED), ("bf16", "f32"))]
    appends = [instances.append(*names, 128) for names in product(instances.NAMES, repeat=3)]
    appends += [instances.append(*pair, "bf16", 128) for pair in QUANTISED]
    appends += [instances.append(name, name, "bf16", 512) for name in instances.QUANTISED]
    centers = [instances.center(given) for given in instances.NAMES]
    attends: list[Attend] = [
        *product(product(types, SIZES), GROUPS, MODES),
        *product(product(quantised, QUANTISED_SIZES), GROUPS, MODES),
        *product(product(parts, PART_SIZES), LATENT_GROUPS, MODES),
        *product(product(derived, [DERIVED]), DERIVED_GROUPS, MODES),
    ]
    return _kernels(arch, appends + centers, attends)


def covering(arch: str) -> list[Kernel]:
    """A few of each kind, at most 50: those that need the most registers, every format, and a third of the rest."""
    appends = [instances.append("f16", "bf16", "f32", 128), instances.center("f16")]
    appends += [instances.append("q8_0", "q4_0", "f32", 128), instances.append("nvfp4", "q5_0", "f32", 1024)]
    floats, halves, codes = ("f16", "f16", "f32"), ("bf16", "bf16", "bf16"), ("q4_0", "q4_0", "bf16")
    latent = ("bf16", instances.PART_OF_K, "bf16")
    derived = [(instances.FROM_V, v, q) for v, q in (("q5_0", "bf16"), ("bf16", "bf16"), ("f16", "f32"))]
    prefilled: list[Layer] = [
        *((halves, both) for both in ((256, 256), (512, 512))),
        *((latent, both) for both in PART_SIZES),
        (codes, (128, 128)),
        (("f16", "f16", "bf16"), (128, 128)),
        (("mxfp4", "nvfp4", "bf16"), (128, 128)),
        (("q8_0", "q8_0", "bf16"), (256, 256)),
        (("fp8_e4m3", "fp8_e4m3", "f16"), (256, 256)),
        (("f16", "int8", "f32"), (256, 256)),
    ]
    others: list[Layer] = [
        *((halves, both) for both in ((64, 64), (80, 80))),
        *((floats, both) for both in ((192, 128), (256, 256))),
        (("q8_0", "q4_0", "f32"), (512, 512)),
    ]
    everywhere: list[Attend] = [
        *product([(halves, (128, 128))], [4], MODES),
        *product(prefilled, [4], ["prefill"]),
        ((codes, (128, 128)), 4, "verify"),
        ((derived[0], DERIVED), 16, "prefill"),
    ]
    in_turn: list[Attend] = [
        *product([(floats, (128, 128))], [4], MODES),
        *product(prefilled, [4], ["decode"]),
        *product(others, [4], ["decode", "prefill"]),
        *(((names, DERIVED), 16, "prefill") for names in derived[1:]),
        ((("f32", "f16", "bf16"), (256, 256)), 4, "decode"),
        ((("q5_0", "q5_0", "bf16"), (128, 128)), 4, "decode"),
        ((latent, (576, 512)), 128, "decode"),
    ]
    return _kernels(arch, appends, everywhere + in_turn[COVERED.index(arch) :: len(COVERED)])


def _kernels(arch: str, others: list[Kernel], attends: list[Attend]) -> list[Kernel]:
    """Kernels of attention that fit the architecture, and those with a single instance; each once."""
    kernels = {instances.UNPACK, instances.MOVE, instances.READ, *others}
    for (types, sizes), group, mode in attends:
        with contextlib.suppress(BackendUnavailable):
            kernels.add(instances.attend(*types, *sizes, group, mode, SHARED_MAX[arch] << 10).kernel)
    return sorted(kernels, key=lambda kernel: kernel.expression)


def compile_for(arch: str, kernel: Kernel) -> Compiled:
    """Compiles a kernel with the options that CuPy gives. Raises KernelCompileError."""
    from cuda.bindings import nvrtc

    try:
        program, log = _program(arch, loader.program(kernel.header), [kernel.expression], loader.SOURCES)
    except loader.KernelCompileError as error:
        message = loader.explain(kernel, str(error), arch, nvrtc.nvrtcVersion()[1:])
        raise loader.KernelCompileError(message) from None
    (name,) = _lowered(program, [kernel.expression])
    spilled = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    pattern = rf"entry function '{name}'.*?{spilled}.*?Used (\d+) registers"
    found = re.search(pattern, log, re.S)
    assert found is not None, log
    *memory, registers = map(int, found.groups())
    return Compiled(kernel.expression, arch, registers, sum(memory), int(nvrtc.nvrtcGetCUBINSize(program)[1]))


def ptx(arch: str, source: str, kernels: list[str], device_code: Path) -> tuple[str, list[str]]:
    """The instructions of kernels, and their names there. device_code: the folder that `source` includes from."""
    from cuda.bindings import nvrtc

    program, _ = _program(arch, source, kernels, device_code)
    text = _written(partial(nvrtc.nvrtcGetPTX, program), nvrtc.nvrtcGetPTXSize(program)[1])
    return text, _lowered(program, kernels)


def _program(arch: str, source: str, kernels: list[str], device_code: Path) -> tuple[Any, str]:
    """The program that NVRTC makes of kernels, and its log. Raises KernelCompileError."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    for kernel in kernels:
        nvrtc.nvrtcAddNameExpression(program, kernel.encode())
    options = [
        f"--gpu-architecture={arch}",
        *OPTIONS,
        f"-I{device_code}",
        f"-I{toolkit_headers()}",
        "--ptxas-options=-v",
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _written(partial(nvrtc.nvrtcGetProgramLog, program), nvrtc.nvrtcGetProgramLogSize(program)[1])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise loader.KernelCompileError(log)
    return program, log


def _written(write: Callable[[bytes], object], size: int) -> str:
    """The text of `size` bytes that NVRTC writes, including the zero at the end."""
    # It writes into a bytes object that nothing else may share; Python shares those of one byte.
    text = bytes(size + 1)
    write(text)
    return text.rstrip(b"\0").decode()


def _lowered(program: Any, kernels: list[str]) -> list[str]:
    from cuda.bindings import nvrtc

    return [nvrtc.nvrtcGetLoweredName(program, kernel.encode())[1].decode() for kernel in kernels]


def toolkit_headers() -> Path:
    """The folder of CUDA's own headers."""
    import nvidia.cu13

    return Path(nvidia.cu13.__path__[0]) / "include"


def _cached(arch: str, kernel: Kernel) -> Compiled:
    """`compile_for`, cached under a hash of all inputs."""
    inputs = [version("nvidia-cuda-nvrtc"), loader.fingerprint(), *OPTIONS, arch, kernel.header, kernel.expression]
    folder = Path(tempfile.gettempdir()) / f"pagoda-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:32]}.json"
    if path.exists():
        return Compiled(**json.loads(path.read_text()))
    compiled = compile_for(arch, kernel)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(json.dumps(asdict(compiled)))
    Path(file.name).replace(path)
    return compiled


def compile_all(kernels: dict[str, list[Kernel]]) -> Iterator[Compiled]:
    """Compiles kernels of each architecture, on all cores."""
    pairs = [(arch, kernel) for arch, wanted in kernels.items() for kernel in wanted]
    with ProcessPoolExecutor() as pool:
        yield from pool.map(_cached, *zip(*pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--archs", default=",".join(ARCHS))
    choice.add_argument("--covering", action="store_true", help="only what the tests compile")
    arguments = parser.parse_args()
    archs = arguments.archs.split(",")
    if set(archs) - set(ARCHS):
        parser.error(f"--archs {arguments.archs}: of {', '.join(ARCHS)}")
    wanted, chosen = (covering, COVERED) if arguments.covering else (every, archs)
    kernels = {arch: wanted(arch) for arch in chosen}
    count, spilling = 0, 0
    for one in compile_all(kernels):
        figures = f"{one.registers:>4} registers {one.spilled:>5} spilled {one.cubin_bytes:>7} bytes"
        print(f"{one.arch:>7} {figures}  {one.expression}", flush=True)
        count, spilling = count + 1, spilling + bool(one.spilled)
    print(f"{count} kernels, {spilling} spill")
    sys.exit(bool(spilling))


if __name__ == "__main__":
    main()
