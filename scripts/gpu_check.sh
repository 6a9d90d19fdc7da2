#!/usr/bin/env bash
# Everything that only a GPU can say of this tree: the GPU tests on the first GPU, and beside them, on the second, NVIDIA's memory
# checker over every kernel (tests/sanitize.py). On two H200s with 32 cores and an empty kernel cache that takes under ten minutes.
#
#   scripts/gpu_check.sh [--seconds N] [--logs FOLDER] [-- PYTEST ARGUMENTS]
#   scripts/gpu_check.sh --race      racecheck over every kernel instead, on all GPUs
#   scripts/gpu_check.sh --init      initcheck over every kernel instead, on all GPUs
#
# After N seconds all of it is ended. What did not run is told then, and what failed until then is in the table all the same.
# The table of failures comes last. The status is 0 if there are none and nothing was cut short, 3 if only that. PYTHON names the
# interpreter; WORKERS and PARTS say how many processes test and check side by side, 14 and 12 by default; TEST_GPU and CHECK_GPU are the
# numbers of GPUs where others than the first and the last are to test and check. With one GPU both use it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} workers=${WORKERS:-14} parts=${PARTS:-12} logs=build/gpu_check tool=memcheck seconds=86400
while [ $# -gt 0 ]; do
  case $1 in
    --race) tool=racecheck ;;
    --init) tool=initcheck ;;
    --seconds) seconds=${2:?"--seconds needs a number"}; shift ;;
    --logs) logs=${2:?"--logs needs a folder"}; shift ;;
    --) shift; break ;;
    *) echo "gpu_check: $1 is not known; options are --race, --init, --seconds N, --logs FOLDER, and -- before arguments of pytest" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$logs" && rm -f "$logs"/*.log "$logs"/*.status "$logs"/failures.txt
logs=$(cd "$logs" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "gpu_check: nvidia-smi lists no GPU" >&2; exit 2; }
began=$SECONDS ending=${ENDING:-15}  # seconds in which processes end that were told to

limited() {  # limited COMMAND: told to stop when the time is over; shells let what runs beside them ignore that otherwise
  env --default-signal=INT timeout --signal=INT --kill-after=$ending $((seconds - ending)) "$@"
}

check() {  # check PART GPU: a part of the cases under the sanitizer
  CUDA_VISIBLE_DEVICES=$2 limited compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 \
    "$python" tests/sanitize.py --part "$1/$parts" --seconds $((seconds > 60 ? seconds - 40 : seconds / 2)) >"$logs/$tool-$1.log" 2>&1
  echo $? >"$logs/$tool-$1.status"
}

tested=0
if [ $tool = memcheck ]; then
  CUDA_VISIBLE_DEVICES=${TEST_GPU:-0} limited "$python" -m pytest -m gpu -q -n "$workers" --dist worksteal --failures="$logs/failures.txt" "$@" \
    >"$logs/pytest.log" 2>&1 &
  tests=$!
fi
checks=()
for part in $(seq "$parts"); do
  # beside the tests the checker takes the last GPU; alone it takes all
  if [ $tool = memcheck ]; then gpu=$((gpus - 1)); else gpu=$((part % gpus)); fi
  check "$part" "${CHECK_GPU:-$gpu}" &
  checks+=($!)
done
wait "${checks[@]}"
cut=0
right=$(cat "$logs/$tool"-*.log | grep -c '^ok ')
left=$(cat "$logs/$tool"-*.log | grep '^not begun: ' | awk '{ n += $3 } END { print n + 0 }')
echo "$tool: $((SECONDS - began)) s, $right cases without an error$([ "$left" -eq 0 ] || echo ", $left not begun")"
[ "$left" -eq 0 ] || cut=1
if [ $tool = memcheck ]; then
  wait "$tests" || tested=$?
  echo "pytest: $((SECONDS - began)) s"
  if [ $tested = 124 ] || [ $tested = 137 ] || [ $tested = 130 ]; then
    cut=1
    echo "the tests were cut short, at $(grep -oE '\[ *[0-9]+%\]' "$logs/pytest.log" | tail -n 1)"
  else
    tail -n 1 "$logs/pytest.log"
  fi
fi

echo
echo "failures, logs in $logs"
failed=0
if [ -s "$logs/failures.txt" ]; then
  failed=1
  grep -E '^(FAILED|ERROR) ' "$logs/failures.txt"
elif [ "$tested" -ne 0 ] && [ $cut -eq 0 ]; then
  failed=1
  grep -E '^(FAILED|ERROR)' "$logs/pytest.log" || { echo "pytest ended with status $tested:"; tail -n 5 "$logs/pytest.log"; }
fi
for part in $(seq "$parts"); do
  log=$logs/$tool-$part.log
  status=$(cat "${log%.log}.status")
  [ "$status" = 0 ] && continue
  if grep -qE '^BAD|ERROR SUMMARY: [1-9]|^=+ (Invalid|Race|Uninit|Error:)' "$log"; then
    failed=1
    grep -E '^BAD|ERROR SUMMARY' "$log" | grep -v 'SUMMARY: 0 errors' | sed "s|^|$tool part $part: |" || true
  elif [ "$status" = 124 ] || [ "$status" = 130 ] || [ "$status" = 137 ]; then
    cut=1
    echo "$tool part $part was cut short after $(grep -c '^ok ' "$log") cases, without an error until then"
  else
    failed=1
    echo "$tool part $part ended with status $status:"
    tail -n 3 "$log"
  fi
done
[ $failed -eq 0 ] && echo "none"
[ $failed -eq 0 ] && [ $cut -ne 0 ] && exit 3
exit $failed
