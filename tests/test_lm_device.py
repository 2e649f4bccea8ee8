"""The language model on a device: without a GPU, on an emulated one whose arrays are as strict as CuPy's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import device_arrays
import numpy as np
import numpy.typing as npt
import pagoda
import pytest
from pagoda.cli import main
from pagoda.device import cuda
from pagoda.lm import LanguageModel, Sampler, Written, arrays, generate, model
from pagoda.models import SHIPPED_MODEL, SHIPPED_TEXT

Array = npt.NDArray[Any]

TEXT = np.frombuffer(b"In the beginning was the page, and the page was with the block, 32 by 32.", np.uint8).astype(
    np.int64
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an emulated device, for caches and models."""
    driver = device_arrays.install(monkeypatch, model)
    yield "cuda"
    driver.check()


def on(device: str, of: LanguageModel) -> pagoda.Cache:
    options: dict[str, Any] = {"page_size": 8, "k_dtype": "f32", "v_dtype": "f32", "device": device}
    return pagoda.Cache(of.spec, device_memory="1MiB", host_memory="1MiB", **options)


def read(of: LanguageModel, cache: Any, cuts: list[int]) -> Array:
    """Logits of every token of the text, read in chunks."""
    sequence, logits = cache.create(), []
    for part in np.split(TEXT, cuts):
        with of.device, cache.step([sequence], [len(part)]) as step:
            logits.append(arrays.to_host(of.forward(part, step, logits="all")))
    return np.concatenate(logits)


CUTS = [20, 40, *range(65, len(TEXT))]


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_logits_match_the_reference(name: str, device: str, tmp_path: Path) -> None:
    """Chunks, then single tokens, compared with float64 and with NumPy over pages on the CPU."""
    config, weights = checkpoints.make(tmp_path, name)
    there, here = LanguageModel.load(tmp_path, device), LanguageModel.load(tmp_path)
    found = read(there, on(device, there), CUTS)
    np.testing.assert_allclose(found, checkpoints.reference_logits(config, weights, TEXT), rtol=0, atol=2e-4)
    np.testing.assert_allclose(found, read(here, on("cpu", here), CUTS), rtol=0, atol=2e-5)


def test_batches_and_last_logits(device: str, tmp_path: Path) -> None:
    config, weights = checkpoints.make(tmp_path, "llama")
    expected = checkpoints.reference_logits(config, weights, TEXT)
    there = LanguageModel.load(tmp_path, device)
    cache = on(device, there)
    a, b, c = (cache.create() for _ in range(3))
    with there.device, cache.step([a, b, c], [20, 0, 40]) as step:
        logits = there.forward(np.concatenate([TEXT[:20], TEXT[:40]]), step)
    assert isinstance(logits, device_arrays.DeviceArray), "logits stay on the device"
    np.testing.assert_allclose(logits.hidden, expected[[19, 39]], rtol=0, atol=2e-4)
    with there.device, cache.step([a], [0]) as step:
        assert there.forward(TEXT[:0], step).shape == (0, 256)


def written(of: LanguageModel, cache: Any) -> list[Written]:
    events = generate(of, cache, cache.create(), TEXT, 12, Sampler(), chunk=32)
    return [event for event in events if isinstance(event, Written)]


