"""Small convolutions with every kind of tail, stride, padding, dilation and group, along one to three axes:
what any engine may be asked."""

from reference import dgrad, fprop

FORWARD = [
    fprop((1, 1, 1, 1), (1, 1, 1, 1)),  # the smallest there is
    fprop((1, 3, 5, 7), (2, 3, 5, 7)),  # one pixel of result
    fprop((2, 5, 7, 11), (3, 5, 3, 2), stride=(2, 3), padding=(2, 1)),  # H != W, R != S, strides differ, primes
    fprop((1, 2, 4, 3), (9, 2, 2, 3), padding=((5, 0), (0, 7))),  # pad > R: rows of the result that meet no input; uneven pairs
    fprop((2, 3, 11, 17), (5, 3, 3, 3), dilation=(3, 2), padding=(3, 2)),
    fprop((1, 2, 5, 6), (4, 2, 3, 3), dilation=4, padding=6),  # the filter is larger than the image
    fprop((2, 6, 7, 6), (9, 2, 3, 1), groups=3, stride=2, padding=1),
    fprop((3, 7, 5, 5), (7, 1, 2, 2), groups=7, bias=False),  # depthwise with an even filter
    fprop((5, 13, 3, 3), (17, 13, 1, 1), stride=2),  # pointwise with a stride: no 16-byte loads
    fprop((1, 67, 2, 2), (66, 67, 1, 1)),  # K and C just past a tile
    fprop((1, 4, 4, 4), (4, 4, 4, 4), padding=1, stride=5),  # stride > filter
    fprop((4, 3, 37), (5, 3, 4), padding=((0, 3),), stride=3),  # 1-d
    fprop((1, 2, 129), (3, 2, 64), dilation=2, padding=5),
    fprop((2, 3, 4, 5, 7), (5, 3, 2, 3, 2), stride=(1, 2, 3), padding=(1, 0, 2)),  # 3-d
    fprop((1, 4, 5, 3, 4), (6, 2, 3, 1, 2), padding=((2, 1), (0, 1), (1, 0)), dilation=(2, 1, 3), groups=2, bias=False),
    fprop((3, 6, 9), (4, 6, 3), padding=1),
    fprop((6, 9, 8), (4, 6, 3, 3), padding=1),  # unbatched
]

TRANSPOSED_CASES = [
    dgrad((1, 1, 1, 1), (1, 1, 1, 1)),
    dgrad((2, 5, 4, 3), (5, 3, 3, 2), stride=(2, 3), padding=(1, 0)),
    dgrad((1, 2, 3, 4), (2, 3, 2, 2), stride=3, output_padding=(1, 2)),  # stride > filter: phases without taps hold the bias alone
    dgrad((1, 2, 3, 4), (2, 3, 2, 2), stride=(3, 1), bias=False),  # and zero without one
    dgrad((1, 3, 4, 5), (3, 2, 3, 3), stride=2, dilation=2, padding=1),  # taps all fall on one phase
    dgrad((1, 3, 4, 5), (3, 2, 3, 2), stride=(2, 3), dilation=(3, 2), output_padding=(2, 1)),
    dgrad((2, 6, 3, 5), (6, 3, 3, 3), stride=2, padding=((0, 2), (1, 0)), groups=2, output_padding=1),  # uneven crop
    dgrad((1, 4, 3, 3), (4, 5, 1, 1), stride=2, output_padding=1),  # most pixels receive nothing
    dgrad((3, 5, 5, 5), (5, 1, 3, 3), groups=5, padding=2),  # depthwise; pad < R throughout
    dgrad((1, 66, 2, 3), (66, 67, 1, 1)),
    dgrad((2, 3, 11), (3, 4, 5), stride=3, padding=2, output_padding=1),  # 1-d
    dgrad((1, 3, 2, 3, 2), (3, 4, 2, 3, 2), stride=(1, 2, 2), padding=(0, 1, 0), output_padding=(0, 1, 1)),  # 3-d
    dgrad((4, 3, 3), (4, 2, 3, 3), stride=2),  # unbatched
]
MANY_PHASES = [  # more than a thousand, few of which have taps
    dgrad((2, 3, 3, 2), (3, 4, 3, 2), stride=40, padding=(1, 0), output_padding=(39, 7)),
    dgrad((1, 4, 2, 3), (4, 3, 3, 3), stride=(40, 41), dilation=(60, 3), groups=2, bias=False),
    dgrad((1, 2, 2, 3, 2), (2, 3, 1, 2, 3), stride=(11, 12, 13)),
    dgrad((2, 3, 2), (3, 2, 4), stride=1500, padding=2),
    dgrad((1, 2, 2), (2, 2, 1), stride=3001, padding=((1, 1),)),  # no pixel of the result meets a tap
]

