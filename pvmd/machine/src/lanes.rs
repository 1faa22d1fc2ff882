//! Streams of their own for pairs of tasks, and the order that holds over all streams of a session: pure values, without
//! sockets.
//!
//! All that one daemon has for another one went down one stream once, and the machine relies on its order: the end of a
//! task comes behind all that it sent, during a move a mark separates what went the old way from what goes the new one.
//! But what is for one task then waits behind everything for another one, and behind every datagram lost for it. So a pair
//! that has more than a few words to say gets a *lane*, and fences keep what of the order matters:
//!
//! * A word (anything but a link frame) goes down the main stream. In front of it stands how many frames each lane that
//!   concerns it has carried so far; the receiver keeps the word until it has taken as many.
//! * A frame that follows such a word on its lane has the word's number in front of it; the receiver keeps the lane until it
//!   has come to that word.
//! * A lane ends by a word, so what the pair says later, on whatever stream, comes behind it.
//!
//! What remains free is the order of frames of different pairs, which nobody relies on. [`Fork`] is the sender's side,
//! [`Join`] the receiver's. Nothing waits in a circle: a fence only ever points at what was sent before.

use rustc_hash::FxHashMap;
use sempa_proto::Tid;
use sempa_proto::host::Carried;
use sempa_proto::link::{LINK_HEAD_BYTES, LinkFrame};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Lanes of one session in one direction; further pairs share the main stream, where each waits for all others and for the
/// words between the machines. A lane that is used costs each of the two daemons some 80 KB: a frame that is not whole yet, and
/// room for batches of frames.
pub const LANES_MAX: usize = 512;
/// So many frames of a pair go down the main stream first: a word or two are not worth a stream.
const FRAMES_BEFORE: u32 = 4;
/// Pairs whose frames are counted for that. When there are more, counting begins anew.
const COUNTED_MAX: usize = 4096;
/// A lane that has carried nothing for so long ends.
const IDLE: Duration = Duration::from_secs(30);

/// Number of a lane; never used twice in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u32);

/// So many frames of this lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub lane: LaneId,
    pub frames: u64,
}

/// What the main stream carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Main<T> {
    /// A word, or a frame of a pair without a lane.
    Item(T),
    /// What follows comes behind these.
    After(Vec<Mark>),
    /// This lane carries no more than these.
    End(Mark),
}

/// What a lane carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lane<T> {
    /// A frame.
    Item(T),
    /// What follows comes behind so many parcels of the main stream.
    Behind(u64),
}

/// The two ends of a link: who sends, to whom.
pub type Ends = (Tid, Tid);

/// The ends that a link frame's body names, if it is one.
pub fn ends_of(body: &[u8]) -> Option<Ends> {
    let head: &[u8; LINK_HEAD_BYTES] = body.first_chunk()?;
    // What cannot be read is for the machine at the other end to complain of.
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

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Down the main stream.
    Main,
    /// Down this lane, which is opened for it when it is new, behind so many parcels of the main stream if that has to be said.
    Lane {
        lane: LaneId,
        new: bool,
        behind: Option<u64>,
    },
}

#[derive(Debug)]
struct Out {
    lane: LaneId,
    /// Frames that it has carried.
    frames: u64,
    /// How many of them the last word that concerned this lane was behind.
    fenced: u64,
    /// What is said next on it comes behind so many parcels of the main stream.
    behind: u64,
    told: u64,
    used: Instant,
}

/// The sender's side of a session.
#[derive(Debug, Default)]
pub struct Fork {
    lanes: FxHashMap<Ends, Out>,
    counted: FxHashMap<Ends, u32>,
    last: u32,
    /// Parcels that went down the main stream.
    main: u64,
}

