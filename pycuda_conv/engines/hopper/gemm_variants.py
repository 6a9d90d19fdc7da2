"""The variants of ``cu/hopper/gemm.cu``: the values of every define, and which go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from pycuda_conv.engines.hopper.gemm_tiles import (
    KERNEL,
    PHASES,
    PINGPONG_PIXELS,
    PIPELINES,
    ImplicitGemm,
    consumer_pixels,
    depths_of,
    may_split,
    ordinary_tiles,
    rarity,
    ring_of,
)
from pycuda_conv.engines.packed_product import ARITHMETICS, written_so
from pycuda_conv.engines.tensor_cores import FLOAT
from pycuda_conv.engines.variants import FLAG, VariantSet
from pycuda_conv.runtime.base import Device

MOST_VARIANTS = {"cuda": 387}


def variants(device: Device) -> Iterator[VariantSet]:
    """One for a tile and its loads, the arithmetic, and how the result lies."""
    kinds = product(range(len(PINGPONG_PIXELS)), (False, True), (False, True))
    tiles = dict.fromkeys(tile for kind in kinds for tile in ordinary_tiles(*kind))
    for tile, one in product(tiles, (*ARITHMETICS, _OF_BYTES)):
        own = _ORDINARY | one | {"BLOCK_M": (tile.BLOCK_M,), "BLOCK_N": (tile.BLOCK_N,), "WGMMA_N": (consumer_pixels(tile),)}
        for special in ({}, _STORED, _PAIRED)[: 2 if one is _OF_BYTES else 3]:
            choices = own | special | {"PINGPONG": (int(tile.is_pingpong),)} | ({"TWIN": (1,)} if tile.is_twin else {})
            stored = (4 if one["OUT"] == (FLOAT,) else 2) if choices["TENSOR_STORE"] == (1,) else 0
            ring = ring_of(tile, 1 if one["PRODUCTS"] == (1,) else 2, stored, choices["INTERLEAVE_COLUMNS"] == (1,))
            choices["STAGES"] = (ring.deepest(depths_of(tile)),)
            yield VariantSet(KERNEL, choices, _is_listed, "sm_90a")


#: float32 sums of images of bytes, which are convolved forward alone.
_OF_BYTES = ARITHMETICS[0] | {"PRODUCTS": (2,), "W_MN_MAJOR": (0,)}
#: Defines of tiles whose results are stored pixel by pixel; STAGES is filled in.
_ORDINARY: dict[str, tuple[int, ...]] = {
    "LOAD_CHANNELS": (16, 32, 64), "TENSOR_STORE": (0,), "W_MN_MAJOR": FLAG, "PINGPONG": (0,), "PHASES": (1, PHASES),
    "INTERLEAVE_COLUMNS": (0,), "STAGES": (0,),
}  # fmt: skip
_STORED: dict[str, tuple[int, ...]] = {"TENSOR_STORE": (1,), "NHWC": (1,), "VEC": (4,), "DENSE": (1,), "PHASES": (1,)}
_PAIRED: dict[str, tuple[int, ...]] = {
    "INTERLEAVE_COLUMNS": (1,), "NHWC": (0,), "VEC": (1,), "DENSE": (0,), "PHASES": (1, PHASES), "W_MN_MAJOR": (0,),
}  # fmt: skip


def _is_listed(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever launched."""
    consumer, three = d["WGMMA_N"], d["PRODUCTS"] > 1
    parts = d["OUT"] == FLOAT and d["BF16"]
    if not written_so(d) or (d["NHWC"] and d["DENSE"] and d["VEC"] == 1) or not d["STAGES"] or (d["PHASES"] > 1) == d["DENSE"]:
        return False
    seldom = rarity(d)
    tile = ImplicitGemm(d["BLOCK_M"], d["BLOCK_N"], schedule="twin" if d.get("TWIN") else PIPELINES[d["PINGPONG"]])
    if tile not in ordinary_tiles(seldom, three, bool(d["DENSE"])):
        return False
    if consumer > (256 if not three else 136):
        return False
    stores = d["NHWC"] and d["DENSE"] and consumer % 32 == 0 and d["VEC"] == 4
    if d["TENSOR_STORE"] != stores:
        return False
    if parts and (d["PINGPONG"] or not may_split(d)):
        return False
    if d["INTERLEAVE_COLUMNS"] and d["PINGPONG"]:
        return False
    if d["W_MN_MAJOR"] and (three or not d["NHWC"] or d["LOAD_CHANNELS"] != 64 or d["VEC"] == 1):
        return False
    if d["W_MN_MAJOR"] and d["OUT"] == FLOAT and not d["DENSE"]:
        return False
    if d["VEC"] == 1 and d["DENSE"] and d["LOAD_CHANNELS"] < 64:
        return False
    if d.get("TWIN") and (d["NHWC"] or parts):
        return False
    if d["PINGPONG"]:
        return not three and d["BLOCK_M"] == 128 and not (d["NHWC"] and d["BLOCK_N"] % 32)
    return True
