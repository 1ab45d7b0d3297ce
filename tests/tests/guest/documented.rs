//! Runs every command with a virtual machine from README.md and docs/ as printed, with real guests. See
//! tests/src/documented.
//!
//! KVM is hidden from QEMU where no guest boots with it.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::documented::{Guests, Kind, Sandbox, Script, Session, plan};
use mqblk_tests::guest::{Shell, Vmm, is_fault_of_emulation, with_each_vmm};
use mqblk_tests::hostile::daemon::{mqblk_bench_binary, mqblk_binary};

/// Time for a guest to see a change, and for a migration.
const WITHIN: Bound = Bound::seconds(60);

/// Returns a page's blocks with virtual machines, and those that belong to them.
fn scripts(page: &str) -> Result<Vec<Script>> {
    let text = plan::documents(&[page])?.remove(0).1;
    Ok(plan::part(&plan::scripts(&plan::blocks(page, &text)?)?, true))
}

/// Number of runs of a page until a guest boots.
const ATTEMPTS: u32 = 3;

/// Runs the blocks, and `check` after each. Runs the page again if [emulation fails](is_fault_of_emulation).
fn run(page: &str, vmm: Vmm, mut check: impl FnMut(&mut Session, &Script) -> Result<()>) -> Result<()> {
    for _ in 1..ATTEMPTS {
        match run_once(page, vmm, &mut check) {
            Err(error) if is_fault_of_emulation(&format!("{error:#}")) => {
                report(&format!("{page}: once more: {error:#}"));
            }
            result => return result,
        }
    }
    run_once(page, vmm, &mut check)
}

fn run_once(page: &str, vmm: Vmm, check: &mut impl FnMut(&mut Session, &Script) -> Result<()>) -> Result<()> {
    let mut session =
        Session::new(Sandbox::new(&mqblk_bench_binary(), page == plan::INSTALL.0, Some(Guests::new(vmm)?))?);
    let scripts = scripts(page)?;
    for (index, script) in scripts.iter().enumerate() {
        if index > 0 && plan::servers_end_between(&scripts[index - 1], script) {
            session.interrupt()?;
        }
        let start = Instant::now();
        session.run(script)?;
        let ran = start.elapsed();
        check(&mut session, script)?;
        report(&format!("{} ran {ran:.1?}, with the check {:.1?}", script.block.place(), start.elapsed()));
    }
    session.interrupt()
}

/// Prints a line, visible with --nocapture.
#[expect(clippy::print_stdout, reason = "the duration of each block")]
fn report(line: &str) {
    println!("{line}");
}

/// A page with virtual machines but without a test below would not be run.
#[test]
fn each_page_with_guests_has_its_test() -> Result<()> {
    let mut found = Vec::new();
    for (page, text) in plan::pages(&mqblk_binary())? {
        if !plan::part(&plan::scripts(&plan::blocks(&page, &text)?)?, true).is_empty() {
            found.push(page);
        }
    }
    ensure!(
        found == ["README.md", "docs/migration.md", "docs/tutorial.md"],
        "found commands with guests in {found:?}, expected them where the tests below run them"
    );
    Ok(())
}

#[test]
fn readme() -> Result<()> {
    with_each_vmm(|vmm| {
        // Per block, because a page may be run again.
        let mut checked = BTreeSet::new();
        run("README.md", vmm, |session, script| {
            match (&*script.block.section, script.stays) {
                ("Serve a disk", Some(Kind::Qemu)) => {
                    let guest = session.visitor(0)?;
                    let seen = guest.must("cat /sys/block/vda/size; ls /sys/block/vda/mq | wc -l")?;
                    ensure!(
                        seen.split_whitespace().eq(["20971520", "4"]),
                        "the guest sees {seen:?}, expected 10 GiB and 4 queues"
                    );
                    guest.must("dd if=/dev/urandom of=/tmp/a bs=1M count=4 2>&1 && dd if=/tmp/a of=/dev/vda oflag=direct bs=1M 2>&1")?;
                    guest.must("dd if=/dev/vda of=/tmp/b iflag=direct bs=1M count=4 2>&1 && cmp /tmp/a /tmp/b")?;
                    checked.insert(script.block.place());
                }
                ("Serve a controller", Some(Kind::Qemu)) => {
                    targets(session, "0 8")?;
                    checked.insert(script.block.place());
                }
                ("Serve a controller", None) => {
                    targets(session, "0 1")?;
                    checked.insert(script.block.place());
                }
                _ => {}
            }
            Ok(())
        })?;
        ensure!(
            checked.len() == 3,
            "README.md: {} of 3 checks of a guest were made: sections or blocks have other names now",
            checked.len()
        );
        Ok(())
    })
}

