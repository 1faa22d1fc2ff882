//! Copies of checkpoints on other hosts, for the case that the master's host and its disk are lost:
//! a new virtual machine that is created on a host with a copy finds the checkpoint in the store of
//! that host.
//!
//! - Of each job the newest checkpoint is copied, after it is complete. Copies are made one at a
//!   time.
//! - A host refuses a copy while its owner is present, or if its store has no room. If any host may
//!   store the copy, the next one is tried.
//! - The previous copy is removed when the next one exists.
//! - Each host seals its copies with its own key. No host needs the key of another.

use crate::rpc::RpcPurpose;
use crate::{Machine, Output, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::{HostMsg, HostRequest};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Largest number of copies of one checkpoint, and of host names in a [`CopyPolicy`].
pub const COPIES_MAX: usize = 16;

/// Time limit for the receiver of a copy to report why it has stopped receiving, after the transfer
/// has broken.
const FAILURE_REPORT_TIMEOUT: Micros = Micros::from_secs(5);
/// Reason for a copy that is missing because its host is gone.
const COPY_LOST_REASON: &str = "it was lost";

/// Hosts to which checkpoints are copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyPolicy {
    /// This number of hosts, chosen by the master.
    Count(usize),
    Hosts(Vec<String>),
}

impl Default for CopyPolicy {
    fn default() -> CopyPolicy {
        CopyPolicy::Count(0)
    }
}

/// The checkpoint that is being copied, and the state of its copies.
#[derive(Debug)]
struct CopyInProgress {
    job: Tid,
    checkpoint: String,
    /// Number of copies that must exist.
    required: usize,
    /// Hosts that may still be asked, in this order.
    candidates: VecDeque<HostId>,
    /// Receiver of the current transfer, with the id of the transfer.
    receiver: Option<(HostId, MigrationId)>,
    /// Reason why the transfer broke, if it did.
    send_error: Option<String>,
    copy_hosts: Vec<HostId>,
    /// Reasons why hosts have no copy, one sentence for each host.
    refusals: Vec<String>,
}

/// The master's queue of copies.
#[derive(Debug, Default)]
pub(super) struct CopyQueue {
    /// Jobs whose newest checkpoints must be copied.
    jobs: VecDeque<Tid>,
    current: Option<CopyInProgress>,
}

/// Copies of a job's checkpoints.
#[derive(Debug, Default)]
pub(super) struct JobCopies {
    /// The checkpoint to copy next.
    queued_checkpoint: Option<String>,
    /// Hosts with copies, and the checkpoint that each one has.
    checkpoint_by_host: BTreeMap<HostId, String>,
    /// The checkpoint that has fewer copies than required.
    incomplete_checkpoint: Option<String>,
}

impl JobCopies {
    /// Returns the hosts that have a copy of this checkpoint.
    fn hosts_with(&self, set: &str) -> impl Iterator<Item = HostId> {
        self.checkpoint_by_host
            .iter()
            .filter(move |(_, there)| *there == set)
            .map(|(host, _)| *host)
    }
}

impl Machine {
    /// Queues a complete checkpoint of a job for copying.
    pub(super) fn queue_copy(&mut self, job: Tid, set: &str) {
        if self.config.copies == CopyPolicy::default() || self.shutdown.is_some() {
            return;
        }
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(entry) = job_checkpoints.jobs.get_mut(&job) else {
            return;
        };
        (
            entry.copies.queued_checkpoint,
            entry.copies.incomplete_checkpoint,
        ) = (Some(set.to_string()), None);
        // Each job is queued at most once, which bounds the queue by the number of jobs.
        if !job_checkpoints.copy_queue.jobs.contains(&job) {
            job_checkpoints.copy_queue.jobs.push_back(job);
        }
        self.start_next_copy();
    }

