"""Decoders of image models: residual blocks of group norm, SiLU and 3x3, with nearest upsampling between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from pycuda_conv.tools.programs.blocks import blocks


def vae_decoder(
    torch: Any, widths: tuple[int, ...] = (512, 512, 256, 128), latents: int = 4, groups: int = 32, depth: int = 3, middle: int = 2
) -> Any:
    """A decoder as Stable Diffusion's, without attention: (N, 4, 64, 64) to (N, 3, 512, 512).

    Each of `widths` is a level of `depth` residual blocks; `middle` more stand in front.
    """
    nn, own = torch.nn, blocks(torch)
    before = widths[0]
    layers = [nn.Conv2d(latents, before, 3, padding=1), *(own.Residual(before, before, groups) for _ in range(middle))]
    for level, width in enumerate(widths):
        layers += [own.Residual(before if i == 0 else width, width, groups) for i in range(depth)]
        if level < len(widths) - 1:
            layers.append(own.Upsample(width))
        before = width
    return nn.Sequential(*layers, nn.GroupNorm(groups, before, eps=1e-6), nn.SiLU(), nn.Conv2d(before, 3, 3, padding=1))


def drawn(seed: int) -> tuple[Callable[[Any], Any], tuple[int, ...], int]:
    """A decoder with widths, groups and sizes drawn by a seed: how it is made, the shape of one input, and how many make a batch."""
    draw = random.Random(f"decoder {seed}")
    groups, levels = draw.choice((8, 16, 32)), draw.choice((3, 4))
    widths = sorted((groups * draw.randint(max(1, 64 // groups), 512 // groups) for _ in range(levels)), reverse=True)
    latents, height, width = draw.choice((4, 8, 16)), 8 * draw.randint(4, 8), 8 * draw.randint(4, 8)
    make = partial(vae_decoder, widths=tuple(widths), latents=latents, groups=groups, depth=draw.choice((2, 3)), middle=draw.choice((1, 2)))
    return make, (latents, height, width), draw.choice((1, 2))
