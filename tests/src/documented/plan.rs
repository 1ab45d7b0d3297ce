//! The blocks that are run, where they are run, and the exceptions.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::markdown::{self, Block};
use super::script::{Kind, Script};
use super::{help, repository};

/// Blocks that are not run: the page, the beginning of the block, and the reason.
pub const NOT_RUN: &[(&str, &str, &str)] = &[
    (
        "README.md",
        "make quickstart",
        "installs packages with apt, and `make test` runs this test; both are what a reader does first",
    ),
    ("README.md", "cargo build --release", "scripts/test.sh gives the same command, and its result to this test"),
    ("README.md", "cloud-hypervisor", "Debian has no package of it"),
    (
        "docs/install.md",
        "make deb",
        "takes a release build; scripts/test-deb.sh installs the package in a fresh system",
    ),
    ("docs/install.md", "cargo install", "takes a release build"),
    ("docs/install.md", "podman build", "takes a registry of images, which tests do not have"),
    (
        "docs/systemd.md",
        "mkdir -p /run/mqblk",
        "waits for the first connection; tests/tests/daemon/service.rs starts a daemon with sockets",
    ),
    ("docs/install.md", "podman run", "takes the image"),
    ("docs/tutorial.md", "make deb", "as in docs/install.md"),
    ("docs/tutorial.md", "wget", "takes the network, which tests do not have"),
    ("docs/tutorial.md", "GUEST=", "the image that was downloaded; the test has a guest of its own"),
    ("docs/libvirt.md", "apt-get install", "changes the system; scripts/test-libvirt.sh installs the packages"),
    ("docs/libvirt.md", "systemctl enable", "takes systemd; scripts/test-libvirt.sh starts the unit"),
    ("docs/libvirt.md", "virsh start", "takes libvirt; scripts/test-libvirt.sh starts such a domain"),
    ("docs/cloud-hypervisor.md", "cloud-hypervisor", "Debian has no package of it"),
    ("docs/cloud-hypervisor.md", "mkdir -p /run/kata-containers/vhost-user/block/devices", "takes root of the host"),
    ("docs/backup.md", "lvcreate", "needs a volume group"),
    ("docs/backup.md", "cp --reflink", "needs a file system with reflinks"),
    ("docs/backup.md", "rbd snap create", "needs a cluster of Ceph"),
    ("docs/dm-crypt.md", "cryptsetup", "needs a device and a passphrase"),
    (
        "docs/bench.md",
        "mqblk bench --interface xen --xen auto",
        "needs the domain 0 of a real Xen; tests/tests/xen/bench.rs runs it there",
    ),
    (
        "docs/storage/rbd.md",
        "rbd create vms/disk",
        "needs a cluster of Ceph; tests/tests/ceph serves images by the same keys",
    ),
    (
        "mqblk resize --help",
        "lvextend",
        "needs a volume group; the test lengthens the file that stands in for the volume",
    ),
];

/// Blocks of other languages than `sh` with a line that begins with the command: the page, the beginning of the block,
/// and the reason why it is not a command.
pub const SYNOPSES: &[(&str, &str, &str)] = &[
    ("docs/serve.md", "mqblk serve [--disk", "synopsis"),
    ("docs/stat.md", "mqblk stat --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk lun add    --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk resume ID --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk disk add    --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk log [LEVEL] --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk config diff  --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk limit-group set NAME KEY=VALUE", "synopsis"),
    ("docs/admin.md", "mqblk controller add    --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk worker add    --socket ADMIN [", "synopsis"),
    ("docs/admin.md", "mqblk queue move --socket ADMIN [", "synopsis"),
];

/// Pages with independent sections, as they say: a reader ends the servers of one before the next.
const SECTIONS_ALONE: [&str; 1] = ["README.md"];

/// The section that puts `mqblk` on the PATH, and its page.
pub const INSTALL: (&str, &str) = ("README.md", "Install");

/// The languages that blocks may have. Only those of `sh` are commands; those of `rust` are parts of the sources.
const LANGUAGES: [&str; 6] = ["sh", "text", "json", "toml", "xml", "rust"];

