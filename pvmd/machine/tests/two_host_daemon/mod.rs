//! The machine of one daemon in a virtual machine of two hosts, with tasks and without I/O, for
//! tests of frame forwarding.

use bytes::{BufMut, Bytes, BytesMut};
use pvmd_machine::{ConnId, CopyPolicy, Event, Machine, MachineConfig, Output, World};
use sempa_proto::host::HostMsg;
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::task::{Claim, Hello, OnDaemonExit, TASK_MAGIC, ToDaemon, ToTask};
use sempa_proto::{Epoch, HostId, Micros, PvmError, Tid, WIRE_VERSION};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A world without programs.
struct EmptyWorld;

impl World for EmptyWorld {
    fn find_program(&self, _name: &str, _dir: Option<&str>) -> Result<PathBuf, PvmError> {
        Err(PvmError::NoFile)
    }
    fn work_dir(&self, _dir: Option<&str>) -> PathBuf {
        PathBuf::from("/")
    }
    fn base_env(&self) -> Vec<Vec<u8>> {
        Vec::new()
    }
    fn unix_time(&self) -> Micros {
        Micros(1)
    }
    fn random_secret(&mut self) -> i32 {
        1
    }
}

/// The daemon of a slave; the other host is the master.
pub(crate) struct Daemon {
    machine: Machine,
    /// The tids of the daemon's tasks; the index is the argument of [`Daemon::conn`].
    pub(crate) tids: Vec<Tid>,
}

fn entry(id: HostId) -> HostEntry {
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

/// Returns the tid of a task on the other host.
pub(crate) fn remote_task() -> Tid {
    Tid::task(HostId::MASTER, 7).expect("a small number")
}

/// Returns a frame as read from a socket: a part of a larger buffer.
pub(crate) fn frame(
    buffer: &mut BytesMut,
    ends: (Tid, Tid),
    kind: LinkKind,
    seq: u64,
    payload: &[u8],
) -> Bytes {
    let (src, dst) = ends;
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
    /// Creates a daemon with this number of connected tasks.
    pub(crate) fn new(tasks: usize) -> Daemon {
        let me = HostId::new(2).expect("a small number");
        let config = MachineConfig {
            host: me,
            name: "h2".to_string(),
            vm: "pvm".to_string(),
            arch: "LINUX64".to_string(),
            dsig: DSIG_X86_64,
            addresses: Vec::new(),
            speed: 1000,
            uid: 1,
            lease: Micros::from_secs(10),
            rm_command: None,
            server_commands: Vec::new(),
            paths: RuntimePaths::from_env(1, |_| None).expect("a place without any variables"),
            hostfile: Vec::new(),
            reserved_ids_max: BTreeMap::new(),
            copies: CopyPolicy::default(),
        };
        let mut daemon = Daemon {
            machine: Machine::new(config, Micros(1)),
            tids: Vec::new(),
        };
        let epoch = Epoch(1);
        let table = HostTable {
            epoch,
            hosts: vec![entry(HostId::MASTER), entry(me)],
        };
        let prepare = HostMsg::PrepareTable {
            table,
            locations: Vec::new(),
            rm: None,
            reserved_ids_max: 0,
        };
        for message in [prepare, HostMsg::CommitTable { epoch }] {
            daemon.handle(Event::HostControl {
                host: HostId::MASTER,
                message,
            });
        }
        (0..tasks).for_each(|number| daemon.enrol(number));
        daemon
    }

    /// Returns the connection of the task with this index.
    pub(crate) fn conn(number: usize) -> ConnId {
        ConnId(number as u64 + 1)
    }

    fn enrol(&mut self, number: usize) {
        let (conn, pid) = (Daemon::conn(number), 100 + number as i32);
        self.handle(Event::TaskConnected { conn, pid });
        let (magic, version, claim) = (TASK_MAGIC, WIRE_VERSION, Claim::New);
        let hello = Hello {
            magic,
            version,
            claim,
            own_pid: pid,
            program: "task".to_string(),
            on_daemon_exit: OnDaemonExit::default(),
        };
        self.handle(Event::TaskControl {
            conn,
            message: ToDaemon::Hello(hello),
        });
        let mut tid = None;
        while let Some(output) = self.poll() {
            if let Output::ToTask {
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
        self.machine.handle(Micros(2), &mut EmptyWorld, event);
    }

    pub(crate) fn poll(&mut self) -> Option<Output> {
        self.machine.poll()
    }
}
