//! The mail that waits for one member, from its acceptance until the member's program has received
//! it.

use crate::ids::{MailSeq, Millis};
use crate::protocol::Mail;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Largest number of notices that wait in one mailbox.
pub(crate) const NOTICES_MAX: usize = 65_536;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MailboxEntry {
    pub(crate) mail: Mail,
    /// True if the sender wants the message back when the receiver is gone.
    pub(crate) returns: bool,
    /// On the clock of this process. After a restart of the broker, 0.
    #[serde(skip)]
    pub(crate) taken_at: Millis,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mailbox {
    newest: MailSeq,
    highest_consumed: MailSeq,
    entries: BTreeMap<MailSeq, MailboxEntry>,
    /// Messages and returned messages, without notices.
    message_count: usize,
    byte_count: usize,
}

impl Mailbox {
    pub(crate) fn highest_consumed(&self) -> MailSeq {
        self.highest_consumed
    }

    pub(crate) fn message_count(&self) -> usize {
        self.message_count
    }

    pub(crate) fn byte_count(&self) -> usize {
        self.byte_count
    }

    pub(crate) fn notice_count(&self) -> usize {
        self.entries.len() - self.message_count
    }

    pub(crate) fn oldest(&self) -> Option<Millis> {
        self.entries
            .first_key_value()
            .map(|(_, entry)| entry.taken_at)
    }

    pub(crate) fn push(&mut self, entry: MailboxEntry) {
        self.newest.0 += 1;
        self.message_count += usize::from(!matches!(entry.mail, Mail::Gone { .. }));
        self.byte_count += entry.mail.byte_count();
        self.entries.insert(self.newest, entry);
    }

    /// Removes an entry that the member's program has received; `None` if there is no such entry.
    pub(crate) fn consume(&mut self, seq: MailSeq) -> Option<MailboxEntry> {
        let entry = self.entries.remove(&seq)?;
        self.highest_consumed = self.highest_consumed.max(seq);
        self.message_count -= usize::from(!matches!(entry.mail, Mail::Gone { .. }));
        self.byte_count -= entry.mail.byte_count();
        Some(entry)
    }

    /// Makes all later mail get a number above `seq`, because the member has mail up to `seq`.
    pub(crate) fn skip_to(&mut self, seq: MailSeq) {
        self.newest = self.newest.max(seq);
    }

    /// Returns the entries after `seq` up to `last`, in order.
    pub(crate) fn between(
        &self,
        seq: MailSeq,
        last: MailSeq,
    ) -> impl Iterator<Item = (MailSeq, &MailboxEntry)> {
        let range = (seq < last).then_some((
            std::ops::Bound::Excluded(seq),
            std::ops::Bound::Included(last),
        ));
        range
            .into_iter()
            .flat_map(|range| self.entries.range(range))
            .map(|(seq, entry)| (*seq, entry))
    }

    /// Returns the numbers of the entries up to `last`.
    pub(crate) fn seqs_up_to(&self, last: MailSeq) -> Vec<MailSeq> {
        self.entries.range(..=last).map(|(seq, _)| *seq).collect()
    }

    /// Empties the mailbox and returns the entries in order.
    pub(crate) fn drain(&mut self) -> Vec<MailboxEntry> {
        self.message_count = 0;
        self.byte_count = 0;
        std::mem::take(&mut self.entries).into_values().collect()
    }
}
