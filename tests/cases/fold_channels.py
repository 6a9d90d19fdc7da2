"""Channels that fill no 16 bytes, with channels last: copies with zeros behind them, and kernels that then read them (``layout/fold_channels.cu``)."""

from modes import H200, MODES, asked
from reference import dgrad, fprop

from cases import Cases
from pycuda_conv.engines.compose import fold_channels
from pycuda_conv.engines.compose.fold_channels import Filled

KINDS = [mode for mode in ("tf32 last", "fp16 last", "bf16 last") if mode in MODES]
#: Odd channels on both sides, filters of one and of many taps, strides, one to three axes, both directions.
SHAPES = [
    fprop((2, 17, 7, 7), (29, 17, 3, 3), padding=1), fprop((3, 21, 9, 5), (30, 21, 1, 1)), fprop((1, 9, 4, 5, 6), (11, 9, 3, 2, 3), padding=1),
    dgrad((2, 19, 6, 7), (19, 26, 3, 3), stride=2, padding=1), dgrad((1, 13, 9), (13, 7, 3)), dgrad((2, 75, 5, 4), (75, 33, 1, 2)),
]  # fmt: skip
LARGE = fprop((5, 75, 28, 27), (109, 75, 3, 5), padding=1)
BASE = SHAPES[0]


def found(case, mode, engine=""):
    """The configurations that let a kernel of that name run the rest."""
    return [config for config in fold_channels.configs(asked(case, mode), H200) if engine in config.DELEGATE]


CASES = Cases(
    engine=fold_channels,
    runs=[(case, KINDS[i % len(KINDS)], config) for i, case in enumerate(SHAPES) for engine in ("Dense", "Gather") for config in found(case, KINDS[i % len(KINDS)], engine)[:1]],
    gpu=[(case, mode, config) for case in (*SHAPES, LARGE) for mode in KINDS for config in found(case, mode)[::3]],
    finished=[(BASE, "fp16 last", found(BASE, "fp16 last", "Dense")[0], ("gelu",))],
    refused=[
        (fprop((2, 16, 5, 5), (8, 16, 3, 3)), "fp16 last", Filled(), "a multiple of 16 bytes"), (BASE, "fp32 last", Filled(), "it takes float16"),
        (fprop((2, 18, 5, 5), (8, 9, 3, 3), groups=2), "fp16 last", Filled(), "one group"), (BASE, "fp16 last", Filled("Dense"), "as it is printed"),
        (BASE, "fp16 last", Filled("Planes()"), "in the layouts"),
    ],
    devices={((8, 0), "cuda"): False, ((10, 0), "cuda"): False, ((0, 0), "opencl"): False},
)  # fmt: skip
