//! Notices at once when files change: login records, sessions, policies, owners' words. A file is watched, and its folder, so
//! that a file that comes later or is replaced is seen as well.

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

/// The default places of the login records, the first that exists.
const PLACES: [&str; 2] = ["/run/utmp", "/var/run/utmp"];

/// Where the login records are: as set, else in the usual place.
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

/// Who is logged in by the records at `path`.
pub fn records(path: &Path) -> Records {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| f.take(FILE_BYTES_MAX as u64).read_to_end(&mut bytes));
    match read {
        Ok(_) => Records::Logins(logins(&bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Records::Missing,
        Err(e) => Records::Unreadable(e.to_string()),
    }
}

/// What is watched.
#[derive(Debug)]
enum What {
    File,
    /// A file that is read only when its writer has closed it: half of it, or nothing, would mean something else.
    Settings,
    /// The files in it whose names begin like this.
    Folder(&'static str),
}

/// One watched place; it need not be there.
#[derive(Debug)]
pub struct Spot {
    path: PathBuf,
    what: What,
    file: Option<WatchDescriptor>,
    dir: Option<WatchDescriptor>,
    /// There is no such folder.
    absent: bool,
    /// How often it was looked for in vain since.
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

    /// A file.
    pub fn file(path: PathBuf) -> Spot {
        Spot::new(path, What::File)
    }

    /// A file of settings.
    pub fn settings(path: PathBuf) -> Spot {
        Spot::new(path, What::Settings)
    }

    /// The files of a folder whose names begin with `prefix`.
    pub fn folder(path: PathBuf, prefix: &'static str) -> Spot {
        Spot::new(path, What::Folder(prefix))
    }

    /// The folder that is watched.
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
                // An event without a name is about the folder itself.
                What::File | What::Settings => name.is_none() || name == self.path.file_name(),
                What::Folder(prefix) => {
                    name.is_none_or(|n: &OsStr| n.as_bytes().starts_with(prefix.as_bytes()))
                }
            }
    }
}

/// A place without its folder is read for so many looks: the folder may have come and gone between the look and the reading, and what was
/// read last may not have been understood.
const MISSED_READ: u32 = 2;
/// Idle terminals that are watched at most; others are looked at from time to time.
pub const IDLE_MAX: usize = 64;
/// The bit of idle terminals.
const IDLE: u32 = 1 << 31;

/// What [`Watch::wait`] has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    changed: u32,
    /// The other descriptor has something to read.
    pub other: bool,
}

impl Woken {
    /// True when this spot may have changed.
    pub fn has(self, spot: usize) -> bool {
        self.changed & (1 << spot) != 0
    }

    /// True when somebody types at a terminal that was idle.
    pub fn typed(self) -> bool {
        self.changed & IDLE != 0
    }

    /// True when some spot may have changed, or somebody types.
    pub fn any(self) -> bool {
        self.changed != 0
    }
}

/// Places that are watched together, 31 at most; each is known by its number in the list. And terminals that are idle.
#[derive(Debug)]
pub struct Watch {
    inotify: Option<Inotify>,
    spots: Vec<Spot>,
    idle: BTreeMap<PathBuf, WatchDescriptor>,
}

impl Watch {
    /// Watches these places. Where the kernel has no watch left, changes are seen only by looking ([`Watch::is_blind`]).
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

    /// The watched place.
    pub fn path(&self, spot: usize) -> &Path {
        &self.spots[spot].path
    }

    /// True when neither the file nor its folder could be watched: look from time to time.
    pub fn is_blind(&self, spot: usize) -> bool {
        self.spots[spot].file.is_none() && self.spots[spot].dir.is_none()
    }

    /// Looks for a place that could not be watched so far, to be called from time to time. True when it has to be read; not where there
    /// has been no folder for some looks.
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

    /// Sets the watches that are missing; call it before reading, so that no change falls between. A file under this name
    /// that is another one than before gets its own.
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
            // The kernel may have taken it away already, with the file.
            let _ = inotify.rm_watch(old);
        }
        spot.file = now;
    }

    /// Watches these terminals, and no others, until somebody types there. It takes the right to read them; without it the
    /// next look will tell.
    pub fn watch_idle(&mut self, terminals: &BTreeSet<PathBuf>) {
        let Some(inotify) = &self.inotify else { return };
        self.idle.retain(|path, wd| {
            let stays = terminals.contains(path);
            if !stays {
                // The kernel has taken it away already if the terminal is gone.
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

    /// Waits until some place may have changed or the other descriptor can be read, but no longer than `span`.
    pub fn wait(&mut self, span: Duration, other: Option<BorrowedFd<'_>>) -> Woken {
        let until = Instant::now() + span;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Rounded up, so as not to spin through the last millisecond.
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

    /// Takes the waiting news: a bit for each place that they concern.
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
