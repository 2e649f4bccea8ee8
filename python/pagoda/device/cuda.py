"""A CUDA device, through CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, NamedTuple

from pagoda.device import thresholds
from pagoda.device.cuda_arrays import cupy_array, of_torch, view
from pagoda.device.cuda_memory import AllocatedArena, DeviceMemory, PinnedMemory, RegisteredArena
from pagoda.device.driver import Driver, HostArena, Stream, View, not_loaded
from pagoda.device.thresholds import Threshold
from pagoda.errors import BackendUnavailable, InvalidArgument
from pagoda.kernels import loader
from pagoda.kernels.instances import Kernel

CAPABILITY_MIN = (8, 0)

INSTALL = 'pip install "pagoda-kv[cuda13]" (or [cuda12])'

NO_DEVICE, DRIVER_TOO_OLD, NOT_READY = 100, 35, 600
"""cudaErrorNoDevice, cudaErrorInsufficientDriver, cudaErrorNotReady."""

DEFAULT_STREAM = (0, 1)
"""Addresses of the default stream: 0, and cudaStreamLegacy."""

CURRENT = contextlib.nullcontext()
"""For a device that is current already."""

THREAD_STREAM = 2
"""cudaStreamPerThread: the address of another stream in each thread."""

PITCH_MAX = (1 << 31) - 1
"""The largest pitch that a copy of rows takes, in bytes, on every device (cudaDevAttrMaxPitch)."""

ONE_ADDRESS = ctypes.c_void_p * 1
"""The array of pointers to kernel arguments that CUDA takes: every kernel has one argument."""


class Lack(NamedTuple):
    """What is missing, and how to get it."""

    found: str
    remedy: str


def lack() -> Lack | None:
    """Why there is no usable device; None if there is one."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return Lack("CuPy is not installed", INSTALL)
        return Lack(f"CuPy does not load ({error.__cause__ or error})", INSTALL)
    except OSError as error:
        return Lack(f"CuPy cannot make its folder ({error})", "set CUPY_CACHE_DIR to a folder that can be written")
    runtime = cupy.cuda.runtime
    driver, wanted = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        return Lack("there is no NVIDIA driver", "install it; start containers with --gpus all")
    try:
        count()
    except runtime.CUDARuntimeError as error:
        if error.status == DRIVER_TOO_OLD:
            return Lack(
                f"the NVIDIA driver is for CUDA {version(driver)}, CuPy for CUDA {version(wanted)}",
                "update the driver, or install pagoda-kv[cuda12] and no cupy-cuda13x",
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if error.status == NO_DEVICE and visible is not None:
            return Lack(f"CUDA_VISIBLE_DEVICES = {visible!r} leaves no device", "unset it")
        return Lack(f"CuPy finds no device ({error})", "nvidia-smi says what the driver sees")
    return None


def version(number: int) -> str:
    """CUDA's version number as text: 13.2 for 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"


def count() -> int:
    """How many devices there are. CuPy raises if there is none."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def capability(index: int) -> tuple[int, int]:
    """The compute capability of a device."""
    import cupy

    return divmod(int(cupy.cuda.Device(index).compute_capability), 10)


def gpu(index: int) -> Any:
    """CuPy's device number `index`. Raises BackendUnavailable with what is missing, and InvalidArgument."""
    missing = lack()
    if missing is not None:
        raise BackendUnavailable(f"device = cuda: {missing.found}; {missing.remedy}")
    if index >= count():
        raise InvalidArgument(f"device = cuda:{index}: from cuda:0 to cuda:{count() - 1}")
    if capability(index) < CAPABILITY_MIN:
        raise BackendUnavailable(
            f"device = cuda:{index}: compute capability {capability(index)}; from {CAPABILITY_MIN} on"
        )
    import cupy

    return cupy.cuda.Device(index)


def open_driver(index: int) -> Driver:
    """The driver of device number `index`. Raises as `gpu` does."""
    return CudaDriver(gpu(index))


class _Event:
    """A point in a stream. kept: the list to which CUDA's event is returned for reuse, as making an event takes several times
    as long as recording it. reached: whether it is known to be over, so that CUDA need not be asked."""

    __slots__ = ("_kept", "event", "reached")

    def __init__(self, event: Any, kept: list[Any]) -> None:
        self._kept, self.reached, self.event = kept, False, event

    def __del__(self) -> None:
        # There is no event if Ctrl-C came during __init__.
        if hasattr(self, "event"):
            self._kept.append(self.event)

    def done(self) -> bool:
        import cupy

        if not self.reached:
            # CuPy's `Event.done` returns False for ever once the device has failed.
            runtime = cupy.cuda.runtime
            status = runtime.eventQuery(self.event.ptr)
            if status not in (0, NOT_READY):
                raise runtime.CUDARuntimeError(status)
            self.reached = status == 0
        return self.reached

    def wait(self) -> None:
        if not self.reached:
            self.event.synchronize()
            self.reached = True


class _Foreign(NamedTuple):
    """A foreign stream, as `cupy.cuda.Stream.from_external` takes it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of the protocol, and the address."""
        return 0, self.address


class _Stream:
    """A stream of one device. The default streams of all devices have address 0, which means that of the current device."""

    def __init__(self, stream: Any, driver: CudaDriver) -> None:
        self._stream, self._driver = stream, driver

    def record(self) -> _Event:
        driver = self._driver
        # An event belongs to the current device, and only streams of that device can record it.
        with driver.current():
            try:
                event = driver.events.pop()
            except IndexError:
                event = driver.new_event()
            event.record(self._stream)
        return _Event(event, driver.events)

    def follow(self, event: Any) -> None:
        if not event.reached:
            with self._driver.current():
                self._stream.wait_event(event.event)

    def current(self) -> Any:
        with contextlib.ExitStack() as every:
            every.enter_context(self._driver.current())
            every.enter_context(self._stream)
            if torch := _torch():
                index, address = self._driver.device.id, self._stream.ptr
                # As an external stream, torch takes address 0 for a new stream and refuses 1.
                default = address in DEFAULT_STREAM
                # Only if needed: switching torch's current stream takes longer than a launch.
                if torch.cuda.current_stream(index).cuda_stream != (0 if default else address):
                    stream = torch.cuda.default_stream(index) if default else torch.cuda.ExternalStream(address, index)
                    every.enter_context(torch.cuda.stream(stream))
            return every.pop_all()

    def copy(self, target: int, source: int, size: int) -> None:
        runtime = self._driver.runtime
        with self._driver.current():
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, self._stream.ptr)

    def zero(self, target: int, size: int) -> None:
        with self._driver.current():
            self._driver.runtime.memsetAsync(target, 0, size, self._stream.ptr)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        if max(target_pitch, source_pitch) > PITCH_MAX:
            for row in range(rows):
                self.copy(target + row * target_pitch, source + row * source_pitch, width)
            return
        runtime = self._driver.runtime
        pitches = target, target_pitch, source, source_pitch
        with self._driver.current():
            runtime.memcpy2DAsync(*pitches, width, rows, runtime.memcpyDefault, self._stream.ptr)

    @property
    def capturing(self) -> bool:
        with self._driver.current():
            try:
                return bool(self._stream.is_capturing())
            except self._driver.runtime.CUDARuntimeError:
                raise
            except RuntimeError:
                # CuPy raises this for a capture that an error has made invalid; it lasts until somebody ends it.
                return True

    def launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: ctypes.Structure, *, shared_bytes: int = 0
    ) -> None:
        driver = self._driver
        function = driver.functions.get(kernel)
        if function is None:
            if self.capturing:
                raise not_loaded(kernel)
            function = driver.load(kernel, shared_bytes)
        # Copied before the call returns, and so are the arguments.
        places = ONE_ADDRESS(ctypes.addressof(arguments))
        with driver.current():
            driver.api.launchKernel(
                function.ptr, grid, 1, 1, threads, 1, 1, shared_bytes, self._stream.ptr, ctypes.addressof(places), 0
            )


