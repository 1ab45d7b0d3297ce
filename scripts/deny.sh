#!/bin/bash
# Checks licences, duplicates and sources of all dependencies by deny.toml, and their known faults if the database is
# reachable. Builds cargo-deny the first time, in a minute, below target/tools.
set -uo pipefail
cd "$(dirname "$0")/.."

version=0.20.2
tools=$PWD/target/tools
deny=$tools/bin/cargo-deny
if [ "$("$deny" --version 2>/dev/null)" != "cargo-deny $version" ]; then
    echo "building cargo-deny $version"
    # It runs for a second: what it takes is its build.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=256 \
        cargo install --quiet --locked --no-default-features --root "$tools" --target-dir "$tools/build" "cargo-deny@$version" || exit 1
    rm -rf "$tools/build"
fi
"$deny" --log-level error check --hide-inclusion-graph bans licenses sources || exit 1
if timeout 60 "$deny" --log-level off fetch db 2>/dev/null; then
    "$deny" --log-level error check --hide-inclusion-graph --disable-fetch advisories
else
    echo "scripts/deny.sh: the database of known faults is out of reach: not checked"
fi
