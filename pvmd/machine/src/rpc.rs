//! Requests between daemons, and their replies.
//!
//! The daemon that sends a request records the purpose of the reply ([`RpcPurpose`]) and the
//! request itself. The receiver serves the request, or names the host to which the task in question
//! has migrated; then the request is sent to that host. If the receiver is lost, the request ends
//! with the result for a lost host.

use super::checkpoints::Inventory;
use super::spawn::ExecRequester;
use super::tasks::ConnectionPhase;
use super::{Machine, Output};
use sempa_proto::host::{HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::SuspendOrder;
use sempa_proto::task::{Reply, SendWatermark};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, MigrationId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;
use std::fmt;

/// Largest number of times that a request is sent again because its task has migrated.
const HOPS_MAX: u32 = 8;

/// The purpose of a request: determines how its reply is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RpcPurpose {
    /// The reply answers a request of a task.
    Task { tid: Tid, id: RequestId },
    /// The reply is one host's part of a task list that is collected from several hosts; the number
    /// identifies the list.
    ScatterGather(u64),
    /// The reply is the result of one part of a spawn.
    Spawn { spawn: u64, part: u64 },
    /// The reply states whether a task is alive. `watcher` has requested a notification of the
    /// task's exit.
    Watch { watcher: Tid },
    /// The reply states whether a group member is alive.
    GroupMember { tid: Tid },
    /// The reply is one host's part of an inventory of tasks and contexts, for a checkpoint or a
    /// restart.
    Inventory { inventory: u64, host: HostId },
    /// The reply states whether a host accepts a copy of a checkpoint.
    StoreCopy { migration: MigrationId },
    /// No reply is needed.
    Ignored,
    /// The reply contains the properties of a task; the number identifies the placement query.
    Inspection(u64),
    /// The reply is a host's verdict for a placement query.
    Verdict { query: u64, host: HostId },
}

impl RpcPurpose {
    /// True if the request stays open when the session breaks, as long as the host is in the table.
    fn survives_broken_session(self) -> bool {
        matches!(
            self,
            RpcPurpose::Watch { .. } | RpcPurpose::GroupMember { .. }
        )
    }
}

/// The purpose in words, for the daemon's log.
impl fmt::Display for RpcPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RpcPurpose::Task { tid, id } => write!(f, "Task {{ tid: {tid:?}, id: {id:?} }}"),
            RpcPurpose::ScatterGather(query) => write!(f, "Gather({query})"),
            RpcPurpose::Spawn { spawn, part } => {
                write!(f, "Spawn {{ spawn: {spawn}, part: {part} }}")
            }
            RpcPurpose::Watch { watcher } => write!(f, "Watch {{ watcher: {watcher:?} }}"),
            RpcPurpose::GroupMember { tid } => write!(f, "Member {{ tid: {tid:?} }}"),
            RpcPurpose::Inventory { inventory, host } => {
                write!(f, "Count {{ count: {inventory}, host: {host:?} }}")
            }
            RpcPurpose::StoreCopy { migration } => {
                write!(f, "Copy {{ migration: {migration:?} }}")
            }
            RpcPurpose::Ignored => f.write_str("Nobody"),
            RpcPurpose::Inspection(query) => write!(f, "Facts({query})"),
            RpcPurpose::Verdict { query, host } => {
                write!(f, "Verdict {{ survey: {query}, host: {host:?} }}")
            }
        }
    }
}

/// Return address of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplyAddress {
    pub(super) host: HostId,
    pub(super) id: RequestId,
}

#[derive(Debug)]
struct OpenRequest {
    host: HostId,
    request: HostRequest,
    caller: RpcPurpose,
    hops: u32,
}

/// Requests that have no reply yet, by id.
#[derive(Debug, Default)]
pub(super) struct OpenRequests {
    open: BTreeMap<RequestId, OpenRequest>,
    last_id: RequestId,
}

impl OpenRequests {
    /// Returns one line per open request, for the log.
    pub(super) fn log_lines(&self) -> Vec<String> {
        self.open
            .iter()
            .map(|(id, p)| format!("{id} to {}: {}", p.host, p.caller))
            .collect()
    }
}

