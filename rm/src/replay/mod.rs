//! Replays a recording: the service runs with a simulated virtual machine in virtual time. Hosts,
//! owners, external load and spawns are as recorded. The policy under test places the tasks, and
//! each task runs until it has done its recorded work.
//!
//! Simplifications, because a recording does not contain everything:
//!
//! - Tasks compute and do not wait for each other. The start of a task takes no time.
//! - A migration stops its task for the time that an image of 64 MiB takes. Vacating a job takes
//!   the same time.
//! - Spawns happen at the recorded times. A task that spawns other tasks ends after its last spawn
//!   and after its children.
//!
//! The results of two policies can therefore be compared with each other, but not with measurements
//! of a real system.

mod progress;
mod world;

use crate::model::HostLabels;
use crate::policy::EffectivePolicy;
use crate::recording::{RecordedInput, RecordingEntry};
use crate::service::{Options, Service, ServiceError};
use progress::Observer;
use sempa_proto::Micros;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use world::World;

pub use progress::ReplayProgress;
pub use world::TAIL_TIME_MAX;

/// Result of a replay under a policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReplayResult {
    pub policy: String,
    /// Number of requested spawns.
    pub spawns: u64,
    /// Number of started tasks.
    pub started: u64,
    /// Number of tasks that were not started.
    pub refused: u64,
    /// Number of started tasks by host.
    pub placed: BTreeMap<String, u64>,
    /// Mean time from a spawn request to its reply, in seconds.
    pub waited_mean_s: f64,
    /// Longest time from a spawn request to its reply, in seconds.
    pub waited_most_s: f64,
    /// Number of migrations because of owners, drains or requests.
    pub moves_owner: u64,
    /// Number of migrations for performance.
    pub moves_load: u64,
    /// Number of jobs that were vacated because of owners.
    pub parked: u64,
    /// Total time in seconds for which tasks did not run: they were paused for owners, suspended or
    /// migrating, or had done their work and waited for their children.
    pub stood_still_s: f64,
    /// Number of tasks that did all their work.
    pub finished: u64,
    /// Mean time from the start to the end of tasks that did all their work, in seconds.
    pub run_mean_s: f64,
    /// Latest end of a task that did all its work, in seconds after the start of the recording.
    pub last_end_s: f64,
    /// Number of tasks that were lost with their hosts.
    pub lost: u64,
    /// Results for the spawns and tasks of each user, by user.
    pub users: BTreeMap<u32, UserResult>,
}

/// Results for one user's spawns and tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct UserResult {
    /// Number of spawn requests with a reply.
    pub answered: u64,
    /// Number of spawn requests without a reply at the end of the replay.
    pub unanswered: u64,
    /// Mean time from a spawn request to its reply, in seconds.
    pub waited_mean_s: f64,
    /// Longest time from a spawn request to its reply, in seconds.
    pub waited_most_s: f64,
    /// Number of tasks that did all their work.
    pub finished: u64,
    /// Mean time from the start to the end of tasks that did all their work, in seconds.
    pub run_mean_s: f64,
    /// All times from a spawn request to its reply, in the order of the replies.
    #[serde(skip)]
    pub waits_s: Vec<f64>,
}

impl UserResult {
    fn new(waits_s: Vec<f64>, runs_s: Vec<f64>, unanswered: u64) -> Self {
        let mean = |values: &[f64]| {
            if values.is_empty() {
                0.0
            } else {
                values.iter().sum::<f64>() / values.len() as f64
            }
        };
        Self {
            answered: waits_s.len() as u64,
            unanswered,
            waited_mean_s: mean(&waits_s),
            waited_most_s: waits_s.iter().copied().fold(0.0, f64::max),
            finished: runs_s.len() as u64,
            run_mean_s: mean(&runs_s),
            waits_s,
        }
    }
}

