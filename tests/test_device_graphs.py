"""Graphs: the captured kernels of one step do every later step up to the declared maxima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pagoda
import pytest
from emulator.driver import CallerStream, EmulatedDriver, Stream, install_driver
from graphs import LAYERS, NORMS, SEQUENCES, Model
from mirror import Mirror, center_of, kept_of, layer
from pagoda.device.engine import SPANS_DECLARED
from pagoda.kernels.instances import Kernel


def emulated(monkeypatch: pytest.MonkeyPatch, new_tokens: int, seed: int) -> Model:
    driver = install_driver(monkeypatch, EmulatedDriver(seed))
    return Model(np, CallerStream(driver), new_tokens, seed)


@pytest.mark.parametrize(("new_tokens", "seed"), [(1, 0), (3, 1), (12, 2)])
def test_one_graph_serves_sequences_that_grow_join_and_leave(
    new_tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = emulated(monkeypatch, new_tokens, seed)
    model.live(25)
    model.stream.driver.check()


@pytest.mark.parametrize(("declared", "new_tokens"), [(4, 2), (12, 12)])
def test_a_graph_reads_common_pages_once(declared: int, new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured without common pages, replayed with many, by queries that are decoded or prefilled."""
    model = emulated(monkeypatch, declared, 0)
    root = model.create()
    for _ in range(90):
        model.step([root], [4])
    alone = [model.create() for _ in range(2)]
    graph = model.captured(alone, [1, 1])
    forks = [model.fork(root) for _ in range(SEQUENCES - 1)]
    for _ in range(3):
        model.step([root, *forks], [new_tokens] * SEQUENCES, lambda step: step.replay(graph))
        assert model.cache._device is not None
        assert model.cache._device._tables.members == new_tokens * SEQUENCES
    model.step(alone, [1, 1], lambda step: step.replay(graph))


def test_a_graph_takes_the_centre_from_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured in a step with too few rows for a centre, replayed in one with enough, and in one over those rows."""
    stream, rng = CallerStream(install_driver(monkeypatch, EmulatedDriver(0))), np.random.default_rng(1)
    q, k, v = (rng.standard_normal((32, heads, 64)).astype(np.float16) for heads in (4, 2, 2))
    spec, out = pagoda.ModelSpec([pagoda.AttentionLayer(4, 2, 64)]), np.empty_like(q)
    with pagoda.Cache(spec, device="cuda", device_memory="4MiB", host_memory=0, k_dtype="q4_0") as cache:
        cache.declare(sequences=2, new_tokens=16, context=64)
        first, second = cache.create(), cache.create()
        with cache.step([first], [1], stream=stream) as step:
            step.forward(0, q, k, v, out=out)
        with cache.step([first], [1], stream=stream) as step:
            stream.begin_capture()
            step.forward(0, q, k, v, out=out)
            graph = stream.end_capture()
            graph.launch()
        first.release()
        assert cache._device is not None
        memory: Any = cache._device._appends._centers._memory
        k += 8 * rng.standard_normal(k.shape[1:]).astype(np.float16)
        means = center_of(k[:16])
        for _ in range(2):
            with cache.step([second], [16], stream=stream) as step:
                step.replay(graph.launch)
            np.testing.assert_array_equal(memory.array.view(np.float32), means.ravel())
            k *= -1
        # Too few rows again, with one head's sign reversed.
        second.release()
        k[:, 1] *= -1
        kept = kept_of(means, k[:7])
        assert kept[0].any()
        assert not kept[1].any()
        with cache.step([cache.create()], [7], stream=stream) as step:
            step.replay(graph.launch)
        np.testing.assert_array_equal(memory.array.view(np.float32), kept.ravel())


def test_the_engine_fits_the_largest_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the step, or, once maxima are declared, that of any step."""
    seen: list[str] = []
    launch = Stream.launch

    def noted(self: Stream, kernel: Kernel, *rest: Any, **options: Any) -> None:
        if "FewShape" in kernel.short:
            seen.append(kernel.short.rstrip(">").split(", ")[-2])
        launch(self, kernel, *rest, **options)

    install_driver(monkeypatch, EmulatedDriver(0))
    monkeypatch.setattr(Stream, "launch", noted)
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=1, head_dim=64)])

    def engines(cache: pagoda.Cache, counts: list[int]) -> list[str]:
        seen.clear()
        rows = np.ones((sum(counts), 4, 64), np.float16)
        with cache.step([cache.create() for _ in counts], counts) as step:
            step.forward(0, rows, rows[:, :1], rows[:, :1])
        return list(seen)

    for declared, counts, engine in (
        (None, [1, 2, 1], "1"),
        (None, [1, 4], "2"),
        (1, [1, 1], "1"),
        (4, [1, 1], "2"),
    ):
        with pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0) as cache:
            if declared:
                cache.declare(sequences=2, new_tokens=declared, context=64)
            assert engines(cache, counts) == [engine], (declared, counts)


