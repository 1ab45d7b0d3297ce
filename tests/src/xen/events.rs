//! Counters of a backend's activity, from outside: calls of dom0's kernel functions, and events.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::host::XenHost;
use crate::guest::Shell;

const TRACING: &str = "/sys/kernel/tracing";
/// Setting that turns kprobes into jumps (Documentation/trace/kprobes.rst).
const OPTIMIZATION: &str = "/proc/sys/debug/kprobes-optimization";
const SYMBOLS: &str = "/tmp/probed-symbols";

/// A function of dom0's kernel whose calls are counted.
#[derive(Debug, Clone, Copy)]
pub struct KernelProbe {
    /// The function.
    pub function: &'static str,
    /// Argument of the function that is summed up, in kprobe syntax: `%cx:u32` is a fourth argument.
    pub summed_argument: Option<&'static str>,
}

/// Counts of a probe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Number of calls.
    pub calls: u64,
    /// Sum of the argument; 0 if none is summed.
    pub sum: u64,
}

/// Kprobes in dom0's kernel (Documentation/trace/kprobetrace.rst, histogram.rst).
#[derive(Debug)]
pub struct KernelProbes {
    probes: Vec<KernelProbe>,
}

impl KernelProbes {
    /// Starts counting the calls of these functions. A function that the kernel lacks, because its module is not
    /// loaded, counts as never called.
    ///
    /// # Errors
    /// When the kernel refuses a probe of an existing function.
    pub fn start(host: &mut XenHost, probes: &[KernelProbe]) -> Result<Self> {
        let functions: Vec<&str> = probes.iter().map(|probe| probe.function).collect();
        // The symbols are read once: an emulated dom0 takes seconds for all of them. Jumps instead of breakpoints would
        // make the kernel stop all CPUs once more a moment later.
        let mut script = format!(
            "set -e; [ -e {TRACING}/kprobe_events ] || mount -t tracefs tracefs {TRACING}\ncd {TRACING}
             [ ! -e {OPTIMIZATION} ] || echo 0 >{OPTIMIZATION}
             grep -E ' [tT] ({})(\\s|$)' /proc/kallsyms >{SYMBOLS} || true\n",
            functions.join("|")
        );
        for KernelProbe { function, summed_argument: summed } in probes {
            let (argument, values) = match summed {
                Some(place) => (format!("number={place}"), ":vals=number"),
                None => (String::new(), ""),
            };
            script.push_str(&format!(
                "if grep -q ' {function}\\(\\s\\|$\\)' {SYMBOLS}; then
                     echo 'p:{function} {function} {argument}' >>kprobe_events
                     echo 'hist:keys=common_cpu{values}' >events/kprobes/{function}/trigger
                     echo 1 >events/kprobes/{function}/enable
                 fi\n"
            ));
        }
        host.must(&script)?;
        Ok(Self { probes: probes.to_vec() })
    }

    /// Returns the counts of each function so far.
    ///
    /// # Errors
    /// When the kernel does not provide them.
    pub fn counts(&self, host: &mut XenHost) -> Result<BTreeMap<&'static str, CallCounts>> {
        let mut counts = BTreeMap::new();
        for KernelProbe { function, .. } in &self.probes {
            // A line of the histogram: { common_cpu: 0 } hitcount: 12 number: 34
            let script = format!(
                "cd {TRACING}/events/kprobes/{function} 2>/dev/null || {{ echo 0 0; exit 0; }}
                 awk '/hitcount:/ {{ for (i = 1; i < NF; i++) {{
                     if ($i == \"hitcount:\") calls += $(i + 1)
                     if ($i == \"number:\") sum += $(i + 1) }} }} END {{ print calls + 0, sum + 0 }}' hist"
            );
            let text = host.must(&script)?;
            let (calls, sum) = text.split_once(' ').with_context(|| format!("CALLS SUM, found {text}"))?;
            counts.insert(*function, CallCounts { calls: calls.parse()?, sum: sum.parse()? });
        }
        Ok(counts)
    }

    /// Removes the probes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn stop(self, host: &mut XenHost) -> Result<()> {
        let mut script = format!("cd {TRACING}\n");
        for KernelProbe { function, .. } in &self.probes {
            script.push_str(&format!(
                "if [ -d events/kprobes/{function} ]; then
                     echo 0 >events/kprobes/{function}/enable
                     echo '!'\"$(head -n 1 events/kprobes/{function}/trigger)\" >events/kprobes/{function}/trigger
                 fi\n"
            ));
        }
        script.push_str("echo >kprobe_events");
        host.must(&script).map(drop)
    }
}

/// Returns the counts, over all CPUs, of the lines in /proc/interrupts that contain `name`.
///
/// # Errors
/// As [`Shell::must`].
pub fn interrupts(shell: &mut impl Shell, name: &str) -> Result<Vec<u64>> {
    let text = shell.must(&format!(
        "awk 'NR == 1 {{ cpus = NF; next }} index($0, \"{name}\") {{ sum = 0; for (i = 2; i <= cpus + 1; i++) sum += $i; print sum }}' \
         /proc/interrupts"
    ))?;
    text.lines().map(|line| Ok(line.trim().parse()?)).collect()
}
