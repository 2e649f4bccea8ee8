"""Ctrl-C between any two instructions of Pagoda's Python, without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(call: Callable[[], Any], after: int) -> bool:
    """Makes a call in which Ctrl-C comes after so many instructions of the package; says whether that was before its end.

    The garbage collector rests meanwhile: what comes while it calls back Python throws away.
    """
    left = after

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_globals.get("__name__", "").startswith("pagoda."):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False
