//! `mqblk serve`.

mod admin;
mod backends;
mod blk;
mod config;
mod controller;
mod cpus;
mod daemon;
mod file;
mod flush;
mod interfaces;
mod key_values;
mod luns;
mod print;
mod queue_map;
mod resize;
mod resolve;
mod signals;
mod state;
mod test_keys;
mod watch;
mod xen;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::AnyDisk;

use crate::failure::{self, BAD_USAGE, FAILED};
use config::{LunUnit, ServeConfig};
use cpus::Cpus;
use daemon::Daemon;
use file::{RawConfig, RawLun};
use resolve::ConfigError;
use signals::StopSignals;

/// The capabilities of a vhost-user backend program of type block, in the format of QEMU's docs/interop/vhost-user.json.
const CAPABILITIES: &str = r#"{"type":"block","features":["read-only","blk-file"]}"#;

/// The options of `mqblk serve`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Keys of --disk, --controller and --lun, and examples: mqblk serve --help")]
pub struct ServeArgs {
    /// A disk to serve; may be repeated
    #[arg(long = "disk", value_name = "KEY=VALUE,...")]
    disks: Vec<String>,

    /// A virtio-scsi controller to serve, with the LUNs of --lun; may be repeated
    #[arg(long = "controller", value_name = "KEY=VALUE,...")]
    controllers: Vec<String>,

    /// A LUN of a controller; may be repeated
    #[arg(long = "lun", value_name = "controller=ID,KEY=VALUE,...")]
    luns: Vec<String>,

    /// A TOML file with the same keys: [[disk]], [[controller]] and [[controller.lun]] tables; workers, pin, admin, state at the top
    ///
    /// Its disks, controllers and LUNs come before those of the command line; --workers, --pin and --admin override its own.
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,

    /// Worker threads, 1 to 256 [default: the number of CPUs or of all queues, whichever is smaller]
    #[arg(long, value_name = "N")]
    workers: Option<String>,

    /// The CPU of each worker, in order [default: not pinned]
    #[arg(long, value_name = "CPU,...")]
    pin: Option<String>,

    /// Warn in the log of a request that the storage has not ended after S seconds; 0: never [default: 10]
    #[arg(long, value_name = "S")]
    hang_warning_s: Option<String>,

    /// Make an admin socket there, for `mqblk stat` and others: JSON-RPC, one message a line [default: none]
    #[arg(long, value_name = "PATH")]
    admin: Option<String>,

    /// The admin socket's permissions, octal [default: 0600]
    #[arg(long, value_name = "BITS")]
    admin_mode: Option<String>,

    /// How long a stop waits for storage, 1 to 3600 seconds; then requests stay for whoever serves the queues next [default: 30]
    #[arg(long, value_name = "SECONDS")]
    drain_timeout_s: Option<String>,

    /// Keep LUNs that are added and removed while the daemon runs in this file, for the next start [default: they are lost]
    ///
    /// Made when it is not there. What does not go together with the configuration is left out, with a warning.
    #[arg(long, value_name = "FILE")]
    state: Option<String>,

    /// Which Xen: auto (the machine's own, when something needs it), real, or the folder of a simulated one [default: auto]
    #[arg(long, value_name = "auto|real|FOLDER", help_heading = "Xen")]
    xen: Option<String>,

    /// Serve every device of this type that a toolstack makes, whatever it names [default type: mqblk]
    #[arg(long, value_name = "TYPE", num_args = 0..=1, default_missing_value = crate::xen::DEFAULT_TYPE, help_heading = "Xen")]
    xen_watch: Option<String>,

    /// Where unanswered requests are noted, so that a daemon after this one takes rings up; off: nowhere [default: /run/mqblk/xen]
    #[arg(long, value_name = "DIR|off", help_heading = "Xen")]
    xen_state: Option<String>,

    /// Most pages of guests that all disks together keep mapped; more are copied [default: what the host allows]
    #[arg(long, value_name = "N", help_heading = "Xen")]
    xen_mapped_pages: Option<String>,

    /// Print the configuration with every default filled in, as TOML for --config, and exit
    #[arg(long)]
    print_config: bool,

    /// Print what this vhost-user program can do, as JSON, and exit
    #[arg(long)]
    print_capabilities: bool,

    /// Serve one file, in the words of the vhost-user program conventions: the socket
    #[arg(long, value_name = "PATH", requires = "blk_file", help_heading = "vhost-user program conventions")]
    socket_path: Option<String>,

