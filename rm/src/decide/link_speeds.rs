//! Learns from migrations how fast memory is transferred between hosts. The expected speed is the
//! most specific known one: that of the two hosts, else that of their zones, else the mean of all
//! migrations.

use super::{HostId, HostView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;

/// Maximum number of host pairs, and of zone pairs, with a remembered speed. Beyond it, the pair
/// that was updated longest ago is dropped.
pub const PAIRS_MAX: usize = 4096;
/// Assumed speed in bytes per second before any migration was observed.
const BYTES_PER_SECOND: f64 = 200e6;
/// Range of plausible speeds in bytes per second. Measurements outside it are reduced or raised to
/// its ends.
const SPEED_RANGE: std::ops::RangeInclusive<f64> = 1e3..=1e12;
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.2;

/// The two hosts of a migration with their zones, without regard to the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPair {
    hosts: (HostId, HostId),
    zones: (u32, u32),
}

impl HostPair {
    pub fn between(a: &HostView, b: &HostView) -> HostPair {
        let zones = (a.zone.min(b.zone), a.zone.max(b.zone));
        HostPair {
            hosts: (a.id.min(b.id), a.id.max(b.id)),
            zones,
        }
    }
}

/// Observed speed of one pair.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LinkSpeed {
    moves: u32,
    /// Mean of the natural logarithm of the speed in bytes per second.
    log: f64,
    heard: u64,
}

impl LinkSpeed {
    fn updated(previous: Option<LinkSpeed>, log: f64, heard: u64) -> LinkSpeed {
        let LinkSpeed {
            moves, log: mean, ..
        } = previous.unwrap_or(LinkSpeed {
            moves: 0,
            log,
            heard,
        });
        let weight = NEWEST_WEIGHT.max(1.0 / (f64::from(moves) + 1.0));
        LinkSpeed {
            moves: moves.saturating_add(1),
            log: mean + weight * (log - mean),
            heard,
        }
    }
}

/// Transfer speeds by host pair, by zone pair, and over all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct LinkSpeeds {
    hosts: BTreeMap<(HostId, HostId), LinkSpeed>,
    zones: BTreeMap<(u32, u32), LinkSpeed>,
    all: Option<LinkSpeed>,
    heard: u64,
}

impl LinkSpeeds {
    /// Records a transfer of `bytes` in `seconds`.
    pub(super) fn record_transfer(&mut self, pair: Option<HostPair>, bytes: u64, seconds: f64) {
        let log = (bytes as f64 / seconds.max(1e-6))
            .clamp(*SPEED_RANGE.start(), *SPEED_RANGE.end())
            .ln();
        self.heard += 1;
        if let Some(pair) = pair {
            update_pair(&mut self.hosts, pair.hosts, log, self.heard);
            update_pair(&mut self.zones, pair.zones, log, self.heard);
        }
        self.all = Some(LinkSpeed::updated(self.all, log, self.heard));
    }

    /// Returns the expected speed in bytes per second. `way` is `None` if the target is not known
    /// yet.
    pub(super) fn bytes_per_second(&self, pair: Option<HostPair>) -> f64 {
        let of_hosts = pair.and_then(|pair| self.hosts.get(&pair.hosts));
        let of_zones = || pair.and_then(|pair| self.zones.get(&pair.zones));
        let known = of_hosts.or_else(of_zones).or(self.all.as_ref());
        known.map_or(BYTES_PER_SECOND, |speed| speed.log.exp())
    }

    /// Returns the relative speed of the fastest link between a zone and one of the zones
    /// `peers`: compared with the faster of the links within the two zones. `None` until
    /// migrations have measured these links.
    pub(super) fn relative_speed(&self, zone: u32, peers: &BTreeSet<u32>) -> Option<f64> {
        let log = |a: u32, b: u32| self.zones.get(&(a.min(b), a.max(b))).map(|speed| speed.log);
        let within = |a: u32, b: u32| log(a, a).into_iter().chain(log(b, b)).reduce(f64::max);
        let beside = peers
            .iter()
            .filter_map(|peer| Some((log(zone, *peer)? - within(zone, *peer)?).exp()));
        beside.reduce(f64::max)
    }

    /// Drops the speeds of host pairs, because the host numbers denote other hosts now.
    pub(super) fn forget_hosts(&mut self) {
        self.hosts.clear();
    }

    /// True if the stored values are finite and not too many.
    pub(super) fn is_valid(&self) -> bool {
        let all = self
            .hosts
            .values()
            .chain(self.zones.values())
            .chain(&self.all);
        let within_limits = self.hosts.len() <= PAIRS_MAX && self.zones.len() <= PAIRS_MAX;
        within_limits && all.map(|speed| speed.log).all(f64::is_finite)
    }
}

fn update_pair<K: Copy + Ord + Hash>(
    all: &mut BTreeMap<K, LinkSpeed>,
    key: K,
    log: f64,
    heard: u64,
) {
    let speed = LinkSpeed::updated(all.get(&key).copied(), log, heard);
    all.insert(key, speed);
    if all.len() > PAIRS_MAX {
        let oldest = all
            .iter()
            .min_by_key(|(_, speed)| speed.heard)
            .map(|(key, _)| *key);
        all.remove(&oldest.expect("more than the limit"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(a: u16, b: u16, zones: (u32, u32)) -> Option<HostPair> {
        let host = |n| HostId::new(n).expect("an index");
        Some(HostPair {
            hosts: (host(a), host(b)),
            zones,
        })
    }

    /// The speed of a pair comes from its own migrations, else from its zones, else from all
    /// migrations.
    #[test]
    fn pair_speed_falls_back_to_zones_then_all() {
        let mut links = LinkSpeeds::default();
        let near = |links: &LinkSpeeds, way, mb: f64| {
            let speed = links.bytes_per_second(way) / 1e6;
            assert!((speed / mb - 1.0).abs() < 0.01, "{speed} and not {mb}");
        };
        near(&links, way(1, 2, (0, 0)), 200.0);
        links.record_transfer(way(1, 2, (0, 0)), 100_000_000, 0.1);
        near(&links, way(1, 2, (0, 0)), 1000.0);
        links.record_transfer(way(1, 3, (0, 7)), 100_000_000, 10.0);
        near(&links, way(1, 3, (0, 7)), 10.0);
        near(&links, way(2, 3, (0, 7)), 10.0);
        near(&links, way(4, 5, (0, 0)), 1000.0);
        // No task has migrated between these two hosts or zones, so only the overall mean is known.
        near(
            &links,
            way(6, 7, (8, 8)),
            links.bytes_per_second(None) / 1e6,
        );
        links.forget_hosts();
        near(&links, way(1, 2, (0, 0)), 1000.0);
    }

    /// Beyond the maximum, the pair that was updated longest ago is dropped.
    #[test]
    fn least_recently_updated_pairs_are_dropped() {
        let mut links = LinkSpeeds::default();
        for n in 0..=PAIRS_MAX as u32 {
            links.record_transfer(way(1, 2, (n, n)), 1 << 30, 1.0);
        }
        assert!(
            links.is_valid()
                && links.zones.len() == PAIRS_MAX
                && !links.zones.contains_key(&(0, 0))
        );
    }
}
