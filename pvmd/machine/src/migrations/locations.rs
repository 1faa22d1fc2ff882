//! Locations of migrated tasks: the master publishes each new location to all hosts and collects
//! their acknowledgements.

use super::CoordinatedMigrations;
use crate::Machine;
use sempa_proto::host::{HostMsg, Location};
use sempa_proto::migration::{Migration, MigrationCause};
use sempa_proto::{Epoch, HostId, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Publishes the new location of a task to all hosts, and records the hosts whose
    /// acknowledgement is awaited.
    pub(crate) fn publish_location(&mut self, migration: &Migration) {
        let epoch = self.next_epoch();
        let previous_host = if migration.to == migration.from {
            self.location(migration.tid).unwrap_or(migration.from)
        } else {
            migration.from
        };
        // A task from a checkpoint has no previous location from which frames or items may still
        // arrive.
        let previous_host = if migration.cause == MigrationCause::Restart {
            migration.to
        } else {
            previous_host
        };
        let location = Location {
            tid: migration.tid,
            host: migration.to,
            previous_host,
            epoch,
        };
        let mut unacknowledged_hosts: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &mut self.master {
            unacknowledged_hosts.extend(master.host_changes.joining_hosts());
            master.migrations.unacknowledged_locations.insert(
                migration.id,
                (migration.tid, epoch, unacknowledged_hosts.clone()),
            );
        }
        for host in unacknowledged_hosts {
            self.send_to_host(host, HostMsg::TaskLocation(location));
        }
        self.apply_location(location);
        self.complete_acknowledged_locations();
    }

    /// Handles a host's acknowledgement of the new location of a task.
    pub(crate) fn handle_location_ack(&mut self, host: HostId, tid: Tid, epoch: Epoch) {
        let Some(master) = &mut self.master else {
            return;
        };
        for (task, location_epoch, unacknowledged_hosts) in
            master.migrations.unacknowledged_locations.values_mut()
        {
            if (*task, *location_epoch) == (tid, epoch) {
                unacknowledged_hosts.remove(&host);
            }
        }
        self.complete_acknowledged_locations();
    }

    pub(super) fn complete_acknowledged_locations(&mut self) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let (
            CoordinatedMigrations {
                coordinator,
                unacknowledged_locations,
                ..
            },
            job_checkpoints,
        ) = (&mut master.migrations, &mut master.checkpoints);
        unacknowledged_locations.retain(|id, (_, _, unacknowledged_hosts)| {
            if unacknowledged_hosts.is_empty() {
                coordinator.on_location_announced(now, *id);
                job_checkpoints.restarts.on_location_announced(now, *id);
            }
            !unacknowledged_hosts.is_empty()
        });
    }
}
