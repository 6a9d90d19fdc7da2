"""Layers in evaluation: scale and bias of float32 in the epilogue of every engine, the norms of a graph, functions and operators."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import simt
import test_epilogue as epilogue
import torch
from reference import Case, assert_close, dgrad, fprop
from test_repeat import IN_C, warm  # noqa: F401  (a fixture)

from pycuda_conv import Plan, engines, execute
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.nn import evaluation, folding
from pycuda_conv.nn.evaluation import evaluate, spec_of
from pycuda_conv.nn.folding import fold_norms, scaled, starts_of
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import get_device

H200 = SimpleNamespace(backend="cuda", capability=(9, 0), multiprocessors=132, model="NVIDIA H200", name="fake", constants_pay=True)
#: Cases for which the planner has candidates of all engines, in their layouts.
CASES = [
    *((fprop((2, 32, 9, 8), (24, 32, 3, 3), padding=1), layout) for layout in ("NHWC", "NCHW")),
    *((fprop((2, 32, 8, 16), (64, 32, 1, 1)), layout) for layout in ("NHWC", "NCHW")),
    *((fprop((2, 24, 16, 16), (24, 1, 3, 3), padding=1, groups=24), layout) for layout in ("NHWC", "NCHW")),
    *((fprop((2, 3, 12, 16), (24, 3, 3, 3), padding=1), layout) for layout in ("NHWC", "NCHW")),
    (fprop((2, 32, 9, 8), (32, 4, 3, 3), padding=1, groups=8), "NHWC"),
    *((fprop((2, 16, 12, 16), (4, 16, 3, 3), padding=1), layout) for layout in ("NHWC", "NCHW")),
    *((dgrad((1, 16, 5, 4), (16, 24, 3, 3), padding=1), layout) for layout in ("NHWC", "NCHW")),
    (fprop((1, 4, 24, 24), (6, 4, 11, 11), padding=5), "NCHW"), (fprop((1, 64, 4, 4), (24, 64, 3, 3), padding=1), "NCHW"), (fprop((2, 32, 8, 16), (64, 32, 3, 3), padding=1, bias=False), "NCHW"),
]  # fmt: skip
MODES = ("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32"), ("float64", "fp32"), ("bfloat16", "fp32")


def by_engine(device) -> dict[str, list[tuple[Case, ConvProblem, object]]]:
    """Cases with a problem and a configuration for it, by the engine."""
    found: dict[str, list[tuple[Case, ConvProblem, object]]] = {}
    for case, layout in CASES:
        for dtype, precision in MODES:
            problem = replace(case.problem(dtype), layout=layout, precision=precision)
            for config in engines.candidates(problem, device):
                found.setdefault(type(config).__name__, []).append((case, problem, config))
    return found


class Layer:
    """A layer of 16-bit arrays whose scale and bias are float32: its arrays of random numbers, and its result in float64."""

    def __init__(self, case: Case, problem: ConvProblem, whole: bool, seed: int = 0) -> None:
        rng, k = np.random.default_rng(seed), (case.channels,)
        self.x, self.w, _ = case.normals(problem.dtype, seed)
        self.scale, self.bias = (rng.normal(1, 1, k) * 1e5).astype("f"), rng.normal(size=k).astype("f")
        self.scale[0] = 1 / 3
        self.scale[1:] /= 1e5
        self.residual = rng.normal(size=problem.result_shape).astype(problem.dtype) if whole else None
        self.problem = replace(epilogue.finishing(problem, "all" if whole else "scale"), has_bias=True, float_scale=True)
        self.case = case

    def check(self, got: np.ndarray, what: object) -> None:
        given = self.x, self.w, self.bias, self.scale, self.residual
        ref = epilogue.expected(self.case, "scale" if self.residual is None else "all", *given)
        assert_close(got, ref, epilogue.allowed(self.case, *given, ref), what)

    def launched(self, config: object, where: str) -> np.ndarray:
        """The result by `config` on a device."""
        plan = Plan(self.problem, where, config=config)

        def on(array, order=None):
            made = None if array is None else torch.from_numpy(array).to(where if where != "opencl" else "cpu")
            return made if made is None else TORCH.as_kernel_input(made, order)

        x, w, residual = on(self.x, plan.order), on(self.w, plan.weight_order), on(self.residual, plan.order)
        y = TORCH.empty(plan.result_shape, x, None, plan.result_order).fill_(float("nan"))
        execute.launch(TORCH, plan.device, plan.launch, (x, w, on(self.bias), on(self.scale), residual), (y,), plan.workspace_bytes)
        return y.cpu().numpy()


#: The engines whose texts read scale and bias in ``finish.cuh`` or a way of their own. Those of ``epilogue.cuh`` run on OpenCL.
SIMT = [
    "DenseNhwc", "ImplicitGemm", "GroupedNhwc", "FewChannels", "Planes", "GatheredPlanes", "FewPixels", "FewInputs", "DepthwiseToeplitz",
    "Gemm"
]


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("engine", SIMT)
def test_the_texts_of_tensor_cores_take_scale_and_bias_of_float32(engine):
    case, problem, config = next(run for run in by_engine(H200)[engine] if run[1].dtype == "float16")
    one = Layer(case, problem, SIMT.index(engine) % 2 == 0)
    one.check(simt.computed(one.problem, config, one.x, one.w, one.bias, one.scale, one.residual), config)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(
    ("k", "tile", "whole"),
    [(72, (64, 32), True), (64, (64, 64), False), (152, (128, 160), True), (184, (128, 192), False), (184, (128, 192), True)]
)
def test_tiles_of_a_block_have_their_own_channels_scale_and_bias(k, tile, whole):
    """One or two blocks compute all tiles. The channels of a block's tiles take turns, or are the same in all. Residuals are read ahead."""
    case = fprop((2, 16, 12, 12), (k, 16, 1, 1))
    one = Layer(case, replace(case.problem("float16"), layout="NHWC"), whole)
    config = next(c for c in engines.predictions(one.problem, H200) if type(c[1]).__name__ == "DenseNhwc")[1]
    config = replace(config, BLOCK_M=tile[0], BLOCK_N=tile[1], STAGES=3, CLUSTER=1)
    for constants in (False, True):
        one.check(
            simt.computed(one.problem, config, one.x, one.w, one.bias, one.scale, one.residual, multiprocessors=1, constants=constants),
            config
        )


