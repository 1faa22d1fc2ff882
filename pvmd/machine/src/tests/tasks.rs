//! Tasks enrol, exchange messages, spawn, watch each other, use the mailbox and obey resource
//! managers.

use super::sim::{Received, Sim, host, seeds};
use crate::tasks::Inbox;
use crate::{Event, HostId, Output};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::event::{Event as Entry, EventKind};
use sempa_proto::host::PendingItem;
use sempa_proto::message::{DSIG_X86_64, ENC_XDR};
use sempa_proto::sm::{
    LEASE_HOSTS_MAX, LEASE_TASKS_MAX, PlacementLeaseUse, SM_ADD, SM_ADDACK, SM_EXEC, SM_EXECACK,
    SM_HOSTX, SM_PLACEMENT_LEASE_USED, SM_TASKX, pack_exec, unpack_placement_lease_use,
    unpack_tids,
};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_RM};
use sempa_proto::task::{
    Claim, LeasedSpawn, MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, RmServices,
    SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SPAWN_NO_PARENT, Sink, SpawnRequest, ToDaemon,
    ToTask,
};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Message, Micros, PvmError, RequestId, Tid};

pub(super) fn spawn_request(file: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        file: file.into(),
        count,
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

fn exit_notification(tids: Vec<Tid>, tag: i32) -> Request {
    Request::Notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(tids),
        ctx: 0,
        tag,
        cancel: false,
    })
}

pub(super) fn integers(body: &Bytes) -> Vec<i32> {
    body.chunks(4)
        .map(|w| i32::from_be_bytes(w.try_into().expect("four bytes")))
        .collect()
}

pub(super) fn send_to_daemon(
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
    let (conn, on) = (
        sim.procs[proc].conn.expect("connected"),
        sim.procs[proc].host,
    );
    let event = crate::Event::TaskControl {
        conn,
        message: ToDaemon::Message(message),
    };
    sim.send_from_proc(conn, on, event);
}

fn put_mail(name: &str, flags: i32, text: &'static str) -> Request {
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

fn take_mail(name: &str, flags: i32) -> Request {
    Request::Mailbox(MailboxRequest::Take {
        name: name.into(),
        index: 0,
        flags,
    })
}

/// Tasks on all hosts exchange messages in order.
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
            for (i, from) in procs.iter().enumerate() {
                for to in tids
                    .iter()
                    .enumerate()
                    .filter(|(j, _)| *j != i)
                    .map(|(_, t)| *t)
                {
                    sim.send_message(*from, to, &n.to_be_bytes());
                }
            }
        }
        let all = |s: &Sim| procs.iter().all(|p| s.procs[*p].received.len() == 50 * 5);
        sim.run_until("all messages", all);
        for p in &procs {
            for peer in &tids {
                let from = sim.procs[*p].received.iter().filter_map(|s| match s {
                    Received::Message(src, body) if src == peer => Some(integers(body)[0]),
                    _ => None,
                });
                let numbers: Vec<i32> = from.collect();
                assert!(
                    numbers.is_empty() || numbers == (0..50).collect::<Vec<_>>(),
                    "seed {seed}"
                );
            }
        }
    }
}

/// The inbox keeps all last messages of an exited task until its receiver can accept them.
#[test]
fn inbox_keeps_all_last_messages() {
    // These frames are never repeated. Their size exceeds the windows of many links.
    let (frame, count) = (Bytes::from(vec![7; 64 << 10]), 2000);
    let mut inbox = Inbox::default();
    (0..count).for_each(|_| inbox.push(PendingItem::Frame(frame.clone())));
    assert_eq!(inbox.drain().len(), count);
}

/// The last messages of a process arrive before its task ends, however slow its daemon is.
#[test]
fn last_messages_precede_exit_on_slow_daemon() {
    // From less to far more than the time for which a daemon waits for the end of a stream.
    for (seed, behind) in [0, 1, 3, 60].into_iter().enumerate() {
        let (mut sim, console) = Sim::cluster(seed as u64, 2);
        for home in 1..=2 {
            let request = SpawnRequest {
                flags: SPAWN_HOST,
                place: format!("h{home}"),
                ..spawn_request("child", 1)
            };
            let tid = spawned_tids(sim.ask(console, Request::Spawn(request)))[0].expect("started");
            sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
            assert_eq!(
                sim.ask(console, exit_notification(vec![tid], 9)),
                Reply::Done
            );
            let (child, to) = (sim.proc_of(tid), sim.procs[console].tid());
            sim.delay_proc(child, Micros::from_secs(behind));
            (0..3).for_each(|_| sim.send_message(child, to, b"last"));
            sim.exit(child, 0);
            sim.run_until("its end is told", |s| {
                s.procs[console].notifications(9).len() == home
            });
            let said = sim.procs[console]
                .received
                .iter()
                .filter(|seen| is_message_of(seen, tid))
                .count();
            assert_eq!(said, 3, "{behind} s behind");
        }
    }
}

