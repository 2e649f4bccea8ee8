"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagoda.errors import InvalidArgument
from pagoda.sizes import format_size, format_tokens, parse_size, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2 gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("3TB", 3 * 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text, "size") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        -1,
        True,
        None,
        1.5,
        float("nan"),
        "1.5",
        "1e3",
        "32k",
        "12XB",
        1 << 63,
        "9" * 50,
        "١GiB",
        "8388608TiB",
    ],
)
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"budget = "):
        parse_size(text, "budget")


@pytest.mark.parametrize(("text", "count"), [("32k", 32768), ("200K", 204_800), ("1m", 1 << 20), ("77", 77), (5, 5)])
def test_tokens(text: Any, count: int) -> None:
    assert parse_tokens(text, "--context") == count


@pytest.mark.parametrize("text", ["1GiB", "1b", "x", "1.0001k"])
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--context = "):
        parse_tokens(text, "--context")


@given(st.integers(0, 2**63 - 1))
def test_whole_bytes_come_back(size: int) -> None:
    assert parse_size(str(size), "size") == parse_size(f"{size}B", "size") == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert parse_size(text, "size") >= 0
    except InvalidArgument:
        pass


def test_what_people_see() -> None:
    assert [format_size(n) for n in (0, 1023, 1 << 20, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
    assert [format_tokens(n) for n in (32768, 1 << 20, 1000)] == ["32k", "1m", "1,000"]
