"""Messages of the library in the words of the command line: options instead of Python's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pycuda_conv.errors import did_you_mean

#: Arguments of the library that are options of the command, as ``--output-padding``.
_ARGUMENTS = (
    "device", "devices", "stride", "padding", "output_padding", "dilation", "groups", "precision", "algorithm", "activation", "tune",
)  # fmt: skip
_VALUE = r"""'(?P<word>[^']*)'|[\[(](?P<several>[^\])]*)[\])]|(?P<number>-?\w[\w.:]*)"""
_GIVEN = re.compile(rf"\b(?P<name>{'|'.join(_ARGUMENTS)})=(?:{_VALUE})")


def in_options(message: str) -> str:
    """`message` with each ``device='opencl'`` as ``--device opencl``, and each ``stride=[2, 2]`` as ``--stride 2,2``."""

    def option(found: re.Match[str]) -> str:
        name = found["name"].replace("_", "-")
        value = found["word"] or found["number"] or (found["several"] or "").replace(" ", "").replace("'", "").rstrip(",")
        return f"--{name} {value}".rstrip()

    return _GIVEN.sub(option, message)


def with_suggestion(message: str, options: Iterable[str] = ()) -> str:
    """A message of argparse's, with the word that the user may have meant: a choice, or one of the `options`."""
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if choice:
        return message + did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])).replace("'", "")
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    return message + (did_you_mean(unknown[1], options).replace("'", "") if unknown else "")
