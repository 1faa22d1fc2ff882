//! The master's checkpoint store, and the record file next to the images of each task in a
//! checkpoint.
//!
//! Operations that may wait for a disk run on blocking threads. Most of them report their result as
//! an event.

mod claims;
mod error;
mod origin;
mod removal;
pub(crate) use claims::ClaimIdentity;
pub(crate) use error::{CheckpointError, StoreSettingsError};

use super::bulk_tcp::{BulkConnection, RecordReader, RecordWriter};
use super::checkpoint_copies::{receive_checkpoint, send_checkpoint};
use super::image_transfer::SentAmounts;
use super::input::{Input, InputSender};
use super::rate_limit::RateLimit;
use checkpoint::store::{
    CheckpointDraft, CheckpointId, CheckpointStore, InvalidCheckpointId, StoreError, StoreLimits,
    StoredCheckpoint,
};
use checkpoint_protocol::SnapshotId;
use claims::{ClaimFailure, JobClaims};
use pvmd_machine::io::Event;
use pvmd_machine::{COPIES_MAX, CopyPolicy};
use sempa_proto::checkpoint::{
    CheckpointEntry, CheckpointMeta, ClaimKey, RestartFailure, StoreFailure,
};
use sempa_proto::frame::to_bytes;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::Failure;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tracing::info_span;

/// Name of the file with the daemon's state of the task; it is in the folder of the task's images.
const PART_RECORD_FILE: &str = "sempa-part";
/// Maximum size of the record file of a part. If a program writes its own checkpoints, the file may
/// include messages that the program has sent.
const PART_RECORD_BYTES_MAX: u64 = 1 << 30;

/// Highest value that the user can set as the maximum number of complete checkpoints in a store.
/// The value is bounded because all checkpoints are listed whenever a checkpoint is added.
const CHECKPOINT_LIMIT_MAX: usize = 4096;
/// Lowest value that the user can set as the size limit of a store.
const STORE_LIMIT_BYTES_MIN: u64 = 1_000_000;

/// Settings of a store: its directory, its key file, its limits, and the hosts to which checkpoints
/// are copied.
#[derive(Clone, Debug)]
pub(crate) struct StoreSettings {
    dir: PathBuf,
    key_file: PathBuf,
    limits: StoreLimits,
    copies: CopyPolicy,
}

impl StoreSettings {
    /// Reads the settings from the environment: `SEMPA_STORE` and `SEMPA_STORE_KEY` (by default,
    /// paths in the user's XDG directories), `SEMPA_STORE_SETS`, `SEMPA_STORE_BYTES` and
    /// `SEMPA_STORE_COPIES`.
    ///
    /// # Errors
    /// There is no location, or a value is invalid.
    pub(crate) fn from_env(
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, StoreSettingsError> {
        let xdg_dir = |name: &str, home_subdir: &str| {
            let variable_dir = env(name)
                .filter(|dir| dir.starts_with('/'))
                .map(PathBuf::from);
            variable_dir.or_else(|| {
                Some(
                    PathBuf::from(env("HOME").filter(|home| home.starts_with('/'))?)
                        .join(home_subdir),
                )
            })
        };
        let configured_path = |variable: &'static str, dir: Option<PathBuf>, name: &str| {
            let path = env(variable)
                .map(PathBuf::from)
                .or_else(|| Some(dir?.join("sempa").join(name)));
            path.filter(|path| path.is_absolute())
                .ok_or(StoreSettingsError::NoLocation { variable })
        };
        let (limits, copies) = (limits_from_env(&env)?, copies(&env)?);
        Ok(Self {
            limits,
            copies,
            dir: configured_path(
                "SEMPA_STORE",
                xdg_dir("XDG_STATE_HOME", ".local/state"),
                "checkpoints",
            )?,
            key_file: configured_path(
                "SEMPA_STORE_KEY",
                xdg_dir("XDG_CONFIG_HOME", ".config"),
                "store.key",
            )?,
        })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn copies(&self) -> &CopyPolicy {
        &self.copies
    }

    fn open(&self, vm: &str) -> Result<CheckpointStore, StoreError> {
        Ok(CheckpointStore::open(&self.dir, &self.key_file, self.limits)?.for_vm(vm))
    }

    /// Returns the highest task number in the stored checkpoints for each host. No task number up
    /// to this number may be assigned again. Empty if the store does not exist. Removes superfluous
    /// checkpoints before reading the numbers.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn highest_task_ids(
        &self,
        vm: &str,
        now: Micros,
    ) -> Result<BTreeMap<HostId, u32>, StoreError> {
        let mut highest_ids = BTreeMap::new();
        // Opening a store that does not exist would create it.
        if !self.dir.is_dir() {
            return Ok(highest_ids);
        }
        let store = self.open(vm)?;
        // If the removal fails, the superfluous checkpoints are listed, too.
        let _ = store.remove_expired(now, |_| false);
        let (checkpoints, _) = store.list_checkpoints()?;
        for tid in checkpoints
            .iter()
            .flat_map(|checkpoint| &checkpoint.parts)
            .map(|part| part.tid)
        {
            if let Some(birth_host) = tid.birth_host() {
                let highest_id = highest_ids.entry(birth_host).or_insert(0);
                *highest_id = tid.local_part().max(*highest_id);
            }
        }
        Ok(highest_ids)
    }
}

