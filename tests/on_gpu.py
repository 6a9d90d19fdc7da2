"""Plans on a GPU, and what they compute there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from filters import Filter
from modes import allowed, asked, dtype_of
from reference import Case, assert_close, assert_exact

from pycuda_conv import Plan

MARGIN = 1024  # bytes of 0xff, which is NaN in every dtype, before and after every array


def plans_of(runs: Iterable[tuple]) -> dict:
    """The plans of all runs (case, mode, configuration) on a GPU, by the runs' words, compiled side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(map(str, runs), pool.map(lambda run: Plan(asked(*run[:2]), "cuda", config=run[2]), runs), strict=True))


class Arrays:
    """A plan's arrays on the GPU, NaN round each of them; workspace and result are NaN before a launch."""

    def __init__(self, torch, plan: Plan, x, w, b=None, scale=None, residual=None):
        self.torch, self.plan, self.dtype = torch, plan, x.dtype
        self.gradient = plan.problem.direction == "wgrad"  # whose second operand is laid as its first, and whose result is a filter
        if plan.problem.order:
            x, residual = (None if a is None else a.transpose(plan.problem.order) for a in (x, residual))
            w = w.transpose(plan.problem.order) if self.gradient else w
        given = [None if a is None else np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8) for a in (x, w, b, scale, residual)]
        self.given = [None if a is None else self._surrounded(a) for a in given]

    def _surrounded(self, content):
        """A whole array of bytes on the GPU: `content`, an array or a number of bytes, between margins."""
        size = content if isinstance(content, int) else content.size
        whole = self.torch.full((2 * MARGIN + size,), 0xFF, dtype=self.torch.uint8, device="cuda")
        if not isinstance(content, int):
            whole[MARGIN : MARGIN + size] = self.torch.from_numpy(content.copy()).cuda()
        return whole

    def launch(self, kept: bool = False, filter_last: bool = False) -> np.ndarray:
        plan, torch = self.plan, self.torch
        result = self._surrounded(math.prod(plan.result_shape) * self.dtype.itemsize)
        workspace = self._surrounded(plan.schedule.workspace_bytes if kept else plan.workspace_bytes)
        packed = self._surrounded(plan.filter_bytes)
        wholes = [*self.given, result, workspace]
        if filter_last and not self.gradient:
            w = np.frombuffer(wholes[1][MARGIN:-MARGIN].cpu().numpy().tobytes(), self.dtype).reshape(plan.problem.weight_shape)
            wholes[1] = self._surrounded(np.frombuffer(np.moveaxis(w, 1, -1).tobytes(), np.uint8))
        x, w, b, scale, residual, y, scratch = (0 if whole is None else whole.data_ptr() + MARGIN for whole in wholes)
        with plan.device:
            if kept:
                plan.pack(w, packed.data_ptr() + MARGIN)
            plan.launch((x, w, b, scale, residual, y, scratch), None, packed.data_ptr() + MARGIN if kept else 0, filter_last)
        torch.cuda.synchronize()
        for whole in filter(lambda whole: whole is not None, (*wholes, packed)):
            assert (whole[:MARGIN] == 0xFF).all() and (whole[-MARGIN:] == 0xFF).all(), f"{plan} wrote outside its arrays"
        found = result[MARGIN:-MARGIN].cpu().numpy().view(self.dtype)
        if self.gradient:
            k, c, *taps = plan.result_shape
            return np.moveaxis(found.reshape(k, *taps, c), -1, 1) if filter_last else found.reshape(plan.result_shape)
        order = plan.problem.order or range(len(plan.result_shape))
        found = found.reshape([plan.result_shape[i] for i in order])
        return found.transpose(np.argsort(list(order)))


def check_on_gpu(torch, plan: Plan, case: Case | Filter, mode: str) -> None:
    """Integers exactly, random data within the bound; the same bits again, with a kept filter, and with channels last in the filter."""
    arrays = case.integers(dtype_of(mode))
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)
    arrays = case.normals(dtype_of(mode))
    ref, on_gpu = case.reference(*arrays), Arrays(torch, plan, *arrays)
    got = on_gpu.launch()
    assert_close(got, ref, allowed(case, mode, arrays, ref), plan)
    assert got.tobytes() == on_gpu.launch().tobytes()
    if not isinstance(case, Filter):
        assert got.tobytes() == on_gpu.launch(kept=True).tobytes()
    if plan.reads_filter_last or plan.writes_filter_last:
        assert got.tobytes() == on_gpu.launch(filter_last=True).tobytes()
