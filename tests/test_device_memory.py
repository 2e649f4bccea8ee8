"""Memory that a device or the system refuses: whichever allocation fails, the call reports it and changes nothing, the
next attempt succeeds, and nothing is left when the cache is gone."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import pytest
from emulator.driver import EmulatedDriver, HostArena, Memory, install_driver
from mirror import Mirror, Tokens, layer
from pagoda.device import mover, passage, ring
from pagoda.device.scratch import Scratch
from pagoda.device.tables import Room
from pagoda.errors import BackendUnavailable


class Lent:
    """Memory as an engine holds it. Tests see when it is freed; the bytes stay, since faulty work may still be using them."""

    def __init__(self, memory: Memory) -> None:
        self.address, self.array = memory.address, memory.array


class StingyArena(HostArena):
    """Pins a piece only if the driver allows the allocation."""

    def __init__(self, driver: StingyDriver, size: int, piece: int) -> None:
        super().__init__(size, piece, driver.guarded)
        self.driver = driver

    def _pin(self, address: int, size: int) -> bool:
        start = int(address) - self.address
        if 0 <= start < len(self.array):
            for piece in range(start // self.piece, (start + int(size) - 1) // self.piece + 1):
                if piece not in self.pinned:
                    self.driver.allocate(f"piece {piece} of the host tier")
        return super()._pin(address, size)


class StingyDriver(EmulatedDriver):
    """A device that refuses one allocation and counts all. A query of an event lets no work be done."""

    def __init__(self, refuses: int) -> None:
        super().__init__()
        self.refuses, self.allocations = refuses, 0
        self.lent: weakref.WeakSet[Lent] = weakref.WeakSet()

    def work_a_little(self) -> None:
        pass

    def allocate(self, what: str) -> None:
        self.allocations += 1
        if self.allocations == self.refuses:
            raise BackendUnavailable(f"{what}: refused")

    def _lend(self, memory: Memory) -> Any:
        lent = Lent(memory)
        self.lent.add(lent)
        return lent

    def memory(self, size: int) -> Any:
        self.allocate(f"{size} bytes of the device")
        return self._lend(super().memory(size))

    def pinned(self, size: int) -> Any:
        self.allocate(f"{size} pinned bytes")
        return self._lend(super().pinned(size))

    def host_arena(self, size: int, piece: int) -> StingyArena:
        self.allocate(f"{size} bytes of address space")
        self.arenas.append(StingyArena(self, size, piece))
        return self.arenas[-1]  # type: ignore[return-value]


class Life:
    """Does everything in the life of a cache that allocates memory. Refused calls are repeated."""

    def __init__(self, driver: StingyDriver, options: dict[str, Any]) -> None:
        self.driver, self.refused = driver, 0
        spec = pagoda.ModelSpec(layers=[layer()])
        open_it = lambda: pagoda.Cache(spec, device="cuda", page_size=16, **options)  # noqa: E731
        self.mirror = Mirror(self.insist(open_it, None))

    def insist(self, call: Callable[[], Any], mirror: Mirror | None) -> Any:
        """Makes a call. If it is refused, nothing may have changed, and the second attempt must succeed."""
        before = [] if mirror is None else [(len(one), list(one.k), list(one.v)) for one in mirror.live]
        try:
            return call()
        except BackendUnavailable as error:
            assert "refused" in str(error)
            self.refused += 1
        if mirror is not None:
            for tokens, (length, k, v) in zip(mirror.live, before, strict=True):
                tokens.k, tokens.v = k, v
                assert len(tokens.sequence) == length
            mirror.cache.audit()
        gc.collect()
        return call()

    def step(self, batch: list[Tokens], new: list[int]) -> None:
        self.insist(lambda: self.mirror.step(batch, new), self.mirror)

    def move(self, tokens: Tokens, tier: str) -> None:
        def there_and_wait() -> None:
            assert cache.execute(cache.plan(tokens.sequence, tier)).wait()

        cache = self.mirror.cache
        self.insist(there_and_wait, self.mirror)

    def live(self) -> None:
        mirror = self.mirror
        one, other = mirror.create(), mirror.create()
        self.step([one, other], [70, 5])
        # In another order, so that rows of tables are sent again without new pages.
        self.step([other, one], [1, 1])
        # Interleaved pages that stay make the move several copies.
        for tokens in (one, other):
            self.step([tokens], [40])
        self.move(one, "host")
        self.step([one, other], [1, 1])
        self.step([one, other], [1, 20])
        fork = mirror.fork(one)
        self.step([fork, one, other], [3, 1, 0])
        self.move(one, "device")
        self.step([one, other, fork], [100, 1, 1])
        self.move(other, "host")
        self.step([one, other, fork], [1, 1, 1])
        for tokens in list(mirror.live):
            mirror.release(tokens)
        # Blocks become free only when the steps have ended.
        self.insist(lambda: mirror.step([], []), mirror)
        self.driver.catch_up()
        stats = mirror.cache.stats()
        assert all(counts.used == 0 for tier in (stats.device, stats.host) for counts in tier)
        mirror.cache.close()


SCENES: dict[str, dict[str, Any]] = {
    "in place": {"device_memory": "512KiB", "host_memory": "512KiB"},
    "streamed": {"device_memory": "512KiB", "host_memory": "512KiB"},
    "deterministic, zeroed, checked": {
        "device_memory": "512KiB",
        "host_memory": "512KiB",
        "deterministic": True,
        "zero_on_free": True,
        "checked": True,
    },
}


@pytest.mark.parametrize("name", SCENES)
def test_whichever_allocation_is_refused_nothing_is_lost_or_leaked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "streamed":
        monkeypatch.setattr(ring, "SLOT_BYTES_MIN", 1)
    for refuses in count(1):
        driver = install_driver(monkeypatch, StingyDriver(refuses))
        life = Life(driver, SCENES[name])
        life.live()
        driver.check()
        refused = life.refused
        del life
        gc.collect()
        assert len(driver.lent) == 0, "memory that nobody gives back"
        assert not any(arena.pinned for arena in driver.arenas)
        if not refused:
            assert driver.allocations < refuses
            assert refuses > 15, "a life with so few allocations shows nothing"
            return
        assert refused == 1


def test_a_move_that_is_refused_has_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its two runs is for the copy engine, one for a kernel whose list is refused. Others then get the blocks."""
    driver = install_driver(monkeypatch, StingyDriver(0))
    spec = pagoda.ModelSpec(layers=[layer(), layer()])
    # There is room for five pages, so that returning ones get their old places, before and after another sequence's.
    options: dict[str, Any] = {"device_memory": "20KiB", "host_memory": "256KiB", "spill": False, "page_size": 16}
    with pagoda.Cache(spec, device="cuda", **options) as cache:
        mirror = Mirror(cache)
        one, between = mirror.create(), mirror.create()
        mirror.step([one], [48])
        mirror.step([between], [1])
        mirror.step([one], [16])
        # Each of these is one run.
        assert cache.demote(one.sequence, (0, 48)).wait()
        assert cache.demote(one.sequence, (48, 64)).wait()
        driver.refuses = driver.allocations + 1
        with pytest.raises(BackendUnavailable, match="pinned bytes: refused"):
            cache.promote(one.sequence)
        other = mirror.create()
        mirror.step([other], [60])
        driver.catch_up()
        mirror.step([other], [1], accepted=[0])


