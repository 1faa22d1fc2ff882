//! Copies of checkpoints on other hosts, for the case that the master's host and its disk are lost:
//! a new virtual machine that is created on a host with a copy finds the checkpoint in the store of
//! that host.
//!
//! - The newest checkpoint of each job is copied when it is complete. Copies are made one at a
//!   time.
//! - A host refuses a copy while its owner is present, or if its store has no room. If the user has
//!   named no hosts, the master then asks another host.
//! - The copies of the previous checkpoint are removed when all copies of the newest one exist.
//! - Each host seals its copies with its own key. No host needs the key of another host.

use crate::rpc::RpcPurpose;
use crate::{Machine, Output, Timer};
use sempa_proto::checkpoint::CopyFailure;
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
/// Reason for a missing copy whose host is lost.
const COPY_LOST_REASON: &str = "it was lost";

/// Hosts to which checkpoints are copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyPolicy {
    /// This number of hosts, chosen by the master.
    Count(usize),
    Hosts(Vec<String>),
}

impl Default for CopyPolicy {
    fn default() -> Self {
        Self::Count(0)
    }
}

/// The checkpoint whose copies are being made, and the state of its copies.
#[derive(Debug)]
struct CopyInProgress {
    job: Tid,
    checkpoint: String,
    /// Number of copies that must exist; 0 if the copies were cancelled.
    required_count: usize,
    /// Hosts that the master has not asked yet, in the order of the requests.
    candidate_hosts: VecDeque<HostId>,
    /// Receiver of the current transfer, with the id of the transfer.
    current_transfer: Option<(HostId, MigrationId)>,
    /// Reason why the current transfer broke; `None` if it has not broken.
    send_error: Option<CopyFailure>,
    copy_hosts: Vec<HostId>,
    /// Reasons why hosts have no copy, one sentence for each host.
    refusals: Vec<String>,
}

/// The master's queue of copies.
#[derive(Debug, Default)]
pub(super) struct CopyQueue {
    /// Jobs whose newest checkpoints must be copied.
    jobs: VecDeque<Tid>,
    copy_in_progress: Option<CopyInProgress>,
}

/// Copies of a job's checkpoints.
#[derive(Debug, Default)]
pub(super) struct JobCopies {
    /// The checkpoint whose copies are made next.
    queued_checkpoint: Option<String>,
    /// Hosts with copies, each with the name of the copied checkpoint.
    checkpoint_by_host: BTreeMap<HostId, String>,
    /// The checkpoint that has fewer copies than required; `None` if all copies exist.
    incomplete_checkpoint: Option<String>,
}

impl JobCopies {
    /// Returns the hosts that have a copy of this checkpoint.
    fn hosts_with_checkpoint(&self, checkpoint: &str) -> impl Iterator<Item = HostId> {
        self.checkpoint_by_host
            .iter()
            .filter(move |(_, copied_checkpoint)| *copied_checkpoint == checkpoint)
            .map(|(host, _)| *host)
    }
}

impl Machine {
    /// Queues a complete checkpoint of a job for copying.
    pub(super) fn queue_copy(&mut self, job: Tid, checkpoint: &str) {
        if self.config.copy_policy == CopyPolicy::default() || self.shutdown.is_some() {
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
        ) = (Some(checkpoint.to_string()), None);
        // Each job is queued at most once, so the number of jobs limits the queue.
        if !job_checkpoints.copy_queue.jobs.contains(&job) {
            job_checkpoints.copy_queue.jobs.push_back(job);
        }
        self.start_next_copy();
    }

    /// Starts the next copy in the queue, unless a copy is in progress.
    fn start_next_copy(&mut self) {
        loop {
            let Some(job_checkpoints) = self
                .job_checkpoints()
                .filter(|job_checkpoints| job_checkpoints.copy_queue.copy_in_progress.is_none())
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
            let (mut candidates, required_copies, refusals) = self.copy_candidates(job);
            let Some(job_checkpoints) = self.job_checkpoints() else {
                return;
            };
            let entry = job_checkpoints.jobs.get(&job);
            let copy_hosts: Vec<HostId> = entry
                .into_iter()
                .flat_map(|entry| entry.copies.hosts_with_checkpoint(&checkpoint))
                .collect();
            candidates.retain(|host| !copy_hosts.contains(host));
            job_checkpoints.copy_queue.copy_in_progress = Some(CopyInProgress {
                job,
                checkpoint,
                required_count: required_copies,
                candidate_hosts: candidates,
                current_transfer: None,
                send_error: None,
                copy_hosts,
                refusals,
            });
            return self.advance_copy();
        }
    }

