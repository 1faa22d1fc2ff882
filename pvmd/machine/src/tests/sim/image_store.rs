//! Images of simulated processes, and the checkpoint store of the simulation.

use super::{Proc, Received, Sim, SimEvent};
use crate::{Event, Output};
use checkpoint_protocol::SnapshotId;
use sempa_proto::checkpoint::{
    CheckpointEntry, CheckpointMeta, ClaimKey, JobHolder, RemovalRefusal, RemovalResults,
    RemovalSelection, RestartFailure, StoreFailure,
};
use sempa_proto::frame::from_bytes;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::Failure;
use sempa_proto::task::{Redirect, RestartInfo, ToDaemon};
use sempa_proto::tasker::{DumpReport, MemoryWrite};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// State that a program saves when it exits and reads when it is started again: received messages
/// and counts of sent messages. Only programs whose names contain `keeper` save their state.
#[derive(Clone, Debug, Default)]
pub(super) struct ProgramState {
    received: Vec<Received>,
    sent_counts: BTreeMap<Tid, u32>,
}

/// A dumped process or the saved state of a program, and the record stored with it.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredImage {
    proc: Option<Proc>,
    program_state: Option<ProgramState>,
    record: Option<SavedTask>,
}

/// The claims of this virtual machine in the store.
#[derive(Debug, Default)]
pub(in crate::tests) struct OwnClaims {
    keys: BTreeSet<ClaimKey>,
    /// Claims that restarts in progress need, by the number of the restart.
    used_by_restarts: BTreeMap<u64, ClaimKey>,
    /// Claims that are released at the end of the last restart that needs them.
    restart_only: BTreeSet<ClaimKey>,
}

impl OwnClaims {
    pub(in crate::tests) fn contains(&self, key: ClaimKey) -> bool {
        self.keys.contains(&key)
    }

    pub(in crate::tests) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    fn begin_restart(&mut self, restart_number: u64, key: ClaimKey) {
        self.used_by_restarts.insert(restart_number, key);
        if self.keys.insert(key) {
            self.restart_only.insert(key);
        }
    }

    fn end_restart(&mut self, restart_number: u64, keeps_claim: bool) {
        let Some(key) = self.used_by_restarts.remove(&restart_number) else {
            return;
        };
        if keeps_claim {
            self.restart_only.remove(&key);
        }
        if self.restart_only.contains(&key) {
            self.release(key);
        }
    }

    fn release(&mut self, key: ClaimKey) {
        if self.used_by_restarts.values().any(|used| *used == key) {
            self.restart_only.insert(key);
        } else {
            self.restart_only.remove(&key);
            self.keys.remove(&key);
        }
    }
}

/// Image directories, checkpoints, and restored processes that do not run yet.
#[derive(Debug, Default)]
pub(in crate::tests) struct ImageStore {
    images: BTreeMap<(HostId, MigrationId), StoredImage>,
    drafts: BTreeMap<SnapshotId, BTreeMap<Tid, StoredImage>>,
    checkpoints: BTreeMap<String, (CheckpointMeta, BTreeMap<Tid, StoredImage>)>,
    open_checkpoints: BTreeMap<u64, String>,
    /// Damaged checkpoints. A damaged image of a task is found when the task is restarted, damage
    /// of the rest (`None`) when the checkpoint is opened.
    pub(in crate::tests) damage: BTreeMap<String, Option<Tid>>,
    /// Claims of other virtual machines.
    pub(in crate::tests) foreign_claims: BTreeMap<ClaimKey, JobHolder>,
    pub(in crate::tests) own_claims: OwnClaims,
    /// Number of times that the store cannot be read when it looks for an older checkpoint.
    pub(in crate::tests) failing_search_count: u32,
    /// Checkpoints that are marked as damaged.
    pub(in crate::tests) marked_checkpoints: BTreeSet<String>,
    /// Names of the checkpoints of jobs that have ended.
    checkpoints_of_ended_jobs: BTreeSet<String>,
    pub(super) built_procs: BTreeMap<(HostId, MigrationId), Proc>,
    /// Saved states of programs, in files that all hosts share.
    state_files: BTreeMap<Tid, ProgramState>,
    /// Saved states from a checkpoint that is being restarted, with their tasks. Their files have
    /// temporary names until the restart installs them.
    staged_states: BTreeMap<(HostId, MigrationId), (Tid, Option<ProgramState>)>,
    /// True if target hosts report no reason for a failed copy.
    pub(in crate::tests) hides_copy_errors: bool,
    /// Copies of checkpoints: the host with the copy and the name of the checkpoint.
    copies: BTreeSet<(HostId, String)>,
}

