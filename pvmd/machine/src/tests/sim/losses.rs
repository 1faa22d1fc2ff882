//! Losses of hosts, and of the sessions and messages between hosts.

use super::{LEASE, Proc, Sim, SimEvent, host_pair};
use crate::Event;
use sempa_proto::{HostId, Micros};

impl Sim {
    /// Kills a host. The other hosts are notified of the loss when their lease has expired.
    pub(in crate::tests) fn kill_host(&mut self, lost_host: HostId) {
        let Some(node) = self.nodes.get_mut(&lost_host) else {
            return;
        };
        node.is_alive = false;
        self.end_procs(lost_host, |_| true);
        self.end_sessions(lost_host);
    }

    /// Ends all processes of a host for which `matches` returns true.
    pub(super) fn end_procs(&mut self, host_id: HostId, matches: impl Fn(&Proc) -> bool) {
        for p in self
            .procs
            .iter_mut()
            .filter(|p| p.host == host_id && matches(p))
        {
            // A stopped process may have been dumped; its images can still be restored.
            p.images_remain |= p.stopped_for_migration && !p.exited;
            p.exited = true;
        }
    }

    /// Drops the control messages and frames that are in flight from one host to another.
    pub(in crate::tests) fn drop_in_flight(&mut self, from: HostId, to: HostId) {
        self.queue.retain(|_, event| match event {
            SimEvent::Machine(host_id, Event::HostControl { host, .. }) => {
                (*host, *host_id) != (from, to)
            }
            SimEvent::DataItem((item_from, item_to, _), _) => (*item_from, *item_to) != (from, to),
            _ => true,
        });
    }

    /// Separates two hosts for `duration` and drops the messages in flight between them. Each of
    /// the two hosts can still reach all other hosts.
    pub(in crate::tests) fn separate_hosts(&mut self, a: HostId, b: HostId, duration: Micros) {
        if !self.sessions.remove(&host_pair(a, b)) {
            return;
        }
        for (observer, lost_host) in [(a, b), (b, a)] {
            self.drop_in_flight(observer, lost_host);
            // Both daemons are notified of the loss before the hosts can connect again.
            let loss_time = self.now + Micros(self.rng.below(duration.0.min(LEASE.0)));
            self.schedule(loss_time, SimEvent::LossDetected(observer, lost_host));
        }
        self.schedule(self.now + duration, SimEvent::Reconnection(a, b));
    }

    pub(super) fn end_sessions(&mut self, lost_host: HostId) {
        let ended_sessions: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| *a == lost_host || *b == lost_host)
            .collect();
        for (a, b) in ended_sessions {
            self.sessions.remove(&(a, b));
            let peer_host = if a == lost_host { b } else { a };
            let at = self.now + LEASE + Micros(self.rng.below(200_000));
            self.schedule(at, SimEvent::LossDetected(peer_host, lost_host));
        }
    }
}
