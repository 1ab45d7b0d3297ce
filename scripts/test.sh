#!/bin/bash
# Runs the tests and prints a summary:  scripts/test.sh [long] [fast] [guest] [xen] [crash] [ceph] [hour] [deb] [libvirt] [soak]
#                                       scripts/test.sh again        those that failed in the last run
#
# "long": with the tests of virtual machines that are otherwise left out (#[ignore = "long: ..."]), so that `make test`
# takes about 25 minutes on two cores.
#
# The last line is "N passed, M failed" over all test programs; the exit code is 0 only if none failed. The full output of each run is
# kept in target/test-logs, the tests that failed in target/test-logs/failed.
set -uo pipefail
cd "$(dirname "$0")/.."

# A result must not depend on who starts the tests: they get default signal dispositions (a shell ignores SIGINT for what it starts in the
# background), a fixed locale and umask, a home and a temporary folder of their own on a disk, and no variables but those listed here.
if [ -z "${MQBLK_TEST_FOLDER:-}" ]; then
    base=/var/tmp
    [ -w "$base" ] || base=/tmp
    MQBLK_TEST_FOLDER=$(mktemp -d "$base/mqblk.XXXXXX") || exit 1
    mkdir "$MQBLK_TEST_FOLDER/home" "$MQBLK_TEST_FOLDER/tmp"
    # Tests of other users make files there, too.
    chmod 755 "$MQBLK_TEST_FOLDER" && chmod 1777 "$MQBLK_TEST_FOLDER/tmp"
    keep=()
    while IFS= read -r name; do
        case $name in
            PATH | USER | LOGNAME | TERM | CI | CC | CARGO_* | RUST* | SSL_CERT_* | *_proxy | *_PROXY | MQBLK*) keep+=("$name=${!name}") ;;
        esac
    done < <(compgen -e)
    umask 022
    trap '' HUP INT TERM # the tests get them
    env -i --default-signal "${keep[@]}" CARGO_HOME="${CARGO_HOME:-${HOME:-/root}/.cargo}" RUSTUP_HOME="${RUSTUP_HOME:-${HOME:-/root}/.rustup}" \
        HOME="$MQBLK_TEST_FOLDER/home" TMPDIR="$MQBLK_TEST_FOLDER/tmp" LC_ALL=C.UTF-8 MQBLK_TEST_FOLDER="$MQBLK_TEST_FOLDER" "$0" "$@" </dev/null
    code=$?
    rm -rf "$MQBLK_TEST_FOLDER"
    exit $code
fi
scripts/check-toolchain.sh || exit 1
. scripts/apt.sh

with_long=(--include-ignored --skip the_vmm_alone --skip storage_that_hangs_at_the_switch)
long=()
# Tests that need root are ignored without it: their names begin with as_root.
as_root=()
[ "$(id -u)" -ne 0 ] || as_root=(--include-ignored)
for part in "$@"; do
    case $part in
        fast | guest | xen | crash | ceph | hour | deb | libvirt) ;;
        long) long=("${with_long[@]}") ;;
        again) [ -s target/test-logs/failed ] || { echo "scripts/test.sh: no test failed in the last run" && exit 0; } ;;
        # All of them, longer: hours.
        soak)
            set -- fast crash guest xen ceph hour deb libvirt
            long=("${with_long[@]}")
            export MQBLK_CRASH=full MQBLK_RESTARTS=12 MQBLK_TAKEOVERS=12 MQBLK_MIGRATIONS=10 MQBLK_POWER_CUTS=200 MQBLK_XEN_KILLS=10
            export MQBLK_BARRIER_SEEDS=4000 MQBLK_BLKIF_SEEDS=400 MQBLK_CANCEL_SEEDS=400 MQBLK_COMPRESSED_SECONDS=7200 MQBLK_LAYOUT_SEEDS=4000 MQBLK_MERGE_SEEDS=400
            export MQBLK_TMF_SEEDS=4000 MQBLK_VERB_RACE_SECONDS=60 MQBLK_VIRTIO_CRASH_SEEDS=200 MQBLK_FUZZ_BATCHES=20000 MQBLK_ORACLE_SECONDS=600 MQBLK_QUEUE_MOVES=20000 MQBLK_REPETITIONS=10
            ;;
        *)
            echo "scripts/test.sh: found '$part', expected long, fast, guest, xen, crash, ceph, hour, deb, libvirt, soak or again" >&2
            exit 2
            ;;
    esac
