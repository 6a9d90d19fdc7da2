"""Gradients of filters from channels-last arrays as they lie, and of 1x1 filters from NCHW arrays (``hopper/wgrad.cu``)."""

from alike import sharing
from filters import Filter
from modes import MODES, asked, dtype_of

from cases import Broken, Cases, Layers
from pycuda_conv.engines.hopper import wgrad
from pycuda_conv.engines.hopper.wgrad_form import WgradNhwc, max_stages

KINDS = [mode for mode in ("fp16 last", "bf16 last", "tf32 last") if mode in MODES]
HALVES = KINDS[:-1]
#: Tails of channels and positions, several tiles, strides, padding, dilation, groups, one to three axes, filters of one and of many taps.
SHAPES = [
    Filter((2, 24, 9, 8), (40, 24, 3, 3), padding=(1,)), Filter((3, 64, 10, 12), (136, 64, 1, 1)), Filter((2, 136, 7, 5), (8, 136, 3, 2), padding=(1, 0)),
    Filter((3, 16, 13, 9), (72, 16, 1, 1), stride=(2,)), Filter((2, 72, 11, 17), (32, 72, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    Filter((40, 8, 3, 3), (24, 8, 3, 3), padding=(1,)), Filter((2, 16, 50), (48, 16, 5), padding=(2,)), Filter((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)),
    Filter((1, 200, 6, 7), (264, 200, 1, 1)), Filter((2, 16, 12, 10), (16, 16, 2, 3), stride=(3, 2), padding=((1, 2), (0, 1))),
    Filter((2, 48, 7, 6), (80, 24, 3, 3), padding=(1,), groups=2), Filter((1, 64, 5, 6), (64, 16, 1, 1), groups=4), Filter((2, 8, 9, 30), (16, 8, 3, 7), padding=(1, 3)),
    Filter((1, 8, 6, 7, 9), (8, 8, 2, 3, 2), stride=(1, 2, 3), padding=((0, 2), (2, 1), (1, 0)), dilation=(2, 1, 2)), Filter((2, 16, 64), (8, 16, 2), padding=((16, 0),), dilation=(70,)),
    Filter((2, 128, 7, 6), (128, 32, 3, 2), padding=(1,), groups=4), Filter((1, 96, 5, 9), (288, 16, 1, 3), groups=6), Filter((2, 64, 9, 6), (192, 4, 3, 3), stride=(2,), padding=(1,), groups=16),
    Filter((1, 120, 6, 7), (40, 12, 2, 2), groups=10), Filter((2, 16, 2, 3), (8, 16, 2, 3)), Filter((1, 128, 8, 8), (192, 128, 3, 3), padding=(1,)),
]  # fmt: skip
#: Channels that are copied first, of one array or of both; taps that are folded into channels: rows of them, all, with steps and padding.
PADDED = [
    Filter((2, 91, 9, 8), (40, 91, 3, 3), padding=(1,)), Filter((2, 16, 9, 7), (19, 16, 5, 3), padding=(2, 1)), Filter((3, 13, 6, 7), (2, 13, 1, 1)), Filter((2, 3, 12, 10), (17, 3, 3, 2), stride=(2,)),
    Filter((3, 3, 21, 17), (64, 3, 7, 7), stride=(2,), padding=(3,)), Filter((2, 4, 12, 12), (24, 4, 4, 4), stride=(4,)), Filter((2, 2, 30, 41), (8, 2, 3, 4), padding=((2, 0), (0, 3)), dilation=(1, 2)),
    Filter((2, 64, 5, 6), (1, 64, 1, 1)), Filter((2, 2, 50), (12, 2, 5), padding=(2,)), Filter((1, 70, 4, 5, 6), (9, 70, 2, 1, 3)),
]  # fmt: skip
#: 1x1 filters of NCHW arrays: tails of channels and planes, several tiles, groups, one to three axes.
PLANES = [
    Filter((3, 72, 10, 12), (136, 72, 1, 1), layout="NCHW"), Filter((2, 40, 12, 20), (70, 40, 1, 1), layout="NCHW"), Filter((3, 24, 96), (20, 24, 1), layout="NCHW"), Filter((2, 64, 3, 8), (64, 32, 1, 1), groups=2, layout="NCHW"),
    Filter((2, 10, 3, 4, 2), (201, 10, 1, 1, 1), layout="NCHW"), Filter((5, 200, 14, 12), (264, 200, 1, 1), layout="NCHW"),
]  # fmt: skip
#: Flipped tiles, where dy has few channels: these folded with the taps of a row, of a plane, and not; odd numbers of channels; one to three
#: axes.
FEW = [
    Filter((2, 136, 7, 5), (12, 136, 3, 2), padding=(1, 0)), Filter((1, 136, 5, 6), (72, 136, 3, 3), padding=(1,)), Filter((2, 91, 9, 8), (21, 91, 3, 3), padding=(1,)),
    Filter((2, 24, 4, 6, 5), (19, 24, 3, 3, 2), padding=(1, 0, 1)), Filter((1, 40, 7, 10), (4, 40, 3, 5), padding=((2, 0), (0, 1)), dilation=(1, 2)), Filter((2, 40, 50), (16, 40, 5), padding=(2,)),
]  # fmt: skip
FLIPPED = {
    2: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 192, 3, 1, True), WgradNhwc(256, 192, 3, 2, True), WgradNhwc(128, 128, 3, 9, True)),
    4: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 64, 3, 1, True)), 8: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 64, 3, 1, True)),
}  # fmt: skip


