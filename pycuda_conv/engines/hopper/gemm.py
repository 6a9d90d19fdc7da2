"""The implicit GEMM engine for Hopper: convolutions on tensor cores fed by TMA.

The kernels are ``cu/hopper/gemm.cu``, and ``cu/hopper/gemm_patch.cu`` for the halo loaders.

:mod:`pycuda_conv.engines.packing` says how operands are packed and how phases walk them. This module has the tiles, the tensor maps and
the launch of a phase. :func:`choose` picks a tile by a short model of time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, filter_sizes, packed_key, packed_layout, row_blocks, why_not
from pycuda_conv.engines.base import Config, fastest
from pycuda_conv.engines.geometry import Phase, arguments, by_axis, ceil, repeats
from pycuda_conv.engines.hopper.common import MEMORY, SHARED_BYTES, THREADS, read_bytes, unsupported
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, why_not_so_many
from pycuda_conv.engines.packed_product import (
    ARITHMETICS,
    arithmetic,
    assemble,
    first_ones,
    repeat_arguments,
    tap_numbers,
    written_places,
    written_so,
)
from pycuda_conv.engines.packing import Operands, packs_filter_last
from pycuda_conv.engines.packing_time import overhead
from pycuda_conv.engines.range_guard import MomentsLayout, mending, slack
from pycuda_conv.engines.schedule import BIAS, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT, Moments, Schedule, finish, finish_constants
from pycuda_conv.engines.split_sum import splits
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import FLOAT, limbs, products
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device, Im2col, KernelLaunch, Place, TensorMap

KERNEL, PATCH_KERNEL = "hopper_gemm", "hopper_gemm_patch"
JOINED_BYTES = 512 << 10  # the most bytes of parts of one tile that a block of the product adds itself
CONVERTERS = 7  # warps that split float32 images for the halo_split loader
INTERLEAVED_PIECE = 1024  # bytes of staging a warp needs beside the sums it keeps of the first of two paired phases
__all__ = [
    "CONFIGS", "LAYOUTS", "MOST_TEXTS", "TENSOR_CORES", "ImplicitGemm", "choose", "configs", "filter_key", "refusal", "schedule",
    "sum_order", "texts", "time", "unsupported",
]  # fmt: skip

#: The tiles worth choosing from: BLOCK_M -> the BLOCK_Ns, for each value of :func:`_rarity`. The rarer a product, the fewer its tiles,
#: because each tile is one kernel for each of the many ways to load and to store. By the model, random problems take 0.8% longer in the
#: mean with these tiles than with all of 64 to 256 pixels in steps of 16 or 32, which are six times as many kernels.
#: The key is (three products, the result's pixels are contiguous). Pixels that are not contiguous have a `_rarity` of 1 or more.
PIXELS: dict[tuple[bool, bool], tuple[dict[int, tuple[int, ...]], ...]] = {
    (False, True): (
        {128: (64, 128), 64: (64, 96, 144, 256)}, {128: (64, 128), 64: (64, 144, 256)}, {128: (128,), 64: (64, 256)}, {64: (64, 256)},
    ),
    (False, False): ({}, {128: (128,), 64: (64, 144, 256)}, {128: (128,), 64: (64, 256)}, {128: (64,), 64: (64,)}),
    (True, True): ({128: (64, 96), 64: (64, 96, 144, 256)}, {128: (64,), 64: (64, 144, 256)}, *2 * ({128: (64,), 64: (64, 256)},)),
    (True, False): ({}, {128: (64,), 64: (64, 144, 256)}, {128: (64,), 64: (64, 256)}, {128: (64,), 64: (64,)}),
}  # fmt: skip
#: The same for bfloat16 sums that are split, whose fp32 parts need kernels of their own: they have few tiles.
BFLOAT_PARTS: tuple[dict[int, tuple[int, ...]], ...] = ({128: (64, 128), 64: (64, 144)}, {128: (128,), 64: (64,)}, {64: (64,)}, {64: (64,)})
#: The same for ping-pong consumers: BLOCK_N by `_rarity`.
PINGPONG_PIXELS: tuple[tuple[int, ...], ...] = ((128, 160), (128,), (128,), ())
#: (BLOCK_M, BLOCK_N) of the tiles of both halo loaders.
HALOS = ((64, 224),)
#: Phases of one launch at the most: its parameters have room for the arguments and tensor maps of so many.
PHASES = 4


#: How a tile's pixels reach shared memory. "im2col": TMA's im2col mode loads packed images once for each tap. "halo": packed images are
#: loaded once for all taps. "halo_split": float32 images are loaded once for all taps, and the kernel splits them into limbs.
Loader = Literal["im2col", "halo", "halo_split"]
#: "cooperative": the two consumers share each tile. "pingpong": they take tiles in turn, so that one multiplies while the other stores.
Pipeline = Literal["cooperative", "pingpong"]
LOADERS, PIPELINES = get_args(Loader), get_args(Pipeline)


@dataclass(frozen=True)
class ImplicitGemm(Config):
    """One tile of ``hopper/gemm.cu``, or of ``hopper/gemm_patch.cu``.

    BLOCK_M output channels, BLOCK_N pixels, the STAGES of its ring, SPLIT parts of gemm k, how its pixels are loaded, and how its two
    consumers share the work. A tile of a halo loader is 8 columns wide.
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
        """Whether the consumers take whole tiles in turn."""
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
        """Whether images are packed before the product, unless they are already 16-bit and channels last."""
        return self.loader in ("im2col", "halo")

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> ImplicitGemm:
        """:meth:`Config.from_table` for older tables too: they have flags for `loader` and `schedule`, or the former loader "planes"."""
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
MOST_TEXTS = {"cuda": 320}


def _form(problem: ConvProblem) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]]:
    """The packed layout and the phases' addressing of `problem`. TMA's loads may overlap in memory, so windows are allowed."""
    return packed_layout(problem, windows=True)


