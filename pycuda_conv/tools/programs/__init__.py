"""Networks that are written here, in plain torch with random weights: decoders and U-Nets as image models have
them, and decoders of video and sound.

``bench --models`` takes them by name. ``decoder:SEED`` and ``unet:SEED`` have widths, groups and sizes drawn by a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pycuda_conv.tools.programs import decoders, sequences, unets


class Program(NamedTuple):
    """How a network is made, by ``make(torch)``; the shape of one input, and how many inputs make a batch."""

    make: Callable[[Any], Any]
    shape: tuple[int, ...]
    images: int


PROGRAMS = {
    "vae_decoder": Program(decoders.vae_decoder, (4, 64, 64), 2),
    "small_unet": Program(unets.small_unet, (4, 64, 64), 4),
    "time_unet": Program(unets.time_unet, (4, 64, 64), 4),
    "causal_decoder": Program(sequences.causal_decoder, (16, 17, 32, 32), 1),
    "chunked_decoder": Program(sequences.chunked_decoder, (16, 17, 32, 32), 1),
    "vocoder": Program(sequences.vocoder, (80, 256), 4),
}

_DRAWN: dict[str, Callable[[int], tuple[Callable[[Any], Any], tuple[int, ...], int]]] = {
    "decoder": decoders.drawn, "unet": unets.drawn,
}  # fmt: skip


def program(name: str) -> Program | None:
    """The network of this name, or None if none is written here."""
    kind, colon, seed = name.partition(":")
    if colon and kind in _DRAWN and seed.isdecimal():
        return Program(*_DRAWN[kind](int(seed)))
    return PROGRAMS.get(name)
