//! Hosts join, leave and are lost; the virtual machine halts.

use super::sim::{Sim, host, seeds};
use crate::{Event, HostId};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::task::{
    Claim, NotifyRequest, NotifySubjects, OnDaemonExit, Reply, Request, SpawnRequest,
};
use sempa_proto::{Epoch, Micros, PvmError, Tid};

pub(super) fn add_results(reply: Reply) -> Vec<Result<String, PvmError>> {
    match reply {
        Reply::HostsAdded(added) => added
            .into_iter()
            .map(|a| a.result.map(|e| e.name))
            .collect(),
        other => panic!("{other:?}"),
    }
}

fn add_request(names: &[&str]) -> Request {
    Request::AddHosts {
        lines: names.iter().map(|n| n.to_string()).collect(),
    }
}

/// Asserts that all live daemons have this host table.
fn assert_tables_agree(sim: &Sim, names: &[&str]) {
    let table = sim.nodes[&HostId::MASTER].machine.table().clone();
    let known: Vec<&str> = table.hosts.iter().map(|h| h.name.as_str()).collect();
    assert_eq!(known, names, "seed {}", sim.seed);
    for (id, node) in sim.nodes.iter().filter(|(_, n)| n.is_alive) {
        assert_eq!(
            node.machine.table(),
            &table,
            "{id} knows another table (seed {})",
            sim.seed
        );
    }
}

/// Hosts that several tasks add at the same time all join.
#[test]
fn concurrently_added_hosts_all_join() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let other = sim.enrol(host(2));
        let first = sim.request(console, add_request(&["h3", "bad4", "h5"]));
        let second = sim.request(other, add_request(&["h6", "h3", "h2", "-x"]));
        sim.run_until("both replies", |s| {
            s.procs[console].replies.contains_key(&first)
                && s.procs[other].replies.contains_key(&second)
        });
        let first = add_results(sim.procs[console].replies[&first].clone());
        let second = add_results(sim.procs[other].replies[&second].clone());
        assert_eq!(first[1], Err(PvmError::CantStart));
        assert_eq!(first[2], Ok("h5".into()));
        assert_eq!(
            (&second[0], &second[2], &second[3]),
            (
                &Ok("h6".into()),
                &Err(PvmError::DupHost),
                &Err(PvmError::BadParam)
            )
        );
        let h3 = [&first[0], &second[1]];
        assert!(
            h3.contains(&&Ok("h3".into())) && h3.contains(&&Err(PvmError::DupHost)),
            "{h3:?} (seed {seed})"
        );
        let mut names: Vec<String> = sim.nodes[&HostId::MASTER]
            .machine
            .table()
            .hosts
            .iter()
            .map(|h| h.name.clone())
            .collect();
        assert_tables_agree(&sim, &names.iter().map(String::as_str).collect::<Vec<_>>());
        names.sort();
        assert_eq!(names, ["h1", "h2", "h3", "h5", "h6"]);
    }
}

/// A host that is lost while it joins is left out, and the others join.
#[test]
fn host_lost_while_joining_is_left_out() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let id = sim.request(console, add_request(&["h3", "h4"]));
        sim.run_until("its daemon runs", |s| s.nodes.contains_key(&host(3)));
        let wait = Micros(sim.rng.below(400_000));
        sim.advance(wait);
        sim.kill_host(host(3));
        sim.run_until("reply", |s| s.procs[console].replies.contains_key(&id));
        let added = add_results(sim.procs[console].replies[&id].clone());
        assert_eq!(added[1], Ok("h4".into()), "seed {seed}");
        sim.advance(Micros::from_secs(2));
        assert_tables_agree(&sim, &["h1", "h2", "h4"]);
    }
}

/// The start of a daemon that never connects is abandoned.
#[test]
fn unconnected_daemon_start_is_abandoned() {
    let (mut sim, console) = Sim::cluster(3, 1);
    let reply = sim.ask(console, add_request(&["mute2"]));
    assert_eq!(add_results(reply), [Err(PvmError::CantStart)]);
    assert_eq!(sim.abandoned_starts.len(), 1);
    let reply = sim.ask(console, add_request(&["h3"]));
    assert_eq!(add_results(reply), [Ok("h3".into())]);
}

