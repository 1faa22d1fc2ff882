//! Streams for pairs of tasks, and the order that holds across all streams of a session. Pure
//! values, without sockets.
//!
//! The machine relies on parts of the order in which one daemon sends to another: the exit notice
//! of a task follows all that the task has sent, and during a migration a [`DataMsg::RouteDrained`]
//! separates items for the old location from items for the new one. A single stream would keep that
//! order, but a frame for one task would then wait for all data for other tasks, and for the
//! retransmission of every datagram lost for them. A pair of tasks that exchanges more than a few
//! frames therefore gets a stream of its own, a *lane*. Fences keep the necessary order:
//!
//! - A control item (everything but a link frame) travels on the main stream. A barrier before it
//!   states how many frames each lane that it concerns has carried so far. The receiver holds the
//!   control item until it has received these frames.
//! - If a frame follows such an item on its lane, a barrier before it states the item's position in
//!   the main stream. The receiver holds the lane until it has passed that position.
//! - A lane ends with an entry on the main stream. Later frames of the pair, on any stream, are
//!   ordered after that entry.
//!
//! Frames of different pairs may overtake each other; nothing relies on their order. [`Fork`] is
//! the sending side, [`Join`] the receiving side. Fences cannot deadlock, because each one refers
//! only to what was sent before it.

use rustc_hash::FxHashMap;
use sempa_proto::Tid;
use sempa_proto::host::DataMsg;
use sempa_proto::link::{LINK_HEAD_BYTES, LinkFrame};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Largest number of lanes in one direction of a session. Further pairs share the main stream,
/// where each pair waits for all others and for control items. A lane in use costs each daemon
/// about 80 KB: an incomplete frame, and buffers for batches of frames.
pub const LANES_MAX: usize = 512;
/// Number of frames that a pair sends on the main stream before it gets a lane. A few frames are
/// not worth a stream.
const FRAMES_BEFORE: u32 = 4;
/// Largest number of pairs whose frames are counted for that. When it is reached, counting starts
/// again from zero.
const COUNTED_MAX: usize = 4096;
/// A lane without frames for this time ends.
const IDLE: Duration = Duration::from_secs(30);

/// Number of a lane. It is never reused in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u32);

/// A position on a lane: the number of frames that it has carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub lane: LaneId,
    pub frames: u64,
}

/// An entry of the main stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Main<T> {
    /// A control item, or a frame of a pair without a lane.
    Item(T),
    /// Barrier: the next entry must wait until these positions are reached.
    After(Vec<Mark>),
    /// The lane ends at this position.
    End(Mark),
}

/// An entry of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lane<T> {
    Item(T),
    /// Barrier: the next entry must wait until this number of main stream entries has passed.
    Behind(u64),
}

/// The ends of a link: sender and receiver.
pub type Ends = (Tid, Tid);

/// Returns the ends of a link frame, or `None` if the bytes are not a valid frame.
pub fn ends_of(body: &[u8]) -> Option<Ends> {
    let head: &[u8; LINK_HEAD_BYTES] = body.first_chunk()?;
    // Invalid bytes are forwarded as well: the machine at the other end reports them.
    if LinkFrame::kind_of(head).is_none() || head[2..4] != [0, 0] {
        return None;
    }
    let tid = |at: usize| {
        head[at..]
            .first_chunk()
            .map(|raw| Tid::from_raw(i32::from_le_bytes(*raw)))
    };
    Some((tid(4)?, tid(8)?))
}

/// The stream on which a frame must be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Main,
    /// A lane. `new`: open it first. `behind`: send a barrier with this number first.
    Lane {
        lane: LaneId,
        new: bool,
        behind: Option<u64>,
    },
}

#[derive(Debug)]
struct Out {
    lane: LaneId,
    /// Number of frames sent.
    frames: u64,
    /// Number of frames that the latest barrier on the main stream covers.
    fenced: u64,
    /// Number of main stream entries that the next frame must wait for; `told` is the last such
    /// number that was sent.
    behind: u64,
    told: u64,
    used: Instant,
}

/// Sending side of a session.
#[derive(Debug, Default)]
pub struct Fork {
    lanes: FxHashMap<Ends, Out>,
    counted: FxHashMap<Ends, u32>,
    last: u32,
    /// Number of entries sent on the main stream.
    main: u64,
}

