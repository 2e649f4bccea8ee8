"""Calls of one cache from several threads: what others do between two calls of the core, without a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pagoda
import pytest
from mirror import Mirror, layer

SPEC = pagoda.ModelSpec(layers=[layer(), layer(), layer(window=40)])


class Meddled:
    """What a cache asks of the core, with something that another thread does right after one of the calls, once."""

    def __init__(self, core: Any, after: str, meddle: Callable[[], object]) -> None:
        self._core, self._after, self._meddle = core, after, meddle
        self.meddled = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._core, name)
        if name != self._after:
            return call

        def meddled(*given: Any, **options: Any) -> Any:
            result = call(*given, **options)
            if not self.meddled and (name != "plan" or result.copies):
                self.meddled = True
                other = threading.Thread(target=self._meddle)
                other.start()
                other.join()
            return result

        return meddled


@pytest.mark.parametrize("after", ["by_recency", "free_blocks", "plan"])
@pytest.mark.parametrize("meddle", ["release", "truncate", "demote"])
def test_a_step_makes_room_whatever_other_threads_do_to_sequences_that_rest(after: str, meddle: str) -> None:
    options: dict[str, Any] = {"device_memory": "256KiB", "host_memory": "1MiB", "threads": 1, "headroom": 1000}
    with pagoda.Cache(SPEC, page_size=16, **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(0))
        resting, others, busy = mirror.create(), mirror.create(), mirror.create()
        mirror.step([resting], [100])
        mirror.step([others], [100])

        def act() -> None:
            if meddle == "release":
                mirror.release(resting)
            elif meddle == "truncate":
                mirror.truncate(resting, 0)
            else:
                cache.demote(resting.sequence).wait()

        meddled: Any = Meddled(cache._core, after, act)
        cache._spill._core = meddled
        for step in range(1, 13):
            mirror.step([busy], [40])
            assert len(busy.sequence) == 40 * step
        assert meddled.meddled
        mirror.look()


@pytest.mark.parametrize("call", ["demote", "promote", "prefetch"])
def test_pages_that_another_thread_has_moved_meanwhile_are_moved_from_where_they_are(call: str) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache, np.random.default_rng(0))
        tokens = mirror.create()
        mirror.step([tokens], [100])
        child = mirror.fork(tokens)
        pages = cache.plan(child.sequence, "host").copies
        back = call != "demote"
        if back:
            cache.demote(child.sequence, (0, 50)).wait()
        core = cache._core
        meddled: Any = Meddled(core, "plan", lambda: move(tokens.sequence, (0, 30)).wait())
        move = cache.promote if back else cache.demote
        cache._core = meddled
        try:
            assert getattr(cache, call)(child.sequence).wait(60)
        finally:
            cache._core = core
        assert meddled.meddled
        assert len(cache.plan(child.sequence, "host").copies) == (len(pages) if back else 0)
        mirror.look()
