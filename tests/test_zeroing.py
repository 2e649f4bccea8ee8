"""zero_on_free: freed data is nowhere to be found, on any tier. Without it the same search finds it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from emulator.driver import EmulatedDriver, install_driver
from interrupts import interrupted
from mirror import layer, nameless, settled
from pagoda.device import ring

PAGE, MEMORY = 16, 1 << 20
SPEC = pagoda.ModelSpec(layers=[layer(), layer()])
SECRET, OTHER = 0x5AA5, 0x4BB4
"""Bits of the one float16 value that fills K and V of a sequence."""
SECRETS = count(0x5100)
"""Values that no earlier test has left anywhere in this process."""


class World:
    """A cache with two sequences whose pages alternate, so that no extent is empty before both are gone."""

    def __init__(self, zero_on_free: bool, disk: Path | None, secret: int = SECRET, **options: Any) -> None:
        if disk is not None:
            options |= {"disk": disk, "disk_memory": "16MiB"}
        self.disk = disk
        self.options = options | {"page_size": PAGE, "device_memory": MEMORY, "host_memory": MEMORY, "threads": 2}
        self.cache = pagoda.Cache(SPEC, zero_on_free=zero_on_free, **self.options)
        self.secret, self.other = self.cache.create(), self.cache.create()
        for _ in range(8):
            self.append(self.secret, secret)
            self.append(self.other, OTHER)
        # The first page on the host lies at the start of its memory.
        self.bases = {"device": self.base(self.secret)}
        self.move(self.secret, "host")
        self.bases["host"] = self.base(self.secret)
        self.move(self.secret, "device")

    def append(self, sequence: pagoda.Sequence, bits: int, new: int = PAGE, accepted: int | None = None) -> None:
        # The rows have another type, so that the bits are only in pages, not in Python's memory.
        rows = np.full((new, 2, 16), np.uint16(bits).view(np.float16).astype(np.float32), np.float32)
        with self.cache.step([sequence], [new]) as step:
            for index in range(len(SPEC.layers)):
                step.append(index, rows, rows)
            if accepted is not None:
                step.commit([accepted])

    def move(self, sequence: pagoda.Sequence, tier: str) -> None:
        plan = self.cache.plan(sequence, tier)
        assert len(plan)
        assert self.cache.execute(plan).wait(60)

    def base(self, sequence: pagoda.Sequence) -> int:
        """The lowest address of the sequence's pages."""
        with self.cache.step([sequence], [0]) as step:
            return int(step.table(0).pointers.min())

    def memory(self, tier: str) -> bytes:
        engine = self.cache._device
        if engine is None or tier == "host":
            return ctypes.string_at(self.bases[tier], MEMORY)
        # The budget without the ring.
        size = engine._memory.device_bytes
        pinned, stream = engine._driver.pinned(size), engine._driver.stream()
        if engine._zeroed is not None:
            stream.follow(engine._zeroed)
        stream.copy(pinned.address, self.bases[tier], size)
        stream.record().wait()
        return pinned.array.tobytes()

    def file(self) -> bytes:
        if self.disk is None:
            return b""
        named = self.disk / "pages"
        if named.exists():
            return named.read_bytes()
        return nameless(self.disk).read_bytes()

    def found(self, bits: int) -> dict[str, int]:
        """How often the value of a sequence is found, by tier."""
        settled(self.cache)
        memory = {tier: found(self.memory(tier), bits) for tier in ("device", "host")}
        return memory | {"disk": self.found_in_file(bits)}

    def found_in_file(self, bits: int) -> int:
        return found(self.file(), bits)


