#!/bin/bash
# Builds the Debian packages of this tree:  scripts/deb.sh
#
# They are target/deb/mqblk_VERSION_ARCHITECTURE.deb, the daemon and its verbs, and mqblk-bench_..., the benchmark.
# Their version is that of Cargo.toml, and their times are the commit's: the same tree and toolchain give the same
# packages in any folder. MQBLK=PROGRAM packages an existing program, and the mqblk-bench beside it. DEBFULLNAME and
# DEBEMAIL are the maintainer, as for other Debian tools.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
architecture=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.lock)}
export SOURCE_DATE_EPOCH

if [ -z "${MQBLK:-}" ]; then
    cargo build --quiet --locked --release -p mqblk -p mqblk-bench
    MQBLK=$PWD/target/release/mqblk
fi

maintainer="${DEBFULLNAME:-mqblk developers} <${DEBEMAIL:-mqblk@packages.debian.org}>"
work=target/deb

# package NAME BUILT DEPENDS SUGGESTS: makes the package of a program; its description is on standard input.
package() {
    local name=$1 built=$2 depends=$3 suggests=$4 description root=$work/root libraries size note doc
    description=$(cat)
    rm -rf "$root" "$work/debian"
    mkdir -p "$root/DEBIAN" "$work/debian" "$work/programs"
    strip --strip-unneeded -o "$work/programs/$name" "$built"
    # The build ID depends on the folder of the build, by the debug information that is stripped now: it becomes the SHA-1 of what is left. In place,
    # since a program without the section loses its RELRO segment too (binutils 2.40). 16 bytes of the note come before the ID of 20.
    note=$(readelf -SW "$work/programs/$name" | sed -n 's/.* \.note\.gnu\.build-id  *NOTE  *[0-9a-f]* \([0-9a-f]*\) .*/\1/p')
    if [ -n "$note" ]; then
        write_id() { dd of="$work/programs/$name" bs=1 seek=$((16#$note + 16)) count=20 conv=notrunc status=none; }
        write_id </dev/zero
        printf "$(sha1sum <"$work/programs/$name" | sed 's/ .*//; s/../\\x&/g')" | write_id
    fi
    scripts/install.sh "$PWD/$work/programs/$name" "$root"

    doc=$root/usr/share/doc/$name
    install -D -m 644 packaging/debian/copyright "$doc/copyright"
    {
        printf '%s (%s) unstable; urgency=medium\n\n  * %s\n\n' "$name" "$version" "What a user notices is in CHANGELOG.md of the source."
        printf ' -- %s  %s\n' "$maintainer" "$(date -uR -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$doc/changelog.gz"

    # The libraries that the program is linked to, with their least versions.
    printf 'Source: mqblk\n\nPackage: %s\nArchitecture: any\nDepends: ${shlibs:Depends}\n' "$name" >"$work/debian/control"
    libraries=$(cd "$work" && dpkg-shlibdeps -O "root/usr/bin/$name" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')

    # In KiB, as dpkg-gencontrol counts: independent of the file system.
    size=$(find "$root" -path "$root/DEBIAN" -prune -o -type f -printf '%s\n' -o -printf '1\n' | awk '{ n += int(($1 + 1023) / 1024) } END { print n }')
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\n' "$name" "$version" "$architecture"
        [ "$name" = mqblk ] || printf 'Source: mqblk\n'
        printf 'Maintainer: %s\nInstalled-Size: %s\nDepends: %s, %s\nSuggests: %s\n' "$maintainer" "$size" "$libraries" "$depends" "$suggests"
        printf 'Section: admin\nPriority: optional\nDescription: %s\n' "$description"
    } >"$root/DEBIAN/control"
    for script in postinst prerm postrm; do
        [ "$name" != mqblk ] || install -m 755 "packaging/debian/$script" "$root/DEBIAN/$script"
    done
    (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"

    find "$root" -print0 | xargs -0 touch --no-dereference --date="@$SOURCE_DATE_EPOCH"
    dpkg-deb --root-owner-group -Zxz --build "$root" "$work/${name}_${version}_$architecture.deb" >/dev/null
    rm -rf "$root"
    echo "$work/${name}_${version}_$architecture.deb"
}

package mqblk "$MQBLK" passwd "mqblk-bench, qemu-system, libvirt-daemon-system, librbd1" <<'DESCRIPTION'
disks for virtual machines over vhost-user and Xen blkif
 One daemon serves disk images and block devices to virtual machines as
 virtio-blk disks and as LUNs of virtio-scsi controllers (over vhost-user), and
 as paravirtual disks to guests of Xen, with many queues each.
 .
 The package has the daemon and its administration in one program, units of
 systemd, and the descriptor by which QEMU's management finds it.
DESCRIPTION

package mqblk-bench "$(dirname "$MQBLK")/mqblk-bench" "mqblk (= $version)" librsvg2-bin <<'DESCRIPTION'
benchmark of disks for virtual machines
 Loads disks through userspace drivers in the place of a guest: those of mqblk,
 of any other vhost-user-blk and vhost-user-scsi server, and of any backend of
 Xen's block devices. Verifies what it writes, draws the results, and measures
 published experiments on this machine.
 .
 Its commands are mqblk bench, mqblk plot and mqblk reproduce.
DESCRIPTION
