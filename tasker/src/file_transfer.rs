//! Transfers open files together with a task.
//!
//! - At the source the files are copied next to the task's images.
//! - At the target the copies are written to the original paths of the files, if no file exists
//!   there, before the task is restored.
//! - If the migration fails, the target removes the written files. If the tasker is killed first,
//!   the daemon removes them; a journal next to the images lists the files.
//!
//! The files are written with the rights of the task's user, who is also the tasker's user. A
//! thread that writes for any user but root drops all capabilities first. No symbolic link on the
//! path to a file is followed.

use crate::dump_attempt::random_number;
use crate::image_manifest::ImageManifest;
use crate::image_vault::ImageDir;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{IncomingTask, TargetStage};
use crate::task_user::with_own_file_rights;
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

/// Prefix of the name of a transferred file next to the images. The file's index follows.
const IMAGE_FILE_PREFIX: &str = "sempa-file-";
/// Prefix of the temporary name of a file while it is being written at the target. A random number
/// follows.
const TEMPORARY_PREFIX: &str = ".sempa-";

/// An open file of the task that was copied next to the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransferredFile {
    /// Path of the file at the source and at the target.
    path: PathBuf,
    /// Name of the copy in the image directory.
    image_name: String,
    mode: u32,
    gid: u32,
}

impl TransferredFile {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn image_name(&self) -> &str {
        &self.image_name
    }
}

/// Copies the open files of a stopped task next to its images, if the task's policy requires
/// copies. `root_pid` is the task's root process.
///
/// # Errors
/// A file cannot be read, or the files exceed the limits.
pub(crate) fn copy_files_to_images(
    dir: &Path,
    root_pid: i32,
    processes: &[i32],
) -> Result<Vec<TransferredFile>, Failure> {
    let open_files = facts::files_to_copy(root_pid, processes);
    if open_files.len() > COPIED_FILES_MAX {
        return Err(Failure::Io(format!(
            "more than {COPIED_FILES_MAX} of its open files would have to be transferred"
        )));
    }
    let mut remaining_bytes = COPIED_BYTES_MAX;
    let mut transferred_files = Vec::new();
    for (index, file) in open_files.into_iter().enumerate() {
        let copy_name = format!("{IMAGE_FILE_PREFIX}{index}");
        remaining_bytes -= copy_file_to_images(&file, &dir.join(&copy_name), remaining_bytes)
            .map_err(|e| {
                Failure::Io(format!(
                    "{}, which must be transferred, cannot be read: {e}",
                    file.path.display()
                ))
            })?;
        transferred_files.push(TransferredFile {
            path: file.path,
            image_name: copy_name,
            mode: file.mode,
            gid: file.gid,
        });
    }
    Ok(transferred_files)
}

fn copy_file_to_images(file: &OpenFile, target: &Path, bytes_max: u64) -> io::Result<u64> {
    let source = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&file.fd_path)?;
    let create_target = || {
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(target)
    };
    // The source was opened with the rights of the task's user.
    let mut target = with_own_file_rights(create_target)?;
    let copied_bytes = io::copy(&mut source.take(bytes_max + 1), &mut target)?;
    let size_error = || {
        io::Error::other(format!(
            "all of them have more than {COPIED_BYTES_MAX} bytes"
        ))
    };
    if copied_bytes > bytes_max {
        Err(size_error())
    } else {
        Ok(copied_bytes)
    }
}

/// Files that were written to their original paths at the target. Dropping this value removes the
/// files unless [`keep_files`](Self::keep_files) was called.
#[derive(Debug, Default)]
pub(crate) struct PlacedFiles(Option<FileTransferJournal>);

impl PlacedFiles {
    /// Keeps the files: the task runs on this host and uses them.
    pub(crate) fn keep_files(self) {
        if let Some(journal) = self.0 {
            journal.retain_files();
        }
    }
}

