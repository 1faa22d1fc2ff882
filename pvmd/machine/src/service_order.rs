//! Keeps requests to services in causal order with messages: what a task learns from a service is
//! later than the messages that others had sent before they used the service.
//!
//! A task tells its daemon its clock, and which messages in its past are in transit
//! ([`ToDaemon::Past`]), before it uses a service. The daemon passes this on:
//!
//! - to the master, which tells it to every task that uses the same group or class of the mailbox
//!   later,
//! - to the tasks that the task spawns,
//! - to the tasks that are notified of its end,
//! - to the daemon of a task to which it sends a signal. That daemon asks the library of the task
//!   whether the messages have arrived, before it sends the signal.
//!
//! The master keeps the newest list of each task, so a reply may name more messages than necessary.
//!
//! [`ToDaemon::Past`]: sempa_proto::task::ToDaemon::Past

use super::rpc::ReplyAddress;
use super::{Machine, Timer};
use sempa_proto::Micros;
use sempa_proto::causal::{MARKS_MAX, Mark, MarkKey, Past, STAMP_MAX};
use sempa_proto::group::GroupRequest;
use sempa_proto::host::{HostMsg, HostReply};
use sempa_proto::task::{MailboxRequest, Reply, SendWatermark, ToTask};
use sempa_proto::{HostId, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Largest number of ended tasks whose marks the master remembers.
const ENDED_TASKS_MAX: usize = 1024;
/// Largest number of signals that wait for messages. Above it, signals are sent at once.
const WAITING_SIGNALS_MAX: usize = 4096;
/// Time after which a signal is sent although messages that precede it have not arrived.
const SIGNAL_TIMEOUT: Micros = Micros::from_millis(500);
/// Signals that end, stop or continue a process. They do not wait for messages: SIGHUP, SIGINT,
/// SIGQUIT, SIGKILL, SIGTERM, SIGCONT, SIGSTOP, SIGTSTP.
const IMMEDIATE_SIGNALS: [i32; 8] = [1, 2, 3, 9, 15, 18, 19, 20];

/// A group, or a class of the mailbox: what one task does with it is seen by others that use it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ServiceObject {
    Group(Vec<u8>),
    MailboxClass(String),
}

impl ServiceObject {
    /// Returns the group of a request; `None` if the request concerns all groups.
    pub(super) fn of_group_request(request: &GroupRequest) -> Option<Self> {
        match request {
            GroupRequest::Join { group }
            | GroupRequest::Leave { group }
            | GroupRequest::Barrier { group, .. }
            | GroupRequest::Freeze { group, .. }
            | GroupRequest::Instance { group, .. }
            | GroupRequest::Member { group, .. }
            | GroupRequest::Size { group }
            | GroupRequest::Members { group } => Some(Self::Group(group.clone())),
            GroupRequest::LeaveAll | GroupRequest::List => None,
        }
    }

    /// Returns the class of a request; `None` if the request concerns all classes.
    pub(super) fn of_mailbox_request(request: &MailboxRequest) -> Option<Self> {
        match request {
            MailboxRequest::Put { name, .. }
            | MailboxRequest::Take { name, .. }
            | MailboxRequest::Delete { name, .. } => Some(Self::MailboxClass(name.clone())),
            MailboxRequest::Clean { .. } | MailboxRequest::List { .. } => None,
        }
    }
}

/// The past of the tasks that have used the group service or the mailbox; kept by the master.
#[derive(Debug, Default)]
pub(super) struct ServicePasts {
    /// Largest clock of a task that has used a service.
    clock: u64,
    /// Marks of the tasks that have any, as each has told last.
    marks_by_task: BTreeMap<Tid, Vec<Mark>>,
    /// The tasks of `marks_by_task` that have used each object.
    users: BTreeMap<ServiceObject, BTreeSet<Tid>>,
    /// The object of each request that is not answered yet.
    open_requests: BTreeMap<(Tid, RequestId), ServiceObject>,
    ended_tasks: VecDeque<Tid>,
}

impl ServicePasts {
    /// Replaces the marks of a task.
    fn record(&mut self, tid: Tid, mut marks: Vec<Mark>) {
        marks.truncate(MARKS_MAX);
        if marks.is_empty() {
            self.forget_marks(tid);
        } else {
            self.marks_by_task.insert(tid, marks);
        }
    }

