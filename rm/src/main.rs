//! `pvm-rm`: the resource manager of a Sempa virtual machine.

mod replay_display;

use anyhow::Context;
use clap::Parser;
use pvm_rm::api::RealVm;
use pvm_rm::decide::TaskLimits;
use pvm_rm::model::HostLabels;
use pvm_rm::policy::{self, EffectivePolicy};
use pvm_rm::recording::{self, Recorder};
use pvm_rm::service::{Options, Service, ServiceError};
use pvm_rm::spawns::SpawnRules;
use pvm_rm::store::StoreLocation;
use pvm_rm::{policy_file, replay};
use replay_display::ReplayDisplay;
use sempa_proto::Micros;
use sempa_proto::runtime_paths::RM_DATABASE_FILE;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use thiserror::Error;

/// The resource manager of a Sempa virtual machine: places spawned tasks, and migrates running
/// tasks off hosts whose owner is present.
///
/// It joins the user's virtual machine as an ordinary task and stays in the foreground until the
/// virtual machine stops. A virtual machine has at most one resource manager; without one, the
/// daemons place tasks round robin. It starts a pvm-load-watcher on every host, which detects load
/// and owner. Its decisions and their reasons are in the event log ('pvm events').
#[derive(Debug, Parser)]
#[command(name = "pvm-rm", version)]
struct Args {
    /// How new tasks are distributed over the hosts: 'load', to the largest predicted share of a
    /// processor; 'round-robin', in blocks, as PVM does; 'choice:NAME', by an adapter of that name;
    /// or the name of a policy file, which is read again whenever it changes. A host whose owner is
    /// present, or has closed or limited it, is not used, even by name.
    #[arg(long, default_value = "load", value_name = "NAME|FILE")]
    policy: String,
    /// Migrate running tasks to hosts where they finish sooner, if that saves more time than the
    /// migration costs.
    #[arg(long)]
    balance: bool,
    /// Maximum time that a spawn waits for a free host before it is refused. Users who have used
    /// less processor time are served first.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=604_800))]
    wait: u64,
    /// Disable preemption. Without this option, while a spawn waits, tasks of users who have used
    /// far more processor time are suspended to make room, and resume when there is room again.
    #[arg(long)]
    no_give_way: bool,
    /// Maximum number of tasks of a user at once.
    #[arg(long, value_name = "NUMBER")]
    user_tasks: Option<u32>,
    /// Maximum number of tasks of a job at once.
    #[arg(long, value_name = "NUMBER")]
    job_tasks: Option<u32>,
    /// A label of a host that spawns can require, as 'h2:disk=ssd'; may be repeated.
    #[arg(long = "label", value_name = "HOST:NAME=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String, String)>,
    /// Directory for usage, decisions and learned values, in a file that only the user can read. By
    /// default they are stored in the directory of the daemon's socket until the virtual machine is
    /// halted.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Record the input of the resource manager in this file, for '--replay' and 'pvm replay'. An
    /// existing file is renamed with the suffix '.before'.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Replay a record under its own policy and under that of '--policy', and compare the results.
    /// Joins no virtual machine.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// With '--replay': print the result as JSON.
    #[arg(long, requires = "replay")]
    json: bool,
    /// Start no load watchers and use none: load and owners stay unknown, and no task is migrated.
    #[arg(long)]
    no_watchers: bool,
}

/// The contained argument is not of the form `HOST:NAME=VALUE`. No label is set.
#[derive(Debug, Error)]
#[error("{0:?} is not a label; labels look like h2:disk=ssd")]
struct LabelError(String);

fn parse_label(text: &str) -> Result<(String, String, String), LabelError> {
    let fields = text
        .split_once(':')
        .and_then(|(host, rest)| Some((host, rest.split_once('=')?)));
    let fields = fields.filter(|(host, (name, value))| {
        ![host, name, value]
            .iter()
            .any(|field| field.trim().is_empty())
    });
    let (host, (name, value)) = fields.ok_or_else(|| LabelError(text.to_string()))?;
    Ok((
        host.trim().to_string(),
        name.trim().to_string(),
        value.trim().to_string(),
    ))
}

/// Groups the labels by host.
fn group_labels(arguments: &[(String, String, String)]) -> HostLabels {
    let mut labels_by_host = BTreeMap::<String, BTreeMap<String, String>>::new();
    for (host, name, value) in arguments {
        labels_by_host
            .entry(host.clone())
            .or_default()
            .insert(name.clone(), value.clone());
    }
    labels_by_host
        .into_iter()
        .map(|(host, labels)| (host, Arc::new(labels)))
        .collect()
}

/// Returns the location of the history's database: in `state_dir` if it is not `None`, otherwise in
/// the directory of the daemon's socket.
fn store_location(state_dir: Option<&Path>) -> anyhow::Result<StoreLocation> {
    let env_variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let uid = nix::unistd::geteuid().as_raw();
    let runtime_paths = libpvm::runtime::runtime_paths(uid, env_variable)?;
    // A spawned task knows the socket of its daemon, but possibly not the environment variables
    // from which the daemon chose its directory.
    let socket =
        env_variable("PVMSOCK").map_or_else(|| runtime_paths.daemon_socket_path(), PathBuf::from);
    Ok(match state_dir {
        Some(dir) => StoreLocation {
            dir: dir.to_path_buf(),
            file_name: format!("rm-{}.redb", runtime_paths.vm_name()),
        },
        None => StoreLocation {
            dir: socket.parent().unwrap_or(runtime_paths.dir()).to_path_buf(),
            file_name: RM_DATABASE_FILE.to_string(),
        },
    })
}

