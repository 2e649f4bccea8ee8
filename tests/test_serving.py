"""The scheduler of docs/serving.md, and what the page says of room on the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pagoda
import pytest
from examples import ROOT, example_of
from mirror import settled
from pagoda.lm import ContiguousCache, LanguageModel, Sampler, Written, generate


def _names_of_the_example() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(example_of("docs/serving.md"), names)
    return names


@pytest.mark.parametrize(("page", "option"), [("docs/serving.md", "--strict"), ("README.md", "--check-untyped-defs")])
def test_examples_of_the_docs_pass_mypy(tmp_path: Path, page: str, option: str) -> None:
    pytest.importorskip("mypy")
    example = tmp_path / "example.py"
    example.write_text(example_of(page))
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", option, str(example)]
    checked = subprocess.run(command, cwd=ROOT / "python", capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """Requests that wait for each other, are preempted and recomputed, compared with each one alone."""
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    names = _names_of_the_example()
    page = 8 * model.spec.bytes_per_token()
    with pagoda.Cache(model.spec, page_size=8, device_memory=12 * page, host_memory=8 * page) as cache:
        before = cache.stats()
        scheduler = names["Scheduler"](model, cache, budget=24)
        prompts = [(np.arange(5 + 9 * number) * (37 + 2 * number) % 256).tolist() for number in range(8)]
        requests = [names["Request"](cache.create(), prompt, 10 + 5 * number) for number, prompt in enumerate(prompts)]
        late, cancelled = requests[6:], names["Request"](cache.create(), list(range(40)), 5)
        scheduler.waiting.extend([*requests[:3], cancelled, *requests[3:6]])
        ended: list[Any] = []
        preempted, emptied = set[int](), set[int]()
        while len(ended) < len(requests):
            had = {id(request) for request in scheduler.waiting if len(request.sequence)}
            ended += scheduler.step()
            rests = {id(request) for request in scheduler.waiting if len(request.sequence)}
            preempted |= rests
            emptied |= had & {id(request) for request in scheduler.waiting} - rests
            cache.audit()
            if late:
                scheduler.waiting.append(late.pop())
            if cancelled in scheduler.running and len(cancelled.sequence) > 0:
                assert cancelled.missing > 0, "in the middle of its prompt"
                scheduler.running.remove(cancelled)
                cancelled.sequence.release()
        assert len(preempted) > 1
        assert emptied
        with pytest.raises(pagoda.UseAfterRelease):
            len(cancelled.sequence)
        after = settled(cache)
        assert (after.device, after.host, after.sequences) == (before.device, before.host, 0)
    contiguous = ContiguousCache(model.spec)
    for request, prompt in zip(requests, prompts, strict=True):
        new = len(request.tokens) - len(prompt)
        events = generate(model, contiguous, contiguous.create(), np.array(prompt), new, Sampler(), stop=())
        assert request.tokens == prompt + [event.token for event in events if isinstance(event, Written)]


def test_the_example_runs_no_more_requests_than_it_may(tmp_path: Path) -> None:
    """However many have finished before."""
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    names = _names_of_the_example()
    with pagoda.Cache(model.spec, device_memory="4MiB") as cache:
        scheduler = names["Scheduler"](model, cache, most=2)
        scheduler.waiting.extend(names["Request"](cache.create(), [1, 2, number], 3) for number in range(6))
        running = []
        while scheduler.waiting or scheduler.running:
            scheduler.step()
            running.append(len(scheduler.running))
    assert max(running) == 2


# tokens that the forks share; how many forks; those in the batch with their new tokens; pages of the device that it takes.
ROOM = {
    "a last page, and a new one": (13, 1, [4], 2),
    "new pages alone, as the last one is full": (16, 1, [12], 2),
    "a last page without new tokens": (13, 2, [4, 0], 3),
    "a last page for each fork, as another holds the shared one": (13, 3, [4, 4], 4),
    "a last page for each fork, and the shared one": (13, 3, [4, 4, 4], 7),
    "only new pages of forks, as the last one is full": (16, 3, [4, 4, 4], 3),
}


@pytest.mark.parametrize(("tokens", "forks", "new", "pages"), ROOM.values(), ids=ROOM)
def test_what_a_step_needs(tokens: int, forks: int, new: list[int], pages: int) -> None:
    """Neither more nor less than docs/serving.md says."""
    spec = pagoda.ModelSpec(layers=[pagoda.AttentionLayer(1, 1, 16), pagoda.AttentionLayer(1, 1, 16, window=64)])
    page = 8 * 2 * 16 * 2

    def steps(device_pages: int) -> None:
        with pagoda.Cache(spec, page_size=8, device_memory=2 * device_pages * page, host_memory=100 * page) as cache:
            first = cache.create()
            for _ in range(tokens):
                _step(cache, [first], [1])
            all_of_them = [first, *(first.fork() for _ in range(forks - 1))]
            _step(cache, all_of_them[: len(new)], new)

    steps(pages)
    with pytest.raises(pagoda.OutOfBlocks):
        steps(pages - 1)


def _step(cache: pagoda.Cache, sequences: list[pagoda.Sequence], counts: list[int]) -> None:
    rows = np.zeros((sum(counts), 1, 16), np.float32)
    with cache.step(sequences, counts) as step:
        for layer in range(2):
            step.forward(layer, rows, rows, rows)
