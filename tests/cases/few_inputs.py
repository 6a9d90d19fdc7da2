"""Convolutions of few channels, channels last and in NCHW (``mma/few_inputs.cu``)."""

from dataclasses import replace

import numpy as np
from alike import sharing
from modes import MODES, asked
from reference import ACTIVATIONS, dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.mma import few_inputs as fi
from pycuda_conv.engines.mma.few_inputs import FewInputs

LAST = [mode for mode in MODES if "last" in mode]
PLANES = [mode for mode in MODES if "last" not in mode]
#: Tails of channels, rows and columns; pixels that begin at odd elements, and rows of taps that end there; strides, padding, dilation, one
#: to three axes; taps that are beside one another and apart; gradients, which take the taps in reverse.
SHAPES = [
    fprop((2, 3, 19, 40), (20, 3, 3, 3), stride=2, padding=1), fprop((1, 3, 15, 37), (24, 3, 3, 3), padding=1), fprop((1, 1, 20, 33), (16, 1, 7, 7), stride=2, padding=3),
    fprop((2, 4, 9, 12), (70, 4, 4, 4), stride=4), fprop((1, 3, 9, 50), (33, 3, 5, 5), padding=2), fprop((2, 1, 300), (32, 1, 10), stride=5), fprop((1, 2, 90), (13, 2, 3), padding=1),
    fprop((1, 3, 5, 12, 14), (40, 3, 3, 3, 3), padding=1), fprop((1, 4, 14, 15), (12, 4, 3, 3), dilation=2, padding=2), fprop((1, 5, 14, 15), (9, 5, 2, 3), dilation=(2, 1), stride=(3, 1), padding=1),
    fprop((1, 2, 11, 12), (48, 2, 3, 2), padding=((0, 2), (3, 1))), fprop((40, 1, 3, 3), (128, 1, 1, 1)),
    dgrad((2, 3, 9, 8), (3, 40, 3, 3), padding=1), dgrad((1, 1, 12, 20), (1, 16, 5, 5), padding=2), dgrad((1, 4, 7, 9), (4, 20, 3, 2), dilation=(2, 3), padding=1), dgrad((1, 2, 3, 4, 9), (2, 24, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip
#: Those of planes alone: groups, more channels than the other layout's.
GROUPS = [
    fprop((2, 12, 9, 18), (20, 3, 3, 3), padding=1, groups=4), fprop((1, 32, 7, 20), (36, 16, 3, 3), padding=1, stride=2, groups=2), dgrad((1, 24, 6, 17), (24, 6, 3, 3), padding=1, groups=4),
    fprop((2, 17, 5, 24), (70, 17, 3, 1), padding=1), dgrad((1, 6, 4, 6, 9), (6, 3, 3, 3, 3), padding=1, groups=2),
]  # fmt: skip
EVERY = [FewInputs(block, columns) for block in fi.CHANNELS for columns in fi.COLUMNS]


def tiles(case, mode):
    """All that run it."""
    return [config for config in EVERY if fi.refusal(asked(case, mode), config) is None]


def runs(cases, modes):
    """Each case in each mode, with a tile of its own."""
    possible = ((i, case, j, mode, tiles(case, mode)) for i, case in enumerate(cases) for j, mode in enumerate(modes))
    return [(case, mode, found[(5 * i + 3 * j) % len(found)]) for i, case, j, mode, found in possible if found]


OF_LAST, OF_PLANES = runs(SHAPES, LAST), runs([*SHAPES, *GROUPS], PLANES)
FINITE = [replace(fprop((2, 3, 9, 10), (24, 3, 3, 3), padding=1), bias=False), replace(dgrad((2, 3, 6, 5), (3, 24, 3, 3), padding=1), bias=False)]
BASE = SHAPES[0]


def beside(case, dtype, channel=0):
    """An infinity beside a row of taps, which must not meet it."""
    arrays = case.normals(dtype, seed=2)
    arrays[0][0, channel, 5, 5] = np.inf
    return arrays


def finished():
    """Of pixels that are written at once and not; of planes by 16 bytes, by twos and one by one."""
    for i, mode in enumerate(LAST):
        yield fprop((2, 3, 7, 9), (24, 3, 3, 3), padding=1), mode, FewInputs(32, 16), ACTIVATIONS if i % 2 else ACTIVATIONS[::2]
        yield fprop((2, 3, 7, 9), (19, 3, 3, 3), padding=1), mode, FewInputs(32, 16), ACTIVATIONS[:2]
    for mode in PLANES:
        for width in (9, 10, 16):
            yield fprop((2, 3, 5, width), (19, 3, 3, 3), padding=1), mode, FewInputs(32, 16), ACTIVATIONS[width % 3 :: 3]


TAPS = fprop((2, 3, 31, 80), (20, 3, 3, 3), padding=1)
RANGED = fprop((4, 3, 3, 16), (40, 3, 2, 2), bias=False)
#: Halves lose bits of small numbers, and make a NaN of Inf: the plain cores compute those tiles again.
RANGES = ["images of their own ranges", "halves 2^-30", "small channels 2^-40"]

CASES = Cases(
    engine=fi,
    runs=sharing([[run for run in of if run[0] is case] for of in (OF_LAST, OF_PLANES) for case in (*SHAPES, *GROUPS)]),
    gpu=[*OF_LAST, *OF_PLANES],
    grids=[(case, LAST[-1], FewInputs(32, 16)) for case in (SHAPES[0], SHAPES[7])],
    orders=[(SHAPES[4], LAST[-1], tiles(SHAPES[4], LAST[-1]), 1), (SHAPES[4], PLANES[-1], tiles(SHAPES[4], PLANES[-1])[::3], 1)],
    finished=list(finished()),
    not_finite=[(FINITE[i % 2], mode, FewInputs(32, 16)) for i, mode in enumerate((*LAST, *PLANES))],
    not_finite_gpu=[(case, mode, FewInputs(32, 16)) for case in FINITE for mode in (*LAST, *PLANES)],
    ranged=[(RANGED, mode, FewInputs(48, 16), RANGES) for mode in ("fp32 last", "fp32")],
    broken=[
        Broken((TAPS, "fp16 last", FewInputs(32, 16)), [
            ("__syncthreads();  // the patch before has been read", ""), ("    __syncthreads();\n    if (arg.bordered)", "    if (arg.bordered)"),
            ("odd ? (uint32_t)arg.copy_at : now", "now"), ("copies_wait<1>();", "copies_wait<2>();"), ("(uint32_t)arg.stage_bytes - now);", "now);"),
            ("if (i >= (int)arg.words) at = mask = 0;", "if (i >= (int)arg.words) at = 0;"), ("/ NEIGHBOURS * 2 + k % 2", "/ 4 * 2 + k % 2"),
        ], seeds=range(1, 6), multiprocessors=1, arrays=beside),
        Broken((TAPS, "fp16 last", FewInputs(32, 16)), [("mask &= 0xffff0000;", "")], multiprocessors=1, arrays=lambda case, dtype: beside(case, dtype, 2)),
        # a row of taps ends in the middle of a word, or begins there
        Broken((replace(TAPS, options={"padding": 0}), "fp16 last", FewInputs(32, 16)), [("mask = 0xffff;", "mask = ~0u;")], seeds=range(1, 6), multiprocessors=1, arrays=beside),
    ],
    refused=[
        (replace(BASE, options={"groups": 3}, weight_shape=(21, 1, 3, 3)), "fp16 last", FewInputs(), "of one group"),
        (replace(BASE.problem("float16"), direction="wgrad"), FewInputs(), "takes arrays in the layouts"),
        (fprop((0, 3, 4, 4), (4, 3, 1, 1)), "fp16 last", FewInputs(), "nothing to compute"), (BASE.problem("float64"), FewInputs(), "float32, float16 and bfloat16 arrays"),
        (dgrad((2, 3, 4, 4), (3, 8, 3, 3), stride=2), "fp16 last", FewInputs(), "without stride"), (fprop((1, 3, 9, 9), (4, 3, 3, 3), dilation=3), "fp16 last", FewInputs(), "multiples of 4 bytes"),
        (fprop((1, 4, 2**15, 2**14), (4, 4, 3, 3)), "fp16 last", FewInputs(), "in 32 bits"), (BASE, "fp16 last", FewInputs(24), "BLOCK_N must be one of 16, 32, 48, 64"),
        (BASE, "fp16 last", FewInputs(64, 48), "COLUMNS must be one of 16"), (fprop((1, 4, 40, 40), (64, 4, 30, 30)), "fp16 last", FewInputs(), "bytes of shared memory"),
    ],
    chosen=[
        *((ConvProblem.forward(2, (32, 3, 224, 224), (32, 3, 3, 3), stride=2, padding=1, dtype=dtype, layout=layout), True) for dtype in ("float16", "bfloat16") for layout in ("NHWC", "NCHW")),
        # rows of an odd number of results would be written one by one: 466 us of an H100, and 177 by hopper/gemm.cu
        (ConvProblem.forward(1, (8, 1, 80000), (512, 1, 10), stride=5, dtype="float16"), False),
        (ConvProblem.forward(2, (8, 128, 56, 56), (128, 128, 3, 3), padding=1, dtype="float16", layout="NHWC"), False),
    ],
    layers=Layers(
        ["last", "first", "dense 3x3", "odd", "audio", "volume", "grouped"],
        [(way, (*kind, layout)) for layout in ("NHWC", "NCHW") for way, *kind in (("fprop", "float32", "tf32"), ("fprop", "bfloat16", "fp32"), ("dgrad", "float16", "fp32"))], each=4, least=20,
    ),
    devices={((7, 5), "cuda"): False, ((8, 0), "cuda"): True, ((0, 0), "opencl"): False},
    compiled=[(asked(BASE, mode), FewInputs(block)) for mode in (*LAST, *PLANES) for block in fi.CHANNELS],
    architectures=("sm_90a", "sm_80"),
    spills=160,  # before the first tile, and where an activation is called
)  # fmt: skip