/// Prints a line to standard output. An error is ignored, because a closed standard output is no
/// reason to stop.
fn print_line(text: std::fmt::Arguments<'_>) {
    drop(writeln!(std::io::stdout(), "{text}"));
}

/// Returns the policy of the command line, and the path of the policy file if the command line
/// names one.
fn command_line_policy(args: &Args) -> anyhow::Result<(EffectivePolicy, Option<PathBuf>)> {
    let limits = TaskLimits {
        user_tasks_max: args.user_tasks,
        job_tasks_max: args.job_tasks,
    };
    let rules = SpawnRules {
        wait_max: Micros::from_secs(args.wait),
        task_limits: limits,
    };
    let base_policy = EffectivePolicy {
        rebalances: args.balance,
        spawn_rules: rules,
        preempts: !args.no_give_way,
        ..EffectivePolicy::default()
    };
    match args.policy.as_str() {
        "load" => Ok((base_policy, None)),
        name if name == "round-robin" || name.starts_with("choice:") => {
            let placement_policy = policy::parse_placement(name)?;
            Ok((
                EffectivePolicy {
                    placement: placement_policy,
                    ..base_policy
                },
                None,
            ))
        }
        file => Ok((base_policy, Some(file.into()))),
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let (base_policy, policy_path) = command_line_policy(args)?;
    let policy_file = policy_path
        .as_ref()
        .map(|path| path.display().to_string())
        .unwrap_or_default();
    let content_result = policy_path.as_deref().map(policy_file::read);
    let mut options = Options {
        policy: base_policy,
        command_line_policy: base_policy,
        policy_file,
        policy_content: content_result,
        ..Options::default()
    };
    let policy = options.start_policy();
    if let Some(record_path) = &args.replay {
        return replay(record_path, policy?, args.json);
    }
    let location = store_location(args.state.as_deref())?;
    let policy_error = match policy.err() {
        // Without a history there is no earlier policy that could stay in force.
        Some(error) if !location.exists() => return Err(error.into()),
        policy_error => policy_error,
    };
    let initial_content = options.policy_content.clone();
    options.default_user = nix::unistd::geteuid().as_raw();
    (
        options.starts_watchers,
        options.labels,
        options.store_location,
    ) = (
        !args.no_watchers,
        group_labels(&args.labels),
        Some(location),
    );
    let recorder = args.record.as_deref().map(Recorder::create).transpose()?;
    let vm = libpvm::Vm::enroll()?;
    let tid = vm.tid();
    let mut service =
        Service::start(RealVm::new(vm.clone()), options).inspect_err(|_| drop(vm.exit()))?;
    recorder
        .into_iter()
        .for_each(|recorder| service.start_recording(recorder));
    if let (Some(policy_path), Some(initial_content)) = (&policy_path, initial_content) {
        let watch_result = policy_file::watch(policy_path, initial_content, &vm);
        let watch_result =
            watch_result.with_context(|| format!("following changes of {}", policy_path.display()));
        match (policy_error, watch_result) {
            (None, watch_result) => watch_result?,
            // The watch may have ended because the directory was removed together with the file.
            (Some(service_error), watch_result) => {
                tracing::warn!("{service_error}; the policy is unchanged");
                watch_result.unwrap_or_else(|error| tracing::warn!("{}", one_line(&error)));
            }
        }
    }
    print_line(format_args!(
        "pvm-rm {tid}: registered as resource manager, policy {}",
        service.policy().placement
    ));
    sempa_socket::request_short_slice();
    match service.run() {
        Err(service_error @ ServiceError::Stopped(_)) => {
            print_line(format_args!("pvm-rm {tid}: {service_error}"));
            Ok(())
        }
        Err(service_error) => {
            drop(vm.exit());
            Err(service_error).with_context(|| format!("pvm-rm {tid}"))
        }
        Ok(never) => match never {},
    }
}

/// Replays a record under its own policy and under `policy`, and prints both results.
fn replay(record_path: &Path, policy: EffectivePolicy, json: bool) -> anyhow::Result<()> {
    let entries = recording::read(record_path)?;
    let replay_under = |subject, policy: replay::ReplayPolicy| {
        let display = ReplayDisplay::new(subject);
        replay::replay_with_progress(&entries, policy, move |progress| display.show(progress))
    };
    let recorded_result = replay_under("recorded policy", replay::recorded_policy(&entries))?;
    let other_result = replay_under("other policy", policy.into())?;
    if json {
        let results = serde_json::json!({ "recorded": recorded_result, "other": other_result });
        print_line(format_args!("{results}"));
    } else {
        print_line(format_args!(
            "{}",
            replay::comparison_table([("recorded", &recorded_result), ("other", &other_result)])
                .trim_end()
        ));
    }
    Ok(())
}

/// Joins an error and its causes in one line. A cause that the text already contains is omitted.
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
    sempa_logging::init_stderr("pvm-rm");
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}
