"""The kernels for people who launch them themselves: their texts, a plan's launches as functions of PyCUDA, and the course's lessons.

The names of files, kernels and defines are no promise: they change with the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pycuda_conv import engines, execute
from pycuda_conv.arguments import integer
from pycuda_conv.arrays import DeviceKind, kind_of, same_kind
from pycuda_conv.background import launches
from pycuda_conv.call import Operands
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.errors import BackendError, ConvArgumentError, brief, did_you_mean
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import contexts, get_device
from pycuda_conv.runtime.base import KERNEL_DIR, KernelLaunch, LibraryCall, kernel_file, kernel_names, source_of
from pycuda_conv.runtime.plain import plain

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan

#: In the places of a norm's vectors.
NO_NORM = 0, 0, 0
#: Where a plan's workspace has to begin.
WORKSPACE_ALIGNMENT = 256


def include_dirs() -> list[str]:
    """The folder of the headers that the kernels' texts include, as ``SourceModule(..., include_dirs=...)`` takes it.

    >>> import os, pycuda_conv as pc
    >>> [os.path.basename(folder) for folder in pc.include_dirs()]
    ['cu']
    """
    return [str(KERNEL_DIR)]


def source(what: Any, problem: ConvProblem | None = None, *, device: Any = None, flat: bool = False, **defines: int) -> str:
    """The CUDA C text of a kernel, for ``pycuda.compiler.SourceModule`` or another compiler of CUDA C.

    Compile it with ``include_dirs=pycuda_conv.include_dirs()``. Texts with tensor cores are for the target that the launch names, such as
    ``arch="sm_90a"``. A compiler older than CUDA 12 needs ``options=["-std=c++17"]``.

    Parameters
    ----------
    what : str, launch or configuration
        A file in ``cu/`` without ``.cu``, whose constants are `defines`; a launch of :attr:`Plan.schedule`, or one that
        :meth:`Plan.kernels` gave; or a configuration of an engine, as ``plan.config``, for `problem`, which it must run in one launch.
    problem : ConvProblem, optional
    device : None, int, str or Device
        Where the configuration would run the problem: see :class:`Plan`.
    flat : bool
        Put the headers into the text. Then it needs no folder of headers, and ``SourceModule`` looks it up in its cache without calling
        nvcc, which it does for a text with an ``#include``.
    **defines : int
        The constants of a file.

    Raises
    ------
    TypeError
        No such thing, or a constant that is no integer.
    ConvArgumentError
        A file that is not there, a configuration that can't run the problem, or one that takes several launches.

    Examples
    --------
    >>> import pycuda_conv as pc
    >>> text = pc.source("direct_tile", DTYPE=32, TILE_P=8, TILE_Q=32, ROWS=4)
    >>> "__global__" in pc.source("direct_tile", flat=True, DTYPE=32) and "#include" not in pc.source("direct_tile", flat=True, DTYPE=32)
    True
    """
    if isinstance(what, str):
        text = _file(what, defines)
    elif defines:
        raise TypeError(f"constants are for a file in cu/, but got {brief(what)} and {', '.join(defines)}")
    elif isinstance(what, Kernel):
        text = what.launch.source()
    elif isinstance(what, KernelLaunch):
        text = what.source()
    elif isinstance(what, engines.Config):
        text = _only_launch(what, problem, device).source()
    else:
        raise TypeError(
            f"what must be the name of a file in cu/, a launch of a plan, or a configuration of an engine, got {brief(what)} of type "
            f"{type(what).__name__}"
        )
    return plain(text, flat)


def _file(name: str, defines: dict[str, Any]) -> str:
    try:
        kernel_file(name)
    except FileNotFoundError:
        files = kernel_names()
        hint = did_you_mean(name, files) or f": {', '.join(files)}"
        raise ConvArgumentError(f"what must be the name of a file in cu/, got {name!r}{hint}") from None
    return source_of(name, {key: integer(key, value) for key, value in defines.items()})


def _only_launch(config: engines.Config, problem: Any, device: Any) -> KernelLaunch:
    if not isinstance(problem, ConvProblem):
        raise TypeError(f"problem must be the ConvProblem that {config} runs, got {brief(problem)}")
    on = get_device(device)
    why = engines.refusal(problem, config, on)
    if why:
        raise ConvArgumentError(f"{config} can't run {problem}: {why}")
    found = launches(engines.schedule(problem, config, on))
    if len(found) != 1:
        names = ", ".join(launch.kernel for launch in found)
        raise ConvArgumentError(f"{config} runs {problem} in {len(found)} launches: {names}; pass one of plan.kernels()")
    return found[0]


# ---- a plan's launches


@dataclass(frozen=True, eq=False)
class Kernel:
    """A launch of a plan, for ``function(*args, grid=grid, block=block, shared=shared, stream=stream)``. Made by :meth:`Plan.kernels`.

    It keeps the arrays and the workspace alive whose addresses are among its arguments.

    Attributes
    ----------
    function : pycuda.driver.Function
        The kernel in the context that was current.
    args : tuple
        The kernel's parameters, in order: tensor maps as ``numpy.void`` of 128 bytes, addresses as ``numpy.uintp``, structs of 64-bit
        integers as ``numpy.void``, and ``numpy.int64``. Before tensor maps come the bytes that align them.
    grid, block : (int, int, int)
    shared : int
        Bytes of dynamic shared memory.
    name : str
        The kernel's name in its text.
    source : str
        The text, for ``SourceModule``: see :func:`pycuda_conv.source`.
    arch : str
        The target that the text is compiled for.
    """

    function: Any
    args: tuple[Any, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    name: str
    arch: str
    launch: KernelLaunch = field(repr=False)
    _kept: Any = field(repr=False)

    @property
    def source(self) -> str:
        return source(self)

    def __call__(self, stream: Any = None) -> None:
        """Launch the kernel on a ``pycuda.driver.Stream``, or on the default one."""
        self.function(*self.args, grid=self.grid, block=self.block, shared=self.shared, stream=stream)


def of_plan(plan: Plan, operands: Operands, out: Any, workspace: Any) -> list[Kernel]:
    """The launches of a plan on arrays, in order: see :meth:`Plan.kernels`."""
    device: Any = plan.device
    if device.backend != "cuda":
        raise BackendError(f"kernels are launched by PyCUDA on a GPU, and this plan is for {device.name}")
    if plan.problem.float_scale:
        raise ConvArgumentError("a plan of a problem with a norm gives no kernels: its operands are those of a module")
    if any(isinstance(launch, LibraryCall) for step in plan.schedule.whole for launch in step):
        raise ConvArgumentError("a plan by a library's transforms has calls between its kernels: plan the problem with algorithm='direct'")
    kind = same_kind(operands, out)
    if not isinstance(kind, DeviceKind) or not all(kind.on_gpu(a) for a in (*operands, out) if a is not None):
        raise TypeError(f"kernels takes arrays in a GPU's memory, but input is a {kind.name} in the host's")
    kind.check_not_recorded(operands)
    operands = kind.imported(operands)
    signatures = kind.signatures(operands)
    assert signatures[0] is not None
    plan = execute.in_context_of(plan, signatures[0])
    execute.check_fit(plan, kind, signatures)
    device = plan.device
    addresses, filter_last = execute.device.addresses_for_kernels(kind, plan, operands, out)
    if plan.empty:
        return []
    if contexts.pycuda_handle() != device.handle:
        raise ConvArgumentError(
            "functions are made in PyCUDA's current context, and that is not the one of the arrays: make theirs current, the primary one "
            "of torch and CuPy by import pycuda.autoprimaryctx"
        )
    kept, scratch = _workspace(plan, kind, operands.input, workspace)
    *sources, result = addresses
    place = scratch + plan.schedule.workspace_bytes if plan.filter_bytes else 0
    input, weight, bias, scale, residual = sources
    buffers = input, weight, bias, result, scratch, place, scale, residual, *NO_NORM
    steps = plan.loaded.filter_last if filter_last else plan.loaded.whole
    assert steps is not None
    return [_kernel(device, launch, buffers, (operands, out, kept)) for launch in device.launches(steps)]


def _workspace(plan: Plan, kind: DeviceKind, like: Any, given: Any) -> tuple[Any, int]:
    """What holds the workspace, and its address."""
    nbytes = plan.workspace_bytes
    if given is None:
        if not nbytes:
            return None, 0
        device: Any = plan.device
        with device.current():
            return kind.workspace(nbytes, like, device)
    if getattr(given, "nbytes", nbytes) < nbytes:
        raise ConvArgumentError(f"workspace must have {nbytes:,} bytes, plan.workspace_bytes, but it has {given.nbytes:,}")
    if hasattr(given, "__int__") and not hasattr(given, "shape"):  # a number, or an allocation of PyCUDA's
        address = int(given)
    else:
        own = kind_of("workspace", given)
        if not isinstance(own, DeviceKind) or not own.on_gpu(given) or not own.contiguous(given):
            raise ConvArgumentError(f"workspace must be an array without gaps in the GPU's memory, or an address, got {brief(given)}")
        address = own.pointer(given)
    if nbytes and (not address or address % WORKSPACE_ALIGNMENT):
        raise ConvArgumentError(f"workspace must start at a multiple of {WORKSPACE_ALIGNMENT} bytes, but its address is {address:#x}")
    return given, address


def _kernel(device: Any, launch: Any, buffers: Sequence[int], kept: Any) -> Kernel:
    """A launch as PyCUDA makes it, in the current context. The module stays loaded for as long as its function is there."""
    driver, step = sys.modules["pycuda.driver"], launch.step
    module = driver.module_from_buffer(device.queue.take(step.source(), step.arch))
    function = module.get_function(step.kernel)
    if step.shared:
        function.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, step.shared)
    args: list[Any] = [np.void(bytes(launch.first))] if launch.first else []  # where the first parameter lies, a tensor map
    args += [np.void(encode(buffers[i] + offset)) for i, offset, encode in launch.maps]
    args += [np.uintp(buffers[i] + offset) for i, offset in launch.places]
    args += [np.void(np.array(struct, np.int64).tobytes()) for struct in step.structs]
    args += [np.int64(number) for number in step.scalars]
    arch = step.arch or device.queue.arch
    return Kernel(function, tuple(args), (step.grid, 1, 1), (step.block, 1, 1), step.shared, step.kernel, arch, step, kept)


# ---- lessons

#: Numbers of images, channels, pixels, filters, taps, and pixels of the result, as lessons take them.
Sizes = kernel_struct("lesson_pixel", "Sizes")


#: The file of a lesson, the threads of a block, and the blocks for its sizes.
LESSONS: dict[str, tuple[int, Callable[[Any], int]]] = {
    "pixel": (256, lambda d: d.n * d.k * ceil(d.p * d.q, 256)),
    "halo": (256, lambda d: d.n * d.k * ceil(d.p, 16) * ceil(d.q, 16)),
    "channels": (128, lambda d: d.n * ceil(d.k, 8) * ceil(d.p * d.q, 128)),
    "product": (256, lambda d: d.n * ceil(d.k, 64) * ceil(d.p * d.q, 64)),
    "tensor_core": (32, lambda d: d.n * ceil(d.k, 16) * ceil(d.p * d.q, 8)),
    "input_gradient": (256, lambda d: d.n * d.c * ceil(d.h * d.w, 256)),
    "filter_gradient": (128, lambda d: d.k * d.c * d.r * d.s),
    "depthwise_columns": (128, lambda d: d.n * ceil(d.q * d.c, 128)),
    "fourier": (128, lambda d: d.n * d.k * ceil(d.q, 257 - d.s)),
}

#: The axes of a lesson's two arrays and of its result. Most take an image and filters.
LAYOUTS = {
    "input_gradient": (("nkpq", "kcrs"), "nchw"),
    "filter_gradient": (("nchw", "nkpq"), "kcrs"),
    "depthwise_columns": (("nhwc", "crs"), "npqc"),
}


@dataclass(frozen=True)
class Lesson:
    """A kernel of the course in plain CUDA C, without this package's headers. Made by :func:`lesson`.

    Attributes
    ----------
    name : str
    source : str
        Its text. It opens with the formula, how threads and blocks are mapped to the work, what it gains, and a question.
    question : str
        The question, and the change of one line that answers it.
    """

    name: str
    source: str

    @property
    def question(self) -> str:
        lines = [line[2:].strip() for line in self.source.splitlines() if line.startswith("//")]
        start = next(i for i, line in enumerate(lines) if line.startswith("Question"))
        return "\n".join(lines[start:])

    def launch(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[KernelLaunch, tuple[int, ...]]:
        """The launch for two arrays of these shapes, and the shape of the result.

        Raises
        ------
        ConvArgumentError
            Shapes that do not belong together, or that the lesson leaves out.
        """
        letters, result = LAYOUTS.get(self.name, (("nchw", "kcrs"), "nkpq"))
        wanted = " and ".join(f"({', '.join(each)})" for each in letters)
        problem = ConvArgumentError(f"the lesson {self.name} takes arrays of shapes {wanted}, got {first} and {second}")
        sizes: dict[str, int] = {}
        for names, shape in zip(letters, (first, second), strict=True):
            if len(names) != len(shape) or any(sizes.setdefault(name, length) != length for name, length in zip(names, shape, strict=True)):
                raise problem
        for pixels, taps, out in ("hrp", "wsq"):  # two of the three are given
            if out not in sizes:
                sizes[out] = sizes[pixels] - sizes[taps] + 1
            elif taps not in sizes:
                sizes[taps] = sizes[pixels] - sizes[out] + 1
            else:
                sizes[pixels] = sizes[out] + sizes[taps] - 1
        size = Sizes(**{"k": sizes["c"], **sizes})
        if min(size) < 1:
            raise problem
        if self.name == "depthwise_columns" and (size.r, size.s) != (3, 3):
            raise ConvArgumentError(f"the lesson depthwise_columns takes filters of 3 x 3, got {size.r} x {size.s}")
        if self.name == "halo" and max(size.r, size.s) > 8:
            raise ConvArgumentError(f"the lesson halo has room for filters of up to 8 x 8, got {size.r} x {size.s}")
        if self.name == "fourier" and not (size.h == size.r == size.c == 1 and size.s <= 128):
            raise ConvArgumentError(
                f"the lesson fourier takes lines of one channel and filters of up to 128 taps, got {first} and {second}"
            )
        block, blocks = LESSONS[self.name]
        launch = KernelLaunch(f"lesson_{self.name}", {}, blocks(size), block, (0, 1, 2), (), arguments=size)
        return launch, tuple(sizes[name] for name in result)

    def __call__(self, first: Any, second: Any, *, device: Any = None) -> np.ndarray:
        """Run the kernel on a GPU.

        Parameters
        ----------
        first, second : array_like
            What the kernel's formula names, as float32: mostly x of shape (n, c, h, w) and w of shape (k, c, r, s).
        device : None, int, str or Device
            A GPU.

        Returns
        -------
        numpy.ndarray
            float32. There is no padding, no stride, no dilation.

        Raises
        ------
        BackendError
            There is no GPU: plain CUDA C is no OpenCL.
        """
        on = get_device(device)
        if on.backend != "cuda":
            raise BackendError(f"lessons are plain CUDA C and need an NVIDIA GPU; {on.name} runs OpenCL")
        arrays = [np.ascontiguousarray(array, np.float32) for array in (first, second)]
        step, shape = self.launch(arrays[0].shape, arrays[1].shape)
        out = np.full(shape, np.nan, np.float32)
        on.update_host_arrays(on.launcher(step), arrays, [out], 0)
        return out


def lesson(name: str) -> Lesson:
    """A kernel of the course: 20 to 50 lines of plain CUDA C, with one idea and one question.

    Parameters
    ----------
    name : str
        ``"pixel"``, ``"halo"``, ``"channels"``, ``"product"``, ``"tensor_core"``, ``"input_gradient"``, ``"filter_gradient"``,
        ``"depthwise_columns"`` or ``"fourier"``: a file in ``cu/lesson``.

    Raises
    ------
    ConvArgumentError
        There is no such lesson.

    Examples
    --------
    >>> import pycuda_conv as pc
    >>> print(pc.lesson("halo").question)
    Question  Threads load values that other threads use. What may a thread read if it does not wait for them?
    Try       __syncthreads();  // all is there  ->
    """
    if name not in LESSONS:
        hint = did_you_mean(name, list(LESSONS)) if isinstance(name, str) else ""
        raise ConvArgumentError(f"name must be a lesson of the course, got {brief(name)}{hint or ': ' + ', '.join(LESSONS)}")
    return Lesson(name, source_of(f"lesson_{name}", {}))
