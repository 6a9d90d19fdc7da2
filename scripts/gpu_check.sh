#!/usr/bin/env bash
# Everything that only a GPU can say of this tree: the GPU tests on the first GPU, and beside them, on the second, NVIDIA's memory
# checker over every kernel (tests/sanitize.py). On two H200s with 32 cores and an empty kernel cache that takes under ten minutes.
#
#   scripts/gpu_check.sh [--logs FOLDER] [-- PYTEST ARGUMENTS]
#   scripts/gpu_check.sh --race      racecheck over every kernel instead, on all GPUs
#   scripts/gpu_check.sh --init      initcheck over every kernel instead, on all GPUs
#
# The table of failures comes last. The status is 0 if there are none. PYTHON names the interpreter; WORKERS and PARTS say how many
# processes test and check side by side, 14 and 12 by default. With one GPU both use it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} workers=${WORKERS:-14} parts=${PARTS:-12} logs=build/gpu_check tool=memcheck
while [ $# -gt 0 ]; do
  case $1 in
    --race) tool=racecheck ;;
    --init) tool=initcheck ;;
    --logs) logs=${2:?"--logs needs a folder"}; shift ;;
    --) shift; break ;;
    *) echo "gpu_check: $1 is not known; options are --race, --init, --logs FOLDER, and -- before arguments of pytest" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$logs" && rm -f "$logs"/*.log
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "gpu_check: nvidia-smi lists no GPU" >&2; exit 2; }
began=$SECONDS

check() {  # check PART GPU: a part of the cases under the sanitizer
  CUDA_VISIBLE_DEVICES=$2 compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 \
    "$python" tests/sanitize.py --part "$1/$parts" >"$logs/$tool-$1.log" 2>&1
  echo $? >"$logs/$tool-$1.status"
}

tested=0
if [ $tool = memcheck ]; then
  CUDA_VISIBLE_DEVICES=0 "$python" -m pytest -m gpu -q -n "$workers" --dist worksteal "$@" >"$logs/pytest.log" 2>&1 &
  tests=$!
fi
checks=()
for part in $(seq "$parts"); do
  # beside the tests the checker takes the last GPU; alone it takes all
  if [ $tool = memcheck ]; then gpu=$((gpus - 1)); else gpu=$((part % gpus)); fi
  check "$part" "$gpu" &
  checks+=($!)
done
wait "${checks[@]}"
echo "$tool: $((SECONDS - began)) s"
if [ $tool = memcheck ]; then wait "$tests" || tested=$?; echo "pytest: $((SECONDS - began)) s"; tail -n 1 "$logs/pytest.log"; fi

echo
echo "failures, logs in $logs"
failed=0
if [ "$tested" -ne 0 ]; then
  failed=1
  grep -E '^(FAILED|ERROR)' "$logs/pytest.log" || { echo "pytest ended with status $tested:"; tail -n 5 "$logs/pytest.log"; }
fi
for part in $(seq "$parts"); do
  log=$logs/$tool-$part.log
  status=$(cat "${log%.log}.status")
  [ "$status" = 0 ] && continue
  failed=1
  grep -E '^BAD|ERROR SUMMARY' "$log" | grep -v 'SUMMARY: 0 errors' | sed "s|^|$tool part $part: |" || true
  grep -qE '^BAD|ERROR SUMMARY' "$log" || { echo "$tool part $part ended with status $status:"; tail -n 3 "$log"; }
done
[ $failed -eq 0 ] && echo "none"
exit $failed
