//! The data channels between the simulated hosts. The streams are split and joined by the daemon's
//! own code; each stream has its own delays.

use super::{Channel, Sim, SimEvent, pair};
use crate::Event;
use crate::pair_streams::{
    FenceReceiver, FenceSender, LaneEntry, LaneId, MainEntry, StreamChoice, ends_of,
};
use sempa_proto::HostId;
use sempa_proto::host::DataMsg;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// One direction of one session: sender, receiver, and number of the session.
pub(super) type ChannelId = (HostId, HostId, u64);

/// Messages that wait for a session, in order.
pub(super) type Unsent = VecDeque<(Channel, Event)>;

/// An item of one of the streams of a data channel.
#[derive(Clone, Debug)]
pub(super) enum StreamItem {
    Main(MainEntry<DataMsg>),
    Lane(LaneId, LaneEntry<DataMsg>),
}

/// All data channels that ever existed.
#[derive(Debug)]
pub(super) struct DataChannels {
    epoch: Instant,
    channels: BTreeMap<ChannelId, (FenceSender, FenceReceiver<DataMsg>)>,
    sessions: BTreeMap<(HostId, HostId), u64>,
    lanes_opened: usize,
}

impl Default for DataChannels {
    fn default() -> DataChannels {
        DataChannels {
            epoch: Instant::now(),
            channels: BTreeMap::new(),
            sessions: BTreeMap::new(),
            lanes_opened: 0,
        }
    }
}

impl DataChannels {
    /// Begins a new session, in which no state of an earlier session is left.
    pub(super) fn begin_session(&mut self, from: HostId, to: HostId) {
        *self.sessions.entry((from, to)).or_default() += 1;
    }

    /// Handles the arrival of an item. Returns the events that can be delivered.
    pub(super) fn on_arrival(&mut self, wire: ChannelId, parcel: StreamItem) -> Vec<Event> {
        let (_, fence_receiver) = self.channels.entry(wire).or_default();
        match parcel {
            StreamItem::Main(parcel) => fence_receiver.push_main(parcel),
            StreamItem::Lane(lane, parcel) => fence_receiver.push_lane(lane, parcel),
        }
        std::iter::from_fn(|| fence_receiver.pop())
            .map(|message| Event::HostData {
                host: wire.0,
                message,
            })
            .collect()
    }
}

impl Sim {
    /// Sends a message of one daemon to another, or stores it until there is a session.
    pub(super) fn send_or_store(
        &mut self,
        channel: Channel,
        from: HostId,
        to: HostId,
        event: Event,
    ) {
        if !self.sessions.contains(&pair(from, to)) {
            return self
                .unsent
                .entry((from, to))
                .or_default()
                .push_back((channel, event));
        }
        match event {
            Event::HostData { message, .. } => self.send_data(from, to, message),
            event => self.send_in_order(channel, SimEvent::Machine(to, event)),
        }
    }

    /// Returns the number of pair streams that were opened.
    pub(in crate::tests) fn lanes_opened(&self) -> usize {
        self.data_channels.lanes_opened
    }

    pub(super) fn connect_hosts(&mut self, a: HostId, b: HostId) {
        let both_live = [a, b]
            .iter()
            .all(|h| self.nodes.get(h).is_some_and(|n| n.is_alive));
        if !both_live || !self.sessions.insert(pair(a, b)) {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            self.send_in_order(
                Channel::Control(from, to),
                SimEvent::Machine(to, Event::HostConnected { host: from }),
            );
            self.data_channels.begin_session(from, to);
            for (channel, event) in self.unsent.remove(&(from, to)).unwrap_or_default() {
                self.send_or_store(channel, from, to, event);
            }
        }
    }

    /// Sends an item over the data channel of an existing session, as the daemon's network code
    /// does.
    pub(super) fn send_data(&mut self, from: HostId, to: HostId, carried: DataMsg) {
        let wire = (
            from,
            to,
            self.data_channels
                .sessions
                .get(&(from, to))
                .copied()
                .unwrap_or(0),
        );
        let now = self.data_channels.epoch + Duration::from_micros(self.now.0);
        let (fence_sender, _) = self.data_channels.channels.entry(wire).or_default();
        let mut parcels = Vec::new();
        let ends = match &carried {
            DataMsg::Frame(body) => ends_of(body),
            _ => None,
        };
        match ends.map(|ends| (ends, fence_sender.choose_stream(ends, now))) {
            Some((ends, StreamChoice::Lane { lane, new, barrier })) => {
                self.data_channels.lanes_opened += usize::from(new);
                parcels
                    .extend(barrier.map(|words| StreamItem::Lane(lane, LaneEntry::Barrier(words))));
                parcels.push(StreamItem::Lane(lane, LaneEntry::Item(carried)));
                fence_sender.count_frame(ends);
            }
            _ => {
                let ended = if let DataMsg::Ended { tid: dst, .. } = &carried {
                    Some(*dst)
                } else {
                    None
                };
                let mut put_main = |fence_sender: &mut FenceSender, parcel| {
                    parcels.push(StreamItem::Main(parcel));
                    fence_sender.count_main_entry();
                };
                if let Some(barriers) = fence_sender.barrier_for(&carried) {
                    put_main(fence_sender, MainEntry::Barrier(barriers));
                }
                put_main(fence_sender, MainEntry::Item(carried));
                for lane_end in ended
                    .map(|task| fence_sender.end_lanes(now, Some(task)))
                    .unwrap_or_default()
                {
                    put_main(fence_sender, MainEntry::End(lane_end));
                }
            }
        }
        for parcel in parcels {
            let channel = match &parcel {
                StreamItem::Main(_) => Channel::Data(from, to),
                StreamItem::Lane(lane, _) => Channel::Lane(wire, *lane),
            };
            self.send_in_order(channel, SimEvent::Data(wire, parcel));
        }
    }
}
