//! The master's handling of lost hosts, also of hosts that are being added.

use super::JoiningHost;
use crate::{Machine, Output};
use sempa_proto::{HostId, PvmError};

impl Machine {
    /// Master: removes a host that was lost or has shut down. If its daemon was being started or
    /// added, the start fails. A table change in progress continues without the host.
    pub(crate) fn remove_lost_host(&mut self, host: HostId, why: &str) {
        if self.is_leaving(host) {
            return self.finish_removal(host);
        }
        let start = self
            .host_changes()
            .start_attempts
            .iter()
            .find(|(_, s)| s.plan.id == host)
            .map(|(start, _)| *start);
        if let Some(start) = start {
            self.outputs.push_back(Output::AbandonStart { start });
            return self.fail_start(
                start,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
        }
        self.drop_joining_host(host, why);
        if let Some(change) = &mut self.host_changes().table_change {
            if change.is_committed {
                change.awaited_hosts.remove(&host);
            } else {
                // The host can no longer acknowledge the change, so the change begins again
                // without the host.
                let change = self.host_changes().table_change.take().expect("just seen");
                let changes = self.host_changes();
                changes.pending_adds.splice(..0, change.added_hosts);
                changes.pending_removals.splice(..0, change.removals);
                self.drop_joining_host(host, why);
            }
        }
        if self.table.get(host).is_some() {
            self.queue_removal(host, why.to_string(), false);
        }
        self.advance_table_change();
        self.begin_table_change();
    }

    /// Drops a lost host whose daemon was started but that is in no table yet.
    fn drop_joining_host(&mut self, host: HostId, why: &str) {
        let changes = self.host_changes();
        let pending_hosts = changes.pending_adds.extract_if(.., |j| j.entry.id == host);
        let ready_hosts = changes
            .add_requests
            .values_mut()
            .flat_map(|a| a.ready_hosts.extract_if(.., |j| j.entry.id == host));
        let dropped_hosts: Vec<JoiningHost> = pending_hosts.chain(ready_hosts).collect();
        for JoiningHost {
            request_number,
            slot,
            ..
        } in dropped_hosts
        {
            self.outputs.push_back(Output::Disconnect { host });
            self.record_add_failure(
                request_number,
                slot,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
            self.advance_add_request(request_number);
        }
    }
}
