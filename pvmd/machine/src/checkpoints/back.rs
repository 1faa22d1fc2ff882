//! Ends the tasks of jobs: of jobs that roll back to their newest checkpoint because they have lost
//! a host, and of jobs that must end with their checkpoint.

use super::fallen::Fallen;
use super::{Doing, FENCE_TIME, GONE_LOOKS_MAX, GONE_PAUSE, Job, RESTART_PAUSE, SIGKILL, members};
use crate::Machine;
use crate::asks::Asker;
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::event::EventKind;
use sempa_proto::host::HostRequest;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Master: handles the loss of a host. Jobs with a schedule that had tasks there roll back.
    pub(crate) fn jobs_lost_host(&mut self, host: HostId) {
        self.copies_lost(host);
        let why = format!("{} was lost", self.name_of(host));
        self.jobs_lost(host, Some(host), &why, |_| {
            CheckpointFailure::HostLost(host)
        });
    }

    /// Master: handles the exit of a host's tasker, with which its tasks have died. The jobs roll
    /// back as if the host were lost, but the host remains.
    pub(crate) fn jobs_lost_tasker(&mut self, host: HostId) {
        let why = format!("the tasker of {} has ended", self.name_of(host));
        let failure = |job| CheckpointFailure::Task {
            tid: job,
            step: Step::Dump,
            why: Failure::Engine(why.clone()),
        };
        self.jobs_lost(host, None, &why, failure);
    }

    /// Master: hosts have joined, so jobs that could not be restarted are tried again.
    pub(crate) fn jobs_got_hosts(&mut self) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let mut stuck = Vec::new();
        for (tid, job) in keeping.jobs.iter_mut().filter(|(_, job)| job.is_stuck()) {
            // If the first attempt comes too early, the next one follows at the short interval.
            job.tries = 1;
            stuck.push(*tid);
        }
        stuck
            .into_iter()
            .for_each(|job| self.schedule(job, RESTART_PAUSE));
        self.copies_got_hosts();
    }

    pub(super) fn name_of(&self, host: HostId) -> String {
        self.table
            .get(host)
            .map_or_else(|| host.to_string(), |entry| entry.name.clone())
    }

    /// Rolls back the jobs that had tasks on this host, where all tasks are dead. `lost` is set if
    /// the host itself is lost.
    fn jobs_lost(
        &mut self,
        host: HostId,
        lost: Option<HostId>,
        why: &str,
        failure: impl Fn(Tid) -> CheckpointFailure,
    ) {
        if self.stop.is_some() {
            return;
        }
        let Some(master) = &self.master else { return };
        let (keeping, coordinator) = (&master.keeping, &master.directing.coordinator);
        let had_task =
            |tid: &Tid| self.location(*tid) == Some(host) || coordinator.has_memory_on(*tid, host);
        let had = |job: &Job| {
            job.members.difference(&job.ended).any(had_task)
                || job.fallen.any_with(self.now, self.config.lease, host)
        };
        // A job that is being restarted learns of the loss from the restart protocol.
        let may = |job: &Job| {
            matches!(
                job.doing,
                Doing::Nothing | Doing::Counting | Doing::Cutting(_)
            )
        };
        let concerned = keeping
            .jobs
            .iter()
            .filter(|(_, job)| job.pace.is_some() && job.newest.is_some() && may(job) && had(job));
        let concerned: Vec<(Tid, BTreeSet<Tid>)> = concerned
            .map(|(tid, job)| (*tid, job.members.clone()))
            .collect();
        let not_before = self.now + FENCE_TIME;
        for (job, members) in concerned {
            let why = why.to_string();
            let (mut waiters, mut was_wanted) = (Vec::new(), false);
            if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
                was_wanted = entry.is_wanted();
                entry.doing = Doing::Ending {
                    lost,
                    not_before,
                    why: why.clone(),
                    looks: 0,
                };
                entry.fallen = Fallen::default();
                (waiters, entry.tries, entry.ends, entry.parks) =
                    (std::mem::take(&mut entry.waiters), 0, false, false);
            }
            if was_wanted {
                self.record(EventKind::CheckpointFailed { job, why });
            }
            for (tid, id) in waiters {
                self.reply(tid, id, Reply::Checkpointed(Err(failure(job))));
            }
            for tid in members {
                if self.location(tid).is_some_and(|at| at != host) {
                    self.kill(tid);
                }
            }
            self.schedule(job, GONE_PAUSE);
        }
    }

    /// Handles an inventory of a job whose tasks must end.
    pub(super) fn look_whether_gone(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let left: Vec<Tid> = members(job, &mut entry.members, tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let (Doing::Ending { looks, .. } | Doing::Leaving { looks, .. }) = &mut entry.doing else {
            return;
        };
        *looks += 1;
        let gives_up = *looks >= GONE_LOOKS_MAX;
        match &entry.doing {
            Doing::Leaving { report, .. } if left.is_empty() || gives_up => {
                let (report, waiters) = (report.clone(), std::mem::take(&mut entry.waiters));
                self.forget_job(job);
                for (tid, id) in waiters {
                    self.reply(tid, id, Reply::Checkpointed(Ok(report.clone())));
                }
                return;
            }
            Doing::Ending {
                lost,
                not_before,
                why,
                ..
            } if left.is_empty() || gives_up => {
                let (lost, not_before, why) = (*lost, *not_before, why.clone());
                return self.go_back(job, lost, not_before, why, left.len());
            }
            _ => {}
        }
        for tid in left {
            // Includes tasks that the job has spawned since the last inventory.
            self.kill(tid);
        }
        self.schedule(job, GONE_PAUSE);
    }

    pub(super) fn kill(&mut self, tid: Tid) {
        self.ask_about(
            tid,
            HostRequest::Signal {
                tid,
                signal: SIGKILL,
            },
            Asker::Nobody,
        );
    }

    /// Restarts a job when no earlier copy of it can run any more. `left` of its tasks have not
    /// ended.
    fn go_back(
        &mut self,
        job: Tid,
        lost: Option<HostId>,
        not_before: Micros,
        why: String,
        left: usize,
    ) {
        let newest = self
            .keeping()
            .and_then(|k| k.jobs.get(&job)?.newest.clone());
        let Some(set) = newest else {
            return self.forget_job(job);
        };
        if left > 0 {
            let cause = format!("{why}, and {left} of its tasks do not end");
            self.record(EventKind::RestartFailed {
                checkpoint: set,
                cause,
                why: "it would run twice".into(),
            });
            return self.forget_job(job);
        }
        // A lost host stays in the table for a moment. A deleted host ends its tasks after it was
        // removed from the table.
        let there =
            lost.is_some_and(|lost| self.table.get(lost).is_some() || self.is_leaving(lost));
        if there || self.now < not_before {
            return self.schedule(job, GONE_PAUSE);
        }
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.doing = Doing::Restarting;
        }
        self.restart_set(set, Some(job), Vec::new(), None, why);
    }
}