def found_in_process(bits: int) -> int:
    """How often eight such values in a row are found in this process's anonymous memory."""
    row, total = np.uint16(bits), 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _, _, inode, *_ = line.split()
        start, stop = (int(end, 16) for end in place.split("-"))
        if not mode.startswith("rw") or inode != "0":
            continue
        for at in range(start, stop, 1 << 20):
            size = min(1 << 20, stop - at)
            words = np.ctypeslib.as_array((ctypes.c_uint16 * (size // 2)).from_address(at))
            if words.any():
                total += int((words.reshape(-1, 8) == row).all(axis=1).sum())
    return total


def found(data: bytes, bits: int) -> int:
    """How often eight such values in a row are found."""
    row: npt.NDArray[np.uint16] = np.full(8, bits, np.uint16)
    return data.count(row.tobytes())


def released(world: World) -> None:
    world.secret.release()


def truncated(world: World) -> None:
    world.secret.truncate(0)


def dropped(world: World) -> None:
    world.secret.drop(0, len(world.secret))


def overwritten_by_none(world: World) -> None:
    """Rejected tokens lie in pages that are given back."""
    world.secret.release()
    world.append(world.other, SECRET, new=4 * PAGE, accepted=0)


def rolled_back(world: World) -> None:
    world.secret.release()
    rows = np.full((4 * PAGE, 2, 16), SECRET, np.uint16).view(np.float16)
    with pytest.raises(KeyError), world.cache.step([world.other], [4 * PAGE]) as step:
        step.append(0, rows, rows)
        raise KeyError


def released_on_the_host(world: World) -> None:
    world.move(world.secret, "host")
    world.secret.release()


def released_with_two_copies(world: World) -> None:
    plan = world.cache.plan(world.secret, "host", keep=True)
    assert world.cache.execute(plan).wait(60)
    world.secret.release()


def collected(world: World) -> None:
    del world.secret
    world.append(world.other, OTHER, new=1)


SCENES: list[Callable[[World], None]] = [
    released,
    truncated,
    dropped,
    overwritten_by_none,
    rolled_back,
    released_on_the_host,
    released_with_two_copies,
    collected,
]


@pytest.mark.parametrize("zero_on_free", [True, False])
@pytest.mark.parametrize("scene", SCENES)
def test_what_was_let_go_of_is_nowhere_in_memory(scene: Callable[[World], None], zero_on_free: bool) -> None:
    world = World(zero_on_free, None)
    with world.cache as cache:
        scene(world)
        assert (sum(world.found(SECRET).values()) == 0) == zero_on_free
        assert world.found(OTHER)["device"] > 0
        cache.audit()


@pytest.mark.parametrize("zero_on_free", [True, False])
def test_what_has_moved_is_where_it_is_and_nowhere_else(zero_on_free: bool) -> None:
    world = World(zero_on_free, None)
    with world.cache:
        everything = world.found(SECRET)["device"]
        world.move(world.secret, "host")
        left = {"device": 0 if zero_on_free else everything, "host": everything, "disk": 0}
        assert world.found(SECRET) == left


def on_disk(world: World) -> None:
    world.move(world.secret, "disk")
    world.secret.release()


def back_from_disk(world: World) -> None:
    world.move(world.secret, "disk")
    world.move(world.secret, "device")
    world.secret.release()


@pytest.mark.parametrize("zero_on_free", [True, False])
@pytest.mark.parametrize("scene", [on_disk, back_from_disk])
def test_nothing_is_left_on_disk(scene: Callable[[World], None], zero_on_free: bool, tmp_path: Path) -> None:
    world = World(zero_on_free, tmp_path / "pages")
    with world.cache as cache:
        world.move(world.other, "disk")
        scene(world)
        assert (sum(world.found(SECRET).values()) == 0) == zero_on_free
        assert world.found(OTHER)["disk"] > 0
        cache.audit()


def attended(world: World) -> None:
    """Attends through the ring, which also reads ahead for the next step."""
    for _ in range(2):
        q = np.ones((1, 4, 16), np.float32)
        with world.cache.step([world.secret, world.other], [1, 0]) as step:
            for index in range(len(SPEC.layers)):
                step.forward(index, q, q[:, :2] * 0, q[:, :2] * 0)
            step.commit(accepted=[0, 0])


def attended_and_released(world: World) -> None:
    attended(world)
    world.secret.release()


def attended_and_moved(world: World) -> None:
    attended(world)
    world.move(world.secret, "device")
    world.secret.release()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of this process's memory")
@pytest.mark.usefixtures("names_the_cpu")
@pytest.mark.parametrize("zero_on_free", [True, False])
@pytest.mark.parametrize("scene", [released, attended_and_released, attended_and_moved])
def test_nothing_is_left_where_pages_passed_through(
    scene: Callable[[World], None], zero_on_free: bool, tmp_path: Path
) -> None:
    """Searches all memory of this process: that of the disk's threads and the ring that steps read into."""
    secret = next(SECRETS)
    world = World(zero_on_free, tmp_path / "pages", secret, spill=False, device="cpu")
    with world.cache as cache:
        world.move(world.other, "disk")
        world.move(world.secret, "disk")
        assert (found_in_process(secret) == 0) == zero_on_free, "it is on disk, and nowhere else"
        scene(world)
        settled(cache)
        assert (found_in_process(secret) == 0) == zero_on_free
        cache.audit()


def loaded_tail(world: World) -> None:
    """An open page passes through the stage too."""
    world.append(world.secret, SECRET, new=3)
    world.cache.save(world.secret, "it")
    world.secret.release()
    world.secret = world.cache.load("it")  # type: ignore[assignment]
    world.secret.release()
    assert world.cache.forget("it")


@pytest.mark.parametrize("zero_on_free", [True, False])
@pytest.mark.parametrize("scene", [released, attended_and_released, attended_and_moved, loaded_tail])
def test_nothing_is_left_where_pages_pass_between_disk_and_device(
    scene: Callable[[World], None], zero_on_free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches pinned memory: the stage and the ring for pages on disk."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    world = World(zero_on_free, tmp_path / "pages", spill=False, device="cuda", resume=True)
    with world.cache as cache:
        world.move(world.other, "disk")
        world.move(world.secret, "disk")
        scene(world)
        settled(cache)
        cache.stats()
        assert (found(driver.arenas[-1].array.tobytes(), SECRET) == 0) == zero_on_free
        cache.audit()


def world_with_ring(
    zero_on_free: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[World, Callable[[int], int]]:
    """A world on an emulated device with a ring of a few pages of one layer, and a function that counts a sequence's value in
    the ring once the device has done all its work, even after the cache is closed."""
    driver = install_driver(monkeypatch, EmulatedDriver())
    monkeypatch.setattr(ring, "SLOT_BYTES_MIN", 1)
    world = World(zero_on_free, disk, spill=False, device="cuda")
    assert world.cache._device is not None
    slots = world.cache._device._streams.ring
    # The reference keeps the memory from being reused.
    memory, size = slots._memory, len(slots) * slots.slot_bytes
    assert memory is not None

    def in_ring(bits: int) -> int:
        driver.catch_up()
        return found(ctypes.string_at(memory.address, size), bits)

    return world, in_ring


def closed(world: World) -> None:
    attended(world)
    world.cache.close()


@pytest.mark.parametrize("zero_on_free", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("scene", [attended_and_released, attended_and_moved, closed])
def test_nothing_is_left_where_pages_pass_on_a_device(
    scene: Callable[[World], None], tier: str, zero_on_free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches the ring in device memory: both slots hold the secret in turn, also for pages read ahead."""
    world, in_ring = world_with_ring(zero_on_free, tmp_path / "pages", monkeypatch)
    with world.cache as cache:
        world.move(world.other, tier)
        world.move(world.secret, tier)
        attended(world)
        assert in_ring(SECRET) > 0, "it is needed for the next step"
        scene(world)
        if scene is not closed:
            settled(cache)
            cache.audit()
        assert (in_ring(SECRET) == 0) == zero_on_free


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_ahead_of_a_step_is_brought_again_once_it_was_zeroed(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose ring holds one sequence's pages for the next step when another sequence is released."""
    world, in_ring = world_with_ring(True, tmp_path / "pages", monkeypatch)

    def outputs() -> list[npt.NDArray[np.float32]]:
        q = np.zeros((1, 4, 16), np.float32)
        with world.cache.step([world.other], [1]) as step:
            rows = [step.forward(index, q, q[:, :2], q[:, :2]) for index in range(len(SPEC.layers))]
            step.commit(accepted=[0])
        return rows

    with world.cache as cache:
        world.move(world.secret, tier)
        world.move(world.other, tier)
        # In an open page with room, so that a step changes none of the pages in the ring.
        world.append(world.other, OTHER, new=1)
        before = outputs()
        assert in_ring(OTHER) > 0, "it is needed for the next step"
        world.secret.release()
        settled(cache)
        assert in_ring(OTHER) == 0
        np.testing.assert_array_equal(outputs(), before)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_ctrl_c_while_blocks_are_zeroed_leaves_nothing_of_them(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, which is told what to zero: an interrupted request is made again, for its ring as well."""
    world, in_ring = world_with_ring(True, tmp_path / "pages", monkeypatch)
    with world.cache as cache:
        for after in count(0, 3 if tier == "device" else 13):
            if tier != "device":
                world.move(world.secret, tier)
                attended(world)
                # Afterwards no step is left to wait for.
                settled(cache)
            world.secret.release()
            came = interrupted(cache.stats, after)
            assert sum(world.found(SECRET).values()) == 0, after
            assert in_ring(SECRET) == 0, after
            cache.audit()
            if not came:
                break
            world.secret = cache.create()
            world.append(world.secret, SECRET, new=2 * PAGE)
    assert after > 100


@pytest.mark.parametrize("zero_on_free", [True, False])
def test_what_is_forgotten_or_saved_over_is_gone(zero_on_free: bool, tmp_path: Path) -> None:
    world = World(zero_on_free, tmp_path / "kept", resume=True)
    with world.cache as cache:
        world.append(world.secret, SECRET, new=3)
        cache.save(world.other, "other")
        cache.save(world.secret, "it")
        cache.save(world.secret, "again")
        world.secret.release()
        assert world.found(SECRET)["disk"] > 0, "it is kept"
        cache.save(world.other, "again")
        assert world.found(SECRET)["disk"] > 0, "it is still kept"
        cache.forget("it")
        assert (sum(world.found(SECRET).values()) == 0) == zero_on_free
        kept = cache.load("other")
        assert kept is not None
        cache.audit()


def test_opening_zeroes_what_nothing_is_kept_of(tmp_path: Path) -> None:
    """Data left by a process that was killed or did not zero."""
    world = World(False, tmp_path / "kept", resume=True)
    with world.cache as cache:
        cache.save(world.other, "other")
        world.move(world.secret, "disk")
    assert world.found_in_file(SECRET) > 0
    for zero_on_free in (False, True):
        World(zero_on_free, tmp_path / "kept", resume=True).cache.close()
        assert (world.found_in_file(SECRET) == 0) == zero_on_free
    with pagoda.Cache(SPEC, **world.options) as cache:
        kept = cache.load("other")
        assert kept is not None
        assert len(kept) == 8 * PAGE
