"""Divisions by prepared divisors: right for every number that the kernels divide, in both dialects."""

import numpy as np
import pytest
from reference import needs_nvcc, nvcc_of

from pycuda_conv.engines.geometry import divider
from pycuda_conv.runtime.base import KERNEL_DIR, KernelLaunch

POWERS = [2**k for k in range(32)]
DIVISORS = sorted({d for p in POWERS for d in (p - 1, p, p + 1) if 1 <= d < 2**31} | {3, 6, 7, 10, 49, 3136, 1000003, 2**31 - 19})

TEXT = """
#include "core/portable.cuh"
#include "core/division.cuh"
KERNEL LAUNCH_BOUNDS(64, 1) void quotients(const GLOBAL_MEM long_t* RESTRICT numbers, GLOBAL_MEM long_t* RESTRICT found, const long_t by) {
  const int i = (int)GID_0 * 64 + LID_0;
  found[i] = divided((int)numbers[i], by);
}
"""


def numbers(d: int) -> np.ndarray:
    """Numbers around the first and last multiples of `d`, the largest there are, and random ones."""
    last = 2**31 // d
    multiples = np.array([m * d for m in (0, 1, 2, 3, last // 2, last - 1, last) if m >= 0])
    near = (multiples[:, None] + np.arange(-2, 3)).ravel()
    drawn = np.random.default_rng(d).integers(0, 2**31, 200)
    found = np.concatenate([near, 2**31 - 1 - np.arange(4), drawn])
    return np.resize(found[(found >= 0) & (found < 2**31)], 256)


@pytest.mark.parametrize("d", [-1, 2**31 + 1])
def test_a_divisor_out_of_range_is_refused(d):
    with pytest.raises(ValueError, match=f"d must be from 0 to 2\\^31, got {d}"):
        divider(d)


def test_the_formula_is_right_at_the_edges():
    for d in (*DIVISORS, 2**31):
        multiplier, shift = divider(d) & 0xFFFFFFFF, divider(d) >> 32
        n = numbers(d)
        assert np.array_equal((n * multiplier >> 32) + n >> shift, n // d), d


def test_opencl_divides_so():
    from pycuda_conv.runtime.opencl import opencl_device, why_not

    if why_not():
        pytest.skip(why_not())
    device = opencl_device()
    cl = pytest.importorskip("pyopencl")
    program = cl.Program(device.context, TEXT).build(options=["-cl-std=CL1.2", "-I", str(KERNEL_DIR)])
    kernel = cl.Kernel(program, "quotients")
    flags = cl.mem_flags
    for d in DIVISORS:
        n, found = numbers(d), np.zeros(256, np.int64)
        source = cl.Buffer(device.context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=n)
        target = cl.Buffer(device.context, flags.WRITE_ONLY, found.nbytes)
        kernel(device.queue, (256,), (64,), source, target, np.int64(divider(d)), global_offset=(64,))  # block 0 begins there
        cl.enqueue_copy(device.queue, found, target)
        assert np.array_equal(found, n // d), d


@pytest.mark.gpu
def test_cuda_divides_so(monkeypatch):
    import torch

    from pycuda_conv.runtime import base, cuda_device

    monkeypatch.setattr(base, "_text", lambda file: TEXT)
    monkeypatch.setattr(base, "shown_file", lambda name: f"cu/{name}.cu")
    device = cuda_device(0)
    for d in DIVISORS:
        n = numbers(d)
        source, target = torch.from_numpy(n).cuda(), torch.zeros(256, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        with device:
            device.launcher(KernelLaunch("quotients", {}, 4, 64, (0, 1), (divider(d),)))([source.data_ptr(), target.data_ptr()], None)
        torch.cuda.synchronize()
        assert np.array_equal(target.cpu().numpy(), n // d), d


@needs_nvcc
def test_nvcc_takes_it():
    (result,) = nvcc_of([(TEXT, "sm_90")])
    assert result.returncode == 0 and "warning" not in result.stderr, result.stderr
