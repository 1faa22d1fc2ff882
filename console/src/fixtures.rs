//! Hosts, tasks and command lines for unit tests.

use sempa_proto::table::{HostEntry, HostTable, TaskInfo};
use sempa_proto::{Epoch, HostId, Tid};

pub(crate) fn host(index: u16, name: &str) -> HostEntry {
    HostEntry {
        id: HostId::new(index).expect("an index"),
        name: name.into(),
        arch: "LINUX64".into(),
        speed: 1000,
        dsig: 0x0040_8c41,
        addresses: Vec::new(),
    }
}

pub(crate) fn table() -> HostTable {
    HostTable {
        epoch: Epoch(3),
        hosts: vec![host(1, "ha1"), host(2, "ha2"), host(3, "ha3")],
    }
}

pub(crate) fn task(tid: i32, parent: i32, pid: i32, flags: i32, name: &str) -> TaskInfo {
    let tid = Tid::from_raw(tid);
    let host = tid.birth_host().expect("a task's tid");
    let parent = Tid::from_raw(parent);
    TaskInfo {
        tid,
        parent,
        host,
        flags,
        name: name.into(),
        pid,
        uid: 0,
        migrating: false,
        paused: false,
        suspended: false,
        namespace_pid: pid,
        stopping: false,
        leftover_processes: 0,
    }
}

/// Splits a command line without quotes into its words.
pub(crate) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}
