"""Sequences that are kept on disk and found again, by this cache or a later one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import pytest
from interrupts import alarms, interrupted
from mirror import Mirror, Tokens, layer, settled

SPEC = pagoda.ModelSpec(layers=[layer(), layer(), layer(window=40)])
OPTIONS: dict[str, Any] = {
    "page_size": 16,
    "device_memory": "512KiB",
    "host_memory": "256KiB",
    "disk_memory": "16MiB",
    "resume": True,
    "threads": 2,
}


def opened(path: Path, **changes: Any) -> pagoda.Cache:
    return pagoda.Cache(changes.pop("spec", SPEC), **(OPTIONS | {"disk": path / "kept"} | changes))


def load(mirror: Mirror, key: str, like: Tokens) -> Tokens:
    """Loads a key's sequence into a mirror."""
    sequence = mirror.cache.load(key)
    assert sequence is not None
    assert len(sequence) == len(like)
    tokens = Tokens(sequence, list(like.k), list(like.v))
    mirror.live.append(tokens)
    return tokens


@pytest.mark.parametrize("retention", [None, pagoda.SinkWindow(20, 50)])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
def test_a_sequence_is_found_again_by_the_next_cache(
    tmp_path: Path, length: int, retention: pagoda.SinkWindow | None
) -> None:
    with opened(tmp_path, retention=retention) as cache:
        mirror = Mirror(cache, np.random.default_rng(length))
        tokens = mirror.create()
        mirror.step([tokens], [length])
        if length > 100:
            mirror.step([tokens], [30])
            mirror.drop(tokens, length + 10, length + 20)
        cache.save(tokens.sequence, "it", meta=b"turn 1")
        mirror.step([tokens], [9])
        cache.save(tokens.sequence, "longer")
        kept = Tokens(tokens.sequence, list(tokens.k), list(tokens.v))
    with opened(tmp_path, retention=retention) as cache:
        assert cache.saved() == {"it": b"turn 1", "longer": b""}
        assert [cache.meta(key) for key in ("it", "longer", "none")] == [b"turn 1", b"", None]
        cache.audit()
        mirror = Mirror(cache)
        longer = load(mirror, "longer", kept)
        mirror.look()
        again = load(mirror, "longer", kept)
        mirror.step([longer, again], [20, 3])
        assert cache.load("none") is None


