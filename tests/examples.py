"""The examples of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def example_of(page: str) -> str:
    """The first piece of Python on a page, given by its path in the repository."""
    example = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert example is not None
    return example[1]
