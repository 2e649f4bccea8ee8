"""Attention of 2,048 new tokens at the end of 32,768, causal. TFLOPs: 4 flop for each query head, element and visible pair.

of_matmul: that over the rate of a product of two 8192 x 8192 matrices in the same type.
"""

from __future__ import annotations

from functools import partial

import torch
from decode import beside
from harness import DIM, Filled, Report, seconds

CONTEXT, NEW, Q_HEADS = 32768, 2048, 32


def main() -> None:
    report = Report("prefill")
    pairs = NEW * (CONTEXT - NEW) + NEW * (NEW + 1) // 2
    flop = 4 * Q_HEADS * DIM * pairs
    cases: list[tuple[str, int, tuple[str, str] | None]] = [("bf16", 64, None), ("f16", 64, None)]
    cases += [("bf16", 16, None), ("bf16", 256, None)]
    cases += [("bf16", 64, (name, name)) for name in ("fp8_e4m3", "q8_0", "q4_0")]
    for dtype, page_size, formats in cases:
        case = f"2K on 32K {formats[0] if formats else dtype} group 4 page {page_size}"
        filled = Filled([CONTEXT], dtype=dtype, page_size=page_size, q_heads=Q_HEADS, new=NEW, formats=formats)
        a, b = (torch.randn(8192, 8192, device="cuda").to(filled.kind) for _ in range(2))
        product = torch.empty_like(a)
        rate = 2 * 8192**3 / seconds([partial(torch.matmul, a, b, out=product)] * 4)
        report.line(case, "matmul", TFLOPs=rate / 1e12)
        ours = seconds(filled.calls())
        report.line(
            case, "pagoda", us=ours * 1e6, TFLOPs=flop / ours / 1e12, of_matmul=flop / ours / rate,
            error=filled.error(filled.out),
        )  # fmt: skip
        if formats is None:
            beside(report, case, filled, ours)
        filled.close()


if __name__ == "__main__":
    main()
