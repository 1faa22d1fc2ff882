//! Programs that exit on request and are started again by a migration or restart.

use super::{Channel, Sim};
use crate::Event;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::link::{Link, LinkFrame, LinkState};
use sempa_proto::migration::Failure;
use sempa_proto::task::{Claim, ProcessHandoff, Request, ToDaemon};
use sempa_proto::tasker::{FromTasker, TaskStart};
use sempa_proto::{HostId, Micros, MigrationId, Tid};

/// Tag of the message that asks a program to exit.
pub(in crate::tests) const EXIT_REQUEST_TAG: i32 = 77;

impl Sim {
    /// If `migration` is a migration, the library hands off its links for this migration. If
    /// `migration` is `None`, the library cancels the handoff.
    pub(super) fn prepare_exit(&mut self, proc: usize, migration: Option<MigrationId>) {
        let now = self.now;
        let p = &mut self.procs[proc];
        let (Some(conn), host_id, incarnation) = (p.conn, p.host, p.incarnation) else {
            return;
        };
        let Some(migration) = migration else {
            if p.exit_status.is_none() {
                p.links.values_mut().for_each(Link::restore_window);
                if let Some(migration) = p.handoff_migration.take() {
                    self.send_from_proc(
                        conn,
                        host_id,
                        Event::TaskControl {
                            conn,
                            message: ToDaemon::ExitCancelled { migration },
                        },
                    );
                }
            }
            return;
        };
        (p.handoff_migration, p.was_exit_requested) = (Some(migration), true);
        let link_parts: Vec<(LinkState, Vec<LinkFrame>)> = p
            .links
            .values_mut()
            .map(|link| link.hand_off(now))
            .collect();
        let deferred_notifications = std::mem::take(&mut p.deferred_notifications);
        let links = link_parts
            .iter()
            .map(|(link_state, _)| *link_state)
            .collect();
        let handoff_message = ToDaemon::Handoff {
            migration,
            incarnation,
            links,
            past: std::mem::take(&mut p.past),
            deferred_notifications,
        };
        self.send_from_proc(
            conn,
            host_id,
            Event::TaskControl {
                conn,
                message: handoff_message,
            },
        );
        for frame in link_parts.into_iter().flat_map(|(_, frames)| frames) {
            let bytes = [&frame.encode_head()[..], &frame.payload].concat().into();
            self.send_from_proc(conn, host_id, Event::TaskLink { conn, frame: bytes });
        }
        self.send_from_proc(
            conn,
            host_id,
            Event::TaskControl {
                conn,
                message: ToDaemon::ReadyToExit { migration },
            },
        );
    }

    /// Gives a new process the links and the incarnation in the handoff of its predecessor.
    pub(super) fn adopt_links(&mut self, proc: usize, handoff: &ProcessHandoff) {
        let p = &mut self.procs[proc];
        let tid = p.tid();
        (p.incarnation, p.next_request_number) =
            (handoff.incarnation, u64::from(handoff.restart_count) << 40);
        p.links.extend(
            handoff
                .links
                .iter()
                .map(|link_state| (link_state.peer, Link::resume_from(tid, link_state))),
        );
    }

