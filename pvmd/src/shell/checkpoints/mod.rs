//! The master's checkpoint store, and the record file next to the images of each task in a
//! checkpoint.
//!
//! Everything that may wait for a disk runs on blocking threads and reports its end as an event.

mod error;
mod removal;
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
use pvmd_machine::io::Event;
use pvmd_machine::{COPIES_MAX, CopyPolicy};
use sempa_proto::checkpoint::{CheckpointEntry, CheckpointMeta};
use sempa_proto::frame::{from_bytes, to_bytes};
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

/// Name of the file next to the images with the daemon's state of the task.
const PART_RECORD_FILE: &str = "sempa-part";
/// Size limit of the record file of a part, in bytes. For a program that writes its own
/// checkpoints, the file may include messages that the program had sent.
const PART_RECORD_BYTES_MAX: u64 = 1 << 30;

/// Largest number that can be set as the limit of complete checkpoints in a store: whenever a
/// checkpoint is added, all of them are listed.
const CHECKPOINT_LIMIT_MAX: usize = 4096;
/// Smallest number of bytes that can be set as the size limit of a store.
const STORE_LIMIT_BYTES_MIN: u64 = 1_000_000;

/// Settings of a store: its directory, the file of its key, its limits, and the hosts to which
/// checkpoints are copied.
#[derive(Clone, Debug)]
pub(crate) struct StoreSettings {
    dir: PathBuf,
    key: PathBuf,
    limits: StoreLimits,
    copies: CopyPolicy,
}

impl StoreSettings {
    /// Reads the settings from the environment: `SEMPA_STORE` and `SEMPA_STORE_KEY` (default: in
    /// the user's XDG directories); `SEMPA_STORE_SETS` and `SEMPA_STORE_BYTES`;
    /// `SEMPA_STORE_COPIES`.
    ///
    /// # Errors
    /// There is no location, or a value is invalid.
    pub(crate) fn from_env(
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<StoreSettings, StoreSettingsError> {
        let under = |name: &str, below: &str| {
            let set = env(name)
                .filter(|dir| dir.starts_with('/'))
                .map(PathBuf::from);
            set.or_else(|| {
                Some(PathBuf::from(env("HOME").filter(|home| home.starts_with('/'))?).join(below))
            })
        };
        let own = |variable: &'static str, dir: Option<PathBuf>, name: &str| {
            let path = env(variable)
                .map(PathBuf::from)
                .or_else(|| Some(dir?.join("sempa").join(name)));
            path.filter(|path| path.is_absolute())
                .ok_or(StoreSettingsError::NoLocation { variable })
        };
        let (limits, copies) = (limits(&env)?, copies(&env)?);
        Ok(StoreSettings {
            limits,
            copies,
            dir: own(
                "SEMPA_STORE",
                under("XDG_STATE_HOME", ".local/state"),
                "checkpoints",
            )?,
            key: own(
                "SEMPA_STORE_KEY",
                under("XDG_CONFIG_HOME", ".config"),
                "store.key",
            )?,
        })
    }

    pub(crate) fn copies(&self) -> &CopyPolicy {
        &self.copies
    }

    fn open(&self, vm: &str) -> Result<CheckpointStore, StoreError> {
        Ok(CheckpointStore::open(&self.dir, &self.key, self.limits)?.for_vm(vm))
    }

    /// Returns the highest task number in stored checkpoints for each host; these tids must not be
    /// assigned again. Empty if the store does not exist. Removes superfluous checkpoints first.
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
        // On failure the superfluous checkpoints stay listed.
        let _ = store.remove_expired(now, |_| false);
        let (sets, _) = store.list_checkpoints()?;
        for tid in sets.iter().flat_map(|set| &set.parts).map(|part| part.tid) {
            if let Some(home) = tid.birth_host() {
                let highest = highest_ids.entry(home).or_insert(0);
                *highest = tid.local_part().max(*highest);
            }
        }
        Ok(highest_ids)
    }
}

fn limits(env: impl Fn(&str) -> Option<String>) -> Result<StoreLimits, StoreSettingsError> {
    let mut limits = StoreLimits::default();
    if let Some(text) = env("SEMPA_STORE_SETS") {
        let sets = text
            .parse()
            .ok()
            .filter(|sets| (1..=CHECKPOINT_LIMIT_MAX).contains(sets));
        limits.checkpoints_max = sets.ok_or(StoreSettingsError::InvalidCheckpointLimit { text })?;
    }
    if let Some(text) = env("SEMPA_STORE_BYTES") {
        let bytes = text
            .parse()
            .ok()
            .filter(|bytes| *bytes >= STORE_LIMIT_BYTES_MIN);
        limits.bytes_max = bytes.ok_or(StoreSettingsError::InvalidSizeLimit { text })?;
    }
    Ok(limits)
}

