"""Model geometries against literal figures: what each model is known to store."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
from pagoda.errors import InvalidArgument
from pagoda.families import layers_of
from pagoda.geometry import group_layers
from pagoda.hf_config import JSON_BYTES_MAX, PARTIAL
from pagoda.presets import PRESETS
from pagoda.rope import LinearScaling, Llama3Scaling, LongRopeScaling, ProportionalScaling, Rope, YarnScaling
from pagoda.spec import AttentionLayer, ModelSpec, StateLayer

# name: full-attention bytes per token, windowed bytes per token, window, recurrent bytes per sequence; all in 16 bits.
GEOMETRIES = {
    "llama-2-7b": (524_288, 0, 0, 0),
    "llama-2-70b": (327_680, 0, 0, 0),
    "llama-3.1-8b": (131_072, 0, 0, 0),
    "qwen3-8b": (147_456, 0, 0, 0),
    "smollm2-135m": (23_040, 0, 0, 0),
    "mistral-7b-v0.1": (0, 131_072, 4096, 0),
    "mistral-7b-v0.3": (131_072, 0, 0, 0),
    "mixtral-8x7b": (131_072, 0, 0, 0),
    "gemma-2-2b": (53_248, 53_248, 4096, 0),
    "gemma-2-9b": (172_032, 172_032, 4096, 0),
    "gemma-2-27b": (188_416, 188_416, 4096, 0),
    "minimax-m2": (253_952, 0, 0, 0),
    "kimi-k2-instruct-0905": (70_272, 0, 0, 0),
    "gpt-oss-20b": (24_576, 24_576, 128, 0),
    "gpt-oss-120b": (36_864, 36_864, 128, 0),
    "gemma-3-1b": (4_096, 22_528, 512, 0),
    "gemma-3-4b": (20_480, 118_784, 1024, 0),
    "gemma-3-12b": (65_536, 327_680, 1024, 0),
    "gemma-3-27b": (81_920, 425_984, 1024, 0),
    "gemma-4-12b": (8_192, 327_680, 1024, 0),
    "gemma-4-26b-a4b": (10_240, 204_800, 1024, 0),
    "gemma-4-31b": (40_960, 819_200, 1024, 0),
    "deepseek-v3": (70_272, 0, 0, 0),
    "qwen3.5-0.8b": (12_288, 0, 0, 18_874_368 + 663_552),
    "qwen3.5-4b": (32_768, 0, 0, 51_511_296),
    "qwen3.5-27b": (65_536, 0, 0, 153_944_064),
    "qwen3.5-35b-a3b": (20_480, 0, 0, 64_389_120),
    "qwen3-next-80b-a3b": (24_576, 0, 0, 77_266_944),
}


@pytest.mark.parametrize(("name", "expected"), GEOMETRIES.items())
def test_known_models_store_what_they_are_known_to(name: str, expected: tuple[int, int, int, int]) -> None:
    full, windowed, window, state = expected
    spec = ModelSpec.preset(name)
    assert spec.full_bytes_per_token() == full
    assert spec.bytes_per_token() == full + windowed
    assert spec.bytes_per_token("bf16", "f32") > spec.bytes_per_token() or spec.attention_layers[0].v_alias
    assert spec.window_bytes() == windowed * window
    assert spec.state_bytes() == state


def test_the_printed_megabytes_of_recurrent_states() -> None:
    printed = {"qwen3.5-4b": 51.5, "qwen3.5-27b": 153.9, "qwen3.5-35b-a3b": 64.4, "qwen3-next-80b-a3b": 77.3}
    for name, megabytes in printed.items():
        assert round(ModelSpec.preset(name).state_bytes() / 1e6, 1) == megabytes


def groups_of(spec: ModelSpec) -> list[list[int]]:
    """The layer groups if all layers have one format."""
    return group_layers(spec, [("f16", "f16")] * len(spec.layers))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads(name: str) -> None:
    spec = ModelSpec.preset(name)
    assert spec.name == name
    stored = sorted(itertools.chain(*groups_of(spec)))
    assert stored == [i for i, layer in enumerate(spec.layers) if isinstance(layer, AttentionLayer)]


def test_groups_split_windowed_from_full_layers() -> None:
    spec = ModelSpec.preset("gemma-3-1b")
    groups = groups_of(spec)
    assert [{spec.attention_layers[layer].window for layer in group} for group in groups] == [{512}, {None}]
    assert groups[1] == [5, 11, 17, 23]


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 2},
        {"head_dim": 32, "v_head_dim": 64},
        {"v_head_dim": 32},
        {"v_alias": True},
        {"k_eq_v": True},
        {"window": 8},
    ],
)
def test_layers_of_a_group_store_the_same(change: dict[str, Any]) -> None:
    layer = AttentionLayer(4, 4, 64)
    assert groups_of(ModelSpec([layer, replace(layer, **change), layer])) == [[0, 2], [1]]
    reader = replace(layer, num_q_heads=8, scale=1.0, softcap=9.0, sinks=True, rope=Rope(1e4))
    assert groups_of(ModelSpec([layer, reader, layer])) == [[0, 1, 2]]
    formats = [("f16", "f16"), ("f16", "q8_0"), ("f16", "f16")]
    assert group_layers(ModelSpec([layer] * 3), formats) == [[0, 2], [1]]


def test_smollm3_layers_without_rotation() -> None:
    rotates = [layer.rope is not None for layer in ModelSpec.preset("smollm3-3b").attention_layers]
    assert rotates == [True, True, True, False] * 9
    given = PRESETS["smollm3-3b"] | {"no_rope_layers": [0, 1] * 18}
    assert [layer.rope is not None for layer in ModelSpec.from_config(given).attention_layers] == [False, True] * 18


def test_config_from_content_file_and_folder(tmp_path: Path) -> None:
    content = PRESETS["qwen3-8b"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wrapper", "text_config": content}))
    specs = [ModelSpec.from_config(source) for source in (content, tmp_path, tmp_path / "config.json", str(tmp_path))]
    assert len({spec.layers for spec in specs}) == 1


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (b"[" * 100_000, "a readable config.json"),
        (b'{"a": "\xff"}', "a readable config.json"),
        (b"[]", "a JSON object"),
    ],
    ids=["deep", "no text", "a list"],
)
def test_files_that_are_no_configs(content: bytes, refused: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"^config = .*: {refused}"):
        ModelSpec.from_config(tmp_path)


LINEAR = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
WINDOWED = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}
# A config, and its first and last layer according to transformers 5.23: query heads, K/V heads, head size, window, and the
# rotation's theta, scaling and factor. Gemma 3 was published with configs as sparse as these.
SPARSE: dict[str, tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "gemma3_text 4b": (
        {"num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024} | LINEAR,
        (8, 4, 256, 1024, 1e4, None),
        (8, 4, 256, 1024, 1e4, None),
    ),
    "gemma3_text 12b": (
        {"num_hidden_layers": 48, "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8} | LINEAR,
        (16, 8, 256, 4096, 1e4, None),
        (16, 8, 256, None, 1e6, ("LinearScaling", 8.0)),
    ),
    "gemma4_text": (
        {"num_hidden_layers": 7, "hidden_size": 1536},
        (8, 4, 256, 512, 1e4, None),
        (8, 4, 512, None, 1e6, ("ProportionalScaling", 1.0)),
    ),
    "gpt_oss": (
        {"num_hidden_layers": 24},
        (64, 8, 64, 128, 1.5e5, ("YarnScaling", 32.0)),
        (64, 8, 64, None, 1.5e5, ("YarnScaling", 32.0)),
    ),
    "qwen3": (WINDOWED | {"num_hidden_layers": 4}, (32, 32, 128, None, 1e4, None), (32, 32, 128, 512, 1e4, None)),
    "qwen3 without a window": (
        WINDOWED | {"num_hidden_layers": 4, "sliding_window": None},
        (32, 32, 128, None, 1e4, None),
        (32, 32, 128, None, 1e4, None),
    ),
    "qwen3_moe": (
        WINDOWED | {"num_hidden_layers": 4, "hidden_size": 2048},
        (32, 4, 64, 512, 1e4, None),
        (32, 4, 64, 512, 1e4, None),
    ),
    "smollm3": (
        WINDOWED | {"num_hidden_layers": 4, "hidden_size": 2048},
        (16, 4, 128, None, 2e6, None),
        (16, 4, 128, 512, None, None),
    ),
    "mistral": (
        {"num_hidden_layers": 4, "hidden_size": 4096},
        (32, 8, 128, 4096, 1e4, None),
        (32, 8, 128, 4096, 1e4, None),
    ),
    "mistral without a window": (
        {"num_hidden_layers": 4, "hidden_size": 4096, "num_key_value_heads": None, "sliding_window": None},
        (32, 32, 128, None, 1e4, None),
        (32, 32, 128, None, 1e4, None),
    ),
}


class Seen(NamedTuple):
    """The properties of a layer that are checked; the defaults are the most common ones."""

    window: int | None = None
    theta: float | None = 1e4
    turned: float = 1.0
    """The share of a row that is rotated."""
    interleaved: bool = False
    scale: float = 128**-0.5
    softcap: float | None = None


FIXED = Seen(theta=None)
LATENT = Seen(theta=None, scale=192**-0.5)
# The same for families: config entries apart from row sizes, then heads and head size, the first layer and the last. Pairs
# are interleaved where the code of transformers (`rotate_half`, or complex numbers) interleaves them.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int], Seen, Seen]] = {
    "cohere2": ({"hidden_size": 8192}, (64, 64, 128), Seen(4096, interleaved=True), FIXED),
    "deepseek_v2": ({}, (32, 1, 576), LATENT, LATENT),
    "ernie4_5": (
        {"hidden_size": 1024},
        (16, 2, 128),
        Seen(theta=5e5, interleaved=True),
        Seen(theta=5e5, interleaved=True),
    ),
    "exaone4": ({"hidden_size": 4096}, (32, 32, 128), Seen(4096), FIXED),
    "exaone4 without a window": ({"hidden_size": 4096, "sliding_window": None}, (32, 32, 128), Seen(), Seen()),
    "gemma": ({}, (16, 16, 256), Seen(scale=1 / 16), Seen(scale=1 / 16)),
    "gemma2": ({}, (8, 4, 256), Seen(4096, scale=1 / 16, softcap=50.0), Seen(scale=1 / 16, softcap=50.0)),
    "glm": ({}, (32, 2, 128), Seen(turned=0.5, interleaved=True), Seen(turned=0.5, interleaved=True)),
    "glm4": ({}, (32, 2, 128), Seen(turned=0.5, interleaved=True), Seen(turned=0.5, interleaved=True)),
    "glm4_moe": ({"hidden_size": 12288}, (96, 8, 128), Seen(turned=0.5), Seen(turned=0.5)),
    "granite": ({"hidden_size": 4096}, (32, 32, 128), Seen(scale=1.0), Seen(scale=1.0)),
    "granite 8b": (
        {"hidden_size": 4096, "attention_multiplier": 0.0078125},
        (32, 32, 128),
        Seen(scale=1 / 128),
        Seen(scale=1 / 128),
    ),
    "kimi_k2": ({}, (128, 1, 576), LATENT, LATENT),
    "minimax_m2": ({}, (48, 8, 128), Seen(theta=5e6), Seen(theta=5e6)),
    "minimax_m2 as published": (
        {"rotary_dim": 64},
        (48, 8, 128),
        Seen(theta=5e6, turned=0.5),
        Seen(theta=5e6, turned=0.5),
    ),
    "minimax_m2 with a share": (
        {"rotary_dim": 64, "partial_rotary_factor": 0.25},
        (48, 8, 128),
        Seen(theta=5e6, turned=0.25),
        Seen(theta=5e6, turned=0.25),
    ),
    "ministral": ({"hidden_size": 4096}, (32, 8, 128), Seen(4096), Seen(4096)),
    "ministral3": ({}, (32, 8, 128), Seen(theta=1e6), Seen(theta=1e6)),
    "mixtral": ({"hidden_size": 4096}, (32, 8, 128), Seen(theta=1e6), Seen(theta=1e6)),
    "olmo2": ({"hidden_size": 4096}, (32, 32, 128), Seen(), Seen()),
    "olmo3": ({"hidden_size": 4096}, (32, 32, 128), Seen(4096, 5e5), Seen(theta=5e5)),
    "phi3": (
        {"hidden_size": 3072, "partial_rotary_factor": 0.75, "sliding_window": 2047},
        (32, 32, 96),
        Seen(2047, turned=0.75, scale=96**-0.5),
        Seen(2047, turned=0.75, scale=96**-0.5),
    ),
    "qwen2_moe": ({"hidden_size": 2048}, (16, 16, 128), Seen(), Seen()),
    "qwen2_moe with a window": (
        {"hidden_size": 2048, "use_sliding_window": True, "max_window_layers": 1},
        (16, 16, 128),
        Seen(4096),
        Seen(),
    ),
    "qwen2_vl": ({"hidden_size": 8192}, (64, 8, 128), Seen(theta=1e6), Seen(theta=1e6)),
    "qwen2_5_vl": ({"hidden_size": 8192}, (64, 8, 128), Seen(theta=1e6), Seen(theta=1e6)),
    "qwen2_5_vl_text with a window": (
        {"hidden_size": 8192, "use_sliding_window": True, "max_window_layers": 1},
        (64, 8, 128),
        Seen(theta=1e6),
        Seen(4096, theta=1e6),
    ),
    "qwen3_vl": ({}, (32, 32, 128), Seen(theta=5e5), Seen(theta=5e5)),
    "qwen3_vl_moe": ({"hidden_size": 2048}, (16, 16, 128), Seen(theta=5e5), Seen(theta=5e5)),
    "seed_oss": ({}, (80, 8, 128), Seen(), Seen()),
    "starcoder2": ({"hidden_size": 3072}, (24, 2, 128), Seen(), Seen()),
}


COMPLETE = PRESETS | {
    name: content | {"model_type": name.split()[0], "num_hidden_layers": 4} for name, (content, *_) in FAMILIES.items()
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_attend_as_in_transformers(name: str) -> None:
    content, heads, *expected = FAMILIES[name]
    layers = ModelSpec.from_config(content | {"model_type": name.split()[0], "num_hidden_layers": 4}).attention_layers

    def seen(layer: AttentionLayer) -> Seen:
        rope = layer.rope
        share, interleaved = (rope.dim_of(layer.head_dim) / layer.head_dim, rope.interleaved) if rope else (1, False)
        scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
        return Seen(layer.window, rope.theta if rope else None, share, interleaved, scale, layer.softcap)

    assert len(layers) == 4
    assert {(layer.num_q_heads, layer.num_kv_heads, layer.head_dim) for layer in layers} == {heads}
    for layer, other in zip((layers[0], layers[-1]), expected, strict=True):
        assert seen(layer)._replace(scale=0.0) == other._replace(scale=0.0)
        assert seen(layer).scale == pytest.approx(other.scale)


WRAPPERS = (
    *("gemma3", "gemma4", "gemma4_unified", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_text_part_that_does_not_say_its_kind_is_that_of_its_wrapper(kind: str) -> None:
    text = {"num_hidden_layers": 8, "hidden_size": 2048}
    spec = ModelSpec.from_config({"model_type": kind, "text_config": text})
    assert spec.layers == ModelSpec.from_config(text | {"model_type": f"{kind}_text"}).layers
    assert spec.layers == ModelSpec.from_config(text | {"model_type": kind, "text_config": [1]}).layers


@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen3_next", 2), ("qwen3_5_text", 4), ("qwen3_5_moe_text", 2)])
def test_gated_delta_networks_by_default(kind: str, kv_heads: int) -> None:
    """transformers 5.24: 16 heads of keys and 32 of values, of 128 each, and the last 3 inputs of a convolution over 4."""
    config = {"model_type": kind, "num_hidden_layers": 8}
    spec = ModelSpec.from_config(config)
    full = AttentionLayer(16, kv_heads, 256, rope=Rope(1e4, rotary_dim=64))
    state = StateLayer(32 * 128 * 128, (2 * 16 * 128 + 32 * 128) * 3)
    assert spec.layers == (state, state, state, full) * 2
    types = ["full_attention", "linear_attention"] * 4
    assert ModelSpec.from_config(config | {"layer_types": types}).layers == (full, state) * 4


def test_rotations_and_windows_by_default() -> None:
    """transformers 5.24."""

    def first(kind: str, **content: Any) -> AttentionLayer:
        config = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 4096, **content}
        return ModelSpec.from_config(config).attention_layers[0]

    assert first("gpt_oss").rope == Rope(1.5e5, scaling=YarnScaling(32.0, 4096, truncate=False))
    assert first("ministral3").rope == Rope(1e6, scaling=YarnScaling(16.0, 16384, magnitude=1.0))
    for kind in ("qwen2", "qwen3", "qwen3_moe"):
        assert first(kind, use_sliding_window=True, max_window_layers=0).window == 4096


def test_layers_by_turns_of_families_that_have_two_kinds() -> None:
    def windowed(kind: str, **content: Any) -> list[int]:
        config = {"model_type": kind, "num_hidden_layers": 8, "hidden_size": 4096, **content}
        return [index for index, layer in enumerate(ModelSpec.from_config(config).attention_layers) if layer.window]

    assert windowed("gemma2") == [0, 2, 4, 6]
    assert windowed("gemma3_text") == [0, 1, 2, 3, 4, 6, 7]
    assert windowed("gemma4_text") == [0, 1, 2, 3, 4, 6], "the last layer is full"
    assert windowed("olmo3") == windowed("cohere2") == windowed("exaone4") == [0, 1, 2, 4, 5, 6]
    assert windowed("cohere2", sliding_window_pattern=2) == [0, 2, 4, 6]
    for first in (0, 5):
        assert windowed("qwen2", use_sliding_window=True, max_window_layers=first) == list(range(first, 8))
    for last in (0, 4, 5):
        assert windowed("qwen2_moe", use_sliding_window=True, max_window_layers=last) == list(range(0, last, 2))
    types = ["full_attention"] * 3 + ["sliding_attention"] * 5
    for kind in ("gemma2", "olmo3", "cohere2", "exaone4", "ministral", "qwen2", "qwen2_moe", "smollm3"):
        given = {"layer_types": types, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}
        assert windowed(kind, **given) == [3, 4, 5, 6, 7]
    # EXAONE 4 was published with both.
    assert windowed("exaone4", layer_types=types, sliding_window_pattern="LLLG") == [3, 4, 5, 6, 7]
    for kind in ("qwen2", "qwen2_moe", "qwen3_moe", "smollm3"):
        assert windowed(kind, sliding_window=64) == []
    for kind, layers in {"qwen2": range(28, 96), "qwen2_vl": range(80, 96), "qwen2_moe": range(0, 28, 2)}.items():
        assert windowed(kind, num_hidden_layers=96, use_sliding_window=True) == list(layers)
    # Without windowed layers there need be no window.
    assert windowed("mistral", layer_types=["full_attention"] * 8, sliding_window=None) == []


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("kind", ["mixtral", "phi3", "starcoder2", "ministral3", "qwen3_moe"])
def test_kinds_of_layers_are_passed_over_where_transformers_does(kind: str, window: int | None) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 3072, "layer_types": types}
    layers = ModelSpec.from_config(config | {"use_sliding_window": True, "sliding_window": window}).attention_layers
    assert [layer.window for layer in layers] == [window] * 4
    # But a mistral with kinds of layers is a ministral.
    layers = ModelSpec.from_config(config | {"model_type": "mistral", "sliding_window": 128}).attention_layers
    assert [layer.window for layer in layers] == [128, None] * 2


FLAT = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("gemma3_text", "rope_parameters"),
        ("olmo3", "rope_parameters"),
        ("gemma4_text", "rope_parameters"),
        ("gemma4_text", "rope_scaling"),
    ],
)
def test_rotations_of_no_kind_of_layer(kind: str, key: str) -> None:
    """transformers 5.24 ignores them in Gemma 3 and OLMo 3, and fails in Gemma 4."""
    config = {"model_type": kind, "num_hidden_layers": 6, "hidden_size": 4096}
    with pytest.raises(InvalidArgument, match=rf"^config\.{key} = .*'linear'.*: an object with full_attention and"):
        ModelSpec.from_config(config | {key: FLAT})
    nested = {"full_attention": FLAT | {"rope_theta": 2e5}, "sliding_attention": {"rope_theta": 1e5}}
    ropes = {layer.rope for layer in ModelSpec.from_config(config | {"rope_parameters": nested}).attention_layers}
    assert ropes == {Rope(1e5), Rope(2e5, scaling=LinearScaling(8.0))}


@pytest.mark.parametrize(("kind", "full", "windowed"), [("gemma3_text", 1e6, 1e4), ("olmo3", 5e5, 5e5)])
def test_rotations_of_one_kind_of_layer(kind: str, full: float, windowed: float) -> None:
    def thetas(**changes: Any) -> set[tuple[bool, Any]]:
        config = {"model_type": kind, "num_hidden_layers": 6, "hidden_size": 4096, **changes}
        layers = ModelSpec.from_config(config).attention_layers
        return {(layer.window is not None, layer.rope and layer.rope.theta) for layer in layers}

    assert thetas() == {(False, full), (True, windowed)}
    assert thetas(rope_parameters={"full_attention": {"rope_theta": 2e5}}) == {(False, 2e5), (True, windowed)}
    assert thetas(rope_parameters={"sliding_attention": {"rope_theta": 3e4}}) == {(False, full), (True, 3e4)}
    if kind == "gemma3_text":
        assert thetas(rope_local_base_freq=3e4) == {(False, full), (True, 3e4)}


@pytest.mark.parametrize("name", ["gpt_oss", "ministral3", "gemma4_text", "mixtral", "smollm3"])
def test_a_rotation_that_is_null_is_that_of_the_family(name: str) -> None:
    config = {"model_type": name, "num_hidden_layers": 6, "hidden_size": 4096}
    expected = ModelSpec.from_config(config)
    for null in ({"rope_parameters": None}, {"rope_theta": None}, {"rope_scaling": None}):
        assert ModelSpec.from_config(config | null) == expected


@pytest.mark.parametrize("name", COMPLETE)
def test_a_share_of_a_row_is_refused_where_transformers_turns_all(name: str) -> None:
    config = COMPLETE[name]
    kind = config["model_type"]
    half = config | {"partial_rotary_factor": 0.5}
    if kind in PARTIAL:
        (layer, *_) = ModelSpec.from_config(half).attention_layers
        assert layer.rope is not None
        assert layer.rope.dim_of(layer.head_dim) == layer.head_dim // 2
    elif any(layer.rope for layer in ModelSpec.from_config(config).attention_layers):
        with pytest.raises(InvalidArgument, match=rf"^config\.partial_rotary_factor = 0\.5: 1 for {kind}"):
            ModelSpec.from_config(half)


def test_a_scaling_of_olmo_3_is_of_full_layers() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = {"model_type": "olmo3", "num_hidden_layers": 4, "hidden_size": 4096, "rope_scaling": scaling}
    scaled = [layer.rope and layer.rope.scaling for layer in ModelSpec.from_config(config).attention_layers]
    assert scaled == [None, None, None, YarnScaling(8.0, 8192)]


@pytest.mark.parametrize("name", SPARSE)
def test_keys_that_a_config_leaves_out_are_those_of_transformers(name: str) -> None:
    content, *expected = SPARSE[name]
    layers = ModelSpec.from_config(content | {"model_type": name.split()[0]}).attention_layers

    def seen(layer: AttentionLayer) -> tuple[Any, ...]:
        theta, scaling = (layer.rope.theta, layer.rope.scaling) if layer.rope else (None, None)
        assert not isinstance(scaling, LongRopeScaling)
        kind = scaling and (type(scaling).__name__, scaling.factor)
        return layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.window, theta, kind

    assert [seen(layers[0]), seen(layers[-1])] == expected


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": None}])
def test_a_share_of_a_row_that_is_null_is_absent(scaling: dict[str, Any] | None) -> None:
    null = {"rope_scaling": scaling, "partial_rotary_factor": None}
    for layer in ModelSpec.from_config(PRESETS["llama-3-8b"] | null).attention_layers:
        assert layer.rope is not None
        assert layer.rope.rotary_dim is None


@pytest.mark.parametrize("share", [0, 1.5, float("nan"), True, "0.5"])
def test_shares_of_a_row_that_cannot_be(share: Any) -> None:
    config = PRESETS["qwen3.5-0.8b"]
    with pytest.raises(InvalidArgument, match=rf"^config\.partial_rotary_factor = {share!r}: above 0, at most 1$"):
        ModelSpec.from_config(config | {"partial_rotary_factor": share})
    assert rope_of(config | {"rope_scaling": {}, "partial_rotary_factor": 1}).rotary_dim is None


@pytest.mark.parametrize("place", ["config", "scaling"])
def test_a_share_of_a_row_may_be_of_proportional_scaling(place: str) -> None:
    share, scaling = {"partial_rotary_factor": 0.5}, {"rope_type": "proportional", "factor": 2.0}
    parts = share | {"rope_scaling": scaling} if place == "config" else {"rope_scaling": scaling | share}
    (layer, *_) = ModelSpec.from_config(PRESETS["llama-3-8b"] | parts).attention_layers
    assert layer.rope == Rope(5e5, scaling=ProportionalScaling(0.5, 2.0))


def test_scores_of_deepseek_grow_with_its_yarn() -> None:
    """transformers 5.23: yarn_apply_mscale."""
    (layer, *_) = ModelSpec.preset("deepseek-v3").attention_layers
    assert layer.scale == pytest.approx(0.1352337788608801)
    assert (layer.head_dim, layer.v_dim, layer.v_alias) == (576, 512, True)
    plain = {key: value for key, value in PRESETS["deepseek-v3"].items() if key != "rope_scaling"}
    for content in (plain, plain | {"rope_scaling": {"type": "linear", "factor": 40, "mscale_all_dim": 0}}):
        (layer, *_) = ModelSpec.from_config(content).attention_layers
        assert layer.scale == pytest.approx(192**-0.5)
    scaling = PRESETS["deepseek-v3"]["rope_scaling"] | {"mscale_all_dim": "1"}
    with pytest.raises(InvalidArgument, match=r"mscale_all_dim.*'1'"):
        ModelSpec.from_config(plain | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("name", "scalar"),
    # gemma-2-9b had 224 until https://github.com/huggingface/transformers/issues/31891.
    {"gemma-2-2b": 256, "gemma-2-9b": 256, "gemma-2-27b": 144, "gemma-3-12b": 256, "gemma-3-27b": 168}.items(),
)
def test_gemma_scales_scores_by_the_scalar_that_was_published(name: str, scalar: int) -> None:
    assert {layer.scale for layer in ModelSpec.preset(name).attention_layers} == {scalar**-0.5}


def test_gemma_4_does_not_scale_scores() -> None:
    assert {layer.scale for layer in ModelSpec.preset("gemma-4-12b").attention_layers} == {1.0}


def test_only_gpt_oss_has_sinks() -> None:
    sinks = {
        name: {layer.sinks for layer in ModelSpec.from_config(COMPLETE[name]).attention_layers} for name in COMPLETE
    }
    assert sinks == {name: {name.startswith("gpt-oss")} for name in COMPLETE}


def test_gemma_3_may_cap_scores() -> None:
    (layer, *_) = ModelSpec.from_config(PRESETS["gemma-3-1b"] | {"attn_logit_softcapping": 50.0}).attention_layers
    assert layer.softcap == 50.0


@pytest.mark.parametrize(
    ("kind", "both_ways"), [("gemma", True), ("gemma2", True), ("gemma3_text", True), ("gemma4_text", "all")]
)
def test_models_that_see_both_ways_are_refused(kind: str, both_ways: bool | str) -> None:
    """EmbeddingGemma: transformers 5.24 gives its layers windows of 257 tokens each way, where the config says 512."""
    config = {"model_type": kind, "num_hidden_layers": 24, "use_bidirectional_attention": both_ways}
    with pytest.raises(InvalidArgument, match=r"config\.use_bidirectional_attention = (True|'all'): false"):
        ModelSpec.from_config(config)
    for causal in (False, None, "vision"):
        assert len(ModelSpec.from_config(config | {"use_bidirectional_attention": causal}).layers) == 24


@pytest.mark.parametrize("name", COMPLETE)
def test_no_family_that_is_not_causal_is_taken_for_one_that_is(name: str) -> None:
    """transformers 5.24, `create_causal_mask`: anything not true is false."""
    for causal in (False, None):
        with pytest.raises(InvalidArgument, match=rf"^config\.is_causal = {causal}: true"):
            ModelSpec.from_config(COMPLETE[name] | {"is_causal": causal})
    assert ModelSpec.from_config(COMPLETE[name] | {"is_causal": True}) == ModelSpec.from_config(COMPLETE[name])


def test_paligemma_sees_both_ways_unless_it_says_otherwise() -> None:
    """transformers 5.24: PaliGemmaConfig."""
    text = {"model_type": "gemma", "num_hidden_layers": 18, "use_bidirectional_attention": None}
    wrapper = {"model_type": "paligemma", "text_config": text}
    with pytest.raises(InvalidArgument, match=r"^config\.use_bidirectional_attention = True: false"):
        ModelSpec.from_config(wrapper)
    for causal in ({"model_type": "other"}, {"text_config": text | {"use_bidirectional_attention": False}}):
        assert len(ModelSpec.from_config(wrapper | causal).layers) == 18


def test_gemma_4_as_transformers_has_written_it_since_5_24() -> None:
    """`save_pretrained` writes the settings of full layers to `per_layer_config`, and omits the keys formerly used."""
    published = PRESETS["gemma-4-12b"]
    own = {"head_dim": 512, "num_key_value_heads": 1}
    saved = {key: value for key, value in published.items() if "global" not in key}
    saved |= {"per_layer_config": {f"{index:02}": own for index in range(5, 48, 6)}}
    for kind in ("gemma4_text", "gemma4_unified_text"):
        assert ModelSpec.from_config(saved | {"model_type": kind}).layers == ModelSpec.preset("gemma-4-12b").layers
    wrapped = {"model_type": "gemma4_unified", "text_config": published | {"model_type": "gemma4_unified_text"}}
    assert ModelSpec.from_config(wrapped).layers == ModelSpec.preset("gemma-4-12b").layers
    halved = saved | {"per_layer_config": {f"{index:02}": own | {"head_dim": 256} for index in range(5, 48, 6)}}
    assert {layer.head_dim for layer in ModelSpec.from_config(halved).attention_layers} == {256}
    # Full layers have as many heads as others unless the config says otherwise.
    alike = ModelSpec.from_config(published | {"num_global_key_value_heads": None})
    assert {layer.num_kv_heads for layer in alike.attention_layers} == {8}
    # If the config names no window, the 12B model's kind has 1024, others 512.
    sparse = {"model_type": "gemma4_unified_text", "num_hidden_layers": 6}
    assert ModelSpec.from_config(sparse).attention_layers[0].window == 1024


def test_single_layers_may_have_keys_of_their_own() -> None:
    config = PRESETS["llama-3.1-8b"] | {"per_layer_config": {"3": {"num_key_value_heads": 4}, 31: {"head_dim": 64}}}
    layers = ModelSpec.from_config(config).attention_layers
    shapes = {index: (layer.num_kv_heads, layer.head_dim) for index, layer in enumerate(layers)}
    assert shapes == dict.fromkeys(range(32), (8, 128)) | {3: (4, 128), 31: (8, 64)}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"3": 1},
        {"x": {}},
        {"32": {}},
        {"-1": {}},
        {"9" * 5000: {}},
        {"3": {"skip": ["attention"]}},
        {"3": {"head_dim": 0}},
    ],
    ids=lambda entries: str(entries)[:20],
)
def test_keys_of_single_layers_that_cannot_be(entries: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^config\.(per_layer_config|head_dim)"):
        ModelSpec.from_config(PRESETS["llama-3.1-8b"] | {"per_layer_config": entries})
    moved = {"3": {"num_hidden_layers": 2}}
    spec = ModelSpec.from_config(PRESETS["llama-3.1-8b"] | {"per_layer_config": moved})
    assert spec.layers == ModelSpec.preset("llama-3.1-8b").layers


def test_shared_layers_store_nothing() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    base = PRESETS["gemma-4-12b"] | {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2}
    spec = ModelSpec.from_config(base)
    assert [layer.kv_owner for layer in spec.attention_layers] == [None] * 4 + [2, 3]
    assert groups_of(spec)[0] == [0, 2]
    spec = ModelSpec.from_config(base | {"num_kv_shared_layers": 4})
    assert [layer.kv_owner for layer in spec.attention_layers] == [None, None, 0, 1, 0, 1]
    with pytest.raises(InvalidArgument, match=r"^config\.num_kv_shared_layers = 6: an int from 0 to 5$"):
        ModelSpec.from_config(base | {"num_kv_shared_layers": 6})
    # transformers 5.24 refuses it, too: the only full layer is among those that store nothing.
    with pytest.raises(
        InvalidArgument, match=r"^config\.num_kv_shared_layers = 2: fewer, as layer 5 has no earlier full"
    ):
        ModelSpec.from_config(base | {"layer_types": None})


HOSTILE: list[Any] = [None, -1, 0, 1.5, float("nan"), float("inf"), 1 << 70, 10**400, "8", [], [1], {}, {"0": 1}, True]


@pytest.mark.parametrize("name", COMPLETE)
def test_hostile_configs_are_refused_by_name(name: str) -> None:
    def check(config: dict[str, Any]) -> None:
        try:
            layers = layers_of(config)
        except InvalidArgument as error:
            assert "=" in str(error)
        else:
            assert all(isinstance(layer, AttentionLayer | StateLayer) for layer in layers)

    keys = COMPLETE[name].keys() | {"rope_scaling", "rope_parameters", "layer_types"}
    for key, value in itertools.product(keys, HOSTILE):
        check(COMPLETE[name] | {key: value})


@pytest.mark.parametrize("value", [0, 10**400])
@pytest.mark.parametrize("key", ["rope_theta", "query_pre_attn_scalar"])
def test_numbers_that_no_float_above_0_holds_are_refused(key: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"^config\.{key} = {value}: a finite number above 0"):
        ModelSpec.from_config(PRESETS["gemma-3-1b"] | {key: value})


@pytest.mark.parametrize(
    ("kind", "key", "most"),
    [
        ("llama", "num_hidden_layers", 4096),
        ("llama", "num_attention_heads", 4096),
        ("llama", "num_key_value_heads", 4096),
        ("llama", "head_dim", 1024),
        ("deepseek_v3", "num_attention_heads", 4096),
    ],
)
def test_counts_that_are_too_large_are_refused_by_name(kind: str, key: str, most: int) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4096, "num_key_value_heads": 1, "head_dim": 8}
    assert ModelSpec.from_config({"model_type": kind, **sizes, key: most})
    with pytest.raises(InvalidArgument, match=rf"^config\.{key} = {most + 1}: an int from 1 to {most}$"):
        ModelSpec.from_config({"model_type": kind, **sizes, key: most + 1})


@pytest.mark.parametrize("value", [[1, 1, 1], [1] * 5, "1111"])
@pytest.mark.parametrize("key", ["layer_types", "no_rope_layers"])
def test_lists_have_an_entry_for_each_layer(key: str, value: Any) -> None:
    config = {"model_type": "smollm3", "num_hidden_layers": 4, "hidden_size": 2048, "use_sliding_window": True}
    with pytest.raises(InvalidArgument, match=rf"^config\.{key} = .*: a list of 4$"):
        ModelSpec.from_config(config | {key: value})


def test_a_config_from_a_pipe_has_an_end_and_one_without_is_refused(tmp_path: Path) -> None:
    """A pipe, like some devices, reports a size of 0."""
    content = json.dumps(PRESETS["llama-3.1-8b"])
    room = JSON_BYTES_MAX - len(content)
    for spaces, refused in ((0, None), (room, None), (room + 1, f"at most {JSON_BYTES_MAX} bytes")):
        pipe = tmp_path / f"config-{spaces}.json"
        os.mkfifo(pipe)
        writer = Thread(target=_write, args=(pipe, content + " " * spaces))
        writer.start()
        with nullcontext() if refused is None else pytest.raises(InvalidArgument, match=refused):
            assert ModelSpec.from_config(pipe).layers == ModelSpec.preset("llama-3.1-8b").layers
        writer.join()


def _write(pipe: Path, text: str) -> None:
    with suppress(BrokenPipeError):
        pipe.write_text(text)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_q_heads": 3, "num_kv_heads": 2}, "num_q_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 12}, "head_dim"),
        ({"head_dim": 2048}, "head_dim"),
        ({"v_head_dim": 4}, "v_head_dim"),
        ({"window": 0}, "window"),
        ({"scale": float("nan")}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"rope": 10000.0}, "rope"),
        ({"head_dim": 64, "v_head_dim": 128, "v_alias": True}, "v_head_dim"),
    ],
)
def test_layers_that_cannot_be(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        AttentionLayer(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64} | fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_owner": 1}, r"layers\[1\].kv_owner = 1"),
        ({"kv_owner": 0, "num_kv_heads": 4}, r"layers\[1\].num_kv_heads = 4: 2"),
        ({"kv_owner": 0, "head_dim": 32, "v_head_dim": 64}, r"layers\[1\].head_dim = 32: 64"),
        ({"kv_owner": 0, "v_head_dim": 32}, r"layers\[1\].v_head_dim = 32: 64"),
        ({"kv_owner": 0, "v_alias": True}, r"layers\[1\].v_alias = True: False"),
        ({"kv_owner": 0, "window": None}, r"layers\[1\].window = None: at most 100"),
        ({"kv_owner": 0, "window": 101}, r"layers\[1\].window = 101: at most 100"),
    ],
)
def test_owners_that_cannot_be(fields: dict[str, Any], named: str) -> None:
    owner: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "window": 100}
    reader = AttentionLayer(**(owner | fields))
    with pytest.raises(InvalidArgument, match=named):
        ModelSpec([AttentionLayer(**owner), reader])


def test_gemma_4_stores_v_alone_or_both() -> None:
    spec = ModelSpec.preset("gemma-4-12b")
    assert spec.full_bytes_per_token("f32", "q8_0") == 8 * 544
    both = spec.storing_k()
    assert both.full_bytes_per_token() == 16_384
    assert both.bytes_per_token() - spec.bytes_per_token() == 8_192
    assert both.storing_k() == both
    assert ModelSpec.from_config(PRESETS["gemma-4-12b"] | {"attention_k_eq_v": False}).full_bytes_per_token() == 131_072
    turning = [
        np.count_nonzero(layer.rope.inv_freq(layer.head_dim)) for layer in spec.attention_layers[4:6] if layer.rope
    ]
    assert turning == [128, 64]


def test_unknown_presets_suggest_near_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"qwen3-8b"):
        ModelSpec.preset("Qwen3-8B-")


def test_frequencies_of_scaled_rotations() -> None:
    """Compared with the formulas of transformers' modeling_rope_utils, rewritten in plain Python."""
    plain = Rope(5e5).inv_freq(128)
    np.testing.assert_allclose(plain, [5e5 ** (-2 * i / 128) for i in range(64)], rtol=1e-6)
    scaled = Rope(5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)).inv_freq(128)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * np.pi / before
        if wavelength < 8192 / 4.0:
            expected = before
        elif wavelength > 8192 / 1.0:
            expected = before / 8
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)
    yarn = Rope(1e6, scaling=YarnScaling(4.0, 32768)).inv_freq(128)
    plain = Rope(1e6).inv_freq(128)
    assert yarn[0] == plain[0]
    assert yarn[-1] == pytest.approx(plain[-1] / 4)
    assert np.all((yarn <= plain) & (yarn >= plain / 4))
    assert len(Rope(1e4, rotary_dim=64).inv_freq(256)) == 32
    proportional = Rope(1e6, scaling=ProportionalScaling(0.25, 8.0)).inv_freq(512)
    np.testing.assert_allclose(proportional, [1e6 ** (-2 * i / 512) / 8 for i in range(64)] + [0.0] * 192, rtol=1e-6)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0},
    "proportional": {"factor": 8.0, "partial_rotary_factor": 0.5},
    "longrope": {
        "long_factor": [1.0, 2.0, *[50.0] * 62],
        "short_factor": [1.0] * 64,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings_turn_or_are_refused(kind: str) -> None:
    """JSON as Python reads it may have NaN and Infinity."""
    for key in SCALINGS[kind]:
        values: list[Any] = ["missing", None, 0, -1.5, float("nan"), float("inf"), "x", [], {}]
        for value in values:
            scaling = SCALINGS[kind] | {"rope_type": kind, key: value}
            if value == "missing":
                del scaling[key]
            try:
                (layer, *_) = layers_of({**PRESETS["llama-2-7b"], "rope_scaling": scaling})
            except InvalidArgument as error:
                assert "rope_scaling" in str(error) or "config." in str(error)
            else:
                turns = layer.rope.inv_freq(128)  # type: ignore[union-attr]
                assert np.all((turns >= 0) & (turns <= 1)), (key, value)
                assert turns[0] > 0, (key, value)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_trained_context_may_be_a_whole_float(kind: str) -> None:
    """As in some configs."""

    def rope_of(context: float, place: str) -> Any:
        content: dict[str, Any] = {**PRESETS["llama-2-7b"], "rope_scaling": SCALINGS[kind] | {"rope_type": kind}}
        del content["rope_scaling"]["original_max_position_embeddings"]
        (content["rope_scaling"] if place == "original_max_position_embeddings" else content)[place] = context
        (layer, *_) = layers_of(content)
        return layer.rope  # type: ignore[union-attr]

    for place in ("original_max_position_embeddings", "max_position_embeddings"):
        assert rope_of(4096.0, place) == rope_of(4096, place)
        assert rope_of(4096.0, place) != rope_of(4100.0, place)
        for value in (4096.5, 0.0, 1e300):
            with pytest.raises(InvalidArgument, match=r"rope_scaling\.original_context = "):
                rope_of(value, place)


def test_yarn_says_what_it_was_trained_for_and_how_far_rows_grow() -> None:
    """As in transformers: if the scaling names no context, it is the config's, never a default of ours."""

    def scaling(content: dict[str, Any], **more: Any) -> Any:
        parts = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **more}}
        (layer, *_) = layers_of({**PRESETS["qwen3-8b"], **content, **parts})
        return layer.rope.scaling  # type: ignore[union-attr]

    trained = {"max_position_embeddings": 32768}
    assert scaling(trained).original_context == 32768
    # The config's own context takes precedence.
    both = trained | {"original_max_position_embeddings": 2048}
    assert scaling(both, original_max_position_embeddings=4096).original_context == 2048
    assert scaling(trained, original_max_position_embeddings=4096).original_context == 4096
    with pytest.raises(InvalidArgument, match="original_max_position_embeddings"):
        scaling({})
    assert scaling(trained).attention_factor == pytest.approx(1.138629436)
    assert scaling(trained, attention_factor=1.25).attention_factor == 1.25
    magnitudes = {0.5: 1.069314718, 1.0: 1.138629436}
    for scale, over in ((0.5, 1.0), (1.0, 0.5)):
        both_given = scaling(trained, mscale=scale, mscale_all_dim=over).attention_factor
        assert both_given == pytest.approx(magnitudes[scale] / magnitudes[over])
    for alone in ("mscale", "mscale_all_dim"):
        assert scaling(trained, **{alone: 0.5}) == scaling(trained)


