//! Notes about virtual machines, one file for each virtual machine and host, for the case that the
//! master is lost.
//!
//! The daemon of each host writes the note while the virtual machine runs, and removes the note
//! when the virtual machine ends in order. The console shows the notes of virtual machines that
//! were lost.
//!
//! Notes are in the user's state directory, `$XDG_STATE_HOME/sempa/notes` (by default
//! `~/.local/state/sempa/notes`), next to the default checkpoint store. The runtime directory is
//! not suitable: a boot removes it, and so does the next daemon. Hosts may share the directory, so
//! each note names its machine.

mod process;

pub use process::{ProcessIdentity, ProcessState};

use sempa_proto::Micros;
use sempa_proto::text;
use sempa_proto::vm_summary::VmSummary;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Version of the format. Notes of another version are ignored.
const NOTE_VERSION: u32 = 1;
/// Maximum size of a note. A note with all lists at their limits, and names of usual length, is
/// smaller.
pub const NOTE_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of notes of lost virtual machines that one machine keeps. The oldest ones are
/// removed first.
pub const LOST_NOTES_MAX: usize = 8;
/// Maximum number of files in the directory of notes that are read. Machines that share the
/// directory have their own notes.
const FILES_READ_MAX: usize = 4096;
/// Maximum length, in bytes, of a reason in a note.
const REASON_BYTES_MAX: usize = 1024;
/// Characters of a machine's name in the name of a file.
const MACHINE_NAME_CHARS_MAX: usize = 64;
const SUFFIX: &str = "json";

/// The loss of the master, as a slave has noticed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterLoss {
    /// Time in microseconds since 1970.
    pub at: Micros,
    pub why: String,
}

/// A note of one host about its virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNote {
    version: u32,
    /// Name of the virtual machine.
    pub vm: String,
    /// Runtime directory of the daemon on this host.
    pub runtime_dir: PathBuf,
    /// Name of the machine, as `uname -n` prints it.
    pub machine: String,
    /// Name of the host in the virtual machine.
    pub host: String,
    pub is_master: bool,
    /// The daemon that writes the note.
    pub daemon: ProcessIdentity,
    /// Certificate of the virtual machine's authority (DER, hexadecimal). It is public. A daemon of
    /// the virtual machine can be recognized by it.
    pub authority: String,
    /// True if nothing is left to do about the lost virtual machine: its jobs were restarted, or a
    /// user has seen that there is nothing to restart.
    pub is_settled: bool,
    /// Set if the daemon has lost the master.
    pub master_loss: Option<MasterLoss>,
    pub summary: VmSummary,
}

/// State of a virtual machine according to its note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoteState {
    /// The daemon of this host runs, or may run.
    Running,
    /// This host has lost the master.
    MasterLost,
    /// The daemon of this host has ended without removing the note.
    DaemonEnded,
}

impl VmNote {
    /// Creates the note of this process, which is the daemon of a host.
    pub fn new(
        vm: &str,
        runtime_dir: &Path,
        host: &str,
        is_master: bool,
        authority: &[u8],
    ) -> Self {
        Self {
            version: NOTE_VERSION,
            vm: vm.to_string(),
            runtime_dir: runtime_dir.to_path_buf(),
            machine: machine_name(),
            host: host.to_string(),
            is_master,
            daemon: ProcessIdentity::of_this_process(),
            authority: authority.iter().map(|byte| format!("{byte:02x}")).collect(),
            is_settled: false,
            master_loss: None,
            summary: VmSummary::default(),
        }
    }

    /// Records that the daemon has lost the master.
    pub fn record_master_loss(&mut self, at: Micros, why: &str) {
        self.master_loss = Some(MasterLoss {
            at,
            why: text::truncate(why, REASON_BYTES_MAX).to_string(),
        });
    }

    /// Returns the certificate of the virtual machine's authority; `None` if the note is damaged.
    pub fn authority_certificate(&self) -> Option<Vec<u8>> {
        let digits = self.authority.as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        digits
            .len()
            .is_multiple_of(2)
            .then(|| digits.chunks(2).map(byte).collect())
            .flatten()
    }

    /// Returns what the note says about its virtual machine, as seen from `observer` on the same
    /// machine.
    pub fn state(&self, observer: &ProcessIdentity) -> NoteState {
        if self.master_loss.is_some() {
            return NoteState::MasterLost;
        }
        match observer.state_of(&self.daemon, true) {
            ProcessState::MayLive => NoteState::Running,
            // The name of the machine is in the note, so a machine with its own name and another
            // boot has booted since.
            ProcessState::Ended | ProcessState::HasProbablyRebooted => NoteState::DaemonEnded,
        }
    }

