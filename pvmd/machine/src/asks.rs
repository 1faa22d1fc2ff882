//! Requests between daemons, and their replies.
//!
//! The daemon that sends a request remembers who needs the reply ([`Asker`]) and what was asked.
//! The receiver either serves the request or names the host to which the task in question has
//! migrated; then the request follows the task. If the receiver is lost, the caller gets the result
//! that fits a lost host.

use super::checkpoints::Counted;
use super::spawn::ExecBack;
use super::tasks::Phase;
use super::{Machine, Output};
use sempa_proto::host::{HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::SuspendOrder;
use sempa_proto::task::{Reply, SendWatermark};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of times that a request follows a migrating task.
const HOPS_MAX: u32 = 8;

/// The purpose of a request: determines what happens with its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// The reply answers a request of a task.
    Task { tid: Tid, id: RequestId },
    /// One part of a task list.
    Gather(u64),
    /// One part of a spawn.
    Spawn { spawn: u64, part: u64 },
    /// A notification about the exit of a task.
    Watch { watcher: Tid },
    /// Checks whether a group member is alive.
    Member { tid: Tid },
    /// One part of an inventory of tasks and contexts, for a checkpoint or a restart.
    Count { count: u64, host: HostId },
    /// Checks whether a host stores a copy of a checkpoint.
    Copy { migration: MigrationId },
    /// No reply is needed.
    Nobody,
    /// Properties of the task of a placement query.
    Facts(u64),
    /// A host's verdict in a placement query.
    Verdict { survey: u64, host: HostId },
}

impl Asker {
    /// True if the request survives a broken session: it stays open while the host is in the table.
    fn is_patient(self) -> bool {
        matches!(self, Asker::Watch { .. } | Asker::Member { .. })
    }
}

/// Return address of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Back {
    pub(super) host: HostId,
    pub(super) id: RequestId,
}

#[derive(Debug)]
struct Pending {
    host: HostId,
    question: HostRequest,
    asker: Asker,
    hops: u32,
}

/// Requests without a reply.
#[derive(Debug, Default)]
pub(super) struct Asks {
    open: BTreeMap<RequestId, Pending>,
    last: RequestId,
}

impl Asks {
    /// Returns one line per open request, for the log.
    pub(super) fn lines(&self) -> Vec<String> {
        self.open
            .iter()
            .map(|(id, p)| format!("{id} to {}: {:?}", p.host, p.asker))
            .collect()
    }
}

impl Machine {
    /// Sends a request to a host, which may be this one.
    pub(super) fn ask(&mut self, host: HostId, question: HostRequest, asker: Asker) {
        self.ask_on(host, question, asker, 0);
    }

    /// Sends a request to the host on which this task runs.
    pub(super) fn ask_about(&mut self, tid: Tid, question: HostRequest, asker: Asker) {
        match self.location(tid) {
            Some(host) => self.ask(host, question, asker),
            None => self.unanswered(question, asker),
        }
    }

    fn ask_on(&mut self, host: HostId, question: HostRequest, asker: Asker, hops: u32) {
        if self.table.get(host).is_none() || hops > HOPS_MAX {
            return self.unanswered(question, asker);
        }
        self.asks.last = self.asks.last.next();
        let id = self.asks.last;
        self.asks.open.insert(
            id,
            Pending {
                host,
                question: question.clone(),
                asker,
                hops,
            },
        );
        if host == self.config.host {
            self.question(Back { host, id }, question);
        } else {
            self.tell_host(
                host,
                HostMsg::HostRequest {
                    id,
                    request: question,
                },
            );
        }
    }

    /// Sends a reply to the daemon that sent the request.
    pub(super) fn answer(&mut self, back: Back, answer: HostReply) {
        if back.host == self.config.host {
            self.answered(back.host, back.id, answer);
        } else {
            self.tell_host(
                back.host,
                HostMsg::HostReply {
                    id: back.id,
                    reply: answer,
                },
            );
        }
    }

