"""The command's messages: options instead of Python's arguments, the word that was meant, and the option that makes a call work."""

import re

import numpy as np
import pytest

from pycuda_conv import cli
from pycuda_conv.tools import verify
from pycuda_conv.tools.wording import in_options


@pytest.mark.parametrize(("message", "shown"), [
    ("pass device='opencl', or set it", "pass --device opencl, or set it"),
    ("non-positive stride is not supported, but got stride=[2, -1]", "non-positive stride is not supported, but got --stride 2,-1"),
    ("device and devices exclude each other, but got device=0 and devices=(0, 1)", "device and devices exclude each other, but got --device 0 and --devices 0,1"),
    ("padding='same' is not supported for strided convolutions", "--padding same is not supported for strided convolutions"),
    ("got output_padding=[3], stride=[1]", "got --output-padding 3, --stride 1"),
    ("Given groups=2, weight of size [4, 3, 3, 3]", "Given --groups 2, weight of size [4, 3, 3, 3]"),
    ("no GPU (device=cuda:1) is there", "no GPU (--device cuda:1) is there"),
    ("Given transposed=1, weight", "Given transposed=1, weight"),
])
def test_messages_of_the_command_name_options(message, shown):
    assert in_options(message) == shown


@pytest.mark.parametrize(("arguments", "meant"), [
    (["vrify"], "verify"), (["verify", "--devise", "0"], "--device"), (["verify", "--device", "gpu:1"], "cuda:1"),
    (["run", "--filter", "w.npy", "--padding", "smae", "a.npy", "b.npy"], "same"), (["bench", "--mode", "fp23"], "fp32"),
    (["run", "--filter", "w.npy", "--activation", "leakyrelu:0.2", "a.npy", "b.npy"], "leaky_relu"),
    (["run", "--filter", "w.npy", "--devices", "All", "a.npy", "b.npy"], "all"),
])
def test_the_command_names_the_word_that_was_meant(arguments, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"; did you mean {meant}? (--help tells more)" in told and told.count("\n") == 1


@pytest.mark.parametrize(("image", "filter"), [
    ((20, 30), (3, 3)), ((4, 20, 30), (3, 3)), ((2, 3, 4, 20, 30), (3, 3)), ((9, 20, 30), (3, 3, 3)), ((20, 30), (1, 1, 3, 3)), ((30,), (3,)),
    ((2, 20, 30), "blur"),
], ids=str)
def test_axes_are_named_where_they_make_a_call_work(image, filter, tmp_path, monkeypatch, capsys, opencl):
    pytest.importorskip("dask.array")
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng().standard_normal(image, dtype=np.float32)
    np.save("x.npy", x)
    if not isinstance(filter, str):
        np.save("w.npy", np.ones(filter, np.float32))
        filter = "w.npy"
    arguments = ["run", "--device", "opencl", "--filter", filter, "x.npy", "y.npy"]
    assert cli.main(arguments) == 2
    found = re.search(r"--axes says what the axes of the input are, as (--axes) (\w+)", capsys.readouterr().err)
    assert cli.main([*arguments, *found.groups()]) == 0
    assert np.load("y.npy").ndim == x.ndim


def test_verify_names_its_oracle_where_torch_is_missing(monkeypatch, capsys, opencl):
    find = verify._importable
    for there in (True, False):
        monkeypatch.setattr(verify, "_importable", lambda name, there=there: find(name) if there or name != "torch" else None)
        assert cli.main(["verify", "--device", "opencl", "--cases", "float64"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        if find("torch") is not None or not there:
            assert ("judged by numpy alone" in told) != there and ("torch's" in told) == there