@pytest.mark.parametrize("key", ["", "k" * 1025])
def test_a_key_that_no_call_takes_goes_when_the_directory_is_opened(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise nobody could forget it or reuse its space."""
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        cache.save(tokens.sequence, "k" * 1024)
        cache._core.save(tokens.sequence.id, key, b"")
    used = []
    for lost in (True, False):
        caplog.clear()
        with opened(tmp_path) as cache:
            used.append(cache.stats().used_bytes("disk"))
            assert (f"{key!r} is lost: its key is not a text of 1 to 1024 bytes" in caplog.text) == lost
            assert cache.saved() == {"k" * 1024: b""}
            if not lost:
                assert cache.forget("k" * 1024)
                assert cache.stats().used_bytes("disk") == 0
            cache.audit()
    assert used[0] == used[1], "blocks of the key that is lost are nobody's at once"


def test_what_is_kept_does_not_change_with_the_sequence_it_was(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        like = Tokens(tokens.sequence, list(tokens.k), list(tokens.v))
        cache.save(tokens.sequence, "it")
        written = cache.stats().disk_io
        cache.save(tokens.sequence, "it")
        assert written is not None
        more = cache.stats().disk_io
        assert more is not None
        assert more.bytes_written - written.bytes_written == 3 * 4096 + 2 * 4096, (
            "the open page of each group, no other"
        )
        mirror.truncate(tokens, 90)
        mirror.step([tokens], [40])
        mirror.release(tokens)
        found = load(mirror, "it", like)
        mirror.look()
        assert cache.promote(found.sequence).wait(60)
        mirror.release(found)
        cache.audit()
        found = load(mirror, "it", like)
        mirror.step([found], [5])
        assert cache.forget("it")
        assert not cache.forget("it")
        assert cache.load("it") is None
        mirror.look()
        mirror.release(found)
        assert cache.stats().used_bytes("disk") == 0


def test_what_is_kept_beside_a_sequence_has_a_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [40])
        before = settled(cache)
        with pytest.raises(pagoda.InvalidArgument, match="meta = 67108865 bytes: at most 67108864"):
            cache.save(tokens.sequence, "it", meta=bytes((64 << 20) + 1))
        assert (settled(cache), cache.saved()) == (before, {})
        cache.save(tokens.sequence, "it", meta=b"x" * (64 << 20))
    with opened(tmp_path) as cache:
        assert cache.saved() == {"it": b"x" * (64 << 20)}


def test_an_empty_sequence_is_kept_and_found(tmp_path: Path) -> None:
    with opened(tmp_path) as cache, cache.create() as sequence:
        cache.save(sequence, "empty", meta=b"new")
        with cache.load("empty") or pytest.fail("not found") as found:
            assert len(found) == 0
        assert cache.load("nothing") is None


def test_what_keys_alone_hold_makes_room_without_spill_too(tmp_path: Path) -> None:
    """Copies in memory of kept pages that no sequence has never block others."""
    with opened(tmp_path, spill=False, device_memory="128KiB", host_memory="64KiB") as cache:
        mirror = Mirror(cache)
        kept = {}
        for key in "abcdef":
            tokens = mirror.create()
            mirror.step([tokens], [150])
            cache.save(tokens.sequence, key)
            kept[key] = Tokens(tokens.sequence, list(tokens.k), list(tokens.v))
            mirror.release(tokens)
        for key, like in kept.items():
            tokens = load(mirror, key, like)
            assert cache.promote(tokens.sequence, to="host").wait(60)
            mirror.look()
            mirror.release(tokens)
        assert settled(cache).used_bytes("host") > 0
        tokens = mirror.create()
        mirror.step([tokens], [150])
        assert cache.demote(tokens.sequence).wait(60)
        mirror.look()


def test_loading_makes_room_as_a_step_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, device_memory="64KiB") as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [30])
        cache.save(tokens.sequence, "it")
        # Keeps pages from leaving ahead of need.
        monkeypatch.setattr(cache._spill, "ahead", lambda batch: None)
        while free := min(cache._core.free_blocks("device")):
            mirror.step([mirror.create()], [16 * min(3, free)])
        with cache.step([tokens.sequence], [1]) as step:
            moved = cache.stats().moved_bytes
            # A block freed now becomes available only when the step ends.
            with pytest.raises(pagoda.OutOfBlocks):
                cache.load("it")
            step.rollback()
        assert settled(cache).moved_bytes == moved
        found = load(mirror, "it", tokens)
        mirror.step([found], [1])


@pytest.mark.parametrize("order", ["first", "last"])
def test_saving_gives_up_copies_that_memory_has_as_well(order: str, tmp_path: Path) -> None:
    """It gives up copies of other sequences; its own are being saved."""
    options = {"spec": pagoda.ModelSpec(layers=[layer()]), "disk_memory": "256KiB", "spill": False}
    with opened(tmp_path, **options) as cache:
        room = cache.stats().disk[0].free
        mirror = Mirror(cache)
        pair = [mirror.create(), mirror.create()]
        mirror.step(pair, [96, 96])
        away = mirror.create()
        mirror.step([away], [16 * (room - 12)])
        assert cache.demote(away.sequence, to="disk").wait(60)
        for tokens in pair:
            assert cache.execute(cache.plan(tokens.sequence, "disk", keep=True)).wait(60)
        assert cache.stats().disk[0].free == 0
        saved = pair[0 if order == "first" else 1]
        mirror.step([saved], [70])
        cache.save(saved.sequence, "it")
        load(mirror, "it", saved)
        mirror.look()
        cache.audit()


def test_saving_finds_room_for_every_open_page(tmp_path: Path) -> None:
    """A sequence has many open pages if ends of pages were dropped. No more copies are given up than they need."""
    options = {"spec": pagoda.ModelSpec(layers=[layer()]), "disk_memory": "256KiB", "spill": False}
    with opened(tmp_path, **options) as cache:
        room = cache.stats().disk[0].free
        mirror = Mirror(cache)
        tokens, others = mirror.create(), mirror.create()
        for _ in range(5):
            mirror.step([tokens], [10])
            mirror.drop(tokens, len(tokens) - 1, len(tokens))
        mirror.step([others], [16 * room])
        assert cache.execute(cache.plan(others.sequence, "disk", keep=True)).wait(60)
        assert cache.stats().disk[0].free == 0
        cache.save(tokens.sequence, "it")
        assert cache.plan(others.sequence, "disk").bytes == 5 * cache.stats().block_bytes[0]
        load(mirror, "it", tokens)
        mirror.look()


def test_saving_finds_room_that_layer_groups_take_from_each_other(tmp_path: Path) -> None:
    """However much space others' copies leave. Each group counts an unowned extent as free, but only one can have it."""
    spec = pagoda.ModelSpec(layers=[layer(num_kv_heads=4), layer(window=4000)])
    with opened(tmp_path, spec=spec, disk_memory="512KiB", device_memory="4MiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        pages = 0
        while True:
            pages += 1
            others = mirror.create()
            mirror.step([others], [16 * pages])
            try:
                cache.execute(cache.plan(others.sequence, "disk", keep=True)).wait(60)
            except pagoda.OutOfBlocks:
                break
            cache.save(tokens.sequence, "it")
            mirror.release(others)
            cache.forget("it")
            cache._spill.spare("disk", 1000)
        assert pages > 10


def test_a_save_that_is_refused_keeps_what_it_has_written(tmp_path: Path) -> None:
    """Ten full pages, and one more than may be written per day."""
    page = 4096 + 4096
    options = {"spec": pagoda.ModelSpec(layers=[layer()]), "disk_writes_per_day": 10 * page}
    with opened(tmp_path, **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [165])
        for _ in range(2):
            with pytest.raises(pagoda.TierIOError, match=f"{page} bytes to write: .* disk_writes_per_day"):
                cache.save(tokens.sequence, "it")
            stats = cache.stats()
            assert stats.disk_io is not None
            assert (stats.disk[0].used, stats.disk_io.bytes_written) == (10, 10 * page)
        mirror.truncate(tokens, 160)
        cache.save(tokens.sequence, "it")
        load(mirror, "it", tokens)
        mirror.look()


def test_what_earlier_caches_have_written_counts_for_the_day(tmp_path: Path) -> None:
    """After a closed cache has written part of the limit, the next one may write the rest."""
    page = 4096 + 4096
    options = {"spec": pagoda.ModelSpec(layers=[layer()]), "disk_writes_per_day": 10 * page + page // 2}
    with opened(tmp_path, **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [16 * 7])
        cache.save(tokens.sequence, "it")
    for pages, fits in ((4, False), (3, True), (1, False)):
        with opened(tmp_path, **options) as cache:
            mirror = Mirror(cache)
            found = load(mirror, "it", tokens)
            mirror.step([found], [16 * pages])
            if fits:
                cache.save(found.sequence, "it")
                tokens = found
            else:
                with pytest.raises(pagoda.TierIOError, match=r"bytes to write: .* disk_writes_per_day"):
                    cache.save(found.sequence, "it")
            mirror.look()


def test_a_part_of_which_pages_have_left_a_window_is_refused_by_its_name(tmp_path: Path) -> None:
    with opened(tmp_path, headroom=0) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [200])
        with pytest.raises(pagoda.InvalidArgument, match=r"tokens = \(180, 200\): a start of 0, or .* left a window"):
            cache.save(tokens.sequence, "part", tokens=(180, 200))
        assert cache.saved() == {}
        cache.save(tokens.sequence, "all", tokens=(0, 200))


def test_a_part_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path, headroom=200) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        cache.save(tokens.sequence, "part", tokens=(10, 70))
        assert len(tokens.sequence) == 100
        like = Tokens(tokens.sequence, [k[10:70] for k in tokens.k], [v[10:70] for v in tokens.v])
        load(mirror, "part", like)
        mirror.look()


def test_a_part_is_kept_that_the_cache_was_closed_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes the cache right after the save, which is not reported as failed."""
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        save = pagoda.Cache.save

        def save_and_close(cache: pagoda.Cache, *given: Any, **options: Any) -> None:
            save(cache, *given, **options)
            cache.close()

        monkeypatch.setattr(pagoda.Cache, "save", save_and_close)
        save(cache, tokens.sequence, "part", tokens=(0, 90))
    with opened(tmp_path) as cache:
        assert list(cache.saved()) == ["part"]


def test_a_part_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [30])
        for start, stop in ((0, 31), (20, 10), (31, 31), (31, 40)):
            with pytest.raises(
                pagoda.InvalidArgument, match=rf"tokens = \({start}, {stop}\): a start, and a stop that is 0 or"
            ):
                cache.save(tokens.sequence, "part", tokens=(start, stop))
        assert (cache.saved(), cache.stats().sequences) == ({}, 1)
        for at in (0, 10, 30):
            cache.save(tokens.sequence, "nothing", tokens=(at, at))
            nothing = cache.load("nothing")
            assert nothing is not None
            assert len(nothing) == 0


def test_saving_leaves_pages_where_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        before = settled(cache).device
        cache.save(tokens.sequence, "it")
        assert settled(cache).device == before


def test_sessions_beyond_memory_spill_and_share_pages(tmp_path: Path) -> None:
    with opened(tmp_path, headroom=1000) as cache:
        mirror = Mirror(cache)
        prompt = mirror.create()
        mirror.step([prompt], [160])
        kept = {}
        for turn in range(12):
            tokens = mirror.fork(prompt)
            mirror.step([tokens], [100])
            cache.save(tokens.sequence, str(turn))
            kept[str(turn)] = tokens
            mirror.release(tokens)
        used = cache.stats().used_bytes("disk")
        pages = 10 + 12 * 7
        assert used == pages * sum(cache.stats().block_bytes)
    with opened(tmp_path, headroom=1000) as cache:
        assert cache.stats().used_bytes("disk") == used
        mirror = Mirror(cache, np.random.default_rng(1))
        for key, like in kept.items():
            tokens = load(mirror, key, like)
            mirror.step([tokens], [2])
            mirror.release(tokens)
        assert cache.stats().used_bytes("disk") == used


def test_what_does_not_verify_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        one, other = mirror.create(), mirror.create()
        mirror.step([one, other], [100, 50])
        cache.save(one.sequence, "one")
        cache.save(other.sequence, "other")
    with (tmp_path / "kept" / "pages").open("r+b") as pages:
        data = np.frombuffer(pages.read(), np.uint8)
        starts = [at for at in range(0, len(data), 4096) if data[at : at + 8].tobytes() == b"PAGODAPG"]
        pages.seek(starts[0] + 40)
        pages.write(b"\xff")
    with opened(tmp_path) as cache:
        assert cache.load("one") is None
        # The partly loaded sequence is released at once, although the log still holds the error.
        assert (settled(cache).used_bytes("device"), cache.stats().sequences) == (0, 0)
        assert "'one' does not verify: " in caplog.text
        assert "generation" in caplog.text
        mirror = Mirror(cache)
        load(mirror, "other", other)
        mirror.look()
        cache.audit()
    with (tmp_path / "kept" / "pages").open("r+b") as pages:
        for start in starts:
            pages.seek(start + 40)
            pages.write(b"\xff")
    with opened(tmp_path) as cache:
        # Its last page, which is loaded first, cannot be read.
        assert cache.load("other") is None
        assert (settled(cache).used_bytes("device"), cache.stats().sequences) == (0, 0)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_damaged_index_serves_the_newest_save_or_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, copies: int
) -> None:
    """Damaged: one copy, or both, of a line that saves a key again."""
    index = tmp_path / "kept" / "index"
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [20])
        cache.save(tokens.sequence, "other")
        cache.save(tokens.sequence, "it", meta=b"older")
        start = index.stat().st_size
        mirror.step([tokens], [30])
        cache.save(tokens.sequence, "it", meta=b"newer")
        line = (index.stat().st_size - start) // 2
        cache.save(tokens.sequence, "last")
    files = {name: (tmp_path / "kept" / name).read_bytes() for name in ("pages", "index")}
    for at in range(0, line, 10):
        for name, content in files.items():
            spoilt = bytearray(content)
            for copy in range(copies if name == "index" else 0):
                spoilt[start + copy * line + at] ^= 1 << at % 8
            (tmp_path / "kept" / name).write_bytes(spoilt)
        caplog.clear()
        with opened(tmp_path) as cache:
            disk = cache.stats().disk_io
            assert disk is not None
            (told,) = [why for why in disk.refused if "index" in why]
            if copies == 1:
                assert cache.saved() == {"other": b"", "it": b"newer", "last": b""}
                mirror = Mirror(cache)
                load(mirror, "it", tokens)
                mirror.look()
                assert f"{line} damaged bytes of the index" in told
            else:
                assert cache.saved() == {"last": b""}
                assert "1 line(s) of the index" in told
                assert all(f"{key!r} is lost: a later line of the index" in caplog.text for key in ("it", "other"))
            assert told in caplog.text


def test_a_directory_whose_index_cannot_be_read_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Starting over would lose what is kept."""
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [20])
        cache.save(tokens.sequence, "it")
    index = tmp_path / "kept" / "index"
    content = index.read_bytes()
    spoilt = content[:20] + bytes([content[20] ^ 1]) + content[21:]
    why = {
        b"{}": "not one of a Pagoda cache",
        content[:20]: "its header is cut short",
        spoilt: "its header does not verify",
        None: "it is gone, and .* bytes of pages mean nothing without it",
    }
    for left, reason in why.items():
        if left is None:
            index.rename(tmp_path / "index")
        else:
            index.write_bytes(left)
        message = rf"^disk = {tmp_path}/kept: index: {reason}; remove the directory to begin anew$"
        with pytest.raises(pagoda.CorruptPage, match=message):
            opened(tmp_path)
    (tmp_path / "index").rename(index)
    index.write_bytes(content)
    with opened(tmp_path) as cache:
        load(Mirror(cache), "it", tokens)


