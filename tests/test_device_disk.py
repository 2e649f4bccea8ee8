"""Pages on disk in a cache on a device, emulated: their moves, and attention over them.

Copies are late, come in pieces and are made twice; slots hold NaN where nothing was copied. What applies to any cache
with a disk is in test_disk.py and test_sessions.py, which run on an emulated device as well.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pagoda
import pytest
from emulator.driver import CallerStream, EmulatedDriver, HostArena, Stream
from interrupts import alarms, interrupted
from mirror import Mirror, Tokens, layer, nameless, settled
from pagoda import _core
from pagoda.device import passage
from pagoda.device.plans import Nothing, Plans
from pagoda.device.reads import Reads
from test_device_streaming import (
    ROPE,
    SCENES,
    LateDriver,
    RestlessDriver,
    a_long_batch,
    a_ragged_batch,
    attended,
    engine_of,
    interrupted_step,
    look_in_any_order,
    opened,
    poisoned_slots,
)

__all__ = ["poisoned_slots"]


def with_disk(
    monkeypatch: pytest.MonkeyPatch, path: Path, driver: EmulatedDriver, layers: list[Any], **options: Any
) -> pagoda.Cache:
    defaults: dict[str, Any] = {"disk": path / "pages", "disk_memory": "32MiB"}
    return opened(monkeypatch, driver, pagoda.ModelSpec(layers=layers), **(defaults | options))


def over_three_tiers(cache: pagoda.Cache, long: Tokens, other: Tokens) -> None:
    """Puts the long sequence on disk, with part of it also on the host."""
    cache.demote(other.sequence).wait()
    cache.demote(long.sequence, to="disk").wait()
    cache.promote(long.sequence, (130, 260), to="host").wait()


@pytest.mark.parametrize("name", SCENES)
def test_a_ragged_batch_over_three_tiers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"disk": tmp_path / "pages", "disk_memory": "32MiB"}
    options: dict[str, Any] = {"to": "disk", "gap": name == "spans", "spill": False, **disk}
    with a_ragged_batch(monkeypatch, SCENES[name], over_three_tiers, **options) as mirror:
        assert mirror.last is not None
        assert mirror.last.report.bytes["disk"] > 0
        assert engine_of(mirror.cache).traffic.ring > 0


def test_bits_do_not_depend_on_where_pages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic=True: all on the device, or some on the host or on disk."""
    tiny: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "rope": ROPE}
    layers = [layer(**tiny), layer(**tiny, window=5000)]
    options: dict[str, Any] = {"page_size": 64, "deterministic": True, "headroom": 5000, "spill": False}
    with with_disk(monkeypatch, tmp_path, RestlessDriver(3), layers, device_memory="4MiB", **options) as cache:
        batch, counts = a_long_batch(cache)
        long = batch[0]
        right = attended(cache, batch, counts, 5)
        for demoted, to in (((4096, 5000), "disk"), ((0, 1000), "host"), ((500, 7000), "disk"), ((0, 9070), "disk")):
            cache.demote(long, demoted, to=to).wait()
            for _ in range(2):
                assert attended(cache, batch, counts, 5) == right


def pages_on_disk(
    monkeypatch: pytest.MonkeyPatch, path: Path, driver: EmulatedDriver, **options: Any
) -> tuple[Mirror, Tokens]:
    """A cache of two layers with a sequence of 30 pages on disk, 8 per pass."""
    cache = with_disk(monkeypatch, path, driver, [layer(), layer()], device_memory="256KiB", **options)
    mirror = Mirror(cache, np.random.default_rng(7))
    tokens = mirror.create()
    for _ in range(4):
        mirror.step([tokens], [120])
        cache.demote(tokens.sequence, to="disk").wait()
    cache._spill.may_bring_in(np.array([tokens.sequence.id], np.uint64))
    return mirror, tokens


