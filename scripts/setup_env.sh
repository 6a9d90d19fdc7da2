#!/usr/bin/env bash
# Makes the virtual environment that the Makefile uses: this package in place, and what runs the kernels on this machine, PyCUDA where there
# are a GPU and nvcc, else PyOpenCL with PoCL. It says what it does, step by step.
#
#   scripts/setup_env.sh [FOLDER] [WHAT]    FOLDER is .venv by default; WHAT is what `make verify` needs, or by default all that `make test` does
#   PYTHON=python3.12 scripts/setup_env.sh
#   SYSTEM_PACKAGES=install ...             install the system's packages that are missing, without a question
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
what=${2:-test}
python=${PYTHON:-python3}
case $what in
  verify) extras=torch ;;
  test) extras=test,bench,docs ;;
  *) echo "setup: WHAT must be verify or test, got '$what'" >&2; exit 1 ;;
esac

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# system_packages NAME...: installs them with apt-get if the user agrees; otherwise says how, and is false
system_packages() {
  local root=() answer
  if ! command -v apt-get >/dev/null; then
    say "this needs, by their names in Debian: $*"
    return 1
  fi
  [ "$(id -u)" -eq 0 ] || root=(sudo)
  local command="${root[*]} apt-get install $*"
  case ${SYSTEM_PACKAGES:-ask} in
    install) ;;
    ask)
      if [ ! -t 0 ]; then say "missing: $*. Install it with: ${command# } (SYSTEM_PACKAGES=install lets this script do so)"; return 1; fi
      read -r -p "setup: missing: $*. Run '${command# }' now? [y/N] " answer
      case $answer in [yY]*) ;; *) return 1 ;; esac ;;
    *) fail "SYSTEM_PACKAGES must be ask or install, got '$SYSTEM_PACKAGES'" ;;
  esac
  say "installing $* with apt-get"
  "${root[@]}" apt-get update -qq && "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
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

# what takes pip long: downloads of a megabyte and more, builds, and the copying at the end
progress() {
  awk '/(Downloading|Using cached) .*\((|[0-9.]+ )[0-9.]+ *[MG]B/ { sub(/^ */, ""); sub(/ -> .*/, ""); print "setup:   " $0 }
       /Processing .*\.whl/ { sub(/.*\//, ""); sub(/ \(.*/, ""); print "setup:   " $0 }
       /^ *Building (wheel|editable)/ { sub(/^ */, ""); print "setup:   " $0 }
       /^Installing collected packages/ { print "setup:   Installing " NF - 3 " packages" }
       { fflush() }' >&2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is missing or older than Python 3.10; set PYTHON=..."
if [ ! -x "$venv/bin/python" ]; then
  say "1 of 3: making $venv"
  # Debian ships the module venv apart from Python
  "$python" -c 'import ensurepip' 2>/dev/null || system_packages python3-venv || fail "$python can't make virtual environments"
  "$python" -m venv "$venv"
fi

if nvcc=$(find_nvcc) && has_gpu; then
  backend=cuda
  # PyCUDA is built here and finds the toolkit's headers beside the nvcc on the PATH, which may be a link or a wrapper
  toolkit=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
  export PATH="${toolkit:-$(dirname "$nvcc")/..}/bin:$PATH"
  long="PyCUDA is built, which takes a minute or two"
else
  backend=cpu
  long="without a GPU and nvcc the kernels run on the CPU"
fi
say "2 of 3: installing into $venv what 'make $what' needs ($long)"
compile=()
[ "$what" = test ] || compile=(--no-compile)  # torch alone has 2,000 modules, and a run compiles the few that it imports
"$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off ${compile[@]+"${compile[@]}"} -c constraints.txt -e ".[$backend,$extras]" | progress

say "3 of 3: trying a convolution's device"
why_not() {
  "$venv/bin/python" -c "from pycuda_conv.runtime.$1 import why_not; print(why_not() or '', end='')"
}
if [ $backend = cuda ]; then
  reason=$(why_not driver)
else
  reason=$(why_not opencl)
  # the PoCL in PyOpenCL's wheel does not know every CPU
  if [ -n "$reason" ] && system_packages pocl-opencl-icd; then reason=$(why_not opencl); fi
fi
[ -z "$reason" ] || fail "no convolution can run here: $reason"
say "ready"
