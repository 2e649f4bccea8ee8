"""Random calls on the Python API against the naive mirror: an audit after each, float64 whenever tokens are read."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pagoda
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mirror import Mirror, Tokens, layer
from pagoda import device

FRACTION = st.floats(0, 1)


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, fork, grow, shrink and go while pages move between small tiers."""

    mirror: Mirror

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        page_size=st.sampled_from([8, 16, 32]),
        dtypes=st.tuples(*[st.sampled_from(["f32", "f16", "bf16"])] * 2),
        spill=st.booleans(),
        deterministic=st.booleans(),
        retention=st.none() | st.builds(pagoda.SinkWindow, st.integers(0, 40), st.integers(1, 60)),
        headroom=st.integers(0, 50),
        host=st.sampled_from(["256KiB", "64KiB", 0]),
        on_disk=st.booleans(),
        zero_on_free=st.booleans(),
    )
    def open(
        self,
        seed: int,
        page_size: int,
        dtypes: tuple[str, str],
        spill: bool,
        deterministic: bool,
        retention: pagoda.SinkWindow | None,
        headroom: int,
        host: int | str,
        on_disk: bool,
        zero_on_free: bool,
    ) -> None:
        layers = [layer(), layer(window=20), layer(), layer(window=20, num_kv_heads=4)]
        # On a device, pages on disk need a ring, whose slots take at most a 16th of the memory each.
        on_device = device.AUTO != "cpu"
        self.on_disk = on_disk and not (on_device and deterministic)
        self.absent = {"host"} if host == 0 else set()
        self.absent |= set() if self.on_disk else {"disk"}
        self.directory = tempfile.TemporaryDirectory(prefix="pagoda-test-")
        cache = pagoda.Cache(
            pagoda.ModelSpec(layers=layers),
            page_size=page_size,
            k_dtype=dtypes[0],
            v_dtype=dtypes[1],
            device_memory="640KiB" if on_device and self.on_disk else "384KiB",
            host_memory=host,
            disk=self.directory.name if self.on_disk else None,
            disk_memory="16MiB" if self.on_disk else 0,
            zero_on_free=zero_on_free,
            threads=2,
            deterministic=deterministic,
            spill=spill,
            retention=retention,
            headroom=headroom,
        )
        self.mirror = Mirror(cache, np.random.default_rng(seed))
        self.tickets: list[pagoda.Ticket] = []

    def pick(self, fraction: float) -> Tokens:
        live = self.mirror.live
        return live[min(int(fraction * len(live)), len(live) - 1)]

    @precondition(lambda self: len(self.mirror.live) < 6)
    @rule()
    def create(self) -> None:
        self.mirror.create()

    @precondition(lambda self: 0 < len(self.mirror.live) < 6)
    @rule(which=FRACTION)
    def fork(self, which: float) -> None:
        self.mirror.fork(self.pick(which))

    @precondition(lambda self: self.mirror.live)
    @rule(which=FRACTION)
    def release(self, which: float) -> None:
        tokens = self.pick(which)
        self.mirror.release(tokens)
        with pytest.raises(pagoda.UseAfterRelease):
            tokens.sequence.fork()

    @precondition(lambda self: self.mirror.live)
    @rule(which=FRACTION, length=FRACTION)
    def truncate(self, which: float, length: float) -> None:
        tokens, limit = self.pick(which), self.pick(which).sequence.rewind_limit
        wanted = int(length * len(tokens))
        if 0 < wanted < limit:
            with pytest.raises(pagoda.InvalidArgument, match=f"from {limit} to {len(tokens)}"):
                tokens.sequence.truncate(wanted)
            wanted = limit
        self.mirror.truncate(tokens, wanted)

    @precondition(lambda self: self.mirror.live)
    @rule(which=FRACTION, ends=st.tuples(FRACTION, FRACTION))
    def drop(self, which: float, ends: tuple[float, float]) -> None:
        tokens = self.pick(which)
        start, stop = sorted(int(end * len(tokens)) for end in ends)
        limit = tokens.sequence.rewind_limit
        try:
            self.mirror.drop(tokens, start, stop)
        except pagoda.InvalidArgument:
            retention = self.mirror.cache.retention
            sinks = 0 if retention is None else retention.sinks
            assert limit > 0
            assert start < sinks or stop - start > len(tokens) - limit

    @precondition(lambda self: self.mirror.live)
    @rule(
        which=st.sets(FRACTION, min_size=1, max_size=3),
        new=st.lists(st.integers(0, 40), min_size=3, max_size=3),
        junk=st.integers(0, 12),
        accepted=st.none() | st.lists(FRACTION, min_size=3, max_size=3),
    )
    def step(self, which: set[float], new: list[int], junk: int, accepted: list[float] | None) -> None:
        batch = list({id(tokens): tokens for tokens in map(self.pick, which)}.values())
        counts = new[: len(batch)]
        keep = None if accepted is None else [int(a * n) for a, n in zip(accepted, counts, strict=False)]
        try:
            self.mirror.step(batch, counts, keep, junk)
        except pagoda.OutOfBlocks as error:
            assert error.blocks_short > 0
            assert error.bytes_short > 0

    @precondition(lambda self: self.mirror.live)
    @rule(which=FRACTION, new=st.integers(0, 30), layers=st.integers(0, 4))
    def fail_inside_a_step(self, which: float, new: int, layers: int) -> None:
        tokens = self.pick(which)
        with pytest.raises((ZeroDivisionError, pagoda.OutOfBlocks)):
            with self.mirror.cache.step([tokens.sequence], [new]) as step:
                for index in range(layers):
                    shape = self.mirror.cache.spec.attention_layers[index]
                    rows = np.full((new, shape.num_kv_heads, 16), np.nan, np.float32)
                    step.append(index, rows, rows)
                raise ZeroDivisionError

    @precondition(lambda self: self.mirror.live)
    @rule(
        which=FRACTION,
        ends=st.tuples(FRACTION, FRACTION),
        how=st.sampled_from(["move", "keep", "demote", "promote", "prefetch"]),
        to=st.sampled_from(["device", "host", "disk"]),
    )
    def move(self, which: float, ends: tuple[float, float], how: str, to: str) -> None:
        tokens, cache = self.pick(which), self.mirror.cache
        start, stop = sorted(int(end * len(tokens)) for end in ends)
        try:
            if how == "prefetch":
                ticket = cache.prefetch(tokens.sequence)
            elif how in ("move", "keep"):
                ticket = cache.execute(cache.plan(tokens.sequence, to, (start, stop), keep=how == "keep"))
            elif to == {"demote": "device", "promote": "disk"}[how]:
                return
            else:
                ticket = getattr(cache, how)(tokens.sequence, (start, stop), to)
        except pagoda.OutOfBlocks:
            return
        except pagoda.InvalidArgument as error:
            assert "a tier that the cache has memory on" in str(error)
            assert to in self.absent
            return
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule()
    def wait(self) -> None:
        assert self.tickets.pop().wait(60)

    @precondition(lambda self: self.mirror.live)
    @rule()
    def look(self) -> None:
        try:
            self.mirror.look()
        except pagoda.OutOfBlocks:
            # Not even one token fits: check each sequence without new ones.
            for tokens in self.mirror.live:
                self.mirror.step([tokens], [0])

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "mirror"):
            self.mirror.cache.audit()

    def teardown(self) -> None:
        if not hasattr(self, "mirror"):
            return
        cache = self.mirror.cache
        for tokens in list(self.mirror.live):
            self.mirror.release(tokens)
        for ticket in self.tickets:
            ticket.wait(60)
        # Moves that the cache has started by itself hold blocks until they end.
        cache._spill.settle()
        stats: Any = cache.stats()
        assert stats.used_bytes("device") == stats.used_bytes("host") == stats.used_bytes("disk") == 0
        assert stats.disk_io is None or stats.disk_io.corrupt == 0
        cache.close()
        self.directory.cleanup()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)
