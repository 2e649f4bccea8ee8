"""Known models: the parts of their config.json that determine what is stored. Sources: the models' own configs."""

from __future__ import annotations

import difflib
from typing import Any

from pagoda.checks import check_text
from pagoda.errors import InvalidArgument


def preset_config(name: str) -> dict[str, Any]:
    """The config of a known model. For others raises InvalidArgument, with similar names."""
    check_text("name", name)
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(PRESETS)}"
        raise InvalidArgument(f"name = {name!r}: a preset; {hint}")
    return PRESETS[name]


def _dense(
    kind: str, layers: int, heads: int, kv_heads: int, head_dim: int, theta: float, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
    } | more


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }


def _gemma2(layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int) -> dict[str, Any]:
    scores = {"query_pre_attn_scalar": scalar, "attn_logit_softcapping": 50.0}
    return _dense("gemma2", layers, heads, kv_heads, head_dim, 1e4, sliding_window=4096, **scores)


def _gemma3(layers: int, heads: int, kv_heads: int, head_dim: int, window: int, scalar: int) -> dict[str, Any]:
    scaling = {} if layers == 26 else {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    local = {"sliding_window": window, "query_pre_attn_scalar": scalar, "rope_local_base_freq": 10000.0}
    return _dense("gemma3_text", layers, heads, kv_heads, head_dim, 1e6, **local, **scaling)


def _gemma4(layers: int, heads: int, kv_heads: int, full_kv_heads: int) -> dict[str, Any]:
    kinds = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(layers)]
    return {
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": kinds,
        "attention_k_eq_v": True,
    }


def _deepseek3(kind: str, heads: int, theta: float, **yarn: float) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": 61,
        "num_attention_heads": heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "rope_theta": theta,
        "rope_scaling": {
            "type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            **yarn,
        },
    }


def _qwen35(kind: str, layers: int, heads: int, kv_heads: int, v_heads: int, theta: float = 1e7) -> dict[str, Any]:
    linear = {
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
    }
    return _dense(kind, layers, heads, kv_heads, 256, theta, **linear)


PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _dense("llama", 32, 32, 32, 128, 1e4),
    "llama-2-13b": _dense("llama", 40, 40, 40, 128, 1e4),
    "llama-2-70b": _dense("llama", 80, 64, 8, 128, 1e4),
    "llama-3-8b": _dense("llama", 32, 32, 8, 128, 5e5),
    "llama-3.1-8b": _dense("llama", 32, 32, 8, 128, 5e5, **_llama3(8.0)),
    "llama-3.1-70b": _dense("llama", 80, 64, 8, 128, 5e5, **_llama3(8.0)),
    "llama-3.2-1b": _dense("llama", 16, 32, 8, 64, 5e5, **_llama3(32.0)),
    "llama-3.2-3b": _dense("llama", 28, 24, 8, 128, 5e5, **_llama3(32.0)),
    "mistral-7b-v0.1": _dense("mistral", 32, 32, 8, 128, 1e4, sliding_window=4096),
    "mistral-7b-v0.3": _dense("mistral", 32, 32, 8, 128, 1e6, sliding_window=None),
    "mixtral-8x7b": _dense("mixtral", 32, 32, 8, 128, 1e6, sliding_window=None),
    "qwen3-0.6b": _dense("qwen3", 28, 16, 8, 128, 1e6),
    "qwen3-1.7b": _dense("qwen3", 28, 16, 8, 128, 1e6),
    "qwen3-4b": _dense("qwen3", 36, 32, 8, 128, 1e6),
    "qwen3-8b": _dense("qwen3", 36, 32, 8, 128, 1e6),
    "qwen3-14b": _dense("qwen3", 40, 40, 8, 128, 1e6),
    "qwen3-32b": _dense("qwen3", 64, 64, 8, 128, 1e6),
    "qwen3-30b-a3b": _dense("qwen3_moe", 48, 32, 4, 128, 1e6),
    "qwen3-next-80b-a3b": _qwen35("qwen3_next", 48, 16, 2, 32),
    "qwen3.5-0.8b": _qwen35("qwen3_5_text", 24, 8, 2, 16),
    "qwen3.5-4b": _qwen35("qwen3_5_text", 32, 16, 4, 32),
    "qwen3.5-9b": _qwen35("qwen3_5_text", 32, 16, 4, 32),
    "qwen3.5-27b": _qwen35("qwen3_5_text", 64, 24, 4, 48),
    "qwen3.5-35b-a3b": _qwen35("qwen3_5_moe_text", 40, 16, 2, 32),
    "gemma-2-2b": _gemma2(26, 8, 4, 256, 256),
    "gemma-2-9b": _gemma2(42, 16, 8, 256, 256),
    "gemma-2-27b": _gemma2(46, 32, 16, 128, 144),
    "gemma-3-1b": _gemma3(26, 4, 1, 256, 512, 256),
    "gemma-3-4b": _gemma3(34, 8, 4, 256, 1024, 256),
    "gemma-3-12b": _gemma3(48, 16, 8, 256, 1024, 256),
    "gemma-3-27b": _gemma3(62, 32, 16, 128, 1024, 168),
    "gemma-4-12b": _gemma4(48, 16, 8, 1),
    "gemma-4-26b-a4b": _gemma4(30, 16, 8, 2),
    "gemma-4-31b": _gemma4(60, 32, 16, 4),
    "gpt-oss-20b": _dense("gpt_oss", 24, 64, 8, 64, 1.5e5, sliding_window=128),
    "gpt-oss-120b": _dense("gpt_oss", 36, 64, 8, 64, 1.5e5, sliding_window=128),
    "smollm2-135m": _dense("llama", 30, 9, 3, 64, 1e5),
    "smollm2-360m": _dense("llama", 32, 15, 5, 64, 1e5),
    "smollm2-1.7b": _dense("llama", 24, 32, 32, 64, 1.3e5),
    "smollm3-3b": _dense("smollm3", 36, 16, 4, 128, 5e6, no_rope_layer_interval=4),
    "minimax-m2": _dense("minimax_m2", 62, 48, 8, 128, 5e6, rotary_dim=64),
    "deepseek-v3": _deepseek3("deepseek_v3", 128, 1e4, factor=40, beta_fast=32, beta_slow=1),
    "kimi-k2-instruct-0905": _deepseek3("kimi_k2", 64, 5e4, factor=64, beta_fast=1, beta_slow=1),
}
