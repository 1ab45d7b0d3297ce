#!/bin/bash
# Fuzzes every target, or those named:  scripts/fuzz.sh [TARGET...]
#
# Each runs for FUZZ_SECONDS (60). Prints executions and coverage of each. New inputs go to target/fuzz/corpus; the
# committed ones are unchanged. The exit code is 0 only if no target failed; the failing input is in fuzz/artifacts.
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/check-toolchain.sh || exit 1

if ! command -v rustup >/dev/null; then
    echo "scripts/fuzz.sh: found no rustup, expected it for nightly Rust: https://rustup.rs" >&2
    exit 1
fi
if ! rustup run nightly rustc --version >/dev/null 2>&1; then
    echo "installing nightly Rust, which the fuzzer needs"
    rustup toolchain install nightly --profile minimal || exit 1
fi
if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "installing cargo-fuzz"
    cargo install --locked cargo-fuzz || exit 1
fi

seconds=${FUZZ_SECONDS:-60}
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)
logs=target/fuzz
mkdir -p "$logs"
echo "building (the first time takes minutes)"
cargo +nightly fuzz build >"$logs/build.log" 2>&1 || { tail -n 40 "$logs/build.log"; exit 1; }
failed=0
printf '%-16s %8s %12s %8s %9s\n' target seconds executions edges features
for target in "${targets[@]}"; do
    mkdir -p "$logs/corpus/$target"
    log=$logs/$target.log
    cargo +nightly fuzz run "$target" "$logs/corpus/$target" "fuzz/corpus/$target" -- \
        -max_total_time="$seconds" -max_len=4096 -timeout=20 -print_final_stats=1 >"$log" 2>&1
    code=$?
    executions=$(awk '/^stat::number_of_executed_units/ { print $2 }' "$log")
    read -r edges features < <(awk '{ for (i = 1; i < NF; i++) { if ($i == "cov:") c = $(i + 1); if ($i == "ft:") f = $(i + 1) } }
                                    END { print c + 0, f + 0 }' "$log")
    printf '%-16s %8s %12s %8s %9s\n' "$target" "$seconds" "${executions:-?}" "$edges" "$features"
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "$target: failed with code $code; the end of $log:"
        tail -n 40 "$log"
    fi
done
exit $failed
