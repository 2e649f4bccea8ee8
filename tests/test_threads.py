"""Calls of one cache from several threads: what others do between two calls of the core, without a clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import emulator
import numpy as np
import pagoda
import pytest
from emulator.driver import EmulatedDriver
from interrupts import interrupted
from mirror import Mirror, layer
from pagoda.device import cuda

SPEC = pagoda.ModelSpec(layers=[layer(), layer(), layer(window=40)])


class Meddled:
    """The core of a cache; once, right after a chosen call, another thread meddles."""

    def __init__(self, core: Any, after: str, meddle: Callable[[], object]) -> None:
        self._core, self._after, self._meddle = core, after, meddle
        self.meddled = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._core, name)
        if name != self._after:
            return call

        def meddled(*given: Any, **options: Any) -> Any:
            result = call(*given, **options)
            if not self.meddled and (name != "plan" or result.copies):
                self.meddled = True
                other = threading.Thread(target=self._meddle)
                other.start()
                other.join()
            return result

        return meddled


@pytest.mark.parametrize("after", ["resting", "free_blocks", "plan"])
@pytest.mark.parametrize("meddle", ["release", "truncate", "demote"])
def test_a_step_makes_room_whatever_other_threads_do_to_sequences_that_rest(after: str, meddle: str) -> None:
    options: dict[str, Any] = {"device_memory": "256KiB", "host_memory": "1MiB", "threads": 1, "headroom": 1000}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        mirror = Mirror(cache)
        resting, others, busy = mirror.create(), mirror.create(), mirror.create()
        mirror.step([resting], [100])
        mirror.step([others], [100])

        def act() -> None:
            if meddle == "release":
                mirror.release(resting)
            elif meddle == "truncate":
                mirror.truncate(resting, 0)
            else:
                cache.demote(resting.sequence).wait()

        meddled: Any = Meddled(cache._core, after, act)
        cache._spill._core = meddled
        for step in range(1, 13):
            mirror.step([busy], [40])
            assert len(busy.sequence) == 40 * step
        assert meddled.meddled
        mirror.look()


@pytest.mark.parametrize("call", ["demote", "promote", "prefetch"])
def test_pages_that_another_thread_has_moved_meanwhile_are_moved_from_where_they_are(call: str) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        child = mirror.fork(tokens)
        pages = cache.plan(child.sequence, "host").copies
        back = call != "demote"
        if back:
            cache.demote(child.sequence, (0, 50)).wait()
        core = cache._core
        meddled: Any = Meddled(core, "plan", lambda: move(tokens.sequence, (0, 30)).wait())
        move = cache.promote if back else cache.demote
        cache._core = meddled
        try:
            assert getattr(cache, call)(child.sequence).wait(60)
        finally:
            cache._core = core
        assert meddled.meddled
        assert len(cache.plan(child.sequence, "host").copies) == (len(pages) if back else 0)
        mirror.look()


class Interrupted:
    """The core of a cache, with Ctrl-C right before or right after it opens a step."""

    def __init__(self, core: Any, opens: bool = False) -> None:
        self._core, self._opens = core, opens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def reserve(self, *given: Any) -> None:
        if self._opens:
            self._core.reserve(*given)
        raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["before it opens", "after it ended"])
def test_ctrl_c_in_a_step_of_one_thread_leaves_that_of_another_alone(moment: str) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        check_steps_of_others(cache, moment)


def check_steps_of_others(cache: pagoda.Cache, moment: str) -> None:
    """Opens a step while another one, interrupted by Ctrl-C, is not yet open or has not finished its exit."""
    mirror = Mirror(cache)
    tokens, other = mirror.create(), mirror.create()
    mirror.step([tokens, other], [20, 20])
    interrupted = cache.step([other.sequence], [0])
    if moment == "after it ended":
        interrupted.__enter__()
        cache._core.commit(interrupted._number)
    with cache.step([tokens.sequence], [0]) as step:
        if moment == "before it opens":
            face: Any = cache
            core, device = face._core, face._device
            face._core = face._device = Interrupted(core)
            with pytest.raises(KeyboardInterrupt):
                interrupted.__enter__()
            face._core, face._device = core, device
        else:
            interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        with pytest.raises(pagoda.InvalidArgument, match="one open step"):
            cache.step([other.sequence], [0]).__enter__()
        assert step.cu_seqlens.tolist() == [0, 0]
    mirror.look()


def test_ctrl_c_as_a_step_opens_is_what_blocks_around_it_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enclosing blocks see only KeyboardInterrupt, and can release sequences of the step."""
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        monkeypatch.setattr(cache, "_core", Interrupted(cache._core, opens=True))
        with pytest.raises(KeyboardInterrupt), cache.create() as sequence, cache.step([sequence], [1]):
            pytest.fail("entered")
        assert cache.stats().sequences == 0
        cache.audit()


