//! Requests between daemons, and their replies.
//!
//! The daemon that sends a request records the purpose of the reply ([`RpcPurpose`]) and the
//! request itself. The receiver serves the request. If the task of the request has migrated, the
//! receiver replies with the task's host instead, and the request is sent to that host. If the
//! receiver is lost, the request ends with the result for a lost host.

use super::checkpoints::Inventory;
use super::spawn::ExecRequester;
use super::tasks::{ConnectionPhase, watermark_for};
use super::{Machine, Output};
use sempa_proto::causal::Past;
use sempa_proto::host::{DataMsg, HostMsg, HostReply, HostRequest};
use sempa_proto::suspend::SuspendOrder;
use sempa_proto::task::{Reply, SendWatermark};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, MigrationId, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Largest number of times that a request is sent again because its task has migrated.
const HOPS_MAX: u32 = 8;

/// The purpose of a request. It determines how the reply is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RpcPurpose {
    /// The reply answers a request of a task.
    Task { tid: Tid, id: RequestId },
    /// The reply contains the tasks of one host, for a task list of several hosts. The number
    /// identifies the list.
    TaskList(u64),
    /// The reply contains the results of one part of a spawn.
    Spawn { spawn_number: u64, part_number: u64 },
    /// The reply states whether a task is alive. `watcher` has requested a notification of the
    /// task's exit.
    Watch { watcher: Tid },
    /// The reply states whether a group member is alive.
    GroupMember { tid: Tid },
    /// The reply contains the tasks and contexts of one host, for an inventory.
    Inventory { inventory_number: u64, host: HostId },
    /// The reply states whether a host accepts a copy of a checkpoint.
    StoreCopy { migration: MigrationId },
    /// No reply is needed.
    Ignored,
    /// The reply contains the properties of a task; the number identifies the placement query.
    Inspection(u64),
    /// The reply is a host's verdict for a placement query.
    Verdict { query_number: u64, host: HostId },
}

impl RpcPurpose {
    /// True if the request stays open when the session breaks, as long as its receiver is in the
    /// host table.
    fn survives_broken_session(self) -> bool {
        matches!(self, Self::Watch { .. } | Self::GroupMember { .. })
    }
}

/// The purpose in words, for the daemon's log.
impl fmt::Display for RpcPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task { tid, id } => write!(f, "Task {{ tid: {tid:?}, id: {id:?} }}"),
            Self::TaskList(query) => write!(f, "Gather({query})"),
            Self::Spawn {
                spawn_number: spawn,
                part_number: part,
            } => {
                write!(f, "Spawn {{ spawn: {spawn}, part: {part} }}")
            }
            Self::Watch { watcher } => write!(f, "Watch {{ watcher: {watcher:?} }}"),
            Self::GroupMember { tid } => write!(f, "Member {{ tid: {tid:?} }}"),
            Self::Inventory {
                inventory_number: inventory,
                host,
            } => {
                write!(f, "Count {{ count: {inventory}, host: {host:?} }}")
            }
            Self::StoreCopy { migration } => {
                write!(f, "Copy {{ migration: {migration:?} }}")
            }
            Self::Ignored => f.write_str("Nobody"),
            Self::Inspection(query) => write!(f, "Facts({query})"),
            Self::Verdict {
                query_number: query,
                host,
            } => {
                write!(f, "Verdict {{ survey: {query}, host: {host:?} }}")
            }
        }
    }
}

/// Daemon and request to which a reply is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplyAddress {
    pub(super) host: HostId,
    pub(super) id: RequestId,
}

#[derive(Debug)]
struct OpenRequest {
    host: HostId,
    request: HostRequest,
    purpose: RpcPurpose,
    hop_count: u32,
}

/// Requests that have no reply yet, by id.
#[derive(Debug, Default)]
pub(super) struct OpenRequests {
    open_requests: BTreeMap<RequestId, OpenRequest>,
    last_id: RequestId,
}

impl OpenRequests {
    /// Returns each watched task and its watcher of the requests that ask whether the former is
    /// alive.
    pub(super) fn open_watches(&self) -> BTreeSet<(Tid, Tid)> {
        let watches = self.open_requests.values().filter_map(|p| match p.request {
            HostRequest::Watch { tid, watcher } => Some((tid, watcher)),
            _ => None,
        });
        watches.collect()
    }

    /// Returns one line per open request, for the log.
    pub(super) fn log_lines(&self) -> Vec<String> {
        self.open_requests
            .iter()
            .map(|(id, p)| format!("{id} to {}: {}", p.host, p.purpose))
            .collect()
    }
}

