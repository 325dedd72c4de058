#!/usr/bin/env bash
# Every GPU test on a machine that is lent for minutes: `bash tests/gpu/run_all.sh [FOLDER FOR LOGS]`, 6 minutes on an
# H200 with 16 cores. Five files at a time (JOBS) share the GPU; those that measure time or fill the memory follow alone.
# Where packages cannot be installed, put a folder of them on PYTHONPATH first (shared/gpu/bundle.sh makes one).
cd "$(dirname "$0")/../.." || exit 1
export LOGS=${1:-/tmp/gpu-tests} PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=2
unset PYTHONDONTWRITEBYTECODE  # every process would compile all packages anew: start-up tests fail, files take twice as long
mkdir -p "$LOGS"
python -m compileall -q -j 16 ${PYTHONPATH//:/ } > /dev/null 2>&1

one() {
  local began=$SECONDS
  timeout -s KILL "$2" python -m pytest -q -m gpu -p no:cacheprovider "tests/gpu/$1.py" > "$LOGS/$1.log" 2>&1
  local code=$?
  echo "$1: $(tail -1 "$LOGS/$1.log") ($((SECONDS - began)) s)"
  return $code
}
export -f one

alone="test_second_start_gpu test_snapshots_gpu test_start_up_gpu test_together_gpu test_fit_gpu"
failed=0
one test_kernels_ahead 580 & ahead=$!  # processors, hardly the GPU
find tests/gpu -name 'test_*.py' -exec basename -s .py {} + | grep -vx test_kernels_ahead \
  | grep -vxF "$(tr ' ' '\n' <<< "$alone")" | xargs -P "${JOBS:-5}" -I{} bash -c 'one {} 300' || failed=1
for file in $alone; do one "$file" 200 || failed=1; done
wait $ahead || failed=1
grep -hE '^(FAILED|ERROR)' "$LOGS"/*.log
exit $failed
