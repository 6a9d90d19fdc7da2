"""1x1 filters of NCHW arrays with planes of any size and with strides (``hopper/gathered_planes.cu``)."""

from dataclasses import replace

from modes import MODES, asked
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv.engines.hopper import gathered_planes as gp
from pycuda_conv.engines.hopper.gathered_planes import GatheredPlanes

KINDS = [mode for mode in ("tf32", "fp16", "bf16") if mode in MODES]
#: Tails of channels and pixels, several tiles and stages, tiles of several images, strides, padding, gradients, one to three axes.
SHAPES = [
    fprop((3, 72, 7, 7), (136, 72, 1, 1)), dgrad((2, 40, 5, 7), (40, 72, 1, 1)), fprop((2, 136, 9, 7), (64, 136, 1, 1), stride=2),
    fprop((2, 8, 25), (72, 8, 1), padding=2), dgrad((2, 136, 3, 5, 2), (136, 200, 1, 1, 1)), fprop((1, 264, 3, 5, 6), (24, 264, 1, 1, 1), stride=(2, 1, 2)),
    dgrad((2, 16, 4, 5), (16, 24, 1, 1), stride=2, padding=1), dgrad((1, 8, 3, 4), (8, 72, 1, 1), stride=(2, 3)), dgrad((1, 24, 2, 3, 2), (24, 8, 1, 1, 1), stride=(1, 2, 3)),
]  # fmt: skip
EVERY = gp.DEEPEST
TILES = [replace(config, STAGES=stages) for config, stages in zip(EVERY, (8, 3, 4, 4, 2, 3, 6, 4, 4, 3), strict=True)]
LARGE = [fprop((9, 192, 27, 27), (256, 192, 1, 1)), dgrad((9, 320, 14, 14), (320, 136, 1, 1)), fprop((3, 136, 31, 31), (96, 136, 1, 1), stride=2)]
#: Whose pixels are loaded by pairs.
PAIRS = [(fprop((3, 72, 2, 7), (8, 72, 1, 1)), "tf32"), (dgrad((3, 72, 2, 7), (72, 16, 1, 1)), "tf32"), (fprop((3, 72, 2, 7), (8, 72, 1, 1)), "fp16")]
BASE = SHAPES[0]
BREAKABLE = fprop((2, 264, 5, 5), (136, 264, 1, 1))

CASES = Cases(
    engine=gp,
    kernel="hopper_gathered_planes",
    runs=[
        *((case, KINDS[(i + more) % len(KINDS)], TILES[(i + 6 * more) % len(TILES)]) for more in (0, 1) for i, case in enumerate(SHAPES[: 4 if more else None])),
        *((*pair, GatheredPlanes(64, 32, 3)) for pair in PAIRS),
    ],
    gpu=[(case, mode, EVERY[(i + more) % len(EVERY)]) for i, case in enumerate((*SHAPES, *LARGE)) for more in (0, 2, 5, 8) for mode in KINDS],
    finished=[(fprop((2, 16, 3, 4), (24, 16, 1, 1)), "fp16", GatheredPlanes(64, 32, 4), ("gelu",))],
    not_finite=[(fprop((3, 24, 8, 9), (16, 24, 1, 1)), "fp16", GatheredPlanes(64, 32, 3))],
    broken=[
        Broken((BREAKABLE, "fp16", GatheredPlanes(64, 32, 2)), [("ring.wait_full(at);", ""), ("ring.wait_empty(at);", ""), ("blocks * 64 * 128", "128")], multiprocessors=2),
        Broken((BREAKABLE, "fp16", GatheredPlanes(128, 128, 3)), [("named_barrier(1, CONSUMER_THREADS);", "")], multiprocessors=2),
        Broken((BREAKABLE, "fp16", GatheredPlanes(64, 32, 2, 2)), [("  cluster_barrier();\n", "")], multiprocessors=2),
    ],
    refused=[
        (BASE, "fp32", GatheredPlanes(), "precision='tf32'"), (BASE, "fp16 last", GatheredPlanes(), "in the layouts NCHW, not in NHWC"), (fprop((0, 8, 8, 8), (8, 8, 1, 1)), "fp16", GatheredPlanes(), "nothing to compute"),
        (fprop((2, 8, 8, 8), (8, 8, 3, 3), padding=1), "fp16", GatheredPlanes(), "1x1 filters"), (fprop((2, 12, 8, 8), (8, 12, 1, 1)), "fp16", GatheredPlanes(), "multiple of 16 bytes"), (fprop((2, 16, 8, 8), (8, 8, 1, 1), groups=2), "fp16", GatheredPlanes(), "of one group"),
        (fprop((2, 2**14, 256, 256), (8, 2**14, 1, 1)), "fp16", GatheredPlanes(), "32 bits"), (BASE, "fp16", GatheredPlanes(128, 256), "(BLOCK_M, BLOCK_N) must be one of"),
        (BASE, "fp16", GatheredPlanes(64, 64, 8), "bytes of shared memory"), (BASE, "fp16", GatheredPlanes(64, 64, 1), "room for the sums"), (BASE, "fp16", GatheredPlanes(64, 64, 6, 3), "blocks and groups"),
    ],
    layers=Layers(["dense 1x1"], [("fprop", ("float16", "fp32", "NCHW")), ("dgrad", ("float32", "tf32", "NCHW"))], each=10),
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(case, KINDS[i % len(KINDS)]), EVERY[number]) for i, number in enumerate((3, 5, 8, 9)) for case in SHAPES[:2]],
    spills=4,  # one address of a thread that loads
)  # fmt: skip
