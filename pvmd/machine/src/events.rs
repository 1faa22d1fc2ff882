//! The event log of the virtual machine, kept by the master.
//!
//! Entries are stored in wire format, many in one block of memory. If each entry were a separate
//! value, its strings would stay for hours between short-lived messages and images, and nearly
//! empty pages could not be returned to the kernel.

use super::Machine;
use super::io::{LogLevel, LogSubject};
use bytes::Bytes;
use sempa_proto::event::{EVENTS_MAX, Event, EventKind};
use sempa_proto::frame::{FRAME_BYTES_MAX, FrameError, from_bytes, to_bytes};
use sempa_proto::host::HostMsg;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{HostId, Message, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, VecDeque};
use thiserror::Error;

/// Largest number of tasks that receive every new event.
pub(super) const SUBSCRIBERS_MAX: usize = 1024;
/// Largest number of events in one reply.
const EVENTS_PER_REPLY_MAX: u32 = 8192;
/// Largest size of the whole log, so that every reply fits into a frame. The oldest entries are
/// dropped first.
const EVENTS_BYTES_MAX: usize = FRAME_BYTES_MAX / 2;
/// Largest size of one entry. The entry of the largest possible spawn takes a fifth of this.
const EVENT_BYTES_MAX: usize = 1 << 20;
/// Size of the blocks in which entries are stored and dropped. A larger entry has a block of its
/// own.
const BLOCK_BYTES_MAX: usize = 64 << 10;
/// Number of entries for which a new block reserves room.
const BLOCK_ENTRIES_RESERVED: usize = 512;

/// Consecutive entries of the log in one allocation.
#[derive(Debug)]
struct EventBlock {
    /// Number of the first entry.
    first: u64,
    bytes: Vec<u8>,
    /// End offset of each entry.
    entry_ends: Vec<usize>,
}

impl EventBlock {
    fn new(first: u64) -> EventBlock {
        EventBlock {
            first,
            bytes: Vec::with_capacity(BLOCK_BYTES_MAX),
            entry_ends: Vec::with_capacity(BLOCK_ENTRIES_RESERVED),
        }
    }

    fn push(&mut self, entry: &[u8]) {
        self.bytes.extend_from_slice(entry);
        self.entry_ends.push(self.bytes.len());
    }

    fn entry(&self, number: u64) -> Option<&[u8]> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let begin = at
            .checked_sub(1)
            .map_or(0, |before| self.entry_ends[before]);
        self.bytes.get(begin..*self.entry_ends.get(at)?)
    }
}

/// The log and its subscribers.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    blocks: VecDeque<EventBlock>,
    bytes: usize,
    last_number: u64,
    /// Context and tag of the messages to a subscriber, by task.
    subscribers: BTreeMap<Tid, (i32, i32)>,
}

/// Why an entry was not appended. The log is unchanged.
#[derive(Debug, PartialEq, Eq, Error)]
pub(super) enum AppendError {
    #[error(transparent)]
    Encode(FrameError),
    #[error("it has {0} bytes, {max} at most", max = EVENT_BYTES_MAX)]
    TooLong(usize),
}

impl EventLog {
    /// Returns at most `limit` entries from number `from` on, oldest first.
    pub(super) fn entries_since(&self, from: u64, limit: u32) -> Vec<Event> {
        let from = from.max(self.oldest_number());
        let numbers = from..=self
            .last_number
            .min(from.saturating_add(u64::from(limit.min(EVENTS_PER_REPLY_MAX))) - 1);
        let event = |packed| from_bytes(packed).expect("it was packed here");
        numbers
            .filter_map(|number| self.packed_entry(number))
            .map(event)
            .collect()
    }

    /// Returns the number of the oldest entry.
    fn oldest_number(&self) -> u64 {
        let first = self.blocks.front().map_or(1, |block| block.first);
        first.max((self.last_number + 1).saturating_sub(EVENTS_MAX as u64))
    }

    /// Returns an entry in wire format.
    fn packed_entry(&self, number: u64) -> Option<&[u8]> {
        let block = self
            .blocks
            .partition_point(|block| block.first <= number)
            .checked_sub(1)?;
        self.blocks[block]
            .entry(number)
            .filter(|_| number >= self.oldest_number())
    }

    /// Stops sending events to this task.
    pub(super) fn unsubscribe(&mut self, tid: Tid) {
        self.subscribers.remove(&tid);
    }

