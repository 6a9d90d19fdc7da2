"""Large filters by transforms of tiles (``fft/*.cu``), in float64 and checked, as they are by default: on every device."""

from modes import TYPES
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.fft import fft
from pycuda_conv.engines.fft.fft import Fft

#: One tile and many, one pair and a tile alone, odd sizes, images that are smaller than the filter, groups, several filters a channel.
SHAPES = [
    fprop((3, 3, 70, 90), (3, 1, 15, 15), groups=3, padding=7), fprop((2, 6, 50, 41), (8, 3, 9, 11), groups=2, bias=False), fprop((1, 1, 40, 200), (1, 1, 31, 17), padding=(15, 3)),
    dgrad((2, 4, 70, 90), (4, 1, 15, 17), groups=4, padding=(7, 3)), dgrad((1, 6, 33, 40), (6, 3, 9, 11), groups=2), fprop((2, 2, 10, 12), (6, 1, 21, 25), groups=2, padding=15),
    fprop((3, 2, 5000), (3, 2, 301), padding=150), dgrad((1, 3, 5001), (3, 2, 150), padding=149), fprop((1, 13, 90), (1, 13, 80), padding=((30, 7),)), fprop((4, 70, 66), (4, 1, 63, 60), groups=4),
]  # fmt: skip
PLAIN, OTHERS = SHAPES[0], [mode for mode in TYPES if mode in ("fp16", "bf16")]


def square(taps, **options):
    return fprop((1, 1, 90, 90), (1, 1, *taps), **options)


CASES = Cases(
    engine=fft,
    portable=[*((case, "fp32", Fft(*(64, (64, 128)[i % 2]))) for i, case in enumerate(SHAPES[:-1])), *((SHAPES[1], mode, Fft(64, 128)) for mode in OTHERS)],
    wide=[(PLAIN, "fp32", Fft(64, 64)), (SHAPES[4], "fp32", Fft(64, 128))],
    finished=[(SHAPES[1], "fp32", Fft(64, 128), ("gelu", "relu6")), (SHAPES[1], "fp16", Fft(64, 64), ("silu",))],
    refused=[
        (PLAIN, "fp32", Fft(32, 32), "must be one of"), (square((9, 9), stride=2), "fp32", Fft(), "without stride"), (square((9, 9), dilation=2), "fp32", Fft(), "without stride and dilation"),
        (fprop((1, 1, 9, 9, 9), (1, 1, 9, 9, 9)), "fp32", Fft(), "two spatial axes"), (square((65, 9)), "fp32", Fft(), "must fit in a tile"), (square((9, 2)), "fp32", Fft(), "a filter must be larger"),
        (fprop((0, 1, 90, 90), (1, 1, 9, 9)), "fp32", Fft(), "nothing to compute"), (fprop((256, 512, 90, 90), (512, 512, 9, 9)), "fp32", Fft(), "spectra take"), (PLAIN, "fp32 last", Fft(), "layouts"),
    ],
)  # fmt: skip
