//! The rule for waiting, with a clock that the test moves.

use super::*;

const US: Duration = Duration::from_micros(1);

/// Cost of sleeping and waking in these tests.
const SLEEP_NS: u64 = 20_000;

fn us(us: u64) -> Ticks {
    Ticks(us * 1000)
}

fn new(policy: PollPolicy) -> PollState {
    PollState::new(policy, SLEEP_NS, us(0))
}

/// Makes an event `gap` us later; before, the queue is polled every microsecond unless it is armed. Returns true if it
/// was still polled then.
fn after(state: &mut PollState, now: &mut u64, gap: u64, in_flight: bool) -> bool {
    let mut polled = state.polled_at != NOT_POLLED;
    for at in *now + 1..*now + gap {
        polled = polled && state.idle(us(at), false).is_some();
    }
    *now += gap;
    if !polled {
        // A kick or a completion wakes the worker, which takes a while.
        *now += SLEEP_NS / WAKE_UPS / 1000;
        state.resume(us(*now));
    }
    state.active(in_flight, us(*now));
    polled
}

/// As [`after`], this many times. Returns the number of times that it was polled.
fn polled_of(state: &mut PollState, now: &mut u64, gap: u64, times: usize) -> usize {
    (0..times).filter(|_| after(state, now, gap, false)).count()
}

#[test]
fn policies_parse_and_print() {
    for text in ["off", "adaptive", "busy", "50", "1", "adaptive:1000000"] {
        assert_eq!(text.parse::<PollPolicy>().unwrap().to_string(), text);
    }
    for (word, text) in [("auto", "adaptive"), ("static:50", "50")] {
        assert_eq!(word.parse::<PollPolicy>().unwrap().to_string(), text);
    }
    let wrong = [
        "",
        "on",
        "static",
        "static:",
        "static:0",
        "0",
        "-1",
        "+1",
        "adaptive:",
        "adaptive:1000001",
        "busy:1",
        "Off",
        "auto:5",
    ];
    for text in wrong {
        assert!(text.parse::<PollPolicy>().is_err(), "{text}");
    }
}

#[test]
fn a_static_window_closes_and_reopens() {
    let mut state = new(PollPolicy::Static(US * 50));
    let polled = Some(IdleResult::PollInWindow);
    assert_eq!([49, 50].map(|at| state.idle(us(at), false)), [polled, None]);
    state.active(false, us(60));
    for is_wanted in [false, true] {
        assert_eq!(state.idle(us(109), is_wanted), polled, "it is as long whoever wants the CPU");
    }
    assert_eq!(state.idle(us(110), false), None);
    let mut now = 2000;
    assert_eq!(polled_of(&mut state, &mut now, 60, 10), 0, "it does not grow");
    assert_eq!(state.reason(true), (PollReason::Policy, Some(50_000)));
}

#[test]
fn off_polls_for_no_longer_than_sleeping_takes_and_busy_always() {
    let (mut off, mut busy) = (new(PollPolicy::Off), new(PollPolicy::Busy));
    assert_eq!([9, 10].map(|at| off.idle(us(at), false)), [Some(IdleResult::PollInWindow), None]);
    for at in 1..100 {
        busy.active(at % 2 == 0, us(at));
        assert_eq!(busy.idle(us(at * 1000), at % 3 == 0), Some(IdleResult::Poll));
    }
    assert_eq!(busy.reason(true), (PollReason::Policy, None));
}

#[test]
fn a_window_that_closed_just_before_a_request_grows_and_one_that_nothing_came_in_closes() {
    let (mut state, mut now) = (new(PollPolicy::default()), 0);
    assert_eq!(polled_of(&mut state, &mut now, 15, 100), 100, "it is open at first");
    assert_eq!(polled_of(&mut state, &mut now, 5000, 10), 0);
    assert_eq!((state.windows[0], state.reason(false)), (0, (PollReason::Quiet, Some(0))));
    let before = state.empty_poll_ns();
    assert_eq!(polled_of(&mut state, &mut now, 5000, 100), 0);
    // Each time up to the first idle turn.
    assert!(state.empty_poll_ns() - before <= 100_000, "a closed window costs nothing");
    let polled = polled_of(&mut state, &mut now, 15, 100);
    assert!(polled >= 96, "requests that come soon open it: {polled}");
    assert_eq!(state.reason(false), (PollReason::Expected, Some(SLEEP_NS)));
}

/// The bound of ski rental for any events: polling costs at most the time of sleeping and waking for each request,
/// except those found by polling.
#[test]
fn polling_costs_at_most_what_sleeping_would() {
    for policy in [PollPolicy::default(), PollPolicy::Adaptive { max: Some(US * 200) }] {
        let (mut state, mut now, mut seed) = (new(policy), 0, 1_u64);
        let mut requests = 0;
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            after(&mut state, &mut now, 1 + (seed >> 33) % 700, seed >> 63 == 1);
            requests += 1;
            assert!(state.empty_poll_ns() <= requests * state.max[0], "{policy}");
            assert!(state.windows.iter().zip(state.max).all(|(window, max)| *window <= max));
        }
    }
}

#[test]
fn slow_storage_is_slept_for_and_the_next_request_polled_for_as_by_off() {
    for (gap, polled) in [(9, true), (15, false)] {
        let (mut state, mut now) = (new(PollPolicy::default()), 0);
        for round in 0..100 {
            // A request comes, its completion 5 ms later, and the next request soon after that.
            assert!(after(&mut state, &mut now, gap, true) == polled || round < 4, "{gap}, {round}");
            assert!(!after(&mut state, &mut now, 5000, false));
        }
        // And until the first idle turn of each sleep for storage.
        assert!(state.empty_poll_ns() < 100 * (OFF_MAX + 2000) + 3 * SLEEP_NS, "{}", state.empty_poll_ns());
        // Faster storage opens the window again, which has not changed.
        for _ in 0..3 {
            after(&mut state, &mut now, 4, true);
        }
        after(&mut state, &mut now, 4, false);
        assert_eq!(state.reason(false), (PollReason::Expected, Some(SLEEP_NS)));
    }
}