# Phi-4-mini as published, except for the factors.
PHI: dict[str, Any] = {
    "model_type": "phi3",
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "hidden_size": 3072,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 24 + [60.0] * 24, "short_factor": [1.25] * 48},
}


def rope_of(config: dict[str, Any], **scaling: Any) -> Rope:
    (layer, *_) = ModelSpec.from_config(config | {"rope_scaling": config["rope_scaling"] | scaling}).attention_layers
    assert layer.rope is not None
    return layer.rope


def test_long_contexts_have_factors_of_their_own() -> None:
    """https://arxiv.org/abs/2402.13753, and transformers 5.23: `_compute_longrope_parameters`."""
    plain = 10000.0 ** (-np.arange(48) / 48)
    np.testing.assert_allclose(rope_of(PHI).inv_freq(128), plain / ([1.5] * 24 + [60.0] * 24), rtol=1e-6)
    # The value in Phi-3's own code for an extension from 4K to 128K tokens.
    assert rope_of(PHI).attention_factor == pytest.approx(1.1902380714238083)
    assert rope_of(PHI, type="su") == rope_of(PHI)
    assert rope_of(PHI, factor=64.0).attention_factor == pytest.approx(np.sqrt(1.5))
    assert rope_of(PHI, attention_factor=1.25).attention_factor == 1.25
    assert LongRopeScaling((2.0,)).attention_factor == 1
    np.testing.assert_array_equal(
        rope_of(PHI | {"max_position_embeddings": 4097}).inv_freq(128), rope_of(PHI).inv_freq(128)
    )
    short = rope_of(PHI | {"max_position_embeddings": 4096})
    np.testing.assert_allclose(short.inv_freq(128), plain / 1.25, rtol=1e-6)
    assert short.attention_factor == 1
    # If the config names no context, it is the family's default.
    unnamed = {key: value for key, value in PHI.items() if key != "original_max_position_embeddings"}
    assert rope_of(unnamed) == rope_of(PHI)


