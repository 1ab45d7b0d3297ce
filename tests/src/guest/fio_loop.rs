//! A verifying fio that runs in the background of a test.

use anyhow::Result;
use mqblk_test_bounds::Bound;

use super::fio::{FioJobs, FioOutcome};
use super::shell::Shell;

/// A pass over 4 MiB takes seconds; the limit is generous.
const PASS_TIMEOUT: Bound = Bound::seconds(180);

/// Random writes of mixed sizes to the beginning of a disk, then reads of all of them, repeated until it is stopped.
#[derive(Debug)]
pub struct FioLoop {
    name: String,
    node: String,
}

impl FioLoop {
    /// Starts it on the first `mib` MiB of `node`, with `depth` requests in flight, and waits for the end of its first
    /// pass.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn start(guest: &mut impl Shell, node: &str, depth: u32, mib: u32) -> Result<Self> {
        let looping = Self::launch(guest, node, depth, mib)?;
        looping.passes(guest, 1)?;
        Ok(looping)
    }

    /// As [`FioLoop::start`], without waiting.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn launch(guest: &mut impl Shell, node: &str, depth: u32, mib: u32) -> Result<Self> {
        let name = format!("loop{}", node.replace('/', "-"));
        let pass = FioJobs::new(&format!(
            "--name=pass --filename={node} --allow_file_create=0 --ioengine=io_uring --direct=1 --thread --iodepth={depth} --rw=randwrite \
             --bssplit=4k/60:16k/20:64k/20 --verify=crc32c --verify_fatal=1 --do_verify=1 --size={mib}M --randseed=$((passes + 1))",
        ))
        .script(&name);
        guest.start(
            &name,
            &format!(
                "rm -f /run/{name}.*
                 passes=0
                 until [ -e /run/{name}.end ]; do
                     ({pass}) >/run/{name}.pass 2>&1 || {{ cat /run/{name}.pass; exit 1; }}
                     passes=$((passes + 1))
                     echo $passes >/run/{name}.new; mv /run/{name}.new /run/{name}.passes
                 done
                 cat /run/{name}.pass"
            ),
        )?;
        Ok(Self { name, node: node.to_owned() })
    }

    /// Waits until the disk has completed `more` writes from now on.
    ///
    /// # Errors
    /// When the loop ends before.
    pub fn wait_for_writes(&self, guest: &mut impl Shell, more: u32) -> Result<()> {
        let (name, disk) = (&self.name, self.node.trim_start_matches("/dev/"));
        let script = format!(
            "writes() {{ read -r _ _ _ _ count _ </sys/block/{disk}/stat; }}
             writes; wanted=$((count + {more}))
             until writes; [ $count -ge $wanted ]; do
                 if [ -e /run/jobs/{name}.status ]; then cat /run/jobs/{name}.out; exit 1; fi
                 sleep 0.1
             done"
        );
        guest.must_within(&script, PASS_TIMEOUT).map(drop)
    }

    /// Waits for the end of a pass that began after this call.
    ///
    /// # Errors
    /// When the verification has failed.
    pub fn another_pass(&self, guest: &mut impl Shell) -> Result<()> {
        self.passes(guest, 2)
    }

    fn passes(&self, guest: &mut impl Shell, more: u32) -> Result<()> {
        let name = &self.name;
        let script = format!(
            "passes() {{ count=0; ! [ -e /run/{name}.passes ] || read -r count </run/{name}.passes; }}
             passes; wanted=$((count + {more}))
             until passes; [ $count -ge $wanted ]; do
                 if [ -e /run/jobs/{name}.status ]; then cat /run/jobs/{name}.out; exit 1; fi
                 sleep 0.1
             done"
        );
        guest.must_within(&script, PASS_TIMEOUT).map(drop)
    }

    /// Stops it after the current pass.
    ///
    /// # Errors
    /// When a verification has failed.
    pub fn end(self, guest: &mut impl Shell) -> Result<()> {
        guest.must(&format!("touch /run/{}.end", self.name))?;
        let answer = guest.finish(&self.name, PASS_TIMEOUT)?;
        FioOutcome::read(answer.status, &answer.output)?.must_have_verified().map(drop)
    }
}
