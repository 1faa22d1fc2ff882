//! A testbed: hosts h1..hN and an additional host on one bridge, each in its own namespaces.
//!
//! The additional host is called the outside host, because it belongs to no virtual machine; its
//! name is `desk`. The bridge is in the network namespace of the outside host. Therefore the
//! machine's network does not change, any number of testbeds can exist at once, and the kernel
//! removes the network when the testbed's process ends. A testbed whose process was killed leaves
//! one folder; its outside host or the next testbed removes the folder.

pub use crate::layout::{ALICE, ALICE_UID, Account, BOB, CAROL, NETWORK_PREFIX, OLGA_UID, ROOT};

use crate::hosts::HostPlan;
use crate::layout::{ORDINARY_USERS, home_of, prefix_in_hosts};
use crate::run::{CommandResult, RunningCommand, run_successfully, run_to_end, wait_for};
use crate::{machine, ssh_settings};
use anyhow::{Context, Result, bail};
use procfs::process::all_processes;
use sempa_proto::tasker_service::{SESSIONS_DIR, SOCKET_PATH};
use sempa_service_settings::host_account::ACCOUNT_DIR;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// Maximum number of hosts of a testbed, without the outside host.
pub const HOST_COUNT_MAX: usize = 32;
/// Time limit for a program to start on a loaded machine.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Parent of the folders of all testbeds. All users can access it, whatever TMPDIR is.
const TESTBEDS_FOLDER: &str = "/tmp";
/// Beginning of the name of a testbed's folder. The number of the testbed's process follows.
const FOLDER_PREFIX: &str = "sempa-testbed-";
/// Directories of the tasker service, which outlive the service.
const SERVICE_DIRS: [&str; 3] = ["/run/sempa", SESSIONS_DIR, ACCOUNT_DIR];
/// Files that the tasker service, its load watcher and its taskers keep.
const SERVICE_FILES: [&str; 4] = [
    SOCKET_PATH,
    "/run/sempa/owner.sock",
    "/run/sempa/account/lock",
    "/run/sempa/guest-cap",
];

/// A host of the testbed, or its outside host.
#[derive(Debug)]
pub struct Host {
    name: String,
    init_pid: u32,
    root_home: PathBuf,
    prefix_in_host: Option<PathBuf>,
    outer_process: Child,
    outer_stdin: Option<ChildStdin>,
}

/// A running testbed: its hosts and its outside host.
#[derive(Debug)]
pub struct Testbed {
    folder: PathBuf,
    engine: Option<PathBuf>,
    breakpoints_folder: Option<PathBuf>,
    prefix: Option<PathBuf>,
    outside_host: Host,
    hosts: Vec<Host>,
}

/// The parameters of a new testbed.
#[derive(Clone, Copy, Debug)]
struct TestbedParameters<'a> {
    host_count: usize,
    prefix: Option<&'a Path>,
    shared_folders: &'a [&'a Path],
    has_own_engine: bool,
    env: &'a [(&'a str, &'a str)],
}

impl Testbed {
    /// Makes `host_count` hosts named h1, h2, …. The folders in `shared_folders` are visible on all
    /// hosts. `prefix` is the folder where the programs are installed.
    ///
    /// # Errors
    /// The machine does not meet a requirement ([`machine::unmet_requirement`]) or the kernel
    /// refuses a request. Nothing of the testbed remains.
    pub fn new(host_count: usize, prefix: Option<&Path>, shared_folders: &[&Path]) -> Result<Self> {
        Self::create(&TestbedParameters {
            host_count,
            prefix,
            shared_folders,
            has_own_engine: false,
            env: &[],
        })
    }

    /// As [`Testbed::new`]. On all hosts `SEMPA_CRIU` is [`Testbed::engine`], a link to the real
    /// CRIU. A test may replace the link. Daemons stop at breakpoints in
    /// [`Testbed::breakpoints_folder`].
    pub fn with_own_engine(host_count: usize, prefix: Option<&Path>) -> Result<Self> {
        Self::create(&TestbedParameters {
            host_count,
            prefix,
            shared_folders: &[],
            has_own_engine: true,
            env: &[],
        })
    }

