"""The caller's arrays: what they are, who owns their memory, which stream they live on.

Each class here adapts one kind of array to the plans, which see addresses only: it describes arrays, allocates and copies them. A result is
of the input's kind and comes from that kind's own allocator. :mod:`pycuda_conv.execute` runs plans on arrays.

Layouts. A problem has one layout for input and result: C order (NCHW) or channels last (NHWC). In a call of a function the input decides.
A torch tensor counts as NHWC if it is channels last, as ``torch.channels_last`` and ``channels_last_3d`` make it, or ``x.transpose(1, 2)``
of a contiguous (N, W, C) tensor. Then the result is channels last too, and so must `out` be. Everything else counts as NCHW: other kinds
of array, and tensors that are both, with one channel or one pixel. The filter does not decide, unlike in torch.

The layout of a result does not show which kernels ran. If kernels for NCHW save more time than copies take, the input is copied to NCHW,
and the result is copied to its own layout. Tensors in host memory are always copied so. A plan keeps the layout of its problem. Three sorts
of arrays are copied first: arrays in any other order, filters that are neither in C order nor in an order that the plan's kernels read, and
arrays whose address is not a multiple of 16 bytes.
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
