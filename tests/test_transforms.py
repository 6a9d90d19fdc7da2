"""What is asked of all engines of Fourier transforms: elements as right as sums of products, whatever the numbers, and the same bits from
a graph."""

import math

import numpy as np
import pytest
import torch
from cases import blocks, library_fft
from reference import DISTRIBUTIONS, TINY, assert_close, assert_lost_alike, by_turns, check, fprop, run

from pycuda_conv import Plan
from pycuda_conv.engines.fft.blocks import BlockFft
from pycuda_conv.engines.fft.library_fft import LibraryFft
from pycuda_conv.runtime import get_device

LARGE = fprop((1, 1, 150, 170), (1, 1, 31, 31), padding=15)
FIRST, SECOND, _, BACK, *_ = blocks.SHAPES
LINE, VOLUME = (next(case for case in blocks.SHAPES if case.ndim == ndim) for ndim in (1, 3))


def block(case) -> BlockFft:
    return BlockFft(*blocks.SHAPES.get(case, (128, 192)))


def plan(case, device, config, **more) -> Plan:
    if isinstance(config, LibraryFft) and not get_device(device).transforms:
        pytest.skip("neither CuPy nor torch transforms on this GPU")
    return Plan(case.problem(**more), device, config=config)


RUNS = [
    *((case, LibraryFft(), kind) for case, kind in by_turns([LARGE, *(library_fft.SHAPES[i] for i in (1, 3, 9))], DISTRIBUTIONS, rounds=2)),
    *((case, block(case), kind) for case, kind in by_turns([LARGE, SECOND, BACK, LINE], DISTRIBUTIONS, rounds=2)),
    *((VOLUME, block(VOLUME), kind) for kind in ("sky", "one large")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "kind"), RUNS, ids=str)
def test_elements_are_right_for_all_kinds_of_numbers(device, case, config, kind):
    """Closer to float64 than a sum in float32: half a rounding of the result, and of the sum of magnitudes."""
    x, w, b = case.drawn(kind)
    ref, magnitude = case.reference(x, w, b), case.reference(abs(x), abs(w), b)
    assert_close(run(plan(case, device, config), x, w, b), ref, 2.0**-23 * magnitude + TINY["float32"], kind)


@pytest.mark.parametrize(("where", "value"), by_turns(["image", "filter"], [np.inf, -np.inf, 3e38, np.nan]))
@pytest.mark.parametrize(
    ("case", "config", "pads", "zeros"), [(library_fft.SHAPES[0], LibraryFft(), (7, 7), 30), (SECOND, block(SECOND), (7, 3), 60)],
    ids=["library", "blocks"]
)
def test_inf_and_nan_reach_what_they_reach_in_a_sum(device, case, config, pads, zeros, value, where):
    x, w, b = case.normals("float32")
    if where == "image":
        x[1, 1, 30, 40] = value
    else:
        x[..., :zeros] = 0  # times Inf is NaN
        w[1, 0, 3, 5] = value
    inner = ..., *(slice(pad, -pad) for pad in pads)  # the reference multiplies by padding too
    ref, magnitude = case.reference(x, w, b)[inner], case.reference(abs(x), abs(w), abs(b))[inner]
    assert_lost_alike(run(plan(case, device, config), x, w, b)[inner], ref, magnitude, value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "config"),
    [(FIRST, block(FIRST)), (SECOND, block(SECOND)), (library_fft.SHAPES[0], LibraryFft())],
    ids=str,
)  # fmt: skip
def test_a_kept_filter_a_stream_and_a_captured_graph_on_a_gpu(case, config):
    x, w, b = (None if a is None else torch.from_numpy(a).cuda() for a in case.normals("float32"))
    made = plan(case, "cuda:0", config)
    expected = made(x, w, b)
    check(case, expected.cpu().numpy(), *case.normals("float32"))
    assert torch.equal(made.bind(w, b)(x), expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.equal(made(x, w, b), expected)
    side.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(expected)
    with torch.cuda.graph(graph):
        made(x, w, b, out=out)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)
