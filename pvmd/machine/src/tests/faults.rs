//! Invalid messages of tasks and hosts, which must not affect any other task or host.

use super::sim::{Sim, host};
use crate::{ConnId, Event, HostId};
use bytes::Bytes;
use sempa_proto::host::{DataMsg, HostMsg, HostReply, HostRequest, PendingItem};
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::task::{Claim, Hello, OnDaemonExit, Reply, Request, TASK_MAGIC, ToDaemon, ToTask};
use sempa_proto::{Epoch, MigrationId, RequestId, Tid, WIRE_VERSION};

/// A connection is refused if its first message is not a valid [`Hello`].
#[test]
fn unidentified_connection_is_refused() {
    let mut sim = Sim::new(1);
    let conn = ConnId(9000);
    sim.handle(HostId::MASTER, Event::TaskConnected { conn, pid: 1 });
    let id = RequestId(1);
    sim.handle(
        HostId::MASTER,
        Event::TaskControl {
            conn,
            message: ToDaemon::Request {
                id,
                request: Request::Halt,
            },
        },
    );
    sim.handle(
        HostId::MASTER,
        Event::TaskControl {
            conn,
            message: ToDaemon::Request {
                id,
                request: Request::Halt,
            },
        },
    );
    sim.handle(
        HostId::MASTER,
        Event::TaskClosed {
            conn,
            protocol_error: Some("a frame of 4 GiB".into()),
        },
    );
    for (magic, version) in [(*b"HTTP", WIRE_VERSION), (TASK_MAGIC, WIRE_VERSION + 1)] {
        let conn = ConnId(9001 + u64::from(version) + u64::from(magic[0]));
        sim.handle(HostId::MASTER, Event::TaskConnected { conn, pid: 1 });
        let hello = Hello {
            magic,
            version,
            claim: Claim::NotSpawned,
            namespace_pid: 1,
            program: String::new(),
            on_daemon_exit: OnDaemonExit::FailCalls,
        };
        sim.handle(
            HostId::MASTER,
            Event::TaskControl {
                conn,
                message: ToDaemon::Hello(hello),
            },
        );
    }
    let console = sim.enrol(HostId::MASTER);
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: Tid::NONE,
        },
    ) else {
        panic!("no list")
    };
    assert_eq!(tasks.len(), 1);
    assert!(sim.nodes[&HostId::MASTER].is_alive);
}

/// A frame is dropped if its sender is not the task of the connection, or if it cannot be read.
#[test]
fn forged_sender_is_dropped() {
    let (mut sim, console) = Sim::cluster(2, 2);
    let (forger, victim) = (sim.enrol(HostId::MASTER), sim.enrol(host(2)));
    let (src, dst) = (sim.procs[console].tid(), sim.procs[victim].tid());
    let frame = LinkFrame {
        src,
        dst,
        kind: LinkKind::Data { is_last: true },
        seq: 1,
        ack: 1,
        incarnation: 0,
        payload: Bytes::new(),
    };
    let conn = sim.procs[forger].conn.expect("connected");
    let bytes: Bytes = frame.encode_head().to_vec().into();
    sim.send_from_proc(conn, HostId::MASTER, Event::TaskLink { conn, frame: bytes });
    sim.send_from_proc(
        conn,
        HostId::MASTER,
        Event::TaskLink {
            conn,
            frame: Bytes::from_static(b"short"),
        },
    );
    sim.run_until("both were noted", |s| {
        s.nodes[&HostId::MASTER]
            .log
            .iter()
            .filter(|l| l.contains("dropped"))
            .count()
            == 2
    });
    assert!(sim.procs[victim].received.is_empty());
}

/// A task that identifies itself twice is disconnected.
#[test]
fn second_hello_disconnects_task() {
    let mut sim = Sim::new(3);
    let task_proc = sim.enrol(HostId::MASTER);
    let conn = sim.procs[task_proc].conn.expect("connected");
    let hello = Hello {
        magic: TASK_MAGIC,
        version: WIRE_VERSION,
        claim: Claim::NotSpawned,
        namespace_pid: 1,
        program: String::new(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    sim.send_from_proc(
        conn,
        HostId::MASTER,
        Event::TaskControl {
            conn,
            message: ToDaemon::Hello(hello),
        },
    );
    sim.run_until("closed", |s| s.procs[task_proc].conn.is_none());
}

/// Returns data messages that no correct daemon sends. `unknown_tid` is a tid without a task.
fn invalid_data(tid: Tid, migration: MigrationId, unknown_tid: Tid) -> Vec<DataMsg> {
    let item = |dst: Tid| DataMsg::ControlItem {
        dst,
        item: ToTask::PeerMigrated { tid: unknown_tid },
    };
    vec![
        DataMsg::Frame(Bytes::from_static(b"x")),
        item(unknown_tid),
        item(Tid::NONE),
        item(Tid::MY_DAEMON),
        DataMsg::TaskEnded {
            tid: unknown_tid,
            watermarks: vec![],
            past: Default::default(),
        },
        DataMsg::RouteDrained {
            dst: unknown_tid,
            epoch: Epoch(9),
        },
        DataMsg::Forwarded {
            dst: tid,
            migration,
            item: PendingItem::Frame(Bytes::new()),
        },
        DataMsg::ForwardingComplete {
            dst: tid,
            migration,
        },
    ]
}

/// Returns control messages that only the master, or no correct daemon, sends.
fn invalid_control(tid: Tid, migration: MigrationId, unknown_tid: Tid) -> Vec<HostMsg> {
    vec![
        HostMsg::TablePrepared { epoch: Epoch(1) },
        HostMsg::TableCommitted { epoch: Epoch(900) },
        HostMsg::TaskLocationAck {
            tid,
            epoch: Epoch(3),
        },
        HostMsg::HostReply {
            id: RequestId(5),
            reply: HostReply::Reply(Reply::Done),
        },
        HostMsg::HostRequest {
            id: RequestId(1),
            request: HostRequest::TaskStatus { tid: unknown_tid },
        },
        HostMsg::TaskRequest {
            tid: unknown_tid,
            id: RequestId(1),
            request: Request::Config,
        },
        HostMsg::Halt {
            reason: "mischief".into(),
        },
        HostMsg::Shutdown,
        HostMsg::EndTasks {
            exempt_tasks: vec![],
        },
        HostMsg::EndSignalSent { tid, signal: 15 },
        HostMsg::StepReport {
            migration,
            report: sempa_proto::migration::StepReport::Running,
        },
    ]
}

#[test]
fn invalid_daemon_messages_change_nothing() {
    let (mut sim, console) = Sim::cluster(4, 3);
    let tid = sim.procs[console].tid();
    let unknown_tid = Tid::from_raw(0x3fc0001);
    let migration = MigrationId(77);
    for data_message in invalid_data(tid, migration, unknown_tid) {
        for host_id in [HostId::MASTER, host(2)] {
            sim.handle(
                host_id,
                Event::HostData {
                    host: host(3),
                    message: data_message.clone(),
                },
            );
        }
    }
    for message in invalid_control(tid, migration, unknown_tid) {
        for host_id in [HostId::MASTER, host(2)] {
            sim.handle(
                host_id,
                Event::HostControl {
                    host: host(3),
                    message: message.clone(),
                },
            );
        }
    }
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: Tid::NONE,
        },
    ) else {
        panic!("no list")
    };
    assert_eq!(tasks.len(), 1);
    assert!(
        sim.nodes
            .values()
            .all(|n| n.is_alive && n.machine.host_table().hosts.len() == 3)
    );
}
