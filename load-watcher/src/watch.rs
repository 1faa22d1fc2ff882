//! Notices at once when the login records change: the file is watched, and its directory, so that a file that comes
//! later or is replaced is seen as well.

use crate::owner::Records;
use crate::utmp::{FILE_BYTES_MAX, logins};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The default places of the login records, the first that exists.
const PLACES: [&str; 2] = ["/run/utmp", "/var/run/utmp"];

/// Where the login records are: as set, else in the usual place.
pub fn utmp_path(set: Option<PathBuf>) -> PathBuf {
    let usual = || PLACES.iter().map(PathBuf::from).find(|p| p.exists()).unwrap_or_else(|| PathBuf::from(PLACES[0]));
    set.unwrap_or_else(usual)
}

/// The watched file.
#[derive(Debug)]
pub struct Watch {
    path: PathBuf,
    inotify: Option<Inotify>,
    file: Option<WatchDescriptor>,
    dir: Option<WatchDescriptor>,
}

impl Watch {
    /// Watches the login records at `path`, which need not be there. Where the kernel has no watch left, changes are
    /// seen only by looking ([`Watch::is_blind`]).
    pub fn new(path: PathBuf) -> Watch {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        let mut watch = Watch { path, inotify, file: None, dir: None };
        watch.arm();
        watch
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True when neither the file nor its directory could be watched: look from time to time.
    pub fn is_blind(&self) -> bool {
        self.file.is_none() && self.dir.is_none()
    }

    /// Sets the watches that are missing. A file under this name that is another one than before gets its own.
    fn arm(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        if self.dir.is_none() {
            let dir = self.path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let flags = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_ONLYDIR;
            self.dir = inotify.add_watch(dir, flags).ok();
        }
        let flags = AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        let now = inotify.add_watch(&self.path, flags).ok();
        if let Some(old) = self.file.filter(|old| Some(*old) != now) {
            // The kernel may have taken it away already, with the file.
            let _ = inotify.rm_watch(old);
        }
        self.file = now;
    }

    /// Who is logged in now. The watches are set before the file is read, so that no change falls between.
    pub fn read(&mut self) -> Records {
        self.arm();
        let mut bytes = Vec::new();
        let read = File::open(&self.path).and_then(|f| f.take(FILE_BYTES_MAX as u64).read_to_end(&mut bytes));
        match read {
            Ok(_) => Records::Logins(logins(&bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Records::Missing,
            Err(e) => Records::Unreadable(e.to_string()),
        }
    }

    /// Waits until the records may have changed, but no longer than `span`. True: read them.
    pub fn wait(&mut self, span: Duration) -> bool {
        let until = Instant::now() + span;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Rounded up, so as not to spin through the last millisecond.
            let millis = left.as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let ready = match &self.inotify {
                Some(inotify) => poll(&mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)], timeout),
                None => poll(&mut [], timeout),
            };
            if matches!(ready, Ok(n) if n > 0) && self.relevant() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
        }
    }

    /// Takes the waiting news. True when some concern the records.
    fn relevant(&mut self) -> bool {
        let Some(inotify) = &self.inotify else { return false };
        let name = self.path.file_name().unwrap_or(OsStr::new(""));
        let mut relevant = false;
        while let Ok(events) = inotify.read_events() {
            for event in events {
                let of_dir = Some(event.wd) == self.dir;
                let lost = AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_MOVE_SELF;
                if of_dir && event.mask.intersects(lost) {
                    let _ = inotify.rm_watch(event.wd);
                    self.dir = None;
                }
                let overflow = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                let named = event.name.as_deref() == Some(name);
                relevant |= overflow || !of_dir || named || self.dir.is_none();
            }
        }
        relevant
    }
}
