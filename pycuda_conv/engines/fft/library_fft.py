"""Large filters by a library's Fourier transforms in float64, and ``cu/fft/library_fft.cu``: elements are as right as sums of products.

The library is scipy's or numpy's in the host's memory (OpenCL), CuPy's or torch's on a GPU (cuFFT). Any filter, stride, dilation and
number of axes is taken, and gradients by the filter too. ``docs/lab/transforms.md`` says when a result is a sum of products instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from pycuda_conv.engines.base import BY_RULE, Config, VariantSet, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_strides, needs_64_bits
from pycuda_conv.engines.limits import NOT_EMPTY, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, OPERANDS, WEIGHT, WORKSPACE, Arena, Schedule
from pycuda_conv.engines.variants import portable, portable_choices
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch, LibraryCall
from pycuda_conv.runtime.transforms import Transforms, good_length
from pycuda_conv.runtime.transforms.host import host_library


@dataclass(frozen=True)
class LibraryFft(Config):
    """Transforms by a library; the size of blocks follows from the problem."""

CONFIGS, LAYOUTS, MOST_VARIANTS = (LibraryFft,), ("NCHW", "CNHW"), {"cuda": 4, "opencl": 4}
COST = costs("fft.library_fft")
LibraryFftArguments = kernel_struct("library_fft", "LibraryFftArguments")
#: Threads of a block of library_fft.cu.
THREADS = 256
#: Filters of fewer taps are left to other engines, unless the configuration is given.
LEAST_TAPS = 64
#: Problems of fewer products take less time than a library's call on a GPU.
LEAST_MACS = 1 << 29
#: Bytes of spectra, blocks and sums that are held at a time.
MOST_BYTES = 12 << 30
#: The error of a result, relative to the sum of its products' magnitudes, that counts as right: half of a float's rounding. For float64
#: it is half of the bound of a sum of products (:mod:`pycuda_conv.rounding`), without the root of the depth.
ACCURACY = {"float16": 2.0**-24, "bfloat16": 2.0**-24, "float32": 2.0**-24, "float64": 2.0**-51}


def unsupported(device: Device) -> str | None:
    there = device.backend == "opencl" or bool(getattr(device, "transforms", ""))  # a host has numpy's
    return None if there else f"no library of Fourier transforms serves {device.name}"


def _too_large(problem: ConvProblem, config: LibraryFft) -> str | None:
    """By what is held, roughly: the filter's spectrum, the padded image, blocks under way, sums."""
    args = transforms(problem)
    filters = args.groups * args.written * args.read
    spectrum = 8 * math.prod(args.length)
    under_way = min(args.images * math.prod(args.blocks), 8) * 3 * spectrum * args.groups * max(args.read, args.written)
    nbytes = (1 + args.magnitudes) * filters * spectrum + under_way + 8 * math.prod(args.sums_shape)
    return f"its spectra and blocks take {nbytes:,} bytes; at most {MOST_BYTES:,} are taken" if nbytes > MOST_BYTES else None


# ---- how it is made of transforms


@lru_cache(maxsize=1024)  # the planner asks several times
def transforms(problem: ConvProblem) -> Transforms:
    """How `problem`, as it is launched, is made of transforms."""
    axes = [i for i in range(3) if not problem.input_size[i] == problem.filter_size[i] == problem.output_size[i] == 1] or [2]
    forward, groups = problem.direction == "fprop", problem.groups
    read, written = problem.operand_channels // groups, problem.result_channels // groups

    def along(values: tuple[int, int, int]) -> tuple[int, ...]:
        return tuple(values[i] for i in axes)

    size, taps, results = along(problem.operand_size), along(problem.filter_size), along(problem.result_size)
    dilation, pad = along(problem.dilation), along(problem.padding_before)
    ones = (1,) * len(axes)
    stride, apart = (along(problem.stride), ones) if forward else (ones, along(problem.stride))
    reach = tuple(d * (r - 1) + 1 for r, d in zip(taps, dilation, strict=True))
    first = tuple(-p if forward else p - (r - 1) for p, r in zip(pad, reach, strict=True))
    wanted = tuple((n - 1) * s + 1 for n, s in zip(results, stride, strict=True))
    filters, products = groups * written * read, float(problem.N * groups * read * written)
    whole = tuple(map(_whole, size, apart, first, reach, wanted, stride))
    length = _lengths(reach, wanted, stride, whole, filters, problem.N * groups * (read + written), products)
    used = tuple(map(_used, length, reach, wanted, stride, whole))
    blocks = tuple(ceil(n, u) for n, u in zip(wanted, used, strict=True))
    if problem.layout == "CNHW":  # [channel][group][image] by [channel][group][written]: see ConvProblem.launched
        memory = (read, groups, problem.N), (2, 1, 0), (read, groups, written), (1, 2, 0), (groups, written, problem.N), (2, 0, 1)
    elif forward:
        memory = (problem.N, groups, read), (0, 1, 2), (groups, written, read), (0, 1, 2), (problem.N, groups, written), (0, 1, 2)
    else:
        memory = (problem.N, groups, read), (0, 1, 2), (groups, read, written), (0, 2, 1), (problem.N, groups, written), (0, 1, 2)
    depth = read * math.prod(taps)
    wide, norms = problem.dtype == "float64", problem.algorithm == "fft"  # then transforms are taken as they are
    accuracy = math.inf if norms else ACCURACY[problem.dtype] * (math.sqrt(depth) if wide else 1)
    return Transforms(
        problem.N, groups, read, written, *memory, size, taps, results, apart, dilation, stride, not forward, first,
        length, used, blocks, accuracy, wide and not norms, problem.storage,
    )  # fmt: skip


