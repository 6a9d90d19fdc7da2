"""TIFFs by tifffile: colours, pages, and what their tags say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from pycuda_conv.tools.pictures.forms import WORDS, Picture
from pycuda_conv.tools.terminal import ToolError, require

#: GeoTIFF's tags, and GDAL's, of which the last is the value without data.
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737, 42112, 42113)
NODATA = 42113
#: Further tags that are copied: names of document, camera, page, artist and host, orientation, colours' response, XMP, copyright, IPTC.
OTHER_TAGS = (269, 271, 272, 274, 285, 301, 315, 316, 318, 319, 700, 33432, 33723)
#: Tags that point to further notes, which are not.
POINTERS = (34665, 34853)
#: What tifffile's writer of OME-TIFF takes of the elements Pixels, Channel and Plane.
OME_PIXELS = {
    "SignificantBits", "TimeIncrement", "TimeIncrementUnit", *(f"PhysicalSize{axis}{unit}" for axis in "XYZ" for unit in ("", "Unit")),
}  # fmt: skip
OME_CHANNEL = {
    "Name", "AcquisitionMode", "Color", "ContrastMethod", "EmissionWavelength", "EmissionWavelengthUnit", "ExcitationWavelength",
    "ExcitationWavelengthUnit", "Fluor", "IlluminationType", "NDFilter", "PinholeSize", "PinholeSizeUnit", "PockelCellSetting",
}  # fmt: skip
OME_PLANE = {
    f"{name}{unit}" for name in ("DeltaT", "ExposureTime", "PositionX", "PositionY", "PositionZ") for unit in ("", "Unit")
}  # fmt: skip
#: OME's other elements without notes of their own.
OME_OTHER = {"OME", "Image", "TiffData", "UUID", "LightPath", "MetadataOnly"}
#: Compressions without loss; others are written without.
LOSSLESS = {"LZW", "ADOBE_DEFLATE", "DEFLATE", "ZSTD", "LZMA", "PACKBITS"}


@dataclass(frozen=True)
class Notes:
    """What a TIFF says besides its pixels, as tifffile's writer takes it; `ome` and `imagej` are kinds of files."""

    ome: bool = False
    imagej: bool = False
    axes: str = ""
    shape: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    extratags: tuple[Any, ...] = ()
    planar: bool = False
    extrasamples: tuple[int, ...] = ()
    nodata: float | None = None
    said: tuple[str, ...] = ()

    @property
    def geometry(self) -> bool:
        """Whether tags tell where the pixels lie on the Earth."""
        return any(tag[0] in GEO_TAGS[:-2] for tag in self.extratags)


class OtherColours(ToolError):
    """Pixels of colours that Pillow converts to RGB."""