    /// Returns the hosts that may store a copy, in the order in which they are asked; the number of
    /// copies required; and the reasons why named hosts cannot be asked.
    fn copy_candidates(&self, job: Tid) -> (VecDeque<HostId>, usize, Vec<String>) {
        let own_host = self.config.host;
        let other_hosts: Vec<HostId> = self.other_hosts();
        match &self.config.copy_policy {
            CopyPolicy::Hosts(names) => {
                let (mut candidate_hosts, mut reasons) = (VecDeque::new(), Vec::new());
                for name in names {
                    match self.table.find_by_name(name).map(|entry| entry.id) {
                        Some(host) if host == own_host => {
                            reasons.push(format!("{name}: it is the master's host"))
                        }
                        Some(host) => candidate_hosts.push_back(host),
                        None => reasons.push(format!("{name}: it is not in the virtual machine")),
                    }
                }
                (candidate_hosts, names.len(), reasons)
            }
            CopyPolicy::Count(copy_count) => {
                // Hosts that already have a copy of the job come first. The remaining hosts follow
                // in an order that differs between jobs.
                let has_copy = |host: &HostId| {
                    let entry = self
                        .master
                        .as_ref()
                        .and_then(|master| master.checkpoints.jobs.get(&job));
                    entry.is_some_and(|entry| entry.copies.checkpoint_by_host.contains_key(host))
                };
                let mut candidate_hosts: Vec<HostId> = other_hosts.clone();
                if !candidate_hosts.is_empty() {
                    candidate_hosts.rotate_left(job.local_part() as usize % other_hosts.len());
                }
                candidate_hosts.sort_by_key(|host| !has_copy(host));
                (candidate_hosts.into(), *copy_count, Vec::new())
            }
        }
    }

    /// Asks the next candidate host to store the current copy. If all copies exist or no candidate
    /// is left, finishes the copies of this checkpoint and starts those of the next one.
    fn advance_copy(&mut self) {
        if self.shutdown.is_some() {
            // No copy is started during a shutdown.
            return;
        }
        let next_transfer = self.master.as_deref_mut().and_then(|master| {
            let copy = master
                .checkpoints
                .copy_queue
                .copy_in_progress
                .as_mut()
                .filter(|copy| {
                    copy.current_transfer.is_none() && copy.required_count > copy.copy_hosts.len()
                })?;
            let host = copy.candidate_hosts.pop_front()?;
            let migration = master.migrations.coordinator.generate_id();
            copy.current_transfer = Some((host, migration));
            Some((host, migration, copy.checkpoint.clone()))
        });
        if let Some((host, migration, checkpoint)) = next_transfer {
            return self.call_host(
                host,
                HostRequest::StoreCopy {
                    migration,
                    checkpoint,
                },
                RpcPurpose::StoreCopy { migration },
            );
        }
        if let Some(finished_copy) = self.job_checkpoints().and_then(|job_checkpoints| {
            job_checkpoints
                .copy_queue
                .copy_in_progress
                .take_if(|copy| copy.current_transfer.is_none())
        }) {
            self.finish_copies(finished_copy);
        }
        self.start_next_copy();
    }

    /// Finishes the copies of a checkpoint and records the result in the event log, unless the
    /// copies were cancelled. If all copies exist, removes the job's copies of earlier checkpoints.
    /// Otherwise records that the checkpoint has too few copies.
    fn finish_copies(&mut self, finished_copy: CopyInProgress) {
        let CopyInProgress {
            job,
            checkpoint,
            required_count: required_copies,
            copy_hosts,
            refusals,
            ..
        } = finished_copy;
        let missing_count = required_copies.saturating_sub(copy_hosts.len());
        if missing_count == 0 {
            // All copies exist, so copies of earlier checkpoints are not needed any more.
            self.drop_copies_if(job, |copied_checkpoint| *copied_checkpoint != checkpoint);
        } else if let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        {
            entry.copies.incomplete_checkpoint = Some(checkpoint.clone());
        }
        if required_copies == 0 {
            // The copies were cancelled, so no result is recorded.
            return;
        }
        let missing_count = u32::try_from(missing_count).unwrap_or(u32::MAX);
        self.record_event(EventKind::CheckpointCopied {
            checkpoint,
            job,
            hosts: copy_hosts,
            missing: missing_count,
            why: refusals.join("; "),
        });
    }

