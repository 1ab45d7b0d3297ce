# Sourced. The only caller of apt-get: asks nothing, and waits for the locks of another apt, such as the daily update.

# Seconds to wait for each lock of apt and dpkg.
apt_lock_timeout=${apt_lock_timeout:-600}

# apt-get itself waits only for dpkg's locks, not for those of its lists and archives.
apt_get() {
    local errors code until=$((SECONDS + apt_lock_timeout))
    errors=$(mktemp) || return
    while true; do
        code=0
        LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q -y -o "DPkg::Lock::Timeout=$apt_lock_timeout" -o Dpkg::Use-Pty=0 \
            -o APT::Sandbox::User=root "$@" 2>"$errors" || code=$?
        [ "$code" -ne 0 ] && grep -q 'Could not get lock' "$errors" && [ "$SECONDS" -lt "$until" ] || break
        sleep 1
    done
    cat "$errors" >&2
    rm -f "$errors"
    return "$code"
}

# Prints those of the packages that are not installed.
missing_packages() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
    done
}