SINGLE_CHANNEL = [
    fprop((1, 1, 1, 1), (1, 1, 1, 1)),
    fprop((1, 1, 9, 40), (1, 1, 7, 2), padding=((9, 3), (0, 5)), bias=False),
    fprop((2, 5, 9, 35), (10, 1, 3, 4), groups=5, stride=(3, 2), padding=2),  # two filters a channel
    fprop((1, 2, 17, 13), (2, 1, 3, 2), groups=2, dilation=(2, 5), padding=(1, 4), stride=(1, 2)),
    fprop((3, 2, 71), (6, 1, 5), groups=2, padding=((3, 0),)),
    fprop((3, 12, 11), (3, 1, 11, 11), groups=3, padding=5),
]

# One ordinary problem for each kind of plain kernel, a little larger than the largest tile so that whole and partial tiles occur.
GENERAL = fprop((3, 11, 13, 10), (70, 11, 3, 2), padding=(1, 0), stride=(1, 2))
POINTWISE = fprop((2, 36, 8, 10), (68, 36, 1, 1))  # takes the 16-byte loads of B and stores of the result
DEPTHWISE = fprop((2, 3, 19, 67), (6, 1, 3, 5), padding=((1, 2), (2, 0)), groups=3)
TRANSPOSED = dgrad((2, 10, 5, 6), (10, 9, 3, 2), padding=(1, 0), stride=(1, 2))
# a forward convolution of another filter
FLIPPED = dgrad((2, 3, 19, 67), (3, 1, 3, 5), padding=((1, 2), (2, 0)), dilation=(2, 1), groups=3)

ALONE = [  # transposed convolutions of a channel alone, with strides of powers of two
    dgrad((2, 3, 9, 21), (3, 1, 3, 5), groups=3, stride=2, padding=((1, 2), (2, 0)), output_padding=1, bias=False),
    dgrad((1, 2, 5, 7), (2, 1, 7, 3), groups=2, stride=(4, 2), padding=(3, 1), dilation=(1, 3)),
    dgrad((2, 2, 6, 4), (2, 1, 1, 1), groups=2, stride=(1, 4)),
    dgrad((3, 2, 31), (2, 1, 5), groups=2, stride=2, padding=2),
    dgrad((1, 1, 1, 1), (1, 1, 1, 1)),
    dgrad((2, 5, 9, 35), (5, 1, 7, 2), groups=5, padding=((3, 1), (0, 1)), bias=False),
    dgrad((1, 2, 17, 13), (2, 1, 3, 2), groups=2, dilation=(2, 5), padding=(1, 4)),
    dgrad((1, 2, 12, 12), (2, 1, 2, 3), groups=2, padding=(3, 4)),  # pad > R: the border is cropped
    dgrad((3, 2, 71), (2, 1, 5), groups=2, padding=((3, 0),)),
    dgrad((3, 12, 11), (3, 1, 11, 11), groups=3, padding=5),
]

