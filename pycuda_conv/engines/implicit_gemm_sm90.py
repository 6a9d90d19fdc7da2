"""The implicit GEMM engine for Hopper: convolutions on tensor cores fed by TMA (``cu/implicit_gemm_sm90.cu``).

How operands are packed and problems walked is in :mod:`pycuda_conv.engines.packing`; here are the tiles, the tensor maps and
the launch of a phase. :func:`choose` picks tiles by a short model of time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pycuda_conv.engines.base import Config
from pycuda_conv.engines.geometry import Phase, arguments, by_axis, ceil
from pycuda_conv.engines.hopper import MEMORY, SHARED_BYTES, THREADS, read_bytes, unsupported
from pycuda_conv.engines.packing import (
    ARITHMETICS,
    Operands,
    PackedLayout,
    PhaseAddressing,
    arithmetic,
    assemble,
    filter_sizes,
    first_ones,
    overhead,
    packed_key,
    packed_layout,
    packs_filter_last,
    repeat_arguments,
    repeats,
    row_blocks,
    tap_numbers,
    why_not,
    written_places,
    written_so,
)
from pycuda_conv.engines.range_guard import MomentsLayout, mending, slack
from pycuda_conv.engines.ring import ALIGNMENT, Ring, why_not_so_many
from pycuda_conv.engines.schedule import BIAS, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT, Moments, Schedule, finish, finish_constants
from pycuda_conv.engines.split_sum import splits
from pycuda_conv.engines.tensor_cores import FLOAT, fastest, limbs, products
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device, Im2col, KernelLaunch, Place, TensorMap

JOINED_BYTES = 512 << 10  # of a tile's parts, which one block reads
CONVERTERS = 7  # warps that split what all taps of a tile meet
KEPT_PIECE = 1024  # bytes of a warp beside the sums it keeps of the first of two phases, to turn those of both to rows
__all__ = [
    "CONFIGS", "LAYOUTS", "TENSOR_CORES", "ImplicitGemm", "choose", "configs", "filter_key", "refusal", "schedule", "sum_order", "texts",
    "time",
    "unsupported",
]  # fmt: skip

#: Pixels of the tiles that are chosen from, by their rows, for each value of :func:`_seldom`: the more seldom a product, the fewer of the
#: tiles. Each tile is a kernel for each of the many ways to load and to store. By the model random problems take 0.8% longer in the mean
#: with these tiles than with all of 64 to 256 pixels in steps of 16 or 32, which are six times as many kernels.
#: Behind (of three products, the result's pixels lie side by side). Pixels that lie apart are at least seldom.
PIXELS: dict[tuple[bool, bool], tuple[dict[int, tuple[int, ...]], ...]] = {
    (False, True): (
        {128: (64, 128), 64: (64, 96, 144, 256)}, {128: (64, 128), 64: (64, 144, 256)}, {128: (128,), 64: (64, 256)}, {64: (64, 256)},
    ),
    (False, False): ({}, {128: (128,), 64: (64, 144, 256)}, {128: (128,), 64: (64, 256)}, {128: (64,), 64: (64,)}),
    (True, True): ({128: (64, 96), 64: (64, 96, 144, 256)}, {128: (64,), 64: (64, 144, 256)}, *2 * ({128: (64,), 64: (64, 256)},)),
    (True, False): ({}, {128: (64,), 64: (64, 144, 256)}, {128: (64,), 64: (64, 256)}, {128: (64,), 64: (64,)}),
}  # fmt: skip
#: Of tiles whose sums are parts of bfloat16's, which have kernels of their own: where sums are split, tiles are few.
BFLOAT_PARTS: tuple[dict[int, tuple[int, ...]], ...] = ({128: (64, 128), 64: (64, 144)}, {128: (128,), 64: (64,)}, {64: (64,)}, {64: (64,)})
#: The same of consumers that take turns; and the tiles, (rows, pixels), of images that are loaded once for all taps, split then or before.
PINGPONG_PIXELS: tuple[tuple[int, ...], ...] = ((128, 160), (128,), (128,), ())
HALOS = ((64, 224),)
#: Of a launch, no more than its parameters hold arguments and tensor maps.
PHASES = 4


#: How a tile's pixels reach shared memory: each tap's from packed images by TMA's im2col mode; once for all taps, from packed images; or
#: from float32 images, which the kernel splits itself.
Loader = Literal["im2col", "halo", "halo_split"]
#: Whether the two consumers share each tile, or take tiles by turns, so that one multiplies while the other stores.
Pipeline = Literal["cooperative", "pingpong"]
LOADERS, PIPELINES = get_args(Loader), get_args(Pipeline)


@dataclass(frozen=True)
class ImplicitGemm(Config):
    """One tile of ``implicit_gemm_sm90.cu``.

    Its output channels, its pixels, the stages of its ring, and splits of gemm k; how its pixels are loaded, and how its two
    consumers take turns. The pixels of a halo are 8 columns.
    """

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 3
    SPLIT: int = 1
    loader: Loader = "im2col"
    schedule: Pipeline = "cooperative"

    FORMER: ClassVar[Mapping[str, str]] = {"ROWS": "BLOCK_M", "PIXELS": "BLOCK_N"}

    def __post_init__(self) -> None:
        for name, known in ("loader", LOADERS), ("schedule", PIPELINES):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but got {getattr(self, name)!r}")

    @property
    def takes_turns(self) -> bool:
        """Whether each consumer takes whole tiles."""
        return self.schedule == "pingpong"

    @property
    def halo(self) -> bool:
        """Whether a tile's pixels are loaded once for all taps."""
        return self.loader in ("halo", "halo_split")

    @property
    def splits_images(self) -> bool:
        """Whether the kernel splits float32 images itself."""
        return self.loader == "halo_split"

    @property
    def packs_images(self) -> bool:
        """Whether images are packed before the product, unless they lie as it wants them."""
        return self.loader in ("im2col", "halo")

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> ImplicitGemm:
        """:meth:`Config.from_table`; older tables have flags in place of `loader` and `schedule`, or a loader that is no more."""
        flags = {name: value for name, value in values.items() if name in ("POINTWISE", "HALO", "RAW", "PINGPONG")}
        if not all(isinstance(value, bool) for value in flags.values()):
            raise ValueError(f"flags must be true or false, but are {flags}")
        former = {"loader": "im2col"} if values.get("loader") == "planes" else {}
        for flag, loader in ("HALO", "halo"), ("RAW", "halo_split"):
            if flags.get(flag):
                former["loader"] = loader
        if flags.get("PINGPONG"):
            former["schedule"] = "pingpong"
        return super().from_table({name: value for name, value in values.items() if name not in flags} | former)


CONFIGS = (ImplicitGemm,)
LAYOUTS = "NCHW", "NHWC", "CNHW"
TENSOR_CORES = True


def _form(problem: ConvProblem) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]]:
    """The packing and the walks of `problem` here: TMA's loads may overlap."""
    return packed_layout(problem, windows=True)


# ---- what runs