    /// As [`Testbed::with_own_engine`], with additional environment variables for daemons that are
    /// started through ssh.
    ///
    /// # Errors
    /// As [`Testbed::new`].
    pub fn with_env(
        host_count: usize,
        prefix: Option<&Path>,
        env: &[(&str, &str)],
    ) -> Result<Self> {
        Self::create(&TestbedParameters {
            host_count,
            prefix,
            shared_folders: &[],
            has_own_engine: true,
            env,
        })
    }

    fn create(parameters: &TestbedParameters<'_>) -> Result<Self> {
        let host_count = parameters.host_count;
        if let Some(lack) = machine::unmet_requirement() {
            bail!("no testbed: {lack}");
        }
        if !(1..=HOST_COUNT_MAX).contains(&host_count) {
            bail!("a testbed has 1 to {HOST_COUNT_MAX} hosts, not {host_count}");
        }
        remove_stale_folders();
        let folder = make_folder()?;
        let testbed = Self::start_hosts(&folder, parameters);
        if testbed.is_err() {
            let _ = fs::remove_dir_all(&folder);
        }
        testbed
    }

    fn start_hosts(folder: &Path, parameters: &TestbedParameters<'_>) -> Result<Self> {
        let &TestbedParameters {
            host_count: count,
            prefix,
            shared_folders,
            has_own_engine: uses_own_engine,
            env,
        } = parameters;
        let host_names: Vec<String> = (1..=count).map(|i| format!("h{i}")).collect();
        let root_home = home_of(folder, "root");
        fs::create_dir_all(root_home.join("pvm3/bin/LINUX64"))?;
        for Account { name, uid } in ORDINARY_USERS {
            let user_home = home_of(folder, name);
            fs::create_dir_all(user_home.join("pvm3/bin/LINUX64"))?;
            std::os::unix::fs::chown(&user_home, Some(uid), Some(uid))?;
        }
        write_etc_files(folder, &host_names)?;
        let host_prefix = prefix.map(prefix_in_hosts);
        let mut remote_env = format!(
            "PATH={} PVM_ALLOW_ROOT=1",
            search_path(host_prefix.as_deref())
        );
        let mut engine = std::env::var_os("SEMPA_CRIU").map(PathBuf::from);
        if uses_own_engine {
            let engine_link = folder.join("engine");
            let real_engine = machine::find_engine().context("no CRIU: run cargo xtask criu")?;
            std::os::unix::fs::symlink(real_engine, &engine_link)?;
            engine = Some(engine_link);
        }
        if let Some(engine) = &engine {
            remote_env.push_str(&format!(" SEMPA_CRIU={}", engine.display()));
        }
        let breakpoints_folder = uses_own_engine.then(|| folder.join("steps"));
        if let Some(breakpoints_folder) = &breakpoints_folder {
            fs::create_dir(breakpoints_folder)?;
            remote_env.push_str(&format!(
                " SEMPA_TEST_STEPS={}",
                breakpoints_folder.display()
            ));
        }
        remote_env.extend(env.iter().map(|(name, value)| format!(" {name}={value}")));
        ssh_settings::make_keys_and_settings(folder, &host_names, &remote_env)?;
        let visible_folders = visible_folders(folder, shared_folders, prefix);
        let make_plan = |name: &str, remove_at_end| HostPlan {
            name: name.to_string(),
            visible_folders: visible_folders.clone(),
            replaced_files: ["hosts", "passwd", "group", "shadow"]
                .map(|file| (folder.join(file), Path::new("/etc").join(file)))
                .to_vec(),
            remove_at_end,
        };
        let outside_host = Host::start(
            folder,
            make_plan("desk", Some(folder.to_path_buf())),
            &root_home,
            host_prefix.clone(),
        )?;
        let mut hosts = Vec::new();
        for name in &host_names {
            hosts.push(Host::start(
                folder,
                make_plan(name, None),
                &root_home,
                host_prefix.clone(),
            )?);
        }
        let prefix = prefix.map(Path::to_path_buf);
        let testbed = Self {
            folder: folder.to_path_buf(),
            engine,
            breakpoints_folder,
            prefix,
            outside_host,
            hosts,
        };
        testbed.connect_hosts()?;
        for host in &testbed.hosts {
            start_sshd_and_wait(host, folder)?;
        }
        Ok(testbed)
    }

