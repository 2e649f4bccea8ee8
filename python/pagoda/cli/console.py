"""Where results are printed: on a terminal in its own width, elsewhere (a file, a pipe) as wide as tables want to be."""

from __future__ import annotations

from rich.console import Console

WIDTH = 200
"""Columns where there is no terminal: rich takes 80 then, and cuts what does not fit."""


def results() -> Console:
    """The console of standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
