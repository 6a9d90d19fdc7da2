"""Convolution, batch normalisation, the sum with a residual and an activation in one layer, trained and evaluated.

A forward pass in training is the convolution and one pass over its result y. On Hopper's tensor cores the convolution notes the statistics
of its tiles while it has them; elsewhere they take a pass of their own. The input, the filter and y are kept for the backward pass. The
normalised y, the ReLU's mask and the derivatives of other activations are not kept but computed again. The mask of a sum with a residual is
read off the layer's result, which the layers after it keep anyway.

The backward pass reads its arrays twice. One pass computes the sums and the residual's gradient. The other computes the gradient of y, from
which the gradients of input and filter are convolved. It takes y's own place, unless the graph is kept for another pass or hooks got the
saved tensors. Where something else reads the layer's input too, the launch that convolves adds that gradient.

Evaluated without gradients, the layer is a convolution whose kernel reads the norm's vectors: see :mod:`pycuda_conv.nn.evaluation`.

A repeated pass of a training step is one call of the launcher in C, which makes all its launches: see :mod:`pycuda_conv.repeat`. Layers are
called in one of two ways, as the convolutions are (see :mod:`pycuda_conv.nn.autograd`). One is a ``torch.autograd.Function``. The other,
where torch has to see operators, is ``torch.ops.pycuda_conv.fused_*``; to dispatch these takes the host longer than all the rest. A forward
pass with gradients then takes two operators. The first computes the statistics, moves the running ones and has no gradient of its own. The
second is the layer as a function of input, filter and parameters, with the whole gradient. Torch adds a residual after them.

S. Ioffe and C. Szegedy, 'Batch normalization: accelerating deep network training by reducing internal covariate shift' (2015).
"""

from pycuda_conv.nn.fused import operators  # noqa: F401  (torch gets them)
from pycuda_conv.nn.fused.modules import FusedConvBnReLU1d, FusedConvBnReLU2d, FusedConvBnReLU3d
from pycuda_conv.nn.fused.modules import Layer as Layer
from pycuda_conv.nn.fused.modules import conv_bn_act as conv_bn_act

__all__ = ["FusedConvBnReLU1d", "FusedConvBnReLU2d", "FusedConvBnReLU3d"]
