//! Spins while the daemon waits for a reply from another host.
//!
//! A small request to another host and the reply to it wake four processes. Waking a sleeping
//! processor takes longer than all of the daemons' work. Therefore a daemon that has forwarded a
//! request stays awake for a short time if spinning was successful recently. A daemon that has
//! forwarded a reply to its task sleeps immediately, because the task needs the processor.

use sempa_proto::host::DataMsg;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_socket::{SenderDistance, SpinBudget};
use std::time::{Duration, Instant};

/// Maximum payload of a frame that counts as a request or reply. Larger frames belong to bulk
/// transfers, during which both hosts stay awake without spinning.
const REQUEST_BYTES_MAX: usize = 4 << 10;

/// The daemon's state of spinning. There is one state for all other hosts.
#[derive(Debug)]
pub(crate) struct ReplySpinner {
    spin_budget: SpinBudget,
    /// Time at which the pending request was sent, and the duration of spinning for the reply to
    /// it. The inner `None` means that the daemon sleeps instead of spinning.
    pending_request: Option<(Instant, Option<Duration>)>,
}

impl ReplySpinner {
    pub(crate) fn new() -> Self {
        Self {
            spin_budget: SpinBudget::new(SenderDistance::RemoteDaemons),
            pending_request: None,
        }
    }

    /// Starts to wait for a reply if `message`, which the daemon sends to another host, is a small
    /// data frame. A wait in which the daemon spins is not restarted.
    pub(crate) fn on_request(&mut self, message: &DataMsg, now: Instant) {
        if is_small_data(message)
            && self
                .pending_request
                .is_none_or(|(_, spin_duration)| spin_duration.is_none())
        {
            self.pending_request = Some((
                now,
                self.spin_budget
                    .next_budget(None, SenderDistance::RemoteDaemons),
            ));
        }
    }

    /// Ends the wait if `message`, which has arrived from another host, is a small data frame.
    /// Adapts the spin budget to the duration of the wait.
    pub(crate) fn on_reply(&mut self, message: &DataMsg, now: Instant) {
        match self.pending_request.take_if(|_| is_small_data(message)) {
            Some((requested_at, Some(budget))) => self
                .spin_budget
                .record_spin(now.duration_since(requested_at), budget),
            Some((requested_at, None)) => self
                .spin_budget
                .record_sleep(now.duration_since(requested_at)),
            None => {}
        }
    }

    /// Yields the processor to other runnable threads, because one of these threads may produce the
    /// reply.
    pub(crate) fn yield_cpu(&mut self) {
        self.spin_budget.yield_cpu();
    }

    /// Returns true while the daemon should spin for a reply. When the duration of spinning has
    /// passed, ends the wait, records a miss and returns false.
    pub(crate) fn should_spin(&mut self, now: Instant) -> bool {
        let Some((requested_at, Some(spin_budget))) = self.pending_request else {
            return false;
        };
        if now.duration_since(requested_at) <= spin_budget {
            return true;
        }
        self.spin_budget.record_miss();
        self.pending_request = None;
        false
    }
}

/// True for small data frames of tasks. False for large frames and for the links' control frames.
fn is_small_data(message: &DataMsg) -> bool {
    let DataMsg::Frame(body) = message else {
        return false;
    };
    body.len() <= REQUEST_BYTES_MAX
        && matches!(LinkFrame::peek_kind(body), Some(LinkKind::Data { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use sempa_proto::Tid;

    /// Simulated time between two clock reads.
    const POLL_INTERVAL: Duration = Duration::from_micros(10);

    fn data_message(kind: LinkKind, bytes: usize) -> DataMsg {
        let (src, dst) = (Tid::from_raw(0x40001), Tid::from_raw(0x80001));
        let head = LinkFrame {
            src,
            dst,
            kind,
            seq: 1,
            ack: 1,
            incarnation: 0,
            payload: Bytes::new(),
        }
        .encode_head();
        DataMsg::Frame([&head[..], &vec![0; bytes]].concat().into())
    }

    fn small_request() -> DataMsg {
        data_message(LinkKind::Data { is_last: true }, 8)
    }

    /// Returns a spinner that assumes more than one processor, and the start time of the test.
    fn new_spinner() -> (ReplySpinner, Instant) {
        (
            ReplySpinner {
                spin_budget: SpinBudget::for_multiprocessor(SenderDistance::RemoteDaemons),
                pending_request: None,
            },
            Instant::now(),
        )
    }

    /// The daemon spins from a small request until its reply arrives.
    #[test]
    fn spins_from_request_to_reply() {
        let (mut spinner, started_at) = new_spinner();
        for round in 0..1000 {
            let now = started_at + Duration::from_millis(round);
            assert!(!spinner.should_spin(now), "nobody has asked");
            spinner.on_request(&small_request(), now);
            assert!(spinner.should_spin(now + Duration::from_micros(40)));
            spinner.on_reply(&small_request(), now + Duration::from_micros(50));
        }
    }

    /// Acknowledgements and fragments of large messages neither start nor end a wait.
    #[test]
    fn acks_and_bulk_fragments_do_not_count() {
        let (mut spinner, now) = new_spinner();
        for unrelated_message in [
            data_message(
                LinkKind::Ack {
                    requests_resync: false,
                },
                0,
            ),
            data_message(LinkKind::Data { is_last: false }, 64 << 10),
        ] {
            spinner.on_request(&unrelated_message, now);
            assert!(!spinner.should_spin(now));
            spinner.on_request(&small_request(), now);
            spinner.on_reply(&unrelated_message, now);
            assert!(spinner.should_spin(now), "that was no answer");
            spinner.on_reply(&small_request(), now);
        }
    }

    /// A thousand requests without replies per second cause less than 300 ms of spinning in 100 s.
    #[test]
    fn unanswered_requests_cost_little_spinning() {
        let (mut spinner, started_at) = new_spinner();
        let mut spin_time = Duration::ZERO;
        for round in 0..100_000 {
            let now = started_at + Duration::from_millis(round);
            spinner.on_request(&small_request(), now);
            spin_time += (0..50)
                .map(|poll_number| now + poll_number * POLL_INTERVAL)
                .take_while(|now| spinner.should_spin(*now))
                .count() as u32
                * POLL_INTERVAL;
        }
        assert!(
            spin_time < Duration::from_millis(300),
            "{spin_time:?} of 100 s"
        );
    }

    /// If a reply arrives quickly while the daemon sleeps, the daemon spins for the next request.
    #[test]
    fn quick_replies_restart_spinning() {
        let (mut spinner, started_at) = new_spinner();
        let time_at_ms = |ms| started_at + Duration::from_millis(ms);
        for ms in 0..100 {
            spinner.on_request(&small_request(), time_at_ms(ms));
            spinner.should_spin(time_at_ms(ms) + Duration::from_micros(900));
        }
        spinner.on_request(&small_request(), time_at_ms(200));
        assert!(!spinner.should_spin(time_at_ms(200)));
        spinner.on_reply(
            &small_request(),
            time_at_ms(200) + Duration::from_micros(120),
        );
        spinner.on_request(&small_request(), time_at_ms(201));
        assert!(spinner.should_spin(time_at_ms(201)));
    }
}