def flipped(size: int, i: int) -> WgradNhwc:
    """One of the flipped tiles for factors of so many bytes."""
    return FLIPPED[size][i % len(FLIPPED[size])]


#: Rings go round, and round again.
DEEP = Filter((3, 24, 16, 17), (72, 24, 3, 3), padding=(1,))
#: One of each kind: every number of consumers, the widest and the narrowest, one run of positions and several.
CONFIGS = (
    WgradNhwc(64, 64, 4), WgradNhwc(128, 192, 3), WgradNhwc(256, 192, 4, 3), WgradNhwc(64, 192, 2, 9), WgradNhwc(192, 128, 4), WgradNhwc(192, 192, 3),
    WgradNhwc(64, 384, 3, 2), WgradNhwc(64, 384, 3), WgradNhwc(128, 64, 2, 17), WgradNhwc(128, 256, 4, 2),
)  # fmt: skip
CONFIGS_TF32 = (
    WgradNhwc(64, 64, 4), WgradNhwc(128, 128, 3, 4), WgradNhwc(128, 128, 2, 3), WgradNhwc(64, 128, 2, 17), WgradNhwc(128, 64, 4), WgradNhwc(64, 64, 6, 2),
    WgradNhwc(128, 128, 2),
)  # fmt: skip
CONFIGS_PLANES = WgradNhwc(64, 64, 4), WgradNhwc(128, 128, 3), WgradNhwc(64, 64, 2, 3), WgradNhwc(128, 64, 3, 2), WgradNhwc(128, 192, 5, 2)
#: float32 by three products.
CONFIGS_FP32 = WgradNhwc(64, 64, 4), WgradNhwc(128, 64, 3, 4), WgradNhwc(64, 64, 2, 9), WgradNhwc(128, 64, 8)
PRECISE = [(case, "fp32 last", case.legal(CONFIGS_FP32[i % len(CONFIGS_FP32)], "float32")) for i, case in enumerate([*SHAPES[:4], SHAPES[10], *SHAPES[14:18], *PADDED[1:4], PADDED[7]])]
PRECISE_FLIPPED = [(case, "fp32 last", flipped(8, i)) for i, case in enumerate(FEW[::2])]
#: Of flipped tiles: with the taps of a row folded, of all, and none.
NOT_FINITE = [Filter((2, 24, 5, 7), (channels, 24, 3, 3), padding=(1,)) for channels in (12, 6, 64)]
LARGE = Filter((9, 192, 28, 28), (256, 192, 3, 3), padding=(1,))
FINITE = Filter((2, 24, 5, 7), (16, 24, 3, 3), padding=(1,))
BREAKABLE = Filter((3, 24, 9, 11), (72, 24, 3, 3), padding=(1,))
BASE = SHAPES[0]


def tiles(case, mode, of=slice(None)):
    """The runs of a case: one of each kind of tile."""
    return [(case, mode, case.legal(config, dtype_of(mode))) for config in (CONFIGS_TF32 if mode == "tf32 last" else CONFIGS)[of]]


