"""Forks, truncation, context shift and speculative steps: who sees which tokens, and what gets copied."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pagoda
import pytest
from interrupts import interrupted
from mirror import Mirror, Tokens, layer, settled


@pytest.fixture
def mirror() -> Any:
    spec = pagoda.ModelSpec(layers=[layer(), layer(window=24)])
    with pagoda.Cache(spec, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=2, headroom=2000) as cache:
        yield Mirror(cache)


def used(mirror: Mirror) -> int:
    return sum(counts.used for counts in mirror.cache.stats().device)


def test_copy_on_write_shares_until_the_first_write(mirror: Mirror) -> None:
    parent = mirror.create()
    mirror.step([parent], [40])
    blocks = used(mirror)
    child = mirror.fork(parent)
    assert used(mirror) == blocks
    assert mirror.cache.stats().shared_pages == blocks
    mirror.step([child], [1])
    assert used(mirror) == blocks + 2, "one copy of the open page in each layer group"
    mirror.step([parent], [1])
    assert used(mirror) == blocks + 2, "the parent is alone on its page now and writes in place"
    mirror.look()
    mirror.release(parent)
    mirror.look()


def test_both_sides_of_a_fork_in_one_step(mirror: Mirror) -> None:
    parent = mirror.create()
    mirror.step([parent], [20])
    children = [mirror.fork(parent) for _ in range(3)]
    mirror.step([parent, *children], [5, 1, 0, 30])
    mirror.look()


def test_context_shift_moves_no_bytes(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [100])
    table = mirror.cache.stats()
    mirror.drop(tokens, 7, 50)
    after = mirror.cache.stats()
    assert after.moved_bytes == table.moved_bytes
    assert len(tokens.sequence) == 57
    assert after.dead_rows == 2 * 43 - 2 * 32, "whole pages are freed, rows of cut pages stay behind"
    mirror.step([tokens], [1])
    mirror.drop(tokens, 0, 58)
    assert len(tokens.sequence) == 0
    mirror.step([tokens], [3])


def test_where_new_tokens_go_on(mirror: Mirror) -> None:
    """After `drop` as if nothing had been dropped, after `truncate` behind what is left, and at 0 after `truncate(0)`."""
    tokens = mirror.create()
    mirror.step([tokens], [20])
    changes: list[tuple[Callable[[], None], int]] = [
        (lambda: mirror.drop(tokens, 15, 20), 20),
        (lambda: mirror.truncate(tokens, 15), 20),
        (lambda: mirror.truncate(tokens, 14), 14),
        (lambda: mirror.drop(tokens, 0, 14), 14),
        (lambda: mirror.truncate(tokens, 0), 0),
    ]
    for change, position in changes:
        change()
        with mirror.cache.step([tokens.sequence], [2]) as step:
            assert step.positions.tolist() == [position, position + 1]
            step.rollback()


@pytest.mark.parametrize("accepted", [0, 1, 3, 4, 5, 19, 20, 21, 40])
def test_speculative_accept_and_reject_across_page_borders(mirror: Mirror, accepted: int) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [12])
    before = used(mirror)
    mirror.step([tokens], [40], accepted=[accepted])
    assert len(tokens.sequence) == 12 + accepted
    pages = -(-(12 + accepted) // 16)
    assert used(mirror) - before == 2 * (pages - 1)
    mirror.look()
    mirror.step([tokens], [17])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64])
def test_truncation_and_growth(mirror: Mirror, length: int) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [64])
    fork = mirror.fork(tokens)
    mirror.truncate(tokens, length)
    mirror.step([tokens], [5])
    mirror.truncate(fork, max(0, length - 1))
    mirror.step([fork, tokens], [20, 1])
    mirror.look()


def test_an_exception_rolls_back_to_before_reserve(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [10])
    child = mirror.fork(tokens)
    before = settled(mirror.cache)
    with (
        pytest.raises(KeyboardInterrupt),
        mirror.cache.step([tokens.sequence, child.sequence], [30, 5]) as step,
    ):
        step.append(0, *[np.full((35, 2, 16), np.nan, np.float32)] * 2)
        raise KeyboardInterrupt
    assert settled(mirror.cache) == before
    mirror.look()


def test_a_step_that_is_rolled_back_has_not_been(mirror: Mirror) -> None:
    tokens = mirror.create()
    mirror.step([tokens], [10])
    before = settled(mirror.cache)
    with mirror.cache.step([tokens.sequence], [30]) as step:
        step.append(0, *[np.full((30, 2, 16), np.nan, np.float32)] * 2)
        step.rollback()
        with pytest.raises(pagoda.InvalidArgument, match="step = closed"):
            step.rollback()
        tokens.sequence.fork().release()
    assert settled(mirror.cache) == before
    mirror.step([tokens], [7])
    mirror.look()


def test_a_forgotten_step_rolls_back_and_a_forgotten_sequence_is_released(mirror: Mirror) -> None:
    sequence = mirror.cache.create()
    mirror.cache.step([sequence], [10]).__enter__()
    gc.collect()
    tokens = mirror.create()
    mirror.step([tokens], [1])
    assert len(sequence) == 0
    with mirror.cache.step([sequence], [16]) as step:
        for index in range(2):
            step.append(index, *[np.zeros((16, 2, 16), np.float32)] * 2)
    blocks = used(mirror)
    del sequence, step
    gc.collect()
    mirror.step([tokens], [1])
    assert used(mirror) == blocks - 2


@pytest.mark.parametrize("kind", ["create", "fork"])
def test_ctrl_c_at_any_instruction_leaves_no_sequence_without_a_handle(mirror: Mirror, kind: str) -> None:
    cache, tokens = mirror.cache, mirror.create()
    mirror.step([tokens], [20])
    call = cache.create if kind == "create" else tokens.sequence.fork
    strays = 0
    for after in count():
        came = interrupted(call, after)
        strays += cache.stats().sequences - 1
        mirror.step([tokens], [1])
        assert cache.stats().sequences == 1
        if not came:
            break
    assert strays > 1, "it came between the making of a sequence and its handle"


def test_ctrl_c_anywhere_in_a_step(mirror: Mirror, on_cpu: bool) -> None:
    """KeyboardInterrupt is raised, the step took place or it did not, and the next one succeeds."""
    tokens, cache, after, came = mirror.create(), mirror.cache, 0, True
    mirror.step([tokens], [20])
    kept, rows, q = len(tokens), np.ones((2, 2, 16), np.float16), np.ones((2, 4, 16), np.float32)

    def step() -> None:
        with cache.step([tokens.sequence], [2]) as step:
            for index in range(2):
                step.forward(index, q, rows, rows)
            step.commit(accepted=[1])

    while came:
        came = interrupted(step, after)
        # A step that Ctrl-C left open is rolled back.
        with cache.step([tokens.sequence], [0]):
            pass
        assert len(tokens.sequence) in (kept, kept + 1)
        tokens.sequence.truncate(kept)
        cache.audit()
        mirror.look()
        after += 1 if on_cpu else 1 + after // 30
    assert after > 200


def test_tables_name_the_blocks_that_attention_reads(mirror: Mirror) -> None:
    a, b = mirror.create(), mirror.create()
    mirror.step([a, b], [33, 16])
    pair = [a.sequence, b.sequence]
    with mirror.cache.step(pair, [1, 2]) as step:
        table = step.table(0)
        assert step.table(1).block_table.shape == (2, 3)
        assert table.block_table.dtype == np.int32
        assert (table.block_table[1] >= 0).tolist() == [True, True, False]
        offset = np.array([33, 16, 17])
        blocks = table.block_table[[0, 1, 1], offset // 16]
        assert table.slot_mapping.tolist() == (blocks.astype(np.int64) * 16 + offset % 16).tolist()
        size = mirror.cache.stats().block_bytes[0]
        addresses = table.pointers[table.block_table >= 0]
        assert set((addresses - addresses.min()) % size) == {0}
        assert table.kv_indptr.tolist() == [0, 3, 5]
        assert table.kv_indices.tolist() == table.block_table[table.block_table >= 0].tolist()
        assert table.kv_last_page_len.tolist() == [2, 2]
        with pytest.raises(ValueError, match="read-only"):
            table.block_table[0, 0] = 1
        step.commit(accepted=[0, 0])
    mirror.cache.demote(a.sequence, (0, 16)).wait()
    with mirror.cache.step(pair, [0, 0]) as step:
        table = step.table(0)
        assert table.block_table[0].tolist()[0] == -1
        assert table.pointers[0, 0] != 0
        with pytest.raises(pagoda.InvalidArgument, match="on the device"):
            _ = table.csr
    cut = mirror.create()
    mirror.step([cut], [64])
    mirror.drop(b, 0, 3)
    mirror.drop(cut, 16, 32)
    for tokens in (b, cut):
        with (
            mirror.cache.step([tokens.sequence], [0]) as step,
            pytest.raises(pagoda.InvalidArgument, match="one whole span"),
        ):
            _ = step.table(0).kv_indices


def test_rows_of_a_table_are_of_whoever_is_there_now(mirror: Mirror) -> None:
    """Sequences of different lengths change places, shrink and leave; entries after their pages are padding."""
    long, short, middle = (mirror.create() for _ in range(3))
    mirror.step([long, short, middle], [200, 5, 60])

    def check(*batch: Tokens) -> None:
        with mirror.cache.step([tokens.sequence for tokens in batch], [0] * len(batch)) as step:
            table = step.table(0)
        pages = [-(-len(tokens.sequence) // 16) for tokens in batch]
        there = np.arange(max(pages)) < np.array(pages)[:, None]
        assert ((table.block_table >= 0) == there).all()
        assert ((table.pointers > 0) == there).all()

    check(long, short, middle)
    check(short, middle, long)
    check(middle, long)
    mirror.truncate(long, 20)
    check(middle, long)
    mirror.step([short], [300])
    check(short, long, middle)
    check(long, middle, short)


def test_a_tree_of_forks_over_long_prefixes(mirror: Mirror) -> None:
    """All share a prompt, and some a document after it; then tails are truncated, pages move and branches end."""
    prompt = mirror.create()
    mirror.step([prompt], [450])
    document = mirror.fork(prompt)
    mirror.step([document], [520])
    branches = [mirror.fork(prompt) for _ in range(2)] + [mirror.fork(document) for _ in range(3)]
    batch = [branches[0], document, branches[2], prompt, *branches[3:], branches[1]]
    for step in range(4):
        mirror.step(batch, [1 + (index + step) % 3 for index in range(len(batch))])
    mirror.truncate(branches[3], 777)
    mirror.step(batch, [1] * len(batch))
    mirror.truncate(branches[0], 100)
    mirror.step(batch, [2, 0, 1, 1, 0, 1, 1])
    mirror.step(batch, [1] * len(batch))
    mirror.drop(branches[4], 20, 400)
    mirror.step(batch, [1] * len(batch))
    mirror.cache.demote(branches[2].sequence).wait()
    mirror.step(batch[::-1], [1] * len(batch))
    mirror.release(document)
    batch.remove(document)
    mirror.step(batch, [1] * len(batch))
