"""Devices to test on, and the sizes of the random searches.

The same test bodies run on every device of the machine: PoCL on a laptop, a GPU where there is one. What has no device
here is skipped and says why.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import math
import os
import signal
import sys
import time
from collections import Counter
from functools import cache
from itertools import combinations

# Libraries' threads spin while they wait for each other. numpy's products are small here, and take one thread less time than two;
# workers that compute side by side share the processors. Set before the libraries start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

# Freed memory stays the process's. Otherwise each large array is new pages, which the system clears: half the time of some tests.
# Arrays of 64 MiB go back: small ones that settle in their places would let the process grow to gigabytes.
with contextlib.suppress(OSError, AttributeError):
    _libc, _TRIM_THRESHOLD, _MMAP_THRESHOLD = ctypes.CDLL("libc.so.6"), -1, -3
    _libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    _libc.mallopt(_MMAP_THRESHOLD, 1 << 26)

import pytest
from hypothesis import HealthCheck, settings

HAS_PYCUDA = importlib.util.find_spec("pycuda") is not None

#: Of a test whose workers, should one be lost, leave it waiting for ever: it fails by itself, and others use its cluster on.
ends_soon = pytest.mark.timeout(500, method="signal")

# every example compiles kernels of its own, a third of a second on PoCL and a second or two with nvcc
_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=30, **_common)
settings.register_profile("thorough", max_examples=300, **_common)  # pytest --hypothesis-profile=thorough
settings.load_profile("default")


def why_no_cuda() -> str | None:
    from pycuda_conv.runtime.driver import why_not

    return why_not()


def why_no_opencl() -> str | None:
    from pycuda_conv.runtime.opencl import why_not

    return why_not()


def pytest_configure(config):
    with contextlib.suppress(ValueError):  # a shell lets a job in its background ignore Ctrl-C, and so would the processes that tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, PyCUDA and nvcc")
    config.addinivalue_line("markers", "gpu_alone: a GPU's test that takes or counts its whole memory: tests of other processes wait")
    config.addinivalue_line("markers", "pairs: of all combinations of a test's parameters as many run as have every pair of their values")
    config.addinivalue_line("markers", "turns: as many run as have every value, by turns with those of the other parameters")
    if HAS_PYCUDA:
        config.pluginmanager.register(_OneGpu)
    if config.getoption("--failures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config.getoption("--failures")))
    import reference

    for name in ("CI", "BUILD_NUMBER"):  # where one is set, pytest compares long results that differ line by line, which takes hours
        os.environ.pop(name, None)
    reference.all_texts = config.getoption("--all-texts")
    os.environ.setdefault("PYCUDA_CONV_TESTS_BEGAN", str(time.time()))  # xdist's workers take it from the process that starts them


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session):
    """The thousands of tests stay as long as the process does: looking through them for garbage, again and again, finds none."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_searched():
    """Nor does a search for garbage look through what other modules' tests leave: reports, and caches of plans."""
    gc.collect()
    gc.freeze()


@cache
def _why_no_cuda() -> str | None:
    return why_no_cuda()



def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes and time.time() > float(os.environ["PYCUDA_CONV_TESTS_BEGAN"]) + 60 * minutes:
        pytest.skip(f"not begun within {minutes} minutes")
    if why := _why_no_gpu(item):
        pytest.skip(why)


def _why_no_gpu(item):
    """Why a test that needs a GPU can't run here; None of another."""
    return None if item.get_closest_marker("gpu") is None else _why_no_cuda()


@contextlib.contextmanager
def _gpu_locked(alone):
    """The GPU for a test, together with tests of other processes or not. Who waits to be alone is next: others queue up behind it."""
    from reference import kept_folder

    with contextlib.ExitStack() as stack:
        first, gpu = (stack.enter_context(open(kept_folder() / f"{name}.lock", "w")) for name in ("next", "gpu"))
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(first, fcntl.LOCK_UN)
        yield


