"""ARCHITECTURE.md and the tree: moving a module means updating the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "ARCHITECTURE.md").read_text().split("## Code map")[1].split("```")[1]
NAME = re.compile(r"\b\w+\.(?:rs|py|cuh)\b")

SOURCES = [path for folder in ("python", "crates", "tests") for path in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize("part", re.split(r"\n(?=\S)", MAP.strip()), ids=lambda part: part.split()[0])
def test_files_on_the_map_are_where_it_says(part: str) -> None:
    folder = ROOT / part.split()[0]
    there = {path.name for path in SOURCES if folder in path.parents}
    assert set(NAME.findall(part)) <= there


@pytest.mark.parametrize("folder", ["", "device", "measuring"])
def test_modules_are_on_the_map(folder: str) -> None:
    modules = {path.name for path in (ROOT / "python" / "pagoda" / folder).glob("*.py") if path.name[0] != "_"}
    assert modules
    assert modules <= set(NAME.findall(MAP))
