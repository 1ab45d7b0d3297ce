//! The conversation of a blkif backend with its frontends through xenstore, on a simulated Xen host. A guest writes any
//! keys in any order; a toolstack makes, changes and removes the device; the domain dies; the backend's process ends
//! and another one goes on. The oracle is the protocol's (`xenstore_model`): each state, the offered keys, the error
//! node, and the mapped, bound and open resources. While rings are served some requests run; at the end another guest's
//! disk must work, and nothing may be in use.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use mqblk_blkif::{GrantBudget, GrantMode};
use mqblk_core::RateLimit;
use mqblk_engine::{Engine, EngineOptions, UringOptions};
use mqblk_memory::DomainId;
use mqblk_ring::blkif::Abi;
use mqblk_xen::store::Xenstore;
use mqblk_xen::store::wire::{HEADER_BYTES, Header, Verb};
use mqblk_xen::vbd;
use mqblk_xen_server::toolstack::{self, NewDevice};
use mqblk_xen_server::{BackendOptions, DeviceName, Opener, SteppedBackend};
use mqblk_xen_simulation::connect;

use crate::xen_host::{GUEST, HOST, XenHost};
use crate::xenstore_guest::{GuestFrontend, MemoryDisks, SECTOR, SECTORS, choose_key, choose_value};
use crate::xenstore_model::{DeviceModel, ErrorNode, GuestResources, MAX_ORDER, MAX_QUEUES, Stage};

/// The domain of the good disk.
const OTHER: DomainId = DomainId(2);
const DEVID: u32 = 51712;
const TYPE: &str = "mqblk";
/// Turns within which the backend must have nothing left to do.
const TURNS: usize = 60;

/// Writes any bytes to xenstore; the client writes only text.
fn write_bytes(store: &mut UnixStream, path: &str, value: &[u8]) {
    let payload = [path.as_bytes(), &[0], value].concat();
    let header = Header { verb: Verb::WRITE, request: 1, transaction: 0, len: payload.len() as u32 };
    store.write_all(&[&header.encode()[..], &payload].concat()).expect("xenstored runs");
    let mut reply = [0; HEADER_BYTES];
    store.read_exact(&mut reply).expect("a reply");
    let header = Header::decode(reply);
    let mut text = vec![0; header.len as usize];
    store.read_exact(&mut text).expect("its payload");
    assert_eq!(header.verb, Verb::WRITE, "{path}: {:?}", String::from_utf8_lossy(&text));
}

/// The host, its backend, the guest and the toolstack.
struct Conversation {
    backend: Option<SteppedBackend>,
    opener: Arc<MemoryDisks>,
    engine: Arc<Engine>,
    tool: Xenstore,
    /// The toolstack's connection for bytes that are not text.
    raw: UnixStream,
    front: GuestFrontend,
    device: DeviceModel,
    host: XenHost,
}

fn name(domain: DomainId) -> DeviceName {
    DeviceName { type_name: TYPE.to_owned(), frontend_id: domain, devid: DEVID }
}

impl Conversation {
    fn new(u: &mut Unstructured<'_>) -> Result<Conversation> {
        let host = XenHost::new();
        host.machine.create_domain(OTHER).expect("another domain");
        let opener = Arc::new(MemoryDisks {
            open: Arc::default(),
            opened: AtomicUsize::new(0),
            mode: *u.choose(&[GrantMode::Copy, GrantMode::Map, GrantMode::Auto])?,
            indirect_segments: *u.choose(&[0, 256])?,
            journal: u.arbitrary()?,
        });
        let context = UringOptions { submissions: 64, in_flight: 128, files: 4, buffers: 4 };
        let engine = Engine::start(&EngineOptions { workers: 1, pin: vec![], context }).expect("a worker");
        let raw = UnixStream::connect(host.machine.folder().join("xenstored.sock")).expect("xenstored runs");
        let mut conversation = Conversation {
            backend: None,
            opener,
            engine: Arc::new(engine),
            tool: host.host.store().expect("xenstored runs"),
            raw,
            front: GuestFrontend::new(&*host.guest),
            device: DeviceModel::new(),
            host,
        };
        conversation.start_backend();
        Ok(conversation)
    }

    fn start_backend(&mut self) {
        let options = BackendOptions {
            type_name: TYPE.to_owned(),
            engine: Arc::clone(&self.engine),
            opener: Arc::clone(&self.opener) as Arc<dyn Opener>,
            budget: GrantBudget::new(1 << 20, mqblk_core::MappingBudget::of_process()),
            journal_dir: Some(self.host.machine.folder().join("journals")),
            exclusive: true,
            rate_limit: RateLimit { burst: 1 << 30, per_second: 1 << 30 },
            drain_timeout: Duration::from_secs(20),
        };
        self.backend = Some(SteppedBackend::new(Arc::clone(&self.host.host), options).expect("a backend"));
    }

