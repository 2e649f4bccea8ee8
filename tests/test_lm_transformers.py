"""The shipped model and random ones against transformers, where torch is installed."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import numpy as np
import pytest
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