def _cost(length: tuple[int, ...], blocks: int, filters: int, planes: int, products: float) -> float:
    """Operations, or about so many, of all transforms with their products."""
    numbers = math.prod(length)
    far = COST.FAR if 8 * numbers > COST.CACHE_BYTES else 1.0
    passes = math.log2(max(numbers, 2)) + COST.PASSES
    return float(blocks * COST.OF_BLOCK + far * numbers * ((blocks * planes + filters) * passes + 2 * blocks * products))


def _whole(size: int, apart: int, first: int, reach: int, wanted: int, stride: int) -> int:
    """A length of transforms that gives all results along an axis at once.

    What the last results meet behind the transform's end they meet at its start: that may be as many pixels as the zeros in front.
    """
    in_front, results = max(0, -first), ceil(wanted, stride) * stride
    met = results + reach - 1
    return good_length(max(results, reach, met - in_front, min(in_front + (size - 1) * apart + 1, met)))


def _used(length: int, reach: int, wanted: int, stride: int, whole: int) -> int:
    """The results along an axis that a transform gives."""
    return ceil(wanted, stride) * stride if length == whole else (length - reach + 1) // stride * stride


def _lengths(
    reach: tuple[int, ...], wanted: tuple[int, ...], stride: tuple[int, ...], whole: tuple[int, ...], filters: int, planes: int,
    products: float,
) -> tuple[int, ...]:
    """The lengths of transforms that should take the least time."""
    choices = []
    for r, s, most in zip(reach, stride, whole, strict=True):
        least = max(r + s - 1, 32 if len(reach) > 1 else 1024)
        some = {good_length(max(int(f * r), least)) for f in (1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 12)}
        choices.append(sorted({length for length in some if length < most} | {most})[-12 if len(reach) < 3 else -5 :])

    def time(length: tuple[int, ...]) -> float:
        counts = [ceil(n, u) for n, u in zip(wanted, map(_used, length, reach, wanted, stride, whole), strict=True)]
        return _cost(length, math.prod(counts), filters, planes, products)

    return min(product(*choices), key=time)


def schedule(problem: ConvProblem, config: LibraryFft, device: Device, with_moments: bool = False) -> Schedule:
    """The library's call, and the launch that checks and finishes what it has made."""
    args, scratch = transforms(problem), Arena(WORKSPACE)
    if device.backend == "cuda" and problem.algorithm == "fft" and problem.dtype != "float64":
        args = replace(args, single=True)
    (_, sums), (_, limits) = (scratch.take(8 * math.prod(shape)) for shape in (args.sums_shape, args.limits_shape))
    buffers, blocks = (INPUT, WEIGHT, WORKSPACE), math.prod(args.blocks) * args.images
    call = LibraryCall(getattr(device, "transforms", "") or host_library(), {}, blocks, 1, buffers, (), transforms=(args, sums, limits))
    return Schedule.plain([[call], [_finish(problem, args, sums, limits)]], scratch.used)


