"""Gradients of filters with few channels in or out, from channels-last arrays (``mma/few_channels_wgrad.cu``)."""

from filters import Filter
from modes import MODES, asked

from cases import Broken, Cases, Layers
from pycuda_conv.engines.mma import few_channels_wgrad as fw
from pycuda_conv.engines.mma.few_channels_wgrad import FewChannelsWgrad

KINDS = [mode for mode in ("fp16 last", "bf16 last", "tf32 last") if mode in MODES]
#: First layers of one to four channels, with strides, dilation, uneven and wide padding; last layers, whose x is the dense array; channels
#: that fill no sixteen; one tap, one axis; rows narrower than a group of pixels, and wider.
SHAPES = [
    Filter((2, 3, 13, 21), (24, 3, 3, 3), stride=(2,), padding=(1,)), Filter((1, 1, 9, 35), (16, 1, 3, 3), padding=(1,)),
    Filter((2, 4, 20, 9), (40, 4, 5, 4), stride=(2, 3), padding=(2, 1)), Filter((1, 3, 12, 40), (8, 3, 7, 7), stride=(2,), padding=(3,)),
    Filter((2, 3, 8, 8), (72, 3, 4, 4), stride=(4,)), Filter((1, 2, 10, 18), (16, 2, 3, 3), padding=((2, 0), (0, 1)), dilation=(2,)),
    Filter((2, 16, 7, 19), (2, 16, 3, 3), padding=(1,)), Filter((1, 40, 9, 10), (3, 40, 5, 3), padding=(2, 3)), Filter((3, 24, 5, 6), (1, 24, 1, 1)),
    Filter((1, 8, 6, 9), (4, 8, 3, 2), padding=((2, 0), (0, 1)), dilation=(1, 2)), Filter((2, 1, 90), (16, 1, 10), stride=(5,), padding=(4,)),
    Filter((1, 5, 6, 17), (16, 5, 3, 3), padding=(5, 4)),
]  # fmt: skip
#: Of each number of channels and of columns; warps side by side and one after the other; one row and several; one part and several.
TILES = (
    FewChannelsWgrad(1, 2, 1, 4, 16), FewChannelsWgrad(2, 2, 2, 2, 16, 2), FewChannelsWgrad(4, 3, 8, 1, 32), FewChannelsWgrad(1, 4, 4, 8, 16, 2),
    FewChannelsWgrad(2, 4, 1, 2, 48), FewChannelsWgrad(2, 3, 1, 2, 48), FewChannelsWgrad(4, 2, 2, 3, 16),
)  # fmt: skip
#: float32 by three products.
TILES_FP32 = FewChannelsWgrad(1, 4, 2, 4, 16), FewChannelsWgrad(2, 3, 1, 2, 16, 2), FewChannelsWgrad(1, 2, 8, 2, 32), FewChannelsWgrad(2, 2, 4, 4, 16)
EVERY = [(case, mode, config) for case in SHAPES for mode in KINDS for config in TILES if fw.refusal(asked(case, mode).launched, config) is None]
PRECISE = [(case, "fp32 last", config) for case in SHAPES for config in TILES_FP32 if fw.refusal(asked(case, "fp32 last").launched, config) is None]
NOT_FINITE = (Filter((2, 3, 5, 7), (16, 3, 3, 3), padding=(1,)), Filter((2, 16, 5, 7), (3, 16, 3, 3), padding=(1,)))
LARGE = Filter((3, 3, 150, 130), (48, 3, 7, 7), stride=(2,), padding=(3,))
BASE = SHAPES[0]

CASES = Cases(
    engine=fw,
    kernel="few_channels_wgrad",
    runs=[*(run for run in EVERY if (SHAPES.index(run[0]) + KINDS.index(run[1]) + TILES.index(run[2])) % 7 == 0), *PRECISE[::4]],
    gpu=[*EVERY, *PRECISE, *((LARGE, mode, config) for mode in KINDS for config in (FewChannelsWgrad(1, 4, 8, 4, 32, 20), FewChannelsWgrad(2, 3, 8, 8, 16, 33)))],
    precise=[(Filter((2, 3, 9, 11), (24, 3, 1, 2)), "fp32 last", TILES_FP32[1])],
    precise_gpu=[*PRECISE, (LARGE, "fp32 last", FewChannelsWgrad(1, 4, 8, 4, 32, 20))],
    not_finite=[(case, "fp16 last", FewChannelsWgrad(1, 2, 2, 2, 16, 2)) for case in NOT_FINITE],
    broken=[
        Broken((BASE, "fp16 last", FewChannelsWgrad(1, 1, 1, 1, 16)), [
            ("to[number] = word_of(", "to[number ^ 1] = word_of("), ("slot ^= 1", "slot ^= 0"), ("    __syncthreads();  // all have read it: its place is filled next\n", ""),
            ("    __syncthreads();\n    if (of_warp.quotient == 0)", "    if (of_warp.quotient == 0)"),
        ], seeds=range(12)),
    ],
    refused=[
        (BASE.problem("float16", "NCHW"), FewChannelsWgrad(), "in the layouts CHWN"), (BASE.problem("float64"), FewChannelsWgrad(), "float32, float16 and bfloat16"),
        (Filter((2, 16, 9, 11), (32, 4, 3, 3), groups=4).problem(), FewChannelsWgrad(), "of one group"),
        (Filter((0, 3, 9, 11), (32, 3, 3, 3)).problem(), FewChannelsWgrad(), "nothing to compute"),
        (Filter((2, 3, 4, 4, 4), (32, 3, 3, 3, 3)).problem(), FewChannelsWgrad(), "two spatial axes"),
        (Filter((2, 3, 4, 4), (20, 3, 1, 1)).problem(), FewChannelsWgrad(), "by 16 bytes"),
        (Filter((2, 24, 4, 4), (32, 24, 1, 1)).problem(), FewChannelsWgrad(), "at most 16 channels"),
        (Filter((2, 32, 4, 4), (3, 32, 1, 1), stride=(2,)).problem(), FewChannelsWgrad(), "by 16 bytes"),
        (BASE.problem(), FewChannelsWgrad(3), "by M_TILES"), (BASE.problem("float32"), FewChannelsWgrad(4, 4), "N_TILES must be one of"),
        (BASE.problem(), FewChannelsWgrad(TILE_Q=8), "multiple of 16"), (BASE.problem(), FewChannelsWgrad(1, 2, 1, 64, 64), "there is room for"),
        (Filter((2, 1, 99, 99), (64, 1, 1, 1)).problem(), FewChannelsWgrad(4, 2, 1, 16, 48), "bytes of shared memory"),
        (BASE.problem(), FewChannelsWgrad(1, 2, 1, 8, 16, 3), "each part"),
    ],
    layers=Layers(["first", "last"], [("wgrad", kind) for kind in (("float16", "fp32", "NHWC"), ("float32", "tf32", "NHWC"), ("float32", "fp32", "NHWC"))], each=4),
    devices={((8, 0), "cuda"): True, ((10, 0), "cuda"): True, ((7, 5), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[
        (asked(BASE, "fp16 last"), FewChannelsWgrad(4, 3, 4, 2, 16)), (asked(BASE, "tf32 last"), FewChannelsWgrad(4, 3, 8, 2, 16)),
        (asked(BASE, KINDS[1]), FewChannelsWgrad(1, 1, 1, 2, 16)), *((asked(BASE, "fp32 last"), FewChannelsWgrad(rows, columns[-1], 1, 2, 16)) for rows, columns in fw.TILES[2].items()),
    ],
)  # fmt: skip
