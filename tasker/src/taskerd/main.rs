//! `pvm-taskerd`: starts taskers as root for the daemons of all users of a host.
//!
//! A daemon connects to the socket of this service. The kernel names the user of the daemon, and
//! the service starts a `pvm-tasker` that runs the tasks of this user and of no other. The service
//! itself reads one short message of each connection, and never anything that a user has written
//! into a file.
//!
//! Taskers outlive the service: a new version can be installed while tasks run. The sessions are
//! recorded in a directory that only root can change.

mod listener;
mod machine_watcher;
mod pending;
mod registry;
mod service;

use anyhow::{Context, bail};
use sempa_proto::tasker_service::SESSIONS_DIR;
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: pvm-taskerd [--socket PATH] [--sessions DIR]; it is started by root or by systemd, see \
                     pvm-taskerd(8)";

/// The command line of the service.
#[derive(Debug, PartialEq, Eq)]
enum CommandLine {
    Help,
    Version,
    Serve {
        /// `None` for the socket that systemd passes, or the usual path.
        socket_path: Option<PathBuf>,
        sessions_dir: PathBuf,
    },
}

impl CommandLine {
    fn parse(args: &[String]) -> anyhow::Result<Self> {
        let (mut socket_path, mut sessions_dir) = (None, PathBuf::from(SESSIONS_DIR));
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().map(PathBuf::from).context(USAGE);
            match arg.as_str() {
                "--help" | "-h" => return Ok(Self::Help),
                "--version" | "-V" => return Ok(Self::Version),
                "--socket" => socket_path = Some(value()?),
                "--sessions" => sessions_dir = value()?,
                _ => bail!("unknown argument {arg:?}; {USAGE}"),
            }
        }
        Ok(Self::Serve {
            socket_path,
            sessions_dir,
        })
    }
}

fn main() -> ExitCode {
    sempa_logging::init_stderr("pvm-taskerd");
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match CommandLine::parse(&args)? {
        CommandLine::Help => println!("{USAGE}"),
        CommandLine::Version => println!("pvm-taskerd {}", env!("CARGO_PKG_VERSION")),
        CommandLine::Serve {
            socket_path,
            sessions_dir,
        } => {
            if !nix::unistd::geteuid().is_root() {
                bail!(
                    "pvm-taskerd starts taskers for all users of this host, so it must run as root; without it, \
                     each user's own daemon starts a tasker"
                );
            }
            let listener = listener::open(socket_path)?;
            let registry = registry::SessionRegistry::open(&sessions_dir).with_context(|| {
                format!("the records of sessions in {}", sessions_dir.display())
            })?;
            return service::Service::new(listener, registry)?.run();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_parsed() {
        let parse = |args: &[&str]| {
            let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
            CommandLine::parse(&args)
        };
        let defaults = CommandLine::Serve {
            socket_path: None,
            sessions_dir: SESSIONS_DIR.into(),
        };
        assert_eq!(parse(&[]).expect("valid"), defaults);
        let expected = CommandLine::Serve {
            socket_path: Some("/s".into()),
            sessions_dir: "/d".into(),
        };
        let args = ["--socket", "/s", "--sessions", "/d"];
        assert_eq!(parse(&args).expect("valid"), expected);
        assert_eq!(parse(&["-V"]).expect("valid"), CommandLine::Version);
        for args in [&["--socket"][..], &["x"]] {
            let error = parse(args).expect_err("invalid").to_string();
            assert!(error.contains("usage: pvm-taskerd"), "{error}");
        }
    }
}
