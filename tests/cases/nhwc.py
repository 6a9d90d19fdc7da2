"""Depthwise layers of channels-last arrays (``depthwise/nhwc*.cu``): on every device."""

from filters import Filter
from modes import CPU, H200, TYPES, asked
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.depthwise import nhwc
from pycuda_conv.engines.depthwise.nhwc import Depthwise, DepthwiseStrips, DepthwiseWgrad

#: Filters whose loops are unrolled and others, strides, dilation, vectors of 4, 2 and 1 channels, planes smaller than a tile.
FORWARD = [
    fprop((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), fprop((2, 6, 10, 7), (6, 1, 3, 3), padding=1, stride=2, groups=6), fprop((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68),
    fprop((1, 12, 13, 9), (12, 1, 5, 5), padding=(1, 3), stride=2, groups=12), fprop((2, 4, 12, 12), (4, 1, 7, 7), padding=3, groups=4), fprop((1, 5, 6, 6), (5, 1, 3, 3), padding=1, groups=5),
    fprop((1, 8, 14, 15), (8, 1, 3, 3), padding=2, dilation=2, groups=8), fprop((1, 8, 14, 15), (8, 1, 3, 3), stride=3, groups=8), fprop((1, 4, 20, 21), (4, 1, 9, 11), padding=(4, 5), groups=4),
    fprop((1, 4, 9, 10), (8, 1, 3, 3), padding=1, groups=4), fprop((3, 8, 17), (8, 1, 5), padding=2, groups=8), fprop((2, 16, 5, 5), (16, 1, 2, 4), stride=(2, 1), groups=16),
    fprop((2, 4, 3, 3), (4, 1, 3, 3), padding=(0, 1), groups=4), fprop((1, 8, 6, 6), (8, 1, 1, 1), groups=8),
]  # fmt: skip
BACKWARD = [
    dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((2, 6, 5, 4), (6, 1, 3, 3), padding=1, stride=2, output_padding=1, groups=6), dgrad((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68),
    dgrad((1, 12, 7, 5), (12, 1, 5, 5), padding=(1, 2), stride=2, groups=12), dgrad((2, 4, 6, 6), (4, 1, 7, 7), padding=3, stride=2, groups=4), dgrad((1, 5, 6, 6), (5, 1, 3, 3), stride=2, groups=5),
    dgrad((1, 8, 7, 8), (8, 1, 3, 3), padding=2, dilation=2, groups=8), dgrad((1, 8, 5, 4), (8, 1, 3, 3), stride=3, groups=8), dgrad((1, 4, 12, 11), (4, 1, 9, 11), padding=(4, 5), groups=4),
    dgrad((3, 8, 17), (8, 1, 5), padding=2, groups=8), dgrad((1, 8, 5, 6), (8, 1, 3, 3), stride=2, dilation=3, groups=8),
]  # fmt: skip
#: Rows that fill no strip, columns that fill no tile, channels that fill no vector and no block, several images, uneven padding, multipliers,
#: padding that is wider than the filter.
STRIPS = [
    FORWARD[0], fprop((1, 144, 6, 5), (144, 1, 3, 3), padding=1, groups=144), fprop((5, 5, 7, 3), (5, 1, 3, 3), padding=((2, 0), (0, 1)), groups=5), fprop((3, 6, 10, 7), (6, 1, 3, 3), padding=1, stride=2, groups=6),
    *FORWARD[2:5], fprop((1, 10, 15, 9), (10, 1, 7, 7), padding=((3, 2), (0, 5)), stride=2, groups=10), FORWARD[9], fprop((4, 3, 8, 6), (9, 1, 5, 5), padding=2, stride=2, groups=3),
    fprop((2, 4, 3, 3), (4, 1, 3, 3), padding=(5, 4), groups=4),
    BACKWARD[0], BACKWARD[2], dgrad((2, 4, 9, 12), (4, 1, 7, 7), padding=((3, 1), (6, 0)), groups=4), dgrad((1, 5, 9, 10), (5, 1, 3, 3), padding=(4, 3), groups=5), dgrad((3, 6, 5, 5), (6, 1, 3, 3), groups=6),
]  # fmt: skip
FILTERS = [
    Filter(x, w, stride=stride, padding=padding, dilation=dilation, groups=x[1]) for x, w, stride, padding, dilation in (
        ((2, 8, 9, 11), (8, 1, 3, 3), (1,), (1,), (1,)), ((2, 6, 10, 7), (6, 1, 3, 3), (2,), (1,), (1,)), ((1, 68, 7, 7), (68, 1, 5, 5), (1,), (2,), (1,)), ((2, 4, 12, 13), (4, 1, 7, 7), (1,), (3,), (1,)),
        ((2, 4, 12, 13), (4, 1, 7, 7), (2,), (3,), (1,)), ((1, 5, 6, 6), (5, 1, 3, 3), (1,), (0, 1), (1,)), ((1, 8, 14, 15), (8, 1, 3, 3), (1,), (2,), (2,)), ((2, 4, 20, 21), (4, 1, 9, 11), (1,), (4, 5), (1,)),
        ((2, 4, 9, 10), (8, 1, 3, 3), (1,), (1,), (1,)), ((2, 16, 5, 8), (16, 1, 2, 4), (2, 3), (0,), (1,)), ((40, 4, 9, 9), (4, 1, 3, 3), (1,), (1,), (1,)), ((1, 144, 5, 3), (144, 1, 3, 3), (1,), (1,), (1,)),
        ((2, 6, 13, 9), (6, 1, 5, 5), (2,), (2, 3), (1,)), ((1, 4, 4, 4), (4, 1, 3, 3), (1,), (4, 5), (1,)))
]  # fmt: skip
LAST = [f"{mode} last" for mode in TYPES]
OTHERS = [mode for mode in LAST if mode != "fp32 last"]


def configs(case, mode):
    """All that the planner compares."""
    return list(nhwc.configs(asked(case, mode).launched, H200))


def tiles(case, mode):
    """Tiles of pixels of every kind that give the same bits: small ones, which GPUs alone choose, and a large one."""
    found = [*(Depthwise(chunk, *pixels) for chunk in (8, 16) for pixels in ((1, 1), (2, 2))), Depthwise(64, 2, 4)]
    return [tile for tile in found if nhwc.refusal(asked(case, mode).launched, tile) is None]


ORDERS = [(case, mode, tiles(case, mode)) for case, mode in ((FORWARD[0], "fp32 last"), (FORWARD[3], "fp16 last"), (FORWARD[4], "fp32 last"), (BACKWARD[1], "fp32 last"), (BACKWARD[2], "fp16 last"))]
BOTH = [(case, "fp32 last", [tiles(case, "fp32 last")[0], DepthwiseStrips(1), DepthwiseStrips(3), DepthwiseStrips(100)]) for case in (STRIPS[0], STRIPS[3], BACKWARD[0])]

CASES = Cases(
    engine=nhwc,
    portable=[
        *((case, "fp32 last", configs(case, "fp32 last")[0]) for case in (*FORWARD, *BACKWARD)), *((case, mode, configs(case, mode)[i % len(configs(case, mode))]) for case in (FORWARD[0], FORWARD[8], BACKWARD[3]) for i, mode in enumerate(OTHERS)),
        *((case, "fp32 last", DepthwiseStrips(rows)) for i, case in enumerate(STRIPS) for rows in ((1, 4), (3, 100))[i % 2]), *((case, mode, DepthwiseStrips(3)) for case in (STRIPS[0], STRIPS[5]) for mode in OTHERS),
        *((case, "fp32", config) for i, case in enumerate(FILTERS) for config in (next(nhwc.configs(asked(case, "fp32").launched, CPU)), (DepthwiseWgrad(1, 1), DepthwiseWgrad(3, 2), DepthwiseWgrad(100, 3))[i % 3])),
        *((case, mode, DepthwiseWgrad(3, 2)) for case in (FILTERS[0], FILTERS[7]) for mode in TYPES if mode != "fp32"),
    ],
    gpu=[
        *((case, mode, configs(case, mode)[(i + j) % len(configs(case, mode))]) for i, case in enumerate((*FORWARD, *BACKWARD)) for j, mode in enumerate(LAST)),
        *((case, LAST[i % len(LAST)], DepthwiseStrips(rows)) for i, case in enumerate(STRIPS) for rows in (1, 3, 4, 100)),
    ],
    optimised=[(FORWARD[0], "fp32 last", Depthwise()), (STRIPS[0], "fp32 last", DepthwiseStrips(3)), (FILTERS[0], "fp32", DepthwiseWgrad(3, 2))],
    wide=[*((case, "fp32 last", DepthwiseStrips(3)) for case in (STRIPS[0], STRIPS[3], BACKWARD[0])), (FORWARD[0], "fp32 last", Depthwise()), (FILTERS[0], "fp32", DepthwiseWgrad(2, 3))],
    orders=[(case, mode, configs, len({nhwc.sum_order(asked(case, mode).launched, config) for config in configs})) for case, mode, configs in (*ORDERS, *BOTH) if len(configs) > 2],
    finished=[(case, mode, config, activations) for case, mode, config, activations in (
        (STRIPS[0], "fp32 last", DepthwiseStrips(3), ("gelu", "relu6")), (STRIPS[5], "fp16 last", DepthwiseStrips(1), ("silu",)), (BACKWARD[2], "fp32 last", DepthwiseStrips(4), ()),
        (FORWARD[0], "fp32 last", Depthwise(), ("hardswish",)), (FORWARD[9], "fp64 last", Depthwise(), ("gelu_tanh",)), (FORWARD[8], "fp32 last", Depthwise(), (("leaky_relu", 0.2),)))],
    not_finite=[(FILTERS[0], "fp32", DepthwiseWgrad(2, 2)), (FILTERS[12], "fp32", DepthwiseWgrad(4, 2))],
    refused=[
        (FORWARD[0], "fp32 last", Depthwise(7), "CHUNK must be one of"), (FORWARD[0], "fp32", Depthwise(), "layouts NHWC, CHWN"), (fprop((1, 8, 5, 5), (8, 2, 3, 3), groups=4), "fp32 last", Depthwise(), "one channel of the input a group"),
        (FORWARD[0], "fp32 last", DepthwiseWgrad(), "configuration of their own"), *((case, "fp32 last", DepthwiseStrips(), "square filters of") for case in (FORWARD[6], FORWARD[7], BACKWARD[1])),
        (FORWARD[0], "fp32 last", DepthwiseStrips(0), "ROWS must be at least 1"), (FILTERS[0], "fp32", DepthwiseWgrad(0), "ROWS must be at least 1"), (FILTERS[0], "fp32", DepthwiseWgrad(1, 0), "PARTS must be at least 1"),
        # columns that 32 bits do not count, in few blocks
        (fprop((2**30, 256, 3, 10), (256, 1, 3, 3), padding=1, groups=256, bias=False), "fp32 last", DepthwiseStrips(3), "groups of columns"),
    ],
)  # fmt: skip