    /// Accepts a message that the previous process had sent and that the daemon returns to the new
    /// process. Returns false if the frame does not belong to such a message.
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
            self.carry_out_link_outputs(proc);
        }
        is_returned
    }

    /// Delays task data from one host to another by at least `delay`.
    pub(in crate::tests) fn delay_data(&mut self, from: HostId, to: HostId, delay: Micros) {
        self.last_arrivals
            .insert(Channel::Data(from, to), self.now + delay);
    }

    /// Delays the master's messages to a host by at least `delay`.
    pub(in crate::tests) fn delay_orders(&mut self, receiver_host: HostId, delay: Micros) {
        self.last_arrivals.insert(
            Channel::Control(HostId::MASTER, receiver_host),
            self.now + delay,
        );
    }

    /// Renames the program of a process.
    pub(in crate::tests) fn set_program(&mut self, proc: usize, program: &str) {
        self.procs[proc].program = program.to_string();
    }

    /// Asks a program to exit, and waits for its exit. A program whose name contains `deaf` does
    /// not exit; a program whose name contains `done` exits with status 0.
    pub(super) fn request_exit_and_wait(&mut self, host_id: HostId, tid: Tid, engine: Engine) {
        let Some(proc) = self.find_spawned_proc(host_id, tid) else {
            return;
        };
        if let (true, Some((_, delay))) = (self.procs[proc].paused, engine.exit_request()) {
            // A paused program runs for this time so that it can exit.
            self.pause_after(host_id, proc, Micros::from_secs(delay.into()));
        }
        let program = self.procs[proc].program.clone();
        let asks_by_message = matches!(engine.exit_request(), Some((AskMethod::Message(_), _)));
        if asks_by_message {
            let message_count = self.procs[proc].notifications(EXIT_REQUEST_TAG).len();
            self.advance(Micros::from_millis(20));
            assert_eq!(
                self.procs[proc].notifications(EXIT_REQUEST_TAG).len(),
                message_count,
                "its end is not expected yet"
            );
            self.send_from_tasker(host_id, FromTasker::ExitExpected { tid });
        }
        if program.contains("deaf") {
            self.exit_ignoring_procs.push(proc);
            return;
        }
        if asks_by_message {
            let message_count = self.procs[proc].notifications(EXIT_REQUEST_TAG).len();
            self.run_until("it is asked", |s| {
                s.procs[proc].notifications(EXIT_REQUEST_TAG).len() > message_count
                    || s.procs[proc].exited
            });
        }
        let status = match engine {
            _ if program.contains("done") => 0,
            Engine::SelfCheckpoint {
                exit_status: exit_code,
                ..
            } => i32::from(exit_code) << 8,
            Engine::Criu | Engine::Restart { .. } => 15,
        };
        self.exit_gracefully(proc, status);
    }

    /// True if the library has handed off its links at least once, so that its program can be asked
    /// to exit.
    pub(in crate::tests) fn has_handed_off_links(&self, proc: usize) -> bool {
        self.procs[proc].was_exit_requested
    }

    /// Ends a process in an orderly way: the library first waits for the daemon's permission, if it
    /// needs one, and sends its last messages.
    pub(in crate::tests) fn exit_gracefully(&mut self, proc: usize, status: i32) {
        self.procs[proc].exit_status = Some(status);
        let p = &self.procs[proc];
        if p.was_exit_requested && p.handoff_migration.is_none() && p.conn.is_some() {
            let request = self.request(proc, Request::AnnounceExit);
            self.run_until("it may end", |s| {
                s.procs[proc].replies.contains_key(&request) || s.procs[proc].exited
            });
        }
        self.carry_out_link_outputs(proc);
        self.write_state(proc);
        self.exit_proc(proc, status);
    }

    /// Starts a program that waits before its first instruction until [`Sim::run_respawned`] is
    /// called.
    pub(super) fn prepare_respawn(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        start: &TaskStart,
    ) -> FromTasker {
        let result = self.engine_step_result(host_id, 4343);
        if result.is_ok() {
            let proc = self.create_process(host_id, start);
            self.procs[proc].stopped_for_migration = true;
            // Until the program runs, the process has no tid, so it is not found as the task's
            // process.
            self.procs[proc].spawned_tid = None;
            self.respawned_procs
                .insert((host_id, migration), (proc, start.tid));
        }
        FromTasker::Restored { migration, result }
    }

    /// Lets a program run that [`Sim::prepare_respawn`] has started. Returns the tasker's report,
    /// or `None` if the migration has started no program.
    pub(super) fn run_respawned(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        is_paused: bool,
    ) -> Option<FromTasker> {
        let (proc, tid) = self.respawned_procs.remove(&(host_id, migration))?;
        let is_duplicate = self
            .procs
            .iter()
            .any(|p| p.spawned_tid == Some(tid) && !p.exited);
        assert!(
            !is_duplicate,
            "two live copies of {tid} (seed {})",
            self.seed
        );
        let result = if self.procs[proc].exited {
            Err(Failure::Engine("it has ended".into()))
        } else {
            Ok(())
        };
        let p = &mut self.procs[proc];
        (p.spawned_tid, p.stopped_for_migration, p.paused) = (Some(tid), false, is_paused);
        self.hold_procs(host_id);
        self.connect_if_runnable(proc);
        Some(FromTasker::Running { migration, result })
    }

    /// Ends a program that a migration has started and that does not run yet.
    pub(super) fn discard_respawned(&mut self, host_id: HostId, migration: MigrationId) {
        if let Some((proc, _)) = self.respawned_procs.remove(&(host_id, migration)) {
            self.procs[proc].exited = true;
        }
    }

    /// Creates the process of a start order. The process connects later.
    pub(super) fn create_process(&mut self, host_id: HostId, start: &TaskStart) -> usize {
        let env: Vec<String> = start
            .env
            .iter()
            .map(|e| String::from_utf8_lossy(e).into_owned())
            .collect();
        let spawn_token = env
            .iter()
            .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
            .expect("a number");
        let program = start.path.to_string_lossy().into_owned();
        let proc = self.add_process(host_id, &program, Some(start.tid), env);
        self.procs[proc].claim = Some(Claim::Spawned { spawn_token });
        proc
    }

    /// Connects a new process with its claim, if the process may run.
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