def test_a_file_that_was_cut_short_has_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        one, other = mirror.create(), mirror.create()
        mirror.step([one, other], [50, 100])
        cache.save(one.sequence, "one")
        length = (tmp_path / "kept" / "pages").stat().st_size
        cache.save(other.sequence, "other")
    os.truncate(tmp_path / "kept" / "pages", length)
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        load(mirror, "one", one)
        mirror.look()
        assert cache.load("other") is None
        assert "'other' does not verify: " in caplog.text
        mirror.step([mirror.live[0]], [70])
        cache.save(mirror.live[0].sequence, "other")
    with opened(tmp_path) as cache:
        load(Mirror(cache), "other", mirror.live[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"page_size": 32},
            pagoda.GeometryMismatch,
            "disk = .*kept: the fingerprint .*: give the .*page_size.* or another",
        ),
        ({"k_dtype": "bf16"}, pagoda.GeometryMismatch, "fingerprint"),
        (
            {"spec": pagoda.ModelSpec(layers=[layer(), layer(), layer(window=48)])},
            pagoda.GeometryMismatch,
            "fingerprint",
        ),
        ({"model": "tiny@1"}, pagoda.GeometryMismatch, "fingerprint"),
        ({"model": ""}, pagoda.InvalidArgument, "model = ''"),
        ({"model": 3}, pagoda.InvalidArgument, "model = 3"),
        ({"disk_memory": "256KiB"}, pagoda.InvalidArgument, "disk_memory = 262144: at least .* as it is on disk"),
        ({"k_dtype": "q8_0", "spec": pagoda.ModelSpec(layers=[layer(head_dim=32)])}, pagoda.InvalidArgument, "center"),
        ({"resume": 3}, pagoda.InvalidArgument, "resume = 3"),
        ({"disk": None, "disk_memory": 0}, pagoda.InvalidArgument, "resume = True"),
    ],
)
def test_a_directory_of_other_pages(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    opened(tmp_path).close()
    with pytest.raises(error, match=message):
        opened(tmp_path, **changes)
    opened(tmp_path).close()


def test_the_disk_tier_grows_and_shrinks_between_caches(tmp_path: Path) -> None:
    """Whatever the original size, kept sequences remain as long as the tier has room for them."""
    with opened(tmp_path, disk_memory="4MiB") as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        cache.save(tokens.sequence, "it")
    blocks = []
    for disk_memory in ("4MiB", "64MiB", "8MiB", "256MiB"):
        with opened(tmp_path, disk_memory=disk_memory) as cache:
            mirror = Mirror(cache)
            tokens = load(mirror, "it", tokens)
            mirror.look()
            mirror.step([tokens], [50])
            cache.save(tokens.sequence, "it")
            blocks.append(sum(counts.free + counts.used for counts in cache.stats().disk))
            cache.audit()
    assert blocks[0] < blocks[2] < blocks[1] < blocks[3]


def spec_of(**changes: Any) -> pagoda.ModelSpec:
    fields: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "rope": pagoda.Rope(1e4)}
    return pagoda.ModelSpec(layers=[pagoda.AttentionLayer(**(fields | changes)), layer(head_dim=32)])


