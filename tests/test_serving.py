"""The scheduler of docs/serving.md, over a cache that is too small for its requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pagoda
from mirror import settled
from pagoda.lm import ContiguousCache, LanguageModel, Sampler, Written, generate


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """Requests that wait for each other, are preempted and recomputed, compared with each one alone."""
    checkpoints.make(tmp_path, "llama")
    model = LanguageModel.load(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    page = 8 * model.spec.bytes_per_token()
    with pagoda.Cache(model.spec, page_size=8, device_memory=12 * page, host_memory=8 * page) as cache:
        before = cache.stats()
        scheduler = names["Scheduler"](model, cache, budget=24)
        prompts = [(np.arange(5 + 9 * number) * (37 + 2 * number) % 256).tolist() for number in range(8)]
        requests = [names["Request"](prompt, 10 + 5 * number) for number, prompt in enumerate(prompts)]
        late, cancelled = requests[6:], names["Request"](range(40), 5)
        scheduler.waiting.extend([*requests[:3], cancelled, *requests[3:6]])
        ended: list[Any] = []
        preempted, released = set[int](), set[int]()
        while len(ended) < len(requests):
            had = {id(request) for request in scheduler.waiting if request.sequence is not None}
            ended += scheduler.step()
            rests = {id(request) for request in scheduler.waiting if request.sequence is not None}
            preempted |= rests
            released |= had - rests - {id(request) for request in scheduler.running}
            cache.audit()
            if late:
                scheduler.waiting.append(late.pop())
            if cancelled in scheduler.running and len(cancelled.sequence) > 0:
                assert cancelled.missing > 0, "in the middle of its prompt"
                scheduler.running.remove(cancelled)
                scheduler.release(cancelled)
        assert len(preempted) > 1
        assert released
        assert cancelled.sequence is None
        after = settled(cache)
        assert (after.device, after.host, after.sequences) == (before.device, before.host, 0)
    contiguous = ContiguousCache(model.spec)
    for request, prompt in zip(requests, prompts, strict=True):
        new = len(request.tokens) - len(prompt)
        events = generate(model, contiguous, contiguous.create(), np.array(prompt), new, Sampler(), stop=())
        assert request.tokens == prompt + [event.token for event in events if isinstance(event, Written)]
