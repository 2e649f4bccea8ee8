"""Graphs: the kernels of one step, captured, do every later step up to the maxima declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulator
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import CallerStream, EmulatedDriver
from mirror import expected
from pagoda.device import cuda

Array = npt.NDArray[Any]

LAYERS = [
    pagoda.AttentionLayer(4, 2, 64, sinks=True),
    pagoda.AttentionLayer(4, 2, 64, window=40, softcap=5.0),
    pagoda.AttentionLayer(4, 2, 64, window=30, kv_owner=0),
]
SEQUENCES, CONTEXT = 6, 400


class Model:
    """Fixed buffers, as a captured forward pass has them, and what every sequence holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, new_tokens: int, seed: int) -> None:
        emulator.require()
        self.driver = EmulatedDriver(seed)
        monkeypatch.setattr(cuda, "open_driver", lambda index: self.driver)
        self.rng = np.random.default_rng(seed)
        self.stream = CallerStream(self.driver)
        spec = pagoda.ModelSpec(layers=LAYERS)
        self.cache = pagoda.Cache(spec, page_size=16, device="cuda", device_memory="8MiB", host_memory="8MiB")
        self.cache.declare(sequences=SEQUENCES, new_tokens=new_tokens, context=CONTEXT)
        rows = SEQUENCES * new_tokens
        self.q = [np.empty((rows, 4, 64), np.float32) for _ in LAYERS]
        self.k, self.v = ([np.empty((rows, 2, 64), np.float16) for _ in LAYERS] for _ in range(2))
        self.out = [np.empty((rows, 4, 64), np.float32) for _ in LAYERS]
        self.sinks = np.empty(4, np.float32)
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
            rows = (self.k[layer], self.v[layer]) if shape.kv_owner is None else ()
            sinks = self.sinks if shape.sinks else None
            step.forward(layer, self.q[layer], *rows, out=self.out[layer], sink_logits=sinks)

    def step(
        self, batch: list[pagoda.Sequence], counts: list[int], launch: Callable[[pagoda.Step], object] | None = None
    ) -> None:
        """A step by `launch`, compared with the reference."""
        total = sum(counts)
        for layer in range(len(LAYERS)):
            for array in (self.q[layer], self.k[layer], self.v[layer]):
                array[:total] = self.rng.standard_normal(array[:total].shape)
                # Rows past the batch's are nobody's.
                array[total:] = np.nan
            self.out[layer][...] = 12345
        self.sinks[...] = self.rng.standard_normal(4)
        with self.cache.step(batch, counts, stream=self.stream) as step:
            (launch or self.forward)(step)
        self.cache.audit()
        for layer, shape in enumerate(LAYERS):
            start = 0
            for sequence, count in zip(batch, counts, strict=True):
                rows = slice(start, start + count)
                if shape.kv_owner is None:
                    new = self.k[layer][rows], self.v[layer][rows]
                    held = zip(self.held[sequence][layer], new, strict=True)
                    keys, values = map(np.concatenate, held)
                    self.held[sequence][layer] = keys, values
                else:
                    keys, values = self.held[sequence][shape.kv_owner]
                right, _ = expected(shape, self.q[layer][rows], keys, values, self.sinks if shape.sinks else None)
                np.testing.assert_allclose(self.out[layer][rows], right, rtol=0, atol=3e-5)
                start += count
            assert (self.out[layer][total:] == 12345).all(), "rows past the batch's are left alone"

    def captured(self, batch: list[pagoda.Sequence], counts: list[int]) -> Callable[[], None]:
        graphs: list[Callable[[], None]] = []

        def capture(step: pagoda.Step) -> None:
            self.stream.begin_capture()
            self.forward(step)
            graphs.append(self.stream.end_capture())
            graphs[0]()

        self.step(batch, counts, capture)
        return graphs[0]


@pytest.mark.parametrize(("new_tokens", "seed"), [(1, 0), (3, 1), (12, 2)])
def test_one_graph_serves_sequences_that_grow_join_and_leave(
    new_tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(monkeypatch, new_tokens, seed)
    rng = np.random.default_rng(seed)
    live = [model.create() for _ in range(3)]
    model.step(live, [new_tokens] * 3)
    graph = model.captured(live[:2], [1, new_tokens])
    for _ in range(25):
        action = rng.integers(5)
        if action == 0 and len(live) < SEQUENCES:
            live.append(model.fork(live[rng.integers(len(live))]) if rng.integers(2) else model.create())
        elif action == 1 and len(live) > 1:
            live.pop(rng.integers(len(live))).release()
        elif action == 2:
            model.cache.demote(live[0])
        batch = [live[i] for i in rng.permutation(len(live))[: rng.integers(1, len(live) + 1)]]
        counts = rng.integers(0, new_tokens + 1, len(batch)).tolist()
        model.step(batch, counts, lambda step: step.replay(graph))
    model.driver.check()


def test_a_graph_reads_common_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured where nothing is in common, replayed where much is."""
    model = Model(monkeypatch, 4, 0)
    root = model.create()
    for _ in range(90):
        model.step([root], [4])
    alone = [model.create() for _ in range(2)]
    graph = model.captured(alone, [1, 1])
    forks = [model.fork(root) for _ in range(SEQUENCES - 1)]
    for _ in range(3):
        model.step([root, *forks], [2] * SEQUENCES, lambda step: step.replay(graph))
        assert model.cache._device is not None
        assert model.cache._device._tables.members == 2 * SEQUENCES
    model.step(alone, [1, 1], lambda step: step.replay(graph))


def test_what_is_larger_than_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, 2, 0)
    live = [model.create() for _ in range(SEQUENCES + 1)]
    with pytest.raises(pagoda.InvalidArgument, match="new_tokens = 3: at most 2"):
        model.step(live[:1], [3])
    with pytest.raises(pagoda.InvalidArgument, match=r"7 sequences: at most 6"):
        model.step(live, [1] * len(live))
    model.cache.audit()
    with pytest.raises(pagoda.InvalidArgument, match="up to 12 tokens"), model.cache.step(live[:1], [1]) as step:
        step.append(0, np.zeros((13, 2, 64), np.float16), np.zeros((13, 2, 64), np.float16))
    model.cache.audit()


def test_replay_needs_maxima_and_a_layer_that_is_not_appended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, 1, 0)
    sequence = model.create()
    with pytest.raises(pagoda.InvalidArgument, match="appended"), model.cache.step([sequence], [1]) as step:
        step.append(0, model.k[0], model.v[0])
        step.replay(lambda: None)
    spec = pagoda.ModelSpec(layers=LAYERS)
    plain = pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0)
    with pytest.raises(pagoda.InvalidArgument, match="maxima"), plain.step([plain.create()], [1]) as step:
        step.replay(lambda: None)
    on_cpu = pagoda.Cache(spec, device="cpu", device_memory="8MiB", host_memory=0)
    with pytest.raises(pagoda.BackendUnavailable, match="CPU"):
        on_cpu.declare(sequences=1, new_tokens=1, context=1)
