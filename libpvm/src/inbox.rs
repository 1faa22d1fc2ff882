//! Queue of messages that have arrived and were not received yet.

use sempa_proto::Message;
use std::collections::VecDeque;

/// Received messages in order of arrival.
#[derive(Debug, Default)]
pub struct Inbox {
    messages: VecDeque<Message>,
    charged_bytes: usize,
    /// True if a descriptor of the program shows whether the inbox contains messages.
    is_watched: bool,
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

    /// Moves messages to the end of `target`, in order: all messages, but only the oldest message
    /// if a descriptor of the program shows whether there are others.
    pub fn take_arrivals(&mut self, target: &mut VecDeque<Message>) {
        if !self.is_watched {
            self.drain_into(target);
        } else if !self.is_empty() {
            target.push_back(self.remove(0));
        }
    }

    /// Puts messages that [`Inbox::take_arrivals`] has moved back before all other messages.
    pub(crate) fn put_back(&mut self, mut messages: VecDeque<Message>) {
        let charge = |message: &Message| message.body.len() + Self::MESSAGE_OVERHEAD_BYTES;
        self.charged_bytes += messages.iter().map(charge).sum::<usize>();
        messages.append(&mut self.messages);
        self.messages = messages;
    }

    /// Declares that a descriptor of the program shows whether the inbox contains messages.
    pub(crate) fn set_watched(&mut self) {
        self.is_watched = true;
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

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Tid;

    fn message(tag: i32) -> Message {
        Message {
            src: Tid::NONE,
            dst: Tid::NONE,
            ctx: 0,
            tag,
            wid: 0,
            enc: 0,
            body: bytes::Bytes::from_static(b"body"),
        }
    }

    fn tags<'a>(messages: impl Iterator<Item = &'a Message>) -> Vec<i32> {
        messages.map(|message| message.tag).collect()
    }

    /// While a descriptor shows whether there are messages, only one message at a time leaves the
    /// inbox, and messages that left it before can be put back.
    #[test]
    fn watched_inbox_gives_one_message_at_a_time() {
        let mut inbox = Inbox::default();
        (1..=4).for_each(|tag| inbox.push(message(tag)));
        let charged_bytes = inbox.charged_bytes();
        let mut taken_messages = VecDeque::new();
        inbox.take_arrivals(&mut taken_messages);
        assert_eq!(tags(taken_messages.iter()), [1, 2, 3, 4]);
        assert!(inbox.is_empty());
        inbox.push(message(5));
        inbox.set_watched();
        taken_messages.pop_front();
        inbox.put_back(std::mem::take(&mut taken_messages));
        assert_eq!(tags(inbox.iter()), [2, 3, 4, 5]);
        assert_eq!(inbox.charged_bytes(), charged_bytes);
        inbox.take_arrivals(&mut taken_messages);
        assert_eq!(tags(taken_messages.iter()), [2]);
        assert_eq!(tags(inbox.iter()), [3, 4, 5]);
    }
}
