"""Group, instance, layer and RMS norms with an activation behind them: launches of ``cu/nn/norm_*.cu``. These are no convolutions.

A norm takes one of four forms. `SMALL` and `ROWS` are one launch with all numbers in registers; `PLANES` and `SLICED_ROWS` are one for
the moments of slices, a small one that combines them, and one that applies them. How an image is cut into slices depends on its own sizes
alone, so a batch's size changes no bit of its statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pycuda_conv.arguments import ACTIVATIONS
from pycuda_conv.engines.geometry import bits, ceil, divider
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, Launcher

TYPES = ("float32", "float16", "bfloat16")
#: What may stand behind a norm.
ACTIVATED = (None, "relu", "silu", "gelu", "gelu_tanh")
THREADS = 256
MOST_VARIANTS = {"cuda": 104}  # texts, as an engine says it
MOST_COLUMNS = 32  # of VEC channels, of a block
VECTOR_BYTES = 16
TURNS = 1, 8  # that a block of `PLANES` makes: the fewest, and the most where an array is cut to be summed
#: Blocks for each multiprocessor into which an image is cut, and into which arrays are cut to be applied.
IMAGE_BLOCKS, APPLY_BLOCKS = 4, 8
LAYER_BLOCKS = 2  # for each multiprocessor, of the gradient of rows
#: Most blocks of a cluster in the gradient of `SMALL` where a thread reads fewer than 16 bytes: 128 channels of 64x64 in 32 groups take
#: 17.6 us by clusters of eight and 14.6 in three launches (H200).
NARROW_CLUSTER = 4
APPLY_TURNS = 1, 64
#: Threads of a block that combines parts: as many as have so many parts each.
FINISH_THREADS, PARTS = (128, 256, 512, 1024), 8
#: Neighbours of a pixel that a block of `SMALL` reads, in bytes.
LEAST_BYTES = 32


#: Blocks of a cluster; on GPUs before Hopper one.
CLUSTERS = (1, 2, 4, 8)
#: Bytes that a thread reads at once below which `SMALL` takes no larger image than this.
NARROW, MOST_NARROW = 8, 64 << 10
#: Most bytes that :data:`THREADS` of `SMALL` keep in shared memory, and how many a cluster of more blocks should leave to so many.
MOST_BYTES, ENOUGH_BYTES = 32 << 10, 16 << 10
#: Threads of a block of `SMALL`. Blocks of clusters begin one after the other, 19 ns each (H200), so there should be few.
SMALL_THREADS = 1024, 256
#: Items of a thread that has a part of a row, threads of a block for longer rows, and blocks of a multiprocessor that take all rows.
ROW_ITEMS, LONG_THREADS, ROW_BLOCKS = 4, 1024, 6
STAGED = 4096  # the most numbers of a row whose parameters are kept in shared memory

SMALL, ROWS, PLANES, SLICED_ROWS = "small", "rows", "planes", "sliced rows"

NormShape = kernel_struct("norm.cuh", "NormShape")


@dataclass(frozen=True)
class Norm:
    """A norm of an array of `N` images of `C` channels of `P` pixels, in `groups` of channels each.

    A layer or RMS norm over the last axes is one of `N` rows of one pixel and one group.
    """

    dtype: str
    layout: str  # NCHW or NHWC
    N: int
    C: int
    P: int
    groups: int
    eps: float = 1e-5
    rms: int = 0  # whether the mean counts as 0; with 2, `eps` is the least mean square, and not added to it
    activation: str | None = None  # one of :data:`ACTIVATED`
    wide: tuple[bool, bool] = (False, False)  # whether gamma and beta are float32, whatever the arrays are

    @property
    def in_rows(self) -> bool:
        """Whether a group's numbers are neighbours."""
        return self.layout == "NCHW" or self.P == 1

    @property
    def each(self) -> int:
        """Channels of a group."""
        return self.C // self.groups

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def fits(self) -> bool:
        """Whether the kernels can run it."""
        if self.dtype not in TYPES or self.activation not in ACTIVATED or min(self.N, self.C, self.P, self.groups) < 1:
            return False
        if self.C % self.groups:
            return False
        return self.C * self.P < 2**31 - 2**20 and self.N * max(self.groups, self.C if not self.in_rows else 1) < 2**31 - 2**20


