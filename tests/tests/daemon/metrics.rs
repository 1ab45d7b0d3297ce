//! The metrics endpoint of a running daemon: it agrees with `stat`, its counters only grow, scrapers disturb nothing,
//! and Prometheus finds data for every query of the dashboard and every alert.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use mqblk_admin::model::Load;
use mqblk_admin::{Client, StatQuery};
use mqblk_driver::virtio_blk::BlkStatus;
use mqblk_memory::DomainId;
use mqblk_tests::documented::repository;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::wait_for;
use mqblk_tests::nbd_server::NbdServer;
use mqblk_xen_simulation::Machine;
use serde_json::Value;
use tempfile::TempDir;

const OPEN_METRICS: &str = "application/openmetrics-text;version=1.0.0";

/// Returns the address from a daemon's log.
fn address(daemon: &HostileDaemon) -> SocketAddr {
    wait_for("the metrics' address", || {
        let log = daemon.log();
        let text = log.lines().find_map(|line| line.split_once("metrics address="))?.1.to_owned();
        text.split_whitespace().next()?.parse().ok()
    })
}

/// Returns the head and the body of the response.
fn exchange(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("a response");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

fn get(address: SocketAddr, target: &str, accept: &str) -> (String, String) {
    let stream = TcpStream::connect(address).expect("a connection");
    exchange(stream, &format!("GET {target} HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"))
}

/// Samples by series: the name, and the labels in the order of their names.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Parses either text format. No label value here needs escaping.
    fn parse(text: &str) -> Samples {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            (in_order(series), value.parse().expect("a number"))
        };
        Samples(lines.map(sample).collect())
    }

    fn get(&self, series: &str) -> f64 {
        let series = in_order(series);
        *self.0.get(&series).unwrap_or_else(|| panic!("{series} is missing"))
    }

    fn has(&self, series: &str) -> bool {
        self.0.contains_key(&in_order(series))
    }
}

/// Sorts the labels of a series, and normalises bounds of buckets.
fn in_order(series: &str) -> String {
    let Some((name, labels)) = series.strip_suffix('}').and_then(|series| series.split_once('{')) else {
        return series.to_owned();
    };
    let label = |label: &str| match label.strip_prefix("le=").map(|bound| bound.trim_matches('"').parse::<f64>()) {
        Some(bound) => format!("le={:?}", bound.expect("a bound")),
        None => label.to_owned(),
    };
    let mut labels: Vec<String> = labels.split(',').map(label).collect();
    labels.sort();
    format!("{name}{{{}}}", labels.join(","))
}

/// Scrapes the daemon with the series of its queues. Samples are at most 100 ms old, so the second one is newer than
/// the call.
fn scrape(address: SocketAddr) -> Samples {
    let one = || {
        let (head, body) = get(address, "/metrics?queues=true", OPEN_METRICS);
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        Samples::parse(&body)
    };
    let start = one();
    let cpu = "process_cpu_seconds_total";
    wait_for("a newer sample", || Some(one()).filter(|newer| newer.get(cpu) > start.get(cpu)))
}

fn start(more: &[&str]) -> HostileDaemon {
    let disks = [("file", "path=IMAGE,queues=2"), ("ram", "storage=ram,size=1M")];
    HostileDaemon::start_with(2, &disks, &[&["--metrics", "127.0.0.1:0"], more].concat())
}

/// Checks that the metrics of a disk or queue are the fields of `stat`.
fn agrees(samples: &Samples, prefix: &str, labels: &str, load: &Load) {
    let find = |name: &str| samples.get(&format!("{prefix}{name}{{{labels}}}"));
    let counters = &load.counters;
    for (name, value) in [
        ("requests_total", counters.requests),
        ("reads_completed_total", counters.reads),
        ("writes_completed_total", counters.writes),
        ("flushes_completed_total", counters.flushes),
        ("discards_completed_total", counters.discards),
        ("write_zeroes_completed_total", counters.write_zeroes),
        ("read_bytes_total", counters.read_bytes),
        ("written_bytes_total", counters.written_bytes),
        ("discarded_bytes_total", counters.other_bytes),
        ("reads_merged_total", counters.read_merges),
        ("writes_merged_total", counters.write_merges),
        ("discards_merged_total", counters.other_merges),
        ("errors_total", counters.errors),
        ("read_errors_total", counters.read_errors),
        ("write_errors_total", counters.write_errors),
        ("answered_alone_requests_total", counters.answered_alone),
        ("malformed_requests_total", counters.malformed),
        ("kicks_total", counters.kicks),
        ("calls_total", counters.calls),
        ("calls_suppressed_total", counters.calls_suppressed),
        ("calls_deferred_total", counters.calls_put_off),
        ("polls_total", counters.turns),
        ("empty_polls_total", counters.empty_turns),
        ("arms_total", counters.arms),
        ("in_flight_requests", load.in_flight),
    ] {
        assert_eq!(find(name), value as f64, "{prefix}{name}{{{labels}}}");
    }
    for (name, ns) in [("empty_poll_seconds_total", counters.poll_ns), ("busy_seconds_total", counters.busy_ns)] {
        assert!((find(name) - ns as f64 / 1e9).abs() < 1e-9, "{name}");
    }
}

