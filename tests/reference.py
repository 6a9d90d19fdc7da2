"""What is right: convolutions in float64 by torch, the bound on rounding, and comparisons that name the worst element."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycuda_conv import ConvProblem
from pycuda_conv.runtime.base import KERNEL_DIR, KernelLaunch
from pycuda_conv.runtime.compiler import Nvcc
from pycuda_conv.tools.distributions import DISTRIBUTIONS

try:
    import ml_dtypes  # teaches numpy the name bfloat16
except ImportError:
    ml_dtypes = None

#: What numpy arrays can hold here.
DTYPES = ["float16", "float32", "float64"] + ["bfloat16"] * (ml_dtypes is not None)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
SUM_EPS = {dtype: min(eps, EPS["float32"]) for dtype, eps in EPS.items()}  # sums of 16-bit numbers are floats
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 0.0}  # where the result is subnormal


def _tuple(value: Any, ndim: int) -> tuple:
    return (value,) * ndim if isinstance(value, int) else tuple(value)


def _pairs(padding: Any, size: tuple, dilation: tuple) -> tuple:
    ndim = len(size)
    if padding == "valid":
        return ((0, 0),) * ndim
    if padding == "same":
        totals = [d * (f - 1) for d, f in zip(dilation, size, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in _tuple(padding, ndim))


def _by_taps(x: Any, w: Any, stride: tuple, dilation: tuple, transposed: bool) -> Any:
    """Convolutions of channels alone, tap by tap: torch would copy an image once for each tap, and takes eight times as long."""
    ndim, filters = len(stride), math.prod(w.shape[:2])
    x, w = x.repeat_interleave(filters // x.shape[-ndim - 1], -ndim - 1), w.reshape(filters, *w.shape[2:])
    shape = list(zip(x.shape[-ndim:], w.shape[1:], stride, dilation, strict=True))
    size = [(n - 1) * s + d * (f - 1) + 1 for n, f, s, d in shape] if transposed else [
        (n - d * (f - 1) - 1) // s + 1 for n, f, s, d in shape
    ]
    y = x.new_zeros(*x.shape[:-ndim], *size)
    for tap in np.ndindex(*w.shape[1:]):
        counts = x.shape[-ndim:] if transposed else size
        at = (..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, n, s, d in zip(tap, counts, stride, dilation, strict=True)))
        weight = w[(slice(None), *tap)].reshape(-1, *(1,) * ndim)
        if transposed:
            y[at].addcmul_(x, weight)
        else:
            y.addcmul_(x[at], weight)
    return y


def convolved(
    transposed: bool, x: Any, w: Any, b: Any = None, *, stride=1, padding=0, output_padding=0, dilation=1, groups=1
) -> Any:  # fmt: skip
    """The (transposed) convolution of torch's tensors. Padding is done by hand: uneven pairs and crops are independent of the package."""
    torch = pytest.importorskip("torch", reason="the reference is torch's CPU convolution")
    F, ndim = torch.nn.functional, w.dim() - 2
    stride, dilation = _tuple(stride, ndim), _tuple(dilation, ndim)
    pairs = _pairs(padding, tuple(w.shape[2:]), dilation)
    of_many_taps = groups == x.shape[-ndim - 1] and 32 < math.prod(w.shape[2:]) < math.prod(x.shape[-ndim:]) / 16
    if not transposed:
        x = F.pad(x, [v for pair in reversed(pairs) for v in pair])
    if of_many_taps:
        y = _by_taps(x, w, stride, dilation, transposed)
    elif transposed:
        y = getattr(F, f"conv_transpose{ndim}d")(x, w, None, stride, 0, 0, groups, dilation)
    else:
        y = getattr(F, f"conv{ndim}d")(x, w, None, stride, 0, dilation, groups)
    if transposed:
        extra = _tuple(output_padding, ndim)
        around = [v for (before, after), e in reversed(list(zip(pairs, extra, strict=True))) for v in (-before, e - after)]
        y = F.pad(F.pad(y, [max(v, 0) for v in around]), [min(v, 0) for v in around])  # both at once may not leave a row between
    return y if b is None else y + b.reshape(-1, *(1,) * ndim)