CENTERS: list[Any] = [np.full((2, 32), 0.5, np.float32), None]

BASE: dict[str, Any] = {
    "device": "cpu",
    "spec": spec_of(),
    "k_dtype": ["q8_0", "f16"],
    "center": None,
    "model": "tiny@1",
}

OTHERS: dict[str, dict[str, Any]] = {
    "query heads": {"spec": spec_of(num_q_heads=8)},
    "heads": {"spec": spec_of(num_kv_heads=4)},
    "head size": {"spec": spec_of(head_dim=64)},
    "size of V": {"spec": spec_of(v_head_dim=64)},
    "window": {"spec": spec_of(window=64)},
    "scale": {"spec": spec_of(scale=0.25)},
    "softcap": {"spec": spec_of(softcap=30.0)},
    "sinks": {"spec": spec_of(sinks=True)},
    "rotation": {"spec": spec_of(rope=pagoda.Rope(1e6))},
    "no rotation": {"spec": spec_of(rope=None)},
    "pairs that are rotated": {"spec": spec_of(rope=pagoda.Rope(1e4, interleaved=True))},
    "V as a part of K": {"spec": spec_of(v_alias=True)},
    "order of layers": {"spec": pagoda.ModelSpec(layers=spec_of().layers[::-1]), "k_dtype": ["f16", "q8_0"]},
    "one layer more": {
        "spec": pagoda.ModelSpec(layers=[*spec_of().layers, layer()]),
        "k_dtype": ["q8_0", "f16", "f16"],
    },
    "pages of another layer": {"spec": pagoda.ModelSpec(layers=[spec_of().layers[0], layer(head_dim=32, kv_owner=0)])},
    "format of K": {"k_dtype": ["q5_0", "f16"]},
    "format of K of the other layer": {"k_dtype": ["q8_0", "bf16"]},
    "format of V": {"v_dtype": "f32"},
    "format of V of as many bytes": {"v_dtype": "bf16"},
    "page size": {"page_size": 32},
    "centre": {"center": CENTERS},
    "rows that are not turned": {"rotate": False},
    "what is kept": {"retention": pagoda.SinkWindow(4, 64)},
    "what is kept behind a window": {"spec": spec_of(window=64), "headroom": 3},
    "another model": {"model": "tiny@2"},
    "no model": {"model": None},
}


