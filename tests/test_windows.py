"""Windows that move: what they keep is what attention sees, and nothing grows with the length of a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pagoda
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror import DTYPES, Mirror, check, layer, rotated, settled
from pagoda.attention.reference import attention

ROPE = pagoda.Rope(theta=500.0)


def open_cache(layers: list[pagoda.AttentionLayer], **options: Any) -> pagoda.Cache:
    defaults: dict[str, Any] = {"page_size": 16, "device_memory": "4MiB", "host_memory": "2MiB", "threads": 2}
    return pagoda.Cache(pagoda.ModelSpec(layers=layers), **(defaults | options))


def pages(cache: pagoda.Cache) -> list[int]:
    return [counts.used for counts in settled(cache).device]


@given(
    retention=st.builds(
        pagoda.SinkWindow, st.integers(0, 50), st.integers(1, 90), st.sampled_from(["original", "cache"])
    ),
    headroom=st.integers(0, 40),
    page_size=st.sampled_from([8, 16, 64]),
    steps=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6),
    rope=st.sampled_from([ROPE, pagoda.Rope(theta=100.0, interleaved=True, rotary_dim=8)]),
    dtype=st.sampled_from(list(DTYPES)),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sinks_and_a_window_are_what_attention_sees(
    retention: pagoda.SinkWindow,
    headroom: int,
    page_size: int,
    steps: list[tuple[int, int]],
    rope: pagoda.Rope,
    dtype: str,
    deterministic: bool,
    seed: int,
) -> None:
    """Exactly these tokens, in chunks of any size, with rotated and NoPE layers and a layer with its own window."""
    layers = [layer(rope=rope), layer(rope=rope, window=30), layer()]
    options: dict[str, Any] = {"page_size": page_size, "k_dtype": dtype, "deterministic": deterministic}
    with open_cache(layers, retention=retention, headroom=headroom, **options) as cache:
        mirror = Mirror(cache, np.random.default_rng(seed))
        batch = [mirror.create(), mirror.create()]
        for counts in steps:
            mirror.step(batch, list(counts))
        mirror.look()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("positions", ["original", "cache"])
def test_chunks_change_no_bit_in_deterministic_mode(positions: str, deterministic: bool, emulated: bool) -> None:
    """In other modes results change little. Which pages have left, and when, does not matter."""
    rng = np.random.default_rng(3)
    total, retention = 700 if emulated else 1500, pagoda.SinkWindow(20, 300, positions)
    rows = [rng.standard_normal((total, heads, 16), np.float32) for heads in (4, 2, 2)]

    def run(chunk: int) -> Any:
        with open_cache([layer(rope=ROPE)], retention=retention, deterministic=deterministic) as cache:
            sequence, outs = cache.create(), []
            for start in range(0, total, chunk):
                part = [array[start : start + chunk] for array in rows]
                with cache.step([sequence], [len(part[0])]) as step:
                    outs.append(step.forward(0, *part))
            return np.concatenate(outs)

    once = run(total)
    for chunk in (1, 7, 330):
        if deterministic:
            np.testing.assert_array_equal(run(chunk), once)
        else:
            np.testing.assert_allclose(run(chunk), once, rtol=0, atol=1e-5)


@pytest.mark.parametrize("context", [8192, 32768, 131072])
def test_a_ring_is_exact_far_past_its_window(context: int, emulated: bool) -> None:
    """Windowed and full layers alternate in one budget: only the full ones grow."""
    if emulated and context > 8192:
        pytest.skip("takes minutes")
    rng = np.random.default_rng(context)
    layers = [layer(window=1000), layer(num_q_heads=1, num_kv_heads=1, head_dim=8)] * 2
    with open_cache(layers, page_size=64, k_dtype="f32", v_dtype="f32", device_memory="24MiB", host_memory=0) as cache:
        sequence = cache.create()
        kept: Any = [np.zeros((0, 2, 16), np.float32)] * 2
        for start in range(0, context + 3, 4096):
            count = min(4096, context + 3 - start)
            with cache.step([sequence], [count]) as step:
                for index, shape in enumerate(layers):
                    sizes = [(shape.num_q_heads, shape.head_dim), *[(shape.num_kv_heads, shape.head_dim)] * 2]
                    q, k, v = (rng.standard_normal((count, *size), np.float32) for size in sizes)
                    step.append(index, k, v)
                    if index == 2:
                        kept = [np.concatenate(pair)[-5200:] for pair in zip(kept, (k, v), strict=True)]
                        if count < 4096 or start == 4096:
                            out, lse = step.attend(index, q, return_lse=True)
                            check(out, lse, *attention(q, *kept, window=1000))
        ring, full = pages(cache)
        assert full == -(-(context + 3) // 64)
        assert ring <= (1000 + 64) // 64 + 2
        cache.audit()


def generate(cache: pagoda.Cache, sequence: pagoda.Sequence, tokens: int) -> list[Any]:
    """Generates tokens; after every 1000, notes bytes used and free, and columns of tables."""
    seen = []
    rows = [np.ones((1, heads, 16), np.float32) for heads in (4, 2, 2)]
    batch = cache.batch([sequence])
    layers = range(len(cache.spec.layers))
    for token in range(tokens):
        with cache.step(batch, [1]) as step:
            for index in layers:
                step.forward(index, *rows)
            if token % 1000 == 999:
                columns = [step.table(index).block_table.shape[1] for index in layers]
        if token % 1000 == 999:
            seen.append((settled(cache).used_bytes("device"), *columns))
    return seen


def test_tables_have_no_page_that_has_left() -> None:
    with open_cache([layer(window=20)], headroom=0) as cache:
        mirror = Mirror(cache)
        old, new = mirror.create(), mirror.create()
        mirror.step([old], [30])
        for _ in range(6):
            mirror.step([old, new], [9, 5])
            lengths = len(old), len(new)
            with cache.step([old.sequence, new.sequence], [0, 0]) as step:
                table = step.table(0)
            with cache.step([old.sequence, new.sequence], [0, 0]) as step:
                again = step.table(0)
                indptr, indices, last = again.csr
            pages = np.arange(-(-max(lengths) // 16))
            there = np.array([(pages >= max(0, n - 20) // 16) & (pages < -(-n // 16)) for n in lengths])
            for each in (table, again):
                np.testing.assert_array_equal(each.block_table >= 0, there)
                np.testing.assert_array_equal(each.pointers > 0, there)
            np.testing.assert_array_equal(indptr, [0, *np.cumsum(there.sum(axis=1))])
            np.testing.assert_array_equal(indices, again.block_table[there])
            np.testing.assert_array_equal(last, [(n - 1) % 16 + 1 for n in lengths])


def test_columns_of_a_table_begin_at_a_multiple_of_4096_tokens() -> None:
    """The last one up to the first page that the sequence keeps: 4,223 tokens keep token 4,095, one more token lets it go."""
    with open_cache([layer(window=100)], headroom=28) as cache:
        sequences = [cache.create(), cache.create()]
        for counts in ([4000, 1], [223, 4096], [1, 126], [0, 1], [4096, 4096]):
            with cache.step(sequences, counts) as step:
                step.append(0, *[np.ones((sum(counts), 2, 16), np.float32)] * 2)
            with cache.step(sequences, [0, 0]) as step:
                rows = step.table(0).block_table
            for row, n in zip(rows, map(len, sequences), strict=True):
                first = max(0, n - 128) // 16
                columns = first // 256 * 256 + np.flatnonzero(row >= 0)
                assert columns.tolist() == list(range(first, -(-n // 16)))


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("tokens", [200_000, pytest.param(1_050_000, marks=pytest.mark.long)])
def test_memory_is_constant(tokens: int, positions: str, emulated: bool) -> None:
    if emulated:
        pytest.skip("tens of thousands of steps take hours; the bookkeeping is the same")
    layers = [layer(rope=ROPE), layer(window=100)]
    retention = pagoda.SinkWindow(40, 200, positions)
    with open_cache(layers, page_size=64, retention=retention, device_memory="1MiB", host_memory=0) as cache:
        sequence = cache.create()
        seen = generate(cache, sequence, tokens)
        early, late = seen[: len(seen) // 10], seen[len(seen) // 10 :]
        assert max(used for used, *_ in late) == max(used for used, *_ in early)
        kept = (40 // 64 + 1 + (200 + 64) // 64 + 2, (100 + 64) // 64 + 2)
        assert max(used for used, *_ in seen) <= np.dot(cache.stats().block_bytes, kept)
        # Table entries of pages that have left go in runs of 4096 tokens.
        assert all(columns <= 4096 // 64 + most for _, *row in seen for columns, most in zip(row, kept, strict=True))
        assert len(sequence) == tokens
        with cache.step([sequence], [1]) as step:
            assert step.positions.tolist() == [tokens]
            for index in range(2):
                step.append(index, *[np.ones((1, 2, 16), np.float32)] * 2)


def test_speculation_is_taken_back_within_the_headroom() -> None:
    """Rejected tokens cost nothing; accepted ones can be taken back within the headroom, and no farther."""
    with open_cache([layer(window=40), layer()], headroom=24) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [300])
        for accepted in (0, 1, 5, 8, 3):
            mirror.step([tokens], [8], accepted=[accepted])
        length, limit = len(tokens), tokens.sequence.rewind_limit
        assert length - 24 - 16 < limit <= length - 24
        for refused in (1, limit - 1, length + 1):
            with pytest.raises(pagoda.InvalidArgument, match=f"from {limit} to {length}"):
                tokens.sequence.truncate(refused)
        assert len(tokens.sequence) == length
        mirror.truncate(tokens, limit)
        mirror.step([tokens], [1])
        mirror.truncate(tokens, limit)
        mirror.step([tokens], [70])
        mirror.truncate(tokens, 0)
        assert tokens.sequence.rewind_limit == 0
        mirror.step([tokens], [90])


def test_forks_keep_what_each_of_them_needs() -> None:
    with open_cache([layer(window=40), layer()], retention=pagoda.SinkWindow(10, 60)) as cache:
        mirror = Mirror(cache, np.random.default_rng(1))
        parent = mirror.create()
        mirror.step([parent], [200])
        child = mirror.fork(parent)
        before = pages(cache)
        mirror.step([child], [100])
        assert all(now > then for now, then in zip(pages(cache), before, strict=True)), (
            "the parent still needs its pages"
        )
        mirror.look()
        mirror.release(parent)
        assert all(now <= then + 1 for now, then in zip(pages(cache), before, strict=True))
        grandchild = mirror.fork(child)
        mirror.truncate(grandchild, grandchild.sequence.rewind_limit)
        mirror.step([child, grandchild], [1, 90])
        mirror.look()


def test_pages_of_a_window_move_between_tiers() -> None:
    """A page may leave the window while it is being moved, or on the host."""
    with open_cache([layer(window=60), layer()], retention=pagoda.SinkWindow(20, 80)) as cache:
        mirror = Mirror(cache, np.random.default_rng(2))
        tokens = mirror.create()
        mirror.step([tokens], [300])
        plan = cache.plan(tokens.sequence, "host")
        assert plan.bytes == sum(
            size * count for size, count in zip(cache.stats().block_bytes, pages(cache), strict=True)
        )
        ticket = cache.execute(plan)
        mirror.step([tokens], [5])
        ticket.wait()
        mirror.look()
        assert settled(cache).used_bytes("host") > 0
        for _ in range(12):
            mirror.step([tokens], [20])
        left = settled(cache)
        assert left.host[0].used == 0, "every page that was demoted has left"
        assert left.host[1].used == 2, "but for those of the sinks"
        cache.promote(tokens.sequence).wait()
        mirror.look()


def test_dropping_works_on_what_is_there() -> None:
    retention = pagoda.SinkWindow(10, 60)
    with open_cache([layer(window=40), layer()], retention=retention, headroom=30) as cache:
        mirror = Mirror(cache, np.random.default_rng(3))
        tokens = mirror.create()
        mirror.step([tokens], [400])
        spare = len(tokens) - tokens.sequence.rewind_limit
        for start, stop in ((0, 5), (9, 12), (100, 400), (400 - spare - 2, 400)):
            with pytest.raises(pagoda.InvalidArgument, match="those before have left"):
                tokens.sequence.drop(start, stop)
        mirror.look()
        mirror.drop(tokens, 50, 150)
        mirror.look()
        mirror.drop(tokens, len(tokens) - 20, len(tokens) - 10)
        mirror.step([tokens], [3])
        mirror.drop(tokens, 10, 200)
        for _ in range(5):
            mirror.step([tokens], [40])


def test_sinks_follow_a_window_that_was_cut() -> None:
    """A context shift moves the tokens before it; sinks trail in addition."""
    rng = np.random.default_rng(9)
    sinks, window, total = 5, 30, 200
    retention = pagoda.SinkWindow(sinks, window, "cache")
    k, v = (rng.standard_normal((total + 1, 2, 16), np.float32) for _ in range(2))
    q = rng.standard_normal((1, 4, 16), np.float32)
    with open_cache([layer(rope=ROPE)], k_dtype="f32", v_dtype="f32", retention=retention) as cache:
        sequence = cache.create()
        with cache.step([sequence], [total]) as step:
            step.append(0, k[:total], v[:total])
        sequence.drop(100, 110)
        sequence.drop(180, 185)
        with cache.step([sequence], [1]) as step:
            out, lse = step.forward(0, q, k[total:], v[total:], return_lse=True)
    left = np.r_[0:100, 110:190, 195 : total + 1]
    # Where a key is seen: at its rank among those left, counted back from the query; sinks right before the window.
    place = total - np.arange(len(left))[::-1]
    place[:sinks] = total - window - np.arange(sinks)[::-1]
    keys = np.stack([rotated(k[at].astype(np.float64), ROPE, int(to - at)) for at, to in zip(left, place, strict=True)])
    check(out, lse, *attention(q, keys, v[left], window=window, sinks=sinks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headroom": -1}, "headroom = -1: an int from 0 to 2147483647"),
        ({"headroom": 1.5}, "headroom = 1.5"),
        ({"headroom": 1 << 31}, "headroom = 2147483648"),
        ({"headroom": (1 << 31) - 5}, "headroom = 2147483643: with 0 sinks and 5 more, at most 2147483647"),
        ({"retention": "all"}, "retention = 'all'"),
        ({"retention": pagoda.SinkWindow(positions="cache")}, "with a rope"),
    ],
)
def test_what_a_cache_cannot_keep(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=message):
        open_cache([layer(window=5), layer()], **options)


def test_a_layer_sees_no_farther_than_what_its_owner_keeps() -> None:
    """Beyond that, what it sees would depend on which pages are left, not on its window."""
    owned = [layer(), layer(kv_owner=0, window=60), layer(kv_owner=0)]
    for retention, limit in ((pagoda.SinkWindow(0, 59), "at most 59"), (pagoda.SinkWindow(1, 60), "none")):
        with pytest.raises(pagoda.InvalidArgument, match=rf"layers\[1\].window = 60: {limit}"):
            open_cache(owned, retention=retention)
    with open_cache(owned, retention=pagoda.SinkWindow(0, 60), headroom=0) as cache:
        mirror = Mirror(cache, np.random.default_rng(4))
        tokens = mirror.create()
        for count in (150, 1, 30, 1):
            mirror.step([tokens], [count])


def test_a_retention_that_says_nothing_is_refused() -> None:
    with pytest.raises(pagoda.InvalidArgument, match="no window of their own"):
        open_cache([layer(window=5)], retention=pagoda.SinkWindow())
    for bad in ({"sinks": -1}, {"window": 0}, {"positions": "new"}, {"sinks": True}):
        with pytest.raises(pagoda.InvalidArgument, match=next(iter(bad))):
            pagoda.SinkWindow(**bad)
