#!/bin/bash
# Prepares the boot files of the Xen tests under QEMU: the hypervisor, a dom0 with the toolstack, and a PV guest for it.
#
#   tests/xen/prepare.sh             install, download and build all missing files
#
# MQBLK_XEN_CACHE      the folder of the files                       (<repository>/.cache/xen)
# MQBLK_XEN_KERNEL     the Debian kernel package of dom0             (linux-image-amd64)
#
# and the variables of tests/guest/prepare.sh: its kernel and its fio are those of the PV guest. That kernel
# (cloud-amd64) has no CONFIG_XEN_DOM0, so dom0 has another one.
#
# Left in the cache folder: xen, vmlinux, dom0.cpio, manifest. Remove the folder to start again.
#
# Nothing of Xen is installed on this machine: its packages start daemons and alter the boot loader, so they are only unpacked.
# Everything is uncompressed, because all of it runs emulated.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
guest=$(cd "$here/../guest" && pwd)
cache=${MQBLK_XEN_CACHE:-$(cd "$here/../.." && pwd)/.cache/xen}
guest_cache=${MQBLK_GUEST_CACHE:-$(cd "$here/../.." && pwd)/.cache/guest}
kernel_package=${MQBLK_XEN_KERNEL:-linux-image-amd64}
# The manifest's first line. The Rust side requires this version; increase it on incompatible changes.
format="mqblk-xen 1"

packages=(qemu-system-x86 busybox-static kmod cpio util-linux xz-utils lz4 zstd gzip liblzma5 libzstd1 zlib1g libuuid1 libgcc-s1)
unpacked=$cache/unpacked
xen_packages=(xen-hypervisor-4.17-amd64 xen-utils-4.17 xenstore-utils libxenmisc4.17 libxencall1 libxendevicemodel1 libxenevtchn1
    libxenforeignmemory1 libxengnttab1 libxenhypfs1 libxenstore4 libxentoolcore1 libxentoollog1 libyajl2)
xen_programs=/usr/lib/xen-4.17/bin
dom0_modules=(virtio_pci virtio_console xen-privcmd xenfs xen-evtchn xen-gntdev xen-gntalloc)
# Loaded by the tests that use them.
dom0_modules_later=(xen-blkback xen-blkfront loop null_blk)
domu_modules=(xen-blkfront xen-evtchn xen-gntalloc xen-gntdev)
domu_programs=(/usr/sbin/blkdiscard)
. "$guest/debian.sh"

prepare_xen() {
    [ -e "$cache/xen" ] && [ -e "$cache/xen.version" ] && return
    local work=$cache/xen.new package
    say "downloading Xen"
    rm -rf "$work" && mkdir "$work"
    if ! (cd "$work" && apt_quiet download "${xen_packages[@]}") >"$cache/xen-download.log" 2>&1; then
        refresh_apt # a mirror drops a package when its successor arrives
        (cd "$work" && logged xen-download apt_quiet download "${xen_packages[@]}")
    fi
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root" || fail "cannot unpack $package"
    done
    gzip -dc "$work"/root/boot/xen-4.17-amd64.gz >"$work/xen" || fail "cannot unpack the hypervisor"
    package=$(echo "$work"/xen-hypervisor-*.deb)
    rm -rf "$unpacked" && mv "$work/root" "$unpacked"
    mv "$work/xen" "$cache/xen"
    dpkg-deb -f "$package" Version >"$cache/xen.version"
    rm -rf "$work"
}

# Builds the PV guest's initramfs: busybox, fio, the block driver (not loaded yet), the agent.
build_domu() {
    local root=$cache/domu.new program
    begin_root "$root"
    install "$guest_cache/fio" "$root/sbin/fio"
    for program in "${domu_programs[@]}"; do
        rm -f "$root/bin/$(basename "$program")"
        copy_program "$root" "$program"
    done
    copy_modules "$root" "$guest_cache" "${domu_modules[@]}"
    install -m 644 "$guest/agent" "$root/agent"
    install "$here/domu-init" "$root/init"
    end_root "$root" "$1"
}

prepare_dom0() {
    local root=$cache/dom0.new inputs program tool
    inputs=$(cat "$0" "$guest"/{debian.sh,agent} "$here"/{dom0-init,domu-init,hotplug,console} "$cache"/{kernel,xen}.version \
        "$guest_cache"/{kernel.version,fio} /bin/busybox "${domu_programs[@]}" | sha256sum)
    [ -e "$cache/dom0.cpio" ] && [ "$inputs" = "$(cat "$cache/dom0.inputs" 2>/dev/null)" ] && return
    say "building dom0's initramfs"
    begin_root "$root"
    mkdir -p "$root"/{etc/xen/scripts,guest,var/{lib/xen,lib/xenstored,log/xen,lock},lib/x86_64-linux-gnu}
    ln -s /run "$root/var/run"
    : >"$root/etc/xen/xl.conf"
    for program in xl xenstored xenconsoled xen-init-dom0 libxl-save-helper; do
        copy_program "$root" "$unpacked$xen_programs/$program" "$xen_programs"
    done
    ln -s "$xen_programs/xl" "$root/sbin/xl"
    for tool in ls read write rm chmod watch list exists; do
        copy_program "$root" "$unpacked/usr/bin/xenstore-$tool"
    done
    # xl and Rust programs load it by dlopen.
    install "$(readlink -f /lib/x86_64-linux-gnu/libgcc_s.so.1)" "$root/lib/x86_64-linux-gnu/libgcc_s.so.1"
    install "$guest_cache/fio" "$root/sbin/fio"
    copy_modules "$root" "$cache" "${dom0_modules_later[@]}"
    mv "$root/lib/modules/order" "$root/lib/modules/order.all"
    copy_modules "$root" "$cache" "${dom0_modules[@]}"
    install -m 644 "$guest/agent" "$root/agent"
    install "$here/dom0-init" "$root/init"
    install "$here/hotplug" "$root/etc/xen/scripts/block"
    install "$here/console" "$root/sbin/guest-console"
    build_domu "$root/guest/initramfs.cpio"
    cp "$guest_cache/vmlinux" "$root/guest/vmlinux"
    end_root "$root" "$cache/dom0.cpio"
    echo "$inputs" >"$cache/dom0.inputs"
}

"$guest/prepare.sh"
begin_preparing
install_packages
prepare_kernel
prepare_xen
prepare_dom0
{
    echo "$format"
    echo "Xen $(cat "$cache/xen.version")"
    echo "dom0 $(cat "$cache/kernel.version")"
    echo "domU $(cat "$guest_cache/kernel.version")"
} >"$cache/manifest.new"
mv "$cache/manifest.new" "$cache/manifest"
say "ready: $(tail -n +2 "$cache/manifest" | tr '\n' ' ')in $cache"
