//! Disconnects and destruction with requests in flight.

use anyhow::{Context, Result, ensure};
use mqblk_ring::blkif::{BlkifRequest, operation, status};
use mqblk_xen::vbd::XenbusState;

use super::rings::check_all_rings;
use crate::loopback::fixture::{DEFAULT_DISK, HOSTILE_DOMAIN, LoopbackDisk, LoopbackFixture, MODES, SLOW};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend};
use crate::loopback::pages::GrantedPages;
use crate::loopback::request::{transfer, whole_page};
use crate::loopback::{QUIET_TIME, wait_for};

const CONFIG: FrontendConfig =
    FrontendConfig { abi: mqblk_ring::blkif::Abi::X86_64, persistent: true, rings: 2, ring_page_order: 0 };

/// Returns a device with requests in flight on all its rings, and their pages.
fn busy(fixture: &LoopbackFixture, disk: LoopbackDisk) -> Result<(LoopbackFrontend, GrantedPages)> {
    let mut guest = fixture.attach(disk, CONFIG)?;
    let data = guest.pages(8)?;
    for (ring, at) in guest.rings.iter_mut().zip(0..) {
        for id in 0..32_u64 {
            let operation = if id % 3 == 0 { operation::WRITE } else { operation::READ };
            let page = whole_page(data.gref((id as usize + at) % 8));
            ring.send(&BlkifRequest { id, ..transfer(operation, id * 8, &[page]) })?;
        }
    }
    Ok((guest, data))
}

pub(super) fn directories_removed(fixture: &mut LoopbackFixture) -> Result<()> {
    for (turn, disk) in [SLOW, DEFAULT_DISK, SLOW, DEFAULT_DISK, SLOW].into_iter().enumerate() {
        let (mut guest, data) = busy(fixture, disk)?;
        match turn {
            // By the guest: its driver is gone.
            0 | 1 => {
                let path = guest.vbd.frontend_path();
                guest.front.store().remove(&path)?;
                wait_for("the backend closes", || Ok((guest.backend_state()? == XenbusState::Closed).then_some(())))?;
            }
            // Only the state changes.
            2 => {
                guest.front.remove("state")?;
                wait_for("the backend closes", || Ok((guest.backend_state()? == XenbusState::Closed).then_some(())))?;
            }
            // By the toolstack, both at once.
            _ => {}
        }
        guest.remove()?;
        drop(data);
        fixture.check_neighbour()?;
        // The storage is released when its last request has completed.
        drop(guest);
        fixture.wait_until_idle()?;
        let mut next = fixture.attach(disk, CONFIG)?;
        let data = next.pages(2)?;
        if disk.id == DEFAULT_DISK.id {
            check_all_rings(&mut next, &data)?;
        }
        next.detach()?;
    }
    Ok(())
}

pub(super) fn closed_under_load(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in [SLOW, DEFAULT_DISK].into_iter().chain(MODES) {
        for state in [XenbusState::Closing, XenbusState::Closed, XenbusState::Initialising] {
            let (mut guest, data) = busy(fixture, disk)?;
            guest.front.set_state(state)?;
            wait_for("the backend follows", || {
                let found = guest.backend_state()?;
                Ok((found != XenbusState::Connected).then_some(()))
            })?;
            // A frontend in Closing may still take responses; in Closed it takes no more.
            if state == XenbusState::Closing {
                for ring in &mut guest.rings {
                    for _ in 0..32 {
                        ensure!(ring.poll()?.status == status::OKAY, "a request failed while its frontend closes");
                    }
                }
            }
            drop(data);
            guest.detach().with_context(|| format!("{}, state {state}", disk.id))?;
        }
    }
    Ok(())
}

pub(super) fn domain_destroyed(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in [SLOW, DEFAULT_DISK].into_iter().chain(MODES) {
        let (mut guest, data) = busy(fixture, disk)?;
        let machine = fixture.machine().context("a simulated machine")?;
        ensure!(machine.destroy_domain(HOSTILE_DOMAIN), "no domain was destroyed");
        wait_for("the backend closes", || {
            Ok(matches!(guest.backend_state()?, XenbusState::Closed | XenbusState::Unknown).then_some(()))
        })
        .with_context(|| disk.id)?;
        guest.remove()?;
        drop((guest, data));
        fixture.check_neighbour()?;
        let counters = fixture.machine().context("a simulated machine")?.stats();
        ensure!(counters.live_grants > 0, "the good disk's grants have gone too: {counters:?}");
        fixture.reconnect_domain()?;
        let mut next = fixture.attach(DEFAULT_DISK, CONFIG)?;
        let data = next.pages(2)?;
        check_all_rings(&mut next, &data).context("a domain of the same number")?;
        next.detach()?;
    }
    Ok(())
}

pub(super) fn refused_mappings(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut guest = fixture.create(disk)?;
        let data = guest.pages(2)?;
        let machine = fixture.machine().context("a simulated machine")?;
        // The ring cannot be mapped: the device fails.
        let keys = guest.make_rings(CONFIG)?;
        machine.set_map_failure(HOSTILE_DOMAIN, guest.rings[1].raw.pages.refs[0], true);
        ensure!(guest.front.connect(&keys).is_err(), "a ring that cannot be mapped was taken");
        guest.must_fail("ring 1")?;
        guest.close()?;
        guest.reconnect(FrontendConfig { persistent: disk.persistent, ..CONFIG })?;
        // Data cannot be mapped: it is copied.
        machine.fail_next_maps(1000);
        check_all_rings(&mut guest, &data).with_context(|| disk.id)?;
        machine.fail_next_maps(0);
        check_all_rings(&mut guest, &data).with_context(|| disk.id)?;
        // The copy fails too: this request fails, the next one succeeds.
        for refused in [-1, -2, -3, -8, -10, -12, -13] {
            let status = mqblk_memory::GrantStatus(refused);
            ensure!(machine.set_copy_failure(HOSTILE_DOMAIN, data.gref(0), status), "no such grant");
            machine.set_map_failure(HOSTILE_DOMAIN, data.gref(0), true);
            let fresh = guest.pages(1)?;
            ensure!(machine.set_copy_failure(HOSTILE_DOMAIN, fresh.gref(0), status), "no such grant");
            machine.set_map_failure(HOSTILE_DOMAIN, fresh.gref(0), true);
            for operation in [operation::WRITE, operation::READ] {
                let response_status = guest.rings[0].run(&transfer(operation, 0, &[whole_page(fresh.gref(0))]))?;
                ensure!(response_status == status::ERROR, "{}: status {response_status} for {status:?}", disk.id);
            }
            ensure!(
                machine.set_copy_failure(HOSTILE_DOMAIN, data.gref(0), mqblk_memory::GrantStatus::OKAY),
                "no such grant"
            );
            machine.set_map_failure(HOSTILE_DOMAIN, data.gref(0), false);
            machine.set_map_failure(HOSTILE_DOMAIN, fresh.gref(0), false);
            check_all_rings(&mut guest, &data).with_context(|| disk.id)?;
        }
        guest.detach()?;
    }
    // Xenstore refuses every commit for a while: the daemon retries.
    fixture.machine().context("a simulated machine")?.inject_store_conflicts(20);
    let guest = fixture.attach(DEFAULT_DISK, CONFIG)?;
    std::thread::sleep(QUIET_TIME);
    guest.detach()
}
