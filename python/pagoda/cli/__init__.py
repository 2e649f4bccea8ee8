"""The command line: one module or folder per command, which adds itself by `register`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from pagoda import __version__
from pagoda.cli import bench, doctor, generate, plan
from pagoda.errors import PagodaError

COMMANDS = (generate, plan, doctor, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 2 for bad input and any other PagodaError, 130 for Ctrl-C, 1 if output
    cannot be written or memory runs out."""
    parser = argparse.ArgumentParser(prog="pagoda", description="A tiered, paged KV cache for LLM inference.")
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.register(commands)
    arguments = parser.parse_args(argv)
    if sys.stdout is None:
        _complain("standard output is closed")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write characters that the terminal cannot encode.
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except PagodaError as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except (OSError, MemoryError) as error:
        # No message if the reader has gone, as in `pagoda plan ... | head`.
        if not isinstance(error, BrokenPipeError):
            _complain(str(error) or "out of memory")
        _let_go()
        return 1
    return status


def _complain(what: object) -> None:
    """Prints to standard error why a command failed; does nothing if that is closed, as `print` would use standard output."""
    if sys.stderr is not None:
        print(f"pagoda: {what}", file=sys.stderr)


def _let_go() -> None:
    """Discards output that cannot be written: Python would fail to flush it once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
