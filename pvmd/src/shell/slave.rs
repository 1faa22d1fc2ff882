//! `pvmd -s`: a daemon that a master starts through a remote shell.
//!
//! 1. It reads the master's bootstrap line from standard input, or fetches it from the master
//!    (`sealed_bootstrap`).
//! 2. It forks; the child leaves the shell's session and sets up the daemon.
//! 3. The child answers with one line. The parent, for which the shell waits, prints this line and
//!    exits.

use super::address::ssh_session_addresses;
use super::bootstrap::{BOOTSTRAP_BYTES_MAX, Bootstrap, ReadyReply, Refusal, host_of, reply_line};
use super::daemon::{self, DaemonSetup, Role};
use super::env::{env_var, root_refusal, runtime_paths_variable};
use super::host_env::{ARCH, DSIG, HostEnvironmentSettings};
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

/// Runs a slave and returns the exit status of this process.
pub(crate) fn run(foreground: bool, masters: Option<&str>) -> i32 {
    let bootstrap = match masters.map_or_else(read_bootstrap, fetch_bootstrap) {
        Ok(bootstrap) => bootstrap,
        Err(refusal) => return print_reply(&reply_line(&Err(refusal))),
    };
    if foreground {
        return serve(&bootstrap, &mut |line| print_reply(line));
    }
    let forked = std::io::pipe().map(|pipe| (fork_before_threads(), pipe));
    let (fork, (reader, writer)) = match forked {
        Ok((Ok(fork), pipe)) => (fork, pipe),
        Ok((Err(errno), _)) => return print_reply(&reply_line(&Err(cannot_start("fork", errno)))),
        Err(e) => return print_reply(&reply_line(&Err(cannot_start("make a pipe", e)))),
    };
    match fork {
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

fn cannot_start(act: &str, e: impl std::fmt::Display) -> Refusal {
    Refusal {
        error: PvmError::CantStart,
        text: format!("cannot {act}: {e}"),
    }
}

/// Prints a reply and returns the exit status that goes with it.
fn print_reply(line: &str) -> i32 {
    let printed = writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
    i32::from(printed.is_err() || !line.starts_with("ddpro<"))
}

/// In the parent: prints the child's line, so that the remote shell ends when the daemon is ready.
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

/// In the child: leaves the session, replaces the standard descriptors by /dev/null, and serves.
fn serve_detached(bootstrap: &Bootstrap, mut writer: PipeWriter) -> i32 {
    let mut answer = |line: &str| {
        // If the parent was killed, the line is lost; the master then gives up, and this daemon
        // ends.
        let _ = writeln!(writer, "{line}");
        0
    };
    let detached = setsid().map_err(std::io::Error::from).and_then(|_| {
        let null = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        dup2_stderr(&null)?;
        Ok(())
    });
    if let Err(e) = detached {
        return answer(&reply_line(&Err(cannot_start("leave the session", e))));
    }
    serve(bootstrap, &mut answer)
}

/// Reads the master's line from standard input. Old hosters write a line `PVM_VMID=…` before it,
/// which is skipped.
fn read_bootstrap() -> Result<Bootstrap, Refusal> {
    let mut input = BufReader::new(std::io::stdin()).take(BOOTSTRAP_BYTES_MAX as u64);
    loop {
        let mut line = String::new();
        let read = input
            .read_line(&mut line)
            .map_err(|e| cannot_start("read standard input", e))?;
        if read == 0 {
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

/// Fetches the bootstrap line from the master and decrypts it with the secret that a hoster or a
/// person has entered on standard input.
fn fetch_bootstrap(masters: &str) -> Result<Bootstrap, Refusal> {
    let text = manual_start::read_secret().map_err(|e| cannot_start("read standard input", e))?;
    let secret = BootstrapSecret::parse(&text)
        .ok_or_else(|| cannot_start("start", "standard input brought no secret of a master"))?;
    Bootstrap::parse(sealed_bootstrap::fetch_line(masters, &secret)?.trim_end())
}

/// Sets the daemon up, replies to the master, and runs it to its end.
fn serve(bootstrap: &Bootstrap, answer: &mut dyn FnMut(&str) -> i32) -> i32 {
    let setup = match build_setup(bootstrap) {
        Ok(setup) => setup,
        Err(refusal) => {
            answer(&reply_line(&Err(refusal)));
            return 1;
        }
    };
    let mut answered = false;
    let ended = daemon::run(setup, |ready_daemon| {
        let ready = ReadyReply {
            arch: ARCH.into(),
            dsig: DSIG,
            addresses: ready_daemon.addresses,
        };
        answer(&reply_line(&Ok(ready)));
        answered = true;
        Ok(())
    });
    match ended {
        Ok(()) => 0,
        Err(e) => {
            if !answered {
                answer(&reply_line(&Err(Refusal {
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
    let host = host_of(bootstrap)?;
    let identity = bootstrap.credentials().map_err(|broken| Refusal {
        error: PvmError::CantStart,
        text: broken.to_string(),
    })?;
    let vm = bootstrap.vm.clone();
    let runtime_dir = RuntimePaths::from_env(uid, |name| {
        if name == "PVM_VMID" {
            Some(vm.clone())
        } else {
            runtime_paths_variable(name)
        }
    })
    .map_err(|text| Refusal {
        error: PvmError::CantStart,
        text,
    })?;
    let keep_log = env_var("SEMPA_LOG").is_some_and(|log| runtime_dir.log_file() == *log);
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
    let ssh = ssh_session_addresses(env_var("SSH_CONNECTION").as_deref());
    let mut masters = bootstrap.masters.clone();
    if let (Some((client, _)), Some(port)) = (ssh, masters.first().map(SocketAddr::port)) {
        // The master is most likely on the host that the remote shell came from, so that address is
        // tried first.
        masters.retain(|m| m.ip() != client);
        masters.insert(0, SocketAddr::new(client, port));
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
        preferred_addresses: ssh.map(|(_, server)| server).into_iter().collect(),
        role: Role::Slave { identity, masters },
    })
}
