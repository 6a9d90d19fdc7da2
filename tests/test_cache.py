"""Compiled kernels on disk: what is damaged, what others could write, several processes, kill -9, a full disk, the limit."""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from reference import python, started

from pycuda_conv import tune
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.runtime import cache, pocl
from pycuda_conv.runtime.cache import Entry


@pytest.fixture
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_said", set())
    return tmp_path


def files(folder):
    """The entries."""
    return sorted(p for p in folder.rglob("*.x") if p.is_file())


def leftovers(folder):
    return list(folder.rglob(".building*"))


def get(name, data, fresh=False):
    return Entry((name,), ".x").get(lambda: data, fresh)


def never():
    raise AssertionError("built again")


def test_an_entry_is_built_once(cache_folder):
    assert Entry(("a", "b"), ".x").get(lambda: b"binary") == Entry(("a", "b"), ".x").get(never) == b"binary"
    assert len(files(cache_folder)) == 1
    assert Entry(("ab", ""), ".x").get(lambda: b"other") == b"other"  # parts are told apart, not run together
    assert Entry(("a", "b"), ".y").get(lambda: b"third") == b"third"
    assert Entry(("a", "b"), ".x").get(lambda: b"new", fresh=True) == b"new" == Entry(("a", "b"), ".x").get(never)
    assert any(path.read_bytes().startswith(b"new") for path in files(cache_folder)), "cuobjdump reads what is kept"


DAMAGE = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "a bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit of the checksum": lambda data: data[:-30] + bytes([data[-30] ^ 4]) + data[-29:],
    "as older versions kept it": lambda data: b"good",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_built_again_and_said_once(cache_folder, caplog, how):
    for name in "ab":
        get(name, b"good" * 100)
    for path in files(cache_folder):
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    with caplog.at_level(logging.WARNING, "pycuda_conv"):
        for name in "ab":
            assert get(name, b"again") == b"again"
            assert Entry((name,), ".x").get(never) == b"again"
    assert ["is damaged" in r.getMessage() for r in caplog.records] == [True]


def test_an_entry_under_another_s_name_is_not_taken(cache_folder):
    get("a", b"of a")
    (path,) = files(cache_folder)
    get("b", b"of b")
    (other,) = set(files(cache_folder)) - {path}
    other.write_bytes(path.read_bytes())
    assert get("b", b"again") == b"again"


def test_what_cannot_be_read_or_made_costs_the_cache_only(cache_folder, monkeypatch):
    get("a", b"good")
    (path,) = files(cache_folder)
    path.unlink()
    path.mkdir()
    assert get("a", b"again") == b"again" and not leftovers(cache_folder)
    (cache_folder / "file").write_text("not a folder")
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(cache_folder / "file" / "below"))
    assert get("a", b"good") == b"good"


def test_a_failed_build_leaves_nothing_behind(cache_folder):
    def build():
        raise RuntimeError("nvcc said no")

    with pytest.raises(RuntimeError, match="nvcc said no"):
        Entry(("a",), ".x").get(build)
    assert not files(cache_folder) and not leftovers(cache_folder)
    assert get("a", b"good") == b"good"


# ---- folders that others can write to


@pytest.mark.parametrize("inner", [False, True], ids=["the folder", "kernels in it"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722, 0o1777], ids="{:o}".format)
def test_a_folder_that_others_can_write_to_is_not_trusted(cache_folder, caplog, mode, inner):
    get("a", b"planted")
    (path,) = files(cache_folder)
    stamp = path.stat().st_mtime_ns
    (cache_folder / "kernels" if inner else cache_folder).chmod(mode)
    with caplog.at_level(logging.DEBUG, "pycuda_conv"):
        for name in "ab":
            assert get(name, b"good") == b"good"
    assert [p.stat().st_mtime_ns for p in files(cache_folder)] == [stamp]  # nothing is written either
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert f"{mode:o}" in warning and "PYCUDA_CONV_CACHE_DIR" in warning


