"""Gradients by the input as a product without taps, whose columns a kernel adds (``layout/columns_add.cu``)."""

from dataclasses import replace

from modes import H200, MODES, asked, dtype_of
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.compose import columns
from pycuda_conv.engines.compose.columns import Columns
from pycuda_conv.engines.direct.gemm import Gemm

#: Patches, whose pixels meet one tap; filters longer and shorter than their stride; strides of three with odd sizes, dilation, groups; no
#: stride, or one that is the dilation; one to three axes.
ONE_TAP = [
    dgrad((2, 24, 3, 4), (24, 3, 4, 4), stride=4, bias=False), dgrad((2, 8, 5, 3), (8, 5, 2, 1), stride=3, padding=(1, 0), bias=False), dgrad((1, 16, 7), (16, 2, 10), stride=12, padding=3, bias=False),
    dgrad((1, 8, 5, 4), (8, 20, 4, 4), stride=4, padding=1, bias=False),
]  # fmt: skip
SEVERAL = [
    dgrad((2, 24, 5, 4), (24, 3, 8, 8), stride=4, padding=2), dgrad((2, 16, 9), (16, 1, 25), stride=10, padding=12), dgrad((1, 20, 6, 5), (20, 7, 4, 7), stride=3, padding=1),
    dgrad((2, 12, 5, 4), (12, 6, 3, 2), stride=3, dilation=2, padding=(2, 1)), dgrad((1, 16, 3, 4, 3), (16, 5, 3, 2, 3), stride=2, padding=(1, 0, 1)), dgrad((2, 12, 4, 5), (12, 2, 3, 3), stride=2, groups=3),
    dgrad((1, 24, 6, 8), (24, 3, 3, 3), padding=1), dgrad((2, 20, 5, 4), (20, 3, 3, 2), stride=2, dilation=2, padding=1),
    dgrad((1, 12, 5, 4), (12, 9, 3, 3), stride=5, dilation=2, padding=1),
]  # fmt: skip
KINDS = [mode for mode in ("fp32", "fp32 last", "tf32", "tf32 last", "fp16", "fp16 last", "bf16 last") if mode in MODES]


def chosen(case, mode):
    """The configuration that the engine chooses."""
    return columns.choose(asked(case, mode).launched, H200)[1]


RUNS = [(case, mode, chosen(case, mode)) for case in ONE_TAP for mode in KINDS] + [(case, mode, chosen(case, mode)) for case in SEVERAL for mode in KINDS if dtype_of(mode) == "float32"]
PRODUCTS = [Columns(str(Gemm(rows, 64, 16, 8, 4, 4, split))) for rows, split in ((64, 1), (32, 1), (64, 2))]

CASES = Cases(
    engine=columns,
    runs=RUNS[::2],
    gpu=RUNS,
    unseen=[("DTYPE", 64)],
    orders=[(SEVERAL[1], "fp32", PRODUCTS, 2)],
    finished=[(SEVERAL[0], mode, chosen(SEVERAL[0], mode), ("gelu",)) for mode in ("fp32", "tf32 last")],
    refused=[
        (asked(fprop((2, 8, 9, 9), (8, 8, 3, 3), stride=2), "fp32"), Columns(), "gradients by the input"), (asked(dgrad((2, 8, 9, 9), (8, 8, 1, 1)), "fp32"), Columns(), "one tap and no stride"),
        (asked(SEVERAL[0], "fp16"), Columns(), "are rounded"), (replace(asked(ONE_TAP[0], "fp16"), has_bias=True), Columns(), "are rounded"), (asked(dgrad((0, 8, 9, 9), (8, 8, 3, 3), stride=2), "fp32"), Columns(), "nothing to compute"),
        (asked(dgrad((8, 2**10, 128, 128), (2**10, 2**10, 4, 4), stride=2), "fp32"), Columns(), "32 bits"), (asked(SEVERAL[0], "fp32"), Columns("Nobody()"), "as it is printed"), (asked(SEVERAL[0], "fp32 last"), Columns("Tile()"), "in the layouts"),
    ],
    chosen=[
        *((dgrad((16, 192, 32, 32), (192, 1, 16, 16), stride=16, bias=False), mode, True) for mode in ("fp32", "tf32")),
        *((dgrad((4, 512, 500), (512, 1, 400), stride=160, padding=199), mode, True) for mode in ("fp32", "tf32")),
        # the product would have many more numbers than the result
        (dgrad((8, 32, 16, 16), (32, 128, 16, 16), stride=8, padding=4), "tf32", False),
    ],
    devices={((8, 0), "cuda"): True, ((0, 0), "opencl"): False},
    compiled=[(replace(asked(ONE_TAP[0], "fp32"), dtype=dtype), Columns(str(Gemm()))) for dtype in ("float16", "bfloat16", "float32", "float64")],
)  # fmt: skip
