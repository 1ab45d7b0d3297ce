#!/bin/bash
# Builds a Debian package of this tree:  scripts/deb.sh
#
# The package is target/deb/mqblk_VERSION_ARCHITECTURE.deb. Its version is that of Cargo.toml, and its times are the commit's, so that the same
# tree and toolchain give the same package, in any folder. MQBLK=PROGRAM packages a program that is built already. DEBFULLNAME and DEBEMAIL are the maintainer, as
# for other tools of Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
architecture=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.lock)}
export SOURCE_DATE_EPOCH

if [ -z "${MQBLK:-}" ]; then
    cargo build --quiet --locked --release -p mqblk
    MQBLK=$PWD/target/release/mqblk
fi

maintainer="${DEBFULLNAME:-mqblk developers} <${DEBEMAIL:-mqblk@packages.debian.org}>"
work=target/deb
root=$work/root
rm -rf "$root" "$work/debian"
mkdir -p "$root/DEBIAN" "$work/debian"
strip --strip-unneeded -o "$work/mqblk" "$MQBLK"
# The build ID depends on the folder of the build, by the debug information that is stripped now: it becomes the SHA-1 of what is left. In place,
# since a program without the section loses its RELRO segment too (binutils 2.40). 16 bytes of the note come before the ID of 20.
note=$(readelf -SW "$work/mqblk" | sed -n 's/.* \.note\.gnu\.build-id  *NOTE  *[0-9a-f]* \([0-9a-f]*\) .*/\1/p')
if [ -n "$note" ]; then
    write_id() { dd of="$work/mqblk" bs=1 seek=$((16#$note + 16)) count=20 conv=notrunc status=none; }
    write_id </dev/zero
    printf "$(sha1sum <"$work/mqblk" | sed 's/ .*//; s/../\\x&/g')" | write_id
fi
scripts/install.sh "$PWD/$work/mqblk" "$root"

doc=$root/usr/share/doc/mqblk
install -m 644 packaging/debian/copyright "$doc/copyright"
{
    printf 'mqblk (%s) unstable; urgency=medium\n\n  * %s\n\n' "$version" "What a user notices is in CHANGELOG.md of the source."
    printf ' -- %s  %s\n' "$maintainer" "$(date -uR -d "@$SOURCE_DATE_EPOCH")"
} | gzip -9n >"$doc/changelog.gz"

# The libraries that the program is linked to, with their least versions.
printf 'Source: mqblk\n\nPackage: mqblk\nArchitecture: any\nDepends: ${shlibs:Depends}\n' >"$work/debian/control"
libraries=$(cd "$work" && dpkg-shlibdeps -O root/usr/bin/mqblk 2>/dev/null | sed -n 's/^shlibs:Depends=//p')

# In KiB, as dpkg-gencontrol counts: not what a file system makes of it.
size=$(find "$root" -path "$root/DEBIAN" -prune -o -type f -printf '%s\n' -o -printf '1\n' | awk '{ n += int(($1 + 1023) / 1024) } END { print n }')

cat >"$root/DEBIAN/control" <<CONTROL
Package: mqblk
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $size
Depends: $libraries, passwd
Suggests: qemu-system, libvirt-daemon-system, librbd1
Section: admin
Priority: optional
Description: disks for virtual machines over vhost-user and Xen blkif
 One daemon serves disk images and block devices to virtual machines as
 virtio-blk disks and as LUNs of virtio-scsi controllers (over vhost-user), and
 as paravirtual disks to guests of Xen, with many queues each.
 .
 The package has the daemon, its administration and a benchmark in one program,
 units of systemd, and the descriptor by which QEMU's management finds it.
CONTROL
for script in postinst prerm postrm; do
    install -m 755 "packaging/debian/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"

find "$root" -print0 | xargs -0 touch --no-dereference --date="@$SOURCE_DATE_EPOCH"
package=$work/mqblk_${version}_$architecture.deb
dpkg-deb --root-owner-group -Zxz --build "$root" "$package" >/dev/null
rm -rf "$root"
echo "$package"