def _finish(problem: ConvProblem, args: Transforms, sums: int, limits: int) -> KernelLaunch:
    w_group, w_written, w_read, _ = filter_strides(problem)
    forward, size = problem.direction == "fprop", math.prod(problem.result_shape)
    axes = [i for i in range(3) if not problem.input_size[i] == problem.filter_size[i] == problem.output_size[i] == 1] or [2]

    def of_axes(prefix: str, values: tuple[int, ...], missing: int) -> dict[str, int]:
        by_axis = dict(zip(axes, values, strict=True))
        return {prefix + "dhw"[i]: by_axis.get(i, missing) for i in range(3)}

    blocks = of_axes("blocks_", args.blocks, 1)
    steps = [s if forward else 1 for s in problem.stride]
    firsts = [-pad if forward else pad for pad in problem.padding_before]
    tap = [d if forward else -d for d in problem.dilation]
    apart = [1 if forward else s for s in problem.stride]
    finish_args = arguments(
        LibraryFftArguments, problem, written=args.written, sums_at=sums // 8, limits_at=limits // 8, blocks=math.prod(args.blocks),
        blocks_h=blocks["blocks_h"], blocks_w=blocks["blocks_w"], **of_axes("used_", args.held, 1), **by_axis("step_", steps),
        **by_axis("first_", firsts), **by_axis("tap_", tap), **by_axis("apart_", apart), channels=args.read, w_group=w_group,
        w_written=w_written, w_read=w_read,
    )  # fmt: skip
    defines = portable(problem.dtype, needs_64_bits(problem), THREADS)
    buffers = *OPERANDS, WORKSPACE
    return KernelLaunch("library_fft", defines, ceil(size, THREADS), THREADS, buffers, (), arguments=finish_args)


def variants(device: Device) -> Iterator[VariantSet]:
    yield VariantSet("library_fft", portable_choices(THREADS))


TAKES = Takes(NOT_EMPTY)
LEGAL = Tiles(TAKES, LibraryFft, _too_large, blocks=lambda problem, _: ceil(math.prod(problem.result_shape), THREADS))


def time(problem: ConvProblem, config: LibraryFft, device: Device) -> float:
    args = transforms(problem)
    filters, planes = args.groups * args.written * args.read, args.images * args.groups * (args.read + args.written)
    products, blocks, runs = float(args.images * args.groups * args.read * args.written), math.prod(args.blocks), 1 + args.magnitudes
    if device.backend == "cuda":
        numbers = math.prod(args.length) * (blocks * (planes + COST.GPU_PRODUCT * products) + filters)
        return runs * (COST.GPU_CALL_TIME + spread(numbers * 8 * COST.GPU_PASSES / 2 / COST.GPU_MEMORY, device.multiprocessors))
    return COST.CALL_TIME + runs * _cost(args.length, blocks, filters, planes, products) * COST.UNIT_TIME / max(device.multiprocessors, 1)


def worthwhile(problem: ConvProblem, device: Device) -> bool:
    """Whether transforms may take less time, or are asked for; without a look at the library."""
    if problem.algorithm == "fft":
        return True
    many = math.prod(problem.filter_size) >= LEAST_TAPS and (device.backend != "cuda" or problem.macs >= LEAST_MACS)
    return many and not problem.is_empty and (problem.dtype != "float64" or _mostly_right(problem))


def _mostly_right(problem: ConvProblem) -> bool:
    """Whether transforms of normal numbers in float64 are as right as sums of products in float64."""
    args, taps = transforms(problem), math.prod(problem.filter_size)
    return args.error * math.sqrt(math.prod(args.length) * taps) <= 0.4 * args.accuracy * taps


def configs(problem: ConvProblem, device: Device) -> Iterator[LibraryFft]:
    """Its one configuration, for filters of many taps."""
    config = LibraryFft()
    if worthwhile(problem, device) and LEGAL.refusal(problem, config) is None:
        yield config


def choose(problem: ConvProblem, device: Device) -> tuple[float, LibraryFft] | None:
    """Its configuration. On a host it is chosen by rule where it should take less time than sums of products, whose models are of GPUs."""
    for config in configs(problem, device):
        us = COST.CLEARLY * time(problem, config, device)
        if device.backend == "cuda":
            return us, config
        shared = problem.operand_channels > problem.groups and problem.result_channels > problem.groups
        direct = problem.macs * (COST.SHARED_TIME if shared else COST.DIRECT_TIME) / max(device.multiprocessors, 1)
        if problem.algorithm == "fft" or us < direct:
            return BY_RULE, config
    return None


