"""Decode steps over sequences whose pages except the last are on the host tier: through the ring, in place, by the CPU, as
chosen without a calibration, and divided by that of `pagoda doctor --calibrate` (benches/gpu/run.sh runs it first).

Wall seconds of a step, and bytes of the host tier over them; of_link: that over the rate of one large copy to the device.
Attention alone, and also with a product of matrices before each layer: copies go on meanwhile, reads in place do not.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pagoda
import torch
from harness import DIM, KV_HEADS, STREAM, Report
from pagoda._core import cores
from pagoda.device.cuda import open_driver
from pagoda.measuring.gpu import ceilings
from pagoda.rates import Routes, routes_of

LAYERS, Q_HEADS, CHUNK, PAGE = 16, 32, 8192, 64
CASES = [(1, 32 << 10), (1, 512 << 10), (16, 32 << 10)]
ROUTES = {"ring": 0, "in place": 1 << 62}
"""From so many bytes of a layer on it is the ring."""
STEPS = 10
PRODUCT = 4096


class Model:
    """A cache on the host tier, and arrays of a step."""

    def __init__(self, sequences: int, context: int) -> None:
        spec = pagoda.ModelSpec([pagoda.AttentionLayer(Q_HEADS, KV_HEADS, DIM)] * LAYERS)
        held = sequences * context * spec.bytes_per_token()
        self.cache = pagoda.Cache(
            spec,
            page_size=PAGE,
            device="cuda",
            device_memory=(2 << 30) + 2 * CHUNK * spec.bytes_per_token(),
            host_memory=held + held // 8 + (1 << 30),
            spill=False,
        )
        kind = {"device": "cuda", "dtype": torch.float16}
        k, v = (torch.randn(CHUNK, KV_HEADS, DIM, **kind) for _ in range(2))
        self.batch = [self.cache.create() for _ in range(sequences)]
        torch.cuda.synchronize()
        for sequence in self.batch:
            for _ in range(0, context, CHUNK):
                with self.cache.step([sequence], [CHUNK], stream=STREAM) as step:
                    for layer in range(LAYERS):
                        step.append(layer, k, v)
                self.cache.demote(sequence).wait()
        self.k, self.v = k[:sequences], v[:sequences]
        self.q, self.out = (torch.randn(sequences, Q_HEADS, DIM, **kind) for _ in range(2))
        self.a, self.b = (torch.randn(PRODUCT, PRODUCT, **kind) for _ in range(2))
        torch.cuda.synchronize()
        # A token in the last page: later steps append there, and their tokens are not kept.
        self.step(products=False, accepted=1)

    def step(self, products: bool, accepted: int = 0) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        with self.cache.step(self.batch, [1] * len(self.batch), stream=STREAM) as step:
            for layer in range(LAYERS):
                if products:
                    with torch.cuda.stream(STREAM):
                        torch.matmul(self.a, self.b)
                step.append(layer, self.k, self.v)
                step.attend(layer, self.q, out=self.out)
            step.commit([accepted] * len(self.batch))
        STREAM.synchronize()
        return time.perf_counter() - start


def main() -> None:
    report = Report("streaming")
    driver = open_driver(0)
    link, chosen = ceilings(driver)["pcie"], driver.ring_bytes
    report.line("one large copy", "copy engine", GBs=link / 1e9)
    report.line("the ring is faster", "chosen", from_bytes=float(chosen))
    measured = routes_of(driver.name, cores())
    cpu = {"CPU": Routes(0, [{"memory": 1.0}], {"memory": 0.0}, {"f16": 1.0}), "divided": measured} if measured else {}
    if measured:
        best = max(sum(rates.values()) for rates in measured.rates)
        report.line("routes at once", "calibration", GBs=best / 1e9)
    for sequences, context in CASES:
        model = Model(sequences, context)
        engine = model.cache._device
        assert engine is not None
        settable: Any = engine._driver
        partials = engine._streams._partials
        size = sequences * context * model.cache.spec.bytes_per_token()
        for products in (False, True):
            outs = []
            ways = [(name, least, None) for name, least in (*ROUTES.items(), ("chosen", chosen))]
            for name, least, routes in [*ways, *((name, chosen, routes) for name, routes in cpu.items())]:
                settable.ring_bytes = least
                engine._streams._partials = partials if routes else None
                if partials and routes:
                    partials._routes = routes
                took = statistics.median([model.step(products) for _ in range(STEPS)][3:])
                what = f"{sequences} x {context >> 10}K{', products' if products else ''}"
                report.line(what, name, ms=took * 1e3, GBs=size / took / 1e9, of_link=size / took / link)
                outs.append(model.out.clone())
                torch.cuda.synchronize()
            error = max(float((out - outs[0]).abs().max()) for out in outs)
            assert error < 1e-3, f"the routes differ by {error}"
        model.cache.close()


if __name__ == "__main__":
    main()
