"""Which CUDA context serves a call, and the device for each context.

Arrays in a GPU's memory are convolved in the context that their memory belongs to. That is the GPU's *primary* context, which torch and
CuPy use, or one that a program made: ``pycuda.autoinit`` does so, and ``Device.make_context()``. A primary context is retained once and
made current for each call. Any other context has to be the thread's current one, as PyCUDA itself demands: for the driver, or on top of
PyCUDA's stack of contexts.

A context is identified by its id, not by its handle: a new context may get the handle of a destroyed one, and the driver must not be
asked about a handle that may be stale. The driver tells the id of the current context only. So a device whose context was destroyed is
never found again.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.runtime import driver
from pycuda_conv.runtime.base import pycuda_context
from pycuda_conv.runtime.device import CudaDevice, Where
from pycuda_conv.runtime.gpu import Gpu, gpu
from pycuda_conv.runtime.pinned import PinnedPool, default_limit
from pycuda_conv.runtime.transforms.gpu import gpu_library

#: As in ``launch/launch.h``.
GPUS = 64

#: The most contexts, besides primary ones, that are remembered. Beyond that, the half is forgotten that was not used for the longest time.
MOST = 64


class NotCurrent(ConvArgumentError):
    """An array in a context that no call can use; `template` is the message with a place for the array's name."""

    def __init__(self, template: str, name: str = "the array") -> None:
        self.template = template
        super().__init__(template.format(name))

    def check(self, ask: Callable[[], Any], name: str) -> None:
        """Raise the error with an array's name if the array, which `ask` looks at, is the one."""
        try:
            ask()
        except NotCurrent as error:
            raise NotCurrent(error.template, name) from None


NOT_CURRENT = (
    "{{}} lies in a CUDA context of {} that is not this thread's current one, and its result has to be made there: call context.push() "
    "before, Context.pop() after"
)
ELSEWHERE = (
    "{{}} lies in the primary context of cuda:{}, but a context of PyCUDA's is current, where its library works now: import "
    "pycuda.autoprimaryctx instead of pycuda.autoinit, or call Context.pop() before"
)
GONE = (
    "this needs a CUDA context of {} that is not this thread's current one, or is gone: call context.push() before and Context.pop() "
    "after, or make it again in the current context"
)


class PrimaryContext(CudaDevice):
    """A GPU's primary context, which torch and CuPy use as well. It is retained for as long as the process runs.

    Parameters
    ----------
    ordinal : int
        The GPU's number.
    """

    def __init__(self, ordinal: int) -> None:
        one = gpu(ordinal)
        #: PyCUDA's object, never dropped: PyCUDA would give the context back in a way that the driver refuses
        self.context = driver.pycuda().Device(ordinal).retain_primary_context()
        atexit.register(lambda kept: None, self.context)  # longer than this module
        super().__init__(one, self.context.handle, ordinal)
        self._entered = threading.local()
        if self._in_c is not None:
            self.is_current = partial(self._in_c.is_current, driver.address_of("cuCtxGetCurrent"), self.handle)
            _tell(self._in_c)
            self._in_c.primary(ordinal, self.handle)
            self.push = partial(self._in_c.push, self.handle)  # type: ignore[method-assign]
            self.pop = self._in_c.pop  # type: ignore[method-assign]

    @property
    def transforms(self) -> str:
        """The library of Fourier transforms that serves the device, or "". It is imported, which takes seconds."""
        return gpu_library()

    def __enter__(self) -> CudaDevice:
        """Make the context current for PyCUDA as well, so that programs can make arrays in it."""
        within = self.for_pycuda()
        within.__enter__()
        try:
            self._entered.stack.append(within)
        except AttributeError:
            self._entered.stack = [within]
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.stack.pop().__exit__(None, None, None)

    @contextmanager
    def for_pycuda(self) -> Iterator[None]:
        """The context is current for the driver and for PyCUDA.

        PyCUDA takes the driver's current context for the last one on its own stack: its push replaces it, and its pop brings back PyCUDA's
        last one, not the driver's. So PyCUDA gets a level of the driver's stack to play with, and none where its last context is this one
        already.
        """
        if pycuda_handle() == self.handle:
            with super().for_pycuda():
                yield
            return
        with self.current():
            driver.push(self.handle)
            try:
                self.context.push()
                try:
                    yield
                finally:
                    self._drv.Context.pop()
            finally:
                driver.pop()


