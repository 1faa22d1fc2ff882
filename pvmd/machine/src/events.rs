//! The event log of the virtual machine, stored by the master.
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
/// Largest size of the whole log in bytes, so that every reply fits into a frame. The oldest
/// entries are dropped first.
const EVENTS_BYTES_MAX: usize = FRAME_BYTES_MAX / 2;
/// Largest size of one entry in bytes. The entry of the largest possible spawn has a fifth of this
/// size.
const EVENT_BYTES_MAX: usize = 1 << 20;
/// Size in bytes of the blocks in which entries are stored and dropped. A larger entry has a block
/// of its own.
const BLOCK_BYTES_MAX: usize = 64 << 10;
/// Number of entries for which a new block reserves room.
const BLOCK_ENTRY_CAPACITY: usize = 512;

/// Consecutive entries of the log in one allocation.
#[derive(Debug)]
struct EventBlock {
    /// Number of the first entry.
    first_number: u64,
    bytes: Vec<u8>,
    /// End offset of each entry in `bytes`.
    entry_ends: Vec<usize>,
}

impl EventBlock {
    fn new(first_number: u64) -> Self {
        Self {
            first_number,
            bytes: Vec::with_capacity(BLOCK_BYTES_MAX),
            entry_ends: Vec::with_capacity(BLOCK_ENTRY_CAPACITY),
        }
    }

    fn push_entry(&mut self, entry: &[u8]) {
        self.bytes.extend_from_slice(entry);
        self.entry_ends.push(self.bytes.len());
    }

    fn entry(&self, event_number: u64) -> Option<&[u8]> {
        let index = usize::try_from(event_number.checked_sub(self.first_number)?).ok()?;
        let start = index
            .checked_sub(1)
            .map_or(0, |previous_index| self.entry_ends[previous_index]);
        self.bytes.get(start..*self.entry_ends.get(index)?)
    }
}

/// The log and its subscribers.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    blocks: VecDeque<EventBlock>,
    packed_bytes: usize,
    last_number: u64,
    /// Context and tag of the messages to a subscriber, by task.
    subscribers: BTreeMap<Tid, (i32, i32)>,
}

/// Reason why an entry was not appended. The log is unchanged.
#[derive(Debug, PartialEq, Eq, Error)]
pub(super) enum AppendError {
    #[error(transparent)]
    Encode(FrameError),
    #[error("it has {0} bytes, {max} at most", max = EVENT_BYTES_MAX)]
    TooLong(usize),
}

impl EventLog {
    /// Returns at most `limit` entries, oldest first. The first entry is the one with the number
    /// `first_number`, or the oldest entry if the log has dropped that entry.
    pub(super) fn entries_since(&self, first_number: u64, limit: u32) -> Vec<Event> {
        let first_number = first_number.max(self.oldest_number());
        let numbers = first_number
            ..=self
                .last_number
                .min(first_number.saturating_add(u64::from(limit.min(EVENTS_PER_REPLY_MAX))) - 1);
        let decode = |entry_bytes| from_bytes(entry_bytes).expect("it was packed here");
        numbers
            .filter_map(|event_number| self.packed_entry(event_number))
            .map(decode)
            .collect()
    }

    /// Returns the number of the oldest entry, or of the next entry if the log is empty.
    fn oldest_number(&self) -> u64 {
        let first_stored_number = self.blocks.front().map_or(1, |block| block.first_number);
        first_stored_number.max((self.last_number + 1).saturating_sub(EVENTS_MAX as u64))
    }

    /// Returns an entry in wire format; `None` if the log does not contain it.
    fn packed_entry(&self, event_number: u64) -> Option<&[u8]> {
        let block = self
            .blocks
            .partition_point(|block| block.first_number <= event_number)
            .checked_sub(1)?;
        self.blocks[block]
            .entry(event_number)
            .filter(|_| event_number >= self.oldest_number())
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
    fn append_entry(
        &mut self,
        host: HostId,
        at: Micros,
        kind: EventKind,
    ) -> Result<(u64, Bytes), AppendError> {
        let event_number = self.last_number + 1;
        let entry_bytes = to_bytes(&Event {
            number: event_number,
            at,
            host,
            kind,
        })
        .map_err(AppendError::Encode)?;
        if entry_bytes.len() > EVENT_BYTES_MAX {
            return Err(AppendError::TooLong(entry_bytes.len()));
        }
        if self
            .blocks
            .back()
            .is_none_or(|block| block.bytes.len() + entry_bytes.len() > BLOCK_BYTES_MAX)
        {
            self.blocks.push_back(EventBlock::new(event_number));
        }
        self.blocks
            .back_mut()
            .expect("there is one")
            .push_entry(&entry_bytes);
        self.packed_bytes += entry_bytes.len();
        self.last_number = event_number;
        self.drop_old_blocks();
        Ok((event_number, entry_bytes.into()))
    }

    /// Drops the oldest blocks: those whose entries all exceed the limit on the number of entries,
    /// and further blocks while the log exceeds [`EVENTS_BYTES_MAX`]. The newest block always
    /// remains.
    fn drop_old_blocks(&mut self) {
        let oldest_number = self.oldest_number();
        while self.blocks.get(1).is_some_and(|second_block| {
            second_block.first_number <= oldest_number || self.packed_bytes > EVENTS_BYTES_MAX
        }) {
            let dropped_block = self.blocks.pop_front().expect("there are two");
            self.packed_bytes -= dropped_block.bytes.len();
        }
    }
}

impl Machine {
    /// Records an event of this host.
    pub(super) fn record_event(&mut self, kind: EventKind) {
        self.run_deferred_actions();
        self.log_event(&kind);
        self.record_at(self.unix_time, kind);
    }