/// Pages that record a run of `mqblk reproduce`, with its commands; `tests/tests/daemon/reproduce.rs` runs them.
const RECORDS: &str = "docs/results/";

/// All help texts: `mqblk WORD --help`.
const HELP: [&str; 19] = [
    "serve",
    "bench",
    "reproduce",
    "plot",
    "stat",
    "top",
    "explain",
    "lun",
    "resize",
    "resume",
    "disk",
    "controller",
    "queue",
    "worker",
    "config",
    "log",
    "limit-group",
    "xen",
    "vhost-user",
];

/// Things that a reader has and a test must make: the page, the beginning of the command before which it is made (with
/// a `$`, the whole command), and the script.
const PREPARATIONS: &[(&str, &str, &str)] = &[
    (
        "mqblk serve --help",
        "mqblk serve --disk path=/srv/vm1.img,socket=/run/mqblk/vm1.sock",
        "mkdir -p /run/mqblk /var/lib/mqblk
         truncate -s 10G /srv/vm1.img /srv/vm3.img /srv/data.img /srv/new.img /srv/config.img /dev/sdb
         printf '[[disk]]\\npath = \"/srv/config.img\"\\nsocket = \"/run/mqblk/config.sock\"\\n' >/etc/mqblk.toml",
    ),
    ("mqblk bench --help", "mqblk bench --disk storage=null,size=1T --poll", "truncate -s 8G a.img"),
    (
        "mqblk bench --help",
        "mqblk bench --socket /run/peer.sock",
        "truncate -s 1G peer.img disk.img
         mqblk serve --disk path=peer.img,socket=/run/peer.sock --disk path=disk.img,socket=/run/disk.sock,queues=2",
    ),
    (
        "mqblk bench --help",
        "mqblk bench --interface virtio-scsi --disk path=/srv/disk-",
        "for target in 0 1 2 3; do truncate -s 64M /srv/disk-$target-0.img /srv/disk-$target-1.img; done",
    ),
    ("mqblk bench --help", "mqblk bench --interface xen --vdev xvdb", "mqblk serve --xen-watch"),
    ("mqblk bench --help", "mqblk bench --interface xen --vdev xvdb", TWO_DEVICES),
    ("docs/bench.md", "mqblk bench --interface xen --vdev xvdb", "mqblk serve --xen-watch"),
    ("docs/bench.md", "mqblk bench --interface xen --vdev xvdb", TWO_DEVICES),
    (
        "mqblk plot --help",
        "mqblk plot sizes.json -o sizes.svg",
        "mqblk bench --disk storage=null,size=1G --rw randread,randwrite --allow-write --bs 4k,64k --queues 1,8 --json sizes.json
         cp sizes.json before.json
         cp sizes.json after.json
         mqblk bench --disk storage=null,size=1G --interval 10ms --json over-time.json",
    ),
    ("docs/backup.md", "mqblk serve --disk id=vm1", "mkdir -p /run/mqblk /dev/vg0; truncate -s 1G /dev/vg0/vm1"),
    ("docs/dm-crypt.md", "mqblk serve", "mkdir -p /run/mqblk /dev/mapper; truncate -s 1G /dev/mapper/vm1-plain"),
    ("mqblk vhost-user --help", "mqblk vhost-user --socket-path", "mkdir -p /run/mqblk; truncate -s 1G /srv/vm1.img"),
    ("mqblk stat --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 1G vm1.img"),
    ("mqblk top --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 1G vm1.img"),
    ("mqblk explain --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 1G vm1.img"),
    ("mqblk lun --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 10G /srv/vm1.img /srv/data.img"),
    (
        "mqblk lun --help",
        "mqblk lun remove --socket /run/mqblk/admin.sock --controller",
        "mqblk lun add --socket /run/mqblk/admin.sock controller=vm1,path=/srv/data.img",
    ),
    (
        "mqblk resize --help",
        "mqblk serve",
        "mkdir -p /run/mqblk /dev/vg0; truncate -s 10G /srv/vm1.img /dev/vg0/vm2; truncate -s 5G /srv/vm3.img",
    ),
    ("mqblk resize --help", "mqblk resize vm2", "truncate -s 20G /dev/vg0/vm2"),
    // A full file system, and a guest that writes.
    (
        "mqblk resume --help",
        "mqblk serve",
        "mkdir -p /run/mqblk; mount -t tmpfs -o size=1M full /srv; truncate -s 16M /srv/vm1.img",
    ),
    ("mqblk resume --help", "mqblk resume vm1 --socket /run/mqblk/admin.sock$", FULL),
    ("mqblk resume --help", "mqblk resume vm1 --socket /run/mqblk/admin.sock --report", STOPPED),
    ("mqblk disk --help", "mqblk serve", "mkdir -p /run/mqblk /var/lib/mqblk; truncate -s 10G /srv/vm1.img"),
    ("mqblk controller --help", "mqblk serve", "mkdir -p /run/mqblk /var/lib/mqblk; truncate -s 10G /srv/vm1.img"),
    ("mqblk queue --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 10G /srv/vm1.img"),
    ("mqblk worker --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 10G /srv/vm1.img"),
    ("mqblk log --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 1G /srv/vm1.img"),
    ("mqblk config --help", "mqblk serve", "mkdir -p /etc/mqblk /run/mqblk; echo 'admin = true' >/etc/mqblk/mqblk.toml"),
    ("mqblk limit-group --help", "mqblk serve", "mkdir -p /run/mqblk; truncate -s 10G /srv/vm1.img /srv/vm2.img"),
    ("mqblk xen --help", "mqblk serve --xen-watch", "truncate -s 10G /srv/data.img /dev/sdb"),
];

