//! The server of the guest's two disks, and the guest.

use std::path::Path;

use anyhow::{Context, Result};
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, DaemonProgram, Guest, GuestController, GuestDisk, LunConfig, VhostUserDaemon, Vmm,
};

use crate::Options;

/// Length of the null disk.
const NULL_SIZE: u64 = 1 << 30;

/// A program that serves disks, and the guest interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    MqblkBlk,
    MqblkScsi,
    QemuStorageDaemon,
    QemuBlk,
    QemuScsi,
}

/// The location of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Nowhere.
    Null,
    /// In a file with O_DIRECT.
    File,
}

impl Storage {
    pub(crate) const ALL: [Storage; 2] = [Storage::Null, Storage::File];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Storage::Null => "null",
            Storage::File => "file",
        }
    }
}

/// Number of queues of a disk, and of threads that serve it (*virtio-blk: multiqueue*, 2016: dataplane and no
/// dataplane, mq and no-mq).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One queue, and so one thread.
    OneQueue,
    /// A queue for each virtual CPU, all on one thread.
    OneThread,
    /// A queue for each virtual CPU, with a thread each.
    Each,
}

impl Layout {
    /// In the order of the tables.
    const ALL: [Layout; 3] = [Layout::OneQueue, Layout::OneThread, Layout::Each];

    fn name(self) -> &'static str {
        match self {
            Layout::OneQueue => "1-queue",
            Layout::OneThread => "1-thread",
            Layout::Each => "each",
        }
    }

    pub(crate) fn find(name: &str) -> Result<Layout> {
        let found = Layout::ALL.into_iter().find(|layout| layout.name() == name);
        found.with_context(|| format!("--layouts: found '{name}', expected some of each, 1-thread, 1-queue"))
    }

    fn queues(self, vcpus: u16) -> u16 {
        if self == Layout::OneQueue { 1 } else { vcpus }
    }

    fn threads(self, vcpus: u16) -> u16 {
        if self == Layout::Each { vcpus } else { 1 }
    }
}

/// A server, and its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) server: Server,
    pub(crate) layout: Layout,
}

/// A booted guest, and the daemon that serves it if there is one.
pub(crate) struct Machine {
    pub(crate) setup: Setup,
    pub(crate) guest: Guest,
    pub(crate) daemon: Option<VhostUserDaemon>,
}

impl Machine {
    /// Returns the guest's name of a disk.
    pub(crate) fn disk(&self, storage: Storage) -> &'static str {
        match (self.setup.server.is_scsi(), storage) {
            (false, Storage::Null) => "vda",
            (false, Storage::File) => "vdb",
            (true, Storage::Null) => "sda",
            (true, Storage::File) => "sdb",
        }
    }

    pub(crate) fn end(self) -> Result<()> {
        self.guest.power_off()?;
        self.daemon.map_or(Ok(()), |daemon| daemon.stop().map(drop))
    }
}

impl Server {
    pub(crate) const ALL: [Server; 5] =
        [Server::MqblkBlk, Server::MqblkScsi, Server::QemuStorageDaemon, Server::QemuBlk, Server::QemuScsi];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Server::MqblkBlk => "mqblk-virtio-blk",
            Server::MqblkScsi => "mqblk-virtio-scsi",
            Server::QemuStorageDaemon => "qemu-storage-daemon",
            Server::QemuBlk => "qemu-virtio-blk",
            Server::QemuScsi => "qemu-virtio-scsi",
        }
    }

    pub(crate) fn find(name: &str) -> Result<Server> {
        let names = Server::ALL.map(Server::name);
        let found = Server::ALL.into_iter().find(|server| server.name() == name);
        found.with_context(|| format!("--servers: found '{name}', expected some of {}", names.join(", ")))
    }

    fn is_scsi(self) -> bool {
        matches!(self, Server::MqblkScsi | Server::QemuScsi)
    }
}

impl Setup {
    /// Returns all setups, in the order of the tables.
    pub(crate) fn all() -> impl Iterator<Item = Setup> {
        let setup = |server: Server| Layout::ALL.map(|layout| Setup { server, layout });
        Server::ALL.into_iter().flat_map(setup).filter(|setup| match setup.server {
            Server::MqblkBlk | Server::QemuBlk => true,
            // It has one thread.
            Server::QemuStorageDaemon => setup.layout != Layout::OneThread,
            Server::MqblkScsi | Server::QemuScsi => setup.layout == Layout::Each,
        })
    }