    /// Serves a request of a daemon.
    pub(super) fn question(&mut self, back: Back, question: HostRequest) {
        if let Some(tid) = task_of(&question)
            && let Some(host) = self.elsewhere(tid)
        {
            return self.answer(back, HostReply::MovedTo(host));
        }
        let reply = match question {
            HostRequest::Exec { parent, request } => {
                return self.queue_exec(parent, request, ExecBack::Answer(back));
            }
            HostRequest::Watch { tid, watcher } => {
                let gone = !self.is_alive(tid);
                let after = if gone {
                    self.tasks.dead_mark(tid, watcher)
                } else {
                    None
                };
                return self.answer(back, HostReply::Watched { gone, after });
            }
            HostRequest::Tasks { task } => Reply::Tasks(self.list_tasks(task)),
            HostRequest::Ping => Reply::Done,
            HostRequest::TaskStatus { tid } if self.is_alive(tid) => Reply::Done,
            HostRequest::TaskStatus { tid } => no_task(tid),
            HostRequest::Signal { tid, signal } => {
                self.told_to_end(tid, signal);
                self.signal_task(tid, signal);
                Reply::Done
            }
            HostRequest::Suspend(order) => return self.suspend(back, order),
            HostRequest::Inspect { tid } => return self.facts_wanted(back, tid),
            HostRequest::Verdict { facts } => return self.verdict_wanted(back, facts),
            HostRequest::Inventory => {
                let contexts = self
                    .contexts
                    .iter()
                    .map(|(ctx, owner)| (*ctx, *owner))
                    .collect();
                return self.answer(
                    back,
                    HostReply::Inventory {
                        tasks: self.list_tasks(None),
                        contexts,
                    },
                );
            }
            HostRequest::ReserveContexts(contexts) => {
                self.hold_contexts(contexts);
                Reply::Done
            }
            HostRequest::StoreCopy {
                migration,
                checkpoint: set,
            } => self.copy_asked(back.host, migration, set),
            HostRequest::Clock => Reply::Clock(self.unix),
            HostRequest::FreeContext { owner, ctx } => match self.contexts.get(&ctx) {
                Some(holder) if *holder == owner => {
                    self.contexts.remove(&ctx);
                    Reply::Done
                }
                _ => no_context(ctx),
            },
        };
        self.answer(back, HostReply::Reply(reply));
    }

    /// Returns the host of a task that is on another host. `None` if the task is here, or should
    /// be.
    fn elsewhere(&self, tid: Tid) -> Option<HostId> {
        if self.is_alive(tid) {
            return None;
        }
        self.location(tid).filter(|host| *host != self.config.host)
    }

    /// True if the task is on this host and has not ended. A task that has left the virtual machine
    /// counts until its process exits.
    pub(super) fn is_alive(&self, tid: Tid) -> bool {
        self.tasks.get(tid).is_some() || self.moves.arrivals.get(&tid).is_some_and(|a| a.located)
    }

    fn signal_task(&mut self, tid: Tid, signal: i32) {
        if self.signal_away(tid, signal) {
            return;
        }
        if let Some(task) = self.tasks.get(tid) {
            if task.spawned() {
                self.tell_tasker(ToTasker::Signal { tid, signal });
            } else if let Phase::Connected(conn) = task.phase {
                self.out.push_back(Output::Signal { conn, signal });
            } else if task.phase != Phase::Left {
                self.log(format!("{tid} has no process that this daemon knows; signal {signal} was not sent to it"));
            }
        } else if let Some(arrival) = self.moves.arrivals.get_mut(&tid) {
            arrival.signals.push(signal);
            self.arrival_step(tid);
        }
    }

    /// Finds the request of a reply and continues the work of its caller.
    pub(super) fn answered(&mut self, from: HostId, id: RequestId, answer: HostReply) {
        let Some(pending) = self.asks.open.remove(&id) else {
            return;
        };
        if pending.host != from {
            self.log(format!(
                "{from} answered a question that was put to {}; the answer was dropped",
                pending.host
            ));
            self.asks.open.insert(id, pending);
            return;
        }
        match (answer, pending.asker) {
            (HostReply::MovedTo(host), asker) => {
                self.ask_on(host, pending.question, asker, pending.hops + 1)
            }
            (HostReply::Reply(reply), Asker::Task { tid, id }) => self.reply(tid, id, reply),
            (HostReply::Reply(Reply::Tasks(tasks)), Asker::Gather(gather)) => {
                self.gathered(gather, tasks)
            }
            (HostReply::Inventory { tasks, contexts }, Asker::Count { count, .. }) => {
                self.counted(count, Ok(Counted::new(tasks, contexts)));
            }
            (HostReply::Reply(reply), Asker::Copy { migration }) => {
                self.copy_answered(migration, Some(reply))
            }
            (_, Asker::Nobody) => {}
            (HostReply::Reply(Reply::Spawned(results)), Asker::Spawn { spawn, part }) => {
                self.part_spawned(spawn, part, Ok(results));
            }
            (HostReply::Watched { gone, after }, Asker::Watch { watcher }) => {
                if let (true, HostRequest::Watch { tid, .. }) = (gone, &pending.question) {
                    self.watched_is_gone(watcher, *tid, after);
                }
            }
            (HostReply::Watched { gone, .. }, Asker::Member { tid }) => {
                if gone {
                    self.member_ended(tid);
                }
            }
            (HostReply::Inspected(result), Asker::Facts(survey)) => {
                self.facts_answered(survey, from, Some(result))
            }
            (HostReply::Verdict(verdict, engine), Asker::Verdict { survey, host }) => {
                self.verdict_answered(survey, host, Some((verdict, engine)));
            }
            (_, asker) => {
                self.log(format!(
                    "{from} gave an answer that does not fit its question"
                ));
                self.unanswered(pending.question, asker);
            }
        }
    }