    /// Returns the copy in progress, if `migration` is the id of its transfer.
    fn current_copy(&mut self, migration: MigrationId) -> Option<&mut CopyInProgress> {
        let copy = self
            .job_checkpoints()?
            .copy_queue
            .copy_in_progress
            .as_mut()?;
        copy.current_transfer
            .is_some_and(|(_, id)| id == migration)
            .then_some(copy)
    }

    /// Handles the reply of a host that was asked to store a copy: starts the transfer if the host
    /// accepts the copy, otherwise records the reason and asks the next host. `reply` is `None` if
    /// the host is lost.
    pub(crate) fn handle_copy_reply(&mut self, migration: MigrationId, reply: Option<Reply>) {
        let Some(copy) = self.current_copy(migration) else {
            return;
        };
        let (Some((receiver, _)), checkpoint) = (copy.current_transfer, copy.checkpoint.clone())
        else {
            return;
        };
        match reply {
            Some(Reply::Done) => self.outputs.push_back(Output::SendCopy {
                migration,
                checkpoint,
                receiver,
            }),
            Some(Reply::Failed { reason, .. }) => {
                self.finish_transfer(migration, Err(CopyFailure(reason)))
            }
            _ => self.finish_transfer(migration, Err(CopyFailure(COPY_LOST_REASON.into()))),
        }
    }

