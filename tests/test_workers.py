"""Other processes: what a fork leaves of OpenCL, and how workers are started."""

import os
import subprocess
import sys
import textwrap

import pytest

from pycuda_conv.runtime.opencl import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing can be forked here"),
]

START = """
import os, signal, sys
import numpy as np
import pycuda_conv as pc

os.register_at_fork(after_in_child=lambda: signal.alarm(60))  # a child that hangs is ended
x, w = np.ones((1, 1, 8, 8), "f"), np.ones((1, 1, 3, 3), "f")
"""


@pytest.fixture
def script(tmp_path, python_env):
    """What a program prints that runs on OpenCL; its file can be imported, as workers that are spawned do."""

    def run(code):
        (tmp_path / "program.py").write_text(START + textwrap.dedent(code))
        env = {**python_env, "PYCUDA_CONV_BACKEND": "opencl"}
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def test_a_forked_child_is_told_that_it_cannot_use_opencl(script):
    code = """
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape))
    bound = plan.bind(w)
    calls = (
        lambda: pc.conv2d(x, w),  # whose plan is kept
        lambda: pc.conv2d(x, w, stride=2),  # whose plan is not
        lambda: pc.conv2d_bias(x), lambda: plan(x, w), lambda: bound(x), lambda: plan.bind(w)(x), lambda: pc.Plan(plan.problem),
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
            print("OpenCL was in use when this process was forked" in str(error) and "spawn" in str(error))
    """
    assert script(code) == 7 * "True\n" + "0\n"


def test_a_child_forked_before_the_first_call_uses_opencl(script):
    code = """
    if child := os.fork():
        print(os.waitpid(child, 0)[1])
    assert (pc.conv2d(x, w) == 9).all()
    """
    assert script(code) == "0\n"


def test_workers_of_a_data_loader(script):
    """Forked ones are refused with what to do; those do it."""
    pytest.importorskip("torch")
    code = """
    import torch

    class Blurred(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.from_numpy(pc.conv2d(i * x[0], w))

    def sums(context):
        loader = torch.utils.data.DataLoader(Blurred(), num_workers=1, multiprocessing_context=context, timeout=90)
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
