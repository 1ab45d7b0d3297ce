#!/bin/bash
# Cost of a daemon with many disks: time to start and to stop, memory, threads, descriptors, idle CPU time, the admin
# commands, and the CPU time of a request on one disk beside idle ones.
#
#   scripts/many-disks.sh [--json FILE]       a table on standard output, and the same as JSON to FILE
#
# Variables: COUNTS ("1 100 1000 10000"), KINDS ("null file": sparse files of 1 GiB), IDLE (seconds of the idle
# measurement, default 10), RUNS and RUNTIME (of the load beside the idle disks, default 5 runs of 1 s; RUNS=0: none),
# QUEUES (of each disk, default 1), CONNECTED (number of idle disks with an idle frontend, default 0; needs cargo),
# SANDBOX (off or on) and MQBLK (the program). 10,000 files need more than 20,000 open files: `ulimit -Hn`, which root
# raises here.
#
# start: until all sockets accept a connection. KiB/disk: of the resident memory, less that of the daemon with one disk
# of the same kind. idle: CPU time of the daemon per second. mappings: of memory; the kernel allows a process
# vm.max_map_count. cost: median CPU time of a request with iodepth 32, and its ratio to that of a daemon with one disk
# of the same kind, measured in turns with it.
set -euo pipefail
cd "$(dirname "$0")/.."
json=
while [ $# -gt 0 ]; do
    case $1 in
    --json) json=${2:?--json: found nothing, expected a file}; shift 2 ;;
    *) echo "many-disks: found $1, expected --json FILE" >&2; exit 2 ;;
    esac
done
counts=${COUNTS:-1 100 1000 10000} kinds=${KINDS:-null file} idle=${IDLE:-10} runs=${RUNS:-5} runtime=${RUNTIME:-1} queues=${QUEUES:-1} connected=${CONNECTED:-0}
sandbox=${SANDBOX:-off}
mqblk=${MQBLK:-target/release/mqblk}
[ -x "$mqblk" ] || cargo build --release -p mqblk -p mqblk-bench
frontends=
if [ "$connected" -gt 0 ]; then
    frontends=$(dirname "$mqblk")/examples/idle_frontends
    if [ ! -x "$frontends" ]; then
        cargo build --quiet --release -p mqblk-driver --example idle_frontends
        frontends=target/release/examples/idle_frontends
    fi
fi
ulimit -n unlimited 2> /dev/null || ulimit -n 1048576 2> /dev/null || ulimit -n "$(ulimit -Hn)"
# Sockets in memory, as usual; images in $TMPDIR.
work=$(mktemp -d -p /dev/shm) images=$(mktemp -d)
daemon= reference= clients=
stop_process() { [ -z "$1" ] || { kill "$1" 2> /dev/null || true; wait "$1" 2> /dev/null || true; }; }
finish() {
    stop_process "$clients"
    stop_process "$daemon"
    stop_process "$reference"
    rm -rf "$work" "$images"
}
trap finish EXIT

now() { date +%s%N; }
# Prints the milliseconds that a command takes.
timed() {
    local begin end
    begin=$(now)
    "$@" > /dev/null
    end=$(now)
    echo $(((end - begin) / 1000000))
}
# Prints the CPU time of all threads of a process, in microseconds.
cpu_us() { cat "/proc/$1"/task/*/schedstat | awk '{ all += $1 } END { printf "%d\n", all / 1000 }'; }
memory() { awk -v key="$2:" '$1 == key { print $2 }' "/proc/$1/smaps_rollup"; }
disk_keys() { # KIND NUMBER FOLDER
    case $1 in
    null) echo "storage=null,size=1G,socket=$3/$2.sock,queues=$queues" ;;
    file)
        truncate -s 1G "$images/$2.img"
        echo "path=$images/$2.img,socket=$3/$2.sock,queues=$queues" ;;
    esac
}
configuration() { # KIND COUNT FOLDER IMAGES
    local number
    for ((number = 0; number < $2; number++)); do
        case $1 in
        null) printf '[[disk]]\nid = "d%d"\nstorage = "null"\nsize = "1G"\nsocket = "%s/%d.sock"\nqueues = %d\n' "$number" "$3" "$number" "$queues" ;;
        file) printf '[[disk]]\nid = "d%d"\npath = "%s/%d.img"\nsocket = "%s/%d.sock"\nqueues = %d\n' "$number" "$4" "$number" "$3" "$number" "$queues" ;;
        esac
    done
    if [ "$1" = file ]; then
        (mkdir -p "$4" && cd "$4" && seq -f %.0f.img 0 $(($2 - 1)) | xargs truncate -s 1G)
    fi
}
serve() { # FOLDER; sets `served`
    "$mqblk" --log warn serve --config "$1/config.toml" --admin "$1/admin" --metrics "unix:$1/metrics" --sandbox "$sandbox" --workers 1 2> "$1/log" &
    served=$!
}
# Waits until the daemon answers: then all sockets listen.
answers() { # PID FOLDER
    until [ -S "$2/admin" ] && "$mqblk" log --socket "$2/admin" > /dev/null 2>&1; do
        kill -0 "$1" 2> /dev/null || { tail -n 3 "$2/log" >&2; return 1; }
        sleep 0.002
    done
}
load() { # FOLDER; the server's CPU time of a request, in nanoseconds
    "$mqblk" --log error bench --socket "$1/0.sock" --rw randread --bs 4k --iodepth 32 --runs 1 --warmup 0.2 --runtime "$runtime" --json "$work/result" > /dev/null 2>&1
    sed -n 's/.*"server_cpu_us_per_io": \([0-9.]*\).*/\1/p' "$work/result" | awk '{ printf "%.1f\n", $1 * 1000 }'
}
median() { sort -n | awk '{ all[NR] = $1 } END { print (NR % 2) ? all[(NR + 1) / 2] : (all[NR / 2] + all[NR / 2 + 1]) / 2 }'; }

