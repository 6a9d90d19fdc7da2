"""The blocks that decoders and U-Nets of image models share."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def blocks(torch: Any) -> Any:
    """The classes ``Residual`` and ``Upsample``."""
    nn, F = torch.nn, torch.nn.functional

    class Residual(nn.Module):  # type: ignore[name-defined]
        """Norm, SiLU, 3x3, norm, SiLU, 3x3, and the input added, by a 1x1 where channels change.

        With `embedding` the first convolution's result gets a number for each image and channel, a linear layer of an embedding.
        """

        def __init__(self, channels: int, out: int, groups: int = 32, eps: float = 1e-6, embedding: int = 0) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(groups, channels, eps=eps), nn.Conv2d(channels, out, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(groups, out, eps=eps), nn.Conv2d(out, out, 3, padding=1)
            self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else None
            self.embedded = nn.Linear(embedding, out) if embedding else None

        def forward(self, x: Any, embedding: Any = None) -> Any:
            y = self.conv1(F.silu(self.norm1(x)))
            if self.embedded is not None:
                y = y + self.embedded(F.silu(embedding))[:, :, None, None]
            y = self.conv2(F.silu(self.norm2(y)))
            return y + (x if self.shortcut is None else self.shortcut(x))

    class Upsample(nn.Module):  # type: ignore[name-defined]
        """Nearest neighbours, twice as many each way, and a 3x3."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))

    return SimpleNamespace(Residual=Residual, Upsample=Upsample)
