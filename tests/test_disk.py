"""The disk tier: pages that leave memory, come back, and never change."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import pytest
from interrupts import alarms
from mirror import Mirror, Tokens, layer, nameless, settled
from pagoda import placement
from pagoda.report import StepReport

SPEC = pagoda.ModelSpec(layers=[layer(), layer(), layer(window=40)])
OPTIONS: dict[str, Any] = {"device_memory": "256KiB", "threads": 2, "headroom": 1000}


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    with opened(tmp_path) as cache:
        yield Mirror(cache)


def opened(path: Path, **changes: Any) -> pagoda.Cache:
    disk: dict[str, Any] = {"host_memory": "256KiB", "disk": path / "pages", "disk_memory": "32MiB"}
    return pagoda.Cache(changes.pop("spec", SPEC), page_size=16, **(OPTIONS | disk | changes))


def test_pages_go_down_three_tiers_and_come_back_unchanged(mirror: Mirror, tmp_path: Path) -> None:
    tokens, cache = mirror.create(), mirror.cache
    mirror.step([tokens], [320])
    assert cache.demote(tokens.sequence, (0, 160)).wait(60)
    plan = cache.plan(tokens.sequence, "disk", (0, 240))
    assert {copy[2:4] for copy in plan.copies} == {("host", "disk"), ("device", "disk")}
    assert cache.execute(plan).wait(60)
    stats = cache.stats()
    assert stats.used_bytes("disk") == plan.bytes
    assert stats.used_bytes("host") == 0
    assert stats.disk_io is not None
    assert stats.disk_io.bytes_written >= plan.bytes
    assert list((tmp_path / "pages").iterdir()) == [], "the file has no name"
    assert cache.promote(tokens.sequence, (0, 100), to="host").wait(60)
    assert cache.promote(tokens.sequence).wait(60)
    stats = cache.stats()
    assert stats.used_bytes("disk") == stats.used_bytes("host") == 0
    assert stats.moved_bytes["disk", "host"] > 0
    assert stats.moved_bytes["disk", "device"] > 0
    assert stats.moved_bytes["host", "disk"] + stats.moved_bytes["device", "disk"] == plan.bytes
    mirror.look()


def test_layers_of_any_group_and_window_read_their_own_pages(tmp_path: Path) -> None:
    """Similar layers read the same pages; another group has other pages, and layers with windows see fewer."""
    reader = layer(kv_owner=0, window=40)
    spec = pagoda.ModelSpec([layer(), layer(num_kv_heads=4), reader, layer(), layer(num_kv_heads=4), reader])
    with opened(tmp_path, spec=spec, spill=False) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens, other], [160, 50])
        assert cache.demote(tokens.sequence, (0, 96), to="disk").wait(60)
        assert cache.execute(cache.plan(other.sequence, "disk", (0, 32), layers=[1, 4])).wait(60)
        mirror.look()
        assert mirror.last is not None
        if cache._device is None:  # A device also reads ahead for the next step.
            assert mirror.last.report.bytes["disk"] == 4096 * (2 * 6 + 2 * (6 + 2)), "no window reaches so far back"


def test_tables_have_no_address_of_a_page_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path, spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [80])
        assert cache.demote(tokens.sequence, (0, 32), to="disk").wait(60)
        assert cache.demote(tokens.sequence, (32, 48)).wait(60)
        with cache.step([tokens.sequence], [0]) as step:
            table = step.table(0)
            assert (table.block_table[0] >= 0).tolist() == [False] * 3 + [True] * 2
            assert (table.pointers[0] != 0).tolist() == [False] * 2 + [True] * 3


def test_demote_moves_down_and_promote_up_and_nothing_else(mirror: Mirror) -> None:
    """The sequence lies on three tiers: 4 pages of each group on disk, 6 on the host, 10 on the device."""
    tokens, cache = mirror.create(), mirror.cache
    mirror.step([tokens], [320])
    sequence = tokens.sequence
    assert cache.demote(sequence, (0, 160)).wait(60)
    assert cache.demote(sequence, (0, 64), to="disk").wait(60)

    def ways(ticket: pagoda.Ticket) -> dict[tuple[str, str], int]:
        assert ticket.wait(60)
        copies = [copy[2:4] for copy in ticket.plan.copies]
        return {way: copies.count(way) // len(cache.stats().block_bytes) for way in set(copies)}

    assert ways(cache.promote(sequence, (0, 32), to="host")) == {("disk", "host"): 2}
    assert ways(cache.promote(sequence, to="host")) == {("disk", "host"): 2}, "those on the device stay there"
    assert ways(cache.demote(sequence, (0, 64), to="disk")) == {("host", "disk"): 4}
    assert ways(cache.demote(sequence, (0, 240))) == {("device", "host"): 5}, "those on disk stay there"
    assert ways(cache.promote(sequence)) == {("disk", "device"): 4, ("host", "device"): 11}
    assert ways(cache.demote(sequence, to="disk")) == {("device", "disk"): 20}
    mirror.look()
    for move, to in ((cache.demote, "device"), (cache.promote, "disk")):
        with pytest.raises(pagoda.InvalidArgument, match=f"to = '{to}': one of"):
            move(sequence, to=to)


def test_a_step_brings_in_what_it_needs(mirror: Mirror) -> None:
    one, other = mirror.create(), mirror.create()
    cache = mirror.cache
    mirror.step([one, other], [300, 200])
    assert cache.demote(one.sequence, to="disk").wait(60)
    mirror.step([other], [5])
    assert cache.plan(one.sequence, "host").bytes > 0, "a step of others leaves it there"
    mirror.step([one], [3])
    assert cache.stats().moved_bytes["disk", "host"] > 0
    assert all(copy[2] != "disk" for copy in cache.plan(one.sequence, "device").copies)


def test_a_tail_on_disk_is_copied_from_there(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [64])
    assert mirror.cache.demote(tokens.sequence, to="disk").wait(60)
    mirror.truncate(tokens, 40)
    mirror.step([tokens], [20])
    mirror.look()


def test_sequences_that_rest_go_to_disk_and_more_than_memory_holds_is_kept(mirror: Mirror) -> None:
    cache = mirror.cache
    sessions = [mirror.create() for _ in range(8)]
    for _ in range(4):
        for tokens in sessions:
            mirror.step([tokens], [70])
    stats = cache.stats()
    assert sum(map(stats.used_bytes, ("device", "host", "disk"))) > 800 << 10, "memory has 512 KiB in all"
    assert stats.moved_bytes["host", "disk"] > 0
    assert stats.moved_bytes["disk", "host"] > 0
    cache.audit()


def test_a_page_is_written_once(mirror: Mirror) -> None:
    sessions = [mirror.create() for _ in range(8)]
    for turn in range(4):
        for tokens in sessions:
            mirror.step([tokens], [0 if turn else 250])
    stats = mirror.cache.stats()
    assert stats.disk_io is not None
    pages, stored = 8 * 15, 3 * 4096 + 2 * 4096
    assert stats.disk_io.bytes_written <= pages * stored
    assert stats.disk_io.bytes_read > pages * stored, "they come and go"


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize(("device_memory", "host_memory"), [("128KiB", 0), ("64KiB", "64KiB")])
def test_a_change_of_sequence_writes_nothing_that_the_disk_has(
    tmp_path: Path, device_memory: str, host_memory: int | str
) -> None:
    """Three sequences in turn, more than memory holds, with as many blocks on disk as pages."""
    options: dict[str, Any] = {"spec": pagoda.ModelSpec(layers=[layer()]), "device": "cpu"}
    options |= {"device_memory": device_memory, "host_memory": host_memory, "disk_memory": 120 * 2 * 4096}
    with opened(tmp_path, **options) as cache:
        assert cache.stats().disk[0].free == 120
        mirror = Mirror(cache)
        sessions = [mirror.create() for _ in range(3)]
        for tokens in sessions:
            for _ in range(5):
                mirror.step([tokens], [128])
        written = []
        for _ in range(4):
            for tokens in sessions:
                mirror.step([tokens], [0])
                cache._spill.settle()
            stats = cache.stats()
            assert stats.disk_io is not None
            written.append(stats.disk_io.bytes_written // (2 * 4096))
        assert len(set(written[1:])) == 1
        assert written[-1] <= 120


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize(("without", "writes"), [(None, 0), (5, 0), (0, 10)])
def test_pages_leave_for_a_full_disk_that_has_them(tmp_path: Path, without: int | None, writes: int) -> None:
    """No other sequence's copies could be dropped. If the first page to leave has none, its own sequence's make room."""
    options: dict[str, Any] = {"spec": pagoda.ModelSpec(layers=[layer()]), "device": "cpu"}
    options |= {"device_memory": "64KiB", "host_memory": 0, "disk_memory": "256KiB"}
    with opened(tmp_path, **options) as cache:
        mirror = Mirror(cache)
        away, tokens = mirror.create(), mirror.create()
        for _ in range(cache.stats().disk[0].free - (10 if without is None else 9)):
            mirror.step([away], [16])
        assert cache.demote(away.sequence, to="disk").wait(60)
        mirror.step([tokens], [160])
        for page in range(10):
            if page != without:
                there = cache.plan(tokens.sequence, "disk", (16 * page, 16 * page + 16), keep=True)
                assert cache.execute(there).wait(60)
        stats = settled(cache)
        assert stats.disk[0].free == 0
        mirror.step([mirror.create()], [16 * (stats.device[0].free + 1)])
        moved = settled(cache).moved_bytes["device", "disk"] - stats.moved_bytes["device", "disk"]
        assert moved <= writes * stats.block_bytes[0]
        mirror.look()


def test_copies_that_memory_has_make_room_on_a_full_disk(tmp_path: Path) -> None:
    options = OPTIONS | {"host_memory": "256KiB", "disk": tmp_path / "pages", "disk_memory": "1280KiB"}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(3))
        sessions = [mirror.create() for _ in range(8)]
        for turn in range(5):
            for tokens in sessions:
                mirror.step([tokens], [0 if turn > 1 else 120])
        assert max(counts.free for counts in cache.stats().disk) < 8, "full of pages, some of them in memory as well"


def spoil(directory: Path, tokens: Tokens, token: int) -> None:
    """Changes a token's K on disk, in the second layer."""
    row = tokens.k[1][token].astype(np.float16)[0].tobytes()
    with nameless(directory).open("r+b") as pages:
        pages.seek(pages.read().index(row))
        pages.write(b"\x00\x00")


