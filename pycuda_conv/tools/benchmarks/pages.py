"""The pages with figures: which commands measure them, and whose figures are of other kernels than the checkout's."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from pycuda_conv.runtime.base import KERNEL_DIR
from pycuda_conv.tools.report import FRONT_PAGE, RESULTS_PAGE, kernels_words

PAGES = RESULTS_PAGE, FRONT_PAGE
#: The commands of ``make results`` by a short name; each writes its parts of the pages.
COMMANDS = {
    "drawn": ("bench", "--suite", "drawn"),
    "kernelbench": ("bench", "--suite", "kernelbench", "--plots", "docs/plots"),
    "numbers": ("bench", "--suite", "numbers"),
    "published": ("bench", "--kind", "core", "--mode", "fp32", "tf32", "fp16-nhwc", "--quick", "--plots", "docs/plots"),
    "training": ("bench", "--training"),
    "models": (
        "bench", "--models", "--training", "--mode", "fp16-nhwc", "bf16-nhwc", "--only",
        "(resnet50|efficient|mobile|convnext|segformer|vae).*s, fp16.*evaluated|(resnet50|efficient).*bf16.*trained",
    ),
    "host": ("bench", "--host", "--quick"),
    "energy": ("bench", "--energy"),
    "images": ("bench", "--images"),
    "loop": ("bench", "--loop"),
    "verify": ("verify",),
}
#: Seconds that ``make results`` gives the longest of them, so that all take about twenty minutes on one GPU; the others end by themselves.
SECONDS = {"drawn": 200, "kernelbench": 150, "published": 90, "training": 120, "models": 280, "energy": 170}
_PART = re.compile(r"<!-- (\w+):begin -->\n(.*?)<!-- \1:end -->", re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def digest() -> str:
    """Eight digits that tell one state of the kernels' texts from another. Comments and empty lines don't count."""
    found = hashlib.sha256()
    for path in sorted(KERNEL_DIR.rglob("*.cu*")):
        code = (line.rstrip() for line in _COMMENT.sub("", path.read_text(encoding="utf-8")).splitlines())
        found.update("\n".join([path.relative_to(KERNEL_DIR).as_posix(), *filter(None, code)]).encode())
    return found.hexdigest()[:8]


def outdated(folder: Path) -> Iterator[str]:
    """The parts of the pages in a checkout whose figures are not of its kernels, and why. A part without text has none."""
    for page in PAGES:
        for name, text in parts_of((folder / page).read_text(encoding="utf-8")).items():
            found = set(re.findall(kernels_words("([0-9a-f]{8})"), text))
            if text.strip() and found != {digest()}:
                yield f"{page}, {name}: {'of kernels ' + ', '.join(sorted(found)) if found else 'does not say of which kernels'}"


def parts_of(text: str) -> dict[str, str]:
    """The parts of a page by their names."""
    return dict(_PART.findall(text))


def measure(folder: Path) -> int:
    """Run all commands, and give the number of those that failed."""
    failed = 0
    for name, command in COMMANDS.items():
        began = time.monotonic()
        command += ("--seconds", str(SECONDS[name])) if name in SECONDS else ()
        status = subprocess.run([sys.executable, "-m", "pycuda_conv", *command, "--pages", "."], cwd=folder, check=False).returncode
        said = f"failed ({status})" if status else "ok"
        print(f"pycuda-conv {' '.join(command)}: {said}, {time.monotonic() - began:.0f} s", flush=True)
        failed += status != 0
    return failed


def main(arguments: Sequence[str]) -> int:
    """``measure`` measures everything; without an argument the pages are checked."""
    folder = Path.cwd()
    if list(arguments) == ["measure"]:
        return int(measure(folder) > 0)
    stale = list(outdated(folder))
    print("\n".join([*stale, f"the kernels are {digest()}: {len(stale)} parts of pages have figures of others"]))
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
