"""`pycuda-conv run` on zarr, OME-Zarr, TIFF and several files: results, what is refused, interrupts, faults, clusters."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from conftest import ends_soon
from reference import started

import pycuda_conv as pc
from pycuda_conv.interrupt import INTERRUPTED
from pycuda_conv.tools import run
from pycuda_conv.tools.terminal import OK, UNUSABLE
from pycuda_conv.tools.volumes import run as chunked_run
from pycuda_conv.tools.volumes import target, work

for needed in ("dask.array", "distributed"):
    pytest.importorskip(needed)
zarr = pytest.importorskip("zarr")
tifffile = pytest.importorskip("tifffile")
fsspec = pytest.importorskip("fsspec")
correlate = pytest.importorskip("scipy.ndimage").correlate


@pytest.fixture(params=["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def command(request, command, monkeypatch, tmp_path):
    """`pycuda-conv run`, in a folder of its own and in small chunks. It names no GPU."""
    if request.param == "opencl":
        request.getfixturevalue("opencl")
    place = ["--device", "opencl"] * (request.param == "opencl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(work, "WORK_BYTES", 1 << 13)

    def call(*arguments):
        return command("run", *arguments, *([] if "--scheduler" in arguments or "--device" in arguments else place))

    call.place, call.device = place, request.param
    return call


@pytest.fixture
def on_opencl(command):
    """The command, whose workers compute on OpenCL."""
    if command.device != "opencl":
        pytest.skip("the clusters of tests compute on OpenCL")
    return command


def draw(*shape, dtype="f4", seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(0, 60000, shape).astype(dtype) if np.dtype(dtype).kind in "iu" else rng.standard_normal(shape).astype(dtype)


def save_zarr(name, array, chunks, axes=None, **options):
    stored = zarr.create_array(
        name, shape=array.shape, chunks=chunks, dtype=array.dtype, dimension_names=tuple(axes) if axes else None, **options
    )
    stored[...] = array


def names():
    return sorted(p.name for p in Path().iterdir())


def filtered(x, filters, rounded=True):
    """`x` filtered along its last axes with its border repeated, rounded and clipped if it holds integers."""
    filters = np.asarray(filters, np.float64)
    y = correlate(x.astype(np.float64), filters.reshape((1,) * (x.ndim - filters.ndim) + filters.shape), mode="nearest")
    return np.clip(np.rint(y), 0, np.iinfo(x.dtype).max) if x.dtype.kind in "iu" and rounded else y


# ---- results


@pytest.mark.parametrize("name", run.FILTERS)
def test_named_filters_go_over_volumes_and_planes(command, name):
    x = draw(2, 2, 5, 10, 17, dtype="u2")
    save_zarr("x.zarr", x, (1, 1, 4, 8, 8), "tczyx")
    status, out, err = command("--filter", name, "x.zarr", "planes.zarr", "--axes", "tcsyx")
    assert (status, err) == (OK, "") and out.startswith("planes.zarr: conv2d 20x1x10x17")
    y = zarr.open_array("planes.zarr", mode="r")
    assert (y.shape, y.dtype, y.chunks) == (x.shape, x.dtype, (1, 1, 4, 8, 8))
    assert np.abs(y[...] - filtered(x, run.FILTERS[name])).max() <= 1
    status, out, err = command("--filter", name, "x.zarr", "volumes.zarr")
    if name == "emboss":
        assert status == UNUSABLE and "has two dimensions only" in err and names() == ["planes.zarr", "x.zarr"]
        return
    assert (status, err) == (OK, "") and "conv3d 4x1x5x10x17" in out
    assert np.abs(zarr.open_array("volumes.zarr", mode="r")[...].astype("f8") - filtered(x, work.volume_filter(name))).max() <= 1


@pytest.mark.parametrize("w, flags, options", [
    ((4, 3, 3, 3, 3), "", {}), ((4, 3, 3, 3, 3), "--padding same --bias b.npy", {"padding": "same"}), ((6, 1, 2, 3, 3), "--groups 3 --stride 2 --padding 1", {"groups": 3, "stride": 2, "padding": 1}),
    ((4, 3, 3, 3), "--padding 1,0", {"padding": (1, 0)}), ((3, 2, 3, 3, 3), "--transposed --stride 2,1,2 --output-padding 1,0,0", {"stride": (2, 1, 2), "output_padding": (1, 0, 0)}),
    ((3, 2, 3, 3), "--transposed --stride 3", {"stride": 3}),
])
@pytest.mark.turns
@pytest.mark.parametrize("kind", ["zarr", "tif", "npy"])
def test_filters_with_channels(command, kind, w, flags, options):
    x, w = draw(2, 3, 5, 10, 17), draw(*w)
    np.save("w.npy", w)
    np.save("b.npy", draw(4))
    if kind == "zarr":
        save_zarr("x.zarr", x, (1, 1, 4, 8, 8), "tczyx")
    else:
        tifffile.imwrite("x.tif", x, metadata={"axes": "TCZYX"}, photometric="minisblack")
    status, _, err = command("--filter", "w.npy", *(["x.zarr"] if kind == "zarr" else ["x.tif"]), f"y.{kind}", *flags.split())
    assert (status, err) == (OK, "")
    y = {
        "zarr": lambda: zarr.open_array("y.zarr", mode="r")[...], "tif": lambda: tifffile.imread("y.tif"), "npy": lambda: np.load("y.npy")
    }[kind]()
    function = getattr(pc, f"conv{'_transpose' * ('transposed' in flags)}{w.ndim - 2}d")
    bias = draw(4) if "bias" in flags else None
    if w.ndim == 5:
        expected = function(x, w, bias, device=command.device, **options)
    else:
        expected = np.stack(
            [function(np.ascontiguousarray(x[:, :, z]), w, bias, device=command.device, **options) for z in range(5)], axis=2
        )
    assert y.shape == expected.shape and y.dtype == np.float32
    # chunks may have another kernel
    assert np.array_equal(y, expected) if command.device == "opencl" else np.allclose(y, expected, atol=1e-4)
    if kind == "tif":
        with tifffile.TiffFile("y.tif") as file:
            assert file.series[0].axes == "TCZYX"


@pytest.mark.parametrize("dtype", ["i1", "u4", "i8", "u8"])
def test_integers_are_clipped(command, dtype):
    limits = np.iinfo(dtype)
    x = np.full((6, 6), limits.max, dtype)
    x[3, 3] = limits.min
    save_zarr("x.zarr", x, (3, 3), "yx")
    assert command("--filter", "sharpen", "x.zarr", "y.zarr")[::2] == (OK, "")
    y = zarr.open_array("y.zarr", mode="r")[...]
    assert y.dtype == x.dtype and np.array_equal(y, x)


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", "f4", "f8"])
def test_types_are_kept_without_channels(command, dtype):
    x = draw(12, 13, 14, dtype="u1" if dtype == "u1" else dtype)
    np.save("k.npy", np.full((3, 3, 3), 1 / 27))
    np.save("x.npy", x)
    assert command("--filter", "k.npy", "x.npy", "y.zarr", "--axes", "zyx")[::2] == (OK, "")
    y = zarr.open_array("y.zarr", mode="r")[...]
    assert y.dtype == x.dtype
    expected = filtered(x, np.full((3, 3, 3), 1 / 27), rounded=False)
    assert np.abs(y - (np.rint(expected) if x.dtype.kind in "iu" else expected)).max() <= {"u1": 1, "i4": 1, "f2": 5e-3}.get(dtype, 1e-5)


@pytest.mark.parametrize("version", [2, 3])
def test_ome_zarr_stays_ome_zarr(command, version):
    x = draw(3, 12, 20, 22, dtype="u2")
    axes = [{"name": "c", "type": "channel"}, *({"name": a, "type": "space", "unit": "micrometer"} for a in "zyx")]
    transforms = [{"type": "scale", "scale": [1.0, 2.0, 0.5, 0.5]}, {"type": "translation", "translation": [0.0, 1.0, 2.0, 3.0]}]
    scales = {
        "multiscales": [{"axes": axes, "datasets": [{"path": "full", "coordinateTransformations": transforms}, {"path": "half"}]}],
        "omero": {"channels": [{}] * 3}
    }
    scales = scales if version == 2 else {"ome": {"version": "0.5", **scales}}
    group = zarr.create_group("x.ome.zarr", zarr_format=version, attributes=scales)
    group.create_array("full", shape=x.shape, chunks=(1, 8, 8, 8), dtype=x.dtype)[...] = x
    np.save("w.npy", draw(2, 3, 3, 3, 3))
    assert command("--filter", "blur", "x.ome.zarr", "y.ome.zarr")[::2] == (OK, "")
    assert command("--filter", "w.npy", "x.ome.zarr", "z.ome.zarr", "--stride", 2, "--padding", 1)[::2] == (OK, "")
    for name, factor in (("y.ome.zarr", 1), ("z.ome.zarr", 2)):
        made = zarr.open_group(name, mode="r")
        attributes = dict(made.attrs) if version == 2 else dict(made.attrs["ome"])
        (scale,) = attributes["multiscales"]
        (dataset,) = scale["datasets"]
        assert made.metadata.zarr_format == version and scale["axes"] == axes
        assert dataset["path"] == "0" and ("omero" in attributes) == (factor == 1)
        assert dataset["coordinateTransformations"][0]["scale"] == [1.0, 2.0 * factor, 0.5 * factor, 0.5 * factor]
        assert dataset["coordinateTransformations"][1] == transforms[1]
    assert np.abs(zarr.open_group("y.ome.zarr", mode="r")["0"][...].astype("f8") - filtered(x, work.volume_filter("blur"))).max() <= 1
    assert zarr.open_group("z.ome.zarr", mode="r")["0"].shape == (2, 6, 10, 11)
    if version == 2:
        assert Path("y.ome.zarr/0/0/0/0/0").is_file()  # as OME wants chunks to be named


@pytest.mark.parametrize("w, flags", [
    (np.full((2, 3), 1 / 6), ""), (np.full((3, 3), 1 / 9), "--stride 2,3 --padding 1"), (np.full((3, 2), 1 / 6), "--dilation 2 --padding 0,1,3,0"),
    (np.outer([0.5, 1, 0.5], [0.5, 1, 0.5]), "--transposed --stride 2"), (np.outer([0.5, 1, 0.5], [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]), "--transposed --stride 2,3 --padding 1"),
])
def test_the_pixels_of_an_ome_zarr_stay_where_they_are(command, w, flags):
    """A mean of places is the place of the mean; that is what the scale and the translation of the result say."""
    axes = [{"name": "z", "type": "space", "unit": "micrometer"}, {"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    transforms = [{"type": "scale", "scale": [4.0, 2.0, 0.5]}]
    scales = {
        "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": transforms}],
        "coordinateTransformations": [{"type": "scale", "scale": [1, 3, 1]}]
    }
    x = (2.0 * np.arange(20)[:, None] + 0.5 * np.arange(22) + np.zeros((2, 1, 1))).astype("f4")
    zarr.create_group("x.zarr", zarr_format=2, attributes={"multiscales": [scales]}).create_array(
        "0", shape=x.shape, chunks=(1, 20, 22), dtype="f4"
    )[...] = x
    np.save("w.npy", np.float32([[w, w]] if "transposed" in flags else [[w], [w]]))
    assert command("--filter", "w.npy", "x.zarr", "y.zarr", "--axes", "tyx", *flags.split())[::2] == (OK, "")
    made = zarr.open_group("y.zarr", mode="r")
    (scale,) = made.attrs["multiscales"]
    channel = {"name": "c", "type": "channel"}
    assert scale["axes"] == [axes[0], channel, *axes[1:]]
    assert scale["coordinateTransformations"] == [{"type": "scale", "scale": [1, 1.0, 3, 1]}]
    found = {transform["type"]: transform[transform["type"]] for transform in scale["datasets"][0]["coordinateTransformations"]}
    size, first = found["scale"], found.get("translation", [0.0] * 4)
    y, x = (start + step * np.arange(n) for start, step, n in zip(first[2:], size[2:], made["0"].shape[2:], strict=True))
    assert size[:2] == [4.0, 1.0] and np.allclose(made["0"][0, 0, 3:-3, 3:-3], (y[:, None] + x)[3:-3, 3:-3], atol=1e-4)


@pytest.mark.parametrize("dtype, channels", [("f4", 1), ("i1", 1), ("i2", 1), ("u2", 3)])
def test_a_tiff_of_one_page_that_is_no_picture(command, monkeypatch, dtype, channels):
    """It is filtered as an array, also from and to a .npy file. Pages of other sizes are told of; without tifffile its extra is named."""
    shape = (20, 21, 3)[: 2 + (channels > 1)]
    x = (draw(*shape) * 50).astype(dtype) if np.dtype(dtype).kind != "u" else draw(*shape, dtype=dtype)
    tifffile.imwrite("x.tif", x, photometric="rgb" if channels > 1 else "minisblack")
    tifffile.imwrite("x.tif", x[:9], photometric="rgb" if channels > 1 else "minisblack", append=True)
    status, out, err = command("--filter", "sharpen", "x.tif", "y.tif")
    assert (status, err) == (OK, "") and out.startswith("y.tif: the first of 2 series of pages, conv2d")
    y, expected = (
        tifffile.imread("y.tif", series=0),
        np.moveaxis(filtered(np.moveaxis(x, 2, 0), run.FILTERS["sharpen"], False), 0, 2)
        if channels > 1
        else filtered(x, run.FILTERS["sharpen"], False),
    )
    if x.dtype.kind in "iu":
        expected = np.clip(np.rint(expected), np.iinfo(dtype).min, np.iinfo(dtype).max)
    assert y.dtype == x.dtype and np.abs(y - expected).max() <= (1 if x.dtype.kind in "iu" else 1e-3)
    assert command("--filter", "sharpen", "x.tif", "y.npy")[::2] == (OK, "") and np.array_equal(np.load("y.npy"), y)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert "install it with: pip install tifffile" in command("--filter", "sharpen", "x.tif", "z.tif")[2]
    assert names() == ["x.tif", "y.npy", "y.tif"]


def test_stores_that_fsspec_opens(command):
    x = draw(20, 30)
    save_zarr("memory://in/x.zarr", x, (8, 8), "yx")
    assert command("--filter", "sharpen", "memory://in/x.zarr", "memory://in/y.zarr")[::2] == (OK, "")
    assert np.allclose(zarr.open_array("memory://in/y.zarr", mode="r")[...], filtered(x, run.FILTERS["sharpen"]), atol=1e-5)
    assert command("--filter", "sharpen", "memory://in/x.zarr", "memory://in/y.zarr")[0] == UNUSABLE  # it exists
    assert command("--filter", "identity", "memory://in/x.zarr", "memory://in/y.zarr", "--force")[0] == OK
    assert np.array_equal(zarr.open_array("memory://in/y.zarr", mode="r")[...], x)


def test_nothing_is_lost_at_addresses(command):
    """Neither the input, nor what is no zarr, nor without --force any zarr. An address of a local file is its path."""
    x = draw(20, 30)
    save_zarr("memory://safe/x.zarr", x, (8, 8), "yx")
    fsspec.filesystem("memory").pipe_file("/safe/notes/mine.txt", b"mine")
    before = fsspec.filesystem("memory").find("/safe")
    for place, flag, words in (
        ("x.zarr", "--force", "which is read"), ("", "--force", "which is read"), ("notes", "--force", "is no zarr"),
        ("x.zarr/y", "", "which is read")
    ):
        status, out, err = command("--filter", "blur", "memory://safe/x.zarr", f"memory://safe/{place}", *filter(None, [flag]))
        assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and words in err and fsspec.filesystem("memory").find("/safe") == before
    save_zarr("x.zarr", x, (8, 8), "yx")
    status, out, err = command("--filter", "blur", "x.zarr", "memory://safe/x.zarr", "--resume")
    assert status == UNUSABLE and "exists already" in err and fsspec.filesystem("memory").find("/safe") == before
    here = Path.cwd().as_uri()
    assert command("--filter", "blur", "x.zarr", f"{here}/x.zarr", "--force")[0] == UNUSABLE
    assert np.array_equal(zarr.open_array("x.zarr")[...], x)
    assert command("--filter", "identity", f"{here}/x.zarr", f"{here}/y.zarr")[::2] == (OK, "") and names() == ["x.zarr", "y.zarr"]


def test_several_files_go_into_a_folder(command):
    for i in range(3):
        save_zarr(f"x{i}.zarr", draw(20, 21, seed=i), (8, 8), "yx")
    Path("out").mkdir()
    status, out, err = command("--filter", "edge", "--activation", "leaky_relu:0.25", "x[01].zarr", "x2.zarr", "out")
    assert (status, err, out.count("\n")) == (OK, "", 3) and sorted(os.listdir("out")) == ["x0.zarr", "x1.zarr", "x2.zarr"]
    expected = filtered(draw(20, 21, seed=2), run.FILTERS["edge"])
    assert np.allclose(zarr.open_array("out/x2.zarr", mode="r")[...], np.where(expected < 0, expected / 4, expected), atol=1e-4)
    shutil.rmtree("out/x1.zarr")
    status, out, err = command("--filter", "edge", "--activation", "leaky_relu:0.25", "x*.zarr", "out", "--resume")
    assert (status, err) == (OK, "") and out.count("is there already") == 2
    assert sorted(os.listdir("out")) == ["x0.zarr", "x1.zarr", "x2.zarr"]


# ---- what is refused

REFUSED = {
    "nothing there": (("--filter", "blur", "none.zarr", "y.zarr"), "none.zarr can't be read"),
    "no array": (("--filter", "blur", "folder.zarr", "y.zarr"), "folder.zarr can't be read"),
    "group": (("--filter", "blur", "group.zarr", "y.zarr"), "group (a) without OME's multiscales; name an array in it"),
    "axes unknown": (("--filter", "blur", "plain.zarr", "y.zarr"), "--axes zyx"),
    "axes too few": (("--filter", "blur", "plain.zarr", "y.zarr", "--axes", "yx"), "a letter of its own for each axis"),
    "axes twice": (("--filter", "blur", "plain.zarr", "y.zarr", "--axes", "yyx"), "each once"),
    "no space": (("--filter", "blur", "plain.zarr", "y.zarr", "--axes", "abc"), "goes along the axes y, x"),
    "rank": (("--filter", "w.npy", "plain.zarr", "y.zarr"), "has 3 axes and nothing says what they are"),
    "channels": (("--filter", "w.npy", "plain.zarr", "y.zarr", "--axes", "zyx"), "to have 2 channels"),
    "complex": (("--filter", "k.npy", "complex.zarr", "y.zarr", "--axes", "zyx"), "complex"),
    "exists": (("--filter", "blur", "x.zarr", "old.zarr"), "old.zarr exists already; --force"),
    "no zarr": (("--filter", "blur", "x.zarr", "full.zarr", "--force"), "what is there is no zarr"),
    "onto itself": (("--filter", "blur", "x.zarr", "x.zarr", "--force"), "it is the file"),
    "into itself": (("--filter", "blur", "x.zarr", "x.zarr/y.zarr"), "it is the file"),
    "no folder": (("--filter", "blur", "x.zarr", "none/y.zarr"), "is not a folder"),
    "not writeable": (("--filter", "blur", "x.zarr", "/proc/y.zarr"), "/proc/y.zarr can't be written"),
    "a picture": (("--filter", "blur", "picture.png", "y.zarr"), "picture.png can't be read: it is no zarr, no TIFF"),
    "a picture with --resume": (("--filter", "blur", "picture.png", "y.png", "--resume"), "pictures become pictures, without --axes, --resume and --scheduler"),
    "no pages": (("--filter", "blur", "none.tif", "y.tif", "--axes", "yx"), "none.tif can't be read: it has no pages"),
    "another file at an address": (("--filter", "w.npy", "memory://x.npy", "y.npy"), "at addresses only zarr can"),
    "another file to an address": (("--filter", "blur", "x.zarr", "memory://y.npy"), "at addresses only zarr can"),
    "unknown address": (("--filter", "blur", "nowhere://x.zarr", "y.zarr"), "nowhere://x.zarr can't be opened"),
    "address": (("--filter", "blur", "x.zarr", "nowhere://y.zarr"), "nowhere://y.zarr"),
    "one file for many": (("--filter", "blur", "x.zarr", "y.npy", "--scheduler", "tcp://127.0.0.1:9"), "several workers can't write one file"),
    "a TIFF of one axis": (("--filter", "line.npy", "line.zarr", "y.tif"), "y.tif can't be written: a TIFF has two axes or more, the result has 1"),
    "no scheduler": (("--filter", "blur", "x.zarr", "y.zarr", "--scheduler", "tcp://127.0.0.1:9"), "can't be reached"),
    "batch": (("--filter", "blur", "x.zarr", "y.zarr", "--batch", "2"), "--batch is for"),
    "pattern": (("--filter", "blur", "none*.zarr", "folder"), "none*.zarr matches no file"),
    "pattern of one": (("--filter", "blur", "pl*.zarr", "y.zarr"), "y.zarr must be a folder, for pl*.zarr may stand for several files"),
    "several": (("--filter", "blur", "x.zarr", "plain.zarr", "y.zarr"), "y.zarr must be a folder"),
    "two of a name": (("--filter", "blur", "x.zarr", "full.zarr/x.zarr", "folder"), "2 files called x.zarr"),
    "device": (("--filter", "blur", "x.zarr", "y.zarr", "--device", "tpu"), "'tpu'"),
}


@pytest.mark.parametrize("arguments, words", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_told_in_one_line_and_leaves_nothing(command, monkeypatch, arguments, words):
    monkeypatch.setattr(chunked_run, "CONNECT_SECONDS", 1)
    save_zarr("x.zarr", draw(9, 10), (4, 4), "yx")
    save_zarr("plain.zarr", draw(8, 9, 10), (4, 4, 4))
    save_zarr("complex.zarr", np.ones((4, 4, 4), "c8"), (4, 4, 4))
    save_zarr("old.zarr", draw(3), (3,))
    save_zarr("line.zarr", draw(9), (4,), "x")
    np.save("line.npy", draw(3))
    zarr.create_group("group.zarr").create_array("a", shape=(3,), dtype="f4")
    np.save("w.npy", draw(4, 2, 3, 3, 3))
    np.save("k.npy", draw(3, 3, 3))
    for folder in ("folder.zarr", "folder", "full.zarr/x.zarr"):
        Path(folder).mkdir(parents=True)
    Path("full.zarr/notes.txt").write_text("mine")
    Path("picture.png").write_bytes(b"")
    Path("none.tif").write_bytes(b"II*\0" + bytes(4))
    before = sorted(Path().rglob("*"))
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and err.startswith("pycuda-conv run: ") and words in err
    assert sorted(Path().rglob("*")) == before


# ---- faults


def test_a_chunk_that_can_t_be_read_is_named(command):
    save_zarr("x.zarr", draw(40, 41), (8, 8), "yx")
    Path("x.zarr/c/3/2").write_bytes(b"not what zstd wrote")
    status, out, err = command("--filter", "blur", "x.zarr", "y.zarr")
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and "x.zarr: chunk c/3/2 can't be read: " in err and names() == ["x.zarr"]


@pytest.mark.parametrize("how, status", [(KeyboardInterrupt(), INTERRUPTED), (OSError(errno.ENOSPC, "No space left on device"), UNUSABLE)], ids=["ctrl-c", "full"])
@pytest.mark.parametrize("output", ["y.zarr", "y.npy", "y.tif"])
def test_an_interrupted_run_leaves_nothing(command, monkeypatch, how, status, output):
    save_zarr("x.zarr", draw(300, 310), (32, 32), "yx")
    written, opened = [], target.opened_to_write

    def failing(array):
        written.append(names())
        if len(written) > 3:
            monkeypatch.setattr(target, "filesystem", None)  # as where a signal came while fsspec was imported
            raise how
        return opened(array)

    failing.cache_clear = opened.cache_clear
    monkeypatch.setattr(target, "opened_to_write", failing)
    found, out, err = command("--filter", "blur", "x.zarr", output)
    assert (found, out, err.count("\n")) == (status, "", 1) and any(name.endswith(".part") for name in written[0])
    assert names() == ["x.zarr"] and (status == INTERRUPTED or f"{output} can't be written: No space left on device" in err)


SLOW = """
import itertools, sys, time
from pycuda_conv import cli
from pycuda_conv.tools.volumes import source, work
work.WORK_BYTES = 1 << 13
load, begun = source._Load.__call__, itertools.count()
source._Load.__call__ = lambda self, where: (time.sleep({seconds} * (1 if next(begun) < 12 else 10)), load(self, where))[1]
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