def small(found) -> list:
    """For float16 the first candidate and the last one."""
    halves = [run for run in found if run[1].dtype == "float16"]
    return [halves[0], halves[-1]][: len(halves)] if halves else []


OF_OPENCL = by_engine(SimpleNamespace(backend="opencl", capability=(0, 0), multiprocessors=2, model="", name="opencl", constants_pay=False))


@pytest.mark.parametrize("engine", [name for name in OF_OPENCL if small(OF_OPENCL[name])])
def test_every_engine_of_opencl_takes_scale_and_bias_of_float32(engine):
    for i, (case, problem, config) in enumerate(small(OF_OPENCL[engine])):
        one = Layer(case, problem, i % 2 == 0, seed=i)
        one.check(one.launched(config, "opencl"), config)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [name for name in engines.registry.config_classes() if "Wgrad" not in name and name != "DepthwiseRing"])
def test_every_engine_of_gpus_takes_scale_and_bias_of_float32(engine):
    found = small(by_engine(get_device("cuda:0")).get(engine, []))
    if not found:
        pytest.skip("it has no candidates of float16 on this GPU")
    for i, (case, problem, config) in enumerate(found):
        one = Layer(case, problem, i % 2 == 0, seed=i)
        one.check(one.launched(config, "cuda:0"), config)


# ---- the norms of a graph


def norms_of(where, dtype, count, missing=True, seed=0):
    """Vectors of some norms and biases, and what they are as factors and summands in float64."""
    torch.manual_seed(seed)
    wide, vectors, expected = torch.float64 if dtype is torch.float64 else torch.float32, [], []
    for i in range(count):
        k = (3, 8, 17, 64, 130, 300)[i % 6]
        gamma, beta, mean, var, bias = torch.randn(k), torch.randn(k), torch.randn(k), torch.rand(k) + 0.01, torch.randn(k)
        of_norm = (wide, dtype)[i // 2 % 2]
        some = [one.to(where, of_norm) for one in (gamma, beta, mean, var)] + [bias.to(where, dtype)]
        if missing and i % 3 == 1:
            some[0] = some[4] = None
        if missing and i % 4 == 2:
            some[1] = None
        g, b, m, v, c = (None if one is None else one.double() for one in some)
        a = (1 if g is None else g) / torch.sqrt(v + 1e-3 * (i + 1))
        expected.append((a, ((0 if c is None else c) - m) * a + (0 if b is None else b)))
        vectors += some
    return vectors, [1e-3 * (i + 1) for i in range(count)], expected, wide


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 130])
def test_norms_are_folded(where, dtype, count):
    if where == "cpu" and count > 7 and dtype is not torch.float16:
        count = 7  # a launch for each
    vectors, eps, expected, wide = norms_of(where, dtype, count)
    starts = starts_of([one.shape[0] for one in vectors[2::5]])
    for _ in range(3):
        folded = fold_norms(vectors, eps, dtype is torch.float64)
        assert folded.dtype is wide and folded.shape == (starts[-1],) and not folded.requires_grad
        for i, (a, t) in enumerate(expected):
            k = len(a)
            for got, ref in ((folded[starts[i] :][:k], a), (folded[starts[i] + k :][:k], t)):
                assert ((got.double() - ref).abs() <= 4 * torch.finfo(wide).eps * (ref.abs() + 4 * a.abs() + 1)).all()
        for one in vectors[2::5]:  # whoever writes to them, and how
            one.data.mul_(2)
        expected = [(a, t - (one.double() / 2) * a) for (a, t), one in zip(expected, vectors[2::5], strict=True)]
    if dtype is not torch.float32:
        return
    turned = [None if one is None else torch.stack((one, one), 1)[:, 0] for one in vectors]
    assert torch.equal(fold_norms(turned, eps), fold_norms(vectors, eps))


