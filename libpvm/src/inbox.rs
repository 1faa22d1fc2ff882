//! Queue of messages that have arrived and were not received yet.

use sempa_proto::Message;
use std::collections::VecDeque;

/// Received messages in order of arrival.
#[derive(Debug, Default)]
pub struct Inbox {
    messages: VecDeque<Message>,
    charged_bytes: usize,
}

impl Inbox {
    /// Bytes charged for each message in addition to its body, so that empty messages count, too.
    const OVERHEAD_BYTES: usize = 128;
    /// Maximum capacity, in messages, that an emptied queue keeps allocated.
    const RETAINED_MESSAGES_MAX: usize = 1024;

    /// Iterates over the messages, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Message> {
        self.messages.iter()
    }

    /// Returns the message at position `i`. Position 0 is the oldest message.
    pub fn get(&self, i: usize) -> Option<&Message> {
        self.messages.get(i)
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Returns the size that counts against the limit of the inbox: all bodies plus a fixed
    /// overhead for each message.
    pub fn charged_bytes(&self) -> usize {
        self.charged_bytes
    }

    /// Removes and returns the message at position `i`; later messages move up. `i` must be less
    /// than [`Inbox::len`].
    pub fn remove(&mut self, i: usize) -> Message {
        let message = self
            .messages
            .remove(i)
            .expect("the caller names a message that is there");
        self.charged_bytes -= message.body.len() + Self::OVERHEAD_BYTES;
        message
    }

    /// Removes and returns the first message for which `wanted` is true.
    pub fn take_first(&mut self, mut wanted: impl FnMut(&Message) -> bool) -> Option<Message> {
        let i = self.messages.iter().position(&mut wanted)?;
        Some(self.remove(i))
    }

    pub fn push(&mut self, m: Message) {
        self.charged_bytes += m.body.len() + Self::OVERHEAD_BYTES;
        self.messages.push_back(m);
    }

    /// Moves all messages to the end of `to`, in order.
    pub fn drain_into(&mut self, to: &mut VecDeque<Message>) {
        self.charged_bytes = 0;
        if to.is_empty() {
            // Both lists keep a bounded capacity, so that a burst of messages does not pin its
            // memory.
            to.shrink_to(Self::RETAINED_MESSAGES_MAX);
            std::mem::swap(&mut self.messages, to);
        } else {
            to.append(&mut self.messages);
        }
    }

    pub fn clear(&mut self) {
        self.messages.clear();
        self.charged_bytes = 0;
    }
}