def test_a_folder_of_another_user_is_not_trusted(cache_folder, caplog, monkeypatch):
    get("a", b"planted")
    uid = os.geteuid()
    if uid == 0:
        os.chown(cache_folder / "kernels", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert get("a", b"good") == b"good"
    assert f"belongs to user {12345 if uid == 0 else uid}" in caplog.text


def test_folders_are_made_for_their_owner_alone(cache_folder, monkeypatch):
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(cache_folder / "new" / "cache"))
    before = os.umask(0o002)
    try:
        get("a", b"good")
    finally:
        os.umask(before)
    assert [(cache_folder / "new" / p).stat().st_mode & 0o777 for p in ("cache", "cache/kernels")] == [0o700, 0o700]
    assert Entry(("a",), ".x").get(never) == b"good"


# ---- the limit


def test_what_was_not_used_for_the_longest_time_goes_first(cache_folder, monkeypatch):
    now = time.time()
    for age, name in enumerate("abcd"):
        get(name, name.encode() * 1000)
        (new,) = (p for p in files(cache_folder) if p.read_bytes().startswith(name.encode() * 1000))
        os.utime(new, (now - 10000 * (age + 1),) * 2)  # d is the oldest
    assert get("d", b"") == b"d" * 1000  # reading it is a use
    monkeypatch.setenv("PYCUDA_CONV_CACHE_LIMIT", "4000")
    get("e", b"e" * 1000)
    assert sorted(p.read_bytes()[:1] for p in files(cache_folder)) == [b"a", b"d", b"e"]


def test_the_limit_is_a_number(cache_folder, monkeypatch):
    monkeypatch.delenv("PYCUDA_CONV_CACHE_LIMIT", raising=False)
    assert cache.limit() == cache.LIMIT
    monkeypatch.setenv("PYCUDA_CONV_CACHE_LIMIT", "0")
    assert get("a", b"good") == b"good" and not files(cache_folder)
    monkeypatch.setenv("PYCUDA_CONV_CACHE_LIMIT", "1 GB")
    with pytest.raises(ConvArgumentError, match="PYCUDA_CONV_CACHE_LIMIT must be a number of bytes, got '1 GB'"):
        get("b", b"good")


# ---- several at once


def test_processes_that_build_the_same_entries_at_once(fast_env, cache_folder):
    """Four processes on an empty cache: each sees all of an entry or none, and each entry is built by one of them."""
    code = """
import os, sys
from pycuda_conv.runtime.cache import Entry
data = bytes(range(256)) * 40000  # 10 MB: writing takes a while
def build():
    os.write(1, b"built\\n")
    return data
sys.stdin.read()
for i in range(12):
    assert Entry((str(i % 4),), ".x").get(build) == data
"""
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(cache_folder)}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started("-c", code, env=env, stdin=subprocess.PIPE)) for _ in range(4)]
        for process in processes:
            process.stdin.close()
            process.stdin = None
        built = 0
        for process in processes:
            out, errors = process.communicate(timeout=400)
            assert errors == b"" and process.returncode == 0
            built += out.count(b"built")
    assert built == 4 == len(files(cache_folder))


def test_threads_that_build_the_same_entry(cache_folder):
    barrier, built = threading.Barrier(8, timeout=300), []

    def build():
        built.append(1)
        return b"0" * 100000

    def work(_):
        barrier.wait()
        return Entry(("same",), ".x").get(build)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(8))) == {b"0" * 100000}
    assert len(files(cache_folder)) == 1 == len(built)


@pytest.mark.parametrize("when", ["building", "writing"])
def test_a_process_that_is_killed_leaves_nothing_that_stays(fast_env, cache_folder, monkeypatch, when):
    code = f"""
import os, sys, time
from pycuda_conv.runtime import cache
def stop(*_):
    os.write(1, b"now")
    time.sleep(100)
class File:
    def write(self, data):
        os.write(self.handle, data[:len(data) // 2])
        stop()
    def __init__(self, handle, mode): self.handle = handle
    def __enter__(self): return self
    def __exit__(self, *_): pass
if {when!r} == "writing":
    cache.os.fdopen = File
cache.Entry(("a",), ".x").get(stop if {when!r} == "building" else lambda: b"good" * 1000)
"""
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(cache_folder)}
    with started("-c", code, env=env) as process:
        assert process.stdout.read(3) == b"now"
        process.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    assert get("a", b"good" * 1000) == b"good" * 1000 == Entry(("a",), ".x").get(never)
    assert time.monotonic() - begin < cache.PATIENCE / 2  # its lock is gone with it
    assert len(leftovers(cache_folder)) == (when == "writing")
    monkeypatch.setattr(cache, "ABANDONED_AFTER", -1)
    get("b", b"good")
    assert not leftovers(cache_folder)