def reference(transposed: bool, ndim: int, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """The same of arrays, in float64."""
    torch = pytest.importorskip("torch")
    given = (None if a is None else torch.from_numpy(np.ascontiguousarray(a, np.float64)) for a in (x, w, b))
    return convolved(transposed, *given, **options).numpy()


@dataclass(frozen=True)
class Case:
    """A convolution by its arguments: shapes and whatever the function takes besides."""

    transposed: bool
    input_shape: tuple
    weight_shape: tuple
    options: dict = field(default_factory=dict, hash=False)
    bias: bool = True

    @property
    def ndim(self) -> int:
        return len(self.weight_shape) - 2

    @property
    def channels(self) -> int:
        """Of the result."""
        return self.weight_shape[1] * self.options.get("groups", 1) if self.transposed else self.weight_shape[0]

    @property
    def depth(self) -> int:
        """Products in one sum, at most."""
        per_group = self.weight_shape[0] // self.options.get("groups", 1) if self.transposed else self.weight_shape[1]
        return per_group * math.prod(self.weight_shape[2:])

    def problem(self, dtype: str = "float32", **options) -> ConvProblem:
        """The problem; `options` are added to the case's own."""
        make = ConvProblem.transposed if self.transposed else ConvProblem.forward
        bias = (self.channels,) if self.bias else None
        return make(self.ndim, self.input_shape, self.weight_shape, bias, dtype=dtype, **self.options, **options)

    def integers(self, dtype: str, seed: int = 0) -> list:
        """Input, weight and bias of small integers: every sum is exact in any order, so results must agree bit by bit."""
        rng = np.random.default_rng(seed)
        return self._arrays(lambda shape: rng.integers(-8, 9, shape).astype(dtype))

    def normals(self, dtype: str, seed: int = 0) -> list:
        rng = np.random.default_rng(seed)
        return self._arrays(lambda shape: rng.standard_normal(shape).astype(dtype))

    def drawn(self, distribution: str, dtype: str = "float32", seed: int = 0) -> list:
        """Input and weight of a kind of numbers in :data:`DISTRIBUTIONS`, and a bias of zeros."""
        rng = np.random.default_rng([seed, *distribution.encode()])
        x, w = DISTRIBUTIONS[distribution](rng, self.input_shape, self.weight_shape, self.ndim)
        return [x.astype(dtype), w.astype(dtype), np.zeros(self.channels, dtype) if self.bias else None]

    def _arrays(self, make) -> list:
        return [make(self.input_shape), make(self.weight_shape), make((self.channels,)) if self.bias else None]

    def reference(self, x, w, b=None) -> np.ndarray:
        return reference(self.transposed, self.ndim, x, w, b, **self.options)

    def bound(self, x, w, b, ref: np.ndarray, dtype: str | None = None) -> np.ndarray:
        """How far from `ref` the rounding of an honest sum may lead; `dtype` where it is not that of `x`."""
        dtype = dtype or x.dtype.name
        magnitude = self.reference(np.abs(x), np.abs(w), None if b is None else np.abs(b))
        return 4 * SUM_EPS[dtype] * math.sqrt(max(self.depth, 1)) * magnitude + EPS[dtype] * np.abs(ref) + TINY[dtype]

    def __str__(self) -> str:
        def show(value):
            return "x".join(show(v) for v in value) if isinstance(value, tuple) else str(value)

        names = {"stride": "s", "padding": "p", "output_padding": "op", "dilation": "d", "groups": "g"}
        parts = ["dgrad" if self.transposed else "fprop", show(self.input_shape), "by", show(self.weight_shape)]
        parts += [names[k] + show(v) for k, v in self.options.items()] + ["" if self.bias else "nobias"]
        return "-".join(filter(None, parts))


def fprop(input_shape: tuple, weight_shape: tuple, bias: bool = True, **options) -> Case:
    return Case(False, input_shape, weight_shape, options, bias)


def dgrad(input_shape: tuple, weight_shape: tuple, bias: bool = True, **options) -> Case:
    return Case(True, input_shape, weight_shape, options, bias)


def gradient_of(case: Case) -> Case:
    """The gradient by the input of a forward convolution."""
    problem, n = case.problem(), case.ndim
    y, taps = problem.result_shape, problem.filter_size[-n:]
    rows = zip(
        case.input_shape[2:], y[2:], taps, problem.stride[-n:], problem.padding_before[-n:], problem.padding_after[-n:],
        problem.dilation[-n:], strict=True
    )
    lacking = tuple(m - ((size - 1) * s - before - after + d * (f - 1) + 1) for m, size, f, s, before, after, d in rows)
    return Case(
        True, (*y[:2], *y[2:]), case.weight_shape, case.options | {"output_padding": lacking} if any(lacking) else case.options, case.bias
    )


# ---- comparisons


#: Every activation; of a leaky ReLU another slope than 0.01 too.
ACTIVATIONS = ["relu", "relu6", "leaky_relu", ("leaky_relu", 0.2), "hardswish", "silu", "gelu", "gelu_tanh"]


def activation_of(activation: Any) -> Callable[[Any], Any]:
    """The activation as a function of torch's tensors."""
    f = pytest.importorskip("torch").nn.functional
    word, slope = activation if isinstance(activation, tuple) else (activation, 0.01)
    if word is None:
        return lambda v: v
    if word == "hardswish":  # torch's own overflows, and for GPUs multiplies float64 by a sixth that is rounded to float32
        return lambda v: v * (f.relu6(v + 3) / 6)
    if word == "gelu_tanh":
        return lambda v: f.gelu(v, approximate="tanh")
    return (lambda v: f.leaky_relu(v, slope)) if word == "leaky_relu" else getattr(f, word)


def activated(v: np.ndarray, activation: Any) -> np.ndarray:
    """The activation in float64."""
    torch = pytest.importorskip("torch")
    return activation_of(activation)(torch.from_numpy(np.array(v, float))).numpy()


def assert_exact(got: np.ndarray, ref: np.ndarray, what: Any = "") -> None:
    """Every element of `got` is the correctly rounded `ref`; NaN, a wrong shape or a wrong sign fail."""
    expected = ref.astype(got.dtype)
    assert got.shape == ref.shape, f"{what}: shape {got.shape}, expected {ref.shape}"
    wrong = ~(got == expected)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        pytest.fail(f"{what}: {wrong.sum()} of {wrong.size} elements differ, first at {at}: got {got[at]}, expected {expected[at]}")


def assert_close(got: np.ndarray, ref: np.ndarray, bound: np.ndarray, what: Any = "") -> None:
    """|got - ref| <= bound everywhere; NaN fails."""
    assert got.shape == ref.shape, f"{what}: shape {got.shape}, expected {ref.shape}"
    error = np.abs(got.astype(np.float64) - ref)
    good = error <= bound
    if not good.all():
        excess = np.where(np.isnan(error), np.inf, error - bound)
        at = np.unravel_index(int(np.argmax(excess)), excess.shape)
        pytest.fail(
            f"{what}: {(~good).sum()} of {good.size} elements past the bound, worst at {tuple(int(i) for i in at)}: got {got[at]}, "
            f"expected {ref[at]}, off by {error[at]:.3g}, allowed {bound[at]:.3g}"
        )


def assert_alike(got: np.ndarray, ref: np.ndarray, bound: np.ndarray, what: Any = "") -> None:
    """|got - ref| <= bound, and what is not finite in `ref` as `got` rounds it is the same in both."""
    with np.errstate(all="ignore"):
        expected = ref.astype(got.dtype)
    lost = ~np.isfinite(expected)
    assert np.array_equal(got[lost], expected[lost], equal_nan=True), what
    assert_close(np.where(lost, 0, got), np.where(lost, 0, ref), np.where(lost, 0, bound), what)


def check(case: Case, got: Any, x, w, b, what: Any = "") -> None:
    """`got` is the convolution of x, w and b (numpy arrays as they were rounded) within the bound."""
    ref = case.reference(x, w, b)
    assert_close(np.asarray(got), ref, case.bound(x, w, b, ref), f"{case} {what}")


def tensor(array: np.ndarray | None) -> Any:
    """`array` as a torch tensor that shares its memory, in bfloat16 too."""
    torch = pytest.importorskip("torch")
    if array is None or array.dtype.name != "bfloat16":
        return None if array is None else torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


# ---- how a tensor's elements may lie

TORCH_LAYOUTS = {
    "channels_last": lambda torch, t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "expanded": lambda torch, t: t[:1].expand(t.shape),
    "every second": lambda torch, t: t.repeat_interleave(2, -1)[..., ::2],
    "permuted": lambda torch, t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "one element off": lambda torch, t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "imaginary part of a conjugate": lambda torch, t: torch.complex(torch.zeros_like(t), -t).conj().imag,  # has the negative bit
    "negative view": lambda torch, t: torch._neg_view(-t),  # the same, and contiguous
    "parameter": lambda torch, t: torch.nn.Parameter(t, requires_grad=False),
}


def channels_last(t: Any) -> Any:
    """The batched tensor `t` with its channels last in memory, as torch says it where it has a word for it."""
    torch = pytest.importorskip("torch")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t.transpose(1, 2).contiguous().transpose(1, 2)


def is_channels_last(t: Any) -> bool:
    """Whether the channels of the batched tensor `t` are last in memory, and it has no gaps."""
    return not t.is_contiguous() and t.movedim(1, -1).is_contiguous()


# ---- a fresh interpreter


def python(code: str, env: dict, **more: str) -> str:
    """What a new Python process prints; it must end well and say nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", code], env={**env, **more}, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not done.stderr.strip(), done.stderr
    return done.stdout


# ---- running a plan where every stray access shows

MARGIN = 256  # elements of NaN before and after every array; a multiple of 16 bytes for every dtype


def _surrounded(array: np.ndarray | None, order: tuple | None = None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A copy of `array` in the middle of NaNs, its axes in memory in this order; and the whole of it."""
    if array is None:
        return None, None
    order = order or tuple(range(array.ndim))
    whole = np.full(array.size + 2 * MARGIN, np.nan, array.dtype)
    view = whole[MARGIN : MARGIN + array.size].reshape([array.shape[i] for i in order]).transpose(np.argsort(order))
    view[...] = array
    return whole, view


def run(plan, x, w, b=None, scale=None, residual=None) -> np.ndarray:
    """What `plan` computes from numpy arrays: the result was NaN before, and NaNs lie round every array on the device."""
    out, problem = np.full(plan.result_shape, np.nan, x.dtype), plan.problem
    orders = (problem.order, problem.weight_order, None, None, problem.order, problem.result_order)
    wholes, views = zip(*(_surrounded(a, order) for a, order in zip((x, w, b, scale, residual, out), orders, strict=True)), strict=True)
    if plan.device.backend == "cuda" and not problem.order:
        return _run_on_cuda(plan, wholes, views)
    result = plan(*views[:3], scale=views[3], residual=views[4], out=views[5])
    assert result is views[5]
    _check_margins(plan, wholes[5])
    return result


def _check_margins(plan, whole: np.ndarray) -> None:
    assert np.isnan(whole[:MARGIN]).all() and np.isnan(whole[-MARGIN:]).all(), f"{plan} wrote outside its result"


def _run_on_cuda(plan, wholes, views) -> np.ndarray:
    from pycuda import gpuarray

    with plan.device:
        gpu_wholes = [None if a is None else gpuarray.to_gpu(a) for a in wholes]
        gpu = [
            None if a is None else a[MARGIN : a.size - MARGIN].reshape(v.shape) for a, v in zip(gpu_wholes, views, strict=True)
        ]
        if plan.workspace_bytes:  # the pool hands the block that was freed last to the plan: let it hold NaNs
            block = plan.device.allocate(plan.workspace_bytes)
            plan.device._drv.memset_d8(int(block), 0xFF, plan.workspace_bytes)
            del block
    result = plan(*gpu[:3], scale=gpu[3], residual=gpu[4], out=gpu[5])
    assert result is gpu[5]
    with plan.device:
        whole = gpu_wholes[5].get()
        _check_margins(plan, whole)
        return gpu[5].get()


# ---- kernels compiled by nvcc

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def kept_folder() -> Path:
    """Of what tests have compiled: the next run compiles only what has changed."""
    found = Path(tempfile.gettempdir()) / f"pycuda_conv_tests_{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def kept_file(name: str, make: Callable[[Path], object]) -> Path:
    """A file of :func:`kept_folder`, made before, or now by `make` at a place of its own: no other process finds half of it."""
    file = kept_folder() / name
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as where:
            made = Path(where) / name
            make(made)
            os.replace(made, file)
    return file


@contextlib.contextmanager
def started(*arguments: Any, env: dict[str, str], **options: Any) -> Iterator[subprocess.Popen]:
    """A Python process, whose output is read here. It ends with the block at the latest, and so do those that it has started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen([sys.executable, *map(str, arguments)], env=env, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def with_headers(text: str) -> dict[str, str]:
    """`text`, and by name each header of ours that it includes, directly or through others."""
    found, todo = {"": text}, [text]
    while todo:
        for name in re.findall(r'^ *# *include +"(.+)"', todo.pop(), re.M):
            if name not in found:
                found[name] = (KERNEL_DIR / name).read_text()
                todo.append(found[name])
    return found


def nvcc(file: Path, arch: str) -> subprocess.CompletedProcess:
    """What nvcc and ptxas say about a kernel file."""
    command = [
        str(NVCC), "-cubin", "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas=-v", "-I", str(KERNEL_DIR), "-o", "kernel.cubin", str(file)
    ]
    return subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=900, check=False)


#: Whether all texts of a test are compiled, as `--all-texts` asks, or those that `covering` chooses.
all_texts = False


def covering(launches: list[KernelLaunch]) -> list[KernelLaunch]:
    """A few of some launches: for each kernel file, every architecture, and every value of every define, is among them.

    Of a size that has more than three values, the smallest and the largest are. Large values come together where they can.
    """
    if all_texts:
        return launches
    defines = [{"arch": launch.arch, **launch.defines} for launch in launches]
    every: dict[tuple, set] = {}
    for launch, of_one in zip(launches, defines, strict=True):
        for name, value in of_one.items():
            every.setdefault((launch.file or launch.kernel, name), set()).add(value)
    wanted = {
        (*key, value) for key,
        found in every.items() for value in (found if len(found) <= 3 or key[1].endswith("TYPE") else (min(found), max(found)))
    }
    values = [
        {(launch.file or launch.kernel, *define) for define in of_one.items()} & wanted for launch,
        of_one in zip(launches, defines, strict=True)
    ]
    chosen, missing = [], set(wanted)
    while missing:
        best = max(range(len(launches)), key=lambda i: (len(values[i] & missing), sum(launches[i].defines.values())))
        missing -= values[best]
        chosen.append(best)
    for one in list(chosen):  # those that the later ones have made needless
        others = [other for other in chosen if other != one]
        if wanted <= set().union(*(values[other] for other in others)):
            chosen = others
    return [launches[i] for i in chosen]


def by_turns(*axes: Iterable[Any], rounds: int = 1) -> list[tuple]:
    """Each value of the longest axis so many times, with others of the other axes; all combinations with `--all-texts`."""
    values = [list(axis) for axis in axes]
    if all_texts:
        return list(itertools.product(*values))
    turns = [(i, turn) for turn in range(rounds) for i in range(max(map(len, values)))]
    return list(dict.fromkeys(tuple(axis[(i + turn * j) % len(axis)] for j, axis in enumerate(values)) for i, turn in turns))


#: Texts in one run of nvcc, which takes half a second before it begins with the first.
TOGETHER = 12


def nvcc_of(texts: list[tuple[str, str]]) -> list[subprocess.CompletedProcess]:
    """What nvcc and ptxas say about each of some texts, which are given with their architectures.

    Several are compiled in one run, each in a namespace of its own: ptxas says the same of a function as if it were alone.
    What does not compile so is compiled alone, so that the message names its lines.
    """
    identity = Nvcc(str(NVCC)).identity

    def kept(text: str, arch: str) -> Path:
        return kept_folder() / f"said_{hashlib.sha256(repr((identity, arch, with_headers(text))).encode()).hexdigest()[:32]}"

    todo: dict[str, list[tuple[str, str]]] = {}
    for text, arch in dict.fromkeys(texts):
        if not kept(text, arch).exists():
            todo.setdefault(arch, []).append((text, arch))
    batches = [of_one[i : i + TOGETHER] for of_one in todo.values() for i in range(0, len(of_one), TOGETHER)]
    alone: dict[tuple[str, str], subprocess.CompletedProcess] = {}

    def compiled(batch: list[tuple[str, str]]) -> None:
        said = _together([text for text, _ in batch], batch[0][1])
        for i, (text, arch) in enumerate(batch):
            if said is None:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder, "kernel.cu")
                    file.write_text(text)
                    alone[text, arch] = nvcc(file, arch)
            else:
                kept_file(kept(text, arch).name, lambda made, told=said[i]: made.write_text(told))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, batches))
    return [alone[one] if one in alone else subprocess.CompletedProcess([str(NVCC)], 0, "", kept(*one).read_text()) for one in texts]


def _together(texts: list[str], arch: str) -> list[str] | None:
    """What ptxas says of each text, after what it and nvcc say of all of them; None if they don't compile."""
    number = re.sub(r"\D", "", arch)
    flags = [f"-D__CUDA_ARCH__={number}0", "-D__CUDACC__", "-D__NVCC__", *(["-D__CUDA_ARCH_FEAT_SM90_ALL"] if arch == "sm_90a" else [])]
    with tempfile.TemporaryDirectory() as folder:
        whole = []
        for i, text in enumerate(texts):
            command = ["g++", "-std=c++17", "-E", "-x", "c++", "-w", *flags, "-I", str(KERNEL_DIR), "-"]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                return None
            inside = re.sub(r"(?<=\s)::(?=\w)", f"text{i}_::", done.stdout.replace(_EXTERN, "__global__"))
            whole.append(f"namespace text{i}_ {{\n{inside}\n}}\n")
        Path(folder, "kernels.cu").write_text("".join(whole))
        command = [str(NVCC), "-cubin", "-std=c++17", "-O3", f"-arch={arch}", "-Xptxas=-v", "-o", "kernels.cubin", "kernels.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        return None
    of_all, *functions = re.split(
        r"^(?=ptxas info +: (?:Compiling entry function|Function properties))", done.stdout + done.stderr, flags=re.M
    )
    found = [[of_all] for _ in texts]
    for one in functions:
        found[int(re.findall(r"\d?text(\d+)_\d", one.splitlines()[0])[0])].append(one)
    return ["".join(parts) for parts in found]


_EXTERN = 'extern "C" __global__'


def spills(said: str) -> list[int]:
    """Bytes that each function of a kernel file spills, by what ptxas says.

    The function of activations beyond ReLU is left out: it leaves its caller's registers as they are, so it costs other layers nothing.
    """
    said = re.sub(r"Function properties for \S*call_beyond_relu.*\n.*\n", "", said)
    return [int(found) for found in re.findall(r"(\d+) bytes spill stores", said)]
