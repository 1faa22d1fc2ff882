//! Builders of idle hosts for snapshots.

use pvm_rm::decide::{GuestPolicy, HostView, OwnerState, TimedSample};
use sempa_proto::load::LoadSample;
use sempa_proto::{HostId, Micros};
use std::sync::Arc;

/// Current time of the snapshots.
pub(crate) const NOW: Micros = Micros::from_secs(1000);

pub(crate) fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

/// Returns the load sample of an idle host, received at [`NOW`]. Always `Some`, as
/// [`HostView::sample`] requires.
pub(crate) fn idle_sample(cores: u32, available_bytes: u64) -> Option<TimedSample> {
    Some(TimedSample {
        sample: LoadSample {
            cores,
            available_bytes,
            ..LoadSample::default()
        },
        received_at: NOW,
        vm_task_count: 0,
    })
}

/// Returns an idle host without an owner and without tasks.
pub(crate) fn idle_host(index: u16, cores: u32, available_bytes: u64) -> HostView {
    HostView {
        id: host_id(index),
        name: format!("h{index}"),
        arch: "LINUX64".into(),
        zone: 0,
        labels: Arc::default(),
        speed: 1000,
        cores,
        sample: idle_sample(cores, available_bytes),
        external_mean: None,
        promised_bytes: 0,
        owner: OwnerState::Absent { left_at: None },
        migration_obstacle: None,
        starting_task_count: 0,
        guest_policy: GuestPolicy::default(),
        tasks: Vec::new(),
    }
}
