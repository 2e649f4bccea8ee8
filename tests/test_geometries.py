"""Current models, end to end: a prompt in chunks, then a few tokens, with random K, V and queries, against float64.

The layers are those of the presets, cut down to a few of each kind; shapes, windows, scales and owners are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pagoda
import pytest
from mirror import Mirror
from pagoda.geometry import group_layers
from pagoda.planner import Planner
from pagoda.presets import PRESETS
from pagoda.spec import AttentionLayer


@dataclass(frozen=True)
class Model:
    """Layers of a preset or a config, by number."""

    layers: tuple[int, ...]
    groups: int
    config: dict[str, Any] | None = None
    q_scale: float = 1.0
    """Gemma 4 normalises queries and keys and has a scale of 1."""


GEMMA_SHARED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 18,
    "layer_types": ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(42)],
}
"""Gemma 4 of the E4B kind: the last 18 of 42 layers store nothing."""

GEMMA_2 = pagoda.AttentionLayer(8, 4, 256, scale=256**-0.5, softcap=50.0)
"""The sizes of gemma-2-2b, whose layers alternate between a window of 4,096 and none."""

MODELS = {
    "llama-3.1-8b": Model((0, 1), 1),
    "qwen3-8b": Model((0, 35), 1),
    "gemma-3-12b": Model((4, 5, 6), 2),
    "gemma-4-12b": Model((4, 5), 2, q_scale=1 / 16),
    "gemma-4-e4b": Model((22, 23, 24, 29, 41), 2, GEMMA_SHARED, q_scale=1 / 16),
    "gpt-oss-20b": Model((0, 1), 2),
    "deepseek-v3": Model((0, 60), 1),
}


def chosen(name: str, context: int | None = None) -> pagoda.ModelSpec:
    """Some layers of a model, renumbered, owners included; windows are shortened for a short context."""
    model = MODELS[name]
    spec = pagoda.ModelSpec.preset(name) if model.config is None else pagoda.ModelSpec.from_config(model.config)
    layers = []
    for number in model.layers:
        layer = spec.layers[number]
        assert isinstance(layer, AttentionLayer)
        fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        if layer.kv_owner is not None:
            fields["kv_owner"] = model.layers.index(layer.kv_owner)
        if layer.window is not None and context is not None:
            fields["window"] = min(layer.window, context // 2)
        layers.append(AttentionLayer(**fields))
    return pagoda.ModelSpec(layers, name)


def run(spec: pagoda.ModelSpec, chunks: list[int], decoded: int, **options: Any) -> None:
    """Two sequences, one of which forks: chunks of a prompt, then single tokens."""
    defaults: dict[str, Any] = {
        "device_memory": "1GiB",
        "host_memory": 0,
        "k_dtype": "bf16",
        "v_dtype": "bf16",
        "threads": 2,
    }
    rng = np.random.default_rng(0)
    k_norms = [
        rng.uniform(0.2, 2, layer.head_dim).astype(np.float32) if layer.k_eq_v else None
        for layer in spec.attention_layers
    ]
    with pagoda.Cache(spec, k_norms=k_norms, **(defaults | options)) as cache:
        q_scale = MODELS[spec.name].q_scale if spec.name in MODELS else 1.0
        mirror = Mirror(cache, rng, q_scale, k_norms)
        first, second = mirror.create(), mirror.create()
        for chunk in chunks:
            mirror.step([first, second], [chunk, chunk // 7])
        beams = [first, second, mirror.fork(first)]
        for _ in range(decoded):
            mirror.step(beams, [1] * len(beams))


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("long contexts are for the CPU")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_beyond_the_window_and_some_tokens(name: str) -> None:
    spec = chosen(name)
    assert len(group_layers(spec, [("bf16", "bf16")] * len(spec.layers))) == MODELS[name].groups
    window = max((layer.window or 0 for layer in spec.attention_layers), default=0)
    run(spec, [130, window, 30], 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_short_context(name: str, deterministic: bool) -> None:
    """On every device, with windows short enough to be left."""
    run(chosen(name, 24), [17, 21], 2, page_size=16, device_memory="32MiB", deterministic=deterministic)


def test_soft_caps_of_gemma_2() -> None:
    layers = [GEMMA_2, pagoda.AttentionLayer(8, 4, 256, window=30, scale=256**-0.5, softcap=50.0)]
    run(pagoda.ModelSpec(layers), [40, 30], 3, page_size=16, device_memory="32MiB")


def test_layers_that_share_store_nothing() -> None:
    spec = chosen("gemma-4-e4b")
    assert [layer.kv_owner for layer in spec.attention_layers] == [None, None, 0, 1, 1]
    owned = [layer for layer in spec.attention_layers if layer.kv_owner is None]
    alone = pagoda.ModelSpec(owned)
    assert spec.bytes_per_token() == alone.bytes_per_token()
    assert Planner(spec).footprint(1000) == Planner(alone).footprint(1000)


def test_the_geometries_are_those_of_the_models() -> None:
    """Heads, sizes and windows, from model cards."""

    def shapes(name: str) -> set[tuple[Any, ...]]:
        return {
            (
                layer.num_q_heads,
                layer.num_kv_heads,
                layer.head_dim,
                layer.v_dim,
                layer.window,
                layer.sinks,
                layer.v_alias or layer.k_eq_v,
            )
            for layer in chosen(name).attention_layers
        }

    assert shapes("llama-3.1-8b") == {(32, 8, 128, 128, None, False, False)}
    assert shapes("qwen3-8b") == {(32, 8, 128, 128, None, False, False)}
    assert shapes("gemma-3-12b") == {(16, 8, 256, 256, 1024, False, False), (16, 8, 256, 256, None, False, False)}
    assert shapes("gemma-4-12b") == {(16, 8, 256, 256, 1024, False, False), (16, 1, 512, 512, None, False, True)}
    assert shapes("gpt-oss-20b") == {(64, 8, 64, 64, 128, True, False), (64, 8, 64, 64, None, True, False)}
    assert shapes("deepseek-v3") == {(128, 1, 576, 512, None, False, True)}


@pytest.mark.parametrize("counts", [(11, 10), (10, 11), (3, 2), (2, 1), (1, 1)])
def test_the_least_memory_holds_a_page_of_each_group(counts: tuple[int, int]) -> None:
    """Extents have the size of the largest block; blocks of a group may cross their borders."""
    kinds = [AttentionLayer(2, 2, 8), AttentionLayer(2, 2, 8, window=40)]
    spec = pagoda.ModelSpec(layers=[kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)])

    def opened(memory: int, host: int = 0) -> pagoda.Cache:
        return pagoda.Cache(spec, page_size=8, device_memory=memory, host_memory=host, threads=1)

    with pytest.raises(pagoda.InvalidArgument, match=r"= 1: from .* one page of each") as refused:
        opened(1)
    least = int(str(refused.value).split("from ")[1].split(" ")[0])
    with pytest.raises(pagoda.InvalidArgument, match=f"host_memory = 1: 0, or from {least} bytes, one page of each"):
        opened(least, host=1)
    with pytest.raises(pagoda.InvalidArgument, match="one page of each"):
        opened(least - 1)
    with opened(least) as cache:
        mirror = Mirror(cache)
        mirror.step([mirror.create()], [8])


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
def test_blocks_of_several_sizes_leave_no_memory_between_them(dtype: str) -> None:
    """Each group of every preset could use 98 % of the memory, though blocks differ in size by a factor of up to 5.2."""
    memory, several = 8 << 30, 0
    for name in sorted(PRESETS):
        spec = pagoda.ModelSpec.preset(name).storing_k()
        layers = [layer for layer in spec.layers if isinstance(layer, AttentionLayer)]
        if len(layers) < len(spec.layers):
            continue
        with pagoda.Cache(
            spec, k_dtype=dtype, v_dtype=dtype, center=None, device_memory=memory, host_memory=0, threads=1
        ) as cache:
            free = cache.stats().device
            for counts, group in zip(free, group_layers(spec, cache.dtypes), strict=True):
                token = sum(layers[layer].bytes_per_token(dtype, dtype) for layer in group)
                assert counts.free * token * cache.page_size >= 0.98 * memory, (name, counts)
        several += len(free) > 1
    assert several >= 10