def grow_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes scratch memory exactly as large as requested."""
    grow = Scratch.grow
    monkeypatch.setattr(Scratch, "grow", lambda self, sizes, *, exactly: grow(self, sizes, exactly=True))


@pytest.mark.parametrize(
    "second", [layer(num_q_heads=32, kv_owner=0), layer(num_q_heads=16, head_dim=128)], ids=["heads", "rows"]
)
def test_scratch_memory_is_enough_for_layers_of_every_kind(
    second: pagoda.AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch memory is exactly as large as requested."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    grow_exactly(monkeypatch)
    spec = pagoda.ModelSpec(layers=[layer(), second])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="2MiB", host_memory=0) as cache:
        mirror = Mirror(cache)
        batch = [mirror.create(), mirror.create()]
        for new in ([1, 1], [300, 40], [1, 1]):
            mirror.step(batch, new)
        driver.check()


def test_scratch_memory_has_a_counter_for_each_head_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread blocks share the last of them. So many do not fit what any memory is rounded up to."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    grow_exactly(monkeypatch)
    spec = pagoda.ModelSpec(layers=[layer(num_q_heads=16, num_kv_heads=16)])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="4MiB", host_memory=0) as cache:
        mirror = Mirror(cache)
        batch = [mirror.create() for _ in range(16)]
        # Two tiles each, so that a share may end between them.
        mirror.step(batch, [70] * 16)
        mirror.step(batch, [1] * 16)
        driver.check()


@pytest.mark.parametrize("new_tokens", [4, 12])
def test_scratch_memory_is_enough_for_pages_in_common(new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the case that needs the most: no longer prompt came before, and each sequence has several queries."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    grow_exactly(monkeypatch)
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="2MiB", host_memory=0) as cache:
        assert cache._device is not None
        mirror = Mirror(cache)
        live = [mirror.create()]
        for _ in range(12):
            mirror.step(live, [8])
        live += [mirror.fork(live[0]) for _ in range(15)]
        mirror.step(live, [new_tokens] * 16)
        assert cache._device._tables.members == 16 * new_tokens
        driver.check()


def test_tables_grow_and_uploads_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow to powers of two and never shrink; the changes of a step fit, whatever was sent before."""
    assert Room(8, 8, 8, 8, 0).grown((9, 1, 8, 3, 0)) == Room(16, 8, 8, 8, 0)
    driver = install_driver(monkeypatch, EmulatedDriver())
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="2MiB", host_memory=0) as cache:
        sequence = cache.create()
        for tokens in (1, 1, 1, 2000, 1):
            with cache.step([sequence], [tokens]) as step:
                step.append(0, *[np.ones((tokens, 2, 16), np.float16)] * 2)
        with cache.step([sequence], [1]) as step:
            rows = np.ones((1, 4, 16), np.float16)
            assert (step.forward(0, rows, rows[:, :2], rows[:, :2]) == 1).all()
        driver.check()