impl Machine {
    /// Sends a request to a host, which may be this host.
    pub(super) fn call_host(&mut self, host: HostId, request: HostRequest, purpose: RpcPurpose) {
        self.send_host_request(host, request, purpose, 0);
    }

    /// Sends a request to the host that is the task's location.
    pub(super) fn call_host_of_task(
        &mut self,
        tid: Tid,
        request: HostRequest,
        purpose: RpcPurpose,
    ) {
        match self.location(tid) {
            Some(host) => self.call_host(host, request, purpose),
            None => self.fail_host_request(request, purpose),
        }
    }

    fn send_host_request(
        &mut self,
        host: HostId,
        request: HostRequest,
        purpose: RpcPurpose,
        hop_count: u32,
    ) {
        if self.table.get(host).is_none() || hop_count > HOPS_MAX {
            return self.fail_host_request(request, purpose);
        }
        self.rpcs.last_id = self.rpcs.last_id.next();
        let id = self.rpcs.last_id;
        self.rpcs.open_requests.insert(
            id,
            OpenRequest {
                host,
                request: request.clone(),
                purpose,
                hop_count,
            },
        );
        if host == self.config.host {
            self.serve_host_request(ReplyAddress { host, id }, request);
        } else {
            self.send_to_host(host, HostMsg::HostRequest { id, request });
        }
    }

    /// Sends a reply to the daemon that sent the request.
    pub(super) fn send_host_reply(&mut self, reply_to: ReplyAddress, reply: HostReply) {
        if reply_to.host == self.config.host {
            self.handle_host_reply(reply_to.host, reply_to.id, reply);
        } else {
            self.send_to_host(
                reply_to.host,
                HostMsg::HostReply {
                    id: reply_to.id,
                    reply,
                },
            );
        }
    }

    pub(super) fn serve_host_request(&mut self, reply_to: ReplyAddress, host_request: HostRequest) {
        if let Some(tid) = subject_task(&host_request)
            && let Some(host) = self.remote_location(tid)
        {
            return self.send_host_reply(reply_to, HostReply::MigratedTo(host));
        }
        let reply = match host_request {
            HostRequest::Exec { parent, request } => {
                return self.queue_exec(parent, request, ExecRequester::Daemon(reply_to));
            }
            HostRequest::Watch { tid, watcher } => {
                return self.serve_watch(reply_to, tid, watcher);
            }
            HostRequest::Tasks { task } => {
                let mut tasks = self.list_tasks(task);
                tasks.extend(self.list_leftovers(task));
                Reply::Tasks(tasks)
            }
            HostRequest::Ping => Reply::Done,
            HostRequest::TaskStatus { tid } if self.is_alive(tid) => Reply::Done,
            HostRequest::TaskStatus { tid } => no_task_reply(tid),
            HostRequest::Signal { tid, signal } => {
                self.record_end_signal(tid, signal);
                self.signal_task(tid, signal);
                Reply::Done
            }
            HostRequest::SignalAfter { tid, signal, marks } => {
                self.record_end_signal(tid, signal);
                return self.signal_after_messages(reply_to, tid, signal, marks);
            }
            HostRequest::Suspend(order) => return self.handle_suspend_order(reply_to, order),
            HostRequest::Inspect { tid } => return self.inspect_for_query(reply_to, tid),
            HostRequest::Verdict { facts } => return self.start_query_verdict(reply_to, facts),
            HostRequest::Inventory => {
                let contexts = self
                    .context_owners
                    .iter()
                    .map(|(ctx, owner)| (*ctx, *owner))
                    .collect();
                let mut tasks = self.list_tasks(None);
                tasks.extend(self.list_leftovers(None));
                return self.send_host_reply(reply_to, HostReply::Inventory { tasks, contexts });
            }
            HostRequest::ReserveContexts(contexts) => {
                self.reserve_contexts(contexts);
                Reply::Done
            }
            HostRequest::StoreCopy {
                migration,
                checkpoint,
            } => self.handle_copy_request(reply_to.host, migration, checkpoint),
            HostRequest::Clock => Reply::Clock(self.unix_time),
            HostRequest::Describe { with_tasks } => {
                return self.pending_reports.push(reply_to, with_tasks);
            }
            HostRequest::FreeContext { owner, ctx } => match self.context_owners.get(&ctx) {
                Some(current_owner) if *current_owner == owner => {
                    self.context_owners.remove(&ctx);
                    Reply::Done
                }
                _ => no_context_reply(ctx),
            },
        };
        self.send_host_reply(reply_to, HostReply::Reply(reply));
    }

