//! The options of `--interface xen`.

use std::path::PathBuf;

use clap::ValueEnum;
use mqblk_driver::blkfront::Abi;
use mqblk_xen::vbd;

use crate::plan::DeviceName;

/// Option and key of a disk: use of granted pages.
pub(super) const GRANTS: &str = "grants";
/// Option and key of a disk: the pool of granted pages.
pub(super) const GRANTS_POOL: &str = "grants-pool";

/// The options that only `--interface xen` has.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct XenOptions {
    /// xen: `auto`, the Xen that this runs on, or the folder of a simulated machine that runs [default: with --disk a
    /// simulated machine for each run, else auto]
    #[arg(long, value_name = "auto|FOLDER", value_parser = parse_location)]
    pub xen: Option<XenLocation>,

    /// xen: a device of this domain (on a simulated machine: of domain 1), by its name or number, which some backend
    /// serves already; may be repeated
    #[arg(long, value_name = "NAME", value_parser = parse_device)]
    pub vdev: Vec<DeviceName>,

    /// xen: what the server does with granted pages, with --disk [default: the server's]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub grants: Vec<GrantMode>,

    /// xen: whose the pages are that the server keeps, with --disk. All rings' in common is there to be measured only
    /// [default: the server's]
    #[arg(long, value_enum)]
    pub grants_pool: Option<GrantPool>,

    /// xen: pages of each ring, as a power of two's exponent: 32 to 512 entries [default: what the backend allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=4))]
    pub ring_order: Option<u8>,

    /// xen: most segments of a request, parts of a page each; up to 11: no indirect requests [default: what the
    /// backend allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=4096))]
    pub indirect_segments: Option<u16>,

    /// xen: how the frontend lays its requests out [default: x86_64]
    #[arg(long, value_enum)]
    pub abi: Option<RequestLayout>,
}

/// The Xen to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum XenLocation {
    /// The Xen that this runs on.
    Real,
    /// A running simulated machine.
    Simulated(PathBuf),
}

fn parse_location(text: &str) -> Result<XenLocation, String> {
    match text {
        "" => Err("expected auto or the folder of a simulated machine".into()),
        "auto" => Ok(XenLocation::Real),
        folder => Ok(XenLocation::Simulated(folder.into())),
    }
}

fn parse_device(text: &str) -> Result<DeviceName, String> {
    let number = vbd::parse_vdev(text).map_err(|malformed| format!("expected {}", malformed.expected))?;
    Ok(DeviceName { name: text.to_owned(), number })
}

/// Use of granted pages by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GrantMode {
    /// Keep them mapped where the frontend lets it, else copy
    Auto,
    /// Copy into and out of them
    Copy,
    /// Map them for each request
    Map,
    /// Keep them mapped
    Persistent,
}

impl GrantMode {
    /// Returns the value of the disk's key `grants`, and of the results.
    pub(super) fn name(self) -> &'static str {
        match self {
            GrantMode::Auto => "auto",
            GrantMode::Copy => "copy",
            GrantMode::Map => "map",
            GrantMode::Persistent => "persistent",
        }
    }
}

/// The pool in which the server caches granted pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GrantPool {
    /// Each ring's own
    PerRing,
    /// All rings' in common
    Shared,
}

impl GrantPool {
    /// Returns the value of the disk's key `grants-pool`, and of the results.
    pub(super) fn name(self) -> &'static str {
        match self {
            GrantPool::PerRing => "per-ring",
            GrantPool::Shared => "shared",
        }
    }
}

/// Layout of the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RequestLayout {
    /// As a 64-bit x86 guest does
    #[default]
    #[value(name = "x86_64")]
    X86_64,
    /// As a 32-bit x86 guest does
    #[value(name = "x86_32")]
    X86_32,
    /// As an Arm guest does
    Arm,
}

impl RequestLayout {
    /// Returns the name on the command line and in the results.
    pub(super) fn name(self) -> &'static str {
        match self {
            RequestLayout::X86_64 => "x86_64",
            RequestLayout::X86_32 => "x86_32",
            RequestLayout::Arm => "arm",
        }
    }

    /// Returns the driver's layout.
    pub(super) fn abi(self) -> Abi {
        match self {
            RequestLayout::X86_64 => Abi::X86_64,
            RequestLayout::X86_32 => Abi::X86_32,
            RequestLayout::Arm => Abi::Arm,
        }
    }
}

/// Returns the device that a started server serves.
pub(super) fn own_device(location: Option<&XenLocation>) -> DeviceName {
    match location {
        // Far from the devices that a domain may have already.
        Some(XenLocation::Real) => DeviceName { name: "xvdz".into(), number: 1 << 28 | 25 << 8 },
        _ => DeviceName { name: "xvda".into(), number: 202 << 8 },
    }
}
