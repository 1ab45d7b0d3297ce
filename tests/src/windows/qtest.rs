//! QEMU's own devices in a machine whose processor halts: the test is the driver, by QEMU's qtest protocol, over
//! virtio-mmio.
//!
//! Sources: QEMU's docs/devel/testing/qtest.rst; virtio 1.3 section 4.2.2, "MMIO Device Register Layout".

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::device::Device;
use super::{MEMORY, memory};
use crate::guest::process::{Process, limited_command};
use crate::guest::{GuestCache, Vmm};
use crate::hostile::memory::SharedMemory;
use crate::hostile::ring::RingAddresses;
use crate::hostile::{TIMEOUT, wait_for};
use mqblk_test_bounds::Bound;

/// First register of the machine's first virtio-mmio transport, and bytes of each.
const TRANSPORTS: u64 = 0xfeb0_0000;
const TRANSPORT_BYTES: u64 = 0x200;
/// Most transports of the machine.
const TRANSPORT_COUNT: u64 = 24;
/// Limit of QEMU's life.
const LIFE: Bound = Bound::seconds(120);

/// Registers. Source: virtio 1.3 section 4.2.2.
mod register {
    pub(super) const MAGIC: u64 = 0x0;
    pub(super) const DEVICE: u64 = 0x8;
    pub(super) const DEVICE_FEATURES: u64 = 0x10;
    pub(super) const DEVICE_FEATURES_WORD: u64 = 0x14;
    pub(super) const DRIVER_FEATURES: u64 = 0x20;
    pub(super) const DRIVER_FEATURES_WORD: u64 = 0x24;
    pub(super) const QUEUE: u64 = 0x30;
    pub(super) const QUEUE_SIZE: u64 = 0x38;
    pub(super) const QUEUE_READY: u64 = 0x44;
    pub(super) const NOTIFY: u64 = 0x50;
    pub(super) const STATUS: u64 = 0x70;
    pub(super) const DESC: u64 = 0x80;
    pub(super) const AVAIL: u64 = 0x90;
    pub(super) const USED: u64 = 0xa0;
    pub(super) const CONFIG: u64 = 0x100;
}

/// Device status. Source: virtio 1.3 section 2.1.
mod status {
    pub(super) const ACKNOWLEDGE_AND_DRIVER: u32 = 1 | 2;
    pub(super) const DRIVER_OK: u32 = 4;
    pub(super) const FEATURES_OK: u32 = 8;
    pub(super) const NEEDS_RESET: u32 = 0x40;
}

/// Returns a BIOS whose only processor halts: Debian's QEMU is built without the accelerator of qtest.
fn halting_bios() -> Vec<u8> {
    let mut bios = vec![0; 64 << 10];
    // The reset vector: cli; hlt; jmp to hlt. Source: the processor begins 16 bytes before the end.
    let reset = bios.len() - 16;
    bios[reset..reset + 4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd]);
    bios
}

const MAGIC: u32 = u32::from_le_bytes(*b"virt");

/// A device model of QEMU, with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QtestModel {
    /// virtio-blk-device.
    Blk,
    /// virtio-scsi-device with scsi-hd as target 0, LUN 0.
    Scsi,
}

/// QEMU's own device on a raw image.
#[derive(Debug)]
pub struct QtestDevice {
    qemu: Process,
    stream: BufReader<UnixStream>,
    memory: Arc<SharedMemory>,
    /// First register.
    base: u64,
    _folder: TempDir,
}

impl QtestDevice {
    /// Starts QEMU with `queues` request queues. Discards reach the image.
    ///
    /// # Errors
    /// When QEMU or its socket is missing.
    pub fn start(vmm: Vmm, model: QtestModel, image: &Path, queues: u16) -> Result<QtestDevice> {
        let folder = tempfile::tempdir()?;
        let (socket, ram) = (folder.path().join("qtest"), folder.path().join("ram"));
        let file = File::options().read(true).write(true).create_new(true).open(&ram)?;
        file.set_len(MEMORY)?;
        let mut command = limited_command(vmm.program(&GuestCache::open()?), LIFE);
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-machine", "microvm,accel=tcg,memory-backend=ram", "-m", &format!("{}M", MEMORY >> 20)]);
        command.args([
            "-object",
            &format!("memory-backend-file,id=ram,size={MEMORY},share=on,mem-path={}", ram.display()),
        ]);
        let bios = folder.path().join("bios");
        std::fs::write(&bios, halting_bios())?;
        command.arg("-bios").arg(&bios);
        command.args(["-global", "virtio-mmio.force-legacy=false"]);
        command.args(["-qtest", &format!("unix:{},server=on,wait=off", socket.display()), "-qtest-log", "none"]);
        let image = image.display();
        command.args(["-blockdev", &format!("driver=file,filename={image},node-name=d,discard=unmap")]);
        match model {
            QtestModel::Blk => {
                command.args(["-device", &format!("virtio-blk-device,drive=d,serial=windows,num-queues={queues}")]);
            }
            QtestModel::Scsi => {
                command.args(["-device", &format!("virtio-scsi-device,num_queues={queues}")]);
                command.args(["-device", "scsi-hd,drive=d,channel=0,scsi-id=0,lun=0,serial=windows"]);
            }
        }
        let mut qemu = Process::start("qemu-system-x86_64", command, &folder.path().join("qemu.log"))?;
        let mut stream = None;
        qemu.until("qtest socket", TIMEOUT, || {
            stream = UnixStream::connect(&socket).ok();
            stream.is_some()
        })?;
        let stream = stream.context("a connection")?;
        stream.set_read_timeout(Some(TIMEOUT.time()))?;
        let (stream, memory) = (BufReader::new(stream), Arc::new(memory(file)));
        let mut this = QtestDevice { qemu, stream, memory, base: 0, _folder: folder };
        this.base = this.find();
        Ok(this)
    }

