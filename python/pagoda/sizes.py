"""Sizes in bytes and counts of tokens, as people write them."""

from __future__ import annotations

import re

from pagoda.checks import as_int
from pagoda.errors import InvalidArgument

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", start=1)}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)

LIMIT = 2**63 - 1


def parse_size(value: int | str, name: str) -> int:
    """Bytes of a size: an int, or a number with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).

    Raises InvalidArgument, naming `name`, for anything else, for fractions of a byte and beyond 2**63 - 1.
    """
    return _parse(value, name, 'bytes as an int or like "512MiB"', without=("k", "m"))


def parse_tokens(value: int | str, name: str) -> int:
    """A number of tokens: an int, or a number with k (1024) or m (1024 * 1024). Raises InvalidArgument for anything else."""
    units = [unit for unit in _UNITS if unit not in ("", "k", "m")]
    return _parse(value, name, 'tokens as an int or like "32k"', without=tuple(units))


def _parse(value: int | str, name: str, what: str, without: tuple[str, ...]) -> int:
    refusal = InvalidArgument(f"{name} = {value!r}: {what}, from 0 to {LIMIT}")
    value = as_int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= LIMIT:
            raise refusal
        return value
    match = _NUMBER.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS or match[2] in without:
        raise refusal
    whole, _, fraction = match[1].partition(".")
    if len(whole) + len(fraction) > 40:
        raise refusal
    scale: int = 10 ** len(fraction)
    units = int(whole + fraction) * _UNITS[match[2]]
    if units % scale or units // scale > LIMIT:
        raise refusal
    return units // scale


def format_size(count: int) -> str:
    """A size for people: "12.0 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_tokens(count: int) -> str:
    """A number of tokens for people: "32k", "1m", or the plain number."""
    for unit, size in (("m", 1 << 20), ("k", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
