"""The kernels in the hands of others: their texts, by SourceModule, and a plan's launches made one by one."""

import importlib
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import covering
import numpy as np
import pytest
import reference
from fake_cuda import FakeCuda
from reference import needs_nvcc, python
from test_launch import PROBLEMS, buffers

import pycuda_conv as pc
from pycuda_conv import engines, kernels
from pycuda_conv.engines.direct.direct import Tile
from pycuda_conv.engines.fft import blocks
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.base import KERNEL_DIR, kernel_file, shown_file
from pycuda_conv.runtime.graph import Graph
from pycuda_conv.runtime.plain import plain
from pycuda_conv.tools.kernels import families

TILE = pc.ConvProblem.forward(2, (2, 8, 16, 32), (8, 1, 3, 3), padding=1, groups=8)


# ---- texts


def preprocessed(text, *options):
    """What a compiler sees of a text, word by word."""
    if shutil.which("g++") is None:
        pytest.skip("a preprocessor is needed")
    command = ["g++", "-E", "-P", "-x", "c++", "-D__CUDA_ARCH__=900", *options, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=900).stdout.split()


def some_texts():
    """A text of every kernel file, and where it has several, one in 16 bits, too."""
    found = {}
    for family in families("sm_90a"):
        for text, defines in zip(family.sources(), family, strict=True):
            found.setdefault((family.file, defines.get("DTYPE", defines.get("TYPE", 0)) in (16, 17)), text)
    return found


def test_headers_that_were_put_in_are_those_that_are_included():
    texts = some_texts()
    assert len({file for file, _ in texts}) > 30

    def check(text):
        flat = plain(text, flat=True)
        assert "#include" not in flat
        return preprocessed(flat) == preprocessed(plain(text), "-I", str(KERNEL_DIR))

    with ThreadPoolExecutor(2) as pool:
        same = dict(zip(texts, pool.map(check, texts.values()), strict=True))
    assert all(same.values()), [name for name, good in same.items() if not good]


def test_errors_in_a_flat_text_are_reported_where_the_file_has_them():
    flat = pc.source("direct_tile", flat=True, DTYPE=32, TILE_P=8, TILE_Q=32, ROWS=4)
    found = {}
    name, number = "", 0
    for line in flat.split("\n"):
        moved = re.match(r'#line (\d+) "(.*)"', line)
        name, number = (moved[2], int(moved[1]) - 1) if moved else (name, number + 1)
        found[name, number] = line
    for file in ("direct_tile", "portable.cuh", "activation.cuh"):
        for i, line in enumerate(kernel_file(file).read_text().split("\n"), 1):
            if line.strip() and not line.startswith(("#include", "#pragma once")):
                assert found[shown_file(file), i] == line


def test_what_source_takes():
    by_name = pc.source("direct_tile", DTYPE=32, TILE_P=8, TILE_Q=32, ROWS=4)
    assert by_name.startswith('extern "C++" {\n') and "#define TILE_P 8" in by_name and "KERNEL" in by_name
    assert pc.source("direct_tile", DTYPE=np.int32(16)) == pc.source("direct_tile", DTYPE=16)
    device = get_device()
    config = Tile(8, 32, 4)
    (launch,) = (launch for step in engines.schedule(TILE, config, device).whole for launch in step)
    assert pc.source(launch) == pc.source(config, TILE, device=device) == plain(launch.source())
    assert pc.source(launch, flat=True) == plain(launch.source(), flat=True)
    assert [kernel_file("portable.cuh").is_relative_to(folder) for folder in pc.include_dirs()] == [True]


@pytest.mark.parametrize(("arguments", "defines", "error", "match"), [
    (("direct_tle",), {}, ValueError, "what must be the name of a file in cu/, got 'direct_tle'; did you mean 'direct_tile'"),
    (("../setup",), {}, ValueError, "what must be the name of a file in cu/, got '../setup'"),
    (("direct_tile",), {"DTYPE": "32"}, TypeError, "DTYPE"),
    ((3,), {}, TypeError, "what must be the name of a file in cu/, a launch of a plan, or a configuration of an engine, got 3 of type int"),
    ((Tile(8, 32, 4),), {}, TypeError, "problem must be the ConvProblem that Tile"),
    ((Tile(8, 32, 4), TILE), {"DTYPE": 32}, TypeError, "constants are for a file"),
])  # fmt: skip
def test_what_source_refuses(arguments, defines, error, match):
    with pytest.raises(error, match=match):
        pc.source(*arguments, **defines)