    /// Name of the note's file. Two daemons never write the same file.
    fn file_name(&self) -> String {
        let machine: String = self
            .machine
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .take(MACHINE_NAME_CHARS_MAX)
            .collect();
        let (vm, created_at) = (&self.vm, self.summary.created_at.0);
        format!("{vm}-{created_at:016x}-{machine}.{SUFFIX}")
    }
}

/// Returns the name of this machine.
pub fn machine_name() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The reason why a note was not written or removed. The virtual machine does not depend on notes.
#[derive(Debug, Error)]
pub enum NoteError {
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the note has {0} bytes, {NOTE_BYTES_MAX} at most")]
    TooLong(usize),
    #[error("the note cannot be encoded: {0}")]
    Encode(#[from] serde_json::Error),
    #[error("{}: it belongs to another user or is not private", .0.display())]
    Unsafe(PathBuf),
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> NoteError {
    let path = path.to_path_buf();
    move |source| NoteError::Io {
        operation,
        path,
        source,
    }
}

/// A note in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredNote {
    pub note: VmNote,
    /// Time at which the daemon last wrote or touched the note, in microseconds since 1970: the
    /// daemon was alive then.
    pub touched_at: Micros,
    path: PathBuf,
}

/// The directory of the user's notes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteFolder {
    dir: PathBuf,
}

impl NoteFolder {
    /// Returns the directory that the environment names; `None` if neither `XDG_STATE_HOME` nor
    /// `HOME` is an absolute path.
    pub fn from_env(env: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let absolute = |name: &str| env(name).filter(|dir| dir.starts_with('/'));
        let state_dir = absolute("XDG_STATE_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(Path::new(&absolute("HOME")?).join(".local/state")))?;
        Some(Self {
            dir: state_dir.join("sempa/notes"),
        })
    }

    /// Writes a note in place of its previous version, in one step, and waits for the disk.
    ///
    /// # Errors
    /// The previous version is unchanged.
    pub fn write(&self, note: &VmNote) -> Result<(), NoteError> {
        let bytes = serde_json::to_vec(note)?;
        if bytes.len() as u64 > NOTE_BYTES_MAX {
            return Err(NoteError::TooLong(bytes.len()));
        }
        self.ensure_dir()?;
        let path = self.dir.join(note.file_name());
        // Daemons of two machines never have the same temporary file, because the name contains the
        // machine.
        let new_path = path.with_extension("new");
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(&new_path)?;
            file.write_all(&bytes)?;
            file.sync_data()
        };
        write().map_err(io_error("write", &new_path))?;
        fs::rename(&new_path, &path).map_err(io_error("rename", &new_path))
    }

    /// Sets the time at which the note's daemon was last known to be alive.
    ///
    /// # Errors
    /// The note does not exist, or its time cannot be set.
    pub fn touch(&self, note: &VmNote) -> Result<(), NoteError> {
        set_time(&self.dir.join(note.file_name()), SystemTime::now())
    }

    /// Removes a note if it exists.
    ///
    /// # Errors
    /// The note exists and cannot be removed.
    pub fn remove(&self, note: &VmNote) -> Result<(), NoteError> {
        remove_file(&self.dir.join(note.file_name()))
    }

    /// Returns the notes of this machine about virtual machines that were lost, the newest first.
    /// Files that are no notes of this version are ignored.
    pub fn lost_notes(&self) -> Vec<StoredNote> {
        let (machine, observer) = (machine_name(), ProcessIdentity::of_this_process());
        let mut notes = self.read_all();
        notes.retain(|stored| {
            stored.note.machine == machine && stored.note.state(&observer) != NoteState::Running
        });
        notes.sort_by_key(|stored| std::cmp::Reverse(stored.note.summary.created_at));
        notes
    }

    /// Returns all notes, of all machines that share the directory. Files that are no notes of this
    /// version are ignored.
    pub fn read_all(&self) -> Vec<StoredNote> {
        let Ok(entries) = fs::read_dir(&self.dir) else {
            return Vec::new();
        };
        let paths = entries.flatten().map(|entry| entry.path());
        paths
            .filter(|path| path.extension().is_some_and(|suffix| suffix == SUFFIX))
            .take(FILES_READ_MAX)
            .filter_map(|path| read_note(&path))
            .collect()
    }

    /// Removes checkpoints from the notes of lost virtual machines, because this virtual machine
    /// has restarted their jobs.
    ///
    /// # Errors
    /// A note cannot be changed.
    pub fn settle_restarted(&self, checkpoints: &[&str]) -> Result<(), NoteError> {
        let notes = self.lost_notes();
        notes
            .iter()
            .try_for_each(|stored| stored.remove_checkpoints(self, checkpoints))
    }

