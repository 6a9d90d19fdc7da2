#!/usr/bin/env bash
# Makes the virtual environment that the Makefile uses: this package in place, with the tools, and what runs the
# kernels on this machine, PyCUDA where there are a GPU and nvcc, else PyOpenCL with PoCL.
#
#   scripts/setup_env.sh [folder]        the folder is .venv by default
#   PYTHON=python3.12 scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

apt_install() {  # apt_install PACKAGE...; false where that is not possible
  command -v apt-get >/dev/null || return 1
  local root=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || return 1
    root=(sudo -n)
  fi
  say "installing $* with apt-get"
  "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# as pycuda_conv.runtime.compiler looks for it
find_nvcc() {
  local root
  command -v nvcc && return
  for root in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
    if [ -n "$root" ] && [ -x "$root/bin/nvcc" ]; then echo "$root/bin/nvcc"; return; fi
  done
  return 1
}

has_gpu() {  # the driver's own answer, as PyCUDA would get it
  "$python" - <<'PY'
import ctypes, sys
try:
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
except OSError:
    sys.exit(1)
sys.exit(0 if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0 else 1)
PY
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is missing or older than Python 3.10; set PYTHON=..."
if [ ! -x "$venv/bin/python" ]; then
  # Debian ships the module venv apart from Python
  "$python" -c 'import ensurepip' 2>/dev/null || apt_install python3-venv || fail "$python can't make virtual environments; install python3-venv"
  "$python" -m venv "$venv"
fi

if nvcc=$(find_nvcc) && has_gpu; then
  backend=cuda
  # PyCUDA is built here and finds the toolkit's headers beside the nvcc on the PATH, which may be a link or a wrapper
  toolkit=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
  export PATH="${toolkit:-$(dirname "$nvcc")/..}/bin:$PATH"
else
  backend=cpu
fi
say "installing into $venv with the extra '$backend'"
"$venv/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt -e ".[$backend,test,bench,docs]"

why_not() {
  "$venv/bin/python" -c "from pycuda_conv.runtime.$1 import why_not; print(why_not() or '', end='')"
}
if [ $backend = cuda ]; then
  reason=$(why_not cuda)
else
  reason=$(why_not opencl)
  # the PoCL in PyOpenCL's wheel does not know every CPU
  if [ -n "$reason" ] && apt_install pocl-opencl-icd; then reason=$(why_not opencl); fi
fi
[ -z "$reason" ] || fail "no convolution can run here: $reason"
say "ready"
