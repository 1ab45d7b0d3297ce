use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use mqblk_xen::{EventPort, Port};

fn is_readable(port: &EventPort, wait: Duration) -> bool {
    let mut polled = [PollFd::new(&port.descriptor, PollFlags::IN)];
    let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
    rustix::event::poll(&mut polled, Some(&timeout)).unwrap() == 1
}

fn has_event(port: &EventPort) -> bool {
    is_readable(port, Duration::ZERO)
}

/// Both ends of a channel, with nothing pending.
fn pair(bed: &TestMachine) -> (EventPort, EventPort) {
    let front = bed.front.alloc_unbound(DomainId(0)).unwrap();
    let back = bed.back.bind_interdomain(DomainId(1), front.port).unwrap();
    assert!(has_event(&back) && !has_event(&front), "the end that binds finds an event");
    back.channel.take();
    back.channel.unmask();
    assert!(!has_event(&back));
    (front, back)
}

#[test]
fn events_go_both_ways() {
    let bed = test_machine();
    let (front, back) = pair(&bed);
    for (from, to) in [(&front, &back), (&back, &front)] {
        from.channel.notify();
        from.channel.notify();
        assert!(has_event(to) && !has_event(from));
        to.channel.take();
        assert!(!has_event(to), "two events before the first is taken are one");
        to.channel.unmask();
        assert!(!has_event(to));
    }
    let stats = bed.machine.stats();
    assert_eq!((stats.events_sent, stats.events_delivered, stats.open_ports), (4, 2, 2));
}

#[test]
fn a_masked_port_gets_one_event_when_it_is_unmasked() {
    let bed = test_machine();
    let (front, back) = pair(&bed);
    front.channel.notify();
    back.channel.take();
    for _ in 0..1000 {
        front.channel.notify();
    }
    assert!(!has_event(&back), "nothing comes while it is masked");
    back.channel.unmask();
    assert!(has_event(&back));
    back.channel.take();
    back.channel.unmask();
    assert!(!has_event(&back), "a thousand were one");
    back.channel.take();
    front.channel.notify();
    assert!(has_event(&back), "to take nothing masks nothing");
    assert_eq!(bed.machine.stats().events_delivered, 3);
}

#[test]
fn only_the_remote_domain_of_a_port_binds_to_it() {
    let bed = test_machine();
    let other = connect(bed.machine.folder(), DomainId(2)).unwrap();
    let port = bed.front.alloc_unbound(DomainId(0)).unwrap();
    assert!(other.bind_interdomain(DomainId(1), port.port).is_err());
    assert!(bed.back.bind_interdomain(DomainId(1), Port(port.port.0 + 1)).is_err());
    assert!(bed.back.bind_interdomain(DomainId(2), port.port).is_err());
    assert!(bed.back.bind_interdomain(DomainId(9), port.port).is_err());
    let back = bed.back.bind_interdomain(DomainId(1), port.port).unwrap();
    let Err(error) = bed.back.bind_interdomain(DomainId(1), port.port) else { panic!("it is bound") };
    assert_eq!(error.source.raw_os_error(), Some(22), "{error}");
    assert!(bed.front.bind_interdomain(DomainId(0), back.port).is_err());
    assert!(bed.machine.is_bound(DomainId(1), port.port) && bed.machine.is_bound(DomainId(0), back.port));
}

#[test]
fn a_port_whose_remote_end_closes_can_be_bound_again() {
    let bed = test_machine();
    let (front, back) = pair(&bed);
    back.channel.take();
    drop(back);
    until("it is closed", || !bed.machine.is_bound(DomainId(1), front.port));
    front.channel.notify();
    front.channel.notify();
    let back = bed.back.bind_interdomain(DomainId(1), front.port).unwrap();
    assert!(has_event(&back), "what the old end had masked is not the new one's");
    back.channel.take();
    back.channel.unmask();
    assert!(!has_event(&back));
    front.channel.notify();
    assert!(has_event(&back));
    back.channel.notify();
    assert!(has_event(&front));

    // In reverse: the guest's end closes, and the guest binds to the backend's port.
    let folder = bed.machine.folder();
    drop(front);
    until("it is closed", || !bed.machine.is_bound(DomainId(0), back.port));
    let stranger = connect(folder, DomainId(2)).unwrap();
    assert!(stranger.bind_interdomain(DomainId(0), back.port).is_err());
    let front = bed.front.bind_interdomain(DomainId(0), back.port).unwrap();
    assert!(has_event(&front));
    drop((front, back));
    until("both are closed", || bed.machine.stats().open_ports == 0);
    assert!(bed.machine.stats().events_sent >= 4, "a channel that is gone still counts");
}

#[test]
fn no_event_is_lost() {
    // Each side sleeps until an event, and must see the other's last count without a further event.
    const ROUNDS: u64 = 30_000;
    let bed = test_machine();
    let (front, back) = pair(&bed);
    let (sent, seen) = (AtomicU64::new(0), AtomicU64::new(0));
    // Takes before it sleeps, as a busy worker does, so also without an event.
    let wait = |port: &EventPort, count: &AtomicU64, until: u64| {
        loop {
            port.channel.take();
            let found = count.load(Ordering::SeqCst);
            // An event here finds the port masked, if there was one before.
            std::thread::yield_now();
            port.channel.unmask();
            if found >= until {
                return;
            }
            assert!(is_readable(port, Duration::from_secs(30)), "an event was lost before {until}");
        }
    };
    let last = std::thread::scope(|scope| {
        let (sent, seen) = (&sent, &seen);
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                wait(&back, sent, round);
                seen.store(round, Ordering::SeqCst);
                back.channel.notify();
            }
        });
        for round in 1..=ROUNDS {
            // Events without new data, at varying times.
            for _ in 0..round % 4 {
                front.channel.notify();
                std::thread::yield_now();
            }
            sent.store(round, Ordering::SeqCst);
            front.channel.notify();
            wait(&front, seen, round);
        }
        seen.load(Ordering::SeqCst)
    });
    assert_eq!(last, ROUNDS);
    let stats = bed.machine.stats();
    assert_eq!(stats.events_sent, (0..=ROUNDS).map(|round| round % 4 + 2).sum::<u64>() - 2);
    assert!(stats.events_delivered <= stats.events_sent);
}

#[test]
fn a_descriptor_can_be_polled_without_the_channel() {
    let bed = test_machine();
    let (front, back) = pair(&bed);
    let watched = back.descriptor.as_fd().try_clone_to_owned().unwrap();
    front.channel.notify();
    let mut polled = [PollFd::new(&watched, PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 1);
}
