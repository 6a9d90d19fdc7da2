"""activation(conv * scale + bias + residual) in every kernel and for every kind of array, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from awkward import BASE, MANY_PHASES, POINT, TRANSPOSED
from cases.direct_gemm import GEMM
from cases.hopper_gemm import DENSE, WIDER
from modes import H200, MODES, asked, bound, ids_of
from on_gpu import Arrays
from reference import (
    DTYPES,
    EPS,
    SUM_EPS,
    TINY,
    Case,
    activated,
    assert_close,
    channels_last,
    dgrad,
    fprop,
    is_channels_last,
    tensor,
)
from test_arguments import refuses  # noqa: F401  (a fixture)
from test_functions import FUNCTIONS, NAMES, Recorder, small

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, engines, tune
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.engines.mma.gemm import ImplicitGemm80

PARTS = {  # has_scale, has_residual, activation
    "scale": (True, False, None), "residual": (False, True, None), "relu": (False, False, "relu"), "all": (True, True, "relu"),
    "scale and relu": (True, False, "relu"), "residual and relu": (False, True, "relu"), "before": (True, True, None),
}  # fmt: skip


def finishing(problem: ConvProblem, parts: str) -> ConvProblem:
    has_scale, has_residual, activation = PARTS[parts]
    return replace(problem, has_scale=has_scale, has_residual=has_residual, activation=activation)


def arrays(case: Case, dtype: str, parts: str, integers: bool, seed: int = 0) -> list:
    """Input, weight, bias, scale and residual; None for what there is not."""
    rng = np.random.default_rng(seed + 100)
    shape = case.problem(dtype).result_shape
    if integers:
        scale, residual = rng.integers(-2, 3, case.channels), rng.integers(-99, 100, shape)
    else:
        scale, residual = rng.standard_normal(case.channels), 3 * rng.standard_normal(shape)
    has_scale, has_residual, _ = PARTS[parts]
    plain = case.integers(dtype, seed) if integers else case.normals(dtype, seed)
    return [*plain, scale.astype(dtype) if has_scale else None, residual.astype(dtype) if has_residual else None]


def expected(case: Case, parts: str, x, w, b=None, s=None, r=None) -> np.ndarray:
    """In float64."""
    with np.errstate(invalid="ignore"):
        y = case.reference(x, w)
        across = (-1, *(1,) * case.ndim)
        y = y if s is None else y * s.astype(float).reshape(across)
        y = y if b is None else y + b.astype(float).reshape(across)
        y = y if r is None else y + r.astype(float)
        return activated(y, PARTS[parts][2])


def allowed(case: Case, x, w, b, s, r, ref: np.ndarray, mode: str = "") -> np.ndarray:
    """What an honest sum, scaled, and a few more roundings may be off by."""
    across, dtype = (-1, *(1,) * case.ndim), x.dtype.name
    plain = case.reference(x, w)
    factor = 1.0 if s is None else np.abs(s.astype(float)).reshape(across)
    most = np.abs(plain) * factor + (
        0 if b is None else np.abs(b.astype(float)).reshape(across)
    ) + (0 if r is None else np.abs(r.astype(float)))
    most_off = bound(case, mode, x, w, None, plain) if mode else case.bound(x, w, None, plain)
    if SUM_EPS[dtype] < EPS[dtype]:  # the sum itself was not rounded to 16 bits
        most_off = most_off - EPS[dtype] * np.abs(plain)
    return most_off * factor + 4 * SUM_EPS[dtype] * most + EPS[dtype] * np.abs(ref) + TINY[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_passes_through_relu_and_the_sum_is_rounded_once(device, dtype):
    x = np.array([[[np.nan, -1, 1, -np.inf, np.inf]]], dtype)
    one = np.ones((1, 1, 1), dtype)
    got = pc.conv1d(x, one, device=device, activation="relu")
    assert np.isnan(got[0, 0, 0]) and got[0, 0, 1:].tolist() == [0, 1, 0, np.inf]
    for special in (np.nan, np.inf):
        got = pc.conv1d(one, one, device=device, scale=np.array([special], dtype), residual=-one, activation="relu")
        assert got == special or (np.isnan(special) and np.isnan(got))
    assert np.isnan(pc.conv1d(one, one, device=device, residual=np.full_like(one, np.nan), activation="relu"))
    # 1 + eps/2 is 1 in the dtype, but not while it is summed
    half = np.array([EPS[dtype] / 2], dtype)
    if SUM_EPS[dtype] < EPS[dtype]:
        got = pc.conv1d(one, one, half, device=device, residual=np.array([[[-1]]], dtype))
        assert got == half


# ---- the public functions

def function(case: Case):
    return getattr(pc, NAMES[case.transposed, case.ndim])


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "groups": 2}], ids=["", "options"])
@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS)
def test_functions(device, transposed, ndim, options, kind):
    case = small(transposed, ndim, **options)
    x, w, b, s, r = arrays(case, "float64", "all", integers=True)
    ref = expected(case, "all", x, w, b, s, r)
    wrap = tensor if kind == "torch" else lambda a: a
    x, w, b, s, r = map(wrap, (x, w, b, s, r))
    keywords = {"scale": s, "activation": "relu", **options, "device": device}
    got = function(case)(x, w, b, residual=r, **keywords)
    assert type(got) is type(x) and np.array_equal(np.asarray(got), ref)
    unbatched = function(case)(x[0], w, b, residual=r[0], **keywords)
    assert np.array_equal(np.asarray(unbatched), ref[0])
    problem = finishing(case.problem("float64"), "all")
    plan = Plan(problem, device)
    assert np.array_equal(np.asarray(plan(x, w, b, scale=s, residual=r)), ref)
    layer = plan.bind(w, b, s)
    for _ in range(2):
        assert np.array_equal(np.asarray(layer(x, residual=r)), ref)
    given = r + 0
    assert layer(x, residual=given, out=given) is given and np.array_equal(np.asarray(given), ref)
    given = r + 0
    assert function(case)(x, w, b, residual=given, out=given, **keywords) is given and np.array_equal(np.asarray(given), ref)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_channels_last_tensors_in_host_memory(device, transposed, ndim):
    case = small(transposed, ndim)
    given = arrays(case, "float32", "all", integers=True)
    ref = expected(case, "all", *given)
    x, w, b, s, r = map(tensor, given)
    for residual in (r, channels_last(r)):
        got = function(case)(channels_last(x), w, b, scale=s, residual=residual, activation="relu", device=device)
        assert is_channels_last(got) and np.array_equal(got.numpy(), ref)
        out = channels_last(torch.full_like(r, float("nan")))
        assert function(case)(channels_last(x), w, b, scale=s, residual=residual, activation="relu", out=out, device=device) is out
        assert np.array_equal(out.numpy(), ref)
    out = channels_last(r.clone())
    assert function(case)(channels_last(x), w, b, scale=s, residual=out, activation="relu", out=out, device=device) is out
    assert np.array_equal(out.numpy(), ref)


VIEWS = {
    "fortran": np.asfortranarray, "every second": lambda a: np.repeat(a, 2, -1)[..., ::2], "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape), "read only": lambda a: (a.setflags(write=False), a)[1],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_scales_and_residuals_of_every_layout(device, view):
    case = small(False, 2)
    x, w, b, s, r = arrays(case, "float32", "all", integers=True)
    s, r = VIEWS[view](s), VIEWS[view](r)
    got = pc.conv2d(x, w, b, scale=s, residual=r, activation="relu", device=device)
    assert np.array_equal(got, expected(case, "all", x, w, b, s, r))


def test_nothing_to_convolve(device):
    x, w, b, s, r = arrays(small(False, 2), "float32", "all", integers=True)
    got = pc.conv2d(x[:0], w, b, scale=s, residual=r[:0], activation="relu", device=device)
    assert got.shape == (0, *r.shape[1:])
    got = pc.conv2d(x[:, :0], w[:, :0], b, scale=s, residual=r, activation="relu", device=device)  # without input channels
    assert np.array_equal(got, np.maximum(b.reshape(-1, 1, 1) + r, 0))


def test_many(device):
    case = small(False, 2)
    x, w, b, s, _ = arrays(case, "float32", "scale and relu", integers=True)
    got = list(pc.conv2d_many([x, x[:1]], w, b, scale=s, activation="relu", device=device))
    ref = expected(case, "scale and relu", x, w, b, s)
    assert np.array_equal(got[0], ref) and np.array_equal(got[1], ref[:1])


# ---- wrong arguments

X, W, S, R = np.zeros((2, 4, 8, 9), "f"), np.zeros((6, 4, 3, 3), "f"), np.zeros(6, "f"), np.zeros((2, 6, 6, 7), "f")

WORDS = (
    r"activation must be one of \(None, 'relu', 'relu6', 'leaky_relu', 'hardswish', 'silu', 'gelu', 'gelu_tanh'\) or \('leaky_relu', slope\)"
)
WRONG = [
    (ConvArgumentError, r"expected scale to be 1-dimensional with 6 elements, but got scale of size \[4\] instead", {"scale": S[:4]}),
    (ConvArgumentError, r"residual must have the result's shape \[2, 6, 6, 7\], but got residual of size \[1, 6, 6, 7\]", {"residual": R[:1]}),
    (ConvArgumentError, r"residual must have the result's shape \[2, 6, 6, 7\], but got residual of size \[6, 6, 7\]", {"residual": R[0]}),
    (ConvArgumentError, "and scale type .* should be the same", {"scale": S.astype("d")}),
    (ConvArgumentError, "and residual type .* should be the same", {"residual": R.astype("e")}),
    (ConvArgumentError, WORDS + ", but got activation='tanh'", {"activation": "tanh"}),
    (ConvArgumentError, WORDS + r", but got activation=\('relu', 0.1\)", {"activation": ("relu", 0.1)}),
    (ConvArgumentError, WORDS + r", but got activation=\('leaky_relu',\)", {"activation": ("leaky_relu",)}),
    (TypeError, WORDS + ", got True", {"activation": True}),
    (TypeError, r"the slope in activation=\('leaky_relu', slope\) must be a number, got '0.1'", {"activation": ("leaky_relu", "0.1")}),
    (TypeError, r"the slope in activation=\('leaky_relu', slope\) must be a number, got True", {"activation": ("leaky_relu", True)}),
    (ConvArgumentError, r"the slope in activation=\('leaky_relu', slope\) must be finite, but got nan", {"activation": ("leaky_relu", np.nan)}),
    (ConvArgumentError, r"the slope in activation=\('leaky_relu', slope\) must be finite, but got 1000", {"activation": ("leaky_relu", 10**400)}),
    (ConvArgumentError, r"activation must be one of .* but got activation=\(an array", {"activation": (np.zeros(2), 1)}),
    (TypeError, "scale must be a numpy.ndarray, .*but got builtins.float", {"scale": 2.0}),
    (TypeError, "residual must be a numpy.ndarray, .*but got builtins.list", {"residual": [1]}),
]


@pytest.mark.parametrize(("error", "text", "options"), WRONG, ids=[f"{next(iter(o))}-{i}" for i, (_, _, o) in enumerate(WRONG)])
def test_wrong_arguments_are_refused(refuses, error, text, options):  # noqa: F811
    refuses(error, text, "conv2d", X, W, **options)


def test_an_out_that_overlaps_is_refused_unless_it_is_the_residual(refuses):  # noqa: F811
    whole = np.zeros(R.size + 1, "f")
    out, shifted = whole[:-1].reshape(R.shape), whole[1:].reshape(R.shape)
    refuses(ConvArgumentError, "out overlaps residual in memory", "conv2d", X, W, residual=shifted, out=out)
    refuses(ConvArgumentError, "out overlaps residual in memory", "conv2d", X, W, residual=np.broadcast_to(out[:1], R.shape), out=out)
    swapped = out.view(out.dtype.newbyteorder())
    refuses(ConvArgumentError, "out overlaps residual in memory", "conv2d", X, W, residual=swapped, out=out)
    refuses(ConvArgumentError, "out overlaps scale in memory", "conv2d", X, W, scale=whole[:6], out=out)
    refuses(TypeError, "input is a numpy.ndarray but residual is a torch.Tensor", "conv2d", X, W, residual=torch.zeros(R.shape))


def test_plans_refuse_what_they_are_not_for(device):
    plan = Plan(ConvProblem.forward(2, X.shape, W.shape, scale_shape=S.shape, residual_shape=R.shape, activation="relu"), device)
    with pytest.raises(ConvArgumentError, match=r"this plan takes scale of shape \(6,\), but got None"):
        plan(X, W, residual=R)
    with pytest.raises(ConvArgumentError, match=r"this plan takes residual of shape \(2, 6, 6, 7\), but got None"):
        plan(X, W, scale=S)
    with pytest.raises(ConvArgumentError, match=r"this plan takes scale of shape \(6,\), but got None"):
        plan.bind(W)
    with pytest.raises(ConvArgumentError, match=r"this plan takes residual of shape \(2, 6, 6, 7\), but got None"):
        plan.bind(W, None, S)(X)
    with pytest.raises(ConvArgumentError, match=r"this plan takes residual of shape None, but got \(2, 6, 6, 7\)"):
        Plan(ConvProblem.forward(2, X.shape, W.shape), device)(X, W, residual=R)
    with pytest.raises(TypeError, match="residual is for one call"):
        pc.conv2d_many([X], W, residual=R)
    with pytest.raises(TypeError, match=r"weight must be a numpy.ndarray, .*but got builtins.NoneType"):
        plan.bind(None, scale=S)
    with pytest.raises(TypeError, match=r"a tensor of shape \[6, 4, 3, 3\] lies on the device 'meta', so it has no values"):
        plan.bind(torch.zeros(W.shape, device="meta"), scale=torch.zeros(S.shape))


def test_gradients_that_would_be_lost_are_refused(device):
    x, w, s, r = map(torch.from_numpy, (X, W, S, R))
    for name, value in (("scale", s), ("residual", r)):
        needing = {name: value.clone().requires_grad_()}
        assert pc.conv2d(x, w, device=device, **needing).requires_grad
        with pytest.raises(ConvArgumentError, match="gradients"):
            pc.conv2d(x, w, device=device, out=torch.empty(R.shape), **needing)
        shapes = {f"{name}_shape": value.shape}
        with pytest.raises(NotImplementedError, match="gradients"):
            Plan(ConvProblem.forward(2, X.shape, W.shape, **shapes), device)(x, w, **needing)


# ---- what a GPU's kernels are given, seen on tensors in host memory


@pytest.mark.parametrize("redoes", [False, True])
def test_device_arrays_are_read_where_they_lie_or_copied(monkeypatch, redoes):
    """A residual that is `out` is copied for kernels that may write a part of the result again, and for no others."""
    from pycuda_conv.arrays.tensors import TorchKind
    from pycuda_conv.call import Operands
    from pycuda_conv.execute import device
    from pycuda_conv.runtime import contexts

    case = small(False, 2)
    given = arrays(case, "float32", "all", integers=True)
    x, w, b, s, r = map(tensor, given)
    plan, kind, seen = Recorder(case, given[:3]).plan, TorchKind(), {}
    plan.problem, plan.redoes, plan.operand_bytes = finishing(plan.problem, "all"), redoes, [a.nbytes for a in given]
    plan.new_dtype = None
    plan.launch = lambda buffers, *_: seen.update(out=buffers[5], scale=buffers[3], residual=buffers[4])
    kind._current_stream = lambda ordinal: 0
    monkeypatch.setattr(contexts, "in_doubt", lambda *_: False)  # it asks the driver, which is not here

    def convolve(scale, residual, out=None):
        return device.convolve(kind, plan, Operands(x, w, b, scale, residual), out, None)

    y = convolve(s, r)
    assert seen == {"out": y.data_ptr(), "scale": s.data_ptr(), "residual": r.data_ptr()}
    convolve(s, r, torch.empty_like(r))
    assert seen["residual"] == r.data_ptr()
    assert convolve(s, r, r) is r and seen["out"] == r.data_ptr() and (seen["residual"] != r.data_ptr()) == redoes
    convolve(torch.stack([s, s], 1)[:, 0], channels_last(r))
    assert seen["scale"] != s.data_ptr() and seen["residual"] % 16 == 0
    wide = torch.zeros(r.numel() + 4)
    near, off = wide[:-4].view(r.shape), wide[4:].view(r.shape)
    for name, arguments in (("residual", (s, off, near)), ("residual", (s, near, off)), ("scale", (wide[: len(s)], r, near))):
        with pytest.raises(ConvArgumentError, match=f"out overlaps {name}"):
            convolve(*arguments)
    with pytest.raises(ConvArgumentError, match="out overlaps residual"):
        convolve(s, torch.as_strided(wide, r.shape, channels_last(r).stride()), near)  # the same memory in another order


# ---- problems


def test_problems_show_their_epilogue_and_count_its_bytes():
    plain = ConvProblem.forward(2, X.shape, W.shape)
    full = ConvProblem.forward(2, X.shape, W.shape, scale_shape=[6], residual_shape=[2, 6, 6, 7], activation="relu", layout="NHWC")
    assert str(full) == "conv2d 2x4x8x9 -> 6x6x7 k3x3 s1 p0 float32 channels last scale residual relu"
    assert full.bytes == plain.bytes + 4 * (6 + R.size) and full.plain == replace(plain, layout="NHWC")
    assert len({plain, finishing(plain, "scale"), finishing(plain, "residual"), finishing(plain, "relu"), finishing(plain, "all")}) == 5
    back = ConvProblem.transposed(1, (2, 4, 5), (4, 3, 2), (6,), groups=2, scale_shape=(6,), residual_shape=(2, 6, 6))
    assert back.scale_shape == back.bias_shape == (6,) and back.residual_shape == back.result_shape == (2, 6, 6)


def test_a_choice_serves_the_problem_with_and_without_an_epilogue(monkeypatch, tmp_path):
    problem = BASE.problem()
    table = tune.Table(tmp_path / "tuned.json")
    monkeypatch.setattr(tune, "user_table", lambda: table)
    for config in (ImplicitGemm(128, 128, 3), ImplicitGemm(128, 136, 2)):
        tune.store(problem, H200, tune.Choice(config, 1.0))
        assert tune.lookup(finishing(problem, "scale and relu"), H200).config == config
        found = tune.lookup(finishing(problem, "all"), H200)  # None if it can't run that
        assert (found and found.config) == (config if config.BLOCK_N == 128 else None)
    assert tune.key(finishing(problem, "all")) == tune.key(problem)
    for parts in PARTS:
        full = finishing(problem, parts)
        assert engines.filter_key(full, ImplicitGemm(64, 128, 3)) == engines.filter_key(problem, ImplicitGemm(64, 128, 3))
        assert engines.refusal(full, engines.choose(full, H200), H200) is None


# ---- the tensor cores' planning; what they compute is in tests/cases


def test_programs_say_whether_they_write_twice():
    def redoes(mode, config, case=POINT):
        return engines.schedule(finishing(asked(case, mode), "all"), config, H200).redoes

    assert redoes("fp32", ImplicitGemm(64, 128, 3)) and redoes("tf32", ImplicitGemm(64, 128, 3)) and redoes("fp32 last", ImplicitGemm80())
    assert not redoes("fp16", ImplicitGemm(64, 128, 3)) and not redoes("fp32", Pointwise()) and not redoes("fp32", GEMM)
    assert redoes("fp32", GEMM, MANY_PHASES[0]) and not redoes("fp32", GEMM, TRANSPOSED)
    assert not redoes("fp16 last", ImplicitGemm80())


# ---- on a GPU

RANGES = [  # (case, mode, config): of every kind of tile, and sums in parts
    (WIDER, "fp32", ImplicitGemm(128, 128, 3)), (WIDER, "fp32", ImplicitGemm(128, 72, 4, 8)), (DENSE, "fp32", ImplicitGemm(64, 208, 3)),
    (fprop((5, 64, 7, 7), (128, 64, 3, 3), padding=1), "fp32", ImplicitGemm(128, 128, 3)), (WIDER, "fp32 last", ImplicitGemm(64, 128, 3, 2)),
    (fprop((2, 40, 9, 11), (33, 40, 3, 3), padding=1), "fp32 last", ImplicitGemm(64, 64, 3)), (WIDER, "tf32", ImplicitGemm(64, 128, 3)),
    (WIDER, "tf32", ImplicitGemm(128, 128, 4, schedule="pingpong")), (WIDER, "tf32 last", ImplicitGemm(64, 128, 3)),
    (fprop((2, 64, 5, 6, 7), (48, 64, 3, 3, 3), padding=1), "fp32", ImplicitGemm(64, 128, 3)),
    (fprop((2, 3, 40, 39), (64, 3, 7, 7), stride=2, padding=3), "fp32 last", ImplicitGemm(128, 128, 3)),
    (dgrad((2, 48, 9, 8), (48, 40, 3, 3), padding=1, groups=2), "fp32", ImplicitGemm(64, 128, 3)),
    (WIDER, "fp32", ImplicitGemm80(64, 64, 3, 2)), (WIDER, "tf32", ImplicitGemm80(64, 64, 3, 2)),
]  # fmt: skip


def launched(plan: Plan, *given) -> np.ndarray:
    arrays = Arrays(torch, plan, *given)
    found = arrays.launch()
    assert found.tobytes() == arrays.launch(kept=True).tobytes()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode", "config"), RANGES, ids=ids_of(RANGES))
def test_images_and_filters_that_take_the_exact_path(torch, case, mode, config):
    """Within the bound; what is not finite where it belongs; the others keep their bits."""
    plan = Plan(finishing(asked(case, mode), "all"), "cuda", config=config)
    given = arrays(case, "float32", "all", integers=False)
    clean = launched(plan, *given)
    others = [n for n in range(clean.shape[0]) if n != 1]
    for value in (np.nan, np.inf, 1e30, 1e-30, 2.0**-149):
        x = given[0].copy()
        x[1].flat[5] = value
        got, ref = launched(plan, x, *given[1:]), expected(case, "all", x, *given[1:])
        assert got[others].tobytes() == clean[others].tobytes(), f"{plan}: {value} in image 1 changed another"
        assert np.array_equal(np.isnan(got), np.isnan(ref)) and np.array_equal(np.isinf(got), np.isinf(ref)), f"{plan}: {value}"
        finite = np.isfinite(ref)
        with np.errstate(invalid="ignore"):
            bound = allowed(case, np.where(np.isfinite(x), x, 0), *given[1:], np.where(finite, ref, 0), mode)
        assert_close(np.where(finite, got, 0), np.where(finite, ref, 0), bound, f"{plan}: {value}")
    for scale in (2.0**-40, 2.0**40, 2.0**70):  # done again with a scale of its own, or on the exact path
        x = given[0].copy()
        x[1] *= np.float32(scale)
        got, ref = launched(plan, x, *given[1:]), expected(case, "all", x, *given[1:])
        assert_close(got, ref, allowed(case, x, *given[1:], ref, mode), f"{plan}: image 1 times {scale}")
    w = given[1].copy()
    w[5].flat[0] = 1e25
    got, ref = launched(plan, given[0], w, *given[2:]), expected(case, "all", given[0], w, *given[2:])
    assert_close(got, ref, allowed(case, given[0], w, *given[2:], ref, mode), f"{plan}: filter 5")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "tf32 last", "fp16", "fp16 last"])
@pytest.mark.parametrize("case", [
    fprop((8, 64, 28, 28), (128, 64, 3, 3), padding=1), fprop((8, 256, 28, 28), (64, 256, 1, 1)),
    dgrad((8, 128, 14, 14), (128, 64, 4, 4), stride=2, padding=1)
], ids=str)
def test_the_functions_on_a_gpu(torch, case, mode):
    """Residuals of either layout, `out` as the residual, kept filters, and a graph: the same bits."""
    dtype, precision, layout = MODES[mode]
    order = channels_last if layout == "NHWC" else lambda t: t
    host = arrays(case, dtype, "all", integers=False)
    ref = expected(case, "all", *host)
    x, w, b, s, r = (tensor(a).cuda() for a in host)
    x, r = order(x), order(r)
    options = {**case.options, "scale": s, "activation": "relu", "precision": precision if dtype == "float32" else "fp32"}
    y = function(case)(x, w, b, residual=r, **options)
    assert_close(y.cpu().numpy(), ref, allowed(case, *host, ref, mode), f"{case} {mode}")
    plan = Plan(finishing(asked(case, mode), "all"), "cuda")
    layer, outs = plan.bind(w, b, s), [r.clone() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, residual=r)
    captured.fill_(float("nan"))
    graph.replay()
    other = r.contiguous() if layout == "NHWC" else channels_last(r)
    found = {
        "a residual of the other layout": function(case)(x, w, b, residual=other, **options),
        "out as the residual": function(case)(x, w, b, residual=outs[0], out=outs[0], **options),
        "a plan": plan(x, w, b, scale=s, residual=r),
        "a bound plan": layer(x, residual=r), "its out as the residual": layer(x, residual=outs[1], out=outs[1]), "a graph": captured
    }  # fmt: skip
    assert [what for what, one in found.items() if not torch.equal(one, y)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["GPUArray", "cuda array interface", "cupy", "numpy"])
def test_other_arrays_on_a_gpu(kind):
    from pycuda_conv.runtime import get_device
    from pycuda_conv.tools.verify import array_kinds

    kinds = {one.name: one for one in array_kinds(get_device("cuda"))}
    if kind not in kinds:
        pytest.skip(f"{kind} is not here")
    case = small(False, 2, padding=1)
    given = arrays(case, "float32", "all", integers=True)
    ref = expected(case, "all", *given)
    make, read, wait = kinds[kind].make, kinds[kind].read, kinds[kind].wait
    x, w, b, s, r = (make(a, "float32") for a in given)
    got = pc.conv2d(x, w, b, padding=1, scale=s, residual=r, activation="relu", device="cuda")
    wait()
    with get_device("cuda"):
        assert np.array_equal(got.get() if hasattr(got, "get") else got, ref)
    assert pc.conv2d(x, w, b, padding=1, scale=s, residual=r, activation="relu", out=r, device="cuda") is r
    wait()
    assert np.array_equal(read(r), ref)
