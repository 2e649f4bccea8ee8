"""Caches on a GPU: `driver` is the interface to a device, `cuda` implements it with CuPy, `engine` runs a cache on it."""

from __future__ import annotations

from typing import Any

from pagoda import rates
from pagoda.device import cuda
from pagoda.device.engine import DeviceEngine
from pagoda.engine import forced_isa
from pagoda.errors import InvalidArgument
from pagoda.geometry import Geometry

__all__ = ["AUTO", "DeviceEngine", "device_index", "engine_for"]

AUTO = "cpu"
"""The meaning of device="auto": for now a cache is on a GPU only if the caller asks for one."""


def device_index(device: str) -> int | None:
    """The number of the GPU that `device` names; None for the CPU. Raises InvalidArgument."""
    chosen = AUTO if isinstance(device, str) and device == "auto" else device
    name, colon, number = str(chosen).partition(":")
    if name not in ("cpu", "cuda") or (colon and (name == "cpu" or not number.isdecimal())):
        raise InvalidArgument(f'device = {device!r}: "auto", "cpu", "cuda" or "cuda:1"')
    return None if name == "cpu" else int(number or 0)


def engine_for(device: str, geometry: Geometry, *, threads: int, **options: Any) -> DeviceEngine | None:
    """The engine for `device`; None for the CPU. threads: CPU threads for the CPU's part in attention over the host tier.

    Raises InvalidArgument, and BackendUnavailable if there is no such device.
    """
    index = device_index(device)
    if index is None:
        return None
    driver = cuda.open_driver(index)
    routes = rates.routes_of(driver.name, threads)
    return DeviceEngine(driver, geometry, routes=routes, isa=forced_isa(), **options)
