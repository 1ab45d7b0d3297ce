//! Runs every command of README.md, docs/ and the help texts as printed, except those with virtual machines
//! (`tests/tests/guest/documented.rs`), and checks that references of documents exist. See tests/src/documented.
//!
//! Each page runs in its own namespaces, which needs root or a kernel that lets users make namespaces, and socat.
//! `MQBLK_DOCUMENT=docs/xen.md` runs only the pages whose names contain this.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mqblk_tests::documented::markdown::Block;
use mqblk_tests::documented::{Sandbox, Script, Session, links, plan, repository};
use mqblk_tests::hostile::daemon::{mqblk_bench_binary, mqblk_binary};
use rustix::process::{Pid, Signal, kill_process_group};

/// Pages that run at the same time. They mostly wait.
const AT_ONCE: usize = 3;

/// Runs these blocks of a page in their own machine. Returns the duration, and the slowest block.
fn run(scripts: &[Script], install: bool) -> Result<String> {
    let start = Instant::now();
    let mut slowest = (0.0, String::new());
    let mut session = Session::new(Sandbox::new(&mqblk_bench_binary(), install, None)?);
    for (index, script) in scripts.iter().enumerate() {
        let start = Instant::now();
        if index > 0 && plan::servers_end_between(&scripts[index - 1], script) {
            session.interrupt()?;
        }
        session.run(script)?;
        let took = start.elapsed().as_secs_f64();
        if took > slowest.0 {
            slowest = (took, script.block.place());
        }
    }
    session.interrupt()?;
    let took = start.elapsed().as_secs_f64();
    Ok(format!("{} blocks in {took:.1} s, of which {:.1} s {}", scripts.len(), slowest.0, slowest.1))
}

/// Runs a text like a page of the repository's documents.
fn run_text(page: &str, text: &str) -> Result<String> {
    run(&plan::scripts(&plan::blocks(page, text)?)?, false)
}

/// Returns the settings of a unit's section `[Service]`, with the names of a template as in the plain unit.
fn service(unit: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(repository().join("examples").join(unit)).expect("the unit");
    let lines = text.lines().skip_while(|line| *line != "[Service]").take_while(|line| *line != "[Install]");
    let settings = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    settings.map(|line| line.replace("/mqblk/%i.toml", "/mqblk.toml").replace("mqblk-%i", "mqblk")).collect()
}

/// The template differs only in the user, changed by systemd instead of the daemon, and in the capabilities for that.
#[test]
fn the_template_unit_has_what_the_unit_has() {
    let (unit, template) = (service("mqblk.service"), service("mqblk@.service"));
    let only = |these: &BTreeSet<String>, others| these.difference(others).cloned().collect::<Vec<_>>();
    assert_eq!(
        only(&unit, &template),
        [
            "CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_IPC_LOCK CAP_SYS_RESOURCE CAP_SETUID CAP_SETGID",
            "ExecStart=!/usr/local/bin/mqblk serve --config /etc/mqblk.toml --admin ${RUNTIME_DIRECTORY}/admin.sock --state ${STATE_DIRECTORY}/state.json --sandbox on --user mqblk"
        ],
        "in the unit only"
    );
    assert_eq!(
        only(&template, &unit),
        [
            "CapabilityBoundingSet=",
            "ExecStart=/usr/local/bin/mqblk serve --config /etc/mqblk.toml --admin ${RUNTIME_DIRECTORY}/admin.sock --state ${STATE_DIRECTORY}/state.json --sandbox on"
        ],
        "in the template only"
    );
}

