//! Resource managers: registration, restart after a crash, and their messages to and from this
//! daemon.
//!
//! A daemon may know two resource managers: one that is registered with itself, and one that is
//! registered with the master and serves all hosts without a resource manager of their own. Without
//! any resource manager, the daemons place tasks themselves.

use super::hosts::AddRequester;
use super::io::{LogLevel, LogSubject};
use super::spawn::ExecRequester;
use super::tasks::{Task, watermark_for};
use super::{Machine, Output};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::causal::Past;
use sempa_proto::event::{EventKind, describe_status};
use sempa_proto::host::HostMsg;
use sempa_proto::migration::Usage;
use sempa_proto::sm::{
    SM_ADD, SM_ADDACK, SM_ALIVE, SM_EXEC, SM_EXECACK, SM_HANDOFF, SM_HOSTX, SM_STHOSTACK, SM_TASKX,
    TaskExit, pack_task_exit, pack_tids, unpack_exec,
};
use sempa_proto::table::{AddedHost, TASK_RM};
use sempa_proto::task::{
    Reply, RmInfo, RmServices, SPAWN_NO_PARENT, SPAWN_PINNED, SendWatermark, SpawnRequest, ToTask,
};
use sempa_proto::{HostId, Message, Micros, RequestId, Tid};
use std::collections::VecDeque;

/// Largest number of restarts of a crashed resource manager within [`RM_RESTART_WINDOW`].
const RM_RESTARTS_MAX: usize = 5;
const RM_RESTART_WINDOW: Micros = Micros::from_secs(60);

/// True if a wait status reports an unintended end: a panic, or a signal other than those that
/// request an exit.
fn has_crashed(status: i32) -> bool {
    const PANIC_STATUS: i32 = 101;
    const EXIT_REQUEST_SIGNALS: [i32; 3] = [1, 2, 15];
    match status & 0x7f {
        0 => (status >> 8) & 0xff == PANIC_STATUS,
        signal => !EXIT_REQUEST_SIGNALS.contains(&signal),
    }
}

/// True if a wait status reports an exit status other than 0.
fn has_failed(status: i32) -> bool {
    status & 0x7f == 0 && status >> 8 != 0
}

/// The resource managers that this daemon accepts.
#[derive(Debug, Default)]
pub(super) struct RmState {
    /// Times at which this daemon's resource manager was restarted after a crash.
    restart_times: VecDeque<Micros>,
    /// The resource manager that is registered with this daemon.
    own_rm: Option<RmInfo>,
    /// The resource manager that is registered with the master, if it serves this host when no
    /// resource manager is registered with this daemon. A resource manager that serves all
    /// requests, and not only spawns, serves only hosts that join after its registration, as in
    /// PVM.
    pub(super) vm_wide_rm: Option<RmInfo>,
    /// The resource manager that is registered with the master, even if it does not serve this
    /// host.
    master_rm: Option<RmInfo>,
    /// Time since which this daemon knows no resource manager; `None` while it knows one.
    absent_since: Option<Micros>,
}

impl RmState {
    /// Returns the resource manager that tasks of this host must ask.
    pub(super) fn current(&self) -> Option<RmInfo> {
        self.own_rm.or(self.vm_wide_rm)
    }

    /// Returns the time since which this daemon knows no resource manager; `None` while it knows
    /// one.
    pub(super) fn absent_since(&self) -> Option<Micros> {
        self.absent_since
    }

    /// Returns the resource manager that is registered with this daemon.
    pub(super) fn own(&self) -> Option<RmInfo> {
        self.own_rm
    }

    /// True if this task is the resource manager that is registered with this daemon.
    pub(super) fn is_own(&self, tid: Tid) -> bool {
        self.own_rm.is_some_and(|rm| rm.tid == tid)
    }

    fn is_accepted(&self, tid: Tid) -> bool {
        self.find(tid).is_some()
    }

    fn find(&self, tid: Tid) -> Option<RmInfo> {
        [self.own_rm, self.vm_wide_rm, self.master_rm]
            .into_iter()
            .flatten()
            .find(|rm| rm.tid == tid)
    }
}

impl Machine {
    /// Registers a task as the resource manager of this daemon, in place of any earlier one. The
    /// reply contains the tid of the previous resource manager.
    pub(super) fn register_rm(&mut self, tid: Tid, id: RequestId, services: RmServices) {
        let previous_rm = self.rm_state.current().map_or(Tid::NONE, |rm| rm.tid);
        self.reply(tid, id, Reply::Rm { previous_rm });
        self.record_event(EventKind::RmRegistered { tid });
        self.replace_own_rm(Some(RmInfo { tid, services }));
    }

