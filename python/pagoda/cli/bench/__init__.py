"""`pagoda bench`: calls.py has what it does without a PART; each PART has a module of its name."""

from __future__ import annotations

from pagoda.cli.bench import calls, depth, longcontext, quality
from pagoda.cli.options import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        help="what calls cost through Python, tokens a second, and what formats cost in quality",
        description="Without a PART: what calls cost through Python, and how fast the shipped model reads and writes.",
    )
    # Accepted before a PART or after it: the parts' own --json has no default, which would override the one given here.
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=calls.run)
    parts = parser.add_subparsers(metavar="PART")
    depth.register(parts)
    longcontext.register(parts)
    quality.register(parts)
