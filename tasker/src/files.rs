//! Open files that are carried along with a task: at the source they are put beside its images, and at the target where they
//! were, if nothing is there, before the task is built. What was put there goes again if nothing comes of the move, and also if this
//! process is killed before: the daemon finds the notes.
//!
//! All of it is done with the rights of the task's user, who is also the tasker's: a thread that writes for anybody but root gives
//! up all further rights before, and no link is followed on the way to a file.

use crate::attempt::roll;
use crate::carry::Carry;
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{Stage, Target};
use crate::workers::Outcome;
use checkpoint::carried::{Note, Notes, name_it};
use checkpoint::engine::Cancel;
use checkpoint::facts::{self, CARRIED_BYTES_MAX, CARRIED_FILES_MAX, OpenFile};
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};
use nix::unistd::{Gid, UnlinkatFlags, fchown, unlinkat};
use sempa_proto::MigrationId;
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{FromTasker, Redirection};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// In front of the number of a file beside the images.
const NAME: &str = "sempa-file-";
/// In front of a number that nobody else uses: the name of a file that is not complete.
const NAMELESS: &str = ".sempa-";

/// A file beside the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Carried {
    /// Where it belongs.
    path: PathBuf,
    /// Its name beside the images.
    image: String,
    /// Permission bits.
    mode: u32,
    /// Its group.
    gid: u32,
}

/// Puts the open files of a task that stands still beside its images, if that is its policy.
///
/// # Errors
/// One of them cannot be read, or they are too much.
pub(crate) fn gather(dir: &Path, root: i32, processes: &[i32]) -> Result<Vec<Carried>, Failure> {
    let open = facts::files_to_carry(root, processes);
    if open.len() > CARRIED_FILES_MAX {
        return Err(Failure::Io(format!(
            "it has more than {CARRIED_FILES_MAX} files open that are to be carried along"
        )));
    }
    let mut left = CARRIED_BYTES_MAX;
    let mut carried = Vec::new();
    for (number, file) in open.into_iter().enumerate() {
        let image = format!("{NAME}{number}");
        left -= copy_out(&file, &dir.join(&image), left).map_err(|e| {
            Failure::Io(format!(
                "{}, which is to be carried along, cannot be read: {e}",
                file.path.display()
            ))
        })?;
        carried.push(Carried {
            path: file.path,
            image,
            mode: file.mode,
            gid: file.gid,
        });
    }
    Ok(carried)
}

fn copy_out(file: &OpenFile, to: &Path, bytes_max: u64) -> io::Result<u64> {
    let from = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&file.through)?;
    let mut to = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    let copied = io::copy(&mut from.take(bytes_max + 1), &mut to)?;
    let too_much = || {
        io::Error::other(format!(
            "all of them have more than {CARRIED_BYTES_MAX} bytes"
        ))
    };
    if copied > bytes_max {
        Err(too_much())
    } else {
        Ok(copied)
    }
}

/// Files that were put where they belong, if there were any. They go again with this, unless they are kept.
#[derive(Debug, Default)]
pub(crate) struct Made(Option<Notes>);

impl Made {
    /// The task runs here: they are its own.
    pub(crate) fn keep(self) {
        if let Some(notes) = self.0 {
            notes.keep();
        }
    }
}

/// Puts files where they belong and nothing is. For a thread that ends then: it has no rights but its user's afterwards.
///
/// # Errors
/// One of them cannot be made; then none of them is there.
fn put(dir: &Path, files: &[Carried]) -> Result<Made, Failure> {
    let io = |e: io::Error| Failure::Io(format!("cannot give up rights to write files: {e}"));
    if !nix::unistd::geteuid().is_root() {
        sys::give_up_rights().map_err(io)?;
    }
    let noted = |e: io::Error| {
        Failure::Io(format!(
            "what is carried along cannot be noted beside {}: {e}",
            dir.display()
        ))
    };
    let mut notes = Notes::beside(dir).map_err(noted)?;
    for file in files {
        let done = put_one(dir, file, &mut notes);
        done.map_err(|e| {
            Failure::Io(format!(
                "{} cannot be carried along: {e}",
                file.path.display()
            ))
        })?;
    }
    Ok(Made(Some(notes)))
}

