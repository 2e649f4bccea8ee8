"""The CPU's part in attention over pages of the host tier, on the emulated device: however work is divided, the result
is the same, and removing a wait between the two is noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import CallerStream, EmulatedDriver, Stream
from hypothesis import given
from hypothesis import strategies as st
from mirror import INTEGER_ISAS, Mirror, layer
from pagoda import _core, rates
from pagoda.device import streaming
from pagoda.device.partials import Asked, Buffer, Partials
from pagoda.rates import Calibration, Routes
from shares import Shares
from test_device_streaming import (
    SCENES,
    LateCaller,
    LateDriver,
    RestlessDriver,
    a_ragged_batch,
    attended,
    cache_of_pages,
    engine_of,
    opened,
    poisoned_slots,
    to_the_host,
)

Array = npt.NDArray[Any]

__all__ = ["poisoned_slots"]


EVERYTHING, NOTHING = Shares(memory=1.0), Shares(ring=1.0)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[[Routes | None], None]:
    """Sets how caches opened from now on divide work."""
    isas = [isa for isa in _core.build_info()["isas"] if isa not in INTEGER_ISAS]
    # Integer products are another arithmetic; tests of the CPU compare them with float64.
    monkeypatch.setenv("PAGODA_CPU_ISA", isas[-1])

    def divide(routes: Routes | None) -> None:
        monkeypatch.setattr(rates, "routes_of", lambda gpu, threads: routes)

    return divide


HEADS: dict[str, tuple[list[pagoda.AttentionLayer], dict[str, Any]]] = {
    "eight query heads on one": ([layer(num_q_heads=8, num_kv_heads=1), layer(window=70)], {}),
    "an odd number of heads": ([layer(num_q_heads=3, num_kv_heads=3)] * 2, {}),
    "bf16 rows": ([layer()], {"k_dtype": "bf16", "v_dtype": "bf16"}),
}


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        *((name, Shares(ring=0.3, mapped=0.2, memory=0.5)) for name in {**SCENES, **HEADS}),
        *(("16 bits", shares) for shares in (NOTHING, EVERYTHING, Shares(mapped=0.5, memory=0.5), Shares(mapped=1.0))),
        ("16 bits", Shares(ring=0.5, mapped=0.5)),
    ],
)
def test_a_ragged_batch_that_is_divided(
    name: str, shares: Shares, divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(shares)
    scene = {**SCENES, **HEADS}[name]
    with a_ragged_batch(monkeypatch, scene, to_the_host, gap=name == "spans") as mirror:
        traffic = engine_of(mirror.cache).traffic
        assert (traffic.memory > 0) == (shares.memory > 0)
        assert (traffic.ring > 0) == (shares.ring > 0)
        assert (traffic.mapped > 0) or not shares.mapped


@pytest.mark.parametrize(
    "shares", [EVERYTHING, NOTHING, Shares(ring=0.3, mapped=0.2, memory=0.5), Shares(mapped=1.0)], ids=str
)
@pytest.mark.parametrize("on_disk", [(208, 400), (0, 400), (0, 96), (96, 208)])
def test_pages_on_disk_beside_those_of_the_cpu(
    shares: Shares,
    on_disk: tuple[int, int],
    divided: Callable[[Routes | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages on disk come through the ring, whatever the rates; the CPU takes only host pages before them."""
    divided(shares)
    driver = RestlessDriver(1)
    options = {"device_memory": "512KiB", "headroom": 400, "disk": tmp_path / "pages", "disk_memory": "32MiB"}
    with opened(monkeypatch, driver, pagoda.ModelSpec([layer(), layer(window=120)]), spill=False, **options) as cache:
        mirror = Mirror(cache)
        long, other = mirror.create(), mirror.create()
        mirror.step([long, other], [410, 150])
        cache.demote(long.sequence).wait()
        cache.demote(other.sequence).wait()
        cache.demote(long.sequence, on_disk, to="disk").wait()
        cache._spill.may_bring_in(np.array([long.sequence.id, other.sequence.id], np.uint64))
        mirror.step([long, other], [1, 2])
        traffic = engine_of(cache).traffic
        assert mirror.last is not None
        assert mirror.last.report.bytes["disk"] > 0
        assert traffic.ring > 0
        assert (traffic.memory > 0) == (shares.memory > 0)
        mirror.step([other, long], [40, 2], accepted=[1, 2])
        mirror.look()
        driver.check()