    /// Returns the tasks that receive every new event.
    pub(super) fn subscriber_tids(&self) -> Vec<Tid> {
        self.subscribers.keys().copied().collect()
    }

    /// Appends an entry. Returns its number and its wire format.
    fn append(
        &mut self,
        host: HostId,
        at: Micros,
        kind: EventKind,
    ) -> Result<(u64, Bytes), AppendError> {
        let number = self.last_number + 1;
        let packed = to_bytes(&Event {
            number,
            at,
            host,
            kind,
        })
        .map_err(AppendError::Encode)?;
        if packed.len() > EVENT_BYTES_MAX {
            return Err(AppendError::TooLong(packed.len()));
        }
        if self
            .blocks
            .back()
            .is_none_or(|block| block.bytes.len() + packed.len() > BLOCK_BYTES_MAX)
        {
            self.blocks.push_back(EventBlock::new(number));
        }
        self.blocks.back_mut().expect("there is one").push(&packed);
        self.bytes += packed.len();
        self.last_number = number;
        self.drop_old_blocks();
        Ok((number, packed.into()))
    }

    /// Drops the blocks that contain only entries beyond the limits of the log.
    fn drop_old_blocks(&mut self) {
        let oldest = self.oldest_number();
        while self
            .blocks
            .get(1)
            .is_some_and(|next| next.first <= oldest || self.bytes > EVENTS_BYTES_MAX)
        {
            let gone = self.blocks.pop_front().expect("there are two");
            self.bytes -= gone.bytes.len();
        }
    }
}

impl Machine {
    /// Records an event of this host.
    pub(super) fn record(&mut self, kind: EventKind) {
        self.run_deferred();
        self.log_event(&kind);
        self.record_at(self.unix_time, kind);
    }

    /// Adds an event of a migration or checkpoint to the daemon's log: failures as warnings.
    fn log_event(&mut self, kind: &EventKind) {
        let (level, subject) = match kind {
            EventKind::MigrationFailed { id, .. } => {
                (LogLevel::Warning, LogSubject::Migration(*id))
            }
            EventKind::Migrated { id, .. } => (LogLevel::Debug, LogSubject::Migration(*id)),
            EventKind::CheckpointFailed { job, .. } => (LogLevel::Warning, LogSubject::Job(*job)),
            EventKind::Checkpointed { checkpoint, .. } => {
                (LogLevel::Debug, LogSubject::Checkpoint(checkpoint.clone()))
            }
            EventKind::Restarted { job, .. } => (LogLevel::Debug, LogSubject::Job(*job)),
            _ => return,
        };
        self.log_line(level, Some(subject), kind.to_string());
    }

