//! Transfers open files together with a task.
//!
//! - At the source the files are copied next to the task's images.
//! - At the target they are written to their original paths, if no file exists there, before the
//!   task is restored.
//! - If the migration fails, the target removes them again. If the tasker is killed first, the
//!   daemon removes them; a journal next to the images lists the files.
//!
//! The files are written with the rights of the task's user, who is also the tasker's user: a
//! thread that writes for any user but root drops all capabilities first. No symbolic link on the
//! path to a file is followed.

use crate::dump_attempt::random_number;
use crate::image_manifest::ImageManifest;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{IncomingTask, TargetStage};
use crate::workers::WorkerResult;
use checkpoint::engine::CancelHandle;
use checkpoint::facts::{self, COPIED_BYTES_MAX, COPIED_FILES_MAX, OpenFile};
use checkpoint::file_transfer_journal::{FileTransferJournal, JournalEntry, rename_no_replace};
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};
use nix::unistd::{Gid, UnlinkatFlags, fchown, unlinkat};
use sempa_proto::MigrationId;
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{FromTasker, MemoryWrite};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Prefix of the name of a transferred file next to the images. A number follows.
const IMAGE_FILE_PREFIX: &str = "sempa-file-";
/// Prefix of the temporary name of a file that is being written at the target. A random number
/// follows.
const TEMPORARY_PREFIX: &str = ".sempa-";

/// An open file of the task that was copied next to the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransferredFile {
    /// Path of the file at the source and at the target.
    path: PathBuf,
    /// Name of the copy next to the images.
    image: String,
    mode: u32,
    gid: u32,
}

/// Copies the open files of a stopped task next to its images, if the task's policy requires
/// copies. `root` is the task's root process.
///
/// # Errors
/// A file cannot be read, or the files exceed the limits.
pub(crate) fn copy_files_to_images(
    dir: &Path,
    root: i32,
    processes: &[i32],
) -> Result<Vec<TransferredFile>, Failure> {
    let open = facts::files_to_copy(root, processes);
    if open.len() > COPIED_FILES_MAX {
        return Err(Failure::Io(format!(
            "it has more than {COPIED_FILES_MAX} files open that are to be carried along"
        )));
    }
    let mut left = COPIED_BYTES_MAX;
    let mut transferred = Vec::new();
    for (number, file) in open.into_iter().enumerate() {
        let image = format!("{IMAGE_FILE_PREFIX}{number}");
        left -= copy_file_to_images(&file, &dir.join(&image), left).map_err(|e| {
            Failure::Io(format!(
                "{}, which is to be carried along, cannot be read: {e}",
                file.path.display()
            ))
        })?;
        transferred.push(TransferredFile {
            path: file.path,
            image,
            mode: file.mode,
            gid: file.gid,
        });
    }
    Ok(transferred)
}

fn copy_file_to_images(file: &OpenFile, to: &Path, bytes_max: u64) -> io::Result<u64> {
    let from = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&file.fd_path)?;
    let mut to = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    let copied = io::copy(&mut from.take(bytes_max + 1), &mut to)?;
    let too_much = || {
        io::Error::other(format!(
            "all of them have more than {COPIED_BYTES_MAX} bytes"
        ))
    };
    if copied > bytes_max {
        Err(too_much())
    } else {
        Ok(copied)
    }
}

/// Files that were written to their original paths at the target. Dropping this value removes the
/// files unless [`keep`](Self::keep) was called.
#[derive(Debug, Default)]
pub(crate) struct PlacedFiles(Option<FileTransferJournal>);

impl PlacedFiles {
    /// Keeps the files, because the task runs on this host and owns them.
    pub(crate) fn keep(self) {
        if let Some(notes) = self.0 {
            notes.keep_files();
        }
    }
}

/// Writes files to their original paths, if no file exists there. The calling thread must end
/// afterwards, because it retains only its user's rights.
///
/// # Errors
/// A file cannot be created; then none of the files exists.
fn write_files(dir: &Path, files: &[TransferredFile]) -> Result<PlacedFiles, Failure> {
    let io = |e: io::Error| Failure::Io(format!("cannot give up rights to write files: {e}"));
    if !nix::unistd::geteuid().is_root() {
        sys::drop_capabilities().map_err(io)?;
    }
    let note_failure = |e: io::Error| {
        Failure::Io(format!(
            "what is carried along cannot be noted beside {}: {e}",
            dir.display()
        ))
    };
    let mut journal = FileTransferJournal::create_next_to(dir).map_err(note_failure)?;
    for file in files {
        let done = write_file(dir, file, &mut journal);
        done.map_err(|e| {
            Failure::Io(format!(
                "{} cannot be carried along: {e}",
                file.path.display()
            ))
        })?;
    }
    Ok(PlacedFiles(Some(journal)))
}

