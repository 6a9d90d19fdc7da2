"""Large filters by a library's transforms: on every device for which there is one."""

from modes import TYPES
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.fft import library_fft
from pycuda_conv.engines.fft.library_fft import LibraryFft

#: Strides, dilation, groups, several channels, one to three axes, both directions, filters larger than the image, uneven padding.
SHAPES = [
    fprop((3, 3, 70, 90), (3, 1, 15, 15), groups=3, padding=7), fprop((2, 6, 50, 41), (8, 3, 9, 11), groups=2, bias=False),
    fprop((2, 4, 40, 50), (6, 2, 11, 13), groups=2, padding=5, stride=(2, 3), dilation=(1, 2)), dgrad((2, 4, 20, 25), (4, 3, 11, 13), groups=2, padding=5, stride=(2, 3), dilation=(1, 2), output_padding=(1, 0)),
    dgrad((2, 6, 33, 40), (6, 3, 9, 11), groups=2), fprop((2, 2, 10, 12), (6, 1, 21, 25), groups=2, padding=((15, 20), (13, 30))),
    fprop((1, 1, 3000), (1, 1, 2001), padding=3), dgrad((1, 3, 5001), (3, 2, 150), padding=149), fprop((1, 2, 20, 25, 30), (2, 1, 7, 8, 9), groups=2, padding=3),
    fprop((1, 13, 90), (1, 13, 80), padding=((30, 7),)), dgrad((1, 2, 9, 10, 11), (2, 1, 5, 6, 7), stride=2, padding=1), fprop((4, 9, 11), (5, 4, 9, 11)),
]  # fmt: skip
OTHERS = [mode for mode in TYPES if mode != "fp32"]

CASES = Cases(
    engine=library_fft,
    portable=[*((case, "fp32", LibraryFft()) for case in SHAPES), *((SHAPES[number], mode, LibraryFft()) for number, mode in zip((0, 2, 3, 7), (*OTHERS, *OTHERS), strict=False))],
    finished=[(SHAPES[0], "fp32", LibraryFft(), ("gelu",)), (SHAPES[2], "fp16", LibraryFft(), ("silu",)), (SHAPES[3], "fp32", LibraryFft(), ())],
    refused=[(SHAPES[0], "fp32", LibraryFft(), "no library")],
)  # fmt: skip
