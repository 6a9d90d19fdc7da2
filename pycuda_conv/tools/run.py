"""Convolve files: arrays in .npy files, also larger than memory, and pictures. :mod:`.volumes` convolves files that are stored in chunks.

Arrays are memory-mapped and go through in slices of the batch. Pictures are filtered channel by channel: :mod:`.pictures` reads and writes
them. Their border is repeated outwards, so that edges do not darken; values are rounded, and clipped to the picture's range. The output is
written under a temporary name in its own folder, and renamed when it is complete.
"""

from __future__ import annotations

import glob
import importlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv import interrupt
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import device_count
from pycuda_conv.tools.files import (
    FILTERS,
    Settings,
    common_dtype,
    exactly,
    file_exists,
    filesystem,
    filter_file,
    named_number,
    pairs,
    progress,
    progress_by_files,
    read_array,
    refusals,
    reserve,
)
from pycuda_conv.tools.pictures import files as pictures
from pycuda_conv.tools.pictures import filtering
from pycuda_conv.tools.pictures.forms import FORMS
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, named_device, require
from pycuda_conv.tools.volumes.run import convolve
from pycuda_conv.tools.volumes.target import is_interrupted

#: Bytes of input or output, whichever is larger, that each GPU takes at a time unless --batch sets the number of images.
SLICE_BYTES = 256 << 20


def run(settings: Settings) -> int:
    """Convolve one file into another."""
    start = time.perf_counter()
    if _in_chunks(settings):
        kept = "the same command goes on from what is complete" if settings.resume else "with --resume, a run keeps what is complete"
        with interrupt.telling(lambda: kept):
            what = convolve(settings)
    elif Path(settings.input).suffix.lower() == ".npy":
        what = _run_array(settings)
    else:
        what = _run_picture(settings)
    print(f"{settings.output}: {what} in {time.perf_counter() - start:.1f} s")
    return OK


def run_all(words: Sequence[Path | str], settings: Settings) -> int:
    """Convolve one file into another, or files into a folder, as ``cp`` copies them.

    The files are those that `words` name, those that match words with * and ?, and those in folders and below. A folder that is not there
    is made. A file that can't be convolved does not stop the others.
    """
    found = [one for word in words for one in _named_by(word, settings)]
    single = len(words) == 1 and found == [(words[0], _name(words[0]))]
    if single and not _is_folder(settings.output):
        return run(replace(settings, input=words[0]))
    names = [name for _, name in found]
    for name in names:
        if names.count(name) > 1:
            raise ToolError(f"{settings.output} can't hold the results of {names.count(name)} files called {name}")
    _check_folder(settings.output, f"there are {len(found)} inputs" if len(found) > 1 else f"{words[0]} may stand for several files")
    outputs = [_inside(settings.output, name) for name in names]
    if single:
        _make_folder_of(outputs[0])
        return run(replace(settings, input=words[0], output=outputs[0]))
    _check_filter(settings)
    return _run_each([replace(settings, input=one, output=output) for (one, _), output in zip(found, outputs, strict=True)])


def _run_each(jobs: Sequence[Settings]) -> int:
    """Convolve files one after another; at the end, list those that could not be."""
    failed, done = [], 0

    def left() -> str:
        return f"{done} of {len(jobs)} files are done; the same command with --resume does the others"

    with interrupt.telling(left), progress_by_files(len(jobs)) as begin:
        for job in jobs:
            begin(str(job.input))
            if job.resume and not job.force and file_exists(job.output) and not is_interrupted(job.output):
                print(f"{job.output}: is there already")
                done += 1
                continue
            try:
                _make_folder_of(job.output)
                run(replace(job, resume=job.resume and not _is_picture(job.input)))
                done += 1
            except (ToolError, DeviceMemoryError, MemoryError, OSError) as error:
                reason = " ".join(str(error).split()) or "too little memory"
                failed.append(reason if str(job.input) in reason else f"{job.input}: {reason}")
    if failed:
        print(f"pycuda-conv run: {len(failed)} of {len(jobs)} files failed:", *failed, sep="\n  ", file=sys.stderr)
    return FAILED if failed else OK


