//! Dispatches the requests of tasks. Requests that only the master can serve are forwarded to the
//! master, which sends the reply directly to the task.

use super::rpc::RpcPurpose;
use super::{Machine, Output};
use sempa_proto::group::GroupRequest;
use sempa_proto::host::{HostMsg, HostRequest};
use sempa_proto::suspend::{SuspendCause, SuspendOrder};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{MailboxRequest, REQUESTS_OPEN_MAX, Reply, Request, Sink};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of contexts that the tasks of one host may have. A context number is the local
/// part of a tid; PVM itself uses the last 16 on the first host.
pub(super) const CONTEXTS_MAX: u32 = Tid::LOCAL_MAX - 16;
const SIGTERM: i32 = 15;

/// A list of tasks that is collected from several hosts.
#[derive(Debug)]
pub(super) struct ScatterGather {
    tid: Tid,
    id: RequestId,
    unanswered_count: usize,
    tasks: Vec<TaskInfo>,
}

#[derive(Debug, Default)]
pub(super) struct ScatterGathers {
    pending: BTreeMap<u64, ScatterGather>,
    last_number: u64,
}

impl Machine {
    /// Handles a request of a task of this host.
    pub(super) fn handle_request(&mut self, tid: Tid, id: RequestId, what: Request) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if task.requests.len() >= REQUESTS_OPEN_MAX {
            let reason = format!("{REQUESTS_OPEN_MAX} requests are waiting for replies already");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        task.requests.insert(id);
        if is_untimed(&what) {
            task.untimed_requests.insert(id);
        }
        match what {
            Request::Exit { watermarks } => self.leave_vm(tid, id, watermarks),
            Request::AboutToExit => self.handle_about_to_exit(tid, id),
            Request::Config => self.reply(tid, id, Reply::Hosts(self.table.clone())),
            Request::Tasks { selector } => self.query_task_list(tid, id, selector),
            Request::Spawn(request) => self.spawn(tid, id, request, None),
            Request::SpawnLeased { request, lease } => self.spawn_leased(tid, id, request, lease),
            Request::HostStatus { name } => self.query_host_status(tid, id, &name),
            Request::TaskStatus { tid: other } if !other.is_task() => {
                self.fail_not_a_task(tid, id, other)
            }
            Request::TaskStatus { tid: other } => {
                self.call_host_of_task(
                    other,
                    HostRequest::TaskStatus { tid: other },
                    RpcPurpose::Task { tid, id },
                );
            }
            Request::Signal { tid: other, .. } if !other.is_task() => {
                self.fail_not_a_task(tid, id, other)
            }
            Request::Signal { tid: other, signal } => {
                self.call_host_of_task(
                    other,
                    HostRequest::Signal { tid: other, signal },
                    RpcPurpose::Task { tid, id },
                );
            }
            Request::Suspend { tid: other, .. } if !other.is_task() => {
                self.fail_not_a_task(tid, id, other)
            }
            Request::Suspend {
                tid: other,
                suspend,
                cause,
            } => self.request_suspension((tid, id), other, suspend, cause),
            Request::FindMigrationTargets { tid: of, to } => {
                self.start_placement_query(tid, id, of, to.as_deref())
            }
            Request::Notify(request) => self.notify_request(tid, id, request),
            Request::RegisterRm(serves) => self.register_rm(tid, id, serves),
            Request::NewContext => self.allocate_context(tid, id),
            Request::FreeContext { ctx } => {
                let host = self.context_holder(ctx);
                self.call_host(
                    host,
                    HostRequest::FreeContext { owner: tid, ctx },
                    RpcPurpose::Task { tid, id },
                );
            }
            Request::HostSync { host } => self.query_host_clock(tid, id, host),
            Request::SetOutput(sink) => self.set_output(tid, id, sink),
            Request::SetTrace(sink) => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.trace = sink;
                }
                self.reply(tid, id, Reply::Done);
            }
            Request::DebugQuery(words) => self.debug_query(tid, id, &words),
            Request::SetGuestDirective(word) => self.handle_guest_directive(tid, id, word),
            Request::Serve(service) => self.toggle_service(tid, id, service),
            Request::Freezer => self.reply(tid, id, Reply::Freezer(self.freezer_support.clone())),
            what => self.forward_to_master(tid, id, what),
        }
    }

    fn query_host_status(&mut self, tid: Tid, id: RequestId, name: &str) {
        let host = if name == "." {
            Some(self.config.host)
        } else {
            self.table.by_name(name).map(|h| h.id)
        };
        match host {
            Some(host) => self.call_host(host, HostRequest::Ping, RpcPurpose::Task { tid, id }),
            None => self.reply_error(tid, id, PvmError::NoHost, no_host_message(name)),
        }
    }

    /// Queries the clock of the host of a daemon's tid.
    fn query_host_clock(&mut self, tid: Tid, id: RequestId, daemon: Tid) {
        let host = daemon
            .birth_host()
            .filter(|host| self.table.get(*host).is_some());
        match host {
            Some(host) => self.call_host(host, HostRequest::Clock, RpcPurpose::Task { tid, id }),
            None => self.reply_error(
                tid,
                id,
                PvmError::NoHost,
                no_host_message(&daemon.to_string()),
            ),
        }
    }

    /// Sends a request to suspend or resume `subject` to the host of that task.
    fn request_suspension(
        &mut self,
        (tid, id): (Tid, RequestId),
        subject: Tid,
        suspend: bool,
        cause: Option<SuspendCause>,
    ) {
        let cause = cause
            .unwrap_or(SuspendCause::Requested { requested_by: tid })
            .truncated();
        let order = SuspendOrder {
            tid: subject,
            suspend,
            cause,
        };
        self.call_host_of_task(
            subject,
            HostRequest::Suspend(order),
            RpcPurpose::Task { tid, id },
        );
    }

    /// Forwards a request to the master, which sends the reply directly to the task.
    fn forward_to_master(&mut self, tid: Tid, id: RequestId, request: Request) {
        if self.master.is_some() {
            self.handle_master_request(tid, id, request);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::TaskRequest { tid, id, request });
        }
    }

    /// Handles a request that only the master can serve, from a task of any host.
    pub(super) fn handle_master_request(&mut self, tid: Tid, id: RequestId, what: Request) {
        match what {
            Request::AddHosts { lines } => {
                self.add_hosts(&lines, super::hosts::AddRequester::Task { tid, id })
            }
            Request::DelHosts { names } => self.delete_hosts(tid, id, &names),
            Request::Mailbox(request) => self.mailbox_request(tid, id, request),
            Request::Group(request) => self.group_request(tid, id, request),
            Request::Checkpoint {
                job,
                schedule: pace,
                end_job: end,
                wait,
            } => self.handle_checkpoint_request((tid, id), job, pace, end, wait),
            Request::ListCheckpoints => self.outputs.push_back(Output::ListCheckpoints { tid, id }),
            Request::Restart {
                checkpoint: set,
                host_names: on,
                wait,
            } => self.handle_restart_request((tid, id), set, on, wait),
            Request::RemoveCheckpoints {
                selection: which,
                include_foreign,
            } => self.handle_removal_request(tid, id, which, include_foreign),
            Request::Migrate {
                tid: task,
                to,
                cause,
                wait,
            } => self.begin_migration(tid, id, task, &to, cause, wait),
            Request::Events {
                first_number: from,
                limit,
            } => {
                let events = self
                    .master
                    .as_ref()
                    .map(|m| m.events.entries_since(from, limit))
                    .unwrap_or_default();
                self.reply(tid, id, Reply::Events(events));
            }
            Request::Subscribe { ctx, tag } => self.subscribe(tid, id, ctx, tag),
            Request::RecordEvent { at, kind } => {
                let host = self.location(tid).unwrap_or(HostId::MASTER);
                self.append_event(host, at, kind);
                self.reply(tid, id, Reply::Done);
            }
            Request::ServeTracer(settings) => self.toggle_tracer(tid, id, settings),
            Request::Reset { kill } => self.reset_vm(tid, id, kill),
            Request::Halt => {
                self.reply(tid, id, Reply::Done);
                self.halt(&format!("requested by {tid}"));
            }
            _ => self.reply_error(
                tid,
                id,
                PvmError::NotImpl,
                "the master does not serve this request",
            ),
        }
    }

    fn query_task_list(&mut self, tid: Tid, id: RequestId, selector: Tid) {
        let hosts: Vec<HostId> = match self
            .location(selector)
            .filter(|host| self.table.get(*host).is_some())
        {
            None if selector == Tid::NONE => self.table.hosts.iter().map(|h| h.id).collect(),
            None => {
                return self.reply_error(
                    tid,
                    id,
                    PvmError::NoHost,
                    no_host_message(&selector.to_string()),
                );
            }
            Some(_) if selector.local_part() != 0 => {
                let question = HostRequest::Tasks {
                    task: Some(selector),
                };
                return self.call_host_of_task(selector, question, RpcPurpose::Task { tid, id });
            }
            Some(host) => vec![host],
        };
        self.scatter_gathers.last_number += 1;
        let gather = self.scatter_gathers.last_number;
        self.scatter_gathers.pending.insert(
            gather,
            ScatterGather {
                tid,
                id,
                unanswered_count: hosts.len(),
                tasks: Vec::new(),
            },
        );
        for host in hosts {
            self.call_host(
                host,
                HostRequest::Tasks { task: None },
                RpcPurpose::ScatterGather(gather),
            );
        }
    }

    /// Adds the tasks of one host to a list; an empty list for a lost host. When all hosts have
    /// answered, the requesting task gets the reply.
    pub(super) fn add_to_task_list(&mut self, query: u64, tasks: Vec<TaskInfo>) {
        let Some(gather) = self.scatter_gathers.pending.get_mut(&query) else {
            return;
        };
        gather.tasks.extend(tasks);
        gather.unanswered_count -= 1;
        if gather.unanswered_count > 0 {
            return;
        }
        let Some(ScatterGather {
            tid, id, mut tasks, ..
        }) = self.scatter_gathers.pending.remove(&query)
        else {
            return;
        };
        // During a migration both ends may list the task. The entry that is not migrating is kept.
        tasks.sort_by_key(|t| (t.tid, t.migrating));
        tasks.dedup_by_key(|t| t.tid);
        tasks.sort_by_key(|t| (t.host, t.tid));
        self.reply(tid, id, Reply::Tasks(tasks));
    }

    fn allocate_context(&mut self, tid: Tid, id: RequestId) {
        if self.contexts.len() as u32 >= CONTEXTS_MAX {
            return self.reply_error(
                tid,
                id,
                PvmError::OutOfRes,
                "all contexts of this host are in use",
            );
        }
        let base = self.config.host.tid().raw();
        if self.last_context == 0 && self.tasks.has_reserved_ids() {
            // Each virtual machine starts at another number, because a restarted job may bring
            // contexts from the virtual machine of its checkpoint.
            self.last_context =
                (self.unix_time.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % CONTEXTS_MAX;
        }
        loop {
            self.last_context = if self.last_context >= CONTEXTS_MAX {
                1
            } else {
                self.last_context + 1
            };
            let ctx = base | self.last_context as i32;
            if let std::collections::btree_map::Entry::Vacant(free) = self.contexts.entry(ctx) {
                free.insert(tid);
                return self.reply(tid, id, Reply::Context(ctx));
            }
        }
    }

    /// Returns the host that knows the owner of a context: the host that allocated it, or the
    /// master if that host is not in the table. The latter applies to contexts that a restarted job
    /// has brought from another virtual machine.
    pub(super) fn context_holder(&self, ctx: i32) -> HostId {
        Tid::from_raw(ctx)
            .birth_host()
            .filter(|host| self.table.get(*host).is_some())
            .unwrap_or(HostId::MASTER)
    }

    /// Assigns contexts again to tasks that are restarted from a checkpoint.
    pub(super) fn reserve_contexts(&mut self, contexts: Vec<(i32, Tid)>) {
        for (ctx, owner) in contexts {
            if (self.contexts.len() as u32) < CONTEXTS_MAX {
                self.contexts.entry(ctx).or_insert(owner);
            }
        }
    }

    /// Changes the destination of a task's own output. The old collector gets the end mark, the new
    /// one the marks of a new task.
    fn set_output(&mut self, tid: Tid, id: RequestId, sink: Sink) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let old = std::mem::replace(&mut task.output, sink);
        let parent = task.parent;
        if old != sink {
            self.report_output_ended(tid, old);
            self.report_output_requested(tid, parent, sink);
            self.report_output_started(tid, parent, sink);
        }
        self.reply(tid, id, Reply::Done);
    }

    fn fail_not_a_task(&mut self, tid: Tid, id: RequestId, other: Tid) {
        self.reply_error(
            tid,
            id,
            PvmError::BadParam,
            format!("{other} is not the id of a task"),
        );
    }

    /// Resets the virtual machine (master only): ends all tasks except the caller, the resource
    /// manager, pinned tasks and tasks that requested exemption.
    fn reset_vm(&mut self, tid: Tid, id: RequestId, kill: bool) {
        let Some(master) = &mut self.master else {
            return;
        };
        let mut survivors = master.mailbox.owners(sempa_proto::sm::NO_RESET_CLASS);
        survivors.push(tid);
        survivors.extend(self.rm.current().map(|rm| rm.tid));
        master
            .mailbox
            .reset(if kill { Some(&survivors) } else { None });
        if kill {
            master.checkpoints.record_reset(&survivors);
            for host in self.other_hosts() {
                self.send_to_host(
                    host,
                    HostMsg::EndTasks {
                        except: survivors.clone(),
                    },
                );
            }
            self.end_tasks(&survivors);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// Requests the spawned tasks of this host to exit, except pinned ones and those in
    /// `survivors`.
    pub(super) fn end_tasks(&mut self, survivors: &[Tid]) {
        let ending: Vec<Tid> = self
            .tasks
            .live
            .values()
            .filter(|t| t.is_spawned() && !t.pinned && !survivors.contains(&t.tid))
            .map(|t| t.tid)
            .collect();
        for tid in ending {
            if !self.signal_without_process(tid, SIGTERM) {
                self.send_to_tasker(ToTasker::Signal {
                    tid,
                    signal: SIGTERM,
                });
            }
        }
    }

    pub(super) fn send_to_tasker(&mut self, message: ToTasker) {
        self.outputs.push_back(Output::ToTasker(message));
    }
}

/// True for a request that is answered only when other tasks have acted, without a time limit. Such
/// a request can be repeated after a restart.
fn is_untimed(request: &Request) -> bool {
    match request {
        Request::Group(GroupRequest::Barrier { .. } | GroupRequest::Freeze { .. }) => true,
        Request::Mailbox(MailboxRequest::Take { flags, .. }) => super::mailbox::may_wait(*flags),
        _ => false,
    }
}

/// Returns the host that a host tid or a daemon's address names.
pub(super) fn named_host(tid: Tid) -> Option<HostId> {
    if tid.local_part() == 0 {
        tid.birth_host()
    } else {
        None
    }
}

fn no_host_message(name: &str) -> String {
    format!("there is no host {name} in the virtual machine; `pvm conf` lists them")
}
