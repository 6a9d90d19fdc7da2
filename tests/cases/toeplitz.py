"""Depthwise layers of 16 bits on tensor cores (``depthwise/toeplitz.cu``)."""

import reference
from alike import sharing
from modes import MODES, asked
from reference import ACTIVATIONS, dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.depthwise import toeplitz as dt
from pycuda_conv.engines.depthwise.toeplitz import DepthwiseToeplitz

KINDS = [mode for mode in ("fp16", "bf16", "fp16 last", "bf16 last") if mode in MODES]
#: Rows of every size against eights and words, several planes of a unit and bands of one, the last unit smaller; strides, also different
#: ones; uneven padding, such as is wider than the filter, and rows that nothing meets; dilation; filters that meet one sixteen of columns
#: and two; multipliers; lines; gradients. Channels last also more channels than a block's, and spans of columns.
SHAPES = [
    fprop((2, 9, 7, 7), (9, 1, 3, 3), padding=1, groups=9), fprop((1, 4, 14, 13), (4, 1, 5, 5), padding=2, groups=4), fprop((2, 4, 9, 11), (4, 1, 3, 3), padding=1, stride=2, groups=4),
    fprop((1, 4, 15, 9), (4, 1, 7, 7), padding=((3, 2), (0, 5)), stride=2, groups=4), fprop((2, 3, 9, 10), (6, 1, 3, 3), padding=1, groups=3), fprop((1, 2, 70, 150), (2, 1, 5, 5), padding=(0, 2), groups=2),
    fprop((1, 4, 3, 3), (4, 1, 3, 3), padding=(5, 4), groups=4), fprop((2, 3, 20, 21), (3, 1, 9, 9), padding=4, groups=3), fprop((1, 4, 33, 40), (4, 1, 13, 13), padding=6, groups=4),
    fprop((1, 4, 30, 41), (4, 1, 3, 5), padding=(1, 4), dilation=(2, 3), stride=(3, 2), groups=4), fprop((1, 3, 20, 17), (6, 1, 2, 9), padding=(0, 8), groups=3), fprop((1, 1, 70, 64), (1, 1, 7, 7), padding=3, groups=1),
    fprop((1, 2, 9, 100), (2, 1, 1, 17), stride=2, padding=(0, 8), groups=2), fprop((2, 3, 40), (3, 1, 9), padding=4, groups=3), fprop((1, 1, 5, 5), (1, 1, 3, 3), padding=(0, 20), groups=1),
    fprop((1, 3, 1, 5), (3, 1, 3, 3), padding=1, groups=3), dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((2, 4, 9, 12), (4, 1, 7, 7), padding=((3, 1), (6, 0)), groups=4),
    fprop((2, 20, 20, 21), (20, 1, 9, 9), padding=4, groups=20), fprop((1, 4, 70, 64), (4, 1, 7, 7), padding=3, groups=4), fprop((1, 24, 29, 30), (24, 1, 7, 7), padding=3, stride=2, groups=24),
    dgrad((1, 4, 9, 11), (4, 1, 3, 3), stride=2, padding=1, groups=4), dgrad((2, 20, 14, 14), (20, 1, 7, 7), stride=2, padding=3, groups=20), dgrad((1, 8, 37, 33), (8, 1, 5, 5), stride=2, padding=((2, 1), (2, 3)), groups=8),
    dgrad((1, 4, 20, 9), (4, 1, 2, 3), stride=2, padding=(0, 2), groups=4), dgrad((1, 4, 9, 20), (4, 1, 13, 13), stride=2, padding=6, groups=4), dgrad((1, 1, 90, 40), (1, 1, 4, 16), stride=2, padding=(1, 0), groups=1),
    fprop((1, 4, 40, 60), (4, 1, 3, 3), padding=(70, 1), groups=4),
    dgrad((1, 5, 9, 10), (5, 1, 3, 3), padding=(4, 3), groups=5), dgrad((1, 4, 20, 33), (4, 1, 3, 4), dilation=(1, 3), padding=(1, 2), groups=4), dgrad((1, 1, 90, 60), (1, 1, 3, 3), padding=1, groups=1),
]  # fmt: skip


def tiles(case, mode):
    """All that run it."""
    return [config for config in map(DepthwiseToeplitz, dt.UNITS[asked(case, mode).layout]) if dt.refusal(asked(case, mode), config) is None]


#: Each case in each type, with a unit of its own.
RUNS = [(case, mode, found[(i + j) % len(found)]) for i, case in enumerate(SHAPES) for j, mode in enumerate(KINDS) if (found := tiles(case, mode))]


