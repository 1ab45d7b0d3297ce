#!/bin/bash
# Prepares what the real-guest tests boot: a Debian kernel, and an initramfs with fio, the file system and the SCSI tools.
#
#   tests/guest/prepare.sh           install, download and build what is missing; nothing to do takes no time
#
# MQBLK_GUEST_CACHE    where it all goes                             (<repository>/.cache/guest)
# MQBLK_GUEST_KERNEL   the Debian kernel package to boot             (linux-image-cloud-amd64)
# MQBLK_GUEST_FIO      a statically linked fio to use instead of building one from Debian's source
#
# Left in the cache folder: vmlinux, initramfs.cpio, manifest.  Remove the folder to start again, for example
# with a newer kernel package: what is already there is kept as it is and needs no network.
#
# Why it is made this way: without hardware virtualisation the guest is emulated, and then decompression is most of
# a boot.  So the kernel is unpacked from its bzImage, the initramfs is not compressed, and fio is linked statically
# without its optional engines: Debian's own fio needs 70 MB of libraries.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
cache=${MQBLK_GUEST_CACHE:-$(cd "$here/../.." && pwd)/.cache/guest}
kernel_package=${MQBLK_GUEST_KERNEL:-linux-image-cloud-amd64}
# The manifest's first line; the Rust side refuses another one. Raise it when the contents change their meaning.
format="mqblk-guest 3"

packages=(qemu-system-x86 qemu-utils busybox-static kmod cpio e2fsprogs util-linux mount sysstat sg3-utils sdparm xz-utils lz4 zstd
    gcc make libc6-dev)
modules=(virtio_pci virtio_console virtio_blk virtio_scsi sd_mod sg ext4 crc32c_generic)
guest_programs=(/sbin/mkfs.ext4 /sbin/e2fsck /usr/sbin/blkdiscard /usr/bin/fallocate /usr/bin/iostat
    /usr/bin/sdparm)
# Of sg3-utils, what the SCSI tests use.
for program in compare_and_write get_lba_status inq logs luns modes opcodes persist prevent raw readcap requests reset \
    start sync turs unmap verify vpd write_same write_verify; do
    guest_programs+=(/usr/bin/sg_$program)
done

fail() {
    echo "prepare.sh: $*" >&2
    exit 1
}
say() { echo "prepare.sh: $*"; }
apt_quiet() { DEBIAN_FRONTEND=noninteractive apt-get -q -y -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 "$@"; }

# Runs a command with its output in a log; on failure the log's end is shown.
logged() {
    local log=$cache/$1.log
    shift
    "$@" >"$log" 2>&1 </dev/null || {
        tail -n 20 "$log" >&2
        fail "'$*' failed; the whole output is in $log"
    }
}

install_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    [ "$(id -u)" -eq 0 ] || fail "these packages are missing and installing needs root: ${missing[*]}"
    say "installing ${missing[*]}"
    refresh_apt
    logged apt-install apt_quiet install --no-install-recommends "${missing[@]}"
}

refreshed=
refresh_apt() {
    [ -n "$refreshed" ] || logged apt-update apt_quiet update
    refreshed=yes
}

# linux-image-cloud-amd64 holds nothing but a dependency on the package of the newest kernel: print that one's name.
real_kernel_package() {
    local depends
    case $kernel_package in linux-image-[0-9]*) echo "$kernel_package" && return ;; esac
    depends=$(apt-cache depends "$kernel_package" 2>/dev/null) || return 0
    sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p;T;q' <<<"$depends"
}