/// A task whose child process holds its socket open ends soon after its process.
#[test]
fn inherited_socket_does_not_delay_exit() {
    let (mut sim, console) = Sim::cluster(1, 1);
    let tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
    assert_eq!(
        sim.ask(console, exit_notification(vec![tid], 9)),
        Reply::Done
    );
    let child = sim.proc_of(tid);
    sim.send_message(child, sim.procs[console].tid(), b"last");
    sim.exit_with_socket_held(child, 0);
    sim.run_until("its end is told", |s| {
        s.procs[console].notifications(9).len() == 1
    });
    assert!(
        sim.procs[console]
            .received
            .iter()
            .any(|seen| is_message_of(seen, tid)),
        "its last words are there"
    );
    assert_eq!(sim.procs[child].conn, None);
}

/// A spawn distributes tasks in blocks and begins after the local host.
#[test]
fn spawn_distributes_blocks_from_next_host() {
    let (mut sim, console) = Sim::cluster(1, 3);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 7)));
    assert_eq!(home_indices(reply), [2, 2, 2, 3, 3, 1, 1]);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 2)));
    assert_eq!(home_indices(reply), [2, 3]);
    let reply = sim.ask(console, Request::Spawn(spawn_request("child", 2)));
    assert_eq!(home_indices(reply), [1, 2]);
    let mut ask = |flags: i32, place: &str, count: u32| {
        let request = SpawnRequest {
            flags,
            place: place.into(),
            ..spawn_request("child", count)
        };
        spawned_tids(sim.ask(console, Request::Spawn(request)))
            .into_iter()
            .map(|r| r.map(|t| t.host_part()))
            .collect::<Vec<_>>()
    };
    assert_eq!(ask(SPAWN_HOST, "h3:/var", 2), [Ok(host(3).tid()); 2]);
    assert_eq!(ask(SPAWN_HOST, ".", 1), [Ok(host(1).tid())]);
    assert_eq!(ask(SPAWN_HOST, "nohost", 2), [Err(PvmError::NoHost); 2]);
    assert_eq!(ask(SPAWN_ARCH, "CRAY", 1), [Err(PvmError::NoHost)]);
    assert_eq!(ask(SPAWN_ARCH, "LINUX64", 3).iter().flatten().count(), 3);
    assert_eq!(ask(SPAWN_COMPLEMENT, "", 1), [Err(PvmError::NoHost)]);
    let others = ask(SPAWN_HOST | SPAWN_COMPLEMENT, ".", 4);
    assert!(
        others
            .iter()
            .all(|r| matches!(r, Ok(t) if *t != host(1).tid())),
        "{others:?}"
    );
}

/// A spawned task knows its parent and has the requested environment.
#[test]
fn spawned_task_gets_parent_and_environment() {
    let (mut sim, console) = Sim::cluster(2, 2);
    let env = vec![b"PVMCTX=0x0".to_vec(), b"HOME=/mine".to_vec()];
    let request = SpawnRequest {
        env,
        place: ":/var".into(),
        ..spawn_request("child", 1)
    };
    let child =
        spawned_tids(sim.ask(console, Request::Spawn(request.clone())))[0].expect("started");
    let flags = SPAWN_NO_PARENT;
    let orphan = spawned_tids(sim.ask(console, Request::Spawn(SpawnRequest { flags, ..request })))
        [0]
    .expect("started");
    sim.run_until("both are there", |s| {
        [child, orphan]
            .iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    let proc = sim.proc_of(child);
    let welcome = sim.procs[proc].welcome.clone().expect("there");
    assert_eq!(
        (welcome.tid, welcome.parent, welcome.spawned),
        (child, sim.procs[console].tid(), true)
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

/// A missing program and a process that cannot be started are different errors.
#[test]
fn missing_program_differs_from_failed_start() {
    let (mut sim, console) = Sim::cluster(3, 2);
    let reply = sim.ask(console, Request::Spawn(spawn_request("missing", 3)));
    assert_eq!(spawned_tids(reply), [Err(PvmError::NoFile); 3]);
    let broken = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("broken", 1))))[0]
        .expect("it has a tid");
    sim.ask(console, exit_notification(vec![broken], 9));
    sim.run_until("it ended at once", |s| {
        s.procs[console].notifications(9).len() == 1
    });
    let refused = sim.ask(console, Request::Spawn(spawn_request("child", 0)));
    assert!(matches!(
        refused,
        Reply::Failed {
            error: PvmError::BadParam,
            ..
        }
    ));
}

/// A second process that claims a spawned tid becomes a new task.
#[test]
fn second_claim_becomes_new_task() {
    let (mut sim, console) = Sim::cluster(4, 1);
    let child = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child)].welcome.is_some()
    });
    let proc = sim.proc_of(child);
    let epid = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    let thief = sim.claim(HostId::MASTER, Claim::Spawned { spawn_token: epid });
    sim.run_until("accepted", |s| s.procs[thief].welcome.is_some());
    assert_ne!(sim.procs[thief].tid(), child);
    assert_eq!(
        sim.procs[thief].welcome.as_ref().map(|w| w.parent),
        Some(Tid::NONE)
    );
    let migration = sempa_proto::MigrationId(1);
    let resume = sim.claim(
        HostId::MASTER,
        Claim::Resume {
            tid: child,
            migration,
        },
    );
    sim.run_until("refused", |s| s.procs[resume].refused.is_some());
}

