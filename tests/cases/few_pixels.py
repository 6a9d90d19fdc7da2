"""Convolutions of few pixels, whose blocks share sums (``mma/few_pixels.cu``)."""

from dataclasses import replace

import reference
from alike import sharing
from modes import MODES, asked
from ranges import SCENARIOS
from reference import ACTIVATIONS, dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.mma import few_pixels as fp
from pycuda_conv.engines.mma.few_pixels import FewPixels

KINDS = [mode for mode in MODES if "last" not in mode]
#: Tails of channels, of units and of pixels, images that share a tile and rows that do, rings that come round, strides, uneven padding,
#: dilation, one tap, one axis; gradients of one phase, of several and of such without taps, of taps that come the other way round.
SHAPES = [
    fprop((1, 40, 7, 7), (40, 40, 3, 3), padding=1), fprop((3, 72, 5, 4), (70, 72, 3, 3), padding=1), fprop((2, 200, 7, 7), (136, 200, 1, 1)), fprop((1, 24, 14, 14), (33, 24, 3, 3), padding=1),
    fprop((2, 64, 9, 8), (40, 64, 3, 3), stride=2, padding=1), fprop((2, 48, 9, 9), (40, 48, 1, 1), stride=2), fprop((1, 16, 9, 31), (9, 16, 3, 2), stride=(2, 3), padding=((0, 2), (1, 0))), fprop((2, 32, 12, 11), (8, 32, 3, 3), dilation=(2, 3), padding=2),
    fprop((5, 8, 1, 1), (35, 8, 1, 1)), fprop((2, 32, 30), (16, 32, 5), padding=2), fprop((1, 320, 4, 4), (32, 320, 3, 3), padding=1), fprop((1, 16, 4, 6), (8, 16, 7, 8), padding=(3, 4)), fprop((1, 720, 5, 5), (40, 720, 3, 3), padding=1),
    fprop((2, 32, 5, 5), (16, 32, 1, 1), padding=(1, 2)), fprop((1, 16, 6, 60), (8, 16, 3, 3), padding=1),
    dgrad((2, 40, 6, 7), (40, 72, 3, 3), padding=1), dgrad((1, 72, 14, 9), (72, 40, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 48, 4, 5), (48, 64, 1, 1), stride=2, output_padding=1),
    dgrad((1, 200, 7, 7), (200, 136, 1, 1)), dgrad((2, 24, 5, 4), (24, 16, 4, 4), stride=2, padding=1), dgrad((1, 16, 4, 5), (16, 8, 3, 4), stride=(1, 3), dilation=(2, 1), padding=1), dgrad((1, 16, 5, 4), (16, 8, 5, 5), padding=(4, 3)),
    dgrad((1, 320, 4, 4), (320, 32, 3, 3), padding=1), dgrad((2, 16, 20), (16, 40, 5), stride=3, padding=2, output_padding=1), dgrad((1, 16, 3, 4), (16, 8, 2, 2), stride=2, output_padding=1),
]  # fmt: skip
EVERY = [FewPixels(rows, columns, cluster) for rows in fp.ROWS for columns in fp.COLUMNS for cluster in fp.CLUSTERS]


def tiles(case, mode):
    """All that run it."""
    return [config for config in EVERY if fp.refusal(asked(case, mode), config) is None]


#: Each case in each mode, with a tile of its own.
RUNS = [(case, mode, (found := tiles(case, mode))[(7 * i + 5 * j) % len(found)]) for i, case in enumerate(SHAPES) for j, mode in enumerate(KINDS)]
SOME = RUNS if reference.all_texts else sharing([[run for run in RUNS if run[0] is case] for case in SHAPES])
RANDOM = [(SHAPES[number], mode, tiles(SHAPES[number], mode)[number % 9]) for number, mode in ((1, "fp32"), (16, "tf32"), (16, "fp16"), (1, "bf16"))]
FINISHED = [
    (fprop((2, 40, 4, 5), (40, 40, 3, 3), padding=1), "fp16", FewPixels(32, 56, 2)), (fprop((2, 48, 4, 5), (17, 48, 1, 1)), "bf16", FewPixels(64, 32, 4)),
    (dgrad((2, 40, 3, 3), (40, 24, 3, 3), stride=2, padding=1), "tf32", FewPixels(32, 32, 8)), (fprop((2, 40, 4, 5), (40, 40, 3, 3), padding=1), "fp32", FewPixels(128, 32, 2)),
]  # fmt: skip
FINITE = [replace(fprop((2, 24, 5, 6), (40, 24, 3, 3), padding=1), bias=False), replace(dgrad((2, 24, 4, 4), (24, 40, 3, 3), padding=1), bias=False)]
ORDERED = fprop((1, 72, 5, 4), (40, 72, 3, 3), padding=1)
SMALL = fprop((4, 32, 5, 6), (40, 32, 1, 1), bias=False)
RANGED = [(SMALL, "fp32", FewPixels(32, 56, 2), SCENARIOS), (SMALL, "tf32", FewPixels(32, 56, 2), [one for one in SCENARIOS if one != "subnormals"])]
BASE = SHAPES[0]


