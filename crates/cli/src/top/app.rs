//! The state of the screen, and the effects of keys. Uses no terminal and no clock.

use mqblk_admin::model::Stat;
use mqblk_core::settings::SettingError;

use super::rows::{self, DataRow, TopView};
use super::terminal::Key;
use crate::stat::rates::{self, Report};
use crate::stat::selection::SortKey;

/// The action after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Continue,
    Quit,
}

/// The initial sort column of disks and queues.
const FIRST_SORT: &str = "aqu-sz";
/// Rows of a page.
const PAGE: usize = 10;

/// The state of the screen.
pub(super) struct App {
    pub(super) view: TopView,
    /// The name of the sort column of each view; `name`: by name.
    sort: [&'static str; 3],
    pub(super) reverse: bool,
    pub(super) skip_idle: bool,
    pub(super) paused: bool,
    pub(super) shows_help: bool,
    /// The selected row, by its name: it stays when the order changes.
    selected: Option<String>,
    pub(super) before: Option<Stat>,
    pub(super) now: Option<Stat>,
    pub(super) report: Option<Report>,
    /// The error of the last sample.
    pub(super) error: Option<String>,
}

impl App {
    pub(super) fn new() -> App {
        App {
            view: TopView::Disks,
            sort: [FIRST_SORT, FIRST_SORT, "%cpu"],
            reverse: false,
            skip_idle: false,
            paused: false,
            shows_help: false,
            selected: None,
            before: None,
            now: None,
            report: None,
            error: None,
        }
    }

    /// Sorts disks and queues by a column of `mqblk stat`.
    ///
    /// # Errors
    /// If there is no such column.
    pub(super) fn sort_by(&mut self, subject: &str, text: &str) -> Result<(), SettingError> {
        let name = match SortKey::parse(subject, text)? {
            SortKey::Name => rows::NAME,
            SortKey::Column(column) => column.name,
        };
        (self.sort[0], self.sort[1]) = (name, name);
        Ok(())
    }

    /// Takes a sample, or its error.
    pub(super) fn sampled(&mut self, sample: Result<Stat, String>) {
        match sample {
            Ok(_) if self.paused => {}
            Ok(stat) => {
                self.error = None;
                self.report = Some(rates::compare(self.now.as_ref(), &stat));
                self.before = self.now.replace(stat);
            }
            Err(why) => self.error = Some(why),
        }
    }

    /// Returns the name of the view's sort column.
    pub(super) fn sort_column(&self) -> &'static str {
        self.sort[self.view.index()]
    }

    /// Returns the rows of the view, in order.
    pub(super) fn rows(&self) -> Vec<DataRow> {
        let Some(report) = &self.report else { return Vec::new() };
        let mut rows = match self.view {
            TopView::Disks => rows::devices(report),
            TopView::Queues => rows::queues(report),
            TopView::Workers => rows::workers(report),
        };
        if self.skip_idle {
            rows.retain(|row| !row.is_idle);
        }
        rows::sort(&mut rows, self.sort_column(), self.reverse);
        rows
    }

    /// Returns the number of the selected row, or of the first one if the selected one is gone.
    pub(super) fn selected_row(&self, rows: &[DataRow]) -> usize {
        let found = self.selected.as_ref().and_then(|name| rows.iter().position(|row| &row.name == name));
        found.unwrap_or(0)
    }

    /// Handles a key.
    pub(super) fn pressed(&mut self, key: Key) -> Flow {
        if let Key::Control(letter) = key {
            return if letter == 'c' { Flow::Quit } else { Flow::Continue };
        }
        if self.shows_help {
            // Any key closes it.
            self.shows_help = false;
            return if key == Key::Char('q') { Flow::Quit } else { Flow::Continue };
        }
        match key {
            Key::Char('q') | Key::Escape => return Flow::Quit,
            Key::Char('1') => self.show(TopView::Disks),
            Key::Char('2') => self.show(TopView::Queues),
            Key::Char('3') => self.show(TopView::Workers),
            Key::Tab => self.show(TopView::ALL[(self.view.index() + 1) % TopView::ALL.len()]),
            Key::BackTab => self.show(TopView::ALL[(self.view.index() + TopView::ALL.len() - 1) % TopView::ALL.len()]),
            Key::Char('<' | ',') | Key::Left => self.change_sort(-1),
            Key::Char('>' | '.') | Key::Right => self.change_sort(1),
            Key::Char('r') => self.reverse = !self.reverse,
            Key::Char('z') => self.skip_idle = !self.skip_idle,
            Key::Char('p' | ' ') => self.paused = !self.paused,
            Key::Char('h' | '?') => self.shows_help = true,
            Key::Up | Key::Char('k') => self.select(-1),
            Key::Down | Key::Char('j') => self.select(1),
            Key::PageUp => self.select(-(PAGE as isize)),
            Key::PageDown => self.select(PAGE as isize),
            Key::Home => self.select(isize::MIN),
            Key::End => self.select(isize::MAX),
            Key::Char(_) | Key::Control(_) => {}
        }
        Flow::Continue
    }

    fn show(&mut self, view: TopView) {
        self.view = view;
        self.selected = None;
    }

    fn change_sort(&mut self, by: isize) {
        let names = rows::sort_names(self.view);
        let at = names.iter().position(|name| *name == self.sort_column()).unwrap_or(0);
        self.sort[self.view.index()] = names[at.saturating_add_signed(by).min(names.len() - 1)];
    }

    fn select(&mut self, by: isize) {
        let rows = self.rows();
        let at = self.selected_row(&rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
        self.selected = rows.get(at).map(|row| row.name.clone());
    }
}
