"""Pictures read and written: by Pillow, which has 8 bits and all notes, and by imagecodecs, which has more bits and no notes."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.tools.pictures import tiff
from pycuda_conv.tools.pictures.forms import FORMS, MODES, MORE_ENDINGS, READ_TOO, WORDS, Form, Picture
from pycuda_conv.tools.terminal import ToolError, require

#: What damaged files make the libraries raise.
DAMAGED = (SyntaxError, ValueError, EOFError, struct.error, zlib.error, RuntimeError)


def form_of(path: Path | str) -> str:
    """Pillow's name for the format that a file's name stands for, or ""."""
    ending = Path(path).suffix.lower()
    return MORE_ENDINGS.get(ending) or str(require("PIL.Image").registered_extensions().get(ending, ""))


def is_known(name: str) -> bool:
    """Whether a file's name is that of a picture that may be read."""
    return bool(form_of(name))


def codecs(why: str) -> Any:
    """imagecodecs; a :class:`ToolError` says what it is wanted for."""
    try:
        return require("imagecodecs")
    except ToolError as error:
        raise ToolError(f"{why}: that takes imagecodecs (pip install imagecodecs)") from error


# ---- reading


def read(path: Path) -> Picture:
    """The picture in a file.

    Raises
    ------
    ToolError
        It can't be read, or not without loss.
    """
    pillow = require("PIL.Image")
    form = form_of(path)
    largest, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None  # the user named the file, so it is no attack
    try:
        if form == "TIFF":
            try:
                return tiff.read(path)
            except tiff.OtherColours as error:
                with pillow.open(path) as image:
                    if image.mode not in ("CMYK", "LAB"):
                        raise ToolError(str(error)) from error
                    return _by_pillow(path, image)
        if form == "JXL":
            return _by_codec(path, "JXL", [])
        with pillow.open(path) as image:
            return tiff.read(path) if image.format == "TIFF" else _by_pillow(path, image)
    except ToolError:
        raise
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror or error}") from error
    except DAMAGED as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    finally:
        pillow.MAX_IMAGE_PIXELS = largest


def _by_pillow(path: Path, image: Any) -> Picture:
    form = READ_TOO.get(image.format, image.format)
    if image.format not in FORMS and image.format not in READ_TOO:
        raise ToolError(f"{path} is {_of(image.format)}, which is not filtered: it may hold several pictures, or none of pixels")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # MPO: a photograph with a smaller one behind it
        raise ToolError(f"{path} has {image.n_frames} pictures; only files with one can be filtered")
    said: list[str] = []
    bits = _bits(path, image.format)
    if bits > 8 and (image.mode not in ("I;16", "I;16B", "I;16L", "I") or (form == "JPEG2000" and bits < 16)):
        if image.format == "PPM":
            raise ToolError(f"{path} has {bits}-bit colours, of which Pillow gives 8 bits: save it as a PNG or a TIFF")
        info = _info(image)
        picture = _by_codec(path, image.format, [f"its {_names(info)} can't be kept with {bits}-bit colours"] if info else [])
        picture.info["bits"] = bits
        return _upright(picture, image.getexif().get(ORIENTATION, 1))
    if image.format == "MPO" and image.n_frames > 1:
        said.append(f"its further pictures, {image.n_frames - 1}, are left out")
    info = _info(image)
    image = require("PIL.ImageOps").exif_transpose(image)
    info |= {name: image.info[name] for name in ("exif", "xmp") if name in info and image.info.get(name)}
    if not image.info.get("exif"):
        info.pop("exif", None)
    if form == "WEBP" and _is_lossless(path.read_bytes()):
        info["lossless"] = True
    if image.mode.startswith("I;16") or (image.mode == "I" and bits > 8):
        return Picture(np.asarray(image).astype(np.uint16)[None, ..., None], form=form, mode="I;16", info=info)
    if image.mode not in MODES:
        raise ToolError(f"{path} has pixels of Pillow's mode {image.mode}; pictures of 8 or 16 bits can be filtered, others as .npy files")
    mode, holds = MODES[image.mode]
    if "transparency" in image.info and not mode.endswith("A"):
        mode += "A"
    if not holds:
        said.append(f"it is {image.mode}, and is written as RGB without its profile")
        info.pop("icc_profile", None)
    pixels = np.asarray(image.convert(mode))
    if image.mode == "P" and mode == "RGB" and (pixels == pixels[..., :1]).all():
        pixels = pixels[..., 0]  # its palette is one of greys
    pixels = pixels[None, ..., None] if pixels.ndim == 2 else pixels[None]
    clear = mode.endswith("A")
    return Picture(
        np.ascontiguousarray(pixels[..., :-1] if clear else pixels), np.ascontiguousarray(pixels[..., -1]) if clear else None, form=form,
        mode=image.mode, info=info, said=said,
    )  # fmt: skip