def test_wrong_norms():
    vectors, eps, *_ = norms_of("cpu", torch.float32, 2, missing=False)
    with pytest.raises(ConvArgumentError, match="vectors must be 5 for each of one or more eps, but got 9 and 2"):
        fold_norms(vectors[:-1], eps)
    with pytest.raises(ConvArgumentError, match="mean and var of norm 1 must both be given"):
        fold_norms([*vectors[:7], None, *vectors[8:]], eps)
    with pytest.raises(ConvArgumentError, match="eps of norm 1 must be 1 without mean and var, but got"):
        fold_norms([*vectors[:7], None, None, *vectors[9:]], eps)
    with pytest.raises(ConvArgumentError, match="or gamma or beta alone"):
        fold_norms([None] * 5, [1.0])
    with pytest.raises(ConvArgumentError, match=r"bias of norm 1 must have shape \[8\] on cpu, but got \[3\] on cpu"):
        fold_norms([*vectors[:9], vectors[0]], eps)


@pytest.mark.pairs
@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_layers_with_folded_norms(where, last, dtype):
    given = [arrays(where, dtype, of_norm, last, transposed) for of_norm, transposed in ((dtype, False), (dtype, True))]
    vectors = [one for _, _, bias, *norm in given for one in (*norm, bias)]
    folded, starts = fold_norms(vectors, (1e-3, 1e-2), dtype is torch.float64), starts_of((16, 16))
    operator, fold = torch.ops.pycuda_conv.scaled.default, torch.ops.pycuda_conv.fold_norms.default
    assert torch.equal(fold(vectors, [1e-3, 1e-2], dtype is torch.float64), folded)
    for (x, w, *others), start, eps, transposed in zip(given, starts, (1e-3, 1e-2), (False, True), strict=False):
        how = {"stride": 2, "padding": 1, **({"output_padding": 1} if transposed else {})}
        ref = reference(x, w, *others, eps, None, None, transposed, **how)
        residual = torch.randn(ref.shape, device=where).to(dtype)
        residual = residual.contiguous(memory_format=torch.channels_last) if last else residual
        asked = "conv_transpose" if transposed else "conv", 2, 1, 1, 1, "fp32", 1 if transposed else 0, "relu", None, None, 0.0
        spec = spec_of(2, (3, 3), activation="relu", transposed=transposed, **how)
        for more in (None, residual):
            whole = torch.relu(ref if more is None else ref + more.double())
            for _ in range(3):
                close(scaled(asked, start, x, w, folded, more), whole, dtype)
            close(operator(x, w, folded, more, start, spec), whole, dtype)
        assert scaled(asked, start, x, w, folded, residual).stride() == residual.stride()
    if where == "cpu" and dtype is torch.float32:
        torch.library.opcheck(fold, (vectors, [1e-3, 1e-2], False))
        torch.library.opcheck(operator, (x, w, folded, residual, start, spec))


def made_by(warm, call) -> list[str]:  # noqa: F811
    """What the driver is asked for by a call."""
    warm.asked()
    call()
    return warm.asked()


def check_made_again(warm, monkeypatch, owner, name: str, call, others):  # noqa: F811
    """The second call is the launcher's in C, and so is one of `others`, with the addresses that it names. The calls that Python makes."""
    calls, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: (calls.append(1), original(*given))[1])
    first, second = (made_by(warm, call) for _ in range(2))
    assert len(calls) == 1 and first and len(first) == len(second)
    for other, addresses in others:
        lines = " ".join(made_by(warm, other))
        assert len(calls) == 1 and all(at.to_bytes(8, "little").hex(" ") in lines for at in addresses)
    return calls


