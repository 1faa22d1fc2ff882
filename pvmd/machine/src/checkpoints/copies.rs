//! Copies of sets on other hosts, so that the master's host and its disk may be lost as well: a new virtual machine that is
//! founded on a host with a copy finds it in the store there.
//!
//! A set is copied when it is complete, behind the checkpoint, one at a time; of each job the newest. A host that does not take it,
//! because its owner is there or its store has no room, is passed over where any may do. The copy before goes when the next one is
//! there. Each host keeps what it has got under its own key, and asks nobody for it.

use crate::asks::Asker;
use crate::{Machine, Output, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::{HostMsg, Question};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Copies of one set at most, and names of hosts for them.
pub const COPIES_MAX: usize = 16;

/// How long the other host may take to say why it does not take a copy any more, when its end of the way is gone.
const SAYS_WHY_WITHIN: Micros = Micros::from_secs(5);
/// Why a host has no copy that is no more.
const LOST: &str = "it was lost";

/// Where sets are copied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copies {
    /// To so many hosts, whichever take them.
    Number(usize),
    /// To these hosts.
    Hosts(Vec<String>),
}

impl Default for Copies {
    fn default() -> Copies {
        Copies::Number(0)
    }
}

/// A set that is being copied.
#[derive(Debug)]
struct UnderWay {
    job: Tid,
    set: String,
    /// Copies that there are to be.
    wanted: usize,
    /// Hosts that have not been asked.
    left: VecDeque<HostId>,
    /// To whom it goes now.
    to: Option<(HostId, MigrationId)>,
    /// Why not all of it left, if that is so.
    unsent: Option<String>,
    made: Vec<HostId>,
    /// Who did not take it, and why.
    whys: Vec<String>,
}

/// The master's part.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// Jobs the newest sets of which are to be copied.
    queue: VecDeque<Tid>,
    now: Option<UnderWay>,
}

/// What a job has of copies.
#[derive(Debug, Default)]
pub(super) struct Copied {
    /// The set that is to be copied when it is its turn.
    next: Option<String>,
    /// Where copies are, and of which set.
    there: BTreeMap<HostId, String>,
    /// The set of which there are fewer than are wanted.
    lacks: Option<String>,
}

impl Copied {
    /// Hosts that have a copy of this set.
    fn of(&self, set: &str) -> impl Iterator<Item = HostId> {
        self.there
            .iter()
            .filter(move |(_, there)| *there == set)
            .map(|(host, _)| *host)
    }
}

