"""The shipped model and random ones against transformers, where torch is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from examples import example_of
from pagoda.lm import ContiguousCache, LanguageModel
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.torch


def compare(folder: Path, tokens: np.ndarray, tolerance: float) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
    model = LanguageModel.load(folder)
    cache = ContiguousCache(model.spec, k_dtype="f32", v_dtype="f32")
    with cache.step([cache.create()], [len(tokens)]) as step:
        logits = model.forward(tokens, step, logits="all")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


def test_the_shipped_model() -> None:
    compare(SHIPPED_MODEL, np.frombuffer(SHIPPED_TEXT.read_bytes()[:4096], np.uint8).astype(np.int64), 2e-3)


@pytest.mark.parametrize("name", [name for name in checkpoints.FAMILIES if "growing" not in name])
def test_random_models(name: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, name)
    compare(tmp_path, np.arange(100) * 37 % 256, 2e-4)


# Settings that differ from the usual ones. Gemma 4: full layers with K derived from V, and layers that read the K and V of
# earlier ones.
EXAMPLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma2": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_the_docs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks, batched with another, compared with whole prompts under transformers' own attention."""
    monkeypatch.setenv("PAGODA_KV_DTYPE", "f32")
    base = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 24,
    }
    config = transformers.AutoConfig.for_model(name, **(base | EXAMPLES[name]))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.save_pretrained(tmp_path)
    names: dict[str, Any] = {"folder": tmp_path}
    exec(example_of("docs/transformers.md"), names)
    prompts = [np.arange(50) * 37 % 256, np.arange(31) * 91 % 256]
    one, other = (prompt.tolist() for prompt in prompts)
    with names["cache"] as cache:
        sequences = [cache.create(), cache.create()]
        parts = [names["forward"](sequences, tokens) for tokens in ([one[:40], other[:1]], [one[40:], other[1:]])]
        cache.audit()
    for prompt, logits in zip(prompts, zip(*parts, strict=True), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor(prompt)[None]).logits[0].numpy()
        np.testing.assert_allclose(torch.cat(logits).numpy(), expected, rtol=0, atol=2e-5)
