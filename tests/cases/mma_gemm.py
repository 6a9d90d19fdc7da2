"""The implicit GEMM where warps feed the tensor cores themselves (``mma/gemm.cu``): Ampere, Ada, Blackwell."""

from alike import sharing
from awkward import BASE, SHAPES
from modes import MODES, asked
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from cases.hopper_gemm import FILTERS
from pycuda_conv.engines.mma import gemm
from pycuda_conv.engines.mma.gemm import ImplicitGemm80

KINDS = [mode for mode in ("fp32", "fp16 last", "bf16", "tf32 last") if mode in MODES]
TILES = (ImplicitGemm80(64, 128, 4, 1), ImplicitGemm80(128, 64, 3, 3), ImplicitGemm80(128, 128, 3, 1), ImplicitGemm80(128, 256, 3, 1), ImplicitGemm80(64, 64, 3, 2))
EVERY = [(case, mode, config) for case in SHAPES for mode in KINDS for config in TILES if gemm.refusal(asked(case, mode), config) is None]
DENSE = fprop((3, 64, 9, 12), (72, 64, 3, 3), padding=1)

CASES = Cases(
    engine=gemm,
    runs=sharing([[run for run in EVERY if run[0] is case] for case in (*SHAPES[2::16], DENSE)]),
    gpu=[*EVERY[::11], *((case, mode, config) for case in (*FILTERS[:6], FILTERS[7]) for mode, config in (("fp32", ImplicitGemm80(64, 64, 3, 1)), ("fp16", ImplicitGemm80(128, 128, 3, 4))))],
    finished=[(DENSE, mode, config, ("gelu",)) for mode, config in zip(KINDS, TILES, strict=False) if gemm.refusal(asked(DENSE, mode), config) is None],
    not_finite=[(fprop((2, 24, 5, 6), (16, 24, 3, 3), padding=1), "fp16", ImplicitGemm80(64, 64, 3))],
    broken=[
        Broken((DENSE, "fp16 last", ImplicitGemm80(64, 128, 4)), [
            ("next_tap(t, r, s, (int)shape.tap_r, (int)shape.tap_s);", ";"), ("  if (threadIdx.x < BLOCK_N) corners[threadIdx.x].find(shape, pixel0 + threadIdx.x);", "  ;"),
            ("lane = threadIdx.x % 32, warp_m", "lane = threadIdx.x % 33, warp_m"),
        ]),
    ],
    refused=[
        (BASE, "fp32", ImplicitGemm80(96), "BLOCK_M must be one of"), (BASE, "fp32", ImplicitGemm80(64, 100), "BLOCK_N must be one of"),
        (BASE, "fp32", ImplicitGemm80(64, 128, 1), "bytes of shared memory"), (BASE, "fp32", ImplicitGemm80(128, 256), "takes one product"),
        (BASE, "fp32", ImplicitGemm80(64, 128, 4, 0), "at least one split"), (fprop((0, 8, 5, 5), (4, 8, 3, 3)), "fp32", ImplicitGemm80(), "nothing to compute"),
        (BASE.problem("float64"), ImplicitGemm80(), "float32, float16, bfloat16"), (fprop((2**11, 8, 2**10, 2**10), (8, 8, 1, 1)), "fp16 last", ImplicitGemm80(), "counts pixels in 32 bits"),
        (dgrad((1, 16, 9, 9), (16, 8, 2, 2), dilation=129), "fp32", ImplicitGemm80(), "can't"),
    ],
    layers=Layers(["dense 3x3", "dense 1x1", "upsampling", "odd"], [("fprop", ("float32", "fp32", "NCHW")), ("dgrad", ("float16", "fp32", "NHWC"))], each=3, architectures=("sm_80",)),
    devices={((8, 0), "cuda"): True, ((7, 5), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[(asked(DENSE, mode), config) for mode in KINDS for config in TILES if gemm.refusal(asked(DENSE, mode), config) is None],
    architectures=("sm_80",),
    spills=8,
)  # fmt: skip