done

# Seconds that one run of cargo may take, without the long tests: the longest takes 11 minutes on two quick cores, and three times that on slow ones.
LIMIT=${MQBLK_TEST_LIMIT:-2700}

logs=target/test-logs
# Tests start the daemon that cargo builds with them: with assertions, as they are.
export MQBLK=$PWD/target/checked/mqblk
# The message of a failed test, not 40 lines of frames that push it out of a log's end.
export RUST_BACKTRACE=0
mkdir -p "$logs" && rm -f "$logs/summary" "$logs"/*.counts "$logs"/*.log
failed_before=$(cat "$logs/failed" 2>/dev/null)
rm -f "$logs/failed"
began=$SECONDS

# Every run uses the same packages and features, so that nothing is built twice. The test programs guest, xen and ceph need a
# prepared machine.
selected=(--profile checked --workspace --features mqblk-tests/guest,mqblk-tests/xen,mqblk-tests/ceph)
tests=(cargo test "${selected[@]}")

# Debian's mawk buffers its input by default, which would delay lines.
awk=(awk)
if awk -W version 2>&1 </dev/null | grep -q mawk; then awk=(awk -W interactive); fi

# Condenses cargo's output: errors, one line per test program with its seconds, and one line per test if EACH is set, else one per module
# of a program in tests/tests. A line has the time since the start, and how many tests of how many (the file TOTAL) are done.
condense() {
    "${awk[@]}" -v each="$1" -v total="$2" -v start="$(($(date +%s) - SECONDS + began))" '
        BEGIN { getline all <total }
        # Counts a result of a test by its module: the part of its name before the first "::".
        function count(test, result) { sub(/::.*/, "", test); if (!(test in modules)) { modules[test]; order[++n] = test }
                                       seen[test, result]++ }
        function at(  t) { t = systime() - start; return sprintf("%3d:%02d %4d of %-4d", t / 60, t % 60, done, all) }
        /^ +Running /            { name = $2 == "unittests" ? $NF : $2; sub(/.*\/deps\//, "", name); sub(/\)$/, "", name)
                                   sub(/-[0-9a-f]+$/, "", name); sub(/\/main\.rs$/, "", name)
                                   by_module = !each && $2 != "unittests"; n = 0; split("", modules); split("", seen); next }
        /^ +Doc-tests /          { name = $2 " (documentation)"; by_module = n = 0; next }
        /^test .* \.\.\. FAILED/ { done++; print at() "    FAILED " $2; fflush(); if (by_module && $2 ~ /::/) count($2, "failed"); next }
        /^test .* \.\.\. ok/     { done++; if (each) { print at() "    ok     " $2; fflush() } if (by_module && $2 ~ /::/) count($2, "ok"); next }
        /^test .* \.\.\. ignored/ { if (by_module && $2 ~ /::/) count($2, "ignored"); next }
        /^test result: /         { if ($4 + $6 + $8 > 0)
                                       printf "%s  %-34s %4d passed %3d failed %3d ignored %9s\n", at(), name, $4, $6, $8, $NF
                                   for (i = 1; i <= n; i++)
                                       printf "                     %-32s %4d        %3d        %3d\n", order[i], seen[order[i], "ok"],
                                              seen[order[i], "failed"], seen[order[i], "ignored"]
                                   n = 0; fflush(); next }
        /^(error|warning: unused)/ { print; fflush() }
    '
}

