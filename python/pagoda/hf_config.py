"""Hugging Face config.json files, read as layers. Keys and defaults are those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagoda.checks import as_int
from pagoda.errors import InvalidArgument
from pagoda.rope import ProportionalScaling, Rope, scaling_from_config, score_factor_from_config
from pagoda.spec import AttentionLayer, Layer, StateLayer

CONFIG_BYTES_MAX = 16 << 20


def read_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json, given as content, file or folder; of a multimodal model, its text part."""
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            path = path / "config.json" if path.is_dir() else path
            if path.stat().st_size > CONFIG_BYTES_MAX:
                raise InvalidArgument(f"config = {str(path)!r}: at most {CONFIG_BYTES_MAX} bytes")
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"config = {str(path)!r}: a readable config.json ({error})") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"config = {type(config).__name__}: a JSON object")
    text = config.get("text_config")
    return {"model_type": config.get("model_type"), **text} if isinstance(text, dict) else config


def layers_of(config: dict[str, Any]) -> list[Layer]:
    """The layers of a config. Raises InvalidArgument for an unknown model_type and for missing or absurd numbers."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise InvalidArgument(f"config.model_type = {kind!r}: one of {', '.join(sorted(_FAMILIES))}")
    family, defaults = _FAMILIES[kind]
    return family(Config(defaults | config))


class Config:
    """Checked access to the keys of a config."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """An integer key; JSON's null counts as absent."""
        value = as_int(self.content.get(key))
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidArgument(f"config.{key} = {value!r}: an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; JSON's null counts as absent."""
        value = as_int(self.content.get(key))
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise InvalidArgument(f"config.{key} = {value!r}: a finite number above 0")
        return float(value)

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of `length` entries, or None when absent."""
        value = self.content.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise InvalidArgument(f"config.{key} = {value!r}: a list of {length}")
        return value

    @property
    def layer_count(self) -> int:
        """num_hidden_layers."""
        return self.integer("num_hidden_layers", high=4096)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, K/V heads and the size of a head."""
        queries = self.integer("num_attention_heads", high=4096)
        own = self.content.get("head_dim") is not None
        head_dim = self.integer("head_dim", high=4096) if own else self.integer("hidden_size") // queries
        return queries, self.integer("num_key_value_heads", queries, high=4096), head_dim

    def layer_types(self, other: str = "sliding_attention") -> list[str] | None:
        """The entry of each layer in `layer_types`: full attention, or the other kind that the family has."""
        types = self.sequence("layer_types", self.layer_count)
        known = ("full_attention", other)
        if any(kind not in known for kind in types or ()):
            raise InvalidArgument(f"config.layer_types = {types!r}: of {', '.join(known)}")
        return types

    def rope_parameters(self, layer_type: str = "full_attention") -> dict[str, Any]:
        """What `rope_scaling` or `rope_parameters` say of one kind of layer."""
        parameters = self.content.get("rope_scaling") or self.content.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidArgument(f"config.rope_scaling = {parameters!r}: a JSON object")
        if isinstance(parameters.get(layer_type), dict):
            parameters = parameters[layer_type]
        # As transformers has it, where the scaling does not say what it was trained for.
        trained = self.content.get("original_max_position_embeddings", self.content.get("max_position_embeddings"))
        if parameters.get("original_max_position_embeddings") is None and trained is not None:
            parameters = {**parameters, "original_max_position_embeddings": trained}
        return parameters

    def rope(self, layer_type: str = "full_attention", *, theta_key: str = "rope_theta") -> Rope:
        """The rotation of one kind of layer."""
        parameters = self.rope_parameters(layer_type)
        theta = Config(parameters).number("rope_theta", self.number(theta_key, 10000.0))
        _, _, head_dim = self.heads
        partial = parameters.get("partial_rotary_factor", self.content.get("partial_rotary_factor", 1.0))
        if not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise InvalidArgument(f"config.partial_rotary_factor = {partial!r}: above 0, at most 1")
        scaling = scaling_from_config(parameters)
        rotary = None if partial == 1 or isinstance(scaling, ProportionalScaling) else int(head_dim * partial)
        return Rope(theta, rotary, scaling=scaling)


def _uniform(config: Config, windows: list[int | None], **changes: Any) -> list[Layer]:
    queries, kv_heads, head_dim = config.heads
    rope = config.rope()
    return [AttentionLayer(queries, kv_heads, head_dim, window=window, rope=rope, **changes) for window in windows]


def _windows(config: Config) -> list[int | None]:
    """The window of each layer: by `layer_types` where there are any, of all layers otherwise."""
    types = config.layer_types()
    if types is None:
        return [config.content["sliding_window"]] * config.layer_count
    window = config.integer("sliding_window") if "sliding_attention" in types else None
    return [window if kind == "sliding_attention" else None for kind in types]


def _alternating(config: Config, period: int, other: str = "sliding_attention") -> list[str]:
    """The kind of each layer: by `layer_types`, or else every so many is full attention."""
    return config.layer_types(other) or [
        other if (index + 1) % period else "full_attention" for index in range(config.layer_count)
    ]


def _llama(config: Config) -> list[Layer]:
    return _uniform(config, [None] * config.layer_count)


def _mistral(config: Config) -> list[Layer]:
    return _uniform(config, _windows(config))


def _qwen(config: Config) -> list[Layer]:
    if config.content.get("use_sliding_window") is not True or config.content["sliding_window"] is None:
        return _llama(config)
    if config.layer_types() is not None:
        return _mistral(config)
    # transformers: layers from max_window_layers on are windowed.
    first = config.integer("max_window_layers", low=0)
    window = config.integer("sliding_window")
    return _uniform(config, [window if index >= first else None for index in range(config.layer_count)])


def _qwen_moe(config: Config) -> list[Layer]:
    """All layers are windowed or none, whatever else the config says."""
    return _mistral(config) if config.content.get("use_sliding_window") is True else _llama(config)


def _smollm3(config: Config) -> list[Layer]:
    rotates = config.sequence("no_rope_layers", config.layer_count)
    if rotates is None:
        interval = config.integer("no_rope_layer_interval")
        rotates = [int((index + 1) % interval != 0) for index in range(config.layer_count)]
    windows: list[int | None] = [None] * config.layer_count
    if config.content.get("use_sliding_window") is True:
        if config.layer_types() is not None:
            windows = _windows(config)
        else:
            windows = [None if rotate else config.content["sliding_window"] for rotate in rotates]
    # 1 means that the layer does rotate, whatever the name says.
    return [
        layer if rotate else AttentionLayer(layer.num_q_heads, layer.num_kv_heads, layer.head_dim, window=layer.window)
        for layer, rotate in zip(_uniform(config, windows), rotates, strict=True)
        if isinstance(layer, AttentionLayer)
    ]


def _gemma3(config: Config) -> list[Layer]:
    types = _alternating(config, config.integer("sliding_window_pattern"))
    queries, kv_heads, head_dim = config.heads
    window = config.integer("sliding_window")
    scale = config.number("query_pre_attn_scalar") ** -0.5
    capped = config.content.get("attn_logit_softcapping") is not None
    # `rope_scaling` is of full layers, where `rope_parameters` does not say more.
    local = Config({key: value for key, value in config.content.items() if key != "rope_scaling"})
    ropes = {
        "full_attention": config.rope("full_attention"),
        "sliding_attention": local.rope("sliding_attention", theta_key="rope_local_base_freq"),
    }
    return [
        AttentionLayer(
            queries,
            kv_heads,
            head_dim,
            window=window if kind == "sliding_attention" else None,
            scale=scale,
            rope=ropes[kind],
            softcap=config.number("attn_logit_softcapping") if capped else None,
        )
        for kind in types
    ]


def _gemma4(config: Config) -> list[Layer]:
    """Full layers have heads of their own, and the last layers may read the K and V of earlier ones."""
    count = config.layer_count
    # As transformers has it, the last layer is full whatever its type.
    types = [*_alternating(config, 6)[:-1], "full_attention"]
    queries, kv_heads, head_dim = config.heads
    window = config.integer("sliding_window")
    full_dim = config.integer("global_head_dim")
    k_eq_v = config.content.get("attention_k_eq_v") is True
    full_heads = config.integer("num_global_key_value_heads", kv_heads) if k_eq_v else kv_heads
    shared = config.integer("num_kv_shared_layers", low=0, high=count - 1)
    owners: dict[str, int] = {}
    layers: list[Layer] = []
    for index, kind in enumerate(types):
        owner = owners.get(kind) if index >= count - shared else None
        if owner is None:
            owners[kind] = index
        full = kind == "full_attention"
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
    window = config.integer("sliding_window")
    windows = [window if kind == "sliding_attention" else None for kind in _alternating(config, 2)]
    return _uniform(config, windows, sinks=True)


def _gated_delta_net(config: Config) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: full attention every few layers, gated delta networks between."""
    types = _alternating(config, config.integer("full_attention_interval"), "linear_attention")
    queries, kv_heads, head_dim = config.heads
    full = AttentionLayer(queries, kv_heads, head_dim, rope=config.rope())
    k_heads, v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    k_dim, v_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim")
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    state = StateLayer(v_heads * k_dim * v_dim, channels * (kernel - 1))
    return [full if kind == "full_attention" else state for kind in types]


def _deepseek(config: Config) -> list[Layer]:
    """Multi-head latent attention: one row of kv_lora_rank + qk_rope_head_dim a token, of which V is the first part."""
    latent, rotated = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    queries = config.integer("num_attention_heads", high=4096)
    scale = (config.integer("qk_nope_head_dim") + rotated) ** -0.5
    scale *= score_factor_from_config(config.rope_parameters())
    layer = AttentionLayer(queries, 1, latent + rotated, latent, scale=scale, v_alias=True)
    return [layer] * config.layer_count


def _heads(queries: int, kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    """`head_dim` None: hidden_size // num_attention_heads."""
    return {"num_attention_heads": queries, "num_key_value_heads": kv_heads, "head_dim": head_dim}


_QWEN = _heads(32, 32) | {"sliding_window": 4096, "max_window_layers": 28}
_GATED = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
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
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
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

_FAMILIES: dict[str, tuple[Callable[[Config], list[Layer]], dict[str, Any]]] = {
    "llama": (_llama, {"num_attention_heads": 32}),
    "mistral": (_mistral, _heads(32, 8) | {"sliding_window": 4096}),
    "qwen2": (_qwen, _QWEN),
    "qwen3": (_qwen, _QWEN | {"head_dim": 128}),
    "qwen3_moe": (_qwen_moe, _heads(32, 4) | {"sliding_window": 4096}),
    "qwen3_next": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "qwen3_5": (_gated_delta_net, _heads(16, 4, 256) | _GATED),
    "qwen3_5_text": (_gated_delta_net, _heads(16, 4, 256) | _GATED),
    "qwen3_5_moe": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "qwen3_5_moe_text": (_gated_delta_net, _heads(16, 2, 256) | _GATED),
    "smollm3": (_smollm3, _heads(16, 4) | {"sliding_window": None, "no_rope_layer_interval": 4, "rope_theta": 2e6}),
    "gemma3": (_gemma3, _GEMMA_3),
    "gemma3_text": (_gemma3, _GEMMA_3),
    "gemma4": (_gemma4, _GEMMA_4),
    "gemma4_text": (_gemma4, _GEMMA_4),
    "gpt_oss": (
        _gpt_oss,
        _heads(64, 8, 64) | {"sliding_window": 128, "rope_theta": 1.5e5, "rope_parameters": _GPT_OSS_ROPE},
    ),
    "deepseek_v3": (
        _deepseek,
        {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    ),
}
"""How the layers of a family are read, and what transformers takes where a config does not have a key."""
