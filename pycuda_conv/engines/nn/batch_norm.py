"""Batch normalisation behind a convolution, with a residual and an activation, and sums over channels: launches of ``cu/nn/batch_norm.cu``.

These are no convolutions and have no plans. Each function here makes the launches for one purpose, for buffers in the order
that its docstring lists; :func:`compiled` compiles and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pycuda_conv.arguments import activation_and_slope
from pycuda_conv.engines.geometry import bits, ceil, divider
from pycuda_conv.engines.schedule import Moments
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import FLAG, VariantSet, portable
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, Launcher

#: None, or the form that :func:`pycuda_conv.arguments.checked_activation` returns.
Activation = str | tuple[str, float] | None

HALVES = "float16", "bfloat16"
THREADS = 128
MOST_VARIANTS = {"cuda": 73, "opencl": 24}  # texts, as an engine says it
#: Threads of a block that adds slices, or works on per-channel values. Each thread adds few, one after the other.
ADDING_THREADS = 1024
#: Slices that such a thread adds, if there are enough of them; and the fewest and most threads that share the slices of a column.
ADDED, LANES = 8, (32, 512)
#: Where a convolution noted so many slices, the blocks of a cluster share them, and a block's threads read so many channels side by side.
MANY_SLICES, CLUSTER, BESIDE = 2048, 8, 8
#: Blocks of an array for each multiprocessor. With channels last they are as many as run at once, by the threads' registers; where threads
#: need more, fewer. One block more would run when all others have ended.
BLOCKS, FEWER_BLOCKS = {"NCHW": 16, "NHWC": 6}, {"NCHW": 16, "NHWC": 5}
#: Items of an NCHW channel up to which one block takes all of it, so that a pass is one launch. On an H100 that takes 0.4 to 0.9 of the
#: time of two or three launches, for up to 1568 items of 16 to 2048 channels, and for 3136 items of 128 channels and more. With fewer
#: channels the limit is half of that: with 3136 items of 8 channels a backward pass takes 1.5 times as long.
MOST_WHOLE, MANY_CHANNELS = 3200, 128


@dataclass(frozen=True)
class Pixels:
    """An array of `N` images of `K` channels of `plane` pixels, none of which is 0, without gaps in its layout."""

    dtype: str
    layout: str  # NCHW or NHWC
    N: int
    K: int
    plane: int

    @property
    def channels_last(self) -> bool:
        """Whether a pixel's channels are neighbours."""
        return self.layout == "NHWC" or self.plane == 1

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum, and of every other per-channel value."""
        return 8 if self.dtype == "float64" else 4

    @property
    def items(self) -> int:
        """The number of items, each of which a thread loads at once."""
        return self.N * self.K * self.plane // self.item

    @property
    def item(self) -> int:
        """Elements of an item: neighbours of a plane, or channels of a pixel."""
        neighbours = self.K if self.channels_last else self.plane
        widest = 8 if self.dtype in HALVES else 4  # loads of 16 bytes; of 32 in float64
        return next(width for width in (widest, 4, 1) if neighbours % width == 0)

    @property
    def whole(self) -> bool:
        """Whether one block takes all of a channel, so that a pass is one launch: of :func:`statistics`, :func:`whole_forward` and
        :func:`backward`."""
        most = MOST_WHOLE if self.K >= MANY_CHANNELS else MOST_WHOLE // 2
        return not self.channels_last and self.N * self.plane <= most * self.item and not _index_64(self)


BatchNormShape = kernel_struct("batch_norm", "BatchNormShape")


@dataclass(frozen=True)
class _Cut:
    """How the kernels step through an array: the counts of the struct ``BatchNormShape`` in ``cu/nn/batch_norm.cu``."""

    pixels: Pixels
    vector: int
    tiles: int
    total: int
    per: int

    @classmethod
    def of_channels(cls, pixels: Pixels) -> _Cut:
        """One block for each channel, in NCHW."""
        vector = pixels.item
        total = pixels.N * pixels.plane // vector
        return cls(pixels, vector, pixels.K, total, total)

    @classmethod
    def of(cls, pixels: Pixels, multiprocessors: int, each: dict[str, int] = BLOCKS) -> _Cut:
        """About so many blocks for `each` multiprocessor, by the layout."""
        vector = pixels.item
        if pixels.channels_last:
            columns = pixels.K // vector
            tiles = -(-columns // 32)
            down = THREADS // -(-columns // tiles)
            total = pixels.N * pixels.plane
        else:
            tiles, down, total = pixels.K, THREADS, pixels.N * pixels.plane // vector
        # enough blocks for the GPU, each with at least one item for every thread; with channels last, where all run at once, none beyond
        blocks = each["NHWC" if pixels.channels_last else "NCHW"] * multiprocessors
        slices = min(max(blocks // tiles, 1) if pixels.channels_last else -(-blocks // tiles), -(-total // down))
        return cls(pixels, vector, tiles, total, -(-total // slices))

    @property
    def slices(self) -> int:
        return -(-self.total // self.per)

    @property
    def values(self) -> int:
        """Values of one channel in an item."""
        return 1 if self.pixels.channels_last else self.vector

    def step(self, kernel: str, buffers: tuple[int, ...], *scalars: int, residual: bool = False, beyond_relu: bool = False) -> KernelLaunch:
        """A launch that reads the array."""
        pixels, columns = self.pixels, self.pixels.K // (self.vector if self.pixels.channels_last else 1)
        across = -(-columns // self.tiles)
        plane_items = pixels.plane // (1 if pixels.channels_last else self.vector)
        shape = BatchNormShape(
            pixels.K, pixels.plane, self.total, self.per, columns, self.tiles, divider(self.tiles), across, divider(across),
            plane_items, divider(plane_items) if self.total < 2**31 - 2**20 else 0,
        )  # fmt: skip
        defines = portable(pixels.dtype, _index_64(pixels), THREADS) | {
            "NHWC": int(pixels.channels_last), "VEC": self.vector, "HAS_RESIDUAL": int(residual), "BEYOND_RELU": int(beyond_relu),
        }  # fmt: skip
        return KernelLaunch(kernel, defines, self.tiles * self.slices, THREADS, buffers, scalars, "batch_norm", arguments=shape)

    def activating_step(
        self, kernel: str, buffers: tuple[int, ...], activation: Activation, *scalars: int, residual: bool = False
    ) -> KernelLaunch:
        """A launch that reads the array, and applies the activation or its derivative."""
        number, slope = activation_and_slope(activation)
        args, beyond_relu = (number, bits(slope, self.pixels.sum_bytes)), activation not in (None, "relu")
        return self.step(kernel, buffers, *args, *scalars, residual=residual, beyond_relu=beyond_relu)

    def adding_step(
        self, kernel: str, columns: int, slices: int, buffers: tuple[BufferSlice, ...], *scalars: int, with_moments: bool = False
    ) -> KernelLaunch:
        """A launch that adds the slices of each column."""
        shared = with_moments and slices >= MANY_SLICES
        wanted = 1 << (ceil(slices, ADDED) - 1).bit_length()
        beside = BESIDE if shared else ADDING_THREADS // min(max(wanted, LANES[0]), LANES[1])
        cluster = CLUSTER if shared else 1
        defines = portable(self.pixels.dtype, _index_64(self.pixels), ADDING_THREADS)
        defines |= {"WITH_MOMENTS": int(with_moments), "CLUSTER": cluster}
        return KernelLaunch(kernel, defines, ceil(columns, beside) * cluster, ADDING_THREADS, buffers, (*scalars, beside), "batch_norm")


def _index_64(pixels: Pixels) -> bool:
    # offsets are formed a little past the end of a slice before they are checked
    return pixels.N * pixels.K * pixels.plane + 2**20 >= 2**31


def variants(device: Device) -> Iterator[VariantSet]:
    """A text of batch_norm.cu for each type and each way to read arrays, and some for per-channel values."""
    common = {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG}
    of_halves = {"DTYPE": tuple(DTYPE_CODES[dtype] for dtype in HALVES)}
    for flags in _finishes(device):
        arrays = {"THREADS": (THREADS,), "NHWC": FLAG, **flags}
        yield VariantSet("batch_norm", common | arrays | {"VEC": (1, 4)})
        yield VariantSet("batch_norm", common | arrays | of_halves | {"VEC": (8,)})
    adding = common | {"THREADS": (ADDING_THREADS,)}
    yield VariantSet("batch_norm", adding | {"WITH_MOMENTS": (0,), "CLUSTER": (1,)})
    if device.backend == "cuda" and device.capability >= (9, 0):  # whose tensor-core kernels note moments
        of_tensor_cores = {"DTYPE": (*of_halves["DTYPE"], DTYPE_CODES["float32"])}
        yield VariantSet("batch_norm", adding | of_tensor_cores | {"WITH_MOMENTS": (1,), "CLUSTER": (1, CLUSTER)})


def _finishes(device: Device) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The values of the defines that say whether there is a residual, and which activation."""
    if device.backend != "cuda":
        return ({},)
    return {"HAS_RESIDUAL": FLAG, "BEYOND_RELU": (0,)}, {"HAS_RESIDUAL": (0,), "BEYOND_RELU": (1,)}


