"""The package as a whole: what importing it does, threads, caches, environment variables, and its kernel files by hand."""

import doctest
import importlib
import itertools
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import simt
from reference import NVCC, all_texts, fprop, needs_nvcc, nvcc_of, python, reference, spills, with_headers

import pycuda_conv as pc
from pycuda_conv import Plan
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.plan import cached_plan
from pycuda_conv.runtime import base, get_device

ROOT = Path(pc.__file__).resolve().parent.parent
KERNELS = sorted(base.KERNEL_DIR.rglob("*.cu"))
#: Those that nvcc compiles: kernels for the CPU have vectors of OpenCL C.
OF_NVCC = [file for file in KERNELS if not file.stem.endswith("_cpu")]


# ---- importing

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pycuda", "torch", "pyopencl", "cupy"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Block())
"""


def test_importing_needs_no_gpu_library_and_imports_none(python_env):
    python(BLOCK + "import pycuda_conv, pycuda_conv.arrays, pycuda_conv.runtime.device, pycuda_conv.runtime.opencl", python_env)
    code = (
        "import sys, pycuda_conv\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'pycuda', 'torch', 'pyopencl', 'cupy', 'cuda', 'dask'}))"
    )
    assert python(code, python_env) == "[]\n"


def test_every_module_imports_without_gpu_libraries(python_env):
    paths = [p.relative_to(ROOT) for p in (ROOT / "pycuda_conv").rglob("*.py") if p.stem != "__main__"]
    # which are for torch and for dask
    absent = {"nn", "tensors", "torch_internals", "gradients"} | ({"dask"} if find_spec("dask") is None else set())
    modules = [".".join(p.with_suffix("").parts) for p in paths if absent.isdisjoint(p.with_suffix("").parts)]
    code = BLOCK + f"import importlib\nfor name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))"
    python(code, python_env)


def test_a_call_without_any_backend_says_what_is_missing(python_env):
    code = BLOCK + (
        "import numpy as np, pycuda_conv as pc\n"
        "try: pc.conv1d(np.ones((1, 1, 3), 'f'), np.ones((1, 1, 2), 'f'))\n"
        "except pc.BackendError as error: print(error)"
    )
    text = python(code, python_env)
    assert "pip install" in text and "PyOpenCL" in text


def test_public_names_and_version():
    for name in pc.__all__:
        assert getattr(pc, name).__doc__
    assert pc.__all__ == sorted(pc.__all__) and pc.__version__
    assert issubclass(pc.ConvArgumentError, ValueError) and issubclass(pc.ConvArgumentError, RuntimeError)
    assert issubclass(pc.DeviceMemoryError, MemoryError) and issubclass(pc.BackendError, RuntimeError)
    assert (ROOT / "pycuda_conv" / "py.typed").exists()


def test_numpy_computes_in_one_thread():
    """It was told so before it was loaded: a thread a processor in each worker, which spin while they wait, took twice the time."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    assert all(library["num_threads"] == 1 for library in threadpoolctl.threadpool_info() if library["internal_api"] == "openblas")


PACKAGE = Path(pc.__file__).parent
EXAMPLES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py") if re.search("^ *>>> ", path.read_text(), re.M)
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("first", ["torch", "pycuda_conv"])
def test_both_import_orders_with_torch(fast_env, device, first):
    second = {"torch": "pycuda_conv", "pycuda_conv": "torch"}[first]
    code = f"""
import {first}
if {first!r} == "pycuda_conv":
    import numpy as np
    pycuda_conv.conv1d(np.ones((1, 1, 3), 'f'), np.ones((1, 1, 2), 'f'), device={device!r})
import {second}
x, w = torch.randn(2, 3, 8, 7), torch.randn(4, 3, 3, 2)
y = pycuda_conv.conv2d(x, w, padding=1, device={device!r})
assert torch.allclose(y, torch.nn.functional.conv2d(x, w, padding=1), atol=1e-5)
print("right")
"""
    assert python(code, fast_env) == "right\n"


def test_no_subscriber_hears_anything_by_default(fast_env, device):
    code = f"import numpy as np, pycuda_conv as pc; pc.conv1d(np.ones((1, 1, 3), 'f'), np.ones((1, 1, 2), 'f'), device={device!r})"
    assert python(code, fast_env) == ""


# ---- plans and threads


def test_the_second_call_makes_no_new_plan(device, monkeypatch):
    x, w = np.ones((1, 2, 7, 6), "f"), np.ones((3, 2, 2, 2), "f")
    pc.conv2d(x, w, padding=1, device=device)
    before = cached_plan.cache_info()
    monkeypatch.setattr(Plan, "__init__", lambda *_, **__: pytest.fail("a second plan for the same problem"))
    for padding in (1, (1, 1), [1, 1], (1,), ((1, 1), (1, 1)), np.int64(1)):  # one problem, however it is written
        pc.conv2d(x, w, padding=padding, stride=(1, 1), device=device)
        pc.conv2d(x + 1, w, None, (1,), padding, device=device)
    assert cached_plan.cache_info().misses == before.misses


