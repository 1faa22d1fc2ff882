//! Detects jobs that have ended. Their checkpoints are probably not needed any more, so the store
//! may remove them.
//!
//! A job has ended if it has no task left, and its first task has succeeded or was told to end. A
//! job that crashed, or that was ended by the owner of a host, with its host or with the virtual
//! machine, may still be restarted.

use super::{Doing, Job, Keeping, Purpose, members};
use crate::{Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid};

/// Signals by which tasks are told to end: SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM.
pub(super) const ENDING: [i32; 5] = [1, 2, 3, 9, SIGTERM];
const SIGTERM: i32 = 15;

/// How the first task of a job has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct End {
    /// The last of [`ENDING`] that another task or a user sent to it.
    told: Option<i32>,
    /// An owner has evicted it.
    turned_out: bool,
    /// Wait status; `None` if it ended with its host.
    status: Option<i32>,
}

impl End {
    /// True if the end was intended: the task succeeded, or it was told to end.
    fn is_good(self) -> bool {
        let killed = |status: i32| {
            self.told
                .is_some_and(|told| status & 0x7f == 0 || status & 0x7f == told)
        };
        !self.turned_out
            && self
                .status
                .is_some_and(|status| status == 0 || killed(status))
    }
}

impl Job {
    /// True if all its known tasks have ended.
    pub(super) fn is_quiet(&self) -> bool {
        !self.members.is_empty() && self.ended.len() == self.members.len()
    }
}

impl Keeping {
    /// Updates the jobs after an event of this host. `by_itself` is false if tasks end because a
    /// host or the virtual machine ends.
    pub(crate) fn happened(
        &mut self,
        now: Micros,
        host: HostId,
        kind: &EventKind,
        by_itself: bool,
    ) {
        match kind {
            EventKind::TaskStarted { tid, parent, .. } => {
                for job in self
                    .jobs
                    .values_mut()
                    .filter(|job| job.members.contains(parent))
                {
                    job.members.insert(*tid);
                    job.ended.remove(tid);
                }
            }
            EventKind::TaskEnded { tid, status, .. } => {
                if by_itself {
                    self.recent.ended(now, *tid);
                }
                for (job, entry) in self
                    .jobs
                    .iter_mut()
                    .filter(|(_, entry)| entry.members.contains(tid))
                {
                    entry.ended.insert(*tid);
                    if by_itself {
                        entry.fallen.happened(now, host, kind);
                    }
                    if job == tid {
                        entry.end.status = by_itself.then_some(*status);
                    }
                    if entry.is_quiet() && entry.doing == Doing::Nothing {
                        self.quiet.push(*job);
                    }
                }
            }
            EventKind::MigrationFailed { tid, .. } => {
                for entry in self
                    .jobs
                    .values_mut()
                    .filter(|entry| entry.members.contains(tid))
                {
                    entry.fallen.happened(now, host, kind);
                }
            }
            EventKind::GuestsEnded { guests, .. } => {
                for guest in guests {
                    self.told(*guest);
                    self.jobs
                        .entry(*guest)
                        .and_modify(|entry| entry.end.turned_out = true);
                }
            }
            _ => {}
        }
    }

    /// Notes that a task was told to end.
    fn told(&mut self, tid: Tid) {
        for entry in self
            .jobs
            .values_mut()
            .filter(|entry| entry.members.contains(&tid))
        {
            entry.fallen.told(tid);
        }
    }

    /// Notes that all tasks but these were told to end.
    pub(crate) fn reset(&mut self, spare: &[Tid]) {
        for (job, entry) in &mut self.jobs {
            let all = entry.members.iter().filter(|tid| !spare.contains(tid));
            all.for_each(|tid| entry.fallen.told(*tid));
            if !spare.contains(job) {
                entry.end.told = Some(SIGTERM);
            }
        }
    }
}

impl Machine {
    /// Notes a signal to a task. If the signal ends the task, that end is intended.
    pub(crate) fn told_to_end(&mut self, tid: Tid, signal: i32) {
        if !ENDING.contains(&signal) {
            return;
        }
        match &mut self.master {
            Some(master) => {
                master.keeping.told(tid);
                master
                    .keeping
                    .jobs
                    .entry(tid)
                    .and_modify(|entry| entry.end.told = Some(signal));
            }
            None => self.tell_host(HostId::MASTER, HostMsg::EndSignalSent { tid, signal }),
        }
    }

    /// Takes an inventory for each job that may have ended. True if there were any.
    pub(super) fn look_at_quiet(&mut self) -> bool {
        let quiet = self
            .keeping()
            .map(|keeping| std::mem::take(&mut keeping.quiet))
            .unwrap_or_default();
        let counted = !quiet.is_empty();
        for job in quiet {
            self.count(Purpose::Over(job));
        }
        counted
    }

    /// Handles the inventory of a job that may have ended.
    pub(super) fn look_whether_over(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        if entry.doing == Doing::Nothing && members(job, &mut entry.members, tasks).is_empty() {
            self.job_over(job);
        }
    }

    /// Handles a job without tasks: unless it ended by a failure, its checkpoints may be removed.
    pub(super) fn job_over(&mut self, job: Tid) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Some(entry) = keeping.jobs.get(&job) else {
            return;
        };
        let sets: Vec<String> = [&entry.newest, &entry.origin]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        if entry.end.is_good() && !sets.is_empty() {
            let keep = keeping
                .needed()
                .into_iter()
                .filter(|set| !sets.contains(set))
                .collect();
            self.out.push_back(Output::MarkSets {
                sets,
                ended: true,
                keep,
            });
            self.copies_over(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An end is intended if the task succeeded or ended as it was told to. A failure, a crash, an
    /// eviction or the loss of its host is not.
    #[test]
    fn end_is_intended_after_success_or_request() {
        let exit = |code: i32| Some(code << 8);
        let end = |told, status| End {
            told,
            turned_out: false,
            status,
        };
        assert!(end(None, exit(0)).is_good());
        assert!(!end(None, exit(1)).is_good(), "it failed");
        assert!(!end(None, Some(9)).is_good(), "nobody here has killed it");
        assert!(!end(None, None).is_good(), "it ended with its host");
        assert!(end(Some(15), Some(15)).is_good() && end(Some(9), Some(9)).is_good());
        assert!(end(Some(15), exit(1)).is_good(), "it tidied up");
        assert!(!end(Some(15), Some(11)).is_good(), "it crashed");
        assert!(
            !End {
                turned_out: true,
                ..end(None, exit(0))
            }
            .is_good()
        );
    }
}
