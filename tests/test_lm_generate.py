"""The decoding loop and its parts: where it stops, what it samples, what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import numpy as np
import pagoda
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pagoda.cli import main, view
from pagoda.lm import ContiguousCache, LanguageModel, Read, Sampler, Written, generate
from pagoda.lm.generate import BEFORE, _decoder_after
from pagoda.lm.tokenizer import PENDING_MAX, ByteTokenizer, FileTokenizer, _FileDecoder

PROMPT = np.arange(30) * 41 % 256
MORE = 20


def greedy(model: LanguageModel, **options: Any) -> list[int]:
    cache = ContiguousCache(model.spec)
    events = generate(model, cache, cache.create(), PROMPT, MORE, Sampler(), **options)
    return [event.token for event in events if isinstance(event, Written)]


@pytest.mark.parametrize("as_list", [False, True])
def test_it_ends_where_the_model_says(as_list: bool, tmp_path: Path) -> None:
    config, _ = checkpoints.make(tmp_path, "llama")
    everything = greedy(LanguageModel.load(tmp_path))
    assert len(everything) == MORE
    end = everything[7]
    expected = everything[: everything.index(end) + 1]
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [255, end] if as_list else end}))
    model = LanguageModel.load(tmp_path)
    assert greedy(model) == expected, "the end token is written, and nothing after it"
    # Read as by `generate` of transformers, if the file exists.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": everything[0], "temperature": 0.6}))
    assert greedy(LanguageModel.load(tmp_path)) == everything[:1]
    (tmp_path / "generation_config.json").write_text("{}")
    assert greedy(LanguageModel.load(tmp_path)) == expected
    assert greedy(model, stop=()) == everything
    assert greedy(model, stop=everything[:1]) == everything[:1]


def test_a_forward_pass_of_nothing(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "qwen3")
    model = LanguageModel.load(tmp_path)
    caches: list[Any] = [ContiguousCache(model.spec), pagoda.Cache(model.spec, device_memory="8MiB", host_memory=0)]
    for cache in caches:
        with cache.step([cache.create()], [0]) as step:
            assert model.forward(PROMPT[:0], step).shape == (0, 256)
            assert model.forward(PROMPT[:0], step, logits="all").shape == (0, 256)
            with pytest.raises(pagoda.InvalidArgument, match="logits = 'first'"):
                model.forward(PROMPT[:0], step, logits="first")  # type: ignore[arg-type]


def test_an_error_leaves_what_was_committed(tmp_path: Path) -> None:
    """The cache is too small: the sequence holds whole chunks, the cache is consistent, and there is room again."""
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    options: dict[str, Any] = {"page_size": 8, "device_memory": 4 * 8 * model.spec.bytes_per_token(), "host_memory": 0}
    with pagoda.Cache(model.spec, **options) as cache:
        sequence = cache.create()
        with pytest.raises(pagoda.OutOfBlocks):
            list(generate(model, cache, sequence, np.tile(PROMPT, 2), 1, Sampler(), chunk=10))
        assert len(sequence) == 30
        cache.audit()
        sequence.release()
        assert len(list(generate(model, cache, cache.create(), PROMPT, 1, Sampler(), chunk=30))) == 2


def test_counts_that_cannot_be(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    cache = ContiguousCache(model.spec)
    for named, tokens, chunk in (("new_tokens", -1, 512), ("chunk", 1, 0)):
        with pytest.raises(pagoda.InvalidArgument, match=named):
            next(generate(model, cache, cache.create(), PROMPT, tokens, Sampler(), chunk=chunk))


logits_lists = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


@given(logits_lists, st.floats(0.05, 20), st.integers(1, 45), st.floats(0.01, 1.0))
def test_what_may_be_drawn(values: list[float], temperature: float, top_k: int, top_p: float) -> None:
    """Likeliest first, ties by lower token; the first k of these, then as few as hold p of the remaining probability."""
    ids, chances = Sampler(temperature, top_k, top_p).distribution(np.array(values, np.float32))
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))[:top_k]
    assert ids.tolist() == ranked[: len(ids)]
    weights = [np.exp((values[token] - values[ranked[0]]) / temperature) for token in ranked]
    kept, total = weights[: len(ids)], sum(weights)
    assert sum(kept) / total >= top_p - 1e-9
    assert sum(kept[:-1]) / total < top_p + 1e-9, "the last one was needed"
    np.testing.assert_allclose(chances, np.array(kept) / sum(kept), rtol=1e-9)


@given(logits_lists, st.floats(0, 5), st.integers(0, 2**32))
def test_draws_repeat_and_stay_within(values: list[float], temperature: float, seed: int) -> None:
    logits = np.array(values, np.float32)
    a, b = Sampler(temperature, 5, 0.9, seed), Sampler(temperature, 5, 0.9, seed)
    draws = [a.pick(logits) for _ in range(20)]
    assert draws == [b.pick(logits) for _ in range(20)]
    ids, chances = a.distribution(logits)
    assert set(draws) <= set(ids.tolist())
    if temperature == 0:
        assert (ids.tolist(), chances.tolist()) == ([values.index(max(values))], [1.0])


def test_seeds_differ() -> None:
    logits = np.zeros(256, np.float32)
    draws = {tuple(sampler.pick(logits) for _ in range(8)) for sampler in (Sampler(1.0, seed=s) for s in range(50))}
    assert len(draws) == 50


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30])
def test_temperatures_next_to_nothing_are_greedy(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0, -5.0], np.float32)
    assert Sampler(temperature, top_k=1).pick(logits) == 1
    np.testing.assert_array_equal(Sampler(temperature).distribution(logits)[1][:2], [0.5, 0.5])


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0)])
def test_logits_that_cannot_be(sampler: Sampler) -> None:
    for bad in ([1.0, np.nan], [1.0, np.inf], [-np.inf, -np.inf], []):
        for call in (sampler.pick, sampler.distribution):
            with pytest.raises(pagoda.InvalidArgument, match="logits"):
                call(np.array(bad, np.float32))
    assert sampler.pick(np.array([-np.inf, 2.0], np.float32)) == 1


def test_sampler_options_that_cannot_be() -> None:
    for options in ({"top_k": 1.5}, {"seed": -1}, {"seed": 0.5}, {"temperature": float("inf")}):
        with pytest.raises(pagoda.InvalidArgument, match=next(iter(options))):
            Sampler(**options)


@given(st.binary(max_size=100))
def test_any_bytes_go_through(data: bytes) -> None:
    """Input is read with `surrogateescape`; output is as from Python's decoder, with invalid UTF-8 replaced."""
    ids = ByteTokenizer().encode(data.decode("utf-8", "surrogateescape"))
    assert bytes(ids.tolist()) == data
    decoder = ByteTokenizer(256).decoder()
    assert "".join(map(decoder.feed, [256, *ids.tolist()])) + decoder.finish() == data.decode("utf-8", "replace")
    assert ByteTokenizer().decode(ids) == data.decode("utf-8", "replace")