#[test]
fn completions_are_polled_for_half_as_long_as_requests() {
    let (mut state, mut now) = (new(PollPolicy::default()), 0);
    state.active(true, us(0));
    for gap in [9, 9, 9] {
        assert!(after(&mut state, &mut now, gap, true));
    }
    assert!(!after(&mut state, &mut now, 16, true), "half of 20 us");
    assert_eq!(state.reason(false), (PollReason::Quiet, Some(0)), "16 us and a wake-up are more than 10: it closes");
    for _ in 0..3 {
        after(&mut state, &mut now, 4, true);
    }
    assert_eq!(state.reason(false), (PollReason::Expected, Some(5_000)), "as long as it must be for 4 us");
    after(&mut state, &mut now, 4, false);
    assert_eq!(state.reason(false), (PollReason::Expected, Some(SLEEP_NS)), "the other one is as it was");
}

#[test]
fn an_armed_queue_is_polled_again_after_a_completion_if_requests_follow_soon() {
    for (policy, resumes) in [(PollPolicy::default(), true), (PollPolicy::Static(US), true)] {
        let mut state = new(policy);
        state.active(true, us(1));
        assert!(!state.should_resume(), "it is polled");
        assert_eq!(state.idle(us(5000), false), None);
        state.active(false, us(5001));
        assert_eq!(state.should_resume(), resumes, "{policy}");
    }
}

#[test]
fn while_others_want_the_cpu_a_busy_queue_is_looked_at_by_a_timer() {
    let mut state = new(PollPolicy::default());
    state.active(false, us(1000));
    assert_eq!(state.idle(us(1001), true), None, "nothing came soon before");
    state.resume(us(1050));
    state.active(false, us(1050));
    let polled = state.empty_poll_ns();
    for look in 0..10 {
        let at = 1051 + look * 25;
        assert_eq!(state.idle(us(at), true), Some(IdleResult::PollByTimer));
        assert_eq!(state.reason(true), (PollReason::CpuWanted, Some(0)));
        state.active(false, us(at + 25));
    }
    assert_eq!(state.idle(us(1302), true), Some(IdleResult::PollByTimer));
    assert_eq!(state.idle(us(1327), true), None, "a look that found nothing is the last one");
    assert_eq!(state.empty_poll_ns(), polled + 2000, "sleeping is not polling");
    for policy in [PollPolicy::Static(US * 50), PollPolicy::Busy] {
        assert!(new(policy).idle(us(10), true).is_some_and(|result| result != IdleResult::PollByTimer), "{policy}");
    }
}

#[test]
fn time_is_counted_between_polls_but_not_while_armed_or_while_another_thread_had_the_cpu() {
    let mut state = new(PollPolicy::Static(US * 2000));
    state.active(false, us(10));
    state.idle(us(12), false);
    state.active(false, us(15));
    assert_eq!(state.empty_poll_ns(), 2000, "time that ended with a request is not counted");
    assert!(state.idle(us(40), false).is_some());
    assert!(state.idle(us(540), false).is_some(), "a time slice");
    assert_eq!(state.empty_poll_ns(), 27_000);
    assert_eq!(state.idle(us(2030), false), None);
    assert_eq!(state.idle(us(9000), false), None);
    assert_eq!(state.empty_poll_ns(), 27_000);
}

#[test]
fn the_cpu_is_offered_when_a_while_brought_nothing() {
    let mut offers = CpuOffers::new();
    offers.active();
    assert_eq!([100, 104, 105].map(|at| offers.is_due(us(at))), [false, false, true]);
    assert!(!offers.offered(TIME_SLICE - 1, us(105)) && !offers.is_wanted(us(105)));
    assert_eq!([109, 110].map(|at| offers.is_due(us(at))), [false, true]);
}

#[test]
fn a_worker_whose_cpu_was_taken_gives_way_and_longer_each_time() {
    let (mut offers, mut now) = (CpuOffers::new(), 1_000_000);
    for times in [1, 2, 4, 8, 16, 16] {
        assert!(!offers.is_wanted(Ticks(now)));
        assert!(offers.offered(TIME_SLICE, Ticks(now)));
        assert!(!offers.is_wanted(Ticks(now)), "a hypervisor may have taken it");
        assert!(offers.offered(TIME_SLICE, Ticks(now)));
        now += times * GIVE_WAY;
        assert!(offers.is_wanted(Ticks(now - 1)));
    }
    // No thread takes the CPU for the length of the last time.
    assert!(!offers.offered(1000, Ticks(now + 15 * GIVE_WAY)));
    assert_eq!(offers.give_way, MAX_GIVE_WAY);
    now += 16 * GIVE_WAY;
    assert!(!offers.offered(1000, Ticks(now)));
    assert!(offers.offered(TIME_SLICE, Ticks(now)));
    assert!(offers.offered(TIME_SLICE, Ticks(now + AGAIN + TIME_SLICE + 1)));
    assert!(!offers.is_wanted(Ticks(now + AGAIN + TIME_SLICE + 1)), "twice in a long time");
    assert!(offers.offered(TIME_SLICE, Ticks(now + AGAIN + TIME_SLICE + 2)));
    assert!(!offers.is_wanted(Ticks(now + AGAIN + TIME_SLICE + 2 + GIVE_WAY)));
}
