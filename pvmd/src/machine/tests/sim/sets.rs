//! Images of processes, and the store of the simulation.

use super::{Happening, Proc, Sim};
use crate::machine::{Event, Output};
use checkpoint::protocol::CutId;
use sempa_proto::checkpoint::{PartRecord, SetMeta};
use sempa_proto::frame::from_bytes;
use sempa_proto::migration::Failure;
use sempa_proto::task::{Redirect, Restart, ToDaemon};
use sempa_proto::tasker::Redirection;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::BTreeMap;

/// A dumped process and what lies beside it.
#[derive(Clone, Debug)]
pub(super) struct Part {
    proc: Proc,
    record: Option<PartRecord>,
}

/// Image directories, sets, and processes that are built and do not run yet.
#[derive(Debug, Default)]
pub(in crate::machine::tests) struct Sets {
    images: BTreeMap<(HostId, MigrationId), Part>,
    drafts: BTreeMap<CutId, BTreeMap<Tid, Part>>,
    sets: BTreeMap<String, (SetMeta, BTreeMap<Tid, Part>)>,
    open: BTreeMap<u64, String>,
    pub(super) built: BTreeMap<(HostId, MigrationId), Proc>,
}

impl Sets {
    pub(super) fn drop_images(&mut self, on: HostId, migration: MigrationId) {
        self.images.remove(&(on, migration));
    }

    /// Drafts and images that nobody has removed.
    pub(in crate::machine::tests) fn left(&self) -> (usize, usize) {
        (self.drafts.len(), self.images.len())
    }

    /// Complete sets.
    pub(in crate::machine::tests) fn count(&self) -> usize {
        self.sets.len()
    }

    /// Takes the sets over into another virtual machine.
    pub(in crate::machine::tests) fn take_sets(&mut self, from: Sets) {
        self.sets = from.sets;
    }

    /// The highest number on each host.
    pub(in crate::machine::tests) fn spared(&self) -> BTreeMap<HostId, u32> {
        let tids = self.sets.values().flat_map(|(_, parts)| parts.keys());
        let mut spared = BTreeMap::new();
        for tid in tids {
            let highest = spared.entry(tid.home().expect("a task")).or_insert(0);
            *highest = tid.local().max(*highest);
        }
        spared
    }
}

impl Sim {
    pub(super) fn dump_image(&mut self, on: HostId, migration: MigrationId, tid: Tid) {
        if let Some(proc) = self.procs.iter().find(|p| p.spawned == Some(tid) && p.host == on && !p.exited) {
            assert!(
                proc.conn.is_none() && proc.quiesced.is_some(),
                "only who has let go is dumped (seed {})",
                self.seed
            );
            let part = Part { proc: Proc { mail: Vec::new(), ..proc.clone() }, record: None };
            self.sets.images.insert((on, migration), part);
        }
    }

    /// A process is built from images and stands still.
    pub(super) fn build(&mut self, on: HostId, migration: MigrationId, redirection: &Redirection) {
        let part = self.sets.images.get(&(on, migration)).expect("images come before");
        let redirect: Redirect = from_bytes(&redirection.bytes[8..]).expect("it can be read");
        let mut proc = part.proc.clone();
        proc.quiesced = Some((redirect.migration, redirect.tokens));
        (proc.host, proc.stopped, proc.held) = (on, true, false);
        self.sets.built.insert((on, migration), proc);
    }

    /// Lets a built process run; false when this is no such one.
    pub(super) fn run_built(&mut self, on: HostId, migration: MigrationId, held: bool) -> bool {
        let Some(mut proc) = self.sets.built.remove(&(on, migration)) else { return false };
        let tid = proc.spawned;
        let twice = self.procs.iter().any(|p| p.spawned == tid && !p.exited);
        assert!(!twice, "two live copies of {tid:?} (seed {})", self.seed);
        (proc.stopped, proc.held) = (false, held);
        self.procs.push(proc);
        true
    }

    /// What a library does that was started again.
    pub(super) fn begin_again(&mut self, proc: usize, restart: &Restart) {
        let p = &mut self.procs[proc];
        p.line = restart.timeline.line;
        for (peer, link) in p.links.iter_mut().filter(|(_, link)| !link.is_gone()) {
            let before = restart.timeline.before(*peer);
            before.map(|before| link.follow(before));
            link.begin_timeline(restart.timeline.line, before.is_some());
        }
        let again: Vec<_> = restart.again.iter().filter_map(|id| Some((*id, p.open.get(id)?.clone()))).collect();
        let (conn, on) = (p.conn.expect("just connected"), p.host);
        for (id, what) in again {
            self.proc_says(conn, on, Event::TaskControl { conn, message: ToDaemon::Request { id, what } });
        }
    }

    fn later(&mut self, on: HostId, event: Event) {
        let at = self.now + Micros(200 + self.dice.roll(2_000));
        self.push(at, Happening::Event(on, event));
    }

    fn thrown(&mut self) -> Result<(), Failure> {
        self.step_result(())
    }

    pub(super) fn store_gets(&mut self, on: HostId, output: Output) {
        match output {
            Output::Deposit { migration, record, to } => {
                let part = self.sets.images.get_mut(&(on, migration)).expect("just dumped");
                part.record = Some(*record);
                self.bring(on, migration, to);
            }
            Output::SendPart { restart, migration, tid, to } => {
                let (_, parts) = &self.sets.sets[&self.sets.open[&restart]];
                let part = parts[&tid].clone();
                self.sets.images.insert((on, migration), part);
                self.bring(on, migration, to);
            }
            Output::ReadPart { migration } => {
                let record = self.sets.images.get(&(on, migration)).and_then(|part| part.record.clone());
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
            Output::KeepPart { cut, migration, tid } => {
                let part = self.sets.images.get(&(on, migration)).expect("received").clone();
                let result = self.thrown().map_err(|e| e.to_string());
                if let Some(draft) = self.sets.drafts.get_mut(&cut) {
                    draft.insert(tid, part);
                }
                self.later(on, Event::PartKept { migration, result });
            }
            Output::SealSet { cut, meta, .. } => {
                let draft = self.sets.drafts.remove(&cut).expect("begun");
                assert_eq!(draft.len(), meta.parts.len(), "all of it is there (seed {})", self.seed);
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
                self.later(on, Event::SetOpened { restart, result: meta.ok_or("there is no such set".into()) });
            }
            Output::CloseSet { restart } => {
                self.sets.open.remove(&restart);
            }
            Output::ListSets { tid, id } => self.later(on, Event::SetsListed { tid, id, result: Ok(Vec::new()) }),
            other => panic!("{other:?}"),
        }
    }

    /// Images go to another host, or are where they are to be.
    fn bring(&mut self, on: HostId, migration: MigrationId, to: Option<HostId>) {
        let result = self.thrown().map(|()| 1);
        let Some(to) = to else { return self.later(on, Event::ImagesReceived { migration, result }) };
        let expected = self.nodes.get(&to).is_some_and(|n| n.alive && n.expected.contains(&migration));
        if expected {
            let part = self.sets.images[&(on, migration)].clone();
            self.sets.images.insert((to, migration), part);
            self.later(to, Event::ImagesReceived { migration, result: result.clone() });
        }
        self.later(on, Event::ImagesSent { migration, result });
    }
}
