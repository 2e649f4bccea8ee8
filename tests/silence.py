"""A drive that does not answer: system calls of this process that do not return until they are released.

The kernel asks a supervisor about each of them, which does not reply for a while (seccomp_unotify(2)); until then the
threads that make them sleep. Linux only, and irreversible: for a test's own processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

NUMBERS = {
    "x86_64": {
        "seccomp": 317,
        "pread64": 17,
        "pwrite64": 18,
        "fdatasync": 75,
        "fallocate": 285,
        "io_uring_enter": 426,
        "unlinkat": 263,
        "rmdir": 84,
        "statfs": 137,
        "flock": 73,
    },
    "aarch64": {
        "seccomp": 277,
        "pread64": 67,
        "pwrite64": 68,
        "fdatasync": 83,
        "fallocate": 47,
        "io_uring_enter": 426,
        "unlinkat": 35,
        "rmdir": 35,
        "statfs": 43,
        "flock": 32,
    },
}
"""Numbers of system calls, by machine."""

LOAD, SAME, RETURN = 0x20, 0x15, 0x06
"""Instructions of a seccomp filter: load a word, jump if it equals a number, return."""
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
SET_FILTER, ALL_THREADS, LISTENER, PREFER_ESRCH = 1, 1, 8, 16
NO_NEW_PRIVILEGES = 38
RECEIVE, SEND = 0xC0502100, 0xC0182101
"""ioctls: receive a request, 80 bytes that begin with its number, and answer it."""
ANSWER, GO_ON = struct.Struct("QqiI"), 1


class Call(NamedTuple):
    """A waiting call."""

    number: int
    thread: int
    file: str
    """Its name; "" for a call on a path."""


def silence(*names: str) -> int:
    """Blocks every thread of this process that makes one of these system calls; returns the listener for `answer`.

    Raises OSError where the system does not support this.
    """
    numbers = NUMBERS.get(platform.machine())
    if platform.system() != "Linux" or numbers is None:
        raise OSError(errno.ENOSYS, f"{platform.system()} on {platform.machine()}")
    compare = [(SAME, len(names) - index, 0, numbers[name]) for index, name in enumerate(names)]
    code = [(LOAD, 0, 0, 0), *compare, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, NOTIFY)]
    words = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(words)))
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ALL_THREADS | LISTENER | PREFER_ESRCH
    listener = -1
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
        listener = libc.syscall(numbers["seccomp"], SET_FILTER, flags, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def is_possible() -> bool:
    """Whether `silence` works here."""
    here = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {here!r}); from silence import silence; silence('fdatasync')"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0


def asked(listener: int) -> bool:
    """Whether a call waits."""
    return bool(select.select([listener], [], [], 0)[0])


def answer(listener: int, pause: float = 0.0) -> None:
    """From now on lets all calls through, waiting ones first, each after `pause` seconds."""

    def supervise() -> None:
        while True:
            # The call is gone if its thread was woken; it then asks again.
            with contextlib.suppress(FileNotFoundError):
                call = next_call(listener)
                time.sleep(pause)
                let(listener, call)

    threading.Thread(target=supervise, daemon=True).start()


def next_call(listener: int) -> Call:
    """Waits for the next call and returns it; the call goes on waiting."""
    asked = fcntl.ioctl(listener, RECEIVE, bytes(80))
    number, thread = struct.unpack_from("QI", asked)
    descriptor = struct.unpack_from("Q", asked, 32)[0]
    file = Path(f"/proc/self/fd/{descriptor}")
    return Call(number, thread, file.readlink().name if file.is_symlink() else "")


def let(listener: int, call: Call, error: int = 0) -> None:
    """Lets the call through, or makes it fail with an errno."""
    fcntl.ioctl(listener, SEND, ANSWER.pack(call.number, 0, -error, 0 if error else GO_ON))
