//! The event log of the virtual machine, kept by the master.

use super::Machine;
use bytes::Bytes;
use sempa_proto::event::{EVENTS_MAX, Event, EventKind};
use sempa_proto::host::HostMsg;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{HostId, Message, Micros, PvmError, RequestId, Tid, frame};
use std::collections::{BTreeMap, VecDeque};

/// Tasks that get every new event, at most.
pub(super) const SUBSCRIBERS_MAX: usize = 1024;
/// Events in one reply at most, so that it fits a frame.
const EVENTS_PER_REPLY_MAX: u32 = 8192;

/// The log and those who follow it.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    kept: VecDeque<Event>,
    last: u64,
    subscribers: BTreeMap<Tid, (i32, i32)>,
}

impl EventLog {
    /// Entries from a number on, oldest first.
    pub(super) fn since(&self, from: u64, limit: u32) -> Vec<Event> {
        let first = self.kept.front().map_or(1, |e| e.number);
        let skip = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        self.kept.iter().skip(skip).take(limit.min(EVENTS_PER_REPLY_MAX) as usize).cloned().collect()
    }

    /// The task gets nothing more.
    pub(super) fn unsubscribe(&mut self, tid: Tid) {
        self.subscribers.remove(&tid);
    }

    /// Tasks that get every new event.
    pub(super) fn followers(&self) -> Vec<Tid> {
        self.subscribers.keys().copied().collect()
    }

    fn append(&mut self, host: HostId, at: Micros, kind: EventKind) -> Event {
        self.last += 1;
        let event = Event { number: self.last, at, host, kind };
        if self.kept.len() >= EVENTS_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(event.clone());
        event
    }
}

fn pack(event: &Event) -> Result<Bytes, String> {
    let bytes = frame::to_bytes(event);
    bytes.map(Bytes::from).map_err(|why| format!("event {} could not be sent: {why}", event.number))
}

impl Machine {
    /// Something happened on this host.
    pub(super) fn record(&mut self, kind: EventKind) {
        let (me, at) = (self.config.host, self.unix);
        if self.master.is_some() {
            self.append_event(me, at, kind);
        } else {
            self.tell_host(HostId::MASTER, HostMsg::Event { at, kind });
        }
    }

    /// Master: adds an entry and tells those who follow.
    pub(super) fn append_event(&mut self, host: HostId, at: Micros, kind: EventKind) {
        // Tasks of a host that leaves end with it, as all do in the end.
        let by_itself = self.stop.is_none() && !self.is_leaving(host);
        if let EventKind::DrainBegun { host, .. } = kind {
            self.write_before_drain(host);
        }
        let now = self.now;
        let Some(master) = &mut self.master else { return };
        master.keeping.happened(now, host, &kind, by_itself);
        let news = super::news::is_news(&kind);
        let event = master.events.append(host, at, kind);
        let followers = master.events.followers();
        let mut body = None;
        for dst in followers {
            if news && self.hears_later(dst) {
                self.event_later(dst, event.number);
                continue;
            }
            let body = match body.get_or_insert_with(|| pack(&event)) {
                Ok(body) => body.clone(),
                Err(why) => return self.log(why.clone()),
            };
            if let Some(item) = self.to_follower(dst, body) {
                self.deliver(dst, item);
            }
        }
    }

    /// An entry of the log for one who follows it; `None` if the log has it no more, or nobody does.
    pub(super) fn told_event(&mut self, dst: Tid, number: u64) -> Option<ToTask> {
        let event = self.master.as_ref()?.events.since(number, 1).pop().filter(|event| event.number == number)?;
        match pack(&event) {
            Ok(body) => self.to_follower(dst, body),
            Err(why) => {
                self.log(why);
                None
            }
        }
    }

    fn to_follower(&self, dst: Tid, body: Bytes) -> Option<ToTask> {
        let (ctx, tag) = *self.master.as_ref()?.events.subscribers.get(&dst)?;
        let message = Message { src: self.source_for(dst), dst, ctx, tag, wid: 0, enc: DSIG_X86_64, body };
        Some(ToTask::Deliver { message, after: None })
    }

    /// Master: this task wants every new event.
    pub(super) fn subscribe(&mut self, tid: Tid, id: RequestId, ctx: i32, tag: i32) {
        let Some(master) = &mut self.master else { return };
        let subscribers = &mut master.events.subscribers;
        if subscribers.len() >= SUBSCRIBERS_MAX && !subscribers.contains_key(&tid) {
            let reason = format!("{SUBSCRIBERS_MAX} tasks follow the event log already");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        subscribers.insert(tid, (ctx, tag));
        self.reply(tid, id, Reply::Done);
    }
}