    /// Ends the backend's process and starts the next one.
    fn restart_backend(&mut self) {
        self.backend = None;
        assert_eq!(self.opener.open.load(Ordering::SeqCst), 0, "open disks of a backend that has ended");
        self.device.release();
        self.device.stage = Stage::New;
        self.start_backend();
    }

    fn write(&mut self, front: bool, key: &str, value: &[u8]) {
        let keys = if front { &mut self.device.front } else { &mut self.device.back };
        keys.insert(key.to_owned(), value.to_vec());
        let path = if front { vbd::frontend_path(GUEST, DEVID) } else { vbd::backend_path(HOST, TYPE, GUEST, DEVID) };
        write_bytes(&mut self.raw, &format!("{path}/{key}"), value);
    }

    fn remove(&mut self, front: bool, key: &str) {
        let keys = if front { &mut self.device.front } else { &mut self.device.back };
        keys.remove(key);
        let path = if front { vbd::frontend_path(GUEST, DEVID) } else { vbd::backend_path(HOST, TYPE, GUEST, DEVID) };
        self.tool.remove(&format!("{path}/{key}")).expect("the toolstack may");
    }

    /// Removes a directory.
    fn remove_all(&mut self, front: bool) {
        let keys = if front { &mut self.device.front } else { &mut self.device.back };
        keys.clear();
        let path = if front { vbd::frontend_path(GUEST, DEVID) } else { vbd::backend_path(HOST, TYPE, GUEST, DEVID) };
        self.tool.remove(&path).expect("the toolstack may");
    }

    /// Makes the device as the toolstack, if it does not exist.
    fn create(&mut self, read_only: bool) {
        if !self.device.domain_alive || self.device.back.contains_key("state") {
            return;
        }
        let device = NewDevice { name: name(GUEST), params: "mqblk:disk".to_owned(), read_only };
        self.remove_all(false);
        toolstack::attach(&mut self.tool, HOST, &device).expect("the device does not exist");
        self.device.front.clear();
        self.device.back.clear();
        self.device.front.insert("state".to_owned(), b"1".to_vec());
        let mode: &[u8] = if read_only { b"r" } else { b"w" };
        let keys: [(&str, &[u8]); 7] = [
            ("made-by", b"mqblk"),
            ("online", b"1"),
            ("removable", b"0"),
            ("params", b"mqblk:disk"),
            ("mode", mode),
            ("device-type", b"disk"),
            ("state", b"1"),
        ];
        self.device.back.extend(keys.map(|(key, value)| (key.to_owned(), value.to_vec())));
        self.device.error = ErrorNode::None;
    }

    /// Publishes valid new rings as the guest.
    fn publish(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let abi = *u.choose(&Abi::ALL)?;
        let queues = if u.arbitrary()? { 1 } else { u.int_in_range(1..=MAX_QUEUES)? };
        let order = if u.arbitrary()? { 0 } else { u.int_in_range(0..=MAX_ORDER)? };
        for key in ["ring-page-order", "num-ring-pages", "multi-queue-num-queues", "feature-persistent"] {
            self.remove(true, key);
        }
        for (key, value) in self.front.make_rings(&*self.host.guest, abi, queues, order) {
            self.write(true, &key, value.as_bytes());
        }
        if u.arbitrary()? {
            self.write(true, "feature-persistent", b"1");
        }
        Ok(())
    }

    /// Performs one action of the guest.
    fn guest_acts(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if !self.device.domain_alive {
            return Ok(());
        }
        match u.int_in_range(0..=15)? {
            0..=4 => {
                self.publish(u)?;
                self.write(true, "state", if u.ratio(1, 4)? { b"4" } else { b"3" });
            }
            5..=9 => {
                let state = *u.choose(&["1", "3", "4", "5", "6", "6", "1", "0", "2", "7", "8", "9"])?;
                self.write(true, "state", state.as_bytes());
            }
            10..=12 => {
                let value = choose_value(u, &self.front)?;
                self.write(true, choose_key(u)?, &value);
            }
            13 => {
                let key = choose_key(u)?;
                self.remove(true, key);
            }
            14 => {
                let value = choose_value(u, &self.front)?;
                self.write(true, "state", &value);
            }
            _ if u.ratio(1, 4)? => self.remove_all(true),
            _ => self.front.queues.clear(),
        }
        Ok(())
    }