fn limits_from_env(
    env: impl Fn(&str) -> Option<String>,
) -> Result<StoreLimits, StoreSettingsError> {
    let mut limits = StoreLimits::default();
    if let Some(text) = env("SEMPA_STORE_SETS") {
        let checkpoints_max = text
            .parse()
            .ok()
            .filter(|checkpoints_max| (1..=CHECKPOINT_LIMIT_MAX).contains(checkpoints_max));
        limits.checkpoints_max =
            checkpoints_max.ok_or(StoreSettingsError::InvalidCheckpointLimit { text })?;
    }
    if let Some(text) = env("SEMPA_STORE_BYTES") {
        let bytes_max = text
            .parse()
            .ok()
            .filter(|bytes_max| *bytes_max >= STORE_LIMIT_BYTES_MIN);
        limits.bytes_max = bytes_max.ok_or(StoreSettingsError::InvalidSizeLimit { text })?;
    }
    Ok(limits)
}

/// Maximum length of a host name in bytes (`HOST_NAME_MAX` of Linux).
const HOST_NAME_BYTES_MAX: usize = 64;

fn copies(env: impl Fn(&str) -> Option<String>) -> Result<CopyPolicy, StoreSettingsError> {
    let Some(text) = env("SEMPA_STORE_COPIES") else {
        return Ok(CopyPolicy::default());
    };
    let names: Vec<String> = text
        .split(',')
        .map(|name| name.trim().to_string())
        .collect();
    let is_host_name = |name: &String| {
        (1..=HOST_NAME_BYTES_MAX).contains(&name.len())
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
    };
    let distinct_names: BTreeSet<&String> = names.iter().collect();
    match text.trim().parse() {
        Ok(host_count) if host_count <= COPIES_MAX => Ok(CopyPolicy::Count(host_count)),
        Err(_)
            if names.iter().all(is_host_name)
                && distinct_names.len() == names.len()
                && names.len() <= COPIES_MAX =>
        {
            Ok(CopyPolicy::Hosts(names))
        }
        _ => Err(StoreSettingsError::InvalidCopies { text }),
    }
}

/// The store and the operations that are in progress on the store.
pub(crate) struct CheckpointService {
    paths: RuntimePaths,
    settings: Result<StoreSettings, StoreSettingsError>,
    inputs: InputSender,
    store: Arc<Mutex<Option<CheckpointStore>>>,
    drafts: Arc<Mutex<HashMap<SnapshotId, Arc<CheckpointDraft>>>>,
    open_checkpoints: Arc<Mutex<HashMap<u64, Arc<StoredCheckpoint>>>>,
    /// Marks that are to be written into checkpoints: the job of the checkpoint has ended or runs
    /// again. The marks must be written in the order of the queue.
    pending_marks: removal::PendingMarks,
    claims: JobClaims,
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(|e| e.into_inner())
}