impl Machine {
    /// Sends a request to a host, which may be this one.
    pub(super) fn call_host(&mut self, host: HostId, question: HostRequest, caller: RpcPurpose) {
        self.call_with_hops(host, question, caller, 0);
    }

    /// Sends a request to the host on which this task runs.
    pub(super) fn call_host_of_task(
        &mut self,
        tid: Tid,
        question: HostRequest,
        caller: RpcPurpose,
    ) {
        match self.location(tid) {
            Some(host) => self.call_host(host, question, caller),
            None => self.fail_host_request(question, caller),
        }
    }

    fn call_with_hops(
        &mut self,
        host: HostId,
        question: HostRequest,
        caller: RpcPurpose,
        hops: u32,
    ) {
        if self.table.get(host).is_none() || hops > HOPS_MAX {
            return self.fail_host_request(question, caller);
        }
        self.rpcs.last_id = self.rpcs.last_id.next();
        let id = self.rpcs.last_id;
        self.rpcs.open.insert(
            id,
            OpenRequest {
                host,
                request: question.clone(),
                caller,
                hops,
            },
        );
        if host == self.config.host {
            self.serve_host_request(ReplyAddress { host, id }, question);
        } else {
            self.send_to_host(
                host,
                HostMsg::HostRequest {
                    id,
                    request: question,
                },
            );
        }
    }

    /// Sends a reply to the daemon that sent the request.
    pub(super) fn send_host_reply(&mut self, reply_to: ReplyAddress, answer: HostReply) {
        if reply_to.host == self.config.host {
            self.handle_host_reply(reply_to.host, reply_to.id, answer);
        } else {
            self.send_to_host(
                reply_to.host,
                HostMsg::HostReply {
                    id: reply_to.id,
                    reply: answer,
                },
            );
        }
    }

    pub(super) fn serve_host_request(&mut self, reply_to: ReplyAddress, question: HostRequest) {
        if let Some(tid) = subject_task(&question)
            && let Some(host) = self.remote_location(tid)
        {
            return self.send_host_reply(reply_to, HostReply::MigratedTo(host));
        }
        let reply = match question {
            HostRequest::Exec { parent, request } => {
                return self.queue_exec(parent, request, ExecRequester::Answer(reply_to));
            }
            HostRequest::Watch { tid, watcher } => {
                let gone = !self.is_alive(tid);
                let after = if gone {
                    self.tasks.exited_watermark(tid, watcher)
                } else {
                    None
                };
                return self.send_host_reply(
                    reply_to,
                    HostReply::Watched {
                        gone,
                        watermark: after,
                    },
                );
            }
            HostRequest::Tasks { task } => Reply::Tasks(self.list_tasks(task)),
            HostRequest::Ping => Reply::Done,
            HostRequest::TaskStatus { tid } if self.is_alive(tid) => Reply::Done,
            HostRequest::TaskStatus { tid } => no_task_reply(tid),
            HostRequest::Signal { tid, signal } => {
                self.record_end_signal(tid, signal);
                self.signal_task(tid, signal);
                Reply::Done
            }
            HostRequest::Suspend(order) => return self.handle_suspend_order(reply_to, order),
            HostRequest::Inspect { tid } => return self.inspect_for_query(reply_to, tid),
            HostRequest::Verdict { facts } => return self.judge_for_query(reply_to, facts),
            HostRequest::Inventory => {
                let contexts = self
                    .contexts
                    .iter()
                    .map(|(ctx, owner)| (*ctx, *owner))
                    .collect();
                return self.send_host_reply(
                    reply_to,
                    HostReply::Inventory {
                        tasks: self.list_tasks(None),
                        contexts,
                    },
                );
            }
            HostRequest::ReserveContexts(contexts) => {
                self.reserve_contexts(contexts);
                Reply::Done
            }
            HostRequest::StoreCopy {
                migration,
                checkpoint: set,
            } => self.handle_copy_request(reply_to.host, migration, set),
            HostRequest::Clock => Reply::Clock(self.unix_time),
            HostRequest::FreeContext { owner, ctx } => match self.contexts.get(&ctx) {
                Some(holder) if *holder == owner => {
                    self.contexts.remove(&ctx);
                    Reply::Done
                }
                _ => no_context_reply(ctx),
            },
        };
        self.send_host_reply(reply_to, HostReply::Reply(reply));
    }

