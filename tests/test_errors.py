"""Invalid input: a typed error that names the argument, and an unchanged cache."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pagoda
import pytest
from mirror import Mirror, layer, settled
from pagoda import device
from pagoda.device import cuda

SPEC = pagoda.ModelSpec(layers=[layer()])


def rows(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 48}, "page_size"),
        ({"page_size": 1 << 13}, "page_size"),
        ({"page_size": 64.0}, "page_size"),
        ({"k_dtype": "f15"}, "k_dtype"),
        ({"v_dtype": ""}, "v_dtype"),
        ({"device_memory": 100}, "device_memory"),
        ({"device_memory": -1}, "device_memory"),
        ({"device_memory": float("nan")}, "device_memory"),
        ({"device_memory": "lots"}, "device_memory"),
        ({"host_memory": 100}, "host_memory"),
        ({"host_memory": 1 << 63}, "host_memory"),
        ({"threads": 0}, "threads"),
        ({"threads": 1 << 20}, "threads"),
        ({"threads": True}, "threads"),
        ({"k_dtype": None}, "k_dtype"),
        ({"v_dtype": np.float16}, "v_dtype"),
        ({"center": 5}, "center"),
        ({"disk": "", "disk_memory": "1MiB"}, "disk = ''"),
        ({"disk": 5, "disk_memory": "1MiB"}, "disk = 5"),
    ],
)
def test_a_cache_that_cannot_be(options: dict[str, Any], named: str) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=named):
        pagoda.Cache(SPEC, **options)


@pytest.mark.parametrize(("head_dim", "most"), [(16, 1 << 41), (1024, 1 << 45)], ids=["blocks", "extents"])
@pytest.mark.parametrize("tier", ["device_memory", "host_memory"])
def test_a_tier_of_more_bytes_than_the_core_can_count(tier: str, head_dim: int, most: int) -> None:
    """2**30 blocks of 2 KiB, or 2**20 extents of 32 MiB."""
    spec, sizes = pagoda.ModelSpec(layers=[layer(head_dim=head_dim)]), {"device_memory": 1 << 20, tier: most + 1}
    least = "0, or from" if tier == "host_memory" else "from"
    with pytest.raises(pagoda.InvalidArgument, match=f"{tier} = {most + 1}: {least} .* to {most}$"):
        pagoda.Cache(spec, page_size=16, **sizes)  # type: ignore[arg-type]


def test_a_float_that_is_kept_as_it_is_given_is_none_of_numpy() -> None:
    """Only its type is wrong, so the error asks for another type."""
    with pytest.raises(pagoda.InvalidArgument, match=r"scale = np\.float32\(0\.5\): an int or float\b"):
        layer(scale=np.float32(0.5))


@pytest.mark.parametrize("spec", ["qwen3-8b", None, list(SPEC.layers)])
def test_what_no_spec_is(spec: Any) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=r"spec = .*ModelSpec\.preset"):
        pagoda.Cache(spec)


def test_a_layer_that_no_kernel_does_is_named() -> None:
    spec = pagoda.ModelSpec([layer(), layer(num_q_heads=258)])
    with pytest.raises(pagoda.InvalidArgument, match=r"layers\[1\]: num_q_heads is 258 .* 1 to 128 times"):
        pagoda.Cache(spec)


def test_what_no_device_is() -> None:
    names: list[Any] = ["tpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1", "", None, 0]
    for name in names:
        with pytest.raises(pagoda.InvalidArgument, match="device = "):
            pagoda.Cache(SPEC, device=name)


def test_a_gpu_that_is_not_there() -> None:
    missing = cuda.lack()
    if missing is None or device.AUTO != "cpu":
        pytest.skip("there is a device")
    with pytest.raises(pagoda.BackendUnavailable, match=re.escape(f"device = cuda: {missing.found}; {missing.remedy}")):
        pagoda.Cache(SPEC, device="cuda")


SHARED = pagoda.ModelSpec(layers=[layer(sinks=True), layer(num_q_heads=2, kv_owner=0)])


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("layer = 1: a layer that stores K and V", lambda step: step.append(1, rows(2, 2, 16), rows(2, 2, 16))),
        ("layer = 1: a layer that stores K and V", lambda step: step.forward(1, rows(2, 2, 16), rows(2, 2, 16))),
        ("layer = 0: a layer that this step", lambda step: step.attend(1, rows(2, 2, 16))),
        ("layer = 0: appended to before", lambda step: step.commit()),
        ("k = None", lambda step: step.forward(0, rows(2, 4, 16), None, rows(2, 2, 16))),
    ],
)
def test_layers_that_read_the_pages_of_others(named: str, call: Callable[[pagoda.Step], object]) -> None:
    with pagoda.Cache(SHARED, device_memory="1MiB", host_memory=0, threads=1) as cache:
        sequence = cache.create()
        with pytest.raises(pagoda.InvalidArgument, match=named), cache.step([sequence], [2]) as step:
            call(step)
        with cache.step([sequence], [2]) as step:
            step.append(0, rows(2, 2, 16), rows(2, 2, 16))
            np.testing.assert_array_equal(step.forward(1, rows(2, 2, 16)), rows(2, 2, 16))
            assert (step.table(1).slot_mapping == step.table(0).slot_mapping).all()
        cache.audit()


def test_a_sequence_is_in_a_step_once() -> None:
    with pagoda.Cache(SHARED, threads=1) as cache:
        a, b = cache.create(), cache.create()
        with pytest.raises(pagoda.InvalidArgument, match=rf"^batch\[2\] = <Sequence {a.id}>: each sequence once$"):
            cache.step([a, b, a], [1, 1, 1])
        with pytest.raises(pagoda.InvalidArgument, match=rf"^sequences\[1\] = <Sequence {b.id}>: each sequence once$"):
            cache.batch([b, b, a])
        with cache.step([a, b], [0, 0]):
            pass
        cache.audit()


def test_sink_logits_are_for_layers_with_sinks() -> None:
    with pagoda.Cache(SHARED, threads=1) as cache, cache.step([cache.create()], [2]) as step:
        step.append(0, rows(2, 2, 16), rows(2, 2, 16))
        for wrong in (None, rows(3), rows(1, 4), rows(4, dtype=np.float64), rows(4, dtype=np.float16)):
            with pytest.raises(pagoda.InvalidArgument, match="sink_logits = "):
                step.attend(0, rows(2, 4, 16), sink_logits=wrong)
        with pytest.raises(pagoda.InvalidArgument, match="sink_logits = an array: None"):
            step.attend(1, rows(2, 2, 16), sink_logits=rows(2))
        step.attend(0, rows(2, 4, 16), sink_logits=rows(4))


def test_values_of_a_layer_that_stores_none() -> None:
    alias = pagoda.ModelSpec(layers=[layer(v_alias=True)])
    with pagoda.Cache(alias, device_memory="1MiB", host_memory=0) as cache, cache.step([cache.create()], [2]) as step:
        with pytest.raises(pagoda.InvalidArgument, match="v = an array"):
            step.append(0, rows(2, 2, 16), rows(2, 2, 16))
        step.append(0, rows(2, 2, 16))


def overlapping() -> Any:
    return np.lib.stride_tricks.as_strided(rows(16), (2, 4, 16), (0, 0, 4))


def packed() -> Any:
    """Rows in records with one more byte: an odd stride."""
    return np.zeros(2, np.dtype([("rows", "f4", (2, 16)), ("byte", "u1")]))["rows"]


def odd() -> Any:
    """Rows at an odd address."""
    return np.zeros(2 * 2 * 16 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 2, 16)


Call = Callable[[pagoda.Cache, pagoda.Sequence, pagoda.Step], object]

CALLS: list[tuple[str, Call]] = [
    ("k = shape", lambda c, s, step: step.append(0, rows(3, 2, 16), rows(2, 2, 16))),
    ("k = shape", lambda c, s, step: step.append(0, rows(2, 2, 8), rows(2, 2, 16))),
    ("v = shape", lambda c, s, step: step.append(0, rows(2, 2, 16), rows(2, 16))),
    ("v = None", lambda c, s, step: step.append(0, rows(2, 2, 16))),
    ("k = dtype", lambda c, s, step: step.append(0, rows(2, 2, 16, dtype=np.float64), rows(2, 2, 16))),
    ("k = dtype", lambda c, s, step: step.append(0, rows(2, 2, 16, dtype=np.uint16), rows(2, 2, 16))),
    ("k = dtype", lambda c, s, step: step.append(0, rows(2, 2, 16, dtype=np.dtype(">f4")), rows(2, 2, 16))),
    ("dtype", lambda c, s, step: step.append(0, rows(2, 2, 16), rows(2, 2, 16), dtype="int4")),
    ("k = strides", lambda c, s, step: step.append(0, rows(2, 2, 32)[:, :, ::2], rows(2, 2, 16))),
    ("k = strides", lambda c, s, step: step.append(0, packed(), rows(2, 2, 16))),
    ("k = address", lambda c, s, step: step.append(0, odd(), rows(2, 2, 16))),
    ("layer = 1", lambda c, s, step: step.append(1, rows(2, 2, 16), rows(2, 2, 16))),
    ("layer = -1", lambda c, s, step: step.append(-1, rows(2, 2, 16), rows(2, 2, 16))),
    ("layer = -1", lambda c, s, step: step.attend(-1, rows(2, 4, 16), out=rows(2, 4, 16))),
    ("layer = 18446744073709551616", lambda c, s, step: step.table(1 << 64)),
    ("layer = 0", lambda c, s, step: step.attend(0, rows(2, 4, 16))),
    ("layer = 0", lambda c, s, step: step.commit()),
    ("q = shape", lambda c, s, step: step.forward(0, rows(2, 3, 16), rows(2, 2, 16), rows(2, 2, 16))),
    ("q = list", lambda c, s, step: step.attend(0, [[1.0]])),  # type: ignore[call-overload]
    ("out = shape", lambda c, s, step: step.attend(0, rows(2, 4, 16), out=rows(2, 4, 8))),
    ("out = dtype", lambda c, s, step: step.attend(0, rows(2, 4, 16), out=rows(2, 4, 16, dtype=np.float16))),
    ("out = strides", lambda c, s, step: step.attend(0, rows(2, 4, 16), out=overlapping())),
    ("step = open", lambda c, s, step: c.step([s], [1]).__enter__()),
    ("step = open", lambda c, s, step: step.__enter__()),
    ("sequence", lambda c, s, step: s.release()),
    ("sequence", lambda c, s, step: s.truncate(0)),
    ("sequence", lambda c, s, step: s.drop(0, 1)),
    ("sequence", lambda c, s, step: s.fork()),
    ("sequence", lambda c, s, step: c.execute(c.plan(s, "host"))),
    ("accepted", lambda c, s, step: step.commit(accepted=[1, 1])),
    ("accepted", lambda c, s, step: step.commit(accepted=[[1], [1, 1]])),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), CALLS)
def test_refused_inside_a_step(named: str, call: Call) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [40])
        before = settled(cache)
        with pytest.raises(pagoda.InvalidArgument, match=named), cache.step([tokens.sequence], [2]) as step:
            if named.startswith(("accepted", "out", "q = list")):
                step.append(0, rows(2, 2, 16), rows(2, 2, 16))
            call(cache, tokens.sequence, step)
        assert settled(cache) == before
        mirror.look()


def test_a_step_that_cannot_be_committed_ends_with_its_block() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [40])
        with pytest.raises(pagoda.InvalidArgument, match="appended to before commit"):
            with cache.step([tokens.sequence], [2]) as step:
                pass
        mirror.look()
        assert step.batch.sequences == (tokens.sequence,), "nor does it matter who holds the step"


def test_a_step_that_has_ended_does_nothing_to_the_next() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        one, other = cache.create(), cache.create()
        k = rows(2, 2, 16)
        with cache.step([one], [2]) as ended:
            ended.append(0, k, k)
            table = ended.table(0)
        with cache.step([other], [2]) as step:
            calls: list[Callable[[], object]] = [
                lambda: ended.append(0, k, k),
                lambda: ended.attend(0, rows(2, 4, 16), out=rows(2, 4, 16)),
                lambda: ended.forward(0, rows(2, 4, 16), k, k),
                lambda: ended.table(0),
                lambda: table.csr,
                lambda: ended.positions,
                lambda: ended.cu_seqlens,
                ended.commit,
            ]
            for call in calls:
                with pytest.raises(pagoda.InvalidArgument, match="step = closed"):
                    call()
            step.append(0, k, k)
        assert (len(one), len(other)) == (2, 2)


def test_a_step_that_is_entered_twice_goes_on() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        sequence = cache.create()
        with cache.step([sequence], [2]) as step:
            with pytest.raises(pagoda.InvalidArgument, match="step = open"), step:
                pass
            step.append(0, rows(2, 2, 16), rows(2, 2, 16))
        assert len(sequence) == 2
        sequence.truncate(0)


def test_a_step_that_is_not_open_may_be_entered() -> None:
    """For the first time, again once there is room, and again after an exception."""
    with pagoda.Cache(SPEC, page_size=16, device_memory="64KiB", host_memory=0, threads=1) as cache:
        sequence, large, k = cache.create(), cache.create(), rows(2, 2, 16)
        step = cache.step([sequence], [2])

        def refused() -> None:
            calls: list[Callable[[], object]] = [
                lambda: step.append(0, k, k),
                lambda: step.attend(0, rows(2, 4, 16)),
                lambda: step.table(0),
                lambda: step.positions,
                lambda: step.cu_seqlens,
                step.commit,
                step.rollback,
            ]
            for call in calls:
                with pytest.raises(pagoda.InvalidArgument, match="step = closed"):
                    call()

        refused()
        with cache.step([large], [512]) as filled:
            filled.append(0, rows(512, 2, 16), rows(512, 2, 16))
        with pytest.raises(pagoda.OutOfBlocks), step:
            pass
        refused()
        large.release()
        with pytest.raises(KeyError), step:
            raise KeyError
        refused()
        with step:
            step.append(0, k, k)
        refused()
        assert len(sequence) == 2


def test_sixteen_bit_integers_are_what_dtype_says_and_nothing_else_is() -> None:
    bits = np.full((2, 2, 16), 0x3F80, np.uint16)
    with pagoda.Cache(SPEC, threads=1) as cache, cache.step([cache.create()], [2]) as step:
        for wrong in ("f32", "f16", "", 5, b"bf16"):
            with pytest.raises(pagoda.InvalidArgument, match=f"dtype = {wrong!r}: None, or"):
                step.append(0, bits, bits, dtype=wrong)  # type: ignore[arg-type]
        np.testing.assert_array_equal(step.forward(0, rows(2, 4, 16), bits, bits, dtype="bf16"), np.ones((2, 4, 16)))


def test_mypy_knows_that_a_log_sum_exp_comes_in_a_pair() -> None:
    with pagoda.Cache(SPEC, threads=1) as cache, cache.step([cache.create()], [2]) as step:
        step.append(0, rows(2, 2, 16), rows(2, 2, 16))
        pair = step.attend(0, np.zeros((2, 4, 16), np.float32), return_lse=True)
        with pytest.raises(AttributeError):
            _ = pair.shape  # type: ignore[attr-defined]
        assert [part.shape for part in pair] == [(2, 4, 16), (2, 4)]


def test_an_error_calls_a_sequence_what_it_calls_itself() -> None:
    with pagoda.Cache(SPEC, threads=1) as cache:
        cache.create().release()
        sequence = cache.create()
        said = [rf"sequence = {sequence.id}:", rf"sequence {sequence.id}$"]
        assert repr(sequence) == f"<Sequence {sequence.id}>"
        batch = cache.batch([sequence])
        with cache.step(batch, [2]) as step:
            step.append(0, rows(2, 2, 16), rows(2, 2, 16))
            with pytest.raises(pagoda.InvalidArgument, match=said[0]):
                sequence.truncate(0)
            with pytest.raises(pagoda.InvalidArgument, match=said[1]):
                step.commit([3])
        sequence.release()
        with pytest.raises(pagoda.UseAfterRelease, match=said[0]):
            cache.step(batch, [1]).__enter__()


def test_what_callers_hold_says_what_it_is() -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        sequence = cache.create()
        step = cache.step([sequence], [40])
        assert repr(step) == "<Step of 1 sequence(s), closed>"
        with step:
            assert repr(step) == "<Step of 1 sequence(s), open>"
            assert repr(step.table(0)) == "<Table of layer 0>"
        plan = cache.plan(sequence, "host")
        ticket = cache.execute(plan)
        batch = cache.batch([sequence])
    for held in (plan, ticket):
        assert repr(held) == f"<{type(held).__name__} of 3 page(s)>"
    assert repr(batch) == "<Batch of 1 sequence(s)>"
    assert repr(cache) == "<Cache of 1 layer(s)>"
    assert repr(pagoda.Cache.__new__(pagoda.Cache)) == "<Cache of nothing>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda copied: copied.__name__)
def test_what_has_an_end_is_not_copied(copied: Callable[[object], object]) -> None:
    """A copy would not know when the original ends."""
    with pagoda.Cache(SPEC, threads=1) as cache, cache.create() as sequence:
        for held in (cache, sequence, cache.step([sequence], [1])):
            with pytest.raises(TypeError, match=rf"^{type(held).__name__}: .* Sequence\.fork .* Cache\.save"):
                copied(held)


def test_out_must_be_writeable_and_apart_from_q() -> None:
    with pagoda.Cache(SPEC, threads=1) as cache, cache.step([cache.create()], [2]) as step:
        step.append(0, rows(2, 2, 16), rows(2, 2, 16))
        q = rows(2, 4, 16)
        frozen = rows(2, 4, 16)
        frozen.setflags(write=False)
        for out in (frozen, q, q[::-1]):
            with pytest.raises(pagoda.InvalidArgument, match="out"):
                step.attend(0, q, out=out)
        backwards = rows(2, 4, 16)[::-1, ::-1]
        assert step.attend(0, q, out=backwards) is backwards


def test_out_may_have_its_rows_anywhere_but_in_one_another_or_in_q() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 16), np.float32) for heads in (4, 2, 2))
    with pagoda.Cache(SPEC, threads=1) as cache, cache.step([cache.create()], [2]) as step:
        right = step.forward(0, q, k, v)
        four, pair = np.concatenate([q, q]), np.concatenate([q.ravel(), q.ravel()])
        for out in (rows(4, 2, 16).transpose(1, 0, 2), four[2:]):
            step.attend(0, four[:2], out=out)
            np.testing.assert_array_equal(out, right)
        step.attend(0, pair[:128].reshape(2, 4, 16), out=pair[128:].reshape(2, 4, 16))
        np.testing.assert_array_equal(pair[128:].reshape(2, 4, 16), right)
        next_token = np.lib.stride_tricks.as_strided(rows(80), (2, 4, 16), (64, 64, 4))
        for like, out, limit in (
            (q, next_token, "rows that do not overlap"),
            (four[:2], four[2:0:-1], "memory of its own"),
            (pair[:128].reshape(2, 4, 16), pair[127:255].reshape(2, 4, 16), "memory of its own"),
        ):
            before = out.copy()
            with pytest.raises(pagoda.InvalidArgument, match=f"out = .*{limit}"):
                step.attend(0, like, out=out)
            np.testing.assert_array_equal(out, before)


def test_a_single_token_has_no_stride() -> None:
    v = np.arange(32, dtype=np.float32).reshape(1, 2, 16)
    with pagoda.Cache(SPEC, threads=1) as cache, cache.step([cache.create()], [1]) as step:
        out = rows(4, 16)
        step.forward(0, rows(1, 4, 16), rows(1, 2, 16), v, out=out[None])
        np.testing.assert_array_equal(out, v[0].repeat(2, axis=0))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (pagoda.InvalidArgument, lambda c, s: s.truncate(41)),
        (pagoda.InvalidArgument, lambda c, s: s.truncate(-1)),
        (pagoda.InvalidArgument, lambda c, s: s.truncate(1.5)),
        (pagoda.InvalidArgument, lambda c, s: s.truncate(1 << 64)),
        (pagoda.InvalidArgument, lambda c, s: s.drop(3, 2)),
        (pagoda.InvalidArgument, lambda c, s: s.drop(0, 41)),
        (pagoda.InvalidArgument, lambda c, s: c.plan(s, "moon")),
        (pagoda.InvalidArgument, lambda c, s: c.plan(s, "disk")),
        (pagoda.InvalidArgument, lambda c, s: c.plan(s, "host", (0, 41))),
        (pagoda.InvalidArgument, lambda c, s: c.plan(s, "host", (2, 1))),
        (pagoda.InvalidArgument, lambda c, s: c.plan(s, "host", layers=[1])),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [1, 2]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s, s], [1, 2]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [-1]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [1 << 40]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [1 << 31]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [0.5]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [float("nan")]).__enter__()),
        (pagoda.InvalidArgument, lambda c, s: c.step(["s"], [1])),
        (pagoda.InvalidArgument, lambda c, s: c.step([s], [1], stream=1)),
        (pagoda.OutOfBlocks, lambda c, s: c.step([s], [1 << 20]).__enter__()),
    ],
)
def test_refused_between_steps(error: type[Exception], call: Callable[[Any, Any], object]) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [40])
        with pytest.raises(error):
            call(cache, tokens.sequence)
        mirror.look()


@pytest.mark.parametrize("call", [lambda c, s: c.save(s, "name"), lambda c, s: c.load("name")])
def test_nothing_is_kept_without_a_disk(call: Callable[[Any, Any], object]) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        mirror = Mirror(cache)
        tokens = mirror.create()
        mirror.step([tokens], [40])
        with pytest.raises(pagoda.InvalidArgument):
            call(cache, tokens.sequence)
        mirror.look()


def test_released_foreign_and_closed() -> None:
    with pagoda.Cache(SPEC, threads=1) as cache, pagoda.Cache(SPEC, threads=1) as other:
        sequence = cache.create()
        with pytest.raises(pagoda.InvalidArgument, match="of this cache"):
            other.step([sequence], [1])
        with pytest.raises(pagoda.InvalidArgument, match="of this cache"):
            other.plan(sequence, "host")
        with pytest.raises(pagoda.InvalidArgument, match="of this cache"):
            other.step(cache.batch([sequence]), [1])
        with pytest.raises(pagoda.InvalidArgument, match="of this cache"):
            other.execute(cache.plan(sequence, "host"))
        sequence.release()
        calls: list[Callable[[], object]] = [sequence.release, sequence.fork, sequence.__len__]
        calls.append(lambda: cache.step([sequence], [1]))
        for call in calls:
            with pytest.raises(pagoda.UseAfterRelease):
                call()
        batch = cache.batch([kept := cache.create()])
        kept.release()
        with pytest.raises(pagoda.UseAfterRelease):
            cache.step(batch, [1]).__enter__()
        cache.audit()
    for closed in (cache.create, cache.audit, cache.stats):
        with pytest.raises(pagoda.UseAfterRelease):
            closed()
    cache.close()


def test_a_list_that_changes_while_it_is_checked_brings_in_no_foreign_sequence() -> None:
    """Both caches have a sequence with this number."""

    class Changing(list[Any]):
        def __iter__(self) -> Any:
            yield from list.__iter__(self)
            self[:] = [foreign]

    with pagoda.Cache(SPEC, threads=1) as cache, pagoda.Cache(SPEC, threads=1) as other:
        own, foreign = cache.create(), other.create()
        batch = cache.batch(Changing([own]))
        assert batch.sequences == (own,)
        with pytest.raises(pagoda.InvalidArgument, match="of this cache"):
            cache.batch(Changing([foreign]))


def test_out_of_blocks_says_how_many_and_changes_nothing() -> None:
    spec = pagoda.ModelSpec(layers=[layer(), layer(window=8)])
    size = 16 * 2 * 2 * 16 * 2
    with pagoda.Cache(spec, page_size=16, device_memory=20 * size, host_memory=0, threads=1) as cache:
        a, b = cache.create(), cache.create()
        before = settled(cache)
        said = rf"tier device lacks 4 block\(s\), {4 * size} bytes; layer group 1 is the first that is short"
        with pytest.raises(pagoda.OutOfBlocks, match=said) as caught:
            cache.step([a, b], [16 * 8, 16 * 4]).__enter__()
        assert (caught.value.blocks_short, caught.value.bytes_short) == (4, 4 * size)
        assert (caught.value.tier, caught.value.layer_group, caught.value.draining) == ("device", 1, 0)
        # Both groups are short: the first by 1 page, the other by 5.
        with pytest.raises(pagoda.OutOfBlocks, match=r"lacks 6 block.*; layer group 0 is the first") as caught:
            cache.step([a, b], [16 * 8, 16 * 5]).__enter__()
        assert (caught.value.blocks_short, caught.value.layer_group) == (6, 0)
        with pytest.raises(pagoda.OutOfBlocks) as caught:
            cache.step([a, b], [1 << 30, (1 << 30) - 1]).__enter__()
        assert caught.value.blocks_short == 2 * 2 * (1 << 26) - 20
        with pytest.raises(
            pagoda.InvalidArgument, match="new_tokens = 4294967294: at most 2147483647 of all sequences"
        ):
            cache.step([a, b], [(1 << 31) - 1] * 2).__enter__()
        for count in (-1, 1 << 32):
            with pytest.raises(pagoda.InvalidArgument, match=rf"new_tokens = {count}: from 0 to 2147483647$"):
                cache.step([a, b], [1, count]).__enter__()
        assert settled(cache) == before
        cache.audit()


def test_a_refused_step_keeps_nothing_alive() -> None:
    """Its error leaves no reference cycle: what the caller drops is freed at once."""
    spec = pagoda.ModelSpec(layers=[layer()])
    with pagoda.Cache(spec, page_size=16, device_memory="64KiB", host_memory=0, threads=1) as cache:

        def refused() -> weakref.ref[pagoda.Sequence]:
            sequence = cache.create()
            try:
                with cache.step([sequence], [10_000]):
                    pytest.fail("there is no room")
            except pagoda.OutOfBlocks:
                return weakref.ref(sequence)

        gc.disable()
        try:
            assert refused()() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_wait_of_no_time_that_there_is(timeout: float) -> None:
    with pagoda.Cache(SPEC, page_size=16, device_memory="1MiB", host_memory="1MiB", threads=1) as cache:
        tokens = Mirror(cache).create()
        with pytest.raises(pagoda.InvalidArgument, match="timeout"):
            cache.demote(tokens.sequence).wait(timeout)
