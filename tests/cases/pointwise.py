"""1x1 convolutions of float32 in TF32 and in three products, of arrays as they lie (``hopper/pointwise.cu``)."""

from dataclasses import replace

from alike import sharing
from filters import Filter
from modes import asked
from ranges import SCENARIOS
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv import ConvProblem
from pycuda_conv.engines.hopper import pointwise as pw
from pycuda_conv.engines.hopper.pointwise import Pointwise

KINDS = ("fp32", "fp32 last", "tf32", "tf32 last")
#: Tails of rows, columns and k, whole tiles, one axis and three, few and many images.
SHAPES = [
    fprop((3, 100, 5, 16), (70, 100, 1, 1)), fprop((2, 36, 12, 12), (200, 36, 1, 1), bias=False), fprop((1, 4, 2, 2), (1, 4, 1, 1)), fprop((40, 8, 4), (9, 8, 1)),
    fprop((2, 20, 3, 4, 5), (33, 20, 1, 1, 1)), dgrad((3, 72, 4, 8), (72, 70, 1, 1)), dgrad((2, 64, 9, 12), (64, 96, 1, 1), bias=False),
    fprop((1, 32, 16, 32), (64, 32, 1, 1)), fprop((20, 4, 8), (12, 20, 1, 1)), fprop((2, 64, 8, 8), (8, 64, 1, 1), dilation=3),
]  # fmt: skip


def tiles(case, mode):
    """All that are legal, with few stages."""
    shapes = (Pointwise(columns, blocks, 3) for columns in (32, 64, 96, 128) for blocks in (1, 2))
    return [config for config in shapes if pw.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode, config) for case in SHAPES for mode in KINDS for config in tiles(case, mode)]
PAIRS = dict.fromkeys(run[:2] for run in PLANNED)
FILTERS = [
    Filter(x, (k, x[1], *(1 for _ in x[2:])), layout="NCHW")
    for x, k in (((3, 20, 4, 5), 40), ((2, 130, 6, 6), 70), ((5, 33, 8), 9), ((1, 4, 2, 2), 1), ((40, 64, 4, 8), 64), ((2, 8, 2, 4, 5), 300))
]  # fmt: skip
FILTER_TILES = [Pointwise(64, 2, 3, 1), Pointwise(32, 1, 3, 3), Pointwise(64, 1, 4, 5), Pointwise(96, 1, 3, 40), Pointwise(32, 2, 3, 2), Pointwise(128, 1, 3, 2)]
LARGE = fprop((9, 192, 28, 28), (256, 192, 1, 1))
#: More boxes than multiprocessors.
MANY = fprop((20, 40, 56, 56), (64, 40, 1, 1))
POINT = fprop((3, 64, 10, 12), (136, 64, 1, 1))
THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)
#: Subnormals have fewer bits as TF32.
RANGED = [one for one in SCENARIOS if one != "subnormals"]
FINITE = fprop((2, 40, 5, 8), (34, 40, 1, 1), bias=False)


def layers():
    """Where there is much to read. Of fp32, more channels are as fast by hopper/gemm.cu."""
    for (x, k), precision in ((one, precision) for one in (((64, 256, 56, 56), 64), ((64, 64, 56, 56), 256), ((64, 512, 28, 28), 128)) for precision in ("fp32", "tf32")):
        w, y = (k, x[1], 1, 1), (x[0], k, *x[2:])
        for problem in (ConvProblem.forward(2, x, w, precision=precision), *(ConvProblem.gradient(of, 2, x, w, y, precision=precision) for of in ("input", "weight"))):
            if problem.launched.result_channels < 256 or precision == "tf32":
                yield problem, True


WIDEST = {mode: Pointwise(128 if "tf32" in mode else 64, 2, 3) for mode in KINDS}

