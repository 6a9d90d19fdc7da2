"""The text of the kernels for Hopper, run on the CPU (simt): its barriers, rings, descriptors, addresses and sums, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from alike import check_epilogue
from modes import asked, dtype_of, ids_of
from reference import ACTIVATIONS, Case, assert_close, assert_exact, dgrad, fprop

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.engines.schedule import Moments

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


def check(case: Case, mode: str, config, seeds=(1, 2, 3), **options) -> None:
    arrays = case.integers(dtype_of(mode))
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=seeds, **options), case.reference(*arrays), config)


# ---- hopper/dense.cu, transpose_filter.cu

@pytest.mark.parametrize(
    ("case", "mode", "config"),
    [
        (dgrad((1, 16, 5, 4), (16, 24, 3, 3), padding=1), "fp16 last", DenseNhwc(128, 64, 3)), (fprop((1, 80, 5, 4), (24, 80, 1, 2)), "bf16 last", DenseNhwc(64, 32, 3)),
        (dgrad((1, 16, 5, 4), (16, 24, 1, 1)), "tf32 last", DenseNhwc(64, 32, 2)), (fprop((1, 56, 5, 4), (24, 56, 2, 1)), "tf32 last", DenseNhwc(64, 32, 4, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_as_narrow_as_a_tap_s_last_channels(case, mode, config):
    """Of a filter that lies K-major or MN-major, or is turned, whole sums and parts of them."""
    check(case, mode, config, (1, 2), constants=True, filter_last=True)


# ---- hopper/gemm.cu, pack.cu, direct/gemm.cu, direct/reduce.cu


@pytest.mark.parametrize(
    "case", [fprop((2, 6, 9), (8, 3, 4), stride=2, groups=2), dgrad((2, 24, 5, 6), (24, 12, 3, 3), stride=2, padding=1)], ids=str
)
def test_plain_products_read_a_filter_with_its_channels_last(case):
    check(case, "fp32 last", Gemm(64, 64, 16, 8, 4, 4), (1,), filter_last=True)


# ---- what finishes a sum

FINISHED = [
    (fprop((3, 32, 9, 11), (72, 32, 3, 3), padding=1), "tf32 last", DenseNhwc(64, 64, 4)), (fprop((3, 100, 5, 16), (70, 100, 1, 1)), "fp32", Pointwise(32, 2, 3)),
    (fprop((2, 24, 9, 8), (32, 24, 3, 3), padding=1), "fp16", ImplicitGemm(64, 64, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids_of(FINISHED))
def test_kernels_that_know_the_layer_finish_a_sum(case, mode, config):
    """Bias, scale, residual and ReLU; then other activations, with a residual and without."""
    number = FINISHED.index((case, mode, config))
    check_epilogue(
        case, mode, config, [ACTIVATIONS[(2 * number + i) % len(ACTIVATIONS)] for i in range(2)], partial(simt.computed, constants=True)
    )


# ---- batch_norm.cu, with the loads that only CUDA has


def launched(made, *arrays):
    """What launches leave in these arrays, or None, where a number stands for so many bytes."""
    (steps, workspace), given = made, []
    for array in arrays:
        given.append(
            None if array is None else np.full(array, 0xFF, np.uint8) if isinstance(array, int) else array.reshape(-1).view(np.uint8)
        )
    memory = SimpleNamespace(buffers=[*given, np.full(workspace, 0xFF, np.uint8)])
    simt.run([steps], memory, 1)
    return memory.buffers


@pytest.mark.parametrize("redone", [False, True], ids=["", "results were computed again"])
@pytest.mark.parametrize("many", [1, 1000], ids=["by clusters", "by blocks"])
def test_statistics_of_moments_that_a_convolution_noted(redone, many, monkeypatch):
    """The launch that adds them, and counts the batch; or that reads the results."""
    monkeypatch.setattr(batch_norm, "MANY_SLICES", many)
    pixels, per = batch_norm.Pixels("bfloat16", "NHWC", 3, 24, 50), 64
    given = (np.random.default_rng(0).standard_normal((pixels.N * pixels.plane, pixels.K)) + 1).astype(pixels.dtype)
    y = given.astype(float)
    parts = np.array(
        [[part.mean(0), ((part - part.mean(0)) ** 2).sum(0)] for part in (y[i : i + per] for i in range(0, len(y), per))], np.float32
    )
    workspace = np.concatenate([np.zeros(64, np.float32), np.nan * parts.ravel() if redone else parts.ravel()])
    workspace.view(np.int32)[1] = redone  # the second block has
    moments = Moments(1, len(y), per, pixels.K, parts=256, redone=0, blocks=2)
    (launch,), nothing = batch_norm.statistics(pixels, 3, 1e-5, 0.1, moments)
    empty = np.full(4 * pixels.K, 0xFF, np.uint8)
    buffers = [given.view(np.uint8), None, empty, empty.copy(), None, None, np.array([41]).view(np.uint8), workspace.view(np.uint8)]
    simt.run([[launch]], SimpleNamespace(buffers=buffers), 1)
    assert nothing == 0 and buffers[6].view(np.int64)[0] == 42
    assert_close(buffers[2].view("f"), y.mean(0), np.full(pixels.K, 1e-6))
    invstd = 1 / np.sqrt(y.var(0) + 1e-5)
    assert_close(buffers[3].view("f"), invstd, 1e-5 * invstd)


# ---- direct/reduce.cu


def test_the_parts_of_two_sums_are_added_by_one_launch():
    rng, problems = np.random.default_rng(0), (fprop((2, 3, 7, 9), (5, 3, 3, 3)), fprop((1, 3, 6, 6), (70, 3, 1, 1)))
    parts, results, launches = [], [], []
    for i, (case, split) in enumerate(zip(problems, (4, 40), strict=True)):
        problem = replace(case.problem(), has_bias=False)
        size = int(np.prod(problem.result_shape))
        parts.append(rng.standard_normal((split, size)).astype("f"))
        launches.append(replace(split_sum.reduce_launch(problem, split, 2 * i), buffers=(2 * i, 4, 4, 4, 2 * i + 1)))
        results.append(4 * size)
    given = parts[0], results[0], parts[1], results[1], None
    apart = launched((launches, 0), *given)
    together = split_sum.reduce_two(*launches)
    assert together.grid == sum(one.grid for one in launches)
    assert all(map(np.array_equal, launched(([together], 0), *given)[1:4:2], apart[1:4:2]))
    of_other_type = replace(launches[1], defines={**launches[1].defines, "DTYPE": 64})
    finished = replace(launches[0], arguments=launches[0].arguments._replace(has_bias=1))
    assert split_sum.reduce_two(launches[0], of_other_type) is split_sum.reduce_two(finished, launches[1]) is None


# ---- cast.cu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(5, 7, 3, 3), (40, 1, 3), (9, 4, 1, 1), (1, 1, 1)], ids=str)
def test_casts(shape, dtype):
    wide = np.random.default_rng(0).standard_normal(shape).astype("f")
    size = wide.size
    rounded = wide.astype(dtype)
    made = launched(([casting.narrow(dtype, (size, 0, 1))], 0), wide, 2 * size)[1].view(dtype)
    assert np.array_equal(made, rounded.ravel())
    back = launched(([casting.widen(dtype, (size, 0, 1))], 0), rounded, 4 * size)[1].view("f")
    assert np.array_equal(back, rounded.astype("f").ravel())
    last = launched(([casting.widen_filter(dtype, shape, 0, 1)], 0), rounded, 4 * size)[1].view("f")
    assert np.array_equal(last, np.moveaxis(rounded.astype("f"), 1, -1).ravel())
    other, third = np.arange(1030, dtype="f"), np.arange(3, dtype="f")
    for arrays in ((wide, other, third), (third, wide)):
        parts = [(array.size, 2 * i, 2 * i + 1) for i, array in enumerate(arrays)]
        buffers = [one for array in arrays for one in (array, 2 * array.size)]
        found = launched(([casting.narrow(dtype, *parts)], 0), *buffers)
        assert all(np.array_equal(found[2 * i + 1].view(dtype), array.astype(dtype).ravel()) for i, array in enumerate(arrays))
        given = [one for array in arrays for one in (array.astype(dtype), 4 * array.size)]
        found = launched(([casting.widen(dtype, *parts)], 0), *given)
        assert all(np.array_equal(found[2 * i + 1].view("f"), array.astype(dtype).astype("f").ravel()) for i, array in enumerate(arrays))


@pytest.mark.parametrize(
    ("read", "said"),
    [("x[-1]", "reads 4 bytes at -4 of buffer 0, which has 36"), ("x[9]", "reads 4 bytes at 36 of buffer 0, which has 36"), ("float4(*(const float4*)(x + 1)).x", "reads 16 bytes at .*, which is no multiple of 16")],
)  # fmt: skip
def test_reads_beside_an_array_and_askew_are_found(read, said):
    source = (
        f'#include "core/launch.cuh"\nextern "C" __global__ void reads(const float* x, float* y) {{ AFTER_LAST_LAUNCH y[0] = {read}; }}'
    )
    step = SimpleNamespace(kernel="reads", source=lambda: source, maps=(), buffers=(0, 1), numbers=(), grid=1, block=32, shared=0)
    with pytest.raises(simt.Wrong, match=said):
        simt.run([[step]], SimpleNamespace(buffers=[np.zeros(36, np.uint8), np.zeros(4, np.uint8)]))
