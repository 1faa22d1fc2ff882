//! Hosts join, leave and are lost. The virtual machine halts.

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
        Reply::HostsAdded(results) => results
            .into_iter()
            .map(|a| a.result.map(|e| e.name))
            .collect(),
        other => panic!("{other:?}"),
    }
}

fn add_request(names: &[&str]) -> Request {
    Request::AddHosts {
        host_file_lines: names.iter().map(|n| n.to_string()).collect(),
    }
}

/// Asserts that the host tables of all live daemons are equal and contain exactly the hosts
/// `names`.
fn assert_tables_agree(sim: &Sim, names: &[&str]) {
    let table = sim.nodes[&HostId::MASTER].machine.host_table().clone();
    let table_names: Vec<&str> = table.hosts.iter().map(|h| h.name.as_str()).collect();
    assert_eq!(table_names, names, "seed {}", sim.seed);
    for (id, node) in sim.nodes.iter().filter(|(_, n)| n.is_alive) {
        assert_eq!(
            node.machine.host_table(),
            &table,
            "{id} knows another table (seed {})",
            sim.seed
        );
    }
}

/// Hosts that two tasks add at the same time all join. A host that both tasks name is added once.
/// Hosts that cannot be added get an error code each.
#[test]
fn concurrently_added_hosts_all_join() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let other_proc = sim.enrol(host(2));
        let first_reply = sim.request(console, add_request(&["h3", "bad4", "h5"]));
        let second_reply = sim.request(other_proc, add_request(&["h6", "h3", "h2", "-x"]));
        sim.run_until("both replies", |s| {
            s.procs[console].replies.contains_key(&first_reply)
                && s.procs[other_proc].replies.contains_key(&second_reply)
        });
        let first_reply = add_results(sim.procs[console].replies[&first_reply].clone());
        let second_reply = add_results(sim.procs[other_proc].replies[&second_reply].clone());
        assert_eq!(first_reply[1], Err(PvmError::CantStart));
        assert_eq!(first_reply[2], Ok("h5".into()));
        assert_eq!(
            (&second_reply[0], &second_reply[2], &second_reply[3]),
            (
                &Ok("h6".into()),
                &Err(PvmError::DupHost),
                &Err(PvmError::BadParam)
            )
        );
        let h3_results = [&first_reply[0], &second_reply[1]];
        assert!(
            h3_results.contains(&&Ok("h3".into())) && h3_results.contains(&&Err(PvmError::DupHost)),
            "{h3_results:?} (seed {seed})"
        );
        let mut names: Vec<String> = sim.nodes[&HostId::MASTER]
            .machine
            .host_table()
            .hosts
            .iter()
            .map(|h| h.name.clone())
            .collect();
        assert_tables_agree(&sim, &names.iter().map(String::as_str).collect::<Vec<_>>());
        names.sort();
        assert_eq!(names, ["h1", "h2", "h3", "h5", "h6"]);
    }
}

/// A host that is lost while it joins is not added; the other new host joins.
#[test]
fn host_lost_while_joining_is_left_out() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let add_id = sim.request(console, add_request(&["h3", "h4"]));
        sim.run_until("its daemon runs", |s| s.nodes.contains_key(&host(3)));
        let delay = Micros(sim.rng.below(400_000));
        sim.advance(delay);
        sim.kill_host(host(3));
        sim.run_until("reply", |s| s.procs[console].replies.contains_key(&add_id));
        let results = add_results(sim.procs[console].replies[&add_id].clone());
        assert_eq!(results[1], Ok("h4".into()), "seed {seed}");
        sim.advance(Micros::from_secs(2));
        assert_tables_agree(&sim, &["h1", "h2", "h4"]);
    }
}

/// The start of a host is abandoned if the host's daemon never connects. Another host can be added
/// afterwards.
#[test]
fn unconnected_daemon_start_is_abandoned() {
    let (mut sim, console) = Sim::cluster(3, 1);
    let reply = sim.ask(console, add_request(&["mute2"]));
    assert_eq!(add_results(reply), [Err(PvmError::CantStart)]);
    assert_eq!(sim.abandoned_starts.len(), 1);
    let reply = sim.ask(console, add_request(&["h3"]));
    assert_eq!(add_results(reply), [Ok("h3".into())]);
}

/// A host that does not answer delays no other host of the request. The reply follows when the
/// start of the silent host has ended.
#[test]
fn silent_host_delays_no_other_host() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let add_id = sim.request(console, add_request(&["h2", "mute3", "h4"]));
        sim.advance(Micros::from_secs(2));
        assert!(!sim.procs[console].replies.contains_key(&add_id));
        let table = sim.nodes[&HostId::MASTER].machine.host_table();
        let names: Vec<&str> = table.hosts.iter().map(|h| h.name.as_str()).collect();
        assert_eq!(names, ["h1", "h2", "h4"], "seed {seed}");
        sim.run_until("reply", |s| s.procs[console].replies.contains_key(&add_id));
        assert_eq!(
            add_results(sim.procs[console].replies[&add_id].clone()),
            [Ok("h2".into()), Err(PvmError::CantStart), Ok("h4".into())]
        );
        sim.kill_host(host(3));
        assert_tables_agree(&sim, &["h1", "h2", "h4"]);
    }
}

