"""Sphinx's settings: `make docs` builds the site."""

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
