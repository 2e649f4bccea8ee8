"""The shipped language model over the cache: formats, lengths, tiers, beams and speculation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagoda
import pytest
import silence
from pagoda.cli import main
from pagoda.formats import FORMATS
from pagoda.lm import ContiguousCache, LanguageModel
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT
from pagoda.planner import Planner

Ids = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.load(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def text() -> Ids:
    return np.frombuffer(SHIPPED_TEXT.read_bytes(), np.uint8).astype(np.int64)


def read(
    model: LanguageModel, cache: Any, tokens: Ids, chunk: int = 512, keep: int | None = None
) -> npt.NDArray[np.float32]:
    """Logits of every token, or of the last `keep`, read in chunks."""
    sequence, logits = cache.create(), []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        wanted = keep is None or start + len(part) > len(tokens) - keep
        with cache.step([sequence], [len(part)]) as step:
            all_of_them = model.forward(part, step, logits="all" if wanted else "last")
        if wanted:
            logits.append(all_of_them)
    rows = np.concatenate(logits)
    return rows if keep is None else rows[-keep:]


def bits_per_byte(logits: npt.NDArray[np.float32], following: Ids) -> float:
    rows = logits.astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    chosen = rows[np.arange(len(following)), following] - np.log(np.exp(rows).sum(1))
    return float(-chosen.mean() / np.log(2))


def test_it_predicts_the_text_it_was_not_trained_on(model: LanguageModel, text: Ids) -> None:
    with pagoda.Cache(model.spec) as cache:
        logits = read(model, cache, text[:8192])
    assert bits_per_byte(logits[:-1], text[1:8192]) <= 2.2


@pytest.mark.parametrize(("dtype", "agreement"), [("f16", 0.9995), ("bf16", 0.997)])
def test_f16_and_bf16_cache_coherent(model: LanguageModel, text: Ids, dtype: str, agreement: float) -> None:
    """10,000 teacher-forced tokens: the likeliest next token is f32's, or nearly tied with it in f32."""
    tokens = text[20_000:30_000]
    both = []
    for kind in ("f32", dtype):
        with pagoda.Cache(model.spec, k_dtype=kind, v_dtype=kind) as cache:
            both.append(read(model, cache, tokens))
    exact, rounded = both
    flips = np.flatnonzero(exact.argmax(1) != rounded.argmax(1))
    assert 1 - len(flips) / len(tokens) >= agreement
    ranked = np.sort(exact[flips], axis=1)
    noise = np.abs(exact - rounded).max()
    assert np.all(ranked[:, -1] - ranked[:, -2] <= 2 * noise), "every flip is a near-tie"
    assert noise < 0.25


def test_long_context_32k_coherent(model: LanguageModel, text: Ids) -> None:
    """32K tokens on a small device tier: the same bits as all resident, and predictions as good as with a short context."""
    tokens = text[: 32 * 1024]
    runs = []
    for device_memory in ("3MiB", "1GiB"):
        options: dict[str, Any] = {"device_memory": device_memory, "host_memory": "1GiB", "deterministic": True}
        with pagoda.Cache(model.spec, **options) as cache:
            runs.append(read(model, cache, tokens, keep=4096))
            share = cache.stats().used_bytes("host") / Planner(model.spec).footprint(len(tokens)).paged_bytes
            assert share >= 0.8 if device_memory == "3MiB" else share == 0
    np.testing.assert_array_equal(runs[0], runs[1])
    late = bits_per_byte(runs[1][:-1], tokens[-4095:])
    with pagoda.Cache(model.spec) as cache:
        near = read(model, cache, tokens[-6144:], keep=4096)
    assert late <= 1.02 * bits_per_byte(near[:-1], tokens[-4095:]), "the same bytes with 2K of context before them"