impl ImageStore {
    pub(super) fn drop_images(&mut self, host_id: HostId, migration: MigrationId) {
        self.images.remove(&(host_id, migration));
        self.staged_states.remove(&(host_id, migration));
    }

    /// Returns the number of drafts, and the number of images and staged states.
    pub(in crate::tests) fn leftover_counts(&self) -> (usize, usize) {
        (
            self.drafts.len(),
            self.images.len() + self.staged_states.len(),
        )
    }

    /// Returns the number of images and staged states on the hosts for which `matches` returns
    /// true.
    pub(in crate::tests) fn leftover_count_on(&self, matches: impl Fn(HostId) -> bool) -> usize {
        self.images
            .keys()
            .chain(self.staged_states.keys())
            .filter(|(host_id, _)| matches(*host_id))
            .count()
    }

    /// Returns the number of complete checkpoints.
    pub(in crate::tests) fn checkpoint_count(&self) -> usize {
        self.checkpoints.len()
    }

    pub(in crate::tests) fn newest_name(&self) -> String {
        self.checkpoints
            .keys()
            .max_by_key(|name| snapshot_number(name))
            .expect("there is one")
            .clone()
    }

    /// Returns the newest checkpoint of the job that is older than `name` and not marked as
    /// damaged.
    fn older_name(&self, name: &str, key: Option<ClaimKey>) -> Option<String> {
        let is_older = |(older_name, (meta, _)): &(&String, &(CheckpointMeta, _))| {
            Some(meta.claim_key()) == key
                && snapshot_number(older_name) < snapshot_number(name)
                && !self.marked_checkpoints.contains(*older_name)
        };
        self.checkpoints
            .iter()
            .filter(is_older)
            .map(|(older_name, _)| older_name.clone())
            .max_by_key(|older_name| snapshot_number(older_name))
    }

    /// Returns the result of a search for an older checkpoint.
    fn next_search_result(
        &mut self,
        older_checkpoint: Option<String>,
    ) -> Result<Option<String>, StoreFailure> {
        match self.failing_search_count.checked_sub(1) {
            None => Ok(older_checkpoint),
            Some(remaining_count) => {
                self.failing_search_count = remaining_count;
                Err(StoreFailure("the disk does not answer".into()))
            }
        }
    }

    /// Returns the names of the checkpoints of jobs that have ended.
    pub(in crate::tests) fn checkpoints_of_ended_jobs(&self) -> Vec<String> {
        self.checkpoints_of_ended_jobs.iter().cloned().collect()
    }

    fn checkpoint_entries(&self) -> Vec<CheckpointEntry> {
        let make_entry =
            |(name, (meta, images)): (&String, &(CheckpointMeta, BTreeMap<Tid, StoredImage>))| {
                CheckpointEntry {
                    name: name.clone(),
                    job: meta.job,
                    created_at: Micros(0),
                    task_count: images.len() as u32,
                    stored_bytes: 1,
                    unusable_reason: None,
                    job_ended_at: self
                        .checkpoints_of_ended_jobs
                        .contains(name)
                        .then_some(Micros(1)),
                    copy_hosts: Vec::new(),
                }
            };
        self.checkpoints.iter().map(make_entry).collect()
    }

