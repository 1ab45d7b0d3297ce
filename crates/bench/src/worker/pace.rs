//! Open-loop load: requests start at given times, independent of completions (fio's `rate_iops`). Latencies count from
//! the due time of a request, so a slow server does not reduce its load.

/// Due times of a job's requests, at a constant rate. Late requests are kept as a time, not a list: they take no
/// memory.
#[derive(Clone, Debug)]
struct Schedule {
    /// Due time of the next request.
    next_ns: u64,
    /// Requests per second.
    rate: u64,
    /// Rest of the divisions so far, in nanoseconds divided by the rate.
    rest: u64,
}

const SECOND_NS: u64 = 1_000_000_000;

impl Schedule {
    fn new(rate: u32, start_ns: u64) -> Schedule {
        Schedule { next_ns: start_ns, rate: rate.max(1).into(), rest: 0 }
    }

    /// Takes the next request if it is due at `now`. Returns its due time.
    #[inline]
    fn take(&mut self, now: u64) -> Option<u64> {
        let due = self.next_ns;
        if due > now {
            return None;
        }
        self.next_ns += SECOND_NS / self.rate;
        self.rest += SECOND_NS % self.rate;
        if self.rest >= self.rate {
            self.rest -= self.rate;
            self.next_ns += 1;
        }
        Some(due)
    }

    /// Returns the number of requests that are due and were not taken.
    fn overdue(&self, now: u64) -> u64 {
        match now.checked_sub(self.next_ns) {
            Some(late) => (u128::from(late) * u128::from(self.rate) / u128::from(SECOND_NS)) as u64 + 1,
            None => 0,
        }
    }
}

/// Starts and delays of requests at a rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaceStats {
    /// Requests that were started.
    pub started: u64,
    /// Requests that were due and had not been started at the end.
    pub unstarted: u64,
    /// Sum of their delays from due time to start, in nanoseconds.
    pub delay_sum_ns: u64,
    /// The longest delay.
    pub delay_max_ns: u64,
}

impl PaceStats {
    /// Adds those of another thread.
    pub(crate) fn add(&mut self, other: &PaceStats) {
        self.started += other.started;
        self.unstarted += other.unstarted;
        self.delay_sum_ns += other.delay_sum_ns;
        self.delay_max_ns = self.delay_max_ns.max(other.delay_max_ns);
    }
}

/// A job's schedule, and its idle slots.
#[derive(Debug)]
struct PacedJob {
    schedule: Schedule,
    /// Start of its schedule after that of the first job: the jobs start requests at different times.
    offset_ns: u64,
    idle: Vec<u32>,
    /// True if it has nothing left to do.
    exhausted: bool,
}

/// Starts the requests of all jobs of a thread.
#[derive(Debug)]
pub(super) struct Pacer {
    jobs: Vec<PacedJob>,
    slots_per_job: usize,
    stats: PaceStats,
}

impl Pacer {
    /// Creates a pacer at `rate` requests per second of each job. `numbers`: the numbers of the thread's jobs, of `all`
    /// jobs. The slots of a job are adjacent, `iodepth` for each.
    pub(super) fn new(rate: u32, numbers: impl Iterator<Item = u16>, all: u16, iodepth: u16) -> Pacer {
        let depth = usize::from(iodepth);
        let job = |(index, number): (usize, u16)| PacedJob {
            schedule: Schedule::new(rate, 0),
            offset_ns: SECOND_NS / u64::from(rate.max(1)) * u64::from(number) / u64::from(all.max(1)),
            // The first slot is taken first.
            idle: (index * depth..(index + 1) * depth).rev().map(|slot| slot as u32).collect(),
            exhausted: false,
        };
        Pacer { jobs: numbers.enumerate().map(job).collect(), slots_per_job: depth, stats: PaceStats::default() }
    }

    /// Restarts at `now`: drops late requests.
    pub(super) fn restart(&mut self, now: u64) {
        for job in &mut self.jobs {
            (job.schedule.next_ns, job.schedule.rest) = (now + job.offset_ns, 0);
        }
        self.stats = PaceStats::default();
    }

    /// Returns the statistics until `now`.
    pub(super) fn stats(&self, now: u64) -> PaceStats {
        let jobs = self.jobs.iter().filter(|job| !job.exhausted);
        PaceStats { unstarted: jobs.map(|job| job.schedule.overdue(now)).sum(), ..self.stats }
    }

    /// Returns the number of jobs.
    pub(super) fn job_count(&self) -> usize {
        self.jobs.len()
    }

