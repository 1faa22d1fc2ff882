//! Dispatches the requests of tasks. Requests that only the master can serve are forwarded to the
//! master, which sends the reply directly to the task.

use super::rpc::RpcPurpose;
use super::{Machine, Output};
use sempa_proto::group::GroupRequest;
use sempa_proto::host::{HostMsg, HostRequest};
use sempa_proto::suspend::{SuspendCause, SuspendOrder};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{MailboxRequest, OPEN_REQUESTS_MAX, Reply, Request, Sink};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of contexts that the tasks of one host may have. A context number is the local
/// part of a tid; PVM itself uses the last 16 numbers on the first host.
pub(super) const CONTEXTS_MAX: u32 = Tid::LOCAL_PART_MAX - 16;
const SIGTERM: i32 = 15;

/// A list of tasks that this daemon collects from several hosts for a task.
#[derive(Debug)]
pub(super) struct ScatterGather {
    requester: Tid,
    request_id: RequestId,
    unanswered_hosts: usize,
    tasks: Vec<TaskInfo>,
}

#[derive(Debug, Default)]
pub(super) struct ScatterGathers {
    open_lists: BTreeMap<u64, ScatterGather>,
    last_list_number: u64,
}

impl Machine {
    /// Handles a request of a task of this host.
    // tidy: long because each kind of request has its line.
    pub(super) fn handle_request(&mut self, tid: Tid, id: RequestId, task_request: Request) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if task.open_requests.len() >= OPEN_REQUESTS_MAX {
            let reason = format!("{OPEN_REQUESTS_MAX} requests are waiting for replies already");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        task.open_requests.insert(id);
        if is_untimed(&task_request) {
            task.untimed_requests.insert(id);
        }
        match task_request {
            Request::Exit { watermarks } => self.handle_leave_request(tid, id, watermarks),
            Request::AnnounceExit => self.handle_about_to_exit(tid, id),
            Request::Config => self.reply(tid, id, Reply::Hosts(self.table.clone())),
            Request::Tasks { selector } => self.query_task_list(tid, id, selector),
            Request::Spawn(request) => self.spawn(tid, id, request, None),
            Request::SpawnLeased { request, lease } => self.spawn_leased(tid, id, request, lease),
            Request::HostStatus { name } => self.query_host_status(tid, id, &name),
            Request::TaskStatus { tid: other_tid } if !other_tid.is_task() => {
                self.fail_not_a_task(tid, id, other_tid)
            }
            Request::TaskStatus { tid: other_tid } => {
                self.call_host_of_task(
                    other_tid,
                    HostRequest::TaskStatus { tid: other_tid },
                    RpcPurpose::Task { tid, id },
                );
            }
            Request::Signal { tid: other_tid, .. } if !other_tid.is_task() => {
                self.fail_not_a_task(tid, id, other_tid)
            }
            Request::Signal {
                tid: other_tid,
                signal,
            } => {
                let marks = self.marks_before_signal(tid, other_tid, signal);
                let host_request = if marks.is_empty() {
                    HostRequest::Signal {
                        tid: other_tid,
                        signal,
                    }
                } else {
                    HostRequest::SignalAfter {
                        tid: other_tid,
                        signal,
                        marks,
                    }
                };
                self.call_host_of_task(other_tid, host_request, RpcPurpose::Task { tid, id });
            }
            Request::Suspend { tid: other_tid, .. } if !other_tid.is_task() => {
                self.fail_not_a_task(tid, id, other_tid)
            }
            Request::Suspend {
                tid: other_tid,
                suspend,
                cause,
            } => self.request_suspension((tid, id), other_tid, suspend, cause),
            Request::FindMigrationTargets {
                tid: migrating_task,
                target: target_name,
            } => self.start_placement_query(tid, id, migrating_task, target_name.as_deref()),
            Request::Notify(request) => self.handle_notify_request(tid, id, request),
            Request::RegisterRm(services) => self.register_rm(tid, id, services),
            Request::NewContext => self.allocate_context(tid, id),
            Request::FreeContext { ctx } => {
                let host = self.context_holder(ctx);
                self.call_host(
                    host,
                    HostRequest::FreeContext { owner: tid, ctx },
                    RpcPurpose::Task { tid, id },
                );
            }
            Request::HostSync { host } => self.query_host(tid, id, host, HostRequest::Clock),
            Request::DescribeHost { host, with_tasks } => {
                self.query_host(tid, id, host, HostRequest::Describe { with_tasks })
            }
            Request::SetOutput(sink) => self.set_output(tid, id, sink),
            Request::SetTrace(sink) => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.trace_sink = sink;
                }
                self.reply(tid, id, Reply::Done);
            }
            Request::DebugQuery(words) => self.answer_debug_query(tid, id, &words),
            Request::SetGuestDirective(directive) => {
                self.handle_guest_directive(tid, id, directive)
            }
            Request::Serve(service) => self.toggle_service(tid, id, service),
            Request::QueryFreezer => {
                self.reply(tid, id, Reply::Freezer(self.freezer_support.clone()))
            }
            Request::QueryEngine => self.reply(tid, id, Reply::Engine(self.engine.clone())),
            Request::KillLeftovers { tid: of } => self.handle_kill_leftovers(tid, id, of),
            task_request => self.forward_to_master(tid, id, task_request),
        }
    }

    fn query_host_status(&mut self, tid: Tid, id: RequestId, name: &str) {
        let host = if name == "." {
            Some(self.config.host)
        } else {
            self.table.find_by_name(name).map(|h| h.id)
        };
        match host {
            Some(host) => self.call_host(host, HostRequest::Ping, RpcPurpose::Task { tid, id }),
            None => self.reply_error(tid, id, PvmError::NoHost, no_host_message(name)),
        }
    }

    /// Sends a request to the host whose daemon has the tid `daemon_tid`.
    fn query_host(&mut self, tid: Tid, id: RequestId, daemon_tid: Tid, host_request: HostRequest) {
        let host = daemon_tid
            .birth_host()
            .filter(|host| self.table.get(*host).is_some());
        match host {
            Some(host) => self.call_host(host, host_request, RpcPurpose::Task { tid, id }),
            None => self.reply_error(
                tid,
                id,
                PvmError::NoHost,
                no_host_message(&daemon_tid.to_string()),
            ),
        }
    }

    /// Sends an order to suspend or resume the task `subject` to that task's host. Without a
    /// `cause`, the requesting task's user is the cause.
    fn request_suspension(
        &mut self,
        (tid, id): (Tid, RequestId),
        subject: Tid,
        must_suspend: bool,
        cause: Option<SuspendCause>,
    ) {
        let cause = cause
            .unwrap_or(SuspendCause::Requested { requested_by: tid })
            .with_truncated_reason();
        let order = SuspendOrder {
            tid: subject,
            suspend: must_suspend,
            cause,
        };
        self.call_host_of_task(
            subject,
            HostRequest::Suspend(order),
            RpcPurpose::Task { tid, id },
        );
    }

    /// Forwards a request to the master, which sends the reply directly to the requesting task.
    fn forward_to_master(&mut self, tid: Tid, id: RequestId, request: Request) {
        if self.master.is_some() {
            self.handle_master_request(tid, id, request);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::TaskRequest { tid, id, request });
        }
    }

    /// Handles a request that only the master can serve, from a task of any host.
    pub(super) fn handle_master_request(
        &mut self,
        tid: Tid,
        id: RequestId,
        master_request: Request,
    ) {
        match master_request {
            Request::AddHosts {
                host_file_lines: lines,
            } => self.add_hosts(&lines, super::hosts::AddRequester::Task { tid, id }),
            Request::DelHosts { host_names: names } => self.delete_hosts(tid, id, &names),
            Request::Mailbox(request) => self.handle_mailbox_request(tid, id, request),
            Request::Group(request) => self.handle_group_request(tid, id, request),
            Request::Checkpoint {
                job,
                schedule,
                end_job,
                wait_for_end: must_wait,
            } => self.handle_checkpoint_request((tid, id), job, schedule, end_job, must_wait),
            Request::ListCheckpoints => self.outputs.push_back(Output::ListCheckpoints { tid, id }),
            Request::Restart {
                checkpoint,
                host_names,
                wait_for_end: must_wait,
                force,
            } => self.handle_restart_request((tid, id), checkpoint, host_names, must_wait, force),
            Request::RemoveCheckpoints {
                selection,
                include_foreign,
            } => self.handle_removal_request(tid, id, selection, include_foreign),
            Request::Migrate {
                tid: task,
                target: target_name,
                cause,
                wait_for_end: must_wait,
            } => self.begin_migration(tid, id, task, &target_name, cause, must_wait),
            Request::Events {
                first_number,
                events_max: limit,
            } => {
                let events = self
                    .master
                    .as_ref()
                    .map(|m| m.events.entries_since(first_number, limit))
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
            Request::FindAwaitingRestart { tids } => {
                let awaiting_tids = self.find_awaiting_restart(tids);
                self.reply(tid, id, Reply::AwaitingRestart(awaiting_tids));
            }
            Request::Reset {
                kill_tasks: ends_tasks,
            } => self.reset_vm(tid, id, ends_tasks),
            Request::Halt => {
                self.reply(tid, id, Reply::Done);
                self.halt_vm(&format!("requested by {tid}"));
            }
            Request::HaltAndReport => self.halt_and_report(tid, id),
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
                let tasks_request = HostRequest::Tasks {
                    task: Some(selector),
                };
                return self.call_host_of_task(
                    selector,
                    tasks_request,
                    RpcPurpose::Task { tid, id },
                );
            }
            Some(host) => vec![host],
        };
        self.scatter_gathers.last_list_number += 1;
        let list_number = self.scatter_gathers.last_list_number;
        self.scatter_gathers.open_lists.insert(
            list_number,
            ScatterGather {
                requester: tid,
                request_id: id,
                unanswered_hosts: hosts.len(),
                tasks: Vec::new(),
            },
        );
        for host in hosts {
            self.call_host(
                host,
                HostRequest::Tasks { task: None },
                RpcPurpose::TaskList(list_number),
            );
        }
    }

    /// Adds the tasks of one host to a list. For a lost host, `tasks` is empty. When all hosts have
    /// answered, the requesting task gets the reply.
    pub(super) fn add_to_task_list(&mut self, list_number: u64, tasks: Vec<TaskInfo>) {
        let Some(task_list) = self.scatter_gathers.open_lists.get_mut(&list_number) else {
            return;
        };
        task_list.tasks.extend(tasks);
        task_list.unanswered_hosts -= 1;
        if task_list.unanswered_hosts > 0 {
            return;
        }
        let Some(ScatterGather {
            requester: tid,
            request_id: id,
            mut tasks,
            ..
        }) = self.scatter_gathers.open_lists.remove(&list_number)
        else {
            return;
        };
        // During a migration both hosts may list the task. The entry that is not marked as
        // migrating is kept.
        tasks.sort_by_key(|t| (t.tid, t.migrating));
        tasks.dedup_by_key(|t| t.tid);
        tasks.sort_by_key(|t| (t.host, t.tid));
        self.reply(tid, id, Reply::Tasks(tasks));
    }

    fn allocate_context(&mut self, tid: Tid, id: RequestId) {
        if self.context_owners.len() as u32 >= CONTEXTS_MAX {
            return self.reply_error(
                tid,
                id,
                PvmError::OutOfRes,
                "all contexts of this host are in use",
            );
        }
        let host_bits = self.config.host.tid().raw();
        if self.last_context == 0 && self.tasks.has_reserved_ids() {
            // Each virtual machine starts at a different number, because a restarted job may bring
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
            let ctx = host_bits | self.last_context as i32;
            if let std::collections::btree_map::Entry::Vacant(vacant_entry) =
                self.context_owners.entry(ctx)
            {
                vacant_entry.insert(tid);
                return self.reply(tid, id, Reply::Context(ctx));
            }
        }
    }

    /// Returns the host that knows the owner of a context: the host that allocated the context, or
    /// the master if that host is not in the table. The master knows the owners of contexts that a
    /// restarted job has brought from another virtual machine.
    pub(super) fn context_holder(&self, ctx: i32) -> HostId {
        Tid::from_raw(ctx)
            .birth_host()
            .filter(|host| self.table.get(*host).is_some())
            .unwrap_or(HostId::MASTER)
    }

    /// Assigns contexts again to tasks that are restarted from a checkpoint.
    pub(super) fn reserve_contexts(&mut self, contexts: Vec<(i32, Tid)>) {
        for (ctx, owner) in contexts {
            if (self.context_owners.len() as u32) < CONTEXTS_MAX {
                self.context_owners.entry(ctx).or_insert(owner);
            }
        }
    }

    /// Changes the destination of a task's own output. The old collector gets the end mark, the new
    /// collector the marks of a new task.
    fn set_output(&mut self, tid: Tid, id: RequestId, sink: Sink) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let old_sink = std::mem::replace(&mut task.output_sink, sink);
        let parent = task.parent;
        if old_sink != sink {
            self.report_output_ended(tid, None, old_sink);
            self.report_output_requested(tid, parent, sink);
            self.report_output_started(tid, parent, sink);
        }
        self.reply(tid, id, Reply::Done);
    }

    fn fail_not_a_task(&mut self, tid: Tid, id: RequestId, other_tid: Tid) {
        self.reply_error(
            tid,
            id,
            PvmError::BadParam,
            format!("{other_tid} is not the id of a task"),
        );
    }

    /// Resets the virtual machine (master only): removes mailbox entries without an owner. If
    /// `ends_tasks` is true, also ends all tasks except the caller, the resource manager, pinned
    /// tasks and tasks that have registered as exempt from a reset.
    fn reset_vm(&mut self, tid: Tid, id: RequestId, ends_tasks: bool) {
        let Some(master) = &mut self.master else {
            return;
        };
        let mut survivors = master.mailbox.owners(sempa_proto::sm::NO_RESET_CLASS);
        survivors.push(tid);
        survivors.extend(self.rm_state.current().map(|rm| rm.tid));
        master
            .mailbox
            .remove_for_reset(if ends_tasks { Some(&survivors) } else { None });
        if ends_tasks {
            master.checkpoints.record_reset(&survivors);
            for host in self.other_hosts() {
                self.send_to_host(
                    host,
                    HostMsg::EndTasks {
                        exempt_tasks: survivors.clone(),
                    },
                );
            }
            self.end_tasks(&survivors);
        }
        self.reply(tid, id, Reply::Done);
    }

    /// Requests the spawned tasks of this host to exit, except pinned tasks and those in
    /// `survivors`.
    pub(super) fn end_tasks(&mut self, survivors: &[Tid]) {
        let exiting_tasks: Vec<Tid> = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| t.is_spawned() && !t.pinned && !survivors.contains(&t.tid))
            .map(|t| t.tid)
            .collect();
        for tid in exiting_tasks {
            if !self.signal_without_process(tid, SIGTERM) {
                self.send_to_tasker(ToTasker::Signal {
                    tid,
                    signal: SIGTERM,
                });
            }
        }
    }

    pub(super) fn send_to_tasker(&mut self, message: ToTasker) {
        self.owner_control.stopped_tasks.track_order(&message);
        self.outputs.push_back(Output::SendToTasker(message));
    }
}

/// True for a request whose reply depends on other tasks and has no time limit. Such a request can
/// be repeated after a restart.
fn is_untimed(request: &Request) -> bool {
    match request {
        Request::Group(GroupRequest::Barrier { .. } | GroupRequest::Freeze { .. }) => true,
        Request::Mailbox(MailboxRequest::Take { flags, .. }) => super::mailbox::may_wait(*flags),
        _ => false,
    }
}

/// Returns the host to which a host tid or a daemon's address refers; `None` for any other tid.
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
