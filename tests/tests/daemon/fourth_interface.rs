//! A new guest interface is one folder (`tests/src/fourth_interface`) and one line (in the program's table). It is
//! configured, printed, served, counted, resized, stopped and documented as the others.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use mqblk_test_bounds::Bound;
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mqblk-lines");
/// Only a failing test waits this long.
const TIMEOUT: Bound = Bound::seconds(60);

/// A daemon, killed when the test ends before it.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A connection.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(socket: &Path) -> Client {
        let start = Instant::now();
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Client(BufReader::new(stream)),
                Err(error) if TIMEOUT.is_exceeded_since(start) => panic!("{socket:?}: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Sends a request and returns the response line.
    fn send(&mut self, line: &str, data: &[u8]) -> String {
        let stream = self.0.get_mut();
        stream.write_all(format!("{line}\n").as_bytes()).and_then(|()| stream.write_all(data)).expect("sent");
        let mut answer = String::new();
        self.0.read_line(&mut answer).expect("an answer");
        answer.trim_end().to_owned()
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        assert_eq!(self.send(&format!("read {offset} {len}"), &[]), "ok");
        let mut data = vec![0; len];
        self.0.read_exact(&mut data).expect("the data");
        data
    }
}

fn stat(admin: &str) -> Value {
    let output = run(&["stat", "--socket", admin, "--json", "--queues"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    report["stat"].clone()
}

#[test]
fn help_and_errors_know_it() {
    let help = text(&run(&["serve", "--help"]).stdout);
    for part in ["--lines-max-bytes <N>", "lines:", "Keys of --disk with interface=lines, besides those of a storage:"]
    {
        assert!(help.contains(part), "{part:?} in {help}");
    }
    let error = text(&run(&["serve", "--disk", "storage=null,size=1M,interface=line"]).stderr);
    assert!(error.contains("expected one of virtio-blk, virtio-scsi, xen, lines"), "{error}");
    let error = text(&run(&["serve", "--disk", "storage=null,size=1M,interface=lines"]).stderr);
    assert!(error.contains("disk \"null\": socket: found nothing, expected the path of the socket"), "{error}");
    let disk = "storage=null,size=1M,interface=lines,socket=/tmp/x,domid=1";
    let error = text(&run(&["serve", "--disk", disk]).stderr);
    assert!(error.contains("disk \"null\": domid: found an unknown key"), "{error}");
    let error = text(&run(&["serve", "--lines-max-bytes", "1", "--disk", disk]).stderr);
    assert!(
        error.contains("serve: lines-max-bytes: found \"1\", expected a whole number from 512 to 65536"),
        "{error}"
    );
}

#[test]
fn a_printed_configuration_round_trips() {
    let folder = tempfile::tempdir().expect("a folder");
    let disks = [
        "storage=null,size=1M,id=a,socket=/tmp/a.sock",
        "storage=null,size=1M,id=b,interface=lines,socket=/tmp/b.sock,queues=3",
        "storage=null,size=1M,id=c,socket=/tmp/c.sock",
    ];
    let disks = disks.iter().flat_map(|disk| ["--disk", disk]);
    let arguments = ["serve", "--workers", "2", "--lines-max-bytes", "4096", "--print-config"].into_iter().chain(disks);
    let first = run(&arguments.collect::<Vec<_>>());
    let first = text(&first.stdout);
    let order: Vec<_> = first.lines().filter(|line| line.starts_with("id = ")).collect();
    assert_eq!(order, ["id = \"a\"", "id = \"b\"", "id = \"c\""]);
    assert!(first.contains("lines-max-bytes = 4096") && first.contains("interface = \"lines\""), "{first}");
    let file = folder.path().join("config.toml");
    std::fs::write(&file, &first).expect("written");
    let again = run(&["serve", "--config", file.to_str().expect("text"), "--print-config"]);
    assert_eq!(text(&again.stdout), first);
}

#[test]
fn it_serves_and_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (socket, admin) = (path("lines.sock"), path("admin.sock"));
    let lines = format!("path={},id=l,interface=lines,socket={socket},queues=2", image.display());
    let blk = format!("storage=null,size=1M,id=b,socket={}", path("blk.sock"));
    let command = ["serve", "--workers", "2", "--admin", &admin, "--disk", &blk, "--disk", &lines];
    let mut daemon = Daemon(Command::new(PROGRAM).args(command).stderr(Stdio::null()).spawn().expect("a daemon"));

    let mut one = Client::connect(Path::new(&socket));
    let mut other = Client::connect(Path::new(&socket));
    let data: Vec<u8> = (0..8192_u32).map(|index| (index * 7 % 251) as u8).collect();
    assert_eq!(one.send("write 4096 8192", &data), "ok");
    assert_eq!(one.send("flush", &[]), "ok");
    assert_eq!(other.read(4096, 8192), data);
    assert_eq!(&std::fs::read(&image).expect("the image")[4096..12288], data);
    assert!(other.send("read 1048576 512", &[]).starts_with("error: "), "a read past the end");

    let start = Instant::now();
    while !Path::new(&admin).exists() && !TIMEOUT.is_exceeded_since(start) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let reported = stat(&admin);
    let disk = &reported["disks"][1];
    assert_eq!((&disk["id"], &disk["interface"], &disk["storage"]), (&"l".into(), &"lines".into(), &"file".into()));
    assert_eq!(reported["disks"][0]["interface"], "virtio-blk");
    // The read past the end counts as a failed read.
    let counters = &disk["totals"]["counters"];
    let counted = ["writes", "reads", "flushes", "errors"].map(|name| counters[name].as_u64());
    assert_eq!(counted, [Some(1), Some(2), Some(1), Some(1)], "{disk}");
    let queues = disk["queues"].as_array().expect("queues");
    assert_eq!(queues.iter().map(|queue| queue["worker"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(0)]);

    let resized = run(&["resize", "l", "2M", "--socket", &admin]);
    assert!(resized.status.success(), "{}", text(&resized.stderr));
    assert_eq!(other.read(1 << 20, 512), [0; 512]);
    // Its own verb.
    let mut verb = UnixStream::connect(&admin).expect("the admin socket");
    verb.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"lines.limits\"}\n").expect("sent");
    let mut answer = String::new();
    BufReader::new(verb).read_line(&mut answer).expect("an answer");
    assert!(answer.contains("\"max_bytes\":65536"), "{answer}");

    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    assert!(daemon.0.wait().expect("an exit code").success());
    assert!(!Path::new(&socket).exists(), "the socket is left");
}
