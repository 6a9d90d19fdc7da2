"""The matrix product of plain cores (``direct/gemm.cu``): on every device, the last resort."""

from awkward import FORWARD, GENERAL, MANY_PHASES, POINTWISE, TRANSPOSED, TRANSPOSED_CASES
from filters import Filter
from modes import TYPES
from reference import dgrad

from cases import Cases
from pycuda_conv.engines.direct import gemm
from pycuda_conv.engines.direct.gemm import Gemm

GEMM, OTHERS = Gemm(64, 64, 8, 4, 4, 1), [mode for mode in TYPES if mode != "fp32"]
STRIDED = dgrad((1, 10, 5, 6), (10, 9, 1, 2), stride=(1, 2))
MIXED = [
    (GENERAL, GEMM), (GENERAL, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=3)), (POINTWISE, GEMM), (POINTWISE, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=4)),
    (STRIDED, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)), (TRANSPOSED, GEMM),
]  # fmt: skip
FILTER = [Filter((3, 6, 13, 11), (70, 6 // groups, 3, 3), padding=(1,), groups=groups, layout="NCHW") for groups in (1, 2)]

CASES = Cases(
    engine=gemm,
    portable=[
        *((case, mode, config) for i, (case, config) in enumerate(MIXED) for mode in ("fp32", OTHERS[i % len(OTHERS)])),
        *((GENERAL, "fp32", config) for config in gemm.GEMM_RATES), *((GENERAL, "fp64", config) for config in gemm.GEMM_RATES_64),
        (GENERAL, "fp32", Gemm(128, 64, 8, 8, 4, 1)), (GENERAL, "fp32", Gemm(32, 64, 16, 4, 8, 1)), (POINTWISE, "fp16", max(gemm.GEMM_RATES, key=gemm.GEMM_RATES.get)),
        (POINTWISE, "fp32", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=9)),  # more parts than there are steps: some are empty
        (dgrad((1, 10, 3, 4), (10, 9, 1, 2), stride=2), "fp32", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)),  # phases without taps, split
        *((case, ("fp32", "fp32 last")[i % 2], GEMM) for i, case in enumerate((*FORWARD, *TRANSPOSED_CASES, *MANY_PHASES))), *((case, "fp32", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)) for case in MANY_PHASES),
        *((case, "fp32", Gemm(64, 64, 8, 4, 4, 1, split)) for case, split in zip((*FILTER, FILTER[0]), (1, 3, 16), strict=True)),
    ],
    optimised=[(TRANSPOSED, "fp32", GEMM)],
    wide=[(GENERAL, "fp32", GEMM), (TRANSPOSED, "fp32", GEMM), (POINTWISE, "fp32", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=4))],
    finished=[
        (POINTWISE, "fp32", GEMM, ("gelu", "relu6")), (TRANSPOSED, "fp64", GEMM, ("silu",)), (GENERAL, "fp16", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=3), ("hardswish",)),
        (GENERAL, "fp32 last", GEMM, ("gelu_tanh",)), (MANY_PHASES[0], "fp32 last", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=3), ()), (MANY_PHASES[1], "fp32", GEMM, ()),
    ],
    not_finite=[(GENERAL, "fp32", GEMM), (TRANSPOSED, "fp32", GEMM)],
    refused=[
        (GENERAL, "fp32", Gemm(128, 128, 64, 8, 8, 1), "bytes of shared memory"), (GENERAL, "fp32", Gemm(64, 64, 8, 3, 4, 1), "multiple of four rows and columns"), (GENERAL, "fp32", Gemm(66, 64, 8, 4, 4, 1), "multiple of four rows and columns"),
        (GENERAL, "fp32", Gemm(32, 32, 8, 8, 8, 1), "a warp is 4 x 8 threads"), (GENERAL, "fp32", Gemm(64, 64, 12, 4, 4, 1), "threads must fill whole rows"),
    ],
)  # fmt: skip
