"""Draw the picture of the first steps, and what the command makes of it.

    python scripts/picture.py docs/pictures

writes house.png, a small landscape out of focus, and sharpen.png, which shows it beside the sharpened one. filters.png shows it with holes,
the holes filled, a blur, and where it is steep.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from pycuda_conv import ndimage

ROOT = Path(__file__).resolve().parent.parent
SIZE, SCALE = (180, 130), 4  # drawn larger and scaled down, so that edges are smooth


def draw() -> Image.Image:
    """A landscape with a house and a word, as through a lens a little out of focus."""
    picture = Image.new("RGB", (SIZE[0] * SCALE, SIZE[1] * SCALE))
    pen = ImageDraw.Draw(picture)

    def at(*points: float) -> list[float]:
        return [p * SCALE for p in points]

    for y in range(picture.height):
        pen.line((0, y, picture.width, y), fill=(110 + y // 6, 160 + y // 8, 215))
    pen.ellipse(at(138, 10, 164, 36), fill=(250, 214, 100))
    for peak, left, right, colour in ((45, -30, 95, (112, 122, 142)), (80, 15, 150, (134, 144, 164)), (150, 85, 220, (104, 114, 134))):
        top = 38 if peak == 80 else 52
        pen.polygon(at(left, 105, peak, top, right, 105), fill=colour)
        snow = ((-9, 9), (0, 0), (9, 9), (4, 7), (0, 12), (-4, 7))
        pen.polygon(at(*[v for x, y in snow for v in (peak + x, top + y)]), fill=(240, 244, 248))
    pen.rectangle(at(0, 96, 180, 130), fill=(96, 140, 84))
    for x in range(2, 180, 6):
        pen.line(at(x, 130, x + 3, 121), fill=(70, 112, 62), width=SCALE)
    pen.rectangle(at(24, 82, 66, 112), fill=(214, 196, 170))
    pen.polygon(at(19, 84, 45, 62, 71, 84), fill=(160, 70, 56))
    for x in (29, 51):
        pen.rectangle(at(x, 89, x + 10, 98), fill=(70, 84, 106))
        pen.line(at(x + 5, 89, x + 5, 98), fill=(236, 230, 220), width=SCALE // 2)
    pen.rectangle(at(41, 97, 49, 112), fill=(104, 74, 56))
    pen.text(at(84, 101), "pycuda_conv", font=ImageFont.load_default(14 * SCALE), fill=(246, 246, 236))
    return picture.resize(SIZE, Image.Resampling.LANCZOS).filter(ImageFilter.GaussianBlur(0.8))


def main(folder: Path) -> None:
    """Sharpen the picture with the command, and put both beside each other, every pixel shown as four."""
    before = folder / "house.png"
    draw().save(before, optimize=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        after = Path(elsewhere, "after.png")
        command = [sys.executable, "-m", "pycuda_conv", "run", "--filter", "sharpen", str(before.resolve()), str(after)]
        subprocess.run(command, cwd=ROOT, check=True)
        gap = 10
        both = Image.new("RGB", (4 * SIZE[0] + gap, 2 * SIZE[1]), "white")
        for i, path in enumerate((before, after)):
            with Image.open(path) as half:
                both.paste(half.resize((2 * SIZE[0], 2 * SIZE[1]), Image.Resampling.NEAREST), (i * (2 * SIZE[0] + gap), 0))
        both.save(folder / "sharpen.png", optimize=True)
    row_of_filters(np.asarray(Image.open(before))).save(folder / "filters.png", optimize=True)


def row_of_filters(house: np.ndarray) -> Image.Image:
    """The house with holes, with the holes filled from around them, blurred, and how steep it is."""
    holes = np.kron(np.random.default_rng(0).random((SIZE[1] // 5, SIZE[0] // 5)) < 0.3, np.ones((5, 5))) > 0
    axes = {"axes": (0, 1)}
    filled = np.where(holes[..., None], ndimage.gaussian_filter(house, 2.0, mask=np.repeat(holes[..., None], 3, -1), **axes), house)
    steep = ndimage.gaussian_gradient_magnitude(house.mean(-1, dtype=np.float32), 1.0, mode="nearest")
    parts = [np.where(holes[..., None], np.uint8(255), house), filled, ndimage.gaussian_filter(house, (3.0, 3.0), **axes)]
    parts.append(np.repeat(np.uint8(255 - np.clip(6 * steep, 0, 255))[..., None], 3, -1))
    gap = 6
    row = Image.new("RGB", (len(parts) * (SIZE[0] + gap) - gap, SIZE[1]), "white")
    for i, part in enumerate(parts):
        row.paste(Image.fromarray(part), (i * (SIZE[0] + gap), 0))
    return row


if __name__ == "__main__":
    main(Path(sys.argv[1]))
