//! Tracks the resource manager to which this load watcher must send its reports.
//!
//! The load watcher outlives the resource manager that started it, so that the owner of the host
//! stays protected. A later resource manager requests the reports for itself.

use libpvm::{Match, Vm};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::body::Unpacker;
use sempa_proto::load::TAG_REPORT_ADDRESS;
use sempa_proto::rm::{CTX_RM, TAG_PING};
use sempa_proto::task::{NotifyRequest, NotifySubjects};
use sempa_proto::{Message, Tid};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Tag of the notification that the resource manager has exited.
const RM_EXIT_TAG: i32 = 1;

/// The subscription of a resource manager to the reports: which resource manager receives the
/// reports, and whether another resource manager has requested them.
#[derive(Debug)]
pub(crate) struct RmSubscription {
    /// The resource manager that receives the reports; `None` after it has exited.
    rm_tid: Mutex<Option<Tid>>,
    /// Readable after a resource manager has requested the reports or has exited, until
    /// [`RmSubscription::take_change_event`].
    change_event: EventFd,
    /// Readable after the daemon has asked whether this load watcher runs, until
    /// [`RmSubscription::take_ping`].
    ping_event: EventFd,
}

impl RmSubscription {
    /// Starts a thread that tracks the resource manager, and returns the subscription. Reports are
    /// sent to the resource manager `rm` until it exits or another resource manager requests the
    /// reports. When the virtual machine ends, this process exits.
    ///
    /// # Errors
    /// The error of the system or of the daemon.
    pub(crate) fn start_tracking(vm: &Vm, rm: Option<Tid>) -> anyhow::Result<Arc<Self>> {
        let new_event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let (change_event, ping_event) = (new_event()?, new_event()?);
        let subscription = Arc::new(Self {
            rm_tid: Mutex::new(rm),
            change_event,
            ping_event,
        });
        rm.map(|rm| notify_on_exit(vm, rm)).transpose()?;
        let (vm, thread_subscription) = (vm.clone(), Arc::clone(&subscription));
        std::thread::Builder::new()
            .name("boss".into())
            .spawn(move || {
                // Only messages to load watchers and exit notifications have this context.
                while let Ok(message) = vm.recv(Match::any().ctx(CTX_RM)) {
                    thread_subscription.handle_message(&vm, &message);
                }
                drop(vm.exit());
                std::process::exit(0);
            })?;
        Ok(subscription)
    }

    fn handle_message(&self, vm: &Vm, message: &Message) {
        let mut rm_tid = self.rm_tid.lock().unwrap_or_else(PoisonError::into_inner);
        match message.tag {
            RM_EXIT_TAG => {
                let exited_rm = Unpacker::new_xdr(message.body.clone())
                    .read_int()
                    .ok()
                    .map(Tid::from_raw);
                if *rm_tid == exited_rm {
                    *rm_tid = None;
                    let _ = self.change_event.write(1);
                }
            }
            TAG_REPORT_ADDRESS if message.src.is_task() => {
                *rm_tid = Some(message.src);
                // If the resource manager has already exited, the notification arrives immediately.
                drop(notify_on_exit(vm, message.src));
                let _ = self.change_event.write(1);
            }
            // The main loop answers, because only its answer shows that the owner is protected.
            TAG_PING if message.src.is_daemon() => {
                let _ = self.ping_event.write(1);
            }
            _ => {}
        }
    }

    /// Returns the tid of the resource manager that receives the reports; `None` if there is none.
    pub(crate) fn rm_tid(&self) -> Option<Tid> {
        *self.rm_tid.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a resource manager has requested the reports or has exited since the last
    /// call.
    pub(crate) fn take_change_event(&self) -> bool {
        self.change_event.read().is_ok()
    }

    /// Returns true if the daemon has asked whether this load watcher runs since the last call.
    pub(crate) fn take_ping(&self) -> bool {
        self.ping_event.read().is_ok()
    }

    /// Creates an epoll instance that is readable when a resource manager requests the reports, the
    /// daemon asks whether this load watcher runs, or one of the descriptors `additional_fds` is
    /// readable.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn create_wake_epoll<'a>(
        &self,
        additional_fds: impl IntoIterator<Item = BorrowedFd<'a>>,
    ) -> nix::Result<Epoll> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for event in [&self.change_event, &self.ping_event] {
            epoll.add(event, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        for additional_fd in additional_fds {
            epoll.add(additional_fd, EpollEvent::new(EpollFlags::EPOLLIN, 1))?;
        }
        Ok(epoll)
    }
}

/// Requests a notification of the exit of the resource manager `rm`.
fn notify_on_exit(vm: &Vm, rm: Tid) -> Result<(), libpvm::Error> {
    vm.notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![rm]),
        ctx: CTX_RM,
        tag: RM_EXIT_TAG,
        is_cancellation: false,
    })
}
