"""Files keep what they are: a folder of small pictures of all kinds goes through `run --filter identity`, and other readers see the
same."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from pycuda_conv.tools.pictures import files, forms

Image = pytest.importorskip("PIL.Image")
tifffile = pytest.importorskip("tifffile")
imagecodecs = pytest.importorskip("imagecodecs")
ImageCms = pytest.importorskip("PIL.ImageCms")
PngInfo = pytest.importorskip("PIL.PngImagePlugin").PngInfo

H, W = 17, 23


@pytest.fixture
def run(command, tmp_path, monkeypatch):
    """Run the command in an empty folder; gives the status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("run", *arguments, "--device", "opencl")


def pixels(channels=3, dtype=np.uint8, pages=0, seed=0):
    rng = np.random.default_rng(seed)
    shape = (*((pages,) if pages else ()), H, W, *((channels,) if channels > 1 else ()))
    if dtype is bool:
        return rng.random(shape) < 0.5
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, True)


PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
GEO = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 6e6, 0.0), True),
    (34735, "H", 8, (1, 1, 0, 1, 1024, 0, 1, 1), True), (42112, "s", 0, "<GDALMetadata/>", True),
]


def pillow(mode, **options):
    def write(path):
        source = Image.fromarray(pixels(4))
        image = source.convert("RGB").convert(mode) if mode in ("1", "P", "CMYK", "YCbCr") else source.convert(mode)
        image.save(path, **options)

    return write


def tiff(array, **options):
    return lambda path: tifffile.imwrite(path, array, **options)


def codec(name, array, **options):
    return lambda path: Path(path).write_bytes(getattr(imagecodecs, f"{name}_encode")(array, **options))


def with_texts(path):
    info = PngInfo()
    info.add_text("Title", "some words")
    Image.fromarray(pixels()).save(path, pnginfo=info, icc_profile=PROFILE, dpi=(300, 300))


