#!/usr/bin/env python3
"""Run a kernel of the course: on the simulated machine of tests/simt, or with --gpu on a Hopper GPU, where it is timed (which takes torch).

    python docs/course/run.py 8-ring               # whether it is right
    python docs/course/run.py 8-ring --exercise    # whether the line that its exercise asks for is right
    python docs/course/run.py 8-ring --gpu         # its time, and its share of the tensor cores' limit
"""

from __future__ import annotations

import argparse
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests")]

from pycuda_conv.runtime.base import Im2col, KernelLaunch, TensorMap  # noqa: E402

PEAK = 989e12  # floating-point operations a second of an H200's tensor cores, 16 bits, by NVIDIA's data sheet
A, B, Y, BIAS = range(4)  # buffers
SIZES = {"small": (200, 136, 208), "large": (32 * 56 * 56, 256, 9 * 256)}  # m, n and k
#: images, channels, rows, columns, filters and taps along each axis
LAYERS = {"small": (2, 72, 7, 9, 40, 3), "large": (32, 256, 56, 56, 256, 3)}


@dataclass(frozen=True)
class Launch(KernelLaunch):
    """A launch of a kernel whose text is given."""

    text: str = ""

    def source(self) -> str:
        """The defines, then the text."""
        return "".join(f"#define {name} {value}\n" for name, value in self.defines.items()) + f'#line 1 "{self.kernel}.cu"\n{self.text}'


@dataclass(frozen=True)
class Work:
    """What a kernel is given, and what it should make of it: shapes, types, launches, and the result in float64."""

    arrays: tuple[tuple[tuple[int, ...], str], ...]  # a, b, y and more
    launches: tuple[Launch, ...]
    expected: Callable[..., Any]  # of the arrays
    operations: float
    scale: float = 1.0  # of a and b


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def launch(text: str, kernel: str, grid: int, block: int, buffers: Sequence[Any], numbers: dict[str, int], **more: Any) -> Launch:
    """A launch for sm_90a; `numbers` are the members of the kernel's struct, in order."""
    arguments = namedtuple("Numbers", numbers)(*numbers.values())  # type: ignore[misc]
    return Launch(kernel, more.pop("defines", {}), grid, block, tuple(buffers), (), arch="sm_90a", arguments=arguments, text=text, **more)


def rows_map(buffer: int, rows: int, k: int, box: int, pairs: int = 1) -> TensorMap:
    """The map of `pairs` matrices [rows][k] of 16 bits: a box is 64 of k of `box` rows."""
    return TensorMap(buffer, 0, (k, rows, pairs), (2 * k, 2 * k * rows), (64, box, 1), 128, "float16")


def product(a: Any, b: Any) -> Any:
    """y = a b^T, of one pair of matrices or of several."""
    return a @ b.swapaxes(-1, -2)


def wgmma(text: str, size: str, exercise: bool) -> Work:
    """7-wgmma: one warpgroup, copies by threads."""
    m, n, k = SIZES[size]
    numbers = {"m": m, "n": n, "k": k, "tiles_m": ceil(m, 64)}
    one = launch(text, "first_wgmma", ceil(m, 64) * ceil(n, 128), 128, (A, B, BIAS, Y), numbers, shared=1024 + 128 * (64 + 128))
    arrays = ((m, k), "float16"), ((n, k), "float16"), ((m, n), "float32"), ((n,), "float32" if exercise else "zeros")
    return Work(arrays, (one,), lambda a, b, bias: product(a, b) + bias, 2 * m * n * k)


def ring(text: str, size: str, exercise: bool) -> Work:
    """8-ring: TMA and a ring; in the exercise k is cut into two parts."""
    (m, n, k), parts = SIZES[size], 2 if exercise else 1
    tiles, steps = ceil(m, 128) * ceil(n, 128), ceil(k, 64)
    numbers = {"m": m, "n": n, "steps": steps, "tiles_m": ceil(m, 128), "tiles": tiles, "each": ceil(steps, parts)}
    maps = rows_map(A, m, k, 128), rows_map(B, n, k, 128)
    one = launch(text, "fed_by_a_ring", tiles * parts, 288, (Y,), numbers, maps=maps, shared=1024 + 4 * 128 * 256)
    cut = [64 * min(part * ceil(steps, parts), steps) for part in range(parts + 1)]

    def expected(a: Any, b: Any) -> Any:
        return np.stack([product(a[:, i:j], b[:, i:j]) for i, j in pairwise(cut)]) if parts > 1 else product(a, b)[None]

    return Work((((m, k), "float16"), ((n, k), "float16"), ((parts, m, n), "float32")), (one,), expected, 2 * m * n * k)