def test_a_configuration_of_several_launches_has_no_one_source():
    device = get_device()
    problem = pc.ConvProblem.gradient("weight", 2, (8, 8, 16, 32), (8, 8, 3, 3), (8, 8, 14, 30))
    config = next(c for c in engines.candidates(problem, device) if len(engines.schedule(problem, c, device).whole) > 1)
    with pytest.raises(pc.ConvArgumentError, match=r"launches: \w+, \w+.*; pass one of plan.kernels"):
        pc.source(config, problem, device=device)


# ---- a plan's launches, without a GPU


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeCuda(tmp_path, monkeypatch)
    drv = sys.modules["pycuda.driver"]
    drv.function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    drv.module_from_buffer = lambda cubin: SimpleNamespace(get_function=lambda name: Function(cubin, name))
    return fake


class Function:
    """A kernel as PyCUDA has it, which notes how it was launched."""

    def __init__(self, cubin, name):
        self.cubin, self.name, self.attributes, self.launched = cubin, name, {}, []

    def set_attribute(self, which, value):
        self.attributes[which] = value

    def __call__(self, *args, grid, block, shared, stream):
        format, values = "", []
        for arg in args:  # as PyCUDA's _build_arg_buf does
            if isinstance(arg, np.void):
                format, values = f"{format}{arg.itemsize}s", [*values, bytes(arg)]
            else:
                assert isinstance(arg, np.number)
                format, values = format + arg.dtype.char, [*values, arg]
        self.launched.append((grid, block, shared, stream, struct.pack(format, *values)))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arguments_are_byte_for_byte_those_of_our_launches(fake, problem, dtype):
    device = fake.device("python")
    given = buffers(1 << 40)
    for layout in ("NCHW", "NHWC") if problem.direction != "wgrad" else ("NCHW",):
        plan = pc.Plan(replace(problem, dtype=dtype, layout=layout), device)
        input, weight, bias, scale, residual, result, workspace = given
        place = workspace + plan.schedule.workspace_bytes if plan.filter_bytes else 0
        launches = device.launches(plan.loaded.whole)
        fake.asked()
        plan.launch(given)
        asked = [line for line in fake.asked(device) if line.startswith("launch")]
        assert len(asked) == len(launches)
        for launch, line in zip(launches, asked, strict=True):
            kernel = kernels._kernel(
                device, launch, (input, weight, bias, result, workspace, place, scale, residual, *kernels.NO_NORM), "kept"
            )
            assert not kernel.function.launched
            kernel("a stream")
            ((grid, block, shared, stream, packed),) = kernel.function.launched
            assert stream == "a stream" and grid[1:] == block[1:] == (1, 1)
            assert packed.hex() in line.replace(" ", ""), line
            assert kernel.function.attributes == ({"dynamic": shared} if shared else {})
            assert kernel.name == launch.step.kernel and kernel.source == pc.source(launch.step) and kernel.arch.startswith("sm_90")


def test_kernels_are_for_arrays_on_a_gpu(monkeypatch):
    x, w, y = (np.zeros(shape, "f") for shape in (TILE.input_shape, TILE.weight_shape, TILE.result_shape))
    plan = pc.Plan(TILE)
    with pytest.raises((TypeError, pc.BackendError), match="GPU"):
        plan.kernels(x, w, out=y)
    with pytest.raises(TypeError, match="out"):
        plan.kernels(x, w)
    if plan.device.backend == "opencl":
        with pytest.raises(pc.BackendError, match="this plan is for opencl"):
            plan.kernels(x, w, out=y)


# ---- on a GPU


def portable(launch):
    """Whether a launch's text is in the portable dialect."""
    return "INDEX_64" in launch.defines


def launches_of(problem, config, device):
    return [launch for step in engines.schedule(problem, config, device).whole for launch in step]


def cases(device, count, wanted):
    """Problems and configurations that use all kernels between them of which `wanted` is true; with --all-texts in each type of numbers."""
    met, found = set(), []
    waves = pc.ConvProblem.forward(2, (2, 8, 90, 70), (8, 1, 31, 31), padding=15, groups=8)
    by_fft = next(config for config in blocks.configs(waves.launched, device) if engines.refusal(waves, config, device) is None)
    some = ((problem, config) for (problem, config, _), _ in covering.pool(device, count, 1))
    for problem, config in itertools.chain([(waves, by_fft)], some):
        launches = launches_of(problem, config, device)
        number = [one.defines.get("DTYPE", one.defines.get("TYPE", 0)) if reference.all_texts else 0 for one in launches]
        new = {(one.kernel, which) for one, which in zip(launches, number, strict=True) if wanted(one)} - met
        if new and 0 not in problem.result_shape:
            met |= new
            found.append((problem, config))
    return found


