//! Restarts of jobs that no host accepts.

use super::{JobScenario, host};
use crate::tests::scenario::list_events;
use crate::{Event, HostId};
use sempa_proto::checkpoint::CheckpointSchedule;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Refusal;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};

/// Creates a job that has lost a host and that no other host accepts. Returns the job and the
/// number of processes before the loss.
pub(super) fn unplaceable_job(seed: u64) -> (JobScenario, usize) {
    let mut scenario = JobScenario::new(seed, 4, 6);
    scenario
        .checkpoint(Some(Micros::from_millis(600)))
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    for host_id in [HostId::MASTER, host(2), host(3), host(4)] {
        scenario.sim.verdicts.insert(
            host_id,
            vec![Refusal::NoEngine {
                host: host_id,
                why: "none".into(),
            }],
        );
    }
    let process_count = scenario.sim.procs.len();
    scenario.sim.kill_host(host(3));
    (scenario, process_count)
}

/// Returns the times of failed restarts in the event log.
fn restart_failure_times(scenario: &mut JobScenario) -> Vec<Micros> {
    let Reply::Events(events) = scenario.sim.ask(
        scenario.console,
        Request::Events {
            first_number: 0,
            events_max: 65_536,
        },
    ) else {
        panic!("no events")
    };
    let failure_times = events
        .iter()
        .filter(|event| matches!(event.kind, EventKind::RestartFailed { .. }));
    failure_times.map(|event| event.at).collect()
}

pub(super) fn cancel_checkpointing(scenario: &mut JobScenario, job: Tid) {
    let request = Request::Checkpoint {
        job,
        schedule: Some(CheckpointSchedule::Disabled),
        end_job: false,
        wait_for_end: false,
    };
    assert_eq!(scenario.sim.ask(scenario.console, request), Reply::Done);
}

/// The master repeats the restart of a job that no host accepts at growing intervals, and
/// immediately when a host joins.
#[test]
fn restart_retries_back_off_until_a_host_joins() {
    for seed in 0..2 {
        let (mut scenario, process_count) = unplaceable_job(seed);
        scenario.sim.advance(Micros::from_secs(2 * 3600));
        let failure_times = restart_failure_times(&mut scenario);
        let intervals: Vec<u64> = failure_times
            .windows(2)
            .map(|pair| pair[1].since(pair[0]).0 / 1_000_000)
            .collect();
        assert!(
            intervals[..9]
                .iter()
                .all(|interval| (2..4).contains(interval)),
            "{intervals:?} (seed {seed})"
        );
        assert!(
            intervals[20..]
                .iter()
                .all(|interval| (600..603).contains(interval)),
            "{intervals:?} (seed {seed})"
        );
        scenario.sim.verdicts.clear();
        let join_time = scenario.sim.now;
        let reply = scenario.sim.ask(
            scenario.console,
            Request::AddHosts {
                host_file_lines: vec!["h5".into()],
            },
        );
        assert!(
            matches!(&reply, Reply::HostsAdded(results) if results[0].result.is_ok()),
            "{reply:?}"
        );
        scenario.run_until_restarted(process_count);
        assert!(
            scenario.sim.now.since(join_time) < Micros::from_secs(60),
            "it was not tried at once (seed {seed})"
        );
    }
}

/// The master no longer repeats the restart of a job whose checkpointing is cancelled. An event
/// tells this to those who wait for the restart.
#[test]
fn cancelled_checkpointing_stops_restart_retries() {
    let (mut scenario, process_count) = unplaceable_job(1);
    let job = scenario.job_tid();
    scenario.sim.advance(Micros::from_secs(60));
    let find_request = Request::FindAwaitingRestart { tids: vec![job] };
    let awaiting_tasks = scenario.sim.ask(scenario.console, find_request.clone());
    assert_eq!(awaiting_tasks, Reply::AwaitingRestart(vec![job]));
    cancel_checkpointing(&mut scenario, job);
    let events = list_events(&mut scenario.sim, scenario.console);
    assert!(
        matches!(
            events.last(),
            Some(EventKind::RestartFailed { why, .. })
                if why == "its periodic checkpoints were switched off"
        ),
        "{:?}",
        events.last()
    );
    let awaiting_tasks = scenario.sim.ask(scenario.console, find_request);
    assert_eq!(awaiting_tasks, Reply::AwaitingRestart(Vec::new()));
    let failure_count = restart_failure_times(&mut scenario).len();
    assert!(failure_count > 10, "{failure_count} times");
    scenario.sim.verdicts.clear();
    scenario.sim.advance(Micros::from_secs(3600));
    assert_eq!(
        (
            restart_failure_times(&mut scenario).len(),
            scenario.sim.procs.len()
        ),
        (failure_count, process_count)
    );
}

/// A checkpoint is removed if it becomes complete after its job has begun to roll back.
#[test]
fn checkpoint_completed_after_rollback_is_removed() {
    let mut late_count = 0;
    for seed in 0..20 {
        let mut scenario = JobScenario::new(seed, 4, 6);
        scenario
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let (checkpoint_count, process_count) = (
            scenario.sim.image_store.checkpoint_count(),
            scenario.sim.procs.len(),
        );
        while scenario.sim.image_store.checkpoint_count() == checkpoint_count {
            assert!(scenario.sim.step(), "no other checkpoint (seed {seed})");
        }
        // The store contains the complete checkpoint, but the master has not yet been notified.
        scenario.sim.kill_host(host(3));
        scenario.sim.handle(
            HostId::MASTER,
            Event::HostLost {
                host: host(3),
                why: "it was killed".into(),
            },
        );
        scenario.run_until_restarted(process_count);
        let events = list_events(&mut scenario.sim, scenario.console);
        let reported_names: Vec<&String> = events
            .iter()
            .filter_map(|event| match event {
                EventKind::Checkpointed { checkpoint, .. } => Some(checkpoint),
                _ => None,
            })
            .collect();
        let stored_names: Vec<String> = scenario
            .list_checkpoints()
            .into_iter()
            .map(|entry| entry.name)
            .collect();
        assert!(
            stored_names
                .iter()
                .all(|checkpoint| reported_names.contains(&checkpoint)),
            "{stored_names:?} are there, {reported_names:?} were told (seed {seed})"
        );
        late_count += usize::from(
            events
                .iter()
                .any(|event| matches!(event, EventKind::Restarted { .. })),
        );
    }
    assert!(late_count > 10, "the job went back {late_count} times only");
}
