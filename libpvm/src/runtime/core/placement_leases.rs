//! Placement leases: hosts that the resource manager assigns in advance to further spawn requests
//! like the last one. With a lease, a program that spawns repeatedly need not ask the resource
//! manager each time.
//!
//! A lease is valid for requests that equal the leased request except for the arguments of the
//! program. The lease ends when the resource manager changes it or is replaced, or when it was not
//! used during its time span.

use sempa_proto::sm::{LEASE_TASKS_MAX, PlacementLease, unpack_placement_lease};
use sempa_proto::task::{LeasedSpawn, SpawnRequest};
use sempa_proto::{Message, Micros, Tid};

/// Last spawn request to the resource manager, with the lease that it granted.
#[derive(Debug, Default)]
pub(crate) struct PlacementLeases(Option<LeasedRequest>);

#[derive(Debug)]
struct LeasedRequest {
    rm: Tid,
    wid: i32,
    template: SpawnRequest,
    /// Time of the request, or of the last use of the lease. The time span of the lease begins at
    /// this time.
    last_used_at: Micros,
    lease: Option<PlacementLease>,
}

impl PlacementLeases {
    /// Records a request that is about to be sent to a resource manager.
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
        let is_small = request.count as usize <= LEASE_TASKS_MAX;
        self.0 = is_small.then_some(LeasedRequest {
            rm,
            wid,
            template,
            last_used_at: now,
            lease: None,
        });
    }

    /// Stores the lease that a message of the resource manager contains.
    pub(super) fn handle_lease(&mut self, message: Message) {
        let asked = self
            .0
            .as_mut()
            .filter(|asked| (asked.rm, asked.wid) == (message.src, message.wid));
        if let (Some(asked), Ok(grant)) = (asked, unpack_placement_lease(message.body)) {
            asked.lease = Some(grant);
        }
    }

    /// Removes the hosts for `request` from the lease and returns them. `None` if no valid lease
    /// covers the request.
    pub(crate) fn take_hosts_for(
        &mut self,
        now: Micros,
        request: &SpawnRequest,
    ) -> Option<LeasedSpawn> {
        let asked = self
            .0
            .as_mut()
            .filter(|asked| asked.template.has_same_placement_as(request))?;
        let lease = asked
            .lease
            .as_mut()
            .filter(|lease| now.since(asked.last_used_at) < lease.valid_for)?;
        let count = request.count as usize;
        let hosts = (lease.hosts.len() >= count).then(|| lease.hosts.drain(..count).collect())?;
        asked.last_used_at = now;
        Some(LeasedSpawn {
            rm: asked.rm,
            wid: asked.wid,
            hosts,
        })
    }

    /// Drops the lease and the request that it covers.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