def test_a_work_list_has_room_for_its_end_behind_64_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 64 numbers of 4 bytes fill the 256 that pieces of tables are aligned to."""
    install_driver(monkeypatch, EmulatedDriver())
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="2MiB", host_memory=0) as cache:
        assert cache._device is not None
        mirror = Mirror(cache)
        mirror.step([mirror.create() for _ in range(64)], [1] * 64)
        lists = [work.own for work in cache._device._tables.works.values() if work.blocks_max == 64]
        assert lists
        assert all(own.totals - own.prefix >= 4 * 65 for own in lists)


@pytest.mark.parametrize("deterministic", [False, True])
def test_heads_that_no_unit_has_room_for_are_cut_into_sets(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts, in decoding and over common pages. Scratch memory is exactly as large as requested."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    monkeypatch.setattr(driver, "shared_bytes_max", 18 << 10)
    grow_exactly(monkeypatch)
    shape = pagoda.AttentionLayer(64, 1, 64, v_head_dim=32, v_alias=True)
    options: dict[str, Any] = {"device_memory": "2MiB", "host_memory": 0, "deterministic": deterministic}
    with pagoda.Cache(pagoda.ModelSpec([shape]), device="cuda", page_size=16, **options) as cache:
        assert cache._device is not None
        [kernels] = cache._device._attends._layers
        assert {kernels.attention(mode, "f32").sets for mode in ("verify", "prefill")} == {2}
        mirror = Mirror(cache)
        one = mirror.create()
        mirror.step([one], [20])
        mirror.step([one, mirror.fork(one)], [1, 1])
        driver.check()


@pytest.mark.parametrize("deterministic", [False, True])
def test_scratch_memory_follows_the_number_of_sequences(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is enough for batches of many spans, and does not grow with the square of the batch."""
    taken = []
    for sequences in (4, 32):
        driver = install_driver(monkeypatch, StingyDriver(0))
        spec = pagoda.ModelSpec(layers=[layer()])
        options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": 0, "deterministic": deterministic}
        with pagoda.Cache(spec, device="cuda", page_size=16, **options) as cache:
            before = sum(len(memory.array) for memory in driver.lent)
            mirror = Mirror(cache)
            batch = [mirror.create() for _ in range(sequences)]
            mirror.step(batch, [12] * sequences)
            for tokens in batch:
                mirror.drop(tokens, 3, 5)
            mirror.step(batch, [1] * sequences)
            driver.check()
            taken.append(sum(len(memory.array) for memory in driver.lent) - before)
    assert taken[1] < 10 * taken[0]