def test_many_threads_with_many_shapes(device):
    """Each call gets its own answer, also while another compiles."""
    rng = np.random.default_rng(0)
    jobs = []
    for i in range(48):
        c, k, size = 1 + i % 3, 1 + i % 4, 5 + i % 2
        jobs.append((rng.integers(-8, 9, (2, c, size, 6)).astype("f"), rng.integers(-8, 9, (k, c, 3, 2)).astype("f"), {"padding": i % 2}))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda job: pc.conv2d(*job[:2], **job[2], device=device), jobs))
    for (x, w, options), got in zip(jobs, results, strict=True):
        assert np.array_equal(got, reference(False, 2, x, w, **options))


def test_first_calls_from_several_threads_make_one_device(fast_env, device):
    code = f"""
import threading, numpy as np
from pycuda_conv.runtime import get_device
barrier, found = threading.Barrier(8, timeout=300), []
def work():
    barrier.wait()
    found.append(get_device({device!r}))
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join(300)
print(len(found), len(set(map(id, found + [get_device({device!r})]))))
"""
    assert python(code, fast_env) == "8 1\n"


def test_an_interrupted_call_waits_for_its_kernels_on_opencl(monkeypatch, opencl):
    """They use the memory of the arrays, which is freed next."""
    device = get_device("opencl")
    call = partial(pc.conv1d, np.ones((1, 1, 3), "f"), np.ones((1, 1, 2), "f"), device="opencl")
    call()  # the kernel is compiled
    finished = []

    class Queue(device._cl.CommandQueue):
        def finish(self):
            finished.append(True)
            super().finish()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "queue", Queue(device.context))
    monkeypatch.setattr(device._cl, "enqueue_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert finished and device._queued == 0
    monkeypatch.undo()
    assert call().tolist() == [[[2, 2]]]


# ---- environment variables


def test_backend_variable(python_env):
    show = (
        "from pycuda_conv.runtime import default_backend\n"
        "try: print(default_backend())\nexcept Exception as e: print(type(e).__name__, e)"
    )
    assert python(show, python_env, PYCUDA_CONV_BACKEND="opencl") == "opencl\n"
    assert python(show, python_env, PYCUDA_CONV_BACKEND="cuda") == "cuda\n"
    text = python(show, python_env, PYCUDA_CONV_BACKEND="metal")
    assert text.startswith("BackendError") and "'metal'" in text and "opencl" in text


# ---- the kernel files by hand

#: GPUs and dtypes for kernel files without an architecture of their own, two by turns, and with one, one by turns; with --all-texts, all.
VARIANTS = [[("sm_75", 64), ("sm_100", 16)], [("sm_80", 17), ("sm_90", 32)]]
VARIANTS_BESIDE = [[("sm_80", 17)], [("sm_90", 64)], [("sm_100", 16)]]
MORE_VARIANTS = [("sm_80", 32), ("sm_90", 16), ("sm_90", 17), ("sm_90", 32), ("sm_90", 64), ("sm_100", 32)]


@pytest.mark.parametrize("file", KERNELS, ids=lambda p: p.name)
def test_a_kernel_file_opens_with_its_plan(file):
    lines = file.read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))]
    assert lines[0].startswith(f"// {file.name}") and len(header) >= 5
    assert max(map(len, lines)) <= 165
    for words in (("mapping", "block ->"), ("memory", "shared")):
        assert any(word in line.lower() for line in header for word in words), f"{file.name} does not say its {words[0]}"


def test_kernels_include_nothing_but_files_of_ours():
    """So that NVRTC compiles them without a toolkit, and nvcc in less time."""
    for path in base.KERNEL_DIR.rglob("*.cu*"):
        included = re.findall(r"^ *# *include +(\S+)", path.read_text(), re.M)
        assert not [name for name in included if not (base.KERNEL_DIR / name.strip('"')).is_file()], path.name


in_a_checkout = pytest.mark.skipif(base.KERNEL_DIR != ROOT / "cu", reason="the commands are for a checkout")


BY_HAND = {file: re.findall(r"^// By hand: (nvcc -cubin .*)$", file.read_text(), re.M) for file in OF_NVCC}


