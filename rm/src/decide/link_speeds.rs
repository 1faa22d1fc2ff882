//! Learns from migrations how fast memory is transferred between hosts. The expected speed is the
//! most specific known speed: that of the two hosts, otherwise that of their zones, otherwise the
//! mean of all migrations.

use super::{HostId, HostView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;

/// Maximum number of host pairs, and of zone pairs, with a remembered speed. When another pair is
/// added, the pair that was updated longest ago is removed.
pub const PAIRS_MAX: usize = 4096;
/// Assumed speed in bytes per second before any migration was observed.
const DEFAULT_BYTES_PER_SECOND: f64 = 200e6;
/// Range of plausible speeds in bytes per second. A measurement below or above the range is set to
/// the nearest bound.
const BYTES_PER_SECOND_RANGE: std::ops::RangeInclusive<f64> = 1e3..=1e12;
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.2;

/// The two hosts of a migration with their zones, without regard to the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPair {
    hosts: (HostId, HostId),
    zones: (u32, u32),
}

impl HostPair {
    pub fn between(a: &HostView, b: &HostView) -> Self {
        let zones = (a.zone.min(b.zone), a.zone.max(b.zone));
        Self {
            hosts: (a.id.min(b.id), a.id.max(b.id)),
            zones,
        }
    }
}

/// Observed speed of one pair.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LinkSpeed {
    migration_count: u32,
    /// Mean of the natural logarithm of the speed in bytes per second.
    mean_log: f64,
    update_number: u64,
}

impl LinkSpeed {
    fn with_sample(previous: Option<Self>, log: f64, number: u64) -> Self {
        let Self {
            migration_count: sample_count,
            mean_log: mean,
            ..
        } = previous.unwrap_or(Self {
            migration_count: 0,
            mean_log: log,
            update_number: number,
        });
        let weight = NEWEST_WEIGHT.max(1.0 / (f64::from(sample_count) + 1.0));
        Self {
            migration_count: sample_count.saturating_add(1),
            mean_log: mean + weight * (log - mean),
            update_number: number,
        }
    }
}

/// Transfer speeds by host pair, by zone pair, and as a mean of all migrations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct LinkSpeeds {
    host_pairs: BTreeMap<(HostId, HostId), LinkSpeed>,
    zone_pairs: BTreeMap<(u32, u32), LinkSpeed>,
    overall: Option<LinkSpeed>,
    update_count: u64,
}

impl LinkSpeeds {
    /// Records that `bytes` were transferred in `seconds`. Without a pair, updates only the mean of
    /// all migrations.
    pub(super) fn record_transfer(&mut self, pair: Option<HostPair>, bytes: u64, seconds: f64) {
        let log_speed = (bytes as f64 / seconds.max(1e-6))
            .clamp(
                *BYTES_PER_SECOND_RANGE.start(),
                *BYTES_PER_SECOND_RANGE.end(),
            )
            .ln();
        self.update_count += 1;
        if let Some(pair) = pair {
            update_pair(
                &mut self.host_pairs,
                pair.hosts,
                log_speed,
                self.update_count,
            );
            update_pair(
                &mut self.zone_pairs,
                pair.zones,
                log_speed,
                self.update_count,
            );
        }
        self.overall = Some(LinkSpeed::with_sample(
            self.overall,
            log_speed,
            self.update_count,
        ));
    }

    /// Returns the expected speed in bytes per second. `pair` is `None` if the target is not known
    /// yet.
    pub(super) fn bytes_per_second(&self, pair: Option<HostPair>) -> f64 {
        let host_speed = pair.and_then(|pair| self.host_pairs.get(&pair.hosts));
        let zone_speed = || pair.and_then(|pair| self.zone_pairs.get(&pair.zones));
        let best_known_speed = host_speed.or_else(zone_speed).or(self.overall.as_ref());
        best_known_speed.map_or(DEFAULT_BYTES_PER_SECOND, |speed| speed.mean_log.exp())
    }