#[test]
fn metrics_agree_with_stat() {
    let folder = tempfile::tempdir().expect("a folder");
    let (admin, controller) = (folder.path().join("admin"), folder.path().join("c.sock"));
    let (admin_text, controller) =
        (admin.display().to_string(), format!("id=c,queues=2,socket={}", controller.display()));
    let daemon =
        start(&["--admin", &admin_text, "--controller", &controller, "--lun", "controller=c,id=l,storage=ram,size=1M"]);
    let address = address(&daemon);
    let mut load = VhostUserLoad::connect(daemon.socket("file"), 2, 64, 1);
    (0..20).for_each(|_| load.round());
    drop(load);
    daemon.wait_for_session_end("file");
    // All counters are stable.
    let samples = scrape(address);
    let query = StatQuery { queues: true, latency: true, disk: None };
    let stat = Client::connect(&admin).and_then(|mut client| client.stat(&query)).expect("stat");
    assert!(stat.disks[0].totals.counters.reads > 0 && stat.disks[0].totals.counters.busy_ns > 0);
    for disk in &stat.disks {
        let label = format!("disk=\"{}\"", disk.id);
        agrees(&samples, "mqblk_disk_", &label, &disk.totals);
        for queue in &disk.queues {
            agrees(
                &samples,
                "mqblk_disk_queue_",
                &format!("{label},role=\"request\",queue=\"{}\"", queue.queue),
                &queue.load,
            );
        }
        for (op, parts) in [
            ("read", &disk.totals.latency.reads),
            ("write", &disk.totals.latency.writes),
            ("other", &disk.totals.latency.others),
        ] {
            for (name, part) in [
                ("latency", &parts.total),
                ("queued", &parts.queued),
                ("device", &parts.device),
                ("publish", &parts.publish),
            ] {
                let find = |suffix: &str, more: &str| {
                    samples.get(&format!("mqblk_disk_{name}_seconds_{suffix}{{{label},op=\"{op}\"{more}}}"))
                };
                assert_eq!(find("count", ""), part.count as f64);
                assert!((find("sum", "") - part.sum_ns as f64 / 1e9).abs() < 1e-9);
                assert_eq!(find("bucket", ",le=\"+Inf\""), part.count as f64);
                let below =
                    part.buckets.iter().filter(|(_, upper, _)| *upper <= 1 << 16).map(|(.., count)| count).sum::<u64>();
                assert_eq!(find("bucket", ",le=\"0.000065536\""), below as f64, "{name} {op}");
            }
        }
    }
    agrees(&samples, "mqblk_controller_", "controller=\"c\"", &stat.controllers[0].totals);
    assert_eq!(samples.get("mqblk_lun_reads_completed_total{lun=\"l\",controller=\"c\"}"), 0.0);
    assert_eq!(samples.get("mqblk_tenant_mappings_limit{tenant=\"file\"}"), 2048.0);
    for worker in &stat.workers {
        let find = |name: &str| samples.get(&format!("mqblk_worker_{name}{{worker=\"{}\"}}", worker.worker));
        // A verb wakes a worker, and so does a scrape.
        assert!(find("turns_total") <= worker.turns as f64 && find("cpu_seconds_total") <= worker.cpu_ns as f64 / 1e9);
    }
    assert_eq!(samples.get(&format!("mqblk_build_info{{version=\"{}\"}}", stat.version)), 1.0);
    daemon.stop();
}

