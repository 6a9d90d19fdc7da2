"""Sharpen a volume and apply a learned filter to it, chunk by chunk: the volume may be larger than memory.

    python examples/volume.py --size 128 --chunk 64 restored.zarr

A volume of 3000 x 3000 x 3000 float32 numbers, 108 GB, takes ``--size 3000 --chunk 500``. Here it is made when it is needed: noise that
was blurred. It is written twice: sharpened by a filter that everybody knows, and by a 3x3x3 filter that was learned on a small cube to
undo the blur. ``--scheduler ADDRESS`` computes on a cluster of dask.distributed, whose workers write to a folder that all of them see.
"""

import argparse

import dask.array as da
import numpy as np
from dask.distributed import Client

import pycuda_conv as pc

SHARPEN = np.zeros((1, 1, 3, 3, 3), np.float32)
SHARPEN[0, 0, 1, 1, :] = SHARPEN[0, 0, 1, :, 1] = SHARPEN[0, 0, :, 1, 1] = -1
SHARPEN[0, 0, 1, 1, 1] = 7
BLUR = np.einsum("i,j,k->ijk", *[np.array([0.12, 0.76, 0.12], np.float32)] * 3)[None, None]


def volume(size: int, chunk: int) -> da.Array:
    """Noise of shape (1, 1, size, size, size), with a mean of 0."""
    return da.random.default_rng(0).random((1, 1, size, size, size), chunks=(1, 1, chunk, chunk, chunk), dtype="f4") - np.float32(0.5)


def learn(sharp: da.Array, blurred: da.Array, steps: int) -> np.ndarray:
    """The 3x3x3 filter that undoes the blur best in the mean square, by gradient descent with momentum."""
    w = np.zeros((1, 1, 3, 3, 3), np.float32)
    w[0, 0, 1, 1, 1] = 1
    speed = np.zeros_like(w)
    scale = float((blurred**2).sum().compute())  # the mean curvature
    for _ in range(steps):
        error = pc.conv3d(blurred, w, padding=1) - sharp
        gradient = pc.conv3d_weight(blurred, w.shape, error, padding=1).compute()
        speed = 0.5 * speed - gradient / (2 * scale)
        w += speed
    return w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", help="a zarr group: sharpened and restored")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scheduler", metavar="ADDRESS")
    arguments = parser.parse_args()
    client = Client(arguments.scheduler) if arguments.scheduler else None  # from here on the cluster computes, or else threads
    sharp = volume(arguments.size, arguments.chunk)
    blurred = pc.conv3d(sharp, BLUR, padding=1)
    print(f"{blurred.nbytes / 1e9:.3g} GB in {blurred.npartitions} chunks")

    edge = min(arguments.size, 64)
    cube = (slice(None), slice(None), *(slice(edge),) * 3)
    small_sharp, small_blurred = sharp[cube].persist(), blurred[cube].persist()
    w = learn(small_sharp, small_blurred, arguments.steps)

    def error(y: da.Array) -> float:
        return float(((y - small_sharp) ** 2).mean().compute()) ** 0.5

    before, after = error(small_blurred), error(pc.conv3d(small_blurred, w, padding=1))
    print(f"error of the blurred cube {before:.4f}, of the restored one {after:.4f}")
    da.to_zarr(pc.conv3d(blurred, SHARPEN, padding=1), arguments.output, component="sharpened")
    da.to_zarr(pc.conv3d(blurred, w, padding=1), arguments.output, component="restored")
    if client is not None:
        client.close()


if __name__ == "__main__":
    main()
