//! A testbed: a desk and hosts h1..hN on one bridge, each in its own namespaces.
//!
//! The bridge is in the network namespace of the desk. Therefore nothing appears in the machine's
//! network, any number of testbeds can exist at once, and the kernel removes the network when the
//! testbed's process ends. A testbed whose process was killed leaves one folder, which the desk or
//! the next testbed removes.

pub use crate::layout::{ALICE_UID, NETWORK, OLGA_UID};

use crate::hosts::HostPlan;
use crate::layout::{home_of, prefix_in_hosts};
use crate::run::{CommandResult, RunningCommand, run, run_ok, wait_for};
use crate::{machine, ssh_settings};
use anyhow::{Context, Result, bail};
use procfs::process::all_processes;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// Upper bound of the hosts of a testbed.
pub const HOSTS_MAX: usize = 32;
/// Time limit for a program to start on a loaded machine.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Parent of the folders of all testbeds. All users can access it, whatever TMPDIR is.
const TESTBEDS_PARENT: &str = "/tmp";
/// Beginning of the name of a testbed's folder. The number of the testbed's process follows.
const FOLDER_PREFIX: &str = "sempa-testbed-";

/// A host of the testbed, or the desk.
#[derive(Debug)]
pub struct Host {
    name: String,
    init_pid: u32,
    home: PathBuf,
    prefix: Option<PathBuf>,
    child: Child,
    lifeline: Option<ChildStdin>,
}

/// The hosts, and the desk: an additional machine on their network.
#[derive(Debug)]
pub struct Testbed {
    folder: PathBuf,
    engine: Option<PathBuf>,
    breakpoints_folder: Option<PathBuf>,
    prefix: Option<PathBuf>,
    desk: Host,
    hosts: Vec<Host>,
}

/// The parameters of a testbed.
#[derive(Clone, Copy, Debug)]
struct TestbedParams<'a> {
    count: usize,
    prefix: Option<&'a Path>,
    shared_folders: &'a [&'a Path],
    own_engine: bool,
    env: &'a [(&'a str, &'a str)],
}

impl Testbed {
    /// Makes `count` hosts named h1, h2, …. The folders in `keep` are visible on all hosts.
    /// `prefix` is where the programs are installed.
    ///
    /// # Errors
    /// The machine lacks something ([`machine::lacks`]) or the kernel refuses. Nothing of the
    /// testbed remains.
    pub fn new(count: usize, prefix: Option<&Path>, keep: &[&Path]) -> Result<Testbed> {
        Testbed::make(&TestbedParams {
            count,
            prefix,
            shared_folders: keep,
            own_engine: false,
            env: &[],
        })
    }

    /// As [`Testbed::new`]. On all hosts `SEMPA_CRIU` is [`Testbed::engine`], a link to the real
    /// CRIU that a test may replace. Daemons stop at breakpoints in
    /// [`Testbed::breakpoints_folder`].
    pub fn with_own_engine(count: usize, prefix: Option<&Path>) -> Result<Testbed> {
        Testbed::make(&TestbedParams {
            count,
            prefix,
            shared_folders: &[],
            own_engine: true,
            env: &[],
        })
    }

    /// As [`Testbed::with_own_engine`], with additional environment variables for daemons that are
    /// started from another host.
    ///
    /// # Errors
    /// As [`Testbed::new`].
    pub fn with_env(count: usize, prefix: Option<&Path>, env: &[(&str, &str)]) -> Result<Testbed> {
        Testbed::make(&TestbedParams {
            count,
            prefix,
            shared_folders: &[],
            own_engine: true,
            env,
        })
    }

    fn make(wanted: &TestbedParams<'_>) -> Result<Testbed> {
        let count = wanted.count;
        if let Some(lack) = machine::lacks() {
            bail!("no testbed: {lack}");
        }
        if !(1..=HOSTS_MAX).contains(&count) {
            bail!("a testbed has 1 to {HOSTS_MAX} hosts, not {count}");
        }
        remove_stale_folders();
        let folder = make_folder()?;
        let made = Testbed::start_hosts(&folder, wanted);
        if made.is_err() {
            let _ = fs::remove_dir_all(&folder);
        }
        made
    }

