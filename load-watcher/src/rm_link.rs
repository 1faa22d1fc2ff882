//! Tracks to which resource manager this load watcher must send its reports.
//!
//! The load watcher outlives the resource manager that started it, so that the owner of the host
//! stays protected. The next resource manager requests that the reports are sent to it.

use libpvm::{Match, Vm};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::body::Unpacker;
use sempa_proto::load::TAG_REPORT_TO;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{NotifyRequest, NotifySubjects};
use sempa_proto::{Message, Tid};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Tag of the notification that the resource manager has exited.
const TAG_RM_GONE: i32 = 1;

/// State of the subscription: the resource manager that receives the reports, if any.
#[derive(Debug)]
pub(crate) struct RmSubscription {
    tid: Mutex<Option<Tid>>,
    /// Readable when another resource manager has requested the reports.
    change_event: EventFd,
}

impl RmSubscription {
    /// Starts a thread that tracks the resource manager. Reports are sent to `rm` until it exits or
    /// another resource manager requests them. When the virtual machine ends, this process exits.
    ///
    /// # Errors
    /// The error of the system or of the daemon.
    pub(crate) fn start(vm: &Vm, rm: Option<Tid>) -> anyhow::Result<Arc<RmSubscription>> {
        let news = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let subscription = Arc::new(RmSubscription {
            tid: Mutex::new(rm),
            change_event: news,
        });
        rm.map(|rm| notify_on_exit(vm, rm)).transpose()?;
        let (vm, shared) = (vm.clone(), Arc::clone(&subscription));
        std::thread::Builder::new()
            .name("boss".into())
            .spawn(move || {
                // This context contains only messages to load watchers and notifications.
                while let Ok(message) = vm.recv(Match::any().ctx(CTX_RM)) {
                    shared.handle_message(&vm, &message);
                }
                drop(vm.exit());
                std::process::exit(0);
            })?;
        Ok(subscription)
    }

    fn handle_message(&self, vm: &Vm, message: &Message) {
        let mut tid = self.tid.lock().unwrap_or_else(PoisonError::into_inner);
        match message.tag {
            TAG_RM_GONE => {
                let gone = Unpacker::xdr(message.body.clone())
                    .int()
                    .ok()
                    .map(Tid::from_raw);
                if *tid == gone {
                    *tid = None;
                }
            }
            TAG_REPORT_TO if message.src.is_task() => {
                *tid = Some(message.src);
                // If the resource manager has already exited, the notification arrives immediately.
                drop(notify_on_exit(vm, message.src));
                let _ = self.change_event.write(1);
            }
            _ => {}
        }
    }

    /// Returns the tid of the resource manager that receives the reports.
    pub(crate) fn tid(&self) -> Option<Tid> {
        *self.tid.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if another resource manager has requested the reports since the last call.
    pub(crate) fn take_change(&self) -> bool {
        self.change_event.read().is_ok()
    }

    /// Creates an epoll descriptor that is readable when another resource manager requests the
    /// reports, or when one of the descriptors `others` is readable.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn epoll_with<'a>(
        &self,
        others: impl IntoIterator<Item = BorrowedFd<'a>>,
    ) -> nix::Result<Epoll> {
        let all = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        all.add(&self.change_event, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        for other in others {
            all.add(other, EpollEvent::new(EpollFlags::EPOLLIN, 1))?;
        }
        Ok(all)
    }
}

/// Requests a notification of the exit of the resource manager `rm`.
fn notify_on_exit(vm: &Vm, rm: Tid) -> Result<(), libpvm::Error> {
    vm.notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![rm]),
        ctx: CTX_RM,
        tag: TAG_RM_GONE,
        cancel: false,
    })
}