def for_device(steps: Sequence[KernelLaunch], device: Device) -> list[KernelLaunch]:
    """The launches as `device` compiles them: OpenCL's texts take the residual and the activation as arguments instead of defines."""
    if device.backend == "cuda":
        return list(steps)
    asked = "HAS_RESIDUAL", "BEYOND_RELU"
    return [replace(step, defines={name: value for name, value in step.defines.items() if name not in asked}) for step in steps]


#: Makes, for an array and a number of multiprocessors, launches that follow one another, and the bytes of workspace that they need.
Maker = Callable[..., tuple[Sequence[KernelLaunch], int]]


def statistics(
    pixels: Pixels, multiprocessors: int, eps: float, momentum: float, moments: Moments | None = None
) -> tuple[Sequence[KernelLaunch], int]:
    """The mean and 1 / sqrt(variance + eps) of each channel.

    Buffers: y, num_batches_tracked or None | mean, invstd, running_mean or None, running_var or None, num_batches_tracked or None |
    workspace. Running statistics move by `momentum` towards this batch's; or, if the first `num_batches_tracked` (int64, this batch
    counted) is given, they are the mean over batches. The second one is raised by 1. Per-channel values have the type of sums:
    float64 for float64, else float32.
    With `moments` the workspace is the convolution's, which holds them, and y is not read.
    """
    last = bits(eps, pixels.sum_bytes), bits(momentum, pixels.sum_bytes)
    if moments is None and pixels.whole:
        return (_Cut.of_channels(pixels).step("batch_norm_whole_statistics", tuple(range(7)), *last),), 0
    cut = _Cut.of(pixels, multiprocessors)
    apart = 1 if pixels.channels_last else pixels.plane
    if moments is not None:
        places = (0, (7, moments.parts), 1, 2, 3, 4, 5, 6, (7, moments.redone))
        as_it_lies = pixels.N, pixels.plane, pixels.K * pixels.plane, pixels.K if pixels.channels_last else 1
        slices = moments.sets * ceil(moments.span, moments.per)
        sizes = moments.blocks, moments.sets, *as_it_lies, moments.span, moments.per, pixels.K, 1, apart, *last
        return (cut.adding_step("batch_norm_statistics", pixels.K, slices, places, *sizes, with_moments=True),), 0
    cut = _Cut.of(pixels, multiprocessors, FEWER_BLOCKS if cut.vector == 8 else BLOCKS)
    scalars = cut.total, cut.per, pixels.K, cut.values, apart, *last
    add = cut.adding_step("batch_norm_statistics", pixels.K, cut.slices, (0, 7, 1, 2, 3, 4, 5, 6), *scalars)
    return (cut.step("channel_moments", (0, 7)), add), 2 * cut.slices * pixels.K * pixels.sum_bytes


