//! `pvm-load-watcher`: tells its daemon what guests may do on this host, and the resource manager about its load and owner.

mod boss;
mod watcher;

use boss::Boss;
use clap::Parser;
use libpvm::Vm;
use pvm_load_watcher::policy::Policy;
use sempa_proto::Tid;
use std::path::PathBuf;
use std::process::ExitCode;
use watcher::Watcher;

/// Watches one host for the resource manager of a Sempa virtual machine: samples its load and senses its owner.
///
/// The resource manager starts one on every host, or, when it has died there, the daemon of the host. It outlives the resource
/// manager, so that the owner is guarded without one too, and reports to the next one. Somebody who is logged in counts as the owner of the host, unless there was no input for
/// a quarter of an hour. What guests may do then, and otherwise, is up to the owner's policy: `pvm help owner`.
#[derive(Debug, Parser)]
#[command(name = "pvm-load-watcher", version)]
struct Args {
    /// Task id of the resource manager, as 't40002'; without it the load watcher reports to the first that asks.
    #[arg(long, value_name = "TID", value_parser = parse_tid)]
    report_to: Option<Tid>,
    /// Context of the reports.
    #[arg(long, default_value_t = 0)]
    ctx: i32,
    /// Tag of the reports.
    #[arg(long, default_value_t = 5)]
    tag: i32,
    /// File of the login records [default: /run/utmp, then /var/run/utmp].
    #[arg(long, env = "SEMPA_UTMP", value_name = "FILE")]
    utmp: Option<PathBuf>,
    /// Folder of systemd-logind's sessions.
    #[arg(long, env = "SEMPA_SESSIONS", value_name = "DIR", default_value = pvm_load_watcher::senses::SESSIONS_DIR)]
    sessions: PathBuf,
    /// Address of the bus on which systemd-logind is asked.
    #[arg(long, env = "SEMPA_BUS", value_name = "ADDRESS", default_value = pvm_load_watcher::logind::BUS)]
    bus: String,
    /// Folder of terminals.
    #[arg(long, env = "SEMPA_TERMINALS", value_name = "DIR", default_value = pvm_load_watcher::senses::TERMINALS_DIR)]
    terminals: PathBuf,
    /// File in which interrupts are counted.
    #[arg(long, env = "SEMPA_INTERRUPTS", value_name = "FILE", default_value = pvm_load_watcher::senses::INTERRUPTS_FILE)]
    interrupts: PathBuf,
    /// File that says how much memory can be had, as /proc/meminfo does.
    #[arg(long, env = "SEMPA_MEMINFO", value_name = "FILE")]
    meminfo: Option<PathBuf>,
    /// The policy of the user of the virtual machine [default: his ~/.config/sempa/owner.toml].
    #[arg(long, env = "SEMPA_OWNER_POLICY", value_name = "FILE")]
    owner_policy: Option<PathBuf>,
    /// The administrator's policy; unless the load watcher is root's, it has to be a file of root's.
    #[arg(long, env = "SEMPA_ADMIN_POLICY", value_name = "FILE", default_value = pvm_load_watcher::rules::ADMIN_FILE)]
    admin_policy: PathBuf,
    /// Folder of what owners say with `pvm owner`; unless the load watcher is root's, it has to be a folder of root's.
    #[arg(long, env = "SEMPA_OWNER_WORDS", value_name = "DIR", default_value = pvm_load_watcher::word::WORDS_DIR)]
    owner_words: PathBuf,
    /// What the user of the virtual machine asks for where owner and administrator say nothing: settings as in a policy file,
    /// as 'leave_after = 30'.
    #[arg(long, env = "SEMPA_GUEST_DEFAULTS", value_name = "SETTINGS", value_parser = parse_settings, default_value = "")]
    guest_defaults: Policy,
}

fn parse_tid(text: &str) -> Result<Tid, String> {
    let raw = u32::from_str_radix(text.strip_prefix('t').unwrap_or(text), 16);
    let tid = raw
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
        .filter(|tid| tid.is_task());
    tid.ok_or_else(|| format!("{text:?} is not the id of a task; it looks like t40002"))
}

fn parse_settings(text: &str) -> Result<Policy, String> {
    Policy::parse_own("settings", text).map_err(|error| error.to_string())
}

fn run(args: Args) -> anyhow::Result<()> {
    sempa_socket::take_short_turns();
    let vm = Vm::enroll()?;
    let boss = Boss::follow(&vm, args.report_to)?;
    Watcher::new(vm, boss, args)?.run()
}

/// The error and its causes, each said once: some sentences contain their cause already.
fn one_line(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .fold(error.to_string(), |text, cause| {
            let cause = cause.to_string();
            if text.contains(&cause) {
                text
            } else {
                format!("{text}: {cause}")
            }
        })
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvm-load-watcher: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}
