"""The six public functions against torch's: parameters, layouts, dtypes, and a search over everything at once."""

import ctypes
import itertools
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from reference import DTYPES, TORCH_LAYOUTS, Case, channels_last, check, fprop, is_channels_last, tensor

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan, dispatch, plan
from pycuda_conv.arrays.tensors import TorchKind
from pycuda_conv.call import Call, Operands
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.execute import device as execute
from pycuda_conv.runtime import contexts
from pycuda_conv.tune import Choice

F = torch.nn.functional

FUNCTIONS = [(t, n) for t in (False, True) for n in (1, 2, 3)]
NAMES = {key: f"conv{'_transpose' if key[0] else ''}{key[1]}d" for key in FUNCTIONS}


def call(case: Case, x, w, b, device, **options):
    return getattr(pc, NAMES[case.transposed, case.ndim])(x, w, b, **case.options, device=device, **options)


def small(transposed: bool, ndim: int, **options) -> Case:
    """A problem of that rank: 4 channels to 6, odd sizes."""
    size, filter_size = (5, 7, 6)[-ndim:], (2, 3, 2)[-ndim:]
    groups = options.get("groups", 1)
    weight = (4, 6 // groups) if transposed else (6, 4 // groups)
    return Case(transposed, (2, 4, *size), (*weight, *filter_size), options)


def as_kind(kind: str, *arrays):
    return [a if kind == "numpy" else tensor(a) for a in arrays]


# ---- one parameter at a time

KINDS = ["numpy", "torch"]
PARAMETERS = [
    {}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"stride": 2, "padding": 1, "groups": 2},
    {"padding": "same"}, {"padding": "same", "dilation": 3}, {"padding": "valid"},
]  # fmt: skip
CALLS = [(t, n, options, kind) for i, (t, n) in enumerate(FUNCTIONS) for options, kind in zip(
    PARAMETERS, itertools.cycle(KINDS[i % 2 :] + KINDS[: i % 2]), strict=False
)
         if not (t and isinstance(options.get("padding"), str))]


@pytest.mark.parametrize(
    ("transposed", "ndim", "options", "kind"), CALLS, ids=[f"{NAMES[t, n]}-{options}-{kind}" for t, n, options, kind in CALLS]
)
def test_parameters_mean_what_they_mean_in_torch(device, transposed, ndim, options, kind):
    case = small(transposed, ndim, **options)
    if options == {"padding": "same"} and not transposed:
        assert 2 in case.weight_shape[2:]  # an even filter: the extra zero goes to the end
    arrays = case.integers("float64")
    got = call(case, *as_kind(kind, *arrays), device)
    expected = getattr(F, NAMES[transposed, ndim])(*as_kind("torch", *arrays), **options)
    assert type(got).__module__.partition(".")[0] == kind and str(got.dtype).endswith("float64")
    assert torch.equal(torch.as_tensor(got), expected)


@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_all_arguments_by_position_as_in_torch(device, transposed, ndim):
    """bias, stride, padding, dilation, groups; but groups before dilation in the transposed ones."""
    case = small(transposed, ndim, groups=2)
    x, w, b = case.integers("float32")
    rest = (3, 1, 2, 2, 1) if transposed else (3, 1, 1, 2)
    got = getattr(pc, NAMES[transposed, ndim])(x, w, b, *rest, device=device)
    assert np.array_equal(got, getattr(F, NAMES[transposed, ndim])(*as_kind("torch", x, w, b), *rest).numpy())


@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_tuples_lists_and_numpy_integers_do_as_integers(device, transposed, ndim):
    case = small(transposed, ndim)
    x, w, b = case.integers("float32")
    function = getattr(pc, NAMES[transposed, ndim])
    expected = getattr(F, NAMES[transposed, ndim])(*as_kind("torch", x, w, b), stride=2, padding=1).numpy()
    for wrap in (lambda v: v, lambda v: (v,) * ndim, lambda v: [v] * ndim, lambda v: (v,), np.int64, lambda v: (np.int32(v),) * ndim):
        got = function(x, w, b, stride=wrap(2), padding=wrap(1), dilation=wrap(1), device=device)
        assert np.array_equal(got, expected)
    assert np.array_equal(function(x, w, b, stride=2, padding=[[1, 1]] * ndim, device=device), expected)


