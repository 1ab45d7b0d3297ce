#!/bin/bash
# Installs a program and its files:  scripts/install.sh PROGRAM ROOT [PREFIX]
#
# PROGRAM is a built mqblk or mqblk-bench, ROOT the folder that stands for / (a package's, or / itself), PREFIX that of
# the program (/usr). For scripts/deb.sh, the Containerfile, and packages of other kinds.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1 root=${2%/} prefix=${3:-/usr}
name=$(basename "$program")

# put MODE SOURCE TARGET
put() { install -D -m "$1" "$2" "$root$3"; }

put 755 "$program" "$prefix/bin/$name"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# Completions and man pages, in their usual folders.
mkdir "$made/man" "$made/completions"
"$program" generate man "$made/man"
"$program" generate completions "$made/completions"
for page in "$made"/man/*.1; do
    gzip -9n "$page"
    put 644 "$page.gz" "$prefix/share/man/man1/$(basename "$page").gz"
done
put 644 "$made/completions/$name.bash" "$prefix/share/bash-completion/completions/$name"
put 644 "$made/completions/_$name" "$prefix/share/zsh/vendor-completions/_$name"
put 644 "$made/completions/$name.fish" "$prefix/share/fish/vendor_completions.d/$name.fish"
[ "$name" = mqblk ] || exit 0

# Files for systemd and QEMU's management.
mkdir -p "$root$prefix/libexec/mqblk"
ln -sfr "$root$prefix/bin/mqblk" "$root$prefix/libexec/mqblk/vhost-user-block"
for unit in mqblk.service mqblk@.service; do
    sed "/^ExecStart=/s|/usr/local/bin/mqblk|$prefix/bin/mqblk|" "examples/$unit" | sed '/^# systemd.*unit.*: /,/^$/d' >"$made/$unit"
    put 644 "$made/$unit" "$prefix/lib/systemd/system/$unit"
done
put 644 packaging/sysusers.conf "$prefix/lib/sysusers.d/mqblk.conf"
put 644 packaging/tmpfiles.conf "$prefix/lib/tmpfiles.d/mqblk.conf"
sed "s|/usr/libexec|$prefix/libexec|" packaging/50-mqblk-blk.json >"$made/50-mqblk-blk.json"
put 644 "$made/50-mqblk-blk.json" "$prefix/share/qemu/vhost-user/50-mqblk-blk.json"
put 644 examples/mqblk.toml "$prefix/share/doc/mqblk/examples/mqblk.toml"
