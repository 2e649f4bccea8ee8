"""Pages of the host tier that are streamed through a ring of device memory, on the emulated device.

Copies into the ring are late, come in pieces and are repeated; slots hold NaN where nothing was copied.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulator
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import CallerStream, EmulatedDriver, Stream, install_driver
from mirror import Mirror, Tokens, layer
from pagoda.device import ring, thresholds
from pagoda.device.driver import Driver, Event
from pagoda.device.engine import DeviceEngine
from pagoda.device.ring import Ring, RingSlots, Slot, ring_slots
from pagoda.device.streaming import Streams, Traffic
from pagoda.geometry import Run

Array = npt.NDArray[Any]


class RestlessStream(Stream):
    """A copy engine that copies in pieces, in any order, and twice."""

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for arena in self.driver.arenas:
            arena.require(source, (rows - 1) * source_pitch + width)
        cuts = [0, *sorted(self.driver.random.choices(range(width), k=2)), width]
        pieces = [(row, *cut) for row in range(rows) for cut in pairwise(cuts) if cut[0] < cut[1]] * 2
        self.driver.random.shuffle(pieces)
        for row, start, stop in pieces:
            self.copy(target + row * target_pitch + start, source + row * source_pitch + start, stop - start)


class RestlessDriver(EmulatedDriver):
    """An emulated device with such a copy engine."""

    def stream(self) -> Stream:
        return RestlessStream(self)


def engine_of(cache: pagoda.Cache) -> DeviceEngine:
    assert cache._device is not None
    return cache._device


def opened(
    monkeypatch: pytest.MonkeyPatch, driver: EmulatedDriver, spec: pagoda.ModelSpec, **options: Any
) -> pagoda.Cache:
    """A cache on a device, with a ring even if memory is small."""
    install_driver(monkeypatch, driver)
    monkeypatch.setattr(ring, "SLOT_BYTES_MIN", 1)
    defaults: dict[str, Any] = {"page_size": 16, "host_memory": "4MiB"}
    return pagoda.Cache(spec, device="cuda", **(defaults | options))


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills a slot with NaN before anything is copied into it."""
    bring = Streams._bring

    def poisoned(self: Streams, slot: Slot, *given: Any) -> Event:
        if slot.read is not None:
            self._copying.follow(slot.read)
        address, size = slot.address, self.ring.slot_bytes
        self._copying.work.append(lambda: ctypes.memset(address, 0xFF, size))  # type: ignore[attr-defined]
        return bring(self, slot, *given)

    monkeypatch.setattr(Streams, "_bring", poisoned)


ROPE = pagoda.Rope()
PLAIN = [layer(), layer(), layer(window=40)]
SCENES: dict[str, tuple[list[pagoda.AttentionLayer], dict[str, Any]]] = {
    "16 bits": (PLAIN, {}),
    "32 bits, soft-caps and sinks": ([layer(softcap=3.0), layer(sinks=True)], {"k_dtype": "f32", "v_dtype": "f32"}),
    "small pages": (PLAIN, {"page_size": 8}),
    "large pages": (PLAIN, {"page_size": 128}),
    "quantised": (
        [layer(head_dim=32), layer(head_dim=32)],
        {"k_dtype": "q8_0", "v_dtype": "q4_0", "center": None, "rotate": False},
    ),
    "latent": ([layer(num_kv_heads=1, head_dim=40, v_head_dim=32, v_alias=True)] * 2, {}),
    "shared pages of layers": ([layer(), layer(kv_owner=0), layer(), layer(kv_owner=2)], {}),
    "sinks": ([layer(), layer(window=20)], {"retention": pagoda.SinkWindow(20, 200)}),
    "sinks that trail": ([layer(rope=ROPE)], {"retention": pagoda.SinkWindow(20, 200, "cache")}),
    "spans": (PLAIN, {}),
}


