"""Convolve files: arrays in .npy files, also larger than memory, and pictures. :mod:`.volumes` convolves files that are stored in chunks.

Arrays are memory-mapped and go through in slices of the batch. Pictures are filtered channel by channel in float32. Their border is
repeated outwards, so that edges do not darken; values are rounded, and clipped to the picture's range. The output is written under a
temporary name in its own folder, and renamed when it is complete.
"""

from __future__ import annotations

import glob
import importlib
import os
import secrets
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv import interrupt
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.problem import ConvProblem, integers
from pycuda_conv.runtime import device_count
from pycuda_conv.tools.files import (
    FILTERS,
    Settings,
    common_dtype,
    exactly,
    file_exists,
    filesystem,
    filter_file,
    pairs,
    progress,
    progress_by_files,
    read_array,
    refusals,
    reserve,
)
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, named_device, require
from pycuda_conv.tools.volumes.run import convolve
from pycuda_conv.tools.volumes.target import is_interrupted

#: Bytes of input or output, whichever is larger, that each GPU takes at a time unless --batch sets the number of images.
SLICE_BYTES = 256 << 20
PNG_START = b"\x89PNG\r\n\x1a\n"


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
    return suffix in (".npy", ".zarr", ".tif", ".tiff") or suffix in require("PIL.Image").registered_extensions()


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
    if settings.filter not in FILTERS:
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
    return {source, output} == {"npy", "tiff"} or (source == "tiff" and _is_array(settings.input))


def _is_array(path: Path | str) -> bool:
    """Whether a TIFF has several pages, or pixels that pictures here can't have. False where nothing can tell: see :func:`read_picture`."""
    try:
        with importlib.import_module("tifffile").TiffFile(path) as file:
            page = file.pages[0]
            plain = page.dtype is None or page.dtype.name in ("bool", "uint8") or (page.dtype.name, page.samplesperpixel) == ("uint16", 1)
            return len(file.pages) > 1 or not plain
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
    if settings.filter in FILTERS:
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


@dataclass(frozen=True)
class Picture:
    """Colours of shape (1 or 3, H, W) and transparency of shape (H, W), both uint8 or both uint16."""

    colours: np.ndarray
    alpha: np.ndarray | None
    #: further arguments of Pillow's ``save``: the colour profile, the camera's notes
    info: dict[str, Any]

    def __str__(self) -> str:
        channels, height, width = self.colours.shape
        kind = ("RGB" if channels == 3 else "greyscale") + (" with alpha" if self.alpha is not None else "")
        return f"{width}x{height}, {8 * self.colours.itemsize}-bit {kind}"