    /// Connects host number `i` to the network if `is_connected` is true; disconnects it otherwise.
    pub fn set_connected(&self, i: usize, is_connected: bool) -> Result<()> {
        self.outside_host
            .run_ip(&format!(
                "link set p{i} {}",
                if is_connected { "up" } else { "down" }
            ))
            .map(drop)
    }

    /// Interrupts the connection between hosts `i` and `j` if `is_partitioned` is true; restores it
    /// otherwise. All other hosts can reach both hosts.
    pub fn set_partitioned(&self, i: usize, j: usize, is_partitioned: bool) -> Result<()> {
        for (sending_host, receiving_host) in [(i, j), (j, i)] {
            // Frames for the host `receiving_host` are sent to an unused hardware address.
            let line = if is_partitioned {
                format!(
                    "neigh replace {NETWORK_PREFIX}.{receiving_host} lladdr 02:00:00:00:00:01 nud permanent dev eth0"
                )
            } else {
                format!("neigh del {NETWORK_PREFIX}.{receiving_host} dev eth0")
            };
            self.host(sending_host).run_ip(&line)?;
        }
        Ok(())
    }

    /// Replaces the `/tmp` of host number `i`, which is in memory, by a folder on the disk.
    pub fn move_tmp_to_disk(&self, i: usize) -> Result<()> {
        let disk_folder = self.folder.join(format!("h{i}-tmp"));
        fs::create_dir_all(&disk_folder)?;
        fs::set_permissions(&disk_folder, fs::Permissions::from_mode(0o1777))?;
        let mut command_line = format!("mount --bind {} /tmp", disk_folder.display());
        // The testbed's folder and the installed programs must stay visible. Both may be below
        // `/tmp`.
        let visible_folders = [Some(&self.folder), self.prefix.as_ref()]
            .into_iter()
            .flatten();
        for (fd, (path, relative_path)) in (3..)
            .zip(visible_folders.filter_map(|path| Some((path, path.strip_prefix("/tmp").ok()?))))
        {
            fs::create_dir_all(disk_folder.join(relative_path))?;
            let path = path.display();
            command_line = format!(
                "exec {fd}<{path} && {command_line} && mount --no-canonicalize --bind /proc/self/fd/{fd} {path}"
            );
        }
        self.host(i)
            .run_shell(&command_line, STARTUP_TIMEOUT)?
            .expect_success("another /tmp")
            .map(drop)
    }

    fn connect_hosts(&self) -> Result<()> {
        let run_ip = |line: &str| self.outside_host.run_ip(line);
        run_ip("link add br0 type bridge")?;
        run_ip(&format!("addr add {NETWORK_PREFIX}.254/24 dev br0"))?;
        run_ip("link set br0 up")?;
        for (i, host) in (1..).zip(&self.hosts) {
            run_ip(&format!(
                "link add p{i} type veth peer name eth0 netns {}",
                host.init_pid
            ))?;
            run_ip(&format!("link set p{i} master br0 up"))?;
            for line in [
                format!("addr add {NETWORK_PREFIX}.{i}/24 dev eth0"),
                "link set eth0 up".to_string(),
            ] {
                host.run_ip(&line)?;
            }
        }
        Ok(())
    }

