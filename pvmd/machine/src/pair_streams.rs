//! Streams for pairs of tasks, and the order that holds across all streams of a session. This
//! module uses no sockets.
//!
//! The machine relies on parts of the order in which one daemon sends to another: the exit notice
//! of a task follows all that the task has sent, and during a migration a [`DataMsg::RouteDrained`]
//! separates items for the old location from items for the new one. A single stream would keep that
//! order, but a frame for one task would then wait for all data for other tasks, and for the
//! retransmission of every datagram lost for them. A pair of tasks that exchanges more than a few
//! frames therefore gets a stream of its own, a *lane*. Fences keep the necessary order:
//!
//! - A control item (everything except a link frame) is sent on the main stream. If it concerns
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
/// where each frame waits for the frames of other pairs and for control items. A lane in use costs
/// each daemon about 80 KB: an incomplete frame, and buffers for batches of frames.
pub const LANES_MAX: usize = 512;
/// Largest number of frames that a pair sends on the main stream before it gets a lane. For so few
/// frames, opening a lane would cost more than it saves.
const MAIN_STREAM_FRAMES_MAX: u32 = 4;
/// Largest number of pairs without a lane whose frames are counted. When this number is reached,
/// all counts are reset to zero.
const COUNTED_PAIRS_MAX: usize = 4096;
/// Time without frames after which a lane ends.
const LANE_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of a lane. It is never reused in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u32);

/// A position on a lane: the number of frames that precede the position on the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePosition {
    pub lane: LaneId,
    pub frame_count: u64,
}

/// An entry of the main stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MainEntry<T> {
    /// A control item, or a frame of a pair without a lane.
    Item(T),
    /// Barrier: the receiver must not release the next entry before these positions are reached.
    Barrier(Vec<LanePosition>),
    /// The lane ends at this position.
    End(LanePosition),
}

/// An entry of a lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaneEntry<T> {
    Item(T),
    /// Barrier: the receiver must not release the next entry before this number of main stream
    /// entries is released.
    Barrier(u64),
}

/// The two tasks of a link in one direction: sender and receiver.
pub type LinkEnds = (Tid, Tid);

/// Returns sender and receiver of a link frame; `None` if the bytes are not a valid frame.
pub fn link_ends(body: &[u8]) -> Option<LinkEnds> {
    let head: &[u8; LINK_HEAD_BYTES] = body.first_chunk()?;
    // Invalid bytes are sent on the main stream: the machine of the receiving daemon reports them.
    if LinkFrame::peek_kind(head).is_none() || head[2..4] != [0, 0] {
        return None;
    }
    let tid = |offset: usize| {
        head[offset..]
            .first_chunk()
            .map(|raw| Tid::from_raw(i32::from_le_bytes(*raw)))
    };
    Some((tid(4)?, tid(8)?))
}

/// The stream on which a frame must be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamChoice {
    Main,
    /// A lane. A new lane must be opened first. If there is a barrier, a [`LaneEntry::Barrier`]
    /// with its number must be sent before the frame.
    Lane {
        lane: LaneId,
        is_new: bool,
        barrier: Option<u64>,
    },
}

#[derive(Debug)]
struct LaneSender {
    lane: LaneId,
    /// Number of frames sent on the lane.
    frame_count: u64,
    /// Number of frames that the latest barrier on the main stream covers.
    fenced_frame_count: u64,
    /// Number of main stream entries that the receiver must release before it delivers the next
    /// frame of the lane.
    required_main_entries: u64,
    /// Number in the last barrier that was sent on the lane.
    last_sent_barrier: u64,
    last_used_at: Instant,
}

/// Sending side of a session.
#[derive(Debug, Default)]
pub struct FenceSender {
    lanes: FxHashMap<LinkEnds, LaneSender>,
    frame_counts: FxHashMap<LinkEnds, u32>,
    last_lane_number: u32,
    /// Number of entries sent on the main stream so far.
    main_entry_count: u64,
}