def test_bytes_by_route(divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """30 pages of 2 layers, in stretches of 4. The CPU's half is 3 stretches; a third of the rest is read in place."""
    divided(Shares(ring=2 / 6, mapped=1 / 6, memory=1 / 2))
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(4))
    page = 16 * 128
    for _ in range(2):
        mirror.step([tokens], [1])
    assert mirror.last is not None
    report = mirror.last.report
    assert report.bytes == {"pcie": 2 * 18 * page, "disk": 0, "memory": 2 * 12 * page}
    traffic = engine_of(mirror.cache).traffic
    # The last two pages are in the stretch of the new token.
    assert (traffic.ring, traffic.mapped) == (2 * 12 * page, 2 * 6 * page)
    seconds = report.seconds
    assert report.fractions({"pcie": 2e9, "memory": 1e9}) == {
        "pcie": 2 * 18 * page / 2e9 / seconds,
        "memory": 2 * 12 * page / 1e9 / seconds,
    }
    mirror.cache.close()


def test_pages_that_sequences_share_stay_with_the_device(
    divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device reads them once for all sequences; the pages of a sequence on its own are divided."""
    divided(EVERYTHING)
    spec = pagoda.ModelSpec(layers=[layer()])
    with opened(monkeypatch, RestlessDriver(2), spec, device_memory="512KiB") as cache:
        mirror = Mirror(cache)
        root, alone = mirror.create(), mirror.create()
        mirror.step([root, alone], [600, 96])
        forks = [root, *(mirror.fork(root) for _ in range(3))]
        mirror.step(forks, [40, 3, 1, 2])
        for tokens in (*forks, alone):
            cache.demote(tokens.sequence).wait()
        mirror.step([*forks, alone], [1, 2, 1, 3, 1])
        assert engine_of(cache)._tables.members > 0
        assert engine_of(cache).traffic.memory == 64 * 128, "a stretch of one sequence"


def test_centres_that_only_the_device_knows(
    divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel takes them from the first rows, again after the cache was empty. Without them the CPU's part is far off."""
    divided(EVERYTHING)
    spec = pagoda.ModelSpec(layers=[layer(head_dim=32), layer(head_dim=32, kv_owner=0)])
    options: dict[str, Any] = {"k_dtype": "q8_0", "v_dtype": "q8_0"}
    rng = np.random.default_rng(0)
    with opened(monkeypatch, RestlessDriver(3), spec, device_memory="512KiB", **options) as cache:
        k, v = rng.standard_normal((2, 300, 2, 32), np.float32)
        for offset in (5, -20):
            sequence = cache.create()
            with cache.step([sequence], [300]) as step:
                step.append(0, k + offset, v)
            outs = []
            for _ in range(2):
                with cache.step([sequence], [1]) as step:
                    step.append(0, k[:1] + offset, v[:1])
                    q = np.ones((1, 4, 32), np.float32)
                    outs.append([step.attend(index, q) for index in (0, 1)])
                    step.commit([0])
                cache.demote(sequence).wait()
            assert engine_of(cache).traffic.memory > 0
            np.testing.assert_allclose(outs[1], outs[0], atol=1e-5)
            sequence.release()


def test_pinned_memory_is_used_again_and_stays_while_it_is_read() -> None:
    buffer = Buffer(EmulatedDriver())
    first = buffer.take(1)
    assert len(first.array) == 4096
    assert buffer.take(4096) is first
    second = buffer.take(4097)
    assert len(second.array) == 8192
    assert buffer.take(100) is second
    assert buffer._held == [first, second]


def test_queries_in_any_layout(divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before tokens, backwards, strided, and as bits of bf16."""
    divided(EVERYTHING)
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(5))
    cache, rng = mirror.cache, np.random.default_rng(0)
    q = (rng.standard_normal((2, 4, 16), np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    bits = (q.view(np.uint32) >> 16).astype(np.uint16)
    with cache.step([tokens.sequence], [2]) as step:
        k, v = rng.standard_normal((2, 2, 2, 16), np.float32)
        step.append(0, k, v)
        step.append(1, k, v)
        right = step.attend(0, q)
        assert engine_of(cache).traffic.memory > 0
        outside, backwards = q.transpose(1, 0, 2).copy().transpose(1, 0, 2), q[::-1].copy()[::-1]
        for other in (outside, backwards, q.repeat(2, 1)[:, ::2]):
            # Overwrites the right results of the previous call.
            step.attend(0, -q)
            np.testing.assert_array_equal(step.attend(0, other), right)
        step.attend(0, -q)
        out = step.attend(0, bits, dtype="bf16")
        np.testing.assert_allclose((out.astype(np.uint32) << 16).view(np.float32), right, rtol=1e-2, atol=1e-2)
        step.commit([0])
    cache.close()


def test_what_the_cpu_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages outside its memory and arrays of other shapes are refused, and nothing is read."""
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(10))
    core, cpu = engine_of(mirror.cache).core, _core.Partials(1, None)
    q, parts = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 18), np.float32)
    with mirror.cache.step([tokens.sequence], [1]) as step:
        for layer_ in (0, 1):
            step.append(layer_, *np.zeros((2, 1, 2, 16), np.float32))

        def attend(begin: int, q: Array = q, parts: Array = parts, entries: int = 1) -> int:
            return cpu.attend(core, 0, np.full(entries, begin, np.uint32), q, parts)

        assert attend(480) == 480 * 128
        for given, message in (
            ({"begin": 481}, r"begins = \[481\]: the end of tokens of the host tier alone"),
            ({"begin": 480, "entries": 2}, "begins = 2 entries: one for each of 1 sequences"),
            ({"begin": 480, "q": q[:, :3]}, r"q = shape \[1, 3, 16\]: \[1, 4, 16\]"),
            ({"begin": 480, "parts": parts[..., :17]}, r"parts = shape \[1, 4, 17\]: \[1, 4, 18\]"),
        ):
            with pytest.raises(pagoda.InvalidArgument, match=message):
                attend(**given)
        step.commit([0])
    with pytest.raises(pagoda.InvalidArgument, match="open step"):
        cpu.attend(core, 0, np.zeros(1, np.uint32), q, parts)
    mirror.cache.close()


