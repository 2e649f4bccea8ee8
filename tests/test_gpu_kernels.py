"""Every kind of kernel once on a GPU, against float64: what to run first on a new machine, and under a memory checker.

Each kind appends, reads a prompt, decodes, decodes sequences that share pages, and decodes from pages of the host; rows
past the new ones are NaN. tests/test_device_kernels.py covers the corner cases, on the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from gpu_driver import CopyingDriver
from mirror import DTYPES, derived
from pagoda import _core
from pagoda.attention.reference import attention
from pagoda.device import cuda
from pagoda.device.cuda import open_driver as open_gpu
from pagoda.kernels import instances

Array = npt.NDArray[Any]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ERROR = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}
"""Largest error of results by the type of queries, for values around 1."""
PROMPT, SHARED, FORKS, JUNK = 150, 1100, 3, 2
"""SHARED tokens in common to FORKS sequences are enough to be worth a launch of their own."""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU for NumPy arrays. Each allocation goes to the CUDA driver, so that a checker sees where it ends."""
    import cupy

    monkeypatch.setattr(cuda, "open_driver", lambda index: CopyingDriver(open_gpu(index)))
    with cupy.cuda.using_allocator(None):
        yield


def stored(rows: Array, name: str) -> Array:
    """Numbers [tokens, heads, dim] as a cache stores them."""
    if name in DTYPES:
        return rows.astype(DTYPES[name]).astype(np.float64)
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]), np.float32)
    return (
        _core.decode_rows(*_core.encode_rows(flat, name), name, rows.shape[-1]).reshape(rows.shape).astype(np.float64)
    )


class Kind:
    """A cache of one layer, and the rows of its sequences."""

    def __init__(self, layer: pagoda.AttentionLayer, formats: tuple[str, str], q: str, **options: Any) -> None:
        self.layer, self.formats, self.q = layer, formats, q
        self.rng = np.random.default_rng(0)
        memory: dict[str, Any] = {
            "device_memory": "64MiB",
            "host_memory": "64MiB",
            "page_size": 16,
            "center": None,
            "rotate": False,
        }
        spec, self.norm = pagoda.ModelSpec([layer]), self.rng.uniform(0.2, 2, layer.head_dim).astype(np.float32)
        norms = [self.norm if layer.k_eq_v else None]
        options = memory | options | {"k_dtype": formats[0], "v_dtype": formats[1], "k_norms": norms}
        self.cache = pagoda.Cache(spec, device="cuda", **options)
        self.held: dict[pagoda.Sequence, list[Array]] = {}

    def step(self, batch: list[pagoda.Sequence], counts: list[int], junk: int = JUNK) -> None:
        """Appends, attends and compares; the last `junk` tokens of each sequence are rejected."""
        layer, bounds = self.layer, np.cumsum([0, *(count + junk for count in counts)])
        shapes = ((layer.num_q_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim))
        q, k, v = (
            self.rng.standard_normal((bounds[-1], *shape), np.float32).astype(DTYPES[self.q])
            for shape in (*shapes, (layer.num_kv_heads, layer.v_dim))
        )
        for end in bounds[1:]:
            k[end - junk : end] = v[end - junk : end] = np.nan
        with self.cache.step(batch, [count + junk for count in counts]) as step:
            given = (None if layer.k_eq_v else k, None if layer.v_alias else v)
            out, lse = step.forward(0, q, *given, return_lse=True)
            positions = step.positions
            step.commit(counts)
        for sequence, start, count in zip(batch, bounds, counts, strict=False):
            new = slice(start, start + count)
            rows = [stored(k[new], self.formats[0]), stored(v[new], self.formats[1])]
            if layer.k_eq_v:
                rows[0] = derived(rows[1], self.norm, layer.rope, positions[new])
            if layer.v_alias:
                rows[1] = rows[0][..., : layer.v_dim]
            if sequence in self.held:
                rows = [np.concatenate(pair) for pair in zip(self.held[sequence], rows, strict=True)]
            self.held[sequence] = rows
            right, right_lse = attention(q[new], *rows, scale=layer.scale, window=layer.window, softcap=layer.softcap)
            error = ERROR[self.q]
            np.testing.assert_allclose(out[new].astype(np.float64), right, rtol=0, atol=error)
            np.testing.assert_allclose(lse[new], right_lse, rtol=0, atol=error)

    def live(self) -> None:
        """Runs everything that distinguishes a kind."""
        with self.cache as cache:
            one, root = cache.create(), cache.create()
            self.step([one], [PROMPT])
            self.step([one, root], [1, SHARED])
            forks = [root.fork() for _ in range(FORKS)]
            self.held |= {fork: self.held[root] for fork in forks}
            self.step([*forks, one], [1] * (FORKS + 1))
            assert cache.demote(one).wait()
            self.step([one, *forks], [1] * (FORKS + 1))
            # One query per sequence: small numbers of queries have their own engine.
            self.step([one, *forks], [1] * (FORKS + 1), junk=0)


def heads(dim: int, v_dim: int | None = None, group: int = 4, **more: Any) -> pagoda.AttentionLayer:
    kv_heads = 1 if group > 8 else 2
    return pagoda.AttentionLayer(group * kv_heads, kv_heads, dim, v_dim, **more)


PLAIN = [("bf16", "bf16", "bf16"), ("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "f16", "f32")]
QUANTISED = [(name, name) for name in instances.QUANTISED] + [("bf16", "q8_0"), ("q8_0", "q4_0")]
KINDS: dict[str, tuple[pagoda.AttentionLayer, tuple[str, str], str, dict[str, Any]]] = {
    **{f"{k}/{v} {q}": (heads(128), (k, v), q, {}) for k, v, q in PLAIN},
    **{f"{k}/{v} bf16": (heads(128), (k, v), "bf16", {}) for k, v in QUANTISED},
    **{f"{name} {dim}": (heads(dim), (name, name), "f32", {}) for name, dim in (("q8_0", 64), ("q4_0", 256))},
    **{f"bf16 {dim}": (heads(dim), ("bf16", "bf16"), "bf16", {}) for dim in (64, 80, 96, 256, 512)},
    "bf16 192/128": (heads(192, 128), ("bf16", "bf16"), "bf16", {}),
    "bf16 groups of 1": (heads(128, group=1), ("bf16", "bf16"), "bf16", {}),
    "bf16 groups of 16": (heads(128, group=16), ("bf16", "bf16"), "bf16", {}),
    "latent": (heads(576, 512, group=128, v_alias=True), ("bf16", "bf16"), "bf16", {}),
    "latent q8_0": (heads(576, 512, group=16, v_alias=True), ("q8_0", "q8_0"), "bf16", {}),
    "derived": (heads(512, group=16, rope=pagoda.Rope(), k_eq_v=True), ("bf16", "bf16"), "bf16", {}),
    "derived q8_0": (heads(512, group=16, rope=pagoda.Rope(), k_eq_v=True), ("q8_0", "q8_0"), "f32", {}),
    "f32": (heads(128), ("f32", "f32"), "f32", {}),
    "window and cap": (heads(128, window=100, softcap=5.0), ("f16", "f16"), "f16", {}),
    "deterministic": (heads(128), ("f16", "f16"), "f16", {"deterministic": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_kernels(kind: str, cupy: None) -> None:
    layer, formats, q, options = KINDS[kind]
    Kind(layer, formats, q, **options).live()
