"""The model that is shipped with the package, and a text that it was not trained on."""

from pathlib import Path

SHIPPED_MODEL = Path(__file__).parent / "kjv-bytes"
SHIPPED_TEXT = SHIPPED_MODEL / "held_out.txt"
