"""Convolutions of channels-last arrays as they lie (``hopper/dense.cu``)."""

from dataclasses import replace

from alike import sharing
from awkward import AWKWARD
from modes import MODES, asked
from ranges import SCENARIOS
from reference import dgrad, fprop

from cases import Broken, Cases, Layers
from pycuda_conv import ConvProblem
from pycuda_conv.engines.hopper import dense
from pycuda_conv.engines.hopper.dense import DenseNhwc

KINDS = [mode for mode in ("tf32 last", "fp16 last", "bf16 last") if mode in MODES]
#: Tails of channels, rows and pixels, strides, padding, dilation, one to three axes, phases of one and several taps, and of none.
SHAPES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((3, 64, 10, 12), (136, 64, 1, 1)), fprop((2, 136, 7, 5), (9, 136, 3, 2), padding=(1, 0)),
    fprop((3, 16, 13, 9), (70, 16, 1, 1), stride=2), fprop((2, 72, 11, 17), (33, 72, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    fprop((40, 8, 3, 3), (21, 8, 3, 3), padding=1), fprop((2, 16, 50), (48, 16, 5), padding=2), fprop((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)),
    dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((3, 136, 10, 12), (136, 64, 1, 1)), dgrad((2, 24, 5, 6), (24, 72, 3, 3), stride=2, padding=1, output_padding=1),
    dgrad((2, 16, 5, 7), (16, 20, 1, 1), stride=2), dgrad((2, 16, 5, 4), (16, 36, 4, 3), stride=3, padding=1), dgrad((2, 48, 20), (48, 16, 5), stride=2, padding=2),
    dgrad((1, 16, 3, 4, 3), (16, 24, 3, 2, 3), stride=2, padding=(1, 0, 1)),
    # phases that are repeats of others: all of one, and of several
    dgrad((2, 72, 5, 3), (72, 16, 4, 4), stride=4), dgrad((2, 24, 13), (24, 40, 16), stride=8, padding=4), dgrad((1, 16, 2, 3), (16, 24, 8, 4), stride=(4, 2), padding=(2, 1)),
    # volumes: more slices or fewer than are read, and taps in front of the first and behind the last
    fprop((1, 72, 5, 4, 6), (40, 72, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1))), fprop((1, 16, 9, 5, 3), (24, 16, 4, 1, 3), padding=((1, 2), (0, 0), (1, 1)), stride=(1, 2, 1), dilation=(2, 1, 1)),
    dgrad((1, 24, 4, 5, 6), (24, 40, 3, 3, 2), padding=(2, 1, 0)),
    # groups, whose channels fill rows of 128 bytes
    fprop((2, 128, 5, 6), (192, 64, 3, 3), padding=1, groups=2), fprop((1, 192, 7, 5), (192, 64, 3, 2), stride=2, padding=1, groups=3),
]  # fmt: skip
#: One of each kind: the small and the large, of a cluster and alone, whole blocks of 64 channels and not.
TILES = (DenseNhwc(64, 64, 2), DenseNhwc(128, 96, 3), DenseNhwc(64, 32, 4, 8), DenseNhwc(128, 128, 3, 2), DenseNhwc(128, 256, 2), DenseNhwc(64, 32, 3))


def tiles(case, mode):
    """All that run it."""
    return [config for config in TILES if dense.refusal(asked(case, mode), config) is None]


EVERY = [(case, mode, config) for case in (*SHAPES, *AWKWARD) for mode in KINDS for config in tiles(case, mode)[: None if case in SHAPES else 1]]
THIRD = [case for case in dict.fromkeys(case for case, *_ in EVERY) if case not in SHAPES][::3]
TURNED = SHAPES[11], "tf32 last", DenseNhwc(64, 32, 4, 8)  # a filter that the launch turns, in its last warps
#: The widest tiles; filters that are turned.
MORE = [
    (SHAPES[0], KINDS[-1], DenseNhwc(128, 192, 2)), (SHAPES[1], "fp16 last", DenseNhwc(128, 160, 3)), (SHAPES[0], "fp16 last", DenseNhwc(64, 96, 3, 4)),
    (SHAPES[9], "tf32 last", DenseNhwc(64, 32, 3)), TURNED,
    (SHAPES[0], "fp16 last", DenseNhwc(256, 96, 2)),
]  # fmt: skip
LARGE = fprop((9, 192, 28, 28), (256, 192, 3, 3), padding=1)
THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)
SLICES = fprop((4, 16, 10, 9), (136, 16, 1, 1), bias=False)  # of slices all of whose pixels exist, and one of a few
RANGED = [one for one in SCENARIOS if one != "subnormals"]
CHANNELS = [fprop((3, 32, 9, 11), (channels, 32, 3, 3), padding=1) for channels in (72, 21, 20)]  # written four at once, and one at a time
BOXED = fprop((2, 8, 2, 16, 24), (40, 8, 3, 1, 3), padding=(1, 0, 1))  # several boxes along each axis
BASE = SHAPES[0]
GROUPED = replace(BASE, input_shape=(2, 128, 9, 8), weight_shape=(80, 64, 3, 3), options={"groups": 2, "padding": 1})
#: A decoder's of videos: a padding on one side of the frames, and more channels than rows of 128 bytes hold.
VIDEO = [ConvProblem.forward(3, (1, c, 68, 256, 256), (96, c, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1)), dtype="bfloat16", layout="NHWC") for c in (96, 192)]

