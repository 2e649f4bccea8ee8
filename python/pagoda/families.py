"""Model families: the layers that a config of each family describes. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pagoda.errors import InvalidArgument
from pagoda.hf_config import FULL, LINEAR, PER_LAYER, WINDOWED, Config
from pagoda.rope import Rope, score_factor_from_config
from pagoda.spec import HEADS_MAX, AttentionLayer, Layer, StateLayer


def layers_of(config: dict[str, Any]) -> list[Layer]:
    """The layers of a config. Raises InvalidArgument for an unknown model_type and for missing or absurd numbers."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise InvalidArgument(f"config.model_type = {kind!r}: one of {', '.join(sorted(_FAMILIES))}")
    _require_causal(config)
    family, defaults = _FAMILIES[kind]
    # As in transformers, a rotation that is null counts as absent, but a window that is null means none.
    content = defaults | {key: value for key, value in config.items() if value is not None or key not in _ROTATION}
    layers = family(Config(content))
    for index, changes in Config(content).per_layer(len(layers)).items():
        # Take this layer from a model in which all layers have these keys.
        layers[index] = family(Config(content | changes | {"num_hidden_layers": len(layers)}))[index]
    return layers


def _require_causal(config: dict[str, Any]) -> None:
    """Raises InvalidArgument for embedding models, whose tokens also see later ones, with half a window each way. "vision"
    only concerns images."""
    both_ways, causal = config.get("use_bidirectional_attention"), config.get("is_causal", True)
    if both_ways not in (None, False, "vision"):
        raise InvalidArgument(f"config.use_bidirectional_attention = {both_ways!r}: false, as attention is causal")
    if causal is not True:
        raise InvalidArgument(f"config.is_causal = {causal!r}: true, as attention is causal")


def _attention(
    config: Config, windows: Sequence[int | None], ropes: Sequence[Rope | None] | None = None, **changes: Any
) -> list[Layer]:
    """Layers that differ only in their windows and rotations. By default all have the rotation of the config."""
    queries, kv_heads, head_dim = config.heads
    ropes = [config.rope()] * len(windows) if ropes is None else ropes
    return [
        AttentionLayer(queries, kv_heads, head_dim, window=window, rope=rope, **changes)
        for window, rope in zip(windows, ropes, strict=True)
    ]


def _alternating(config: Config, period: int, other: str = WINDOWED) -> list[str]:
    """The kind of each layer: from `layer_types`, or else full attention for every `period`-th layer."""
    return config.layer_types(other) or [other if (index + 1) % period else FULL for index in range(config.layer_count)]


def _windows(config: Config, types: list[str]) -> list[int | None]:
    window = config.integer("sliding_window") if WINDOWED in types else None
    return [window if kind == WINDOWED else None for kind in types]


def _llama(config: Config, **changes: Any) -> list[Layer]:
    return _attention(config, [None] * config.layer_count, **changes)


def _one_window(config: Config) -> list[Layer]:
    """One window for all layers, if any, whatever `layer_types` says."""
    return _attention(config, [config.content["sliding_window"]] * config.layer_count)


def _ministral(config: Config) -> list[Layer]:
    """Ministral; transformers also treats a mistral with `layer_types` as one."""
    types = config.layer_types()
    return _one_window(config) if types is None else _attention(config, _windows(config, types))


def _qwen(config: Config) -> list[Layer]:
    """Layers from max_window_layers on are windowed."""
    if config.content.get("use_sliding_window") is not True or config.content["sliding_window"] is None:
        return _llama(config)
    types = config.layer_types()
    if types is None:
        first = config.integer("max_window_layers", low=0)
        types = [WINDOWED if index >= first else FULL for index in range(config.layer_count)]
    return _attention(config, _windows(config, types))


def _qwen2_moe(config: Config) -> list[Layer]:
    """Every other layer below max_window_layers is windowed."""
    if config.content.get("use_sliding_window") is not True:
        return _llama(config)
    types = config.layer_types()
    if types is None:
        last = config.integer("max_window_layers", low=0)
        types = [kind if index < last else FULL for index, kind in enumerate(_alternating(config, 2))]
    return _attention(config, _windows(config, types))


