"""Some images at a time, by other engines: each with launches of its own, and the last images may be fewer."""

from dataclasses import replace

from modes import H200, asked
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines.compose import by_images
from pycuda_conv.engines.compose.by_images import ByImages
from pycuda_conv.engines.direct.gemm import Gemm


def chosen(case, mode, images):
    """The planner's configuration for so many of the images."""
    return case, mode, ByImages(str(engines.choose(replace(asked(case, mode), N=images), H200)), images)


POINT = fprop((5, 64, 4, 8), (40, 64, 1, 1))
#: Two, two and one; four and three, where an image alone has no whole number of 16 bytes; equal ones.
DENSE, ODD, EVEN = fprop((5, 24, 6, 6), (16, 24, 3, 3), padding=1), fprop((7, 3, 7, 9), (5, 3, 3, 3)), fprop((4, 16, 30), (8, 16, 3), padding=1)
BACK = dgrad((5, 16, 4, 5), (16, 24, 3, 3), stride=2, padding=1)
RUNS = [
    *(chosen(POINT, mode, 2) for mode in ("fp32", "tf32", "fp32 last", "fp16 last")), *(chosen(DENSE, mode, 2) for mode in ("fp32", "fp32 last", "fp16", "tf32 last", "bf16 last")),
    *(chosen(ODD, mode, 4) for mode in ("fp32", "tf32")), *(chosen(EVEN, mode, 1) for mode in ("fp32", "tf32")), *(chosen(BACK, mode, 2) for mode in ("fp32", "fp16 last", "tf32")),
]  # fmt: skip
#: An array, or its result, of 2^31 elements and more.
LARGE = {
    "result": ConvProblem.forward(2, (16, 64, 1024, 1024), (128, 64, 1, 1)), "more": ConvProblem.forward(2, (33, 64, 1024, 1024), (128, 64, 1, 1)),
    "read": ConvProblem.forward(2, (64, 64, 768, 768), (24, 64, 1, 1), precision="tf32"), "gradient": ConvProblem.transposed(2, (16, 64, 1024, 1024), (64, 128, 1, 1)),
}  # fmt: skip

CASES = Cases(
    engine=by_images,
    runs=RUNS,
    gpu=RUNS,
    finished=[(*chosen(case, mode, 2), ("gelu",)) for case, mode in ((POINT, "fp32"), (DENSE, "fp16 last"), (DENSE, "tf32"))],
    orders=[(DENSE, "fp32", [ByImages(str(Gemm(64, 64, 16, 8, 4, 4, split)), images) for split, images in ((1, 1), (1, 2), (2, 2))], 2)],
    refused=[
        (DENSE, "fp32", ByImages(str(Gemm()), 5), "not so many images"), (fprop((130, 24, 6, 6), (16, 24, 3, 3)), "fp32", ByImages(str(Gemm()), 2), "more than 64 parts"), (ODD, "fp32", ByImages(str(Gemm()), 2), "don't begin aligned"), (DENSE, "fp32", ByImages("Nobody()", 2), "as it is printed"),
        (DENSE, "fp32", ByImages("Tile()", 2), "channel"), (fprop((0, 8, 9, 9), (8, 8, 3, 3)), "fp32", ByImages(str(Gemm()), 1), "nothing to compute"),
    ],
    chosen=[*((problem, True) for problem in LARGE.values()), *((replace(problem, algorithm="batch_invariant"), True) for problem in LARGE.values()), (replace(LARGE["result"], N=15), False), (replace(LARGE["result"], N=2000), False)],
    devices={((9, 0), "cuda"): True, ((0, 0), "opencl"): False},
)  # fmt: skip
