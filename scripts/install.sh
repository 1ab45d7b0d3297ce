#!/bin/bash
# Installs what belongs to mqblk beside its program:  scripts/install.sh PROGRAM ROOT [PREFIX]
#
# PROGRAM is a built mqblk, ROOT the folder that stands for / (a package's, or / itself), PREFIX where the program goes (/usr). Used by
# scripts/deb.sh and the Containerfile; a package of another kind does the same.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1 root=${2%/} prefix=${3:-/usr}

# put MODE SOURCE TARGET
put() { install -D -m "$1" "$2" "$root$3"; }

put 755 "$program" "$prefix/bin/mqblk"
mkdir -p "$root$prefix/libexec/mqblk"
ln -sfr "$root$prefix/bin/mqblk" "$root$prefix/libexec/mqblk/vhost-user-block"

# What systemd, QEMU's management and shells look for, where they look.
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for unit in mqblk.service mqblk@.service; do
    sed "/^ExecStart=/s|/usr/local/bin/mqblk|$prefix/bin/mqblk|" "examples/$unit" | sed '/^# systemd.*unit.*: /,/^$/d' >"$made/$unit"
    put 644 "$made/$unit" "$prefix/lib/systemd/system/$unit"
done
put 644 packaging/sysusers.conf "$prefix/lib/sysusers.d/mqblk.conf"
put 644 packaging/tmpfiles.conf "$prefix/lib/tmpfiles.d/mqblk.conf"
sed "s|/usr/libexec|$prefix/libexec|" packaging/50-mqblk-blk.json >"$made/50-mqblk-blk.json"
put 644 "$made/50-mqblk-blk.json" "$prefix/share/qemu/vhost-user/50-mqblk-blk.json"

mkdir "$made/man" "$made/completions"
"$program" generate man "$made/man"
"$program" generate completions "$made/completions"
for page in "$made"/man/*.1; do
    gzip -9n "$page"
    put 644 "$page.gz" "$prefix/share/man/man1/$(basename "$page").gz"
done
put 644 "$made/completions/mqblk.bash" "$prefix/share/bash-completion/completions/mqblk"
put 644 "$made/completions/_mqblk" "$prefix/share/zsh/vendor-completions/_mqblk"
put 644 "$made/completions/mqblk.fish" "$prefix/share/fish/vendor_completions.d/mqblk.fish"
put 644 examples/mqblk.toml "$prefix/share/doc/mqblk/examples/mqblk.toml"