class Arrays:
    """Operands of a problem as GPUArrays of the primary context, and an `out` full of NaN for each result. The context must be current."""

    def __init__(self, problem, seed=0):
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy knows bfloat16 by it")
        assert ml_dtypes
        self.gpuarray, self.problem = importlib.import_module("pycuda.gpuarray"), problem
        rng = np.random.default_rng(seed)
        shapes, orders = problem.operand_shapes, (problem.order, problem.weight_order, None, None, problem.order)
        types = [None if s is None else np.dtype(dtype) for s, dtype in zip(shapes, problem.operand_dtypes, strict=True)]
        host = [
            None if t is None else (9 * rng.random(s) - (0 if t.kind in "ub" else 4.5)).astype(t)
            for s, t in zip(shapes, types, strict=True)
        ]
        self.operands = [self.laid_out(a, order) for a, order in zip(host, orders, strict=True)]

    def laid_out(self, array, order):
        """A GPUArray of the values whose axes lie in memory in that order."""
        if array is None or order is None:
            return None if array is None else self.gpuarray.to_gpu(array)
        turned = self.gpuarray.to_gpu(np.ascontiguousarray(array.transpose(order)))
        back = np.argsort(order)
        shape, strides = ([values[i] for i in back] for values in (turned.shape, turned.strides))
        return self.gpuarray.GPUArray(tuple(shape), turned.dtype, base=turned, gpudata=turned.gpudata, strides=tuple(strides))

    def out(self):
        dtype = np.dtype(self.problem.result_dtype or self.problem.dtype)
        poison = np.nan if dtype.kind not in "iub" else 1
        return self.laid_out(np.full(self.problem.result_shape, poison).astype(dtype), self.problem.result_order)

    def kernels(self, plan, out, **more):
        x, w, b, s, r = self.operands
        return plan.kernels(x, w, b, scale=s, residual=r, out=out, **more)

    def called(self, plan):
        x, w, b, s, r = self.operands
        out = self.out()
        assert plan(x, w, b, scale=s, residual=r, out=out) is out
        return bits(out)


def bits(array):
    """The memory of a GPUArray, whatever order its axes have."""
    memory = np.empty(array.nbytes, np.uint8)
    sys.modules["pycuda.driver"].memcpy_dtoh(memory, int(array.gpudata))
    return memory


#: NVIDIA's compilers take two or three seconds for a text.
TOGETHER = 2 * (os.cpu_count() or 1)
OPTIONS = ["-std=c++17", "-w"]


def compiled_by_pycuda(texts, folder):
    """Put the texts, (source, arch), into PyCUDA's cache in `folder`, several at a time. The seconds that one took."""
    from pycuda.compiler import compile

    def one(text):
        begin = time.perf_counter()
        compile(text[0], options=[*OPTIONS], arch=text[1], cache_dir=str(folder), include_dirs=pc.include_dirs())
        return time.perf_counter() - begin

    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(one, texts))


@pytest.mark.gpu
@needs_nvcc
def test_every_portable_kernel_by_source_module(tmp_path):
    """Compiled as people compile, and launched in place of ours: the same bits."""
    from pycuda.compiler import SourceModule

    device, texts = get_device("cuda:0"), {}
    with device:
        chosen = cases(device, 400, portable)
        plans = [pc.Plan(problem, device, config=config) for problem, config in chosen]
        made = []
        for plan in plans:
            arrays = Arrays(plan.problem)
            expected, out = arrays.called(plan), arrays.out()
            made.append((plan, arrays, expected, out, arrays.kernels(plan, out)))
            texts |= {(pc.source(k, flat=True), k.arch): k for k in made[-1][-1] if portable(k.launch)}
        files = {k.launch.file or k.name for k in texts.values()}
        rest = {}
        for family in families("sm_90a"):  # kernels that no plan launches, or none as small as these
            some = [text for text, defines in zip(family.sources(), family, strict=True) if "INDEX_64" in defines]
            if not reference.all_texts:
                some = some[: family.file not in files and family.file not in rest.values()]
            rest |= {plain(text, flat=True): family.file for text in some}
        plain_arch = device.queue.arch
        compiled_by_pycuda([*texts, *((text, plain_arch) for text in rest)], tmp_path)
        modules = {
            text: SourceModule(text[0], options=OPTIONS, arch=text[1], cache_dir=str(tmp_path), include_dirs=pc.include_dirs())
            for text in texts
        }
        launched = set()
        for plan, arrays, expected, out, kernels in made:
            for k in kernels:
                module = modules.get((pc.source(k, flat=True), k.arch))
                function = k.function if module is None else module.get_function(k.name)
                if module is not None:
                    launched.add(k.launch.file or k.name)
                    if k.shared:
                        function.set_attribute(sys.modules["pycuda.driver"].function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, k.shared)
                function(*k.args, grid=k.grid, block=k.block, shared=k.shared)
            assert np.array_equal(bits(out), expected), (plan, arrays.problem)
    portable_ones = {"direct_tile", "direct_batched", "direct_gemm", "direct_dgrad", "direct_wgrad", "depthwise_nhwc", "fft_blocks_rows"}
    assert launched >= portable_ones
    assert set(rest.values()) >= {"batch_norm", "copy_strided"}


