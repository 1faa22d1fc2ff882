//! Why the store did not do what it was asked for, what that means for what is in it, and what can be done.

use super::id::SetId;
use crate::facts::room::free_bytes;
use sempa_proto::Tid;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What was being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The store was opened.
    Open,
    /// A set was begun.
    Begin,
    /// Images were added to a set.
    Add,
    /// A set was finished.
    Finish,
    /// The sets were looked at.
    List,
    /// A set was read.
    Read,
    /// Images were unpacked.
    Unpack,
    /// A set was removed.
    Remove,
    /// Superfluous sets were removed.
    Sweep,
    /// It was noted that a job has ended, or has not.
    Mark,
}

impl Act {
    fn what(self) -> &'static str {
        match self {
            Act::Open => "cannot open the checkpoint store",
            Act::Begin => "cannot begin a set of checkpoints",
            Act::Add => "cannot add a task to a set of checkpoints",
            Act::Finish => "cannot finish a set of checkpoints",
            Act::List => "cannot look at the sets of checkpoints",
            Act::Read => "cannot read a set of checkpoints",
            Act::Unpack => "cannot unpack a checkpoint",
            Act::Remove => "cannot remove a set of checkpoints",
            Act::Sweep => "cannot remove superfluous sets of checkpoints",
            Act::Mark => "cannot note in a set of checkpoints whether its job has ended",
        }
    }

    /// What a failure has left behind.
    fn means(self) -> &'static str {
        match self {
            Act::Open => "no set was read or changed",
            Act::Begin => "no set was begun; those that are there are as they were",
            Act::Add => {
                "nothing of this task was kept; the sets that are complete are as they were"
            }
            Act::Finish => "this set was removed; those that were complete before are as they were",
            Act::List | Act::Read => "nothing was changed",
            Act::Mark => "it may be kept longer than it is needed",
            Act::Unpack => "nothing was left where it was to go; the set is as it was",
            Act::Remove | Act::Sweep => {
                "a set that was to go is either whole or no longer shown; what is left of it goes with the next sweep"
            }
        }
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what())
    }
}

