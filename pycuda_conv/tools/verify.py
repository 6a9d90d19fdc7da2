"""Checks that this machine convolves correctly: named cases on every kind of array, against a float64 reference, beside torch."""

from __future__ import annotations

import datetime
import difflib
import importlib
import inspect
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv import engines
from pycuda_conv.engines.tensor_cores import products
from pycuda_conv.plan import Plan, cached_plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.rounding import TIMES_OTHER, TIMES_OTHER_ON_PLAIN_CORES, TIMES_OTHER_ON_TENSOR_CORES, beside_limit, relative_limit
from pycuda_conv.runtime import Device
from pycuda_conv.tools.benchmarks import error_table
from pycuda_conv.tools.benchmarks.pages import digest
from pycuda_conv.tools.distributions import DISTRIBUTIONS
from pycuda_conv.tools.engine_cases import EngineCase, engine_cases
from pycuda_conv.tools.oracle import compare, reference, torch_function, torch_gradient, torch_precision
from pycuda_conv.tools.plans import compile_for
from pycuda_conv.tools.report import RESULTS_PAGE, around_results, number, write_between
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, json_text, named_device, print_pairs, table, track
from pycuda_conv.tune import lookup

SHARPEN = ((0, -1, 0), (-1, 5, -1), (0, -1, 0))


