#!/bin/bash
# Checks that this machine can build mqblk. Otherwise prints one line with the missing package.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "mqblk: $*" >&2
    exit 1
}

need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
[ "$(uname -s)" = Linux ] || fail "this machine runs $(uname -s); mqblk needs Linux"
command -v cargo >/dev/null && command -v rustc >/dev/null ||
    fail "found no Rust toolchain; install Rust $need or later from https://rustup.rs, then open a new shell"
have=$(rustc --version | cut -d' ' -f2)
# A pre-release such as 1.90.0-nightly counts as its release.
[ "$(printf '%s\n' "$need" "${have%%-*}" | sort -V | head -n 1)" = "$need" ] ||
    fail "found Rust $have; install $need or later: rustup update stable"

if ! command -v cc >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "installing a linker (gcc)"
        . scripts/apt.sh
        { apt_get update && apt_get install --no-install-recommends gcc libc6-dev; } \
            >/dev/null </dev/null || fail "apt-get could not install gcc and libc6-dev"
    else
        fail "found no linker; install one as root: apt-get install gcc libc6-dev"
    fi
fi
