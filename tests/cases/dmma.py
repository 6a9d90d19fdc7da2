"""float64 on the tensor cores (``mma/dmma.cu``)."""

from dataclasses import replace

from filters import Filter
from modes import asked
from reference import fprop, gradient_of

from cases import Cases, Layers
from pycuda_conv.engines.mma import dmma
from pycuda_conv.engines.mma.dmma import Dmma

#: Tails of channels, pixels and gemm k; odd and even channels; strides, padding, dilation, groups; one to three axes; phases without taps,
#: and neighbours that a launch computes at once.
SHAPES = [
    fprop((2, 16, 9, 10), (70, 16, 3, 3), padding=1), fprop((3, 5, 8, 8), (9, 5, 3, 3), padding=1), fprop((1, 33, 12, 6), (64, 33, 1, 1)),
    fprop((2, 24, 8, 8), (40, 24, 1, 1)), fprop((2, 12, 11, 9), (20, 12, 3, 2), stride=2, padding=1),
    fprop((2, 12, 9, 9), (18, 6, 3, 3), groups=2, padding=(2, 0)), fprop((1, 10, 15, 13), (12, 10, 3, 3), dilation=2, stride=(1, 2)),
    fprop((3, 20, 40), (33, 20, 5), padding=2), fprop((2, 8, 31), (16, 8, 4), stride=3), fprop((1, 6, 5, 6, 7), (10, 6, 3, 2, 3), padding=1),
    fprop((2, 4, 6, 4, 4), (8, 4, 1, 1, 1), stride=(2, 1, 1)), fprop((4, 1, 12, 12), (130, 1, 3, 3)), fprop((2, 9, 10, 10), (3, 9, 3, 3), padding=1),
    fprop((1, 64, 14, 14), (128, 64, 3, 3), padding=1), fprop((2, 130, 6, 6), (8, 130, 1, 1), stride=3),
    fprop((2, 9, 8, 8), (7, 9, 2, 2), stride=2), fprop((2, 6, 17, 12), (10, 6, 8, 4), stride=(4, 2), padding=(2, 1)),
]  # fmt: skip
#: Gradients of filters of few pixels: rows of k that pairs of numbers fit into; copies that bring nothing; padding behind the image alone.
FEW = [
    Filter((2, 4, 6), (6, 4, 2), layout="NCHW"), Filter((2, 4, 7, 6), (6, 4, 3, 2), padding=((1, 1), (0, 1)), layout="NCHW"),
    Filter((2, 4, 7, 6), (6, 2, 3, 2), groups=2, layout="NCHW"), Filter((2, 4, 5, 7, 6), (6, 4, 2, 3, 2), dilation=(2,), layout="NCHW"),
]  # fmt: skip
CONFIGS = [Dmma(*tile, split) for split in (1, 3) for tile in dmma.TILES]


def by_turns():
    """Every shape, each array of it asked for, in each layout, with two of the tiles and splits by turns."""
    found, number = [], 0
    for case in SHAPES:
        for one, mode in ((case, "fp64"), (case, "fp64 last"), (gradient_of(case), "fp64"), (gradient_of(case), "fp64 last"), (Filter.of(case), "fp64")):
            able = [config for config in CONFIGS if dmma.refusal(asked(one, mode).launched, config) is None]
            found += [(one, mode, able[number % len(able)]), (one, mode, able[(number + len(able) // 2) % len(able)])]
            number += 1
    return found


RUNS = by_turns()
LARGE, ONE_TAP = fprop((64, 256, 28, 28), (256, 256, 3, 3), padding=1), fprop((5000, 512, 32, 32), (64, 512, 1, 1))
LINES = gradient_of(fprop((2, 16, 40), (64, 16, 3)))  # cuDNN sums them by tap

CASES = Cases(
    engine=dmma,
    runs=[run for tile in dmma.TILES for run in [run for run in RUNS if (run[2].BLOCK_M, run[2].BLOCK_N) == tile][::4]] + [(case, "fp64", Dmma(32, 32)) for case in FEW],
    gpu=RUNS,
    finished=[(SHAPES[0], "fp64", Dmma(64, 64), ("gelu",)), (SHAPES[0], "fp64 last", Dmma(64, 64, 2), ("silu",))],
    not_finite=[(fprop((2, 6, 9, 9), (40, 6, 3, 3), bias=False), "fp64", Dmma(64, 64))],
    refused=[
        (LARGE, "fp32", Dmma(), "float64"), (ONE_TAP, "fp64", Dmma(), "32 bits"), (LARGE, "fp64", Dmma(96, 128), "(BLOCK_M, BLOCK_N) must be one of"), (LARGE, "fp64", Dmma(SPLIT=0), "split"),
        (LINES, "fp64", Dmma(128, 64), "cut"),
    ],
    devices={((9, 0), "cuda"): True, ((8, 0), "cuda"): True, **{(capability, "cuda"): False for capability in ((7, 0), (8, 6), (8, 9), (12, 0))}, ((0, 0), "opencl"): False},
    chosen=[(case, mode, True) for case, mode in ((LARGE, "fp64"), (LARGE, "fp64 last"), (gradient_of(LARGE), "fp64"), (gradient_of(LARGE), "fp64 last"), (Filter.of(LARGE), "fp64"))],
    layers=Layers(["dense 3x3", "dense 1x1", "volume", "odd"], [("fprop", ("float64", "fp32", "NCHW")), ("dgrad", ("float64", "fp32", "NHWC")), ("wgrad", ("float64", "fp32", "NCHW"))], each=4, architectures=("sm_90a", "sm_80"), slack=1.06),
    compiled=[(replace(asked(*run[:2]), activation=None), run[2]) for run in RUNS[::2]],
    architectures=("sm_90", "sm_80"),
    spills=64,
)  # fmt: skip
