//! `mqblk top`: shows the activity of a running daemon on a whole terminal.

mod app;
mod rows;
mod terminal;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use mqblk_admin::ClientError;
use mqblk_admin::model::Stat;
use mqblk_core::settings::{SettingError, Settings};
use signal_hook::consts::{SIGHUP, SIGTERM};

use crate::admin_socket::AdminSocket;
use crate::failure::{self, BAD_USAGE, FAILED};
use crate::stat::source::StatSource;
use app::{App, Flow};
use terminal::TerminalScreen;

/// Shortest and longest interval, in seconds, and the default.
const SHORTEST_S: f64 = 0.1;
const LONGEST_S: f64 = 3600.0;
const DEFAULT_S: f64 = 1.0;
/// Longest wait of a key, a sample or a signal.
const TICK: Duration = Duration::from_millis(50);
/// Time for the screen to end by itself.
const GRACE: Duration = Duration::from_secs(1);

/// The options of `mqblk top`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Keys, and examples: mqblk top --help")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    admin: AdminSocket,

    /// How many seconds a sample covers; 0.1 or more [default: 1]
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    interval: Option<String>,

    /// Sort by this column of `mqblk stat` at first, or by name [default: aqu-sz]
    #[arg(long, value_name = "COLUMN")]
    sort: Option<String>,
}

/// Reasons for a screen that was not shown, or has ended.
#[derive(Debug, thiserror::Error)]
enum TopError {
    #[error(transparent)]
    Usage(#[from] SettingError),
    #[error("top: socket: {0}")]
    Client(#[from] ClientError),
    #[error("top: terminal: {0}")]
    Terminal(#[from] io::Error),
}

/// Shows the screen until the user quits.
pub(crate) fn run(args: &TopArgs) -> ExitCode {
    match show(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ TopError::Usage(_)) => failure::report(&error, BAD_USAGE),
        Err(error) => failure::report(&error, FAILED),
    }
}

fn show(args: &TopArgs) -> Result<(), TopError> {
    let (interval, mut app) = parse(args)?;
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        let expected = "a terminal; `mqblk stat --watch 1` prints to files and pipes";
        return Err(Settings::new("top").error("terminal", "none", expected).into());
    }
    let mut daemon = StatSource::new(args.admin.path(), None);
    // A missing daemon is reported before the screen is taken.
    app.sampled(Ok(daemon.read()?));
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let watched = Arc::clone(&ended);
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || watch_signals(&watched))?;
    let (sender, samples) = sync_channel(1);
    std::thread::Builder::new().name("samples".to_owned()).spawn(move || sample(daemon, interval, &sender))?;
    let screen = TerminalScreen::take()?;
    Ok(serve_keys(&screen, &mut app, &samples, &ended)?)
}

/// Waits for a signal, and ends the process if the screen does not end by itself: a terminal may take no more output.
fn watch_signals(ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        std::thread::sleep(TICK);
    }
    std::thread::sleep(GRACE);
    terminal::give_back();
    std::process::exit(i32::from(FAILED));
}

fn parse(args: &TopArgs) -> Result<(Duration, App), SettingError> {
    let interval = match &args.interval {
        None => Duration::from_secs_f64(DEFAULT_S),
        Some(text) => match text.parse::<f64>() {
            Ok(seconds) if (SHORTEST_S..=LONGEST_S).contains(&seconds) => Duration::from_secs_f64(seconds),
            _ => return Err(Settings::new("top").error("interval", format!("{text:?}"), "seconds from 0.1 to 3600")),
        },
    };
    let mut app = App::new();
    if let Some(sort) = &args.sort {
        app.sort_by("top", sort)?;
    }
    Ok((interval, app))
}

/// Takes a sample each interval, while the receiver exists. A daemon that does not answer blocks nothing else.
fn sample(mut daemon: StatSource, interval: Duration, samples: &SyncSender<Result<Stat, String>>) {
    loop {
        std::thread::sleep(interval);
        if samples.send(daemon.read().map_err(|error| error.to_string())).is_err() {
            return;
        }
    }
}

fn serve_keys(
    screen: &TerminalScreen,
    app: &mut App,
    samples: &Receiver<Result<Stat, String>>,
    ended: &AtomicBool,
) -> io::Result<()> {
    let mut drawn = None;
    while !ended.load(Ordering::Relaxed) {
        loop {
            match samples.try_recv() {
                Ok(sample) => {
                    app.sampled(sample);
                    drawn = None;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that takes samples has ended"));
                }
            }
        }
        // A resized terminal is redrawn.
        let size = terminal::size()?;
        if drawn != Some(size) {
            screen.draw(&view::lines(app, size.0, size.1), size.0)?;
            drawn = Some(size);
        }
        let Some(keys) = terminal::read_keys(TICK)? else { return Ok(()) };
        for key in keys {
            if app.pressed(key) == Flow::Quit {
                return Ok(());
            }
            drawn = None;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