impl FenceSender {
    /// Returns the stream for the next frame of a pair. [`FenceSender::count_frame`] must be called
    /// after a frame was sent on a lane.
    pub fn choose_stream(&mut self, ends: LinkEnds, now: Instant) -> StreamChoice {
        let is_new = !self.lanes.contains_key(&ends);
        if is_new && !self.needs_lane(ends) {
            return StreamChoice::Main;
        }
        let (main_entry_count, last_lane_number) =
            (self.main_entry_count, &mut self.last_lane_number);
        let lane_sender = self.lanes.entry(ends).or_insert_with(|| {
            *last_lane_number += 1;
            // The first frame must follow all entries of the main stream: they may include earlier
            // frames of the pair, or the end of an earlier lane of the pair.
            LaneSender {
                lane: LaneId(*last_lane_number),
                frame_count: 0,
                fenced_frame_count: 0,
                required_main_entries: main_entry_count,
                last_sent_barrier: 0,
                last_used_at: now,
            }
        });
        lane_sender.last_used_at = now;
        let barrier = (lane_sender.required_main_entries > lane_sender.last_sent_barrier)
            .then_some(lane_sender.required_main_entries);
        lane_sender.last_sent_barrier = lane_sender.required_main_entries;
        StreamChoice::Lane {
            lane: lane_sender.lane,
            is_new,
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
        let frame_count = self.frame_counts.entry(ends).or_default();
        *frame_count += 1;
        if *frame_count <= MAIN_STREAM_FRAMES_MAX {
            return false;
        }
        self.frame_counts.remove(&ends);
        true
    }

    /// Counts a frame that was sent on the lane of its pair.
    pub fn count_frame(&mut self, ends: LinkEnds) {
        if let Some(lane_sender) = self.lanes.get_mut(&ends) {
            lane_sender.frame_count += 1;
        }
    }

    /// Counts an entry that was sent on the main stream.
    pub fn count_main_entry(&mut self) {
        self.main_entry_count += 1;
    }

    /// Returns the barrier for the control item that is sent next; `None` if the item needs no
    /// barrier. The barrier and the item must be sent on the main stream immediately, as two
    /// entries.
    pub fn barrier_for(&mut self, control_item: &DataMsg) -> Option<Vec<LanePosition>> {
        let (task, includes_sender) = match control_item {
            DataMsg::Frame(_) => return None,
            DataMsg::TaskEnded { tid: dst, .. } => (*dst, true),
            DataMsg::ControlItem { dst, .. }
            | DataMsg::RouteDrained { dst, .. }
            | DataMsg::Record { dst, .. }
            | DataMsg::Forwarded { dst, .. }
            | DataMsg::ForwardingComplete { dst, .. } => (*dst, false),
        };
        let mut positions = Vec::new();
        let mut affected_lanes: Vec<&mut LaneSender> = Vec::new();
        for ((src, dst), lane_sender) in &mut self.lanes {
            if *dst != task && !(includes_sender && *src == task) {
                continue;
            }
            if lane_sender.frame_count > lane_sender.fenced_frame_count {
                lane_sender.fenced_frame_count = lane_sender.frame_count;
                positions.push(LanePosition {
                    lane: lane_sender.lane,
                    frame_count: lane_sender.frame_count,
                });
            }
            affected_lanes.push(lane_sender);
        }
        // The number includes the barrier, if there is one, and the control item.
        let entry_count = self.main_entry_count + u64::from(!positions.is_empty()) + 1;
        affected_lanes
            .into_iter()
            .for_each(|lane_sender| lane_sender.required_main_entries = entry_count);
        (!positions.is_empty()).then_some(positions)
    }

    /// Ends the idle lanes; if `task` is given, ends the lanes to and from that task instead. Each
    /// returned position must be sent on the main stream as [`MainEntry::End`].
    pub fn end_lanes(&mut self, now: Instant, task: Option<Tid>) -> Vec<LanePosition> {
        let must_end = |(src, dst): &LinkEnds, lane_sender: &LaneSender| match task {
            Some(task) => *src == task || *dst == task,
            None => now.duration_since(lane_sender.last_used_at) >= LANE_IDLE_TIMEOUT,
        };
        let ended_lanes = self
            .lanes
            .extract_if(|ends, lane_sender| must_end(ends, lane_sender));
        ended_lanes
            .map(|(_, lane_sender)| LanePosition {
                lane: lane_sender.lane,
                frame_count: lane_sender.frame_count,
            })
            .collect()
    }
}

#[derive(Debug)]
struct LaneReceiver<T> {
    /// Number of frames of the lane that were released.
    released_frame_count: u64,
    queue: VecDeque<LaneEntry<T>>,
}

/// Receiving side of a session. Accepts the entries of all streams as they arrive, and returns the
/// items in an order that respects every fence.
#[derive(Debug)]
pub struct FenceReceiver<T> {
    /// Number of main stream entries that were released.
    released_entry_count: u64,
    main_queue: VecDeque<MainEntry<T>>,
    lanes: FxHashMap<LaneId, LaneReceiver<T>>,
    /// Number of lanes with queued entries.
    waiting_lane_count: usize,
    released_items: VecDeque<T>,
}

impl<T> Default for FenceReceiver<T> {
    fn default() -> Self {
        Self {
            released_entry_count: 0,
            main_queue: VecDeque::new(),
            lanes: FxHashMap::default(),
            waiting_lane_count: 0,
            released_items: VecDeque::new(),
        }
    }
}

impl<T> FenceReceiver<T> {
    /// Accepts the next entry of the main stream.
    pub fn push_main(&mut self, entry: MainEntry<T>) {
        self.main_queue.push_back(entry);
        self.release_entries();
    }