/// A deleted host has ended its tasks and shut down before the reply.
#[test]
fn deleted_host_leaves_before_reply() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let spawned = sim.ask(
            console,
            Request::Spawn(SpawnRequest {
                file: "stubborn".into(),
                count: 3,
                ..SpawnRequest::default()
            }),
        );
        assert!(matches!(spawned, Reply::Spawned(_)));
        let names = ["h3", "h9", "h1", "h3"].map(String::from).to_vec();
        let reply = sim.ask(console, Request::DelHosts { names });
        let expected = vec![
            Ok(()),
            Err(PvmError::NoHost),
            Err(PvmError::BadParam),
            Err(PvmError::DupHost),
        ];
        assert_eq!(reply, Reply::HostsDeleted(expected));
        assert!(!sim.procs.iter().any(|p| p.host == host(3) && !p.exited));
        sim.run_until("the daemon of h3 has ended", |s| {
            !s.nodes[&host(3)].is_alive
        });
        assert_tables_agree(&sim, &["h1", "h2"]);
    }
}

/// The notification of a lost host is sent before those of its tasks.
#[test]
fn host_notification_precedes_task_notifications() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let on3 = sim.enrol(host(3));
        let watcher = sim.enrol(host(2));
        let dead = sim.procs[on3].tid();
        let note = |what, tag| {
            Request::Notify(NotifyRequest {
                subjects: what,
                ctx: 5,
                tag,
                cancel: false,
            })
        };
        sim.ask(watcher, note(NotifySubjects::TaskExit(vec![dead, dead]), 1));
        sim.ask(
            watcher,
            note(NotifySubjects::HostDelete(vec![host(3).tid()]), 1),
        );
        sim.ask(watcher, note(NotifySubjects::HostAdd { count: 1 }, 2));
        sim.kill_host(host(3));
        sim.run_until("three notes", |s| {
            s.procs[watcher].notifications(1).len() == 3
        });
        let bodies: Vec<Vec<u8>> = sim.procs[watcher]
            .notifications(1)
            .iter()
            .map(|n| n.body.to_vec())
            .collect();
        assert_eq!(bodies[0], host(3).tid().raw().to_be_bytes());
        assert_eq!(
            (&bodies[1], &bodies[2]),
            (
                &dead.raw().to_be_bytes().to_vec(),
                &dead.raw().to_be_bytes().to_vec()
            )
        );
        assert!(
            sim.procs[watcher]
                .notifications(1)
                .iter()
                .all(|n| n.src == Tid::MY_DAEMON && n.ctx == 5)
        );
        sim.ask(console, add_request(&["h4"]));
        sim.ask(console, add_request(&["h5"]));
        sim.advance(Micros::from_millis(100));
        let added = sim.procs[watcher].notifications(2);
        assert_eq!(added.len(), 1, "one was asked for (seed {seed})");
        assert_eq!(added[0].body[..4], 1i32.to_be_bytes());
    }
}

/// A halt ends every task and daemon and does not wait for dead hosts.
#[test]
fn halt_ends_all_without_waiting_for_dead_hosts() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        for file in ["stubborn", "child", "sleep"] {
            sim.ask(
                console,
                Request::Spawn(SpawnRequest {
                    file: file.into(),
                    count: 8,
                    ..SpawnRequest::default()
                }),
            );
        }
        if seed % 2 == 0 {
            sim.kill_host(host(4));
        }
        let from = sim.enrol(host(2));
        // `mute9` does not answer, so this request is still open when the machine halts.
        sim.request(console, add_request(&["mute9"]));
        sim.advance(Micros::from_millis(5));
        let started = sim.now;
        assert_eq!(sim.ask(from, Request::Halt), Reply::Done);
        sim.run_until("the end", |s| {
            s.nodes.iter().all(|(id, n)| !n.is_alive || *id == host(5))
        });
        assert!(sim.now.since(started) < Micros::from_secs(8), "seed {seed}");
        assert!(
            sim.procs
                .iter()
                .all(|p| p.spawned_tid.is_none() || p.exited),
            "seed {seed}"
        );
    }
}

