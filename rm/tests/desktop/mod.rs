//! A host of a simulated pool of desktop machines.

use pvm_rm::decide::{HostView, Owner, Sampled, Terms};
use sempa_proto::load::LoadSample;
use sempa_proto::{HostId, Micros};
use std::sync::Arc;

pub(crate) fn h(index: u16) -> HostId {
    HostId::simulated(index).expect("an index")
}

/// Returns an idle host whose sample never expires. In the simulation, all load other than tasks
/// comes from owners, whose presence is simulated separately.
pub(crate) fn desktop(index: u16, owner: Owner) -> HostView {
    let sample = LoadSample {
        cores: 1,
        available_bytes: 8 << 30,
        ..LoadSample::default()
    };
    HostView {
        id: h(index),
        name: format!("d{index}"),
        arch: "LINUX64".into(),
        zone: u32::from(index) / 256,
        labels: Arc::default(),
        speed: 1000,
        cores: 1,
        sample: Some(Sampled {
            sample,
            at: Micros(u64::MAX),
            own: 0,
        }),
        foreign_mean: None,
        promised: 0,
        owner,
        no_moves: None,
        starting: 0,
        terms: Terms::default(),
        tasks: Vec::new(),
    }
}
