//! The data channels between the simulated hosts. The streams are split and joined by the daemon's
//! own code; each stream has its own delays.

use super::{Channel, Happening, Sim, pair};
use crate::Event;
use crate::lanes::{Fork, Join, Lane, LaneId, Main, Way, ends_of};
use sempa_proto::HostId;
use sempa_proto::host::DataMsg;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// One direction of one session: sender, receiver, number of the session.
pub(super) type WireId = (HostId, HostId, u64);

/// Messages that wait for a session, in order.
pub(super) type Unsent = VecDeque<(Channel, Event)>;

/// An item of one of the streams.
#[derive(Clone, Debug)]
pub(super) enum Parcel {
    Main(Main<DataMsg>),
    Lane(LaneId, Lane<DataMsg>),
}

/// All data channels that ever existed.
#[derive(Debug)]
pub(super) struct Wires {
    begin: Instant,
    wires: BTreeMap<WireId, (Fork, Join<DataMsg>)>,
    sessions: BTreeMap<(HostId, HostId), u64>,
    lanes_opened: usize,
}

impl Default for Wires {
    fn default() -> Wires {
        Wires {
            begin: Instant::now(),
            wires: BTreeMap::new(),
            sessions: BTreeMap::new(),
            lanes_opened: 0,
        }
    }
}

impl Wires {
    /// Begins a new session, which shares nothing with an older one.
    pub(super) fn begin(&mut self, from: HostId, to: HostId) {
        *self.sessions.entry((from, to)).or_default() += 1;
    }

    /// Handles the arrival of an item. Returns the events that can be delivered.
    pub(super) fn arrived(&mut self, wire: WireId, parcel: Parcel) -> Vec<Event> {
        let (_, join) = self.wires.entry(wire).or_default();
        match parcel {
            Parcel::Main(parcel) => join.take_main(parcel),
            Parcel::Lane(lane, parcel) => join.take_lane(lane, parcel),
        }
        std::iter::from_fn(|| join.pop())
            .map(|carried| Event::HostCarried {
                host: wire.0,
                carried,
            })
            .collect()
    }
}

impl Sim {
    /// Sends a message of one daemon to another, or stores it until there is a session.
    pub(super) fn between(&mut self, channel: Channel, from: HostId, to: HostId, event: Event) {
        if !self.sessions.contains(&pair(from, to)) {
            return self
                .unsent
                .entry((from, to))
                .or_default()
                .push_back((channel, event));
        }
        match event {
            Event::HostCarried { carried, .. } => self.carry(from, to, carried),
            event => self.send(channel, Happening::Event(to, event)),
        }
    }

    /// Returns how many pair streams were opened.
    pub(in crate::tests) fn lanes_opened(&self) -> usize {
        self.wires.lanes_opened
    }

    pub(super) fn session(&mut self, a: HostId, b: HostId) {
        let both_live = [a, b]
            .iter()
            .all(|h| self.nodes.get(h).is_some_and(|n| n.alive));
        if !both_live || !self.sessions.insert(pair(a, b)) {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            self.send(
                Channel::Control(from, to),
                Happening::Event(to, Event::HostConnected { host: from }),
            );
            self.wires.begin(from, to);
            for (channel, event) in self.unsent.remove(&(from, to)).unwrap_or_default() {
                self.between(channel, from, to, event);
            }
        }
    }

    /// Sends an item over the data channel of an existing session, as the daemon's network code
    /// does.
    pub(super) fn carry(&mut self, from: HostId, to: HostId, carried: DataMsg) {
        let wire = (
            from,
            to,
            self.wires.sessions.get(&(from, to)).copied().unwrap_or(0),
        );
        let now = self.wires.begin + Duration::from_micros(self.now.0);
        let (fork, _) = self.wires.wires.entry(wire).or_default();
        let mut parcels = Vec::new();
        let ends = match &carried {
            DataMsg::Frame(body) => ends_of(body),
            _ => None,
        };
        match ends.map(|ends| (ends, fork.way(ends, now))) {
            Some((ends, Way::Lane { lane, new, behind })) => {
                self.wires.lanes_opened += usize::from(new);
                parcels.extend(behind.map(|words| Parcel::Lane(lane, Lane::Behind(words))));
                parcels.push(Parcel::Lane(lane, Lane::Item(carried)));
                fork.sent(ends);
            }
            _ => {
                let ended = if let DataMsg::Ended { dst, .. } = &carried {
                    Some(*dst)
                } else {
                    None
                };
                let mut put = |fork: &mut Fork, parcel| {
                    parcels.push(Parcel::Main(parcel));
                    fork.sent_main();
                };
                if let Some(marks) = fork.fence(&carried) {
                    put(fork, Main::After(marks));
                }
                put(fork, Main::Item(carried));
                for mark in ended
                    .map(|task| fork.close(now, Some(task)))
                    .unwrap_or_default()
                {
                    put(fork, Main::End(mark));
                }
            }
        }
        for parcel in parcels {
            let channel = match &parcel {
                Parcel::Main(_) => Channel::Data(from, to),
                Parcel::Lane(lane, _) => Channel::Lane(wire, *lane),
            };
            self.send(channel, Happening::Data(wire, parcel));
        }
    }
}
