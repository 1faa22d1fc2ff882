//! Images of processes, and the checkpoint store of the simulation.

use super::{Proc, Received, Sim, SimEvent};
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

/// State that a program whose name contains `keeper` saves when it exits and reads when it is
/// started again: received messages and counts of sent messages.
#[derive(Clone, Debug, Default)]
pub(super) struct ProgramState {
    received: Vec<Received>,
    sent_counts: BTreeMap<Tid, u32>,
}

/// A dumped process or a program's own state, and the record stored with it.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredImage {
    proc: Option<Proc>,
    state: Option<ProgramState>,
    record: Option<SavedTask>,
}

/// Image directories, checkpoints, and processes that are built and do not run yet.
#[derive(Debug, Default)]
pub(in crate::tests) struct ImageStore {
    images: BTreeMap<(HostId, MigrationId), StoredImage>,
    drafts: BTreeMap<SnapshotId, BTreeMap<Tid, StoredImage>>,
    checkpoints: BTreeMap<String, (CheckpointMeta, BTreeMap<Tid, StoredImage>)>,
    open_checkpoints: BTreeMap<u64, String>,
    /// Checkpoints of jobs that have ended.
    ended_jobs: BTreeSet<String>,
    pub(super) built: BTreeMap<(HostId, MigrationId), Proc>,
    /// Saved states of programs, in files that all hosts share.
    state_files: BTreeMap<Tid, ProgramState>,
    /// Saved states from a checkpoint, before they get their file names.
    staged_states: BTreeMap<(HostId, MigrationId), (Tid, Option<ProgramState>)>,
    /// True if target hosts do not report why a copy failed.
    pub(in crate::tests) hides_copy_errors: bool,
    /// Copies of checkpoints in the stores of other hosts.
    copies: BTreeSet<(HostId, String)>,
}

impl ImageStore {
    pub(super) fn drop_images(&mut self, on: HostId, migration: MigrationId) {
        self.images.remove(&(on, migration));
        self.staged_states.remove(&(on, migration));
    }

    /// Returns the numbers of drafts and of images that were not removed.
    pub(in crate::tests) fn leftovers(&self) -> (usize, usize) {
        (
            self.drafts.len(),
            self.images.len() + self.staged_states.len(),
        )
    }

    /// Returns the number of images and unnamed state files on the matching hosts.
    pub(in crate::tests) fn leftovers_on(&self, matches: impl Fn(HostId) -> bool) -> usize {
        self.images
            .keys()
            .chain(self.staged_states.keys())
            .filter(|(on, _)| matches(*on))
            .count()
    }

    /// Returns the number of complete checkpoints.
    pub(in crate::tests) fn count(&self) -> usize {
        self.checkpoints.len()
    }

    pub(in crate::tests) fn newest_name(&self) -> String {
        let number = |name: &&String| {
            name.rsplit('-')
                .next()
                .and_then(|number| number.parse::<SnapshotId>().ok())
        };
        self.checkpoints
            .keys()
            .max_by_key(number)
            .expect("there is one")
            .clone()
    }

    /// Returns the checkpoints whose jobs have ended for good.
    pub(in crate::tests) fn ended(&self) -> Vec<String> {
        self.ended_jobs.iter().cloned().collect()
    }

    fn entries(&self) -> Vec<CheckpointEntry> {
        let entry =
            |(set, (meta, parts)): (&String, &(CheckpointMeta, BTreeMap<Tid, StoredImage>))| {
                CheckpointEntry {
                    name: set.clone(),
                    job: meta.job,
                    created: Micros(0),
                    tasks: parts.len() as u32,
                    bytes: 1,
                    unusable_reason: None,
                    job_ended_at: self.ended_jobs.contains(set).then_some(Micros(1)),
                    copy_hosts: Vec::new(),
                }
            };
        self.checkpoints.iter().map(entry).collect()
    }

    fn remove(
        &mut self,
        which: RemovalSelection,
        in_use: &BTreeMap<String, RemovalRefusal>,
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
        let mut remove_one = |name: &String| match in_use.get(name) {
            Some(why) => Err(why.clone()),
            None if self.open_checkpoints.values().any(|open| open == name) => {
                Err(RemovalRefusal::InUse)
            }
            None => self
                .checkpoints
                .remove(name)
                .map(|_| 1)
                .ok_or(RemovalRefusal::Unknown),
        };
        names
            .into_iter()
            .map(|name| (name.clone(), remove_one(&name)))
            .collect()
    }

