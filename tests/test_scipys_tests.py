"""scipy's own tests of filters and convolutions, over the functions of this package: `scipys_tests.py` puts these in place of scipy's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reference import all_texts

scipy = pytest.importorskip("scipy")
pytest.importorskip("hypothesis", reason="scipy's tests import it")
HERE = Path(__file__).resolve().parent
#: By file, the tests of each run, how many of them have to pass at the least, and which part of them runs without --all-texts.
RUNS = {
    "correlate": ("ndimage/tests/test_filters.py", "correlate or convolve", 1300, 5),
    "others": ("ndimage/tests/test_filters.py", "(gauss or uniform or sobel or prewitt or laplac) and not correlate", 250, 1),
    "signal": ("signal/tests/test_signaltools.py", "TestConvolve or TestConvolve2d or TestCorrelate or TestFFTConvolve", 700, 3),
}


@pytest.mark.parametrize("name", RUNS)
def test_scipy_s_own_tests_pass(fast_env, name):
    file, chosen, least, part = RUNS[name]
    part = 1 if all_texts else part
    path = Path(scipy.__file__).parent / file
    if not path.exists():
        pytest.skip("this scipy came without its tests")
    options = [
        "-q", str(path), "-k", chosen, "-p", "scipys_tests", "-p", "no:cacheprovider", "--tb=line", "-W", "ignore", "--rootdir",
        str(path.parents[1])
    ]
    places = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**fast_env, "PYTHONPATH": places, "SCIPYS_EVERY": str(part)}
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env=env, capture_output=True, text=True, timeout=900, check=False)
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert found and int(found[1]) >= least // part, done.stdout[-300:]
