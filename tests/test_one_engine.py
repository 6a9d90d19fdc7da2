"""What is asked of one engine alone, and of no other: rules of its planner, and numbers that its arithmetic finds hard."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from cases import dense as of_dense
from cases import dmma as of_dmma
from cases import gather as of_gather
from cases import pointwise as of_pointwise
from cases import via_nhwc as of_via
from cases import wgrad as of_wgrad
from filters import Filter
from hypothesis import given
from hypothesis import strategies as st
from modes import H200, asked, bound, ids_of, program_of
from on_gpu import Arrays
from ranges import data
from reference import EPS, TINY, assert_close, assert_exact, dgrad, fprop

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.compose import via_nhwc as vn
from pycuda_conv.engines.compose.via_nhwc import ViaNchw
from pycuda_conv.engines.depthwise import toeplitz
from pycuda_conv.engines.depthwise.toeplitz import DepthwiseToeplitz
from pycuda_conv.engines.hopper import box_tiles, pointwise, wgrad
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.engines.mma import dmma, grouped_nhwc
from pycuda_conv.engines.mma.dmma import Dmma
from pycuda_conv.engines.mma.few_inputs import FewInputs
from pycuda_conv.engines.mma.grouped_nhwc import GroupedNhwc
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.target import Target

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


# ---- how many launches there are


def _gather(number: int, mode: str):
    case = of_gather.SHAPES[number]
    return case, mode, next(config for one, m, config in of_gather.EVERY if (one, m) == (case, mode))


def _dense(number: int, mode: str):
    return of_dense.SHAPES[number], mode, of_dense.tiles(of_dense.SHAPES[number], mode)[0]


_FEW, _MANY = (dgrad(shape, (shape[1], 96, 1, 1)) for shape in ((2, 640, 14, 14), (64, 640, 56, 56)))
#: A run, and how many launches it takes for a filter in C order, and for one whose channels are last in memory.
LAUNCHES = [
    (_dense(0, "fp16 last"), 2, 1), (_dense(0, "tf32 last"), 2, 1), (_dense(10, "tf32 last"), 2, 1), (_dense(1, "fp16 last"), 1, 1),
    (_gather(0, "fp16 last"), 2, 1), (_gather(2, "tf32 last"), 1, 1), (_gather(8, "tf32 last"), 2, 2),  # 1x1; rows of 588 bytes
    # dense turns a filter itself by small tiles, where each multiprocessor meets few stages
    ((_FEW, "tf32 last", DenseNhwc(64, 64, 6)), 1, None), ((_FEW, "tf32 last", DenseNhwc(64, 32, 4, 8)), 1, None),
    ((_FEW, "tf32 last", DenseNhwc(128, 64, 4)), 2, None), ((_MANY, "tf32 last", DenseNhwc(64, 64, 6)), 2, None),
    ((fprop((2, 24, 8, 8), (40, 24, 1, 1)), "fp64", Dmma()), 1, None), ((dgrad((2, 40, 8, 8), (40, 24, 1, 1)), "fp64 last", Dmma()), 1, None),
]  # fmt: skip


@pytest.mark.parametrize(("run", "whole", "last"), LAUNCHES, ids=ids_of([run for run, *_ in LAUNCHES]))
def test_as_few_launches_as_there_can_be(run, whole, last):
    case, mode, config = run
    program = engines.schedule(asked(case, mode), config, H200)
    assert sum(map(len, program.whole)) == whole and (last is None or sum(map(len, program.filter_last)) == last)


# ---- hopper/pointwise.cu


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 200))
def test_a_tile_has_no_more_boxes_than_its_round_of_tiles_needs(boxes, across, multiprocessors):
    busy, rounds = pointwise._busy(boxes, across, multiprocessors, True), math.ceil(across * math.ceil(boxes / 8) / multiprocessors)
    assert 1 <= busy <= 8 and across * math.ceil(boxes / busy) <= rounds * multiprocessors
    assert busy == 1 or across * math.ceil(boxes / (busy - 1)) > rounds * multiprocessors
    assert pointwise._busy(boxes, across, multiprocessors, False) == (busy if rounds == 1 else 8)


@simulated
@pytest.mark.parametrize("mode", ["fp32", "fp32 last"])
def test_subnormals_keep_what_there_is_of_them(mode):
    """What is lost of a subnormal is half a unit of the second limb: 2^-137 / 512."""
    case = of_pointwise.THIN
    x, w = data("subnormals", case)
    for filters in (w, w * np.float32(1e20)):
        lost = 2.0**-145 * case.reference((np.abs(x) < 2.0**-126).astype("f"), np.abs(filters))
        ref, got = case.reference(x, filters), simt.computed(asked(case, mode), Pointwise(64, 2, 3), x, filters, seeds=(1,))
        assert_close(got, ref, lost + bound(case, "fp32", x, filters, None, ref) + case.depth * TINY["float32"])


# ---- mma/few_inputs.cu, mma/grouped_nhwc.cu, depthwise/toeplitz.cu


@simulated
@pytest.mark.parametrize("mode", ["fp32 last", "fp32"])
@pytest.mark.parametrize("which", [0, 1], ids=["input", "filter"])
def test_the_largest_number_of_few_inputs(which, mode):
    """It rounds to Inf, and Inf less Inf is NaN."""
    case = fprop((2, 3, 4, 5), (8, 3, 2, 2), bias=False)
    arrays = [np.full(shape, 2.0**-60, "f") for shape in (case.input_shape, case.weight_shape)]
    arrays[which][1, 1, 1, 1], arrays[1 - which][0] = np.finfo("f").max, 2.0**-10
    expected = case.reference(*arrays)
    assert_close(simt.computed(asked(case, mode), FewInputs(16, 16), *arrays, seeds=(1,)), expected, EPS["float32"] * expected)


def test_the_planner_compares_grouped_tiles_where_a_single_group_is_small():
    for c, k, compared in ((16, 16, True), (32, 32, True), (128, 16, True), (32, 4, False), (64, 48, False)):
        problem = ConvProblem.forward(2, (8, c, 64, 64), (k, c, 3, 3), padding=1, dtype="float16", layout="NHWC")
        assert (next(grouped_nhwc.configs(problem, H200), None) is not None) == compared
        assert grouped_nhwc.refusal(problem, GroupedNhwc(1, 1, 4, 8)) is None


def test_toeplitz_blocks_fit_in_the_shared_memory_of_smaller_gpus():
    """99 KiB of consumers' Ampere, Ada and Blackwell."""
    problem, large = asked(fprop((32, 96, 32, 32), (96, 1, 9, 9), padding=4, groups=96, bias=False), "fp16 last"), DepthwiseToeplitz(110)
    assert large in toeplitz.configs(problem, Target("sm_80")) and large in toeplitz.configs(problem, H200)
    for architecture in ("sm_86", "sm_89", "sm_120"):
        device = Target(architecture)
        assert large not in toeplitz.configs(problem, device)
        with pytest.raises(ValueError, match="it needs 104,608 bytes of shared memory; a block has 101,376"):
            engines.schedule(problem, large, device)
        ((launch,),) = engines.schedule(problem, engines.choose(problem, device), device).whole
        assert launch.shared <= 99 * 1024


