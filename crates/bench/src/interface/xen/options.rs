//! The options of `--interface xen`.

use std::path::PathBuf;

use mqblk_driver::blkfront::Abi;
use mqblk_xen::vbd;

use crate::plan::DeviceName;
use crate::words::{Choice, one_of, word};

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
    #[arg(long, value_delimiter = ',', value_parser = one_of(&GRANT_MODES, word))]
    pub grants: Vec<&'static Choice<()>>,

    /// xen: whose the pages are that the server keeps, with --disk. All rings' in common is there to be measured only
    /// [default: the server's]
    #[arg(long, value_parser = one_of(&GRANT_POOLS, word))]
    pub grants_pool: Option<&'static Choice<()>>,

    /// xen: pages of each ring, as a power of two's exponent: 32 to 512 entries [default: what the backend allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=4))]
    pub ring_order: Option<u8>,

    /// xen: most segments of a request, parts of a page each; up to 11: no indirect requests [default: what the
    /// backend allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=4096))]
    pub indirect_segments: Option<u16>,

    /// xen: how the frontend lays its requests out [default: x86_64]
    #[arg(long, value_parser = one_of(&LAYOUTS, word))]
    pub abi: Option<&'static Choice<Abi>>,
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

/// Uses of granted pages by the server.
static GRANT_MODES: [Choice<()>; 4] = [
    ("auto", "Keep them mapped where the frontend lets it, else copy", ()),
    ("copy", "Copy into and out of them", ()),
    ("map", "Map them for each request", ()),
    ("persistent", "Keep them mapped", ()),
];

/// The pools in which the server caches granted pages. The first is its default.
pub(super) static GRANT_POOLS: [Choice<()>; 2] =
    [("per-ring", "Each ring's own", ()), ("shared", "All rings' in common", ())];

/// Layouts of the requests. The first is the default.
pub(super) static LAYOUTS: [Choice<Abi>; 3] = [
    ("x86_64", "As a 64-bit x86 guest does", Abi::X86_64),
    ("x86_32", "As a 32-bit x86 guest does", Abi::X86_32),
    ("arm", "As an Arm guest does", Abi::Arm),
];

impl XenOptions {
    /// Returns the chosen layout of the requests.
    pub(super) fn layout(&self) -> &'static Choice<Abi> {
        self.abi.unwrap_or(&LAYOUTS[0])
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
