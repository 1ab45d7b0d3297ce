//! The expected reactions of a blkif backend to the content of xenstore. Written from Xen's `public/io/blkif.h` and
//! `xenbus.h`, and, where these are silent, from the behaviour of Linux's xen-blkback.

use std::collections::BTreeMap;

use mqblk_ring::blkif::Abi;

/// Most rings of the device.
pub(crate) const MAX_QUEUES: u64 = 3;
/// log2 of the most pages of a ring.
pub(crate) const MAX_ORDER: u64 = 2;

/// Keys that show a backend's progress.
const OFFERED: &str = "multi-queue-max-queues";
const DESCRIBED: &str = "feature-discard";

/// The keys of a directory.
pub(crate) type Keys = BTreeMap<String, Vec<u8>>;

/// Returns the decimal number in a key, between any white space.
pub(crate) fn number(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    let digits = text.trim_matches([' ', '\t', '\n', '\r', '\x0c', '\0']);
    let all_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

/// Returns a state; 0 if it is invalid.
pub(crate) fn state(keys: &Keys) -> u64 {
    keys.get("state").and_then(|value| number(value)).filter(|state| *state <= 8).unwrap_or(0)
}

/// The rings that a frontend has published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedRings {
    pub(crate) abi: Abi,
    /// The grants of each ring's pages, and its port.
    pub(crate) rings: Vec<(Vec<u32>, u32)>,
}

/// The guest's resources that the host can use.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestResources {
    pub(crate) grefs: Vec<u32>,
    pub(crate) ports: Vec<u32>,
}

/// The rings that a backend has offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingOffer {
    queues: u64,
    order: u64,
}

/// Reads the keys of a frontend.
///
/// # Errors
/// The keys of which the error must name one.
fn published(keys: &Keys, resources: &GuestResources, offer: RingOffer) -> Result<PublishedRings, Vec<String>> {
    let mut wrong = vec![];
    let number_of = |key: &str| keys.get(key).map(|value| number(value));
    let abi = match keys.get("protocol") {
        // Linux's backend on x86 takes such a frontend for a 32-bit one.
        None => Some(Abi::X86_32),
        Some(value) => {
            let value = value.strip_suffix(&[0]).unwrap_or(value);
            let names = [("x86_64-abi", Abi::X86_64), ("x86_32-abi", Abi::X86_32), ("arm-abi", Abi::Arm)];
            names.into_iter().find(|(name, _)| name.as_bytes() == value).map(|(_, abi)| abi)
        }
    };
    if abi.is_none() {
        wrong.push("protocol".to_owned());
    }
    // A feature whose value is not a number is not supported, but the value must be text.
    for feature in ["feature-persistent", "feature-large-sector-size"] {
        if keys.get(feature).is_some_and(|value| std::str::from_utf8(value).is_err()) {
            wrong.push(feature.to_owned());
        }
    }
    let queues =
        number_of("multi-queue-num-queues").unwrap_or(Some(1)).filter(|count| (1..=offer.queues).contains(count));
    if queues.is_none() {
        wrong.push("multi-queue-num-queues".to_owned());
    }
    let order = number_of("ring-page-order").map(|order| order.filter(|order| *order <= offer.order));
    if order == Some(None) {
        wrong.push("ring-page-order".to_owned());
    }
    let by_order = order.flatten().map(|order| 1 << order);
    let count = number_of("num-ring-pages").map(|count| {
        count.filter(|count| {
            count.is_power_of_two() && *count <= 1 << offer.order && by_order.is_none_or(|other| other == *count)
        })
    });
    if count == Some(None) {
        wrong.push("num-ring-pages".to_owned());
    }
    let (Some(abi), Some(queues), true) = (abi, queues, wrong.is_empty()) else { return Err(wrong) };
    let pages = by_order.or(count.flatten());
    let mut rings = vec![];
    for queue in 0..queues {
        let prefix = if queues == 1 { String::new() } else { format!("queue-{queue}/") };
        let mut grefs = vec![];
        for page in 0..pages.unwrap_or(1) {
            let (plain, numbered) = (format!("{prefix}ring-ref"), format!("{prefix}ring-ref{page}"));
            let names = match pages {
                None => vec![plain, numbered],
                Some(1) => vec![numbered, plain],
                Some(_) => vec![numbered],
            };
            let name = names.iter().find(|name| keys.contains_key(*name)).unwrap_or(&names[0]);
            match number_of(name).flatten().and_then(|gref| u32::try_from(gref).ok()) {
                Some(gref) => grefs.push(gref),
                None => wrong.push(name.clone()),
            }
        }
        let name = format!("{prefix}event-channel");
        match number_of(&name).flatten().and_then(|port| u32::try_from(port).ok()) {
            Some(port) => rings.push((grefs, port)),
            None => wrong.push(name),
        }
    }
    if wrong.is_empty() {
        let mut ports = resources.ports.clone();
        for (grefs, port) in &rings {
            if grefs.iter().any(|gref| !resources.grefs.contains(gref)) {
                wrong.push("ring-ref".to_owned());
            }
            // Each port is bound once.
            match ports.iter().position(|other| other == port) {
                Some(at) => _ = ports.swap_remove(at),
                None => wrong.push("event-channel".to_owned()),
            }
        }
    }
    if wrong.is_empty() { Ok(PublishedRings { abi, rings }) } else { Err(wrong) }
}