FINITE = [fprop((2, 4, 9, 12), (4, 1, 3, 3), padding=1, groups=4), dgrad((2, 4, 9, 10), (4, 1, 3, 3), padding=1, groups=4)]
FINISHED = fprop((2, 8, 7, 10), (8, 1, 3, 3), padding=1, groups=8)

CASES = Cases(
    engine=dt,
    runs=RUNS if reference.all_texts else sharing([[run for run in RUNS if run[0] is case] for case in SHAPES]),
    gpu=RUNS,
    unseen=[("BORDERED", 1)],  # test_packed_borders.py
    orders=[(SHAPES[number], mode, found, 1) for number in (1, 2, 16) for mode in KINDS if len(found := tiles(SHAPES[number], mode)) > 1],
    finished=[(FINISHED, mode, tiles(FINISHED, mode)[0], ACTIVATIONS[i::4]) for i, mode in enumerate(KINDS)],
    not_finite=[(FINITE[(i + i // 2) % 2], mode, tiles(FINITE[0], mode)[0]) for i, mode in enumerate(KINDS)],
    not_finite_gpu=[(case, mode, tiles(case, mode)[0]) for case in FINITE for mode in KINDS],
    broken=[  # barriers, and the ends of runs, rows and columns
        Broken((dgrad((3, 9, 7, 9), (9, 1, 3, 3), padding=(0, 1), groups=9), "fp16", DepthwiseToeplitz(12)), [
            ("copies_wait<0>();\n  __syncthreads();", "copies_wait<0>();"), ("  __syncthreads();\n\n#if LAST\n  for", "#if LAST\n  for"), ("i >= y_shift && i + EIGHT <= y_shift + y_run", "true"),
            ("(unsigned)h < (unsigned)h_count ? row_at : none", "row_at"), ("from % 2 ? words[i] >> 16", "false ? words[i] >> 16"), ("if (x_size % 2 &&", "if (false &&"),
            ("2 * i < count ? 0xffff : 0", "~0u"), ("arg.flipped ? last - number : number", "number"),
        ], seeds=range(1, 4)),
    ],
    refused=[
        (fprop((1, 4, 9, 9), (4, 2, 3, 3), padding=1, groups=2), "fp16", DepthwiseToeplitz(), "one input channel a group"), (fprop((1, 4, 9, 9, 9), (4, 1, 3, 3, 3), groups=4), "fp16", DepthwiseToeplitz(), "two spatial axes"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), groups=4), "fp32", DepthwiseToeplitz(), "float16 and bfloat16"), (fprop((1, 4, 9, 9), (4, 1, 3, 3), stride=3, groups=4), "fp16", DepthwiseToeplitz(), "strides of 1 and 2"),
        (dgrad((1, 4, 9, 9), (4, 1, 3, 3), stride=(1, 2), groups=4), "fp16", DepthwiseToeplitz(), "one stride"), (dgrad((1, 8, 9, 9), (8, 1, 3, 3), groups=4), "fp16", DepthwiseToeplitz(), "as many channels out as in"),
        (fprop((0, 4, 9, 9), (4, 1, 3, 3), groups=4), "fp16", DepthwiseToeplitz(), "nothing to compute"), (fprop((1, 4, 9, 39), (4, 1, 3, 31), groups=4), "fp16", DepthwiseToeplitz(), "at most 32 columns"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), groups=4), "fp16", DepthwiseToeplitz(7), "UNIT_KIB must be"), (fprop((1, 1, 99, 2000), (1, 1, 3, 3), groups=1), "fp16", DepthwiseToeplitz(12), "12 KiB of shared memory"),
    ],
    chosen=[
        (ConvProblem.forward(2, (16, 192, size, size), (192, 1, taps, taps), padding=taps // 2, groups=192, dtype=dtype), True)
        for size, taps in ((128, 7), (112, 9), (64, 5)) for dtype in ("float16", "bfloat16")
    ],
    layers=Layers(["depthwise"], [("fprop", ("float16", "fp32", "NCHW")), ("dgrad", ("bfloat16", "fp32", "NCHW")), ("fprop", ("bfloat16", "fp32", "NHWC"))], architectures=("sm_90a", "sm_80")),
    devices={((7, 5), "cuda"): False, ((8, 0), "cuda"): True, ((0, 0), "opencl"): False},
    compiled=[(asked(*run[:2]), run[2]) for run in RUNS],
    architectures=("sm_90a", "sm_80"),
    spills_sm80=8,
)  # fmt: skip
