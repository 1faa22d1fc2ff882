//! Snapshots of jobs: all tasks of a job are paused at the same time and dumped. Each task resumes
//! as soon as it is dumped. The result is a checkpoint.
//!
//! ```text
//! coordinator            host of each task                      the master's store
//!
//! 1 Inspect  --------->  report facts                           reserve space
//! 2 Pause    --------->  programs that write their own
//!                        checkpoint do so and exit
//! 3 Pause    --------->  all other tasks quiesce and stop
//! 4 (all are paused: count the tasks of the job again)
//! 5 Dump     --------->  dump, or copy the state files;
//!                        resume or restart; upload  --------->  store the images
//! 6 (all are stored)  -------------------------------------->  seal: the checkpoint exists
//! ```
//!
//! **Consistency.** Links number the messages between tasks and retain each message until it has
//! arrived. Tasks that are paused at the same moment therefore form a consistent cut, whatever is
//! in transit between them. A process that has exited counts as paused: its daemon keeps the
//! messages that were not acknowledged. A program may need a long time to write its own checkpoint,
//! so the other tasks run until it has exited. Step 4 detects tasks that the job has spawned since
//! step 1.
//!
//! Tasks outside the job are never paused. If a step fails before the seal, every task continues
//! and nothing of the checkpoint remains.

use sempa_proto::checkpoint::{CheckpointFailure, StoreFailure};
use sempa_proto::migration::{
    Failure, Migration, MigrationCause, MigrationOrder, Step, StepReport, TaskFacts,
};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Timeout of the steps that do not depend on the size of the tasks.
const STEP_TIMEOUT: Micros = Micros::from_secs(15);
/// Timeout for pausing all tasks, including the replies to their requests. The task that is paused
/// first may wait this long.
const PAUSE_TIMEOUT: Micros = Micros::from_secs(5);
/// Additional timeout for each GiB of memory of all tasks together, for dumping, uploading and
/// storing.
const TIMEOUT_PER_GIB: Micros = Micros::from_secs(90);