def test_long_contexts_have_a_factor_for_each_pair() -> None:
    with pytest.raises(InvalidArgument, match=r"rope_scaling\.factors = 47 numbers: 48, one a pair"):
        rope_of(PHI, long_factor=[1.0] * 47)
    with pytest.raises(InvalidArgument, match=r"rope_scaling\.factors\[1\] = nan"):
        rope_of(PHI, long_factor=[1.0, float("nan")] * 24)
    with pytest.raises(InvalidArgument, match=r"rope_scaling\.factors = \[2\.0\]: a tuple"):
        LongRopeScaling([2.0])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="original_max_position_embeddings"):
        rope_of({key: value for key, value in PHI.items() if "max_position" not in key})


@pytest.mark.parametrize("scaling", [{"type": "mrope"}, {"rope_type": "default", "mrope_interleaved": True}])
def test_positions_of_three_numbers_turn_as_fast_as_one(scaling: dict[str, Any]) -> None:
    """If all three change equally, as in a context shift, rows rotate like those of text."""
    config = {"model_type": "qwen2_5_vl", "num_hidden_layers": 1, "hidden_size": 8192, "rope_scaling": scaling}
    assert rope_of(config, mrope_section=[16, 24, 24]) == Rope(1e6)


@pytest.mark.parametrize(("kind", "other"), [("mistral", "linear_attention"), ("qwen3_5_text", "sliding_attention")])
def test_layers_that_a_family_does_not_have_are_not_taken_for_others(kind: str, other: str) -> None:
    config = PRESETS["qwen3.5-0.8b"] | {"model_type": kind, "sliding_window": 128, "layer_types": [other] * 24}
    with pytest.raises(InvalidArgument, match=f"layer_types.*{other}"):
        layers_of(config)