impl Fork {
    /// Where a frame of this pair goes now; [`Fork::sent`] says that it did.
    pub fn way(&mut self, ends: Ends, now: Instant) -> Way {
        let new = !self.lanes.contains_key(&ends);
        if new && !self.deserves(ends) {
            return Way::Main;
        }
        let (main, last) = (self.main, &mut self.last);
        let out = self.lanes.entry(ends).or_insert_with(|| {
            *last += 1;
            // What the pair has said before went down the main stream, or a lane that a word there has ended.
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

    /// A frame has been put on the lane of its pair.
    pub fn sent(&mut self, ends: Ends) {
        if let Some(out) = self.lanes.get_mut(&ends) {
            out.frames += 1;
        }
    }

    /// Something has been put on the main stream.
    pub fn sent_main(&mut self) {
        self.main += 1;
    }

    /// What a word that is to be sent next comes behind, if it is behind anything. With the fence, which is a parcel of its
    /// own, it goes down the main stream at once.
    pub fn fence(&mut self, word: &Carried) -> Option<Vec<Mark>> {
        let (task, sends_too) = match word {
            Carried::Link(_) => return None,
            Carried::Ended { dst, .. } => (*dst, true),
            Carried::Item { dst, .. }
            | Carried::Passed { dst, .. }
            | Carried::Record { dst, .. }
            | Carried::Handed { dst, .. }
            | Carried::HandedAll { dst, .. } => (*dst, false),
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
        // The fence and the word.
        let behind = self.main + u64::from(!marks.is_empty()) + 1;
        concerned.into_iter().for_each(|out| out.behind = behind);
        (!marks.is_empty()).then_some(marks)
    }

    /// Lanes that are to end: nothing has gone down them for a while, or (`task`) one of their ends is gone. Each mark goes
    /// down the main stream as [`Main::End`].
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
    /// Frames handed on.
    frames: u64,
    held: VecDeque<Lane<T>>,
}

/// The receiver's side of a session: parcels of all streams go in as they come, and come out in an order that keeps every
/// fence.
#[derive(Debug)]
pub struct Join<T> {
    /// Parcels of the main stream that are behind us.
    main: u64,
    held: VecDeque<Main<T>>,
    lanes: FxHashMap<LaneId, In<T>>,
    /// Lanes that hold something.
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
    /// Takes the next parcel of the main stream.
    pub fn take_main(&mut self, parcel: Main<T>) {
        self.held.push_back(parcel);
        self.settle();
    }

    /// Takes the next parcel of a lane.
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

    /// What comes next, if its turn has come.
    pub fn pop(&mut self) -> Option<T> {
        self.out.pop_front()
    }

    /// Hands on what no fence keeps any more.
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

    /// Passes a parcel of the main stream, or gives it back.
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

    /// Hands on what lanes hold behind words that have passed; true if a frame was among it.
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

    /// Tasks in these tests; each may send to each other one.
    const TASKS: i32 = 4;

    fn task(n: i32) -> Tid {
        Tid::from_raw(0x40000 + n)
    }

    /// What happens on the sender's side.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        /// A link frame.
        Frame(i32, i32),
        /// Something for a task.
        Item(i32),
        /// All for this task goes another way from now on.
        Passed(i32),
        /// The end of a task.
        Ended(i32),
        /// A long time passes.
        Pause,
        /// Up to so many parcels arrive, of the stream of this number by the order of their opening.
        Arrive(usize, usize),
    }

    /// What went in, in order: a frame and its ends, or a word and the task that it is about.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Sent {
        Frame(Ends),
        Word(Tid, bool),
    }

    /// A session as the net makes one of the two values, whose streams deliver when the test says so.
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

        fn word(&mut self, word: &Carried, about: Tid, now: Instant) {
            let ended = matches!(word, Carried::Ended { .. });
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
                        &Carried::Item {
                            dst: task(n),
                            item: ToTask::PeerGone { tid: task(0) },
                        },
                        task(n),
                        *now,
                    );
                }
                Act::Passed(n) => self.word(
                    &Carried::Passed {
                        dst: task(n),
                        epoch: Epoch(1),
                    },
                    task(n),
                    *now,
                ),
                Act::Ended(n) => self.word(
                    &Carried::Ended {
                        dst: task(n),
                        marks: Vec::new(),
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

        /// Lets the rest arrive, lanes last first.
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

        /// True if these two must come in the order in which they were sent.
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
        #[test]
        fn whatever_order_the_streams_deliver_in_words_and_frames_that_concern_each_other_keep_theirs(
            acts in prop::collection::vec(act(), 0..200)
        ) {
            let (mut session, mut now) = (Session::default(), Instant::now());
            acts.into_iter().for_each(|act| session.act(act, &mut now));
            session.finish();
            session.check();
        }
    }

    #[test]
    fn a_lane_that_delivers_nothing_holds_up_what_is_behind_it_and_nothing_else() {
        let (mut session, mut now) = (Session::default(), Instant::now());
        for _ in 0..10 {
            session.act(Act::Frame(0, 1), &mut now);
            session.act(Act::Frame(0, 2), &mut now);
        }
        assert_eq!(session.opened, 2);
        session.arrive(0, usize::MAX);
        // Not the lane from 0 to 1.
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

    #[test]
    fn lanes_are_bounded_and_given_back_without_use_or_at_the_end_of_a_task() {
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

    #[test]
    fn the_ends_of_a_frame_are_read_where_its_header_has_them() {
        use sempa_proto::link::{LinkFrame, LinkKind};
        let (src, dst) = (task(1), task(2));
        let frame = LinkFrame {
            src,
            dst,
            kind: LinkKind::Probe,
            seq: 7,
            ack: 9,
            line: 0,
            payload: Bytes::new(),
        };
        assert_eq!(ends_of(&frame.encode_head()), Some((src, dst)));
        assert_eq!(ends_of(&frame.encode_head()[1..]), None);
        assert_eq!(ends_of(&[1; LINK_HEAD_BYTES]), None);
    }
}