    /// Returns host number `i`, counted from 1 as in its name.
    pub fn host(&self, i: usize) -> &Host {
        &self.hosts[i - 1]
    }

    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the outside host. It is on the network of the hosts, and belongs to no virtual
    /// machine.
    pub fn outside_host(&self) -> &Host {
        &self.outside_host
    }

    /// Returns the testbed's folder. All hosts share it under the same path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the value of `SEMPA_CRIU` on all hosts: the testbed's own engine, or the value in
    /// the environment of this process; `None` if `SEMPA_CRIU` is not set.
    pub fn engine(&self) -> Option<&Path> {
        self.engine.as_deref()
    }

    /// Returns the value of `SEMPA_TEST_STEPS` on all hosts: the folder of breakpoints
    /// ([`crate::faults::Breakpoint`]); `None` if daemons have no breakpoints.
    pub fn breakpoints_folder(&self) -> Option<&Path> {
        self.breakpoints_folder.as_deref()
    }

    /// Returns the folder on the machine where the programs are installed; `None` for a testbed
    /// without programs.
    pub fn prefix(&self) -> Option<&Path> {
        self.prefix.as_deref()
    }

    /// Returns the home folder of root, which all hosts share.
    pub fn root_home(&self) -> PathBuf {
        home_of(&self.folder, "root")
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.stop_and_wait();
        }
        // The outside host removes the testbed's folder before it ends.
        self.outside_host.stop_and_wait();
    }
}

impl Host {
    fn start(folder: &Path, plan: HostPlan, home: &Path, prefix: Option<PathBuf>) -> Result<Self> {
        let host_folder = folder.join(&plan.name);
        fs::create_dir_all(&host_folder)?;
        let plan_file = host_folder.join("plan.json");
        fs::write(&plan_file, serde_json::to_vec(&plan)?)?;
        let program = machine::build_folder()?.join("sempa-host");
        let mut child = Command::new(&program)
            .arg("outer")
            .arg(&plan_file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(host_folder.join("host.log"))?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{} does not start", program.display()))?;
        let child_stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().context("its output is piped")?).lines();
        let (mut init_pid, mut is_ready) = (None, false);
        for line in lines {
            match line?.split_once(' ') {
                Some(("pid", number)) => init_pid = Some(number.parse()?),
                _ => is_ready = true,
            }
            if let (Some(init_pid), true) = (init_pid, is_ready) {
                return Ok(Self {
                    name: plan.name,
                    init_pid,
                    root_home: home.to_path_buf(),
                    prefix_in_host: prefix,
                    outer_process: child,
                    outer_stdin: child_stdin,
                });
            }
        }
        let _ = child.wait();
        bail!(
            "host {} did not come up: {}",
            plan.name,
            fs::read_to_string(host_folder.join("host.log"))?.trim()
        )
    }

