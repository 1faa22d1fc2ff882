//! Counts tasks that are being started. Their hosts have not acknowledged the start yet, but later
//! placements must take these tasks into account.

use super::Model;
use sempa_proto::HostId;
use std::collections::BTreeMap;

impl Model {
    /// Sets the number of tasks that are being started, by host. The number is 0 for a host that is
    /// not in the map.
    pub fn set_starting_task_counts(&mut self, counts: BTreeMap<HostId, u32>) {
        let previous_counts = std::mem::replace(&mut self.starting_task_counts, counts);
        let host_ids = previous_counts
            .keys()
            .chain(self.starting_task_counts.keys());
        self.changed_hosts.extend(
            host_ids.filter(|id| previous_counts.get(id) != self.starting_task_counts.get(id)),
        );
    }
}
