//! The registered resource manager, and the command that starts it.

use super::is_message_of;
use super::{integers, send_to_daemon, spawn_request};
use crate::HostId;
use crate::tests::sim::{Received, Sim, host, seeds};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::event::EventKind;
use sempa_proto::sm::{
    SM_ADD, SM_ADDACK, SM_EXEC, SM_EXECACK, SM_HOSTX, SM_TASKX, pack_exec, unpack_tids,
};
use sempa_proto::table::{TASK_CONNECTED, TASK_RM};
use sempa_proto::task::{Reply, Request, RmServices};
use sempa_proto::{Micros, Tid};

/// Spawns two tasks on h2 at the request of the resource manager and returns them. Asserts that the
/// same request of another task is refused.
fn spawn_for_resource_manager(sim: &mut Sim, rm: usize, [console, other]: [usize; 2]) -> Vec<Tid> {
    let exec = pack_exec(sim.procs[console].tid(), &spawn_request("child", 2), 0, 2);
    send_to_daemon(sim, rm, host(2).daemon_tid(), SM_EXEC, 77, exec.clone());
    send_to_daemon(sim, other, Tid::MY_DAEMON, SM_EXEC, 78, exec);
    let ack = |s: &Sim| {
        s.procs[rm]
            .notifications(SM_EXECACK)
            .into_iter()
            .find(|m| m.wid == 77)
    };
    sim.run_until("the acknowledgement", |s| ack(s).is_some());
    let ack = ack(sim).expect("just seen");
    let started_tids: Vec<Tid> = unpack_tids(ack.body)
        .expect("tids")
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(
        (ack.src, ack.ctx, started_tids.len()),
        (host(2).daemon_tid(), 0, 2)
    );
    sim.run_until("the refusal", |s| {
        s.nodes[&host(3)]
            .log
            .iter()
            .any(|l| l.contains("not the resource manager"))
    });
    sim.run_until("they are there", |s| {
        started_tids
            .iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    started_tids
}

/// Asserts that the resource manager receives the last messages of a task before the notification
/// of its end.
fn check_last_messages(sim: &mut Sim, rm: usize, rm_tid: Tid, ended_tid: Tid) {
    let ended_proc = sim.proc_of(ended_tid);
    for text in [b"one".as_slice(), b"two", b"three"] {
        sim.send_message(ended_proc, rm_tid, text);
    }
    sim.exit_proc(ended_proc, 0x300);
    sim.run_until("its end", |s| {
        !s.procs[rm].notifications(SM_TASKX).is_empty()
    });
    let items: Vec<&Received> = sim.procs[rm]
        .received
        .iter()
        .skip_while(|s| !is_message_of(s, ended_tid))
        .take(4)
        .collect();
    assert!(
        items[..3].iter().all(|s| is_message_of(s, ended_tid)),
        "{items:?}"
    );
    assert!(
        matches!(items[3], Received::Notification(notification) if notification.tag == SM_TASKX),
        "its end is told last: {items:?}"
    );
    assert_eq!(
        integers(&sim.procs[rm].notifications(SM_TASKX)[0].body)[..2],
        [ended_tid.raw(), 0x300]
    );
}

/// A resource manager spawns tasks, adds hosts and is notified of exits and lost hosts. All tasks
/// are notified of its death.
#[test]
fn resource_manager_spawns_adds_and_is_notified() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        let services = RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        };
        assert_eq!(
            sim.ask(rm, Request::RegisterRm(services)),
            Reply::Rm {
                previous_rm: Tid::NONE
            }
        );
        let rm_tid = sim.procs[rm].tid();
        sim.run_until("the console knows", |s| {
            s.procs[console].rm_info.is_some_and(|r| r.tid == rm_tid)
        });
        sim.advance(Micros::from_millis(20));
        let other_proc = sim.enrol(host(3));
        sim.run_until("so do newcomers elsewhere", |s| {
            s.procs[other_proc].rm_info.is_some()
                && !s.procs[rm].notifications(SM_EXECACK).is_empty()
        });
        let started_tids = spawn_for_resource_manager(&mut sim, rm, [console, other_proc]);
        check_last_messages(&mut sim, rm, rm_tid, started_tids[0]);
        let mut host_lines = Packer::new(Encoding::Xdr);
        host_lines.pack_strs(&["h4", "bad5"]);
        send_to_daemon(
            &mut sim,
            rm,
            Tid::MY_DAEMON,
            SM_ADD,
            79,
            host_lines.finish(),
        );
        sim.run_until("hosts", |s| {
            !s.procs[rm].notifications(SM_ADDACK).is_empty()
        });
        let mut ack = Unpacker::new_xdr(sim.procs[rm].notifications(SM_ADDACK)[0].body.clone());
        assert_eq!(
            (ack.read_int(), ack.read_int(), ack.read_int()),
            (Ok(2), Ok(0), Ok(host(4).tid().raw()))
        );
        sim.kill_host(host(3));
        sim.run_until("the host's end", |s| {
            !s.procs[rm].notifications(SM_HOSTX).is_empty()
        });
        assert_eq!(
            integers(&sim.procs[rm].notifications(SM_HOSTX)[0].body),
            [host(3).daemon_tid().raw()]
        );
        let Reply::Tasks(tasks) = sim.ask(console, Request::Tasks { selector: rm_tid }) else {
            panic!("no list")
        };
        assert_eq!(tasks[0].flags, TASK_CONNECTED | TASK_RM);
        let late_proc = sim.enrol(host(4));
        assert_eq!(
            sim.procs[late_proc].rm_info.map(|r| r.tid),
            Some(rm_tid),
            "a new host inherits it"
        );
        sim.close_connection(rm);
        sim.run_until("all know of its end", |s| {
            [console, late_proc]
                .iter()
                .all(|p| s.procs[*p].rm_info.is_none())
        });
    }
}