def persistence(text: str, size: str, exercise: bool) -> Work:
    """9-persistence: blocks that stay; in the exercise there are two pairs of matrices."""
    (m, n, k), pairs = SIZES[size], 2 if exercise else 1
    tiles = ceil(m, 128) * ceil(n, 256)
    numbers = {"m": m, "n": n, "steps": ceil(k, 64), "tiles_n": ceil(n, 256), "each": tiles, "tiles": tiles * pairs}
    maps = rows_map(A, m, k, 128, pairs), rows_map(B, n, k, 256, pairs)
    one = launch(text, "tile_after_tile", min(tiles * pairs, 132), 288, (Y,), numbers, maps=maps, shared=1024 + 4 * 128 * 384)
    return Work((((pairs, m, k), "float16"), ((pairs, n, k), "float16"), ((pairs, m, n), "float32")), (one,), product, 2 * m * n * k)


def im2col(text: str, size: str, exercise: bool) -> Work:
    """10-im2col: a convolution; in the exercise its taps are two pixels apart."""
    (images, c, height, width, filters, taps), dilation = LAYERS[size], 2 if exercise else 1
    padding = dilation * (taps // 2)
    pixels, tiles_n = images * height * width, ceil(filters, 256)
    tiles = ceil(pixels, 128) * tiles_n
    numbers = {"pixels": pixels, "filters": filters, "channel_blocks": ceil(c, 64), "taps_s": taps, "steps": taps * taps * ceil(c, 64)}
    numbers |= {"p": height, "q": width, "padding": padding, "dilation": dilation, "tiles_n": tiles_n, "tiles": tiles}
    # the first pixel's window begins at -padding, and that of the last one of a row ends there too, seen from the row's last pixel
    box = Im2col((-padding,) * 2, (-padding,) * 2, (1, 1), 64, 128)
    map_x = TensorMap(A, 0, (c, width, height, images), (2 * c, 2 * c * width, 2 * c * width * height), box, 128, "float16")
    map_w = TensorMap(B, 0, (c, taps * taps, filters), (2 * c, 2 * c * taps * taps), (64, 1, 256), 128, "float16")
    one = launch(text, "by_im2col", min(tiles, 132), 288, (Y,), numbers, maps=(map_x, map_w), shared=1024 + 4 * 128 * 384)

    def expected(x: Any, w: Any) -> Any:
        around = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        shifted = (around[:, r * dilation :, s * dilation :][:, :height, :width] for r in range(taps) for s in range(taps))
        return sum(part.reshape(-1, c) @ w[:, tap].T for tap, part in enumerate(shifted))

    arrays = ((images, height, width, c), "float16"), ((filters, taps * taps, c), "float16"), ((pixels, filters), "float32")
    return Work(arrays, (one,), expected, 2 * pixels * filters * c * taps * taps)


def limbs(text: str, size: str, exercise: bool, products: int = 3, promotes: int = 1) -> Work:
    """11-limbs: float32 by limbs; in the exercise the numbers are small, so they are scaled."""
    (m, n, k), scale = SIZES[size], 12 if exercise else 0
    split_a, split_b, tiles = 3, 4, ceil(m, 128) * ceil(n, 128)
    split = [
        launch(text, "split_limbs", ceil(rows * k, 256), 256, (of, to), {"count": rows * k, "scale": scale})
        for of, to, rows in ((A, split_a, m), (B, split_b, n))
    ]
    numbers = {"m": m, "n": n, "steps": ceil(k, 64), "tiles_m": ceil(m, 128), "scale": scale}
    maps = rows_map(split_a, m, k, 128, 2), rows_map(split_b, n, k, 128, 2)
    defines = {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3, "PRODUCTS": products, "PROMOTES": promotes}
    ring_bytes = 3 * 128 * 256 * (2 if products == 3 else 1)
    one = launch(text, "by_limbs", tiles, 384, (Y,), numbers, maps=maps, shared=1024 + ring_bytes, defines=defines)
    arrays = ((m, k), "float32"), ((n, k), "float32"), ((m, n), "float32"), ((2, m, k), "empty"), ((2, n, k), "empty")
    return Work(arrays, (*split, one), lambda a, b, *_: product(a, b), 2 * m * n * k, 2.0**-scale)


PIECES: dict[str, Callable[..., Work]] = {
    "7-wgmma": wgmma, "8-ring": ring, "9-persistence": persistence, "10-im2col": im2col, "11-limbs": limbs,
}  # fmt: skip
#: The line that each exercise asks for, below the comment that asks.
SOLUTIONS = {
    "7-wgmma": "sum += bias[n];",
    "8-ring": "first = min(part * (int)arg.each, (int)arg.steps), last = min(first + (int)arg.each, (int)arg.steps);",
    "9-persistence": "batch = number / (int)of.arg.each;",
    "10-im2col": "r *= (int)arg.dilation, s *= (int)arg.dilation;",
    "11-limbs": "sum *= __uint_as_float((127 - 2 * (int)arg.scale) << 23);",
}


def text_of(name: str) -> str:
    return (HERE / f"{name}.cu").read_text()


def numbers_of(shape: tuple[int, ...], kind: str, scale: float, seed: int) -> np.ndarray:
    """Small integers of a 16-bit array, so that sums are exact; normal numbers of a float32 one; NaN where a kernel is to write."""
    rng = np.random.default_rng(seed)
    if kind == "float16":
        return rng.integers(-4, 5, shape).astype(np.float16)
    if kind == "float32":
        return (rng.standard_normal(shape) * scale).astype(np.float32)
    return np.zeros(shape, np.float32) if kind == "zeros" else np.full(shape, np.nan, np.float16)


def simulated(work: Work, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What the simulated machine computes, and what it should."""
    import simt

    arrays = [numbers_of(shape, kind, work.scale, seed + i) for i, (shape, kind) in enumerate(work.arrays)]
    arrays[Y] = np.full(work.arrays[Y][0], np.nan, np.float32)
    memory = SimpleNamespace(buffers=[np.frombuffer(v.tobytes(), np.uint8) for v in arrays])
    simt.run([[one] for one in work.launches], memory, seed)
    given = [v.astype(np.float64) for i, v in enumerate(arrays) if i != Y and work.arrays[i][1] != "empty"]
    return memory.buffers[Y].view(np.float32).reshape(work.arrays[Y][0]), work.expected(*given)


def is_right(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether a result is as near as float32 sums of products by limbs are: of integers it is exact."""
    return bool(np.abs(found - expected).max() <= 3e-6 * np.abs(expected).max())


def microseconds(call: Callable[[], Any]) -> float:
    """The median of five times of ten calls on the GPU, after three calls."""
    import torch

    taken = []
    for count in (3, *[10] * 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / count)
    return sorted(taken[1:])[2]


def timed(work: Work) -> tuple[list[float], Any]:
    """Microseconds of each launch on the GPU, and the arrays."""
    import torch

    from pycuda_conv.runtime import get_device

    device: Any = get_device("cuda")
    arrays = []
    for shape, kind in work.arrays:
        made = torch.zeros if kind == "zeros" else torch.randn
        arrays.append(made(shape, device="cuda", dtype=torch.float16 if kind in ("float16", "empty") else torch.float32))
    pointers = [v.data_ptr() for v in arrays]
    launchers = [device.launcher(one) for one in work.launches]
    return [microseconds(lambda run=run: run(pointers, None)) for run in launchers], arrays  # type: ignore[misc]


#: What is timed of a piece: its name, and the options that make it.
FORMS: dict[str, dict[str, dict[str, int]]] = {
    "11-limbs": {
        "three products, promoted": {}, "three products, not promoted": {"promotes": 0}, "one product, promoted": {"products": 1},
        "one product, not promoted": {"products": 1, "promotes": 0},
    },
}  # fmt: skip


def on_gpu(name: str) -> None:
    """Print times, shares of the limit, and for limbs the errors."""
    for form, options in FORMS.get(name, {"": {}}).items():
        work = PIECES[name](text_of(name), "large", False, **options)
        times, arrays = timed(work)
        share = work.operations * options.get("products", 3 if form else 1) / (times[-1] * 1e-6) / PEAK
        rate = work.operations / times[-1] * 1e-6
        print(f"{name} {form}: {' + '.join(f'{us:.1f}' for us in times)} us, {rate:.1f} TFLOP/s, {share:.1%} of the limit", flush=True)
        print_rival(name, work, arrays)


def print_rival(name: str, work: Work, arrays: Sequence[Any]) -> None:
    """Print torch's time, and of products the error of their first rows."""
    import torch

    if name == "10-im2col":
        x, w = (v.movedim(-1, 1) for v in (arrays[A], arrays[B].unflatten(1, (3, 3))))
        print(f"    torch's convolution, float16 result: {microseconds(lambda: torch.conv2d(x, w, padding=1)):.1f} us", flush=True)
        return
    left, right = (v.reshape(-1, v.shape[-1]) for v in arrays[:2])
    expected = left.double()[:512] @ right.double().T
    error = arrays[Y].reshape(left.shape[0], -1).double()[:512] - expected
    mean = (error * expected.sign()).sum() / expected.abs().sum()
    print(f"    error: root mean square {error.norm() / expected.norm():.2e}, in the mean {mean:.2e}")
    us = microseconds(lambda: torch.matmul(left, right.T))
    print(f"    torch's product, {work.arrays[A][1]}: {us:.1f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a kernel of the course.")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; by default all")
    parser.add_argument("--exercise", action="store_true", help="check the line that the exercise asks for")
    parser.add_argument("--gpu", action="store_true", help="time it on a Hopper GPU")
    options = parser.parse_args()
    status = 0
    for name in options.pieces or PIECES:
        if name not in PIECES:
            parser.error(f"there is no piece {name!r}; there are {', '.join(PIECES)}")
        if options.gpu:
            on_gpu(name)
            continue
        right = is_right(*simulated(PIECES[name](text_of(name), "small", options.exercise)))
        print(f"{name}: {'right' if right else 'not right yet' if options.exercise else 'WRONG'}")
        status |= not right
    return status


if __name__ == "__main__":
    sys.exit(main())
