//! Enrolment, messages, spawns, exit notifications, the mailbox, and requests of resource managers.

mod library_faults;
mod output_collection;
mod placement_leases;
mod resource_manager;

use super::sim::{Received, STARTED_NAMESPACE_PID, Sim, host, seeds};
use crate::HostId;
use crate::tasks::Inbox;
use bytes::Bytes;
use sempa_proto::event::{Event as Entry, EventKind};
use sempa_proto::host::PendingItem;
use sempa_proto::message::{DSIG_X86_64, ENC_XDR};
use sempa_proto::table::TASK_FORKED;
use sempa_proto::task::{
    Claim, MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, SPAWN_ARCH,
    SPAWN_COMPLEMENT, SPAWN_HOST, SPAWN_NO_PARENT, SpawnRequest, ToDaemon,
};
use sempa_proto::{Message, Micros, PvmError, Tid};

pub(super) fn spawn_request(file: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        program: file.into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

pub(super) fn spawned_tids(reply: Reply) -> Vec<Result<Tid, PvmError>> {
    match reply {
        Reply::Spawned(results) => results,
        other => panic!("{other:?}"),
    }
}

fn home_indices(reply: Reply) -> Vec<u16> {
    spawned_tids(reply)
        .into_iter()
        .map(|r| r.expect("started").birth_host().expect("a task").index())
        .collect()
}

fn error_of(reply: Reply) -> PvmError {
    match reply {
        Reply::Failed { error, .. } => error,
        other => panic!("{other:?}"),
    }
}

fn exit_notification_request(tids: Vec<Tid>, tag: i32) -> Request {
    Request::Notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(tids),
        ctx: 0,
        tag,
        is_cancellation: false,
    })
}

pub(super) fn integers(body: &Bytes) -> Vec<i32> {
    body.chunks(4)
        .map(|w| i32::from_be_bytes(w.try_into().expect("four bytes")))
        .collect()
}

pub(in crate::tests) fn send_to_daemon(
    sim: &mut Sim,
    proc: usize,
    dst: Tid,
    tag: i32,
    wid: i32,
    body: Bytes,
) {
    let src = sim.procs[proc].tid();
    let message = Message {
        src,
        dst,
        ctx: 0,
        tag,
        wid,
        enc: ENC_XDR,
        body,
    };
    let (conn, host_id) = (
        sim.procs[proc].conn.expect("connected"),
        sim.procs[proc].host,
    );
    let event = crate::Event::TaskControl {
        conn,
        message: ToDaemon::Message(message),
    };
    sim.send_from_proc(conn, host_id, event);
}

fn is_message_of(item: &Received, tid: Tid) -> bool {
    matches!(item, Received::Message(src, _) if *src == tid)
}

fn put_request(name: &str, flags: i32, text: &'static str) -> Request {
    let body = Bytes::from_static(text.as_bytes());
    let message = Message {
        src: Tid::NONE,
        dst: Tid::NONE,
        ctx: 1,
        tag: 2,
        wid: 0,
        enc: ENC_XDR,
        body,
    };
    Request::Mailbox(MailboxRequest::Put {
        name: name.into(),
        flags,
        message,
    })
}

fn take_request(name: &str, flags: i32) -> Request {
    Request::Mailbox(MailboxRequest::Take {
        name: name.into(),
        index: 0,
        flags,
    })
}

#[test]
fn messages_between_all_hosts_keep_order() {
    for seed in seeds(10) {
        let (mut sim, _) = Sim::cluster(seed, 3);
        let procs: Vec<usize> = (1..=3)
            .flat_map(|h| [h, h])
            .map(|h| sim.enrol(host(h)))
            .collect();
        let tids: Vec<Tid> = procs.iter().map(|p| sim.procs[*p].tid()).collect();
        assert_eq!(tids[2], Tid::from_raw(0x80001));
        for n in 0..50u32 {
            for (sender_index, peer_numbers) in procs.iter().enumerate() {
                for to in tids
                    .iter()
                    .enumerate()
                    .filter(|(receiver_index, _)| *receiver_index != sender_index)
                    .map(|(_, t)| *t)
                {
                    sim.send_message(*peer_numbers, to, &n.to_be_bytes());
                }
            }
        }
        let all_arrived = |s: &Sim| procs.iter().all(|p| s.procs[*p].received.len() == 50 * 5);
        sim.run_until("all messages", all_arrived);
        for p in &procs {
            for peer in &tids {
                let peer_numbers = sim.procs[*p].received.iter().filter_map(|s| match s {
                    Received::Message(src, body) if src == peer => Some(integers(body)[0]),
                    _ => None,
                });
                let numbers: Vec<i32> = peer_numbers.collect();
                assert!(
                    numbers.is_empty() || numbers == (0..50).collect::<Vec<_>>(),
                    "seed {seed}"
                );
            }
        }
    }
}