def turned(path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    Image.fromarray(pixels()).save(path, exif=exif)


def with_transparent_colour(path):
    Image.fromarray(pixels()).save(path, transparency=(1, 2, 3))


def palette_with_alpha(path):
    image = Image.fromarray(pixels()).convert("P")
    image.save(path, transparency=bytes([0, 128, 255]))


def pgm(maxval):
    def write(path):
        values = np.random.default_rng(0).integers(0, maxval + 1, (H, W)).astype(">u2")
        Path(path).write_bytes(b"P5\n# a comment\n%d %d\n%d\n" % (W, H, maxval) + values.tobytes())

    return write


def ppm_16(path):
    Path(path).write_bytes(b"P6 %d %d 65535\n" % (W, H) + pixels(3, np.uint16).astype(">u2").tobytes())


def bmp_565(path):
    row = (2 * W + 3) // 4 * 4
    rows = np.zeros((H, row // 2), "<u2")
    rows[:, :W] = pixels(1, np.uint16)
    header = struct.pack("<IiiHHIIiiII", 40, W, H, 1, 16, 3, rows.nbytes, 2835, 2835, 0, 0) + struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    Path(path).write_bytes(b"BM" + struct.pack("<IHHI", 66 + rows.nbytes, 0, 0, 66) + header + rows.tobytes())


def lab(path):
    profiles = (ImageCms.createProfile(name) for name in ("sRGB", "LAB"))
    ImageCms.profileToProfile(Image.fromarray(pixels()), *profiles, outputMode="LAB").save(path)


def several(path):
    Image.fromarray(pixels()).save(path, save_all=True, append_images=[Image.fromarray(pixels(seed=1))])


def small_tiff(bits, photometric, **more):
    """A TIFF of 4 or 12 bits, which tifffile does not write."""

    def write(path):
        values = pixels(1, np.uint16)[:, :22].astype(np.uint32) >> (16 - bits)
        a, b = values[:, ::2], values[:, 1::2]
        packed = [a << 4 | b] if bits == 4 else [a >> 4, (a & 15) << 4 | b >> 8, b & 255]
        data = np.stack(packed, -1).astype(np.uint8).tobytes()
        tags = {256: 22, 257: H, 258: bits, 259: 1, 262: photometric, 273: 122 + 12 * len(more), 277: 1, 278: H, 279: len(data)}
        tags |= {34665: 8} if more else {}
        entries = b"".join(struct.pack("<HHII", code, 4, 1, value) for code, value in sorted(tags.items()))
        Path(path).write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data)

    return write


def with_chunks(array, *chunks):
    """A PNG with further chunks behind its head."""

    def write(path):
        data = imagecodecs.png_encode(array)
        more = b"".join(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks)
        Path(path).write_bytes(data[:33] + more + data[33:])

    return write


def with_pages(path):
    with tifffile.TiffWriter(path) as file:
        for page in range(3):
            file.write(pixels(3, seed=page), photometric="rgb", metadata=None, description=f"page {page}", contiguous=False)


def with_smaller_copies(path):
    with tifffile.TiffWriter(path) as file:
        file.write(pixels(), subifds=1, photometric="rgb", metadata=None)
        file.write(pixels()[::2, ::2], subfiletype=1, photometric="rgb", metadata=None)


XMP = b'<?xpacket begin=""?><x:xmpmeta xmlns:x="adobe:ns:meta/"/><?xpacket end="w"?>'
TURNED = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
MORE_TAGS = [
    (274, "H", 1, 6, True), (315, "s", 0, "an artist", True), (33432, "s", 0, "(c) somebody", True), (271, "s", 0, "a maker", True)
]
RESPONSE = (b"gAMA", struct.pack(">I", 100000)), (b"cHRM", struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000))
PALETTE = np.random.default_rng(3).integers(0, 256, (3, 256)).astype(np.uint16) * 257
OME = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
RGB = {"photometric": "rgb"}
GREY = {"photometric": "minisblack"}
#: Files, by name: how each is written. All of them stay as they are.
KEPT = {
    "l.png": pillow("L"), "la.png": pillow("LA"), "rgb.png": pillow("RGB"), "rgba.png": pillow("RGBA"), "1.png": pillow("1"), "1.bmp": pillow("1"),
    "texts.png": with_texts, "l.bmp": pillow("L"), "rgb.bmp": pillow("RGB"), "rgb.tga": pillow("RGB"), "rgba.tga": pillow("RGBA"),
    "l.pgm": pillow("L"), "rgb.ppm": pillow("RGB"), "lossless.webp": pillow("RGBA", lossless=True, exact=True), "l.gif": pillow("L"),
    "rgb.jp2": pillow("RGB", irreversible=False), "l.jp2": pillow("L", irreversible=False), "grey16.pgm": pgm(65535), "rgb.pcx": pillow("RGB"),
    "grey16.png": codec("png", pixels(1, np.uint16)), "la16.png": codec("png", pixels(2, np.uint16)), "rgb16.png": codec("png", pixels(3, np.uint16)),
    "rgba16.png": codec("png", pixels(4, np.uint16)), "rgb16.jp2": codec("jpeg2k", pixels(3, np.uint16), level=0, reversible=True),
    "grey16.jp2": codec("jpeg2k", pixels(1, np.uint16), level=0, reversible=True), "rgb16.jxl": codec("jpegxl", pixels(3, np.uint16), lossless=True),
    "rgb8.jxl": codec("jpegxl", pixels(3), lossless=True),
    "grey8.tif": tiff(pixels(1), **GREY), "grey16.tif": tiff(pixels(1, np.uint16), **GREY), "signed.tif": tiff(pixels(1, np.int16), **GREY),
    "float.tif": tiff(pixels(1, np.float32), **GREY), "double.tif": tiff(pixels(1, np.float64), **GREY), "int32.tif": tiff(pixels(1, np.int32), **GREY),
    "rgb8.tif": tiff(pixels(3), **RGB), "rgb16.tif": tiff(pixels(3, np.uint16), **RGB), "rgba8.tif": tiff(pixels(4), extrasamples=["unassalpha"], **RGB),
    "rgba16.tif": tiff(pixels(4, np.uint16), extrasamples=["unassalpha"], **RGB), "pages8.tif": tiff(pixels(3, pages=3), **RGB),
    "pages16.tif": tiff(pixels(3, np.uint16, pages=3), **RGB), "bool.tif": tiff(pixels(1, bool), **GREY),
    "planar.tif": tiff(np.moveaxis(pixels(3), -1, 0), planarconfig="separate", **RGB), "lzw.tif": tiff(pixels(3), compression="lzw", predictor=True, **RGB),
    "zstd.tif": tiff(pixels(3, np.uint16), compression="zstd", **RGB), "deflate.tif": tiff(pixels(1), compression="deflate", **GREY),
    "tiled.tif": tiff(pixels(3), tile=(16, 16), **RGB), "dpi.tif": tiff(pixels(3), resolution=(300, 300), resolutionunit=2, iccprofile=PROFILE, **RGB),
    "described.tif": tiff(pixels(3), description="some words", metadata=None, software="a program", datetime="2026:01:02 03:04:05", **RGB),
    "ome.tif": tiff(pixels(3), ome=True, metadata=OME, **RGB), "imagej.tif": tiff(pixels(1, np.uint16), imagej=True, resolution=(4.0, 4.0), metadata={"unit": "um", "spacing": 3.0, "axes": "YX"}),
    "geo.tif": tiff(pixels(1, np.float32), extratags=[*GEO, (42113, "s", 0, "-9999", True)], metadata=None, **GREY),
    "565.bmp": bmp_565, "la.jp2": pillow("LA", irreversible=False), "rgba.jp2": pillow("RGBA", irreversible=False), "int8.tif": tiff(pixels(1, np.int8), **GREY),
    "tags.tif": tiff(pixels(), metadata=None, extratags=MORE_TAGS, **RGB), "response.png": with_chunks(pixels(), *RESPONSE),
    "xmp.webp": pillow("RGB", lossless=True, xmp=XMP), "twelve16.jp2": codec("jpeg2k", pixels(3, np.uint16) >> 4, level=0, reversible=True, bitspersample=12),
    "grey_twelve16.jp2": codec("jpeg2k", pixels(1, np.uint16) >> 4, level=0, reversible=True, bitspersample=12),
    "small_type.tif": tiff(pixels(1), metadata=None, extratags=[(42113, "s", 0, "-9999", True)], **GREY), "four.tif": small_tiff(4, 1), "twelve.tif": small_tiff(12, 1),
    "pages.tif": with_pages, "pyramid.tif": with_smaller_copies, "camera.tif": small_tiff(4, 1, exif=True),
    "uint32.tif": tiff(pixels(1, np.uint32), **GREY), "half.tif": tiff(pixels(1, np.float16), **GREY),
}  # fmt: skip
#: Files that mean the same in another form: what a reader sees afterwards.
CHANGED = {
    "white.tif": (tiff(pixels(1), photometric="miniswhite"), lambda: (255 - pixels(1), None)),
    "palette.tif": (tiff(pixels(1), photometric="palette", colormap=PALETTE), lambda: ((PALETTE.T // 257).astype(np.uint8)[pixels(1)], None)),
    "p.png": (pillow("P"), lambda: (np.asarray(Image.fromarray(pixels(4)).convert("RGB").convert("P").convert("RGB")), None)),
    "maxval.pgm": (pgm(1023), None), "transparent.png": (with_transparent_colour, lambda: (np.dstack([pixels(), 255 * (pixels() != (1, 2, 3)).any(-1)]), None)),
    "turned.png": (turned, lambda: (np.rot90(pixels(), -1), None)),
    "texts16.png": (with_chunks(pixels(3, np.uint16), (b"tEXt", b"Title\0words"), *RESPONSE), lambda: (pixels(3, np.uint16), None)),
    "turned16.png": (with_chunks(pixels(3, np.uint16), (b"eXIf", TURNED)), lambda: (np.rot90(pixels(3, np.uint16), -1), None)),
    "white4.tif": (small_tiff(4, 0), lambda: (15 - (pixels(1, np.uint16)[:, :22] >> 12), None)),
    "white12.tif": (small_tiff(12, 0), lambda: (4095 - (pixels(1, np.uint16)[:, :22] >> 4), None)),
    "wide.tif": (tiff(pixels(1, np.int64) | 1, **GREY), None), "xmp.jpg": (pillow("RGB", xmp=XMP), None), "two.jpg": (lambda path: Image.fromarray(pixels()).save(path, "MPO", save_all=True, append_images=[Image.fromarray(pixels())]), None),
    "cmyk.tif": (pillow("CMYK"), lambda: (np.asarray(Image.fromarray(pixels(4)).convert("RGB").convert("CMYK").convert("RGB")), None)),
    "palette_alpha.png": (palette_with_alpha, None),
    "jpeg.tif": (tiff(pixels(3), compression="jpeg", **RGB), None), "photo.jpg": (pillow("RGB", quality=95), None), "grey.jpg": (pillow("L"), None),
    "lossy.webp": (pillow("RGB"), None), "rgb.avif": (pillow("RGB"), None), "lab.tif": (lab, None),
}
#: How far off pixels of formats that lose something are in the mean; of noise, and by the second time that they are written.
CLOSE = {"photo.jpg": 8, "grey.jpg": 8, "lossy.webp": 8, "rgb.avif": 8, "lab.tif": 2}  # fmt: skip
#: Files that are refused, and by which words.
REFUSED = {
    "several.gif": (several, "2 pictures"), "several.png": (several, "2 pictures"), "rgb16.ppm": (ppm_16, "16-bit colours"),
    "p.gif": (lambda path: Image.fromarray(pixels()).convert("P").save(path), "quantised"), "icon.ico": (pillow("RGBA"), "format that is written"),
    "associated.tif": (tiff(pixels(4), extrasamples=["assocalpha"], **RGB), "multiplied"),
    "clear.gif": (lambda path: Image.fromarray(pixels()).convert("P").save(path, transparency=3), "quantised"), "page.pdf": (pillow("RGB"), "a picture of a format"),
    "page.eps": (pillow("RGB"), "a picture of a format"), "complex.tif": (tiff(pixels(1, np.float32) + 1j, **GREY), "complex64"),
    "white_float.tif": (tiff(pixels(1, np.float32), photometric="miniswhite"), "no number for black"), "ten.avif": (codec("avif", pixels(3, np.uint16) >> 6, bitspersample=10), "more than 8 bits"),
}  # fmt: skip


#: What is told of files whose notes can't be kept, or not as they are.
TOLD = {
    "four.tif": "4 bits", "twelve.tif": "12 bits", "white12.tif": "12 bits", "pages.tif": "further pages", "pyramid.tif": "smaller copies", "camera.tif": "camera's notes",
    "texts16.png": "texts and colours' response", "turned16.png": "camera's notes", "two.jpg": "further pictures", "wide.tif": "2^53", "cmyk.tif": "CMYK",
}  # fmt: skip


def seen(path):
    """Pixels as another reader sees them."""
    path = Path(path)
    if path.suffix == ".tif":
        return tifffile.imread(path)
    data = path.read_bytes()
    if path.suffix == ".jxl":
        return imagecodecs.jpegxl_decode(data)
    if "16" in path.name and path.suffix == ".png":
        return imagecodecs.png_decode(data)
    if "16" in path.name and path.suffix == ".jp2":
        return imagecodecs.jpeg2k_decode(data)
    with Image.open(path) as image:
        return np.asarray(image)


def notes(path):
    """What a file says besides its pixels, as its library tells it."""
    path = Path(path)
    if path.suffix == ".jxl":
        return {}
    if path.suffix != ".tif":
        with Image.open(path) as image:
            kept = {name: image.info[name] for name in (
                "icc_profile", "exif", "dpi", "comment", "transparency", "xmp", "gamma", "chromaticity"
            ) if name in image.info and name != "transparency"}
            return kept | {"mode": image.mode, "text": dict(getattr(image, "text", {}))}
    with tifffile.TiffFile(path) as file:
        page, tags = file.pages[0], file.pages[0].tags
        told = {code: tags[code].value for code in (
            259, 262, 282, 283, 284, 296, 305, 306, 274, 271, 315, 33432, 317, 322, 338, 33550, 33922, 34675, 34735, 42112, 42113
        ) if code in tags}
        if file.is_ome or file.is_imagej:
            told.pop(305, None)
        if told.get(296) == 1 and told.get(282) == (1, 1):  # this says nothing
            told = {code: value for code, value in told.items() if code not in (282, 283, 296)}
        ome = {
            name: value
            for name, value in tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"].items() if name.startswith("Physical")
        } if file.is_ome else None
        imagej = {name: (file.imagej_metadata or {}).get(name) for name in ("unit", "spacing")} if file.is_imagej else None
        words = tags[270].value if 270 in tags and not (file.is_ome or file.is_imagej or file.is_shaped) else None
        return told | {
            "axes": file.series[0].axes.replace("Q", "I"), "ome": ome, "imagej": imagej, "words": words, "dtype": str(page.dtype)
        }


def test_a_folder_of_all_kinds_goes_through_unchanged_or_is_refused_by_name(run):
    Path("in").mkdir()
    for name, write in KEPT.items():
        write(f"in/{name}")
    for name, (write, _) in (CHANGED | REFUSED).items():
        write(f"in/{name}")
    assert len(list(Path("in").iterdir())) >= 60
    status, _, err = run("--filter", "identity", "in", "out")
    assert status != 0 and f"{len(REFUSED)} of {len(KEPT) + len(CHANGED) + len(REFUSED)} files failed" in err
    for name, (_, words) in REFUSED.items():
        assert not Path(f"out/{name}").exists()
        assert any(name in line and words in line for line in err.splitlines()), f"{name}: {words}"
    wrong = [
        f"{name}: not told"
        for name, words in TOLD.items() if not any(line.startswith(f"in/{name}: ") and words in line for line in err.splitlines())
    ]
    for name in KEPT:
        before, after = seen(f"in/{name}"), seen(f"out/{name}")
        if before.dtype != after.dtype or before.shape != after.shape or not np.array_equal(
            before, after, equal_nan=before.dtype.kind == "f"
        ):
            wrong.append(f"{name}: pixels {before.dtype} {before.shape}, {after.dtype} {after.shape}")
        said, now = notes(f"in/{name}"), notes(f"out/{name}")
        wrong += [
            f"{name}: {key} was {said.get(key)!r} and is {now.get(key)!r}"
            for key in said.keys() | now.keys() if said.get(key) != now.get(key)
        ]
    for name, (_, expected) in CHANGED.items():
        if expected is not None and not np.array_equal(seen(f"out/{name}"), expected()[0]):
            wrong.append(f"{name}: other pixels")
    for name, most in CLOSE.items():
        off = np.abs(seen(f"out/{name}").astype(float) - (pixels() if name == "lab.tif" else seen(f"in/{name}"))).mean()
        wrong += [f"{name}: {off:.1f} off in the mean"] if off > most else []
    assert not wrong, "\n".join(wrong)


# ---- what is invisible


def test_colours_of_invisible_pixels_do_not_bleed(run):
    picture = np.zeros((12, 12, 4), np.uint8)
    picture[:, :6] = (255, 255, 255, 255)
    picture[:, 6:] = (255, 0, 0, 0)
    Image.fromarray(picture).save("a.png")
    for name in ("blur", "sharpen", "gaussian:1.5", "box:3"):
        assert run("--filter", name, "a.png", "b.png", "--force")[0] == 0
        found = np.asarray(Image.open("b.png"))
        assert (found[:, :6] == 255).all() and np.array_equal(found[..., 3], picture[..., 3]), name
    assert run("--filter", "edge", "a.png", "b.png", "--force")[0] == 0
    assert (np.asarray(Image.open("b.png"))[:, :6, :3] == 0).all()


@pytest.mark.parametrize("axes", ["yx", "tyx"])
def test_what_has_no_data_stays_and_does_not_spread(run, axes):
    """Of a picture and of a stack."""
    x = np.full((3, H, W)[-len(axes) :], 100, np.float32)
    (x if axes == "yx" else x[1])[3:6, 4:9] = -9999
    tifffile.imwrite("a.tif", x, photometric="minisblack", metadata=None, extratags=[(42113, "s", 0, "-9999", True)])
    assert run("--filter", "blur", "a.tif", "b.tif", *(["--axes", axes] if axes != "yx" else []))[0] == 0
    np.testing.assert_allclose(tifffile.imread("b.tif"), x, rtol=1e-6)


# ---- options


@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect", "symmetric", "circular"])
def test_borders(run, border):
    ndimage = pytest.importorskip("scipy.ndimage")
    x = pixels(3)
    Image.fromarray(x).save("a.png")
    mode = {"zeros": "constant", "replicate": "nearest", "reflect": "mirror", "symmetric": "reflect", "circular": "wrap"}[border]
    np.save("w.npy", np.array([[0.5, 0.25], [0.125, 0.125]]))
    for name, exact in (
        ("gaussian:2", ndimage.gaussian_filter(x.astype(float), 2.0, mode=mode, axes=(0, 1))), ("box:4", ndimage.uniform_filter(x.astype(float), 4, mode=mode, axes=(0, 1))),
        ("w.npy", ndimage.correlate(x.astype(float), np.load("w.npy"), mode=mode, axes=(0, 1), origin=-1)),
    ):  # fmt: skip
        assert run("--filter", name, "a.png", "b.png", "--border", border, "--force")[0] == 0
        assert np.abs(np.asarray(Image.open("b.png")) - exact).max() <= 0.501, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gaussian:1", "grey.tif", "b.png", "--dtype", "float32"), "can't hold float32"), (("blur", "complex.tif", "b.tif"), "complex64"),
        *(((name, "a.png", "b.png"), words) for name, words in {
            "gaussian:-1": "above 0", "gaussian:x": "gaussian:SIGMA", "box:2.5": "box:SIZE", "gausian:1": "--filter must be",
        }.items()),
        *((("blur", "a.png", f"b.{kind}"), words) for kind, words in {
            "jpg": "has no transparency", "bmp": "has no transparency", "gif": "quantised", "ppm": "has no transparency",
        }.items()),
        *((("blur", "wide.png", f"b.{kind}"), "16-bit RGB does not fit") for kind in ("jpg", "webp", "avif", "bmp", "gif", "ppm")),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_in_one_line_and_nothing_is_lost_in_silence(run, arguments, words):
    """Numbers of filters, types, transparency, colours of 16 bits."""
    Image.fromarray(pixels(4)).save("a.png")
    codec("png", pixels(3, np.uint16))("wide.png")
    tiff(pixels(1), **GREY)("grey.tif")
    tiff(np.ones((3, H, W), np.complex64), **GREY)("complex.tif")
    before = set(Path().iterdir())
    status, out, err = run("--filter", *arguments)
    assert status != 0 and (out, err.count("\n")) == ("", 1) and words in err and set(Path().iterdir()) == before


def test_wide_colours_without_the_library_are_told_of(run, monkeypatch):
    import sys

    Path("a.png").write_bytes(imagecodecs.png_encode(pixels(3, np.uint16)))
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    status, _, err = run("--filter", "blur", "a.png", "b.png")
    assert status != 0 and "imagecodecs" in err and err.count("\n") == 1


def test_every_form_of_the_table_is_written_by_its_library(run):
    """Each format takes the modes that the table says, as another reader sees them."""
    for name, form in forms.FORMS.items():
        ending = next((e for e in (
            ".png", ".jpg", ".webp", ".avif", ".jp2", ".jxl", ".bmp", ".tga", ".ppm", ".gif", ".pcx", ".tif"
        ) if files.form_of(f"x{e}") == name), None)
        assert ending, name
        for channels in {0, *form.wide}:
            x = pixels(channels or 1, np.uint16 if channels else np.uint8, seed=channels)
            if not channels and not ({"L", "RGB"} & form.modes):
                continue
            alpha = x[None, ..., -1] if channels in (2, 4) else None
            colours = x[None, ..., None] if x.ndim == 2 else x[None, ..., :-1] if alpha is not None else x[None]
            picture = forms.Picture(np.ascontiguousarray(colours), None if alpha is None else np.ascontiguousarray(alpha))
            path = Path(f"{name}{channels}{ending}")
            files.write(path, picture, path)
            again = files.read(path)
            if name not in ("JPEG", "WEBP", "AVIF"):
                assert np.array_equal(again.colours, picture.colours), (name, channels)
                assert alpha is None or np.array_equal(again.alpha, picture.alpha), (name, channels)
            assert again.colours.dtype == picture.colours.dtype


# ---- stacks and zarrs


def test_a_stack_keeps_its_description(run):
    x = pixels(1, np.uint16, pages=4)
    told = {"axes": "ZYX", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "µm", "PhysicalSizeZ": 2.0, "PhysicalSizeZUnit": "µm"}
    tifffile.imwrite("ome.tif", x, ome=True, metadata=told, photometric="minisblack")
    tifffile.imwrite("ij.tif", x, imagej=True, resolution=(4.0, 4.0), metadata={"axes": "ZYX", "spacing": 3.0, "unit": "um"})
    for name in ("ome.tif", "ij.tif"):
        assert run("--filter", "identity", name, f"new_{name}")[0] == 0
        assert np.array_equal(tifffile.imread(f"new_{name}"), x)
    with tifffile.TiffFile("new_ome.tif") as file:
        pixels_of = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        assert file.is_ome and file.series[0].axes == "ZYX"
        assert {
            name: value for name, value in pixels_of.items() if name.startswith("Physical")
        } == {name: told[name] for name in told if name.startswith("Physical")}
    with tifffile.TiffFile("new_ij.tif") as file:
        assert file.is_imagej and (file.imagej_metadata["spacing"], file.imagej_metadata["unit"]) == (3.0, "um")
        assert file.pages[0].tags[282].value == (4, 1)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "bool"])
def test_a_zarr_keeps_what_it_is(run, zarr_format, dtype):
    zarr = pytest.importorskip("zarr")
    x = pixels(1, bool if dtype == "bool" else dtype)
    names = {"dimension_names": ("y", "x")} if zarr_format == 3 else {}
    compressor = zarr.codecs.ZstdCodec(level=5) if zarr_format == 3 else __import__("numcodecs").Zstd(level=5)
    options = {
        "shape": x.shape, "chunks": (8, 8), "dtype": x.dtype, "zarr_format": zarr_format, "compressors": compressor, "fill_value": 1,
        **names
    }
    if zarr_format == 3:
        options["shards"] = (16, 16)
    a = zarr.create_array("a.zarr", attributes={"units": "counts", "list": [1, 2]}, **options)
    a[...] = x
    assert run("--filter", "identity", "a.zarr", "b.zarr", "--axes", "yx")[0] == 0
    b = zarr.open_array("b.zarr", mode="r")
    assert b.dtype == x.dtype and np.array_equal(b[...], x)
    assert dict(b.attrs) == dict(a.attrs) and b.fill_value == a.fill_value and b.chunks == a.chunks and b.compressors == a.compressors
    assert b.metadata.zarr_format == zarr_format
    assert zarr_format == 2 or (b.metadata.dimension_names == ("y", "x") and b.shards == a.shards)


def test_a_zarr_is_stored_as_before(run):
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    ways = [
        {"order": "F"}, {"filters": [numcodecs.Delta(dtype="u2")]}, {"chunk_key_encoding": {"name": "v2", "separator": "/"}}, {"fill_value": None},
        {"compressors": None}, {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "."}}, {"dtype": ">u2"},
        {"zarr_format": 3, "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}, {"zarr_format": 3, "dtype": "float32", "fill_value": float("nan")},
    ]  # fmt: skip
    for number, way in enumerate(ways):
        options = {"shape": (H, W), "chunks": (8, 8), "dtype": "uint16", "zarr_format": 2, **way}
        names = {"dimension_names": ("y", "x")} if options["zarr_format"] == 3 else {}
        a = zarr.create_array(f"{number}.zarr", **options, **names)
        a[...] = pixels(1, np.uint16)
        assert run("--filter", "identity", f"{number}.zarr", f"new{number}.zarr", "--axes", "yx")[0] == 0
        b = zarr.open_array(f"new{number}.zarr", mode="r")
        assert np.array_equal(a[...], b[...]) and str(a.metadata.to_dict()) == str(b.metadata.to_dict())
    zarr.create_array("a.zarr", shape=(H, W), chunks=(8, 8), dtype="uint16", fill_value=1000)[...] = 7
    status, _, err = run("--filter", "identity", "a.zarr", "b.zarr", "--axes", "yx", "--dtype", "uint8")
    assert status == 0 and "its fill value, 1000, is no uint8" in err


def test_packed_values_are_not_misread(run):
    zarr = pytest.importorskip("zarr")
    a = zarr.create_array("offset.zarr", shape=(H, W), chunks=(8, 8), dtype="int16", attributes={"add_offset": 5.0})
    a[...] = pixels(1, np.int16)
    status, _, err = run("--filter", "edge", "offset.zarr", "b.zarr", "--axes", "yx")
    assert status != 0 and "add_offset" in err
    assert run("--filter", "blur", "offset.zarr", "b.zarr", "--axes", "yx")[0] == 0


@pytest.mark.parametrize("border", ["replicate", "zeros"])
@pytest.mark.parametrize("none", [-9999, float("nan")])
def test_values_without_data_stay_and_do_not_spread(run, none, border):
    zarr = pytest.importorskip("zarr")
    x = np.full((H, W), 100, np.float32 if none != none else np.int16)
    x[3:6, 4:9] = none
    zarr.create_array(
        "a.zarr", shape=x.shape, chunks=(8, 8), dtype=x.dtype, attributes={"_FillValue": none if none == none else "NaN"}
    )[...] = x
    for name, plain in (("blur", x), ("edge", np.where((x == none) | (x != x), x, 0))):
        assert run("--filter", name, "a.zarr", "b.zarr", "--axes", "yx", "--force", "--border", border)[0] == 0
        inner = (slice(2, -2),) * 2
        np.testing.assert_allclose(zarr.open_array("b.zarr", mode="r")[...][inner], plain[inner], atol=1e-4)
    status, _, err = run("--filter", "blur", "a.zarr", "b.zarr", "--axes", "yx", "--force", "--activation", "relu")
    assert status == 0 and "stands for no data" in err


def test_notes_of_ome_are_kept_or_told_of(run):
    channels = {"Name": ["a & b", "c"], "Color": [-16776961, 16711935], "EmissionWavelength": [500.0, 600.0]}
    told = {
        "axes": "CYX", "Name": "n", "Description": "words", "AcquisitionDate": "2026-01-01T00:00:00", "Channel": channels,
        "Plane": {"ExposureTime": [0.5, 0.25]}
    }
    tifffile.imwrite(
        "a.tif", pixels(1, np.uint16, pages=2), ome=True, metadata={**told, "Experimenter": {"LastName": "somebody"}},
        photometric="minisblack"
    )
    status, _, err = run("--filter", "identity", "a.tif", "b.tif")
    assert status == 0 and "Experimenter" in err
    before, after = (tifffile.xml2dict(tifffile.TiffFile(name).ome_metadata)["OME"]["Image"] for name in ("a.tif", "b.tif"))
    before.pop("ExperimenterRef", None)
    assert before == after


@pytest.mark.parametrize("pages", [0, 3])
def test_a_type_is_asked_for(run, pages):
    x = pixels(1, np.uint8, pages=pages)
    tifffile.imwrite("a.tif", x, photometric="minisblack")
    for dtype in ("float32", "int16", "bool"):
        assert run("--filter", "identity", "a.tif", "b.tif", "--dtype", dtype, *(["--axes", "tyx"] if pages else []), "--force")[0] == 0
        found = tifffile.imread("b.tif")
        assert found.dtype == ("uint8" if dtype == "bool" and pages else dtype) and np.array_equal(found, x >= 0.5 if dtype == "bool" else x)


def test_wide_integers_keep_their_digits(run):
    np.save("x.npy", np.full((1, 4, 4), 2**24 + 1, np.int32))
    np.save("w.npy", np.ones((1, 1, 1, 1), np.float32))
    assert run("--filter", "w.npy", "x.npy", "y.npy")[0] == 0
    assert (np.load("y.npy") == 2**24 + 1).all()


@pytest.mark.parametrize("axes", ["zyx", "tyx"])
def test_stacks_take_filters_with_numbers(run, axes):
    ndimage = pytest.importorskip("scipy.ndimage")
    zarr = pytest.importorskip("zarr")
    x = np.random.default_rng(0).random((6, 20, 25), np.float32)
    zarr.create_array("a.zarr", shape=x.shape, chunks=(2, 9, 9), dtype=x.dtype)[...] = x
    along = (0, 1, 2) if axes == "zyx" else (1, 2)
    for name, exact in (
        ("gaussian:1.2", ndimage.gaussian_filter(x.astype(float), 1.2, mode="nearest", axes=along)),
        ("box:3", ndimage.uniform_filter(x.astype(float), 3, mode="nearest", axes=along))
    ):
        assert run("--filter", name, "a.zarr", "b.zarr", "--axes", axes, "--force")[0] == 0
        np.testing.assert_allclose(zarr.open_array("b.zarr", mode="r")[...], exact, atol=2e-6)