def takes(activation: Activation, residual: bool) -> bool:
    """Whether :func:`forward` and :func:`backward` can do this. With a residual the activation's derivative has to be a mask, as ReLU's."""
    return not residual or activation in (None, "relu")


def forward(
    pixels: Pixels, multiprocessors: int, activation: Activation, residual: bool = False
) -> tuple[Sequence[KernelLaunch], int]:
    """The normalised y, plus a residual if `residual` is set, and the activation.

    Buffers: y, mean, invstd, gamma or None, beta or None, residual or None | out, mask or None. With a residual, the mask gets where out is
    above 0: :attr:`Pixels.items` bytes, of each item's values a bit.
    """
    cut = _Cut.of(pixels, multiprocessors)
    return (cut.activating_step("batch_norm_forward", tuple(range(8)), activation, residual=residual),), 0


def whole_forward(
    pixels: Pixels, multiprocessors: int, eps: float, momentum: float, activation: Activation, residual: bool = False
) -> tuple[Sequence[KernelLaunch], int]:
    """:func:`statistics` and :func:`forward` in one launch, for pixels that are :attr:`Pixels.whole`.

    Buffers: y, num_batches_tracked or None, gamma or None, beta or None, residual or None | mean, invstd, running_mean or None,
    running_var or None, num_batches_tracked or None, out, mask or None.
    """
    cut, args = _Cut.of_channels(pixels), (bits(eps, pixels.sum_bytes), bits(momentum, pixels.sum_bytes))
    places = (0, 1, 5, 6, 7, 8, 9, 2, 3, 4, 10, 11)
    return (cut.activating_step("batch_norm_whole_forward", places, activation, *args, residual=residual),), 0


