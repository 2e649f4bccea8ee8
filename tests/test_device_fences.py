"""Events between streams, each with its negative control: streams of the emulated device do their work late, so that
work nobody waits for has not been done."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator import driver as driver_module
from emulator.driver import CallerStream, EmulatedDriver, Event, Stream, install_driver
from interrupts import interrupted
from mirror import Mirror
from pagoda.device.engine import DeviceEngine
from pagoda.device.tables import Staging
from pagoda.kernels.instances import Kernel
from unfenced import tickets_finish_at_once

Array = npt.NDArray[Any]

LAYER = pagoda.AttentionLayer(2, 1, 64)
TOKENS = 48
"""Three pages."""


class LateDriver(EmulatedDriver):
    """A query of an event lets no work be done."""

    def work_a_little(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> LateDriver:
    return install_driver(monkeypatch, LateDriver())


class World:
    """A cache with one sequence of three full pages, whose appends are launched but have not run."""

    def __init__(self, driver: LateDriver, device_pages: int = 8, zero_on_free: bool = False) -> None:
        self.driver = driver
        self.streams = [CallerStream(driver) for _ in range(2)]
        self.rng = np.random.default_rng(0)
        spec = pagoda.ModelSpec(layers=[LAYER])
        page = 16 * spec.bytes_per_token()
        memory, host = device_pages * page, 8 * page
        self.cache = pagoda.Cache(
            spec,
            page_size=16,
            device="cuda",
            spill=False,
            device_memory=memory,
            host_memory=host,
            zero_on_free=zero_on_free,
        )
        self.k = self.v = self.rows(0)
        with self.cache.create() as self.sequence:
            # Tables and scratch memory reach their final size now: growing later would wait for the device.
            self.k, self.v = self.append(self.sequence, TOKENS, self.streams[0])
            self.look(self.streams[0])
        self.sequence = self.cache.create()
        self.k, self.v = self.append(self.sequence, TOKENS, self.streams[0])

    def rows(self, count: int) -> Array:
        return self.rng.standard_normal((count, 1, 64)).astype(np.float16)

    def append(self, sequence: pagoda.Sequence, count: int, stream: Stream) -> tuple[Array, Array]:
        k, v = self.rows(count), self.rows(count)
        with self.cache.step([sequence], [count], stream=stream) as step:
            step.append(0, k, v)
        return k, v

    def look(self, stream: Stream) -> None:
        """Attends with one more token, and compares the result."""
        k, v = self.rows(1), self.rows(1)
        q = self.rng.standard_normal((1, 2, 64)).astype(np.float32)
        with self.cache.step([self.sequence], [1], stream=stream) as step:
            out = step.forward(0, q, k, v)
            step.commit([0])
        check(out, q, np.concatenate([self.k, k]), np.concatenate([self.v, v]))


def check(out: Array, q: Array, k: Array, v: Array) -> None:
    """Compares attention of one token over all tokens with float64."""
    scores = q[0].astype(np.float64) @ k[:, 0].astype(np.float64).T / 8
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True) @ v[:, 0].astype(np.float64)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-5)


class PatientStream(CallerStream):
    """The stream of a caller who reads results later."""

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        Stream.launch(self, kernel, grid, threads, arguments, shared_bytes=shared_bytes)


def a_copy_follows_the_step(driver: LateDriver) -> None:
    """Without it, pages are copied to the host before the append that writes them has run."""
    world = World(driver)
    world.cache.demote(world.sequence).wait()
    world.look(world.streams[0])


def a_step_follows_the_step(driver: LateDriver) -> None:
    """A step on another stream attends over rows that the first one appended."""
    world = World(driver)
    world.look(world.streams[1])


def a_block_waits_for_its_copy(driver: LateDriver) -> None:
    """Without it, a device block is handed out again while the copy from it is under way."""
    world = World(driver, device_pages=4)
    ticket = world.cache.demote(world.sequence)
    other = world.cache.create()
    try:
        world.append(other, TOKENS, world.streams[1])
    except pagoda.OutOfBlocks:
        ticket.wait()
        world.append(other, TOKENS, world.streams[1])
    world.streams[1].reach(len(world.streams[1].work))
    ticket.wait()
    other.release()
    world.look(world.streams[1])


def a_load_waits_for_the_readers_of_its_target(driver: LateDriver) -> None:
    """Without it, a page is loaded into a freed block that a step has yet to read."""
    world = World(driver, device_pages=4)
    world.driver.catch_up()
    world.cache.demote(world.sequence).wait()
    hot, stream = world.cache.create(), PatientStream(driver)
    keys, values = world.append(hot, TOKENS, world.streams[0])
    world.driver.catch_up()
    q, k, v = world.rng.standard_normal((1, 2, 64)).astype(np.float32), world.rows(1), world.rows(1)
    with world.cache.step([hot], [1], stream=stream) as step:
        out = step.forward(0, q, k, v)
        step.commit([0])
    hot.release()
    try:
        ticket = world.cache.promote(world.sequence)
    except pagoda.OutOfBlocks as error:
        assert error.draining
        world.driver.catch_up()
        ticket = world.cache.promote(world.sequence)
    ticket.wait()
    world.driver.catch_up()
    check(out, q, np.concatenate([keys, k]), np.concatenate([values, v]))


def tables_stay_until_they_have_come(driver: LateDriver) -> None:
    """Without it, a later step overwrites the words of a step's tables while their copy to the device is under way."""
    world = World(driver, device_pages=20)
    world.driver.catch_up()
    late = [world.cache.create() for _ in range(4)]
    rows = [world.append(sequence, 16 + index, world.streams[0]) for index, sequence in enumerate(late)]
    for sequence, (world.k, world.v) in zip(late, rows, strict=True):
        world.sequence = sequence
        world.look(world.streams[0])