def test_no_step_finds_less_memory_than_was_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, few tokens and single ones, with and without common pages: growing memory would wait for the device."""
    install_driver(monkeypatch, EmulatedDriver(0))
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=1, head_dim=64)])
    with pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0, page_size=16) as cache:
        cache.declare(sequences=4, new_tokens=32, context=512)
        assert cache._device is not None
        monkeypatch.setattr(cache._device._attends._scratch, "grow", lambda *_, **options: pytest.fail("it grows"))
        root, rows = cache.create(), np.ones((128, 4, 64), np.float16)
        for length in range(0, 384, 128):
            batch = [root, *(root.fork() for _ in range(3))]
            for new_tokens, shares in ((32, False), (16, True), (4, True), (1, True)):
                with cache.step(batch, [new_tokens] * 4) as step:
                    given = rows[: 4 * new_tokens]
                    assert (step.forward(0, given, given[:, :1], given[:, :1]) == 1).all()
                    assert cache._device._tables.members == 4 * new_tokens * (shares and length > 350)
                    step.commit([0] * 4)
            with cache.step([root], [128]) as step:
                step.append(0, rows[:, :1], rows[:, :1])


def test_what_is_larger_than_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = emulated(monkeypatch, 2, 0)
    live = [model.create() for _ in range(SEQUENCES + 1)]
    with pytest.raises(pagoda.InvalidArgument, match="step = 51 new tokens: at most 50"):
        model.step(live[:1], [51])
    with pytest.raises(pagoda.InvalidArgument, match=r"7 sequences: at most 6"):
        model.step(live, [1] * len(live))
    model.cache.audit()
    with pytest.raises(pagoda.InvalidArgument, match="up to 50 tokens"), model.cache.step(live[:1], [1]) as step:
        step.append(0, np.zeros((51, 2, 64), np.float16), np.zeros((51, 2, 64), np.float16))
    model.cache.audit()


def test_no_graph_does_a_step_with_more_tokens_than_declared_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = emulated(monkeypatch, 2, 0)
    one, cache, stream = model.create(), model.cache, model.stream
    model.step([one], [2])
    graph = model.captured([one], [2])
    with (
        pytest.raises(pagoda.InvalidArgument, match="replay: new_tokens = 3 of a sequence in this step: at most 2"),
        cache.step([one], [3], stream=stream) as step,
    ):
        step.replay(graph)
    with (
        stream,
        pytest.raises(pagoda.InvalidArgument, match="layer 0 in a graph: not in a step with more than 2 new tokens"),
        cache.step([one], [3], stream=stream) as step,
    ):
        stream.begin_capture()
        model.forward(step)
    stream.end_capture()
    cache.audit()
    model.step([one], [3])
    model.step([one], [1], lambda step: step.replay(graph))


def test_a_capture_that_has_no_memory_says_what_to_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install_driver(monkeypatch, EmulatedDriver())
    stream, rows = CallerStream(driver), np.zeros((9, 4, 64), np.float32)
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=1, head_dim=64)])
    with pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0) as cache:
        batch = [cache.create() for _ in rows]
        with cache.step(batch[:1], [1], stream=stream) as step:
            step.forward(0, rows[:1], rows[:1, :1], rows[:1, :1])
        with (
            stream,
            pytest.raises(pagoda.InvalidArgument, match=r"maxima declared first, by Cache\.declare"),
            cache.step(batch, [1] * 9, stream=stream) as step,
        ):
            stream.begin_capture()
            step.forward(0, rows, rows[:, :1], rows[:, :1])
        stream.end_capture()
        cache.audit()


def test_a_graph_loads_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses that during a capture in global mode, as torch's are, and the capture is lost."""
    model = emulated(monkeypatch, 1, 0)
    one = model.create()
    for kernel in ("append<F16, F16, F16>", "attend<ManyQueries"):
        with pytest.raises(pagoda.InvalidArgument, match=f"step: in a graph before {kernel}.* was launched"):
            model.captured([one], [1])
        model.stream.end_capture()
        model.cache.audit()
        with pytest.raises(ZeroDivisionError), model.cache.step([one], [1], stream=model.stream) as step:
            step.append(0, model.k[0], model.v[0])
            raise ZeroDivisionError