def test_tokens_that_are_none() -> None:
    with pytest.raises(pagoda.InvalidArgument, match="ids = -1: "):
        ByteTokenizer().decode([97, -1])


def test_text_that_is_no_text() -> None:
    with pytest.raises(pagoda.InvalidArgument, match=r"'\\ud800' at 1 "):
        ByteTokenizer().encode("a\ud800")


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """Merges over bytes, as in GPT-2, Llama 3, Qwen and SmolLM: tokens cut characters. Or byte fallback, as in Llama 2."""
    tokenizers = pytest.importorskip("tokenizers")
    models, decoders = tokenizers.models, tokenizers.decoders
    if request.param == "byte level":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(["the page and the block", "日本語日本", "é𐀀é𐀀"] * 4, trainer)
    else:
        pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
        model = models.BPE(vocab=pieces, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return FileTokenizer(path)


def test_bytes_that_a_tokenizer_file_has_no_tokens_for(files: FileTokenizer) -> None:
    with pytest.raises(pagoda.InvalidArgument, match=r"'\\udcff' at 2 "):
        files.encode(b"ab\xff".decode("utf-8", "surrogateescape"))


characters = st.sampled_from(["a", " ", " a", "é", "日本語", "𐀀", "🙂"]) | st.characters(
    codec="utf-8", exclude_characters="▁\ufffd"
)


@given(parts=st.lists(characters, max_size=60))
def test_characters_that_tokens_cut(files: FileTokenizer, parts: list[str]) -> None:
    """They are shown once complete, never changed afterwards, and all shown at the end."""
    text = "".join(parts)
    decoder, shown = files.decoder(), ""
    for token in files.encode(text).tolist():
        shown += decoder.feed(token)
        assert text.startswith(shown)
    assert shown + decoder.finish() == text


class Pieces:
    """A stand-in for a tokenizer: tokens are these bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")


def test_characters_that_every_token_cuts_are_shown_with_the_token_that_ends_them() -> None:
    """Each token begins inside a character that the previous token began, except the first and the last character's first."""
    data, end = ("日本語" * 20 + "é").encode(), 3 * 60
    cuts = [0, *range(1, end, 3), end, end + 1, end + 2]
    tokenizer: Any = Pieces([data[start:stop] for start, stop in pairwise(cuts)])
    decoder, shown = _FileDecoder(tokenizer), ""
    for token, stop in enumerate(cuts[1:]):
        shown += decoder.feed(token)
        assert shown == data[:stop].decode("utf-8", "ignore")


@given(parts=st.lists(characters | st.just("\ufffd"), max_size=20))
def test_a_replacement_character_that_is_meant_hides_no_other(files: FileTokenizer, parts: list[str]) -> None:
    """It may be shown more than once, since incomplete bytes look the same."""
    text, decoder = "".join(parts), files.decoder()
    shown = "".join(map(decoder.feed, files.encode(text).tolist())) + decoder.finish()
    assert shown.replace("\ufffd", "") == text.replace("\ufffd", "")


@given(parts=st.lists(characters, max_size=60), data=st.data())
def test_what_follows_a_prompt_is_shown_as_if_the_prompt_were(
    files: FileTokenizer, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    ids = files.encode(text).tolist()
    cut = data.draw(st.integers(0, len(ids)))
    shown = "".join(map(files.decoder().feed, ids[:cut]))
    after = _decoder_after(files, ids[:cut][-BEFORE:])
    assert shown + "".join(map(after.feed, ids[cut:])) + after.finish() == text


@given(ids=st.lists(st.integers(0, 255) | st.sampled_from([0xE2, 0x80]), max_size=200))
@example(ids=[97] * 200)
@example(ids=[0x80] * 200)
def test_tokens_that_are_no_text(files: FileTokenizer, ids: list[int]) -> None:
    """A model may write bytes that form no characters: in the end something is shown, and little is decoded again."""
    decoder = _FileDecoder(files)
    shown = "".join(map(decoder.feed, ids))
    assert len(decoder._tokens) <= 2 * PENDING_MAX
    assert bool(shown + decoder.finish()) == bool(ids)


def texts_of(model: LanguageModel, prompt: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text written if the model chooses these tokens."""
    left, sampler, cache = iter(script), Sampler(), ContiguousCache(model.spec)
    monkeypatch.setattr(sampler, "pick", lambda logits: next(left))
    events = generate(model, cache, cache.create(), prompt, len(script), sampler)
    return [event.text for event in events if isinstance(event, Written)]


def test_the_last_token_shows_what_was_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    assert texts_of(model, PROMPT, "aé".encode()[:2], monkeypatch) == ["a", "\ufffd"]


def test_what_is_written_goes_on_from_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers like those of Llama 2 and Mistral strip the first space of a text, but a continuation is not its start."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    pieces = {"▁": 0, "a": 1, "▁a": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[("▁", "a")]))
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    checkpoints.make(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"pagoda_tokenizer": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = LanguageModel.load(tmp_path)
    for words in (1, 2, 40):
        prompt = model.tokenizer.encode(" a" * words)
        assert texts_of(model, prompt, [2, 1, 2], monkeypatch) == [" a", "a", " a"]


@pytest.mark.parametrize("before", ["a", "日本語" * 20], ids=["a letter", "long characters"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_prompt_may_end_inside_a_character(
    before: str, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `--read`."""
    checkpoints.make(tmp_path, "llama")
    data = (before + "🙂é").encode()
    at = len(data) - 6 + cut
    written = texts_of(LanguageModel.load(tmp_path), list(data[:at]), list(data[at:]), monkeypatch)
    assert "".join(written) == "🙂é"


def test_what_the_command_says_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Token by token, so that each step reads all tokens so far: a prompt of 5, and all but the last of 3 more."""
    checkpoints.make(tmp_path, "llama")
    arguments = ["--prompt", "pages", "--chunk", "1", "--tokens", "3", "--device", "cpu"]
    assert main(["generate", "--model", str(tmp_path), *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = sum(range(1, 5 + 2 + 1))
    assert report["attended_bytes"] == {"memory": rows * LanguageModel.load(tmp_path).spec.bytes_per_token(), "disk": 0}
    assert main(["generate", "--model", str(tmp_path), *arguments, "--json", "--no-kv-cache-paged"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["tokens"] == report["tokens"]
    assert "attended_bytes" not in plain


@pytest.mark.parametrize(
    ("step_seconds", "written", "said"),
    [
        (0.01, 3, "read 8 of 8 tokens, 400 tok/s; wrote 3, 100 tok/s"),
        (4.0, 3, "read 8 of 8 tokens, 1.00 tok/s; wrote 3, 0.25 tok/s"),
        (4.0, 1, "read 8 of 8 tokens, 1.00 tok/s; wrote 1, -"),
    ],
)
def test_speeds_are_of_the_steps_alone(
    step_seconds: float,
    written: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps read a prompt, and the second chooses the first token. Work between the steps takes long."""
    now = 0.0
    monkeypatch.setattr(view, "time", SimpleNamespace(perf_counter=lambda: now))

    def loop() -> Iterator[Read | Written]:
        nonlocal now
        for done in (4, 8):
            now += step_seconds
            yield Read(done, 8, None)
        for token in range(written):
            now += step_seconds if token else 0
            yield Written(token, "", np.zeros(1, np.float32), None)

    with view.View(None, "cpu", 8, 0, quiet=False) as watched:
        for _ in watched.watch(loop()):
            now += 1000
    assert capsys.readouterr().out.splitlines()[-1] == said
    report = watched.report()
    assert report["read_seconds"] == pytest.approx(2 * step_seconds)
    assert report["write_seconds"] == pytest.approx((written - 1) * step_seconds)


def test_a_terminal_shows_the_end_of_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn at the first event and at the end, but not for events that follow at once."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "25"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(view, "time", SimpleNamespace(perf_counter=lambda: 1.0))
    written = [Written(0, text, np.zeros(1, np.float32), None) for text in ("a" * 100, "b" * 1150, "c" * 40)]
    with view.View(None, "cpu", 10, 2, quiet=False) as watched:
        for _ in watched.watch(iter([Read(8, 8, None), *written])):
            pass
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert set(re.findall(r"read +━+ +(\d+ of \d+) tokens", out)) == {"10 of 10"}
    assert list(dict.fromkeys(re.findall(r"written +(\d+) tokens", out))) == ["0", "3"]
    shown = "".join(out.split())
    assert shown.endswith("…" + "a" * 10 + "b" * 1150 + "c" * 40)
    assert shown.count("c" * 40) == out.count("3 tokens"), "it is not printed besides"


def test_a_terminal_that_cannot_be_drawn_over_shows_text_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with view.View(None, "cpu", 8, 0, quiet=False) as watched:
        for event in watched.watch(iter([Read(8, 8, None), Written(0, "text", np.zeros(1, np.float32), None)])):
            out = capsys.readouterr().out
            assert "read 8 of 8 tokens" in out if isinstance(event, Read) else out == "text"
