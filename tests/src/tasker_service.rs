//! The tasker service on the hosts of a testbed, with one site key for all of them.

use crate::Testbed;
use crate::layout::prefix_in_hosts;
use crate::run::{CommandResult, RunningCommand, wait_for};
use crate::testbed::Host;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::tasker_service::SOCKET_PATH;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Time limit for the service to listen, and for it to end.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The service of each host. Dropping this value ends the services; their taskers end with their
/// daemons.
#[derive(Debug)]
pub struct TaskerServices<'a> {
    testbed: &'a Testbed,
    services: Vec<RunningCommand>,
    key_path: PathBuf,
    /// Command that starts the service, which is its last argument; empty for none.
    wrapper: Vec<String>,
}

impl<'a> TaskerServices<'a> {
    /// Creates a site key, and starts the service on all hosts. `key_dir` is a directory that only
    /// root can change.
    ///
    /// # Errors
    /// A service does not listen.
    pub fn start(testbed: &'a Testbed, key_dir: &Path) -> Result<Self> {
        Self::start_wrapped(testbed, key_dir, &[])
    }

    /// As [`TaskerServices::start`]; the command `wrapper` starts each service, which is its last
    /// argument.
    ///
    /// # Errors
    /// A service does not listen.
    pub fn start_wrapped(testbed: &'a Testbed, key_dir: &Path, wrapper: &[&str]) -> Result<Self> {
        ensure!(
            !key_dir.starts_with("/tmp") || key_dir.starts_with(testbed.folder()),
            "{} is not visible on the hosts, which have a /tmp of their own: build in a folder \
             outside of /tmp",
            key_dir.display()
        );
        let key_path = key_dir.join(format!("site-key-{}", std::process::id()));
        fs::write(&key_path, site_key_text())?;
        fs::set_permissions(&key_path, PermissionsExt::from_mode(0o600))?;
        let mut services = Self {
            testbed,
            services: Vec::new(),
            key_path,
            wrapper: wrapper.iter().map(ToString::to_string).collect(),
        };
        for host in testbed.hosts() {
            let service = services.start_on(host)?;
            services.services.push(service);
        }
        Ok(services)
    }

    /// Starts the service on each host if none runs, with these environment variables. The services
    /// end with the testbed.
    ///
    /// # Errors
    /// A service does not listen.
    pub(crate) fn start_until_end_of_testbed(
        testbed: &Testbed,
        env: &[(String, String)],
    ) -> Result<()> {
        if testbed.host(1).machine_path(SOCKET_PATH).exists() {
            return Ok(());
        }
        if let Some(folder) = testbed.breakpoints_folder() {
            // The daemons of the user write there.
            fs::set_permissions(folder, PermissionsExt::from_mode(0o777))?;
        }
        let assignments: Vec<String> = env
            .iter()
            .map(|(n, value)| format!("{n}={value}"))
            .collect();
        let mut wrapper = vec!["env"];
        wrapper.extend(assignments.iter().map(String::as_str));
        let key_dir = crate::machine::build_folder()?;
        let services = TaskerServices::start_wrapped(testbed, &key_dir, &wrapper)?;
        std::mem::forget(services);
        Ok(())
    }

    fn start_on(&self, host: &Host) -> Result<RunningCommand> {
        let prefix = self.testbed.prefix().context("programs are installed")?;
        let program = prefix_in_hosts(prefix).join("sbin/pvm-taskerd");
        let words = self.wrapper.iter().map(PathBuf::from).chain([program]);
        let words: Vec<PathBuf> = words.collect();
        let mut command = host.root_command(&words[0]);
        command.args(&words[1..]);
        command.env("SEMPA_SITE_KEY", &self.key_path);
        if let Some(engine) = self.testbed.engine() {
            command.env("SEMPA_CRIU", engine);
        }
        let service = RunningCommand::start(command, Stdio::null())?;
        let socket = host.machine_path(SOCKET_PATH);
        wait_for(TIMEOUT, || match socket.exists() {
            true => Ok(()),
            false => Err(format!("the service of {} does not listen", host.name())),
        })?;
        Ok(service)
    }

    /// Ends the service of host number `i` and starts another one. Its taskers go on.
    ///
    /// # Errors
    /// The new service does not listen.
    pub fn restart(&mut self, i: usize) -> Result<CommandResult> {
        let host = self.testbed.host(i);
        kill_service(host);
        fs::remove_file(host.machine_path(SOCKET_PATH)).context("the socket")?;
        let new_service = self.start_on(host)?;
        std::mem::replace(&mut self.services[i - 1], new_service).wait_or_kill(TIMEOUT)
    }
}

impl Drop for TaskerServices<'_> {
    fn drop(&mut self) {
        for host in self.testbed.hosts() {
            kill_service(host);
        }
        let _ = fs::remove_file(&self.key_path);
    }
}

fn kill_service(host: &Host) {
    let is_service = |line: &str| line.ends_with("pvm-taskerd");
    for (pid, _) in host.processes().iter().filter(|(_, line)| is_service(line)) {
        // The process may have ended already.
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
    }
}

/// Returns the text of a key file with a key that is used in tests only.
fn site_key_text() -> String {
    let key: String = (0..32).map(|byte| format!("{:02x}", byte * 7)).collect();
    format!("sempa site key 1\ncurrent {key}\n")
}