@pytest.mark.usefixtures("names_the_cpu")
def test_one_field_that_differs_is_refused_with_a_reason(tmp_path: Path) -> None:
    with opened(tmp_path, **BASE) as cache, cache.create() as sequence:
        cache.save(sequence, "it")
    kept = {name: (tmp_path / "kept" / name).read_bytes() for name in ("pages", "index")}
    for name, changes in OTHERS.items():
        with pytest.raises(
            pagoda.GeometryMismatch, match=rf"disk = {tmp_path}/kept: the fingerprint of model and formats is .* here"
        ) as refused:
            pytest.fail(f"{name}: {opened(tmp_path, **(BASE | changes))}")
        advice = str(refused.value).partition(" give the ")[2]
        for argument in changes:
            assert {"k_dtype": "formats", "v_dtype": "formats"}.get(argument, argument) in advice, name
    assert kept == {name: (tmp_path / "kept" / name).read_bytes() for name in kept}, "and nothing was changed"
    with opened(tmp_path, **BASE) as cache:
        assert cache.saved() == {"it": b""}


def test_one_cache_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        with pytest.raises(pagoda.TierIOError, match=r"disk = .*kept: another process or cache has it open"):
            opened(tmp_path)
        cache.audit()
    opened(tmp_path).close()


def test_nothing_is_kept_without_resume(tmp_path: Path) -> None:
    with opened(tmp_path, resume=False) as cache:
        sequence = cache.create()
        for call in (lambda: cache.save(sequence, "it"), lambda: cache.load("it"), lambda: cache.forget("it")):
            with pytest.raises(pagoda.InvalidArgument, match="resume=True"):
                call()
        for key in ("", "x" * 1025, "\ud800", b"it", None):
            with pytest.raises(pagoda.InvalidArgument, match=r"key = .*: a text of 1 to 1024 bytes"):
                cache.save(sequence, key)  # type: ignore[arg-type]


