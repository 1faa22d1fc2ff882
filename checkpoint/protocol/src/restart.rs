//! Restarts jobs from checkpoints: either all tasks of a checkpoint are restarted, or none.
//!
//! ```text
//! coordinator            host of each task
//!
//! 1 Prepare  --------->  verdict; reserve memory
//!                        (a host that refuses is replaced by the next candidate)
//! 2 (unpack the images from the store and send them)
//!                        verify, restore, stop before the first instruction
//! 3 (all tasks are restored: announce their locations to all daemons)
//! 4 Run      --------->  run, wake the libraries
//! ```
//!
//! Each host acts as the target of a migration ([`super::Target`]). No task runs before all tasks
//! are restored. If a step fails before the order to run, all restored tasks are discarded.

use sempa_proto::checkpoint::RestartFailure;
use sempa_proto::migration::{
    Failure, FinalSourceState, Migration, MigrationCause, MigrationOrder, RestartGroup, Step,
    StepReport, TaskFacts,
};
use sempa_proto::suspend::Suspensions;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Timeout of the steps that do not depend on the size of the tasks.
const STEP_TIMEOUT: Micros = Micros::from_secs(15);
/// Additional timeout for each GiB of memory of all tasks together, for unpacking, sending and
/// restoring.
const TIMEOUT_PER_GIB: Micros = Micros::from_secs(90);

/// Number that identifies one restart of a job.
pub type RestartId = u64;

