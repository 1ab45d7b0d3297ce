//! Running scripts in a machine that has an agent.

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;

use super::agent::{SCRIPT_TIMEOUT, ScriptOutput};

/// A machine that runs shell scripts.
pub trait Shell {
    /// Runs a shell script for at most `limit`.
    ///
    /// # Errors
    /// When the machine does not reply. A script that fails is not an error.
    fn run_within(&mut self, script: &str, limit: Bound) -> Result<ScriptOutput>;

    /// Runs a script for at most [`SCRIPT_TIMEOUT`].
    ///
    /// # Errors
    /// As [`Shell::run_within`].
    fn run(&mut self, script: &str) -> Result<ScriptOutput> {
        self.run_within(script, SCRIPT_TIMEOUT)
    }

    /// Runs a script that must exit with 0. Returns its output without the last newline.
    ///
    /// # Errors
    /// As [`Shell::run`], and when the script fails.
    fn must(&mut self, script: &str) -> Result<String> {
        self.must_within(script, SCRIPT_TIMEOUT)
    }

    /// As [`Shell::must`], with another limit.
    ///
    /// # Errors
    /// As [`Shell::must`].
    fn must_within(&mut self, script: &str, limit: Bound) -> Result<String> {
        let answer = self.run_within(script, limit)?;
        ensure!(
            answer.status == 0,
            "in the guest, exit status {}:\n{script}\nits output:\n{}",
            answer.status,
            answer.output
        );
        Ok(answer.output.trim_end_matches('\n').to_owned())
    }

    /// Starts a script in the background; [`Shell::finish`] returns its output. The name may be reused after the end of
    /// a script.
    ///
    /// # Errors
    /// As [`Shell::must`].
    fn start(&mut self, name: &str, script: &str) -> Result<()> {
        let job = format!(
            "rm -f /run/jobs/{name}.status\ncat >/run/jobs/{name} <<'END OF JOB'\n{script}\nEND OF JOB\n\
             (sh /run/jobs/{name} >/run/jobs/{name}.out 2>&1; echo $? >/run/jobs/{name}.tmp; \
             mv /run/jobs/{name}.tmp /run/jobs/{name}.status) </dev/null >/dev/null 2>&1 &"
        );
        self.must(&job).map(drop)
    }

    /// Waits for the end of a script given to [`Shell::start`].
    ///
    /// # Errors
    /// When it does not end within `limit`.
    fn finish(&mut self, name: &str, limit: Bound) -> Result<ScriptOutput> {
        let wait = format!("while ! [ -e /run/jobs/{name}.status ]; do sleep 0.1; done; cat /run/jobs/{name}.status");
        let ended = self.run_within(&wait, limit)?;
        let output = self.run(&format!("cat /run/jobs/{name}.out"))?.output;
        if ended.status != 0 {
            bail!("the guest's job '{name}' did not end within {limit}; its output:\n{output}");
        }
        let status = ended.output.trim();
        let status = status.parse().with_context(|| format!("the exit status of the job '{name}': '{status}'"))?;
        Ok(ScriptOutput { status, output })
    }

    /// Returns true if a script given to [`Shell::start`] still runs.
    ///
    /// # Errors
    /// As [`Shell::run`].
    fn is_running(&mut self, name: &str) -> Result<bool> {
        Ok(self.run(&format!("[ -e /run/jobs/{name}.status ]"))?.status != 0)
    }
}