#: The tag of the orientation, and how often pixels are turned to the left for each, after they are mirrored.
ORIENTATION, TURNS = 0x0112, {2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 3), 7: (True, 3), 8: (False, 1)}


def _upright(picture: Picture, orientation: int) -> Picture:
    """A picture whose pixels lie as they are shown."""
    mirrored, turns = TURNS.get(orientation, (False, 0))

    def turned(pixels: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.rot90(pixels[:, :, ::-1] if mirrored else pixels, turns, (1, 2)))

    return replace(picture, colours=turned(picture.colours), alpha=None if picture.alpha is None else turned(picture.alpha))


def _info(image: Any) -> dict[str, Any]:
    """What an open file says besides its pixels, of :data:`WORDS`."""
    info = {name: image.info[name] for name in ("icc_profile", "exif", "dpi", "comment", "xmp") if image.info.get(name)}
    if image.format == "JPEG2000":
        info.pop("comment", None)  # the library's own name
    text = dict(getattr(image, "text", None) or {})
    if text:
        info["text"] = text
    if image.format != "PNG":
        return info
    info.pop("xmp", None)  # it is one of the texts
    chunks = {}
    if "gamma" in image.info:
        chunks[b"gAMA"] = struct.pack(">I", round(image.info["gamma"] * 1e5))
    if "chromaticity" in image.info:
        chunks[b"cHRM"] = struct.pack(">8I", *(round(one * 1e5) for one in image.info["chromaticity"]))
    if "srgb" in image.info:
        chunks[b"sRGB"] = bytes([image.info["srgb"]])
    return info | ({"response": chunks} if chunks else {})


def _is_lossless(data: bytes) -> bool:
    """Whether a WebP has pixels without loss; notes may stand in front of them."""
    at = 12
    while at + 8 <= len(data):
        if data[at : at + 4] == b"VP8L":
            return True
        at += 8 + (struct.unpack("<I", data[at + 4 : at + 8])[0] + 1) // 2 * 2
    return False


def _of(form: str) -> str:
    return {"ICO": "an icon", "EPS": "an EPS", "PDF": "a PDF", "ICNS": "an icon"}.get(form, f"a file of format {form}")


def _names(info: dict[str, Any]) -> str:
    return " and ".join(WORDS[name] for name in info if name in WORDS)


def _by_codec(path: Path, form: str, said: list[str]) -> Picture:
    """A picture of more than 8 bits, or of a format that Pillow lacks."""
    codec = FORMS[form].codec if form in FORMS else ""
    if not codec:
        raise ToolError(f"{path} has colours of more than 8 bits in a format, {form}, of which Pillow gives 8: save it as a PNG or a TIFF")
    library = codecs(f"{path} has colours of more than 8 bits" if form != "JXL" else f"{path} is a JPEG XL")
    pixels = np.asarray(getattr(library, f"{codec}_decode")(path.read_bytes()))
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ToolError(f"{path} holds {pixels.dtype}; pictures of 8 or 16 bits can be filtered, others as .npy files")
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[-1] > 4:
        raise ToolError(f"{path} has pixels of shape {pixels.shape}; pictures have up to 4 channels, and one frame")
    clear = pixels.shape[-1] in (2, 4)
    colours = np.ascontiguousarray(pixels[None, ..., : 1 if pixels.shape[-1] < 3 else 3])
    return Picture(colours, np.ascontiguousarray(pixels[None, ..., -1]) if clear else None, form=form, mode="I;16", said=said)


def _bits(path: Path, form: str) -> int:
    """The bits of a colour, as the file's head says; 8 where formats have no more."""
    with path.open("rb") as file:
        head = file.read(4096)
    if form == "PNG":
        return head[24]
    if form == "PPM":
        found = re.match(rb"P([56])\s+(?:#[^\n]*\s+)*\d+\s+(?:#[^\n]*\s+)*\d+\s+(?:#[^\n]*\s+)*(\d+)\s", head)
        return max(8, int(found[2]).bit_length()) if found else 8
    if form == "JPEG2000":
        at = head.find(b"ihdr")
        if at >= 0 and head[at + 14] != 255:
            return (head[at + 14] & 127) + 1
        at = head.find(b"\xff\x4f\xff\x51")  # the codestream's sizes, then three bytes for each component
        return max((head[at + 42 + 3 * i] & 127) + 1 for i in range(struct.unpack(">H", head[at + 40 : at + 42])[0])) if at >= 0 else 8
    if form == "AVIF":
        at = head.find(b"pixi")
        return max(head[at + 9 : at + 9 + head[at + 8]]) if at >= 0 else 8
    return 8


# ---- writing


