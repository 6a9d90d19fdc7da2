"""The implicit GEMM of packed limbs (``hopper/gemm.cu`` behind ``core/pack.cu``)."""

import math
from dataclasses import replace

from alike import sharing
from awkward import AWKWARD, BASE, POINT
from filters import Filter
from modes import MODES, asked
from ranges import SCENARIOS
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv.engines.addressing import packing
from pycuda_conv.engines.hopper import gemm, gemm_launches
from pycuda_conv.engines.hopper.gemm import ImplicitGemm

#: A tile for each mode: both numbers of rows, splits, and few pixels, so that small problems have many tiles.
TILES = {
    "fp32": ImplicitGemm(64, 32, 2, 1), "fp32 last": ImplicitGemm(128, 24, 2, 2), "tf32": ImplicitGemm(128, 8, 3, 3), "tf32 last": ImplicitGemm(64, 16, 3, 1),
    "fp16": ImplicitGemm(64, 32, 2, 1), "fp16 last": ImplicitGemm(64, 64, 4, 2), "bf16": ImplicitGemm(128, 16, 2, 3), "bf16 last": ImplicitGemm(128, 48, 3, 1),
}  # fmt: skip
#: Of float32 and of 16 bits, in each layout. Cases take turns in them.
BY_TURNS = [("fp32", "bf16 last", "tf32 last", "fp16"), ("fp32 last", "bf16", "tf32", "fp16 last")]
TAKEN = [[(case, mode, TILES[mode]) for mode in BY_TURNS[i % 2] if mode in MODES and packing(asked(case, mode)) is not None] for i, case in enumerate(AWKWARD)]


def widest(mode: str, rows: int, stages: int, split: int = 1, case=BASE) -> ImplicitGemm:
    """The widest tile that is legal."""
    tiles = (ImplicitGemm(rows, pixels, stages, split) for pixels in range(1024, 0, -8))
    return next(tile for tile in tiles if gemm.refusal(asked(case, mode), tile) is None)


def narrower(problem, config: ImplicitGemm) -> ImplicitGemm:
    """`config`, with as many pixels as are legal."""
    return next(one for pixels in range(config.BLOCK_N, 0, -8) if gemm.refusal(problem, one := replace(config, BLOCK_N=pixels)) is None)


WHOLE = fprop((2, 64, 18, 16), (70, 64, 3, 3), padding=(0, 1))
PINGPONG = [  # consumers that alternate tiles
    (case, mode, ImplicitGemm(128, pixels, stages, split, schedule="pingpong"))
    for case, pixels, stages, split in (
        (BASE, 48, 3, 1), (BASE, 16, 4, 2), (fprop((3, 64, 12, 11), (136, 64, 3, 3), padding=1), 160, 3, 1), (fprop((2, 16, 7, 6), (9, 16, 3, 2)), 8, 5, 1),
        (fprop((2, 128, 7, 6), (80, 64, 3, 3), padding=1, groups=2), 32, 4, 3), (fprop((4, 40, 30), (70, 40, 5), padding=2, stride=3), 24, 2, 1),
        (dgrad((2, 64, 7, 7), (64, 72, 3, 3), stride=3, padding=1, output_padding=1), 32, 3, 1), (fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=1), 56, 3, 1),
    ) for mode in ("tf32", "tf32 last", "fp16", "bf16 last") if mode in MODES
]  # fmt: skip
TWINS = [  # blocks of one consumer
    (case, mode, ImplicitGemm(64, pixels, 2, schedule="twin"))
    for case, pixels in (
        (BASE, 48), (WHOLE, 128), (fprop((2, 16, 7, 6), (9, 16, 3, 2)), 16), (fprop((2, 128, 7, 6), (80, 64, 3, 3), padding=1, groups=2), 32),
        (fprop((4, 40, 30), (70, 40, 5), padding=2, stride=3), 24), (dgrad((2, 32, 7, 7), (32, 72, 3, 3), padding=1), 64),
        (fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=1), 56), (fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), 104),
    ) for mode in ("fp32", "tf32", "fp16", "bf16")
    if mode in MODES and not gemm.refusal(asked(case, mode), ImplicitGemm(64, pixels, 2, schedule="twin"))
]  # fmt: skip
#: Sums in parts that blocks of the product add: stored by threads and by TMA, of phases one by one and in pairs, of several launches, of folded taps, of groups, of three axes.
JOINED = [
    (fprop((2, 40, 7, 9), (21, 40, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2, 3)), (fprop((2, 40, 7, 9), (24, 40, 3, 3), padding=1), "fp32 last", ImplicitGemm(64, 64, 2, 4)),
    (fprop((3, 20, 11, 6), (70, 20, 3, 2), stride=2), "tf32 last", ImplicitGemm(128, 64, 3, 2)), (fprop((1, 40, 6, 8), (130, 40, 3, 3), padding=1), "tf32", ImplicitGemm(128, 64, 3, 5)),
    (dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), "fp32", ImplicitGemm(64, 64, 2, 2)), (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=3), "fp32", ImplicitGemm(64, 64, 2, 2)),
    (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=2), "fp32 last", ImplicitGemm(64, 64, 2, 2)), (fprop((2, 3, 15, 14), (20, 3, 5, 5), stride=2, padding=2), "fp32", ImplicitGemm(64, 64, 2, 2)),
    (fprop((2, 48, 6, 7), (40, 24, 3, 3), padding=1, groups=2), "fp32", ImplicitGemm(64, 64, 2, 8)), (fprop((2, 24, 3, 5, 6), (20, 24, 2, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2, 16)),
]  # fmt: skip
COMMON = fprop((2, 64, 9, 8), (40, 64, 3, 3), padding=1, bias=False)
NOTING = [
    (case, mode, replace(TILES[mode], SPLIT=1)) for case in (
        BASE, fprop((2, 48, 7, 6), (80, 24, 3, 3), padding=1, groups=2), fprop((4, 20, 30), (17, 20, 5), padding=2, stride=3),
        fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=(1, 0, 2)), fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3, bias=False),
        COMMON, fprop((2, 80, 7, 8), (80, 40, 3, 3), padding=1, groups=2), fprop((4, 40, 31), (17, 40, 5), padding=2, stride=2),
    ) for mode in TILES if mode in MODES
]  # fmt: skip
NOTING += [run for run in PINGPONG if run[2].SPLIT == 1 and not run[0].transposed][::2]
NOTED = [run for run in NOTING if gemm_launches._moments(asked(*run[:2]), run[2])]