    /// Accepts the next entry of a lane.
    pub fn push_lane(&mut self, lane: LaneId, entry: LaneEntry<T>) {
        let lane_receiver = self.lanes.entry(lane).or_insert_with(LaneReceiver::new);
        if !lane_receiver.queue.is_empty() {
            lane_receiver.queue.push_back(entry);
            return;
        }
        match entry {
            LaneEntry::Item(item) => {
                lane_receiver.released_frame_count += 1;
                self.released_items.push_back(item);
            }
            LaneEntry::Barrier(required_entries)
                if required_entries <= self.released_entry_count => {}
            LaneEntry::Barrier(_) => {
                lane_receiver.queue.push_back(entry);
                self.waiting_lane_count += 1;
            }
        }
        if !self.main_queue.is_empty() {
            self.release_entries();
        }
    }

    /// Returns the next released item; `None` if there is none.
    pub fn next_item(&mut self) -> Option<T> {
        self.released_items.pop_front()
    }

    /// Releases all entries that no fence holds any more.
    fn release_entries(&mut self) {
        loop {
            let old_count = self.released_entry_count;
            while let Some(entry) = self.main_queue.pop_front() {
                if let Some(entry) = self.release_main_entry(entry) {
                    self.main_queue.push_front(entry);
                    break;
                }
            }
            if self.released_entry_count == old_count
                || self.waiting_lane_count == 0
                || !self.release_lanes()
            {
                return;
            }
        }
    }

    /// Releases an entry of the main stream, or returns the entry if it must wait.
    fn release_main_entry(&mut self, entry: MainEntry<T>) -> Option<MainEntry<T>> {
        let lanes = &self.lanes;
        let is_reached = |position: &LanePosition| {
            lanes
                .get(&position.lane)
                .map_or(0, |lane| lane.released_frame_count)
                >= position.frame_count
        };
        match entry {
            MainEntry::Barrier(positions) if !positions.iter().all(is_reached) => {
                return Some(MainEntry::Barrier(positions));
            }
            MainEntry::End(position) if !is_reached(&position) => {
                return Some(MainEntry::End(position));
            }
            MainEntry::End(position) => {
                if self
                    .lanes
                    .remove(&position.lane)
                    .is_some_and(|lane| !lane.queue.is_empty())
                {
                    self.waiting_lane_count -= 1;
                }
            }
            MainEntry::Barrier(_) => {}
            MainEntry::Item(item) => self.released_items.push_back(item),
        }
        self.released_entry_count += 1;
        None
    }

