//! `pvmd -s`: a daemon that a master starts through a remote shell.
//!
//! 1. The process reads the master's bootstrap line from standard input, or requests the line from
//!    the master (`sealed_bootstrap`).
//! 2. The process forks. The child starts its own session and sets up the daemon.
//! 3. The child replies with one line. The parent, for which the remote shell waits, prints this
//!    line and exits.

use super::address::ssh_session_addresses;
use super::bootstrap::{
    BOOTSTRAP_BYTES_MAX, Bootstrap, ReadyReply, Refusal, host_from_bootstrap, reply_line,
};
use super::daemon::{self, DaemonSetup, Role};
use super::env::{env_var, root_refusal, runtime_paths_variable};
use super::host_env::{ARCH_NAME, DATA_SIGNATURE, HostEnvironmentSettings};
use super::manual_start;
use super::runtime_dir::{RuntimeDir, RuntimeDirError};
use super::sealed_bootstrap::{self, BootstrapSecret};
use super::sys::fork_before_threads;
use nix::unistd::{ForkResult, dup2_stderr, dup2_stdin, dup2_stdout, getuid, setsid};
use sempa_proto::PvmError;
use sempa_proto::runtime_paths::RuntimePaths;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

/// Runs a slave and returns the exit status of this process. `master_addresses` are the addresses
/// of the master from which the slave must request the bootstrap line; `None` if the line is on
/// standard input.
pub(crate) fn run_slave(foreground: bool, master_addresses: Option<&str>) -> i32 {
    let bootstrap = match master_addresses.map_or_else(read_bootstrap, fetch_bootstrap) {
        Ok(bootstrap) => bootstrap,
        Err(refusal) => return print_reply(&reply_line(&Err(refusal))),
    };
    if foreground {
        return set_up_and_run(&bootstrap, &mut |line| print_reply(line));
    }
    let fork_result = std::io::pipe().map(|pipe| (fork_before_threads(), pipe));
    let (fork_side, (reader, writer)) = match fork_result {
        Ok((Ok(fork_side), pipe)) => (fork_side, pipe),
        Ok((Err(errno), _)) => return print_reply(&reply_line(&Err(cannot_start("fork", errno)))),
        Err(e) => return print_reply(&reply_line(&Err(cannot_start("make a pipe", e)))),
    };
    match fork_side {
        ForkResult::Parent { .. } => {
            drop(writer);
            relay_child_reply(reader)
        }
        ForkResult::Child => {
            drop(reader);
            serve_detached(&bootstrap, writer)
        }
    }
}

fn cannot_start(action: &str, e: impl std::fmt::Display) -> Refusal {
    Refusal {
        error: PvmError::CantStart,
        text: format!("cannot {action}: {e}"),
    }
}

/// Prints a reply and returns the exit status of this process: 0 if the line was printed and
/// reports that the daemon is ready, otherwise 1.
fn print_reply(line: &str) -> i32 {
    let print_result =
        writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
    i32::from(print_result.is_err() || !line.starts_with("ddpro<"))
}

/// In the parent: waits for the child's line, prints the line and returns the exit status. The
/// remote shell thereby ends when the daemon is ready.
fn relay_child_reply(reader: PipeReader) -> i32 {
    let mut line = String::new();
    let _ = BufReader::new(reader).read_line(&mut line);
    if line.is_empty() {
        line = reply_line(&Err(cannot_start(
            "start",
            "the daemon ended before it was ready",
        )));
    }
    print_reply(line.trim_end())
}

/// In the child: starts a new session, replaces the standard descriptors by /dev/null, and runs the
/// daemon. Returns the exit status of the child.
fn serve_detached(bootstrap: &Bootstrap, mut writer: PipeWriter) -> i32 {
    let mut send_reply = |line: &str| {
        // If the parent was killed, the line is lost. The master then stops waiting, and this
        // daemon ends.
        let _ = writeln!(writer, "{line}");
        0
    };
    let detach_result = setsid().map_err(std::io::Error::from).and_then(|_| {
        let null_device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        dup2_stdin(&null_device)?;
        dup2_stdout(&null_device)?;
        dup2_stderr(&null_device)?;
        Ok(())
    });
    if let Err(e) = detach_result {
        return send_reply(&reply_line(&Err(cannot_start("leave the session", e))));
    }
    set_up_and_run(bootstrap, &mut send_reply)
}

