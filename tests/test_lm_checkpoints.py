"""Checkpoints that do not match their config, and checkpoints in parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from pagoda.lm import ContiguousCache, LanguageModel
from pagoda.lm.checkpoint import Checkpoint
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

TOKENS = np.arange(24) * 37 % 256
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def rewrite(folder: Path, change: dict[str, Any], edit: Callable[[Tensors], Tensors]) -> tuple[dict[str, Any], Tensors]:
    config = json.loads((folder / "config.json").read_text()) | change
    tensors = edit(load_file(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def logits_of(folder: Path) -> Array:
    model = LanguageModel.load(folder)
    cache = ContiguousCache(model.spec, k_dtype="f32", v_dtype="f32")
    with cache.step([cache.create()], [len(TOKENS)]) as step:
        logits: Array = model.forward(TOKENS, step, logits="all")
    return logits


def with_biases(*parts: str) -> Callable[[Tensors], Tensors]:
    rng = np.random.default_rng(3)

    def edit(tensors: Tensors) -> Tensors:
        chosen = [name for name in tensors if any(f"{part}.weight" in name for part in parts)]
        widths = {name.removesuffix("weight") + "bias": len(tensors[name]) for name in chosen}
        return tensors | {name: 0.3 * rng.standard_normal(width).astype(np.float32) for name, width in widths.items()}

    return edit


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("llama", {"mlp_bias": True}, MLP),
        ("qwen3", {"attention_bias": True}, ATTENTION),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}, ATTENTION + MLP),
        ("qwen2", {"attention_bias": None}, ATTENTION[:3]),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, ()),
        ("qwen3", {"mlp_bias": True}, ()),
    ],
)
def test_biases(name: str, change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    """Every bias counts, and each family has those that it has in transformers."""
    checkpoints.make(tmp_path, name)
    config, tensors = rewrite(tmp_path, change, with_biases(*parts))
    expected = checkpoints.reference_logits(config, tensors, TOKENS)
    np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("given", [None, 1e-4])
def test_the_epsilon_of_norms(given: float | None, tmp_path: Path) -> None:
    """It matters as embeddings are small. The default is that of transformers."""
    checkpoints.make(tmp_path, "llama")
    small = 1e-3 * load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    config, tensors = rewrite(tmp_path, {"rms_norm_eps": given}, plus("model.embed_tokens.weight", small))
    expected = checkpoints.reference_logits(config | {"rms_norm_eps": given or 1e-6}, tensors, TOKENS)
    np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=1e-6)


def test_an_activation_that_a_config_leaves_out(tmp_path: Path) -> None:
    config, tensors = checkpoints.make(tmp_path, "llama")
    expected = checkpoints.reference_logits(config, tensors, TOKENS)
    del config["hidden_act"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=2e-4)


def test_gates_far_from_0(tmp_path: Path) -> None:
    """exp(-gate) is beyond float32 for the lowest."""
    checkpoints.make(tmp_path, "llama")
    config, tensors = rewrite(
        tmp_path, {}, lambda stored: {name: rows * (80 if "gate" in name else 1) for name, rows in stored.items()}
    )
    expected = checkpoints.reference_logits(config, tensors, TOKENS)
    np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=2e-4)


LONG = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def plus(name: str, tensor: Array) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


@pytest.mark.parametrize(
    ("name", "change", "edit", "refused"),
    [
        ("qwen3", {}, without("q_norm"), r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight; \[16\]"),
        ("qwen3", {}, without("layers.2.self_attn.k_norm"), r"no tensor model\.layers\.2\.self_attn\.k_norm"),
        ("qwen2", {}, without("bias"), r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias; \[96\]"),
        ("llama with biases", {}, without("layers.1.self_attn.o_proj.bias"), r"layers\.1\.self_attn\.o_proj\.bias"),
        ("llama", {"mlp_bias": True}, dict, r"no tensor model\.layers\.0\.mlp\.gate_proj\.bias"),
        ("llama with untied head", {}, without("lm_head"), r"no tensor lm_head\.weight; \[256, 48\]"),
        ("llama", {}, plus("model.layers.3.self_attn.q_proj.bias", np.ones(96, np.float32)), r"layers\.3.*not part of"),
        ("llama", {}, plus("model.layers.0.self_attn.q_norm.weight", np.ones(16, np.float32)), "q_norm.*not part of"),
        ("llama", {}, plus("lm_head.bias", np.zeros(256, np.float32)), r"lm_head\.bias: not part of"),
        ("llama", {}, plus("model.norm.bias", np.zeros(48, np.float32)), r"model\.norm\.bias: not part of"),
        ("llama", {"num_hidden_layers": 3}, dict, r"layers\.3.*not part of the llama model"),
        ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 1e-3}}}, dict, "per_layer_config = "),
        ("llama", {"model_type": "gemma"}, dict, "model_type = 'gemma': one of llama, mistral, "),
        ("llama", {"attention_bias": 1}, dict, "attention_bias = 1"),
        ("llama", {"tie_word_embeddings": "yes"}, dict, "tie_word_embeddings = 'yes'"),
        ("llama", {"eos_token_id": "</s>"}, dict, "eos_token_id = '</s>'"),
        ("llama", {"eos_token_id": [2, None]}, dict, "eos_token_id"),
        ("llama", {"eos_token_id": [True]}, dict, r"eos_token_id = \[True\]"),
        ("llama", {"eos_token_id": -1}, dict, "eos_token_id = -1"),
        ("llama", {"rms_norm_eps": float("nan")}, dict, "rms_norm_eps = nan"),
        ("llama", {"rms_norm_eps": 1e300}, dict, r"config\.rms_norm_eps = 1e\+300: .* to 1e\+18"),
        ("llama", {"rope_theta": float("nan")}, dict, "rope_theta = nan"),
        ("llama", LONG, dict, r"config\.rope_scaling\.short_factor = \[1\.0, .*\]: \[4\.0, .*\], the long_factor"),
        ("smollm3", {"pagoda_query_log_scale": {"floor": 8.0}}, dict, r"query_log_scale\.coefficient = nan"),
        ("smollm3", {"pagoda_query_log_scale": {"coefficient": 0.3}}, dict, r"query_log_scale\.floor = nan"),
        ("smollm3", {"pagoda_query_log_scale": {"floor": 1.0, "coefficient": 1e300}}, dict, r"coefficient = 1e\+300"),
        ("smollm3", {"pagoda_query_log_scale": 0.3}, dict, "query_log_scale = 0.3"),
    ],
)
def test_what_would_be_another_model(
    name: str, change: dict[str, Any], edit: Callable[[Tensors], Tensors], refused: str, tmp_path: Path
) -> None:
    checkpoints.make(tmp_path, name)
    rewrite(tmp_path, change, edit)
    with pytest.raises(pagoda.InvalidArgument, match=refused):
        LanguageModel.load(tmp_path)


def test_contexts_short_and_long_that_turn_alike(tmp_path: Path) -> None:
    """LongRoPE with all factors 4 is linear scaling."""
    checkpoints.make(tmp_path, "llama")
    alike = {"rope_type": "longrope", "attention_factor": 1.0, "short_factor": [4.0] * 8, "long_factor": [4.0] * 8}
    rewrite(tmp_path, LONG | {"rope_scaling": alike}, dict)
    found = logits_of(tmp_path)
    rewrite(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, dict)
    np.testing.assert_allclose(found, logits_of(tmp_path), rtol=0, atol=1e-5)


def test_tensors_that_do_not_matter(tmp_path: Path) -> None:
    """Frequencies in old checkpoints are ignored, and so is what belongs neither to the layers nor to the head."""
    checkpoints.make(tmp_path, "llama")
    expected = logits_of(tmp_path)
    names = [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(4)] + [
        "visual.patch_embed.weight"
    ]
    extra: Tensors = {name: np.ones(8, np.float32) for name in names}
    rewrite(tmp_path, {}, lambda tensors: tensors | extra)
    np.testing.assert_array_equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2", False), ("smollm3", True)])
def test_heads_whose_config_does_not_say_whether_they_are_tied(name: str, tied: bool, tmp_path: Path) -> None:
    """As in transformers: SmolLM3 is tied by default, the others are not."""
    config, tensors = checkpoints.make(tmp_path, name)
    rewrite(tmp_path, {"tie_word_embeddings": None}, dict)
    if tied:
        expected = checkpoints.reference_logits(config, tensors, TOKENS)
        np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=5e-4)
    else:
        with pytest.raises(pagoda.InvalidArgument, match=r"no tensor lm_head\.weight"):
            LanguageModel.load(tmp_path)


def test_a_tied_head_that_is_stored(tmp_path: Path) -> None:
    """As in transformers, a stored head is used, equal to the embedding or not; without an embedding it serves as one."""
    config, tensors = checkpoints.make(tmp_path, "llama")
    embedding = tensors["model.embed_tokens.weight"]
    tied = checkpoints.reference_logits(config, tensors, TOKENS)
    rewrite(tmp_path, {}, plus("lm_head.weight", embedding))
    np.testing.assert_allclose(logits_of(tmp_path), tied, rtol=0, atol=2e-4)
    rewrite(tmp_path, {}, without("embed_tokens"))
    np.testing.assert_allclose(logits_of(tmp_path), tied, rtol=0, atol=2e-4)
    head = np.random.default_rng(5).standard_normal((256, 48)).astype(np.float32)
    both = tensors | {"lm_head.weight": head}
    save_file(both, tmp_path / "model.safetensors")
    expected = checkpoints.reference_logits(config, both, TOKENS)
    np.testing.assert_allclose(logits_of(tmp_path), expected, rtol=0, atol=5e-4)
    rewrite(tmp_path, {}, lambda stored: without("embed_tokens")(without("lm_head")(stored)))
    with pytest.raises(pagoda.InvalidArgument, match=r"no tensor model\.embed_tokens\.weight"):
        LanguageModel.load(tmp_path)


def split(folder: Path, parts: dict[str, Tensors], weight_map: Any) -> None:
    (folder / "model.safetensors").unlink()
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "refused"),
    [
        ({"x": "../a.safetensors"}, r"parts in the folder itself, not '\.\./a\.safetensors'"),
        ({"x": "a.safetensors", "y": "b.safetensors"}, r"model\.norm\.weight is in a\.safetensors too"),
        ({"x": "a.safetensors", "y": "gone.safetensors"}, r"gone\.safetensors"),
        ({"x": "\ud800"}, "a readable safetensors file"),
        ({"x": 5}, "with an index"),
        ([], "with an index"),
    ],
)
def test_parts_that_cannot_be(weight_map: Any, refused: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    split(tmp_path, {"a.safetensors": tensors, "b.safetensors": norm}, weight_map)
    with pytest.raises(pagoda.InvalidArgument, match=refused):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("index", ["{}", "[" * 100_000, "?"])
def test_an_index_that_cannot_be(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(pagoda.InvalidArgument, match="parts with an index"):
        Checkpoint(tmp_path)


def test_an_index_without_an_end(tmp_path: Path) -> None:
    """The index is a sparse file of 256 MiB: no more is read than an index may have."""
    checkpoints.make(tmp_path, "llama")
    split(tmp_path, {}, {})
    os.truncate(tmp_path / "model.safetensors.index.json", 256 << 20)
    tracemalloc.start()
    with pytest.raises(pagoda.InvalidArgument, match="at most 16777216 bytes"):
        LanguageModel.load(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_tensors_of_every_type_are_read_exactly(dtype: Any, tmp_path: Path) -> None:
    """Also among tensors of unsupported types, in any order in the file."""
    rng = np.random.default_rng(7)
    tensors: Tensors = {
        "a": rng.standard_normal((3, 5)).astype(dtype),
        "b": np.arange(7, dtype=np.int64),
        "c": np.array([0.0, -0.0, 1.5, 2.0**-20, np.inf, -np.inf]).astype(dtype),
        "d": np.zeros((0, 4), dtype),
        "e": np.ones(3, bool),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    for name in "dca":
        found = checkpoint.take(name, *tensors[name].shape)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, tensors[name].astype(np.float32))
    with pytest.raises(pagoda.InvalidArgument, match="b is I64"):
        checkpoint.take("b", 7)
    with pytest.raises(pagoda.InvalidArgument, match="no tensor a"):
        checkpoint.take("a", 3, 5)
    assert checkpoint.rest("") == ["e"]


def test_numbers_that_float32_does_not_have(tmp_path: Path) -> None:
    save_file({"a": np.array([1.0, -1e300, np.inf])}, tmp_path / "model.safetensors")
    with pytest.raises(pagoda.InvalidArgument, match=r"checkpoint: a = numbers up to 1e\+300: those of float32"):
        Checkpoint(tmp_path).take("a", 3)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    checkpoint = Checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(pagoda.InvalidArgument, match="as when it was opened"):
        checkpoint.take("model.norm.weight", 48)


def test_weights_that_memory_has_no_room_for(tmp_path: Path) -> None:
    """256 MiB of embeddings can be read, but not held as float32, which takes 512 MiB. The file is sparse."""
    checkpoints.make(tmp_path, "llama")
    rewrite(tmp_path, {"hidden_size": 512 << 10}, dict)
    entry = {"dtype": "BF16", "shape": [256, 512 << 10], "data_offsets": [0, 256 << 20]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (256 << 20))
    script = """
import resource, sys
from pagoda.cli import main
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (600 << 20), resource.RLIM_INFINITY))
sys.exit(main(["generate", "--prompt", "a", "--model", sys.argv[1]]))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("pagoda: ")
