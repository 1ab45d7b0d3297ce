//! The guest of a QEMU that a document starts.

use anyhow::{Context, Result};
use mqblk_test_bounds::Bound;

use super::sandbox::{Guests, Sandbox};
use super::script::Script;
use super::terminal::Terminal;
use crate::guest::agent::Agent;
use crate::guest::{GuestKernel, KERNEL_PARAMETERS, ScriptOutput, Shell};

/// Limit for QEMU to open its sockets.
const QEMU_WITHIN: Bound = Bound::seconds(30);
/// Limit for the guest to boot; an emulated one on an idle host needs a few seconds.
const BOOT_WITHIN: Bound = Bound::seconds(90);

/// A guest, queried through its agent.
pub struct Visitor {
    agent: Agent,
}

impl Visitor {
    /// Returns the value of `$GUEST` in documents: the options of the guest, here a kernel with an initramfs, and the
    /// port of its agent.
    pub(super) fn options(sandbox: &Sandbox, guests: &Guests, number: usize) -> Result<String> {
        let folder = match guests.vmm.kernel() {
            GuestKernel::System => "/media/guest",
            GuestKernel::Trixie => "/media/guest/trixie",
        };
        // In a file, because the kernel's parameters have blanks, and $GUEST is split at them.
        let config = format!("/media/guest-{number}.cfg");
        let machine = format!(
            "[machine]\n  kernel = \"{folder}/vmlinux\"\n  initrd = \"{folder}/initramfs.cpio\"\n  append = \"{KERNEL_PARAMETERS}\"\n"
        );
        std::fs::write(sandbox.outside(&config), machine)?;
        Ok(format!(
            "-display none -nic none -readconfig {config} -serial file:/media/console-{number} \
             -chardev socket,id=agent,path=/media/agent-{number},server=on,wait=off -device virtio-serial-pci \
             -device virtserialport,chardev=agent,name=agent"
        ))
    }

    /// Waits until the guest is ready. Waits for an incoming guest until QEMU awaits it.
    pub(super) fn arrive(
        sandbox: &Sandbox,
        terminal: &mut Terminal,
        number: usize,
        script: &Script,
    ) -> Result<Visitor> {
        let socket = sandbox.outside(&format!("/media/agent-{number}"));
        terminal.until(QEMU_WITHIN, |_| socket.exists()).context("QEMU opens no port for the guest's agent")?;
        let mut agent = Agent::connect(&socket)?;
        if let Some(port) = incoming_port(script.last()) {
            let file = format!("/proc/{}/net", sandbox.pid());
            terminal
                .until(QEMU_WITHIN, |_| listens(&file, port))
                .with_context(|| format!("QEMU does not listen at port {port}"))?;
            return Ok(Visitor { agent });
        }
        let result = agent.wait_ready(BOOT_WITHIN, &mut || match terminal.ended()? {
            None => Ok(()),
            Some(status) => Err(anyhow::anyhow!("QEMU ended: {status}")),
        });
        let console = || std::fs::read(sandbox.outside(&format!("/media/console-{number}"))).unwrap_or_default();
        result.with_context(|| format!("the guest's console:\n{}", String::from_utf8_lossy(&console())))?;
        Ok(Visitor { agent })
    }

    /// Takes over the guest that was at `other`.
    pub(super) fn follow(&mut self, other: &Self) {
        self.agent.continue_script_numbers_of(&other.agent);
    }
}

impl Shell for Visitor {
    fn run_within(&mut self, script: &str, limit: Bound) -> Result<ScriptOutput> {
        self.agent.run(script, limit, &mut || Ok(())).with_context(|| format!("running: {script}"))
    }
}

/// Returns the port at which a QEMU with this command line awaits a guest.
fn incoming_port(command: &str) -> Option<u16> {
    let mut words = command.split_whitespace().skip_while(|word| *word != "-incoming");
    words.nth(1)?.strip_prefix("tcp:")?.rsplit(':').next()?.parse().ok()
}

/// Returns true if a process listens at the TCP port in the network of this /proc/PID/net.
fn listens(net: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = std::fs::read_to_string(format!("{net}/{table}")).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            // State 0A is LISTEN.
            words.next().is_some_and(|local| local.ends_with(&wanted)) && words.nth(1) == Some("0A")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::incoming_port;

    #[test]
    fn the_port_of_an_incoming_guest() {
        assert_eq!(incoming_port("qemu-system-x86_64 -m 1G -incoming tcp:0:4444 -smp 2"), Some(4444));
        assert_eq!(incoming_port("qemu-system-x86_64 -m 1G"), None);
        assert_eq!(incoming_port("qemu-system-x86_64 -incoming defer"), None);
    }
}
