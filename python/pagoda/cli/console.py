"""Where results are printed: on a terminal in its own width, elsewhere (a file, a pipe) as wide as tables want to be; and how
their tables name what a cache keeps."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pagoda.retention import SinkWindow

WIDTH = 200
"""Columns where there is no terminal: rich takes 80 then, and cuts what does not fit."""


def kept(keep: SinkWindow | None) -> str:
    """What a cache keeps, in words of a table."""
    if keep is None:
        return "all"
    sinks = f"{keep.sinks} + " if keep.sinks else ""
    return f"{sinks}last {keep.window:,}" + (", cache positions" if keep.positions == "cache" else "")


class Results(Console):
    """A console where no digit of a table is left out: what is too wide for its column goes on in the next line."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's."""
        for each in objects:
            if isinstance(each, Table):
                for column in each.columns:
                    column.overflow = "fold"
        super().print(*objects, **options)


def results() -> Console:
    """The console of standard output."""
    console = Results()
    return console if console.is_terminal else Results(width=WIDTH)
