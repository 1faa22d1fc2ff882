//! A host of a simulated pool of desktop machines. Each host has one processor.

use pvm_rm::decide::{GuestPolicy, HostView, OwnerState, TimedSample};
use sempa_proto::load::LoadSample;
use sempa_proto::{HostId, Micros};
use std::sync::Arc;

pub(crate) fn host_id(index: u16) -> HostId {
    HostId::new_simulated(index).expect("an index")
}

/// Returns an idle host with one processor, whose sample never expires. Tasks are the only load:
/// the presence of owners is simulated separately.
pub(crate) fn desktop_host(index: u16, owner: OwnerState) -> HostView {
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
            vm_task_count: 0,
        }),
        external_mean: None,
        promised_bytes: 0,
        owner,
        migration_obstacle: None,
        starting_task_count: 0,
        guest_policy: GuestPolicy::default(),
        tasks: Vec::new(),
    }
}
