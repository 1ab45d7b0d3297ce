//! The commands that `--help` and docs/bench.md print, with all their values: tests/src/documented runs them,
//! shortened.

use clap::CommandFactory;

use super::{Cli, plan};

/// Returns the options of each command `mqblk bench` of a text; a backslash continues a line.
fn commands(text: &str) -> Vec<String> {
    let whole = text.replace("\\\n", " ");
    let lines = whole.lines().filter_map(|line| line.trim().strip_prefix("mqblk bench "));
    lines.filter(|line| !line.starts_with("--help")).map(str::to_owned).collect()
}

#[test]
fn every_printed_command_is_a_benchmark_that_can_be_planned() {
    let help = Cli::command().get_after_help().unwrap().to_string();
    for (page, text, least) in
        [("--help", help.as_str(), 12), ("docs/bench.md", include_str!("../../../../docs/bench.md"), 18)]
    {
        let all = commands(text);
        assert!(all.len() >= least, "{page}: {all:#?}");
        for line in all {
            let result = plan(&line);
            assert!(
                result.is_ok_and(|plan| plan.run_count() > 0),
                "{page}: mqblk bench {line}: {:?}",
                plan(&line).err()
            );
        }
    }
}