def layer(channels, size, k, taps, mode, images=1):
    """A layer of as many images."""
    dtype, precision, _ = MODES[mode]
    return ConvProblem.forward(2, (images, channels, size, size), (k, channels, taps, taps), padding=taps // 2, dtype=dtype, precision=precision)


CASES = Cases(
    engine=fp,
    runs=[*SOME, *(run for run in RANDOM if run[1] in MODES)],
    gpu=RUNS,
    orders=[(ORDERED, "fp32", tiles(ORDERED, "fp32"), 9)],
    finished=[(*run, ACTIVATIONS) for run in FINISHED if run[1] in MODES],
    not_finite=[(case, mode, FewPixels(32, 32, 2)) for case in FINITE for mode in KINDS],
    ranged=[(*run, found[i::3]) for i, (*run, found) in enumerate(RANGED)],
    ranged_gpu=RANGED,
    broken=[
        Broken((fprop((1, 200, 5, 5), (33, 200, 3, 3), padding=1), "fp32", FewPixels(32, 32, 2)), [
            ("copies_wait<STAGES - 2>();\n", ""), ("stage % STAGES * (int)", "stage % 2 * (int)"), ("  cluster_barrier();\n\n  // some rows", "  // some rows"), ("  cluster_barrier_relaxed();", ""),
            ("__syncthreads();\n  constexpr int FOURS", "constexpr int FOURS"), ("write_tables(shape, of, tables, from);\n  __syncthreads();", "write_tables(shape, of, tables, from);"),
            ("at += groups * 8;", "at += groups * 16;"),
        ], seeds=range(1, 6)),
    ],
    refused=[
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 20, 3, 3)), "fp16", FewPixels(), "of one group"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16", FewPixels(), "nothing to compute"),
        (fprop((2, 8, 4, 4, 4), (4, 8, 1, 1, 1)), "fp16", FewPixels(), "two spatial axes"), (fprop((1, 8, 2**14, 2**14), (8, 8, 1, 1)), "fp16", FewPixels(), "in 32 bits"), (BASE, "fp16 last", FewPixels(), "not in NHWC"),
        (BASE, "fp16", FewPixels(48), "BLOCK_M must be one of"), (BASE, "fp16", FewPixels(32, 64), "BLOCK_N must be one of"), (BASE, "fp16", FewPixels(32, 32, 1), "CLUSTER must be one of"), (fprop((1, 9, 7, 7), (8, 9, 1, 1)), "fp32", FewPixels(), "16 bytes"),
        (dgrad((1, 16, 7, 7), (16, 7, 1, 1)), "fp16", FewPixels(), "16 bytes"), (fprop((1, 8, 20, 20), (8, 8, 12, 11)), "fp16", FewPixels(), "128 taps"), (dgrad((1, 16, 9, 7), (16, 8, 3, 3), stride=3), "fp16", FewPixels(), "stride phases"), (dgrad((1, 16, 9, 7), (16, 8, 3, 3), stride=2), "fp16", FewPixels(), "32 pixels"),
        (fprop((1, 8, 200, 1000), (8, 8, 3, 3), dilation=90), "fp32", FewPixels(), "shared memory"),
        (BASE.problem("float64"), FewPixels(), "float16"),
    ],
    chosen=[
        *((layer(*shape, mode), shape[-1] > 1 or mode == "fp32") for shape in ((256, 14, 256, 3), (512, 7, 512, 3), (1024, 14, 256, 1)) for mode in KINDS),
        *((layer(128, 28, 128, 3, mode, 32), False) for mode in ("fp32", "fp16")),
    ],
    layers=Layers(
        ["small batch", "dense 3x3", "dense 1x1", "odd", "audio"],
        [("fprop", ("float32", "tf32", "NCHW")), ("dgrad", ("float16", "fp32", "NCHW")), ("fprop", ("float32", "fp32", "NCHW"))], each=6, least=20,
    ),
    devices={((8, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(case, mode), FewPixels(32, columns, 8)) for mode in KINDS for case, columns in ((BASE, 32), (BASE, 56), (SHAPES[16], 32))],
)  # fmt: skip
