"""Attention by several versions of the device code, in turn in one process: the gain of a change, on one GPU.

    python benches/gpu/variants.py FOLDER ... [--cases "1 x 128K" "64 x 4K" ...]

FOLDER: a copy of python/pagoda/kernels/cuda, which is loaded instead. It must not need more shared memory than
kernels/instances.py says. of_ceiling: the time of a kernel that only reads, over the least time of all rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decode import CASES
from harness import machine, seconds
from pagoda.kernels import loader

ROUNDS = 3
DEFAULT = ["1 x 128K", "64 x 4K"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--cases", nargs="+", default=DEFAULT, help="cases of decode.py, by their names or in full")
    options = parser.parse_args()
    print(machine())
    for case in CASES:
        if not any(name in (case.name, str(case)) for name in options.cases):
            continue
        times: dict[Path, list[float]] = {folder: [] for folder in options.folders}
        ceiling, error = 0.0, {}
        for _ in range(ROUNDS):
            for folder in options.folders:
                loader.SOURCES = folder
                loader.fingerprint.cache_clear()
                cache = case.filled()
                ceiling = ceiling or seconds(cache.reads(cache.held_bytes))
                times[folder].append(seconds(cache.calls()))
                error[folder] = cache.error(cache.out)
                cache.close()
        print(f"{case}: reading {ceiling * 1e6:.1f} us", flush=True)
        for folder, taken in times.items():
            rounds = " ".join(f"{one * 1e6:8.1f}" for one in taken)
            print(
                f"  {folder!s:40} {rounds}  of_ceiling {ceiling / min(taken):.3f}  error {error[folder]:.2g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