#: Filters whose output channels are last; the other widths of tiles.
TURNED = [
    (dgrad((2, 64, 5, 5), (64, 8, 3, 3)), "fp16 last", ImplicitGemm(64, 128, 3)), (dgrad((2, 192, 5, 5), (192, 24, 3, 3), stride=2), "bf16 last", ImplicitGemm(64, 256, 3)),
    (BASE, "fp32", ImplicitGemm(64, 96, 2)), (BASE, "tf32", ImplicitGemm(64, 144, 2)), (BASE, "fp16", ImplicitGemm(64, 256, 2)), (BASE, "fp32", ImplicitGemm(128, 96, 2, 2)),
]  # fmt: skip
TURNED = [run for run in TURNED if run[1] in MODES]

#: Gradients of filters: batches that fill loads or don't, folded rows, every rank.
FILTERS = [
    Filter((32, 20, 9, 8), (40, 20, 3, 3), padding=(1,), layout="NCHW"), Filter((16, 24, 5, 6), (70, 24, 3, 2), padding=(1, 0), stride=(2,), layout="NCHW"),
    Filter((5, 20, 9, 8), (40, 20, 3, 3), padding=(1,), layout="NCHW"), Filter((64, 8, 6, 6), (9, 8, 1, 1), layout="NCHW"), Filter((3, 5, 30), (6, 5, 4), padding=(2,), stride=(3,), dilation=(2,), layout="NCHW"),
    Filter((2, 3, 20, 140), (10, 3, 7, 7), stride=(2,), padding=(3,), layout="NCHW"), Filter((16, 4, 4, 5, 6), (9, 4, 3, 2, 3), padding=(1, 0, 2), layout="NCHW"),
    Filter((32, 40, 6, 7), (130, 20, 3, 3), padding=(1,), groups=2, layout="NCHW"), Filter((5, 48, 8, 8), (24, 16, 3, 2), stride=(2,), groups=3, layout="NCHW"), Filter((17, 12, 30), (20, 3, 3), groups=4, layout="NCHW"),
    Filter((70, 16, 5, 5), (130, 16, 3, 3), dilation=(2,), padding=(2,), layout="NCHW"), Filter((33, 7, 1, 1), (5, 7, 1, 1), layout="NCHW"), Filter((24, 6, 40), (8, 6, 5), stride=(2,), layout="NCHW"),
]  # fmt: skip
GRADIENTS = [(case, mode, (ImplicitGemm(64, 32, 2, 1), ImplicitGemm(128, 24, 2, 3))[i % 2]) for i, case in enumerate(FILTERS) for mode in (("fp32", "tf32", "bf16", "fp16")[i % 4],) if mode in MODES]
GRADIENTS_ON_GPU = [
    (case, mode, config) for case in FILTERS for mode, config in zip(("fp32", "tf32", "fp16", "bf16"), (ImplicitGemm(64, 128, 3, 1), ImplicitGemm(128, 64, 4, 5), ImplicitGemm(128, 128, 4, 1), ImplicitGemm(64, 64, 4, 16)), strict=True)
]  # fmt: skip

