//! A real cluster of Ceph that a test may break: `tests/ceph/cluster.sh`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::hostile::load::{BLOCK, block_fault};

/// The cluster's pool.
pub const POOL: &str = "rbd";

/// A cluster. Its daemons are ended when it is dropped.
#[derive(Debug)]
pub struct CephCluster {
    folder: TempDir,
}

impl CephCluster {
    /// Starts a cluster that takes I/O.
    ///
    /// # Panics
    /// When it does not start, with the output of `cluster.sh`.
    pub fn start() -> CephCluster {
        let folder = tempfile::Builder::new().prefix("ceph-").tempdir().expect("a folder");
        let cluster = CephCluster { folder };
        cluster.control(&["start"]);
        cluster
    }

    /// Returns the folder with its files.
    fn folder(&self) -> PathBuf {
        self.folder.path().join("cluster")
    }

    fn try_control(&self, words: &[&str]) -> Result<(), String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ceph/cluster.sh");
        let mut command = Command::new(script);
        command.arg(words[0]).arg(self.folder()).args(&words[1..]).stdin(Stdio::null());
        // Into a file: the cluster's daemons would keep a pipe open.
        let said = self.folder.path().join("said");
        let file = std::fs::File::create(&said).map_err(|error| error.to_string())?;
        let both = file.try_clone().map_err(|error| error.to_string())?;
        let status = command.stdout(file).stderr(both).status().map_err(|error| error.to_string())?;
        let said = std::fs::read_to_string(said).unwrap_or_default();
        if status.success() { Ok(()) } else { Err(format!("cluster.sh {words:?}: {status}\n{said}")) }
    }

    fn control(&self, words: &[&str]) {
        self.try_control(words).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Kills a daemon of the cluster: `mon.a`, `osd.0` or `osd.1`.
    ///
    /// # Panics
    /// When it does not end.
    pub fn kill(&self, name: &str) {
        self.control(&["kill", name]);
    }

    /// Restarts killed daemons, and waits until the cluster takes I/O.
    ///
    /// # Panics
    /// When it does not.
    pub fn revive(&self) {
        self.control(&["start"]);
    }

    /// Returns the path of the configuration file for clients.
    pub fn conf(&self) -> PathBuf {
        self.folder().join("ceph.conf")
    }

    /// Returns the path of the keyring with the key of `client.admin`.
    pub fn keyring(&self) -> PathBuf {
        self.folder().join("keyring")
    }

    /// Runs Ceph's program `rbd` and returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn rbd(&self, words: &[&str]) -> String {
        self.run("rbd", words)
    }

    /// Runs Ceph's program `ceph` and returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn ceph(&self, words: &[&str]) -> String {
        self.run("ceph", words)
    }

    fn run(&self, program: &str, words: &[&str]) -> String {
        let mut command = Command::new(program);
        let output = command.arg("--conf").arg(self.conf()).args(words).stdin(Stdio::null()).output();
        let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {words:?}: {}\n{complaint}", output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Makes an image of this many MiB. Returns the settings of a disk on it.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub fn image(&self, name: &str, mib: u32) -> String {
        self.rbd(&["create", &format!("{POOL}/{name}"), "--size", &format!("{mib}M")]);
        self.settings(name)
    }

    /// Returns the settings of a disk on an image.
    pub fn settings(&self, name: &str) -> String {
        format!("storage=rbd,pool={POOL},image={name},conf={}", self.conf().display())
    }

    /// Makes a user with these capabilities: pairs of a service and its capability. Returns the path of its keyring.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub fn user(&self, name: &str, capabilities: &[&str]) -> PathBuf {
        let keyring = self.folder().join(format!("client.{name}.keyring"));
        let text = self.ceph(&[&["auth", "get-or-create", &format!("client.{name}")], capabilities].concat());
        std::fs::write(&keyring, text).expect("a keyring");
        keyring
    }

    /// Writes a configuration file with nothing but the monitors, as `ceph config generate-minimal-conf` makes it for
    /// clients, and these lines. Returns its path.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub fn minimal_conf(&self, name: &str, lines: &str) -> PathBuf {
        let conf = self.folder().join(format!("{name}.conf"));
        let minimal = self.ceph(&["config", "generate-minimal-conf"]);
        std::fs::write(&conf, format!("{minimal}\n[client]\n{lines}\n")).expect("a configuration file");
        conf
    }

    /// Reads an image, or a snapshot of it (`image@snapshot`), with Ceph's own program.
    ///
    /// # Panics
    /// When it fails.
    pub fn export(&self, name: &str) -> Vec<u8> {
        let file = self.folder.path().join("exported");
        let _ = std::fs::remove_file(&file);
        self.rbd(&["export", "--no-progress", &format!("{POOL}/{name}"), &file.display().to_string()]);
        std::fs::read(file).expect("the exported image")
    }

    /// Checks with the cluster's own program that each block of an image has its generation.
    ///
    /// # Panics
    /// With the first wrong block.
    pub fn check_blocks(&self, name: &str, generations: &[u32]) {
        assert!(generations.iter().any(|generation| *generation > 0), "nothing was written");
        let image = self.export(name);
        for (number, (bytes, generation)) in image.chunks_exact(BLOCK).zip(generations).enumerate() {
            let fault = match generation {
                0 => bytes.iter().any(|byte| *byte != 0).then(|| format!("block {number}: not zero")),
                generation => block_fault(bytes, number as u64, *generation),
            };
            assert_eq!(fault, None, "{name}");
        }
    }
}

impl Drop for CephCluster {
    fn drop(&mut self) {
        if let Err(error) = self.try_control(&["stop"])
            && !std::thread::panicking()
        {
            panic!("{error}");
        }
    }
}
