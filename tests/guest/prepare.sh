#!/bin/bash
# Prepares the boot files of the real-guest tests: a Debian kernel, and an initramfs with fio, the file system and the
# SCSI tools. Adds the QEMU and the kernel of Debian trixie to those of this system, so that the tests can run with
# both.
#
#   tests/guest/prepare.sh           install, download and build all missing files
#   tests/guest/prepare.sh sid       and the QEMU of Debian sid, for MQBLK_GUEST_VMM=sid
#   tests/guest/prepare.sh boot      and a disk image from which a BIOS and UEFI boot trixie's kernel by GRUB, and iPXE
#
# MQBLK_GUEST_CACHE    the folder of the files                       (<repository>/.cache/guest)
# MQBLK_GUEST_KERNEL   the Debian kernel package to boot             (linux-image-cloud-amd64)
# MQBLK_GUEST_FIO      a statically linked fio to use instead of building one from Debian's source
#
# Left in the cache folder: vmlinux, initramfs.cpio, trixie/{vmlinux,initramfs.cpio,qemu}, sid/qemu, boot.img, manifest.  Remove the folder to start
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

packages=(qemu-system-x86 qemu-utils busybox-static dmsetup kexec-tools kmod cpio e2fsprogs xfsprogs sqlite3 util-linux mount sysstat sg3-utils sdparm xz-utils lz4 zstd
    gcc make libc6-dev)
modules=(virtio_pci virtio_console virtio_blk virtio_scsi sd_mod sg ext4)
# Loaded by the tests that use them: xfs alone takes a third of an emulated boot.
modules_later=(xfs dm_mod dm_thin_pool dm_crypt xts virtio_mem)
guest_programs=(/sbin/dmsetup /sbin/kexec /sbin/mkfs.ext4 /sbin/e2fsck /usr/sbin/blkdiscard /usr/bin/fallocate /usr/bin/iostat
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
    [ -e "$trixie/qemu/qemu-img" ] && [ -e "$trixie/kernel.version" ] && return
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
    [ -e "$sid/qemu/qemu-img" ] && return
    mkdir -p "$sid"
    say "fetching the package lists of Debian sid"
    own_apt "$sid/apt" deb sid
    prepare_qemu sid "$sid"
    rm -rf "$sid/apt"
    own_apt
}

