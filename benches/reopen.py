"""How long it takes to reopen a cache that is kept on disk.

What counts is the number of pages, not their bytes: tiny pages stand for large ones. 100 GB of a model's pages of 768 KiB
(64 tokens of 6 layers with 2 K/V heads of 256 in f16) are 131,072 pages.

    python benches/reopen.py [--pages 131072] [--sequences 8] [--directory DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pagoda

PAGE = 8
SPEC = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(num_q_heads=1, num_kv_heads=1, head_dim=8)])


def main() -> None:
    """Keeps sequences, and reopens their directory a few times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=131_072)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    tokens = arguments.pages // arguments.sequences * PAGE
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="pagoda-") as directory:
        options: dict[str, Any] = {"device": "cpu", "device_memory": "256MiB", "host_memory": 0, "page_size": PAGE}
        options |= {"disk": directory, "disk_memory": arguments.pages * 16384 + (1 << 30), "resume": True}
        rows = np.zeros((tokens, 1, 8), np.float16)
        with pagoda.Cache(SPEC, **options) as cache:
            for number in range(arguments.sequences):
                with cache.create() as sequence:
                    with cache.step([sequence], [tokens]) as step:
                        step.append(0, rows, rows)
                    cache.save(sequence, f"sequence {number}")
        index = (Path(directory) / "index").stat().st_size
        for _ in range(5):
            start = time.perf_counter()
            with pagoda.Cache(SPEC, **options) as cache:
                seconds = time.perf_counter() - start
                kept = len(cache.saved())
            print(
                f"{seconds * 1e3:.0f} ms for {kept} sequences of {tokens // PAGE:,} pages, an index of {index:,} bytes"
            )
        with pagoda.Cache(SPEC, **options) as cache:
            start = time.perf_counter()
            loaded = cache.load("sequence 0")
            seconds, tokens = time.perf_counter() - start, 0 if loaded is None else len(loaded)
            print(f"{seconds * 1e3:.0f} ms to load one of them: {tokens:,} tokens")


if __name__ == "__main__":
    main()
