"""A printed model shows which of its layers this package computes."""


import torch

import pycuda_conv.nn as pn

nn = torch.nn
MARK = "by pycuda_conv)"


class Own(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class Named(nn.Conv1d):
    def extra_repr(self):
        return "named"


def lines(model):
    return [line.strip() for line in str(model).splitlines()]


def test_converted_layers_are_marked_and_no_others():
    layers = nn.Conv2d(1, 2, 3), nn.ConvTranspose3d(1, 2, 3), Own(1, 2, 3), Named(1, 2, 3), nn.Linear(3, 4), nn.BatchNorm2d(2), nn.ReLU()
    model = nn.ModuleList(layers)
    assert not any("pycuda_conv" in line for line in lines(model))
    for linear in (False, True):
        shown = lines(pn.convert(model, linear=linear))
        marked = [line for line in shown if line.endswith(MARK)]
        assert [line.partition("(")[2].partition("): ")[0] for line in shown if line in marked] == ["0", "1", "2", "3", *["4"] * linear]
    assert "(3): Named(named, by pycuda_conv)" in shown
    assert "(0): Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1), by pycuda_conv)" in shown


def test_our_own_modules_are_marked_too():
    assert repr(pn.Conv2d(1, 2, 3, precision="tf32")).endswith(f", precision=tf32, {MARK}")
