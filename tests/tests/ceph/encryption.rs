//! Images that librbd decrypts.

use std::path::Path;
use std::process::Command;

use mqblk_admin::Client;
use mqblk_storage::conformance::{TestTarget, run};
use mqblk_tests::ceph::{CephCluster, POOL};
use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad, block, block_fault};
use serde_json::json;

const PASSPHRASE: &str = "a passphrase of the tests, 4711";
const BLOCKS: usize = 256;
const IMAGE: u64 = 24 << 20;
const RESIZED: u64 = 6 << 20;

/// An encrypted image: its name, its format, and bytes before its data.
const IMAGES: [(&str, &str, u64); 2] = [("one", "luks1", 4 << 20), ("two", "luks2", 16 << 20)];

/// Two daemons of the sandbox serve encrypted images after one another: the second reads what the first has written,
/// the cluster has no plain text, and QEMU decrypts LUKS1 (it knows no LUKS2). The passphrase is in its file only.
#[test]
fn encrypted_images_are_served_and_decrypted_by_others() {
    let cluster = CephCluster::start();
    let folder = tempfile::tempdir().unwrap();
    let key = write(folder.path(), "key", PASSPHRASE);
    for (name, format, _) in IMAGES {
        cluster.image(name, (IMAGE >> 20) as u32);
        cluster.rbd(&["encryption", "format", &format!("{POOL}/{name}"), format, &key]);
    }
    conformance_and_errors(&cluster, folder.path(), &key);

    let settings = IMAGES
        .map(|(name, format, _)| format!("{},queues=1,encryption={format},key-file={key}", cluster.settings(name)));
    let disks = [("one", &*settings[0]), ("two", &*settings[1])];
    let admin = folder.path().join("admin").display().to_string();
    let arguments = ["--admin", &*admin];
    let daemon = HostileDaemon::start_with(1, &disks, &arguments);
    let mut written = Vec::new();
    for ((name, _, header), seed) in IMAGES.iter().zip(1..) {
        let mut load = VhostUserLoad::connect(daemon.socket(name), 1, BLOCKS, seed);
        assert_eq!(load.device().info().capacity.0 * 512, IMAGE - header, "{name} without its header");
        while load.generations().contains(&0) {
            load.round();
        }
        written.push(load.generations().to_vec());
        drop(load);
        // A size is one of the decrypted data.
        let result = Client::connect_with(Path::new(&admin), TIMEOUT.time())
            .unwrap()
            .call("resize", &json!({ "id": name, "size": RESIZED, "shrink": true }))
            .expect("it can be resized");
        assert_eq!(result["size_bytes"], RESIZED, "{result}");
        let info: serde_json::Value =
            serde_json::from_str(&cluster.rbd(&["info", "--format", "json", &format!("{POOL}/{name}")])).unwrap();
        assert_eq!(info["size"], RESIZED + header, "{info}");
    }
    check_secrecy(&daemon, &admin, &settings);
    daemon.stop();

    for ((name, format, header), generations) in IMAGES.iter().zip(&written) {
        let raw = cluster.export(name);
        assert!(raw.starts_with(b"LUKS\xba\xbe"), "{name} has a header");
        // A checksummed block is random enough: its first bytes are nowhere.
        let plain = block(0, generations[0].into());
        assert!(!raw.windows(32).any(|bytes| bytes == &plain[..32]), "{name} has plain text");
        assert_eq!(raw.len() as u64, RESIZED + header);
        if *format == "luks1" {
            let path = folder.path().join("raw");
            std::fs::write(&path, &raw).unwrap();
            let decrypted = decrypt_by_qemu(&path, &key);
            check_decrypted(&decrypted, generations);
        }
    }
    let again = HostileDaemon::start(1, &disks.map(|(name, settings)| (name, settings)));
    for ((name, ..), generations) in IMAGES.iter().zip(&written) {
        let mut load = VhostUserLoad::connect(again.socket(name), 1, BLOCKS, 9);
        assert_eq!(load.device().info().capacity.0 * 512, RESIZED, "{name}");
        load.read_all(generations);
        load.round();
    }
    again.stop();
}

