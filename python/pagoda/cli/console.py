"""The console for results, as wide as the terminal, or in a file or pipe wide enough for tables; and how tables name what a
cache keeps."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pagoda.retention import SinkWindow

WIDTH = 200
"""Columns without a terminal: rich would take 80, and cut off the rest."""


def kept(keep: SinkWindow | None) -> str:
    """What a cache keeps, as tables show it."""
    if keep is None:
        return "all"
    sinks = f"{keep.sinks} + " if keep.sinks else ""
    return f"{sinks}last {keep.window:,}" + (", cache positions" if keep.positions == "cache" else "")


class Results(Console):
    """A console that never truncates cells of tables: text that is too wide continues on the next line."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Like rich's `print`, with folded columns."""
        for each in objects:
            if isinstance(each, Table):
                for column in each.columns:
                    column.overflow = "fold"
        super().print(*objects, **options)


def results() -> Console:
    """The console of standard output."""
    console = Results()
    return console if console.is_terminal else Results(width=WIDTH)
