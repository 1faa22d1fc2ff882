//! Load evaluation: what share of a processor one more task would get on each host.

use super::index::{Index, merged};
use super::{Costs, HostView, Reason, SAMPLE_AGE_MAX, Sampled, Snapshot};
use sempa_proto::{HostId, Micros};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Above this use of its processors a host has a queue, and runnable threads count instead of used processors.
const SATURATED: f32 = 0.95;
/// Above this share of time spent waiting for a processor, a host that looks half idle is not: a limit of its processors
/// (a cgroup's, a hypervisor's) holds its threads back.
const PRESSED: f32 = 0.25;
/// Memory that a host must have to spare for each task that is put there, unless the request names an amount; hosts with
/// less come last.
pub const HEADROOM_BYTES: u64 = 64 << 20;

/// What one more task would get on a host. The greater one is the better one; the order is total, so that equal
/// snapshots give equal decisions.
///
/// Hosts that nobody seems to use come first, then those with memory to spare. Then counts the share that one thread can use (at most one processor, times the
/// host's speed), then what is in reserve (processors times speed over threads), then fewer tasks of ours, then the lower
/// host id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// Nobody seems to use the host.
    pub calm: bool,
    /// There is [`HEADROOM_BYTES`] for one more task, or nobody knows.
    pub roomy: bool,
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

/// The load of one host as decisions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) host: HostId,
    /// Thousandths of processors that may be used.
    pub(super) capacity: u64,
    pub(super) speed: u64,
    /// Tasks of ours, those on their way to it included.
    pub(super) own: u32,
    /// Demand that is not ours, in threads.
    pub(super) foreign: u32,
    /// Tasks for which there is memory.
    pub(super) room: u32,
    /// Nobody seems to use the host.
    pub(super) calm: bool,
    /// Tasks of ours at most.
    pub(super) most: u32,
}

impl Load {
    /// Of a host on which `own` tasks of ours are.
    pub(super) fn of(host: &HostView, now: Micros, own: u32) -> Load {
        let fresh = host.fresh_sample(now);
        let available = fresh.map_or(0, |s| s.sample.available_bytes);
        let limits = &host.terms.limits;
        let room = match available {
            0 => u32::MAX,
            bytes => u32::try_from(bytes.saturating_sub(limits.memory_free) / HEADROOM_BYTES).unwrap_or(u32::MAX),
        };
        let capacity = fresh.filter(|s| s.sample.share > 0.0).map_or(u64::from(host.cores.max(1)) * 1000, |limited| {
            // Anybody may have written the number.
            (f64::from(limited.sample.share) * 1000.0).clamp(1.0, f64::from(u32::MAX)) as u64
        });
        let speed = u64::try_from(host.speed).unwrap_or(0).max(1);
        let foreign = foreign(host, now).round() as u32;
        let (calm, most) = (host.owner.is_calm(), limits.cores.unwrap_or(u32::MAX));
        Load { host: host.id, capacity, speed, own, foreign, room, calm, most }
    }

    /// Tasks that the host's owner still allows.
    pub(super) fn left(&self) -> u32 {
        self.most.saturating_sub(self.own)
    }

    pub(super) fn share(&self) -> Share {
        let threads = u64::from(self.own) + u64::from(self.foreign) + 1;
        let reserve = self.capacity * self.speed / 1000 / threads;
        let (own, host) = (Reverse(self.own), Reverse(self.host));
        Share { calm: self.calm, roomy: self.room > 0, usable: reserve.min(self.speed), reserve, own, host }
    }

    /// What each of our tasks gets now, in thousandths of an ordinary processor.
    pub(super) fn rate(&self) -> f64 {
        let threads = f64::from(self.own) + f64::from(self.foreign);
        self.speed as f64 * (self.processors() / threads.max(1.0)).min(1.0)
    }

    /// Processors that may be used.
    pub(super) fn processors(&self) -> f64 {
        self.capacity as f64 / 1e3
    }

    /// Hundredths of processors that nobody uses.
    pub(super) fn free_percent(&self) -> u64 {
        (self.capacity / 10).saturating_sub((u64::from(self.own) + u64::from(self.foreign)) * 100)
    }
}

/// Why the host's owner allows no more tasks there.
pub(super) fn full(host: &HostView, now: Micros, load: impl Fn() -> Load) -> Option<Reason> {
    let limits = &host.terms.limits;
    if let Some(most) = limits.cores.filter(|_| load().left() == 0) {
        return Some(Reason::Cores { most });
    }
    let (keeps, has) = (limits.memory_free, host.fresh_sample(now)?.sample.available_bytes);
    (keeps > 0 && has < keeps.saturating_add(HEADROOM_BYTES)).then_some(Reason::Memory { keeps, has })
}

/// Demand for processors that is not ours, in threads: measured demand less the tasks of ours that were part of it. 0 when
/// the sample is missing or too old.
pub(super) fn foreign(host: &HostView, now: Micros) -> f32 {
    host.fresh_sample(now).map_or(0.0, foreign_demand)
}

/// The mean of load that is not ours is over so long.
const FOREIGN_SPAN: Micros = Micros::from_secs(120);
/// What the first sample of a host counts for.
const FIRST_SPAN: Micros = Micros::from_secs(5);

/// Demand for processors that is not ours, in threads, as a mean over some minutes. As long as a host has been looked at for less,
/// all that was seen counts alike: a mean that begins with what the first sample happened to find would take it for the rule.
///
/// Load watchers report what has changed. So a demand counts for the time until the next report, not for that before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForeignMean {
    /// The mean.
    pub threads: f32,
    /// How far from the mean it was, on average.
    pub spread: f32,
    seen: Micros,
    /// What the last sample said, and when it came.
    last: (Micros, f32),
}