/// The numbers of requests that the storage fails, and of those that wait for a limit, are those of `stat`.
#[test]
fn failed_and_throttled_requests_are_counted() {
    let disks = [
        ("bad", "storage=fault,inner=ram,size=1M,fail-read=0+64K:EIO"),
        ("slow", "storage=ram,size=1M,iops=20,queues=2"),
    ];
    let daemon = HostileDaemon::start_with(2, &disks, &["--metrics", "127.0.0.1:0"]);
    let address = address(&daemon);
    let before = scrape(address);
    assert_eq!(before.get("mqblk_disk_failed_requests_total{disk=\"bad\"}"), 0.0);
    assert!(!before.has("mqblk_disk_last_failure_age_seconds{disk=\"bad\"}"));
    assert!(!before.has("mqblk_disk_throttled_requests_total{disk=\"bad\"}"), "it has no limits");

    let mut bad = VhostUserLoad::connect(daemon.socket("bad"), 1, 16, 1);
    assert_eq!([bad.try_read(0), bad.try_read(1)], [BlkStatus::IoError; 2]);
    let mut slow = VhostUserLoad::connect(daemon.socket("slow"), 2, 64, 1);
    let throttle = || daemon.stat("slow").health.throttle.expect("it has limits");
    // More at once than the limit allows in a tenth of a second, however slow this client is.
    slow.round();
    assert!(throttle().throttled > 0);
    let samples = scrape(address);
    let find = |name: &str, disk: &str| samples.get(&format!("mqblk_disk_{name}{{disk=\"{disk}\"}}"));
    assert_eq!((find("failed_requests_total", "bad"), find("failed_requests_total", "slow")), (2.0, 0.0));
    let health = daemon.stat("bad").health;
    let last = health.last_failure.expect("a failure");
    assert!(find("last_failure_age_seconds", "bad") <= last.ago_ns as f64 / 1e9, "{last:?}");
    let throttle = throttle();
    assert_eq!(find("throttled_requests_total", "slow"), throttle.throttled as f64);
    assert!((find("throttled_seconds_total", "slow") - throttle.throttled_ns as f64 / 1e9).abs() < 1e-9);
    assert_eq!((find("throttle_waiting_requests", "slow"), throttle.waiting), (0.0, 0));
    drop((bad, slow));
    daemon.stop();
}

#[test]
fn both_formats_are_what_they_say() {
    let daemon = start(&[]);
    let address = address(&daemon);
    let (head, text) = get(address, "/metrics", OPEN_METRICS);
    assert!(
        head.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"),
        "{head}"
    );
    assert!(text.ends_with("\n# EOF\n") && text.matches("# EOF").count() == 1);
    assert!(text.contains("# TYPE mqblk_disk_read_bytes counter\n# UNIT mqblk_disk_read_bytes bytes\n"), "{text}");
    assert!(text.contains("# TYPE mqblk_disk info\n") && !text.contains("_queue_"), "{text}");
    let (head, text) = get(address, "/metrics", "text/plain");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert!(text.contains("# TYPE mqblk_disk_read_bytes_total counter\n") && !text.contains("# EOF"), "{text}");
    // Both have the same series.
    let (_, other) = get(address, "/metrics", OPEN_METRICS);
    let names = |text: &str| Samples::parse(text).0.into_keys().collect::<Vec<_>>();
    assert_eq!(names(&text), names(&other));
    let (head, body) = get(address, "/", "");
    assert!(head.starts_with("HTTP/1.1 404 ") && body == "found path \"/\", expected /metrics\n", "{head}");
    daemon.stop();
}

#[test]
fn counters_only_grow_while_guests_come_and_go() {
    let daemon = start(&[]);
    let address = address(&daemon);
    let mut before = scrape(address);
    for seed in 0..4 {
        let mut load = VhostUserLoad::connect(daemon.socket("ram"), 1, 64, seed);
        // A new guest finds the data of the previous one.
        load.expect_generation(0);
        (0..3).for_each(|_| assert_eq!(load.try_read(1), BlkStatus::Ok));
        let during = scrape(address);
        drop(load);
        daemon.wait_for_session_end("ram");
        let after = scrape(address);
        for (older, newer) in [(&before, &during), (&during, &after)] {
            for (series, value) in &older.0 {
                let name = series.split('{').next().unwrap_or_default();
                if ["_total", "_bucket", "_count", "_sum"].iter().any(|suffix| name.ends_with(suffix)) {
                    let found = newer.get(series);
                    assert!(found >= *value, "{series}: {found} after {value}");
                }
            }
        }
        before = after;
    }
    assert_eq!(before.get("mqblk_disk_reads_completed_total{disk=\"ram\"}"), 12.0);
    daemon.stop();
}

