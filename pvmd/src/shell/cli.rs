//! The command line of `pvmd`. As in PVM, option values may follow the option without a space.

use super::daemon::{self, DaemonSetup, Role};
use super::env::{env_var, root_refusal, runtime_paths_variable};
use super::host_env::HostEnvironmentSettings;
use super::net::LEASE_DEFAULT;
use super::runtime_dir::RuntimeDir;
use super::{address, foreign_library, slave, sys};
use anyhow::{Context, bail};
use clap::Parser;
use nix::unistd::{gethostname, getuid};
use pvmd_machine::master_plan;
use sempa_proto::HostId;
use sempa_proto::runtime_paths::RuntimePaths;
use std::io::Write;
use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Size limit of a host file.
const HOSTFILE_BYTES_MAX: u64 = 4 << 20;
/// Allowed leases in milliseconds: shortest and longest.
const LEASE_MS_RANGE: std::ops::RangeInclusive<u64> = 200..=3_600_000;

/// The daemon of one host of a parallel virtual machine.
///
/// Without -s it founds a virtual machine, prints the path of its socket as one line when it is
/// ready, and serves in the foreground until it is halted (`pvm halt`) or gets SIGTERM or SIGINT.
#[derive(Debug, Parser)]
#[command(name = "pvmd", version)]
struct Arguments {
    /// Debug mask as in PVM (0x… hexadecimal, 0… octal); accepted for compatibility.
    #[arg(short = 'd', long = "debug", value_name = "MASK", value_parser = parse_mask)]
    debug: Option<u32>,
    /// Name or address of this host for the other hosts.
    #[arg(short = 'n', long = "name", value_name = "NAME")]
    name: Option<String>,
    /// With -s: stay in the foreground.
    #[arg(short = 'f', long = "foreground")]
    foreground: bool,
    /// Serve a master that has started this program through a remote shell; its instructions come
    /// over standard input.
    #[arg(
        short = 's',
        visible_short_alias = 'S',
        long = "slave",
        conflicts_with = "hostfile"
    )]
    slave: bool,
    /// With -s: fetch the instructions from these addresses of the master, with the secret from
    /// standard input (for hosters, and by hand: so=ms).
    #[arg(
        short = 'j',
        long = "join",
        value_name = "ADDRESS,…",
        requires = "slave"
    )]
    join: Option<String>,
    /// Print which PVM library a process uses. The daemon starts this program so, because it has
    /// given up the capability to read the files of other processes.
    #[arg(long, value_name = "PID", hide = true)]
    inspect_process: Option<i32>,
    /// File with hosts to add at once, one on each line (`PVMHOSTFILE` if not given).
    hostfile: Option<PathBuf>,
}

/// The argument is not a number of 32 bits. No mask is set.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("{0}: a mask is a number such as 0x1f")]
struct MaskError(ParseIntError);

fn parse_mask(text: &str) -> Result<u32, MaskError> {
    let mask = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex_digits) => u32::from_str_radix(hex_digits, 16),
        None if text.starts_with('0') => u32::from_str_radix(text, 8),
        None => text.parse(),
    };
    mask.map_err(MaskError)
}

/// Runs the program and returns its exit status. Must be called before the program opens any file.
pub fn main() -> i32 {
    sys::close_inherited_fds();
    let arguments = Arguments::parse();
    if let Some(pid) = arguments.inspect_process {
        return foreign_library::print_inspection(pid);
    }
    if arguments.slave {
        return slave::run_slave(arguments.foreground, arguments.join.as_deref());
    }
    match run_master(arguments) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("pvmd: {e:#}");
            1
        }
    }
}

