"""What formats of pictures hold, as data: bits, transparency, notes, and by which library pixels are read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Notes by Pillow's names, and what they are; "response" is what a PNG says of its colours in chunks.
WORDS = {
    "icc_profile": "colour profile", "exif": "camera's notes", "dpi": "resolution", "comment": "comment", "text": "texts",
    "xmp": "XMP notes", "response": "colours' response",
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A format.

    Attributes
    ----------
    modes : frozenset of str
        Pillow's modes of 8 bits that it stores as they are.
    wide : tuple of int
        How many channels of 16 bits it can hold, if any.
    codec : str
        imagecodecs' name for it, for pixels of 16 bits.
    notes : frozenset of str
        Which notes it keeps, of :data:`WORDS`.
    options : dict
        Further arguments of Pillow's ``save``.
    """

    modes: frozenset[str]
    wide: tuple[int, ...] = ()
    codec: str = ""
    notes: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)


def _form(modes: str, wide: tuple[int, ...] = (), codec: str = "", notes: str = "", **options: Any) -> Form:
    return Form(frozenset(modes.split()), wide, codec, frozenset(notes.split()), options)


#: By Pillow's name. A format that is not here is refused as an output.
FORMS = {
    "PNG": _form("1 L LA RGB RGBA", (1, 2, 3, 4), "png", "icc_profile exif dpi text response"),
    "JPEG": _form("L RGB", notes="icc_profile exif dpi comment xmp", quality=95),
    "WEBP": _form("RGB RGBA", notes="icc_profile exif xmp", quality=95),
    "AVIF": _form("RGB RGBA", notes="icc_profile exif xmp", quality=95),
    "JPEG2000": _form("L LA RGB RGBA", (1, 3, 4), "jpeg2k"),
    "JXL": _form("", (1, 2, 3, 4), "jpegxl"),
    "BMP": _form("1 L RGB", notes="dpi"),
    "TGA": _form("L LA RGB RGBA"),
    "PPM": _form("1 L RGB", (1,)),
    "GIF": _form("L"),
    "PCX": _form("1 L RGB", notes="dpi"),
    "TIFF": _form("1 L LA RGB RGBA", (1, 2, 3, 4), notes="icc_profile dpi exif"),
}
#: Formats of which Pillow reads one picture as what was meant, besides those above: the rest is refused by name.
READ_TOO = {"MPO": "JPEG", "DIB": "BMP", "SGI": "", "MSP": ""}
#: Endings that Pillow does not know.
MORE_ENDINGS = {".jxl": "JXL"}

#: What becomes of Pillow's modes of 8 bits: the mode that is filtered, and whether its profile still holds.
MODES = {
    "1": ("L", True), "L": ("L", True), "LA": ("LA", True), "La": ("LA", True), "RGB": ("RGB", True), "RGBA": ("RGBA", True),
    "RGBa": ("RGBA", True), "RGBX": ("RGB", True), "P": ("RGB", True), "PA": ("RGBA", True), "CMYK": ("RGB", False),
    "YCbCr": ("RGB", False), "LAB": ("RGB", False), "HSV": ("RGB", False),
}  # fmt: skip


@dataclass
class Picture:
    """Colours of shape (pages, H, W, channels), and what a file says besides.

    Attributes
    ----------
    colours : numpy.ndarray
    alpha : numpy.ndarray or None
        Of shape (pages, H, W), of the colours' type.
    hidden : numpy.ndarray or None
        Which pixels have no data, of shape (pages, H, W).
    form, mode : str
        Pillow's names for the format and the mode of the file that was read.
    info : dict
        Notes by Pillow's names.
    tiff : object
        What :mod:`.tiff` keeps of a TIFF.
    said : list of str
        What could not be kept.
    """

    colours: np.ndarray
    alpha: np.ndarray | None = None
    hidden: np.ndarray | None = None
    form: str = ""
    mode: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    tiff: Any = None
    said: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        pages, height, width, channels = self.colours.shape
        kind = {1: "greyscale", 3: "RGB"}.get(channels, f"of {channels} channels") + (" with alpha" if self.alpha is not None else "")
        dtype = self.colours.dtype
        bits = "1" if dtype.kind == "b" or self.mode == "1" else str(8 * dtype.itemsize)
        of = "" if dtype.kind in "ub" else {"i": " signed", "f": " float"}[dtype.kind]
        return (f"{pages} pages, " if pages > 1 else "") + f"{width}x{height}, {bits}-bit{of} {kind}"
