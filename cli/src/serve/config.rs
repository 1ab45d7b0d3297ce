//! What `mqblk serve` was asked to do, as plain data: every default filled in, every value checked.

use std::fmt;
use std::path::PathBuf;

use mqblk_engine::{Coalesce, FixedBufferUse, PlugOptions, PollPolicy};

/// The whole of it. `D` is what an open disk is: the program's own type, or a test's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig<D> {
    /// Worker threads, 1 to 256.
    pub workers: u16,
    /// The CPU of each worker, in order. `None`: the kernel places them.
    pub pin: Option<Vec<u16>>,
    /// The admin socket, if there is to be one.
    pub admin: Option<AdminConfig>,
    /// The disks, in the order given.
    pub disks: Vec<DiskConfig<D>>,
}

/// The admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// Where it is to be. No disk's socket.
    pub socket: PathBuf,
    /// Its permission bits.
    pub mode: SocketMode,
}

/// One disk and the interface it is served over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig<D> {
    /// Names the disk in logs and metrics. Unique.
    pub id: String,
    /// What the guest reads by GET_ID: 1 to 20 bytes of printable ASCII.
    pub serial: String,
    /// Where the vhost-user socket is to be. Unique.
    pub socket: PathBuf,
    /// The socket's permission bits.
    pub socket_mode: SocketMode,
    /// Virtqueues offered, 1 to 256.
    pub queues: u16,
    /// Largest ring accepted, in entries: a power of two from 2 to 1024.
    pub queue_size: u16,
    /// How a worker waits for this disk's requests.
    pub poll: PollPolicy,
    /// How neighbouring requests are joined on their way to the storage.
    pub plug: PlugOptions,
    /// How calls to the guest are put off.
    pub coalesce: Coalesce,
    /// The worker of each queue, by queue number. As many entries as `queues`, each below `workers`.
    pub queue_map: Vec<u16>,
    /// When a write is durable.
    pub cache: CacheMode,
    /// Whether guest memory is registered with the kernel once, in place of being mapped for each request.
    pub fixed_buffers: FixedBufferUse,
    /// The kind of storage: a name in the registry of storage backends.
    pub storage: String,
    /// The storage's own settings as they came to be, for printing.
    pub storage_settings: Vec<(&'static str, String)>,
    /// The open disk.
    pub disk: D,
}

/// Permission bits of a socket, `0000` to `0777`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Read and write for the owner only.
    pub const OWNER_ONLY: SocketMode = SocketMode(0o600);

    /// Parses three or four octal digits, with no bits above `0777`.
    pub fn parse(text: &str) -> Option<SocketMode> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        let bits = u32::from_str_radix(text, 8).ok()?;
        (octal && bits <= 0o777).then_some(SocketMode(bits))
    }

    /// The bits, as `chmod` takes them.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// When a write is durable. The guest may switch between the two where the interface has a switch (virtio-blk's CONFIG_WCE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// At the next flush.
    Writeback,
    /// Before it is answered.
    Writethrough,
}

impl CacheMode {
    /// The words that a user writes, in the order of [`CacheMode::from_word`].
    pub const WORDS: &'static [&'static str] = &["writeback", "writethrough"];

    /// The mode of one of [`CacheMode::WORDS`].
    pub fn from_word(word: &str) -> CacheMode {
        if word == "writethrough" { CacheMode::Writethrough } else { CacheMode::Writeback }
    }

    /// The word that a user writes for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            CacheMode::Writeback => "writeback",
            CacheMode::Writethrough => "writethrough",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_modes() {
        for (text, want) in [("0600", Some(0o600)), ("660", Some(0o660)), ("0777", Some(0o777)), ("000", Some(0))] {
            assert_eq!(SocketMode::parse(text).map(SocketMode::bits), want, "{text}");
        }
        for text in ["", "6", "66", "0o600", "+600", "-600", "0800", "1777", "00600", "rw-------"] {
            assert_eq!(SocketMode::parse(text), None, "{text}");
        }
    }

    #[test]
    fn words_mean_themselves() {
        for word in CacheMode::WORDS {
            assert_eq!(CacheMode::from_word(word).word(), *word);
        }
        for word in FixedBufferUse::WORDS {
            assert_eq!(FixedBufferUse::from_word(word).word(), *word);
        }
    }
}
