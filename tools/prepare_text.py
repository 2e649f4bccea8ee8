"""Turn the King James Bible into plain text, split into train, dev and held-out parts.

The text comes from Debian's `bible-kjv-text`, printed by the `bible` program of `bible-kjv`
(`apt install bible-kjv`). The translation of 1611 is in the public domain; the text file itself
is "provided for unrestricted use" (see /usr/share/doc/bible-kjv-text/copyright).

    python tools/prepare_text.py --out corpus

writes corpus/held_out.txt (Jeremiah to Daniel, never trained on), corpus/dev.txt (Hosea to Amos,
never trained on, watched during training) and corpus/train.txt (everything else).

Layout of the text: each chapter is a heading line such as "Jeremiah 1", an empty line, then one
line per verse, "<number> <text>", then an empty line.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

WHOLE = "gen1:1-rev22:21"
HELD_OUT = ("Jeremiah", "Lamentations", "Ezekiel", "Daniel")
DEV = ("Hosea", "Joel", "Amos")


def read_chapters(program: str) -> list[tuple[str, int, list[str]]]:
    """Returns (book, chapter, verse lines) in order, from what `bible` prints."""
    out = subprocess.run([program, "-l9999", WHOLE], check=True, capture_output=True, encoding="latin-1").stdout
    chapters: list[tuple[str, int, list[str]]] = []
    for line in out.splitlines():
        text = re.sub(r"\s+", " ", line).strip()
        if not text:
            continue
        heading = re.fullmatch(r"((?:[123I]+ )?[A-Z][A-Za-z ]+?) (\d+)", text)
        if heading and not line.startswith(" "):
            chapters.append((heading[1], int(heading[2]), []))
        elif re.match(r"\d+ \S", text) and chapters:
            chapters[-1][2].append(text)
        else:
            raise ValueError(f"unexpected line: {line!r}")
    return chapters


def format_chapter(book: str, chapter: int, verses: list[str]) -> str:
    return f"{book} {chapter}\n\n" + "".join(verse + "\n" for verse in verses) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--bible", default="bible", help="the `bible` program of bible-kjv")
    args = parser.parse_args()

    parts: dict[str, list[str]] = {"train": [], "dev": [], "held_out": []}
    for book, chapter, verses in read_chapters(args.bible):
        part = "held_out" if book in HELD_OUT else "dev" if book in DEV else "train"
        parts[part].append(format_chapter(book, chapter, verses))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, pieces in parts.items():
        data = "".join(pieces).encode("ascii")
        (args.out / f"{name}.txt").write_bytes(data)
        print(f"{name}.txt: {len(pieces)} chapters, {len(data)} bytes")


if __name__ == "__main__":
    main()
