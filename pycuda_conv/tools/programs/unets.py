"""U-Nets of image models: residual blocks with group norm and SiLU, skips that are concatenated, and embeddings of a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from pycuda_conv.tools.programs.blocks import blocks

MOST_IMAGES = 64  # whose times a U-Net knows


def small_unet(torch: Any, widths: tuple[int, ...] = (128, 256, 512), groups: int = 8, latents: int = 4) -> Any:
    """A U-Net of group norms, SiLU and 3x3 convolutions, 20 of them: (N, 4, 64, 64) to the same."""
    nn, own = torch.nn, blocks(torch)

    def block(channels: int, out: int) -> Any:
        return own.Residual(channels, out, groups, 1e-5)

    class SmallUNet(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            pairs = list(pairwise(widths))
            self.first = nn.Conv2d(latents, widths[0], 3, padding=1)
            self.down = nn.ModuleList([block(widths[0], widths[0]), *(block(a, b) for a, b in pairs)])
            self.shrink = nn.ModuleList([nn.Conv2d(a, a, 3, 2, 1) for a, _ in pairs])
            self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 4, 2, 1) for a, b in reversed(pairs)])
            self.back = nn.ModuleList([block(2 * a, a) for a, _ in reversed(pairs)])
            self.last = nn.Conv2d(widths[0], latents, 3, padding=1)

        def forward(self, x: Any) -> Any:
            y = self.down[0](self.first(x))
            skips = []
            for shrink, down in zip(self.shrink, self.down[1:], strict=True):
                skips.append(y)
                y = down(shrink(y))
            for up, back, skip in zip(self.up, self.back, reversed(skips), strict=True):
                y = back(torch.cat([up(y), skip], 1))
            return self.last(y)

    return SmallUNet()


def time_unet(torch: Any, widths: tuple[int, ...] = (128, 256, 512), groups: int = 32, latents: int = 4, depth: int = 2) -> Any:
    """A U-Net of diffusion models, without attention: (N, 4, 64, 64) to the same.

    Each residual block adds a linear layer of an embedding of the image's time. Times are drawn once, and belong to the network.
    """
    nn, F, own = torch.nn, torch.nn.functional, blocks(torch)
    base, inner = widths[0], 4 * widths[0]

    class TimeUNet(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("times", torch.rand(MOST_IMAGES) * 1000)
            self.time = nn.Sequential(nn.Linear(base, inner), nn.SiLU(), nn.Linear(inner, inner))
            self.first = nn.Conv2d(latents, base, 3, padding=1)
            self.down, self.shrink, self.back, self.up = (nn.ModuleList() for _ in range(4))
            before, kept = base, [base]
            for level, width in enumerate(widths):
                for _ in range(depth):
                    self.down.append(own.Residual(before, width, groups, 1e-5, inner))
                    kept.append(width)
                    before = width
                if level < len(widths) - 1:
                    self.shrink.append(nn.Conv2d(width, width, 3, 2, 1))
                    kept.append(width)
            self.middle = nn.ModuleList([own.Residual(before, before, groups, 1e-5, inner) for _ in range(2)])
            for level, width in reversed(list(enumerate(widths))):
                for _ in range(depth + 1):
                    self.back.append(own.Residual(before + kept.pop(), width, groups, 1e-5, inner))
                    before = width
                if level:
                    self.up.append(own.Upsample(width))
            self.norm, self.last = nn.GroupNorm(groups, base, eps=1e-5), nn.Conv2d(base, latents, 3, padding=1)

        def forward(self, x: Any) -> Any:
            half = torch.arange(base // 2, device=x.device, dtype=torch.float32)
            angles = self.times[: x.shape[0], None].float() * torch.exp(half * (-9.21034 / (base // 2)))
            embedding = self.time(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
            y = self.first(x)
            skips = [y]
            for level in range(len(widths)):
                for block in self.down[level * depth : (level + 1) * depth]:
                    y = block(y, embedding)
                    skips.append(y)
                if level < len(widths) - 1:
                    y = self.shrink[level](y)
                    skips.append(y)
            for block in self.middle:
                y = block(y, embedding)
            for level in range(len(widths)):
                for block in self.back[level * (depth + 1) : (level + 1) * (depth + 1)]:
                    y = block(torch.cat([y, skips.pop()], 1), embedding)
                if level < len(widths) - 1:
                    y = self.up[level](y)
            return self.last(F.silu(self.norm(y)))

    return TimeUNet()


def drawn(seed: int) -> tuple[Callable[[Any], Any], tuple[int, ...], int]:
    """A U-Net with widths, groups and sizes drawn by a seed: how it is made, the shape of one input, and how many make a batch."""
    draw = random.Random(f"unet {seed}")
    groups = draw.choice((8, 16, 32))
    first = groups * draw.randint(max(1, 64 // groups), 192 // groups)
    widths = tuple(first * n for n in draw.choice(((1, 2), (1, 2, 2), (1, 2, 4), (1, 1, 2))))
    make: Callable[..., Any] = draw.choice((small_unet, time_unet))
    latents, height, width = draw.choice((4, 8, 16)), 8 * draw.randint(4, 12), 8 * draw.randint(4, 12)
    return partial(make, widths=widths, groups=groups, latents=latents), (latents, height, width), draw.choice((1, 2, 4))