/// Writes one file under a temporary name, then renames it.
fn write_file(
    dir: &Path,
    file: &TransferredFile,
    journal: &mut FileTransferJournal,
) -> io::Result<()> {
    let (folder, name) = facts::open_parent_dir(&file.path)?;
    // An existing file is not replaced: the feasibility check has accepted it, or the engine will
    // report that it differs.
    if fstatat(&folder, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
        return Ok(());
    }
    let temporary = OsString::from(format!("{TEMPORARY_PREFIX}{:016x}", random_number()));
    journal.record(JournalEntry::Temporary(
        file.path.with_file_name(&temporary),
    ))?;
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut to: File = openat(
        &folder,
        temporary.as_os_str(),
        flags,
        Mode::from_bits_truncate(0o600),
    )?
    .into();
    let meta = to.metadata()?;
    let image = dir.join(Path::new(&file.image).file_name().unwrap_or_default());
    let mut from = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(image)?;
    io::copy(&mut from, &mut to)?;
    if meta.gid() != file.gid {
        fchown(&to, None, Some(Gid::from_raw(file.gid)))?;
    }
    // Set the mode last, because a change of the group clears some mode bits.
    to.set_permissions(std::fs::Permissions::from_mode(file.mode & 0o7777))?;
    journal.record(JournalEntry::Final(
        file.path.clone(),
        meta.dev(),
        meta.ino(),
    ))?;
    if !rename_no_replace(&folder, &temporary, &name)? {
        // Another process has just created the file.
        unlinkat(&folder, temporary.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
    }
    Ok(())
}

impl Supervisor {
    /// Starts a worker thread that writes the task's files before the task is restored.
    pub(crate) fn place_files(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        manifest: ImageManifest,
        redirection: Option<MemoryWrite>,
    ) {
        let from = dir.to_path_buf();
        let work = move || WorkerResult::FilesPlaced {
            migration,
            result: write_files(&from, &manifest.transferred_files),
        };
        let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")));
        let started = cancel.and_then(|cancel| self.migrations.workers.start(&cancel, None, work));
        match (started, self.migrations.targets.get_mut(&migration)) {
            (Ok(_), Some(target)) => {
                target.stage = TargetStage::PlacingFiles {
                    dir: dir.into(),
                    redirection,
                    discard: false,
                }
            }
            (Ok(_), None) => {}
            (Err(why), _) => self.remove_target(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// Handles the result of writing the task's files: starts the restore, or discards the
    /// migration.
    pub(crate) fn on_files_placed(
        &mut self,
        migration: MigrationId,
        result: Result<PlacedFiles, Failure>,
    ) {
        let Some(
            target @ IncomingTask {
                stage: TargetStage::PlacingFiles { .. },
                ..
            },
        ) = self.migrations.targets.get_mut(&migration)
        else {
            return;
        };
        let TargetStage::PlacingFiles {
            dir,
            redirection,
            discard,
        } = std::mem::replace(&mut target.stage, TargetStage::Prepared)
        else {
            return;
        };
        let result = match result {
            Ok(_) if discard => Err(Failure::Cancelled("the move was discarded".into())),
            result => result,
        };
        match result {
            Ok(placed) => {
                target.placed_files = placed;
                self.start_engine_restore(migration, &dir, redirection);
            }
            Err(why) => {
                let mut last = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                last.extend(discard.then_some(FromTasker::Discarded { migration }));
                self.remove_target(migration, last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct TestDir {
        _dir: tempfile::TempDir,
        real: PathBuf,
    }

    impl TestDir {
        fn new() -> TestDir {
            let dir = tempfile::tempdir().expect("dir");
            let real = dir.path().canonicalize().expect("there");
            for name in ["images", "data"] {
                std::fs::create_dir(real.join(name)).expect("made");
            }
            TestDir { _dir: dir, real }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.real.join(name)
        }

        fn transferred_file(&self, path: &str, content: &str) -> TransferredFile {
            let image = format!("{IMAGE_FILE_PREFIX}{}", path.replace('/', "-"));
            std::fs::write(self.path("images").join(&image), content).expect("written");
            let gid = std::fs::metadata(self.path("data")).expect("there").gid();
            TransferredFile {
                path: self.path(path),
                image,
                mode: 0o640,
                gid,
            }
        }

        /// Writes the files on a separate thread, because the thread drops its capabilities.
        fn place_in_thread(&self, files: &[TransferredFile]) -> Result<PlacedFiles, Failure> {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| write_files(&self.path("images"), files))
                    .join()
                    .expect("it ends")
            })
        }
    }

    #[test]
    fn files_are_placed_and_removed_unless_kept() {
        let dir = TestDir::new();
        let files = [
            dir.transferred_file("data/a", "one"),
            dir.transferred_file("data/b", "two"),
        ];
        drop(dir.place_in_thread(&files).expect("put"));
        assert!(!dir.path("data/a").exists() && !dir.path("data/b").exists());
        let placed = dir.place_in_thread(&files).expect("put");
        assert_eq!(
            std::fs::metadata(dir.path("data/a")).expect("there").mode() & 0o7777,
            0o640
        );
        std::fs::rename(dir.path("data/a"), dir.path("data/c")).expect("renamed");
        std::fs::write(dir.path("data/a"), "somebody else's").expect("written");
        drop(placed);
        assert!(
            dir.path("data/a").exists()
                && dir.path("data/c").exists()
                && !dir.path("data/b").exists()
        );
        dir.place_in_thread(&files[1..]).expect("put").keep();
        assert_eq!(
            std::fs::read_to_string(dir.path("data/b")).expect("there"),
            "two"
        );
    }

    #[test]
    fn nothing_is_overwritten_and_no_link_followed() {
        let dir = TestDir::new();
        std::fs::write(dir.path("data/old"), "old").expect("written");
        std::fs::write(dir.path("victim"), "victim").expect("written");
        symlink(dir.path("victim"), dir.path("data/link")).expect("linked");
        symlink(dir.path("nothing"), dir.path("data/hanging")).expect("linked");
        symlink(dir.path("data"), dir.path("way")).expect("linked");
        let there =
            ["data/old", "data/link", "data/hanging"].map(|path| dir.transferred_file(path, "new"));
        drop(dir.place_in_thread(&there).expect("what is there stays"));
        assert_eq!(
            std::fs::read_to_string(dir.path("data/old")).expect("there"),
            "old"
        );
        assert_eq!(
            std::fs::read_to_string(dir.path("victim")).expect("there"),
            "victim"
        );
        assert!(!dir.path("nothing").exists());
        let files = [
            dir.transferred_file("data/first", "one"),
            dir.transferred_file("way/second", "two"),
        ];
        let why = dir
            .place_in_thread(&files)
            .expect_err("there is a link on the way")
            .to_string();
        assert!(why.contains("way/second cannot be carried along"), "{why}");
        assert!(
            !dir.path("data/first").exists() && !dir.path("data/second").exists(),
            "none of them is there"
        );
    }

    #[test]
    fn image_name_cannot_leave_the_image_directory() {
        let dir = TestDir::new();
        std::fs::write(dir.path("secret"), "secret").expect("written");
        let file = TransferredFile {
            image: "../secret".into(),
            ..dir.transferred_file("data/a", "")
        };
        assert!(dir.place_in_thread(&[file]).is_err());
        assert_eq!(
            std::fs::read_dir(dir.path("data")).expect("there").count(),
            0
        );
    }

    /// The journal of a killed tasker suffices to remove the files that it had written.
    #[test]
    fn notes_of_a_killed_tasker_undo_its_files() {
        let dir = TestDir::new();
        std::fs::write(dir.path("data/old"), "old").expect("written");
        let files = ["data/a", "data/old"].map(|path| dir.transferred_file(path, "new"));
        std::mem::forget(dir.place_in_thread(&files).expect("put"));
        assert!(dir.path("data/a").exists());
        checkpoint::file_transfer_journal::undo_all(&dir.real);
        let left: Vec<_> = std::fs::read_dir(dir.path("data"))
            .expect("there")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(left, ["old"]);
        assert_eq!(
            std::fs::read_dir(&dir.real).expect("there").count(),
            2,
            "the notes have gone as well"
        );
    }
}
