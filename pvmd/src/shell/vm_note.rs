//! Keeps the note of this host about the virtual machine ([`sempa_notes`]), for the case that the
//! master is lost.
//!
//! The files are written on blocking threads, one at a time, so that the loop never waits for a
//! disk. If the disk is slow, only the newest version is written next.

use super::host_env::unix_time;
use sempa_notes::{NoteError, NoteFolder, VmNote};
use sempa_proto::vm_summary::VmSummary;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Interval at which the note's time is renewed. It is the accuracy of the time at which a daemon
/// was killed.
const TOUCH_INTERVAL: Duration = Duration::from_secs(30);
/// Time limit for the last change of the note when the daemon ends. The home of the user may be on
/// the host that was lost.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// How the daemon ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DaemonEnd {
    /// The virtual machine ends, or this host leaves it.
    Orderly,
    /// The master is lost, for this reason.
    MasterLost(String),
}

/// An operation on the note's file.
#[derive(Clone, Debug)]
enum FileChange {
    Write(Box<VmNote>),
    Touch(Box<VmNote>),
}

/// State that the keeper shares with its thread.
#[derive(Debug, Default)]
struct Writer {
    state: Mutex<WriterState>,
    /// Signals that `is_busy` is false.
    idle: Condvar,
}

impl Writer {
    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[derive(Debug, Default)]
struct WriterState {
    is_busy: bool,
    next_change: Option<FileChange>,
    has_warned: bool,
}

/// The note of this host.
#[derive(Debug)]
pub(crate) struct NoteKeeper {
    folder: Option<NoteFolder>,
    note: VmNote,
    /// True if the note was written, or is about to be.
    is_kept: bool,
    last_touch_at: Instant,
    writer: Arc<Writer>,
}

impl NoteKeeper {
    /// Creates a keeper without a note. If there is no folder, nothing is kept.
    pub(crate) fn new(folder: Option<NoteFolder>, note: VmNote) -> Self {
        Self {
            folder,
            note,
            is_kept: false,
            last_touch_at: Instant::now(),
            writer: Arc::default(),
        }
    }

    /// Keeps this summary in place of the previous one.
    pub(crate) fn keep(&mut self, summary: VmSummary) {
        if self.is_kept && self.note.summary.created_at != summary.created_at {
            tracing::warn!("the summary is of another virtual machine and was ignored");
            return;
        }
        (self.note.summary, self.is_kept) = (summary, true);
        self.last_touch_at = Instant::now();
        self.start_change(FileChange::Write(Box::new(self.note.clone())));
    }

    /// Renews the note's time if that is due. Called once per second.
    pub(crate) fn touch_if_due(&mut self) {
        if self.is_kept && self.last_touch_at.elapsed() >= TOUCH_INTERVAL {
            self.last_touch_at = Instant::now();
            self.start_change(FileChange::Touch(Box::new(self.note.clone())));
        }
    }

    /// Writes or removes the note at the end of the daemon.
    pub(crate) async fn finish(mut self, end: DaemonEnd) {
        let Some(folder) = self.folder.take().filter(|_| self.is_kept) else {
            return;
        };
        if let DaemonEnd::MasterLost(why) = &end {
            self.note.record_master_loss(unix_time(), why);
        }
        let writer = self.writer.clone();
        writer.lock().next_change = None;
        let write = tokio::task::spawn_blocking(move || {
            // A change in progress must not replace this one.
            drop(writer.idle.wait_while(writer.lock(), |state| state.is_busy));
            match end {
                DaemonEnd::Orderly => folder.remove(&self.note),
                DaemonEnd::MasterLost(_) => folder.write(&self.note),
            }
        });
        match timeout(LAST_WRITE_TIMEOUT, write).await {
            Ok(Ok(Err(error))) => tracing::warn!("the note about this virtual machine: {error}"),
            Ok(_) => {}
            Err(_) => tracing::warn!(
                "the note about this virtual machine could not be changed within {} s",
                LAST_WRITE_TIMEOUT.as_secs()
            ),
        }
    }