# ---- hopper/dense.cu


@given(st.tuples(*[st.integers(1, 90)] * 3), st.integers(1, 70), st.sampled_from((64, 128, 256)))
def test_boxes_cover_a_result(size, images, most):
    box = box_tiles.best_box(size, images, most)
    lengths = *size[::-1], images
    assert math.prod(box.size) <= most
    assert all((count - 1) * own < length <= count * own for own, count, length in zip(box.size, box.counts, lengths, strict=True))


@pytest.mark.parametrize("most", [64, 128])
def test_boxes_of_common_images_are_nearly_full(most):
    for n, images in product((7, 8, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128), (1, 2, 8, 32)):
        assert box_tiles.best_box((1, n, n), images, most).tiles <= 1.16 * math.ceil(images * n * n / most), (n, images)


# ---- hopper/wgrad.cu


@simulated
@pytest.mark.parametrize("seed", range(6))
def test_what_the_planner_chooses_for_a_gradient(seed):
    r = random.Random(seed)
    groups, taps, stride, dilation = r.choice((1, 1, 1, 2)), r.choice((1, 2, 3, 5)), r.choice((1, 1, 2, 3)), r.choice((1, 1, 2))
    c, k, size = r.choice((16, 24, 64, 200)), r.choice((16, 64, 136)), tuple(r.randint(9, 17) for _ in range(2))
    case = Filter((r.randint(1, 4), c * groups, *size), (k * groups, c, taps, taps), (stride,), (taps // 2,), (dilation,), groups)
    problem = asked(case, of_wgrad.KINDS[seed % len(of_wgrad.KINDS)])
    arrays, (_, config) = case.integers(problem.dtype), wgrad.choose(problem.launched, H200)
    assert_exact(simt.computed(problem, config, *arrays, seeds=(seed,), filter_last=case.has_taps), case.reference(*arrays), config)


@pytest.mark.gpu
def test_the_gradient_lies_as_its_filter_does(torch):
    """The first time, when it is made again, and in a compiled step; the bits are those of C order."""
    import pycuda_conv as pc

    last = torch.channels_last
    shapes = (4, 64, 14, 14), (72, 64, 3, 3), (4, 72, 14, 14)
    x, w, dy = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(memory_format=last) for shape in shapes)
    out = torch.empty(w.shape, device="cuda", dtype=w.dtype)
    assert pc.conv2d_weight(x, w.shape, dy, padding=1, out=out) is out
    w.requires_grad_()

    def step(x, w, dy):
        w.grad = None
        pc.conv2d(x, w, padding=1).backward(dy)
        return w.grad

    for again in range(3):
        made = [pc.conv2d_weight(x, w.shape, dy, padding=1), step(x, w, dy), step(x.detach().requires_grad_(), w, dy)]
        made += [torch.compile(pc.conv2d_weight, backend="aot_eager", fullgraph=True)(x, w.shape, dy, padding=1)] if again == 2 else []
        assert all(one.stride() == w.stride() and torch.equal(one, out) for one in made)


# ---- mma/dmma.cu


@simulated
@pytest.mark.parametrize("tile", [(64, 64), (32, 32)])
def test_a_long_sum_of_float64_is_no_chain_of_roundings(tile):
    case = dgrad((1, 512, 15), (512, 16, 2), bias=False)  # lines, whose gradients cuDNN sums by tap
    dy, w, _ = case.normals("float64")
    y, taps = dy[0], w
    products = np.concatenate([taps[:, :, 0, None] * y[:, None, 1:], taps[:, :, 1, None] * y[:, None, :-1]])  # where both taps are
    chain = np.zeros((16, 14))
    for summand in products:
        chain += summand
    exact = sum(np.einsum("kc,kp->cp", taps[:, :, r].astype(np.longdouble), y[:, 1 - r : 15 - r].astype(np.longdouble)) for r in (0, 1))
    got = simt.computed(asked(case, "fp64"), Dmma(*tile), dy, w)
    assert np.linalg.norm((got[0, :, 1:-1] - exact).astype(float)) < 0.5 * np.linalg.norm((chain - exact).astype(float))


@simulated
@pytest.mark.parametrize("name", ["bias", "scale", "residual"])
def test_a_read_of_an_operand_that_is_not_there_is_found(name):
    case, config = fprop((2, 16, 9, 10), (70, 16, 3, 3), padding=1, bias=False), Dmma(64, 64)
    problem, arrays = replace(asked(case, "fp64"), activation="relu"), case.integers("float64")
    memory = simt.Memory(problem, program := program_of(problem, config), *arrays)
    memory.buffers = [None if i in (2, 6, 7) else buffer for i, buffer in enumerate(memory.buffers)]
    with pytest.raises(simt.Wrong):
        simt.run(program.whole, memory, broken=(f"if (p.has_{name})", "if (true)"))


def exact(case, first, second) -> np.ndarray:
    """The convolution to twice float64's precision: of parts of 18 bits each product, and a sum of thousands, is exact."""
    def parts(array):
        found, step = [], 2.0 ** (np.ceil(np.log2(np.abs(array).max())) - 18)
        for _ in range(4):
            part = np.round(array / step) * step
            array, step = array - part, step / 2**18
            found.append(part)
        return found

    a, b = parts(first), parts(second)
    return sum(case.reference(a[i], b[j]).astype(np.longdouble) for i in range(4) for j in range(4 - i))


@pytest.mark.gpu
@pytest.mark.parametrize("run", of_dmma.RUNS[::9], ids=ids_of(of_dmma.RUNS[::9]))
def test_errors_are_those_of_float64(torch, run):
    """Within the elementwise bound of a sum that is rounded twice at most for each product."""
    case, mode, config = run
    first, second, *_ = case.normals("float64", seed=2)
    truth = exact(case, first, second)
    got = Arrays(torch, Plan(replace(asked(case, mode), has_bias=False), "cuda", config=config), first, second).launch()
    depth = case.dy[0] * math.prod(case.dy[2:]) if isinstance(case, Filter) else case.depth
    bound = 2.0**-52 * (2 * math.sqrt(depth) * case.reference(np.abs(first), np.abs(second)) + np.abs(truth).astype(float))
    assert_close((got - truth).astype(float), np.zeros_like(got), bound, f"{case} {config}")


@pytest.mark.gpu
def test_candidates_of_a_layer_with_a_part_of_the_epilogue_are_measured():
    """Tuning hands no memory to kernels for operands that a layer does not have."""
    from pycuda_conv.measure import device_times
    from pycuda_conv.runtime import get_device

    problem = replace(asked(fprop((4, 96, 28, 28), (128, 96, 3, 3), padding=1), "fp64"), activation="relu")
    plans = [Plan(problem, get_device("cuda"), config=Dmma(*tile, split)) for tile in dmma.TILES for split in (1, 2)]
    assert all(us > 0 for us in device_times(plans))


# ---- compose/via_nhwc.py


def test_gradients_of_filters_of_float32_are_made_as_their_arrays_lie():
    """No copy in NCHW is asked for; other types and other directions take no way round."""
    problem, config = asked(of_via.FILTERS[0], "fp32"), of_via.LAST[0][2]
    assert all(type(config) is ViaNchw for *_, config in of_via.LAST) and len(
        {config.DELEGATE.partition("(")[0] for *_, config in of_via.RUNS}
    ) > 5
    assert as_called(problem, H200) == problem and engines.refusal(problem, config, H200) is None
    assert vn.choose(of_via.FILTERS[0].problem("float32", "NHWC").launched, H200) is None
    assert engines.refusal(of_via.FILTERS[0].problem("float32", "NCHW"), config, H200) is not None
    kernels = [launch.kernel for step in engines.schedule(problem, config, H200).whole for launch in step]
    assert kernels[0] == "via_nhwc_two" and "via_nhwc" not in kernels


@simulated
@pytest.mark.parametrize(("nbytes", "vectors"), [(2, (8, 4, 2, 1)), (4, (4, 2, 1))])
def test_matrices_are_transposed(nbytes, vectors):
    """Tiles of every shape, their tails, and every width of loads and stores."""
    kind, met = {2: np.uint16, 4: np.uint32}[nbytes], set()
    def transposed(*both):
        arrays = [np.random.default_rng(one.rows).integers(1, 1 << 8 * nbytes, (3, one.rows, one.columns), kind) for one in both]
        launches = [one.launch(2 * i, 2 * i + 1) for i, one in enumerate(both)]
        met.update((launch.arguments.vector, launch.arguments.wide, launch.arguments.row_bits) for launch in launches)
        pairs = (
            (np.frombuffer(array.tobytes(), np.uint8).copy(), np.full(one.nbytes, 0xFF, np.uint8)) for one,
            array in zip(both, arrays, strict=True)
        )
        memory = SimpleNamespace(buffers=[buffer for pair in pairs for buffer in pair])
        simt.run([[vn._together(*launches) if len(both) == 2 else launches[0]]], memory, 1)
        for i, (one, array) in enumerate(zip(both, arrays, strict=True)):
            found = memory.buffers[2 * i + 1].view(kind).reshape(3, one.columns, one.pitch)
            assert np.array_equal(found[..., : one.rows], array.transpose(0, 2, 1)) and not found[..., one.rows :].any(), one

    for rows, across in product((1, 3, 6, 16, 24, 37, 64, 136), (2, 5, 12, 72, 200)):
        one, zeros = vn._Transposition(vn.INPUT, 3, rows, across, nbytes), -rows % (16 // nbytes)
        if across in (5, 72) and zeros:
            transposed(replace(one, zeros=zeros), one)
        transposed(one)
    assert {vector for vector, _, _ in met} == set(vectors) and {wide for _, wide, _ in met} == {0, 1}
    assert {bits for _, _, bits in met} == {2, 3, 4, 5}


def test_a_configuration_of_other_devices_is_refused_by_name(opencl):
    """An engine may run everywhere, and one of its configurations on GPUs alone: it would fail to compile."""
    given = {"padding": 1, "groups": 16, "layout": "NHWC"}
    problem = ConvProblem.gradient("weight", 2, (2, 16, 12, 12), (16, 1, 3, 3), (2, 16, 12, 12), **given)
    with pytest.raises(ValueError, match=r"DepthwiseRing.*compute capability 8\.0 or more"):
        Plan(problem, opencl, config=engines.DepthwiseRing())
    assert engines.refusal(problem, engines.DepthwiseRing(), Target("sm_80")) is None
