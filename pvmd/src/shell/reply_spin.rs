//! Spins while a reply from another host is awaited.
//!
//! A small request to another host and its reply wake four processes, and waking a sleeping
//! processor takes longer than all the daemons' work. A daemon that has forwarded a request
//! therefore stays awake for a short time if spinning paid off recently. A daemon that has
//! forwarded a reply to its task sleeps immediately, because the task needs the processor.

use sempa_proto::host::DataMsg;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_socket::{SenderDistance, SpinBudget};
use std::time::{Duration, Instant};

/// Larger frames belong to bulk transfers, which keep both hosts awake without spinning.
const REQUEST_BYTES_MAX: usize = 4 << 10;

/// The daemon's spin state. All other hosts share it.
#[derive(Debug)]
pub(crate) struct ReplySpinner {
    spin: SpinBudget,
    /// Time at which the pending request was sent, and the time to spin for its reply. The inner
    /// `None` means that the daemon sleeps instead.
    pending_request: Option<(Instant, Option<Duration>)>,
}

impl ReplySpinner {
    pub(crate) fn new() -> ReplySpinner {
        ReplySpinner {
            spin: SpinBudget::new(SenderDistance::RemoteDaemons),
            pending_request: None,
        }
    }

    /// Starts to wait for a reply if a small data frame was sent to another host.
    pub(crate) fn on_request(&mut self, carried: &DataMsg, now: Instant) {
        if is_small_data(carried)
            && self
                .pending_request
                .is_none_or(|(_, awake)| awake.is_none())
        {
            self.pending_request = Some((
                now,
                self.spin.next_budget(None, SenderDistance::RemoteDaemons),
            ));
        }
    }

    /// Ends the wait if a small data frame has arrived from another host, and learns from its
    /// duration.
    pub(crate) fn on_reply(&mut self, carried: &DataMsg, now: Instant) {
        match self.pending_request.take_if(|_| is_small_data(carried)) {
            Some((since, Some(budget))) => self.spin.record_spin(now.duration_since(since), budget),
            Some((since, None)) => self.spin.record_sleep(now.duration_since(since)),
            None => {}
        }
    }

    /// Yields the processor to other runnable threads: one of them may produce the reply.
    pub(crate) fn yield_cpu(&mut self) {
        self.spin.yield_cpu();
    }

    /// Returns true while the daemon should spin for a reply.
    pub(crate) fn should_spin(&mut self, now: Instant) -> bool {
        let Some((since, Some(spin_budget))) = self.pending_request else {
            return false;
        };
        if now.duration_since(since) <= spin_budget {
            return true;
        }
        self.spin.record_miss();
        self.pending_request = None;
        false
    }
}

/// True for small data frames of tasks. False for the links' own control frames.
fn is_small_data(carried: &DataMsg) -> bool {
    let DataMsg::Frame(body) = carried else {
        return false;
    };
    body.len() <= REQUEST_BYTES_MAX
        && matches!(LinkFrame::kind_of(body), Some(LinkKind::Data { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use sempa_proto::Tid;

    /// Simulated time between two clock reads.
    const POLL_INTERVAL: Duration = Duration::from_micros(10);

    fn frame(kind: LinkKind, bytes: usize) -> DataMsg {
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

    fn request() -> DataMsg {
        frame(LinkKind::Data { last: true }, 8)
    }

    /// Returns a spinner that assumes more than one processor, and a start time.
    fn new_spinner() -> (ReplySpinner, Instant) {
        (
            ReplySpinner {
                spin: SpinBudget::multiprocessor(SenderDistance::RemoteDaemons),
                pending_request: None,
            },
            Instant::now(),
        )
    }

    /// The daemon spins from a small request until its reply arrives.
    #[test]
    fn spins_from_request_to_reply() {
        let (mut spinner, begin) = new_spinner();
        for round in 0..1000 {
            let now = begin + Duration::from_millis(round);
            assert!(!spinner.should_spin(now), "nobody has asked");
            spinner.on_request(&request(), now);
            assert!(spinner.should_spin(now + Duration::from_micros(40)));
            spinner.on_reply(&request(), now + Duration::from_micros(50));
        }
    }

    /// Acknowledgements and fragments of large messages neither start a wait nor end one.
    #[test]
    fn acks_and_bulk_fragments_do_not_count() {
        let (mut spinner, now) = new_spinner();
        for other in [
            frame(LinkKind::Ack { resync: false }, 0),
            frame(LinkKind::Data { last: false }, 64 << 10),
        ] {
            spinner.on_request(&other, now);
            assert!(!spinner.should_spin(now));
            spinner.on_request(&request(), now);
            spinner.on_reply(&other, now);
            assert!(spinner.should_spin(now), "that was no answer");
            spinner.on_reply(&request(), now);
        }
    }

    /// Requests without replies cost less than 300 ms of spinning in 100 s.
    #[test]
    fn unanswered_requests_cost_little_spinning() {
        let (mut spinner, begin) = new_spinner();
        let mut awake = Duration::ZERO;
        for round in 0..100_000 {
            let now = begin + Duration::from_millis(round);
            spinner.on_request(&request(), now);
            awake += (0..50)
                .map(|look| now + look * POLL_INTERVAL)
                .take_while(|now| spinner.should_spin(*now))
                .count() as u32
                * POLL_INTERVAL;
        }
        assert!(awake < Duration::from_millis(300), "{awake:?} of 100 s");
    }

    /// A quick reply during sleep makes the daemon spin for the next request.
    #[test]
    fn quick_replies_restart_spinning() {
        let (mut spinner, begin) = new_spinner();
        let later = |ms| begin + Duration::from_millis(ms);
        for ms in 0..100 {
            spinner.on_request(&request(), later(ms));
            spinner.should_spin(later(ms) + Duration::from_micros(900));
        }
        spinner.on_request(&request(), later(200));
        assert!(!spinner.should_spin(later(200)));
        spinner.on_reply(&request(), later(200) + Duration::from_micros(120));
        spinner.on_request(&request(), later(201));
        assert!(spinner.should_spin(later(201)));
    }
}