def check(picture: Picture, output: Path) -> Form:
    """The format to write, which must hold the picture.

    Raises
    ------
    ToolError
        It is no format that is written, or one that would lose what the picture has.
    """
    name = form_of(output)
    if name not in FORMS:
        raise ToolError(f"{output} must be a picture of a format that is written here: {', '.join(sorted(FORMS))}, as .png, .jpg, .tif")
    form, dtype, channels = FORMS[name], picture.colours.dtype, picture.colours.shape[-1]
    clear = picture.alpha is not None
    if name == "TIFF":
        return form
    wrong = "which has no transparency" if clear and not any(mode.endswith("A") for mode in form.modes) and not form.codec else ""
    if len(picture.colours) > 1:
        wrong = f"which holds one picture, not {len(picture.colours)} pages"
    elif dtype.kind not in "bu" or dtype.itemsize > 2:
        wrong = f"which can't hold {dtype.name}"
    elif channels not in (1, 3):
        wrong = f"which can't hold {channels} channels"
    elif dtype == np.uint16 and channels + clear not in form.wide:
        wrong = "which has no 16 bits for such colours"
    elif name == "GIF" and (channels > 1 or clear):
        wrong = "whose colours would be quantised"
    if wrong:
        raise ToolError(f"{output} can't be written: {picture} does not fit {name}, {wrong}; .png and .tif keep all")
    return form


def write(path: Path, picture: Picture, output: Path) -> list[str]:
    """Write to `path` what is called `output`; returns what could not be kept.

    Raises
    ------
    ToolError
        As of :func:`check`, or the library can't write it.
    """
    form, name = check(picture, output), form_of(output)
    try:
        if name == "TIFF":
            return tiff.write(path, picture)
        pixels = picture.colours[0]
        if picture.alpha is not None:
            pixels = np.concatenate([pixels, picture.alpha[0][..., None]], axis=-1)
        pixels = np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        by_codec = name == "JXL" or (pixels.dtype == np.uint16 and (pixels.ndim > 2 or name == "JPEG2000"))
        return _with_codec(path, form, pixels, picture) if by_codec else _with_pillow(path, name, form, pixels, picture)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ToolError(f"{output} can't be written: {error}") from error
    except (ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
        if isinstance(error, ToolError):
            raise
        raise ToolError(f"{output} can't be written: {error}") from error


def _with_codec(path: Path, form: Form, pixels: np.ndarray, picture: Picture) -> list[str]:
    library = codecs(f"{8 * pixels.itemsize}-bit colours in such a file")
    lossless: dict[str, Any] = {"jpeg2k": {"level": 0, "reversible": True}, "jpegxl": {"lossless": True}}.get(form.codec, {})  # type: ignore[assignment]
    said, bits = [], picture.info.get("bits", 16)
    if bits < 16 and form.codec == "jpeg2k" and pixels.dtype == np.uint16:
        pixels, lossless = np.minimum(pixels, np.uint16((1 << bits) - 1)), {**lossless, "bitspersample": bits}
    elif bits < 16:
        said.append(f"its colours have {bits} bits, and are written with {8 * pixels.itemsize}, the numbers as they are")
    path.write_bytes(getattr(library, f"{form.codec}_encode")(pixels, **lossless))
    lost = _notes(picture)
    return [*said, f"its {_names(lost)} can't be kept with 16-bit colours here; a .tif keeps the profile"] if lost else said


def _notes(picture: Picture) -> dict[str, Any]:
    return {name: picture.info[name] for name in WORDS if picture.info.get(name)}


def _with_pillow(path: Path, name: str, form: Form, pixels: np.ndarray, picture: Picture) -> list[str]:
    pillow = require("PIL.Image")
    if pixels.dtype.kind == "b":
        image = pillow.fromarray(pixels.astype(np.uint8) * 255)
    else:
        image = pillow.fromarray(pixels)
    if (picture.mode == "1" or pixels.dtype.kind == "b") and "1" in form.modes and image.mode == "L":
        image = image.point(lambda v: 255 * (v >= 128)).convert("1", dither=0)
    if image.mode not in form.modes and image.mode in ("L", "LA") and image.mode.replace("L", "RGB") in form.modes:
        image = image.convert(image.mode.replace("L", "RGB"))
    notes, more = _notes(picture), dict(form.options)
    kept = {key: value for key, value in notes.items() if key in form.notes}
    text, response = kept.pop("text", {}), kept.pop("response", {})
    if text or response:
        more["pnginfo"] = require("PIL.PngImagePlugin").PngInfo()
        for key, value in text.items():
            more["pnginfo"].add_text(key, value)
        for key, value in response.items():
            more["pnginfo"].add(key, value)
    if picture.info.get("lossless") and name == "WEBP":
        more |= {"lossless": True, "exact": True}
    if name == "JPEG2000":
        more["irreversible"] = False
    lost = {key: value for key, value in notes.items() if key not in form.notes}
    image.save(path, name, **kept, **more)
    return [f"its {_names(lost)} can't be kept in {name}"] if lost else []