/// Watchers are notified of a task's exit after the task's last message.
#[test]
fn exit_notification_follows_last_message() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let child = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
            .expect("started");
        sim.run_until("it is there", |s| {
            s.procs[s.proc_of(child)].welcome.is_some()
        });
        let proc = sim.proc_of(child);
        let watchers: Vec<usize> = (1..=3).map(|h| sim.enrol(host(h))).collect();
        for w in &watchers {
            sim.ask(*w, exit_notification(vec![child], 7));
        }
        for n in 0..20u32 {
            for w in &watchers {
                let dst = sim.procs[*w].tid();
                sim.send_message(proc, dst, &n.to_be_bytes());
            }
        }
        // The process is killed, so that it sends no watermarks itself.
        sim.exit(proc, 9);
        sim.run_until("all notes", |s| {
            watchers
                .iter()
                .all(|w| s.procs[*w].notifications(7).len() == 1)
        });
        for w in &watchers {
            let seen = &sim.procs[*w].received;
            assert!(
                matches!(seen.last(), Some(Received::Notification(_))),
                "seed {seed}"
            );
            assert_eq!(seen.len(), 21, "seed {seed}");
        }
        // Notifications about dead and unknown tasks are sent at once.
        let late = sim.enrol(host(2));
        sim.ask(
            late,
            exit_notification(
                vec![child, Tid::from_raw(0x40777), Tid::from_raw(0x3c0001)],
                8,
            ),
        );
        sim.run_until("three notes", |s| s.procs[late].notifications(8).len() == 3);
    }
}

/// A cancelled notification is sent at once, and only once.
#[test]
fn cancelled_notification_comes_at_once() {
    let (mut sim, console) = Sim::cluster(6, 2);
    let other = sim.enrol(host(2));
    let dead = sim.procs[other].tid();
    sim.ask(console, exit_notification(vec![dead, dead], 3));
    let what = NotifySubjects::TaskExit(vec![dead]);
    sim.ask(
        console,
        Request::Notify(NotifyRequest {
            subjects: what,
            ctx: 0,
            tag: 3,
            cancel: true,
        }),
    );
    sim.advance(Micros::from_millis(50));
    assert_eq!(sim.procs[console].notifications(3).len(), 1);
    sim.ask(other, Request::Exit { watermarks: vec![] });
    sim.run_until("the other one", |s| {
        s.procs[console].notifications(3).len() == 2
    });
    let bad = sim.ask(console, exit_notification(vec![Tid::MY_DAEMON], 3));
    assert!(matches!(
        bad,
        Reply::Failed {
            error: PvmError::BadParam,
            ..
        }
    ));
}

/// A spawned task that has left ends with its process, which can enrol again under another tid.
#[test]
fn reenrolled_process_gets_new_tid() {
    let (mut sim, console) = Sim::cluster(7, 2);
    let child = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child)].welcome.is_some()
    });
    let proc = sim.proc_of(child);
    sim.ask(console, exit_notification(vec![child], 1));
    assert_eq!(
        sim.ask(proc, Request::Exit { watermarks: vec![] }),
        Reply::Done
    );
    sim.close(proc);
    sim.advance(Micros::from_millis(200));
    assert!(sim.procs[console].notifications(1).is_empty());
    let Reply::Tasks(tasks) = sim.ask(console, Request::Tasks { selector: child }) else {
        panic!("no list")
    };
    assert_eq!(tasks[0].flags, TASK_FORKED);
    let epid = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    sim.procs[proc].welcome = None;
    sim.connect(proc, Claim::Spawned { spawn_token: epid });
    sim.run_until("again", |s| s.procs[proc].welcome.is_some());
    assert_ne!(sim.procs[proc].tid(), child);
    sim.exit(proc, 0);
    sim.run_until("the end", |s| s.procs[console].notifications(1).len() == 1);
}

