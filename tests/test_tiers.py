"""Pages on the move between the device and the host tier."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import psutil
import pytest
from mirror import Mirror, layer, settled

SPEC = pagoda.ModelSpec(layers=[layer(), layer(), layer(window=40)])


@pytest.fixture
def mirror() -> Any:
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "1MiB", "threads": 2, "headroom": 1000}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        yield Mirror(cache)


def test_demote_and_promote_move_whole_pages_and_no_byte_changes(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [100])
    cache = mirror.cache
    sizes = cache.stats().block_bytes
    plan = cache.plan(tokens.sequence, "host", (0, 40))
    assert plan.bytes == 3 * sum(sizes), "the pages that hold tokens 0 to 39"
    assert [copy[2:4] for copy in plan.copies] == [("device", "host")] * 6
    ticket = cache.execute(plan)
    assert ticket.wait(60)
    assert ticket.done()
    assert cache.stats().used_bytes("host") == plan.bytes
    mirror.look()
    assert cache.plan(tokens.sequence, "host", (0, 40)).copies == []
    assert cache.promote(tokens.sequence).wait(60)
    assert cache.stats().used_bytes("host") == 0
    assert cache.stats().moved_bytes == {("device", "host"): plan.bytes, ("host", "device"): plan.bytes}
    mirror.look()


def test_a_sequence_is_demoted_whole_and_goes_on(mirror: Mirror) -> None:
    """Including open pages: a resting sequence holds nothing on the device. The next step brings the open pages back."""
    cache, tokens = mirror.cache, mirror.create()
    mirror.step([tokens], [20])
    assert len(cache.plan(tokens.sequence, "host")) == 4
    for _ in range(3):
        assert cache.demote(tokens.sequence).wait(60)
        assert settled(cache).used_bytes("device") == 0
        mirror.look()
        mirror.step([tokens], [3])
        assert len(cache.plan(tokens.sequence, "host")) == 2, "the open page of each group"
    assert cache.demote(tokens.sequence).wait(60)
    assert cache.prefetch(tokens.sequence).wait(60)
    assert len(cache.plan(tokens.sequence, "host").copies) == 4
    assert cache.plan(tokens.sequence, "host").bytes == cache.stats().used_bytes("device") // 2, (
        "full pages stayed there"
    )
    mirror.step([tokens], [3])
    mirror.look()


@pytest.mark.parametrize("change", ["step", "fork", "truncate", "release", "roll back"])
def test_an_open_page_changes_while_it_moves(mirror: Mirror, change: str) -> None:
    cache, tokens = mirror.cache, mirror.create()
    mirror.step([tokens], [20])
    ticket = cache.demote(tokens.sequence)
    if change == "step":
        mirror.step([tokens], [3])
    elif change == "fork":
        mirror.step([tokens, mirror.fork(tokens)], [2, 3])
    elif change == "truncate":
        mirror.truncate(tokens, 18)
        mirror.step([tokens], [1])
    elif change == "release":
        mirror.release(tokens)
    else:
        with pytest.raises(KeyError), cache.step([tokens.sequence], [3]):
            raise KeyError
    assert ticket.wait(60)
    mirror.look()
    mirror.step(mirror.live, [1] * len(mirror.live))
    mirror.look()
    cache.audit()


def test_more_sequences_rest_than_the_device_has_blocks() -> None:
    """Each has less than a page, so none could leave if open pages did not."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="256KiB", host_memory="4MiB", threads=1) as cache:
        blocks = cache.stats().device[0].free
        mirror = Mirror(cache)
        resting = [mirror.create() for _ in range(3 * blocks)]
        for turn in range(2):
            for tokens in resting:
                mirror.step([tokens], [3 + turn])
        cache.audit()


def test_prefetch_keeps_the_slower_copy_so_that_demoting_again_is_free(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [64])
    cache = mirror.cache
    assert cache.demote(tokens.sequence).wait(60)
    assert cache.prefetch(tokens.sequence).wait(60)
    moved = cache.stats().moved_bytes
    assert cache.stats().used_bytes("device") == cache.stats().used_bytes("host")
    plan = cache.plan(tokens.sequence, "host")
    assert plan.bytes == 0
    assert len(plan) == 8
    assert cache.execute(plan).wait(60)
    mirror.look()
    assert cache.stats().moved_bytes == moved


