//! Images of processes, and the checkpoint store of the simulation.

use super::{Happening, Proc, Seen, Sim};
use crate::{Event, Output};
use checkpoint_protocol::SnapshotId;
use sempa_proto::checkpoint::{
    CheckpointEntry, CheckpointMeta, RemovalRefusal, RemovalResults, RemovalSelection,
};
use sempa_proto::frame::from_bytes;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::Failure;
use sempa_proto::task::{Redirect, RestartInfo, ToDaemon};
use sempa_proto::tasker::{DumpReport, MemoryWrite};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// What a program whose name contains `keeper` saves when it exits and reads when it is started
/// again: received messages and counts of sent ones.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    seen: Vec<Seen>,
    said: BTreeMap<Tid, u32>,
}

/// A dumped process or a program's own state, and the record stored with it.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    proc: Option<Proc>,
    state: Option<State>,
    record: Option<SavedTask>,
}

/// Image directories, checkpoints, and processes that are built and do not run yet.
#[derive(Debug, Default)]
pub(in crate::tests) struct Sets {
    images: BTreeMap<(HostId, MigrationId), Part>,
    drafts: BTreeMap<SnapshotId, BTreeMap<Tid, Part>>,
    sets: BTreeMap<String, (CheckpointMeta, BTreeMap<Tid, Part>)>,
    open: BTreeMap<u64, String>,
    /// Checkpoints of jobs that have ended.
    ended: BTreeSet<String>,
    pub(super) built: BTreeMap<(HostId, MigrationId), Proc>,
    /// Saved states of programs, in files that all hosts share.
    files: BTreeMap<Tid, State>,
    /// Saved states from a checkpoint, before they get their file names.
    staged: BTreeMap<(HostId, MigrationId), (Tid, Option<State>)>,
    /// Target hosts do not report why a copy failed.
    pub(in crate::tests) silent: bool,
    /// Copies of checkpoints in the stores of other hosts.
    copies: BTreeSet<(HostId, String)>,
}

impl Sets {
    pub(super) fn drop_images(&mut self, on: HostId, migration: MigrationId) {
        self.images.remove(&(on, migration));
        self.staged.remove(&(on, migration));
    }

    /// Returns the numbers of drafts and of images that were not removed.
    pub(in crate::tests) fn left(&self) -> (usize, usize) {
        (self.drafts.len(), self.images.len() + self.staged.len())
    }

    /// Returns the number of images and unnamed state files on the matching hosts.
    pub(in crate::tests) fn left_on(&self, is_one: impl Fn(HostId) -> bool) -> usize {
        self.images
            .keys()
            .chain(self.staged.keys())
            .filter(|(on, _)| is_one(*on))
            .count()
    }

    /// Returns the number of complete checkpoints.
    pub(in crate::tests) fn count(&self) -> usize {
        self.sets.len()
    }

    /// Returns the name of the newest checkpoint.
    pub(in crate::tests) fn newest(&self) -> String {
        let number = |name: &&String| {
            name.rsplit('-')
                .next()
                .and_then(|number| number.parse::<SnapshotId>().ok())
        };
        self.sets
            .keys()
            .max_by_key(number)
            .expect("there is one")
            .clone()
    }

    /// Returns the checkpoints whose jobs have ended for good.
    pub(in crate::tests) fn ended(&self) -> Vec<String> {
        self.ended.iter().cloned().collect()
    }

    fn entries(&self) -> Vec<CheckpointEntry> {
        let entry = |(set, (meta, parts)): (&String, &(CheckpointMeta, BTreeMap<Tid, Part>))| {
            CheckpointEntry {
                name: set.clone(),
                job: meta.job,
                created: Micros(0),
                tasks: parts.len() as u32,
                bytes: 1,
                unusable_reason: None,
                job_ended_at: self.ended.contains(set).then_some(Micros(1)),
                copy_hosts: Vec::new(),
            }
        };
        self.sets.iter().map(entry).collect()
    }