def start(env, *arguments, seconds=0.05, **options):
    """The command in a process of its own, whose chunks take a while to be read: so long that a test without a core still finds it running."""
    return started("-c", SLOW.format(seconds=seconds), *arguments, env=env, text=True, **options)


def until(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def chunks_in(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and path.name[0].isdigit()]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_process_that_is_ended_in_the_middle(command, fast_env, number, resume):
    if number == signal.SIGKILL and not resume:
        pytest.skip("nobody can remove anything then")
    x = draw(1200, 64)
    save_zarr("x.zarr", x, (32, 64), "yx")
    arguments = ["--filter", "blur", "x.zarr", "y.zarr", *["--resume"] * resume]
    with start(fast_env, *arguments, *command.place) as process:
        until(lambda: len(chunks_in(".y.zarr.done" if resume else ".")) > 40 * (not resume) + 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=400)
    assert out == "" and process.returncode in (INTERRUPTED, -signal.SIGKILL)
    if not resume:
        assert err == "interrupted; with --resume, a run keeps what is complete\n" and names() == ["x.zarr"]
        return
    assert names() == [".y.zarr.done", ".y.zarr.part", "x.zarr"]
    complete = {path.name for path in chunks_in(".y.zarr.done")}
    half = next(iter(sorted({f"{i}.0" for i in range(38)} - complete)))  # as if it had been written in part
    Path(f".y.zarr.part/c/{half.replace('.', '/')}").parent.mkdir(parents=True, exist_ok=True)
    Path(f".y.zarr.part/c/{half.replace('.', '/')}").write_bytes(b"half")
    old = {name: Path(f".y.zarr.part/c/{name.replace('.', '/')}").stat().st_mtime_ns for name in complete}
    assert 3 < len(complete) < 38
    refused = command("--filter", "edge", "x.zarr", "y.zarr", "--resume")
    assert refused[0] == UNUSABLE and "had other arguments (filter); --force begins anew" in refused[2]
    assert command(*arguments)[::2] == (OK, "") or pytest.fail("the chunks of work differ")
    assert names() == ["x.zarr", "y.zarr"]
    assert np.allclose(zarr.open_array("y.zarr", mode="r")[...], filtered(x, run.FILTERS["blur"]), atol=1e-5)
    assert {name: Path(f"y.zarr/c/{name.replace('.', '/')}").stat().st_mtime_ns for name in complete} == old


def test_a_full_disk_is_told_and_leaves_nothing(fast_env, opencl, tmp_path, monkeypatch):
    """A limit on the size of files stands for it."""
    monkeypatch.chdir(tmp_path)
    save_zarr("x.zarr", draw(2500, 2500), (2500, 2500), "yx")  # one chunk of 25 MB
    np.save("w.npy", np.ones((1, 1), "f"))
    limit = (16 << 20, 16 << 20)  # what PoCL and LLVM write is smaller
    arguments = "--filter", "w.npy", "x.zarr", "y.zarr", "--device", "opencl"
    with start(fast_env, *arguments, seconds=0, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)) as process:
        out, err = process.communicate(timeout=400)
    assert (process.returncode, out) == (UNUSABLE, ""), err
    assert "y.zarr can't be written: File too large" in err and names() == ["w.npy", "x.zarr"]