def _qwen3_moe(config: Config) -> list[Layer]:
    """Either all layers are windowed or none, whatever else the config says."""
    return _one_window(config) if config.content.get("use_sliding_window") is True else _llama(config)


def _smollm3(config: Config) -> list[Layer]:
    rotates = config.sequence("no_rope_layers", config.layer_count)
    if rotates is None:
        interval = config.integer("no_rope_layer_interval")
        rotates = [(index + 1) % interval != 0 for index in range(config.layer_count)]
    windows: list[int | None] = [None] * config.layer_count
    if config.content.get("use_sliding_window") is True:
        types = config.layer_types()
        if types is not None:
            windows = _windows(config, types)
        else:
            windows = [None if rotate else config.content["sliding_window"] for rotate in rotates]
    # In `no_rope_layers` 1 means that the layer does rotate.
    rope = config.rope()
    return _attention(config, windows, [rope if rotate else None for rotate in rotates])


def _rotating_in_windows(config: Config, types: list[str], rope: Rope) -> list[Layer]:
    """Only windowed layers rotate."""
    return _attention(config, _windows(config, types), [rope if kind == WINDOWED else None for kind in types])


def _cohere2(config: Config) -> list[Layer]:
    types = _alternating(config, config.integer("sliding_window_pattern"))
    return _rotating_in_windows(config, types, replace(config.rope(), interleaved=True))


def _exaone4(config: Config) -> list[Layer]:
    if config.content["sliding_window"] is None:
        return _llama(config)
    # If there are types, the pattern may be a text, "LLLG".
    types = config.layer_types() or _alternating(config, config.integer("sliding_window_pattern"))
    return _rotating_in_windows(config, types, config.rope())


def _interleaved(config: Config) -> list[Layer]:
    rope = replace(config.rope(), interleaved=True)
    return _llama(config, ropes=[rope] * config.layer_count)


def _minimax_m2(config: Config) -> list[Layer]:
    """Has `rotary_dim` in place of other families' `partial_rotary_factor`."""
    if config.content.get("rotary_dim") is not None and config.content.get("partial_rotary_factor") is None:
        factor = config.integer("rotary_dim") / config.heads[2]
        config = Config(config.content | {"partial_rotary_factor": factor})
    return _llama(config)


def _granite(config: Config) -> list[Layer]:
    return _llama(config, scale=config.number("attention_multiplier"))


def _gemma_scores(config: Config) -> dict[str, Any]:
    cap = "attn_logit_softcapping"
    softcap = None if config.content.get(cap) is None else config.number(cap)
    return {"scale": config.number("query_pre_attn_scalar") ** -0.5, "softcap": softcap}


def _gemma2(config: Config) -> list[Layer]:
    return _attention(config, _windows(config, _alternating(config, 2)), **_gemma_scores(config))


def _require_kinds(key: str, parameters: Any) -> None:
    """Raises InvalidArgument for a rotation that is not given by kind of layer: transformers ignores or refuses it."""
    if parameters and not (isinstance(parameters, dict) and any(kind in parameters for kind in (FULL, WINDOWED))):
        raise InvalidArgument(f"config.{key} = {parameters!r}: an object with {FULL} and {WINDOWED}")


def _ropes(config: Config, types: list[str], theta_key: str) -> list[Rope]:
    """The rotation of each layer. Unless `rope_parameters` has more, `rope_scaling` is for full layers, and theta_key for
    windowed ones."""
    _require_kinds("rope_parameters", config.content.get("rope_parameters"))
    local = Config({key: value for key, value in config.content.items() if key != "rope_scaling"})
    ropes = {FULL: config.rope(FULL), WINDOWED: local.rope(WINDOWED, theta_key=theta_key)}
    return [ropes[kind] for kind in types]


def _gemma3(config: Config) -> list[Layer]:
    types = _alternating(config, config.integer("sliding_window_pattern"))
    ropes = _ropes(config, types, "rope_local_base_freq")
    return _attention(config, _windows(config, types), ropes, **_gemma_scores(config))


def _olmo3(config: Config) -> list[Layer]:
    types = _alternating(config, 4)
    return _attention(config, _windows(config, types), _ropes(config, types, "rope_theta"))


