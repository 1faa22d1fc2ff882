//! The event log of the virtual machine, kept by the master.
//!
//! Entries are kept as they travel, thousands in one piece of memory: as values each would hold its texts for hours between the
//! messages and images that come and go, and so keep pages from the kernel that are free but for a few bytes.

use super::Machine;
use bytes::Bytes;
use sempa_proto::event::{EVENTS_MAX, Event, EventKind};
use sempa_proto::frame::{FRAME_BYTES_MAX, from_bytes, to_bytes};
use sempa_proto::host::HostMsg;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{HostId, Message, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Tasks that get every new event, at most.
pub(super) const SUBSCRIBERS_MAX: usize = 1024;
/// Events in one reply at most.
const EVENTS_PER_REPLY_MAX: u32 = 8192;
/// Bytes of all that is kept at most, so that each reply fits a frame; the oldest entries go first.
const EVENTS_BYTES_MAX: usize = FRAME_BYTES_MAX / 2;
/// Bytes of one entry at most. A spawn of as many tasks as there may be has a fifth of that.
const EVENT_BYTES_MAX: usize = 1 << 20;
/// Entries that are kept and thrown away together have so many bytes at most, if it is not a single one.
const BLOCK_BYTES: usize = 64 << 10;
/// There is room for so many from the beginning.
const BLOCK_ENTRIES: usize = 512;

/// Entries one after the other.
#[derive(Debug)]
struct Block {
    /// The number of the first.
    first: u64,
    bytes: Vec<u8>,
    /// Where each ends.
    ends: Vec<usize>,
}

impl Block {
    fn new(first: u64) -> Block {
        Block {
            first,
            bytes: Vec::with_capacity(BLOCK_BYTES),
            ends: Vec::with_capacity(BLOCK_ENTRIES),
        }
    }

    fn push(&mut self, entry: &[u8]) {
        self.bytes.extend_from_slice(entry);
        self.ends.push(self.bytes.len());
    }

    fn entry(&self, number: u64) -> Option<&[u8]> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let begin = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(begin..*self.ends.get(at)?)
    }
}

/// The log and those who follow it.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    kept: VecDeque<Block>,
    bytes: usize,
    last: u64,
    subscribers: BTreeMap<Tid, (i32, i32)>,
}

impl EventLog {
    /// Entries from a number on, oldest first.
    pub(super) fn since(&self, from: u64, limit: u32) -> Vec<Event> {
        let from = from.max(self.oldest());
        let numbers = from..=self
            .last
            .min(from.saturating_add(u64::from(limit.min(EVENTS_PER_REPLY_MAX))) - 1);
        let event = |packed| from_bytes(packed).expect("it was packed here");
        numbers
            .filter_map(|number| self.packed(number))
            .map(event)
            .collect()
    }

    /// The number of the oldest entry.
    fn oldest(&self) -> u64 {
        let first = self.kept.front().map_or(1, |block| block.first);
        first.max((self.last + 1).saturating_sub(EVENTS_MAX as u64))
    }

    /// An entry as it travels.
    fn packed(&self, number: u64) -> Option<&[u8]> {
        let block = self
            .kept
            .partition_point(|block| block.first <= number)
            .checked_sub(1)?;
        self.kept[block]
            .entry(number)
            .filter(|_| number >= self.oldest())
    }

    /// The task gets nothing more.
    pub(super) fn unsubscribe(&mut self, tid: Tid) {
        self.subscribers.remove(&tid);
    }

    /// Tasks that get every new event.
    pub(super) fn followers(&self) -> Vec<Tid> {
        self.subscribers.keys().copied().collect()
    }

    /// The number that the entry has got, and how it travels.
    fn append(
        &mut self,
        host: HostId,
        at: Micros,
        kind: EventKind,
    ) -> Result<(u64, Bytes), String> {
        let number = self.last + 1;
        let packed = to_bytes(&Event {
            number,
            at,
            host,
            kind,
        })
        .map_err(|why| why.to_string())?;
        if packed.len() > EVENT_BYTES_MAX {
            return Err(format!(
                "it has {} bytes, {EVENT_BYTES_MAX} at most",
                packed.len()
            ));
        }
        if self
            .kept
            .back()
            .is_none_or(|block| block.bytes.len() + packed.len() > BLOCK_BYTES)
        {
            self.kept.push_back(Block::new(number));
        }
        self.kept.back_mut().expect("there is one").push(&packed);
        self.bytes += packed.len();
        self.last = number;
        self.throw_away();
        Ok((number, packed.into()))
    }

    /// Blocks of which nothing is kept any more.
    fn throw_away(&mut self) {
        let oldest = self.oldest();
        while self
            .kept
            .get(1)
            .is_some_and(|next| next.first <= oldest || self.bytes > EVENTS_BYTES_MAX)
        {
            let gone = self.kept.pop_front().expect("there are two");
            self.bytes -= gone.bytes.len();
        }
    }
}

impl Machine {
    /// Something happened on this host.
    pub(super) fn record(&mut self, kind: EventKind) {
        self.catch_up();
        self.record_at(self.unix, kind);
    }

