//! Connections of tasks to this daemon: acceptance, dispatch of control messages, and closing.
//!
//! The first message of a process must be a [`Hello`]. Its claim decides what the connection is
//! for:
//!
//! - [`Claim::New`]: a process that the virtual machine did not start. It gets a new tid.
//! - [`Claim::Spawned`] with a number that is expected: a process that this daemon started. It gets
//!   the tid that was allocated at its spawn.
//! - [`Claim::Spawned`] with the number of a task that is migrating here by a restart of its
//!   program: the connection waits until the task's record has arrived.
//! - [`Claim::Spawned`] with any other number: treated as [`Claim::New`].
//! - [`Claim::Resume`]: the library of a task that quiesced connects again (see `handover`).
//! - [`Claim::Probe`]: a probe for a running daemon. It is refused; a daemon that is halting
//!   closes the connection without an answer.

use super::io::Descriptors;
use super::tasks::{Phase, Task};
use super::{ConnId, Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use sempa_proto::task::{Claim, Hello, TASK_MAGIC, ToDaemon, ToTask, Welcome};
use sempa_proto::{Tid, WIRE_VERSION};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Largest number of open connections, including those that have not sent a [`Hello`].
pub(super) const CONNECTIONS_MAX: usize = 100_000;

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conn {
    /// No message has arrived yet. `pid` is from the socket's peer credentials.
    Fresh {
        pid: i32,
    },
    Task(Tid),
    /// A migrated task that connected before its record arrived.
    Parked(Tid),
    /// Refused or replaced by another connection; all further input is ignored.
    Retired,
}

#[derive(Debug, Default)]
pub(super) struct Conns {
    all: BTreeMap<ConnId, Conn>,
}

impl Conns {
    /// Returns the task that the connection belongs to, if any.
    pub(super) fn task(&self, conn: ConnId) -> Option<Tid> {
        match self.all.get(&conn) {
            Some(Conn::Task(tid)) => Some(*tid),
            _ => None,
        }
    }

    /// Marks the connection as retired: all further input from it is ignored.
    pub(super) fn retire(&mut self, conn: ConnId) {
        if let Some(state) = self.all.get_mut(&conn) {
            *state = Conn::Retired;
        }
    }

    pub(super) fn bind(&mut self, conn: ConnId, tid: Tid) {
        self.all.insert(conn, Conn::Task(tid));
    }

    /// Keeps the connection until the record of this task has arrived.
    pub(super) fn park(&mut self, conn: ConnId, tid: Tid) {
        self.all.insert(conn, Conn::Parked(tid));
    }

    pub(super) fn ids(&self) -> Vec<ConnId> {
        self.all.keys().copied().collect()
    }
}

impl Machine {
    /// A process has connected. Above [`CONNECTIONS_MAX`] it is refused.
    pub(super) fn task_connected(&mut self, conn: ConnId, pid: i32) {
        if self.conns.all.len() >= CONNECTIONS_MAX {
            self.conns.all.insert(conn, Conn::Retired);
            return self.refuse(
                conn,
                format!("{CONNECTIONS_MAX} connections are open already; end some tasks"),
            );
        }
        self.conns.all.insert(conn, Conn::Fresh { pid });
    }

    /// Handles a control message from a connection. The first one must be [`ToDaemon::Hello`].
    pub(super) fn task_control(&mut self, conn: ConnId, message: ToDaemon) {
        match self.conns.all.get(&conn).copied() {
            Some(Conn::Fresh { pid }) => match message {
                ToDaemon::Hello(hello) => self.hello(conn, pid, hello),
                _ => self.refuse(conn, "the first message has to say who is calling".into()),
            },
            Some(Conn::Task(tid)) => self.task_says(conn, tid, message),
            Some(Conn::Parked(_) | Conn::Retired) | None => {}
        }
    }

    fn task_says(&mut self, conn: ConnId, tid: Tid, message: ToDaemon) {
        match message {
            ToDaemon::Hello(_) => {
                self.log(format!(
                    "{tid} said twice who it is; its connection was closed"
                ));
                self.out.push_back(Output::CloseTask { conn });
                self.conns.retire(conn);
                self.detach(tid);
            }
            ToDaemon::Request { id, request: what } => self.request(tid, id, what),
            ToDaemon::Message(mut message) => {
                message.src = tid;
                self.message_to_daemon(message);
            }
            ToDaemon::Quiesced {
                migration,
                watermarks: marks,
                redirect_address: redirect_at,
            } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.redirect_at = redirect_at;
                }
                self.task_quiesced(tid, migration, marks);
            }
            ToDaemon::Handoff {
                migration: by,
                incarnation: line,
                links: talks,
                deferred_notifications: later,
            } => self.parts(tid, by, (line, talks, later)),
            ToDaemon::ReadyToExit { migration: by } => self.ask_to_end(tid, by),
            ToDaemon::ExitCancelled { migration: by } => self.takes_again(tid, by),
            ToDaemon::Route { to, message } => {
                self.task_route(conn, to, message, Descriptors::default())
            }
        }
    }

    /// A connection has closed. `garbage` describes a violation of the protocol, if that was the
    /// reason.
    ///
    /// A task that quiesced is expected back. A task that was asked to exit for a restart may be
    /// about to exit. Any other task has left.
    pub(super) fn task_closed(&mut self, conn: ConnId, garbage: Option<String>) {
        let state = self.conns.all.remove(&conn);
        if let Some(what) = garbage {
            self.log(match state {
                Some(Conn::Task(tid)) => format!("{tid} did not keep to the protocol ({what}); it was disconnected"),
                _ => format!("a process on the socket did not keep to the protocol ({what}); it was disconnected"),
            });
        }
        match state {
            Some(Conn::Task(tid)) => {
                let Some(task) = self
                    .tasks
                    .get_mut(tid)
                    .filter(|t| t.phase == Phase::Connected(conn))
                else {
                    return;
                };
                if std::mem::take(&mut task.quiesced) {
                    task.phase = Phase::Detached;
                    self.guest_let_go(tid);
                    self.task_let_go(tid);
                } else if task.is_ending() {
                    task.phase = Phase::Detached;
                    match task.exited {
                        Some((status, used)) => self.end_task(tid, status, used),
                        None => self.ending_left(tid),
                    }
                } else {
                    self.detach(tid);
                }
            }
            Some(Conn::Parked(tid)) => {
                if let Some(arrival) = self
                    .moves
                    .arrivals
                    .get_mut(&tid)
                    .filter(|a| a.conn == Some(conn))
                {
                    arrival.conn = None;
                }
            }
            Some(Conn::Fresh { .. } | Conn::Retired) | None => {}
        }
    }

    pub(super) fn refuse(&mut self, conn: ConnId, reason: String) {
        self.conns.retire(conn);
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::Refused { reason },
        });
        self.out.push_back(Output::CloseTask { conn });
    }

    fn hello(&mut self, conn: ConnId, pid: i32, hello: Hello) {
        if hello.magic != TASK_MAGIC || hello.version != WIRE_VERSION {
            let theirs = hello.version;
            return self.refuse(
                conn,
                format!(
                    "this daemon speaks version {WIRE_VERSION}, the program's library {theirs}; install one version"
                ),
            );
        }
        if self.stop.is_some() {
            if hello.claim == Claim::Probe {
                self.conns.retire(conn);
                return self.out.push_back(Output::CloseTask { conn });
            }
            return self.refuse(conn, "the virtual machine is being halted".into());
        }
        if self.table.hosts.is_empty() {
            return self.refuse(
                conn,
                "this host is still joining the virtual machine; try again in a moment".into(),
            );
        }
        match hello.claim {
            Claim::Spawned { spawn_token } if self.tasks.expected.contains_key(&spawn_token) => {
                self.bind_spawned(conn, pid, spawn_token)
            }
            Claim::Spawned { spawn_token } if self.is_beginning(spawn_token) => {
                self.comes_anew(conn, spawn_token)
            }
            // A task that has connected or left already, or one of another virtual machine, has
            // this number. It gives no claim.
            Claim::New | Claim::Spawned { .. } => self.enrol(conn, pid, &hello),
            Claim::Resume { tid, migration } => self.resume(conn, tid, migration),
            Claim::Probe => self.refuse(conn, "nobody has nothing to say here".into()),
        }
    }

    /// Accepts a process that the virtual machine did not start, under a new tid.
    fn enrol(&mut self, conn: ConnId, pid: i32, hello: &Hello) {
        let Some(tid) = self.tasks.allocate(self.config.host) else {
            return self.refuse(conn, "this host has as many tasks as it can have".into());
        };
        let mut task = Task::new(tid, Tid::NONE, Phase::Connected(conn));
        task.flags = TASK_CONNECTED;
        task.pid = pid;
        task.at_end = hello.on_daemon_exit;
        self.default_sinks(&mut task.output, &mut task.trace);
        self.trace_new_task(&task);
        self.tasks.insert(task);
        self.log(format!("{tid} is process {pid} ({})", hello.program));
        let user = self.config.uid;
        self.record(EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: String::new(),
            user,
        });
        self.welcome(conn, tid);
        self.tell_rm_of_newcomer(tid);
    }

    /// Accepts a process that this daemon started, under the tid of its spawn.
    fn bind_spawned(&mut self, conn: ConnId, pid: i32, epid: i32) {
        let Some(tid) = self.tasks.expected.remove(&epid) else {
            return;
        };
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.phase = Phase::Connected(conn);
        task.flags |= TASK_CONNECTED;
        // The tasker's report of the pid may arrive after the task's first message.
        if task.pid == 0 {
            task.pid = pid;
        }
        self.welcome(conn, tid);
        self.open_inbox(tid);
        self.guest_connected(tid);
        self.came_again(tid);
    }

    /// Binds the connection to the task and sends [`ToTask::Welcome`]. Items that wait for the task
    /// stay in its inbox.
    pub(super) fn welcome(&mut self, conn: ConnId, tid: Tid) {
        self.conns.bind(conn, tid);
        let rm = self.rm.current();
        let mut addresses: Vec<_> = self.config.addresses.iter().map(SocketAddr::ip).collect();
        addresses.dedup();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.phase = Phase::Connected(conn);
        task.rm = task.rm.or(rm.map(|rm| rm.tid));
        let (restart, successor) = (task.restart.take(), task.successor.take());
        let welcome = Welcome {
            tid,
            parent: task.parent,
            host: self.config.host,
            addresses,
            rm,
            output: task.output,
            trace: task.trace,
            dsig: self.config.dsig,
            spawned: task.spawned(),
            tracer: self
                .servers
                .tracer
                .as_ref()
                .filter(|t| t.trace_sink() == task.trace)
                .map(|t| t.settings.clone()),
            restart,
            handoff: successor,
        };
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::Welcome(welcome),
        });
    }

    /// Delivers the items that wait for a connected task, in order. Does nothing while items for
    /// the task must be kept.
    pub(super) fn open_inbox(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(conn) = task.conn().filter(|_| !task.hold) else {
            return;
        };
        let waited = task.inbox.drain();
        for held in &waited {
            if let sempa_proto::host::PendingItem::Control(ToTask::Reply { id, .. }) = held {
                task.answered(*id);
            }
        }
        waited.into_iter().for_each(|held| self.hand(conn, held));
    }
}
