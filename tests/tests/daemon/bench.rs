//! `mqblk bench` and `mqblk serve`, run as processes.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use mqblk_tests::hostile::daemon::mqblk_binary;
use rustix::process::{Pid, Signal, kill_process};

fn bench(args: &str) -> Command {
    let mut command = Command::new(mqblk_binary());
    command.arg("bench").args(args.split_whitespace()).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn output(args: &str) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = bench(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn image(folder: &Path, bytes: u64) -> String {
    let path = folder.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path.display().to_string()
}

#[test]
fn what_is_written_on_all_queues_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let disks = ["storage=ram,size=16M".to_owned(), format!("path={}", image(folder.path(), 16 << 20))];
    for disk in &disks {
        for load in ["--rw write --bs 64k --iodepth 16", "--rw randwrite --bs 4k --iodepth 32 --descriptors indirect"] {
            for how in ["--poll off,static:50", "--client poll --poll busy --batch 4"] {
                let (code, stdout, stderr) =
                    output(&format!("--disk {disk} {load} {how} --queues 2 --size 8M --verify crc32c --allow-write"));
                assert_eq!(code, Some(0), "{disk} {load} {how}: {stderr}");
                let blocks = if load.contains("64k") { "128 blocks verified" } else { "2048 blocks verified" };
                assert!(stderr.contains(blocks) && stdout.contains("verified blocks"), "{stdout}{stderr}");
            }
        }
    }
}

/// One request in flight and a server that sleeps: each request needs a kick and a call, neither of which may be lost.
#[test]
fn single_requests_lose_no_wake_up() {
    let folder = tempfile::tempdir().unwrap();
    let disks = ["storage=null,size=16M".to_owned(), format!("path={}", image(folder.path(), 16 << 20))];
    for disk in &disks {
        for poll in ["off", "static:20"] {
            let (code, _, stderr) = output(&format!("--disk {disk} --poll {poll} --rw read --bs 4k --runtime 0"));
            assert_eq!(code, Some(0), "{disk} {poll}: {stderr}");
        }
    }
}

#[test]
fn a_benchmark_that_may_not_write_does_not_start_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 1 << 20);
    for (args, word, expected) in [
        (format!("--disk path={image} --rw write"), "--allow-write", 2),
        (format!("--disk path={image},readonly=on --rw write --allow-write"), "read-only", 2),
        (format!("--disk path={image}.not"), "path: found", 1),
        (format!("--disk path={image} --size 2M"), "--size", 2),
        (format!("--disk path={image},block-size=4096 --bs 512"), "--bs", 2),
        (format!("--disk path={image} --poll sometimes"), "poll", 2),
    ] {
        let (code, _, stderr) = output(&args);
        assert_eq!(code, Some(expected), "{args}: {stderr}");
        assert!(stderr.contains(word), "{args}: {stderr}");
    }
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn a_server_that_is_killed_ends_the_benchmark() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("disk.sock");
    for client in ["wait", "poll"] {
        let disk = format!("storage=null,size=1G,latency-us=100,socket={}", socket.display());
        let mut server = Command::new(mqblk_binary());
        let mut server = server.args(["--log", "warn", "serve", "--disk", &disk]).stdin(Stdio::null()).spawn().unwrap();
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(server.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        let args = format!("--socket {} --client {client} --iodepth 8 --runtime 600", socket.display());
        let load = bench(&args).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        kill_process(Pid::from_child(&server), Signal::KILL).unwrap();
        server.wait().unwrap();
        let Output { status, stderr, .. } = load.wait_with_output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{stderr}");
        // If it is killed before the load runs, the set-up fails with another message.
        assert!(stderr.contains("the server went away") || stderr.contains("disk.sock"), "{stderr}");
    }
}

/// Each column of the experiment has a server with its number of queues and its merge setting. All of them complete
/// requests.
#[test]
fn the_block_size_experiment_prints_its_table() {
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results.json");
    let disks = ["storage=ram,size=64M".to_owned(), format!("path={}", image(folder.path(), 64 << 20))];
    for disk in &disks {
        let (code, stdout, stderr) = output(&format!(
            "--experiment block-size --disk {disk} --bs 512,64k,4M --queues 2 --jobs 2 --iodepth 4 --size 16M --runtime 0 --runs 2 --json {}",
            results.display()
        ));
        assert_eq!(code, Some(0), "{disk}: {stderr}");
        let lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
        let title = "IOPS: virtio-blk, read, jobs 2, iodepth 4, batch 1";
        let start = lines.iter().position(|line| line.join(" ") == title).expect("a table of IOPS");
        assert_eq!(lines[start + 1].join(" "), "block_size 1 queue 2 queues 2 queues without merging");
        for (line, size) in lines[start + 2..].iter().zip(["512", "64K", "4M"]) {
            assert_eq!((line.len(), line[0]), (4, size), "{stdout}");
        }
        assert!(
            stdout.contains("IOPS, as a ratio to 1 queue") && stdout.contains("CPU us/IO of the server"),
            "{stdout}"
        );

        let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&results).unwrap()).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 9, "{rows:?}");
        let columns = [("1 queue", 1, "on"), ("2 queues", 2, "on"), ("2 queues without merging", 2, "off")];
        for (row, (column, queues, merge)) in rows.iter().zip(columns.into_iter().cycle()) {
            let text = |key: &str| row[key].as_str().unwrap();
            assert_eq!((text("column"), text("merge"), text("experiment")), (column, merge, "block-size"));
            assert_eq!(
                (row["queues"].as_u64(), row["errors"].as_u64(), row["runs"].as_u64()),
                (Some(queues), Some(0), Some(2))
            );
            assert!(row["iops_mean"].as_f64().unwrap() > 0.0 && row["requests_per_io"] == 1, "{row}");
        }
    }
}

/// Streams at separate offsets are written with each block size and read back, each column on its own disk or on the
/// same image.
#[test]
fn the_block_size_experiment_verifies_what_it_writes() {
    let folder = tempfile::tempdir().unwrap();
    let disks = ["storage=ram,size=16M".to_owned(), format!("path={}", image(folder.path(), 16 << 20))];
    for disk in &disks {
        let line = "--experiment block-size --rw write --allow-write --verify crc32c --bs 512,8k,4M --queues 4 --jobs 4 --threads 2";
        let (code, stdout, stderr) = output(&format!("{line} --disk {disk} --iodepth 8 --offset-increment 4M"));
        assert_eq!(code, Some(0), "{disk}: {stderr}");
        for blocks in [32768, 2048, 4] {
            let verified = format!("{blocks} blocks verified");
            assert_eq!(stderr.matches(&verified).count(), 3, "{disk}: {verified}: {stderr}");
        }
        assert!(stdout.contains("wrqm/s") && !stdout.contains("rrqm/s"), "{stdout}");
    }
    let (code, _, stderr) = output(&format!(
        "--disk {} --rw write --allow-write --verify crc32c --jobs 4 --offset-increment 8M --size 16M",
        disks[0]
    ));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("--offset-increment: found 8M, expected at least 16M"), "{stderr}");
}