/// Longest host name (HOST_NAME_MAX).
const HOST_NAME_MAX: usize = 64;

fn copies(env: impl Fn(&str) -> Option<String>) -> Result<CopyPolicy, StoreSettingsError> {
    let Some(text) = env("SEMPA_STORE_COPIES") else {
        return Ok(CopyPolicy::default());
    };
    let names: Vec<String> = text
        .split(',')
        .map(|name| name.trim().to_string())
        .collect();
    let plain = |name: &String| {
        (1..=HOST_NAME_MAX).contains(&name.len())
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
    };
    let different: BTreeSet<&String> = names.iter().collect();
    match text.trim().parse() {
        Ok(number) if number <= COPIES_MAX => Ok(CopyPolicy::Count(number)),
        Err(_)
            if names.iter().all(plain)
                && different.len() == names.len()
                && names.len() <= COPIES_MAX =>
        {
            Ok(CopyPolicy::Hosts(names))
        }
        _ => Err(StoreSettingsError::InvalidCopies { text }),
    }
}

/// The store and the operations in progress on it.
pub(crate) struct CheckpointService {
    paths: RuntimePaths,
    settings: Result<StoreSettings, StoreSettingsError>,
    inputs: InputSender,
    store: Arc<Mutex<Option<CheckpointStore>>>,
    drafts: Arc<Mutex<HashMap<SnapshotId, Arc<CheckpointDraft>>>>,
    open_checkpoints: Arc<Mutex<HashMap<u64, Arc<StoredCheckpoint>>>>,
    /// Marks whether the jobs of checkpoints have ended or run again, in the order in which they
    /// must be written.
    pending_marks: removal::PendingMarks,
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(|e| e.into_inner())
}

impl CheckpointService {
    /// Creates the service. The store is opened by the first operation.
    pub(crate) fn new(
        paths: RuntimePaths,
        settings: Result<StoreSettings, StoreSettingsError>,
        inputs: InputSender,
    ) -> CheckpointService {
        let (store, drafts, opened, marks) = Default::default();
        CheckpointService {
            paths,
            settings,
            inputs,
            store,
            drafts,
            open_checkpoints: opened,
            pending_marks: marks,
        }
    }

    /// True if the store exists, or if its settings are invalid. Must be checked before the store
    /// is opened, because that creates it.
    fn store_exists(&self) -> bool {
        self.settings.as_ref().map_or(true, |at| at.dir.exists())
    }

    /// Runs work with the store on a blocking thread and sends the event that it returns.
    fn spawn_reporting(
        &self,
        work: impl FnOnce(Result<CheckpointStore, CheckpointError>) -> Event + Send + 'static,
    ) {
        let inputs = self.inputs.clone();
        self.spawn(move |store| {
            let _ = inputs.blocking_send(Input::Event(work(store)));
        });
    }

    /// Runs work with the store on a blocking thread, in the caller's span.
    fn spawn(&self, work: impl FnOnce(Result<CheckpointStore, CheckpointError>) + Send + 'static) {
        self.spawn_after(None, work);
    }

    /// As [`CheckpointService::spawn`], but starts when another task has ended.
    fn spawn_after(
        &self,
        after: Option<JoinHandle<()>>,
        work: impl FnOnce(Result<CheckpointStore, CheckpointError>) + Send + 'static,
    ) {
        let open = self.store_opener();
        let span = tracing::Span::current();
        let work = move || span.in_scope(|| work(open()));
        match after {
            None => drop(tokio::task::spawn_blocking(work)),
            Some(after) => drop(tokio::spawn(async move {
                let _ = after.await;
                let _ = tokio::task::spawn_blocking(work).await;
            })),
        }
    }

