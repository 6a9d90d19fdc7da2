"""The launches around the products of ``cu/hopper/wgrad.cu``: copies before them, and the sums of their parts behind them.

A second launch adds the sums of several runs: ``cu/hopper/wgrad_reduce.cu`` if the gradient's taps are fastest in memory and the runs are
few, ``cu/hopper/wgrad_add.cu`` otherwise.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.base import ConvProblem, kernel_struct
from pycuda_conv.engines.geometry import arguments, ceil, forward_of
from pycuda_conv.engines.hopper.wgrad_form import WgradNhwc, as_loaded, fold_level, fold_taps, position_count, word_elements
from pycuda_conv.engines.layout.fold_channels import FoldChannelsArguments, zeros_behind
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT
from pycuda_conv.engines.tensor_cores import ELEMENTS
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch

REDUCE_TAPS, REDUCED_CHANNELS = 16, 64  # the most taps, and the channels, of a block of hopper/wgrad_reduce.cu
ADD_THREADS = 256  # of a block of hopper/wgrad_add.cu
LONGEST, MOST_LANES = 8, 32  # the most runs that a thread adds before more threads share a result, and the most threads that do
WgradNhwcAddArguments = kernel_struct("hopper_wgrad_add", "WgradNhwcAddArguments")
WgradNhwcReduceArguments = kernel_struct("hopper_wgrad_reduce", "WgradNhwcReduceArguments")


@lru_cache(maxsize=1024)
def channel_copies(problem: ConvProblem) -> tuple[tuple[int, Any], ...]:
    """The arrays that are copied into the channels of :func:`as_loaded`: each one's buffer, and the arguments of its copy."""
    forward, loaded, level = forward_of(problem), as_loaded(problem), fold_level(problem)
    found: list[tuple[int, Any]] = []
    if loaded.C != forward.C:
        _, r, s = (tap if i >= 3 - level else 1 for i, tap in enumerate(forward.filter_size))
        (_, h, w), (depth, p, q) = forward.input_size, loaded.input_size
        steps = ("stride", forward.stride, 1), ("pad", forward.padding_before, 0), ("dilation", forward.dilation, 1)
        within = {
            f"{name}_{axis}": values[i] if i >= 3 - level else instead
            for name, values, instead in steps for i, axis in ((1, "h"), (2, "w"))
        }
        chunks = loaded.C // word_elements(problem)
        found.append((INPUT, arguments(
            FoldChannelsArguments, words=forward.N * depth * p * q * chunks, chunks=chunks, h=h, w=w, p=p, q=q, channels=forward.C,
            folded=forward.C * r * s, fold_s=s, **within,
        )))  # fmt: skip
    if loaded.K != forward.K:
        found.append((WEIGHT, zeros_behind(problem, position_count(problem), forward.K, loaded.K)))
    return tuple(found)


def part_form(problem: ConvProblem, config: WgradNhwc) -> ConvProblem:
    """The convolution whose filter has the layout of a part."""
    return fold_taps(problem, 0) if config.FLIPPED else as_loaded(problem)


def part_sums(problem: ConvProblem, config: WgradNhwc) -> int:
    """Sums of a part: those of dw, and zeros for the channels that fill x up."""
    form = part_form(problem, config)
    return forward_of(problem).K * (form.C // form.groups) * math.prod(form.filter_size)


def reduce_parts(problem: ConvProblem, config: WgradNhwc, parts: BufferSlice) -> KernelLaunch:
    """The launch that adds few parts if the result's taps are fastest."""
    loaded, own = part_form(problem, config), problem.N
    taps, pitch = math.prod(loaded.filter_size), loaded.C // problem.groups
    folds = math.prod(problem.result_size) // taps
    channels = own * folds
    tiles_t = ceil(taps, REDUCE_TAPS)
    args = arguments(
        WgradNhwcReduceArguments, size=part_sums(problem, config), splits=config.SPLIT, taps=taps, channels=channels, pitch=pitch, own=own,
        folds=folds, tile_taps=ceil(taps, tiles_t),
        tiles_c=ceil(channels, REDUCED_CHANNELS), tiles_t=tiles_t,
    )  # fmt: skip
    grid = problem.K * args.tiles_c * args.tiles_t
    defines = {"TYPE": ELEMENTS[problem.dtype]}
    return KernelLaunch("hopper_wgrad_reduce", defines, grid, 32 * args.tile_taps, (parts, RESULT), (), arguments=args)


def add_parts(problem: ConvProblem, config: WgradNhwc, parts: BufferSlice, taps_fastest: bool) -> KernelLaunch:
    """The launch that adds the parts if the result's channels are fastest, or the parts are many."""
    loaded = part_form(problem, config)
    taps, pitch, size = math.prod(loaded.filter_size), loaded.C // problem.groups, part_sums(problem, config)
    folds = math.prod(problem.result_size) // taps
    each = 4 if pitch % 4 == 0 else 2
    lanes = lane_count(config)
    width = ADD_THREADS // lanes
    args = arguments(
        WgradNhwcAddArguments, size=size, splits=config.SPLIT, width=width.bit_length() - 1, range=ceil(config.SPLIT, lanes),
        pitch=pitch // each, channels=problem.N * folds, taps_fastest=int(taps_fastest), taps=taps, own=problem.N, folds=folds,
    )  # fmt: skip
    defines = {"TYPE": ELEMENTS[problem.dtype], "EACH": each}
    return KernelLaunch("hopper_wgrad_add", defines, ceil(size, each * width), ADD_THREADS, (parts, RESULT), (), arguments=args)


def lane_count(config: WgradNhwc) -> int:
    """Ranges that the runs are cut into for adding, one a thread: a power of two."""
    return min(MOST_LANES, 1 << (ceil(config.SPLIT, LONGEST) - 1).bit_length())