/// Policy under which a recording is replayed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayPolicy {
    /// The policy at the start.
    pub initial: EffectivePolicy,
    /// True if the policy changes in the recording are replayed, at their recorded times.
    pub replays_changes: bool,
}

impl From<EffectivePolicy> for ReplayPolicy {
    fn from(policy: EffectivePolicy) -> Self {
        Self {
            initial: policy,
            replays_changes: false,
        }
    }
}

fn recorded_policies(entries: &[RecordingEntry]) -> impl Iterator<Item = EffectivePolicy> {
    entries.iter().filter_map(|entry| match &entry.input {
        RecordedInput::Policy(policy) => Some(*policy),
        _ => None,
    })
}

/// Returns the policy of the recording: the policy at its start, with all recorded changes.
pub fn recorded_policy(entries: &[RecordingEntry]) -> ReplayPolicy {
    let first_policy = recorded_policies(entries).next().unwrap_or_default();
    ReplayPolicy {
        initial: first_policy,
        replays_changes: recorded_policies(entries).any(|policy| policy != first_policy),
    }
}

/// Returns the labels in the recording; empty if it contains none.
fn recorded_labels(entries: &[RecordingEntry]) -> HostLabels {
    let labels = entries.iter().find_map(|entry| match &entry.input {
        RecordedInput::Labels(labels) => Some(labels),
        _ => None,
    });
    labels
        .into_iter()
        .flatten()
        .map(|(host, host_labels)| (host.clone(), Arc::new(host_labels.clone())))
        .collect()
}

/// Returns a policy as the text of a policy file. The text has no keys for limits that are not set.
fn policy_file_text(policy: &EffectivePolicy) -> String {
    let EffectivePolicy {
        placement: placing,
        rebalances: balance,
        gain_margin: margin,
        spawn_rules: rules,
        preempts: give_way,
    } = policy;
    let mut text = format!("placing = \"{placing}\"\nbalance = {balance}\nmargin = {margin:?}\n");
    let _ = writeln!(
        text,
        "wait_s = {}\ngive_way = {give_way}",
        rules.wait_max.0 / 1_000_000
    );
    for (name, limit) in [
        ("user_tasks", rules.task_limits.user_tasks_max),
        ("job_tasks", rules.task_limits.job_tasks_max),
    ] {
        let _ = limit.map(|limit| writeln!(text, "{name} = {limit}"));
    }
    text
}

/// Replays a recording under a policy.
///
/// # Errors
/// The service does not start. This cannot happen if the recording contains a host table.
pub fn replay_recording(
    entries: &[RecordingEntry],
    replay_policy: impl Into<ReplayPolicy>,
) -> Result<ReplayResult, ServiceError> {
    replay_observed(entries, replay_policy.into(), Observer::default())
}

/// As [`replay_recording`], and calls `observe` whenever the time of the replay advances.
///
/// # Errors
/// As [`replay_recording`].
pub fn replay_with_progress(
    entries: &[RecordingEntry],
    replay_policy: impl Into<ReplayPolicy>,
    observe: impl Fn(ReplayProgress) + 'static,
) -> Result<ReplayResult, ServiceError> {
    replay_observed(entries, replay_policy.into(), Observer::new(observe))
}

fn replay_observed(
    entries: &[RecordingEntry],
    replay_policy: ReplayPolicy,
    observer: Observer,
) -> Result<ReplayResult, ServiceError> {
    let ReplayPolicy {
        initial: initial_policy,
        replays_changes: replays_policy_changes,
    } = replay_policy;
    let world = World::new(entries, replays_policy_changes, observer);
    let options = Options {
        policy: initial_policy,
        starts_watchers: true,
        labels: recorded_labels(entries),
        ..Options::default()
    };
    let mut service = Service::start(world.clone(), options)?;
    match service.run() {
        Err(ServiceError::Stopped(_)) => {}
        Err(other) => return Err(other),
        Ok(never) => match never {},
    }
    let policy_suffix = if replays_policy_changes {
        "; later as recorded"
    } else {
        ""
    };
    Ok(ReplayResult {
        policy: format!("{initial_policy}{policy_suffix}"),
        ..world.replay_result()
    })
}