def test_prefetch_copies_what_finds_room_though_groups_take_it_from_each_other() -> None:
    """Each group counts the blocks of an unowned extent as free, but only one of them can have it."""
    spec = pagoda.ModelSpec(layers=[layer(), layer(num_kv_heads=4)])
    with pagoda.Cache(spec, page_size=16, device_memory="128KiB", host_memory="4MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens], [64])
        assert cache.demote(tokens.sequence).wait(60)
        mirror.step([other], [320])
        cache._spill.settle()
        free = settled(cache).device
        assert [counts.free for counts in free] == [4, 2], "an extent for one of the groups"
        ticket = cache.prefetch(tokens.sequence)
        assert ticket.wait(60)
        cache.audit()
        mirror.look()


@pytest.mark.parametrize(("device_memory", "least"), [("512KiB", 200), ("384KiB", 150)])
def test_prefetch_copies_pages_of_one_group_where_others_have_few(
    device_memory: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them or, after a few attempts, nearly as many as fit."""
    spec = pagoda.ModelSpec(layers=[layer(), *(layer(window=16 + 8 * index) for index in range(3))])
    options: dict[str, Any] = {"host_memory": "4MiB", "threads": 1, "headroom": 16, "spill": False}
    with pagoda.Cache(spec, page_size=16, device_memory=device_memory, **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        for _ in range(20):
            mirror.step([tokens], [160])
            assert cache.demote(tokens.sequence).wait(60)
        tries: list[pagoda.Plan] = []
        execute = cache.execute

        def counted(plan: pagoda.Plan) -> pagoda.Ticket:
            tries.append(plan)
            return execute(plan)

        monkeypatch.setattr(cache, "execute", counted)
        assert cache.prefetch(tokens.sequence).wait(60)
        assert len(tries) < 20
        assert 200 - len(cache.plan(tokens.sequence, "device", layers=[0])) >= least
        cache.audit()
        mirror.look()


def test_prefetch_copies_pages_of_one_group_where_another_has_no_room() -> None:
    """Holes in one group's extents are of no use to the other group, which has taken everything else."""
    spec = pagoda.ModelSpec(layers=[layer(), layer(num_kv_heads=4, window=16)])
    options: dict[str, Any] = {"host_memory": "4MiB", "threads": 1, "headroom": 0, "spill": False}
    with pagoda.Cache(spec, page_size=16, device_memory="1MiB", **options) as cache:
        tokens, one, other, others = cache.create(), cache.create(), cache.create(), []

        def grow(sequences: list[pagoda.Sequence], new: int) -> None:
            with cache.step(sequences, [new] * len(sequences)) as step:
                for index, heads in enumerate((2, 4)):
                    rows = np.zeros((new * len(sequences), heads, 16), np.float32)
                    step.append(index, rows, rows)

        grow([tokens], 160)
        assert cache.demote(tokens).wait(60)
        with pytest.raises(pagoda.OutOfBlocks):
            while True:
                grow([one, other], 16)
        other.drop(0, len(other) // 32 * 16)
        while cache.stats().device[1].free:
            others.append(cache.create())
            grow(others[-1:], 1)
        assert cache.stats().device[0].free >= 10
        assert cache.prefetch(tokens).wait(60)
        assert not cache.plan(tokens, "device", layers=[0])
        assert cache.plan(tokens, "device", layers=[1])
        cache.audit()


def test_a_step_waits_for_room_that_its_caller_is_making() -> None:
    """Pages being demoted cannot be spilled too, and will soon be gone."""
    with pagoda.Cache(pagoda.ModelSpec([layer(head_dim=128)]), device_memory="48MiB", host_memory="256MiB") as cache:
        rows = np.ones((40000, 2, 128), np.float32)
        for _ in range(3):
            sequence = cache.create()
            with cache.step([sequence], [40000]) as step:
                step.append(0, rows, rows)
            ticket = cache.demote(sequence)
        assert ticket.wait(60)
        cache.audit()


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_step_waits_for_pages_that_cannot_leave_before_they_have_arrived(way: str) -> None:
    """Or before their copies are finished."""
    with pagoda.Cache(pagoda.ModelSpec([layer(head_dim=128)]), device_memory="48MiB", host_memory="256MiB") as cache:
        rows, one, other = np.ones((40000, 2, 128), np.float32), cache.create(), cache.create()

        def grow(sequence: pagoda.Sequence) -> None:
            with cache.step([sequence], [len(rows)]) as step:
                step.append(0, rows, rows)

        grow(one)
        if way == "there":
            ticket = cache.execute(cache.plan(one, "host", keep=True))
        else:
            assert cache.demote(one).wait(60)
            ticket = cache.prefetch(one)
        grow(other)
        assert ticket.wait(60)
        cache.audit()


def test_prefetch_takes_the_newest_pages() -> None:
    with pagoda.Cache(pagoda.ModelSpec([layer()]), page_size=16, device_memory="32KiB", host_memory="4MiB") as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens], [112])
        assert cache.demote(tokens.sequence).wait(60)
        mirror.step([other], [192])
        cache._spill.settle()
        room = settled(cache).device[0].free
        assert 0 < room < 7
        assert cache.prefetch(tokens.sequence).wait(60)
        missing = [
            page for page in range(7) if cache.plan(tokens.sequence, "device", (16 * page, 16 * page + 16)).bytes
        ]
        assert missing == list(range(7 - room))
        mirror.look()


def test_a_stale_plan_is_refused(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [64])
    plan = mirror.cache.plan(tokens.sequence, "host")
    mirror.truncate(tokens, 60)
    mirror.step([tokens], [1])
    with pytest.raises(pagoda.InvalidArgument, match="plan"):
        mirror.cache.execute(plan)
    mirror.look()


def test_releasing_pages_under_way_is_safe(mirror: Mirror) -> None:
    for _ in range(20):
        tokens = mirror.create()
        mirror.step([tokens], [300])
        ticket = mirror.cache.demote(tokens.sequence)
        mirror.release(tokens)
        mirror.cache.audit()
        assert ticket.wait(60)
    stats = mirror.cache.stats()
    assert stats.used_bytes("device") == stats.used_bytes("host") == 0


def test_a_full_host_tier_refuses_and_changes_nothing() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="256KiB", threads=1) as cache:
        mirror = Mirror(cache, np.random.default_rng(3))
        batch = [mirror.create(), mirror.create()]
        mirror.step(batch, [500, 500])
        assert cache.demote(batch[0].sequence).wait()
        before = settled(cache)
        with pytest.raises(pagoda.OutOfBlocks, match="tier host") as caught:
            cache.demote(batch[1].sequence)
        assert caught.value.tier == "host"
        assert settled(cache) == before
        mirror.look()


