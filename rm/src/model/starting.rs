//! Tasks that are being started: their hosts have acknowledged nothing yet, and whoever is placed next has to reckon with them.

use super::Model;
use sempa_proto::HostId;
use std::collections::BTreeMap;

impl Model {
    /// So many tasks are being started on these hosts, and on no other one.
    pub fn set_starting(&mut self, starting: BTreeMap<HostId, u32>) {
        let before = std::mem::replace(&mut self.starting, starting);
        let all = before.keys().chain(self.starting.keys());
        self.touched
            .extend(all.filter(|id| before.get(id) != self.starting.get(id)));
    }
}
