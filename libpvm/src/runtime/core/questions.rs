//! Questions to resource managers that threads of this task wait for.

use bytes::Bytes;
use sempa_proto::sm::unpack_waits;
use sempa_proto::{Message, Micros, Tid};

/// A question to a resource manager that a thread waits for.
#[derive(Debug)]
struct Question {
    rm: Tid,
    tag: i32,
    wid: i32,
    answer: Option<Bytes>,
    /// What it asks for waits for a place since then, says the resource manager.
    waits: Option<Micros>,
}

/// All of them. Their answers never show in the inbox.
#[derive(Debug, Default)]
pub(crate) struct Questions(Vec<Question>);

impl Questions {
    /// A thread is about to ask.
    pub(crate) fn open(&mut self, rm: Tid, tag: i32, wid: i32) {
        self.0.push(Question {
            rm,
            tag,
            wid,
            answer: None,
            waits: None,
        });
    }

    /// The thread has its answer, or has given up.
    pub(crate) fn close(&mut self, wid: i32) {
        self.0.retain(|question| question.wid != wid);
    }

    /// The body of the answer to a question, once it is here.
    pub(crate) fn take_answer(&mut self, wid: i32) -> Option<Bytes> {
        self.0
            .iter_mut()
            .find(|question| question.wid == wid)?
            .answer
            .take()
    }

    /// Since when the request of a question waits for a place, if it does.
    pub(crate) fn waits_since(&self, wid: i32) -> Option<Micros> {
        self.0.iter().find(|question| question.wid == wid)?.waits
    }

    /// A resource manager says since when a request waits.
    pub(super) fn hear_of_waiting(&mut self, message: Message) {
        let asked = |q: &&mut Question| q.rm == message.src && q.wid == message.wid;
        if let Some(question) = self.0.iter_mut().find(asked) {
            question.waits = unpack_waits(message.body).unwrap_or_default();
        }
    }

    /// Takes a message that answers a question; gives any other back. An answer with a wrong wait id is used all the same, as
    /// in PVM, unless another question has it.
    pub(super) fn hear(&mut self, message: Message) -> Option<Message> {
        let fits = |q: &Question| q.rm == message.src && q.tag == message.tag && q.answer.is_none();
        let exact = self.0.iter().position(|q| fits(q) && q.wid == message.wid);
        let Some(i) = exact.or_else(|| self.0.iter().position(fits)) else {
            return Some(message);
        };
        self.0[i].answer = Some(message.body);
        None
    }
}