/// The backend's stage with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Unknown to the backend, or it waits for the frontend's directory.
    New,
    /// Its disk is open.
    Offered,
    /// Its rings are served.
    Served,
    /// Its rings are served until the frontend has closed.
    Ending,
    /// Nothing is in use; the backend shows 5.
    Failed,
    /// Nothing is in use; the backend shows 6.
    Closed,
}

/// The expected content of the error node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ErrorNode {
    #[default]
    None,
    /// A text that names one of these keys.
    Names(Vec<String>),
}

/// A device by the protocol.
#[derive(Clone, Debug)]
pub(crate) struct DeviceModel {
    pub(crate) stage: Stage,
    /// The directories, with only those of the backend's own keys that matter.
    pub(crate) front: Keys,
    pub(crate) back: Keys,
    pub(crate) domain_alive: bool,
    pub(crate) error: ErrorNode,
    pub(crate) rings: Option<PublishedRings>,
    /// The open disk, if any.
    pub(crate) opened: Option<OpenedDisk>,
}

/// Properties of an open disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenedDisk {
    pub(crate) read_only: bool,
    /// The disk can discard.
    discards: bool,
    /// The frontend may discard.
    pub(crate) discard: bool,
    pub(crate) info: u64,
}

impl DeviceModel {
    pub(crate) fn new() -> DeviceModel {
        DeviceModel {
            stage: Stage::New,
            front: Keys::new(),
            back: Keys::new(),
            domain_alive: true,
            error: ErrorNode::None,
            rings: None,
            opened: None,
        }
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.back.get(key).and_then(|value| std::str::from_utf8(value).ok())
    }

    fn online(&self) -> bool {
        self.text("online").is_none_or(|value| value.trim() != "0")
    }

    fn show(&mut self, state: u8) {
        self.back.insert("state".to_owned(), state.to_string().into_bytes());
    }

    /// Clears the used resources.
    pub(crate) fn release(&mut self) {
        (self.rings, self.opened) = (None, None);
    }

    /// Returns true if the directory has the keys of an offer.
    pub(crate) fn has_offered(&self) -> bool {
        self.back.contains_key(OFFERED)
    }

    /// Returns true if the directory describes the disk.
    pub(crate) fn has_described(&self) -> bool {
        self.back.contains_key(DESCRIBED)
    }

    /// Ends the use of the device with state 5 or 6.
    fn end(&mut self, stage: Stage) {
        self.release();
        self.stage = stage;
        self.show(if stage == Stage::Closed { 6 } else { 5 });
    }

    fn fail(&mut self, keys: Vec<String>) {
        self.error = ErrorNode::Names(keys);
        self.end(Stage::Failed);
    }

    fn open(&mut self) -> bool {
        let discard = match self.back.get("discard-enable") {
            None => Some(1),
            Some(value) => number(value).filter(|number| *number <= 1),
        };
        let wrong = match (self.text("params"), discard) {
            (Some("mqblk:disk"), Some(_)) => None,
            (Some("mqblk:absent"), Some(_)) => Some("mqblk:absent"),
            (Some("mqblk:disk" | "mqblk:absent"), None) => Some("discard-enable"),
            _ => Some("params"),
        };
        if let Some(wrong) = wrong {
            self.fail(vec![wrong.to_owned()]);
            return false;
        }
        let read_only = self.text("mode").is_some_and(|mode| !mode.contains('w'));
        let cdrom = u64::from(self.text("device-type") == Some("cdrom"));
        let removable = u64::from(self.text("removable") == Some("1"));
        let info = cdrom | removable << 1 | u64::from(read_only) << 2;
        let discards = discard == Some(1) && !read_only;
        self.opened = Some(OpenedDisk { read_only, discards, discard: discards, info });
        true
    }