def test_a_checked_cache_is_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the device after each append."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    stream, rows = CallerStream(driver), np.zeros((1, 4, 64), np.float32)
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(num_q_heads=4, num_kv_heads=1, head_dim=64)])
    with pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0, checked=True) as cache:
        one = cache.create()
        with cache.step([one], [1], stream=stream) as step:
            step.forward(0, rows, rows[:, :1], rows[:, :1])
        with (
            stream,
            pytest.raises(pagoda.InvalidArgument, match="append: in a graph: not in a cache with checked=True"),
            cache.step([one], [1], stream=stream) as step,
        ):
            stream.begin_capture()
            step.append(0, rows[:, :1], rows[:, :1])
        stream.end_capture()
        cache.audit()


def test_a_capture_is_inside_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event recorded during a capture belongs to the graph: nobody could ever wait for the step."""
    model = emulated(monkeypatch, 1, 0)
    live, cache, stream = [model.create() for _ in range(2)], model.cache, model.stream
    model.step(live, [1, 1])
    free = cache.stats().device
    with stream:
        stream.begin_capture()
        with (
            pytest.raises(pagoda.InvalidArgument, match="begin to capture inside"),
            cache.step(live, [1, 1], stream=stream),
        ):
            pass
        stream.end_capture()
        with (
            pytest.raises(pagoda.InvalidArgument, match="end the capture inside"),
            cache.step(live, [1, 1], stream=stream) as step,
        ):
            stream.begin_capture()
            model.forward(step)
        stream.end_capture()
        with pytest.raises(ZeroDivisionError), cache.step(live, [1, 1], stream=stream):
            stream.begin_capture()
            raise ZeroDivisionError
        stream.end_capture()
    cache.audit()
    stream.reach(len(stream.work))
    assert cache.stats().device == free
    model.step(live, [1, 1])


def test_a_capture_goes_on_whatever_the_cache_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call queries an event, which would end a capture in global mode: neither in the step nor after its rollback."""
    model = emulated(monkeypatch, 1, 0)
    (one, two), cache, stream = (model.create() for _ in range(2)), model.cache, model.stream
    model.step([one, two], [1, 1])
    monkeypatch.setattr(stream.driver, "work_a_little", lambda: None)
    with pytest.raises(ZeroDivisionError), cache.step([two], [1], stream=stream) as step:
        # No attention, for which the caller's stream would wait: this step stays unfinished.
        step.append(0, model.k[0], model.v[0])
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), cache.step([one], [1], stream=stream) as step:
        stream.begin_capture()
        step.append(0, model.k[0], model.v[0])
        cache.stats()
        ticket = cache.demote(two)
        assert not ticket.done()
        with pytest.raises(pagoda.InvalidArgument, match="wait: while the stream of the last step is captured"):
            ticket.wait()
        raise ZeroDivisionError
    cache.stats()
    with (
        pytest.raises(pagoda.InvalidArgument, match="step: while the stream of the last step is captured; end the cap"),
        cache.step([one], [1], stream=CallerStream(stream.driver)),
    ):
        pass
    stream.end_capture()
    assert ticket.wait()
    cache.audit()
    model.step([one, two], [1, 1])


def test_replay_needs_maxima_and_a_layer_that_is_not_appended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = emulated(monkeypatch, 1, 0)
    sequence = model.create()
    with pytest.raises(pagoda.InvalidArgument, match="appended"), model.cache.step([sequence], [1]) as step:
        step.append(0, model.k[0], model.v[0])
        step.replay(lambda: None)
    spec = pagoda.ModelSpec(layers=LAYERS)
    plain = pagoda.Cache(spec, device="cuda", device_memory="8MiB", host_memory=0, k_norms=NORMS)
    with pytest.raises(pagoda.InvalidArgument, match="maxima"), plain.step([plain.create()], [1]) as step:
        step.replay(lambda: None)
    on_cpu = pagoda.Cache(spec, device="cpu", device_memory="8MiB", host_memory=0, k_norms=NORMS)
    with pytest.raises(pagoda.BackendUnavailable, match="CPU"):
        on_cpu.declare(sequences=1, new_tokens=1, context=1)


