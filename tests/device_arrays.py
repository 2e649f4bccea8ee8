"""Arrays as strict as those of a GPU, over NumPy: only `get` turns one into a host array, and none mixes with those."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from emulator.driver import EmulatedDriver, install_driver
from pagoda.device.driver import View
from pagoda.errors import InvalidArgument
from pagoda.lm.arrays import Library, library


class Device(AbstractContextManager[object]):
    """Like a CuPy device that is current only inside `with`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def require(self) -> None:
        if not self.depth:
            raise RuntimeError("another device is the current one")


device = Device()


class DeviceArray:
    """The part of `cupy.ndarray` that a model uses. NumPy's functions refuse it, where CuPy would dispatch to its own."""

    __array_ufunc__ = None

    def __init__(self, hidden: npt.NDArray[Any]) -> None:
        self.hidden = hidden
        self.shape, self.dtype = hidden.shape, hidden.dtype

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError("an array of the device becomes one of the host by `get` only")

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, key: Any) -> Any:
        return _call(operator.getitem, self, key)

    def get(self) -> npt.NDArray[Any]:
        device.require()
        return self.hidden.copy()

    def reshape(self, *shape: int) -> Any:
        return _call(np.reshape, self, shape)


def _call(function: Any, *given: Any, **named: Any) -> Any:
    """Calls `function` on the hidden arrays; raises TypeError for host arrays."""
    device.require()

    def open_up(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            raise TypeError(f"{function}: an array of the host among those of the device")
        return value.hidden if isinstance(value, DeviceArray) else value

    result = function(*map(open_up, given), **{name: open_up(value) for name, value in named.items()})
    return DeviceArray(result) if isinstance(result, np.ndarray) else result


def _operator(function: Any, *, swapped: bool = False) -> Any:
    return lambda a, b: _call(function, b, a) if swapped else _call(function, a, b)


for _name in ("add", "sub", "mul", "truediv", "matmul"):
    _plain = getattr(operator, _name)
    setattr(DeviceArray, f"__{_name}__", _operator(_plain))
    setattr(DeviceArray, f"__r{_name}__", _operator(_plain, swapped=True))
    setattr(DeviceArray, f"__i{_name}__", _operator(getattr(operator, f"__i{_name}__")))


def _function(name: str) -> Any:
    return lambda *given, **named: _call(getattr(np, name), *given, **named)


def _asarray(host: npt.NDArray[Any]) -> DeviceArray:
    device.require()
    return DeviceArray(np.array(host))


xp = SimpleNamespace(
    asarray=_asarray,
    **{name: _function(name) for name in ("einsum", "sqrt", "negative", "minimum", "exp", "divide")},
)
"""The functions of CuPy that a model calls, for these arrays. `asarray` copies, as to a GPU."""


class StrictDriver(EmulatedDriver):
    """An emulated device that takes only these arrays."""

    def view(self, name: str, array: Any, stream: Any) -> View:
        if not isinstance(array, DeviceArray):
            raise InvalidArgument(f"{name} = {type(array).__name__}: an array of the device")
        return super().view(name, array.hidden, stream)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        device.require()
        return DeviceArray(super().empty(shape, like.hidden, dtype))


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> StrictDriver:
    """Makes "cuda" an emulated device, for caches and for the `library` that a module has imported."""
    strict = Library(xp, device)
    monkeypatch.setattr(module, "library", lambda name: strict if name == "cuda" else library(name))
    return install_driver(monkeypatch, StrictDriver())
