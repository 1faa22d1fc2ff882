//! Requests that are refused as they come, and what is told of it. A program that asks again and again does not flood the
//! event log: the same refusal is told once in a while, and only so many are.

use super::{Incoming, Output, Spawns};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::rm::{Attempt, Choice};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// The same refusal of the same task's requests is told once in this time.
pub const REFUSAL_TOLD_PAUSE: Micros = Micros::from_secs(60);
/// Refusals that are told in that time at most.
pub const REFUSALS_TOLD_MAX: usize = 64;

/// What was told a moment ago: whose requests were refused, and with which error.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<(Tid, i32), Micros>);

impl Refusals {
    fn is_news(&mut self, now: Micros, of: (Tid, i32)) -> bool {
        self.0
            .retain(|_, told| now.since(*told) < REFUSAL_TOLD_PAUSE);
        let is_news = self.0.len() < REFUSALS_TOLD_MAX && !self.0.contains_key(&of);
        if is_news {
            self.0.insert(of, now);
        }
        is_news
    }
}

/// A search that came to nothing because so much is not allowed.
pub(super) fn limit(sentence: String) -> Attempt {
    Attempt {
        choice: Choice::Limit,
        sentence,
        not_used: Vec::new(),
    }
}

fn only(error: PvmError) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(error.code());
    body.finish()
}

impl Spawns {
    /// Answers a request with nothing but an error.
    pub fn refuse(&mut self, to: Tid, wid: i32, error: PvmError) {
        self.out.push_back(Output::Reply {
            to,
            wid,
            body: only(error),
        });
    }

    /// The same; why is noted down.
    pub fn refuse_and_tell(&mut self, now: Micros, from: &Incoming, error: PvmError, why: String) {
        self.refuse(from.src, from.wid, error);
        if !self.refusals.is_news(now, (from.src, error.code())) {
            return;
        }
        let note = from.not_started(error, &why);
        self.out
            .push_back(from.decided(Vec::new(), Some(error), from.waited, vec![limit(why)]));
        self.out.push_back(Output::Record(note));
    }
}
