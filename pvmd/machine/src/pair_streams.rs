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
//! - A control item (everything except a link frame) travels on the main stream. If it concerns
//!   tasks that have lanes, a barrier precedes the control item. The barrier states how many frames
//!   each of these lanes has carried so far. The receiver holds the control item until it has
//!   received these frames.
//! - If a frame is sent on a lane after a control item that concerns the lane, a barrier precedes
//!   the frame. This barrier states the position of the control item in the main stream. The
//!   receiver holds the lane until the main stream has reached that position.
//! - The end of a lane is an entry on the main stream. Later frames of the pair, on any stream, are
//!   ordered after that entry.
//!
//! Frames of different pairs may overtake each other; nothing relies on their order.
//! [`FenceSender`] is the sending side, [`FenceReceiver`] the receiving side. Fences cannot
//! deadlock, because each fence refers only to entries that were sent before it.

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
const MAIN_STREAM_FRAMES: u32 = 4;
/// Largest number of pairs without a lane whose frames are counted. When it is reached, counting
/// starts again from zero.
const COUNTED_PAIRS_MAX: usize = 4096;
/// Time without frames after which a lane ends.
const LANE_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of a lane. It is never reused in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u32);

/// A position on a lane: the number of frames that the lane has carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePosition {
    pub lane: LaneId,
    pub frames: u64,
}

/// An entry of the main stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MainEntry<T> {
    /// A control item, or a frame of a pair without a lane.
    Item(T),
    /// Barrier: the next entry must wait until these positions are reached.
    Barrier(Vec<LanePosition>),
    /// The lane ends at this position.
    End(LanePosition),
}

/// An entry of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaneEntry<T> {
    Item(T),
    /// Barrier: the next entry must wait until this number of main stream entries has passed.
    Barrier(u64),
}

/// The ends of a link: sender and receiver.
pub type LinkEnds = (Tid, Tid);