    /// Returns the relative speed of the fastest link between `zone` and one of the zones
    /// `peer_zones`. The speed is relative to the faster of the links within the two zones. Returns
    /// `None` until migrations have measured these links.
    pub(super) fn relative_speed(&self, zone: u32, peer_zones: &BTreeSet<u32>) -> Option<f64> {
        let pair_log = |a: u32, b: u32| {
            self.zone_pairs
                .get(&(a.min(b), a.max(b)))
                .map(|speed| speed.mean_log)
        };
        let intra_zone_log = |a: u32, b: u32| {
            pair_log(a, a)
                .into_iter()
                .chain(pair_log(b, b))
                .reduce(f64::max)
        };
        let relative_speeds = peer_zones
            .iter()
            .filter_map(|peer| Some((pair_log(zone, *peer)? - intra_zone_log(zone, *peer)?).exp()));
        relative_speeds.reduce(f64::max)
    }

    /// Removes the speeds of all host pairs, because the host numbers now denote other hosts.
    pub(super) fn clear_host_pairs(&mut self) {
        self.host_pairs.clear();
    }

    /// True if the restored values are finite and the numbers of pairs do not exceed [`PAIRS_MAX`].
    pub(super) fn is_valid(&self) -> bool {
        let speeds = self
            .host_pairs
            .values()
            .chain(self.zone_pairs.values())
            .chain(&self.overall);
        let within_limits =
            self.host_pairs.len() <= PAIRS_MAX && self.zone_pairs.len() <= PAIRS_MAX;
        within_limits && speeds.map(|speed| speed.mean_log).all(f64::is_finite)
    }
}

fn update_pair<K: Copy + Ord + Hash>(
    speeds: &mut BTreeMap<K, LinkSpeed>,
    key: K,
    log: f64,
    number: u64,
) {
    let speed = LinkSpeed::with_sample(speeds.get(&key).copied(), log, number);
    speeds.insert(key, speed);
    if speeds.len() > PAIRS_MAX {
        let oldest_key = speeds
            .iter()
            .min_by_key(|(_, speed)| speed.update_number)
            .map(|(key, _)| *key);
        speeds.remove(&oldest_key.expect("more than the limit"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_pair(a: u16, b: u16, zones: (u32, u32)) -> Option<HostPair> {
        let host = |n| HostId::new(n).expect("an index");
        Some(HostPair {
            hosts: (host(a), host(b)),
            zones,
        })
    }

    /// The expected speed of a pair comes from migrations between its hosts, otherwise between its
    /// zones, otherwise from all migrations.
    #[test]
    fn pair_speed_falls_back_to_zones_then_overall_mean() {
        let mut links = LinkSpeeds::default();
        let assert_megabytes_per_second = |links: &LinkSpeeds, pair, megabytes: f64| {
            let speed = links.bytes_per_second(pair) / 1e6;
            assert!(
                (speed / megabytes - 1.0).abs() < 0.01,
                "{speed} and not {megabytes}"
            );
        };
        assert_megabytes_per_second(&links, host_pair(1, 2, (0, 0)), 200.0);
        links.record_transfer(host_pair(1, 2, (0, 0)), 100_000_000, 0.1);
        assert_megabytes_per_second(&links, host_pair(1, 2, (0, 0)), 1000.0);
        links.record_transfer(host_pair(1, 3, (0, 7)), 100_000_000, 10.0);
        assert_megabytes_per_second(&links, host_pair(1, 3, (0, 7)), 10.0);
        assert_megabytes_per_second(&links, host_pair(2, 3, (0, 7)), 10.0);
        assert_megabytes_per_second(&links, host_pair(4, 5, (0, 0)), 1000.0);
        // No task has migrated between these two hosts or zones, so only the overall mean is known.
        assert_megabytes_per_second(
            &links,
            host_pair(6, 7, (8, 8)),
            links.bytes_per_second(None) / 1e6,
        );
        links.clear_host_pairs();
        assert_megabytes_per_second(&links, host_pair(1, 2, (0, 0)), 1000.0);
    }

    /// When [`PAIRS_MAX`] is exceeded, the pair that was updated longest ago is removed.
    #[test]
    fn least_recently_updated_pairs_are_dropped() {
        let mut links = LinkSpeeds::default();
        for n in 0..=PAIRS_MAX as u32 {
            links.record_transfer(host_pair(1, 2, (n, n)), 1 << 30, 1.0);
        }
        assert!(
            links.is_valid()
                && links.zone_pairs.len() == PAIRS_MAX
                && !links.zone_pairs.contains_key(&(0, 0))
        );
    }
}