# ---- numbers of every range, and such as are not finite

WIDE = fprop((4, 24, 10, 9), (40, 24, 3, 3), padding=1, bias=False)
BACK = dgrad((4, 24, 6, 5), (24, 40, 3, 3), stride=2, padding=1, bias=False)
STEM = fprop((4, 3, 20, 19), (24, 3, 7, 7), stride=2, padding=3, bias=False)
SPREAD = {  # by mode: where a number that is not one could reach results that don't depend on it
    "fp32": (WIDE, dgrad((2, 24, 6, 5), (24, 9, 3, 2), stride=2, padding=1), fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2)),
    "fp16": (WIDE, fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2), fprop((2, 15, 5, 6), (9, 5, 3, 3), groups=3, padding=1), dgrad((2, 48, 5, 6), (48, 12, 3, 3), groups=2, stride=2)),
    "fp16 last": (WIDE, fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2), fprop((2, 128, 5, 6), (16, 64, 3, 3), groups=2), fprop((2, 96, 5, 6), (18, 32, 3, 3), groups=3)),
}  # fmt: skip
SPREAD["tf32"] = SPREAD["fp32"]
NOT_FINITE = [
    *((replace(case, bias=False), mode, ImplicitGemm(64, 128, 3)) for mode, cases in SPREAD.items() for case in cases),
    # windows: rows of the image beside those that the filter reaches
    *((fprop((3, 3, 11, 12), (9, 3, *size), stride=2, padding=1, bias=False), mode, ImplicitGemm(64, 128, 3)) for mode in ("fp32", "fp16", "fp16 last") for size in ((5, 5), (4, 3))),
    (fprop((2, 100, 5, 8), (70, 100, 1, 1), bias=False), "fp16", ImplicitGemm(128, 64, 3)),
]  # fmt: skip
LARGER = fprop((3, 15, 66, 64), (256, 15, 7, 7), stride=2, padding=3, bias=False)  # large enough for windows with rows beyond the filter of 16 bits

#: A batch that fills loads.
WHOLE_IMAGES = Filter((16, 20, 5, 6), (40, 20, 3, 3), padding=(1,), layout="NCHW"), "fp32", ImplicitGemm(64, 128, 3)

# ---- on a GPU: tiles of every kind, a little smaller and larger than the problem

