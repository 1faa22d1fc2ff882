//! Load evaluation: what share of a processor one more task would get on each host.

use super::index::{Index, merged};
use super::{HostView, Reason, SAMPLE_AGE_MAX, Sampled, Snapshot};
use sempa_proto::load::HEADROOM_BYTES;
use sempa_proto::{HostId, Micros};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Above this use of its processors a host has a queue, and runnable threads count instead of used processors.
const SATURATED: f32 = 0.95;
/// Above this share of time spent waiting for a processor, a host that looks half idle is not: a limit of its processors
/// (a cgroup's, a hypervisor's) holds its threads back.
const PRESSED: f32 = 0.25;

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
    /// What our tasks want beyond a thread for each, in threads.
    pub(super) more: u32,
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
            bytes => u32::try_from(bytes.saturating_sub(limits.memory_free) / HEADROOM_BYTES)
                .unwrap_or(u32::MAX),
        };
        let capacity = fresh.filter(|s| s.sample.share > 0.0).map_or(
            u64::from(host.cores.max(1)) * 1000,
            |limited| {
                // Anybody may have written the number.
                (f64::from(limited.sample.share) * 1000.0).clamp(1.0, f64::from(u32::MAX)) as u64
            },
        );
        let speed = u64::try_from(host.speed).unwrap_or(0).max(1);
        let foreign = foreign(host, now).round() as u32;
        let more = fresh.map_or(0.0, |s| demand(s).more).round() as u32;
        let (calm, most) = (host.owner.is_calm(), limits.cores.unwrap_or(u32::MAX));
        Load {
            host: host.id,
            capacity,
            speed,
            own,
            foreign,
            more,
            room,
            calm,
            most,
        }
    }

    /// Tasks that the host's owner still allows.
    pub(super) fn left(&self) -> u32 {
        self.most.saturating_sub(self.own)
    }

    pub(super) fn share(&self) -> Share {
        let reserve = self.capacity * self.speed / 1000 / (self.threads() + 1);
        let (own, host) = (Reverse(self.own), Reverse(self.host));
        Share {
            calm: self.calm,
            roomy: self.room > 0,
            usable: reserve.min(self.speed),
            reserve,
            own,
            host,
        }
    }

    /// What each of our tasks gets now, in thousandths of an ordinary processor.
    pub(super) fn rate(&self) -> f64 {
        self.speed as f64 * (self.processors() / self.threads().max(1) as f64).min(1.0)
    }

    /// All that wants a processor.
    fn threads(&self) -> u64 {
        u64::from(self.own) + u64::from(self.foreign) + u64::from(self.more)
    }

    /// Processors that may be used.
    pub(super) fn processors(&self) -> f64 {
        self.capacity as f64 / 1e3
    }

    /// Hundredths of processors that nobody uses.
    pub(super) fn free_percent(&self) -> u64 {
        (self.capacity / 10).saturating_sub(self.threads() * 100)
    }
}

/// Why the host's owner allows no more tasks there, or not one that has so many bytes of memory already.
pub(super) fn full(
    host: &HostView,
    now: Micros,
    bytes: u64,
    load: impl Fn() -> Load,
) -> Option<Reason<&str>> {
    let limits = &host.terms.limits;
    if let Some(most) = limits.cores.filter(|_| load().left() == 0) {
        return Some(Reason::Cores { most });
    }
    let (keeps, has) = (
        limits.memory_free,
        host.fresh_sample(now)?.sample.available_bytes,
    );
    (keeps > 0 && has < keeps.saturating_add(bytes.max(HEADROOM_BYTES)))
        .then_some(Reason::Memory { keeps, has })
}

/// Demand for processors that is not ours, in threads. 0 when the sample is missing or too old.
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
        ForeignMean {
            threads: demand,
            spread: 0.0,
            seen: FIRST_SPAN,
            last: (now, demand),
        }
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
        ForeignMean {
            threads,
            spread,
            seen,
            last: (now, demand),
        }
    }
}

/// Demand for processors, in threads, as a sample has it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Demand {
    /// That is not ours.
    foreign: f32,
    /// Of our tasks, beyond a thread for each.
    more: f32,
}

fn demand(sampled: &Sampled) -> Demand {
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
    let own = sampled.own as f32;
    let Some(ours) = sample.ours.filter(|ours| ours.is_finite()) else {
        return Demand {
            foreign: (demand - own).max(0.0),
            more: 0.0,
        };
    };
    // Whoever uses a half of what is used is taken for a half of those who want some.
    let foreign = if used > 0.0 {
        (1.0 - ours / used).clamp(0.0, 1.0) * demand
    } else {
        0.0
    };
    Demand {
        foreign,
        more: (demand - foreign - own).max(0.0),
    }
}

/// Demand for processors that is not ours, in threads, as a sample has it: measured demand less the part of our tasks, by what
/// they were measured to use. Where that is not known each of our tasks counts as a thread.
pub fn foreign_demand(sampled: &Sampled) -> f32 {
    demand(sampled).foreign
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
        Near {
            calm: share.calm,
            roomy: share.roomy,
            usable: share.usable * u64::from(permille),
            share,
        }
    }
}