def test_scratch_memory_that_grows_is_replaced_seldom_and_is_not_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing it waits for the device."""
    driver, asked = EmulatedDriver(), list[int]()
    scratch, memory = Scratch(driver), driver.memory

    def noted(size: int) -> Any:
        assert 0 in (scratch.partials, scratch.counters, scratch.parts)
        asked.append(size)
        return memory(size)

    monkeypatch.setattr(driver, "memory", noted)
    scratch.grow((1, 1, 1), exactly=True)
    for size in range(1000, 5000, 100):
        scratch.grow((size, 4 * size, 0), exactly=False)
        assert scratch.covers((size, 4 * size, 0))
    for _ in range(2):
        scratch.grow((9000, 0, 30), exactly=True)
    assert asked == [1, 1, 1, 1024, 4096, 2048, 8192, 4096, 16384, 8192, 32768, 9000, 30]


def test_a_step_goes_on_without_the_scratch_memory_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old scratch memory is gone: layers for which it was enough allocate it again."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    spec, rows = pagoda.ModelSpec([layer(), layer(num_q_heads=64)]), np.ones((1, 64, 16), np.float32)
    with pagoda.Cache(spec, device="cuda", page_size=16, device_memory="2MiB", host_memory=0) as cache:
        assert cache._device is not None
        with cache.step([cache.create()], [1]) as step:
            for index in range(2):
                step.append(index, rows[:, :2], rows[:, :2])
            step.attend(0, rows[:, :4])

            def refused(size: int) -> Any:
                raise pagoda.BackendUnavailable("device_memory")

            with monkeypatch.context() as patched, pytest.raises(pagoda.BackendUnavailable):
                patched.setattr(driver, "memory", refused)
                step.attend(1, rows)
            scratch = cache._device._attends._scratch
            assert not all((scratch.partials, scratch.counters))
            for index, heads in enumerate((4, 64)):
                assert (step.attend(index, rows[:, :heads]) == 1).all()
                assert all((scratch.partials, scratch.counters))


def test_lists_for_the_kernel_that_copies_do_not_pile_up() -> None:
    """Whatever their sizes; lists still being read are left alone."""
    driver = StingyDriver(0)
    source, target, stream = driver.memory(1 << 16), driver.memory(1 << 16), driver.stream()
    copying, rng = mover.Mover(driver, None), np.random.default_rng(0)

    def copied(runs: int, first: int = 0) -> None:
        """Copies every second 16 bytes, so that no two runs merge."""
        if not first:
            source.array[:] = rng.integers(0, 256, len(source.array))
        places = 32 * np.arange(first, first + runs, dtype=np.uint64)
        transfers = np.stack([places + np.uint64(source.address), places + np.uint64(target.address)], 1)
        copying.copy(stream, np.column_stack([transfers, np.full(runs, 16, np.uint64)]))

    def arrived(runs: int) -> None:
        stream.record().wait()
        here, there = (one.array.reshape(-1, 32)[:runs, :16] for one in (source, target))
        np.testing.assert_array_equal(here, there)

    for runs in (2, 400, 3, 2000, 400, 2):
        copied(runs)
        arrived(runs)
    before = driver.allocations
    for runs in (2, 400, 2000, 5, 2, 800):
        copied(runs)
        arrived(runs)
    assert driver.allocations == before
    for turn in range(8):
        if turn == 4:
            before = driver.allocations
        copied(50)
        copied(30, 50)
        copied(10 - turn, 80)
        arrived(90 - turn)
    assert driver.allocations == before


def test_a_list_is_not_used_again_after_ctrl_c_in_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor given back: the kernel may read it much later."""
    driver = EmulatedDriver()
    driver.copy_engine_bytes = 1 << 62
    source, target, stream = driver.memory(1 << 13), driver.memory(1 << 13), driver.stream()
    source.array[:] = np.random.default_rng(0).integers(1, 256, len(source.array))
    copying, launch = mover.Mover(driver, None), stream.launch

    def interrupted(*given: Any) -> None:
        launch(*given)
        raise KeyboardInterrupt

    places = 32 * np.arange(256, dtype=np.uint64)
    runs = np.stack([places + np.uint64(source.address), places + np.uint64(target.address), places * 0 + 16], 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stream, "launch", interrupted)
        copying.copy(stream, runs[:100])
    copying.copy(stream, runs[100:200])
    copying.copy(stream, runs[200:])
    stream.record().wait()
    here, there = (one.array.reshape(-1, 32)[:, :16] for one in (source, target))
    np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("engine_bytes", [0, 96, 1 << 62])