@pytest.mark.gpu
def test_launches_by_hand_in_a_stream_and_in_a_graph():
    """Kernels of all kinds, those with tensor maps and packed filters among them, with a workspace of the caller's."""
    device = get_device("cuda:0")
    with device:
        drv = importlib.import_module("pycuda.driver")
        chosen = cases(device, 250, lambda launch: True)
        maps = [launch.maps for problem, config in chosen for launch in launches_of(problem, config, device)]
        assert any(maps) or device.capability < (9, 0)
        stream = drv.Stream(1)
        for problem, config in chosen:
            plan, arrays = pc.Plan(problem, device, config=config), Arrays(problem)
            expected, out = arrays.called(plan), arrays.out()
            workspace = drv.mem_alloc(max(plan.workspace_bytes, 1))
            kernels = arrays.kernels(plan, out, workspace=workspace)
            drv.Context.synchronize()
            for k in kernels:
                k.function(*k.args, grid=k.grid, block=k.block, shared=k.shared, stream=stream)
            stream.synchronize()
            assert np.array_equal(bits(out), expected), plan
            graph = Graph(stream)
            with graph.capture():
                for k in kernels:
                    k(stream)
            for _ in range(2):
                drv.memset_d8(int(out.gpudata), 255, out.nbytes)
                drv.Context.synchronize()
                graph.replay()
                stream.synchronize()
                assert np.array_equal(bits(out), expected), plan


@pytest.mark.gpu
@needs_nvcc
def test_a_kernel_is_taken_out_and_changed(tmp_path):
    """The example of docs/howto/pycuda.md: the absolute value of every result, by one changed line."""
    from pycuda.compiler import SourceModule

    device = get_device("cuda:0")
    with device:
        plan, arrays = pc.Plan(TILE, device, config=Tile(8, 32, 4)), Arrays(TILE)
        expected, out = arrays.called(plan).view(np.float32), arrays.out()
        (k,) = arrays.kernels(plan, out)
        page = (KERNEL_DIR.parent / "docs" / "howto" / "pycuda.md").read_text()
        before, after = re.search(r'before, after = "(.*)", "(.*)"\n', page).groups()
        assert k.source.count(before) == 1
        module = SourceModule(k.source.replace(before, after), options=OPTIONS, include_dirs=pc.include_dirs(), cache_dir=str(tmp_path))
        module.get_function(k.name)(*k.args, grid=k.grid, block=k.block, shared=k.shared)
        assert (expected < 0).any() and np.array_equal(bits(out).view(np.float32), abs(expected))


@pytest.mark.gpu
def test_what_kernels_refuses():
    device = get_device("cuda:0")
    with device:
        plan, arrays = pc.Plan(TILE, device), Arrays(TILE)
        x, w, *_ = arrays.operands
        out = arrays.out()
        with pytest.raises(pc.ConvArgumentError, match="input does not lie as the kernels read it"):
            plan.kernels(arrays.laid_out(x.get(), (0, 2, 3, 1)), w, out=out)
        with pytest.raises(pc.ConvArgumentError, match="this plan takes input of shape"):
            plan.kernels(w, w, out=out)
        with pytest.raises(pc.ConvArgumentError, match="out"):
            plan.kernels(x, w, out=w)
        with pytest.raises(TypeError, match="pass arrays of one kind"):
            plan.kernels(x, w, out=out.get())
        big = pc.Plan(pc.ConvProblem.gradient("weight", 2, (8, 8, 16, 32), (8, 8, 3, 3), (8, 8, 14, 30)), device)
        if big.workspace_bytes:
            arrays = Arrays(big.problem)
            for workspace, match in ((x[0, 0, 0], "workspace must have"), (8, "workspace must start at a multiple of 256")):
                with pytest.raises(pc.ConvArgumentError, match=match):
                    arrays.kernels(big, arrays.out(), workspace=workspace)
        arrays = Arrays(TILE)
        assert np.array_equal(arrays.called(plan), arrays.called(plan))