impl Fork {
    /// Returns the stream for the next frame of this pair. [`Fork::sent`] must be called after a
    /// frame was put on a lane.
    pub fn way(&mut self, ends: Ends, now: Instant) -> Way {
        let new = !self.lanes.contains_key(&ends);
        if new && !self.deserves(ends) {
            return Way::Main;
        }
        let (main, last) = (self.main, &mut self.last);
        let out = self.lanes.entry(ends).or_insert_with(|| {
            *last += 1;
            // Earlier frames of the pair were sent on the main stream, or on a lane that ended
            // there.
            Out {
                lane: LaneId(*last),
                frames: 0,
                fenced: 0,
                behind: main,
                told: 0,
                used: now,
            }
        });
        out.used = now;
        let behind = (out.behind > out.told).then_some(out.behind);
        out.told = out.behind;
        Way::Lane {
            lane: out.lane,
            new,
            behind,
        }
    }

    fn deserves(&mut self, ends: Ends) -> bool {
        if self.lanes.len() >= LANES_MAX {
            return false;
        }
        if self.counted.len() >= COUNTED_MAX {
            self.counted.clear();
        }
        let frames = self.counted.entry(ends).or_default();
        *frames += 1;
        if *frames <= FRAMES_BEFORE {
            return false;
        }
        self.counted.remove(&ends);
        true
    }

    /// Counts a frame that was put on the lane of its pair.
    pub fn sent(&mut self, ends: Ends) {
        if let Some(out) = self.lanes.get_mut(&ends) {
            out.frames += 1;
        }
    }

    /// Counts an entry that was put on the main stream.
    pub fn sent_main(&mut self) {
        self.main += 1;
    }

    /// Returns the barrier for a control item that is sent next, if it needs one. The barrier and
    /// the item must be sent on the main stream immediately, as two entries.
    pub fn fence(&mut self, word: &DataMsg) -> Option<Vec<Mark>> {
        let (task, sends_too) = match word {
            DataMsg::Frame(_) => return None,
            DataMsg::Ended { dst, .. } => (*dst, true),
            DataMsg::Item { dst, .. }
            | DataMsg::RouteDrained { dst, .. }
            | DataMsg::Record { dst, .. }
            | DataMsg::Forwarded { dst, .. }
            | DataMsg::ForwardedAll { dst, .. } => (*dst, false),
        };
        let mut marks = Vec::new();
        let mut concerned: Vec<&mut Out> = Vec::new();
        for ((src, dst), out) in &mut self.lanes {
            if *dst != task && !(sends_too && *src == task) {
                continue;
            }
            if out.frames > out.fenced {
                out.fenced = out.frames;
                marks.push(Mark {
                    lane: out.lane,
                    frames: out.frames,
                });
            }
            concerned.push(out);
        }
        // Counts the barrier and the control item.
        let behind = self.main + u64::from(!marks.is_empty()) + 1;
        concerned.into_iter().for_each(|out| out.behind = behind);
        (!marks.is_empty()).then_some(marks)
    }

    /// Ends lanes: those that are idle, or with `task` those that lead to or from that task. Each
    /// returned position must be sent on the main stream as [`Main::End`].
    pub fn close(&mut self, now: Instant, task: Option<Tid>) -> Vec<Mark> {
        let over = |(src, dst): &Ends, out: &Out| match task {
            Some(task) => *src == task || *dst == task,
            None => now.duration_since(out.used) >= IDLE,
        };
        let closed = self.lanes.extract_if(|ends, out| over(ends, out));
        closed
            .map(|(_, out)| Mark {
                lane: out.lane,
                frames: out.frames,
            })
            .collect()
    }
}

#[derive(Debug)]
struct In<T> {
    /// Number of frames released.
    frames: u64,
    held: VecDeque<Lane<T>>,
}

/// Receiving side of a session. Entries of all streams go in as they arrive; items come out in an
/// order that respects every fence.
#[derive(Debug)]
pub struct Join<T> {
    /// Number of main stream entries that have passed.
    main: u64,
    held: VecDeque<Main<T>>,
    lanes: FxHashMap<LaneId, In<T>>,
    /// Number of lanes that hold entries.
    waiting: usize,
    out: VecDeque<T>,
}

impl<T> Default for Join<T> {
    fn default() -> Join<T> {
        Join {
            main: 0,
            held: VecDeque::new(),
            lanes: FxHashMap::default(),
            waiting: 0,
            out: VecDeque::new(),
        }
    }
}

