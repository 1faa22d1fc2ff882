//! Wakes event loops of asyncio when a message arrives for which one of their coroutines waits.
//!
//! One thread per task waits for messages. It takes no message: it writes to the eventfd of the
//! loop, and the coroutine then takes the message. A cancelled coroutine therefore loses nothing.

use crate::enrolled::lock;
use libpvm::{Inbox, Match, Notices, Runtime};
use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use sempa_proto::Message;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, TryLockError};

/// Selects the messages for which a coroutine waits.
pub(crate) enum WatchedMessages {
    Selected(Match),
    /// Messages with notices of this iterator.
    Notices(Arc<Mutex<Option<Notices>>>),
}

impl WatchedMessages {
    /// True if the coroutine must look at the inbox.
    fn contains(&self, message: &Message) -> bool {
        match self {
            Self::Selected(selection) => selection.matches(message),
            Self::Notices(notices) => match notices.try_lock() {
                Ok(notices) => notices
                    .as_ref()
                    .is_none_or(|notices| notices.is_notice_message(message)),
                // A thread that reads notices holds the lock and waits for the runtime, which this
                // thread has locked. The coroutine looks for itself.
                Err(TryLockError::WouldBlock) => true,
                Err(TryLockError::Poisoned(_)) => true,
            },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchState {
    /// The next selected message signals the watch.
    Armed,
    /// The loop has been woken and has not looked yet.
    Signalled,
}

struct WatchEntry {
    id: u64,
    messages: WatchedMessages,
    state: WatchState,
    waker: Arc<EventFd>,
}

impl WatchEntry {
    fn signal(&mut self) {
        self.state = WatchState::Signalled;
        // A full counter means that the loop is woken already.
        let _ = self.waker.write(1);
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ThreadState {
    #[default]
    Running,
    /// The task has left the virtual machine, or its Python objects are gone. New watches are
    /// signalled at once, so that coroutines see it.
    Ended,
}

#[derive(Default)]
struct Watches {
    entries: Vec<WatchEntry>,
    last_id: u64,
    thread_state: ThreadState,
}

impl Watches {
    fn signal_matching(&mut self, inbox: &Inbox) {
        for entry in &mut self.entries {
            if entry.state == WatchState::Armed
                && inbox.iter().any(|message| entry.messages.contains(message))
            {
                entry.signal();
            }
        }
    }

    fn signal_all(&mut self) {
        self.entries.iter_mut().for_each(WatchEntry::signal);
    }
}

/// The watches of one task. The thread ends when the task leaves the virtual machine.
pub(crate) struct Arrivals {
    runtime: Runtime,
    watches: Mutex<Watches>,
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let watch_count = lock(&self.watches).entries.len();
        f.debug_struct("Arrivals")
            .field("watch_count", &watch_count)
            .finish()
    }
}

impl Arrivals {
    /// Starts the thread.
    ///
    /// # Errors
    /// `OSError` if the system starts no thread.
    pub(crate) fn start(runtime: &Runtime) -> PyResult<Arc<Self>> {
        let arrivals = Arc::new(Self {
            runtime: runtime.clone(),
            watches: Mutex::default(),
        });
        let of_thread = arrivals.clone();
        std::thread::Builder::new()
            .name("pvm-arrivals".into())
            .spawn(move || of_thread.run())
            .map_err(|error| {
                PyOSError::new_err(format!(
                    "no thread can be started to watch for messages: {error}"
                ))
            })?;
        Ok(arrivals)
    }

    fn run(&self) {
        // The lock of the watches is taken under the lock of the runtime, so no other function
        // calls the runtime while it holds the watches.
        let mut signal_matching = |inbox: &mut Inbox| -> Option<()> {
            let mut watches = lock(&self.watches);
            watches.signal_matching(inbox);
            (watches.thread_state == ThreadState::Ended).then_some(())
        };
        // The wait ends with the thread's use, or with an error when the connection is lost.
        let _ = self.runtime.wait_for_inbox(None, &mut signal_matching);
        let mut watches = lock(&self.watches);
        watches.thread_state = ThreadState::Ended;
        watches.signal_all();
    }

    /// Makes the thread end.
    pub(crate) fn stop(&self) {
        lock(&self.watches).thread_state = ThreadState::Ended;
        self.runtime.wake_waiting_threads();
    }

    /// Adds a watch that wakes a loop when a message arrives.
    pub(crate) fn watch(
        self: &Arc<Self>,
        messages: WatchedMessages,
        waker: &PyLoopWaker,
    ) -> PyWatch {
        let mut watches = lock(&self.watches);
        watches.last_id += 1;
        let id = watches.last_id;
        let mut entry = WatchEntry {
            id,
            messages,
            state: WatchState::Armed,
            waker: waker.eventfd.clone(),
        };
        if watches.thread_state == ThreadState::Ended {
            entry.signal();
        }
        watches.entries.push(entry);
        drop(watches);
        self.runtime.wake_waiting_threads();
        PyWatch {
            arrivals: self.clone(),
            id,
        }
    }
}

/// Descriptor by which watches wake one event loop.
#[pyclass(name = "LoopWaker", module = "sempa_pvm._native", frozen)]
pub(crate) struct PyLoopWaker {
    eventfd: Arc<EventFd>,
}

#[pymethods]
impl PyLoopWaker {
    #[new]
    fn new() -> PyResult<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let eventfd = EventFd::from_flags(flags)
            .map_err(|errno| PyOSError::new_err(format!("no eventfd can be created: {errno}")))?;
        Ok(Self {
            eventfd: Arc::new(eventfd),
        })
    }

    /// Returns the descriptor, which is readable after a watch was signalled.
    fn fileno(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Makes the descriptor unreadable until the next signal.
    fn clear(&self) {
        // The only error is that the descriptor is not readable.
        let _ = self.eventfd.read();
    }
}

/// The wait of one coroutine for messages. Dropping the object ends the watch.
#[pyclass(name = "Watch", module = "sempa_pvm._native", frozen)]
pub(crate) struct PyWatch {
    arrivals: Arc<Arrivals>,
    id: u64,
}

#[pymethods]
impl PyWatch {
    /// Returns whether a message has arrived since the watch was armed.
    fn is_signalled(&self) -> bool {
        let watches = lock(&self.arrivals.watches);
        let entry = watches.entries.iter().find(|entry| entry.id == self.id);
        entry.is_none_or(|entry| entry.state == WatchState::Signalled)
    }

    /// Makes the next selected message signal the watch, including those that have arrived already.
    fn rearm(&self, py: Python<'_>) {
        py.detach(|| {
            let mut watches = lock(&self.arrivals.watches);
            let has_ended = watches.thread_state == ThreadState::Ended;
            if let Some(entry) = watches.entries.iter_mut().find(|entry| entry.id == self.id) {
                entry.state = WatchState::Armed;
                if has_ended {
                    entry.signal();
                }
            }
            drop(watches);
            self.arrivals.runtime.wake_waiting_threads();
        });
    }

    /// Ends the watch. After the call the watch wakes no loop.
    fn close(&self) {
        let mut watches = lock(&self.arrivals.watches);
        let position = watches.entries.iter().position(|entry| entry.id == self.id);
        let entry = position.map(|position| watches.entries.remove(position));
        // The entry may own the last reference to an iterator, whose end calls the runtime.
        drop(watches);
        drop(entry);
    }
}

impl Drop for PyWatch {
    fn drop(&mut self) {
        self.close();
    }
}