@contextmanager
def a_ragged_batch(
    monkeypatch: pytest.MonkeyPatch,
    scene: tuple[list[pagoda.AttentionLayer], dict[str, Any]],
    move: Callable[[pagoda.Cache, Tokens, Tokens], object],
    *,
    to: str = "host",
    gap: bool = False,
    **given: Any,
) -> Iterator[Mirror]:
    """Steps with decoding, speculation, prefill and forks, compared with float64, before the body and after it.

    move: moves the long and another sequence before the first of these steps; to: where the long one's fork goes afterwards.
    """
    layers, options = scene
    driver = RestlessDriver(1)
    options = {"device_memory": "1MiB" if options.get("k_dtype") == "f32" else "512KiB", "headroom": 400} | options
    with opened(monkeypatch, driver, pagoda.ModelSpec(layers=layers), **options, **given) as cache:
        mirror = Mirror(cache)
        long, other, short = (mirror.create() for _ in range(3))
        mirror.step([long, other, short], [410, 150, 7])
        if gap:
            mirror.drop(long, 100, 130)
        child = mirror.fork(long)
        move(cache, long, other)
        mirror.step([long, other, short, child], [1, 40, 2, 3])
        yield mirror
        cache.demote(child.sequence, to=to).wait()
        mirror.step([child, other], [2, 1], accepted=[1, 0])
        mirror.look()
        driver.check()


def to_the_host(cache: pagoda.Cache, *sequences: Tokens) -> None:
    """Demotes sequences, one after the other."""
    for tokens in sequences:
        cache.demote(tokens.sequence).wait()


@pytest.mark.parametrize("name", SCENES)
def test_a_ragged_batch_of_which_most_is_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_ragged_batch(monkeypatch, SCENES[name], to_the_host, gap=name == "spans") as mirror:
        engine = engine_of(mirror.cache)
        assert engine.traffic.ring > 0 == engine.traffic.mapped
        assert max(len(group.copies) for group in engine._streams._groups.values()) > 1