def test_a_context_larger_than_the_device_spills_and_is_attended_to_in_full() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="128KiB", host_memory="4MiB", threads=2) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        tokens = mirror.create()
        for _ in range(30):
            mirror.step([tokens], [70])
        stats = cache.stats()
        assert stats.used_bytes("host") > 2 * stats.used_bytes("device")
        mirror.step([tokens], [1])
    with pagoda.Cache(SPEC, page_size=16, device_memory="256KiB", host_memory="4MiB", threads=2, spill=False) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        tokens = mirror.create()
        with pytest.raises(pagoda.OutOfBlocks):
            mirror.step([tokens], [3000])
        cache.audit()


def grow(cache: pagoda.Cache, sequence: pagoda.Sequence, pages: int) -> None:
    """Appends whole pages of 16 tokens to the only layer, and waits for the moves that they cause."""
    rows = np.zeros((16 * pages, 2, 16), np.float16)
    with cache.step([sequence], [16 * pages]) as step:
        step.append(0, rows, rows)
    cache._spill.settle()


def pages_on_device(sequence: pagoda.Sequence, cache: pagoda.Cache) -> list[int]:
    """Indices of a sequence's pages on the device."""
    pages = range(len(sequence) // 16)
    return [page for page in pages if cache.plan(sequence, "host", (16 * page, 16 * page + 16)).copies]


@pytest.mark.parametrize("again", [False, True])
def test_what_rested_longest_leaves_first_and_of_a_sequence_the_oldest_pages(again: bool) -> None:
    """By the last step, not by creation; pages of the batch leave only after all resting ones."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="256KiB", host_memory="4MiB", threads=1) as cache:
        resting = [cache.create() for _ in range(3)]
        for sequence in resting:
            grow(cache, sequence, 20)
        if again:
            grow(cache, resting[0], 1)
            resting.append(resting.pop(0))
        busy = cache.create()
        orders = [*resting, busy]
        for _ in range(128):
            grow(cache, busy, 1)
            there = [pages_on_device(sequence, cache) for sequence in orders]
            whole = [len(pages) == len(sequence) // 16 for pages, sequence in zip(there, orders, strict=True)]
            for index, (pages, sequence) in enumerate(zip(there, orders, strict=True)):
                last = len(sequence) // 16
                assert pages == list(range(last - len(pages), last)), "the newest stay"
                assert whole[index] or not any(there[:index]), "what rested longer has left"
        assert there[:-1] == [[], [], []]
        assert not whole[-1]
        cache.audit()


def test_room_is_made_for_a_page_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences of a batch begin a page in the same step."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="512KiB", host_memory="8MiB", threads=1) as cache:
        waits: list[int] = []
        monkeypatch.setattr(cache._spill, "make_room", lambda blocks, batch: waits.append(blocks))
        sequences = 16
        batch, rows = [cache.create() for _ in range(sequences)], np.zeros((16 * sequences, 2, 16), np.float16)
        for _ in range(40):
            with cache.step(batch, [16] * sequences) as step:
                step.append(0, rows, rows)
            cache._spill.settle()
            assert settled(cache).device[0].free >= sequences
        assert cache.stats().host[0].used > 16 * sequences
        assert not waits


@pytest.mark.parametrize("windowed", [False, True])
def test_nothing_moves_for_a_step_that_the_device_could_never_hold(windowed: bool) -> None:
    """Each sequence of a step writes to a page of each layer group: they would not fit even in an empty device tier."""
    spec = pagoda.ModelSpec(layers=[layer(), layer(window=40)] if windowed else [layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="256KiB", host_memory="4MiB", threads=1) as cache:
        mirror = Mirror(cache)
        mirror.step([mirror.create()], [500])
        before = settled(cache)
        most = (256 << 10) // sum(before.block_bytes)
        batch = [cache.create() for _ in range(most + 1)]
        with pytest.raises(pagoda.OutOfBlocks), cache.step(batch, [1] * len(batch)):
            pass
        after = settled(cache)
        assert (after.moved_bytes, after.device, after.host) == (before.moved_bytes, before.device, before.host)
        mirror.look()


@pytest.mark.usefixtures("names_the_cpu")
def test_no_room_is_made_below_for_pages_that_stay_where_they_are(tmp_path: Path) -> None:
    """The open pages of a batch fill the device. Pages that rest in the host tier, which has room, must not go to disk."""
    spec = pagoda.ModelSpec(layers=[layer()])
    options: dict[str, Any] = {"device": "cpu", "device_memory": "64KiB", "host_memory": "256KiB"}
    options |= {"disk": tmp_path / "disk", "disk_memory": "4MiB"}
    with pagoda.Cache(spec, page_size=16, threads=1, **options) as cache:
        mirror = Mirror(cache)
        rests = mirror.create()
        for _ in range(30):
            mirror.step([rests], [16])
        assert cache.demote(rests.sequence).wait(60)
        whole = settled(cache).device[0].free
        batch = [mirror.create() for _ in range(whole // 2 + 1)]
        mirror.step(batch, [8] * len(batch))
        before = settled(cache)
        assert before.host[0].used == 30
        assert before.host[0].free > 0
        with pytest.raises(pagoda.OutOfBlocks):
            mirror.step(batch, [16] * len(batch))
        assert settled(cache).moved_bytes == before.moved_bytes
        mirror.look()


def test_pages_leave_ahead_of_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for room. Resting pages leave until an eighth of the tier is free, pages of the batch until a 32nd is."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="512KiB", host_memory="4MiB", threads=1) as cache:
        waits: list[int] = []
        monkeypatch.setattr(cache._spill, "make_room", lambda blocks, batch: waits.append(blocks))
        whole = cache.stats().device[0].free
        assert whole >= 128
        rests, busy = cache.create(), cache.create()
        grow(cache, rests, whole // 2)
        free = []
        for _ in range(whole + whole // 2):
            grow(cache, busy, 1)
            free.append(settled(cache).device[0].free)
        assert not waits
        assert not pages_on_device(rests, cache)
        assert min(free) >= 1
        brought_back_to = [after for before, after in pairwise(free) if after > before]
        assert brought_back_to[0] == whole // 8
        assert brought_back_to[-1] == whole // 32


def counted_plans(cache: pagoda.Cache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with every plan made from now on to make room."""
    plans: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name == "plan":
                plans.append(name)
            return getattr(cache._core, name)

    monkeypatch.setattr(cache._spill, "_core", Counting())
    return plans


@pytest.mark.usefixtures("names_the_cpu")
def test_sequences_with_nothing_to_move_are_not_looked_through_at_every_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Open pages do not go to disk: without a host tier, many resting sequences keep free memory below the mark for good."""
    spec = pagoda.ModelSpec(layers=[layer()])
    options: dict[str, Any] = {"device": "cpu", "device_memory": "256KiB", "host_memory": 0}
    options |= {"disk": tmp_path / "disk", "disk_memory": "4MiB"}
    with pagoda.Cache(spec, page_size=16, threads=1, **options) as cache:
        mirror = Mirror(cache)
        resting = [mirror.create() for _ in range(125)]
        for tokens in resting:
            mirror.step([tokens], [17])
        cache._spill.settle()
        (free,) = settled(cache).device
        assert free.free < 4, "less than a 32nd: all but the open page of each is on disk"
        plans = counted_plans(cache, monkeypatch)
        busy = mirror.create()
        for _ in range(40):
            mirror.step([busy], [1])
        assert len(plans) < 1000, "a look at all of them is 250 plans, and there were 40 steps"


@pytest.mark.parametrize("on_disk", [False, True])
def test_making_room_looks_at_what_moves_and_not_at_all_that_rest(
    on_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hundreds of sequences have left the device: a growing batch makes no plans for them.

    With a device that has no ring, nothing goes to disk by itself.
    """
    spec = pagoda.ModelSpec(layers=[layer()])
    disk: dict[str, Any] = {"device": "cpu", "disk": tmp_path / "disk", "disk_memory": "16MiB"} if on_disk else {}
    memory: dict[str, Any] = {
        "device_memory": "512KiB" if on_disk else "128KiB",
        "host_memory": 0 if on_disk else "4MiB",
    }
    with pagoda.Cache(spec, page_size=16, threads=1, **memory, **disk) as cache:
        mirror = Mirror(cache)
        resting = [cache.create() for _ in range(300)]
        rows = np.zeros((16, 2, 16), np.float16)
        for sequence in resting:
            with cache.step([sequence], [16]) as step:
                step.append(0, rows, rows)
        busy = mirror.create()
        mirror.step([busy], [3900 if on_disk else 1000])
        plans = counted_plans(cache, monkeypatch)
        for _ in range(20):
            mirror.step([busy], [32])
        assert 0 < len(plans) < 100, "40 pages had to leave"


@pytest.mark.usefixtures("names_the_cpu")
def test_what_a_batch_has_on_disk_is_not_looked_for_sequence_by_sequence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of many sequences has more on disk than fits in memory, and the batch changes at every step."""
    spec = pagoda.ModelSpec(layers=[layer(), layer(window=40)])
    options: dict[str, Any] = {"device": "cpu", "device_memory": "256KiB", "host_memory": 0}
    options |= {"disk": tmp_path / "disk", "disk_memory": "16MiB"}
    with pagoda.Cache(spec, page_size=16, threads=1, **options) as cache:
        mirror = Mirror(cache)
        few = [mirror.create() for _ in range(40)]
        mirror.step(few, [3] * 40)
        long = mirror.create()
        for _ in range(30):
            mirror.step([long], [64])
        cache._spill.settle()
        assert settled(cache).disk[0].used > 40
        plans = counted_plans(cache, monkeypatch)
        for start in range(5):
            mirror.step([long, *few[start : start + 30]], [1] * 31)
        assert 0 < len(plans) < 300, "31 sequences of two groups are 62 plans, a few times each step"


@pytest.mark.usefixtures("names_the_cpu")
def test_pages_that_move_or_stay_are_counted_without_a_list_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step over sequences that were resting asks how much of them is left on disk, which may be nearly all."""
    spec = pagoda.ModelSpec(layers=[layer()])
    options: dict[str, Any] = {"device": "cpu", "device_memory": "32KiB", "host_memory": "32KiB"}
    options |= {"disk": tmp_path / "disk", "disk_memory": "4MiB"}
    with pagoda.Cache(spec, page_size=16, threads=1, **options) as cache:
        mirror = Mirror(cache)
        pair = [mirror.create() for _ in range(2)]
        for tokens in pair:
            for _ in range(10):
                mirror.step([tokens], [64])
        cache._spill.settle()
        moved: list[int] = []

        class Counted:
            def __init__(self, plan: Any) -> None:
                self.plan = plan

            @property
            def bytes(self) -> int:
                return int(self.plan.bytes)

            def __len__(self) -> int:
                moved.append(len(self.plan))
                return moved[-1]

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(cache._core, name)

            def plan(self, *given: Any, **options: Any) -> Counted:
                return Counted(cache._core.plan(*given, **options))

            def execute(self, plan: Counted) -> Any:
                return cache._core.execute(plan.plan)

        monkeypatch.setattr(cache._spill, "_core", Counting())
        for tokens in pair * 2:
            mirror.step([tokens], [1])
        assert sum(moved) > 0


def test_memory_follows_the_context() -> None:
    """Arenas are reserved at once, but memory is touched only as it is used, and given back."""
    spec = pagoda.ModelSpec(layers=[layer(num_q_heads=8, num_kv_heads=8, head_dim=128)] * 4)
    process = psutil.Process()
    with pagoda.Cache(spec, device="cpu", device_memory="1GiB", host_memory="8GiB", threads=1) as cache:
        empty = process.memory_info().rss
        sequence = cache.create()
        rows = np.ones((1024, 8, 128), np.float32)
        for _ in range(8):
            with cache.step([sequence], [1024]) as step:
                for index in range(4):
                    step.append(index, rows, rows)
        held = 8192 * 4 * 2 * 8 * 128 * 2
        grown = process.memory_info().rss - empty
        assert 0.9 * held < grown < 1.6 * held + (16 << 20)
        sequence.truncate(1024)
        assert process.memory_info().rss - empty < 0.5 * grown
        sequence.release()
        assert process.memory_info().rss - empty < 0.25 * grown


def test_a_step_that_could_never_be_served_moves_no_page(tmp_path: Path) -> None:
    memory: dict[str, Any] = {
        "device_memory": "64KiB",
        "host_memory": "16KiB",
        "disk": tmp_path / "pages",
        "disk_memory": "4MiB",
    }
    with pagoda.Cache(pagoda.ModelSpec(layers=[layer()]), page_size=16, threads=1, **memory) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [300])
        before = [cache.stats().used_bytes(tier) for tier in ("device", "host", "disk")]
        with pytest.raises(pagoda.OutOfBlocks), cache.step([cache.create()], [10_000]):
            pass
        assert [cache.stats().used_bytes(tier) for tier in ("device", "host", "disk")] == before


def test_a_cache_that_nobody_holds_gives_its_memory_back() -> None:
    """No reference cycle keeps it alive until garbage collection."""
    gone = weakref.ref(cache := pagoda.Cache(SPEC, threads=1))
    sequence = cache.create()
    with cache.step([sequence], [0]):
        pass
    cache.demote(sequence).wait()
    gc.disable()
    try:
        del cache, sequence
        assert gone() is None
    finally:
        gc.enable()