    fn remove_checkpoints(
        &mut self,
        selection: RemovalSelection,
        refusals: &BTreeMap<String, RemovalRefusal>,
    ) -> RemovalResults {
        let names = match selection {
            RemovalSelection::Checkpoints(names) => names,
            RemovalSelection::Job(job) => self
                .checkpoint_entries()
                .into_iter()
                .filter(|entry| entry.job == job)
                .map(|entry| entry.name)
                .collect(),
        };
        let mut remove_one = |name: &String| match refusals.get(name) {
            Some(why) => Err(why.clone()),
            None if self
                .open_checkpoints
                .values()
                .any(|open_name| open_name == name) =>
            {
                Err(RemovalRefusal::InUse)
            }
            None => self
                .checkpoints
                .remove(name)
                .map(|_| 1)
                .ok_or(RemovalRefusal::NoSuchCheckpoint),
        };
        names
            .into_iter()
            .map(|name| (name.clone(), remove_one(&name)))
            .collect()
    }

    /// Returns all copies: the host with the copy and the name of the checkpoint.
    pub(in crate::tests) fn copies(&self) -> Vec<(HostId, String)> {
        self.copies.iter().cloned().collect()
    }

    /// Replaces the checkpoints by those of another virtual machine's store.
    pub(in crate::tests) fn adopt_checkpoints(&mut self, other_store: Self) {
        self.checkpoints = other_store.checkpoints;
    }

    /// Adds the checkpoints of another virtual machine that uses the same store. `origin` is the
    /// start time of that virtual machine. Returns their names, oldest first.
    pub(in crate::tests) fn add_foreign_checkpoints(
        &mut self,
        other_store: Self,
        origin: Micros,
    ) -> Vec<String> {
        let mut names = Vec::new();
        for (name, (meta, images)) in other_store.checkpoints {
            let meta = CheckpointMeta {
                vm_start_time: origin,
                origin,
                ..meta
            };
            let name = format!("other-{name}");
            self.checkpoints.insert(name.clone(), (meta, images));
            names.push(name);
        }
        names.sort_by_key(|name| snapshot_number(name));
        names
    }

    /// Returns the key of a checkpoint's job.
    pub(in crate::tests) fn claim_key(&self, name: &str) -> ClaimKey {
        self.checkpoints[name].0.claim_key()
    }

    /// Returns, for each birth host, the highest task number in all checkpoints.
    pub(in crate::tests) fn highest_task_numbers(&self) -> BTreeMap<HostId, u32> {
        let tids = self
            .checkpoints
            .values()
            .flat_map(|(_, images)| images.keys());
        let mut highest_numbers = BTreeMap::new();
        for tid in tids {
            let highest_number = highest_numbers
                .entry(tid.birth_host().expect("a task"))
                .or_insert(0);
            *highest_number = tid.local_part().max(*highest_number);
        }
        highest_numbers
    }
}

/// Returns the number of the snapshot from which the checkpoint with this name was made.
fn snapshot_number(name: &str) -> Option<SnapshotId> {
    name.rsplit('-').next()?.parse().ok()
}

impl Sim {
    pub(super) fn dump_image(&mut self, host_id: HostId, migration: MigrationId, tid: Tid) {
        if let Some(proc) = self
            .procs
            .iter()
            .find(|p| p.spawned_tid == Some(tid) && p.host == host_id && !p.exited)
        {
            assert!(
                proc.conn.is_none() && proc.quiesce_request.is_some(),
                "only a quiesced task can be dumped (seed {})",
                self.seed
            );
            let image = StoredImage {
                proc: Some(Proc {
                    deferred_events: Vec::new(),
                    ..proc.clone()
                }),
                ..StoredImage::default()
            };
            self.image_store.images.insert((host_id, migration), image);
        }
    }

    /// Lets the master find that another virtual machine has taken over a job.
    pub(in crate::tests) fn take_over_job(&mut self, key: ClaimKey, by: JobHolder) {
        self.image_store.own_claims.keys.remove(&key);
        self.image_store.foreign_claims.insert(key, by.clone());
        self.schedule_soon(HostId::MASTER, Event::JobTakenOver { key, by });
    }