@pytest.mark.gpu
@needs_nvcc
def test_pycuda_compiles_all_kernels_if_it_is_chosen(tmp_path):
    code = """
        import numpy as np, pycuda_conv as pc
        from pycuda_conv.runtime.compiler import compiler
        from pycuda_conv.runtime import driver
        rng = np.random.default_rng(0)
        for x, w, more in (((2, 8, 9, 9), (8, 8, 3, 3), {}), ((2, 8, 9, 9), (8, 1, 3, 3), {"groups": 8}), ((1, 64, 16, 16), (64, 64, 3, 3), {})):
            x, w = rng.standard_normal(x).astype("f"), rng.standard_normal(w).astype("f")
            got = pc.conv2d(x, w, padding=1, **more)
            assert abs(got - pc.conv2d(x.astype("d"), w.astype("d"), padding=1, **more)).max() < 1e-3
        print(compiler(driver.newest()).name)
    """
    more = {"PYCUDA_CONV_COMPILER": "pycuda", "PYCUDA_CONV_CACHE_DIR": str(tmp_path), "PYCUDA_DEFAULT_NVCC_FLAGS": "-lineinfo"}
    assert python(textwrap.dedent(code), os.environ, **more) == "pycuda\n"


@pytest.mark.gpu
@needs_nvcc
def test_the_founding_program():
    program = KERNEL_DIR.parent / "examples" / "notebook.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 5 and "WRONG" not in done.stdout


@pytest.mark.gpu
def test_by_hand_in_a_context_of_its_own():
    """With pycuda.autoinit, in a process of its own: kernels in a stream and a graph, bound plans, and what is refused."""
    code = """
        import numpy as np
        import pycuda.autoinit, pycuda.driver as drv
        from pycuda import gpuarray
        import pycuda_conv as pc
        from pycuda_conv.runtime.graph import Graph

        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape).astype("f")
        for groups, x, w in ((1, draw(2, 64, 16, 16), draw(64, 64, 3, 3)), (8, draw(2, 8, 16, 32), draw(8, 1, 3, 3))):
            x_gpu, w_gpu = gpuarray.to_gpu(x), gpuarray.to_gpu(w)
            plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1, groups=groups))
            y = pc.conv2d(x_gpu, w_gpu, padding=1, groups=groups)
            exact = pc.conv2d(x.astype("d"), w.astype("d"), padding=1, groups=groups)
            assert abs(y.get() - exact).max() < 1e-4
            expected, out, stream = plan(x_gpu, w_gpu).get(), gpuarray.zeros_like(y), drv.Stream()
            kernels = plan.kernels(x_gpu, w_gpu, out=out, workspace=drv.mem_alloc(max(plan.workspace_bytes, 1)))
            drv.Context.synchronize()
            for k in kernels:
                k(stream)
            stream.synchronize()
            assert np.array_equal(out.get(), expected)
            graph = Graph(stream)
            with graph.capture():
                for k in kernels:
                    k(stream)
            out.fill(0)
            drv.Context.synchronize()
            graph.replay()
            stream.synchronize()
            assert np.array_equal(out.get(), expected)
            assert np.array_equal(plan.bind(w_gpu)(x_gpu).get(), expected)
        for call, words in (
            (lambda: pc.dlpack(x_gpu), "lies in a CUDA context of its own"), (lambda: plan.kernels(x, w, out=exact), "in a GPU's memory"),
        ):
            try:
                call()
            except (TypeError, ValueError) as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)
        print("as expected")
    """
    assert python(textwrap.dedent(code), os.environ) == "as expected\n"


@pytest.mark.gpu
def test_functions_are_made_in_the_context_of_the_arrays():
    code = """
        import numpy as np
        import pycuda.driver as drv
        from pycuda import gpuarray
        import pycuda_conv as pc
        drv.init()
        primary = drv.Device(0).retain_primary_context()
        primary.push()
        x, w, y = (gpuarray.zeros(shape, np.float32) for shape in ((1, 2, 5, 5), (3, 2, 3, 3), (1, 3, 3, 3)))
        plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape))
        assert plan.kernels(x, w, out=y)
        other = drv.Device(0).make_context()
        try:
            plan.kernels(x, w, out=y)
        except ValueError as error:
            assert "functions are made in PyCUDA's current context" in str(error), error
        else:
            raise AssertionError
        other.pop()
        drv.Context.pop()
        print("as expected")
    """
    assert python(textwrap.dedent(code), os.environ) == "as expected\n"
