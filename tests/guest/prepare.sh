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

packages=(qemu-system-x86 qemu-utils busybox-static kmod cpio e2fsprogs xfsprogs sqlite3 util-linux mount sysstat sg3-utils sdparm xz-utils lz4 zstd
    gcc make libc6-dev)
modules=(virtio_pci virtio_console virtio_blk virtio_scsi sd_mod sg ext4 xfs crc32c_generic)
guest_programs=(/sbin/mkfs.ext4 /sbin/e2fsck /usr/sbin/blkdiscard /usr/bin/fallocate /usr/bin/iostat
    /usr/bin/sdparm /sbin/mkfs.xfs /sbin/xfs_repair /usr/bin/sqlite3)
# Of sg3-utils, what the SCSI tests use.
for program in compare_and_write get_lba_status inq logs luns modes opcodes persist prevent raw readcap requests reset \
    start sync turs unmap verify vpd write_same write_verify; do
    guest_programs+=(/usr/bin/sg_$program)
done

. "$here/debian.sh"

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

prepare_initramfs() {
    local inputs root=$cache/initramfs.new applet
    inputs=$(cat "$0" "$here"/{debian.sh,agent,init} "$cache/fio" "$cache/kernel.version" /bin/busybox \
        "${guest_programs[@]}" | sha256sum)
    [ -e "$cache/initramfs.cpio" ] && [ "$inputs" = "$(cat "$cache/initramfs.inputs" 2>/dev/null)" ] && return
    say "building the initramfs"
    begin_root "$root"
    install "$cache/fio" "$root/sbin/fio"
    ln -s /proc/mounts "$root/etc/mtab"
    for program in "${guest_programs[@]}"; do
        rm -f "$root/bin/$(basename "$program")"
        copy_program "$root" "$program"
    done
    copy_modules "$root" "$cache" "${modules[@]}"
    install -m 644 "$here/agent" "$root/agent"
    install "$here/init" "$root/init"
    end_root "$root" "$cache/initramfs.cpio"
    echo "$inputs" >"$cache/initramfs.inputs"
}

begin_preparing
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
