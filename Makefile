# make quickstart   build, serve an image, write and verify it, benchmark it, show how to attach it to a virtual machine
# make test         tests of everything, also with real guests and on a real Xen, in about 25 minutes on two cores (as root: it installs QEMU and others with apt)
# make test-fast    without virtual machines
# make test-again   only what failed in the last run
# make test-guest   only those with virtual machines, with the long ones that make test leaves out
# make test-xen     only those on Xen, which QEMU emulates, with the long ones
# make test-crash   100 kills and 50 stops of the daemon under verified load for each interface (minutes; test-fast has a tenth)
# make test-ceph    only those on real clusters of Ceph (as root: it installs Ceph with apt)
# make test-libvirt only a domain of libvirt on the packaged service (as root)
# make deb          Debian packages, in target/deb
# make test-deb     the packages in a fresh system (as root: it installs debootstrap and lintian with apt; minutes)
# make fuzz         cargo fuzz, 60 seconds each target (FUZZ_SECONDS=600: longer); needs rustup: installs nightly Rust and cargo-fuzz
# make deny         licences, doubles and known faults of all dependencies (builds cargo-deny the first time)
# make soak         all tests in their long forms: more seeds, kills, restarts, migrations and power cuts (hours)
# make clean        remove what was built and downloaded

.PHONY: help quickstart test test-fast test-again test-guest test-xen test-crash test-ceph test-libvirt deb test-deb fuzz deny soak clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

quickstart:
	@scripts/quickstart.sh

test:
	@scripts/test.sh fast guest xen libvirt

test-fast:
	@scripts/test.sh fast

test-again:
	@scripts/test.sh again

test-guest:
	@scripts/test.sh long guest

test-xen:
	@scripts/test.sh long xen

test-crash:
	@scripts/test.sh crash

test-ceph:
	@scripts/test.sh ceph

test-libvirt:
	@scripts/test.sh libvirt

deb:
	@scripts/deb.sh

test-deb:
	@scripts/test-deb.sh

fuzz:
	@scripts/fuzz.sh

deny:
	@scripts/deny.sh

soak:
	@scripts/test.sh soak

clean:
	cargo clean
	rm -rf .cache