    pub(super) fn replace_own_rm(&mut self, rm: Option<RmInfo>) {
        if let Some(old_rm) = self.rm_state.own_rm
            && let Some(task) = self.tasks.get_mut(old_rm.tid)
        {
            task.flags &= !TASK_RM;
        }
        if let Some(task) = rm.and_then(|rm| self.tasks.get_mut(rm.tid)) {
            task.flags |= TASK_RM;
        }
        self.rm_state.own_rm = rm;
        if self.master.is_some() {
            self.rm_state.vm_wide_rm = rm;
            for host in self.other_hosts() {
                self.send_to_host(host, HostMsg::Rm { rm });
            }
        }
        self.notify_tasks_of_rm(false);
        self.update_rm_absence();
    }

    fn update_rm_absence(&mut self) {
        let (has_rm, now) = (
            self.rm_state.current().is_some() || self.rm_state.master_rm.is_some(),
            self.now,
        );
        self.rm_state.absent_since = if has_rm {
            None
        } else {
            self.rm_state.absent_since.or(Some(now))
        };
        self.end_expired_preemptions();
    }

    /// Handles the master's notice of the resource manager that is registered with the master.
    pub(super) fn handle_master_rm(&mut self, rm: Option<RmInfo>) {
        let old_rm = self.rm_state.current();
        self.rm_state.master_rm = rm;
        if self.table.hosts.is_empty() || rm.is_none_or(|rm| !rm.services.vm_requests) {
            self.rm_state.vm_wide_rm = rm;
        }
        if self.rm_state.current() != old_rm {
            self.notify_tasks_of_rm(false);
        }
        self.update_rm_absence();
    }

    /// Notifies the connected tasks of a change of their resource manager. A death is always
    /// reported. A new resource manager is reported only if it serves only spawns. A new resource
    /// manager that serves all requests serves the tasks that connect from now on, as in PVM.
    fn notify_tasks_of_rm(&mut self, is_death: bool) {
        let rm = self.rm_state.current();
        if !is_death && rm.is_some_and(|rm| rm.services.vm_requests) {
            return;
        }
        let tasks: Vec<Tid> = self
            .tasks
            .live_tasks
            .keys()
            .copied()
            .filter(|tid| Some(*tid) != rm.map(|rm| rm.tid))
            .collect();
        for tid in tasks {
            if let Some(task) = self
                .tasks
                .get_mut(tid)
                .filter(|t| t.conn().is_some() || t.holds_items)
            {
                task.exit_rm = task.exit_rm.or(rm.map(|rm| rm.tid));
                self.deliver(tid, ToTask::RmChanged { rm });
            }
        }
    }

    /// Handles the end of a task that may have been a resource manager. Without a resource manager,
    /// the daemons place tasks themselves.
    pub(super) fn handle_rm_exit(&mut self, tid: Tid) {
        if !self.rm_state.is_accepted(tid) {
            return;
        }
        if self.rm_state.own_rm.is_some_and(|rm| rm.tid == tid) {
            self.record_event(EventKind::RmGone { tid });
        }
        self.rm_state.own_rm = self.rm_state.own_rm.filter(|rm| rm.tid != tid);
        self.rm_state.vm_wide_rm = self.rm_state.vm_wide_rm.filter(|rm| rm.tid != tid);
        self.rm_state.master_rm = self.rm_state.master_rm.filter(|rm| rm.tid != tid);
        for task in self.tasks.live_tasks.values_mut() {
            task.exit_rm = task.exit_rm.filter(|rm| *rm != tid);
        }
        self.notify_tasks_of_rm(true);
        self.update_rm_absence();
    }

    /// Handles the loss of a host on which a resource manager may have run.
    pub(super) fn handle_rm_host_lost(&mut self, host: HostId) {
        for rm in [self.rm_state.own_rm, self.rm_state.vm_wide_rm]
            .into_iter()
            .flatten()
        {
            if self.location(rm.tid) == Some(host) {
                self.handle_rm_exit(rm.tid);
            }
        }
    }

    /// Reports the end of a task to its resource manager, if the resource manager requested such
    /// reports. The report is delivered after the task's last message to the resource manager.
    pub(super) fn report_exit_to_rm(
        &mut self,
        task: &Task,
        watermarks: &[SendWatermark],
        status: i32,
        usage: Usage,
    ) {
        let requests_exit_reports = |rm: &Tid| {
            *rm != task.tid
                && self
                    .rm_state
                    .find(*rm)
                    .is_some_and(|rm| rm.services.task_exits)
        };
        let Some(rm) = task.exit_rm.filter(requests_exit_reports) else {
            return;
        };
        let body = pack_task_exit(&TaskExit {
            tid: task.tid,
            status,
            usage,
        });
        let message = self.build_daemon_message(rm, 0, SM_TASKX, 0, body);
        self.send_after_last_messages(message, task.tid, watermark_for(task.tid, watermarks, rm));
    }

