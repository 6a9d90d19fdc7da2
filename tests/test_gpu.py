"""What only a GPU can show: array libraries and their streams, graphs, memory, contexts, processes, and very large arrays."""

import ctypes
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from cases.hopper_gemm import widest
from modes import asked, ids_of
from reference import DTYPES, TORCH_LAYOUTS, assert_close, by_turns, channels_last, dgrad, fprop, is_channels_last, python, tensor

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, DeviceMemoryError, Plan, engines
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.direct.direct import Batched, Dgrad, Single, Tile
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.execute import pipeline
from pycuda_conv.plan import reads_channels_last
from pycuda_conv.runtime import get_device

pytestmark = pytest.mark.gpu

CASE = fprop((2, 4, 6, 5), (6, 4, 3, 2), padding=1)
GEMM = Gemm(64, 64, 8, 4, 4, 1)
SPLIT = Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=3)
LONG = 400_000_000  # clock cycles that keep a stream busy: about a quarter of a second


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def drv():
    return pytest.importorskip("pycuda.driver")


class Foreign:
    """An array of nobody's, known by its interface only."""

    def __init__(self, owner, **changes):
        self.owner, self.changes = owner, changes

    @property
    def __cuda_array_interface__(self):
        return {**self.owner.__cuda_array_interface__, **self.changes}


def gpuarray(array):
    from pycuda import gpuarray

    with get_device("cuda"):
        return gpuarray.to_gpu(array)


def make(kind, array):
    if array is None or kind == "numpy":
        return array
    if kind == "torch":
        return tensor(array).cuda()
    if kind == "cupy":
        return pytest.importorskip("cupy").asarray(array)
    return gpuarray(array) if kind == "gpuarray" else Foreign(gpuarray(array))


def host(array):
    if isinstance(array, Foreign):
        array = array.owner
    name = type(array).__module__.partition(".")[0]
    if name == "torch":
        array = array.cpu()
        return array.numpy() if str(array.dtype) != "torch.bfloat16" else array.view(sys.modules["torch"].int16).numpy().view("bfloat16")
    if name in ("cupy", "pycuda"):
        with get_device("cuda"):
            return array.get()
    return array


KINDS = ["numpy", "torch", "cupy", "gpuarray", "foreign"]
TYPES = {
    "numpy": "numpy.ndarray", "torch": "torch.Tensor", "cupy": "cupy.ndarray", "gpuarray": "pycuda.gpuarray.GPUArray", "foreign": "pycuda.gpuarray.GPUArray"
}  # fmt: skip


def is_kind(array, kind):
    return f"{type(array).__module__}.{type(array).__qualname__}".replace("cupy._core.core", "cupy") == TYPES[kind]


# ---- kinds of array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_of_the_input_s_kind_and_right(kind, dtype):
    if kind == "foreign" and dtype == "bfloat16":
        pytest.skip("an interface can't say that it is bfloat16")
    for case in (CASE, dgrad((2, 4, 3, 4), (4, 5, 3, 3), stride=2, padding=1, output_padding=1)):
        arrays = case.integers(dtype)
        function = pc.conv_transpose2d if case.transposed else pc.conv2d
        got = function(*(make(kind, a) for a in arrays), **case.options)
        assert is_kind(got, kind)
        assert str(got.dtype).endswith(dtype) and tuple(got.shape) == case.problem().result_shape
        assert np.array_equal(host(got), case.reference(*arrays).astype(dtype))


@pytest.mark.parametrize("kind", ["numpy", "torch", "cupy", "gpuarray"])
def test_an_empty_batch_and_no_channels(kind):
    """Without input channels the result is the bias."""
    x, w, b = CASE.integers("float32")
    got = pc.conv2d(make(kind, x[:0]), make(kind, w), make(kind, b), padding=1)
    assert is_kind(got, kind) and tuple(got.shape) == (0, *CASE.problem().result_shape[1:])
    got = pc.conv1d(make(kind, np.zeros((2, 0, 5), "f")), make(kind, np.zeros((3, 0, 2), "f")), make(kind, np.array([1, 2, 3], "f")))
    assert np.array_equal(host(got), np.broadcast_to(np.array([1, 2, 3], "f")[:, None], (2, 3, 4)))


def test_every_bfloat16_is_read_and_rounded_as_torch_does(torch):
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).reshape(1, 1, -1).cuda()
    for factor in (1.0, 1.0078125, -3.3e-5, 2.0**60):
        w = torch.full((1, 1, 1), factor, dtype=torch.bfloat16, device="cuda")
        got, expected = pc.conv1d(x, w), (x.float() * w.float()).bfloat16()
        assert torch.equal(torch.isnan(got), torch.isnan(expected)) and torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_mixed_kinds_are_refused():
    arrays = {kind: [make(kind, a) for a in CASE.integers("float32")] for kind in KINDS}
    for kind in KINDS:
        for other in KINDS:
            if kind != other:
                for i in range(3):
                    mixed = list(arrays[kind])
                    mixed[i] = arrays[other][i]
                    with pytest.raises(TypeError, match="pass arrays of one kind"):
                        pc.conv2d(*mixed, padding=1)


def test_tensors_on_different_devices_are_refused_in_torch_s_words(torch):
    x, w, b = (torch.from_numpy(a) for a in CASE.integers("float32"))
    there, here = r"\(torch.cuda.FloatTensor\)", r"\(torch.FloatTensor\)"
    for given, words in (
        ((x.cuda(), w, b), f"Input type {there} and weight type {here}"), ((x, w.cuda(), b), f"Input type {here} and weight type {there}"),
        ((x.cuda(), w.cuda(), b), f"Input type {there} and bias type {here}"),
    ):
        with pytest.raises(ConvArgumentError, match=f"{words} should be the same"):
            pc.conv2d(*given)
    with pytest.raises(ConvArgumentError, match="out must lie on cuda:0"):
        pc.conv2d(x.cuda(), w.cuda(), b.cuda(), padding=1, out=torch.zeros(CASE.problem().result_shape))
    with pytest.raises((ConvArgumentError, pc.BackendError), match=r"(?i)opencl"):
        pc.conv2d(x.cuda(), w.cuda(), device="opencl")
    assert pc.conv2d(x.cuda(), w.cuda(), device=torch.device("cuda", 0)).is_cuda


def test_results_come_from_torch_s_allocator(torch):
    x, w = torch.zeros(1, 1, 1024, 1024, device="cuda"), torch.zeros(64, 1, 1, 1, device="cuda")
    before = torch.cuda.memory_allocated()
    y = pc.conv2d(x, w)
    assert torch.cuda.memory_allocated() - before == y.numel() * 4
    del y
    assert torch.cuda.memory_allocated() == before


# ---- layouts