/// Returns the signals that command-line programs have got, in order of `programs`.
fn signals_of(sim: &Sim, programs: &[usize]) -> Vec<Vec<i32>> {
    let of = |proc: &usize| {
        sim.signalled
            .iter()
            .filter(|(p, _)| p == proc)
            .map(|(_, signal)| *signal)
            .collect()
    };
    programs.iter().map(of).collect()
}

/// Command-line programs get one SIGTERM when their daemon ends, unless they chose a message
/// instead.
#[test]
fn command_line_programs_get_one_sigterm() {
    for seed in seeds(5) {
        let ends: [fn(&mut Sim, usize); 3] = [
            |sim, console| assert_eq!(sim.ask(console, Request::Halt), Reply::Done),
            |sim, _| {
                sim.schedule_event(
                    sim.now,
                    Event::Stop {
                        why: "signal 15".into(),
                    },
                    HostId::MASTER,
                )
            },
            |sim, _| sim.kill_host(HostId::MASTER),
        ];
        for (way, end) in ends.into_iter().enumerate() {
            let (mut sim, _) = Sim::cluster(seed, 3);
            let console = sim.enrol_with(HostId::MASTER, OnDaemonExit::FailCalls);
            let programs = [
                sim.enrol(HostId::MASTER),
                sim.enrol(host(2)),
                sim.enrol(host(2)),
            ];
            let told = sim.enrol_with(host(2), OnDaemonExit::FailCalls);
            sim.ask(programs[2], Request::Exit { watermarks: vec![] });
            end(&mut sim, console);
            sim.run_until("the end", |s| s.nodes.values().all(|n| !n.is_alive));
            let at_master = if way == 2 { vec![] } else { vec![15] };
            let case = format!("seed {seed}, way {way}");
            assert_eq!(
                signals_of(&sim, &programs),
                [at_master, vec![15], vec![]],
                "{case}"
            );
            assert_eq!(
                signals_of(&sim, &[console, told]),
                [vec![], vec![]] as [Vec<i32>; 2],
                "{case}"
            );
        }
    }
}

/// The program that requests a halt gets SIGTERM, too.
#[test]
fn halt_signals_its_requester() {
    let mut sim = Sim::new(1);
    let program = sim.enrol(HostId::MASTER);
    sim.request(program, Request::Halt);
    sim.run_until("the end", |s| s.nodes.values().all(|n| !n.is_alive));
    assert_eq!(signals_of(&sim, &[program]), [[15]]);
}

/// Command-line programs on a deleted host get SIGTERM, and others do not.
#[test]
fn only_programs_on_deleted_host_get_sigterm() {
    let (mut sim, console) = Sim::cluster(1, 3);
    let programs = [sim.enrol(host(2)), sim.enrol(host(3))];
    sim.ask(
        console,
        Request::DelHosts {
            names: vec!["h2".into()],
        },
    );
    sim.run_until("it is gone", |s| !s.nodes[&host(2)].is_alive);
    assert_eq!(
        signals_of(&sim, &programs),
        [vec![15], vec![]] as [Vec<i32>; 2]
    );
}

/// A slave that has lost its master ends its tasks and itself.
#[test]
fn slave_ends_with_its_master() {
    let (mut sim, console) = Sim::cluster(1, 3);
    sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            file: "stubborn".into(),
            count: 6,
            ..SpawnRequest::default()
        }),
    );
    sim.kill_host(HostId::MASTER);
    sim.run_until("the end", |s| s.nodes.values().all(|n| !n.is_alive));
    assert!(
        sim.procs
            .iter()
            .all(|p| p.spawned_tid.is_none() || p.exited)
    );
}

/// A slave that is ordered to stop is removed from the host tables of all other daemons.
#[test]
fn stopped_slave_leaves_the_table() {
    let (mut sim, _) = Sim::cluster(1, 3);
    sim.schedule_event(
        sim.now,
        Event::Stop {
            why: "signal 15".into(),
        },
        host(2),
    );
    sim.run_until("it is gone", |s| {
        !s.nodes[&host(2)].is_alive && s.nodes[&host(3)].machine.table().hosts.len() == 2
    });
    assert_tables_agree(&sim, &["h1", "h3"]);
}