def test_pages_that_sequences_share_are_brought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four forks share a prefix in host memory, large enough to be read as common pages in separate passes: by queries that
    are decoded, then by some that are prefilled as well. Sequences with still more of them read their pages by themselves."""
    driver = RestlessDriver(2)
    with opened(monkeypatch, driver, pagoda.ModelSpec(layers=[layer()]), device_memory="512KiB") as cache:
        mirror = Mirror(cache)
        root = mirror.create()
        mirror.step([root], [1100])
        forks = [root, *(mirror.fork(root) for _ in range(3))]
        mirror.step(forks, [40, 3, 1, 2])
        for tokens in forks:
            cache.demote(tokens.sequence).wait()
        for counts in ([1, 2, 1, 3], [1, 2, 1, 3], [1, 16, 2, 9], [17, 12, 17, 9]):
            mirror.step(forks, counts)
            blocks = cache.stats().host[0].used
            engine = engine_of(cache)
            assert engine._tables.members == sum(count for count in counts if count <= 16)
            copied = sum(int(copies[:, 1].sum()) for copies in engine._streams._groups[0].copies)
            assert blocks <= copied <= blocks + 3 * len(engine._streams._groups[0].copies)


def fill(cache: pagoda.Cache, sequence: pagoda.Sequence, count: int, seed: int) -> None:
    """Appends random rows."""
    rng = np.random.default_rng(seed)
    with cache.step([sequence], [count]) as step:
        for index, shape in enumerate(cache.spec.attention_layers):
            k, v = rng.standard_normal((2, count, shape.num_kv_heads, shape.head_dim), np.float32)
            step.append(index, k, v)


def attended(cache: pagoda.Cache, batch: list[pagoda.Sequence], counts: list[int], seed: int) -> list[bytes]:
    """Results of attention for random new tokens, which are then rejected."""
    rng = np.random.default_rng(seed)
    results = []
    with cache.step(batch, counts) as step:
        for index, shape in enumerate(cache.spec.attention_layers):
            k, v = rng.standard_normal((2, sum(counts), shape.num_kv_heads, shape.head_dim), np.float32)
            q = rng.standard_normal((sum(counts), shape.num_q_heads, shape.head_dim), np.float32)
            out, lse = step.forward(index, q, k, v, return_lse=True)
            results += [out.tobytes(), lse.tobytes()]
        step.commit([0] * len(batch))
    return results


def a_long_batch(cache: pagoda.Cache) -> tuple[list[pagoda.Sequence], list[int]]:
    """A sequence of 9,070 tokens with a gap, a short one, and a fork of the first; and the number of new tokens for each."""
    long, short = cache.create(), cache.create()
    for number, count in enumerate((3000, 3000, 3100)):
        fill(cache, long, count, number)
    fill(cache, short, 300, 4)
    long.drop(200, 230)
    return [long, short, long.fork()], [1, 30, 2]


def test_bits_do_not_depend_on_where_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic=True: all on the device, or any part on the host, read in place or through the ring."""
    tiny: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "rope": ROPE}
    spec = pagoda.ModelSpec(layers=[layer(**tiny), layer(**tiny, window=5000)])
    driver = RestlessDriver(3)
    options: dict[str, Any] = {"page_size": 64, "deterministic": True, "headroom": 5000}
    with opened(monkeypatch, driver, spec, device_memory="4MiB", **options) as cache:
        batch, counts = a_long_batch(cache)
        long = batch[0]
        right = attended(cache, batch, counts, 5)
        streams = engine_of(cache)._streams
        for demoted in ((4096, 5000), (0, 1000), (0, 9070)):
            cache.demote(long, demoted).wait()
            driver.ring_bytes = 1 << 40
            assert attended(cache, batch, counts, 5) == right
            assert streams.traffic.mapped > 0 == streams.traffic.ring
            driver.ring_bytes = 0
            assert attended(cache, batch, counts, 5) == right
            assert streams.traffic.ring > 0 == streams.traffic.mapped
        assert len(streams._groups[0].copies) == 4, "a slot has room for one run"


def cache_of_pages(monkeypatch: pytest.MonkeyPatch, driver: EmulatedDriver, **options: Any) -> tuple[Mirror, Any]:
    """A cache of two layers with a sequence of 30 pages on the host, 8 per pass."""
    spec = pagoda.ModelSpec(layers=[layer(), layer()])
    cache = opened(monkeypatch, driver, spec, device_memory="256KiB", **options)
    mirror = Mirror(cache, np.random.default_rng(7))
    tokens = mirror.create()
    for _ in range(4):
        mirror.step([tokens], [120])
        cache.demote(tokens.sequence).wait()
    return mirror, tokens