    /// Starts the next copy in the queue, unless one is in progress.
    fn start_next_copy(&mut self) {
        loop {
            let Some(job_checkpoints) = self
                .job_checkpoints()
                .filter(|job_checkpoints| job_checkpoints.copy_queue.current.is_none())
            else {
                return;
            };
            let Some(job) = job_checkpoints.copy_queue.jobs.pop_front() else {
                return;
            };
            let Some(checkpoint) = job_checkpoints
                .jobs
                .get_mut(&job)
                .and_then(|entry| entry.copies.queued_checkpoint.take())
            else {
                continue;
            };
            let (mut candidates, required, refusals) = self.copy_candidates(job);
            let Some(job_checkpoints) = self.job_checkpoints() else {
                return;
            };
            let entry = job_checkpoints.jobs.get(&job);
            let copied_to: Vec<HostId> = entry
                .into_iter()
                .flat_map(|entry| entry.copies.hosts_with(&checkpoint))
                .collect();
            candidates.retain(|host| !copied_to.contains(host));
            job_checkpoints.copy_queue.current = Some(CopyInProgress {
                job,
                checkpoint,
                required,
                candidates,
                receiver: None,
                send_error: None,
                copy_hosts: copied_to,
                refusals,
            });
            return self.advance_copy();
        }
    }

    /// Returns the hosts that may store a copy, in the order in which they are asked; the number of
    /// copies required; and the reasons for hosts that are not available.
    fn copy_candidates(&self, job: Tid) -> (VecDeque<HostId>, usize, Vec<String>) {
        let me = self.config.host;
        let others: Vec<HostId> = self.other_hosts();
        match &self.config.copies {
            CopyPolicy::Hosts(names) => {
                let (mut places, mut whys) = (VecDeque::new(), Vec::new());
                for name in names {
                    match self.table.by_name(name).map(|entry| entry.id) {
                        Some(host) if host == me => {
                            whys.push(format!("{name}: it is the master's host"))
                        }
                        Some(host) => places.push_back(host),
                        None => whys.push(format!("{name}: it is not in the virtual machine")),
                    }
                }
                (places, names.len(), whys)
            }
            CopyPolicy::Count(number) => {
                // Hosts that already have a copy of the job come first. The others follow in an
                // order that differs between jobs.
                let has = |host: &HostId| {
                    let entry = self
                        .master
                        .as_ref()
                        .and_then(|master| master.checkpoints.jobs.get(&job));
                    entry.is_some_and(|entry| entry.copies.checkpoint_by_host.contains_key(host))
                };
                let mut places: Vec<HostId> = others.clone();
                if !places.is_empty() {
                    places.rotate_left(job.local_part() as usize % others.len());
                }
                places.sort_by_key(|host| !has(host));
                (places.into(), *number, Vec::new())
            }
        }
    }

    /// Asks the next candidate host to store the current copy. If all copies exist or no candidate
    /// is left, finishes.
    fn advance_copy(&mut self) {
        if self.shutdown.is_some() {
            // The virtual machine ends.
            return;
        }
        let next = self.master.as_deref_mut().and_then(|master| {
            let now = master
                .checkpoints
                .copy_queue
                .current
                .as_mut()
                .filter(|now| now.receiver.is_none() && now.required > now.copy_hosts.len())?;
            let host = now.candidates.pop_front()?;
            let migration = master.migrations.coordinator.next_id();
            now.receiver = Some((host, migration));
            Some((host, migration, now.checkpoint.clone()))
        });
        if let Some((host, migration, set)) = next {
            return self.call_host(
                host,
                HostRequest::StoreCopy {
                    migration,
                    checkpoint: set,
                },
                RpcPurpose::StoreCopy { migration },
            );
        }
        if let Some(done) = self.job_checkpoints().and_then(|job_checkpoints| {
            job_checkpoints
                .copy_queue
                .current
                .take_if(|now| now.receiver.is_none())
        }) {
            self.finish_copies(done);
        }
        self.start_next_copy();
    }