class OtherContext(CudaDevice):
    """A context that a program made. It may go at any time while it is not current; then its handles went with it.

    Parameters
    ----------
    gpu : Gpu
    handle, id : int
        Those of the context.
    """

    def __init__(self, gpu: Gpu, handle: int, id: int) -> None:
        super().__init__(gpu, handle, (gpu.ordinal, id))
        self.id = id
        self._pinned = PinnedPool(driver.libcuda(), default_limit())
        self.is_current = self._is_current
        if self._in_c is not None:
            self.is_current = partial(self._in_c.has_id, id)
            _tell(self._in_c)
            self._in_c.other(id)

    def _is_current(self) -> bool:
        return driver.current_id() == self.id

    def push(self) -> None:
        """Make the context current, which it must be for the driver or for PyCUDA.

        Raises
        ------
        ConvArgumentError
            It is not, or it is gone.
        """
        if driver.current_id() == self.id:
            driver.push(self.handle)
        elif not self._pushed():
            raise ConvArgumentError(GONE.format(self.name))

    def _pushed(self) -> bool:
        """Make the context current if it is PyCUDA's current one."""
        if pycuda_handle() == self.handle:  # then the handle is a living context's, which may be another one
            driver.push(self.handle)
            if driver.current_id() == self.id:
                return True
            driver.pop()
        return False

    def check_current(self) -> None:
        if not self.is_current():
            raise ConvArgumentError(GONE.format(self.name))

    def is_usable(self) -> bool:
        if driver.current_id() == self.id:
            return True
        pushed = self._pushed()
        if pushed:
            self.pop()
        return pushed

    @contextmanager
    def for_pycuda(self) -> Iterator[None]:
        """The context is current for the driver and for PyCUDA: for the latter it has to be so already."""
        with super().for_pycuda():
            if pycuda_handle() != self.handle:
                raise ConvArgumentError(
                    f"the input's allocator would allocate in PyCUDA's current context, but the input lies in another one of {self.name}: "
                    "call context.push() before and Context.pop() after, or pass out"
                )
            yield

    def pinned(self) -> PinnedPool:
        """Page-locked memory that goes with the context."""
        return self._pinned

    def result_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def keep_alive(self) -> Any:  # PyCUDA's object of the context, if it is PyCUDA's current one
        top = self._drv.Context.get_current()
        return top if top is not None and top.handle == self.handle else None


def _tell(native: Any) -> None:
    """Tell the launcher in C the driver's functions."""
    global doubtful
    names = "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuPointerGetAttribute"
    has_ids = hasattr(driver.libcuda(), "cuCtxGetId")
    native.drive(*map(driver.address_of, names), driver.address_of("cuCtxGetId") if has_ids else 0)
    doubtful = native.doubtful


# ---- the devices

_lock = threading.RLock()
_primaries: dict[int, PrimaryContext] = {}
_others: OrderedDict[int, OtherContext] = OrderedDict()
#: called when contexts are forgotten: plans of theirs are of no more use
when_forgotten: list[Callable[[], None]] = []


def _after_fork() -> None:
    for device in (*_primaries.values(), *_others.values()):
        device.push = device.is_current = driver.pycuda  # type: ignore[method-assign]  # it raises an error that says what is wrong


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cuda_device(ordinal: int) -> CudaDevice:
    """The primary context of a GPU; made once, shared by every thread."""
    device = _primaries.get(ordinal)
    if device is None:
        with _lock:
            device = _primaries.get(ordinal)
            if device is None:
                device = _primaries[ordinal] = PrimaryContext(ordinal)
    return device


