"""Kernels' texts in a form that PyCUDA's ``SourceModule`` takes, and other compilers of CUDA C as well."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from pycuda_conv.runtime.base import kernel_file, shown_file


def plain(text: str, flat: bool = False) -> str:
    """A text that may stand between the braces of ``extern "C"``, where ``SourceModule`` puts it; with `flat`, it includes nothing."""
    return f'extern "C++" {{\n{_flattened(text) if flat else text}\n}}\n'  # in C there are no templates


_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_LINE = re.compile(r'#line (\d+) "([^"]+)"')


def _flattened(text: str, name: str = "the text") -> str:
    """The text with its headers in place of the lines that include them. Compilers go on to report each file's own lines."""
    lines, number = [], 0
    for line in text.split("\n"):
        number += 1
        moved, included = _LINE.match(line), _INCLUDE.match(line)
        if moved:
            number, name = int(moved[1]) - 1, moved[2]
        if included:
            lines += [_header(included[1]), f'#line {number + 1} "{name}"']
        elif line.strip() != "#pragma once":
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines)


@lru_cache
def _header(name: str) -> str:
    """A header of ours, with its own headers in it. Where it stands in several places, the preprocessor takes the first that it sees."""
    name = Path(name).name
    text = kernel_file(name).read_text()
    guard = "PYCUDA_CONV_" + re.sub(r"\W", "_", name).upper()
    inside = f'#line 1 "{shown_file(name)}"\n{_flattened(text, shown_file(name))}'
    once = re.search(r"^#pragma once$", text, re.MULTILINE)
    return f"#ifndef {guard}\n#define {guard}\n{inside}\n#endif" if once else inside
