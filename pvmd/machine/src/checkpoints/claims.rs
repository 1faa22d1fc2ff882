//! The claims of jobs in the store: they are released when no task of the job can run any more.
//!
//! - A job whose end the master has seen by an inventory of all hosts is released at once.
//! - If tasks of a job may run that the master does not track any more, the claim is *unreleased*:
//!   the master checks all such jobs regularly until their tasks have ended.
//! - While tasks of a lost host may run until their lease is over, nothing is released.

use super::{
    EXIT_CHECK_INTERVAL, InventoryPurpose, JOBS_MAX, JobActivity, JobCheckpoints, job_members,
};
use crate::{Machine, Output, Timer};
use sempa_proto::checkpoint::ClaimKey;
use sempa_proto::table::TaskInfo;
use sempa_proto::{Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Interval between checks whether the tasks of jobs with unreleased claims have ended.
const CLAIM_CHECK_INTERVAL: Micros = Micros::from_secs(5);
/// Largest number of unreleased claims. The claims of further jobs are released when the virtual
/// machine ends.
const UNRELEASED_CLAIMS_MAX: usize = JOBS_MAX;

/// The claims that must be released when the tasks of their jobs have ended.
#[derive(Debug, Default)]
pub(super) struct UnreleasedClaims {
    claims: BTreeMap<ClaimKey, UnreleasedClaim>,
    /// True if an inventory was requested, or the timer for the next one is set.
    is_check_pending: bool,
}

#[derive(Debug)]
struct UnreleasedClaim {
    /// Known tasks of the job.
    members: BTreeSet<Tid>,
    /// True if the requested inventory is later than the last tasks of the job.
    is_in_inventory: bool,
}

impl JobCheckpoints {
    /// Returns the key of the job that runs in this virtual machine under this number.
    pub(super) fn claim_key(&self, job: Tid) -> ClaimKey {
        ClaimKey {
            job,
            origin: self.origins.get(&job).copied().unwrap_or(self.created_at),
        }
    }

    /// Returns the key of the job to which the entry in `jobs` belongs: the job that is being
    /// restarted, or the one that runs.
    pub(super) fn entry_key(&self, job: Tid) -> ClaimKey {
        let restart_number = match self.jobs.get(&job).map(|entry| &entry.activity) {
            Some(JobActivity::Restarting(restart_number)) => Some(restart_number),
            _ => None,
        };
        let open_restart = restart_number.and_then(|number| self.open_restarts.get(number));
        open_restart
            .and_then(|open_restart| open_restart.meta.as_ref())
            .map_or_else(|| self.claim_key(job), |meta| meta.claim_key())
    }
}

impl Machine {
    /// Returns the time until no task of a lost or deleted host can run; `None` if none can.
    pub(crate) fn lost_tasks_wait(&self) -> Option<Micros> {
        let lease_wait = self.lost_leases_end().map(|end| end.since(self.now));
        let has_leaving_hosts = self
            .master
            .as_ref()
            .is_some_and(|master| !master.host_changes.leaving_hosts.is_empty());
        lease_wait.or_else(|| has_leaving_hosts.then_some(EXIT_CHECK_INTERVAL))
    }

    /// Releases the claim of a job of which nothing can run any more.
    pub(super) fn release_claim(&mut self, key: ClaimKey) {
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.unreleased_claims.claims.remove(&key);
        }
        self.outputs.push_back(Output::ReleaseJob { key });
    }

    /// Releases the claim of a job as soon as no task of the job, and nothing that a task has left
    /// behind, can run any more. A restart in another virtual machine would start copies of both.
    /// `members` are the known tasks.
    pub(super) fn release_when_ended(&mut self, key: ClaimKey, members: BTreeSet<Tid>) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let UnreleasedClaims {
            claims,
            is_check_pending,
        } = &mut job_checkpoints.unreleased_claims;
        if claims.len() >= UNRELEASED_CLAIMS_MAX && !claims.contains_key(&key) {
            return self.log_warning(format!(
                "job {}: its claim is kept until this virtual machine ends, because {UNRELEASED_CLAIMS_MAX} claims, the \
                 limit, wait for the end of their jobs",
                key.job
            ));
        }
        let claim = claims.entry(key).or_insert(UnreleasedClaim {
            members: BTreeSet::new(),
            is_in_inventory: false,
        });
        claim.members.extend(members);
        claim.is_in_inventory = false;
        if !std::mem::replace(is_check_pending, true) {
            self.check_unreleased_claims();
        }
    }

    /// The job of this claim runs again, and its end will release the claim.
    pub(super) fn keep_claim(&mut self, key: ClaimKey) {
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.unreleased_claims.claims.remove(&key);
        }
    }

    /// Requests an inventory to find out which jobs with unreleased claims have ended.
    pub(crate) fn check_unreleased_claims(&mut self) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let unreleased_claims = &mut job_checkpoints.unreleased_claims;
        if unreleased_claims.claims.is_empty() {
            unreleased_claims.is_check_pending = false;
            return;
        }
        let claims = unreleased_claims.claims.values_mut();
        claims.for_each(|claim| claim.is_in_inventory = true);
        self.request_inventory(InventoryPurpose::ReleaseClaims);
    }

    /// Handles an inventory of all hosts: releases the claims of the jobs that have ended. `tasks`
    /// is `None` if a host was lost before it answered.
    pub(super) fn release_ended_jobs(&mut self, tasks: Option<&[TaskInfo]>) {
        let tasks = tasks.filter(|_| self.lost_tasks_wait().is_none());
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let mut released_keys = Vec::new();
        if let Some(tasks) = tasks {
            let JobCheckpoints {
                unreleased_claims,
                jobs,
                ..
            } = job_checkpoints;
            unreleased_claims.claims.retain(|key, claim| {
                // A job without tasks may be about to be restarted.
                let entry = jobs.get(&key.job);
                let is_active = entry.is_some_and(|entry| entry.activity != JobActivity::Idle);
                let has_ended = claim.is_in_inventory
                    && !is_active
                    && job_members(key.job, &mut claim.members, tasks).is_empty();
                if has_ended {
                    released_keys.push(*key);
                }
                !has_ended
            });
        }
        let has_claims = !job_checkpoints.unreleased_claims.claims.is_empty();
        job_checkpoints.unreleased_claims.is_check_pending = has_claims;
        if has_claims {
            self.set_timer(CLAIM_CHECK_INTERVAL, Timer::ClaimCheckDue);
        }
        let outputs = released_keys
            .into_iter()
            .map(|key| Output::ReleaseJob { key });
        self.outputs.extend(outputs);
    }
}