impl CheckpointService {
    /// Creates the service. The store is opened by the first operation.
    pub(crate) fn new(
        paths: RuntimePaths,
        settings: Result<StoreSettings, StoreSettingsError>,
        claim_identity: ClaimIdentity,
        inputs: InputSender,
    ) -> Self {
        let (store, drafts, open_checkpoints, pending_marks) = Default::default();
        Self {
            paths,
            settings,
            inputs,
            store,
            drafts,
            open_checkpoints,
            pending_marks,
            claims: JobClaims::new(claim_identity),
        }
    }

    /// True if the directory of the store exists, or if the settings are invalid. Must be called
    /// before the store is opened, because opening creates the store.
    fn store_exists(&self) -> bool {
        self.settings
            .as_ref()
            .map_or(true, |settings| settings.dir.exists())
    }

    /// Runs `work` with the store on a blocking thread and sends the event that `work` returns to
    /// the main loop.
    fn spawn_reporting(
        &self,
        work: impl FnOnce(Result<CheckpointStore, CheckpointError>) -> Event + Send + 'static,
    ) {
        let inputs = self.inputs.clone();
        self.spawn_work(move |store| {
            let _ = inputs.blocking_send(Input::Event(work(store)));
        });
    }

    /// Runs `work` with the store on a blocking thread, in the caller's span.
    fn spawn_work(
        &self,
        work: impl FnOnce(Result<CheckpointStore, CheckpointError>) + Send + 'static,
    ) {
        self.spawn_after(None, work);
    }

    /// Does the same as [`CheckpointService::spawn_work`], but starts `work` when the tokio task
    /// `predecessor` has ended.
    fn spawn_after(
        &self,
        predecessor: Option<JoinHandle<()>>,
        work: impl FnOnce(Result<CheckpointStore, CheckpointError>) + Send + 'static,
    ) {
        let open_store = self.store_opener();
        let span = tracing::Span::current();
        let work = move || span.in_scope(|| work(open_store()));
        match predecessor {
            None => drop(tokio::task::spawn_blocking(work)),
            Some(predecessor) => drop(tokio::spawn(async move {
                let _ = predecessor.await;
                let _ = tokio::task::spawn_blocking(work).await;
            })),
        }
    }

