#!/usr/bin/env bash
# Make .venv-pycuda, a Python with PyCUDA for tests/test_pycuda.py, where there is a binary of PyCUDA for a Python of this machine. Says what it did.
#
#   scripts/pycuda_env.sh [FOLDER_OF_WHEELS]
#
# pip's own settings hold, PIP_FIND_LINKS among them. Where nothing is found the tests are skipped: this never fails.
set -u
cd "$(dirname "$0")/.."
venv=.venv-pycuda
if [ -x $venv/bin/python ] && $venv/bin/python -c "import pycuda, numpy" 2>/dev/null; then echo "$venv is there"; exit 0; fi
for python in python3.12 python3.13 python3.11 python3; do
  command -v $python >/dev/null || continue
  # pyenv's commands serve the version that is asked for
  if ! $python -c "" 2>/dev/null; then
    version=$(pyenv versions --bare 2>/dev/null | grep -m 1 "^${python#python}\.") && export PYENV_VERSION=$version || continue
  fi
  rm -rf $venv
  $python -m venv $venv 2>/dev/null || continue
  if $venv/bin/python -m pip install -q --only-binary :all: ${1:+--find-links "$1"} pycuda numpy >/dev/null 2>&1; then
    echo "$venv has PyCUDA for $($venv/bin/python -V)"
    exit 0
  fi
  unset PYENV_VERSION
done
rm -rf $venv
echo "no binary of PyCUDA for a Python of this machine: its tests without a GPU are skipped"
