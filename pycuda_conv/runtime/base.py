"""The interface of every device, and the description of launches that it takes."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np

from pycuda_conv.errors import BackendError

#: A function of (buffers, stream) that launches what was prepared.
Launcher = Callable[[Sequence[Any], Any], None]

#: The most launches of a step that a GPU runs side by side: in the caller's stream and in others.
SIDE_BY_SIDE = 4

#: A buffer of a launch, or a place in one: see :class:`KernelLaunch`.
BufferSlice = int | tuple[int, int]

_HERE = Path(__file__).resolve().parent.parent
#: Where the kernels lie: inside an installed package, or beside it in a checkout.
KERNEL_DIR = _HERE / "cu" if (_HERE / "cu").is_dir() else _HERE.parent / "cu"


@dataclass(frozen=True)
class Im2col:
    """A tensor map that walks output pixels instead of a box: TMA's im2col mode. Spatial axes innermost (W) first."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    stride: tuple[int, ...]
    channels: int
    pixels: int


@dataclass(frozen=True)
class TensorMap:
    """Description of an array for TMA, without its address. Innermost axis first.

    Attributes
    ----------
    buffer, offset : int
        The plan's buffer that holds the array, and bytes from the buffer's start.
    sizes : tuple of int
        Elements along each axis.
    strides : tuple of int
        Bytes from one index to the next, for every axis but the innermost, whose elements are neighbours.
    box : tuple of int, or Im2col
        The elements that one load fetches, or one store writes.
    span : int
        Bytes of a row in shared memory, over which it is swizzled: 128, 64 or 32; 0 leaves it in order.
    dtype : {"float16", "bfloat16", "float32", "tfloat32"}
        In ``"tfloat32"`` the memory holds float32, which TMA rounds to TF32 on its way to shared memory.
    """

    buffer: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...] | Im2col
    span: int
    dtype: str


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch without the addresses of the arrays.

    Attributes
    ----------
    kernel : str
        The kernel's name.
    defines : mapping of str to int
        The constants that the text is compiled with. With ``DTYPE`` and ``INDEX_64`` it is in the portable dialect.
    grid, block : int
        Blocks, and threads of a block.
    buffers : tuple of int or (int, int)
        The plan's buffers that the kernel takes, in order: an index into (input, weight, bias, result, workspace,
        packed filter, scale, residual), or such an index and a number of bytes from that buffer's start.
    scalars : tuple of int
        64-bit integers passed after the buffers.
    arguments : NamedTuple, or tuple of NamedTuple
        A struct of 64-bit integers, which the kernel takes by value after the buffers, before `scalars`. The class has the
        name of the struct in the kernel's text, and its fields are the struct's members, in order: :meth:`source` checks both.
        A tuple of several makes an array of that struct.
    layer : mapping of str to int
        Defines that may be added to `defines`. They turn arguments that are constants of the layer into constants of the text. Their values
        are those of the arguments, so the results are the same bits.
    file : str
        The kernel's file in ``cu/``, without ``.cu``; by default it has the kernel's name.
    maps : tuple of TensorMap
        Tensor maps passed before the buffers.
    shared : int
        Bytes of dynamic shared memory.
    arch : str
        The target to compile for, where that is not the GPU's plain one: ``"sm_90a"``.
    """

    kernel: str
    defines: Mapping[str, int]
    grid: int
    block: int
    buffers: tuple[BufferSlice, ...]
    scalars: tuple[int, ...]
    file: str = ""
    maps: tuple[TensorMap, ...] = ()
    shared: int = 0
    arch: str = ""
    arguments: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    layer: Mapping[str, int] = field(default_factory=dict)

    @property
    def structs(self) -> tuple[tuple[int, ...], ...]:
        """The structs of :attr:`arguments`, each a NamedTuple."""
        one = self.arguments and not isinstance(self.arguments[0], tuple)
        return cast("tuple[tuple[int, ...], ...]", (self.arguments,) if one else self.arguments)

    @cached_property  # asked for several times
    def numbers(self) -> tuple[int, ...]:
        """All 64-bit integers that the kernel takes after its buffers, in the order of memory."""
        return *(number for struct in self.structs for number in struct), *self.scalars

    def source(self) -> str:
        """A prelude of the kernel's defines, then its text; compilers still report the file's own lines.

        Raises
        ------
        TypeError
            The struct in the text is not that of :attr:`arguments`.
        """
        file = self.file or self.kernel
        for struct in self.structs:
            _check_struct(file, type(struct))
        return source_of(file, self.defines)


@dataclass(frozen=True)
class LibraryCall(KernelLaunch):
    """A call of a library in the place of a launch.

    :attr:`~KernelLaunch.kernel` is the library's name, and there is no text to compile. Launchers of schedules make the call in its turn.

    Attributes
    ----------
    transforms : (Transforms, int, int)
        What to make of the input and the weight, and the bytes from the workspace's start to the sums and to their limits.
    """

    transforms: tuple[Any, int, int] = (None, 0, 0)

    def source(self) -> str:
        return ""


def pycuda_context() -> Any:
    """PyCUDA's current context in this thread, or None; PyCUDA is not imported.

    The driver may have another one: torch makes its own current.
    """
    context = getattr(sys.modules.get("pycuda.driver"), "Context", None)  # another thread may be importing the module
    return None if context is None else context.get_current()


def source_of(file: str, defines: Mapping[str, int]) -> str:
    """A prelude of defines, in any order, then the text of a kernel file. Equal arguments give the same string: it is hashed once."""
    return _joined(file, _text(file), tuple(sorted(defines.items())))


@lru_cache(maxsize=1024)  # a plan asks for each of its texts a dozen times
def _joined(file: str, text: str, items: tuple[tuple[str, int], ...]) -> str:
    defines = dict(items)
    # these shape the dialect's header; the others would collide with system headers
    first = ("DTYPE", "INDEX_64", "LAYER", "NEXT_COMES") if "DTYPE" in defines else ()
    lines = [f"#define {name} {defines[name]}" for name in first if name in defines]
    lines += ['#include "core/portable.cuh"'] if first else []
    lines += [f"#define {name} {value}" for name, value in items if name not in first]
    lines.append(f'#line 1 "{shown_file(file)}"')
    return "\n".join(lines) + "\n" + text


@cache
def _text(file: str) -> str:
    return kernel_file(file).read_text()


@lru_cache(maxsize=8)
def _files(folder: Path) -> dict[str, Path]:
    """The files of kernels by their names: the stem, and the folder's name with the stem. Headers have their file's name."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.cu*")):
        if path.suffix == ".cuh":
            found[path.name] = path
        else:
            found[path.stem] = found[f"{path.parent.name}_{path.stem}"] = path
    return found


