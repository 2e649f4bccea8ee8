"""The arguments of `Cache` for the disk tier, checked: where it is, how large, and of which model its pages are."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

from pagoda.checks import as_int, check_flag, is_number
from pagoda.errors import InvalidArgument, TierIOError
from pagoda.geometry import Geometry
from pagoda.sizes import parse_size

DISK_TIMEOUT = 60.0
"""Seconds that a drive may do nothing, by default."""
TIMEOUT_MIN, TIMEOUT_MAX = 1e-6, 1e9
"""Seconds; the least is that of `timedelta`."""


class DiskArguments(TypedDict):
    """The disk tier as `pagoda._core.Cache` takes it."""

    path: str
    memory: int
    fingerprint: bytes
    resume: bool
    writes_per_day: int | None
    timeout: timedelta


def disk_arguments(
    disk: str | Path | None,
    disk_memory: int | str,
    resume: bool,
    writes_per_day: int | str | None,
    timeout: float,
    model: str | None,
    geometry: Geometry,
) -> DiskArguments | None:
    """The disk tier of a cache; None for none. Raises InvalidArgument for what does not fit together."""
    memory = parse_size(disk_memory, "disk_memory")
    per_day = None if writes_per_day is None else parse_size(writes_per_day, "disk_writes_per_day")
    check_flag("resume", resume)
    timeout = as_int(timeout)
    if not is_number(timeout) or not TIMEOUT_MIN <= timeout <= TIMEOUT_MAX:
        raise InvalidArgument(f"disk_timeout = {timeout!r}: seconds from {TIMEOUT_MIN} to {TIMEOUT_MAX}")
    if model is not None and (not isinstance(model, str) or not model):
        raise InvalidArgument(f"model = {model!r}: None, or a text that says whose weights")
    if disk is None:
        given = {
            "disk_memory": memory and disk_memory,
            "resume": resume,
            "disk_writes_per_day": per_day and writes_per_day,
            "model": model,
        }
        for name, value in given.items():
            if value:
                raise InvalidArgument(f"{name} = {value!r}: nothing without disk=, a directory")
        return None
    if not isinstance(disk, str | Path) or not str(disk) or not _is_encodable(str(disk)):
        raise InvalidArgument(f"disk = {disk!r}: None, or a directory")
    if not memory:
        raise InvalidArgument(f"disk_memory = {disk_memory!r}: bytes that pages may take in disk = {str(disk)!r}")
    if resume and any(layer["center_first"] for layer in geometry.layers):
        limit = "center=None or arrays, as pages mean nothing without what their K was centred by"
        raise InvalidArgument(f"resume = True with a centre of the first rows: {limit}")
    return {
        "path": _absolute(disk),
        "memory": memory,
        "fingerprint": fingerprint(geometry, model),
        "resume": resume,
        "writes_per_day": per_day,
        "timeout": timedelta(seconds=timeout),
    }


def _absolute(disk: str | Path) -> str:
    try:
        return str(Path(disk).absolute())
    except FileNotFoundError:
        raise TierIOError(f"disk = {disk}: in the current directory, which is gone") from None


def _is_encodable(name: str) -> bool:
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:
        return False


def fingerprint(geometry: Geometry, model: str | None) -> bytes:
    """16 bytes that identify what pages mean: a hash of model, geometry, formats, rotation, windows and centres."""
    what = json.dumps([geometry.page_size, geometry.layers, model], sort_keys=True)
    return hashlib.blake2b(what.encode(), digest_size=16, person=b"pagoda pages").digest()
