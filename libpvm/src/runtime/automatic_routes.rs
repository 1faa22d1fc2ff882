//! Direct routes that the library sets up on its own, for programs that permit direct routes
//! (`PvmAllowDirect`, the default) and do not request them. This module decides for which peers
//! and when; it does no I/O.
//!
//! - A route is requested with the message number [`MESSAGES_BEFORE_REQUEST`] to a peer on another
//!   host. No call waits for the route: messages go through the daemons until it is there.
//! - The program notices nothing: there is no notification of the route or of its end.
//! - A failure is remembered. The next attempt follows a message after a delay that grows with each
//!   failure. If a peer accepted but could not connect, the whole host of the peer is left alone.
//! - When the task has [`AUTOMATIC_ROUTES_MAX`] automatic routes, a new one replaces the least
//!   recently used one.

use rustc_hash::FxHashMap;
use sempa_proto::{Micros, Tid};

/// Maximum number of automatic direct routes of one task.
pub(crate) const AUTOMATIC_ROUTES_MAX: usize = 256;
/// Automatic direct routes use at most one of this number of descriptors that the process may open.
const DESCRIPTORS_PER_ROUTE: u64 = 4;
/// Number of the message to a peer with which a route is requested. Many pairs of tasks exchange
/// only a few messages, for which a connection costs more than it saves.
const MESSAGES_BEFORE_REQUEST: u8 = 3;
/// Maximum number of peers whose messages are counted. Further peers get no automatic routes.
const COUNTED_PEERS_MAX: usize = 1 << 16;
/// Delay of the next attempt after a first failure. Each further failure doubles the delay.
const RETRY_DELAY_MIN: Micros = Micros::from_secs(10);
/// Maximum delay of the next attempt.
const RETRY_DELAY_MAX: Micros = Micros::from_secs(3600);
/// A route that ends sooner counts as a failure, so that a pair does not connect all the time.
const ROUTE_LIFETIME_MIN: Micros = Micros::from_secs(10);
/// A route that carried a frame within this time is not given up for another one, and the other one
/// is tried again after this time. Otherwise a task that sends to more peers in turn than it may
/// have routes would connect all the time.
const EVICTION_SILENCE_MIN: Micros = Micros::from_secs(1);

/// Reason why a route was not established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureScope {
    /// The peer refused or gave no answer.
    Peer,
    /// No connection to the host of the peer can be established, or none from that host.
    Host,
}

/// Failed attempts, and when to try again.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff {
    failure_count: u32,
    retry_at: Micros,
}

impl Backoff {
    fn record_failure(&mut self, now: Micros) {
        let doublings = self.failure_count.min(RETRY_DELAY_MAX.0.ilog2());
        let delay = (RETRY_DELAY_MIN.0 << doublings).min(RETRY_DELAY_MAX.0);
        self.failure_count += 1;
        self.retry_at = now + Micros(delay);
    }
}

/// Record of a peer to which messages went through the daemons.
#[derive(Clone, Copy, Debug, Default)]
struct PeerRecord {
    message_count: u8,
    /// Time at which the present route was established.
    established_at: Micros,
    backoff: Backoff,
}

/// Decides for which peers this task requests and accepts automatic direct routes.
#[derive(Debug)]
pub(crate) struct AutomaticRoutes {
    is_enabled_by_user: bool,
    is_enabled_by_daemon: bool,
    /// Maximum number of automatic routes, unless the process may open few descriptors.
    routes_max: usize,
    peers: FxHashMap<Tid, PeerRecord>,
    /// Failures of connections, by the birth host of the peer: the library does not know where a
    /// peer runs.
    hosts: FxHashMap<Tid, Backoff>,
}

impl AutomaticRoutes {
    pub(crate) fn new(is_enabled_by_daemon: bool) -> Self {
        Self {
            is_enabled_by_user: false,
            is_enabled_by_daemon,
            routes_max: AUTOMATIC_ROUTES_MAX,
            peers: FxHashMap::default(),
            hosts: FxHashMap::default(),
        }
    }

    /// Sets whether the user permits automatic routes. They are forbidden at first.
    pub(crate) fn set_enabled_by_user(&mut self, is_enabled: bool) {
        self.is_enabled_by_user = is_enabled;
    }

    /// Forgets what was learned, because the task is on another host now, whose daemon permits
    /// automatic routes or does not.
    pub(crate) fn reset_for_host(&mut self, is_enabled_by_daemon: bool) {
        *self = Self {
            is_enabled_by_user: self.is_enabled_by_user,
            routes_max: self.routes_max,
            ..Self::new(is_enabled_by_daemon)
        };
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.is_enabled_by_user && self.is_enabled_by_daemon
    }

