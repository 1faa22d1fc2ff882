//! Properties of the batches of a history, for any sequence of events and after a crash at any
//! time.

use crate::{
    EventLog, StoredEntries, USER, apply_batch, build_history, host_id, owner_cause, read_history,
    rm_tid, task_id,
};
use proptest::prelude::*;
use pvm_rm::store::History;
use sempa_proto::event::{EventKind, LostTasks};
use sempa_proto::rm::{RmQuery, RmReply, UsageTotals};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// Returns queries for all users, jobs, tasks and hosts of [`random_events`].
fn all_queries() -> Vec<RmQuery> {
    let mut queries = vec![RmQuery::Users { user: None }, RmQuery::Jobs { user: None }];
    for host in 1..=3 {
        queries.push(RmQuery::HostDecisions(format!("h{host}")));
        queries.extend((2..12).flat_map(|n| {
            [
                RmQuery::Job(task_id(host, n)),
                RmQuery::TaskDecisions(task_id(host, n)),
            ]
        }));
    }
    queries
}

/// Random events without regard to consistency, as (kind, host, task number, number of the parent,
/// exit status). Hosts, tasks and parents occur in any order.
fn random_events() -> impl Strategy<Value = Vec<(u8, u16, u32, u32, i32)>> {
    prop::collection::vec((0..6_u8, 1..4_u16, 2..12_u32, 0..12_u32, 0..3_i32), 1..80)
}

/// Converts the tuples of [`random_events`] into an event log.
fn build_log(event_tuples: &[(u8, u16, u32, u32, i32)]) -> EventLog {
    let (mut log, mut used_tids) = (EventLog::default(), BTreeSet::new());
    for (n, (event_kind, host, local, parent_number, status)) in
        event_tuples.iter().copied().enumerate()
    {
        let (second, tid) = (n as u64, task_id(host, local));
        let parent = if parent_number < 2 {
            Tid::NONE
        } else {
            task_id(1, parent_number)
        };
        match event_kind {
            0 => {
                log.append(
                    second,
                    1,
                    EventKind::HostAdded {
                        host: host_id(host),
                        name: format!("h{host}"),
                    },
                );
            }
            // A second start of a task is skipped, because a tid is reused only after a quarter of
            // a million other tids.
            1 | 2 if used_tids.contains(&tid) => {}
            1 | 2 => {
                used_tids.extend([tid, parent]);
                log.append_start(
                    second,
                    tid,
                    parent,
                    if parent_number == 0 { "" } else { "worker" },
                );
            }
            3 => log.append_end(second, tid, status, u64::from(local)),
            4 => log.append_migration(second, tid, host, 1 + host % 3, owner_cause()),
            _ => {
                let name = format!("h{host}");
                log.append(
                    second,
                    1,
                    EventKind::HostGone {
                        host: host_id(host),
                        name,
                        why: "lost".into(),
                        lost_tasks: LostTasks::default(),
                    },
                );
            }
        }
    }
    log
}

proptest! {
    /// After a crash at any time, the file and the events that it does not contain restore the same
    /// history as without a crash.
    #[test]
    fn crash_neither_repeats_nor_loses_events(
        event_tuples in random_events(), written_count in 0..80_usize, lost_count in 0..20_usize,
    ) {
        let log = build_log(&event_tuples);
        let expected_history = build_history(&log);
        let written_count = written_count.min(log.0.len());
        let (mut crashed_history, mut tables) = (History::new(USER, rm_tid()), StoredEntries::new());
        log.0[..written_count].iter().for_each(|event| crashed_history.apply_event(event));
        apply_batch(&mut tables, crashed_history.take_batch());
        // These events were applied but not written before the crash.
        log.0[written_count..].iter().take(lost_count).for_each(|event| crashed_history.apply_event(event));
        let mut restored_history = read_history(&tables);
        // Some events are applied twice.
        log.0[written_count.saturating_sub(3)..].iter().for_each(|event| restored_history.apply_event(event));
        for query in all_queries() {
            prop_assert_eq!(restored_history.answer_query(&query), expected_history.answer_query(&query), "{:?}", query);
        }
        prop_assert_eq!(restored_history.log_position(), expected_history.log_position());
    }

    /// After every batch, the batches written so far contain the whole history.
    #[test]
    fn batches_contain_whole_history(event_tuples in random_events(), batch_size in 1..10_usize) {
        let log = build_log(&event_tuples);
        let (mut history, mut tables) = (History::new(USER, rm_tid()), StoredEntries::new());
        for batch_events in log.0.chunks(batch_size) {
            batch_events.iter().for_each(|event| history.apply_event(event));
            apply_batch(&mut tables, history.take_batch());
            prop_assert!(!history.has_changes() && history.take_batch().is_empty());
            let restored_history = read_history(&tables);
            for query in all_queries() {
                prop_assert_eq!(restored_history.answer_query(&query), history.answer_query(&query), "{:?}", query);
            }
        }
    }

    /// The totals of each job equal the sums over the tasks of the job.
    #[test]
    fn job_totals_are_sums_over_tasks(event_tuples in random_events()) {
        let history = build_history(&build_log(&event_tuples));
        let RmReply::Jobs(jobs) = history.answer_query(&RmQuery::Jobs { user: None }) else { panic!("no jobs") };
        for listed_job in jobs {
            let RmReply::Job { job, tasks } = history.answer_query(&RmQuery::Job(listed_job.job)) else { panic!("it was listed") };
            if job.started_at != listed_job.started_at {
                continue;
            }
            let mut sums = UsageTotals::default();
            for task in &tasks {
                sums.task_count += 1;
                sums.running_tasks += u64::from(task.end.is_none());
                sums.failed_tasks += u64::from(task.end.is_some_and(|(_, outcome)| !outcome.is_success()));
                sums.usage = sums.usage.merged_with(task.usage);
                sums.wall_time = sums.wall_time + task.end.map_or(Micros(0), |(end_time, _)| end_time.since(task.started_at));
                sums.migrations += u64::from(task.migrations);
                sums.evictions += u64::from(task.evictions);
            }
            prop_assert_eq!(job.totals, sums);
            prop_assert_eq!(job.ended_at.is_none(), job.totals.running_tasks > 0);
        }
    }
}