class Overtaken:
    """The core of a cache; once, while a chosen call waits for its turn, another thread meddles."""

    def __init__(self, core: Any, call: str, meddle: Callable[[], object]) -> None:
        self._core, self._call, self._meddle = core, call, meddle
        self.overtaken = False

    def __getattr__(self, name: str) -> Any:
        if name == self._call and not self.overtaken:
            self.overtaken = True
            other = threading.Thread(target=self._meddle)
            other.start()
            other.join()
        return getattr(self._core, name)


STEP_CALLS = ["append", "attend", "positions", "cu_seqlens", "table", "csr_table", "commit", "rollback"]


@pytest.mark.parametrize("call", STEP_CALLS)
def test_a_call_that_waits_until_its_step_has_ended_is_none_of_the_next_step(call: str) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        check_overtaken(cache, call)


def check_overtaken(cache: pagoda.Cache, call: str) -> None:
    """Makes a call on a step. Another thread meanwhile ends it and opens a new one, which must not receive the call."""
    if call == "replay":
        cache.declare(sequences=2, new_tokens=20, context=64)
    mirror = Mirror(cache)
    tokens, other = mirror.create(), mirror.create()
    mirror.step([tokens, other], [20, 20])
    old, new = cache.step([tokens.sequence], [1]), cache.step([other.sequence], [1])
    k, q = np.ones((1, 2, 16), np.float32), np.ones((1, 4, 16), np.float32)
    launched = []

    def append(step: pagoda.Step) -> None:
        for index in range(len(SPEC.layers)):
            step.append(index, k, k)

    def overtake() -> None:
        old.rollback()
        new.__enter__()
        if call not in ("append", "replay"):
            append(new)

    old.__enter__()
    table = old.table(0) if call == "csr_table" else None
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: old.append(0, k, k),
        "attend": lambda: old.attend(0, q),
        "positions": lambda: old.positions,
        "cu_seqlens": lambda: old.cu_seqlens,
        "table": lambda: old.table(0),
        "csr_table": lambda: table and table.csr,
        "replay": lambda: old.replay(lambda: launched.append(1)),
        "commit": old.commit,
        "rollback": old.rollback,
    }
    face: Any = cache
    core, device = face._core, face._device
    overtaken: Any = Overtaken(core, call, overtake)
    face._core, face._device = overtaken, device and overtaken
    with pytest.raises(pagoda.InvalidArgument, match="step = closed"):
        calls[call]()
    face._core, face._device = core, device
    assert overtaken.overtaken
    assert not launched
    if call in ("append", "replay"):
        append(new)
    new.commit(accepted=[0])
    mirror.look()


