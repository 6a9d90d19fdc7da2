"""The texts of the tensor cores' kernels: none depends on how large images are or how many there are, and what may be in one is a list."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines.hopper import gemm_tiles
from pycuda_conv.plan import as_called

DEVICES = {
    "H200": SimpleNamespace(capability=(9, 0), multiprocessors=132, backend="cuda", name="", model=""),
    "H100": SimpleNamespace(capability=(9, 0), multiprocessors=114, backend="cuda", name="", model=""),
    "sm_80": SimpleNamespace(capability=(8, 0), multiprocessors=108, backend="cuda", name="", model=""),
}
FLAG = {0, 1}
#: Of the planner's choices, which are on no list of measured ones.
PIXELS = {tile.BLOCK_N for tile in (one for seldom in range(4) for three in (False, True) for dense in (False, True) for one in gemm_tiles.ordinary_tiles(seldom, three, dense))}
#: What a define may be.
LISTS = {
    "hopper_gemm": {
        "BLOCK_M": {64, 128}, "BLOCK_N": PIXELS, "WGMMA_N": {n // m for n in PIXELS for m in (1, 2)}, "STAGES": {2, 3, 4, 5, 6}, "LOAD_CHANNELS": {16, 32, 64},
        "PRODUCTS": {1, 3}, "BF16": FLAG, "OUT": {16, 17, 32}, "NHWC": FLAG, "TENSOR_STORE": FLAG, "VEC": {1, 4},
        "DENSE": FLAG, "PINGPONG": FLAG, "W_MN_MAJOR": FLAG, "PHASES": {1, 4}, "INTERLEAVE_COLUMNS": FLAG, "TWIN": {1},
    },
    "mma_gemm": {
        "BLOCK_M": {64, 128}, "BLOCK_N": {64, 128, 256}, "STAGES": {3, 4}, "PRODUCTS": {1, 3}, "BF16": FLAG, "OUT": {16, 17, 32}, "NHWC": FLAG, "VEC": {1, 4}, "DENSE": FLAG,
    },
    "pack": {
        "IN": {16, 17, 32}, "LIMBS": {1, 2}, "NHWC": FLAG, "VECTOR": {1, 2, 4}, "EIGHTS": FLAG, "RANGE_CHECK": FLAG, "SAMPLE_SCALE": FLAG, "FILTER": FLAG, "FOLDED": FLAG,
        "CLUSTER": {0, 8},
    },
    "hopper_dense": {
        "BLOCK_M": {64, 128, 256}, "BLOCK_N": {32, 64, 96, 128, 160, 192, 256}, "STAGES": set(range(2, 13)), "TYPE": {16, 17, 32}, "W_MN_MAJOR": FLAG,
        "CLUSTER": {1, 2, 4, 8}, "PHASES": {1, 4},
    },
    "hopper_gather": {
        "BLOCK_M": {64, 128}, "BLOCK_N": {32, 64, 96, 128}, "STAGES": set(range(2, 9)), "TYPE": {16, 17, 32}, "COPY": {4, 16}, "CLUSTER": {1, 2, 4, 8},
    },
    "grouped_nhwc": {"TYPE": {16, 17, 32}, "TAPS_R": {1, 3}, "STRIDE_H": {1, 2}, "PHASES": {1, 4}},
    "grouped_nhwc_wgrad": {"TYPE": {16, 17}, "TAPS": {1, 9}, "WHOLE": FLAG},
    "few_channels_wgrad": {"TYPE": {16, 17, 32}, "LIMBS": {1, 2}, "M_TILES": {1, 2, 4}, "N_TILES": {2, 3, 4}},
    "patch_wgrad": {
        "DTYPE": {16, 17, 32, 64}, "INDEX_64": FLAG, "BLOCK_M": {16, 32, 64}, "BLOCK_N": {32, 64}, "BLOCK_K": {16}, "THREAD_M": {4, 8}, "THREAD_N": {4, 8},
        "CHANNELS_LAST": FLAG,
    },
    "transpose_filter": {"BYTES": {2, 4}}, "fold_channels": {"BYTES": {2, 4}, "UNIT": {2, 4, 8, 16}}, "via_nhwc": {"BYTES": {2, 4}}, "columns_add": {"DTYPE": {16, 17, 32, 64}, "INDEX_64": {0}, "THREADS": {256}, "CHANNELS": {1, 4, 8}},
    "hopper_wgrad": {
        "BLOCK_M": {64, 128, 192, 256}, "BLOCK_N": {64, 128, 192, 256, 384, 576}, "WGMMA_N": {64, 128, 192, 256}, "STAGES": set(range(2, 13)), "TYPE": {16, 17, 32},
        "LIMBS": {1, 2}, "PLANES": FLAG, "FLIPPED": FLAG,
    },
    "hopper_wgrad_reduce": {"TYPE": {16, 17, 32}}, "hopper_wgrad_add": {"TYPE": {16, 17, 32}, "EACH": {2, 4}},
    "hopper_planes": {"BLOCK_M": {64, 128, 192, 256}, "BLOCK_N": {64, 128, 192, 256}, "WGMMA_N": {64, 128, 192}, "STAGES": set(range(2, 9)), "TYPE": {16, 17}, "W_MN_MAJOR": FLAG, "OWN_M": {64, 128}, "RESULTS": {1, 2}},
    "hopper_gathered_planes": {"BLOCK_M": {64, 128}, "BLOCK_N": {32, 64, 128}, "STAGES": set(range(2, 9)), "TYPE": {16, 17, 32}, "W_TRANSPOSED": FLAG, "CLUSTER": {1, 2, 4, 8}, "GROUPS": {2, 4}},
    "few_channels": {
        "TYPE": {16, 17, 32}, "PRODUCTS": {1, 3}, "COLUMN_TILES": {1, 2, 3, 6}, "ROWS": {2, 3, 4, 6}, "PIXEL_TILES": {1, 2}, "WIDE_LOADS": FLAG,
    },
    "depthwise_toeplitz": {"TYPE": {16, 17}, "STRIDE": {1, 2}, "STEPS": {1, 2}, "GRAD": FLAG, "LAST": FLAG},
    "few_inputs": {"TYPE": {16, 17, 32}, "BLOCK_N": {16, 32, 48, 64}, "PLANES": FLAG, "PRODUCTS": {1, 3}},
    "mma_few_pixels": {"TYPE": {16, 17, 32}, "PRODUCTS": {1, 3}, "BLOCK_N": {32, 56}, "CLUSTER": {2, 4, 8}, "PHASES": {1, 4}},
    "hopper_pointwise": {
        "BLOCK_N": {32, 64, 96, 128}, "BLOCKS": {1, 2}, "STAGES": {3, 4, 5, 6}, "LIMBS": {1, 2}, "WGRAD": FLAG, "NHWC": FLAG, "MOMENTS": FLAG,
    },
}  # fmt: skip
MOST = 32  # texts of one layer, all its kernels together, that sizes and batches may ask for: tiles, and how rows can be read and written


def layers(count: int, seed: int):
    """Random layers: a function of the number of images and their size that makes a problem, or raises ValueError."""
    r = random.Random(seed)
    for _ in range(count):
        groups = r.choice((1, 1, 1, 1, 2, 4))
        c, k = (groups * r.choice((3, 16, 20, 32, 64, 96, 128, 200, 256, 512)) for _ in range(2))
        ndim, direction = r.choice((1, 2, 2, 2, 3)), r.choice(("fprop", "fprop", "dgrad", "wgrad"))
        taps, stride, dilation = r.choice((1, 1, 3, 3, 3, 5, 7)), r.choice((1, 1, 1, 2, 3)), r.choice((1, 1, 1, 2))
        dtype, precision = r.choice((("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32")))
        options = {"stride": stride, "padding": taps // 2, "dilation": dilation, "groups": groups}
        kind = {"dtype": dtype, "precision": precision, "layout": r.choice(("NCHW", "NHWC"))}
        fused = {"bias_shape": (k,), "activation": r.choice((None, "relu"))} if direction == "fprop" else {}

        def layer(n: int, size: int, c=c, k=k, groups=groups, ndim=ndim, direction=direction, taps=taps, options=options, kind=kind, fused=fused):
            x, w = (n, c, *(size,) * ndim), (k, c // groups, *(taps,) * ndim)
            forward = ConvProblem.forward(ndim, x, w, **options, **kind, **fused)
            if direction == "fprop":
                return forward
            return ConvProblem.gradient({"dgrad": "input", "wgrad": "weight"}[direction], ndim, x, w, forward.result_shape, **options, **kind)

        yield layer, (1500 if ndim == 1 else 90 if ndim == 2 else 20)


def launches(problem: ConvProblem, device):
    """What the planner's choice launches, but for the plain cores' kernels."""
    problem = as_called(problem, device)
    schedule = engines.schedule(problem, engines.choose(problem, device), device)
    steps = (*schedule.prepare, *schedule.steps, *schedule.whole, *(schedule.filter_last or ()))
    return [launch for step in steps for launch in step if not launch.kernel.startswith("direct")]


@pytest.mark.parametrize("name", DEVICES)
def test_sizes_and_batches_of_a_layer_ask_for_few_texts(name):
    device, r, met = DEVICES[name], random.Random(5), set()
    for layer, largest in layers(40, 5):
        texts = set()
        for _ in range(10):
            try:
                problem = layer(r.choice((1, 2, 3, 5, 8, 16, 31, 64)), r.randint(7, largest))
            except ValueError:  # a filter that is larger than the image
                continue
            for launch in launches(problem, device):
                file = launch.file or launch.kernel
                for define, value in launch.defines.items():
                    assert value in LISTS[file][define], f"{define} of {file} is {value}: {problem}"
                texts.add((file, tuple(sorted(launch.defines.items()))))
                met.add(file)
        assert len(texts) <= MOST, f"{len(texts)} texts: {problem}"
    assert met >= ({"pack", "mma_gemm"} if name == "sm_80" else {"pack", "hopper_gemm", "hopper_pointwise", "hopper_dense", "hopper_wgrad"})


@pytest.mark.parametrize("name", DEVICES)
def test_with_a_tile_no_text_depends_on_the_number_of_images(name):
    """But for the gradient of a filter, whose channels they are, and its sums, which are split by how many there are.

    And but for filters that blocks of hopper_dense turn themselves where they have few stages.
    """
    device = DEVICES[name]
    for layer, _ in layers(40, 6):
        one = as_called(layer(4, 24), device)
        config = engines.choose(one, device)
        if one.precision == "tf32" and "DenseNhwc" in str(config):
            continue
        for n in (5, 12, 40):
            other = replace(layer(n, 24), layout=one.layout)
            if one.direction == "wgrad" or engines.refusal(other, config, device):
                continue
            found = [{(launch.kernel, launch.source()) for launch in launches_of(problem, config, device)} for problem in (one, other)]
            assert found[0] == found[1], f"{other} {config}"


def launches_of(problem: ConvProblem, config, device):
    """What `config` launches, but for the direct engine's kernels."""
    steps = engines.schedule(problem, config, device).whole
    return [launch for step in steps for launch in step if not launch.kernel.startswith("direct")]