/// Why the store did not do what it was asked for.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The directory is not fit for a store.
    #[error(
        "cannot keep checkpoints in {path}: {why}; nothing was read or written. Name a directory that is yours alone \
         (mode 0700), or one that is not there yet"
    )]
    Place {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The key file is not fit.
    #[error(
        "cannot use the key file {path}: {why}; nothing was read or written. It has to be a file of 32 bytes that only \
         you can read (mode 0600), outside the store; where there is none, one is made"
    )]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The system refused something.
    #[error("{act}: {path}: {source}; {means}", means = act.means())]
    Io {
        /// What was being done.
        act: Act,
        /// To which file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The disk, or what this user may have of it, is full.
    #[error(
        "{act}: {path}: the disk is full{room}; {means}. Make room there, or remove sets that are not needed",
        room = room(*missing, *free), means = act.means()
    )]
    Full {
        /// What was being done.
        act: Act,
        /// Which file was being written.
        path: PathBuf,
        /// Bytes that were still to be written at most, where that is known.
        missing: Option<u64>,
        /// Bytes that are free there, where that is known.
        free: Option<u64>,
    },
    /// The limits leave no place for another set, because of what may not be removed.
    #[error(
        "{act}: in {dir} the newest sets of other jobs, which are not removed by themselves, are {sets} with {bytes} bytes, \
         this one needs {needed} bytes at least, and the limits are {sets_max} sets and {bytes_max} bytes; {means}. Remove \
         sets of jobs that are not needed any more, or raise the limits",
        means = act.means()
    )]
    NoPlace {
        /// What was being done.
        act: Act,
        /// The store.
        dir: PathBuf,
        /// What the set has, or 1 where that is not known.
        needed: u64,
        /// The other jobs' newest sets.
        sets: usize,
        /// Their bytes.
        bytes: u64,
        /// The limit of sets.
        sets_max: usize,
        /// The limit of bytes.
        bytes_max: u64,
    },
    /// The set grows beyond what the limits leave for it.
    #[error(
        "cannot add {tid} to a set of checkpoints: the set has more than the {bytes_max} bytes that the limits of the store \
         leave for it beside the newest sets of other jobs; nothing of this task was kept, and the sets that are \
         complete are as they were. Raise the limit, or remove sets that are not needed"
    )]
    TooLarge {
        /// The task that was being added.
        tid: Tid,
        /// What the set may have.
        bytes_max: u64,
    },
    /// There is something among the images that is no image.
    #[error(
        "cannot add the images in {path} to a set of checkpoints: {why}; nothing of this task was kept"
    )]
    Images {
        /// The directory, or the file in it.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A task was added that is in the set.
    #[error(
        "cannot add {0} to a set of checkpoints: it is in it already, and what is in it stays as it is"
    )]
    Twice(Tid),
    /// More than a set may have.
    #[error("{act}: {what} are {count}, and at most {max} are possible; {means}", means = act.means())]
    TooMany {
        /// What was being done.
        act: Act,
        /// Of what there are too many.
        what: &'static str,
        /// How many.
        count: u64,
        /// How many are possible.
        max: u64,
    },
    /// There is no such set.
    #[error(
        "there is no complete set of checkpoints {0}: it was removed, or never finished; nothing was changed"
    )]
    NoSet(SetId),
    /// A copy was to be made of a set that is here.
    #[error(
        "the set of checkpoints {0} is in this store already: it is the store that the set was made in, or has a copy of it; nothing \
         was changed"
    )]
    There(SetId),
    /// The set has no such task.
    #[error("the set of checkpoints {id} has no task {tid}; nothing was unpacked")]
    NoPart {
        /// The set.
        id: SetId,
        /// The task.
        tid: Tid,
    },
    /// Something in the store that is no set.
    #[error(
        "{0} is in the checkpoint store and is not the name of a set; it is left alone. Move it elsewhere"
    )]
    Stranger(PathBuf),
    /// Sealed with another key.
    #[error(
        "{path} was sealed with another key than that in {key}, so it can neither be read nor be trusted; nothing of it was \
         used. Bring the key file of the store in which it was made"
    )]
    OtherKey {
        /// What was to be read.
        path: PathBuf,
        /// Our key file.
        key: PathBuf,
    },
    /// Not what was written.
    #[error(
        "{path} is not as it was written: {why}. It is refused, for a changed checkpoint could run anything, and nothing \
         of it was used. Go back to another set, and remove this one"
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// How that was noticed.
        why: String,
    },
    /// Somebody reads the set.
    #[error(
        "the set of checkpoints {0} is being read, so it was not removed; try again when that has ended"
    )]
    InUse(SetId),
    /// Another process keeps the store locked.
    #[error("{act}: another process has kept {dir} locked for {seconds} s; {means}", means = act.means())]
    Busy {
        /// What was being done.
        act: Act,
        /// The store.
        dir: PathBuf,
        /// How long it was waited.
        seconds: u64,
    },
}

fn room(missing: Option<u64>, free: Option<u64>) -> String {
    let free = free.map(|free| format!("{free} are free")).into_iter();
    let missing = missing
        .map(|missing| format!("up to {missing} bytes were still to be written"))
        .into_iter();
    let text = missing.chain(free).collect::<Vec<_>>().join(", ");
    if text.is_empty() {
        text
    } else {
        format!(" ({text})")
    }
}

/// Makes an error of what the system said.
pub(super) fn io(act: Act, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |source| failed(act, path, source, None)
}

/// The same where it is known how much was still to be written.
pub(super) fn failed(act: Act, path: &Path, source: io::Error, missing: Option<u64>) -> StoreError {
    if !matches!(
        source.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    ) {
        return StoreError::Io {
            act,
            path: path.to_path_buf(),
            source,
        };
    }
    // The file itself may be gone; the file system is that of its directory.
    let free = path.parent().and_then(|dir| free_bytes(dir).ok());
    StoreError::Full {
        act,
        path: path.to_path_buf(),
        missing,
        free,
    }
}