/// The inbox of a task keeps all last messages of an exited sender until the task accepts them.
#[test]
fn inbox_keeps_all_last_messages() {
    // These frames are never retransmitted. Their total size exceeds the windows of many links.
    let (frame, count) = (Bytes::from(vec![7; 64 << 10]), 2000);
    let mut inbox = Inbox::default();
    (0..count).for_each(|_| inbox.push(PendingItem::Frame(frame.clone())));
    assert_eq!(inbox.drain().len(), count);
}

/// The last messages of a process arrive before its exit notification, however late its daemon
/// handles them.
#[test]
fn last_messages_precede_exit_on_slow_daemon() {
    // The delays in seconds are shorter and much longer than the time for which a daemon waits for
    // the end of a stream.
    for (seed, delay_s) in [0, 1, 3, 60].into_iter().enumerate() {
        let (mut sim, console) = Sim::cluster(seed as u64, 2);
        for host_number in 1..=2 {
            let request = SpawnRequest {
                flags: SPAWN_HOST,
                where_arg: format!("h{host_number}"),
                ..spawn_request("child", 1)
            };
            let tid = spawned_tids(sim.ask(console, Request::Spawn(request)))[0].expect("started");
            sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
            assert_eq!(
                sim.ask(console, exit_notification_request(vec![tid], 9)),
                Reply::Done
            );
            let (child_proc, to) = (sim.proc_of(tid), sim.procs[console].tid());
            sim.delay_proc(child_proc, Micros::from_secs(delay_s));
            (0..3).for_each(|_| sim.send_message(child_proc, to, b"last"));
            sim.exit_proc(child_proc, 0);
            sim.run_until("its end is told", |s| {
                s.procs[console].notifications(9).len() == host_number
            });
            let message_count = sim.procs[console]
                .received
                .iter()
                .filter(|item| is_message_of(item, tid))
                .count();
            assert_eq!(message_count, 3, "{delay_s} s behind");
        }
    }
}

/// A task ends soon after its process exits, even if a child process holds the socket open. The
/// last message of the process arrives.
#[test]
fn inherited_socket_does_not_delay_exit() {
    let (mut sim, console) = Sim::cluster(1, 1);
    let tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
    assert_eq!(
        sim.ask(console, exit_notification_request(vec![tid], 9)),
        Reply::Done
    );
    let child_proc = sim.proc_of(tid);
    sim.send_message(child_proc, sim.procs[console].tid(), b"last");
    sim.exit_with_open_socket(child_proc, 0);
    sim.run_until("its end is told", |s| {
        s.procs[console].notifications(9).len() == 1
    });
    assert!(
        sim.procs[console]
            .received
            .iter()
            .any(|item| is_message_of(item, tid)),
        "its last words are there"
    );
    assert_eq!(sim.procs[child_proc].conn, None);
}