CHILD = """
import sys
import numpy as np, pagoda
spec = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(num_q_heads=2, num_kv_heads=2, head_dim=16)])
options = dict(device="cpu", page_size=16, device_memory="1MiB", host_memory="1MiB", disk_memory="4MiB", threads=1)
with pagoda.Cache(spec, disk=sys.argv[1], resume=True, **options) as cache:
    for turn in range(10**6):
        with cache.create() as sequence:
            rows = np.full((10 + turn % 50, 2, 16), turn % 1000, np.float16)
            with cache.step([sequence], [len(rows)]) as step:
                step.append(0, rows, rows)
            cache.save(sequence, f"key {turn % 3}", meta=str(turn).encode())
        print(turn, flush=True)
"""


@pytest.mark.usefixtures("names_the_cpu")
def test_a_killed_process_leaves_whole_sessions(tmp_path: Path) -> None:
    spec = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(num_q_heads=2, num_kv_heads=2, head_dim=16)])
    options: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "1MiB", "disk_memory": "4MiB"}
    for kill in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "kept")], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(3 + 5 * kill):
            last = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        with pagoda.Cache(spec, device="cpu", page_size=16, disk=tmp_path / "kept", resume=True, **options) as cache:
            saved = {key: int(meta) for key, meta in cache.saved().items()}
            assert len(saved) == 3
            assert max(saved.values()) >= last
            for key, turn in saved.items():
                sequence = cache.load(key)
                assert sequence is not None
                assert len(sequence) == 10 + turn % 50
                with cache.step([sequence], [1]) as step:
                    new = np.full((1, 2, 16), turn % 1000, np.float16)
                    out = step.forward(0, new.astype(np.float32), new, new)
                assert np.allclose(out, turn % 1000, rtol=1e-6)
                sequence.release()


@pytest.mark.usefixtures("names_the_cpu")
def test_memory_of_what_only_a_key_holds_is_given_up_when_it_is_needed(tmp_path: Path) -> None:
    options = {"device": "cpu", "device_memory": "64KiB", "host_memory": "64KiB", "disk_memory": "8MiB", "resume": True}
    with pagoda.Cache(pagoda.ModelSpec([layer()]), page_size=16, disk=tmp_path / "pages", **options) as cache:  # type: ignore[arg-type]
        mirror = Mirror(cache, np.random.default_rng(4))
        tokens = mirror.create()
        for _ in range(12):
            mirror.step([tokens], [64])
        cache.save(tokens.sequence, "long")
        mirror.release(tokens)
        loaded = cache.load("long")
        assert loaded is not None
        loaded.release()
        assert cache.stats().used_bytes("device") + cache.stats().used_bytes("host") > 80 << 10
        for _ in range(3):
            other = mirror.create()
            mirror.step([other], [300])
        assert "long" in cache.saved()