def notes_of(file: Any) -> Notes:
    """What an open file says; of several series, the first counts."""
    series = file.series[0]
    page = series.keyframe
    tags, said = page.tags, []
    extratags = []
    for code in (*GEO_TAGS, *OTHER_TAGS):
        tag = tags.get(code)
        if tag is not None:
            value = tag.value
            kind = 2 if isinstance(value, str) else int(tag.dtype)
            extratags.append((code, kind, 0 if kind == 2 else int(tag.count), value, True))
    if any(tags.get(code) is not None for code in POINTERS):
        said.append("its camera's notes can't be kept")
    options: dict[str, Any] = {}
    if tags.get(282) is not None and tags.get(283) is not None and not file.is_imagej:
        unit = tags.get(296)
        options["resolution"] = tuple(tag.value for tag in (tags[282], tags[283]))
        options["resolutionunit"] = int(unit.value) if unit is not None else 2
    elif file.is_imagej and tags.get(282) is not None:
        options["resolution"] = tuple(tag.value for tag in (tags[282], tags[283]))
    if page.iccprofile:
        options["iccprofile"] = bytes(page.iccprofile)
    for name, code in (("software", 305), ("datetime", 306)):
        if tags.get(code) is not None and isinstance(tags[code].value, str):
            options[name] = tags[code].value
    compression = page.compression.name
    if compression in LOSSLESS:
        options["compression"] = page.compression
        if page.predictor not in (None, 1):
            options["predictor"] = page.predictor
    elif compression != "NONE":
        said.append(f"it was compressed by {compression}, and is written without compression, so that nothing is lost")
    if page.is_tiled and page.tile:
        options["tile"] = tuple(page.tile[-2:])
    elif page.rowsperstrip and page.rowsperstrip < page.imagelength and compression != "NONE":
        options["rowsperstrip"] = int(page.rowsperstrip)
    metadata: dict[str, Any] = {}
    if file.is_ome:
        metadata, lost = _ome(file.ome_metadata)
        said += [f"OME's notes of {lost} can't be kept"] if lost else []
    elif file.is_imagej:
        own = "ImageJ", "images", "hyperstack", "axes"
        metadata = {key: value for key, value in (file.imagej_metadata or {}).items() if key not in own}
    elif isinstance(tags.get(270) and tags[270].value, str) and not file.is_shaped:
        options["description"] = tags[270].value
    if len(getattr(series, "levels", ())) > 1:
        said.append("its smaller copies are left out")
    if len(series.pages) > 1 and not (file.is_ome or file.is_imagej):
        later = series.pages[-1].aspage().tags if series.pages[-1] is not None else {}
        if any(later.get(code) is not None and (tags.get(code) is None or later[code].value != tags[code].value) for code in (270, 285)):
            said.append("what its further pages say of themselves is left out")
    bits = page.bitspersample
    if bits not in (1, 8, 16, 32, 64) and page.photometric.name != "PALETTE":
        said.append(f"its colours have {bits} bits, and are written with {8 * page.dtype.itemsize}, the numbers as they are")
    nodata = None
    if tags.get(NODATA) is not None:
        try:
            nodata = float(str(tags[NODATA].value).strip("\0 "))
        except ValueError:
            said.append(f"its value without data, {tags[NODATA].value!r}, is no number")
    return Notes(
        bool(file.is_ome), bool(file.is_imagej), series.axes, tuple(series.shape), metadata, options, tuple(extratags),
        int(page.planarconfig or 1) == 2, tuple(int(one) for one in page.extrasamples or ()), nodata, tuple(said),
    )  # fmt: skip


def _ome(text: str) -> tuple[dict[str, Any], str]:
    """What tifffile's writer of OME-TIFF takes of OME's description, and the names of what it does not take."""
    elements: dict[str, list[Any]] = {}
    for one in ElementTree.fromstring(text).iter():
        elements.setdefault(one.tag.rpartition("}")[2], []).append(one)
    found: dict[str, Any] = {}
    image, pixels = (elements.get(name, [ElementTree.Element(name)])[0] for name in ("Image", "Pixels"))
    if "Name" in image.attrib:
        found["Name"] = image.attrib["Name"]
    texts = {one.tag.rpartition("}")[2]: one.text for one in image if one.text and one.text.strip()}
    found |= {name: texts[name] for name in ("AcquisitionDate", "Description") if name in texts}
    found |= {name: value for name, value in pixels.attrib.items() if name in OME_PIXELS}
    kept = {"Pixels", *found}
    channels = elements.get("Channel", [])
    found |= {"Channel": _of_all(channels, OME_CHANNEL)} if channels else {}
    order = pixels.attrib.get("DimensionOrder", "XYCZT")[:1:-1]
    planes = {tuple(int(one.attrib.get(f"The{axis}", 0)) for axis in order): one for one in elements.get("Plane", [])}
    if set(planes) == set(product(*(range(int(pixels.attrib.get(f"Size{axis}", 1))) for axis in order))):  # in the order of pages
        found["Plane"] = _of_all([planes[place] for place in sorted(planes)], OME_PLANE)
        kept.add("Plane")
    lost = elements.keys() - kept - OME_OTHER - {"Channel"}
    return found, ", ".join(sorted(lost))


def _of_all(elements: Sequence[Any], names: set[str]) -> dict[str, list[str]]:
    """Of some elements, the attributes that all of them have."""
    return {name: [one.attrib[name] for one in elements] for name in sorted(names) if all(name in one.attrib for one in elements)}