    /// Returns a function that opens the store unless it is open. It may wait for the disk.
    fn store_opener(
        &self,
    ) -> impl FnOnce() -> Result<CheckpointStore, CheckpointError> + Send + 'static {
        let (store, whereabouts) = (self.store.clone(), self.settings.clone());
        let vm = self.paths.vm().to_string();
        move || {
            let at = whereabouts.map_err(CheckpointError::Settings)?;
            let mut store = lock(&store);
            match &*store {
                Some(store) => Ok(store.clone()),
                None => Ok(store
                    .insert(at.open(&vm).map_err(CheckpointError::OpenStore)?)
                    .clone()),
            }
        }
    }

    /// Returns a function that sends a checkpoint to the store of another host.
    pub(crate) fn send_copy(
        &self,
        name: String,
    ) -> impl FnOnce(RecordWriter<BulkConnection>, &RateLimit) -> Result<SentAmounts, Failure>
    + Send
    + 'static {
        let open = self.store_opener();
        move |out, rate| {
            let id: CheckpointId = name
                .parse()
                .map_err(|e: InvalidCheckpointId| Failure::Io(e.to_string()))?;
            let _in_span = info_span!("checkpoint", id = %id).entered();
            let store = open().map_err(|e| Failure::Io(e.to_string()))?;
            let set = store
                .open_checkpoint(&id)
                .map_err(|e| Failure::Io(e.to_string()))?;
            send_checkpoint(&set, out, rate)
        }
    }

    /// Returns a function that receives another host's checkpoint into the store, and then removes
    /// checkpoints that exceed the limits of the store.
    pub(crate) fn receive_copy(
        &self,
        name: String,
        now: Micros,
    ) -> impl FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send + 'static
    {
        let (open, inputs) = (self.store_opener(), self.inputs.clone());
        move |incoming| {
            let id: CheckpointId = name
                .parse()
                .map_err(|e: InvalidCheckpointId| Failure::Io(e.to_string()))?;
            let store = open().map_err(|e| Failure::Io(e.to_string()))?;
            let _in_span = info_span!("checkpoint", id = %id).entered();
            let bytes =
                receive_checkpoint(incoming, |made, bytes| store.begin_copy(id, made, bytes))?;
            removal::remove_superfluous(&store, now, &[], &inputs);
            Ok(bytes)
        }
    }

    /// Starts a checkpoint in the store. Reports [`Event::CheckpointBegun`].
    pub(crate) fn begin(&self, snapshot: SnapshotId, job: Tid, now: Micros) {
        let drafts = self.drafts.clone();
        let _in_span = info_span!("job", id = %job).entered();
        self.spawn_reporting(move |store| {
            let result = store.and_then(|store| {
                let draft = store.begin(job, now).map_err(CheckpointError::Begin)?;
                lock(&drafts).insert(snapshot, Arc::new(draft));
                Ok(())
            });
            let result = result.map_err(|e| e.to_string());
            Event::CheckpointBegun { snapshot, result }
        });
    }

    /// Adds the images of a task to a checkpoint. Reports [`Event::PartStored`].
    pub(crate) fn add_part(&self, snapshot: SnapshotId, migration: MigrationId, tid: Tid) {
        let (drafts, dir) = (self.drafts.clone(), self.paths.image_dir(migration));
        let _in_span = info_span!("migration", id = %migration).entered();
        self.spawn_reporting(move |_| {
            let draft = lock(&drafts).get(&snapshot).cloned();
            let added = draft
                .ok_or(CheckpointError::Abandoned)
                .and_then(|draft| draft.add(tid, &dir).map_err(CheckpointError::AddPart));
            let result = added.map(drop).map_err(|e| e.to_string());
            Event::PartStored { migration, result }
        });
    }

    /// Completes a checkpoint. Reports [`Event::CheckpointSealed`].
    pub(crate) fn seal(
        &self,
        snapshot: SnapshotId,
        meta: &CheckpointMeta,
        keep: Vec<String>,
        now: Micros,
    ) {
        let (drafts, meta) = (
            self.drafts.clone(),
            to_bytes(meta).map_err(CheckpointError::EncodeMeta),
        );
        let inputs = self.inputs.clone();
        self.spawn_reporting(move |store| {
            let draft = lock(&drafts).remove(&snapshot).and_then(Arc::into_inner);
            let result = draft.ok_or(CheckpointError::Abandoned).and_then(|draft| {
                let info = draft.finish(&meta?).map_err(CheckpointError::Finish)?;
                let _in_span = info_span!("checkpoint", id = %info.id).entered();
                // The checkpoint is complete even if the removal of others fails; the limits
                // are enforced again at the next checkpoint.
                match store {
                    Ok(store) => {
                        removal::remove_superfluous(&store, now, &keep, &inputs);
                    }
                    Err(why) => tracing::warn!("{why}"),
                }
                Ok((info.id.to_string(), info.bytes))
            });
            let result = result.map_err(|e| e.to_string());
            Event::CheckpointSealed { snapshot, result }
        });
    }

    /// Removes an incomplete checkpoint.
    pub(crate) fn abandon(&self, snapshot: SnapshotId) {
        let draft = lock(&self.drafts).remove(&snapshot);
        tokio::task::spawn_blocking(move || drop(draft));
    }

    /// Opens a checkpoint for reading. Reports [`Event::CheckpointOpened`].
    pub(crate) fn open(&self, restart: u64, name: String) {
        let open = self.open_checkpoints.clone();
        let _in_span = info_span!("checkpoint", id = %name).entered();
        self.spawn_reporting(move |store| {
            let result = store.and_then(|store| {
                let id: CheckpointId = name.parse().map_err(CheckpointError::InvalidName)?;
                let checkpoint = store
                    .open_checkpoint(&id)
                    .map_err(CheckpointError::OpenCheckpoint)?;
                let meta: CheckpointMeta = from_bytes(checkpoint.meta())
                    .map_err(|source| CheckpointError::DecodeMeta { name, source })?;
                lock(&open).insert(restart, Arc::new(checkpoint));
                Ok(meta)
            });
            let result = result.map_err(|e| e.to_string());
            Event::CheckpointOpened { restart, result }
        });
    }

    /// Returns a function that unpacks a task's part of an open checkpoint into a directory.
    pub(crate) fn unpack(
        &self,
        restart: u64,
        tid: Tid,
    ) -> impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static {
        let checkpoint = lock(&self.open_checkpoints).get(&restart).cloned();
        move |dir| {
            let checkpoint = checkpoint
                .ok_or_else(|| Failure::Images("the checkpoint is no longer open".into()))?;
            checkpoint
                .unpack(tid, dir)
                .map(drop)
                .map_err(|e| Failure::Images(e.to_string()))
        }
    }

    /// Closes a checkpoint opened by [`CheckpointService::open`].
    pub(crate) fn close(&self, restart: u64) {
        lock(&self.open_checkpoints).remove(&restart);
    }

    /// Lists all checkpoints. Reports [`Event::CheckpointsListed`].
    pub(crate) fn list(&self, tid: Tid, id: RequestId) {
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
            let listed =
                store.and_then(|store| store.list_checkpoints().map_err(CheckpointError::List));
            let result = listed.map_err(|e| e.to_string()).map(|(sets, broken)| {
                let whole = sets.into_iter().map(|set| CheckpointEntry {
                    name: set.id.to_string(),
                    job: set.job,
                    created: set.started,
                    tasks: u32::try_from(set.parts.len()).unwrap_or(u32::MAX),
                    bytes: set.bytes,
                    unusable_reason: None,
                    job_ended_at: set.job_ended_at,
                    copy_hosts: Vec::new(),
                });
                let broken = broken.into_iter().map(|(set, why)| CheckpointEntry {
                    name: set,
                    job: Tid::NONE,
                    created: Micros(0),
                    tasks: 0,
                    bytes: 0,
                    unusable_reason: Some(why.to_string()),
                    job_ended_at: None,
                    copy_hosts: Vec::new(),
                });
                whole.chain(broken).collect()
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

fn read_part(path: &Path) -> Result<SavedTask, Failure> {
    let bad = |why: String| Failure::Images(format!("{}: {why}", path.display()));
    let meta = std::fs::symlink_metadata(path).map_err(|e| bad(e.to_string()))?;
    if !meta.is_file() || meta.len() > PART_RECORD_BYTES_MAX {
        return Err(bad(format!(
            "a file of at most {PART_RECORD_BYTES_MAX} bytes was expected"
        )));
    }
    from_bytes(&std::fs::read(path).map_err(|e| bad(e.to_string()))?)
        .map_err(|e| bad(e.to_string()))
}

/// Returns a function that writes the record file next to the images.
pub(crate) fn write_part(
    record: Box<SavedTask>,
) -> impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static {
    move |dir| {
        let path = dir.join(PART_RECORD_FILE);
        let failed =
            |e: std::io::Error| Failure::Io(format!("cannot write {}: {e}", path.display()));
        let bytes = postcard::to_stdvec(&*record).map_err(|e| failed(std::io::Error::other(e)))?;
        if bytes.len() as u64 > PART_RECORD_BYTES_MAX {
            let why = format!(
                "the messages queued for the task and sent by it are {} bytes; a checkpoint takes at most \
                 {PART_RECORD_BYTES_MAX}",
                bytes.len()
            );
            return Err(Failure::Images(why));
        }
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        file.write_all(&bytes).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Result<(String, String), StoreSettingsError> {
        let env = |name: &str| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        };
        let at = StoreSettings::from_env(env)?;
        Ok((at.dir.display().to_string(), at.key.display().to_string()))
    }

    #[test]
    fn store_location_follows_environment_or_xdg() {
        let home = ("HOME", "/home/x");
        let own = (
            "/home/x/.local/state/sempa/checkpoints".into(),
            "/home/x/.config/sempa/store.key".into(),
        );
        assert_eq!(of(&[home]), Ok(own));
        let xdg = of(&[home, ("XDG_STATE_HOME", "/s"), ("XDG_CONFIG_HOME", "/c")]);
        assert_eq!(
            xdg,
            Ok(("/s/sempa/checkpoints".into(), "/c/sempa/store.key".into()))
        );
        let said = of(&[("SEMPA_STORE", "/shared/sets"), ("SEMPA_STORE_KEY", "/k")]);
        assert_eq!(said, Ok(("/shared/sets".into(), "/k".into())));
        assert!(of(&[]).is_err_and(|why| why.to_string().contains("SEMPA_STORE")));
        assert!(of(&[home, ("SEMPA_STORE", "relative")]).is_err());
    }

    /// Returns settings of a store in this directory, with further environment variables.
    fn whereabouts(dir: &Path, more: &[(&str, &str)]) -> Result<StoreSettings, StoreSettingsError> {
        let (store, key) = (dir.join("store"), dir.join("key"));
        StoreSettings::from_env(|name| match name {
            "SEMPA_STORE" => Some(store.display().to_string()),
            "SEMPA_STORE_KEY" => Some(key.display().to_string()),
            other => more
                .iter()
                .find(|(key, _)| *key == other)
                .map(|(_, value)| value.to_string()),
        })
    }

    #[test]
    fn store_keeps_the_newest_within_its_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let images = dir.path().join("images");
        std::fs::create_dir(&images).expect("made");
        std::fs::write(images.join("core-1.img"), [7; 1000]).expect("written");
        let at = whereabouts(
            dir.path(),
            &[("SEMPA_STORE_SETS", "2"), ("SEMPA_STORE_BYTES", "1000000")],
        )
        .expect("good");
        assert_eq!(
            at.limits,
            StoreLimits {
                checkpoints_max: 2,
                bytes_max: 1_000_000
            }
        );
        let store = at.open("pvm").expect("a store");
        let tid = Tid::task(HostId::MASTER, 1).expect("in range");
        for second in 1..=4 {
            let draft = store.begin(tid, Micros(second * 1_000_000)).expect("room");
            draft.add(tid, &images).expect("added");
            draft.finish(b"").expect("complete");
            store
                .remove_expired(Micros(second * 1_000_000), |_| false)
                .expect("tidied");
        }
        let made: Vec<Micros> = store
            .list_checkpoints()
            .expect("listed")
            .0
            .iter()
            .map(|set| set.started)
            .collect();
        assert_eq!(
            (made.len(), made.iter().min()),
            (2, Some(&Micros(3_000_000)))
        );
    }

    /// Without settings the defaults apply; an invalid value yields an error that names it.
    #[test]
    fn invalid_limits_are_refused_by_name() {
        let dir = Path::new("/nowhere");
        let usual = whereabouts(dir, &[]).expect("good");
        assert_eq!(
            (usual.limits, usual.copies),
            (StoreLimits::default(), CopyPolicy::Count(0))
        );
        let wrong = [
            ("SEMPA_STORE_SETS", ["0", "-1", "many", "4097"]),
            ("SEMPA_STORE_BYTES", ["0", "999999", "-1", "1G"]),
        ];
        let long = "h,".repeat(17);
        let copies = [("SEMPA_STORE_COPIES", ["17", "-1,", "h2,,h3", &*long])];
        for (name, values) in wrong.into_iter().chain(copies) {
            for value in values {
                let why = whereabouts(dir, &[(name, value)]).expect_err("no limit");
                let why = why.to_string();
                assert!(why.contains(name) && why.contains(value), "{why}");
            }
        }
    }

    #[test]
    fn copies_are_a_number_or_a_list_of_hosts() {
        let dir = Path::new("/nowhere");
        let copies =
            |text: &str| whereabouts(dir, &[("SEMPA_STORE_COPIES", text)]).map(|at| at.copies);
        assert_eq!(copies("2"), Ok(CopyPolicy::Count(2)));
        assert_eq!(copies("0"), Ok(CopyPolicy::Count(0)));
        assert_eq!(
            copies("h2, h3.lab"),
            Ok(CopyPolicy::Hosts(vec!["h2".into(), "h3.lab".into()]))
        );
        assert!(copies("h2,h2").is_err() && copies("").is_err() && copies("h 2").is_err());
    }
}