    fn start_hosts(folder: &Path, wanted: &TestbedParams<'_>) -> Result<Testbed> {
        let &TestbedParams {
            count,
            prefix,
            shared_folders: keep,
            own_engine,
            env,
        } = wanted;
        let names: Vec<String> = (1..=count).map(|i| format!("h{i}")).collect();
        let home = home_of(folder, "root");
        fs::create_dir_all(home.join("pvm3/bin/LINUX64"))?;
        for (user, uid) in [("alice", ALICE_UID), ("olga", OLGA_UID)] {
            let own = home_of(folder, user);
            fs::create_dir_all(own.join("pvm3/bin/LINUX64"))?;
            std::os::unix::fs::chown(&own, Some(uid), Some(uid))?;
        }
        write_etc_files(folder, &names)?;
        let inside = prefix.map(prefix_in_hosts);
        let mut remote = format!("PATH={} PVM_ALLOW_ROOT=1", search_path(inside.as_deref()));
        let mut engine = std::env::var_os("SEMPA_CRIU").map(PathBuf::from);
        if own_engine {
            let link = folder.join("engine");
            let real = machine::engine().context("no CRIU: run cargo xtask criu")?;
            std::os::unix::fs::symlink(real, &link)?;
            engine = Some(link);
        }
        if let Some(engine) = &engine {
            remote.push_str(&format!(" SEMPA_CRIU={}", engine.display()));
        }
        let steps = own_engine.then(|| folder.join("steps"));
        if let Some(steps) = &steps {
            fs::create_dir(steps)?;
            remote.push_str(&format!(" SEMPA_TEST_STEPS={}", steps.display()));
        }
        remote.extend(env.iter().map(|(name, value)| format!(" {name}={value}")));
        ssh_settings::make_keys_and_settings(folder, &names, &remote)?;
        let mut kept: Vec<PathBuf> = vec![folder.to_path_buf()];
        kept.extend(keep.iter().map(|path| path.to_path_buf()));
        if let Some(real) = machine::engine() {
            kept.extend(real.parent().and_then(Path::parent).map(Path::to_path_buf));
        }
        let mut kept: Vec<(PathBuf, PathBuf)> =
            kept.into_iter().map(|path| (path.clone(), path)).collect();
        kept.extend(prefix.map(|prefix| (prefix.to_path_buf(), prefix_in_hosts(prefix))));
        let plan = |name: &str, remove_at_end| HostPlan {
            name: name.to_string(),
            visible_folders: kept.clone(),
            replaced_files: ["hosts", "passwd", "group", "shadow"]
                .map(|file| (folder.join(file), Path::new("/etc").join(file)))
                .to_vec(),
            remove_at_end,
        };
        let desk = Host::start(
            folder,
            plan("desk", Some(folder.to_path_buf())),
            &home,
            inside.clone(),
        )?;
        let mut hosts = Vec::new();
        for name in &names {
            hosts.push(Host::start(
                folder,
                plan(name, None),
                &home,
                inside.clone(),
            )?);
        }
        let prefix = prefix.map(Path::to_path_buf);
        let testbed = Testbed {
            folder: folder.to_path_buf(),
            engine,
            breakpoints_folder: steps,
            prefix,
            desk,
            hosts,
        };
        testbed.connect_hosts()?;
        for host in &testbed.hosts {
            start_sshd(host, folder)?;
        }
        Ok(testbed)
    }

    /// Connects host number `i` to the network if `on` is true; disconnects it otherwise.
    pub fn set_connected(&self, i: usize, on: bool) -> Result<()> {
        self.desk
            .ip(&format!("link set p{i} {}", if on { "up" } else { "down" }))
            .map(drop)
    }

    /// Interrupts the connection between hosts `i` and `j` if `apart` is true; restores it
    /// otherwise. All other hosts can reach both of them.
    pub fn set_partitioned(&self, i: usize, j: usize, apart: bool) -> Result<()> {
        for (here, there) in [(i, j), (j, i)] {
            // Frames for the other host are sent to an unused hardware address.
            let line = if apart {
                format!(
                    "neigh replace {NETWORK}.{there} lladdr 02:00:00:00:00:01 nud permanent dev eth0"
                )
            } else {
                format!("neigh del {NETWORK}.{there} dev eth0")
            };
            self.host(here).ip(&line)?;
        }
        Ok(())
    }

