//! Jobs that have come to their end: nobody is likely to want their sets any more, and the store may remove them.
//!
//! That is so when nothing of a job is left and its first task has ended with success, or because somebody told it to. A job
//! that crashed, or that was ended by the owner of a host, with its host or with the virtual machine, may be started again.

use super::{Doing, Job, Keeping, Purpose, members};
use crate::{Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid};

/// Signals by which tasks are told to end: hang up, interrupt, quit, kill, terminate.
pub(super) const ENDING: [i32; 5] = [1, 2, 3, 9, SIGTERM];
/// Signal of a polite end.
const SIGTERM: i32 = 15;

/// How the first task of a job comes to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct End {
    /// The last signal of this kind that somebody sent it.
    told: Option<i32>,
    /// An owner did not want it on his host.
    turned_out: bool,
    /// Its wait status, if it did not end with its host.
    status: Option<i32>,
}

impl End {
    /// True if it ended as somebody wanted it.
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
    /// True if all that are known to belong to it have ended.
    pub(super) fn is_quiet(&self) -> bool {
        !self.members.is_empty() && self.ended.len() == self.members.len()
    }
}

impl Keeping {
    /// Something happened on this host that may concern a job; `by_itself` if not because a host leaves, or all of them.
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
            EventKind::MoveFailed { tid, .. } => {
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

    /// Somebody here has told a task to end.
    fn told(&mut self, tid: Tid) {
        for entry in self
            .jobs
            .values_mut()
            .filter(|entry| entry.members.contains(&tid))
        {
            entry.fallen.told(tid);
        }
    }

    /// Somebody has all tasks ended but these.
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
    /// Somebody sends a task a signal: if it ends of that, he does not want it any more.
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
            None => self.tell_host(HostId::MASTER, HostMsg::ToldToEnd { tid, signal }),
        }
    }

    /// Has it counted whether jobs are over that seem to be; true if there were any.
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

    /// All hosts have said what is left.
    pub(super) fn look_whether_over(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        if entry.doing == Doing::Nothing && members(job, &mut entry.members, tasks).is_empty() {
            self.job_over(job);
        }
    }

    /// Nothing is left of a job: unless something went wrong with it nobody will want its sets.
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

    #[test]
    fn only_who_ended_as_somebody_wanted_is_not_wanted_any_more() {
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