    fn forget_marks(&mut self, tid: Tid) {
        if self.marks_by_task.remove(&tid).is_some() {
            self.users.retain(|_, tasks| {
                tasks.remove(&tid);
                !tasks.is_empty()
            });
        }
    }

    /// Records that a task uses an object with this request.
    fn begin_use(&mut self, tid: Tid, id: RequestId, object: ServiceObject) {
        if self.marks_by_task.contains_key(&tid) {
            self.users.entry(object.clone()).or_default().insert(tid);
        }
        self.open_requests.insert((tid, id), object);
    }

    /// Returns the past of the reply to a request.
    fn end_use(&mut self, tid: Tid, id: RequestId) -> Past {
        let object = self.open_requests.remove(&(tid, id));
        let users = object.and_then(|object| self.users.get(&object));
        let other_users = users.into_iter().flatten().filter(|user| **user != tid);
        let lists = other_users.filter_map(|user| self.marks_by_task.get(user));
        let mut marks: BTreeMap<MarkKey, Mark> = BTreeMap::new();
        for mark in lists.flatten().filter(|mark| mark.sender != tid) {
            let known_mark = marks.entry(mark.key()).or_insert(*mark);
            if mark.covers(known_mark) {
                *known_mark = *mark;
            }
        }
        Past {
            clock: self.clock,
            marks: marks.into_values().take(MARKS_MAX).collect(),
        }
    }

    /// Drops the marks of messages to a task that has ended. Its own marks are kept for a while:
    /// other tasks may learn from a service what it did last.
    pub(super) fn handle_task_end(&mut self, tid: Tid) {
        self.open_requests.retain(|(task, _), _| *task != tid);
        for marks in self.marks_by_task.values_mut() {
            marks.retain(|mark| mark.receiver != tid);
        }
        let is_settled = |(task, marks): (&Tid, &Vec<Mark>)| marks.is_empty().then_some(*task);
        let settled_tasks: Vec<Tid> = self.marks_by_task.iter().filter_map(is_settled).collect();
        for task in settled_tasks {
            self.forget_marks(task);
        }
        if self.marks_by_task.contains_key(&tid) {
            self.ended_tasks.push_back(tid);
            if self.ended_tasks.len() > ENDED_TASKS_MAX
                && let Some(oldest_task) = self.ended_tasks.pop_front()
            {
                self.forget_marks(oldest_task);
            }
        }
    }
}

/// A signal that waits until messages have arrived at its task.
#[derive(Debug)]
struct WaitingSignal {
    tid: Tid,
    signal: i32,
    reply_to: ReplyAddress,
}

/// Signals that wait until messages have arrived.
#[derive(Debug, Default)]
pub(super) struct WaitingSignals {
    signals: BTreeMap<u64, WaitingSignal>,
    last_number: u64,
}