LARGE = pagoda.ModelSpec(layers=[layer(num_kv_heads=8, num_q_heads=8, head_dim=128)])
LARGE_OPTIONS: dict[str, Any] = {
    "spec": LARGE,
    "page_size": 2048,
    "device_memory": "64MiB",
    "host_memory": 0,
    "disk_memory": "256MiB",
    "k_dtype": "f32",
    "v_dtype": "f32",
}
"""Pages of 16 MiB."""


def grown(sequence: pagoda.Sequence, new: int, value: float) -> None:
    """Appends tokens whose K is 1 and whose V is `value`, so that the result of attention is the mean of all values."""
    rows = np.ones((new, 8, 128), np.float32)
    with sequence._cache.step([sequence], [new]) as step:
        step.append(0, rows, rows * np.float32(value))


def mean(sequence: pagoda.Sequence) -> float:
    """The mean of all tokens' values and of one more value, 0."""
    rows = np.ones((1, 8, 128), np.float32)
    with sequence._cache.step([sequence], [1]) as step:
        out = step.forward(0, rows, rows, rows * 0)
        step.commit(accepted=[0])
    np.testing.assert_allclose(out, out.flat[0], rtol=1e-5)
    return float(out.flat[0])


def used(cache: pagoda.Cache) -> list[int]:
    return [counts.used for tier in (cache.stats().device, cache.stats().disk) for counts in tier]


def awaited(cache: pagoda.Cache, blocks: list[int], sequence: pagoda.Sequence) -> None:
    """Waits until these numbers of blocks are used on the device and on disk. Calls that gave up end eventually, and pages of
    the sequence that had to make room come back with a step."""
    deadline = time.monotonic() + 60
    while used(cache) != blocks:
        # They come back with the first step after one of other sequences.
        with cache.create() as other, cache.step([other], [0]):
            pass
        answered(partial(mean, sequence))
        assert time.monotonic() < deadline, f"{used(cache)} are used, not {blocks}"
        time.sleep(0.01)
    cache.audit()


def answered(call: Callable[[], Any]) -> Any:
    """Repeats a call until the drive has answered earlier ones, which may hold all blocks; returns its result."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except (pagoda.TierIOError, pagoda.OutOfBlocks) as error:
            assert "yet to answer" in str(error) or isinstance(error, pagoda.OutOfBlocks)
            assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_index_that_is_full_is_refused_before_any_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Huge(bytes):
        """Claims to be as long as an index may be."""

        def __len__(self) -> int:
            return 4 << 30

    monkeypatch.setattr(pagoda.cache, "META_BYTES_MAX", 1 << 40)
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        cache.save(tokens.sequence, "it", meta=b"1")
        mirror.step([tokens], [100])
        before = used(cache), cache.stats().disk_io, (tmp_path / "kept" / "index").read_bytes()
        for given in ({}, {"tokens": (48, 200)}):
            with pytest.raises(pagoda.TierIOError, match=rf"disk = {tmp_path}/kept: the index is full: \d+ bytes"):
                cache.save(tokens.sequence, "it", meta=Huge(), **given)
            assert (used(cache), cache.stats().disk_io, (tmp_path / "kept" / "index").read_bytes()) == before
            assert cache.saved() == {"it": b"1"}
        cache.save(tokens.sequence, "it", meta=b"2")
        mirror.release(load(mirror, "it", tokens))
        mirror.look()


def test_what_was_loaded_and_nobody_holds_makes_room_for_the_next(tmp_path: Path) -> None:
    """Without a step in between: each has its own last page, and there is room for four."""
    with opened(tmp_path, **LARGE_OPTIONS) as cache:
        with cache.create() as sequence:
            grown(sequence, 100, 1.0)
            cache.save(sequence, "it")
        for _ in range(6):
            assert cache.load("it") is not None
        last = cache.load("it")
        assert last is not None
        assert used(cache) == [1, 1]
        assert mean(last) == pytest.approx(100 / 101)


def test_ctrl_c_at_any_instruction_of_loading_leaves_no_sequence_without_a_handle(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror, strays = Mirror(cache), 0
        tokens = mirror.create()
        mirror.step([tokens], [20])
        cache.save(tokens.sequence, "it")
        for after in count():
            came = interrupted(lambda: cache.load("it"), after)
            strays += cache.stats().sequences - 1
            mirror.step([tokens], [0])
            assert cache.stats().sequences == 1
            if not came:
                break
        assert strays > 1, "it came between the making of a sequence and its handle"
        mirror.look()


@pytest.mark.parametrize("move", ["demote", "prefetch"])
def test_what_is_saved_may_be_on_the_move(tmp_path: Path, move: str) -> None:
    """The save waits for its pages, which move after those of the other sequence and take longer than a call."""
    with opened(tmp_path, device_memory="32MiB", host_memory="32MiB") as cache:
        mirror, other = Mirror(cache), cache.create()
        with cache.step([other], [1 << 16]) as step:
            for index in range(len(SPEC.layers)):
                step.append(index, *[np.zeros((1 << 16, 2, 16), np.float16)] * 2)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        if move == "prefetch":
            assert cache.demote(tokens.sequence).wait(60)
        cache.demote(other)
        getattr(cache, move)(tokens.sequence)
        cache.save(tokens.sequence, "it")
        load(mirror, "it", tokens)
        mirror.look()


class Meddled:
    """The core of a cache, with one function called before each plan and another after a refused save."""

    def __init__(self, core: Any, before: Callable[[], object], refused: Callable[[], object]) -> None:
        self._real, self._before, self._refused = core, before, refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def plan(self, *arguments: Any, **options: Any) -> Any:
        self._before()
        return self._real.plan(*arguments, **options)

    def save(self, *arguments: Any) -> Any:
        try:
            return self._real.save(*arguments)
        except pagoda.InvalidArgument:
            self._refused()
            raise


def test_pages_that_arrive_right_after_they_were_missed_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread begins to move the only page right before it would be planned; the copy takes longer than a call."""
    with opened(tmp_path, **LARGE_OPTIONS) as cache:
        sequence, core, moves = cache.create(), cache._core, count()
        grown(sequence, 2048, 1.0)

        def demote() -> None:
            if next(moves) == 0:
                core.execute(core.plan(sequence.id, "disk", None, [0], only_from="device"))

        def arrive() -> None:
            for ticket in core.under_way(sequence.id):
                core.wait_patiently(ticket)

        monkeypatch.setattr(cache, "_core", Meddled(core, demote, arrive))
        cache.save(sequence, "it")
        found = cache.load("it")
        assert found is not None
        assert cache.promote(found).wait(60)
        assert mean(found) == pytest.approx(2048 / 2049)