def test_passes_of_wide_and_of_narrow_layers_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot holds as many bytes of either. On disk, pages of the narrow layer, in its own group, are mostly padding."""
    narrow = layer(num_kv_heads=1, num_q_heads=2, window=400)
    layers = [layer(num_kv_heads=4), narrow]
    with with_disk(monkeypatch, tmp_path, RestlessDriver(4), layers, device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache, np.random.default_rng(7))
        tokens = mirror.create()
        for _ in range(4):
            mirror.step([tokens], [120])
            cache.demote(tokens.sequence, to="disk").wait()
        for _ in range(3):
            mirror.step([tokens], [1])
        assert mirror.last is not None
        assert mirror.last.report.bytes["disk"] > 0
        mirror.look()


def test_ctrl_c_between_a_read_and_its_copies_loses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted more often than there are slots."""
    monkeypatch.setattr(_core, "ring_bytes", lambda slot: 3 * slot)
    mirror, tokens = pages_on_disk(monkeypatch, tmp_path, LateDriver())
    mirror.step([tokens], [1])
    for turn in range(24):
        interrupted_step(monkeypatch, mirror, tokens, Reads, "copied", 1 + turn % 6)
        if turn % 8 == 0:
            mirror.look()
    mirror.look()
    mirror.cache.close()


def bytes_read(cache: pagoda.Cache) -> int:
    disk_io = cache.stats().disk_io
    assert disk_io is not None
    return disk_io.bytes_read


def test_every_byte_is_read_once_a_step_and_ahead_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far ahead depends on the drive and the device: two passes may be in slots, and a whole step in the ring."""
    mirror, tokens = pages_on_disk(monkeypatch, tmp_path, RestlessDriver(4))
    cache, steps, pages, ahead = mirror.cache, 12, 2 * 30, 2 * 8
    mirror.step([tokens], [1])
    before, carried = bytes_read(cache), {"pcie": 0, "disk": 0, "memory": 0}
    for _ in range(steps):
        mirror.step([tokens], [1])
        assert mirror.last is not None
        carried = {link: carried[link] + size for link, size in mirror.last.report.bytes.items()}
    assert carried["pcie"] / (16 * 128) == pytest.approx(steps * pages, abs=ahead)
    assert carried["disk"] / 4096 == pytest.approx(steps * pages, abs=ahead)
    assert carried["memory"] == 0
    assert (bytes_read(cache) - before) / 4096 == pytest.approx(steps * pages, abs=ahead + pages)
    assert cache.stats().moved_bytes["disk", "device"] == cache.stats().moved_bytes["disk", "host"] == 0
    cache.close()


def test_layers_in_any_order_and_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_in_any_order(*pages_on_disk(monkeypatch, tmp_path, RestlessDriver(5)))


def test_a_graph_reads_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the table entries of pages on disk for addresses."""
    driver = RestlessDriver(6)
    stream = CallerStream(driver)
    with with_disk(monkeypatch, tmp_path, driver, [layer()], device_memory="512KiB") as cache:
        cache.declare(sequences=2, new_tokens=1, context=200)
        sequence, other = cache.create(), cache.create()
        rows, q, out = (
            np.zeros((1, 2, 16), np.float16),
            np.ones((1, 4, 16), np.float32),
            np.ones((1, 4, 16), np.float32),
        )
        for _ in range(40):
            with cache.step([sequence], [1], stream=stream) as step:
                step.append(0, rows, rows)
        cache.demote(sequence, to="disk").wait()
        cache._spill.may_bring_in(np.array([sequence.id], np.uint64))
        with cache.step([sequence], [1], stream=stream) as step:
            with pytest.raises(pagoda.InvalidArgument, match=r"replay: 2 pages of this step are on disk"):
                step.replay(lambda: pytest.fail("replayed"))
            step.append(0, rows, rows)
            stream.begin_capture()
            with pytest.raises(pagoda.InvalidArgument, match="layer 0 in a graph: not in a step that streams"):
                step.attend(0, q, out=out)
            stream.end_capture()
            step.attend(0, q, out=out)
        # A sequence without new tokens has no queries that would read its pages.
        replays: list[bool] = []
        cache._spill.may_bring_in(np.array([sequence.id, other.id], np.uint64))
        with cache.step([sequence, other], [0, 1], stream=stream) as step:
            step.replay(lambda: replays.append(True))
        assert replays


