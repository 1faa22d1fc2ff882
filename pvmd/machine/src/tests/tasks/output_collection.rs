//! Output of spawned tasks: the messages to its collector, and the log of the master.

use super::{integers, spawn_request, spawned_tids};
use crate::HostId;
use crate::tests::sim::Sim;
use sempa_proto::Tid;
use sempa_proto::task::{Request, Sink, SpawnRequest};

/// Output goes to the collector with markers for the start and end of tasks. Output without a
/// collector goes to the log of the master.
#[test]
fn output_goes_to_collector_or_master_log() {
    let (mut sim, console) = Sim::cluster(9, 2);
    let output_sink = Sink {
        tid: sim.procs[console].tid(),
        ctx: 4,
        tag: 44,
    };
    let child_tid = spawned_tids(sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            output_sink,
            ..spawn_request("child", 1)
        }),
    ))[0]
        .expect("started");
    sim.run_until("it is there", |s| {
        s.procs[s.proc_of(child_tid)].welcome.is_some()
    });
    let host_id = child_tid.birth_host().expect("a task");
    let task_output = |tid: Tid, text: &str| {
        crate::Event::Tasker(sempa_proto::tasker::FromTasker::Output {
            tid,
            bytes: text.into(),
        })
    };
    sim.handle(host_id, task_output(child_tid, "hello"));
    let proc = sim.proc_of(child_tid);
    sim.exit_proc(proc, 3 << 8);
    sim.run_until("four messages", |s| {
        s.procs[console].notifications(44).len() == 4
    });
    let notifications = sim.procs[console].notifications(44);
    let markers: Vec<i32> = notifications.iter().map(|n| integers(&n.body)[1]).collect();
    let host_markers: Vec<i32> = markers
        .iter()
        .copied()
        .filter(|marker| *marker != -1)
        .collect();
    assert_eq!((markers.len(), host_markers), (4, vec![-2, 5, 0]));
    let end_mark = notifications
        .iter()
        .map(|n| integers(&n.body))
        .find(|values| values[1] == 0);
    assert_eq!(
        end_mark,
        Some(vec![child_tid.raw(), 0, 3 << 8]),
        "the end has the wait status"
    );
    assert!(
        notifications
            .iter()
            .all(|n| n.ctx == 4 && (n.src == Tid::MY_DAEMON || n.src == host_id.daemon_tid()))
    );
    let child_without_sink =
        spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
            .expect("started");
    sim.handle(
        child_without_sink.birth_host().expect("a task"),
        task_output(child_without_sink, "to the log\n"),
    );
    sim.run_until("logged", |s| {
        s.nodes[&HostId::MASTER].task_output == b"to the log\n"
    });
}

/// A collector is notified of all tasks of a spawn together, so it never considers the first task
/// the last one.
#[test]
fn collector_learns_all_tasks_of_spawn_first() {
    let (mut sim, console) = Sim::cluster(12, 3);
    let output_sink = Sink {
        tid: sim.procs[console].tid(),
        ctx: 4,
        tag: 44,
    };
    let spawn_results = spawned_tids(sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            output_sink,
            ..spawn_request("child", 3)
        }),
    ));
    assert_eq!(spawn_results.iter().flatten().count(), 3);
    for child_tid in spawn_results.into_iter().flatten() {
        sim.run_until("it is there", |s| {
            s.procs[s.proc_of(child_tid)].welcome.is_some()
        });
        let proc = sim.proc_of(child_tid);
        sim.exit_proc(proc, 0);
    }
    sim.run_until("all ends", |s| {
        s.procs[console]
            .notifications(44)
            .iter()
            .filter(|n| integers(&n.body)[1] == 0)
            .count()
            == 3
    });
    let markers: Vec<i32> = sim.procs[console]
        .notifications(44)
        .iter()
        .map(|n| integers(&n.body)[1])
        .collect();
    let start_positions: Vec<usize> = (0..markers.len()).filter(|n| markers[*n] == -1).collect();
    assert!(
        start_positions.len() == 3 && start_positions[2] == start_positions[0] + 2,
        "they come in one go: {markers:?}"
    );
}
