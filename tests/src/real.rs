//! PVM 3.4.6 as Debian has it, on the hosts of a testbed: what tests compare ours with.

use crate::run::{Running, eventually, run};
use crate::ssh;
use crate::testbed::{Host, Testbed, gone};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time for daemons to come up and to go.
const UP_TIME: Duration = Duration::from_secs(30);
/// Where its daemon writes its address, on each host.
const ADDRESS: &str = "/tmp/pvmd.0";
/// Where its daemon writes its log, on each host.
const LOG: &str = "/tmp/pvml.0";

/// A virtual machine of PVM's own daemons, its master on h1. Make the testbed without installed programs of ours.
#[derive(Debug)]
pub struct RealVm<'a> {
    bed: &'a Testbed,
    rsh: PathBuf,
    daemon: Running,
}

impl<'a> RealVm<'a> {
    /// Starts the master and waits until programs can connect.
    ///
    /// # Errors
    /// PVM is not installed or does not come up.
    pub fn start(bed: &'a Testbed) -> Result<RealVm<'a>> {
        // PVM_RSH is one word.
        let rsh = bed.folder().join("rsh");
        fs::write(
            &rsh,
            format!(
                "#!/bin/sh\nexec {} \"$@\"\n",
                ssh::remote_shell(bed.folder(), "root")
            ),
        )?;
        fs::set_permissions(&rsh, fs::Permissions::from_mode(0o755))?;
        let daemon = Running::start(
            in_host(bed.host(1), &rsh, Path::new("/usr/bin/pvmd")),
            Stdio::null(),
        )?;
        let vm = RealVm { bed, rsh, daemon };
        eventually(UP_TIME, || {
            if vm.bed.host(1).path(ADDRESS).exists() {
                return Ok(());
            }
            Err(format!(
                "PVM's daemon gives no address: {:?}",
                vm.daemon.out_so_far()
            ))
        })?;
        Ok(vm)
    }

    /// A command on a host with the environment of this virtual machine's user.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        in_host(host, &self.rsh, program.as_ref())
    }

    /// A program that is called as ssh is and reaches the hosts of the testbed.
    pub fn remote_shell(&self) -> &Path {
        &self.rsh
    }

    /// The master's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.bed.host(1).path(LOG)).unwrap_or_default()
    }

    /// Ends it and everything that it may have left on the hosts: PVM's own `halt` forgets now and then.
    ///
    /// # Errors
    /// Something cannot be ended.
    pub fn halt(self) -> Result<()> {
        let master = self.bed.host(1);
        let mut end = master.command("/bin/sh");
        end.args(["-c", "kill -TERM $(pidof pvmd)"]);
        run(end, UP_TIME)?;
        for host in self.bed.hosts() {
            // The master has told the slaves; what does not listen is ended by force.
            let asked = gone(host, "pvm", Duration::from_secs(3));
            if asked.is_err() {
                host.kill_all();
                gone(host, "pvm", UP_TIME)?;
            }
            for entry in fs::read_dir(host.path("/tmp"))
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