def test_a_process_that_stands_still_is_not_waited_for_for_ever(cache_folder, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(cache, "PATIENCE", 0.1)
    entry = Entry(("a",), ".x")
    (cache_folder / "kernels").mkdir(mode=0o700)
    with FileLock(cache_folder / "kernels" / f".{entry._name[:cache.LOCKED_BY]}.lock"):
        assert entry.get(lambda: b"good") == b"good"


def test_a_folder_without_locks_keeps_kernels_nevertheless(cache_folder, monkeypatch):
    """Earlier versions of filelock raise an error there; later ones lock in another way."""
    import filelock

    def refuse(*args, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert get("a", b"good") == b"good"
    Entry(("a",), ".x").get(never)


# ---- a full disk


def test_a_full_disk_costs_the_cache_only(cache_folder, monkeypatch, caplog):
    full = os.open("/dev/full", os.O_WRONLY)
    fdopen = os.fdopen
    monkeypatch.setattr(cache.os, "fdopen", lambda handle, mode: (os.close(handle), fdopen(full, mode))[1])
    assert get("a", b"good") == b"good"
    assert "No space left" in caplog.text and not files(cache_folder) and not leftovers(cache_folder)
    monkeypatch.undo()
    assert get("a", b"good") == b"good"


# ---- what PoCL compiles

CALL = """
import os, numpy as np, pycuda_conv as pc
x, w = np.arange(50, dtype="f").reshape(1, 2, 5, 5), np.ones((3, 2, 2, 2), "f")
os.write(1, b"%f " % pc.conv2d(x, w, device="opencl").sum())  # at once: several processes write
"""


def test_pocl_s_damaged_files_are_compiled_again(opencl, fast_env, cache_folder):
    """Given one of them, PoCL itself would end the process."""
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(cache_folder), "PYCUDA_CONV_BACKEND": "opencl"}
    good = python(CALL, env)
    entries = sorted(cache_folder.rglob("*.pocl"))
    assert len(entries) == 2  # the kernel, and the program that the device is tried with
    times = [p.stat().st_mtime_ns for p in entries]
    assert python(CALL, env) == good
    assert [p.stat().st_mtime_ns for p in entries] == times  # nothing was compiled
    for path, damage in zip(entries, (DAMAGE["half"], DAMAGE["a bit"]), strict=True):
        path.write_bytes(damage(path.read_bytes()))
    done = subprocess.run([sys.executable, "-c", CALL], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and done.stdout == good and done.stderr.count("is damaged") == 1
    assert python(CALL, env) == good
    assert not list((cache_folder / "kernels").glob(".pocl-*"))


def test_pocl_takes_nothing_from_a_folder_that_it_is_told_of(opencl, fast_env, cache_folder):
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(cache_folder / "ours"), "POCL_CACHE_DIR": str(cache_folder)}
    assert python(CALL + "print(os.environ['POCL_CACHE_DIR'])", env).split()[1] == str(cache_folder)
    assert [p.name for p in cache_folder.iterdir()] == ["ours"]


def test_what_a_killed_process_left_of_pocl_s_is_removed(opencl, fast_env, cache_folder):
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(cache_folder)}
    killed = subprocess.run(
        [sys.executable, "-c", CALL + "os.kill(os.getpid(), 9)"], env=env, check=False, capture_output=True, timeout=900
    )
    assert killed.returncode == -9
    assert len(list((cache_folder / "kernels").glob(".pocl-*"))) == 1
    python(CALL + f"import glob; assert len(glob.glob({str(cache_folder)!r} + '/kernels/.pocl-*')) == 1", env)
    assert not list((cache_folder / "kernels").glob(".pocl-*"))


#: Processes that have used no device, all made at once from one that has imported what they need.
CROWD = """
import os, sys
import numpy, pycuda_conv.runtime.opencl, pyopencl
for _ in range(8):
    if not os.fork():
        break
else:
    sys.exit(any([os.wait()[1] for _ in range(8)]))
"""