def test_the_same_division_gives_the_same_bits(
    divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(Shares(ring=0.5, memory=0.5))
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(6))
    first, second = (attended(mirror.cache, [tokens.sequence], [1], 5) for _ in range(2))
    assert first == second
    mirror.cache.close()


def test_a_deterministic_cache_is_not_divided(
    divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits must not depend on where pages lie."""
    divided(EVERYTHING)
    spec = pagoda.ModelSpec(layers=[layer(num_q_heads=2, num_kv_heads=1)])
    options: dict[str, Any] = {"device_memory": "1MiB", "deterministic": True}
    with opened(monkeypatch, EmulatedDriver(), spec, **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [130])
        cache.demote(tokens.sequence).wait()
        mirror.look()
        assert engine_of(cache).traffic.memory == 0 < engine_of(cache).traffic.mapped


def test_a_step_that_is_divided_is_not_captured(
    divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(EVERYTHING)
    driver = RestlessDriver(6)
    stream = CallerStream(driver)
    with opened(monkeypatch, driver, pagoda.ModelSpec(layers=[layer()]), device_memory="2MiB") as cache:
        cache.declare(sequences=1, new_tokens=200, context=1000)
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [200])
        cache.demote(tokens.sequence).wait()
        mirror.look()
        assert engine_of(cache).traffic.memory > 0
        k = np.zeros((1, 2, 16), np.float32)
        with cache.step([tokens.sequence], [1], stream=stream) as step:
            step.append(0, k, k)
            stream.begin_capture()
            with pytest.raises(pagoda.InvalidArgument, match="layer 0 in a graph"):
                step.attend(0, np.zeros((1, 4, 16), np.float32))
            stream.end_capture()
            step.commit([0])


def test_what_is_kept_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rates kept for this device and number of threads decide; without them the CPU takes no part."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = {"ring": 5.0, "mapped": 4.0, "memory": 5.0}
    measured: list[dict[str, float]] = [*({route: rate} for route, rate in alone.items()), {"ring": 5.0, "memory": 5.0}]
    routes = Routes(2, measured, dict.fromkeys(alone, 0.0), {"f16": 5.0})
    assert routes.ceilings == {"pcie": 5.0, "memory": 5.0}
    links = {"memory": 5.0, "disk": 1.0}

    def memory(threads: int) -> int:
        mirror, _ = cache_of_pages(monkeypatch, RestlessDriver(7), threads=threads)
        mirror.look()
        read = engine_of(mirror.cache).traffic.memory
        mirror.cache.close()
        return read

    assert memory(2) == 0
    rates.keep(Calibration(2, str(tmp_path), links, links, {"another": routes}))
    assert memory(2) == 0
    rates.keep(Calibration(2, str(tmp_path), links, links, {"emulated": routes}))
    assert memory(1) == 0
    assert memory(2) == 2 * 12 * 16 * 128, "half of 30 pages, in stretches of 4"


@pytest.mark.parametrize(
    ("k", "v", "stretches"),
    [
        ("f16", "f16", 3),  # Half of 30 pages, which are 7.5 stretches.
        ("q8_0", "q8_0", 1),  # A quarter: the CPU's rate is 5 / 3, the ring's 5.
        ("f16", "q8_0", 2),  # 64 bytes at 5 and 34 at 5 / 3 are 98 at 2.9: 2.7 of 7.5.
        ("bf16", "q8_0", 0),  # bf16 was not measured.
    ],
)
def test_the_cpu_has_what_it_can_do_of_a_format(
    k: str, v: str, stretches: int, divided: Callable[[Routes | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ring as fast as the CPU is with f16 rows."""
    measured = [{"ring": 5.0}, {"ring": 5.0, "memory": 5.0}]
    divided(Routes(2, measured, {"ring": 0.0, "memory": 0.0}, {"f16": 5.0, "q8_0": 5 / 3}))
    spec = pagoda.ModelSpec([layer(head_dim=32)] * 2)
    cache = opened(
        monkeypatch, RestlessDriver(7), spec, device_memory="1MiB", center=None, rotate=False, k_dtype=k, v_dtype=v
    )
    mirror = Mirror(cache, np.random.default_rng(7))
    tokens = mirror.create()
    for _ in range(4):
        mirror.step([tokens], [120])
        cache.demote(tokens.sequence).wait()
    mirror.step([tokens], [1])
    rows = sum({"f16": 64, "bf16": 64, "q8_0": 34}[name] for name in (k, v))
    assert engine_of(cache).traffic.memory == 2 * stretches * 64 * 2 * rows
    cache.close()


def finish(
    division: Shares, monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], None] | None = None
) -> None:
    """Queries arrive late and the caller does not wait for attention: the result equals that of the device alone."""
    monkeypatch.setattr(rates, "routes_of", lambda gpu, threads: division)
    driver = LateDriver()
    mirror, tokens = cache_of_pages(monkeypatch, driver)
    if make is not None:
        make(monkeypatch)
    cache, rng = mirror.cache, np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 2, 16), np.float32)
    queries = rng.standard_normal((2, 1, 4, 16), np.float32)
    outs = []
    for shares, stream in ((division, LateCaller(driver)), (NOTHING, CallerStream(driver))):
        partials = engine_of(cache)._streams._partials
        assert partials is not None
        partials._routes = shares
        with cache.step([tokens.sequence], [1], stream=stream) as step:
            for index in (0, 1):
                q = np.full_like(queries[index], np.nan)
                step.append(index, k, v)
                stream.work.append(lambda q=q, index=index: np.copyto(q, queries[index]))  # type: ignore[misc]
                outs.append(step.attend(index, q))
            step.commit([0])
        stream.reach(len(stream.work))
        assert (engine_of(cache).traffic.memory > 0) == (shares is division)
    for index in (0, 1):
        np.testing.assert_allclose(outs[index], outs[2 + index], atol=1e-5)
    cache.close()


