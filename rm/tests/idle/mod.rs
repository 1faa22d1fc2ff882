//! Builders of idle hosts for snapshots.

use pvm_rm::decide::{HostView, Owner, Sampled, Terms};
use sempa_proto::load::LoadSample;
use sempa_proto::{HostId, Micros};
use std::sync::Arc;

/// Current time of the snapshots.
pub(crate) const NOW: Micros = Micros::from_secs(1000);

pub(crate) fn h(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

/// Returns the load sample of an idle host.
pub(crate) fn sampled(cores: u32, available_bytes: u64) -> Option<Sampled> {
    Some(Sampled {
        sample: LoadSample {
            cores,
            available_bytes,
            ..LoadSample::default()
        },
        at: NOW,
        own: 0,
    })
}

/// Returns an idle host without an owner and without tasks.
pub(crate) fn idle(index: u16, cores: u32, available_bytes: u64) -> HostView {
    HostView {
        id: h(index),
        name: format!("h{index}"),
        arch: "LINUX64".into(),
        zone: 0,
        labels: Arc::default(),
        speed: 1000,
        cores,
        sample: sampled(cores, available_bytes),
        foreign_mean: None,
        promised: 0,
        owner: Owner::Absent { left: None },
        no_moves: None,
        starting: 0,
        terms: Terms::default(),
        tasks: Vec::new(),
    }
}
