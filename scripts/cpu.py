"""Compare the CPU path with a thread of scipy.ndimage on one-channel filters, and with torch on layers.

    python scripts/cpu.py

All times are of the process's processor time, threads together, the least of several rounds by turns: on a machine that does other things
too, they are what the work takes.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from scipy import ndimage

import pycuda_conv as pc

ROUNDS, SECONDS = 7, 0.2
IMAGES = (((1024, 1024), 3), ((1024, 1024), 5), ((1024, 1024), 7), ((1024, 1024), 11))
#: Input, filter, groups.
LAYERS = (
    ((4, 64, 56, 56), (64, 64, 3, 3), 1), ((4, 256, 14, 14), (256, 256, 3, 3), 1), ((4, 256, 56, 56), (64, 256, 1, 1), 1),
    ((1, 3, 224, 224), (64, 3, 7, 7), 1), ((4, 144, 56, 56), (144, 1, 3, 3), 144),
)  # fmt: skip


def least(*calls):
    """The processor time of a call of each."""
    for call in calls:
        call()  # it may compile
    counts, found = [], [float("inf")] * len(calls)
    for call in calls:
        began = time.process_time()
        call()
        counts.append(max(1, round(SECONDS / max(time.process_time() - began, 1e-4))))
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            began = time.process_time()
            for _ in range(counts[i]):
                call()
            found[i] = min(found[i], (time.process_time() - began) / counts[i])
    return found


def main() -> None:
    rng = np.random.default_rng(0)
    threads = torch.get_num_threads()
    print(f"processor time, ms, on {pc.runtime.get_device('opencl').device.name.strip()}; torch {torch.__version__}, {threads} threads")
    for shape, taps in IMAGES:
        x, w = rng.standard_normal(shape, np.float32), rng.standard_normal((taps, taps), np.float32)
        image, filters = x[None, None], w[None, None]
        ours, theirs = least(
            lambda: pc.conv2d(image, filters, padding="same", device="opencl"), lambda: ndimage.correlate(x, w, mode="constant"),  # noqa: B023
        )  # fmt: skip
        name = f"{shape[0]}x{shape[1]}, one channel, {taps}x{taps}"
        print(f"{name}: ours {ours * 1e3:.1f}, scipy {theirs * 1e3:.1f}, ours / scipy {ours / theirs:.2f}")
    for shape, filters, groups in LAYERS:
        x, w = torch.from_numpy(rng.standard_normal(shape, np.float32)), torch.from_numpy(rng.standard_normal(filters, np.float32))
        options = {"padding": filters[-1] // 2, "groups": groups}
        ours, theirs = least(
            lambda: pc.conv2d(x, w, **options, device="opencl"), lambda: torch.nn.functional.conv2d(x, w, **options),  # noqa: B023
        )  # fmt: skip
        name = pc.ConvProblem.forward(2, shape, filters, **options)
        print(f"{name}: ours {ours * 1e3:.1f}, torch {theirs * 1e3:.1f}, ours / torch {ours / theirs:.1f}")


if __name__ == "__main__":
    main()
