//! Poll windows, with a clock that the test moves.

use super::*;

const US: Duration = Duration::from_micros(1);

fn us(us: u64) -> Ticks {
    Ticks(us * 1000)
}

const CLOSED: WindowMode = WindowMode::Closed(PollReason::CpuWanted);

fn new(policy: PollPolicy) -> PollState {
    PollState::new(policy, us(0))
}

/// Something comes `gap` later; the queue is polled every microsecond before, if it is not armed. Returns whether it was still polled then.
fn after(state: &mut PollState, now: &mut u64, gap: u64, in_flight: bool) -> bool {
    let mut polled = state.polled_at != NOT_POLLED;
    for at in *now + 1..*now + gap {
        polled = polled && state.idle(us(at), WindowMode::Open).is_some();
    }
    *now += gap;
    if !polled {
        // It is kicked, or a completion woke the worker.
        state.resume(us(*now));
    }
    state.active(in_flight, us(*now));
    polled
}

#[test]
fn policies_parse_and_print() {
    for text in ["off", "auto", "busy", "static:50", "static:1", "adaptive:1000000"] {
        assert_eq!(text.parse::<PollPolicy>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "on",
        "static",
        "static:",
        "static:0",
        "static:-1",
        "static:+1",
        "adaptive:1000001",
        "busy:1",
        "Off",
        "auto:5",
    ] {
        assert!(text.parse::<PollPolicy>().is_err(), "{text}");
    }
}

#[test]
fn a_static_window_closes_and_reopens() {
    let mut state = new(PollPolicy::Static(US * 50));
    assert_eq!(state.idle(us(49), WindowMode::Open), Some(IdleResult::PollInFixedWindow));
    assert_eq!(state.idle(us(50), WindowMode::Open), None);
    state.active(false, us(60));
    assert_eq!(state.idle(us(109), WindowMode::Open), Some(IdleResult::PollInFixedWindow));
    assert_eq!(state.idle(us(110), WindowMode::Open), None);
}

#[test]
fn off_polls_only_for_what_comes_before_it_could_sleep_and_busy_always_does() {
    let mut off = new(PollPolicy::Off);
    let idle = |off: &mut PollState, at| off.idle(us(at), WindowMode::Open);
    assert_eq!((idle(&mut off, 9), idle(&mut off, 10)), (Some(IdleResult::PollInFixedWindow), None));
    for at in (1000..2000).step_by(50) {
        off.resume(us(at));
        off.active(false, us(at));
        assert_eq!(idle(&mut off, at), None, "nothing came soon");
    }
    for at in 2000..2100 {
        off.resume(us(at));
        off.active(false, us(at));
    }
    assert_eq!((idle(&mut off, 2138), idle(&mut off, 2140)), (Some(IdleResult::PollInFixedWindow), None));
    let mut closed = new(PollPolicy::Auto);
    let no_gain = WindowMode::Closed(PollReason::NoGain);
    let in_window = Some(IdleResult::PollInFixedWindow);
    assert_eq!([9, 10].map(|at| closed.idle(us(at), no_gain)), [in_window, None], "as with off");
    let mut wanted = new(PollPolicy::Auto);
    assert_eq!([2, 3].map(|at| wanted.idle(us(at), CLOSED)), [Some(IdleResult::Poll), None], "others want the CPU");
    assert_eq!(new(PollPolicy::Busy).idle(us(10_000_000), WindowMode::Open), Some(IdleResult::Poll));
}

#[test]
fn empty_poll_time_is_counted_between_polls_but_not_while_armed() {
    let mut state = new(PollPolicy::Static(US * 50));
    state.active(false, us(10));
    state.idle(us(12), WindowMode::Open);
    state.active(false, us(15));
    assert_eq!(state.empty_poll_ns(), 2000, "time that ended with a request is not counted");
    assert_eq!(state.idle(us(40), WindowMode::Open), Some(IdleResult::PollInFixedWindow));
    assert_eq!(state.idle(us(65), WindowMode::Open), None);
    assert_eq!(state.empty_poll_ns(), 52_000);
    // Armed until 1000; a kick without a request has it polled again.
    assert_eq!(state.idle(us(1000), WindowMode::Open), None);
    assert_eq!(state.empty_poll_ns(), 52_000);
    let mut busy = new(PollPolicy::Busy);
    busy.active(false, us(0));
    (1..=100).for_each(|at| assert_eq!(busy.idle(us(at), WindowMode::Open), Some(IdleResult::Poll)));
    assert_eq!(busy.empty_poll_ns(), 100_000);
}

#[test]
fn an_adaptive_window_follows_the_gaps() {
    let mut now = 0;
    let mut state = new(PollPolicy::Adaptive { max: US * 200 });
    for _ in 0..20 {
        now += 5000;
        state.active(false, us(now));
    }
    assert_eq!(state.window, 0, "gaps that no window can cover close it");
    for _ in 0..20 {
        now += 120;
        state.active(false, us(now));
    }
    assert!((120_000..=200_000).contains(&state.window), "{}", state.window);
}

#[test]
fn auto_polls_while_something_comes_soon_and_through_short_pauses() {
    let (mut state, mut now) = (new(PollPolicy::Auto), 0);
    (0..100).for_each(|_| assert!(after(&mut state, &mut now, 20, false)));
    assert!(after(&mut state, &mut now, 800, false), "a pause between two bursts");
    assert_eq!(state.reason(WindowMode::Open).0, PollReason::Expected);
    assert_eq!(state.reason(CLOSED), (PollReason::CpuWanted, Some(0)));
    assert!(!after(&mut state, &mut now, 1200, false), "an end");
    for _ in 0..50 {
        assert!(!after(&mut state, &mut now, 400, false), "polling costs more than waking");
    }
    assert_eq!(state.reason(CLOSED), (PollReason::Quiet, Some(0)));
    assert!(state.empty_poll_ns() < 100 * 20_000 + 800_000 + 1_200_000 + 50_000);
}

#[test]
fn auto_sleeps_while_slow_storage_works_and_polls_for_the_next_request() {
    let (mut state, mut now) = (new(PollPolicy::Auto), 0);
    for round in 0..100 {
        // A request comes, its completion 5 ms later, and the next request 10 us after that.
        assert!(after(&mut state, &mut now, 10, true));
        let polled = after(&mut state, &mut now, 5000, false);
        assert!(!polled, "round {round}");
    }
    assert!(state.empty_poll_ns() < 100 * 10_000 + AUTO_HORIZON, "{}", state.empty_poll_ns());
}

#[test]
fn a_queue_with_a_timer_is_looked_at_for_a_millisecond_and_that_was_not_polling() {
    let mut state = new(PollPolicy::Auto);
    (1..=20).for_each(|at| state.active(false, us(at * 200)));
    let polled = state.empty_poll_ns();
    let looks = (0..)
        .take_while(|at| state.idle(us(4000 + at * 25), WindowMode::Timer) == Some(IdleResult::PollByTimer))
        .count();
    assert_eq!((looks, state.empty_poll_ns()), (40, polled));
    assert_eq!(state.reason(WindowMode::Timer), (PollReason::Quiet, Some(0)));
    // One request that comes soon is enough to look on.
    state.resume(us(5300));
    state.active(false, us(5300));
    assert!(!state.should_resume(WindowMode::Timer), "1.3 ms are not soon");
    state.active(false, us(5500));
    assert_eq!(state.idle(us(5501), WindowMode::Timer), Some(IdleResult::PollByTimer));
    assert_eq!(state.reason(WindowMode::Timer), (PollReason::Expected, Some(299_000)));
    // What follows a look that found something is polling again; another thread had the CPU for the longer one of these times.
    let polled = state.empty_poll_ns();
    for (found, idle) in [(5530, 5540), (5570, 7570)] {
        state.active(false, us(found));
        assert_eq!(state.idle(us(idle), WindowMode::Timer), Some(IdleResult::PollByTimer));
    }
    assert_eq!(state.empty_poll_ns(), polled + 10_000);
    for policy in [PollPolicy::Static(US * 50), PollPolicy::Adaptive { max: US * 200 }] {
        assert_eq!(new(policy).idle(us(10), WindowMode::Timer), Some(IdleResult::PollInFixedWindow), "{policy}");
    }
    assert_eq!(new(PollPolicy::Busy).idle(us(10), WindowMode::Timer), Some(IdleResult::Poll));
}

#[test]
fn time_in_which_another_thread_had_the_cpu_was_not_polled() {
    let (mut state, mut now) = (new(PollPolicy::Auto), 0);
    (0..10).for_each(|_| assert!(after(&mut state, &mut now, 5, false)));
    let before = state.empty_poll_ns();
    for at in 1..=10 {
        assert_eq!(state.idle(us(now + at * 3000), WindowMode::Open), Some(IdleResult::PollInWindow));
    }
    assert_eq!(state.empty_poll_ns(), before);
}

#[test]
fn an_armed_queue_is_polled_again_after_a_completion_if_requests_follow_soon() {
    for (policy, resumes) in [(PollPolicy::Auto, true), (PollPolicy::Off, false), (PollPolicy::Static(US), false)] {
        let mut state = new(policy);
        state.active(true, us(10));
        state.active(false, us(11));
        assert!(!state.should_resume(WindowMode::Open), "it is polled");
        state.active(true, us(12));
        (1..100).for_each(|at| {
            state.idle(us(12 + at * 50), WindowMode::Open);
        });
        state.active(false, us(50_000));
        let modes = [WindowMode::Open, WindowMode::Timer];
        assert_eq!(modes.map(|mode| state.should_resume(mode)), [resumes; 2], "{policy}");
        assert!(!state.should_resume(CLOSED), "{policy}");
    }
}
