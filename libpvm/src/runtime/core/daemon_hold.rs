//! Holds back what the daemon sends until earlier messages of other tasks have arrived.
//!
//! A reply of a service that orders events, or a notification, follows messages that other tasks
//! had sent before. The daemon names these messages in front of it ([`ToTask::Past`]).
//!
//! [`ToTask::Past`]: sempa_proto::task::ToTask::Past

use super::Core;
use sempa_proto::causal::{Mark, OrderMessage, Past};
use sempa_proto::frame::encode_control;
use sempa_proto::task::{Reply, Request, SendWatermark, ToDaemon};
use sempa_proto::{HostId, Message, Micros, RequestId, Tid};
use std::collections::VecDeque;

/// Something from the daemon that is later than the messages that the daemon has named.
#[derive(Debug)]
pub(super) enum DaemonItem {
    Reply(RequestId, Reply),
    Delivery(Message, Option<SendWatermark>),
    Past(Past),
}

/// Items that are held back.
///
/// The daemon limits the number of items: replies by the number of open requests, notifications by
/// the number of requested ones.
#[derive(Debug, Default)]
pub(super) struct DaemonHold {
    items: VecDeque<DaemonItem>,
    /// True if the daemon was told the task's marks since the connection was established.
    daemon_knows_marks: bool,
    /// True while items are released. Handling an item may release more; the depth stays bounded.
    is_releasing: bool,
}

impl DaemonHold {
    /// True if nothing is held back.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.items.is_empty()
    }
}

/// True if the request reaches a service that orders events, or starts, signals or ends a task.
fn orders_events(request: &Request) -> bool {
    matches!(
        request,
        Request::Group(_)
            | Request::Mailbox(_)
            | Request::Spawn(_)
            | Request::SpawnLeased { .. }
            | Request::Signal { .. }
            | Request::Exit { .. }
    )
}

/// Stands for the services of the master, which keep one list of marks.
fn service_tid() -> Tid {
    HostId::MASTER.daemon_tid()
}

impl Core {
    /// Tells the daemon the past of a request, if the request needs it.
    pub(super) fn tell_past_of(&mut self, request: &Request) {
        if orders_events(request) {
            self.tell_past();
        }
    }

    /// Tells the daemon this task's past, and the marks if they have changed.
    pub(super) fn tell_past(&mut self) {
        let knows_marks = std::mem::replace(&mut self.daemon_hold.daemon_knows_marks, true);
        let list = if knows_marks {
            self.order.list_for(service_tid())
        } else {
            Some(self.order.whole_list_for(service_tid()))
        };
        let marks = match list {
            Some(OrderMessage::Marks { marks, .. }) => Some(marks),
            _ => None,
        };
        self.tell_daemon_past(marks);
    }

    /// Tells the daemon a list that replaces the previous one. Returns false if `peer` is not the
    /// daemon.
    pub(super) fn tell_if_daemon(&mut self, peer: Tid, list: &OrderMessage) -> bool {
        match list {
            OrderMessage::Marks { marks, .. } if peer == service_tid() => {
                self.tell_daemon_past(Some(marks.clone()));
                true
            }
            _ => false,
        }
    }

    fn tell_daemon_past(&mut self, marks: Option<Vec<Mark>>) {
        let clock = self.order.clock();
        if let Ok(frame) = encode_control(&ToDaemon::Past { clock, marks }) {
            // A list that cannot be queued is told again with the next connection.
            let _ = self.push_control(frame);
        }
    }

    /// The next daemon does not know the marks that the previous one was told.
    pub(super) fn forget_marks_of_daemon(&mut self) {
        self.daemon_hold.daemon_knows_marks = false;
    }

    /// Handles an item of the daemon, or holds it back.
    pub(super) fn accept_daemon_item(&mut self, now: Micros, item: DaemonItem) {
        if !self.daemon_hold.items.is_empty() || self.order.is_past_awaited() {
            self.daemon_hold.items.push_back(item);
            return;
        }
        self.handle_daemon_item(now, item);
    }

    fn handle_daemon_item(&mut self, now: Micros, item: DaemonItem) {
        match item {
            DaemonItem::Reply(id, reply) => {
                if let Some(open_request) = self.open_requests.get_mut(&id) {
                    open_request.reply = Some(reply);
                    self.event_seq += 1;
                }
            }
            DaemonItem::Delivery(message, watermark) => {
                self.handle_delivery(now, message, watermark);
            }
            DaemonItem::Past(past) => {
                self.order.accept_past(past);
                self.complete_arrivals(now);
            }
        }
    }

    /// Handles the daemon's question whether these messages have arrived.
    pub(super) fn handle_marks_question(
        &mut self,
        now: Micros,
        wait_number: u64,
        marks: Vec<Mark>,
    ) {
        self.order.await_marks(wait_number, marks);
        self.complete_arrivals(now);
    }

    /// Handles the items for which nothing is awaited any more.
    pub(super) fn release_daemon_items(&mut self, now: Micros) {
        while let Some(wait_number) = self.order.next_arrived_wait() {
            if let Ok(frame) = encode_control(&ToDaemon::MarksArrived { wait_number }) {
                // The daemon does not wait for ever.
                let _ = self.push_control(frame);
            }
        }
        if self.daemon_hold.is_releasing {
            return;
        }
        self.daemon_hold.is_releasing = true;
        while !self.order.is_past_awaited()
            && let Some(item) = self.daemon_hold.items.pop_front()
        {
            self.handle_daemon_item(now, item);
        }
        self.daemon_hold.is_releasing = false;
    }

    /// Handles all items, because nothing else can arrive.
    pub(super) fn release_all_daemon_items(&mut self) {
        for item in std::mem::take(&mut self.daemon_hold.items) {
            if let DaemonItem::Reply(..) | DaemonItem::Delivery(..) = item {
                self.handle_daemon_item(Micros(0), item);
            }
        }
    }
}
