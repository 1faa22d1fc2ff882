//! The data channels between the simulated hosts. The daemon's own code distributes the items over
//! streams and merges the streams; each stream has its own random delays.

use super::{Channel, Sim, SimEvent, host_pair};
use crate::Event;
use crate::pair_streams::{
    FenceReceiver, FenceSender, LaneEntry, LaneId, MainEntry, StreamChoice, link_ends,
};
use sempa_proto::HostId;
use sempa_proto::host::DataMsg;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// One direction of one session: sender, receiver, and serial number of the session.
pub(super) type ChannelId = (HostId, HostId, u64);

/// Messages that wait for a session, in order of sending.
pub(super) type UnsentMessages = VecDeque<(Channel, Event)>;

/// An item of one of the streams of a data channel.
#[derive(Clone, Debug)]
pub(super) enum StreamItem {
    Main(MainEntry<DataMsg>),
    Lane(LaneId, LaneEntry<DataMsg>),
}

/// All data channels of the run, including those of ended sessions.
#[derive(Debug)]
pub(super) struct DataChannels {
    start_instant: Instant,
    channels: BTreeMap<ChannelId, (FenceSender, FenceReceiver<DataMsg>)>,
    session_numbers: BTreeMap<(HostId, HostId), u64>,
    opened_lane_count: usize,
}

impl Default for DataChannels {
    fn default() -> Self {
        Self {
            start_instant: Instant::now(),
            channels: BTreeMap::new(),
            session_numbers: BTreeMap::new(),
            opened_lane_count: 0,
        }
    }
}

impl DataChannels {
    /// Begins a new session of this direction. The session contains no state of an earlier session.
    pub(super) fn begin_session(&mut self, from: HostId, to: HostId) {
        *self.session_numbers.entry((from, to)).or_default() += 1;
    }

    /// Handles the arrival of an item. Returns the events that can be delivered.
    pub(super) fn receive_item(&mut self, channel_id: ChannelId, item: StreamItem) -> Vec<Event> {
        let (_, fence_receiver) = self.channels.entry(channel_id).or_default();
        match item {
            StreamItem::Main(item) => fence_receiver.push_main(item),
            StreamItem::Lane(lane, item) => fence_receiver.push_lane(lane, item),
        }
        std::iter::from_fn(|| fence_receiver.next_item())
            .map(|message| Event::HostData {
                host: channel_id.0,
                message,
            })
            .collect()
    }
}

impl Sim {
    /// Sends a daemon's message to another daemon, or stores the message until the two hosts have a
    /// session.
    pub(super) fn send_or_store(
        &mut self,
        channel: Channel,
        from: HostId,
        to: HostId,
        event: Event,
    ) {
        if !self.sessions.contains(&host_pair(from, to)) {
            return self
                .unsent_messages
                .entry((from, to))
                .or_default()
                .push_back((channel, event));
        }
        match event {
            Event::HostData { message, .. } => self.send_data(from, to, message),
            event => self.send_in_order(channel, SimEvent::Machine(to, event)),
        }
    }

    /// Returns the number of pair streams that were opened during the run.
    pub(in crate::tests) fn opened_lane_count(&self) -> usize {
        self.data_channels.opened_lane_count
    }

    pub(super) fn connect_hosts(&mut self, a: HostId, b: HostId) {
        let are_both_live = [a, b]
            .iter()
            .all(|h| self.nodes.get(h).is_some_and(|n| n.is_alive));
        if !are_both_live || !self.sessions.insert(host_pair(a, b)) {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            self.send_in_order(
                Channel::Control(from, to),
                SimEvent::Machine(to, Event::HostConnected { host: from }),
            );
            self.data_channels.begin_session(from, to);
            for (channel, event) in self.unsent_messages.remove(&(from, to)).unwrap_or_default() {
                self.send_or_store(channel, from, to, event);
            }
        }
    }

    /// Sends an item over the data channel of an existing session. Chooses the stream as the
    /// daemon's network code does.
    pub(super) fn send_data(&mut self, from: HostId, to: HostId, message: DataMsg) {
        let channel_id = (
            from,
            to,
            self.data_channels
                .session_numbers
                .get(&(from, to))
                .copied()
                .unwrap_or(0),
        );
        let now = self.data_channels.start_instant + Duration::from_micros(self.now.0);
        let (fence_sender, _) = self.data_channels.channels.entry(channel_id).or_default();
        let mut items = Vec::new();
        let pair = match &message {
            DataMsg::Frame(body) => link_ends(body),
            _ => None,
        };
        match pair.map(|pair| (pair, fence_sender.choose_stream(pair, now))) {
            Some((
                pair,
                StreamChoice::Lane {
                    lane,
                    is_new,
                    barrier,
                },
            )) => {
                self.data_channels.opened_lane_count += usize::from(is_new);
                items.extend(barrier.map(|lane_barriers| {
                    StreamItem::Lane(lane, LaneEntry::Barrier(lane_barriers))
                }));
                items.push(StreamItem::Lane(lane, LaneEntry::Item(message)));
                fence_sender.count_frame(pair);
            }
            _ => {
                let ended_task = if let DataMsg::TaskEnded { tid: dst, .. } = &message {
                    Some(*dst)
                } else {
                    None
                };
                let mut push_main = |fence_sender: &mut FenceSender, item| {
                    items.push(StreamItem::Main(item));
                    fence_sender.count_main_entry();
                };
                if let Some(barriers) = fence_sender.barrier_for(&message) {
                    push_main(fence_sender, MainEntry::Barrier(barriers));
                }
                push_main(fence_sender, MainEntry::Item(message));
                for lane_end in ended_task
                    .map(|task| fence_sender.end_lanes(now, Some(task)))
                    .unwrap_or_default()
                {
                    push_main(fence_sender, MainEntry::End(lane_end));
                }
            }
        }
        for item in items {
            let channel = match &item {
                StreamItem::Main(_) => Channel::Data(from, to),
                StreamItem::Lane(lane, _) => Channel::Lane(channel_id, *lane),
            };
            self.send_in_order(channel, SimEvent::DataItem(channel_id, item));
        }
    }
}