/// Messages wait for a spawned task that has not connected, and are dropped for a dead one.
#[test]
fn messages_wait_for_spawned_task() {
    let (mut sim, console) = Sim::cluster(8, 2);
    let sleeper = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("sleep", 1))))[0]
        .expect("started");
    for n in 0..10u32 {
        sim.send_message(console, sleeper, &n.to_be_bytes());
    }
    sim.advance(Micros::from_secs(3));
    let proc = sim.proc_of(sleeper);
    let epid = sim.procs[proc]
        .env
        .iter()
        .find_map(|e| e.strip_prefix("PVMEPID=")?.parse().ok())
        .expect("a number");
    sim.connect(proc, Claim::Spawned { spawn_token: epid });
    sim.run_until("all that waited", |s| s.procs[proc].received.len() == 10);
    sim.exit(proc, 0);
    sim.advance(Micros::from_millis(100));
    sim.send_message(console, sleeper, b"too late");
    sim.run_until("the sender's link is told and forgets", |s| {
        s.procs[console].knows_dead(sleeper)
    });
}

/// Output goes to the collector with its markers, or to the log of the master.
#[test]
fn output_goes_to_collector_or_master_log() {
    let (mut sim, console) = Sim::cluster(9, 2);
    let output = Sink {
        tid: sim.procs[console].tid(),
        ctx: 4,
        tag: 44,
    };
    let child = spawned_tids(sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            output,
            ..spawn_request("child", 1)
        }),
    ))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child)].welcome.is_some()
    });
    let on = child.birth_host().expect("a task");
    let out = |tid: Tid, text: &str| {
        crate::Event::Tasker(sempa_proto::tasker::FromTasker::Output {
            tid,
            bytes: text.into(),
        })
    };
    sim.handle(on, out(child, "hello"));
    let proc = sim.proc_of(child);
    sim.exit(proc, 0);
    sim.run_until("four messages", |s| {
        s.procs[console].notifications(44).len() == 4
    });
    let notes = sim.procs[console].notifications(44);
    let second: Vec<i32> = notes.iter().map(|n| integers(&n.body)[1]).collect();
    let from_its_host: Vec<i32> = second.iter().copied().filter(|mark| *mark != -1).collect();
    assert_eq!((second.len(), from_its_host), (4, vec![-2, 5, 0]));
    assert!(
        notes
            .iter()
            .all(|n| n.ctx == 4 && (n.src == Tid::MY_DAEMON || n.src == on.daemon_tid()))
    );
    let quiet = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("started");
    sim.handle(
        quiet.birth_host().expect("a task"),
        out(quiet, "to the log\n"),
    );
    sim.run_until("logged", |s| {
        s.nodes[&HostId::MASTER].output == b"to the log\n"
    });
}

/// A collector is notified of all tasks of a spawn together, so that it never takes the first task
/// for the last one.
#[test]
fn collector_learns_all_tasks_of_spawn_first() {
    let (mut sim, console) = Sim::cluster(12, 3);
    let output = Sink {
        tid: sim.procs[console].tid(),
        ctx: 4,
        tag: 44,
    };
    let spawned = spawned_tids(sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            output,
            ..spawn_request("child", 3)
        }),
    ));
    assert_eq!(spawned.iter().flatten().count(), 3);
    for child in spawned.into_iter().flatten() {
        sim.run_until("it is there", |s| {
            s.procs[s.proc_of(child)].welcome.is_some()
        });
        let proc = sim.proc_of(child);
        sim.exit(proc, 0);
    }
    sim.run_until("all ends", |s| {
        s.procs[console]
            .notifications(44)
            .iter()
            .filter(|n| integers(&n.body)[1] == 0)
            .count()
            == 3
    });
    let said: Vec<i32> = sim.procs[console]
        .notifications(44)
        .iter()
        .map(|n| integers(&n.body)[1])
        .collect();
    let asked: Vec<usize> = (0..said.len()).filter(|n| said[*n] == -1).collect();
    assert!(
        asked.len() == 3 && asked[2] == asked[0] + 2,
        "they come in one go: {said:?}"
    );
}