# Unpacks the ELF kernel of a bzImage, at the place its header names (Linux x86 boot protocol 2.08: setup_sects at
# 0x1f1, payload_offset at 0x248, payload_length at 0x24c). The payload ends with its unpacked length.
unpack_bzimage() {
    local image=$1 out=$2 sects offset length magic unpack want
    number() { od -An -t"u$3" -j "$2" -N "$3" "$1" | tr -d ' '; }
    [ "$(od -An -c -j 514 -N 4 "$image" | tr -d ' ')" = HdrS ] || fail "$image is no bzImage: no HdrS at 0x202"
    sects=$(number "$image" 497 1)
    offset=$(((${sects/#0/4} + 1) * 512 + $(number "$image" 584 4)))
    length=$(number "$image" 588 4)
    want=$(number "$image" $((offset + length - 4)) 4)
    magic=$(od -An -tx1 -j $offset -N 4 "$image" | tr -d ' ')
    case $magic in
        fd377a58) unpack="xz -dc" ;;
        02214c18) unpack="lz4 -dc" ;;
        28b52ffd) unpack="zstd -dc" ;;
        1f8b*) unpack="gzip -dc" ;;
        *) fail "$image: the payload's compression is unknown (it begins with $magic)" ;;
    esac
    tail -c +$((offset + 1)) "$image" | head -c $((length - 4)) >"$out.payload" || true
    $unpack <"$out.payload" >"$out" || fail "$image: '$unpack' failed"
    rm "$out.payload"
    [ "$(stat -c %s "$out")" -eq "$want" ] || fail "$image: unpacked to $(stat -c %s "$out") bytes, its header says $want"
}

