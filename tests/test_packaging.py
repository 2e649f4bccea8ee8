"""What users get: the wheel, the README's example, an import that needs nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from examples import ROOT, example_of
from pagoda.kernels import loader


def test_the_readme_example_runs() -> None:
    done = subprocess.run([sys.executable, "-c", example_of("README.md")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Stats(")


def test_importing_needs_numpy_only() -> None:
    script = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("cupy", "torch", "tokenizers", "transformers", "ml_dtypes", "rich", "safetensors"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import pagoda
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "cp310-abi3" in wheel.name
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"pagoda", f"{wheel.name.split('-cp310')[0]}.dist-info"}
    needed = {
        "pagoda/_core.abi3.so",
        "pagoda/_core.pyi",
        "pagoda/py.typed",
        "pagoda/models/kjv-bytes/model.safetensors",
    }
    assert needed <= set(names)
    code = {path.relative_to(ROOT / "python").as_posix(): path for path in loader.SOURCES.rglob("*") if path.is_file()}
    assert "pagoda/kernels/cuda/pagoda/attend.cuh" in code
    assert {name: path.read_bytes() for name, path in code.items()} == {name: archive.read(name) for name in code}
    assert wheel.stat().st_size < 20 << 20