def _named_by(word: Path | str, settings: Settings) -> list[tuple[Path | str, str]]:
    """The files that a word of the command line stands for, each with the name of its result in a folder."""
    if any(mark in str(word) for mark in "*?[") and not file_exists(word):
        return [pair for one in _matching(str(word)) for pair in _named_by(one, settings)]
    if "://" in str(word) or not os.path.isdir(word) or _is_zarr(word):
        return [(word, _name(word))]
    others = [Path(one).resolve() for one in (settings.output, settings.filter, settings.bias) if one is not None]
    found: list[tuple[Path | str, str]] = []
    for folder, folders, files in os.walk(word):
        arrays = [name for name in folders if _is_zarr(Path(folder, name))]
        folders[:] = sorted(
            name for name in folders if name not in arrays and not name.startswith(".") and Path(folder, name).resolve() not in others
        )
        for name in sorted([*arrays, *filter(_has_known_suffix, files)]):
            path = Path(folder, name)
            if not name.startswith(".") and path.resolve() not in others:
                found.append((path, str(path.relative_to(word))))
    if not found:
        raise ToolError(f"{word} is a folder without a .npy, .zarr, TIFF or picture in it or below")
    return found


def _matching(pattern: str) -> list[Path | str]:
    if "://" in pattern:
        files, path = filesystem(pattern)
        found: list[Path | str] = [files.unstrip_protocol(one) for one in sorted(files.glob(path))]
    else:
        found = [Path(one) for one in sorted(glob.glob(pattern, recursive=True))]
    if not found:
        raise ToolError(f"{pattern} matches no file")
    return found


def _name(place: Path | str) -> str:
    return str(place).rstrip("/").rpartition("/")[2]


def _inside(folder: Path | str, name: str) -> Path | str:
    return f"{str(folder).rstrip('/')}/{name}" if "://" in str(folder) else Path(folder) / name


def _is_zarr(place: Path | str) -> bool:
    """Whether a folder is a zarr, by its name or by what is in it."""
    inside = ("zarr.json", ".zarray", ".zgroup")
    return str(place).lower().rstrip("/").endswith(".zarr") or any(os.path.exists(os.path.join(place, name)) for name in inside)


def _has_known_suffix(name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return suffix in (".npy", ".zarr", ".tif", ".tiff") or pictures.is_known(name)


def _is_picture(place: Path | str) -> bool:
    """Whether an input is a picture, which is convolved at once, so that there is nothing to resume."""
    suffix = os.path.splitext(str(place))[1].lower()
    return suffix not in (".npy", ".zarr") and "://" not in str(place) and _has_known_suffix(str(place)) and not _is_array(place)


def _is_folder(output: Path | str) -> bool:
    """Whether an output is a folder for files: it is one on disk, or its name ends with a slash."""
    if "://" in str(output) or isinstance(output, str):
        return str(output).endswith(("/", os.sep))
    return output.is_dir() and not _is_zarr(output)


def _check_folder(output: Path | str, why: str) -> None:
    """Refuse an output that can't be a folder for files."""
    if not _is_folder(output) and "://" not in str(output) and (os.path.lexists(output) or _has_known_suffix(str(output))):
        raise ToolError(f"{output} must be a folder, for {why}")


def _make_folder_of(output: Path | str) -> None:
    if "://" not in str(output):
        try:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"{Path(output).parent} can't be made: {error.strerror or error}") from error


def _check_filter(settings: Settings) -> None:
    """Refuse a filter or a bias that no file can be convolved with."""
    if settings.filter not in FILTERS and named_number(settings.filter) is None:
        filter_file(settings.filter)
    if settings.bias is not None:
        read_array(settings.bias)


def _in_chunks(settings: Settings) -> bool:
    """Whether the files are stored in chunks, or the options ask for chunks."""
    if settings.scheduler is not None or settings.resume or settings.axes is not None:
        return True
    places = [str(place).lower().rstrip("/") for place in (settings.input, settings.output)]
    if any("://" in place or place.endswith(".zarr") for place in places) or os.path.isdir(settings.input):
        return True
    source, output = ("tiff" if place.endswith((".tif", ".tiff")) else place.rpartition(".")[2] for place in places)
    if source == "tiff" and (settings.stride is not None or settings.padding is not None or settings.transposed):
        return True
    return {source, output} == {"npy", "tiff"} or (source == "tiff" and _is_array(settings.input))


def _is_array(path: Path | str) -> bool:
    """Whether a TIFF is a stack of grey pages, which is convolved in chunks. False where nothing can tell: see :mod:`.pictures.tiff`."""
    try:
        with importlib.import_module("tifffile").TiffFile(path) as file:
            series = file.series[0]
            return len(file.series) > 1 or (len(file.pages) > 1 and "S" not in series.axes)
    except (ImportError, ValueError, OSError, IndexError):
        return False