    fn remove(
        &mut self,
        which: RemovalSelection,
        stay: &BTreeMap<String, RemovalRefusal>,
    ) -> RemovalResults {
        let names = match which {
            RemovalSelection::Checkpoints(names) => names,
            RemovalSelection::Job(job) => self
                .entries()
                .into_iter()
                .filter(|set| set.job == job)
                .map(|set| set.name)
                .collect(),
        };
        let mut one = |name: &String| match stay.get(name) {
            Some(why) => Err(why.clone()),
            None if self.open.values().any(|open| open == name) => Err(RemovalRefusal::InUse),
            None => self
                .sets
                .remove(name)
                .map(|_| 1)
                .ok_or(RemovalRefusal::Unknown),
        };
        names
            .into_iter()
            .map(|name| (name.clone(), one(&name)))
            .collect()
    }

    /// Returns the copies of checkpoints and their hosts.
    pub(in crate::tests) fn copies(&self) -> Vec<(HostId, String)> {
        self.copies.iter().cloned().collect()
    }

    /// Takes over the checkpoints of another virtual machine.
    pub(in crate::tests) fn take_sets(&mut self, from: Sets) {
        self.sets = from.sets;
    }

    /// Returns the highest task number of each host in all checkpoints.
    pub(in crate::tests) fn spared(&self) -> BTreeMap<HostId, u32> {
        let tids = self.sets.values().flat_map(|(_, parts)| parts.keys());
        let mut spared = BTreeMap::new();
        for tid in tids {
            let highest = spared.entry(tid.birth_host().expect("a task")).or_insert(0);
            *highest = tid.local_part().max(*highest);
        }
        spared
    }
}

impl Sim {
    pub(super) fn dump_image(&mut self, on: HostId, migration: MigrationId, tid: Tid) {
        if let Some(proc) = self
            .procs
            .iter()
            .find(|p| p.spawned == Some(tid) && p.host == on && !p.exited)
        {
            assert!(
                proc.conn.is_none() && proc.quiesced.is_some(),
                "only who has let go is dumped (seed {})",
                self.seed
            );
            let part = Part {
                proc: Some(Proc {
                    mail: Vec::new(),
                    ..proc.clone()
                }),
                ..Part::default()
            };
            self.sets.images.insert((on, migration), part);
        }
    }

    /// Builds a process from images. It stays stopped.
    pub(super) fn build(&mut self, on: HostId, migration: MigrationId, redirection: &MemoryWrite) {
        let part = self
            .sets
            .images
            .get(&(on, migration))
            .expect("images come before");
        let redirect: Redirect = from_bytes(&redirection.bytes[8..]).expect("it can be read");
        let mut proc = part.proc.clone().expect("a process");
        proc.quiesced = Some((redirect.migration, redirect.tokens));
        (proc.host, proc.stopped, proc.held) = (on, true, false);
        self.sets.built.insert((on, migration), proc);
    }

    /// Lets a built process run. Returns false if there is none.
    pub(super) fn run_built(&mut self, on: HostId, migration: MigrationId, held: bool) -> bool {
        let Some(mut proc) = self.sets.built.remove(&(on, migration)) else {
            return false;
        };
        let tid = proc.spawned;
        let twice = self
            .procs
            .iter()
            .any(|p| p.spawned == tid && !p.exited && !self.is_out(p.host));
        assert!(!twice, "two live copies of {tid:?} (seed {})", self.seed);
        (proc.stopped, proc.held) = (false, held);
        self.procs.push(proc);
        true
    }

    /// Models what a library does after a restart.
    pub(super) fn begin_again(&mut self, proc: usize, restart: &RestartInfo) {
        let p = &mut self.procs[proc];
        p.line = restart.group.incarnation;
        for (peer, link) in p.links.iter_mut().filter(|(_, link)| !link.is_peer_gone()) {
            let before = restart.group.incarnation_before(*peer);
            before.map(|before| link.accept_incarnation(before));
            link.begin_incarnation(restart.group.incarnation, before.is_some());
        }
        let again: Vec<_> = restart
            .requests_to_repeat
            .iter()
            .filter_map(|id| Some((*id, p.open.get(id)?.clone())))
            .collect();
        let (conn, on) = (p.conn.expect("just connected"), p.host);
        for (id, what) in again {
            self.proc_says(
                conn,
                on,
                Event::TaskControl {
                    conn,
                    message: ToDaemon::Request { id, request: what },
                },
            );
        }
    }

    /// Saves the state of a program if it keeps its own.
    pub(super) fn write_state(&mut self, proc: usize) {
        let p = &self.procs[proc];
        if let (true, Some(tid)) = (p.program.contains("keeper"), p.spawned) {
            self.sets.files.insert(
                tid,
                State {
                    seen: p.seen.clone(),
                    said: p.said.clone(),
                },
            );
        }
    }