impl Machine {
    /// Records the past that a task of this host has told.
    pub(super) fn record_task_past(&mut self, tid: Tid, clock: u64, marks: Option<Vec<Mark>>) {
        if let Some(task) = self.tasks.get_mut(tid) {
            task.past.clock = clock.min(STAMP_MAX).max(task.past.clock);
            if let Some(marks) = &marks {
                task.past.marks = marks.iter().take(MARKS_MAX).copied().collect();
            }
        }
        if self.master.is_some() {
            self.record_service_past(tid, clock, marks);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::TaskPast { tid, clock, marks });
        }
    }

    /// Master: records the past of a task of any host.
    pub(super) fn record_service_past(&mut self, tid: Tid, clock: u64, marks: Option<Vec<Mark>>) {
        if let Some(master) = &mut self.master {
            let pasts = &mut master.service_pasts;
            pasts.clock = pasts.clock.max(clock.min(STAMP_MAX));
            if let Some(marks) = marks {
                pasts.record(tid, marks);
            }
        }
    }

    /// Returns the past that a task of this host has told.
    pub(super) fn past_of(&self, tid: Tid) -> Past {
        self.tasks
            .get(tid)
            .map(|task| task.past.clone())
            .unwrap_or_default()
    }

    /// Master: records that a task uses an object of a service with this request.
    pub(super) fn begin_service_use(
        &mut self,
        tid: Tid,
        id: RequestId,
        object: Option<ServiceObject>,
    ) {
        if let (Some(master), Some(object)) = (&mut self.master, object) {
            master.service_pasts.begin_use(tid, id, object);
        }
    }

    /// Master: sends a reply of the group service or the mailbox, behind the past of its object.
    pub(super) fn reply_in_order(
        &mut self,
        tid: Tid,
        id: RequestId,
        result: Result<Reply, (PvmError, String)>,
    ) {
        if let Some(master) = &mut self.master {
            let past = master.service_pasts.end_use(tid, id);
            self.tell_past(tid, past);
        }
        match result {
            Ok(reply) => self.reply(tid, id, reply),
            Err((error, reason)) => self.reply_error(tid, id, error, reason),
        }
    }

    /// Tells a task the past of what it receives next.
    fn tell_past(&mut self, tid: Tid, past: Past) {
        self.deliver(tid, ToTask::Past(past));
    }

    /// Tells a task the past of a task that has ended.
    pub(super) fn tell_past_of_ended(&mut self, tid: Tid, past: &Past) {
        let other_marks = past.marks.iter().filter(|mark| mark.sender != tid);
        let past = Past {
            clock: past.clock,
            marks: other_marks.copied().collect(),
        };
        self.tell_past(tid, past);
    }

    /// Returns the marks of a task that ends: those that it has told, and the messages that this
    /// daemon has carried for it and that have not been acknowledged.
    pub(super) fn marks_at_end(
        &self,
        task: &super::tasks::Task,
        watermarks: &[SendWatermark],
    ) -> Vec<Mark> {
        let unacknowledged = watermarks.iter().filter(|watermark| {
            let acked = task.acked_positions.get(&watermark.peer);
            acked.is_none_or(|acked| *acked < watermark.end_seq)
        });
        let carried_marks = unacknowledged.map(|watermark| Mark {
            receiver: watermark.peer,
            sender: task.tid,
            incarnation: task.link_incarnation,
            sender_incarnation: task.link_incarnation,
            end_seq: watermark.end_seq,
            stamp: STAMP_MAX,
        });
        let told_marks = task
            .past
            .marks
            .iter()
            .filter(|mark| mark.sender != task.tid);
        told_marks
            .copied()
            .chain(carried_marks)
            .take(MARKS_MAX)
            .collect()
    }

    // ---- signals

    /// Returns the marks that a signal of the task `sender` to the task `tid` must follow.
    pub(super) fn marks_before_signal(&self, sender: Tid, tid: Tid, signal: i32) -> Vec<Mark> {
        if IMMEDIATE_SIGNALS.contains(&signal) {
            return Vec::new();
        }
        let mut marks = self.past_of(sender).marks;
        marks.retain(|mark| mark.may_concern(tid));
        marks
    }

    /// Asks the library of the task whether the messages have arrived; then sends the signal.
    pub(super) fn signal_after_messages(
        &mut self,
        reply_to: ReplyAddress,
        tid: Tid,
        signal: i32,
        marks: Vec<Mark>,
    ) {
        let is_connected = self
            .tasks
            .get(tid)
            .is_some_and(|task| task.conn().is_some());
        if !is_connected || self.waiting_signals.signals.len() >= WAITING_SIGNALS_MAX {
            self.signal_task(tid, signal);
            return self.send_host_reply(reply_to, HostReply::Reply(Reply::Done));
        }
        self.waiting_signals.last_number += 1;
        let wait_number = self.waiting_signals.last_number;
        self.waiting_signals.signals.insert(
            wait_number,
            WaitingSignal {
                tid,
                signal,
                reply_to,
            },
        );
        self.deliver(tid, ToTask::AwaitMarks { wait_number, marks });
        self.set_timer(SIGNAL_TIMEOUT, Timer::WaitingSignal(wait_number));
    }

    /// Sends a signal whose messages have arrived, or that has waited long enough.
    pub(super) fn send_waiting_signal(&mut self, wait_number: u64) {
        let Some(waiting) = self.waiting_signals.signals.remove(&wait_number) else {
            return;
        };
        self.signal_task(waiting.tid, waiting.signal);
        self.send_host_reply(waiting.reply_to, HostReply::Reply(Reply::Done));
    }
}