fn write(folder: &Path, name: &str, content: &str) -> String {
    use std::os::unix::fs::OpenOptionsExt as _;
    let path = folder.join(name);
    let mut options = std::fs::OpenOptions::new();
    let file = options.create_new(true).write(true).mode(0o600).open(&path);
    std::io::Write::write_all(&mut file.expect("a file"), content.as_bytes()).expect("written");
    path.display().to_string()
}

fn conformance_and_errors(cluster: &CephCluster, folder: &Path, key: &str) {
    let conf = cluster.conf().display().to_string();
    let settings = |image: &'static str, format: &'static str, key: &str| {
        [("pool", POOL), ("image", image), ("conf", &conf), ("encryption", format), ("key-file", key)]
            .map(|(name, value)| (name, value.to_owned()))
    };
    let newline = write(folder, "newline", &format!("{PASSPHRASE}\n"));
    let of_two = settings("two", "luks2", &newline);
    let of_two: Vec<_> = of_two.iter().map(|(name, value)| (*name, value.as_str())).collect();
    run(&TestTarget { kind: "rbd", settings: &of_two, keeps_data: true, seed: 1 });
    cluster.image("plain", 8);
    let (wrong, empty) = (write(folder, "wrong", "another"), write(folder, "empty", ""));
    let missing = folder.join("missing").display().to_string();
    for (image, format, key, parts) in [
        (
            "one",
            "luks1",
            &wrong,
            ["key-file: found \"", "wrong\" (loading the encryption: Operation not permitted", "a newline at the end"],
        ),
        ("one", "luks2", &key.to_owned(), ["encryption: found luks2, of rbd:rbd/one (", "Invalid", "the format that"]),
        ("plain", "luks1", &key.to_owned(), ["encryption: found luks1, of rbd:rbd/plain (", "Invalid", "or nothing"]),
        (
            "one",
            "luks1",
            &missing,
            ["key-file: found \"", "missing\" (No such file", "a file with the passphrase, of 1 to"],
        ),
        (
            "one",
            "luks1",
            &empty,
            ["key-file: found \"", "empty\" (it is empty)", "a file with the passphrase, of 1 to"],
        ),
    ] {
        let settings = settings(image, format, key);
        let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let trial = TestTarget { kind: "rbd", settings: &settings, keeps_data: true, seed: 0 };
        let error = trial.open(&[]).map(drop).expect_err("it opens").to_string();
        assert!(parts.iter().all(|part| error.contains(part)) && !error.contains(PASSPHRASE), "{error}");
    }
}

/// Checks that everything that the daemon prints names the key file, and lacks the passphrase.
fn check_secrecy(daemon: &HostileDaemon, admin: &str, settings: &[String]) {
    let run = |words: &[&str]| {
        let output = Command::new(mqblk_binary()).args(words).output().expect("the program");
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    // The image is in use: only the settings of a reader are printed.
    let disk = format!("id=one,socket={admin}.one,readonly=on,{}", settings[0]);
    let printed = run(&["serve", "--print-config", "--disk", &disk]);
    assert!(printed.contains("key-file") && printed.contains("luks1"), "{printed}");
    for text in [printed, run(&["stat", "--socket", admin, "--json"]), daemon.log()] {
        assert!(!text.is_empty() && !text.contains(PASSPHRASE), "{text}");
    }
}

fn decrypt_by_qemu(raw: &Path, key: &str) -> Vec<u8> {
    let decrypted = raw.with_extension("decrypted");
    let output = Command::new("qemu-img")
        .args(["convert", "-O", "raw", "--object", &format!("secret,id=key,file={key}"), "--image-opts"])
        .arg(format!("driver=luks,key-secret=key,file.driver=file,file.filename={}", raw.display()))
        .arg(&decrypted)
        .output()
        .expect("qemu-img");
    assert!(output.status.success(), "{output:?}");
    std::fs::read(decrypted).expect("the decrypted image")
}

fn check_decrypted(image: &[u8], generations: &[u32]) {
    assert_eq!(image.len() as u64, RESIZED);
    for (number, (bytes, generation)) in image.chunks_exact(BLOCK).zip(generations).enumerate() {
        assert_eq!(block_fault(bytes, number as u64, *generation), None);
    }
}
