"""What a step on a device costs the host, by phases: with a device that does nothing, so that no GPU is needed.

    python benches/host_step.py                 # where time goes: python -m cProfile -s tottime benches/host_step.py

64 sequences decode one token each in every step, with an append and an attend for every layer. Microseconds, the median of
all steps. Columns: reserve (tables are on their way when it returns) and its part for the upload; append and attend of one
layer; commit; reserve and commit of only those steps in which all sequences need a new page.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
from pagoda.device import cuda, cuda_arrays, tables
from pagoda.device.driver import View

SEQUENCES, PAGE, STEPS, WARM = 64, 64, 2000, 200
ADDRESSES = itertools.count(1 << 40, 1 << 32)


class Done:
    """An event that has happened."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class NullStream:
    """A stream that does nothing."""

    def record(self) -> Done:
        return Done()

    def follow(self, event: Any) -> None:
        pass

    def current(self) -> Any:
        return contextlib.nullcontext()

    def copy(self, target: int, source: int, size: int) -> None:
        pass

    capturing = False

    def copy_rows(self, *given: int) -> None:
        pass

    def launch(
        self, kernel: Any, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        pass


class NullMemory:
    """An address; with host memory behind it only if something writes there."""

    def __init__(self, size: int, real: bool) -> None:
        self.array = np.zeros(size if real else 0, np.uint8)
        self.address = self.array.ctypes.data if real else 1 << 40

    def pin(self, addresses: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        return np.zeros(np.broadcast_shapes(np.shape(addresses), np.shape(sizes)), bool)

    def close(self) -> None:
        pass


class NullArray:
    """An array without memory, with the attributes that CuPy's arrays have."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.itemsize = shape, np.dtype(np.float16), 2
        self.strides = tuple(2 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        self.data = SimpleNamespace(ptr=next(ADDRESSES), device_id=0)


class NullDriver:
    """A driver that pretends to be an H200."""

    name = "none"
    multiprocessors, shared_bytes_max = 132, 227 << 10
    copy_engine_bytes, ring_bytes = 1 << 16, 1 << 20

    def memory(self, size: int) -> NullMemory:
        return NullMemory(size, False)

    def give_back(self) -> None:
        pass

    def pinned(self, size: int) -> NullMemory:
        return NullMemory(size, True)

    def host_arena(self, size: int, piece: int) -> NullMemory:
        return NullMemory(size, False)

    def stream(self) -> NullStream:
        return NullStream()

    def caller_stream(self, given: object) -> NullStream:
        return NullStream()

    def captures_another(self, stream: Any) -> bool:
        return False

    def view(self, name: str, array: Any, stream: Any) -> View:
        return cuda_arrays.view(name, array, 0, stream)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return NullArray(*shape)


class Steps:
    """A batch that grows by a token a step."""

    def __init__(self, context: int, layers: int, shared: int) -> None:
        spec = pagoda.ModelSpec([pagoda.AttentionLayer(32, 8, 128)] * layers)
        self.layers = layers
        self.cache = pagoda.Cache(spec, page_size=PAGE, device="cuda", device_memory="512GiB", host_memory="1TiB")
        self.k: Any = NullArray(SEQUENCES, 8, 128)
        self.q: Any = NullArray(SEQUENCES, 32, 128)
        self.out: Any = NullArray(SEQUENCES, 32, 128)
        root = self.cache.create()
        self._grow(root, shared)
        sequences = [root.fork() if shared else self.cache.create() for _ in range(SEQUENCES)]
        for sequence in sequences:
            self._grow(sequence, context - shared)
        self.batch = self.cache.batch(sequences)
        self.ones = np.ones(SEQUENCES, np.int64)

    def _grow(self, sequence: pagoda.Sequence, tokens: int) -> None:
        if tokens:
            rows: Any = NullArray(tokens, 8, 128)
            with self.cache.step([sequence], [tokens]) as step:
                for layer in range(self.layers):
                    step.append(layer, rows, rows)

    def run(self, uploads: list[float]) -> list[float]:
        """Seconds of reserve, upload, append, attend (of one layer each), commit."""
        clock = time.perf_counter
        k = self.k
        uploads.clear()
        start = clock()
        step = self.cache.step(self.batch, self.ones).__enter__()
        reserved = clock()
        for layer in range(self.layers):
            step.append(layer, k, k)
        appended = clock()
        for layer in range(self.layers):
            step.attend(layer, self.q, out=self.out)
        attended = clock()
        step.commit()
        end = clock()
        each = [(appended - reserved) / self.layers, (attended - appended) / self.layers]
        return [reserved - start, sum(uploads), *each, end - attended]


def main() -> None:
    driver: Any = NullDriver()
    cuda.open_driver = lambda index: driver
    sys.modules["cupy"] = SimpleNamespace(ndarray=NullArray)  # type: ignore[assignment]
    uploads: list[float] = []
    upload = tables.StepTables.upload

    def timed(self: tables.StepTables, stream: Any, words: int, streams: int) -> None:
        start = time.perf_counter()
        upload(self, stream, words, streams)
        uploads.append(time.perf_counter() - start)

    tables.StepTables.upload = timed  # type: ignore[method-assign]
    print(
        f"{SEQUENCES} sequences, {'context':>8} {'shared':>7} {'layers':>6} {'reserve':>8} {'(upload)':>8} {'append':>7} "
        f"{'attend':>7} {'commit':>7} {'reserve + commit':>17} {'new pages':>10}"
    )
    for context, shared, layers in ((1000, 0, 1), (4000, 0, 32), (32_000, 0, 32), (32_000, 31_000, 32)):
        steps = Steps(context, layers, shared)
        for declared in (False, True):
            if declared:
                steps.cache.declare(sequences=SEQUENCES, new_tokens=1, context=context + 4 * STEPS)
            for _ in range(WARM):
                steps.run(uploads)
            length = len(steps.batch.sequences[0])
            times = [steps.run(uploads) for _ in range(STEPS)]
            reserve, uploaded, append, attend, commit = 1e6 * np.median(times, axis=0)
            paged = 1e6 * np.median([step[0] + step[-1] for step in times[-length % PAGE :: PAGE]])
            print(
                f"{'declared' if declared else 'as it is':>14} {context:9,} {shared:7,} {layers:6} {reserve:8.1f} "
                f"{uploaded:8.1f} {append:7.1f} {attend:7.1f} {commit:7.1f} {reserve + commit:17.1f} {paged:10.1f}"
            )
        steps.cache.close()


if __name__ == "__main__":
    main()
