"""Channels-last arrays whose pixels threads copy (``hopper/gather.cu``)."""

from dataclasses import replace

from alike import sharing
from modes import H200, MODES, asked
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv.engines.hopper import gather
from pycuda_conv.engines.hopper.gather import GatherNhwc

KINDS = [mode for mode in ("tf32 last", "fp16 last", "bf16 last") if mode in MODES]
#: Copies of 16 bytes and of 4, tails of channels, rows and pixels, strides, padding, dilation, one to three axes, rows of taps that are
#: one, gradients.
SHAPES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((2, 40, 7, 5), (9, 40, 3, 2), padding=(1, 0)), fprop((3, 16, 13, 9), (70, 16, 1, 1), stride=2),
    fprop((2, 6, 11, 17), (33, 6, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), fprop((40, 8, 3, 3), (21, 8, 3, 3), padding=1),
    fprop((2, 16, 50), (48, 16, 5), padding=2), fprop((2, 4, 4, 6, 5), (40, 4, 3, 3, 2), padding=(1, 0, 1)), fprop((2, 3, 32, 48), (20, 3, 16, 16), stride=16),
    fprop((1, 3, 21, 28), (12, 3, 7, 7), stride=7), fprop((2, 80, 9, 7), (136, 80, 3, 3), padding=((2, 0), (0, 1)), stride=(1, 2)),
    dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((2, 24, 6, 5), (24, 70, 3, 2), padding=(0, 1), dilation=(2, 1)), dgrad((2, 6, 20), (6, 16, 5), padding=2),
    dgrad((1, 16, 3, 4, 3), (16, 24, 3, 2, 3), padding=(1, 0, 1)),
]  # fmt: skip
LARGE = fprop((9, 40, 28, 28), (136, 40, 3, 3), padding=1)
#: One of each kind: the small and the large, of a cluster and alone.
TILES = (GatherNhwc(64, 64, 3), GatherNhwc(128, 96, 2), GatherNhwc(64, 32, 4, 8), GatherNhwc(64, 32, 4), GatherNhwc(128, 128, 5), GatherNhwc(64, 64, 6, 4))
EVERY = [(case, mode, config) for case in SHAPES for mode in KINDS for config in TILES if gather.refusal(asked(case, mode), config) is None]
BASE = SHAPES[0]

CASES = Cases(
    engine=gather,
    kernel="hopper_gather",
    runs=sharing([[run for run in EVERY if run[:2] == pair] for pair in dict.fromkeys(run[:2] for run in EVERY)]),
    gpu=[*EVERY, *((LARGE, mode, config) for mode in KINDS for config in (GatherNhwc(128, 128, 6), GatherNhwc(128, 64, 8), GatherNhwc(64, 64, 6), GatherNhwc(64, 32, 8, 8)))],
    not_finite=[(BASE, "tf32 last", GatherNhwc(64, 64, 3))],
    not_finite_gpu=[(BASE, mode, config) for mode in KINDS for config in (GatherNhwc(64, 64, 4), GatherNhwc(64, 32, 4, 4))],
    broken=[
        Broken((fprop((3, 24, 12, 11), (40, 24, 3, 3), padding=1), "tf32 last", GatherNhwc(64, 64, 3)), [
            ("  fence_for_bulk();\n", "  ;\n"), ("copies_wait<UNDER_WAY>();", ""), ("row % 8 * 16", "row % 4 * 16"), ("named_barrier(2 + threadIdx.x / 128, 128);", ""),
            ("ring.wait_empty(at);", ""), ("of_tap.rest * EACH", "of_tap.rest"), ("UNDER_WAY = STAGES < 4 ? STAGES - 2 : STAGES / 2", "UNDER_WAY = STAGES"),
        ], seeds=range(4)),
    ],
    refused=[
        (BASE, "fp16", GatherNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", GatherNhwc(), "precision='tf32'"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16 last", GatherNhwc(), "nothing to compute"),
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 12, 3, 3)), "fp16 last", GatherNhwc(), "one group"), (fprop((2, 11, 4, 4), (4, 11, 3, 3)), "fp16 last", GatherNhwc(), "of 4 bytes"),
        (dgrad((2, 24, 5, 6), (24, 72, 3, 3), stride=2), "fp16 last", GatherNhwc(), "without stride"), (fprop((2, 8, 2**14, 2**14), (4, 8, 1, 1)), "fp16 last", GatherNhwc(), "elements and pixels"),
        (fprop((1, 8, 30, 30), (4, 8, 16, 15), padding=1), "fp16 last", GatherNhwc(), "31 taps"), (BASE, "fp16 last", GatherNhwc(96), "BLOCK_M must be one of 64, 128"), (BASE, "fp16 last", GatherNhwc(64, 160), "32, 64, 96"),
        (BASE, "fp16 last", GatherNhwc(64, 64, 4, 3), "CLUSTER must be one of 1, 2, 4, 8"), (BASE, "fp16 last", GatherNhwc(128, 128, 2, 2), "no room for the sums"), (BASE, "fp16 last", GatherNhwc(128, 128, 8), "bytes of shared memory"),
        (BASE, "fp16 last", GatherNhwc(64, 64, 1), "bytes of shared memory"),
    ],
    layers=Layers(["dense 3x3", "dense 1x1", "first", "volume", "odd"], [("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC"))], each=8),
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[
        (replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu"), config)
        for case, mode in ((BASE, "tf32 last"), (BASE, "fp16 last"), (SHAPES[3], "bf16 last"), (SHAPES[6], "tf32 last")) if mode in MODES
        for config in gather.configs(asked(case, mode), H200)
    ],
    spills=40,  # an activation's call takes registers
)  # fmt: skip