def a_step_follows_the_zeros(driver: LateDriver) -> None:
    """Without it, blocks of a released sequence are zeroed after the next sequence has written to them."""
    world = World(driver, device_pages=4, zero_on_free=True)
    world.driver.catch_up()
    world.look(world.streams[0])


def a_copy_follows_the_zeros(driver: LateDriver) -> None:
    """Without it, blocks that pages have left are zeroed after the pages are back."""
    world = World(driver, zero_on_free=True)
    world.look(world.streams[0])
    world.cache.demote(world.sequence).wait()
    world.cache.promote(world.sequence).wait()
    world.driver.catch_up()
    world.look(world.streams[0])


def no_follow_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "follow", lambda self, event: None)


def no_follow_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallerStream, "follow", lambda self, event: None)


def no_wait_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also removes the waits between streams, by which copies would wait for the last step too."""
    end = DeviceEngine._end

    def hasty(self: DeviceEngine) -> None:
        end(self)
        while self._epochs:
            self.core.retire(self._epochs.popleft()[0])

    monkeypatch.setattr(DeviceEngine, "_end", hasty)
    no_follow_of_copies(monkeypatch)


def no_wait_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "used", property(lambda self: None, lambda self, event: None), raising=False)


SCENES: list[tuple[Callable[[LateDriver], None], Callable[[pytest.MonkeyPatch], None]]] = [
    (a_copy_follows_the_step, no_follow_of_copies),
    (a_step_follows_the_step, no_follow_of_steps),
    (a_block_waits_for_its_copy, tickets_finish_at_once),
    (a_load_waits_for_the_readers_of_its_target, no_wait_for_readers),
    (tables_stay_until_they_have_come, no_wait_for_uploads),
    (a_step_follows_the_zeros, no_follow_of_steps),
    (a_copy_follows_the_zeros, no_follow_of_copies),
]


@pytest.mark.parametrize("scene", [scene for scene, _ in SCENES])
def test_fences_hold(scene: Callable[[LateDriver], None], driver: LateDriver) -> None:
    scene(driver)


@pytest.mark.parametrize(("scene", "broken"), SCENES)
def test_a_missing_fence_is_noticed(
    scene: Callable[[LateDriver], None],
    broken: Callable[[pytest.MonkeyPatch], None],
    driver: LateDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        scene(driver)


def test_a_step_that_is_refused_leaves_the_open_one_on_its_stream(driver: LateDriver) -> None:
    world = World(driver)
    one, other = world.streams
    k, v = world.rows(1), world.rows(1)
    q = world.rng.standard_normal((1, 2, 64)).astype(np.float32)
    with world.cache.step([world.sequence], [1], stream=one) as step:
        step.append(0, k, v)
        with pytest.raises(pagoda.InvalidArgument, match="step = open"):
            world.cache.step([world.sequence], [1], stream=other).__enter__()
        out = step.attend(0, q)
        step.commit([0])
    assert not other.work
    check(out, q, np.concatenate([world.k, k]), np.concatenate([world.v, v]))
    world.look(other)


def test_a_step_that_finds_no_blocks_is_not_open(driver: LateDriver) -> None:
    world = World(driver)
    with pytest.raises(pagoda.OutOfBlocks):
        world.cache.step([world.sequence], [20 * TOKENS]).__enter__()
    world.cache.declare(sequences=1, new_tokens=1, context=2 * TOKENS)
    world.look(world.streams[1])


@pytest.mark.parametrize("open_step", [False, True])
@pytest.mark.parametrize("forgotten", [False, True])
def test_memory_does_not_go_before_its_last_kernel(driver: LateDriver, open_step: bool, forgotten: bool) -> None:
    """A cache is closed, or its last reference dropped, while the device is working in it."""
    world = World(driver)
    stream, k, v = world.streams[1], world.rows(1), world.rows(1)
    step = world.cache.step([world.sequence], [1], stream=stream).__enter__()
    step.append(0, k, v)
    if not open_step:
        step.commit()
    given = len(stream.work)
    assert stream.finished < given
    if forgotten:
        engine = weakref.ref(world.cache._device)
        del step, world
        gc.collect()
        assert engine() is None
    else:
        world.cache.close()
    assert stream.finished >= given


def test_scratch_memory_does_not_go_before_a_kernel_of_the_step_that_uses_it(driver: LateDriver) -> None:
    class LateCaller(CallerStream):
        """The stream of a caller who does not wait for attention."""

        launch = Stream.launch

    stream, large = LateCaller(driver), pagoda.AttentionLayer(16, 8, 64)
    with pagoda.Cache(pagoda.ModelSpec([LAYER, large]), device="cuda", device_memory="4MiB", host_memory=0) as cache:
        with cache.step([cache.create()], [1], stream=stream) as step:
            for index, shape in enumerate((LAYER, large)):
                given = len(stream.work)
                k, q = (
                    np.zeros((1, heads, shape.head_dim), np.float32)
                    for heads in (shape.num_kv_heads, shape.num_q_heads)
                )
                step.forward(index, q, k, k, out=np.zeros_like(q))
                assert stream.finished >= given, "what has used the memory that was too small has ended"
            assert stream.finished < len(stream.work), "what uses the new one has not"


def test_a_step_is_committed_whatever_becomes_of_copies(driver: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for a plan under way is refused in the middle of a commit: the plan fails, and the step has ended."""
    world = World(driver)
    assert world.cache._device is not None

    def refused() -> None:
        raise pagoda.BackendUnavailable("host_memory: refused")

    k, v = world.rows(1), world.rows(1)
    with monkeypatch.context() as patched, world.cache.step([world.sequence], [1]) as step:
        step.append(0, k, v)
        patched.setattr(world.cache._device._plans, "advance", refused)
        step.commit()
    world.k, world.v = np.concatenate([world.k, k]), np.concatenate([world.v, v])
    world.look(world.streams[1])