def test_pages_that_are_on_a_full_disk_are_not_written_again_to_go_there(tmp_path: Path) -> None:
    """Copies of other sequences make room for pages that are not on disk yet, and if there are none, the sequence's own."""
    with opened(tmp_path, spec=pagoda.ModelSpec(layers=[layer()]), disk_memory="256KiB", spill=False) as cache:
        room, mirror = cache.stats().disk[0].free, Mirror(cache)
        tokens, others = mirror.create(), mirror.create()
        mirror.step([tokens, others], [160, 16 * (room - 10)])
        for sequence in (tokens.sequence, others.sequence):
            assert cache.execute(cache.plan(sequence, "disk", keep=True)).wait(60)
        mirror.step([tokens], [64])
        before = settled(cache)
        assert before.disk[0].free == 0
        assert cache.demote(tokens.sequence, to="disk").wait(60)
        moved = settled(cache).moved_bytes["device", "disk"] - before.moved_bytes["device", "disk"]
        assert moved == 4 * before.block_bytes[0]
        mirror.look()
        mirror.release(others)
        more = mirror.create()
        mirror.step([more], [16 * (room - 14)])
        settled(cache)
        assert cache.execute(cache.plan(more.sequence, "disk", (16, 16 * (room - 14)), keep=True)).wait(60)
        mirror.step([tokens], [32])
        assert cache.demote(tokens.sequence, to="disk").wait(60)
        assert cache.demote(more.sequence, (0, 16), to="disk").wait(60)
        mirror.look()