# Appends to the file FAILED what the log says: each line is the test program as cargo selects it, and a test (none: the whole program).
list_failed() {
    awk '/^test .* \.\.\. FAILED/ { tests[++n] = $2 }
         /^error: (test|doctest) failed, to rerun/ {
             match($0, /`.*`/); target = substr($0, RSTART + 1, RLENGTH - 2); sub(/-p [^ ]+ ?/, "", target); sub(/^--package [^ ]+ ?/, "", target)
             if (n == 0) print target
             for (i = 1; i <= n; i++) print target " " tests[i]
             n = 0 }' "$1" >>"$logs/failed"
}

# install_missing PROGRAM [PACKAGE]: installs Debian's package, by default of the program's name. If that fails, the
# tests that need it fail and report it.
install_missing() {
    command -v "$1" >/dev/null || { apt_get update && apt_get install --no-install-recommends "${2:-$1}"; } >"$logs/install-$1.txt" 2>&1 ||
        echo "  cannot install ${2:-$1}: $(tail -n 1 "$logs/install-$1.txt")"
}

# count_tests COMMAND...: prints how many tests a "cargo test" has.
count_tests() {
    case " $* " in
        *" --no-run "* | *" --doc "*) echo 0 && return ;;
        *" -- "*) set -- "$@" --list ;;
        *) set -- "$@" -- --list ;;
    esac
    "$@" </dev/null 2>/dev/null | awk '/: test$/ { n++ } END { print n + 0 }'
}

