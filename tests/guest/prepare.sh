#!/bin/bash
# Prepares the boot files of the real-guest tests: a Debian kernel, and an initramfs with fio, the file system and the
# SCSI tools. Adds the QEMU and the kernel of Debian trixie to those of this system, so that the tests can run with
# both.
#
#   tests/guest/prepare.sh           install, download and build all missing files
#   tests/guest/prepare.sh sid       and the QEMU of Debian sid, for MQBLK_GUEST_VMM=sid
#
# MQBLK_GUEST_CACHE    the folder of the files                       (<repository>/.cache/guest)
# MQBLK_GUEST_KERNEL   the Debian kernel package to boot             (linux-image-cloud-amd64)
# MQBLK_GUEST_FIO      a statically linked fio to use instead of building one from Debian's source
#
# Left in the cache folder: vmlinux, initramfs.cpio, trixie/{vmlinux,initramfs.cpio,qemu}, sid/qemu, manifest.  Remove the folder to start
# again, for example with a newer kernel package: existing files are kept and need no network.
#
# Without hardware virtualisation the guest is emulated, and decompression is most of a boot. Therefore the kernel is
# unpacked from its bzImage, the initramfs is not compressed, and fio is linked statically without its optional engines:
# Debian's own fio needs 70 MB of libraries.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
cache=${MQBLK_GUEST_CACHE:-$(cd "$here/../.." && pwd)/.cache/guest}
trixie=$cache/trixie
sid=$cache/sid
kernel_package=${MQBLK_GUEST_KERNEL:-linux-image-cloud-amd64}
# The manifest's first line. The Rust side requires this version; increase it on incompatible changes.
format="mqblk-guest 6"

packages=(qemu-system-x86 qemu-utils busybox-static dmsetup kmod cpio e2fsprogs xfsprogs sqlite3 util-linux mount sysstat sg3-utils sdparm xz-utils lz4 zstd
    gcc make libc6-dev)
modules=(virtio_pci virtio_console virtio_blk virtio_scsi sd_mod sg ext4)
# Loaded by the tests that use them: xfs alone takes a third of an emulated boot.
modules_later=(xfs dm_mod dm_thin_pool dm_crypt xts)
guest_programs=(/sbin/dmsetup /sbin/mkfs.ext4 /sbin/e2fsck /usr/sbin/blkdiscard /usr/bin/fallocate /usr/bin/iostat
    /usr/bin/sdparm /sbin/mkfs.xfs /sbin/xfs_repair /usr/bin/sqlite3)
# The programs of sg3-utils in the SCSI tests.
for program in compare_and_write get_lba_status inq logs luns modes opcodes persist prevent raw readcap requests reset \
    start sync turs unmap verify vpd write_same write_verify; do
    guest_programs+=(/usr/bin/sg_$program)
done

. "$here/debian.sh"

