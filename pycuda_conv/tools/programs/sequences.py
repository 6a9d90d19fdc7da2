"""Decoders of video and sound: causal 3-d convolutions over frames, and transposed and dilated 1-d ones over samples."""

from __future__ import annotations

from typing import Any


def _parts(torch: Any) -> Any:
    nn, F = torch.nn, torch.nn.functional

    class CausalConv3d(nn.Module):  # type: ignore[name-defined]
        """It sees a frame and those before it: zeros at the start, or the frames of a cache, which it changes for the next chunk."""

        def __init__(self, channels: int, out: int, taps: tuple[int, int, int] = (3, 3, 3)) -> None:
            super().__init__()
            self.conv = nn.Conv3d(channels, out, taps, padding=(0, taps[1] // 2, taps[2] // 2))
            self.before = taps[0] - 1

        def forward(self, x: Any, caches: list[Any] | None = None) -> Any:
            held = caches.pop(0) if caches is not None and self.before else None
            x = F.pad(x, (0, 0, 0, 0, self.before, 0)) if held is None else torch.cat([held, x], 2)
            if caches is not None and self.before:
                caches.append(x[:, :, -self.before :])
            return self.conv(x)

    class RMSNorm(nn.Module):  # type: ignore[name-defined]
        """The root mean square over a pixel's channels."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

        def forward(self, x: Any) -> Any:
            return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma

    class Residual(nn.Module):  # type: ignore[name-defined]
        def __init__(self, channels: int, out: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = RMSNorm(channels), CausalConv3d(channels, out)
            self.norm2, self.conv2 = RMSNorm(out), CausalConv3d(out, out)
            self.shortcut = nn.Conv3d(channels, out, 1) if channels != out else None

        def forward(self, x: Any, caches: list[Any] | None) -> Any:
            y = self.conv1(F.silu(self.norm1(x)), caches)
            y = self.conv2(F.silu(self.norm2(y)), caches)
            return y + (x if self.shortcut is None else self.shortcut(x))

    class Upsample(nn.Module):  # type: ignore[name-defined]
        """Twice the rows and columns of each frame; before that, if so made, twice the frames by twice the channels."""

        def __init__(self, channels: int, frames: bool) -> None:
            super().__init__()
            self.time = CausalConv3d(channels, 2 * channels, (3, 1, 1)) if frames else None
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: Any, caches: list[Any] | None) -> Any:
            if self.time is not None:
                n, c, t, h, w = x.shape
                x = self.time(x, caches).reshape(n, 2, c, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(n, c, 2 * t, h, w)
            n, c, t, h, w = x.shape
            y = x.transpose(1, 2).reshape(n * t, c, h, w)
            y = self.conv(F.interpolate(y, scale_factor=2.0, mode="nearest"))
            return y.reshape(n, t, c, 2 * h, 2 * w).transpose(1, 2)

    class Decoder(nn.Module):  # type: ignore[name-defined]
        def __init__(self, widths: tuple[int, ...], latents: int, chunk: int | None) -> None:
            super().__init__()
            self.first, before, layers = CausalConv3d(latents, widths[0]), widths[0], []
            for level, width in enumerate(widths):
                layers += [Residual(before, width), Residual(width, width)]
                layers += [Upsample(width, level < 2)] if level < len(widths) - 1 else []
                before = width
            self.layers, self.norm, self.last = nn.ModuleList(layers), RMSNorm(before), CausalConv3d(before, 3)
            self.chunk = chunk
            self.count = sum(isinstance(module, CausalConv3d) for module in self.modules())

        def decoded(self, x: Any, caches: list[Any] | None) -> Any:
            x = self.first(x, caches)
            for layer in self.layers:
                x = layer(x, caches)
            return self.last(F.silu(self.norm(x)), caches)

        def forward(self, x: Any) -> Any:
            if self.chunk is None:
                return self.decoded(x, None)
            sizes = [1, *[self.chunk] * ((x.shape[2] - 1) // self.chunk)]
            sizes += [x.shape[2] - sum(sizes)] * (sum(sizes) < x.shape[2])
            caches: list[Any] = [None] * self.count
            return torch.cat([self.decoded(part, caches) for part in x.split(sizes, 2)], 2)

    class Branch(nn.Module):  # type: ignore[name-defined]
        """Pairs of convolutions, the first of each dilated, each pair added to what it reads."""

        def __init__(self, channels: int, taps: int, dilations: tuple[int, ...]) -> None:
            super().__init__()
            half = (taps - 1) // 2
            self.first = nn.ModuleList([nn.Conv1d(channels, channels, taps, dilation=d, padding=d * half) for d in dilations])
            self.second = nn.ModuleList([nn.Conv1d(channels, channels, taps, padding=half) for _ in dilations])

        def forward(self, x: Any) -> Any:
            for first, second in zip(self.first, self.second, strict=True):
                x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
            return x

    class Vocoder(nn.Module):  # type: ignore[name-defined]
        def __init__(self, channels: int, rates: tuple[int, ...], taps: tuple[int, ...], dilations: tuple[int, ...]) -> None:
            super().__init__()
            self.first, self.ups, self.branches = nn.Conv1d(80, channels, 7, padding=3), nn.ModuleList(), nn.ModuleList()
            for rate in rates:
                self.ups.append(nn.ConvTranspose1d(channels, channels // 2, 2 * rate, rate, rate // 2))
                channels //= 2
                self.branches.append(nn.ModuleList([Branch(channels, n, dilations) for n in taps]))
            self.last = nn.Conv1d(channels, 1, 7, padding=3)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for up, branches in zip(self.ups, self.branches, strict=True):
                x = up(F.leaky_relu(x, 0.1))
                x = sum(branch(x) for branch in branches) / len(branches)
            return torch.tanh(self.last(F.leaky_relu(x)))

    return Decoder, Vocoder


def causal_decoder(torch: Any, widths: tuple[int, ...] = (384, 384, 192, 96), latents: int = 16, chunk: int | None = None) -> Any:
    """A decoder of videos as Wan's, without attention: (N, 16, T, H, W) to (N, 3, 4 T, 8 H, 8 W), whole or in chunks of frames.

    In chunks, the first of one frame, each causal convolution has a cache of the frames before.
    """
    return _parts(torch)[0](widths, latents, chunk)


def chunked_decoder(torch: Any) -> Any:
    """The same in chunks of four frames."""
    return causal_decoder(torch, chunk=4)


def vocoder(
    torch: Any, channels: int = 512, rates: tuple[int, ...] = (8, 8, 2, 2), taps: tuple[int, ...] = (3, 7, 11),
    dilations: tuple[int, ...] = (1, 3, 5),
) -> Any:
    """A vocoder as HiFi-GAN's: (N, 80, T) to (N, 1, 256 T)."""
    return _parts(torch)[1](channels, rates, taps, dilations)
