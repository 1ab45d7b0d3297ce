//! Every command with a virtual machine that README.md and docs/ print is run as it is printed, with real guests. See tests/src/documented.
//!
//! One test at a time, and only after tests/guest/prepare.sh: see tests/src/guest. KVM is hidden from QEMU where no guest boots with it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use mqblk_tests::documented::{Guests, Kind, Sandbox, Script, Session, plan};
use mqblk_tests::guest::{Shell, Vmm, with_each_vmm};
use mqblk_tests::hostile::daemon::mqblk_binary;

/// For a guest to see a change, and to move.
const WITHIN: Duration = Duration::from_secs(60);

/// What a page's blocks with virtual machines are, and those that belong to them.
fn scripts(page: &str) -> Result<Vec<Script>> {
    let text = plan::documents(&[page])?.remove(0).1;
    Ok(plan::part(&plan::scripts(&plan::blocks(page, &text)?)?, true))
}

/// Runs the blocks, and `look` after each.
fn run(page: &str, vmm: Vmm, mut look: impl FnMut(&mut Session, &Script) -> Result<()>) -> Result<()> {
    let mut session = Session::new(Sandbox::new(&mqblk_binary(), page == plan::INSTALL.0, Some(Guests::new(vmm)?))?);
    let scripts = scripts(page)?;
    for (index, script) in scripts.iter().enumerate() {
        if index > 0 && plan::servers_end_between(&scripts[index - 1], script) {
            session.interrupt()?;
        }
        let start = Instant::now();
        session.run(script)?;
        let ran = start.elapsed();
        look(&mut session, script)?;
        tell(&format!("{} ran {ran:.1?}, with the look {:.1?}", script.block.place(), start.elapsed()));
    }
    session.interrupt()
}

/// Seen with --nocapture.
#[expect(clippy::print_stdout, reason = "what takes long is worth to know")]
fn tell(line: &str) {
    println!("{line}");
}

/// A page with virtual machines that no test below names would not be run.
#[test]
fn each_page_with_guests_has_its_test() -> Result<()> {
    let mut found = Vec::new();
    for (page, text) in plan::pages(&mqblk_binary())? {
        if !plan::part(&plan::scripts(&plan::blocks(&page, &text)?)?, true).is_empty() {
            found.push(page);
        }
    }
    ensure!(
        found == ["README.md", "docs/migration.md"],
        "found commands with guests in {found:?}, expected them where the tests below run them"
    );
    Ok(())
}

#[test]
fn readme() -> Result<()> {
    with_each_vmm(|vmm| {
        let mut looked = 0;
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
                    looked += 1;
                }
                ("Serve a controller", Some(Kind::Qemu)) => {
                    targets(session, "0 8")?;
                    looked += 1;
                }
                ("Serve a controller", None) => {
                    targets(session, "0 1")?;
                    looked += 1;
                }
                _ => {}
            }
            Ok(())
        })?;
        ensure!(
            looked == 3,
            "README.md: {looked} of 3 looks into a guest were taken: sections or blocks have others names now"
        );
        Ok(())
    })
}

/// The guest has disks at just these targets.
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

/// QEMU 10.0: 7.2 knows no `reconnect-ms`, and moves few emulated guests well.
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