# run NAME EACH COMMAND...: runs one "cargo test" and adds its counts to the totals.
run() {
    local name=$1 each=$2 log=$logs/$1.log code p f i limit=()
    shift 2
    count_tests "$@" >"$logs/$name.total"
    # A test that hangs ends its part, which names it: else it would take the rest with it.
    [ ${#long[@]} -gt 0 ] || limit=(timeout --kill-after=30 "$LIMIT")
    "${limit[@]}" "$@" </dev/null 2>&1 | tee "$log" | condense "$each" "$logs/$name.total"
    code=${PIPESTATUS[0]}
    [ "$code" -ne 124 ] || echo "  not done within $LIMIT s; tests that had run for over a minute: $(sed -n 's/^test \(.*\) has been running for.*/\1/p' "$log" | tail -n 5 | tr '\n' ' ')"
    list_failed "$log"
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
    echo "$p $f $i" >"$logs/$name.counts"
    [ "$f" -eq 0 ]
}

# fail NAME MESSAGE: counts tests that could not run as one failed test.
fail() {
    echo "  $2"
    echo "0 1 0" >"$logs/$1.counts"
    echo "$1" >>"$logs/failed"
}

# Labels each line, for runs side by side.
label() { sed -u "s/^/$(printf '%-7s ' "$1")/"; }

wants() {
    local part
    for part in "${parts[@]}"; do [ "$part" != "$1" ] || return 0; done
    return 1
}

build() {
    echo "building (the first time takes minutes)"
    run build '' "${tests[@]}" --no-run
}

fast() {
    echo "tests without virtual machines"
    # Several at a time: each waits a good part of its time, for a disk or for a moment.
    local others=() rest=() name
    # Test programs that have no part of their own.
    for name in $(cargo metadata --no-deps --format-version 1 | grep -o '"kind":\["test"\],"crate_types":\["bin"\],"name":"[^"]*"' | cut -d'"' -f12 | sort -u); do
        case $name in
            blk* | budget | ceph | crash | daemon | documented | guest | hostile | in_process | simulation | xen) ;;
            *) rest+=(--test "$name") ;;
        esac
    done
    [ ${#rest[@]} -gt 20 ] || fail "cargo metadata names ${#rest[@]} words of test programs, expected more"
    { run daemon '' "${tests[@]}" --test daemon --no-fail-fast -- --test-threads=4
      run hostile '' "${tests[@]}" --test hostile --no-fail-fast
      root; } &
    others+=($!)
    run large '' "${tests[@]}" --test 'blk*' --test crash --test 'do*' --test 'in*' --test 'sim*' --no-fail-fast &
    others+=($!)
    # Instructions for a request, in a release build.
    run budget '' "${tests[@]}" --test budget -- --include-ignored &
    others+=($!)
    run libraries '' "${tests[@]}" --lib --bins --no-fail-fast
    run documentation '' "${tests[@]}" --doc
    run fast '' "${tests[@]}" "${rest[@]}" --no-fail-fast
    wait "${others[@]}"
}

root() {
    local p f
    [ ${#as_root[@]} -gt 0 ] || return 0
    run root '' "${tests[@]}" --tests --no-fail-fast -- --ignored as_root
    read -r p f _ <"$logs/root.counts"
    # They are not left out.
    echo "$p $f -$((p + f))" >"$logs/root.counts"
}

# Returns true if a part is wanted, or has a test to repeat.
needs() {
    wants "$1" || { wants again && grep -qE -- "(--test |^)$1( |\$)" <<<"$failed_before"; }
}

# Installs, downloads and builds the prerequisites of virtual machines.
prepare() {
    if needs xen; then
        # That prepares the guest, too.
        tests/xen/prepare.sh </dev/null || fail prepare "Xen could not be prepared: the tests that need it fail"
    elif needs guest || needs ceph || needs libvirt; then
        tests/guest/prepare.sh </dev/null || fail prepare "the guest could not be prepared: the tests that need it fail"
    fi
    if needs guest && [ ${#long[@]} -gt 0 ]; then
        tests/guest/prepare.sh sid boot </dev/null || fail prepare "QEMU 11 or an image to boot from could not be prepared: the tests that need them fail"
    fi
    if needs ceph; then
        tests/ceph/cluster.sh install </dev/null || fail prepare "Ceph could not be installed: the tests that need it fail"
        [ ${#long[@]} -eq 0 ] || tests/ceph/trixie.sh </dev/null || fail prepare "trixie's Ceph could not be unpacked: the tests that need it fail"
    fi
}

guest() {
    echo "tests with virtual machines (minutes each where there is no KVM)"
    run guest each "${tests[@]}" --test guest --no-fail-fast -- --test-threads=1 "${long[@]}"
}

xen() {
    echo "tests on Xen, which QEMU emulates (half a minute each or more)"
    run xen each "${tests[@]}" --test xen --no-fail-fast -- --test-threads=1 "${long[@]}"
}

crash() {
    echo "daemons that are killed and stopped under verified load (half a minute to a minute each or more)"
    rm -f "$logs/crash.json"
    MQBLK_CRASH=full run crash each "${tests[@]}" --test crash --no-fail-fast -- --test-threads=1 "${as_root[@]}" --nocapture
    [ ! -f "$logs/crash.json" ] || { echo "statistics, also in $logs/crash.json:"; cat "$logs/crash.json"; }
}

ceph() {
    echo "tests on clusters of Ceph, which each test starts for itself"
    run ceph each "${tests[@]}" --test ceph --no-fail-fast -- --test-threads=1
    [ ${#long[@]} -gt 0 ] || return 0
    echo "the same with Debian trixie's Ceph"
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/tests/ceph/trixie.sh run" \
        run ceph-trixie each "${tests[@]}" --test ceph --no-fail-fast -- --test-threads=1
}

# Runs alone, because it compares latencies.
hour() {
    echo "hostile guests, frontends and admin clients for 10 minutes beside verifying disks"
    MQBLK_HOSTILE_SECONDS=${MQBLK_HOSTILE_SECONDS:-600} run hour each "${tests[@]}" --test hostile -- hour:: "${as_root[@]}" --nocapture
    [ ! -f "$logs/hostile-hour.json" ] || echo "statistics are in $logs/hostile-hour.json"
}

deb() {
    echo "the Debian package in a fresh system"
    if scripts/test-deb.sh 2>&1 | tee "$logs/deb.log"; then
        echo "1 0 0" >"$logs/deb.counts"
    else
        fail deb "the package fails its test: $logs/deb.log"
    fi
}

# With the daemon that the other tests use.
libvirt() {
    echo "a domain of libvirt on the packaged service"
    if scripts/test-libvirt.sh 2>&1 | tee "$logs/libvirt.log"; then
        echo "1 0 0" >"$logs/libvirt.counts"
    else
        fail libvirt "the domain fails its test: $logs/libvirt.log"
    fi
}

# repeat FAILED: runs the tests of this list, as list_failed makes it.
repeat() {
    local target names number=0
    while read -r target; do
        names=$(awk -v target="$target" 'index($0, target) == 1 && NF == split(target, words) + 1 { print $NF }' <<<"$1")
        # shellcheck disable=SC2086 # words
        run "again$((number += 1))" each "${tests[@]}" $target --no-fail-fast -- --test-threads=1 --include-ignored ${names:+--exact $names}
    done < <(awk '{ if ($1 == "--lib" || $1 == "--bins" || $1 == "--doc") print $1; else print $1, $2 }' <<<"$1" | sort -u)
}

parts=("$@")
prepare &
preparing=$!
build
built=$?
wait "$preparing"
install_missing valgrind # without it the budget fails with a message
install_missing socat # printed commands use it
install_missing nbdkit
install_missing qemu-nbd qemu-utils
install_missing openssl
install_missing chromium # shows the page of mqblk reproduce
install_missing promtool prometheus # has promtool
install_missing systemd-analyze systemd # measures the units
install_missing linux.uml user-mode-linux # Linux's drivers without a virtual machine
ldd /bin/busybox 2>&1 | grep -q "not a dynamic" || install_missing busybox-static # its init
if [ "$built" -eq 0 ]; then
    MQBLK_TEST_SLOWNESS=$(cargo run --quiet --profile checked -p mqblk-test-bounds)
    export MQBLK_TEST_SLOWNESS
    echo "this machine is slower than the reference machine by: $MQBLK_TEST_SLOWNESS (bounds of waits are multiplied by the largest)"
    if wants again; then
        repeat "$(grep '^--' <<<"$failed_before")"
        for part in libvirt deb; do ! grep -qx $part <<<"$failed_before" || $part; done
    fi
    wants fast && fast
    wants crash && crash
    if wants guest && wants xen; then
        # A machine under emulation seldom uses more than one processor.
        { guest 2>&1 | label guest; ! wants libvirt || libvirt 2>&1 | label libvirt; } &
        xen 2>&1 | label xen
        wait
    else
        wants guest && guest
        wants xen && xen
        wants libvirt && libvirt
    fi
    wants ceph && ceph
    wants hour && hour
    wants deb && deb
fi

# Each failed test once more, with the begin of its message: the end of a log is what people see first.
awk '/^---- .* stdout ----$/ { name = $2; lines = 0; next }
     name && NF { print "FAILED " name ": " substr($0, 1, 400); if (++lines == 6) name = "" }
     /^failures:$/ { name = "" }' "$logs"/*.log

read -r passed failed ignored < <(awk '{ p += $1; f += $2; i += $3 } END { print p + 0, f + 0, i + 0 }' "$logs"/*.counts)
[ "$ignored" -eq 0 ] || echo "$ignored tests were left out, most of them long ones of virtual machines, or of root: make test-guest, make test-xen and make soak run the former"
if [ -s "$logs/failed" ]; then
    echo "failed:"
    sed 's/^/  /' "$logs/failed"
    echo "to repeat just these: make test-again"
fi
echo "$passed passed, $failed failed" | tee "$logs/summary"
[ "$failed" -eq 0 ]
