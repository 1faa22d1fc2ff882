//! A host of a simulated pool of desktop machines.

use pvm_rm::decide::{GuestPolicy, HostView, OwnerState, TimedSample};
use sempa_proto::load::LoadSample;
use sempa_proto::{HostId, Micros};
use std::sync::Arc;

pub(crate) fn host_id(index: u16) -> HostId {
    HostId::simulated(index).expect("an index")
}

/// Returns an idle host whose sample never expires. In the simulation, all load other than tasks
/// comes from owners, whose presence is simulated separately.
pub(crate) fn desktop(index: u16, owner: OwnerState) -> HostView {
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    HostView {
        id: host_id(index),
        name: format!("d{index}"),
        arch: "LINUX64".into(),
        zone: u32::from(index) / 256,
        labels: Arc::default(),
        speed: 1000,
        cores: 1,
        sample: Some(TimedSample {
            sample,
            received_at: Micros(u64::MAX),
            own_tasks: 0,
        }),
        external_mean: None,
        promised_bytes: 0,
        owner,
        migration_obstacle: None,
        starting_tasks: 0,
        guest_policy: GuestPolicy::default(),
        tasks: Vec::new(),
    }
}
