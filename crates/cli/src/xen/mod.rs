//! `mqblk xen`: attaches, detaches, resizes and lists block devices of Xen guests. Writes xenstore as a toolstack does;
//! needs no daemon.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use mqblk_core::settings::{EXPECTED_SIZE, SettingError, Settings, parse_size};
use mqblk_core::{ByteLen, Resize, Sector512};
use mqblk_daemon::interfaces::xen::selector::{DEFAULT_TYPE, XenSelector, check_type};
use mqblk_xen::XenError;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState};
use mqblk_xen_server::toolstack::{self, AttachResult, ListedDevice, NewDevice, ToolstackError};
use mqblk_xen_server::{DeviceName, Params};
use serde_json::{Value, json};

use crate::failure;
use crate::table;

/// The table cell for an unknown value.
const UNKNOWN: &str = "-";

/// The options of `mqblk xen`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk xen --help")]
pub(crate) struct XenArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Attach a disk to a guest, and wait until it is connected
    Attach {
        #[command(flatten)]
        device: DeviceArgs,

        /// The disk's storage: file:PATH, null:SIZE or mqblk:DISK-ID
        #[arg(value_name = "PARAMS")]
        params: String,

        /// The guest may not write
        #[arg(long)]
        readonly: bool,

        #[command(flatten)]
        wait: WaitArgs,
    },

    /// Have a guest let go of a disk, and remove it
    Detach {
        #[command(flatten)]
        device: DeviceArgs,

        /// Remove it whether the guest has let go of it or not
        #[arg(long)]
        force: bool,

        #[command(flatten)]
        wait: WaitArgs,
    },

    /// Show the disks
    List {
        #[command(flatten)]
        host: HostArgs,
    },

    /// Resize a disk and notify its guest
    Resize {
        #[command(flatten)]
        device: DeviceArgs,

        /// The size, such as 10G: a file is extended or cut to it [default: the size that the file or block device has
        /// now]
        #[arg(long, value_name = "SIZE")]
        size: Option<String>,

        /// The disk may become smaller; data beyond its new end is lost
        #[arg(long)]
        shrink: bool,

        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Debug, clap::Args)]
struct HostArgs {
    /// Which Xen: real, or the folder of a simulated one
    #[arg(long, value_name = "real|FOLDER", default_value = "real")]
    xen: String,

    /// The type of the devices: what was given to `mqblk serve --xen-watch`
    #[arg(long = "type", value_name = "TYPE", default_value = DEFAULT_TYPE)]
    type_name: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The selected device.
#[derive(Debug, clap::Args)]
struct DeviceArgs {
    #[command(flatten)]
    host: HostArgs,

    /// The guest's domain number
    #[arg(long, value_name = "D")]
    domid: u16,

    /// The device in the guest: xvda, xvdb1, sda, or its number
    #[arg(long, value_name = "VDEV")]
    vdev: String,
}

impl DeviceArgs {
    fn name(&self, action: &str) -> Result<DeviceName, CallError> {
        let settings = Settings::new(format!("xen {action}"));
        check_type(&settings, "type", &self.host.type_name)?;
        let devid = vbd::parse_vdev(&self.vdev)
            .map_err(|wrong| settings.error("vdev", format!("{:?}", self.vdev), wrong.expected))?;
        Ok(DeviceName {
            type_name: self.host.type_name.clone(),
            frontend_id: mqblk_memory::DomainId(self.domid),
            devid,
        })
    }
}

#[derive(Debug, clap::Args)]
struct WaitArgs {
    /// How long to wait for the guest and the daemon; 0: not at all
    #[arg(long = "wait", value_name = "SECONDS", default_value = "10")]
    seconds: u32,
}

impl WaitArgs {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }
}

