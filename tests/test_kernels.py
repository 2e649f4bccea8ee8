"""Device kernels as compiled by NVRTC, and the arithmetic about them that Python repeats. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path

import emulator
import pytest
from emulator import ptx
from pagoda.errors import BackendUnavailable
from pagoda.kernels import instances, loader
from pagoda.kernels.instances import Kernel


@pytest.fixture(autouse=True)
def _own_fingerprint() -> Iterator[None]:
    """Device code that a test puts in place of ours leaves no fingerprint: results are kept on disk under it."""
    yield
    loader.fingerprint.cache_clear()


needs_nvrtc = pytest.mark.skipif(not ptx.NVRTC, reason="the wheels of NVRTC are not installed")


@needs_nvrtc
def test_kernels_compile_and_do_not_spill() -> None:
    import compile_kernels

    kernels = {arch: compile_kernels.covering(arch) for arch in compile_kernels.COVERED}
    for arch, wanted in kernels.items():
        assert 20 <= len(wanted) <= 50
        for mode in compile_kernels.MODES:
            shared_max = compile_kernels.SHARED_MAX[arch] << 10
            assert instances.attend("bf16", "bf16", "bf16", 128, 128, 4, mode, shared_max).kernel in wanted
        assert {instances.MOVE, instances.READ, instances.UNPACK} <= set(wanted)
        assert sum("PartOfK" in kernel.expression for kernel in wanted) >= 2
        assert all(sum(name in kernel.expression for kernel in wanted) for name in instances.QUANTISED.values())
    everything = " ".join(kernel.expression for wanted in kernels.values() for kernel in wanted)
    for engine, names in (("Few", ("Q8_0", "Q5_0", "Q4_0")), ("Many", instances.QUANTISED.values()), ("Core", ["F32"])):
        assert all(re.search(rf"{engine}Shape<[^>]*\b{name}\b", everything) for name in names)
    compiled = list(compile_kernels.compile_all(kernels))
    assert len(compiled) == sum(map(len, kernels.values()))
    assert [entry for entry in compiled if entry.spilled] == []
    assert all(entry.registers <= 255 for entry in compiled)


@needs_nvrtc
def test_an_array_in_memory_counts_as_spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array is in local memory if an index is unknown at compile time."""
    import compile_kernels

    folder = tmp_path / "pagoda"
    folder.mkdir()
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    for index in ("i", "a[i]"):
        lines = f"int x[8] = {{}}; for (int i = 0; i < 8; ++i) x[{index}] += a[i]; *a = x[2] + x[3];"
        (folder / "array.cuh").write_text(f"__global__ void array(int* a) {{ {lines} }}\n")
        compiled = compile_kernels.compile_for("sm_80", Kernel("array.cuh", "array"))
        assert (compiled.spilled > 0) == (index == "a[i]")


def test_make_kernels_knows_its_architectures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compile_kernels

    monkeypatch.setattr("sys.argv", ["compile_kernels.py", "--archs", "sm_80,sm_99"])
    with pytest.raises(SystemExit, match="2"):
        compile_kernels.main()
    assert "--archs sm_80,sm_99: of sm_80, sm_86, " in capsys.readouterr().err


def test_make_kernels_does_what_models_ask_for() -> None:
    import compile_kernels

    for arch, shared in compile_kernels.SHARED_MAX.items():
        kernels = set(compile_kernels.every(arch))
        assert len(kernels) <= 760
        for (v, q), mode in product((("bf16", "bf16"), ("q8_0", "bf16"), ("f16", "f32")), compile_kernels.MODES):
            assert instances.attend(instances.FROM_V, v, q, 512, 512, 16, mode, shared << 10).kernel in kernels
        for half in ("f16", "bf16"):
            for q, dim, group, mode in product((half, "f32"), (64, 128, 256), (1, 7, 16), compile_kernels.MODES):
                assert instances.attend(half, half, q, dim, dim, group, mode, shared << 10).kernel in kernels
            for (k, v), dim, mode in product(compile_kernels.QUANTISED, (64, 128, 256), compile_kernels.MODES):
                assert instances.attend(k, v, "bf16", dim, dim, 8, mode, shared << 10).kernel in kernels
            for group in (16, 128):
                latent = instances.attend(half, instances.PART_OF_K, half, 576, 512, group, "decode", shared << 10)
                assert latent.kernel in kernels


def test_docs_quote_as_many_kernels_as_there_are() -> None:
    import compile_kernels

    root = Path(__file__).parent.parent
    found = {arch: len(compile_kernels.every(arch)) for arch in compile_kernels.ARCHS}
    quoted = re.findall(
        r"the\s(\d+) (?:instances )?of ((?:sm_\d+(?:, | and )?)+)", (root / "docs/kernels.md").read_text()
    )
    assert {arch: int(count) for count, archs in quoted for arch in re.findall(r"sm_\d+", archs)} == found
    few, many = min(found.values()), max(found.values())
    assert f"compiles {few} to {many} kernels" in (root / "CONTRIBUTING.md").read_text()