def no_wait_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Partials.ask

    def hasty(self: Partials, *given: Any) -> Asked:
        return replace(ask(self, *given), come=SimpleNamespace(done=lambda: True, wait=lambda: None))

    monkeypatch.setattr(Partials, "ask", hasty)


def queries_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Partials.ask
    monkeypatch.setattr(Partials, "ask", lambda self, stream, *given: ask(self, self._driver.stream(), *given))


def parts_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Partials._send
    monkeypatch.setattr(Partials, "_send", lambda self, stream, runs: send(self, self._driver.stream(), runs))


def parts_of_one_layer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends a layer's parts only after the next layer has overwritten them."""
    held: list[Any] = []

    def send(self: Partials, stream: Stream, runs: Any) -> None:
        held.append(runs)
        if len(held) == 2:
            for each in held:
                SEND(self, stream, each)

    monkeypatch.setattr(Partials, "_send", send)


SEND = Partials._send

DIVISIONS = [EVERYTHING, Shares(ring=0.5, memory=0.5), Shares(mapped=0.5, memory=0.5)]


@pytest.mark.parametrize("division", DIVISIONS)
def test_what_waits_for_what(division: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(division, monkeypatch)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(
    "broken", [no_wait_for_queries, queries_on_another_stream, parts_on_another_stream, parts_of_one_layer_late]
)
def test_what_is_not_waited_for_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], division: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        finish(division, monkeypatch, broken)