def test_maxima_are_declared_once_and_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    model = emulated(monkeypatch, 1, 0)
    with pytest.raises(pagoda.InvalidArgument, match="a second time"):
        model.cache.declare(sequences=1, new_tokens=1, context=1)
    options: dict[str, Any] = {"device": "cuda", "device_memory": "8MiB", "host_memory": 0, "k_norms": NORMS}
    with pagoda.Cache(pagoda.ModelSpec(layers=LAYERS), **options) as cache:
        for name in ("sequences", "new_tokens", "context"):
            for wrong in (0, 1 << 40, 1 << 62):
                with pytest.raises(pagoda.InvalidArgument, match=f"{name} = {wrong}"):
                    cache.declare(**{"sequences": 1, "new_tokens": 1, "context": 1, name: wrong})
        with pytest.raises(pagoda.InvalidArgument, match="new_tokens = 32768: an int from 1 to 32767"):
            cache.declare(sequences=1 << 16, new_tokens=1 << 15, context=1)


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_only_spans_that_trail_have_angles_for_each_query(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, EmulatedDriver())
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(2, 1, 64, rope=pagoda.Rope(theta=100.0))])
    options: dict[str, Any] = {"retention": pagoda.SinkWindow(sinks=8, window=32, positions=positions)}
    rows = np.ones((60, 2, 64), np.float16)
    with pagoda.Cache(spec, device="cuda", device_memory="1MiB", host_memory=0, **options) as cache:
        cache.declare(sequences=1, new_tokens=60, context=200)
        assert cache._device is not None
        per_query = 60 if positions == "cache" else 0
        assert cache._device._tables.room.angles == SPANS_DECLARED + per_query
        one = cache.create()
        for _ in range(3):
            with cache.step([one], [60]) as step:
                assert (step.forward(0, rows, rows[:, :1], rows[:, :1]) == 1).all()


def test_sinks_that_trail_in_pieces_may_have_too_many_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece needs angles for each query. A step that is refused changes nothing, and a smaller one goes on."""
    install_driver(monkeypatch, EmulatedDriver())
    rope = pagoda.Rope(theta=100.0)
    options: dict[str, Any] = {"page_size": 16, "retention": pagoda.SinkWindow(sinks=20, window=60, positions="cache")}
    spec = pagoda.ModelSpec([layer(head_dim=32, rope=rope)])
    with pagoda.Cache(spec, device="cuda", device_memory="1MiB", host_memory=0, **options) as cache:
        cache.declare(sequences=1, new_tokens=1, context=200, tokens=30)
        sequence = cache.create()
        rows = np.ones((30, 2, 32), np.float32)

        def step(count: int) -> None:
            with cache.step([sequence], [count]) as step:
                out = step.forward(0, rows[:count].repeat(2, 1), rows[:count], rows[:count])
                assert (out == 1).all()

        step(30)
        sequence.drop(5, 8)
        with pytest.raises(pagoda.InvalidArgument, match="step = 63 rotations of queries: at most 38"):
            step(30)
        assert len(sequence) == 27
        step(15)
        assert len(sequence) == 42


def test_spans_that_begin_and_end_inside_pages_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are declared, of two tokens in two pages each."""
    install_driver(monkeypatch, EmulatedDriver())
    spec = pagoda.ModelSpec([layer(head_dim=32)])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="1MiB", host_memory=0) as cache:
        cache.declare(sequences=1, new_tokens=1, context=2 * SPANS_DECLARED + 14, tokens=17)
        mirror = Mirror(cache)
        tokens = mirror.create()
        for kept in range(0, 2 * SPANS_DECLARED, 2):
            mirror.step([tokens], [16 if kept else 17])
            mirror.drop(tokens, kept, kept + (14 if kept else 15))
        with cache.step([tokens.sequence], [0]) as step:
            assert step.table(0).block_table.shape[1] == 2 * SPANS_DECLARED
        mirror.look()


def test_what_there_is_no_memory_for_is_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation is refused: steps work as before, and smaller maxima can be declared."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    spec = pagoda.ModelSpec([pagoda.AttentionLayer(2, 1, 64)])
    memory, left = driver.memory, 0

    def short(size: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise pagoda.BackendUnavailable("device_memory")
        return memory(size)

    rows = np.ones((60, 2, 64), np.float16)
    for pieces in range(3):
        with pagoda.Cache(spec, device="cuda", device_memory="1MiB", host_memory=0) as cache:
            sequence = cache.create()
            with cache.step([sequence], [40]) as step:
                step.forward(0, rows[:40], rows[:40, :1], rows[:40, :1])
            left = pieces
            with monkeypatch.context() as patched, pytest.raises(pagoda.BackendUnavailable):
                patched.setattr(driver, "memory", short)
                cache.declare(sequences=64, new_tokens=60, context=400)
            assert cache._device is not None
            scratch = cache._device._attends._scratch
            held = [0 if one is None else one.address for one in scratch._held]
            assert held == [scratch.partials, scratch.counters, scratch.parts]
            with cache.step([sequence], [60]) as step:
                out = step.forward(0, rows, rows[:, :1], rows[:, :1])
            assert (out == 1).all()
            cache.declare(sequences=2, new_tokens=1, context=200)