def read(path: Path) -> Picture:
    """The pages of a TIFF's first series.

    Raises
    ------
    ToolError
        It has pages of several kinds, or colours whose meaning would be lost.
    """
    library = require("tifffile")
    with library.TiffFile(path) as file:
        if not file.series:
            raise ToolError(f"{path} can't be read: it has no pages")
        if len(file.series) > 1:
            raise ToolError(f"{path} has {len(file.series)} series of pages of different kinds; only files with one can be filtered")
        series = file.series[0]
        page, notes = series.keyframe, notes_of(file)
        try:
            pixels = series.asarray()
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise ToolError(f"{path} is compressed by {page.compression.name}: that takes imagecodecs (pip install imagecodecs)") from error
        if pixels.dtype.kind not in "biuf":
            raise ToolError(f"{path} holds {pixels.dtype}; pictures of integers, floats and bool can be filtered, others as .npy files")
        photometric, axes = page.photometric.name, series.axes
        if "S" in axes:
            pixels = np.moveaxis(pixels, axes.index("S"), -1)
        else:
            pixels = pixels[..., None]
        said = list(notes.said)
        if photometric == "MINISWHITE":
            if pixels.dtype.kind not in "bu":
                raise ToolError(f"{path} has 0 as white, and {pixels.dtype} has no number for black: convert it")
            pixels = ~pixels if pixels.dtype.kind == "b" else pixels.dtype.type((1 << page.bitspersample) - 1) - pixels
            said.append("0 was white in it, and is black in the result")
        elif photometric == "PALETTE":
            pixels = _coloured(page.colormap, pixels[..., 0])
            said.append("it has a palette, and is written in colours")
        elif photometric not in ("MINISBLACK", "RGB", "YCBCR"):
            raise OtherColours(f"{path} has pixels of {photometric}, whose colours would be lost: convert it to RGB")
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    alpha = None
    colour_count = 3 if photometric in ("RGB", "YCBCR", "PALETTE") else 1
    if notes.extrasamples and notes.extrasamples[0] in (1, 2) and pixels.shape[-1] == colour_count + 1:
        alpha, pixels = pixels[..., -1], pixels[..., :-1]
        if notes.extrasamples[0] == 1:  # colours were multiplied by alpha
            raise ToolError(f"{path} has colours multiplied by their transparency; convert it to unassociated alpha")
    hidden = None
    if notes.nodata is not None:
        of_type = pixels.dtype.type(notes.nodata) if pixels.dtype.kind == "f" else notes.nodata  # which an integer type may not hold
        hidden = (np.isnan(pixels) if np.isnan(notes.nodata) else pixels == of_type).any(-1)
    mode = "1" if pixels.dtype.kind == "b" else ""
    alpha = None if alpha is None else np.ascontiguousarray(alpha)
    return Picture(np.ascontiguousarray(pixels), alpha, hidden, "TIFF", mode, {}, notes, said)


