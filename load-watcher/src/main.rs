//! `pvm-load-watcher`: notifies the daemon of its host whether guests may run, and reports the
//! host's load and owner to the resource manager.

mod directive;
mod guest_status;
mod machine;
mod machine_client;
mod own_sense;
mod owner_view;
mod rm_link;
mod sensors;
mod status_report;
mod watcher;

use clap::Parser;
use libpvm::Vm;
use machine::MachineWatcher;
use pvm_load_watcher::policy::{Policy, PolicyError};
use rm_link::RmSubscription;
use sempa_proto::Tid;
use std::path::PathBuf;
use std::process::ExitCode;
use thiserror::Error;
use watcher::Watcher;

/// Watches one host of a Sempa virtual machine, or a whole machine: samples its load, detects its
/// owner, and has guests stopped while the owner needs the machine.
///
/// The daemon of each host starts one load watcher; if one dies, the daemon starts another. A
/// resource manager asks it for reports, or replaces it by its own. A user who is logged in counts
/// as the owner of the host, unless there was no input for a quarter of an hour. The owner's
/// policy decides what guests may do then and otherwise: see `pvm help owner`.
#[derive(Debug, Parser)]
#[command(name = "pvm-load-watcher", version)]
struct Args {
    /// Task id of the resource manager, as 't40002'; without it the load watcher reports to the
    /// first one that asks for reports.
    #[arg(long, value_name = "TID", value_parser = parse_tid)]
    report_to: Option<Tid>,
    /// Message context of the reports.
    #[arg(long, default_value_t = 0)]
    ctx: i32,
    /// Message tag of the reports.
    #[arg(long, default_value_t = 5)]
    tag: i32,
    /// Serves all virtual machines of this machine, on a socket in this folder, instead of one. The
    /// tasker service starts such a load watcher as root; standard input is a connection to it.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["report_to", "owner_policy"])]
    machine: Option<PathBuf>,
    #[command(flatten)]
    sources: SourceArgs,
    /// Policy of the user of the virtual machine [default: the user's ~/.config/sempa/owner.toml].
    #[arg(long, env = "SEMPA_OWNER_POLICY", value_name = "FILE")]
    owner_policy: Option<PathBuf>,
    /// Settings that the user of the virtual machine asks for where owner and administrator set
    /// nothing, in the format of a policy file, as 'leave_after = 30'.
    #[arg(long, env = "SEMPA_GUEST_DEFAULTS", value_name = "SETTINGS", value_parser = parse_guest_defaults, default_value = "")]
    guest_defaults: GuestDefaults,
}

/// The files and folders in which the load watcher looks for an owner.
#[derive(Clone, Debug, clap::Args)]
struct SourceArgs {
    /// File with the login records [default: /run/utmp, then /var/run/utmp].
    #[arg(long, env = "SEMPA_UTMP", value_name = "FILE")]
    utmp: Option<PathBuf>,
    /// Folder with the sessions of systemd-logind.
    #[arg(long, env = "SEMPA_SESSIONS", value_name = "DIR", default_value = pvm_load_watcher::probes::SESSIONS_DIR)]
    sessions: PathBuf,
    /// Address of the D-Bus bus of systemd-logind.
    #[arg(long, env = "SEMPA_BUS", value_name = "ADDRESS", default_value = pvm_load_watcher::logind::SYSTEM_BUS)]
    bus: String,
    /// Folder with the terminals.
    #[arg(long, env = "SEMPA_TERMINALS", value_name = "DIR", default_value = pvm_load_watcher::probes::TERMINALS_DIR)]
    terminals: PathBuf,
    /// File with the interrupt counters.
    #[arg(long, env = "SEMPA_INTERRUPTS", value_name = "FILE", default_value = pvm_load_watcher::probes::INTERRUPTS_FILE)]
    interrupts: PathBuf,
    /// File with the available memory, in the format of /proc/meminfo.
    #[arg(long, env = "SEMPA_MEMINFO", value_name = "FILE")]
    meminfo: Option<PathBuf>,
    /// Policy of the administrator; it must belong to root unless the load watcher runs as root.
    #[arg(long, env = "SEMPA_ADMIN_POLICY", value_name = "FILE", default_value = pvm_load_watcher::host_policy::ADMIN_FILE)]
    admin_policy: PathBuf,
    /// Folder with what owners say with `pvm owner`; it must belong to root unless the load watcher
    /// runs as root.
    #[arg(long, env = "SEMPA_OWNER_WORDS", value_name = "DIR", default_value = pvm_load_watcher::owner_override::OVERRIDES_DIR)]
    owner_words: PathBuf,
}

/// Settings that the user of the virtual machine asks for.
#[derive(Clone, Debug)]
struct GuestDefaults {
    /// In the format of a policy file.
    text: String,
    policy: Policy,
}

/// The contained argument is not the tid of a task. The load watcher does not start.
#[derive(Debug, Error)]
#[error("{0:?} is not a tid; tids look like t40002")]
struct TidError(String);

fn parse_tid(text: &str) -> Result<Tid, TidError> {
    let raw = u32::from_str_radix(text.strip_prefix('t').unwrap_or(text), 16);
    let tid = raw
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
        .filter(|tid| tid.is_task());
    tid.ok_or_else(|| TidError(text.to_string()))
}

fn parse_guest_defaults(text: &str) -> Result<GuestDefaults, PolicyError> {
    let policy = Policy::parse_without_owners("settings", text)?;
    let text = text.to_string();
    Ok(GuestDefaults { text, policy })
}

fn run(args: Args) -> anyhow::Result<()> {
    sempa_socket::request_short_slice();
    if let Some(dir) = &args.machine {
        return MachineWatcher::open(dir, &args.sources)?.run_main_loop();
    }
    let vm = Vm::enroll()?;
    vm.set_automatic_routes(false);
    let rm_subscription = RmSubscription::start_tracking(&vm, args.report_to)?;
    Watcher::new(vm, rm_subscription, args)?.run_main_loop()
}

/// Joins the texts of an error and its causes in one line. Omits a cause whose text is already
/// contained.
fn format_error_chain(error: &anyhow::Error) -> String {
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
    sempa_logging::init_stderr("pvm-load-watcher");
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", format_error_chain(&error));
            ExitCode::FAILURE
        }
    }
}
