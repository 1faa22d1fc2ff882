//! Placement leases: hosts that the resource manager assigns in advance to further spawn requests
//! like the last one. With a lease, a program that spawns repeatedly need not ask the resource
//! manager each time.
//!
//! A lease is valid for requests that equal the leased request except for the arguments of the
//! program. The lease ends when the resource manager changes the lease, when the resource manager
//! is replaced, or when the lease was not used during its time span.

use sempa_proto::sm::{LEASE_TASKS_MAX, PlacementLease, unpack_placement_lease};
use sempa_proto::task::{LeasedSpawn, SpawnRequest};
use sempa_proto::{Message, Micros, Tid};

/// Last spawn request to the resource manager, with the lease that the resource manager granted.
#[derive(Debug, Default)]
pub(crate) struct PlacementLeases(Option<LeasedRequest>);

#[derive(Debug)]
struct LeasedRequest {
    rm: Tid,
    wid: i32,
    request_template: SpawnRequest,
    /// Time of the request or of the last use of the lease. The time span of the lease begins at
    /// this time.
    last_used_at: Micros,
    lease: Option<PlacementLease>,
}

impl PlacementLeases {
    /// Records a request that the caller is about to send to the resource manager `rm`.
    pub(crate) fn record_request(
        &mut self,
        now: Micros,
        rm: Tid,
        wid: i32,
        request: &SpawnRequest,
    ) {
        let template = SpawnRequest {
            args: Vec::new(),
            ..request.clone()
        };
        let is_leasable = request.task_count as usize <= LEASE_TASKS_MAX;
        self.0 = is_leasable.then_some(LeasedRequest {
            rm,
            wid,
            request_template: template,
            last_used_at: now,
            lease: None,
        });
    }

    /// Stores the lease that a message of the resource manager contains, if the message answers the
    /// recorded request.
    pub(super) fn handle_lease(&mut self, message: Message) {
        let leased_request = self.0.as_mut().filter(|leased_request| {
            (leased_request.rm, leased_request.wid) == (message.src, message.wid)
        });
        if let (Some(leased_request), Ok(granted_lease)) =
            (leased_request, unpack_placement_lease(message.body))
        {
            leased_request.lease = Some(granted_lease);
        }
    }

    /// Removes the hosts for `request` from the lease and returns these hosts. `None` if no valid
    /// lease covers the request.
    pub(crate) fn take_hosts_for(
        &mut self,
        now: Micros,
        request: &SpawnRequest,
    ) -> Option<LeasedSpawn> {
        let leased_request = self.0.as_mut().filter(|leased_request| {
            leased_request
                .request_template
                .has_same_placement_as(request)
        })?;
        let lease = leased_request
            .lease
            .as_mut()
            .filter(|lease| now.since(leased_request.last_used_at) < lease.validity_time)?;
        let task_count = request.task_count as usize;
        let hosts =
            (lease.hosts.len() >= task_count).then(|| lease.hosts.drain(..task_count).collect())?;
        leased_request.last_used_at = now;
        Some(LeasedSpawn {
            rm: leased_request.rm,
            lease_wid: leased_request.wid,
            hosts,
        })
    }

    /// Drops the lease and the leased request.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