    /// Performs one action of the toolstack or the host.
    fn host_acts(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let choice = u.int_in_range(0..=13)?;
        let exists = self.device.back.contains_key("state");
        match choice {
            0 | 1 => self.create(u.ratio(1, 4)?),
            2 => self.restart_backend(),
            3 if u.ratio(1, 6)? && self.device.domain_alive => {
                assert!(self.host.machine.destroy_domain(GUEST));
                self.device.domain_alive = false;
                self.device.front.clear();
            }
            4 => self.remove_all(false),
            _ if !exists => self.create(false),
            5 | 6 => self.write(false, "online", u.choose(&[&b"0"[..], b"1", b"1", b"", b" 0 "])?),
            7 => {
                let params = u.choose(&["mqblk:disk", "mqblk:disk", "mqblk:absent", "", "disk", "null:0", "file:x"])?;
                self.write(false, "params", params.as_bytes());
            }
            8 => {
                let (key, value) = u.choose(&[
                    ("mode", "w"),
                    ("mode", "r"),
                    ("mode", "!"),
                    ("device-type", "cdrom"),
                    ("device-type", "disk"),
                    ("removable", "1"),
                    ("discard-enable", "0"),
                    ("discard-enable", "1"),
                    ("discard-enable", "2"),
                    ("discard-enable", "no"),
                    ("physical-device", "8:1"),
                ])?;
                self.write(false, key, value.as_bytes());
            }
            9 => self.remove(false, u.choose(&["mode", "discard-enable", "made-by", "online", "device-type"])?),
            10 | 11 => {
                self.write(false, "online", b"0");
                self.write(false, "state", b"5");
            }
            _ => self.write(false, "state", u.choose(&["5", "1", "6", "2", "4", "x", ""])?.as_bytes()),
        }
        Ok(())
    }

    /// Lets the backend finish its work, and checks it.
    fn settle(&mut self) {
        let settled = self.backend.as_mut().expect("a backend").settle(TURNS).expect("xenstored runs");
        assert!(settled, "the backend always has something to do: {:?}", self.device);
        let resources = if self.device.domain_alive { self.front.resources() } else { GuestResources::default() };
        let mut steps = 0;
        while self.device.step(&resources) {
            steps += 1;
            assert!(steps < TURNS, "the model always has something to do: {:?}", self.device);
        }
        let path = vbd::backend_path(HOST, TYPE, GUEST, DEVID);
        let found = self.tool.read(&format!("{path}/state")).expect("the toolstack may");
        let expected = self.device.back.get("state").map(|state| String::from_utf8_lossy(state).into_owned());
        let error = self.tool.read(&vbd::backend_error_path(HOST, TYPE, GUEST, DEVID)).expect("the toolstack may");
        assert_eq!(found, expected, "the backend's state; its error: {error:?}; {:?}", self.device);
        match (&error, &self.device.error) {
            (None, ErrorNode::None) => {}
            (Some(text), ErrorNode::Names(keys)) => {
                let (errno, text) = text.split_once(' ').expect("a number and a text");
                assert!(errno.bytes().all(|byte| byte.is_ascii_digit()), "{errno} {text}");
                assert!(keys.iter().any(|key| text.contains(key)), "{text:?} names none of {keys:?}");
                assert!(text.contains("found"), "{text:?} does not say what was found");
                assert!(text.contains("expected") || text.contains("UTF-8"), "{text:?} does not say what was expected");
                assert!(text.len() < 400, "{text:?} is long");
            }
            (found, expected) => panic!("the error node: found {found:?}, expected {expected:?}; {:?}", self.device),
        }
        let open = self.opener.open.load(Ordering::SeqCst);
        assert_eq!(open, usize::from(self.device.opened.is_some()), "open disks; {:?}", self.device);
        self.check_offer(&path);
        self.check_resources();
    }

    /// Checks the keys that the backend has written before its state.
    fn check_offer(&mut self, path: &str) {
        let offered = matches!(self.device.stage, Stage::Offered | Stage::Served) && self.device.has_offered();
        let Some(opened) = self.device.opened.filter(|_| offered) else {
            return;
        };
        let order = MAX_ORDER;
        let segments = self.opener.indirect_segments;
        let flag = |on: bool| Some(u8::from(on).to_string());
        let mut expected = vec![
            ("multi-queue-max-queues", Some(MAX_QUEUES.to_string())),
            ("max-ring-page-order", Some(order.to_string())),
            ("feature-max-indirect-segments", (segments > 0).then(|| segments.to_string())),
        ];
        if self.device.stage == Stage::Served && self.device.has_described() {
            expected.extend([
                ("sectors", Some(SECTORS.to_string())),
                ("sector-size", Some(SECTOR.to_string())),
                ("info", Some(opened.info.to_string())),
                // A disk in memory has no volatile cache.
                ("feature-flush-cache", flag(false)),
                ("feature-barrier", flag(false)),
                ("feature-persistent", flag(self.opener.mode == GrantMode::Auto)),
                ("feature-discard", flag(opened.discard)),
            ]);
        }
        for (key, value) in expected {
            let found = self.tool.read(&format!("{path}/{key}")).expect("the toolstack may");
            assert_eq!(found, value, "{key}; {:?}", self.device);
        }
    }

