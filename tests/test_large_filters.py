"""Engines that transform large filters, by blocks and by a library: what each of them is asked alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import blocks as of_blocks
from cases import library_fft as of_library
from reference import DISTRIBUTIONS, TINY, assert_alike, assert_close, by_turns, check, fprop, run

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import BlockFft, LibraryFft
from pycuda_conv.engines.fft import blocks
from pycuda_conv.runtime import get_device, transforms
from pycuda_conv.runtime.target import Target

H200 = Target("sm_90a")
CASE = fprop((2, 2, 90, 100), (2, 1, 21, 17), groups=2, padding=8)
LINE, VOLUME = (next(case for case in of_blocks.SHAPES if case.ndim == ndim) for ndim in (1, 3))
CONFIGS = {"blocks": BlockFft(128, 192), "library": LibraryFft()}


def plan(engine: str, device: str, case=CASE) -> Plan:
    if engine == "library" and not get_device(device).transforms:
        pytest.skip("neither CuPy nor torch transforms on this GPU")
    config = BlockFft(*of_blocks.SHAPES.get(case, (128, 192))) if engine == "blocks" else CONFIGS[engine]
    return Plan(case.problem(), device, config=config)


def drawn(kind: str) -> tuple:
    """Normal numbers, of which some are zeros or faint beside a bright pixel."""
    x, w, b = CASE.normals("float32")
    b[:] = 0
    if kind == "tails":  # of a Gaussian around one pixel: 1e-30 of its largest value
        at = np.arange(21)[:, None] - 10, np.arange(17) - 8
        w[:] = np.exp(-(at[0] ** 2 + at[1] ** 2) / 2.0)
    x[..., : {"half": 50, "faint": 0}.get(kind, 100)] = 0
    x[:] = 1e-3 * x if kind == "faint" else x
    if kind not in ("black", "half"):
        x[0, 0, 44, 51] = 1e12
    return x, w, b


def listed(made: Plan, *arrays) -> tuple:
    """Results of a plan of blocks, and how many of them were put onto its list, on OpenCL, where the workspace is the host's memory."""
    args = made.schedule.steps[-1][0].arguments
    nothing, y = np.zeros(1, "f"), np.full(made.problem.result_shape, np.nan, "f")
    workspace = np.full(made.schedule.workspace_bytes // 8, np.nan)
    on = get_device("opencl")
    with on:
        on.update_host_arrays(on.schedule_launcher(made.schedule.whole), arrays, (y, workspace, nothing, nothing, nothing), 0)
    return y, workspace[args.count_at :][:1].view(np.int32)[0]


KINDS = ["black", "half", "one star", "tails", "faint"]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*((engine, kind) for engine in CONFIGS for kind in KINDS), *(("full list", kind) for kind in KINDS[2::2])],
)
def test_zeros_stay_zeros_and_what_may_be_off_is_summed(device, monkeypatch, engine, kind):
    """Blocks sum from a list, or by the threads themselves once that is full. Zeros in segments of a block cost no sums."""
    if engine == "full list":
        monkeypatch.setattr(blocks, "MOST_LISTED", 5)
    x, w, b = drawn(kind)
    made = plan(engine.replace("full list", "blocks"), device)
    ref, magnitude = CASE.reference(x, w, b), CASE.reference(abs(x), abs(w), b)
    got = run(made, x, w, b)
    assert (got[magnitude == 0] == 0).all() and not np.signbit(got[magnitude == 0]).any() and ((magnitude == 0).any() or kind == "faint")
    assert_close(got, ref, 2.0**-23 * magnitude + TINY["float32"], kind)
    if device == "opencl" and engine == "blocks":
        y, count = listed(made, x, w, b)
        assert np.array_equal(y, got)
        assert (count == 0 if kind == "black" else count < ref.size / 4 if kind != "faint" else count > ref.size / 8)


def test_an_inf_costs_the_sums_of_its_windows(device):
    if device != "opencl":
        pytest.skip("the list lies in the GPU's memory")
    case = fprop((1, 1, 150, 170), (1, 1, 31, 31), padding=15)
    x, w, b = case.normals("float32")
    x[0, 0, 75, 85] = np.inf
    assert 31 * 31 <= listed(plan("blocks", device, case), x, w, b)[1] <= 3 * 31 * 31


LARGE = fprop((1, 1, 150, 170), (1, 1, 31, 31), padding=15)
FIRST, SECOND, _, BACK, *_ = of_blocks.SHAPES
RUNS = [
    *(("library", *one) for one in by_turns([LARGE, *(of_library.SHAPES[i] for i in (1, 3, 9))], DISTRIBUTIONS, rounds=2)),
    *(("blocks", *one) for one in by_turns([LARGE, SECOND, BACK, LINE], DISTRIBUTIONS, rounds=2)),
    *(("blocks", VOLUME, kind) for kind in ("sky", "one large")),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "case", "kind"), RUNS, ids=str)
def test_elements_are_right_for_all_kinds_of_numbers(device, engine, case, kind):
    """Closer to float64 than a sum in float32: half a rounding of the result, and of the sum of magnitudes."""
    x, w, b = case.drawn(kind)
    ref, magnitude = case.reference(x, w, b), case.reference(abs(x), abs(w), b)
    assert_close(run(plan(engine, device, case), x, w, b), ref, 2.0**-23 * magnitude + TINY["float32"], kind)


