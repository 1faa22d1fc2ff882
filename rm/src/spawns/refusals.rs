//! Requests that are refused when they arrive, and the log entries about them. So that a program
//! that repeats its request cannot flood the event log, the same refusal is logged once per
//! interval, and the total number of logged refusals is limited.

use super::{SpawnIncoming, SpawnOutput, Spawns};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::rm::{PlacementAttempt, PlacementRule};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Interval in which the same refusal of the same task is logged only once.
pub const REFUSAL_LOG_INTERVAL: Micros = Micros::from_secs(60);
/// Maximum number of refusals that are logged within [`REFUSAL_LOG_INTERVAL`].
pub const REFUSALS_LOGGED_MAX: usize = 64;

/// Time of recently logged refusals, by task and error code.
#[derive(Debug, Default)]
pub(super) struct RefusalLog(BTreeMap<(Tid, i32), Micros>);

impl RefusalLog {
    fn should_log(&mut self, now: Micros, of: (Tid, i32)) -> bool {
        self.0
            .retain(|_, told| now.since(*told) < REFUSAL_LOG_INTERVAL);
        let is_news = self.0.len() < REFUSALS_LOGGED_MAX && !self.0.contains_key(&of);
        if is_news {
            self.0.insert(of, now);
        }
        is_news
    }
}

/// Returns the record of an attempt that failed because of a limit.
pub(super) fn limit_attempt(sentence: String) -> PlacementAttempt {
    PlacementAttempt {
        rule: PlacementRule::Limit,
        reason: sentence,
        rejected: Vec::new(),
    }
}

fn error_body(error: PvmError) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(error.code());
    body.finish()
}

impl Spawns {
    /// Answers a request with an error. Nothing is logged.
    pub fn refuse(&mut self, to: Tid, wid: i32, error: PvmError) {
        self.outputs.push_back(SpawnOutput::Reply {
            to,
            wid,
            body: error_body(error),
        });
    }

    /// Answers a request with an error and logs why.
    pub fn refuse_and_log(
        &mut self,
        now: Micros,
        from: &SpawnIncoming,
        error: PvmError,
        why: String,
    ) {
        self.refuse(from.requester, from.wid, error);
        if !self
            .refusals
            .should_log(now, (from.requester, error.code()))
        {
            return;
        }
        let note = from.failure_event(error, &why);
        self.outputs.push_back(from.decision_output(
            Vec::new(),
            Some(error),
            from.waited,
            vec![limit_attempt(why)],
        ));
        self.outputs.push_back(SpawnOutput::LogEvent(note));
    }
}