#[test]
fn every_command_that_is_printed_can_be_run() {
    let only = std::env::var("MQBLK_DOCUMENT").unwrap_or_default();
    let pages = plan::pages(&mqblk_binary()).expect("pages");
    let mut waiting = Vec::new();
    for (page, text) in pages.iter().filter(|(page, _)| page.contains(&only)) {
        let scripts = plan::blocks(page, text).and_then(|blocks| plan::scripts(&blocks));
        let chosen = plan::part(&scripts.unwrap_or_else(|error| panic!("{error:#}")), false);
        if !chosen.is_empty() {
            waiting.push((page.clone(), chosen));
        }
    }
    // Benchmarks take longest, so they begin first.
    let benchmark = |(_, command): &&(usize, String)| command.starts_with("mqblk bench");
    waiting.sort_by_key(|(_, scripts)| {
        scripts.iter().map(|script| script.commands.iter().filter(benchmark).count()).sum::<usize>()
    });
    let (waiting, told) = (Mutex::new(waiting), Mutex::new(Vec::new()));
    let next = || waiting.lock().unwrap().pop();
    std::thread::scope(|scope| {
        // The limit of locked memory counts over all processes of a user.
        let at_once = if rustix::process::geteuid().is_root() { AT_ONCE } else { 1 };
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some((page, scripts)) = next() {
                    let result = run(&scripts, page == plan::INSTALL.0);
                    let text = result.map(|text| format!("{page}: {text}")).map_err(|error| format!("{error:?}"));
                    told.lock().unwrap().push(text);
                }
            });
        }
    });
    let (good, bad): (Vec<_>, Vec<_>) = told.into_inner().unwrap().into_iter().partition(Result::is_ok);
    let lines =
        |all: Vec<Result<String, String>>| all.into_iter().map(|(Ok(text) | Err(text))| text).collect::<Vec<_>>();
    tell(&lines(good));
    let bad = lines(bad);
    assert!(bad.is_empty(), "{} pages have commands that fail:\n\n{}", bad.len(), bad.join("\n\n"));
}

/// Visible with --nocapture.
#[expect(clippy::print_stdout, reason = "what was run is worth to know")]
fn tell(lines: &[String]) {
    lines.iter().for_each(|line| println!("{line}"));
}

#[test]
fn what_is_listed_as_not_run_is_there() -> Result<()> {
    let mut blocks = Vec::new();
    for (page, text) in plan::pages(&mqblk_binary())? {
        blocks.extend(plan::blocks(&page, &text)?);
    }
    for (list, language) in [(plan::NOT_RUN, true), (plan::SYNOPSES, false)] {
        for entry in list {
            let of = |block: &&Block| (block.language == "sh") == language && plan::listed(&[*entry], block).is_some();
            let count = blocks.iter().filter(of).count();
            ensure!(
                count == 1,
                "{}: found {count} blocks that begin with {:?}, expected one: it is listed as not run",
                entry.0,
                entry.1
            );
        }
    }
    Ok(())
}

/// Returns the error of a page with wrong commands.
fn caught(text: &str) -> String {
    format!("{:?}", run_text("docs/wrong.md", text).expect_err(text))
}

#[test]
fn wrong_commands_are_caught() {
    let serve = "# A\n\n```sh\ntruncate -s 1G a.img\nmqblk serve --disk path=a.img,socket=/tmp/a.sock --admin /tmp/admin.sock\n```\n\n";
    // This page works, so the following ones fail for no other reason.
    run_text("docs/right.md", serve).expect("a page that is right");

    let error = caught(&format!("{serve}```sh\ntrue\nmqblk resize \\\n  b 2G --socket /tmp/admin.sock\ntrue\n```\n"));
    assert!(error.contains("docs/wrong.md:9: in this block"), "{error}");
    assert!(
        error.contains("docs/wrong.md:10: found exit code 2, expected 0: mqblk resize b 2G --socket /tmp/admin.sock"),
        "{error}"
    );
    assert!(error.contains("mqblk: resize: id: found \"b\""), "{error}");

    // The image does not exist, so the server ends.
    let error = caught("```sh\nmqblk serve --disk path=none.img,socket=/tmp/a.sock\n```\n");
    assert!(error.contains("docs/wrong.md:2: ") && error.contains("none.img"), "{error}");
    assert!(error.contains("expected it to run until Ctrl-C"), "{error}");

    // socat does not check JSON-RPC.
    let error = caught(&format!(
        "{serve}```sh\necho '{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"stats\"}}' | socat -t 10 - UNIX-CONNECT:/tmp/admin.sock\n```\n"
    ));
    assert!(error.contains("docs/wrong.md:9: ") && error.contains("found an error of the admin socket"), "{error}");

    // A socket in use by another server.
    let error = caught(&format!("{serve}```sh\nmqblk serve --disk path=a.img,socket=/tmp/b.sock\n```\n"));
    assert!(error.contains("docs/wrong.md:9: ") && error.contains("another terminal shows at its end"), "{error}");

    let error = caught("text\n\n```bash\nls\n```\n");
    assert_eq!(
        error.lines().next().unwrap(),
        r#"docs/wrong.md:4: found language "bash", expected one of ["sh", "text", "json", "toml", "xml", "rust"]"#
    );
    let error = caught("text\n\n```text\nmqblk bench --disk path=a\n```\n");
    assert!(error.contains("docs/wrong.md:4: found a command in a block of language text, expected sh"), "{error}");
}

