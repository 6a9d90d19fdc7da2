"""Kernels that take sizes as arguments: a new size of a known layer compiles nothing, and all problems share few texts."""

import math
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import test_epilogue as epilogue
import torch
from filters import Filter
from modes import asked
from reference import DTYPES, dgrad, fprop, reference, run

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan, background, engines
from pycuda_conv import plan as plan_module
from pycuda_conv.engines.direct import direct, patch_wgrad
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.direct.configs import tiles_of
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.engines.nn.batch_norm import Pixels
from pycuda_conv.runtime import get_device
from pycuda_conv.tools import families

GPU = SimpleNamespace(capability=(9, 0), multiprocessors=132, backend="cuda", name="cuda:0", model="")


def texts(problem, config, device=GPU) -> set[str]:
    """The texts of the launches of `config`."""
    return {launch.source() for step in engines.schedule(problem, config, device).whole for launch in step}


# ---- on a device


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.integers(-4, 5, shape).astype("float32") for shape in shapes]


def forward(c, k, filter, **options):
    return lambda n, size: (pc.conv2d, arrays((n, c, *size), (k, c // options.get("groups", 1), *filter)), options)


def transposed(n, size):
    return pc.conv_transpose2d, arrays((n, 6, *size), (6, 9, 3, 3)), {"stride": 2, "padding": 1}


def line(n, size):
    return pc.conv1d, arrays((n, 4, size[0] * size[1]), (8, 4, 5)), {"padding": 2}


def volume(n, size):
    return pc.conv3d, arrays((n, 3, 4, *size), (8, 3, 2, 3, 3)), {"padding": 1}


FUNCTIONS = {
    "dense": forward(6, 9, (3, 3), padding=1), "strided": forward(6, 9, (3, 5), stride=2), "pointwise": forward(6, 9, (1, 1)),
    "grouped": forward(8, 8, (3, 3), groups=4, dilation=2), "depthwise": forward(5, 10, (3, 3), groups=5, padding=1),
    "depthwise, wide": forward(5, 5, (9, 9), groups=5, padding=4), "transposed": transposed, "line": line, "volume": volume,
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_new_size_of_a_known_layer_compiles_nothing(device, name, constants, monkeypatch):
    """By general kernels, and by those that know their layer's constants."""
    place = get_device(device)
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", str(int(constants)))
    monkeypatch.setattr(type(place), "constants_pay", constants)
    plan_module.cached_plan.cache_clear()
    kept = place._programs if device == "opencl" else place._functions
    r = random.Random(name)

    def call():
        function, (x, w), options = FUNCTIONS[name](r.randrange(1, 4), (r.randrange(16, 44), r.randrange(16, 44)))
        got = function(x, w, device=device, **options)
        assert np.array_equal(got, reference(function is pc.conv_transpose2d, x.ndim - 2, x, w, **options))

    # tiles follow from sizes, but there are few
    for _ in range(5):
        call()
    known = len(kept)
    for _ in range(4):
        call()
    others = 1 if name.startswith("depthwise") else 0
    if device != "opencl":
        others += 3  # a GPU's planner knows more tiles
    assert len(kept) - known <= others


# ---- by texts


def sizes(count: int, seed: int = 0):
    r = random.Random(seed)
    for _ in range(count):
        yield r.randrange(1, 65), (r.randrange(9, 300), r.randrange(9, 300))


LAYERS_OF_ALL_KINDS = [
    (1, 6, 9, (5,), {"padding": 2}), (2, 6, 9, (3, 3), {"padding": 1}), (2, 8, 24, (3, 5), {"groups": 4, "stride": 2}), (3, 3, 8, (2, 3, 3), {"padding": 1}),
    (2, 32, 32, (5, 5), {"groups": 32, "padding": 2}), (2, 16, 32, (3, 3), {"groups": 16, "dilation": 2}),
]  # fmt: skip


@pytest.mark.parametrize("of", ["fprop", "input", "weight"])
@pytest.mark.parametrize(("rank", "c", "k", "taps", "options"), LAYERS_OF_ALL_KINDS)
def test_kernels_that_know_a_layer_do_not_know_its_sizes(rank, c, k, taps, options, of):
    """They have one text a layer and configuration, whatever the batch and the size of its images."""
    found = {}
    for n, size in sizes(12):
        shapes = (n, c, *(*size, 7)[:rank]), (k, c // options.get("groups", 1), *taps)
        problem = ConvProblem.forward(rank, *shapes, **options)
        if of != "fprop":
            problem = ConvProblem.gradient(of, rank, *shapes, problem.result_shape, **options)
        config = {"fprop": direct.Batched(), "input": direct.Dgrad(), "weight": direct.Wgrad(TAPS=5, SLICES=min(n, 2))}[of]
        configs = [config, *(tiles_of(GPU) if of == "fprop" and c == options.get("groups") else ())]
        for one in configs:
            if direct.refusal(problem.launched, one) is None:
                found.setdefault(replace(one, SLICES=1) if of == "weight" else one, set()).add(
                    background.with_constants(engines.schedule(problem, one, GPU)).whole[0][0].source()
                )
    assert found and all(len(texts) == 1 for texts in found.values())


def problems(count: int, seed: int):
    """Random problems of all kinds, small enough that no other engine competes."""
    r = random.Random(seed)
    for _ in range(count):
        groups = r.choice((1, 1, 2, 8, 32))
        c, k = groups * r.randrange(1, 9), groups * r.randrange(1, 9)
        rank = r.choice((1, 2, 2, 3))
        taps = tuple(r.choice((1, 2, 3, 3, 4, 5, 7, 11)) for _ in range(rank))
        size = tuple(r.randrange(f, {1: 4000, 2: 90, 3: 24}[rank]) for f in taps)
        shapes = (r.randrange(1, 40), c, *size), (k, c // groups, *taps)
        stride, padding = r.randrange(1, 4), tuple(r.randrange(0, f) for f in taps)
        options = {"stride": stride, "padding": padding, "groups": groups, "dtype": r.choice(DTYPES), "layout": r.choice(("NCHW", "NHWC"))}
        problem = ConvProblem.forward(rank, *shapes, **options)
        of = r.choice(("fprop", "input", "weight"))
        yield problem if of == "fprop" else ConvProblem.gradient(of, rank, *shapes, problem.result_shape, **options)


def test_random_problems_share_a_bounded_list_of_texts():
    """Of 800 problems, those of the second half need few texts that those of the first do not."""
    found, after = set(), []
    for problem in problems(800, 1):
        launched = problem.launched
        for engine in (direct, direct_gemm, patch_wgrad):
            chosen = engine.choose(launched, GPU) if launched.layout in engine.LAYOUTS else None
            if chosen is not None:
                found |= texts(problem, chosen[1])
        after.append(len(found))
    assert after[-1] <= 180 and after[-1] - after[399] <= 0.4 * after[399]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_batch_norms_of_all_sizes_share_a_text_for_whole_vectors_and_one_for_others(layout):
    r, found = random.Random(2), set()
    for _ in range(30):
        pixels = Pixels("float32", layout, r.randrange(1, 40), r.randrange(1, 300), r.randrange(2, 4000))
        for launches, _ in (
            batch_norm.forward(pixels, 132, "relu"), batch_norm.backward(pixels, 132, "relu", True), batch_norm.channel_sums(pixels, 132)
        ):
            found |= {launch.source() for launch in launches}
    assert len(found) == 3  # two that walk arrays, one that adds slices


LAYERED = [
    (fprop((2, 3, 40, 50), (6, 1, 9, 4), groups=3, padding=2), direct.Tile(8, 32, 2)), (fprop((2, 3, 20, 21), (6, 3, 5, 2), stride=2), direct.Batched()),
    (fprop((2, 3, 20, 21), (6, 3, 11, 7), padding=3), direct.Batched(BLOCK_C=1)), (dgrad((2, 6, 9, 8), (6, 5, 4, 2), stride=(3, 2)), direct.Dgrad()),
    (fprop((2, 3, 300), (6, 1, 15), groups=3, padding=7), direct.Tile(1, 256, 1)), (fprop((2, 4, 9, 8), (4, 1, 3, 2), groups=4), direct.Single()),
    (fprop((2, 6, 90), (8, 3, 5), groups=2, dilation=2), direct.Batched(BLOCK_K=4)), (fprop((1, 5, 5, 6, 7), (4, 5, 2, 3, 3), padding=1), direct.Batched()),
    (fprop((2, 6, 20, 21), (6, 6, 3, 2)), direct.Batched(BLOCK_C=2, SPLIT=2)), (dgrad((2, 6, 9, 8), (6, 5, 4, 2), stride=3), direct.Dgrad(BLOCK_K=2, SPLIT=3)),
    (Filter((3, 4, 12, 13), (8, 1, 3, 2), groups=4, stride=(2,), layout="NCHW"), direct.Wgrad(TAPS=6)),
    (Filter((2, 2, 5, 6, 7), (2, 1, 2, 2, 2), groups=2, layout="NCHW"), direct.Wgrad(TAPS=8)),
    (Filter((3, 4, 12, 13), (4, 1, 5, 3), groups=4, layout="NCHW"), direct.Wgrad(TAPS=4, SLICES=2)),
    (Filter((2, 3, 40), (3, 1, 5), groups=3, dilation=(2,), layout="NCHW"), direct.Wgrad(TAPS=5)),
    (Filter((3, 4, 12, 13), (4, 1, 3, 3), groups=4, padding=(1,), layout="NCHW"), direct.Wgrad(TAPS=9)),
    (dgrad((2, 4, 30), (4, 3, 3), stride=2), direct.Dgrad(BLOCK_C=2)), (dgrad((2, 4, 20, 30), (4, 1, 5, 3), padding=(2, 0), groups=4), direct.Tile(8, 32, 2)), (dgrad((1, 4, 3, 4, 5), (4, 3, 2, 3, 3), stride=2, padding=1), direct.Dgrad()),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), LAYERED, ids=[str(case) for case, _ in LAYERED])
def test_the_constants_of_a_layer_change_no_bit(device, case, config, request, monkeypatch):
    one_of_each = direct.Single(), direct.Tile(1, 256, 1), direct.Batched(BLOCK_K=4), direct.Dgrad(BLOCK_C=2), direct.Wgrad(TAPS=5)
    if config in one_of_each:
        request.getfixturevalue("optimised")
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "1")
    plan = Plan(asked(case, "fp32"), device, config=config)
    launch = plan.schedule.whole[0][0]
    arguments = launch.arguments._asdict()
    constants = {name: value for name, value in launch.layer.items() if name not in ("LAYER", "AXES", "TAPS", "ALL_TAPS")}
    assert constants and all(arguments[name.lower()] == value for name, value in constants.items())
    operands = case.normals("float32")
    general = run(plan, *operands)
    plan.specialise()
    made = background.with_constants(plan.schedule).whole[0][0]
    assert made.defines.items() >= launch.layer.items() and made.source() != launch.source()
    assert run(plan, *operands).tobytes() == general.tobytes()


#: Of each engine on a Hopper GPU; on OpenCL, of the direct kernels and those of depthwise layers. Precisions as they are asked for.
FINISHED = [
    (fprop((1, 64, 10, 11), (64, 64, 3, 3), padding=1), "float32", "NCHW", "fp32"), (fprop((2, 128, 16, 16), (64, 128, 1, 1)), "float32", "NCHW", "fp32"),
    (fprop((3, 64, 20, 24), (96, 64, 3, 3), padding=1), "float16", "NHWC", "fp32"), (fprop((1, 64, 20, 24), (96, 64, 3, 3), stride=2), "float32", "NHWC", "tf32"),
    (fprop((1, 3, 64, 64), (32, 3, 7, 7), stride=2, padding=3), "float32", "NCHW", "tf32"), (fprop((2, 64, 30, 30), (3, 64, 3, 3), padding=1), "float16", "NHWC", "fp32"),
    (fprop((2, 64, 20, 24), (64, 8, 3, 3), padding=1, groups=8), "float16", "NHWC", "fp32"), (fprop((2, 32, 20, 24), (32, 1, 3, 3), padding=1, groups=32), "float32", "NHWC", "fp32"),
    (fprop((2, 32, 20, 24), (32, 1, 5, 7), padding=2, groups=32), "float32", "NHWC", "fp32"), (dgrad((2, 64, 10, 12), (64, 64, 3, 3), stride=2), "float32", "NCHW", "fp32"),
]  # fmt: skip


#: Of what there is to finish, half with each, by turns.
ENDS = [(*one, parts) for i, one in enumerate(FINISHED) for parts in (("residual", "scale and relu"), ("relu", "all"))[i % 2]]


@pytest.mark.parametrize(("case", "dtype", "layout", "precision", "parts"), ENDS, ids=["-".join(map(str, one)) for one in ENDS])
def test_constants_of_what_finishes_a_sum_change_no_bit(device, case, dtype, layout, precision, parts, monkeypatch):
    case = replace(case, bias=parts != "residual")
    problem, place = replace(epilogue.finishing(case.problem(dtype), parts), layout=layout, precision=precision), get_device(device)
    if place.backend == "opencl" and dtype == "float16":
        pytest.skip("OpenCL has no float16 kernels")
    if parts == "all":
        problem = replace(problem, activation="gelu")
    operands = epilogue.arrays(case, dtype, parts, integers=False)
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "0")
    plan = Plan(problem, place)
    general = run(plan, *operands)
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "1")
    plan.specialise()
    assert not background.has_constants(plan.schedule) or any("LAYER" in launch.defines for launch in background.launches(plan.loaded))
    assert run(plan, *operands).tobytes() == general.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("family", families.FAMILIES)
def test_constants_change_no_bit_of_random_problems(family, monkeypatch):
    """17 of each family: 204 in all."""
    gpu, first = get_device("cuda:0"), 17 * families.FAMILIES.index(family)

    def run(plan, operands):
        out = torch.full(plan.result_shape, math.nan, dtype=operands[0].dtype, device=gpu.name)
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=gpu.name)
        torch.cuda.synchronize()
        with gpu:
            plan.launch([0 if a is None else a.data_ptr() for a in (*operands, out, workspace)])
        torch.cuda.synchronize()
        assert not out.isnan().any(), plan
        return out.view(torch.uint8)

    for problem in islice(families.draw(20, 17), first, first + 17):
        monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "0")
        plan, dtype = Plan(problem, gpu), getattr(torch, problem.dtype)
        operands = [None if shape is None else torch.randn(shape, dtype=dtype, device=gpu.name) for shape in problem.operand_shapes]
        general = run(plan, operands)
        monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "1")
        plan.specialise()
        assert torch.equal(run(plan, operands), general), plan