WIDER = fprop((5, 72, 13, 14), (200, 72, 3, 3), padding=1)
DENSE = fprop((3, 64, 9, 12), (72, 64, 3, 3), padding=1)  # rows of y that TMA can write
SPLITS = ImplicitGemm(128, 64, 3, 3)
LARGE_STEM = fprop((8, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3)
GPU_TILES = {mode: ImplicitGemm(64, 128, 3) if "p32" in mode else ImplicitGemm(128, 128, 4) for mode in MODES}
GPU = [
    *((case, "fp32", config) for case in (WIDER, DENSE) for config in (
        ImplicitGemm(128, 128, 3), widest("fp32", 128, 2), widest("fp32", 128, 3), ImplicitGemm(128, 8, 6), ImplicitGemm(64, 128, 3), widest("fp32", 64, 2), ImplicitGemm(64, 16, 6),
        SPLITS, widest("fp32", 128, 2, 2), ImplicitGemm(128, 72, 4, 8), ImplicitGemm(64, 96, 2, 30))),
    *((case, "fp32 last", config) for case in (WIDER, fprop((2, 40, 9, 11), (33, 40, 3, 3), padding=1)) for config in (
        ImplicitGemm(128, 128, 3), ImplicitGemm(64, 128, 3, 2), ImplicitGemm(128, 40, 4), ImplicitGemm(64, 48, 3))),
    *((case, mode, config) for case in (WIDER, DENSE) for mode in ("tf32", "fp16", "bf16 last") for config in (
        widest(mode, 128, 4), widest(mode, 64, 3), ImplicitGemm(128, 96, 4, 2), ImplicitGemm(128, 64, 7))),
    *((WIDER, mode, config) for mode in ("tf32 last", "bf16", "fp16 last") for config in (
        widest(mode, 128, 2), ImplicitGemm(64, 128, 4, 2), ImplicitGemm(128, 8, 8), ImplicitGemm(128, 112, 4, 30), ImplicitGemm(64, 96, 5))),
    *((POINT, mode, ImplicitGemm(128, 128, 3)) for mode in ("fp32", "fp32 last", "tf32", "fp16", "bf16 last")),
    *TWINS, *((DENSE, mode, ImplicitGemm(64, 128, 2, schedule="twin")) for mode in ("fp32", "tf32", "fp16", "bf16")),
    *PINGPONG, *((fprop((7, 72, 28, 24), (200, 72, 3, 3), padding=1), mode, ImplicitGemm(128, pixels, 4, schedule="pingpong")) for mode in ("tf32", "tf32 last", "fp16 last") for pixels in (128, 160, 192)),
    *((LARGE_STEM, mode, ImplicitGemm(64, 256, 5)) for mode in ("fp16", "fp16 last", "bf16 last")),
    *((fprop((5, 72, 13, 14), (136, 72, 1, 1), stride=2), mode, ImplicitGemm(128, 64, 3)) for mode in ("fp32", "tf32 last", "bf16")),
    *((dgrad((5, 128, 13, 14), (128, 200, 3, 3), padding=1), mode, config) for mode in ("fp16 last", "bf16 last") for config in (ImplicitGemm(128, 128, 4), ImplicitGemm(128, 128, 4, schedule="pingpong"))),
    *((case, mode, config) for mode, config in (("fp32", ImplicitGemm(64, 128, 3)), ("fp16 last", ImplicitGemm(128, 128, 4)), ("tf32 last", SPLITS)) for case in (
        fprop((2, 64, 5, 6, 7), (48, 64, 3, 3, 3), padding=1), fprop((4, 96, 50), (80, 96, 5), padding=2, stride=2), fprop((2, 3, 40, 39), (64, 3, 7, 7), stride=2, padding=3),
        dgrad((2, 64, 7, 9), (64, 72, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 48, 9, 8), (48, 40, 3, 3), padding=1, groups=2), fprop((2, 160, 9, 8), (96, 80, 3, 3), groups=2))),
    # phases that are written together: rows turned 8, 16, 24 and 32 pixels at a time
    *((case, mode, config) for case in (
        dgrad((3, 24, 5, 7), (24, 70, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 72, 9, 16), (72, 40, 4, 4), stride=2, padding=1, groups=2),
        dgrad((5, 16, 33), (16, 130, 3), stride=2, padding=1, output_padding=1))
      for mode, config in (("fp32", ImplicitGemm(128, 56, 3)), ("tf32", ImplicitGemm(64, 80, 3)), ("fp16", ImplicitGemm(128, 112, 4)), ("tf32", ImplicitGemm(128, 120, 3, 2)),
                           ("bf16", ImplicitGemm(64, 16, 4)), ("fp32", ImplicitGemm(64, 176, 2)))),
    *((case, mode, GPU_TILES[mode]) for i, runs in enumerate(TAKEN) for case, mode, _ in runs[i % 4 :: 2][: 1 + (i % 3 == 2)]),
]  # fmt: skip

# ---- what nvcc compiles: the widest tiles of every kind, and the packing beside them

FULL, STRIDED, ODD = fprop((2, 64, 10, 20), (72, 64, 3, 3)), dgrad((2, 64, 5, 6), (64, 72, 3, 2), stride=2), fprop((2, 16, 4, 5, 9), (70, 16, 3, 3, 3), bias=False)
PAIRS = dgrad((2, 64, 5, 5), (64, 72, 3, 3), stride=2, padding=1, output_padding=1)
COMPILED = [
    *((FULL, mode, widest(mode, 128, 2)) for mode in ("fp32", "fp32 last", "tf32", "fp16", "bf16 last") if mode in MODES),
    *((dgrad((2, 64, 5, 6), (64, 72, 3, 2), stride=3), mode, widest(mode, 64, 3)) for mode in ("fp32", "fp16 last")),
    *((case, mode, widest(mode, 64, 2, case=case)) for mode, case in (("fp32", STRIDED), ("tf32", STRIDED), ("fp16", PAIRS))),
    *((ODD, mode, widest(mode, 128, 2, 2)) for mode in ("fp32 last", "tf32")), (fprop((2, 24, 200), (72, 24, 3)), "fp32", ImplicitGemm(128, 128, 3)),
    *((fprop((2, 3, 20, 20), (64, 3, 7, 7), stride=2), mode, ImplicitGemm(64, 128, stages)) for mode, stages in (("fp32 last", 3), ("bf16", 5)) if mode in MODES),
    # at 192 pixels of NCHW, and in tf32 beside a residual with channels last, some bytes do spill where a tile is stored: those are not slower
    *((FULL, mode, ImplicitGemm(128, pixels, 3, schedule="pingpong")) for mode, pixels in (("tf32", 160), ("fp16", 160), ("bf16 last", 192)) if mode in MODES),
]  # fmt: skip
#: Beside a residual three products leave room for fewer pixels.
FINISHED = [(problem := replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu"), narrower(problem, config)) for case, mode, config in COMPILED]
MOMENTS = [(asked(*run[:2]), run[2], True) for run in COMPILED if run[0].options.get("groups", 1) == 1 and "p16" not in run[1] and gemm_launches._moments(asked(*run[:2]), run[2])]

AXES = fprop((2, 24, 5, 6, 10), (80, 24, 2, 3, 2), stride=(1, 2, 2), padding=((1, 0), (0, 2), (1, 1)), dilation=(2, 1, 2))
PHASED = dgrad((2, 48, 3, 4, 5), (48, 40, 3, 4, 3), stride=(2, 1, 2), padding=(2, 2, 0), groups=2)

CASES = Cases(
    engine=gemm,
    kernel="hopper_gemm",
    runs=[(BASE, "fp16 last", ImplicitGemm(64, 64, 4, 2)), *sharing([runs for i, runs in enumerate(TAKEN) if i % 2 == 0 and runs and math.prod(asked(*runs[0][:2]).result_size) < 3000]), *PINGPONG[1::5], *TWINS[::5], *JOINED[::4], *TURNED, *GRADIENTS],
    unseen=[("PRODUCTS", 2)],  # test_integers.py
    gpu=[run for run in (*GPU, *GRADIENTS_ON_GPU) if run[1] in MODES],
    grids=[(BASE, mode, ImplicitGemm(64, 48, 2, split)) for mode, split in (("fp32", 1), ("tf32 last", 5))],
    finished=[
        (BASE, "fp32", ImplicitGemm(64, 32, 2), ("gelu", "relu6")), (fprop((2, 24, 9, 8), (32, 24, 3, 3), padding=1), "fp32 last", ImplicitGemm(128, 32, 3), ("silu",)),
        (fprop((2, 24, 9, 8), (32, 24, 3, 3), padding=1), "fp16 last", ImplicitGemm(64, 64, 4), (("leaky_relu", 0.2), "hardswish")), (BASE, "tf32", ImplicitGemm(128, 8, 3, 3), ("gelu_tanh",)),
        (dgrad((2, 24, 5, 6), (24, 40, 3, 2), stride=2, padding=1, output_padding=(1, 0)), "fp32", ImplicitGemm(64, 32, 2), ("gelu",)), (BASE, "tf32", ImplicitGemm(128, 24, 3, schedule="pingpong"), ("silu",)),
    ],
    noted=NOTED[::9],
    arguments=[
        ((AXES, "fp32", TILES["fp32"]), "tiles tiles_m split_stages spatial_dims channel_blocks rows row_blocks tap_r tap_step_t dilation_d dilation_h pixels load_pq load_q stride_h low_d low_w"),
        ((PHASED, "tf32", TILES["tf32"]), "blocks_group tap_base tap_step_s channels_group plane pq q out_base out_d out_h out_w"),
    ],
    not_finite=[(case, mode, TILES[mode]) for case, mode, _ in NOT_FINITE[1::3]],
    not_finite_gpu=[*NOT_FINITE, *((LARGER, mode, ImplicitGemm(64, 128, 3)) for mode in ("fp16", "fp16 last", "bf16 last") if mode in MODES), WHOLE_IMAGES],
    precise_gpu=[WHOLE_IMAGES],
    ranged=[(WIDE, "fp32", TILES["fp32"], SCENARIOS[::3]), (WIDE, "tf32", ImplicitGemm(64, 32, 3), SCENARIOS[1::6]), (BACK, "fp32", TILES["fp32"], SCENARIOS[2::6])],
    ranged_gpu=[*((case, mode, ImplicitGemm(64, 128, 3), SCENARIOS) for case in (WIDE, BACK, STEM) for mode in ("fp32", "tf32")), (WIDE, "fp32", ImplicitGemm(64, 128, 3, 2), SCENARIOS)],
    orders=[(BASE, "fp32", [ImplicitGemm(64, 32, 2), ImplicitGemm(128, 24, 2), ImplicitGemm(64, 48, 2, schedule="twin"), ImplicitGemm(64, 32, 2, 2)], 2)],
    broken=[
        Broken((BASE, "fp16 last", ImplicitGemm(64, 64, 4)), [  # it writes boxes
            ("  fence_for_bulk();\n  named_barrier", "  named_barrier", "which a thread wrote without a fence"),
            ("  if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait_read<0>();", "", "ends with bulk stores that it did not wait for"),
        ]),
        Broken(JOINED[0], [("== (unsigned)shape.splits - 1;", "== 0;"), ("tickets[i] = 0;", "tickets[i] = 1;")]),
    ],
    refused=[
        (BASE, "fp32", ImplicitGemm(96, 128, 3), "64 or 128 rows"),
        *((BASE, mode, ImplicitGemm(rows, pixels, 2), "a consumer takes a multiple of 8 pixels up to") for mode in ("fp32", "tf32 last", "fp16") for rows, pixels in ((128, 100), (128, 0), (128, 264), (64, 72), (64, 8), (64, 528))),
        (BASE, "fp32", ImplicitGemm(128, 128, 1), "stages"), (BASE, "fp32", ImplicitGemm(128, 128, 4), "bytes of shared memory"), (BASE, "fp16", ImplicitGemm(128, 128, 8), "bytes of shared memory"),
        (BASE, "fp32", ImplicitGemm(128, 128, 3, 0), "at least one split"), (BASE, "fp16", ImplicitGemm(128, 200, 3, schedule="pingpong"), "all 200 pixels of a tile then, up to 192"),
        *((case, mode, replace(config, schedule="pingpong"), "consumers alternate tiles if these have 128 rows") for case, mode, config in (
            (BASE, "fp32", ImplicitGemm(128, 64, 3)), (BASE, "tf32", ImplicitGemm(64, 64, 3)), (dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), "tf32", ImplicitGemm(128, 64, 3)))),
        (fprop((0, 8, 5, 5), (4, 8, 3, 3)), "fp32", ImplicitGemm(), "nothing to compute"), (fprop((2, 0, 5, 5), (4, 0, 3, 3)), "fp32", ImplicitGemm(), "nothing to compute"),
        (fprop((2**11, 8, 2**10, 2**10), (8, 8, 1, 1)), "fp16 last", ImplicitGemm(), "counts pixels in 32 bits"), (dgrad((2**9, 8, 2**10, 2**10), (8, 8, 2, 2), stride=2), "fp16", ImplicitGemm(), "counts pixels in 32 bits"),
        (BASE.problem("float64"), ImplicitGemm(), "takes float32, float16, bfloat16 arrays"), (dgrad((1, 16, 9, 9), (16, 8, 2, 2), dilation=129), "fp32", ImplicitGemm(), "tensor loads can't"),
        (replace(asked(BASE, "fp32"), has_residual=True), ImplicitGemm(128, 136, 2), "up to 128"),
    ],
    devices={((9, 0), "cuda"): True, ((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((7, 5), "cuda"): False, ((0, 0), "opencl"): False},
    chosen=[(fprop((8, 64, 28, 28), (128, 64, 3, 3), padding=1), "fp32", True), (BASE.problem("float64"), False)],
    layers=Layers(["dense 3x3", "dense 1x1", "volume", "upsampling", "odd"], [("fprop", MODES["fp32"]), ("dgrad", MODES["tf32"]), ("fprop", MODES["fp16"]), ("wgrad", MODES["fp32"])], each=3, least=25),
    compiled=[*((asked(*run[:2]), run[2]) for run in COMPILED), *FINISHED[::2], *MOMENTS[::2]],
    spills=72,  # some words of a tile's stores, of stages that are put off, or of the arguments of a filter that is packed
)  # fmt: skip