    fn start_change(&self, change: FileChange) {
        let Some(folder) = self.folder.clone() else {
            return;
        };
        {
            let mut state = self.writer.lock();
            // A touch must not replace a version that was not written yet.
            let is_superfluous = matches!(change, FileChange::Touch(_))
                && (state.is_busy || state.next_change.is_some());
            if is_superfluous {
                return;
            }
            if state.is_busy {
                state.next_change = Some(change);
                return;
            }
            state.is_busy = true;
        }
        let writer = self.writer.clone();
        tokio::task::spawn_blocking(move || {
            let mut change = change;
            loop {
                let result = carry_out(&folder, &change);
                let mut state = writer.lock();
                match result {
                    Ok(()) => state.has_warned = false,
                    Err(error) if !state.has_warned => {
                        state.has_warned = true;
                        tracing::warn!(
                            "no note about this virtual machine is kept for the case that the master is lost: {error}"
                        );
                    }
                    Err(_) => {}
                }
                match state.next_change.take() {
                    Some(next_change) => change = next_change,
                    None => {
                        state.is_busy = false;
                        writer.idle.notify_all();
                        return;
                    }
                }
            }
        });
    }
}

fn carry_out(folder: &NoteFolder, change: &FileChange) -> Result<(), NoteError> {
    match change {
        FileChange::Write(note) => {
            folder.write(note)?;
            let checkpoints = &note.summary.checkpoints;
            let names: Vec<&str> = checkpoints.iter().map(|entry| &*entry.name).collect();
            folder.settle_restarted(&names)?;
            folder.remove_excess()
        }
        FileChange::Touch(note) => folder.touch(note),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;
    use std::path::Path;

    fn folder_in(dir: &tempfile::TempDir) -> NoteFolder {
        let home = dir.path().display().to_string();
        NoteFolder::from_env(|name| (name == "HOME").then(|| home.clone())).expect("a place")
    }

    fn keeper_in(folder: &NoteFolder) -> NoteKeeper {
        let note = VmNote::new("pvm", Path::new("/tmp/sempa-1/pvm"), "h2", false, &[]);
        NoteKeeper::new(Some(folder.clone()), note)
    }

    fn summary(task_count: u32) -> VmSummary {
        VmSummary {
            created_at: Micros(5),
            task_count,
            ..VmSummary::default()
        }
    }

    /// The loss of the master is recorded with the newest summary, however many were pending.
    #[tokio::test]
    async fn master_loss_is_recorded_with_the_newest_summary() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder_in(&dir);
        let mut keeper = keeper_in(&folder);
        for task_count in 0..50 {
            keeper.keep(summary(task_count));
        }
        keeper.finish(DaemonEnd::MasterLost("silent".into())).await;
        let notes = folder.lost_notes();
        assert_eq!(notes.len(), 1);
        let note = &notes[0].note;
        assert_eq!(note.summary.task_count, 49);
        assert_eq!(
            note.master_loss.as_ref().map(|loss| &*loss.why),
            Some("silent")
        );
    }

    /// An orderly end removes the note. A daemon that has never joined leaves nothing.
    #[tokio::test]
    async fn orderly_end_leaves_no_note() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = folder_in(&dir);
        let mut keeper = keeper_in(&folder);
        keeper.keep(summary(1));
        keeper.finish(DaemonEnd::Orderly).await;
        assert!(folder.read_all().is_empty());
        let keeper = keeper_in(&folder);
        keeper.finish(DaemonEnd::MasterLost("silent".into())).await;
        assert!(folder.read_all().is_empty());
    }

    /// Without a home directory nothing is kept, and nothing fails.
    #[tokio::test]
    async fn missing_home_keeps_nothing() {
        let note = VmNote::new("pvm", Path::new("/tmp/sempa-1/pvm"), "h2", false, &[]);
        let mut keeper = NoteKeeper::new(None, note);
        keeper.keep(summary(1));
        keeper.touch_if_due();
        keeper.finish(DaemonEnd::Orderly).await;
    }
}
