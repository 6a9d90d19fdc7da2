"""Large filters by float64 transforms of blocks that go through memory (``fft/blocks*.cu``): on every device."""

from modes import TYPES
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv import ConvProblem
from pycuda_conv.engines.fft import blocks
from pycuda_conv.engines.fft.blocks import BlockFft

#: One block and many, pairs over several images, a block alone, several filters a channel, both directions, uneven padding, images smaller than the filter;
#: lines and volumes.
SHAPES = {
    fprop((1, 1, 100, 120), (1, 1, 15, 15), padding=7): (128, 128), fprop((2, 3, 170, 140), (3, 1, 15, 21), groups=3, padding=(7, 3)): (128, 192),
    fprop((3, 2, 90, 80), (4, 1, 9, 31), groups=2, padding=4, bias=False): (320, 128), dgrad((1, 3, 100, 110), (3, 1, 15, 17), groups=3, padding=5): (192, 320),
    fprop((1, 1, 40, 300), (1, 1, 33, 65)): (128, 384), fprop((2, 2, 10, 12), (6, 1, 21, 25), groups=2, padding=((15, 20), (13, 30))): (128, 128),
    fprop((1, 1, 127, 130), (1, 1, 127, 100), padding=((0, 3), (50, 49))): (128, 256), fprop((1, 1, 70, 80), (1, 1, 1, 99), padding=(0, 49)): (128, 256),
    fprop((2, 2, 9000), (2, 1, 301), groups=2, padding=150): (64, 64), dgrad((1, 1, 20000), (1, 2, 3000)): (128, 192), fprop((1, 1, 900), (1, 1, 700), padding=((30, 7),)): (64, 64),
    fprop((2, 1, 30, 40, 50), (2, 1, 7, 8, 9), padding=3): (64, 64, 64), dgrad((1, 2, 66, 50, 60), (2, 1, 5, 7, 9), groups=2, padding=2): (64, 128, 64),
}  # fmt: skip
FIRST, SECOND, *_ = SHAPES
LINE = next(case for case in SHAPES if case.ndim == 1)
OTHERS = [mode for mode in TYPES if mode in ("fp16", "bf16")]
#: All lengths have all of these factors; as rows and as columns.
FACTORS, TURNED = fprop((1, 1, 70, 90), (1, 1, 13, 11), padding=5), ((128, length)[:: 1 - 2 * turn] for length in (64, 128, 192, 256, 320, 512, 576, 960, 1152) for turn in (0, 1))


def square(taps, channels=1, **options):
    return fprop((1, channels, 90, 90), (1, channels, *taps), **options)


def centred(size, taps):
    return ConvProblem.forward(len(size), (1, 1, *size), (1, 1, *taps), padding=tuple(n // 2 for n in taps))


CASES = Cases(
    engine=blocks,
    portable=[
        *((case, "fp32", BlockFft(*lengths)) for case, lengths in SHAPES.items()), *((FACTORS, "fp32", BlockFft(*lengths)) for lengths in TURNED),
        *((case, mode, BlockFft(*SHAPES[case])) for i, case in enumerate((FIRST, SECOND, LINE)) for mode in (OTHERS[i % len(OTHERS)],)),
    ],
    finished=[(SECOND, "fp32", BlockFft(*SHAPES[SECOND]), ("gelu",)), (FIRST, "fp16", BlockFft(*SHAPES[FIRST]), ("silu",))],
    refused=[
        (square((9, 9)), "fp32", BlockFft(100, 128), "a length must be"), (square((9, 9)), "fp32", BlockFft(32, 128), "a length must be"), (square((9, 9), stride=2), "fp32", BlockFft(), "without stride"),
        (fprop((1, 1, 9000), (1, 1, 5000)), "fp32", BlockFft(64, 64), "must fit"), (fprop((1, 1, 9, 90, 90), (1, 1, 3, 9, 9)), "fp32", BlockFft(), "a length must be"), (square((9, 9)), "fp32", BlockFft(64, 64, 64), "LENGTH_D must be 1"),
        (square((9, 9), 2), "fp32", BlockFft(), "one channel"), (fprop((0, 1, 90, 90), (1, 1, 9, 9)), "fp32", BlockFft(), "nothing to compute"), (fprop((1, 1, 900, 900), (1, 1, 9, 129)), "fp32", BlockFft(128, 128), "must fit"),
        (fprop((1, 8, 900, 900), (8, 1, 999, 999), groups=8, padding=500), "fp32", BlockFft(6912, 6912), "spectra take"),
    ],
    chosen=[
        *((centred((size, size), (taps, taps)), chosen) for size, taps, chosen in ((4096, 11, False), (4096, 21, True), (4096, 63, True), (1024, 127, True), (256, 127, True), (4096, 1001, True), (256, 9, False))),
        (centred((100000,), (5001,)), True), (centred((100000,), (101,)), False), (centred((64, 64, 64), (31, 31, 31)), True), (centred((64, 64, 64), (5, 5, 5)), False),
    ],
)  # fmt: skip