    /// Removes the oldest notes of lost virtual machines, so that [`LOST_NOTES_MAX`] remain.
    ///
    /// # Errors
    /// A note cannot be removed.
    pub fn remove_excess(&self) -> Result<(), NoteError> {
        let excess_notes = self.lost_notes().into_iter().skip(LOST_NOTES_MAX);
        for stored in excess_notes {
            stored.remove()?;
        }
        Ok(())
    }

    fn ensure_dir(&self) -> Result<(), NoteError> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder
            .create(&self.dir)
            .map_err(io_error("make the directory", &self.dir))?;
        let metadata = fs::symlink_metadata(&self.dir).map_err(io_error("look at", &self.dir))?;
        let is_own = metadata.is_dir() && metadata.uid() == nix::unistd::geteuid().as_raw();
        match is_own && metadata.mode() & 0o022 == 0 {
            true => Ok(()),
            false => Err(NoteError::Unsafe(self.dir.clone())),
        }
    }
}

impl StoredNote {
    /// Removes the note.
    ///
    /// # Errors
    /// The note exists and cannot be removed.
    pub fn remove(&self) -> Result<(), NoteError> {
        remove_file(&self.path)
    }

    /// Records that nothing is left to do about the lost virtual machine.
    ///
    /// # Errors
    /// The note cannot be changed.
    pub fn settle(&self, folder: &NoteFolder) -> Result<(), NoteError> {
        self.rewrite(
            folder,
            &VmNote {
                is_settled: true,
                ..self.note.clone()
            },
        )
    }

    /// Removes checkpoints from the note, because their jobs were restarted. A note that names no
    /// other checkpoint is settled.
    fn remove_checkpoints(&self, folder: &NoteFolder, names: &[&str]) -> Result<(), NoteError> {
        let mut note = self.note.clone();
        let checkpoints = &mut note.summary.checkpoints;
        checkpoints.retain(|checkpoint| !names.contains(&&*checkpoint.name));
        let removed_count = self.note.summary.checkpoints.len() - checkpoints.len();
        if removed_count == 0 {
            return Ok(());
        }
        note.is_settled |= checkpoints.is_empty();
        let removed_count = u32::try_from(removed_count).unwrap_or(u32::MAX);
        note.summary.checkpoint_count = note.summary.checkpoint_count.saturating_sub(removed_count);
        self.rewrite(folder, &note)
    }

    /// Writes another version of the note, with the time at which its daemon was alive.
    fn rewrite(&self, folder: &NoteFolder, note: &VmNote) -> Result<(), NoteError> {
        folder.write(note)?;
        set_time(
            &self.path,
            UNIX_EPOCH + Duration::from_micros(self.touched_at.0),
        )
    }
}

fn set_time(path: &Path, time: SystemTime) -> Result<(), NoteError> {
    File::open(path)
        .and_then(|file| file.set_modified(time))
        .map_err(io_error("touch", path))
}

fn remove_file(path: &Path) -> Result<(), NoteError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(io_error("remove", path)(e)),
        _ => Ok(()),
    }
}

