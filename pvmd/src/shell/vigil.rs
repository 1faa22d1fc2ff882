//! Spins while a reply from another host is awaited.
//!
//! A small request to another host and its reply wake four processes, and waking a sleeping
//! processor takes longer than all the daemons' work. A daemon that has forwarded a request
//! therefore stays awake for a short time if spinning paid off recently. A daemon that has
//! forwarded a reply to its task sleeps immediately, because the task needs the processor.

use sempa_proto::host::Carried;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_socket::{Reach, Spin};
use std::time::{Duration, Instant};

/// Larger frames belong to bulk transfers, which keep both hosts awake without spinning.
const QUESTION_BYTES_MAX: usize = 4 << 10;

/// The daemon's spin state. All other hosts share it.
#[derive(Debug)]
pub(crate) struct Vigil {
    spin: Spin,
    /// When the pending request was sent and the time to spin for its reply; the inner `None` means
    /// sleep.
    open: Option<(Instant, Option<Duration>)>,
}

impl Vigil {
    pub(crate) fn new() -> Vigil {
        Vigil {
            spin: Spin::new(Reach::Daemons),
            open: None,
        }
    }

    /// Starts to wait for a reply if a small data frame was sent to another host.
    pub(crate) fn sent(&mut self, carried: &Carried, now: Instant) {
        if is_small_data(carried) && self.open.is_none_or(|(_, awake)| awake.is_none()) {
            self.open = Some((now, self.spin.budget(None, Reach::Daemons)));
        }
    }

    /// Ends the wait if a small data frame came from another host, and learns from its duration.
    pub(crate) fn heard(&mut self, carried: &Carried, now: Instant) {
        match self.open.take_if(|_| is_small_data(carried)) {
            Some((since, Some(budget))) => self.spin.ended(now.duration_since(since), budget),
            Some((since, None)) => self.spin.slept(now.duration_since(since)),
            None => {}
        }
    }

    /// Yields the processor to other runnable threads: one of them may produce the reply.
    pub(crate) fn give_way(&mut self) {
        self.spin.give_way();
    }

    /// Returns true while the daemon should spin for a reply.
    pub(crate) fn lasts(&mut self, now: Instant) -> bool {
        let Some((since, Some(budget))) = self.open else {
            return false;
        };
        if now.duration_since(since) <= budget {
            return true;
        }
        self.spin.was_in_vain();
        self.open = None;
        false
    }
}

/// True for small data frames of tasks. False for the links' own control frames.
fn is_small_data(carried: &Carried) -> bool {
    let Carried::Link(body) = carried else {
        return false;
    };
    body.len() <= QUESTION_BYTES_MAX
        && matches!(LinkFrame::kind_of(body), Some(LinkKind::Data { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use sempa_proto::Tid;

    /// Simulated time between two clock reads.
    const LOOK: Duration = Duration::from_micros(10);

    fn frame(kind: LinkKind, bytes: usize) -> Carried {
        let (src, dst) = (Tid::from_raw(0x40001), Tid::from_raw(0x80001));
        let head = LinkFrame {
            src,
            dst,
            kind,
            seq: 1,
            ack: 1,
            line: 0,
            payload: Bytes::new(),
        }
        .encode_head();
        Carried::Link([&head[..], &vec![0; bytes]].concat().into())
    }

    fn question() -> Carried {
        frame(LinkKind::Data { last: true }, 8)
    }

    /// Returns a spinner that assumes more than one processor, and a start time.
    fn vigil() -> (Vigil, Instant) {
        (
            Vigil {
                spin: Spin::with_company(Reach::Daemons),
                open: None,
            },
            Instant::now(),
        )
    }

    /// The daemon spins from a small request until its reply arrives.
    #[test]
    fn spins_from_request_to_reply() {
        let (mut vigil, begin) = vigil();
        for round in 0..1000 {
            let now = begin + Duration::from_millis(round);
            assert!(!vigil.lasts(now), "nobody has asked");
            vigil.sent(&question(), now);
            assert!(vigil.lasts(now + Duration::from_micros(40)));
            vigil.heard(&question(), now + Duration::from_micros(50));
        }
    }

    /// Acknowledgements and fragments of large messages neither start a wait nor end one.
    #[test]
    fn acks_and_bulk_fragments_do_not_count() {
        let (mut vigil, now) = vigil();
        for other in [
            frame(LinkKind::Ack { resync: false }, 0),
            frame(LinkKind::Data { last: false }, 64 << 10),
        ] {
            vigil.sent(&other, now);
            assert!(!vigil.lasts(now));
            vigil.sent(&question(), now);
            vigil.heard(&other, now);
            assert!(vigil.lasts(now), "that was no answer");
            vigil.heard(&question(), now);
        }
    }

    /// Requests without replies cost less than 300 ms of spinning in 100 s.
    #[test]
    fn unanswered_requests_cost_little_spinning() {
        let (mut vigil, begin) = vigil();
        let mut awake = Duration::ZERO;
        for round in 0..100_000 {
            let now = begin + Duration::from_millis(round);
            vigil.sent(&question(), now);
            awake += (0..50)
                .map(|look| now + look * LOOK)
                .take_while(|now| vigil.lasts(*now))
                .count() as u32
                * LOOK;
        }
        assert!(awake < Duration::from_millis(300), "{awake:?} of 100 s");
    }

    /// A quick reply during sleep makes the daemon spin for the next request.
    #[test]
    fn quick_replies_restart_spinning() {
        let (mut vigil, begin) = vigil();
        let later = |ms| begin + Duration::from_millis(ms);
        for ms in 0..100 {
            vigil.sent(&question(), later(ms));
            vigil.lasts(later(ms) + Duration::from_micros(900));
        }
        vigil.sent(&question(), later(200));
        assert!(!vigil.lasts(later(200)));
        vigil.heard(&question(), later(200) + Duration::from_micros(120));
        vigil.sent(&question(), later(201));
        assert!(vigil.lasts(later(201)));
    }
}
