"""Convolutions and gradients by the input with few channels in their result (``mma/few_channels.cu``)."""

from dataclasses import replace

from alike import sharing
from modes import MODES, asked
from ranges import SCENARIOS
from reference import ACTIVATIONS, dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.mma import few_channels as fc
from pycuda_conv.engines.mma.few_channels import FewChannels

#: Tails of channels, rows and columns, taps in one column and in many, chunks of channels, strides, padding, dilation, phases of one and
#: several taps, and of none.
SHAPES = [
    fprop((2, 16, 19, 40), (1, 16, 7, 7), padding=3), fprop((2, 32, 9, 70), (2, 32, 3, 3), padding=1), fprop((1, 20, 13, 37), (3, 20, 3, 3), padding=1), fprop((3, 7, 10, 12), (5, 7, 3, 2)),
    fprop((2, 40, 5, 6), (4, 40, 1, 1)), fprop((1, 24, 21, 34), (19, 24, 3, 3), padding=1), fprop((1, 16, 5, 5), (2, 16, 5, 5), padding=(4, 7)), fprop((1, 16, 6, 9), (3, 16, 3, 20), padding=(1, 12)),
    fprop((2, 8, 17, 33), (2, 8, 3, 3), stride=2, padding=1), fprop((1, 16, 23, 29), (3, 16, 3, 3), dilation=(2, 3), padding=2), fprop((1, 16, 23, 29), (2, 16, 3, 3), stride=(4, 2), dilation=(6, 3), padding=3),
    fprop((1, 9, 20, 17), (2, 9, 2, 2), stride=5), fprop((2, 33, 50), (3, 33, 9), padding=4), fprop((1, 16, 1, 1), (1, 16, 1, 1)), fprop((1, 16, 12, 11), (2, 16, 3, 3), padding=((0, 2), (3, 1))),
    dgrad((2, 32, 9, 8), (32, 3, 4, 4), stride=2, padding=1), dgrad((1, 24, 6, 9), (24, 1, 2, 2), stride=2), dgrad((1, 16, 5, 7), (16, 3, 16, 16), stride=8, padding=4), dgrad((2, 20, 7, 18), (20, 3, 3, 3), padding=1),
    dgrad((1, 64, 12, 20), (64, 3, 7, 7), stride=2, padding=3, output_padding=1), dgrad((1, 48, 3, 4), (48, 3, 8, 8), stride=8), dgrad((2, 9, 5, 6), (9, 4, 2, 3), stride=(3, 4)), dgrad((1, 16, 9, 7), (16, 2, 3, 3), stride=2, dilation=3, padding=2),
    dgrad((1, 16, 9, 7), (16, 2, 3, 4), stride=(4, 6), dilation=(6, 4), padding=1), dgrad((2, 17, 30), (17, 2, 10), stride=5), dgrad((1, 16, 5, 5), (16, 1, 3, 3), padding=3), dgrad((1, 16, 2, 3), (16, 3, 3, 3), stride=2, padding=1, output_padding=1),
    fprop((1, 24, 4, 7, 20), (2, 24, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1))), fprop((2, 20, 5, 6, 9), (3, 20, 2, 3, 1), stride=(2, 1, 1), dilation=(2, 1, 1), padding=(1, 1, 0)),
    dgrad((2, 24, 3, 5, 6), (24, 3, 3, 4, 4), stride=(1, 2, 2), padding=1), dgrad((1, 16, 3, 4, 5), (16, 2, 3, 2, 3), dilation=(2, 1, 1), padding=(1, 0, 2)),
]  # fmt: skip
EVERY = [FewChannels(columns, *shape) for columns in (8, 16, 24, 48) for shape in fc.SHAPES]


def tiles(case, mode):
    """All that run it."""
    return [config for config in EVERY if fc.refusal(asked(case, mode), config) is None]


#: Each case in each mode, with a tile of its own.
RUNS = [(case, mode, (found := tiles(case, mode))[(5 * i + j) % len(found)]) for i, case in enumerate(SHAPES) for j, mode in enumerate(MODES)]
RANDOM = [(SHAPES[number], mode, tiles(SHAPES[number], mode)[number % 5]) for number, mode in ((1, "fp32"), (19, "fp32 last"), (19, "tf32"), (1, "tf32 last"), (19, "fp16"), (1, "bf16 last"))]
FINISHED = [
    (fprop((2, 16, 7, 9), (3, 16, 3, 3), padding=1), "fp16 last", FewChannels(8, 2)), (fprop((2, 17, 7, 9), (19, 17, 3, 3), padding=1), "bf16", FewChannels(24, 1, 2)),
    (dgrad((2, 24, 5, 6), (24, 3, 4, 4), stride=2, padding=1), "tf32 last", FewChannels(16, 4)), (dgrad((2, 24, 5, 6), (24, 3, 2, 2), stride=3), "fp32", FewChannels(8, 1)),
]  # fmt: skip
FINITE = [replace(fprop((2, 24, 9, 10), (3, 24, 3, 3), padding=1), bias=False), replace(dgrad((2, 24, 6, 5), (24, 3, 4, 4), stride=2, padding=1), bias=False)]
VOLUME = fprop((2, 16, 4, 5, 6), (2, 16, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1)), bias=False)
THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)
RANGED = [(THIN, "fp32 last", FewChannels(24), SCENARIOS), (THIN, "tf32 last", FewChannels(24), [one for one in SCENARIOS if one != "subnormals"])]
BASE = SHAPES[1]
LAST = ConvProblem.forward(2, (8, 16, 256, 256), (1, 16, 7, 7), padding=3, dtype="float16", layout="NHWC")
FIRST = ConvProblem.gradient("input", 2, (16, 3, 224, 224), (64, 3, 7, 7), (16, 64, 112, 112), stride=2, padding=3, dtype="float16", layout="NHWC")
VIDEO = ConvProblem.forward(3, (1, 96, 68, 256, 256), (3, 96, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1)), dtype="bfloat16", layout="NHWC")

