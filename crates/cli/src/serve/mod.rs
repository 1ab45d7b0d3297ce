//! `mqblk serve`.

mod args;
mod background;
mod keys;
mod signals;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_daemon::config::ServeConfig;
use mqblk_daemon::config_error::ConfigError;
use mqblk_daemon::file::ConfigSource;
use mqblk_daemon::file::{self, OpenConfig, RawConfig};
use mqblk_daemon::file_use;
use mqblk_daemon::interface::Interfaces;
use mqblk_daemon::key_values::RawTable;
use mqblk_daemon::service_notifier::ServiceNotifier;
use mqblk_daemon::{Daemon, LogLevel, Predecessor, Purpose, TakeoverError};
use mqblk_daemon::{key_values, print};

use crate::failure::{self, BAD_USAGE, FAILED};
use crate::logging;
use crate::vhost_user::VhostUserArgs;
use args::ConventionArgs;
pub(crate) use args::{KeyOptions, ServeArgs, add_keys};
use signals::StopSignals;

/// The capabilities of a vhost-user backend program of type block, in the format of QEMU's
/// docs/interop/vhost-user.json.
const CAPABILITIES: &str = r#"{"type":"block","features":["read-only","blk-file"]}"#;

/// Serves until a signal stops the daemon.
pub(crate) fn run(args: ServeArgs, given: KeyOptions, interfaces: Interfaces, log: Arc<dyn LogLevel>) -> ExitCode {
    if args.print_capabilities {
        return show(&format!("{CAPABILITIES}\n"));
    }
    if let (Some(admin), true) = (&args.takeover, args.background) {
        return background::run(&admin_path(admin.as_deref()));
    }
    let code = run_configured(args, given, interfaces, log);
    // The sockets of a daemon that does not serve.
    mqblk_daemon::sockets::discard();
    code
}

/// Serves one disk by the conventions for vhost-user programs.
pub(crate) fn run_conventional(args: &VhostUserArgs, interfaces: Interfaces, log: Arc<dyn LogLevel>) -> ExitCode {
    if args.print_capabilities {
        return show(&format!("{CAPABILITIES}\n"));
    }
    let raw = args.disk().map(|disk| {
        let mut raw = RawConfig::new("vhost-user");
        raw.disks.push(disk);
        raw
    });
    raise_descriptor_limit();
    let code = run_raw(raw, Purpose::Serve, None, interfaces, |config| ServeConfig { log: Some(log), ..config });
    mqblk_daemon::sockets::discard();
    code
}

fn run_configured(args: ServeArgs, given: KeyOptions, interfaces: Interfaces, log: Arc<dyn LogLevel>) -> ExitCode {
    // Before images are opened, or sockets arrive from another process: both may be thousands.
    raise_descriptor_limit();
    mqblk_daemon::test_keys::limit_mappings();
    // While this is the only thread.
    let received = mqblk_daemon::activation::receive();
    let raw = received.and_then(|()| gather(&args, &given, interfaces, &file_use::open_for_reading));
    let purpose = if args.print_config {
        Purpose::Print
    } else if args.check {
        Purpose::Check
    } else {
        Purpose::Serve
    };
    let predecessor = match (&args.takeover, &raw) {
        (Some(path), Ok(_)) if purpose == Purpose::Serve => match take_over(path.as_deref()) {
            Ok(predecessor) => Some(predecessor),
            Err(error) => return failure::report(&error, FAILED),
        },
        _ => None,
    };
    run_raw(raw, purpose, predecessor, interfaces, move |config| {
        // Absolute, because the sandbox does not allow to query the working directory.
        let file = args.config.map(|path| std::path::absolute(&path).unwrap_or(path));
        let source = Arc::new(CommandLine { args: ServeArgs { config: file, ..args }, given, interfaces });
        ServeConfig { log: Some(log), source: Some(source), ..config }
    })
}

/// Asks the daemon at an admin socket to hand over.
fn take_over(path: Option<&Path>) -> Result<Predecessor, TakeoverError> {
    Predecessor::connect(&admin_path(path))
}

/// Returns the path of the admin socket in `--takeover`, or the default one.
fn admin_path(given: Option<&Path>) -> PathBuf {
    given.map_or_else(mqblk_admin::default_socket, Path::to_owned)
}

