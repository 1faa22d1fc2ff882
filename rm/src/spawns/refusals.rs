//! Requests that are refused when they arrive, and the log entries about them. So that a program
//! that repeats its request cannot flood the event log, the same refusal is logged once per
//! interval, and the total number of logged refusals is limited.

use super::{Incoming, Output, Spawns};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::rm::{PlacementAttempt, PlacementRule};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Interval in which the same refusal of the same task is logged only once.
pub const REFUSAL_TOLD_PAUSE: Micros = Micros::from_secs(60);
/// Maximum number of refusals that are logged within [`REFUSAL_TOLD_PAUSE`].
pub const REFUSALS_TOLD_MAX: usize = 64;

/// Time of recently logged refusals, by task and error code.
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

/// Returns the record of an attempt that failed because of a limit.
pub(super) fn limit(sentence: String) -> PlacementAttempt {
    PlacementAttempt {
        rule: PlacementRule::Limit,
        reason: sentence,
        rejected: Vec::new(),
    }
}

fn only(error: PvmError) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(error.code());
    body.finish()
}

impl Spawns {
    /// Answers a request with an error. Nothing is logged.
    pub fn refuse(&mut self, to: Tid, wid: i32, error: PvmError) {
        self.out.push_back(Output::Reply {
            to,
            wid,
            body: only(error),
        });
    }

    /// Answers a request with an error and logs why.
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