@pytest.mark.parametrize(("function", "kind"), [*zip(FUNCTIONS, itertools.cycle(KINDS), strict=False)])
def test_empty_batch_gives_an_empty_result_of_the_right_shape(device, function, kind):
    transposed, ndim = function
    case = small(transposed, ndim)
    x, w, b = case.integers("float32")
    got = call(case, *as_kind(kind, x[:0], w, b), device)
    assert tuple(got.shape) == (0, *case.problem().result_shape[1:])
    assert type(got).__module__.partition(".")[0] == kind


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_without_input_channels_the_result_is_the_bias(device, ndim, bias):
    x, w = np.zeros((2, 0, *(5,) * ndim), "f"), np.zeros((3, 0, *(2,) * ndim), "f")
    b = np.array([1, 2, 3], "f") if bias else None
    got = getattr(pc, f"conv{ndim}d")(x, w, b, device=device)
    expected = np.broadcast_to(0 if b is None else b.reshape(-1, *(1,) * ndim), (2, 3, *(4,) * ndim))
    assert np.array_equal(got, expected)


# ---- where the arrays lie

LAYOUTS = {
    "fortran": np.asfortranarray,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "transposed": lambda a: np.ascontiguousarray(np.swapaxes(a, 0, -1)).swapaxes(0, -1),
    "sliced": lambda a: np.pad(a, [(1, 2)] * a.ndim)[(slice(1, -2),) * a.ndim],
    "one element off": lambda a: np.concatenate([a.ravel()[:1], a.ravel()])[1:].reshape(a.shape),
    "one byte off": lambda a: np.frombuffer(b"\0" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
}
CASE = fprop((2, 4, 6, 5), (6, 4, 3, 2), padding=1)


TYPES = [dtype for dtype in ("float32", "bfloat16") if dtype in DTYPES]


@pytest.mark.parametrize("which", [0, 1, 2, slice(0, 3)], ids=["x", "w", "b", "all"])
@pytest.mark.parametrize("layout, dtype", [*zip(LAYOUTS, itertools.cycle(TYPES), strict=False)])
def test_numpy_layouts(device, layout, dtype, which):
    plain = CASE.integers(dtype)
    arrays = list(plain)
    arrays[which] = LAYOUTS[layout](plain[which]) if isinstance(which, int) else [LAYOUTS[layout](a) for a in plain]
    got = call(CASE, *arrays, device)
    assert type(got) is np.ndarray and got.flags.c_contiguous and got.dtype == dtype and got.dtype.isnative
    assert np.array_equal(got, CASE.reference(*plain).astype(dtype))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "w", "b"])
@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_layouts(device, layout, which):
    """In bfloat16 all three lie so; of complex numbers there are none."""
    for dtype in (torch.float32, torch.bfloat16)[: 1 + ("imaginary" not in layout)]:
        tensors = [torch.from_numpy(a).to(dtype) for a in CASE.integers("float32")]
        for i in (which,) if dtype is torch.float32 else range(3):
            tensors[i] = TORCH_LAYOUTS[layout](torch, tensors[i])
        expected = F.conv2d(*(t.double() for t in tensors), padding=1).to(dtype)
        got = call(CASE, *tensors, device)
        assert isinstance(got, torch.Tensor) and torch.equal(got, expected)
        assert is_channels_last(got) if is_channels_last(tensors[0]) else got.is_contiguous()


def test_channels_last_with_one_channel_or_one_pixel(device):
    """Strides are ambiguous there, and libraries get them wrong; the result is contiguous."""
    for shape, weight in (((2, 1, 4, 5), (3, 1, 2, 2)), ((2, 4, 1, 1), (3, 4, 1, 1)), ((2, 4, 1, 1), (3, 4, 3, 3))):
        x, w = (torch.randint(-8, 9, s).float().contiguous(memory_format=torch.channels_last) for s in (shape, weight))
        got = pc.conv2d(x, w, padding=1, device=device)
        assert got.is_contiguous() and torch.equal(got, F.conv2d(x, w, padding=1))