    /// Releases the lane entries whose barriers are reached. Returns true if a frame was among
    /// them.
    fn release_lanes(&mut self) -> bool {
        let (mut has_released_frame, released_entries) = (false, self.released_entry_count);
        for lane in self
            .lanes
            .values_mut()
            .filter(|lane| !lane.queue.is_empty())
        {
            while let Some(entry) = lane.queue.pop_front() {
                match entry {
                    LaneEntry::Barrier(required_entries) if required_entries > released_entries => {
                        lane.queue.push_front(entry);
                        break;
                    }
                    LaneEntry::Barrier(_) => {}
                    LaneEntry::Item(item) => {
                        lane.released_frame_count += 1;
                        has_released_frame = true;
                        self.released_items.push_back(item);
                    }
                }
            }
            self.waiting_lane_count -= usize::from(lane.queue.is_empty());
        }
        has_released_frame
    }
}

impl<T> LaneReceiver<T> {
    fn new() -> Self {
        Self {
            released_frame_count: 0,
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

    /// Number of tasks in these tests. Each task may send to any task.
    const TASK_COUNT: i32 = 4;

    fn task(n: i32) -> Tid {
        Tid::from_raw(0x40000 + n)
    }

    /// An action of the sending side, or the arrival of entries at the receiving side.
    #[derive(Clone, Copy, Debug)]
    enum Action {
        Frame(i32, i32),
        /// A control item for a task.
        Item(i32),
        /// A [`DataMsg::RouteDrained`] for a task that migrates.
        DrainRoute(i32),
        End(i32),
        /// No frame is sent until lanes are idle.
        Idle,
        /// Entries arrive. The first number selects the stream: 0 is the main stream, and lanes
        /// follow in the order of opening. The second number is the maximum number of entries.
        Arrive(usize, usize),
    }

    /// An item that was sent: a frame with its sender and receiver, or a control item with the task
    /// that it concerns. The bool is true if the control item reports the end of that task.
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
        main_stream: VecDeque<MainEntry<usize>>,
        lanes: BTreeMap<LaneId, VecDeque<LaneEntry<usize>>>,
        sent_items: Vec<SentItem>,
        received_indexes: Vec<usize>,
        opened_lane_count: usize,
    }

    impl Session {
        fn send_main_entry(&mut self, entry: MainEntry<usize>) {
            self.main_stream.push_back(entry);
            self.sender.count_main_entry();
        }

        fn send_frame(&mut self, ends: LinkEnds, now: Instant) {
            let item_index = self.sent_items.len();
            self.sent_items.push(SentItem::Frame(ends));
            match self.sender.choose_stream(ends, now) {
                StreamChoice::Main => self.send_main_entry(MainEntry::Item(item_index)),
                StreamChoice::Lane {
                    lane,
                    is_new,
                    barrier,
                } => {
                    assert_eq!(is_new, !self.lanes.contains_key(&lane));
                    self.opened_lane_count += usize::from(is_new);
                    let stream = self.lanes.entry(lane).or_default();
                    stream.extend(barrier.map(LaneEntry::Barrier));
                    stream.push_back(LaneEntry::Item(item_index));
                    self.sender.count_frame(ends);
                }
            }
        }

        fn send_control_item(&mut self, message: &DataMsg, subject: Tid, now: Instant) {
            let is_task_end = matches!(message, DataMsg::TaskEnded { .. });
            let item_index = self.sent_items.len();
            self.sent_items.push(SentItem::Item(subject, is_task_end));
            if let Some(positions) = self.sender.barrier_for(message) {
                self.send_main_entry(MainEntry::Barrier(positions));
            }
            self.send_main_entry(MainEntry::Item(item_index));
            if is_task_end {
                self.end_lanes(now, Some(subject));
            }
        }

        fn end_lanes(&mut self, now: Instant, task: Option<Tid>) {
            for position in self.sender.end_lanes(now, task) {
                self.send_main_entry(MainEntry::End(position));
            }
        }

        fn deliver_entries(&mut self, stream: usize, entries_max: usize) {
            for _ in 0..entries_max {
                if stream == 0 {
                    let Some(entry) = self.main_stream.pop_front() else {
                        break;
                    };
                    self.receiver.push_main(entry);
                } else {
                    let Some((lane, stream)) = self
                        .lanes
                        .iter_mut()
                        .nth((stream - 1) % TASK_COUNT as usize)
                    else {
                        break;
                    };
                    let Some(entry) = stream.pop_front() else {
                        break;
                    };
                    self.receiver.push_lane(*lane, entry);
                }
                self.received_indexes
                    .extend(std::iter::from_fn(|| self.receiver.next_item()));
            }
        }

        fn perform(&mut self, action: Action, now: &mut Instant) {
            match action {
                Action::Frame(src, dst) => self.send_frame((task(src), task(dst)), *now),
                Action::Item(n) => {
                    self.send_control_item(
                        &DataMsg::ControlItem {
                            dst: task(n),
                            item: ToTask::PeerGone { tid: task(0) },
                        },
                        task(n),
                        *now,
                    );
                }
                Action::DrainRoute(n) => self.send_control_item(
                    &DataMsg::RouteDrained {
                        dst: task(n),
                        epoch: Epoch(1),
                    },
                    task(n),
                    *now,
                ),
                Action::End(n) => self.send_control_item(
                    &DataMsg::TaskEnded {
                        tid: task(n),
                        watermarks: Vec::new(),
                        past: Default::default(),
                    },
                    task(n),
                    *now,
                ),
                Action::Idle => {
                    *now += LANE_IDLE_TIMEOUT;
                    self.end_lanes(*now, None);
                }
                Action::Arrive(stream, entries_max) => self.deliver_entries(stream, entries_max),
            }
        }

        /// Delivers all remaining entries: first the main stream, then the lanes in reverse order.
        fn deliver_remaining(&mut self) {
            self.deliver_entries(0, usize::MAX);
            let lanes: Vec<LaneId> = self.lanes.keys().rev().copied().collect();
            for lane in lanes {
                for entry in std::mem::take(self.lanes.get_mut(&lane).expect("it is in the list")) {
                    self.receiver.push_lane(lane, entry);
                    self.received_indexes
                        .extend(std::iter::from_fn(|| self.receiver.next_item()));
                }
            }
        }

        /// True if two items, identified by their indexes in the list of sent items, must arrive in
        /// the order in which they were sent.
        fn must_keep_order(&self, a: usize, b: usize) -> bool {
            match (self.sent_items[a], self.sent_items[b]) {
                (SentItem::Frame(first_pair), SentItem::Frame(second_pair)) => {
                    first_pair == second_pair
                }
                (SentItem::Item(..), SentItem::Item(..)) => true,
                (SentItem::Frame((src, dst)), SentItem::Item(task, is_task_end)) => {
                    dst == task || (is_task_end && src == task)
                }
                (SentItem::Item(task, is_task_end), SentItem::Frame((src, dst))) => {
                    dst == task || (is_task_end && src == task)
                }
            }
        }

        fn check_order(&self) {
            let mut arrival_positions = vec![None; self.sent_items.len()];
            for (position, item_index) in self.received_indexes.iter().enumerate() {
                assert_eq!(
                    arrival_positions[*item_index].replace(position),
                    None,
                    "{item_index} came twice"
                );
            }
            for b in 0..self.sent_items.len() {
                assert!(
                    arrival_positions[b].is_some(),
                    "{b} never came: {:?}",
                    self.sent_items[b]
                );
                for a in (0..b).filter(|a| self.must_keep_order(*a, b)) {
                    assert!(
                        arrival_positions[a] < arrival_positions[b],
                        "{a} {:?} came behind {b} {:?}",
                        self.sent_items[a],
                        self.sent_items[b]
                    );
                }
            }
        }
    }

    fn any_action() -> impl Strategy<Value = Action> {
        let task_number = || 0..TASK_COUNT;
        prop_oneof![
            12 => (task_number(), task_number()).prop_map(|(src, dst)| Action::Frame(src, dst)),
            1 => task_number().prop_map(Action::Item),
            1 => task_number().prop_map(Action::DrainRoute),
            1 => task_number().prop_map(Action::End),
            1 => Just(Action::Idle),
            6 => (0..=TASK_COUNT as usize, 1..6usize).prop_map(|(stream, entries_max)| Action::Arrive(stream, entries_max)),
        ]
    }

    proptest! {
        /// For every order in which the streams deliver, frames and control items that concern the
        /// same task keep their order.
        #[test]
        fn streams_in_any_order_keep_fenced_order(
            actions in prop::collection::vec(any_action(), 0..200)
        ) {
            let (mut session, mut now) = (Session::default(), Instant::now());
            actions.into_iter().for_each(|action| session.perform(action, &mut now));
            session.deliver_remaining();
            session.check_order();
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
        assert_eq!(session.opened_lane_count, 2);
        session.deliver_entries(0, usize::MAX);
        // Stream 2 is the lane from 0 to 2. The lane from 0 to 1 delivers nothing.
        session.deliver_entries(2, usize::MAX);
        let received_count = 10 + MAIN_STREAM_FRAMES_MAX as usize;
        assert_eq!(
            session.received_indexes.len(),
            received_count,
            "another pair's frames wait"
        );
        session.perform(Action::Item(2), &mut now);
        session.deliver_entries(0, usize::MAX);
        assert_eq!(
            session.received_indexes.len(),
            received_count + 1,
            "a word for another task waits"
        );
        session.perform(Action::Item(1), &mut now);
        session.deliver_entries(0, usize::MAX);
        assert_eq!(
            session.received_indexes.len(),
            received_count + 1,
            "a word has overtaken what it is behind"
        );
        session.deliver_remaining();
        session.check_order();
    }

    /// The number of lanes is limited. Lanes end when they are idle, or when one of their tasks
    /// ends.
    #[test]
    fn lanes_are_limited_and_end_when_unused() {
        let (mut sender, now) = (FenceSender::default(), Instant::now());
        let ends = |n: usize| (task(n as i32), task(-1));
        let gets_lane = |sender: &mut FenceSender, n| {
            (0..=MAIN_STREAM_FRAMES_MAX)
                .map(|_| sender.choose_stream(ends(n), now))
                .any(|choice| choice != StreamChoice::Main)
        };
        let lane_count = (0..2 * LANES_MAX)
            .filter(|n| gets_lane(&mut sender, *n))
            .count();
        assert_eq!(lane_count, LANES_MAX);
        assert_eq!(sender.end_lanes(now, Some(task(0))).len(), 1);
        assert!(gets_lane(&mut sender, 2 * LANES_MAX));
        assert_eq!(
            sender.end_lanes(now + LANE_IDLE_TIMEOUT, None).len(),
            LANES_MAX
        );
        assert!(sender.lanes.is_empty());
        for n in 0..2 * COUNTED_PAIRS_MAX {
            sender.choose_stream(ends(n), now);
            assert!(sender.frame_counts.len() <= COUNTED_PAIRS_MAX);
        }
    }

    /// Sender and receiver are read only from the header of a valid frame.
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
        assert_eq!(link_ends(&frame.encode_head()), Some((src, dst)));
        assert_eq!(link_ends(&frame.encode_head()[1..]), None);
        assert_eq!(link_ends(&[1; LINK_HEAD_BYTES]), None);
    }
}