prepare_kernel() {
    [ -e "$cache/vmlinux" ] && [ -e "$cache/kernel.version" ] && return
    local package work=$cache/kernel.new
    package=$(real_kernel_package)
    if [ -z "$package" ]; then
        refresh_apt
        package=$(real_kernel_package)
    fi
    [ -n "$package" ] || fail "apt knows no kernel package behind '$kernel_package' (MQBLK_GUEST_KERNEL)"
    say "downloading $package"
    rm -rf "$work" && mkdir "$work"
    if ! (cd "$work" && apt_quiet download "$package") >"$cache/kernel-download.log" 2>&1; then
        refresh_apt # a mirror drops a package when its successor arrives
        package=$(real_kernel_package)
        (cd "$work" && logged kernel-download apt_quiet download "$package")
    fi
    dpkg-deb -x "$work"/linux-image-*.deb "$work/root" || fail "cannot unpack $package"
    unpack_bzimage "$work"/root/boot/vmlinuz-* "$work/vmlinux"
    local version=$work/root/lib/modules/*
    version=$(basename $version)
    depmod -b "$work/root" "$version"
    rm -rf "$cache/modules" && mv "$work/root/lib/modules" "$cache/modules"
    mv "$work/vmlinux" "$cache/vmlinux"
    rm -rf "$work"
    echo "$version" >"$cache/kernel.version"
}

prepare_fio() {
    [ -x "$cache/fio" ] && return
    local work=$cache/fio.new
    rm -rf "$work" && mkdir -p "$work/lists/partial"
    if [ -n "${MQBLK_GUEST_FIO:-}" ]; then
        cp "$MQBLK_GUEST_FIO" "$work/fio" || fail "cannot copy MQBLK_GUEST_FIO=$MQBLK_GUEST_FIO"
    else
        fetch_fio_source "$work"
        say "building a static fio"
        mkdir "$work/src" && tar xf "$work"/fio_*.orig.tar.?z -C "$work/src" --strip-components=1
        (
            cd "$work/src"
            logged fio-configure ./configure --build-static --disable-native --disable-numa --disable-rdma \
                --disable-rados --disable-rbd --disable-http --disable-gfapi --disable-libnfs --disable-lex \
                --disable-pmem --disable-xnvme --disable-libzbc --disable-tcmalloc --disable-dfs
            logged fio-build make -j"$(nproc)" fio
            strip -o "$work/fio" fio
        )
    fi
    "$work/fio" --version >/dev/null || fail "the fio that was built does not run"
    ldd "$work/fio" >/dev/null 2>&1 && fail "$work/fio is linked dynamically; the guest has no libraries for it"
    mv "$work/fio" "$cache/fio"
    rm -rf "$work"
}

# Most machines list no source packages, so apt is given a list of its own, from the mirror it uses already.
fetch_fio_source() {
    local work=$1 codename mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v c="$codename" '$1 == c && $2 == "main" { print $3; exit }')
    [ -n "$mirror" ] || fail "apt lists no mirror for '$codename main', so fio's source cannot be fetched; set MQBLK_GUEST_FIO"
    [ -e $keyring ] || fail "$keyring is missing (package debian-archive-keyring)"
    echo "deb-src [signed-by=$keyring] $mirror $codename main" >"$work/sources.list"
    local own=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
        -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache=)
    say "downloading fio's source"
    logged fio-sources apt_quiet "${own[@]}" update
    (cd "$work" && logged fio-download apt_quiet "${own[@]}" source --download-only fio)
}

# Copies a program and the libraries its loader will ask for, to the same paths under $1.
copy_program() {
    local root=$1 file=$2 lib
    [ -e "$file" ] || fail "$file is missing"
    install -D "$(readlink -f "$file")" "$root/sbin/$(basename "$file")"
    for lib in $(ldd "$file" | grep -o '/[^ ]*\.so[^ ]*'); do
        [ -e "$root$lib" ] || install -D "$(readlink -f "$lib")" "$root$lib"
    done
}

copy_modules() {
    local root=$1 version module dir
    version=$(cat "$cache/kernel.version")
    mkdir -p "$root/lib/modules" "$cache/modprobe.new/lib"
    ln -sfn "$cache/modules" "$cache/modprobe.new/lib/modules"
    for module in "${modules[@]}"; do
        modprobe -d "$cache/modprobe.new" -S "$version" --show-depends "$module" >"$cache/modprobe.log" 2>&1 ||
            fail "the kernel $version has no module '$module': $(tail -n 1 "$cache/modprobe.log")"
        sed -n 's/^insmod \([^ ]*\).*/\1/p' "$cache/modprobe.log"
    done | awk '!seen[$0]++' >"$cache/modules.list"
    rm -r "$cache/modprobe.new/lib" && rmdir "$cache/modprobe.new"
    while read -r module; do
        module=$cache/modules/${module#*/lib/modules/}
        cp "$module" "$root/lib/modules/"
        basename "$module"
    done <"$cache/modules.list" >"$root/lib/modules/order"
}

prepare_initramfs() {
    local inputs root=$cache/initramfs.new applet
    inputs=$(cat "$0" "$here/init" "$cache/fio" "$cache/kernel.version" /bin/busybox "${guest_programs[@]}" | sha256sum)
    [ -e "$cache/initramfs.cpio" ] && [ "$inputs" = "$(cat "$cache/initramfs.inputs" 2>/dev/null)" ] && return
    say "building the initramfs"
    rm -rf "$root" && mkdir -p "$root"/{bin,sbin,dev,proc,sys,run,tmp,mnt,etc}
    install /bin/busybox "$root/bin/busybox"
    for applet in $(/bin/busybox --list); do ln -s busybox "$root/bin/$applet" 2>/dev/null || true; done
    install "$cache/fio" "$root/sbin/fio"
    ln -s /proc/mounts "$root/etc/mtab"
    for program in "${guest_programs[@]}"; do
        rm -f "$root/bin/$(basename "$program")"
        copy_program "$root" "$program"
    done
    copy_modules "$root"
    install "$here/init" "$root/init"
    (cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0) >"$cache/initramfs.cpio.new"
    mv "$cache/initramfs.cpio.new" "$cache/initramfs.cpio"
    rm -rf "$root"
    echo "$inputs" >"$cache/initramfs.inputs"
}

[ "$(uname -m)" = x86_64 ] || fail "the guest tests know x86_64 only, this is $(uname -m)"
command -v apt-get >/dev/null || fail "apt-get is missing: this step is for Debian"
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
install_packages
prepare_kernel
prepare_fio
prepare_initramfs
{
    echo "$format"
    echo "kernel $(cat "$cache/kernel.version")"
    echo "fio $("$cache/fio" --version)"
} >"$cache/manifest.new"
mv "$cache/manifest.new" "$cache/manifest"
say "ready: $(tail -n +2 "$cache/manifest" | tr '\n' ' ')in $cache"
