//! The machine of a slave in a virtual machine of two hosts, with tasks and without I/O. Tests of
//! frame forwarding use it.

use bytes::{BufMut, Bytes, BytesMut};
use pvmd_machine::{ConnId, CopyPolicy, Event, Machine, MachineConfig, Output, World};
use sempa_proto::host::HostMsg;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Usage;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::table::{HostEntry, HostTable, HostUsage};
use sempa_proto::task::{Claim, Hello, OnDaemonExit, TASK_MAGIC, ToDaemon, ToTask};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, PvmError, Tid, WIRE_VERSION};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A world without programs: no program can be found.
struct EmptyWorld;

impl World for EmptyWorld {
    fn find_program(&self, _name: &str, _dir: Option<&str>) -> Result<PathBuf, PvmError> {
        Err(PvmError::NoFile)
    }
    fn work_dir(&self, _dir: Option<&str>) -> PathBuf {
        PathBuf::from("/")
    }
    fn base_environment(&self) -> Vec<Vec<u8>> {
        Vec::new()
    }
    fn unix_time(&self) -> Micros {
        Micros(1)
    }
    fn host_usage(&self) -> Option<HostUsage> {
        None
    }
    fn process_usage(&self, _pid: i32) -> Usage {
        Usage::default()
    }
    fn sent_bytes(&self, _migration: MigrationId) -> u64 {
        0
    }
    fn random_secret(&mut self) -> i32 {
        1
    }
}

/// The machine of a slave daemon and its tasks. The host of the master has no machine.
pub(crate) struct Daemon {
    machine: Machine,
    /// The tids of the daemon's tasks; the index is the argument of [`Daemon::conn`].
    pub(crate) tids: Vec<Tid>,
}

fn host_entry(id: HostId) -> HostEntry {
    let (name, arch) = (format!("h{}", id.index()), "LINUX64".to_string());
    HostEntry {
        id,
        name,
        arch,
        speed: 1000,
        dsig: DSIG_X86_64,
        addresses: Vec::new(),
    }
}

/// Returns the tid of a task on the master's host.
pub(crate) fn remote_task() -> Tid {
    Tid::for_task(HostId::MASTER, 7).expect("a small number")
}

/// Returns the bytes of a frame as a slice of a larger buffer, as if they were read from a socket.
/// `src_dst` are source and destination.
pub(crate) fn frame(
    buffer: &mut BytesMut,
    src_dst: (Tid, Tid),
    kind: LinkKind,
    seq: u64,
    payload: &[u8],
) -> Bytes {
    let (src, dst) = src_dst;
    let head = LinkFrame {
        src,
        dst,
        kind,
        seq,
        ack: 1,
        incarnation: 0,
        payload: Bytes::new(),
    };
    buffer.put_slice(&head.encode_head());
    buffer.put_slice(payload);
    buffer.split().freeze()
}

impl Daemon {
    /// Creates a daemon with `tasks` connected tasks.
    pub(crate) fn new(tasks: usize) -> Self {
        let own_host = HostId::new(2).expect("a small number");
        let config = MachineConfig {
            host: own_host,
            host_name: "h2".to_string(),
            vm_name: "pvm".to_string(),
            arch: "LINUX64".to_string(),
            dsig: DSIG_X86_64,
            addresses: Vec::new(),
            allows_automatic_routes: true,
            speed: 1000,
            uid: 1,
            lease: Micros::from_secs(10),
            rm_command: None,
            server_commands: Vec::new(),
            starts_watcher: false,
            paths: RuntimePaths::from_env(1, |_| None).expect("a place without any variables"),
            hostfile_lines: Vec::new(),
            reserved_ids_max: BTreeMap::new(),
            copy_policy: CopyPolicy::default(),
            store_dir: "/store".into(),
        };
        let mut daemon = Self {
            machine: Machine::new(config, Micros(1)),
            tids: Vec::new(),
        };
        let epoch = Epoch(1);
        let table = HostTable {
            epoch,
            hosts: vec![host_entry(HostId::MASTER), host_entry(own_host)],
        };
        let prepare_message = HostMsg::PrepareTable {
            table,
            locations: Vec::new(),
            rm: None,
            reserved_local_max: 0,
        };
        for message in [prepare_message, HostMsg::CommitTable { epoch }] {
            daemon.handle(Event::HostControl {
                host: HostId::MASTER,
                message,
            });
        }
        (0..tasks).for_each(|index| daemon.enrol(index));
        daemon
    }

    /// Returns the connection of the task with the index `index`.
    pub(crate) fn conn(index: usize) -> ConnId {
        ConnId(index as u64 + 1)
    }

    fn enrol(&mut self, index: usize) {
        let (conn, pid) = (Self::conn(index), 100 + index as i32);
        self.handle(Event::TaskConnected { conn, pid });
        let (magic, version, claim) = (TASK_MAGIC, WIRE_VERSION, Claim::NotSpawned);
        let hello = Hello {
            magic,
            version,
            claim,
            namespace_pid: pid,
            program: "task".to_string(),
            on_daemon_exit: OnDaemonExit::default(),
        };
        self.handle(Event::TaskControl {
            conn,
            message: ToDaemon::Hello(hello),
        });
        let mut tid = None;
        while let Some(output) = self.poll() {
            if let Output::SendToTask {
                message: ToTask::Welcome(welcome),
                ..
            } = output
            {
                tid = Some(welcome.tid);
            }
        }
        self.tids.push(tid.expect("a daemon takes tasks in"));
    }

    pub(crate) fn handle(&mut self, event: Event) {
        self.machine.handle_event(Micros(2), &mut EmptyWorld, event);
    }

    pub(crate) fn poll(&mut self) -> Option<Output> {
        self.machine.next_output()
    }
}