    /// Reads the saved state of a restarted program if it keeps its own.
    pub(super) fn read_state(&mut self, proc: usize) {
        let p = &mut self.procs[proc];
        let again = p.env.iter().any(|entry| entry.starts_with("SEMPA_AGAIN="));
        if let (true, true, Some(tid)) = (again, p.program.contains("keeper"), p.spawned) {
            let State { seen, said } = self.sets.files.get(&tid).cloned().unwrap_or_default();
            (p.seen, p.said) = (seen, said);
        }
    }

    /// Carries out outputs about the files of programs that write their own checkpoints.
    fn keep_states(&mut self, on: HostId, output: Output) {
        let named = |files: &[PathBuf]| {
            let name = files[0].to_string_lossy().into_owned();
            let tid = name
                .strip_prefix("state-t")
                .and_then(|tid| i32::from_str_radix(tid, 16).ok());
            Tid::from_raw(tid.unwrap_or_else(|| panic!("{name} has no tid in it")))
        };
        match output {
            Output::CollectState {
                migration, files, ..
            } => {
                let state = self.sets.files.get(&named(&files)).cloned();
                let count = u32::from(state.is_some());
                self.sets.images.insert(
                    (on, migration),
                    Part {
                        state,
                        ..Part::default()
                    },
                );
                let result = self.thrown().map(|()| DumpReport {
                    bytes: 10,
                    files: count,
                });
                self.later(on, Event::StateCollected { migration, result });
            }
            Output::StageState {
                migration, files, ..
            } => {
                let state = self
                    .sets
                    .images
                    .get(&(on, migration))
                    .expect("images come before")
                    .state
                    .clone();
                let result = self.thrown();
                if result.is_ok() {
                    self.sets
                        .staged
                        .insert((on, migration), (named(&files), state));
                }
                self.later(on, Event::StateStaged { migration, result });
            }
            Output::NameState { migration } => {
                let staged = self.sets.staged.remove(&(on, migration));
                let result = self.thrown();
                if let (true, Some((tid, state))) = (result.is_ok(), staged) {
                    match state {
                        Some(state) => self.sets.files.insert(tid, state),
                        None => self.sets.files.remove(&tid),
                    };
                }
                self.later(on, Event::StateNamed { migration, result });
            }
            other => self.store_keeps(on, other),
        }
    }

    fn later(&mut self, on: HostId, event: Event) {
        let at = self.now + Micros(200 + self.dice.below(2_000));
        self.push(at, Happening::Event(on, event));
    }

    fn thrown(&mut self) -> Result<(), Failure> {
        self.step_result(())
    }

    pub(super) fn store_gets(&mut self, on: HostId, output: Output) {
        match output {
            Output::Deposit {
                migration,
                record,
                to,
            } => {
                let part = self
                    .sets
                    .images
                    .get_mut(&(on, migration))
                    .expect("just dumped");
                part.record = Some(*record);
                self.bring(on, migration, to);
            }
            Output::SendPart {
                restart,
                migration,
                tid,
                to,
            } => {
                let (_, parts) = &self.sets.sets[&self.sets.open[&restart]];
                let part = parts[&tid].clone();
                self.sets.images.insert((on, migration), part);
                self.bring(on, migration, to);
            }
            Output::ReadPart { migration } => {
                let record = self
                    .sets
                    .images
                    .get(&(on, migration))
                    .and_then(|part| part.record.clone());
                let result = record.ok_or(Failure::Images("nothing lies there".into()));
                self.later(on, Event::PartRead { migration, result });
            }
            Output::BeginSet { cut, .. } => {
                let result = self.thrown().map_err(|e| e.to_string());
                if result.is_ok() {
                    self.sets.drafts.insert(cut, BTreeMap::new());
                }
                self.later(on, Event::SetBegun { cut, result });
            }
            Output::KeepPart {
                cut,
                migration,
                tid,
            } => {
                let part = self
                    .sets
                    .images
                    .get(&(on, migration))
                    .expect("received")
                    .clone();
                let result = self.thrown().map_err(|e| e.to_string());
                if let Some(draft) = self.sets.drafts.get_mut(&cut) {
                    draft.insert(tid, part);
                }
                self.later(on, Event::PartKept { migration, result });
            }
            Output::SealSet { cut, meta, .. } => {
                let draft = self.sets.drafts.remove(&cut).expect("begun");
                assert_eq!(
                    draft.len(),
                    meta.tasks.len(),
                    "all of it is there (seed {})",
                    self.seed
                );
                let result = self.thrown().map_err(|e| e.to_string()).map(|()| {
                    let name = format!("set-{cut}");
                    self.sets.sets.insert(name.clone(), (*meta, draft));
                    (name, 1)
                });
                self.later(on, Event::SetSealed { cut, result });
            }
            Output::AbandonSet { cut } => {
                self.sets.drafts.remove(&cut);
            }
            Output::OpenSet { restart, set } => {
                let meta = self.sets.sets.get(&set).map(|(meta, _)| meta.clone());
                self.sets.open.insert(restart, set);
                self.later(
                    on,
                    Event::SetOpened {
                        restart,
                        result: meta.ok_or("there is no such set".into()),
                    },
                );
            }
            Output::CloseSet { restart } => {
                self.sets.open.remove(&restart);
            }
            other => self.keep_states(on, other),
        }
    }