    /// Returns the host of a task that is on another host. `None` if the task is on this host, or
    /// should be.
    fn remote_location(&self, tid: Tid) -> Option<HostId> {
        if self.is_alive(tid) {
            return None;
        }
        self.location(tid).filter(|host| *host != self.config.host)
    }

    /// True if the task is on this host and has not ended. A task that has left the virtual machine
    /// counts until its process exits.
    pub(super) fn is_alive(&self, tid: Tid) -> bool {
        self.tasks.get(tid).is_some()
            || self
                .migrations
                .arrivals
                .get(&tid)
                .is_some_and(|a| a.is_located)
    }

    fn signal_task(&mut self, tid: Tid, signal: i32) {
        if self.signal_without_process(tid, signal) {
            return;
        }
        if let Some(task) = self.tasks.get(tid) {
            if task.is_spawned() {
                self.send_to_tasker(ToTasker::Signal { tid, signal });
            } else if let ConnectionPhase::Connected(conn) = task.phase {
                self.outputs.push_back(Output::Signal { conn, signal });
            } else if task.phase != ConnectionPhase::Left {
                self.log_warning(format!("{tid} has no process that this daemon knows; signal {signal} was not sent to it"));
            }
        } else if let Some(arrival) = self.migrations.arrivals.get_mut(&tid) {
            arrival.signals.push(signal);
            self.advance_arrival(tid);
        }
    }

    /// Finds the request of a reply and continues the work of its caller.
    pub(super) fn handle_host_reply(&mut self, from: HostId, id: RequestId, answer: HostReply) {
        let Some(pending) = self.rpcs.open.remove(&id) else {
            return;
        };
        if pending.host != from {
            self.log_warning(format!(
                "{from} replied to a request that was sent to {}; the reply was dropped",
                pending.host
            ));
            self.rpcs.open.insert(id, pending);
            return;
        }
        match (answer, pending.caller) {
            (HostReply::MigratedTo(host), caller) => {
                self.call_with_hops(host, pending.request, caller, pending.hops + 1)
            }
            (HostReply::Reply(reply), RpcPurpose::Task { tid, id }) => self.reply(tid, id, reply),
            (HostReply::Reply(Reply::Tasks(tasks)), RpcPurpose::ScatterGather(query)) => {
                self.add_to_task_list(query, tasks)
            }
            (HostReply::Inventory { tasks, contexts }, RpcPurpose::Inventory { inventory, .. }) => {
                self.handle_inventory(inventory, Ok(Inventory::new(tasks, contexts)));
            }
            (HostReply::Reply(reply), RpcPurpose::StoreCopy { migration }) => {
                self.handle_copy_reply(migration, Some(reply))
            }
            (_, RpcPurpose::Ignored) => {}
            (HostReply::Reply(Reply::Spawned(results)), RpcPurpose::Spawn { spawn, part }) => {
                self.handle_part_spawned(spawn, part, Ok(results));
            }
            (
                HostReply::Watched {
                    gone,
                    watermark: after,
                },
                RpcPurpose::Watch { watcher },
            ) => {
                if let (true, HostRequest::Watch { tid, .. }) = (gone, &pending.request) {
                    self.notify_watcher_of_exit(watcher, *tid, after);
                }
            }
            (HostReply::Watched { gone, .. }, RpcPurpose::GroupMember { tid }) => {
                if gone {
                    self.remove_ended_member(tid);
                }
            }
            (HostReply::Inspected(result), RpcPurpose::Inspection(query)) => {
                self.handle_query_facts(query, from, Some(result))
            }
            (HostReply::Verdict(verdict, engine), RpcPurpose::Verdict { query, host }) => {
                self.handle_query_verdict(query, host, Some((verdict, engine)));
            }
            (_, caller) => {
                self.log_warning(format!("{from} sent a reply that does not fit the request"));
                self.fail_host_request(pending.request, caller);
            }
        }
    }

