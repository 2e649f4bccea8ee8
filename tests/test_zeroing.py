"""zero_on_free: what is let go of is nowhere to be found, on any tier. Without it the same search finds it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from mirror import layer, settled

PAGE, MEMORY = 16, 1 << 20
SPEC = pagoda.ModelSpec(layers=[layer(), layer()])
SECRET, OTHER = 0x5AA5, 0x4BB4
"""Bits of the float16 that every K and V of a sequence is."""


class World:
    """A cache with two sequences whose pages lie between each other, so that no extent is empty before both are gone."""

    def __init__(self, zero_on_free: bool, disk: Path | None, **options: Any) -> None:
        if disk is not None:
            options |= {"disk": disk, "disk_memory": "16MiB"}
        self.disk = disk
        self.options = options | {"page_size": PAGE, "device_memory": MEMORY, "host_memory": MEMORY, "threads": 2}
        self.cache = pagoda.Cache(SPEC, zero_on_free=zero_on_free, **self.options)
        self.secret, self.other = self.cache.create(), self.cache.create()
        for _ in range(8):
            self.append(self.secret, SECRET)
            self.append(self.other, OTHER)
        # The first page on the host lies where its memory begins.
        self.bases = {"device": self.base(self.secret)}
        self.move(self.secret, "host")
        self.bases["host"] = self.base(self.secret)
        self.move(self.secret, "device")

    def append(self, sequence: pagoda.Sequence, bits: int, count: int = PAGE, accepted: int | None = None) -> None:
        rows = np.full((count, 2, 16), bits, np.uint16).view(np.float16)
        with self.cache.step([sequence], [count]) as step:
            for index in range(len(SPEC.layers)):
                step.append(index, rows, rows)
            if accepted is not None:
                step.commit([accepted])

    def move(self, sequence: pagoda.Sequence, tier: str) -> None:
        plan = self.cache.plan(sequence, tier)
        assert len(plan)
        assert self.cache.execute(plan).wait(60)

    def base(self, sequence: pagoda.Sequence) -> int:
        """The lowest address of its pages."""
        with self.cache.step([sequence], [0]) as step:
            return int(step.table(0).pointers.min())

    def memory(self, tier: str) -> bytes:
        engine = self.cache._device
        if engine is None or tier == "host":
            return ctypes.string_at(self.bases[tier], MEMORY)
        # Without the ring, which comes off the budget.
        size = engine._arena_bytes
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
        nameless = [fd for fd in Path("/proc/self/fd").iterdir() if "/.pagoda-" in str(fd.resolve())]
        return nameless[0].read_bytes()

    def found(self, bits: int) -> dict[str, int]:
        """How often the numbers of a sequence are there, by tier."""
        settled(self.cache)
        memory = {tier: found(self.memory(tier), bits) for tier in ("device", "host")}
        return memory | {"disk": self.found_in_file(bits)}

    def found_in_file(self, bits: int) -> int:
        return found(self.file(), bits)


def found(data: bytes, bits: int) -> int:
    """How often eight such numbers stand side by side."""
    row: npt.NDArray[np.uint16] = np.full(8, bits, np.uint16)
    return data.count(row.tobytes())


def released(world: World) -> None:
    world.secret.release()


def truncated(world: World) -> None:
    world.secret.truncate(0)


def dropped(world: World) -> None:
    world.secret.drop(0, len(world.secret))


def overwritten_by_none(world: World) -> None:
    """Tokens that are not accepted lie in pages that are given back."""
    world.secret.release()
    world.append(world.other, SECRET, count=4 * PAGE, accepted=0)


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
    world.append(world.other, OTHER, count=1)


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


@pytest.mark.parametrize("zero_on_free", [True, False])
def test_what_is_forgotten_or_saved_over_is_gone(zero_on_free: bool, tmp_path: Path) -> None:
    world = World(zero_on_free, tmp_path / "kept", resume=True)
    with world.cache as cache:
        world.append(world.secret, SECRET, count=3)
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
    """What a process has left that was killed, or did not zero."""
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