/// Its content first, under a name that nobody else uses, and then its name.
fn put_one(dir: &Path, file: &Carried, notes: &mut Notes) -> io::Result<()> {
    let (folder, name) = facts::folder_of(&file.path)?;
    // What is there stays: the verdict has said that it is the right one, or the engine will say that it is not.
    if fstatat(&folder, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
        return Ok(());
    }
    let nameless = OsString::from(format!("{NAMELESS}{:016x}", roll()));
    notes.add(Note::Nameless(file.path.with_file_name(&nameless)))?;
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut to: File = openat(
        &folder,
        nameless.as_os_str(),
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
    // Last, because a change of the group takes some of it away.
    to.set_permissions(std::fs::Permissions::from_mode(file.mode & 0o7777))?;
    notes.add(Note::Named(file.path.clone(), meta.dev(), meta.ino()))?;
    if !name_it(&folder, &nameless, &name)? {
        // Somebody was quicker.
        unlinkat(&folder, nameless.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
    }
    Ok(())
}

impl Supervisor {
    /// Puts files where they belong, in the background, before a task is built.
    pub(crate) fn place_files(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        carry: Carry,
        again: Option<Redirection>,
    ) {
        let from = dir.to_path_buf();
        let work = move || Outcome::Placed {
            migration,
            result: put(&from, &carry.files),
        };
        let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")));
        let started = cancel.and_then(|cancel| self.moves.workers.start(&cancel, None, work));
        match (started, self.moves.targets.get_mut(&migration)) {
            (Ok(_), Some(target)) => {
                target.stage = Stage::Placing {
                    dir: dir.into(),
                    again,
                    discard: false,
                }
            }
            (Ok(_), None) => {}
            (Err(why), _) => self.clear_target(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// They are there, or are not.
    pub(crate) fn placed(&mut self, migration: MigrationId, result: Result<Made, Failure>) {
        let Some(
            target @ Target {
                stage: Stage::Placing { .. },
                ..
            },
        ) = self.moves.targets.get_mut(&migration)
        else {
            return;
        };
        let Stage::Placing {
            dir,
            again,
            discard,
        } = std::mem::replace(&mut target.stage, Stage::Prepared)
        else {
            return;
        };
        let result = match result {
            Ok(_) if discard => Err(Failure::CalledOff("the move was discarded".into())),
            result => result,
        };
        match result {
            Ok(made) => {
                target.made = made;
                self.build(migration, &dir, again);
            }
            Err(why) => {
                let mut last = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                last.extend(discard.then_some(FromTasker::Discarded { migration }));
                self.clear_target(migration, last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Place {
        _dir: tempfile::TempDir,
        real: PathBuf,
    }

    impl Place {
        fn new() -> Place {
            let dir = tempfile::tempdir().expect("dir");
            let real = dir.path().canonicalize().expect("there");
            for name in ["images", "data"] {
                std::fs::create_dir(real.join(name)).expect("made");
            }
            Place { _dir: dir, real }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.real.join(name)
        }

        fn carried(&self, path: &str, content: &str) -> Carried {
            let image = format!("{NAME}{}", path.replace('/', "-"));
            std::fs::write(self.at("images").join(&image), content).expect("written");
            let gid = std::fs::metadata(self.at("data")).expect("there").gid();
            Carried {
                path: self.at(path),
                image,
                mode: 0o640,
                gid,
            }
        }

        /// In a thread of its own, as always.
        fn put(&self, files: &[Carried]) -> Result<Made, Failure> {
            std::thread::scope(|scope| {
                scope
                    .spawn(|| put(&self.at("images"), files))
                    .join()
                    .expect("it ends")
            })
        }
    }

    #[test]
    fn files_are_put_where_they_belong_and_go_again_unless_they_are_kept() {
        let place = Place::new();
        let files = [
            place.carried("data/a", "one"),
            place.carried("data/b", "two"),
        ];
        drop(place.put(&files).expect("put"));
        assert!(!place.at("data/a").exists() && !place.at("data/b").exists());
        let made = place.put(&files).expect("put");
        assert_eq!(
            std::fs::metadata(place.at("data/a")).expect("there").mode() & 0o7777,
            0o640
        );
        std::fs::rename(place.at("data/a"), place.at("data/c")).expect("renamed");
        std::fs::write(place.at("data/a"), "somebody else's").expect("written");
        drop(made);
        assert!(
            place.at("data/a").exists()
                && place.at("data/c").exists()
                && !place.at("data/b").exists()
        );
        place.put(&files[1..]).expect("put").keep();
        assert_eq!(
            std::fs::read_to_string(place.at("data/b")).expect("there"),
            "two"
        );
    }

    #[test]
    fn nothing_is_written_over_and_no_link_is_followed() {
        let place = Place::new();
        std::fs::write(place.at("data/old"), "old").expect("written");
        std::fs::write(place.at("victim"), "victim").expect("written");
        symlink(place.at("victim"), place.at("data/link")).expect("linked");
        symlink(place.at("nothing"), place.at("data/hanging")).expect("linked");
        symlink(place.at("data"), place.at("way")).expect("linked");
        let there =
            ["data/old", "data/link", "data/hanging"].map(|path| place.carried(path, "new"));
        drop(place.put(&there).expect("what is there stays"));
        assert_eq!(
            std::fs::read_to_string(place.at("data/old")).expect("there"),
            "old"
        );
        assert_eq!(
            std::fs::read_to_string(place.at("victim")).expect("there"),
            "victim"
        );
        assert!(!place.at("nothing").exists());
        let files = [
            place.carried("data/first", "one"),
            place.carried("way/second", "two"),
        ];
        let why = place
            .put(&files)
            .expect_err("there is a link on the way")
            .to_string();
        assert!(why.contains("way/second cannot be carried along"), "{why}");
        assert!(
            !place.at("data/first").exists() && !place.at("data/second").exists(),
            "none of them is there"
        );
    }

    #[test]
    fn what_is_beside_the_images_cannot_be_taken_from_elsewhere() {
        let place = Place::new();
        std::fs::write(place.at("secret"), "secret").expect("written");
        let file = Carried {
            image: "../secret".into(),
            ..place.carried("data/a", "")
        };
        assert!(place.put(&[file]).is_err());
        assert_eq!(
            std::fs::read_dir(place.at("data")).expect("there").count(),
            0
        );
    }

    #[test]
    fn whoever_finds_the_notes_of_a_killed_tasker_removes_what_it_had_put_somewhere() {
        let place = Place::new();
        std::fs::write(place.at("data/old"), "old").expect("written");
        let files = ["data/a", "data/old"].map(|path| place.carried(path, "new"));
        std::mem::forget(place.put(&files).expect("put"));
        assert!(place.at("data/a").exists());
        checkpoint::carried::undo_all(&place.real);
        let left: Vec<_> = std::fs::read_dir(place.at("data"))
            .expect("there")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(left, ["old"]);
        assert_eq!(
            std::fs::read_dir(&place.real).expect("there").count(),
            2,
            "the notes have gone as well"
        );
    }
}