    /// Returns a function that opens the store if it is not open yet, and returns the store. This
    /// function may wait for the disk.
    fn store_opener(
        &self,
    ) -> impl FnOnce() -> Result<CheckpointStore, CheckpointError> + Send + 'static {
        let (store, settings_result) = (self.store.clone(), self.settings.clone());
        let vm = self.paths.vm_name().to_string();
        move || {
            let settings = settings_result.map_err(CheckpointError::Settings)?;
            let mut store = lock(&store);
            match &*store {
                Some(store) => Ok(store.clone()),
                None => Ok(store
                    .insert(settings.open(&vm).map_err(CheckpointError::OpenStore)?)
                    .clone()),
            }
        }
    }

    /// Returns a function that sends a checkpoint to the store of another host.
    pub(crate) fn copy_sender(
        &self,
        name: String,
    ) -> impl FnOnce(RecordWriter<BulkConnection>, &RateLimit) -> Result<SentAmounts, Failure>
    + Send
    + 'static {
        let open_store = self.store_opener();
        move |writer, rate| {
            let id: CheckpointId = name
                .parse()
                .map_err(|e: InvalidCheckpointId| Failure::Io(e.to_string()))?;
            let _in_span = info_span!("checkpoint", id = %id).entered();
            let store = open_store().map_err(|e| Failure::Io(e.to_string()))?;
            let checkpoint = store
                .open_checkpoint(&id)
                .map_err(|e| Failure::Io(e.to_string()))?;
            send_checkpoint(&checkpoint, writer, rate)
        }
    }

    /// Returns a function that receives another host's checkpoint into the store, and then removes
    /// checkpoints that exceed the limits of the store. This function returns the number of bytes
    /// received.
    pub(crate) fn copy_receiver(
        &self,
        name: String,
        now: Micros,
    ) -> impl FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send + 'static
    {
        let (open_store, inputs) = (self.store_opener(), self.inputs.clone());
        move |reader| {
            let id: CheckpointId = name
                .parse()
                .map_err(|e: InvalidCheckpointId| Failure::Io(e.to_string()))?;
            let store = open_store().map_err(|e| Failure::Io(e.to_string()))?;
            let _in_span = info_span!("checkpoint", id = %id).entered();
            let bytes = receive_checkpoint(reader, |started, bytes| {
                store.begin_copy(id, started, bytes)
            })?;
            removal::remove_superfluous(&store, now, &[], &inputs);
            Ok(bytes)
        }
    }

    /// Begins a checkpoint of `job` in the store. Reports [`Event::CheckpointBegun`].
    pub(crate) fn begin_checkpoint(&self, snapshot: SnapshotId, job: Tid, now: Micros) {
        let drafts = self.drafts.clone();
        let _in_span = info_span!("job", id = %job).entered();
        self.spawn_reporting(move |store| {
            let result = store.and_then(|store| {
                let draft = store.begin(job, now).map_err(CheckpointError::Begin)?;
                lock(&drafts).insert(snapshot, Arc::new(draft));
                Ok(())
            });
            let result = result.map_err(StoreFailure::from);
            Event::CheckpointBegun { snapshot, result }
        });
    }

    /// Adds the images of a task to a checkpoint. Reports [`Event::PartStored`].
    pub(crate) fn add_part(&self, snapshot: SnapshotId, migration: MigrationId, tid: Tid) {
        let (drafts, dir) = (self.drafts.clone(), self.paths.image_dir(migration));
        let _in_span = info_span!("migration", id = %migration).entered();
        self.spawn_reporting(move |_| {
            let draft = lock(&drafts).get(&snapshot).cloned();
            let add_result = draft
                .ok_or(CheckpointError::Abandoned)
                .and_then(|draft| draft.add_task(tid, &dir).map_err(CheckpointError::AddPart));
            let result = add_result.map(drop).map_err(StoreFailure::from);
            Event::PartStored { migration, result }
        });
    }

    /// Completes a checkpoint, and claims the job if this is its first one. Then removes
    /// checkpoints that exceed the limits of the store, except `kept_checkpoints`. Reports
    /// [`Event::CheckpointSealed`].
    pub(crate) fn seal(
        &self,
        snapshot: SnapshotId,
        meta: &CheckpointMeta,
        kept_checkpoints: Vec<String>,
        now: Micros,
    ) {
        let key = meta.claim_key();
        let (drafts, meta) = (
            self.drafts.clone(),
            to_bytes(meta).map_err(CheckpointError::EncodeMeta),
        );
        let (inputs, claims) = (self.inputs.clone(), self.claims.clone());
        self.spawn_reporting(move |store| {
            let draft = lock(&drafts).remove(&snapshot).and_then(Arc::into_inner);
            // Another virtual machine that has taken over the job writes its checkpoints now.
            if let Ok(store) = &store
                && let Err(failure) = claims.confirm_claim(store, key, &inputs)
            {
                let result = Err(failure.into());
                return Event::CheckpointSealed { snapshot, result };
            }
            let result = draft.ok_or(CheckpointError::Abandoned).and_then(|draft| {
                let info = draft.finish(&meta?).map_err(CheckpointError::Finish)?;
                let _in_span = info_span!("checkpoint", id = %info.id).entered();
                // If the removal of other checkpoints fails, this checkpoint is complete all the
                // same, and the limits are enforced at the next checkpoint.
                match store {
                    Ok(store) => {
                        claims.claim_if_new(&store, key, now, &inputs);
                        removal::remove_superfluous(&store, now, &kept_checkpoints, &inputs);
                    }
                    Err(why) => tracing::warn!("{why}"),
                }
                Ok((info.id.to_string(), info.bytes))
            });
            let result = result.map_err(StoreFailure::from);
            Event::CheckpointSealed { snapshot, result }
        });
    }

    /// Deletes the draft of an incomplete checkpoint.
    pub(crate) fn abandon_draft(&self, snapshot: SnapshotId) {
        let draft = lock(&self.drafts).remove(&snapshot);
        tokio::task::spawn_blocking(move || drop(draft));
    }

    /// Opens a checkpoint for reading, and claims its job; by force if `is_forced` is true.
    /// `vm_created_at` is the creation time of this virtual machine. Reports
    /// [`Event::CheckpointOpened`].
    pub(crate) fn open_checkpoint(
        &self,
        restart: u64,
        name: String,
        (vm_created_at, now): (Micros, Micros),
        is_forced: bool,
    ) {
        let (open_checkpoints, inputs) = (self.open_checkpoints.clone(), self.inputs.clone());
        let claims = self.claims.clone();
        let _in_span = info_span!("checkpoint", id = %name).entered();
        self.spawn_reporting(move |store| {
            let open_result = store.and_then(|store| {
                let id: CheckpointId = name.parse().map_err(CheckpointError::InvalidName)?;
                let checkpoint = store.open_checkpoint(&id).map_err(|error| {
                    report_damage(&inputs, restart, &error);
                    CheckpointError::OpenCheckpoint(error)
                })?;
                let meta = CheckpointMeta::decode(checkpoint.description())
                    .map_err(|source| CheckpointError::DecodeMeta { name, source })?;
                let is_claimed = store
                    .read_claim(meta.claim_key())
                    .map_err(CheckpointError::Claim)?
                    .is_some();
                Ok((store, checkpoint, meta, is_claimed))
            });
            let checked_result = open_result
                .map_err(RestartFailure::from)
                .and_then(|opened| {
                    let (.., meta, is_claimed) = &opened;
                    // A claim says more about the job than its virtual machine does.
                    if !is_claimed && meta.vm_start_time != vm_created_at {
                        origin::check_origin(meta.vm_start_time, is_forced)?;
                    }
                    Ok(opened)
                });
            let result = match checked_result {
                Err(failure) => Err(failure),
                Ok((store, checkpoint, meta, _)) => {
                    let key = meta.claim_key();
                    claims.record_restart(restart, key);
                    match claims.claim_job(&store, key, now, is_forced) {
                        Err(failure) => {
                            if let ClaimFailure::RunsElsewhere { holder, .. } = &failure {
                                claims.report_take_over(key, holder.clone(), &inputs);
                            }
                            Err(failure.into())
                        }
                        Ok(is_new) => {
                            if is_new {
                                claims.record_restart_only(key);
                            }
                            lock(&open_checkpoints).insert(restart, Arc::new(checkpoint));
                            Ok(meta)
                        }
                    }
                }
            };
            Event::CheckpointOpened {
                restart_number: restart,
                result,
            }
        });
    }

    /// Returns a function that unpacks a task's part of an open checkpoint into a directory.
    pub(crate) fn part_unpacker(
        &self,
        restart: u64,
        tid: Tid,
    ) -> impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static {
        let checkpoint = lock(&self.open_checkpoints).get(&restart).cloned();
        let inputs = self.inputs.clone();
        move |dir| {
            let checkpoint = checkpoint
                .ok_or_else(|| Failure::Images("the checkpoint is no longer open".into()))?;
            checkpoint.unpack_task(tid, dir).map(drop).map_err(|error| {
                report_damage(&inputs, restart, &error);
                Failure::Images(error.to_string())
            })
        }
    }

    /// Marks a checkpoint as damaged. If `rollback_job` is `Some`, also finds the next older
    /// checkpoint of this job and reports it as [`Event::OlderCheckpointFound`].
    pub(crate) fn mark_damaged(&self, name: String, why: String, rollback_job: Option<ClaimKey>) {
        let inputs = self.inputs.clone();
        let _in_span = info_span!("checkpoint", id = %name).entered();
        self.spawn_work(move |store| {
            let find_older = |key: Option<ClaimKey>| {
                let (store, id) = (store?, name.parse().map_err(CheckpointError::InvalidName)?);
                // Without the mark the checkpoint is only refused again when it is read again.
                store
                    .mark_damaged(&id, Some(&why))
                    .unwrap_or_else(|error| tracing::warn!("{error}"));
                let Some(key) = key else { return Ok(None) };
                let is_same_job = |description: &[u8]| {
                    CheckpointMeta::decode(description).is_ok_and(|meta| meta.claim_key() == key)
                };
                store
                    .find_older_checkpoint(&id, key.job, is_same_job)
                    .map_err(CheckpointError::List)
            };
            let result = find_older(rollback_job);
            if let Err(error) = &result {
                tracing::warn!("{error}");
            }
            let Some(ClaimKey { job, .. }) = rollback_job else {
                return;
            };
            let _ = inputs.blocking_send(Input::Event(Event::OlderCheckpointFound {
                job,
                damaged_checkpoint: name,
                why,
                result: result
                    .map(|older_id| older_id.map(|id| id.to_string()))
                    .map_err(StoreFailure::from),
            }));
        });
    }

    /// Closes a checkpoint opened by [`CheckpointService::open_checkpoint`]. If `keeps_claim` is
    /// false, releases the job, unless it was claimed before the checkpoint was opened.
    pub(crate) fn close_checkpoint(&self, restart: u64, keeps_claim: bool) {
        lock(&self.open_checkpoints).remove(&restart);
        self.end_restart_claim(restart, keeps_claim);
    }

    /// Lists all checkpoints of the store, also the unreadable ones. Reports
    /// [`Event::CheckpointsListed`].
    pub(crate) fn list_checkpoints(&self, tid: Tid, id: RequestId) {
        if !self.store_exists() {
            let event = Event::CheckpointsListed {
                tid,
                id,
                result: Ok(Vec::new()),
            };
            let inputs = self.inputs.clone();
            tokio::spawn(async move { inputs.send(Input::Event(event)).await });
            return;
        }
        self.spawn_reporting(move |store| {
            let list_result =
                store.and_then(|store| store.list_checkpoints().map_err(CheckpointError::List));
            let result =
                list_result
                    .map_err(StoreFailure::from)
                    .map(|(checkpoints, unreadable_entries)| {
                        let readable_entries =
                            checkpoints.into_iter().map(|checkpoint| CheckpointEntry {
                                name: checkpoint.id.to_string(),
                                job: checkpoint.job,
                                created_at: checkpoint.started_at,
                                task_count: u32::try_from(checkpoint.parts.len())
                                    .unwrap_or(u32::MAX),
                                stored_bytes: checkpoint.bytes,
                                unusable_reason: checkpoint.damage.map(|why| {
                                    format!("it was damaged when it was last read: {why}")
                                }),
                                job_ended_at: checkpoint.job_ended_at,
                                copy_hosts: Vec::new(),
                            });
                        let unreadable_entries =
                            unreadable_entries.into_iter().map(|(checkpoint, why)| {
                                CheckpointEntry {
                                    name: checkpoint,
                                    job: Tid::NONE,
                                    created_at: Micros(0),
                                    task_count: 0,
                                    stored_bytes: 0,
                                    unusable_reason: Some(why.to_string()),
                                    job_ended_at: None,
                                    copy_hosts: Vec::new(),
                                }
                            });
                        readable_entries.chain(unreadable_entries).collect()
                    });
            Event::CheckpointsListed { tid, id, result }
        });
    }

    /// Reads the record file next to the images of a task. Reports [`Event::PartRead`].
    pub(crate) fn read_part(&self, migration: MigrationId) {
        let (path, inputs) = (
            self.paths.image_dir(migration).join(PART_RECORD_FILE),
            self.inputs.clone(),
        );
        tokio::task::spawn_blocking(move || {
            let _in_span = info_span!("migration", id = %migration).entered();
            let result = read_part(&path);
            let _ = inputs.blocking_send(Input::Event(Event::PartRead { migration, result }));
        });
    }
}

