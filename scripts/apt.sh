# Sourced. The only place that calls apt-get: it asks nothing, and waits where another apt, such as the daily update, holds a lock.

# Seconds to wait for each lock of apt and dpkg.
apt_lock_timeout=600

apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o "DPkg::Lock::Timeout=$apt_lock_timeout" -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root "$@"
}

# Prints those of the packages that are not installed.
missing_packages() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
    done
}
