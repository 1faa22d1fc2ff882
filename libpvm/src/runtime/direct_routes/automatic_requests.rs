//! Requests, accepts and gives up automatic direct routes, as [`super::super::automatic_routes`]
//! decides.

use super::super::automatic_routes::least_recently_used;
use super::super::core::Core;
use super::super::route_agreements::RouteEvent;
use nix::sys::resource::{Resource, getrlimit};
use sempa_proto::{Micros, Tid};

impl Core {
    /// Requests an automatic direct route to a peer if it is due: a message to the peer has just
    /// been sent through the daemons. Nothing waits for the route.
    #[inline]
    pub(in crate::runtime) fn request_automatic_route_if_due(&mut self, now: Micros, peer: Tid) {
        if self.direct_routes.automatic.count_message(now, peer)
            && self.shm_routes.is_ring_impossible(peer)
        {
            self.request_automatic_route(now, peer);
        }
    }

    fn request_automatic_route(&mut self, now: Micros, peer: Tid) {
        let agreements = &self.direct_routes.agreements;
        if !agreements.accepts_offers
            || agreements.has_agreement(peer)
            || !self.is_connected()
            || self.has_disabled_windows()
            || self.has_peer_ended(peer)
        {
            return;
        }
        if self.make_room_for_automatic_route(now) {
            self.handle_route_event(now, RouteEvent::AutomaticRouteDue(peer));
        } else {
            self.direct_routes.automatic.record_full(now, peer);
        }
    }

    /// True if an automatic route that this peer offers can be accepted. Makes room for the route.
    pub(super) fn accepts_automatic_route(&mut self, now: Micros, peer: Tid) -> bool {
        self.direct_routes.automatic.is_enabled()
            && (self.direct_routes.agreements.is_automatic(peer)
                || self.make_room_for_automatic_route(now))
    }

    /// Gives up the least recently used automatic route if there may be no more of them. Returns
    /// false if all of them are in use.
    fn make_room_for_automatic_route(&mut self, now: Micros) -> bool {
        let descriptors_max = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        let routes_max = self.direct_routes.automatic.routes_max(descriptors_max);
        if self.direct_routes.agreements.automatic_count() < routes_max {
            return true;
        }
        let routes = &self.direct_routes;
        let automatic_conns = routes
            .conns
            .iter()
            .filter(|(peer, conn)| {
                conn.drain_state.is_none() && routes.agreements.is_automatic(**peer)
            })
            .map(|(peer, conn)| (*peer, conn.last_traffic_at));
        let Some(peer) = least_recently_used(now, automatic_conns) else {
            return false;
        };
        while self.drain_direct_route(now, peer) {}
        self.handle_route_event(now, RouteEvent::RouteGivenUp(peer));
        true
    }

    /// Sets whether the user permits automatic routes.
    pub(crate) fn set_automatic_routes(&mut self, now: Micros, is_enabled: bool) {
        self.direct_routes.automatic.set_enabled_by_user(is_enabled);
        if !is_enabled {
            self.handle_route_event(now, RouteEvent::AutomaticForbidden);
        }
    }

    /// Sets whether the program permits direct routes that it has not requested. If it does not,
    /// automatic routes end; explicit routes stay.
    pub(crate) fn set_accepts_routes(&mut self, now: Micros, accepts: bool) {
        self.direct_routes.agreements.accepts_offers = accepts;
        if !accepts {
            self.handle_route_event(now, RouteEvent::AutomaticForbidden);
        }
    }
}