def kernel_file(name: str) -> Path:
    """The file of a kernel of this name, or of a header with its ``.cuh``.

    A kernel's name is its file's stem, or the name of the folder and the stem: ``direct_gemm`` is ``direct/gemm.cu``.

    Raises
    ------
    FileNotFoundError
    """
    if name not in _files(KERNEL_DIR):
        _files.cache_clear()  # it may be new
    try:
        return _files(KERNEL_DIR)[name]
    except KeyError:
        raise FileNotFoundError(f"there is no kernel {name} in {KERNEL_DIR}") from None


def kernel_names() -> list[str]:
    """The names of all kernels, with their folders' names."""
    return sorted(f"{path.parent.name}_{path.stem}" for path in KERNEL_DIR.rglob("*.cu"))


def shown_file(name: str) -> str:
    """The same file as messages show it: ``cu/direct/gemm.cu``."""
    return f"cu/{kernel_file(name).relative_to(KERNEL_DIR).as_posix()}"


#: How kernels spell the type of a 64-bit integer.
_INTEGER = r"(?:long_t|long long)"


@cache
def struct_members(file: str, struct: str) -> tuple[str, ...]:
    """The names of a struct's members in order, those of its bases first, as a kernel's file or any header declares it.

    `file` is a kernel's file in ``cu/`` without ``.cu``, or a header with its ``.cuh``.

    Raises
    ------
    TypeError
        There is no such struct, or it has members other than 64-bit integers.
    """
    name = kernel_file(file).name
    for where, read in ((name, lambda: _text(file)), ("the headers", headers)):
        text = read()
        found = re.search(rf"\bstruct {struct}(?: : ([\w, ]+))? {{(.*?)\n}}", text, re.DOTALL)
        if found:
            body = re.sub(r"//[^\n]*", "", found[2])
            if not re.fullmatch(rf"(\s*{_INTEGER} \w+(\s*,\s*\w+)*;)*\s*", body):
                raise TypeError(f"struct {struct} in {where} must have members of type long_t alone, but has:{body.rstrip()}")
            first = (member for base in (found[1] or "").split(", ") if base for member in struct_members(file, base))
            return *first, *re.findall(r"\w+", re.sub(_INTEGER, "", body))
    raise TypeError(f"there is no struct {struct} in {name} nor in the headers")


