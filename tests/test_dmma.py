"""float64 on the tensor cores: what the kernel is told, followed in numpy; the kernel compiled; and, on a GPU, its numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from hypothesis import assume, given
from hypothesis import strategies as st
from modes import H200
from on_gpu import Arrays, side_by_side
from reference import NVCC, assert_close, assert_exact, covering, nvcc_of

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.mma import dmma
from pycuda_conv.engines.mma.dmma import Dmma
from pycuda_conv.engines.schedule import PACKED, RESULT, WEIGHT, WORKSPACE

torch = pytest.importorskip("torch", reason="the reference is torch's CPU convolution")

A100 = SimpleNamespace(capability=(8, 0), multiprocessors=108, backend="cuda", name="cuda:0", model="NVIDIA A100")

# ---- problems: a convolution x * w = y, and what of it is asked


def problem(of: str, x_shape: tuple, w_shape: tuple, layout: str = "NCHW", bias: bool = False, **options) -> ConvProblem:
    """What is asked: y, or the gradient by x or by w."""
    ndim = len(w_shape) - 2
    if of == "y":
        channels = (w_shape[0],) if bias else None
        return ConvProblem.forward(ndim, x_shape, w_shape, channels, dtype="float64", layout=layout, **options)
    y_shape = ConvProblem.forward(ndim, x_shape, w_shape, **options).result_shape
    name = {"x": "input", "w": "weight"}[of]
    return replace(ConvProblem.gradient(name, ndim, x_shape, w_shape, y_shape, dtype="float64", **options), layout=layout)


def operands(asked: ConvProblem, make) -> list[np.ndarray]:
    """The two arrays that are read."""
    return [make(shape).astype(np.float64) for shape in (asked.input_shape, asked.weight_shape)]


def reference(asked: ConvProblem, first, second, magnitudes: bool = False) -> np.ndarray:
    """By torch in float64."""
    n = asked.ndim
    a, b = (torch.from_numpy(np.ascontiguousarray(np.abs(v) if magnitudes else v)) for v in (first, second))
    common = (list(asked.stride[-n:]), list(asked.padding_before[-n:]), list(asked.dilation[-n:]), False, [0] * n, asked.groups)
    if asked.direction == "fprop":
        return torch.convolution(a, b, None, *common).numpy()
    mask = [asked.direction == "dgrad", asked.direction == "wgrad", False]
    x_shape = (asked.N, asked.C, *asked.input_size[-n:])
    w_shape = (asked.K, asked.C // asked.groups, *asked.filter_size[-n:])
    dy, x, w = (a, torch.empty(x_shape, dtype=a.dtype), b) if mask[0] else (b, a, torch.empty(w_shape, dtype=a.dtype))
    return torch.ops.aten.convolution_backward(dy, x, w, None, *common, mask)[0 if mask[0] else 1].numpy()


def integers(shape, seed=1):
    return np.random.default_rng(seed).integers(-8, 9, shape)


def normals(shape, seed=2):
    return np.random.default_rng(seed).standard_normal(shape)


#: Tails of channels, pixels and gemm k; odd and even channels; strides, padding, dilation, groups; one to three axes; phases without taps,
#: and neighbours that a launch computes at once.
SHAPES = [
    ((2, 16, 9, 10), (70, 16, 3, 3), {"padding": 1}), ((3, 5, 8, 8), (9, 5, 3, 3), {"padding": 1}), ((1, 33, 12, 6), (64, 33, 1, 1), {}),
    ((2, 24, 8, 8), (40, 24, 1, 1), {}), ((2, 12, 11, 9), (20, 12, 3, 2), {"stride": 2, "padding": 1}),
    ((2, 12, 9, 9), (18, 6, 3, 3), {"groups": 2, "padding": (2, 0)}), ((1, 10, 15, 13), (12, 10, 3, 3), {"dilation": 2, "stride": (1, 2)}),
    ((3, 20, 40), (33, 20, 5), {"padding": 2}), ((2, 8, 31), (16, 8, 4), {"stride": 3}), ((1, 6, 5, 6, 7), (10, 6, 3, 2, 3), {"padding": 1}),
    ((2, 4, 6, 4, 4), (8, 4, 1, 1, 1), {"stride": (2, 1, 1)}), ((4, 1, 12, 12), (130, 1, 3, 3), {}), ((2, 9, 10, 10), (3, 9, 3, 3), {"padding": 1}),
    ((1, 64, 14, 14), (128, 64, 3, 3), {"padding": 1}), ((2, 130, 6, 6), (8, 130, 1, 1), {"stride": 3}),
    ((2, 9, 8, 8), (7, 9, 2, 2), {"stride": 2}), ((2, 6, 17, 12), (10, 6, 8, 4), {"stride": (4, 2), "padding": (2, 1)}),
]  # fmt: skip


def runs() -> list[tuple[ConvProblem, Dmma]]:
    """Every shape, each array of it asked for, in each layout, with two of the tiles and splits by turns."""
    found, configs, case = [], [Dmma(*tile, split) for split in (1, 3) for tile in dmma.TILES], 0
    for x, w, options in SHAPES:
        for of, layout in (("y", "NCHW"), ("y", "NHWC"), ("x", "NCHW"), ("x", "NHWC"), ("w", "NCHW")):
            asked = problem(of, x, w, layout, bias=of == "y", **options)
            able = [config for config in configs if dmma.refusal(asked.launched, config) is None]
            found += [(asked, able[case % len(able)]), (asked, able[(case + len(able) // 2) % len(able)])]
            case += 1
    return found


RUNS = runs()

# ---- the launches, followed in numpy


def followed(asked: ConvProblem, config: Dmma, first, second, filter_last: bool = False, device=H200) -> np.ndarray:
    """What the launches compute of arrays as they lie in memory, by the formulas at the head of the kernel. Unwritten memory is NaN."""
    schedule = dmma.schedule(asked.launched, config, device)
    size = math.prod(asked.result_shape)
    memory = {
        0: first.ravel(), WEIGHT: second.ravel(), PACKED: np.full(schedule.filter_bytes // 8, np.nan), RESULT: np.full(size, np.nan),
        WORKSPACE: np.full(schedule.workspace_bytes // 8, np.nan),
    }
    for step in (launch for launches in (schedule.filter_last if filter_last else schedule.whole) for launch in launches):
        step.source()  # checks the struct
        if step.kernel == "direct_reduce":
            memory[RESULT][:] = memory[WORKSPACE].reshape(-1, size).sum(axis=0)
        elif step.kernel == "dmma_filter":
            p = step.arguments
            count = p.rows * p.phases * p.taps * p.channels
            assert step.grid * step.block >= count and np.isnan(memory[PACKED][p.to : p.to + count]).all()
            row, phase, tap, c = np.ogrid[: p.rows, : p.phases, : p.taps, : p.channels]
            of_tap = tap // p.taps_rs * p.w_t + tap % p.taps_rs // p.taps_s * p.w_r + tap % p.taps_s * p.w_s
            of_phase = phase // p.phases_hw * p.w_phase_d + phase % p.phases_hw // p.phases_w * p.w_phase_h + phase % p.phases_w * p.w_phase_w
            of_row = row // p.rows_group * p.w_group + row % p.rows_group * p.w_row
            memory[PACKED][p.to : p.to + count] = memory[WEIGHT][p.w_base + of_row + of_phase + of_tap + c * p.w_channel].ravel()
        else:
            _follow_product(step, memory)
    assert not np.isnan(memory[RESULT]).any(), "something was not written"
    return memory[RESULT]


def _follow_product(step, memory) -> None:
    p, w, y, x = step.arguments, memory[step.buffers[1]], memory[step.buffers[-1]], memory[0]
    k, m, pixel = np.arange(p.reduction)[:, None], np.arange(p.rows)[:, None], np.arange(p.pixels)[None]
    c, tap = (k % p.inner, k // p.inner) if p.channels_inside else (k // p.inner, k % p.inner)
    t, r, s = tap // p.rs, tap % p.rs // p.s, tap % p.s
    n, opq = pixel // p.opq, pixel % p.opq
    out = opq // p.pq, opq % p.pq // p.q, opq % p.q
    d, h, v = (
        place * stride - pad + tap * dilation
        for place, stride, pad, tap, dilation in zip(
            out, (p.stride_d, p.stride_h, p.stride_w), (p.pad_d, p.pad_h, p.pad_w), (t, r, s), (p.dilation_d, p.dilation_h, p.dilation_w), strict=True
        )
    )
    inside = (d >= 0) & (d < p.d) & (h >= 0) & (h < p.h) & (v >= 0) & (v < p.w)
    tiles = -(-p.pixels // step.defines["BLOCK_N"]) * -(-p.rows // step.defines["BLOCK_M"])
    each = p.split_steps * 8 * step.defines["SLICES"]
    assert step.grid == tiles * p.groups * p.splits and p.splits * each >= p.reduction
    for g in range(p.groups):
        from_w = p.w_base + g * p.w_group + m * p.w_row + (c * p.w_channel + t * p.w_t + r * p.w_r + s * p.w_s).T
        from_x = n * p.x_image + g * p.x_group + c * p.x_channel + ((d * p.h + h) * p.w + v) * p.x_pixel
        a, b = w[from_w], np.where(inside, x[np.where(inside, from_x, 0)], 0)
        to = n * p.y_image + g * p.y_group + (p.y_base + out[0] * p.y_d + out[1] * p.y_h + out[2] * p.y_w) * p.y_pixel
        channel, phase = m // p.phases, m % p.phases
        to = to + channel * p.y_channel + phase // p.phases_hw * p.phase_d + phase % p.phases_hw // p.phases_w * p.phase_h + phase % p.phases_w * p.phase_w
        if p.pairs:
            assert p.pixels % 2 == 0 and p.size % 2 == 0 and (to[:, ::2] % 2 == 0).all() and (np.diff(to)[:, ::2] == 1).all()
        for split in range(p.splits):
            part = slice(split * each, (split + 1) * each)
            y[split * p.size + to] = a[:, part] @ b[part]
        # what is copied two at a time are neighbours, begin at 16 bytes, and lie both inside
        if step.defines["ONE_TAP"]:
            assert inside.all() and (p.inner in (1, p.reduction) or not p.reduction)
        if step.defines["A_VEC"] == 2 and not step.defines["A_IN_ROWS_OF_K"]:
            assert p.rows % 2 == 0 and (from_w[::2] % 2 == 0).all() and (np.diff(from_w, axis=0)[::2] == 1).all()
        elif step.defines["A_VEC"] == 2:
            assert p.reduction % 2 == 0 and (from_w[:, ::2] % 2 == 0).all() and (np.diff(from_w)[:, ::2] == 1).all()
        if step.defines["B_VEC"] == 2 and not step.defines["B_IN_ROWS_OF_K"]:
            assert inside.all() and p.pixels % 2 == 0 and (from_x[:, ::2] % 2 == 0).all() and (np.diff(from_x)[:, ::2] == 1).all()
        elif step.defines["B_VEC"] == 2 and p.reduction:
            even = inside[::2]
            assert (inside[1::2] == even).all() and (from_x[::2][even] % 2 == 0).all() and (np.diff(from_x, axis=0)[::2][even] == 1).all()


def lying(asked: ConvProblem, array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 1, -1) if asked.layout == "NHWC" else array


@pytest.mark.parametrize(("asked", "config"), RUNS, ids=str)
def test_the_launches_compute_the_convolution(asked, config):
    asked = replace(asked, has_bias=False)
    first, second = operands(asked, integers)
    want = lying(asked, reference(asked, first, second))
    for filter_last in (False, True)[: 1 + (dmma.schedule(asked.launched, config, H200).filter_last is not None)]:
        given = np.moveaxis(second, 1, -1) if filter_last else second
        got = followed(asked, config, lying(asked, first), given, filter_last)
        assert_exact(got.reshape(want.shape), want, f"{asked} {config}")


@st.composite
def requests(draw) -> tuple[ConvProblem, Dmma]:
    ndim, groups = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))
    each = lambda lo, hi: tuple(draw(st.lists(st.integers(lo, hi), min_size=ndim, max_size=ndim)))  # noqa: E731
    channels, written = groups * draw(st.integers(1, 9)), groups * draw(st.integers(1, 9))
    filter_size, dilation, padding = each(1, 3), each(1, 2), each(0, 2)
    size = [max(draw(st.integers(1, 9)), (f - 1) * d + 1 - 2 * q) for f, d, q in zip(filter_size, dilation, padding, strict=True)]
    options = {"stride": each(1, 3), "padding": padding, "dilation": dilation, "groups": groups}
    of = draw(st.sampled_from(("y", "x", "w")))
    layout = "NCHW" if of == "w" else draw(st.sampled_from(("NCHW", "NHWC")))
    asked = problem(of, (draw(st.integers(1, 3)), channels, *size), (written, channels // groups, *filter_size), layout, **options)
    config = Dmma(*draw(st.sampled_from(list(dmma.TILES))), draw(st.integers(1, 4)))
    assume(dmma.refusal(asked.launched, config) is None)
    return asked, config


@given(requests())
def test_any_launch_computes_the_convolution(request):
    asked, config = request
    first, second = operands(asked, integers)
    want = lying(asked, reference(asked, first, second))
    assert_exact(followed(asked, config, lying(asked, first), second).reshape(want.shape), want, f"{asked} {config}")


# ---- what it refuses, and what is chosen


def test_what_it_refuses():
    asked = problem("y", (64, 256, 28, 28), (256, 256, 3, 3), padding=1)
    assert dmma.refusal(asked, Dmma()) is None
    assert "float64" in dmma.refusal(replace(asked, dtype="float32"), Dmma())
    assert "32 bits" in dmma.refusal(problem("y", (5000, 512, 32, 32), (64, 512, 1, 1)), Dmma())
    assert "(BLOCK_M, BLOCK_N) must be one of" in dmma.refusal(asked, Dmma(96, 128)) and "split" in dmma.refusal(asked, Dmma(SPLIT=0))
    lines = problem("x", (2, 16, 40), (64, 16, 3))  # cuDNN sums them by tap
    assert "cut" in dmma.refusal(lines, Dmma(128, 64)) and dmma.refusal(lines, Dmma(128, 64, 3)) is dmma.refusal(lines, Dmma(64, 64)) is None
    for capability in ((7, 0), (8, 6), (8, 9), (12, 0)):
        assert "compute capability" in dmma.unsupported(SimpleNamespace(capability=capability))


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("of", ["y", "x", "w"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_large_float64_problems_take_the_tensor_cores(device, of, layout):
    asked = problem(of, (64, 256, 28, 28), (256, 256, 3, 3), layout if of != "w" else "NCHW", padding=1)
    assert isinstance(engines.choose(asked, device), Dmma)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("of", "x", "w", "options"), [
    ("y", (2, 24, 8, 8), (40, 24, 1, 1), {}), ("x", (2, 24, 8, 8), (40, 24, 1, 1), {}), ("y", (2, 24, 8, 8), (40, 24, 1, 1), {"stride": 2}),
    ("x", (2, 9, 8, 8), (7, 9, 2, 2), {"stride": 2}),
])  # fmt: skip
def test_a_filter_of_one_tap_is_read_as_it_lies(of, x, w, options, layout):
    schedule = dmma.schedule(problem(of, x, w, layout, **options), Dmma(), H200)
    (launch,) = (launch for launches in schedule.whole for launch in launches)
    assert schedule.filter_bytes == schedule.workspace_bytes == 0 and launch.defines["ONE_TAP"] == (layout == "NCHW")


# ---- the kernel compiled


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_every_text_compiles_without_spilling_much():
    texts = {}
    for device, arch, some in ((H200, "sm_90", RUNS), (A100, "sm_80", RUNS[::4])):
        for asked, config in some:
            for step in (launch for launches in dmma.schedule(asked.launched, config, device).whole for launch in launches):
                if step.file == "dmma" or step.kernel == "dmma":
                    texts.setdefault((arch, step.source()), replace(step, arch=arch))
    assert len({key for key in texts if key[0] == "sm_90"}) <= 40  # four tiles, two of them for two kinds of sums, with what they read and how, and the filter's
    chosen = covering(list(texts.values()))
    for step, result in zip(chosen, nvcc_of([(step.source(), step.arch) for step in chosen]), strict=True):
        assert result.returncode == 0, f"{step.arch}: {result.stderr}"
        spilt = [int(line.split(" bytes spill stores")[0].split()[-1]) for line in result.stderr.splitlines() if "bytes spill stores" in line]
        assert max(spilt) <= 64, f"{step.arch}: {result.stderr}"


# ---- on a GPU


@cache
def plans() -> dict:
    return side_by_side("dmma", lambda run: Plan(run[0], "cuda", config=run[1]), RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_integers_are_exact(run):
    asked, config = run
    plan, (first, second) = plans()[str(run)], operands(asked, integers)
    want = reference(asked, first, second)
    bias = integers(asked.bias_shape).astype(np.float64) if asked.has_bias else None
    if bias is not None:
        want = want + bias.reshape(-1, *(1,) * asked.ndim)
    arrays = Arrays(torch, plan, first, second, bias)
    assert_exact(arrays.launch(), want, f"{asked} {config}")
    if plan.filter_bytes:
        assert_exact(arrays.launch(kept=True), want, f"{asked} {config}, the filter kept")
    if plan.reads_filter_last:
        assert_exact(arrays.launch(filter_last=True), want, f"{asked} {config}, the filter's channels last")


def exact(asked: ConvProblem, first, second) -> np.ndarray:
    """The convolution to twice float64's precision: of parts of 18 bits each product, and a sum of thousands, is exact."""

    def parts(array):
        found, step = [], 2.0 ** (np.ceil(np.log2(np.abs(array).max())) - 18)
        for _ in range(4):
            part = np.round(array / step) * step
            array, step = array - part, step / 2**18
            found.append(part)
        return found

    total = np.zeros(asked.result_shape, np.longdouble)
    a, b = parts(first), parts(second)
    for i in range(4):
        for j in range(4 - i):
            total += reference(asked, a[i], b[j])
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS[::2], ids=str)
def test_errors_are_those_of_float64(run):
    """Within the elementwise bound, the same bits each time."""
    asked, config = replace(run[0], has_bias=False), run[1]
    first, second = operands(asked, normals)
    truth = exact(asked, first, second)
    arrays = Arrays(torch, Plan(asked, "cuda", config=config), first, second)
    got = arrays.launch()
    assert got.tobytes() == arrays.launch().tobytes()
    depth = math.prod(asked.launched.filter_size) * asked.launched.operand_channels // asked.groups
    bound = 2.0**-52 * (2 * math.sqrt(depth) * reference(asked, first, second, magnitudes=True) + np.abs(truth).astype(float))
    assert_close((got - truth).astype(float), np.zeros_like(got), bound, f"{asked} {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("of", ["y", "x", "w"])
def test_inf_and_nan_are_where_ieee_has_them(of):
    asked = problem(of, (2, 6, 9, 9), (40, 6, 3, 3))
    first, second = operands(asked, normals)
    first[0, 0, 2, 2], first[1, 1, 3, 3], first[1, 2, 0, 0] = np.inf, np.nan, -np.inf
    first[0, 3] *= 1e-300
    second[1, 2] *= 1e300
    want = reference(asked, first, second)
    got = Arrays(torch, Plan(asked, "cuda", config=Dmma(64, 64)), first, second).launch()
    assert (np.isnan(got) == np.isnan(want)).all() and (np.isinf(got) == np.isinf(want)).all()
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_epilogue(layout, split):
    x, w = (2, 20, 9, 9), (30, 20, 3, 3)
    shape = ConvProblem.forward(2, x, w).result_shape
    asked = ConvProblem.forward(2, x, w, (30,), dtype="float64", layout=layout, scale_shape=(30,), residual_shape=shape, activation="relu")
    first, second = operands(asked, integers)
    bias, scale, residual = (integers(s, seed).astype(np.float64) for s, seed in (((30,), 3), ((30,), 4), (shape, 5)))
    column = (slice(None), None, None)
    want = np.maximum(reference(asked, first, second) * scale[column] + bias[column] + residual, 0)
    got = Arrays(torch, Plan(asked, "cuda", config=Dmma(64, 64, split)), first, second, bias, scale, residual).launch()
    assert_exact(got, want)


@pytest.mark.gpu
def test_candidates_of_a_layer_with_a_part_of_the_epilogue_are_measured():
    """Tuning hands no memory to kernels for operands that a layer does not have."""
    from pycuda_conv.measure import device_times
    from pycuda_conv.runtime import get_device

    x, w = (4, 96, 28, 28), (128, 96, 3, 3)
    asked = ConvProblem.forward(2, x, w, (128,), padding=1, dtype="float64", activation="relu")
    plans = [Plan(asked, get_device("cuda"), config=Dmma(*tile, split)) for tile in dmma.TILES for split in (1, 2)]
    assert all(us > 0 for us in device_times(plans))


# ---- gradients of filters, on the simulated machine


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("options", [{}, {"padding": "same"}, {"dilation": 2}, {"groups": 2}], ids=str)
@pytest.mark.parametrize(("x_shape", "w_shape"), [((2, 4, 6), (6, 4, 2)), ((2, 4, 7, 6), (6, 4, 3, 2)), ((2, 4, 5, 7, 6), (6, 4, 2, 3, 2))], ids=str)
def test_gradients_of_filters_of_few_pixels(x_shape, w_shape, options):
    """Rows of k that pairs of numbers fit into; copies that bring nothing; padding behind the image alone."""
    from test_gradients import gradient

    w_shape = (w_shape[0], w_shape[1] // options.get("groups", 1), *w_shape[2:])
    y_shape = ConvProblem.forward(len(w_shape) - 2, x_shape, w_shape, **options).result_shape
    asked = ConvProblem.gradient("weight", len(w_shape) - 2, x_shape, w_shape, y_shape, dtype="float64", **options)
    x, w, dy = (integers(shape, seed).astype(np.float64) for seed, shape in enumerate((x_shape, w_shape, y_shape)))
    assert_exact(simt.computed(asked, Dmma(32, 32), x, dy, seeds=(1,)), gradient("weight", x, w, dy, **options))
