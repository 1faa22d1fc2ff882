//! `pvm-rm`: the resource manager of a Sempa virtual machine.

use anyhow::Context;
use clap::{Parser, ValueEnum};
use pvm_rm::api::RealVm;
use pvm_rm::decide;
use pvm_rm::model::Labels;
use pvm_rm::service::{Options, Service, ServiceError};
use pvm_rm::spawns::Rules;
use pvm_rm::store::Shelf;
use sempa_proto::Micros;
use sempa_proto::place::{Place, STATE_FILE};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// The resource manager of a Sempa virtual machine: places the tasks that others spawn, and moves running tasks off hosts
/// whose owner is there.
///
/// It joins the virtual machine of this user as an ordinary task and stays in the foreground until the machine stops.
/// A virtual machine has one resource manager; while there is none, the daemons place tasks round robin. It starts one
/// pvm-load-watcher on every host, which senses load and owner. What it decides, and why, is in the event log
/// ('pvm events').
#[derive(Debug, Parser)]
#[command(name = "pvm-rm", version)]
struct Args {
    /// How new tasks are spread over the hosts. A host that the spawning program names is always used; a host whose
    /// owner is there is used for nothing else.
    #[arg(long, value_enum, default_value = "load")]
    policy: PolicyName,
    /// Move running tasks to hosts where they finish sooner, when that saves more than the move costs.
    #[arg(long)]
    balance: bool,
    /// How long a spawn that finds no free host waits for one before it is refused. Who has taken less goes first.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=604_800))]
    wait: u64,
    /// Tasks that a user may have at once.
    #[arg(long, value_name = "NUMBER")]
    user_tasks: Option<u32>,
    /// Tasks that a job may have at once.
    #[arg(long, value_name = "NUMBER")]
    job_tasks: Option<u32>,
    /// Something to say of a host that spawns can ask for, as 'h2:disk=ssd'; may be repeated.
    #[arg(long = "label", value_name = "HOST:NAME=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String, String)>,
    /// Where to keep usage, decisions and what was learned, in a file that only the own user can read. Without it they are
    /// kept beside the daemon's socket until the virtual machine is halted.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Start no load watchers: load and owners stay unknown, and no task is moved.
    #[arg(long)]
    no_watchers: bool,
}

fn parse_label(text: &str) -> Result<(String, String, String), String> {
    let parts = text.split_once(':').and_then(|(host, rest)| Some((host, rest.split_once('=')?)));
    let parts = parts.filter(|(host, (name, value))| ![host, name, value].iter().any(|part| part.trim().is_empty()));
    let (host, (name, value)) = parts.ok_or_else(|| format!("{text:?} is not a label; it looks like h2:disk=ssd"))?;
    Ok((host.trim().to_string(), name.trim().to_string(), value.trim().to_string()))
}

/// The labels of each host.
fn labels(given: &[(String, String, String)]) -> Labels {
    let mut of_hosts = BTreeMap::<String, BTreeMap<String, String>>::new();
    for (host, name, value) in given {
        of_hosts.entry(host.clone()).or_default().insert(name.clone(), value.clone());
    }
    of_hosts.into_iter().map(|(host, labels)| (host, Arc::new(labels))).collect()
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyName {
    /// In turn, in blocks, as PVM does.
    RoundRobin,
    /// Where the predicted share of a processor is largest.
    Load,
}

/// Where the books are kept.
fn shelf(state: Option<&Path>) -> anyhow::Result<Shelf> {
    let place = Place::of(nix::unistd::geteuid().as_raw(), |name| std::env::var(name).ok());
    let place = place.map_err(anyhow::Error::msg)?;
    Ok(match state {
        Some(dir) => Shelf { dir: dir.to_path_buf(), name: format!("rm-{}.redb", place.vm()) },
        None => Shelf { dir: place.dir().to_path_buf(), name: STATE_FILE.to_string() },
    })
}

/// Nobody may be listening (any more), which is no reason to stop.
fn say(text: std::fmt::Arguments<'_>) {
    drop(writeln!(std::io::stdout(), "{text}"));
}

fn run(args: &Args) -> anyhow::Result<()> {
    let policy = match args.policy {
        PolicyName::RoundRobin => decide::Policy::RoundRobin,
        PolicyName::Load => decide::Policy::Load,
    };
    let (watchers, balance) = (!args.no_watchers, args.balance);
    let limits = decide::Limits { user_tasks: args.user_tasks, job_tasks: args.job_tasks };
    let rules = Rules { wait: Micros::from_secs(args.wait), limits };
    let (user, shelf) = (nix::unistd::geteuid().as_raw(), shelf(args.state.as_deref()));
    let options = Options { policy, watchers, balance, rules, labels: labels(&args.labels), shelf: Some(shelf?), user };
    let vm = libpvm::Vm::enroll()?;
    let tid = vm.tid();
    let mut service = Service::start(RealVm::new(vm.clone()), options).inspect_err(|_| drop(vm.exit()))?;
    say(format_args!("pvm-rm {tid}: registered as resource manager, policy {policy}"));
    match service.run() {
        Err(why @ ServiceError::Stopped(_)) => {
            say(format_args!("pvm-rm {tid}: {why}"));
            Ok(())
        }
        Err(why) => {
            drop(vm.exit());
            Err(why).with_context(|| format!("pvm-rm {tid}"))
        }
        Ok(never) => match never {},
    }
}

/// The error and its causes, each said once: some sentences contain their cause already.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvm-rm: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}