    /// Checks the backend's use of the guest's resources.
    fn check_resources(&self) {
        let rings = self.device.rings.as_ref().map(|published| &published.rings[..]).unwrap_or_default();
        let pages: u64 = rings.iter().map(|(grefs, _)| grefs.len() as u64).sum();
        let host = self.host.machine.domain_stats(HOST).expect("the host's domain");
        // A page of data may stay mapped.
        let most = if self.opener.mode == GrantMode::Auto { pages + rings.len() as u64 } else { pages };
        assert!((pages..=most).contains(&host.maptrack), "mapped: found {}, expected {pages}", host.maptrack);
        assert_eq!(host.open_ports, rings.len() as u64, "the backend's ports; {:?}", self.device);
    }

    /// Uses the disk if its rings are served.
    fn use_disk(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (Some(rings), Some(opened)) = (&self.device.rings, self.device.opened) else { return Ok(()) };
        if self.device.domain_alive && self.front.owns(rings.abi, &rings.rings) {
            let times = self.opener.opened.load(Ordering::SeqCst);
            if std::mem::replace(&mut self.front.opened, times) != times {
                self.front.model.fill(0);
            }
            self.front.use_disk(u, opened.read_only)?;
        }
        Ok(())
    }

    /// Connects the other guest's disk, uses it and removes it. Ends the device, and checks that nothing is in use.
    fn end(mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let guest = connect(self.host.machine.folder(), OTHER).expect("the machine runs");
        let device = NewDevice { name: name(OTHER), params: "mqblk:disk".to_owned(), read_only: false };
        toolstack::attach(&mut self.tool, HOST, &device).expect("the device does not exist");
        let mut good = GuestFrontend::new(&*guest);
        let (front, back) = (vbd::frontend_path(OTHER, DEVID), vbd::backend_path(HOST, TYPE, OTHER, DEVID));
        let backend = self.backend.as_mut().expect("a backend");
        assert!(backend.settle(TURNS).expect("xenstored runs"), "the backend always has something to do");
        let state = |tool: &mut Xenstore| tool.read(&format!("{back}/state")).expect("the toolstack may");
        assert_eq!(state(&mut self.tool).as_deref(), Some("2"), "the other guest's disk");
        for (key, value) in good.make_rings(&*guest, Abi::X86_64, 1, 0) {
            self.tool.write(&format!("{front}/{key}"), &value).expect("the toolstack may");
        }
        self.tool.write(&format!("{front}/state"), "3").expect("the toolstack may");
        assert!(backend.settle(TURNS).expect("xenstored runs"), "the backend always has something to do");
        assert_eq!(state(&mut self.tool).as_deref(), Some("4"), "the other guest's disk");
        good.use_disk(u, false)?;
        for path in [&front, &back] {
            self.tool.remove(path).expect("the toolstack may");
        }
        self.remove_all(true);
        self.remove_all(false);
        self.device.error = ErrorNode::None;
        self.tool.remove(&vbd::backend_error_path(HOST, TYPE, GUEST, DEVID)).expect("the toolstack may");
        self.settle();
        drop(good);
        self.backend = None;
        let journals = std::fs::read_dir(self.host.machine.folder().join("journals")).expect("a folder");
        let journals: Vec<_> = journals.map(|file| file.expect("a file").file_name()).collect();
        assert!(journals.iter().all(|name| !name.to_string_lossy().contains("ring")), "{journals:?} are left");
        let Conversation { front, host, .. } = self;
        drop(front);
        let stats = host.machine.stats();
        assert_eq!((stats.live_mappings, stats.live_grants, stats.open_ports), (0, 0, 0), "{stats:?}");
        Ok(())
    }
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut conversation = Conversation::new(u)?;
    conversation.create(u.ratio(1, 8)?);
    conversation.settle();
    for _ in 0..40 {
        if u.is_empty() {
            break;
        }
        for _ in 0..u.int_in_range(1..=3)? {
            if u.ratio(1, 4)? { conversation.host_acts(u)? } else { conversation.guest_acts(u)? }
        }
        conversation.settle();
        conversation.use_disk(u)?;
    }
    conversation.end(u)
}

/// Runs the target.
///
/// # Panics
/// When the backend violates the protocol.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