prepare_fio() {
    [ -x "$cache/fio" ] && return
    local work=$cache/fio.new
    rm -rf "$work" && mkdir "$work"
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

fetch_fio_source() {
    local work=$1
    say "downloading fio's source"
    own_apt "$work/apt" deb-src
    (cd "$work" && logged fio-download apt_quiet source --download-only fio)
    own_apt
}

# Prepares QEMU and a kernel of Debian trixie.
prepare_trixie() {
    [ -e "$trixie/qemu.version" ] && [ -e "$trixie/kernel.version" ] && return
    mkdir -p "$trixie"
    say "fetching the package lists of Debian trixie"
    own_apt "$trixie/apt" deb trixie
    prepare_kernel "$trixie"
    prepare_qemu trixie "$trixie"
    rm -rf "$trixie/apt"
    own_apt
}

# Prepares the QEMU of Debian sid, the newest one.
prepare_sid() {
    [ -e "$sid/qemu.version" ] && return
    mkdir -p "$sid"
    say "fetching the package lists of Debian sid"
    own_apt "$sid/apt" deb sid
    prepare_qemu sid "$sid"
    rm -rf "$sid/apt"
    own_apt
}

# prepare_qemu RELEASE FOLDER: QEMU of a Debian release, unpacked and not installed: with its firmware, and its libraries
# with their loader, because this system's may be older.
prepare_qemu() {
    [ -e "$2/qemu.version" ] && return
    local release=$1 folder=$2 work=$2/qemu.new chosen library libraries loader=lib/ld-linux-x86-64.so.2
    rm -rf "$work" && mkdir "$work"
    # All dependencies except those for installation, such as debconf.
    apt_quiet --no-install-recommends --simulate install qemu-system-x86 >"$cache/$release-packages.log" 2>&1 ||
        fail "apt cannot tell what $release's qemu-system-x86 needs: $(tail -n 3 "$cache/$release-packages.log")"
    chosen=$(awk '$1 == "Inst" && $2 ~ /^(lib.*|zlib1g|qemu-system-.*|seabios|ipxe-qemu)$/ { print $2 }' "$cache/$release-packages.log")
    say "downloading $release's QEMU and its libraries"
    (cd "$work" && logged "$release-download" apt_quiet download $chosen)
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root" || fail "cannot unpack $package"
    done
    mkdir -p "$work/qemu/lib" "$work/qemu/firmware"
    cp "$work"/root/usr/share/qemu/*.{bin,rom} "$work"/root/usr/share/seabios/*.bin "$work/qemu/firmware"
    cp "$work/root/usr/bin/qemu-system-x86_64" "$work/qemu/program"
    libraries=$work/root/usr/lib/x86_64-linux-gnu
    cp "$libraries/${loader#lib/}" "$work/qemu/lib"
    "$work/qemu/$loader" --library-path "$libraries" --list "$work/qemu/program" >"$cache/$release-libraries.log" 2>&1 ||
        fail "$release's QEMU lacks libraries: $(grep "not found" "$cache/$release-libraries.log")"
    # libgcc_s is loaded by dlopen when a thread is cancelled.
    for library in $(sed -n "s|.*=> \($work/root/[^ ]*\).*|\1|p" "$cache/$release-libraries.log") "$libraries/libgcc_s.so.1"; do
        cp "$library" "$work/qemu/lib" || fail "cannot copy $library"
    done
    cat >"$work/qemu/qemu-system-x86_64" <<'END'
#!/bin/sh
# A later QEMU with the loader, the libraries and the firmware that came with it.
here=$(dirname "$(readlink -f "$0")")
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" --argv0 qemu-system-x86_64 "$here/program" -L "$here/firmware" "$@"
END
    chmod +x "$work/qemu/qemu-system-x86_64"
    hide_modules "$work/qemu/program"
    "$work/qemu/qemu-system-x86_64" --version >"$work/version" 2>&1 || fail "$release's QEMU does not run: $(cat "$work/version")"
    rm -rf "$folder/qemu" && mv "$work/qemu" "$folder/qemu"
    sed -n 's/^QEMU emulator version \([^ ]*\).*/\1/p' "$work/version" >"$folder/qemu.version"
    rm -rf "$work"
}

# hide_modules PROGRAM: the path of QEMU's modules is built into the program, and the modules there belong to this system's
# QEMU of another version, which makes it fail. Replaces the path by one of the same length that does not exist.
hide_modules() {
    local program=$1 modules=/usr/lib/x86_64-linux-gnu/qemu none=/nonexistent/modules-of-qemu/.
    grep -q "$modules" "$program" || return 0
    [ ${#modules} -eq ${#none} ] || fail "the paths of modules differ in length: $modules, $none"
    sed -i "s#$modules#$none#g" "$program"
}

# prepare_initramfs FOLDER: builds the initramfs for the kernel in FOLDER.
prepare_initramfs() {
    local folder=$1 inputs root=$cache/initramfs.new program wanted=("${modules[@]}")
    # Later kernels have these checksums without a module.
    case $(cat "$folder/kernel.version") in [1-6].*) wanted+=(crc32c_generic) ;; esac
    inputs=$(cat "$0" "$here"/{debian.sh,agent,init,load-later} "$cache/fio" "$folder/kernel.version" /bin/busybox \
        "${guest_programs[@]}" | sha256sum)
    [ -e "$folder/initramfs.cpio" ] && [ "$inputs" = "$(cat "$folder/initramfs.inputs" 2>/dev/null)" ] && return
    say "building the initramfs for Linux $(cat "$folder/kernel.version")"
    begin_root "$root"
    install "$cache/fio" "$root/sbin/fio"
    ln -s /proc/mounts "$root/etc/mtab"
    for program in "${guest_programs[@]}"; do
        rm -f "$root/bin/$(basename "$program")"
        copy_program "$root" "$program"
    done
    copy_modules "$root" "$folder" "${modules_later[@]}"
    mv "$root/lib/modules/order" "$root/lib/modules/order.later"
    copy_modules "$root" "$folder" "${wanted[@]}"
    install "$here/load-later" "$root/sbin/load-later"
    install -m 644 "$here/agent" "$root/agent"
    install "$here/init" "$root/init"
    end_root "$root" "$folder/initramfs.cpio"
    echo "$inputs" >"$folder/initramfs.inputs"
}

begin_preparing
install_packages
prepare_kernel
prepare_fio
prepare_trixie
case ${1:-} in
    "") ;;
    sid) prepare_sid ;;
    *) fail "found the argument '$1', expected sid or none" ;;
esac
prepare_initramfs "$cache"
prepare_initramfs "$trixie"
{
    echo "$format"
    echo "kernel $(cat "$cache/kernel.version")"
    echo "and $(cat "$trixie/kernel.version")"
    echo "QEMU $(qemu-system-x86_64 --version | sed -n 's/^QEMU emulator version \([^ ]*\).*/\1/p')"
    echo "and $(cat "$trixie/qemu.version")"
    echo "fio $("$cache/fio" --version)"
} >"$cache/manifest.new"
mv "$cache/manifest.new" "$cache/manifest"
say "ready: $(tail -n +2 "$cache/manifest" | tr '\n' ' ')in $cache"