columns=(kind disks start_ms rss_kib pss_kib kib_per_disk threads descriptors mappings idle_us_per_s switches_per_s stat_ms list_ms scrape_ms add_ms remove_ms reload_ms stop_ms cost_ns cost_ratio)
printf '%-5s %6s %9s %9s %9s %8s %8s %11s %8s %9s %9s %8s %8s %9s %7s %9s %9s %8s %8s %6s\n' kind disks start_ms rss_kib pss_kib KiB/disk threads descriptors mappings idle_us/s switch/s stat_ms list_ms scrape_ms add_ms remove_ms reload_ms stop_ms cost_ns ratio
rows=()
row() { # values in the order of `columns`
    printf '%-5s %6s %9s %9s %9s %8s %8s %11s %8s %9s %9s %8s %8s %9s %7s %9s %9s %8s %8s %6s\n' "$@"
    local text= index=0 value
    for value in "$@"; do
        case $value in
        -) value=null ;;
        null | file) value="\"$value\"" ;;
        esac
        text+="${text:+, }\"${columns[index]}\": $value"
        index=$((index + 1))
    done
    rows+=("{$text}")
}

for kind in $kinds; do
    one="$work/$kind-one" base_rss=0
    mkdir "$one"
    configuration "$kind" 1 "$one" "$images/one" > "$one/config.toml"
    serve "$one"; reference=$served
    answers "$reference" "$one"
    sleep 1
    base_rss=$(memory "$reference" Rss)
    for count in $counts; do
        folder="$work/$kind-$count"
        mkdir "$folder"
        configuration "$kind" "$count" "$folder" "$images/$count" > "$folder/config.toml"
        begin=$(now)
        serve "$folder"; daemon=$served
        answers "$daemon" "$folder"
        start=$((($(now) - begin) / 1000000))
        [ "$(find "$folder" -name '*.sock' -type s | wc -l)" = "$count" ] || { echo "many-disks: not all sockets exist" >&2; exit 1; }
        if [ "$connected" -gt 0 ]; then
            first=1 last=$((connected < count ? connected : count - 1))
            "$frontends" "$folder" "$first" "$last" > "$work/frontends" &
            clients=$!
            until grep -q connected "$work/frontends"; do kill -0 "$clients" || exit 1; sleep 0.1; done
        fi
        sleep 2
        rss=$(memory "$daemon" Rss) pss=$(memory "$daemon" Pss)
        threads=$(ls "/proc/$daemon/task" | wc -l)
        descriptors=$(ls "/proc/$daemon/fd" | wc -l)
        mappings=$(wc -l < "/proc/$daemon/maps")
        switches() { cat "/proc/$daemon"/task/*/status | awk '/ctxt_switches/ { all += $2 } END { print all }'; }
        cpu_before=$(cpu_us "$daemon") switches_before=$(switches)
        sleep "$idle"
        idle_cpu=$(((($(cpu_us "$daemon") - cpu_before)) / idle)) idle_switches=$((($(switches) - switches_before) / idle))
        stat=$(timed "$mqblk" stat --json --socket "$folder/admin")
        list=$(timed "$mqblk" disk list --socket "$folder/admin")
        scrape=-
        if command -v curl > /dev/null; then scrape=$(timed curl --silent --fail --unix-socket "$folder/metrics" http://localhost/metrics); fi
        add=$(timed "$mqblk" disk add --socket "$folder/admin" "id=added,$(disk_keys "$kind" added "$folder")")
        remove=$(timed "$mqblk" disk remove --socket "$folder/admin" added)
        reload=$(timed "$mqblk" config apply --socket "$folder/admin")
        cost=- ratio=-
        if [ "$runs" -gt 0 ]; then
            : > "$work/costs"; : > "$work/ratios"
            for ((run = 0; run < runs; run++)); do
                mine=$(load "$folder"); other=$(load "$one")
                echo "$mine" >> "$work/costs"
                awk -v mine="$mine" -v other="$other" 'BEGIN { printf "%.4f\n", mine / other }' >> "$work/ratios"
            done
            cost=$(median < "$work/costs") ratio=$(median < "$work/ratios" | awk '{ printf "%.3f\n", $1 }')
        fi
        stop_process "$clients"; clients=
        begin=$(now)
        kill "$daemon"; wait "$daemon"; daemon=
        stop=$((($(now) - begin) / 1000000))
        per_disk=-
        if [ "$count" -gt 1 ]; then per_disk=$(awk -v all="$rss" -v base="$base_rss" -v count="$count" 'BEGIN { printf "%.1f\n", (all - base) / (count - 1) }'); fi
        row "$kind" "$count" "$start" "$rss" "$pss" "$per_disk" "$threads" "$descriptors" "$mappings" "$idle_cpu" "$idle_switches" "$stat" "$list" "$scrape" "$add" "$remove" "$reload" "$stop" "$cost" "$ratio"
        rm -rf "$folder" "${images:?}/$count"
    done
    stop_process "$reference"; reference=
done
if [ -n "$json" ]; then
    { echo '['; for ((index = 0; index < ${#rows[@]}; index++)); do echo "  ${rows[index]}$([ $index = $((${#rows[@]} - 1)) ] || echo ,)"; done; echo ']'; } > "$json"
fi
