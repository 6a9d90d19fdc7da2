"""The plain kernels but for the matrix product (``direct/single.cu`` to ``wgrad.cu``): on every device."""

from awkward import ALONE, DEPTHWISE, FLIPPED, FORWARD, GENERAL, MANY_PHASES, SINGLE_CHANNEL, TRANSPOSED, TRANSPOSED_CASES
from filters import Filter
from modes import TYPES
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.direct import direct
from pycuda_conv.engines.direct.configs import TILES, Batched, Dgrad, Single, Tile, Wgrad

#: Small ones, each in float32 and in one of the other types by turns: each type of a tile is a text of its own, and compiling it takes most of a test's time.
MIXED = [
    (DEPTHWISE, Single()), (DEPTHWISE, Single(THREADS=32)), (DEPTHWISE, Tile()), (DEPTHWISE, Tile(8, 32, 8)), (DEPTHWISE, Tile(4, 8, 1)), (DEPTHWISE, Tile(32, 32, 1)),
    (FLIPPED, Tile()), (FLIPPED, Tile(8, 32, 8)), (GENERAL, Batched(BLOCK_K=8, BLOCK_C=8)), (GENERAL, Batched(64, 2, 1)), (GENERAL, Batched(32, 3, 5)),
    (TRANSPOSED, Dgrad(BLOCK_C=8, BLOCK_K=8)), (TRANSPOSED, Dgrad(64, 1, 2)), (TRANSPOSED, Dgrad(32, 3, 5)),
    (GENERAL, Batched(64, 4, 4, SPLIT=3)), (GENERAL, Batched(32, 8, 5, SPLIT=8)), (TRANSPOSED, Dgrad(64, 3, 2, SPLIT=3)), (TRANSPOSED, Dgrad(32, 1, 4, SPLIT=20)),
]  # fmt: skip
OTHERS = [mode for mode in TYPES if mode != "fp32"]
#: What the planner chooses from, and shapes that differ from those.
ONCE = [*((DEPTHWISE, tile) for tile in TILES), (GENERAL, Batched(256, 1, 8)), (GENERAL, Batched(BLOCK_K=4, BLOCK_C=16)), (TRANSPOSED, Dgrad(256, 8, 1))]
AWKWARD = [
    *((case, Batched(64, 4, 2)) for case in FORWARD), *((case, (Dgrad(64, 2, 4), Dgrad(32, 1, 2, SPLIT=2))[i % 2]) for i, case in enumerate(TRANSPOSED_CASES)),
    *((case, Dgrad(64, 2, 4)) for case in MANY_PHASES), *((case, (Single(), Tile(8, 32, 2), Tile(4, 16, 2))[(i + more) % 3]) for i, case in enumerate(SINGLE_CHANNEL) for more in (0, 1)),
    *((case, (Tile(8, 32, 2), Tile(1, 256, 1))[i % 2]) for i, case in enumerate(ALONE)),
]  # fmt: skip
#: Gradients of filters: slices that end within images, and empty ones; filters of a block that end with a group.
FILTERS = [
    Filter((2, 3, 21, 18), (18, 3, 7, 7), stride=(2,), padding=(3,), layout="NCHW"), Filter((1, 1, 900), (17, 1, 40), stride=(3,), layout="NCHW"), Filter((3, 2, 9, 8), (6, 2, 3, 2), padding=(1, 0), layout="NCHW"),
    Filter((1, 5, 4, 9, 8), (5, 5, 2, 3, 2), padding=(1, 0, 1), stride=(1, 2, 1), layout="NCHW"), Filter((2, 12, 13, 11), (24, 4, 3, 3), groups=3, layout="NCHW"),
    Filter((3, 4, 30), (8, 2, 5), groups=2, dilation=(3,), layout="NCHW"), Filter((1, 1, 1, 1), (1, 1, 1, 1), layout="NCHW"), Filter((5, 17, 6, 7), (9, 17, 1, 1), layout="NCHW"),
    Filter((2, 3, 5, 5), (6, 3, 3, 3), padding=(4,), layout="NCHW"), Filter((5, 12, 14, 11), (12, 1, 3, 3), padding=(2,), stride=(2, 1), groups=12, layout="NCHW"),
    Filter((5, 8, 14, 11), (8, 1, 7, 9), padding=(2,), stride=(2, 1), groups=8, layout="NCHW"),
]  # fmt: skip
SLICED = [Wgrad(128, 9, 7, 4), Wgrad(64, 6, 1, 2), Wgrad(128, 16, 40, 1), Wgrad(32, 3, 150, 4), Wgrad(128, 1, 2, 2)]

