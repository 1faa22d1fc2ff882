//! Waiting awake for the answer of another host.
//!
//! Between a small message to another host and its answer four processes are woken, and here a processor that sleeps takes
//! longer to wake than the daemons take for all their work. So a daemon that has passed on a question stays awake for a
//! little while, when that has paid off lately; one that has passed on an answer to its task sleeps at once, because now it
//! is the task that needs the processor.

use sempa_proto::host::Carried;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_socket::{Reach, Spin};
use std::time::{Duration, Instant};

/// Longer frames are parts of transfers, which keep the machines awake by themselves.
const QUESTION_BYTES_MAX: usize = 4 << 10;

/// The daemon's own: all hosts are one to it.
#[derive(Debug)]
pub(crate) struct Vigil {
    spin: Spin,
    /// Since when an answer is waited for, and how long awake; `None`: asleep.
    open: Option<(Instant, Option<Duration>)>,
}

impl Vigil {
    /// None is kept.
    pub(crate) fn new() -> Vigil {
        Vigil {
            spin: Spin::new(Reach::Daemons),
            open: None,
        }
    }

    /// This has been sent to another host.
    pub(crate) fn sent(&mut self, carried: &Carried, now: Instant) {
        if is_small_data(carried) && self.open.is_none_or(|(_, awake)| awake.is_none()) {
            self.open = Some((now, self.spin.budget(None, Reach::Daemons)));
        }
    }

    /// This has come from another host.
    pub(crate) fn heard(&mut self, carried: &Carried, now: Instant) {
        match self.open.take_if(|_| is_small_data(carried)) {
            Some((since, Some(budget))) => self.spin.ended(now.duration_since(since), budget),
            Some((since, None)) => self.spin.slept(now.duration_since(since)),
            None => {}
        }
    }

    /// Lets whoever else is ready on this processor have it: he may be the one who has to answer.
    pub(crate) fn give_way(&mut self) {
        self.spin.give_way();
    }

    /// True as long as an answer is to be waited for awake.
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

/// True for what a task says in a few words; not for what the links of tasks have to say to each other.
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

    /// Between two looks at the clock.
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

    /// A vigil on a machine with more than one processor, wherever this test runs; and a time.
    fn vigil() -> (Vigil, Instant) {
        (
            Vigil {
                spin: Spin::with_company(Reach::Daemons),
                open: None,
            },
            Instant::now(),
        )
    }

    #[test]
    fn a_daemon_stays_awake_from_a_question_to_its_answer() {
        let (mut vigil, begin) = vigil();
        for round in 0..1000 {
            let now = begin + Duration::from_millis(round);
            assert!(!vigil.lasts(now), "nobody has asked");
            vigil.sent(&question(), now);
            assert!(vigil.lasts(now + Duration::from_micros(40)));
            vigil.heard(&question(), now + Duration::from_micros(50));
        }
    }

    #[test]
    fn what_links_say_to_each_other_and_parts_of_transfers_keep_nobody_awake() {
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

    #[test]
    fn messages_that_nobody_answers_cost_next_to_nothing() {
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

    #[test]
    fn answers_that_come_soon_to_one_who_sleeps_wake_it_for_the_next() {
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
