"""Grouped convolutions of channels-last arrays on tensor cores (``mma/grouped_nhwc.cu``)."""

from dataclasses import replace

import numpy as np
from modes import MODES, asked
from reference import ACTIVATIONS, dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.mma import grouped_nhwc as gn
from pycuda_conv.engines.mma.grouped_nhwc import GroupedNhwc

KINDS = [mode for mode in ("fp16 last", "bf16 last", "tf32 last") if mode in MODES]
#: 2 to 64 channels a group; groups that fill no unit, and units that fill no block; groups that begin between multiples of 16 bytes; other
#: numbers of channels in than out; strides, dilation, uneven and wide padding; small images, one axis, 1x1; one group.
FORWARD = [
    fprop((2, 32, 9, 11), (32, 4, 3, 3), padding=1, groups=8), fprop((1, 40, 7, 6), (40, 2, 3, 3), padding=1, groups=20),
    fprop((2, 40, 13, 10), (40, 8, 3, 3), padding=1, stride=2, groups=5), fprop((1, 48, 9, 8), (48, 16, 3, 3), padding=2, dilation=2, groups=3),
    fprop((1, 72, 8, 9), (72, 24, 3, 3), padding=1, groups=3), fprop((1, 96, 6, 7), (96, 48, 3, 3), padding=(1, 2), groups=2, bias=False),
    fprop((1, 64, 9, 8), (64, 32, 5, 5), padding=2, stride=(2, 1), groups=2), fprop((1, 128, 5, 5), (128, 64, 3, 3), padding=1, groups=2),
    fprop((2, 32, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), fprop((1, 16, 8, 8), (48, 4, 3, 2), padding=1, groups=4),
    fprop((1, 24, 6, 6), (24, 3, 3, 3), padding=1, groups=8), fprop((2, 24, 5, 9), (24, 12, 3, 3), padding=1, groups=2),
    fprop((3, 32, 50), (32, 4, 5), padding=2, groups=8), fprop((2, 48, 33), (24, 12, 3), stride=2, groups=4),
    fprop((2, 48, 5, 6), (72, 8, 1, 1), groups=6), fprop((3, 32, 9, 7), (32, 16, 1, 1), stride=2, groups=2),
    fprop((9, 32, 3, 3), (32, 8, 3, 3), padding=1, groups=4), fprop((1, 16, 2, 3), (16, 4, 3, 3), padding=(5, 4), groups=4),
    fprop((1, 16, 21, 36), (16, 8, 3, 3), padding=1, stride=2, groups=2), fprop((4, 32, 3), (32, 8, 3), padding=1, groups=4),
    fprop((2, 16, 7, 9), (32, 8, 3, 3), padding=1, stride=(3, 2), groups=2), fprop((1, 144, 4, 5), (240, 48, 1, 1), groups=3),
    fprop((2, 16, 9, 11), (24, 16, 3, 3), padding=1), fprop((1, 24, 6, 13), (4, 24, 5, 5), stride=2, padding=2),
]
BACKWARD = [
    dgrad((2, 32, 9, 11), (32, 4, 3, 3), padding=1, groups=8), dgrad((1, 40, 7, 6), (40, 2, 3, 3), padding=1, groups=20),
    dgrad((2, 40, 7, 5), (40, 8, 3, 3), padding=1, stride=2, output_padding=1, groups=5), dgrad((1, 48, 5, 6), (48, 16, 1, 1), stride=2, groups=3),
    dgrad((1, 48, 9, 8), (48, 16, 3, 3), padding=2, dilation=2, groups=3), dgrad((1, 72, 6, 5), (72, 24, 3, 3), padding=1, groups=3),
    dgrad((1, 32, 4, 5), (32, 8, 4, 3), stride=3, padding=1, groups=2), dgrad((2, 32, 20), (32, 8, 5), stride=2, padding=2, groups=4),
    dgrad((2, 16, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), dgrad((1, 48, 8, 8), (48, 4, 3, 2), padding=1, groups=4),
    dgrad((1, 16, 5, 6), (16, 4, 3, 3), stride=2, dilation=3, groups=4), dgrad((1, 64, 6, 7), (64, 32, 3, 3), stride=(2, 1), padding=1, groups=2),
    dgrad((2, 16, 9, 8), (16, 4, 3, 3), padding=(4, 3), groups=4, bias=False), dgrad((1, 24, 5, 6), (24, 16, 3, 3), stride=2, padding=1),
    dgrad((3, 16, 1, 7), (16, 8, 3, 3), stride=2, padding=1, groups=2), dgrad((5, 16, 1, 4), (16, 4, 1, 2), stride=2, dilation=3, groups=4),
]  # fmt: skip
#: Tiles of one row group and of several, of one unit and of more than there may be, of several images, narrower and wider than a product.
TILES = (GroupedNhwc(2, 1, 8, 11), GroupedNhwc(1, 1, 4, 5), GroupedNhwc(4, 2, 4, 7), GroupedNhwc(2, 3, 12, 3), GroupedNhwc(1, 1, 8, 32))


def tiles(case, mode):
    """All that run it."""
    return [config for config in TILES if gn.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode) for case in (*FORWARD, *BACKWARD) for mode in KINDS if gn.TAKES.why_not(asked(case, mode)) is None]
#: Each case in a mode, by turns, with two tiles.
SOME = [run for i, case in enumerate((*FORWARD, *BACKWARD)) if (runs := [run for run in PLANNED if run[0] is case]) for run in [runs[i % len(runs)]]]
NOT_FINITE = [
    fprop((2, 32, 6, 7), (32, 4, 3, 3), padding=1, groups=8, bias=False), fprop((2, 24, 6, 7), (24, 12, 3, 3), padding=1, groups=2, bias=False),
    fprop((2, 32, 6, 7), (32, 16, 3, 3), padding=1, groups=2, bias=False), dgrad((2, 32, 6, 7), (32, 2, 3, 3), padding=1, groups=16, bias=False),
    dgrad((2, 32, 5, 4), (32, 4, 3, 3), padding=1, stride=2, groups=8, bias=False),
]  # fmt: skip
LARGE = fprop((9, 256, 28, 30), (256, 8, 3, 3), padding=1, groups=32)
BASE = FORWARD[0]


def with_nan(case, dtype):
    """A NaN that another group must not meet."""
    arrays = case.integers(dtype)
    arrays[0][1, 5, 3, 2] = np.nan
    return arrays


CASES = Cases(
    engine=gn,
    kernel="grouped_nhwc",
    runs=[(*run, found[(PLANNED.index(run) + more) % len(found)]) for run in SOME for found in [tiles(*run)] for more in (0, 1)[: 1 + (len(found) > 1 and SOME.index(run) % 4 == 0)]],
    gpu=[
        *((*run, config) for run in PLANNED for config in tiles(*run)[:3]),
        *((case, mode, config) for case in (LARGE, replace(LARGE, transposed=True)) for mode in KINDS for config in (GroupedNhwc(2, 1, 4, 30), GroupedNhwc(4, 1, 4, 15))),
    ],
    grids=[(*SOME[4], tiles(*SOME[4])[0])],
    orders=[(*run, found, 1) for run in SOME[::5] if len(found := tiles(*run)) > 1],
    finished=[(case, mode, TILES[0], ACTIVATIONS if case is BASE and mode == KINDS[-1] else ("relu",)) for case in (BASE, FORWARD[11], BACKWARD[2]) for mode in KINDS if (case, mode) in PLANNED],
    not_finite=[(case, KINDS[i % len(KINDS)], GroupedNhwc(2, 1, 8, 7)) for i, case in enumerate(NOT_FINITE)],
    not_finite_gpu=[(case, mode, GroupedNhwc(2, 1, 8, 7)) for case in NOT_FINITE for mode in KINDS],
    broken=[
        Broken((BASE, "fp16 last", GroupedNhwc(1, 1, 4, 5)), [
            ("copies_wait<1>();", "copies_wait<2>();"), ("slot ^= 1", "slot ^= 0"), ("    __syncthreads();  // all have read it: its place is filled next\n", ""),
            ("q >= (int)shape.q) continue;", "q > (int)shape.q) continue;"),
        ], seeds=range(8), multiprocessors=1),
        Broken((NOT_FINITE[0], KINDS[0], GroupedNhwc(2, 1, 8, 7)), [("if (shape.mixed &&", "if (false &&")], arrays=with_nan),
    ],
    refused=[
        (BASE, "fp16", GroupedNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", GroupedNhwc(), "precision='tf32'"),
        (fprop((0, 32, 4, 4), (32, 4, 1, 1), groups=8), "fp16 last", GroupedNhwc(), "nothing to compute"),
        (fprop((2, 32, 4, 4, 4), (32, 4, 1, 1, 1), groups=8), "fp16 last", GroupedNhwc(), "two spatial axes"),
        (fprop((2, 20, 4, 4), (20, 4, 1, 1), groups=5), "fp16 last", GroupedNhwc(), "by 16 bytes"),
        (fprop((2, 16, 4, 4), (6, 8, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "four channels at once"),
        (fprop((2, 24, 4, 4), (54, 8, 1, 1), groups=3), "fp16 last", GroupedNhwc(), "four channels at once"),
        (fprop((2, 400, 4, 4), (16, 200, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "at most 128 channels"),
        (fprop((2, 16, 2**15, 2**15), (16, 8, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "32 bits"),
        (BASE, "fp16 last", GroupedNhwc(TILE_P=6), "multiple of 4"), (BASE, "fp16 last", GroupedNhwc(3), "UNITS must be one of"),
        (fprop((2, 480, 4, 4), (16, 120, 1, 1), groups=4), "fp16 last", GroupedNhwc(4), "up to 512 bytes"),
        (BASE, "fp16 last", GroupedNhwc(4, 8, 16, 64), "bytes of shared memory"),
        (fprop((2**21, 1024, 10, 10), (1024, 2, 3, 3), padding=1, groups=512), "fp16 last", GroupedNhwc(1, 1, 4, 1), "larger than"),
    ],
    chosen=[
        (make(2, (32, channels, size, size), (channels, channels // groups, 3, 3), padding=1, groups=groups, dtype="float16", layout="NHWC"), True)
        for channels, size, groups in ((128, 56, 32), (256, 28, 32), (512, 14, 32), (240, 28, 30)) for make in (ConvProblem.forward, ConvProblem.transposed)
    ],
    layers=Layers(
        ["grouped"], [("fprop", ("float16", "fp32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC")), ("fprop", ("float32", "tf32", "NHWC"))],
        each=12, least=25, architectures=("sm_90a", "sm_80"),
    ),
    devices={((8, 0), "cuda"): True, ((10, 0), "cuda"): True, ((7, 5), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(*run), tiles(*run)[0]) for run in PLANNED],
)  # fmt: skip