/// A spawn distributes tasks in blocks over the permitted hosts, beginning with the host after the
/// last one used; the first spawn begins with the host after the local host. A spawn may be
/// restricted to a host, to an architecture, or to all other hosts.
#[test]
fn spawn_distributes_blocks_from_next_host() {
    let (mut sim, console) = Sim::cluster(1, 3);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 7)));
    assert_eq!(home_indices(reply), [2, 2, 2, 3, 3, 1, 1]);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 2)));
    assert_eq!(home_indices(reply), [2, 3]);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 2)));
    assert_eq!(home_indices(reply), [1, 2]);
    let mut spawn_homes = |flags: i32, host_name: &str, count: u32| {
        let request = SpawnRequest {
            flags,
            where_arg: host_name.into(),
            ..spawn_request("child", count)
        };
        spawned_tids(sim.ask(console, Request::Spawn(request)))
            .into_iter()
            .map(|r| r.map(|t| t.host_part()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        spawn_homes(SPAWN_HOST, "h3:/var", 2),
        [Ok(host(3).tid()); 2]
    );
    assert_eq!(spawn_homes(SPAWN_HOST, ".", 1), [Ok(host(1).tid())]);
    assert_eq!(
        spawn_homes(SPAWN_HOST, "nohost", 2),
        [Err(PvmError::NoHost); 2]
    );
    assert_eq!(spawn_homes(SPAWN_ARCH, "CRAY", 1), [Err(PvmError::NoHost)]);
    assert_eq!(
        spawn_homes(SPAWN_ARCH, "LINUX64", 3)
            .iter()
            .flatten()
            .count(),
        3
    );
    assert_eq!(
        spawn_homes(SPAWN_COMPLEMENT, "", 1),
        [Err(PvmError::NoHost)]
    );
    let complement_homes = spawn_homes(SPAWN_HOST | SPAWN_COMPLEMENT, ".", 4);
    assert!(
        complement_homes
            .iter()
            .all(|r| matches!(r, Ok(t) if *t != host(1).tid())),
        "{complement_homes:?}"
    );
}

/// A spawned task knows its parent, unless it was spawned without a parent. Its environment
/// contains each requested variable once, and the variables of the daemon.
#[test]
fn spawned_task_gets_parent_and_environment() {
    let (mut sim, console) = Sim::cluster(2, 2);
    let env = vec![b"PVMCTX=0x0".to_vec(), b"HOME=/mine".to_vec()];
    let request = SpawnRequest {
        env,
        where_arg: ":/var".into(),
        ..spawn_request("child", 1)
    };
    let child_tid =
        spawned_tids(sim.ask(console, Request::Spawn(request.clone())))[0].expect("started");
    let flags = SPAWN_NO_PARENT;
    let orphan = spawned_tids(sim.ask(console, Request::Spawn(SpawnRequest { flags, ..request })))
        [0]
    .expect("started");
    sim.run_until("both are there", |s| {
        [child_tid, orphan]
            .iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    let proc = sim.proc_of(child_tid);
    let welcome = sim.procs[proc].welcome.clone().expect("there");
    assert_eq!(
        (welcome.tid, welcome.parent, welcome.spawned),
        (child_tid, sim.procs[console].tid(), true)
    );
    let env = &sim.procs[proc].env;
    for entry in [
        "PVMCTX=0x0",
        "HOME=/mine",
        "PVMSPAWNWD=/var",
        "PVM_ARCH=LINUX64",
    ] {
        assert_eq!(
            env.iter().filter(|e| e.as_str() == entry).count(),
            1,
            "{entry} in {env:?}"
        );
    }
    assert_eq!(env.iter().filter(|e| e.starts_with("PVMEPID=")).count(), 1);
    assert_eq!(env.iter().filter(|e| e.starts_with("HOME=")).count(), 1);
    assert!(
        env.iter().any(|e| e.starts_with("PVMSOCK=/sim/2/")),
        "{env:?}"
    );
    let orphan = sim.proc_of(orphan);
    assert_eq!(
        sim.procs[orphan].welcome.as_ref().map(|w| w.parent.raw()),
        Some(PvmError::ParentNotSet.code())
    );
}

/// A spawn of a missing program returns an error. A program that cannot be started gets a tid, and
/// the task ends immediately. A spawn of no tasks is refused.
#[test]
fn missing_program_differs_from_failed_start() {
    let (mut sim, console) = Sim::cluster(3, 2);
    let reply = sim.ask(console, Request::Spawn(spawn_request("missing", 3)));
    assert_eq!(spawned_tids(reply), [Err(PvmError::NoFile); 3]);
    let broken_tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("broken", 1))))[0]
        .expect("it has a tid");
    sim.ask(console, exit_notification_request(vec![broken_tid], 9));
    sim.run_until("it ended at once", |s| {
        s.procs[console].notifications(9).len() == 1
    });
    let refusal = sim.ask(console, Request::Spawn(spawn_request("child", 0)));
    assert!(matches!(
        refusal,
        Reply::Failed {
            error: PvmError::BadParam,
            ..
        }
    ));
}