def _run_picture(settings: Settings) -> str:
    pillow = require("PIL.Image")
    known = pillow.registered_extensions()
    if settings.input.suffix.lower() not in known:
        raise ToolError(f"{settings.input} must end in .npy or be a picture that Pillow {pillow.__version__} reads, as .png, .jpg, .tif")
    form = known.get(settings.output.suffix.lower())
    if form not in pillow.SAVE:
        raise ToolError(f"{settings.output} must be a picture that Pillow {pillow.__version__} writes, as .png, .jpg, .tif")
    given = {
        "--stride": settings.stride, "--padding": settings.padding, "--output-padding": settings.output_padding, "--batch": settings.batch,
        "--transposed": settings.transposed or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ToolError(f"{name} is for .npy files; a picture keeps its size, and its border is repeated outwards")
    picture = read_picture(settings.input)
    weight = FILTERS[settings.filter] if settings.filter in FILTERS else filter_file(settings.filter)
    bias = None if settings.bias is None else np.array(read_array(settings.bias))
    output = _check_output(settings)
    if settings.devices is None:
        named_device(settings.device)
    with refusals():
        result = filtered(picture, _as_float32(settings.filter, weight), _as_float32(settings.bias, bias), settings)
    with _writing(output) as temporary:
        write_picture(temporary, form, result, settings.output)
    return str(result)


def _as_float32(name: Any, array: np.ndarray | None) -> Any:
    if array is None:
        return None
    if array.dtype.kind not in "fiu":
        raise ToolError(f"{name} holds {array.dtype.name}; a picture is filtered with real numbers")
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(converted).all():
        raise ToolError(f"{name} holds values that are not finite in float32")
    return converted


def filtered(picture: Picture, weight: np.ndarray, bias: np.ndarray | None, settings: Settings) -> Picture:
    """`picture` convolved: each colour by a filter (R, S) or (1, 1, R, S), or all of them by (K, C/groups, R, S), K 1 or 3."""
    if weight.ndim == 2:
        weight = weight[None, None]
    if weight.ndim != 4 or 0 in weight.shape:
        raise ToolError(f"{settings.filter} must have shape (R, S), (1, 1, R, S) or (K, C, R, S) for a picture, but it is {weight.shape}")
    alone = weight.shape[:2] == (1, 1) and settings.groups is None
    if not alone and weight.shape[0] not in (1, 3):
        raise ToolError(f"{settings.filter} gives {weight.shape[0]} channels; a picture has 1 or 3 colours")
    dilation = integers("dilation", 1 if settings.dilation is None else settings.dilation, 2)
    reach = [max(d, 0) * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
    around = [(n // 2, n - n // 2) for n in reach]  # an uneven rest lies as with "same"
    x = np.pad(picture.colours.astype(np.float32), ((0, 0), *around), mode="edge")
    x = x[:, None] if alone else x[None]  # with a filter for each colour alone, colours are images
    groups = 1 if settings.groups is None else settings.groups
    y = pycuda_conv.conv2d(x, weight, bias, dilation=dilation, groups=groups, **settings.where)
    y = y[:, 0] if alone else y[0]
    dtype = picture.colours.dtype
    colours = np.clip(np.rint(y), 0, np.iinfo(dtype).max).astype(dtype)
    same = len(colours) == len(picture.colours)  # otherwise the profile is one of other colours
    info = {name: value for name, value in picture.info.items() if same or name != "icc_profile"}
    return Picture(colours, picture.alpha, info)


def read_picture(path: Path) -> Picture:
    """The picture in a file that Pillow reads."""
    pillow = require("PIL.Image")
    largest, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None  # the user named the file, so it is no attack
    try:
        with pillow.open(path) as image:
            return _decoded(pillow, path, image)
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:  # Pillow's readers raise these for damaged files
        raise ToolError(f"{path} can't be read: {error}") from error
    finally:
        pillow.MAX_IMAGE_PIXELS = largest


def _decoded(pillow: Any, path: Path, image: Any) -> Picture:
    several = getattr(image, "n_frames", 1) > 1 and image.format != "MPO"  # MPO: a photograph with a smaller one behind it
    raw = image.tile[0][3] if image.tile else ""
    raw = raw if isinstance(raw, str) else str(raw[0]) if raw else ""
    wide = image.mode in ("I", "F")
    if image.format == "TIFF" and (several or wide or raw.startswith(("RGB;16", "RGBA;16")) or {2, 3} & set(image.tag_v2.get(339, ()))):
        require("tifffile")  # it would have read pages, signed numbers and floats as an array
    if several:
        raise ToolError(f"{path} has {image.n_frames} pictures; only files with one can be filtered")
    info = {name: image.info[name] for name in ("icc_profile", "exif") if image.info.get(name)}
    if image.mode.startswith("I;16"):
        return Picture(np.asarray(image).astype(np.uint16)[None], None, info)
    if ";16" in raw:
        pixels = _decoded_16_bit(pillow, path, image, raw)
    elif wide:
        raise ToolError(f"{path} has 32-bit values; pictures of 8 or 16 bits can be filtered, others as .npy files")
    else:
        clear = image.mode in ("PA", "La", "RGBa") or "transparency" in image.info
        mode = image.mode if image.mode in ("L", "LA", "RGB", "RGBA") else "L" if image.mode == "1" else "RGB"
        mode = {"L": "LA", "RGB": "RGBA"}.get(mode, mode) if clear else mode
        if mode.rstrip("A") != image.mode.rstrip("Aa"):
            info.pop("icc_profile", None)
        pixels = np.asarray(image.convert(mode))
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    colours = np.ascontiguousarray(np.moveaxis(pixels[..., : 1 if pixels.shape[-1] < 3 else 3], -1, 0))
    return Picture(colours, pixels[..., -1] if pixels.shape[-1] in (2, 4) else None, info)


def _decoded_16_bit(pillow: Any, path: Path, image: Any, raw: str) -> np.ndarray:
    """A PNG of 16-bit colours, of which Pillow keeps the high bytes only. It is decoded once more with the bytes swapped."""
    if image.format != "PNG" or raw not in ("RGB;16B", "RGBA;16B"):
        raise ToolError(f"{path} has 16-bit pixels ({raw}) that Pillow would cut to 8 bits; save it as a PNG in greyscale, RGB or RGBA")
    high = np.asarray(image).astype(np.uint16)
    with pillow.open(path) as again:
        again.tile = [(*tile[:3], raw.replace(";16B", ";16L")) for tile in again.tile]
        return high << 8 | np.asarray(again)


def write_picture(path: Path, form: str, picture: Picture, shown: Path) -> None:
    """Write `picture` to `path` in Pillow's format `form`; messages call the file `shown`."""
    pixels = np.moveaxis(picture.colours, 0, -1)
    if picture.alpha is not None:
        pixels = np.concatenate([pixels, picture.alpha[..., None]], axis=-1)
    if picture.colours.itemsize == 2 and pixels.shape[-1] > 1:
        if form != "PNG":
            raise ToolError(f"{shown} must be a .png: 16-bit colours are written to no other format")
        path.write_bytes(_png_16_bit(pixels, picture.info.get("icc_profile")))
        return
    pixels = np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    more = {"quality": 95} if form in ("JPEG", "WEBP") else {}
    try:
        require("PIL.Image").fromarray(pixels).save(path, form, **picture.info, **more)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ToolError(f"{shown} can't be written: {error}") from error  # such as "cannot write mode RGBA as JPEG"
    except (ValueError, KeyError, struct.error) as error:
        raise ToolError(f"{shown} can't be written: {error}") from error


def _png_16_bit(pixels: np.ndarray, profile: bytes | None) -> bytes:
    """A PNG of 16-bit pixels (H, W, channels), which Pillow can't write. Each row is stored as the difference from the row above."""
    height, width, channels = pixels.shape
    rows = np.ascontiguousarray(pixels, ">u2").view(np.uint8).reshape(height, -1)
    less = rows.copy()
    less[1:] -= rows[:-1]
    lines = np.concatenate([np.full((height, 1), 2, np.uint8), less], axis=1)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0))]
    if profile:
        chunks.append((b"iCCP", b"profile\0\0" + zlib.compress(profile)))
    chunks += [(b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return PNG_START + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