    /// Returns the number of automatic routes that the task may have if it may open this number of
    /// descriptors. The program needs most of them.
    pub(crate) fn routes_max(&self, descriptors_max: u64) -> usize {
        usize::try_from(descriptors_max / DESCRIPTORS_PER_ROUTE)
            .map_or(self.routes_max, |count| count.min(self.routes_max))
    }

    #[cfg(test)]
    pub(crate) fn set_routes_max(&mut self, routes_max: usize) {
        self.routes_max = routes_max;
    }

    /// Counts a message that was sent to a peer through the daemons. Returns true if a route to the
    /// peer should be requested now, should the peer be on another host.
    #[inline]
    pub(crate) fn count_message(&mut self, now: Micros, peer: Tid) -> bool {
        if !self.is_enabled() {
            return false;
        }
        if self.peers.len() >= COUNTED_PEERS_MAX && !self.peers.contains_key(&peer) {
            return false;
        }
        let record = self.peers.entry(peer).or_default();
        record.message_count = record
            .message_count
            .saturating_add(1)
            .min(MESSAGES_BEFORE_REQUEST);
        record.message_count >= MESSAGES_BEFORE_REQUEST
            && record.backoff.retry_at <= now
            && self
                .hosts
                .get(&peer.host_part())
                .is_none_or(|host| host.retry_at <= now)
    }

    /// Records that the route to a peer was established.
    pub(crate) fn record_established(&mut self, now: Micros, peer: Tid) {
        self.hosts.remove(&peer.host_part());
        if self.peers.len() < COUNTED_PEERS_MAX || self.peers.contains_key(&peer) {
            let record = self.peers.entry(peer).or_default();
            (record.message_count, record.established_at) = (0, now);
        }
    }

    /// Records that the route to a peer has ended. A task that itself gives up the route
    /// (`is_given_up`) may request it again soon.
    pub(crate) fn record_end(&mut self, now: Micros, peer: Tid, is_given_up: bool) {
        let Some(record) = self.peers.get_mut(&peer) else {
            return;
        };
        record.message_count = 0;
        if is_given_up || now.since(record.established_at) >= ROUTE_LIFETIME_MIN {
            record.backoff = Backoff::default();
        } else {
            record.backoff.record_failure(now);
        }
    }

    /// Records that a route to a peer was not established.
    pub(crate) fn record_failure(&mut self, now: Micros, peer: Tid, scope: FailureScope) {
        if self.peers.len() < COUNTED_PEERS_MAX || self.peers.contains_key(&peer) {
            self.peers
                .entry(peer)
                .or_default()
                .backoff
                .record_failure(now);
        }
        if scope == FailureScope::Host {
            self.hosts
                .entry(peer.host_part())
                .or_default()
                .record_failure(now);
        }
    }

    /// Records that there is no room for a route to a peer, because all routes are in use.
    pub(crate) fn record_full(&mut self, now: Micros, peer: Tid) {
        if let Some(record) = self.peers.get_mut(&peer) {
            record.backoff.retry_at = now + EVICTION_SILENCE_MIN;
        }
    }

    /// Forgets what is known of a peer that has ended or migrated.
    pub(crate) fn forget_peer(&mut self, peer: Tid) {
        self.peers.remove(&peer);
    }
}