#[test]
fn scrapers_that_misbehave_disturb_neither_guests_nor_others() {
    let mut daemon = start(&[]);
    let address = address(&daemon);
    let neighbour = start_neighbour(daemon.socket("file"), 2, 7);
    let mut stuck: Vec<TcpStream> = Vec::new();
    for number in 0..60 {
        let mut stream = TcpStream::connect(address).expect("a connection");
        // It may already be closed as one too many.
        let _ = match number % 3 {
            0 => Ok(()),
            1 => stream.write_all(b"GET /metrics?queues=true HTTP/1.1\r\n\r\n"),
            _ => stream.write_all(&[b'A'; 20_000]),
        };
        stuck.push(stream);
    }
    neighbour.assert_progress("scrapers that do not read");
    // After a second the oldest of them makes room.
    wait_for("a scrape", || {
        let mut stream = TcpStream::connect(address).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text).ok()?;
        text.starts_with(b"HTTP/1.1 200 OK").then_some(())
    });
    drop(stuck);
    neighbour.assert_progress("scrapers that have gone");
    neighbour.finish();
    daemon.assert_alive("scrapers");
    daemon.stop();
}

#[test]
fn a_unix_socket_has_its_mode_and_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics.sock");
    let at = format!("unix:{}", path.display());
    let daemon =
        HostileDaemon::start_with(1, &[("ram", "storage=ram,size=1M")], &["--metrics", &at, "--metrics-mode", "0660"]);
    let mode = std::fs::metadata(&path).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let (head, body) = exchange(UnixStream::connect(&path).expect("a connection"), "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(
        head.starts_with("HTTP/1.1 200 OK") && body.contains("mqblk_disk_stopped{disk=\"ram\"} 0\n"),
        "{head}\n{body}"
    );
    daemon.stop();
    assert!(!path.exists());
}

#[test]
fn an_address_that_is_in_use_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (folder, address) =
        (tempfile::tempdir().expect("a folder"), listener.local_addr().expect("an address").to_string());
    let disk = format!("storage=null,size=1M,socket={}", folder.path().join("s").display());
    let output =
        Command::new(mqblk_binary()).args(["serve", "--metrics", &address, "--disk", &disk]).output().expect("mqblk");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let want = format!("mqblk: serve: metrics: found {address}: Address already in use");
    assert!(stderr.contains(&want) && stderr.contains("expected an address of this host and a free port"), "{stderr}");
}

/// A program that is killed with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn monitoring() -> PathBuf {
    repository().join("packaging/monitoring")
}

fn promtool(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new("promtool");
    command
        .args(arguments)
        .current_dir(monitoring())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool: apt-get install prometheus");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("sent");
    child.wait_with_output().expect("promtool")
}

/// Runs promtool, and returns its output.
fn checked(arguments: &[&str], input: &str) -> String {
    let output = promtool(arguments, input);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {arguments:?}: {text}");
    text
}

#[test]
fn alerts_and_metrics_are_what_promtool_accepts() {
    assert!(checked(&["check", "rules", "alerts.yml"], "").contains("11 rules found"));
    checked(&["test", "rules", "alerts_test.yml"], "");
    let daemon = start(&[]);
    let (_, text) = get(address(&daemon), "/metrics?queues=true", "text/plain");
    assert_eq!(checked(&["check", "metrics"], &text), "");
    assert!(!promtool(&["check", "metrics"], "a{b=c} 1\n").status.success(), "promtool accepts anything");
    daemon.stop();
}

/// A Prometheus with the alerts, which scrapes an address.
struct Prometheus {
    _server: Server,
    folder: TempDir,
    address: SocketAddr,
}

