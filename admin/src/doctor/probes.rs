//! Tests abilities of the machine in processes of their own, because a test changes the namespaces
//! of its process. Each process prints its results: a line `NAME works` or `NAME fails REASON`.
//!
//! CRIU is tested as the tasker service uses it: process and CRIU are in a new PID namespace and a
//! new mount namespace. All processes of a test end with its first one.

use super::{system_calls, udp};
use crate::outcome::Outcome;
use crate::process::run;
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names of the results.
pub(super) const NAMESPACES: &str = "namespaces";
pub(super) const ENTER_NAMESPACES: &str = "enter-namespaces";
pub(super) const PROC_MOUNT: &str = "proc-mount";
pub(super) const LAST_PID: &str = "last-pid";
pub(super) const TRIAL: &str = "trial";

/// Number that the next PID exceeds in the test, and in the test of a restore. Both are below the
/// kernel's default for the greatest PID.
const LAST_PID_VALUE: i32 = 20_000;
const RESTORE_LAST_PID_VALUE: i32 = 25_000;
/// Time limit for a dump and for a restore.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a restored process to appear.
const RESTORED_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Subcommand)]
pub(crate) enum ProbeCommand {
    /// Make namespaces, and dump and restore a process inside
    Namespaces {
        /// Path of the CRIU program
        #[arg(long)]
        criu: Option<PathBuf>,
    },
    /// The first process of the new namespaces
    Inside {
        /// Path of the CRIU program
        #[arg(long)]
        criu: Option<PathBuf>,
    },
    /// Answer datagrams of a doctor on another host
    Udp {
        /// The port; any free one without it
        #[arg(long, default_value_t = 0)]
        port: u16,
    },
}

pub(crate) fn run_probe(probe: &ProbeCommand) -> Result<Outcome> {
    match probe {
        ProbeCommand::Namespaces { criu } => probe_namespaces(criu.as_deref())?,
        ProbeCommand::Inside { criu } => probe_inside(criu.as_deref()),
        ProbeCommand::Udp { port } => udp::answer(*port)?,
    }
    Ok(Outcome::Done)
}

fn print_result<E: std::fmt::Display>(name: &str, result: &Result<(), E>) {
    match result {
        Ok(()) => println!("{name} works"),
        // The alternative format of anyhow's errors contains their causes.
        Err(error) => println!("{name} fails {}", format!("{error:#}").replace('\n', " ")),
    }
}

fn probe_namespaces(criu: Option<&Path>) -> Result<()> {
    let child = unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)
        .map_err(io::Error::from)
        .and_then(|()| start_inside(criu));
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            print_result(NAMESPACES, &Err(error));
            return Ok(());
        }
    };
    print_result(NAMESPACES, &Ok::<(), io::Error>(()));
    print_result(ENTER_NAMESPACES, &enter_namespaces(child.id()));
    // The first process waits for the end of its input.
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

fn start_inside(criu: Option<&Path>) -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["probe", "inside"]).stdin(Stdio::piped());
    if let Some(criu) = criu {
        command.arg("--criu").arg(criu);
    }
    command.spawn()
}

fn enter_namespaces(pid: u32) -> io::Result<()> {
    let open = |name: &str| File::open(format!("/proc/{pid}/ns/{name}"));
    let (pid_namespace, mount_namespace) = (open("pid")?, open("mnt")?);
    setns(pid_namespace, CloneFlags::CLONE_NEWPID)?;
    setns(mount_namespace, CloneFlags::CLONE_NEWNS)?;
    Ok(())
}

fn probe_inside(criu: Option<&Path>) {
    let proc_result = mount_own_proc();
    print_result(PROC_MOUNT, &proc_result);
    if proc_result.is_ok() {
        print_result(LAST_PID, &set_last_pid(LAST_PID_VALUE));
        if let Some(criu) = criu {
            print_result(TRIAL, &try_engine(criu));
        }
    }
    // The other end closes the input when it has entered the namespaces.
    let _ = io::stdin().read_to_end(&mut Vec::new());
}

/// Mounts `/proc` of the own PID namespace, in a mount namespace that the process which has started
/// this one does not share.
fn mount_own_proc() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    // The mount must not reach other processes.
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
    match fs::read_link("/proc/self")? == Path::new("1") {
        true => Ok(()),
        false => Err(io::Error::other(
            "the mounted /proc is that of another namespace",
        )),
    }
}