    /// Completes a request that no host can answer.
    fn unanswered(&mut self, question: HostRequest, asker: Asker) {
        match asker {
            Asker::Task { tid, id } => {
                let reply = match question {
                    HostRequest::Tasks { .. } => Reply::Tasks(Vec::new()),
                    HostRequest::Signal { .. } => Reply::Done,
                    HostRequest::TaskStatus { tid }
                    | HostRequest::Suspend(SuspendOrder { tid, .. }) => no_task(tid),
                    HostRequest::FreeContext { ctx, .. } => no_context(ctx),
                    _ => Reply::Failed {
                        error: PvmError::HostFail,
                        reason: "the host left the virtual machine before it answered".into(),
                    },
                };
                self.reply(tid, id, reply);
            }
            Asker::Gather(gather) => self.gathered(gather, Vec::new()),
            Asker::Count { count, host } => self.counted(count, Err(host)),
            Asker::Copy { migration } => self.copy_answered(migration, None),
            Asker::Nobody => {}
            Asker::Spawn { spawn, part } => self.part_spawned(spawn, part, Err(PvmError::HostFail)),
            Asker::Member { tid } => self.member_ended(tid),
            Asker::Facts(survey) => self.facts_answered(survey, self.config.host, None),
            Asker::Verdict { survey, host } => self.verdict_answered(survey, host, None),
            Asker::Watch { watcher } => {
                if let HostRequest::Watch { tid, .. } = question {
                    self.watched_is_gone(watcher, tid, None::<SendWatermark>);
                }
            }
        }
    }

    /// Completes the requests to a lost host. While the host is in the table, requests that survive
    /// a broken session stay open: tasks of that host are reported as gone when the table changes,
    /// after the loss of the host itself.
    pub(super) fn fail_asks(&mut self, host: HostId) {
        let in_table = self.table.get(host).is_some();
        let lost = |p: &Pending| p.host == host && !(in_table && p.asker.is_patient());
        let lost: Vec<RequestId> = self
            .asks
            .open
            .iter()
            .filter(|(_, p)| lost(p))
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            if let Some(pending) = self.asks.open.remove(&id) {
                self.unanswered(pending.question, pending.asker);
            }
        }
    }

    /// Resends requests after a session was established, if they survive a broken session.
    pub(super) fn ask_again(&mut self, host: HostId) {
        let open: Vec<(RequestId, HostRequest)> = self
            .asks
            .open
            .iter()
            .filter(|(_, p)| p.host == host && p.asker.is_patient())
            .map(|(id, p)| (*id, p.question.clone()))
            .collect();
        for (id, question) in open {
            self.tell_host(
                host,
                HostMsg::HostRequest {
                    id,
                    request: question,
                },
            );
        }
    }
}

/// Returns the task that a request is about, if the request must reach that task's host.
fn task_of(question: &HostRequest) -> Option<Tid> {
    match question {
        HostRequest::Tasks { task: Some(tid) }
        | HostRequest::TaskStatus { tid }
        | HostRequest::Signal { tid, .. }
        | HostRequest::Suspend(SuspendOrder { tid, .. })
        | HostRequest::Inspect { tid }
        | HostRequest::Watch { tid, .. } => Some(*tid),
        _ => None,
    }
}

pub(super) fn no_task(tid: Tid) -> Reply {
    Reply::Failed {
        error: PvmError::NoTask,
        reason: format!("there is no task {tid}"),
    }
}

fn no_context(ctx: i32) -> Reply {
    Reply::Failed {
        error: PvmError::NotFound,
        reason: format!("context {ctx:#x} does not belong to this task"),
    }
}