impl<T> Join<T> {
    /// Accepts the next entry of the main stream.
    pub fn take_main(&mut self, parcel: Main<T>) {
        self.held.push_back(parcel);
        self.settle();
    }

    /// Accepts the next entry of a lane.
    pub fn take_lane(&mut self, lane: LaneId, parcel: Lane<T>) {
        let into = self.lanes.entry(lane).or_insert_with(In::new);
        if !into.held.is_empty() {
            into.held.push_back(parcel);
            return;
        }
        match parcel {
            Lane::Item(item) => {
                into.frames += 1;
                self.out.push_back(item);
            }
            Lane::Behind(main) if main <= self.main => {}
            Lane::Behind(_) => {
                into.held.push_back(parcel);
                self.waiting += 1;
            }
        }
        if !self.held.is_empty() {
            self.settle();
        }
    }

    /// Returns the next item that no fence holds.
    pub fn pop(&mut self) -> Option<T> {
        self.out.pop_front()
    }

    /// Releases everything that no fence holds any more.
    fn settle(&mut self) {
        loop {
            let before = self.main;
            while let Some(parcel) = self.held.pop_front() {
                if let Some(parcel) = self.pass(parcel) {
                    self.held.push_front(parcel);
                    break;
                }
            }
            if self.main == before || self.waiting == 0 || !self.go_on() {
                return;
            }
        }
    }

    /// Lets an entry of the main stream pass, or returns it if it must wait.
    fn pass(&mut self, parcel: Main<T>) -> Option<Main<T>> {
        let lanes = &self.lanes;
        let reached =
            |mark: &Mark| lanes.get(&mark.lane).map_or(0, |lane| lane.frames) >= mark.frames;
        match parcel {
            Main::After(marks) if !marks.iter().all(reached) => return Some(Main::After(marks)),
            Main::End(mark) if !reached(&mark) => return Some(Main::End(mark)),
            Main::End(mark) => {
                if self
                    .lanes
                    .remove(&mark.lane)
                    .is_some_and(|lane| !lane.held.is_empty())
                {
                    self.waiting -= 1;
                }
            }
            Main::After(_) => {}
            Main::Item(item) => self.out.push_back(item),
        }
        self.main += 1;
        None
    }

    /// Releases lane entries whose barrier has been passed. True if a frame was among them.
    fn go_on(&mut self) -> bool {
        let (mut moved, main) = (false, self.main);
        for lane in self.lanes.values_mut().filter(|lane| !lane.held.is_empty()) {
            while let Some(parcel) = lane.held.pop_front() {
                match parcel {
                    Lane::Behind(word) if word > main => {
                        lane.held.push_front(parcel);
                        break;
                    }
                    Lane::Behind(_) => {}
                    Lane::Item(item) => {
                        lane.frames += 1;
                        moved = true;
                        self.out.push_back(item);
                    }
                }
            }
            self.waiting -= usize::from(lane.held.is_empty());
        }
        moved
    }
}

impl<T> In<T> {
    fn new() -> In<T> {
        In {
            frames: 0,
            held: VecDeque::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;
    use sempa_proto::Epoch;
    use sempa_proto::task::ToTask;
    use std::collections::BTreeMap;

    /// Number of tasks in these tests. Each may send to every other one.
    const TASKS: i32 = 4;

    fn task(n: i32) -> Tid {
        Tid::from_raw(0x40000 + n)
    }

    /// An action on the sending side, or an arrival.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        Frame(i32, i32),
        /// A control item for a task.
        Item(i32),
        /// The task migrates: later items for it take another route.
        Passed(i32),
        Ended(i32),
        /// Time passes until lanes are idle.
        Pause,
        /// Entries arrive: the number of their stream, in the order of opening, and how many at
        /// most.
        Arrive(usize, usize),
    }

    /// What was sent, in order: a frame with its ends, or a control item with its task and whether
    /// that task has ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Sent {
        Frame(Ends),
        Word(Tid, bool),
    }

    /// A session that connects a sending and a receiving side. Its streams deliver entries when the
    /// test requests it.
    #[derive(Default)]
    struct Session {
        fork: Fork,
        join: Join<usize>,
        main: VecDeque<Main<usize>>,
        lanes: BTreeMap<LaneId, VecDeque<Lane<usize>>>,
        sent: Vec<Sent>,
        came: Vec<usize>,
        opened: usize,
    }

