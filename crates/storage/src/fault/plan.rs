//! The configured faults.

use std::fmt::Write;
use std::time::Duration;

use mqblk_core::settings::{Key, SettingError, Settings, parse_size};
use mqblk_core::{ByteLen, ByteOffset, Op, Outcome, Request};
use rustix::io::Errno;

/// The named errors of settings. Others are given by number.
const ERRNO_NAMES: [(&str, Errno); 12] = [
    ("EIO", Errno::IO),
    ("ENOSPC", Errno::NOSPC),
    ("EROFS", Errno::ROFS),
    ("EOPNOTSUPP", Errno::OPNOTSUPP),
    ("ETIMEDOUT", Errno::TIMEDOUT),
    ("ENODEV", Errno::NODEV),
    ("ENXIO", Errno::NXIO),
    ("ENOMEM", Errno::NOMEM),
    ("EINVAL", Errno::INVAL),
    ("EDQUOT", Errno::DQUOT),
    ("ENOLINK", Errno::NOLINK),
    ("ECANCELED", Errno::CANCELED),
];
const RANGE_SYNTAX: &str =
    "OFFSET+LEN:ERRNO[*TIMES], several joined by /, such as 1M+4K:EIO or 0+512:ENOSPC*2/8K+4K:EIO";
const FLUSH_SYNTAX: &str = "ERRNO[*TIMES] such as EIO or EIO*1";

/// The key of a rule, by operation.
static FAIL_READ: Key = rule("fail-read");
static FAIL_WRITE: Key = rule("fail-write");
static FAIL_DISCARD: Key = rule("fail-discard");
static FAIL_ZEROES: Key = rule("fail-zeroes");
static FAIL_FLUSH: Key = Key::text("fail-flush", "ERRNO", FLUSH_SYNTAX);
static RULES: [&Key; 5] = [&FAIL_READ, &FAIL_WRITE, &FAIL_DISCARD, &FAIL_ZEROES, &FAIL_FLUSH];

/// Microseconds added to each request; a random time up to this is added too, so that requests complete in another
/// order; the duration of a flush without a channel (when the disk is closed).
static LATENCY: Key = micros("fault-latency-us");
static JITTER: Key = micros("fault-jitter-us");
static SYNC: Key = micros("fault-sync-us");
/// Time of a channel to connect; attempts that fail at first; requests after which its connection is lost (those
/// submitted with the last one fail with ENOTCONN); handling of requests after a failed attempt.
static CONNECT: Key = micros("fault-connect-us");
static CONNECT_FAILS: Key = Key::number("fault-connect-fails", 0, u64::MAX).default("0");
static LOST_AFTER: Key = Key::number("fault-lost-after", 0, u64::MAX).default("0");
static DISCONNECTED: Key = Key::words("fault-disconnected", &["wait", "fail"]).default("wait");
/// Percentage of reads and writes that transfer only a first part, and then fail with EIO.
static TORN: Key = Key::number("fault-torn", 0, 100).default("0");
/// Completions are delayed until this many are available, or nothing else is in flight, and then delivered in random
/// order.
static REORDER: Key = Key::number("fault-reorder", 0, 4096).default("0");
/// Seed of the random streams: each opened channel gets its own stream.
static SEED: Key = Key::number("fault-seed", 0, u64::MAX).default("0");

const fn rule(name: &'static str) -> Key {
    Key::text(name, "RULE", RANGE_SYNTAX)
}

const fn micros(name: &'static str) -> Key {
    Key::number(name, 0, 3_600_000_000).default("0")
}

/// All faults to inject.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FaultPlan {
    pub(super) rules: Vec<FaultRule>,
    /// Percentage of reads and writes that are torn.
    pub(super) torn_percent: u32,
    pub(super) latency: Duration,
    pub(super) jitter: Duration,
    pub(super) reorder: usize,
    pub(super) seed: u64,
    /// Duration of a flush without a channel.
    pub(super) sync: Duration,
    /// Duration of connecting.
    pub(super) connect: Duration,
    /// Attempts to connect that fail at first.
    pub(super) connect_fails: u64,
    /// Requests after which a connection is lost; 0: never.
    pub(super) lost_after: u64,
    /// True if requests fail while there is no connection.
    pub(super) fails_disconnected: bool,
}

/// A rule: a range in which an operation fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FaultRule {
    key: &'static str,
    start: ByteOffset,
    len: ByteLen,
    errno: i32,
    /// `None`: always.
    pub(super) times: Option<u64>,
}