/// The command of the resource manager is started at the start of the virtual machine, without a
/// parent. If the program is missing, the event log contains an entry.
#[test]
fn rm_command_starts_once_or_is_logged() {
    let mut sim = Sim::with_config(1, |c| {
        c.rm_command = Some(vec!["child-rm".into(), "--policy".into()])
    });
    sim.run_until("it runs", |s| s.procs.iter().any(|p| p.welcome.is_some()));
    assert_eq!(
        sim.procs[0].welcome.as_ref().map(|w| w.parent.raw()),
        Some(-35)
    );
    let mut sim = Sim::with_config(1, |c| c.rm_command = Some(vec!["missing-rm".into()]));
    let console = sim.enrol(HostId::MASTER);
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            events_max: 9,
        },
    ) else {
        panic!("no events")
    };
    assert!(
        events
            .iter()
            .any(|e| matches!(&e.kind, EventKind::Note { text } if text.contains("missing-rm")))
    );
}

/// A killed resource manager is started again a limited number of times. It is never started again
/// after SIGTERM.
#[test]
fn killed_resource_manager_restarts_are_limited() {
    const SIGKILL: i32 = 9;
    const SIGTERM: i32 = 15;
    let running_rm = |s: &Sim| {
        s.procs
            .iter()
            .position(|p| p.welcome.is_some() && !p.exited)
    };
    let start_machine = || {
        let mut sim = Sim::with_config(1, |c| c.rm_command = Some(vec!["child-rm".into()]));
        sim.run_until("it runs", |s| running_rm(s).is_some());
        sim
    };
    let mut sim = start_machine();
    for _ in 0..5 {
        let rm = running_rm(&sim).expect("it runs");
        sim.exit_proc(rm, SIGKILL);
        sim.run_until("another one runs", |s| {
            running_rm(s).is_some_and(|new_rm| new_rm != rm)
        });
    }
    let rm = running_rm(&sim).expect("it runs");
    sim.exit_proc(rm, SIGKILL);
    sim.advance(Micros::from_secs(5));
    assert_eq!(running_rm(&sim), None, "it has died too often");
    let mut sim = start_machine();
    let rm = running_rm(&sim).expect("it runs");
    sim.exit_proc(rm, SIGTERM);
    sim.advance(Micros::from_secs(5));
    assert_eq!(running_rm(&sim), None, "somebody wanted it to end");
}