    /// Returns the copies of checkpoints and their hosts.
    pub(in crate::tests) fn copies(&self) -> Vec<(HostId, String)> {
        self.copies.iter().cloned().collect()
    }

    /// Takes over the checkpoints of another virtual machine.
    pub(in crate::tests) fn adopt_checkpoints(&mut self, from: ImageStore) {
        self.checkpoints = from.checkpoints;
    }

    /// Returns the highest task number of each host in all checkpoints.
    pub(in crate::tests) fn highest_task_numbers(&self) -> BTreeMap<HostId, u32> {
        let tids = self
            .checkpoints
            .values()
            .flat_map(|(_, parts)| parts.keys());
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
            .find(|p| p.spawned_tid == Some(tid) && p.host == on && !p.exited)
        {
            assert!(
                proc.conn.is_none() && proc.quiesced.is_some(),
                "only a quiesced task can be dumped (seed {})",
                self.seed
            );
            let part = StoredImage {
                proc: Some(Proc {
                    deferred_events: Vec::new(),
                    ..proc.clone()
                }),
                ..StoredImage::default()
            };
            self.image_store.images.insert((on, migration), part);
        }
    }

    /// Builds a process from images. It stays stopped.
    pub(super) fn build_from_images(
        &mut self,
        on: HostId,
        migration: MigrationId,
        redirection: &MemoryWrite,
    ) {
        let part = self
            .image_store
            .images
            .get(&(on, migration))
            .expect("images come before");
        let redirect: Redirect = from_bytes(&redirection.bytes[8..]).expect("it can be read");
        let mut proc = part.proc.clone().expect("a process");
        proc.quiesced = Some((redirect.migration, redirect.tokens));
        (proc.host, proc.stopped_for_migration, proc.paused) = (on, true, false);
        self.image_store.built.insert((on, migration), proc);
    }

    /// Lets a built process run. Returns false if there is none.
    pub(super) fn run_built(&mut self, on: HostId, migration: MigrationId, held: bool) -> bool {
        let Some(mut proc) = self.image_store.built.remove(&(on, migration)) else {
            return false;
        };
        let tid = proc.spawned_tid;
        let twice = self
            .procs
            .iter()
            .any(|p| p.spawned_tid == tid && !p.exited && !self.is_removed(p.host));
        assert!(!twice, "two live copies of {tid:?} (seed {})", self.seed);
        (proc.stopped_for_migration, proc.paused) = (false, held);
        self.procs.push(proc);
        true
    }

    /// Models the actions of a library after a restart.
    pub(super) fn resume_after_restart(&mut self, proc: usize, restart: &RestartInfo) {
        let p = &mut self.procs[proc];
        p.incarnation = restart.group.incarnation;
        for (peer, link) in p.links.iter_mut().filter(|(_, link)| !link.is_peer_gone()) {
            let before = restart.group.incarnation_before(*peer);
            before.map(|before| link.accept_incarnation(before));
            link.begin_incarnation(restart.group.incarnation, before.is_some());
        }
        let repeated_requests: Vec<_> = restart
            .requests_to_repeat
            .iter()
            .filter_map(|id| Some((*id, p.pending_requests.get(id)?.clone())))
            .collect();
        let (conn, on) = (p.conn.expect("just connected"), p.host);
        for (id, what) in repeated_requests {
            self.send_from_proc(
                conn,
                on,
                Event::TaskControl {
                    conn,
                    message: ToDaemon::Request { id, request: what },
                },
            );
        }
    }

    /// Saves the state of a program, if the program keeps its own state.
    pub(super) fn write_state(&mut self, proc: usize) {
        let p = &self.procs[proc];
        if let (true, Some(tid)) = (p.program.contains("keeper"), p.spawned_tid) {
            self.image_store.state_files.insert(
                tid,
                ProgramState {
                    received: p.received.clone(),
                    sent_counts: p.sent_counts.clone(),
                },
            );
        }
    }

    /// Reads the saved state of a restarted program, if the program keeps its own state.
    pub(super) fn read_state(&mut self, proc: usize) {
        let p = &mut self.procs[proc];
        let again = p.env.iter().any(|entry| entry.starts_with("SEMPA_AGAIN="));
        if let (true, true, Some(tid)) = (again, p.program.contains("keeper"), p.spawned_tid) {
            let ProgramState {
                received,
                sent_counts,
            } = self
                .image_store
                .state_files
                .get(&tid)
                .cloned()
                .unwrap_or_default();
            (p.received, p.sent_counts) = (received, sent_counts);
        }
    }