/// A failed action, or a result that was not printed.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Usage(#[from] SettingError),
    #[error("xen {0}: {1}")]
    Tool(&'static str, #[source] ToolstackError),
    #[error("xen: {0}")]
    Xen(#[from] XenError),
    #[error("xen: {0}")]
    Store(#[from] XenstoreError),
    #[error("xen: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the action and prints its result.
pub(crate) fn run(args: XenArgs) -> ExitCode {
    failure::show(execute(&args.action), |error| matches!(error, CallError::Usage(_)))
}

fn execute(action: &Action) -> Result<String, CallError> {
    match action {
        Action::Attach { device, params, readonly, wait } => attach(device, params, *readonly, wait),
        Action::Detach { device, force, wait } => {
            let name = device.name("detach")?;
            let (mut store, own) = connect(&device.host)?;
            toolstack::detach(&mut store, own, &name, wait.timeout(), *force)
                .map_err(|error| CallError::Tool("detach", error))?;
            Ok(summary(&device.host, &name, "detached", ""))
        }
        Action::List { host } => {
            let (mut store, own) = connect(host)?;
            let devices = toolstack::list(&mut store, own, &host.type_name)?;
            Ok(if host.json {
                format!("{}\n", json!({ "devices": devices.iter().map(device_json).collect::<Vec<_>>() }))
            } else {
                device_table(&devices)
            })
        }
        Action::Resize { device, size, shrink, wait } => {
            let name = device.name("resize")?;
            let size = match size {
                None => None,
                Some(text) => Some(
                    parse_size(text)
                        .ok_or_else(|| Settings::new("xen resize").error("size", format!("{text:?}"), EXPECTED_SIZE))?,
                ),
            };
            let request = Resize { size, shrink: *shrink };
            let (mut store, own) = connect(&device.host)?;
            let sectors = toolstack::resize(&mut store, own, &name, request, wait.timeout())
                .map_err(|error| CallError::Tool("resize", error))?;
            Ok(summary(&device.host, &name, "resized", &format!(", {}", bytes(sectors))))
        }
    }
}

fn attach(device: &DeviceArgs, params: &str, read_only: bool, wait: &WaitArgs) -> Result<String, CallError> {
    let name = device.name("attach")?;
    Params::parse(params).map_err(|_| {
        let expected = "file:/PATH, null:SIZE or mqblk:DISK-ID";
        Settings::new("xen attach").error("params", format!("{params:?}"), expected)
    })?;
    let (mut store, own) = connect(&device.host)?;
    let tool_error = |error| CallError::Tool("attach", error);
    let new_device = NewDevice { name: name.clone(), params: params.to_owned(), read_only };
    if toolstack::attach(&mut store, own, &new_device).map_err(tool_error)? == AttachResult::Existing {
        let taken = ToolstackError::VdevInUse {
            vdev: name.vdev(),
            front: name.frontend_id.0,
            what: format!("params {params}"),
        };
        return Err(tool_error(taken));
    }
    if wait.seconds > 0 {
        toolstack::wait_connected(&mut store, own, &name, wait.timeout()).map_err(tool_error)?;
    }
    Ok(summary(&device.host, &name, "attached", ""))
}

fn connect(host: &HostArgs) -> Result<(Xenstore, mqblk_memory::DomainId), CallError> {
    check_type(&Settings::new("xen"), "type", &host.type_name)?;
    let xen = XenSelector::parse(&host.xen).connect()?;
    Ok((xen.store()?, xen.domain()))
}

fn summary(host: &HostArgs, name: &DeviceName, action: &str, more: &str) -> String {
    if host.json {
        let response = json!({ "device": name.to_string(), "domid": name.frontend_id.0, "devid": name.devid, "vdev": name.vdev(), "done": action });
        return format!("{response}\n");
    }
    format!("{action} {} of domain {} ({name}){more}\n", name.vdev(), name.frontend_id.0)
}

fn bytes(sectors: u64) -> String {
    Sector512(sectors).to_len().map_or(UNKNOWN.to_owned(), |len: ByteLen| len.to_string())
}

fn device_json(listed: &ListedDevice) -> Value {
    let ListedDevice { name, backend, frontend, online, params, mode, sectors, queues, max_queues, error } = listed;
    json!({
        "device": name.to_string(),
        "domid": name.frontend_id.0,
        "devid": name.devid,
        "vdev": name.vdev(),
        "backend_state": *backend as u8,
        "frontend_state": *frontend as u8,
        "online": online,
        "params": params,
        "mode": mode,
        "sectors": sectors,
        "queues": queues,
        "max_queues": max_queues,
        "error": error,
    })
}

fn device_table(devices: &[ListedDevice]) -> String {
    let head = ["device", "domid", "vdev", "backend", "frontend", "queues", "size", "mode", "params"];
    let head = head.map(str::to_owned).to_vec();
    let state = |state: XenbusState| format!("{state:?} ({state})");
    let row = |device: &ListedDevice| {
        vec![
            device.name.to_string(),
            device.name.frontend_id.0.to_string(),
            device.name.vdev(),
            state(device.backend),
            state(device.frontend),
            match (device.queues, device.max_queues) {
                (Some(queues), Some(max)) => format!("{queues}/{max}"),
                (None, Some(max)) => format!("{UNKNOWN}/{max}"),
                _ => UNKNOWN.to_owned(),
            },
            device.sectors.map_or(UNKNOWN.to_owned(), bytes),
            device.mode.clone(),
            device.params.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(devices.iter().map(row)).collect();
    let mut text = table::align(&rows);
    for (name, why) in devices.iter().filter_map(|device| Some((&device.name, device.error.as_ref()?))) {
        text.push_str(&format!("{name}: {why}\n"));
    }
    text
}