/// Number that identifies one snapshot of a job.
pub type SnapshotId = u64;

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum SnapshotOutput {
    /// Send this order to the host of a task.
    Order {
        host: HostId,
        /// The snapshot of this one task, in the form of a migration.
        part: Migration,
        order: Box<MigrationOrder>,
    },
    /// Ask all hosts for the tasks of the job, then call [`Snapshots::on_tasks_counted`] or
    /// [`Snapshots::on_count_failed`].
    CountTasks(SnapshotId),
    /// Accept the images of this task from its host, then call [`Snapshots::on_images_received`].
    ExpectImages(Migration),
    /// The images are at the master: add them to the store, then call
    /// [`Snapshots::on_images_stored`].
    StoreImages {
        snapshot: SnapshotId,
        part: Migration,
    },
    /// The images of all tasks are in the store: seal the checkpoint, then call
    /// [`Snapshots::on_sealed`].
    Seal {
        snapshot: SnapshotId,
        /// Each task with its host and its facts.
        parts: Vec<(Tid, HostId, TaskFacts)>,
    },
    /// Remove everything of the snapshot: its data in the store, and the images of these tasks that
    /// are in transit.
    Abandon {
        snapshot: SnapshotId,
        parts: Vec<MigrationId>,
    },
    /// The snapshot has ended.
    SnapshotEnded {
        snapshot: SnapshotId,
        /// The time for which tasks were paused, or the reason why the snapshot failed.
        result: Result<Micros, CheckpointFailure>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SnapshotStage {
    Inspecting,
    /// The programs that write their own checkpoints are writing them and then exit.
    SelfCheckpointing,
    Pausing,
    Counting,
    Dumping,
    Sealing,
}

/// Progress of one task in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PartProgress {
    Started,
    Inspected,
    Paused,
    Dumped,
    Stored,
}

#[derive(Debug)]
struct SnapshotPart {
    migration: Migration,
    progress: PartProgress,
    facts: TaskFacts,
}

impl SnapshotPart {
    /// Returns the program's time limit for its self-checkpoint, in seconds; `None` if CRIU dumps
    /// the task.
    fn self_checkpoint_secs(&self) -> Option<u32> {
        self.facts
            .restart_engine()
            .and_then(|engine| engine.exit_request())
            .map(|(_, seconds)| seconds)
    }
}

#[derive(Debug)]
struct Snapshot {
    stage: SnapshotStage,
    /// True when the store has reserved space.
    is_space_reserved: bool,
    parts: BTreeMap<MigrationId, SnapshotPart>,
    deadline: Micros,
    step_timeout: Micros,
    /// Time at which the first task was paused.
    first_paused_at: Option<Micros>,
    /// Time at which the most recent dump was completed.
    last_dumped_at: Option<Micros>,
}

impl Snapshot {
    /// Sets the timeout for dumping and storing, which depends on the total memory of all tasks.
    fn set_dump_timeout(&mut self) {
        let bytes = self.parts.values().fold(0, |sum: u64, part| {
            sum.saturating_add(part.facts.memory_bytes)
        });
        self.step_timeout = STEP_TIMEOUT + Micros(TIMEOUT_PER_GIB.0 * ((bytes >> 30) + 1));
    }
}

/// All snapshots in progress. This state machine runs on the master.
#[derive(Debug, Default)]
pub struct Snapshots {
    active_snapshots: BTreeMap<SnapshotId, Snapshot>,
    last_id: SnapshotId,
    outputs: VecDeque<SnapshotOutput>,
}

impl Snapshots {
    /// Returns the next output that the daemon must execute; `None` if no output is pending.
    pub fn poll(&mut self) -> Option<SnapshotOutput> {
        self.outputs.pop_front()
    }

    /// Returns the time at which [`Snapshots::on_timer`] must be called; `None` if no call is
    /// needed.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.active_snapshots
            .values()
            .filter(|snapshot| snapshot.stage != SnapshotStage::Sealing)
            .map(|snapshot| snapshot.deadline)
            .min()
    }

    /// Returns the snapshot that contains the part `id`; `None` if no snapshot does.
    pub fn snapshot_of(&self, id: MigrationId) -> Option<SnapshotId> {
        self.active_snapshots
            .iter()
            .find(|(_, snapshot)| snapshot.parts.contains_key(&id))
            .map(|(snapshot_id, _)| *snapshot_id)
    }

    /// Returns the task's part in a snapshot in progress; `None` if no snapshot contains the task.
    /// The snapshot may not have paused the task yet, or may have resumed it already.
    pub fn part_of(&self, tid: Tid) -> Option<&Migration> {
        let parts = self
            .active_snapshots
            .values()
            .flat_map(|snapshot| snapshot.parts.values());
        parts
            .map(|part| &part.migration)
            .find(|migration| migration.tid == tid)
    }

    /// Returns the snapshot because of which this task may not migrate, and the task's part in that
    /// snapshot; `None` if the task may migrate. A task of a snapshot may not migrate until it is
    /// dumped.
    pub fn part_that_prevents_migration(&self, tid: Tid) -> Option<(SnapshotId, MigrationId)> {
        let parts = self
            .active_snapshots
            .iter()
            .flat_map(|(snapshot_id, snapshot)| {
                snapshot
                    .parts
                    .iter()
                    .map(move |(id, part)| (*snapshot_id, *id, part))
            });
        let prevents_migration =
            |part: &SnapshotPart| part.migration.tid == tid && part.progress < PartProgress::Dumped;
        parts
            .filter(|(_, _, part)| prevents_migration(part))
            .map(|(snapshot_id, id, _)| (snapshot_id, id))
            .next()
    }

    /// Aborts a snapshot because one of its tasks must migrate immediately. All tasks continue, and
    /// the caller may retry the snapshot.
    pub fn abort_for_migration(&mut self, snapshot_id: SnapshotId, tid: Tid, reason: String) {
        self.abort_snapshot(
            snapshot_id,
            CheckpointFailure::Task {
                tid,
                step: Step::Dump,
                failure: Failure::Cancelled(reason),
            },
        );
    }

    /// True while this snapshot is in progress.
    pub fn is_active(&self, snapshot_id: SnapshotId) -> bool {
        self.active_snapshots.contains_key(&snapshot_id)
    }

    /// Starts a snapshot of these tasks. Each entry has an unused id, the task, and the task's
    /// host.
    pub fn begin_snapshot(
        &mut self,
        now: Micros,
        tasks: &[(MigrationId, Tid, HostId)],
    ) -> SnapshotId {
        self.last_id += 1;
        let new_part = |&(id, tid, host): &(MigrationId, Tid, HostId)| {
            let migration = Migration {
                id,
                tid,
                from: host,
                to: HostId::MASTER,
                cause: MigrationCause::Checkpoint,
            };
            (
                id,
                SnapshotPart {
                    migration,
                    progress: PartProgress::Started,
                    facts: TaskFacts::default(),
                },
            )
        };
        let parts: BTreeMap<MigrationId, SnapshotPart> = tasks.iter().map(new_part).collect();
        let (deadline, timeout) = (now + STEP_TIMEOUT, STEP_TIMEOUT);
        let stage = SnapshotStage::Inspecting;
        let snapshot = Snapshot {
            stage,
            is_space_reserved: false,
            parts,
            deadline,
            step_timeout: timeout,
            first_paused_at: None,
            last_dumped_at: None,
        };
        self.active_snapshots.insert(self.last_id, snapshot);
        self.queue_orders(self.last_id, &MigrationOrder::Inspect, |_| true);
        self.last_id
    }

    /// Handles a report of a task's host. Reports that do not match the current stage belong to a
    /// snapshot that has ended, and are ignored.
    pub fn on_report(&mut self, now: Micros, host: HostId, id: MigrationId, report: StepReport) {
        let Some(snapshot_id) = self.snapshot_of(id) else {
            return;
        };
        let Some(snapshot) = self.active_snapshots.get_mut(&snapshot_id) else {
            return;
        };
        let Some(part) = snapshot
            .parts
            .get_mut(&id)
            .filter(|part| part.migration.from == host)
        else {
            return;
        };
        let tid = part.migration.tid;
        match report {
            StepReport::Inspected { facts, .. } if part.progress == PartProgress::Started => {
                (part.facts, part.progress) = (facts, PartProgress::Inspected);
            }
            StepReport::Stopped if part.progress == PartProgress::Inspected => {
                part.progress = PartProgress::Paused;
                snapshot.first_paused_at.get_or_insert(now);
            }
            StepReport::Dumped { image_bytes: bytes } if part.progress == PartProgress::Paused => {
                part.progress = PartProgress::Dumped;
                snapshot.last_dumped_at = Some(now);
                if part.self_checkpoint_secs().is_some() {
                    // The size of a self-checkpoint is not known before the program has written it.
                    part.facts.memory_bytes = bytes;
                    let previous_timeout = snapshot.step_timeout;
                    snapshot.set_dump_timeout();
                    snapshot.deadline =
                        snapshot.deadline + snapshot.step_timeout.since(previous_timeout);
                }
            }
            StepReport::Failed { step, failure: why } => {
                return self.abort_snapshot(
                    snapshot_id,
                    CheckpointFailure::Task {
                        tid,
                        step,
                        failure: why,
                    },
                );
            }
            _ => return,
        }
        self.advance(now, snapshot_id);
    }

    /// Handles that the images of a task have arrived at the master, or that the transfer failed.
    pub fn on_images_received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(snapshot_id) = self.snapshot_of(id) else {
            return;
        };
        let Some(part) = self
            .active_snapshots
            .get(&snapshot_id)
            .and_then(|active_snapshot| active_snapshot.parts.get(&id))
        else {
            return;
        };
        let migration = part.migration.clone();
        match result {
            Ok(()) => self.outputs.push_back(SnapshotOutput::StoreImages {
                snapshot: snapshot_id,
                part: migration,
            }),
            Err(failure) => self.abort_snapshot(
                snapshot_id,
                CheckpointFailure::Task {
                    tid: migration.tid,
                    step: Step::Transfer,
                    failure,
                },
            ),
        }
    }

    /// Handles that the images of a task were stored, or that storing them failed.
    pub fn on_images_stored(
        &mut self,
        now: Micros,
        id: MigrationId,
        result: Result<(), StoreFailure>,
    ) {
        let Some(snapshot_id) = self.snapshot_of(id) else {
            return;
        };
        if let Err(reason) = result {
            return self.abort_snapshot(snapshot_id, CheckpointFailure::Store(reason));
        }
        if let Some(part) = self
            .active_snapshots
            .get_mut(&snapshot_id)
            .and_then(|snapshot| snapshot.parts.get_mut(&id))
        {
            part.progress = PartProgress::Stored;
            self.advance(now, snapshot_id);
        }
    }

    /// Handles the second count of the job's tasks, which took place while all tasks were paused.
    ///
    /// - `tasks`: the tasks of the job.
    /// - `open_requests`: by task, the requests with which the task waits for other tasks.
    /// - `ended_tasks`: tasks of the job that have ended since its last checkpoint.
    pub fn on_tasks_counted(
        &mut self,
        now: Micros,
        snapshot_id: SnapshotId,
        tasks: &[Tid],
        open_requests: &BTreeMap<Tid, Vec<RequestId>>,
        ended_tasks: &[Tid],
    ) {
        let Some(snapshot) = self
            .active_snapshots
            .get_mut(&snapshot_id)
            .filter(|snapshot| snapshot.stage == SnapshotStage::Counting)
        else {
            return;
        };
        let is_known = |tid: &Tid| {
            snapshot
                .parts
                .values()
                .any(|part| part.migration.tid == *tid)
        };
        let new_tasks: Vec<Tid> = tasks.iter().copied().filter(|tid| !is_known(tid)).collect();
        if !new_tasks.is_empty() {
            return self.abort_snapshot(snapshot_id, CheckpointFailure::JobSpawnedTasks(new_tasks));
        }
        let waits_for_others = |part: &&SnapshotPart| {
            part.self_checkpoint_secs().is_some()
                && open_requests
                    .get(&part.migration.tid)
                    .is_some_and(|requests| !requests.is_empty())
        };
        if let Some(tid) = snapshot
            .parts
            .values()
            .find(waits_for_others)
            .map(|part| part.migration.tid)
        {
            // After a restart this program would not enter the barrier again, and the other tasks
            // would wait forever.
            let failure = Failure::Engine(
                "it has ended while it waited for others, in a barrier for example".into(),
            );
            return self.abort_snapshot(
                snapshot_id,
                CheckpointFailure::Task {
                    tid,
                    step: Step::Dump,
                    failure,
                },
            );
        }
        snapshot.set_dump_timeout();
        (snapshot.stage, snapshot.deadline) = (SnapshotStage::Dumping, now + snapshot.step_timeout);
        // Expect the images before ordering the dumps: a host may send them before this function
        // returns.
        let parts: Vec<Migration> = snapshot
            .parts
            .values()
            .map(|part| part.migration.clone())
            .collect();
        self.outputs
            .extend(parts.into_iter().map(SnapshotOutput::ExpectImages));
        let dump_orders = snapshot.parts.values().map(|part| {
            let open_requests = open_requests
                .get(&part.migration.tid)
                .cloned()
                .unwrap_or_default();
            let order = MigrationOrder::Dump {
                open_requests,
                ended_tasks: ended_tasks.to_vec(),
            };
            SnapshotOutput::Order {
                host: part.migration.from,
                part: part.migration.clone(),
                order: Box::new(order),
            }
        });
        self.outputs.extend(dump_orders);
    }

    /// Handles that the second count failed, or found more tasks than a checkpoint can hold.
    pub fn on_count_failed(&mut self, snapshot_id: SnapshotId, failure: CheckpointFailure) {
        if self
            .active_snapshots
            .get(&snapshot_id)
            .is_some_and(|snapshot| snapshot.stage == SnapshotStage::Counting)
        {
            self.abort_snapshot(snapshot_id, failure);
        }
    }

    /// Handles that the checkpoint was sealed, or that sealing failed.
    pub fn on_sealed(&mut self, snapshot_id: SnapshotId, result: Result<(), StoreFailure>) {
        let Some(snapshot) = self
            .active_snapshots
            .get(&snapshot_id)
            .filter(|snapshot| snapshot.stage == SnapshotStage::Sealing)
        else {
            return;
        };
        match result {
            Ok(()) => {
                let pause_duration = snapshot
                    .first_paused_at
                    .zip(snapshot.last_dumped_at)
                    .map(|(first_paused_at, last_dumped_at)| last_dumped_at.since(first_paused_at))
                    .unwrap_or_default();
                self.active_snapshots.remove(&snapshot_id);
                self.outputs.push_back(SnapshotOutput::SnapshotEnded {
                    snapshot: snapshot_id,
                    result: Ok(pause_duration),
                });
            }
            Err(reason) => self.abort_snapshot(snapshot_id, CheckpointFailure::Store(reason)),
        }
    }

    /// Handles that the store has reserved space, or that the reservation failed. No task is paused
    /// before the reservation.
    pub fn on_space_reserved(
        &mut self,
        now: Micros,
        snapshot_id: SnapshotId,
        result: Result<(), StoreFailure>,
    ) {
        match result {
            Ok(()) => {
                if let Some(snapshot) = self.active_snapshots.get_mut(&snapshot_id) {
                    snapshot.is_space_reserved = true;
                    self.advance(now, snapshot_id);
                }
            }
            Err(reason) => self.abort_snapshot(snapshot_id, CheckpointFailure::Store(reason)),
        }
    }

    /// Handles that a host has left or was lost. Aborts the snapshots that contain a task of this
    /// host whose images are not stored yet.
    pub fn on_host_lost(&mut self, host: HostId) {
        // Stored images do not depend on the host that sent them.
        let is_affected = |snapshot: &Snapshot| {
            snapshot
                .parts
                .values()
                .any(|p| p.migration.from == host && p.progress < PartProgress::Stored)
        };
        let affected_snapshots: Vec<SnapshotId> = self
            .active_snapshots
            .iter()
            .filter(|(_, snapshot)| is_affected(snapshot))
            .map(|(snapshot_id, _)| *snapshot_id)
            .collect();
        for snapshot_id in affected_snapshots {
            self.abort_snapshot(snapshot_id, CheckpointFailure::HostLost(host));
        }
    }

    /// Aborts the snapshots whose deadline has passed. Must be called at the time that
    /// [`Snapshots::next_deadline`] has returned.
    pub fn on_timer(&mut self, now: Micros) {
        // Sealing has no deadline: it depends only on the disk, and either succeeds or fails.
        let overdue_snapshots = self.active_snapshots.iter().filter(|(_, snapshot)| {
            snapshot.deadline <= now && snapshot.stage != SnapshotStage::Sealing
        });
        let overdue_snapshots: Vec<(SnapshotId, Micros)> = overdue_snapshots
            .map(|(snapshot_id, snapshot)| (*snapshot_id, snapshot.step_timeout))
            .collect();
        for (snapshot_id, timeout) in overdue_snapshots {
            self.abort_snapshot(
                snapshot_id,
                CheckpointFailure::Deadline {
                    time_limit: timeout,
                },
            );
        }
    }

    /// Enters the next stage when all tasks have reached the progress that the next stage requires.
    fn advance(&mut self, now: Micros, snapshot_id: SnapshotId) {
        let Some(snapshot) = self.active_snapshots.get_mut(&snapshot_id) else {
            return;
        };
        let least_progress = snapshot
            .parts
            .values()
            .map(|part| part.progress)
            .min()
            .unwrap_or(PartProgress::Stored);
        let is_self_checkpoint_done = |part: &SnapshotPart| {
            part.self_checkpoint_secs().is_none() || part.progress >= PartProgress::Paused
        };
        match snapshot.stage {
            SnapshotStage::Inspecting
                if least_progress >= PartProgress::Inspected && snapshot.is_space_reserved =>
            {
                let longest_self_checkpoint_secs = snapshot
                    .parts
                    .values()
                    .filter_map(SnapshotPart::self_checkpoint_secs)
                    .max()
                    .unwrap_or_default();
                // Before the program is asked to exit, its library reports the state of its links.
                // This timeout includes the time for the report.
                snapshot.step_timeout = PAUSE_TIMEOUT
                    + PAUSE_TIMEOUT
                    + Micros::from_secs(longest_self_checkpoint_secs.into());
                (snapshot.stage, snapshot.deadline) = (
                    SnapshotStage::SelfCheckpointing,
                    now + snapshot.step_timeout,
                );
                self.queue_orders(snapshot_id, &MigrationOrder::Pause, |part| {
                    part.self_checkpoint_secs().is_some()
                });
                self.advance(now, snapshot_id);
            }
            SnapshotStage::SelfCheckpointing
                if snapshot.parts.values().all(is_self_checkpoint_done) =>
            {
                (snapshot.stage, snapshot.deadline, snapshot.step_timeout) =
                    (SnapshotStage::Pausing, now + PAUSE_TIMEOUT, PAUSE_TIMEOUT);
                self.queue_orders(snapshot_id, &MigrationOrder::Pause, |part| {
                    part.self_checkpoint_secs().is_none()
                });
                self.advance(now, snapshot_id);
            }
            SnapshotStage::Pausing if least_progress >= PartProgress::Paused => {
                (snapshot.stage, snapshot.deadline, snapshot.step_timeout) =
                    (SnapshotStage::Counting, now + STEP_TIMEOUT, STEP_TIMEOUT);
                self.outputs
                    .push_back(SnapshotOutput::CountTasks(snapshot_id));
            }
            SnapshotStage::Dumping if least_progress >= PartProgress::Stored => {
                snapshot.stage = SnapshotStage::Sealing;
                let seal_entry = |part: &SnapshotPart| {
                    (part.migration.tid, part.migration.from, part.facts.clone())
                };
                let parts = snapshot.parts.values().map(seal_entry).collect();
                self.outputs.push_back(SnapshotOutput::Seal {
                    snapshot: snapshot_id,
                    parts,
                });
            }
            _ => {}
        }
    }

    fn queue_orders(
        &mut self,
        snapshot_id: SnapshotId,
        order: &MigrationOrder,
        is_selected: impl Fn(&SnapshotPart) -> bool,
    ) {
        let Some(snapshot) = self.active_snapshots.get(&snapshot_id) else {
            return;
        };
        let to_output = |part: &SnapshotPart| SnapshotOutput::Order {
            host: part.migration.from,
            part: part.migration.clone(),
            order: Box::new(order.clone()),
        };
        self.outputs.extend(
            snapshot
                .parts
                .values()
                .filter(|part| is_selected(part))
                .map(to_output),
        );
    }

    /// Aborts a snapshot: all tasks continue. Tasks that are already dumped have already continued.
    fn abort_snapshot(&mut self, snapshot_id: SnapshotId, failure: CheckpointFailure) {
        self.queue_orders(snapshot_id, &MigrationOrder::Abort, |_| true);
        let Some(snapshot) = self.active_snapshots.remove(&snapshot_id) else {
            return;
        };
        self.outputs.push_back(SnapshotOutput::Abandon {
            snapshot: snapshot_id,
            parts: snapshot.parts.into_keys().collect(),
        });
        self.outputs.push_back(SnapshotOutput::SnapshotEnded {
            snapshot: snapshot_id,
            result: Err(failure),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A snapshot that loses the host of one of its tasks fails with that host as the reason. Other
    /// snapshots continue.
    #[test]
    fn lost_host_fails_its_snapshots_only() {
        let host = |index| HostId::new(index).expect("an index");
        let task = |index, snapshot_id| Tid::for_task(host(index), snapshot_id).expect("a task");
        let mut snapshots = Snapshots::default();
        let snapshot_id = snapshots.begin_snapshot(
            Micros(0),
            &[
                (MigrationId(1), task(2, 1), host(2)),
                (MigrationId(2), task(3, 1), host(3)),
            ],
        );
        let other_id =
            snapshots.begin_snapshot(Micros(0), &[(MigrationId(3), task(4, 1), host(4))]);
        snapshots.on_host_lost(host(3));
        let to_result = |output| match output {
            SnapshotOutput::SnapshotEnded { snapshot, result } => Some((snapshot, result)),
            _ => None,
        };
        let results: Vec<_> = std::iter::from_fn(|| snapshots.poll())
            .filter_map(to_result)
            .collect();
        assert_eq!(
            results,
            [(snapshot_id, Err(CheckpointFailure::HostLost(host(3))))]
        );
        assert!(snapshots.is_active(other_id) && !snapshots.is_active(snapshot_id));
    }
}