/// All hosts share one mailbox, and readers can wait for entries.
#[test]
fn mailbox_is_shared_by_all_hosts() {
    let (mut sim, console) = Sim::cluster(10, 3);
    let (a, b) = (sim.enrol(host(2)), sim.enrol(host(3)));
    let waiting = sim.request(b, take_mail("x", 32));
    sim.advance(Micros::from_millis(50));
    assert!(!sim.procs[b].replies.contains_key(&waiting));
    assert_eq!(sim.ask(a, put_mail("x", 0, "one")), Reply::MailboxIndex(0));
    sim.run_until("the waiting one", |s| {
        s.procs[b].replies.contains_key(&waiting)
    });
    let denied = sim.ask(console, put_mail("x", 0, "two"));
    assert!(matches!(
        denied,
        Reply::Failed {
            error: PvmError::Denied,
            ..
        }
    ));
    sim.ask(a, Request::Exit { watermarks: vec![] });
    sim.advance(Micros::from_millis(50));
    let gone = sim.ask(console, take_mail("x", 0));
    assert!(matches!(
        gone,
        Reply::Failed {
            error: PvmError::NotFound,
            ..
        }
    ));
    // Entries of tasks on a lost host are removed, too.
    sim.ask(b, put_mail("y", 1, "kept"));
    sim.ask(b, put_mail("z", 0, "gone"));
    sim.kill_host(host(3));
    sim.advance(Micros::from_secs(3));
    let Reply::MailboxClasses(classes) = sim.ask(
        console,
        Request::Mailbox(MailboxRequest::List {
            pattern: String::new(),
        }),
    ) else {
        panic!("no list")
    };
    assert_eq!(
        classes
            .iter()
            .map(|c| (c.name.as_str(), c.entries[0].1))
            .collect::<Vec<_>>(),
        [("y", Tid::NONE)]
    );
}

/// Lists, clock requests, state requests and signals reach every host.
#[test]
fn host_wide_requests_reach_every_host() {
    let (mut sim, console) = Sim::cluster(11, 3);
    let children: Vec<Tid> =
        spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 3))))
            .into_iter()
            .flatten()
            .collect();
    sim.advance(Micros::from_millis(50));
    let list = |sim: &mut Sim, selector: Tid| match sim.ask(console, Request::Tasks { selector }) {
        Reply::Tasks(tasks) => tasks.into_iter().map(|t| t.tid).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(list(&mut sim, Tid::NONE).len(), 4);
    assert_eq!(list(&mut sim, host(2).tid()), [Tid::from_raw(0x80001)]);
    assert_eq!(list(&mut sim, children[1]), [children[1]]);
    assert!(list(&mut sim, Tid::from_raw(0x80099)).is_empty());
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

/// The use of a placement lease is reported to its resource manager and does not advance the
/// round-robin order.
#[test]
fn placement_lease_use_is_reported() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: true,
            }),
        );
        let giver = sim.procs[rm].tid();
        let granted = |n: u16, rm: Tid, request: SpawnRequest| Request::SpawnLeased {
            request,
            lease: LeasedSpawn {
                rm,
                wid: 40 + i32::from(n),
                hosts: vec![host(n)],
            },
        };
        let mut started = Vec::new();
        for n in [3, 3, 1] {
            let reply = sim.ask(console, granted(n, giver, spawn_request("child", 1)));
            started.push((n, spawned_tids(reply)[0].expect("started")));
        }
        assert_eq!(
            home_indices(sim.ask(console, Request::Spawn(spawn_request("child", 2)))),
            [2, 3],
            "seed {seed}"
        );
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 3
        });
        let told = sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED);
        let by = sim.procs[console].tid();
        for ((n, tid), note) in started.iter().zip(told) {
            let taken = PlacementLeaseUse {
                spawner: by,
                tasks: vec![(host(*n), *tid)],
            };
            assert_eq!(
                (note.wid, unpack_placement_lease_use(note.body.clone())),
                (40 + i32::from(*n), Ok(taken))
            );
            assert_eq!(tid.birth_host(), Some(host(*n)));
        }
        let Reply::Events(log) = sim.ask(
            console,
            Request::Events {
                first_number: 0,
                limit: 1000,
            },
        ) else {
            panic!("no log")
        };
        let placed = log
            .iter()
            .filter(|entry| matches!(&entry.kind, EventKind::Placed { .. }))
            .count();
        assert_eq!(placed, 3, "seed {seed}");
        // Failures are reported only to the requester, which then asks the resource manager.
        assert_eq!(
            spawned_tids(sim.ask(console, granted(9, giver, spawn_request("child", 1)))),
            [Err(PvmError::NoHost)]
        );
        assert_eq!(
            spawned_tids(sim.ask(console, granted(2, giver, spawn_request("missing", 1)))),
            [Err(PvmError::NoFile)]
        );
        for wrong in [
            granted(2, by, spawn_request("child", 1)),
            granted(2, giver, spawn_request("child", 2)),
        ] {
            assert_eq!(error_of(sim.ask(console, wrong)), PvmError::Denied);
        }
        sim.close(rm);
        sim.run_until("its end", |s| s.procs[console].rm.is_none());
        assert_eq!(
            error_of(sim.ask(console, granted(2, giver, spawn_request("child", 1)))),
            PvmError::Denied
        );
        assert_eq!(
            sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len(),
            3,
            "seed {seed}"
        );
    }
}