/// When the reply to the deletion of a host arrives, all tasks of the host have ended. The daemon
/// of the host then ends, too. Hosts that cannot be deleted get an error code each.
#[test]
fn deleted_host_leaves_before_reply() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let spawn_reply = sim.ask(
            console,
            Request::Spawn(SpawnRequest {
                program: "stubborn".into(),
                task_count: 3,
                ..SpawnRequest::default()
            }),
        );
        assert!(matches!(spawn_reply, Reply::Spawned(_)));
        let host_names = ["h3", "h9", "h1", "h3"].map(String::from).to_vec();
        let reply = sim.ask(console, Request::DelHosts { host_names });
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

/// A task that has requested notifications is notified of the loss of a host before the ends of
/// the tasks on that host. Notifications of new hosts end after the requested number.
#[test]
fn host_notification_precedes_task_notifications() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let proc_on_h3 = sim.enrol(host(3));
        let watcher = sim.enrol(host(2));
        let lost_tid = sim.procs[proc_on_h3].tid();
        let notify_request = |subjects, tag| {
            Request::Notify(NotifyRequest {
                subjects,
                ctx: 5,
                tag,
                is_cancellation: false,
            })
        };
        sim.ask(
            watcher,
            notify_request(NotifySubjects::TaskExit(vec![lost_tid, lost_tid]), 1),
        );
        sim.ask(
            watcher,
            notify_request(NotifySubjects::HostDelete(vec![host(3).tid()]), 1),
        );
        sim.ask(
            watcher,
            notify_request(NotifySubjects::HostAdd { messages_max: 1 }, 2),
        );
        sim.kill_host(host(3));
        sim.run_until("three notes", |s| {
            s.procs[watcher].notifications(1).len() == 3
        });
        let notification_bodies: Vec<Vec<u8>> = sim.procs[watcher]
            .notifications(1)
            .iter()
            .map(|n| n.body.to_vec())
            .collect();
        assert_eq!(notification_bodies[0], host(3).tid().raw().to_be_bytes());
        assert_eq!(
            (&notification_bodies[1], &notification_bodies[2]),
            (
                &lost_tid.raw().to_be_bytes().to_vec(),
                &lost_tid.raw().to_be_bytes().to_vec()
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
        let added_notifications = sim.procs[watcher].notifications(2);
        assert_eq!(
            added_notifications.len(),
            1,
            "one was asked for (seed {seed})"
        );
        assert_eq!(added_notifications[0].body[..4], 1i32.to_be_bytes());
    }
}

/// A halt ends all tasks and daemons. It does not wait for dead hosts.
#[test]
fn halt_ends_all_without_waiting_for_dead_hosts() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        for file in ["stubborn", "child", "sleep"] {
            sim.ask(
                console,
                Request::Spawn(SpawnRequest {
                    program: file.into(),
                    task_count: 8,
                    ..SpawnRequest::default()
                }),
            );
        }
        if seed % 2 == 0 {
            sim.kill_host(host(4));
        }
        let halting_proc = sim.enrol(host(2));
        // `mute9` does not answer, so this request is still open when the virtual machine halts.
        sim.request(console, add_request(&["mute9"]));
        sim.advance(Micros::from_millis(5));
        let halt_time = sim.now;
        assert_eq!(sim.ask(halting_proc, Request::Halt), Reply::Done);
        sim.run_until("the end", |s| {
            s.nodes.iter().all(|(id, n)| !n.is_alive || *id == host(5))
        });
        assert!(
            sim.now.since(halt_time) < Micros::from_secs(8),
            "seed {seed}"
        );
        assert!(
            sim.procs
                .iter()
                .all(|p| p.spawned_tid.is_none() || p.exited),
            "seed {seed}"
        );
    }
}

/// Returns the signals that each of these command-line programs has received.
fn signals_of(sim: &Sim, programs: &[usize]) -> Vec<Vec<i32>> {
    let signals_of_proc = |proc: &usize| {
        sim.sent_signals
            .iter()
            .filter(|(p, _)| p == proc)
            .map(|(_, signal)| *signal)
            .collect()
    };
    programs.iter().map(signals_of_proc).collect()
}

