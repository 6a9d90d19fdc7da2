"""NCHW arrays by way of channels last, and the other way round (``layout/via_nhwc.cu`` around other engines' launches)."""

from dataclasses import replace

from filters import Filter
from modes import H200, MODES, asked
from reference import dgrad, fprop

from cases import Cases, Layers
from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines.compose import via_nhwc
from pycuda_conv.engines.compose.via_nhwc import ViaNchw, ViaNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm

KINDS = [mode for mode in ("fp16", "bf16", "tf32") if mode in MODES]
#: Planes of every multiple, channels too, groups, depthwise, one channel in or out, one pixel, gradients, one to three axes.
SHAPES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((2, 70, 7, 7), (9, 70, 3, 2), padding=(1, 0)), fprop((3, 64, 6, 5), (64, 8, 3, 3), padding=1, groups=8),
    fprop((2, 1, 20, 18), (24, 1, 5, 5), stride=2, padding=2), fprop((2, 16, 11, 12), (1, 16, 3, 3), padding=1), fprop((2, 40, 7, 9), (40, 1, 3, 3), padding=1, groups=40),
    fprop((2, 12, 3, 3), (20, 12, 3, 3)), fprop((2, 16, 51), (48, 16, 5), padding=2), dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((2, 24, 6, 5), (24, 70, 3, 2), stride=2),
    fprop((1, 8, 4, 6, 5), (40, 8, 3, 3, 2), padding=(1, 0, 1)), fprop((2, 16, 3, 6, 5), (24, 16, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip
FILTERS = [
    Filter((2, 24, 9, 8), (40, 24, 3, 3), padding=(1,)), Filter((3, 65, 7, 7), (136, 65, 1, 1)), Filter((2, 3, 21, 18), (17, 3, 3, 2), stride=(2,)), Filter((2, 64, 6, 5), (64, 8, 3, 3), padding=(1,), groups=8),
    Filter((2, 1, 50), (12, 1, 5), padding=(2,)), Filter((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)), Filter((2, 16, 3, 6, 5), (24, 16, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip


def planned(case, mode):
    """What would be chosen if the arrays had their channels last."""
    return ViaNhwc(str(engines.choose(via_nhwc._transposed(asked(case, mode).launched), H200)))


def of_float32(case):
    """The gradient of a filter of float32 from arrays with their channels last, in fp32, goes by way of NCHW."""
    return case, "fp32", via_nhwc.choose(asked(case, "fp32").launched, H200)[1]


NCHW = [*SHAPES, *(replace(case, layout="NCHW") for case in FILTERS)]
#: Products that pack both arrays, their sums whole and in parts; channels that the launch that transposes fills up, but taps are folded by another.
PACKED = [(FILTERS[1], "fp32", ViaNchw(str(ImplicitGemm(64, 64, 2, split)))) for split in (1, 2)]
FILLED = [
    (case, mode, ViaNhwc("WgradNhwc(BLOCK_M=64, BLOCK_N=64, STAGES=2, SPLIT=2)")) for mode in ("fp16", "tf32")
    for case in (Filter((2, 13, 6, 7), (19, 13, 1, 1), layout="NCHW"), Filter((2, 16, 9, 7), (19, 16, 5, 3), padding=(2, 1), layout="NCHW"), Filter((2, 3, 12, 10), (17, 3, 3, 2), stride=(2,), layout="NCHW"))
]  # fmt: skip
RUNS = [(case, KINDS[i % len(KINDS)], planned(case, KINDS[i % len(KINDS)])) for i, case in enumerate(NCHW)]
BASE, LAST = SHAPES[0], [of_float32(case) for case in FILTERS]

BORDERED = ConvProblem.gradient("weight", 2, (2, 3, 5, 5), (8, 3, 3, 3), (2, 8, 5, 5), padding=1, padding_mode="symmetric", dtype="float16")

CASES = Cases(
    engine=via_nhwc,
    kernel="via_nhwc",
    runs=[*RUNS, *LAST, *PACKED, *FILLED],
    gpu=[*((case, mode, planned(case, mode)) for case in NCHW for mode in KINDS), *LAST, *PACKED],
    finished=[(BASE, "fp16", planned(BASE, "fp16"), ("gelu", "relu6"))],
    refused=[
        (BASE, "fp32", ViaNhwc(), "float16 and bfloat16"), (BASE, "fp16 last", ViaNhwc(), "in the layouts NCHW, CNHW, CHWN, not in NHWC"), (fprop((0, 8, 5, 5), (8, 8, 3, 3)), "fp16", ViaNhwc(), "nothing to compute"),
        (fprop((2, 2**14, 256, 257), (8, 2**14, 1, 1)), "fp16", ViaNhwc(), "32 bits"), (BASE, "fp16", ViaNhwc("Tile()"), "takes arrays in the layouts NCHW, CNHW, not in NHWC"), (BASE, "fp16", ViaNhwc("DenseNhwc(BLOCK_M=96)"), "BLOCK_M must be one of 64, 128"),
        *((BASE, "fp16", ViaNhwc(text), "as it is printed") for text in ("", "1", "Gemm", "Gemm(1)", "a.Gemm()", "Nobody()", "Gemm(BLOCK_M='a')", "Gemm(BLOCK_M=print())")),
        (FILTERS[0], "fp32", ViaNhwc(LAST[0][2].DELEGATE), "is for arrays that lie so"), (BORDERED, ViaNhwc("WgradNhwc()"), "it takes no borders but zeros"),
    ],
    devices={((9, 0), "cuda"): True, ((8, 0), "cuda"): False, ((0, 0), "opencl"): False},
    layers=Layers(["dense 3x3", "grouped", "audio", "volume", "odd"], [("dgrad", MODES["fp16"]), ("wgrad", MODES["fp16"])], each=4, slack=1.1),
    compiled=[(asked(BASE, mode), planned(BASE, mode)) for mode in ("fp16", "tf32")],
)  # fmt: skip