    /// Builds a stopped process from images. Panics if there are no images of a process.
    pub(super) fn build_from_images(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        memory_write: &MemoryWrite,
    ) {
        let image = self
            .image_store
            .images
            .get(&(host_id, migration))
            .expect("images come before");
        let redirect: Redirect = from_bytes(&memory_write.bytes[8..]).expect("it can be read");
        let mut proc = image.proc.clone().expect("a process");
        proc.quiesce_request = Some((redirect.migration, redirect.token_paths));
        (proc.host, proc.stopped_for_migration, proc.paused) = (host_id, true, false);
        self.image_store
            .built_procs
            .insert((host_id, migration), proc);
    }

    /// Lets a process run that was built from images. Returns false if no process was built for
    /// this migration.
    pub(super) fn run_built(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        is_paused: bool,
    ) -> bool {
        let Some(mut proc) = self.image_store.built_procs.remove(&(host_id, migration)) else {
            return false;
        };
        let tid = proc.spawned_tid;
        let is_duplicate = self.procs.iter().any(|p| p.spawned_tid == tid && !p.exited);
        assert!(
            !is_duplicate,
            "two live copies of {tid:?} (seed {})",
            self.seed
        );
        let has_leftovers = self
            .leftovers
            .keys()
            .any(|(_, left_by)| Some(*left_by) == tid);
        assert!(
            !has_leftovers,
            "{tid:?} runs again next to its children (seed {})",
            self.seed
        );
        (proc.stopped_for_migration, proc.paused) = (false, is_paused);
        proc.is_held = false;
        self.procs.push(proc);
        self.hold_procs(host_id);
        true
    }

    /// Models the actions of a library after a restart: its links begin the new incarnation, and it
    /// repeats requests that the checkpoint contains without a reply.
    pub(super) fn resume_after_restart(&mut self, proc: usize, restart: &RestartInfo) {
        let p = &mut self.procs[proc];
        p.incarnation = restart.restart_group.incarnation;
        for (peer, link) in p.links.iter_mut().filter(|(_, link)| !link.is_peer_gone()) {
            let previous_incarnation = restart.restart_group.incarnation_at_checkpoint(*peer);
            previous_incarnation
                .map(|previous_incarnation| link.accept_incarnation(previous_incarnation));
            link.begin_incarnation(
                restart.restart_group.incarnation,
                previous_incarnation.is_some(),
            );
        }
        let repeated_requests: Vec<_> = restart
            .requests_to_repeat
            .iter()
            .filter_map(|id| Some((*id, p.pending_requests.get(id)?.clone())))
            .collect();
        let (conn, host_id) = (p.conn.expect("just connected"), p.host);
        for (id, request) in repeated_requests {
            self.send_from_proc(
                conn,
                host_id,
                Event::TaskControl {
                    conn,
                    message: ToDaemon::Request { id, request },
                },
            );
        }
    }

