//! Runs Debian's PVM 3.4.6 on the hosts of a testbed, for comparisons with Sempa.

use crate::run::{RunningCommand, run, wait_for};
use crate::ssh;
use crate::testbed::{Host, Testbed, wait_until_no_process};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for daemons to start, and for them to end.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);
/// File on each host to which PVM's daemon writes its address.
const ADDRESS: &str = "/tmp/pvmd.0";
/// File on each host to which PVM's daemon writes its log.
const LOG: &str = "/tmp/pvml.0";

/// A virtual machine of PVM's own daemons, with its master on h1. The testbed must be made without
/// the programs of Sempa.
#[derive(Debug)]
pub struct RealVm<'a> {
    bed: &'a Testbed,
    rsh: PathBuf,
    daemon: RunningCommand,
}

impl<'a> RealVm<'a> {
    /// Starts the master and waits until programs can connect.
    ///
    /// # Errors
    /// PVM is not installed or does not start.
    pub fn start(bed: &'a Testbed) -> Result<RealVm<'a>> {
        // PVM_RSH must be a single word, so a script is needed.
        let rsh = bed.folder().join("rsh");
        fs::write(
            &rsh,
            format!(
                "#!/bin/sh\nexec {} \"$@\"\n",
                ssh::remote_shell(bed.folder(), "root")
            ),
        )?;
        fs::set_permissions(&rsh, fs::Permissions::from_mode(0o755))?;
        let daemon = RunningCommand::start(
            in_host(bed.host(1), &rsh, Path::new("/usr/bin/pvmd")),
            Stdio::null(),
        )?;
        let vm = RealVm { bed, rsh, daemon };
        wait_for(STARTUP_TIMEOUT, || {
            if vm.bed.host(1).machine_path(ADDRESS).exists() {
                return Ok(());
            }
            Err(format!(
                "PVM's daemon gives no address: {:?}",
                vm.daemon.out_so_far()
            ))
        })?;
        Ok(vm)
    }

    /// Returns a command that runs `program` on a host with the environment of the virtual
    /// machine's user.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        in_host(host, &self.rsh, program.as_ref())
    }

    /// Returns the path of a program that takes the arguments of ssh and reaches the hosts of the
    /// testbed.
    pub fn remote_shell(&self) -> &Path {
        &self.rsh
    }

    /// Returns the master's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.bed.host(1).machine_path(LOG)).unwrap_or_default()
    }

    /// Ends the virtual machine. Kills every process that remains on the hosts, because PVM's own
    /// `halt` is not reliable.
    ///
    /// # Errors
    /// A process cannot be ended.
    pub fn halt(self) -> Result<()> {
        let master = self.bed.host(1);
        let mut end = master.command("/bin/sh");
        end.args(["-c", "kill -TERM $(pidof pvmd)"]);
        run(end, STARTUP_TIMEOUT)?;
        for host in self.bed.hosts() {
            // The master requests the slaves to end. Those that do not end are killed.
            let asked = wait_until_no_process(host, "pvm", Duration::from_secs(3));
            if asked.is_err() {
                host.kill_all();
                wait_until_no_process(host, "pvm", STARTUP_TIMEOUT)?;
            }
            for entry in fs::read_dir(host.machine_path("/tmp"))
                .context("/tmp of a host")?
                .flatten()
            {
                if entry.file_name().to_string_lossy().starts_with("pvm") {
                    fs::remove_file(entry.path())?;
                }
            }
        }
        Ok(())
    }
}

fn in_host(host: &Host, rsh: &Path, program: &Path) -> Command {
    let mut command = host.command(program);
    command.env("PVM_ALLOW_ROOT", "1").env("PVM_RSH", rsh);
    command
}