/// Writes files to their original paths, if no file exists there. The calling thread must end
/// afterwards, because it has only the rights of its user.
///
/// # Errors
/// A file cannot be created. Then all files that were written are removed again.
fn write_files(image_dir: &ImageDir, files: &[TransferredFile]) -> Result<PlacedFiles, Failure> {
    let (dir, journal_dir) = (image_dir.path(), image_dir.journal_dir());
    let privilege_failure =
        |e: io::Error| Failure::Io(format!("cannot drop privileges to write files: {e}"));
    if !nix::unistd::geteuid().is_root() {
        sys::drop_capabilities().map_err(privilege_failure)?;
    }
    let journal_failure = |e: io::Error| {
        Failure::Io(format!(
            "the transferred files cannot be recorded next to {}: {e}",
            journal_dir.display()
        ))
    };
    let mut journal = FileTransferJournal::create_next_to(journal_dir).map_err(journal_failure)?;
    for file in files {
        let write_result = place_file(dir, file, &mut journal);
        write_result.map_err(|e| {
            Failure::Io(format!(
                "{} cannot be transferred: {e}",
                file.path.display()
            ))
        })?;
    }
    Ok(PlacedFiles(Some(journal)))
}

/// Writes one file under a temporary name, then renames it. Does nothing if a file exists at the
/// path; a file that another process creates there in the meantime is not replaced either.
fn place_file(
    dir: &Path,
    file: &TransferredFile,
    journal: &mut FileTransferJournal,
) -> io::Result<()> {
    let (parent_dir, name) = facts::open_parent_dir(&file.path)?;
    // An existing file is not replaced: the feasibility check has accepted it, or the engine
    // reports that it differs from the task's file.
    if fstatat(&parent_dir, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
        return Ok(());
    }
    let temporary_name = OsString::from(format!("{TEMPORARY_PREFIX}{:016x}", random_number()));
    journal.record(JournalEntry::Temporary(
        file.path.with_file_name(&temporary_name),
    ))?;
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut target: File = openat(
        &parent_dir,
        temporary_name.as_os_str(),
        flags,
        Mode::from_bits_truncate(0o600),
    )?
    .into();
    let metadata = target.metadata()?;
    let image_path = dir.join(Path::new(&file.image_name).file_name().unwrap_or_default());
    let open_source = || {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(image_path)
    };
    let mut source = with_own_file_rights(open_source)?;
    io::copy(&mut source, &mut target)?;
    if metadata.gid() != file.gid {
        fchown(&target, None, Some(Gid::from_raw(file.gid)))?;
    }
    // The mode is set last, because a change of the group clears some mode bits.
    target.set_permissions(std::fs::Permissions::from_mode(file.mode & 0o7777))?;
    journal.record(JournalEntry::Final(
        file.path.clone(),
        metadata.dev(),
        metadata.ino(),
    ))?;
    if !rename_no_replace(&parent_dir, &temporary_name, &name)? {
        // Another process has created a file at the path in the meantime; that file is not
        // replaced.
        unlinkat(
            &parent_dir,
            temporary_name.as_os_str(),
            UnlinkatFlags::NoRemoveDir,
        )?;
    }
    Ok(())
}