def backward(
    pixels: Pixels, multiprocessors: int, activation: Activation, of_batch: bool, residual: bool = False
) -> tuple[Sequence[KernelLaunch], int]:
    """The gradients of :func:`forward`; `of_batch` if mean and invstd are those of y itself, not given ones.

    Buffers: y, dout, mean, invstd, gamma or None, beta or None, mask or None | dy, sums, masked or None | workspace. `sums` are 2 K: beta's
    gradient, then gamma's. With a residual and ReLU there is the mask of :func:`forward`, and `masked` is the residual's gradient: dout
    where the mask says so. Without ReLU the residual's gradient is dout itself, and neither array exists.
    """
    summed = residual and activation is not None
    if pixels.whole:
        places = (0, 1, 2, 3, 4, 5, 6, 9, 8, 7)
        whole = _Cut.of_channels(pixels)
        return (whole.activating_step("batch_norm_whole_backward", places, activation, int(of_batch), residual=summed),), 0
    cut = _Cut.of(pixels, multiprocessors, BLOCKS if activation in (None, "relu") else FEWER_BLOCKS)
    given, plain = (9, None) if summed else (1, activation)  # what the last launch reads instead of dout is already masked
    steps = (
        cut.activating_step("gradient_sums", (0, 1, 2, 3, 4, 5, 6, 9, 10), activation, residual=summed),
        cut.adding_step("add_slices", 2 * pixels.K, cut.slices, (10, 8), 2 * pixels.K, cut.slices, 0),
        cut.activating_step("batch_norm_backward", (0, given, 2, 3, 4, 5, 8, 7), plain, int(of_batch)),
    )
    return steps, 2 * cut.slices * pixels.K * pixels.sum_bytes


def channel_sums(pixels: Pixels, multiprocessors: int) -> tuple[Sequence[KernelLaunch], int]:
    """The sum of each channel, in the array's dtype. Buffers: the array | sums | workspace."""
    cut = _Cut.of(pixels, multiprocessors)
    add = cut.adding_step("add_slices", pixels.K, cut.slices, (2, 1), pixels.K, cut.slices, 1)
    return (cut.step("channel_sums", (0, 2)), add), cut.slices * pixels.K * pixels.sum_bytes


@lru_cache(maxsize=1024)
def compiled(maker: Maker, pixels: Pixels, device: Device, *options: Any) -> tuple[Launcher, int]:
    """The launches of `maker` as one, compiled for `device`, and the bytes of workspace that they need."""
    steps, workspace = maker(pixels, device.multiprocessors, *options)
    return device.schedule_launcher([[step] for step in for_device(steps, device)]), workspace