@pytest.mark.pairs
@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_the_input_decides_whether_the_result_is_channels_last(device, transposed, ndim, last, weight_last):
    """Not the filter; `out` has to follow."""
    case = small(transposed, ndim, groups=2)
    x, w, b = (torch.from_numpy(a) for a in case.integers("float32"))
    expected = torch.from_numpy(case.reference(x.numpy(), w.numpy(), b.numpy())).float()
    x, w = channels_last(x) if last else x, channels_last(w) if weight_last else w
    got = call(case, x, w, b, device)
    assert (is_channels_last(got) if last else got.is_contiguous()) and torch.equal(got, expected)
    for out_last in (False, True):
        out = torch.full_like(expected, float("nan"))
        out = channels_last(out) if out_last else out
        if out_last == last:
            assert call(case, x, w, b, device, out=out) is out and torch.equal(out, expected) and is_channels_last(out) == last
        else:
            with pytest.raises(
                pc.ConvArgumentError, match=r"out must be (channels last, as the result is|C-contiguous), but its strides are"
            ):
                call(case, x, w, b, device, out=out)
            assert torch.isnan(out).all()


def test_channels_last_without_a_batch_axis(device):
    for ndim in (1, 2, 3):
        x, w = torch.randint(-8, 9, (4, 3, 5, 6)[: ndim + 1]).float(), torch.randint(-8, 9, (5, 4, 2, 2, 2)[: ndim + 2]).float()
        last = x.movedim(0, -1).contiguous().movedim(-1, 0)
        got = getattr(pc, f"conv{ndim}d")(last, w, device=device)
        assert got.movedim(0, -1).is_contiguous() and not got.is_contiguous()
        assert torch.equal(got, getattr(F, f"conv{ndim}d")(x, w))
    # torch's word for four axes means other ones there
    x, w = torch.randint(-8, 9, (2, 3, 5, 6)).float(), torch.randint(-8, 9, (3, 2, 2, 2, 2)).float()
    got = pc.conv3d(x.contiguous(memory_format=torch.channels_last), w, device=device)
    assert got.is_contiguous() and torch.equal(got, F.conv3d(x, w))


@pytest.mark.parametrize(("c", "k"), [(1, 3), (3, 1), (1, 1)])
def test_strides_say_whether_a_single_channel_is_last(device, c, k):
    x, w = torch.randint(-8, 9, (2, c, 5, 6)).float(), torch.randint(-8, 9, (k, c, 3, 3)).float()
    for one in (x, x.to(memory_format=torch.channels_last)):
        expected = F.conv2d(one, w)
        got = pc.conv2d(one, w, device=device)
        assert torch.equal(got, expected) and got.stride() == expected.stride()
        dy = torch.randint(-8, 9, expected.shape).float()
        dy = dy if one is x else dy.to(memory_format=torch.channels_last)
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, one, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        got = pc.conv2d_input(x.shape, w, dy, device=device)
        assert torch.equal(got, dx) and got.stride() == dx.stride()
        assert torch.equal(pc.conv2d_weight(one, w.shape, dy, device=device), dw)


@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_a_plan_keeps_the_layout_of_its_problem(device, transposed, ndim):
    case = small(transposed, ndim, stride=2)
    x, w, b = case.integers("float32")
    expected = case.reference(x, w, b)
    for last in (False, True):
        plan = Plan(replace(case.problem(), layout="NHWC" if last else "NCHW"), device)
        got = plan(x, w, b)
        assert np.array_equal(got, expected) and (got if not last else np.moveaxis(got, 1, -1)).flags.c_contiguous
        out = np.full_like(got, np.nan)  # of the same strides
        assert plan(x, w, b, out=out) is out and np.array_equal(out, expected)
        layer = plan.bind(w, b)
        assert np.array_equal(layer(x), expected) and repr(layer) == f"<BoundPlan of {plan!r}>"
        with pytest.raises(pc.ConvArgumentError, match="out must be channels last" if last else "out must be C-contiguous"):
            plan(
                x, w, b,
                out=np.zeros(expected.shape, "f") if last else np.moveaxis(np.zeros(np.moveaxis(expected, 1, -1).shape, "f"), -1, 1)
            )
        for tensors in (
            [torch.from_numpy(a) for a in (x, w, b)], [channels_last(torch.from_numpy(x)), torch.from_numpy(w), torch.from_numpy(b)]
        ):
            got = plan(*tensors)
            assert is_channels_last(got) == last and np.array_equal(got.numpy(), expected)


