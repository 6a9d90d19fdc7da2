"""Measure dask arrays of numpy chunks on the GPUs of this machine: ours, copies alone, and dask with CuPy's convolution.

    python scripts/bench_dask.py --gigabytes 64 --planes 16 --threads 8 --runs 1

The chunks are one array in memory, again and again, and of each result one number is kept: so the disk and the memory for results do not
count. GB/s are those of the input and the result together; the best run is shown. "Copies alone" are ours, without a convolution; "joined
alone" are chunks that get their neighbours' rows on the host, and nothing else.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import cupy
import cupyx.scipy.ndimage
import dask
import dask.array as da
import numpy as np

import pycuda_conv as pc
from pycuda_conv import ConvProblem
from pycuda_conv import dask as ours
from pycuda_conv.execute.pipeline import copy_only


def source(shape: tuple[int, ...], chunks: tuple[int, ...]) -> da.Array:
    one = np.random.default_rng(0).random(chunks, dtype="f4")
    sizes, meta = da.core.normalize_chunks(chunks, shape), np.empty((0,) * len(shape), "f")
    return da.map_blocks(lambda block_info=None: one, chunks=sizes, dtype="f4", meta=meta, name=f"source-{len(shape)}")


def measure(name: str, y: da.Array, nbytes: int, threads: int, runs: int) -> float:
    """GB/s of the best run."""
    corner = y.map_blocks(lambda block: block[(slice(0, 1),) * block.ndim].copy(), chunks=(1,) * y.ndim, dtype="f4")
    seconds = []
    with dask.config.set(scheduler="threads", num_workers=threads):
        (corner.blocks[:8] if y.numblocks[0] > 1 else corner.blocks[:, :, :2]).compute()  # kernels are compiled, memory is locked
        for _ in range(runs):
            start = time.perf_counter()
            corner.compute()
            seconds.append(time.perf_counter() - start)
    rate = nbytes / min(seconds) / 1e9
    print(f"{name:42s} {threads} threads: {min(seconds):6.2f} s {rate:6.2f} GB/s", flush=True)
    return rate


def copies_alone(devices: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A chunk goes to the GPU with the least to do and back."""
    place = ours.ChunkPlace(devices=devices)

    def there_and_back(block: np.ndarray) -> np.ndarray:
        with place.taken() as gpu:
            y = place.empty(block, block.shape)
            pixels = block.shape[-2] * block.shape[-1]
            copy_only((gpu,), block.reshape(-1, 1, pixels), y.reshape(-1, 1, pixels))
        return y

    return there_and_back


def joined(x: da.Array, w: np.ndarray) -> da.Array:
    """Chunks with their neighbours' rows, as :func:`pycuda_conv.dask.convolve` makes them for a GPU."""
    ndim = w.ndim - 2
    problem = ConvProblem.forward(ndim, x.shape, w.shape, padding="same", in_chunks=True)
    axes = [ours._axis(problem, 3 - ndim + i, chunks) for i, chunks in enumerate(x.chunks[2:])]
    return ours._with_neighbours(x, axes, 1, ours.ChunkPlace(devices="all"))


def cupy_convolve(w: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    taps = cupy.asarray(w.reshape((1, 1, *w.shape[2:])))
    return lambda block: cupyx.scipy.ndimage.convolve(cupy.asarray(block), taps, mode="constant").get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=int, default=2, help="of the volume")
    parser.add_argument("--planes", type=int, default=2, help="gigabytes of the stack of planes")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=2, help="of which the best is shown")
    arguments = parser.parse_args()
    n, planes = arguments.gigabytes, arguments.planes
    cases: dict[str, tuple[da.Array, np.ndarray, Any]] = {
        "volume, 3x3x3": (source((1, 1, 256 * n, 1024, 1024), (1, 1, 128, 512, 512)), np.random.rand(1, 1, 3, 3, 3).astype("f"), pc.conv3d),
        "planes, 7x7": (source((64 * planes, 1, 2048, 2048), (8, 1, 2048, 2048)), np.random.rand(1, 1, 7, 7).astype("f"), pc.conv2d),
    }
    for name, (x, w, convolve) in cases.items():
        depth = {axis: w.shape[axis] // 2 for axis in range(2, w.ndim)}
        overlap: dict[str, Any] = {"depth": depth, "boundary": "none", "dtype": "f4", "meta": np.empty((0,) * x.ndim, "f")}
        ways = {
            "one GPU": convolve(x, w, padding="same", device=0), "all GPUs": convolve(x, w, padding="same", devices="all"),
            "copies alone, one GPU": x.map_blocks(copies_alone([0]), dtype="f4"),
            "copies alone, all GPUs": x.map_blocks(copies_alone("all"), dtype="f4"),
        }
        if x.numblocks[2:] != (1,) * len(depth):
            ways["joined alone"] = joined(x, w)
        ways["CuPy's convolve"] = da.map_overlap(cupy_convolve(w), x, **overlap)
        for threads in arguments.threads:
            rates = {way: measure(f"{name}: {way}", y, 2 * x.nbytes, threads, arguments.runs) for way, y in ways.items()}
            one, several, theirs = rates["one GPU"], rates["all GPUs"], rates["CuPy's convolve"]
            print(f"{name}: one GPU {one / theirs:.1f} times CuPy's, all {several / theirs:.1f}, which is {several / one:.2f} times one")


if __name__ == "__main__":
    main()