    /// Reports to the resource manager that a task has joined without being spawned.
    pub(super) fn report_enrolled_task_to_rm(&mut self, tid: Tid) {
        if let Some(rm) = self.rm_state.current().filter(|rm| rm.tid != tid) {
            self.send_daemon_message(rm.tid, 0, SM_EXECACK, 0, pack_tids(&[Ok(tid)]));
        }
    }

    /// Reports the loss of a host to the master's resource manager.
    pub(super) fn report_lost_host_to_rm(&mut self, host: HostId) {
        if let (true, Some(rm)) = (self.master.is_some(), self.rm_state.vm_wide_rm) {
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_int(host.daemon_tid().raw());
            self.send_daemon_message(rm.tid, 0, SM_HOSTX, 0, body.finish());
        }
    }

    /// Handles a task's message to the address of a daemon. A message to this daemon is handled
    /// here; a message to another daemon is sent to that daemon's host.
    pub(super) fn forward_to_daemon(&mut self, message: Message) {
        let host = if message.dst == Tid::MY_DAEMON {
            Some(self.config.host)
        } else {
            super::requests::named_host(message.dst)
        };
        match host.filter(|_| message.dst.is_daemon()) {
            Some(host) if host == self.config.host => {
                let past = self.past_of_message(&message);
                self.handle_daemon_message(message, past);
            }
            Some(host) if self.table.get(host).is_some() => {
                let past = self.past_of_message(&message);
                self.send_to_host(host, HostMsg::Message { message, past });
            }
            _ => self.log_warning(format!(
                "{} sent a message to {}, which is not the address of a daemon; dropped",
                message.src, message.dst
            )),
        }
    }

    /// Returns the past with which tasks begin that this message starts.
    fn past_of_message(&self, message: &Message) -> Past {
        match message.tag {
            SM_EXEC => self.past_of(message.src),
            _ => Past::default(),
        }
    }

    /// Handles a message to this daemon. Only resource managers, taskers and hosters may send such
    /// a message.
    pub(super) fn handle_daemon_message(&mut self, message: Message, past: Past) {
        let Message {
            src,
            tag,
            wid,
            body,
            ..
        } = message;
        let server_result = match tag {
            SM_TASKX => Some(self.handle_task_end_report(src, body.clone())),
            SM_STHOSTACK => Some(self.handle_hoster_reply(src, wid, body.clone())),
            SM_ALIVE => {
                self.handle_alive(src);
                Some(Ok(()))
            }
            _ => None,
        };
        if let Some(decode_result) = server_result {
            return decode_result.unwrap_or_else(|error| {
                self.log_warning(format!(
                    "a message {tag:#x} of {src} cannot be read: {error}"
                ))
            });
        }
        if !matches!(tag, SM_EXEC | SM_ADD | SM_HANDOFF) {
            return self.log_warning(format!(
                "{src} sent a message with the unknown tag {tag:#x} to this daemon; dropped"
            ));
        }
        if !self.rm_state.is_accepted(src) {
            return self.log_warning(format!(
                "{src} is not the resource manager of this daemon; its message {tag:#x} was dropped"
            ));
        }
        let decode_result = match tag {
            SM_EXEC => unpack_exec(body).map(|(parent, mut request)| {
                request.past = past;
                self.queue_exec(parent, request, ExecRequester::Rm { rm: src, wid });
            }),
            SM_ADD => Unpacker::new_xdr(body)
                .read_strings()
                .map(|lines| self.add_hosts_for_rm(src, wid, &lines)),
            _ => Unpacker::new_xdr(body)
                .read_int()
                .map(|tid| self.hand_over_rm_role(src, Tid::from_raw(tid))),
        };
        if let Err(error) = decode_result {
            self.log_warning(format!(
                "a message {tag:#x} of resource manager {src} cannot be read: {error}"
            ));
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_int(error.code());
            match tag {
                SM_EXEC => self.send_daemon_message(src, 0, SM_EXECACK, wid, body.finish()),
                SM_ADD => self.send_daemon_message(src, 0, SM_ADDACK, wid, body.finish()),
                _ => {}
            }
        }
    }

    fn hand_over_rm_role(&mut self, old_rm: Tid, new_rm: Tid) {
        let services = self
            .rm_state
            .current()
            .map(|rm| rm.services)
            .unwrap_or_default();
        self.record_event(EventKind::RmGone { tid: old_rm });
        if new_rm.is_task() {
            self.record_event(EventKind::RmRegistered { tid: new_rm });
        }
        self.replace_own_rm(new_rm.is_task().then_some(RmInfo {
            tid: new_rm,
            services,
        }));
    }