# ---- channels last on a GPU: as they lie, or turned to NCHW and back

HOPPER, AMPERE, TURING = (
    SimpleNamespace(capability=capability, multiprocessors=132, backend="cuda", name="cuda:0", model="")
    for capability in ((9, 0), (8, 0), (7, 5))
)  # fmt: skip
LAYER = {"input_shape": (64, 64, 56, 56), "weight_shape": (64, 64, 3, 3), "padding": 1}
READ = [  # (problem, where tensors of it are read as they lie)
    ({**LAYER, "dtype": "float16"}, (HOPPER, AMPERE)), (LAYER, (HOPPER, AMPERE)), ({**LAYER, "dtype": "float64"}, (HOPPER, AMPERE)),
    ({**LAYER, "weight_shape": (64, 1, 3, 3), "groups": 64, "dtype": "float16"}, (HOPPER, AMPERE, TURING)),
    ({**LAYER, "weight_shape": (64, 1, 3, 3), "groups": 64}, (HOPPER, AMPERE, TURING)),
    ({**LAYER, "weight_shape": (64, 8, 3, 3), "groups": 8}, ()),
    ({**LAYER, "weight_shape": (64, 8, 3, 3), "groups": 8, "dtype": "bfloat16"}, (HOPPER, AMPERE)),
    ({"input_shape": (64, 256, 56, 56), "weight_shape": (8, 256, 1, 1), "dtype": "float16"}, (HOPPER, AMPERE)),  # few channels, but deep sums
    ({"input_shape": (64, 3, 224, 224), "weight_shape": (3, 3, 3, 3), "dtype": "float16"}, (HOPPER, AMPERE)),  # of few channels to few
    ({"input_shape": (64, 16, 224, 224), "weight_shape": (3, 16, 3, 3), "dtype": "float16"}, (HOPPER, AMPERE)),
    ({"input_shape": (0, 64, 5, 5), "weight_shape": (8, 64, 3, 3)}, (HOPPER, AMPERE, TURING)),  # nothing to convert
    ({"input_shape": (1, 1, 2160, 2160), "weight_shape": (1, 1, 7, 7), "padding": 3}, (HOPPER, AMPERE, TURING)),
    ({"input_shape": (1, 2, 2160, 2160), "weight_shape": (2, 1, 9, 9), "padding": 4, "groups": 2}, ()),  # no loops of 9x9 are unrolled there
    ({"input_shape": (1, 1, 2160, 2160), "weight_shape": (1, 1, 9, 9), "padding": 4}, (HOPPER, AMPERE, TURING)),  # a channel lies in either order
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "where"), READ, ids=[str(a) for a, _ in READ])
def test_some_engines_read_channels_last_and_some_do_not(monkeypatch, arguments, where):
    """The plan of a call on a GPU; tensors in host memory are turned anyway."""
    problem = ConvProblem.forward(2, **arguments, layout="NHWC")
    x, w = ((s, getattr(torch, problem.dtype), 0) for s in (problem.input_shape, problem.weight_shape))
    monkeypatch.setattr(dispatch, "cached_plan", lambda problem, device, tune=False: problem)
    for device in (HOPPER, AMPERE, TURING):
        assert plan.reads_channels_last(problem, device) == (device in where)
        monkeypatch.setattr(TorchKind, "device", lambda *_, device=device: device)
        for layout, ordinal in (("NHWC", 0), ("NCHW", 0), ("NHWC", -1)):
            call = Call("conv", 2, 1, arguments.get("padding", 0), 1, problem.groups, "fp32")
            signatures = (*x[:2], ordinal), (*w[:2], ordinal), None, None, None
            found = dispatch.plan_for_call.__wrapped__(call, TorchKind(), signatures, None, layout, False)
            assert found == replace(problem, layout="NHWC" if layout == "NHWC" and ordinal == 0 and device in where else "NCHW")