def test_eight_processes_that_start_at_once_on_an_empty_cache(opencl, fast_env, cache_folder):
    printed = python(CROWD + CALL, fast_env, PYCUDA_CONV_CACHE_DIR=str(cache_folder), OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1").split()
    assert len(printed) == 8 and len(set(printed)) == 1, printed


# ---- PoCL's folder: PoCL ends the process where it can't write a file

#: Sums of calls that compile: one after the other, told by $FILL to fill the folder before the second call, to remove it, or neither.
CALLS = """
import os, shutil
import numpy as np, pycuda_conv as pc
folder = os.environ["PYCUDA_CONV_CACHE_DIR"]
x, w = np.ones((1, 2, 5, 5), "f"), np.ones((3, 2, 2, 2), "f")
plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape), "opencl")
if os.environ["DO"] == "vanish":
    shutil.rmtree(folder)
print(plan(x, w).sum())
if os.environ["DO"] == "vanish":
    shutil.rmtree(folder)
if os.environ["DO"] == "fill":
    handle = os.open(folder + "/fill", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(handle, bytes(4096))
    except OSError:
        os.close(handle)
print(plan(x, w).sum())
try:
    print(pc.conv2d(x.astype("d"), w.astype("d"), device="opencl").sum())
except pc.BackendError as error:
    print(error)
    os.unlink(folder + "/fill")
    print(pc.conv2d(x.astype("d"), w.astype("d"), device="opencl").sum())
"""
SUMS = [str(8.0 * 3 * 16)] * 3


@contextlib.contextmanager
def small_file_system(folder, options):
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(folder)], check=False, capture_output=True
    ).returncode:
        pytest.skip("tmpfs can't be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def calls(env, folder, do="", **more):
    """What CALLS print; its process must end well."""
    env = {**env, "PYCUDA_CONV_CACHE_DIR": str(folder), "DO": do, **more}
    done = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.parametrize("options", ["size=16m,nr_inodes=12", "size=16m,ro"])
def test_pocl_works_elsewhere_where_the_cache_has_no_room(opencl, fast_env, tmp_path, options):
    with small_file_system(tmp_path / "small", options) as folder:
        assert calls(fast_env, folder) == SUMS
        assert not list(folder.rglob(".pocl-*")) and not list(folder.rglob(".room-*"))


def test_a_disk_that_gets_full_is_told_and_the_process_goes_on(opencl, fast_env, tmp_path):
    with small_file_system(tmp_path / "small", "size=16m") as folder:
        first, again, told, last = calls(fast_env, folder, "fill")
        assert [first, again, last] == SUMS
        assert "OpenCL can't compile a kernel" in told and "No space left on device" in told and "PYCUDA_CONV_CACHE_DIR" in told


def test_a_folder_that_vanishes_is_made_again(opencl, fast_env, tmp_path):
    folder = tmp_path / "cache"
    assert calls(fast_env, folder, "vanish") == SUMS


@pytest.mark.parametrize(("number", "told"), [(errno.EDQUOT, "quota"), (errno.ENOSPC, "No space"), (errno.EIO, "error")])
def test_room_is_asked_for_by_reserving_it(monkeypatch, tmp_path, number, told):
    assert pocl.why_no_room(tmp_path) is None and not list(tmp_path.iterdir())

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert told in pocl.why_no_room(tmp_path) and not list(tmp_path.iterdir())
    assert "No such file" in pocl.why_no_room(tmp_path / "missing")


def test_without_a_home_nothing_is_kept_and_nothing_is_written_beside_the_program(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYCUDA_CONV_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")  # as it is where nobody knows the user
    monkeypatch.setattr(cache, "_said", set())
    assert cache.trusted_folder() is None and get("a", b"good") == b"good"
    assert "nothing names the user's home folder" in caplog.text
    assert tune.user_table().get("some GPU", "some problem") is None
    assert not list(tmp_path.iterdir())


def test_the_cache_s_folder_does_not_depend_on_the_current_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/kept", "kept", str(tmp_path / "kept")):
        monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", given)
        assert cache.cache_dir() == tmp_path / "kept"
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", "")
    assert cache.cache_dir().name == "pycuda_conv"
