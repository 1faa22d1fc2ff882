//! Programs that exit on request and are started again by a migration or restart.

use super::{Channel, Sim};
use crate::Event;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::link::{Link, LinkFrame, LinkState};
use sempa_proto::migration::Failure;
use sempa_proto::task::{Claim, ProcessHandoff, Request, ToDaemon};
use sempa_proto::tasker::{FromTasker, StartTask};
use sempa_proto::{HostId, Micros, MigrationId, Tid};

/// Tag of the message that asks a program to exit.
pub(in crate::tests) const EXIT_REQUEST_TAG: i32 = 77;

impl Sim {
    /// Makes a library hand off its links for a migration (`by` is set), or cancels the handoff.
    pub(super) fn prepare_exit(&mut self, proc: usize, by: Option<MigrationId>) {
        let now = self.now;
        let p = &mut self.procs[proc];
        let (Some(conn), on, line) = (p.conn, p.host, p.incarnation) else {
            return;
        };
        let Some(by) = by else {
            if p.exit_status.is_none() {
                p.links.values_mut().for_each(Link::restore_window);
                if let Some(by) = p.handed_off_for.take() {
                    self.send_from_proc(
                        conn,
                        on,
                        Event::TaskControl {
                            conn,
                            message: ToDaemon::ExitCancelled { migration: by },
                        },
                    );
                }
            }
            return;
        };
        (p.handed_off_for, p.exit_requested) = (Some(by), true);
        let parts: Vec<(LinkState, Vec<LinkFrame>)> = p
            .links
            .values_mut()
            .map(|link| link.hand_off(now))
            .collect();
        let deferred = std::mem::take(&mut p.deferred_notifications);
        let talks = parts.iter().map(|(talk, _)| *talk).collect();
        let first = ToDaemon::Handoff {
            migration: by,
            incarnation: line,
            links: talks,
            deferred_notifications: deferred,
        };
        self.send_from_proc(
            conn,
            on,
            Event::TaskControl {
                conn,
                message: first,
            },
        );
        for frame in parts.into_iter().flat_map(|(_, frames)| frames) {
            let bytes = [&frame.encode_head()[..], &frame.payload].concat().into();
            self.send_from_proc(conn, on, Event::TaskLink { conn, frame: bytes });
        }
        self.send_from_proc(
            conn,
            on,
            Event::TaskControl {
                conn,
                message: ToDaemon::ReadyToExit { migration: by },
            },
        );
    }

    /// Lets a new process continue the links of its predecessor.
    pub(super) fn adopt_links(&mut self, proc: usize, successor: &ProcessHandoff) {
        let p = &mut self.procs[proc];
        let tid = p.tid();
        (p.incarnation, p.next_request) = (
            successor.incarnation,
            u64::from(successor.restart_count) << 40,
        );
        p.links.extend(
            successor
                .links
                .iter()
                .map(|talk| (talk.peer, Link::resume_from(tid, talk))),
        );
    }

    /// Accepts a message that the previous process had sent and that the daemon returns to the new
    /// process. Returns false if the frame is of another kind.
    pub(super) fn accept_returned(&mut self, proc: usize, frame: &LinkFrame) -> bool {
        let p = &mut self.procs[proc];
        let is_returned = frame.dst != frame.src
            && p.welcome
                .as_ref()
                .is_some_and(|welcome| welcome.tid == frame.src);
        if is_returned {
            p.links
                .get_mut(&frame.dst)
                .expect("it was told of this one")
                .accept_returned_frame(frame);
            self.run_links(proc);
        }
        is_returned
    }

    /// Delays task data from one host to another by at least `time`.
    pub(in crate::tests) fn delay_data(&mut self, from: HostId, to: HostId, time: Micros) {
        self.channels
            .insert(Channel::Data(from, to), self.now + time);
    }

    /// Delays the master's messages to a host by at least `time`.
    pub(in crate::tests) fn delay_orders(&mut self, to: HostId, time: Micros) {
        self.channels
            .insert(Channel::Control(HostId::MASTER, to), self.now + time);
    }

    /// Renames the program of a process.
    pub(in crate::tests) fn set_program(&mut self, proc: usize, program: &str) {
        self.procs[proc].program = program.to_string();
    }