def test_a_look_at_copies_under_way_is_not_a_look_at_each(driver: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end in order: after one that has not ended, none has."""
    looks: list[Event] = []

    class Counted(Event):
        def done(self) -> bool:
            looks.append(self)
            return super().done()

    monkeypatch.setattr(driver_module, "Event", Counted)
    spec = pagoda.ModelSpec(layers=[LAYER])
    with pagoda.Cache(spec, page_size=16, device="cuda", device_memory="1MiB", host_memory="1MiB") as cache:
        mirror = Mirror(cache)
        all_tokens = [mirror.create() for _ in range(40)]
        mirror.step(all_tokens, [16] * 40)
        each, tickets = [], []
        for tokens in all_tokens:
            looks.clear()
            tickets.append(cache.demote(tokens.sequence))
            each.append(len(looks))
        assert not any(ticket.done() for ticket in tickets)
        assert max(each) < 10
        assert tickets[-1].wait()
        assert all(ticket.done() for ticket in tickets)
        assert cache.stats().host[0].used == 40
        mirror.look()


def test_ctrl_c_in_a_step_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every 61st instruction, also while tables and memory grow: rows stored before a step are intact after it."""
    for after in count(0, 61):
        driver = install_driver(monkeypatch, LateDriver())
        world = World(driver, device_pages=12, zero_on_free=after % 2 == 0)
        child = world.sequence.fork()
        before, rows = len(world.sequence), (world.rows(20), world.rows(20))
        q = world.rng.standard_normal((20, 2, 64)).astype(np.float32)

        def a_step(world: World = world, q: Array = q, rows: tuple[Array, Array] = rows) -> None:
            with world.cache.step([world.sequence], [20], stream=world.streams[1]) as step:
                step.forward(0, q, *rows)

        came = interrupted(a_step, after)
        if len(world.sequence) != before:
            world.k, world.v = np.concatenate([world.k, rows[0]]), np.concatenate([world.v, rows[1]])
        assert len(world.k) == len(world.sequence)
        world.look(world.streams[0])
        world.append(child, 5, world.streams[1])
        world.look(world.streams[0])
        child.release()
        world.driver.catch_up()
        world.cache.audit()
        blocks = world.cache.stats().device[0]
        assert (blocks.used, blocks.draining) == (-(-len(world.sequence) // 16), 0)
        if not came:
            break


def test_ctrl_c_while_a_step_ends_leaves_no_block_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every instruction; no later step has to end first."""
    driver = install_driver(monkeypatch, LateDriver())
    world = World(driver, device_pages=12)
    q, rows = np.zeros((20, 2, 64), np.float32), np.zeros((2, 20, 1, 64), np.float32)
    for after in count():
        child = world.cache.create()
        step = world.cache.step([child], [20]).__enter__()
        step.forward(0, q, *rows)
        came = interrupted(step.commit, after)
        step.__exit__(KeyboardInterrupt, None, None)
        child.release()
        world.driver.catch_up()
        world.cache.audit()
        blocks = world.cache.stats().device[0]
        assert (blocks.used, blocks.draining) == (-(-len(world.sequence) // 16), 0), after
        if not came:
            break
    assert after > 200
    world.cache.close()