def test_an_error_names_the_sequences_that_hold_the_page(mirror: Mirror, tmp_path: Path) -> None:
    cache, others, tokens = mirror.cache, [mirror.create(), mirror.create()], mirror.create()
    mirror.step([*others, tokens], [160, 60, 160])
    for each in (*others, tokens):
        assert cache.demote(each.sequence, to="disk").wait(60)
    twin = mirror.fork(tokens)
    spoil(tmp_path / "pages", tokens, 159)
    with pytest.raises(pagoda.CorruptPage) as raised:
        mirror.step([*others, tokens], [0, 0, 1])
    assert sorted(raised.value.sequences) == sorted([tokens.sequence.id, twin.sequence.id])
    ticket = cache.promote(twin.sequence)
    with pytest.raises(pagoda.CorruptPage) as raised:
        ticket.wait(60)
    assert sorted(raised.value.sequences) == sorted([tokens.sequence.id, twin.sequence.id])
    mirror.release(tokens)
    mirror.release(twin)
    mirror.step(others, [1, 1])
    mirror.look()


def test_an_error_of_a_copy_that_is_waited_for_names_the_sequences_that_hold_the_page(
    mirror: Mirror, tmp_path: Path
) -> None:
    """For an open page that a step copies from disk, and for one that cannot be saved."""
    cache, other, tokens = mirror.cache, mirror.create(), mirror.create()
    mirror.step([other, tokens], [40, 64])
    assert cache.demote(tokens.sequence, to="disk").wait(60)
    mirror.truncate(tokens, 40)
    twin = mirror.fork(tokens)
    spoil(tmp_path / "pages", tokens, 39)
    before = settled(cache).device
    with pytest.raises(pagoda.CorruptPage) as raised:
        mirror.step([other, tokens], [1, 1])
    assert cache.stats().device == before or cache._device is not None, "a device has yet to end the step"
    assert sorted(raised.value.sequences) == sorted([tokens.sequence.id, twin.sequence.id])
    mirror.step([other], [1])
    page = 2 * 4096
    options = OPTIONS | {"disk": tmp_path / "kept", "disk_memory": "1MiB", "resume": True}
    with pagoda.Cache(pagoda.ModelSpec(layers=[layer()]), page_size=16, **options, disk_writes_per_day=page) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [20])
        twin = mirror.fork(tokens)
        with pytest.raises(pagoda.TierIOError, match="disk_writes_per_day") as failed:
            cache.save(tokens.sequence, "it")
        assert sorted(failed.value.sequences) == sorted([tokens.sequence.id, twin.sequence.id])
        cache.audit()