def device_at(where: Where) -> CudaDevice:
    """The device of a context that :func:`where_is` found."""
    if isinstance(where, int):
        return cuda_device(where)
    ordinal, id = where
    with _lock:
        device = _others.get(id)
        if device is not None:
            _others.move_to_end(id)
            return device
    raise ConvArgumentError(GONE.format(f"cuda:{ordinal}"))


def _other(ordinal: int, handle: int) -> OtherContext:
    """The device of a context, not a primary one, that is current."""
    id = driver.current_id()
    if not id:
        raise ConvArgumentError(
            f"the current CUDA context of cuda:{ordinal} is not its primary one, and this driver, older than CUDA 12.0, can't tell such "
            "contexts apart: make arrays in the primary context, by import pycuda.autoprimaryctx"
        )
    with _lock:
        device = _others.get(id)
        if device is None:
            device = _others[id] = OtherContext(gpu(ordinal), handle, id)
            if len(_others) > MOST:
                for _ in range(MOST // 2):
                    _others.popitem(last=False)
                for forget in when_forgotten:
                    forget()
        _others.move_to_end(id)
        return device


def known() -> list[CudaDevice]:
    """The devices of all contexts that calls have used, primary ones first. Others may be gone."""
    with _lock:
        return [*_primaries.values(), *_others.values()]


def primary_handle(ordinal: int) -> int:
    """The handle of a GPU's primary context, or 0 where nobody uses that: to make it takes hundreds of megabytes of the GPU."""
    known = _primaries.get(ordinal)
    if known is None:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        code = driver.libcuda().cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active))
        driver.check(code, "cuDevicePrimaryCtxGetState")
        if not active.value:
            return 0
        known = cuda_device(ordinal)  # type: ignore[assignment]
    return known.handle  # type: ignore[union-attr]


def pycuda_handle() -> int:
    """The handle of PyCUDA's current context in this thread, or 0."""
    context = pycuda_context()
    return 0 if context is None else int(context.handle)


def is_primary(handle: int) -> bool:
    """Whether a context is a primary one that is known."""
    return any(device.handle == handle for device in _primaries.values())


@contextmanager
def _pushed(handle: int) -> Iterator[int]:
    """A living context is current inside the block, which gets the number of its GPU."""
    driver.push(handle)
    try:
        ordinal = ctypes.c_int()
        driver.check(driver.libcuda().cuCtxGetDevice(ctypes.byref(ordinal)), "cuCtxGetDevice")
        yield ordinal.value
    finally:
        driver.pop()


def device_of(handle: int) -> CudaDevice:
    """The device of a context that lives."""
    for device in _primaries.values():
        if device.handle == handle:
            return device
    with _pushed(handle) as ordinal:
        return cuda_device(ordinal) if primary_handle(ordinal) == handle else _other(ordinal, handle)


def chosen(ordinal: int | None = None) -> CudaDevice:
    """Where host arrays are convolved: in PyCUDA's current context, if there is one and it is on that GPU, else in the primary one."""
    handle = pycuda_handle()
    if handle:
        device = device_of(handle)
        if ordinal in (None, device.ordinal):
            return device
    return cuda_device(ordinal or 0)


def of_pycuda(given: Any) -> CudaDevice:
    """The device of a ``pycuda.driver.Device`` or ``Context``."""
    drv = driver.pycuda()
    if isinstance(given, drv.Device):
        return chosen(next(i for i in range(drv.Device.count()) if drv.Device(i) == given))
    for device in _primaries.values():
        if device.handle == given.handle:
            return device
    current = drv.Context.get_current()
    if current is None or current.handle != given.handle:
        raise ConvArgumentError("device is a CUDA context that is not PyCUDA's current one: call its push() before, Context.pop() after")
    return device_of(current.handle)


# ---- where an array lies

#: by the launcher in C: address -> (GPU, 0) for its primary context, (-1, id) for another one, or None where Python has to find out
_in_c: Any = None


def where_is(pointer: int) -> Where:
    """The context that the memory at an address belongs to.

    Raises
    ------
    ConvArgumentError
        It is the host's memory, or that of a context that is neither a primary one nor current.
    """
    found = None if _in_c is None else _in_c(pointer)
    if found is not None:
        driver.check_not_forked()
        primary, id = found
        if not id:
            return int(primary)
        if id in _others:
            return _others[id].where
    return _where_is(pointer)


