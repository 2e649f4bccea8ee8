"""Options that several commands parse in the same way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from pagoda.formats import check_not_forced, row_format
from pagoda.spec import ModelSpec

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What commands are added to."""


def directory(name: str) -> Path:
    """The type of options that name one. No name is none, where `Path` takes it for the working directory."""
    if not name:
        raise ValueError
    return Path(name)


def load_spec(model: str) -> ModelSpec:
    """A preset, or a config.json. Raises InvalidArgument, for what looks like a path as one."""
    path = Path(model)
    is_path = bool(model) and (path.exists() or path.is_absolute() or model[0] == "." or path.suffix == ".json")
    return ModelSpec.from_config(model) if is_path else ModelSpec.preset(model)


def format_pair(name: str, option: str = "--formats") -> tuple[str, str]:
    """The formats of K and V that are to be measured. Raises InvalidArgument, naming the option that they were given by."""
    check_not_forced()
    k_dtype, slash, v_dtype = name.partition("/")
    v_dtype = v_dtype if slash else k_dtype
    for part in (k_dtype, v_dtype):
        row_format(part, option)
    return k_dtype, v_dtype