    /// Carries out outputs about the files of programs that write their own checkpoints.
    fn carry_out_for_states(&mut self, on: HostId, output: Output) {
        let tid_of_file = |files: &[PathBuf]| {
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
                let state = self
                    .image_store
                    .state_files
                    .get(&tid_of_file(&files))
                    .cloned();
                let count = u32::from(state.is_some());
                self.image_store.images.insert(
                    (on, migration),
                    StoredImage {
                        state,
                        ..StoredImage::default()
                    },
                );
                let result = self.random_failure().map(|()| DumpReport {
                    bytes: 10,
                    files: count,
                });
                self.schedule_soon(on, Event::StateCollected { migration, result });
            }
            Output::StageState {
                migration, files, ..
            } => {
                let state = self
                    .image_store
                    .images
                    .get(&(on, migration))
                    .expect("images come before")
                    .state
                    .clone();
                let result = self.random_failure();
                if result.is_ok() {
                    self.image_store
                        .staged_states
                        .insert((on, migration), (tid_of_file(&files), state));
                }
                self.schedule_soon(on, Event::StateStaged { migration, result });
            }
            Output::InstallState { migration } => {
                let staged = self.image_store.staged_states.remove(&(on, migration));
                let result = self.random_failure();
                if let (true, Some((tid, state))) = (result.is_ok(), staged) {
                    match state {
                        Some(state) => self.image_store.state_files.insert(tid, state),
                        None => self.image_store.state_files.remove(&tid),
                    };
                }
                self.schedule_soon(on, Event::StateInstalled { migration, result });
            }
            other => self.carry_out_for_checkpoints(on, other),
        }
    }

    fn schedule_soon(&mut self, on: HostId, event: Event) {
        let at = self.now + Micros(200 + self.rng.below(2_000));
        self.schedule(at, SimEvent::Machine(on, event));
    }

    fn random_failure(&mut self) -> Result<(), Failure> {
        self.step_result(())
    }

    pub(super) fn carry_out_for_store(&mut self, on: HostId, output: Output) {
        match output {
            Output::UploadPart {
                migration,
                record,
                to,
            } => {
                let part = self
                    .image_store
                    .images
                    .get_mut(&(on, migration))
                    .expect("just dumped");
                part.record = Some(*record);
                self.deliver_images(on, migration, to);
            }
            Output::SendPart {
                restart,
                migration,
                tid,
                to,
            } => {
                let (_, parts) =
                    &self.image_store.checkpoints[&self.image_store.open_checkpoints[&restart]];
                let part = parts[&tid].clone();
                self.image_store.images.insert((on, migration), part);
                self.deliver_images(on, migration, to);
            }
            Output::ReadPart { migration } => {
                let record = self
                    .image_store
                    .images
                    .get(&(on, migration))
                    .and_then(|part| part.record.clone());
                let result = record.ok_or(Failure::Images("nothing lies there".into()));
                self.schedule_soon(on, Event::PartRead { migration, result });
            }
            Output::OpenCheckpoint {
                restart,
                checkpoint,
            } => {
                let meta = self
                    .image_store
                    .checkpoints
                    .get(&checkpoint)
                    .map(|(meta, _)| meta.clone());
                self.image_store
                    .open_checkpoints
                    .insert(restart, checkpoint);
                self.schedule_soon(
                    on,
                    Event::CheckpointOpened {
                        restart,
                        result: meta.ok_or("there is no such checkpoint".into()),
                    },
                );
            }
            Output::CloseCheckpoint { restart } => {
                self.image_store.open_checkpoints.remove(&restart);
            }
            other => self.carry_out_for_drafts(on, other),
        }
    }

    /// Carries out outputs about checkpoints that are being written.
    fn carry_out_for_drafts(&mut self, on: HostId, output: Output) {
        match output {
            Output::BeginCheckpoint { snapshot, .. } => {
                let result = self.random_failure().map_err(|e| e.to_string());
                if result.is_ok() {
                    self.image_store.drafts.insert(snapshot, BTreeMap::new());
                }
                self.schedule_soon(on, Event::CheckpointBegun { snapshot, result });
            }
            Output::StorePart {
                snapshot,
                migration,
                tid,
            } => {
                let part = self
                    .image_store
                    .images
                    .get(&(on, migration))
                    .expect("received")
                    .clone();
                let result = self.random_failure().map_err(|e| e.to_string());
                if let Some(draft) = self.image_store.drafts.get_mut(&snapshot) {
                    draft.insert(tid, part);
                }
                self.schedule_soon(on, Event::PartStored { migration, result });
            }
            Output::SealCheckpoint { snapshot, meta, .. } => {
                let draft = self.image_store.drafts.remove(&snapshot).expect("begun");
                assert_eq!(
                    draft.len(),
                    meta.tasks.len(),
                    "all of it is there (seed {})",
                    self.seed
                );
                let result = self.random_failure().map_err(|e| e.to_string()).map(|()| {
                    let name = format!("set-{snapshot}");
                    self.image_store
                        .checkpoints
                        .insert(name.clone(), (*meta, draft));
                    (name, 1)
                });
                self.schedule_soon(on, Event::CheckpointSealed { snapshot, result });
            }
            Output::AbandonCheckpoint { snapshot } => {
                self.image_store.drafts.remove(&snapshot);
            }
            other => self.carry_out_for_states(on, other),
        }
    }

    /// Carries out outputs about whole checkpoints.
    fn carry_out_for_checkpoints(&mut self, on: HostId, output: Output) {
        match output {
            Output::MarkCheckpoints {
                checkpoints, ended, ..
            } => {
                let jobs: Vec<Tid> = checkpoints
                    .iter()
                    .filter_map(|set| Some(self.image_store.checkpoints.get(set)?.0.job))
                    .collect();
                for CheckpointEntry { name: set, .. } in self
                    .image_store
                    .entries()
                    .into_iter()
                    .filter(|set| jobs.contains(&set.job))
                {
                    if ended {
                        self.image_store.ended_jobs.insert(set)
                    } else {
                        self.image_store.ended_jobs.remove(&set)
                    };
                }
            }
            Output::RemoveCheckpoints {
                tid,
                id,
                selection,
                refused,
                ..
            } => {
                let removed = self.image_store.remove(selection, &refused);
                self.schedule_soon(
                    on,
                    Event::CheckpointsRemoved {
                        tid,
                        id,
                        result: Ok(removed),
                    },
                );
            }
            Output::DropCheckpoints { checkpoints } => {
                self.image_store
                    .copies
                    .retain(|(at, set)| *at != on || !checkpoints.contains(set));
                if on == HostId::MASTER {
                    self.image_store
                        .checkpoints
                        .retain(|set, _| !checkpoints.contains(set));
                }
            }
            Output::ListCheckpoints { tid, id } => {
                self.schedule_soon(
                    on,
                    Event::CheckpointsListed {
                        tid,
                        id,
                        result: Ok(self.image_store.entries()),
                    },
                );
            }
            other => self.carry_out_for_copies(on, other),
        }
    }

    /// Carries out outputs about copies of checkpoints.
    fn carry_out_for_copies(&mut self, on: HostId, output: Output) {
        match output {
            Output::SendCopy {
                migration,
                checkpoint,
                to,
            } => {
                let result = self.random_failure().map(|()| 1);
                let expected = self
                    .nodes
                    .get(&to)
                    .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
                if expected && result.is_ok() {
                    self.image_store.copies.insert((to, checkpoint));
                }
                // Only the target knows the reason.
                let unsent = result
                    .clone()
                    .map_err(|_| Failure::Images("nothing more was taken".into()));
                if expected && !(self.image_store.hides_copy_errors && result.is_err()) {
                    self.schedule_soon(to, Event::ImagesReceived { migration, result });
                }
                self.schedule_soon(
                    on,
                    Event::ImagesSent {
                        migration,
                        result: unsent,
                    },
                );
            }
            Output::DiscardCopy {
                migration,
                checkpoint,
            } => {
                self.nodes
                    .get_mut(&on)
                    .expect("it speaks")
                    .expected_images
                    .remove(&migration);
                self.image_store.copies.remove(&(on, checkpoint));
            }
            other => panic!("{other:?}"),
        }
    }

    /// Sends images to another host, or reports them as received if `to` is `None`.
    fn deliver_images(&mut self, on: HostId, migration: MigrationId, to: Option<HostId>) {
        let result = self.random_failure().map(|()| 1);
        let Some(to) = to else {
            return self.schedule_soon(on, Event::ImagesReceived { migration, result });
        };
        let expected = self
            .nodes
            .get(&to)
            .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
        if expected {
            let part = self.image_store.images[&(on, migration)].clone();
            self.image_store.images.insert((to, migration), part);
            self.schedule_soon(
                to,
                Event::ImagesReceived {
                    migration,
                    result: result.clone(),
                },
            );
        }
        self.schedule_soon(on, Event::ImagesSent { migration, result });
    }
}