/// The reply to a spawn precedes the order to the tasker and the log entry.
#[test]
fn spawn_reply_precedes_start_and_log() {
    let (mut sim, console) = Sim::cluster(1, 1);
    let (now, conn) = (sim.now, sim.procs[console].conn.expect("connected"));
    let entries = |sim: &Sim| {
        sim.nodes[&HostId::MASTER]
            .machine
            .master
            .as_ref()
            .expect("the master")
            .events
            .entries_since(0, 1000)
            .len()
    };
    let before = entries(&sim);
    let message = ToDaemon::Request {
        id: RequestId(77),
        request: Request::Spawn(spawn_request("child", 2)),
    };
    let outputs = sim.outputs_of(HostId::MASTER, now, Event::TaskControl { conn, message });
    let answer = |output: &Output| {
        matches!(
            output,
            Output::ToTask {
                message: ToTask::Reply { .. },
                ..
            }
        )
    };
    let order = |output: &Output| matches!(output, Output::ToTasker(ToTasker::Start(_)));
    let first = outputs.iter().position(order).expect("an order");
    assert!(outputs.iter().position(answer).expect("an answer") < first);
    assert_eq!(outputs.iter().filter(|output| order(output)).count(), 2);
    assert_eq!(entries(&sim), before);
    // Without another event, the log entry follows a moment later.
    let due = sim.nodes[&HostId::MASTER]
        .machine
        .next_wakeup()
        .expect("soon");
    assert!(due.since(now) <= Micros::from_millis(1));
    sim.outputs_of(HostId::MASTER, due, Event::Wake);
    assert_eq!(entries(&sim), before + 2);
}

/// One request uses several placement leases, one per task, and failures are reported to the
/// requester.
#[test]
fn one_request_uses_several_placement_leases() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: true,
            }),
        );
        let (giver, by) = (sim.procs[rm].tid(), sim.procs[console].tid());
        let granted = |sim: &mut Sim, hosts: &[u16], count: u32| {
            let grant = LeasedSpawn {
                rm: giver,
                wid: 7,
                hosts: hosts.iter().map(|n| host(*n)).collect(),
            };
            sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", count),
                    lease: grant,
                },
            )
        };
        let first = spawned_tids(granted(&mut sim, &[3, 1, 3, 2], 4));
        let homes: Vec<_> = first
            .iter()
            .map(|tid| tid.expect("started").birth_host().expect("a home").index())
            .collect();
        assert_eq!(homes, [3, 1, 3, 2], "seed {seed}");
        let second = spawned_tids(granted(&mut sim, &[9, 2, 8], 3));
        assert_eq!([second[0], second[2]], [Err(PvmError::NoHost); 2]);
        assert_eq!(second[1].expect("started").birth_host(), Some(host(2)));
        assert_eq!(
            spawned_tids(granted(&mut sim, &[9, 8], 2)),
            [Err(PvmError::NoHost); 2]
        );
        let many = [2; LEASE_TASKS_MAX + 1];
        for (hosts, count) in [(&[2, 2][..], 3), (&[], 1), (&many[..], many.len() as u32)] {
            assert_eq!(error_of(granted(&mut sim, hosts, count)), PvmError::Denied);
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 2
        });
        let told = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|note| unpack_placement_lease_use(note.body).expect("a word"));
        let at = |n: u16, tid: &Result<Tid, PvmError>| (host(n), tid.expect("started"));
        let all = [3, 1, 3, 2]
            .iter()
            .zip(&first)
            .map(|(n, tid)| at(*n, tid))
            .collect();
        let expected = [
            PlacementLeaseUse {
                spawner: by,
                tasks: all,
            },
            PlacementLeaseUse {
                spawner: by,
                tasks: vec![at(2, &second[1])],
            },
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected, "seed {seed}");
    }
}

