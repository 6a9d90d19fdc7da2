"""Sphinx's settings: `make docs` builds the site."""

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import pycuda_conv

project = "pycuda_conv"
author = "pycuda_conv contributors"
copyright = author
version = release = pycuda_conv.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_nb"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "pycuda_conv"
html_show_copyright = False

# the notebook keeps what it printed when it was last run; a test runs it
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # numpydoc's sections say the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

html_static_path = ["_static"]
html_css_files = ["pictures.css"]

ROOT = Path(__file__).resolve().parent.parent
#: files that the site shows: name from the root, path
SHOWN = ("cu/**/*.cu", "cu/**/*.cuh", "docs/course/*.cu", "docs/course/*.py", "examples/*.py")
SOURCES = {path.relative_to(ROOT).as_posix(): path for pattern in SHOWN for path in sorted(ROOT.glob(pattern))}
INCLUDE = re.compile(r'<span class="cpf">"([\w/.]+)"</span>')  # as pygments writes it


def link_to_source(app: Sphinx, doctree: nodes.document) -> None:
    """A link to such a file leads to the page that shows it; Sphinx would offer a download."""
    for node in list(doctree.findall(addnodes.download_reference)):
        path = (Path(app.srcdir) / app.env.docname).parent.joinpath(node["reftarget"]).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if name in SOURCES:
            uri = app.builder.get_relative_uri(app.env.docname, f"source/{name}")
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """A page for each of these files, whose includes are links."""
    for name, path in SOURCES.items():
        page = f"source/{name}"

        def link(include: re.Match[str], page: str = page) -> str:
            header = f"cu/{include[1]}"
            if header not in SOURCES:
                return include[0]
            return f'<a href="{app.builder.get_relative_uri(page, f"source/{header}")}">{include[0]}</a>'

        body = app.builder.highlighter.highlight_block(path.read_text(), "python" if path.suffix == ".py" else "cuda")
        yield page, {"title": name, "body": f"<h1>{name}</h1>{INCLUDE.sub(link, body)}"}, "page.html"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("doctree-read", link_to_source, priority=100)  # before Sphinx collects what is to be downloaded
    app.connect("html-collect-pages", source_pages)
