//! Calls to resource managers, for whose answers threads of this task wait.

use bytes::Bytes;
use sempa_proto::sm::unpack_spawn_waits;
use sempa_proto::{Message, Micros, Tid};

/// Call to a resource manager for which a thread waits.
#[derive(Debug)]
struct PendingRmCall {
    rm: Tid,
    tag: i32,
    wid: i32,
    answer: Option<Bytes>,
    /// Time since which the request has waited for a free slot, as the resource manager reported.
    waiting_since: Option<Micros>,
}

/// All calls without a received answer. The answers never appear in the inbox.
#[derive(Debug, Default)]
pub(crate) struct PendingRmCalls(Vec<PendingRmCall>);

impl PendingRmCalls {
    /// Registers a call that a thread is about to make.
    pub(crate) fn begin(&mut self, rm: Tid, tag: i32, wid: i32) {
        self.0.push(PendingRmCall {
            rm,
            tag,
            wid,
            answer: None,
            waiting_since: None,
        });
    }

    /// Removes a call: the thread has its answer or has stopped waiting.
    pub(crate) fn end(&mut self, wid: i32) {
        self.0.retain(|question| question.wid != wid);
    }

    /// Returns the body of the answer when it has arrived.
    pub(crate) fn take_answer(&mut self, wid: i32) -> Option<Bytes> {
        self.0
            .iter_mut()
            .find(|question| question.wid == wid)?
            .answer
            .take()
    }

    /// Returns the time since which the request has waited for a free slot, if it waits.
    pub(crate) fn waiting_since(&self, wid: i32) -> Option<Micros> {
        self.0
            .iter()
            .find(|question| question.wid == wid)?
            .waiting_since
    }

    /// Stores the resource manager's report that a request waits for a free slot.
    pub(super) fn handle_wait_report(&mut self, message: Message) {
        let is_call = |q: &&mut PendingRmCall| q.rm == message.src && q.wid == message.wid;
        if let Some(question) = self.0.iter_mut().find(is_call) {
            question.waiting_since = unpack_spawn_waits(message.body).unwrap_or_default();
        }
    }

    /// Stores a message that answers a call; returns any other message. An answer with a wrong wait
    /// id is accepted, as in PVM, unless another call has that wait id.
    pub(super) fn match_answer(&mut self, message: Message) -> Option<Message> {
        let fits =
            |q: &PendingRmCall| q.rm == message.src && q.tag == message.tag && q.answer.is_none();
        let exact = self.0.iter().position(|q| fits(q) && q.wid == message.wid);
        let Some(i) = exact.or_else(|| self.0.iter().position(fits)) else {
            return Some(message);
        };
        self.0[i].answer = Some(message.body);
        None
    }
}
