# Functions shared by the scripts that prepare a test machine: Debian's packages, a kernel unpacked from one of them, and an initramfs
# made of busybox, other programs with their libraries, and modules. Sourced; expects:
#
# cache            the folder for all results
# packages         the packages to install
# kernel_package   the Debian package of the kernel
# unpacked         (optional) a folder of unpacked packages: their libraries come before the system's

fail() {
    echo "prepare.sh: $*" >&2
    exit 1
}
say() { echo "prepare.sh: $*"; }

. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/apt.sh"
apt_options=() # set by own_apt
apt_quiet() { apt_get "${apt_options[@]}" "$@"; }

# Runs a command with its output in a log; on failure the log's end is shown.
logged() {
    local log=$cache/$1.log
    shift
    "$@" >"$log" 2>&1 </dev/null || {
        tail -n 20 "$log" >&2
        fail "'$*' failed; the whole output is in $log"
    }
}

# Checks the host, and takes a lock against concurrent runs.
begin_preparing() {
    [ "$(uname -m)" = x86_64 ] || fail "the guest tests know x86_64 only, this is $(uname -m)"
    command -v apt-get >/dev/null || fail "apt-get is missing: this step is for Debian"
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9
}

install_packages() {
    local missing
    missing=($(missing_packages "${packages[@]}"))
    [ ${#missing[@]} -eq 0 ] && return
    [ "$(id -u)" -eq 0 ] || fail "these packages are missing and installing needs root: ${missing[*]}"
    say "installing ${missing[*]}"
    refresh_apt
    logged apt-install apt_quiet install --no-install-recommends "${missing[@]}"
}

refreshed=
refresh_apt() {
    [ -n "$refreshed" ] || logged apt-update apt_quiet update
    refreshed=yes
}

# own_apt FOLDER TYPE [CODENAME]: makes apt use only the list of TYPE (deb, deb-src) for a Debian release (default: the running one),
# from the system's mirror, with all its state in FOLDER. Most machines list no source packages and only their own release.
# own_apt without arguments returns to the system's lists.
own_apt() {
    local folder=${1:-} running codename mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    apt_options=()
    refreshed=
    [ -n "$folder" ] || return 0
    running=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    codename=${3:-$running}
    mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v c="$running" '$1 == c && $2 == "main" { print $3; exit }')
    [ -n "$mirror" ] || fail "apt lists no mirror for '$running main', so nothing of '$codename' can be fetched"
    [ -e $keyring ] || fail "$keyring is missing (package debian-archive-keyring)"
    rm -rf "$folder" && mkdir -p "$folder/lists/partial"
    echo "$2 [signed-by=$keyring] $mirror $codename main" >"$folder/sources.list"
    : >"$folder/status"
    # Without the system's status, "install" means with all libraries.
    apt_options=(-o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$folder/lists"
        -o "Dir::State::status=$folder/status" -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache=)
    refresh_apt
}

# Prints the name of the newest kernel's package: linux-image-cloud-amd64 only depends on it.
real_kernel_package() {
    local depends
    case $kernel_package in linux-image-[0-9]*) echo "$kernel_package" && return ;; esac
    depends=$(apt-cache "${apt_options[@]}" depends "$kernel_package" 2>/dev/null) || return 0
    sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p;T;q' <<<"$depends"
}

# kernel_parts PACKAGE: prints a kernel's package and those with its parts: since Linux 7.2 Debian's only depends on
# them.
kernel_parts() {
    echo "$1"
    apt-cache "${apt_options[@]}" depends "$1" 2>/dev/null | sed -n 's/^ *Depends: \(linux-\(base\|binary\|modules\)-[0-9].*\)/\1/p'
}

# Unpacks the ELF kernel of a bzImage, at the place its header names (Linux x86 boot protocol 2.08: setup_sects at
# 0x1f1, payload_offset at 0x248, payload_length at 0x24c). The payload ends with its unpacked length.
unpack_bzimage() {
    local image=$1 out=$2 sects offset length magic unpack want
    number() { od -An -t"u$3" -j "$2" -N "$3" "$1" | tr -d ' '; }
    [ "$(od -An -c -j 514 -N 4 "$image" | tr -d ' ')" = HdrS ] || fail "$image is no bzImage: no HdrS at 0x202"
    sects=$(number "$image" 497 1)
    offset=$(((${sects/#0/4} + 1) * 512 + $(number "$image" 584 4)))
    length=$(number "$image" 588 4)
    want=$(number "$image" $((offset + length - 4)) 4)
    magic=$(od -An -tx1 -j $offset -N 4 "$image" | tr -d ' ')
    case $magic in
        fd377a58) unpack="xz -dc" ;;
        02214c18) unpack="lz4 -dc" ;;
        28b52ffd) unpack="zstd -dc" ;;
        1f8b*) unpack="gzip -dc" ;;
        *) fail "$image: the payload's compression is unknown (it begins with $magic)" ;;
    esac
    tail -c +$((offset + 1)) "$image" | head -c $((length - 4)) >"$out.payload" || true
    $unpack <"$out.payload" >"$out" || fail "$image: '$unpack' failed"
    rm "$out.payload"
    [ "$(stat -c %s "$out")" -eq "$want" ] || fail "$image: unpacked to $(stat -c %s "$out") bytes, its header says $want"
}