@needs_nvrtc
def test_docs_quote_registers_as_they_are() -> None:
    import compile_kernels

    text = (Path(__file__).parent.parent / "docs/kernels.md").read_text()
    (quoted,) = re.findall(r"sm_90, NVRTC ([\d.]+)\)", text)
    if not version("nvidia-cuda-nvrtc").startswith(f"{quoted}."):
        pytest.skip(f"the figures are of NVRTC {quoted}")
    pattern = r"\| ((decode|prefill) (\d+), (\w+) queries(?: over (\w+))?, \d stages) \| (\d+) \| ([\d.]+) KB \|"
    rows = re.findall(pattern, text)
    assert len(rows) >= 2
    ones = [
        instances.attend(over or "bf16", over or "bf16", q, int(dim), int(dim), 4, mode, 227 << 10)
        for _, mode, dim, q, over, *_ in rows
    ]
    found = []
    all_compiled = compile_kernels.compile_all({"sm_90": [one.kernel for one in ones]})
    for (_, mode, dim, q, over, *_), one, compiled in zip(rows, ones, all_compiled, strict=True):
        stages = one.kernel.expression.removesuffix(">>>").split(", ")[-1]
        name = f"{mode} {dim}, {q} queries{' over ' * bool(over)}{over}, {stages} stages"
        found.append((name, mode, dim, q, over, str(compiled.registers), f"{one.shared_bytes / 1024:.1f}"))
    assert rows == found


@needs_nvrtc
def test_a_compile_error_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compile_kernels

    folder = tmp_path / "pagoda"
    folder.mkdir()
    (folder / "broken.cuh").write_text("#pragma once\n__global__ void broken(int) { nonsense; }\n")
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    with pytest.raises(loader.KernelCompileError) as caught:
        compile_kernels.compile_for("sm_80", Kernel("broken.cuh", "broken"))
    first, second = str(caught.value).splitlines()
    assert first == "broken for sm_80:"
    assert second == '  pagoda/broken.cuh(2): error: identifier "nonsense" is undefined'


@needs_nvrtc
def test_an_error_deep_in_a_template_is_short() -> None:
    import compile_kernels

    shape = "pagoda::FewShape<pagoda::F16, pagoda::F16, pagoda::F16, 33, 17, 1, 4>"
    kernel = Kernel("attend.cuh", f"pagoda::attend<pagoda::FewQueries<{shape}>>")
    with pytest.raises(loader.KernelCompileError) as caught:
        compile_kernels.compile_for("sm_90", kernel)
    first, *errors = str(caught.value).splitlines()
    assert first == "attend<FewQueries<FewShape<F16, F16, F16, 33, 17, 1, 4>>> for sm_90:"
    assert 1 <= len(errors) <= 3
    assert re.fullmatch(r"  pagoda/tensor_cores\.cuh\(\d+\): error: static assertion failed with .*", errors[0])


@needs_nvrtc
def test_missing_headers_of_cuda_and_what_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compile_kernels

    monkeypatch.setattr(compile_kernels, "toolkit_headers", lambda: tmp_path)
    with pytest.raises(loader.KernelCompileError) as caught:
        compile_kernels.compile_for("sm_90", instances.UNPACK)
    _, error, hint = str(caught.value).splitlines()
    assert re.fullmatch(r'  pagoda/machine\.cuh\(\d+\): .*error: cannot open source file "cuda_bf16\.h"', error)
    assert hint == f"  CUDA's headers are missing: {loader.TOOLKIT}"


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_70", "sm_999"])
def test_an_architecture_that_nvrtc_does_not_know(arch: str) -> None:
    import compile_kernels

    with pytest.raises(loader.KernelCompileError, match=rf"NVRTC \d+\.\d+ has no code for {arch}"):
        compile_kernels.compile_for(arch, instances.UNPACK)


def test_three_errors_are_enough() -> None:
    log = "".join(f"{loader.SOURCES}/pagoda/unit.cuh({line}): error: nonsense\n  x\n  ^\n\n" for line in range(1, 101))
    assert loader.explain(instances.UNPACK, log, "sm_90", (13, 2)).splitlines() == [
        "unpack for sm_90:",
        *[f"  pagoda/unit.cuh({line}): error: nonsense" for line in (1, 2, 3)],
    ]


@pytest.mark.parametrize(
    ("log", "nvrtc", "hint"),
    [
        ("Failed to find CUDA headers. Please install CUDA toolkit headers", (13, 2), "CUDA's headers are missing"),
        ('Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file', None, "NVRTC is missing"),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available", (12, 6), "NVRTC 12.6 has no code for sm_120"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", (13, 2), None),
    ],
)
def test_what_cupy_says_before_and_after_nvrtc(log: str, nvrtc: tuple[int, int] | None, hint: str | None) -> None:
    message = loader.explain(instances.UNPACK, log, "sm_120", nvrtc).splitlines()
    assert message[:2] == ["unpack for sm_120:", f"  {log}"]
    assert [line.strip().split(":")[0] for line in message[2:]] == ([] if hint is None else [hint])


