//! Tasks enrol, exchange messages, spawn, watch each other, use the mailbox and obey resource
//! managers.

mod placement_leases;
mod resource_manager;

use super::sim::{Received, Sim, host, seeds};
use crate::HostId;
use crate::tasks::Inbox;
use bytes::Bytes;
use sempa_proto::event::{Event as Entry, EventKind};
use sempa_proto::host::PendingItem;
use sempa_proto::message::{DSIG_X86_64, ENC_XDR};
use sempa_proto::table::TASK_FORKED;
use sempa_proto::task::{
    Claim, MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, SPAWN_ARCH,
    SPAWN_COMPLEMENT, SPAWN_HOST, SPAWN_NO_PARENT, Sink, SpawnRequest, ToDaemon,
};
use sempa_proto::{Message, Micros, PvmError, Tid};

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

fn is_message_of(seen: &Received, tid: Tid) -> bool {
    matches!(seen, Received::Message(src, _) if *src == tid)
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