    /// Takes a slot of `job` with a due request. Returns it with the due time.
    #[inline]
    pub(super) fn take(&mut self, job: usize, now: u64) -> Option<(usize, u64)> {
        let job = &mut self.jobs[job];
        if job.exhausted || job.idle.is_empty() {
            return None;
        }
        let due = job.schedule.take(now)?;
        self.stats.started += 1;
        self.stats.delay_sum_ns += now - due;
        self.stats.delay_max_ns = self.stats.delay_max_ns.max(now - due);
        job.idle.pop().map(|slot| (slot as usize, due))
    }

    /// Puts back a slot whose request has completed.
    #[inline]
    pub(super) fn put_back(&mut self, slot: usize) {
        self.jobs[slot / self.slots_per_job].idle.push(slot as u32);
    }

    /// Marks `job` as having nothing left to do: its last taken slot was not started.
    pub(super) fn exhaust(&mut self, job: usize) {
        self.jobs[job].exhausted = true;
        self.stats.started -= 1;
    }

    /// Returns true if no job has anything left to do.
    pub(super) fn is_done(&self) -> bool {
        self.jobs.iter().all(|job| job.exhausted)
    }

    /// Returns the earliest start of the next request; `None` while all slots are in flight.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let ready = self.jobs.iter().filter(|job| !job.exhausted && !job.idle.is_empty());
        ready.map(|job| job.schedule.next_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_has_its_rate_without_drift() {
        for rate in [1, 3, 7, 1000, 333_333, 1_000_000_000] {
            let mut schedule = Schedule::new(rate, 5);
            let mut last = 0;
            for index in 0..10_000 {
                let due = schedule.take(u64::MAX).unwrap();
                let exact = 5 + (u128::from(SECOND_NS) * index / u128::from(rate)) as u64;
                assert!(due.abs_diff(exact) <= 1 && due >= last, "{rate}: {due}, {exact}");
                last = due;
            }
        }
    }

    #[test]
    fn what_is_due_is_taken_and_what_is_late_keeps_its_time() {
        let mut schedule = Schedule::new(1000, 1_000_000);
        assert_eq!((schedule.take(999_999), schedule.overdue(999_999)), (None, 0));
        assert_eq!((schedule.take(1_000_000), schedule.take(1_000_000)), (Some(1_000_000), None));
        // A server that answers nothing for ten milliseconds.
        assert_eq!(schedule.overdue(11_000_000), 10);
        assert_eq!([0; 3].map(|_| schedule.take(11_000_000).unwrap()), [2_000_000, 3_000_000, 4_000_000]);
        assert_eq!(schedule.overdue(11_000_000), 7);
    }

    /// One slot and a server of 10 ms at 1000 requests per second: each request is later than the one before. A closed
    /// loop would show 10 ms for all.
    #[test]
    fn a_slow_server_is_not_asked_less() {
        let mut pacer = Pacer::new(1000, [0].into_iter(), 1, 1);
        pacer.restart(0);
        let mut latencies = vec![];
        let mut now = 0;
        for _ in 0..5 {
            let (slot, due) = pacer.take(0, now).unwrap();
            assert_eq!((slot, pacer.take(0, now), pacer.next_ns()), (0, None, None));
            now += 10_000_000;
            latencies.push(now - due);
            pacer.put_back(slot);
        }
        assert_eq!(latencies, [10, 19, 28, 37, 46].map(|ms| ms * 1_000_000));
        let stats = pacer.stats(now);
        assert_eq!((stats.started, stats.unstarted), (5, 46));
        assert_eq!((stats.delay_max_ns, stats.delay_sum_ns), (36_000_000, 90_000_000));
        pacer.restart(now);
        assert_eq!(pacer.stats(now), PaceStats { unstarted: 1, ..PaceStats::default() });
    }

    #[test]
    fn jobs_take_turns_and_end() {
        let mut pacer = Pacer::new(100, [0, 2].into_iter(), 4, 2);
        pacer.restart(1000);
        assert_eq!((pacer.job_count(), pacer.next_ns()), (2, Some(1000)));
        assert_eq!((pacer.take(0, 1000), pacer.take(1, 1000)), (Some((0, 1000)), None));
        assert_eq!(pacer.take(1, 5_001_000), Some((2, 5_001_000)));
        assert_eq!(pacer.next_ns(), Some(10_001_000));
        assert!(!pacer.is_done());
        assert!((0..2).all(|job| pacer.take(job, 20_000_000).is_some()));
        (0..2).for_each(|job| pacer.exhaust(job));
        assert!(pacer.is_done() && pacer.next_ns().is_none());
        assert_eq!((pacer.stats(u64::MAX).started, pacer.stats(u64::MAX).unstarted), (2, 0));
    }
}
