#!/bin/bash
# Runs the tests and prints a summary:  scripts/test.sh [fast] [guest] [xen] [crash]
#
# The last line is "N passed, M failed" over all test programs; the exit code is 0 only if none failed. The full output of each run is
# kept in target/test-logs.
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/check-toolchain.sh || exit 1

logs=target/test-logs
passed=0 failed=0 ignored=0
# Tests start the release build of the daemon.
export MQBLK=$PWD/target/release/mqblk
mkdir -p "$logs" && rm -f "$logs/summary"

# Every run uses the same packages and features, so that nothing is built twice. The test programs guest and xen need a prepared
# machine.
tests=(cargo test --profile checked --workspace --features mqblk-tests/guest,mqblk-tests/xen)
without_machines=(--lib --bins --test '[!gx]*' --test 'g[!u]*')

# Built together: separately each would enable other features of the libraries, which would be built twice.
release=(cargo build --release -p mqblk -p mqblk-tests --bin mqblk --bin instruction-budget)

# Debian's mawk buffers its input by default, which would delay lines.
awk=(awk)
if awk -W version 2>&1 </dev/null | grep -q mawk; then awk=(awk -W interactive); fi

# Condenses cargo's output: errors, one line per test program with its seconds, and one line per test if EACH is set, else one per module
# of a program in tests/tests.
condense() {
    "${awk[@]}" -v each="$1" '
        # Counts a result of a test by its module: the part of its name before the first "::".
        function count(test, result) { sub(/::.*/, "", test); if (!(test in modules)) { modules[test]; order[++n] = test }
                                       seen[test, result]++ }
        /^ +Running /            { name = $2 == "unittests" ? $NF : $2; sub(/.*\/deps\//, "", name); sub(/\)$/, "", name)
                                   sub(/-[0-9a-f]+$/, "", name); sub(/\/main\.rs$/, "", name)
                                   by_module = !each && $2 != "unittests"; n = 0; split("", modules); split("", seen); next }
        /^ +Doc-tests /          { name = $2 " (documentation)"; by_module = n = 0; next }
        /^test .* \.\.\. FAILED/ { print "    FAILED " $2; fflush(); if (by_module && $2 ~ /::/) count($2, "failed"); next }
        /^test .* \.\.\. ok/     { if (each) { print "    ok     " $2; fflush() } if (by_module && $2 ~ /::/) count($2, "ok"); next }
        /^test .* \.\.\. ignored/ { if (by_module && $2 ~ /::/) count($2, "ignored"); next }
        /^test result: /         { if ($4 + $6 + $8 > 0)
                                       printf "  %-34s %4d passed %3d failed %3d ignored %9s\n", name, $4, $6, $8, $NF
                                   for (i = 1; i <= n; i++)
                                       printf "    %-32s %4d        %3d        %3d\n", order[i], seen[order[i], "ok"],
                                              seen[order[i], "failed"], seen[order[i], "ignored"]
                                   n = 0; fflush(); next }
        /^(error|warning: unused)/ { print; fflush() }
    '
}

# install_missing PROGRAM: installs Debian's package of this name. Where that cannot be done the tests that need it fail and say so.
install_missing() {
    command -v "$1" >/dev/null || { apt-get update -qq && apt-get install -y -qq "$1"; } >/dev/null 2>&1
}

# run NAME EACH COMMAND...: runs one "cargo test" and adds its counts to the totals.
run() {
    local name=$1 each=$2 log=$logs/$1.log code p f i
    shift 2
    "$@" </dev/null 2>&1 | tee "$log" | condense "$each"
    code=${PIPESTATUS[0]}
    read -r p f i < <(awk '/^test result: /{ p += $4; f += $6; i += $8 } END { print p + 0, f + 0, i + 0 }' "$log")
    if [ "$code" -ne 0 ]; then
        local died
        died=$(awk '/^error: test failed, to rerun/ { n++ } /^test result: FAILED/ { n-- } END { print (n > 0 ? n : 0) }' "$log")
        # Output of the failed tests: from each "failures:" to its summary.
        sed -n '/^failures:$/,/^test result:/p' "$log" | head -n 300
        if [ "$died" -gt 0 ]; then
            # A test program that is killed by a signal prints no summary and counts as one failed test.
            echo "  $died test program(s) ended before all their tests had run:"
            grep -B 20 'process didn.t exit successfully' "$log" | grep -v '^test .* ok$' | head -n 100
        elif [ "$f" -eq 0 ]; then
            # The build failed or no test ran: counts as a failure.
            died=1
            echo "  '$*' ended with code $code:"
            tail -n 40 "$log"
        fi
        f=$((f + died))
        echo "  the whole output is in $log"
    fi
    passed=$((passed + p)) failed=$((failed + f)) ignored=$((ignored + i))
}

for part in "$@"; do
    case $part in
        fast)
            echo "building (the first time takes minutes)"
            run build '' "${release[@]}"
            run build-tests '' "${tests[@]}" --no-run
            [ "$failed" -eq 0 ] || break
            # Counts instructions. Without it the budget test fails with a message.
            install_missing valgrind
            # Printed commands use it.
            install_missing socat
            echo "tests without virtual machines"
            run fast '' "${tests[@]}" "${without_machines[@]}" --no-fail-fast
            run documentation '' "${tests[@]}" --doc
            echo "instructions for a request, in a release build"
            MQBLK_BUDGET_PROGRAM=$PWD/target/release/instruction-budget \
                run budget '' "${tests[@]}" --test budget -- --include-ignored
            ;;
        guest)
            echo "preparing the guest: QEMU, a Debian kernel, fio, SCSI tools"
            tests/guest/prepare.sh </dev/null || {
                failed=$((failed + 1))
                echo "  the guest could not be prepared, so its tests did not run"
                break
            }
            install_missing socat
            echo "building the guest's tests"
            run guest-build '' "${release[@]}"
            echo "tests with virtual machines (minutes each where there is no KVM)"
            run guest each "${tests[@]}" --test guest --no-fail-fast -- --test-threads=1
            ;;
        xen)
            echo "preparing Xen: the hypervisor, dom0's kernel and toolstack, a PV guest"
            tests/xen/prepare.sh </dev/null || {
                failed=$((failed + 1))
                echo "  Xen could not be prepared, so its tests did not run"
                break
            }
            echo "building Xen's tests"
            run xen-build '' "${release[@]}"
            echo "tests on Xen, which QEMU emulates (half a minute each or more)"
            run xen each "${tests[@]}" --test xen --no-fail-fast -- --test-threads=1
            ;;
        crash)
            echo "building the crash tests"
            run crash-build '' "${release[@]}"
            echo "daemons that are killed and stopped under verified load (half a minute to a minute each or more)"
            rm -f "$logs/crash.json"
            MQBLK_CRASH=full run crash each "${tests[@]}" --test crash --no-fail-fast -- --test-threads=1 --nocapture
            [ ! -f "$logs/crash.json" ] || { echo "figures, also in $logs/crash.json:"; cat "$logs/crash.json"; }
            ;;
        *)
            echo "scripts/test.sh: found '$part', expected fast, guest, xen or crash" >&2
            exit 2
            ;;
    esac
done

[ "$ignored" -eq 0 ] || echo "$ignored tests were ignored"
echo "$passed passed, $failed failed" | tee "$logs/summary"
[ "$failed" -eq 0 ]