# ---- files


def _check_output(settings: Settings) -> Path:
    """The file to write, behind any links; refused where something would be lost."""
    output = settings.output
    try:
        real = output.resolve()
        if not real.parent.is_dir():
            raise ToolError(f"{output} can't be written: {real.parent} is not a folder")
        if real.exists():
            if not real.is_file():
                raise ToolError(f"{output} can't be written: it is not an ordinary file")
            for source in (settings.input, settings.bias, Path(settings.filter)):
                if source is not None and source.exists() and real.samefile(source):
                    raise ToolError(f"{output} can't be written: it is the file {source}, which is read")
            if not settings.force:
                raise ToolError(f"{output} exists already; --force replaces it")
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise ToolError(f"{output} can't be written: {error}") from error
    return real


@contextmanager
def _writing(output: Path) -> Iterator[Path]:
    """A temporary name in the folder of `output`, renamed to it when the block ends and removed when the block fails."""
    temporary = output.with_name(f".pycuda_conv-{secrets.token_hex(6)}.part")
    try:
        yield temporary
        if output.exists():
            shutil.copymode(output, temporary)
        os.replace(temporary, output)
    except OSError as error:
        raise ToolError(f"{output} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # a read-only disk refuses to remove even a missing file
            temporary.unlink()


# ---- arrays


def _run_array(settings: Settings) -> str:
    if settings.output.suffix.lower() != ".npy":
        raise ToolError(f"{settings.output} must end in .npy, as {settings.input} does")
    if settings.output_padding is not None and not settings.transposed:
        raise ToolError("--output-padding goes with --transposed only")
    if settings.dtype is not None:
        raise ToolError("--dtype is for pictures; the result of arrays has the type of the sums")
    if settings.filter in FILTERS or named_number(settings.filter) is not None:
        raise ToolError(
            f"the filter {settings.filter!r} is for pictures; {settings.input} needs a .npy file of shape (K, C/groups, ...)"
            + _by_axes(read_array(settings.input), 2)
        )
    x = read_array(settings.input)
    weight = filter_file(settings.filter)
    bias = None if settings.bias is None else np.array(read_array(settings.bias))
    dtype = common_dtype(settings, x, weight, bias)
    weight = exactly(settings.filter, weight, dtype)
    bias = None if bias is None else exactly(settings.bias, bias, dtype)
    problem, options = _problem(settings, dtype, x, weight, bias)
    output = _check_output(settings)
    if settings.devices is None:
        named_device(settings.device)  # refuse a missing device before anything is written
    function = getattr(pycuda_conv, f"conv{'_transpose' * settings.transposed}{problem.ndim}d")
    with _writing(output) as temporary:
        y = _new_array(temporary, problem.result_shape, problem.dtype)
        images_in, images_out = (x, y) if problem.batched else (x[None], y[None])
        nbytes = x.nbytes + y.nbytes
        with refusals(), progress(settings.input.name, nbytes) as advance:
            for images in _slices(problem, settings):
                part_in, part_out = images_in[images], images_out[images]
                function(part_in if part_in.dtype.kind == "f" else part_in.astype(dtype), weight, bias, out=part_out, **options)
                advance(part_in.nbytes + part_out.nbytes)
        y.flush()
        del y, images_out
    return f"{problem}, {nbytes:,} bytes read and written"


def _problem(
    settings: Settings, dtype: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None
) -> tuple[ConvProblem, dict[str, Any]]:
    """The problem, checked, and the keyword arguments of the function that computes it."""
    if weight.ndim not in (3, 4, 5):
        raise ToolError(
            f"{settings.filter} must have 3, 4 or 5 axes (K, C/groups and 1, 2 or 3 more), but its shape is {weight.shape}"
            + _by_axes(x, weight.ndim)
        )
    rank = weight.ndim - 2
    if x.ndim not in (rank + 1, rank + 2):
        raise ToolError(
            f"a filter of shape {weight.shape} takes an input of {rank + 1} or {rank + 2} axes, but {settings.input} has the shape "
            f"{x.shape}{_by_axes(x, rank)}"
        )
    options: dict[str, Any] = {
        "stride": 1 if settings.stride is None else settings.stride, "padding": pairs(settings.padding, rank),
        "dilation": 1 if settings.dilation is None else settings.dilation, "groups": 1 if settings.groups is None else settings.groups,
    }
    if settings.border is not None:
        options["padding_mode"] = settings.border
    if settings.transposed:
        options["output_padding"] = 0 if settings.output_padding is None else settings.output_padding
    make = ConvProblem.transposed if settings.transposed else ConvProblem.forward
    shapes = (x.shape, weight.shape, None if bias is None else bias.shape)
    try:
        with refusals():
            problem = make(
                rank, *shapes, **options, dtype=dtype, precision=settings.precision, algorithm=settings.algorithm,
                activation=settings.activation,
            )
    except ToolError as error:  # a filter of three axes may also be one for volumes
        raise ToolError(f"{error}{_by_axes(x, 3)}" if weight.ndim == 3 and not settings.transposed else str(error)) from error
    return problem, options | settings.where


def _by_axes(x: np.ndarray, rank: int) -> str:
    """The end of a message about a call that `--axes` may make work: `x` needs at least `rank` axes for that."""
    known = "tczyx"
    if not 1 <= rank <= min(x.ndim, 3):
        return ""
    example = f", as --axes {known[-x.ndim :]}" if x.ndim <= len(known) else ""
    return f"; --axes says what the axes of the input are{example}"


def _new_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """A new .npy file of that shape, mapped. Its blocks are reserved, since a mapping that meets a full disk kills the process."""
    y = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    reserve(path)
    return y


def _slices(problem: ConvProblem, settings: Settings) -> list[slice]:
    """The batch in slices of `--batch` images, or of SLICE_BYTES for each GPU; nearly equal ones, so that few plans are needed."""
    largest = max(int(np.prod(shape[problem.batched :])) for shape in (problem.input_shape, problem.result_shape)) * problem.itemsize
    gpus = 1 if settings.devices is None else device_count() if settings.devices == "all" else len(settings.devices)
    images = settings.batch or max(1, gpus * SLICE_BYTES // max(largest, 1))
    count = -(-problem.N // images)
    if settings.batch:
        return [slice(first, min(first + images, problem.N)) for first in range(0, problem.N, images)]
    return [slice(problem.N * i // count, problem.N * (i + 1) // count) for i in range(count)]


# ---- pictures


def _run_picture(settings: Settings) -> str:
    if not pictures.is_known(str(settings.input)):
        pillow = require("PIL.Image")
        raise ToolError(f"{settings.input} must end in .npy or be a picture that Pillow {pillow.__version__} reads, as .png, .jpg, .tif")
    if pictures.form_of(settings.output) not in FORMS:
        raise ToolError(f"{settings.output} must be a picture of a format that is written here, as .png, .jpg, .tif")
    given = {
        "--stride": settings.stride, "--padding": settings.padding, "--output-padding": settings.output_padding, "--batch": settings.batch,
        "--transposed": settings.transposed or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ToolError(f"{name} is for .npy files; a picture keeps its size, and its border is repeated outwards")
    picture = pictures.read(settings.input)
    weight = filtering.weights_of(settings, filter_file)
    bias = None if settings.bias is None else np.array(read_array(settings.bias))
    output = _check_output(settings)
    pictures.check(replace(picture, colours=_typed(picture.colours, settings)), settings.output)
    if settings.devices is None:
        named_device(settings.device)
    with refusals():
        result = filtering.filtered(picture, _as_float(settings.filter, weight), _as_float(settings.bias, bias), settings)
    with _writing(output) as temporary:
        lost = pictures.write(temporary, result, settings.output)
    for words in dict.fromkeys([*picture.said, *lost]):
        print(f"{settings.input}: {words}", file=sys.stderr)
    return str(result)


def _typed(colours: np.ndarray, settings: Settings) -> np.ndarray:
    """Pixels of the result's type, of which only the shape and the type count."""
    return colours if settings.dtype is None else np.broadcast_to(np.zeros((), settings.dtype), colours.shape)


def _as_float(name: Any, array: np.ndarray | None) -> Any:
    if array is None:
        return None
    if array.dtype.kind not in "fiu":
        raise ToolError(f"{name} holds {array.dtype.name}; a picture is filtered with real numbers")
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, np.float64)
        finite = np.isfinite(converted.astype(np.float32)).all()
    if not finite:
        raise ToolError(f"{name} holds values that are not finite in float32")
    return converted
