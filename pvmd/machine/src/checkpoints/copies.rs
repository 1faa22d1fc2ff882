//! Copies of checkpoints on other hosts, for the case that the master's host and its disk are lost:
//! a new virtual machine that is created on a host with a copy finds the checkpoint in the store
//! there.
//!
//! - Of each job the newest checkpoint is copied, after it is complete. Copies are made one at a
//!   time.
//! - A host refuses a copy while its owner is present, or if its store has no room. If any host may
//!   store the copy, the next one is tried.
//! - The previous copy is removed when the next one exists.
//! - Each host seals its copies with its own key. No host needs the key of another.

use crate::asks::Asker;
use crate::{Machine, Output, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::{HostMsg, HostRequest};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Largest number of copies of one checkpoint, and of host names for them.
pub const COPIES_MAX: usize = 16;

/// Time for the receiver to report why it has stopped receiving a copy, after the transfer has
/// broken.
const SAYS_WHY_WITHIN: Micros = Micros::from_secs(5);
/// Reason for a copy that is missing because its host is gone.
const LOST: &str = "it was lost";

/// Hosts to which checkpoints are copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copies {
    /// This number of hosts, chosen by the master.
    Number(usize),
    Hosts(Vec<String>),
}

impl Default for Copies {
    fn default() -> Copies {
        Copies::Number(0)
    }
}

/// A checkpoint that is being copied.
#[derive(Debug)]
struct UnderWay {
    job: Tid,
    set: String,
    /// Number of copies that must exist.
    wanted: usize,
    /// Hosts that have not been asked.
    left: VecDeque<HostId>,
    /// Receiver of the current transfer, with the id of the transfer.
    to: Option<(HostId, MigrationId)>,
    /// Reason why the transfer broke, if it did.
    unsent: Option<String>,
    made: Vec<HostId>,
    /// Hosts that have no copy, with the reasons.
    whys: Vec<String>,
}

/// The master's queue of copies.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// Jobs whose newest checkpoints must be copied.
    queue: VecDeque<Tid>,
    now: Option<UnderWay>,
}

/// Copies of a job's checkpoints.
#[derive(Debug, Default)]
pub(super) struct Copied {
    /// The checkpoint to copy next.
    next: Option<String>,
    /// Hosts with copies, and the checkpoint that each one has.
    there: BTreeMap<HostId, String>,
    /// The checkpoint that has fewer copies than required.
    lacks: Option<String>,
}

impl Copied {
    /// Returns the hosts that have a copy of this checkpoint.
    fn of(&self, set: &str) -> impl Iterator<Item = HostId> {
        self.there
            .iter()
            .filter(move |(_, there)| *there == set)
            .map(|(host, _)| *host)
    }
}

impl Machine {
    /// Queues a complete checkpoint of a job for copying.
    pub(super) fn copy_wanted(&mut self, job: Tid, set: &str) {
        if self.config.copies == Copies::default() || self.stop.is_some() {
            return;
        }
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Some(entry) = keeping.jobs.get_mut(&job) else {
            return;
        };
        (entry.copied.next, entry.copied.lacks) = (Some(set.to_string()), None);
        // Each job is queued at most once, which bounds the queue by the number of jobs.
        if !keeping.copying.queue.contains(&job) {
            keeping.copying.queue.push_back(job);
        }
        self.copy_next();
    }

    /// Starts the next copy in the queue, unless one is in progress.
    fn copy_next(&mut self) {
        loop {
            let Some(keeping) = self
                .keeping()
                .filter(|keeping| keeping.copying.now.is_none())
            else {
                return;
            };
            let Some(job) = keeping.copying.queue.pop_front() else {
                return;
            };
            let Some(set) = keeping
                .jobs
                .get_mut(&job)
                .and_then(|entry| entry.copied.next.take())
            else {
                continue;
            };
            let (mut left, wanted, whys) = self.copy_places(job);
            let Some(keeping) = self.keeping() else {
                return;
            };
            let entry = keeping.jobs.get(&job);
            let made: Vec<HostId> = entry
                .into_iter()
                .flat_map(|entry| entry.copied.of(&set))
                .collect();
            left.retain(|host| !made.contains(host));
            keeping.copying.now = Some(UnderWay {
                job,
                set,
                wanted,
                left,
                to: None,
                unsent: None,
                made,
                whys,
            });
            return self.copy_step();
        }
    }