    /// Runs `ip` with the arguments in `arguments` in the host's network.
    fn run_ip(&self, arguments: &str) -> Result<CommandResult> {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.init_pid.to_string(), "-n", "--", "ip"])
            .args(arguments.split(' '));
        run_successfully(command, STARTUP_TIMEOUT)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process number that the host's process 1 has on the machine.
    pub fn init_pid(&self) -> u32 {
        self.init_pid
    }

    /// Converts an absolute path in the host to a path on the machine.
    pub fn machine_path(&self, path_in_host: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.init_pid))
            .join(path_in_host.trim_start_matches('/'))
    }

    /// Returns a command that runs in the host as root, in root's home folder, with a minimal
    /// environment.
    pub fn root_command(&self, program: impl AsRef<Path>) -> Command {
        self.command_as(None, program)
    }

    /// Returns a command that runs in the host as `user`, an ordinary user with (name, uid, home
    /// folder); as root if `user` is `None`.
    pub fn command_as(
        &self,
        user: Option<(&str, u32, &Path)>,
        program: impl AsRef<Path>,
    ) -> Command {
        let mut command = Command::new("nsenter");
        command.args([
            "-t",
            &self.init_pid.to_string(),
            "-n",
            "-u",
            "-p",
            "-m",
            "--",
        ]);
        if let Some((_, uid, _)) = user {
            let uid = uid.to_string();
            command.args([
                "setpriv",
                "--reuid",
                &uid,
                "--regid",
                &uid,
                "--clear-groups",
                "--inh-caps=-all",
                "--",
            ]);
        }
        let (name, home) = user.map_or(("root", self.root_home.as_path()), |(name, _, home)| {
            (name, home)
        });
        command.args(["env", "-C"]).arg(home).arg(program.as_ref());
        command
            .env_clear()
            .env("HOME", home)
            .env("USER", name)
            .env("LOGNAME", name)
            .env("LANG", "C.UTF-8");
        command
            .env("PATH", search_path(self.prefix_in_host.as_deref()))
            .env("TERM", "dumb");
        if let Some(prefix) = &self.prefix_in_host {
            command.env("LD_LIBRARY_PATH", prefix.join("lib"));
        }
        command
    }

    /// Runs a command line with the shell in the host, as root, and waits for its end.
    pub fn run_shell(&self, command_line: &str, timeout: Duration) -> Result<CommandResult> {
        let mut command = self.root_command("/bin/sh");
        command.args(["-c", command_line]);
        run_to_end(command, timeout)
    }

    /// Starts a command that was made by [`Host::root_command`] or [`Host::command_as`], and
    /// returns without waiting for its end.
    pub fn start_command(&self, command: Command) -> Result<RunningCommand> {
        RunningCommand::start(command, Stdio::null())
    }

    /// Returns the processes of the host except for process 1, as (process number on the machine,
    /// command line). Processes without a command line, such as zombies, are omitted.
    pub fn processes(&self) -> Vec<(u32, String)> {
        let Ok(host_namespace) = fs::read_link(format!("/proc/{}/ns/net", self.init_pid)) else {
            return Vec::new();
        };
        let mut processes = Vec::new();
        for process in all_processes().into_iter().flatten().flatten() {
            let pid = process.pid.cast_unsigned();
            // The network namespace identifies the host, because tasks have process-id namespaces
            // of their own.
            let is_in_host = fs::read_link(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|namespace| namespace == host_namespace);
            if is_in_host && pid != self.init_pid {
                let arguments = process.cmdline().unwrap_or_default();
                processes.push((pid, arguments.join(" ").trim().to_string()));
            }
        }
        processes.retain(|(_, line)| !line.is_empty());
        processes
    }

    /// Kills all processes of the host except for those of the testbed.
    pub fn kill_all_processes(&self) {
        self.kill_matching_processes(|line| {
            !["sshd", "sempa-host"]
                .iter()
                .any(|program_name| line.contains(program_name))
        });
    }

    /// Kills the processes of the host whose command line `matches_line` accepts.
    pub fn kill_matching_processes(&self, matches_line: impl Fn(&str) -> bool) {
        for (pid, line) in self
            .processes()
            .into_iter()
            .filter(|(_, line)| matches_line(line))
        {
            let Ok(pid) = i32::try_from(pid) else {
                continue;
            };
            // The process may have ended already.
            if nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGKILL,
            )
            .is_ok()
            {
                eprintln!("{}: killed {pid} {line}", self.name);
            }
        }
    }

    /// Returns the paths of the entries of `/tmp`, `/run` and `/dev/shm` of the host, and of the
    /// tasker service's directories, without those that the testbed or the service keeps.
    /// `testbed_folder` is the testbed's folder.
    pub fn leftover_files(&self, testbed_folder: &Path) -> Vec<PathBuf> {
        // criu.kdat is CRIU's cache of kernel features, which belongs to the machine.
        let is_of_testbed = |path: &Path| {
            ["/run/sshd", "/run/utmp", "/run/criu.kdat"]
                .iter()
                .chain(&SERVICE_FILES)
                .chain(&SERVICE_DIRS)
                .any(|known_path| path == Path::new(known_path))
                || testbed_folder.starts_with(path)
                || path.starts_with(testbed_folder)
                || self
                    .prefix_in_host
                    .as_ref()
                    .is_some_and(|prefix| prefix.starts_with(path) || path.starts_with(prefix))
        };
        let mut leftover_paths = Vec::new();
        let roots = ["/tmp", "/run", "/dev/shm"];
        for root in roots.iter().chain(&SERVICE_DIRS) {
            for entry in fs::read_dir(self.machine_path(root))
                .into_iter()
                .flatten()
                .flatten()
            {
                let path_in_host = Path::new(root).join(entry.file_name());
                if !is_of_testbed(&path_in_host) {
                    leftover_paths.push(path_in_host);
                }
            }
        }
        leftover_paths
    }

    fn stop_and_wait(&mut self) {
        drop(self.outer_stdin.take());
        let _ = self.outer_process.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop_and_wait();
    }
}

