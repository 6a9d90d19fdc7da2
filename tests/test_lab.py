"""docs/lab: every engine that the registry knows stands on a page, and no page is longer than a reader's patience."""

from pathlib import Path

import pytest

import pycuda_conv as pc
from pycuda_conv.engines import registry

LAB = Path(pc.__file__).resolve().parent.parent / "docs" / "lab"
LONGEST = 60
pytestmark = pytest.mark.skipif(not LAB.exists(), reason="no docs/ beside the package")
PAGES = sorted(LAB.glob("*.md")) if LAB.exists() else []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("names.md", "index.md")], ids=lambda page: page.stem)
def test_a_page_is_short(page):
    assert len(page.read_text().splitlines()) <= LONGEST


def test_the_index_lists_every_page():
    index = (LAB / "index.md").read_text()
    for page in PAGES:
        assert page.stem == "index" or f"({page.name})" in index, page.name


#: How pages call the engines whose kernels have other names.
KERNELS = {"blocks": "fft/blocks", "direct": "direct/single.cu"}


def test_every_engine_has_a_page():
    text = "".join(page.read_text() for page in PAGES if page.name != "names.md")
    for engine in registry.ENGINES:
        stem = engine.__name__.rsplit(".", 1)[-1]
        names = (KERNELS.get(stem, f"{stem}.cu"), f"**`{stem}`**")
        assert any(name in text for name in names), f"no page of docs/lab names {engine.__name__}"
