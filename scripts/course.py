"""Draw the pictures of the course: python scripts/course.py docs/course"""

from __future__ import annotations

import sys
from pathlib import Path

BLUE, ORANGE, PALE, WARM, INK, LINE = "#0b6bb0", "#d9822b", "#dcebf6", "#fbe8d2", "#222222", "#9aa0a6"
WIDTH = 660


class Picture:
    """An SVG, put together from a few shapes."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str = "white", line: str = LINE, width: float = 1) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{line}" stroke-width="{width:g}"/>')

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "start", fill: str = INK, bold: bool = False) -> None:
        safe = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{safe}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, line: str = INK) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{line}" stroke-width="1.3" marker-end="url(#head)"/>'
        )

    def grid(self, x: float, y: float, columns: int, rows: int, cell: float, fill: dict[tuple[int, int], str] | str = "white") -> None:
        """Squares; `fill` is one colour, or colours by (column, row)."""
        for row in range(rows):
            for column in range(columns):
                colour = fill if isinstance(fill, str) else fill.get((column, row), "white")
                self.box(x + column * cell, y + row * cell, cell, cell, colour)

    def __str__(self) -> str:
        marker = 'id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto"'
        font = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
        return "\n".join((
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" {font}>',
            f'<defs><marker {marker}><path d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{self.height}" fill="white"/>', *self.parts, "</svg>\n",
        ))


def window(column: int, row: int, size: int, colour: str) -> dict[tuple[int, int], str]:
    """The cells of a square window."""
    return {(c, r): colour for c in range(column, column + size) for r in range(row, row + size)}


def loop() -> Picture:
    """Three loops of Python around a launch, and one launch."""
    p = Picture(190)
    p.text(20, 22, "a loop in Python: 2 images x 8 filters x 4 channels = 64 launches", bold=True)
    for image in range(2):
        for k in range(8):
            for c in range(4):
                p.box(20 + image * 166 + k * 20, 34 + c * 20, 16, 14, PALE, BLUE)
    p.text(20, 132, "image 0", 11)
    p.text(186, 132, "image 1", 11)
    p.text(350, 80, "each box: Python, a launch,")
    p.text(350, 98, "a few pixels of work, an addition")
    p.box(20, 148, 54, 22, ORANGE, ORANGE)
    p.text(84, 164, "one launch: the grid covers images, channels and pixels", bold=True)
    return p


def single() -> Picture:
    """One thread, one pixel: a window of the input, the filter, one sum."""
    p = Picture(220)
    cell = 18
    p.text(20, 22, "input x, in global memory", bold=True)
    p.grid(20, 34, 9, 9, cell, window(2, 3, 3, PALE) | window(3, 3, 3, "#bcd9ee"))
    p.box(20 + 2 * cell, 34 + 3 * cell, 3 * cell, 3 * cell, "none", BLUE, 2)
    p.box(20 + 3 * cell, 34 + 3 * cell, 3 * cell, 3 * cell, "none", ORANGE, 2)
    p.text(262, 22, "filter w, in shared memory", bold=True)
    p.grid(300, 70, 3, 3, cell, WARM)
    p.text(278, 150, "all threads read it", 11)
    p.text(462, 22, "result y", bold=True)
    p.grid(462, 52, 7, 7, cell, {(2, 3): BLUE, (3, 3): ORANGE})
    p.arrow(190, 96, 294, 96)
    p.arrow(362, 96, 456, 106)
    p.text(20, 212, "Neighbouring threads (blue, orange) read nearly the same pixels: each pixel is read up to nine times.", 11)
    return p


def tile() -> Picture:
    """The tile of a block and its halo."""
    p = Picture(230)
    cell = 16
    p.text(20, 22, "global memory", bold=True)
    p.grid(20, 34, 11, 11, cell, window(1, 1, 8, WARM) | window(2, 2, 6, PALE))
    p.box(20 + cell, 34 + cell, 8 * cell, 8 * cell, "none", ORANGE, 2)
    p.arrow(204, 118, 262, 118)
    p.text(270, 22, "shared memory: tile and halo", bold=True)
    p.grid(276, 50, 8, 8, cell, window(0, 0, 8, WARM) | window(1, 1, 6, PALE))
    p.box(276 + 2 * cell, 50 + 2 * cell, 3 * cell, 4 * cell, "none", BLUE, 2)
    p.text(276, 200, "each pixel was read once;", 11)
    p.text(276, 214, "blue: what one thread reads now", 11)
    p.arrow(410, 118, 478, 118)
    p.text(486, 22, "6 x 6 pixels of y", bold=True)
    p.grid(486, 66, 6, 6, cell, {(2, 2): BLUE, (2, 3): BLUE})
    p.text(486, 184, "a thread makes several pixels,", 11)
    p.text(486, 198, "one below the other", 11)
    return p


def batched() -> Picture:
    """One value of x is multiplied by eight filters."""
    p = Picture(210)
    p.text(20, 22, "one value of x", bold=True)
    p.box(60, 90, 26, 26, BLUE, BLUE)
    p.text(20, 136, "read once from memory", 11)
    p.text(236, 22, "weights of 8 output channels", bold=True)
    p.text(470, 22, "8 sums, in registers", bold=True)
    for i in range(8):
        y = 34 + i * 20
        p.box(300, y, 60, 16, WARM, ORANGE)
        p.text(330, y + 12, f"w[{i}, c, r, s]", 9, "middle")
        p.box(500, y, 60, 16, PALE, BLUE)
        p.text(530, y + 12, f"sum[{i}]", 9, "middle")
        p.arrow(90, 103, 296, y + 8, LINE)
        p.arrow(364, y + 8, 496, y + 8, LINE)
    return p


def gemm() -> Picture:
    """The convolution as a matrix product, and the part of it that a thread makes."""
    p = Picture(260)
    p.text(20, 22, "A: filters", bold=True)
    p.box(20, 126, 110, 110, WARM, ORANGE)
    p.text(75, 250, "K x (C R S)", 11, "middle")
    p.text(160, 22, "B: windows of x, (C R S) x pixels; found by index, never stored", bold=True)
    p.box(160, 34, 250, 72, PALE, BLUE)
    p.text(420, 72, "a column is what one pixel's", 11)
    p.text(420, 86, "window holds", 11)
    p.box(160, 126, 250, 110, "white", INK)
    p.text(285, 250, "y: K x pixels", 11, "middle")
    p.box(240, 126 + 20, 64, 44, "#bcd9ee", BLUE, 2)
    p.box(20, 126 + 20, 110, 44, "none", INK, 2)
    p.box(240, 34, 64, 72, "none", INK, 2)
    p.text(240, 206, "a block's tile", 11)
    p.arrow(308, 168, 470, 168)
    p.grid(480, 126, 8, 8, 12, "#bcd9ee")
    p.text(480, 240, "a thread: 8 x 8 sums;", 11)
    p.text(480, 254, "16 reads, 64 multiplications", 11)
    return p


def limbs() -> Picture:
    """A float as two halves, and the three products."""
    p = Picture(190)
    p.text(20, 22, "float32: 24 bits of mantissa", bold=True)
    p.grid(20, 34, 24, 1, 15, PALE)
    p.arrow(110, 54, 100, 80)
    p.arrow(284, 54, 330, 80)
    p.text(20, 100, "hi, fp16: 11 bits", bold=True)
    p.grid(20, 110, 11, 1, 15, "#bcd9ee")
    p.text(262, 100, "lo, fp16: 11 bits more, times 2^11", bold=True)
    p.grid(262, 110, 11, 1, 15, WARM)
    p.text(20, 156, "x w  =  hi hi  +  2^-11 (hi lo + lo hi)", 14)
    p.text(20, 178, "lo lo is left out: it is 2^-22 of the product", 11)
    p.text(470, 30, "22 of the 24 bits and", 11)
    p.text(470, 44, "three products on the", 11)
    p.text(470, 58, "tensor cores give the", 11)
    p.text(470, 72, "accuracy of fp32", 11)
    return p


def wgmma() -> Picture:
    """Rows of 128 bytes, swizzled, and the registers that sums lie in."""
    p = Picture(250)
    p.text(20, 22, "a in shared memory: 16 bytes number i of row r lie at place i ^ r", bold=True)
    for r in range(8):
        p.text(30, 48 + r * 20, f"r {r}", 10)
        for place in range(8):
            piece = place ^ r
            p.box(54 + place * 32, 34 + r * 20, 32, 20, "#bcd9ee" if piece == 0 else WARM if piece == 1 else "white")
            p.text(70 + place * 32, 48 + r * 20, str(piece), 10, "middle")
    p.text(54, 214, "blue and orange: the 16 of k that one wgmma reads;", 11)
    p.text(54, 230, "eight rows lie in eight different banks", 11)
    p.text(430, 22, "sums of a warp: 16 rows x 8", bold=True)
    for r in range(16):
        for c in range(8):
            p.box(430 + c * 20, 34 + r * 10, 20, 10, "#bcd9ee" if r % 8 == 2 and c // 2 == 1 else "white")
    p.text(430, 214, "blue: those of one thread, lane 9", 11)
    return p


def ring() -> Picture:
    """TMA, the ring of stages, two warpgroups."""
    p = Picture(210)
    p.text(20, 22, "global memory", bold=True)
    p.box(20, 34, 92, 56, PALE, BLUE)
    p.text(66, 66, "a", 11, "middle")
    p.box(20, 110, 92, 56, WARM, ORANGE)
    p.text(66, 142, "b", 11, "middle")
    p.text(150, 92, "TMA", 12, bold=True)
    p.text(136, 108, "one thread asks", 10)
    p.arrow(116, 66, 236, 92)
    p.arrow(116, 138, 236, 110)
    p.text(244, 22, "shared memory: a ring of stages", bold=True)
    for i, words in enumerate(("multiplied", "waiting", "arriving")):
        p.box(244, 40 + i * 44, 150, 36, (("#bcd9ee"), "#dcebf6", "white")[i], BLUE)
        p.text(319, 62 + i * 44, f"stage {i}: {words}", 11, "middle")
    p.arrow(398, 58, 466, 66)
    p.arrow(398, 58, 466, 136)
    p.text(472, 22, "tensor cores", bold=True)
    for i in range(2):
        p.box(472, 40 + i * 70, 160, 54, "white", INK)
        p.text(552, 62 + i * 70, f"warpgroup {i + 1}: wgmma", 11, "middle")
        p.text(552, 80 + i * 70, "sums in registers", 11, "middle")
    p.text(20, 196, "Copying and multiplying go on at the same time. Nobody computes an address in the loop.", 11)
    return p


def persistence() -> Picture:
    """What a multiprocessor does in time: a block a tile, and a block that stays."""
    p = Picture(230)

    def line(y: float, words: str, parts: list[tuple[float, float, str, str]]) -> None:
        p.text(20, y + 15, words, 11)
        for x, wide, colour, said in parts:
            p.box(110 + x, y, wide, 22, colour, INK if colour != "white" else LINE)
            p.text(110 + x + wide / 2, y + 15, said, 10, "middle")

    p.text(20, 22, "a block for each tile", bold=True)
    line(34, "loads", [(0, 110, PALE, "tile 1"), (210, 110, PALE, "tile 2")])
    line(60, "products", [(30, 100, "#bcd9ee", "tile 1"), (240, 100, "#bcd9ee", "tile 2")])
    line(86, "stores", [(130, 70, WARM, "tile 1"), (340, 70, WARM, "tile 2")])
    p.text(20, 134, "a block that stays: its producer is a ring ahead", bold=True)
    line(146, "loads", [(0, 110, PALE, "tile 1"), (110, 110, PALE, "tile 2"), (220, 110, PALE, "tile 3")])
    line(172, "products", [(30, 100, "#bcd9ee", "tile 1"), (200, 100, "#bcd9ee", "tile 2"), (370, 100, "#bcd9ee", "tile 3")])
    line(198, "stores", [(130, 70, WARM, "tile 1"), (300, 70, WARM, "tile 2"), (470, 70, WARM, "tile 3")])
    return p


def im2col() -> Picture:
    """The pixels that TMA's im2col loads fetch, tap by tap."""
    p = Picture(250)
    cell = 11
    p.text(20, 22, "12 neighbouring pixels of y, 7 to a row: what the load of each tap fetches of x", bold=True)
    own = [(i % 7, i // 7) for i in range(5, 17)]
    for tap in range(9):
        r, s = divmod(tap, 3)
        x, y = 20 + tap % 5 * 128, 40 + tap // 5 * 104
        for row in range(-1, 6):
            for column in range(-1, 8):
                inside = 0 <= row < 5 and 0 <= column < 7
                moved = (column - s + 1, row - r + 1) in own
                colour = ("#bcd9ee" if inside else WARM) if moved else "white" if inside else "#f2f2f2"
                p.box(x + (column + 1) * cell, y + (row + 1) * cell, cell, cell, colour)
        p.text(x, y + 7 * cell + 14, f"tap {r}, {s}", 10)
    p.text(532, 168, "blue: pixels of x", 11)
    p.text(532, 184, "orange: zeros that", 11)
    p.text(532, 200, "TMA fills in", 11)
    return p


def promotion() -> Picture:
    """Where the sums of three products are kept."""
    p = Picture(210)
    p.text(20, 22, "a stage: 64 of k", bold=True)
    for i, (words, colour) in enumerate((("a hi", PALE), ("a lo", WARM), ("b hi", PALE), ("b lo", WARM))):
        p.box(20, 34 + i * 36, 80, 28, colour, BLUE)
        p.text(60, 52 + i * 36, words, 11, "middle")
    p.text(180, 22, "tensor cores", bold=True)
    p.box(180, 40, 170, 40, "#bcd9ee", BLUE, 2)
    p.text(265, 64, "main = hi hi, begun anew", 11, "middle")
    p.box(180, 120, 170, 40, WARM, ORANGE, 2)
    p.text(265, 144, "cross += hi lo + lo hi", 11, "middle")
    p.arrow(104, 60, 176, 60)
    p.arrow(104, 110, 176, 140)
    p.text(430, 22, "float32 registers", bold=True)
    p.box(430, 40, 170, 40, "white", INK)
    p.text(515, 64, "total += main", 11, "middle")
    p.arrow(354, 60, 426, 60)
    p.text(358, 48, "each stage", 10)
    p.box(430, 120, 170, 40, "white", INK)
    p.text(515, 144, "y = total + cross / 2^11", 11, "middle")
    p.arrow(354, 140, 426, 140)
    p.text(358, 128, "at the end", 10)
    p.arrow(515, 84, 515, 116)
    p.text(20, 196, "The tensor core cuts its sums off. Of 64 products that is little; of thousands it would be the largest error.", 11)
    return p


def registers() -> Picture:
    """Neighbouring pixels of a channel are rows of an operand that registers hold."""
    p = Picture(200)
    p.text(20, 22, "x as it lies in memory: a row for each channel; a thread loads four neighbours of every fourth one", bold=True)
    p.grid(20, 34, 14, 4, 26, {(c, 1): "#bcd9ee" for c in range(4, 8)})
    p.text(400, 52, "registers of the thread", bold=True)
    p.grid(400, 62, 4, 1, 26, "#dcebf6")
    p.arrow(388, 75, 398, 75)
    p.text(400, 112, "a column of four rows of", 11)
    p.text(400, 126, "operand A of wgmma", 11)
    p.text(20, 170, "wgmma transposes no 32-bit operand in shared memory; in registers a pixel's row is another register.", 11)
    p.text(20, 190, "Nothing is packed, and nothing is written to shared memory again.", 11)
    return p


def phases() -> Picture:
    """A transposed convolution of stride 2 as phases of stride 1."""
    p = Picture(180)
    p.text(20, 22, "pixels of dx: columns of two kinds", bold=True)
    p.grid(20, 34, 12, 1, 22, {(c, 0): (PALE if c % 2 == 0 else WARM) for c in range(12)})
    p.text(330, 22, "a filter of 3 taps, stride 2", bold=True)
    p.grid(330, 34, 3, 1, 22, {(0, 0): WARM, (1, 0): PALE, (2, 0): WARM})
    p.text(20, 92, "even columns meet tap 1", 12, fill=BLUE)
    p.text(20, 118, "odd columns meet taps 0 and 2", 12, fill=ORANGE)
    p.text(260, 92, "= a convolution of dy, stride 1, one tap")
    p.text(260, 118, "= a convolution of dy, stride 1, two taps")
    p.text(20, 152, "A block computes the even and the odd tile one after the other, so a thread has four neighbours to write", 11)
    p.text(20, 167, "at once. Every sum is a gather in a fixed order: the same bits on every run.", 11)
    return p


PICTURES = {
    "1-loop": loop, "2-single": single, "3-tile": tile, "4-batched": batched, "5-gemm": gemm, "6-limbs": limbs, "7-wgmma": wgmma,
    "8-ring": ring, "9-persistence": persistence, "10-im2col": im2col, "11-limbs": promotion, "13-registers": registers,
    "14-phases": phases,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(sys.argv[1], f"{name}.svg").write_text(str(draw()))