CASES = Cases(
    engine=direct,
    portable=[
        *((case, mode, config) for i, (case, config) in enumerate(MIXED) for mode in (("fp32", *OTHERS) if config == Single() else ("fp32", OTHERS[i % len(OTHERS)]))),
        *((case, "fp32", config) for case, config in (*ONCE, *AWKWARD)), *((case, "fp32", SLICED[(i + more) % 5]) for i, case in enumerate(FILTERS) for more in (0, 2)),
        *((FILTERS[4], mode, Wgrad(128, 9, 20, 4)) for mode in OTHERS), (Filter((0, 3, 9, 9), (8, 3, 3, 3), layout="NCHW"), "fp32", Wgrad(FILTERS=2)),
    ],
    optimised=[(DEPTHWISE, "fp32", Single(THREADS=32)), (DEPTHWISE, "fp32", Tile(4, 8, 1)), (TRANSPOSED, "fp32", Dgrad(64, 1, 2)), (GENERAL, "fp32", Batched(64, 4, 4, SPLIT=3)), (FILTERS[0], "fp32", SLICED[0])],
    wide=[(DEPTHWISE, "fp32", Single()), (DEPTHWISE, "fp32", Tile(8, 32, 2)), (GENERAL, "fp32", Batched()), (TRANSPOSED, "fp32", Dgrad()), (FILTERS[0], "fp32", Wgrad(64, 6, 3, 4)), (FILTERS[4], "fp32", Wgrad(64, 6, 3, 4))],
    finished=[
        *((case, mode, config, activations) for case, config, mode, activations in (
            (DEPTHWISE, Single(), "fp32", ("relu6", "silu")), (DEPTHWISE, Tile(8, 32, 8), "fp16", ("gelu",)), (FLIPPED, Tile(), "fp64", ("hardswish",)), (GENERAL, Batched(), "fp32", (("leaky_relu", 0.2), "gelu_tanh")),
            (TRANSPOSED, Dgrad(), "fp32", ("leaky_relu",)), (GENERAL, Batched(64, 4, 4, SPLIT=3), "fp64", ("gelu",)), (TRANSPOSED, Dgrad(64, 3, 2, SPLIT=3), "fp32", ("silu",)), (TRANSPOSED, Dgrad(64, 1, 2), "fp16", ("gelu_tanh",)))),
        *((case, "fp32", config, ()) for case, config in AWKWARD[::6]),
    ],
    orders=[(dgrad((1, 24, 3, 4, 5), (24, 8, 3, 3, 3), padding=1, bias=False), "fp64", [Dgrad(BLOCK_K=16, BLOCK_C=channels) for channels in (8, 4, 2)], 2)],
    not_finite=[(GENERAL, "fp32", Batched()), (TRANSPOSED, "fp32", Dgrad()), (DEPTHWISE, "fp32", Single())],
    refused=[
        (GENERAL, "fp32", Single(), "one input channel a group"), (GENERAL, "fp32", Tile(), "one input channel a group"),
        (fprop((1, 2, 4, 4, 4), (2, 1, 3, 3, 3), groups=2), "fp32", Single(), "one input channel a group and at most two spatial axes"), (fprop((1, 1, 1, 4, 4), (1, 1, 1, 3, 3), padding=(1, 0, 0)), "fp32", Tile(), "at most two spatial axes"),
        (dgrad((1, 1, 4, 4), (1, 1, 3, 3)), "fp32", Single(), "one input channel a group"), (GENERAL, "fp32", Dgrad(), "it computes transposed convolutions"), (TRANSPOSED, "fp32", Batched(), "it computes forward convolutions"),
        (DEPTHWISE, "fp32", Tile(8, 32, 3), "ROWS must divide TILE_P"), (DEPTHWISE, "fp32", Tile(64, 32, 1), "32 to 1024 threads"), (DEPTHWISE, "fp32", Tile(4, 4, 1), "32 to 1024 threads"),
        (fprop((1, 1, 200, 200), (1, 1, 150, 150)), "fp32", Single(), "bytes of shared memory"), (fprop((1, 1, 200, 200), (1, 1, 3, 3), stride=20), "fp32", Tile(), "bytes of shared memory"),
        (fprop((1, 8, 64, 64), (8, 8, 50, 50)), "fp32", Batched(), "bytes of shared memory"), (dgrad((1, 8, 4, 4), (8, 8, 50, 50)), "fp32", Dgrad(), "bytes of shared memory"),
        (fprop((2**31, 1, 1, 1), (1, 1, 1, 1)), "fp32", Single(), "its grid is larger"), (fprop((2**31, 1, 1, 1), (1, 1, 1, 1)), "fp32", Tile(), "its grid is larger"),
    ],
)  # fmt: skip