    /// Writes an event of a migration or checkpoint to the daemon's log. Failures are warnings.
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
        let own_host = self.config.host;
        if self.master.is_some() {
            self.append_event(own_host, at, kind);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::Event { at, kind });
        }
    }

    /// Master: appends an entry and sends it to all subscribers. Before that, updates the
    /// checkpoint state of the jobs that the event concerns, for example after the end of a task or
    /// a tasker.
    pub(super) fn append_event(&mut self, host: HostId, at: Micros, kind: EventKind) {
        // False if tasks end because their host, or the whole virtual machine, shuts down.
        let is_spontaneous = self.shutdown.is_none() && !self.is_leaving(host);
        match kind {
            EventKind::DrainStarted { host, .. } => self.checkpoint_before_drain(host),
            EventKind::TaskerGone { host, .. } if is_spontaneous => {
                self.roll_back_for_lost_tasker(host)
            }
            _ => {}
        }
        self.update_known_state(host, at, &kind);
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        master
            .checkpoints
            .update_after_event(now, host, &kind, is_spontaneous);
        let may_be_batched = super::rm_batching::is_batchable(&kind);
        let (number, body) = match master.events.append_entry(host, at, kind) {
            Ok(entry) => entry,
            Err(why) => {
                return self.log_warning(format!(
                    "an event log entry of host {host} was discarded: {why}"
                ));
            }
        };
        for dst in master.events.subscriber_tids() {
            if may_be_batched && self.is_batching_for(dst) {
                self.add_event_to_batch(dst, number);
            } else if let Some(item) = self.subscriber_message(dst, body.clone()) {
                self.deliver(dst, item);
            }
        }
    }

    /// Returns the message by which a subscriber receives an entry; `None` if the log has dropped
    /// the entry or the task is not subscribed.
    pub(super) fn event_for_subscriber(&self, dst: Tid, event_number: u64) -> Option<ToTask> {
        let entry_bytes = self.master.as_ref()?.events.packed_entry(event_number)?;
        self.subscriber_message(dst, Bytes::copy_from_slice(entry_bytes))
    }

    fn subscriber_message(&self, dst: Tid, body: Bytes) -> Option<ToTask> {
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

    fn event_numbers(log: &EventLog, first_number: u64, limit: u32) -> Vec<u64> {
        log.entries_since(first_number, limit)
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
        let event_count = EVENTS_MAX as u64 + 10_000;
        for number in 1..=event_count {
            let at = Micros::from_secs(number);
            let (appended_number, body) = log
                .append_entry(HostId::MASTER, at, note(&number.to_string()))
                .expect("it is short");
            assert_eq!(
                (appended_number, log.packed_entry(number)),
                (number, Some(&body[..]))
            );
        }
        let oldest_number = event_count - EVENTS_MAX as u64 + 1;
        assert_eq!(
            event_numbers(&log, 0, 2),
            [oldest_number, oldest_number + 1]
        );
        assert_eq!(
            event_numbers(&log, event_count - 1, 10),
            [event_count - 1, event_count]
        );
        assert!(
            event_numbers(&log, event_count + 1, 10).is_empty()
                && event_numbers(&log, oldest_number, 0).is_empty()
        );
        assert_eq!(
            log.entries_since(0, u32::MAX).len(),
            EVENTS_PER_REPLY_MAX as usize
        );
        for event in log.entries_since(oldest_number + 700, 3000) {
            let (number, at, kind) = (event.number, event.at, event.kind);
            assert_eq!(
                (at, kind),
                (Micros::from_secs(number), note(&number.to_string()))
            );
        }
        assert_eq!(
            (
                log.packed_entry(oldest_number - 1),
                log.packed_entry(event_count + 1),
                log.packed_entry(0)
            ),
            (None, None, None)
        );
        let stored_count: usize = log.blocks.iter().map(|block| block.entry_ends.len()).sum();
        let oldest_block_count = log.blocks[0].entry_ends.len();
        assert!(
            (EVENTS_MAX..EVENTS_MAX + oldest_block_count).contains(&stored_count),
            "{stored_count} entries are kept"
        );
    }

    /// The log stores long entries up to a total size. An entry that is too long is refused and
    /// gets no number.
    #[test]
    fn log_limits_bytes_and_refuses_long_entries() {
        let mut log = EventLog::default();
        let (long_text, too_long_text) = (
            "x".repeat(EVENT_BYTES_MAX - 100),
            "x".repeat(EVENT_BYTES_MAX + 1),
        );
        let fitting_count = (EVENTS_BYTES_MAX / long_text.len()) as u64;
        for number in 1..=fitting_count + 20 {
            let appended_number = log
                .append_entry(HostId::MASTER, Micros(0), note(&long_text))
                .map(|(appended_number, _)| appended_number);
            assert_eq!(appended_number, Ok(number));
            assert!(
                log.append_entry(HostId::MASTER, Micros(0), note(&too_long_text))
                    .is_err()
            );
        }
        let stored_numbers = event_numbers(&log, 0, u32::MAX);
        assert!(
            log.packed_bytes <= EVENTS_BYTES_MAX,
            "{} bytes",
            log.packed_bytes
        );
        assert!(
            stored_numbers.len() as u64 >= fitting_count - 1
                && stored_numbers.last() == Some(&(fitting_count + 20)),
            "{stored_numbers:?}"
        );
        assert!(
            to_bytes(&log.entries_since(0, u32::MAX)).is_ok(),
            "all that is kept fits a frame"
        );
    }
}