/// A second process that claims a spawned tid becomes a new task. A process that claims to be the
/// quiesced library of a running task is refused.
#[test]
fn second_claim_becomes_new_task() {
    let (mut sim, console) = Sim::cluster(4, 1);
    let child_tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child_tid)].welcome.is_some()
    });
    let proc = sim.proc_of(child_tid);
    let spawn_token = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    let second_claimer = sim.start_with_claim(HostId::MASTER, Claim::Spawned { spawn_token });
    sim.run_until("accepted", |s| s.procs[second_claimer].welcome.is_some());
    assert_ne!(sim.procs[second_claimer].tid(), child_tid);
    assert_eq!(
        sim.procs[second_claimer].welcome.as_ref().map(|w| w.parent),
        Some(Tid::NONE)
    );
    let migration = sempa_proto::MigrationId(1);
    let false_resumer = sim.start_with_claim(
        HostId::MASTER,
        Claim::Resume {
            tid: child_tid,
            migration,
        },
    );
    sim.run_until("refused", |s| {
        s.procs[false_resumer].refusal_reason.is_some()
    });
}

/// Watchers are notified of a task's exit after the task's last message.
#[test]
fn exit_notification_follows_last_message() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let child_tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))
            [0]
        .expect("started");
        sim.run_until("it is there", |s| {
            s.procs[s.proc_of(child_tid)].welcome.is_some()
        });
        let proc = sim.proc_of(child_tid);
        let watchers: Vec<usize> = (1..=3).map(|h| sim.enrol(host(h))).collect();
        for w in &watchers {
            sim.ask(*w, exit_notification_request(vec![child_tid], 7));
        }
        for n in 0..20u32 {
            for w in &watchers {
                let dst = sim.procs[*w].tid();
                sim.send_message(proc, dst, &n.to_be_bytes());
            }
        }
        // The process is killed, so it sends no watermarks.
        sim.exit_proc(proc, 9);
        sim.run_until("all notes", |s| {
            watchers
                .iter()
                .all(|w| s.procs[*w].notifications(7).len() == 1)
        });
        for w in &watchers {
            let received_items = &sim.procs[*w].received;
            assert!(
                matches!(received_items.last(), Some(Received::Notification(_))),
                "seed {seed}"
            );
            assert_eq!(received_items.len(), 21, "seed {seed}");
        }
        // A watcher that subscribes to the exit of a dead or unknown task is notified immediately.
        let late_watcher = sim.enrol(host(2));
        sim.ask(
            late_watcher,
            exit_notification_request(
                vec![child_tid, Tid::from_raw(0x40777), Tid::from_raw(0x3c0001)],
                8,
            ),
        );
        sim.run_until("three notes", |s| {
            s.procs[late_watcher].notifications(8).len() == 3
        });
    }
}

/// Two equal notifications are requested. The cancellation of one triggers one notification
/// immediately; the other follows when the task exits.
#[test]
fn cancelled_notification_comes_at_once() {
    let (mut sim, console) = Sim::cluster(6, 2);
    let other_proc = sim.enrol(host(2));
    let exited_tid = sim.procs[other_proc].tid();
    sim.ask(
        console,
        exit_notification_request(vec![exited_tid, exited_tid], 3),
    );
    let subjects = NotifySubjects::TaskExit(vec![exited_tid]);
    sim.ask(
        console,
        Request::Notify(NotifyRequest {
            subjects,
            ctx: 0,
            tag: 3,
            is_cancellation: true,
        }),
    );
    sim.advance(Micros::from_millis(50));
    assert_eq!(sim.procs[console].notifications(3).len(), 1);
    sim.ask(other_proc, Request::Exit { watermarks: vec![] });
    sim.run_until("the other one", |s| {
        s.procs[console].notifications(3).len() == 2
    });
    let invalid_reply = sim.ask(console, exit_notification_request(vec![Tid::MY_DAEMON], 3));
    assert!(matches!(
        invalid_reply,
        Reply::Failed {
            error: PvmError::BadParam,
            ..
        }
    ));
}

/// A spawned task that leaves the virtual machine stays in the task list until its process exits.
/// The process can enrol again and gets another tid.
#[test]
fn reenrolled_process_gets_new_tid() {
    let (mut sim, console) = Sim::cluster(7, 2);
    let child_tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child_tid)].welcome.is_some()
    });
    let proc = sim.proc_of(child_tid);
    sim.ask(console, exit_notification_request(vec![child_tid], 1));
    assert_eq!(
        sim.ask(proc, Request::Exit { watermarks: vec![] }),
        Reply::Done
    );
    sim.close_connection(proc);
    sim.advance(Micros::from_millis(200));
    assert!(sim.procs[console].notifications(1).is_empty());
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: child_tid,
        },
    ) else {
        panic!("no list")
    };
    assert_eq!(tasks[0].flags, TASK_FORKED);
    let spawn_token = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    sim.procs[proc].welcome = None;
    sim.connect(proc, Claim::Spawned { spawn_token });
    sim.run_until("again", |s| s.procs[proc].welcome.is_some());
    assert_ne!(sim.procs[proc].tid(), child_tid);
    sim.exit_proc(proc, 0);
    sim.run_until("the end", |s| s.procs[console].notifications(1).len() == 1);
}