    /// Handles a host's report that it has stored a copy. `Err` contains the reason why the host
    /// has no copy.
    pub(crate) fn handle_copy_stored(
        &mut self,
        host: HostId,
        migration: MigrationId,
        checkpoint: String,
        result: Result<(), CopyFailure>,
    ) {
        if self
            .current_copy(migration)
            .is_some_and(|copy| copy.current_transfer == Some((host, migration)))
        {
            return self.finish_transfer(migration, result);
        }
        let jobs = self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| job_checkpoints.jobs.values());
        let is_known = jobs
            .map(|entry| &entry.copies.checkpoint_by_host)
            .any(|checkpoint_by_host| checkpoint_by_host.get(&host) == Some(&checkpoint));
        if result.is_ok() && !is_known {
            // The copy was cancelled while the host stored it. No later step would remove the copy,
            // so it is removed now.
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![checkpoint],
                },
            );
        }
    }

    /// True if `migration` is the id of the copy that this host is sending.
    pub(crate) fn is_outgoing_copy(&self, migration: MigrationId) -> bool {
        let copy = self
            .master
            .as_ref()
            .and_then(|master| master.checkpoints.copy_queue.copy_in_progress.as_ref());
        copy.and_then(|copy| copy.current_transfer)
            .is_some_and(|(_, id)| id == migration)
    }

    /// Handles the end of sending a copy. A failure becomes the result only if the receiver does
    /// not report a reason within [`FAILURE_REPORT_TIMEOUT`], because the receiver knows why it
    /// stopped.
    pub(crate) fn handle_copy_sent(
        &mut self,
        migration: MigrationId,
        result: Result<(), CopyFailure>,
    ) {
        if let (Err(why), Some(copy)) = (result, self.current_copy(migration)) {
            copy.send_error = Some(why);
            self.set_timer(FAILURE_REPORT_TIMEOUT, Timer::CopyFailureTimeout(migration));
        }
    }

    /// Fails a copy whose transfer broke, unless the receiver has reported the reason.
    pub(crate) fn fail_broken_copy(&mut self, migration: MigrationId) {
        if let Some(why) = self
            .current_copy(migration)
            .and_then(|copy| copy.send_error.take())
        {
            self.finish_transfer(migration, Err(why));
        }
    }

    /// Ends the transfer of a copy and continues with the next host. Records the new copy, or the
    /// reason why the host has none. If the new copy replaces a copy of an earlier checkpoint on
    /// the same host, the earlier copy is removed.
    fn finish_transfer(&mut self, migration: MigrationId, result: Result<(), CopyFailure>) {
        let Some(copy) = self.current_copy(migration) else {
            return;
        };
        let Some((host, _)) = copy.current_transfer.take() else {
            return;
        };
        copy.send_error = None;
        let (job, checkpoint, is_stored) = (copy.job, copy.checkpoint.clone(), result.is_ok());
        if is_stored {
            copy.copy_hosts.push(host);
        }
        self.outputs.push_back(Output::DropImages { migration });
        let name = self.host_name(host);
        if let (Err(why), Some(copy)) = (
            result,
            self.job_checkpoints()
                .and_then(|job_checkpoints| job_checkpoints.copy_queue.copy_in_progress.as_mut()),
        ) {
            copy.refusals.push(format!("{name}: {why}"));
        }
        if is_stored {
            let entry = self
                .job_checkpoints()
                .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job));
            match entry.map(|entry| {
                entry
                    .copies
                    .checkpoint_by_host
                    .insert(host, checkpoint.clone())
            }) {
                Some(Some(previous_checkpoint)) if previous_checkpoint != checkpoint => self
                    .send_to_host(
                        host,
                        HostMsg::DropCopies {
                            checkpoints: vec![previous_checkpoint],
                        },
                    ),
                Some(_) => {}
                // The job has ended, so no later checkpoint would replace the copy.
                None => self.send_to_host(
                    host,
                    HostMsg::DropCopies {
                        checkpoints: vec![checkpoint],
                    },
                ),
            }
        }
        self.advance_copy();
    }

    /// Master: forgets the copies on a lost host, and queues new copies.
    pub(crate) fn replace_copies_on(&mut self, host: HostId) {
        let mut missing_copies = Vec::new();
        for (job, entry) in self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| &mut job_checkpoints.jobs)
        {
            let lost_checkpoint = entry
                .copies
                .checkpoint_by_host
                .remove(&host)
                .filter(|checkpoint| entry.newest_checkpoint.as_ref() == Some(checkpoint));
            missing_copies.extend(lost_checkpoint.map(|checkpoint| (*job, checkpoint)));
        }
        let receiver = self.job_checkpoints().and_then(|job_checkpoints| {
            job_checkpoints
                .copy_queue
                .copy_in_progress
                .as_ref()?
                .current_transfer
        });
        if let Some((_, migration)) = receiver.filter(|(receiver, _)| *receiver == host) {
            self.finish_transfer(migration, Err(CopyFailure(COPY_LOST_REASON.into())));
        }
        if self.shutdown.is_none() {
            missing_copies
                .into_iter()
                .for_each(|(job, checkpoint)| self.queue_copy(job, &checkpoint));
        }
    }

    /// Master: queues missing copies after hosts have joined.
    pub(crate) fn queue_missing_copies(&mut self) {
        let jobs = self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| &mut job_checkpoints.jobs);
        let missing_copies: Vec<(Tid, String)> = jobs
            .filter_map(|(job, entry)| Some((*job, entry.copies.incomplete_checkpoint.take()?)))
            .collect();
        missing_copies
            .into_iter()
            .for_each(|(job, checkpoint)| self.queue_copy(job, &checkpoint));
    }

    /// Master: removes the copies of checkpoints that were removed. All hosts get the order,
    /// because the master does not know the copies of forgotten jobs.
    pub(super) fn remove_copies_of(&mut self, checkpoints: &[String]) {
        if self.config.copy_policy == CopyPolicy::default() || checkpoints.is_empty() {
            return;
        }
        for entry in self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| job_checkpoints.jobs.values_mut())
        {
            let JobCopies {
                queued_checkpoint,
                checkpoint_by_host,
                incomplete_checkpoint,
            } = &mut entry.copies;
            [queued_checkpoint, incomplete_checkpoint]
                .into_iter()
                .for_each(|checkpoint| {
                    drop(checkpoint.take_if(|checkpoint| checkpoints.contains(checkpoint)))
                });
            checkpoint_by_host.retain(|_, checkpoint| !checkpoints.contains(checkpoint));
        }
        self.cancel_copy_if(|copy| checkpoints.contains(&copy.checkpoint));
        for host in self.other_hosts() {
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: checkpoints.to_vec(),
                },
            );
        }
    }

    /// Master: removes the copies of a job that has ended. The job's checkpoint remains in the
    /// master's store for some time.
    pub(super) fn remove_job_copies(&mut self, job: Tid) {
        if let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        {
            entry.copies.queued_checkpoint = None;
        }
        self.drop_copies_if(job, |_| true);
        self.cancel_copy_if(|copy| copy.job == job);
    }

    /// Cancels the copy in progress if the predicate returns true for this copy.
    fn cancel_copy_if(&mut self, predicate: impl FnOnce(&CopyInProgress) -> bool) {
        let copy = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.copy_queue.copy_in_progress.as_mut());
        let Some(copy) = copy.filter(|copy| predicate(copy)) else {
            return;
        };
        copy.required_count = 0;
        if let Some((_, migration)) = copy.current_transfer {
            self.finish_transfer(
                migration,
                Err(CopyFailure("it is not needed any more".into())),
            );
        }
    }

    /// Removes the copies of those checkpoints of a job for whose names the predicate returns true.
    fn drop_copies_if(&mut self, job: Tid, predicate: impl Fn(&String) -> bool) {
        let Some(entry) = self
            .job_checkpoints()
            .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
        else {
            return;
        };
        let remaining_copies = std::mem::take(&mut entry.copies.checkpoint_by_host);
        let (removed_copies, remaining_copies): (BTreeMap<_, _>, _) = remaining_copies
            .into_iter()
            .partition(|(_, checkpoint)| predicate(checkpoint));
        entry.copies.checkpoint_by_host = remaining_copies;
        entry
            .copies
            .incomplete_checkpoint
            .take_if(|checkpoint| predicate(checkpoint));
        for (host, checkpoint) in removed_copies {
            self.send_to_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![checkpoint],
                },
            );
        }
    }

    /// Returns the names of the hosts that have a copy of a checkpoint.
    pub(super) fn hosts_with_copy(&self, job: Tid, checkpoint: &str) -> Vec<String> {
        let entry = self
            .master
            .as_ref()
            .and_then(|master| master.checkpoints.jobs.get(&job));
        entry
            .into_iter()
            .flat_map(|entry| entry.copies.hosts_with_checkpoint(checkpoint))
            .map(|host| self.host_name(host))
            .collect()
    }

    // ---- On a host that stores copies

    /// Handles a request to store a copy. The request is refused while the owner of this host is
    /// present, or if the requester is not the master.
    pub(crate) fn handle_copy_request(
        &mut self,
        requester: HostId,
        migration: MigrationId,
        checkpoint: String,
    ) -> Reply {
        let refusal_reason = match (requester, self.owner_control.pauses_guests()) {
            (HostId::MASTER, false) => None,
            (HostId::MASTER, true) => Some("its owner admits no guests at present"),
            _ => Some("only the master copies checkpoints"),
        };
        if let Some(reason) = refusal_reason {
            return Reply::Failed {
                error: PvmError::Denied,
                reason: reason.into(),
            };
        }
        // The master makes one copy at a time. If a previous copy is still being received, the
        // master has abandoned that copy.
        match self
            .incoming_checkpoint_copy
            .replace((migration, checkpoint.clone()))
        {
            Some((previous_transfer, previous_checkpoint)) if previous_checkpoint == checkpoint => {
                self.outputs.push_back(Output::DropImages {
                    migration: previous_transfer,
                })
            }
            Some((migration, checkpoint)) => self.outputs.push_back(Output::DiscardCopy {
                migration,
                checkpoint,
            }),
            None => {}
        }
        self.outputs.push_back(Output::ExpectCopy {
            migration,
            sender: requester,
            checkpoint,
        });
        Reply::Done
    }

    /// True if `migration` is the id of the copy that this host is receiving.
    pub(crate) fn is_incoming_copy(&self, migration: MigrationId) -> bool {
        self.incoming_checkpoint_copy
            .as_ref()
            .is_some_and(|(incoming_id, _)| *incoming_id == migration)
    }

    /// Handles the end of receiving a copy: reports the result to the master.
    pub(crate) fn handle_copy_received(
        &mut self,
        migration: MigrationId,
        result: Result<(), CopyFailure>,
    ) {
        let Some((_, checkpoint)) = self
            .incoming_checkpoint_copy
            .take_if(|(incoming_id, _)| *incoming_id == migration)
        else {
            return;
        };
        self.outputs.push_back(Output::DropImages { migration });
        self.send_to_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint,
                result,
            },
        );
    }

    /// Cancels the copy that this host is receiving, because its owner is present.
    pub(crate) fn cancel_incoming_copy(&mut self, why: &str) {
        let Some((migration, checkpoint)) = self.incoming_checkpoint_copy.take() else {
            return;
        };
        self.outputs.push_back(Output::DiscardCopy {
            migration,
            checkpoint: checkpoint.clone(),
        });
        self.send_to_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint,
                result: Err(CopyFailure(why.to_string())),
            },
        );
    }
}
