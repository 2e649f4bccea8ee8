"""Sequences many times longer than the device tier, up to a million tokens, each fully attended to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from pagoda.planner import Planner

HEADS, DIM = 4, 64
LAYERS = 2
TOKEN_BYTES = LAYERS * 2 * DIM * 2
CHUNK = 4096
SPEC = pagoda.ModelSpec(
    layers=[pagoda.AttentionLayer(num_q_heads=HEADS, num_kv_heads=1, head_dim=DIM, scale=1.0)] * LAYERS
)

Rows = npt.NDArray[np.float16]


def needles(tokens: int) -> list[int]:
    """Positions of the keys that queries look for: at both ends, and around borders of pages, runs and tiers."""
    return [0, 63, 64, 4095, 4096, tokens // 10, tokens // 3, tokens // 2 + 1, tokens - 4097, tokens - 1]


def keys(start: int, stop: int, found: list[int]) -> Rows:
    """Zeros, except needles: needle i has a 2 in element i."""
    rows = np.zeros((stop - start, 1, DIM), np.float16)
    for number, place in enumerate(found):
        if start <= place < stop:
            rows[place - start, 0, number] = 2
    return rows


def values(start: int, stop: int) -> Rows:
    """Multiples of 1/16, exact in f16, different in every element, with a known sum."""
    place, element = np.arange(start, stop)[:, None], np.arange(DIM)[None, :]
    return ((place * (element + 1) % 97 - 48) / 16).astype(np.float16)[:, None]


def fill(cache: pagoda.Cache, tokens: int) -> pagoda.Sequence:
    """A sequence filled without computing attention."""
    sequence, found = cache.create(), needles(tokens)
    for start in range(0, tokens, CHUNK):
        stop = min(tokens, start + CHUNK)
        with cache.step([sequence], [stop - start]) as step:
            for layer in range(LAYERS):
                step.append(layer, keys(start, stop, found), values(start, stop))
    return sequence


def decode(cache: pagoda.Cache, sequence: pagoda.Sequence) -> list[npt.NDArray[np.float32]]:
    """Three steps of one token with V = 0, each looking for other needles and at everything; their tokens are rejected."""
    outputs = []
    for wanted in (0, 4, 8):
        q = np.zeros((1, HEADS, DIM), np.float32)
        q[0, 0, wanted], q[0, 1, wanted + 1], q[0, 2, wanted : wanted + 2] = 6, 4, 2
        with cache.step([sequence], [1]) as step:
            zero = np.zeros((1, 1, DIM), np.float16)
            outputs += [step.forward(layer, q, zero, zero) for layer in range(LAYERS)]
            step.commit(accepted=[0])
    return outputs


def expected(tokens: int) -> list[npt.NDArray[np.float64]]:
    """The expected result of `decode`: every token weighs 1, except a head's needle."""
    total = np.zeros(DIM)
    for start in range(0, tokens, 1 << 16):
        total += values(start, min(tokens, start + (1 << 16))).astype(np.float64).sum((0, 1))
    outputs = []
    for wanted in (0, 4, 8):
        rows = np.empty((1, HEADS, DIM))
        for head, (numbers, score) in enumerate(
            [([wanted], 12), ([wanted + 1], 8), ([wanted, wanted + 1], 4), ([], 0)]
        ):
            extra = np.exp(score) - 1
            places = [needles(tokens)[number] for number in numbers]
            weighed = sum((values(place, place + 1)[0, 0].astype(np.float64) * extra for place in places), total)
            rows[0, head] = weighed / (tokens + 1 + extra * len(places))
        outputs += [rows] * LAYERS
    return outputs


def budgets(tokens: int, device: float, host: float, disk: Path | None) -> dict[str, Any]:
    """Memory options: shares of a sequence's bytes on device and host, the rest on disk."""
    whole = tokens * TOKEN_BYTES
    chosen: dict[str, Any] = {"device_memory": int(whole * device) + (4 << 20), "host_memory": int(whole * host)}
    return chosen if disk is None else chosen | {"disk": disk, "disk_memory": 2 * whole}


@pytest.mark.parametrize(("device", "host", "disk"), [(0.1, 1.1, False), (0.1, 0.3, True), (0.05, 0.0, True)])
def test_ram_and_disk_offload_equal_all_resident(tmp_path: Path, device: float, host: float, disk: bool) -> None:
    tokens = 60_000
    options: dict[str, Any] = {"device": "cpu", "deterministic": True, "threads": 2}
    with pagoda.Cache(SPEC, **options, **budgets(tokens, 1.2, 0.0, None)) as cache:
        resident = decode(cache, fill(cache, tokens))
    with pagoda.Cache(SPEC, **options, **budgets(tokens, device, host, tmp_path / "pages" if disk else None)) as cache:
        sequence = fill(cache, tokens)
        cache._spill.settle()  # a page that is on its way to the disk may still be read from memory
        offloaded = decode(cache, sequence)
        stats = cache.stats()
        assert stats.used_bytes("device") < 0.3 * tokens * TOKEN_BYTES
        assert (stats.disk_io is not None) == disk
        if stats.disk_io is not None:
            on_disk = stats.used_bytes("disk")
            assert on_disk > 0.45 * tokens * TOKEN_BYTES
            assert stats.disk_io.bytes_read >= 3 * on_disk
    for whole, streamed in zip(resident, offloaded, strict=True):
        np.testing.assert_array_equal(whole, streamed)


@pytest.mark.parametrize("tokens", [200_000, 1 << 20])
def test_long_contexts_run_within_their_budgets(tmp_path: Path, tokens: int) -> None:
    """A tenth of the pages on the device tier, 0.3 in host memory, the rest on disk; every token counts."""
    with pagoda.Cache(SPEC, device="cpu", threads=2, **budgets(tokens, 0.1, 0.3, tmp_path / "pages")) as cache:
        sequence = fill(cache, tokens)
        cache._spill.settle()
        stats = cache.stats()
        planned = Planner(SPEC).footprint(tokens).total_bytes
        used = {tier: stats.used_bytes(tier) for tier in ("device", "host", "disk")}
        assert planned <= sum(used.values()) <= 1.01 * planned + (1 << 20)
        assert used["device"] <= 0.1 * planned + (4 << 20)
        assert used["host"] <= 0.3 * planned
        assert used["disk"] >= 0.5 * planned
        for found, right in zip(decode(cache, sequence), expected(tokens), strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=2e-5)
        assert len(sequence) == tokens
