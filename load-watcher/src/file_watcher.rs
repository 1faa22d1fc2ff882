//! Reports changes of files without polling, by inotify: login records, sessions, policies and
//! owners' overrides.
//!
//! For a file, the directory that contains it is watched, too, so that a file that is created later
//! or replaced is noticed.

use crate::owner::LoginRecords;
use crate::utmp::{FILE_BYTES_MAX, parse_logins};
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
const UTMP_PATHS: [&str; 2] = ["/run/utmp", "/var/run/utmp"];

/// Returns the path of the login records: `set` if it is given, otherwise the default.
pub fn utmp_path(set: Option<PathBuf>) -> PathBuf {
    let default_path = || {
        UTMP_PATHS
            .iter()
            .map(PathBuf::from)
            .find(|p| p.exists())
            .unwrap_or_else(|| PathBuf::from(UTMP_PATHS[0]))
    };
    set.unwrap_or_else(default_path)
}

/// Reads the login records at `path`.
pub fn read_login_records(path: &Path) -> LoginRecords {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| f.take(FILE_BYTES_MAX as u64).read_to_end(&mut bytes));
    match read {
        Ok(_) => LoginRecords::Logins(parse_logins(&bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => LoginRecords::Missing,
        Err(e) => LoginRecords::Unreadable(e.to_string()),
    }
}

/// Watched object at a path, and the events that concern the object.
#[derive(Debug)]
enum WatchKind {
    File,
    /// A file that is read only after its writer has closed it, because incomplete content could
    /// have another meaning.
    Settings,
    /// The files of a directory whose names begin with this prefix.
    Folder(&'static str),
}

/// A watched path and its inotify watches. The file or directory need not exist.
#[derive(Debug)]
pub struct WatchedPath {
    path: PathBuf,
    kind: WatchKind,
    file_watch: Option<WatchDescriptor>,
    dir_watch: Option<WatchDescriptor>,
    /// True if the directory that must be watched does not exist.
    folder_missing: bool,
    /// Number of consecutive failed attempts to set a watch since the directory is missing.
    failed_attempts: u32,
}

impl WatchedPath {
    fn new(path: PathBuf, what: WatchKind) -> WatchedPath {
        WatchedPath {
            path,
            kind: what,
            file_watch: None,
            dir_watch: None,
            folder_missing: false,
            failed_attempts: 0,
        }
    }

    /// Creates the entry for a file that is read after every write.
    pub fn file(path: PathBuf) -> WatchedPath {
        WatchedPath::new(path, WatchKind::File)
    }

    /// Creates the entry for a file of settings, which is read only after its writer has closed it.
    pub fn settings(path: PathBuf) -> WatchedPath {
        WatchedPath::new(path, WatchKind::Settings)
    }

    /// Creates the entry for the files of a directory whose names begin with `prefix`.
    pub fn folder(path: PathBuf, prefix: &'static str) -> WatchedPath {
        WatchedPath::new(path, WatchKind::Folder(prefix))
    }

    /// Returns the directory that is watched for this path.
    fn folder_path(&self) -> &Path {
        match self.kind {
            WatchKind::File | WatchKind::Settings => self
                .path
                .parent()
                .filter(|d| !d.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
            WatchKind::Folder(_) => &self.path,
        }
    }

    fn matches(&self, event: &InotifyEvent) -> bool {
        if Some(event.wd) == self.file_watch {
            return true;
        }
        let name = event.name.as_deref();
        Some(event.wd) == self.dir_watch
            && match self.kind {
                // An event without a file name concerns the directory itself.
                WatchKind::File | WatchKind::Settings => {
                    name.is_none() || name == self.path.file_name()
                }
                WatchKind::Folder(prefix) => {
                    name.is_none_or(|n: &OsStr| n.as_bytes().starts_with(prefix.as_bytes()))
                }
            }
    }
}

/// Number of attempts after which a path in a missing directory is not read any more. It is more
/// than one, because the directory may have been created and removed between the watch and the
/// read, and the content in between may have been refused.
const MISSING_FOLDER_READS_MAX: u32 = 2;
/// Maximum number of idle terminals that are watched; other idle terminals are examined
/// periodically.
pub const IDLE_TERMINALS_MAX: usize = 64;
/// Bit in [`WakeReasons`] that is set after input at an idle terminal.
const IDLE_TERMINAL_BIT: u32 = 1 << 31;

/// The reasons for which [`FileWatcher::wait`] returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WakeReasons {
    changed_bits: u32,
    /// True if the additional descriptor is readable.
    pub other_ready: bool,
}

impl WakeReasons {
    /// True if the path with this index may have changed.
    pub fn path_changed(self, index: usize) -> bool {
        self.changed_bits & (1 << index) != 0
    }

    /// True if there was input at a terminal that was idle.
    pub fn terminal_used(self) -> bool {
        self.changed_bits & IDLE_TERMINAL_BIT != 0
    }

    /// True if a path may have changed or there was input at an idle terminal.
    pub fn any_change(self) -> bool {
        self.changed_bits != 0
    }
}

/// Watches up to 31 paths, each identified by its index, and idle terminals.
#[derive(Debug)]
pub struct FileWatcher {
    inotify: Option<Inotify>,
    paths: Vec<WatchedPath>,
    idle_terminals: BTreeMap<PathBuf, WatchDescriptor>,
}

impl FileWatcher {
    /// Watches these paths. If the kernel has no watch left for a path, the path must be read
    /// periodically ([`FileWatcher::is_unwatched`]).
    pub fn new(spots: Vec<WatchedPath>) -> FileWatcher {
        assert!(
            spots.len() < 32,
            "one bit for each, and one for idle terminals"
        );
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let mut watch = FileWatcher {
            inotify,
            paths: spots,
            idle_terminals: BTreeMap::new(),
        };
        (0..watch.paths.len()).for_each(|i| watch.arm(i));
        watch
    }

    pub fn path(&self, index: usize) -> &Path {
        &self.paths[index].path
    }

    /// True if neither the file nor its directory could be watched, so that the path must be read
    /// periodically.
    pub fn is_unwatched(&self, index: usize) -> bool {
        self.paths[index].file_watch.is_none() && self.paths[index].dir_watch.is_none()
    }

    /// Tries again to watch a path that could not be watched; must be called periodically. Returns
    /// true if the path must be read now. Returns false if the path is already watched, or if its
    /// directory was missing in several attempts.
    pub fn retry_watch(&mut self, index: usize) -> bool {
        if !self.is_unwatched(index) {
            return false;
        }
        self.arm(index);
        let index = &mut self.paths[index];
        index.failed_attempts = if index.folder_missing {
            index.failed_attempts.saturating_add(1)
        } else {
            0
        };
        index.failed_attempts <= MISSING_FOLDER_READS_MAX
    }

    /// Sets the missing watches of the path with index `index`. Must be called before the path is
    /// read, so that no change between watch and read is missed. A file that has replaced another
    /// file of the same name gets a new watch.
    pub fn arm(&mut self, index: usize) {
        let Some(inotify) = &self.inotify else { return };
        let spot = &mut self.paths[index];
        if spot.dir_watch.is_none() {
            let flags = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_CLOSE_WRITE
                | AddWatchFlags::IN_ONLYDIR;
            let set = inotify.add_watch(spot.folder_path(), flags);
            spot.folder_missing = set == Err(Errno::ENOENT);
            spot.dir_watch = set.ok();
        }
        if matches!(spot.kind, WatchKind::Folder(_)) {
            return;
        }
        let half = matches!(spot.kind, WatchKind::File).then_some(AddWatchFlags::IN_MODIFY);
        let flags = half.unwrap_or(AddWatchFlags::empty())
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        let now = if spot.folder_missing {
            None
        } else {
            inotify.add_watch(&spot.path, flags).ok()
        };
        if let Some(old) = spot.file_watch.filter(|old| Some(*old) != now) {
            // Fails if the kernel has already removed the watch together with the file.
            let _ = inotify.rm_watch(old);
        }
        spot.file_watch = now;
    }

    /// Watches exactly these terminals until there is input. The watch requires read permission for
    /// the terminal; without it, input is noticed only by the next periodic check.
    pub fn watch_idle_terminals(&mut self, terminals: &BTreeSet<PathBuf>) {
        let Some(inotify) = &self.inotify else { return };
        self.idle_terminals.retain(|path, wd| {
            let stays = terminals.contains(path);
            if !stays {
                // Fails if the terminal does not exist any more, because the kernel has then
                // removed the watch.
                let _ = inotify.rm_watch(*wd);
            }
            stays
        });
        for path in terminals.iter().take(IDLE_TERMINALS_MAX) {
            if !self.idle_terminals.contains_key(path)
                && let Ok(wd) = inotify.add_watch(path, AddWatchFlags::IN_ACCESS)
            {
                self.idle_terminals.insert(path.clone(), wd);
            }
        }
    }

    /// Waits until a path may have changed or the descriptor `other` is readable, at most for
    /// `span`.
    pub fn wait(&mut self, span: Duration, other: Option<BorrowedFd<'_>>) -> WakeReasons {
        let until = Instant::now() + span;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Rounded up, to avoid a busy loop in the last millisecond.
            let millis = left.as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let fd = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let is_ready = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
            let (inotify_ready, other_ready) = match (&self.inotify, other) {
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
            let changed = if inotify_ready { self.read_events() } else { 0 };
            if changed != 0 || other_ready || Instant::now() >= until {
                return WakeReasons {
                    changed_bits: changed,
                    other_ready,
                };
            }
        }
    }

    /// Reads the pending inotify events. Returns a bit for each path that they concern.
    fn read_events(&mut self) -> u32 {
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
                for (i, spot) in self.paths.iter_mut().enumerate() {
                    if all || spot.matches(&event) {
                        changed |= 1 << i;
                    }
                    if lost && spot.dir_watch == Some(event.wd) {
                        (spot.dir_watch, drop_watch) = (None, true);
                        changed |= 1 << i;
                    }
                }
                let before = self.idle_terminals.len();
                if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.idle_terminals.retain(|_, wd| *wd != event.wd);
                }
                if self.idle_terminals.len() != before
                    || self.idle_terminals.values().any(|wd| *wd == event.wd)
                {
                    changed |= IDLE_TERMINAL_BIT;
                }
                if drop_watch {
                    let _ = inotify.rm_watch(event.wd);
                }
            }
        }
        changed
    }
}