    impl Session {
        fn put_main(&mut self, parcel: Main<usize>) {
            self.main.push_back(parcel);
            self.fork.sent_main();
        }

        fn frame(&mut self, ends: Ends, now: Instant) {
            let number = self.sent.len();
            self.sent.push(Sent::Frame(ends));
            match self.fork.way(ends, now) {
                Way::Main => self.put_main(Main::Item(number)),
                Way::Lane { lane, new, behind } => {
                    assert_eq!(new, !self.lanes.contains_key(&lane));
                    self.opened += usize::from(new);
                    let stream = self.lanes.entry(lane).or_default();
                    stream.extend(behind.map(Lane::Behind));
                    stream.push_back(Lane::Item(number));
                    self.fork.sent(ends);
                }
            }
        }

        fn word(&mut self, word: &DataMsg, about: Tid, now: Instant) {
            let ended = matches!(word, DataMsg::Ended { .. });
            let number = self.sent.len();
            self.sent.push(Sent::Word(about, ended));
            if let Some(marks) = self.fork.fence(word) {
                self.put_main(Main::After(marks));
            }
            self.put_main(Main::Item(number));
            if ended {
                self.close(now, Some(about));
            }
        }

        fn close(&mut self, now: Instant, task: Option<Tid>) {
            for mark in self.fork.close(now, task) {
                self.put_main(Main::End(mark));
            }
        }

        fn arrive(&mut self, stream: usize, count: usize) {
            for _ in 0..count {
                if stream == 0 {
                    let Some(parcel) = self.main.pop_front() else {
                        break;
                    };
                    self.join.take_main(parcel);
                } else {
                    let Some((lane, stream)) =
                        self.lanes.iter_mut().nth((stream - 1) % TASKS as usize)
                    else {
                        break;
                    };
                    let Some(parcel) = stream.pop_front() else {
                        break;
                    };
                    self.join.take_lane(*lane, parcel);
                }
                self.came.extend(std::iter::from_fn(|| self.join.pop()));
            }
        }

        fn act(&mut self, act: Act, now: &mut Instant) {
            match act {
                Act::Frame(src, dst) => self.frame((task(src), task(dst)), *now),
                Act::Item(n) => {
                    self.word(
                        &DataMsg::Item {
                            dst: task(n),
                            item: ToTask::PeerGone { tid: task(0) },
                        },
                        task(n),
                        *now,
                    );
                }
                Act::Passed(n) => self.word(
                    &DataMsg::RouteDrained {
                        dst: task(n),
                        epoch: Epoch(1),
                    },
                    task(n),
                    *now,
                ),
                Act::Ended(n) => self.word(
                    &DataMsg::Ended {
                        dst: task(n),
                        watermarks: Vec::new(),
                    },
                    task(n),
                    *now,
                ),
                Act::Pause => {
                    *now += IDLE;
                    self.close(*now, None);
                }
                Act::Arrive(stream, count) => self.arrive(stream, count),
            }
        }

        /// Delivers all remaining entries: first the main stream, then the lanes in reverse order.
        fn finish(&mut self) {
            self.arrive(0, usize::MAX);
            let lanes: Vec<LaneId> = self.lanes.keys().rev().copied().collect();
            for lane in lanes {
                for parcel in std::mem::take(self.lanes.get_mut(&lane).expect("it is in the list"))
                {
                    self.join.take_lane(lane, parcel);
                    self.came.extend(std::iter::from_fn(|| self.join.pop()));
                }
            }
        }

        /// True if these two must arrive in the order in which they were sent.
        fn are_bound(&self, a: usize, b: usize) -> bool {
            match (self.sent[a], self.sent[b]) {
                (Sent::Frame(one), Sent::Frame(other)) => one == other,
                (Sent::Word(..), Sent::Word(..)) => true,
                (Sent::Frame((src, dst)), Sent::Word(task, ended)) => {
                    dst == task || (ended && src == task)
                }
                (Sent::Word(task, ended), Sent::Frame((src, dst))) => {
                    dst == task || (ended && src == task)
                }
            }
        }