def test_a_step_goes_on_where_the_one_before_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies of a step are under way when the previous step ends; nothing is copied twice."""
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(4))
    engine = engine_of(mirror.cache)
    page, slots = 16 * 128, 2 * 8 * 16 * 128
    mirror.step([tokens], [1])
    assert engine.traffic == Traffic(ring=2 * 30 * page + slots, mapped=0)
    for _ in range(3):
        mirror.step([tokens], [1])
        assert engine.traffic == Traffic(ring=2 * 30 * page, mapped=0)
        assert mirror.last is not None
        assert mirror.last.report.bytes == {"pcie": 2 * 30 * page, "disk": 0, "memory": 0}
    # If pages have moved since, they are copied again.
    mirror.cache.promote(tokens.sequence, (0, 64)).wait()
    mirror.step([tokens], [1])
    assert engine.traffic.ring == 2 * 26 * page + slots
    mirror.cache.close()


def look_in_any_order(mirror: Mirror, tokens: Tokens) -> None:
    """Attends to each of two layers more than once."""
    cache, rng = mirror.cache, np.random.default_rng(0)
    results: dict[int, list[bytes]] = {0: [], 1: []}
    with cache.step([tokens.sequence], [1]) as step:
        rows = rng.standard_normal((1, 2, 16), np.float32)
        q = rng.standard_normal((1, 4, 16), np.float32)
        for index in (0, 1):
            step.append(index, rows, rows)
        for index in (1, 0, 0, 1):
            results[index].append(step.attend(index, q).tobytes())
        step.commit([0])
    assert all(first == second for first, second in results.values())
    mirror.look()
    cache.close()


def test_layers_in_any_order_and_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    look_in_any_order(*cache_of_pages(monkeypatch, RestlessDriver(5)))


def interrupted_step(
    monkeypatch: pytest.MonkeyPatch, mirror: Mirror, tokens: Tokens, kind: type, method: str, nth: int
) -> None:
    """A step of one token in a cache of `cache_of_pages`, with Ctrl-C instead of the nth call of a method."""
    call, left = getattr(kind, method), nth

    def interrupted(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        call(*given)

    rows, q = np.zeros((1, 2, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, method, interrupted)
        with mirror.cache.step([tokens.sequence], [1]) as step:
            for index in (0, 1):
                step.forward(index, q, rows, rows)


@pytest.mark.parametrize("room", [False, True])
def test_ctrl_c_between_taking_a_slot_and_giving_it_back_loses_none(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(6))
    if room:
        # New tokens need no page, so later steps use what was copied ahead.
        mirror.step([tokens], [1])
    for nth in range(1, 8):
        interrupted_step(monkeypatch, mirror, tokens, Stream, "follow", nth)
        mirror.look()
    mirror.cache.close()


def test_a_step_that_streams_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads in place, so such a step may replay one, but not be captured."""
    spec = pagoda.ModelSpec(layers=[layer(head_dim=64)])
    driver = RestlessDriver(6)
    stream = CallerStream(driver)
    with opened(monkeypatch, driver, spec, device_memory="2MiB") as cache:
        cache.declare(sequences=1, new_tokens=1, context=1000)
        sequence = cache.create()
        k, v = np.zeros((2, 1, 2, 64), np.float16)
        q, out, other = (np.ones((1, 4, 64), np.float32) for _ in range(3))
        with cache.step([sequence], [1], stream=stream) as step:
            step.forward(0, q, k, v, out=out)
        with cache.step([sequence], [1], stream=stream) as step:
            stream.begin_capture()
            step.forward(0, q, k, v, out=out)
            graph = stream.end_capture()
            graph.launch()
        for number in range(200):
            k[:], v[:] = number % 7 / 7, number
            with cache.step([sequence], [1], stream=stream) as step:
                step.append(0, k, v)
        cache.demote(sequence).wait()
        with cache.step([sequence], [1], stream=stream) as step:
            step.replay(graph.launch)
            step.attend(0, q, out=other)
            assert engine_of(cache).traffic.ring > 0
            np.testing.assert_allclose(out, other, rtol=1e-5)
            stream.begin_capture()
            with pytest.raises(pagoda.InvalidArgument, match="layer 0 in a graph: not in a step that streams"):
                step.attend(0, q, out=other)
            stream.end_capture()


