"""Device kernels as NVRTC compiles them, and the arithmetic about them that Python repeats. No GPU is needed."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path

import emulator
import pytest
from pagoda.errors import BackendUnavailable
from pagoda.kernels import instances, loader

NVRTC = all(importlib.util.find_spec(name) for name in ("cuda", "nvidia")) and importlib.util.find_spec("nvidia.cu13")


@pytest.mark.skipif(not NVRTC, reason="the wheels of NVRTC are not installed")
def test_kernels_compile_and_do_not_spill() -> None:
    import compile_kernels

    kernels = {arch: compile_kernels.covering(arch) for arch in ("sm_80", "sm_90", "sm_120")}
    assert all(20 <= len(wanted) <= 60 for wanted in kernels.values())
    compiled = compile_kernels.compile_all(kernels)
    assert len(compiled) == sum(map(len, kernels.values()))
    assert [entry for entry in compiled if entry.spilled] == []
    assert all(entry.registers <= 255 for entry in compiled)


@pytest.mark.skipif(not NVRTC, reason="the wheels of NVRTC are not installed")
def test_a_compile_error_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compile_kernels

    folder = tmp_path / "pagoda"
    folder.mkdir()
    (folder / "broken.cuh").write_text("#pragma once\n__global__ void broken(int) { nonsense; }\n")
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    with pytest.raises(loader.KernelCompileError, match=r"broken\.cuh\(2\).*nonsense"):
        compile_kernels.compile_for("sm_80", "broken.cuh", ["broken"])


def test_the_fingerprint_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's cache of compiled kernels sees one line that includes a header: the hash in it stands for the rest."""
    seen = set()
    names = sorted(path.name for path in (loader.SOURCES / "pagoda").iterdir())
    assert {"machine.cuh", "formats.cuh", "unit.cuh", "attend.cuh"} <= set(names)
    for changed in [None, *names]:
        folder = tmp_path / str(changed) / "pagoda"
        folder.mkdir(parents=True)
        for name in names:
            text = (loader.SOURCES / "pagoda" / name).read_text()
            (folder / name).write_text(text + "// changed\n" if name == changed else text)
        monkeypatch.setattr(loader, "SOURCES", folder.parent)
        loader.fingerprint.cache_clear()
        seen.add(loader.program("attend.cuh"))
    loader.fingerprint.cache_clear()
    assert len(seen) == len(names) + 1


def test_python_knows_the_shapes_of_kernels() -> None:
    """Threads, rows, shared memory and partial results, computed in Python, are those of the templates."""
    formats = [("f16", "f16", "f32"), ("bf16", "bf16", "f16"), ("bf16", "f16", "bf16"), ("f32", "f16", "f16")]
    sizes = [(64, 64), (72, 40), (128, 128), (256, 256), (200, 136)]
    modes = ["decode", "prefill", "decode-deterministic", "prefill-deterministic"]
    chosen = [
        instances.attend(*types, *dims, 4, mode, shared_max << 10)
        for types, dims, mode, shared_max in product(formats, sizes, modes, (99, 227))
    ]
    chosen += [instances.attend("f16", "bf16", "f16", 576, 512, 4, mode, 227 << 10) for mode in modes]
    chosen += [instances.attend("bf16", instances.PART_OF_K, "f16", 576, 512, 4, mode, 99 << 10) for mode in modes]
    chosen += [instances.attend("f32", instances.PART_OF_K, "f16", 72, 40, 4, "decode", 99 << 10)]
    constants = {}
    for index, one in enumerate(chosen):
        shape = one.kernel.expression.removeprefix("pagoda::attend<").removesuffix(">") + "::Shape"
        for field in ("ROWS", "THREADS", "SHARED_BYTES", "PARTIAL"):
            constants[f"{field}_{index}"] = f"{shape}::{field}"
    library = emulator.compile("#include <pagoda/attend.cuh>", {}, constants)
    for index, one in enumerate(chosen):
        read = [library.constant(f"{field}_{index}") for field in ("ROWS", "THREADS", "SHARED_BYTES", "PARTIAL")]
        assert [one.rows, one.threads, one.shared_bytes, one.partial] == read, one


def test_what_no_kernel_does() -> None:
    with pytest.raises(BackendUnavailable, match="a K/V head"):
        instances.attend("f16", "f16", "f16", 128, 128, 65, "decode", 227 << 10)
    with pytest.raises(BackendUnavailable, match="shared memory"):
        instances.attend("f32", "f32", "f32", 2048, 2048, 1, "decode", 99 << 10)
