//! Every host keeps a summary of the virtual machine, and reports the loss of the master.

use super::scenario::{list_events, spawn, spawn_on};
use super::sim::fault_injection::{Fault, LONG_OUTAGE, Victim};
use super::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::task::{Reply, Request};
use sempa_proto::vm_summary::VmSummary;
use sempa_proto::{HostId, Micros};

/// Longer than the shortest time between two summaries.
const SUMMARY_TIME: Micros = Micros::from_secs(3);

fn kept_summary(sim: &Sim, host: HostId) -> &VmSummary {
    let summary = sim.nodes[&host].note.summary.as_ref();
    summary.unwrap_or_else(|| panic!("{host} has no summary (seed {})", sim.seed))
}

/// All hosts keep the same summary, with the tasks that run.
#[test]
fn all_hosts_keep_the_newest_summary() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        spawn(&mut sim, console, spawn_on("h2", "child", 2));
        sim.advance(SUMMARY_TIME);
        let summary = kept_summary(&sim, HostId::MASTER).clone();
        let tasks: Vec<(&str, &str)> = summary
            .tasks
            .iter()
            .map(|task| (&*task.program, &*task.host))
            .collect();
        assert_eq!(tasks, [("child", "h2"); 2], "seed {seed}");
        assert_eq!(
            (summary.master_name(), summary.host_count, &*summary.store),
            ("h1", 3, "/store")
        );
        for index in [2, 3] {
            assert_eq!(kept_summary(&sim, host(index)), &summary, "seed {seed}");
        }
    }
}

/// However often tasks start and end, a host writes no more than one summary in two seconds.
#[test]
fn summaries_have_a_bounded_rate() {
    let (mut sim, console) = Sim::cluster(1, 2);
    let mut made_times = std::collections::BTreeSet::new();
    let started_at = sim.now;
    for _ in 0..40 {
        spawn(&mut sim, console, spawn_on("h2", "child", 1));
        sim.advance(Micros::from_millis(250));
        made_times.insert(kept_summary(&sim, host(2)).made_at);
    }
    let seconds = sim.now.since(started_at).0 / 1_000_000;
    let count = made_times.len() as u64;
    assert!(
        (2..=seconds / 2 + 2).contains(&count),
        "{count} summaries in {seconds} s"
    );
}

/// A host that loses the master reports the loss; the summary names what ran.
#[test]
fn lost_master_is_reported_by_the_other_hosts() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        spawn(&mut sim, console, spawn_on("h2", "child", 1));
        sim.advance(SUMMARY_TIME);
        sim.kill_host(HostId::MASTER);
        sim.run_until("the slaves have ended", |s| {
            [2, 3].iter().all(|index| !s.nodes[&host(*index)].is_alive)
        });
        for index in [2, 3] {
            assert!(
                sim.nodes[&host(index)].note.master_loss.is_some(),
                "seed {seed}"
            );
            assert_eq!(kept_summary(&sim, host(index)).task_count, 1);
        }
    }
}

/// Neither a halt nor the removal of a host is a loss of the master.
#[test]
fn orderly_end_is_no_loss_of_the_master() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let host_names = vec!["h3".to_string()];
        let reply = sim.ask(console, Request::DelHosts { host_names });
        assert!(matches!(reply, Reply::HostsDeleted(_)), "{reply:?}");
        sim.request(console, Request::Halt);
        sim.run_until("all daemons have ended", |s| {
            s.nodes.values().all(|node| !node.is_alive)
        });
        for (id, node) in &sim.nodes {
            assert_eq!(node.note.master_loss, None, "{id} (seed {seed})");
        }
    }
}

/// The event of a lost host names the tasks that were lost with it.
#[test]
fn event_of_lost_host_names_its_tasks() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let lost_proc = spawn(&mut sim, console, spawn_on("h3", "child", 1))[0];
        spawn(&mut sim, console, spawn_on("h2", "child", 1));
        let lost_tid = sim.procs[lost_proc].spawned_tid.expect("it was spawned");
        sim.kill_host(host(3));
        sim.run_until("the host is gone", |s| {
            let table = s.nodes[&HostId::MASTER].machine.host_table();
            table.get(host(3)).is_none()
        });
        let events = list_events(&mut sim, console);
        let loss = events.iter().find_map(|event| match event {
            EventKind::HostGone { lost_tasks, .. } => Some((lost_tasks.clone(), event.to_string())),
            _ => None,
        });
        let (lost_tasks, text) = loss.expect("an event");
        assert_eq!(lost_tasks.named, [(lost_tid, "child".to_string())]);
        assert!(
            text.ends_with(&format!("; lost with it: {lost_tid} child")),
            "{text}"
        );
    }
}

/// A halt names the hosts that do not confirm the end of their tasks: one that hangs, and one that
/// is lost meanwhile.
#[test]
fn halt_names_hosts_that_do_not_answer() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        spawn(&mut sim, console, spawn_on("h2", "child", 1));
        let reply = match seed % 3 {
            0 => sim.ask(console, Request::HaltAndReport),
            1 => {
                sim.inject_fault(Victim::Source, Fault::Stop(LONG_OUTAGE));
                sim.ask(console, Request::HaltAndReport)
            }
            _ => {
                let request = sim.request(console, Request::HaltAndReport);
                sim.kill_host(host(2));
                sim.run_until("the reply", |s| {
                    s.procs[console].replies.contains_key(&request)
                });
                sim.procs[console].replies[&request].clone()
            }
        };
        let missing_hosts = match seed % 3 {
            0 => vec![],
            _ => vec!["h2".to_string()],
        };
        assert_eq!(reply, Reply::Halted { missing_hosts }, "seed {seed}");
        sim.run_until("the master's end", |s| !s.nodes[&HostId::MASTER].is_alive);
    }
}