fn read_note(path: &Path) -> Option<StoredNote> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > NOTE_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let note: VmNote = serde_json::from_slice(&bytes).ok()?;
    let modified = metadata.modified().ok()?;
    let touched_at = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
    (note.version == NOTE_VERSION).then(|| StoredNote {
        note,
        touched_at: Micros(u64::try_from(touched_at.as_micros()).unwrap_or(u64::MAX)),
        path: path.to_path_buf(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Tid;
    use sempa_proto::vm_summary::SummaryCheckpoint;

    fn folder(dir: &tempfile::TempDir) -> NoteFolder {
        let home = dir.path().display().to_string();
        NoteFolder::from_env(|name| (name == "HOME").then(|| home.clone())).expect("a place")
    }

    fn note(vm: &str, created_at: u64) -> VmNote {
        let mut note = VmNote::new(vm, Path::new("/tmp/sempa-1/pvm"), "h2", false, &[1, 0xab]);
        note.summary.created_at = Micros(created_at);
        note
    }

    fn lost_note(vm: &str, created_at: u64) -> VmNote {
        let mut note = note(vm, created_at);
        note.record_master_loss(Micros(9), "no packet for 10 s");
        note
    }

    fn vm_names(notes: &[StoredNote]) -> Vec<&str> {
        notes.iter().map(|stored| &*stored.note.vm).collect()
    }

    /// A note is read as it was written, and only the user can read it.
    #[test]
    fn written_note_is_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder(&dir);
        assert!(folder.lost_notes().is_empty());
        folder.write(&lost_note("pvm", 7)).expect("written");
        let notes = folder.lost_notes();
        assert_eq!(notes.len(), 1);
        assert_eq!(notes[0].note, lost_note("pvm", 7));
        assert_eq!(notes[0].note.authority_certificate(), Some(vec![1, 0xab]));
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        assert_eq!((mode(&folder.dir), mode(&notes[0].path)), (0o700, 0o600));
        notes[0].remove().expect("removed");
        assert!(folder.lost_notes().is_empty());
    }

    /// A virtual machine is lost when its daemon on this machine has lost the master or has ended.
    #[test]
    fn notes_of_running_daemons_are_not_lost() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder(&dir);
        folder.write(&note("running", 1)).expect("written");
        let mut ended = note("ended", 2);
        ended.daemon.start_ticks += 1;
        folder.write(&ended).expect("written");
        let mut booted = note("booted", 3);
        booted.daemon.boot_id = "an earlier boot".into();
        folder.write(&booted).expect("written");
        let mut elsewhere = lost_note("elsewhere", 4);
        elsewhere.machine = "another machine".into();
        folder.write(&elsewhere).expect("written");
        let mut cloned_pid = note("container", 5);
        cloned_pid.daemon.pid_namespace = "pid:[1]".into();
        folder.write(&cloned_pid).expect("written");
        assert_eq!(vm_names(&folder.lost_notes()), ["booted", "ended"]);
        assert_eq!(folder.read_all().len(), 5);
    }

    /// The newest notes of lost virtual machines are kept, and all notes of running ones.
    #[test]
    fn number_of_lost_notes_is_bounded() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder(&dir);
        folder.write(&note("running", 0)).expect("written");
        let count = LOST_NOTES_MAX as u64 + 3;
        for created_at in 1..=count {
            folder
                .write(&lost_note(&format!("vm{created_at}"), created_at))
                .expect("written");
        }
        folder.remove_excess().expect("removed");
        let notes = folder.lost_notes();
        assert_eq!(notes.len(), LOST_NOTES_MAX);
        assert_eq!(notes[0].note.summary.created_at, Micros(count));
        assert_eq!(folder.read_all().len(), LOST_NOTES_MAX + 1);
    }

    /// A note is settled when all jobs that it offers were restarted.
    #[test]
    fn restarted_jobs_leave_the_note() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder(&dir);
        let checkpoint = |name: &str| SummaryCheckpoint {
            job: Tid::from_raw(0x40001),
            program: "main".into(),
            name: name.into(),
            made_at: None,
            copy_hosts: Vec::new(),
        };
        let mut note = lost_note("pvm", 1);
        note.summary.checkpoints = vec![checkpoint("a"), checkpoint("b")];
        note.summary.checkpoint_count = 2;
        folder.write(&note).expect("written");
        let touched_at = folder.lost_notes()[0].touched_at;
        for (name, left, is_settled) in [("x", 2, false), ("a", 1, false), ("b", 0, true)] {
            folder.settle_restarted(&[name]).expect("changed");
            let stored = folder.lost_notes().pop().expect("a note");
            let VmNote { summary, .. } = &stored.note;
            assert_eq!(
                (summary.checkpoint_count, stored.note.is_settled),
                (left, is_settled),
                "{name}"
            );
            assert_eq!(stored.touched_at, touched_at, "the daemon lived until then");
        }
    }

    /// Damaged, foreign and oversized files are ignored. A directory that others can write is
    /// refused.
    #[test]
    fn only_own_notes_are_read() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder(&dir);
        folder.write(&lost_note("pvm", 1)).expect("written");
        fs::write(folder.dir.join("x.json"), "{").expect("written");
        fs::write(folder.dir.join("y.json"), vec![b' '; 2 << 20]).expect("written");
        std::os::unix::fs::symlink("/etc/passwd", folder.dir.join("z.json")).expect("made");
        let mut newer = lost_note("newer", 2);
        newer.version += 1;
        folder.write(&newer).expect("written");
        assert_eq!(vm_names(&folder.lost_notes()), ["pvm"]);
        fs::set_permissions(&folder.dir, fs::Permissions::from_mode(0o777)).expect("ours");
        let error = folder.write(&lost_note("pvm", 1)).expect_err("refused");
        assert!(matches!(error, NoteError::Unsafe(_)), "{error}");
    }

    /// The place follows the environment, as that of the checkpoint store does.
    #[test]
    fn place_follows_the_environment() {
        let folder_from = |vars: &[(&str, &str)]| {
            let value = |name: &str| {
                let var = vars.iter().find(|(key, _)| *key == name);
                var.map(|(_, value)| value.to_string())
            };
            NoteFolder::from_env(value).map(|folder| folder.dir)
        };
        assert_eq!(
            folder_from(&[("HOME", "/home/x")]),
            Some("/home/x/.local/state/sempa/notes".into())
        );
        assert_eq!(
            folder_from(&[("HOME", "/home/x"), ("XDG_STATE_HOME", "/s")]),
            Some("/s/sempa/notes".into())
        );
        assert_eq!(folder_from(&[("HOME", "relative")]), None);
    }
}