    /// Completes a request that no host can answer.
    fn fail_host_request(&mut self, request: HostRequest, caller: RpcPurpose) {
        match caller {
            RpcPurpose::Task { tid, id } => {
                let reply = match request {
                    HostRequest::Tasks { .. } => Reply::Tasks(Vec::new()),
                    HostRequest::Signal { .. } => Reply::Done,
                    HostRequest::TaskStatus { tid }
                    | HostRequest::Suspend(SuspendOrder { tid, .. }) => no_task_reply(tid),
                    HostRequest::FreeContext { ctx, .. } => no_context_reply(ctx),
                    _ => Reply::Failed {
                        error: PvmError::HostFail,
                        reason: "the host left the virtual machine before it answered".into(),
                    },
                };
                self.reply(tid, id, reply);
            }
            RpcPurpose::ScatterGather(query) => self.add_to_task_list(query, Vec::new()),
            RpcPurpose::Inventory { inventory, host } => {
                self.handle_inventory(inventory, Err(host))
            }
            RpcPurpose::StoreCopy { migration } => self.handle_copy_reply(migration, None),
            RpcPurpose::Ignored => {}
            RpcPurpose::Spawn { spawn, part } => {
                self.handle_part_spawned(spawn, part, Err(PvmError::HostFail))
            }
            RpcPurpose::GroupMember { tid } => self.remove_ended_member(tid),
            RpcPurpose::Inspection(query) => self.handle_query_facts(query, self.config.host, None),
            RpcPurpose::Verdict { query, host } => self.handle_query_verdict(query, host, None),
            RpcPurpose::Watch { watcher } => {
                if let HostRequest::Watch { tid, .. } = request {
                    self.notify_watcher_of_exit(watcher, tid, None::<SendWatermark>);
                }
            }
        }
    }

    /// Completes the requests to a lost host. While the host is in the table, requests that survive
    /// a broken session stay open: tasks of that host are reported as gone when the table changes,
    /// after the loss of the host itself.
    pub(super) fn fail_requests_to(&mut self, host: HostId) {
        let in_table = self.table.get(host).is_some();
        let lost =
            |p: &OpenRequest| p.host == host && !(in_table && p.caller.survives_broken_session());
        let lost: Vec<RequestId> = self
            .rpcs
            .open
            .iter()
            .filter(|(_, p)| lost(p))
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            if let Some(pending) = self.rpcs.open.remove(&id) {
                self.fail_host_request(pending.request, pending.caller);
            }
        }
    }

    /// Resends requests after a session was established, if they survive a broken session.
    pub(super) fn resend_requests_to(&mut self, host: HostId) {
        let open: Vec<(RequestId, HostRequest)> = self
            .rpcs
            .open
            .iter()
            .filter(|(_, p)| p.host == host && p.caller.survives_broken_session())
            .map(|(id, p)| (*id, p.request.clone()))
            .collect();
        for (id, question) in open {
            self.send_to_host(
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
fn subject_task(request: &HostRequest) -> Option<Tid> {
    match request {
        HostRequest::Tasks { task: Some(tid) }
        | HostRequest::TaskStatus { tid }
        | HostRequest::Signal { tid, .. }
        | HostRequest::Suspend(SuspendOrder { tid, .. })
        | HostRequest::Inspect { tid }
        | HostRequest::Watch { tid, .. } => Some(*tid),
        _ => None,
    }
}

pub(super) fn no_task_reply(tid: Tid) -> Reply {
    Reply::Failed {
        error: PvmError::NoTask,
        reason: format!("there is no task {tid}"),
    }
}

fn no_context_reply(ctx: i32) -> Reply {
    Reply::Failed {
        error: PvmError::NotFound,
        reason: format!("context {ctx:#x} does not belong to this task"),
    }
}