def test_the_fingerprint_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's kernel cache sees only one line that includes a header; the hash in it stands for the files."""
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
    assert len(seen) == len(names) + 1


def test_python_knows_the_shapes_of_kernels() -> None:
    """Threads, rows, shared memory and partial results as computed in Python equal those of the templates."""
    formats = [("f16", "f16", "f32"), ("bf16", "bf16", "f16"), ("bf16", "f16", "bf16"), ("f32", "f16", "f16")]
    formats += [("f16", "f16", "bf16")]
    quantised = [("q8_0", "q8_0", "bf16"), ("fp8_e4m3", "q4_0", "f32"), ("q4_0", "f16", "f16"), ("bf16", "int8", "f16")]
    quantised += [("q5_0", "q5_0", "bf16")]
    sizes = [(64, 64), (72, 40), (128, 128), (256, 256), (200, 136)]
    modes = ["decode", "verify", "prefill", "decode-deterministic", "prefill-deterministic"]
    chosen = [
        instances.attend(*types, *dims, 4, mode, shared_max << 10)
        for types, dims, mode, shared_max in product(formats, sizes, modes, (99, 227))
    ]
    chosen += [
        instances.attend(*types, *dims, 4, mode, 99 << 10)
        for types, dims, mode in product(quantised, [(64, 64), (96, 160), (256, 256), (320, 512)], modes)
    ]
    chosen += [
        instances.attend(k, instances.PART_OF_K, "bf16", 576, 512, 16, mode, 99 << 10)
        for k, mode in product(("q8_0", "q5_0"), modes)
    ]
    chosen += [instances.attend("f16", "bf16", "f16", 576, 512, 4, mode, 227 << 10) for mode in modes]
    chosen += [instances.attend("bf16", instances.PART_OF_K, "f16", 576, 512, 4, mode, 99 << 10) for mode in modes]
    chosen += [instances.attend("f32", instances.PART_OF_K, "f16", 72, 40, 4, "decode", 99 << 10)]
    chosen += [
        instances.attend(instances.FROM_V, v, q, dim, dim, 4, mode, 227 << 10)
        for v, q, dim, mode in product(("f32", "bf16", "q5_0", "q4_0"), ("f32", "bf16"), (64, 512), modes)
    ]
    chosen += [instances.attend("f16", "f16", q, 256, 256, 128, "decode", 227 << 10) for q in ("f16", "f32")]
    chosen += [
        instances.attend("bf16", instances.PART_OF_K, q, 576, 512, 128, "decode", 227 << 10) for q in ("bf16", "f32")
    ]
    constants = {}
    for index, one in enumerate(chosen):
        shape = one.kernel.expression.removeprefix("pagoda::attend<").removesuffix(">") + "::Shape"
        for field in ("ROWS", "THREADS", "SHARED_BYTES", "PARTIAL"):
            constants[f"{field}_{index}"] = f"{shape}::{field}"
    library = emulator.compile("#include <pagoda/attend.cuh>", {}, constants)
    for index, one in enumerate(chosen):
        read = [library.constant(f"{field}_{index}") for field in ("ROWS", "THREADS", "SHARED_BYTES", "PARTIAL")]
        assert [one.rows, one.threads, one.shared_bytes, one.partial] == read, one


def test_many_heads_share_the_fewest_units_that_fit() -> None:
    """128 query heads on a latent row: more shared memory and smaller queries mean fewer units that read it."""
    for q, shared, sets, rows in (
        ("bf16", 227, 2, 64),
        ("f32", 227, 4, 32),
        ("bf16", 163, 4, 32),
        ("f32", 163, 8, 16),
        ("bf16", 99, 8, 16),
        ("f32", 99, 8, 16),
    ):
        for mode in ("decode", "verify", "prefill", "decode-deterministic", "prefill-deterministic"):
            one = instances.attend("bf16", instances.PART_OF_K, q, 576, 512, 128, mode, shared << 10)
            assert (one.sets, one.rows) == (sets, rows), (q, shared, mode)
    assert instances.attend("f16", "f16", "f16", 128, 128, 71, "decode", 227 << 10).sets == 1
    for group in range(1, 65):
        assert instances.attend("f16", "f16", "f32", 128, 128, group, "decode", 99 << 10).sets == 1


def test_what_no_kernel_does() -> None:
    with pytest.raises(BackendUnavailable, match="a K/V head"):
        instances.attend("f16", "f16", "f32", 256, 256, 71, "decode", 227 << 10)
    with pytest.raises(BackendUnavailable, match="shared memory"):
        instances.attend("f32", "f32", "f32", 2048, 2048, 1, "decode", 99 << 10)
    with pytest.raises(BackendUnavailable, match=r"attention of f32 over .* needs 125648 bytes .* has 101376"):
        instances.attend(instances.FROM_V, "q8_0", "f32", 640, 640, 16, "decode", 99 << 10)
