//! Connections of tasks to this daemon: acceptance, dispatch of control messages, and closing.
//!
//! The first message of a process must be a [`Hello`]. The claim in it determines the use of the
//! connection:
//!
//! - [`Claim::NotSpawned`]: a process that the virtual machine did not start. It gets a new tid.
//! - [`Claim::Spawned`] with a spawn token that is expected: a process that this daemon started. It
//!   gets the tid that was allocated at its spawn.
//! - [`Claim::Spawned`] with the spawn token of a task that is migrating to this host by a restart
//!   of its program: the connection waits until the task's record has arrived.
//! - [`Claim::Spawned`] with any other spawn token: treated as [`Claim::NotSpawned`].
//! - [`Claim::Resume`]: the library of a task that quiesced connects again (see `relocation`).
//! - [`Claim::DaemonTest`]: a probe for a running daemon. It is refused; a daemon that is halting
//!   closes the connection without an answer.

use super::io::Descriptors;
use super::tasks::{ConnectionPhase, Task};
use super::{ConnId, Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use sempa_proto::task::{Claim, Hello, ProcessHandoff, TASK_MAGIC, ToDaemon, ToTask, Welcome};
use sempa_proto::{Tid, WIRE_VERSION};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Largest number of open connections, including those that have not sent a [`Hello`].
pub(super) const CONNECTIONS_MAX: usize = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnState {
    /// No message has arrived yet. `pid` is from the socket's peer credentials.
    Unidentified {
        pid: i32,
    },
    Task(Tid),
    /// A migrated task that has connected before its record arrived.
    AwaitingRecord(Tid),
    /// Refused or replaced by another connection; all further input is ignored.
    Retired,
}

#[derive(Debug, Default)]
pub(super) struct TaskConnections {
    states: BTreeMap<ConnId, ConnState>,
}

impl TaskConnections {
    /// Returns the task that the connection is bound to; `None` if the connection is not bound to a
    /// task.
    pub(super) fn task_of(&self, conn: ConnId) -> Option<Tid> {
        match self.states.get(&conn) {
            Some(ConnState::Task(tid)) => Some(*tid),
            _ => None,
        }
    }

    /// Marks the connection as retired: all further input from the connection is ignored.
    pub(super) fn retire(&mut self, conn: ConnId) {
        if let Some(state) = self.states.get_mut(&conn) {
            *state = ConnState::Retired;
        }
    }

    pub(super) fn bind(&mut self, conn: ConnId, tid: Tid) {
        self.states.insert(conn, ConnState::Task(tid));
    }

    /// Registers the connection of a migrated task whose record has not arrived yet. When the
    /// record arrives, the connection is bound to the task.
    pub(super) fn await_record(&mut self, conn: ConnId, tid: Tid) {
        self.states.insert(conn, ConnState::AwaitingRecord(tid));
    }

    pub(super) fn connection_ids(&self) -> Vec<ConnId> {
        self.states.keys().copied().collect()
    }
}

/// Name of the console's program.
const CONSOLE_PROGRAM: &str = "pvm";

impl Machine {
    /// Handles a new connection of a process. The connection is refused if [`CONNECTIONS_MAX`]
    /// connections are already open.
    pub(super) fn handle_task_connected(&mut self, conn: ConnId, pid: i32) {
        if self.conns.states.len() >= CONNECTIONS_MAX {
            self.conns.states.insert(conn, ConnState::Retired);
            return self.refuse_connection(
                conn,
                format!("{CONNECTIONS_MAX} connections are open already; end some tasks"),
            );
        }
        self.conns
            .states
            .insert(conn, ConnState::Unidentified { pid });
    }

    /// Handles a control message from a connection. The first message of a connection must be
    /// [`ToDaemon::Hello`].
    pub(super) fn handle_task_control(&mut self, conn: ConnId, message: ToDaemon) {
        match self.conns.states.get(&conn).copied() {
            Some(ConnState::Unidentified { pid }) => match message {
                ToDaemon::Hello(hello) => self.handle_hello(conn, pid, hello),
                _ => self
                    .refuse_connection(conn, "the first message must identify the caller".into()),
            },
            Some(ConnState::Task(tid)) => self.dispatch_task_message(conn, tid, message),
            Some(ConnState::AwaitingRecord(_) | ConnState::Retired) | None => {}
        }
    }

    fn dispatch_task_message(&mut self, conn: ConnId, tid: Tid, message: ToDaemon) {
        match message {
            ToDaemon::Hello(_) => {
                self.log_warning(format!(
                    "{tid} identified itself twice; its connection was closed"
                ));
                self.outputs.push_back(Output::CloseTask { conn });
                self.conns.retire(conn);
                self.end_connection(tid);
            }
            ToDaemon::Request { id, request } => {
                self.record_sign_of_life(tid);
                self.handle_request(tid, id, request)
            }
            ToDaemon::Past { clock, marks } => self.record_task_past(tid, clock, marks),
            ToDaemon::MarksArrived { wait_number } => self.send_waiting_signal(wait_number),
            ToDaemon::MarksOverdue { count } => self.log_warning_and_record(format!(
                "{tid} has waited too long for {count} earlier messages and receives later ones \
                 first; their senders neither end nor answer"
            )),
            ToDaemon::Message(mut message) => {
                self.record_sign_of_life(tid);
                message.src = tid;
                self.forward_to_daemon(message);
            }
            ToDaemon::Quiesced {
                migration,
                watermarks,
                redirect_address,
            } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.redirect_address = redirect_address;
                }
                self.handle_library_quiesced(tid, migration, watermarks);
            }
            ToDaemon::Handoff {
                migration: exit_migration,
                incarnation,
                links,
                past,
                deferred_notifications,
            } => {
                let handoff = ProcessHandoff {
                    incarnation,
                    restart_count: 0,
                    links,
                    past,
                };
                self.start_handoff_log(tid, exit_migration, handoff, deferred_notifications);
            }
            ToDaemon::ReadyToExit {
                migration: exit_migration,
            } => self.request_exit(tid, exit_migration),
            ToDaemon::ExitCancelled {
                migration: exit_migration,
            } => self.handle_exit_cancelled(tid, exit_migration),
            ToDaemon::Route { receiver, message } => {
                self.forward_route_message(conn, receiver, message, Descriptors::default())
            }
        }
    }

    /// Handles the close of a connection. `protocol_error` describes the violation of the protocol
    /// for which the connection was closed; `None` if there was none.
    ///
    /// A task that quiesced will connect again. A task that was asked to exit for a restart may be
    /// about to exit. Any other task has left the virtual machine.
    pub(super) fn handle_task_closed(&mut self, conn: ConnId, protocol_error: Option<String>) {
        let state = self.conns.states.remove(&conn);
        if let Some(violation) = protocol_error {
            self.log_warning(match state {
                Some(ConnState::Task(tid)) => {
                    format!("{tid} violated the protocol ({violation}); it was disconnected")
                }
                _ => format!(
                    "a process on the socket violated the protocol ({violation}); it was disconnected"
                ),
            });
        }
        match state {
            Some(ConnState::Task(tid)) => {
                let Some(task) = self
                    .tasks
                    .get_mut(tid)
                    .filter(|t| t.connection_phase == ConnectionPhase::Connected(conn))
                else {
                    return;
                };
                let has_quiesced = std::mem::take(&mut task.has_quiesced);
                if !has_quiesced && !task.is_exiting() {
                    return self.end_connection(tid);
                }
                task.connection_phase = ConnectionPhase::Detached;
                match task.exit_report {
                    // A child of the exited process may have held the socket until now.
                    Some((status, usage)) => self.end_task(tid, status, usage),
                    None if has_quiesced => {
                        self.handle_guest_quiesced(tid);
                        self.handle_quiesce_completed(tid);
                    }
                    None => self.handle_leave_while_exiting(tid),
                }
            }
            Some(ConnState::AwaitingRecord(tid)) => {
                if let Some(arrival) = self
                    .migrations
                    .arrivals
                    .get_mut(&tid)
                    .filter(|a| a.conn == Some(conn))
                {
                    arrival.conn = None;
                }
            }
            Some(ConnState::Unidentified { .. } | ConnState::Retired) | None => {}
        }
    }

    pub(super) fn refuse_connection(&mut self, conn: ConnId, reason: String) {
        self.conns.retire(conn);
        self.outputs.push_back(Output::SendToTask {
            conn,
            message: ToTask::Refused { reason },
        });
        self.outputs.push_back(Output::CloseTask { conn });
    }

    fn handle_hello(&mut self, conn: ConnId, pid: i32, hello: Hello) {
        if hello.magic != TASK_MAGIC || hello.version != WIRE_VERSION {
            let library_version = hello.version;
            return self.refuse_connection(
                conn,
                format!(
                    "this daemon uses protocol version {WIRE_VERSION}, the program's library {library_version}; \
                     install one version"
                ),
            );
        }
        if self.shutdown.is_some() {
            if hello.claim == Claim::DaemonTest {
                self.conns.retire(conn);
                return self.outputs.push_back(Output::CloseTask { conn });
            }
            return self.refuse_connection(conn, "the virtual machine is being halted".into());
        }
        if self.table.hosts.is_empty() {
            return self.refuse_connection(
                conn,
                "this host is still joining the virtual machine; try again in a moment".into(),
            );
        }
        match hello.claim {
            Claim::Spawned { spawn_token }
                if self.tasks.tids_by_spawn_token.contains_key(&spawn_token) =>
            {
                self.bind_spawned(conn, pid, hello.namespace_pid, spawn_token)
            }
            Claim::Spawned { spawn_token } if self.is_respawn_token(spawn_token) => {
                self.connect_restarted_program(conn, hello.namespace_pid, spawn_token)
            }
            // The spawn token belongs to a task that has already connected or left, or to another
            // virtual machine. The process is treated as new.
            Claim::NotSpawned | Claim::Spawned { .. } => self.enrol(conn, pid, &hello),
            Claim::Resume { tid, migration } => self.reconnect_library(conn, tid, migration),
            Claim::DaemonTest => {
                self.refuse_connection(conn, "a probe is not accepted as a task".into())
            }
        }
    }

    /// Accepts a process that the virtual machine did not start, under a new tid.
    fn enrol(&mut self, conn: ConnId, pid: i32, hello: &Hello) {
        let Some(tid) = self.tasks.allocate_tid(self.config.host) else {
            return self.refuse_connection(conn, "this host has reached its limit of tasks".into());
        };
        let mut task = Task::new(tid, Tid::NONE, ConnectionPhase::Connected(conn));
        task.flags = TASK_CONNECTED;
        (task.pid, task.namespace_pid) = (pid, hello.namespace_pid);
        task.on_daemon_exit = hello.on_daemon_exit;
        self.apply_tracer_sinks(&mut task.output_sink, &mut task.trace_sink);
        self.trace_task_start(&task);
        self.tasks.insert(task);
        self.log(format!("{tid} is process {pid} ({})", hello.program));
        let user = self.config.uid;
        if hello.program == CONSOLE_PROGRAM {
            self.record_event(EventKind::ConsoleJoined { tid });
        }
        self.record_event(EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: String::new(),
            user,
        });
        self.bind_and_welcome(conn, tid);
        self.report_enrolled_task_to_rm(tid);
    }

    /// Accepts a process that this daemon started, under the tid of its spawn.
    fn bind_spawned(&mut self, conn: ConnId, pid: i32, namespace_pid: i32, spawn_token: i32) {
        let Some(tid) = self.tasks.tids_by_spawn_token.remove(&spawn_token) else {
            return;
        };
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.connection_phase = ConnectionPhase::Connected(conn);
        task.flags |= TASK_CONNECTED;
        // A program that the started process has executed as a child has a process id of its own.
        task.namespace_pid = namespace_pid;
        // The tasker's report of the pid may arrive after the task's first message.
        if task.pid == 0 {
            task.pid = pid;
        }
        self.bind_and_welcome(conn, tid);
        self.flush_inbox(tid);
        self.handle_guest_connected(tid);
        self.handle_respawn_connected(tid);
    }

    /// Binds the connection to the task and sends [`ToTask::Welcome`]. Items that wait for the task
    /// stay in its inbox.
    pub(super) fn bind_and_welcome(&mut self, conn: ConnId, tid: Tid) {
        self.conns.bind(conn, tid);
        let rm = self.rm_state.current();
        let mut addresses: Vec<_> = self.config.addresses.iter().map(SocketAddr::ip).collect();
        addresses.dedup();
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.connection_phase = ConnectionPhase::Connected(conn);
        task.exit_rm = task.exit_rm.or(rm.map(|rm| rm.tid));
        let (restart_info, handoff) = (task.restart_info.take(), task.handoff.take());
        let past = std::mem::take(&mut task.initial_past);
        let welcome = Welcome {
            tid,
            parent: task.parent,
            host: self.config.host,
            addresses,
            allows_automatic_routes: self.config.allows_automatic_routes,
            rm,
            output_sink: task.output_sink,
            trace_sink: task.trace_sink,
            dsig: self.config.dsig,
            spawned: task.is_spawned(),
            tracer_settings: self
                .service_tasks
                .tracer
                .as_ref()
                .filter(|t| t.trace_sink() == task.trace_sink)
                .map(|t| t.settings.clone()),
            past: Box::new(past),
            restart_info,
            handoff,
        };
        self.outputs.push_back(Output::SendToTask {
            conn,
            message: ToTask::Welcome(welcome),
        });
    }

    /// Delivers the items that wait for a connected task, in order. Has no effect while items for
    /// the task are held back.
    pub(super) fn flush_inbox(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let Some(conn) = task.conn().filter(|_| !task.holds_items) else {
            return;
        };
        let items = task.inbox.drain();
        for item in &items {
            if let sempa_proto::host::PendingItem::Control(ToTask::Reply { id, .. }) = item {
                task.remove_request(*id);
            }
        }
        items
            .into_iter()
            .for_each(|item| self.deliver_now(conn, item));
    }
}