    /// Replaces the `/tmp` of host number `i`, which is in memory, by a folder on the disk.
    pub fn put_tmp_on_disk(&self, i: usize) -> Result<()> {
        let disk = self.folder.join(format!("h{i}-tmp"));
        fs::create_dir_all(&disk)?;
        fs::set_permissions(&disk, fs::Permissions::from_mode(0o1777))?;
        let mut line = format!("mount --bind {} /tmp", disk.display());
        // The testbed's folder, and perhaps the programs, are below `/tmp` and must stay visible.
        let kept = [Some(&self.folder), self.prefix.as_ref()]
            .into_iter()
            .flatten();
        for (fd, (path, below)) in
            (3..).zip(kept.filter_map(|path| Some((path, path.strip_prefix("/tmp").ok()?))))
        {
            fs::create_dir_all(disk.join(below))?;
            let path = path.display();
            line = format!(
                "exec {fd}<{path} && {line} && mount --no-canonicalize --bind /proc/self/fd/{fd} {path}"
            );
        }
        self.host(i)
            .shell(&line, STARTUP_TIMEOUT)?
            .expect_success("another /tmp")
            .map(drop)
    }

    fn connect_hosts(&self) -> Result<()> {
        let desk = |line: &str| self.desk.ip(line);
        desk("link add br0 type bridge")?;
        desk(&format!("addr add {NETWORK}.254/24 dev br0"))?;
        desk("link set br0 up")?;
        for (i, host) in (1..).zip(&self.hosts) {
            desk(&format!(
                "link add p{i} type veth peer name eth0 netns {}",
                host.init_pid
            ))?;
            desk(&format!("link set p{i} master br0 up"))?;
            for line in [
                format!("addr add {NETWORK}.{i}/24 dev eth0"),
                "link set eth0 up".to_string(),
            ] {
                host.ip(&line)?;
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

    /// Returns the desk. It is on the network of the hosts, and belongs to no virtual machine.
    pub fn desk(&self) -> &Host {
        &self.desk
    }

    /// Returns the testbed's folder. All hosts share it under the same path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the value of `SEMPA_CRIU` on all hosts: the testbed's own engine, or the engine of
    /// this process.
    pub fn engine(&self) -> Option<&Path> {
        self.engine.as_deref()
    }

    /// Returns the value of `SEMPA_TEST_STEPS` on all hosts: the folder of breakpoints
    /// ([`crate::faults::Breakpoint`]).
    pub fn breakpoints_folder(&self) -> Option<&Path> {
        self.breakpoints_folder.as_deref()
    }

    /// Returns the folder on the machine where the programs are installed.
    pub fn prefix(&self) -> Option<&Path> {
        self.prefix.as_deref()
    }

    /// Returns the home folder of root, which all hosts share.
    pub fn home(&self) -> PathBuf {
        home_of(&self.folder, "root")
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.end();
        }
        // The desk removes the folder before it ends.
        self.desk.end();
    }
}

impl Host {
    fn start(folder: &Path, plan: HostPlan, home: &Path, prefix: Option<PathBuf>) -> Result<Host> {
        let own = folder.join(&plan.name);
        fs::create_dir_all(&own)?;
        let plan_file = own.join("plan.json");
        fs::write(&plan_file, serde_json::to_vec(&plan)?)?;
        let program = machine::build_folder()?.join("sempa-host");
        let mut child = Command::new(&program)
            .arg("outer")
            .arg(&plan_file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(own.join("host.log"))?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{} does not start", program.display()))?;
        let lifeline = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().context("its output is piped")?).lines();
        let (mut init, mut ready) = (None, false);
        for line in lines {
            match line?.split_once(' ') {
                Some(("pid", number)) => init = Some(number.parse()?),
                _ => ready = true,
            }
            if let (Some(init), true) = (init, ready) {
                return Ok(Host {
                    name: plan.name,
                    init_pid: init,
                    home: home.to_path_buf(),
                    prefix,
                    child,
                    lifeline,
                });
            }
        }
        let _ = child.wait();
        bail!(
            "host {} did not come up: {}",
            plan.name,
            fs::read_to_string(own.join("host.log"))?.trim()
        )
    }

    /// Runs `ip` in the host's network.
    fn ip(&self, line: &str) -> Result<CommandResult> {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.init_pid.to_string(), "-n", "--", "ip"])
            .args(line.split(' '));
        run_ok(command, STARTUP_TIMEOUT)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number on the machine of the host's process 1.
    pub fn init_pid(&self) -> u32 {
        self.init_pid
    }

    /// Converts a path in the host to a path on the machine.
    pub fn machine_path(&self, inside: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.init_pid)).join(inside.trim_start_matches('/'))
    }

    /// Returns a command that runs in the host as root, in root's home folder, with a minimal
    /// environment.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.command_as(None, program)
    }

    /// Returns a command that runs in the host as `user`, an ordinary user given as (name, uid,
    /// home); as root if `user` is `None`.
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
        let (name, home) = user.map_or(("root", self.home.as_path()), |(name, _, home)| {
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
            .env("PATH", search_path(self.prefix.as_deref()))
            .env("TERM", "dumb");
        if let Some(prefix) = &self.prefix {
            command.env("LD_LIBRARY_PATH", prefix.join("lib"));
        }
        command
    }

    /// Runs a command line with the shell, in the host, as root.
    pub fn shell(&self, line: &str, deadline: Duration) -> Result<CommandResult> {
        let mut command = self.command("/bin/sh");
        command.args(["-c", line]);
        run(command, deadline)
    }

    /// Starts a command that was made for the host, and returns without waiting for its end.
    pub fn start_command(&self, command: Command) -> Result<RunningCommand> {
        RunningCommand::start(command, Stdio::null())
    }

    /// Returns the processes of the host except for process 1, as (number on the machine, command
    /// line).
    pub fn processes(&self) -> Vec<(u32, String)> {
        let Ok(own) = fs::read_link(format!("/proc/{}/ns/net", self.init_pid)) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for process in all_processes().into_iter().flatten().flatten() {
            let pid = process.pid.cast_unsigned();
            // Network namespaces are compared, because tasks have process-id namespaces of their
            // own.
            let inside = fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|net| net == own);
            if inside && pid != self.init_pid {
                let words = process.cmdline().unwrap_or_default();
                found.push((pid, words.join(" ").trim().to_string()));
            }
        }
        found.retain(|(_, line)| !line.is_empty());
        found
    }

    /// Kills all processes of the host except for those of the testbed.
    pub fn kill_all(&self) {
        self.kill_matching(|line| {
            !["sshd", "sempa-host"]
                .iter()
                .any(|word| line.contains(word))
        });
    }

    /// Kills the processes of the host whose command line matches.
    pub fn kill_matching(&self, is_one: impl Fn(&str) -> bool) {
        for (pid, line) in self
            .processes()
            .into_iter()
            .filter(|(_, line)| is_one(line))
        {
            let Ok(pid) = i32::try_from(pid) else {
                continue;
            };
            // The process may have ended since it was listed.
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

    /// Returns the files under `/tmp`, `/run` and `/dev/shm` of the host that the testbed has not
    /// made.
    pub fn leftover_files(&self, folder: &Path) -> Vec<PathBuf> {
        // criu.kdat is CRIU's cache of kernel features.
        let ours = |path: &Path| {
            ["/run/sshd", "/run/utmp", "/run/criu.kdat"]
                .iter()
                .any(|known| path == Path::new(known))
                || folder.starts_with(path)
                || path.starts_with(folder)
                || self
                    .prefix
                    .as_ref()
                    .is_some_and(|prefix| prefix.starts_with(path) || path.starts_with(prefix))
        };
        let mut left = Vec::new();
        for top in ["/tmp", "/run", "/dev/shm"] {
            for entry in fs::read_dir(self.machine_path(top))
                .into_iter()
                .flatten()
                .flatten()
            {
                let inside = Path::new(top).join(entry.file_name());
                if !ours(&inside) {
                    left.push(inside);
                }
            }
        }
        left
    }

    fn end(&mut self) {
        drop(self.lifeline.take());
        let _ = self.child.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the value of PATH for commands in a host.
pub(crate) fn search_path(prefix: Option<&Path>) -> String {
    let usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    match prefix {
        Some(prefix) => format!("{}:{usual}", prefix.join("bin").display()),
        None => usual.to_string(),
    }
}

/// Starts the sshd of a host and waits until it listens.
fn start_sshd(host: &Host, folder: &Path) -> Result<()> {
    let own = folder.join(host.name());
    let mut command = host.command("/usr/sbin/sshd");
    command
        .arg("-f")
        .arg(own.join("sshd_config"))
        .arg("-E")
        .arg(own.join("sshd.log"));
    run_ok(command, STARTUP_TIMEOUT)?;
    // sshd starts to listen before it writes its process number.
    wait_for(STARTUP_TIMEOUT, || {
        if own.join("sshd.pid").exists() {
            Ok(())
        } else {
            Err(format!("the sshd of {} does not listen", host.name()))
        }
    })
}

fn make_folder() -> Result<PathBuf> {
    let own = std::process::id();
    let top = Path::new(TESTBEDS_PARENT);
    for number in 0..1000 {
        let folder = top.join(format!("{FOLDER_PREFIX}{own}-{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => {
                fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
                return Ok(folder);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| folder.display().to_string()),
        }
    }
    bail!("{} is full of testbeds", top.display())
}

/// Removes the folders of testbeds of which both the process and the desk were killed.
fn remove_stale_folders() {
    for entry in fs::read_dir(TESTBEDS_PARENT)
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|name| name.strip_prefix(FOLDER_PREFIX))
            .and_then(|rest| rest.split('-').next());
        let Some(owner) = owner.and_then(|pid| pid.parse::<u32>().ok()) else {
            continue;
        };
        if !Path::new(&format!("/proc/{owner}")).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Writes the files that replace files of /etc on all hosts: the host table, and the accounts with
/// two additional ordinary users.
fn write_etc_files(folder: &Path, names: &[String]) -> Result<()> {
    let mut hosts = format!("127.0.0.1 localhost\n{NETWORK}.254 desk\n");
    for (i, name) in (1..).zip(names) {
        hosts.push_str(&format!("{NETWORK}.{i} {name}\n"));
    }
    fs::write(folder.join("hosts"), hosts)?;
    let others = |file: &str| -> Result<String> {
        let text = fs::read_to_string(file)?;
        let kept = text.lines().filter(|line| {
            !["root:", "alice:", "olga:"]
                .iter()
                .any(|user| line.starts_with(user))
        });
        Ok(kept.map(|line| format!("{line}\n")).collect())
    };
    let mut passwd = format!(
        "root:x:0:0:root:{}:/bin/bash\n",
        home_of(folder, "root").display()
    );
    let (mut group, mut shadow) = (
        "root:x:0:\n".to_string(),
        "root:*:19000:0:99999:7:::\n".to_string(),
    );
    for (user, uid) in [("alice", ALICE_UID), ("olga", OLGA_UID)] {
        passwd.push_str(&format!(
            "{user}:x:{uid}:{uid}:{user}:{}:/bin/bash\n",
            home_of(folder, user).display()
        ));
        group.push_str(&format!("{user}:x:{uid}:\n"));
        shadow.push_str(&format!("{user}:*:19000:0:99999:7:::\n"));
    }
    fs::write(folder.join("passwd"), passwd + &others("/etc/passwd")?)?;
    fs::write(folder.join("group"), group + &others("/etc/group")?)?;
    fs::write(folder.join("shadow"), shadow + &others("/etc/shadow")?)?;
    fs::set_permissions(folder.join("shadow"), fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// Returns the number of bytes that a host has sent.
///
/// # Panics
/// The host has no network.
pub fn sent_bytes(host: &Host) -> u64 {
    let done = host
        .shell("grep eth0 /proc/net/dev", STARTUP_TIMEOUT)
        .and_then(|done| done.expect_success("grep"));
    let done = done.expect("a network");
    let numbers = done
        .out
        .split_once(':')
        .map(|(_, numbers)| numbers.to_string())
        .expect("a device and its numbers");
    numbers
        .split_whitespace()
        .nth(8)
        .and_then(|number| number.parse().ok())
        .expect("the ninth is what was sent")
}

/// Waits until no process of a host has `word` in its command line.
///
/// # Errors
/// Such a process remains at the deadline; the error names it.
pub fn wait_until_no_process(host: &Host, word: &str, deadline: Duration) -> Result<()> {
    wait_for(deadline, || {
        let left: Vec<String> = host
            .processes()
            .into_iter()
            .map(|(pid, line)| format!("{pid} {line}"))
            .filter(|line| line.contains(word))
            .collect();
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{} still has: {}", host.name(), left.join("; ")))
        }
    })
}
