"""A small model whose steps are captured and replayed: on the emulated device with NumPy, on a GPU with CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
from mirror import derived, expected

Array = npt.NDArray[Any]

LAYERS = [
    pagoda.AttentionLayer(4, 2, 64, sinks=True),
    pagoda.AttentionLayer(4, 2, 64, window=40, softcap=5.0),
    pagoda.AttentionLayer(4, 2, 64, window=30, kv_owner=0),
    pagoda.AttentionLayer(4, 2, 64, rope=pagoda.Rope(theta=100.0), k_eq_v=True),
]
NORMS = [None, None, None, np.linspace(0.2, 2, 64, dtype=np.float32)]
"""Norm weights of derived K."""
SEQUENCES, CONTEXT, PROMPT = 6, 400, 50


def to_numpy(array: Any) -> Array:
    """A CuPy or NumPy array, on the host."""
    host: Array = array if isinstance(array, np.ndarray) else array.get()
    return host


class Model:
    """Fixed buffers, as for a captured forward pass, and the rows of every sequence.

    xp: the library of the buffers. stream: the stream of all steps, a context manager that makes it current.
    """

    def __init__(self, xp: Any, stream: Any, new_tokens: int, seed: int) -> None:
        self.xp, self.stream, self.new_tokens = xp, stream, new_tokens
        self.rng = np.random.default_rng(seed)
        spec = pagoda.ModelSpec(layers=LAYERS)
        memory: dict[str, Any] = {"page_size": 16, "device_memory": "8MiB", "host_memory": "8MiB"}
        self.cache = pagoda.Cache(spec, device="cuda", k_norms=NORMS, **memory)
        rows = max(SEQUENCES * new_tokens, PROMPT)
        self.cache.declare(sequences=SEQUENCES, new_tokens=new_tokens, context=CONTEXT, tokens=rows)
        self.q = [xp.empty((rows, 4, 64), np.float32) for _ in LAYERS]
        self.k, self.v = ([xp.empty((rows, 2, 64), np.float16) for _ in LAYERS] for _ in range(2))
        self.out = [xp.empty((rows, 4, 64), np.float32) for _ in LAYERS]
        self.sinks = xp.empty(4, np.float32)
        self.held: dict[pagoda.Sequence, list[tuple[Array, Array]]] = {}

    def create(self) -> pagoda.Sequence:
        sequence = self.cache.create()
        self.held[sequence] = [(np.zeros((0, 2, 64), np.float16),) * 2 for _ in LAYERS]
        return sequence

    def fork(self, sequence: pagoda.Sequence) -> pagoda.Sequence:
        child = sequence.fork()
        self.held[child] = list(self.held[sequence])
        return child

    def forward(self, step: pagoda.Step) -> None:
        for layer, shape in enumerate(LAYERS):
            rows = (None if shape.k_eq_v else self.k[layer], self.v[layer]) if shape.kv_owner is None else ()
            sinks = self.sinks if shape.sinks else None
            step.forward(layer, self.q[layer], *rows, out=self.out[layer], sink_logits=sinks)

    def step(
        self, batch: list[pagoda.Sequence], counts: list[int], launch: Callable[[pagoda.Step], object] | None = None
    ) -> None:
        """Does a step by `launch`, and compares it with the reference."""
        total = sum(counts)
        with self.stream:
            given = [
                [self._fill(array, total) for array in arrays] for arrays in zip(self.q, self.k, self.v, strict=True)
            ]
            sinks = self._fill(self.sinks, 4)
            for out in self.out:
                out.fill(12345)
        with self.cache.step(batch, counts, stream=self.stream) as step:
            positions = np.zeros(len(given[0][0]), np.int64)
            positions[:total] = step.positions
            (launch or self.forward)(step)
        with self.stream:
            results = [to_numpy(out) for out in self.out]
        self.cache.audit()
        for layer, shape in enumerate(LAYERS):
            q, k, v = given[layer]
            if shape.k_eq_v:
                k = derived(v.astype(np.float64), NORMS[layer], shape.rope, positions)
            start = 0
            for sequence, count in zip(batch, counts, strict=True):
                rows = slice(start, start + count)
                keys, values = self.held[sequence][layer if shape.kv_owner is None else shape.kv_owner]
                if shape.kv_owner is None:
                    keys, values = np.concatenate([keys, k[rows]]), np.concatenate([values, v[rows]])
                    self.held[sequence][layer] = keys, values
                right, _ = expected(shape, q[rows], keys, values, sinks if shape.sinks else None)
                np.testing.assert_allclose(results[layer][rows], right, rtol=0, atol=3e-5)
                start += count
            assert (results[layer][total:] == 12345).all(), "rows past the batch's are left alone"

    def captured(self, batch: list[pagoda.Sequence], counts: list[int]) -> Callable[[], object]:
        """Captures a step's kernels, runs them, and returns a function that runs them again."""
        graphs: list[Any] = []

        def capture(step: pagoda.Step) -> None:
            with self.stream:
                self.stream.begin_capture()
                self.forward(step)
                graphs.append(self.stream.end_capture())
                graphs[0].launch()

        self.step(batch, counts, capture)
        launch: Callable[[], object] = graphs[0].launch
        return launch

    def live(self, steps: int) -> None:
        """Replays one graph for sequences that grow, join and leave, in batches of any size; prompts do not use it."""
        rng, most = self.rng, self.new_tokens
        live = [self.create() for _ in range(3)]
        self.step(live, [most] * 3)
        graph = self.captured(live[:2], [1, most])
        for _ in range(steps):
            action = rng.integers(5)
            if action == 0 and len(live) < SEQUENCES:
                if rng.integers(2):
                    live.append(self.fork(live[rng.integers(len(live))]))
                else:
                    live.append(self.create())
                    self.step([live[0], live[-1]], [1, PROMPT - 1])
            elif action == 1 and len(live) > 1:
                live.pop(rng.integers(len(live))).release()
            elif action == 2:
                self.cache.demote(live[0])
            batch = [live[i] for i in rng.permutation(len(live))[: rng.integers(1, len(live) + 1)]]
            counts = rng.integers(0, most + 1, len(batch)).tolist()
            self.step(batch, counts, lambda step: step.replay(graph))

    def _fill(self, array: Any, total: int) -> Array:
        """Fills the first rows with random values, and rows past the batch's with NaN."""
        values = np.full(array.shape, np.nan, array.dtype)
        values[:total] = self.rng.standard_normal(values[:total].shape)
        array[...] = self.xp.asarray(values)
        return values