    fn add_hosts_for_rm(&mut self, rm: Tid, wid: i32, lines: &[String]) {
        if self.master.is_none() {
            return self.log(format!(
                "{rm} requested to add hosts, which only the master can do; its message was dropped"
            ));
        }
        self.add_hosts(lines, AddRequester::Rm { rm, wid });
    }

    /// Reports to a resource manager which of its requested hosts were added.
    pub(super) fn reply_hosts_added_to_rm(&mut self, rm: Tid, wid: i32, added_hosts: &[AddedHost]) {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_int(added_hosts.len() as i32).pack_int(0);
        for host in added_hosts {
            match &host.result {
                Ok(e) => body
                    .pack_int(e.id.tid().raw())
                    .pack_str(e.name.as_bytes())
                    .pack_str(e.arch.as_bytes())
                    .pack_int(e.speed)
                    .pack_int(e.dsig),
                Err(error) => body
                    .pack_int(error.code())
                    .pack_str(b"")
                    .pack_str(b"")
                    .pack_int(0)
                    .pack_int(0),
            };
        }
        self.send_daemon_message(rm, 0, SM_ADDACK, wid, body.finish());
    }

    /// Starts the configured programs: taskers, tracers and hosters first, then the resource
    /// manager.
    pub(super) fn start_commands(&mut self) {
        let server_commands = std::mem::take(&mut self.config.server_commands);
        for words in server_commands
            .into_iter()
            .chain(self.config.rm_command.clone())
        {
            self.start_command(words);
        }
        if self.config.starts_watcher {
            self.start_first_watcher();
        }
    }

    /// Starts a program that serves this virtual machine.
    pub(super) fn start_command(&mut self, words: Vec<String>) {
        let mut words = words.into_iter();
        let Some(file) = words.next() else { return };
        let request = SpawnRequest {
            program: file,
            args: words.map(String::into_bytes).collect(),
            flags: SPAWN_NO_PARENT | SPAWN_PINNED,
            task_count: 1,
            ..SpawnRequest::default()
        };
        self.queue_exec(Tid::NONE, request, ExecRequester::Startup);
    }

    /// Handles the end of a task that may be the resource manager that this daemon has started. A
    /// crashed resource manager is restarted, unless it has crashed too often. After an intended
    /// exit it is not restarted.
    pub(super) fn handle_rm_command_end(&mut self, task: &Task, status: i32) {
        let command = self
            .config
            .rm_command
            .as_ref()
            .filter(|words| words.first() == Some(&task.name));
        let Some(words) = command.cloned() else {
            return;
        };
        if self.shutdown.is_some() || task.parent.is_task() || !task.pinned {
            return;
        }
        let (name, cause) = (&task.name, describe_status(status));
        if !has_crashed(status) {
            if has_failed(status) {
                self.log_warning_and_record(format!(
                    "{name} has ended ({cause}); this host's log tells why. It is not restarted: 'pvm spawn {name}' \
                     starts one; until then spawns are placed round robin"
                ));
            }
            return;
        }
        let now = self.now;
        self.rm_state
            .restart_times
            .retain(|restart_time| now.since(*restart_time) < RM_RESTART_WINDOW);
        if self.rm_state.restart_times.len() >= RM_RESTARTS_MAX {
            let text = format!(
                "{name} has died ({cause}) after {RM_RESTARTS_MAX} restarts within {} s; it is not restarted, and \
                 spawns are placed round robin: start one with 'pvm spawn {name}'",
                RM_RESTART_WINDOW.0 / 1_000_000
            );
            return self.log_warning_and_record(text);
        }
        self.log_warning_and_record(format!("{name} has died ({cause}); it is restarted"));
        self.rm_state.restart_times.push_back(now);
        self.start_command(words);
    }

    pub(super) fn log(&mut self, text: String) {
        self.log_line(LogLevel::Info, None, text);
    }

    /// Adds a warning to the daemon's log: a fault of another process, or a loss.
    pub(super) fn log_warning(&mut self, text: String) {
        self.log_line(LogLevel::Warning, None, text);
    }

    pub(super) fn log_line(&mut self, level: LogLevel, subject: Option<LogSubject>, text: String) {
        self.outputs.push_back(Output::Log {
            level,
            subject,
            text,
        });
    }

    /// Adds a text to the daemon's log and to the event log.
    pub(super) fn log_and_record(&mut self, text: String) {
        self.log(text.clone());
        self.record_event(EventKind::Note { text });
    }

    /// Adds a text to the daemon's log, as a warning, and to the event log.
    pub(super) fn log_warning_and_record(&mut self, text: String) {
        self.log_warning(text.clone());
        self.record_event(EventKind::Note { text });
    }
}
