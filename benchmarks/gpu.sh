#!/usr/bin/env bash
# On a machine with a GPU: the tests marked `gpu`, the core cases of the kernel tests, then the timings of
# `benchmarks/run.py gpu`. At most 6 minutes. PYTHON names the Python that has the project, torch and Triton;
# OUT the folder for results (default: benchmarks/results); logs go to build/gpu. Exits with 1 where a test or a gate
# failed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
out=${OUT:-benchmarks/results}
logs=build/gpu
mkdir -p "$out" "$logs"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TRITON_DEFAULT_FP_FUSION=1

"$python" -P - <<'VERSIONS'
import platform, torch, triton
if not torch.cuda.is_available():
    raise SystemExit("torch sees no GPU here: benchmarks/gpu.sh measures one")
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__,
      "cuda", torch.version.cuda, "hip", torch.version.hip)
for index in range(torch.cuda.device_count()):
    print("device", index, torch.cuda.get_device_properties(index))
VERSIONS
git rev-parse HEAD 2>/dev/null || true

# Compilation is what takes long, and it is done by the CPU: one process a file.
declare -A suites=(
    [rel_attention]="core and not dtype0 and not dtype2" [rel_attention_decode]="core and not dtype0 and not dtype2"
    [kv_cache]="not torch" [cache_fp8]="" [short_conv]="not torch" [norm]="not torch" [embedding]="not torch"
    [activation]="not torch" [routing]="not torch" [expert_sort]="" [moe_gemm]="not torch and not any"
    [moe_gemm_fp4]="not any" [far_addresses]="" [own_tiles]=""
)
failed=0
pids=()
timeout 60 "$python" -P -m pytest -q -p no:cacheprovider -m gpu tests >"$logs/marked.log" 2>&1 &
pids+=("$!")
for name in "${!suites[@]}"; do
    timeout 150 "$python" -P -m pytest -q -p no:cacheprovider -k "${suites[$name]}" "tests/kernels/test_$name.py" \
        >"$logs/$name.log" 2>&1 &
    pids+=("$!")
done
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
for log in "$logs"/*.log; do
    printf '%s: %s\n' "$(basename "$log" .log)" "$(tail -n 1 "$log")"
done
printf 'tests took %ss\n' "$SECONDS"

timeout $((350 - SECONDS)) "$python" -P benchmarks/run.py gpu --out "$out" || failed=1
printf 'finished after %ss\n' "$SECONDS"
exit "$failed"
