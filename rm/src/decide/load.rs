//! Load evaluation: what share of a processor one more task would get on each host.

use super::{HostView, SAMPLE_AGE_MAX, Snapshot};
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Above this use of its processors a host has a queue, and runnable threads count instead of used processors.
const SATURATED: f32 = 0.95;

/// What one more task would get on a host. The greater one is the better one; the order is total, so that equal
/// snapshots give equal decisions.
///
/// First counts the share that one thread can use (at most one processor, times the host's speed), then what is in
/// reserve (processors times speed over threads), then fewer tasks of ours, then the lower host id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// Thousandths of an ordinary processor that a single thread gets.
    pub usable: u64,
    /// The same without the limit of one processor.
    pub reserve: u64,
    own: Reverse<u32>,
    host: Reverse<HostId>,
}

impl Share {
    /// The host it speaks of.
    pub fn host(&self) -> HostId {
        self.host.0
    }
}

/// The load of all hosts while decisions are being made: each decision adds to it.
#[derive(Debug)]
pub(super) struct Loads {
    loads: Vec<Load>,
}

#[derive(Debug)]
struct Load {
    host: HostId,
    cores: u64,
    speed: u64,
    own: u32,
    foreign: u32,
}

impl Load {
    fn share(&self) -> Share {
        let threads = u64::from(self.own) + u64::from(self.foreign) + 1;
        let reserve = self.cores * self.speed * 1000 / (threads * 1000);
        Share { usable: reserve.min(self.speed), reserve, own: Reverse(self.own), host: Reverse(self.host) }
    }
}

/// Demand for processors that is not ours, in threads: measured demand less the tasks of ours that were part of it.
/// Whole threads, so that noise in the numbers does not decide.
fn foreign(host: &HostView, now: Micros) -> u32 {
    let Some(sampled) = host.sample.as_ref().filter(|s| now.since(s.at) <= SAMPLE_AGE_MAX) else { return 0 };
    let sample = &sampled.sample;
    let used = sample.busy * sample.cores as f32;
    // Runnable threads are a snapshot of one instant; the mean over a minute calms it.
    let queued = (sample.running as f32 + sample.load1) / 2.0;
    let demand = if sample.busy < SATURATED { used } else { used.max(queued) };
    (demand - sampled.own as f32).round().max(0.0) as u32
}

impl Loads {
    /// The load as the snapshot has it; tasks on their way count at their target.
    pub(super) fn of(snapshot: &Snapshot) -> Loads {
        let mut loads: Vec<Load> = snapshot
            .hosts
            .iter()
            .map(|h| Load {
                host: h.id,
                cores: u64::from(h.cores.max(1)),
                speed: u64::try_from(h.speed).unwrap_or(0).max(1),
                own: 0,
                foreign: foreign(h, snapshot.now),
            })
            .collect();
        for host in &snapshot.hosts {
            for task in host.tasks.iter().filter(|t| !t.pinned) {
                let at = task.moving.flatten().unwrap_or(host.id);
                if let Ok(i) = loads.binary_search_by_key(&at, |l| l.host) {
                    loads[i].own += 1;
                }
            }
        }
        Loads { loads }
    }

    fn index(&self, host: HostId) -> usize {
        self.loads.binary_search_by_key(&host, |l| l.host).expect("loads are made from the snapshot's hosts")
    }

    /// What one more task would get on a host of the snapshot.
    pub(super) fn share(&self, host: HostId) -> Share {
        self.loads[self.index(host)].share()
    }

    /// One more task goes to a host of the snapshot.
    pub(super) fn add(&mut self, host: HostId) {
        let i = self.index(host);
        self.loads[i].own += 1;
    }
}

/// Names of those hosts whose samples are missing or too old, with their age, for the decision's sentence.
pub(super) fn unknown(snapshot: &Snapshot, among: impl Fn(HostId) -> bool) -> Vec<String> {
    let old = |h: &HostView| match &h.sample {
        None => Some(format!("{} (no sample)", h.name)),
        Some(s) if snapshot.now.since(s.at) > SAMPLE_AGE_MAX => {
            Some(format!("{} (sample {} s old)", h.name, snapshot.now.since(s.at).0 / 1_000_000))
        }
        Some(_) => None,
    };
    snapshot.hosts.iter().filter(|h| among(h.id)).filter_map(old).collect()
}
