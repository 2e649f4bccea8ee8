"""What lower tiers cost a step whose pages are all in device memory.

Three caches hold the same pages and decode in turn. One has only device memory; another has a host and a disk tier as well.
The third is like the first, and shows how much two equal caches differ. Medians, of 300 turns, of times over the first's.

    python benches/resident_step.py [--device cuda] [--disk DIR]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from types import ModuleType
from typing import Any

import numpy as np
import pagoda

LAYERS, Q_HEADS, KV_HEADS, DIM, PAGE = 6, 16, 2, 256, 64
TURNS, WARM = 300, 20


class Steps:
    """A batch that grows by a token a step, in a cache of its own."""

    def __init__(self, xp: ModuleType, sequences: int, context: int, **tiers: Any) -> None:
        self.xp, self.counts = xp, [1] * sequences
        spec = pagoda.ModelSpec([pagoda.AttentionLayer(Q_HEADS, KV_HEADS, DIM)] * LAYERS)
        memory = sequences * (context + TURNS + WARM + 2 * PAGE) * spec.bytes_per_token("f16", "f16")
        self.cache = pagoda.Cache(spec, page_size=PAGE, device_memory=2 * memory, **tiers)
        self.batch = self.cache.batch([self.cache.create() for _ in self.counts])
        rng = np.random.default_rng(0)
        self.q = xp.asarray(rng.standard_normal((sequences, Q_HEADS, DIM), np.float32).astype(np.float16))
        rows = xp.asarray(rng.standard_normal((sequences * context, KV_HEADS, DIM), np.float32).astype(np.float16))
        with self.cache.step(self.batch, [context] * sequences) as step:
            for layer in range(LAYERS):
                step.append(layer, rows, rows)
        self.new = rows[:sequences]

    def run(self) -> float:
        """Seconds of a step, until the device has ended."""
        start = time.perf_counter()
        with self.cache.step(self.batch, self.counts) as step:
            for layer in range(LAYERS):
                step.forward(layer, self.q, self.new, self.new)
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        return time.perf_counter() - start


def main() -> None:
    """Three caches at a time, for batches of three shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--disk", help="where the disk tier is, else where temporary files are")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        import cupy as xp
    else:
        xp = np
    print("sequences  tokens  ms a step  with tiers  as without")
    for sequences, context in ((1, 4096), (32, 256), (1, 32_768)):
        with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="pagoda-") as disk:
            alone: dict[str, Any] = {"device": arguments.device, "host_memory": 0}
            tiers = alone | {"host_memory": "256MiB", "disk": disk, "disk_memory": "1GiB"}
            every = [Steps(xp, sequences, context, **options) for options in (alone, tiers, alone)]
            orders = itertools.cycle(itertools.permutations(range(len(every))))
            turns = []
            for order in itertools.islice(orders, WARM + TURNS):
                times = {number: every[number].run() for number in order}
                turns.append((times[0], times[1] / times[0], times[2] / times[0]))
            seconds, tiered, alike = (statistics.median(column) for column in zip(*turns[WARM:], strict=True))
            for steps in every:
                steps.cache.close()
        print(f"{sequences:9} {context:7,} {seconds * 1e3:10.3f} {tiered:11.3f} {alike:11.3f}", flush=True)


if __name__ == "__main__":
    main()
