//! The devices of a report, and their order.

use std::cmp::Ordering;

use globset::{GlobBuilder, GlobMatcher};
use mqblk_admin::model::Stat;
use mqblk_core::settings::{SettingError, Settings};

use super::columns::{COLUMNS, IoColumn, lun_as_io};
use super::rates::{ControllerRates, IoRates, LunIoRates, Report};

/// The value of `--sort` besides those of columns.
const NAME: &str = "name";
/// Most ids that a message lists.
const LISTED: usize = 16;

/// The selection of `--disk`.
#[derive(Debug, Default)]
pub(crate) struct DiskPatterns(Vec<(String, GlobMatcher)>);

impl DiskPatterns {
    /// Parses patterns as a shell has them: `*`, `?`, `[...]`, `{a,b}`.
    ///
    /// # Errors
    /// The invalid pattern.
    pub(crate) fn parse(subject: &str, patterns: &[String]) -> Result<DiskPatterns, SettingError> {
        let parsed = patterns.iter().map(|text| match GlobBuilder::new(text).build() {
            Ok(glob) => Ok((text.clone(), glob.compile_matcher())),
            Err(error) => {
                let found = format!("{text:?} ({})", error.kind());
                Err(Settings::new(subject).error("disk", found, "a pattern such as vm1, vm* or vm[12]"))
            }
        });
        Ok(DiskPatterns(parsed.collect::<Result<_, _>>()?))
    }

    /// Returns the id if exactly one is selected: then the daemon answers for that alone.
    pub(crate) fn only_id(&self) -> Option<String> {
        match &self.0[..] {
            [(text, _)] if !text.contains(['*', '?', '[', '{', '\\']) => Some(text.clone()),
            _ => None,
        }
    }

    /// Checks that each pattern selects something.
    ///
    /// # Errors
    /// The first pattern that selects nothing, with a list of ids.
    pub(crate) fn check(&self, subject: &str, stat: &Stat) -> Result<(), SettingError> {
        let disks = stat.disks.iter().map(|disk| disk.id.as_str());
        let controllers = stat.controllers.iter();
        let of_controllers =
            controllers.flat_map(|one| [one.id.as_str()].into_iter().chain(one.luns.iter().map(|lun| lun.id.as_str())));
        let ids: Vec<&str> = disks.chain(of_controllers).collect();
        let Some((text, _)) = self.0.iter().find(|(_, glob)| !ids.iter().any(|id| glob.is_match(id))) else {
            return Ok(());
        };
        let more = if ids.len() > LISTED { ", ..." } else { "" };
        let some = ids.iter().take(LISTED).copied().collect::<Vec<_>>().join(", ");
        let expected = match ids.is_empty() {
            true => "an id, of which there is none".to_owned(),
            false => format!("the id of one of {some}{more}, or a pattern for some of them"),
        };
        Err(Settings::new(subject).error("disk", format!("{text:?}"), expected))
    }

    fn selects(&self, id: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|(_, glob)| glob.is_match(id))
    }

    /// Removes everything outside of the selection. A controller stays with its selected LUNs.
    pub(crate) fn apply(&self, stat: &mut Stat) {
        stat.disks.retain(|disk| self.selects(&disk.id));
        stat.controllers.retain_mut(|controller| {
            if self.selects(&controller.id) {
                return true;
            }
            controller.luns.retain(|lun| self.selects(&lun.id));
            !controller.luns.is_empty()
        });
    }
}

/// Removes the devices, LUNs and queues that were idle in the interval. Unknown ones stay.
pub(crate) fn drop_idle(report: &mut Report) {
    let works = |rates: &Option<IoRates>| rates.is_none_or(|rates| !is_idle(&rates));
    report.disks.iter_mut().for_each(|disk| disk.queues.retain(|queue| works(&queue.rates)));
    report.disks.retain(|disk| works(&disk.totals) || disk.health.stopped.is_some());
    let lun_works =
        |rates: &Option<LunIoRates>| rates.is_none_or(|rates| !is_idle(&lun_as_io(&rates)) || rates.others_per_s > 0.0);
    for controller in &mut report.controllers {
        controller.queues.retain(|queue| works(&queue.rates));
        controller.luns.retain(|lun| lun_works(&lun.rates) || lun.health.stopped.is_some());
    }
    report.controllers.retain(|controller| works(&controller.totals) || !controller.luns.is_empty());
}

fn is_idle(rates: &IoRates) -> bool {
    let requests = rates.reads_per_s + rates.writes_per_s + rates.discards_per_s + rates.flushes_per_s;
    requests <= 0.0 && rates.in_flight == 0 && rates.errors == 0
}

/// The sort key of rows.
#[derive(Clone, Copy)]
pub(crate) enum SortKey {
    /// The id, ascending.
    Name,
    /// A column, the largest first.
    Column(&'static IoColumn),
}

impl SortKey {
    /// Parses the value of `--sort`.
    ///
    /// # Errors
    /// If it is no column.
    pub(crate) fn parse(subject: &str, text: &str) -> Result<SortKey, SettingError> {
        if text == NAME {
            return Ok(SortKey::Name);
        }
        let column = COLUMNS.iter().find(|column| column.name == text);
        column.map(SortKey::Column).ok_or_else(|| {
            let names: Vec<&str> = COLUMNS.iter().map(|column| column.name).collect();
            Settings::new(subject).error("sort", format!("{text:?}"), format!("name or a column: {}", names.join(", ")))
        })
    }

    fn compare(self, one: (&str, Option<IoRates>), other: (&str, Option<IoRates>)) -> Ordering {
        let by_name = one.0.cmp(other.0);
        match self {
            SortKey::Name => by_name,
            SortKey::Column(column) => {
                let value = |rates: Option<IoRates>| rates.as_ref().and_then(column.value).unwrap_or(-1.0);
                value(other.1).total_cmp(&value(one.1)).then(by_name)
            }
        }
    }

    /// Sorts disks and controllers, and the LUNs of each. Queues stay in the order of their numbers.
    pub(crate) fn sort(self, report: &mut Report) {
        report.disks.sort_by(|one, other| self.compare((&one.id, one.totals), (&other.id, other.totals)));
        report.controllers.sort_by(|one, other| self.compare((&one.id, one.totals), (&other.id, other.totals)));
        for ControllerRates { luns, .. } in &mut report.controllers {
            let rates = |rates: &Option<LunIoRates>| rates.as_ref().map(lun_as_io);
            luns.sort_by(|one, other| self.compare((&one.id, rates(&one.rates)), (&other.id, rates(&other.rates))));
        }
    }
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
