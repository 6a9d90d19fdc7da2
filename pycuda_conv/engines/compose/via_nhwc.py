"""Convolutions of NCHW arrays by way of channels last: arrays are transposed (``cu/layout/via_nhwc.cu``), and another engine does the rest.

Tensor cores take 16-bit channels as they lie only if these are neighbours, so many engines read channels-last arrays alone. Transposing an
array takes as long as a copy. wgrad in float32 goes the other way: most of its engines read NCHW alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config, ConvProblem, Engine, VariantSet, costs, kernel_struct
from pycuda_conv.engines.compose.delegate import AroundOthers, Delegating, delegate_of, moved
from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.limits import HOPPER, IN_32_BITS, NOT_EMPTY, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, PACKED, RESIDUAL, RESULT, WEIGHT, WORKSPACE, Arena, Buffer, Schedule
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS, TILE_BYTES = 256, 8192  # threads of a block, and bytes of its tile


@dataclass(frozen=True)
class ViaNhwc(Delegating):
    """The configuration for the transposed arrays, as text."""


@dataclass(frozen=True)
class ViaNchw(ViaNhwc):
    """The same for channels-last wgrad, whose configuration takes the arrays in NCHW."""


CONFIGS = (ViaNhwc, ViaNchw)
#: The layout of the transposed arrays: see ConvProblem.launched.
TRANSPOSED: dict[str, Literal["NHWC", "CHWN", "CNHW"]] = {"NCHW": "NHWC", "CNHW": "CHWN", "CHWN": "CNHW"}
LAYOUTS = tuple(TRANSPOSED)
RUNS_ON = HOPPER
TENSOR_CORES = True
MOST_VARIANTS = {"cuda": 2}


def _transposed(problem: ConvProblem) -> ConvProblem:
    """The problem of the transposed arrays, as it is launched."""
    return replace(problem, layout=TRANSPOSED[problem.layout]).launched


def _of_filter(problem: ConvProblem) -> bool:
    """Whether `problem` is wgrad."""
    return problem.layout in ("CNHW", "CHWN")


def _kind(problem: ConvProblem) -> type[ViaNhwc]:
    """The class of its configurations, by the way the arrays go."""
    return ViaNchw if problem.layout == "CHWN" else ViaNhwc


def _fits(problem: ConvProblem, config: ViaNhwc) -> str | None:
    if type(config) is not _kind(problem):
        return f"{_kind(problem).__name__} is for arrays that lie so"
    return AROUND.fits(problem, config)


TAKES = Takes(
    (
        "of channels-last arrays it takes float32 with precision='fp32'",
        lambda p: p.layout != "CHWN" or (p.dtype == "float32" and p.precision == "fp32"),
    ),
    (
        "it takes float16 and bfloat16 arrays, and float32 with precision='tf32' or of a filter's gradient",
        lambda p: p.layout == "CHWN" or p.itemsize == 2 or (p.dtype == "float32" and (p.precision == "tf32" or _of_filter(p))),
    ),
    NOT_EMPTY, ("a single channel lies in either order", lambda p: p.layout != "NCHW" or not p.C == p.K == 1), IN_32_BITS,
)  # fmt: skip
LEGAL = Tiles(TAKES, ViaNhwc, _fits)


ViaNhwcArguments = kernel_struct("via_nhwc", "ViaNhwcArguments")


@dataclass(frozen=True)
class _Transposition:
    """Matrices in a buffer of the plan that are transposed, into the workspace or out of it."""

    buffer: Buffer
    images: int
    rows: int
    columns: int
    itemsize: int
    zeros: int = 0  # zeros behind the rows that are written

    @property
    def pitch(self) -> int:
        """Rows that are written, zeros included."""
        return self.rows + self.zeros

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self.images * self.pitch * self.columns * self.itemsize

    @property
    def _tile(self) -> tuple[int, int]:
        """log2 of the words of a tile's column, and columns of a tile."""
        words = ceil(self.pitch * self.itemsize, 4)
        row_bits = min(max((words - 1).bit_length(), 2), 5)
        return row_bits, TILE_BYTES // 4 >> row_bits

    @property
    def tiles(self) -> int:
        row_bits, columns = self._tile
        return self.images * ceil(self.pitch * self.itemsize, 4 << row_bits) * ceil(self.columns, columns)

    @property
    def _vector(self) -> int:
        """Columns that a thread loads at once."""
        return math.gcd(self.columns, 16 // self.itemsize)

    @property
    def _wide(self) -> int:
        """Bytes that a thread stores at once: whole words even for an odd number of rows, except single elements at a column's ends."""
        return 16 if self.pitch * self.itemsize % 16 == 0 else 4

    @property
    def time(self) -> float:
        """Microseconds that it should take. The part of a tile that sticks out counts if it is most of the tile."""
        if self._vector == 1 or self.pitch * self.itemsize % 4:
            rate = COST.SINGLE
        else:
            rate = COST.WIDE if self._wide == self._vector * self.itemsize == 16 else COST.NARROW
        return COST.BEGIN + 2 * max(self.nbytes, COST.EMPTY * self.tiles * TILE_BYTES) / rate

    def launch(self, source: BufferSlice, target: BufferSlice) -> KernelLaunch:
        size = self.itemsize
        row_bits, columns = self._tile
        args = arguments(
            ViaNhwcArguments, rows=self.rows, columns=self.columns, pitch=self.pitch, row_bits=row_bits,
            tiles_r=ceil(self.pitch * size, 4 << row_bits), tiles_c=ceil(self.columns, columns), vector=self._vector,
            wide=int(self._wide == 16),
        )  # fmt: skip
        return KernelLaunch("via_nhwc", {"BYTES": size}, self.tiles, THREADS, (source, target), (), arguments=args)


def _together(first: KernelLaunch, second: KernelLaunch) -> KernelLaunch:
    both, buffers = (cast(Any, first.arguments), cast(Any, second.arguments)), first.buffers + second.buffers
    grid = first.grid + second.grid
    return KernelLaunch("via_nhwc_two", first.defines, grid, THREADS, buffers, (first.grid,), "via_nhwc", arguments=both)


def _read(problem: ConvProblem) -> list[_Transposition]:
    """The matrices that are transposed before the delegate's launches."""
    size, plane = problem.itemsize, math.prod(problem.operand_size)
    if _of_filter(problem):  # see ConvProblem.launched
        images, channels = problem.C // problem.groups, problem.N * problem.groups
        both = (INPUT, channels, plane), (WEIGHT, problem.K, math.prod(problem.filter_size))
        if problem.layout == "CHWN":  # pixels of channels become channels of pixels
            return [_Transposition(one, images, pixels, n, size) for one, n, pixels in both if n > 1 and pixels > 1]
        return [_Transposition(one, images, n, pixels, size) for one, n, pixels in both]
    found = [_Transposition(INPUT, problem.N, problem.operand_channels, plane, size)]
    if problem.has_residual:
        found.append(_Transposition(RESIDUAL, problem.N, problem.result_channels, math.prod(problem.result_size), size))
    return [one for one in found if one.rows > 1 and one.columns > 1]


def _written(problem: ConvProblem) -> _Transposition | None:
    """The matrix that is transposed behind them."""
    if _of_filter(problem):  # it is in C order anyway
        return None
    plane, channels = math.prod(problem.result_size), problem.result_channels
    return _Transposition(RESULT, problem.N, plane, channels, problem.itemsize) if plane > 1 and channels > 1 else None


def schedule(problem: ConvProblem, config: ViaNhwc, device: Device, with_moments: bool = False) -> Schedule:
    made = registry.schedule(_transposed(problem), delegate_of(config), device)
    if _of_filter(problem):
        return _of_both(problem, made)
    read, written, scratch = _read(problem), _written(problem), Arena(WORKSPACE)
    places = {one.buffer: scratch.take(one.nbytes) for one in (*read, *([written] if written else []))}
    places[WORKSPACE] = scratch.take(made.workspace_bytes)
    first = [one.launch(one.buffer, places[one.buffer]) for one in read]
    last = [written.launch(places[RESULT], RESULT)] if written else []
    prepare = moved(made.prepare, places)
    steps = [step for step in (first, *moved(made.steps, places), last) if step]
    return Schedule(prepare, steps, prepare + steps, scratch.used, made.filter_bytes, made.redoes)


def _of_both(problem: ConvProblem, made: Schedule) -> Schedule:
    """The launches of wgrad, whose launches on the transposed arrays are `made`: one launch transposes both before any reads them."""
    read, scratch = _read(problem), Arena(WORKSPACE)
    copies = {launch.buffers[0]: launch for step in made.whole for launch in step if _only_fills_up(launch)}
    filled = {one.buffer: copies[one.buffer] for one in read if one.buffer in copies}
    places = {one.buffer: scratch.take(one.nbytes) for one in read if one.buffer not in filled}
    places[WORKSPACE] = scratch.take(made.workspace_bytes)
    places[PACKED] = scratch.take(made.filter_bytes)
    first = []
    for one in read:
        if one.buffer in filled:  # it would be copied once more
            ((copy,),) = moved([[filled[one.buffer]]], {WORKSPACE: places[WORKSPACE]})
            nbytes = 16 * cast(tuple[int, ...], copy.arguments)[0]  # its words
            one = replace(one, zeros=nbytes // (one.images * one.columns * one.itemsize) - one.rows)
            first.append(one.launch(one.buffer, copy.buffers[1]))
        else:
            first.append(one.launch(one.buffer, places[one.buffer]))
    whole = [kept for step in made.whole if (kept := [launch for launch in step if launch not in filled.values()])]
    steps = moved(whole, places)
    if first:
        steps = [[_together(*first)] if len(first) == 2 else first, *steps]
    return Schedule([], steps, steps, scratch.used, 0, made.redoes)


def _only_fills_up(launch: KernelLaunch) -> bool:
    """Whether `launch` copies an array with zeros behind its channels, and folds no taps into them."""
    if launch.kernel != "fold_channels":
        return False
    args: Any = launch.arguments
    return bool(args.folded == args.channels and (args.h, args.w) == (args.p, args.q))


def variants(device: Device) -> Iterator[VariantSet]:
    yield VariantSet("via_nhwc", {"BYTES": (2, 4)})


COST = costs("compose.via_nhwc")


def _overhead_us(problem: ConvProblem, delegate: Config, device: Device) -> float:
    """Microseconds beside those of the delegate's engine."""
    written = _written(problem)
    us: float = sum(one.time for one in (*_read(problem), *([written] if written else [])))
    if not (_of_filter(problem) or math.prod(problem.filter_size) == 1):
        # to pack or transpose the filter: the models of channels-last engines assume that it lies as they need it
        us += COST.FILTER + problem.itemsize * math.prod(problem.weight_shape) / COST.FILTER_BYTES
    # sums that are not split are written directly to their scattered taps
    if _of_filter(problem) and getattr(delegate, "SPLIT", 0) == 1 and math.prod(problem.output_size) > 1:
        us += COST.SCATTERED[problem.itemsize] * math.prod(problem.result_shape)
    return us


def adapts(problem: ConvProblem) -> bool:
    """Whether an engine that puts the border in may follow: gradients of planes, which mostly need a copy or a fold else."""
    of_planes = problem.layout == "CNHW" or (problem.layout == "NCHW" and problem.direction == "dgrad")
    return of_planes and problem.border is not None and not (problem.input_dtype or problem.result_dtype)


def _alone(engine: Engine, problem: ConvProblem, device: Device) -> bool:
    """Whether an engine can only run the problem of the transposed arrays, or puts the border in there."""
    if problem.adapted:
        return engine.adapts(_transposed(problem))
    return engine.CONFIGS != CONFIGS and not (problem.layout in engine.LAYOUTS and engine.choose(problem, device))


AROUND: AroundOthers = AroundOthers(_transposed, _overhead_us, _kind, lambda problem: TAKES.why_not(problem) is None, alone=_alone)