    /// Serve one file, in the words of the vhost-user program conventions: the file
    #[arg(long, value_name = "PATH", requires = "socket_path", help_heading = "vhost-user program conventions")]
    blk_file: Option<String>,

    /// The file of --blk-file is served read-only
    #[arg(long, requires = "blk_file", help_heading = "vhost-user program conventions")]
    read_only: bool,
}

/// Serves until a signal stops the daemon.
pub fn run(args: ServeArgs) -> ExitCode {
    if args.print_capabilities {
        return print(&format!("{CAPABILITIES}\n"));
    }
    let config = match configure(&args) {
        Ok(config) => config,
        Err(error) => return failure::report(&error, BAD_USAGE),
    };
    if args.print_config {
        return print(&print::to_toml(&config));
    }
    match serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&*error, FAILED),
    }
}

fn serve(config: ServeConfig<Arc<AnyDisk>>) -> Result<(), Box<dyn std::error::Error>> {
    let mut signals = StopSignals::install()?;
    let queues: usize = config.disks.iter().map(|disk| disk.endpoint.queue_map().len()).sum::<usize>()
        + config.controllers.iter().map(|controller| usize::from(controller.endpoint.queues)).sum::<usize>();
    let more_to_come = config.xen.as_ref().is_some_and(|xen| xen.watch);
    if usize::from(config.workers) > queues && !more_to_come {
        tracing::warn!(workers = config.workers, queues, "some workers have no queue to serve");
    }
    raise_descriptor_limit();
    let daemon = Daemon::start(config)?;
    let signal = signals.wait();
    tracing::info!(signal, "stopping; the same signal again ends at once");
    daemon.stop()?;
    tracing::info!("stopped");
    Ok(())
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

/// Returns the configuration, after all checks that are possible before anything is created.
fn configure(args: &ServeArgs) -> Result<ServeConfig<Arc<AnyDisk>>, ConfigError> {
    let config = resolve::resolve(gather(args)?, &Cpus::of_this_host(), &mut backends::Registry)?;
    if let Some(admin) = &config.admin {
        mqblk_vhost_user_server::probe_socket(&admin.socket).map_err(ConfigError::Admin)?;
    }
    let luns = config.controllers.iter().flat_map(|controller| &controller.luns);
    for lun in luns {
        if let LunUnit::Own(unit) = &lun.unit
            && let Some(path) = &unit.reservations
        {
            controller::open_reservations(path).map_err(|why| ConfigError::Reservations { id: lun.id.clone(), why })?;
        }
    }
    for (subject, endpoint) in config.vhost_user_endpoints() {
        mqblk_vhost_user_server::probe_socket(&endpoint.socket)
            .map_err(|source| ConfigError::Socket { subject, source })?;
    }
    Ok(config)
}

/// Collects the settings of the file, then those of the command line.
fn gather(args: &ServeArgs) -> Result<RawConfig, SettingError> {
    let mut raw = match &args.config {
        Some(path) => file::read(path)?,
        None => RawConfig::new("serve"),
    };
    let process = [
        ("workers", &args.workers),
        ("pin", &args.pin),
        ("hang-warning-s", &args.hang_warning_s),
        ("admin", &args.admin),
        ("admin-mode", &args.admin_mode),
        ("drain-timeout-s", &args.drain_timeout_s),
        ("state", &args.state),
        ("xen", &args.xen),
        ("xen-watch", &args.xen_watch),
        ("xen-state", &args.xen_state),
        ("xen-mapped-pages", &args.xen_mapped_pages),
    ];
    for (key, value) in process {
        if let Some(value) = value {
            raw.process.text(key);
            raw.process.insert(key, value)?;
            raw.process.set_subject("serve");
        }
    }
    for (index, text) in args.disks.iter().enumerate() {
        raw.disks.push(key_values::parse(&format!("--disk #{}", index + 1), text)?);
    }
    for (index, text) in args.controllers.iter().enumerate() {
        raw.controllers.push(key_values::parse(&format!("--controller #{}", index + 1), text)?);
    }
    for (index, text) in args.luns.iter().enumerate() {
        let settings = key_values::parse(&format!("--lun #{}", index + 1), text)?;
        raw.luns.push(RawLun { controller: None, settings });
    }
    if let (Some(socket), Some(path)) = (&args.socket_path, &args.blk_file) {
        let mut disk = Settings::new("--blk-file");
        disk.insert("path", path)?;
        disk.insert("socket", socket)?;
        disk.insert("readonly", if args.read_only { "on" } else { "off" })?;
        raw.disks.push(disk);
    }
    Ok(raw)
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error, FAILED),
    }
}
