//! What the daemon's machine does with a data frame between two tasks of its host: from the event to the output, no I/O.

use bytes::Bytes;
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};
use pvmd::machine::{ConnId, Event, Machine, MachineConfig, Output, World};
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::place::Place;
use sempa_proto::task::{AtEnd, Claim, Hello, TASK_MAGIC, ToDaemon, ToTask};
use sempa_proto::{HostId, Micros, PvmError, Tid, WIRE_VERSION};
use std::path::PathBuf;

/// Tasks on the host: forwarding must not depend on it.
const TASKS: [usize; 3] = [2, 32, 512];
/// Bytes of a frame's payload.
const PAYLOAD: usize = 64;

/// Allocations would show in the report: forwarding makes none.
#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// A world without programs.
struct Nowhere;

impl World for Nowhere {
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
    fn secret(&mut self) -> i32 {
        1
    }
}

fn daemon() -> Machine {
    let config = MachineConfig {
        host: HostId::MASTER,
        name: "h1".to_string(),
        vm: "pvm".to_string(),
        arch: "LINUX64".to_string(),
        dsig: DSIG_X86_64,
        addresses: Vec::new(),
        speed: 1000,
        uid: 1,
        lease: Micros::from_secs(10),
        rm_command: None,
        server_commands: Vec::new(),
        place: Place::of(1, |_| None).expect("a place without any variables"),
        hostfile: Vec::new(),
        spared: std::collections::BTreeMap::new(),
    };
    Machine::new(config, Micros(1))
}

/// Connects a task and returns the tid that it was given.
fn enrol(machine: &mut Machine, number: usize) -> Tid {
    let (conn, pid) = (ConnId(number as u64), 100 + number as i32);
    machine.handle(Micros(2), &mut Nowhere, Event::TaskConnected { conn, pid });
    let hello = Hello {
        magic: TASK_MAGIC,
        version: WIRE_VERSION,
        claim: Claim::New,
        pid,
        program: "task".to_string(),
        at_end: AtEnd::default(),
    };
    machine.handle(Micros(2), &mut Nowhere, Event::TaskControl { conn, message: ToDaemon::Hello(hello) });
    let mut tid = None;
    while let Some(output) = machine.poll() {
        if let Output::ToTask { message: ToTask::Welcome(welcome), .. } = output {
            tid = Some(welcome.tid);
        }
    }
    tid.expect("a daemon takes tasks in")
}

#[divan::bench(args = TASKS)]
fn a_frame_between_two_tasks(bencher: Bencher, tasks: usize) {
    let mut machine = daemon();
    let tids: Vec<Tid> = (1..=tasks).map(|number| enrol(&mut machine, number)).collect();
    let (src, dst) = (tids[0], tids[tasks - 1]);
    let frame =
        LinkFrame { src, dst, kind: LinkKind::Data { last: true }, seq: 1, ack: 1, line: 0, payload: Bytes::new() }
            .encode_head();
    let frame = Bytes::from([&frame[..], &[7; PAYLOAD]].concat());
    bencher.counter(ItemsCount::new(1usize)).bench_local(|| {
        machine.handle(Micros(3), &mut Nowhere, Event::TaskLink { conn: ConnId(1), frame: frame.clone() });
        let output = machine.poll();
        assert!(matches!(output, Some(Output::LinkToTask { .. })), "it is forwarded: {output:?}");
        output
    });
}
