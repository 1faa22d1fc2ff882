//! Leases: a host whose daemon hangs or does not reach the master ends its tasks by itself,
//! before anything takes their place.

use super::scenario::{list_events, spawn, spawn_on};
use super::sim::fault_injection::{Fault, LONG_OUTAGE, Victim};
use super::sim::{LEASE, Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::task::Request;
use sempa_proto::{HostId, Micros};

/// Returns a virtual machine of three hosts with a task on `task_host`: the simulation, the console
/// on h1 and the task's process.
fn start_task(seed: u64, task_host: &str) -> (Sim, usize, usize) {
    let (mut sim, console) = Sim::cluster(seed, 3);
    let task_proc = spawn(&mut sim, console, spawn_on(task_host, "child", 1))[0];
    // The heartbeats of different runs have different phases.
    let delay = Micros(sim.rng.below(LEASE.0));
    sim.advance(delay);
    (sim, console, task_proc)
}

/// Runs until the process has ended. Asserts that it was frozen first, and that the master still
/// counts the process's host as a member when it ends.
fn assert_freezes_then_ends(sim: &mut Sim, task_proc: usize, task_host: HostId) {
    let started_at = sim.now;
    sim.run_until("the task is frozen", |s| s.procs[task_proc].is_frozen());
    assert!(!sim.procs[task_proc].exited, "seed {}", sim.seed);
    sim.run_until("the task has ended", |s| s.procs[task_proc].exited);
    let table = sim.nodes[&HostId::MASTER].machine.host_table();
    assert!(table.get(task_host).is_some(), "seed {}", sim.seed);
    assert!(sim.now.since(started_at) < LEASE, "seed {}", sim.seed);
}

/// If a daemon hangs, its tasker freezes and then ends the tasks before the master declares
/// the host lost.
#[test]
fn tasks_of_stopped_daemon_end_before_host_is_lost() {
    for seed in seeds(50) {
        let (mut sim, _, task_proc) = start_task(seed, "h2");
        sim.inject_fault(Victim::Source, Fault::Stop(LONG_OUTAGE));
        assert_freezes_then_ends(&mut sim, task_proc, host(2));
        sim.run_until("the host is lost", |s| {
            let table = s.nodes[&HostId::MASTER].machine.host_table();
            table.get(host(2)).is_none()
        });
    }
}

/// A daemon whose messages do not reach the master renews no lease, although it runs.
#[test]
fn tasks_of_isolated_host_end_before_host_is_lost() {
    for seed in seeds(50) {
        let (mut sim, _, task_proc) = start_task(seed, "h2");
        sim.inject_fault(Victim::Source, Fault::Isolate(LONG_OUTAGE));
        sim.run_until("the task has ended", |s| s.procs[task_proc].exited);
        let table = sim.nodes[&HostId::MASTER].machine.host_table();
        assert!(table.get(host(2)).is_some(), "seed {seed}");
    }
}

/// The tasks of the master's host end as those of all other hosts do if the master hangs.
#[test]
fn tasks_of_stopped_master_end() {
    for seed in seeds(50) {
        let (mut sim, _, task_proc) = start_task(seed, "h1");
        sim.inject_fault(Victim::Master, Fault::Stop(LONG_OUTAGE));
        assert_freezes_then_ends(&mut sim, task_proc, HostId::MASTER);
    }
}

/// The lease of the master's tasks is binding as soon as another host has joined.
#[test]
fn lease_of_the_master_is_binding_after_the_first_join() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let task_proc = spawn(&mut sim, console, spawn_on("h1", "child", 1))[0];
        let delay = Micros(sim.rng.below(LEASE.0));
        sim.advance(delay);
        sim.ask(
            console,
            Request::AddHosts {
                host_file_lines: vec!["h2".into()],
            },
        );
        sim.inject_fault(Victim::Master, Fault::Stop(LONG_OUTAGE));
        assert_freezes_then_ends(&mut sim, task_proc, HostId::MASTER);
    }
}

/// The tasks of a virtual machine with a single host are only frozen while their daemon hangs or
/// their machine sleeps.
#[test]
fn tasks_of_single_host_outlive_the_lease() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let task_proc = spawn(&mut sim, console, spawn_on("h1", "child", 1))[0];
        sim.inject_fault(Victim::Master, Fault::Stop(LONG_OUTAGE));
        sim.run_until("the task is frozen", |s| s.procs[task_proc].is_frozen());
        sim.run_until("the task continues", |s| !s.procs[task_proc].is_frozen());
        assert!(!sim.procs[task_proc].exited, "seed {seed}");
    }
}

/// A daemon that continues before its lease has run out keeps its tasks. They continue, and an
/// event tells why they were frozen.
#[test]
fn tasks_continue_if_daemon_continues_in_time() {
    for seed in seeds(50) {
        let (mut sim, console, task_proc) = start_task(seed, "h2");
        // The tasks are frozen after at most 0.6 and ended after at least 0.7 of the lease.
        let duration = Micros(LEASE.0 * 65 / 100);
        sim.inject_fault(Victim::Source, Fault::Stop(duration));
        sim.run_until("the task is frozen", |s| s.procs[task_proc].is_frozen());
        sim.run_until("the task continues", |s| !s.procs[task_proc].is_frozen());
        sim.advance(LONG_OUTAGE);
        assert!(!sim.procs[task_proc].exited, "seed {seed}");
        let has_note = list_events(&mut sim, console).iter().any(
            |event| matches!(event, EventKind::Note { text } if text.contains("were frozen for")),
        );
        assert!(has_note, "seed {seed}");
    }
}

/// A daemon whose lease runs out kills a tasker that hangs.
#[test]
fn stopped_tasker_is_killed_at_the_end_of_the_lease() {
    for seed in seeds(50) {
        let (mut sim, _, task_proc) = start_task(seed, "h2");
        sim.inject_fault(Victim::SourceTasker, Fault::Stop(LONG_OUTAGE));
        // The messages are delayed so much that the lease runs out, but no host is lost.
        sim.inject_fault(Victim::Source, Fault::Isolate(Micros(LEASE.0 - 1000)));
        let started_at = sim.now;
        sim.run_until("the task has ended", |s| s.procs[task_proc].exited);
        assert!(sim.now.since(started_at) < LEASE, "seed {seed}");
    }
}
