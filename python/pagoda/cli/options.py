"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

from pagoda.errors import InvalidArgument
from pagoda.formats import FORMATS, check_not_forced, row_format
from pagoda.retention import SinkWindow
from pagoda.sizes import parse_tokens
from pagoda.spec import ModelSpec

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The object to which commands are added."""


def directory(name: str) -> Path:
    """The type of options that name a directory. Refuses an empty name, for which `Path` gives the working directory."""
    if not name:
        raise ValueError
    return Path(name)


def add_cache_types(parser: argparse.ArgumentParser) -> None:
    """Adds the options for row formats."""
    for part in "kv":
        parser.add_argument(
            f"--cache-type-{part}",
            default="f16",
            choices=FORMATS,
            help=f"row format of {part.upper()}; %(default)s by default",
        )


def add_retention(parser: argparse.ArgumentParser) -> None:
    """Adds the options for what a cache keeps; `retention` reads them."""
    parser.add_argument(
        "--window-size", help="keep this many of the last tokens, and the first ones: memory stops growing; k is 1024"
    )
    parser.add_argument("--sink-tokens", help="how many of the first tokens are kept with --window-size; 64 by default")
    parser.add_argument(
        "--sink-positions",
        choices=["original", "cache"],
        help="where the first tokens are seen with --window-size: where they were (default) or right before the window",
    )


def retention(arguments: argparse.Namespace) -> SinkWindow | None:
    """The retention that the options ask for; None keeps everything. Raises InvalidArgument."""
    window, sinks, positions = arguments.window_size, arguments.sink_tokens, arguments.sink_positions
    for option, value in (("--sink-tokens", sinks), ("--sink-positions", positions)):
        if value is not None and window is None:
            raise InvalidArgument(f"{option} = {value!r}: only with --window-size")
    if window is None:
        return None
    kept = SinkWindow.sinks if sinks is None else parse_tokens(sinks, "--sink-tokens")
    return SinkWindow(kept, parse_tokens(window, "--window-size"), positions or "original")


def load_spec(model: str) -> ModelSpec:
    """The spec of a preset or a config.json. Raises InvalidArgument, about a path if it looks like one."""
    path = Path(model)
    # `Path.exists` raises for a name that is too long and for a folder that may not be looked into.
    there = os.path.exists(model)  # noqa: PTH110
    is_path = there or path.is_absolute() or model.startswith(".") or path.suffix == ".json"
    return ModelSpec.from_config(model) if is_path else ModelSpec.preset(model)


def format_pair(name: str, option: str = "--formats") -> tuple[str, str]:
    """The formats of K and V to measure. Raises InvalidArgument, naming the option."""
    check_not_forced()
    k_dtype, slash, v_dtype = name.partition("/")
    v_dtype = v_dtype if slash else k_dtype
    for part in (k_dtype, v_dtype):
        row_format(part, option)
    return k_dtype, v_dtype