def test_a_page_that_was_spoilt_is_an_error_and_no_data(mirror: Mirror, tmp_path: Path) -> None:
    tokens, other, cache = mirror.create(), mirror.create(), mirror.cache
    mirror.step([tokens, other], [160, 160])
    assert cache.demote(tokens.sequence, to="disk").wait(60)
    assert cache.demote(other.sequence, to="disk").wait(60)
    with nameless(tmp_path / "pages").open("r+b") as pages:
        # A bit of the first layer of the first page, after the headers of its segment.
        data = np.frombuffer(pages.read(), np.uint8)
        starts = range(0, len(data), 4096)
        at = next(at for at in starts if data[at] and data[at : at + 8].tobytes() != b"PAGODAPG")
        pages.seek(at)
        pages.write(bytes([data[at] ^ 16]))
    with pytest.raises(pagoda.CorruptPage, match=r"block 0 of layer group 0: layer 0 of the group does not verify"):
        mirror.step([tokens], [1])
    with pytest.raises(pagoda.CorruptPage):
        cache.promote(tokens.sequence).wait(60)
    assert cache.stats().disk_io.corrupt == 2  # type: ignore[union-attr]
    mirror.step([other], [4])
    mirror.release(tokens)
    mirror.look()


def test_pages_that_others_hold_stay_in_memory(mirror: Mirror) -> None:
    cache, prompt = mirror.cache, mirror.create()
    mirror.step([prompt], [160])
    resting = [mirror.fork(prompt) for _ in range(6)]
    for tokens in resting:
        mirror.step([tokens], [200])
    shared = cache.plan(prompt.sequence, "disk", (0, 160))
    assert {copy[2] for copy in shared.copies} <= {"device", "host"}
    assert cache.stats().used_bytes("disk") > 0


def test_a_batch_that_memory_cannot_hold_is_read_from_disk_at_every_step(mirror: Mirror) -> None:
    sessions, cache = [mirror.create() for _ in range(8)], mirror.cache
    for tokens in sessions:
        mirror.step([tokens], [450])
    stats = [cache.stats()]
    new = [1, 0, 3, 1, 20, 1, 0, 1]
    for _ in range(3):
        mirror.step(sessions, new)
        assert mirror.last is not None
        # Pages that do not fit in memory; in the file each of their layers has 4 KiB, twice its bytes. Moves under way also
        # hold memory.
        rows = sum(len(tokens.sequence) for tokens, more in zip(sessions, new, strict=True) if more)
        rows_bytes = rows * stats[0].block_bytes[0] // 16
        assert mirror.last.report.bytes["disk"] >= 2 * (rows_bytes - (512 << 10)) > 200 << 10
        stats.append(cache.stats())
    before, first, *_, after = stats
    assert before.disk_io is not None
    assert after.disk_io is not None
    # Counted over all steps, since a step's pages may have been read during the previous one.
    assert after.disk_io.bytes_read - before.disk_io.bytes_read > 3 * 200 << 10
    assert after.moved_bytes["disk", "host"] == first.moved_bytes["disk", "host"], "no page moves to and fro"
    cache.audit()


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_sequence_longer_than_memory(tmp_path: Path, deterministic: bool) -> None:
    """Prefill in chunks, then decode, over three tiers. In deterministic mode the bits are those of a cache in memory."""
    heads: dict[str, Any] = {"num_kv_heads": 1, "num_q_heads": 2, "head_dim": 32}
    spec = pagoda.ModelSpec(layers=[layer(**heads), layer(**heads), layer(window=300, **heads)])
    options: dict[str, Any] = {"device": "cpu", "deterministic": deterministic}
    disk: dict[str, Any] = {"disk": tmp_path / "pages", "disk_memory": "32MiB"}
    small = pagoda.Cache(spec, page_size=16, device_memory="384KiB", host_memory="128KiB", threads=2, **options, **disk)
    large = pagoda.Cache(spec, page_size=16, device_memory="16MiB", threads=1, **options)
    with small, large:
        mirror, whole = (Mirror(cache, np.random.default_rng(5)) for cache in (small, large))
        outputs = []
        for one in (mirror, whole):
            tokens = one.create()
            outputs.append([one.step([tokens], [new]) for new in [500] * 10 + [1, 1, 300, 1]])
        stats = small.stats()
        assert stats.used_bytes("disk") > stats.used_bytes("host") + stats.used_bytes("device")
        assert stats.moved_bytes["disk", "host"] == stats.moved_bytes["disk", "device"] == 0
        if deterministic:
            for streamed, resident in zip(*outputs, strict=True):
                for layer_streamed, layer_resident in zip(streamed, resident, strict=True):
                    np.testing.assert_array_equal(layer_streamed, layer_resident)


