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
    const MESSAGE_OVERHEAD_BYTES: usize = 128;
    /// Maximum capacity, in messages, of an emptied queue. Memory beyond this capacity is freed.
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

    /// Returns the number of bytes that count against the limit of the inbox: all bodies plus a
    /// fixed overhead for each message.
    pub fn charged_bytes(&self) -> usize {
        self.charged_bytes
    }

    /// Removes and returns the message at position `i`; the positions of later messages decrease by
    /// one. `i` must be less than [`Inbox::len`].
    pub fn remove(&mut self, i: usize) -> Message {
        let message = self
            .messages
            .remove(i)
            .expect("the caller names a message that is there");
        self.charged_bytes -= message.body.len() + Self::MESSAGE_OVERHEAD_BYTES;
        message
    }

    /// Removes and returns the first message for which `predicate` is true.
    pub fn take_first(&mut self, mut predicate: impl FnMut(&Message) -> bool) -> Option<Message> {
        let i = self.messages.iter().position(&mut predicate)?;
        Some(self.remove(i))
    }

    pub fn push(&mut self, message: Message) {
        self.charged_bytes += message.body.len() + Self::MESSAGE_OVERHEAD_BYTES;
        self.messages.push_back(message);
    }

    /// Moves all messages to the end of `target`, in order.
    pub fn drain_into(&mut self, target: &mut VecDeque<Message>) {
        self.charged_bytes = 0;
        if target.is_empty() {
            // Both queues keep a bounded capacity, so that a burst of messages does not occupy its
            // memory permanently.
            target.shrink_to(Self::RETAINED_MESSAGES_MAX);
            std::mem::swap(&mut self.messages, target);
        } else {
            target.append(&mut self.messages);
        }
    }

    pub fn clear(&mut self) {
        self.messages.clear();
        self.charged_bytes = 0;
    }
}
