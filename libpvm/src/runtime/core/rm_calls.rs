//! Calls to resource managers. A call is registered while a thread of this task waits for the
//! answer.

use bytes::Bytes;
use sempa_proto::sm::unpack_spawn_waits;
use sempa_proto::{Message, Micros, Tid};

/// Call to a resource manager whose answer a thread awaits.
#[derive(Debug)]
struct PendingRmCall {
    rm: Tid,
    tag: i32,
    wid: i32,
    answer: Option<Bytes>,
    /// Time since which the call has waited for a free slot, as the resource manager reported;
    /// `None` if the call does not wait.
    waiting_since: Option<Micros>,
}

/// All calls for which threads wait. Their answers never appear in the inbox.
#[derive(Debug, Default)]
pub(crate) struct PendingRmCalls(Vec<PendingRmCall>);

impl PendingRmCalls {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Registers a call that a thread is about to make.
    pub(crate) fn register(&mut self, rm: Tid, tag: i32, wid: i32) {
        self.0.push(PendingRmCall {
            rm,
            tag,
            wid,
            answer: None,
            waiting_since: None,
        });
    }

    /// Removes a call when its thread has the answer or has stopped waiting.
    pub(crate) fn remove(&mut self, wid: i32) {
        self.0.retain(|call| call.wid != wid);
    }

    /// Removes and returns the body of the answer; `None` if the answer has not arrived.
    pub(crate) fn take_answer(&mut self, wid: i32) -> Option<Bytes> {
        self.0
            .iter_mut()
            .find(|call| call.wid == wid)?
            .answer
            .take()
    }

    /// Returns the time since which the call has waited for a free slot; `None` if the call does
    /// not wait.
    pub(crate) fn waiting_since(&self, wid: i32) -> Option<Micros> {
        self.0.iter().find(|call| call.wid == wid)?.waiting_since
    }

    /// Stores the resource manager's report that a call waits for a free slot.
    pub(super) fn handle_wait_report(&mut self, message: Message) {
        let is_call = |q: &&mut PendingRmCall| q.rm == message.src && q.wid == message.wid;
        if let Some(call) = self.0.iter_mut().find(is_call) {
            call.waiting_since = unpack_spawn_waits(message.body).unwrap_or_default();
        }
    }

    /// Stores a message that answers a call and returns `None`. Returns any other message to the
    /// caller. An answer with a wrong wait id is accepted, as in PVM, unless another call has that
    /// wait id.
    pub(super) fn store_if_answer(&mut self, message: Message) -> Option<Message> {
        let is_match = |call: &PendingRmCall| {
            call.rm == message.src && call.tag == message.tag && call.answer.is_none()
        };
        let exact_index = self
            .0
            .iter()
            .position(|call| is_match(call) && call.wid == message.wid);
        let Some(i) = exact_index.or_else(|| self.0.iter().position(is_match)) else {
            return Some(message);
        };
        self.0[i].answer = Some(message.body);
        None
    }
}