impl FaultRule {
    /// Returns the outcome of a request that this rule fails.
    pub(super) fn outcome_for<B>(&self, request: &Request<B>) -> Option<Outcome> {
        let key = match request.op {
            Op::Read => FAIL_READ.name,
            Op::Write { .. } => FAIL_WRITE.name,
            Op::Discard { .. } => FAIL_DISCARD.name,
            Op::WriteZeroes { .. } => FAIL_ZEROES.name,
            Op::Flush => FAIL_FLUSH.name,
        };
        let overlaps = request.op == Op::Flush
            || (request.start < self.start.end(self.len).unwrap_or(ByteOffset(u64::MAX))
                && self.start < request.start.end(request.len).unwrap_or(ByteOffset(u64::MAX)));
        (key == self.key && overlaps).then(|| Outcome::from_errno(self.errno))
    }

    /// Parses `[OFFSET+LEN:]ERRNO[*TIMES]`.
    fn parse(key: &'static str, text: &str) -> Option<FaultRule> {
        let (range, error) = match key {
            _ if key == FAIL_FLUSH.name => ("0+0", text),
            _ => text.split_once(':')?,
        };
        let (start, len) = range.split_once('+')?;
        let (start, len) = (ByteOffset(parse_size(start)?.0), parse_size(len)?);
        if (len == ByteLen::ZERO) != (key == FAIL_FLUSH.name) || start.end(len).is_none() {
            return None;
        }
        let (errno, times) = match error.split_once('*') {
            Some((errno, times)) => (errno, Some(times.parse().ok().filter(|times| *times > 0)?)),
            None => (error, None),
        };
        let named = ERRNO_NAMES.iter().find(|(name, _)| *name == errno).map(|(_, errno)| errno.raw_os_error());
        let errno = named.or_else(|| errno.parse().ok().filter(|errno| (1..4096).contains(errno)))?;
        Some(FaultRule { key, start, len, errno, times })
    }

    fn write(&self, text: &mut String) {
        if self.key != FAIL_FLUSH.name {
            let _ = write!(text, "{}+{}:", ByteLen(self.start.0), self.len);
        }
        let _ = match ERRNO_NAMES.iter().find(|(_, errno)| errno.raw_os_error() == self.errno) {
            Some((name, _)) => write!(text, "{name}"),
            None => write!(text, "{}", self.errno),
        };
        if let Some(times) = self.times {
            let _ = write!(text, "*{times}");
        }
    }
}

impl FaultPlan {
    /// Returns true if channels have a connection.
    pub(super) fn connects(&self) -> bool {
        !self.connect.is_zero() || self.connect_fails > 0 || self.lost_after > 0
    }

    /// Takes the fault settings.
    pub(super) fn from_settings(settings: &mut Settings) -> Result<FaultPlan, SettingError> {
        let mut plan = FaultPlan::default();
        for key in RULES {
            let Some(text) = settings.text(key) else { continue };
            let rules: Option<Vec<FaultRule>> = text.split('/').map(|part| FaultRule::parse(key.name, part)).collect();
            let expected = if key.name == FAIL_FLUSH.name { FLUSH_SYNTAX } else { RANGE_SYNTAX };
            plan.rules.extend(rules.ok_or_else(|| settings.error(key, format!("{text:?}"), expected))?);
        }
        let mut micros = |key| settings.number_or_default(key).map(Duration::from_micros);
        (plan.latency, plan.jitter) = (micros(&LATENCY)?, micros(&JITTER)?);
        (plan.sync, plan.connect) = (micros(&SYNC)?, micros(&CONNECT)?);
        plan.connect_fails = settings.number_or_default(&CONNECT_FAILS)?;
        plan.lost_after = settings.number_or_default(&LOST_AFTER)?;
        plan.fails_disconnected = settings.word(&DISCONNECTED)? == Some("fail");
        plan.torn_percent = settings.number_or_default(&TORN)? as u32;
        plan.reorder = settings.number_or_default(&REORDER)? as usize;
        plan.seed = settings.number_or_default(&SEED)?;
        Ok(plan)
    }

