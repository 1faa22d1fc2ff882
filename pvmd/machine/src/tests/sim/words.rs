//! Faults that meet the checkpoint or the restart of a job where a daemon takes in a word that belongs to it: an order, a report, what
//! its tasker or the store has to say. The words are those that the machines say.

use super::Sim;
use super::strikes::{Blow, Edge, Party};
use crate::Event;
use sempa_proto::HostId;
use sempa_proto::host::HostMsg;
use std::collections::BTreeMap;

/// A word that a daemon takes in, by what the machines call it, and whether it has.
pub(in crate::tests) type Spot = (String, Edge);

/// One fault at one place, and all places.
#[derive(Debug, Default)]
pub(in crate::tests) struct Words {
    listens: bool,
    wanted: Option<(Spot, usize, Party, Blow)>,
    /// How often which place was reached.
    pub(in crate::tests) said: BTreeMap<Spot, usize>,
}

/// What a word is called that daemons and what serves them say to each other; tasks speak for themselves.
fn name_of(event: &Event) -> Option<String> {
    let text = match event {
        Event::HostControl {
            message: HostMsg::Order { order, .. },
            ..
        } => format!("order {order:?}"),
        Event::HostControl {
            message: HostMsg::Report { report, .. },
            ..
        } => format!("report {report:?}"),
        Event::HostControl { message, .. } => format!("host {message:?}"),
        Event::Tasker(message) => format!("tasker {message:?}"),
        Event::HostCarried { .. } | Event::HostLost { .. } | Event::Wake => return None,
        Event::TaskConnected { .. } | Event::TaskControl { .. } | Event::TaskRoute { .. } => {
            return None;
        }
        Event::TaskLink { .. } | Event::TaskClosed { .. } => return None,
        served => format!("disk {served:?}"),
    };
    let is_name = |c: char| c.is_alphanumeric() || c == ' ';
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    Some(text[..end].split(' ').take(2).collect::<Vec<_>>().join(" "))
}

impl Sim {
    /// Listens from now on; and has this fault meet the place when it is reached for the `nth` time, counted from 0.
    pub(in crate::tests) fn listen(&mut self, fault: Option<(Spot, usize, Party, Blow)>) {
        self.words = Words {
            listens: true,
            wanted: fault,
            said: BTreeMap::new(),
        };
    }

    /// A daemon takes something in.
    pub(super) fn word(&self, on: HostId, event: &Event) -> Option<String> {
        let hears = self.words.listens
            && self
                .nodes
                .get(&on)
                .is_some_and(|node| node.alive && node.stands.is_none());
        hears.then(|| name_of(event)).flatten()
    }

    /// It is about to, or has.
    pub(super) fn hears(&mut self, word: Option<&String>, edge: Edge) {
        let Some(word) = word else { return };
        let spot = (word.clone(), edge);
        let times = self.words.said.entry(spot.clone()).or_default();
        *times += 1;
        let times = *times;
        let is_it =
            |(wanted, nth, ..): &mut (Spot, usize, Party, Blow)| *wanted == spot && times > *nth;
        if let Some((_, _, party, blow)) = self.words.wanted.take_if(is_it) {
            self.strikes.struck = true;
            self.strike(party, blow);
        }
    }
}
