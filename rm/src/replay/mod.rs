//! A record, decided once more: the service works on a virtual machine of values in virtual time, in which hosts, owners,
//! load that is not ours and spawns are as recorded, and tasks run as long as their recorded work takes where the policy
//! under test puts them.
//!
//! What a record does not say is simple here: tasks compute and do not wait for each other, starting one takes no time, a move
//! stops its task for the time that an image of 64 MiB takes, and who spawned something in the record spawns it at the same
//! moment here; one that has spawned others ends behind them. A job that is checkpointed and ended for an owner takes as long as a
//! move. So figures of two policies can be compared with each other, and not with a clock.

mod world;

use crate::model::Labels;
use crate::policy::Conduct;
use crate::recording::{Entry, Input};
use crate::service::{Options, Service, ServiceError};
use sempa_proto::Micros;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use world::World;

pub use world::TAIL_MAX;

/// What came of a record under a policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// The policy.
    pub policy: String,
    /// Spawns that were asked for.
    pub spawns: u64,
    /// Tasks that were started.
    pub started: u64,
    /// Tasks that were not.
    pub refused: u64,
    /// Tasks that were started, by host.
    pub placed: BTreeMap<String, u64>,
    /// Mean time from a spawn to its answer, in seconds.
    pub waited_mean_s: f64,
    /// The longest.
    pub waited_most_s: f64,
    /// Moves because of owners.
    pub moves_owner: u64,
    /// Moves for the sake of the load.
    pub moves_load: u64,
    /// Jobs that were checkpointed and ended because of owners, and went on later.
    pub parked: u64,
    /// Time that tasks stood still, beside owners and while they moved, all together, in seconds.
    pub stood_still_s: f64,
    /// Tasks that did all their work.
    pub finished: u64,
    /// Mean time from the start of such a task to its end, in seconds.
    pub run_mean_s: f64,
    /// When the last of them ended, from the beginning of the record, in seconds.
    pub last_end_s: f64,
    /// Tasks that were lost with their hosts.
    pub lost: u64,
    /// The same of each user's spawns and tasks.
    pub users: BTreeMap<u32, OfUser>,
}

/// What one user got.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OfUser {
    /// Spawns that were answered.
    pub answered: u64,
    /// Spawns that were not, when the record was over.
    pub unanswered: u64,
    /// Mean time from a spawn to its answer, in seconds.
    pub waited_mean_s: f64,
    /// The longest.
    pub waited_most_s: f64,
    /// Tasks that did all their work.
    pub finished: u64,
    /// Mean time from the start of such a task to its end, in seconds.
    pub run_mean_s: f64,
    /// All times from a spawn to its answer, in the order of the answers.
    #[serde(skip)]
    pub waits_s: Vec<f64>,
}

