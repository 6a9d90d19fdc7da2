"""The caller's arrays: what they are, who owns their memory, which stream they live on.

Each class here adapts one kind of array to the plans, which see addresses only: it describes arrays, allocates and copies them. The result
is of the input's kind and comes from that kind's own allocator. What runs plans on arrays is in :mod:`pycuda_conv.execute`.

Layouts. The problem has one for input and result: C order (NCHW) or channels last (NHWC). In a call of a function the input
decides: a torch tensor that is channels last, as ``torch.channels_last`` and ``channels_last_3d`` make it, or
``x.transpose(1, 2)`` of a contiguous (N, W, C) tensor, gives a result that is, and so has its `out` to be. All else counts
as NCHW: other kinds of array, and tensors that are both, with one channel or one pixel. The filter has no say, unlike in
torch. The result's layout says nothing of the kernels: where those that read NCHW are faster by more than the copies take,
the input is copied to that order and the result is put into its own, and so it always is with
tensors in host memory. A plan keeps the layout of its problem. Arrays that lie in another way than these, filters that are
neither in C order nor in one that the plan's kernels read, and arrays whose address is not a multiple of 16 bytes, are copied first.
"""

from pycuda_conv.arrays.base import ALIGNMENT, ArrayKind, Signature
from pycuda_conv.arrays.device import CupyKind, DeviceKind, GPUArrayKind, InterfaceKind, stream_of
from pycuda_conv.arrays.host import HostKind, NumpyKind
from pycuda_conv.arrays.kinds import LAZY, STAND_IN, check_same_type, is_torchs, kind_of, same_kind

__all__ = [
    "ALIGNMENT",
    "LAZY",
    "STAND_IN",
    "ArrayKind",
    "CupyKind",
    "DeviceKind",
    "GPUArrayKind",
    "HostKind",
    "InterfaceKind",
    "NumpyKind",
    "Signature",
    "check_same_type",
    "is_torchs",
    "kind_of",
    "same_kind",
    "stream_of",
]