@dataclass(frozen=True)
class Case:
    """One call of a public function: shapes, options, dtype.

    `function` is the function's name here and in ``torch.nn.functional`` or, for a gradient, in ``torch.nn.grad``. Shapes and options are
    those of the convolution. `filter` fixes the filter's values; all other values are random.
    """

    name: str
    function: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    dtype: str = "float32"
    filter: tuple[tuple[float, ...], ...] | None = None

    @property
    def problem(self) -> ConvProblem:
        """The case as a problem of this package."""
        if self.gradient:
            ndim = int(self.function[4])
            forward = ConvProblem.forward(ndim, self.input, self.weight, **self.options)
            shapes = self.input, self.weight, forward.result_shape
            return ConvProblem.gradient(self.gradient, ndim, *shapes, dtype=self.dtype, **self.options)
        transposed = self.function.startswith("conv_transpose")
        make = ConvProblem.transposed if transposed else ConvProblem.forward
        channels = self.weight[1] * self.options.get("groups", 1) if transposed else self.weight[0]
        bias = (channels,) if self.bias else None
        return make(int(self.function[-2]), self.input, self.weight, bias, dtype=self.dtype, **self.options)

    @property
    def gradient(self) -> str:
        """``"input"`` or ``"weight"`` if the function is a gradient by that; else empty."""
        return self.function.partition("_")[2] if self.function.endswith(("_input", "_weight")) else ""

    def arguments(self, first: Any, second: Any, bias: Any) -> tuple[Any, ...]:
        """The function's arguments, from the arrays of :meth:`data`."""
        if self.gradient == "input":
            return self.input, second, first
        return (first, self.weight, second) if self.gradient else (first, second, bias)

    def data(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The two arrays that are multiplied, and the bias: for bfloat16, float32 arrays with values of bfloat16.

        They depend on the seed and the case, not on the other cases that run.
        """
        rng = np.random.default_rng([seed, *self.name.encode()])
        problem = self.problem

        def draw(shape: Sequence[int]) -> np.ndarray:
            return _rounded(rng.standard_normal(shape), self.dtype)

        x, w = draw(problem.input_shape), draw(problem.weight_shape)
        if self.filter is not None:
            w[...] = np.array(self.filter)
        return x, w, None if problem.bias_shape is None else draw(problem.bias_shape)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in `dtype`; for bfloat16, float32 arrays with values of bfloat16."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    upper = np.uint32(0xFFFF0000)  # the bits of a float32 that bfloat16 keeps
    return (values.astype(np.float32).view(np.uint32) & upper).view(np.float32)


def _precision(name: str, r: int, stride: int, padding: int) -> Case:
    return Case(name, "conv2d", (4, 16, 32, 32), (32, 16, r, r), {"stride": stride, "padding": padding})


def _cases() -> list[Case]:
    return [
        Case("notebook-single", "conv2d", (1, 1, 5, 5), (1, 1, 3, 3)),
        Case("notebook-batch", "conv2d", (2, 4, 5, 5), (8, 4, 3, 3), {"padding": 1}),
        _precision("k3s1p0", 3, 1, 0),
        _precision("k3s1p1", 3, 1, 1),
        _precision("k3s2p1", 3, 2, 1),
        _precision("k1s1p0", 1, 1, 0),
        _precision("k1s2p0", 1, 2, 0),
        _precision("k7s2p3", 7, 2, 3),
        Case("transposed-k3s1p1", "conv_transpose2d", (4, 16, 32, 32), (16, 32, 3, 3), {"padding": 1}),
        Case("sharpen", "conv2d", (1, 1, 512, 512), (1, 1, 3, 3), {"padding": 1}, filter=SHARPEN),
        Case("groups", "conv2d", (2, 12, 17, 19), (18, 4, 3, 3), {"groups": 3, "padding": 1}, bias=True),
        Case("depthwise", "conv2d", (2, 24, 28, 28), (24, 1, 3, 3), {"groups": 24, "padding": 1}),
        Case("depthwise-multiplier", "conv2d", (2, 10, 15, 21), (30, 1, 5, 5), {"groups": 10, "padding": 2, "stride": 2}, bias=True),
        Case("dilation", "conv2d", (2, 8, 33, 33), (16, 8, 3, 3), {"dilation": (2, 3), "padding": (2, 3)}),
        Case("odd-shapes", "conv2d", (3, 7, 37, 23), (11, 7, 5, 2), {"stride": (2, 3), "dilation": (1, 2)}, bias=True),
        Case("uneven-padding", "conv2d", (2, 5, 13, 17), (7, 5, 3, 5), {"padding": ((1, 2), (0, 3)), "stride": (1, 2)}),
        Case("border-reflect", "conv2d", (4, 16, 24, 21), (24, 16, 3, 3), {"padding": 1, "padding_mode": "reflect"}, bias=True),
        Case("border-of-an-image", "conv2d", (1, 1, 96, 130), (1, 1, 5, 5), {"padding": 2, "padding_mode": "symmetric"}),
        Case("border-beyond-the-image", "conv2d", (2, 6, 5, 4), (7, 6, 3, 3), {"padding": 9, "padding_mode": "circular"}),
        Case(
            "border-by-axis-and-side", "conv2d", (2, 6, 13, 12), (9, 6, 3, 4),
            {"padding": ((1, 2), (3, 0)), "padding_mode": (("constant", "replicate"), "circular"), "padding_value": 1.5},
        ),
        Case(
            "border-depthwise", "conv2d", (2, 24, 28, 28), (24, 1, 3, 3), {"groups": 24, "padding": 1, "padding_mode": "replicate"},
        ),
        Case("border-by-input", "conv2d_input", (2, 10, 25, 22), (12, 10, 3, 3), {"padding": 1, "padding_mode": "reflect"}),
        Case(
            "border-by-depthwise-input", "conv2d_input", (2, 24, 28, 28), (24, 1, 3, 3),
            {"groups": 24, "padding": 1, "padding_mode": "circular"},
        ),
        Case("border-by-filter", "conv2d_weight", (8, 10, 25, 22), (12, 10, 3, 3), {"padding": 1, "padding_mode": "symmetric"}),
        Case(
            "border-by-depthwise-filter", "conv2d_weight", (4, 24, 28, 28), (24, 1, 3, 3),
            {"groups": 24, "padding": 1, "padding_mode": "reflect"},
        ),
        Case("same-even-kernel", "conv2d", (2, 6, 19, 14), (9, 6, 4, 2), {"padding": "same"}),
        Case("no-batch-axis", "conv2d", (5, 14, 15), (6, 5, 3, 3)),
        Case("conv1d", "conv1d", (4, 16, 101), (24, 16, 5), {"stride": 2, "padding": 2}, bias=True),
        Case("conv3d", "conv3d", (2, 6, 9, 11, 13), (10, 6, 3, 2, 3), {"stride": (1, 2, 1), "padding": (1, 0, 2)}),
        Case(
            "transposed-stride2", "conv_transpose2d", (2, 10, 13, 11), (10, 7, 3, 4), {"stride": 2, "padding": 1, "output_padding": 1},
            bias=True,
        ),
        Case("transposed-1d", "conv_transpose1d", (2, 12, 37), (12, 5, 4), {"stride": 3, "dilation": 2, "groups": 2}),
        Case("transposed-3d", "conv_transpose3d", (1, 6, 5, 6, 7), (6, 4, 3, 2, 3), {"stride": (2, 1, 2), "padding": (1, 0, 1)}),
        Case("gradient-by-input", "conv2d_input", (2, 10, 25, 22), (12, 10, 3, 4), {"stride": 2, "padding": 1}),
        Case("gradient-by-filter", "conv2d_weight", (8, 10, 25, 22), (12, 10, 3, 4), {"stride": 2, "padding": 1}),
        Case("gradient-by-depthwise", "conv2d_weight", (4, 24, 28, 28), (24, 1, 3, 3), {"groups": 24, "padding": 1}),
        Case("float64", "conv2d", (2, 6, 21, 20), (9, 6, 3, 3), {"padding": 1}, dtype="float64"),
        Case("float16", "conv2d", (4, 16, 32, 32), (32, 16, 3, 3), {"padding": 1}, dtype="float16"),
        Case("bfloat16", "conv2d", (4, 16, 32, 32), (32, 16, 3, 3), {"padding": 1}, dtype="bfloat16"),
    ]


CASES = {case.name: case for case in _cases()}


def select(names: str | None) -> list[Case]:
    """The cases named in a comma-separated list; all of them for None."""
    if names is None:
        return list(CASES.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in CASES:
            near = difflib.get_close_matches(name, CASES, 1)
            raise ToolError(f"there is no case {name!r}" + (f"; did you mean {near[0]}?" if near else "") + " (--list shows them all)")
    if not wanted:
        raise ToolError("--cases names no case (--list shows them all)")
    return [CASES[name] for name in wanted]


# ---- kinds of arrays


@dataclass(frozen=True)
class Kind:
    """Functions that make one kind of array from numpy's in a dtype, read it back, and wait for it."""

    name: str
    make: Callable[[np.ndarray, str], Any]
    read: Callable[[Any], np.ndarray]
    wait: Callable[[], Any]
    bfloat16: bool = False  # whether there are arrays of bfloat16
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext  # what arrays are made and calls are run in


class Interface:
    """A GPUArray that shows nothing but its ``__cuda_array_interface__``."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface of the array."""
        return dict(self.array.__cuda_array_interface__)


def _importable(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def array_kinds(device: Device) -> list[Kind]:
    """The kinds of arrays that can be convolved on `device` here."""
    torch = _importable("torch")

    def nothing() -> None:
        pass

    def tensor(array: np.ndarray, dtype: str, place: str = "cpu") -> Any:
        return torch.tensor(array, dtype=getattr(torch, dtype), device=place)

    def values(tensor: Any) -> np.ndarray:
        doubles: np.ndarray = tensor.double().cpu().numpy()
        return doubles

    in_numpy = _importable("ml_dtypes") is not None  # the import also teaches numpy the name
    kinds = [Kind("numpy", lambda a, dtype: a.astype(dtype), np.asarray, nothing, in_numpy)]
    if torch is not None:
        kinds.append(Kind("torch cpu", tensor, values, nothing, True))
    if device.backend != "cuda":
        return kinds
    where: Any = device
    driver, gpuarray = importlib.import_module("pycuda.driver"), importlib.import_module("pycuda.gpuarray")

    def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
        with where:
            return function(*arguments)

    wait = partial(on_device, driver.Context.synchronize)
    to_gpu = partial(on_device, gpuarray.to_gpu)
    kinds.append(Kind("GPUArray", lambda a, _: to_gpu(a), lambda a: on_device(a.get), wait))
    kinds.append(Kind("cuda array interface", lambda a, _: Interface(to_gpu(a)), lambda a: on_device(a.array.get), wait))
    kinds.append(_in_own_context(where, driver, gpuarray))
    if torch is not None and torch.cuda.is_available():
        kinds.append(Kind("torch cuda", partial(tensor, place=device.name), values, wait, True))
    cupy = _importable("cupy")
    if cupy is not None:

        def to_cupy(array: np.ndarray, _: str) -> Any:
            with cupy.cuda.Device(where.ordinal):
                return cupy.asarray(array)

        kinds.append(Kind("cupy", to_cupy, lambda a: a.get(), wait))
    return kinds


def _in_own_context(device: Any, driver: Any, gpuarray: Any) -> Kind:
    """GPUArrays in a context that is not the GPU's primary one, as ``pycuda.autoinit`` makes it."""
    context = driver.Device(device.ordinal).make_context()
    driver.Context.pop()

    @contextmanager
    def inside() -> Iterator[None]:
        context.push()
        try:
            yield
        finally:
            driver.Context.pop()

    wait = driver.Context.synchronize
    return Kind("GPUArray, own context", lambda a, _: gpuarray.to_gpu(a), lambda a: a.get(), wait, inside=inside)


# ---- checking


@dataclass(frozen=True)
class Result:
    """A line of the table. Errors are against float64; `torch_relative` and `torch_of_bound` are torch's own, where torch is installed.

    `beside` is the second verdict: the largest error, divided by the bound, is not clearly above torch's. Results of a case that an engine
    has of its own name it, with the arithmetic and the kind of numbers.
    """

    case: str
    array: str
    problem: str
    kernel: str
    max_error: float
    mean_error: float
    relative_error: float
    of_bound: float
    relative_limit: float
    torch_relative: float | None
    milliseconds: float
    passed: bool
    detail: str = ""
    torch_of_bound: float | None = None
    beside: bool = True
    engine: str = ""
    arithmetic: str = ""
    numbers: str = "normal"


@dataclass(frozen=True)
class Expected:
    """The expected result of a case in float64, the result for the operands' magnitudes, and torch's result in the case's dtype."""

    reference: np.ndarray
    magnitude: np.ndarray
    torch: np.ndarray | None


def expected(case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, device: Device) -> Expected:
    """The expected result of `case` for these arrays."""
    magnitudes = np.abs(x), np.abs(w), None if b is None else np.abs(b)
    return Expected(reference(case.problem, x, w, b), reference(case.problem, *magnitudes), _by_torch(case, (x, w, b), device))


def _by_torch(case: Case, arrays: Sequence[np.ndarray | None], device: Device) -> np.ndarray | None:
    """torch's result in the case's dtype, computed on `device` if that is a GPU; None where there is no torch."""
    torch = _importable("torch")
    if torch is None or case.problem.border is not None:
        return None
    function: Callable[..., Any]
    if case.gradient:
        function = partial(getattr(torch.nn.grad, case.function), **case.options)
    else:
        function = torch_function(case.function, **case.options)
    place = device.name if device.backend == "cuda" and torch.cuda.is_available() else "cpu"
    given = [None if a is None else torch.from_numpy(a).to(place, getattr(torch, case.dtype)) for a in arrays]
    with torch.no_grad(), torch_precision("fp32"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that an even "same" costs it a copy
        result: np.ndarray = function(*case.arguments(*given)).double().cpu().numpy()
    return result


def check(case: Case, kind: Kind, device: Device, data: tuple[np.ndarray, np.ndarray, np.ndarray | None], truth: Expected) -> Result:
    """Run one case on one kind of array, into an output full of NaN."""
    problem = case.problem
    function = getattr(pycuda_conv, case.function)
    x, w, b = (None if a is None else kind.make(a, case.dtype) for a in data)
    out = kind.make(np.full(problem.result_shape, np.nan, data[0].dtype), case.dtype)
    call = partial(function, *case.arguments(x, w, b), out=out, device=device.name, **case.options)
    returned = call()
    kind.wait()
    result = kind.read(out).astype(np.float64)
    start = time.perf_counter()
    call()
    kind.wait()
    elapsed = time.perf_counter() - start
    detail = "" if returned is out else "the call did not return the out= that it was given"
    kernel = type(cached_plan(problem, device).config).__name__
    return judged(case.name, kind.name, problem, kernel, result, truth, elapsed, detail)


def judged(
    name: str, array: str, problem: ConvProblem, kernel: str, result: np.ndarray, truth: Expected, seconds: float, detail: str = "",
    times: float = TIMES_OTHER,
) -> Result:
    """The line of a result, with both verdicts. `detail` is what was found wrong before; an error of `times` torch's still passes."""
    errors = compare(problem, result, truth.reference, truth.magnitude)
    theirs = None if truth.torch is None else compare(problem, truth.torch, truth.reference, truth.magnitude)
    # in float64 the reference has an error of the same size itself, and transforms that were asked for are right by the norm
    apart = theirs is None or problem.dtype == "float64" or problem.algorithm is not None
    beside = apart or theirs is None or not errors.of_bound > beside_limit(problem, theirs.of_bound, times)
    if not errors.correct:
        detail = _worst(result, truth.reference)
    elif not beside and theirs is not None and not detail:
        detail = f"its largest error is {errors.of_bound:.2g} of the bound, torch's {theirs.of_bound:.2g}"
    return Result(
        case=name, array=array, problem=str(problem), kernel=kernel, max_error=errors.largest, mean_error=errors.mean,
        relative_error=errors.relative, of_bound=errors.of_bound, relative_limit=relative_limit(problem),
        torch_relative=None if theirs is None else theirs.relative, milliseconds=seconds * 1e3, passed=not detail, detail=detail,
        torch_of_bound=None if theirs is None else theirs.of_bound, beside=beside,
    )


# ---- every engine


def verify_engines(cases: Sequence[EngineCase], device: Device, seed: int) -> list[Result]:
    """Check engines on problems of their kinds and on kinds of numbers."""
    made: dict[tuple[ConvProblem, engines.Config], Plan] = {}
    results = []
    for case in track(cases, lambda case: case.name):
        key = case.problem, case.config
        if key not in made:
            made[key] = Plan(case.problem, device, config=case.config)
        results.append(_of_engine(case, made[key], seed))
    return results


def compile_cases(cases: Sequence[Case], of_engines: Sequence[EngineCase], device: Device) -> None:
    """Compile the kernels of all cases together. What fails is tried again, and told, by the case that needs it."""
    planned = ((problem, lookup(problem, device)) for problem in (case.problem for case in cases))
    wanted = [(problem, found.config if found else engines.choose(problem, device)) for problem, found in planned]
    compile_for(dict.fromkeys([*wanted, *((case.problem, case.config) for case in of_engines)]), device)


#: How often numbers are drawn before an error is above torch's: the largest of many errors is chance within a fifth or so.
DRAWS = 3


def _of_engine(case: EngineCase, plan: Plan, seed: int) -> Result:
    for draw in range(DRAWS):
        result = _of_draw(case, plan, np.random.default_rng([seed, draw, *case.name.encode()]))
        if result.beside:
            break
    return replace(result, engine=case.engine, arithmetic=case.arithmetic, numbers=case.distribution)


def _without_onednn(torch: Any, place: str) -> AbstractContextManager[Any]:
    """On the CPU torch's own loops: oneDNN never ends generating some depthwise kernels on CPUs with AVX-512."""
    if place != "cpu":
        return nullcontext()
    flags: Callable[..., AbstractContextManager[Any]] = torch.backends.mkldnn.flags
    with_tf32 = "allow_tf32" in inspect.signature(flags).parameters  # whose default warns on CPUs
    return flags(enabled=False, allow_tf32=False) if with_tf32 else flags(enabled=False)


def _of_draw(case: EngineCase, plan: Plan, rng: np.random.Generator) -> Result:
    problem, device = case.problem, plan.device
    drawn = DISTRIBUTIONS[case.distribution](rng, problem.input_shape, problem.weight_shape, problem.ndim)
    x, w = (_rounded(values, problem.dtype) for values in drawn)
    torch, on_gpu = _importable("torch"), device.backend == "cuda"
    place = device.name if on_gpu and torch is not None and torch.cuda.is_available() else "cpu"
    theirs = None
    if torch is not None:
        given = [torch.from_numpy(a).to(place, getattr(torch, problem.dtype)) for a in (x, w)]
        if problem.border is None:  # torch has no such border
            with torch.no_grad(), torch_precision(problem.precision), _without_onednn(torch, place):
                theirs = torch_gradient(problem)(*given).double().cpu().numpy()
    truth = Expected(reference(problem, x, w), reference(problem, np.abs(x), np.abs(w)), theirs)
    if torch is not None and (place != "cpu" or problem.dtype == "bfloat16"):
        arrays = [_laid_out(tensor, order) for tensor, order in zip(given, (problem.order, problem.weight_order), strict=True)]
        kind = f"torch {'cuda' if place != 'cpu' else 'cpu'}"
    elif problem.dtype == "bfloat16" and _importable("ml_dtypes") is None:
        return judged(case.name, "none", problem, str(case.config), truth.reference, truth, 0.0)
    else:
        arrays, kind = [a.astype(problem.dtype) for a in (x, w)], "numpy"

    def wait() -> None:
        if place != "cpu":
            torch.cuda.synchronize()

    made = plan(*arrays)
    wait()
    start = time.perf_counter()
    made = plan(*arrays)
    wait()
    elapsed = time.perf_counter() - start
    result = (made if kind == "numpy" else made.double().cpu().numpy()).astype(np.float64)
    times = TIMES_OTHER
    if not engines.uses_tensor_cores(case.config):
        times = TIMES_OTHER_ON_PLAIN_CORES
    elif products(problem) > 1:
        times = TIMES_OTHER_ON_TENSOR_CORES.get(case.distribution, TIMES_OTHER)
    return judged(case.name, kind, problem, type(case.config).__name__, result, truth, elapsed, times=times)


def _laid_out(tensor: Any, order: tuple[int, ...] | None) -> Any:
    """The tensor with its axes in `order` in memory, outermost first."""
    return tensor if order is None else tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])


def _worst(result: np.ndarray, reference: np.ndarray) -> str:
    error = np.abs(result - reference)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
    wrong = f", {int(np.isnan(result).sum())} of {result.size} elements are NaN" if np.isnan(result).any() else ""
    return f"worst at {[int(i) for i in at]}: got {result[at]:.9g}, expected {reference[at]:.9g}{wrong}"


def verify(cases: Sequence[Case], device: Device, seed: int) -> list[Result]:
    """Check every case on every available kind of array."""
    kinds = array_kinds(device)
    results = []
    for case in track(cases, lambda case: case.name):
        x, w, b = data = case.data(seed)
        truth = expected(case, x, w, b, device)
        for kind in kinds:
            if kind.bfloat16 or case.dtype != "bfloat16":
                with kind.inside():
                    results.append(check(case, kind, device, data, truth))
    return results


def list_cases() -> int:
    """Print the cases' names."""
    print_pairs(((case.name, f"{case.problem}{' bias' if case.bias else ''}") for case in CASES.values()), 22)
    return OK


def _where(device: Device) -> dict[str, Any]:
    """Where and when results were computed, and beside which torch."""
    torch, on_gpu = _importable("torch"), device.backend == "cuda"
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "device": device.name, "model": device.model,
        "kernels": digest(), "torch": torch and torch.__version__,
        "cudnn": torch.backends.cudnn.version() if torch is not None and on_gpu else None,
    }