/// Returns true if the lines of a block are lines of a source, in this order; others may be between them. A line with a
/// name in capitals is a reader's own.
fn is_part_of(block: &str, source: &str) -> bool {
    let mut lines = source.lines().map(str::trim);
    let mut wanted = block.lines().map(str::trim).filter(|line| !line.is_empty() && !line.contains("NAME"));
    wanted.all(|line| lines.any(|other| other == line))
}

/// Returns the texts of all sources in these folders.
fn sources(folders: &[&str]) -> Result<Vec<String>> {
    let mut sources = Vec::new();
    let mut folders: Vec<_> = folders.iter().map(|it| repository().join(it)).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() && !path.ends_with("tests") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push(std::fs::read_to_string(path)?);
            }
        }
    }
    Ok(sources)
}

/// Joins the lines of multi-line strings in a source.
fn with_whole_strings(source: &str) -> String {
    let mut whole = String::with_capacity(source.len());
    let mut lines = source.lines();
    while let Some(mut line) = lines.next() {
        while let Some(begin) = line.strip_suffix('\\') {
            whole.push_str(begin);
            line = lines.next().unwrap_or_default().trim_start();
        }
        whole.push_str(line);
        whole.push('\n');
    }
    whole
}

/// The log messages in troubleshooting.md are those of the daemon. `...` stands for variable parts.
#[test]
fn messages_of_troubleshooting_are_in_the_sources() -> Result<()> {
    const PAGE: &str = "docs/troubleshooting.md";
    let sources: Vec<String> = sources(&["crates"])?.iter().map(|source| with_whole_strings(source)).collect();
    let text = &plan::documents(&[PAGE])?[0].1;
    let blocks = plan::blocks(PAGE, text)?;
    let messages = blocks.iter().filter(|block| block.language == "text").flat_map(|block| block.text.lines());
    let parts: Vec<&str> =
        messages.flat_map(|line| line.split("...")).map(str::trim).filter(|part| !part.is_empty()).collect();
    ensure!(parts.len() > 20, "found {} messages in {PAGE}", parts.len());
    let unknown: Vec<_> = parts.iter().filter(|part| !sources.iter().any(|source| source.contains(**part))).collect();
    ensure!(unknown.is_empty(), "{PAGE}: found messages that are in no source: {unknown:#?}");
    Ok(())
}

#[test]
fn rust_that_is_printed_is_in_the_sources() -> Result<()> {
    let sources = sources(&["crates", "tests/src"])?;
    let mut found = 0;
    for (page, text) in plan::pages(&mqblk_binary())? {
        for block in plan::blocks(&page, &text)?.iter().filter(|block| block.language == "rust") {
            found += 1;
            ensure!(
                sources.iter().any(|source| is_part_of(&block.text, source)),
                "{}: found in no source",
                block.place()
            );
        }
    }
    ensure!(found > 1, "{found} blocks were found");
    assert!(is_part_of("fn a() {\n\n}", "  fn a() {\n    b();\n  }") && !is_part_of("fn a() {\n}", "}\nfn a() {"));
    Ok(())
}

/// There is no mqblk until a command has installed it, and each page has its own folders.
#[test]
fn a_page_finds_nothing_that_it_does_not_make() -> Result<()> {
    let page = "```sh\nfind /srv /tmp /run -mindepth 1 | tee found; [ ! -s found ]\nmqblk --version\n```\n";
    run_text("docs/a.md", &page.replace("mqblk", "! [ -e /dev/kvm ] && touch /tmp/a /srv/a /run/a && mqblk"))?;
    run_text("docs/a.md", page)?;
    let blocks = plan::blocks("README.md", page)?;
    let error =
        format!("{:?}", run(&plan::scripts(&blocks)?, true).expect_err("mqblk was there before it was installed"));
    assert!(error.contains("README.md:3: found exit code 127"), "{error}");
    Ok(())
}

