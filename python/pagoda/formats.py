"""Row formats: how one K or V row (one token, one head) is stored. The one table of them."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.errors import InvalidArgument


@dataclass(frozen=True)
class RowFormat:
    """`unit_bytes` for each `unit` elements, and `row_bytes` more a row."""

    unit: int
    unit_bytes: int
    row_bytes: int = 0
    stored: bool = False
    """Whether the cache can store it; the planner reckons with all of them."""

    def bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements."""
        return -(-dim // self.unit) * self.unit_bytes + self.row_bytes


FORMATS = {
    "f32": RowFormat(1, 4, stored=True),
    "f16": RowFormat(1, 2, stored=True),
    "bf16": RowFormat(1, 2, stored=True),
    "fp8_e4m3": RowFormat(1, 1, row_bytes=4),
    "q8_0": RowFormat(32, 34),
    "q5_0": RowFormat(32, 22),
    "q4_0": RowFormat(32, 18),
}
"""fp8_e4m3 with one float32 scale a row; q8_0, q5_0, q4_0 are ggml's blocks of 32 elements with a float16 scale
(ggml-common.h: block_q8_0 34, block_q5_0 22, block_q4_0 18 bytes)."""


def row_format(name: str, argument: str) -> RowFormat:
    """The format of a name. Raises InvalidArgument."""
    if name not in FORMATS:
        raise InvalidArgument(f"{argument} = {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]