@cache
def _check_struct(file: str, struct: type) -> None:
    """Check that a NamedTuple and the struct of its name have the same members."""
    fields: tuple[str, ...] | None = getattr(struct, "_fields", None)
    if fields is None:
        raise TypeError(f"the arguments of {file}.cu must be a NamedTuple, or a tuple of them, but got a {struct.__name__}")
    members = struct_members(file, struct.__name__)
    if fields != members:
        differ = ((at, *pair) for at, pair in enumerate(zip_longest(members, fields, fillvalue="nothing")) if pair[0] != pair[1])
        at, theirs, ours = next(differ)
        raise TypeError(
            f"struct {struct.__name__} of {file}.cu has {len(members)} members, its Python class {len(fields)} fields; "
            f"number {at} is {theirs} in the kernel, {ours} in Python"
        )


@cache
def headers() -> str:
    """The text of all headers in ``cu/``, which compiled kernels depend on."""
    return "\0".join(path.read_text() for path in sorted(KERNEL_DIR.rglob("*.cuh")))


def forked(what: str) -> BackendError:
    """The error of a process that was forked while its parent was using `what`."""
    return BackendError(
        f"{what} was in use when this process was forked, and it does not survive a fork: start workers with "
        "multiprocessing.get_context('spawn'), a torch DataLoader's with multiprocessing_context='spawn', or make the first call of "
        "pycuda_conv in the workers, after the fork"
    )


class Device(AbstractContextManager["Device"]):
    """A device that runs launches. It is current inside a ``with`` block."""

    #: "cuda" or "opencl"
    backend: str
    #: The device's name in `device=`.
    name: str
    multiprocessors: int
    #: Compute capability of an NVIDIA GPU.
    capability: tuple[int, int] = (0, 0)
    #: The name of an NVIDIA GPU, as it reports it.
    model: str = ""
    #: Whether kernels that know a layer's constants are worth compiling for each layer.
    constants_pay = False

    @property
    def transforms(self) -> str:
        """The library of Fourier transforms that serves the device, or ""."""
        return ""

    def check_current(self) -> None:
        """Refuse to launch where that would need what is gone."""

    @abstractmethod
    def launcher(self, step: KernelLaunch) -> Launcher:
        """Compile `step`'s kernel, or find it compiled, and bind all but the buffers and the stream."""

    def compile_all(self, steps: Sequence[KernelLaunch]) -> None:
        """Compile the kernels of `steps` before they are asked for one by one, where several at a time are faster."""

    def compiled(self, step: KernelLaunch) -> bool:
        """Whether :meth:`launcher` will find the kernel of `step` compiled."""
        return True

    def coming(self, step: KernelLaunch) -> bool:
        """Whether the kernel of `step` is being compiled at the moment."""
        return False

    def queued(self, step: KernelLaunch) -> bool:
        """Whether the kernel of `step` will be compiled in the background, but is not begun yet."""
        return False

    def begin(self, steps: Sequence[KernelLaunch]) -> None:
        """Begin to compile the kernels of `steps`, because the caller is about to wait for them."""

    def compile_in_background(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        """Begin to compile the kernels of `steps` in other threads. The device does not change until :meth:`launcher` is called."""
        return []

    def schedule_launcher(self, steps: Sequence[Sequence[KernelLaunch]]) -> Launcher:
        """One launcher for steps that follow one another; the launches of one step are independent."""
        launchers = [self.launcher(launch) for step in steps for launch in step]
        if len(launchers) == 1:
            return launchers[0]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            for one in launchers:
                one(buffers, stream)

        return launch

    def describe(self, step: KernelLaunch) -> dict[str, float]:
        """The resources that the compiled kernel of `step` uses, by name; empty where they are not known."""
        return {}

    def capturing(self, stream: Any = None) -> bool:
        """Whether `stream`, or one that the caller may be about to use, is being captured."""
        return False

    def run_on_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], out: np.ndarray, workspace: int, stream: Any
    ) -> None:
        """Call `launch` with buffers (inputs, result, workspace), the inputs being C-contiguous; fill `out`.

        For devices that share the host's memory; for others :mod:`pycuda_conv.execute.pipeline` moves the arrays.
        """
        raise NotImplementedError

    @abstractmethod
    def update_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], outs: Sequence[np.ndarray | None], workspace: int
    ) -> None:
        """Call `launch` with buffers (inputs, outs, workspace), all arrays being C-contiguous.

        The kernels may read `outs` as well as write them. When this returns, `outs` hold what the kernels wrote.
        """