    /// Carries out outputs about whole checkpoints.
    fn store_keeps(&mut self, on: HostId, output: Output) {
        match output {
            Output::MarkSets { sets, ended, .. } => {
                let jobs: Vec<Tid> = sets
                    .iter()
                    .filter_map(|set| Some(self.sets.sets.get(set)?.0.job))
                    .collect();
                for CheckpointEntry { name: set, .. } in self
                    .sets
                    .entries()
                    .into_iter()
                    .filter(|set| jobs.contains(&set.job))
                {
                    if ended {
                        self.sets.ended.insert(set)
                    } else {
                        self.sets.ended.remove(&set)
                    };
                }
            }
            Output::RemoveSets {
                tid,
                id,
                which,
                stay,
                ..
            } => {
                let removed = self.sets.remove(which, &stay);
                self.later(
                    on,
                    Event::SetsRemoved {
                        tid,
                        id,
                        result: Ok(removed),
                    },
                );
            }
            Output::SendCopy { migration, set, to } => {
                let result = self.thrown().map(|()| 1);
                let expected = self
                    .nodes
                    .get(&to)
                    .is_some_and(|n| n.alive && n.expected.contains(&migration));
                if expected && result.is_ok() {
                    self.sets.copies.insert((to, set));
                }
                // Only the target knows the reason.
                let unsent = result
                    .clone()
                    .map_err(|_| Failure::Images("nothing more was taken".into()));
                if expected && !(self.sets.silent && result.is_err()) {
                    self.later(to, Event::ImagesReceived { migration, result });
                }
                self.later(
                    on,
                    Event::ImagesSent {
                        migration,
                        result: unsent,
                    },
                );
            }
            Output::GiveUpCopy { migration, set } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected
                    .remove(&migration);
                self.sets.copies.remove(&(on, set));
            }
            Output::DropSets { sets } => {
                self.sets
                    .copies
                    .retain(|(at, set)| *at != on || !sets.contains(set));
                if on == HostId::MASTER {
                    self.sets.sets.retain(|set, _| !sets.contains(set));
                }
            }
            Output::ListSets { tid, id } => {
                self.later(
                    on,
                    Event::SetsListed {
                        tid,
                        id,
                        result: Ok(self.sets.entries()),
                    },
                );
            }
            other => panic!("{other:?}"),
        }
    }

    /// Sends images to another host, or reports them as received if they stay here.
    fn bring(&mut self, on: HostId, migration: MigrationId, to: Option<HostId>) {
        let result = self.thrown().map(|()| 1);
        let Some(to) = to else {
            return self.later(on, Event::ImagesReceived { migration, result });
        };
        let expected = self
            .nodes
            .get(&to)
            .is_some_and(|n| n.alive && n.expected.contains(&migration));
        if expected {
            let part = self.sets.images[&(on, migration)].clone();
            self.sets.images.insert((to, migration), part);
            self.later(
                to,
                Event::ImagesReceived {
                    migration,
                    result: result.clone(),
                },
            );
        }
        self.later(on, Event::ImagesSent { migration, result });
    }
}