    /// Returns the first register of the transport that has a device.
    fn find(&mut self) -> u64 {
        let at = |index| TRANSPORTS + index * TRANSPORT_BYTES;
        let mut transports = (0..TRANSPORT_COUNT).map(at);
        let found = transports.find(|base| {
            self.ask_u32(&format!("readl {:#x}", base + register::MAGIC)) == MAGIC
                && self.ask_u32(&format!("readl {:#x}", base + register::DEVICE)) != 0
        });
        found.unwrap_or_else(|| panic!("no device on a virtio-mmio transport: {}", self.qemu.output()))
    }

    /// Sends a command of the qtest protocol. Returns what follows OK.
    fn ask(&mut self, command: &str) -> String {
        let (stream, mut line) = (self.stream.get_mut(), String::new());
        let sent = stream.write_all(format!("{command}\n").as_bytes());
        let read = sent.and_then(|()| self.stream.read_line(&mut line));
        match line.trim_end().strip_prefix("OK") {
            Some(answer) if read.is_ok() => answer.trim().to_owned(),
            _ => panic!("{command}: found {line:?} ({read:?}), expected OK: {}", self.qemu.output()),
        }
    }

    fn ask_u32(&mut self, command: &str) -> u32 {
        let answer = self.ask(command);
        let value = answer.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        value.unwrap_or_else(|| panic!("{command}: found {answer:?}, expected a number")) as u32
    }

    fn read(&mut self, register: u64) -> u32 {
        let at = self.base + register;
        self.ask_u32(&format!("readl {at:#x}"))
    }

    fn write(&mut self, register: u64, value: u32) {
        let at = self.base + register;
        self.ask(&format!("writel {at:#x} {value:#x}"));
    }

    fn write_u64(&mut self, register: u64, value: u64) {
        self.write(register, value as u32);
        self.write(register + 4, (value >> 32) as u32);
    }

    fn start_queue(&mut self, index: u32, ring: RingAddresses, size: u16) {
        self.write(register::QUEUE, index);
        self.write(register::QUEUE_SIZE, size.into());
        self.write_u64(register::DESC, ring.desc);
        self.write_u64(register::AVAIL, ring.avail);
        self.write_u64(register::USED, ring.used);
        self.write(register::QUEUE_READY, 1);
    }
}

impl Device for QtestDevice {
    fn memory(&self) -> Arc<SharedMemory> {
        Arc::clone(&self.memory)
    }

    fn offered(&mut self) -> u64 {
        let [low, high] = [0, 1].map(|word| {
            self.write(register::DEVICE_FEATURES_WORD, word);
            u64::from(self.read(register::DEVICE_FEATURES))
        });
        high << 32 | low
    }

    fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let at = self.base + register::CONFIG;
        (offset..offset + len).map(|byte| self.ask_u32(&format!("readb {:#x}", at + u64::from(byte))) as u8).collect()
    }

    fn start(&mut self, accepted: u64, rings: &[RingAddresses], size: u16) {
        self.write(register::STATUS, 0);
        let mut now = status::ACKNOWLEDGE_AND_DRIVER;
        self.write(register::STATUS, now);
        for word in [0, 1] {
            self.write(register::DRIVER_FEATURES_WORD, word);
            self.write(register::DRIVER_FEATURES, (accepted >> (32 * word)) as u32);
        }
        now |= status::FEATURES_OK;
        self.write(register::STATUS, now);
        assert_eq!(self.read(register::STATUS), now, "QEMU does not take the features {accepted:#x}");
        for (index, ring) in rings.iter().enumerate() {
            self.start_queue(index as u32, *ring, size);
        }
        self.write(register::STATUS, now | status::DRIVER_OK);
    }

    fn notify(&mut self, queue: u16) {
        self.write(register::NOTIFY, queue.into());
    }

    fn reset(&mut self) {
        assert_eq!(self.read(register::STATUS) & status::NEEDS_RESET, 0, "QEMU took a request for a fault");
        self.write(register::STATUS, 0);
        wait_for("the reset", || (self.read(register::STATUS) == 0).then_some(()));
    }
}