def test_pages_on_disk_that_no_query_sees_need_no_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are kept behind a window, and those of a sequence without new tokens."""
    options: dict[str, Any] = {"device_memory": "64KiB", "host_memory": 0, "headroom": 200}
    with with_disk(monkeypatch, tmp_path, EmulatedDriver(), [layer(window=20)], **options) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens, other], [100, 20])
        assert cache.demote(tokens.sequence, (0, 80), to="disk").wait()
        assert cache.demote(other.sequence, (0, 16), to="disk").wait()
        assert [counts.used for counts in settled(cache).disk] == [6]
        mirror.step([tokens], [1])
        mirror.step([tokens, other], [30, 0])
        with pytest.raises(pagoda.InvalidArgument, match=r"device_memory = 65536: .* this one has 1 there"):
            mirror.step([tokens, other], [1, 1])
        assert [counts.used for counts in settled(cache).disk] == [6]
        mirror.truncate(tokens, 90)
        with pytest.raises(pagoda.InvalidArgument, match=r"this one has 1 there"):
            mirror.step([tokens], [1])
        mirror.step([tokens], [0])


def test_without_room_for_a_ring_nothing_on_disk_is_attended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the cache moves nothing to disk by itself."""
    options: dict[str, Any] = {"device_memory": "256KiB", "deterministic": True, "host_memory": "64KiB"}
    with with_disk(monkeypatch, tmp_path, EmulatedDriver(), [layer()], **options) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens, other], [100, 20])
        assert cache.demote(tokens.sequence, to="disk").wait()
        before = cache.stats()
        with pytest.raises(
            pagoda.InvalidArgument, match=r"device_memory = 262144: at least 8388608 bytes .* this one has 6 there"
        ):
            mirror.step([tokens], [1])
        after = cache.stats()
        assert (after.device, after.host, after.disk) == (before.device, before.host, before.disk)
        mirror.step([other], [1])
        assert cache.promote(tokens.sequence).wait()
        mirror.look()
        with pytest.raises(pagoda.OutOfBlocks):
            mirror.step([tokens], [4000])
        assert cache.stats().used_bytes("disk") == 0
        # Pages that no query sees may be on disk, and so may a truncated page, which is copied back.
        mirror.truncate(tokens, 64)
        assert cache.demote(tokens.sequence, to="disk").wait()
        mirror.truncate(tokens, 10)
        mirror.step([tokens], [3])


