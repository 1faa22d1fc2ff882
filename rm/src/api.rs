//! The interface through which the resource manager accesses the virtual machine. It is a trait, so
//! that tests can run the service without a virtual machine.

use bytes::Bytes;
use libpvm::{Error, Match, MigrateError, MigrateReply, Vm};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::CTX_RM;
use sempa_proto::suspend;
use sempa_proto::table::{HostTable, TaskInfo};
use sempa_proto::task::{NotifyRequest, NotifySubjects, RmServices, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, Tid};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Calls to the virtual machine, and access to the clocks.
pub trait VmApi {
    fn tid(&self) -> Tid;
    fn host(&self) -> HostId;
    /// Returns the time on a monotonic clock with an arbitrary start.
    fn now(&self) -> Micros;
    /// Returns the time of day, in microseconds since 1970.
    fn wall_clock(&self) -> Micros;
    /// Returns the next message of any kind; `None` if none arrives within `timeout`.
    ///
    /// # Errors
    ///
    /// The daemon is gone.
    fn recv(&self, timeout: Duration) -> Result<Option<Message>, Error>;
    /// Sends a message in the base context, in PVM's default encoding.
    ///
    /// # Errors
    /// Errors of the library.
    fn send(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error>;
    /// Sends raw bytes in the context of the resource manager's messages ([`CTX_RM`]).
    ///
    /// # Errors
    ///
    /// Errors of the library.
    fn send_rm(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error>;
    /// Returns the host table.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn host_table(&self) -> Result<HostTable, Error>;
    /// Returns all tasks of the virtual machine, with an entry for each ended task that has left
    /// processes behind.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn tasks(&self) -> Result<Vec<TaskInfo>, Error>;
    /// Registers this task as the resource manager. Returns the resource manager that was
    /// registered before.
    ///
    /// # Errors
    ///
    /// Errors of the daemon.
    fn register(&self) -> Result<Tid, Error>;
    /// Subscribes to the event log. The messages with entries have the context `ctx` and the tag
    /// `tag`.
    ///
    /// # Errors
    ///
    /// Errors of the daemon.
    fn subscribe_events(&self, ctx: i32, tag: i32) -> Result<(), Error>;
    /// Returns at most `count_max` entries of the event log, starting with the number
    /// `first_number`.
    ///
    /// # Errors
    ///
    /// Errors of the daemon.
    fn events(&self, first_number: u64, count_max: u32) -> Result<Vec<Event>, Error>;
    /// Decodes the event in a message of the subscription; `None` if the message contains none.
    fn decode_event(&self, message: &Message) -> Option<Event> {
        Vm::decode_event(message)
    }

    /// Requests notifications about hosts or tasks. The notifications have the context `ctx` and
    /// the tag `tag`.
    ///
    /// # Errors
    ///
    /// Errors of the daemon.
    fn request_notification(
        &self,
        subjects_to_watch: NotifySubjects,
        ctx: i32,
        tag: i32,
    ) -> Result<(), Error>;
    /// Requests a host to start tasks. Returns the wait id that the host's acknowledgement will
    /// contain.
    ///
    /// # Errors
    ///
    /// The request cannot be sent.
    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error>;
    /// Requests a migration and waits until it has started.
    ///
    /// # Errors
    ///
    /// The migration was refused or did not start.
    fn migrate(&self, tid: Tid, target: HostId, cause: MigrationCause) -> Result<(), MigrateError>;
    /// Sends a signal to a task.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error>;
    /// Suspends or resumes a task.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn set_suspended(
        &self,
        tid: Tid,
        suspend: bool,
        cause: suspend::SuspendCause,
    ) -> Result<(), Error>;
    /// Requests that a job is checkpointed and then ended. The event log reports the result.
    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error>;
    /// Requests the restart of the checkpoint `checkpoint` on the hosts `hosts`. The event log
    /// reports the result.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn restart(&self, checkpoint: &str, hosts: &[String]) -> Result<(), Error>;
    /// Adds an entry to the event log. `wall_time`: the time of day of the entry.
    ///
    /// # Errors
    ///
    /// Errors of the daemon.
    fn record_event(&self, wall_time: Micros, kind: EventKind) -> Result<(), Error>;
}

/// The virtual machine, accessed through a task of the library.
#[derive(Debug)]
pub struct RealVm {
    vm: Vm,
    started_at: Instant,
}

impl RealVm {
    /// Creates the interface from `vm`, a task that has joined the virtual machine. Disables the
    /// spinning of this task.
    pub fn new(vm: Vm) -> Self {
        // The resource manager becomes active whenever a task starts or ends. At such a moment
        // other processes need the processors, so the resource manager must not spin.
        vm.disable_spinning();
        // It talks to all hosts, but seldom.
        vm.set_automatic_routes(false);
        Self {
            vm,
            started_at: Instant::now(),
        }
    }
}

fn micros(duration: Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

impl VmApi for RealVm {
    fn tid(&self) -> Tid {
        self.vm.tid()
    }

    fn host(&self) -> HostId {
        self.vm.host()
    }

    fn now(&self) -> Micros {
        micros(self.started_at.elapsed())
    }

    fn wall_clock(&self) -> Micros {
        micros(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        )
    }

    fn recv(&self, timeout: Duration) -> Result<Option<Message>, Error> {
        self.vm.recv_timeout(Match::any(), timeout)
    }

    fn send(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.vm.send_message(Message {
            src: self.vm.tid(),
            dst: receiver,
            ctx: CTX_BASE,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        })
    }

    fn send_rm(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        self.vm.send_message(Message {
            src: self.vm.tid(),
            dst: receiver,
            ctx: CTX_RM,
            tag,
            wid,
            enc: DSIG_X86_64,
            body,
        })
    }

    fn host_table(&self) -> Result<HostTable, Error> {
        self.vm.config()
    }

    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        self.vm.tasks_and_leftovers(Tid::NONE)
    }

    fn register(&self) -> Result<Tid, Error> {
        self.vm.register_rm(RmServices {
            placement: true,
            vm_requests: false,
            task_exits: false,
        })
    }

    fn subscribe_events(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        self.vm.subscribe_events(ctx, tag)
    }

    fn events(&self, first_number: u64, count_max: u32) -> Result<Vec<Event>, Error> {
        self.vm.events(first_number, count_max)
    }

    fn request_notification(
        &self,
        subjects_to_watch: NotifySubjects,
        ctx: i32,
        tag: i32,
    ) -> Result<(), Error> {
        self.vm.notify(NotifyRequest {
            subjects: subjects_to_watch,
            ctx,
            tag,
            is_cancellation: false,
        })
    }

    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        self.vm.request_exec(host, parent, request)
    }

    fn migrate(&self, tid: Tid, target: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        match self
            .vm
            .migrate(tid, &target.tid().to_string(), Some(cause), false)?
        {
            MigrateReply::Started(_) | MigrateReply::Done(_) => Ok(()),
        }
    }

    fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        self.vm.signal(tid, signal)
    }

    fn set_suspended(
        &self,
        tid: Tid,
        suspend: bool,
        cause: suspend::SuspendCause,
    ) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, Some(cause))
    }

    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        self.vm.checkpoint_and_end(job)
    }

    fn restart(&self, checkpoint: &str, hosts: &[String]) -> Result<(), Error> {
        self.vm.restart_checkpoint(checkpoint, hosts)
    }

    fn record_event(&self, wall_time: Micros, kind: EventKind) -> Result<(), Error> {
        self.vm.record_event(wall_time, kind)
    }
}