@pytest.mark.parametrize(("layout", "which"), by_turns(TORCH_LAYOUTS, range(3)))
def test_torch_layouts(torch, layout, which):
    tensors = [torch.from_numpy(a).cuda() for a in CASE.integers("float32")]
    tensors[which] = TORCH_LAYOUTS[layout](torch, tensors[which])
    expected = torch.nn.functional.conv2d(*(t.cpu() for t in tensors), padding=1)
    got = pc.conv2d(*tensors, padding=1)
    assert is_channels_last(got) if (layout, which) == ("channels_last", 0) else got.is_contiguous()
    assert torch.equal(got.cpu(), expected)


FUNCTIONS = [(transposed, ndim) for transposed in (False, True) for ndim in (1, 2, 3)]


def small(transposed, ndim, **options):
    size, weight = (4, 5, 6)[-ndim:], (4, 6 // options.get("groups", 1)) if transposed else (6, 4 // options.get("groups", 1))
    return (dgrad if transposed else fprop)((2, 4, *size), (*weight, *(3, 2, 2)[-ndim:]), **options)


def call(case, x, w, b=None, **options):
    return getattr(pc, f"conv{'_transpose' if case.transposed else ''}{case.ndim}d")(x, w, b, **case.options, **options)


@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS)
def test_the_input_decides_whether_the_result_is_channels_last(torch, transposed, ndim, last, weight_last):
    """Not the filter; `out` has to follow."""
    case = small(transposed, ndim, groups=2, stride=2)
    arrays = case.integers("float32")
    x, w, b = (torch.from_numpy(a).cuda() for a in arrays)
    x, w = channels_last(x) if last else x, channels_last(w) if weight_last else w
    expected = torch.from_numpy(case.reference(*arrays)).float().cuda()
    got = call(case, x, w, b)
    assert (is_channels_last(got) if last else got.is_contiguous()) and torch.equal(got, expected)
    for out_last in (False, True):
        out = torch.full_like(expected, float("nan"))
        out = channels_last(out) if out_last else out
        if out_last == last:
            assert call(case, x, w, b, out=out) is out and torch.equal(out, expected) and is_channels_last(out) == last
        else:
            with pytest.raises(ConvArgumentError, match="out must be channels last" if last else "out must be C-contiguous"):
                call(case, x, w, b, out=out)
            assert torch.isnan(out).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("transposed", "shape", "weight", "options"),
    [
        (False, (4, 64, 28, 28), (64, 64, 3, 3), {"padding": 1}), (False, (4, 64, 30), (32, 64, 5), {"stride": 2}),
        (False, (2, 3, 64, 64), (64, 3, 7, 7), {"stride": 2, "padding": 3}), (False, (2, 16, 6, 20, 20), (32, 16, 3, 3, 3), {"padding": 1}),
        (False, (4, 64, 28, 28), (64, 1, 3, 3), {"padding": 1, "groups": 64}), (False, (4, 64, 28, 28), (64, 16, 1, 1), {"groups": 4}),
        (True, (4, 64, 14, 14), (64, 64, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}), (False, (1, 5, 7, 7), (3, 5, 2, 2), {}),
    ],
    ids=str,
)  # fmt: skip
def test_channels_last_tensors_are_read_where_they_are_or_turned(torch, monkeypatch, transposed, shape, weight, options, dtype):
    """Large and small: right, channels last, and copied only where no fast engine reads them as they lie, both input and result."""
    from pycuda_conv.arrays.tensors import TorchKind

    copies, original, ndim = [], TorchKind.copy, len(shape) - 2
    monkeypatch.setattr(TorchKind, "copy", lambda *args: (copies.append(args), original(*args))[1])
    problem = (ConvProblem.transposed if transposed else ConvProblem.forward)(ndim, shape, weight, dtype=dtype, layout="NHWC", **options)
    read = reads_channels_last(problem, get_device("cuda"))
    name = f"conv{'_transpose' if transposed else ''}{ndim}d"
    x, w = (torch.randint(-2, 3, s, device="cuda").to(getattr(torch, dtype)) for s in (shape, weight))
    expected = getattr(torch.nn.functional, name)(x.cpu().double(), w.cpu().double(), **options).to(x.dtype).cuda()
    last = channels_last(x)
    got = getattr(pc, name)(last, w, **options)
    assert is_channels_last(got) and got.dtype is x.dtype and torch.equal(got, expected)
    assert len(copies) == (0 if read else 2)
    assert torch.equal(getattr(pc, name)(x, w, **options), expected) and len(copies) == (0 if read else 2)
    copies.clear()
    plan = Plan(problem, "cuda")  # which keeps its layout
    got = plan(last, w)
    assert is_channels_last(got) and torch.equal(got, expected) and not copies


TURNED = fprop((2, 4, 240, 200), (4, 2, 3, 3), padding=1, groups=2)  # in float32: the kernel that reads groups of two channels as they lie is slow