# prepare_qemu RELEASE FOLDER: QEMU of a Debian release and its programs for images, unpacked and not installed: with the
# firmware, and the libraries with their loader, because this system's may be older.
prepare_qemu() {
    [ -e "$2/qemu/qemu-img" ] && return
    local release=$1 folder=$2 work=$2/qemu.new chosen program library libraries loader=lib/ld-linux-x86-64.so.2
    local programs=(qemu-system-x86_64 qemu-img qemu-io)
    rm -rf "$work" && mkdir "$work"
    # All dependencies except those for installation, such as debconf.
    apt_quiet --no-install-recommends --simulate install qemu-system-x86 qemu-utils >"$cache/$release-packages.log" 2>&1 ||
        fail "apt cannot tell what $release's qemu-system-x86 and qemu-utils need: $(tail -n 3 "$cache/$release-packages.log")"
    chosen=$(awk '$1 == "Inst" && $2 ~ /^(lib.*|zlib1g|qemu-system-.*|qemu-utils|seabios|ipxe-qemu)$/ { print $2 }' "$cache/$release-packages.log")
    say "downloading $release's QEMU and its libraries"
    (cd "$work" && logged "$release-download" apt_quiet download $chosen)
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root" || fail "cannot unpack $package"
    done
    mkdir -p "$work/qemu/lib" "$work/qemu/firmware"
    cp "$work"/root/usr/share/qemu/*.{bin,rom} "$work"/root/usr/share/seabios/*.bin "$work/qemu/firmware"
    libraries=$work/root/usr/lib/x86_64-linux-gnu
    cp "$libraries/${loader#lib/}" "$work/qemu/lib"
    for program in "${programs[@]}"; do
        cp "$work/root/usr/bin/$program" "$work/qemu/lib/$program"
        "$work/qemu/$loader" --library-path "$libraries" --list "$work/qemu/lib/$program" >"$cache/$release-libraries.log" 2>&1 ||
            fail "$release's $program lacks libraries: $(grep "not found" "$cache/$release-libraries.log")"
        # libgcc_s is loaded by dlopen when a thread is cancelled.
        for library in $(sed -n "s|.*=> \($work/root/[^ ]*\).*|\1|p" "$cache/$release-libraries.log") "$libraries/libgcc_s.so.1"; do
            cp "$library" "$work/qemu/lib" || fail "cannot copy $library"
        done
        cat >"$work/qemu/$program" <<'END'
#!/bin/sh
# A program of a later QEMU with the loader, the libraries and the firmware that came with it.
here=$(dirname "$(readlink -f "$0")")
program=$(basename "$0")
[ "$program" != qemu-system-x86_64 ] || set -- -L "$here/firmware" "$@"
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" --argv0 "$program" "$here/lib/$program" "$@"
END
        chmod +x "$work/qemu/$program"
        hide_modules "$work/qemu/lib/$program"
    done
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

# le BYTES NUMBER: prints a number in little endian.
le() {
    local left=$1 number=$2
    while [ "$left" -gt 0 ]; do
        printf "\\x$(printf %02x $((number & 255)))"
        number=$((number >> 8)) left=$((left - 1))
    done
}

# Makes boot.img: a GPT with a BIOS boot partition and an EFI system partition. The latter has trixie's kernel and
# initramfs, which GRUB loads from there by either firmware, after a menu of 5 seconds on the serial console.
prepare_boot() {
    [ -e "$cache/boot.img" ] && [ "$cache/boot.img" -nt "$trixie/initramfs.cpio" ] && return
    local work=$cache/boot.new image=$cache/boot.new/image first=2048 esp=4096 sectors=196608 core modules
    packages=(grub-common grub-pc-bin grub-efi-amd64-bin ipxe ovmf mtools fdisk)
    install_packages
    rm -rf "$work" && mkdir "$work"
    say "fetching trixie's kernel, compressed"
    own_apt "$work/apt" deb trixie
    (cd "$work" && logged boot-download apt_quiet download "linux-image-$(cat "$trixie/kernel.version")")
    own_apt
    dpkg-deb -x "$work"/linux-image-*.deb "$work/root"
    cat >"$work/grub.cfg" <<'END'
serial --unit=0
terminal_output serial
set timeout=5
menuentry "a test guest" {
    echo "GRUB loads the kernel"
    linux /vmlinuz console=ttyS0 quiet panic=0 mitigations=off nokaslr cryptomgr.notests random.trust_cpu=on no_timer_check lpj=10000000
    initrd /initramfs.cpio
}
END
    printf 'search.file /vmlinuz root\nconfigfile /grub/grub.cfg\n' >"$work/early.cfg"
    modules="part_gpt fat search_fs_file configfile normal linux serial terminal echo"
    grub-mkimage -O i386-pc -p /grub -c "$work/early.cfg" -o "$work/core.img" biosdisk $modules
    grub-mkimage -O x86_64-efi -p /grub -c "$work/early.cfg" -o "$work/bootx64.efi" $modules
    truncate -s $(((esp + sectors + 2048) * 512)) "$image"
    printf '%s\n' 'label: gpt' "start=$first, size=2048, type=21686148-6449-6E6F-744E-656564454649" \
        "start=$esp, size=$sectors, type=U" | sfdisk -q "$image"
    # GRUB's boot sector (boot.S: kernel_sector at 0x5c) loads the first sector of its core, which has the place of the
    # rest (diskboot.S: the list of blocks ends at 0x200, each of 12 bytes).
    dd if=/usr/lib/grub/i386-pc/boot.img of="$image" bs=440 count=1 conv=notrunc status=none
    le 8 $first | dd of="$image" bs=1 seek=$((0x5c)) conv=notrunc status=none
    core=$((($(stat -c %s "$work/core.img") + 511) / 512))
    { le 8 $((first + 1)) && le 2 $((core - 1)); } | dd of="$work/core.img" bs=1 seek=$((0x1f4)) conv=notrunc status=none
    dd if="$work/core.img" of="$image" bs=512 seek=$first conv=notrunc status=none
    export MTOOLS_SKIP_CHECK=1
    mformat -i "$image@@$((esp * 512))" -T $sectors -h 64 -s 32 -F ::
    mmd -i "$image@@$((esp * 512))" ::/grub ::/EFI ::/EFI/BOOT
    mcopy -i "$image@@$((esp * 512))" "$work/grub.cfg" ::/grub/grub.cfg
    mcopy -i "$image@@$((esp * 512))" "$work/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI
    mcopy -i "$image@@$((esp * 512))" "$work"/root/boot/vmlinuz-* ::/vmlinuz
    mcopy -i "$image@@$((esp * 512))" "$trixie/initramfs.cpio" ::/initramfs.cpio
    mv "$image" "$cache/boot.img"
    rm -rf "$work"
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
prepare_initramfs "$cache"
prepare_initramfs "$trixie"
for more in "$@"; do
    case $more in
        sid) prepare_sid ;;
        boot) prepare_boot ;;
        *) fail "found the argument '$more', expected sid or boot" ;;
    esac
done
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