def _gemma4(config: Config) -> list[Layer]:
    """Full layers have their own numbers and sizes of heads, and the last layers may read the K and V of earlier ones."""
    for key in ("rope_scaling", "rope_parameters"):
        _require_kinds(key, config.content.get(key))
    count = config.layer_count
    # As in transformers, the last layer is full whatever its type.
    types = [*_alternating(config, 6)[:-1], FULL]
    queries, kv_heads, head_dim = config.heads
    window = config.integer("sliding_window")
    k_eq_v = config.content.get("attention_k_eq_v") is True
    full_heads, full_dim = kv_heads, head_dim
    # If transformers 5.24 has written the config, `per_layer_config` has the keys of full layers.
    if PER_LAYER not in config.content:
        full_heads = config.integer("num_global_key_value_heads", kv_heads) if k_eq_v else kv_heads
        full_dim = config.integer("global_head_dim")
    shared = config.integer("num_kv_shared_layers", low=0, high=count - 1)
    owners: dict[str, int] = {}
    layers: list[Layer] = []
    for index, kind in enumerate(types):
        owner = None
        if index < count - shared:
            owners[kind] = index
        elif kind in owners:
            owner = owners[kind]
        else:
            limit = f"fewer, as layer {index} has no earlier {kind} to share with"
            raise InvalidArgument(f"config.num_kv_shared_layers = {shared}: {limit}")
        full = kind == FULL
        layers.append(
            AttentionLayer(
                queries,
                full_heads if full else kv_heads,
                full_dim if full else head_dim,
                window=None if full else window,
                scale=1.0,
                rope=config.rope(kind),
                kv_owner=owner,
                k_eq_v=full and k_eq_v,
            )
        )
    return layers


def _gpt_oss(config: Config) -> list[Layer]:
    return _attention(config, _windows(config, _alternating(config, 2)), sinks=True)


def _gated_delta_net(config: Config) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: full attention every few layers, gated delta networks in between."""
    types = _alternating(config, config.integer("full_attention_interval"), LINEAR)
    queries, kv_heads, head_dim = config.heads
    full = AttentionLayer(queries, kv_heads, head_dim, rope=config.rope())
    k_heads, v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    k_dim, v_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim")
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    state = StateLayer(v_heads * k_dim * v_dim, channels * (kernel - 1))
    return [full if kind == FULL else state for kind in types]


def _deepseek(config: Config) -> list[Layer]:
    """Multi-head latent attention: one row of kv_lora_rank + qk_rope_head_dim per token, the first part of which is V."""
    latent, rotated = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    queries = config.integer("num_attention_heads", high=HEADS_MAX)
    scale = (config.integer("qk_nope_head_dim") + rotated) ** -0.5
    scale *= score_factor_from_config(config.rope_parameters())
    layer = AttentionLayer(queries, 1, latent + rotated, latent, scale=scale, v_alias=True)
    return [layer] * config.layer_count


def _heads(queries: int, kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    """`head_dim` None: hidden_size // num_attention_heads."""
    return {"num_attention_heads": queries, "num_key_value_heads": kv_heads, "head_dim": head_dim}