    fn offer(&mut self) {
        if self.opened.is_some() || self.open() {
            self.opened.iter_mut().for_each(|opened| opened.discard = opened.discards);
            self.rings = None;
            self.stage = Stage::Offered;
            self.back.insert(OFFERED.to_owned(), vec![]);
            self.show(2);
        }
    }

    /// Writes the properties of the disk.
    fn describe(&mut self) {
        let discard = self.opened.is_some_and(|opened| opened.discard);
        self.back.insert(DESCRIBED.to_owned(), u8::from(discard).to_string().into_bytes());
    }

    /// `stage`: its stage if its rings can be served.
    fn connect(&mut self, stage: Stage, resources: &GuestResources) {
        // An earlier process may have been stopped before it offered anything.
        let all = RingOffer { queues: MAX_QUEUES, order: MAX_ORDER };
        let offer = if self.has_offered() { all } else { RingOffer { queues: 1, order: 0 } };
        match published(&self.front, resources, offer) {
            Ok(rings) => {
                (self.rings, self.stage) = (Some(rings), stage);
                if stage == Stage::Served {
                    self.show(4);
                    self.error = ErrorNode::None;
                }
            }
            Err(wrong) => self.fail(wrong),
        }
    }

    /// Performs the backend's next action. Returns false if there is none.
    pub(crate) fn step(&mut self, resources: &GuestResources) -> bool {
        if !self.back.contains_key("state") {
            self.release();
            self.stage = Stage::New;
            return false;
        }
        let (front, back, online) = (state(&self.front), state(&self.back), self.online());
        // The driver has closed, or its directory is gone.
        let gone = matches!(front, 0 | 6);
        let published = matches!(front, 3 | 4);
        if back == 1 && self.stage != Stage::New {
            // The toolstack has recreated the device.
            self.release();
            self.stage = Stage::New;
            return true;
        }
        let ours = self.text("made-by") == Some("mqblk");
        if !self.domain_alive && ours && self.opened.is_none() && !self.front.contains_key("state") {
            self.back.clear();
            self.error = ErrorNode::None;
            return true;
        }
        match self.stage {
            Stage::New if back <= 1 && front == 0 => return false,
            Stage::New if matches!(back, 4 | 5) && (published || front == 5) => {
                // An earlier process has served its rings. Their frontend uses that process's description.
                if self.open() {
                    let described = self.back.get(DESCRIBED).is_some_and(|discard| discard == b"1");
                    let opened = self.opened.iter_mut();
                    opened.for_each(|opened| opened.discard = described && !opened.read_only);
                    self.connect(if back == 4 { Stage::Served } else { Stage::Ending }, resources);
                    if self.stage == Stage::Served && self.has_described() {
                        self.describe();
                    }
                }
            }
            Stage::New if back == 6 && !(online && matches!(front, 1 | 3)) => self.stage = Stage::Closed,
            Stage::New if back != 6 && (gone || !online) => self.end(Stage::Closed),
            Stage::New if back == 5 || front == 5 => self.end(Stage::Failed),
            Stage::New => self.offer(),
            Stage::Offered if gone || back == 5 && !online => self.end(Stage::Closed),
            Stage::Offered if back == 5 || front == 5 => self.end(Stage::Failed),
            Stage::Offered if published => {
                self.connect(Stage::Served, resources);
                if self.stage == Stage::Served {
                    self.describe();
                }
            }
            Stage::Served | Stage::Ending if gone => self.end(Stage::Closed),
            Stage::Served if front == 1 && (back == 5 || !online) => self.end(Stage::Closed),
            Stage::Ending if front == 1 && !online => self.end(Stage::Closed),
            Stage::Served | Stage::Ending if front == 1 => self.offer(),
            Stage::Served if front == 5 => {
                self.stage = Stage::Ending;
                self.show(5);
            }
            Stage::Served if back == 5 => self.stage = Stage::Ending,
            Stage::Failed if gone || !online => self.end(Stage::Closed),
            Stage::Closed if back == 5 => self.show(6),
            Stage::Closed if online && matches!(front, 1 | 3) => self.offer(),
            _ => return false,
        }
        true
    }
}
