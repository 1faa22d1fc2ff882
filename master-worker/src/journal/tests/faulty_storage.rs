//! A folder in memory that fails, ends and loses power at a given call.

use crate::journal::storage::{Storage, StoredFile, StoredReader, TEMPORARY_PREFIX};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::io::{self, Cursor};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Bytes that a disk writes all or not at all. Small, so that each record has several.
const SECTOR_BYTES: usize = 16;

/// What the disk has after an end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    /// The process was killed: the system keeps all that was written.
    Kill,
    /// Power was lost: only what was synced is there.
    Unsynced,
    /// Power was lost while the last change of each file was written; its first bytes are there.
    TornAt(usize),
    /// Power was lost: any sectors and names that were not synced are there. The number seeds the
    /// choice.
    Random(u64),
}

/// Pseudorandom numbers by the generator SplitMix64.
pub(super) struct Random(pub(super) u64);

#[derive(Clone, Default)]
pub(super) struct FaultyStorage {
    disk: Arc<Mutex<Disk>>,
    gate_opened: Arc<Condvar>,
}

#[derive(Clone, Default)]
struct Disk {
    files: Vec<FileState>,
    /// The names as the processes see them.
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    name_changes: Vec<NameChange>,
    calls: u64,
    temporary_names: u64,
    crash_at: Option<u64>,
    has_crashed: bool,
    errors: Range<u64>,
    errno: Option<Errno>,
    holds_snapshots: bool,
}

#[derive(Clone, Default, PartialEq)]
struct FileState {
    content: Vec<u8>,
    durable: Vec<u8>,
    changes: Vec<Change>,
}

#[derive(Clone, PartialEq)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    Truncate(usize),
}

#[derive(Clone)]
enum NameChange {
    Link { name: String, file: usize },
    Unlink { name: String },
}

/// Lets snapshots go on when it is dropped, also by a failing test.
pub(super) struct HeldSnapshots(FaultyStorage);

impl Drop for HeldSnapshots {
    fn drop(&mut self) {
        self.0.lock().holds_snapshots = false;
        self.0.gate_opened.notify_all();
    }
}

struct OpenFile {
    storage: FaultyStorage,
    file: usize,
}

/// The effect of a call.
enum Outcome {
    Done,
    /// The call takes effect, and nothing afterwards does.
    Crash,
    Error(Errno),
}

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn flip(&mut self) -> bool {
        self.next() & 1 == 1
    }
}

impl FaultyStorage {
    /// Ends the process at a call, counted from 1 from now on.
    pub(super) fn crash_at(&self, call: u64) {
        let mut disk = self.lock();
        disk.crash_at = Some(disk.calls + call);
    }

    /// Fails calls of this range, counted from 1 from now on.
    pub(super) fn fail(&self, calls: Range<u64>, errno: Errno) {
        let mut disk = self.lock();
        disk.errors = disk.calls.saturating_add(calls.start)..disk.calls.saturating_add(calls.end);
        disk.errno = Some(errno);
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.lock().has_crashed
    }

    pub(super) fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Makes threads that write snapshots wait until the result is dropped.
    pub(super) fn hold_snapshots(&self) -> HeldSnapshots {
        self.lock().holds_snapshots = true;
        HeldSnapshots(self.clone())
    }

    /// Returns the disk as the next process finds it, without further faults.
    pub(super) fn after(&self, loss: Loss) -> Self {
        let mut disk = self.lock().clone();
        disk.crash_at = None;
        disk.has_crashed = false;
        disk.errors = 0..0;
        disk.holds_snapshots = false;
        match loss {
            Loss::Kill => {}
            Loss::Unsynced => disk.lose_power(|_, _| Vec::new(), |_| false),
            Loss::TornAt(bytes) => {
                disk.lose_power(|change, is_last| change.torn_at(bytes, is_last), |_| true)
            }
            Loss::Random(seed) => {
                let mut names = Random(seed ^ 0x5555);
                let mut sectors = Random(seed);
                disk.lose_power(
                    |change, _| change.some_sectors(&mut sectors),
                    |_| names.flip(),
                );
            }
        }
        Self {
            disk: Arc::new(Mutex::new(disk)),
            gate_opened: Arc::default(),
        }
    }