#: How many tests were left out since there is no GPU.
_left_out = [0]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Thousands of tests need a GPU. Without one they are not made, and told as a number: making and reporting each would take a minute."""
    marks = getattr(obj, "pytestmark", ()) if callable(obj) and name.startswith("test") else ()
    if not any(mark.name == "gpu" for mark in marks) or not _why_no_cuda():
        return None
    sets = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    _left_out[0] += math.prod(len(list(one)) for one in sets)
    return []


def pytest_collection_modifyitems(config, items):
    """And those of whose parameters one is a GPU. Of tests with the marker `turns` or `pairs` as few stay as need be."""
    without = [item for item in items if not _why_no_gpu(item)]
    _left_out[0] += len(items) - len(without)
    groups: dict[tuple, list] = {}
    for item in without if not config.getoption("--all-texts") else ():
        for strength, marker in ((1, "turns"), (2, "pairs")):
            if item.get_closest_marker(marker):
                groups.setdefault((strength, item.nodeid.partition("[")[0], item.callspec.params.get("device")), []).append(item)
    dropped = {id(item) for group in groups.values() for item in group} - {
        id(item) for (strength, *_), group in groups.items() for item in _covering(group, strength)
    }
    items[:] = [item for item in without if id(item) not in dropped]
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = _left_out[0]


def _covering(items, strength: int) -> list:
    """As few of a test's items as have each value of each parameter, or each pair of values; found greedily, values that are rare first."""
    sets = [set(combinations(enumerate(item.callspec._idlist), strength)) for item in items]
    met: Counter = Counter()
    wanted, found = set().union(*sets), []
    while wanted:
        best = max(range(len(items)), key=lambda i: (len(sets[i] & wanted), -sum(met[one] for one in sets[i])))
        found.append(items[best])
        wanted -= sets[best]
        met.update(sets[best])
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """All workers leave out the same tests."""
    _left_out[0] = max(_left_out[0], getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_terminal_summary(terminalreporter):
    if _left_out[0]:
        terminalreporter.write_line(f"{_left_out[0]} tests need a GPU: {_why_no_cuda()}")


class _Failures:
    """Each failure in a file, at once. The process that starts xdist's workers gets all reports."""

    def __init__(self, file):
        self.file = file
        open(file, "w").close()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with open(self.file, "a") as file:
                file.write(f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}\n{report.longreprtext[-4000:]}\n\n")


class _OneGpu:
    """Tests of other processes, too, share the GPU."""

    @staticmethod
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(item):
        if item.get_closest_marker("gpu"):
            with _gpu_locked(alone=item.get_closest_marker("gpu_alone") is not None):
                yield
        else:
            yield


@pytest.fixture(scope="session", autouse=True)
def no_tuned_choices(tmp_path_factory):
    """What a developer measured, and what is shipped, does not decide what is tested here."""
    from pycuda_conv import tune
    from pycuda_conv.engines import calibration

    nowhere = tune.Table(tmp_path_factory.mktemp("tuned") / "tuned.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "user_table", lambda: nowhere)
        patch.setattr(tune, "SHIPPED", nowhere.path.parent)
        with calibration.replaced(None):
            yield


@pytest.fixture(scope="session", autouse=True)
def nothing_behind_calls():
    """Which configuration runs does not depend on what other tests have compiled; test_background.py turns it on again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCUDA_CONV_BACKGROUND", "0")
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--optimised", action="store_true", help="let PoCL optimise all kernels, not only those of the tests that are about it"
    )
    parser.addoption(
        "--torch-versions", action="store_true", help="download the oldest and the newest torch that setup.cfg admits, and try them"
    )
    parser.addoption("--minutes", type=float, default=0, help="skip tests that have not begun after so many minutes, and say so (0: never)")
    # given as --failures=FILE: an argument of its own that is a file makes pytest look for its settings beside that file
    parser.addoption(
        "--failures", metavar="FILE", help="write each failure to the file as soon as it is known: a run that is ended tells of none"
    )
    parser.addoption(
        "--all-texts", action="store_true",
        help="let nvcc compile every text of a kernel that tests name, and try every text of some kernels: see CONTRIBUTING.md"
    )


@pytest.fixture(scope="session", autouse=True)
def compiled_fast(request):
    """PoCL compiles most kernels without its optimiser, which takes five to ten times as long as these kernels run;
    `optimised` brings it back.

    Nor does it read the declarations of functions that no kernel calls.
    """
    from declarations import declared

    from pycuda_conv.runtime import opencl

    build = opencl.OpenCLDevice._build

    def build_fast(self, source, options):
        before, more = declared() if "-cl-opt-disable" in options else ("", [])
        return build(self, before + source, [*options, *more])

    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--optimised"):
            patch.setattr(opencl, "OPTIONS", [*opencl.OPTIONS, "-cl-opt-disable"])
            patch.setattr(opencl.OpenCLDevice, "_build", build_fast)
        yield


_optimised: dict[str, dict] = {"_programs": {}, "_kernels": {}}


@pytest.fixture
def optimised(monkeypatch):
    """Plans that are made in the test run what users run: PoCL optimises their kernels."""
    from pycuda_conv.runtime import opencl

    if why_no_opencl() is None:
        monkeypatch.setattr(opencl, "OPTIONS", [option for option in opencl.OPTIONS if option != "-cl-opt-disable"])
        for name, made in _optimised.items():
            monkeypatch.setattr(opencl.opencl_device(), name, made)


@pytest.fixture(scope="session", params=["opencl", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    """The name of a device, as `device=` takes it."""
    why = why_no_opencl() if request.param == "opencl" else why_no_cuda()
    if why:
        pytest.skip(why)
    return request.param


@pytest.fixture(scope="session")
def opencl():
    """The name of OpenCL's device."""
    why = why_no_opencl()
    if why:
        pytest.skip(why)
    return "opencl"


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `pycuda-conv` in this process: (exit status, stdout, stderr)."""
    from pycuda_conv import cli

    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):  # xdist sets COLUMNS
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        capsys.readouterr()
        try:
            status = cli.main([str(a) for a in arguments])
        except SystemExit as exit:  # argparse leaves by itself, and so do signals
            status = exit.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """Where torch's tensors lie."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return request.param


@pytest.fixture(scope="session")
def torch():
    """torch, where the GPU is one that the kernels for Hopper run on."""
    from pycuda_conv.runtime import get_device

    if get_device("cuda").capability != (9, 0):
        pytest.skip("the GPU is not of compute capability 9.0")
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture(autouse=True)
def nothing_compiled():
    """torch.compile counts how often it has compiled the code that modules share."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


@pytest.fixture(scope="session")
def python_env():
    """The environment in which a fresh Python process finds this checkout."""
    import pycuda_conv

    root = os.path.dirname(os.path.dirname(os.path.abspath(pycuda_conv.__file__)))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    others = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # which xdist sets
    return {**others, "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


@pytest.fixture(scope="session")
def fast_env(python_env, request):
    """The same for processes that compute little: their PoCL compiles without its optimiser, too, and keeps that in a cache of its own."""
    from reference import kept_folder

    if request.config.getoption("--optimised") or not why_no_cuda():
        return python_env
    return {**python_env, "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable", "PYCUDA_CONV_CACHE_DIR": str(kept_folder() / "cache")}