    /// Answers whether the task `tid` has ended. If the requester is on another host, the exit
    /// notice of an ended task is sent again on the data channel: there it follows what the task
    /// and this daemon have sent for it, for example the end of its output. A reply would overtake
    /// that. The reply then states that the task has not ended, because its end is reported by the
    /// exit notice.
    fn serve_watch(&mut self, reply_to: ReplyAddress, tid: Tid, watcher: Tid) {
        let mut has_ended = !self.is_alive(tid);
        let positions = self.tasks.exit_positions(tid);
        if has_ended && reply_to.host != self.config.host {
            self.outputs.push_back(Output::SendData {
                host: reply_to.host,
                message: DataMsg::TaskEnded {
                    tid,
                    watermarks: positions.watermarks.clone(),
                    past: positions.past.clone(),
                },
            });
            has_ended = false;
        }
        let watermark = if has_ended {
            watermark_for(tid, &positions.watermarks, watcher)
        } else {
            None
        };
        self.send_host_reply(
            reply_to,
            HostReply::Watched {
                has_ended,
                watermark,
            },
        );
    }

    /// Returns the location of a task that is on another host; `None` if the task is on this host,
    /// or this host is its location.
    fn remote_location(&self, tid: Tid) -> Option<HostId> {
        if self.is_alive(tid) {
            return None;
        }
        self.location(tid).filter(|host| *host != self.config.host)
    }

    /// True if the task is on this host and has not ended. A task that has left the virtual machine
    /// counts as alive until its process exits.
    pub(super) fn is_alive(&self, tid: Tid) -> bool {
        self.tasks.get(tid).is_some()
            || self
                .migrations
                .arrivals
                .get(&tid)
                .is_some_and(|a| a.is_located)
    }

    pub(super) fn signal_task(&mut self, tid: Tid, signal: i32) {
        if self.signal_without_process(tid, signal) {
            return;
        }
        if let Some(task) = self.tasks.get(tid) {
            if task.is_spawned() {
                self.send_to_tasker(ToTasker::Signal { tid, signal });
            } else if let ConnectionPhase::Connected(conn) = task.connection_phase {
                self.outputs.push_back(Output::SendSignal { conn, signal });
            } else if task.connection_phase != ConnectionPhase::Left {
                self.log_warning(format!("{tid} has no process that this daemon knows; signal {signal} was not sent to it"));
            }
        } else if let Some(arrival) = self.migrations.arrivals.get_mut(&tid) {
            arrival.pending_signals.push(signal);
            self.advance_arrival(tid);
        }
    }

    /// Handles a reply: removes the request, and continues as the purpose of the request requires.
    /// If the task of the request has migrated, the request is sent to the task's host.
    pub(super) fn handle_host_reply(
        &mut self,
        replying_host: HostId,
        id: RequestId,
        host_reply: HostReply,
    ) {
        let Some(open_request) = self.take_open_request(replying_host, id) else {
            return;
        };
        match (host_reply, open_request.purpose) {
            (HostReply::MigratedTo(host), purpose) => self.send_host_request(
                host,
                open_request.request,
                purpose,
                open_request.hop_count + 1,
            ),
            (HostReply::Reply(reply), RpcPurpose::Task { tid, id }) => self.reply(tid, id, reply),
            (HostReply::Reply(Reply::Tasks(tasks)), RpcPurpose::TaskList(query)) => {
                self.add_to_task_list(query, tasks)
            }
            (
                HostReply::Inventory { tasks, contexts },
                RpcPurpose::Inventory {
                    inventory_number, ..
                },
            ) => {
                self.handle_inventory(inventory_number, Ok(Inventory::new(tasks, contexts)));
            }
            (HostReply::Reply(reply), RpcPurpose::StoreCopy { migration }) => {
                self.handle_copy_reply(migration, Some(reply))
            }
            (_, RpcPurpose::Ignored) => {}
            (
                HostReply::Reply(Reply::Spawned(results)),
                RpcPurpose::Spawn {
                    spawn_number,
                    part_number,
                },
            ) => {
                self.handle_part_spawned(spawn_number, part_number, Ok(results));
            }
            (
                HostReply::Watched {
                    has_ended,
                    watermark,
                },
                RpcPurpose::Watch { watcher },
            ) => {
                if let (true, HostRequest::Watch { tid, .. }) = (has_ended, &open_request.request) {
                    let past = self.tasks.exit_positions(*tid).past;
                    self.notify_watcher_of_exit(watcher, *tid, watermark, &past);
                }
            }
            (HostReply::Watched { has_ended, .. }, RpcPurpose::GroupMember { tid }) => {
                if has_ended {
                    self.remove_ended_member(tid);
                }
            }
            (HostReply::Inspected(result), RpcPurpose::Inspection(query)) => {
                self.handle_query_facts(query, replying_host, Some(result))
            }
            (
                HostReply::Verdict(verdict, engine),
                RpcPurpose::Verdict {
                    query_number: query,
                    host,
                },
            ) => {
                self.handle_query_verdict(query, host, Some((verdict, engine)));
            }
            (_, purpose) => {
                self.log_warning(format!(
                    "{replying_host} sent a reply that does not fit the request"
                ));
                self.fail_host_request(open_request.request, purpose);
            }
        }
    }

