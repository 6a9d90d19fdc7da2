"""The course's lessons: what each computes, and the answer to its question, by its own text with one line changed."""

import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from reference import NVCC

import pycuda_conv as pc
from pycuda_conv.kernels import LESSONS

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


def windows(x, r, s):
    return np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (r, s), (2, 3))  # n c p q r s


def problem(name, rng):
    """Two arrays, and the result in float64."""
    x, w = rng.standard_normal((2, 3, 21, 19)), rng.standard_normal((10, 3, 3, 4))
    if name == "depthwise_columns":
        x, w = rng.standard_normal((2, 12, 11, 17)), rng.standard_normal((17, 3, 3))
        result = np.einsum("ncpqrs,crs->npqc", windows(x.transpose(0, 3, 1, 2), 3, 3), w)
    elif name == "fourier":
        x, w = rng.standard_normal((2, 1, 1, 500)), rng.standard_normal((3, 1, 1, 100))
        result = np.einsum("ncpqrs,kcrs->nkpq", windows(x, 1, 100), w)
    elif name == "input_gradient":
        x, result = rng.standard_normal((2, 10, 9, 12)), np.zeros((2, 3, 11, 15))
        for r, s in np.ndindex(3, 4):
            result[:, :, r : r + 9, s : s + 12] += np.einsum("nkpq,kc->ncpq", x, w[:, :, r, s])
    elif name == "filter_gradient":
        w = rng.standard_normal((2, 4, 19, 16))
        result = np.einsum("nchwpq,nkpq->kchw", windows(x, 19, 16), w)
    else:
        result = np.einsum("ncpqrs,kcrs->nkpq", windows(x, 3, 4), w)
    return x.astype(np.float32), w.astype(np.float32), result


def run(name, x, w, seed=0, broken=None):
    """A lesson on the simulated machine."""
    step, shape = pc.lesson(name).launch(x.shape, w.shape)
    # the machine wants every kernel to wait for the launch before, as this package's do
    waits = step.source().replace("const Sizes d) {", 'const Sizes d) {\n  asm volatile("griddepcontrol.wait;" ::: "memory");')
    members = {name: getattr(step, name) for name in ("kernel", "maps", "buffers", "numbers", "grid", "block", "shared")}
    step = SimpleNamespace(**members, source=lambda: waits)
    out = np.full(shape, np.nan, np.float32)
    memory = SimpleNamespace(buffers=[array.reshape(-1).view(np.uint8) for array in (x, w, out)])
    simt.run([[step]], memory, seed, broken=broken)
    return memory.buffers[2].view(np.float32).reshape(shape)


def tolerance(name, result):
    return (2e-3 if name == "tensor_core" else 2e-6) * np.abs(result).max()


@simulated
@pytest.mark.parametrize("name", LESSONS)
def test_what_it_computes(name):
    x, w, result = problem(name, np.random.default_rng())
    for seed in (0, 1):
        np.testing.assert_allclose(run(name, x, w, seed), result, atol=tolerance(name, result), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LESSONS)
def test_on_the_gpu(name):
    x, w, result = problem(name, np.random.default_rng())
    np.testing.assert_allclose(pc.lesson(name)(x, w), result, atol=tolerance(name, result), rtol=0)


@pytest.mark.parametrize("name", LESSONS)
def test_the_text_is_short_plain_and_asks_a_question(name):
    text = pc.lesson(name).source
    assert len(text.splitlines()) <= 60 and "#include" not in text and not re.search(r"^#define", text, re.M)
    assert "?" in pc.lesson(name).question and all(f"// {part}" in text for part in ("Mapping", "Memory", "Question", "Try"))


#: What comes of the change that a lesson proposes: the machine's words, or that results are wrong.
ANSWERS = {
    "pixel": "outside", "halo": "wrong", "product": "wrong", "tensor_core": "wrong", "input_gradient": "outside", "filter_gradient": "wrong",
    "depthwise_columns": "wrong", "fourier": "wrong",
}  # fmt: skip


def proposed(name):
    """The line of a lesson, and what to put there instead."""
    return tuple(part.strip() for part in re.search(r"Try +(.*)$", pc.lesson(name).question, re.M)[1].split("->"))


@simulated
@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_to_its_question(name):
    x, w, result = problem(name, np.random.default_rng())
    seen = set()
    for seed in range(4):
        try:
            computed = run(name, x, w, seed, broken=proposed(name))
        except simt.Wrong as wrong:
            seen.add("outside" if re.search(r"(reads|writes) \d+ bytes at -?\d+ of buffer", str(wrong)) else f"wrong: {wrong}")
        else:
            near = np.abs(computed - result) <= tolerance(name, result)  # false for NaN
            seen.add("right" if near.all() else "wrong")
    assert any(one.startswith(ANSWERS[name]) for one in seen), seen


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_registers_have_no_addresses(tmp_path):
    """channels: sums that a loop indexes lie in local memory."""

    def stack(text):
        (tmp_path / "lesson.cu").write_text(text)
        command = [str(NVCC), "-cubin", "-arch=sm_90", "-Xptxas=-v", "-o", str(tmp_path / "lesson.cubin"), str(tmp_path / "lesson.cu")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
        return int(re.search(r"(\d+) bytes stack frame", done.stderr)[1])

    text, (line, other) = pc.lesson("channels").source, proposed("channels")
    assert line in text and stack(text) == 0 < stack(text.replace(line, other))


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("pixel", ((2, 3, 8), (4, 3, 3, 3)), r"\(n, c, h, w\)"),
        ("pixel", ((2, 3, 8, 8), (4, 2, 3, 3)), r"got \(2, 3, 8, 8\) and \(4, 2, 3, 3\)"),
        ("product", ((2, 3, 2, 8), (4, 3, 3, 3)), "product takes"),
        ("halo", ((2, 3, 12, 12), (4, 3, 9, 3)), "9 x 3"),
        ("fourier", ((2, 1, 1, 500), (4, 1, 1, 129)), "128 taps"),
        ("depthwise_columns", ((2, 8, 8, 4), (4, 5, 5)), "3 x 3, got 5 x 5"),
        ("filter_gradient", ((2, 3, 8, 8), (1, 4, 6, 6)), r"\(n, k, p, q\)"),
    ],
)
def test_shapes_that_do_not_belong_together(name, shapes, words):
    with pytest.raises(pc.ConvArgumentError, match=words):
        pc.lesson(name).launch(*shapes)


def test_names():
    with pytest.raises(pc.ConvArgumentError, match=r"did you mean|pixel"):
        pc.lesson("pixels")
    with pytest.raises(pc.ConvArgumentError, match="name must be a lesson"):
        pc.lesson(3)
