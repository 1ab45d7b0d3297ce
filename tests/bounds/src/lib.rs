//! Upper bounds of waits in tests.
//!
//! A [`Bound`] is written in seconds of the reference machine (an idle one with two CPUs, where a thread wakes in about
//! 10 us and an emulated guest boots in 5 s). It is multiplied by the [`Slowness`] of this machine, measured at the
//! start of a run. A machine may become slower later, so a [`Deadline`] measures again before it passes. An exceeded
//! bound is printed with its factor.
#![forbid(unsafe_code)]

mod measure;

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The variable that passes a measured slowness to test programs: see [`Slowness::to_variable`].
pub const VARIABLE: &str = "MQBLK_TEST_SLOWNESS";

/// The largest factor of a bound. A slower machine fails.
const MOST: f64 = 30.0;

/// Seconds of an emulated boot on the reference machine.
const REFERENCE_BOOT: f64 = 5.0;

/// Factors of this machine's times over those of the reference machine; 1 is as fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// Time of a computation on all CPUs.
    pub cpu: f64,
    /// Time to wake a thread.
    pub waking: f64,
    /// Time of an emulated boot.
    pub boot: f64,
}

impl Slowness {
    /// Measures the CPU and the waking of threads, in about 0.1 s on the reference machine. Assumes that a boot is as
    /// slow as the CPU until [`record_boot`] is called.
    #[must_use]
    pub fn measured() -> Self {
        let cpu = measure::cpu();
        Self { cpu, waking: measure::waking(), boot: cpu }
    }

    /// Returns the factor of bounds: the largest of all, at least 1 and at most 30.
    #[must_use]
    pub fn factor(self) -> f64 {
        [self.cpu, self.waking, self.boot].into_iter().fold(1.0, f64::max).min(MOST)
    }

    /// Returns the value of [`VARIABLE`]: `cpu=1.2,waking=3.0,boot=1.2`.
    #[must_use]
    pub fn to_variable(self) -> String {
        format!("cpu={:.1},waking={:.1},boot={:.1}", self.cpu, self.waking, self.boot)
    }

    /// Reads the value of [`VARIABLE`]. Returns `None` if it is malformed.
    fn from_variable(text: &str) -> Option<Self> {
        let mut factors = text.split(',');
        let mut factor =
            |name| factors.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok().filter(|f| *f > 0.0);
        let slowness = Self { cpu: factor("cpu")?, waking: factor("waking")?, boot: factor("boot")? };
        factors.next().is_none().then_some(slowness)
    }

    /// Returns the larger of each factor.
    fn or_slower(self, other: Self) -> Self {
        let [cpu, waking, boot] =
            [(self.cpu, other.cpu), (self.waking, other.waking), (self.boot, other.boot)].map(|(a, b)| a.max(b));
        Self { cpu, waking, boot }
    }
}

impl fmt::Display for Slowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {:.1}, waking a thread {:.1}, an emulated boot {:.1}", self.cpu, self.waking, self.boot)
    }
}

/// The slowest value measured by this process.
static KNOWN: OnceLock<Mutex<Slowness>> = OnceLock::new();

fn known(change: impl FnOnce(&mut Slowness)) -> Slowness {
    let start = || {
        let variable = std::env::var(VARIABLE).ok();
        Mutex::new(variable.and_then(|text| Slowness::from_variable(&text)).unwrap_or_else(Slowness::measured))
    };
    let mut known = KNOWN.get_or_init(start).lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut known);
    *known
}

/// Returns the slowness that multiplies bounds: measured at the start of the run, or a slower one found since.
#[must_use]
pub fn slowness() -> Slowness {
    known(|_| {})
}

/// Records that an emulated guest has booted in `took`: this also multiplies later bounds of this process.
pub fn record_boot(took: Duration) {
    known(|known| known.boot = known.boot.max(took.as_secs_f64() / REFERENCE_BOOT));
}

/// Measures again, and keeps the slower values.
fn measure_again() {
    let now = Slowness::measured();
    known(|known| *known = known.or_slower(now));
}

/// The upper bound of a wait, in seconds of the reference machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bound {
    seconds: u32,
}

impl Bound {
    /// Returns a bound of this many seconds on the reference machine.
    #[must_use]
    pub const fn seconds(seconds: u32) -> Self {
        Self { seconds }
    }

