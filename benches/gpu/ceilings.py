"""The limits of the machine: reading and copying device memory, and copies over the bus from and to pinned memory."""

from __future__ import annotations

from functools import partial

import torch
from harness import Report, median_of, read, seconds


def main() -> None:
    report = Report("ceilings")
    memory = torch.randint(0, 255, (8 << 30,), dtype=torch.uint8, device="cuda")
    for size in (4 << 20, 16 << 20, 64 << 20, 512 << 20, 4 << 30):
        count = min(64, memory.numel() // size)
        taken = seconds([read(memory.data_ptr() + index * size, size) for index in range(count)])
        report.line(f"{size >> 20} MiB", "read kernel", us=taken * 1e6, TBs=size / taken / 1e12)
    half = memory.numel() // 2
    taken = seconds([lambda: memory[:half].copy_(memory[half:])])
    report.line("4 GiB", "copy", us=taken * 1e6, TBs=2 * half / taken / 1e12)
    pinned = torch.ones(1 << 30, dtype=torch.uint8).pin_memory()
    there = memory[: 1 << 30]
    for name, target, source in (("to device", there, pinned), ("from device", pinned, there)):
        taken = median_of(partial(target.copy_, source, non_blocking=True), 5)
        report.line("1 GiB", name, us=taken * 1e6, GBs=(1 << 30) / taken / 1e9)


if __name__ == "__main__":
    main()