/// Formats the results of two replays side by side, one row per result.
pub fn comparison_table(columns: [(&str, &ReplayResult); 2]) -> String {
    let [(a_name, a), (b_name, b)] = columns;
    let mut out = String::new();
    for (name, figures) in columns {
        let _ = writeln!(out, "{name}: {}", figures.policy);
    }
    let _ = writeln!(out, "\n{:40} {a_name:>14} {b_name:>14}", "");
    let mut write_row = |label: &str, cell: &dyn Fn(&ReplayResult) -> String| {
        let _ = writeln!(out, "{label:40} {:>14} {:>14}", cell(a), cell(b));
    };
    write_row("spawns", &|f| f.spawns.to_string());
    write_row("tasks started", &|f| f.started.to_string());
    write_row("tasks refused", &|f| f.refused.to_string());
    write_row("migrations because of owners", &|f| {
        f.moves_owner.to_string()
    });
    write_row("migrations for performance", &|f| f.moves_load.to_string());
    write_row("jobs vacated because of owners", &|f| f.parked.to_string());
    write_row("tasks that did all their work", &|f| f.finished.to_string());
    write_row("tasks lost with their hosts", &|f| f.lost.to_string());
    write_row("waited for a host, mean, s", &|f| {
        format!("{:.2}", f.waited_mean_s)
    });
    write_row("waited for a host, longest, s", &|f| {
        format!("{:.2}", f.waited_most_s)
    });
    write_row("from start to end, mean, s", &|f| {
        format!("{:.2}", f.run_mean_s)
    });
    write_row("last end, s after the beginning", &|f| {
        format!("{:.2}", f.last_end_s)
    });
    write_row("not running, all tasks together, s", &|f| {
        format!("{:.2}", f.stood_still_s)
    });
    let hosts: std::collections::BTreeSet<&String> =
        a.placed.keys().chain(b.placed.keys()).collect();
    for host in hosts {
        write_row(&format!("tasks started on {host}"), &|f| {
            f.placed.get(host).copied().unwrap_or(0).to_string()
        });
    }
    let users: std::collections::BTreeSet<u32> =
        a.users.keys().chain(b.users.keys()).copied().collect();
    for user in users.iter().filter(|_| users.len() > 1) {
        let user_cell = |f: &ReplayResult, cell: fn(&UserResult) -> f64| {
            format!("{:.2}", f.users.get(user).map_or(0.0, cell))
        };
        write_row(&format!("user {user} waited, mean, s"), &|f| {
            user_cell(f, |u| u.waited_mean_s)
        });
        write_row(&format!("user {user} waited, longest, s"), &|f| {
            user_cell(f, |u| u.waited_most_s)
        });
    }
    out
}

/// Returns the time of the last entry; zero for an empty recording.
pub fn last_entry_time(entries: &[RecordingEntry]) -> Micros {
    entries
        .iter()
        .map(|entry| entry.at)
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{PlacementPolicy, TaskLimits};
    use crate::spawns::SpawnRules;

    /// A policy is the same after it was written as a policy file and read again.
    #[test]
    fn policy_round_trips_through_file_format() {
        let limits = TaskLimits {
            user_tasks_max: Some(7),
            job_tasks_max: None,
        };
        let rules = SpawnRules {
            wait_max: Micros::from_secs(90),
            task_limits: limits,
        };
        let changed_policy = EffectivePolicy {
            placement: PlacementPolicy::RoundRobin,
            rebalances: true,
            gain_margin: 2.0,
            spawn_rules: rules,
            preempts: false,
        };
        for policy in [EffectivePolicy::default(), changed_policy] {
            assert_eq!(
                EffectivePolicy::default().with_file("f", policy_file_text(&policy)),
                Ok(policy)
            );
        }
    }
}
