"""A first convolution with PyCUDA, a loop of launches for one channel each, and the same as one launch.

    python examples/notebook.py

It needs an NVIDIA GPU, nvcc for the loop's kernel, and torch to compare with. It prints the times of all, and its exit status is 1 if a
result is wrong.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pycuda.autoinit  # noqa: F401  makes a context, as most programs with PyCUDA do
import pycuda.driver as drv
import torch
from pycuda import gpuarray
from pycuda.compiler import SourceModule

import pycuda_conv as pc

os.environ.setdefault("PYCUDA_CONV_BACKGROUND", "0")  # compile the best kernel in the first call, not behind later ones

# Each thread computes one pixel. The filter has 3 x 3 taps, and there is one zero around the image.
ONE_CHANNEL = """
__global__ void one_channel(float *y, const float *x, const float *w, int H, int W, int add)
{
    __shared__ float taps[9];
    int q = threadIdx.x + blockIdx.x * blockDim.x, p = blockIdx.y;
    if (threadIdx.x < 9) taps[threadIdx.x] = w[threadIdx.x];
    __syncthreads();
    if (q >= W) return;
    float sum = add ? y[p * W + q] : 0.f;
    for (int r = 0; r < 3; r++)
        for (int s = 0; s < 3; s++) {
            int h = p + r - 1, v = q + s - 1;
            if (h >= 0 && h < H && v >= 0 && v < W) sum += taps[3 * r + s] * x[h * W + v];
        }
    y[p * W + q] = sum;
}
"""


def loop(kernel, x, w, y):
    """Launch the kernel for every image, every filter and every channel."""
    (N, C, H, W), K = x.shape, len(w)
    for n in range(N):
        for k in range(K):
            for c in range(C):
                more = np.int32(H), np.int32(W), np.int32(c > 0)
                kernel(y[n, k], x[n, c], w[k, c], *more, block=(32, 1, 1), grid=((W + 31) // 32, H))


def microseconds(call, wait):
    """The time of a call until its result is there, the shortest of several."""
    taken = []
    for _ in range(10):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return 1e6 * min(taken)


def torch_microseconds(x, w):
    """The same for torch on the GPU."""
    with torch.no_grad():
        x, w = (torch.from_numpy(a).cuda() for a in (x, w))
        return microseconds(lambda: torch.nn.functional.conv2d(x, w, padding=1), torch.cuda.synchronize)


def main():
    here = drv.Context.get_device()
    print(f"{here.name()}, compute capability {here.compute_capability()}")
    kernel = SourceModule(ONE_CHANNEL).get_function("one_channel")
    all_right = True
    of_torch = ThreadPoolExecutor(1)  # torch makes another context current, and that is a matter of the thread
    print(f"{'input':20} {'filter':16} {'launches':>8} {'loop':>10} {'one launch':>10} {'torch':>10}  microseconds")
    for shape, filters in (((1, 1, 5, 5), 1), ((2, 4, 5, 5), 8), ((2, 4, 5, 7), 8), ((2, 4, 128, 128), 8), ((8, 16, 64, 64), 16)):
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(size).astype(np.float32) for size in (shape, (filters, shape[1], 3, 3)))
        expected = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1).numpy()

        x_gpu, w_gpu, y_gpu = gpuarray.to_gpu(x), gpuarray.to_gpu(w), gpuarray.empty(expected.shape, np.float32)
        wait = drv.Context.synchronize
        by_loop = microseconds(lambda: loop(kernel, x_gpu, w_gpu, y_gpu), wait)  # noqa: B023  called at once
        once = pc.conv2d(x_gpu, w_gpu, padding=1)  # one launch, in this context; the result is a GPUArray
        by_one = microseconds(lambda: pc.conv2d(x_gpu, w_gpu, padding=1), wait)  # noqa: B023

        difference = (once - y_gpu).get()  # results go on as any GPUArray
        right = all(np.allclose(y, expected, rtol=1e-4, atol=1e-4) for y in (y_gpu.get(), once.get())) and abs(difference).max() < 1e-3

        by_torch = "-"
        if torch.cuda.is_available():
            by_torch = f"{of_torch.submit(torch_microseconds, x, w).result():.1f}"
        sizes = ("x".join(map(str, array.shape)) for array in (x, w))
        times = f"{by_loop:10.1f} {by_one:10.1f} {by_torch:>10}"
        print("{:20} {:16} {:8} {}  {}".format(*sizes, shape[0] * filters * shape[1], times, "equal" if right else "WRONG"), flush=True)
        all_right = all_right and right
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