def test_pages_of_32_tokens_match_pages_of_256_and_plain_arrays(model: LanguageModel, text: Ids) -> None:
    tokens = text[:3000]
    runs = []
    for page_size in (32, 256):
        with pagoda.Cache(model.spec, page_size=page_size, deterministic=True) as cache:
            runs.append(read(model, cache, tokens))
    np.testing.assert_array_equal(runs[0], runs[1])
    plain = read(model, ContiguousCache(model.spec), tokens)
    assert np.abs(plain - runs[0]).max() < 5e-3


@dataclass
class Beam:
    tokens: list[int]
    score: float
    sequence: Any = None


def best(beams: list[Beam], logits: npt.NDArray[np.float32], width: int) -> list[tuple[int, int, float]]:
    """(beam, token, score) of the best continuations; ties go to the lower beam and token."""
    rows = logits.astype(np.float64)
    scores = rows - rows.max(1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    scores += np.array([beam.score for beam in beams])[:, None]
    order = np.argsort(-scores, axis=None, kind="stable")[:width]
    return [(int(at // rows.shape[1]), int(at % rows.shape[1]), float(scores.flat[at])) for at in order]


def test_beam_search_over_forks_equals_beam_search_by_recomputation(model: LanguageModel, text: Ids) -> None:
    prompt, width, length = text[1000:1100], 4, 24
    with pagoda.Cache(model.spec, page_size=16, deterministic=True, k_dtype="f32", v_dtype="f32") as cache:
        root = cache.create()
        with cache.step([root], [len(prompt)]) as step:
            logits = model.forward(prompt, step)
        beams = [Beam([], 0.0, root)]
        for _ in range(length):
            grown = []
            for parent, token, score in best(beams, logits, width):
                grown.append(Beam([*beams[parent].tokens, token], score, beams[parent].sequence.fork()))
            for beam in beams:
                beam.sequence.release()
            beams = grown
            cache.audit()
            with cache.step([beam.sequence for beam in beams], [1] * len(beams)) as step:
                logits = model.forward([beam.tokens[-1] for beam in beams], step)
        assert cache.stats().shared_pages > 0
        forked = [(beam.tokens, beam.score) for beam in beams]
        for beam in beams:
            beam.sequence.release()

        beams = [Beam([], 0.0)]
        for _ in range(length):
            rows = []
            for beam in beams:
                with cache.create() as sequence:
                    whole = np.concatenate([prompt, np.array(beam.tokens, np.int64)])
                    with cache.step([sequence], [len(whole)]) as step:
                        rows.append(model.forward(whole, step)[0])
            choices = best(beams, np.stack(rows), width)
            beams = [Beam([*beams[parent].tokens, token], score) for parent, token, score in choices]
    for (written, score), beam in zip(forked, beams, strict=True):
        assert written == beam.tokens
        assert score == pytest.approx(beam.score, abs=1e-3)


def test_speculative_decoding_writes_what_greedy_decoding_writes(model: LanguageModel, text: Ids) -> None:
    """One step verifies a draft (what followed the last occurrence of the last three bytes); wrong tokens are rejected."""
    prompt, length = text[:600], 120
    with pagoda.Cache(model.spec, page_size=16, k_dtype="f32", v_dtype="f32", deterministic=True) as cache:
        greedy = cache.create()
        with cache.step([greedy], [len(prompt)]) as step:
            logits = model.forward(prompt, step)
        expected: list[int] = []
        while len(expected) < length:
            expected.append(int(logits[0].argmax()))
            with cache.step([greedy], [1]) as step:
                logits = model.forward(expected[-1:], step)

        fast = cache.create()
        with cache.step([fast], [len(prompt)]) as step:
            logits = model.forward(prompt, step)
        written, steps = [int(logits[0].argmax())], 0
        while len(written) < length:
            seen = bytes(prompt.tolist() + written)
            at = seen.rfind(seen[-3:], 0, -1)
            draft = list(seen[at + 3 : at + 11]) if at >= 0 else []
            guess = [written[-1], *draft]
            with cache.step([fast], [len(guess)]) as step:
                rows = model.forward(guess, step, logits="all")
                agreed = 0
                while agreed < len(draft) and int(rows[agreed].argmax()) == draft[agreed]:
                    agreed += 1
                step.commit(accepted=[1 + agreed])
            written += [*draft[:agreed], int(rows[agreed].argmax())]
            steps += 1
            cache.audit()
            assert len(fast) == len(prompt) + len(written) - 1
        assert written[:length] == expected
        assert steps < length


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def same_run(
    capsys: pytest.CaptureFixture[str], model: LanguageModel, read: int, tokens: int, device: str = "cpu"
) -> None:
    """With a tenth of the memory the command prints the same tokens and logits as with all of it."""
    kv = Planner(model.spec).footprint(read).paged_bytes
    base = ["--read", str(read), "--tokens", str(tokens), "--deterministic", "--device", device, "--chunk", "64"]
    spilled = run_command(capsys, *base, "--device-memory", str(kv // 10), "--host-memory", "2GiB")
    resident = run_command(capsys, *base, "--device-memory", "2GiB")
    assert spilled["prompt_tokens"] == read
    assert spilled["bytes"]["host"] >= 8 * spilled["bytes"]["device"]
    assert resident["pages"]["host"] == 0
    assert (spilled["tokens"], spilled["logits_sha256"]) == (resident["tokens"], resident["logits_sha256"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generate_on_a_tenth_of_the_memory(
    device: str, capsys: pytest.CaptureFixture[str], model: LanguageModel
) -> None:
    same_run(capsys, model, 12_000, 30, device)


@pytest.mark.long
def test_generate_over_100k_tokens_on_a_tenth_of_the_memory(
    capsys: pytest.CaptureFixture[str], model: LanguageModel
) -> None:
    same_run(capsys, model, 100_000, 50)


SMALL = ["--tokens", "20", "--deterministic", "--device", "cpu", "--chunk", "256"]


def test_generate_over_three_tiers(
    capsys: pytest.CaptureFixture[str], model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the cache in memory, the rest on disk: the same tokens and logits, from the same rows."""
    kv = Planner(model.spec).footprint(3000).paged_bytes
    base = [*SMALL, "--read", "3000"]
    memory = ["--device-memory", "1MiB", "--host-memory", "256KiB"]
    disk = [*memory, "--disk", str(tmp_path / "pages"), "--disk-memory", "64MiB"]
    spilled, resident = run_command(capsys, *base, *disk), run_command(capsys, *base, "--device-memory", "2GiB")
    assert (spilled["tokens"], spilled["logits_sha256"]) == (resident["tokens"], resident["logits_sha256"])
    assert resident["pages"] == {"device": resident["pages"]["device"], "host": 0}
    # Pages being moved at that moment are on two tiers.
    assert 0 <= sum(spilled["pages"].values()) - resident["pages"]["device"] <= 8
    assert min(spilled["bytes"].values()) > 0
    assert spilled["bytes"]["disk"] > kv / 3
    assert spilled["moved_bytes"]["host to disk"] > 0
    assert spilled["attended_bytes"]["memory"] == resident["attended_bytes"]["memory"]
    assert spilled["attended_bytes"]["disk"] > 20 * spilled["bytes"]["disk"] / 2
    assert resident["attended_bytes"]["disk"] == resident["waited_seconds"] == 0
    assert 0 <= spilled["waited_seconds"] <= spilled["read_seconds"] + spilled["write_seconds"]
    assert list((tmp_path / "pages").iterdir()) == []

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["generate", *base, *disk]) == 0
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).splitlines()
    assert re.search(r"^disk .* \d+ pages, .*iB +[3-9]\d%", next(filter_rows(rows, "disk")))
    assert re.search(r"iB of memory, .*iB of disk +waited \d", next(filter_rows(rows, "last step")))


def filter_rows(rows: list[str], name: str) -> Iterator[str]:
    """Rows of a drawn view that begin with `name`, the last one first."""
    return (row for row in reversed(rows) if row.startswith(name))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["position", "--context", "2048", "--offset", "{end}"], "--context 2048"),
        (["position", "--context", "0"], "--context 0"),
        (["compare", "--context", "4096", "--tail", "4096"], "--tail 4096"),
        (["compare", "--context", "4096", "--short", "3"], "--short 3"),
        (["compare", "--context", "2048", "--offset", "{end}"], "--context 2048"),
        (["sample", "--prompt", ""], "--prompt"),
        (["sample", "--offset", "{end}000"], "--prompt-bytes"),
        (["sample", "--prompt", "\N{CHECK MARK}"], "--prompt"),
    ],
)
def test_eval_byte_lm_refuses_what_it_would_mislabel(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """end: a thousand bytes before the end of the text."""
    import eval_byte_lm

    end = SHIPPED_TEXT.stat().st_size - 1000
    given = [argument.format(end=end) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["eval_byte_lm.py", str(SHIPPED_MODEL), *given])
    monkeypatch.setattr(eval_byte_lm, "ByteModel", lambda *_: pytest.fail("a model is read"))
    with pytest.raises(SystemExit, match="2"):
        eval_byte_lm.main()
    assert named in capsys.readouterr().err.splitlines()[-1]


SLOWLY = """
import sys
sys.path.insert(0, sys.argv[1])
from pagoda.cli import main
from silence import answer, silence
answer(silence("io_uring_enter", "pread64", "pwrite64"), 0.02)
sys.exit(main(["generate", *sys.argv[2:]]))
"""

JUST_THEN = """
from pagoda.placement import Spill
make_room = Spill.make_room
def look_and_wait(spill, blocks, batch):
    made = make_room(spill, blocks, batch)
    spill._core.finish_draining()
    return made
Spill.make_room = look_and_wait
"""


@pytest.mark.parametrize("meddling", ["", JUST_THEN], ids=["in time", "once nothing was found to move"])
def test_generate_waits_for_a_drive_that_is_slow(meddling: str, tmp_path: Path) -> None:
    """Pages that leave a window while they are being read ahead drain until the read ends; that may be all of host memory.

    Another call may take in the end of the reads right after nothing was found to move.
    """
    if not silence.is_possible():
        pytest.skip("no system calls can be held up")
    tiers = ["--device-memory", "1MiB", "--host-memory", "256KiB", "--disk", str(tmp_path), "--disk-memory", "64MiB"]
    arguments = [*SMALL, "--read", "1024", *tiers, "--json"]
    run = [sys.executable, "-c", meddling + SLOWLY, str(Path(__file__).parent), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["read_tokens"] == 1024


def test_a_long_text_is_read_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run continues from a kept sequence only if the text begins with it."""
    memory = ["--device-memory", "1MiB", "--host-memory", "256KiB"]
    disk = ["--disk", str(tmp_path / "pages"), "--disk-memory", "64MiB", "--session", "book"]

    def run(*arguments: str) -> dict[str, Any]:
        return run_command(capsys, *SMALL, *memory, *disk, *arguments)

    first = run("--read", "1024")
    assert (first["kept_tokens"], first["read_tokens"]) == (0, 1024)
    longer, fresh = run("--read", "1600"), run_command(capsys, *SMALL, "--read", "1600")
    assert (longer["kept_tokens"], longer["read_tokens"]) == (1024, 1600 - 1024)
    assert longer["pages"]["disk"] > 0
    assert (longer["tokens"], longer["logits_sha256"]) == (fresh["tokens"], fresh["logits_sha256"])
    again = run("--read", "1600")
    assert (again["kept_tokens"], again["read_tokens"]) == (1599, 1), "the last token is read for its logits"
    assert again["tokens"] == fresh["tokens"]
    assert main(["generate", *SMALL, *memory, *disk, "--read", "1600"]) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert "; 1,599 were kept; " in summary
    assert re.search(r" on host, \d+ on disk; .*iB read from disk, \d+\.\d s waited for it$", summary)


def test_a_text_that_does_not_begin_with_what_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = [*SMALL, "--disk", str(tmp_path / "pages"), "--disk-memory", "64MiB", "--session"]
    psalm, other = "The LORD is my shepherd; ", "In the beginning was the Word"

    def kept(key: str, prompt: str) -> int:
        report = run_command(capsys, *base, key, "--prompt", prompt)
        assert report["tokens"] == run_command(capsys, *SMALL, "--prompt", prompt)["tokens"]
        return int(report["kept_tokens"])

    assert kept("a", psalm) == 0
    assert kept("b", psalm) == 0, "another key"
    assert kept("a", psalm[:-3]) == 0, "it ends before what is kept does"
    assert kept("a", psalm) == len(psalm) - 3, "what came last is kept"
    assert kept("b", other) == 0
    assert kept("b", other + ", and") == len(other)
    assert kept("a", psalm + other) == len(psalm)


@pytest.mark.usefixtures("names_the_cpu")
def test_a_text_that_cannot_be_kept_is_not_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each size of the disk tier the text is kept, or refused before the first step."""
    steps: list[pagoda.Step] = []
    enter = pagoda.Step.__enter__

    def entered(step: pagoda.Step) -> pagoda.Step:
        steps.append(step)
        return enter(step)

    monkeypatch.setattr(pagoda.Step, "__enter__", entered)
    kept = []
    for size in range(800, 1600, 100):
        disk = ["--disk", str(tmp_path / str(size)), "--disk-memory", f"{size}KiB", "--session", "book"]
        status = main(["generate", *SMALL, *disk, "--read", "1024", "--json"])
        captured = capsys.readouterr()
        assert bool(steps) == (status == 0), size
        if status:
            assert re.fullmatch(rf"pagoda: --disk-memory = '{size}KiB': more than .* for --session .*\n", captured.err)
        kept.append(status == 0)
        steps.clear()
    assert kept == sorted(kept)
    assert set(kept) == {True, False}
    disk = ["--disk", str(tmp_path / "large"), "--disk-memory", "3MiB", "--session", "book"]
    assert [main(["generate", *SMALL, *disk, "--read", read]) for read in ("3k", "3k", "9k")] == [0, 0, 2]
    assert len(steps) == 3072 // 256 + 19 + 1 + 19, "what is there takes no room once more"
    steps.clear()
    disk = ["--disk", str(tmp_path / "shared"), "--disk-memory", "1900KiB", "--session"]
    texts = (["other", "--read", "512"], ["book", "--read", "1024"])
    assert [main(["generate", *SMALL, *disk, *text]) for text in texts] == [0, 2]
    assert len(steps) == 512 // 256 + 19, "what is kept of another takes room"


def test_a_step_that_has_no_room_names_what_can_be_changed(refused: Callable[..., str]) -> None:
    said = refused("generate", "--read", "3k", "--device-memory", "1MiB", "--host-memory", "2MiB", "--json")
    named = "--device-memory = 1MiB, --host-memory = 2MiB, --disk-memory = 0"
    assert f"{named}: more, or fewer tokens a step by --chunk = 512" in said
    assert "tier device lacks" in said


def test_a_session_with_a_window_and_quantised_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ["--tokens", "10", "--device", "cpu", "--cache-type-k", "q8_0", "--window-size", "256"]
    base += ["--disk", str(tmp_path / "pages"), "--disk-memory", "64MiB", "--session", "book"]
    assert run_command(capsys, *base, "--read", "1000")["kept_tokens"] == 0
    again, longer = (run_command(capsys, *base, "--read", read) for read in ("1000", "1100"))
    assert (again["kept_tokens"], longer["kept_tokens"]) == (999, 1000)


def test_what_another_model_has_kept_is_not_gone_on_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The model has the same geometry, so the cache itself cannot tell."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL, folder)
    base = [*SMALL, "--model", str(folder), "--read", "300", "--disk", str(tmp_path / "pages")]
    base += ["--disk-memory", "64MiB", "--session", "book"]
    assert [run_command(capsys, *base)["kept_tokens"] for _ in range(2)] == [0, 299]
    weights = folder / "model.safetensors"
    shutil.copy(weights, tmp_path / "same size")
    shutil.copy(tmp_path / "same size", weights)
    assert run_command(capsys, *base)["kept_tokens"] == 0


def test_generate_as_plain_arrays_do(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--read", "2000", "--tokens", "60", "--device", "cpu"]
    runs = [run_command(capsys, *base, *more) for more in ([], ["--no-kv-cache-paged"])]
    assert runs[0]["tokens"] == runs[1]["tokens"]
    assert "pages" not in runs[1]


def test_generate_with_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    """A window that holds everything changes no bit; a small one keeps memory small."""
    base = ["--read", "3000", "--tokens", "60", "--device", "cpu", "--deterministic"]
    everything, wide = (
        run_command(capsys, *base, *more) for more in ([], ["--window-size", "4k", "--sink-tokens", "0"])
    )
    assert everything["logits_sha256"] == wide["logits_sha256"]
    for positions in ("original", "cache"):
        window = ["--window-size", "512", "--sink-tokens", "16", "--sink-positions", positions, "--chunk", "64"]
        streamed = run_command(capsys, *base, *window)
        assert streamed["logits_sha256"] != everything["logits_sha256"]
        assert len(streamed["tokens"]) == 60
        assert streamed["pages"]["device"] <= everything["pages"]["device"] - 3060 // 64 + 1 + (512 + 64) // 64 + 2


def test_generate_from_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "And it came to pass", "--tokens", "40", "--temperature", "0.8", "--top-k", "20"]
    first, again = (run_command(capsys, *arguments, "--seed", "3") for _ in range(2))
    assert first["text"] == again["text"]
    assert len(first["tokens"]) == 40
    assert main(["generate", *arguments]) == 0
    assert "wrote 40" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "/nowhere"],
        ["--text", "/nowhere"],
        ["--prompt", ""],
        ["--tokens", "-1"],
        ["--read", "x"],
        ["--page-size", "3"],
        ["--device-memory", "1B"],
        ["--chunk", "0"],
        ["--temperature", "-1"],
        ["--window-size", "x"],
        ["--window-size", "0"],
        ["--sink-tokens", "4"],
        ["--sink-positions", "cache"],
        ["--window-size", "64", "--no-kv-cache-paged", "--device", "cpu"],
        ["--sink-tokens", "4", "--no-kv-cache-paged", "--device", "cpu"],
        ["--session", "book"],
        ["--session", "", "--disk", "/nowhere/at/all", "--disk-memory", "1MiB"],
        ["--disk-memory", "1MiB"],
        ["--disk", "/nowhere"],
        ["--disk", "/nowhere/at/all", "--disk-memory", "1MiB"],
        ["--disk", "/nowhere", "--no-kv-cache-paged", "--device", "cpu"],
    ],
)
def test_generate_refuses_in_one_line(arguments: list[str], refused: Callable[..., str]) -> None:
    """For the first option, by the first word of its name."""
    word = arguments[0].removeprefix("--").split("-")[0]
    assert refused("generate", *arguments).removeprefix("--").startswith(word)


def test_a_model_that_is_not_there_is_named_by_its_option(refused: Callable[..., str]) -> None:
    for path in ("/nowhere", "x" * 300):
        assert refused("generate", "--model", path).startswith(f"--model = {path!r}: a folder")


@pytest.mark.parametrize("command", [["generate"], ["plan", "qwen3-8b"]])
def test_row_formats_are_listed_to_choose_from(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["--cache-type-k", "q9"]):
        with pytest.raises(SystemExit):
            main([*command, *arguments])
        said = "".join(capsys.readouterr())
        assert all(name in said for name in FORMATS)