/// Returns the ends of a link frame, or `None` if the bytes are not a valid frame.
pub fn ends_of(body: &[u8]) -> Option<LinkEnds> {
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
pub enum StreamChoice {
    Main,
    /// A lane. If `new` is true, the lane must be opened first. If `barrier` is set, a barrier with
    /// this number must be sent first.
    Lane {
        lane: LaneId,
        new: bool,
        barrier: Option<u64>,
    },
}

#[derive(Debug)]
struct LaneSender {
    lane: LaneId,
    /// Number of frames sent.
    frames: u64,
    /// Number of frames that the latest barrier on the main stream covers.
    fenced_frames: u64,
    /// Number of main stream entries that must pass before the next frame.
    barrier: u64,
    /// Number in the last barrier that was sent on the lane.
    sent_barrier: u64,
    last_used: Instant,
}

/// Sending side of a session.
#[derive(Debug, Default)]
pub struct FenceSender {
    lanes: FxHashMap<LinkEnds, LaneSender>,
    frame_counts: FxHashMap<LinkEnds, u32>,
    last_lane: u32,
    /// Number of entries sent on the main stream.
    main_entries: u64,
}

impl FenceSender {
    /// Returns the stream for the next frame of this pair. [`FenceSender::count_frame`] must be
    /// called after a frame was put on a lane.
    pub fn choose_stream(&mut self, ends: LinkEnds, now: Instant) -> StreamChoice {
        let new = !self.lanes.contains_key(&ends);
        if new && !self.needs_lane(ends) {
            return StreamChoice::Main;
        }
        let (main, last) = (self.main_entries, &mut self.last_lane);
        let out = self.lanes.entry(ends).or_insert_with(|| {
            *last += 1;
            // Earlier frames of the pair were sent on the main stream, or on a lane whose end is an
            // entry of the main stream.
            LaneSender {
                lane: LaneId(*last),
                frames: 0,
                fenced_frames: 0,
                barrier: main,
                sent_barrier: 0,
                last_used: now,
            }
        });
        out.last_used = now;
        let barrier = (out.barrier > out.sent_barrier).then_some(out.barrier);
        out.sent_barrier = out.barrier;
        StreamChoice::Lane {
            lane: out.lane,
            new,
            barrier,
        }
    }

    fn needs_lane(&mut self, ends: LinkEnds) -> bool {
        if self.lanes.len() >= LANES_MAX {
            return false;
        }
        if self.frame_counts.len() >= COUNTED_PAIRS_MAX {
            self.frame_counts.clear();
        }
        let frames = self.frame_counts.entry(ends).or_default();
        *frames += 1;
        if *frames <= MAIN_STREAM_FRAMES {
            return false;
        }
        self.frame_counts.remove(&ends);
        true
    }

    /// Counts a frame that was put on the lane of its pair.
    pub fn count_frame(&mut self, ends: LinkEnds) {
        if let Some(out) = self.lanes.get_mut(&ends) {
            out.frames += 1;
        }
    }

    /// Counts an entry that was put on the main stream.
    pub fn count_main_entry(&mut self) {
        self.main_entries += 1;
    }

    /// Returns the barrier for a control item that is sent next, if it needs one. The barrier and
    /// the item must be sent on the main stream immediately, as two entries.
    pub fn barrier_for(&mut self, control_item: &DataMsg) -> Option<Vec<LanePosition>> {
        let (task, sends_too) = match control_item {
            DataMsg::Frame(_) => return None,
            DataMsg::Ended { tid: dst, .. } => (*dst, true),
            DataMsg::Item { dst, .. }
            | DataMsg::RouteDrained { dst, .. }
            | DataMsg::Record { dst, .. }
            | DataMsg::Forwarded { dst, .. }
            | DataMsg::ForwardedAll { dst, .. } => (*dst, false),
        };
        let mut marks = Vec::new();
        let mut affected: Vec<&mut LaneSender> = Vec::new();
        for ((src, dst), out) in &mut self.lanes {
            if *dst != task && !(sends_too && *src == task) {
                continue;
            }
            if out.frames > out.fenced_frames {
                out.fenced_frames = out.frames;
                marks.push(LanePosition {
                    lane: out.lane,
                    frames: out.frames,
                });
            }
            affected.push(out);
        }
        // Counts the barrier and the control item.
        let behind = self.main_entries + u64::from(!marks.is_empty()) + 1;
        affected.into_iter().for_each(|out| out.barrier = behind);
        (!marks.is_empty()).then_some(marks)
    }

    /// Ends the idle lanes; if `task` is given, the lanes to and from that task instead. Each
    /// returned position must be sent on the main stream as [`MainEntry::End`].
    pub fn end_lanes(&mut self, now: Instant, task: Option<Tid>) -> Vec<LanePosition> {
        let over = |(src, dst): &LinkEnds, out: &LaneSender| match task {
            Some(task) => *src == task || *dst == task,
            None => now.duration_since(out.last_used) >= LANE_IDLE_TIMEOUT,
        };
        let closed = self.lanes.extract_if(|ends, out| over(ends, out));
        closed
            .map(|(_, out)| LanePosition {
                lane: out.lane,
                frames: out.frames,
            })
            .collect()
    }
}

#[derive(Debug)]
struct LaneReceiver<T> {
    /// Number of frames released.
    frames: u64,
    queue: VecDeque<LaneEntry<T>>,
}

/// Receiving side of a session. Accepts the entries of all streams as they arrive, and returns the
/// items in an order that respects every fence.
#[derive(Debug)]
pub struct FenceReceiver<T> {
    /// Number of main stream entries that have passed.
    passed_entries: u64,
    main_queue: VecDeque<MainEntry<T>>,
    lanes: FxHashMap<LaneId, LaneReceiver<T>>,
    /// Number of lanes with queued entries.
    waiting_lanes: usize,
    released_items: VecDeque<T>,
}

impl<T> Default for FenceReceiver<T> {
    fn default() -> FenceReceiver<T> {
        FenceReceiver {
            passed_entries: 0,
            main_queue: VecDeque::new(),
            lanes: FxHashMap::default(),
            waiting_lanes: 0,
            released_items: VecDeque::new(),
        }
    }
}

impl<T> FenceReceiver<T> {
    /// Accepts the next entry of the main stream.
    pub fn push_main(&mut self, parcel: MainEntry<T>) {
        self.main_queue.push_back(parcel);
        self.release();
    }

    /// Accepts the next entry of a lane.
    pub fn push_lane(&mut self, lane: LaneId, parcel: LaneEntry<T>) {
        let into = self.lanes.entry(lane).or_insert_with(LaneReceiver::new);
        if !into.queue.is_empty() {
            into.queue.push_back(parcel);
            return;
        }
        match parcel {
            LaneEntry::Item(item) => {
                into.frames += 1;
                self.released_items.push_back(item);
            }
            LaneEntry::Barrier(main) if main <= self.passed_entries => {}
            LaneEntry::Barrier(_) => {
                into.queue.push_back(parcel);
                self.waiting_lanes += 1;
            }
        }
        if !self.main_queue.is_empty() {
            self.release();
        }
    }

    /// Returns the next item that no fence holds.
    pub fn pop(&mut self) -> Option<T> {
        self.released_items.pop_front()
    }

    /// Releases everything that no fence holds any more.
    fn release(&mut self) {
        loop {
            let before = self.passed_entries;
            while let Some(parcel) = self.main_queue.pop_front() {
                if let Some(parcel) = self.pass_main_entry(parcel) {
                    self.main_queue.push_front(parcel);
                    break;
                }
            }
            if self.passed_entries == before || self.waiting_lanes == 0 || !self.release_lanes() {
                return;
            }
        }
    }

    /// Releases an entry of the main stream, or returns the entry if it must wait.
    fn pass_main_entry(&mut self, parcel: MainEntry<T>) -> Option<MainEntry<T>> {
        let lanes = &self.lanes;
        let reached = |mark: &LanePosition| {
            lanes.get(&mark.lane).map_or(0, |lane| lane.frames) >= mark.frames
        };
        match parcel {
            MainEntry::Barrier(marks) if !marks.iter().all(reached) => {
                return Some(MainEntry::Barrier(marks));
            }
            MainEntry::End(mark) if !reached(&mark) => return Some(MainEntry::End(mark)),
            MainEntry::End(mark) => {
                if self
                    .lanes
                    .remove(&mark.lane)
                    .is_some_and(|lane| !lane.queue.is_empty())
                {
                    self.waiting_lanes -= 1;
                }
            }
            MainEntry::Barrier(_) => {}
            MainEntry::Item(item) => self.released_items.push_back(item),
        }
        self.passed_entries += 1;
        None
    }

    /// Releases lane entries whose barrier has been passed. True if a frame was among them.
    fn release_lanes(&mut self) -> bool {
        let (mut moved, main) = (false, self.passed_entries);
        for lane in self
            .lanes
            .values_mut()
            .filter(|lane| !lane.queue.is_empty())
        {
            while let Some(parcel) = lane.queue.pop_front() {
                match parcel {
                    LaneEntry::Barrier(word) if word > main => {
                        lane.queue.push_front(parcel);
                        break;
                    }
                    LaneEntry::Barrier(_) => {}
                    LaneEntry::Item(item) => {
                        lane.frames += 1;
                        moved = true;
                        self.released_items.push_back(item);
                    }
                }
            }
            self.waiting_lanes -= usize::from(lane.queue.is_empty());
        }
        moved
    }
}

impl<T> LaneReceiver<T> {
    fn new() -> LaneReceiver<T> {
        LaneReceiver {
            frames: 0,
            queue: VecDeque::new(),
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

    /// Number of tasks in these tests. Each task may send to every other task.
    const TASKS: i32 = 4;

    fn task(n: i32) -> Tid {
        Tid::from_raw(0x40000 + n)
    }

    /// An action on the sending side, or an arrival.
    #[derive(Clone, Copy, Debug)]
    enum Action {
        Frame(i32, i32),
        /// A control item for a task.
        Item(i32),
        /// The task migrates: later items for it take another route.
        Migrate(i32),
        End(i32),
        /// Time passes until lanes are idle.
        Idle,
        /// Entries arrive. The first number selects the stream: 0 is the main stream, and lanes
        /// follow in the order of opening. The second number is the maximum number of entries.
        Arrive(usize, usize),
    }

    /// An item that was sent: a frame with its ends, or a control item with its task. The bool is
    /// true if that task has ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum SentItem {
        Frame(LinkEnds),
        Item(Tid, bool),
    }

    /// A session that connects a sending and a receiving side. Its streams deliver entries when the
    /// test requests it.
    #[derive(Default)]
    struct Session {
        sender: FenceSender,
        receiver: FenceReceiver<usize>,
        main: VecDeque<MainEntry<usize>>,
        lanes: BTreeMap<LaneId, VecDeque<LaneEntry<usize>>>,
        sent: Vec<SentItem>,
        received: Vec<usize>,
        opened: usize,
    }

    impl Session {
        fn put_main(&mut self, parcel: MainEntry<usize>) {
            self.main.push_back(parcel);
            self.sender.count_main_entry();
        }

        fn frame(&mut self, ends: LinkEnds, now: Instant) {
            let number = self.sent.len();
            self.sent.push(SentItem::Frame(ends));
            match self.sender.choose_stream(ends, now) {
                StreamChoice::Main => self.put_main(MainEntry::Item(number)),
                StreamChoice::Lane { lane, new, barrier } => {
                    assert_eq!(new, !self.lanes.contains_key(&lane));
                    self.opened += usize::from(new);
                    let stream = self.lanes.entry(lane).or_default();
                    stream.extend(barrier.map(LaneEntry::Barrier));
                    stream.push_back(LaneEntry::Item(number));
                    self.sender.count_frame(ends);
                }
            }
        }

        fn control_item(&mut self, word: &DataMsg, about: Tid, now: Instant) {
            let ended = matches!(word, DataMsg::Ended { .. });
            let number = self.sent.len();
            self.sent.push(SentItem::Item(about, ended));
            if let Some(marks) = self.sender.barrier_for(word) {
                self.put_main(MainEntry::Barrier(marks));
            }
            self.put_main(MainEntry::Item(number));
            if ended {
                self.close(now, Some(about));
            }
        }

        fn close(&mut self, now: Instant, task: Option<Tid>) {
            for mark in self.sender.end_lanes(now, task) {
                self.put_main(MainEntry::End(mark));
            }
        }

        fn arrive(&mut self, stream: usize, count: usize) {
            for _ in 0..count {
                if stream == 0 {
                    let Some(parcel) = self.main.pop_front() else {
                        break;
                    };
                    self.receiver.push_main(parcel);
                } else {
                    let Some((lane, stream)) =
                        self.lanes.iter_mut().nth((stream - 1) % TASKS as usize)
                    else {
                        break;
                    };
                    let Some(parcel) = stream.pop_front() else {
                        break;
                    };
                    self.receiver.push_lane(*lane, parcel);
                }
                self.received
                    .extend(std::iter::from_fn(|| self.receiver.pop()));
            }
        }

        fn perform(&mut self, action: Action, now: &mut Instant) {
            match action {
                Action::Frame(src, dst) => self.frame((task(src), task(dst)), *now),
                Action::Item(n) => {
                    self.control_item(
                        &DataMsg::Item {
                            dst: task(n),
                            item: ToTask::PeerGone { tid: task(0) },
                        },
                        task(n),
                        *now,
                    );
                }
                Action::Migrate(n) => self.control_item(
                    &DataMsg::RouteDrained {
                        dst: task(n),
                        epoch: Epoch(1),
                    },
                    task(n),
                    *now,
                ),
                Action::End(n) => self.control_item(
                    &DataMsg::Ended {
                        tid: task(n),
                        watermarks: Vec::new(),
                    },
                    task(n),
                    *now,
                ),
                Action::Idle => {
                    *now += LANE_IDLE_TIMEOUT;
                    self.close(*now, None);
                }
                Action::Arrive(stream, count) => self.arrive(stream, count),
            }
        }

        /// Delivers all remaining entries: first the main stream, then the lanes in reverse order.
        fn finish(&mut self) {
            self.arrive(0, usize::MAX);
            let lanes: Vec<LaneId> = self.lanes.keys().rev().copied().collect();
            for lane in lanes {
                for parcel in std::mem::take(self.lanes.get_mut(&lane).expect("it is in the list"))
                {
                    self.receiver.push_lane(lane, parcel);
                    self.received
                        .extend(std::iter::from_fn(|| self.receiver.pop()));
                }
            }
        }

        /// True if the items with these numbers must arrive in the order in which they were sent.
        fn must_keep_order(&self, a: usize, b: usize) -> bool {
            match (self.sent[a], self.sent[b]) {
                (SentItem::Frame(one), SentItem::Frame(other)) => one == other,
                (SentItem::Item(..), SentItem::Item(..)) => true,
                (SentItem::Frame((src, dst)), SentItem::Item(task, ended)) => {
                    dst == task || (ended && src == task)
                }
                (SentItem::Item(task, ended), SentItem::Frame((src, dst))) => {
                    dst == task || (ended && src == task)
                }
            }
        }

        fn check(&self) {
            let mut place = vec![None; self.sent.len()];
            for (at, number) in self.received.iter().enumerate() {
                assert_eq!(place[*number].replace(at), None, "{number} came twice");
            }
            for b in 0..self.sent.len() {
                assert!(place[b].is_some(), "{b} never came: {:?}", self.sent[b]);
                for a in (0..b).filter(|a| self.must_keep_order(*a, b)) {
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

    fn any_action() -> impl Strategy<Value = Action> {
        let n = || 0..TASKS;
        prop_oneof![
            12 => (n(), n()).prop_map(|(src, dst)| Action::Frame(src, dst)),
            1 => n().prop_map(Action::Item),
            1 => n().prop_map(Action::Migrate),
            1 => n().prop_map(Action::End),
            1 => Just(Action::Idle),
            6 => (0..=TASKS as usize, 1..6usize).prop_map(|(stream, count)| Action::Arrive(stream, count)),
        ]
    }

    proptest! {
        /// For every order in which the streams deliver, frames and control items that concern the
        /// same task keep their order.
        #[test]
        fn streams_in_any_order_keep_fenced_order(
            acts in prop::collection::vec(any_action(), 0..200)
        ) {
            let (mut session, mut now) = (Session::default(), Instant::now());
            acts.into_iter().for_each(|act| session.perform(act, &mut now));
            session.finish();
            session.check();
        }
    }

    /// A lane that delivers nothing blocks only the control items that must follow its frames.
    #[test]
    fn stalled_lane_blocks_only_what_follows_it() {
        let (mut session, mut now) = (Session::default(), Instant::now());
        for _ in 0..10 {
            session.perform(Action::Frame(0, 1), &mut now);
            session.perform(Action::Frame(0, 2), &mut now);
        }
        assert_eq!(session.opened, 2);
        session.arrive(0, usize::MAX);
        // Stream 2 is the lane from 0 to 2. The lane from 0 to 1 delivers nothing.
        session.arrive(2, usize::MAX);
        let came = 10 + MAIN_STREAM_FRAMES as usize;
        assert_eq!(session.received.len(), came, "another pair's frames wait");
        session.perform(Action::Item(2), &mut now);
        session.arrive(0, usize::MAX);
        assert_eq!(
            session.received.len(),
            came + 1,
            "a word for another task waits"
        );
        session.perform(Action::Item(1), &mut now);
        session.arrive(0, usize::MAX);
        assert_eq!(
            session.received.len(),
            came + 1,
            "a word has overtaken what it is behind"
        );
        session.finish();
        session.check();
    }

    /// The number of lanes is limited. Lanes end when they are idle or their task ends.
    #[test]
    fn lanes_are_limited_and_end_when_unused() {
        let (mut fork, now) = (FenceSender::default(), Instant::now());
        let ends = |n: usize| (task(n as i32), task(-1));
        let is_lane = |fork: &mut FenceSender, n| {
            (0..=MAIN_STREAM_FRAMES)
                .map(|_| fork.choose_stream(ends(n), now))
                .any(|w| w != StreamChoice::Main)
        };
        let lanes = (0..2 * LANES_MAX)
            .filter(|n| is_lane(&mut fork, *n))
            .count();
        assert_eq!(lanes, LANES_MAX);
        assert_eq!(fork.end_lanes(now, Some(task(0))).len(), 1);
        assert!(is_lane(&mut fork, 2 * LANES_MAX));
        assert_eq!(
            fork.end_lanes(now + LANE_IDLE_TIMEOUT, None).len(),
            LANES_MAX
        );
        assert!(fork.lanes.is_empty());
        for n in 0..2 * COUNTED_PAIRS_MAX {
            fork.choose_stream(ends(n), now);
            assert!(fork.frame_counts.len() <= COUNTED_PAIRS_MAX);
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
