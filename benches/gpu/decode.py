"""Attention of one new token a sequence, and of batches that share a prefix, compared with the ceiling and other libraries.

Ceiling: a kernel that reads as many bytes as the K and V of a layer. of_ceiling: its time over that of attention.
over_pagoda: another library's time over ours. It stores and reads a shared prefix once for each sequence, though some
libraries have calls for that case. error: the largest one, against float64, including that of the row format.
of_bf16: the time with bf16 rows of the same batch over that with quantised ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness import Filled, Report, seconds
from peers import PEERS, Pages

K = 1024


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    lengths: list[int]
    dtype: str = "bf16"
    group: int = 4
    page_size: int = 64
    shared: int = 0
    formats: tuple[str, str] | None = None
    """Of K and V rows, where they are not `dtype`."""

    def __str__(self) -> str:
        rows = self.dtype if self.formats is None else "/".join(self.formats)
        return f"{self.name} {rows} group {self.group} page {self.page_size}"

    def filled(self) -> Filled:
        """A cache with its tokens."""
        return Filled(
            self.lengths,
            dtype=self.dtype,
            page_size=self.page_size,
            q_heads=8 * self.group,
            shared=self.shared,
            formats=self.formats,
        )


ONE, MANY = [128 * K], [4 * K] * 64
CASES = [
    Case("1 x 1K", [K]),
    Case("1 x 128K", ONE),
    Case("1 x 1M", [K * K]),
    Case("64 x 4K", MANY),
    Case("64 x 32K", [32 * K] * 64),
    Case("1 x 128K + 63 x 1K", [128 * K] + [K] * 63),
    Case("1 x 128K", ONE, dtype="f16"),
    Case("64 x 4K", MANY, dtype="f16"),
    Case("1 x 128K", ONE, group=1),
    Case("64 x 4K", MANY, group=1),
    Case("1 x 128K", ONE, page_size=16),
    Case("64 x 4K", MANY, page_size=16),
    Case("1 x 128K", ONE, page_size=256),
    Case("64 x 4K", MANY, page_size=256),
    Case("64 x 32K sharing 31K", [32 * K] * 64, shared=31 * K),
    Case("64 x 32K sharing 16K", [32 * K] * 64, shared=16 * K),
]
FORMATS = [
    ("fp8_e4m3", "fp8_e4m3"),
    ("int8", "int8"),
    ("q8_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("bf16", "q8_0"),
    ("q8_0", "q4_0"),
]
CASES += [
    Case(name, lengths, formats=formats)
    for name, lengths in (("1 x 128K", ONE), ("1 x 1M", [K * K]), ("64 x 4K", MANY), ("64 x 32K", [32 * K] * 64))
    for formats in FORMATS
]


def main() -> None:
    report = Report("decode")
    plain: dict[str, float] = {}
    for case in CASES:
        filled = case.filled()
        held = filled.held_bytes
        ceiling = seconds(filled.reads(held))
        report.line(str(case), "read kernel", us=ceiling * 1e6, TBs=held / ceiling / 1e12)
        ours = seconds(filled.calls())
        # The first result of a name is that of bf16 rows in pages of 64.
        plain.setdefault(case.name, ours)
        beside_bf16 = {"of_bf16": plain[case.name] / ours} if case.formats else {}
        report.line(
            str(case), "pagoda", us=ours * 1e6, TBs=held / ours / 1e12, of_ceiling=ceiling / ours,
            error=filled.error(filled.out), **beside_bf16,
        )  # fmt: skip
        if case.formats is None:
            beside(report, str(case), filled, ours)
        filled.close()


def beside(report: Report, case: str, filled: Filled, ours: float) -> None:
    """What other libraries take for the same."""
    pages = Pages(filled)
    for name, peer in PEERS.items():
        try:
            calls, result = peer(filled, pages)
            theirs = seconds(calls)
        except Exception as error:
            report.line(case, name, left_out=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        report.line(case, name, us=theirs * 1e6, over_pagoda=theirs / ours, error=filled.error(result()))
        del calls, result


if __name__ == "__main__":
    main()
