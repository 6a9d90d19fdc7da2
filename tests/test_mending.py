"""The launch that mends what did not fit the limbs, its own text on the CPU: what is flagged is computed, nothing else is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simt
from emulator import RESULT, Memory, gpu, launch
from modes import asked
from reference import activated, dgrad, fprop
from test_implicit_gemm import WHOLE

from pycuda_conv.engines.hopper import gemm as ig
from pycuda_conv.engines.hopper import gemm_tiles
from pycuda_conv.engines.hopper.gemm import ImplicitGemm

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

KINDS = {
    "ordinary": lambda x, w, rng: None,
    "2^-40 to 2^40": lambda x, w, rng: x.__imul__(np.float32(2) ** rng.integers(-40, 40, x.shape)),
    "Inf": lambda x, w, rng: x.__setitem__((0, 0, 2, 2), np.inf),
    "NaN in the last image": lambda x, w, rng: x.__setitem__((-1, -1, -1, -1), np.nan),
    "a filter of its own range": lambda x, w, rng: w[0, 0].__imul__(np.float32(2) ** rng.integers(-50, 50, w[0, 0].shape)),
}
RUNS = [  # case, activation
    (WHOLE, None), (fprop((2, 120, 4, 8), (130, 60, 3, 3), padding=1, groups=2, bias=False), None), (dgrad((2, 64, 10, 8), (64, 72, 3, 3), padding=1), None),
    (WHOLE, "gelu"), (WHOLE, ("leaky_relu", 0.2)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "activation"), RUNS, ids=[f"{c}-{a}" for c, a in RUNS])
def test_what_is_flagged_is_computed_and_nothing_else(monkeypatch, case, activation):
    monkeypatch.setattr(gemm_tiles, "JOINED_BYTES", 0)  # else blocks of the product mend what they have joined
    problem = replace(asked(case, "fp32"), activation=activation)
    program = ig.schedule(problem, ImplicitGemm(64, 64, 3, 2), gpu(3))
    *before, (step,) = program.whole
    for seed, (kind, change) in enumerate(KINDS.items()):
        x, w, b = case.normals("float32", seed)
        change(x, w, np.random.default_rng(seed))
        memory = Memory(problem, program, x, w, b, None, None)
        with np.errstate(all="ignore"):
            launch(before, memory, False)
            want, size = activated(case.reference(x, w, b), activation), case.reference(*(None if a is None else np.abs(a) for a in (x, w, b)))
        old = memory.view(RESULT, "float32").reshape(want.shape).copy()
        simt.run([[step]], memory, seed)
        y = memory.view(RESULT, "float32").reshape(want.shape)
        with np.errstate(all="ignore"):
            wrong = ~((np.abs(y - want) <= 3e-6 * size + 1e-44) | (np.isnan(y) & np.isnan(want)) | (y == want))
        assert not wrong.any(), f"{kind}: {np.argwhere(wrong)[:5]}"
        touched = (old.view(np.uint32) != y.view(np.uint32)).reshape(len(y), -1).any(1)
        expected = {"ordinary": [], "Inf": [0], "NaN in the last image": [len(y) - 1]}
        assert kind not in expected or np.flatnonzero(touched).tolist() == expected[kind], f"{kind}: images {np.flatnonzero(touched)}"