/// The load of all hosts while decisions are being made: each decision changes it.
#[derive(Debug)]
pub(super) struct Loads<'a> {
    index: Cow<'a, Index>,
    snapshot: &'a Snapshot,
    changed: BTreeMap<HostId, Load>,
    over: BTreeSet<Share>,
}

impl<'a> Loads<'a> {
    /// The load as the snapshot has it; tasks on their way count at their target.
    pub(super) fn of(snapshot: &'a Snapshot) -> Loads<'a> {
        let index = snapshot.hosts.index(snapshot.now);
        Loads {
            index,
            snapshot,
            changed: BTreeMap::new(),
            over: BTreeSet::new(),
        }
    }

    pub(super) fn load(&self, host: HostId) -> Load {
        let of_index = || {
            self.index
                .load(host)
                .expect("loads are made from the snapshot's hosts")
        };
        self.changed.get(&host).copied().unwrap_or_else(of_index)
    }

    /// What one more task would get on a host of the snapshot.
    pub(super) fn share(&self, host: HostId) -> Share {
        self.load(host).share()
    }

    /// One more task goes to a host of the snapshot. Answers what the next one would get there.
    pub(super) fn add(&mut self, host: HostId) -> Share {
        let before = self.load(host);
        let after = Load {
            own: before.own + 1,
            room: before.room.saturating_sub(1),
            ..before
        };
        self.change(host, after)
    }

    /// So many tasks fewer compute on a host of the snapshot, or more again.
    pub(super) fn put(&mut self, host: HostId, own: u32) {
        let after = Load {
            own,
            ..self.load(host)
        };
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
        self.index
            .zone(host)
            .map_or(1000, |zone| self.snapshot.permille(zone, peers))
    }

    pub(super) fn near(&self, share: Share, peers: &BTreeSet<u32>) -> Near {
        Near::of(share, self.permille(share.host(), peers))
    }

    /// All hosts without an owner, the best first. Nothing is looked at that is not asked for.
    pub(super) fn best(&self, peers: &BTreeSet<u32>) -> impl Iterator<Item = Near> {
        let lists = self.index.zones().map(|(zone, shares)| {
            let permille = self.snapshot.permille(*zone, peers);
            let unchanged = shares
                .iter()
                .rev()
                .filter(|s| !self.changed.contains_key(&s.host()));
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
    let old = |host: &HostView| {
        Some(format!(
            "{} ({})",
            host.name,
            why_unknown(host, snapshot.now)?
        ))
    };
    among
        .filter_map(|id| snapshot.host(id))
        .filter_map(old)
        .collect()
}

/// Why nobody knows the load of a host, if that is so.
pub(super) fn why_unknown(host: &HostView, now: Micros) -> Option<String> {
    match &host.sample {
        None => Some("no sample".into()),
        Some(s) if now.since(s.at) > SAMPLE_AGE_MAX => {
            Some(format!("sample {} s old", now.since(s.at).0 / 1_000_000))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::load::LoadSample;

    /// Of a host with two processors.
    fn sampled(busy: f32, queue: u32, ours: Option<f32>, own: u32) -> Sampled {
        let sample = LoadSample {
            cores: 2,
            busy,
            running: queue,
            load1: queue as f32,
            ours,
            ..LoadSample::default()
        };
        Sampled {
            sample,
            at: Micros(0),
            own,
        }
    }

    #[test]
    fn a_guest_that_does_nothing_hides_nobody() {
        // An owner's process, and a task of ours that waits.
        assert_eq!(foreign_demand(&sampled(0.5, 1, Some(0.0), 1)), 1.0);
        assert_eq!(
            foreign_demand(&sampled(0.5, 1, None, 1)),
            0.0,
            "nobody has measured it"
        );
        // Two of the owner's at full load, and five that wait.
        assert_eq!(foreign_demand(&sampled(1.0, 2, Some(0.0), 5)), 2.0);
    }

    #[test]
    fn the_threads_of_a_guest_are_not_somebody_elses_and_take_room_all_the_same() {
        let eight = sampled(1.0, 8, Some(2.0), 1);
        assert_eq!(
            demand(&eight),
            Demand {
                foreign: 0.0,
                more: 7.0
            }
        );
        // Beside two processes of the owner's.
        let Demand { foreign, more } = demand(&sampled(1.0, 10, Some(1.6), 1));
        assert!(
            (foreign - 2.0).abs() < 0.01 && (more - 7.0).abs() < 0.01,
            "{foreign} {more}"
        );
        // It needs less than a processor.
        assert_eq!(
            demand(&sampled(0.25, 0, Some(0.5), 1)),
            Demand {
                foreign: 0.0,
                more: 0.0
            }
        );
    }

    #[test]
    fn what_anybody_may_have_written_gives_some_demand_that_is_not_negative() {
        for ours in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
            for busy in [0.0, 0.3, 1.0] {
                let Demand { foreign, more } = demand(&sampled(busy, 3, Some(ours), 2));
                assert!(
                    foreign >= 0.0 && more >= 0.0 && foreign.is_finite() && more.is_finite(),
                    "{ours} {busy}"
                );
            }
        }
    }
}