BASE = fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1)
POINT = fprop((3, 64, 10, 12), (136, 64, 1, 1))
SHAPES = [
    # channels: tails of every load, one load and several, packed or as they are
    *(fprop((2, c, 7, 5), (9, c, 3, 2), padding=(1, 0)) for c in (8, 15, 16, 20, 24, 33, 40, 72, 136)),
    *(fprop((2, c, 6, 6), (k, c, 1, 1)) for c, k in ((3, 8), (40, 24), (64, 70), (130, 4))),  # one row of pixels to the loads
    fprop((3, 20, 5, 6), (12, 20, 1, 1), stride=2), fprop((2, 20, 5, 6), (12, 20, 1, 1), padding=(1, 2)),
    fprop((1, 70, 1, 1), (66, 70, 1, 1)), fprop((150, 16, 1, 1), (8, 16, 1, 1)),
    # rows, columns and images
    BASE, fprop((5, 16, 3, 4), (200, 16, 3, 3), padding=1), fprop((1, 16, 40, 40), (5, 16, 3, 3)), fprop((7, 16, 2, 3), (8, 16, 2, 3), padding=1),
    # strides, uneven padding, dilation
    fprop((2, 20, 13, 9), (24, 20, 3, 2), padding=((1, 2), (0, 3)), dilation=(2, 1)), fprop((2, 20, 11, 17), (24, 20, 3, 2), stride=(2, 3), padding=(2, 1)),
    fprop((1, 16, 30, 41), (8, 16, 3, 2), stride=(8, 7), padding=(3, 1)), fprop((1, 16, 9, 31), (8, 16, 3, 3), stride=(2, 9), padding=1),
    fprop((2, 9, 40, 20), (8, 9, 2, 3), stride=(17, 2)), fprop((2, 5, 9, 40), (8, 5, 3, 20), stride=(1, 17), padding=(1, 3)),
    fprop((1, 16, 4, 6), (8, 16, 9, 2), padding=((128, 3), (1, 126))), fprop((1, 16, 4, 6), (8, 16, 2, 2), padding=(0, 129)),
    fprop((1, 16, 3, 5), (8, 16, 1, 2), padding=(129, 0)), fprop((1, 16, 6, 40), (8, 16, 2, 2), padding=(0, 127), dilation=(3, 255)),
    fprop((1, 16, 6, 300), (8, 16, 2, 2), dilation=(3, 256)), fprop((2, 16, 6, 7), (8, 16, 3, 3), dilation=4, padding=6),
    # taps of which a block packs the same channels; rows of the filter that are packed in parts
    fprop((2, 72, 100), (9, 72, 3), stride=12, padding=1), fprop((2, 40, 9, 50), (9, 40, 2, 2), stride=(1, 11)),
    fprop((1, 1300, 3, 4), (9, 1300, 3, 3), padding=1), fprop((1, 50, 8, 6), (70, 50, 20, 13), padding=(8, 5)), dgrad((1, 1301, 3, 3), (1301, 9, 3, 3), padding=1),
    # few channels: windows that overlap, of one row of the image or as many as the stride
    fprop((2, 3, 24, 32), (9, 3, 8, 8), stride=8), fprop((2, 2, 15, 20), (9, 2, 4, 3), stride=(3, 2), padding=(2, 1)), fprop((2, 5, 13, 9), (8, 5, 3, 3), stride=(2, 1), dilation=(2, 1), padding=2),
    fprop((3, 9, 14, 13), (8, 9, 3, 4), stride=2, padding=((0, 1), (1, 0))), fprop((2, 1, 9, 9), (70, 1, 5, 5), padding=((3, 4), (4, 6)), stride=(2, 3)), fprop((2, 12, 7, 8), (8, 12, 1, 6), padding=(0, 2)),
    # few channels: folded taps
    fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), fprop((2, 3, 9, 10), (10, 3, 3, 3), padding=1), fprop((2, 1, 11, 8), (4, 1, 5, 5), padding=2),
    fprop((1, 7, 8, 9), (8, 7, 3, 4), padding=(1, 2), dilation=(1, 2)), fprop((2, 4, 9, 8), (8, 4, 3, 1), padding=1),
    # groups
    fprop((2, 48, 7, 6), (80, 24, 3, 3), padding=1, groups=2), fprop((2, 64, 7, 6), (12, 16, 3, 1), padding=1, groups=4),
    fprop((2, 15, 7, 6), (21, 5, 3, 3), padding=1, groups=3), fprop((2, 128, 6, 5), (4, 64, 2, 2), groups=2), fprop((2, 3, 8, 7), (6, 1, 3, 3), padding=1, groups=3),
    fprop((2, 160, 4, 4), (70, 80, 1, 1), groups=2),
    # one and three axes
    fprop((4, 20, 30), (17, 20, 5), padding=2, stride=3), fprop((2, 16, 100), (9, 16, 3), padding=((300, 7),), dilation=90), fprop((3, 16, 60), (8, 16, 2), stride=11),
    fprop((2, 4, 50), (6, 4, 9), stride=4, padding=4), fprop((2, 16, 64), (8, 16, 2), padding=((16, 0),), dilation=70),
    fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=(1, 0, 2)), fprop((1, 20, 6, 7, 9), (8, 20, 2, 3, 2), stride=(1, 2, 3), padding=((0, 2), (2, 1), (1, 0)), dilation=(2, 1, 2)),
    fprop((2, 3, 4, 7, 8), (8, 3, 3, 3, 3), stride=2, padding=1), fprop((1, 16, 3, 3, 4), (8, 16, 2, 2, 2), padding=((16, 15), (0, 16), (3, 14))),
    fprop((1, 16, 3, 3, 4), (8, 16, 2, 2, 2), padding=(0, 0, 17)), fprop((1, 16, 3, 3, 4), (8, 16, 2, 2, 1), padding=(17, 0, 0)), fprop((1, 16, 33, 4, 4), (8, 16, 2, 2, 2), dilation=(31, 1, 1)),
    fprop((1, 16, 34, 4, 4), (8, 16, 2, 2, 2), dilation=(32, 1, 1)), fprop((2, 16, 3, 4, 5), (8, 16, 1, 1, 1)), fprop((2, 16, 1, 4, 5), (8, 16, 1, 3, 3), padding=(0, 1, 1)),
    fprop((1, 12, 20, 4, 5), (8, 6, 3, 2, 2), stride=(9, 1, 1), groups=2),
    # the gradient of the input: phases
    dgrad((2, 20, 5, 6), (20, 40, 3, 3), padding=1), dgrad((2, 24, 5, 6), (24, 40, 3, 2), stride=2, padding=1, output_padding=(1, 0)),
    dgrad((2, 16, 4, 3), (16, 9, 3, 4), stride=(3, 2), padding=((1, 0), (0, 2)), output_padding=1), dgrad((1, 16, 3, 4), (16, 8, 2, 2), stride=3, output_padding=(1, 2)),
    dgrad((2, 16, 4, 5), (16, 8, 3, 3), stride=2, dilation=2, padding=1), dgrad((1, 16, 4, 5), (16, 8, 3, 4), stride=(2, 6), dilation=(3, 4), output_padding=(2, 1)),
    dgrad((2, 48, 5, 4), (48, 20, 3, 3), stride=2, padding=1, groups=2), dgrad((2, 3, 6, 5), (3, 9, 3, 3), stride=2, padding=1), dgrad((2, 16, 20), (16, 70, 5), stride=3, padding=2, output_padding=1),
    dgrad((2, 16, 3, 4, 3), (16, 9, 3, 2, 3), stride=(1, 2, 2), padding=(1, 0, 1), output_padding=(0, 1, 0)), dgrad((2, 72, 4, 4), (72, 16, 1, 1), stride=2, output_padding=1),
    # whose result's sizes are multiples of the stride
    dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), dgrad((2, 16, 3, 4, 3), (16, 9, 4, 2, 3), stride=(2, 1, 3), padding=(1, 0, 0)),
    dgrad((1, 48, 4, 4), (48, 20, 3, 3), stride=2, padding=1, output_padding=1, groups=2), dgrad((2, 16, 20), (16, 70, 5), stride=4, padding=2, output_padding=3),
    dgrad((2, 16, 1, 1), (16, 8, 4, 4), padding=1), dgrad((2, 16, 5, 4), (16, 8, 5, 5), padding=(4, 3)), dgrad((1, 16, 9), (16, 8, 4), stride=17),
    # whose columns are written in pairs, along one and three axes, four and two at once, in groups
    dgrad((2, 16, 20), (16, 70, 4), stride=2, padding=1), dgrad((2, 16, 3, 4, 3), (16, 9, 3, 2, 4), stride=(1, 2, 2), padding=(1, 0, 0)),
    dgrad((1, 16, 2, 3, 5), (16, 9, 2, 3, 2), stride=2), dgrad((2, 48, 5, 6), (48, 20, 3, 3), stride=2, padding=1, output_padding=1, groups=2),
    dgrad((2, 16, 7, 7), (16, 40, 1, 1), stride=2, output_padding=1), dgrad((3, 72, 1, 1), (72, 16, 2, 2), stride=2),
    # phases that are repeats of others: all of one, of several, in groups
    dgrad((2, 20, 5, 3), (20, 24, 4, 4), stride=4), dgrad((2, 24, 13), (24, 40, 16), stride=8, padding=4), dgrad((1, 48, 2, 3), (48, 20, 8, 4), stride=(4, 2), padding=(2, 1), groups=2),
    # without the axis N
    fprop((20, 9, 8), (12, 20, 3, 3), padding=1), dgrad((16, 4, 3), (16, 9, 3, 3), stride=2),
]  # fmt: skip
AWKWARD = [*SHAPES, *FORWARD, *TRANSPOSED_CASES]