/// Returns the value of PATH for commands in a host.
pub(crate) fn search_path(prefix: Option<&Path>) -> String {
    let default_path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    match prefix {
        Some(prefix) => format!("{}:{default_path}", prefix.join("bin").display()),
        None => default_path.to_string(),
    }
}

/// Starts the sshd of a host and waits until it listens.
fn start_sshd_and_wait(host: &Host, folder: &Path) -> Result<()> {
    let host_folder = folder.join(host.name());
    let mut command = host.root_command("/usr/sbin/sshd");
    command
        .arg("-f")
        .arg(host_folder.join("sshd_config"))
        .arg("-E")
        .arg(host_folder.join("sshd.log"));
    run_successfully(command, STARTUP_TIMEOUT)?;
    // sshd starts to listen before it writes its process number.
    wait_for(STARTUP_TIMEOUT, || {
        if host_folder.join("sshd.pid").exists() {
            Ok(())
        } else {
            Err(format!("the sshd of {} does not listen", host.name()))
        }
    })
}

fn make_folder() -> Result<PathBuf> {
    let own_pid = std::process::id();
    let parent = Path::new(TESTBEDS_FOLDER);
    for number in 0..1000 {
        let folder = parent.join(format!("{FOLDER_PREFIX}{own_pid}-{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => {
                fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
                return Ok(folder);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| folder.display().to_string()),
        }
    }
    bail!("{} is full of testbeds", parent.display())
}

/// Removes the folders of testbeds whose process no longer exists. Such a folder remains only if
/// the outside host was killed too.
fn remove_stale_folders() {
    for entry in fs::read_dir(TESTBEDS_FOLDER)
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let owner_pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(FOLDER_PREFIX))
            .and_then(|rest| rest.split('-').next());
        let Some(owner_pid) = owner_pid.and_then(|pid| pid.parse::<u32>().ok()) else {
            continue;
        };
        if !Path::new(&format!("/proc/{owner_pid}")).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the folders that all hosts see, as pairs (path on this machine, path on the hosts): the
/// testbed's folder, the shared folders, and the folders of the engine and of the installed
/// programs.
fn visible_folders(
    folder: &Path,
    shared_folders: &[&Path],
    prefix: Option<&Path>,
) -> Vec<(PathBuf, PathBuf)> {
    let mut same_path_folders = vec![folder.to_path_buf()];
    same_path_folders.extend(shared_folders.iter().map(|path| path.to_path_buf()));
    if let Some(real_engine) = machine::find_engine() {
        same_path_folders.extend(
            real_engine
                .parent()
                .and_then(Path::parent)
                .map(Path::to_path_buf),
        );
    }
    let mut visible_folders: Vec<(PathBuf, PathBuf)> = same_path_folders
        .into_iter()
        .map(|path| (path.clone(), path))
        .collect();
    visible_folders.extend(prefix.map(|prefix| (prefix.to_path_buf(), prefix_in_hosts(prefix))));
    visible_folders
}