/// Serves a configuration, or prints or checks it. `complete` adds the settings changed at run time.
fn run_raw(
    raw: Result<RawConfig, SettingError>,
    purpose: Purpose,
    predecessor: Option<Predecessor>,
    interfaces: Interfaces,
    complete: impl FnOnce(ServeConfig) -> ServeConfig,
) -> ExitCode {
    let configure = |raw| mqblk_daemon::configure(raw, interfaces, predecessor, purpose);
    let config = match raw.map_err(ConfigError::from).and_then(configure) {
        Ok(config) => config,
        // A service manager retries after the first, but not after the second (RestartPreventExitStatus=).
        Err(error) => return failure::report(&error, if error.is_from_host() { FAILED } else { BAD_USAGE }),
    };
    match purpose {
        Purpose::Print => return show(&print::to_toml(&config)),
        Purpose::Check => return check(&config),
        Purpose::Serve => {}
    }
    match serve(complete(config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&*error, FAILED),
    }
}

/// Reports the disks of a configuration that can be served.
fn check(config: &ServeConfig) -> ExitCode {
    let served = config.interfaces.iter().flat_map(|interface| &interface.ids);
    let served = served.map(|(noun, id)| format!("{noun} {id}: can be served\n"));
    let out = config.out.iter().map(|disk| format!("{} is out: {}\n", disk.id, disk.why));
    match show(&served.chain(out).collect::<String>()) {
        ExitCode::SUCCESS if !config.out.is_empty() => FAILED.into(),
        code => code,
    }
}

fn serve(config: ServeConfig) -> Result<(), Box<dyn std::error::Error>> {
    logging::log_panics();
    let mut signals = StopSignals::install()?;
    let queues: usize = config.interfaces.iter().map(|interface| interface.queues).sum();
    let more_to_come = config.interfaces.iter().any(|interface| interface.expects_more);
    if usize::from(config.workers) > queues && queues > 0 && !more_to_come {
        tracing::warn!(workers = config.workers, queues, "some workers have no queue to serve");
    }
    // Before the sandbox, in which it would be out of reach.
    let mut notifier = ServiceNotifier::connect()?;
    notifier.adopt(config.predecessor.as_ref().and_then(Predecessor::take_service_manager));
    let notifier = Arc::new(notifier);
    let daemon = Daemon::start(ServeConfig { end: Some(signals.ender()), stop: signals.seen(), ..config })?;
    // Also while it stops.
    let _reporting = daemon.report_to(&notifier)?;
    notifier.ready();
    let Some(signal) = signals.wait(|| daemon.reload(&notifier)) else {
        daemon.leave();
        return Ok(());
    };
    notifier.stopping();
    tracing::info!(signal, "stopping; the same signal again ends at once");
    daemon.stop()?;
    tracing::info!("stopped");
    Ok(())
}

/// The daemon's command line.
struct CommandLine {
    args: ServeArgs,
    given: KeyOptions,
    interfaces: Interfaces,
}

impl ConfigSource for CommandLine {
    fn file(&self) -> Option<PathBuf> {
        self.args.config.clone()
    }

    fn read(&self, file: Option<&Path>, open: OpenConfig<'_>) -> Result<RawConfig, SettingError> {
        let config = file.map(Path::to_owned).or_else(|| self.args.config.clone());
        gather(&ServeArgs { config, ..self.args.clone() }, &self.given, self.interfaces, open)
    }
}

/// Raises the limit of open files to the hard limit: each queue needs four, and the usual soft limit is 1024.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!("the limit of open files stays at {}: {error}", current.unwrap_or(u64::MAX));
    }
}

/// Collects the settings of the file, then those of the command line.
fn gather(
    args: &ServeArgs,
    given: &KeyOptions,
    interfaces: Interfaces,
    open: OpenConfig<'_>,
) -> Result<RawConfig, SettingError> {
    let mut raw = match &args.config {
        Some(path) => file::read(path, open, interfaces)?,
        None => RawConfig::new("serve"),
    };
    for (key, value) in &given.process {
        // Replaces that of the file.
        raw.process.replace(key, value);
        raw.process.set_subject("serve");
    }
    for (index, text) in args.disks.iter().enumerate() {
        raw.disks.push(key_values::parse(&format!("--disk #{}", index + 1), text)?);
    }
    for (index, text) in args.limit_groups.iter().enumerate() {
        raw.limit_groups.push(key_values::parse(&format!("--limit-group #{}", index + 1), text)?);
    }
    for (interface, name, texts) in &given.tables {
        for (index, text) in texts.iter().enumerate() {
            let settings = key_values::parse(&format!("--{name} #{}", index + 1), text)?;
            raw.tables.push(RawTable { interface: *interface, name, parent: None, settings });
        }
    }
    if let Some(ConventionArgs { socket_path: Some(socket), blk_file: Some(path), read_only }) = &given.conventions {
        let mut disk = Settings::new("--blk-file");
        disk.insert("path", path)?;
        disk.insert("socket", socket)?;
        disk.insert("readonly", if *read_only { "on" } else { "off" })?;
        raw.disks.push(disk);
    }
    Ok(raw)
}

fn show(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error, FAILED),
    }
}