impl OfUser {
    fn of(waits_s: Vec<f64>, runs_s: Vec<f64>, unanswered: u64) -> OfUser {
        let mean = |list: &[f64]| {
            if list.is_empty() {
                0.0
            } else {
                list.iter().sum::<f64>() / list.len() as f64
            }
        };
        OfUser {
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

/// What a record is run under.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Under {
    /// The policy at the beginning.
    pub conduct: Conduct,
    /// It changes whenever it did in the record; otherwise it never does.
    pub changes: bool,
}

impl From<Conduct> for Under {
    fn from(conduct: Conduct) -> Under {
        Under {
            conduct,
            changes: false,
        }
    }
}

fn policies(entries: &[Entry]) -> impl Iterator<Item = Conduct> {
    entries.iter().filter_map(|entry| match &entry.input {
        Input::Policy(conduct) => Some(*conduct),
        _ => None,
    })
}

/// The policy that was in force when the record began, and those that came later.
pub fn recorded_policy(entries: &[Entry]) -> Under {
    let conduct = policies(entries).next().unwrap_or_default();
    Under {
        conduct,
        changes: policies(entries).any(|later| later != conduct),
    }
}

/// What the administrator said of hosts; nothing in records that were made before that was written down.
fn recorded_labels(entries: &[Entry]) -> Labels {
    let labels = entries.iter().find_map(|entry| match &entry.input {
        Input::Labels(labels) => Some(labels),
        _ => None,
    });
    labels
        .into_iter()
        .flatten()
        .map(|(host, of_host)| (host.clone(), Arc::new(of_host.clone())))
        .collect()
}

/// A policy as the text of a policy file, over a command line that limits nothing.
fn as_file(conduct: &Conduct) -> String {
    let Conduct {
        placing,
        balance,
        margin,
        rules,
        give_way,
    } = conduct;
    let mut out = format!("placing = \"{placing}\"\nbalance = {balance}\nmargin = {margin:?}\n");
    let _ = writeln!(
        out,
        "wait_s = {}\ngive_way = {give_way}",
        rules.wait.0 / 1_000_000
    );
    for (name, limit) in [
        ("user_tasks", rules.limits.user_tasks),
        ("job_tasks", rules.limits.job_tasks),
    ] {
        let _ = limit.map(|limit| writeln!(out, "{name} = {limit}"));
    }
    out
}

/// Runs a record under a policy.
///
/// # Errors
/// When the service does not begin, which a record that begins with its hosts does not bring about.
pub fn run(entries: &[Entry], under: impl Into<Under>) -> Result<Figures, ServiceError> {
    let Under { conduct, changes } = under.into();
    let world = World::new(entries, changes);
    let options = Options {
        conduct,
        watchers: true,
        labels: recorded_labels(entries),
        ..Options::default()
    };
    let mut service = Service::start(world.clone(), options)?;
    match service.run() {
        Err(ServiceError::Stopped(_)) => {}
        Err(other) => return Err(other),
        Ok(never) => match never {},
    }
    let later = if changes { "; later as recorded" } else { "" };
    Ok(Figures {
        policy: format!("{conduct}{later}"),
        ..world.figures()
    })
}

/// Two runs side by side.
pub fn table(columns: [(&str, &Figures); 2]) -> String {
    let [(a_name, a), (b_name, b)] = columns;
    let mut out = String::new();
    for (name, figures) in columns {
        let _ = writeln!(out, "{name}: {}", figures.policy);
    }
    let _ = writeln!(out, "\n{:40} {a_name:>14} {b_name:>14}", "");
    let mut row = |what: &str, cell: &dyn Fn(&Figures) -> String| {
        let _ = writeln!(out, "{what:40} {:>14} {:>14}", cell(a), cell(b));
    };
    row("spawns", &|f| f.spawns.to_string());
    row("tasks started", &|f| f.started.to_string());
    row("tasks refused", &|f| f.refused.to_string());
    row("moves because of owners", &|f| f.moves_owner.to_string());
    row("moves for the sake of the load", &|f| {
        f.moves_load.to_string()
    });
    row("jobs parked because of owners", &|f| f.parked.to_string());
    row("tasks that did all their work", &|f| f.finished.to_string());
    row("tasks lost with their hosts", &|f| f.lost.to_string());
    row("waited for a place, mean, s", &|f| {
        format!("{:.2}", f.waited_mean_s)
    });
    row("waited for a place, longest, s", &|f| {
        format!("{:.2}", f.waited_most_s)
    });
    row("from start to end, mean, s", &|f| {
        format!("{:.2}", f.run_mean_s)
    });
    row("last end, s after the beginning", &|f| {
        format!("{:.2}", f.last_end_s)
    });
    row("stood still, all tasks together, s", &|f| {
        format!("{:.2}", f.stood_still_s)
    });
    let hosts: std::collections::BTreeSet<&String> =
        a.placed.keys().chain(b.placed.keys()).collect();
    for host in hosts {
        row(&format!("tasks started on {host}"), &|f| {
            f.placed.get(host).copied().unwrap_or(0).to_string()
        });
    }
    let users: std::collections::BTreeSet<u32> =
        a.users.keys().chain(b.users.keys()).copied().collect();
    for user in users.iter().filter(|_| users.len() > 1) {
        let of = |f: &Figures, cell: fn(&OfUser) -> f64| {
            format!("{:.2}", f.users.get(user).map_or(0.0, cell))
        };
        row(&format!("user {user} waited, mean, s"), &|f| {
            of(f, |u| u.waited_mean_s)
        });
        row(&format!("user {user} waited, longest, s"), &|f| {
            of(f, |u| u.waited_most_s)
        });
    }
    out
}

/// How long a record is.
pub fn span(entries: &[Entry]) -> Micros {
    entries
        .iter()
        .map(|entry| entry.at)
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{Limits, Policy};
    use crate::spawns::Rules;

    #[test]
    fn a_policy_reads_the_same_from_the_file_that_says_it() {
        let limits = Limits {
            user_tasks: Some(7),
            job_tasks: None,
        };
        let rules = Rules {
            wait: Micros::from_secs(90),
            limits,
        };
        let other = Conduct {
            placing: Policy::RoundRobin,
            balance: true,
            margin: 2.0,
            rules,
            give_way: false,
        };
        for conduct in [Conduct::default(), other] {
            assert_eq!(
                Conduct::default().with_file("f", as_file(&conduct)),
                Ok(conduct)
            );
        }
    }
}
