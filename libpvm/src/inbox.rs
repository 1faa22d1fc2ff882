//! Messages that have arrived and wait to be received.

use sempa_proto::Message;
use std::collections::VecDeque;

/// Arrived messages in arrival order.
#[derive(Debug, Default)]
pub struct Inbox {
    messages: VecDeque<Message>,
    bytes: usize,
}

impl Inbox {
    /// Bytes counted for a message beside its body, so that empty messages do not come free.
    const OVERHEAD_BYTES: usize = 128;
    /// Messages that an empty list keeps memory for.
    const KEPT_MESSAGES: usize = 1024;

    /// The messages, first arrived first.
    pub fn iter(&self) -> impl Iterator<Item = &Message> {
        self.messages.iter()
    }

    /// The message at a position.
    pub fn get(&self, i: usize) -> Option<&Message> {
        self.messages.get(i)
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// True when no message waits.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Bytes that the messages hold, bodies and a fixed share for each.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the message at position `i` out; those behind it move up. `i` must be a position of this inbox.
    pub fn remove(&mut self, i: usize) -> Message {
        let message = self
            .messages
            .remove(i)
            .expect("the caller names a message that is there");
        self.bytes -= message.body.len() + Self::OVERHEAD_BYTES;
        message
    }

    /// Takes the first message for which `wanted` holds.
    pub fn take_first(&mut self, mut wanted: impl FnMut(&Message) -> bool) -> Option<Message> {
        let i = self.messages.iter().position(&mut wanted)?;
        Some(self.remove(i))
    }

    /// Adds a message behind all others.
    pub fn push(&mut self, m: Message) {
        self.bytes += m.body.len() + Self::OVERHEAD_BYTES;
        self.messages.push_back(m);
    }

    /// Takes all messages, behind those that `to` holds.
    pub fn take_all_into(&mut self, to: &mut VecDeque<Message>) {
        self.bytes = 0;
        if to.is_empty() {
            // Both keep their memory, but not that of a flood.
            to.shrink_to(Self::KEPT_MESSAGES);
            std::mem::swap(&mut self.messages, to);
        } else {
            to.append(&mut self.messages);
        }
    }

    /// Drops all messages.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.bytes = 0;
    }
}