/// Reports that a restart has found its checkpoint damaged or missing, if that is the reason for
/// the error. Must be called before the error itself is reported.
fn report_damage(inputs: &InputSender, restart_number: u64, error: &StoreError) {
    if error.is_damage() || error.is_missing() {
        let why = error.to_string();
        let event = Event::CheckpointDamaged {
            restart_number,
            why,
            is_missing: error.is_missing(),
        };
        let _ = inputs.blocking_send(Input::Event(event));
    }
}

fn read_part(path: &Path) -> Result<SavedTask, Failure> {
    let images_failure = |why: String| Failure::Images(format!("{}: {why}", path.display()));
    let file_metadata =
        std::fs::symlink_metadata(path).map_err(|e| images_failure(e.to_string()))?;
    if !file_metadata.is_file() || file_metadata.len() > PART_RECORD_BYTES_MAX {
        return Err(images_failure(format!(
            "a file of at most {PART_RECORD_BYTES_MAX} bytes was expected"
        )));
    }
    let bytes = std::fs::read(path).map_err(|e| images_failure(e.to_string()))?;
    SavedTask::decode(&bytes).map_err(|e| images_failure(e.to_string()))
}

/// Returns a function that writes the record file into the folder of a task's images.
pub(crate) fn part_writer(
    record: Box<SavedTask>,
) -> impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static {
    move |dir| {
        let path = dir.join(PART_RECORD_FILE);
        let write_failure =
            |e: std::io::Error| Failure::Io(format!("cannot write {}: {e}", path.display()));
        let bytes =
            postcard::to_stdvec(&*record).map_err(|e| write_failure(std::io::Error::other(e)))?;
        if bytes.len() as u64 > PART_RECORD_BYTES_MAX {
            let reason = format!(
                "the messages queued for the task and sent by it are {} bytes; a checkpoint takes at most \
                 {PART_RECORD_BYTES_MAX}",
                bytes.len()
            );
            return Err(Failure::Images(reason));
        }
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(write_failure)?;
        file.write_all(&bytes).map_err(write_failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store_location(vars: &[(&str, &str)]) -> Result<(String, String), StoreSettingsError> {
        let env = |name: &str| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        };
        let settings = StoreSettings::from_env(env)?;
        Ok((
            settings.dir.display().to_string(),
            settings.key_file.display().to_string(),
        ))
    }

    #[test]
    fn store_location_follows_environment_or_xdg() {
        let home_variable = ("HOME", "/home/x");
        let home_location = (
            "/home/x/.local/state/sempa/checkpoints".into(),
            "/home/x/.config/sempa/store.key".into(),
        );
        assert_eq!(store_location(&[home_variable]), Ok(home_location));
        let xdg_location = store_location(&[
            home_variable,
            ("XDG_STATE_HOME", "/s"),
            ("XDG_CONFIG_HOME", "/c"),
        ]);
        assert_eq!(
            xdg_location,
            Ok(("/s/sempa/checkpoints".into(), "/c/sempa/store.key".into()))
        );
        let set_location =
            store_location(&[("SEMPA_STORE", "/shared/sets"), ("SEMPA_STORE_KEY", "/k")]);
        assert_eq!(set_location, Ok(("/shared/sets".into(), "/k".into())));
        assert!(store_location(&[]).is_err_and(|why| why.to_string().contains("SEMPA_STORE")));
        assert!(store_location(&[home_variable, ("SEMPA_STORE", "relative")]).is_err());
    }

    /// Returns settings of a store in this directory. `variables` are additional environment
    /// variables.
    fn settings_in(
        dir: &Path,
        variables: &[(&str, &str)],
    ) -> Result<StoreSettings, StoreSettingsError> {
        let (store_dir, key) = (dir.join("store"), dir.join("key"));
        StoreSettings::from_env(|name| match name {
            "SEMPA_STORE" => Some(store_dir.display().to_string()),
            "SEMPA_STORE_KEY" => Some(key.display().to_string()),
            variable_name => variables
                .iter()
                .find(|(key, _)| *key == variable_name)
                .map(|(_, value)| value.to_string()),
        })
    }

    #[test]
    fn store_keeps_the_newest_within_its_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let images_dir = dir.path().join("images");
        std::fs::create_dir(&images_dir).expect("made");
        std::fs::write(images_dir.join("core-1.img"), [7; 1000]).expect("written");
        let settings = settings_in(
            dir.path(),
            &[("SEMPA_STORE_SETS", "2"), ("SEMPA_STORE_BYTES", "1000000")],
        )
        .expect("good");
        assert_eq!(
            settings.limits,
            StoreLimits {
                checkpoints_max: 2,
                bytes_max: 1_000_000
            }
        );
        let store = settings.open("pvm").expect("a store");
        let tid = Tid::for_task(HostId::MASTER, 1).expect("in range");
        for second in 1..=4 {
            let draft = store.begin(tid, Micros(second * 1_000_000)).expect("room");
            draft.add_task(tid, &images_dir).expect("added");
            draft.finish(b"").expect("complete");
            store
                .remove_expired(Micros(second * 1_000_000), |_| false)
                .expect("tidied");
        }
        let start_times: Vec<Micros> = store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|checkpoint| checkpoint.started_at)
            .collect();
        assert_eq!(
            (start_times.len(), start_times.iter().min()),
            (2, Some(&Micros(3_000_000)))
        );
    }

    /// Without environment variables the defaults apply. An invalid value yields an error that
    /// contains the name of the variable and the value.
    #[test]
    fn invalid_limits_are_refused_by_name() {
        let dir = Path::new("/nowhere");
        let default_settings = settings_in(dir, &[]).expect("good");
        assert_eq!(
            (default_settings.limits, default_settings.copies),
            (StoreLimits::default(), CopyPolicy::Count(0))
        );
        let invalid_values = [
            ("SEMPA_STORE_SETS", ["0", "-1", "many", "4097"]),
            ("SEMPA_STORE_BYTES", ["0", "999999", "-1", "1G"]),
        ];
        let too_many_hosts = "h,".repeat(17);
        let invalid_copies = [(
            "SEMPA_STORE_COPIES",
            ["17", "-1,", "h2,,h3", &*too_many_hosts],
        )];
        for (name, values) in invalid_values.into_iter().chain(invalid_copies) {
            for value in values {
                let error_text = settings_in(dir, &[(name, value)]).expect_err("no limit");
                let error_text = error_text.to_string();
                assert!(
                    error_text.contains(name) && error_text.contains(value),
                    "{error_text}"
                );
            }
        }
    }

    #[test]
    fn copies_are_a_number_or_a_list_of_hosts() {
        let dir = Path::new("/nowhere");
        let parse_copies = |text: &str| {
            settings_in(dir, &[("SEMPA_STORE_COPIES", text)]).map(|settings| settings.copies)
        };
        assert_eq!(parse_copies("2"), Ok(CopyPolicy::Count(2)));
        assert_eq!(parse_copies("0"), Ok(CopyPolicy::Count(0)));
        assert_eq!(
            parse_copies("h2, h3.lab"),
            Ok(CopyPolicy::Hosts(vec!["h2".into(), "h3.lab".into()]))
        );
        assert!(
            parse_copies("h2,h2").is_err()
                && parse_copies("").is_err()
                && parse_copies("h 2").is_err()
        );
    }
}
