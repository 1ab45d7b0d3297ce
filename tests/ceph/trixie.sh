#!/bin/bash
# Unpacks the Ceph of Debian trixie beside this system's, for MQBLK_CEPH=trixie: programs in bin/ that run with their own
# loader and libraries. Existing files are kept and need no network.
#
#   tests/ceph/trixie.sh             prepare .cache/ceph/trixie
#   tests/ceph/trixie.sh run TEST    run a test program and its clusters with it, and a copy of the daemon (MQBLK) that loads its librbd:
#       CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/tests/ceph/trixie.sh run" cargo test ... --test ceph
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
cache=$(cd "$here/../.." && pwd)/.cache/ceph
trixie=$cache/trixie
libraries=$trixie/root/usr/lib/x86_64-linux-gnu
packages=(patchelf)
wanted=(ceph-mon ceph-mgr ceph-osd ceph-common)
programs=(ceph-mon ceph-mgr ceph-osd ceph-authtool monmaptool rados rbd)

. "$here/../guest/debian.sh"

prepare() {
    local chosen package program library
    [ -e "$trixie/version" ] && return
    begin_preparing
    install_packages
    [ -e "$trixie/version" ] && return
    rm -rf "$trixie" && mkdir -p "$trixie/debs" "$trixie/bin"
    say "fetching the package lists of Debian trixie"
    own_apt "$trixie/apt" deb trixie
    apt_quiet --no-install-recommends --simulate install "${wanted[@]}" >"$cache/packages.log" 2>&1 ||
        fail "apt cannot tell what trixie's ${wanted[*]} need: $(tail -n 3 "$cache/packages.log")"
    # Libraries and the programs; of Python what the manager embeds.
    chosen=$(awk '$1 == "Inst" && $2 ~ /^(lib.*|zlib1g|ceph-.*|python3-ceph.*|python3\.[0-9]+-minimal|python3-rados)$/ { print $2 }' "$cache/packages.log")
    say "downloading trixie's Ceph and its libraries"
    (cd "$trixie/debs" && logged download apt_quiet download $chosen)
    own_apt
    for package in "$trixie"/debs/*.deb; do
        dpkg-deb -x "$package" "$trixie/root" || fail "cannot unpack $package"
    done
    # Their own path of libraries would replace that of the daemon.
    for library in "$libraries"/lib{rados,rbd}.so.?.* "$libraries"/ceph/libceph-common.so.?; do
        patchelf --force-rpath --set-rpath "$libraries:$libraries/ceph" "$library"
    done
    for program in "${programs[@]}"; do
        cat >"$trixie/bin/$program" <<'END'
#!/bin/bash
# A program of trixie's Ceph with its own loader and libraries.
root=$(cd "$(dirname "$(readlink -f "$0")")/../root" && pwd)
libraries=$root/usr/lib/x86_64-linux-gnu
export PYTHONHOME=$root/usr
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/ceph:$libraries/systemd" "$root/usr/bin/$(basename "$0")" "$@"
END
        chmod +x "$trixie/bin/$program"
    done
    "$trixie/bin/rbd" --version >"$trixie/version.new" 2>&1 || fail "trixie's rbd does not run: $(cat "$trixie/version.new")"
    rm -rf "$trixie/apt" "$trixie/debs"
    mv "$trixie/version.new" "$trixie/version"
    say "ready: $(cat "$trixie/version") in $trixie"
}

case ${1:-} in
    "") prepare ;;
    run)
        shift
        daemon=${MQBLK:-$here/../../target/checked/mqblk}
        # A copy, as the daemon executes itself: it would find the loader.
        cp "$daemon" "$trixie/mqblk.new"
        patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries:$libraries/ceph" "$trixie/mqblk.new"
        mv "$trixie/mqblk.new" "$trixie/mqblk"
        export MQBLK=$trixie/mqblk MQBLK_CEPH=trixie PATH=$trixie/bin:$PATH
        exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/ceph" "$@"
        ;;
    *) fail "found the argument '$1', expected nothing or run" ;;
esac
