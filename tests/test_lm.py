"""The language model against a float64 forward pass that shares no code with it, over pages and over plain arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import ml_dtypes
import numpy as np
import pagoda
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagoda.lm import ContiguousCache, LanguageModel, Read, Sampler, Written, generate
from pagoda.lm.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from safetensors.numpy import load_file, save_file

TEXT = np.frombuffer(b"In the beginning was the page, and the page was with the block, 32 by 32.", np.uint8).astype(
    np.int64
)


def paged(model: LanguageModel) -> pagoda.Cache:
    options: dict[str, Any] = {"page_size": 8, "k_dtype": "f32", "v_dtype": "f32", "threads": 2}
    return pagoda.Cache(model.spec, device_memory="1MiB", host_memory="1MiB", **options)


def contiguous(model: LanguageModel) -> ContiguousCache:
    return ContiguousCache(model.spec, k_dtype="f32", v_dtype="f32")


CACHES: list[Callable[[LanguageModel], Any]] = [paged, contiguous]


@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_logits_match_the_reference(name: str, make_cache: Any, tmp_path: Path) -> None:
    """In one chunk, in several, token by token, and with two sequences in a batch."""
    config, weights = checkpoints.make(tmp_path, name)
    expected = checkpoints.reference_logits(config, weights, TEXT)
    model = LanguageModel.load(tmp_path)
    for cuts in ([], [1], [30, 31, 64], list(range(1, len(TEXT)))):
        cache = make_cache(model)
        sequence, logits = cache.create(), []
        for part in np.split(TEXT, cuts):
            with cache.step([sequence], [len(part)]) as step:
                logits.append(model.forward(part, step, logits="all"))
        np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=2e-4)
    cache = make_cache(model)
    a, b = cache.create(), cache.create()
    with cache.step([a, b], [20, 40]) as step:
        both = model.forward(np.concatenate([TEXT[:20], TEXT[:40]]), step)
    np.testing.assert_allclose(both, expected[[19, 39]], rtol=0, atol=2e-4)
    with cache.step([a, b], [0, 33]) as step:
        last = model.forward(TEXT[40:73], step)
    np.testing.assert_allclose(last, expected[[72]], rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_of_every_type(dtype: Any, tmp_path: Path) -> None:
    config, weights = checkpoints.make(tmp_path, "llama", dtype=dtype)
    model = LanguageModel.load(tmp_path)
    cache = contiguous(model)
    with cache.step([cache.create()], [20]) as step:
        logits = model.forward(TEXT[:20], step, logits="all")
    np.testing.assert_allclose(logits, checkpoints.reference_logits(config, weights, TEXT[:20]), rtol=0, atol=2e-4)


def test_checkpoints_in_parts(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    whole = LanguageModel.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    both = []
    for model in (whole, LanguageModel.load(str(tmp_path))):
        cache = contiguous(model)
        with cache.step([cache.create()], [9]) as step:
            both.append(model.forward(TEXT[:9], step))
    np.testing.assert_array_equal(both[0], both[1])


def test_checkpoints_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(pagoda.InvalidArgument, match="folder = "):
        LanguageModel.load(tmp_path / "nowhere")
    checkpoints.make(tmp_path, "llama")
    good = load_file(tmp_path / "model.safetensors")

    def refused(match: str) -> None:
        with pytest.raises(pagoda.InvalidArgument, match=match):
            LanguageModel.load(tmp_path)

    save_file({k: v for k, v in good.items() if "layers.2.mlp.up" not in k}, tmp_path / "model.safetensors")
    refused(r"model\.layers\.2\.mlp\.up_proj")
    save_file(good | {"model.norm.weight": np.ones(7, np.float32)}, tmp_path / "model.safetensors")
    refused(r"model\.norm\.weight has shape \[7\]")
    save_file(good | {"model.norm.weight": np.ones(48, np.int32)}, tmp_path / "model.safetensors")
    refused("is I32")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    refused("safetensors")
    (tmp_path / "model.safetensors").unlink()
    refused("with an index")
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "mamba"}, {"hidden_act": "gelu"}, {"vocab_size": -1}, {"rms_norm_eps": 0}):
        save_file(good, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        refused(next(iter(change)))


def test_tokens_that_cannot_be(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    cache = paged(model)
    for tokens in ([1.5, 2.0], [[1, 2]], [1], [1, 256], [1, -1]):
        with pytest.raises(pagoda.InvalidArgument, match="tokens"), cache.step([cache.create()], [2]) as step:
            model.forward(np.array(tokens), step)
    cache.audit()


@given(st.binary(max_size=200))
def test_bytes_come_back(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    tokenizer = ByteTokenizer()
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.feed, tokenizer.encode(text).tolist())) == text
    decoder = tokenizer.decoder()
    shown = "".join(map(decoder.feed, data))
    assert text.startswith(shown)
    assert ByteTokenizer(256).encode(text)[0] == 256


def test_a_mark_that_is_no_token_is_refused(tmp_path: Path) -> None:
    for mark in (255, 1 << 63, 10**30):
        with pytest.raises(pagoda.InvalidArgument, match=f"bos_token_id = {mark}: an int from 256"):
            ByteTokenizer(mark)
    checkpoints.make(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 10**30}))
    with pytest.raises(pagoda.InvalidArgument, match=r"bos_token_id = 10+: an int from 256"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(("mark", "tokens"), [(None, [97]), (1, [97]), (255, [97]), (256, [256, 97]), (257, [257, 97])])
def test_a_mark_that_is_a_byte_marks_no_beginning(mark: int | None, tokens: list[int], tmp_path: Path) -> None:
    """A config may have that of the tokenizer which its family usually has."""
    config = {"pagoda_tokenizer": "bytes", "bos_token_id": mark}
    assert load_tokenizer(tmp_path, config).encode("a").tolist() == tokens


def test_tokenizer_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", "the", "page", "block"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = FileTokenizer(tmp_path / "tokenizer.json")
    assert ours.encode("the page the pagoda").tolist() == [1, 2, 1, 0]
    assert ours.decode(iter(ours.encode("the page").tolist())) == "the page"
    assert ours.encode("").dtype == np.int64
    decoder = ours.decoder()
    ids = [1, 2, 3] * 20
    assert "".join(map(decoder.feed, ids)) == tokenizer.decode(ids)
    # A file may still have its settings from training.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8, pad_id=3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(tmp_path / "tokenizer.json").encode("the page the pagoda").tolist() == [1, 2, 1, 0]


def test_a_tokenizer_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        pagoda.InvalidArgument, match=r"^model = .*: a tokenizer\.json, or \"pagoda_tokenizer\": \"bytes\""
    ):
        load_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(pagoda.BackendUnavailable, match=r"pip install 'pagoda-kv\[tokenizers\]'"):
        load_tokenizer(tmp_path, {})


def test_a_tokenizer_file_may_be_interrupted(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0}, unk_token="the")).save(
        str(tmp_path / "tokenizer.json")
    )

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    ours = FileTokenizer(tmp_path / "tokenizer.json")
    ours._tokenizer = SimpleNamespace(encode=interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.encode("the")


@pytest.mark.parametrize(
    ("part", "lie", "refused"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "a readable tokenizer.json"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "one with tokens for the text"),
        ("model", {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}, "one with tokens for the text"),
    ],
)
def test_tokenizer_files_that_contradict_themselves(
    part: str, lie: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    """The library panics, or raises a plain `Exception`."""
    tokenizers = pytest.importorskip("tokenizers")
    honest = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0}, unk_token="the")).to_str()
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(honest) | {part: lie}))
    with pytest.raises(pagoda.InvalidArgument, match=f"tokenizer = .*: {refused} "):
        FileTokenizer(path).encode("page")


def test_samplers() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0, -5.0], np.float32)
    assert Sampler().pick(logits) == 1, "ties go to the lower token"
    ids, chances = Sampler(1.0).distribution(logits)
    assert ids.tolist() == [1, 2, 3, 0, 4]
    exact = np.exp(logits.astype(np.float64)[ids])
    np.testing.assert_allclose(chances, exact / exact.sum(), rtol=1e-12)
    assert Sampler(1.0, top_k=2).distribution(logits)[0].tolist() == [1, 2]
    assert Sampler(1.0, top_p=0.5).distribution(logits)[0].tolist() == [1, 2]
    assert Sampler(1.0, top_p=0.01).distribution(logits)[0].tolist() == [1]
    cold, hot = (Sampler(t).distribution(logits)[1][0] for t in (0.1, 10.0))
    assert cold > chances[0] > hot
    sampler = Sampler(1.0)
    draws = [sampler.pick(logits) for _ in range(2000)]
    drawn = [draws.count(token) / len(draws) for token in ids]
    np.testing.assert_allclose(drawn, chances, atol=0.05)
    for options in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}):
        with pytest.raises(pagoda.InvalidArgument, match=next(iter(options))):
            Sampler(**options)


def test_generation_reads_writes_and_goes_on(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "smollm3")
    model = LanguageModel.load(tmp_path)
    runs = []
    for make_cache in CACHES:
        cache = make_cache(model)
        sequence = cache.create()
        events = list(generate(model, cache, sequence, TEXT, 10, Sampler(), chunk=16))
        assert [e.tokens for e in events if isinstance(e, Read)] == [16, 32, 48, 64, 73]
        written = [e.token for e in events if isinstance(e, Written)]
        assert len(sequence) == len(TEXT) + 9, "the last token written has not been read"
        more = list(generate(model, cache, sequence, np.array(written[-1:]), 5, Sampler()))
        runs.append(written + [e.token for e in more if isinstance(e, Written)])
    assert runs[0] == runs[1]
    for tokens, shown in (([], "0 tokens"), ([1, 256, 7], "1 to 256"), ([-1, 3], "-1 to 3")):
        with pytest.raises(pagoda.InvalidArgument, match=f"^prompt = {shown}: at least one token, all from 0 to 255$"):
            list(generate(model, cache, cache.create(), np.array(tokens, np.int64), 1, Sampler()))
