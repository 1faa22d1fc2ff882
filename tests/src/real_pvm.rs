//! Runs Debian's PVM 3.4.6 on the hosts of a testbed, for comparisons with Sempa.

use crate::run::{RunningCommand, run_to_end, wait_for};
use crate::ssh;
use crate::testbed::{Host, Testbed, wait_until_no_process};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for the start and for the end of daemons.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(30);
/// File on each host to which PVM's daemon writes its address.
const ADDRESS_PATH: &str = "/tmp/pvmd.0";
/// File on each host to which PVM's daemon writes its log.
const LOG_PATH: &str = "/tmp/pvml.0";

/// A virtual machine of PVM's own daemons, with its master on h1. The testbed must be made without
/// the programs of Sempa.
#[derive(Debug)]
pub struct RealVm<'a> {
    testbed: &'a Testbed,
    rsh_script: PathBuf,
    master: RunningCommand,
}

impl<'a> RealVm<'a> {
    /// Starts the master and waits until programs can connect.
    ///
    /// # Errors
    /// PVM is not installed or does not start.
    pub fn start(testbed: &'a Testbed) -> Result<Self> {
        // PVM_RSH must be a single word, so a script is needed.
        let rsh_script = testbed.folder().join("rsh");
        fs::write(
            &rsh_script,
            format!(
                "#!/bin/sh\nexec {} \"$@\"\n",
                ssh::remote_shell_command(testbed.folder(), "root")
            ),
        )?;
        fs::set_permissions(&rsh_script, fs::Permissions::from_mode(0o755))?;
        let master = RunningCommand::start(
            pvm_command(testbed.host(1), &rsh_script, Path::new("/usr/bin/pvmd")),
            Stdio::null(),
        )?;
        let vm = RealVm {
            testbed,
            rsh_script,
            master,
        };
        wait_for(DAEMON_TIMEOUT, || {
            if vm.testbed.host(1).machine_path(ADDRESS_PATH).exists() {
                return Ok(());
            }
            Err(format!(
                "PVM's daemon gives no address: {:?}",
                vm.master.stdout_so_far()
            ))
        })?;
        Ok(vm)
    }

    /// Returns a command that runs `program` on a host with the environment variables of PVM.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        pvm_command(host, &self.rsh_script, program.as_ref())
    }

    /// Returns the path of the script that PVM runs instead of ssh. The script accepts ssh's
    /// arguments and reaches the hosts of the testbed.
    pub fn rsh_script(&self) -> &Path {
        &self.rsh_script
    }

    /// Returns the master's log.
    pub fn master_log(&self) -> String {
        fs::read_to_string(self.testbed.host(1).machine_path(LOG_PATH)).unwrap_or_default()
    }

    /// Ends the virtual machine. Kills every PVM process that remains on the hosts, because PVM's
    /// own `halt` is not reliable.
    ///
    /// # Errors
    /// A process cannot be ended.
    pub fn halt_or_kill(self) -> Result<()> {
        let master = self.testbed.host(1);
        let mut end_command = master.root_command("/bin/sh");
        end_command.args(["-c", "kill -TERM $(pidof pvmd)"]);
        run_to_end(end_command, DAEMON_TIMEOUT)?;
        for host in self.testbed.hosts() {
            // The master requests the slaves to end. A slave that does not end is killed.
            let slave_end_result = wait_until_no_process(host, "pvm", Duration::from_secs(3));
            if slave_end_result.is_err() {
                host.kill_all_processes();
                wait_until_no_process(host, "pvm", DAEMON_TIMEOUT)?;
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

fn pvm_command(host: &Host, rsh_script: &Path, program: &Path) -> Command {
    let mut command = host.root_command(program);
    command
        .env("PVM_ALLOW_ROOT", "1")
        .env("PVM_RSH", rsh_script);
    command
}