/// Each page is in the index, or in that of its folder.
#[test]
fn every_page_is_in_an_index() -> Result<()> {
    let pages = plan::documents(&["docs"])?;
    let index_of = |folder: &str| pages.iter().find(|(page, _)| *page == format!("{folder}/README.md"));
    let mut checked = 0;
    for (page, _) in pages.iter().filter(|(page, _)| page != "docs/README.md") {
        let is_in = |folder: &str, (_, text): &(String, String)| {
            page.strip_prefix(&format!("{folder}/"))
                .is_some_and(|name| [")", "#"].iter().any(|end| text.contains(&format!("]({name}{end}"))))
        };
        let folder = page.rsplit_once('/').map_or("docs", |(folder, _)| folder);
        let found = ["docs", folder].iter().any(|of| index_of(of).is_some_and(|index| is_in(of, index)));
        ensure!(found, "{page}: found in no index, expected a link in docs/README.md");
        checked += 1;
    }
    ensure!(checked > 40, "{checked} pages were checked");
    Ok(())
}

/// References in documents exist.
#[test]
fn links_and_paths_of_documents_lead_somewhere() {
    let root = repository();
    let files = links::files(&root).expect("the repository");
    assert!(files.len() > 300, "{} files", files.len());
    let mut names: BTreeSet<&str> = BTreeSet::from(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs"]);
    names.extend(["CHANGELOG.md"].into_iter().filter(|name| root.join(name).exists()));
    let pages = plan::documents(&names.into_iter().collect::<Vec<_>>()).context("documents").unwrap();
    let faults: Vec<String> = pages.iter().flat_map(|(page, text)| links::faults(&root, &files, page, text)).collect();
    assert!(faults.is_empty(), "{} links or paths lead nowhere:\n{}", faults.len(), faults.join("\n"));
}

/// README's first command, without the build: its output, Ctrl-C ends it with 0, and nothing is left.
#[test]
fn the_quickstart_verifies_measures_and_ends_with_ctrl_c() {
    let folder = tempfile::tempdir().expect("a folder");
    // A shell that starts the tests in the background ignores SIGINT, and a script cannot undo that for itself.
    let mut quickstart = Command::new("env")
        .args(["--default-signal", "scripts/quickstart.sh"])
        .current_dir(repository())
        .env("MQBLK", mqblk_binary())
        .env("TMPDIR", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("scripts/quickstart.sh");
    let mut printed = BufReader::new(quickstart.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let lines: Vec<String> = printed.by_ref().take_while(|line| line != "Serving until Ctrl-C.").collect();
    let group = Pid::from_child(&quickstart);
    kill_process_group(group, Signal::INT).expect("it runs");
    let after: Vec<String> = printed.collect();
    let status = quickstart.wait().expect("it ends");
    let text = lines.join("\n");
    assert!(status.success(), "{status}: {text}\n{after:?}");
    // 256 MiB in blocks of 64 KiB.
    let mut verified = lines.iter().skip_while(|line| !line.ends_with("verified blocks"));
    assert!(verified.nth(1).is_some_and(|row| row.split_whitespace().last() == Some("4096")), "{text}");
    assert!(text.contains("-device vhost-user-blk-pci,chardev=mqblk"), "{text}");
    for poll in ["off", "auto"] {
        let mut table = lines.iter().skip_while(|line| !line.starts_with(&format!("poll={poll}, target"))).skip(1);
        let iops =
            table.next().and_then(|header| header.split_whitespace().position(|word| word == "IOPS")).expect("IOPS");
        let rows: Vec<f64> = table.map_while(|row| row.split_whitespace().nth(iops)?.parse().ok()).collect();
        // Depths of 1 and 32, with one queue and with two, if there are two CPUs.
        assert!([2, 4].contains(&rows.len()) && rows.iter().all(|iops| *iops > 0.0), "poll={poll}: {rows:?} in {text}");
    }
    assert_eq!(folder.path().read_dir().expect("the folder").count(), 0, "files are left");
}