    /// Removes and returns the request of a reply. Returns `None` if there is no such request, or
    /// if the request was sent to another host; the request to the other host stays open.
    fn take_open_request(&mut self, replying_host: HostId, id: RequestId) -> Option<OpenRequest> {
        let receiving_host = self.rpcs.open_requests.get(&id)?.host;
        if receiving_host != replying_host {
            self.log_warning(format!(
                "{replying_host} replied to a request that was sent to {receiving_host}; \
                 the reply was dropped"
            ));
            return None;
        }
        self.rpcs.open_requests.remove(&id)
    }

    /// Completes a request that gets no valid reply, for example because its receiver is lost. The
    /// requester gets the result for a lost host.
    fn fail_host_request(&mut self, request: HostRequest, purpose: RpcPurpose) {
        match purpose {
            RpcPurpose::Task { tid, id } => {
                let reply = match request {
                    HostRequest::Tasks { .. } => Reply::Tasks(Vec::new()),
                    HostRequest::Signal { .. } | HostRequest::SignalAfter { .. } => Reply::Done,
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
            RpcPurpose::TaskList(query) => self.add_to_task_list(query, Vec::new()),
            RpcPurpose::Inventory {
                inventory_number,
                host,
            } => self.handle_inventory(inventory_number, Err(host)),
            RpcPurpose::StoreCopy { migration } => self.handle_copy_reply(migration, None),
            RpcPurpose::Ignored => {}
            RpcPurpose::Spawn {
                spawn_number,
                part_number,
            } => self.handle_part_spawned(spawn_number, part_number, Err(PvmError::HostFail)),
            RpcPurpose::GroupMember { tid } => self.remove_ended_member(tid),
            RpcPurpose::Inspection(query) => self.handle_query_facts(query, self.config.host, None),
            RpcPurpose::Verdict {
                query_number: query,
                host,
            } => self.handle_query_verdict(query, host, None),
            RpcPurpose::Watch { watcher } => {
                if let HostRequest::Watch { tid, .. } = request {
                    self.notify_watcher_of_exit(
                        watcher,
                        tid,
                        None::<SendWatermark>,
                        &Past::default(),
                    );
                }
            }
        }
    }

    /// Completes the requests to a lost host. While the host is in the table, requests that survive
    /// a broken session stay open: tasks of that host are reported as ended when the table changes,
    /// after the loss of the host itself.
    pub(super) fn fail_requests_to(&mut self, host: HostId) {
        let is_in_table = self.table.get(host).is_some();
        let lost_requests = |p: &OpenRequest| {
            p.host == host && !(is_in_table && p.purpose.survives_broken_session())
        };
        let lost_requests: Vec<RequestId> = self
            .rpcs
            .open_requests
            .iter()
            .filter(|(_, p)| lost_requests(p))
            .map(|(id, _)| *id)
            .collect();
        for id in lost_requests {
            if let Some(open_request) = self.rpcs.open_requests.remove(&id) {
                self.fail_host_request(open_request.request, open_request.purpose);
            }
        }
    }

    /// Called when a session was established. Resends the requests that survive a broken session.
    pub(super) fn resend_requests_to(&mut self, host: HostId) {
        let surviving_requests: Vec<(RequestId, HostRequest)> = self
            .rpcs
            .open_requests
            .iter()
            .filter(|(_, p)| p.host == host && p.purpose.survives_broken_session())
            .map(|(id, p)| (*id, p.request.clone()))
            .collect();
        for (id, request) in surviving_requests {
            self.send_to_host(host, HostMsg::HostRequest { id, request });
        }
    }
}

/// Returns the task that a request concerns; `None` if the request need not reach a task's host.
fn subject_task(request: &HostRequest) -> Option<Tid> {
    match request {
        HostRequest::Tasks { task: Some(tid) }
        | HostRequest::TaskStatus { tid }
        | HostRequest::Signal { tid, .. }
        | HostRequest::SignalAfter { tid, .. }
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
