//! Reports changes of files without polling: login records, sessions, policies, owners' overrides
//! (inotify).
//!
//! For a file, its folder is watched as well, so that a file that is created later or replaced is
//! noticed.

use crate::owner::Records;
use crate::utmp::{FILE_BYTES_MAX, logins};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Default paths of the login records; the first one that exists is used.
const PLACES: [&str; 2] = ["/run/utmp", "/var/run/utmp"];

/// Returns the path of the login records: the one that was set, else the default.
pub fn utmp_path(set: Option<PathBuf>) -> PathBuf {
    let usual = || {
        PLACES
            .iter()
            .map(PathBuf::from)
            .find(|p| p.exists())
            .unwrap_or_else(|| PathBuf::from(PLACES[0]))
    };
    set.unwrap_or_else(usual)
}

/// Reads the login records at `path`.
pub fn records(path: &Path) -> Records {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| f.take(FILE_BYTES_MAX as u64).read_to_end(&mut bytes));
    match read {
        Ok(_) => Records::Logins(logins(&bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Records::Missing,
        Err(e) => Records::Unreadable(e.to_string()),
    }
}

/// Kind of a watched path.
#[derive(Debug)]
enum What {
    File,
    /// A file that is read only after its writer has closed it, because incomplete content could
    /// mean something else.
    Settings,
    /// The files of a folder whose names begin with this prefix.
    Folder(&'static str),
}

/// A watched path. The file or folder need not exist.
#[derive(Debug)]
pub struct Spot {
    path: PathBuf,
    what: What,
    file: Option<WatchDescriptor>,
    dir: Option<WatchDescriptor>,
    /// True if the folder does not exist.
    absent: bool,
    /// Number of failed attempts to set a watch since then.
    missed: u32,
}

impl Spot {
    fn new(path: PathBuf, what: What) -> Spot {
        Spot {
            path,
            what,
            file: None,
            dir: None,
            absent: false,
            missed: 0,
        }
    }

    /// Watches a file at every write.
    pub fn file(path: PathBuf) -> Spot {
        Spot::new(path, What::File)
    }

    /// Watches a file of settings, which is read only after its writer has closed it.
    pub fn settings(path: PathBuf) -> Spot {
        Spot::new(path, What::Settings)
    }

    /// Watches the files of a folder whose names begin with `prefix`.
    pub fn folder(path: PathBuf, prefix: &'static str) -> Spot {
        Spot::new(path, What::Folder(prefix))
    }

    /// Returns the folder in which changes are watched.
    fn folder_path(&self) -> &Path {
        match self.what {
            What::File | What::Settings => self
                .path
                .parent()
                .filter(|d| !d.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
            What::Folder(_) => &self.path,
        }
    }

    fn concerns(&self, event: &InotifyEvent) -> bool {
        if Some(event.wd) == self.file {
            return true;
        }
        let name = event.name.as_deref();
        Some(event.wd) == self.dir
            && match self.what {
                // An event without a name concerns the folder itself.
                What::File | What::Settings => name.is_none() || name == self.path.file_name(),
                What::Folder(prefix) => {
                    name.is_none_or(|n: &OsStr| n.as_bytes().starts_with(prefix.as_bytes()))
                }
            }
    }
}

/// Number of attempts after which a path without its folder is no longer read. More than one,
/// because the folder may have come and gone between the watch and the read, and its last content
/// may have been refused.
const MISSED_READ: u32 = 2;
/// Maximum number of idle terminals that are watched; further ones are examined periodically.
pub const IDLE_MAX: usize = 64;
/// Bit in `changed` for input at an idle terminal.
const IDLE: u32 = 1 << 31;

/// Reasons for which [`Watch::wait`] returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    changed: u32,
    /// True if the other descriptor is readable.
    pub other: bool,
}

impl Woken {
    /// True if this path may have changed.
    pub fn has(self, spot: usize) -> bool {
        self.changed & (1 << spot) != 0
    }

    /// True if there was input at a terminal that was idle.
    pub fn typed(self) -> bool {
        self.changed & IDLE != 0
    }

    /// True if a path may have changed or there was input at an idle terminal.
    pub fn any(self) -> bool {
        self.changed != 0
    }
}

/// Watches up to 31 paths, each known by its index, and idle terminals.
#[derive(Debug)]
pub struct Watch {
    inotify: Option<Inotify>,
    spots: Vec<Spot>,
    idle: BTreeMap<PathBuf, WatchDescriptor>,
}

impl Watch {
    /// Watches these paths. If the kernel has no watch left for one, its changes are noticed only
    /// by reading it ([`Watch::is_blind`]).
    pub fn new(spots: Vec<Spot>) -> Watch {
        assert!(
            spots.len() < 32,
            "one bit for each, and one for idle terminals"
        );
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let mut watch = Watch {
            inotify,
            spots,
            idle: BTreeMap::new(),
        };
        (0..watch.spots.len()).for_each(|i| watch.arm(i));
        watch
    }

    pub fn path(&self, spot: usize) -> &Path {
        &self.spots[spot].path
    }

    /// True if neither the file nor its folder could be watched; the path must then be read
    /// periodically.
    pub fn is_blind(&self, spot: usize) -> bool {
        self.spots[spot].file.is_none() && self.spots[spot].dir.is_none()
    }

    /// Tries again to watch a path that could not be watched; must be called periodically. Returns
    /// true if the path must be read, which is not the case after its folder was missing several
    /// times.
    pub fn look_for(&mut self, spot: usize) -> bool {
        if !self.is_blind(spot) {
            return false;
        }
        self.arm(spot);
        let spot = &mut self.spots[spot];
        spot.missed = if spot.absent {
            spot.missed.saturating_add(1)
        } else {
            0
        };
        spot.missed <= MISSED_READ
    }

    /// Sets the watches that are missing. Must be called before reading, so that no change between
    /// watch and read is lost. A file that replaced another one of the same name gets a new watch.
    pub fn arm(&mut self, i: usize) {
        let Some(inotify) = &self.inotify else { return };
        let spot = &mut self.spots[i];
        if spot.dir.is_none() {
            let flags = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_CLOSE_WRITE
                | AddWatchFlags::IN_ONLYDIR;
            let set = inotify.add_watch(spot.folder_path(), flags);
            spot.absent = set == Err(Errno::ENOENT);
            spot.dir = set.ok();
        }
        if matches!(spot.what, What::Folder(_)) {
            return;
        }
        let half = matches!(spot.what, What::File).then_some(AddWatchFlags::IN_MODIFY);
        let flags = half.unwrap_or(AddWatchFlags::empty())
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        let now = if spot.absent {
            None
        } else {
            inotify.add_watch(&spot.path, flags).ok()
        };
        if let Some(old) = spot.file.filter(|old| Some(*old) != now) {
            // Fails if the kernel has already removed the watch together with the file.
            let _ = inotify.rm_watch(old);
        }
        spot.file = now;
    }

    /// Watches exactly these terminals until there is input. That requires read permission; without
    /// it, input is noticed only by the next periodic check.
    pub fn watch_idle(&mut self, terminals: &BTreeSet<PathBuf>) {
        let Some(inotify) = &self.inotify else { return };
        self.idle.retain(|path, wd| {
            let stays = terminals.contains(path);
            if !stays {
                // Fails if the terminal is gone, because the kernel has then removed the watch.
                let _ = inotify.rm_watch(*wd);
            }
            stays
        });
        for path in terminals.iter().take(IDLE_MAX) {
            if !self.idle.contains_key(path)
                && let Ok(wd) = inotify.add_watch(path, AddWatchFlags::IN_ACCESS)
            {
                self.idle.insert(path.clone(), wd);
            }
        }
    }

    /// Waits until a path may have changed or the other descriptor is readable, at most for `span`.
    pub fn wait(&mut self, span: Duration, other: Option<BorrowedFd<'_>>) -> Woken {
        let until = Instant::now() + span;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Rounded up, to avoid a busy loop in the last millisecond.
            let millis = left.as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let fd = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let is_ready = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
            let (ours, others) = match (&self.inotify, other) {
                (Some(inotify), Some(other)) => {
                    let mut fds = [fd(inotify.as_fd()), fd(other)];
                    let _ = poll(&mut fds, timeout);
                    (is_ready(&fds[0]), is_ready(&fds[1]))
                }
                (Some(inotify), None) => {
                    let mut fds = [fd(inotify.as_fd())];
                    let _ = poll(&mut fds, timeout);
                    (is_ready(&fds[0]), false)
                }
                (None, Some(other)) => {
                    let mut fds = [fd(other)];
                    let _ = poll(&mut fds, timeout);
                    (false, is_ready(&fds[0]))
                }
                (None, None) => {
                    let _ = poll(&mut [], timeout);
                    (false, false)
                }
            };
            let changed = if ours { self.news() } else { 0 };
            if changed != 0 || others || Instant::now() >= until {
                return Woken {
                    changed,
                    other: others,
                };
            }
        }
    }

    /// Reads the pending inotify events and returns a bit for each path that they concern.
    fn news(&mut self) -> u32 {
        let Some(inotify) = &self.inotify else {
            return 0;
        };
        let mut changed = 0;
        while let Ok(events) = inotify.read_events() {
            for event in events {
                let lost = event
                    .mask
                    .intersects(AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_MOVE_SELF);
                let all = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                let mut drop_watch = false;
                for (i, spot) in self.spots.iter_mut().enumerate() {
                    if all || spot.concerns(&event) {
                        changed |= 1 << i;
                    }
                    if lost && spot.dir == Some(event.wd) {
                        (spot.dir, drop_watch) = (None, true);
                        changed |= 1 << i;
                    }
                }
                let before = self.idle.len();
                if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.idle.retain(|_, wd| *wd != event.wd);
                }
                if self.idle.len() != before || self.idle.values().any(|wd| *wd == event.wd) {
                    changed |= IDLE;
                }
                if drop_watch {
                    let _ = inotify.rm_watch(event.wd);
                }
            }
        }
        changed
    }
}