def test_what_was_measured_decides_whether_channels_last_are_read(monkeypatch):
    layer, grouped = (replace(ConvProblem.forward(2, **arguments), layout="NHWC") for arguments in (LAYER, READ[5][0]))
    gemm, tensor_cores = Gemm(64, 64, 16, 8, 8, 6), ImplicitGemm(64, 128, 4)
    for problem, choice, expected in (
        (layer, Choice(gemm, 1e6), False), (layer, Choice(gemm, 1.0), True), (layer, Choice(tensor_cores, 1e6), True),
        (grouped, Choice(tensor_cores, 1e6), False), (grouped, Choice(tensor_cores, 1.0), True),
    ):  # fmt: skip
        monkeypatch.setattr(plan, "lookup", lambda *_, choice=choice: choice)
        assert plan.reads_channels_last(problem, HOPPER) == expected
    monkeypatch.setattr(plan, "lookup", lambda *_: None)
    monkeypatch.setattr(plan, "tuned", lambda *_: Choice(gemm, 1e6))
    assert plan.reads_channels_last(layer, HOPPER) and not plan.reads_channels_last(layer, HOPPER, tune=True)
    monkeypatch.setattr(plan, "tuned", lambda *_: pytest.fail("measured"))
    assert not plan.reads_channels_last(grouped, HOPPER, tune=True)


@pytest.fixture
def no_driver_to_ask(monkeypatch):
    """A Recorder's arrays lie in no context, so the driver is not asked for it."""
    for name in ("check_reached", "check_stream", "in_doubt"):
        monkeypatch.setattr(contexts, name, lambda *_: None)


class Recorder:
    """A device that lists what happens on which stream, and a plan of `case` there, whose kernel is torch's and reads NCHW."""

    ordinal = where = -1  # of tensors in host memory

    def __init__(self, case, arrays):
        self.events, self.depth, problem = [], 0, case.problem()
        self.plan = SimpleNamespace(
            problem=problem, device=self, order=None, result_shape=problem.result_shape,
            result_bytes=4 * torch.Size(problem.result_shape).numel(),
            operand_bytes=[a.nbytes for a in arrays] + [0, 0], workspace_bytes=0, empty=False, launch=self._launch,
            schedule=SimpleNamespace(workspace_bytes=0), reads_filter_last=False, new_dtype=None, filter_order=None, weight_order=None,
            result_order=None,
            lays_filter_last=lambda kind, out: False,
        )  # fmt: skip
        self._case = case

    def push(self):
        self.depth += 1

    def pop(self, *_):
        self.depth -= 1

    __enter__, __exit__ = push, pop

    def current(self):
        return self

    def is_current(self):
        return self.depth > 0

    def order(self, first, second):
        assert self.depth
        self.events.append(("order", first, second))

    def _launch(self, buffers, stream, packed, filter_last):
        assert not filter_last
        self.events.append(("launch", stream))
        problem = self.plan.problem
        shapes = (problem.input_shape, problem.weight_shape, problem.bias_shape, problem.result_shape)
        places = *buffers[:3], buffers[5]
        x, w, b, y = (
            np.ctypeslib.as_array((ctypes.c_float * int(np.prod(s))).from_address(at)).reshape(s)
            for at, s in zip(places, shapes, strict=True)
        )
        y[...] = self._case.reference(x, w, b)


HOME, SIDE = 3, 7