@pytest.fixture
def on_device(names_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache on an emulated device."""
    emulator.require()
    monkeypatch.setattr(cuda, "open_driver", lambda index: EmulatedDriver())
    options: dict[str, Any] = {"device": "cuda", "device_memory": "1MiB", "host_memory": "1MiB"}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        yield cache


@pytest.mark.parametrize("moment", ["before it opens", "after it ended"])
def test_ctrl_c_in_a_step_of_one_thread_leaves_that_of_another_alone_on_a_device(
    on_device: pagoda.Cache, moment: str
) -> None:
    check_steps_of_others(on_device, moment)


@pytest.mark.parametrize("call", [*STEP_CALLS, "replay"])
def test_a_call_that_waits_until_its_step_has_ended_is_none_of_the_next_step_on_a_device(
    on_device: pagoda.Cache, call: str
) -> None:
    check_overtaken(on_device, call)


def test_calls_on_a_device_take_turns(on_device: pagoda.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(on_device)
    sequences = [mirror.create() for _ in range(3)]
    mirror.step(sequences, [40] * 3)
    engine: Any = on_device._device
    poll, inside, seen = engine._poll, [0], []

    def slowly() -> None:
        inside[0] += 1
        seen.append(inside[0])
        # Lets other threads run.
        time.sleep(1e-3)
        poll()
        inside[0] -= 1

    monkeypatch.setattr(engine, "_poll", slowly)

    def move(sequence: pagoda.Sequence) -> None:
        for _ in range(5):
            assert on_device.demote(sequence).wait(60)
            assert on_device.promote(sequence).wait(60)
            on_device.stats()

    threads = [threading.Thread(target=move, args=(tokens.sequence,)) for tokens in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) >= 3 * 5 * 5
    assert set(seen) == {1}
    mirror.look()


@pytest.mark.parametrize("ask", ["stats", "demote"])
def test_a_handler_that_calls_a_cache_in_the_middle_of_a_call_on_a_device_is_refused(
    on_device: pagoda.Cache, ask: str
) -> None:
    """At any instruction: it gets an answer or that error, and the interrupted call continues as if nothing had happened."""
    mirror = Mirror(on_device)
    tokens, other = mirror.create(), mirror.create()
    mirror.step([tokens, other], [40, 40])
    rows, q = np.zeros((1, 2, 16), np.float32), np.ones((1, 4, 16), np.float32)
    answers: list[str | None] = []

    def work() -> None:
        assert on_device.demote(tokens.sequence).wait()
        assert on_device.promote(tokens.sequence).wait()
        with on_device.step([tokens.sequence], [1]) as step:
            for index in range(len(SPEC.layers)):
                step.forward(index, q, rows, rows)
            step.commit(accepted=[0])

    def handler() -> None:
        answers.append(None)
        try:
            on_device.stats() if ask == "stats" else on_device.demote(other.sequence)
        except pagoda.InvalidArgument as error:
            answers[-1] = str(error)

    for after in count(0, 37):
        before = len(answers)
        assert not interrupted(work, after, handler)
        if len(answers) == before:
            break
    assert set(answers) == {None, "cache: in use by the call that this signal or finaliser has interrupted"}
    mirror.look()


def test_what_interrupts_a_call_waits_for_no_other_threads_turn_on_a_device(
    on_device: pagoda.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread's turn may be waiting for the interrupted call. Here a finaliser runs while a call creates its error."""
    engine: Any = on_device._device
    sequence, refused = on_device.create(), list[str]()
    has_turn, ended = threading.Event(), threading.Event()

    def wait() -> bool:
        has_turn.set()
        return ended.wait(20)

    def finalise(*_: object) -> None:
        monkeypatch.undo()
        try:
            on_device.stats()
        except pagoda.InvalidArgument as error:
            refused.append(str(error))

    with ThreadPoolExecutor() as pool:
        other = pool.submit(engine.core.in_turn, wait)
        assert has_turn.wait(60)
        monkeypatch.setattr(pagoda.InvalidArgument, "__init__", finalise, raising=False)
        with pytest.raises(pagoda.InvalidArgument):
            sequence.truncate(1)
        ended.set()
        assert other.result(60)
    assert "this signal or finaliser has interrupted" in refused[0]


def test_who_waits_for_a_copy_on_a_device_lets_others_go_on(
    on_device: pagoda.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(on_device)
    tokens = mirror.create()
    mirror.step([tokens], [40])
    ticket = on_device.demote(tokens.sequence)
    waiting, arrived = threading.Event(), threading.Event()

    class Copy:
        def wait(self) -> None:
            waiting.set()
            assert arrived.wait(60)

    engine: Any = on_device._device
    waits_for = engine._plans.waits_for
    monkeypatch.setattr(engine._plans, "waits_for", lambda *of: waits_for(*of) if arrived.is_set() else Copy())
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    assert waiting.wait(60)
    asking = threading.Thread(target=on_device.stats)
    asking.start()
    asking.join(60)
    went_on = not asking.is_alive()
    arrived.set()
    waiter.join()
    assert went_on
    assert ticket.done()


def test_a_fork_in_another_threads_turn_leaves_a_child_whose_calls_are_refused(on_device: pagoda.Cache) -> None:
    engine: Any = on_device._device
    has_turn, forked = threading.Event(), threading.Event()

    def take() -> None:
        has_turn.set()
        assert forked.wait(60)

    other = threading.Thread(target=engine.core.in_turn, args=(take,))
    other.start()
    assert has_turn.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            on_device.stats()
        except pagoda.UseAfterRelease:
            os._exit(0)
        finally:
            os._exit(1)
    forked.set()
    other.join()
    assert os.waitpid(child, 0)[1] == 0
    on_device.stats()


def test_a_step_is_on_the_stream_that_it_was_given(on_device: pagoda.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another thread's step was on another stream meanwhile."""
    mirror = Mirror(on_device)
    tokens, other = mirror.create(), mirror.create()
    engine: Any = on_device._device
    reserve, given = engine.reserve, engine.caller_stream(None)

    def meddled(*asked: Any) -> None:
        monkeypatch.undo()
        with on_device.step([other.sequence], [0], stream=type(given)(engine._driver)):
            assert engine._stream is not given
        reserve(*asked)

    monkeypatch.setattr(engine, "reserve", meddled)
    with on_device.step([tokens.sequence], [0]):
        assert engine._stream is given