_QWEN = _heads(32, 32) | {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_VL = _heads(64, 8) | {"sliding_window": 4096, "max_window_layers": 80, "rope_theta": 1e6}
_GATED = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_GEMMA_2 = _heads(8, 4, 256) | {
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
}
_GEMMA_3 = _heads(8, 4, 256) | {
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
}
_GEMMA_4 = _heads(8, 4, 256) | {
    "global_head_dim": 512,
    "num_kv_shared_layers": 0,
    "sliding_window": 512,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_ROTATION = ("rope_parameters", "rope_theta")
_UNWINDOWED: dict[str, Any] = {"sliding_window": None}
_HALF = {"partial_rotary_factor": 0.5}

_FAMILIES: dict[str, tuple[Callable[[Config], list[Layer]], dict[str, Any]]] = {
    "cohere2": (_cohere2, {"num_attention_heads": 64, "sliding_window": 4096, "sliding_window_pattern": 4}),
    "deepseek_v2": (_deepseek, {"num_attention_heads": 32} | _DEEPSEEK),
    "deepseek_v3": (_deepseek, {"num_attention_heads": 128} | _DEEPSEEK),
    "ernie4_5": (_interleaved, _heads(16, 2, 128) | {"rope_theta": 5e5}),
    "exaone4": (_exaone4, _heads(32, 32) | {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "gemma": (_llama, _heads(16, 16, 256)),
    "gemma2": (_gemma2, _GEMMA_2),
    "gemma3": (_gemma3, _GEMMA_3),
    "gemma3_text": (_gemma3, _GEMMA_3),
    "gemma4": (_gemma4, _GEMMA_4),
    "gemma4_text": (_gemma4, _GEMMA_4),
    "gemma4_unified": (_gemma4, _GEMMA_4 | {"sliding_window": 1024}),
    "gemma4_unified_text": (_gemma4, _GEMMA_4 | {"sliding_window": 1024}),
    "glm": (_interleaved, _heads(32, 2, 128) | _HALF),
    "glm4": (_interleaved, _heads(32, 2, 128) | _HALF),
    "glm4_moe": (_llama, _heads(96, 8) | _HALF),
    "gpt_oss": (
        _gpt_oss,
        _heads(64, 8, 64) | {"sliding_window": 128, "rope_theta": 1.5e5, "rope_parameters": _GPT_OSS_ROPE},
    ),
    "granite": (_granite, {"num_attention_heads": 32, "attention_multiplier": 1.0}),
    "kimi_k2": (_deepseek, {"num_attention_heads": 128} | _DEEPSEEK),
    "llama": (_llama, {"num_attention_heads": 32}),
    "minimax_m2": (_minimax_m2, _heads(48, 8, 128) | {"rope_theta": 5e6}),
    "ministral": (_ministral, _heads(32, 8) | {"sliding_window": 4096}),
    "ministral3": (_one_window, _heads(32, 8, 128) | _UNWINDOWED | {"rope_parameters": _MINISTRAL_3_ROPE}),
    "mistral": (_ministral, _heads(32, 8) | {"sliding_window": 4096}),
    "mixtral": (_one_window, _heads(32, 8) | _UNWINDOWED | {"rope_theta": 1e6}),
    "olmo2": (_llama, {"num_attention_heads": 32}),
    "olmo3": (_olmo3, {"num_attention_heads": 32, "sliding_window": 4096, "rope_theta": 5e5}),
    "phi3": (_one_window, {"num_attention_heads": 32, "original_max_position_embeddings": 4096} | _UNWINDOWED),
    "qwen2": (_qwen, _QWEN),
    "qwen2_5_vl": (_qwen, _QWEN_VL),
    "qwen2_5_vl_text": (_qwen, _QWEN_VL),
    "qwen2_moe": (_qwen2_moe, _heads(16, 16) | {"sliding_window": 4096, "max_window_layers": 28}),
    "qwen2_vl": (_qwen, _QWEN_VL),
    "qwen2_vl_text": (_qwen, _QWEN_VL),
    "qwen3": (_qwen, _QWEN | {"head_dim": 128}),
    "qwen3_5": (_gated_delta_net, _heads(16, 4, 256) | _GATED),
    "qwen3_5_moe": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "qwen3_5_moe_text": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "qwen3_5_text": (_gated_delta_net, _heads(16, 4, 256) | _GATED),
    "qwen3_moe": (_qwen3_moe, _heads(32, 4) | {"sliding_window": 4096}),
    "qwen3_next": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "qwen3_vl": (_llama, _heads(32, 32, 128) | {"rope_theta": 5e5}),
    "qwen3_vl_moe": (_llama, _heads(16, 16) | {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": (_llama, _heads(16, 16) | {"rope_theta": 5e5}),
    "qwen3_vl_text": (_llama, _heads(32, 32, 128) | {"rope_theta": 5e5}),
    "seed_oss": (_llama, _heads(80, 8, 128)),
    "smollm3": (_smollm3, _heads(16, 4) | _UNWINDOWED | {"no_rope_layer_interval": 4, "rope_theta": 2e6}),
    "starcoder2": (_one_window, _heads(24, 2) | _UNWINDOWED),
}
"""For each family the function that reads its layers, and the defaults of transformers for absent keys."""
