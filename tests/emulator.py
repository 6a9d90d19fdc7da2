"""The launches of the tensor cores' engines for Hopper in numpy: memory, tensor maps and loads as an H200 treats them, sums in float64.

Everything is computed from a program's steps alone: from their arguments, defines, buffers and tensor maps. What a kernel must not do fails here: an address outside a buffer, a load of bytes
that nobody has written, a coordinate or a stride that the hardware refuses, a result that is written twice or never.
TMA's im2col mode walks as it was seen to walk on an H200: from a base pixel on, by strides, through a box that the corners
describe, to the next row, plane and image; all of it zero outside the tensor, each pixel shifted by a tap's offsets.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
from reference import activated

from pycuda_conv.engines import registry
from pycuda_conv.engines.geometry import divider
from pycuda_conv.runtime.base import Im2col

ELEMENT = {64: "float64", 32: "float32", 16: "float16", 17: "bfloat16"}  # as the kernels name types
INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL = range(8)
MOST_SHARED = 227 * 1024
#: In the order of ``activation.cuh``.
ACTIVATION_WORDS = (None, "relu", "relu6", "leaky_relu", "hardswish", "silu", "gelu", "gelu_tanh")


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def named(step):
    """The step's arguments, whose divisors are prepared."""
    (s,) = step.structs
    for name in s._fields:
        assert not name.startswith("by_") or getattr(s, name) == divider(max(getattr(s, name[3:]), 1)), f"{name} is not prepared"
    return s


def result_type(problem, x) -> np.dtype:
    """The type of a result: that of `x`, unless the image is of integers."""
    return np.dtype(problem.result_dtype or problem.dtype) if problem.input_dtype else x.dtype