/// Reports about the use of placement leases are batched and stay in order.
#[test]
fn lease_reports_are_batched_in_order() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: false,
            }),
        );
        assert_eq!(
            sim.ask(rm, Request::Subscribe { ctx: 3, tag: 33 }),
            Reply::Done
        );
        let giver = sim.procs[rm].tid();
        let waited = |sim: &Sim| sim.nodes[&HostId::MASTER].machine.rm_batch.batched_total;
        let mut tids_taken = Vec::new();
        for n in 1..=LEASE_HOSTS_MAX {
            let grant = LeasedSpawn {
                rm: giver,
                wid: n as i32,
                hosts: vec![HostId::MASTER],
            };
            let reply = sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", 1),
                    lease: grant,
                },
            );
            tids_taken.push(spawned_tids(reply)[0].expect("started"));
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == LEASE_HOSTS_MAX
        });
        let told: Vec<_> = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|note| unpack_placement_lease_use(note.body).expect("a word").tasks)
            .collect();
        let each: Vec<_> = tids_taken
            .iter()
            .map(|tid| vec![(HostId::MASTER, *tid)])
            .collect();
        assert_eq!(told, each, "seed {seed}");
        // Batched messages: one event per placement, one report per lease except at the end of each
        // half, and starts and exits during the test.
        let words = LEASE_HOSTS_MAX - 2;
        let expected = LEASE_HOSTS_MAX + words..=3 * LEASE_HOSTS_MAX + words;
        assert!(
            expected.contains(&waited(&sim)),
            "seed {seed}: {}",
            waited(&sim)
        );
        assert!(
            sim.procs[rm].notifications(SM_TASKX).is_empty(),
            "it has not asked for that"
        );

        sim.advance(Micros::from_secs(2));
        let before = waited(&sim);
        sim.ask(console, Request::Spawn(spawn_request("child", 1)));
        sim.advance(Micros::from_secs(1));
        assert_eq!(
            waited(&sim),
            before,
            "seed {seed}: nothing is granted any more"
        );
        let numbers: Vec<u64> = sim.procs[rm]
            .notifications(33)
            .iter()
            .map(|note| {
                sempa_proto::frame::from_bytes::<sempa_proto::event::Event>(&note.body)
                    .expect("an event")
                    .number
            })
            .collect();
        assert!(
            numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
            "seed {seed}: {numbers:?}"
        );
        assert!(numbers.len() > 8, "seed {seed}: {numbers:?}");
    }
}

fn is_message_of(seen: &Received, tid: Tid) -> bool {
    matches!(seen, Received::Message(src, _) if *src == tid)
}

/// A resource manager spawns tasks, adds hosts and is notified of exits; its death is announced.
#[test]
fn resource_manager_spawns_adds_and_is_notified() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        let serves = RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        };
        assert_eq!(
            sim.ask(rm, Request::RegisterRm(serves)),
            Reply::Rm {
                previous: Tid::NONE
            }
        );
        let rm_tid = sim.procs[rm].tid();
        sim.run_until("the console knows", |s| {
            s.procs[console].rm.is_some_and(|r| r.tid == rm_tid)
        });
        sim.advance(Micros::from_millis(20));
        let other = sim.enrol(host(3));
        sim.run_until("so do newcomers elsewhere", |s| {
            s.procs[other].rm.is_some() && !s.procs[rm].notifications(SM_EXECACK).is_empty()
        });
        let exec = pack_exec(sim.procs[console].tid(), &spawn_request("child", 2), 0, 2);
        send_to_daemon(
            &mut sim,
            rm,
            host(2).daemon_tid(),
            SM_EXEC,
            77,
            exec.clone(),
        );
        send_to_daemon(&mut sim, other, Tid::MY_DAEMON, SM_EXEC, 78, exec);
        let ack = |s: &Sim| {
            s.procs[rm]
                .notifications(SM_EXECACK)
                .into_iter()
                .find(|m| m.wid == 77)
        };
        sim.run_until("the acknowledgement", |s| ack(s).is_some());
        let ack = ack(&sim).expect("just seen");
        let started: Vec<Tid> = unpack_tids(ack.body)
            .expect("tids")
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(
            (ack.src, ack.ctx, started.len()),
            (host(2).daemon_tid(), 0, 2)
        );
        sim.run_until("the refusal", |s| {
            s.nodes[&host(3)]
                .log
                .iter()
                .any(|l| l.contains("not the resource manager"))
        });
        sim.run_until("they are there", |s| {
            started
                .iter()
                .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
        });
        let first = sim.proc_of(started[0]);
        for word in [b"one".as_slice(), b"two", b"three"] {
            sim.send_message(first, rm_tid, word);
        }
        sim.exit(first, 0x300);
        sim.run_until("its end", |s| {
            !s.procs[rm].notifications(SM_TASKX).is_empty()
        });
        let said: Vec<&Received> = sim.procs[rm]
            .received
            .iter()
            .skip_while(|s| !is_message_of(s, started[0]))
            .take(4)
            .collect();
        assert!(
            said[..3].iter().all(|s| is_message_of(s, started[0])),
            "{said:?}"
        );
        assert!(
            matches!(said[3], Received::Notification(note) if note.tag == SM_TASKX),
            "its end is told last: {said:?}"
        );
        assert_eq!(
            integers(&sim.procs[rm].notifications(SM_TASKX)[0].body)[..2],
            [started[0].raw(), 0x300]
        );
        let mut lines = Packer::new(Encoding::Xdr);
        lines.strs(&["h4", "bad5"]);
        send_to_daemon(&mut sim, rm, Tid::MY_DAEMON, SM_ADD, 79, lines.finish());
        sim.run_until("hosts", |s| {
            !s.procs[rm].notifications(SM_ADDACK).is_empty()
        });
        let mut ack = Unpacker::xdr(sim.procs[rm].notifications(SM_ADDACK)[0].body.clone());
        assert_eq!(
            (ack.int(), ack.int(), ack.int()),
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
        let Reply::Tasks(list) = sim.ask(console, Request::Tasks { selector: rm_tid }) else {
            panic!("no list")
        };
        assert_eq!(list[0].flags, TASK_CONNECTED | TASK_RM);
        let late = sim.enrol(host(4));
        assert_eq!(
            sim.procs[late].rm.map(|r| r.tid),
            Some(rm_tid),
            "a new host inherits it"
        );
        sim.close(rm);
        sim.run_until("all know of its end", |s| {
            [console, late].iter().all(|p| s.procs[*p].rm.is_none())
        });
    }
}