@in_a_checkout
def test_the_commands_in_the_kernel_files_compile_them(tmp_path):
    """They differ by the architecture and the file: one of each kind is run."""
    shortest = {}
    for file, commands in BY_HAND.items():
        (command,) = commands
        assert re.fullmatch(rf"nvcc -cubin (-arch=sm_\d+a? )?(-I cu )?cu/{file.relative_to(base.KERNEL_DIR).as_posix()}", command), command
        *kind, _ = command.split()
        shortest[tuple(kind)] = min(file, shortest.get(tuple(kind), file), key=lambda file: file.stat().st_size)
    if NVCC is None:
        pytest.skip("nvcc is not installed")
    for file in shortest.values():
        _, *options = BY_HAND[file][0].split()
        done = subprocess.run(
            [NVCC, *options, "-o", str(tmp_path / "cubin")], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and (tmp_path / "cubin").stat().st_size


#: Bytes of a thread that may be spilled, none anywhere else: outside the loops that take the time.
FEW_SPILLS = {
    "rims": 28,  # addresses, beside loads that don't wait for one another
    "mma_gemm": 4, "hopper_gemm": 44, "depthwise_nhwc": 40, "depthwise_nhwc_strips": 8, "grouped_nhwc_wgrad": 4, "pack": 12, "fft_blocks_rows": 32,
    "norm_planes": 8,
}  # fmt: skip
FEW_SPILLS_OF_16_BITS = {
    ("bordered", "sm_100"): 32, ("pack", "sm_100"): 40, ("depthwise_nhwc_strips", "sm_80"): 40, ("depthwise_nhwc_strips", "sm_100"): 4,
}  # fmt: skip


def named(file: Path) -> str:
    """The name that the kernel of a file has: the file's stem, or that behind the name of its folder."""
    longer = f"{file.parent.name}_{file.stem}"
    return longer if re.search(rf"\b{longer}\(", file.read_text()) else file.stem


def texts_of(file: Path) -> dict[tuple[str, int], tuple[str, str]]:
    """By GPU and dtype, a kernel file's texts and what each is compiled for: with the values it gives itself."""
    text = file.read_text()
    dtypes = any(re.search(r"\bDTYPE\b", part) for part in with_headers(text).values())
    by_hand = re.findall(r"^// By hand: nvcc .*-arch=(\S+)", text, re.M)
    variants = [(arch, 32) for arch in by_hand or ["sm_75"] * all_texts]
    if not any(arch.startswith("sm_90") for arch in by_hand):
        turns = [*itertools.chain(*(VARIANTS_BESIDE if by_hand else VARIANTS))]
        variants += [*turns, *MORE_VARIANTS] if all_texts else [turns[sum(map(ord, file.stem)) % len(turns)]]
    return {(arch, dtype): (f"#define DTYPE {dtype}\n{text}" if dtypes else text, arch) for arch, dtype in variants}


#: Of the tensor cores' kernels tests/cases name texts that nvcc compiles, the widest of each.
OF_CASES = [file for file in OF_NVCC if file.parent.name in ("mma", "hopper")]
OTHERS = [file for file in OF_NVCC if file not in OF_CASES or all_texts]


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
def test_kernel_files_of_tensor_cores_are_whole_by_hand():
    """With the values that they give themselves: g++ reads them, in a tenth of nvcc's time."""
    for file in OF_CASES:
        text = simt.text_of([named(file)], file.read_text())
        command = [str(simt.CXX), *simt.FLAGS, "-fsyntax-only", "-I", str(simt.HERE), "-x", "c++", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{file}:\n{done.stderr[:2000]}"


@needs_nvcc
@pytest.mark.parametrize("first", range(0, len(OTHERS), 14), ids=lambda first: OTHERS[first].name)
def test_kernel_files_compile_by_hand_and_do_not_spill(first):
    """With the values they give themselves; between them for every dtype, the oldest and newest GPUs. Together, which takes less time."""
    texts = {(named(file), *variant): text for file in OTHERS[first : first + 14] for variant, text in texts_of(file).items()}
    for (name, arch, dtype), result in zip(texts, nvcc_of(list(texts.values())), strict=True):
        what = f"{name}, {arch}, DTYPE={dtype}:\n{result.stderr}"
        assert result.returncode == 0 and "warning" not in result.stderr, what
        if dtype < 64:  # the doubles of direct_gemm may
            found = spills(result.stderr)
            most = FEW_SPILLS_OF_16_BITS.get((name, arch), 0) if dtype < 32 else 0
            assert found and max(found) <= max(most, FEW_SPILLS.get(name, 0)), what


@needs_nvcc
def test_the_planner_s_matrix_products_do_not_spill():
    """MIN_BLOCKS bounds the registers: what the planner chooses from must fit without memory traffic."""
    problem = fprop((64, 64, 56, 56), (64, 64, 3, 3), padding=1, bias=False).problem()
    configs = list(direct_gemm.GEMM_RATES)
    results = nvcc_of([(direct_gemm.schedule(problem, config, None).steps[0][0].source(), "sm_90") for config in configs])
    for config, result in zip(configs, results, strict=True):
        assert result.returncode == 0 and "0 bytes spill stores, 0 bytes spill loads" in result.stderr, f"{config}:\n{result.stderr}"
