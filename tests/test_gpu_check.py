"""scripts/gpu_check.sh, with programs in place of nvidia-smi, compute-sanitizer and the interpreter that says what they should find."""

import os
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"
PROGRAMS = {
    "nvidia-smi": 'echo "GPU 0: one"; echo "GPU 1: another"',
    # the part that $BAD names has an error; each part notes the GPU that it was given
    "compute-sanitizer": """
        while [ "$1" != --part ]; do [ "$1" = --tool ] && tool=$2; shift; done
        part=${2%/*}; echo "$tool $CUDA_VISIBLE_DEVICES" >>"$SEEN"
        if [ "$part" = "$BAD" ]; then echo "BAD a case"; echo "========= ERROR SUMMARY: 2 errors"; exit 99; fi
        echo "ok a case"; echo "========= ERROR SUMMARY: 0 errors" """,
    # its tests take long with $SLOW, and one of them fails before
    "python": '''echo "pytest $CUDA_VISIBLE_DEVICES $*" >>"$SEEN"
        while [ "${1%=*}" != --failures ]; do shift; done
        if [ -n "$SLOW" ]; then echo "FAILED tests/test_x.py::test_z" >"${1#*=}"; echo ".... [ 40%]"; sleep 1000; fi
        ''' + '[ -z "$FAILS" ] || { echo "FAILED tests/test_x.py::test_y"; exit 1; }; echo "3 passed in 1s"',
}


@pytest.fixture
def checked(tmp_path):
    for name, text in PROGRAMS.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def run(*options, **environment):
        seen = tmp_path / "seen"
        seen.write_text("")
        env = {
            **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "PARTS": "4",
            "SEEN": str(seen), "BAD": "", "FAILS": "", "SLOW": "", **environment,
        }  # fmt: skip
        done = subprocess.run([SCRIPT, "--logs", tmp_path / "logs", *options], env=env, capture_output=True, text=True, timeout=900)
        return done, sorted(seen.read_text().splitlines())

    return run


def test_tests_and_memcheck_have_a_gpu_each(checked):
    done, seen = checked("--", "-k", "some")
    assert done.returncode == 0 and done.stdout.endswith("none\n"), done
    *checks, tests = seen
    assert checks == ["memcheck 1"] * 4 and tests.startswith("pytest 0 -m pytest -m gpu -q -n 14 --dist worksteal --failures=")
    assert tests.endswith("/failures.txt -k some") and "memcheck: " in done.stdout and "4 cases without an error" in done.stdout


@pytest.mark.parametrize("option, tool", [("--race", "racecheck"), ("--init", "initcheck")])
def test_other_tools_run_alone_on_all_gpus(checked, option, tool):
    done, seen = checked(option)
    assert done.returncode == 0
    assert seen == [f"{tool} 0"] * 2 + [f"{tool} 1"] * 2


@pytest.mark.parametrize("broken", [{"BAD": "3"}, {"FAILS": "1"}, {"BAD": "2", "FAILS": "1"}], ids=str)
def test_failures_come_last(checked, broken):
    done, _ = checked(**broken)
    table = done.stdout.partition("failures, logs in")[2]
    assert done.returncode == 1
    assert ("FAILED tests/test_x.py::test_y" in table) == ("FAILS" in broken)
    assert ("BAD a case" in table and "2 errors" in table) == ("BAD" in broken) and "0 errors" not in table


def test_what_is_cut_short_tells_what_failed_until_then(checked):
    began = time.monotonic()
    done, _ = checked("--seconds", "4", SLOW="1", ENDING="2")
    assert time.monotonic() - began < 500 and done.returncode == 1
    assert "cut short, at [ 40%]" in done.stdout and "FAILED tests/test_x.py::test_z" in done.stdout.partition("failures, logs in")[2]


def test_unknown_options_are_refused(checked):
    done, seen = checked("--fast")
    assert done.returncode == 2 and "--fast" in done.stderr and not seen