def refusal(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.BLOCK_M not in (64, 128):
        return "a tile has 64 or 128 rows"
    # their sums, three times or once, fill the registers
    most = 256 if products(problem) == 1 else 128 if problem.has_residual and config.SPLIT == 1 else 136
    if config.halo:
        most = 112 if config.splits_images else 128
    if config.BLOCK_N % (8 if config.BLOCK_M == 128 else 16) or not 8 <= _consumer_pixels(config) <= most:
        return f"a consumer takes a multiple of 8 pixels up to {most}"
    if config.takes_turns:
        reason = _no_pingpong(problem, config)
        if reason:
            return reason
    if config.halo:
        reason = _no_halo(problem, config)
        if reason:
            return reason
    if config.splits_images:
        reason = _not_raw(problem, config)
        if reason:
            return reason
    return why_not_so_many(config.STAGES, shared_bytes(problem, config), SHARED_BYTES, config.SPLIT)


def _no_pingpong(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why consumers can't take tiles by turns, or None if they can."""
    if products(problem) == 3 or config.BLOCK_M != 128 or config.loader != "im2col" or paired(problem):
        return "consumers take tiles by turns if these have 128 rows, of one product, loaded tap by tap, and columns of one phase"
    most = 128 if problem.has_residual and config.SPLIT == 1 else 192
    return f"a consumer takes all {config.BLOCK_N} pixels of a tile then, up to {most}" if config.BLOCK_N > most else None


def _no_halo(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why a tile's pixels can't be loaded at once for all taps, or None if they can."""
    packed, walks = _form(problem)
    alone = len(walks) == 1 and walks[0].rank == 2 and not walks[0].flat and walks[0].stride == (1, 1, 1) == walks[0].phase.step
    few = math.prod(walks[0].taps) < 3  # as many stages are multiplied before the first of them is given back
    folded = packed.level > 0 and packed.window is None
    if problem.layout != "NCHW" or problem.itemsize != 4 or packed.load != 64 or folded or not alone or few:
        return "all taps are loaded for at once if they are 3 or more, 2-d, without stride, on NCHW float32 arrays, 64 channels a load"
    if problem.result_size[1] % (config.BLOCK_N // 8) or problem.result_size[2] % 8:
        return "tiles of 8 columns fill the result then"
    if config.SPLIT != 1:
        return "sums of patches are not split"
    if products(problem) == 3 and config.STAGES < 3:
        return "three stages or more: two are multiplied while the tile before is stored, and the next one arrives"
    if _x_stages(problem, config) < 2:
        return "its shared memory leaves no room for what all taps of two tiles meet"
    return None


def _not_raw(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why the product can't split images itself, or None if it can."""
    if config.BLOCK_M != 64:
        return "images are split where they are loaded for all taps at once, to tiles of 64 rows"
    if problem.operand_channels // problem.groups > 64 or _form(problem)[0].window is not None:
        return "they are if all channels of a group are one load, and those of one pixel"
    if problem.operand_size[2] % 4 or halo(problem, config)[0] > 32:
        return "their rows are multiples of 16 bytes then, and taps meet at most 32 columns"
    if _raw_stages(problem, config) < 2:
        return "its shared memory leaves no room for what is split"
    return None


def halo(problem: ConvProblem, config: ImplicitGemm) -> tuple[int, int]:
    """Pixels of the images that all taps of a tile of 8 columns meet: in a row, and rows."""
    _, (walk, *_) = _form(problem)
    reach_h, reach_w = ((walk.taps[i] - 1) * walk.dilation[i] for i in (1, 2))
    return 8 + reach_w, config.BLOCK_N // 8 + reach_h


def _x_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of a stage of the ring of x alone, if there is one."""
    return limbs(problem) * ceil(math.prod(halo(problem, config)) * 128, 1024) * 1024 if config.halo else 0


def _x_stages(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Stages of that ring that fit beside the other."""
    nbytes = _x_bytes(problem, config)
    return min(2 if config.splits_images else 4, (SHARED_BYTES - _ring(problem, config).nbytes(config.STAGES)) // nbytes) if nbytes else 2


def _raw_shift(problem: ConvProblem) -> int:
    """Columns from a multiple of 16 bytes to the first one that taps meet."""
    _, (walk, *_) = _form(problem)
    return walk.low[2] % 4


def _raw_pitch(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Floats that are loaded of a row: loads begin and end at multiples of 16 bytes."""
    return ceil(_raw_shift(problem) + halo(problem, config)[0], 4) * 4


def _raw_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of what the converters load at once, some rows of 8 channels each, and of its barriers."""
    wide, _ = halo(problem, config)
    return CONVERTERS * (32 * (32 // wide) * _raw_pitch(problem, config) + 8)


def _raw_stages(problem: ConvProblem, config: ImplicitGemm) -> int:
    """How many of that fit beside the rings."""
    return min(6, (SHARED_BYTES - 256 - _bytes_beside_raw(problem, config)) // _raw_bytes(problem, config))


def shared_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Shared memory of a block: the rings, room to align them, the consumers' staging tiles, what they know of pixels; what is split."""
    split = _raw_stages(problem, config) * _raw_bytes(problem, config) if config.splits_images else 0
    return _bytes_beside_raw(problem, config) + split


def _bytes_beside_raw(problem: ConvProblem, config: ImplicitGemm) -> int:
    return _ring(problem, config).nbytes(config.STAGES) + _x_stages(problem, config) * _x_bytes(problem, config)


def _ring(problem: ConvProblem, config: ImplicitGemm) -> Ring:
    return _ring_of(config, limbs(problem), _stored_bytes(problem, config) if tensor_store(problem, config) else 0, paired(problem))


def _ring_of(config: ImplicitGemm, limbs_each: int, stored: int, pairs: bool) -> Ring:
    """The ring of the filter, and of images that are loaded tap by tap: a stage is 64 of gemm k.

    Beside it lie the consumers' staging tiles, by the bytes of an element that TMA stores, 0 if it stores none, and by whether columns are
    written in `pairs`; and a scale of each pixel, and its place in the latter case.
    """
    consumer = _consumer_pixels(config)
    if config.halo:
        staging = 0
    elif pairs:
        staging = 4 * (4 * 16 * consumer + KEPT_PIECE)
    else:
        staging = 2 * 32 * 64 * stored if stored else 4 * 4 * 32 * 20
    stage = limbs_each * (config.BLOCK_M + (0 if config.halo else config.BLOCK_N)) * 128
    return Ring(stage, 2 * (staging + (4 + 8 if pairs else 4) * consumer) + ALIGNMENT, SHARED_BYTES)


def tensor_store(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether TMA writes the result: rows of channels whose pitch is a multiple of 16 bytes."""
    dense = problem.direction == "fprop" or problem.stride == (1, 1, 1)
    return problem.layout == "NHWC" and dense and _whole_rows(problem, config.SPLIT) and _consumer_pixels(config) % 32 == 0


def _whole_rows(problem: ConvProblem, split: int) -> bool:
    """Whether what is written of a pixel is multiples of 16 bytes."""
    nbytes = 4 if split > 1 else problem.itemsize
    return problem.result_channels // problem.groups * nbytes % 16 == 0


def _arithmetic(problem: ConvProblem, phase: Phase, split: int) -> dict[str, int]:
    """:func:`arithmetic`; what has no whole vectors is written as if it lay apart, for which there is a kernel:
    rows of channels, and planes where loads have few channels."""
    defines = arithmetic(problem, phase, split > 1)
    if defines["NHWC"] and defines["DENSE"] and not _whole_rows(problem, split):
        defines["VEC"] = 1
    apart = defines["VEC"] == 1 and (defines["NHWC"] or _form(problem)[0].load < 64)
    return defines | {"DENSE": 0} if apart else defines


@lru_cache(maxsize=1024)
def paired(problem: ConvProblem) -> bool:
    """Whether phases of even and odd columns are written together."""
    gradient = problem.direction == "dgrad" and problem.layout == "NCHW" and not problem.has_residual
    return gradient and problem.stride[2] == 2 and problem.result_size[2] % 2 == 0


def _stored_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of an element that the product writes: of the result, or of a part of a split sum."""
    return 4 if config.SPLIT > 1 else problem.itemsize


def _consumer_pixels(config: ImplicitGemm) -> int:
    return config.BLOCK_N if config.BLOCK_M == 128 else config.BLOCK_N // 2


# ---- launches


def schedule(problem: ConvProblem, config: ImplicitGemm, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`; with `noted` they note the moments of the result, if they can."""
    multiprocessors = device.multiprocessors
    made = _schedule(problem, config, multiprocessors, noted)
    if _reads_filter(problem):
        return replace(made, filter_last=_schedule(problem, config, multiprocessors, noted, map_w=_filter_map(problem)).steps)
    if packs_filter_last(problem):
        return replace(made, filter_last=_schedule(problem, config, multiprocessors, noted, filter_last=True).whole)
    return made


def _schedule(
    problem: ConvProblem, config: ImplicitGemm, multiprocessors: int, noted: bool, map_w: TensorMap | None = None, filter_last: bool = False
) -> Schedule:
    """:func:`schedule` with the filter packed, from its channels last too, or read as it lies by `map_w`."""
    moments = _moments(problem, config) if noted else None

    def products(
        packed: PackedLayout, walks: Sequence[PhaseAddressing], operands: Operands, target: Place, layout: MomentsLayout
    ) -> list[KernelLaunch]:
        flagged: tuple[Place, ...] = (INPUT, WEIGHT, operands.x_flags, operands.w_flags) if _may_mend(problem, config) else ()
        ours: tuple[Place, ...] = operands.w_limbs, operands.x_scales
        if config.splits_images:
            ours = INPUT, operands.x_scales, operands.x_flags, operands.w_limbs
        buffers = (*ours, operands.w_scales, BIAS, SCALE, RESIDUAL, target)
        launches, (arena, first) = [], operands.tickets
        for group in _launches(problem):
            place = (arena, first) if joins(problem, config) else None
            among = operands, buffers, flagged, multiprocessors, layout, map_w, filter_last, place
            launches.append(_product(problem, config, packed, group, *among))
            first += 4 * _results(problem, config, group)
        return launches

    high = config.BLOCK_N // 8 if config.splits_images else 0
    tickets = sum(_results(problem, config, group) for group in _launches(problem)) if joins(problem, config) else 0
    return assemble(
        problem, config.SPLIT, multiprocessors, products, moments, config.packs_images, filter_last, windows=True, patch_rows=high,
        clusters=True, mends=_may_mend(problem, config) and (config.SPLIT == 1 or tickets > 0), tickets=tickets,
    )


def joins(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether blocks of the product add the parts of split sums: float32's, where images are packed before, and a tile has few parts.

    In 16 bits a launch of its own that adds them is faster: three layers took 19, 39 and 23 us so, and 37, 50 and 28.
    """
    packed, _ = _form(problem)
    if config.SPLIT == 1 or config.takes_turns or packed.as_is or _parts_bytes(config) > JOINED_BYTES:
        return False
    return problem.dtype == "float32"


def _parts_bytes(config: ImplicitGemm) -> int:
    """Of a tile."""
    return 4 * config.SPLIT * config.BLOCK_M * config.BLOCK_N


def _results(problem: ConvProblem, config: ImplicitGemm, walks: Sequence[PhaseAddressing]) -> int:
    """Tiles of a launch of some phases, those that share their sums counted once; filled up to 16 bytes of tickets."""
    return ceil(math.prod(_tiles(problem, config, walks)) * problem.groups * _turns(problem, walks), 4) * 4


def _may_mend(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether blocks of its text look at what is flagged: of float32's, which also writes the parts of float16 sums."""
    return not config.splits_images and (problem.dtype == "float32" or (problem.dtype == "float16" and config.SPLIT > 1))


def _moments(problem: ConvProblem, config: ImplicitGemm) -> Moments | None:
    """What a product can note of its result: forward, whole sums of common layers, that need no more registers than there are."""
    if problem.direction != "fprop" or problem.layout == "CNHW" or config.SPLIT > 1 or problem.has_residual or problem.activation:
        return None
    if config.halo or not _common(_defines_of(problem)) or (problem.layout == "NHWC" and not _whole_rows(problem, 1)):
        return None
    pixels, plane = _consumer_pixels(config), math.prod(problem.result_size)
    if products(problem) == 3 and pixels > 128:
        return None
    return Moments(1, problem.N * plane, pixels, problem.result_channels)


def _launches(problem: ConvProblem) -> Iterator[Sequence[PhaseAddressing]]:
    """Phases that share a launch, which has their repeats too; such as write into each other's gaps first."""
    told = first_ones(*_alike(problem))
    for first in range(0, len(told), PHASES):
        yield told[first : first + PHASES]


@lru_cache(maxsize=64)  # the planner asks for it once a configuration
def _alike(problem: ConvProblem) -> tuple[Sequence[PhaseAddressing], Size3]:
    """The phases, all loaded along as many axes, in the order of their pixels; and how many are repeats of one, along each axis."""
    _, walks = _form(problem)
    if len(walks) > 1 and not all(walk.flat for walk in walks):
        rank = max(walk.rank for walk in walks)
        walks = tuple(replace(walk, rank=rank, flat=False) for walk in walks)
    d, h, w = repeats(tuple(walks))
    return sorted(walks, key=lambda walk: walk.phase.origin), (d, h, 1 if paired(problem) else w)  # columns are a pair


def _packed_strides(problem: ConvProblem, packed: PackedLayout, axes: Sequence[int]) -> list[int]:
    """Bytes of the packed images from one pixel to the next along these axes, innermost first, and from one image to the next."""
    pixel = 2 * problem.groups * packed.pixel
    strides = [pixel if packed.window is None else pixel * problem.stride[2]]  # windows overlap
    for i in axes:
        pixel *= packed.stored[i]
        strides.append(pixel)
    return strides


def _image_map(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, walk: PhaseAddressing, place: tuple[int, int]
) -> TensorMap:
    channels, copies = problem.groups * packed.group, limbs(problem)
    if walk.flat:
        pixel = 2 * problem.groups * packed.pixel  # bytes
        axes, images = [problem.N * math.prod(packed.size)], copies
        strides = [pixel, pixel * axes[0]]
        stride, low, upper = [1], [0], [0]
    else:
        inner = range(2, 2 - walk.rank, -1)  # W first
        axes, images = [packed.size[i] for i in inner], copies * problem.N
        strides = _packed_strides(problem, packed, inner)
        stride, low = [walk.stride[i] for i in inner], [walk.low[i] for i in inner]
        upper = [walk.low[i] + (walk.phase.size[i] - 1) * walk.stride[i] - (packed.size[i] - 1) for i in inner]
    walked = Im2col(tuple(low), tuple(upper), tuple(stride), packed.load, config.BLOCK_N)
    return TensorMap(*place, (channels, *axes, images), tuple(strides), walked, 2 * packed.load, _operand(problem))


def _halo_map(problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, place: tuple[int, int]) -> TensorMap:
    """Packed images, loaded at once for all taps of a tile."""
    _, high, wide = packed.size
    sizes = (problem.groups * packed.group, wide, high, limbs(problem) * problem.N)
    strides = tuple(_packed_strides(problem, packed, (2, 1)))
    return TensorMap(*place, sizes, strides, (64, *halo(problem, config), 1), 128, _operand(problem))


def _raw_map(problem: ConvProblem, config: ImplicitGemm) -> TensorMap:
    """Images as they lie, of which a converter loads 8 channels of some rows at once."""
    (_, high, wide), groups = problem.operand_size, problem.groups
    channels, (halo_w, _) = problem.operand_channels // groups, halo(problem, config)
    strides = (4 * wide, 4 * wide * high, 4 * wide * high * channels)
    box = (_raw_pitch(problem, config), 32 // halo_w, 8, 1)
    return TensorMap(INPUT, 0, (wide, high, channels, problem.N * groups), strides, box, 0, "float32")


def _operand(problem: ConvProblem) -> str:
    """The dtype of the limbs."""
    return "bfloat16" if problem.dtype == "bfloat16" else "float16"


def _filter_map(problem: ConvProblem) -> TensorMap:
    """A 16-bit filter with its second axis last, as it lies: of a tap so many channels of 64 of the first axis."""
    packed, _ = _form(problem)
    first, last = problem.weight_shape[:2]
    taps = math.prod(problem.filter_size)
    return TensorMap(WEIGHT, 0, (last, taps, first), (2 * last, 2 * last * taps), (packed.load, 1, 64), 2 * packed.load, problem.dtype)


def _reads_filter(problem: ConvProblem) -> bool:
    """Whether a filter with its second axis last can be read as it lies: beside 16-bit images that are not packed either."""
    packed, _ = _form(problem)
    if problem.itemsize != 2 or problem.layout == "CNHW" or problem.weight_shape[1] % 8 or packed.level:
        return False
    # of the gradient of the input that axis is gemm m
    return packed.as_is and (problem.direction == "fprop" or packed.load == 64)


def _result_map(problem: ConvProblem, config: ImplicitGemm, place: Place) -> TensorMap:
    """The result, or the parts of a split one, as the product writes them; the axes keep tails out of the next group or part."""
    buffer, offset = place if isinstance(place, tuple) else (place, 0)
    size, groups, rows = _stored_bytes(problem, config), problem.groups, problem.result_channels
    pixels = problem.N * math.prod(problem.result_size)
    sizes, strides = (rows // groups, groups, pixels, config.SPLIT), (size * (rows // groups), size * rows, size * rows * pixels)
    return TensorMap(buffer, offset, sizes, strides, (128 // size, 1, 32, 1), 128, "float32" if size == 4 else problem.dtype)


def _product(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, walks: Sequence[PhaseAddressing], operands: Operands,
    buffers: tuple[Place, ...], flagged: tuple[Place, ...], multiprocessors: int, layout: MomentsLayout, map_w: TensorMap | None,
    filter_last: bool, tickets: Place | None,
) -> KernelLaunch:
    """The launch of some phases; it adds the parts of split sums with `tickets`, and looks at what is `flagged`."""
    defines = _arithmetic(problem, walks[0].phase, config.SPLIT) | {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "LOAD_CHANNELS": packed.load,
        "WGMMA_N": _consumer_pixels(config), "TENSOR_STORE": int(tensor_store(problem, config)),
        "W_MN_MAJOR": int(map_w is not None and problem.direction == "dgrad"), "PINGPONG": int(config.takes_turns),
        "PHASES": 1, "INTERLEAVE_COLUMNS": int(paired(problem)),
        "PATCH_ROWS": _consumer_pixels(config) // 8 if config.halo else 0, "FUSED_SPLIT": int(config.splits_images),
    }
    if not defines["DENSE"]:
        defines["PHASES"] = PHASES
    if config.splits_images:
        maps = [_raw_map(problem, config)]
    elif config.halo:
        maps = [_halo_map(problem, config, packed, operands.x_limbs)]
    else:
        maps = [_image_map(problem, config, packed, walk, operands.x_limbs) for walk in walks]
    unused = defines["PHASES"] - len(walks)  # the launch's arguments have room for so many more phases
    maps += maps[-1:] * unused
    if products(problem) == 1 and problem.layout == "NHWC":
        maps.append(map_w or maps[0])  # of a filter that is packed there is none
    if tensor_store(problem, config):
        maps.append(_result_map(problem, config, buffers[6]))
    noted, tiles = layout.moments is not None, _tiles(problem, config, walks)
    bits = {"w_lies": int(map_w is not None), "scaled": (problem.dtype == "float32") + 2 * noted, "x_tiles": operands.tiles}
    phases = tuple(_arguments(problem, config, packed, walk, tiles, bits) for walk in walks)
    structs: tuple[tuple[int, ...], ...] = (*phases, *phases[-1:] * unused)
    if defines["PHASES"] > 1:
        structs += (repeat_arguments(problem, packed, len(walks), _alike(problem)[1]),)
    if _may_mend(problem, config):
        structs += mending(problem, [walk.phase for walk in walks], defines["PHASES"], filter_last)
    if _may_note(defines):
        buffers += (layout.parts if noted else RESULT, *flagged, *((layout.redone or RESULT,) if flagged else ()))
    else:
        buffers += flagged
    if defines["OUT"] == FLOAT and not (defines["BF16"] or config.halo or config.takes_turns):  # its text may add parts
        buffers += RESULT, tickets or RESULT
        kept = finish(problem) if tickets else dict.fromkeys(finish(problem), 0)
        structs += (JoinArguments(joins=int(tickets is not None), **kept),)
    if not config.splits_images:
        buffers += (operands.x_tiles,) if defines["PHASES"] > 1 else (operands.x_tiles, operands.w_tiles)
    return KernelLaunch(
        "implicit_gemm_sm90", defines, _grid(problem, walks, phases[0].tiles, multiprocessors), THREADS + 128 * config.splits_images,
        buffers, (), maps=tuple(maps), shared=shared_bytes(problem, config), arch="sm_90a",
        arguments=structs,
        layer={} if tickets else finish_constants(phases[0]) | {"NOTED": int(noted)},  # of the parts, or of the sum
    )


def _grid(problem: ConvProblem, walks: Sequence[PhaseAddressing], tiles: int, multiprocessors: int) -> int:
    """Blocks of the launch of some phases, of so many tiles each. A block takes a tile, or that of two phases, and meets all of these."""
    turns = _turns(problem, walks) // _at_once(problem)
    some = multiprocessors if tiles * turns <= multiprocessors or math.gcd(multiprocessors, turns) == 1 else multiprocessors - 1
    return min(tiles * turns, some)


def _turns(problem: ConvProblem, walks: Sequence[PhaseAddressing]) -> int:
    """The phases of a launch, with their repeats."""
    _, many = _alike(problem)
    return len(walks) * math.prod(many)


def _at_once(problem: ConvProblem) -> int:
    """Phases of which a block takes a tile at a time."""
    return 2 if paired(problem) else 1


class GemmPhase(NamedTuple):
    """What the kernel is told of a phase, which its text explains."""

    tiles: int
    tiles_m: int
    by_tiles_m: int
    splits: int
    by_splits: int
    split_stages: int
    tiles_pixels: int
    by_tiles_pixels: int
    image_tiles: int
    by_image_tiles: int
    across: int
    by_across: int
    blocks: int
    channel_blocks: int
    by_channel_blocks: int
    rows_group: int
    rows: int
    w_lies: int
    blocks_group: int
    row_blocks: int
    channels_group: int
    channels: int
    tap_r: int
    by_tap_r: int
    tap_s: int
    by_tap_s: int
    tap_base: int
    tap_step_t: int
    tap_step_r: int
    tap_step_s: int
    dilation_d: int
    dilation_h: int
    dilation_w: int
    pixels: int
    limb_images: int
    rank: int
    load_plane: int
    by_load_plane: int
    load_pq: int
    by_load_pq: int
    load_q: int
    by_load_q: int
    stride_d: int
    stride_h: int
    stride_w: int
    low_d: int
    low_h: int
    low_w: int
    plane: int
    by_plane: int
    pq: int
    by_pq: int
    q: int
    by_q: int
    out_size: int
    out_base: int
    out_d: int
    out_h: int
    out_w: int
    out_image: int
    out_row: int
    out_part: int
    scaled: int
    x_tiles: int
    has_bias: int
    has_scale: int
    has_residual: int
    activation: int
    slope: int
    halo_w: int
    by_halo_w: int
    halo_h: int
    x_stages: int
    halo_bytes: int
    groups: int
    x_channels: int
    x_h: int
    x_w: int
    slack: int
    raw_stages: int
    raw_rounds: int
    raw_rows: int
    raw_run: int
    raw_shift: int
    raw_pitch: int
    raw_channel: int


class JoinArguments(NamedTuple):
    """What the kernel is told of split sums, which its text explains."""

    joins: int
    has_bias: int
    has_scale: int
    has_residual: int
    activation: int
    slope: int


def _arguments(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, walk: PhaseAddressing, tiles: tuple[int, int],
    of_launch: Mapping[str, int],
) -> GemmPhase:
    """The kernel's arguments of a phase, with those `of_launch`, whose phases all count so many `tiles`."""
    phase, groups, rows = walk.phase, problem.groups, problem.result_channels
    tiles_m, tiles_pixels = tiles
    blocks_group, _, channel_blocks = filter_sizes(problem, packed)
    plane, size = math.prod(phase.size), phase.size
    blocks = channel_blocks * math.prod(walk.taps)
    pixels = problem.N * plane
    # as the loads count pixels: all images are one row of them where no tap looks elsewhere
    stride, low = (((1, 1, 1), (0, 0, 0)) if walk.flat else (walk.stride, walk.low))
    wide, high = halo(problem, config) if config.halo else (0, 0)
    _, x_h, x_w = problem.operand_size
    return arguments(
        GemmPhase, **of_launch, tiles=tiles_m * tiles_pixels * config.SPLIT * groups, tiles_m=tiles_m, splits=config.SPLIT,
        split_stages=ceil(ceil(blocks, 64 // packed.load), config.SPLIT), tiles_pixels=tiles_pixels, image_tiles=tiles_pixels // problem.N,
        across=size[2] // 8, blocks=blocks, channel_blocks=channel_blocks, rows_group=rows // groups, rows=rows, blocks_group=blocks_group,
        row_blocks=row_blocks(problem, packed), channels_group=packed.group, channels=groups * packed.group, **tap_numbers(packed, walk),
        **by_axis("dilation_", walk.dilation), pixels=pixels, limb_images=1 if walk.flat else problem.N, rank=walk.rank,
        load_plane=pixels if walk.flat else plane, load_pq=pixels if walk.flat else size[1] * size[2],
        load_q=pixels if walk.flat else size[2], **by_axis("stride_", stride), **by_axis("low_", low), plane=plane, pq=size[1] * size[2],
        q=size[2], **written_places(problem, phase), out_part=math.prod(problem.result_shape),
        **finish(problem, config.SPLIT > 1),
        halo_w=wide, halo_h=high, x_stages=_x_stages(problem, config), halo_bytes=_x_bytes(problem, config) // limbs(problem),
        groups=groups, x_channels=problem.operand_channels // groups, x_h=x_h, x_w=x_w, slack=slack(problem), **_raw(problem, config),
    )  # fmt: skip


def _raw(problem: ConvProblem, config: ImplicitGemm) -> dict[str, int]:
    """The arguments of images that are split by the product, all zero if they are not."""
    if not config.splits_images:
        return dict.fromkeys(("raw_stages", "raw_rounds", "raw_rows", "raw_run", "raw_shift", "raw_pitch", "raw_channel"), 0)
    wide, high = halo(problem, config)
    rows, pitch = 32 // wide, _raw_pitch(problem, config)
    return {
        "raw_stages": _raw_stages(problem, config), "raw_rounds": ceil(8 * ceil(high, rows), CONVERTERS), "raw_rows": rows,
        "raw_run": rows * wide, "raw_shift": _raw_shift(problem), "raw_pitch": pitch, "raw_channel": rows * pitch,
    }  # fmt: skip


def _tiles(problem: ConvProblem, config: ImplicitGemm, walks: Sequence[PhaseAddressing]) -> tuple[int, int]:
    """Tiles of a group: along its channels, and along the pixels of the phase with the most."""
    plane = max(math.prod(walk.phase.size) for walk in walks)
    across = problem.N * plane // config.BLOCK_N if config.halo else ceil(problem.N * plane, config.BLOCK_N)
    return ceil(problem.result_channels // problem.groups, config.BLOCK_M), across


def filter_key(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    """Equal for problems whose filter is packed alike."""
    return packed_key(problem, windows=True)


def sum_order(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    """The order of gemm k, where it is cut and added up in fp32; and of what scale is: that of a patch depends on the tile."""
    how = config.SPLIT, config.loader, joins(problem, config)
    return (*how, config.BLOCK_N) if config.splits_images else how


def _seldom(defines: Mapping[str, int]) -> int:
    """How seldom a product with such defines is asked for, from 0 to 3: where it is seldom few tiles will do.

    One counts for loads of 32 channels, two for those of 16, one for results that lie apart or whose rows are no multiples of four, and one
    for one product of arrays with their channels last, most of which another engine reads as they lie.
    """
    few, scattered = {64: 0, 32: 1, 16: 2}[defines["LOAD_CHANNELS"]], not defines["DENSE"]
    lying = bool(defines["NHWC"] and defines["PRODUCTS"] == 1)
    return min(3, few + (scattered or defines["VEC"] == 1) + lying)


def _in_parts(defines: Mapping[str, int]) -> bool:
    """Whether a sum of 16-bit products with such defines may be split: of phases none is, and of bfloat16 those of :data:`BFLOAT_PARTS`."""
    if not defines["DENSE"] and not (defines["NHWC"] and defines["VEC"] == 1):
        return False
    return not defines["BF16"] or defines["BLOCK_N"] in BFLOAT_PARTS[_seldom(defines)].get(defines["BLOCK_M"], ())


def _common(defines: Mapping[str, int]) -> bool:
    """Whether a product with such defines loads 64 channels and stores rows of four: others note no moments of their results."""
    return defines["LOAD_CHANNELS"] == 64 and defines["VEC"] == 4


def _may_note(defines: Mapping[str, int]) -> bool:
    """Whether the text with these defines can note moments: NOTES of the kernel."""
    parts, few = defines["BF16"] and defines["OUT"] == FLOAT, defines["PRODUCTS"] == 1 or defines["WGMMA_N"] <= 128
    return bool(defines["DENSE"] and _common(defines) and few and not (defines["PATCH_ROWS"] or defines["W_MN_MAJOR"] or parts))


def _defines_of(problem: ConvProblem) -> dict[str, int]:
    """The defines of a problem, whose sums are not split, that do not depend on the tile."""
    packed, walks = _form(problem)
    return _arithmetic(problem, walks[0].phase, 1) | {"LOAD_CHANNELS": packed.load}


def _ordinary_tiles(seldom: int, three: bool, dense: bool) -> Iterator[ImplicitGemm]:
    """The tiles that are chosen from, see :data:`PIXELS`, without stages and splits, of images that are loaded tap by tap.

    Consumers take turns only where a product is one, not `three` of limbs, and the result's pixels lie side by side (`dense`).
    """
    for rows, widths in PIXELS[three, dense][seldom].items():
        yield from (ImplicitGemm(rows, pixels) for pixels in widths)
    if dense and not three:
        yield from (ImplicitGemm(128, pixels, schedule="pingpong") for pixels in PINGPONG_PIXELS[seldom])


#: The tiles of images that are loaded in other ways.
_SPECIAL_TILES = (
    *(ImplicitGemm(*tile, loader="halo") for tile in HALOS), *(ImplicitGemm(*tile, loader="halo_split") for tile in HALOS),
)  # fmt: skip


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for a tile and its loads, the arithmetic, and how the result lies."""
    kinds = product(range(len(PINGPONG_PIXELS)), (False, True), (False, True))
    tiles = dict.fromkeys(tile for kind in kinds for tile in _ordinary_tiles(*kind))
    for tile, one in product((*tiles, *_SPECIAL_TILES), ARITHMETICS):
        consumer = _consumer_pixels(tile)
        own = one | _ORDINARY | {"BLOCK_M": (tile.BLOCK_M,), "BLOCK_N": (tile.BLOCK_N,), "WGMMA_N": (consumer,)}
        for special in _SPECIAL[tile.loader]:
            choices = own | special | {"PINGPONG": (int(tile.takes_turns),)}
            if tile.halo:
                choices |= {"PATCH_ROWS": (consumer // 8,), "FUSED_SPLIT": (int(tile.splits_images),)}
            else:
                stored = (4 if one["OUT"] == (FLOAT,) else 2) if choices["TENSOR_STORE"] == (1,) else 0
                ring = _ring_of(tile, 2 if one["PRODUCTS"] == (3,) else 1, stored, choices["INTERLEAVE_COLUMNS"] == (1,))
                choices["STAGES"] = (ring.deepest(_depths(tile)),)
            yield TextFamily("implicit_gemm_sm90", choices, _made, "sm_90a")


#: The defines of a product whose images are loaded tap by tap, and written pixel by pixel.
_ORDINARY: dict[str, tuple[int, ...]] = {
    "LOAD_CHANNELS": (16, 32, 64), "TENSOR_STORE": (0,), "W_MN_MAJOR": FLAG, "PINGPONG": (0,), "PHASES": (1, PHASES),
    "INTERLEAVE_COLUMNS": (0,), "PATCH_ROWS": (0,), "FUSED_SPLIT": (0,), "STAGES": (0,),
}  # fmt: skip
_STORED: dict[str, tuple[int, ...]] = {"TENSOR_STORE": (1,), "NHWC": (1,), "VEC": (4,), "DENSE": (1,), "PHASES": (1,)}
_PAIRED: dict[str, tuple[int, ...]] = {
    "INTERLEAVE_COLUMNS": (1,), "NHWC": (0,), "VEC": (1,), "DENSE": (0,), "PHASES": (1, PHASES), "W_MN_MAJOR": (0,),
}  # fmt: skip
_HALO: dict[str, tuple[int, ...]] = {
    "NHWC": (0,), "VEC": (4,), "DENSE": (1,), "LOAD_CHANNELS": (64,), "PHASES": (1,), "W_MN_MAJOR": (0,), "STAGES": (6, 5, 4, 3),
}
#: What else may be of it, by how images are loaded.
_SPECIAL: dict[Loader, tuple[dict[str, tuple[int, ...]], ...]] = {
    "im2col": ({}, _STORED, _PAIRED), "halo": (_HALO,), "halo_split": (_HALO | {"STAGES": (4, 3)},),
}  # fmt: skip


def _made(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever made."""
    consumer, three, of_float32 = d["WGMMA_N"], d["PRODUCTS"] == 3, d["OUT"] == FLOAT and not d["BF16"]
    parts = d["OUT"] == FLOAT and d["BF16"]
    if not written_so(d) or (d["NHWC"] and d["DENSE"] and d["VEC"] == 1) or not d["STAGES"] or (d["PHASES"] > 1) == d["DENSE"]:
        return False
    seldom = _seldom(d)
    if not d["PATCH_ROWS"]:
        tile = ImplicitGemm(d["BLOCK_M"], d["BLOCK_N"], schedule=PIPELINES[d["PINGPONG"]])
        if tile not in _ordinary_tiles(seldom, three, bool(d["DENSE"])):
            return False
    if consumer > (256 if not three else 136):
        return False
    stores = d["NHWC"] and d["DENSE"] and consumer % 32 == 0 and d["VEC"] == 4
    if d["TENSOR_STORE"] != stores:
        return False
    if parts and (d["PINGPONG"] or not _in_parts(d)):
        return False
    if d["INTERLEAVE_COLUMNS"] and d["PINGPONG"]:
        return False
    if d["W_MN_MAJOR"] and (three or not d["NHWC"] or d["LOAD_CHANNELS"] != 64 or d["VEC"] == 1):
        return False
    if d["W_MN_MAJOR"] and d["OUT"] == FLOAT and not d["DENSE"]:
        return False
    if d["VEC"] == 1 and d["DENSE"] and d["LOAD_CHANNELS"] < 64:
        return False
    if d["PINGPONG"]:
        return not three and d["BLOCK_M"] == 128 and not (d["NHWC"] and d["BLOCK_N"] % 32)
    if d["PATCH_ROWS"]:
        most = 112 if d["FUSED_SPLIT"] else 128
        return bool(of_float32 and consumer <= most and (not d["FUSED_SPLIT"] or (three and d["BLOCK_M"] == 64)))
    return True


_DEPTHS: dict[Loader, tuple[int, ...]] = {"im2col": (6, 5, 4, 3), "halo": (6, 5, 4, 3), "halo_split": (4, 3)}


def _depths(tile: ImplicitGemm) -> tuple[int, ...]:
    """Stages of a tile's ring that are tried."""
    shallow = tile.BLOCK_M == 64 and (tile.loader, tile.schedule) == ("im2col", "cooperative")
    return _DEPTHS[tile.loader] + ((2,) if shallow else ())


# ---- the choice



class Rates(NamedTuple):
    """Of float32's arrays, or of those of 16 bits.

    Cycles a microsecond, which the power limit keeps so low under such a load; cycles of a tensor load for each pixel's row of channels;
    bytes a microsecond and multiprocessor: into shared memory, and of the result, all of them writing at once; microseconds of a launch.
    """

    clock: float
    row_cycles: float
    loaded: float
    stored: float
    launch_time: float


#: Measured on an H200, by the bytes of an element. float32's were fitted to 258 times: root mean square of the error 17%.
RATES = {8: Rates(1330.0, 1.8, 98e3, 21.6e3, 2.3), 4: Rates(1330.0, 2.07, 98e3, 21.6e3, 1.79), 2: Rates(1450.0, 2.8, 110e3, 17.4e3, 1.0)}
RAW_RATE = 8.8e3  # bytes a microsecond and multiprocessor of what is split there
#: Of 16-bit arrays and filters that are read as they lie: cycles a microsecond, cycles of a row of the filter, microseconds of each launch;
#: times as long products take as the tensor cores need; cycles of a pixel's row of so many bytes. Fitted to 147 times of 57 layers on an
#: H200 and an H100: root mean square of the error 17%, and 18% for layers that were left out.
LYING, LYING_PRODUCT = (1860.0, 3.5, 1.7), 1.64
PIXEL_CYCLES = {128: 2.59, 64: 1.49, 32: 2.0, 16: 2.0}
VOLUME = 1.05  # times as long takes a load of a volume
#: The same of packed images: of volumes; and of pixels that are no multiple of what is loaded at once, so that loads lie across lines.
PACKED_VOLUME, UNALIGNED = 1.23, 2.0
#: Bytes of packed images from which on a part of them comes from memory, and bytes a microsecond then.
FORGOTTEN, REMEMBERED_RATE = 15e6, 2.3e6
SCATTERED = 4.0  # times as long stores take of pixels whose channels are no multiple of 16 bytes, and of 16-bit planes of no multiple of 8
#: Times as long as that takes the gradient of a filter, by products and bytes of an element; and that of a convolution with a stride.
LONGER, STRIDED = {(1, 2): 1.15, (1, 4): 1.05, (3, 4): 0.97}, 0.93
#: Times as long as all that takes a tile of 64 pixels; one of 128 or more; one of 64 of the gradient of a filter, besides; and what packs
#: 16-bit images that have their channels last. Seen in 800 times of 140 problems on an H200 and H100s.
NARROW, WIDE, NARROW_GRADIENT, LAST_PACKED = 1.05, 0.95, 1.1, 1.08
SHORT_ROW = {64: 0.87, 32: 1.0, 16: 1.0}
CACHE_RATE = 5e6  # bytes a microsecond of pixels that all multiprocessors load from the L2 cache
FOLLOW = 1.4  # microseconds that a launch of further phases adds
#: Of three products, tiles of 128 rows, which load less for each product; and those of two stages, where loads are waited for.
TALL, SHALLOW = 0.96, 1.03
FLAT = 1.0  # the same of 1x1 layers without stride in NCHW
SECTOR = 32  # bytes of memory that are written at once
APART = 2.0  # times as long it takes to add the parts of sums that are loaded one by one
PHASED = 1.85  # the same of pixels of phases in NCHW, whose neighbours lie apart
#: Times as long take phases in NCHW: those whose columns are written in pairs; and larger tiles of others, which write more at once.
PAIRED, PHASED_TILE = 0.92, 1.2
PARTS_OF_SECTORS = 2.6e6  # bytes of sectors a microsecond, of which each phase writes a part
HALO_STAGE = 0.26  # microseconds of a stage, where all taps are loaded at once, beside its products
#: Of the same tiles, elements of a residual that a microsecond adds to them, which nothing hides; and the microseconds that splitting
#: images takes besides. From 27 layers of 64 channels on an H100: without, these took up to 1.6 times as long as predicted.
HALO_JOINED, HALO_SPLIT = 2.5e3, 8.5
PINGPONG_PRODUCT, PINGPONG_STORE, PINGPONG_ALONE = 1.15, 0.54, 1.15  # of a tile's products and stores, where consumers take tiles by turns
#: The same as TILE_TIME and `stored` for 16-bit results with their channels last, which TMA stores; where tiles are no multiple of what it
#: stores; where phases scatter them; and the elements of a residual that a microsecond adds to them.
JOINED_PLANES, JOINED_APART = 4.7e3, 2.33  # elements of a residual that a microsecond adds to other tiles; longer where one at a time
LYING_TILE, LYING_STORED, LYING_APART, PHASED_STORED, JOINED = 0.26, 25e3, 12.9e3, 9.3e3, 4.4e3
TILE_TIME = 0.75  # microseconds to start and drain a tile


def configs(problem: ConvProblem, device: Device) -> tuple[ImplicitGemm, ...]:
    """The configurations worth comparing for `problem`."""
    return _configs(problem)


@lru_cache(maxsize=64)  # asked for by the choice, and by whatever stands in for it
def _configs(problem: ConvProblem) -> tuple[ImplicitGemm, ...]:
    return () if why_not(problem) else tuple(_worth_comparing(problem))


def _worth_comparing(problem: ConvProblem) -> Iterator[ImplicitGemm]:
    defines = _defines_of(problem)
    seldom, dense = _seldom(defines), bool(defines["DENSE"])
    for tile in (*_ordinary_tiles(seldom, products(problem) == 3, dense), *_SPECIAL_TILES):
        if tile.BLOCK_M == 128 and problem.result_channels // problem.groups <= 64:
            continue
        if tile.splits_images and products(problem) == 1:  # which does not take as long as its loads
            continue
        if tile.takes_turns and problem.layout == "NHWC" and tile.BLOCK_N % 32:  # rows of channels by TMA: multiples of 32
            continue
        if tile.takes_turns and problem.has_residual and tile.BLOCK_N > 160:  # there are no registers for both
            continue
        depths = _depths(tile)
        if (tile.loader, tile.schedule) == ("im2col", "cooperative"):
            in_parts = problem.itemsize == 4 or _in_parts(defines | {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N})
            for split in splits(problem, _steps(problem) // 4 if in_parts else 1):
                yield from _deepest(problem, _changed(tile, split, tile.STAGES), depths)
        else:
            yield from _deepest(problem, tile, depths)


@lru_cache(maxsize=4096)  # few tiles, for every problem again
def _changed(tile: ImplicitGemm, split: int, stages: int) -> ImplicitGemm:
    return replace(tile, SPLIT=split, STAGES=stages)


def _deepest(problem: ConvProblem, config: ImplicitGemm, depths: tuple[int, ...]) -> Iterator[ImplicitGemm]:
    """`config` with as many stages as are legal, if any: of `depths`, which descend."""
    least = _changed(config, config.SPLIT, depths[-1])
    if refusal(problem, least) is not None:  # what has room for more stages has room for fewer
        return
    if config.halo:  # what lies beside the ring depends on its stages
        tried = (_changed(config, config.SPLIT, stages) for stages in depths[:-1])
        yield next((one for one in tried if refusal(problem, one) is None), least)
    else:
        yield _changed(config, config.SPLIT, _ring(problem, least).deepest(depths))


def _steps(problem: ConvProblem) -> int:
    """Stages of the ring that a tile without splits goes through, at the most."""
    packed, walks = _form(problem)
    return ceil(ceil(packed.group, packed.load) * math.prod(walks[0].taps), 64 // packed.load)


def _pixel_cycles(problem: ConvProblem, packed: PackedLayout) -> float:
    """Of a load of a pixel's channels from an array as it lies: rows that it has to fill take longer, odd ones most."""
    row, pixel = packed.load * problem.itemsize, problem.operand_channels * problem.itemsize
    slower = VOLUME if _form(problem)[1][0].rank == 3 else 1.0
    return slower * PIXEL_CYCLES[row] * (1.0 if pixel % row == 0 else 1.4 if pixel % 32 == 0 else 2.0)


@lru_cache(maxsize=64)
def _stages_of_launches(problem: ConvProblem) -> tuple[tuple[Sequence[PhaseAddressing], tuple[int, ...]], ...]:
    """The phases of each launch, and the stages of the ring that a tile of each goes through without splits."""
    packed, _ = _form(problem)
    blocks, at_once = ceil(packed.group, packed.load), 64 // packed.load
    return tuple(
        (group, tuple(ceil(blocks * math.prod(walk.taps), at_once) for walk in group)) for group in _launches(problem)
    )


def time(problem: ConvProblem, config: ImplicitGemm, device: Device) -> float:
    """Microseconds that `config` should take, packing included: arithmetic, bytes into shared memory, rounds of tiles.

    A filter that can be read as it lies is taken to lie so.
    """
    return _time(problem, config, device.multiprocessors)


@lru_cache(maxsize=1024)
def _time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> float:
    packed, walks = _form(problem)
    count, lying, rates = products(problem), _reads_filter(problem), RATES[problem.itemsize]
    clock, of_filter, launch_time = LYING if lying else (rates.clock, 0.0, 0.0)
    of_pixel = _pixel_cycles(problem, packed) if lying else rates.row_cycles * SHORT_ROW[packed.load]
    loads = (of_pixel * limbs(problem) * config.BLOCK_N + of_filter * config.BLOCK_M) * (64 // packed.load)
    cycles = 4 * count * config.BLOCK_N * config.BLOCK_M / 128 * (LYING_PRODUCT if lying else 1)
    loaded = float(_ring(problem, config).stage)
    if not (lying or config.halo):
        slower = UNALIGNED if packed.window is None and packed.pixel * problem.groups % packed.load else 1.0
        slower *= PACKED_VOLUME if walks[0].rank == 3 else 1.0
        loaded += (slower - 1) * limbs(problem) * config.BLOCK_N * 128
    step = max(cycles / clock, loads / clock, loaded / rates.loaded)
    # bytes of a stage that only blocks of the same pixels ask for; those of a gradient of a filter are taps, which share most of theirs
    of_pixels = 0.0 if problem.layout == "CNHW" else loaded - limbs(problem) * config.BLOCK_M * 128
    last = problem.layout == "NHWC" and config.SPLIT == 1 and problem.itemsize == 2
    tile, stored = (LYING_TILE, PHASED_STORED if len(walks) > 1 else LYING_STORED) if last else (TILE_TIME, rates.stored)
    if last and len(walks) == 1 and _whole_rows(problem, 1) and not tensor_store(problem, config):
        stored = LYING_APART
    stores = config.BLOCK_M * config.BLOCK_N * _stored_bytes(problem, config) / stored
    if problem.layout == "NHWC" and problem.result_channels * problem.itemsize % 16:
        stores *= SCATTERED if len(walks) == 1 or _defines_of(problem)["VEC"] == 1 else 1.0
    elif problem.layout == "NCHW" and problem.itemsize == 2 and not paired(problem) and _defines_of(problem)["VEC"] == 1:
        # elements one by one, so far apart: memory, which all multiprocessors share, writes so many sectors
        stored_at_once = math.prod(_tiles(problem, config, walks[:1])) * problem.groups * len(walks) / multiprocessors
        stores *= SCATTERED * max(1.0, min(walks[0].phase.step[2], SECTOR // problem.itemsize) * min(1.0, stored_at_once))
    elif problem.layout == "NCHW" and problem.itemsize == 4 and len(walks) > 1:
        stores *= PHASED
    added = config.BLOCK_M * config.BLOCK_N if problem.has_residual and config.SPLIT == 1 else 0
    one_by_one = not last and _defines_of(problem)["VEC"] == 1
    stores += added / (JOINED if last else JOINED_PLANES / JOINED_APART if one_by_one else JOINED_PLANES)
    between = tile + stores
    if config.halo:  # neither loads nor stores are waited for, unless stores take longer
        step, between = HALO_STAGE + cycles / rates.clock, 0
    if config.splits_images:  # rows of 16 floats or so, of 64 channels
        _, high = halo(problem, config)
        step = max(step, 64 * 4 * high * _raw_pitch(problem, config) / RAW_RATE / math.prod(walks[0].taps))

    def tile_time(steps: int) -> float:
        product = ceil(steps, config.SPLIT) * step
        if config.takes_turns:  # stores beside products slow these down, but are waited for only at the end
            return max(PINGPONG_PRODUCT * product + PINGPONG_STORE * stores, PINGPONG_ALONE * between)
        return max(product, stores) + added / HALO_JOINED if config.halo else product + between

    us = (0.0 if lying else rates.launch_time) + launch_time + (HALO_SPLIT if config.splits_images else 0)
    at_once, joined = _at_once(problem), 0.0
    # tiles of the same pixels and other rows load them together, and so do phases; others come from the L2 cache one by one
    from_cache = 0.0
    longest = shared = 0.0  # launches of phases run beside one another: of them the longest, and what all take of the multiprocessors
    for number, (group, stages) in enumerate(_stages_of_launches(problem)):
        us += FOLLOW if number else 0.0
        works = [sum(map(tile_time, stages[i : i + at_once])) for i in range(0, len(group), at_once)]
        tiles = math.prod(_tiles(problem, config, group)) * problem.groups * config.SPLIT
        grid, turns = _grid(problem, group, tiles, multiprocessors), _turns(problem, group)
        rounds = ceil(tiles * turns // at_once, grid)
        if joins(problem, config):
            joined += _parts_bytes(config) * ceil(tiles * turns, config.SPLIT * grid)
        # phases come by turns, so that blocks have as much of each
        own = max(max(works), rounds * sum(works) / len(works)) + (between if config.takes_turns else 0)
        longest, shared = max(longest, own), shared + own * grid / multiprocessors
        _, across = _tiles(problem, config, group)
        from_cache += across * problem.groups * sum(stages) / len(walks) * of_pixels
    of_product = max(longest, shared, between + from_cache / CACHE_RATE)
    kept = 0 if lying or config.splits_images else 2 * limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
    if kept > FORGOTTEN:
        written = problem.itemsize * math.prod(problem.result_shape) * (2 if problem.has_residual else 1)
        of_product = max(of_product, (kept + written) / REMEMBERED_RATE)
    us += of_product
    if joined and _arithmetic(problem, walks[0].phase, config.SPLIT)["VEC"] == 1:
        joined *= APART
    us += overhead(problem, packed, config.SPLIT, config.packs_images and not packed.as_is, not lying, joined)
    if lying and problem.layout == "NHWC":
        moved = read_bytes(problem) + problem.itemsize * (math.prod(problem.result_shape) + math.prod(problem.weight_shape))
        us = max(us, launch_time + moved / MEMORY)
    if problem.layout == "NCHW" and len(walks) > 1:  # memory writes a sector again for each phase that has a pixel in it
        parts = min(walks[0].phase.step[2], SECTOR // problem.itemsize)
        us = max(us, problem.itemsize * math.prod(problem.result_shape) * parts / PARTS_OF_SECTORS)
    if problem.layout == "NHWC" and problem.itemsize == 2 and not lying:
        us *= LAST_PACKED
    if problem.layout == "NCHW" and problem.itemsize == 4 and len(walks) > 1:
        small = config.BLOCK_M == 64 == config.BLOCK_N
        us *= PAIRED if paired(problem) else 1.0 if small else PHASED_TILE
    us *= NARROW if config.BLOCK_N <= 64 else WIDE if config.BLOCK_N >= 128 else 1.0
    if count == 3:
        us *= (TALL if config.BLOCK_M == 128 else 1.0) * (SHALLOW if config.STAGES == 2 else 1.0)
    if problem.layout == "NCHW" and len(walks) == 1 and walks[0].flat:
        us *= FLAT
    if problem.layout == "CNHW":
        us *= LONGER[products(problem), problem.itemsize] * (STRIDED if max(problem.dilation) > 1 else 1.0)
        us *= NARROW_GRADIENT if config.BLOCK_N <= 64 else 1.0
    return us


#: What another order of sums than most layers' has to gain, by the model's word: a new order has to wait for the compiler.
CLEARLY = 1.15


def choose(problem: ConvProblem, device: Device) -> tuple[float, ImplicitGemm] | None:
    """The configuration that should be the fastest, behind the microseconds it should take; None where there is none.

    One whose order of sums is that of most layers is preferred to one that is hardly faster, so that sizes of a layer share kernels.
    """
    timed = [(time(problem, config, device), config) for config in configs(problem, device)]
    best = fastest(timed)
    usual = fastest(one for one in timed if one[1].loader == "im2col")
    return usual if best and usual and usual[0] <= CLEARLY * best[0] else best