    /// Returns the hosts that may store a copy, in the order in which they are asked; the number of
    /// copies required; and the reasons for hosts that are not available.
    fn copy_places(&self, job: Tid) -> (VecDeque<HostId>, usize, Vec<String>) {
        let me = self.config.host;
        let others: Vec<HostId> = self.other_hosts();
        match &self.config.copies {
            Copies::Hosts(names) => {
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
            Copies::Number(number) => {
                // Hosts that already have a copy of the job come first. The others follow in an
                // order that differs between jobs.
                let has = |host: &HostId| {
                    let entry = self
                        .master
                        .as_ref()
                        .and_then(|master| master.keeping.jobs.get(&job));
                    entry.is_some_and(|entry| entry.copied.there.contains_key(host))
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

    /// Asks the next host, or finishes the copies of this checkpoint.
    fn copy_step(&mut self) {
        if self.stop.is_some() {
            // The virtual machine ends.
            return;
        }
        let next = self.master.as_deref_mut().and_then(|master| {
            let now = master
                .keeping
                .copying
                .now
                .as_mut()
                .filter(|now| now.to.is_none() && now.wanted > now.made.len())?;
            let host = now.left.pop_front()?;
            let migration = master.directing.coordinator.next_id();
            now.to = Some((host, migration));
            Some((host, migration, now.set.clone()))
        });
        if let Some((host, migration, set)) = next {
            return self.ask(
                host,
                HostRequest::StoreCopy {
                    migration,
                    checkpoint: set,
                },
                Asker::Copy { migration },
            );
        }
        if let Some(done) = self
            .keeping()
            .and_then(|keeping| keeping.copying.now.take_if(|now| now.to.is_none()))
        {
            self.copying_over(done);
        }
        self.copy_next();
    }

    /// Finishes a checkpoint that has all copies, or for which no host is left.
    fn copying_over(&mut self, done: UnderWay) {
        let UnderWay {
            job,
            set,
            wanted,
            made,
            whys,
            ..
        } = done;
        let missing = wanted.saturating_sub(made.len());
        if missing == 0 {
            // Copies of the previous checkpoint are not needed any more.
            self.drop_copies(job, |there| *there != set);
        } else if let Some(entry) = self
            .keeping()
            .and_then(|keeping| keeping.jobs.get_mut(&job))
        {
            entry.copied.lacks = Some(set.clone());
        }
        if wanted == 0 {
            // The copies were cancelled.
            return;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        self.record(EventKind::CheckpointCopied {
            checkpoint: set,
            job,
            hosts: made,
            missing,
            why: whys.join("; "),
        });
    }

    /// Returns the copy in progress, if its transfer has this id.
    fn copy_under_way(&mut self, migration: MigrationId) -> Option<&mut UnderWay> {
        let now = self.keeping()?.copying.now.as_mut()?;
        now.to.is_some_and(|(_, id)| id == migration).then_some(now)
    }

    /// Handles a host's reply whether it accepts a copy.
    pub(crate) fn copy_answered(&mut self, migration: MigrationId, answer: Option<Reply>) {
        let Some(now) = self.copy_under_way(migration) else {
            return;
        };
        let (Some((to, _)), set) = (now.to, now.set.clone()) else {
            return;
        };
        match answer {
            Some(Reply::Done) => self.out.push_back(Output::SendCopy { migration, set, to }),
            Some(Reply::Failed { reason, .. }) => self.copy_ended(migration, Err(reason)),
            _ => self.copy_ended(migration, Err(LOST.into())),
        }
    }

    /// Handles a host's report that it has stored a copy, or why it has not.
    pub(crate) fn copy_kept(
        &mut self,
        host: HostId,
        migration: MigrationId,
        set: String,
        result: Result<(), String>,
    ) {
        if self
            .copy_under_way(migration)
            .is_some_and(|now| now.to == Some((host, migration)))
        {
            return self.copy_ended(migration, result);
        }
        let jobs = self
            .keeping()
            .into_iter()
            .flat_map(|keeping| keeping.jobs.values());
        let is_known = jobs
            .map(|entry| &entry.copied.there)
            .any(|there| there.get(&host) == Some(&set));
        if result.is_ok() && !is_known {
            // The copy was cancelled just before, and would never be removed later.
            self.tell_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![set],
                },
            );
        }
    }

    /// True for the copy that this host is sending.
    pub(crate) fn is_copy(&self, migration: MigrationId) -> bool {
        let now = self
            .master
            .as_ref()
            .and_then(|master| master.keeping.copying.now.as_ref());
        now.and_then(|now| now.to)
            .is_some_and(|(_, id)| id == migration)
    }

    /// Handles the end of sending a copy. The receiver's report takes precedence, because the
    /// receiver knows why it stopped. Without a report, this result counts.
    pub(crate) fn copy_sent(&mut self, migration: MigrationId, result: Result<(), String>) {
        if let (Err(why), Some(now)) = (result, self.copy_under_way(migration)) {
            now.unsent = Some(why);
            self.timer(SAYS_WHY_WITHIN, Timer::CopyUnsent(migration));
        }
    }

    /// Fails a copy whose transfer broke and whose receiver has reported nothing.
    pub(crate) fn copy_unsent(&mut self, migration: MigrationId) {
        if let Some(why) = self
            .copy_under_way(migration)
            .and_then(|now| now.unsent.take())
        {
            self.copy_ended(migration, Err(why));
        }
    }

    /// Ends the transfer of a copy, successfully or not.
    fn copy_ended(&mut self, migration: MigrationId, result: Result<(), String>) {
        let Some(now) = self.copy_under_way(migration) else {
            return;
        };
        let Some((host, _)) = now.to.take() else {
            return;
        };
        now.unsent = None;
        let (job, set, good) = (now.job, now.set.clone(), result.is_ok());
        if good {
            now.made.push(host);
        }
        self.out.push_back(Output::DropImages { migration });
        let name = self.name_of(host);
        if let (Err(why), Some(now)) = (
            result,
            self.keeping()
                .and_then(|keeping| keeping.copying.now.as_mut()),
        ) {
            now.whys.push(format!("{name}: {why}"));
        }
        if good {
            let entry = self
                .keeping()
                .and_then(|keeping| keeping.jobs.get_mut(&job));
            match entry.map(|entry| entry.copied.there.insert(host, set.clone())) {
                Some(Some(before)) if before != set => self.tell_host(
                    host,
                    HostMsg::DropCopies {
                        checkpoints: vec![before],
                    },
                ),
                Some(_) => {}
                // The job has ended, and the copy would never be removed later.
                None => self.tell_host(
                    host,
                    HostMsg::DropCopies {
                        checkpoints: vec![set],
                    },
                ),
            }
        }
        self.copy_step();
    }

    /// Master: forgets the copies on a lost host, and makes new ones.
    pub(crate) fn copies_lost(&mut self, host: HostId) {
        let mut lacking = Vec::new();
        for (job, entry) in self
            .keeping()
            .into_iter()
            .flat_map(|keeping| &mut keeping.jobs)
        {
            let lost = entry
                .copied
                .there
                .remove(&host)
                .filter(|set| entry.newest.as_ref() == Some(set));
            lacking.extend(lost.map(|set| (*job, set)));
        }
        let to = self
            .keeping()
            .and_then(|keeping| keeping.copying.now.as_ref()?.to);
        if let Some((_, migration)) = to.filter(|(to, _)| *to == host) {
            self.copy_ended(migration, Err(LOST.into()));
        }
        if self.stop.is_none() {
            lacking
                .into_iter()
                .for_each(|(job, set)| self.copy_wanted(job, &set));
        }
    }

    /// Master: hosts have joined, so missing copies are made.
    pub(crate) fn copies_got_hosts(&mut self) {
        let jobs = self
            .keeping()
            .into_iter()
            .flat_map(|keeping| &mut keeping.jobs);
        let lacking: Vec<(Tid, String)> = jobs
            .filter_map(|(job, entry)| Some((*job, entry.copied.lacks.take()?)))
            .collect();
        lacking
            .into_iter()
            .for_each(|(job, set)| self.copy_wanted(job, &set));
    }

    /// Master: removes the copies of checkpoints that were removed. Copies of forgotten jobs are
    /// unknown, so all hosts are notified.
    pub(super) fn copies_unwanted(&mut self, sets: &[String]) {
        if self.config.copies == Copies::default() || sets.is_empty() {
            return;
        }
        for entry in self
            .keeping()
            .into_iter()
            .flat_map(|keeping| keeping.jobs.values_mut())
        {
            let Copied { next, there, lacks } = &mut entry.copied;
            [next, lacks]
                .into_iter()
                .for_each(|set| drop(set.take_if(|set| sets.contains(set))));
            there.retain(|_, set| !sets.contains(set));
        }
        self.stop_copying(|now| sets.contains(&now.set));
        for host in self.other_hosts() {
            self.tell_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: sets.to_vec(),
                },
            );
        }
    }

    /// Master: removes the copies of a job that has ended. Its checkpoint stays in the store for a
    /// while.
    pub(super) fn copies_over(&mut self, job: Tid) {
        if let Some(entry) = self
            .keeping()
            .and_then(|keeping| keeping.jobs.get_mut(&job))
        {
            entry.copied.next = None;
        }
        self.drop_copies(job, |_| true);
        self.stop_copying(|now| now.job == job);
    }

    /// Cancels the copy in progress if it matches.
    fn stop_copying(&mut self, which: impl FnOnce(&UnderWay) -> bool) {
        let now = self
            .keeping()
            .and_then(|keeping| keeping.copying.now.as_mut());
        let Some(now) = now.filter(|now| which(now)) else {
            return;
        };
        now.wanted = 0;
        if let Some((_, migration)) = now.to {
            self.copy_ended(migration, Err("nobody wants it any more".into()));
        }
    }

    /// Removes those copies of a job's checkpoints that match.
    fn drop_copies(&mut self, job: Tid, which: impl Fn(&String) -> bool) {
        let Some(entry) = self
            .keeping()
            .and_then(|keeping| keeping.jobs.get_mut(&job))
        else {
            return;
        };
        let there = std::mem::take(&mut entry.copied.there);
        let (gone, there): (BTreeMap<_, _>, _) = there.into_iter().partition(|(_, set)| which(set));
        entry.copied.there = there;
        entry.copied.lacks.take_if(|set| which(set));
        for (host, set) in gone {
            self.tell_host(
                host,
                HostMsg::DropCopies {
                    checkpoints: vec![set],
                },
            );
        }
    }

    /// Returns the names of the hosts that have a copy of a checkpoint.
    pub(super) fn copies_of(&self, job: Tid, set: &str) -> Vec<String> {
        let entry = self
            .master
            .as_ref()
            .and_then(|master| master.keeping.jobs.get(&job));
        entry
            .into_iter()
            .flat_map(|entry| entry.copied.of(set))
            .map(|host| self.name_of(host))
            .collect()
    }

    // ---- Part of a host that stores copies

    /// Handles the master's request to store a copy. The disk is not used while its owner is
    /// present.
    pub(crate) fn copy_asked(
        &mut self,
        from: HostId,
        migration: MigrationId,
        set: String,
    ) -> Reply {
        let refused = match (from, self.hosting.is_stopped()) {
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
        match self.coming_copy.replace((migration, set.clone())) {
            Some((before, same)) if same == set => {
                self.out.push_back(Output::DropImages { migration: before })
            }
            Some((migration, set)) => self.out.push_back(Output::GiveUpCopy { migration, set }),
            None => {}
        }
        self.out.push_back(Output::ExpectCopy {
            migration,
            from,
            set,
        });
        Reply::Done
    }

    /// True for the copy that this host is receiving.
    pub(crate) fn is_coming_copy(&self, migration: MigrationId) -> bool {
        self.coming_copy
            .as_ref()
            .is_some_and(|(coming, _)| *coming == migration)
    }

    /// Handles the end of receiving a copy.
    pub(crate) fn copy_received(&mut self, migration: MigrationId, result: Result<(), String>) {
        let Some((_, set)) = self.coming_copy.take_if(|(coming, _)| *coming == migration) else {
            return;
        };
        self.out.push_back(Output::DropImages { migration });
        self.tell_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint: set,
                result,
            },
        );
    }

    /// Cancels the copy that is being received, because the owner of this host is present.
    pub(crate) fn copy_gives_way(&mut self, why: &str) {
        let Some((migration, set)) = self.coming_copy.take() else {
            return;
        };
        self.out.push_back(Output::GiveUpCopy {
            migration,
            set: set.clone(),
        });
        self.tell_host(
            HostId::MASTER,
            HostMsg::CopyStored {
                migration,
                checkpoint: set,
                result: Err(why.to_string()),
            },
        );
    }
}