def test_kernels_do_not_wait_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the CPU begins, all passes but the last have been launched."""
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(rates, "routes_of", lambda gpu, threads: Shares(ring=0.5, memory=0.5))
    mirror, _ = cache_of_pages(monkeypatch, RestlessDriver(8))
    answer, brought = Partials.answer, streaming.Streams.brought

    def noted(self: streaming.Streams, layer: int, number: int, stream: Any) -> Any:
        begun.append((layer, number))
        return brought(self, layer, number, stream)

    def now(self: Partials, stream: Any, asked: Asked, target: int) -> int:
        begun.append((asked.layer, -1))
        return answer(self, stream, asked, target)

    monkeypatch.setattr(streaming.Streams, "brought", noted)
    monkeypatch.setattr(Partials, "answer", now)
    mirror.look()
    last = len(engine_of(mirror.cache)._streams._groups[0].copies) - 1
    assert last > 1
    assert begun == [(layer, number) for layer in (0, 1) for number in (*range(last), -1, last)]
    mirror.cache.close()


PARTS = 24


@st.composite
def measured(draw: st.DrawFn) -> Routes:
    """Rates of a machine: no route is faster beside others than alone."""
    names = ("ring", "mapped", "memory")
    alone = {name: draw(st.floats(0.5, 20.0)) for name in names}
    sets = [(name,) for name in names] + [("ring", "memory"), ("mapped", "memory"), names]
    part = st.floats(0.2, 1.0)
    several = [{name: alone[name] * (draw(part) if len(one) > 1 else 1.0) for name in one} for one in sets]
    return Routes(1, several, {name: draw(st.sampled_from([0.0, 0.1, 1.0])) for name in names})


@given(
    measured(),
    st.integers(0, 30),
    st.dictionaries(st.sampled_from(["ring", "mapped", "memory"]), st.integers(1, 4), min_size=1),
    st.integers(0, PARTS),
)
def test_routes_end_together_and_no_division_is_faster(
    routes: Routes, size: int, costs: dict[str, int], part: int
) -> None:
    """Compared with every division into 24ths over every measured set of routes."""
    most = {"memory": part * size / PARTS}

    def seconds(rates: Mapping[str, float], shares: Mapping[str, float]) -> float:
        return max(
            (routes.start[name] + costs[name] * share / rates[name] for name, share in shares.items() if share),
            default=0,
        )

    best = float("inf")
    for of in routes.rates:
        if not of.keys() <= costs.keys():
            continue
        for cut in np.ndindex(*[PARTS + 1] * (len(of) - 1)):
            parts = [*cut, PARTS - sum(cut)]
            shares = {name: size * parts[at] / PARTS for at, name in enumerate(of)}
            if parts[-1] >= 0 and shares.get("memory", 0.0) <= most["memory"]:
                best = min(best, seconds(of, shares))
    chosen = routes.divide(size, costs, most)
    if not chosen:
        assert best == float("inf"), "there is a way"
        return
    assert sum(chosen.values()) == pytest.approx(size)
    assert min(chosen.values()) >= 0
    assert chosen.get("memory", 0.0) <= most["memory"] + 1e-6
    of = next(of for of in routes.rates if of.keys() == chosen.keys())
    found = seconds(of, chosen)
    assert found <= best + 1e-9
    for name, share in chosen.items():
        if 0 < share < most.get(name, float("inf")) - 1e-6:
            assert routes.start[name] + costs[name] * share / of[name] == pytest.approx(found)