    /// Records an event of this host that happened at time of day `at`. Must be called before a
    /// later event of this host is recorded.
    pub(super) fn record_at(&mut self, at: Micros, kind: EventKind) {
        let me = self.config.host;
        if self.master.is_some() {
            self.append_event(me, at, kind);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::Event { at, kind });
        }
    }

    /// Master: appends an entry and sends it to all subscribers.
    pub(super) fn append_event(&mut self, host: HostId, at: Micros, kind: EventKind) {
        // False if tasks end because their host, or the whole virtual machine, ends.
        let spontaneous = self.shutdown.is_none() && !self.is_leaving(host);
        match kind {
            EventKind::DrainStarted { host, .. } => self.checkpoint_before_drain(host),
            EventKind::TaskerGone { host, .. } if spontaneous => {
                self.roll_back_for_lost_tasker(host)
            }
            _ => {}
        }
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        master
            .checkpoints
            .update_after_event(now, host, &kind, spontaneous);
        let batchable = super::rm_batching::is_batchable(&kind);
        let (number, body) = match master.events.append(host, at, kind) {
            Ok(entry) => entry,
            Err(why) => {
                return self.log_warning(format!(
                    "an event log entry of host {host} was discarded: {why}"
                ));
            }
        };
        for dst in master.events.subscriber_tids() {
            if batchable && self.is_batching_for(dst) {
                self.batch_event(dst, number);
            } else if let Some(item) = self.to_subscriber(dst, body.clone()) {
                self.deliver(dst, item);
            }
        }
    }

    /// Returns the message by which a subscriber receives an entry. `None` if the log has dropped
    /// the entry or the task is not subscribed.
    pub(super) fn event_for_subscriber(&self, dst: Tid, number: u64) -> Option<ToTask> {
        let packed = self.master.as_ref()?.events.packed_entry(number)?;
        self.to_subscriber(dst, Bytes::copy_from_slice(packed))
    }

    fn to_subscriber(&self, dst: Tid, body: Bytes) -> Option<ToTask> {
        let (ctx, tag) = *self.master.as_ref()?.events.subscribers.get(&dst)?;
        let message = Message {
            src: self.daemon_address_for(dst),
            dst,
            ctx,
            tag,
            wid: 0,
            enc: DSIG_X86_64,
            body,
        };
        Some(ToTask::Deliver {
            message,
            deliver_after: None,
        })
    }

    /// Master: subscribes a task to all new events.
    pub(super) fn subscribe(&mut self, tid: Tid, id: RequestId, ctx: i32, tag: i32) {
        let Some(master) = &mut self.master else {
            return;
        };
        let subscribers = &mut master.events.subscribers;
        if subscribers.len() >= SUBSCRIBERS_MAX && !subscribers.contains_key(&tid) {
            let reason = format!("{SUBSCRIBERS_MAX} tasks follow the event log already");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        subscribers.insert(tid, (ctx, tag));
        self.reply(tid, id, Reply::Done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(text: &str) -> EventKind {
        EventKind::Note {
            text: text.to_string(),
        }
    }

    fn numbers(log: &EventLog, from: u64, limit: u32) -> Vec<u64> {
        log.entries_since(from, limit)
            .iter()
            .map(|event| event.number)
            .collect()
    }

    /// The log returns the recorded entries. When it is full, the oldest entries are dropped.
    #[test]
    fn log_returns_entries_and_drops_the_oldest() {
        let mut log = EventLog::default();
        assert!(
            log.entries_since(0, 10).is_empty() && log.entries_since(u64::MAX, u32::MAX).is_empty()
        );
        let all = EVENTS_MAX as u64 + 10_000;
        for number in 1..=all {
            let at = Micros::from_secs(number);
            let (given, body) = log
                .append(HostId::MASTER, at, note(&number.to_string()))
                .expect("it is short");
            assert_eq!((given, log.packed_entry(number)), (number, Some(&body[..])));
        }
        let oldest = all - EVENTS_MAX as u64 + 1;
        assert_eq!(numbers(&log, 0, 2), [oldest, oldest + 1]);
        assert_eq!(numbers(&log, all - 1, 10), [all - 1, all]);
        assert!(numbers(&log, all + 1, 10).is_empty() && numbers(&log, oldest, 0).is_empty());
        assert_eq!(
            log.entries_since(0, u32::MAX).len(),
            EVENTS_PER_REPLY_MAX as usize
        );
        for event in log.entries_since(oldest + 700, 3000) {
            let (number, at, kind) = (event.number, event.at, event.kind);
            assert_eq!(
                (at, kind),
                (Micros::from_secs(number), note(&number.to_string()))
            );
        }
        assert_eq!(
            (
                log.packed_entry(oldest - 1),
                log.packed_entry(all + 1),
                log.packed_entry(0)
            ),
            (None, None, None)
        );
        let kept: usize = log.blocks.iter().map(|block| block.entry_ends.len()).sum();
        let of_oldest = log.blocks[0].entry_ends.len();
        assert!(
            (EVENTS_MAX..EVENTS_MAX + of_oldest).contains(&kept),
            "{kept} entries are kept"
        );
    }

    /// Long entries are kept up to a total size. An entry that is too long is refused and gets no
    /// number.
    #[test]
    fn log_limits_bytes_and_refuses_long_entries() {
        let mut log = EventLog::default();
        let (long, too_long) = (
            "x".repeat(EVENT_BYTES_MAX - 100),
            "x".repeat(EVENT_BYTES_MAX + 1),
        );
        let fit = (EVENTS_BYTES_MAX / long.len()) as u64;
        for number in 1..=fit + 20 {
            let given = log
                .append(HostId::MASTER, Micros(0), note(&long))
                .map(|(given, _)| given);
            assert_eq!(given, Ok(number));
            assert!(
                log.append(HostId::MASTER, Micros(0), note(&too_long))
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
            to_bytes(&log.entries_since(0, u32::MAX)).is_ok(),
            "all that is kept fits a frame"
        );
    }
}
