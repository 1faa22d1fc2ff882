//! Addresses and configurations of the simulated hosts.

use super::LEASE;
use crate::{CopyPolicy, MachineConfig};
use sempa_proto::HostId;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::runtime_paths::RuntimePaths;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Returns the address of a host. Four consecutive indices share a network.
pub(super) fn host_address(id: HostId) -> SocketAddr {
    SocketAddr::from(([10, 0, (id.index() / 4) as u8, id.index() as u8], 4))
}

pub(super) fn machine_config(id: HostId, name: &str) -> MachineConfig {
    let host_dir = format!("/sim/{}", id.index());
    MachineConfig {
        host: id,
        host_name: name.to_string(),
        vm_name: "pvm".into(),
        arch: "LINUX64".into(),
        dsig: DSIG_X86_64,
        addresses: vec![host_address(id)],
        allows_automatic_routes: true,
        speed: 1000,
        uid: 1000,
        lease: LEASE,
        rm_command: None,
        server_commands: Vec::new(),
        starts_watcher: false,
        paths: RuntimePaths::from_env(1000, move |v| (v == "PVM_TMP").then(|| host_dir.clone()))
            .expect("a good place"),
        hostfile_lines: Vec::new(),
        reserved_ids_max: BTreeMap::new(),
        copy_policy: CopyPolicy::default(),
        store_dir: "/store".into(),
    }
}