def test_generation(device: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "qwen3")
    there, here = LanguageModel.load(tmp_path, device), LanguageModel.load(tmp_path)
    found, expected = written(there, on(device, there)), written(here, on("cpu", here))
    assert [event.token for event in found] == [event.token for event in expected]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one.logits, np.ndarray)
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=2e-5)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_command(device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The device tier has a few pages, so most of the cache is read from the host."""
    checkpoints.make(tmp_path, "smollm3")
    base = ["--model", str(tmp_path), "--prompt", TEXT.astype(np.uint8).tobytes().decode(), "--tokens", "12"]
    base += ["--chunk", "16", "--page-size", "8", "--device-memory", "24KiB", "--host-memory", "1MiB"]
    runs = [run_command(capsys, *base, "--device", name) for name in ("cpu", device)]
    assert [run["device"] for run in runs] == ["cpu", "cuda"]
    assert runs[0]["tokens"] == runs[1]["tokens"]
    assert runs[1]["pages"]["host"] > 0


def test_the_command_with_a_disk(device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Most of the cache is read from disk; a later run continues from what the first one kept."""
    checkpoints.make(tmp_path, "smollm3")
    base = ["--model", str(tmp_path), "--prompt", TEXT.astype(np.uint8).tobytes().decode() * 7, "--tokens", "2"]
    base += ["--chunk", "16", "--page-size", "8"]
    small = ["--device-memory", "128KiB", "--host-memory", "16KiB", "--device", device]
    small += ["--disk", str(tmp_path / "pages"), "--disk-memory", "16MiB", "--session", "it"]
    resident = run_command(capsys, *base, "--device", "cpu")
    runs = [run_command(capsys, *base, *small) for _ in range(2)]
    assert [run["tokens"] for run in runs] == [resident["tokens"]] * 2
    assert runs[0]["pages"]["disk"] > runs[0]["pages"]["device"]
    assert runs[0]["attended_bytes"]["disk"] > 0
    assert runs[1]["kept_tokens"] > 0 == runs[0]["kept_tokens"]


@pytest.mark.parametrize(
    ("auto", "arguments", "chosen"),
    [("cuda", [], "cuda"), ("cuda", ["--no-kv-cache-paged"], "cpu"), ("cpu", [], "cpu")],
)
def test_what_auto_is(
    auto: str,
    arguments: list[str],
    chosen: str,
    device: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(pagoda.device, "AUTO", auto)
    checkpoints.make(tmp_path, "llama")
    base = [
        "--model",
        str(tmp_path),
        "--prompt",
        "page",
        "--tokens",
        "1",
        "--device-memory",
        "1MiB",
        "--host-memory",
        "0",
    ]
    assert run_command(capsys, *base, *arguments)["device"] == chosen


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "tpu"], "device = 'tpu'"),
        (["--device", "cuda:x"], "device = 'cuda:x'"),
        (["--device", "cuda", "--no-kv-cache-paged"], "--device = 'cuda': cpu, with --no-kv-cache-paged"),
    ],
)
def test_devices_that_cannot_be(arguments: list[str], named: str, refused: Callable[..., str]) -> None:
    assert refused("generate", *arguments).startswith(named)


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    if cuda.lack() is None:
        pytest.skip("there is a device")
    checkpoints.make(tmp_path, "llama")
    with pytest.raises(pagoda.BackendUnavailable, match="CuPy"):
        LanguageModel.load(tmp_path, "cuda")


def test_strict_arrays_are_strict() -> None:
    """They refuse what CuPy refuses, and what would cause an implicit copy to the host."""
    xp, host = device_arrays.xp, np.ones((2, 3), np.float32)
    with device_arrays.device:
        array = xp.asarray(host)
    for leak in (
        lambda: np.asarray(array),
        lambda: np.exp(array),
        lambda: np.einsum("ij->i", array),
        lambda: np.concatenate([array, array]),
        lambda: array + host,
        lambda: host * array,
        lambda: array[np.array([0])],
        lambda: host[array],
        lambda: xp.sqrt(host),
        lambda: float(array[0, :1]),
    ):
        with pytest.raises((TypeError, IndexError)), device_arrays.device:
            leak()
    with pytest.raises(RuntimeError, match="another device"):
        xp.sqrt(array)
    with device_arrays.device:
        array *= np.float32(3)
    assert (host == 1).all()
    assert (array.hidden == 3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_logits_on_a_gpu(name: str, tmp_path: Path) -> None:
    config, weights = checkpoints.make(tmp_path, name)
    there = LanguageModel.load(tmp_path, "cuda")
    found = read(there, on("cuda", there), CUTS)
    np.testing.assert_allclose(found, checkpoints.reference_logits(config, weights, TEXT), rtol=0, atol=2e-4)


@pytest.mark.gpu
def test_the_command_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy tokens of the shipped model equal the CPU's, and logits agree to float32 accuracy."""
    base = ["--read", "2000", "--tokens", "40"]
    runs = [run_command(capsys, *base, "--device", name) for name in ("cpu", "cuda")]
    assert runs[0]["tokens"] == runs[1]["tokens"]
    text = np.frombuffer(SHIPPED_TEXT.read_bytes()[:2000], np.uint8).astype(np.int64)
    logits = []
    for name in ("cpu", "cuda"):
        of = LanguageModel.load(SHIPPED_MODEL, name)
        with pagoda.Cache(of.spec, device=name, k_dtype="f32", v_dtype="f32", device_memory="256MiB") as cache:
            with of.device, cache.step([cache.create()], [len(text)]) as step:
                logits.append(arrays.to_host(of.forward(text, step, logits="all")))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=5e-3)