def _where_is(pointer: int) -> Where:
    global _in_c
    driver.pycuda()
    ask, number, context = driver.libcuda().cuPointerGetAttribute, ctypes.c_int(), ctypes.c_void_p()
    if ask(ctypes.byref(number), 9, pointer):  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        raise ConvArgumentError(f"the address {pointer:#x} is not one of a GPU's memory, or its CUDA context is gone")
    ordinal, current = number.value, driver.current_context()
    handle = 0 if ask(ctypes.byref(context), 1, pointer) else context.value or 0  # ..._CONTEXT
    if not handle:  # stream-ordered memory belongs to no context
        if not current or current == primary_handle(ordinal):
            return ordinal
        with _pushed(current) as here:
            if here != ordinal:
                return ordinal
        handle = current
    if handle == primary_handle(ordinal):
        found: Where = ordinal
    elif handle == current:
        found = _other(ordinal, handle).where
    elif handle == pycuda_handle():
        with _pushed(handle):
            found = _other(ordinal, handle).where
    else:
        raise NotCurrent(NOT_CURRENT.format(f"cuda:{ordinal}"))
    device = device_at(found)
    if device._in_c is not None:
        _in_c = device._in_c.where
    return found


def _doubtful() -> bool:
    current = driver.current_context()
    return bool(current) and not is_primary(current)


#: Whether a context is current that is no primary one. Then the memory of a library that uses the primary one may lie there: torch's does,
#: if that context was current when torch first used the GPU.
doubtful: Callable[[], bool] = _doubtful


def where_lies(ordinal: int, pointer: Callable[[], int]) -> Where:
    """The context of an array of such a library, which says that it lies on that GPU; its address is asked for only in doubt.

    Raises
    ------
    ConvArgumentError
        It lies elsewhere than in the current context, where such a library launches its own kernels: nothing would order ours with them.
    """
    if not doubtful() or not pointer():
        return ordinal
    here = device_of(driver.current_context())
    if here.where == here.ordinal:  # a primary one that was not known yet
        return ordinal
    if where_is(pointer()) != here.where:
        raise NotCurrent(ELSEWHERE.format(ordinal))
    return here.where


def in_doubt(device: CudaDevice) -> bool:
    """Whether memory that such a library allocates for a call in the device's context may lie elsewhere."""
    return device.where != device.ordinal or doubtful()


def check_reached(device: CudaDevice, named: dict[str, int]) -> None:
    """Refuse addresses outside of the memory of the device's context."""
    context = ctypes.c_void_p()
    for name, pointer in named.items():
        failed = not pointer or driver.libcuda().cuPointerGetAttribute(ctypes.byref(context), 1, pointer)
        if not failed and context.value and context.value != device.handle:
            raise ConvArgumentError(
                f"{name} lies in another CUDA context of {device.name} than the call is made in, because a context of PyCUDA's, as "
                "pycuda.autoinit makes it, was current at times when its library used the GPU: import pycuda.autoprimaryctx instead"
            )


def check_stream(device: CudaDevice, stream: Any) -> None:
    """Refuse a stream of another context than the device's."""
    handle, context = driver.handle_of(stream), ctypes.c_void_p()
    if handle > 2 and not driver.libcuda().cuStreamGetCtx(handle, ctypes.byref(context)) and context.value not in (None, device.handle):
        raise ConvArgumentError(f"stream belongs to another CUDA context than the arrays, which lie in one of {device.name}")


def number_of(where: Where) -> int:
    """The number that stands for a context in the keys of the launcher in C: see ``context_number`` in ``launch/keys.c``."""
    return where if isinstance(where, int) else GPUS + where[1]


def ordinal_of(where: Where) -> int:
    """The number of the GPU."""
    return where if isinstance(where, int) else where[0]


def context_name(where: Where) -> str:
    """A context in messages."""
    return "the one of torch and CuPy" if isinstance(where, int) else f"number {where[1]}"