/// Two devices of domain 1, served by a daemon.
const TWO_DEVICES: &str = "for vdev in xvdb xvdc; do mqblk xen attach --domid 1 --vdev $vdev --wait 0 null:1G; done";

/// The disk `vm1` is stopped for lack of space.
const FULL: &str = "setsid mqblk bench --socket /run/mqblk/vm1.sock --rw write --bs 64k --iodepth 4 --runtime 60 --allow-write >bench.log 2>&1 & \\
                    for try in $(seq 100); do mqblk stat --socket /run/mqblk/admin.sock --json | grep -q '\"state\":\"stopped\"' && exit 0; sleep 0.1; done; exit 1";

/// The disk stops again.
const STOPPED: &str = "for try in $(seq 100); do mqblk stat --socket /run/mqblk/admin.sock --json | grep -q '\"state\":\"stopped\"' && exit 0; sleep 0.1; done; exit 1";

/// Returns the preparations before this block.
#[must_use]
pub fn preparations(script: &Script) -> Vec<&'static str> {
    let begins = |before: &str| {
        let mut commands = script.commands.iter().map(|(_, command)| command);
        match before.strip_suffix('$') {
            Some(whole) => commands.any(|command| command == whole),
            None => commands.any(|command| command.starts_with(before)),
        }
    };
    let of = |(page, before, text): &(&str, &str, &'static str)| {
        (*page == script.block.page && begins(before)).then_some(*text)
    };
    PREPARATIONS.iter().filter_map(of).collect()
}

/// Returns true if a reader ends all servers between these two blocks, in this order.
#[must_use]
pub fn servers_end_between(before: &Script, after: &Script) -> bool {
    let (before, page) = (&before.block, &after.block.page);
    if SECTIONS_ALONE.contains(&page.as_str()) {
        return before.section != after.block.section;
    }
    // Each daemon of a help text is an example of its own.
    page.starts_with("mqblk ") && after.stays == Some(Kind::Daemon)
}