class Memory:
    """The plan's buffers: exactly as many bytes as they have to have, all NaN."""

    def __init__(self, problem, program, x, w, b, scale, residual, filter_last: bool = False):
        self.filter_last = filter_last  # whether the filter's second axis is last in memory
        if filter_last and problem.direction != "wgrad":
            w = np.moveaxis(w, 1, -1)
        if problem.layout == "NHWC":
            x, residual = (None if a is None else np.moveaxis(a, -problem.ndim - 1, -1) for a in (x, residual))
            w = np.moveaxis(w, -problem.ndim - 1, -1) if problem.direction == "wgrad" else w
        given = [self._bytes(np.zeros(0, x.dtype) if a is None else a) for a in (x, w, b, scale, residual)]
        sizes = (result_type(problem, x).itemsize * math.prod(problem.result_shape), program.workspace_bytes, program.filter_bytes)
        self.buffers = [*given[:3], *(np.full(n, 0xFF, np.uint8) for n in sizes), *given[3:]]
        self.writes: dict = {}
        self.loaded: dict = {}  # by a launch's loads: tiles ask for the same ones again
        self.finite = False  # whether loads must not meet what nobody has written
        self.mended = 0  # results that the guarded kernel computed again

    @staticmethod
    def _bytes(array: np.ndarray) -> np.ndarray:
        return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)

    def view(self, place, dtype: str) -> np.ndarray:
        """From `place` to the end of its buffer, as elements of `dtype`."""
        buffer, offset = place if isinstance(place, tuple) else (place, 0)
        size = np.dtype(dtype).itemsize
        assert offset % max(size, 16) == 0, f"offset {offset} of buffer {buffer} is not aligned"
        left = self.buffers[buffer][offset:]
        return left[: len(left) // size * size].view(dtype)

    def load(self, key: tuple, load) -> np.ndarray:
        """What `load` returns, of the first load of the launch that `key` names."""
        values = self.loaded.get(key)
        if values is None:
            values = self.loaded[key] = load()
            assert not self.finite or np.isfinite(values).all(), "a load met what nobody has written"
            values.flags.writeable = False
        return values

    def count(self, place, at: np.ndarray) -> None:
        """Note writes of the elements `at` of the array at `place`."""
        counts = self.writes.setdefault(place, np.zeros(0, int))
        most = int(at.max(initial=-1)) + 1
        if most > len(counts):
            counts = self.writes[place] = np.pad(counts, (0, most - len(counts)))
        np.add.at(counts, at.ravel(), 1)

    def result(self, problem, dtype: str) -> np.ndarray:
        found = self.view(RESULT, dtype)
        shape = list(problem.result_shape)
        if problem.layout == "CNHW":
            return found.reshape(shape[1], shape[0], *shape[2:])
        if problem.direction == "wgrad" and self.filter_last:
            return np.moveaxis(found.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
        if problem.layout == "NCHW" or problem.direction == "wgrad":
            return found.reshape(shape)
        channels = shape.pop(-problem.ndim - 1)
        return np.moveaxis(found.reshape(*shape, channels), -1, -problem.ndim - 1)


def inside(array: np.ndarray, at: np.ndarray) -> np.ndarray:
    """array[at], every index inside."""
    at = np.asarray(at)
    try:
        found = array[at]  # refuses what lies behind the end
    except IndexError:
        raise AssertionError(f"access outside an array of {len(array)} elements: {at.min()} .. {at.max()}") from None
    assert at.size == 0 or at.min() >= 0, f"access outside an array of {len(array)} elements: {at.min()} .. {at.max()}"
    return found


def store(array: np.ndarray, at: np.ndarray, values) -> None:
    inside(array, at)
    array[at] = values


# ---- pack.cu


GUESS = 9  # exponent of the scale with which images are packed at first


def flag_of(flag: int, shape) -> int:
    return shape.too_small if flag == 1 else flag


class MagnitudeRange:
    """Largest and smallest non-zero magnitude of float32 numbers, as bits; 0 and 2^32 where there are none."""

    def __init__(self, largest: int, smallest: int, slack: int):
        self.largest, self.smallest, self.slack = largest, smallest, slack
        self.exponent, self.least = (largest >> 23) - 127, (smallest >> 23) - 127

    @classmethod
    def of(cls, values: np.ndarray, slack: int = 0) -> MagnitudeRange:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
        return cls(int(bits.max(initial=0)), int(bits[bits > 0].min()) if bits.any() else 2**32, slack)

    @classmethod
    def of_rows(cls, values: np.ndarray, slack: int = 0) -> list[MagnitudeRange]:
        bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)
        smallest = np.where(bits > 0, bits, 2**32).min(1, initial=2**32)
        return [cls(*both, slack) for both in zip(bits.max(1, initial=0).tolist(), smallest.tolist(), strict=True)]

    def usable(self) -> bool:
        return self.largest == 0 or (self.largest < 0x7F800000 and abs(self.exponent) <= 60)

    def flag(self) -> int:
        if not self.usable():
            return 2
        return int(self.largest > 0 and self.least < self.exponent - 28 - self.slack)

    def loses(self, guess: int) -> bool:
        return self.largest > 0 and self.least < -14 - guess - self.slack

    def fits(self, guess: int) -> bool:
        return self.largest == 0 or (10 if self.loses(guess) else -2) - guess <= self.exponent < 15 - guess

    def guess(self) -> int:
        return 11 - self.exponent if self.largest and self.usable() else GUESS

    def scale(self) -> float:
        return 2.0 ** (14 - self.exponent) if self.largest and self.usable() else 1.0


def split(values: np.ndarray, scale: float | np.ndarray, limbs: int, dtype: str) -> list[np.ndarray]:
    """The limbs of float32 (or 16-bit) values."""
    if dtype == "bfloat16" or values.dtype != np.float32:
        return [values.astype(dtype)]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * np.float32(scale)
        hi = scaled.astype(np.float16)
        return [hi, ((scaled - hi.astype(np.float32)) * np.float32(2048)).astype(np.float16)][:limbs]


def swizzled(row: np.ndarray, pieces: int) -> np.ndarray:
    """By what the numbers of a row's 16-byte pieces are xored in shared memory, for rows of so many."""
    return {8: row % 8, 4: row // 2 % 4, 2: row // 4 % 2}[pieces]


def filter_places(step, s, part: int) -> tuple[np.ndarray, ...]:
    """Of the elements of a packed row that a block of number `part` writes: tap, place in the row's channels, whether a filter has it, its channel and tap."""
    define = step.defines
    channels, kc, folds = s.channels, 8 << s.piece_bits, s.folds
    tap, j = np.divmod(np.arange(s.taps * s.channel_blocks * kc), s.channel_blocks * kc)
    if s.parts > 1:
        tap, j = (v[j // s.fitting == part] for v in (tap, j))
    if s.window:
        across, (fold, c) = j // s.window, np.divmod(j % s.window, channels)
        t, r = np.divmod(tap, s.packed_r)
        r = r * s.fold_r + fold - s.shift
        ok = (fold < s.fold_r) & (r >= 0) & (r < s.filter_r) & (across < s.filter_s)
        number = (t * s.filter_r + r) * s.filter_s + across
    else:
        fold, c = np.divmod(j, channels)
        ok, number = fold < folds, tap * folds + fold
    line = (tap * s.channel_blocks + j // kc) * define["LIMBS"] * 64 * kc + j % 8
    return line, j % kc // 8, ok, np.where(ok, c * s.w_c + number * s.w_tap, 0)


def filter_rows(step, s, memory: Memory) -> None:
    """The rows, 64 to a block, in which the filter is packed."""
    if not s.filter_rows:
        return
    define = step.defines
    source, (packed, scales, flags) = step.buffers[1], step.buffers[-4:-1]
    kind, channels, kc, taps = ELEMENT[define["IN"]], s.channels, 8 << s.piece_bits, s.taps
    check_filter(step, s, kc)
    w, target = memory.view(source, kind), memory.view(packed, "bfloat16" if kind == "bfloat16" else "float16")
    c, tap = np.divmod(np.arange(channels * s.all_taps), s.all_taps)
    whole = c * s.w_c + tap * s.w_tap
    for part in range(s.parts):
        line, piece, ok, at = filter_places(step, s, part)
        each, count = max(1, 2**18 // max(line.size, 1)), ceil(s.filter_rows - part, s.parts)
        for block in (np.arange(i, min(i + each, count)) for i in range(0, count, each)):
            group, row = np.divmod(block, s.padded_group)
            real, first, inner, scale = row < s.rows_group, (group * s.w_group + row * s.w_m)[:, None], row[:, None] % 64, np.ones(block.shape)
            own = (group * s.rows_group + row)[real]
            if kind == "float32":
                found = MagnitudeRange.of_rows(inside(w, first[real] + whole), s.slack)
                scale[real] = [one.scale() for one in found]
                store(memory.view(scales, "float32"), own, 1 / scale[real])
                store(memory.view(flags, "int32"), own, [flag_of(one.flag(), s) for one in found])
            elif define["RANGE_CHECK"]:
                store(memory.view(scales, "float32"), own, 1.0)
                store(memory.view(flags, "int32"), own, 0)
            there = ok & real[:, None]
            values = np.where(there, inside(w, np.where(there, first + at, 0)), w.dtype.type(0))
            unit = block[:, None] // 64 * s.row_blocks
            to = line + (unit * define["LIMBS"] * 64 + inner) * kc + (piece ^ swizzled(inner, kc // 8)) * 8
            for i, limb in enumerate(split(values, scale[:, None], define["LIMBS"], target.dtype.name)):
                store(target, to + i * 64 * kc, limb)
                for zeros in range(taps * s.channel_blocks, s.row_blocks):
                    store(target, (((unit + zeros) * define["LIMBS"] + i) * 64 + inner) * kc + np.arange(kc), 0)


def check_filter(step, s, kc: int) -> None:
    """Sizes of the packed filter, and the blocks that pack a row of it: as many as shared memory takes it in parts."""
    define = step.defines
    assert s.channel_blocks == ceil(s.filter_s * s.window or s.channels * s.folds, kc) and s.row_pieces == s.channel_blocks * kc // 8
    assert s.row_blocks == s.taps * s.channel_blocks + (kc < 64) and s.padded_group == ceil(s.rows_group, 64) * 64
    assert s.all_taps == (s.taps // s.packed_r * s.filter_r * s.filter_s if s.window else s.taps * s.folds)
    assert 4 * (s.fitting * s.all_taps + ceil(s.fitting, 8)) <= step.shared <= 45 * 1024 or not s.fitting
    assert s.fitting <= s.channels and (s.w_tap == 1 or (s.w_c == 1 and s.w_tap == s.channels) or (s.w_m == 1 and s.w_c == s.w_tap * s.all_taps))
    whole = define["FOLDED"] or s.fitting in (0, s.channels)
    assert whole or (s.fitting % 8 == 0 and s.part_pieces == s.fitting // 8)
    assert s.parts == (1 if whole else ceil(s.channel_blocks * kc, s.fitting))


def row_of(s, line: int) -> int:
    """The row of a filter that becomes row `line` of the packed one; -1 if none does."""
    group, m = divmod(line, s.padded_group)
    return group * s.rows_group + m if m < s.rows_group else -1


def image_tile(step, s, memory: Memory, source, packed, image: int, tile: int, scale: float) -> np.ndarray:
    """Pack one tile of an image; what was read."""
    define = step.defines
    kind, channels, chunks = ELEMENT[define["IN"]], s.channels, s.groups * s.group_chunks
    pixels, together, at_once = s.packed_d * s.packed_h * s.packed_w, s.chunks_per_tap, 1 << s.chunk_bits
    across = ceil(channels // 8, together) if together else ceil(chunks, at_once)
    vector, kc = define["VECTOR"], 8 << s.piece_bits
    assert vector == 1 or not (any(n % vector for n in (pixels, s.x_image, s.x_group, s.x_channel)) or define["FOLDED"] or define["NHWC"])
    assert define["EIGHTS"] == (channels % 8 == 0) and s.tiles_c == across
    pieces = step.block * (2 if define["NHWC"] or define["FOLDED"] else 4)
    assert (define["NHWC"] and (define["EIGHTS"] or not define["FOLDED"])) or 16 * define["LIMBS"] * pieces <= step.shared
    many = pieces // at_once
    first, pixel0 = tile % across * (together or at_once), tile // across * many
    whole = pixels + (define["FILTER"] and kc < 64)  # behind the taps a block of zeros
    assert pixel0 < whole
    pixel = np.arange(pixel0, min(pixel0 + many, whole))[:, None]
    to = np.arange(8 * first, 8 * min(first + at_once, chunks))[None]  # packed channels
    if together:
        assert channels % 8 == 0 and s.groups == 1 and s.folds * together <= at_once and chunks == s.folds * channels // 8
        assert together == 1 << s.chunks_per_tap_bits and define["FOLDED"] and not define["NHWC"]
        to = np.concatenate([tap * channels + np.arange(8 * first, min(8 * (first + together), channels)) for tap in range(s.folds)])[None]
    group, j = np.divmod(to, 8 * s.group_chunks)
    if define["FOLDED"]:
        tap, c = np.divmod(j, channels)
        r, t = tap // s.fold_s % s.fold_r, tap // (s.fold_s * s.fold_r)
        w = pixel % s.packed_w * s.stride_w - s.pad_w + tap % s.fold_s * s.dilation_w
        h = pixel // s.packed_w % s.packed_h * s.stride_h - s.pad_h + r * s.dilation_h
        d = pixel // (s.packed_w * s.packed_h) * s.stride_d - s.pad_d + t * s.dilation_d
        ok = (tap < s.folds) & (w >= 0) & (w < s.w) & (h >= 0) & (h < s.h) & (d >= 0) & (d < s.d)
        at = (d * s.h + h) * s.w + w
    else:
        assert (s.packed_d, s.packed_h, s.packed_w) == (s.d, s.h, s.w)
        c, ok, at = j, (j < channels) & (pixel >= 0), pixel + 0 * j
    assert define["NHWC"] or s.x_pixel == 1
    row = image if not define["FILTER"] else row_of(s, image)
    ok = ok & (row >= 0)
    place = max(row, 0) * s.x_image + group * s.x_group + c * s.x_channel + at * s.x_pixel
    ok = ok & (pixel < pixels) & (row < s.images)
    x = memory.view(source, kind)
    values = np.where(ok, inside(x, np.where(ok, place, 0)), x.dtype.type(0))
    target = memory.view(packed, "bfloat16" if kind == "bfloat16" else "float16")
    for i, limb in enumerate(split(values, scale, define["LIMBS"], target.dtype.name)):
        if define["FILTER"]:
            row = image % 64
            wanted = (pixel < pixels) | (to < kc)
            line = ((image // 64 * s.row_blocks + pixel * s.channel_blocks + to // kc) * define["LIMBS"] + i) * 64 + row
            store(target, (line * kc + (to % kc // 8 ^ swizzled(np.array(row), kc // 8)) * 8 + to % 8)[wanted], limb[wanted])
        else:
            met = (s.met_w >> (pixel.ravel() % s.packed_w + s.first_w) % s.step_w & 1).astype(bool)
            store(target, ((i * s.images + image) * pixels + pixel[met]) * 8 * chunks + to, limb[met])
    return values


def sampled(step, s, memory: Memory, source, image: int) -> int:
    """The exponent of the scale that is guessed for an image."""
    thread = np.arange(step.block, dtype=np.uint64)
    c = (thread * np.uint64(s.groups * s.channels) // np.uint64(step.block)).astype(int)
    pixel = ((thread * np.uint64(0x9E3779B9) % np.uint64(2**32)) * np.uint64(s.d * s.h * s.w) >> np.uint64(32)).astype(int)
    place = image * s.x_image + c // s.channels * s.x_group + c % s.channels * s.x_channel + pixel * s.x_pixel
    return MagnitudeRange.of(inside(memory.view(source, "float32"), place)).guess()


def pack(step, memory: Memory) -> None:
    s, cluster = named(step), step.defines["CLUSTER"]
    filter_rows(step, s, memory)
    source, _, packed, scales, flags, packed_tiles = step.buffers[:6]
    assert cluster in (0, 8) and (not cluster or (step.grid % cluster == 0 and s.each in (1, 2, 4, 8) and s.each >= s.tiles))

    def in_clusters(blocks: int) -> int:
        return ceil(blocks, cluster) * cluster if cluster else blocks

    if s.tickets:
        store(memory.view(step.buffers[-1], "uint32"), np.arange(s.tickets), 0)
    rows, warps = {0: (1, 1), 2: (4, 0), 3: (8, 8)}[s.row_bits]  # of a block, and of those, such as pass through shared memory at once
    assert s.filter_rows % rows == 0 and (warps < 8 or (s.parts == 1 and s.fitting == s.channels)) and (warps or (s.w_m == 1 and s.rows_group % 4 == 0))
    assert not s.filter_rows or 4 * warps * (s.fitting * s.all_taps + ceil(s.fitting, 8)) <= step.shared
    blocks = step.grid - in_clusters(s.filter_rows // rows)
    rows = s.images // s.rows_group * s.padded_group if step.defines["FILTER"] else s.images
    settling = bool(blocks and step.defines["RANGE_CHECK"] and not cluster)
    assert (s.slices > 0) == settling and s.slices <= s.tiles
    assert blocks in (0, in_clusters(rows * (s.each if cluster else s.tiles)) + s.images * s.slices) and s.lines == rows
    tiles, wide = s.tiles if blocks else 0, step.defines["IN"] == 32
    for line in range(rows if blocks else 0):
        image = row_of(s, line) if step.defines["FILTER"] else line
        real, guess, read = image >= 0, GUESS, []
        if step.defines["SAMPLE_SCALE"] and real:
            guess = sampled(step, s, memory, source, image)
        for tile in range(tiles):
            values = image_tile(step, s, memory, source, packed, line, tile, 2.0**guess if wide and real else 1.0)
            if step.defines["RANGE_CHECK"] and real:
                read.append(MagnitudeRange.of(values.astype("float32"), s.slack))
        if settling and real:
            store(memory.view(packed_tiles, "uint64"), 2 * image * tiles + np.arange(2 * tiles), TILE_MARK if s.slices > 1 else 0)
        if step.defines["RANGE_CHECK"] and real:
            found = MagnitudeRange(max(one.largest for one in read), min(one.smallest for one in read), s.slack)
            again = settle(step, memory, found, guess, (scales, flags), image)
            for tile in range(tiles if again else 0):
                image_tile(step, s, memory, source, packed, line, tile, again)


TILE_MARK = 0xFFF5D3A96B2E91C7


def clear_tiles(memory: Memory, place, tiles: int) -> None:
    """Clear what blocks that packed told those that settled scales; where one settled an image, or in a kept filter, that was done before."""
    if tiles:
        words = memory.view(place, "uint64")
        assert np.isin(words[: 2 * tiles], (0, TILE_MARK)).all()
        store(words, np.arange(2 * tiles), 0)


def settle(step, memory: Memory, found: MagnitudeRange, guess: int, places, image: int) -> float:
    """Note scale and flag of an image; the scale by which to pack it again, or 0."""
    scales, flags = (memory.view(place, kind) for place, kind in zip(places, ("float32", "int32"), strict=True))
    if step.defines["IN"] != 32:
        store(scales, image, 1.0)
        store(flags, image, 2 * (found.largest >= 0x7F800000))
        return 0.0
    guessed = found.fits(guess)
    scale = 2.0**guess if guessed else found.scale()
    store(scales, image, 1 / scale)
    store(flags, image, flag_of(int(found.loses(guess)) if guessed else found.flag(), step.arguments))
    return 0.0 if guessed or not found.usable() else scale


# ---- tensor maps


def type_of(described) -> np.dtype:
    """The elements of a tensor map's array as they lie in memory."""
    return np.dtype("float32" if described.dtype == "tfloat32" else described.dtype)


def arrived(described, values: np.ndarray) -> np.ndarray:
    """What loads of `values` leave in shared memory."""
    return (tf32(values) if described.dtype == "tfloat32" else values).astype(np.float64)


def check_map(described, memory: Memory) -> None:
    """What the driver's encoder and the loads require."""
    sizes, strides, box, size = described.sizes, described.strides, described.box, type_of(described).itemsize
    assert described.offset % 16 == 0 and described.span in (0, 32, 64, 128)
    assert len(strides) == len(sizes) - 1 and all(s % 16 == 0 and 0 < s < 2**40 for s in strides) and all(0 < n <= 2**32 for n in sizes)
    reach = size * sizes[0] + sum((n - 1) * s for n, s in zip(sizes[1:], strides, strict=True))
    assert described.offset + reach <= len(memory.buffers[described.buffer]), f"{described} is larger than its buffer"
    if isinstance(box, Im2col):
        spatial_dims = len(sizes) - 2
        assert len(box.lower) == len(box.upper) == len(box.stride) == spatial_dims
        low, high = {1: (-(2**15), 2**15 - 1), 2: (-128, 127), 3: (-16, 15)}[spatial_dims]
        assert all(low <= corner <= high for corner in (*box.lower, *box.upper)), f"{box} has a corner that is refused"
        assert all(1 <= s <= 8 for s in box.stride), f"{box} has a stride that is refused"
        assert size * box.channels == described.span and 1 <= box.pixels <= 1024
        assert size * sizes[0] % 16 == 0, "an H200 stops with an illegal instruction at channels that are no multiple of 16 bytes"
        assert all(n - 1 + up >= lo for n, up, lo in zip(sizes[1:-1], box.upper, box.lower, strict=True)), f"{box} is empty"
    else:
        steps = described.steps or (1,) * len(sizes)
        assert len(box) == len(steps) == len(sizes) and size * box[0] == (described.span or 4 * box[0]) and steps[0] == 1
        assert all(1 <= step <= 8 and 1 <= n * step <= 256 for n, step in zip(box, steps, strict=True)), f"{described} is refused"


def walked(described, start: tuple[int, ...]) -> np.ndarray:
    """The pixels [pixel][W.., image] that an im2col load fetches from its base `start` on, before a tap's offsets."""
    box, sizes = described.box, described.sizes[1:-1]
    *at, image = start
    for here, n, low, up in zip(at, sizes, box.lower, box.upper, strict=True):
        assert low <= here <= n - 1 + up, f"base {start} lies outside the box of {described}"
    pixels = []
    for _ in range(box.pixels):
        pixels.append((*at, image))
        for axis, (n, low, up, stride) in enumerate(zip(sizes, box.lower, box.upper, box.stride, strict=True)):
            at[axis] += stride
            if at[axis] <= n - 1 + up:
                break
            at[axis] = low
        else:
            image += 1
    return np.array(pixels)


def load_im2col(described, memory: Memory, starts: list, loads: list) -> np.ndarray:
    """[pixel][channel] of what :func:`walked` finds from each of `starts` on; side by side from the first channel and at the tap's offsets of each of `loads`."""
    key = (described, tuple(starts), tuple(loads))

    def load() -> np.ndarray:
        channels, offsets = np.array([first for first, _ in loads]), np.array([[*tap, 0] for _, tap in loads])
        most = {1: 2**16 - 1, 2: 255, 3: 31}[offsets.shape[1] - 1]
        assert offsets.min() >= 0 and offsets.max() <= most, f"offsets {offsets.tolist()} are refused"
        at = np.concatenate([walked(described, start) for start in starts])[:, None] + offsets
        c = channels[:, None] + np.arange(described.box.channels)
        ok, there = ((at >= 0) & (at < np.array(described.sizes[1:]))).all(2), (c >= 0) & (c < described.sizes[0])
        place = at @ (np.array(described.strides) // type_of(described).itemsize)
        elements = memory.view((described.buffer, described.offset), type_of(described))
        values = inside(elements, np.where(ok, place, 0)[..., None] + np.where(there, c, 0))
        if not (ok.all() and there.all()):
            values = np.where(ok[..., None] & there, values, elements.dtype.type(0))
        return arrived(described, values.reshape(len(at), -1))

    return memory.load(key, load)


# ---- hopper/gemm.cu, hopper/gemm_patch.cu


def check_pairs(step, shapes) -> None:
    """Phases of even and odd columns, one after the other, that are written together."""
    assert len(shapes) % 2 == 0 and not step.defines["NHWC"] and not any(shape.has_residual for shape in shapes)
    for even, odd in zip(shapes[::2], shapes[1::2], strict=True):
        same = ("tiles", "tiles_m", "splits", "tiles_pixels", "pixels", "plane", "pq", "q", "out_size", "out_d", "out_h", "out_w", "out_image", "out_row")
        assert all(getattr(even, name) == getattr(odd, name) for name in same) and odd.out_base == even.out_base + 1 and even.out_w == 2
        assert not any(n % 2 for n in (2 * even.q, even.out_base, even.out_h, even.out_d, even.out_size, even.out_image, even.out_row))


def check_product(step, s, memory: Memory) -> None:
    """What the kernel asserts, or relies on."""
    define, (x_map, *y_map) = step.defines, step.maps
    assert not define["W_MN_MAJOR"] or s.w_lies
    if define["PRODUCTS"] == 1 and define["NHWC"]:
        w_map, *y_map = y_map
    if s.w_lies:
        kc = define["LOAD_CHANNELS"]
        assert w_map.box == (kc, 1, 64) and w_map.span == 2 * kc and w_map.buffer == WEIGHT and w_map.dtype == x_map.dtype
        assert not define["W_MN_MAJOR"] or kc == 64
    rows, pixels = define["BLOCK_M"], define["BLOCK_N"]
    for described in step.maps:
        check_map(described, memory)
    assert (x_map.box.channels, x_map.box.pixels) == (define["LOAD_CHANNELS"], pixels) and len(x_map.sizes) == s.spatial_dims + 2
    assert x_map.dtype == ("bfloat16" if define["BF16"] else "float16")
    assert len(y_map) == define["TENSOR_STORE"]
    consumers = 1 if define.get("TWIN") else 2
    assert define["WGMMA_N"] == (pixels if rows == 128 or consumers == 1 else pixels // 2) and define["WGMMA_N"] % 8 == 0
    assert define["WGMMA_N"] <= (192 if define["PINGPONG"] else 256)
    assert not define["PINGPONG"] or (rows == 128 and define["PRODUCTS"] == 1 and not define["INTERLEAVE_COLUMNS"])
    staging = 2 * 32 * 64 * np.dtype(ELEMENT[define["OUT"]]).itemsize if y_map else 4 * (64 * define["WGMMA_N"] + 1024) if define["INTERLEAVE_COLUMNS"] else 4 * 4 * 32 * 20
    ring = define["STAGES"] * limbs_of(step) * (rows + pixels) * 128
    of_pixel = 12 if define["INTERLEAVE_COLUMNS"] else 4
    assert ring + consumers * (staging + of_pixel * define["WGMMA_N"]) + 1023 <= step.shared
    assert step.shared + 16 * (define["STAGES"] + 1) <= (MOST_SHARED if consumers == 2 else MOST_SHARED // 2 - 1024)
    assert step.block == 128 * (1 + consumers) and step.arch == "sm_90a" and 1 <= step.grid <= s.tiles < 2**31


def limbs_of(step) -> int:
    return 2 if step.defines["PRODUCTS"] == 3 else 1


def numbers_of(step, s):
    """Each tile of every block."""
    return (tile for block in range(step.grid) for tile in range(block, s.tiles, step.grid))


def tiles_of(step, s):
    """Each tile of every block: its first row, the number of its pixels' tile, group and split."""
    for tile in numbers_of(step, s):
        rest, m = divmod(tile, s.tiles_m)
        rest, part = divmod(rest, s.splits)
        group, pixel = divmod(rest, s.tiles_pixels)
        yield m * step.defines["BLOCK_M"], pixel, group, part


def runs_of(step, s, of_tile: int):
    """Tiles whose pixels are neighbours, together, each of which loads `of_tile` elements: their first row, the first of the pixels' tiles, how many, group and split."""
    found: dict[tuple, list[int]] = {}
    for m, pixel, group, part in tiles_of(step, s):
        found.setdefault((m, group, part), []).append(pixel)
    most, real = max(1, 2**20 // max(of_tile, 1)), ceil(s.pixels, step.defines["BLOCK_N"])
    assert real <= s.tiles_pixels and (step.defines["PHASES"] > 1 or real == s.tiles_pixels)  # other phases of the launch may have more
    for (m, group, part), tiles in found.items():
        assert sorted(tiles) == list(range(s.tiles_pixels)), "a tile is lost or computed twice"
        for first in range(0, real, most):
            yield m, first, min(most, real - first), group, part


def multiply(total: np.ndarray, a: np.ndarray, b: list) -> None:
    """Add one product of limbs, or three."""
    with np.errstate(invalid="ignore", over="ignore"):
        total += a[0] @ b[0].T
        if len(b) == 2:
            total += (a[0] @ b[1].T + a[1] @ b[0].T) * 2.0**-11


def product(step, memory: Memory) -> None:
    """Its phases one after the other: a launch takes them by turns, as many tiles of each."""
    assert 128 * len(step.maps) + 8 * (len(step.numbers) + len(step.buffers)) <= 4096
    count, tiles = step.structs[0].x_tiles, 1 if step.defines["PHASES"] > 1 else 2
    for place, some in zip(step.buffers[-tiles:], (count % 2**32, count >> 32), strict=False):
        clear_tiles(memory, place, some)
    step = replace(step, buffers=step.buffers[:-tiles])
    room, mends = step.defines["PHASES"], step.defines["OUT"] == 32 and not step.defines["BF16"]
    may_join = step.defines["OUT"] == 32 and not any(step.defines[name] for name in ("BF16", "PINGPONG"))
    args, others = step.structs[:room], step.structs[room + (room > 1) :]
    assert room in (1, 4) and len(others) == (room + 1 if mends else 0) + may_join
    numbers = turns_of(step, step.structs[room]) if room > 1 else [(0, 0, 0, 0)]
    whole = []
    for phase, tap, y, w in numbers:
        shape = args[phase]._replace(tap_base=args[phase].tap_base + tap, out_base=args[phase].out_base + y)
        mend = others[phase]._replace(w_base=others[phase].w_base + w) if mends else None
        whole.append((replace(step, arguments=shape, maps=(*step.maps[phase : phase + 1], *step.maps[room:])), mend))
    tiles = {named(one).tiles for one, _ in whole}
    turns = len(whole) // 2 if step.defines["INTERLEAVE_COLUMNS"] else len(whole)
    assert len(tiles) == 1 and step.grid <= turns * max(tiles) and (step.grid == turns * max(tiles) or math.gcd(step.grid, turns) == 1)
    if step.defines["INTERLEAVE_COLUMNS"]:
        check_pairs(step, [named(one) for one, _ in whole])
    for one, _ in whole:
        multiplied(replace(one, grid=min(step.grid, *tiles)), memory)
    before, joined = memory.mended, may_join and bool(step.structs[-1].joins)
    if joined:
        assert not step.layer, "constants of the layer would finish the parts, too"
        whole = [(join(one, named(one), step.structs[-1], number, len(whole), memory), mend) for number, (one, mend) in enumerate(whole)]
    first = named(whole[0][0])
    if mends and (first.splits == 1 or joined) and first.scaled & 1:
        for one, mend in whole:
            mend_own(one, named(one), mend, others[room], memory)
        if first.scaled & 2:
            store(memory.view(step.buffers[12], "int32"), np.arange(step.grid), 0)
            store(memory.view(step.buffers[12], "int32"), 0, int(memory.mended > before))


def may_emit(define) -> bool:
    """Whether a text of hopper/gemm.cu can note moments: common stores of whole sums that leave registers."""
    common = define["DENSE"] and define["VEC"] == 4 and define["LOAD_CHANNELS"] == 64 and not define["W_MN_MAJOR"]
    return bool(common and not (define["BF16"] and define["OUT"] == 32) and (define["PRODUCTS"] == 1 or define["WGMMA_N"] <= 128))


def turns_of(step, s) -> list[tuple[int, int, int, int]]:
    """Of each turn of a launch its phase, and how many taps, pixels of y and elements of w it lies behind that one's first."""
    assert all(getattr(s, name) == divider(max(getattr(s, name[3:]), 1)) for name in s._fields if name.startswith("by_"))
    repeats, found, pixel = s.turns // s.phases, [], step.structs[0].rows if step.defines.get("NHWC", 1) else 1
    assert s.turns == repeats * s.phases and s.phases <= step.defines["PHASES"] and repeats % (s.along_r * s.along_s) == 0
    for repeat in range(repeats):
        of_s, of_r, of_t = repeat % s.along_s, repeat // s.along_s % s.along_r, repeat // (s.along_s * s.along_r)
        tap, y, w = (of_t * t + of_r * r + of_s * along for t, r, along in ((s.tap_t, s.tap_r, s.tap_s), (s.y_t, s.y_r, s.y_s), (s.w_t, s.w_r, s.w_s)))
        assert y % pixel == 0
        found += [(phase, tap, y // pixel, w) for phase in range(s.phases)]
    return found


def join(step, s, a, number: int, phases: int, memory: Memory):
    """Add the parts of a phase's sums, by as many tickets as there are tiles; as a step whose result they are."""
    *_, y, tickets = step.buffers
    kind, define = "float32", step.defines
    assert s.tiles % s.splits == 0 and s.splits > 1 and not (s.has_bias or s.has_scale or s.has_residual or s.activation)
    taken = inside(memory.view(tickets, "uint32"), np.arange(s.tiles // s.splits) * phases + number)
    assert not taken.any(), "tickets that nobody has set to zero"
    k = np.arange(s.rows)[:, None]
    image, inner = np.divmod(np.arange(s.pixels), s.plane)
    offset = inner if define["DENSE"] else s.out_base + inner // s.pq * s.out_d + inner % s.pq // s.q * s.out_h + inner % s.q * s.out_w
    at = (image * s.out_size + offset) * s.rows + k if define["NHWC"] else image * s.out_image + k * s.out_row + offset
    total = sum(inside(memory.view(step.buffers[6], "float32"), part * s.out_part + at).astype(float) for part in range(s.splits))
    *_, bias, scale, residual, _ = step.buffers[:7]
    asked = {"HAS_SCALE": a.has_scale, "HAS_BIAS": a.has_bias, "HAS_RESIDUAL": a.has_residual, "ACTIVATION": (a.activation, a.slope)}
    store(memory.view(y, kind), at, finished(asked, memory, kind, total, scale, bias, residual, np.broadcast_to(k, at.shape), at).astype(kind))
    finishes = s._replace(**{name: getattr(a, name) for name in ("has_bias", "has_scale", "has_residual", "activation", "slope")})
    return replace(step, arguments=finishes, buffers=(*step.buffers[:6], y, *step.buffers[7:]))


def multiplied(step, memory: Memory) -> None:
    s, define = named(step), step.defines
    check_product(step, s, memory)
    x_map, spatial_dims, pixels, kc = step.maps[0], s.spatial_dims, define["BLOCK_N"], define["LOAD_CHANNELS"]
    sub_tiles = 64 // kc
    stages = ceil(s.blocks, sub_tiles)
    each = s.split_stages
    assert each == ceil(stages, s.splits)
    for m, first, count, group, part in runs_of(step, s, each * 64 * pixels):
        starts, a, loads = [], [], []
        for pixel in range(first * pixels, (first + count) * pixels, pixels):
            image, inner = divmod(pixel, s.load_plane)
            start = (inner % s.load_q * s.stride_w + s.low_w, inner % s.load_pq // s.load_q * s.stride_h + s.low_h, inner // s.load_pq * s.stride_d + s.low_d)
            starts.append((*start[:spatial_dims], image))
        for block in range(min(part * each, stages) * sub_tiles, min(part * each + each, stages) * sub_tiles):
            real = block < s.blocks  # the last stage is filled with zeros
            tap, c = divmod(block, s.channel_blocks)
            t, r, across = tap // (s.tap_s * s.tap_r), tap // s.tap_s % s.tap_r, tap % s.tap_s
            w_tap = s.tap_base + t * s.tap_step_t + r * s.tap_step_r + across * s.tap_step_s
            offsets = (across * s.dilation_w, r * s.dilation_h, t * s.dilation_d) if real else (0, 0, 0)
            assert not any(offsets[spatial_dims:]), "an offset is lost"
            assert not real or 0 <= w_tap < s.row_blocks // s.channel_blocks, f"tap {w_tap} of {s.row_blocks} blocks"
            number = w_tap * s.channel_blocks + c if real else s.row_blocks - 1
            if define["W_MN_MAJOR"]:
                a.append(load_filter_box(step, memory, group * s.channels_group + c * kc, w_tap, m, turned=True)[None])
            elif s.w_lies:
                a.append(load_filter_box(step, memory, c * kc if real else s.channels, w_tap, group * s.rows_group + m)[None])
            else:
                a.append(load_filter(step, s, memory, group * s.blocks_group + m // 64, (group + 1) * s.blocks_group - 1, number))
            loads.append((group * s.channels_group + c * kc if real else s.channels, offsets[:spatial_dims]))
        total = np.zeros((define["BLOCK_M"], count * pixels))
        if loads:
            of_limbs = ([(*at, image + limb * s.limb_images) for *at, image in starts] for limb in range(limbs_of(step)))
            multiply(total, np.concatenate(a, axis=2), [load_im2col(x_map, memory, of_limb, loads) for of_limb in of_limbs])
        write_pixels(step, s, memory, total, m, first * pixels, s.pixels, group, part)


@cache
def box_of(sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Where the elements of a box at zero lie, outermost axis first, in elements; their indices along each axis; that all of them are inside."""
    along = [np.arange(n).reshape(-1, *(1,) * axis) for axis, n in enumerate(box)]
    return sum(here * stride for here, stride in zip(along, strides, strict=True)), along, np.ones(box[::-1], bool)


def box_places(described, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of the box at `start`, innermost first, lie, outermost axis first; and which of them are in the tensor."""
    size = type_of(described).itemsize
    assert start[0] * size % 16 == 0, "an H200 stops with an illegal instruction at a load that does not begin at a multiple of 16 bytes"
    strides = (1, *(stride // size for stride in described.strides))
    at, along, ok = box_of(described.sizes, strides, described.box)
    for first, n, many, here in zip(start, described.sizes, described.box, along, strict=True):
        if first < 0 or first + many > n:
            ok = ok & (here >= -first) & (here < n - first)
    return at + sum(first * stride for first, stride in zip(start, strides, strict=True)), ok


def boxed(described, memory: Memory, start: tuple[int, ...]) -> np.ndarray:
    """The box at `start`, outermost axis first, zero outside the tensor."""

    def load() -> np.ndarray:
        at, ok = box_places(described, start)
        elements = memory.view((described.buffer, described.offset), type_of(described))
        if ok.all():
            return arrived(described, inside(elements, at))
        return arrived(described, np.where(ok, inside(elements, np.where(ok, at, 0)), elements.dtype.type(0)))

    return memory.load((described, start), load)


@cache
def swizzled_columns(pieces: int) -> np.ndarray:
    """[row][piece] of 64 rows of so many pieces."""
    return np.arange(pieces) ^ swizzled(np.arange(64)[:, None], pieces)


def load_filter(step, s, memory: Memory, block: int, last: int, number: int) -> np.ndarray:
    """[limb][row][channel] of KC channels of one tap of the packed filter, from 64 rows or twice as many."""
    define = step.defines
    kc, limbs = define["LOAD_CHANNELS"], limbs_of(step)

    def load() -> np.ndarray:
        w = memory.view(step.buffers[0], "bfloat16" if define["BF16"] else "float16")
        unit, found = limbs * 64 * kc, []
        for one in (block, min(block + 1, last))[: define["BLOCK_M"] // 64]:  # rows that there are not are others, loaded twice
            first = (one * s.row_blocks + number) * unit
            assert 0 <= first <= len(w) - unit, f"access outside an array of {len(w)} elements: {first} .. {first + unit - 1}"
            raw = w[first : first + unit].reshape(limbs, 64, kc // 8, 8)
            found.append(raw[:, np.arange(64)[:, None], swizzled_columns(kc // 8)].reshape(limbs, 64, kc))
        return np.concatenate(found, axis=1).astype(np.float64)

    return memory.load((step.buffers[0], block, number), load)


def load_filter_box(step, memory: Memory, channel: int, tap: int, row: int, turned: bool = False) -> np.ndarray:
    """[row][channel] of a tile, of the filter as it lies, where rows or, `turned`, channels are its outermost axis."""
    rows = [row + 64 * i for i in range(step.defines["BLOCK_M"] // 64)]
    if turned:
        return np.concatenate([boxed(step.maps[1], memory, (first, tap, channel))[:, 0].T for first in rows])
    return np.concatenate([boxed(step.maps[1], memory, (channel, tap, first))[:, 0] for first in rows])


def write_pixels(step, s, memory: Memory, total: np.ndarray, m0: int, pixel0: int, end: int, group: int, part: int) -> None:
    """:func:`write_tile` of neighbouring pixels, of which those below `end` count."""
    pixel, per = pixel0 + np.arange(total.shape[1]), step.defines["WGMMA_N"]
    assert not s.scaled & 2 or pixel0 % per == 0
    write_tile(step, s, memory, total, m0, np.minimum(pixel, end - 1), pixel < end, group, part, pixel0 // per, pixel0)


def write_tile(
    step, s, memory: Memory, total: np.ndarray, m0: int, pixel: np.ndarray, counted: np.ndarray, group: int, part: int, number: int, pixel0: int = 0,
) -> None:
    """Scales, finishes and writes a tile's sums of the pixels that count; its first slice of moments is that `number`."""
    define = step.defines
    _, scale_n, scale_k, bias, scale, residual, y, *moments = step.buffers
    kind = ELEMENT[define["OUT"]]
    m = m0 + np.arange(define["BLOCK_M"])[:, None]
    k = group * s.rows_group + m
    if s.scaled & 1:
        total = total * inside(memory.view(scale_n, "float32"), pixel[None] // s.plane).astype(float) * inside(memory.view(scale_k, "float32"), np.minimum(k, s.rows - 1))
    channel = np.minimum(k, s.rows - 1)
    m, pixel = m[m < s.rows_group][:, None], pixel[counted][None]
    k, (image, inner) = group * s.rows_group + m, np.divmod(pixel, s.plane)
    if define["DENSE"]:
        offset = inner
    else:
        offset = s.out_base + inner // s.pq * s.out_d + inner % s.pq // s.q * s.out_h + inner % s.q * s.out_w
    at = (image * s.out_size + offset) * s.rows + k if define["NHWC"] else image * s.out_image + k * s.out_row + offset
    places = np.zeros(total.shape, int)
    places[np.ix_(np.arange(m.size), counted)] = at
    v = finished(finishing(step), memory, kind, total, scale, bias, residual, channel, places).astype(kind)
    if s.scaled & 2 and pixel.size:
        for i, first in enumerate(range(0, pixel.size, define["WGMMA_N"])):  # what one consumer has
            emit_moments(memory.view(moments[0], "float32"), s.rows, v[: m.size, counted][:, first : first + define["WGMMA_N"]], k.ravel(), number + i)
    if define["TENSOR_STORE"]:
        write_boxes(step, s, memory, v, m0, pixel0, group, part)
        return
    vec = define["VEC"]
    if vec > 1:  # neighbours, at a multiple of their number, all or none of them in the tile
        lines = at.reshape(-1, vec, pixel.size).swapaxes(1, 2) if define["NHWC"] else at.reshape(m.size, -1, vec)
        assert (lines == lines[..., :1] + np.arange(vec)).all() and (lines[..., 0] % vec == 0).all()
    assert s.out_part == s.pixels // s.plane * s.rows * s.out_size
    at = at + part * s.out_part
    store(memory.view(y, kind), at, v[: m.size, counted])
    memory.count(y, at)


def emit_moments(moments: np.ndarray, channels: int, v: np.ndarray, k: np.ndarray, number: int) -> None:
    """Of each channel `k` over the pixels [k][pixel] of the slice `number`, the mean and the sum of squares of what they are off by."""
    v = v.astype(float)
    store(moments, 2 * number * channels + k, v.mean(1))
    store(moments, (2 * number + 1) * channels + k, ((v - v.mean(1)[:, None]) ** 2).sum(1))


def finishing(step) -> dict:
    """What finishes the sums of a step, some of it by its arguments."""
    (s,) = step.structs
    return step.defines | {"HAS_BIAS": s.has_bias, "HAS_SCALE": s.has_scale, "HAS_RESIDUAL": getattr(s, "has_residual", step.defines.get("HAS_RESIDUAL")), "ACTIVATION": (s.activation, s.slope)}


def finished(define, memory: Memory, kind: str, total, scale, bias, residual, channel, at) -> np.ndarray:
    """The epilogue of sums of the channels `channel` whose places in the result are `at`, in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if define["HAS_SCALE"]:
            total = total * inside(memory.view(scale, kind), channel).astype(float)
        if define["HAS_BIAS"]:
            total = total + inside(memory.view(bias, kind), channel).astype(float)
        if define["HAS_RESIDUAL"]:
            total = total + inside(memory.view(residual, kind), at).astype(float)
        number, bits = define["ACTIVATION"]
        slope = float(np.array(bits, np.int32).view(np.float32))  # as these kernels read it
        word = ACTIVATION_WORDS[number]
        assert slope == 0 or word == "leaky_relu"
        return activated(total, ("leaky_relu", slope) if word == "leaky_relu" else word).astype(np.float32)


def write_boxes(step, s, memory: Memory, v: np.ndarray, m0: int, pixel0: int, group: int, part: int) -> None:
    """A tile by TMA, 32 pixels and 128 bytes of channels at a time."""
    described, place = step.maps[-1], step.buffers[6]
    assert step.defines["DENSE"] and step.defines["NHWC"] and step.defines["WGMMA_N"] % 32 == 0
    assert place in (described.buffer, (described.buffer, described.offset)) and described.dtype == ELEMENT[step.defines["OUT"]]
    wide = 128 // np.dtype(described.dtype).itemsize
    assert described.box == (wide, 1, 32, 1)
    for m in range(0, step.defines["BLOCK_M"], wide):
        for pixel in range(0, v.shape[1], 32):
            values = v[m : m + wide, pixel : pixel + 32].T[None, :, None]
            store_box(described, place, memory, values, (m0 + m, group, pixel0 + pixel, part))


def store_box(described, place, memory: Memory, values: np.ndarray, start: tuple[int, ...]) -> None:
    """`values`, outermost axis first, to the box at `start`, innermost first, but for what lies outside the tensor."""
    assert values.shape == described.box[::-1]
    at, ok = box_places(described, start)
    store(memory.view((described.buffer, described.offset), described.dtype), at[ok], values[ok])
    memory.count(place, at[ok])


# ---- hopper/dense.cu, transpose_filter.cu


def transpose_filter(step, memory: Memory) -> None:
    s, kind = named(step), {2: "uint16", 4: "uint32"}[step.defines["BYTES"]]
    assert step.block == 256 and step.grid == ceil(s.rows, 64) * s.taps * s.tiles_c and s.tiles_c == ceil(s.channels, 64)
    row, tap, channel = np.ogrid[: s.rows, : s.taps, : s.channels]
    values = inside(memory.view(step.buffers[0], kind), row * s.row_step + tap * s.tap_step + channel * s.channel_step)
    assert s.pitch >= s.taps * s.channels
    store(memory.view(step.buffers[1], kind), (row * s.pitch + tap * s.channels + channel).ravel(), values.ravel())


# ---- hopper/wgrad.cu, hopper/wgrad_reduce.cu


def wgrad_reduce(step, memory: Memory) -> None:
    s, kind = named(step), ELEMENT[step.defines["TYPE"]]
    assert step.block == 32 * s.tile_taps <= 512 and s.tiles_t * s.tile_taps >= s.taps and s.tiles_c * 64 >= s.channels and s.pitch % 2 == 0 <= s.pitch - s.channels
    assert step.grid * s.taps * s.pitch == s.size * s.tiles_c * s.tiles_t
    source, to = step.buffers
    assert s.own * s.folds == s.channels
    parts, dw, met = memory.view(source, "float32"), memory.view(to, kind), np.zeros(s.size // s.pitch * s.channels, int)
    for block in range(step.grid):
        rest, across = divmod(block, s.tiles_c)
        k, down = divmod(rest, s.tiles_t)
        tap = np.arange(down * s.tile_taps, min((down + 1) * s.tile_taps, s.taps))[:, None]
        c = np.arange(64 * across, min(64 * (across + 1), s.channels))
        total = sum(inside(parts, split * s.size + (k * s.taps + tap) * s.pitch + c).astype(float) for split in range(s.splits))
        at = ((k * s.own + c % s.own) * s.taps + tap) * s.folds + c // s.own
        store(dw, at, total.astype(kind))
        np.add.at(met, at.ravel(), 1)
    assert (met == 1).all(), "elements were written twice or not at all"


# ---- hopper/pointwise.cu


def tf32(values: np.ndarray) -> np.ndarray:
    """`values`, rounded to TF32; halves away from zero, as cvt.rna does."""
    bits = values.astype(np.float32).view(np.uint32)
    return np.where(np.isfinite(values), ((bits + 0x1000) & 0xFFFFE000).view(np.float32), values.astype(np.float32))


# ---- the direct engine's kernels beside it


def asked_of(step) -> dict[str, int]:
    """The epilogue of a kernel of plain cores, in the words of :func:`finished`."""
    a = step.arguments
    return {"HAS_SCALE": a.has_scale, "HAS_BIAS": a.has_bias, "HAS_RESIDUAL": a.has_residual, "ACTIVATION": (a.activation, a.slope)}


def direct_reduce(step, memory: Memory) -> None:
    a = step.arguments
    parts, bias, scale, residual, y = step.buffers
    kind = ELEMENT[step.defines["DTYPE"]]
    assert step.grid == ceil(a.size, 1 << a.width) and a.run * (step.block >> a.width) >= a.split
    i = np.arange(a.size)
    total = sum(inside(memory.view(parts, "float32"), split * a.size + i).astype(float) for split in range(a.split))
    total = finished(asked_of(step), memory, kind, total, scale, bias, residual, i // a.plane % a.channels, i)
    store(memory.view(y, kind), i, total.astype(kind))


def direct_gemm(step, memory: Memory) -> None:
    """The guarded kernel: what depends on flagged images and channels, by the formula at its head; it goes by tiles, this by elements."""
    d, a = SimpleNamespace(**step.defines), step.arguments
    assert d.RECOMPUTE and a.split == 1 and a.n_blocks == ceil(a.n_pixels, d.BLOCK_N) * a.groups * ceil(a.m, d.BLOCK_M)
    redone, before = step.buffers[-1], memory.mended
    if a.with_moments:
        store(memory.view(redone, "int32"), np.arange(step.grid), 0)
    mend(memory, a, ELEMENT[d.DTYPE], asked_of(step), step.buffers)
    if a.with_moments:
        store(memory.view(redone, "int32"), 0, int(memory.mended > before))


def mend(memory: Memory, a, kind: str, asked: dict, buffers, by_summands: bool = False) -> None:
    """Compute once more what flagged images and channels make doubtful: behind an activation all results, or those that have small summands."""
    source, filters, bias, scale, residual, y, image_flags, filter_flags, image_scales, filter_scales, *_ = buffers
    x, w, out = memory.view(source, kind), memory.view(filters, kind), memory.view(y, kind)
    image, inner = np.divmod(np.arange(a.n_pixels), a.plane)
    o, p, q = inner // (a.p * a.q), inner // a.q % a.p, inner % a.q
    count = a.n_pixels // a.plane
    assert a.images == count
    images = inside(memory.view(image_flags, "int32"), np.arange(a.images))
    channels = inside(memory.view(filter_flags, "int32"), np.arange(a.groups * a.m))
    assert np.isin(images, (0, 1, 2)).all() and np.isin(channels, (0, 1, 2)).all(), "flags that nobody has written"
    if not images.any() and not channels.any():
        return
    c, m = np.arange(a.gemm_k // max(a.taps, 1)), np.arange(a.m)
    with np.errstate(over="ignore", invalid="ignore"):
        for g in range(a.groups):
            total, sizes = np.zeros((2, a.m, a.n_pixels))
            for t, r, s in np.ndindex(a.taps // (a.r * a.s) if a.taps else 0, a.r, a.s):
                at_d, at_h, at_w = o * a.stride_d - a.pad_d + t * a.dil_d, p * a.stride_h - a.pad_h + r * a.dil_h, q * a.stride_w - a.pad_w + s * a.dil_w
                ok = (at_d >= 0) & (at_d < a.d) & (at_h >= 0) & (at_h < a.h) & (at_w >= 0) & (at_w < a.w)
                place = image * a.x_image + at_d * a.x_d + at_h * a.x_h + at_w * a.x_w
                values = np.where(ok, inside(x, np.where(ok, place, 0) + g * a.x_group + c[:, None] * a.x_channel), x.dtype.type(0))
                taps = inside(w, a.w_base + g * a.w_g + m[:, None] * a.w_m + c * a.w_c + t * a.w_t + r * a.w_r + s * a.w_s)
                total += np.einsum("mc,cn->mn", taps.astype(float), values.astype(float))
                sizes += np.einsum("mc,cn->mn", np.abs(taps.astype(float)), np.abs(values.astype(float)))
            at = a.y_base + image * a.y_image + g * a.y_group + m[:, None] * a.y_channel + o * a.y_d + p * a.y_h + q * a.y_w
            total = finished(asked, memory, kind, total, scale, bias, residual, g * a.m + m[:, None], at)
            flags, written = images[image] | channels[g * a.m + m][:, None], inside(out, at).astype(float)
            if asked["HAS_RESIDUAL"]:
                written = written - inside(memory.view(residual, kind), at).astype(float)
            if a.has_bias:
                written = written - inside(memory.view(bias, kind), g * a.m + m)[:, None].astype(float)
            scales = inside(memory.view(image_scales, "float32"), image) * inside(memory.view(filter_scales, "float32"), g * a.m + m)[:, None]
            factor = np.abs(inside(memory.view(scale, kind), g * a.m + m)[:, None].astype(float)) if a.has_scale else 1
            large = (sizes == 0) | (sizes >= 4 * a.gemm_k * scales)
            seen = (np.abs(written) >= 2 * math.sqrt(a.gemm_k) * scales * factor) | large
            if a.activation:
                seen = large if by_summands else np.zeros_like(seen)
            wanted = (flags > 1) | ((flags > 0) & ~seen)
            memory.mended += int(wanted.sum())
            store(out, at[wanted], total[wanted].astype(kind))


def mend_own(step, s, phase, arrays, memory: Memory) -> None:
    """What blocks of hopper/gemm.cu do when they are through."""
    define = step.defines
    _, x_scales, w_scales, bias, scale, residual, y = step.buffers[:7]
    x, w, x_flags, w_flags = step.buffers[7 + may_emit(define) : 11 + may_emit(define)]
    taps, pixel = phase.taps_t * phase.taps_r * phase.taps_s, s.rows if define["NHWC"] else 1
    strides = {f"{name}_{axis}": getattr(at, f"{long}_{axis}") for name, long, at in (("stride", "stride", arrays), ("pad", "pad", phase), ("dil", "dilation", arrays)) for axis in "dhw"}
    a = SimpleNamespace(
        n_pixels=s.pixels, plane=s.plane, p=s.pq // s.q, q=s.q, images=s.pixels // s.plane, groups=s.rows // s.rows_group,
        m=s.rows_group, gemm_k=arrays.channels * taps, taps=taps, r=phase.taps_r, s=phase.taps_s, **strides, d=arrays.d, h=arrays.h, w=arrays.w,
        x_image=arrays.x_image, x_group=arrays.x_group, x_channel=arrays.x_channel,
        x_w=arrays.x_pixel, x_h=arrays.x_pixel * arrays.w, x_d=arrays.x_pixel * arrays.w * arrays.h,
        w_base=phase.w_base, w_g=arrays.w_group, w_m=arrays.w_m, w_c=arrays.w_c, w_t=arrays.w_t, w_r=arrays.w_r, w_s=arrays.w_s,
        y_base=s.out_base * pixel, y_image=s.out_image, y_group=s.rows_group * s.out_row, y_channel=s.out_row,
        y_d=s.out_d * pixel, y_h=s.out_h * pixel, y_w=s.out_w * pixel, has_bias=s.has_bias, has_scale=s.has_scale, activation=s.activation,
    )  # fmt: skip
    asked = {"HAS_SCALE": s.has_scale, "HAS_BIAS": s.has_bias, "HAS_RESIDUAL": s.has_residual, "ACTIVATION": (s.activation, s.slope)}
    mend(memory, a, "float32", asked, (x, w, bias, scale, residual, y, x_flags, w_flags, x_scales, w_scales), by_summands=True)


# ---- a whole call


def launch(stages, memory: Memory, finite: bool) -> None:
    kernels = {"pack": pack, "direct_reduce": direct_reduce, "direct_gemm": direct_gemm, "hopper_gemm": product}
    for stage in stages:
        for step in stage:
            assert 1 <= step.grid < 2**31
            memory.loaded, memory.finite = {}, finite
            kernels[step.kernel](step, memory)


def gpu(multiprocessors: int = 132) -> SimpleNamespace:
    """A device that plans are made for: an H200 with as many multiprocessors."""
    return SimpleNamespace(capability=(9, 0), multiprocessors=multiprocessors, backend="cuda", name="cuda:0", model="NVIDIA H200")


def fastest(engine, problem, device):
    """What `engine` predicts to be its fastest configuration, behind its time, whether or not another engine's is faster."""
    return min(((engine.time(problem, config, device), config) for config in engine.configs(problem, device)), key=lambda pair: pair[0])


def program_of(problem, config, multiprocessors: int, with_moments: bool = False):
    return registry.engine_of(config).schedule(problem.launched, config, gpu(multiprocessors), with_moments)


def emulate_moments(problem, config, x, w, b=None, *, multiprocessors: int = 5, run=None) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """The result of a launch that notes moments, each channel's mean and variance by them, and whether results were redone since.

    `run`: a function of (stages, memory) instead of :func:`launch`.
    """
    program = program_of(problem, config, multiprocessors, True)
    moments = program.moments
    memory = Memory(problem, program, x, w, b, None, None)
    (run or partial(launch, finite=True))(program.whole, memory)
    slices = moments.sets * ceil(moments.span, moments.per)
    parts = inside(memory.view((WORKSPACE, moments.parts), "float32"), np.arange(slices * 2 * moments.channels)).reshape(slices, 2, moments.channels).astype(float)
    count = np.minimum(moments.per, moments.span - np.arange(slices) % (slices // moments.sets) * moments.per)[:, None]
    mean = (count * parts[:, 0]).sum(0) / count.sum()
    squares = (parts[:, 1] + count * (parts[:, 0] - mean) ** 2).sum(0)
    redone = inside(memory.view((WORKSPACE, moments.redone), "int32"), np.arange(moments.blocks))
    return memory.result(problem, x.dtype.name), mean, squares / count.sum(), bool(redone.any())


def emulate(
    problem, config, x, w, b=None, scale=None, residual=None, *, multiprocessors: int = 5, finite: bool = True, keep: bool = True, mended: list | None = None
) -> np.ndarray:
    """What `config` computes, of arrays that are NCHW whatever the problem's layout; with `keep`, of a kept filter as well.

    `mended` takes the number of results that were computed again.
    """
    program = program_of(problem, config, multiprocessors)
    results = []
    for kept in (False, True)[: 1 + keep]:
        if kept and (*program.prepare, *program.steps) == (*program.whole,):
            continue  # no filter is kept: the same launches again
        memory = Memory(problem, program, x, w, b, scale, residual)
        for stages in (program.prepare, program.steps) if kept else (program.whole,):
            launch(stages, memory, finite)
        (counts,) = memory.writes.values()
        sums = math.prod(problem.result_shape)
        assert len(counts) == getattr(config, "SPLIT", 1) * sums and (counts == 1).all(), "elements were written twice or not at all"
        results.append(memory.result(problem, x.dtype.name))
        if mended is not None:
            mended.append(memory.mended)
    if program.filter_last:
        memory = Memory(problem, program, x, w, b, scale, residual, filter_last=True)
        if not any(step.kernel == "pack" and named(step).filter_rows for stage in program.filter_last for step in stage):
            memory.buffers[PACKED] = np.zeros(0, np.uint8)
        launch(program.filter_last, memory, finite)
        results.append(memory.result(problem, x.dtype.name))
    assert len({result.tobytes() for result in results}) == 1, "a kept filter, or one that is not packed, gives other bits"
    return results[0]