def test_a_page_that_does_not_verify_ends_the_step_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is in the last pass, so that its read has failed long before it is needed."""
    mirror, tokens = pages_on_disk(monkeypatch, tmp_path, RestlessDriver(8))
    cache, other = mirror.cache, mirror.create()
    mirror.step([other], [60])
    cache.demote(other.sequence, to="disk").wait()
    with nameless(tmp_path / "pages").open("r+b") as pages:
        data = pages.read()
        row = tokens.k[1][470].astype(np.float16)[0].tobytes()
        pages.seek(data.index(row))
        pages.write(b"\x00\x00")
    for _ in range(2):
        with pytest.raises(pagoda.CorruptPage, match="layer 1 of the group does not verify") as raised:
            mirror.step([other, tokens], [0, 1])
        assert raised.value.sequences == (tokens.sequence.id,)
    mirror.step([other], [2])
    assert len(tokens.sequence) == 480
    mirror.release(tokens)
    mirror.look()
    cache.close()


def test_a_step_that_ends_with_a_copy_that_failed_gives_its_blocks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had taken all blocks; the next step gets them."""
    with with_disk(monkeypatch, tmp_path, RestlessDriver(3), [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        cut, other = mirror.create(), cache.create()
        mirror.step([cut], [16])
        cache.demote(cut.sequence, to="disk").wait()
        mirror.truncate(cut, 3)
        free = settled(cache).device[0].free
        with nameless(tmp_path / "pages").open("r+b") as pages:
            size = len(pages.read())
            pages.seek(0)
            pages.write(bytes(size))
        for _ in range(2):
            with pytest.raises(pagoda.CorruptPage), cache.step([cut.sequence, other], [1, 16 * (free - 1)]):
                pass
        with cache.step([other], [16 * free]) as step:
            step.rollback()


@pytest.mark.parametrize("held", [True, False])
def test_the_end_of_a_cache_with_moves_and_reads_under_way(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passage, "PART_BYTES", 1)
    driver = LateDriver()
    mirror = pages_on_disk(monkeypatch, tmp_path, driver)[0]
    cache, other = mirror.cache, mirror.create()
    mirror.step([other], [200])
    cache.demote(other.sequence, to="disk")
    given = [(stream, len(stream.work)) for stream in driver.streams]
    assert any(stream.finished < count for stream, count in given)
    if held:
        cache.close()
        with pytest.raises(pagoda.UseAfterRelease):
            cache.create()
    del mirror, other, cache
    gc.collect()
    assert all(stream.finished >= count for stream, count in given)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_plan_of_which_a_part_fails(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages before the failure have moved, pages after it take no space, and the error is reported once."""
    monkeypatch.setattr(passage, "PART_BYTES", 1)
    monkeypatch.setattr(passage, "PARTS", parts)
    stored = 2 * 4096
    options: dict[str, Any] = {"spill": False, "disk_writes_per_day": 5 * stored}
    with with_disk(monkeypatch, tmp_path, RestlessDriver(9), [layer()], device_memory="512KiB", **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [16 * 12])
        ticket = cache.demote(tokens.sequence, to="disk")
        with pytest.raises(pagoda.TierIOError, match=r"failed after [024] of 12 copies: .* = 40960 a day") as error:
            ticket.wait()
        copied = int(str(error.value).split(" of 12")[0].split()[-1])
        assert copied == 4 or parts > 1, "two pages at a time, one after the other"
        assert (cache.stats().disk[0].used, cache.stats().device[0].used) == (copied, 12 - copied)
        data = nameless(tmp_path / "pages").read_bytes()
        rows = [tokens.k[0][16 * page, 0].astype(np.float16).tobytes() for page in range(12)]
        assert [row in data for row in rows] == [page < copied for page in range(12)]
        mirror.look()
        cache.audit()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_that_fails_in_its_middle_has_moved_what_came_before(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of 20 pages each, which threads read 16 at a time. Either may fail, if the other has begun by then."""
    monkeypatch.setattr(passage, "PART_BYTES", 20 * 2048)
    monkeypatch.setattr(passage, "PARTS", parts)
    with with_disk(monkeypatch, tmp_path, RestlessDriver(9), [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [16 * 40])
        assert cache.demote(tokens.sequence, to="disk").wait()
        with nameless(tmp_path / "pages").open("r+b") as pages:
            data = pages.read()
            for page in (17, 38):
                pages.seek(data.index(tokens.k[0][16 * page, 0].astype(np.float16).tobytes()))
                pages.write(b"\x00\x00")
        before = bytes_read(cache)
        with pytest.raises(pagoda.CorruptPage, match="failed after 16 of 40 copies"):
            cache.promote(tokens.sequence).wait()
        assert bytes_read(cache) - before <= parts * 20 * 4096
        assert cache.stats().device[0].used == 16
        mirror.truncate(tokens, 16 * 16)
        mirror.look()
        cache.audit()


def test_interrupts_while_pages_come_from_disk_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any moment of a step: no slot of either ring is lost, and the next result is right."""
    mirror, tokens = pages_on_disk(monkeypatch, tmp_path, RestlessDriver(11))
    cache, rows, q = mirror.cache, np.zeros((1, 2, 16), np.float32), np.ones((1, 4, 16), np.float32)

    def look() -> Any:
        with cache.step([tokens.sequence], [1]) as step:
            out = [step.forward(index, q, rows, rows) for index in (0, 1)]
            step.commit(accepted=[0])
        return out

    right, came = look(), 0
    with alarms() as alarm:
        for milliseconds in range(1, 41):
            try:
                alarm(milliseconds / 2000)
                while True:
                    look()
            except KeyboardInterrupt:
                came += 1
            cache.audit()
            np.testing.assert_allclose(look(), right, rtol=1e-5)
    assert came == 40
    mirror.look()
    cache.close()


@pytest.mark.parametrize("ways", [("host", "device"), ("disk", "device"), ("disk", "host")])
def test_ctrl_c_anywhere_in_a_move(ways: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls continue the plan, every page moves, none is read before it has arrived, and nothing leaks."""
    monkeypatch.setattr(passage, "PART_BYTES", 1)
    monkeypatch.setattr(passage, "PARTS", 2)
    driver = RestlessDriver(12)
    with with_disk(monkeypatch, tmp_path, driver, [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens, between = mirror.create(), mirror.create()
        for _ in range(4):
            # Another sequence's pages in between make the move several copies.
            mirror.step([tokens, between], [16, 16])

        def move(to: str) -> None:
            cache.execute(cache.plan(tokens.sequence, to)).wait()

        core, came, after = engine_of(cache).core, True, 0
        for turn in range(1000):
            if not came and turn % 2 == 0:
                break
            to = ways[turn % 2]
            came = interrupted(partial(move, to), after)
            deadline = time.monotonic() + 60
            while cache.stats() and core.moving():
                assert time.monotonic() < deadline
                time.sleep(1e-4)
            cache.audit()
            assert cache.plan(tokens.sequence, to).copies == [] or came
            assert cache.execute(cache.plan(tokens.sequence, to)).wait()
            mirror.look()
            after += 3 + after // 50
        else:
            pytest.fail("no move came to its end")
        assert after > 300
        mirror.release(tokens)
        assert cache.stats().used_bytes("disk") == cache.stats().used_bytes("host") == 0


def test_ctrl_c_anywhere_in_a_load_leaves_no_copy_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that it was copying to are free, and the next step appends to them."""
    driver = LateDriver()
    options: dict[str, Any] = {"device_memory": "256KiB", "host_memory": 0, "resume": True, "spill": False}
    with with_disk(monkeypatch, tmp_path, driver, [layer()], **options) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [35])
        cache.save(tokens.sequence, "it")
        mirror.release(tokens)
        for after in count(0, 3):
            driver.catch_up()
            cache.stats()
            came = interrupted(partial(cache.load, "it"), after)
            tokens = mirror.create()
            mirror.step([tokens], [60])
            driver.catch_up()
            mirror.look()
            mirror.release(tokens)
            if not came:
                break
        assert after > 300


def test_memory_that_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages stay on disk, the error is reported once, and the next attempt succeeds."""
    driver = RestlessDriver(10)
    with with_disk(monkeypatch, tmp_path, driver, [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [64])
        assert cache.demote(tokens.sequence, to="disk").wait()

        def refuse(self: HostArena, address: int, size: int) -> bool:
            raise pagoda.BackendUnavailable("no more")

        with monkeypatch.context() as patch:
            patch.setattr(HostArena, "pin", refuse)
            with pytest.raises(pagoda.BackendUnavailable, match="no more"):
                cache.promote(tokens.sequence, to="host")
        assert cache.stats().disk[0].used == 4
        assert cache.stats().host[0].used == 0
        mirror.look()
        assert cache.promote(tokens.sequence, to="host").wait()
        mirror.look()


def a_write_follows_the_kernel(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without it, pages are written to disk before the append that writes them has run."""
    driver = LateDriver()
    with with_disk(monkeypatch, path, driver, [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        k, v = mirror.rng.standard_normal((2, 64, 2, 16), np.float32).astype(np.float16)
        with cache.step([tokens.sequence], [64]) as step:
            step.append(0, k, v)
        tokens.k, tokens.v = [k.astype(np.float64)], [v.astype(np.float64)]
        assert cache.demote(tokens.sequence, to="disk").wait()
        mirror.look()


def a_page_is_read_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without it, pages from disk are read on the device before they have arrived."""
    driver = LateDriver()
    with with_disk(monkeypatch, path, driver, [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [64])
        assert cache.demote(tokens.sequence, to="disk").wait()
        other = mirror.create()
        mirror.step([other], [64])
        mirror.release(other)
        assert cache.promote(tokens.sequence).wait()
        mirror.look()


def a_part_of_the_stage_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without it, with one part of one page, the next page is read into the part while the previous one is copied from it."""
    monkeypatch.setattr(passage, "PART_BYTES", 1)
    monkeypatch.setattr(passage, "PARTS", 1)
    a_page_is_read_when_it_has_arrived(monkeypatch, path)


def a_slot_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without it, with three slots, slots are read into while they are being copied from."""
    monkeypatch.setattr(_core, "ring_bytes", lambda slot: 3 * slot)
    mirror, tokens = pages_on_disk(monkeypatch, path, LateDriver())
    for _ in range(2):
        mirror.step([tokens], [1])
    mirror.cache.close()


def memory_is_pinned_before_it_is_written(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without it, pinning the memory of other pages would overwrite pages that came from disk to the host."""
    with with_disk(monkeypatch, path, EmulatedDriver(), [layer()], device_memory="512KiB", spill=False) as cache:
        mirror = Mirror(cache)
        tokens, other = mirror.create(), mirror.create()
        mirror.step([tokens, other], [64, 64])
        assert cache.demote(tokens.sequence, to="disk").wait()
        assert cache.promote(tokens.sequence, to="host").wait()
        assert cache.demote(other.sequence).wait()
        mirror.look()


def hasty_copies(self: Plans, rows: Any) -> Nothing:
    self._mover.copy(self._copying, rows)
    return Nothing()


def hasty_slots(self: Reads) -> None:
    """Gives slots back at once, so that they are read into immediately."""
    while self._lent:
        self._core.give_back(self._lent.popleft()[0])


def waited(take: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Reads, place: int, wait: bool) -> Any:
        found = take(self, place, wait)
        time.sleep(0.02)
        return found

    return patched


_take = Reads.take

Patch = tuple[Any, str, Any]
FENCES: list[tuple[Callable[[pytest.MonkeyPatch, Path], None], list[Patch]]] = [
    (a_write_follows_the_kernel, [(Stream, "follow", lambda self, event: None)]),
    (a_write_follows_the_kernel, [(Plans, "_by_link", hasty_copies)]),
    (a_page_is_read_when_it_has_arrived, [(Plans, "_by_link", hasty_copies)]),
    (a_part_of_the_stage_waits_for_its_copy, [(Plans, "_by_link", hasty_copies)]),
    (a_slot_waits_for_its_copy, [(Reads, "give_back", hasty_slots), (Reads, "take", waited(_take))]),
    (
        memory_is_pinned_before_it_is_written,
        [(Plans, "_pin", lambda self, rows: None)],
    ),
]


@pytest.mark.parametrize("scene", list(dict.fromkeys(scene for scene, _ in FENCES)))
def test_fences_hold(
    scene: Callable[[pytest.MonkeyPatch, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene(monkeypatch, tmp_path)


@pytest.mark.parametrize(("scene", "broken"), FENCES)
def test_a_missing_fence_is_noticed(
    scene: Callable[[pytest.MonkeyPatch, Path], None],
    broken: list[Patch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it depends on the drive's speed, after some attempts."""
    for patch in broken:
        monkeypatch.setattr(*patch)
    deadline = time.monotonic() + 60
    with pytest.raises(AssertionError):
        while time.monotonic() < deadline:
            scene(monkeypatch, tmp_path)