impl Machine {
    /// A set of a job is complete: it is copied when it is its turn.
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
        // Each job is in it once, so it is no longer than there are jobs.
        if !keeping.copying.queue.contains(&job) {
            keeping.copying.queue.push_back(job);
        }
        self.copy_next();
    }

    /// Begins with the set whose turn it is, unless one is under way.
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

    /// Hosts that may take a copy, in the order in which they are asked; how many are wanted; and who is not there.
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
                // Who has one already is asked first, then one after the other, each job beginning with another one.
                let has = |host: &HostId| {
                    let entry = self
                        .master
                        .as_ref()
                        .and_then(|master| master.keeping.jobs.get(&job));
                    entry.is_some_and(|entry| entry.copied.there.contains_key(host))
                };
                let mut places: Vec<HostId> = others.clone();
                if !places.is_empty() {
                    places.rotate_left(job.local() as usize % others.len());
                }
                places.sort_by_key(|host| !has(host));
                (places.into(), *number, Vec::new())
            }
        }
    }

    /// Asks the next host, or tells what has become of it.
    fn copy_step(&mut self) {
        if self.stop.is_some() {
            // All leave.
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
                Question::KeepCopy { migration, set },
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

    /// All hosts that were to have a copy have it, or will not.
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
            // Copies of the set before are not needed any more.
            self.drop_copies(job, |there| *there != set);
        } else if let Some(entry) = self
            .keeping()
            .and_then(|keeping| keeping.jobs.get_mut(&job))
        {
            entry.copied.lacks = Some(set.clone());
        }
        if wanted == 0 {
            // Nobody wants them any more.
            return;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        self.record(EventKind::SetCopied {
            set,
            job,
            hosts: made,
            missing,
            why: whys.join("; "),
        });
    }

    /// The attempt that is under way by this number.
    fn copy_under_way(&mut self, migration: MigrationId) -> Option<&mut UnderWay> {
        let now = self.keeping()?.copying.now.as_mut()?;
        now.to.is_some_and(|(_, id)| id == migration).then_some(now)
    }

    /// The host would take a copy, or says why it does not.
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

    /// A host says what has become of its copy.
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
            // It was given up just before, and nobody would remove it later.
            self.tell_host(host, HostMsg::DropCopies { sets: vec![set] });
        }
    }

    /// True for a copy that this host sends.
    pub(crate) fn is_copy(&self, migration: MigrationId) -> bool {
        let now = self
            .master
            .as_ref()
            .and_then(|master| master.keeping.copying.now.as_ref());
        now.and_then(|now| now.to)
            .is_some_and(|(_, id)| id == migration)
    }

    /// A copy has left, or could not. What counts is what the other host says, which knows why it took no more of it; if it says
    /// nothing this does.
    pub(crate) fn copy_sent(&mut self, migration: MigrationId, result: Result<(), String>) {
        if let (Err(why), Some(now)) = (result, self.copy_under_way(migration)) {
            now.unsent = Some(why);
            self.timer(SAYS_WHY_WITHIN, Timer::CopyUnsent(migration));
        }
    }

    /// The other host has said nothing of a copy that could not leave.
    pub(crate) fn copy_unsent(&mut self, migration: MigrationId) {
        if let Some(why) = self
            .copy_under_way(migration)
            .and_then(|now| now.unsent.take())
        {
            self.copy_ended(migration, Err(why));
        }
    }

    /// A copy is in the store of another host, or is not.
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
                Some(Some(before)) if before != set => {
                    self.tell_host(host, HostMsg::DropCopies { sets: vec![before] })
                }
                Some(_) => {}
                // The job is over, and nobody would remove it later.
                None => self.tell_host(host, HostMsg::DropCopies { sets: vec![set] }),
            }
        }
        self.copy_step();
    }

    /// Master: a host is lost, and with it what it had.
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

    /// Master: hosts have joined, which may take the copies that are missing.
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

    /// Master: these sets are no more, nor are copies of them wanted. Those of jobs that were forgotten nobody knows: all hosts are told.
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
                    sets: sets.to_vec(),
                },
            );
        }
    }

    /// Master: a job has ended for good. Its set stays for a while, without copies.
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

    /// Gives up the set that is being copied, if it is this one.
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

    /// Has hosts remove copies of a job's sets.
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
            self.tell_host(host, HostMsg::DropCopies { sets: vec![set] });
        }
    }

    /// Names of the hosts that have a copy of a set.
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

    // ---- the end of a host that keeps a copy

    /// The master asks whether this host keeps a copy. Its owner's disk is left alone while he is there.
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
        // The master copies one at a time: it has given that one up.
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

    /// True for the copy that comes to this host.
    pub(crate) fn is_coming_copy(&self, migration: MigrationId) -> bool {
        self.coming_copy
            .as_ref()
            .is_some_and(|(coming, _)| *coming == migration)
    }

    /// The copy is in the store here, or is not.
    pub(crate) fn copy_received(&mut self, migration: MigrationId, result: Result<(), String>) {
        let Some((_, set)) = self.coming_copy.take_if(|(coming, _)| *coming == migration) else {
            return;
        };
        self.out.push_back(Output::DropImages { migration });
        self.tell_host(
            HostId::MASTER,
            HostMsg::CopyKept {
                migration,
                set,
                result,
            },
        );
    }

    /// The owner has come: what is on its way to his disk does not get there.
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
            HostMsg::CopyKept {
                migration,
                set,
                result: Err(why.to_string()),
            },
        );
    }
}
