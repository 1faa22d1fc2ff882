//! Leases: how long the tasks of this host may run without a sign of life of this daemon and of the
//! master. The times are in [`sempa_proto::lease`].
//!
//! - A slave sends heartbeats to the master. When the master acknowledges one, the slave's lease
//!   counts from the time at which that heartbeat was sent, so that it ends before the time at
//!   which the master replaces the slave's tasks.
//! - Each daemon renews the lease with its tasker. A daemon that hangs, or that the master
//!   does not hear, renews nothing, and the tasker ends the tasks by itself. A tasker that does not
//!   end them in time is killed.
//! - The master's own lease counts from its last heartbeat time. If the master hangs, the
//!   tasks of its host end as those of all other hosts do, which have lost their master. If there
//!   is no other host, they are only frozen.

use super::tasks::Task;
use super::{Machine, Output, Timer};
use sempa_proto::host::HostMsg;
use sempa_proto::lease;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros};
use std::collections::{BTreeMap, VecDeque};

/// Largest number of heartbeats that wait for their acknowledgement. An older heartbeat cannot
/// renew the lease any more, because the lease has run out since.
const UNACKNOWLEDGED_HEARTBEATS_MAX: usize = 16;

/// The lease of this host, and the last heartbeats of the other hosts.
#[derive(Debug, Default)]
pub(super) struct Lease {
    /// True after the first heartbeat.
    has_started: bool,
    last_number: u64,
    /// Number and time of each heartbeat that the master has not acknowledged, in order.
    unacknowledged: VecDeque<(u64, Micros)>,
    /// Time from which the lease counts; `None` before the first acknowledgement.
    valid_since: Option<Micros>,
    /// Times at which the last heartbeat of each host arrived (master only). Contains at most one
    /// entry for each host index.
    last_heartbeats: BTreeMap<HostId, Micros>,
    /// Times until which tasks of lost hosts may run there (master only), if they have not passed.
    /// Contains at most one entry for each host index.
    lost_until: BTreeMap<HostId, Micros>,
}

impl Machine {
    /// Sends the first heartbeat, and begins to check the programs of this host. On the master,
    /// starts the lease of its own host.
    pub(super) fn start_heartbeats(&mut self) {
        if !std::mem::replace(&mut self.lease.has_started, true) {
            self.send_heartbeat();
            self.check_partners();
        }
    }

    /// Slave: begins to send heartbeats if the session with the master is established.
    pub(super) fn start_heartbeats_to(&mut self, host: HostId) {
        if host == HostId::MASTER {
            self.start_heartbeats();
        }
    }

    /// Sends a heartbeat to the master, and sets the timer for the next one. The master renews its
    /// own lease.
    pub(super) fn send_heartbeat(&mut self) {
        // The master does not wait for the lease of a host that has reported the end of its tasks.
        if self.has_ended_tasks() {
            return;
        }
        self.set_timer(
            lease::heartbeat_interval(self.config.lease),
            Timer::HeartbeatDue,
        );
        if self.master.is_some() {
            return self.renew_lease(self.now);
        }
        self.lease.last_number += 1;
        let number = self.lease.last_number;
        if self.lease.unacknowledged.len() >= UNACKNOWLEDGED_HEARTBEATS_MAX {
            self.lease.unacknowledged.pop_front();
        }
        self.lease.unacknowledged.push_back((number, self.now));
        self.send_to_host(HostId::MASTER, HostMsg::Heartbeat { number });
        self.kill_tasker_after_lease();
    }

    /// Master: acknowledges a heartbeat.
    pub(super) fn handle_heartbeat(&mut self, host: HostId, number: u64) {
        if self.master.is_some() {
            self.lease.last_heartbeats.insert(host, self.now);
            self.send_to_host(host, HostMsg::HeartbeatAck { number });
        }
    }

    /// Slave: renews the lease from the time at which the acknowledged heartbeat was sent.
    pub(super) fn handle_heartbeat_ack(&mut self, number: u64) {
        let unacknowledged = &mut self.lease.unacknowledged;
        let sent_at = unacknowledged
            .iter()
            .find(|(sent_number, _)| *sent_number == number)
            .map(|(_, sent_at)| *sent_at);
        unacknowledged.retain(|(sent_number, _)| *sent_number > number);
        if let Some(sent_at) = sent_at {
            self.renew_lease(sent_at);
        }
    }