    pub(super) fn file_names(&self) -> Vec<String> {
        self.lock().names.keys().cloned().collect()
    }

    pub(super) fn content(&self, name: &str) -> Vec<u8> {
        let disk = self.lock();
        disk.files[disk.names[name]].content.clone()
    }

    pub(super) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let names = self.file_names();
        names
            .into_iter()
            .map(|name| (name.clone(), self.content(&name)))
            .collect()
    }

    /// Replaces the content of a file, or creates the file.
    pub(super) fn set_content(&self, name: &str, content: Vec<u8>) {
        let mut disk = self.lock();
        let file = disk.files.len();
        disk.files.push(FileState {
            durable: content.clone(),
            content,
            changes: Vec::new(),
        });
        disk.names.insert(name.to_string(), file);
        disk.durable_names.insert(name.to_string(), file);
    }

    pub(super) fn remove_content(&self, name: &str) {
        let mut disk = self.lock();
        disk.names.remove(name);
        disk.durable_names.remove(name);
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        // A failing test must not hide its failure by another one.
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one call. An error leaves `on_error` as its effect.
    fn call<T>(
        &self,
        effect: impl FnOnce(&mut Disk) -> io::Result<T>,
        on_error: impl FnOnce(&mut Disk),
    ) -> io::Result<T> {
        let mut disk = self.lock();
        while disk.holds_snapshots && thread::current().name() == Some("mw-snapshot") {
            let opened = self.gate_opened.wait(disk);
            disk = opened.unwrap_or_else(PoisonError::into_inner);
        }
        match disk.next_outcome()? {
            Outcome::Done => effect(&mut disk),
            Outcome::Crash => {
                effect(&mut disk)?;
                Err(Errno::EIO.into())
            }
            Outcome::Error(errno) => {
                on_error(&mut disk);
                Err(errno.into())
            }
        }
    }
}

impl Disk {
    fn next_outcome(&mut self) -> io::Result<Outcome> {
        if self.has_crashed {
            return Err(Errno::EIO.into());
        }
        self.calls += 1;
        if self.crash_at == Some(self.calls) {
            self.has_crashed = true;
            return Ok(Outcome::Crash);
        }
        match self.errno {
            Some(errno) if self.errors.contains(&self.calls) => Ok(Outcome::Error(errno)),
            _ => Ok(Outcome::Done),
        }
    }

    fn find(&self, name: &str) -> io::Result<usize> {
        self.names
            .get(name)
            .copied()
            .ok_or_else(|| Errno::ENOENT.into())
    }

    fn change_name(&mut self, change: NameChange) {
        change.apply(&mut self.names);
        self.name_changes.push(change);
    }

    fn write(&mut self, file: usize, offset: u64, bytes: &[u8]) {
        let change = Change::Write {
            offset: offset as usize,
            bytes: bytes.to_vec(),
        };
        self.change_file(file, change);
    }

    fn change_file(&mut self, file: usize, change: Change) {
        change.apply(&mut self.files[file].content);
        self.files[file].changes.push(change);
    }

    fn lose_power(
        &mut self,
        mut kept_changes: impl FnMut(&Change, bool) -> Vec<Change>,
        mut keeps_name: impl FnMut(&NameChange) -> bool,
    ) {
        for file in &mut self.files {
            let changes = std::mem::take(&mut file.changes);
            for (index, change) in changes.iter().enumerate() {
                let kept = kept_changes(change, index + 1 == changes.len());
                kept.iter()
                    .for_each(|change| change.apply(&mut file.durable));
            }
            file.content = file.durable.clone();
        }
        for change in std::mem::take(&mut self.name_changes) {
            if keeps_name(&change) {
                change.apply(&mut self.durable_names);
            }
        }
        self.names = self.durable_names.clone();
    }
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Write { offset, bytes } => {
                let end = offset + bytes.len();
                content.resize(content.len().max(end), 0);
                content[*offset..end].copy_from_slice(bytes);
            }
            Self::Truncate(len) => content.truncate(*len),
        }
    }

    fn torn_at(&self, count: usize, is_last: bool) -> Vec<Self> {
        match self {
            Self::Write { offset, bytes } if is_last => vec![Self::Write {
                offset: *offset,
                bytes: bytes[..count.min(bytes.len())].to_vec(),
            }],
            _ => vec![self.clone()],
        }
    }

    fn some_sectors(&self, random: &mut Random) -> Vec<Self> {
        let Self::Write { offset, bytes } = self else {
            return if random.flip() {
                vec![self.clone()]
            } else {
                Vec::new()
            };
        };
        let sectors = bytes.chunks(SECTOR_BYTES).enumerate();
        let kept = sectors.filter(|_| random.flip());
        kept.map(|(index, sector)| Self::Write {
            offset: offset + index * SECTOR_BYTES,
            bytes: sector.to_vec(),
        })
        .collect()
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Link { name, file } => {
                names.insert(name.clone(), *file);
            }
            Self::Unlink { name } => {
                names.remove(name);
            }
        }
    }
}