CASES = Cases(
    engine=pw,
    kernel="hopper_pointwise",
    runs=[
        *sharing([[run for run in PLANNED if run[:2] == pair] for pair in PAIRS]),
        *((FILTERS[number], ("fp32", "tf32")[config.BLOCKS - 1], config) for number, config in zip((0, 1, 2, 3, 0, 5), FILTER_TILES, strict=True)),
    ],
    gpu=[
        *[(case, mode, replace(config, STAGES=stages)) for case, mode, config in PLANNED for stages in (2, 3)][::2],
        *((LARGE, mode, config) for mode in KINDS for config in (Pointwise(), Pointwise(32, 2, 5))), *((LARGE, mode, Pointwise(128, 2, 4)) for mode in ("tf32", "tf32 last")),
        *((MANY, mode, Pointwise()) for mode in ("fp32", "tf32")), *((case, mode, config) for case in FILTERS for config in FILTER_TILES for mode in ("fp32", "tf32")),
    ],
    grids=[(fprop((9, 40, 6, 10), (100, 40, 1, 1)), mode, Pointwise(32, 2, 3)) for mode in ("fp32", "tf32 last")],
    finished=[(SHAPES[i], mode, tiles(SHAPES[i], mode)[0], ("gelu", "relu6")) for i, mode in ((0, "fp32"), (1, "tf32"), (4, "fp32 last"), (0, "tf32 last"))],
    noted=[(SHAPES[i], mode, Pointwise(32, 2, 3)) for i, mode in ((0, "fp32"), (1, "tf32"), (4, "fp32 last"), (9, "tf32 last"))],
    not_finite=[(FINITE, mode, Pointwise(64, 2, 3)) for mode in KINDS],
    not_finite_gpu=[(replace(SHAPES[0], bias=False), mode, Pointwise()) for mode in KINDS],
    ranged=[(THIN, mode, Pointwise(32, 2, 3), RANGED[i::8]) for i, mode in enumerate(KINDS)],
    ranged_gpu=[(THIN, mode, Pointwise(), RANGED) for mode in KINDS],
    arguments=[
        ((fprop((7, 70, 6, 10), (100, 70, 1, 1)), "fp32", Pointwise(32, 2, 3)), "across down steps each rows columns boxes plane row_step column_step"),
        ((fprop((7, 70, 6, 10), (100, 70, 1, 1)), "tf32", Pointwise(32, 2, 3)), "busy"),
        ((fprop((7, 72, 6, 10), (100, 72, 1, 1)), "tf32 last", Pointwise(32, 2, 3)), "across down steps each rows columns row_step column_step"),
        ((Filter((3, 130, 6, 10), (300, 130, 1, 1), layout="NCHW"), "fp32", Pointwise(64, 1, 3, 2)), "across down steps each rows boxes row_step column_step size"),
    ],
    refused=[
        (fprop((2, 8, 6, 6), (4, 8, 3, 3)), "fp32", Pointwise(), "1x1 filters"), (fprop((2, 8, 6, 6), (4, 8, 1, 1), stride=2), "fp32", Pointwise(), "without stride"),
        (fprop((2, 8, 6, 6), (4, 8, 1, 1), padding=1), "tf32", Pointwise(), "without stride and padding"), (fprop((2, 8, 6, 6), (4, 4, 1, 1), groups=2), "fp32", Pointwise(), "one group"),
        (POINT, "fp16", Pointwise(), "float32 arrays"), (fprop((2, 8, 5, 5), (4, 8, 1, 1)), "fp32", Pointwise(), "multiple of 16 bytes"),
        (fprop((2, 6, 4, 4), (4, 6, 1, 1)), "fp32 last", Pointwise(), "multiple of 16 bytes"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp32", Pointwise(), "nothing to compute"),
        (fprop((2, 8, 2**14, 2**14), (4, 8, 1, 1)), "fp32", Pointwise(), "32 bits"), (POINT, "fp32", Pointwise(128), "128 columns in all"), (POINT, "tf32", Pointwise(160), "BLOCK_N must be one of 32, 64, 96, 128"),
        (POINT, "fp32 last", Pointwise(64, 3), "BLOCKS must be one of 1, 2"), (POINT, "fp32", Pointwise(64, 1), "four neighbouring pixels"), (POINT, "fp32", Pointwise(64, 2, 4, 2), "alone is split"),
        (POINT, "fp32", Pointwise(64, 2, 5), "bytes of shared memory"), (POINT, "fp32", Pointwise(64, 2, 1), "bytes of shared"),
        (POINT, "fp32", Pointwise(64, 2, 4, 0), "at least one split"), (dgrad((2, 8, 4, 4), (8, 4, 1, 1), stride=2), "fp32", Pointwise(), "1x1 filters"),
    ],
    chosen=[*layers(), (fprop((64, 2048, 32, 32), (2048, 2048, 1, 1)), "fp32", False)],
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[
        *((problem, config, noted) for mode, config in WIDEST.items() for noted in (False, True)
          for problem in (asked(POINT, mode), replace(asked(POINT, mode), has_scale=True, has_residual=True, activation="relu"))),
        *((Filter((2, 64, 8, 8), (64, 64, 1, 1), layout="NCHW").problem("float32", precision=precision), config) for precision, config in (
            ("fp32", Pointwise(64, 2, 4, 2)), ("fp32", Pointwise(128, 1, 4, 2)), ("tf32", Pointwise(128, 2, 4, 2)), ("tf32", Pointwise(64, 1, 4, 2)))),
    ],
    spills=24,  # six words a stage, beside a residual
)  # fmt: skip