    /// Master: renews its own lease after a change of the host table. As soon as there is another
    /// host, the tasks of the master end with the lease.
    pub(super) fn renew_own_lease(&mut self) {
        if self.master.is_some() && self.lease.has_started {
            self.renew_lease(self.now);
        }
    }

    fn renew_lease(&mut self, valid_since: Micros) {
        self.lease.valid_since = Some(valid_since);
        let own_host = self.config.host;
        let has_other_hosts = self.table.hosts.iter().any(|h| h.id != own_host);
        let kill_at = match self.master.is_some() && !has_other_hosts {
            true => lease::NEVER,
            false => valid_since + lease::kill_delay(self.config.lease),
        };
        self.send_to_tasker(ToTasker::RenewLease {
            freeze_at: valid_since + lease::freeze_delay(self.config.lease),
            kill_at,
        });
    }

    /// Kills the tasker if the lease has run out and the tasker has not ended: the tasker stands
    /// still, too. The kernel kills its tasks.
    fn kill_tasker_after_lease(&mut self) {
        let has_expired = self.lease.valid_since.is_some_and(|valid_since| {
            valid_since + lease::kill_delay(self.config.lease) <= self.now
        });
        if has_expired && !self.tasker_has_ended && self.has_processes() {
            let why = "the lease of this host has run out, and the tasker has not ended the tasks";
            self.kill_tasker(why.into());
        }
    }

    /// Kills the tasker and thereby all its tasks. [`super::Event::TaskerEnded`] follows.
    pub(super) fn kill_tasker(&mut self, why: String) {
        self.log_warning(format!("the tasker is killed: {why}"));
        self.outputs.push_back(Output::KillTasker { why });
    }

    /// True if a process of a task may run under the tasker. The load watcher that this daemon has
    /// started does not count: it may run on.
    pub(super) fn has_processes(&self) -> bool {
        let is_counted = |task: &Task| task.is_spawned() && !task.is_own_watcher;
        self.tasks.live_tasks.values().any(is_counted)
            || !self.migrations.arrivals.is_empty()
            || !self.owner_control.leftovers.is_empty()
    }

    /// True while the lease does not permit the tasks of this host to run.
    pub(super) fn is_lease_frozen(&self) -> bool {
        self.lease.valid_since.is_some_and(|valid_since| {
            valid_since + lease::freeze_delay(self.config.lease) <= self.now
        })
    }

    /// Handles the tasker's confirmation of a renewal. `frozen_time` is the time for which the
    /// tasks were frozen.
    pub(super) fn handle_lease_renewed(&mut self, frozen_time: Micros) {
        if frozen_time > Micros::default() && self.has_processes() {
            self.log_warning_and_record(format!(
                "the tasks of {} continue after they were frozen for {:.1} s: its daemon hung, or did not reach \
                 the master",
                self.config.host_name,
                frozen_time.0 as f64 / 1e6
            ));
        }
    }

    /// Master: records that a host has ended its tasks by itself, so that nothing must wait for the
    /// end of its lease.
    pub(super) fn forget_lease(&mut self, host: HostId) {
        self.lease.last_heartbeats.remove(&host);
        self.lease.lost_until.remove(&host);
    }

    /// Master: records that a host is lost. Its tasks may run until
    /// [`Machine::replacement_time`].
    pub(super) fn record_lost_lease(&mut self, host: HostId) {
        let (now, replacement_time) = (self.now, self.replacement_time(host));
        let lost_until = &mut self.lease.lost_until;
        lost_until.retain(|_, time| *time > now);
        if replacement_time > now {
            lost_until.insert(host, replacement_time);
        }
    }

    /// Master: returns the time after which no task of any lost host can run; `None` if this time
    /// has passed.
    pub(super) fn lost_leases_end(&self) -> Option<Micros> {
        let times = self.lease.lost_until.values().copied();
        times.filter(|time| *time > self.now).max()
    }

    /// Master: returns the time from which copies of a lost host's tasks may run elsewhere. The
    /// tasks have ended by then even if the host's daemon hangs.
    pub(super) fn replacement_time(&self, host: HostId) -> Micros {
        let last_heartbeat = self.lease.last_heartbeats.get(&host);
        last_heartbeat.map_or(self.now, |heartbeat_at| {
            self.now
                .max(*heartbeat_at + lease::replacement_delay(self.config.lease))
        })
    }
}