/// Returns the route to be given up for a new one: the least recently used one, unless all are in
/// use. `routes` contains the peers and the times of the last traffic.
pub(crate) fn least_recently_used(
    now: Micros,
    routes: impl Iterator<Item = (Tid, Micros)>,
) -> Option<Tid> {
    routes
        .filter(|(_, last_traffic_at)| now.since(*last_traffic_at) >= EVICTION_SILENCE_MIN)
        .min_by_key(|(peer, last_traffic_at)| (*last_traffic_at, *peer))
        .map(|(peer, _)| peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Tid = Tid::from_raw(0x80001);
    const NEIGHBOR: Tid = Tid::from_raw(0x80002);

    fn enabled_routes() -> AutomaticRoutes {
        let mut routes = AutomaticRoutes::new(true);
        routes.set_enabled_by_user(true);
        routes
    }

    /// Sends as many messages as are needed before a first request.
    fn count_first_messages(routes: &mut AutomaticRoutes, now: Micros, peer: Tid) {
        for _ in 1..MESSAGES_BEFORE_REQUEST {
            assert!(!routes.count_message(now, peer));
        }
    }

    #[test]
    fn third_message_requests_route() {
        let mut routes = enabled_routes();
        let now = Micros(5);
        let due: Vec<bool> = (0..4).map(|_| routes.count_message(now, PEER)).collect();
        assert_eq!(due, [false, false, true, true]);
        assert!(!routes.count_message(now, NEIGHBOR), "each peer counts");
        routes.forget_peer(PEER);
        count_first_messages(&mut routes, now, PEER);
        assert!(routes.count_message(now, PEER));
        routes.record_established(now, PEER);
        routes.record_end(now + ROUTE_LIFETIME_MIN, PEER, false);
        count_first_messages(&mut routes, now + ROUTE_LIFETIME_MIN, PEER);
        assert!(routes.count_message(now + ROUTE_LIFETIME_MIN, PEER));
    }

    /// Both the user and the administrator can forbid automatic routes.
    #[test]
    fn both_switches_forbid_routes() {
        for (user, daemon) in [(false, true), (true, false), (false, false)] {
            let mut routes = AutomaticRoutes::new(daemon);
            routes.set_enabled_by_user(user);
            assert!(!routes.is_enabled());
            assert!((0..10).all(|_| !routes.count_message(Micros(1), PEER)));
            // The next host may permit what the user permits.
            routes.reset_for_host(true);
            assert_eq!(routes.is_enabled(), user);
        }
    }

    /// After each refusal the next attempt follows after twice the delay, up to a limit.
    #[test]
    fn refusals_delay_next_attempt() {
        let mut routes = enabled_routes();
        let mut now = Micros(1);
        count_first_messages(&mut routes, now, PEER);
        let mut delay = RETRY_DELAY_MIN;
        for _ in 0..40 {
            assert!(routes.count_message(now, PEER));
            routes.record_failure(now, PEER, FailureScope::Peer);
            assert!(!routes.count_message(now + Micros(delay.0 - 1), PEER));
            now = now + delay;
            delay = Micros((delay.0 * 2).min(RETRY_DELAY_MAX.0));
        }
        assert_eq!(delay, RETRY_DELAY_MAX);
        count_first_messages(&mut routes, now, NEIGHBOR);
        assert!(
            routes.count_message(now, NEIGHBOR),
            "only the peer has refused"
        );
    }

    /// A connection that fails delays the attempts to all tasks of the host, until one succeeds.
    #[test]
    fn failed_connection_delays_whole_host() {
        let mut routes = enabled_routes();
        let now = Micros(1);
        for peer in [PEER, NEIGHBOR] {
            count_first_messages(&mut routes, now, peer);
        }
        routes.record_failure(now, PEER, FailureScope::Host);
        assert!(!routes.count_message(now, NEIGHBOR));
        assert!(routes.count_message(now + RETRY_DELAY_MIN, NEIGHBOR));
        routes.record_failure(now, PEER, FailureScope::Host);
        assert!(!routes.count_message(now + RETRY_DELAY_MIN, NEIGHBOR));
        routes.record_established(now, PEER);
        assert!(routes.count_message(now, NEIGHBOR));
    }

    /// A route that ends at once counts as a failure, unless this task gave it up.
    #[test]
    fn short_lived_route_counts_as_failure() {
        let mut routes = enabled_routes();
        let now = Micros(1);
        for (is_given_up, is_due) in [(true, true), (false, false)] {
            routes.record_established(now, PEER);
            routes.record_end(now, PEER, is_given_up);
            count_first_messages(&mut routes, now, PEER);
            assert_eq!(routes.count_message(now, PEER), is_due);
        }
    }

    #[test]
    fn least_recently_used_route_is_given_up() {
        let now = Micros::from_secs(10);
        let idle = now.0 - EVICTION_SILENCE_MIN.0;
        let routes = [(PEER, Micros(idle)), (NEIGHBOR, Micros(idle - 1))];
        assert_eq!(least_recently_used(now, routes.into_iter()), Some(NEIGHBOR));
        let used_routes = routes.map(|(peer, _)| (peer, Micros(idle + 1)));
        assert_eq!(least_recently_used(now, used_routes.into_iter()), None);
    }

    #[test]
    fn program_keeps_most_descriptors() {
        let routes = AutomaticRoutes::new(true);
        let counts = [0, 20, 1024, 1 << 20].map(|descriptors| routes.routes_max(descriptors));
        assert_eq!(counts, [0, 5, 256, AUTOMATIC_ROUTES_MAX]);
    }
}