/// Messages wait for a spawned task that has not connected yet. When the task is dead, the link of
/// a later sender is notified.
#[test]
fn messages_wait_for_spawned_task() {
    let (mut sim, console) = Sim::cluster(8, 2);
    let unconnected_tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("sleep", 1))))
        [0]
    .expect("started");
    for n in 0..10u32 {
        sim.send_message(console, unconnected_tid, &n.to_be_bytes());
    }
    sim.advance(Micros::from_secs(3));
    let proc = sim.proc_of(unconnected_tid);
    let spawn_token = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    sim.connect(proc, Claim::Spawned { spawn_token });
    sim.run_until("all that waited", |s| s.procs[proc].received.len() == 10);
    sim.exit_proc(proc, 0);
    sim.advance(Micros::from_millis(100));
    sim.send_message(console, unconnected_tid, b"too late");
    sim.run_until("the sender's link is told and forgets", |s| {
        s.procs[console].knows_peer_dead(unconnected_tid)
    });
}

/// All hosts share one mailbox. Readers can wait for an entry that does not exist yet.
#[test]
fn mailbox_is_shared_by_all_hosts() {
    let (mut sim, console) = Sim::cluster(10, 3);
    let (a, b) = (sim.enrol(host(2)), sim.enrol(host(3)));
    let waiting_request = sim.request(b, take_request("x", 32));
    sim.advance(Micros::from_millis(50));
    assert!(!sim.procs[b].replies.contains_key(&waiting_request));
    assert_eq!(
        sim.ask(a, put_request("x", 0, "one")),
        Reply::MailboxIndex(0)
    );
    sim.run_until("the waiting one", |s| {
        s.procs[b].replies.contains_key(&waiting_request)
    });
    let put_reply = sim.ask(console, put_request("x", 0, "two"));
    assert!(matches!(
        put_reply,
        Reply::Failed {
            error: PvmError::Denied,
            ..
        }
    ));
    sim.ask(a, Request::Exit { watermarks: vec![] });
    sim.advance(Micros::from_millis(50));
    let take_reply = sim.ask(console, take_request("x", 0));
    assert!(matches!(
        take_reply,
        Reply::Failed {
            error: PvmError::NotFound,
            ..
        }
    ));
    // The entries of tasks on a lost host are removed, too.
    sim.ask(b, put_request("y", 1, "kept"));
    sim.ask(b, put_request("z", 0, "gone"));
    sim.kill_host(host(3));
    sim.advance(Micros::from_secs(3));
    let Reply::MailboxClasses(mailbox_classes) = sim.ask(
        console,
        Request::Mailbox(MailboxRequest::List {
            pattern: String::new(),
        }),
    ) else {
        panic!("no list")
    };
    assert_eq!(
        mailbox_classes
            .iter()
            .map(|c| (c.name.as_str(), c.entries[0].1))
            .collect::<Vec<_>>(),
        [("y", Tid::NONE)]
    );
}

/// `pvm_tasks` lists the process id of the process that makes the PVM calls, as that process has
/// it. Before a task connects, the process that the tasker has started counts.
#[test]
fn listed_pid_is_what_getpid_returns() {
    let (mut sim, console) = Sim::cluster(12, 2);
    let tids: Vec<Tid> = ["child", "sleep"]
        .into_iter()
        .flat_map(|program| {
            spawned_tids(sim.ask(console, Request::Spawn(spawn_request(program, 2))))
        })
        .flatten()
        .collect();
    sim.advance(Micros::from_millis(50));
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: Tid::NONE,
        },
    ) else {
        panic!("no list")
    };
    for task in &tasks {
        let expected_pid = match tids.iter().position(|tid| *tid == task.tid) {
            None => sim.procs[console].namespace_pid,
            Some(0..2) => sim.procs[sim.proc_of(task.tid)].namespace_pid,
            Some(_) => STARTED_NAMESPACE_PID,
        };
        assert_eq!(task.namespace_pid, expected_pid, "{task:?}");
    }
    assert_eq!(tasks.len(), 5);
}