impl Supervisor {
    /// Starts a worker thread that writes the task's files before the task is restored.
    pub(crate) fn start_placing_files(
        &mut self,
        migration: MigrationId,
        image_dir: ImageDir,
        manifest: ImageManifest,
        redirect: Option<MemoryWrite>,
    ) {
        let written_dir = image_dir.clone();
        let work = move || WorkerResult::FilesPlaced {
            migration,
            result: write_files(&written_dir, &manifest.transferred_files),
        };
        let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")));
        let start_result =
            cancel.and_then(|cancel| self.migrations.workers.start_worker(&cancel, None, work));
        match (
            start_result,
            self.migrations.incoming_tasks.get_mut(&migration),
        ) {
            (Ok(_), Some(target)) => {
                target.stage = TargetStage::PlacingFiles {
                    image_dir,
                    redirect,
                    must_discard: false,
                }
            }
            (Ok(_), None) => {}
            (Err(why), _) => self.remove_incoming_task(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// Handles the result of writing the task's files. Starts the restore, or discards the
    /// migration if it failed or was cancelled.
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
        ) = self.migrations.incoming_tasks.get_mut(&migration)
        else {
            return;
        };
        let TargetStage::PlacingFiles {
            image_dir,
            redirect: redirection,
            must_discard: is_discarded,
        } = std::mem::replace(&mut target.stage, TargetStage::Prepared)
        else {
            return;
        };
        let result = match result {
            Ok(_) if is_discarded => Err(Failure::Cancelled("the migration was cancelled".into())),
            result => result,
        };
        match result {
            Ok(placed_files) => {
                target.placed_files = placed_files;
                self.start_engine_restore(migration, image_dir, redirection);
            }
            Err(why) => {
                let mut final_messages = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                final_messages.extend(is_discarded.then_some(FromTasker::Discarded { migration }));
                self.remove_incoming_task(migration, final_messages);
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
        real_path: PathBuf,
    }

    impl TestDir {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("dir");
            let real_dir = dir.path().canonicalize().expect("there");
            for name in ["images", "data"] {
                std::fs::create_dir(real_dir.join(name)).expect("made");
            }
            Self {
                _dir: dir,
                real_path: real_dir,
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.real_path.join(name)
        }

        fn transferred_file(&self, path: &str, content: &str) -> TransferredFile {
            let copy_name = format!("{IMAGE_FILE_PREFIX}{}", path.replace('/', "-"));
            std::fs::write(self.path("images").join(&copy_name), content).expect("written");
            let gid = std::fs::metadata(self.path("data")).expect("there").gid();
            TransferredFile {
                path: self.path(path),
                image_name: copy_name,
                mode: 0o640,
                gid,
            }
        }

        /// Writes the files on a separate thread, because the writing thread drops its
        /// capabilities.
        fn place_in_thread(&self, files: &[TransferredFile]) -> Result<PlacedFiles, Failure> {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| write_files(&ImageDir::OfDaemon(self.path("images")), files))
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
        let placed_files = dir.place_in_thread(&files).expect("put");
        assert_eq!(
            std::fs::metadata(dir.path("data/a")).expect("there").mode() & 0o7777,
            0o640
        );
        std::fs::rename(dir.path("data/a"), dir.path("data/c")).expect("renamed");
        std::fs::write(dir.path("data/a"), "somebody else's").expect("written");
        drop(placed_files);
        assert!(
            dir.path("data/a").exists()
                && dir.path("data/c").exists()
                && !dir.path("data/b").exists()
        );
        dir.place_in_thread(&files[1..]).expect("put").keep_files();
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
        let files_at_existing_paths =
            ["data/old", "data/link", "data/hanging"].map(|path| dir.transferred_file(path, "new"));
        drop(
            dir.place_in_thread(&files_at_existing_paths)
                .expect("what is there stays"),
        );
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
        assert!(why.contains("way/second cannot be transferred"), "{why}");
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
            image_name: "../secret".into(),
            ..dir.transferred_file("data/a", "")
        };
        assert!(dir.place_in_thread(&[file]).is_err());
        assert_eq!(
            std::fs::read_dir(dir.path("data")).expect("there").count(),
            0
        );
    }

    /// The journal of a killed tasker suffices to remove the files that the tasker has written.
    #[test]
    fn journal_of_killed_tasker_removes_its_files() {
        let dir = TestDir::new();
        std::fs::write(dir.path("data/old"), "old").expect("written");
        let files = ["data/a", "data/old"].map(|path| dir.transferred_file(path, "new"));
        std::mem::forget(dir.place_in_thread(&files).expect("put"));
        assert!(dir.path("data/a").exists());
        checkpoint::file_transfer_journal::undo_all_journals(&dir.real_path);
        let remaining_files: Vec<_> = std::fs::read_dir(dir.path("data"))
            .expect("there")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(remaining_files, ["old"]);
        assert_eq!(
            std::fs::read_dir(&dir.real_path).expect("there").count(),
            2,
            "the notes have gone as well"
        );
    }
}