@pytest.mark.parametrize("value", [np.inf, 3e38, np.nan])
@pytest.mark.parametrize(("engine", "case", "zeros"), [("library", of_library.SHAPES[0], 30), ("blocks", SECOND, 60)], ids=str)
def test_what_is_not_finite_in_a_filter(device, engine, case, zeros, value):
    """It is multiplied with zeros, too."""
    x, w, b = case.normals("float32")
    x[..., :zeros] = 0
    w[1, 0, 3, 5] = value
    inner = ..., slice(7, -7), slice(7, -7)  # the reference multiplies by padding too
    with np.errstate(all="ignore"):
        ref, magnitude = case.reference(x, w, b)[inner], case.reference(abs(x), abs(w), abs(b))[inner]
        assert_alike(run(plan(engine, device, case), x, w, b)[inner], ref, 2.0**-22 * magnitude, value)


@pytest.mark.parametrize(("engine", "case"), [*((engine, CASE) for engine in CONFIGS), ("blocks", LINE), ("blocks", VOLUME)], ids=str)
def test_zeros_inf_and_nan(device, engine, case):
    x, w, b = case.normals("float32")
    x[..., : x.shape[-1] // 2] = 0
    x[(0, 0, *(n // 3 for n in x.shape[2:]))] = np.inf
    x[(1, 0, *(2 * n // 3 for n in x.shape[2:]))] = np.nan
    inner = ..., *(slice(pad, n - pad) for n, pad in zip(x.shape[2:], np.broadcast_to(case.options["padding"], case.ndim), strict=True))
    got, ref = run(plan(engine, device, case), x, w, b)[inner], case.reference(x, w, b)[inner]
    with np.errstate(invalid="ignore"):
        assert_alike(got, ref, 2.0**-22 * case.reference(np.nan_to_num(abs(x), posinf=0), abs(w), abs(b))[inner])
    empty = case.reference((x != 0).astype("f"), np.ones_like(w), np.zeros_like(b))[inner] == 0
    assert not np.isfinite(ref).all() and empty.any() and (got - b.reshape(-1, *(1,) * case.ndim) == 0)[empty].all()


@pytest.mark.parametrize("engine", ["blocks", "library"])
def test_a_worse_transform_is_noticed(device, monkeypatch, engine):
    """The tests above can fail.

    Without the check, a bright pixel spoils its surroundings, and with limits of nothing zeros are not zeros.
    """
    if engine == "library":
        if get_device(device).backend == "cuda":
            pytest.skip("the limits are made on the GPU")
        monkeypatch.setattr(transforms, "ERROR", 0.0)
    else:
        made = blocks._arguments
        monkeypatch.setattr(blocks, "_arguments", lambda *all: made(*all)._replace(limit=0))
    x, w, b = drawn("faint" if engine == "blocks" else "half")
    ref, magnitude = CASE.reference(x, w, b), CASE.reference(abs(x), abs(w), b)
    assert not (abs(run(plan(engine, device), x, w, b) - ref) <= 2.0**-23 * magnitude).all()


# ---- the filter's spectrum, kept


@pytest.mark.parametrize(("case", "lengths"), list(of_blocks.SHAPES.items())[1:3], ids=str)
def test_a_gpu_s_launches_with_a_packed_filter(case, lengths):
    """What a GPU launches, on OpenCL: filters' spectra are made once, in a buffer of their own."""
    on, problem, config = get_device("opencl"), case.problem(), BlockFft(*lengths)
    schedule = engines.schedule(problem, config, H200)

    def with_room(steps):  # shared memory is an array of the text there
        room = {"ROOM": max(blocks.ROOM, 8 * max(of_blocks.SHAPES[case]))}
        return [[replace(one, shared=0, defines=one.defines | room) if one.shared else one for one in step] for step in steps]

    x, w, b = case.normals("float32")
    y, nothing = np.full(problem.result_shape, np.nan, "f"), np.zeros(1, "f")
    workspace, packed = (np.full(n // 4, np.nan, "f") for n in (schedule.workspace_bytes, schedule.filter_bytes))
    with on:
        on.update_host_arrays(
            on.schedule_launcher(with_room(schedule.prepare)), (nothing, w, None), (nothing, nothing, packed, nothing, nothing), 0
        )
        kept = packed.copy()
        on.update_host_arrays(on.schedule_launcher(with_room(schedule.steps)), (x, w, b), (y, workspace, packed, nothing, nothing), 0)
    assert np.array_equal(kept, packed, equal_nan=True)
    assert np.array_equal(y, run(Plan(problem, "opencl", config=config), x, w, b))


def test_filters_are_packed_alike_for_all_sizes_of_images():
    config, other = BlockFft(), BlockFft(128, 128)
    small, large = (ConvProblem.forward(2, (n, 4, size, size), (4, 1, 15, 15), groups=4) for n, size in ((1, 99), (5, 300)))
    assert blocks.filter_key(small, config) == blocks.filter_key(large, config) != blocks.filter_key(small, other)
    row, line = ConvProblem.forward(2, (1, 1, 9, 900), (1, 1, 1, 99)), ConvProblem.forward(1, (1, 1, 900), (1, 1, 99))
    assert blocks.filter_key(row, other) != blocks.filter_key(line, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "case"), [("blocks", FIRST), ("blocks", SECOND), ("library", of_library.SHAPES[0])], ids=str)
def test_a_kept_filter_a_stream_and_a_captured_graph_on_a_gpu(engine, case):
    x, w, b = (None if a is None else torch.from_numpy(a).cuda() for a in case.normals("float32"))
    made = plan(engine, "cuda:0", case)
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
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
