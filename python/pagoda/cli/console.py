"""Where results are printed: on a terminal in its own width, elsewhere (a file, a pipe) as wide as tables want to be; and how
their tables name what a cache keeps."""

from __future__ import annotations

from rich.console import Console

from pagoda.retention import SinkWindow

WIDTH = 200
"""Columns where there is no terminal: rich takes 80 then, and cuts what does not fit."""


def kept(keep: SinkWindow | None) -> str:
    """What a cache keeps, in words of a table."""
    if keep is None:
        return "all"
    sinks = f"{keep.sinks} + " if keep.sinks else ""
    return f"{sinks}last {keep.window:,}" + (", cache positions" if keep.positions == "cache" else "")


def results() -> Console:
    """The console of standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
