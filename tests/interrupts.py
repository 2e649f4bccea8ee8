"""Ctrl-C between any two instructions of Pagoda's Python, without a clock, and signals by a clock.

None is raised in finalisers, and garbage collection is off meanwhile: Python discards exceptions raised in such
callbacks.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def ctrl_c() -> None:
    """Raises, as Python's own handler does."""
    raise KeyboardInterrupt


def in_pagoda(module: str) -> bool:
    """Whether a module is one of the package."""
    return module.startswith("pagoda.")


def interrupted(
    call: Callable[[], Any],
    after: int,
    handler: Callable[[], object] = ctrl_c,
    where: Callable[[str], bool] = in_pagoda,
) -> bool:
    """Makes a call in which Ctrl-C, or another signal, comes after `after` instructions of the modules that `where` takes;
    returns whether the call ended with KeyboardInterrupt."""
    left = after

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not where(frame.f_globals.get("__name__", "")) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if frame.f_lineno is None:
            # Instructions without a line end a generator; in Python 3.12 also a discarded one.
            return trace
        left -= event == "opcode"
        if left < 0:
            sys.settrace(None)
            handler()
        return trace

    before = sys.gettrace()
    # Python 3.12 reads this when tracing begins.
    sys._getframe().f_trace_opcodes = True
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


@contextmanager
def alarms(handler: Callable[..., object] = signal.default_int_handler) -> Iterator[Callable[[float], object]]:
    """Yields a function that sets an alarm: after that many seconds the handler is called, by default Ctrl-C's; 0 cancels."""

    def rings(number: int, frame: FrameType | None) -> None:
        if any(each.f_code.co_name == "__del__" for each, _ in traceback.walk_stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
        else:
            handler(number, frame)

    before = signal.signal(signal.SIGALRM, rings)
    gc.disable()
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