READS = "which a pending product or store still reads"

CASES = Cases(
    engine=dense,
    kernel="hopper_dense",
    runs=sharing([[run for run in EVERY if run[0] is case] for case in SHAPES]) + sharing([[run for run in EVERY if run[0] == case] for case in THIRD]) + MORE,
    gpu=[*EVERY, *MORE, *((LARGE, mode, config) for mode in KINDS for config in (DenseNhwc(128, 192, 4), DenseNhwc(64, 128, 3), DenseNhwc(128, 128, 6, 4)))],
    unseen=[("BORDERED", 1), ("PHASES", 9), ("PHASES", 25)],  # test_packed_borders.py
    grids=[(SHAPES[2], "tf32 last", DenseNhwc(64, 32, 2, cluster)) for cluster in (1, 4)],
    finished=[
        *((case, mode, DenseNhwc(64, 64, 4, cluster), ("gelu", "relu6")) for case, mode, cluster in zip(CHANNELS, KINDS, (1, 1, 4), strict=False)),
        *((case, KINDS[i % len(KINDS)], config, ("gelu",)) for i, case in enumerate((SHAPES[2], SHAPES[10], SHAPES[11])) for config in (DenseNhwc(64, 64, 2), DenseNhwc(64, 32, 4, 8))
          if dense.refusal(asked(case, KINDS[i % len(KINDS)]), config) is None),
    ],
    noted=[(case, mode, config) for case in SHAPES[:4] for mode, config in zip(KINDS, (DenseNhwc(128, 96, 3), DenseNhwc(64, 64, 2), DenseNhwc(64, 64, 2)), strict=False)]
    + [(SLICES, mode, config) for mode, config in zip(KINDS, (DenseNhwc(128, 64, 3), DenseNhwc(128, 96, 3), DenseNhwc(128, 160, 2)), strict=False)
       if dense.refusal(asked(SLICES, mode), config) is None] + [(one, "fp16 last", DenseNhwc(256, 96, 2)) for one in (SHAPES[0], SLICES)],
    not_finite=[(case, mode, DenseNhwc(64, 64, 2)) for case in (BASE, SHAPES[10]) for mode in KINDS],
    not_finite_gpu=[(case, mode, config) for case in (BASE, SHAPES[10]) for config in (DenseNhwc(64, 64, 4), DenseNhwc(64, 32, 4, 4)) for mode in KINDS],
    ranged=[(THIN, "tf32 last", DenseNhwc(64, 64, 2), RANGED[::4])],
    ranged_gpu=[(THIN, "tf32 last", DenseNhwc(64, 32, 4), RANGED)],
    arguments=[
        ((SHAPES[2], "tf32 last", DenseNhwc(64, 64, 2)), "blocks channel_blocks rows tap_s tap_base tap_step_s dilation_h dilation_w low_h low_w q height images out_size out_h out_w"),
        ((SHAPES[4], "tf32 last", DenseNhwc(64, 64, 2)), "stride_h tap_r tap_step_r plane pq"), ((CHANNELS[1], "fp16 last", DenseNhwc(64, 32, 3)), "load_plane load_q low_h"),
        ((BOXED, "fp16 last", DenseNhwc(64, 32, 3)), "spatial_dims box_w box_h box_d box_n boxes_w boxes_h boxes_d depth out_d low_d"),
        ((SHAPES[10], "tf32 last", DenseNhwc(64, 64, 2)), "tap_step_s out_base"),
    ],
    broken=[  # the first writes runs of pixels, the second four channels at once
        Broken((SHAPES[2], "fp16 last", DenseNhwc(64, 32, 3)), [
            ("ring.wait_empty(at);", "", "more than its 1 arrivals"), ("ring.wait_full(at);", "", f"a load has not brought yet|{READS}"), ("ring.init(producers, 4 * consumers);", "ring.init(1, 1);"),
            ("if (behind == 0 || follows) give_back(at, behind);", "", "deadlock:\n  block 0, threads 0 to 127: wait for mbarrier 0 at 1024, parity 1; it has had 1 phases, and lacks 1 arrivals"),
            ("wgmma_wait<behind>();", "wgmma_wait<behind + 1>();", READS), ("  wgmma_wait<0>();\n", "\n", "ends with products that it did not wait for|assert"), ("apart / 16 + A::STEP * k,", "apart / 16 + A::STEP * (k ^ 1),"),
            ("x_s = TAP_OFFSET(s, w);", "x_s = TAP_OFFSET(r, w);"), ("min(16, (int)shape.pixels - pixel)", "16", "writes .* bytes at .* of buffer 3, which has"),
        ], seeds=(1, 2, 3)),
        Broken(TURNED, [("fence_for_bulk();\n      __syncwarp();", "fence_for_bulk();")]),
        Broken((BASE, "fp16 last", DenseNhwc(64, 32, 3)), [("if (places.there[half] && places.real(shape, base)) store_word", "if (places.real(shape, base)) store_word")], seeds=(1, 2, 3)),
    ],
    refused=[
        (BASE, "fp16", DenseNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", DenseNhwc(), "precision='tf32'"), (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 12, 3, 3)), "fp16 last", DenseNhwc(), "multiple of 128 bytes"),
        (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16 last", DenseNhwc(), "nothing to compute"), (fprop((2, 12, 4, 4), (4, 12, 1, 1)), "fp16 last", DenseNhwc(), "multiple of 16 bytes"),
        (fprop((2, 8, 2**15, 2**15), (4, 8, 1, 1)), "fp16 last", DenseNhwc(), "32 bits"), (fprop((1, 16, 6, 300), (8, 16, 2, 2), dilation=(3, 256)), "fp16 last", DenseNhwc(), "padding or dilation"),
        (GROUPED, "fp16 last", DenseNhwc(64, 32), "lies in one group"), (replace(GROUPED, transposed=True, weight_shape=(128, 40, 3, 3)), "fp16 last", DenseNhwc(), "takes groups forward"),
        (BASE, "fp16 last", DenseNhwc(96), "BLOCK_M must be one of 64, 128"), (BASE, "fp16 last", DenseNhwc(64, 160), "up to 128"), (BASE, "fp16 last", DenseNhwc(256, 64), "of 256 pixels has 96"), (BASE, "fp16 last", DenseNhwc(128, 80), "32, 64, 96"),
        (BASE, "fp16 last", DenseNhwc(64, 64, 4, 3), "CLUSTER must be one of 1, 2, 4, 8"), (BASE, "fp16 last", DenseNhwc(128, 160, 4, 2), "share tiles"), (BASE, "fp16 last", DenseNhwc(128, 128, 2, 2), "no room for the sums"),
        (BASE, "fp16 last", DenseNhwc(128, 256, 6), "bytes of shared memory"), (BASE, "fp16 last", DenseNhwc(64, 64, 1), "bytes of shared memory"),
    ],
    chosen=[(problem, True) for problem in VIDEO],
    layers=Layers(
        ["dense 3x3", "dense 1x1", "small batch", "volume", "upsampling", "odd"],
        [("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC")), ("dgrad", ("float32", "tf32", "NHWC"))], each=4, least=30,
    ),
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=[
        *((replace(asked(BASE, mode), has_scale=True, has_residual=config.BLOCK_N < 256, activation="relu"), config)
          for mode in KINDS for config in (DenseNhwc(128, 256, 4), DenseNhwc(64, 128, 3), DenseNhwc(128, 128, 6, 8), DenseNhwc(64, 32, 4, 2))[: 2 if mode == "bf16 last" else None]),
        *((asked(BASE, mode), DenseNhwc(128, 192, 4), True) for mode in KINDS),
        *((asked(SHAPES[10], mode), config) for mode in KINDS for config in (DenseNhwc(128, max(columns for _, columns in dense.PHASED_TILES), 4), DenseNhwc(64, 32, 4, 2))),
    ],
    spills=32,  # where the widest tile is stored: an activation's call takes registers
)  # fmt: skip
