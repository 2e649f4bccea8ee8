"""Scattered runs between pinned host memory and the device, as promotion and demotion copy them, over one large copy.

Times are what the caller waits, since issuing copies is part of their cost.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from harness import Report
from pagoda.device.cuda import open_driver
from pagoda.device.mover import Mover

TOTAL = 256 << 20


def main() -> None:
    report = Report("gather")
    driver = open_driver(0)
    settable: Any = driver
    host, device = driver.host_arena(2 * TOTAL, TOTAL), driver.memory(2 * TOTAL)
    host.pin(host.address, 2 * TOTAL)
    mover, stream = Mover(driver, host), driver.stream()
    chosen = driver.copy_engine_bytes
    report.line("chosen", "copy engine", from_bytes=float(chosen))

    def rate(transfers: np.ndarray) -> float:
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            mover.copy(stream, transfers)
            stream.record().wait()
            best = min(best, time.perf_counter() - start)
        return float(transfers[:, 2].sum()) / best / 1e9

    for way, (source, target) in {
        "to device": (host.address, device.address),
        "from device": (device.address, host.address),
    }.items():
        peak = rate(np.array([[source, target, TOTAL]], np.uint64))
        report.line("256 MiB in one", way, GBs=peak)
        for shift in range(14, 23):
            size = 1 << shift
            count = TOTAL // size
            # Every second place, in a different order on each side, so that no two are neighbours.
            places = [2 * size * np.random.default_rng(side).permutation(count).astype(np.uint64) for side in range(2)]
            runs = np.full(count, size, np.uint64)
            transfers = np.stack([places[0] + np.uint64(source), places[1] + np.uint64(target), runs], 1)
            for what, limit in (("kernel", 1 << 62), ("copy engine", 0), ("chosen", chosen)):
                settable.copy_engine_bytes = limit
                got = rate(transfers)
                report.line(f"{size >> 10} KiB runs {way}", what, GBs=got, of_peak=got / peak)
    host.close()


if __name__ == "__main__":
    main()