@pytest.mark.parametrize("piece_bytes", [32, mover.PIECE_BYTES])
def test_neighbours_are_copied_in_one(engine_bytes: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a piece of the host arena begins between them. The copy engine takes runs that are large, not of whole words, or
    alone; some blocks are 8 bytes short. In both directions, and however runs are cut for the kernel."""
    monkeypatch.setattr(mover, "PIECE_BYTES", piece_bytes)
    driver, rng = EmulatedDriver(), np.random.default_rng(0)
    driver.copy_engine_bytes = engine_bytes
    arena, memory, stream = driver.host_arena(1 << 12, 256), driver.memory(1 << 13), driver.stream()
    copies: list[tuple[int, int, int]] = []
    launches: list[Any] = []
    monkeypatch.setattr(stream, "copy", lambda target, source, size: copies.append((source, target, size)))
    monkeypatch.setattr(stream, "launch", lambda kernel, grid, threads, call: launches.append(call))
    merging = mover.Mover(driver, arena)
    for number in [0, 1, 2, *[40] * 20]:
        # Blocks of 32 bytes, each right after the previous one or elsewhere; on the device some are 8 bytes off.
        places = rng.permutation(128)[:number]
        for at in range(1, number):
            if rng.random() < 0.6 and places[at - 1] < 127:
                places[at] = places[at - 1] + 1
        here = arena.address + 32 * places
        there = memory.address + 32 * (places + 128 * (rng.random() < 0.5)) + 8 * (rng.random(number) < 0.1)
        ends = [here, there] if rng.random() < 0.5 else [there, here]
        transfers = np.stack([*ends, 32 - 8 * (rng.random(number) < 0.1)], 1).astype(np.uint64)
        expected: list[list[int]] = []
        for (source, target, size), host in zip(transfers.tolist(), here.tolist(), strict=True):
            last = expected[-1] if expected and (host - arena.address) % 256 else None
            if last and (last[0] + last[2], last[1] + last[2]) == (source, target):
                last[2] += size
            else:
                expected.append([source, target, size])
        copies.clear()
        launches.clear()
        merging.copy(stream, transfers)
        assert arena.pinned >= set((32 * places // 256).tolist())
        by_kernel = [run for run in expected if run[2] < engine_bytes and not any(x % 16 for x in run)]
        by_kernel = by_kernel if len(expected) > 1 else []
        assert copies == [tuple(run) for run in expected if run not in by_kernel]
        assert len(launches) == bool(by_kernel)
        pieces = [
            [source + at, target + at, min(piece_bytes, size - at)]
            for source, target, size in by_kernel
            for at in range(0, size, piece_bytes)
        ]
        for call in launches:
            listed = (ctypes.c_uint64 * (3 * call.count)).from_address(call.runs)
            assert np.array(listed).reshape(-1, 3).tolist() == pieces


@pytest.mark.parametrize("rest", [48, 16 * 300])
def test_long_runs_arrive_by_the_kernel(rest: int) -> None:
    """And nothing behind them. The last piece ends before the first word of some threads, or before the second."""
    driver = EmulatedDriver()
    driver.copy_engine_bytes = 1 << 62
    size = 2 * mover.PIECE_BYTES + rest
    source, target, stream = driver.memory(4 * size), driver.memory(4 * size), driver.stream()
    source.array[:] = np.random.default_rng(0).integers(1, 256, 4 * size)
    places = np.array([[0, 2], [2, 0]], np.uint64) * np.uint64(size)
    runs = places + np.array([source.address, target.address], np.uint64)
    copying = mover.Mover(driver, None)
    copying.copy(stream, np.column_stack([runs, np.full(2, size, np.uint64)]))
    stream.record().wait()
    there, here = target.array.reshape(4, size), source.array.reshape(4, size)
    np.testing.assert_array_equal(there[[2, 0]], here[[0, 2]])
    assert not there[[1, 3]].any()


def test_a_move_that_is_refused_late_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn comes during a call for another move. That call gets the error, and so does a wait for this move."""
    driver = install_driver(monkeypatch, StingyDriver(0))
    monkeypatch.setattr(passage, "PART_BYTES", 1)
    monkeypatch.setattr(passage, "PARTS", 1)
    spec = pagoda.ModelSpec(layers=[layer()])
    options: dict[str, Any] = {"device_memory": "256KiB", "host_memory": 0, "spill": False, "page_size": 16}
    options |= {"disk": tmp_path / "pages", "disk_memory": "1MiB"}
    with pagoda.Cache(spec, device="cuda", **options) as cache:
        mirror = Mirror(cache)
        first, one, between = mirror.create(), mirror.create(), mirror.create()
        mirror.step([first], [16])
        # Two runs, for the kernel.
        for tokens in (one, between, one):
            mirror.step([tokens], [16])
        goes = cache.demote(first.sequence, to="disk")
        waits = cache.demote(one.sequence, to="disk")
        driver.refuses = driver.allocations + 1
        with pytest.raises(BackendUnavailable, match="4096 pinned bytes: refused"):
            goes.wait()
        with pytest.raises(pagoda.TierIOError, match="failed after 0 of 2 copies: 4096 pinned bytes: refused"):
            waits.wait()
        assert goes.wait()
        cache.audit()
        for tokens in (first, one):
            assert cache.demote(tokens.sequence, to="disk").wait()
        assert (cache.stats().disk[0].used, cache.stats().device[0].used) == (3, 1)
        mirror.look()


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_rows_lie_beyond_four_gibibytes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets need more than 32 bits, in bytes and in elements. Blocks before them are taken but never written."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    shape = layer(num_q_heads=8, num_kv_heads=8, head_dim=256)
    options: dict[str, Any] = {
        "device_memory": "5GiB",
        "host_memory": 0,
        "k_dtype": dtype,
        "v_dtype": dtype,
        "center": None,
    }
    options |= {"center": None, "rotate": False}
    with pagoda.Cache(pagoda.ModelSpec(layers=[shape]), device="cuda", page_size=256, **options) as cache:
        (block_bytes,) = cache.stats().block_bytes
        fillers = [cache.create() for _ in range(-(-(1 << 32) // block_bytes))]
        with cache.step(fillers, [1] * len(fillers)) as step:
            step.table(0)
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [20])
        mirror.step([tokens], [1])
        with cache.step([tokens.sequence], [1]) as step:
            first_block = int(step.table(0).block_table.min())
        assert first_block * block_bytes >= 1 << 32
        driver.check()