@pytest.mark.pairs
@pytest.mark.parametrize("stream", [None, SIDE])
@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_what_is_turned_on_a_gpu_is_ordered_with_the_streams(monkeypatch, no_driver_to_ask, transposed, ndim, given_out, stream):
    case = small(transposed, ndim)
    arrays = case.integers("float32")
    device, kind = Recorder(case, arrays), TorchKind()
    kind._current_stream = lambda ordinal: HOME
    for name in ("copy", "fill"):
        original = getattr(TorchKind, name)
        monkeypatch.setattr(TorchKind, name, lambda *a, name=name, original=original: (device.events.append((name, HOME)), original(*a))[1])
    x, w, b = (torch.from_numpy(a) for a in arrays)
    expected = torch.from_numpy(case.reference(*arrays)).float()
    out = channels_last(torch.full_like(expected, float("nan"))) if given_out else None
    order = (0, *range(2, ndim + 2), 1)
    got = execute.convolve_and_turn(kind, device.plan, Operands(channels_last(x), w, b), out, stream, order)
    assert is_channels_last(got) and torch.equal(got, expected) and (out is None or got is out) and device.depth == 0
    turned, back = ("copy", HOME), ("fill" if given_out else "copy", HOME)
    if stream is None:
        assert device.events == [turned, ("launch", HOME), back]
    else:
        there, here = ("order", HOME, SIDE), ("order", SIDE, HOME)
        assert device.events == [here, turned, there, ("launch", SIDE), here, back, there]
    device.events.clear()
    for bad in (expected.clone(), channels_last(expected)[:1], channels_last(expected.double())):
        with pytest.raises(pc.ConvArgumentError, match="out must"):
            execute.convolve_and_turn(kind, device.plan, Operands(channels_last(x), w, b), bad, stream, order)
    assert device.events == []


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_filter_with_its_channels_last_is_read_where_it_lies_by_kernels_that_can(no_driver_to_ask, ndim):
    """And by no others; one that was packed before is not looked at, one that is not aligned is copied."""
    case = small(False, ndim)
    arrays = case.integers("float32")
    kind, seen = TorchKind(), {}
    kind._current_stream = lambda ordinal: HOME
    plan = Recorder(case, arrays).plan
    plan.filter_order = (0, *range(2, ndim + 2), 1)
    plan.launch = lambda buffers, stream, packed, filter_last: seen.update(w=buffers[1], packed=packed, last=filter_last)
    x, w, b = (torch.from_numpy(a) for a in arrays)
    lasting = channels_last(w)
    off = torch.cat([lasting.flatten()[:1], lasting.movedim(1, -1).flatten()])[1:].view(lasting.movedim(1, -1).shape).movedim(-1, 1)

    def launched(filters, packed=None) -> tuple:
        execute.convolve(kind, plan, Operands(x, filters, b), None, None, packed)
        return seen["w"] == filters.data_ptr(), seen["last"]

    for plan.reads_filter_last in (True, False):
        assert launched(w) == (True, False)
        assert launched(lasting) == (plan.reads_filter_last,) * 2
        assert launched(off) == (False, False)
        assert launched(w, packed=(x, x.data_ptr())) == (True, False) and seen["packed"] == x.data_ptr()


def test_out_beside_the_input_in_one_buffer(device):
    """Neighbours do not overlap."""
    x, w, b = CASE.integers("float32")
    size = int(np.prod(CASE.problem().result_shape))
    whole = np.concatenate([np.full(size, np.nan, "f"), x.ravel(), np.full(3, np.nan, "f")])
    out, view = whole[:size].reshape(CASE.problem().result_shape), whole[size:-3].reshape(x.shape)
    assert call(CASE, view, w, b, device, out=out) is out
    assert np.array_equal(out, CASE.reference(x, w, b)) and np.array_equal(view, x)


def test_results_do_not_share_memory(device):
    arrays = CASE.integers("float32")
    first = call(CASE, *arrays, device)
    kept = first.copy()
    second = call(CASE, *(-a for a in arrays), device)
    assert not np.shares_memory(first, second)
    assert np.array_equal(first, kept) and first.flags.writeable


def test_half_sums_are_kept_in_float32(device):
    """4096 ones: a sum kept in halves stops at 2048; and 2048 + 1 - 2048 is 1, not 0."""
    x, w = np.ones((1, 4096, 1, 1), "e"), np.ones((1, 4096, 1, 1), "e")
    assert pc.conv2d(x, w, device=device) == 4096
    assert pc.conv1d(np.array([[2048, 1, -2048]], "e"), np.ones((1, 1, 3), "e"), device=device) == 1


def test_half_results_round_to_nearest_and_overflow_to_infinity(device):
    x = np.array([[[2048, 1]], [[2048, 3]], [[65504, 15]], [[65504, 16]], [[2**-24, 2**-24]]], "e")
    got = pc.conv1d(x, np.ones((1, 1, 2), "e"), device=device).ravel()
    assert got.tolist() == [2048, 2052, 65504, np.inf, 2**-23]


# ---- bfloat16, in tensors: numpy need not know it