# ---- clusters

CLUSTER = """
import sys, time
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0) as cluster:
        print(cluster.scheduler_address, flush=True)
        print(*[nanny.pid for nanny in cluster.workers.values()], flush=True)
        sys.stdin.read()
"""


class Cluster:
    """Two workers and a scheduler in processes of their own."""

    def __init__(self, env, folder):
        script = folder / "cluster.py"
        script.write_text(textwrap.dedent(CLUSTER))
        self.process = subprocess.Popen(
            [sys.executable, str(script)], env={**env, "PYCUDA_CONV_BACKEND": "opencl"}, cwd=folder, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            self.address = self.process.stdout.readline().strip()
            self.workers = [int(pid) for pid in self.process.stdout.readline().split()]
            assert len(self.workers) == 2
        except BaseException:
            self.kill()
            raise

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


@ends_soon
def test_a_cluster_loses_a_worker_and_then_its_scheduler(on_opencl, cluster, fast_env, tmp_path):
    """A run whose worker is killed is complete; one whose scheduler is killed goes on with another cluster."""
    x = draw(3200, 64)
    save_zarr("x.zarr", x, (32, 64), "yx")
    np.save("w.npy", np.ones((1, 1, 31, 31), "f"))
    expected = filtered(x, np.ones((31, 31)))
    lost = Cluster(fast_env, tmp_path)
    arguments = ["--filter", "w.npy", "--padding", "15", "--scheduler"]

    def run_until(number, act, *flags):
        with start(fast_env, *arguments, lost.address, "x.zarr", "y.zarr", *flags, seconds=0) as process:
            until(lambda: process.poll() is not None or sum(len(chunks_in(part)) for part in Path().glob(".*.part")) > number)
            assert process.poll() is None, process.communicate()
            act()
            out, err = process.communicate(timeout=400)
            return process.returncode, out, err

    try:
        status, out, err = run_until(5, lambda: os.kill(lost.workers[0], signal.SIGKILL))
        assert (status, err) == (OK, ""), err
        y = zarr.open_array("y.zarr", mode="r")[...]
        padded = np.pad(x.astype("f8"), 15)
        assert np.allclose(y[15:-15, 15:-15], expected[15:-15, 15:-15], atol=1e-2)
        assert np.isclose(y[0, 0], padded[:31, :31].sum(), atol=1e-2)
        shutil.rmtree("y.zarr")
        status, out, err = run_until(5, lost.kill, "--resume")
        assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and "the scheduler at tcp" in err, err
        complete = len(chunks_in(".y.zarr.done"))
        assert complete >= 1
        assert on_opencl(*arguments, cluster.address, "x.zarr", "y.zarr", "--resume")[::2] == (OK, "")
        assert np.array_equal(zarr.open_array("y.zarr", mode="r")[...], y) and not list(Path().glob(".y.zarr*"))
    finally:
        lost.kill()


@pytest.fixture(scope="module")
def cluster(fast_env, tmp_path_factory):
    """Two workers for several tests."""
    made = Cluster(fast_env, tmp_path_factory.mktemp("cluster"))
    yield made
    made.kill()


def disk_is_full(full):
    """Run on a worker: no chunk can be written, or can again. A limit on all files would end the worker: dask and PoCL write some, too."""
    from zarr.storage import LocalStore

    async def set(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if full:
        LocalStore.usual, LocalStore.set = LocalStore.set, set
    else:
        LocalStore.set = LocalStore.usual


@pytest.mark.parametrize("fault, words", [("unreadable", "x.zarr: chunk c/3/2 can't be read: "), ("full", "y.zarr can't be written: No space left on device")])
@ends_soon
def test_what_a_worker_can_t_do_is_told_and_leaves_nothing(on_opencl, cluster, monkeypatch, fault, words):
    """The next run on the same worker, to which all tasks go, is right."""
    import cloudpickle
    from distributed import Client

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import this module
    with Client(cluster.address, set_as_default=False, timeout=300) as client:
        x = draw(40, 41)
        save_zarr("x.zarr", x, (8, 8), "yx")
        whole = Path("x.zarr/c/3/2").read_bytes()
        arguments = "--filter", "blur", "x.zarr", "y.zarr", "--scheduler", cluster.address
        client.wait_for_workers(2, timeout=300)
        worker = [next(iter(client.scheduler_info()["workers"]))]
        monkeypatch.setattr(Client, "compute", partialmethod(Client.compute, workers=worker))
        if fault == "full":
            client.run(disk_is_full, True, workers=worker)
        else:
            Path("x.zarr/c/3/2").write_bytes(b"not what zstd wrote")
        try:
            status, out, err = on_opencl(*arguments)
        finally:
            if fault == "full":
                client.run(disk_is_full, False, workers=worker)
        assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and words in err and names() == ["x.zarr"]
        Path("x.zarr/c/3/2").write_bytes(whole)
        assert on_opencl(*arguments)[::2] == (OK, "")
        assert np.allclose(zarr.open_array("y.zarr", mode="r")[...], filtered(x, run.FILTERS["blur"]), atol=1e-5)


@ends_soon
def test_ctrl_c_ends_the_work_of_a_cluster_and_leaves_nothing(on_opencl, cluster, fast_env):
    save_zarr("x.zarr", draw(3200, 64), (32, 64), "yx")
    np.save("w.npy", np.ones((1, 1, 31, 31), "f"))
    arguments = "--filter", "w.npy", "--padding", "15", "--scheduler", cluster.address, "x.zarr", "y.zarr"
    with start(fast_env, *arguments, seconds=0) as process:
        until(lambda: process.poll() is not None or sum(len(chunks_in(part)) for part in Path().glob(".*.part")) > 3)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=400)
    assert (process.returncode, out, err.partition(";")[0]) == (INTERRUPTED, "", "interrupted") and names() == ["w.npy", "x.zarr"]
    time.sleep(0.3)
    assert names() == ["w.npy", "x.zarr"]  # nobody goes on writing