    /// Returns the sum of two bounds.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { seconds: self.seconds + other.seconds }
    }

    /// Returns a multiple of this bound.
    #[must_use]
    pub const fn times(self, factor: u32) -> Self {
        Self { seconds: self.seconds * factor }
    }

    /// Returns its time on this machine.
    #[must_use]
    pub fn time(self) -> Duration {
        Duration::from_secs(self.seconds.into()).mul_f64(slowness().factor())
    }

    /// Returns true if a wait that has lasted since `begun` exceeds it. Measures the machine's slowness again before it
    /// says so, as a [`Deadline`] does.
    #[must_use]
    pub fn is_exceeded_since(self, begun: Instant) -> bool {
        if begun.elapsed() < self.time() {
            return false;
        }
        measure_again();
        begun.elapsed() >= self.time()
    }

    /// Begins a wait.
    #[must_use]
    pub fn begin(self) -> Deadline {
        Deadline { bound: self, begun: Instant::now(), last: self.time() }
    }
}

/// `48.0 s (20 s on the reference machine, times 2.4 here: CPU 1.1, waking a thread 2.4, an emulated boot 1.1)`
impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slowness = slowness();
        write!(
            f,
            "{:.1} s ({} s on the reference machine, times {:.1} here: {slowness})",
            self.time().as_secs_f64(),
            self.seconds,
            slowness.factor()
        )
    }
}

/// The end of a wait.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    bound: Bound,
    begun: Instant,
    last: Duration,
}

impl Deadline {
    /// Returns true when the bound is exceeded. When it seems to be, measures the machine's slowness again, and extends
    /// the wait if it is slower than before.
    #[must_use]
    pub fn has_passed(&mut self) -> bool {
        if self.begun.elapsed() < self.last {
            return false;
        }
        let is_exceeded = self.bound.is_exceeded_since(self.begun);
        self.last = self.bound.time();
        is_exceeded
    }

    /// Returns the time at which it passes, unless the machine becomes slower.
    #[must_use]
    pub fn instant(&self) -> Instant {
        self.begun + self.last
    }

    /// Returns the time left, at most `most`, for a call that blocks.
    #[must_use]
    pub fn left(&self, most: Duration) -> Duration {
        self.instant().saturating_duration_since(Instant::now()).min(most)
    }

    /// Returns its bound, for messages.
    #[must_use]
    pub fn bound(&self) -> Bound {
        self.bound
    }
}

/// Polls `found` until it returns a value; the pauses grow from 20 us to 5 ms.
///
/// # Errors
/// The exceeded bound, when there is no value within `bound`.
pub fn wait_for<T>(bound: Bound, mut found: impl FnMut() -> Option<T>) -> Result<T, Exceeded> {
    let mut deadline = bound.begin();
    let mut pause = Duration::from_micros(20);
    loop {
        if let Some(found) = found() {
            return Ok(found);
        }
        if deadline.has_passed() {
            return Err(Exceeded(bound));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

/// A bound was exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded(Bound);

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not within {}", self.0)
    }
}

impl std::error::Error for Exceeded {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Bound, Slowness, record_boot, slowness, wait_for};

    #[test]
    fn the_slowest_of_all_is_the_factor() {
        let factor = |cpu, waking, boot| Slowness { cpu, waking, boot }.factor();
        assert_eq!([factor(0.5, 0.2, 0.9), factor(2.0, 1.0, 1.5), factor(1.0, 16.0, 1.0)], [1.0, 2.0, 16.0]);
        assert_eq!(factor(1.0, 400.0, 1.0), super::MOST);
    }

    #[test]
    fn the_variable_is_read_as_it_is_written() {
        let slowness = Slowness { cpu: 1.5, waking: 16.0, boot: 0.5 };
        assert_eq!(Slowness::from_variable(&slowness.to_variable()), Some(slowness));
        for wrong in ["", "cpu=1", "cpu=1,waking=2,boot=x", "cpu=1,waking=2,boot=0", "cpu=1,waking=2,boot=3,more=4"] {
            assert_eq!(Slowness::from_variable(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn measured_factors_are_positive() {
        let Slowness { cpu, waking, boot } = Slowness::measured();
        assert!(cpu > 0.0 && waking > 0.0 && boot > 0.0, "{cpu} {waking} {boot}");
    }

    /// One test, because it changes state of the process.
    #[test]
    fn bounds_grow_with_the_slowness_and_say_so() {
        record_boot(Duration::from_secs(15));
        assert!(slowness().boot >= 3.0);
        let bound = Bound::seconds(2).and(Bound::seconds(1));
        assert!(bound.time() >= Duration::from_secs(9));
        assert!(bound.to_string().contains("3 s on the reference machine, times "), "{bound}");
        assert!(!bound.begin().has_passed());
        assert!(bound.begin().left(Duration::from_secs(1)) == Duration::from_secs(1));

        let mut calls = 0;
        let found = wait_for(bound, || {
            calls += 1;
            (calls == 3).then_some(7)
        });
        assert_eq!(found, Ok(7));
        let exceeded = wait_for(Bound::seconds(0), || None::<u8>).expect_err("nothing is found");
        assert!(exceeded.to_string().starts_with("not within 0.0 s (0 s on the reference"), "{exceeded}");
    }
}
