"""Decode steps over three tiers: contexts of 200K and of 1M tokens with 384 MB for KV on the device.

6 layers with 2 K/V heads of 256: 12 KiB a token. What the device cannot hold is on the host, half of it on disk, or all of it
there: in the folder that PAGODA_DISK names, or where temporary files are. Wall seconds of a step; of_drive and of_link: bytes
from disk and over the link in that time, over what the drive reads in order and one large copy carries, each alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pagoda
import torch
from harness import STREAM, Report
from pagoda import _core
from pagoda.device.cuda import open_driver
from streaming import link_rate

SPEC = pagoda.ModelSpec([pagoda.AttentionLayer(16, 2, 256)] * 6)
DEVICE_BYTES, CHUNK, STEPS = 384 * 10**6, 8192, 12
CONTEXTS = [200_000, 1 << 20]
ON_DISK = [0.0, 0.5, 1.0]
"""Of what the device cannot hold."""


def steps(report: Report, context: int, on_disk: float, folder: Path, drive: float, link: float) -> None:
    """Fills a cache in chunks, so that pages go where there is room, and times tokens behind them."""
    away = context * SPEC.bytes_per_token() - DEVICE_BYTES // 2
    host = int(away * (1 - on_disk))
    options = {"disk": folder / "pages", "disk_memory": 2 * away} if on_disk else {}
    # Where nothing goes to disk the host has room to spare.
    host += 0 if on_disk else away // 4
    with pagoda.Cache(SPEC, device="cuda", device_memory=DEVICE_BYTES, host_memory=host, **options) as cache:
        kind = {"device": "cuda", "dtype": torch.float16}
        k, v = (torch.randn(CHUNK, 2, 256, **kind) for _ in range(2))
        q, out = (torch.randn(1, 16, 256, **kind) for _ in range(2))
        sequence, done = cache.create(), 0
        torch.cuda.synchronize()
        start = time.perf_counter()
        while done < context:
            count = min(CHUNK, context - done)
            with cache.step([sequence], [count], stream=STREAM) as step:
                for layer in range(len(SPEC.layers)):
                    step.append(layer, k[:count], v[:count])
            done += count
        cache._spill.settle()
        filled = time.perf_counter() - start
        took, reports = [], []
        for _ in range(STEPS):
            start = time.perf_counter()
            with cache.step([sequence], [1], stream=STREAM) as step:
                for layer in range(len(SPEC.layers)):
                    step.append(layer, k[:1], v[:1])
                    step.attend(layer, q, out=out)
            STREAM.synchronize()
            took.append(time.perf_counter() - start)
            reports.append(step.report)
        seconds, last = statistics.median(took[2:]), reports[-1]
        report.line(
            f"{context:,} tokens",
            f"{on_disk:.0%} on disk",
            ms=seconds * 1e3,
            disk_GBs=last.bytes["disk"] / seconds / 1e9,
            of_drive=last.bytes["disk"] / seconds / drive,
            of_link=last.bytes["pcie"] / seconds / link,
            waited=statistics.median(one.waited for one in reports[2:]) / seconds,
            fill_s=filled,
        )


def main() -> None:
    report = Report("tiers")
    link = link_rate(open_driver(0))
    with tempfile.TemporaryDirectory(dir=os.environ.get("PAGODA_DISK")) as folder:
        size, seconds = _core.time_disk_reads(folder, 8 << 30, timedelta(seconds=5))
        drive = size / seconds
        report.line("one large copy", "copy engine", GBs=link / 1e9)
        report.line("reads in order", "drive", GBs=drive / 1e9)
        for context in CONTEXTS:
            for on_disk in ON_DISK:
                steps(report, context, on_disk, Path(folder), drive, link)


if __name__ == "__main__":
    main()