@pytest.mark.usefixtures("names_the_cpu")
def test_a_step_reports_what_it_read(tmp_path: Path) -> None:
    """For a device see tests/test_device_disk.py."""
    cache = opened(tmp_path, device="cpu")
    mirror = Mirror(cache)
    tokens = mirror.create()
    mirror.step([tokens], [320])
    rows = [np.zeros((1, shape, 16), np.float32) for shape in (2, 2, 4)]
    for on_disk in (0, 192):
        cache.demote(tokens.sequence, (0, on_disk), to="disk").wait(60)
        before = time.perf_counter()
        with cache.step([tokens.sequence], [1]) as step:
            for index in range(3):
                step.forward(index, rows[2], rows[0], rows[1])
            inside = step.report
            step.commit(accepted=[0])
        after = time.perf_counter()
        report = step.report
        assert report.bytes == inside.bytes
        assert after - before >= report.seconds >= inside.seconds >= report.waited
        assert step.report == report, "time goes on, the step does not"
        # The window of 40 has no page on disk. 16 tokens of 2 heads of K and V in f16 are 2 KiB, stored as 4.
        assert report.bytes == {"memory": (321 + 321 + 40) * 2 * 2 * 32, "disk": 2 * on_disk // 16 * 4096}
        assert report.fractions({"disk": 1e9, "pcie": 1.0}) == {"disk": report.bytes["disk"] / 1e9 / report.seconds}
    cache.close()


@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_sequences_begin_with_is_read_from_disk_once(tmp_path: Path, deterministic: bool) -> None:
    """Forks that leave each other in different runs of 4,096 tokens, among sequences that share nothing with them."""
    spec = pagoda.ModelSpec([layer(num_q_heads=2, num_kv_heads=1)] * 2)
    options: dict[str, Any] = {"device": "cpu", "device_memory": "4MiB", "spill": False}
    with opened(tmp_path, spec=spec, deterministic=deterministic, **options) as cache:
        mirror = Mirror(cache)
        root, other, short = (mirror.create() for _ in range(3))
        for tokens, count in ((root, 9000), (other, 4200)):
            with cache.step([tokens.sequence], [count]) as step:
                for index in range(2):
                    k, v = mirror.rng.standard_normal((2, count, 1, 16)).astype(np.float16)
                    step.append(index, k, v)
                    tokens.k[index], tokens.v[index] = k, v
        early = mirror.fork(root)
        mirror.truncate(early, 6000)
        mirror.step([early, short], [40, 30])
        for tokens in (root, early, other):
            cache.demote(tokens.sequence, to="disk").wait(60)
        batch = [root, other, early, short, mirror.fork(root), mirror.fork(early)]
        # The second run of those two is other pages than that of the longer ones, although it begins with the same.
        pages = 9000 // 16 + 4200 // 16 + 6040 // 16 - 4096 // 16
        for new in ([1, 1, 1, 1, 1, 1], [2, 30, 5, 1, 20, 3], [0, 1, 1, 0, 1, 0]):
            mirror.step(batch, new, accepted=[0] * 6)
            assert mirror.last is not None
            assert mirror.last.report.bytes["disk"] == 2 * 4096 * pages


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "1", None])
def test_fractions_are_of_rates_above_0(rate: Any) -> None:
    report = StepReport(2.0, 0.0, {"disk": 3, "memory": 5})
    with pytest.raises(pagoda.InvalidArgument, match="bytes a second above 0, by link"):
        report.fractions({"memory": 1.0, "disk": rate})
    assert report.fractions({"disk": 0.5}) == {"disk": 3.0}