def simulated():
    """Each case with a tile, few texts; rings that go round; planes; flipped tiles; three products."""
    yield from sharing([tiles(case, KINDS[i % len(KINDS)]) for i, case in enumerate([*SHAPES, *PADDED])])
    yield from ((DEEP, HALVES[i % len(HALVES)], config) for i, config in enumerate((*CONFIGS, WgradNhwc(128, 192, 5), WgradNhwc(64, 64, 6, 5))))
    yield from ((case, KINDS[(i + more) % len(KINDS)], CONFIGS_PLANES[(i + more) % len(CONFIGS_PLANES)]) for i, case in enumerate(PLANES) for more in (0, 2))
    yield from ((case, KINDS[i % len(KINDS)], flipped(4 if KINDS[i % len(KINDS)] == "tf32 last" else 2, i)) for i, case in enumerate(FEW))
    yield from ((DEEP, "tf32 last", config) for config in CONFIGS_TF32[::2])
    yield from (*PRECISE[::3], *PRECISE_FLIPPED[:1])
    yield from ((BASE, "fp16 last", WgradNhwc(64, 128, 3, split)) for split in (7, 40, 280))


def on_gpu():
    """Every case with every tile, in every type."""
    for mode in KINDS:
        size = 4 if mode == "tf32 last" else 2
        for case in (*SHAPES, DEEP):
            yield from tiles(case, mode)
        for case in PADDED:
            yield from tiles(case, mode, slice(2, 6))
        yield from ((case, mode, flipped(size, i + more)) for i, case in enumerate(FEW) for more in (0, 1))
        yield from ((LARGE, mode, WgradNhwc(rows, widths[-1], max_stages(rows, widths[-1], size), split)) for rows, widths in wgrad.TILES[size].items() for split in (1, 2, 9))
    yield from ((case, mode, config) for case in PLANES for mode in KINDS for config in CONFIGS_PLANES)


def compiled():
    """The widest tile of each number of rows in each type, the others in one; three products."""
    for size, modes in ((2, HALVES), (4, KINDS[-1:])):
        for rows, columns in ((rows, columns) for rows, widths in wgrad.TILES[size].items() for columns in widths):
            widest = columns == wgrad.TILES[size][rows][-1]
            turned = widest and columns in wgrad.FLIPPED_TILES[size].get(rows, ())
            yield from ((asked(BASE, mode), WgradNhwc(rows, columns, max_stages(rows, columns, size), 2, turned)) for mode in modes[: None if widest else 1])
    yield from ((asked(BASE, "fp32 last"), WgradNhwc(rows, 64, max_stages(rows, 64, 8), 2)) for rows in wgrad.TILES[8])


