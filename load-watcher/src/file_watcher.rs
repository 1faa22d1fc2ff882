//! Reports changes of files without polling, by inotify: login records, sessions, policies and
//! owners' overrides.
//!
//! For each file, the directory that contains it is watched as well, so that a file that is created
//! later or replaced is noticed.

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

/// Returns the path of the login records: `configured_path` if it is present, otherwise the first
/// default path that exists.
pub fn utmp_path(configured_path: Option<PathBuf>) -> PathBuf {
    let default_path = || {
        UTMP_PATHS
            .iter()
            .map(PathBuf::from)
            .find(|p| p.exists())
            .unwrap_or_else(|| PathBuf::from(UTMP_PATHS[0]))
    };
    configured_path.unwrap_or_else(default_path)
}

/// Reads the login records in the file `path`. Returns the logins, or whether the file is missing
/// or why it cannot be read.
pub fn read_login_records(path: &Path) -> LoginRecords {
    let mut bytes = Vec::new();
    let read_result =
        File::open(path).and_then(|f| f.take(FILE_BYTES_MAX as u64).read_to_end(&mut bytes));
    match read_result {
        Ok(_) => LoginRecords::Logins(parse_logins(&bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => LoginRecords::Missing,
        Err(e) => LoginRecords::Unreadable(e.to_string()),
    }
}

/// The kind of object at a path, which determines the relevant events.
#[derive(Debug)]
enum WatchKind {
    /// A file that is read after every write.
    File,
    /// A file that is read only after its writer has closed the file, because incomplete content
    /// could have another meaning.
    Settings,
    /// The files of a directory whose names begin with this prefix.
    Dir(&'static str),
}

/// A watched path and its inotify watches. The file or directory need not exist.
#[derive(Debug)]
pub struct WatchedPath {
    path: PathBuf,
    watch_kind: WatchKind,
    file_watch: Option<WatchDescriptor>,
    dir_watch: Option<WatchDescriptor>,
    /// True if the directory that must be watched did not exist at the last attempt to watch it.
    dir_missing: bool,
    /// Number of consecutive attempts at which the directory was missing.
    missing_dir_attempts: u32,
}

impl WatchedPath {
    /// Creates the entry without watches; [`FileWatcher::set_missing_watches`] sets them.
    fn new(path: PathBuf, watch_kind: WatchKind) -> Self {
        Self {
            path,
            watch_kind,
            file_watch: None,
            dir_watch: None,
            dir_missing: false,
            missing_dir_attempts: 0,
        }
    }

    /// Creates the entry for a file that is read after every write.
    pub fn file(path: PathBuf) -> Self {
        Self::new(path, WatchKind::File)
    }

    /// Creates the entry for a file of settings. The file is read only after its writer has closed
    /// the file.
    pub fn settings(path: PathBuf) -> Self {
        Self::new(path, WatchKind::Settings)
    }

    /// Creates the entry for the files of a directory whose names begin with `prefix`.
    pub fn dir(path: PathBuf, prefix: &'static str) -> Self {
        Self::new(path, WatchKind::Dir(prefix))
    }

    /// Returns the directory that is watched for this path: the path itself, or its parent if the
    /// path is a file.
    fn watched_dir(&self) -> &Path {
        match self.watch_kind {
            WatchKind::File | WatchKind::Settings => self
                .path
                .parent()
                .filter(|d| !d.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
            WatchKind::Dir(_) => &self.path,
        }
    }

    fn concerns_path(&self, event: &InotifyEvent) -> bool {
        if Some(event.wd) == self.file_watch {
            return true;
        }
        let name = event.name.as_deref();
        Some(event.wd) == self.dir_watch
            && match self.watch_kind {
                // An event without a file name concerns the directory itself.
                WatchKind::File | WatchKind::Settings => {
                    name.is_none() || name == self.path.file_name()
                }
                WatchKind::Dir(prefix) => {
                    name.is_none_or(|n: &OsStr| n.as_bytes().starts_with(prefix.as_bytes()))
                }
            }
    }
}

/// Maximum number of consecutive attempts to watch a path in a missing directory after which the
/// path is still read. One read is not enough: between the watch and the read, the directory may
/// have been created and removed, and the read may have refused the content.
const MISSING_DIR_READS_MAX: u32 = 2;
/// Maximum number of idle terminals that are watched. All other idle terminals are examined
/// periodically.
pub const IDLE_TERMINALS_MAX: usize = 64;
/// Bit in [`WakeReasons`] that is set after input at an idle terminal.
const IDLE_TERMINAL_BIT: u32 = 1 << 31;

/// The reasons for which [`FileWatcher::wait`] returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WakeReasons {
    changed_bits: u32,
    /// True if the descriptor `additional_fd` that was passed to [`FileWatcher::wait`] is readable.
    pub additional_fd_ready: bool,
}

impl WakeReasons {
    /// True if the path with the index `index` may have changed.
    pub fn path_changed(self, index: usize) -> bool {
        self.changed_bits & (1 << index) != 0
    }

    /// True after input at a terminal that was idle, or after the removal of such a terminal.
    pub fn terminal_used(self) -> bool {
        self.changed_bits & IDLE_TERMINAL_BIT != 0
    }

    /// True if a path may have changed, or there was input at an idle terminal, or an idle terminal
    /// was removed.
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
    /// Watches these paths. If a path cannot be watched, it must be read periodically
    /// ([`FileWatcher::is_unwatched`]).
    ///
    /// # Panics
    /// There are more than 31 paths.
    pub fn new(watched_paths: Vec<WatchedPath>) -> Self {
        assert!(
            watched_paths.len() < 32,
            "one bit for each, and one for idle terminals"
        );
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let mut watcher = Self {
            inotify,
            paths: watched_paths,
            idle_terminals: BTreeMap::new(),
        };
        (0..watcher.paths.len()).for_each(|i| watcher.set_missing_watches(i));
        watcher
    }

    pub fn path_count(&self) -> usize {
        self.paths.len()
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
    /// true if the path must be read now. Returns false if the path was already watched, or if its
    /// directory was missing in more than `MISSING_DIR_READS_MAX` consecutive attempts.
    pub fn retry_watch(&mut self, path_index: usize) -> bool {
        if !self.is_unwatched(path_index) {
            return false;
        }
        self.set_missing_watches(path_index);
        let path_index = &mut self.paths[path_index];
        path_index.missing_dir_attempts = if path_index.dir_missing {
            path_index.missing_dir_attempts.saturating_add(1)
        } else {
            0
        };
        path_index.missing_dir_attempts <= MISSING_DIR_READS_MAX
    }

    /// Sets the missing watches of the path with index `index`. Must be called before the path is
    /// read, so that no change between watch and read is missed. If the file at the path was
    /// replaced, the new file is watched.
    pub fn set_missing_watches(&mut self, index: usize) {
        let Some(inotify) = &self.inotify else { return };
        let watched_path = &mut self.paths[index];
        if watched_path.dir_watch.is_none() {
            let flags = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_CLOSE_WRITE
                | AddWatchFlags::IN_ONLYDIR;
            let watch_result = inotify.add_watch(watched_path.watched_dir(), flags);
            watched_path.dir_missing = watch_result == Err(Errno::ENOENT);
            watched_path.dir_watch = watch_result.ok();
        }
        if matches!(watched_path.watch_kind, WatchKind::Dir(_)) {
            return;
        }
        let modify_flag =
            matches!(watched_path.watch_kind, WatchKind::File).then_some(AddWatchFlags::IN_MODIFY);
        let flags = modify_flag.unwrap_or(AddWatchFlags::empty())
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        let new_file_watch = if watched_path.dir_missing {
            None
        } else {
            inotify.add_watch(&watched_path.path, flags).ok()
        };
        if let Some(old_file_watch) = watched_path
            .file_watch
            .filter(|old_file_watch| Some(*old_file_watch) != new_file_watch)
        {
            // Fails if the kernel has already removed the watch together with the file.
            let _ = inotify.rm_watch(old_file_watch);
        }
        watched_path.file_watch = new_file_watch;
    }

    /// Watches exactly these terminals, at most [`IDLE_TERMINALS_MAX`], for input. The watch
    /// requires read permission for the terminal; without the permission, input is noticed only by
    /// the next periodic check.
    pub fn watch_idle_terminals(&mut self, terminals: &BTreeSet<PathBuf>) {
        let Some(inotify) = &self.inotify else { return };
        self.idle_terminals.retain(|path, wd| {
            let is_idle = terminals.contains(path);
            if !is_idle {
                // Fails if the terminal does not exist any more; the kernel has then already
                // removed the watch.
                let _ = inotify.rm_watch(*wd);
            }
            is_idle
        });
        for path in terminals.iter().take(IDLE_TERMINALS_MAX) {
            if !self.idle_terminals.contains_key(path)
                && let Ok(wd) = inotify.add_watch(path, AddWatchFlags::IN_ACCESS)
            {
                self.idle_terminals.insert(path.clone(), wd);
            }
        }
    }

    /// Waits until a path may have changed, an idle terminal was used, or the descriptor
    /// `additional_fd` is readable, but at most for `timeout_duration`. Returns the reasons.
    pub fn wait(
        &mut self,
        timeout_duration: Duration,
        additional_fd: Option<BorrowedFd<'_>>,
    ) -> WakeReasons {
        let deadline = Instant::now() + timeout_duration;
        loop {
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            // The time is rounded up, to avoid a busy loop in the last millisecond.
            let millis = remaining_time.as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let poll_fd = |poll_fd| PollFd::new(poll_fd, PollFlags::POLLIN);
            let fd_is_ready = |poll_fd: &PollFd<'_>| poll_fd.any().unwrap_or(false);
            let (inotify_ready, additional_fd_ready) = match (&self.inotify, additional_fd) {
                (Some(inotify), Some(additional_fd)) => {
                    let mut fds = [poll_fd(inotify.as_fd()), poll_fd(additional_fd)];
                    let _ = poll(&mut fds, timeout);
                    (fd_is_ready(&fds[0]), fd_is_ready(&fds[1]))
                }
                (Some(inotify), None) => {
                    let mut fds = [poll_fd(inotify.as_fd())];
                    let _ = poll(&mut fds, timeout);
                    (fd_is_ready(&fds[0]), false)
                }
                (None, Some(additional_fd)) => {
                    let mut fds = [poll_fd(additional_fd)];
                    let _ = poll(&mut fds, timeout);
                    (false, fd_is_ready(&fds[0]))
                }
                (None, None) => {
                    let _ = poll(&mut [], timeout);
                    (false, false)
                }
            };
            let changed_bits = if inotify_ready { self.read_events() } else { 0 };
            if changed_bits != 0 || additional_fd_ready || Instant::now() >= deadline {
                return WakeReasons {
                    changed_bits,
                    additional_fd_ready,
                };
            }
        }
    }

    /// Reads the pending inotify events. Returns a bit mask: a bit for each path that may have
    /// changed, and [`IDLE_TERMINAL_BIT`] after input at an idle terminal or its removal. Forgets
    /// watches that the kernel has removed.
    fn read_events(&mut self) -> u32 {
        let Some(inotify) = &self.inotify else {
            return 0;
        };
        let mut changed_bits = 0;
        while let Ok(events) = inotify.read_events() {
            for event in events {
                let watch_lost = event
                    .mask
                    .intersects(AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_MOVE_SELF);
                let queue_overflowed = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                let mut must_drop_watch = false;
                for (i, watched_path) in self.paths.iter_mut().enumerate() {
                    if queue_overflowed || watched_path.concerns_path(&event) {
                        changed_bits |= 1 << i;
                    }
                    if watch_lost && watched_path.dir_watch == Some(event.wd) {
                        (watched_path.dir_watch, must_drop_watch) = (None, true);
                        changed_bits |= 1 << i;
                    }
                }
                let previous_terminal_count = self.idle_terminals.len();
                if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.idle_terminals.retain(|_, wd| *wd != event.wd);
                }
                if self.idle_terminals.len() != previous_terminal_count
                    || self.idle_terminals.values().any(|wd| *wd == event.wd)
                {
                    changed_bits |= IDLE_TERMINAL_BIT;
                }
                if must_drop_watch {
                    let _ = inotify.rm_watch(event.wd);
                }
            }
        }
        changed_bits
    }
}