@pytest.mark.usefixtures("names_the_cpu")
def test_interrupts_while_pages_are_read_lose_nothing(tmp_path: Path) -> None:
    """Ctrl-C at any moment of a step over pages on disk: it is as if the step had not begun."""
    spec = pagoda.ModelSpec(layers=[layer(num_kv_heads=4, num_q_heads=4, head_dim=128)] * 2)
    options: dict[str, Any] = {"device": "cpu", "device_memory": "48MiB", "host_memory": 0, "disk_memory": "128MiB"}
    rows = np.ones((16384, 4, 128), np.float32)

    def look(cache: pagoda.Cache, sequence: pagoda.Sequence) -> None:
        with cache.step([sequence], [1]) as step:
            for index in range(2):
                out = step.forward(index, rows[:1], rows[:1], rows[:1])
                np.testing.assert_allclose(out, rows[:1], rtol=1e-5)
            step.commit(accepted=[0])

    with pagoda.Cache(spec, disk=tmp_path / "pages", **options) as cache:
        sequence = cache.create()
        for _ in range(16):
            with cache.step([sequence], [1024]) as step:
                for index in range(2):
                    step.append(index, rows[:1024], rows[:1024])
        look(cache, sequence)
        interrupted = 0
        with alarms() as alarm:
            for milliseconds in range(1, 60, 2):
                try:
                    alarm(milliseconds / 1000)
                    for _ in range(100):
                        look(cache, sequence)
                    alarm(0)
                except KeyboardInterrupt:
                    interrupted += 1
                cache.audit()
                assert len(sequence) == 16384
        # A handler that calls the same cache gets an answer or an error, and never blocks.
        with alarms(lambda *_: cache.stats()) as alarm:
            for milliseconds in range(1, 60, 2):
                alarm(milliseconds / 1000)
                try:
                    look(cache, sequence)
                except pagoda.InvalidArgument as error:
                    assert "this signal or finaliser has interrupted" in str(error)
        assert interrupted == 30
        look(cache, sequence)


def test_without_spilling_nothing_moves_by_itself(tmp_path: Path) -> None:
    options = OPTIONS | {"host_memory": "256KiB", "disk": tmp_path, "disk_memory": "32MiB", "spill": False}
    tmp_path.chmod(0o700)
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        tokens = mirror.create()
        mirror.step([tokens], [100])
        plan = cache.plan(tokens.sequence, "disk")
        assert cache.execute(plan).wait(60)
        before = settled(cache)
        mirror.step([tokens], [0])
        mirror.step([tokens], [1])
        assert settled(cache).moved_bytes == before.moved_bytes
        assert cache.promote(tokens.sequence, to="host").wait(60)
        mirror.step([tokens], [1])


@pytest.mark.usefixtures("names_the_cpu")
def test_a_batch_in_another_order_is_no_other_batch(tmp_path: Path) -> None:
    """Pages on disk come in when another sequence joins, not whenever the order of the batch changes."""
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        one, other, third = (mirror.create() for _ in range(3))
        mirror.step([one, other], [100, 100])
        for tokens in (one, other):
            assert cache.demote(tokens.sequence, to="disk").wait(60)
        before = settled(cache).moved_bytes
        mirror.step([other, one], [1, 1])
        assert settled(cache).moved_bytes == before
        mirror.step([third], [1])
        mirror.step([one, other], [1, 1])
        assert settled(cache).moved_bytes["disk", "host"] > before["disk", "host"]


@pytest.mark.usefixtures("names_the_cpu")
def test_room_that_others_leave_is_used_by_a_batch_that_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens, rests = mirror.create(), mirror.create()
        mirror.step([tokens], [100])
        assert cache.demote(tokens.sequence, to="disk").wait(60)
        cache._spill.may_bring_in(np.array([tokens.sequence.id], np.uint64))
        before = settled(cache).moved_bytes
        mirror.step([tokens], [1])
        assert settled(cache).moved_bytes == before
        mirror.release(rests)
        mirror.step([tokens], [1])
        assert settled(cache).moved_bytes["disk", "host"] > before["disk", "host"]


