//! Keeps requests to services in causal order with messages: what a task learns from a service is
//! later than the messages that others had sent before they used the service.
//!
//! A task tells its daemon its clock, and which messages in its past are in transit
//! ([`ToDaemon::Past`]), before it uses a service. The daemon passes this on:
//!
//! - to the master, which tells it to every task that uses the group service or the mailbox,
//! - to the tasks that the task spawns,
//! - to the tasks that are notified of its end,
//! - to the daemon of a task to which it sends a signal. That daemon asks the library of the task
//!   whether the messages have arrived, before it sends the signal.
//!
//! The master keeps one list for each task, not for each group, so a reply may name more messages
//! than necessary.
//!
//! [`ToDaemon::Past`]: sempa_proto::task::ToDaemon::Past

use super::rpc::ReplyAddress;
use super::{Machine, Timer};
use sempa_proto::Micros;
use sempa_proto::causal::{MARKS_MAX, Mark, STAMP_MAX};
use sempa_proto::host::{HostMsg, HostReply};
use sempa_proto::task::{Reply, SendWatermark, ToTask};
use sempa_proto::{HostId, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Largest number of ended tasks whose marks the master remembers.
const ENDED_TASKS_MAX: usize = 1024;
/// Largest number of signals that wait for messages. Above it, signals are sent at once.
const WAITING_SIGNALS_MAX: usize = 4096;
/// Time after which a signal is sent although messages that precede it have not arrived.
const SIGNAL_TIMEOUT: Micros = Micros::from_millis(500);
/// Signals that end, stop or continue a process. They do not wait for messages: SIGHUP, SIGINT,
/// SIGQUIT, SIGKILL, SIGTERM, SIGCONT, SIGSTOP, SIGTSTP.
const IMMEDIATE_SIGNALS: [i32; 8] = [1, 2, 3, 9, 15, 18, 19, 20];

/// Marks of the tasks that have used the group service or the mailbox; kept by the master.
#[derive(Debug, Default)]
pub(super) struct ServiceMarks {
    /// Largest clock of a task that has used a service.
    clock: u64,
    marks_by_task: BTreeMap<Tid, Vec<Mark>>,
    ended_tasks: VecDeque<Tid>,
    /// Marks of the last list that each task was told.
    told_marks: BTreeMap<Tid, Vec<Mark>>,
}

impl ServiceMarks {
    /// Replaces the marks of a task.
    fn record(&mut self, tid: Tid, mut marks: Vec<Mark>) {
        marks.truncate(MARKS_MAX);
        if marks.is_empty() {
            self.marks_by_task.remove(&tid);
        } else {
            self.marks_by_task.insert(tid, marks);
        }
    }

    /// Returns the list that must precede a reply to this task; `None` if the task knows it.
    fn list_for(&mut self, tid: Tid) -> Option<Vec<Mark>> {
        if self.marks_by_task.is_empty() && !self.told_marks.contains_key(&tid) {
            return None;
        }
        let mut list: BTreeMap<(Tid, Tid), Mark> = BTreeMap::new();
        let other_lists = self.marks_by_task.iter().filter(|(task, _)| **task != tid);
        for mark in other_lists.flat_map(|(_, marks)| marks) {
            if mark.sender != tid {
                let known_mark = list.entry((mark.receiver, mark.sender)).or_insert(*mark);
                if mark.covers(known_mark) {
                    *known_mark = *mark;
                }
            }
        }
        let list: Vec<Mark> = list.into_values().take(MARKS_MAX).collect();
        if self.told_marks.get(&tid).map_or(&[][..], Vec::as_slice) == list {
            return None;
        }
        if list.is_empty() {
            self.told_marks.remove(&tid);
        } else {
            self.told_marks.insert(tid, list.clone());
        }
        Some(list)
    }

    /// Drops the marks of messages to a task that has ended. Its own marks are kept for a while:
    /// other tasks may learn from a service what it did last.
    pub(super) fn handle_task_end(&mut self, tid: Tid) {
        self.told_marks.remove(&tid);
        self.marks_by_task.retain(|_, marks| {
            marks.retain(|mark| mark.receiver != tid);
            !marks.is_empty()
        });
        if self.marks_by_task.contains_key(&tid) {
            self.ended_tasks.push_back(tid);
            if self.ended_tasks.len() > ENDED_TASKS_MAX
                && let Some(oldest_task) = self.ended_tasks.pop_front()
            {
                self.marks_by_task.remove(&oldest_task);
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
            task.past.0 = clock.min(STAMP_MAX);
            if let Some(marks) = &marks {
                task.past.1 = marks.iter().take(MARKS_MAX).copied().collect();
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
            let service_marks = &mut master.service_marks;
            service_marks.clock = service_marks.clock.max(clock.min(STAMP_MAX));
            if let Some(marks) = marks {
                service_marks.record(tid, marks);
            }
        }
    }

    /// Returns the past that a task of this host has told.
    pub(super) fn past_of(&self, tid: Tid) -> (u64, Vec<Mark>) {
        self.tasks
            .get(tid)
            .map(|task| task.past.clone())
            .unwrap_or_default()
    }

    /// Master: sends the reply of a service that orders events, behind the past of the service.
    pub(super) fn reply_in_order(&mut self, tid: Tid, id: RequestId, reply: Reply) {
        if let Some(master) = &mut self.master {
            let past = ToTask::Past {
                teller: Some(HostId::MASTER.daemon_tid()),
                clock: master.service_marks.clock,
                marks: master.service_marks.list_for(tid),
            };
            self.deliver(tid, past);
        }
        self.reply(tid, id, reply);
    }

    /// Tells a task the past of a task that has ended.
    pub(super) fn tell_past_of_ended(&mut self, tid: Tid, (clock, marks): &(u64, Vec<Mark>)) {
        let other_marks = marks.iter().filter(|mark| mark.sender != tid);
        let past = ToTask::Past {
            teller: None,
            clock: *clock,
            marks: Some(other_marks.copied().collect()),
        };
        self.deliver(tid, past);
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
            end_seq: watermark.end_seq,
        });
        let told_marks = task.past.1.iter().filter(|mark| mark.sender != task.tid);
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
        let (_, mut marks) = self.past_of(sender);
        marks.retain(|mark| mark.receiver == tid);
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