CASES = Cases(
    engine=wgrad,
    kernel="hopper_wgrad",
    runs=list(dict.fromkeys(simulated())),
    gpu=list(on_gpu()),
    unseen=[("UNIT", 16), ("BORDERED", 9), ("BORDERED", 25)],  # test_packed_borders.py
    precise=[(Filter((2, 24, 9, 11), (40, 24, 1, 2)), "fp32 last", WgradNhwc(64, 64, 4, 2))],
    precise_gpu=[*PRECISE, *PRECISE_FLIPPED, *((case, "fp32 last", WgradNhwc(rows, 64, 6, split)) for case in (DEEP, LARGE) for rows in (64, 128) for split in (1, 9))],
    not_finite=[
        (FINITE, "fp16 last", WgradNhwc(64, 128, 4, 2)), (FINITE, "fp32 last", WgradNhwc(64, 64, 4)), *((case, "fp16 last", WgradNhwc(128, 64, 4, 2, True)) for case in NOT_FINITE),
    ],
    not_finite_gpu=[
        *((FINITE, mode, WgradNhwc(64, 64, 4, split)) for mode in ("fp16 last", "fp32 last") for split in (1, 2)), *((case, "fp16 last", WgradNhwc(128, 64, 4, 2, True)) for case in NOT_FINITE),
    ],
    arguments=[
        ((case, "fp16 last", WgradNhwc(64, 64, 3, 2)), names) for case, names in (
            (SHAPES[1], "tiles_m tiles_n stages part column_blocks size"),
            (SHAPES[4], "inner taps tap_s dilation_w dilation_h load_q stride_h stride_w low_h low_w spatial_dims"),
            (SHAPES[10], "group_packs"), (SHAPES[15], "rows own_rows own_columns"), (SHAPES[13], "tap_r dilation_d stride_d low_d"))
    ],
    broken=[
        Broken((BREAKABLE, "fp16 last", config), [(text, instead)], seeds=range(4)) for text, instead, config in (
            ("named_barrier(1, CONSUMER_THREADS);  // all sums are there", "", WgradNhwc(256, 64, 4)), ("wgmma_wait<behind>();", "wgmma_wait<behind + 1>();", WgradNhwc(64, 64, 2)),
            ("(of.dy_blocks + of.x_blocks) * BLOCK_BYTES", "STAGE_BYTES", WgradNhwc(64, 128, 2)), ("ring.wait_full(at);", "", WgradNhwc(64, 64, 2)),
            ("of_b + B::STEP * k, !(", "of_b + 2 * k, !(", WgradNhwc(64, 64, 2)))
    ],
    refused=[
        (BASE.problem("float64"), WgradNhwc(), "float32, float16 and bfloat16"), (asked(BASE, "fp32 last"), WgradNhwc(64, 128), "64 rows and 64 columns"), (BASE.problem(layout="NCHW"), WgradNhwc(), "without stride and padding"),
        (asked(PLANES[0], "fp32"), WgradNhwc(64, 64), "float32 with precision='tf32'"), (Filter((2, 8, 14, 14), (8, 8, 1, 1)).problem(layout="NCHW"), WgradNhwc(), "multiple of 16 bytes"),
        (Filter((2, 9, 8, 8), (8, 9, 1, 1)).problem(layout="NCHW"), WgradNhwc(), "two neighbouring channels"),
        (Filter((2, 18, 8, 8), (12, 6, 1, 1), groups=3).problem(layout="NCHW"), WgradNhwc(), "together a multiple of 16 bytes"), (Filter((2, 8, 8, 8), (8, 8, 1, 1), stride=(2,)).problem(layout="NCHW"), WgradNhwc(), "without stride"),
        (PLANES[0].problem(), WgradNhwc(192), "a tile has 64 rows and 64 columns"),
        (BASE.problem("float32", precision="tf32"), WgradNhwc(256), "a tile has"),
        (Filter((2, 12, 9, 8), (40, 12, 3, 3)).problem(), WgradNhwc(), "by the launch that adds"), (Filter((1, 9, 2**15, 2**15), (1, 9, 1, 1)).problem(), WgradNhwc(SPLIT=2), "counted in"),
        (Filter((2, 90, 9, 8), (48, 30, 3, 3), groups=3).problem(), WgradNhwc(), "multiples of 16 bytes"), (Filter((2, 32, 9, 8), (32, 2, 3, 3), groups=16).problem(), WgradNhwc(), "groups of 4 channels or more"), (Filter((2, 56, 9, 8), (56, 7, 3, 3), groups=8).problem(), WgradNhwc(), "an even number"), (Filter((0, 16, 9, 8), (16, 16, 3, 3)).problem(), WgradNhwc(), "nothing to compute"),
        (Filter((2, 8, 2**15, 2**15), (8, 8, 1, 1)).problem(), WgradNhwc(), "32 bits"), (Filter((1, 16, 6, 300), (8, 16, 2, 2), dilation=(3, 256)).problem(), WgradNhwc(), "stride, padding or dilation"),
        (Filter((1, 16, 40, 40), (8, 16, 2, 2), stride=(9,)).problem(), WgradNhwc(), "stride, padding or dilation"),
        (BASE.problem(), WgradNhwc(96), "a tile has 64 rows"), (BASE.problem(), WgradNhwc(256, 256), "256 rows and 192 columns"),
        (BASE.problem(), WgradNhwc(64, 192, 4), "bytes of shared memory"), (BASE.problem(), WgradNhwc(192, 192, 5), "bytes of shared memory"),
        (BASE.problem(), WgradNhwc(64, 64, 3, 2, True), "a tile has 128 rows and 64"), (SHAPES[1].problem(), WgradNhwc(128, 64, 3, 2, True), "and several taps"), (SHAPES[9].problem(), WgradNhwc(128, 64, 3, 2, True), "no strides"),
        (Filter((1, 16, 9, 8), (8, 16, 3, 3), padding=(3,)).problem(), WgradNhwc(128, 64, 3, 2, True), "no padding wider"),
        (BASE.problem(), WgradNhwc(64, 64, 1), "bytes of shared memory"), (BASE.problem(), WgradNhwc(128, 128, 4, 0), "at least one split"), (BASE.problem(), WgradNhwc(128, 128, 4, 2**31), "its grid"),
    ],
    layers=Layers(
        ["dense 3x3", "dense 1x1", "small batch", "grouped", "volume", "odd"],
        [("wgrad", kind) for kind in (("bfloat16", "fp32", "NHWC"), ("float32", "tf32", "NHWC"), ("float32", "fp32", "NHWC"))], each=3, least=20,
    ),
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
    compiled=list(compiled()),
)  # fmt: skip