/// Checks that the guest has disks at exactly these targets.
fn targets(session: &mut Session, wanted: &str) -> Result<()> {
    let script = format!(
        "for try in $(seq 200); do
             found=$(for disk in /sys/block/sd*; do [ -b /dev/${{disk##*/}} ] && readlink -f $disk/device | sed 's/.*://;' >/dev/null && readlink -f $disk/device | sed 's/.*\\/[0-9]*:[0-9]*:\\([0-9]*\\):.*/\\1/'; done | sort -n | tr '\\n' ' ')
             [ \"$found\" = '{wanted} ' ] && exit 0
             sleep 0.1
         done
         echo \"found disks at the targets $found, expected {wanted}\"; exit 1"
    );
    session.visitor(0)?.must_within(&script, WITHIN).map(drop)
}

/// Returns the block of a page's section to be typed in the guest: the one that is no host command.
fn typed_in_the_guest(page: &str, section: &str) -> Result<String> {
    let text = plan::documents(&[page])?.remove(0).1;
    let blocks = plan::blocks(page, &text)?;
    let found: Vec<_> = blocks.iter().filter(|block| block.section == section && block.language == "text").collect();
    ensure!(found.len() == 1, "{page}: found {} blocks of text in {section:?}, expected one", found.len());
    Ok(found[0].text.clone())
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn tutorial() -> Result<()> {
    const PAGE: &str = "docs/tutorial.md";
    let verify = typed_in_the_guest(PAGE, "Verify it in the guest")?;
    let size = typed_in_the_guest(PAGE, "Give it another size")?;
    let finds_disk = verify.lines().next().unwrap_or_default().to_owned();
    with_each_vmm(|vmm| {
        let mut checked = BTreeSet::new();
        run(PAGE, vmm, |session, script| {
            if script.stays == Some(Kind::Qemu) {
                let said = session.visitor(0)?.must_within(&format!("set -e\n{verify}"), WITHIN)?;
                ensure!(
                    said.lines().last() == Some("verified"),
                    "in the guest: found {said:?}, expected verified at its end"
                );
                checked.insert("verified");
            }
            if script.block.text.contains("disk resize") {
                let sees = format!(
                    "{finds_disk}\nfor try in $(seq 100); do [ \"$({size})\" = 4194304 ] && exit 0; sleep 0.1; done; {size}; exit 1"
                );
                session.visitor(0)?.must_within(&sees, WITHIN)?;
                checked.insert("resized");
            }
            Ok(())
        })?;
        ensure!(checked.len() == 2, "{PAGE}: only {checked:?} was checked: sections or blocks have other names now");
        Ok(())
    })
}

/// QEMU 10.0: 7.2 has no `reconnect-ms`, and rarely migrates emulated guests well.
#[test]
fn migration() -> Result<()> {
    let mut moved = false;
    run("docs/migration.md", Vmm::Trixie, |session, script| {
        if script.stays == Some(Kind::Qemu) && !script.last().contains("-incoming") {
            session.visitor(0)?.must("echo 'the words' | dd of=/dev/vda conv=sync bs=512 oflag=direct 2>&1")?;
        }
        if script.block.text.contains("migrate -d") {
            session.moved(0, 1)?;
            let guest = session.visitor(1)?;
            let read =
                guest.must_within("dd if=/dev/vda bs=512 count=1 iflag=direct 2>/dev/null | head -n 1", WITHIN)?;
            ensure!(read == "the words", "at the destination the guest reads {read:?}");
            guest.must("dd if=/dev/zero of=/dev/vda bs=4096 count=1 oflag=direct 2>&1")?;
            moved = true;
        }
        Ok(())
    })?;
    ensure!(moved, "docs/migration.md: no block with 'migrate -d' was run");
    Ok(())
}
