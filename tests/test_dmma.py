"""float64 on the tensor cores: the kernel's own text on the CPU (simt), compiled, and, on a GPU, its numbers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from modes import H200
from on_gpu import Arrays, side_by_side
from reference import NVCC, assert_close, assert_exact, covering, nvcc_of

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.mma import dmma
from pycuda_conv.engines.mma.dmma import Dmma

torch = pytest.importorskip("torch", reason="the reference is torch's CPU convolution")

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
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

# ---- on the simulated machine


def lying(asked: ConvProblem, array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, 1, -1) if asked.layout == "NHWC" else array


def computed(asked: ConvProblem, config: Dmma, make=integers, filter_last: bool = False, **options) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and what it should be, as they lie in memory."""
    asked = replace(asked, has_bias=False)
    first, second = operands(asked, make)
    want = lying(asked, reference(asked, first, second))
    schedule = dmma.schedule(asked.launched, config, H200)
    sizes = (0, want.nbytes, schedule.workspace_bytes, schedule.filter_bytes, 0, 0)
    given = (np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8) for a in (lying(asked, first), np.moveaxis(second, 1, -1) if filter_last else second))
    memory = SimpleNamespace(buffers=[*given, *(np.full(size, 0xFF, np.uint8) for size in sizes)])
    simt.run(schedule.filter_last if filter_last else schedule.whole, memory, 1, **options)
    return memory.buffers[3].view(np.float64).reshape(want.shape), want


#: Some of each tile.
SOME = [run for tile in dmma.TILES for run in [run for run in RUNS if (run[1].BLOCK_M, run[1].BLOCK_N) == tile][::4]]


@simulated
@pytest.mark.parametrize(("asked", "config"), SOME, ids=str)
def test_the_launches_compute_the_convolution(asked, config):
    last = SOME.index((asked, config)) % 2 and dmma.schedule(asked.launched, config, H200).filter_last is not None
    got, want = computed(asked, config, filter_last=bool(last))
    assert_exact(got, want, config)


def drawn(r: random.Random) -> tuple[ConvProblem, Dmma]:
    """A problem at random, and a configuration that runs it."""
    ndim, groups = r.randint(1, 3), r.choice((1, 1, 2, 3))
    channels, written = groups * r.randint(1, 9), groups * r.randint(1, 9)
    filter_size, dilation, padding, stride = (tuple(r.randint(low, high) for _ in range(ndim)) for low, high in ((1, 3), (1, 2), (0, 2), (1, 3)))
    size = [max(r.randint(1, 9), (f - 1) * d + 1 - 2 * q) for f, d, q in zip(filter_size, dilation, padding, strict=True)]
    of = r.choice(("y", "x", "w"))
    asked = problem(
        of, (r.randint(1, 3), channels, *size), (written, channels // groups, *filter_size), "NCHW" if of == "w" else r.choice(("NCHW", "NHWC")),
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    config = Dmma(*r.choice(list(dmma.TILES)), r.randint(1, 4))
    return (asked, config) if dmma.refusal(asked.launched, config) is None else drawn(r)


@simulated
@pytest.mark.parametrize("seed", range(12))
def test_any_launch_computes_the_convolution(seed):
    asked, config = drawn(random.Random(seed))
    got, want = computed(asked, config)
    assert_exact(got, want, f"{asked} {config}")


@simulated
@pytest.mark.parametrize("tile", [(64, 64), (32, 32)])
def test_a_long_sum_of_float64_is_no_chain_of_roundings(tile):
    asked = problem("x", (1, 16, 16), (512, 16, 2))  # lines, whose gradients cuDNN sums by tap
    y, w = (a.squeeze() for a in operands(asked, normals))
    products = np.concatenate([w[:, :, 0, None] * y[:, None, 1:], w[:, :, 1, None] * y[:, None, :-1]])  # where both taps are
    chain = np.zeros((16, 14))
    for product in products:
        chain += product
    exact = sum(np.einsum("kc,kp->cp", w[:, :, r].astype(np.longdouble), y[:, 1 - r : 15 - r].astype(np.longdouble)) for r in (0, 1))
    got, _ = computed(asked, Dmma(*tile), normals)
    assert np.linalg.norm((got.squeeze()[:, 1:-1] - exact).astype(float)) < 0.5 * np.linalg.norm((chain - exact).astype(float))


@simulated
@pytest.mark.parametrize("name", ["bias", "scale", "residual"])
def test_a_read_of_an_operand_that_is_not_there_is_found(name):
    asked, config = next(run for run in RUNS if run[1].SPLIT == 1)
    with pytest.raises(simt.Wrong):
        computed(replace(asked, activation="relu"), config, broken=(f"if (p.has_{name})", "if (true)"))  # the sums are finished


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


@simulated
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