def _coloured(palette: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """The colours of a palette's indices; a palette of 8 bits gives 8."""
    colours = np.asarray(palette).T
    if (colours == (colours >> 8) * 257).all() or not (colours & 255).any():
        colours = (colours >> 8).astype(np.uint8)
    return np.ascontiguousarray(colours[pixels])


def write(path: Path, picture: Picture) -> list[str]:
    """Write a picture's pages; returns what could not be kept."""
    notes: Notes = picture.tiff or Notes()
    pixels = picture.colours
    channels = pixels.shape[-1]
    options: dict[str, Any] = dict(notes.options)
    said: list[str] = []
    if picture.alpha is not None:
        pixels = np.concatenate([pixels, picture.alpha[..., None]], axis=-1)
        options["extrasamples"] = ["unassalpha"]
    elif notes.extrasamples and channels - len(notes.extrasamples) in (1, 3):
        options["extrasamples"] = list(notes.extrasamples)
    rgb = channels - len(notes.extrasamples if picture.alpha is None else ()) == 3 or (channels == 3)
    if picture.info.get("icc_profile"):
        options["iccprofile"] = picture.info["icc_profile"]
    if picture.info.get("dpi"):
        options |= {"resolution": tuple(map(float, picture.info["dpi"])), "resolutionunit": 2}
    for name, words in WORDS.items():
        if name in ("icc_profile", "dpi"):
            continue
        if picture.info.get(name):
            said.append(f"its {words} can't be kept in TIFF")
    axes = notes.axes.replace("S", "")
    if axes and len(axes) == len(notes.shape) - ("S" in notes.axes):
        leading = [n for letter, n in zip(notes.axes, notes.shape, strict=True) if letter not in "SYX"]
    else:
        leading, axes = ([len(pixels)] if len(pixels) > 1 else []), ("QYX" if len(pixels) > 1 else "YX")
    if pixels.shape[-1] == 1:
        data = pixels[..., 0].reshape(*leading, *pixels.shape[1:3])
    elif notes.planar:
        data = np.moveaxis(pixels, -1, 1).reshape(*leading, pixels.shape[-1], *pixels.shape[1:3])
        options["planarconfig"], axes = "separate", f"{axes[:-2]}SYX"
    else:
        data = pixels.reshape(*leading, *pixels.shape[1:])
        options["planarconfig"], axes = "contig", f"{axes}S"
    metadata: Any = None
    if notes.imagej and (data.dtype.kind == "b" or data.dtype.name not in ("uint8", "uint16", "float32")):
        said.append(f"ImageJ has no {data.dtype.name}, so it is no ImageJ file")
    elif notes.ome or notes.imagej:
        options["ome" if notes.ome else "imagej"] = True
        metadata = {"axes": axes, **notes.metadata}
    _write(path, data, rgb, metadata, notes, options, said)
    return said


def _write(path: Path, data: np.ndarray, rgb: bool, metadata: Any, notes: Notes, options: dict[str, Any], said: list[str]) -> None:
    library = require("tifffile")
    if metadata is not None and "imagej" in options:
        for name in ("compression", "predictor", "tile", "software", "datetime"):
            options.pop(name, None)
    written = {"photometric": "rgb" if rgb else "minisblack", "metadata": metadata, "extratags": list(notes.extratags), "software": False}
    written |= options
    try:
        library.imwrite(path, data, **written)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        if "compression" not in written:
            raise
        said.append(f"it is written without compression: {error}")
        for name in ("compression", "predictor"):
            written.pop(name, None)
        library.imwrite(path, data, **written)


def stack_options(path: str, axes: str | None, dtype: np.dtype, same_grid: bool) -> tuple[dict[str, Any], list[str]]:
    """How a stack is written as the one at `path` was: arguments of tifffile's ``memmap``, and what can't be kept.

    Parameters
    ----------
    path : str
    axes : str or None
        The result's, by letters.
    dtype : numpy.dtype
    same_grid : bool
        Whether the result's pixels lie where those of the input do.
    """
    with require("tifffile").TiffFile(path) as file:
        notes = notes_of(file)
    kept = "resolution", "resolutionunit", "description", "iccprofile"
    options = {name: value for name, value in notes.options.items() if name in kept}
    said = list(notes.said)
    if "compression" in notes.options:
        said.append(f"it was compressed by {notes.options['compression'].name}; a stack is written in parts, without compression")
    extratags = list(notes.extratags)
    if notes.geometry and not same_grid:
        raise ToolError(f"{path} says where its pixels lie on the Earth, and the result has another grid: keep its size and stride 1")
    metadata: dict[str, Any] = {"axes": axes.upper()} if axes else {}
    if notes.imagej and dtype.name not in ("uint8", "uint16", "float32"):
        said.append(f"ImageJ has no {dtype.name}, so the result is no ImageJ file")
    elif (notes.ome or notes.imagej) and axes:
        if not same_grid:
            sizes = {name for name in notes.metadata if name.startswith(("Physical", "spacing", "unit"))}
            if sizes:
                said.append("the sizes of its pixels are not those of the result, and are left out")
            notes = Notes(**{**vars(notes), "metadata": {name: value for name, value in notes.metadata.items() if name not in sizes}})
            options.pop("resolution", None)
        options["ome" if notes.ome else "imagej"] = True
        metadata |= notes.metadata
        if notes.imagej:
            options.pop("resolutionunit", None)
            extratags = []
    if "description" in options and not (notes.ome or notes.imagej):
        metadata = {}  # a description of the file's own takes the place of the axes
        options["metadata"] = None
    return {"metadata": metadata, "extratags": extratags, **options}, said
