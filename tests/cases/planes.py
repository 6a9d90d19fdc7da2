"""1x1 filters of 16-bit NCHW arrays as they lie (``hopper/planes.cu``)."""

from dataclasses import replace

from modes import MODES, asked
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.hopper import planes
from pycuda_conv.engines.hopper.planes import Planes

HALVES = [mode for mode in ("fp16", "bf16") if mode in MODES]
#: Tails of channels and pixels, several tiles and stages, gradients, one to three axes.
SHAPES = [
    fprop((3, 72, 10, 12), (136, 72, 1, 1)), fprop((2, 8, 24), (64, 8, 1)), dgrad((2, 40, 12, 20), (40, 72, 1, 1)), dgrad((2, 200, 4, 6, 8), (200, 16, 1, 1, 1)),
    fprop((5, 264, 8, 9), (20, 264, 1, 1)), dgrad((1, 72, 15, 24), (72, 208, 1, 1)),
]  # fmt: skip
LARGE = [fprop((9, 192, 28, 28), (256, 192, 1, 1)), dgrad((9, 320, 40, 40), (320, 136, 1, 1))]
WIDEST = planes.DEEPEST
TILES = [replace(config, STAGES=min(stages, config.STAGES)) for config, stages in zip(WIDEST, (2, 3, 5, 3, 2, 2), strict=True)]
BASE = SHAPES[0]

CASES = Cases(
    engine=planes,
    kernel="hopper_planes",
    runs=[(case, HALVES[i % len(HALVES)], TILES[(i + more) % len(TILES)]) for i, case in enumerate(SHAPES) for more in (0, 3)],
    gpu=[(case, mode, config) for case in (*SHAPES, *LARGE) for mode in HALVES for config in WIDEST],
    finished=[(BASE, "fp16", Planes(64, 64, 3), ("gelu", "relu6"))],
    not_finite=[(fprop((3, 24, 8, 9), (16, 24, 1, 1)), "fp16", Planes(64, 64, 3))],
    broken=[
        Broken((fprop((3, 72, 10, 12), (72, 72, 1, 1)), "fp16", Planes(64, 256, 2)), [
            ("ring.wait_full(at);", ""), ("wgmma_wait<0>();\n  wgmma_arrived", "wgmma_arrived"), ("fence_for_bulk();", ""),
            ("named_barrier(1 + consumer, 128);  // all of them", "//"), ("(of.x_blocks + of.w_blocks) * BLOCK", "(X_BLOCKS + W_BLOCKS) * BLOCK"),
        ], multiprocessors=2),
    ],
    refused=[
        (BASE, "tf32", Planes(), "float16 and bfloat16"), (BASE, "fp16 last", Planes(), "in the layouts NCHW, not in NHWC"),
        (fprop((0, 8, 8, 8), (8, 8, 1, 1)), "fp16", Planes(), "nothing to compute"), (fprop((2, 8, 8, 8), (8, 8, 3, 3), padding=1), "fp16", Planes(), "1x1 filters without"),
        (fprop((2, 8, 8, 8), (8, 8, 1, 1), stride=2), "fp16", Planes(), "1x1 filters without"), (fprop((2, 8, 7, 7), (8, 8, 1, 1)), "fp16", Planes(), "multiple of 16 bytes"),
        (fprop((2, 12, 8, 8), (8, 12, 1, 1)), "fp16", Planes(), "multiple of 16 bytes"), (fprop((2, 16, 8, 8), (8, 8, 1, 1), groups=2), "fp16", Planes(), "of one group"),
        (fprop((2, 2**14, 256, 256), (8, 2**14, 1, 1)), "fp16", Planes(), "32 bits"), (BASE, "fp16", Planes(128, 256), "(BLOCK_M, BLOCK_N) must be one of"),
        (BASE, "fp16", Planes(128, 192, 5), "bytes of shared memory"), (BASE, "fp16", Planes(64, 64, 1), "bytes of shared memory"),
    ],
    # odd numbers of channels: TMA can't load the filter's rows
    chosen=[(ConvProblem.forward(2, (2, 410, 80, 80), (71, 410, 1, 1), dtype="bfloat16"), False)],
    layers=Layers(["dense 1x1"], [("fprop", ("float16", "fp32", "NCHW")), ("dgrad", ("bfloat16", "fp32", "NCHW"))], each=15),
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(case, HALVES[i % len(HALVES)]), config) for i, config in enumerate(WIDEST) for case in (BASE, SHAPES[2])[0 if config.BLOCK_M > 64 else i % 2 :][: 1 + (config.BLOCK_M > 64)]],
    spills=160,  # the tile of 256 rows: activations beyond ReLU beside 128 sums, in the text of all layers
)  # fmt: skip