    /// Something happened on this host at this time of day; nothing that happened later is in the log.
    pub(super) fn record_at(&mut self, at: Micros, kind: EventKind) {
        let me = self.config.host;
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
        match kind {
            EventKind::DrainBegun { host, .. } => self.write_before_drain(host),
            EventKind::TaskerGone { host, .. } if by_itself => self.jobs_lost_tasker(host),
            _ => {}
        }
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        master.keeping.happened(now, host, &kind, by_itself);
        let news = super::news::is_news(&kind);
        let (number, body) = match master.events.append(host, at, kind) {
            Ok(entry) => entry,
            Err(why) => {
                return self.log(format!(
                    "an entry for the event log from host {host} is left out: {why}"
                ));
            }
        };
        for dst in master.events.followers() {
            if news && self.hears_later(dst) {
                self.event_later(dst, number);
            } else if let Some(item) = self.to_follower(dst, body.clone()) {
                self.deliver(dst, item);
            }
        }
    }

    /// An entry of the log for one who follows it; `None` if the log has it no more, or nobody does.
    pub(super) fn told_event(&self, dst: Tid, number: u64) -> Option<ToTask> {
        let packed = self.master.as_ref()?.events.packed(number)?;
        self.to_follower(dst, Bytes::copy_from_slice(packed))
    }

    fn to_follower(&self, dst: Tid, body: Bytes) -> Option<ToTask> {
        let (ctx, tag) = *self.master.as_ref()?.events.subscribers.get(&dst)?;
        let message = Message {
            src: self.source_for(dst),
            dst,
            ctx,
            tag,
            wid: 0,
            enc: DSIG_X86_64,
            body,
        };
        Some(ToTask::Deliver {
            message,
            after: None,
        })
    }

    /// Master: this task wants every new event.
    pub(super) fn subscribe(&mut self, tid: Tid, id: RequestId, ctx: i32, tag: i32) {
        let Some(master) = &mut self.master else {
            return;
        };
        let subscribers = &mut master.events.subscribers;
        if subscribers.len() >= SUBSCRIBERS_MAX && !subscribers.contains_key(&tid) {
            let reason = format!("{SUBSCRIBERS_MAX} tasks follow the event log already");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        subscribers.insert(tid, (ctx, tag));
        self.reply(tid, id, Reply::Done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> EventKind {
        EventKind::Note {
            text: text.to_string(),
        }
    }

    fn numbers(log: &EventLog, from: u64, limit: u32) -> Vec<u64> {
        log.since(from, limit)
            .iter()
            .map(|event| event.number)
            .collect()
    }

    #[test]
    fn the_log_gives_back_what_was_told_and_the_oldest_entries_go_first() {
        let mut log = EventLog::default();
        assert!(log.since(0, 10).is_empty() && log.since(u64::MAX, u32::MAX).is_empty());
        let all = EVENTS_MAX as u64 + 10_000;
        for number in 1..=all {
            let at = Micros::from_secs(number);
            let (given, body) = log
                .append(HostId::MASTER, at, said(&number.to_string()))
                .expect("it is short");
            assert_eq!((given, log.packed(number)), (number, Some(&body[..])));
        }
        let oldest = all - EVENTS_MAX as u64 + 1;
        assert_eq!(numbers(&log, 0, 2), [oldest, oldest + 1]);
        assert_eq!(numbers(&log, all - 1, 10), [all - 1, all]);
        assert!(numbers(&log, all + 1, 10).is_empty() && numbers(&log, oldest, 0).is_empty());
        assert_eq!(log.since(0, u32::MAX).len(), EVENTS_PER_REPLY_MAX as usize);
        for event in log.since(oldest + 700, 3000) {
            let (number, at, kind) = (event.number, event.at, event.kind);
            assert_eq!(
                (at, kind),
                (Micros::from_secs(number), said(&number.to_string()))
            );
        }
        assert_eq!(
            (log.packed(oldest - 1), log.packed(all + 1), log.packed(0)),
            (None, None, None)
        );
        let kept: usize = log.kept.iter().map(|block| block.ends.len()).sum();
        let of_oldest = log.kept[0].ends.len();
        assert!(
            (EVENTS_MAX..EVENTS_MAX + of_oldest).contains(&kept),
            "{kept} entries are kept"
        );
    }

    #[test]
    fn long_entries_are_kept_up_to_so_many_bytes_and_one_that_is_too_long_is_refused_and_has_no_number()
     {
        let mut log = EventLog::default();
        let (long, too_long) = (
            "x".repeat(EVENT_BYTES_MAX - 100),
            "x".repeat(EVENT_BYTES_MAX + 1),
        );
        let fit = (EVENTS_BYTES_MAX / long.len()) as u64;
        for number in 1..=fit + 20 {
            let given = log
                .append(HostId::MASTER, Micros(0), said(&long))
                .map(|(given, _)| given);
            assert_eq!(given, Ok(number));
            assert!(
                log.append(HostId::MASTER, Micros(0), said(&too_long))
                    .is_err()
            );
        }
        let kept = numbers(&log, 0, u32::MAX);
        assert!(log.bytes <= EVENTS_BYTES_MAX, "{} bytes", log.bytes);
        assert!(
            kept.len() as u64 >= fit - 1 && kept.last() == Some(&(fit + 20)),
            "{kept:?}"
        );
        assert!(
            to_bytes(&log.since(0, u32::MAX)).is_ok(),
            "all that is kept fits a frame"
        );
    }
}
