"""The command line: one module a command, each with `register` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pagoda.cli import bench, doctor, generate, plan
from pagoda.errors import PagodaError

COMMANDS = (generate, plan, doctor, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 2 for bad input, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="pagoda", description="A tiered, paged KV cache for LLM inference.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.register(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