    /// Asks a program to exit. A program whose name contains `deaf` does not exit; a program whose
    /// name contains `done` exits with status 0.
    pub(super) fn request_exit(&mut self, on: HostId, tid: Tid, engine: Engine) {
        let Some(proc) = self.find_spawned(on, tid) else {
            return;
        };
        if let (true, Some((_, wait))) = (self.procs[proc].paused, engine.exit_request()) {
            // A paused program may run to exit.
            self.pause_after(on, proc, Micros::from_secs(wait.into()));
        }
        let program = self.procs[proc].program.clone();
        let by_message = matches!(engine.exit_request(), Some((AskMethod::Message(_), _)));
        if by_message {
            let before = self.procs[proc].notifications(EXIT_REQUEST_TAG).len();
            self.advance(Micros::from_millis(20));
            assert_eq!(
                self.procs[proc].notifications(EXIT_REQUEST_TAG).len(),
                before,
                "its end is not expected yet"
            );
            self.send_from_tasker(on, FromTasker::ExitExpected { tid });
        }
        if program.contains("deaf") {
            self.exit_ignored_by.push(proc);
            return;
        }
        if by_message {
            let before = self.procs[proc].notifications(EXIT_REQUEST_TAG).len();
            self.run_until("it is asked", |s| {
                s.procs[proc].notifications(EXIT_REQUEST_TAG).len() > before || s.procs[proc].exited
            });
        }
        let status = match engine {
            _ if program.contains("done") => 0,
            Engine::SelfCheckpoint {
                exit_status: exit, ..
            } => i32::from(exit) << 8,
            Engine::Criu | Engine::Restart { .. } => 15,
        };
        self.exit_gracefully(proc, status);
    }

    /// True if the library has handed off its links, so that the program can be asked.
    pub(in crate::tests) fn handed_off_links(&self, proc: usize) -> bool {
        self.procs[proc].exit_requested
    }

    /// Ends a process in an orderly way: its library sends its last messages first.
    pub(in crate::tests) fn exit_gracefully(&mut self, proc: usize, status: i32) {
        self.procs[proc].exit_status = Some(status);
        let p = &self.procs[proc];
        if p.exit_requested && p.handed_off_for.is_none() && p.conn.is_some() {
            let request = self.request(proc, Request::AboutToExit);
            self.run_until("it may end", |s| {
                s.procs[proc].replies.contains_key(&request) || s.procs[proc].exited
            });
        }
        self.run_links(proc);
        self.write_state(proc);
        self.exit(proc, status);
    }

    /// Starts a program that waits before its first instruction.
    pub(super) fn prepare_respawn(
        &mut self,
        on: HostId,
        migration: MigrationId,
        start: &StartTask,
    ) -> FromTasker {
        let result = self.step_result_of(on, 4343);
        if result.is_ok() {
            let proc = self.create_process(on, start);
            self.procs[proc].stopped_for_migration = true;
            // The process does not count as the task yet.
            self.procs[proc].spawned_tid = None;
            self.respawned.insert((on, migration), (proc, start.tid));
        }
        FromTasker::Restored { migration, result }
    }

    /// Lets a waiting program run. Returns `None` if there is none.
    pub(super) fn run_respawned(
        &mut self,
        on: HostId,
        migration: MigrationId,
        held: bool,
    ) -> Option<FromTasker> {
        let (proc, tid) = self.respawned.remove(&(on, migration))?;
        let twice = self
            .procs
            .iter()
            .any(|p| p.spawned_tid == Some(tid) && !p.exited);
        assert!(!twice, "two live copies of {tid} (seed {})", self.seed);
        let result = if self.procs[proc].exited {
            Err(Failure::Engine("it has ended".into()))
        } else {
            Ok(())
        };
        let p = &mut self.procs[proc];
        (p.spawned_tid, p.stopped_for_migration, p.paused) = (Some(tid), false, held);
        self.connect_if_runnable(proc);
        Some(FromTasker::Running { migration, result })
    }

    /// Discards a program that was started for a migration.
    pub(super) fn discard_respawned(&mut self, on: HostId, migration: MigrationId) {
        if let Some((proc, _)) = self.respawned.remove(&(on, migration)) {
            self.procs[proc].exited = true;
        }
    }

    /// Creates the process of a start order. It has not connected.
    pub(super) fn create_process(&mut self, on: HostId, start: &StartTask) -> usize {
        let env: Vec<String> = start
            .env
            .iter()
            .map(|e| String::from_utf8_lossy(e).into_owned())
            .collect();
        let epid = env
            .iter()
            .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
            .expect("a number");
        let program = start.path.to_string_lossy().into_owned();
        let proc = self.process(on, &program, Some(start.tid), env);
        self.procs[proc].claim = Some(Claim::Spawned { spawn_token: epid });
        proc
    }

    /// Connects a new process if it may run.
    pub(super) fn connect_if_runnable(&mut self, proc: usize) {
        let p = &mut self.procs[proc];
        if p.is_frozen() || p.exited || p.program.contains("sleep") {
            return;
        }
        if let Some(claim) = p.claim.take() {
            self.read_state(proc);
            self.connect(proc, claim);
        }
    }
}