/// Reads the master's bootstrap line from standard input. Old hosters write a line `PVM_VMID=…`
/// before the bootstrap line; such a line is skipped.
fn read_bootstrap() -> Result<Bootstrap, Refusal> {
    let mut input = BufReader::new(std::io::stdin()).take(BOOTSTRAP_BYTES_MAX as u64);
    loop {
        let mut line = String::new();
        let read_bytes = input
            .read_line(&mut line)
            .map_err(|e| cannot_start("read standard input", e))?;
        if read_bytes == 0 {
            return Err(cannot_start(
                "start",
                "pvmd -s is for masters: standard input brought no line of one",
            ));
        }
        if !line.starts_with("PVM_VMID=") {
            return Bootstrap::parse(line.trim_end());
        }
    }
}

/// Reads the bootstrap line from the master and decrypts the line with the secret, which a hoster
/// or a person enters on standard input.
fn fetch_bootstrap(master_addresses: &str) -> Result<Bootstrap, Refusal> {
    let secret_text =
        manual_start::read_secret().map_err(|e| cannot_start("read standard input", e))?;
    let secret = BootstrapSecret::parse(&secret_text)
        .ok_or_else(|| cannot_start("start", "standard input brought no secret of a master"))?;
    Bootstrap::parse(sealed_bootstrap::fetch_line(master_addresses, &secret)?.trim_end())
}

/// Sets the daemon up, replies to the master, and runs the daemon until it ends. `send_reply` sends
/// the reply line. Returns the exit status.
fn set_up_and_run(bootstrap: &Bootstrap, send_reply: &mut dyn FnMut(&str) -> i32) -> i32 {
    let setup = match build_setup(bootstrap) {
        Ok(setup) => setup,
        Err(refusal) => {
            send_reply(&reply_line(&Err(refusal)));
            return 1;
        }
    };
    let mut has_replied = false;
    let run_result = daemon::run_daemon(setup, |ready_daemon| {
        let ready_reply = ReadyReply {
            arch: ARCH_NAME.into(),
            dsig: DATA_SIGNATURE,
            addresses: ready_daemon.addresses,
        };
        send_reply(&reply_line(&Ok(ready_reply)));
        has_replied = true;
        Ok(())
    });
    match run_result {
        Ok(()) => 0,
        Err(e) => {
            if !has_replied {
                send_reply(&reply_line(&Err(Refusal {
                    error: PvmError::CantStart,
                    text: format!("{e:#}"),
                })));
            }
            1
        }
    }
}

fn build_setup(bootstrap: &Bootstrap) -> Result<DaemonSetup, Refusal> {
    let uid = getuid().as_raw();
    if let Some(text) = root_refusal(bootstrap.allow_root) {
        return Err(Refusal {
            error: PvmError::Denied,
            text,
        });
    }
    let host = host_from_bootstrap(bootstrap)?;
    let credentials = bootstrap.credentials().map_err(|decode_error| Refusal {
        error: PvmError::CantStart,
        text: decode_error.to_string(),
    })?;
    let vm = bootstrap.vm.clone();
    let runtime_dir = RuntimePaths::from_env(uid, |name| {
        if name == "PVM_VMID" {
            Some(vm.clone())
        } else {
            runtime_paths_variable(name)
        }
    })
    .map_err(|name_error| Refusal {
        error: PvmError::CantStart,
        text: name_error.to_string(),
    })?;
    let keep_log = env_var("SEMPA_LOG").is_some_and(|log_path| runtime_dir.log_file() == *log_path);
    let runtime_dir = RuntimeDir::acquire(runtime_dir, uid, keep_log).map_err(|e| {
        let error = if matches!(e, RuntimeDirError::Running { .. }) {
            PvmError::DupHost
        } else {
            PvmError::CantStart
        };
        Refusal {
            error,
            text: e.to_string(),
        }
    })?;
    let ssh_addresses = ssh_session_addresses(env_var("SSH_CONNECTION").as_deref());
    let mut masters = bootstrap.masters.clone();
    if let (Some((client_ip, _)), Some(port)) =
        (ssh_addresses, masters.first().map(SocketAddr::port))
    {
        // Most likely the master is on the host from which the remote shell was started, so the
        // address of this host is tried first.
        masters.retain(|address| address.ip() != client_ip);
        masters.insert(0, SocketAddr::new(client_ip, port));
    }
    Ok(DaemonSetup {
        runtime_dir,
        host,
        name: bootstrap.name.clone(),
        speed: bootstrap.speed,
        environment_settings: HostEnvironmentSettings {
            search_path: bootstrap.search_path.clone(),
            work_dir: bootstrap.work_dir.clone(),
            library: bootstrap.library.clone(),
            debugger: bootstrap.debugger.clone(),
        },
        lease: Duration::from_millis(bootstrap.lease_ms),
        preferred_addresses: ssh_addresses
            .map(|(_, server_ip)| server_ip)
            .into_iter()
            .collect(),
        role: Role::Slave {
            credentials,
            master_addresses: masters,
        },
    })
}
