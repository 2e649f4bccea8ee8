"""Tiny random checkpoints, and a forward pass of them in float64 that shares no code with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "pagoda_tokenizer": "bytes",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with untied head": {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "llama 3.1": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3"},
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "smollm3 with growing queries": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 20,
        "pagoda_query_log_scale": {"floor": 8.0, "coefficient": 0.3},
    },
}


def make(folder: Path, name: str, *, dtype: Any = np.float32, seed: int = 0) -> tuple[dict[str, Any], dict[str, Array]]:
    """Writes config.json and model.safetensors; returns the config and the weights as stored."""
    config = BASE | FAMILIES[name]
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (256, hidden)
    for index in range(config["num_hidden_layers"]):
        linears = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
        linears |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
        linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        prefix = f"model.layers.{index}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{prefix}{name}.weight": (width,) for name, width in norms.items()}
        if config.get("attention_bias"):
            biased = ("q_proj", "k_proj", "v_proj") + (("o_proj",) if config["model_type"] == "llama" else ())
            shapes |= {f"{prefix}self_attn.{part}.bias": linears[f"self_attn.{part}"][:1] for part in biased}
    weights = {}
    for key, shape in shapes.items():
        spread = 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        center = 1.0 if "norm" in key else 0.0
        weights[key] = (center + spread * rng.standard_normal(shape)).astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return config, weights


def reference_logits(config: dict[str, Any], weights: dict[str, Array], tokens: Array) -> Array:
    """float64 logits [tokens, vocab] of one sequence from its first token on: every formula again, written the slow way."""
    w = {key: value.astype(np.float64) for key, value in weights.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count, layers = len(tokens), config["num_hidden_layers"]
    types = config.get("layer_types")
    windowed = config["model_type"] == "mistral" or config.get("use_sliding_window")

    def norm(x: Array, weight: Array) -> Array:
        normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight
        return normed

    def rotate(x: Array) -> Array:
        result = x.copy()
        for pair in range(dim // 2):
            frequency = config["rope_theta"] ** (-2 * pair / dim)
            scaling = config.get("rope_scaling")
            if scaling:
                wavelength = 2 * np.pi / frequency
                context = scaling["original_max_position_embeddings"]
                smooth = (context / wavelength - scaling["low_freq_factor"]) / (
                    scaling["high_freq_factor"] - scaling["low_freq_factor"]
                )
                smooth = min(max(smooth, 0.0), 1.0)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
            for position in range(count):
                turn = np.exp(1j * frequency * position)
                complex_pair = (x[position, :, pair] + 1j * x[position, :, pair + dim // 2]) * turn
                result[position, :, pair] = complex_pair.real
                result[position, :, pair + dim // 2] = complex_pair.imag
        return result

    x = w["model.embed_tokens.weight"][tokens]
    for index in range(layers):
        prefix = f"model.layers.{index}."

        def linear(name: str, rows: Array, prefix: str = prefix) -> Array:
            return rows @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

        rows = norm(x, w[f"{prefix}input_layernorm.weight"])
        q = linear("self_attn.q_proj", rows).reshape(count, heads, dim)
        k = linear("self_attn.k_proj", rows).reshape(count, kv_heads, dim)
        v = linear("self_attn.v_proj", rows).reshape(count, kv_heads, dim)
        if config["model_type"] == "qwen3":
            q, k = norm(q, w[f"{prefix}self_attn.q_norm.weight"]), norm(k, w[f"{prefix}self_attn.k_norm.weight"])
        window = (
            config["sliding_window"] if windowed and (types is None or types[index] == "sliding_attention") else None
        )
        if config.get("no_rope_layers", [1] * layers)[index]:
            q, k = rotate(q), rotate(k)
        elif "pagoda_query_log_scale" in config and window is None:
            scale = config["pagoda_query_log_scale"]
            for position in range(count):
                q[position] *= 1 + scale["coefficient"] * np.log(max(1.0, (position + 1) / scale["floor"]))
        mixed = np.zeros_like(q)
        for position in range(count):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                scores = k[first : position + 1, head * kv_heads // heads] @ q[position, head] / np.sqrt(dim)
                chances = np.exp(scores - scores.max())
                mixed[position, head] = chances / chances.sum() @ v[first : position + 1, head * kv_heads // heads]
        x = x + linear("self_attn.o_proj", mixed.reshape(count, -1))
        rows = norm(x, w[f"{prefix}post_attention_layernorm.weight"])
        gate = linear("mlp.gate_proj", rows)
        x = x + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", rows))
    logits: Array = norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    return logits