/// Table changes of an older epoch or of another slave are refused.
#[test]
fn stale_or_foreign_table_changes_are_refused() {
    let (mut sim, _) = Sim::cluster(1, 3);
    let table = sim.nodes[&host(2)].machine.table().clone();
    let mut stale = table.clone();
    stale.hosts.truncate(1);
    let order = |epoch: u64| HostMsg::PrepareTable {
        table: sempa_proto::table::HostTable {
            epoch: Epoch(epoch),
            ..stale.clone()
        },
        locations: vec![],
        rm: None,
        reserved_ids_max: 0,
    };
    let prepare = |sim: &mut Sim, from: HostId, epoch: u64| {
        sim.handle(
            host(2),
            Event::HostControl {
                host: from,
                message: order(epoch),
            },
        );
        let message = HostMsg::CommitTable {
            epoch: Epoch(epoch),
        };
        sim.handle(
            host(2),
            Event::HostControl {
                host: from,
                message,
            },
        );
    };
    prepare(&mut sim, HostId::MASTER, table.epoch.0);
    prepare(&mut sim, HostId::MASTER, 1);
    prepare(&mut sim, host(3), 100);
    assert_eq!(sim.nodes[&host(2)].machine.table(), &table);
    let log = sim.nodes[&host(2)].log.join("\n");
    assert!(
        log.contains("older") && log.contains("only the master"),
        "{log}"
    );
}

/// The hosts of the host file are added at the start, and its options apply to hosts added later.
#[test]
fn host_file_applies_to_later_hosts() {
    let mut sim = Sim::with(4, |c| {
        c.hostfile = ["* sp=7", "h1 sp=3", "h2", "&h3 sp=9", "bad4"]
            .map(String::from)
            .to_vec()
    });
    let console = sim.enrol(HostId::MASTER);
    sim.run_until("h2 is in", |s| {
        s.nodes[&HostId::MASTER].machine.table().hosts.len() == 2
    });
    sim.ask(console, add_request(&["h3"]));
    sim.ask(console, add_request(&["h5"]));
    let Reply::Hosts(table) = sim.ask(console, Request::Config) else {
        panic!("no table")
    };
    let speeds: Vec<(&str, i32)> = table
        .hosts
        .iter()
        .map(|h| (h.name.as_str(), h.speed))
        .collect();
    assert_eq!(speeds, [("h1", 3), ("h2", 7), ("h3", 9), ("h5", 7)]);
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 100,
        },
    ) else {
        panic!("no events")
    };
    assert!(
        events
            .iter()
            .any(|e| matches!(&e.kind, EventKind::HostRefused { name, .. } if name == "bad4"))
    );
    assert!(events.windows(2).all(|w| w[1].number == w[0].number + 1));
}

/// A slave that is still joining refuses tasks with a reason.
#[test]
fn joining_slave_refuses_tasks() {
    let mut sim = Sim::new(5);
    let console = sim.enrol(HostId::MASTER);
    sim.request(console, add_request(&["mute2"]));
    sim.run_until("its daemon runs", |s| s.nodes.contains_key(&host(2)));
    let early = sim.claim(host(2), Claim::New);
    sim.run_until("refused", |s| s.procs[early].refused.is_some());
    assert!(
        sim.procs[early]
            .refused
            .as_ref()
            .is_some_and(|r| r.contains("joining"))
    );
}

/// A process that only probes a daemon becomes no task; a daemon that is ending does not answer the
/// probe.
#[test]
fn liveness_probe_creates_no_task() {
    let (mut sim, console) = Sim::cluster(6, 2);
    let first = sim.claim(HostId::MASTER, Claim::Probe);
    sim.run_until("it is at work", |s| s.procs[first].refused.is_some());
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: Tid::NONE,
        },
    ) else {
        panic!("no list")
    };
    assert_eq!(tasks.len(), 1);
    sim.request(console, Request::Halt);
    sim.run_until("it ends", |s| {
        s.nodes[&HostId::MASTER].machine.shutdown.is_some()
    });
    let second = sim.claim(HostId::MASTER, Claim::Probe);
    sim.run_until("it has hung up", |s| s.procs[second].conn.is_none());
    assert_eq!(sim.procs[second].refused, None);
}