/// When their daemon ends, command-line programs get one SIGTERM. Programs that chose
/// [`OnDaemonExit::FailCalls`], and programs that have left the virtual machine, get none.
#[test]
fn command_line_programs_get_one_sigterm() {
    for seed in seeds(5) {
        let end_methods: [fn(&mut Sim, usize); 3] = [
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
        for (method_index, end_daemon) in end_methods.into_iter().enumerate() {
            let (mut sim, _) = Sim::cluster(seed, 3);
            let console = sim.enrol_with(HostId::MASTER, OnDaemonExit::FailCalls);
            let programs = [
                sim.enrol(HostId::MASTER),
                sim.enrol(host(2)),
                sim.enrol(host(2)),
            ];
            let notified_program = sim.enrol_with(host(2), OnDaemonExit::FailCalls);
            sim.ask(programs[2], Request::Exit { watermarks: vec![] });
            end_daemon(&mut sim, console);
            sim.run_until("the end", |s| s.nodes.values().all(|n| !n.is_alive));
            let master_signals = if method_index == 2 { vec![] } else { vec![15] };
            let case = format!("seed {seed}, way {method_index}");
            assert_eq!(
                signals_of(&sim, &programs),
                [master_signals, vec![15], vec![]],
                "{case}"
            );
            assert_eq!(
                signals_of(&sim, &[console, notified_program]),
                [vec![], vec![]] as [Vec<i32>; 2],
                "{case}"
            );
        }
    }
}

/// The command-line program that requests a halt gets SIGTERM, too.
#[test]
fn halt_signals_its_requester() {
    let mut sim = Sim::new(1);
    let program = sim.enrol(HostId::MASTER);
    sim.request(program, Request::Halt);
    sim.run_until("the end", |s| s.nodes.values().all(|n| !n.is_alive));
    assert_eq!(signals_of(&sim, &[program]), [[15]]);
}

/// The command-line programs on a deleted host get SIGTERM; those on other hosts do not.
#[test]
fn only_programs_on_deleted_host_get_sigterm() {
    let (mut sim, console) = Sim::cluster(1, 3);
    let programs = [sim.enrol(host(2)), sim.enrol(host(3))];
    sim.ask(
        console,
        Request::DelHosts {
            host_names: vec!["h2".into()],
        },
    );
    sim.run_until("it is gone", |s| !s.nodes[&host(2)].is_alive);
    assert_eq!(
        signals_of(&sim, &programs),
        [vec![15], vec![]] as [Vec<i32>; 2]
    );
}

/// A slave that has lost its master ends its tasks and exits.
#[test]
fn slave_ends_with_its_master() {
    let (mut sim, console) = Sim::cluster(1, 3);
    sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            program: "stubborn".into(),
            task_count: 6,
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

/// When a slave is ordered to stop, all other daemons remove it from their host tables.
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
        !s.nodes[&host(2)].is_alive && s.nodes[&host(3)].machine.host_table().hosts.len() == 2
    });
    assert_tables_agree(&sim, &["h1", "h3"]);
}

/// A slave refuses changes of the host table that have no newer epoch or come from another slave.
#[test]
fn stale_or_foreign_table_changes_are_refused() {
    let (mut sim, _) = Sim::cluster(1, 3);
    let table = sim.nodes[&host(2)].machine.host_table().clone();
    let mut stale_table = table.clone();
    stale_table.hosts.truncate(1);
    let prepare_order = |epoch: u64| HostMsg::PrepareTable {
        table: sempa_proto::table::HostTable {
            epoch: Epoch(epoch),
            ..stale_table.clone()
        },
        locations: vec![],
        rm: None,
        reserved_local_max: 0,
    };
    let send_changes = |sim: &mut Sim, from: HostId, epoch: u64| {
        sim.handle(
            host(2),
            Event::HostControl {
                host: from,
                message: prepare_order(epoch),
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
    send_changes(&mut sim, HostId::MASTER, table.epoch.0);
    send_changes(&mut sim, HostId::MASTER, 1);
    send_changes(&mut sim, host(3), 100);
    assert_eq!(sim.nodes[&host(2)].machine.host_table(), &table);
    let log = sim.nodes[&host(2)].log.join("\n");
    assert!(
        log.contains("older") && log.contains("only the master"),
        "{log}"
    );
}

/// The hosts in the host file are added at the start. The options in the host file also apply to
/// hosts that are added later. A host that cannot be started is recorded in the event log.
#[test]
fn host_file_applies_to_later_hosts() {
    let mut sim = Sim::with_config(4, |c| {
        c.hostfile_lines = ["* sp=7", "h1 sp=3", "h2", "&h3 sp=9", "bad4"]
            .map(String::from)
            .to_vec()
    });
    let console = sim.enrol(HostId::MASTER);
    sim.run_until("h2 is in", |s| {
        s.nodes[&HostId::MASTER].machine.host_table().hosts.len() == 2
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
            events_max: 100,
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
    let early_proc = sim.start_with_claim(host(2), Claim::NotSpawned);
    sim.run_until("refused", |s| s.procs[early_proc].refusal_reason.is_some());
    assert!(
        sim.procs[early_proc]
            .refusal_reason
            .as_ref()
            .is_some_and(|r| r.contains("joining"))
    );
}

/// A process that only probes a daemon does not become a task. A daemon that is shutting down does
/// not answer the probe.
#[test]
fn liveness_probe_creates_no_task() {
    let (mut sim, console) = Sim::cluster(6, 2);
    let first_probe = sim.start_with_claim(HostId::MASTER, Claim::DaemonTest);
    sim.run_until("it is at work", |s| {
        s.procs[first_probe].refusal_reason.is_some()
    });
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
    let second_probe = sim.start_with_claim(HostId::MASTER, Claim::DaemonTest);
    sim.run_until("it has hung up", |s| s.procs[second_probe].conn.is_none());
    assert_eq!(sim.procs[second_probe].refusal_reason, None);
}