# prepare_kernel [FOLDER]: vmlinux, modules and kernel.version of the newest kernel package, in the folder (the cache itself).
prepare_kernel() {
    local package part folder=${1:-$cache} work=${1:-$cache}/kernel.new
    [ -e "$folder/vmlinux" ] && [ -e "$folder/kernel.version" ] && return
    package=$(real_kernel_package)
    if [ -z "$package" ]; then
        refresh_apt
        package=$(real_kernel_package)
    fi
    [ -n "$package" ] || fail "apt knows no kernel package behind '$kernel_package'"
    say "downloading $package"
    rm -rf "$work" && mkdir "$work"
    if ! (cd "$work" && apt_quiet download $(kernel_parts "$package")) >"$cache/kernel-download.log" 2>&1; then
        refresh_apt # a mirror drops a package when its successor arrives
        package=$(real_kernel_package)
        (cd "$work" && logged kernel-download apt_quiet download $(kernel_parts "$package"))
    fi
    for part in "$work"/linux-*.deb; do
        dpkg-deb -x "$part" "$work/root" || fail "cannot unpack $part"
    done
    if ! [ -e "$work/root/lib" ]; then ln -s usr/lib "$work/root/lib"; fi # trixie's packages know no /lib
    local images=("$work"/root/boot/vmlinuz-* "$work"/root/lib/modules/*/vmlinuz)
    [ -e "${images[0]}" ] || images=("${images[1]}")
    unpack_bzimage "${images[0]}" "$work/vmlinux"
    local version=$work/root/lib/modules/*
    version=$(basename $version)
    depmod -b "$work/root" "$version"
    rm -rf "$folder/modules" && mv "$work/root/lib/modules" "$folder/modules"
    mv "$work/vmlinux" "$folder/vmlinux"
    rm -rf "$work"
    echo "$version" >"$folder/kernel.version"
}

# A root folder with busybox and its applets.
begin_root() {
    local root=$1 applet
    rm -rf "$root" && mkdir -p "$root"/{bin,sbin,dev,proc,sys,run,tmp,mnt,etc}
    install /bin/busybox "$root/bin/busybox"
    for applet in $(/bin/busybox --list); do ln -s busybox "$root/bin/$applet" 2>/dev/null || true; done
}

# Packs the root folder into a cpio archive, and removes it.
end_root() {
    local root=$1 archive=$2
    (cd "$root" && find . | sort | cpio --quiet -o -H newc -R 0:0) >"$archive.new"
    mv "$archive.new" "$archive"
    rm -rf "$root"
}

# Copies a program to /sbin (or $3) below $1, and the libraries of its loader to the same paths as here.
copy_program() {
    local root=$1 file=$2 folder=${3:-/sbin} lib libraries
    [ -e "$file" ] || fail "$file is missing"
    install -D "$(readlink -f "$file")" "$root$folder/$(basename "$file")"
    libraries=$(LD_LIBRARY_PATH=${unpacked:+$unpacked/usr/lib/x86_64-linux-gnu} ldd "$file")
    case $libraries in *"not found"*) fail "$file lacks libraries: $(grep "not found" <<<"$libraries" | sort -u)" ;; esac
    for lib in $(grep -o '/[^ ]*\.so[^ ]*' <<<"$libraries"); do
        [ -e "$root${lib#"${unpacked:-}"}" ] || install -D "$(readlink -f "$lib")" "$root${lib#"${unpacked:-}"}"
    done
}

# copy_modules ROOT KERNEL MODULE...: these modules of the kernel in the folder KERNEL, with those that they need, to
# /lib/modules, and the order of their loading to /lib/modules/order.
copy_modules() {
    local root=$1 kernel=$2 version module
    shift 2
    version=$(cat "$kernel/kernel.version")
    mkdir -p "$root/lib/modules" "$cache/modprobe.new/lib"
    ln -sfn "$kernel/modules" "$cache/modprobe.new/lib/modules"
    for module in "$@"; do
        modprobe -d "$cache/modprobe.new" -S "$version" --show-depends "$module" >"$cache/modprobe.log" 2>&1 ||
            fail "the kernel $version has no module '$module': $(tail -n 1 "$cache/modprobe.log")"
        sed -n 's/^insmod \([^ ]*\).*/\1/p' "$cache/modprobe.log"
    done | awk '!seen[$0]++' >"$cache/modules.list"
    rm -r "$cache/modprobe.new/lib" && rmdir "$cache/modprobe.new"
    while read -r module; do
        module=$kernel/modules/${module#*/lib/modules/}
        # Unpacked here: in the guest that would be emulated, and busybox' insmod cannot.
        case $module in
            *.xz) xz -dc "$module" >"$root/lib/modules/$(basename "$module" .xz)" ;;
            *) cp "$module" "$root/lib/modules/" ;;
        esac || fail "cannot copy the module $module"
        basename "$module" .xz
    done <"$cache/modules.list" >"$root/lib/modules/order"
}