def test_what_is_refused_for_good_is_not_asked_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if some pages are both in memory and on disk: giving up copies would not help."""

    def refuse(*_: Any) -> None:
        raise pagoda.InvalidArgument("refused")

    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [100])
        core = Meddled(cache._core, int, int)
        core.save = refuse  # type: ignore[method-assign]
        monkeypatch.setattr(cache, "_core", core)
        with pytest.raises(pagoda.InvalidArgument, match="refused"):
            cache.save(tokens.sequence, "it")


def test_a_save_in_an_open_step_says_what_it_waits_for(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens], [100])
        with cache.step([other.sequence], [0]), pytest.raises(pagoda.InvalidArgument, match="no step is open"):
            cache.save(tokens.sequence, "it")
        assert cache.saved() == {}
        assert cache.stats().sequences == 2
        cache.save(tokens.sequence, "it")
        # Nothing has to move now.
        with cache.step([other.sequence], [0]):
            cache.save(tokens.sequence, "it")
        mirror.look()


def test_ctrl_c_while_a_session_is_saved_or_loaded(tmp_path: Path) -> None:
    with opened(tmp_path, **LARGE_OPTIONS) as cache:
        sequence, came = cache.create(), 0
        grown(sequence, 2048 + 300, 1.0)
        cache.save(sequence, "it", meta=b"0")
        kept = used(cache)
        with alarms() as alarm:
            for milliseconds in range(1, 30):
                try:
                    alarm(milliseconds / 1000)
                    for turn in range(100):
                        answered(partial(cache.save, sequence, "it", meta=b"%d" % turn))
                        found = answered(lambda: cache.load("it"))
                        assert found is not None
                        found.release()
                except KeyboardInterrupt:
                    came += 1
                found = None
                cache.audit()
                # A step releases loaded sequences that nobody holds.
                assert answered(partial(mean, sequence)) == pytest.approx(2348 / 2349)
        assert came == 29
        awaited(cache, kept, sequence)
        found = answered(lambda: cache.load("it"))
        assert mean(found) == pytest.approx(2348 / 2349)
        # A handler that calls the same cache gets an answer or an error, and never blocks.
        with alarms(lambda *_: cache.stats()) as alarm:
            for milliseconds in range(1, 10):
                alarm(milliseconds / 1000)
                try:
                    answered(lambda: cache.save(sequence, "it"))
                except pagoda.InvalidArgument as error:
                    assert "this signal or finaliser has interrupted" in str(error)