impl Prometheus {
    fn start(scraped: SocketAddr) -> Prometheus {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let rules = monitoring().join("alerts.yml");
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{:?}]\nscrape_configs:\n\
             - {{job_name: mqblk, params: {{queues: ['true']}}, static_configs: [{{targets: ['{scraped}']}}]}}\n",
            rules.display().to_string()
        );
        std::fs::write(at("prometheus.yml"), config).expect("a file");
        // A port that was free a moment ago.
        let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
        let log = std::fs::File::create(at("log")).expect("a file");
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", at("prometheus.yml")))
            .arg(format!("--storage.tsdb.path={}", at("data")));
        command.arg(format!("--web.listen-address={address}")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let server = Server(command.spawn().expect("prometheus: apt-get install prometheus"));
        let prometheus = Prometheus { _server: server, folder, address };
        wait_for("prometheus", || {
            let stream = TcpStream::connect(address).ok()?;
            exchange(stream, "GET /-/ready HTTP/1.0\r\n\r\n").0.contains(" 200 ").then_some(())
        });
        prometheus
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn get(&self, target: &str) -> Value {
        let stream = TcpStream::connect(self.address).expect("a connection");
        let (_, body) = exchange(stream, &format!("GET {target} HTTP/1.0\r\n\r\n"));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{target}: {error}: {body}\n{}", self.log()))
    }

    /// Returns the results of a query.
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let found = self.get(&format!("/api/v1/query?query={encoded}"));
        assert_eq!(found["status"], "success", "{query}: {found}");
        found["data"]["result"].as_array().expect("results").clone()
    }

    /// Waits until a query has results.
    fn has_data(&self, query: &str) {
        let start = std::time::Instant::now();
        while self.query(query).is_empty() {
            assert!(start.elapsed().as_secs() < 60, "no data for {query}\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    }
}

/// The queries of the dashboard, with its variables as for all daemons and disks.
fn dashboard_queries() -> Vec<String> {
    let text = std::fs::read_to_string(monitoring().join("grafana-dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries = targets.map(|target| target["expr"].as_str().expect("an expression"));
    let queries: Vec<String> = queries
        .map(|query| query.replace("$__rate_interval", "10s").replace("$instance", ".*").replace("$disk", ".*"))
        .collect();
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let names: Vec<&str> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
    assert_eq!(names, ["datasource", "instance", "disk"]);
    assert!(queries.len() > 60 && !queries.iter().any(|query| query.contains('$')), "{queries:#?}");
    queries
}

/// The names of our metrics in an expression.
fn metric_names(expression: &str) -> Vec<&str> {
    let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("mqblk_")).collect()
}

fn nbd_server(folder: &Path) -> (NbdServer, String) {
    let socket = folder.join("nbd.sock");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--unix"]).arg(&socket).args(["memory", "1M"]);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    (NbdServer::start(command, move || socket.exists()), uri)
}

#[test]
fn prometheus_has_data_for_the_dashboard_and_the_alerts() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_server, uri) = nbd_server(folder.path());
    let controller = format!("id=c,queues=2,socket={}", folder.path().join("c.sock").display());
    let lun = format!("controller=c,id=l,path={uri}");
    let disks = [("file", "path=IMAGE,queues=2,iops=100000"), ("net", &format!("path={uri}"))];
    std::fs::create_dir(folder.path().join("xen")).expect("a folder");
    let machine = Machine::start(&folder.path().join("xen")).expect("a simulated Xen");
    machine.create_domain(DomainId(1)).expect("a domain");
    let xen = machine.folder().display().to_string();
    let of_xen = "id=xen,storage=ram,size=1M,interface=xen,domid=1,vdev=xvda,queues=1";
    // The disk is out.
    let missing = format!("id=missing,path=/nonexistent,socket={}", folder.path().join("missing.sock").display());
    let daemon = HostileDaemon::start_with(
        2,
        &disks,
        &[
            &["--metrics", "127.0.0.1:0", "--controller", &controller, "--lun", &lun, "--disk", &missing][..],
            &["--xen", &xen, "--xen-state", "off", "--disk", of_xen],
        ]
        .concat(),
    );
    let neighbour = start_neighbour(daemon.socket("file"), 2, 7);
    let prometheus = Prometheus::start(address(&daemon));
    prometheus.has_data("up{job=\"mqblk\"} == 1");
    for query in dashboard_queries() {
        prometheus.has_data(&query);
    }
    prometheus.has_data("mqblk_disk_grant_pages{disk=\"xen\"}");
    // Under load the values are not zero.
    prometheus.has_data("sum(rate(mqblk_disk_reads_completed_total{disk=\"file\"}[10s])) > 0");
    prometheus.has_data(
        "histogram_quantile(0.99, sum by (le) (rate(mqblk_disk_latency_seconds_bucket{disk=\"file\"}[10s]))) > 0",
    );
    let rules = || prometheus.get("/api/v1/rules?type=alert")["data"]["groups"][0]["rules"].as_array().cloned();
    let rules =
        wait_for("evaluated alerts", || rules().filter(|rules| rules.iter().all(|rule| rule["health"] == "ok")));
    assert_eq!(rules.len(), 11);
    for rule in rules {
        let expression = rule["query"].as_str().expect("a query").to_owned();
        metric_names(&expression).into_iter().for_each(|name| prometheus.has_data(&format!("count({name})")));
        // These two may be true here: this machine's disk, or a worker without a CPU, may be slow beside other work.
        if rule["name"] != "MqblkStorageSlow" && rule["name"] != "MqblkWorkerSaturated" {
            assert_eq!(rule["alerts"].as_array().map(Vec::len), Some(0), "{rule}");
        }
    }
    neighbour.finish();
    daemon.stop();
}