def test_pages_that_change_under_the_ring_are_read_again(mirror: Mirror) -> None:
    """Data read ahead for a step that never came is not used for pages written to the same blocks since."""
    for turn in range(6):
        tokens, cache = mirror.create(), mirror.cache
        mirror.step([tokens], [170 + turn])
        assert cache.demote(tokens.sequence, to="disk").wait(60)
        cache._spill.may_bring_in(np.array([tokens.sequence.id], np.uint64))
        mirror.step([tokens], [1])
        mirror.release(tokens)
    assert mirror.cache.stats().moved_bytes["disk", "host"] == 0
    assert mirror.cache.stats().disk_io.bytes_read > 0  # type: ignore[union-attr]


def test_a_cache_without_a_host_tier_spills_to_disk(tmp_path: Path) -> None:
    options = OPTIONS | {"host_memory": 0, "disk": tmp_path / "pages", "disk_memory": "32MiB"}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        sessions = [mirror.create() for _ in range(4)]
        for _ in range(3):
            for tokens in sessions:
                mirror.step([tokens], [100])
        stats = cache.stats()
        assert stats.moved_bytes["device", "disk"] > 0
        assert stats.moved_bytes["disk", "device"] > 0
        assert stats.used_bytes("disk") > 128 << 10


def test_who_holds_a_ticket_that_failed_is_told_whenever_they_ask(tmp_path: Path) -> None:
    """Also inside a step, which may be another thread's. If nobody holds the ticket, the next step raises the error, once."""
    with opened(tmp_path, spill=False, disk_writes_per_day="20KiB") as cache:
        mirror = Mirror(cache)
        tokens, forgotten, other = (mirror.create() for _ in range(3))
        mirror.step([tokens, forgotten], [160, 160])
        with cache.step([other.sequence], [0]):
            ticket, dropped = (cache.demote(one.sequence, to="disk") for one in (tokens, forgotten))
            asked = (ticket.wait, ticket.done) * 2
            for ask in asked:
                with pytest.raises(pagoda.TierIOError, match=r"failed after \d of 20 copies") as error:
                    ask()
                assert error.value.sequences == (tokens.sequence.id,)
            assert cache._core.wait(dropped._core, 60)
            del dropped
            with pytest.raises(pagoda.InvalidArgument, match="one open step"):
                cache.step([tokens.sequence], [0]).__enter__()
        with pytest.raises(pagoda.TierIOError, match="failed after") as error:
            cache.step([tokens.sequence], [0]).__enter__()
        assert error.value.sequences == (forgotten.sequence.id,)
        mirror.look()
        for ask in asked:
            with pytest.raises(pagoda.TierIOError, match=r"failed after \d of 20 copies"):
                ask()
        mirror.look()


def test_no_more_is_written_a_day_than_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk: dict[str, Any] = {"disk": tmp_path / "pages", "disk_memory": "32MiB", "disk_writes_per_day": "100KiB"}
    with pagoda.Cache(SPEC, page_size=16, **OPTIONS, host_memory="64KiB", **disk) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        tokens = mirror.create()
        mirror.step([tokens], [320])
        ticket = cache.demote(tokens.sequence, to="disk")
        with pytest.raises(pagoda.TierIOError, match=r"disk = .*pages: .* disk_writes_per_day = 102400 a day"):
            ticket.wait(60)
        mirror.look()
        others = [mirror.create() for _ in range(3)]
        with pytest.raises(pagoda.OutOfBlocks):
            for tokens in others:
                mirror.step([tokens], [320])
        assert "stay in memory" in caplog.text
        stats = cache.stats()
        assert stats.disk_io is not None
        assert stats.disk_io.bytes_written <= 100 << 10
        cache.audit()


@pytest.mark.usefixtures("names_the_cpu")
def test_after_a_write_that_failed_none_is_tried_for_some_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After them writes are tried again."""
    monkeypatch.setattr(placement, "PAUSE_STEPS", 3)
    disk: dict[str, Any] = {"disk": tmp_path / "pages", "disk_memory": "32MiB", "disk_writes_per_day": 1}
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, **OPTIONS, host_memory=0, **disk) as cache:
        sequence, begun = cache.create(), []
        start = placement.Spill._start

        def started(*given: Any) -> int:
            begun.append(len(sequence))
            return start(*given)

        monkeypatch.setattr(placement.Spill, "_start", started)
        for tokens in [2016, *[1] * 32]:
            with cache.step([sequence], [tokens]) as step:
                step.append(0, *[np.ones((tokens, 2, 16), np.float16)] * 2)
            for ticket in cache._core.under_way(sequence.id):
                assert cache._core.wait(ticket, 60)
        assert caplog.text.count("stay in memory") > 3
        assert len(begun) > 3
        assert np.diff(begun).min() > 3


@pytest.mark.usefixtures("names_the_cpu")
def test_a_drive_that_is_full_keeps_pages_where_they_are(tmp_path: Path) -> None:
    """Simulated by a limit on file size, since the test has no drive of its own."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np, pagoda, pytest