def _torch() -> Any:
    """torch, if this process uses it on a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


class CudaDriver:
    """One GPU."""

    def __init__(self, device: Any) -> None:
        import cupy

        self.device = device
        attributes = device.attributes
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self.shared_bytes_max = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self._registers = bool(attributes["CanUseHostPointerForRegisteredMem"])
        self.api, self.runtime = cupy.cuda.driver, cupy.cuda.runtime
        self.functions: dict[Kernel, Any] = {}
        """Kernels that are loaded."""
        self.events: list[Any] = []
        """CUDA's events that are free for reuse."""
        self.new_event = partial(cupy.cuda.Event, block=True, disable_timing=True)
        with self._switched():
            self._context = self.api.ctxGetCurrent()

    def current(self) -> AbstractContextManager[object]:
        """Makes this the current device. If it is already, that takes one call of CUDA instead of three."""
        return CURRENT if self.api.ctxGetCurrent() == self._context else self._switched()

    @contextlib.contextmanager
    def _switched(self) -> Iterator[None]:
        with self.device:
            if not self.api.ctxGetCurrent():
                # The first call on this thread: any call of the runtime makes the device's context current.
                self.runtime.memGetInfo()
            yield

    def load(self, kernel: Kernel, shared_bytes: int) -> Any:
        """The compiled kernel, as a CUDA function. Raises KernelCompileError."""
        with self.device:
            compiled = loader.load(kernel)
            compiled.max_dynamic_shared_size_bytes = shared_bytes
            self.functions[kernel] = compiled.kernel
        return self.functions[kernel]

    def memory(self, size: int) -> DeviceMemory:
        """Zeroed bytes on the device."""
        with self.device:
            return DeviceMemory(size)

    def give_back(self) -> None:
        """Frees the unused memory of CuPy's pool, which would cut pieces off it for others until it is needed again."""
        import cupy

        runtime = cupy.cuda.runtime
        # Fails only on a failed device and in a forked child.
        with contextlib.suppress(runtime.CUDARuntimeError), self.device:
            runtime.deviceSynchronize()
            cupy.get_default_memory_pool().free_all_blocks()

    def pinned(self, size: int) -> PinnedMemory:
        """Bytes of the host."""
        with self.device:
            return PinnedMemory(size)

    def host_arena(self, size: int, piece: int) -> HostArena:
        """Address space of the host."""
        if self._registers:
            return RegisteredArena(size, piece)
        with self.device:
            return AllocatedArena(size)

    @cached_property
    def name(self) -> str:
        """The device's place on the bus."""
        import cupy

        return str(cupy.cuda.runtime.deviceGetPCIBusId(self.device.id))

    @property
    def free_bytes(self) -> int:
        """Free memory, as the driver reports it now."""
        free, _ = self.device.mem_info
        return int(free)

    copy_engine_bytes = Threshold(
        thresholds.copy_engine_bytes, memory=thresholds.MEASURED_BYTES, otherwise=thresholds.COPY_ENGINE_BYTES
    )
    ring_bytes = Threshold(thresholds.ring_bytes, memory=thresholds.RING_MEMORY_BYTES, otherwise=thresholds.RING_BYTES)

    def stream(self) -> _Stream:
        """A new stream."""
        import cupy

        with self.device:
            return _Stream(cupy.cuda.Stream(non_blocking=True), self)

    def caller_stream(self, given: object) -> _Stream:
        """The caller's stream; for None CuPy's current one, or torch's if CuPy's is the default stream."""
        stream = self._cupy_stream(given)
        if stream.ptr == THREAD_STREAM:
            raise InvalidArgument(
                f"stream = {THREAD_STREAM}, cudaStreamPerThread: one of your own, as cupy.cuda.Stream(non_blocking=True); "
                "that one is another in each thread"
            )
        return _Stream(stream, self)

    def captures_another(self, stream: Any) -> bool:
        """Whether the current stream is another one, and captured."""
        current = self._cupy_stream(None)
        # The default stream is never captured. While one that waits for it is, CUDA refuses to be asked about it.
        return current.ptr not in (stream._stream.ptr, *DEFAULT_STREAM) and _Stream(current, self).capturing

    def _cupy_stream(self, given: object) -> Any:
        """The same as a stream of CuPy."""
        import cupy

        index = self.device.id
        if given is None:
            stream = cupy.cuda.get_current_stream(index)
            if stream.ptr or not (torch := _torch()):
                return stream
            given = torch.cuda.current_stream(index)
        # CuPy's attribute, then torch's. An address has neither, and CuPy's is -1 if unknown.
        place = getattr(given, "device_id", getattr(given, "device_index", -1))
        if place not in (-1, index):
            raise InvalidArgument(f"stream = a stream of cuda:{place}: of cuda:{index}, the device of the cache")
        if isinstance(given, cupy.cuda.Stream):
            return given
        # torch's, an ExternalStream of CuPy, or an address.
        address = getattr(given, "cuda_stream", getattr(given, "ptr", given))
        if not isinstance(address, int):
            raise InvalidArgument(f"stream = {given!r}: a stream of CuPy or torch, or its address")
        return cupy.cuda.Stream.from_external(_Foreign(address))

    def view(self, name: str, array: Any, stream: Stream) -> View:
        """An array on the device."""
        return view(name, array, self.device.id, stream)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        """A new array of the same library, or of CuPy if `like` has only DLPack."""
        if of_torch(like):
            import torch

            return torch.empty(shape, dtype=torch.float32 if dtype else like.dtype, device=like.device)
        import cupy

        if not dtype and not hasattr(like, "__cuda_array_interface__"):
            like = cupy_array("q", like)
        return cupy.empty(shape, cupy.float32 if dtype else like.dtype)