def test_turned_tensors_leave_no_memory_behind_and_mind_overlaps(torch):
    assert not reads_channels_last(replace(TURNED.problem("float32"), layout="NHWC"), get_device("cuda"))
    x, w, b = (torch.from_numpy(a).cuda() for a in TURNED.integers("float32"))
    expected, x = torch.nn.functional.conv2d(x.cpu(), w.cpu(), b.cpu(), **TURNED.options).contiguous().cuda(), channels_last(x)
    call(TURNED, x, w, b)  # compiled
    before = torch.cuda.memory_allocated()
    y = call(TURNED, x, w, b)
    assert torch.cuda.memory_allocated() - before == -(-y.numel() * y.element_size() // 512) * 512
    with pytest.raises(ConvArgumentError, match="out overlaps input"):
        call(TURNED, x, w, b, out=x)
    with pytest.raises(ConvArgumentError, match="out must be channels last"):
        call(TURNED, x, w, b, out=expected.clone())
    assert torch.equal(y, expected)


def test_channels_last_tensors_that_are_strided_misaligned_or_negated(torch):
    x, w, b = (torch.from_numpy(a).cuda() for a in CASE.integers("float32"))
    expected = torch.from_numpy(CASE.reference(*CASE.integers("float32"))).float().cuda()
    whole = torch.full((x.numel() + 1,), float("nan"), device="cuda")
    misaligned = whole[1:].view(2, 6, 5, 4).permute(0, 3, 1, 2).copy_(x)
    for laid, last in (
        (misaligned, True), (torch._neg_view(channels_last(-x)), True), (torch.cat([channels_last(x)] * 2, 1)[:, :4], False),
    ):  # fmt: skip
        got = pc.conv2d(laid, w, b, padding=1)
        assert is_channels_last(got) == last and torch.equal(got, expected)
    for shape, weight in (((2, 1, 4, 5), (3, 1, 2, 2)), ((2, 4, 1, 1), (3, 4, 3, 3))):  # both at once: as contiguous ones
        x, w = (channels_last(torch.randint(-8, 9, s, device="cuda").float()) for s in (shape, weight))
        got = pc.conv2d(x, w, padding=1)
        assert got.is_contiguous() and torch.equal(got.cpu(), torch.nn.functional.conv2d(x.cpu(), w.cpu(), padding=1))


def turned(array, order):
    """The axes of `array` in another order; the memory stays."""
    if isinstance(array, Foreign):
        interface = array.__cuda_array_interface__
        strides = interface.get("strides") or np.empty(interface["shape"], interface["typestr"]).strides
        return Foreign(array.owner, shape=tuple(interface["shape"][i] for i in order), strides=tuple(strides[i] for i in order))
    name = type(array).__module__.partition(".")[0]
    if name == "pycuda":
        with get_device("cuda"):
            return array.transpose(order)
    return array.permute(order) if name == "torch" else array.transpose(order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transposed", "ndim"), FUNCTIONS)
def test_a_plan_keeps_the_layout_of_its_problem(transposed, ndim, kind):
    """Whatever the input's; what lies otherwise is copied."""
    case = small(transposed, ndim)
    arrays = case.integers("float32")
    x, w, b = (make(kind, a) for a in arrays)
    expected = case.reference(*arrays)
    for layout in ("NCHW", "NHWC"):
        problem = replace(case.problem(), layout=layout)
        order = problem.order or range(ndim + 2)
        back = [int(i) for i in np.argsort(order)]
        plan = Plan(problem, "cuda")
        last = turned(make(kind, np.ascontiguousarray(arrays[0].transpose(0, *range(2, ndim + 2), 1))), (0, ndim + 1, *range(1, ndim + 1)))
        memory = np.full([expected.shape[i] for i in order], np.nan, "f")
        out = turned(make(kind, memory), back)
        for given in (x, last):
            got = plan(given, w, b)
            assert np.array_equal(host(got), expected)
            strides = np.array(got.stride() if kind == "torch" else got.strides)
            assert list(strides // strides.min()) == [s // 4 for s in memory.transpose(back).strides]
            assert plan(given, w, b, out=out) is out
            assert np.array_equal(
                host(out), expected.transpose(order) if kind == "foreign" else expected
            )  # whose owner lies in memory's order


@pytest.mark.parametrize(("offset", "dtype"), by_turns(range(1, 9), DTYPES))
def test_misaligned_tensors(torch, offset, dtype):
    arrays = CASE.integers(dtype)
    tensors = []
    for a in arrays:
        whole = torch.full((a.size + offset,), float("nan"), dtype=getattr(torch, dtype), device="cuda")
        whole[offset:] = tensor(a.ravel())
        tensors.append(whole[offset:].view(a.shape))
    assert np.array_equal(host(pc.conv2d(*tensors, padding=1)), CASE.reference(*arrays).astype(dtype))


def strided(array):
    """The same elements, every second of a wider array in the last axis."""
    return np.repeat(array, 2, axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cupy", "gpuarray", "foreign"])
def test_strided_views(kind, dtype):
    if dtype not in DTYPES or (kind == "foreign" and dtype == "bfloat16"):
        pytest.skip("ml_dtypes is not installed, or an interface can't say that it is bfloat16")
    arrays = CASE.integers(dtype)
    for which in range(3):
        given = [make(kind, a) for a in arrays]
        wide = make("gpuarray" if kind == "foreign" else kind, strided(arrays[which]))
        view = wide[..., ::2] if kind == "cupy" else wide[(slice(None),) * (wide.ndim - 1) + (slice(None, None, 2),)]
        given[which] = Foreign(view) if kind == "foreign" else view
        assert np.array_equal(host(pc.conv2d(*given, padding=1)), CASE.reference(*arrays).astype(dtype))


def test_five_axes_with_strides_of_every_size():
    case = fprop((2, 3, 4, 5, 6), (4, 3, 2, 2, 2))
    x, w, b = case.integers("float16")
    turned = gpuarray(np.ascontiguousarray(x.transpose(4, 2, 0, 3, 1)))
    strides = tuple(turned.strides[i] for i in (2, 4, 1, 3, 0))
    view = Foreign(turned, shape=x.shape, strides=strides)
    assert np.array_equal(host(pc.conv3d(view, Foreign(gpuarray(w)), Foreign(gpuarray(b)))), case.reference(x, w, b))


@pytest.mark.parametrize("kind", ["cupy", "foreign", "numpy", "numpy large"])
def test_views_that_run_backwards(kind, monkeypatch):
    if kind == "numpy large":
        monkeypatch.setattr(pipeline, "SMALL_BYTES", 0)
    arrays = CASE.integers("float32")
    turned = [np.flip(a) for a in arrays]  # views
    if kind == "cupy":
        given = [make(kind, np.ascontiguousarray(a))[(slice(None, None, -1),) * a.ndim] for a in turned]
    elif kind == "foreign":
        memory = [gpuarray(np.ascontiguousarray(a)) for a in turned]
        last = [m.__cuda_array_interface__["data"][0] + a.nbytes - 4 for m, a in zip(memory, arrays, strict=True)]
        given = [Foreign(m, strides=t.strides, data=(at, False)) for m, t, at in zip(memory, turned, last, strict=True)]
    else:
        given = [np.flip(np.ascontiguousarray(a)) for a in turned]
    assert np.array_equal(host(pc.conv2d(*given, padding=1)), CASE.reference(*arrays))
    if not kind.startswith("numpy"):
        out = make("gpuarray" if kind == "foreign" else kind, np.zeros(CASE.problem().result_shape, "f"))
        back = out[(slice(None, None, -1),) * 4] if kind == "cupy" else Foreign(out, strides=tuple(-s for s in out.strides), data=(
            out.__cuda_array_interface__["data"][0] + out.nbytes - 4, False))
        with pytest.raises(ConvArgumentError, match="out overlaps residual"):
            pc.conv2d(*given, padding=1, residual=back, out=Foreign(out) if kind == "foreign" else out)


def test_interfaces_that_cannot_be_read_as_they_say():
    x, w, _ = (gpuarray(a) for a in CASE.integers("float32"))
    pointer = x.__cuda_array_interface__["data"][0]
    for changes, exception, text in (
        ({"strides": (480, 120, 18, 4)}, ConvArgumentError, "not multiples of the item size"),
        ({"typestr": ">f4"}, (TypeError, ConvArgumentError), "byte order|endian|>f4"),
        ({"typestr": "<c8"}, (TypeError, ConvArgumentError), "complex"),
        ({"typestr": "<V2"}, TypeError, "may mean bfloat16 or any other two bytes"),  # as torch exports bfloat16
        ({"mask": x}, (TypeError, ConvArgumentError), "mask"),
    ):
        with pytest.raises(exception, match=text):
            pc.conv2d(Foreign(x, **changes), Foreign(w, **{k: v for k, v in changes.items() if k == "typestr"}))
    out = gpuarray(np.zeros(CASE.problem().result_shape, "f"))
    read_only = Foreign(out, data=(out.__cuda_array_interface__["data"][0], True))
    with pytest.raises(ConvArgumentError, match="out is read-only"):
        pc.conv2d(Foreign(x), Foreign(w), padding=1, out=read_only)
    assert pc.conv2d(Foreign(x, data=(pointer, True)), Foreign(w)).shape == (2, 6, 4, 4)


# ---- out


def test_out_that_cannot_hold_the_result(torch):
    x, w, b = (torch.from_numpy(a).cuda() for a in CASE.integers("float32"))
    shape = CASE.problem().result_shape
    good = torch.zeros(shape, device="cuda")
    wide = torch.zeros(good.numel() + 1, device="cuda")
    for out, text in (
        (good[:1], "out must have shape"),
        (good.double(), "out must have dtype float32"),
        (good.half(), "out must have dtype float32"),
        (good.to(memory_format=torch.channels_last), "out must be C-contiguous"),
        (torch.zeros(1, device="cuda").expand(shape), "out must be C-contiguous"),
        (wide[1:].view(shape), "multiple of 16 bytes"),
        (torch._neg_view(good.clone()), "negative|C-contiguous|read-only"),
    ):
        before = out.clone()
        with pytest.raises(ConvArgumentError, match=text):
            pc.conv2d(x, w, b, padding=1, out=out)
        assert torch.equal(out, before)


@pytest.mark.parametrize("kind", ["torch", "cupy", "gpuarray"])
@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_out_that_overlaps_an_argument(name, kind):
    arrays = {"input": np.zeros((1, 4, 4, 4), "f"), "weight": np.zeros((8, 4, 1, 1), "f"), "bias": np.zeros(8, "f")}
    size, result = arrays[name].size, 8 * 16
    given = {n: make(kind, a) for n, a in arrays.items()}
    for offset in (0, size - 4, 4 - result):  # by 16 bytes at least: out must be aligned
        whole = make(kind, np.zeros(size + 2 * result, "f"))
        out = whole[result + offset : 2 * result + offset].reshape(1, 8, 4, 4)
        given[name] = whole[result : result + size].reshape(*arrays[name].shape)
        with pytest.raises(ConvArgumentError, match=f"out overlaps {name} in memory"):
            pc.conv2d(**given, out=out)
    out, given[name] = whole[:result].reshape(1, 8, 4, 4), whole[result : result + size].reshape(*arrays[name].shape)
    assert pc.conv2d(**given, out=out) is out  # neighbours do not overlap


# ---- streams

PACKED = {
    "forward": fprop((8, 64, 28, 28), (64, 64, 3, 3), padding=1), "transposed": dgrad((8, 64, 14, 14), (64, 48, 3, 3), stride=2),
    "folded": fprop((8, 3, 64, 64), (64, 3, 7, 7), stride=2, padding=3), "groups": fprop((8, 64, 400), (128, 32, 5), groups=2, bias=False),
}
WAYS = {  # how kernels are launched: alone, after a copy, several side by side, with a second stage and workspace, between copies, of a filter that is kept
    "one kernel": (CASE, None, None, "plan"), "a strided input": (CASE, None, "strided", "plan"),
    "phases": (dgrad((2, 10, 5, 6), (10, 9, 3, 2), padding=(1, 0), stride=2), GEMM, None, "plan"),
    "a split sum": (fprop((2, 40, 6, 5), (6, 40, 3, 2)), SPLIT, None, "plan"),
    "phases, split, strided": (dgrad((2, 40, 5, 6), (40, 9, 3, 2), padding=(1, 0), stride=2), SPLIT, "strided", "plan"),
    "turned": (TURNED, None, "turned", "function"), "bound": (PACKED["forward"], ImplicitGemm(64, 64, 3), None, "bound"),
}  # fmt: skip


class Way:
    """A plan, or a function, its arguments and what it must give."""

    def __init__(self, name, kind):
        self.case, config, self.laid, self.how = WAYS[name]
        if config and (why := engines.refusal(self.case.problem(), config, get_device("cuda"))):
            pytest.skip(why)
        self.plan = Plan(self.case.problem(), "cuda", config=config)
        sets = [self.case.integers("float32", seed) for seed in range(3)]
        self.w, self.b = (make(kind, a) for a in sets[0][1:])
        self.sources, self.expected = [make(kind, s[0]) for s in sets], [self.case.reference(s[0], *sets[0][1:]) for s in sets]
        self.x = self.empty(kind)
        self.bound = self.plan.bind(self.w, self.b) if self.how == "bound" else None
        self()  # compiled

    def empty(self, kind="torch"):
        """An input full of NaN."""
        nothing = np.full(self.case.input_shape, np.nan, "f")
        x = make(kind, strided(nothing))[..., ::2] if self.laid == "strided" else make(kind, nothing)
        return channels_last(x) if self.laid == "turned" else x

    def __call__(self, x=None, wrap=lambda array: array, **options):
        x = wrap(self.x if x is None else x)
        if self.how == "bound":
            return self.bound(x, **options)
        arrays = x, wrap(self.w), wrap(self.b)
        return call(self.case, *arrays, **options) if self.how == "function" else self.plan(*arrays, **options)


@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
@pytest.mark.parametrize("way", WAYS)
def test_work_on_torch_s_current_stream_is_ordered(torch, way, side):
    """The input is produced late, the output used and the input overwritten at once; nothing waits but the stream."""
    way = Way(way, "torch")
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    for busy in (1, LONG // 4):  # the first round loads whatever is loaded at first use
        torch.cuda.synchronize()
        results = []
        with torch.cuda.stream(stream):
            for source in way.sources:
                torch.cuda._sleep(busy)
                way.x.copy_(source)
                y = way()
                results.append(y + 0)
                y.fill_(float("nan"))
                way.x.fill_(float("nan"))
            assert busy == 1 or not stream.query(), "a call waited for the stream"
        stream.synchronize()
        for got, expected in zip(results, way.expected, strict=True):
            assert np.array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize(
    ("way", "form", "kind"), by_turns(WAYS, ["torch", "handle", "pycuda", "pycuda handle", "cupy"], ["torch", "foreign"], rounds=2)
)
def test_an_explicit_stream_orders_everything_that_the_call_does(torch, drv, way, kind, form):
    """Copies and workspaces too, whichever is later: what the given stream holds, or what the library's current stream does."""
    way = Way(way, "torch")
    stream = torch.cuda.Stream()
    with get_device("cuda"):
        own = drv.Stream(1)  # not blocking
    if form.startswith("pycuda"):
        stream = torch.cuda.get_stream_from_external(own.handle)
    given = {"torch": stream, "handle": stream.cuda_stream, "pycuda": own, "pycuda handle": own.handle}.get(form)
    if form == "cupy":
        given = pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream)
    out = torch.full(way.plan.result_shape, float("nan"), device="cuda")
    out = channels_last(out) if way.laid == "turned" else out
    wrap = Foreign if kind == "foreign" and way.how == "plan" else lambda tensor: tensor
    target = wrap(out)
    for i, (source, expected) in enumerate(zip(way.sources, way.expected, strict=True)):
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG // (40 if i % 2 else 4))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // (4 if i % 2 else 40))
            way.x.copy_(source)
        assert way(wrap=wrap, out=target, stream=given) is target
        with torch.cuda.stream(stream):
            way.x.fill_(float("nan"))
            got = out.cpu().numpy()  # waits for this stream alone
        assert np.array_equal(got, expected)
    torch.cuda.synchronize()


def test_threads_with_a_stream_each(torch):
    """Mixed shapes and ways, each thread on a stream of its own."""
    plans = [Way(name, "torch") for name in WAYS]
    torch.cuda.synchronize()

    def work(i):
        way, stream = plans[i % len(plans)], torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = way.empty()
            for j in range(8):
                torch.cuda._sleep(100_000)
                x.copy_(way.sources[j % 3])
                y = way(x)
                x.fill_(float("nan"))
                if not np.array_equal(y.cpu().numpy(), way.expected[j % 3]):
                    return f"thread {i}, round {j}, {way.plan}"
        return None

    with ThreadPoolExecutor(8) as pool:
        assert [r for r in pool.map(work, range(40)) if r] == []


SPIN = r'extern "C" __global__ void spin(long long n) { const long long start = clock64(); while (clock64() - start < n); }'


@pytest.mark.parametrize("way", ["one kernel", "a strided input", "phases, split, strided", "bound"])
def test_work_on_a_cupy_side_stream_is_ordered(cupy, way):
    way = Way(way, "cupy")
    spin = cupy.RawKernel(SPIN, "spin")
    stream = cupy.cuda.Stream(non_blocking=True)
    for busy in (1, LONG // 4):
        cupy.cuda.Device().synchronize()
        results = []
        with stream:
            for source in way.sources:
                spin((1,), (1,), (np.int64(busy),))
                way.x[...] = source
                y = way()
                results.append(y + 0)
                way.x[...] = np.nan
            assert busy == 1 or not stream.done, "a call waited for the stream"
        stream.synchronize()
        for got, expected in zip(results, way.expected, strict=True):
            assert np.array_equal(got.get(), expected)


@pytest.mark.parametrize("kind", ["torch", "gpuarray"])
def test_memory_that_a_stream_still_uses_is_not_handed_out_again(torch, kind):
    """The workspace of a call that runs on one stream, while a call on another asks for the same size."""
    case = fprop((8, 64, 200, 200), (64, 64, 3, 3))  # milliseconds: the two overlap
    plan = Plan(case.problem(), "cuda", config=Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=4))
    given = [[make(kind, a) for a in case.integers("float32", seed)] for seed in range(2)]
    alone = [host(plan(*arrays)) for arrays in given]
    outs = [make(kind, np.full(plan.result_shape, np.nan, "f")) for _ in given]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(5):
        torch.cuda.synchronize()
        for stream, arrays, out in zip(streams, given, outs, strict=True):
            plan(*arrays, out=out, stream=stream)
        torch.cuda.synchronize()
        for expected, out in zip(alone, outs, strict=True):
            assert np.array_equal(host(out), expected)


@pytest.mark.parametrize("late", [0, 1, 2], ids=["x", "w", "b"])
@pytest.mark.parametrize("way", ["one kernel", "a strided input"])
def test_the_stream_in_an_array_s_interface_is_followed(torch, way, late):
    """The protocol: who reads the array waits for the stream that it names."""
    way = Way(way, "torch")
    way.x.copy_(way.sources[0])
    tensors = [way.x, way.w, way.b]
    good = tensors[late].clone()
    tensors[late].fill_(float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 4)
        tensors[late].copy_(good)
    arrays = [Foreign(t, stream=stream.cuda_stream if i == late else 1, version=3) for i, t in enumerate(tensors)]
    got = way.plan(*arrays)
    torch.cuda.synchronize()
    assert np.array_equal(host(got), way.expected[0])


def test_host_arrays_with_a_stream(torch, drv):
    arrays = CASE.integers("float32")
    with get_device("cuda"):
        own = drv.Stream()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream().cuda_stream, own, own.handle, 0, torch.cuda.default_stream()):
        assert np.array_equal(pc.conv2d(*arrays, padding=1, stream=stream), CASE.reference(*arrays))


# ---- filters that are packed once


def packing_plan(case, dtype="float32", **changes):
    plan = Plan(replace(case.problem(dtype), **changes), "cuda", config=ImplicitGemm(64, 64, 3))
    assert plan.filter_bytes and plan.workspace_bytes == plan.filter_bytes + plan.schedule.workspace_bytes
    return plan


@pytest.fixture
def packings(monkeypatch):
    """How often a filter was packed apart from a call."""
    if why := engines.refusal(PACKED["forward"].problem(), ImplicitGemm(64, 64, 3), get_device("cuda")):
        pytest.skip(why)
    calls, original = [], Plan.pack
    monkeypatch.setattr(Plan, "pack", lambda plan, *args: (calls.append(plan), original(plan, *args)))
    return calls


@pytest.mark.parametrize(("kind", "way", "dtype"), by_turns(KINDS, PACKED, ["float32", "float16"], rounds=2))
def test_a_bound_filter_is_packed_once(packings, way, kind, dtype):
    case = PACKED[way]
    x, w, b = case.normals(dtype)
    plan = packing_plan(case, dtype)
    given = [make(kind, a) for a in (x, w, b)]
    expected = host(plan(*given))
    assert_close(expected, case.reference(x, w, b), case.bound(x, w, b, case.reference(x, w, b)))
    weight, filler = make(kind, w.copy()), make(kind, np.full_like(w, np.nan))
    packings.clear()
    bound = plan.bind(weight, given[2])
    assert packings == [plan]
    overwrite(kind, weight, filler)  # nothing reads it any more
    for _ in range(3):
        assert np.array_equal(host(bound(given[0])), expected)
    out = make(kind, np.full(plan.result_shape, np.nan, dtype))
    assert bound(given[0], out=out) is out and np.array_equal(host(out), expected)
    assert packings == [plan]


def overwrite(kind, array, values):
    if kind in ("gpuarray", "foreign"):
        with get_device("cuda"):
            (array.owner if kind == "foreign" else array).set(values.owner if kind == "foreign" else values)
    else:
        array[...] = values


def test_a_bound_filter_s_numbers_outside_the_limbs_come_out_right_too(torch, packings):
    """They are computed from the filter as it was, which the bound plan keeps."""
    case = PACKED["forward"]
    x, w, b = case.normals("float32")
    x[3] *= np.float32(1e-30)
    x[3, 0, 0, 0], x[5, 1, 2, 3], w[7] = 1e30, np.inf, w[7] * np.float32(2.0) ** -100
    tensors = [torch.from_numpy(a).cuda() for a in (x, w, b)]
    plan = packing_plan(case)
    bound, expected = plan.bind(*tensors[1:]), plan(*tensors)
    tensors[1].fill_(float("nan"))
    got = bound(tensors[0])
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    ref, finite = case.reference(x, w, b), [0, 1, 2, 3, 4, 6, 7]
    bound_on_error = case.bound(*(np.where(np.isinf(a), 0, a) for a in (x, w)), b, ref)
    assert_close(got.cpu().numpy()[finite], ref[finite], bound_on_error[finite])


def test_a_filter_that_comes_late_is_bound_on_its_stream(torch, packings):
    case = PACKED["forward"]
    plan, (x, w, b) = packing_plan(case), (torch.from_numpy(a).cuda() for a in case.integers("float32"))
    expected = plan(x, w, b)
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.full_like(w, float("nan"))
        torch.cuda._sleep(LONG // 10)
        late.copy_(w)
        bound = plan.bind(late, b)
    assert torch.equal(bound(x), expected) and packings == [plan]  # at once on another stream


def test_bound_filters_give_their_memory_back_and_share_no_scratch(torch, packings):
    case = PACKED["forward"]
    plan = packing_plan(case)
    x, w, b = (torch.from_numpy(a).cuda() for a in case.normals("float32"))
    expected, before = plan(x, w, b), torch.cuda.memory_allocated()
    bound = plan.bind(w, b)
    assert before < torch.cuda.memory_allocated() <= before + plan.filter_bytes + w.numel() * 4 + 4096
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(bound, [x] * 64))
    del bound
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("devices", [None, "all"])
def test_host_arrays_have_their_filter_packed_once_a_call(packings, monkeypatch, devices):
    """Chunks of images and of rows; bound filters not at all. Numbers are those of other chunks but for the last bits."""
    for case in (fprop((24, 64, 56, 56), (64, 64, 3, 3), padding=1), fprop((1, 32, 600, 300), (64, 32, 3, 3), padding=1)):
        x, w, b = case.normals("float32")
        ref = case.reference(x, w, b)
        plan = Plan(case.problem(), "cuda", config=ImplicitGemm(64, 64, 3))
        results = []
        for chunk_bytes in (1 << 20, 8 << 20):
            monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk_bytes)
            monkeypatch.setattr(pipeline, "LEAST_CHUNK_BYTES", chunk_bytes)
            packings.clear()
            results.append(plan(x, w, b))
            assert len(packings) == 1
            bound = plan.bind(w, b)
            packings.clear()
            assert np.array_equal(bound(x), results[-1]) and packings == []
            assert np.array_equal(pc.conv2d(x, w, b, padding=1, devices=devices), pc.conv2d(x, w, b, padding=1))
        for got in (*results, plan(*(make("torch", a) for a in (x, w, b))).cpu().numpy()):
            assert_close(got, ref, case.bound(x, w, b, ref))


# ---- graphs


@pytest.mark.parametrize("way", WAYS)
def test_capture_into_a_torch_graph(torch, way):
    way = Way(way, "torch")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        way()  # the streams of this thread exist before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = way()
    for source, expected in zip(way.sources, way.expected, strict=True):
        way.x.copy_(source)
        y.fill_(float("nan"))
        graph.replay()
        assert np.array_equal(y.cpu().numpy(), expected)


def test_capture_into_a_cupy_graph(cupy):
    way = Way("one kernel", "cupy")
    cupy.cuda.Device().synchronize()  # its arrays are written by another stream, which this one does not wait for
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = way()
        stream.synchronize()
        stream.begin_capture()
        way(out=y)
        graph = stream.end_capture()
        for source, expected in zip(way.sources, way.expected, strict=True):
            way.x[...] = source
            y[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(y.get(), expected)


# ---- memory


def trim():
    """Give the driver what our pool and torch's hold unused."""
    device = get_device("cuda")
    with device:
        device.pool.free_held()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def free_bytes():
    device = get_device("cuda")
    with device:
        return device._drv.mem_get_info()[0]


@pytest.fixture
def hog():
    """All but a gigabyte of the GPU's memory, taken."""
    device = get_device("cuda")
    trim()
    with device:
        block = device._drv.mem_alloc(free_bytes() - 2**30)
    yield
    with device:
        block.free()


@pytest.mark.gpu_alone
def test_a_numpy_result_larger_than_the_memory_that_is_left(hog):
    """A result of 4 GiB where 1 GiB is left goes through in chunks."""
    x, w = np.full((1, 1, 2048, 2048), 3, "f"), np.arange(256, dtype="f").reshape(256, 1, 1, 1)
    y = pc.conv2d(x, w)
    assert all((y[0, k] == 3 * k).all() for k in range(256))


@pytest.mark.gpu_alone
@pytest.mark.parametrize("kind", ["gpuarray", "torch"])
def test_out_of_memory_says_how_much_and_the_next_call_works(hog, kind):
    """A result of 4 GiB where 1 GiB is left."""
    x, w = make(kind, np.zeros((1, 1, 2048, 2048), "f")), make(kind, np.zeros((256, 1, 1, 1), "f"))
    own = kind == "gpuarray"  # the others come from their library's allocator
    with pytest.raises(DeviceMemoryError if own else (MemoryError, RuntimeError)) as raised:
        pc.conv2d(x, w)
    if own:
        assert re.search(r"cuda:0 is out of memory: 4,294,967,296 bytes were asked for, [\d,]+ of [\d,]+ are free", str(raised.value))
        assert isinstance(raised.value, MemoryError)
    arrays = CASE.integers("float32")
    assert np.array_equal(host(pc.conv2d(*(make(kind, a) for a in arrays), padding=1)), CASE.reference(*arrays))


def once(holds, attempts=8):
    """Whether it holds in one of some attempts: other programs on the GPU take memory and give it back meanwhile, and a fault of ours shows each time."""
    return any(holds() for _ in range(attempts))


@pytest.mark.gpu_alone
def test_the_pool_keeps_memory_for_the_next_call_and_can_give_it_back():
    x, w = make("gpuarray", np.ones((1, 1, 1024, 1024), "f")), make("gpuarray", np.ones((256, 1, 1, 1), "f"))
    pc.conv2d(x, w)

    def holds():
        trim()
        before = free_bytes()
        pc.conv2d(x, w)
        kept = before - free_bytes()
        trim()
        return kept >= 2**30 and abs(free_bytes() - before) < 2**26

    assert once(holds)


@pytest.mark.gpu_alone
@pytest.mark.parametrize("kind", ["numpy", "torch", "foreign"])
def test_a_thousand_calls_take_no_more_memory_than_ten(kind):
    arrays = [make(kind, a) for a in fprop((2, 4, 64, 64), (6, 4, 3, 2), padding=1).integers("float32")]
    for _ in range(10):
        pc.conv2d(*arrays, padding=1)

    def holds():
        before = free_bytes()
        for _ in range(1000):
            pc.conv2d(*arrays, padding=1)
        return before - free_bytes() < 2**26

    assert once(holds)


@pytest.mark.gpu_alone
def test_short_lived_threads_leave_nothing_behind(torch):
    """Streams and events of a thread that ended."""
    arrays = [torch.from_numpy(a).cuda() for a in CASE.integers("float32")]

    def work(_):
        with torch.cuda.stream(streams[0]):
            pc.conv2d(*arrays, padding=1)

    streams = [torch.cuda.Stream()]
    for _ in range(20):
        ThreadPoolExecutor(1).submit(work, 0).result()

    def holds():
        before = free_bytes()
        for _ in range(300):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work, 0).result()
        return before - free_bytes() < 2**27

    assert once(holds)


# ---- contexts and threads


def current_context():
    current = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(current)) == 0
    return current.value


@pytest.mark.parametrize("kind", ["numpy", "gpuarray", "foreign"])
def test_a_call_leaves_no_context_on_the_thread(kind):
    arrays = [make(kind, a) for a in CASE.integers("float32")]

    def work():
        seen = [current_context()]
        y = pc.conv2d(*arrays, padding=1)
        seen.append(current_context())
        for bad in ({"stride": 0}, {"out": arrays[0]}, {"stream": "x"}):
            with pytest.raises((ConvArgumentError, TypeError)):
                pc.conv2d(*arrays, padding=1, **bad)
            seen.append(current_context())
        return seen, y

    with ThreadPoolExecutor(1) as pool:
        seen, y = pool.submit(work).result()
    assert set(seen) == {None}
    assert np.array_equal(host(y), CASE.reference(*CASE.integers("float32")))


# ---- more than one GPU


def test_arrays_are_convolved_on_the_gpu_where_they_lie(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    second = "cuda:1"
    tensors = [torch.from_numpy(a).to(second) for a in CASE.integers("float32")]
    ref = CASE.reference(*CASE.integers("float32"))
    got = pc.conv2d(*tensors, padding=1)
    assert got.device == torch.device(second) and np.array_equal(got.cpu().numpy(), ref)
    assert np.array_equal(pc.conv2d(*CASE.integers("float32"), padding=1, device=second), ref)
    with pytest.raises(ConvArgumentError, match="should be the same on cuda:1 and cuda:0"):
        pc.conv2d(tensors[0], tensors[1].to("cuda:0"), padding=1)
    with pytest.raises(ConvArgumentError, match="device='cuda:0' was asked for"):
        pc.conv2d(*tensors, padding=1, device="cuda:0")
    side = torch.cuda.Stream(second)
    with torch.cuda.stream(side):
        assert np.array_equal(pc.conv2d(*tensors, padding=1).cpu().numpy(), ref)
    foreign = [Foreign(t) for t in tensors]
    assert np.array_equal(torch.as_tensor(pc.conv2d(*foreign, padding=1), device=second).cpu().numpy(), ref)


# ---- processes

USE = "x, w = np.ones((1, 1, 4, 4), 'f'), np.ones((1, 1, 3, 3), 'f')\nassert (pc.conv2d(x, w) == 9).all()\n"
USE_TORCH = "t = torch.ones(1, 1, 4, 4, device='cuda')\nassert (pc.conv2d(t, t[:, :, :3, :3]) == 9).all()\n"
USE_GPUARRAY = (
    "from pycuda import gpuarray\nfrom pycuda_conv.runtime import get_device\nwith get_device('cuda'):\n    g, h = gpuarray.to_gpu(x), gpuarray.to_gpu(w)\n"
    "r = pc.conv2d(g, h)\nwith get_device('cuda'):\n    assert (r.get() == 9).all()\n"
)
THREADS = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool: assert all((y == 9).all() for y in pool.map(lambda _: pc.conv2d({}), range(20)))\n"
IMPORT = "import numpy as np, pycuda_conv as pc\n"
PROGRAMS = {
    "GPUArray, alive at the end": IMPORT + USE + USE_GPUARRAY,
    "torch first": "import torch; torch.zeros(1, device='cuda')\n" + IMPORT + USE_TORCH + USE,
    "torch second": IMPORT + USE + "import torch\n" + USE_TORCH + USE,
    "torch imported, used second": "import torch\n" + IMPORT + USE + USE_TORCH,
    "torch and GPUArray": "import torch\n" + IMPORT + USE + USE_GPUARRAY + USE_TORCH,
    "threads, numpy": IMPORT + "x, w = np.ones((1, 1, 4, 4), 'f'), np.ones((1, 1, 3, 3), 'f')\n" + THREADS.format("x, w"),
    "threads, torch": "import torch\n" + IMPORT + USE_TORCH + THREADS.format("t, t[:, :, :3, :3]"),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_end_cleanly(python_env, program):
    if "torch" in PROGRAMS[program]:
        pytest.importorskip("torch")
    assert python(PROGRAMS[program] + "print('right')", python_env, PYTHONWARNINGS="ignore") == "right\n"


def test_kernels_come_from_the_cache_the_second_time(python_env, tmp_path):
    code = IMPORT + USE + "import pycuda_conv.runtime.cache as c; print(len(list(c.cache_dir().rglob('*.cubin'))))"
    env = {"PYCUDA_CONV_CACHE_DIR": str(tmp_path)}
    assert python(code, python_env, **env) == "1\n"
    (entry,) = tmp_path.rglob("*.cubin")
    stamp = entry.stat().st_mtime_ns
    assert python(code, python_env, **env) == "1\n" and entry.stat().st_mtime_ns == stamp
    blocked = "from pycuda_conv.runtime import compiler\ndef no(*_): raise AssertionError('compiled again')\ncompiler.Nvcc.compile = compiler.Nvrtc.compile = no\n"
    assert python(blocked + code, python_env, **env) == "1\n"


@pytest.mark.parametrize("kept", [b"no binary", b""], ids=["garbage", "empty"])
def test_a_kept_kernel_that_the_driver_refuses_is_compiled_again(python_env, tmp_path, kept):
    """Its checksum is right: what was kept was wrong from the start, or is of another GPU."""
    env = {"PYCUDA_CONV_CACHE_DIR": str(tmp_path)}
    plant = "from pycuda_conv.runtime.cache import Entry\nEntry.read = lambda self: " + repr(kept) + "\n"
    said = "import logging; logging.basicConfig(stream=__import__('sys').stdout, format='%(message)s')\n"
    assert python(IMPORT + said + plant + USE, python_env, **env).count("is compiled again") == 1
    assert python(IMPORT + said + USE, python_env, **env) == ""


# ---- the same bits


@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_runs_give_the_same_bits(torch, way):
    way = Way(way, "torch")
    way.x.copy_(torch.from_numpy(way.case.normals("float32")[0]))
    first = way().clone()
    assert all(torch.equal(way(), first) for _ in range(1000))


# ---- more than 2^31 elements; last, since an access outside an array would end the context for the tests after it

_IMAGES = (3, 16, 8200, 8192)  # 3.2e9 elements, the third image wholly past 2^31
BIG = [  # (case, mode, config): of each kernel the input, the result, or both
    (fprop(_IMAGES, (2, 16, 3, 3), padding=1), "fp16", Batched(128, 2, 4)), (fprop(_IMAGES, (1, 16, 3, 3), bias=False), "fp16", GEMM),
    (fprop(_IMAGES, (2, 16, 1, 1), bias=False), "fp16", max(direct_gemm.GEMM_RATES, key=direct_gemm.GEMM_RATES.get)),  # 16-byte loads
    (fprop((3, 2, 8200, 8192), (16, 2, 1, 1)), "fp16", GEMM), (fprop(_IMAGES, (16, 1, 3, 3), padding=1, groups=16), "fp16", Single()),
    (fprop(_IMAGES, (16, 1, 3, 3), padding=1, groups=16), "fp16", Tile(14, 64, 7)), (dgrad(_IMAGES, (16, 1, 3, 3), padding=1), "fp16", GEMM),
    (dgrad((3, 2, 4100, 4096), (2, 16, 2, 2), stride=2), "fp16", Dgrad(128, 2, 8)),
    (fprop((3, 1, 8200, 8192), (16, 1, 1, 1)), "fp16", Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)),
    (fprop(_IMAGES, (16, 16, 3, 3), padding=1), "fp32", widest("fp32", 64, 2)),
    (fprop((32, 8, 8189, 8189), (8, 8, 1, 1), bias=False), "fp16 last", widest("fp16 last", 64, 2)),  # nearly as many pixels as it counts
]  # fmt: skip


def rows_near(case, plan):
    """(image, first row) of the result at both ends and wherever a linear index of an array is a multiple of 2^31."""
    n, size = case.input_shape[0], plan.result_shape[2]
    found = {(0, 0), (0, size - 8), (n // 2, size // 2), (n - 1, 0), (n - 1, size - 8)}
    for shape in (case.input_shape, plan.result_shape):
        image = math.prod(shape[1:])
        for multiple in range(1, n * image // 2**31 + 1):
            position = multiple * 2**31
            row = position % image % math.prod(shape[2:]) // shape[3] * size // shape[2]
            found.add((position // image, min(max(row // 2 * 2 - 4, 0), size - 8)))
    return sorted(found)


def assert_rows(case, x, w, b, out, n, row):
    """Eight rows of the result, from `row` of image `n`, against torch on the rows of x that they depend on."""
    import torch

    F = torch.nn.functional
    pad, stride, groups = (case.options.get(name, default) for name, default in (("padding", 0), ("stride", 1), ("groups", 1)))
    reach = case.weight_shape[2] - 1
    w, b = w.double().cpu(), None if b is None else b.double().cpu()
    got = out[n : n + 1, :, row : row + 8].double().cpu()
    # the rows of x on which these rows of the result depend: from `first` on
    if case.transposed:
        first = max(row + pad - reach, 0) if stride == 1 else row // stride
        part = x[n : n + 1, :, first : (row + 7 + pad) // stride + 1].double().cpu()
        start = row + pad - first * stride
        expected = F.conv_transpose2d(part, w, b, stride=stride, padding=(0, pad))[:, :, start : start + 8]
    else:
        first, end = row - pad, row - pad + 8 + reach
        part = x[n : n + 1, :, max(first, 0) : end].double().cpu()
        part = F.pad(part, (pad, pad, max(-first, 0), max(end - x.shape[2], 0)))
        expected = F.conv2d(part, w, b, groups=groups)
    assert torch.equal(got, expected), f"{case}: image {n}, rows from {row}"


@pytest.mark.gpu_alone
@pytest.mark.parametrize(("case", "mode", "config"), BIG, ids=ids_of(BIG))
def test_more_than_two_to_the_31_elements(torch, case, mode, config):
    problem = asked(case, mode)
    assert max(problem.largest_array, getattr(config, "SPLIT_K", 1) * math.prod(problem.result_shape)) > 2**31
    if why := engines.refusal(problem, config, get_device("cuda")):
        pytest.skip(why)
    trim()
    kind, order = getattr(torch, problem.dtype), problem.order or tuple(range(4))

    def made(shape):
        return torch.full([shape[i] for i in order], float("nan"), dtype=kind, device="cuda").permute(*np.argsort(order).tolist())

    x = made(case.input_shape)
    for image in x:  # small integers, by images: sums of at most 9 * 16 * 4 are exact in float16
        image.random_(0, 5).sub_(2)
    w = torch.randint(-2, 3, case.weight_shape, device="cuda").to(kind)
    b = torch.randint(-2, 3, (case.channels,), device="cuda").to(kind) if case.bias else None
    plan = Plan(problem, "cuda", config=config)
    out = made(plan.result_shape)
    plan(x, w, b, out=out)
    assert not any(torch.isnan(image).any() for image in out)
    for image, row in rows_near(case, plan):
        assert_rows(case, x, w, b, out, image, row)
    del x, out, plan
    trim()


@pytest.mark.gpu_alone
def test_a_strided_array_of_more_than_two_to_the_31_elements_is_copied_right(torch):
    """copy_strided.cu, by way of the array interface."""
    x = torch.empty(2, 8200, 8192, 17, dtype=torch.float16, device="cuda")
    for image in x:
        image.random_(0, 5).sub_(2)
    view = x.permute(0, 3, 1, 2)[:, :16]
    w = torch.randint(-2, 3, (1, 16, 1, 1), device="cuda").half()
    y = torch.as_tensor(pc.conv2d(Foreign(view), Foreign(w)), device="cuda")
    for n in range(2):
        for rows in (slice(0, 8), slice(-8, None), slice(4096, 4104)):
            assert torch.equal(y[n, 0, rows].float(), torch.einsum("hwc,c->hw", x[n, rows, :, :16].float(), w.float().ravel()))
    del x, y, view
    trim()