    /// Returns the settings that make this plan.
    pub(super) fn resolved(&self) -> Vec<(&'static str, String)> {
        let mut all = Vec::new();
        for key in RULES.map(|key| key.name) {
            let mut text = String::new();
            for rule in self.rules.iter().filter(|rule| rule.key == key) {
                if !text.is_empty() {
                    text.push('/');
                }
                rule.write(&mut text);
            }
            if !text.is_empty() {
                all.push((key, text));
            }
        }
        all.push((LATENCY.name, self.latency.as_micros().to_string()));
        all.push((JITTER.name, self.jitter.as_micros().to_string()));
        all.push((SYNC.name, self.sync.as_micros().to_string()));
        all.push((TORN.name, self.torn_percent.to_string()));
        all.push((REORDER.name, self.reorder.to_string()));
        all.push((CONNECT.name, self.connect.as_micros().to_string()));
        all.push((CONNECT_FAILS.name, self.connect_fails.to_string()));
        all.push((LOST_AFTER.name, self.lost_after.to_string()));
        let disconnected = if self.fails_disconnected { "fail" } else { "wait" };
        all.push((DISCONNECTED.name, disconnected.to_owned()));
        all.push((SEED.name, self.seed.to_string()));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(given: &[(&str, &str)]) -> Result<FaultPlan, String> {
        let mut settings = Settings::new("disk \"a\"");
        for (key, value) in given {
            settings.insert(key, value).unwrap();
        }
        FaultPlan::from_settings(&mut settings).map_err(|error| error.to_string())
    }

    #[test]
    fn resolved_settings_make_the_same_plan() {
        let given = [
            ("fail-read", "0+512:EIO/1M+4K:ENOSPC*3"),
            ("fail-write", "0+16777215T:121"),
            ("fail-discard", "4K+4K:EOPNOTSUPP"),
            ("fail-zeroes", "512+512:EIO"),
            ("fail-flush", "EIO*1/ETIMEDOUT"),
            ("fault-torn", "50"),
            ("fault-latency-us", "7"),
            ("fault-jitter-us", "8"),
            ("fault-sync-us", "13"),
            ("fault-reorder", "9"),
            ("fault-connect-us", "10"),
            ("fault-connect-fails", "11"),
            ("fault-lost-after", "12"),
            ("fault-disconnected", "fail"),
            ("fault-seed", "18446744073709551615"),
        ];
        let first = plan(&given).unwrap();
        assert_eq!(first.rules.len(), 7);
        let resolved = first.resolved();
        let again: Vec<(&str, &str)> = resolved.iter().map(|(key, value)| (*key, value.as_str())).collect();
        assert_eq!(plan(&again).unwrap(), first);
        assert_eq!(resolved[0], ("fail-read", "0+512:EIO/1M+4K:ENOSPC*3".to_owned()));
    }

    #[test]
    fn invalid_rules_are_refused() {
        for text in [
            "",
            "EIO",
            "0+512",
            "0:EIO",
            "0+0:EIO",
            "0+512:",
            "0+512:EWHAT",
            "0+512:0",
            "0+512:-5",
            "0+512:4096",
            "x+512:EIO",
            "0+512:EIO*0",
            "0+512:EIO*x",
            "0+512:EIO/",
            "16777215T+16777215T:EIO",
        ] {
            let error = plan(&[("fail-read", text)]).unwrap_err();
            let start = format!("disk \"a\": fail-read: found {text:?}, expected OFFSET+LEN:ERRNO");
            assert!(error.starts_with(&start), "{error}");
        }
        assert!(plan(&[("fail-flush", "0+512:EIO")]).unwrap_err().contains("expected ERRNO"));
        assert!(plan(&[("fault-torn", "101")]).unwrap_err().contains("from 0 to 100"));
    }

    #[test]
    fn a_rule_matches_requests_that_overlap_its_range() {
        let rule = FaultRule::parse("fail-read", "4K+4K:EIO").unwrap();
        let read = |op, start, len| {
            let tag = mqblk_core::Tag::new(0, 0);
            rule.outcome_for::<()>(&Request { start: ByteOffset(start), len: ByteLen(len), tag, buffer: None, op })
                .is_some()
        };
        for (start, len, hit) in [
            (0, 4096, false),
            (0, 4097, true),
            (8191, 1, true),
            (8192, 512, false),
            (5000, 0, true),
            (0, u64::MAX, true),
            (8000, u64::MAX, true),
        ] {
            assert_eq!(read(Op::Read, start, len), hit, "{start}+{len}");
        }
        assert!(!read(Op::Write { fua: false }, 4096, 4096));
    }
}
