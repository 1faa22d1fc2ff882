//! Requests that are refused when they arrive, and the log entries about them. A program that
//! repeats its request must not flood the event log. The same refusal is therefore logged once per
//! interval, and the number of refusals that are logged per interval is limited.

use super::{IncomingSpawn, SpawnOutput, Spawns};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::rm::{PlacementAttempt, PlacementRule};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Interval in which the same refusal of the same task is logged only once.
pub const REFUSAL_LOG_INTERVAL: Micros = Micros::from_secs(60);
/// Maximum number of refusals that are logged within [`REFUSAL_LOG_INTERVAL`].
pub const LOGGED_REFUSALS_MAX: usize = 64;

/// Time of recently logged refusals, by task and error code.
#[derive(Debug, Default)]
pub(super) struct RefusalLog(BTreeMap<(Tid, i32), Micros>);

impl RefusalLog {
    fn should_log(&mut self, now: Micros, refusal_key: (Tid, i32)) -> bool {
        self.0
            .retain(|_, logged_at| now.since(*logged_at) < REFUSAL_LOG_INTERVAL);
        let is_new = self.0.len() < LOGGED_REFUSALS_MAX && !self.0.contains_key(&refusal_key);
        if is_new {
            self.0.insert(refusal_key, now);
        }
        is_new
    }
}

/// Returns the record of an attempt that failed because of a limit.
pub(super) fn limit_attempt(reason_text: String) -> PlacementAttempt {
    PlacementAttempt {
        rule: PlacementRule::Limit,
        reason: reason_text,
        rejected_hosts: Vec::new(),
    }
}

fn error_body(error: PvmError) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(error.code());
    body.finish()
}

impl Spawns {
    /// Replies to a request with an error. Nothing is logged.
    pub fn reply_error(&mut self, requester: Tid, wid: i32, error: PvmError) {
        self.outputs.push_back(SpawnOutput::Reply {
            requester,
            wid,
            body: error_body(error),
        });
    }

    /// Replies to a request with an error and logs the reason, unless `RefusalLog` prevents the
    /// log entry.
    pub fn reply_error_and_log(
        &mut self,
        now: Micros,
        incoming_spawn: &IncomingSpawn,
        error: PvmError,
        reason: String,
    ) {
        self.reply_error(incoming_spawn.requester, incoming_spawn.wait_id, error);
        if !self
            .refusals
            .should_log(now, (incoming_spawn.requester, error.code()))
        {
            return;
        }
        let note = incoming_spawn.failure_event(error, &reason);
        self.outputs.push_back(incoming_spawn.decision_output(
            Vec::new(),
            Some(error),
            incoming_spawn.earlier_wait,
            vec![limit_attempt(reason)],
        ));
        self.outputs.push_back(SpawnOutput::LogEvent(note));
    }
}
