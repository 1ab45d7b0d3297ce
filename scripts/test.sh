#!/bin/bash
# Runs the tests and sums them up:  scripts/test.sh [fast] [guest] [xen] [crash]
#
# The last line is "N passed, M failed" over all test programs; the exit code is 0 only when nothing failed. The whole output
# of each run is kept in target/test-logs.
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/check-toolchain.sh || exit 1

logs=target/test-logs
passed=0 failed=0 ignored=0
# The daemon that tests start is the one that users run.
export MQBLK=$PWD/target/release/mqblk
mkdir -p "$logs" && rm -f "$logs/summary"

# Every run has the same packages and features, so that nothing is built twice. Test programs whose names begin with guest_ or xen_
# need a machine that was prepared.
tests=(cargo test --profile checked --workspace --features mqblk-tests/guest,mqblk-tests/xen)
without_machines=(--lib --bins --test '[!gx]*' --test 'g[!u]*')

# Both at once: one by one each has features of its own of the libraries, which then are built twice.
release=(cargo build --release -p mqblk -p mqblk-tests --bin mqblk --bin instruction-budget)

# Debian's awk reads a pipe in blocks unless it is told otherwise: then lines would come late.
awk=(awk)
if awk -W version 2>&1 </dev/null | grep -q mawk; then awk=(awk -W interactive); fi

# Shows of cargo's output what a person needs: errors, one line for each test program, and, where each test takes long, one
# for each test.
condense() {
    "${awk[@]}" -v each="$1" '
        /^ +Running /            { name = $2 == "unittests" ? $NF : $2; sub(/.*\/deps\//, "", name); sub(/\)$/, "", name)
                                   sub(/-[0-9a-f]+$/, "", name); next }
        /^ +Doc-tests /          { name = $2 " (documentation)"; next }
        /^test .* \.\.\. FAILED/ { print "    FAILED " $2; fflush(); next }
        /^test .* \.\.\. ok/     { if (each) { print "    ok     " $2; fflush() } next }
        /^test result: /         { if ($4 + $6 + $8 > 0) printf "  %-34s %4d passed %3d failed %3d ignored\n", name, $4, $6, $8
                                   fflush(); next }
        /^(error|warning: unused)/ { print; fflush() }
    '
}

# install_missing PROGRAM: installs Debian's package of this name. Where that cannot be done the tests that need it fail and say so.
install_missing() {
    command -v "$1" >/dev/null || { apt-get update -qq && apt-get install -y -qq "$1"; } >/dev/null 2>&1
}

# run NAME EACH COMMAND...: runs one "cargo test" and adds its counts.
run() {
    local name=$1 each=$2 log=$logs/$1.log code p f i
    shift 2
    "$@" </dev/null 2>&1 | tee "$log" | condense "$each"
    code=${PIPESTATUS[0]}
    read -r p f i < <(awk '/^test result: /{ p += $4; f += $6; i += $8 } END { print p + 0, f + 0, i + 0 }' "$log")
    if [ "$code" -ne 0 ]; then
        local died
        died=$(awk '/^error: test failed, to rerun/ { n++ } /^test result: FAILED/ { n-- } END { print (n > 0 ? n : 0) }' "$log")
        # What the failed tests printed: from each "failures:" to its summary.
        sed -n '/^failures:$/,/^test result:/p' "$log" | head -n 300
        if [ "$died" -gt 0 ]; then
            # A test program that ends by a signal prints no summary; each counts as one failed test.
            echo "  $died test program(s) ended before all their tests had run:"
            grep -B 20 'process didn.t exit successfully' "$log" | grep -v '^test .* ok$' | head -n 100
        elif [ "$f" -eq 0 ]; then
            # Nothing was built or nothing was run: that must not look like success.
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
            # It counts instructions.
            install_missing valgrind
            # Commands of documents have it.
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
            run guest each "${tests[@]}" --test 'guest_*' --no-fail-fast -- --test-threads=1
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
            run xen each "${tests[@]}" --test 'xen_*' --no-fail-fast -- --test-threads=1
            ;;
        crash)
            echo "building the crash tests"
            run crash-build '' "${release[@]}"
            echo "daemons that are killed and stopped under verified load (half a minute to a minute each or more)"
            rm -f "$logs/crash.json"
            MQBLK_CRASH=full run crash each "${tests[@]}" --test 'crash_*' --no-fail-fast -- --test-threads=1 --nocapture
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