from mirror import Mirror, layer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spec = pagoda.ModelSpec(layers=[layer()])
options = dict(device="cpu", device_memory="1MiB", host_memory="1MiB", threads=1)
with pagoda.Cache(spec, page_size=16, disk={str(tmp_path / "pages")!r}, disk_memory="32MiB", **options) as cache:
    mirror = Mirror(cache, np.random.default_rng(1))
    tokens = mirror.create()
    mirror.step([tokens], [1600])
    resource.setrlimit(resource.RLIMIT_FSIZE, (49 * 4096, resource.RLIM_INFINITY))
    with pytest.raises(pagoda.TierIOError, match=r"disk = .*: writing pages: File too large .os error 27."):
        cache.demote(tokens.sequence, to="disk").wait(60)
    mirror.look()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert cache.demote(tokens.sequence, to="disk").wait(60)
    mirror.look()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"disk": "x"}, pagoda.InvalidArgument, "disk_memory = 0"),
        ({"disk_memory": "1GiB"}, pagoda.InvalidArgument, "disk_memory = '1GiB': nothing without disk="),
        ({"disk_writes_per_day": 1}, pagoda.InvalidArgument, "disk_writes_per_day = 1"),
        ({"disk": "x", "disk_memory": 100}, pagoda.InvalidArgument, "disk_memory = 100: at least"),
        ({"disk": "x", "disk_memory": -1}, pagoda.InvalidArgument, "disk_memory"),
        ({"disk": "x", "disk_memory": "1GiB", "disk_timeout": 0}, pagoda.InvalidArgument, "disk_timeout = 0: seconds"),
        ({"disk": "no/such/place", "disk_memory": "1GiB"}, pagoda.TierIOError, "No such file"),
        ({"disk": "file", "disk_memory": "1GiB"}, pagoda.TierIOError, "disk = .*file: opening the directory: Not a"),
        ({"disk": "link", "disk_memory": "1GiB"}, pagoda.TierIOError, "disk = .*link: .* a link: give the dir"),
        ({"disk": "shared", "disk_memory": "1GiB"}, pagoda.TierIOError, "mode 777"),
        ({"disk": "a\0b", "disk_memory": "1GiB"}, pagoda.TierIOError, "disk = "),
        ({"disk": "x" * 5000, "disk_memory": "1GiB"}, pagoda.TierIOError, "File name too long"),
        ({"disk": "pipe", "disk_memory": "1GiB"}, pagoda.TierIOError, "disk = .*pipe: opening the directory: Not a"),
    ],
)
def test_a_disk_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("link").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo("pipe")
    Path("shared").mkdir()
    Path("shared").chmod(0o777)
    with pytest.raises(error, match=message):
        pagoda.Cache(SPEC, **options)


def test_a_place_in_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(pagoda.TierIOError, match="disk = kept: in the current directory, which is gone"):
        pagoda.Cache(SPEC, disk="kept", disk_memory="1GiB")


@pytest.mark.usefixtures("names_the_cpu")
def test_a_directory_that_is_read_only() -> None:
    """Root may write anywhere, so as root the test switches to the user nobody first."""
    script = """
import os, sys
import pagoda, pytest
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.setuid(65534)
with pytest.raises(pagoda.TierIOError, match="disk = .*: opening the directory: Permission denied"):
    pagoda.Cache(pagoda.ModelSpec(layers=[pagoda.AttentionLayer(2, 2, 16)]), disk=sys.argv[1], disk_memory="1GiB")
"""
    with tempfile.TemporaryDirectory(prefix="pagoda-test-") as place:
        Path(place).chmod(0o500)
        subprocess.run([sys.executable, "-c", script, place], check=True, timeout=60)
        assert not list(Path(place).iterdir())


def test_a_file_that_is_cut_short_loses_what_was_there_and_no_more(mirror: Mirror, tmp_path: Path) -> None:
    one, other, cache = mirror.create(), mirror.create(), mirror.cache
    mirror.step([one, other], [160, 160])
    assert cache.demote(one.sequence, to="disk").wait(60)
    os.truncate(nameless(tmp_path / "pages"), 0)
    with pytest.raises(pagoda.CorruptPage, match="does not verify"):
        mirror.step([one], [1])
    mirror.release(one)
    assert cache.demote(other.sequence, to="disk").wait(60)
    mirror.step([other], [4])
