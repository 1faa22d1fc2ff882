//! Counts tasks that are being started. Their hosts have not acknowledged them yet, but later
//! placements must take them into account.

use super::Model;
use sempa_proto::HostId;
use std::collections::BTreeMap;

impl Model {
    /// Sets the number of tasks that are being started, by host. Hosts that are not listed have
    /// none.
    pub fn set_starting_tasks(&mut self, starting: BTreeMap<HostId, u32>) {
        let before = std::mem::replace(&mut self.starting, starting);
        let all = before.keys().chain(self.starting.keys());
        self.dirty_hosts
            .extend(all.filter(|id| before.get(id) != self.starting.get(id)));
    }
}