CASES = Cases(
    engine=fc,
    runs=sharing([[run for run in RUNS if run[0] is case] for case in SHAPES]) + [run for run in RANDOM if run[1] in MODES],
    gpu=RUNS,
    grids=[(case, "fp16 last", tiles(case, "fp16 last")[0]) for case in (SHAPES[1], SHAPES[15])],
    orders=[(SHAPES[4], "fp32 last", tiles(SHAPES[4], "fp32 last"), 3)],
    finished=[(*run, ACTIVATIONS) for run in FINISHED if run[1] in MODES],
    not_finite=[(VOLUME, "fp32 last", FewChannels(16))] + [(FINITE[i // 2 % 2], mode, FewChannels(16)) for i, mode in enumerate(MODES)],
    not_finite_gpu=[(case, mode, FewChannels(16)) for case in FINITE for mode in MODES],
    ranged=[(*run, found[::4]) for *run, found in RANGED],
    ranged_gpu=RANGED,
    broken=[
        Broken((fprop((2, 32, 31, 80), (2, 32, 3, 3), padding=1), "fp16 last", FewChannels(8, 2)), [
            ("__syncthreads();\n\n    // from sums", "// from sums"), ("__syncthreads();\n\n  const Divided", "const Divided"),
            ("step_now = begin;\n              ++row_now;", "step_now = begin;"), ("if (m < used) u[", "u["), ("there |=", "there = ~0u; //"),
        ], seeds=range(1, 6), multiprocessors=1),
    ],
    refused=[
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(2, 16, 3, 3)), "fp16", FewChannels(), "of one group"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16", FewChannels(), "nothing to compute"),
        (dgrad((2, 8, 4, 4, 4), (8, 4, 2, 3, 3), stride=(2, 1, 1)), "fp16", FewChannels(), "without a stride from slice to slice"), (fprop((1, 8, 2**14, 2**13), (1, 8, 3, 3)), "fp16", FewChannels(), "in 32 bits"),
        (BASE, "fp16", FewChannels(32), "BLOCK_N must be one of 8, 16, 24, 48"), (BASE, "fp16", FewChannels(8, 4, 2), "(WARPS_W, PARTS) must be one of"), (fprop((1, 8, 9, 40), (1, 8, 3, 25)), "fp16", FewChannels(24), "25 taps"),
        (fprop((1, 8, 9, 2**20), (1, 8, 3, 3), dilation=(2**10, 1), padding=(2**10, 1)), "fp16", FewChannels(), "between two taps"), (fprop((1, 8, 9, 90), (1, 8, 3, 3), dilation=(1, 20)), "fp16", FewChannels(8, 1), "beyond the tile's 32 columns"), (fprop((1, 2048, 9, 9), (1, 2048, 7, 7)), "fp16", FewChannels(), "bytes of shared memory"),
        (BASE.problem("float64"), FewChannels(), "float16"),
    ],
    chosen=[
        (LAST, True), (FIRST, True), (VIDEO, True),
        (ConvProblem.forward(2, (8, 128, 56, 56), (128, 128, 3, 3), padding=1, dtype="float16", layout="NHWC"), False),
    ],
    layers=Layers(
        ["last", "upsampling", "first", "dense 3x3", "odd", "audio"],
        [("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("float16", "fp32", "NHWC")), ("dgrad", ("float32", "fp32", "NCHW"))], each=5, least=20,
    ),
    devices={((7, 5), "cuda"): False, ((8, 0), "cuda"): True, ((0, 0), "opencl"): False},
    compiled=[(asked(BASE, mode), FewChannels(columns)) for mode in ("fp32", "fp32 last", "tf32 last", "fp16", "fp16 last") for columns in (8, 16, 24, 48)],
    architectures=("sm_90a", "sm_80"),
    spills_sm80=8,  # two words, once a tile
)  # fmt: skip