/// A task to restart.
#[derive(Clone, Debug, PartialEq)]
pub struct RestartTask {
    pub tid: Tid,
    pub facts: TaskFacts,
    /// Hosts that may run the task, the best first.
    pub hosts: Vec<HostId>,
}

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum RestartOutput {
    /// Send this order to the host of a task.
    Order {
        host: HostId,
        /// The restart of this one task, in the form of a migration.
        part: Migration,
        order: MigrationOrder,
    },
    /// Unpack the images of this task and send them to its host. On failure call
    /// [`Restarts::on_send_failed`].
    SendImages { restart: RestartId, part: Migration },
    /// Announce the location of this task to every daemon, then call
    /// [`Restarts::on_location_announced`].
    AnnounceLocation(Migration),
    /// The restart has ended.
    RestartEnded {
        restart: RestartId,
        /// The host on which each task runs, or the reason why the restart failed.
        result: Result<Vec<(Tid, HostId)>, RestartFailure>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PartProgress {
    Started,
    Prepared,
    Restored,
    Announced,
    Running,
}

#[derive(Debug)]
struct RestartPart {
    migration: Migration,
    progress: PartProgress,
    facts: TaskFacts,
    /// Hosts to try if the current host refuses the task.
    alternatives: VecDeque<HostId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RestartStage {
    Preparing,
    Restoring,
    Announcing,
    Running,
}

#[derive(Debug)]
struct ActiveRestart {
    group: RestartGroup,
    stage: RestartStage,
    parts_by_id: BTreeMap<MigrationId, RestartPart>,
    deadline: Micros,
    step_timeout: Micros,
}

/// All restarts in progress. This state machine runs on the master.
#[derive(Debug, Default)]
pub struct Restarts {
    active_restarts: BTreeMap<RestartId, ActiveRestart>,
    last_id: RestartId,
    outputs: VecDeque<RestartOutput>,
}

impl Restarts {
    /// Returns the next output that the daemon must execute; `None` if no output is pending.
    pub fn poll(&mut self) -> Option<RestartOutput> {
        self.outputs.pop_front()
    }

    /// Returns the time at which [`Restarts::on_timer`] must be called; `None` if no call is
    /// needed.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.active_restarts
            .values()
            .map(|restart| restart.deadline)
            .min()
    }

    /// Returns the restart that contains the part `id`; `None` if no restart does.
    pub fn restart_of(&self, id: MigrationId) -> Option<RestartId> {
        self.active_restarts
            .iter()
            .find(|(_, restart)| restart.parts_by_id.contains_key(&id))
            .map(|(restart_id, _)| *restart_id)
    }

    /// True while this task is being restarted.
    pub fn is_restarting(&self, tid: Tid) -> bool {
        self.active_restarts
            .values()
            .flat_map(|restart| restart.parts_by_id.values())
            .any(|part| part.migration.tid == tid)
    }

    /// Starts to restart these tasks together, as members of `group`. Returns the number of the
    /// restart. `next_id` generates migration ids.
    pub fn begin_restart(
        &mut self,
        now: Micros,
        group: RestartGroup,
        tasks: Vec<RestartTask>,
        mut next_id: impl FnMut() -> MigrationId,
    ) -> RestartId {
        self.last_id += 1;
        let mut parts = BTreeMap::new();
        for RestartTask { tid, facts, hosts } in tasks {
            let mut alternatives: VecDeque<HostId> = hosts.into();
            let host = alternatives.pop_front().unwrap_or(HostId::MASTER);
            let migration = Migration {
                id: next_id(),
                tid,
                from: HostId::MASTER,
                to: host,
                cause: MigrationCause::Restart,
            };
            parts.insert(
                migration.id,
                RestartPart {
                    migration,
                    progress: PartProgress::Started,
                    facts,
                    alternatives,
                },
            );
        }
        let (deadline, timeout) = (now + STEP_TIMEOUT, STEP_TIMEOUT);
        for part in parts.values() {
            self.outputs.push_back(prepare_order(part, &group));
        }
        let restart = ActiveRestart {
            group,
            stage: RestartStage::Preparing,
            parts_by_id: parts,
            deadline,
            step_timeout: timeout,
        };
        self.active_restarts.insert(self.last_id, restart);
        self.last_id
    }

    /// Handles a report of a task's host. `next_id` generates an id if the report is a refusal and
    /// another host is tried.
    pub fn on_report(
        &mut self,
        now: Micros,
        host: HostId,
        part_id: MigrationId,
        report: StepReport,
        next_id: impl FnOnce() -> MigrationId,
    ) {
        let Some(restart_id) = self.restart_of(part_id) else {
            return;
        };
        let Some(restart) = self.active_restarts.get_mut(&restart_id) else {
            return;
        };
        let Some(part) = restart
            .parts_by_id
            .get_mut(&part_id)
            .filter(|part| part.migration.to == host)
        else {
            return;
        };
        match report {
            StepReport::Prepared { verdict, .. } if part.progress == PartProgress::Started => {
                if verdict.is_empty() {
                    part.progress = PartProgress::Prepared;
                } else {
                    return self.try_next_host(
                        restart_id,
                        part_id,
                        Failure::Refused(verdict),
                        next_id(),
                    );
                }
            }
            StepReport::Restored if part.progress == PartProgress::Prepared => {
                part.progress = PartProgress::Restored
            }
            StepReport::Running if part.progress == PartProgress::Announced => {
                part.progress = PartProgress::Running
            }
            StepReport::Failed { step, failure: why } => {
                let tid = part.migration.tid;
                return self.fail_restart(
                    restart_id,
                    RestartFailure::Task {
                        tid,
                        host,
                        step,
                        failure: why,
                    },
                );
            }
            _ => return,
        }
        self.advance(now, restart_id);
    }

    /// Handles that a host refuses a task: orders the next host to prepare, under the new id
    /// `next_part_id`. If no host remains, the restart fails.
    fn try_next_host(
        &mut self,
        restart_id: RestartId,
        part_id: MigrationId,
        failure: Failure,
        next_part_id: MigrationId,
    ) {
        let Some(restart) = self.active_restarts.get_mut(&restart_id) else {
            return;
        };
        let Some(mut part) = restart.parts_by_id.remove(&part_id) else {
            return;
        };
        let (tid, host) = (part.migration.tid, part.migration.to);
        match part.alternatives.pop_front() {
            Some(next_host) => {
                part.migration = Migration {
                    id: next_part_id,
                    to: next_host,
                    ..part.migration
                };
                self.outputs.push_back(prepare_order(&part, &restart.group));
                restart.parts_by_id.insert(next_part_id, part);
            }
            None => {
                restart.parts_by_id.insert(part_id, part);
                self.fail_restart(
                    restart_id,
                    RestartFailure::Task {
                        tid,
                        host,
                        step: Step::Prepare,
                        failure,
                    },
                );
            }
        }
    }

    /// Handles that the images of a task could not be unpacked or sent.
    pub fn on_send_failed(&mut self, part_id: MigrationId, failure: Failure) {
        let Some(restart_id) = self.restart_of(part_id) else {
            return;
        };
        if let Some(part) = self
            .active_restarts
            .get(&restart_id)
            .and_then(|restart| restart.parts_by_id.get(&part_id))
        {
            let Migration { tid, to: host, .. } = part.migration;
            self.fail_restart(
                restart_id,
                RestartFailure::Task {
                    tid,
                    host,
                    step: Step::Transfer,
                    failure,
                },
            );
        }
    }

    /// Ends a restart that must not succeed any more, with this reason. Its tasks may already have
    /// been ordered to run; then the caller must end them.
    pub fn cancel(&mut self, restart_id: RestartId, failure: RestartFailure) {
        self.fail_restart(restart_id, failure);
    }

    /// Handles that every living daemon has acknowledged the location of this task.
    pub fn on_location_announced(&mut self, now: Micros, part_id: MigrationId) {
        let Some(restart_id) = self.restart_of(part_id) else {
            return;
        };
        let part = self
            .active_restarts
            .get_mut(&restart_id)
            .and_then(|restart| restart.parts_by_id.get_mut(&part_id));
        if let Some(part) = part.filter(|part| part.progress == PartProgress::Restored) {
            part.progress = PartProgress::Announced;
            self.advance(now, restart_id);
        }
    }

    /// Handles that a host has left or was lost. Fails the restarts that restart a task on this
    /// host.
    pub fn on_host_lost(&mut self, host: HostId) {
        let is_affected = |restart: &ActiveRestart| {
            restart
                .parts_by_id
                .values()
                .any(|part| part.migration.to == host)
        };
        let affected_restarts: Vec<RestartId> = self
            .active_restarts
            .iter()
            .filter(|(_, o)| is_affected(o))
            .map(|(restart_id, _)| *restart_id)
            .collect();
        for restart_id in affected_restarts {
            self.fail_restart(restart_id, RestartFailure::HostLost(host));
        }
    }

    /// Fails the restarts whose deadline has passed. Must be called at the time that
    /// [`Restarts::next_deadline`] has returned.
    pub fn on_timer(&mut self, now: Micros) {
        let overdue_restarts = self
            .active_restarts
            .iter()
            .filter(|(_, restart)| restart.deadline <= now);
        let overdue_restarts: Vec<(RestartId, Micros)> = overdue_restarts
            .map(|(restart_id, restart)| (*restart_id, restart.step_timeout))
            .collect();
        for (restart_id, timeout) in overdue_restarts {
            self.fail_restart(
                restart_id,
                RestartFailure::Deadline {
                    time_limit: timeout,
                },
            );
        }
    }

    /// Enters the next stage when all tasks have reached the progress that the next stage requires.
    fn advance(&mut self, now: Micros, restart_id: RestartId) {
        let Some(restart) = self.active_restarts.get_mut(&restart_id) else {
            return;
        };
        let least_progress = restart
            .parts_by_id
            .values()
            .map(|part| part.progress)
            .min()
            .unwrap_or(PartProgress::Running);
        let migrations: Vec<Migration> = restart
            .parts_by_id
            .values()
            .map(|part| part.migration.clone())
            .collect();
        match restart.stage {
            RestartStage::Preparing if least_progress >= PartProgress::Prepared => {
                let bytes = restart.parts_by_id.values().fold(0, |sum: u64, part| {
                    sum.saturating_add(part.facts.memory_bytes)
                });
                restart.step_timeout =
                    STEP_TIMEOUT + Micros(TIMEOUT_PER_GIB.0 * ((bytes >> 30) + 1));
                (restart.stage, restart.deadline) =
                    (RestartStage::Restoring, now + restart.step_timeout);
                self.outputs.extend(migrations.into_iter().map(|migration| {
                    RestartOutput::SendImages {
                        restart: restart_id,
                        part: migration,
                    }
                }));
            }
            RestartStage::Restoring if least_progress >= PartProgress::Restored => {
                (restart.stage, restart.deadline, restart.step_timeout) =
                    (RestartStage::Announcing, now + STEP_TIMEOUT, STEP_TIMEOUT);
                self.outputs
                    .extend(migrations.into_iter().map(RestartOutput::AnnounceLocation));
            }
            RestartStage::Announcing if least_progress >= PartProgress::Announced => {
                (restart.stage, restart.deadline, restart.step_timeout) =
                    (RestartStage::Running, now + STEP_TIMEOUT, STEP_TIMEOUT);
                let to_run_order = |migration: Migration| RestartOutput::Order {
                    host: migration.to,
                    part: migration,
                    order: MigrationOrder::Run(FinalSourceState::default()),
                };
                self.outputs
                    .extend(migrations.into_iter().map(to_run_order));
            }
            RestartStage::Running if least_progress >= PartProgress::Running => {
                let task_hosts = migrations
                    .into_iter()
                    .map(|migration| (migration.tid, migration.to))
                    .collect();
                self.active_restarts.remove(&restart_id);
                self.outputs.push_back(RestartOutput::RestartEnded {
                    restart: restart_id,
                    result: Ok(task_hosts),
                });
            }
            _ => {}
        }
    }

    /// Fails a restart and discards all its tasks. If the tasks were already ordered to run, none
    /// is discarded, and the caller must end them.
    fn fail_restart(&mut self, restart_id: RestartId, failure: RestartFailure) {
        let Some(restart) = self.active_restarts.remove(&restart_id) else {
            return;
        };
        for RestartPart {
            migration,
            progress,
            ..
        } in restart.parts_by_id.into_values()
        {
            // After the order to run, a target cannot discard its task.
            if restart.stage < RestartStage::Running && progress >= PartProgress::Started {
                self.outputs.push_back(RestartOutput::Order {
                    host: migration.to,
                    part: migration,
                    order: MigrationOrder::Discard,
                });
            }
        }
        self.outputs.push_back(RestartOutput::RestartEnded {
            restart: restart_id,
            result: Err(failure),
        });
    }
}

fn prepare_order(part: &RestartPart, restart_group: &RestartGroup) -> RestartOutput {
    let (facts, suspensions) = (part.facts.clone(), Suspensions::default());
    let restart_group = Some(restart_group.clone());
    let order = MigrationOrder::Prepare {
        facts,
        suspensions,
        restart_group,
        supports_post_copy: false,
        pre_copy: false,
    };
    RestartOutput::Order {
        host: part.migration.to,
        part: part.migration.clone(),
        order,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A restart that loses the host of one of its tasks fails with that host as the reason. Other
    /// restarts continue.
    #[test]
    fn lost_host_fails_its_restarts_only() {
        let host = |index| HostId::new(index).expect("an index");
        let mut restarts = Restarts::default();
        let mut ids = (1..).map(MigrationId);
        let mut begin = |hosts: &[u16]| {
            let task = |index: &u16| Tid::for_task(host(1), u32::from(*index)).expect("a task");
            let candidate = |index: &u16| RestartTask {
                tid: task(index),
                facts: TaskFacts::default(),
                hosts: vec![host(*index)],
            };
            let members = hosts.iter().map(|index| (task(index), 0)).collect();
            let (group, tasks) = (
                RestartGroup {
                    incarnation: 1,
                    members,
                    same_vm: true,
                },
                hosts.iter().map(candidate).collect(),
            );
            restarts.begin_restart(Micros(0), group, tasks, || {
                ids.next().expect("there are more")
            })
        };
        let (restart_id, other_id) = (begin(&[2, 3]), begin(&[4]));
        restarts.on_host_lost(host(3));
        let to_result = |output| match output {
            RestartOutput::RestartEnded { restart, result } => Some((restart, result)),
            _ => None,
        };
        let results: Vec<_> = std::iter::from_fn(|| restarts.poll())
            .filter_map(to_result)
            .collect();
        assert_eq!(
            results,
            [(restart_id, Err(RestartFailure::HostLost(host(3))))]
        );
        assert_eq!(
            restarts.active_restarts.keys().collect::<Vec<_>>(),
            [&other_id]
        );
    }
}