# ---- what runs


def refusal(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.BLOCK_M not in (64, 128):
        return "a tile has 64 or 128 rows"
    # a consumer's sums fill its registers: one set of them, or three for three products
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
    few = math.prod(walks[0].taps) < 3  # the first stage is given back only after that many have been multiplied
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
    """Width and height, in pixels of x, of the halo of an 8-column output tile."""
    _, (walk, *_) = _form(problem)
    reach_h, reach_w = ((walk.taps[i] - 1) * walk.dilation[i] for i in (1, 2))
    return 8 + reach_w, config.BLOCK_N // 8 + reach_h


def _x_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of one stage of the ring of x; 0 without a halo, where x has no ring of its own."""
    return limbs(problem) * ceil(math.prod(halo(problem, config)) * 128, 1024) * 1024 if config.halo else 0


def _x_stages(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Stages of the ring of x that fit beside the main ring; 2 without a halo."""
    nbytes = _x_bytes(problem, config)
    return min(2 if config.splits_images else 4, (SHARED_BYTES - _ring(problem, config).nbytes(config.STAGES)) // nbytes) if nbytes else 2


def _raw_shift(problem: ConvProblem) -> int:
    """Columns of x that are loaded before the first one that a tap reads: loads begin at multiples of 16 bytes."""
    _, (walk, *_) = _form(problem)
    return walk.low[2] % 4


def _raw_pitch(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Floats loaded of each row of the halo: loads begin and end at multiples of 16 bytes."""
    return ceil(_raw_shift(problem) + halo(problem, config)[0], 4) * 4


def _raw_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes that the converters load at once, some rows of 8 channels each, with a barrier for each converter."""
    wide, _ = halo(problem, config)
    return CONVERTERS * (32 * (32 // wide) * _raw_pitch(problem, config) + 8)


def _raw_stages(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Loads of a converter that may be in flight: as many as fit beside the rings, at most 6."""
    return min(6, (SHARED_BYTES - 256 - _bytes_beside_raw(problem, config)) // _raw_bytes(problem, config))


def shared_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Shared memory of a block in bytes: rings and their alignment, staging tiles, the pixels' scales and places, converters' loads."""
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
        staging = 4 * (4 * 16 * consumer + INTERLEAVED_PIECE)
    else:
        staging = 2 * 32 * 64 * stored if stored else 4 * 4 * 32 * 20
    stage = limbs_each * (config.BLOCK_M + (0 if config.halo else config.BLOCK_N)) * 128
    return Ring(stage, 2 * (staging + (4 + 8 if pairs else 4) * consumer) + ALIGNMENT, SHARED_BYTES)


def tensor_store(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether TMA writes the result: rows of channels whose pitch is a multiple of 16 bytes."""
    dense = problem.direction == "fprop" or problem.stride == (1, 1, 1)
    return problem.layout == "NHWC" and dense and _whole_rows(problem, config.SPLIT) and _consumer_pixels(config) % 32 == 0


def _whole_rows(problem: ConvProblem, split: int) -> bool:
    """Whether the channels that are written of one pixel and group are a multiple of 16 bytes."""
    nbytes = 4 if split > 1 else problem.itemsize
    return problem.result_channels // problem.groups * nbytes % 16 == 0


def _arithmetic(problem: ConvProblem, phase: Phase, split: int) -> dict[str, int]:
    """:func:`arithmetic`, with DENSE = 0 where elements are stored one by one: rows of channels that are no multiple of 16 bytes, and
    planes where loads have fewer than 64 channels. The kernel for scattered results stores these, so they need no other text."""
    defines = arithmetic(problem, phase, split > 1)
    if defines["NHWC"] and defines["DENSE"] and not _whole_rows(problem, split):
        defines["VEC"] = 1
    apart = defines["VEC"] == 1 and (defines["NHWC"] or _form(problem)[0].load < 64)
    return defines | {"DENSE": 0} if apart else defines


@lru_cache(maxsize=1024)
def paired(problem: ConvProblem) -> bool:
    """Whether the phases of even and odd columns are written together."""
    gradient = problem.direction == "dgrad" and problem.layout == "NCHW" and not problem.has_residual
    return gradient and problem.stride[2] == 2 and problem.result_size[2] % 2 == 0


def _stored_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of an element that the product writes: an element of the result, or of an fp32 part of a split sum."""
    return 4 if config.SPLIT > 1 else problem.itemsize


def _consumer_pixels(config: ImplicitGemm) -> int:
    return config.BLOCK_N if config.BLOCK_M == 128 else config.BLOCK_N // 2


# ---- launches


def schedule(problem: ConvProblem, config: ImplicitGemm, device: Device, with_moments: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`. With `with_moments` they also compute the result's moments, if they can."""
    multiprocessors = device.multiprocessors
    made = _schedule(problem, config, multiprocessors, with_moments)
    if _reads_filter(problem):
        return replace(made, filter_last=_schedule(problem, config, multiprocessors, with_moments, map_w=_filter_map(problem)).steps)
    if packs_filter_last(problem):
        return replace(made, filter_last=_schedule(problem, config, multiprocessors, with_moments, filter_last=True).whole)
    return made


def _schedule(
    problem: ConvProblem, config: ImplicitGemm, multiprocessors: int, with_moments: bool, map_w: TensorMap | None = None,
    filter_last: bool = False,
) -> Schedule:
    """:func:`schedule` for a filter that is packed (from channels last if `filter_last`), or read as it lies through `map_w`."""
    moments = _moments(problem, config) if with_moments else None

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
    """Whether the product's blocks add the parts of split sums themselves: for float32 that was packed, if a tile has few parts.

    In 16 bits a separate launch that adds them is faster: three layers took 19, 39 and 23 us so, and 37, 50 and 28 us with joins.
    """
    packed, _ = _form(problem)
    if config.SPLIT == 1 or config.takes_turns or packed.as_is or _parts_bytes(config) > JOINED_BYTES:
        return False
    return problem.dtype == "float32"


def _parts_bytes(config: ImplicitGemm) -> int:
    """Bytes of the fp32 parts of one tile."""
    return 4 * config.SPLIT * config.BLOCK_M * config.BLOCK_N


def _results(problem: ConvProblem, config: ImplicitGemm, walks: Sequence[PhaseAddressing]) -> int:
    """Tickets of a launch: one for each tile of each phase, whatever its splits; rounded up to a multiple of 16 bytes."""
    return ceil(math.prod(_tiles(problem, config, walks)) * problem.groups * _turns(problem, walks), 4) * 4


def _may_mend(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether the kernel's text can mend flagged results: that of float32 can, which also writes the fp32 parts of float16 sums."""
    return not config.splits_images and (problem.dtype == "float32" or (problem.dtype == "float16" and config.SPLIT > 1))


def _moments(problem: ConvProblem, config: ImplicitGemm) -> Moments | None:
    """The moments that a product can note: forward, whole sums of common layers, if registers suffice."""
    if problem.direction != "fprop" or problem.layout == "CNHW" or config.SPLIT > 1 or problem.has_residual or problem.activation:
        return None
    if config.halo or not _common(_defines_of(problem)) or (problem.layout == "NHWC" and not _whole_rows(problem, 1)):
        return None
    pixels, plane = _consumer_pixels(config), math.prod(problem.result_size)
    if products(problem) == 3 and pixels > 128:
        return None
    return Moments(1, problem.N * plane, pixels, problem.result_channels)


def _launches(problem: ConvProblem) -> Iterator[Sequence[PhaseAddressing]]:
    """The phases of each launch, without their repeats, which the launch computes too; in the order of their first pixels."""
    args = first_ones(*_alike(problem))
    for first in range(0, len(args), PHASES):
        yield args[first : first + PHASES]


@lru_cache(maxsize=64)  # the planner asks for it once a configuration
def _alike(problem: ConvProblem) -> tuple[Sequence[PhaseAddressing], Size3]:
    """The phases in the order of their first pixels, all loaded along equally many axes; and the number of repeats along each axis."""
    _, walks = _form(problem)
    if len(walks) > 1 and not all(walk.flat for walk in walks):
        rank = max(walk.rank for walk in walks)
        walks = tuple(replace(walk, rank=rank, flat=False) for walk in walks)
    d, h, w = repeats(problem)
    return sorted(walks, key=lambda walk: walk.phase.origin), (d, h, 1 if paired(problem) else w)  # a pair's columns are no repeats


def _packed_strides(problem: ConvProblem, packed: PackedLayout, axes: Sequence[int]) -> list[int]:
    """Byte strides of the packed images: from pixel to pixel along each of `axes`, innermost first, then from image to image."""
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
    """The map of packed images for the halo loader: a box is the halo of a tile."""
    _, high, wide = packed.size
    sizes = (problem.groups * packed.group, wide, high, limbs(problem) * problem.N)
    strides = tuple(_packed_strides(problem, packed, (2, 1)))
    return TensorMap(*place, sizes, strides, (64, *halo(problem, config), 1), 128, _operand(problem))


def _raw_map(problem: ConvProblem, config: ImplicitGemm) -> TensorMap:
    """The map of float32 images for the halo_split loader: a box is 8 channels of some rows."""
    (_, high, wide), groups = problem.operand_size, problem.groups
    channels, (halo_w, _) = problem.operand_channels // groups, halo(problem, config)
    strides = (4 * wide, 4 * wide * high, 4 * wide * high * channels)
    box = (_raw_pitch(problem, config), 32 // halo_w, 8, 1)
    return TensorMap(INPUT, 0, (wide, high, channels, problem.N * groups), strides, box, 0, "float32")


def _operand(problem: ConvProblem) -> str:
    """The dtype of the limbs."""
    return "bfloat16" if problem.dtype == "bfloat16" else "float16"


def _filter_map(problem: ConvProblem) -> TensorMap:
    """The map of a 16-bit filter whose second axis is last: a box is `packed.load` channels of one tap of 64 rows of the first axis."""
    packed, _ = _form(problem)
    first, last = problem.weight_shape[:2]
    taps = math.prod(problem.filter_size)
    return TensorMap(WEIGHT, 0, (last, taps, first), (2 * last, 2 * last * taps), (packed.load, 1, 64), 2 * packed.load, problem.dtype)


def _reads_filter(problem: ConvProblem) -> bool:
    """Whether a filter with its second axis last can be read as it lies: 16-bit, beside images that need no packing either."""
    packed, _ = _form(problem)
    if problem.itemsize != 2 or problem.layout == "CNHW" or problem.weight_shape[1] % 8 or packed.level:
        return False
    # in dgrad that last axis is gemm m
    return packed.as_is and (problem.direction == "fprop" or packed.load == 64)


def _result_map(problem: ConvProblem, config: ImplicitGemm, place: Place) -> TensorMap:
    """The map of the result, or of a split sum's parts. Groups and parts have axes of their own, so a tail never reaches the next one."""
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
    """The launch of some phases. With `tickets` it adds the parts of split sums; with `flagged` it computes flagged results once more."""
    defines = _arithmetic(problem, walks[0].phase, config.SPLIT) | {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "LOAD_CHANNELS": packed.load,
        "WGMMA_N": _consumer_pixels(config), "TENSOR_STORE": int(tensor_store(problem, config)),
        "W_MN_MAJOR": int(map_w is not None and problem.direction == "dgrad"), "PINGPONG": int(config.takes_turns),
        "PHASES": 1, "INTERLEAVE_COLUMNS": int(paired(problem)),
    }
    if not defines["DENSE"]:
        defines["PHASES"] = PHASES
    if config.splits_images:
        maps = [_raw_map(problem, config)]
    elif config.halo:
        maps = [_halo_map(problem, config, packed, operands.x_limbs)]
    else:
        maps = [_image_map(problem, config, packed, walk, operands.x_limbs) for walk in walks]
    unused = defines["PHASES"] - len(walks)  # the kernel's parameters always hold PHASES phases: the last one fills the rest
    maps += maps[-1:] * unused
    if products(problem) == 1 and problem.layout == "NHWC":
        maps.append(map_w or maps[0])  # the text has this parameter even where the filter is packed
    if tensor_store(problem, config):
        maps.append(_result_map(problem, config, buffers[-1]))
    with_moments, tiles = layout.moments is not None, _tiles(problem, config, walks)
    bits = {"w_lies": int(map_w is not None), "scaled": (problem.dtype == "float32") + 2 * with_moments, "x_tiles": operands.tiles}
    phases = tuple(_arguments(problem, config, packed, walk, tiles, bits) for walk in walks)
    structs: tuple[tuple[int, ...], ...] = (*phases, *phases[-1:] * unused)
    if defines["PHASES"] > 1:
        structs += (repeat_arguments(problem, packed, len(walks), _alike(problem)[1], filter_last),)
    if _may_mend(problem, config):
        structs += mending(problem, [walk.phase for walk in walks], defines["PHASES"], filter_last)
    if not config.halo and _may_note(defines):
        buffers += (layout.parts if with_moments else RESULT, *flagged, *((layout.redone or RESULT,) if flagged else ()))
    else:
        buffers += flagged
    if defines["OUT"] == FLOAT and not (defines["BF16"] or config.halo or config.takes_turns):  # the kernel's JOINS
        buffers += RESULT, tickets or RESULT
        kept = finish(problem) if tickets else dict.fromkeys(finish(problem), 0)
        structs += (JoinArguments(joins=int(tickets is not None), **kept),)
    if not config.splits_images:
        buffers += (operands.x_tiles,) if defines["PHASES"] > 1 else (operands.x_tiles, operands.w_tiles)
    return KernelLaunch(
        PATCH_KERNEL if config.halo else KERNEL, _patch_defines(config, products(problem)) if config.halo else defines,
        _grid(problem, walks, phases[0].tiles, multiprocessors), THREADS + 128 * config.splits_images,
        buffers, (), maps=tuple(maps), shared=shared_bytes(problem, config), arch="sm_90a",
        arguments=structs,
        # the epilogue runs on whole sums, not on a part
        layer={} if tickets else finish_constants(phases[0]) | {"NOTED": int(with_moments)},
    )


def _patch_defines(config: ImplicitGemm, products_each: int) -> dict[str, int]:
    """The defines of the kernel for patches."""
    consumer = _consumer_pixels(config)
    return {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "PRODUCTS": products_each, "WGMMA_N": consumer,
        "PATCH_ROWS": consumer // 8, "FUSED_SPLIT": int(config.splits_images),
    }  # fmt: skip


def _grid(problem: ConvProblem, walks: Sequence[PhaseAddressing], tiles: int, multiprocessors: int) -> int:
    """Blocks of a launch. Their number and that of the phases (or pairs of them) have no common factor, so each block meets all phases."""
    turns = _turns(problem, walks) // _at_once(problem)
    some = multiprocessors if tiles * turns <= multiprocessors or math.gcd(multiprocessors, turns) == 1 else multiprocessors - 1
    return min(tiles * turns, some)


def _turns(problem: ConvProblem, walks: Sequence[PhaseAddressing]) -> int:
    """The phases of a launch, repeats included."""
    _, many = _alike(problem)
    return len(walks) * math.prod(many)


def _at_once(problem: ConvProblem) -> int:
    """Phases whose tiles a block computes together."""
    return 2 if paired(problem) else 1


GemmPhase = kernel_struct("gemm_tiles.cuh", "GemmPhase")
#: The arguments of a split sum that the product adds.
JoinArguments = kernel_struct(KERNEL, "JoinArguments")


def _arguments(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, walk: PhaseAddressing, tiles: tuple[int, int],
    of_launch: Mapping[str, int],
) -> Any:
    """The kernel's arguments of a phase. All phases of a launch count the same `tiles`; `of_launch` are its other common values."""
    phase, groups, rows = walk.phase, problem.groups, problem.result_channels
    tiles_m, tiles_pixels = tiles
    blocks_group, _, channel_blocks = filter_sizes(problem, packed)
    plane, size = math.prod(phase.size), phase.size
    blocks = channel_blocks * math.prod(walk.taps)
    pixels = problem.N * plane
    # loads see all images of a flat walk as one row of pixels
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
    """The arguments of the halo_split loader; all zero for other loaders."""
    if not config.splits_images:
        return dict.fromkeys(("raw_stages", "raw_rounds", "raw_rows", "raw_run", "raw_shift", "raw_pitch", "raw_channel"), 0)
    wide, high = halo(problem, config)
    rows, pitch = 32 // wide, _raw_pitch(problem, config)
    return {
        "raw_stages": _raw_stages(problem, config), "raw_rounds": ceil(8 * ceil(high, rows), CONVERTERS), "raw_rows": rows,
        "raw_run": rows * wide, "raw_shift": _raw_shift(problem), "raw_pitch": pitch, "raw_channel": rows * pitch,
    }  # fmt: skip


def _tiles(problem: ConvProblem, config: ImplicitGemm, walks: Sequence[PhaseAddressing]) -> tuple[int, int]:
    """Tiles of a group along the channels, and along the pixels of the launch's largest phase."""
    plane = max(math.prod(walk.phase.size) for walk in walks)
    across = problem.N * plane // config.BLOCK_N if config.halo else ceil(problem.N * plane, config.BLOCK_N)
    return ceil(problem.result_channels // problem.groups, config.BLOCK_M), across


def filter_key(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    """Equal for problems whose filter is packed alike."""
    return packed_key(problem, windows=True)


def sum_order(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    """Everything that fixes the order of a sum: the splits, the order of gemm k, and who adds the parts. A patch's scale is chosen from
    the patch, so with halo_split it depends on BLOCK_N too."""
    how = config.SPLIT, config.loader, joins(problem, config)
    return (*how, config.BLOCK_N) if config.splits_images else how


def _rarity(defines: Mapping[str, int]) -> int:
    """How rare a product with these defines is, from 0 (common) to 3: rare ones get few tiles.

    Loads of 32 channels count one and loads of 16 two. Results that are scattered, or not stored by fours, count one. A single product of
    channels-last arrays counts one, because another engine reads most of these as they lie.
    """
    few, scattered = {64: 0, 32: 1, 16: 2}[defines["LOAD_CHANNELS"]], not defines["DENSE"]
    lying = bool(defines["NHWC"] and defines["PRODUCTS"] == 1)
    return min(3, few + (scattered or defines["VEC"] == 1) + lying)


def _in_parts(defines: Mapping[str, int]) -> bool:
    """Whether 16-bit sums with these defines may be split: not those of phases, and in bfloat16 only those of :data:`BFLOAT_PARTS`."""
    if not defines["DENSE"] and not (defines["NHWC"] and defines["VEC"] == 1):
        return False
    return not defines["BF16"] or defines["BLOCK_N"] in BFLOAT_PARTS[_rarity(defines)].get(defines["BLOCK_M"], ())


def _common(defines: Mapping[str, int]) -> bool:
    """Whether these defines load 64 channels and store by fours: only such products note moments."""
    return defines["LOAD_CHANNELS"] == 64 and defines["VEC"] == 4


def _may_note(defines: Mapping[str, int]) -> bool:
    """Whether the kernel with these defines can note moments: its NOTES."""
    parts, few = defines["BF16"] and defines["OUT"] == FLOAT, defines["PRODUCTS"] == 1 or defines["WGMMA_N"] <= 128
    return bool(defines["DENSE"] and _common(defines) and few and not (defines["W_MN_MAJOR"] or parts))


def _defines_of(problem: ConvProblem) -> dict[str, int]:
    """The defines of `problem` that do not depend on the tile, for sums that are not split."""
    packed, walks = _form(problem)
    return _arithmetic(problem, walks[0].phase, 1) | {"LOAD_CHANNELS": packed.load}


def _ordinary_tiles(seldom: int, three: bool, dense: bool) -> Iterator[ImplicitGemm]:
    """The tiles of the im2col loader worth choosing from (:data:`PIXELS`), without stages and splits.

    Ping-pong tiles are among them if there is one product (not `three`) and the result's pixels are contiguous (`dense`).
    """
    for rows, widths in PIXELS[three, dense][seldom].items():
        yield from (ImplicitGemm(rows, pixels) for pixels in widths)
    if dense and not three:
        yield from (ImplicitGemm(128, pixels, schedule="pingpong") for pixels in PINGPONG_PIXELS[seldom])


#: The tiles of the halo loaders.
_SPECIAL_TILES = (
    *(ImplicitGemm(*tile, loader="halo") for tile in HALOS), *(ImplicitGemm(*tile, loader="halo_split") for tile in HALOS),
)  # fmt: skip


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for a tile and its loads, the arithmetic, and how the result lies."""
    kinds = product(range(len(PINGPONG_PIXELS)), (False, True), (False, True))
    tiles = dict.fromkeys(tile for kind in kinds for tile in _ordinary_tiles(*kind))
    for tile, one in product(tiles, ARITHMETICS):
        own = one | _ORDINARY | {"BLOCK_M": (tile.BLOCK_M,), "BLOCK_N": (tile.BLOCK_N,), "WGMMA_N": (_consumer_pixels(tile),)}
        for special in ({}, _STORED, _PAIRED):
            choices = own | special | {"PINGPONG": (int(tile.takes_turns),)}
            stored = (4 if one["OUT"] == (FLOAT,) else 2) if choices["TENSOR_STORE"] == (1,) else 0
            ring = _ring_of(tile, 2 if one["PRODUCTS"] == (3,) else 1, stored, choices["INTERLEAVE_COLUMNS"] == (1,))
            choices["STAGES"] = (ring.deepest(_depths(tile)),)
            yield TextFamily(KERNEL, choices, _is_listed, "sm_90a")
    for tile in _SPECIAL_TILES:
        of_tile = {name: (value,) for name, value in _patch_defines(tile, 3).items()}
        stages = _depths(tile) if tile.splits_images else _DEPTHS["halo"]
        yield TextFamily(PATCH_KERNEL, of_tile | {"PRODUCTS": (3,) if tile.splits_images else (3, 1), "STAGES": stages}, arch="sm_90a")


#: Defines of the im2col loader whose results are stored pixel by pixel; STAGES is filled in.
_ORDINARY: dict[str, tuple[int, ...]] = {
    "LOAD_CHANNELS": (16, 32, 64), "TENSOR_STORE": (0,), "W_MN_MAJOR": FLAG, "PINGPONG": (0,), "PHASES": (1, PHASES),
    "INTERLEAVE_COLUMNS": (0,), "STAGES": (0,),
}  # fmt: skip
_STORED: dict[str, tuple[int, ...]] = {"TENSOR_STORE": (1,), "NHWC": (1,), "VEC": (4,), "DENSE": (1,), "PHASES": (1,)}
_PAIRED: dict[str, tuple[int, ...]] = {
    "INTERLEAVE_COLUMNS": (1,), "NHWC": (0,), "VEC": (1,), "DENSE": (0,), "PHASES": (1, PHASES), "W_MN_MAJOR": (0,),
}  # fmt: skip


def _is_listed(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever launched."""
    consumer, three = d["WGMMA_N"], d["PRODUCTS"] == 3
    parts = d["OUT"] == FLOAT and d["BF16"]
    if not written_so(d) or (d["NHWC"] and d["DENSE"] and d["VEC"] == 1) or not d["STAGES"] or (d["PHASES"] > 1) == d["DENSE"]:
        return False
    seldom = _rarity(d)
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
    return True


_DEPTHS: dict[Loader, tuple[int, ...]] = {"im2col": (6, 5, 4, 3), "halo": (6, 5, 4, 3), "halo_split": (4, 3)}


def _depths(tile: ImplicitGemm) -> tuple[int, ...]:
    """Numbers of stages of a tile's ring that are tried, largest first."""
    shallow = tile.BLOCK_M == 64 and (tile.loader, tile.schedule) == ("im2col", "cooperative")
    return _DEPTHS[tile.loader] + ((2,) if shallow else ())


# ---- the choice



class Rates(NamedTuple):
    """Measured rates for elements of one size.

    Attributes
    ----------
    clock : float
        Cycles a microsecond, which the power limit keeps low under this load.
    row_cycles : float
        Cycles of a tensor load for each pixel's row of channels.
    loaded, stored : float
        Bytes a microsecond and multiprocessor into shared memory, and of the result, while all multiprocessors write.
    launch_time : float
        Microseconds of a launch.
    """

    clock: float
    row_cycles: float
    loaded: float
    stored: float
    launch_time: float


class InPlaceRates(NamedTuple):
    """For images and filters that are read as they lie: cycles a microsecond, cycles of a filter row, microseconds of each launch."""

    clock: float
    filter_cycles: float
    launch_time: float


#: Measured on an H200, by the bytes of an element. Those of float32 were fitted to 258 times: root mean square of the error 17%.
RATES = {8: Rates(1330.0, 1.8, 98e3, 21.6e3, 2.3), 4: Rates(1330.0, 2.07, 98e3, 21.6e3, 1.79), 2: Rates(1450.0, 2.8, 110e3, 17.4e3, 1.0)}
RAW_RATE = 8.8e3  # bytes of float32 images that a multiprocessor's converters split in a microsecond
#: For 16-bit images and filters that are read as they lie. LYING_PRODUCT: the time of products relative to the tensor cores' peak.
#: PIXEL_CYCLES: cycles of a pixel's row, by its bytes. Fitted to 147 times of 57 layers on an H200 and an H100: root mean square of the
#: error 17%, and 18% for layers that were left out.
LYING, LYING_PRODUCT = InPlaceRates(1860.0, 3.5, 1.7), 1.64
PIXEL_CYCLES = {128: 2.59, 64: 1.49, 32: 2.0, 16: 2.0}
VOLUME = 1.05  # relative time of a load of a volume, as it lies
#: Relative times of loads of packed images: of volumes; and of pixels that are no multiple of a load, so that loads straddle cache lines.
PACKED_VOLUME, UNALIGNED = 1.23, 2.0
#: Bytes of packed images beyond which the L2 cache does not keep them all, and the bytes a microsecond that are moved then.
FORGOTTEN, REMEMBERED_RATE = 15e6, 2.3e6
SCATTERED = 4.0  # relative time of stores if a pixel's channels are no multiple of 16 bytes, or 16-bit planes are no multiple of 8
#: Relative times of wgrad: by (products, bytes of an element); and where the convolution has a stride.
LONGER, STRIDED = {(1, 2): 1.15, (1, 4): 1.05, (3, 4): 0.97}, 0.93
#: Relative times of tiles of at most 64 pixels, of 128 pixels or more, of at most 64 pixels in wgrad (besides), and of 16-bit
#: channels-last images that are packed. From 800 times of 140 problems on an H200 and H100s.
NARROW, WIDE, NARROW_GRADIENT, LAST_PACKED = 1.05, 0.95, 1.1, 1.08
#: Relative cycles of a packed pixel's row, by the channels of a load.
SHORT_ROW = {64: 0.87, 32: 1.0, 16: 1.0}
CACHE_RATE = 5e6  # bytes of pixels that all multiprocessors together load from the L2 cache in a microsecond
FOLLOW = 1.4  # microseconds that each further launch of phases adds
#: Relative times with three products: of tiles of 128 rows, which load less for each product; and of two stages, which wait for loads.
TALL, SHALLOW = 0.96, 1.03
FLAT = 1.0  # relative time of 1x1 layers without stride in NCHW
SECTOR = 32  # bytes that memory writes at once
APART = 2.0  # relative time of adding the parts of a sum if its elements are loaded one by one
PHASED = 1.85  # relative time of stores of phases in NCHW, whose neighbouring pixels are apart in memory
#: Relative times of float32 phases in NCHW: with columns written in pairs; and with tiles larger than 64x64, which write more at once.
PAIRED, PHASED_TILE = 0.92, 1.2
PARTS_OF_SECTORS = 2.6e6  # bytes of sectors that memory writes in a microsecond where each phase writes a part of a sector
HALO_STAGE = 0.26  # microseconds of a stage of the halo loaders beside its products
#: For the halo loaders: elements of a residual that are added in a microsecond, which nothing hides; and the microseconds that splitting
#: images adds. From 27 layers of 64 channels on an H100: without these terms they took up to 1.6 times as long as predicted.
HALO_JOINED, HALO_SPLIT = 2.5e3, 8.5
#: Relative times of ping-pong tiles: of products and of stores that overlap, and of stores where these take longer than the products.
PINGPONG_PRODUCT, PINGPONG_STORE, PINGPONG_ALONE = 1.15, 0.54, 1.15
#: Elements of a residual that a microsecond adds to other tiles; and how many times as long it takes one element at a time.
JOINED_PLANES, JOINED_APART = 4.7e3, 2.33
#: For 16-bit channels-last results: TILE_TIME; the rate `stored` of TMA's stores, of other stores, and of phases' scattered stores; and the
#: elements of a residual that are added in a microsecond.
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
    seldom, dense = _rarity(defines), bool(defines["DENSE"])
    for tile in (*_ordinary_tiles(seldom, products(problem) == 3, dense), *_SPECIAL_TILES):
        if tile.BLOCK_M == 128 and problem.result_channels // problem.groups <= 64:
            continue
        if tile.splits_images and products(problem) == 1:  # one product takes longer than its loads, so splitting images would not pay
            continue
        if tile.takes_turns and problem.layout == "NHWC" and tile.BLOCK_N % 32:  # rows of channels by TMA: multiples of 32
            continue
        if tile.takes_turns and problem.has_residual and tile.BLOCK_N > 160:  # registers do not hold both the sums and the residual
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
    """`config` with the most stages of `depths` (largest first) that it can have; nothing if it can't run with the fewest."""
    least = _changed(config, config.SPLIT, depths[-1])
    if refusal(problem, least) is not None:  # what has room for more stages has room for fewer
        return
    if config.halo:  # the stages of the ring of x depend on those of the main ring
        tried = (_changed(config, config.SPLIT, stages) for stages in depths[:-1])
        yield next((one for one in tried if refusal(problem, one) is None), least)
    else:
        yield _changed(config, config.SPLIT, _ring(problem, least).deepest(depths))


def _steps(problem: ConvProblem) -> int:
    """The most stages that a tile without splits multiplies."""
    packed, walks = _form(problem)
    return ceil(ceil(packed.group, packed.load) * math.prod(walks[0].taps), 64 // packed.load)


def _pixel_cycles(problem: ConvProblem, packed: PackedLayout) -> float:
    """Cycles to load one pixel's channels from an array as it lies: rows that the load has to fill up take longer, odd ones longest."""
    row, pixel = packed.load * problem.itemsize, problem.operand_channels * problem.itemsize
    slower = VOLUME if _form(problem)[1][0].rank == 3 else 1.0
    return slower * PIXEL_CYCLES[row] * (1.0 if pixel % row == 0 else 1.4 if pixel % 32 == 0 else 2.0)


@lru_cache(maxsize=64)
def _stages_of_launches(problem: ConvProblem) -> tuple[tuple[Sequence[PhaseAddressing], tuple[int, ...]], ...]:
    """The phases of each launch, with the stages that a tile of each multiplies without splits."""
    packed, _ = _form(problem)
    blocks, at_once = ceil(packed.group, packed.load), 64 // packed.load
    return tuple(
        (group, tuple(ceil(blocks * math.prod(walk.taps), at_once) for walk in group)) for group in _launches(problem)
    )


def time(problem: ConvProblem, config: ImplicitGemm, device: Device) -> float:
    """Microseconds that `config` should take, packing included: arithmetic, bytes into shared memory, rounds of tiles.

    The model assumes that a filter that can be read as it lies does lie so.
    """
    return _time(problem, config, device.multiprocessors)


@lru_cache(maxsize=1024)
def _time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> float:
    packed, walks = _form(problem)
    lying = _reads_filter(problem)
    launch_time = LYING.launch_time if lying else RATES[problem.itemsize].launch_time
    us = launch_time + (HALO_SPLIT if config.splits_images else 0)
    for _ in _stages_of_launches(problem)[1:]:
        us += FOLLOW
    of_product, joined = _product_time(problem, config, multiprocessors, lying)
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
    return _corrected(us, problem, config, lying)


def _product_time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int, lying: bool) -> tuple[float, float]:
    """Microseconds of the launches that multiply; and bytes of the parts of sums that a block adds."""
    _, walks = _form(problem)
    loaded = _loaded(problem, config, lying)
    step, (stores, added) = _stage_time(problem, config, lying, loaded), _store_time(problem, config, multiprocessors)
    # the halo loaders wait neither for loads nor for stores, unless stores take longer
    between = 0 if config.halo else (LYING_TILE if _stores_last(problem, config) else TILE_TIME) + stores

    def tile_time(steps: int) -> float:
        product = ceil(steps, config.SPLIT) * step
        if config.takes_turns:  # stores slow the other consumer's products down, but only the last ones are waited for
            return max(PINGPONG_PRODUCT * product + PINGPONG_STORE * stores, PINGPONG_ALONE * between)
        return max(product, stores) + added / HALO_JOINED if config.halo else product + between

    # bytes of a stage that are loaded for the same pixels only; wgrad's pixels are taps, which share most of theirs
    of_pixels = 0.0 if problem.layout == "CNHW" else loaded - limbs(problem) * config.BLOCK_M * 128
    at_once, joined = _at_once(problem), 0.0
    # blocks of the same pixels and other channels load them together, and so do phases; all else comes from the L2 cache again
    from_cache = 0.0
    longest = shared = 0.0  # launches of phases overlap: the longest one counts, or the sum of what each takes of the multiprocessors
    for group, stages in _stages_of_launches(problem):
        works = [sum(map(tile_time, stages[i : i + at_once])) for i in range(0, len(group), at_once)]
        tiles = math.prod(_tiles(problem, config, group)) * problem.groups * config.SPLIT
        grid, turns = _grid(problem, group, tiles, multiprocessors), _turns(problem, group)
        rounds = ceil(tiles * turns // at_once, grid)
        if joins(problem, config):
            joined += _parts_bytes(config) * ceil(tiles * turns, config.SPLIT * grid)
        # a block takes tiles of all phases in turn, equally many of each
        own = max(max(works), rounds * sum(works) / len(works)) + (between if config.takes_turns else 0)
        longest, shared = max(longest, own), shared + own * grid / multiprocessors
        _, across = _tiles(problem, config, group)
        from_cache += across * problem.groups * sum(stages) / len(walks) * of_pixels
    return max(longest, shared, between + from_cache / CACHE_RATE), joined


def _loaded(problem: ConvProblem, config: ImplicitGemm, lying: bool) -> float:
    """Bytes of a stage, of which those of pixels count more whose loads take longer."""
    packed, walks = _form(problem)
    loaded = float(_ring(problem, config).stage)
    if lying or config.halo:
        return loaded
    slower = UNALIGNED if packed.window is None and packed.pixel * problem.groups % packed.load else 1.0
    slower *= PACKED_VOLUME if walks[0].rank == 3 else 1.0
    return loaded + (slower - 1) * limbs(problem) * config.BLOCK_N * 128


def _stage_time(problem: ConvProblem, config: ImplicitGemm, lying: bool, loaded: float) -> float:
    """Microseconds of a stage, of which so many bytes are `loaded`: its products, its loads, its bytes; with a halo its products."""
    packed, walks = _form(problem)
    rates = RATES[problem.itemsize]
    cycles = 4 * products(problem) * config.BLOCK_N * config.BLOCK_M / 128 * (LYING_PRODUCT if lying else 1)
    if config.halo:
        step = HALO_STAGE + cycles / rates.clock
        if config.splits_images:  # a row has some 16 floats, of 64 channels
            _, high = halo(problem, config)
            step = max(step, 64 * 4 * high * _raw_pitch(problem, config) / RAW_RATE / math.prod(walks[0].taps))
        return step
    clock, of_filter = (LYING.clock, LYING.filter_cycles) if lying else (rates.clock, 0.0)
    of_pixel = _pixel_cycles(problem, packed) if lying else rates.row_cycles * SHORT_ROW[packed.load]
    loads = (of_pixel * limbs(problem) * config.BLOCK_N + of_filter * config.BLOCK_M) * (64 // packed.load)
    return max(cycles / clock, loads / clock, loaded / rates.loaded)


def _stores_last(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether a tile stores 16-bit results with their channels last, not parts of them."""
    return problem.layout == "NHWC" and config.SPLIT == 1 and problem.itemsize == 2


def _store_time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> tuple[float, int]:
    """Microseconds in which a tile stores its results; and elements of a residual that it adds to them."""
    _, walks = _form(problem)
    last, stored = _stores_last(problem, config), RATES[problem.itemsize].stored
    if last and len(walks) > 1:
        stored = PHASED_STORED
    elif last:
        stored = LYING_APART if _whole_rows(problem, 1) and not tensor_store(problem, config) else LYING_STORED
    us = config.BLOCK_M * config.BLOCK_N * _stored_bytes(problem, config) / stored
    if problem.layout == "NHWC" and problem.result_channels * problem.itemsize % 16:
        us *= SCATTERED if len(walks) == 1 or _defines_of(problem)["VEC"] == 1 else 1.0
    elif problem.layout == "NCHW" and problem.itemsize == 2 and not paired(problem) and _defines_of(problem)["VEC"] == 1:
        # elements are stored one by one, each in a sector of its own; all multiprocessors share the memory's rate for sectors
        stored_at_once = math.prod(_tiles(problem, config, walks[:1])) * problem.groups * len(walks) / multiprocessors
        us *= SCATTERED * max(1.0, min(walks[0].phase.step[2], SECTOR // problem.itemsize) * min(1.0, stored_at_once))
    elif problem.layout == "NCHW" and problem.itemsize == 4 and len(walks) > 1:
        us *= PHASED
    added = config.BLOCK_M * config.BLOCK_N if problem.has_residual and config.SPLIT == 1 else 0
    one_by_one = not last and _defines_of(problem)["VEC"] == 1
    return us + added / (JOINED if last else JOINED_PLANES / JOINED_APART if one_by_one else JOINED_PLANES), added


def _corrected(us: float, problem: ConvProblem, config: ImplicitGemm, lying: bool) -> float:
    """`us` times the relative times of the problem's kind and of the tile."""
    _, walks = _form(problem)
    if problem.layout == "NHWC" and problem.itemsize == 2 and not lying:
        us *= LAST_PACKED
    if problem.layout == "NCHW" and problem.itemsize == 4 and len(walks) > 1:
        small = config.BLOCK_M == 64 == config.BLOCK_N
        us *= PAIRED if paired(problem) else 1.0 if small else PHASED_TILE
    us *= NARROW if config.BLOCK_N <= 64 else WIDE if config.BLOCK_N >= 128 else 1.0
    if products(problem) == 3:
        us *= (TALL if config.BLOCK_M == 128 else 1.0) * (SHALLOW if config.STAGES == 2 else 1.0)
    if problem.layout == "NCHW" and len(walks) == 1 and walks[0].flat:
        us *= FLAT
    if problem.layout == "CNHW":
        us *= LONGER[products(problem), problem.itemsize] * (STRIDED if max(problem.dilation) > 1 else 1.0)
        us *= NARROW_GRADIENT if config.BLOCK_N <= 64 else 1.0
    return us


#: How much faster the model must find a loader other than im2col. Another order of sums needs kernels that no other layer has compiled.
CLEARLY = 1.15


def choose(problem: ConvProblem, device: Device) -> tuple[float, ImplicitGemm] | None:
    """The configuration that should be fastest, behind the microseconds it should take; None where there is none.

    An im2col configuration is preferred to one that is hardly faster: most layers have its order of sums, so they share its kernels.
    """
    timed = [(time(problem, config, device), config) for config in configs(problem, device)]
    best = fastest(timed)
    usual = fastest(one for one in timed if one[1].loader == "im2col")
    return usual if best and usual and usual[0] <= CLEARLY * best[0] else best