    /// Returns the name in tables: that of its server, and of a special layout.
    pub(crate) fn name(self) -> String {
        match self.layout {
            Layout::Each => self.server.name().to_owned(),
            layout => format!("{}-{}", self.server.name(), layout.name()),
        }
    }

    /// Starts the server, and a guest of QEMU 10.0 with the layout's queues.
    pub(crate) fn boot(self, image: &Path, options: &Options) -> Result<Machine> {
        let (vcpus, queues) = (options.vcpus, self.layout.queues(options.vcpus));
        let guest = Guest::builder().vmm(Vmm::Trixie).vcpus(vcpus).memory_mib(512);
        let (guest, daemon) = match self.server {
            Server::MqblkBlk | Server::QemuStorageDaemon => {
                let daemon = self.disk_daemon(image, options)?;
                let disk = |id: &str| GuestDisk::new(id, &daemon.socket(id), queues);
                (guest.disk(disk("null")).disk(disk("file")), Some(daemon))
            }
            Server::MqblkScsi => {
                let luns = vec![LunConfig::on_storage(0, 0, "null").option("size", "1G"), LunConfig::new(1, 0, image)];
                let daemon = VhostUserDaemon::start_controllers(&[
                    ControllerConfig::new("scsi", vcpus, luns).option("poll", &options.poll)
                ])?;
                (guest.controller(GuestController::vhost_user("scsi", &daemon.socket("scsi"), vcpus)), Some(daemon))
            }
            Server::QemuBlk | Server::QemuScsi => (guest.arguments(&self.devices(image, vcpus)), None),
        };
        Ok(Machine { setup: self, guest: guest.boot()?, daemon })
    }

    fn disk_daemon(self, image: &Path, options: &Options) -> Result<VhostUserDaemon> {
        let queues = self.layout.queues(options.vcpus);
        let null = DaemonDisk::on_storage("null", &format!("storage=null,size={NULL_SIZE}"), queues);
        let file = DaemonDisk::new("file", image, queues).option("direct", "on");
        match self.server {
            Server::QemuStorageDaemon => {
                let file = file.option("aio", "io_uring");
                VhostUserDaemon::start_server(DaemonProgram::QemuStorageDaemon, &[null, file])
            }
            _ => {
                let disks = [null, file].map(|disk| disk.option("poll", &options.poll));
                let workers = self.layout.threads(options.vcpus).to_string();
                VhostUserDaemon::start_with(&disks, &["--workers", &workers])
            }
        }
    }

    /// Returns QEMU's arguments for its own devices: the layout's iothreads, mapped to the queues with
    /// iothread-vq-mapping.
    fn devices(self, image: &Path, vcpus: u16) -> Vec<String> {
        let (queues, iothreads) = (self.layout.queues(vcpus), self.layout.threads(vcpus));
        let mut words: Vec<String> = Vec::new();
        let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
        let threads: Vec<_> =
            (0..iothreads).map(|number| serde_json::json!({ "iothread": format!("io{number}") })).collect();
        (0..iothreads).for_each(|number| add("-object", format!("iothread,id=io{number}")));
        let null = serde_json::json!({
            "driver": "null-co", "node-name": "null", "size": NULL_SIZE, "read-zeroes": false,
        });
        let file = serde_json::json!({
            "driver": "file", "node-name": "file", "filename": image, "aio": "io_uring", "cache": { "direct": true },
        });
        add("-blockdev", null.to_string());
        add("-blockdev", file.to_string());
        if self.server.is_scsi() {
            let controller = serde_json::json!({
                "driver": "virtio-scsi-pci", "id": "scsi", "num_queues": queues, "virtqueue_size": 128,
                "iothread-vq-mapping": threads,
            });
            add("-device", controller.to_string());
            for (target, node) in ["null", "file"].into_iter().enumerate() {
                let disk =
                    serde_json::json!({ "driver": "scsi-hd", "bus": "scsi.0", "scsi-id": target, "drive": node });
                add("-device", disk.to_string());
            }
        } else {
            for node in ["null", "file"] {
                let disk = serde_json::json!({
                    "driver": "virtio-blk-pci", "drive": node, "num-queues": queues, "queue-size": 128,
                    "iothread-vq-mapping": threads,
                });
                add("-device", disk.to_string());
            }
        }
        words
    }
}
