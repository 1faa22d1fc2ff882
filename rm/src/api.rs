//! The whole contact of the resource manager with the virtual machine, so that the service can be tested without one.

use bytes::Bytes;
use libpvm::{Error, Match, MigrateError, MoveAnswer, Vm};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::Cause;
use sempa_proto::rm::CTX_RM;
use sempa_proto::suspend;
use sempa_proto::table::{HostTable, TaskInfo};
use sempa_proto::task::{NotifyRequest, NotifyWhat, RmServes, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, Tid};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What the resource manager asks of the virtual machine, and the time.
pub trait VmApi {
    /// The own task.
    fn tid(&self) -> Tid;
    /// The own host.
    fn host(&self) -> HostId;
    /// Time that never jumps, from an arbitrary beginning.
    fn now(&self) -> Micros;
    /// Time of day, in microseconds since 1970.
    fn wall(&self) -> Micros;
    /// The next message, whatever it is; `None` after `span`.
    ///
    /// # Errors
    /// When the daemon is gone.
    fn recv(&self, span: Duration) -> Result<Option<Message>, Error>;
    /// Sends a message in the base context, in PVM's default encoding.
    ///
    /// # Errors
    /// As the library says.
    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error>;
    /// Sends raw bytes in the resource manager's own context.
    ///
    /// # Errors
    /// As the library says.
    fn answer(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error>;
    /// The host table.
    ///
    /// # Errors
    /// As the daemon says.
    fn config(&self) -> Result<HostTable, Error>;
    /// All tasks.
    ///
    /// # Errors
    /// As the daemon says.
    fn tasks(&self) -> Result<Vec<TaskInfo>, Error>;
    /// Registers as resource manager for placing spawns; the one before.
    ///
    /// # Errors
    /// As the daemon says.
    fn register(&self) -> Result<Tid, Error>;
    /// Follows the event log.
    ///
    /// # Errors
    /// As the daemon says.
    fn subscribe(&self, ctx: i32, tag: i32) -> Result<(), Error>;
    /// The event log from an entry on, so many entries at most.
    ///
    /// # Errors
    /// As the daemon says.
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error>;
    /// The event in such a message.
    fn event_of(&self, message: &Message) -> Option<Event> {
        Vm::event_of(message)
    }
    /// Asks for notifications.
    ///
    /// # Errors
    /// As the daemon says.
    fn notify(&self, what: NotifyWhat, ctx: i32, tag: i32) -> Result<(), Error>;
    /// Orders a host to start tasks; the wait id of its acknowledgement.
    ///
    /// # Errors
    /// When the order cannot be sent.
    fn exec(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error>;
    /// Asks for a move; returns when it has begun.
    ///
    /// # Errors
    /// When it has not begun.
    fn migrate(&self, tid: Tid, to: HostId, cause: Cause) -> Result<(), MigrateError>;
    /// Sends a signal to a task.
    ///
    /// # Errors
    /// As the daemon says.
    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error>;
    /// Suspends a task, or lets it go on.
    ///
    /// # Errors
    /// As the daemon says.
    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::Cause) -> Result<(), Error>;
    /// Has a job checkpointed and ended; the event log tells what became of it.
    ///
    /// # Errors
    /// As the daemon says.
    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error>;
    /// Has a checkpoint started again on these hosts; the event log tells what became of it.
    ///
    /// # Errors
    /// As the daemon says.
    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error>;
    /// Adds an entry to the event log.
    ///
    /// # Errors
    /// As the daemon says.
    fn record(&self, at: Micros, kind: EventKind) -> Result<(), Error>;
}

/// A real task.
#[derive(Debug)]
pub struct RealVm {
    vm: Vm,
    begin: Instant,
}

impl RealVm {
    /// Over a task that has joined.
    pub fn new(vm: Vm) -> RealVm {
        // It has something to do whenever a task begins or ends: just then others need the processors.
        vm.sleep_at_once();
        RealVm {
            vm,
            begin: Instant::now(),
        }
    }
}

fn micros(span: Duration) -> Micros {
    Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
}

impl VmApi for RealVm {
    fn tid(&self) -> Tid {
        self.vm.tid()
    }

    fn host(&self) -> HostId {
        self.vm.host()
    }

    fn now(&self) -> Micros {
        micros(self.begin.elapsed())
    }

    fn wall(&self) -> Micros {
        micros(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        )
    }

    fn recv(&self, span: Duration) -> Result<Option<Message>, Error> {
        self.vm.recv_timeout(Match::any(), span)
    }

    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.vm.send_message(Message {
            src: self.vm.tid(),
            dst: to,
            ctx: CTX_BASE,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        })
    }

    fn answer(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.vm.send_message(Message {
            src: self.vm.tid(),
            dst: to,
            ctx: CTX_RM,
            tag,
            wid,
            enc: DSIG_X86_64,
            body,
        })
    }

    fn config(&self) -> Result<HostTable, Error> {
        self.vm.config()
    }

    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        self.vm.tasks(Tid::NONE)
    }

    fn register(&self) -> Result<Tid, Error> {
        self.vm.register_rm(RmServes {
            spawn: true,
            others: false,
            ends: false,
        })
    }

    fn subscribe(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        self.vm.subscribe(ctx, tag)
    }

    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        self.vm.events(from, limit)
    }

    fn notify(&self, what: NotifyWhat, ctx: i32, tag: i32) -> Result<(), Error> {
        self.vm.notify(NotifyRequest {
            what,
            ctx,
            tag,
            cancel: false,
        })
    }

    fn exec(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        self.vm.exec(host, parent, request)
    }

    fn migrate(&self, tid: Tid, to: HostId, cause: Cause) -> Result<(), MigrateError> {
        match self
            .vm
            .migrate(tid, &to.tid().to_string(), Some(cause), false)?
        {
            MoveAnswer::Started(_) | MoveAnswer::Done(_) => Ok(()),
        }
    }

    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        self.vm.signal(tid, signal)
    }

    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::Cause) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, Some(cause))
    }

    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        self.vm.checkpoint_and_end(job)
    }

    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        self.vm.restart(set, on)
    }

    fn record(&self, at: Micros, kind: EventKind) -> Result<(), Error> {
        self.vm.record(at, kind)
    }
}
