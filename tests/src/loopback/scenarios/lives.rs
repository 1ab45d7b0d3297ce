//! Disconnects and destruction with requests in flight.

use anyhow::{Context, Result, ensure};
use mqblk_ring::blkif::{Request, operation, status};
use mqblk_xen::vbd::XenbusState;

use super::rings::all_work;
use crate::loopback::guest::{Guest, Shape};
use crate::loopback::pages::Pages;
use crate::loopback::request::{transfer, whole};
use crate::loopback::rig::{ANY, Disk, HOSTILE, MODES, Rig, SLOW};
use crate::loopback::{WATCH, wait_for};

const SHAPE: Shape = Shape { abi: mqblk_ring::blkif::Abi::X86_64, persistent: true, rings: 2, order: 0 };

/// Returns a device with requests in flight on all its rings, and their pages.
fn busy(fixture: &Rig, disk: Disk) -> Result<(Guest, Pages)> {
    let mut guest = fixture.attach(disk, SHAPE)?;
    let data = guest.pages(8)?;
    for (ring, at) in guest.rings.iter_mut().zip(0..) {
        for id in 0..32_u64 {
            let operation = if id % 3 == 0 { operation::WRITE } else { operation::READ };
            let page = whole(data.gref((id as usize + at) % 8));
            ring.send(&Request { id, ..transfer(operation, id * 8, &[page]) })?;
        }
    }
    Ok((guest, data))
}

pub(super) fn directories_removed(fixture: &mut Rig) -> Result<()> {
    for (turn, disk) in [SLOW, ANY, SLOW, ANY, SLOW].into_iter().enumerate() {
        let (mut guest, data) = busy(fixture, disk)?;
        match turn {
            // By the guest: its driver is gone.
            0 | 1 => {
                let path = guest.vbd.front_path();
                guest.front.store().remove(&path)?;
                wait_for("the backend closes", || Ok((guest.back_state()? == XenbusState::Closed).then_some(())))?;
            }
            // Only the state.
            2 => {
                guest.front.remove("state")?;
                wait_for("the backend closes", || Ok((guest.back_state()? == XenbusState::Closed).then_some(())))?;
            }
            // By the toolstack, both at once.
            _ => {}
        }
        guest.remove()?;
        drop(data);
        fixture.neighbour_goes_on()?;
        // Its storage is free again when its last request has completed.
        drop(guest);
        fixture.comes_to_rest()?;
        let mut next = fixture.attach(disk, SHAPE)?;
        let data = next.pages(2)?;
        if disk.id == ANY.id {
            all_work(&mut next, &data)?;
        }
        next.detach()?;
    }
    Ok(())
}

pub(super) fn closed_under_load(fixture: &mut Rig) -> Result<()> {
    for disk in [SLOW, ANY].into_iter().chain(MODES) {
        for state in [XenbusState::Closing, XenbusState::Closed, XenbusState::Initialising] {
            let (mut guest, data) = busy(fixture, disk)?;
            guest.front.set_state(state)?;
            wait_for("the backend follows", || {
                let found = guest.back_state()?;
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

pub(super) fn domain_destroyed(fixture: &mut Rig) -> Result<()> {
    for disk in [SLOW, ANY].into_iter().chain(MODES) {
        let (mut guest, data) = busy(fixture, disk)?;
        let machine = fixture.machine().context("a simulated machine")?;
        ensure!(machine.destroy_domain(HOSTILE), "no domain was destroyed");
        wait_for("the backend closes", || {
            Ok(matches!(guest.back_state()?, XenbusState::Closed | XenbusState::Unknown).then_some(()))
        })
        .with_context(|| disk.id)?;
        guest.remove()?;
        drop((guest, data));
        fixture.neighbour_goes_on()?;
        let counters = fixture.machine().context("a simulated machine")?.stats();
        ensure!(counters.live_grants > 0, "the good disk's grants have gone too: {counters:?}");
        fixture.revive()?;
        let mut next = fixture.attach(ANY, SHAPE)?;
        let data = next.pages(2)?;
        all_work(&mut next, &data).context("a domain of the same number")?;
        next.detach()?;
    }
    Ok(())
}

pub(super) fn refused_mappings(fixture: &mut Rig) -> Result<()> {
    for disk in MODES {
        let mut guest = fixture.make(disk)?;
        let data = guest.pages(2)?;
        let machine = fixture.machine().context("a simulated machine")?;
        // The ring cannot be mapped: the device fails.
        let keys = guest.make_rings(SHAPE)?;
        machine.set_map_failure(HOSTILE, guest.rings[1].raw.pages.refs[0], true);
        ensure!(guest.front.connect(&keys).is_err(), "a ring that cannot be mapped was taken");
        guest.must_fail("ring 1")?;
        guest.close()?;
        guest.reconnect(Shape { persistent: disk.persistent, ..SHAPE })?;
        // Data cannot be mapped: it is copied.
        machine.fail_next_maps(1000);
        all_work(&mut guest, &data).with_context(|| disk.id)?;
        machine.fail_next_maps(0);
        all_work(&mut guest, &data).with_context(|| disk.id)?;
        // Nor copied: this request fails, the next one succeeds.
        for refused in [-1, -2, -3, -8, -10, -12, -13] {
            let status = mqblk_memory::GrantStatus(refused);
            ensure!(machine.set_copy_failure(HOSTILE, data.gref(0), status), "no such grant");
            machine.set_map_failure(HOSTILE, data.gref(0), true);
            let fresh = guest.pages(1)?;
            ensure!(machine.set_copy_failure(HOSTILE, fresh.gref(0), status), "no such grant");
            machine.set_map_failure(HOSTILE, fresh.gref(0), true);
            for operation in [operation::WRITE, operation::READ] {
                let response_status = guest.rings[0].ask(&transfer(operation, 0, &[whole(fresh.gref(0))]))?;
                ensure!(response_status == status::ERROR, "{}: status {response_status} for {status:?}", disk.id);
            }
            ensure!(machine.set_copy_failure(HOSTILE, data.gref(0), mqblk_memory::GrantStatus::OKAY), "no such grant");
            machine.set_map_failure(HOSTILE, data.gref(0), false);
            machine.set_map_failure(HOSTILE, fresh.gref(0), false);
            all_work(&mut guest, &data).with_context(|| disk.id)?;
        }
        guest.detach()?;
    }
    // Xenstore refuses every commit for a while: the daemon retries.
    fixture.machine().context("a simulated machine")?.inject_store_conflicts(20);
    let guest = fixture.attach(ANY, SHAPE)?;
    std::thread::sleep(WATCH);
    guest.detach()
}
