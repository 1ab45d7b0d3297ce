//! The sandbox of a running daemon: the rights of each of its threads, its service, and the LUNs that can be added.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use mqblk_admin::Client;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::VhostUserLoad;
use mqblk_tests::hostile::wait_for;
use serde_json::json;

/// Rights of a thread in `/proc` (proc_pid_status(5)).
#[derive(Debug)]
pub(crate) struct Rights {
    pub(crate) effective: u64,
    pub(crate) permitted: u64,
    pub(crate) filters: u32,
    pub(crate) seccomp: u32,
    pub(crate) no_new_privs: u32,
    /// Real, effective, saved and file system UID.
    pub(crate) users: Vec<u32>,
    pub(crate) groups: Vec<u32>,
}

/// Returns the rights of each thread of a process, by its name.
pub(crate) fn rights(pid: u32) -> BTreeMap<String, Rights> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon's threads");
    let read = |folder: &Path| {
        let status = std::fs::read_to_string(folder.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let number = |name: &str| field(name).and_then(|text| text.parse().ok()).expect("a number");
        let bits = |name: &str| u64::from_str_radix(field(name).expect("a set"), 16).expect("a set");
        let numbers = |name: &str| {
            let words = field(name).expect("numbers").split_whitespace();
            words.map(|word| word.parse().expect("a number")).collect()
        };
        let rights = Rights {
            effective: bits("CapEff:"),
            permitted: bits("CapPrm:"),
            filters: number("Seccomp_filters:"),
            seccomp: number("Seccomp:"),
            no_new_privs: number("NoNewPrivs:"),
            users: numbers("Uid:"),
            groups: numbers("Gid:"),
        };
        Some((field("Name:")?.to_owned(), rights))
    };
    tasks.filter_map(|task| read(&task.expect("a thread").path())).collect()
}

/// CAP_IPC_LOCK and CAP_SYS_RESOURCE (linux/capability.h).
pub(crate) const OF_DAEMON: u64 = 1 << 14 | 1 << 24;
const OF_SERVERS: u64 = 1 << 14;

#[test]
fn every_thread_has_given_up_its_rights_and_the_disks_are_served() {
    let disks =
        [("file", "path=IMAGE,queues=2"), ("blocking", "storage=blocking,path=IMAGE"), ("ram", "storage=ram,size=1M")];
    let mut daemon = HostileDaemon::start_with(2, &disks, &["--metrics", "127.0.0.1:0"]);
    let mut file = VhostUserLoad::connect(daemon.socket("file"), 2, 64, 1);
    let mut blocking = VhostUserLoad::connect(daemon.socket("blocking"), 1, 64, 2);
    for _ in 0..20 {
        file.round();
        blocking.round();
    }
    let threads = rights(daemon.pid());
    let names: Vec<_> = threads.keys().cloned().collect();
    for (name, rights) in &threads {
        // Kernel threads of a ring (iou-wrk-...) have the rights of its owner.
        let worker = name.starts_with("worker-") || name.starts_with("iou-");
        let serves = worker || name.starts_with("storage-") || name == "rings";
        let kept = match name.as_str() {
            "metrics" => 0,
            _ if serves => OF_SERVERS,
            _ => OF_DAEMON,
        };
        assert_eq!((rights.seccomp, rights.no_new_privs), (2, 1), "{name}: {rights:?}");
        assert_eq!((rights.permitted | rights.effective) & !kept, 0, "{name}: {rights:?}");
        // clone3 and the process's filter. Workers and the metrics thread have one more. Storage threads and the thread
        // that sets up rings start before, and have only theirs.
        let filters = match (worker, serves) {
            (true, _) => 3,
            _ if name == "metrics" => 3,
            (false, true) => 1,
            (false, false) => 2,
        };
        assert_eq!(rights.filters, filters, "{name}: {rights:?}");
    }
    for name in ["mqblk", "worker-0", "worker-1", "storage-0", "rings", "connectors", "broker-watch", "metrics"] {
        assert!(threads.contains_key(name), "{name}: found {names:?}");
    }
    daemon.assert_alive("I/O");
    drop((file, blocking));
    daemon.stop();
}

#[test]
fn luns_can_be_added_from_the_folders_that_are_allowed_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["allowed", "other", "state"] {
        std::fs::create_dir(at(name)).expect("a folder");
        let image = std::fs::File::create(folder.path().join(name).join("a.img")).expect("an image");
        image.set_len(1 << 20).expect("an image");
    }
    let (admin, controller) = (at("admin"), format!("id=c,socket={}", at("c.sock")));
    let (state, allowed) = (at("state/luns.json"), at("allowed"));
    let arguments = ["--admin", &admin, "--state", &state, "--controller", &controller, "--sandbox-allow", &allowed];
    let daemon = HostileDaemon::start_with(1, &[], &arguments);
    let mut client = wait_for("the admin socket", || Client::connect(Path::new(&admin)).ok());
    let mut add = |id: &str, folder: &str| {
        let settings = format!("id={id},path={}", at(&format!("{folder}/a.img")));
        client.call("lun.add", &json!({ "controller": "c", "settings": settings })).map_err(|error| error.to_string())
    };
    add("good", "allowed").expect("an allowed image");
    let error = add("bad", "other").expect_err("an image elsewhere");
    assert!(error.contains("other/a.img") && error.contains("sandbox-allow"), "{error}");
    let state = std::fs::read_to_string(state).expect("the state");
    assert!(state.contains("good") && !state.contains("bad"), "{state}");
    daemon.stop();
}

#[test]
fn the_configuration_is_read_again_and_nothing_else_of_its_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let admin = at("admin");
    let config = |disks: &[&str]| {
        let place = folder.path().display();
        let disk = |id: &&str| {
            format!("[[disk]]\nid = \"{id}\"\nstorage = \"null\"\nsize = \"1M\"\nsocket = \"{place}/{id}\"\n")
        };
        format!("admin = \"{}\"\nsandbox = \"on\"\n", admin.display()) + &disks.iter().map(disk).collect::<String>()
    };
    std::fs::write(at("m.toml"), config(&["a"])).expect("a configuration");
    std::fs::write(at("other.toml"), config(&["a", "b"])).expect("a configuration");
    let mut command = Command::new(mqblk_binary());
    // By a relative path, whose folder a daemon in the sandbox cannot query.
    command.args(["serve", "--config", "m.toml"]).current_dir(folder.path()).stderr(Stdio::null());
    let mut daemon = command.spawn().expect("the daemon");
    let mut client = wait_for("the admin socket", || Client::connect(&admin).ok());
    let mut diff = |file: Option<&str>| {
        let params = file.map_or(json!({}), |file| json!({ "file": at(file) }));
        let answer = client.call("config.diff", &params).map_err(|error| error.to_string());
        answer.map(|answer| answer["changes"].as_array().expect("changes").len())
    };
    assert_eq!(diff(None), Ok(0));
    assert_eq!(diff(Some("m.toml")), Ok(0));
    let why = diff(Some("other.toml")).expect_err("another file");
    assert!(why.contains("the sandbox reads only the file that the daemon was started with"), "{why}");
    std::fs::rename(at("other.toml"), at("m.toml")).expect("replaced");
    assert_eq!(diff(None), Ok(1));
    daemon.kill().and_then(|()| daemon.wait()).expect("its end");
}
