"""Tables of repeated calls: by a key, what was decided when the call was made first.

The launcher in C writes the key of a call and looks it up: see ``find`` in ``runtime/launch/ready.c``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycuda_conv.memo import MOST, launches_are_in

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan

native: Any
try:
    native = importlib.import_module("pycuda_conv.runtime._launch")
except ImportError:
    native = None


class RepeatTable(dict[Any, Any]):
    """What the launcher in C takes, or a tuple that begins with it, by keys; None for calls that Python has to make each time.

    It is a dict, so that a look-up in C costs what it costs in a dict.

    Parameters
    ----------
    most : int
        A table of so many keys is emptied before another is put in.
    of_plan : bool
        Whether the table belongs to one plan. All others are emptied where launches of plans are forgotten.
    """

    def __init__(self, most: int = MOST, of_plan: bool = False) -> None:
        super().__init__()
        self.most = most
        if not of_plan:
            launches_are_in(self.clear)

    def put(self, key: Any, ready: Any, *plans: Plan) -> None:
        """Store `ready`, which launches kernels of `plans`, unless better kernels are ready for one of them."""
        if len(self) >= self.most:
            self.clear()
        calls = [often for plan in plans if (often := plan.repeat_in(self, key)) >= 0]
        if ready is None or not calls:
            self[key] = ready
        elif min(calls):
            native.limit(ready[0] if isinstance(ready, tuple) else ready, min(calls))
            self[key] = ready
