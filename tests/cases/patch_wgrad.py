"""Gradients of filters of few channels and many pixels (``direct/patch_wgrad.cu``): on every device."""

from dataclasses import replace

from filters import Filter
from modes import TYPES
from reference import fprop

from cases import Cases
from pycuda_conv.engines.direct import patch_wgrad
from pycuda_conv.engines.direct.patch_wgrad import TILES, PatchWgrad

#: Tiles that are full and not, one pixel, every rank.
SHAPES = [
    Filter((2, 3, 21, 18), (70, 3, 7, 7), stride=(2,), padding=(3,)), Filter((1, 1, 900), (66, 1, 40), stride=(3,)), Filter((3, 2, 9, 8), (20, 2, 3, 2), padding=(1, 0)),
    Filter((2, 3, 16, 16), (40, 3, 8, 8), stride=(8,)), Filter((1, 5, 4, 9, 8), (17, 5, 2, 3, 2), padding=(1, 0, 1), stride=(1, 2, 1)), Filter((2, 12, 13, 11), (24, 4, 3, 3), groups=3),
    Filter((3, 4, 30), (8, 2, 5), groups=2, dilation=(3,)), Filter((1, 1, 1, 1), (1, 1, 1, 1)), Filter((5, 17, 6, 7), (33, 17, 1, 1)), Filter((2, 3, 5, 5), (6, 3, 3, 3), padding=(4,)),
]  # fmt: skip
CONFIGS = [PatchWgrad(*tile, slices) for tile, slices in zip(TILES, (1, 3, 40, 2), strict=True)]
LAYOUTS = ("NCHW", "NHWC")

CASES = Cases(
    engine=patch_wgrad,
    portable=[
        *((replace(case, layout=LAYOUTS[(i // 2 + j // 2) % 2]), "fp32", config) for i, case in enumerate(SHAPES) for j, config in enumerate(CONFIGS) if (i + j) % 2 or i == 0),
        *((replace(SHAPES[0], layout=LAYOUTS[(i + j) % 2]), mode, PatchWgrad(*tile, 3)) for i, tile in enumerate(TILES) for j, mode in enumerate(TYPES) if mode != "fp32"),
        *((Filter((0, 3, 9, 9), (8, 3, 3, 3), layout=layout), "fp32", PatchWgrad()) for layout in LAYOUTS),  # without images the gradient is 0
    ],
    optimised=[(SHAPES[0], "fp32", CONFIGS[0])],
    wide=[(replace(case, layout="NCHW"), "fp32", config) for case, config in zip((SHAPES[0], SHAPES[4], SHAPES[5]), (PatchWgrad(16, 64, 2), PatchWgrad(64, 32, 40), PatchWgrad(16, 64, 2)), strict=True)],
    refused=[
        (SHAPES[0], "fp32", PatchWgrad(48, 64), "(BLOCK_M, BLOCK_N) must be one of"), (SHAPES[0], "fp32", PatchWgrad(64, 64, 2**30), "its grid is larger"),
        (fprop((2, 3, 9, 9), (8, 3, 3, 3)), "fp32", PatchWgrad(), "layouts"),
    ],
)  # fmt: skip