/// Lets the PIDs of the next processes exceed `value`, as a restore does.
fn set_last_pid(value: i32) -> io::Result<()> {
    fs::write("/proc/sys/kernel/ns_last_pid", value.to_string())?;
    let mut child = Command::new("true").spawn()?;
    let pid = child.id().cast_signed();
    child.wait()?;
    match pid > value {
        true => Ok(()),
        false => Err(io::Error::other("the kernel ignores the number")),
    }
}

/// Dumps and restores a process without privileges.
fn try_engine(criu: &Path) -> Result<()> {
    // A descriptor from outside these namespaces would prevent the dump.
    system_calls::keep_descriptors_from_children()?;
    let images = tempfile::tempdir().context("a directory for images")?;
    // `setsid` makes the process the leader of a session of its own: CRIU dumps whole sessions.
    let mut process = Command::new("setsid")
        .args(["sleep", "1000"])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("a process to dump")?;
    let pid = process.id().cast_signed();
    wait_for_session(pid)?;
    let pid_text = pid.to_string();
    let dump_result = run_criu(criu, &["dump", "-t", &pid_text], images.path(), "dump.log");
    if dump_result.is_err() {
        let _ = process.kill();
    }
    process.wait()?;
    dump_result.context("the dump failed")?;
    // CRIU itself must not have the number of the process.
    set_last_pid(RESTORE_LAST_PID_VALUE).context("the PID of the restored process")?;
    run_criu(criu, &["restore", "-d"], images.path(), "restore.log")
        .context("the restore failed")?;
    let deadline = Instant::now() + RESTORED_TIMEOUT;
    while kill(Pid::from_raw(pid), None).is_err() {
        if Instant::now() >= deadline {
            bail!("the restored process does not run");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    // The restored process is a child of this one, the first process of the namespace.
    let _ = waitpid(Pid::from_raw(pid), None);
    Ok(())
}

/// Waits until `setsid` has become the leader of a session and runs `sleep`.
fn wait_for_session(pid: i32) -> Result<()> {
    let deadline = Instant::now() + RESTORED_TIMEOUT;
    let is_ready = || {
        checkpoint::proc::stat(pid).is_some_and(|stat| stat.session == pid && stat.comm == "sleep")
    };
    while !is_ready() {
        if Instant::now() >= deadline {
            bail!("the process to dump does not start");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Runs CRIU. The error is the cause in its log.
fn run_criu(criu: &Path, args: &[&str], images: &Path, log: &str) -> Result<()> {
    let mut command = Command::new(criu);
    command.args(args).arg("-D").arg(images);
    command.args(["-v2", "-o", log]).current_dir("/");
    let finished = run(command, b"", ENGINE_TIMEOUT)?;
    if finished.status.success() {
        return Ok(());
    }
    let log_text = fs::read_to_string(images.join(log)).unwrap_or_default();
    let reason = find_cause(&log_text).or_else(|| finished.stderr.lines().last());
    bail!("{}", reason.unwrap_or("CRIU gives no reason").trim());
}

/// Returns the error that other errors in a log of CRIU follow from: the last one that reports more
/// than the failure of a step. Earlier ones need not be fatal.
fn find_cause(log_text: &str) -> Option<&str> {
    let errors = || log_text.lines().filter(|line| line.contains("Error"));
    let is_cause = |line: &&str| !line.contains("FAILED") && !line.contains("failed with");
    errors().rfind(is_cause).or_else(|| errors().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_precedes_errors_that_follow_from_it() {
        let log = "\
(00.01) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self
(00.02) Warn  (criu/x.c:1): odd
(00.03) Error (criu/files-reg.c:1790): Can't lookup mount=24 for fd=10
(00.04) Error (criu/cr-dump.c:1545): Dump files (pid: 4) failed with -1
(00.05) Error (criu/cr-dump.c:1975): Dumping FAILED.
";
        assert!(find_cause(log).is_some_and(|line| line.contains("mount=24")));
        let only_result = "(00.05) Error (criu/cr-dump.c:1975): Dumping FAILED.\n";
        assert_eq!(find_cause(only_result), Some(only_result.trim()));
        assert_eq!(find_cause("(00.01) all is well\n"), None);
    }
}