        fn check(&self) {
            let mut place = vec![None; self.sent.len()];
            for (at, number) in self.came.iter().enumerate() {
                assert_eq!(place[*number].replace(at), None, "{number} came twice");
            }
            for b in 0..self.sent.len() {
                assert!(place[b].is_some(), "{b} never came: {:?}", self.sent[b]);
                for a in (0..b).filter(|a| self.are_bound(*a, b)) {
                    assert!(
                        place[a] < place[b],
                        "{a} {:?} came behind {b} {:?}",
                        self.sent[a],
                        self.sent[b]
                    );
                }
            }
        }
    }

    fn act() -> impl Strategy<Value = Act> {
        let n = || 0..TASKS;
        prop_oneof![
            12 => (n(), n()).prop_map(|(src, dst)| Act::Frame(src, dst)),
            1 => n().prop_map(Act::Item),
            1 => n().prop_map(Act::Passed),
            1 => n().prop_map(Act::Ended),
            1 => Just(Act::Pause),
            6 => (0..=TASKS as usize, 1..6usize).prop_map(|(stream, count)| Act::Arrive(stream, count)),
        ]
    }

    proptest! {
        /// In whatever order the streams deliver, frames and control items that concern the same
        /// task keep their order.
        #[test]
        fn streams_in_any_order_keep_fenced_order(
            acts in prop::collection::vec(act(), 0..200)
        ) {
            let (mut session, mut now) = (Session::default(), Instant::now());
            acts.into_iter().for_each(|act| session.act(act, &mut now));
            session.finish();
            session.check();
        }
    }

    /// A lane that delivers nothing blocks only the control items that must follow its frames.
    #[test]
    fn stalled_lane_blocks_only_what_follows_it() {
        let (mut session, mut now) = (Session::default(), Instant::now());
        for _ in 0..10 {
            session.act(Act::Frame(0, 1), &mut now);
            session.act(Act::Frame(0, 2), &mut now);
        }
        assert_eq!(session.opened, 2);
        session.arrive(0, usize::MAX);
        // Stream 2 is the lane from 0 to 2. The lane from 0 to 1 delivers nothing.
        session.arrive(2, usize::MAX);
        let came = 10 + FRAMES_BEFORE as usize;
        assert_eq!(session.came.len(), came, "another pair's frames wait");
        session.act(Act::Item(2), &mut now);
        session.arrive(0, usize::MAX);
        assert_eq!(
            session.came.len(),
            came + 1,
            "a word for another task waits"
        );
        session.act(Act::Item(1), &mut now);
        session.arrive(0, usize::MAX);
        assert_eq!(
            session.came.len(),
            came + 1,
            "a word has overtaken what it is behind"
        );
        session.finish();
        session.check();
    }

    /// The number of lanes is limited. Lanes end when they are idle or their task ends.
    #[test]
    fn lanes_are_limited_and_end_when_unused() {
        let (mut fork, now) = (Fork::default(), Instant::now());
        let ends = |n: usize| (task(n as i32), task(-1));
        let is_lane = |fork: &mut Fork, n| {
            (0..=FRAMES_BEFORE)
                .map(|_| fork.way(ends(n), now))
                .any(|w| w != Way::Main)
        };
        let lanes = (0..2 * LANES_MAX)
            .filter(|n| is_lane(&mut fork, *n))
            .count();
        assert_eq!(lanes, LANES_MAX);
        assert_eq!(fork.close(now, Some(task(0))).len(), 1);
        assert!(is_lane(&mut fork, 2 * LANES_MAX));
        assert_eq!(fork.close(now + IDLE, None).len(), LANES_MAX);
        assert!(fork.lanes.is_empty());
        for n in 0..2 * COUNTED_MAX {
            fork.way(ends(n), now);
            assert!(fork.counted.len() <= COUNTED_MAX);
        }
    }

    /// The ends of a link are read from the header of a valid frame only.
    #[test]
    fn ends_are_read_from_the_frame_header() {
        use sempa_proto::link::{LinkFrame, LinkKind};
        let (src, dst) = (task(1), task(2));
        let frame = LinkFrame {
            src,
            dst,
            kind: LinkKind::Probe,
            seq: 7,
            ack: 9,
            incarnation: 0,
            payload: Bytes::new(),
        };
        assert_eq!(ends_of(&frame.encode_head()), Some((src, dst)));
        assert_eq!(ends_of(&frame.encode_head()[1..]), None);
        assert_eq!(ends_of(&[1; LINK_HEAD_BYTES]), None);
    }
}
