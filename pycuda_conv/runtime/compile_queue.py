"""The machine code of kernels for one GPU: found on disk or compiled, each text once, whoever asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from pycuda_conv.runtime import binaries, driver
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.runtime.cache import trusted_folder
from pycuda_conv.runtime.compiler import CompileError, compiler
from pycuda_conv.runtime.workers import workers


class CompileQueue:
    """Texts that are compiled, are being compiled, or wait for it.

    Parameters
    ----------
    arch : str
        The GPU's plain target, such as ``"sm_90"``.
    """

    def __init__(self, arch: str) -> None:
        self.arch = arch
        #: texts that are being compiled, or were compiled and are not loaded yet
        self._cubins: dict[tuple[str, str], Future[bytes]] = {}
        #: texts that were loaded. Their machine code lies on disk: in memory it is kept only where nothing can be kept on disk
        self._loaded: set[tuple[str, str]] = set()
        #: texts that were not found on disk: to look again takes longer than another process's kernel would save in the launch
        self._absent: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def compile(self, source: str, arch: str = "", fresh: bool = False) -> bytes:
        """The cubin of `source` for this GPU: shipped with the package, kept on disk, or compiled now.

        With `fresh`, it is compiled now and replaces what was kept.

        Raises
        ------
        CompileError
        """
        arch = arch or self.arch
        found = None if fresh else binaries.shipped(source, arch)
        return binaries.make(source, arch, compiler(driver.newest()), fresh) if found is None else found

    def kept(self, source: str, arch: str) -> bytes | None:
        """The cubin of `source`, if it was compiled before."""
        made_by = None
        with suppress(CompileError):
            made_by = compiler(driver.newest())
        return binaries.find(source, arch or self.arch, made_by)

    def cubin(self, source: str, arch: str, background: bool = False) -> Future[bytes]:
        """The cubin of a text, which is compiled once, whoever asks. With `background`, another thread compiles it."""
        coming, make = self._claimed(source, arch, background)
        if make:
            make()
        return coming

    def take(self, source: str, arch: str) -> bytes:
        """The cubin of a text, for the caller to load."""
        coming = self._cubins.get((source, arch))  # none if it was loaded before, or another thread could not load it
        cubin = coming.result() if coming else self.compile(source, arch)
        self._loaded.add((source, arch))
        if trusted_folder() is not None:
            self._cubins.pop((source, arch), None)
        return cubin

    def _claimed(self, source: str, arch: str, background: bool) -> tuple[Future[bytes], Callable[[], None] | None]:
        """The cubin of a text, and the function that compiles it if the caller has to do so, or else None."""
        with self._lock:
            coming = self._cubins.get((source, arch))
            failed = coming is not None and coming.done() and coming.exception() is not None
            if coming is not None and not failed and (background or not coming.cancel()):  # the caller takes a text out of the queue
                return coming, None
            if background:
                coming = self._cubins[source, arch] = workers.submit(partial(self.compile, source, arch))
                return coming, None
            coming = self._cubins[source, arch] = Future()
            coming.set_running_or_notify_cancel()  # begun: from now on whoever asks waits for it
        return coming, partial(self._make, coming, source, arch)

    def _make(self, coming: Future[bytes], source: str, arch: str) -> None:
        try:
            coming.set_result(self.compile(source, arch))
        except BaseException as error:
            coming.set_exception(error)

    def compiled(self, step: KernelLaunch) -> bool:
        """Whether the machine code for `step` is there."""
        key = source, arch = step.source(), step.arch
        if key in self._loaded:
            return True
        coming = self._cubins.get(key)
        if coming is not None:
            return coming.done() and not coming.cancelled() and coming.exception() is None
        if key in self._absent:
            return False
        found = self.kept(source, arch)
        if found is None:
            self._absent.add(key)
            return False
        coming = Future()
        coming.set_result(found)
        self._cubins.setdefault(key, coming)
        return True

    def coming(self, step: KernelLaunch) -> bool:
        """Whether the text of `step` is being compiled."""
        coming = self._cubins.get((step.source(), step.arch))
        return coming is not None and coming.running()

    def queued(self, step: KernelLaunch) -> bool:
        """Whether the text of `step` waits to be compiled."""
        coming = self._cubins.get((step.source(), step.arch))
        return coming is not None and not (coming.running() or coming.done())

    def begin(self, steps: Sequence[KernelLaunch]) -> None:
        """Compile the texts of `steps`, each in a thread of its own, because the caller is about to wait for them."""
        for source, arch in self._to_load(steps):
            make = self._claimed(source, arch, background=False)[1]
            if make:
                threading.Thread(target=make, daemon=True).start()

    def compile_in_background(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        """Queue the texts of `steps` for threads in the background."""
        return [self.cubin(source, arch, background=True) for source, arch in self._to_load(steps)]

    def _to_load(self, steps: Sequence[KernelLaunch]) -> list[tuple[str, str]]:
        """The texts of `steps`, each once, without those that were loaded."""
        texts = dict.fromkeys((step.source(), step.arch) for step in steps)
        return [text for text in texts if text not in self._loaded]

    def all_compiled(self) -> bool:
        """Whether nothing is being compiled for the GPU, and nothing waits to be."""
        return all(coming.done() for coming in list(self._cubins.values()))