/// Returns the pages of the repository, and those that its programs print: name and text.
///
/// # Errors
/// When a page cannot be read, or a program cannot be run.
pub fn pages(daemon: &Path) -> Result<Vec<(String, String)>> {
    let mut pages = documents(&["README.md", "docs"])?;
    pages.retain(|(page, _)| !page.starts_with(RECORDS));
    for word in HELP {
        let output =
            Command::new(daemon).args([word, "--help"]).output().with_context(|| daemon.display().to_string())?;
        ensure!(output.status.success(), "mqblk {word} --help: found {}, expected exit code 0", output.status);
        pages.push((format!("mqblk {word} --help"), String::from_utf8(output.stdout)?));
    }
    Ok(pages)
}

/// Returns the Markdown files with these names, or in these folders of the repository, and their texts.
///
/// # Errors
/// When a file cannot be read.
pub fn documents(names: &[&str]) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for name in names {
        let path = repository().join(name);
        if path.is_dir() {
            let mut entries = fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
            entries.sort();
            for entry in entries.iter().map(|entry| entry.to_string_lossy()) {
                if entry.ends_with(".md") || path.join(&*entry).is_dir() {
                    found.extend(documents(&[&format!("{name}/{entry}")])?);
                }
            }
        } else {
            found.push(((*name).to_owned(), fs::read_to_string(&path).with_context(|| (*name).to_owned())?));
        }
    }
    Ok(found)
}

/// Returns the code blocks of a page.
///
/// # Errors
/// A page that cannot be parsed, and a help text without examples.
pub fn blocks(page: &str, text: &str) -> Result<Vec<Block>> {
    if !page.starts_with("mqblk ") {
        return markdown::blocks(page, text).map_err(anyhow::Error::msg);
    }
    let found = help::examples(page, text);
    ensure!(!found.is_empty(), "{page}: found no examples, expected some below a line Examples:");
    Ok(found)
}

/// Returns the blocks of a page that are run, in order.
///
/// # Errors
/// A block that violates a rule: an unknown language, a command in a language other than `sh`, a server amid other
/// commands.
pub fn scripts(blocks: &[Block]) -> Result<Vec<Script>> {
    let mut scripts = Vec::new();
    for block in blocks {
        let place = block.place();
        ensure!(
            LANGUAGES.contains(&&*block.language),
            "{place}: found language {:?}, expected one of {LANGUAGES:?}",
            block.language
        );
        if block.language != "sh" {
            let command = block.text.lines().find(|line| {
                let word = line.strip_prefix("mqblk ").and_then(|rest| rest.split(' ').next());
                line.starts_with("$ ") || word.is_some_and(|word| HELP.contains(&word))
            });
            if let Some(command) = command.filter(|_| listed(SYNOPSES, block).is_none()) {
                bail!("{place}: found a command in a block of language {}, expected sh: {command}", block.language);
            }
        } else if listed(NOT_RUN, block).is_none() {
            scripts.push(Script::of(block).map_err(anyhow::Error::msg)?);
        }
    }
    Ok(scripts)
}

/// Returns the entry of a list for this block.
#[must_use]
pub fn listed<'a>(list: &'a [(&str, &str, &str)], block: &Block) -> Option<&'a str> {
    list.iter().find(|(page, begins, _)| *page == block.page && block.text.starts_with(begins)).map(|(.., why)| *why)
}

/// Returns the blocks of a page that start QEMU, with all others of their sections (of the whole page, if its sections
/// are not independent), or all except those. The section that puts `mqblk` on the PATH is in both.
#[must_use]
pub fn part(scripts: &[Script], with_guests: bool) -> Vec<Script> {
    let same = |one: &Script, other: &Script| {
        !SECTIONS_ALONE.contains(&one.block.page.as_str()) || one.block.section == other.block.section
    };
    let has_guest =
        |script: &Script| scripts.iter().any(|other| other.stays == Some(Kind::Qemu) && same(script, other));
    let installs = |script: &Script| (script.block.page.as_str(), script.block.section.as_str()) == INSTALL;
    let chosen: Vec<Script> =
        scripts.iter().filter(|script| has_guest(script) == with_guests || installs(script)).cloned().collect();
    if chosen.iter().all(installs) { Vec::new() } else { chosen }
}