@IN_C
def test_norms_are_folded_again_by_the_launcher_in_c(warm, monkeypatch):  # noqa: F811
    folding._prepared.clear()
    vectors, eps, *_ = norms_of("cpu", torch.bfloat16, 70)
    other = [None if one is None else one.clone() for one in vectors]
    others = [(lambda: fold_norms(other, eps), [one.data_ptr() for one in other if one is not None])]
    calls = check_made_again(warm, monkeypatch, folding, "_folded", lambda: fold_norms(vectors, eps), others)
    assert len(made_by(warm, lambda: fold_norms(vectors, eps))) == 2  # launches, of 56 norms at the most
    for changed in (vectors[0].double(), torch.stack((vectors[0], vectors[0]), 1)[:, 0], None):
        fold_norms([changed, *vectors[1:]], eps)
    assert len(calls) == 4
    with pytest.raises(ConvArgumentError):
        fold_norms([vectors[1].new_zeros(5), *vectors[1:]], eps)
    assert made_by(warm, lambda: fold_norms(vectors, eps)) and len(calls) == 5


@IN_C
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layers_with_folded_norms_are_computed_again_by_the_launcher_in_c(warm, monkeypatch, dtype):  # noqa: F811
    x, w, bias, *norm = arrays("cpu", dtype, torch.float32, True)
    folding._again.clear()
    folded = fold_norms((*norm, bias), (1e-3,))
    other, asked = folded.clone(), ("conv", 1, 1, 1, 1, "fp32", 0, "relu", None, None, 0.0)
    others = [(lambda: scaled(asked, 0, x, w, other, None), (other.data_ptr(), other.data_ptr() + 16 * 4))]
    check_made_again(warm, monkeypatch, folding, "computed", lambda: scaled(asked, 0, x, w, folded, None), others)


# ---- the function


def arrays(where: str, dtype, of_norm, last: bool = False, transposed: bool = False):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 7)
    w = torch.randn(8, 16, 3, 3) if transposed else torch.randn(16, 8, 3, 3)
    x, w, bias = (a.to(where, dtype) for a in (x, w, torch.randn(16)))
    if last:
        x, w = (a.contiguous(memory_format=torch.channels_last) for a in (x, w))
    gamma, beta, mean, var = (a.to(where, of_norm) for a in (torch.randn(16), torch.randn(16), torch.randn(16), torch.rand(16) + 0.1))
    return x, w, bias, gamma, beta, mean, var


def reference(x, w, bias, gamma, beta, mean, var, eps, residual=None, activation="relu", transposed=False, **options):
    x, w, bias, gamma, beta, mean, var = (None if a is None else a.detach().double() for a in (x, w, bias, gamma, beta, mean, var))
    y = (torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d)(x, w, bias, **options)
    y = torch.nn.functional.batch_norm(y, mean, var, gamma, beta, False, 0.0, eps)
    y = y if residual is None else y + residual.double()
    return torch.relu(y) if activation else y