def test_the_ring_is_a_part_of_the_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RestlessDriver(7)
    spec = pagoda.ModelSpec(layers=[layer(head_dim=64)])
    budget = 3 << 20
    with opened(monkeypatch, driver, spec, device_memory=budget) as cache:
        streams = engine_of(cache)._streams
        ring = len(streams.ring) * streams.ring.slot_bytes
        stats = cache.stats()
        assert ring == 2 * (budget // 16)
        assert stats.block_bytes[0] * stats.device[0].free <= budget - ring
    for options in ({"host_memory": 0}, {"host_memory": "1MiB", "deterministic": True}):
        with opened(monkeypatch, driver, spec, device_memory=budget, **options) as cache:
            assert not engine_of(cache)._streams.ring, "nothing to stream, or no slot of 4,096 rows"
            assert cache.stats().block_bytes[0] * cache.stats().device[0].free > budget - ring


def test_how_large_slots_are() -> None:
    """Large enough for copies at link speed and for an uncut stretch, but each at most a 16th of the memory."""
    mib, gib, widths = 1 << 20, 1 << 30, [1 << 15, 1 << 16]

    def slots(
        device_bytes: int, *, page_size: int = 64, disk: bool = False, deterministic: bool = False, sinks: int = 0
    ) -> RingSlots:
        tiers = {"host": not disk, "disk": disk}
        return ring_slots(widths, page_size, device_bytes, **tiers, deterministic=deterministic, sinks=sinks)

    assert slots(2 * gib).bytes == 16 * mib
    assert slots(128 * mib).bytes == 8 * mib
    assert slots(15 * mib).bytes == 0, "below 1 MiB launches are what it costs"
    assert slots(2 * gib, page_size=4, deterministic=True).bytes == 64 * mib
    assert slots(gib - 1, page_size=4, deterministic=True).bytes == 0
    assert slots(15 * mib, disk=True).bytes == 15 * mib // 16, "pages on disk come through a ring or not at all"
    assert ring_slots(widths, 64, 2 * gib, host=False, disk=False, deterministic=False, sinks=0).bytes == 0, (
        "all is in place"
    )
    least = slots(0, page_size=12, disk=True).enough
    assert slots(least, page_size=12, disk=True).bytes >= 5 << 16
    assert slots(least - 1, page_size=12, disk=True).bytes == 0
    least = slots(0, page_size=16, disk=True, sinks=3).enough
    assert slots(least, page_size=16, disk=True, sinks=3).bytes >= 5 << 16, (
        "sinks on two pages, one of them the window's"
    )
    assert slots(least - 1, page_size=16, disk=True, sinks=3).bytes == 0


@pytest.mark.parametrize("length", [50, 64])
@pytest.mark.parametrize("disk", [False, True])
def test_sinks_and_a_window_meet_inside_a_page(
    length: int, disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has one entry for both, and sequences take turns: it must not be brought in two passes."""
    options: dict[str, Any] = {"page_size": 32, "device_memory": 440 << 10, "headroom": 0, "spill": False}
    if disk:
        options |= {"disk": tmp_path / "pages", "disk_memory": "16MiB"}
    spec = pagoda.ModelSpec(layers=[layer(head_dim=32)])
    with opened(monkeypatch, RestlessDriver(2), spec, retention=pagoda.SinkWindow(3, 40), **options) as cache:
        mirror = Mirror(cache)
        batch = [mirror.create() for _ in range(4)]
        mirror.step(batch, [length] * 4)
        for tokens in batch:
            cache.demote(tokens.sequence, to="disk" if disk else "host").wait()
        mirror.look()
        assert len(engine_of(cache)._streams._groups[0].copies) > 1


def test_the_bytes_of_a_layer_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are contiguous, and a layer that shares pages has those of its owner."""
    shapes = [layer(), layer(), layer(kv_owner=1), layer(head_dim=48), layer()]
    with opened(monkeypatch, EmulatedDriver(), pagoda.ModelSpec(layers=shapes), device_memory="8MiB") as cache:
        runs = engine_of(cache)._streams._runs
        small, large = (2 * 2 * 2 * 16 * dim for dim in (16, 48))
        assert runs == [Run(0, small), Run(small, small), Run(small, small), Run(0, large), Run(2 * small, small)]


def test_no_copy_crosses_a_border_between_pieces_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each extent is a piece. The emulated device refuses copies across borders, and does so if the check is disabled."""
    for looking in (True, False):
        driver = RestlessDriver(9)
        spec = pagoda.ModelSpec(layers=[layer()])
        with opened(monkeypatch, driver, spec, device_memory="768KiB", host_memory="256KiB") as cache:
            mirror = Mirror(cache)
            tokens = mirror.create()
            mirror.step([tokens], [600])
            cache.demote(tokens.sequence).wait()
            arena = driver.arenas[-1]
            assert len(arena.pinned) > 1
            if looking:
                mirror.look()
            else:
                monkeypatch.setattr(
                    engine_of(cache)._streams, "_host", SimpleNamespace(address=arena.address, piece=1 << 40)
                )
                with pytest.raises(emulator.EmulatorError, match="not pinned"):
                    mirror.look()


class Clocked:
    """A driver that simulates the time of work without doing it. in_place, copied: bytes a second."""

    multiprocessors = 3
    launch_seconds, copy_seconds = 5e-6, 8e-6

    def __init__(self, in_place: float, copied: float) -> None:
        self.in_place, self.copied = in_place, copied
        self.now = 0.0
        self.lists: list[Array] = []
        self.ranges: list[tuple[int, int]] = []

    def memory(self, size: int) -> Any:
        self.ranges.append((1 << 60, (1 << 60) + size))
        return SimpleNamespace(address=1 << 60)

    def pinned(self, size: int) -> Any:
        array = np.zeros(size, np.uint8)
        self.lists.append(array)
        self.ranges.append((array.ctypes.data, array.ctypes.data + size))
        return SimpleNamespace(address=array.ctypes.data, array=array)

    def stream(self) -> ClockedStream:
        return ClockedStream(self)

    def require(self, size: int, *addresses: int) -> None:
        """Fails unless so many bytes at each address are of memory that was handed out."""
        for address in addresses:
            assert any(start <= address and address + size <= end for start, end in self.ranges)


class ClockedStream:
    """A stream with its own time, which new work never puts before the driver's."""

    def __init__(self, driver: Clocked) -> None:
        self.driver, self.time = driver, 0.0

    def copy(self, target: int, source: int, size: int) -> None:
        self.driver.require(size, source, target)
        self.time = max(self.time, self.driver.now) + self.driver.copy_seconds + size / self.driver.copied

    def launch(self, kernel: Any, grid: int, threads: int, call: Any) -> None:
        runs = np.ctypeslib.as_array((ctypes.c_uint64 * (3 * call.count)).from_address(call.runs)).reshape(-1, 3)
        assert not (runs % 16).any()
        for source, target, size in runs.tolist():
            self.driver.require(size, source, target)
        rate = self.driver.in_place if runs[0, 0] < 1 << 59 else 3e12
        self.time = max(self.time, self.driver.now) + self.driver.launch_seconds + int(runs[:, 2].sum()) / rate

    def follow(self, event: Any) -> None:
        self.time = max(self.time, event.time)

    def record(self) -> Any:
        def wait() -> None:
            self.driver.now = max(self.driver.now, at)

        at = self.time
        return SimpleNamespace(time=at, wait=wait, done=lambda: at <= self.driver.now)


@pytest.mark.parametrize(
    ("threshold", "in_place", "copied", "expected"),
    [
        (thresholds.ring_bytes, 45e9, 50e9, 1 << 21),
        (thresholds.ring_bytes, 5e9, 50e9, 1 << 16),
        (thresholds.ring_bytes, 50e9, 25e9, 1 << 23),
        (thresholds.copy_engine_bytes, 25e9, 50e9, 1 << 19),
        (thresholds.copy_engine_bytes, 5e9, 50e9, 1 << 16),
        (thresholds.copy_engine_bytes, 1e9, 50e9, 1 << 14),
        (thresholds.copy_engine_bytes, 50e9, 50e9, 1 << 23),
    ],
)
def test_from_how_many_bytes_on_copies_are_faster(
    threshold: Callable[[Driver], int],
    in_place: float,
    copied: float,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a layer through the ring, of runs by the copy engine: the size at which faster copies make up for their overhead, or
    twice the largest measured size if none does."""
    driver: Any = Clocked(in_place, copied)
    monkeypatch.setattr(time, "perf_counter", lambda: driver.now)
    assert threshold(driver) == expected


class EagerCopies(EmulatedDriver):
    """Does copies as soon as they have nothing to wait for, but kernels only when somebody waits."""

    def stream(self) -> Stream:
        driver = self

        class Eager(Stream):
            def follow(self, event: Any) -> None:
                super().follow(event)
                self.reach(len(self.work))

            def copy(self, target: int, source: int, size: int) -> None:
                super().copy(target, source, size)
                self.reach(len(self.work))

        return Eager(driver)

    def work_a_little(self) -> None:
        pass


class LateDriver(EmulatedDriver):
    """A query of an event lets no work be done."""

    def work_a_little(self) -> None:
        pass


class LateCaller(CallerStream):
    """The stream of a caller who does not wait for attention."""

    launch = Stream.launch


def kernels_follow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is launched while copies are late."""
    mirror, _ = cache_of_pages(monkeypatch, LateDriver())
    mirror.look()


def copies_follow_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are done at once, and kernels late."""
    driver = EagerCopies()
    mirror, tokens = cache_of_pages(monkeypatch, driver)
    cache, rng = mirror.cache, np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 2, 16), np.float32)
    q = rng.standard_normal((1, 4, 16), np.float32)
    outs = []
    for stream in (CallerStream(driver), LateCaller(driver)):
        driver.ring_bytes = 0 if isinstance(stream, LateCaller) else 1 << 40
        with cache.step([tokens.sequence], [1], stream=stream) as step:
            outs += [step.forward(index, q, k, v) for index in (0, 1)]
            step.commit([0])
        stream.reach(len(stream.work))
    np.testing.assert_allclose(outs[2], outs[0], atol=1e-5)
    np.testing.assert_allclose(outs[3], outs[1], atol=1e-5)


def blocks_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are freed while they are still being copied ahead for the next step."""
    driver = LateDriver()
    mirror, tokens = cache_of_pages(monkeypatch, driver)
    mirror.look()
    for stream in driver.streams:
        if isinstance(stream, CallerStream):
            stream.reach(len(stream.work))
    tokens.sequence.release()
    counts = mirror.cache.stats().host[0]
    assert (counts.used, counts.draining) == (0, 30)


def what_was_brought_ahead_is_of_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence gets the blocks of a released one."""
    mirror, tokens = cache_of_pages(monkeypatch, RestlessDriver(8))
    mirror.look()
    mirror.release(tokens)
    engine_of(mirror.cache)._wait_for_steps()
    other = mirror.create()
    for _ in range(4):
        mirror.step([other], [120])
        mirror.cache.demote(other.sequence).wait()
    mirror.look()


_side_by_side = Streams._side_by_side


def a_block_short(*given: Any) -> npt.NDArray[np.int64]:
    runs = _side_by_side(*given)
    runs[-1:, 1] -= 1
    return runs


FENCES: list[tuple[Callable[[pytest.MonkeyPatch], None], tuple[Any, str, Callable[..., Any]]]] = [
    (kernels_follow_copies, (CallerStream, "follow", lambda self, event: None)),
    # One block is not copied: the old contents of the slot must show.
    (kernels_follow_copies, (Streams, "_side_by_side", a_block_short)),
    (copies_follow_kernels, (Stream, "follow", lambda self, event: None)),
    (blocks_wait_for_copies, (Streams, "behind", lambda self, step: step)),
    (what_was_brought_ahead_is_of_the_same_pages, (Ring, "forget", lambda self: None)),
]


@pytest.mark.parametrize("scene", [scene for scene, _ in FENCES])
def test_fences_hold(scene: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    scene(monkeypatch)


@pytest.mark.parametrize(("scene", "fence"), FENCES)
def test_a_missing_fence_is_noticed(
    scene: Callable[[pytest.MonkeyPatch], None],
    fence: tuple[Any, str, Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*fence)
    with pytest.raises(AssertionError):
        scene(monkeypatch)