@dataclass(frozen=True)
class Small:
    """How one launch takes small planes: neighbours of a thread, columns and threads of a block, blocks of a cluster, bytes of a block."""

    vector: int
    across: int
    threads: int
    cluster: int
    nbytes: int

    @property
    def width(self) -> int:
        return _power(self.across)


def vector_of(neighbours: int, itemsize: int) -> int:
    """The numbers that a thread reads at once, of a multiple of so many neighbours: 16 bytes, or 8, or one."""
    most = VECTOR_BYTES // itemsize
    return next(n for n in (most, most // 2, 1) if n != 2 and neighbours % n == 0)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=1024)
def small_of(norm: Norm, clusters: tuple[int, ...] = CLUSTERS, sizes: tuple[int, ...] = (THREADS,)) -> Small | None:
    """How one launch takes a norm with the channels last, by blocks of one of some `sizes`, the largest first; None if it does not fit."""
    vector = vector_of(norm.each, norm.itemsize)
    own = norm.each // vector
    if norm.in_rows or own > MOST_COLUMNS:
        return None
    if vector * norm.itemsize < NARROW and norm.C * norm.P * norm.itemsize > MOST_NARROW:
        return None
    across = own
    for count in range(1, norm.groups + 1):  # whole groups, at least so many bytes
        if norm.groups % count == 0 and count * own <= MOST_COLUMNS:
            across = count * own
            if across * vector * norm.itemsize >= LEAST_BYTES:
                break
    width = _power(across)

    def kept(cluster: int, threads: int) -> int:
        return ceil(ceil(norm.P, cluster), threads // width) * threads * vector * norm.itemsize

    def enough(threads: int) -> int:
        return next((n for n in clusters[::-1] if kept(n, threads) >= ENOUGH_BYTES * threads // THREADS), 0)

    if kept(enough(THREADS) or 1, THREADS) > MOST_BYTES:
        return None
    threads = next((n for n in sizes if enough(n)), THREADS)
    cluster = enough(threads) or 1
    return Small(vector, across, threads, cluster, kept(cluster, threads))


@dataclass(frozen=True)
class Cut:
    """How launches step through an array, as the struct ``NormShape`` in ``cu/nn/norm.cuh`` has it."""

    norm: Norm
    vector: int
    across: int
    tiles: int
    slices: int
    per: int

    @classmethod
    def of_planes(cls, norm: Norm, blocks: int, turns: tuple[int, int] = TURNS, images: int = 1) -> Cut:
        """Pixels of `images` images together cut into about so many blocks, each of which makes some turns."""
        vector = vector_of(norm.C, norm.itemsize)
        columns = norm.C // vector
        widths = [n for n in (32, 16, 8) if n <= _power(columns)] or [_power(columns)]
        across = min(widths, key=lambda n: ceil(columns, n) * n)  # with the fewest idle threads; each reads 128 bytes or more
        tiles = ceil(columns, across)
        turn = (THREADS // _power(across)) * (8 if vector * norm.itemsize < VECTOR_BYTES else 4)
        count = ceil(norm.P * images * tiles, turn * blocks)
        per = turn * min(max(count, turns[0]), turns[1])
        return cls(norm, vector, across, tiles, ceil(norm.P, per), per)

    @classmethod
    def of_rows(cls, norm: Norm, blocks: int, turns: tuple[int, int] = TURNS, rows: int = 1) -> Cut:
        """A row, or all of them, cut likewise."""
        length = norm.each * norm.P
        vector = vector_of(length, norm.itemsize)
        turn = THREADS * vector * (8 if vector * norm.itemsize < VECTOR_BYTES else 4)
        per = turn * min(max(ceil(length * rows, turn * blocks), turns[0]), turns[1])
        return cls(norm, vector, 1, 1, ceil(length, per), per)

    @classmethod
    def of_small(cls, norm: Norm, small: Small) -> Cut:
        tiles = norm.C // small.vector // small.across
        return cls(norm, small.vector, small.across, tiles, small.cluster, ceil(norm.P, small.cluster))

    def shape(self, **given: int) -> tuple[int, ...]:
        """The struct; `given` are members that differ."""
        norm = self.norm
        values = {
            "images": norm.N, "pixels": norm.P, "channels": norm.C, "groups": norm.groups, "each": norm.each,
            "columns": norm.C // self.vector, "across": self.across, "width": _power(self.across), "tiles": self.tiles,
            "slices": self.slices, "per": self.per, "plane": norm.P, "eps": bits(norm.eps, 4), "rms": int(norm.rms),
            "wide": norm.wide[0] + 2 * norm.wide[1], "activation": ACTIVATIONS.index(norm.activation),
        } | given  # fmt: skip
        values |= {f"by_{name}": divider(values[name]) for name in ("groups", "each", "tiles", "slices", "plane", "channels")}
        made: tuple[int, ...] = NormShape(**values)
        return made

    def shape_of_rows(self) -> tuple[int, ...]:
        norm = self.norm
        return self.shape(images=norm.N * norm.groups, pixels=norm.each * norm.P, channels=norm.each)

    def launch(
        self, kernel: str, file: str, grid: int, buffers: tuple[BufferSlice, ...], *, shape: tuple[int, ...] | None = None
    ) -> KernelLaunch:
        """A launch of blocks of :data:`THREADS` threads."""
        arguments = self.shape() if shape is None else shape
        return KernelLaunch(kernel, self.defines(), grid, THREADS, buffers, (), file, arguments=arguments)

    def finish(self, groups: int, shape: tuple[int, ...], parts: int, place: BufferSlice = 6, noted: bool = False) -> KernelLaunch:
        """The launch that combines so many parts of each group: the moments of an own pass, or those that a convolution noted."""
        threads = next((n for n in FINISH_THREADS if n * PARTS >= parts), FINISH_THREADS[-1])
        buffers = 0, place, 5, 3
        return KernelLaunch("norm_finish", self.defines(), groups, threads, buffers, (int(noted),), "norm_planes", arguments=shape)

    def defines(self, threads: int = THREADS) -> dict[str, int]:
        return {"TYPE": DTYPE_CODES[self.norm.dtype], "VEC": self.vector, "THREADS": threads}


def form_of(norm: Norm, clusters: tuple[int, ...] = CLUSTERS) -> str:
    """The form in which a norm is computed: by one image's sizes alone."""
    if norm.in_rows:
        return ROWS if rows_of(norm) else SLICED_ROWS
    return SMALL if small_of(norm, clusters) else PLANES


@lru_cache(maxsize=1024)
def rows_of(norm: Norm) -> tuple[int, int] | None:
    """Neighbours that a thread reads and threads of a row, if a row is taken by one block; else None."""
    length = norm.each * norm.P
    vector = vector_of(length, norm.itemsize)
    count = length // vector
    threads = _power(ceil(count, ROW_ITEMS))
    if threads > THREADS:
        threads = LONG_THREADS
    return (vector, threads) if count <= ROW_ITEMS * threads else None


def forward(norm: Norm, multiprocessors: int, form: str = "", clusters: tuple[int, ...] = CLUSTERS) -> tuple[list[KernelLaunch], int]:
    """The launches of a norm, and the bytes of workspace that they need.

    Buffers: x, gamma or None, beta or None, added or None | out, stats or None | workspace. What is added is (N, C), of the arrays' type,
    where the channels are last. Stats are mean and 1 / sqrt(variance + eps) of each group,
    float32, (N, groups, 2); `PLANES` and `SLICED_ROWS` need them.
    """
    form = form or form_of(norm, clusters)
    of_rows, of_planes = (0, 1, 2, 4, 5), (0, 1, 2, 3, 4, 5)
    if form == SMALL:
        small = small_of(norm, clusters, SMALL_THREADS)
        assert small is not None
        cut, threads = Cut.of_small(norm, small), small.threads
        defines, grid = cut.defines(threads) | {"CLUSTER": small.cluster}, norm.N * cut.tiles * small.cluster
        return [KernelLaunch("norm_small", defines, grid, threads, of_planes, (), shared=small.nbytes, arguments=cut.shape())], 0
    if form == ROWS:
        found = rows_of(norm)
        assert found is not None
        vector, width = found
        cut, threads = Cut(norm, vector, width, 1, 1, 1), max(THREADS, width)
        grid = min(ceil(norm.N * norm.groups, threads // width), ROW_BLOCKS * multiprocessors)
        alike = norm.P == 1 and norm.groups == 1 and norm.C <= STAGED  # all rows have the same parameters
        shape, kept = cut.shape_of_rows(), 2 * 4 * norm.C if alike else 0
        return [KernelLaunch("norm_rows", cut.defines(threads), grid, threads, of_rows, (), shared=kept, arguments=shape)], 0
    rows = norm.N * norm.groups
    if form == PLANES:
        cut, applied = _cuts_of_planes(norm, multiprocessors)
        moments = cut.launch("norm_planes_moments", "norm_planes", norm.N * cut.slices * cut.tiles, (0, 3, 6))
        finish = cut.finish(rows, cut.shape(), cut.slices * norm.each)
        apply = applied.launch("norm_planes_apply", "norm_planes", norm.N * applied.slices * applied.tiles, (0, 5, 1, 2, 3, 4))
        return [moments, finish, apply], norm.N * cut.slices * 2 * norm.C * 4
    cut = Cut.of_rows(norm, IMAGE_BLOCKS * multiprocessors)
    applied = Cut.of_rows(norm, APPLY_BLOCKS * multiprocessors, APPLY_TURNS, rows)
    one_each = cut.shape(images=rows, pixels=norm.each * norm.P, channels=1, groups=1, each=1)
    moments = cut.launch("norm_rows_moments", "norm_rows", rows * cut.slices, (0, 6), shape=cut.shape_of_rows())
    finish = cut.finish(rows, one_each, cut.slices)
    apply = applied.launch(
        "norm_rows_apply", "norm_rows", rows * applied.slices, (0, 5, 1, 2, 4), shape=applied.shape_of_rows()
    )
    return [moments, finish, apply], rows * cut.slices * 2 * 4


def after_moments(norm: Norm, multiprocessors: int, per: int, place: BufferSlice) -> list[KernelLaunch]:
    """The launches behind a convolution that noted the moments of its result, in parts of `per` pixels at `place`; as those of `PLANES`."""
    _, applied = _cuts_of_planes(norm, multiprocessors)
    cut = replace(applied, slices=norm.P // per, per=per)
    finish = cut.finish(norm.N * norm.groups, cut.shape(), cut.slices * norm.each, place, True)
    blocks = norm.N * applied.slices * applied.tiles
    return [finish, applied.launch("norm_planes_apply", "norm_planes", blocks, (0, 5, 1, 2, 3, 4))]


def _cuts_of_planes(norm: Norm, multiprocessors: int) -> tuple[Cut, Cut]:
    """How an array with the channels last is cut to be summed, image by image, and to be applied."""
    return (
        Cut.of_planes(norm, IMAGE_BLOCKS * multiprocessors),
        Cut.of_planes(norm, APPLY_BLOCKS * multiprocessors, APPLY_TURNS, norm.N),
    )


def gradient_fits(norm: Norm) -> bool:
    """Whether the kernels compute the gradients: of planes, and of rows that are one group each and fit a block."""
    return norm.rms != 2 and (norm.P > 1 or (norm.groups == 1 and _layer_of(norm) is not None))


def adds_more(norm: Norm) -> bool:
    """Whether the gradient of x is added to another one by the launch that computes it."""
    return norm.P > 1


def _layer_of(norm: Norm) -> tuple[int, int] | None:
    """Neighbours that a thread reads and threads of a row in the gradient of rows."""
    vector = vector_of(norm.C, norm.itemsize)
    threads = _power(ceil(norm.C // vector, 2 if vector == 8 else 4))
    return (vector, threads) if threads <= THREADS else None


def backward(norm: Norm, multiprocessors: int, form: str = "", clusters: tuple[int, ...] = CLUSTERS) -> tuple[list[KernelLaunch], int]:
    """The launches of a norm's gradients, and the bytes of workspace that they need.

    Buffers: x, dout, stats, gamma or None, beta or None, more or None | dx, gamma's gradient or None, beta's or None | workspace. The
    gradients of parameters are float32 where these are. `more` is added to dx, but where :func:`adds_more` says no.
    """
    file, small = "norm_gradients", small_of(norm, clusters)
    narrow = small is not None and small.cluster > NARROW_CLUSTER and small.vector * norm.itemsize < VECTOR_BYTES
    if (form or (SMALL if small and not narrow else PLANES)) == SMALL:
        assert small is not None
        cut, sets = Cut.of_small(norm, small), norm.N * small.cluster
        defines, grid = cut.defines() | {"CLUSTER": small.cluster}, sets * cut.tiles
        of_arrays, kept = (0, 1, 2, 3, 4, 5, 6, 9), 2 * small.nbytes
        dx = KernelLaunch(
            "norm_small_dx", defines, grid, THREADS, of_arrays, (), "norm_small_gradients", shared=kept, arguments=cut.shape()
        )
        parameters = cut.launch("norm_parameters", file, ceil(norm.C, THREADS // 4), (9, 7, 8), shape=cut.shape(images=sets))
        return [dx, parameters], sets * 2 * norm.C * 4
    if norm.P == 1:
        found = _layer_of(norm)
        assert found is not None
        vector, width = found
        cut = Cut(norm, vector, width, 1, 1, 1)
        grid = min(ceil(norm.N, THREADS // width), LAYER_BLOCKS * multiprocessors)
        shape = cut.shape(images=norm.N, pixels=norm.C)
        dx = cut.launch("norm_layer_dx", file, grid, (0, 1, 2, 3, 4, 6, 9), shape=shape)
        of_blocks = cut.shape(images=grid)
        parameters = cut.launch("norm_parameters", file, ceil(norm.C, THREADS // 4), (9, 7, 8), shape=of_blocks)
        return [dx, parameters], grid * 2 * norm.C * 4
    if norm.in_rows:  # a block has a slice of one channel's plane
        vector = vector_of(norm.P, norm.itemsize)
        turn = THREADS * vector
        per = turn * ceil(norm.P, turn * ceil(norm.P, turn * TURNS[1]))
        cut = applied = Cut(norm, vector, 1, 1, ceil(norm.P, per), per)
        kernels, grids = ("norm_image_sums", "norm_image_dx"), [norm.N * norm.C * cut.slices] * 2
    else:
        cut, applied = _cuts_of_planes(norm, multiprocessors)
        kernels, grids = ("norm_planes_sums", "norm_planes_dx"), [norm.N * one.slices * one.tiles for one in (cut, applied)]
    parts, sums = norm.N * cut.slices * 2 * norm.C * 4, norm.N * 2 * norm.C * 4
    at_sums, at_folded, first = (9, parts), (9, parts + sums), ceil(norm.C, THREADS // 4)
    dx = applied.launch(kernels[1], file, first + grids[1], (0, 1, 2, at_folded, 3, 4, 5, at_sums, 6, 7, 8))
    return [
        cut.launch(kernels[0], file, grids[0], (0, 1, 2, 3, 4, 9)),
        cut.launch("norm_fold", file, norm.N * norm.groups, (9, 3, at_sums, at_folded)),
        replace(dx, scalars=(first,)),
    ], parts + sums + norm.N * norm.groups * 8


def _clusters(device: Device) -> tuple[int, ...]:
    return CLUSTERS if device.capability >= (9, 0) else (1,)


def is_whole(norm: Norm, device: Device) -> bool:
    """Whether the norm is one launch, which needs no stats."""
    return form_of(norm, _clusters(device)) in (SMALL, ROWS)


def steps_for(norm: Norm, device: Device, form: str = "", gradient: bool = False) -> tuple[list[KernelLaunch], int]:
    """The launches for `device` of a norm, or of its gradients."""
    if gradient:
        return backward(norm, device.multiprocessors, form, _clusters(device))
    return forward(norm, device.multiprocessors, form, _clusters(device))


@lru_cache(maxsize=1024)
def compiled(norm: Norm, device: Device, form: str = "", gradient: bool = False) -> tuple[Launcher, int]:
    """The launches as one, compiled for `device`, and the bytes of workspace that they need."""
    steps, workspace = steps_for(norm, device, form, gradient)
    return device.schedule_launcher([[step] for step in steps]), workspace


def variants(device: Device) -> Iterator[VariantSet]:
    """The texts of the kernels, by types, numbers that a thread reads at once, and forms of blocks."""
    clusters = _clusters(device)
    for dtype, vectors in (("float32", (4, 1)), ("float16", (8, 4, 1)), ("bfloat16", (8, 4, 1))):
        common = {"TYPE": (DTYPE_CODES[dtype],), "VEC": vectors}
        alone = common | {"THREADS": (THREADS,)}
        yield VariantSet("norm_planes", alone)
        yield VariantSet("norm_gradients", alone)
        yield VariantSet("norm_small", common | {"THREADS": SMALL_THREADS, "CLUSTER": clusters[:3]}, _is_launched)
        yield VariantSet("norm_small_gradients", alone | {"CLUSTER": clusters})
        yield VariantSet("norm_rows", common | {"THREADS": (THREADS, LONG_THREADS)})


def _is_launched(d: Mapping[str, int]) -> bool:
    """Whether a norm of small planes is ever launched with these defines: clusters of four are of the largest blocks."""
    return d["CLUSTER"] < 4 or d["THREADS"] == SMALL_THREADS[0]
