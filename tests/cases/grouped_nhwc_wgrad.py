"""Gradients of grouped filters from channels-last arrays on tensor cores (``mma/grouped_nhwc_wgrad.cu``)."""

from filters import Filter
from modes import MODES, asked

from cases import Broken, Cases, Layers
from pycuda_conv.engines.mma import grouped_nhwc_wgrad as gw
from pycuda_conv.engines.mma.grouped_nhwc_wgrad import GroupedWgrad

KINDS = [mode for mode in ("fp16 last", "bf16 last") if mode in MODES]
#: 2 to 64 channels a group; groups that fill no unit, and units that fill no block; other numbers of channels in than out; strides,
#: dilation, uneven and wide padding; filters of one tap, fewer than nine and more; small images, one axis, one group.
SHAPES = [
    Filter((2, 32, 9, 11), (32, 4, 3, 3), padding=(1,), groups=8), Filter((1, 40, 7, 6), (40, 2, 3, 3), padding=(1,), groups=20),
    Filter((2, 40, 13, 10), (40, 8, 3, 3), stride=(2,), padding=(1,), groups=5), Filter((1, 48, 9, 8), (48, 16, 3, 3), padding=(2,), dilation=(2,), groups=3),
    Filter((1, 72, 8, 9), (72, 24, 3, 3), padding=(1,), groups=3), Filter((1, 96, 6, 7), (96, 48, 3, 3), padding=(1, 2), groups=2),
    Filter((1, 64, 9, 8), (64, 32, 5, 5), stride=(2, 1), padding=(2,), groups=2), Filter((1, 128, 5, 5), (128, 64, 3, 3), padding=(1,), groups=2),
    Filter((2, 32, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), Filter((1, 32, 8, 8), (64, 8, 3, 2), padding=(1,), groups=4),
    Filter((1, 24, 6, 6), (64, 3, 3, 3), padding=(1,), groups=8), Filter((3, 32, 50), (32, 4, 5), padding=(2,), groups=8),
    Filter((2, 48, 5, 6), (48, 8, 1, 1), groups=6), Filter((3, 32, 9, 7), (32, 16, 1, 1), stride=(2,), groups=2),
    Filter((9, 32, 3, 3), (32, 8, 3, 3), padding=(1,), groups=4), Filter((1, 16, 2, 3), (16, 4, 3, 3), padding=(5, 4), groups=4),
    Filter((1, 16, 9, 36), (16, 8, 4, 5), padding=(1,), stride=(3, 2), groups=2), Filter((2, 56, 6, 5), (112, 4, 3, 3), padding=(1,), groups=14),
    Filter((2, 16, 9, 11), (24, 16, 3, 3), padding=(1,)),
]  # fmt: skip
#: Tiles of one row and of several, of several images, narrower and wider than a product; one part and several.
TILES = (
    GroupedWgrad(2, 1, 4, 11), GroupedWgrad(1, 1, 3, 5, 2), GroupedWgrad(4, 2, 2, 7), GroupedWgrad(2, 3, 9, 3, 3), GroupedWgrad(1, 1, 1, 32, 2),
    GroupedWgrad(8, 1, 2, 6),
)  # fmt: skip
EVERY = [(case, mode, config) for case in SHAPES for mode in KINDS for config in TILES if gw.refusal(asked(case, mode).launched, config) is None]
LARGE = Filter((9, 256, 28, 30), (256, 8, 3, 3), padding=(1,), groups=32)
NOT_FINITE = Filter((2, 32, 5, 7), (32, 4, 3, 3), padding=(1,), groups=8)
BASE = SHAPES[0]

CASES = Cases(
    engine=gw,
    kernel="grouped_nhwc_wgrad",
    runs=[run for run in EVERY if (SHAPES.index(run[0]) + KINDS.index(run[1]) + TILES.index(run[2])) % (2 * len(KINDS)) == 0],
    gpu=[*EVERY, *((LARGE, mode, config) for mode in KINDS for config in (GroupedWgrad(2, 1, 4, 30, 20), GroupedWgrad(4, 1, 4, 15, 33)))],
    not_finite=[(NOT_FINITE, "fp16 last", config) for config in (GroupedWgrad(2, 1, 4, 7), GroupedWgrad(1, 1, 2, 4, 3))],
    broken=[
        Broken((BASE, "fp16 last", GroupedWgrad(1, 1, 3, 5)), [
            ("copies_wait<1>();", "copies_wait<2>();"), ("slot ^= 1", "slot ^= 0"), ("    __syncthreads();  // all have read it: its place is filled next\n", ""), ("there ? from_y : zeros", "from_y"),
            ("  for (int other = 1; other < (int)arg.beside; ++other) {\n    __syncthreads();\n", "  for (int other = 1; other < (int)arg.beside; ++other) {\n"),
        ], seeds=range(12)),
    ],
    refused=[
        (BASE.problem("float16", "NCHW"), GroupedWgrad(), "in the layouts CHWN"), (BASE.problem("float32"), GroupedWgrad(), "float16 and bfloat16"),
        (Filter((0, 32, 9, 11), (32, 4, 3, 3), groups=8).problem(), GroupedWgrad(), "nothing to compute"),
        (Filter((2, 32, 4, 4, 4), (32, 4, 1, 1, 1), groups=8).problem(), GroupedWgrad(), "two spatial axes"),
        (Filter((2, 24, 4, 4), (24, 12, 1, 1), groups=2).problem(), GroupedWgrad(), "by 16 bytes"),
        (Filter((2, 20, 4, 4), (40, 4, 1, 1), groups=5).problem(), GroupedWgrad(), "by 16 bytes"),
        (Filter((2, 400, 4, 4), (16, 200, 1, 1), groups=2).problem(), GroupedWgrad(), "at most 128 channels"),
        (BASE.problem(), GroupedWgrad(3), "UNITS must be one of"), (SHAPES[7].problem(), GroupedWgrad(4), "8 steps together"),
        (BASE.problem(), GroupedWgrad(4, 8, 16, 64), "bytes of shared memory"), (BASE.problem(), GroupedWgrad(1, 2, 9, 11, 2), "each part"),
    ],
    chosen=[
        (Filter((32, channels, size, size), (channels, channels // groups, 3, 3), padding=(1,), groups=groups).problem(), True)
        for channels, size, groups in ((64, 56, 32), (32, 112, 16), (8, 112, 4))
    ],
    layers=Layers(["grouped"], [("wgrad", (dtype, "fp32", "NHWC")) for dtype in ("float16", "bfloat16")], each=8, least=12, architectures=("sm_90a", "sm_80")),
    devices={((8, 0), "cuda"): True, ((10, 0), "cuda"): True, ((7, 5), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(case, mode), config) for case, mode, config in EVERY],
)  # fmt: skip