/// Writes the files that replace files of /etc on all hosts: the hosts file, and the account files,
/// which contain the additional ordinary users.
fn write_etc_files(folder: &Path, host_names: &[String]) -> Result<()> {
    let mut hosts_text = format!("127.0.0.1 localhost\n{NETWORK_PREFIX}.254 desk\n");
    for (i, name) in (1..).zip(host_names) {
        hosts_text.push_str(&format!("{NETWORK_PREFIX}.{i} {name}\n"));
    }
    fs::write(folder.join("hosts"), hosts_text)?;
    let other_lines = |file: &str| -> Result<String> {
        let text = fs::read_to_string(file)?;
        let kept_lines = text.lines().filter(|line| {
            let name = line.split(':').next().unwrap_or_default();
            name != ROOT.name && ORDINARY_USERS.iter().all(|user| user.name != name)
        });
        Ok(kept_lines.map(|line| format!("{line}\n")).collect())
    };
    let mut passwd_text = format!(
        "root:x:0:0:root:{}:/bin/bash\n",
        home_of(folder, "root").display()
    );
    let (mut group_text, mut shadow_text) = (
        "root:x:0:\n".to_string(),
        "root:*:19000:0:99999:7:::\n".to_string(),
    );
    for Account { name: user, uid } in ORDINARY_USERS {
        passwd_text.push_str(&format!(
            "{user}:x:{uid}:{uid}:{user}:{}:/bin/bash\n",
            home_of(folder, user).display()
        ));
        group_text.push_str(&format!("{user}:x:{uid}:\n"));
        shadow_text.push_str(&format!("{user}:*:19000:0:99999:7:::\n"));
    }
    fs::write(
        folder.join("passwd"),
        passwd_text + &other_lines("/etc/passwd")?,
    )?;
    fs::write(
        folder.join("group"),
        group_text + &other_lines("/etc/group")?,
    )?;
    fs::write(
        folder.join("shadow"),
        shadow_text + &other_lines("/etc/shadow")?,
    )?;
    fs::set_permissions(folder.join("shadow"), fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// Returns the number of bytes that a host has sent over its network interface.
///
/// # Panics
/// The host has no network.
pub fn sent_bytes_total(host: &Host) -> u64 {
    let result = host
        .run_shell("grep eth0 /proc/net/dev", STARTUP_TIMEOUT)
        .and_then(|result| result.expect_success("grep"));
    let result = result.expect("a network");
    let counters = result
        .stdout
        .split_once(':')
        .map(|(_, counters)| counters.to_string())
        .expect("a device and its numbers");
    counters
        .split_whitespace()
        .nth(8)
        .and_then(|counter| counter.parse().ok())
        .expect("the ninth is what was sent")
}

/// Waits until no process of a host has `pattern` in its command line.
///
/// # Errors
/// Such a process remains at the deadline; the error contains its command line.
pub fn wait_until_no_process(host: &Host, pattern: &str, timeout: Duration) -> Result<()> {
    wait_for(timeout, || {
        let remaining_lines: Vec<String> = host
            .processes()
            .into_iter()
            .filter(|(_, line)| line.contains(pattern) && !is_of_service(line))
            .map(|(pid, line)| format!("{pid} {line}"))
            .collect();
        if remaining_lines.is_empty() {
            Ok(())
        } else {
            Err(format!(
                "{} still has: {}",
                host.name(),
                remaining_lines.join("; ")
            ))
        }
    })
}

/// True for the command line of the tasker service or of its load watcher, which belong to the host
/// and not to a virtual machine.
fn is_of_service(line: &str) -> bool {
    line.ends_with("pvm-taskerd") || line.contains("pvm-load-watcher --machine")
}
