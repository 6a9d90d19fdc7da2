"""The tiles of ``cu/hopper/gemm.cu``: what a configuration is, why one cannot run, how it stores, a launch's phases, and all variants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import ClassVar, Literal, get_args

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, packed_layout, why_not
from pycuda_conv.engines.base import FLAG, Config, Device, VariantSet
from pycuda_conv.engines.geometry import Phase, batches, ceil, repeats
from pycuda_conv.engines.hopper.common import most_shared
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.packed_product import ARITHMETICS, arithmetic, first_ones, written_so
from pycuda_conv.engines.tensor_cores import FLOAT, gemm_products, limbs, products
from pycuda_conv.problem import ConvProblem, Size3

KERNEL = "hopper_gemm"
INTERLEAVED_PIECE = 1024  # bytes of staging a warp needs beside the sums it keeps of the first of two paired phases
JOINED_BYTES = 512 << 10  # the most bytes of parts of one tile that a block of the product adds itself
#: Phases of one launch at the most: its parameters have room for the arguments and tensor maps of so many.
PHASES = 4
#: The tiles worth choosing from: BLOCK_M -> the BLOCK_Ns, for each value of :func:`rarity`. The rarer a product, the fewer its tiles,
#: because each tile is one kernel for each of the many ways to load and to store. By the model, random problems take 0.8% longer in the
#: mean with these tiles than with all of 64 to 256 pixels in steps of 16 or 32, which are six times as many kernels.
#: The key is (three products, the result's pixels are contiguous). Pixels that are not contiguous have a `rarity` of 1 or more.
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
#: The same for ping-pong consumers: BLOCK_N by `rarity`, which TMA stores by 32, and for which registers hold a residual beside the sums.
PINGPONG_PIXELS: tuple[tuple[int, ...], ...] = ((128, 160), (128,), (128,), ())
#: The same for twins, of 64 rows and dense results.
TWIN_PIXELS: tuple[tuple[int, ...], ...] = ((128,), (128,), (128,), ())
#: "cooperative": the two consumers share each tile. "pingpong": they alternate tiles, so that one multiplies while the other stores.
#: "twin": a block has one consumer, and a multiprocessor two blocks, one of which stores while the other multiplies.
Pipeline = Literal["cooperative", "pingpong", "twin"]
PIPELINES = get_args(Pipeline)


@dataclass(frozen=True)
class ImplicitGemm(Config):
    """One tile of ``hopper/gemm.cu``.

    BLOCK_M output channels, BLOCK_N pixels, the STAGES of its ring, SPLIT parts of gemm k, and how its two consumers share the work.
    """

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 3
    SPLIT: int = 1
    schedule: Pipeline = "cooperative"

    packs_images: ClassVar[bool] = True  # unless they are already 16-bit and channels last

    def __post_init__(self) -> None:
        if self.schedule not in PIPELINES:
            raise ValueError(f"schedule must be one of {', '.join(PIPELINES)}, but got {self.schedule!r}")

    @property
    def is_pingpong(self) -> bool:
        """Whether the consumers alternate whole tiles."""
        return self.schedule == "pingpong"

    @property
    def is_twin(self) -> bool:
        """Whether two blocks, of one consumer each, share a multiprocessor."""
        return self.schedule == "twin"

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.is_twin else 1

    @property
    def consumer_pixels(self) -> int:
        """Pixels of a consumer."""
        return self.BLOCK_N if self.BLOCK_M == 128 or self.is_twin else self.BLOCK_N // 2

    @property
    def parts_bytes(self) -> int:
        """Bytes of the fp32 parts of one tile."""
        return 4 * self.SPLIT * self.BLOCK_M * self.BLOCK_N

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of stages of its ring that are tried, largest first."""
        return (6, 5, 4, 3, 2) if self.BLOCK_M == 64 and not self.is_pingpong else (6, 5, 4, 3)

    def stored_bytes(self, problem: ConvProblem) -> int:
        """Bytes of an element that the product writes: an element of the result, or of an fp32 part of a split sum."""
        return 4 if self.SPLIT > 1 else problem.itemsize

    def tensor_store(self, problem: ConvProblem) -> bool:
        """Whether TMA writes the result: rows of channels whose pitch is a multiple of 16 bytes."""
        dense = problem.direction == "fprop" or problem.stride == (1, 1, 1)
        return problem.layout == "NHWC" and dense and whole_rows(problem, self.SPLIT) and self.consumer_pixels % 32 == 0

    def ring(self, limbs_each: int, stored: int, pairs: bool) -> Ring:
        """The ring of the filter and of images: a stage is 64 of gemm k.

        Beside it lie the consumers' staging tiles, by the bytes of an element that TMA stores, 0 if it stores none, and by whether columns
        are written in `pairs`; and a scale of each pixel, and its place in the latter case.
        """
        consumer = self.consumer_pixels
        staging = 4 * (4 * 16 * consumer + INTERLEAVED_PIECE) if pairs else 2 * 32 * 64 * stored if stored else 4 * 4 * 32 * 20
        stage = limbs_each * (self.BLOCK_M + self.BLOCK_N) * 128
        return Ring(stage, (2 // self.blocks) * (staging + (4 + 8 if pairs else 4) * consumer) + ALIGNMENT, most_shared(self.blocks))

    def ring_for(self, problem: ConvProblem) -> Ring:
        """The same for a problem."""
        return self.ring(limbs(problem), self.stored_bytes(problem) if self.tensor_store(problem) else 0, paired(problem))

    def joins(self, problem: ConvProblem) -> bool:
        """Whether the product's blocks add the parts of split sums themselves: for float32 that was packed, if a tile has few parts.

        In 16 bits a separate launch that adds them is faster: three layers took 19, 39 and 23 us so, and 37, 50 and 28 us with joins.
        """
        if self.SPLIT == 1 or self.is_pingpong or problem.dtype != "float32" or self.parts_bytes > JOINED_BYTES:
            return False
        return not form(problem)[0].as_is

    def tiles_of(self, problem: ConvProblem, addressings: Sequence[PhaseAddressing]) -> tuple[int, int]:
        """Tiles of a group along the channels, and along the pixels of the launch's largest phase."""
        plane = max(math.prod(addressing.phase.size) for addressing in addressings)
        return ceil(problem.result_channels // problem.groups, self.BLOCK_M), ceil(problem.N * plane, self.BLOCK_N)


def form(problem: ConvProblem) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]]:
    """The packed layout and the phases' addressing of `problem`. TMA's loads may overlap in memory, so windows are allowed."""
    return packed_layout(problem, windows=True)


def _no_twin(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    if config.BLOCK_M != 64 or config.SPLIT > 1 or problem.layout != "NCHW" or not defines_of(problem)["DENSE"]:
        return "a single consumer takes 64 rows, of whole sums in planes that are contiguous"
    return None


def _no_pingpong(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    if products(problem) == 3 or config.BLOCK_M != 128 or paired(problem):
        return "consumers alternate tiles if these have 128 rows, of one product, and columns of one phase"
    most = 128 if problem.has_residual and config.SPLIT == 1 else 192
    return f"a consumer takes all {config.BLOCK_N} pixels of a tile then, up to {most}" if config.BLOCK_N > most else None


def _fits(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    # a consumer's sums fill its registers: one set of them, or three for three products
    most = 256 if products(problem) == 1 else 128 if problem.has_residual and config.SPLIT == 1 else 136
    if config.BLOCK_N % (8 if config.BLOCK_M == 128 else 16) or not 8 <= config.consumer_pixels <= most:
        return f"a consumer takes a multiple of 8 pixels up to {most}"
    reason = _no_pingpong(problem, config) if config.is_pingpong else _no_twin(problem, config) if config.is_twin else None
    return reason or config.ring_for(problem).refusal(config.STAGES, config.SPLIT)


TAKES = Takes(why_not)
LEGAL = Tiles(TAKES, ImplicitGemm, ("a tile has 64 or 128 rows", lambda _, config: config.BLOCK_M in (64, 128)), _fits)


def whole_rows(problem: ConvProblem, split: int) -> bool:
    """Whether the channels that are written of one pixel and group are a multiple of 16 bytes."""
    nbytes = 4 if split > 1 else problem.itemsize
    return problem.result_channels // problem.groups * nbytes % 16 == 0


def result_arithmetic(problem: ConvProblem, phase: Phase, split: int) -> dict[str, int]:
    """:func:`arithmetic`, with DENSE = 0 where elements are stored one by one: rows of channels that are no multiple of 16 bytes, and
    planes where loads have fewer than 64 channels. The kernel for scattered results stores these, so they need no other text."""
    defines = arithmetic(problem, phase, split > 1) | {"PRODUCTS": gemm_products(problem)}
    if defines["NHWC"] and defines["DENSE"] and not whole_rows(problem, split):
        defines["VEC"] = 1
    apart = defines["VEC"] == 1 and (defines["NHWC"] or form(problem)[0].load < 64)
    return defines | {"DENSE": 0} if apart else defines


@lru_cache(maxsize=1024)
def paired(problem: ConvProblem) -> bool:
    """Whether the phases of even and odd columns are written together."""
    gradient = problem.direction == "dgrad" and problem.layout == "NCHW" and not problem.has_residual
    return gradient and problem.stride[2] == 2 and problem.result_size[2] % 2 == 0


def launches_of(problem: ConvProblem) -> Iterator[Sequence[PhaseAddressing]]:
    """The phases of each launch, without their repeats, which the launch computes too; in the order of their first pixels."""
    return batches(first_ones(*alike(problem)), PHASES)


@lru_cache(maxsize=64)  # the planner asks for it once a configuration
def alike(problem: ConvProblem) -> tuple[Sequence[PhaseAddressing], Size3]:
    """The phases in the order of their first pixels, all loaded along equally many axes; and the number of repeats along each axis."""
    _, addressings = form(problem)
    if len(addressings) > 1 and not all(addressing.flat for addressing in addressings):
        spatial_dims = max(addressing.spatial_dims for addressing in addressings)
        addressings = tuple(replace(addressing, spatial_dims=spatial_dims, flat=False) for addressing in addressings)
    d, h, w = repeats(problem)
    many = (d, h, 1 if paired(problem) else w)  # a pair's columns are no repeats
    return sorted(addressings, key=lambda one: one.phase.origin), many


def phases_with_repeats(problem: ConvProblem, addressings: Sequence[PhaseAddressing]) -> int:
    """The phases of a launch, repeats included."""
    _, many = alike(problem)
    return len(addressings) * math.prod(many)


def phases_at_once(problem: ConvProblem) -> int:
    """Phases whose tiles a block computes together."""
    return 2 if paired(problem) else 1


def grid_of(problem: ConvProblem, addressings: Sequence[PhaseAddressing], tiles: int, multiprocessors: int) -> int:
    """Blocks of a launch. Their number and that of the phases (or pairs of them) have no common factor, so each block meets all phases."""
    all_phases = phases_with_repeats(problem, addressings) // phases_at_once(problem)
    some = multiprocessors if tiles * all_phases <= multiprocessors or math.gcd(multiprocessors, all_phases) == 1 else multiprocessors - 1
    return min(tiles * all_phases, some)


def reads_filter(problem: ConvProblem) -> bool:
    """Whether a filter with its second axis last can be read as it lies: 16-bit, beside images that need no packing either."""
    packed, _ = form(problem)
    if problem.itemsize != 2 or problem.layout == "CNHW" or problem.weight_shape[1] % 8 or packed.level:
        return False
    # in dgrad that last axis is gemm m
    return packed.as_is and (problem.direction == "fprop" or packed.load == 64)


def rarity(defines: Mapping[str, int]) -> int:
    """How rare a product with these defines is, from 0 (common) to 3: rare ones get few tiles.

    Loads of 32 channels count one and loads of 16 two. Results that are scattered, or not stored by fours, count one. A single product of
    channels-last arrays counts one, because another engine reads most of these as they lie.
    """
    few, scattered = {64: 0, 32: 1, 16: 2}[defines["LOAD_CHANNELS"]], not defines["DENSE"]
    in_place = bool(defines["NHWC"] and defines["PRODUCTS"] == 1)
    return min(3, few + (scattered or defines["VEC"] == 1) + in_place)


def may_split(defines: Mapping[str, int]) -> bool:
    """Whether 16-bit sums with these defines may be split: not those of phases, and in bfloat16 only those of :data:`BFLOAT_PARTS`."""
    if not defines["DENSE"] and not (defines["NHWC"] and defines["VEC"] == 1):
        return False
    return not defines["BF16"] or defines["BLOCK_N"] in BFLOAT_PARTS[rarity(defines)].get(defines["BLOCK_M"], ())


def is_common(defines: Mapping[str, int]) -> bool:
    """Whether these defines load 64 channels and store by fours: only such products note moments."""
    return defines["LOAD_CHANNELS"] == 64 and defines["VEC"] == 4


def may_note(defines: Mapping[str, int]) -> bool:
    """Whether the kernel with these defines can emit moments: its EMIT_MOMENTS."""
    parts, few = defines["BF16"] and defines["OUT"] == FLOAT, defines["PRODUCTS"] == 1 or defines["WGMMA_N"] <= 128
    return bool(defines["DENSE"] and is_common(defines) and few and not (defines["W_MN_MAJOR"] or parts))


def defines_of(problem: ConvProblem) -> dict[str, int]:
    """The defines of `problem` that do not depend on the tile, for sums that are not split."""
    packed, addressings = form(problem)
    return result_arithmetic(problem, addressings[0].phase, 1) | {"LOAD_CHANNELS": packed.load}


def ordinary_tiles(seldom: int, three: bool, dense: bool) -> Iterator[ImplicitGemm]:
    """The tiles worth choosing from (:data:`PIXELS`), without stages and splits.

    Ping-pong tiles are among them if there is one product (not `three`) and the result's pixels are contiguous (`dense`), twins in the
    latter case.
    """
    for rows, widths in PIXELS[three, dense][seldom].items():
        yield from (ImplicitGemm(rows, pixels) for pixels in widths)
    if dense and not three:
        yield from (ImplicitGemm(128, pixels, schedule="pingpong") for pixels in PINGPONG_PIXELS[seldom])
    if dense:
        yield from (ImplicitGemm(64, pixels, schedule="twin") for pixels in TWIN_PIXELS[seldom])


# ---- variants

MOST_VARIANTS = {"cuda": 387}


def variants(device: Device) -> Iterator[VariantSet]:
    """One for a tile and its loads, the arithmetic, and how the result lies."""
    kinds = product(range(len(PINGPONG_PIXELS)), (False, True), (False, True))
    tiles = dict.fromkeys(tile for kind in kinds for tile in ordinary_tiles(*kind))
    for tile, one in product(tiles, (*ARITHMETICS, _OF_BYTES)):
        own = _ORDINARY | one | {"BLOCK_M": (tile.BLOCK_M,), "BLOCK_N": (tile.BLOCK_N,), "WGMMA_N": (tile.consumer_pixels,)}
        for special in ({}, _STORED, _PAIRED)[: 2 if one is _OF_BYTES else 3]:
            choices = own | special | {"PINGPONG": (int(tile.is_pingpong),)} | ({"TWIN": (1,)} if tile.is_twin else {})
            stored = (4 if one["OUT"] == (FLOAT,) else 2) if choices["TENSOR_STORE"] == (1,) else 0
            ring = tile.ring(1 if one["PRODUCTS"] == (1,) else 2, stored, choices["INTERLEAVE_COLUMNS"] == (1,))
            choices["STAGES"] = (ring.deepest(tile.depths),)
            yield VariantSet(KERNEL, choices, _is_listed, "sm_90a")


#: float32 sums of images of bytes, which are convolved forward alone.
_OF_BYTES = ARITHMETICS[0] | {"PRODUCTS": (2,), "W_MN_MAJOR": (0,)}
#: Defines of tiles whose results are stored pixel by pixel; STAGES is filled in.
_ORDINARY: dict[str, tuple[int, ...]] = {
    "LOAD_CHANNELS": (16, 32, 64), "TENSOR_STORE": (0,), "W_MN_MAJOR": FLAG, "PINGPONG": (0,), "PHASES": (1, PHASES),
    "INTERLEAVE_COLUMNS": (0,), "STAGES": (0,),
}  # fmt: skip
_STORED: dict[str, tuple[int, ...]] = {"TENSOR_STORE": (1,), "NHWC": (1,), "VEC": (4,), "DENSE": (1,), "PHASES": (1,)}
_PAIRED: dict[str, tuple[int, ...]] = {
    "INTERLEAVE_COLUMNS": (1,), "NHWC": (0,), "VEC": (1,), "DENSE": (0,), "PHASES": (1, PHASES), "W_MN_MAJOR": (0,),
}  # fmt: skip


def _is_listed(d: Mapping[str, int]) -> bool:
    three, dense, last, apart = d["PRODUCTS"] > 1, bool(d["DENSE"]), bool(d["NHWC"]), d["VEC"] == 1
    parts = d["OUT"] == FLOAT and d["BF16"]
    tile = ImplicitGemm(d["BLOCK_M"], d["BLOCK_N"], schedule="twin" if d.get("TWIN") else PIPELINES[d["PINGPONG"]])
    if tile not in ordinary_tiles(rarity(d), three, dense) or not written_so(d) or not d["STAGES"] or (d["PHASES"] > 1) == dense:
        return False
    if apart and dense and (last or d["LOAD_CHANNELS"] < 64):
        return False
    if d["TENSOR_STORE"] != (last and dense and d["WGMMA_N"] % 32 == 0 and not apart):
        return False
    if d["W_MN_MAJOR"] and (three or not last or d["LOAD_CHANNELS"] != 64 or apart or (d["OUT"] == FLOAT and not dense)):
        return False
    if tile.is_pingpong:
        return not (parts or d["INTERLEAVE_COLUMNS"])
    return not (tile.is_twin and (last or parts)) and (not parts or may_split(d))
