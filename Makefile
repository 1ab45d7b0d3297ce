# make quickstart   build, serve an image, write and verify it, benchmark it, show how to attach it to a virtual machine
# make test         every test, those with real guests and on a real Xen too (as root: it installs QEMU and others with apt)
# make test-fast    without virtual machines
# make test-guest   only those with virtual machines
# make test-xen     only those on Xen, which QEMU emulates
# make clean        remove what was built and downloaded

.PHONY: help quickstart test test-fast test-guest test-xen clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

quickstart:
	@scripts/quickstart.sh

test:
	@scripts/test.sh fast guest xen

test-fast:
	@scripts/test.sh fast

test-guest:
	@scripts/test.sh guest

test-xen:
	@scripts/test.sh xen

clean:
	cargo clean
	rm -rf .cache