    /// Finishes a checkpoint that has all copies, or for which no host is left.
    fn finish_copies(&mut self, done: CopyInProgress) {
        let CopyInProgress {
            job,
            checkpoint,
            required,
            copy_hosts: copied_to,
            refusals,
            ..
        } = done;
        let missing = required.saturating_sub(copied_to.len());
        if missing == 0 {
            // Copies of the previous checkpoint are not needed any more.
            self.drop_copies_if(job, |there| *there != checkpoint);
        } else if let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        {
            entry.copies.incomplete_checkpoint = Some(checkpoint.clone());
        }
        if required == 0 {
            // The copies were cancelled.
            return;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        self.record(EventKind::CheckpointCopied {
            checkpoint,
            job,
            hosts: copied_to,
            missing,
            why: refusals.join("; "),
        });
    }

    /// Returns the copy in progress, if its transfer has this id.
    fn current_copy(&mut self, migration: MigrationId) -> Option<&mut CopyInProgress> {
        let now = self.job_checkpoints()?.copy_queue.current.as_mut()?;
        now.receiver
            .is_some_and(|(_, id)| id == migration)
            .then_some(now)
    }

    /// Handles a host's reply whether it accepts a copy.
    pub(crate) fn handle_copy_reply(&mut self, migration: MigrationId, answer: Option<Reply>) {
        let Some(now) = self.current_copy(migration) else {
            return;
        };
        let (Some((to, _)), checkpoint) = (now.receiver, now.checkpoint.clone()) else {
            return;
        };
        match answer {
            Some(Reply::Done) => self.outputs.push_back(Output::SendCopy {
                migration,
                checkpoint,
                to,
            }),
            Some(Reply::Failed { reason, .. }) => self.finish_transfer(migration, Err(reason)),
            _ => self.finish_transfer(migration, Err(COPY_LOST_REASON.into())),
        }
    }

    /// Handles a host's report that it has stored a copy, or why it has not.
    pub(crate) fn handle_copy_stored(
        &mut self,
        host: HostId,
        migration: MigrationId,
        set: String,
        result: Result<(), String>,
    ) {
        if self
            .current_copy(migration)
            .is_some_and(|now| now.receiver == Some((host, migration)))
        {
            return self.finish_transfer(migration, result);
        }
        let jobs = self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| job_checkpoints.jobs.values());
        let is_known = jobs
            .map(|entry| &entry.copies.checkpoint_by_host)
            .any(|there| there.get(&host) == Some(&set));
        if result.is_ok() && !is_known {
            // The copy was cancelled while the host stored it. It is removed now, because no later
            // step would remove it.
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![set],
                },
            );
        }
    }

    /// True if `migration` is the copy that this host is sending.
    pub(crate) fn is_outgoing_copy(&self, migration: MigrationId) -> bool {
        let now = self
            .master
            .as_ref()
            .and_then(|master| master.checkpoints.copy_queue.current.as_ref());
        now.and_then(|now| now.receiver)
            .is_some_and(|(_, id)| id == migration)
    }

    /// Handles the end of sending a copy. The receiver's report takes precedence, because the
    /// receiver knows why it stopped. Without a report, this result counts.
    pub(crate) fn handle_copy_sent(&mut self, migration: MigrationId, result: Result<(), String>) {
        if let (Err(why), Some(now)) = (result, self.current_copy(migration)) {
            now.send_error = Some(why);
            self.set_timer(FAILURE_REPORT_TIMEOUT, Timer::CopySendFailed(migration));
        }
    }

    /// Fails a copy whose transfer broke, if the receiver has not reported the reason.
    pub(crate) fn fail_unsent_copy(&mut self, migration: MigrationId) {
        if let Some(why) = self
            .current_copy(migration)
            .and_then(|now| now.send_error.take())
        {
            self.finish_transfer(migration, Err(why));
        }
    }

    /// Ends the transfer of a copy, successfully or not.
    fn finish_transfer(&mut self, migration: MigrationId, result: Result<(), String>) {
        let Some(now) = self.current_copy(migration) else {
            return;
        };
        let Some((host, _)) = now.receiver.take() else {
            return;
        };
        now.send_error = None;
        let (job, set, is_stored) = (now.job, now.checkpoint.clone(), result.is_ok());
        if is_stored {
            now.copy_hosts.push(host);
        }
        self.outputs.push_back(Output::DropImages { migration });
        let name = self.host_name(host);
        if let (Err(why), Some(now)) = (
            result,
            self.job_checkpoints()
                .and_then(|job_checkpoints| job_checkpoints.copy_queue.current.as_mut()),
        ) {
            now.refusals.push(format!("{name}: {why}"));
        }
        if is_stored {
            let entry = self
                .job_checkpoints()
                .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job));
            match entry.map(|entry| entry.copies.checkpoint_by_host.insert(host, set.clone())) {
                Some(Some(before)) if before != set => self.send_to_host(
                    host,
                    HostMsg::DropCopies {
                        checkpoints: vec![before],
                    },
                ),
                Some(_) => {}
                // The job has ended, and the copy would never be removed later.
                None => self.send_to_host(
                    host,
                    HostMsg::DropCopies {
                        checkpoints: vec![set],
                    },
                ),
            }
        }
        self.advance_copy();
    }

    /// Master: forgets the copies on a lost host, and queues new copies.
    pub(crate) fn replace_copies_on(&mut self, host: HostId) {
        let mut lacking = Vec::new();
        for (job, entry) in self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| &mut job_checkpoints.jobs)
        {
            let lost = entry
                .copies
                .checkpoint_by_host
                .remove(&host)
                .filter(|set| entry.newest_checkpoint.as_ref() == Some(set));
            lacking.extend(lost.map(|set| (*job, set)));
        }
        let to = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.copy_queue.current.as_ref()?.receiver);
        if let Some((_, migration)) = to.filter(|(to, _)| *to == host) {
            self.finish_transfer(migration, Err(COPY_LOST_REASON.into()));
        }
        if self.shutdown.is_none() {
            lacking
                .into_iter()
                .for_each(|(job, set)| self.queue_copy(job, &set));
        }
    }

    /// Master: queues missing copies after hosts have joined.
    pub(crate) fn make_missing_copies(&mut self) {
        let jobs = self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| &mut job_checkpoints.jobs);
        let lacking: Vec<(Tid, String)> = jobs
            .filter_map(|(job, entry)| Some((*job, entry.copies.incomplete_checkpoint.take()?)))
            .collect();
        lacking
            .into_iter()
            .for_each(|(job, set)| self.queue_copy(job, &set));
    }

    /// Master: removes the copies of checkpoints that were removed. Copies of forgotten jobs are
    /// unknown, so all hosts are notified.
    pub(super) fn remove_copies_of(&mut self, sets: &[String]) {
        if self.config.copies == CopyPolicy::default() || sets.is_empty() {
            return;
        }
        for entry in self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| job_checkpoints.jobs.values_mut())
        {
            let JobCopies {
                queued_checkpoint: queued,
                checkpoint_by_host: stored_on,
                incomplete_checkpoint: incomplete,
            } = &mut entry.copies;
            [queued, incomplete]
                .into_iter()
                .for_each(|set| drop(set.take_if(|set| sets.contains(set))));
            stored_on.retain(|_, set| !sets.contains(set));
        }
        self.cancel_copy_if(|now| sets.contains(&now.checkpoint));
        for host in self.other_hosts() {
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: sets.to_vec(),
                },
            );
        }
    }

    /// Master: removes the copies of a job that has ended. Its checkpoint stays in the store for a
    /// while.
    pub(super) fn remove_job_copies(&mut self, job: Tid) {
        if let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        {
            entry.copies.queued_checkpoint = None;
        }
        self.drop_copies_if(job, |_| true);
        self.cancel_copy_if(|now| now.job == job);
    }

    /// Cancels the copy in progress if the predicate is true for it.
    fn cancel_copy_if(&mut self, predicate: impl FnOnce(&CopyInProgress) -> bool) {
        let now = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.copy_queue.current.as_mut());
        let Some(now) = now.filter(|now| predicate(now)) else {
            return;
        };
        now.required = 0;
        if let Some((_, migration)) = now.receiver {
            self.finish_transfer(migration, Err("nobody wants it any more".into()));
        }
    }

    /// Removes those copies of a job's checkpoints for whose names the predicate is true.
    fn drop_copies_if(&mut self, job: Tid, predicate: impl Fn(&String) -> bool) {
        let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        else {
            return;
        };
        let stored = std::mem::take(&mut entry.copies.checkpoint_by_host);
        let (gone, stored): (BTreeMap<_, _>, _) =
            stored.into_iter().partition(|(_, set)| predicate(set));
        entry.copies.checkpoint_by_host = stored;
        entry
            .copies
            .incomplete_checkpoint
            .take_if(|set| predicate(set));
        for (host, set) in gone {
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![set],
                },
            );
        }
    }

    /// Returns the names of the hosts that have a copy of a checkpoint.
    pub(super) fn hosts_with_copy(&self, job: Tid, set: &str) -> Vec<String> {
        let entry = self
            .master
            .as_ref()
            .and_then(|master| master.checkpoints.jobs.get(&job));
        entry
            .into_iter()
            .flat_map(|entry| entry.copies.hosts_with(set))
            .map(|host| self.host_name(host))
            .collect()
    }

    // ---- On a host that stores copies

    /// Handles the master's request to store a copy. It is refused while the owner of this host is
    /// present.
    pub(crate) fn handle_copy_request(
        &mut self,
        from: HostId,
        migration: MigrationId,
        checkpoint: String,
    ) -> Reply {
        let refused = match (from, self.owner_control.pauses_guests()) {
            (HostId::MASTER, false) => None,
            (HostId::MASTER, true) => Some("its owner does not want guests now"),
            _ => Some("only the master has sets copied"),
        };
        if let Some(reason) = refused {
            return Reply::Failed {
                error: PvmError::Denied,
                reason: reason.into(),
            };
        }
        // The master makes one copy at a time, so it has abandoned the previous one.
        match self
            .incoming_checkpoint_copy
            .replace((migration, checkpoint.clone()))
        {
            Some((before, same)) if same == checkpoint => self
                .outputs
                .push_back(Output::DropImages { migration: before }),
            Some((migration, checkpoint)) => self.outputs.push_back(Output::DiscardCopy {
                migration,
                checkpoint,
            }),
            None => {}
        }
        self.outputs.push_back(Output::ExpectCopy {
            migration,
            from,
            checkpoint,
        });
        Reply::Done
    }

    /// True if `migration` is the copy that this host is receiving.
    pub(crate) fn is_incoming_copy(&self, migration: MigrationId) -> bool {
        self.incoming_checkpoint_copy
            .as_ref()
            .is_some_and(|(coming, _)| *coming == migration)
    }

    /// Handles the end of receiving a copy: reports the result to the master.
    pub(crate) fn handle_copy_received(
        &mut self,
        migration: MigrationId,
        result: Result<(), String>,
    ) {
        let Some((_, set)) = self
            .incoming_checkpoint_copy
            .take_if(|(coming, _)| *coming == migration)
        else {
            return;
        };
        self.outputs.push_back(Output::DropImages { migration });
        self.send_to_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint: set,
                result,
            },
        );
    }

    /// Cancels the copy that is being received, because the owner of this host is present.
    pub(crate) fn cancel_incoming_copy(&mut self, why: &str) {
        let Some((migration, set)) = self.incoming_checkpoint_copy.take() else {
            return;
        };
        self.outputs.push_back(Output::DiscardCopy {
            migration,
            checkpoint: set.clone(),
        });
        self.send_to_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint: set,
                result: Err(why.to_string()),
            },
        );
    }
}
