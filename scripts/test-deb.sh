#!/bin/bash
# Tests the Debian packages in a fresh system:  scripts/test-deb.sh [PACKAGE...]
#
# As root. Makes a Debian with debootstrap in a temporary folder, installs the packages there (by default those that
# scripts/deb.sh builds), runs their programs, and purges them: nothing may be left. Takes minutes, and installs
# debootstrap and lintian with apt.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("$@")
[ $# -gt 0 ] || mapfile -t packages < <(scripts/deb.sh)

. scripts/apt.sh
install_missing() { command -v "$1" >/dev/null || apt_get install --no-install-recommends "${2:-$1}" >/dev/null; }
install_missing debootstrap
install_missing lintian
install_missing jq
install_missing readelf binutils

fail() {
    echo "scripts/test-deb.sh: $*" >&2
    exit 1
}

echo "lintian"
lintian --fail-on error "${packages[@]}"

# This machine's release, from its mirror.
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' | awk -v suite="$suite" '$2 == suite { print $1; exit }')
work=$(mktemp -d)
system=$work/system
trap 'umount "$system/proc" 2>/dev/null || true; rm -rf "$work"' EXIT
echo "debootstrap"
debootstrap --variant=minbase "$suite" "$system" "$mirror" >"$work/log" 2>&1 || { tail -n 20 "$work/log"; fail "no system"; }
mount -t proc proc "$system/proc"
inside() { chroot "$system" "$@"; }

# Prints files, users and groups, without dpkg's own files and the backups of useradd.
state() {
    (cd "$system" && find . -xdev \( -path ./proc -o -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o -name 'passwd-' -o -name 'group-' -o -name 'shadow-' -o -name 'gshadow-' \) -prune -o -print) | sort
    inside getent passwd
    inside getent group
}

state >"$work/before"
mkdir "$system/packages"
cp "${packages[@]}" "$system/packages"
inside dpkg --install --recursive /packages >/dev/null || fail "the packages cannot be installed: libraries that they depend on are not in a minimal system?"
rm -r "$system/packages"

echo "installed files"
inside mqblk --version
for program in mqblk mqblk-bench; do
    readelf -lW "$system/usr/bin/$program" | grep GNU_RELRO >/dev/null || fail "$program has lost its RELRO segment: stripping rewrote its headers"
done
inside getent passwd mqblk >/dev/null || fail "found no user mqblk"
for file in /usr/share/man/man1/mqblk.1.gz /usr/share/man/man1/mqblk-serve.1.gz /usr/share/bash-completion/completions/mqblk \
    /usr/share/zsh/vendor-completions/_mqblk /usr/share/fish/vendor_completions.d/mqblk.fish /usr/lib/systemd/system/mqblk@.service \
    /usr/share/man/man1/mqblk-bench.1.gz /usr/share/bash-completion/completions/mqblk-bench \
    /usr/lib/tmpfiles.d/mqblk.conf /usr/share/doc/mqblk/examples/mqblk.toml; do
    [ -s "$system$file" ] || fail "found no $file"
done
gzip -dc "$system/usr/share/man/man1/mqblk-serve.1.gz" | grep '^.SH EXAMPLES' >/dev/null || fail "found no examples in the man page of serve"
inside bash -n /usr/share/bash-completion/completions/mqblk
grep -q '^ExecStart=!/usr/bin/mqblk serve' "$system/usr/lib/systemd/system/mqblk.service" || fail "the unit starts another program"

# As QEMU's management does: the descriptor, the program's capabilities, and a disk.
descriptor=$system/usr/share/qemu/vhost-user/50-mqblk-blk.json
[ "$(jq -r .type "$descriptor")" = block ] || fail "the descriptor is of another type"
program=$(jq -r .binary "$descriptor")
inside "$program" --print-capabilities | jq -e '.type == "block" and (.features | index("blk-file"))' >/dev/null || fail "$program says something else"
truncate -s 16M "$system/disk.img"
chroot "$system" "$program" --socket-path=/disk.sock --blk-file=/disk.img 2>"$system/log" &
daemon=$!
for _ in $(seq 300); do [ ! -S "$system/disk.sock" ] || break; sleep 0.1; done
inside mqblk bench --socket /disk.sock --rw randwrite --bs 4k --queues 1 --iodepth 4 --size 4M --verify crc32c --allow-write >"$system/bench" ||
    fail "the disk does not verify: $(cat "$system/log" "$system/bench")"
kill "$daemon"
wait "$daemon" || fail "the daemon ended with code $?: $(cat "$system/log")"
rm -f "$system"/{disk.img,disk.sock,log,bench}

inside dpkg --purge mqblk-bench >/dev/null
! inside mqblk bench --help >/dev/null 2>"$work/told" || fail "mqblk has a benchmark without its package"
grep -q 'install the package mqblk-bench' "$work/told" || fail "mqblk says something else: $(cat "$work/told")"
inside dpkg --purge mqblk >/dev/null
state >"$work/after"
left=$(diff "$work/before" "$work/after" || true)
[ -z "$left" ] || fail "the packages leave behind or take away: $left"
echo "the packages install, run and purge"