def bfloat16(*arrays):
    return [None if a is None else torch.from_numpy(np.ascontiguousarray(a, "f")).bfloat16() for a in arrays]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_bfloat16_in_out_in_plans_and_in_bound_filters(device, kind):
    if kind == "numpy":
        pytest.importorskip("ml_dtypes")
    x, w, b = bfloat16(*CASE.integers("float32"))
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=1)
    if kind == "numpy":
        x, w, b = (t.view(torch.int16).numpy().view("bfloat16") for t in (x, w, b))
    plan = pc.Plan(CASE.problem("bfloat16"), device)
    layer = plan.bind(w, b)
    for function in (lambda out: call(CASE, x, w, b, device, out=out), lambda out: plan(x, w, b, out=out), lambda out: layer(x, out=out)):
        fresh = function(None)
        out = torch.full_like(fresh, float("nan")) if kind == "torch" else np.full_like(fresh, np.nan)
        assert function(out) is out
        for got in (fresh, out):
            assert torch.equal(got if kind == "torch" else tensor(got), expected.bfloat16())


def test_every_bfloat16_is_read_and_written(device):
    """All 2^16 of them: subnormal numbers, infinities and NaNs too."""
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).reshape(1, 1, -1)
    got = pc.conv1d(x, torch.ones(1, 1, 1, dtype=torch.bfloat16), device=device)
    assert torch.equal(torch.isnan(got), torch.isnan(x)) and torch.equal(got.nan_to_num(0.0), x.nan_to_num(0.0))


def test_bfloat16_sums_are_kept_in_float32_and_rounded_once_to_nearest_even(device):
    x, w = torch.ones(1, 4096, 1, 1, dtype=torch.bfloat16), torch.ones(1, 4096, 1, 1, dtype=torch.bfloat16)
    assert pc.conv2d(x, w, device=device) == 4096  # in bfloat16 it would stop at 256
    largest = torch.finfo(torch.bfloat16).max
    pairs = [
        [256, 1], [256, 3], [256, 1.0078125], [largest, 2.0**118], [largest, 2.0**119], [2.0**-133, 2.0**-133],
        [float("inf"), float("-inf")]
    ]
    x = torch.tensor(pairs, dtype=torch.bfloat16).unsqueeze(1)
    got = pc.conv1d(x, torch.ones(1, 1, 2, dtype=torch.bfloat16), device=device).flatten().tolist()
    assert got[:-1] == [256, 260, 258, largest, float("inf"), 2.0**-132] and got[-1] != got[-1]
    x, w = torch.randn(1, 1, 20_000).bfloat16(), torch.randn(50, 1, 1).bfloat16()
    assert torch.equal(pc.conv1d(x, w, device=device)[0], (x[0].float() * w[:, 0].float()).bfloat16())  # products are exact floats


# ---- everything at once


@st.composite
def cases(draw, transposed: bool, ndim: int) -> Case:
    def ints(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=ndim, max_size=ndim)))

    groups, c, k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    filter_size, stride, dilation = ints(1, 4), ints(1, 3), ints(1, 3)
    pairs = tuple((draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in range(ndim))
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)) if transposed else ()
    lowest = []
    for i, (f, d, s, (before, after)) in enumerate(zip(filter_size, dilation, stride, pairs, strict=True)):
        reach = d * (f - 1) + 1
        lowest.append(max(1, 1 + -(-(1 + before + after - extra[i] - reach) // s)) if transposed else max(1, reach - before - after))
    size = tuple(low + draw(st.integers(0, (40, 9, 4)[ndim - 1])) for low in lowest)
    batch = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    options = {"stride": stride, "padding": pairs, "dilation": dilation, "groups": groups}
    if transposed:
        options["output_padding"] = extra
    weight = (k * groups, c, *filter_size)
    return Case(transposed, (*batch, (k if transposed else c) * groups, *size), weight, options, draw(st.booleans()))


@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS, ids=NAMES.values())
def test_any_convolution_stays_within_the_bound(device, transposed, ndim):
    @given(case=cases(transposed, ndim), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
    @example(case=small(transposed, ndim, stride=2, groups=2), dtype="float32", seed=0)
    def search(case, dtype, seed):
        arrays = case.normals(dtype, seed)
        got = call(case, *arrays, device)
        assert got.shape == case.problem().result_shape and got.dtype == dtype
        by_torch = call(case, *map(tensor, arrays), device)
        assert by_torch.is_contiguous() and torch.equal(by_torch, tensor(got))
        check(case, got, *arrays)

    search()