    /// Saves the state of a program if the program keeps its own state.
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
        let is_restart = p.env.iter().any(|entry| entry.starts_with("SEMPA_AGAIN="));
        if let (true, true, Some(tid)) = (is_restart, p.program.contains("keeper"), p.spawned_tid) {
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

    /// Carries out outputs about files in which programs save their own state.
    fn carry_out_for_states(&mut self, host_id: HostId, output: Output) {
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
                let file_count = u32::from(state.is_some());
                self.image_store.images.insert(
                    (host_id, migration),
                    StoredImage {
                        program_state: state,
                        ..StoredImage::default()
                    },
                );
                let result = self.random_failure().map(|()| DumpReport {
                    image_bytes: 10,
                    image_files: file_count,
                });
                self.schedule_soon(host_id, Event::StateCollected { migration, result });
            }
            Output::StageState {
                migration, files, ..
            } => {
                let state = self
                    .image_store
                    .images
                    .get(&(host_id, migration))
                    .expect("images come before")
                    .program_state
                    .clone();
                let result = self.random_failure();
                if result.is_ok() {
                    self.image_store
                        .staged_states
                        .insert((host_id, migration), (tid_of_file(&files), state));
                }
                self.schedule_soon(host_id, Event::StateStaged { migration, result });
            }
            Output::InstallState { migration } => {
                let staged_state = self.image_store.staged_states.remove(&(host_id, migration));
                let result = self.random_failure();
                if let (true, Some((tid, state))) = (result.is_ok(), staged_state) {
                    match state {
                        Some(state) => self.image_store.state_files.insert(tid, state),
                        None => self.image_store.state_files.remove(&tid),
                    };
                }
                self.schedule_soon(host_id, Event::StateInstalled { migration, result });
            }
            other => self.carry_out_for_checkpoints(host_id, other),
        }
    }

    fn schedule_soon(&mut self, host_id: HostId, event: Event) {
        let at = self.now + Micros(200 + self.rng.below(2_000));
        self.schedule(at, SimEvent::Machine(host_id, event));
    }

    fn random_failure(&mut self) -> Result<(), Failure> {
        self.random_step_result(())
    }

    pub(super) fn carry_out_for_store(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::UploadPart {
                migration,
                record,
                receiver,
            } => {
                let image = self
                    .image_store
                    .images
                    .get_mut(&(host_id, migration))
                    .expect("just dumped");
                image.record = Some(*record);
                self.deliver_images(host_id, migration, receiver);
            }
            Output::SendPart {
                restart_number,
                migration,
                tid,
                receiver,
            } => {
                let name = &self.image_store.open_checkpoints[&restart_number];
                if self.image_store.damage.get(name) == Some(&Some(tid)) {
                    return self.report_damaged_image(restart_number, migration, receiver);
                }
                let (_, images) = &self.image_store.checkpoints[name];
                let image = images[&tid].clone();
                self.image_store.images.insert((host_id, migration), image);
                self.deliver_images(host_id, migration, receiver);
            }
            Output::ReadPart { migration } => {
                let record = self
                    .image_store
                    .images
                    .get(&(host_id, migration))
                    .and_then(|image| image.record.clone());
                let result = record.ok_or(Failure::Images("nothing lies there".into()));
                self.schedule_soon(host_id, Event::PartRead { migration, result });
            }
            Output::OpenCheckpoint {
                restart_number,
                checkpoint,
                force,
                ..
            } => self.open_checkpoint(host_id, restart_number, checkpoint, force),
            Output::CloseCheckpoint {
                restart_number,
                keeps_claim,
            } => {
                self.image_store.open_checkpoints.remove(&restart_number);
                let own_claims = &mut self.image_store.own_claims;
                own_claims.end_restart(restart_number, keeps_claim);
            }
            Output::ReleaseJob { key } => self.image_store.own_claims.release(key),
            other => self.carry_out_for_drafts(host_id, other),
        }
    }

    fn open_checkpoint(
        &mut self,
        host_id: HostId,
        restart_number: u64,
        checkpoint: String,
        force: bool,
    ) {
        let meta = self
            .image_store
            .checkpoints
            .get(&checkpoint)
            .map(|(meta, _)| meta.clone());
        let is_damaged = self.image_store.damage.get(&checkpoint) == Some(&None);
        let is_missing = meta.is_none();
        self.image_store
            .open_checkpoints
            .insert(restart_number, checkpoint);
        let (at, why) = (self.now + Micros(1_000), "a byte was changed".to_string());
        let result = match is_damaged {
            true => Err(RestartFailure::Store(StoreFailure(why.clone()))),
            false => meta.ok_or(RestartFailure::Store(StoreFailure(
                "there is no such checkpoint".into(),
            ))),
        };
        let result = result.and_then(|meta| {
            let key = meta.claim_key();
            match self.image_store.foreign_claims.get(&key) {
                Some(holder) if !force => Err(RestartFailure::RunsElsewhere {
                    holder: holder.clone(),
                    time_until_force: Micros(0),
                }),
                _ => {
                    self.image_store.foreign_claims.remove(&key);
                    let own_claims = &mut self.image_store.own_claims;
                    own_claims.begin_restart(restart_number, key);
                    Ok(meta)
                }
            }
        });
        if is_damaged || is_missing {
            let event = Event::CheckpointDamaged {
                restart_number,
                why,
                is_missing,
            };
            self.schedule(at, SimEvent::Machine(host_id, event));
        }
        let event = Event::CheckpointOpened {
            restart_number,
            result,
        };
        self.schedule(at, SimEvent::Machine(host_id, event));
    }

    /// Reports that the master has found an image damaged when it unpacked the image for a restart.
    fn report_damaged_image(
        &mut self,
        restart_number: u64,
        migration: MigrationId,
        receiver: Option<HostId>,
    ) {
        let why = "a byte was changed".to_string();
        let result = Err(Failure::Images(why.clone()));
        let failure = match receiver {
            Some(_) => Event::ImagesSent { migration, result },
            None => Event::ImagesReceived { migration, result },
        };
        let damage = Event::CheckpointDamaged {
            restart_number,
            why,
            is_missing: false,
        };
        let at = self.now + Micros(1_000);
        for event in [damage, failure] {
            self.schedule(at, SimEvent::Machine(HostId::MASTER, event));
        }
    }

    fn random_store_failure(&mut self) -> Result<(), StoreFailure> {
        self.random_failure()
            .map_err(|e| StoreFailure(e.to_string()))
    }

    /// Carries out outputs about checkpoints that are being written.
    fn carry_out_for_drafts(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::BeginCheckpoint { snapshot, .. } => {
                let result = self.random_store_failure();
                if result.is_ok() {
                    self.image_store.drafts.insert(snapshot, BTreeMap::new());
                }
                self.schedule_soon(host_id, Event::CheckpointBegun { snapshot, result });
            }
            Output::StorePart {
                snapshot,
                migration,
                tid,
            } => {
                let image = self
                    .image_store
                    .images
                    .get(&(host_id, migration))
                    .expect("received")
                    .clone();
                let result = self.random_store_failure();
                if let Some(draft) = self.image_store.drafts.get_mut(&snapshot) {
                    draft.insert(tid, image);
                }
                self.schedule_soon(host_id, Event::PartStored { migration, result });
            }
            Output::SealCheckpoint { snapshot, meta, .. } => {
                let draft = self.image_store.drafts.remove(&snapshot).expect("begun");
                assert_eq!(
                    draft.len(),
                    meta.tasks.len(),
                    "all of it is there (seed {})",
                    self.seed
                );
                let result = self.random_store_failure().map(|()| {
                    let name = format!("set-{snapshot}");
                    let key = meta.claim_key();
                    self.image_store.own_claims.keys.insert(key);
                    self.image_store
                        .checkpoints
                        .insert(name.clone(), (*meta, draft));
                    (name, 1)
                });
                self.schedule_soon(host_id, Event::CheckpointSealed { snapshot, result });
            }
            Output::AbandonCheckpoint { snapshot } => {
                self.image_store.drafts.remove(&snapshot);
            }
            other => self.carry_out_for_states(host_id, other),
        }
    }

    /// Carries out outputs about whole checkpoints.
    fn carry_out_for_checkpoints(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::MarkCheckpoints {
                checkpoints,
                has_ended,
                ..
            } => {
                let jobs: Vec<Tid> = checkpoints
                    .iter()
                    .filter_map(|name| Some(self.image_store.checkpoints.get(name)?.0.job))
                    .collect();
                for CheckpointEntry { name, .. } in self
                    .image_store
                    .checkpoint_entries()
                    .into_iter()
                    .filter(|name| jobs.contains(&name.job))
                {
                    if has_ended {
                        self.image_store.checkpoints_of_ended_jobs.insert(name)
                    } else {
                        self.image_store.checkpoints_of_ended_jobs.remove(&name)
                    };
                }
            }
            Output::MarkDamaged {
                checkpoint,
                why,
                rollback_job,
            } => {
                let older_checkpoint = self.image_store.older_name(&checkpoint, rollback_job);
                self.image_store
                    .marked_checkpoints
                    .insert(checkpoint.clone());
                if let Some(ClaimKey { job, .. }) = rollback_job {
                    let result = self.image_store.next_search_result(older_checkpoint);
                    let event = Event::OlderCheckpointFound {
                        job,
                        damaged_checkpoint: checkpoint,
                        why,
                        result,
                    };
                    self.schedule_soon(host_id, event);
                }
            }
            Output::RemoveCheckpoints {
                tid,
                id,
                selection,
                refusals,
                ..
            } => {
                let results = self.image_store.remove_checkpoints(selection, &refusals);
                self.schedule_soon(
                    host_id,
                    Event::CheckpointsRemoved {
                        tid,
                        id,
                        result: Ok(results),
                    },
                );
            }
            Output::DropCheckpoints { checkpoints } => {
                self.image_store.copies.retain(|(copy_host, name)| {
                    *copy_host != host_id || !checkpoints.contains(name)
                });
                if host_id == HostId::MASTER {
                    self.image_store
                        .checkpoints
                        .retain(|name, _| !checkpoints.contains(name));
                }
            }
            Output::ListCheckpoints { tid, id } => {
                self.schedule_soon(
                    host_id,
                    Event::CheckpointsListed {
                        tid,
                        id,
                        result: Ok(self.image_store.checkpoint_entries()),
                    },
                );
            }
            other => self.carry_out_for_copies(host_id, other),
        }
    }

    /// Carries out outputs about copies of checkpoints.
    fn carry_out_for_copies(&mut self, host_id: HostId, output: Output) {
        match output {
            Output::SendCopy {
                migration,
                checkpoint,
                receiver,
            } => {
                let result = self.random_failure().map(|()| 1);
                let is_expected = self
                    .nodes
                    .get(&receiver)
                    .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
                if is_expected && result.is_ok() {
                    self.image_store.copies.insert((receiver, checkpoint));
                }
                // Only the target reports the reason; the sender reports success.
                let sender_result = result
                    .clone()
                    .map_err(|_| Failure::Images("nothing more was taken".into()));
                if is_expected && !(self.image_store.hides_copy_errors && result.is_err()) {
                    self.schedule_soon(receiver, Event::ImagesReceived { migration, result });
                }
                self.schedule_soon(
                    host_id,
                    Event::ImagesSent {
                        migration,
                        result: sender_result,
                    },
                );
            }
            Output::DiscardCopy {
                migration,
                checkpoint,
            } => {
                self.nodes
                    .get_mut(&host_id)
                    .expect("it speaks")
                    .expected_images
                    .remove(&migration);
                self.image_store.copies.remove(&(host_id, checkpoint));
            }
            other => panic!("{other:?}"),
        }
    }

    /// Sends images to the host `receiver`. If `receiver` is `None`, reports the images as received
    /// on this host.
    fn deliver_images(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        receiver: Option<HostId>,
    ) {
        let result = self.random_failure().map(|()| 1);
        let Some(receiver) = receiver else {
            return self.schedule_soon(host_id, Event::ImagesReceived { migration, result });
        };
        let is_expected = self
            .nodes
            .get(&receiver)
            .is_some_and(|n| n.is_alive && n.expected_images.contains(&migration));
        if is_expected {
            let image = self.image_store.images[&(host_id, migration)].clone();
            self.image_store.images.insert((receiver, migration), image);
            self.schedule_soon(
                receiver,
                Event::ImagesReceived {
                    migration,
                    result: result.clone(),
                },
            );
        }
        self.schedule_soon(host_id, Event::ImagesSent { migration, result });
    }
}