/// The host concerned answers requests for task lists, clocks, and the status of hosts and tasks,
/// and receives signals. Requests about unknown hosts and ended tasks return errors.
#[test]
fn host_wide_requests_reach_every_host() {
    let (mut sim, console) = Sim::cluster(11, 3);
    let children: Vec<Tid> =
        spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 3))))
            .into_iter()
            .flatten()
            .collect();
    sim.advance(Micros::from_millis(50));
    let list_tasks =
        |sim: &mut Sim, selector: Tid| match sim.ask(console, Request::Tasks { selector }) {
            Reply::Tasks(tasks) => tasks.into_iter().map(|t| t.tid).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
    assert_eq!(list_tasks(&mut sim, Tid::NONE).len(), 4);
    assert_eq!(
        list_tasks(&mut sim, host(2).tid()),
        [Tid::from_raw(0x80001)]
    );
    assert_eq!(list_tasks(&mut sim, children[1]), [children[1]]);
    assert!(list_tasks(&mut sim, Tid::from_raw(0x80099)).is_empty());
    assert_eq!(
        error_of(sim.ask(
            console,
            Request::Tasks {
                selector: host(9).tid()
            }
        )),
        PvmError::NoHost
    );
    assert_eq!(
        sim.ask(console, Request::HostStatus { name: "h3".into() }),
        Reply::Done
    );
    assert_eq!(
        error_of(sim.ask(console, Request::HostStatus { name: "h8".into() })),
        PvmError::NoHost
    );
    assert!(matches!(
        sim.ask(
            console,
            Request::HostSync {
                host: host(2).tid()
            }
        ),
        Reply::Clock(_)
    ));
    assert_eq!(
        sim.ask(console, Request::TaskStatus { tid: children[0] }),
        Reply::Done
    );
    assert_eq!(
        sim.ask(
            console,
            Request::Signal {
                tid: children[0],
                signal: 15
            }
        ),
        Reply::Done
    );
    sim.advance(Micros::from_millis(50));
    assert_eq!(
        error_of(sim.ask(console, Request::TaskStatus { tid: children[0] })),
        PvmError::NoTask
    );
    assert_eq!(
        sim.ask(
            console,
            Request::Signal {
                tid: children[0],
                signal: 15
            }
        ),
        Reply::Done
    );
    let Reply::Context(ctx) = sim.ask(console, Request::NewContext) else {
        panic!("no context")
    };
    assert_eq!(ctx, 0x40001);
    assert_eq!(sim.ask(console, Request::FreeContext { ctx }), Reply::Done);
    assert_eq!(
        error_of(sim.ask(console, Request::FreeContext { ctx })),
        PvmError::NotFound
    );
}

/// Events of all hosts have consecutive numbers. A task can subscribe to new events.
#[test]
fn events_are_numbered_and_can_be_followed() {
    let (mut sim, console) = Sim::cluster(13, 2);
    let subscriber = sim.enrol(host(2));
    assert_eq!(
        sim.ask(subscriber, Request::Subscribe { ctx: 3, tag: 33 }),
        Reply::Done
    );
    let event = EventKind::Note {
        text: "from far".into(),
    };
    sim.ask(
        subscriber,
        Request::RecordEvent {
            at: Micros(5),
            kind: event.clone(),
        },
    );
    sim.run_until("it comes back", |s| {
        !s.procs[subscriber].notifications(33).is_empty()
    });
    let notification = sim.procs[subscriber].notifications(33)[0].clone();
    let entry: Entry = sempa_proto::frame::from_bytes(&notification.body).expect("an event");
    assert_eq!(
        (entry.kind, entry.at, entry.host),
        (event, Micros(5), host(2))
    );
    assert_eq!(
        (notification.ctx, notification.enc, notification.src),
        (3, DSIG_X86_64, HostId::MASTER.daemon_tid())
    );
    let Reply::Events(all_entries) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            events_max: 1000,
        },
    ) else {
        panic!("no events")
    };
    assert!(
        all_entries
            .iter()
            .enumerate()
            .all(|(n, e)| e.number == n as u64 + 1)
    );
    let Reply::Events(limited_entries) = sim.ask(
        console,
        Request::Events {
            first_number: 3,
            events_max: 1,
        },
    ) else {
        panic!("no events")
    };
    assert_eq!(
        limited_entries.iter().map(|e| e.number).collect::<Vec<_>>(),
        [3]
    );
}