impl ForeignMean {
    /// The first sample has this demand.
    pub fn first(now: Micros, demand: f32) -> ForeignMean {
        ForeignMean { threads: demand, spread: 0.0, seen: FIRST_SPAN, last: (now, demand) }
    }

    /// Another one has come.
    pub fn after(self, now: Micros, demand: f32) -> ForeignMean {
        let (since, before) = self.last;
        let span = now.since(since);
        let (seen, span) = (self.seen + span, span.0 as f32);
        let fades = 1.0 - (-span / FOREIGN_SPAN.0 as f32).exp();
        let weight = fades.max(span / seen.0 as f32);
        let threads = self.threads + weight * (before - self.threads);
        let spread = self.spread + weight * ((before - threads).abs() - self.spread);
        ForeignMean { threads, spread, seen, last: (now, demand) }
    }
}

/// Demand for processors that is not ours, in threads, as a sample has it.
pub fn foreign_demand(sampled: &Sampled) -> f32 {
    let sample = &sampled.sample;
    let used = sample.busy * sample.processors();
    // Runnable threads are a snapshot of one instant; the mean over a minute calms it.
    let queued = (sample.running as f32 + sample.load1) / 2.0;
    let demand = if sample.busy >= SATURATED {
        used.max(queued)
    } else if sample.pressure >= PRESSED {
        // Threads that get this share of what they want would use so much without the limit.
        used / (1.0 - sample.pressure).max(0.25)
    } else {
        used
    };
    (demand - sampled.own as f32).max(0.0)
}

/// A share seen from the task's peers: a host behind a slower link counts for less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Near {
    calm: bool,
    roomy: bool,
    usable: u64,
    pub(super) share: Share,
}

impl Near {
    fn of(share: Share, permille: u32) -> Near {
        Near { calm: share.calm, roomy: share.roomy, usable: share.usable * u64::from(permille), share }
    }
}

/// The load of all hosts while decisions are being made: each decision changes it.
#[derive(Debug)]
pub(super) struct Loads<'a> {
    index: Cow<'a, Index>,
    costs: Costs,
    changed: BTreeMap<HostId, Load>,
    over: BTreeSet<Share>,
}

impl<'a> Loads<'a> {
    /// The load as the snapshot has it; tasks on their way count at their target.
    pub(super) fn of(snapshot: &'a Snapshot) -> Loads<'a> {
        let index = snapshot.hosts.index(snapshot.now);
        Loads { index, costs: snapshot.costs, changed: BTreeMap::new(), over: BTreeSet::new() }
    }

    pub(super) fn load(&self, host: HostId) -> Load {
        let of_index = || self.index.load(host).expect("loads are made from the snapshot's hosts");
        self.changed.get(&host).copied().unwrap_or_else(of_index)
    }

    /// What one more task would get on a host of the snapshot.
    pub(super) fn share(&self, host: HostId) -> Share {
        self.load(host).share()
    }

    /// One more task goes to a host of the snapshot. Answers what the next one would get there.
    pub(super) fn add(&mut self, host: HostId) -> Share {
        let before = self.load(host);
        let after = Load { own: before.own + 1, room: before.room.saturating_sub(1), ..before };
        self.change(host, after)
    }

    /// So many tasks fewer compute on a host of the snapshot, or more again.
    pub(super) fn put(&mut self, host: HostId, own: u32) {
        let after = Load { own, ..self.load(host) };
        self.change(host, after);
    }

    fn change(&mut self, host: HostId, after: Load) -> Share {
        if let Some(before) = self.changed.insert(host, after) {
            self.over.remove(&before.share());
        }
        if self.index.is_ranked(host) {
            self.over.insert(after.share());
        }
        after.share()
    }

    /// How much a host counts for a task whose peers are in these zones, in thousandths.
    pub(super) fn permille(&self, host: HostId, peers: &BTreeSet<u32>) -> u32 {
        let zone = self.index.zone(host);
        self.costs.permille(peers.is_empty() || zone.is_none_or(|zone| peers.contains(&zone)))
    }

    pub(super) fn near(&self, share: Share, peers: &BTreeSet<u32>) -> Near {
        Near::of(share, self.permille(share.host(), peers))
    }

    /// All hosts without an owner, the best first. Nothing is looked at that is not asked for.
    pub(super) fn best(&self, peers: &BTreeSet<u32>) -> impl Iterator<Item = Near> {
        let lists = self.index.zones().map(|(zone, shares)| {
            let permille = self.costs.permille(peers.is_empty() || peers.contains(zone));
            let unchanged = shares.iter().rev().filter(|s| !self.changed.contains_key(&s.host()));
            unchanged.map(move |s| Near::of(*s, permille))
        });
        let mut lists = merged(lists).peekable();
        let mut over: Vec<Near> = self.over.iter().map(|s| self.near(*s, peers)).collect();
        over.sort_unstable();
        std::iter::from_fn(move || match (lists.peek(), over.last()) {
            (Some(near), Some(changed)) if changed > near => over.pop(),
            (Some(_), _) => lists.next(),
            (None, _) => over.pop(),
        })
    }
}

/// Names of those hosts whose samples are missing or too old, with their age, for the decision's sentence.
pub(super) fn unknown(snapshot: &Snapshot, among: impl Iterator<Item = HostId>) -> Vec<String> {
    let old = |h: &HostView| match &h.sample {
        None => Some(format!("{} (no sample)", h.name)),
        Some(s) if snapshot.now.since(s.at) > SAMPLE_AGE_MAX => {
            Some(format!("{} (sample {} s old)", h.name, snapshot.now.since(s.at).0 / 1_000_000))
        }
        Some(_) => None,
    };
    among.filter_map(|id| snapshot.host(id)).filter_map(old).collect()
}