def close(got, ref, dtype):
    size = {torch.float32: 2e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert got.dtype is dtype and ((got.double() - ref).abs() <= size * (1 + ref.abs())).all()


TYPES = [
    (torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float16, torch.float16), (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
@pytest.mark.parametrize(("dtype", "of_norm"), TYPES, ids=str)
def test_a_layer(where, last, dtype, of_norm):
    given = arrays(where, dtype, of_norm, last)
    ref = reference(*given, 1e-3, padding=1)
    assert ref.abs().max() > 1
    for call in range(3):  # on a GPU the second one is repeated by the launcher in C
        got = evaluate(*given, 1e-3, None, "relu", padding=1)
        close(got, ref, dtype)
        assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format) and not got.requires_grad
        for vector in given[3:]:  # whoever writes to them, and how: the next call reads it
            vector.data.add_(call + 1)
        ref = reference(*given, 1e-3, padding=1)
    residual = torch.randn_like(got)
    close(evaluate(*given, 1e-3, residual, "relu", padding=1), reference(*given, 1e-3, residual, padding=1), dtype)


def test_all_that_may_be_missing_or_lie_otherwise(where):
    x, w, bias, gamma, beta, mean, var = arrays(where, torch.float32, torch.float32)
    for b in (None, bias):
        for g, t in ((None, None), (gamma, None), (None, beta)):
            close(evaluate(x, w, b, g, t, mean, var, 1e-5), reference(x, w, b, g, t, mean, var, 1e-5, activation=None), torch.float32)
    plain = torch.nn.functional.conv2d(x.double(), w.double(), bias.double(), 2)
    close(evaluate(x, w, bias, stride=2), plain, torch.float32)
    apart = torch.stack((gamma, mean), 1)[:, 0], beta.double(), mean, var.half()
    close(evaluate(x, w, None, *apart, 1e-5), reference(x, w, None, *apart, 1e-5, activation=None), torch.float32)
    turned, wide = x.transpose(2, 3), torch.randn(2, 12, 9, 7, device=where)
    for one in (turned, wide[:, 2:10], x[:, :1].expand(-1, 8, -1, -1)):
        close(
            evaluate(one, w, bias, gamma, beta, mean, var, 1e-5), reference(one, w, bias, gamma, beta, mean, var, 1e-5, activation=None),
            torch.float32
        )
    x.requires_grad_()
    assert not evaluate(x, w.requires_grad_(), bias, gamma, beta, mean, var).requires_grad


def test_a_scale_above_the_largest_float16():
    """Folded ahead, the scale would be infinite."""
    x, w, *_ = arrays("cpu", torch.float16, torch.float16)
    tiny, zero = torch.full((16,), 6e-8, dtype=torch.float16), torch.zeros(16, dtype=torch.float16)
    x = x * 2.0**-12
    got, gamma = evaluate(x, w, None, torch.full_like(tiny, 300), zero, zero, tiny, 1e-8), torch.full((16,), 300.0)
    close(got, reference(x, w, None, gamma, zero, zero, tiny, 1e-8, activation=None), torch.float16)
    assert got.isfinite().all() and 300 / (tiny[0].item() + 1e-8) ** 0.5 > 65504


def test_wrong_operands():
    x, w, bias, gamma, beta, mean, var = arrays("cpu", torch.float32, torch.float32)
    with pytest.raises(ConvArgumentError, match="mean and var must both be given, or none"):
        evaluate(x, w, bias, gamma, beta, mean)
    with pytest.raises(ConvArgumentError, match=r"var must have one number for each of 16 channels, on cpu, but got \[8\] on cpu"):
        evaluate(x, w, bias, gamma, beta, mean, var[:8])
    with pytest.raises(ConvArgumentError, match="residual must have the result's shape"):
        evaluate(x, w, bias, gamma, beta, mean, var, 1e-5, x)
    with pytest.raises(ConvArgumentError, match="bias type"):
        evaluate(x, w, bias.half(), gamma, beta, mean, var)


def test_a_plan_with_a_scale_of_float32_takes_no_calls():
    one = Layer(CASES[1][0], CASES[1][0].problem("float16"), True)
    with pytest.raises(ConvArgumentError, match="float32"):
        Plan(one.problem, "opencl")(one.x, one.w, one.bias, scale=one.scale, residual=one.residual)


@IN_C
@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
@pytest.mark.parametrize(("dtype", "of_norm"), TYPES[:4], ids=str)
def test_a_layer_is_computed_again_by_the_launcher_in_c(warm, last, dtype, of_norm, monkeypatch):  # noqa: F811
    given = arrays("cpu", dtype, of_norm, last)
    evaluation._again.clear()

    def called(eps=1e-3, **changed):
        return lambda: evaluate(*(changed.get(f"at{i}", one) for i, one in enumerate(given)), eps, None, "relu", padding=1)

    others = [(called(at3=given[4]), (given[4].data_ptr(),)), (called(at5=given[6]), (given[6].data_ptr(),))]  # vectors of the same form
    calls = check_made_again(warm, monkeypatch, evaluation, "_computed", called(), others)
    called(1e-2)(), called(at3=None)()  # other layers
    assert len(calls) == 3


# ---- the operator


@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
def test_the_operator(last):
    given, spec = arrays("cpu", torch.float32, torch.float32, last), spec_of(2, (3, 3), padding=1, activation=("leaky_relu", 0.25))
    operator = torch.ops.pycuda_conv.evaluate.default
    torch.library.opcheck(operator, (*given, None, 1e-3, spec))
    residual = torch.randn(2, 16, 9, 7)
    torch.library.opcheck(operator, (*given[:2], *(None,) * 5, residual, 0.0, spec))
    ref = torch.nn.functional.leaky_relu(reference(*given, 1e-3, residual, None, padding=1), 0.25)
    close(operator(*given, residual, 1e-3, spec), ref, torch.float32)
    how = {"stride": 2, "padding": 1, "output_padding": 1}
    turned = arrays("cpu", torch.float32, torch.float32, last, transposed=True)
    torch.library.opcheck(operator, (*turned, None, 1e-3, spec_of(2, (3, 3), transposed=True, **how)))
