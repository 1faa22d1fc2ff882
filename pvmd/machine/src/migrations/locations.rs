//! Locations of migrated tasks: the master makes a new location known to all hosts and collects
//! their acknowledgements.

use super::CoordinatedMigrations;
use crate::Machine;
use sempa_proto::host::{HostMsg, Location};
use sempa_proto::migration::{Migration, MigrationCause};
use sempa_proto::{Epoch, HostId, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Makes the new location of a task known to all hosts.
    pub(crate) fn publish_location(&mut self, of: &Migration) {
        let epoch = self.next_epoch();
        let from = if of.to == of.from {
            self.location(of.tid).unwrap_or(of.from)
        } else {
            of.from
        };
        // No daemon has anything in flight to the previous location of a task from a checkpoint.
        let from = if of.cause == MigrationCause::Restart {
            of.to
        } else {
            from
        };
        let location = Location {
            tid: of.tid,
            host: of.to,
            previous_host: from,
            epoch,
        };
        let mut waiting: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &mut self.master {
            waiting.extend(master.host_changes.joining_hosts());
            master
                .migrations
                .unacknowledged_locations
                .insert(of.id, (of.tid, epoch, waiting.clone()));
        }
        for host in waiting {
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
        for (task, location_epoch, waiting) in
            master.migrations.unacknowledged_locations.values_mut()
        {
            if (*task, *location_epoch) == (tid, epoch) {
                waiting.remove(&host);
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
        unacknowledged_locations.retain(|id, (_, _, waiting)| {
            if waiting.is_empty() {
                coordinator.on_location_announced(now, *id);
                job_checkpoints.restarts.on_location_announced(now, *id);
            }
            !waiting.is_empty()
        });
    }
}
