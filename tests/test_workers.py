"""Other processes: what a fork leaves of a device, how workers are started, and plans that go to them."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from reference import started

import pycuda_conv as pc
from pycuda_conv import engines
from pycuda_conv.engines.direct.direct import Batched
from pycuda_conv.runtime import get_device

START = """
import os, signal, sys
import numpy as np
import pycuda_conv as pc

os.register_at_fork(after_in_child=lambda: signal.alarm(600))  # a child that hangs must end
x, w = np.ones((1, 1, 8, 8), "f"), np.ones((1, 1, 3, 3), "f")
"""


@pytest.fixture
def script(tmp_path, fast_env, device):
    """What a program prints that runs on that device; its file can be imported, as workers that are spawned do."""

    def run(code):
        (tmp_path / "program.py").write_text(START + textwrap.dedent(code))
        env = {**fast_env, "PYCUDA_CONV_BACKEND": get_device(device).backend}
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def test_a_forked_child_is_told_that_it_cannot_use_the_device(script, device):
    code = """
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape))
    bound = plan.bind(w)
    calls = (
        lambda: pc.conv2d(x, w),  # whose plan is kept
        lambda: pc.conv2d(x, w, stride=2),  # whose plan is not
        lambda: pc.conv2d_bias(x), lambda: plan(x, w), lambda: bound(x), lambda: plan.bind(w)(x), lambda: pc.Plan(plan.problem)(x, w),
    )
    calls[0]()
    sys.stdout.flush()
    if child := os.fork():
        print(os.waitpid(child, 0)[1])
        assert (pc.conv2d(x, w) == 9).all()
        sys.exit()
    for call in calls:
        try:
            call()
        except pc.BackendError as error:
            print("was in use when this process was forked" in str(error) and "spawn" in str(error))
    sys.stdout.flush()
    os._exit(0)  # as workers end; at an ordinary exit PyCUDA would abort, since it can't give its memory back
    """
    assert script(code) == 7 * "True\n" + "0\n"


def test_a_child_forked_before_the_first_call_uses_the_device(script):
    code = """
    if child := os.fork():
        print(os.waitpid(child, 0)[1])
    assert (pc.conv2d(x, w) == 9).all()
    """
    assert script(code) == "0\n"


def test_workers_of_a_data_loader(script):
    """Forked ones are refused with what to do; those do it."""
    code = """
    import torch

    class Blurred(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.from_numpy(pc.conv2d(i * x[0], w))

    def sums(context):
        loader = torch.utils.data.DataLoader(Blurred(), num_workers=1, multiprocessing_context=context, timeout=900)
        return [int(batch.sum()) for batch in loader]

    if __name__ == "__main__":
        print(sums("fork"))  # nothing was called so far
        pc.conv2d(x, w)
        try:
            sums("fork")
        except pc.BackendError as error:
            print("multiprocessing_context='spawn'" in str(error))
        print(sums("spawn"))
    """
    sums = "[0, 324, 648, 972]\n"
    assert script(code) == sums + "True\n" + sums


def test_a_process_ends_with_its_block_and_so_do_those_that_it_has_started(python_env):
    """They hold the other end of its output."""
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import time; print(1, flush=True); time.sleep(1000)'])"
    with pytest.raises(subprocess.TimeoutExpired), started("-S", "-c", code, env=python_env, text=True) as process:
        assert process.stdout.readline() == "1\n"
        output = os.dup(process.stdout.fileno())
        process.communicate(timeout=0.01)
    assert process.returncode == -9
    with open(output) as file:
        assert file.read() == ""


# ---- plans


ARRAYS = (2, 4, 6, 7), (6, 4, 3, 3), (6,), (6,), (2, 6, 6, 7)


def arrays_of(kind, device):
    """Input, weight, bias, scale and residual of that kind."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, shape).astype("f") for shape in ARRAYS]
    if kind == "GPUArray":
        gpuarray = pytest.importorskip("pycuda.gpuarray")
        with get_device(device):
            return [gpuarray.to_gpu(a) for a in arrays]
    if kind != "numpy":
        return [torch.from_numpy(a).to(kind.removeprefix("torch ")) for a in arrays]
    return arrays


def values(array):
    if hasattr(array, "get"):  # PyCUDA copies in the thread's current context, which other tests may have left another one
        with get_device("cuda"):
            return array.get()
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def problem():
    x, w, b, scale, residual = ARRAYS
    return pc.ConvProblem.forward(2, x, w, b, padding=1, scale_shape=scale, residual_shape=residual, activation="relu")


COPIES = {"pickled": lambda one: pickle.loads(pickle.dumps(one)), "deep": copy.deepcopy, "shallow": copy.copy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("config", [None, Batched()])
def test_a_plan_that_was_pickled_or_copied_is_the_same_plan(device, config, how):
    plan = pc.Plan(problem(), device, config=config)
    again = COPIES[how](plan)
    assert again is not plan and again.device is plan.device
    for name in ("problem", "config", "fixed", "tuned", "with_moments", "workspace_bytes", "filter_key"):
        assert getattr(again, name) == getattr(plan, name)
    x, w, b, scale, residual = arrays_of("numpy", device)
    assert np.array_equal(again(x, w, b, scale=scale, residual=residual), plan(x, w, b, scale=scale, residual=residual))


@pytest.mark.parametrize(
    ("name", "fields"), [("Batched", {"BLOCK_K": 8}), ("ImplicitGemm", {"loader": "halo"}), ("Lines", {"BLOCK_N": 64})]
)
def test_a_plan_that_another_version_pickled(device, name, fields):
    """Its kernels run if they are there; else it is planned anew."""
    if device != "opencl":
        pytest.skip("one device is enough")
    again = pc.plan._plan_again(problem(), "opencl", get_device("opencl").model, engines.config_again(name, fields), False)
    fresh = pc.Plan(problem(), device)
    assert again.config == (Batched(BLOCK_K=8) if name == "Batched" else fresh.config)
    x, w, b, scale, residual = arrays_of("numpy", device)
    assert np.allclose(again(x, w, b, scale=scale, residual=residual), fresh(x, w, b, scale=scale, residual=residual), atol=1e-4)


def test_configurations_are_pickled_by_their_names():
    for cls in engines.config_classes().values():
        assert pickle.loads(pickle.dumps(cls())) == cls() and cls.__module__.encode() not in pickle.dumps(cls())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "kind", ["numpy", "torch cpu", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ("torch cuda", "GPUArray"))]
)
def test_a_bound_plan_that_was_pickled_or_copied_has_the_filter(device, kind, how):
    if kind in ("torch cuda", "GPUArray") and device == "opencl":
        pytest.skip("these are arrays on a GPU")
    x, w, b, scale, residual = arrays_of(kind, device)
    if kind.startswith("torch"):
        w = w.transpose(-1, -2)  # strides are kept or put right
    bound = pc.Plan(problem(), device).bind(w, b, scale)
    again = COPIES[how](bound)
    expected = values(bound(x, residual=residual))
    assert np.array_equal(values(again(x, residual=residual)), expected) and expected.any()
    if kind.startswith("torch"):
        import torch

        needed = pc.Plan(problem(), device)
        with torch.no_grad():
            bound = needed.bind(torch.nn.Parameter(w), b, scale)
        assert np.array_equal(values(COPIES[how](bound)(x, residual=residual)), expected)  # what is pickled needs no gradient


def test_a_plan_is_for_the_device_that_it_was_made_for(device):
    plan = pc.Plan(problem(), device)
    again, (asked, name, model, *rest) = plan.__reduce__()
    with pytest.raises(pc.BackendError, match=r"this plan was made for .*Plan"):
        again(asked, name, model + "another model", *rest)
    with pytest.raises(pc.BackendError):
        again(asked, "cuda:99", model, *rest)


def test_plans_go_to_workers(script):
    code = """
    import multiprocessing

    if __name__ == "__main__":
        plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape))
        bound = plan.bind(w)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            print([int(y.sum()) for y in pool.map_async(bound, [x, 2 * x]).get(300)])
            print(int(pool.apply_async(plan, (x, w)).get(300).sum()))
    """
    assert script(code) == "[324, 648]\n324\n"