impl Storage for FaultyStorage {
    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn temporary_name(&self) -> String {
        let mut disk = self.lock();
        disk.temporary_names += 1;
        format!("{TEMPORARY_PREFIX}{}", disk.temporary_names)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.call(|disk| Ok(disk.names.keys().cloned().collect()), |_| {})
    }

    fn reader(&self, name: &str) -> io::Result<StoredReader> {
        let open = |disk: &mut Disk| Ok(disk.files[disk.find(name)?].content.clone());
        let content = self.call(open, |_| {})?;
        let len = content.len() as u64;
        Ok(StoredReader {
            source: Box::new(Cursor::new(content)),
            len,
        })
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let create = |disk: &mut Disk| {
            if disk.names.contains_key(name) {
                return Err(Errno::EEXIST.into());
            }
            let file = disk.files.len();
            disk.files.push(FileState::default());
            let name = name.to_string();
            disk.change_name(NameChange::Link { name, file });
            Ok(file)
        };
        let file = self.call(create, |_| {})?;
        let storage = self.clone();
        Ok(Box::new(OpenFile { storage, file }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoredFile>> {
        let file = self.call(|disk| disk.find(name), |_| {})?;
        let storage = self.clone();
        Ok(Box::new(OpenFile { storage, file }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let rename = |disk: &mut Disk| {
            let file = disk.find(from)?;
            let (from, to) = (from.to_string(), to.to_string());
            disk.change_name(NameChange::Link { name: to, file });
            disk.change_name(NameChange::Unlink { name: from });
            Ok(())
        };
        self.call(rename, |_| {})
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let remove = |disk: &mut Disk| {
            disk.find(name)?;
            let name = name.to_string();
            disk.change_name(NameChange::Unlink { name });
            Ok(())
        };
        self.call(remove, |_| {})
    }

    fn sync(&self) -> io::Result<()> {
        let sync = |disk: &mut Disk| {
            disk.durable_names = disk.names.clone();
            disk.name_changes.clear();
            Ok(())
        };
        self.call(sync, |_| {})
    }

    fn remove_folder(&self) -> io::Result<()> {
        self.call(|_| Ok(()), |_| {})
    }
}

impl StoredFile for OpenFile {
    fn write_all_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let write = |disk: &mut Disk| {
            disk.write(self.file, offset, bytes);
            Ok(())
        };
        let write_half = |disk: &mut Disk| disk.write(self.file, offset, &bytes[..bytes.len() / 2]);
        self.storage.call(write, write_half)
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        let truncate = |disk: &mut Disk| {
            disk.change_file(self.file, Change::Truncate(len as usize));
            Ok(())
        };
        self.storage.call(truncate, |_| {})
    }

    fn sync(&mut self) -> io::Result<()> {
        let sync = |disk: &mut Disk| {
            let file = &mut disk.files[self.file];
            let changes = std::mem::take(&mut file.changes);
            changes
                .iter()
                .for_each(|change| change.apply(&mut file.durable));
            Ok(())
        };
        // Linux marks pages as clean after a failed sync: the content stays in memory, and the next
        // sync does not write them.
        self.storage
            .call(sync, |disk| disk.files[self.file].changes.clear())
    }
}