def run(
    cases: str | None = None, device: Any = None, seed: int | None = None, as_json: bool = False, pages: Path | None = None
) -> int:
    """Verify and print; the exit status is that of a success if all cases passed. `pages` is a checkout whose page gets the errors."""
    if pages is not None:
        around_results(pages / RESULTS_PAGE, "errors")
    chosen = select(cases)
    where = named_device(device)
    if seed is None:
        seed = secrets.randbelow(2**32)
    if not as_json:
        out = console()
    start = time.perf_counter()
    of_engines = engine_cases(where) if cases is None else []
    compile_cases(chosen, of_engines, where)
    compiled = time.perf_counter()
    results = verify(chosen, where, seed) + verify_engines(of_engines, where, seed)
    elapsed = time.perf_counter() - start
    failed = [r for r in results if not r.passed]
    facts = _where(where) | {
        "seed": seed, "seconds": elapsed, "compiling_seconds": compiled - start, "passed": not failed,
        "results": [asdict(r) for r in results],
    }
    if pages is not None:
        write_between(pages / RESULTS_PAGE, error_table.page(facts), "errors")
    if as_json:
        print(json_text(facts))
        return FAILED if failed else OK
    beside = any(r.torch_relative is not None for r in results)
    columns = (
        "case", "array", "kernel", "max error", "mean error", "relative error", *["torch's"] * beside, "of bound", *["torch's"] * beside,
        "ms", "verdict",
    )
    rows = [
        (
            r.case, r.array, r.kernel, f"{r.max_error:.1e}", f"{r.mean_error:.1e}", f"{r.relative_error:.1e}",
            *[number(r.torch_relative, ".1e")] * beside, f"{r.of_bound:.3f}", *[number(r.torch_of_bound, ".3f")] * beside,
            f"{r.milliseconds:.2f}", "pass" if r.passed else "FAIL",
        )
        for r in results
    ]
    styles = ["" if r.passed else "bold red" for r in results]
    out.print(table(f"Errors against float64 on {where.name}, seed {seed}", columns, rows, left=columns[:3], styles=styles))
    out.print(
        "of bound: the largest error, divided by what rounding explains; more than 1 fails"
        + f"; torch's: the same of its result; {TIMES_OTHER} times as much and more, by the kernel's sums, fails too,"
        " unless it is half of one rounding" * beside,
        markup=False,
    )
    for r in failed:
        out.print(f"{r.case} on {r.array}: {r.problem}, kernel {r.kernel}: {r.detail}", markup=False, style="red")
    missing = [case.name for case in chosen if case.name not in {r.case for r in results}]
    if missing:
        out.print(f"left out: {', '.join(missing)}; numpy has no bfloat16 without the package ml_dtypes", markup=False)
    if not beside and _importable("torch") is None:
        out.print(
            "torch is not installed, so the errors of its F.conv2d and the like are left out; the results are judged by numpy alone, which "
            "sums in float64, one filter tap after the other", markup=False,
        )  # fmt: skip
    passed = f"{len(results) - len(failed)} of {len(results)} passed in {elapsed:.1f} s"
    out.print(f"{passed} on {where.name}; --seed {seed} repeats this", style="bold")
    return FAILED if failed else OK