fn run_master(arguments: Arguments) -> anyhow::Result<()> {
    if let Some(text) = root_refusal(false) {
        bail!(text);
    }
    let uid = getuid().as_raw();
    let runtime_dir = RuntimePaths::from_env(uid, runtime_paths_variable)?;
    let hostfile_lines = arguments
        .hostfile
        .or_else(|| env_var("PVMHOSTFILE").map(PathBuf::from));
    let hostfile_lines = hostfile_lines.map_or(Ok(Vec::new()), |path| read_hostfile(&path))?;
    let machine_name = gethostname()
        .context("cannot find this host's name")?
        .to_string_lossy()
        .into_owned();
    let mut preferred_addresses = Vec::new();
    if let Some(name) = &arguments.name {
        preferred_addresses = address::resolve(name);
        if preferred_addresses.is_empty() {
            bail!(
                "-n{name}: this name has no address; use a name by which other hosts can reach this host"
            );
        }
    }
    let name = arguments.name.unwrap_or(machine_name);
    let plan = master_plan(&hostfile_lines, &name);
    if preferred_addresses.is_empty() && plan.contact != name {
        preferred_addresses = address::resolve(&plan.contact);
        if preferred_addresses.is_empty() {
            let contact = plan.contact;
            bail!(
                "ip={contact} on this host's line of the host file has no address; give one that other hosts can reach"
            );
        }
    }
    let keep_log = env_var("SEMPA_LOG").is_some_and(|log| runtime_dir.log_file() == *log);
    let lease = configured_lease()?;
    let runtime_dir = RuntimeDir::acquire(runtime_dir, uid, keep_log)?;
    let setup = DaemonSetup {
        runtime_dir,
        host: HostId::MASTER,
        name,
        speed: plan.speed,
        environment_settings: HostEnvironmentSettings {
            search_path: plan.search_path,
            work_dir: plan.work_dir,
            library: None,
            debugger: plan.debugger,
        },
        lease,
        preferred_addresses,
        role: Role::Master { hostfile_lines },
    };
    daemon::run_daemon(setup, |ready_daemon| {
        // Programs that start the daemon wait for the line with the socket's path. If the pipe is
        // closed, no program reads the line, and the daemon runs all the same.
        let mut stdout = std::io::stdout();
        let _ = writeln!(stdout, "{}", ready_daemon.socket.display()).and_then(|()| stdout.flush());
        Ok(())
    })
}

fn configured_lease() -> anyhow::Result<Duration> {
    let Some(text) = env_var("SEMPA_LEASE_MS") else {
        return Ok(LEASE_DEFAULT);
    };
    match text.parse() {
        Ok(lease_ms) if LEASE_MS_RANGE.contains(&lease_ms) => Ok(Duration::from_millis(lease_ms)),
        _ => bail!(
            "SEMPA_LEASE_MS={text:?} is not a number of milliseconds from {} to {}",
            LEASE_MS_RANGE.start(),
            LEASE_MS_RANGE.end()
        ),
    }
}

fn read_hostfile(path: &Path) -> anyhow::Result<Vec<String>> {
    let error_context = || format!("cannot read the host file {}", path.display());
    let file_metadata = std::fs::metadata(path).with_context(error_context)?;
    if !file_metadata.is_file() || file_metadata.len() > HOSTFILE_BYTES_MAX {
        bail!(
            "{}: it is not a file of at most {HOSTFILE_BYTES_MAX} bytes",
            error_context()
        );
    }
    let text = std::fs::read_to_string(path).with_context(error_context)?;
    Ok(text.lines().map(str::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_values_may_follow_without_space() {
        let arguments =
            Arguments::try_parse_from(["pvmd", "-d0x1f", "-nh1", "hosts"]).expect("as PVM");
        assert_eq!(
            (arguments.debug, arguments.name.as_deref()),
            (Some(31), Some("h1"))
        );
        assert_eq!(arguments.hostfile, Some(PathBuf::from("hosts")));
        assert!(
            Arguments::try_parse_from(["pvmd", "-s", "-f"]).is_ok_and(|a| a.slave && a.foreground)
        );
        assert!(
            Arguments::try_parse_from(["pvmd", "-S", "--join", "10.0.0.1:9"])
                .is_ok_and(|a| a.slave)
        );
        assert!(Arguments::try_parse_from(["pvmd", "one", "two"]).is_err());
        assert_eq!(parse_mask("017"), Ok(15));
    }
}