/// The command of the resource manager is started once; a missing program is recorded in the event
/// log.
#[test]
fn rm_command_starts_once_or_is_logged() {
    let mut sim = Sim::with(1, |c| {
        c.rm_command = Some(vec!["child-rm".into(), "--policy".into()])
    });
    sim.run_until("it runs", |s| s.procs.iter().any(|p| p.welcome.is_some()));
    assert_eq!(
        sim.procs[0].welcome.as_ref().map(|w| w.parent.raw()),
        Some(-35)
    );
    let mut sim = Sim::with(1, |c| c.rm_command = Some(vec!["missing-rm".into()]));
    let console = sim.enrol(HostId::MASTER);
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 9,
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

/// A killed resource manager is started again a limited number of times, and never after SIGTERM.
#[test]
fn killed_resource_manager_restarts_are_limited() {
    const SIGKILL: i32 = 9;
    const SIGTERM: i32 = 15;
    let alive = |s: &Sim| {
        s.procs
            .iter()
            .position(|p| p.welcome.is_some() && !p.exited)
    };
    let start = || {
        let mut sim = Sim::with(1, |c| c.rm_command = Some(vec!["child-rm".into()]));
        sim.run_until("it runs", |s| alive(s).is_some());
        sim
    };
    let mut sim = start();
    for _ in 0..5 {
        let rm = alive(&sim).expect("it runs");
        sim.exit(rm, SIGKILL);
        sim.run_until("another one runs", |s| {
            alive(s).is_some_and(|now| now != rm)
        });
    }
    let rm = alive(&sim).expect("it runs");
    sim.exit(rm, SIGKILL);
    sim.advance(Micros::from_secs(5));
    assert_eq!(alive(&sim), None, "it has died too often");
    let mut sim = start();
    let rm = alive(&sim).expect("it runs");
    sim.exit(rm, SIGTERM);
    sim.advance(Micros::from_secs(5));
    assert_eq!(alive(&sim), None, "somebody wanted it to end");
}

/// Events of all hosts have consecutive numbers and can be subscribed to.
#[test]
fn events_are_numbered_and_can_be_followed() {
    let (mut sim, console) = Sim::cluster(13, 2);
    let follower = sim.enrol(host(2));
    assert_eq!(
        sim.ask(follower, Request::Subscribe { ctx: 3, tag: 33 }),
        Reply::Done
    );
    let kind = EventKind::Note {
        text: "from far".into(),
    };
    sim.ask(
        follower,
        Request::RecordEvent {
            at: Micros(5),
            kind: kind.clone(),
        },
    );
    sim.run_until("it comes back", |s| {
        !s.procs[follower].notifications(33).is_empty()
    });
    let note = sim.procs[follower].notifications(33)[0].clone();
    let entry: Entry = sempa_proto::frame::from_bytes(&note.body).expect("an event");
    assert_eq!(
        (entry.kind, entry.at, entry.host),
        (kind, Micros(5), host(2))
    );
    assert_eq!(
        (note.ctx, note.enc, note.src),
        (3, DSIG_X86_64, HostId::MASTER.daemon_tid())
    );
    let Reply::Events(all) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 1000,
        },
    ) else {
        panic!("no events")
    };
    assert!(
        all.iter()
            .enumerate()
            .all(|(n, e)| e.number == n as u64 + 1)
    );
    let Reply::Events(some) = sim.ask(
        console,
        Request::Events {
            first_number: 3,
            limit: 1,
        },
    ) else {
        panic!("no events")
    };
    assert_eq!(some.iter().map(|e| e.number).collect::<Vec<_>>(), [3]);
}
