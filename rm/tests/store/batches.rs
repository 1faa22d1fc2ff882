//! Properties of the batches for any sequence of events, and after a crash at any time.

use crate::{
    EventLog, Tables, USER, apply_batch, history_of, host_id, owner, reread, rm_tid, task_id,
};
use proptest::prelude::*;
use pvm_rm::store::History;
use sempa_proto::event::EventKind;
use sempa_proto::rm::{RmQuery, RmReply, UsageTotals};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

fn questions() -> Vec<RmQuery> {
    let mut all = vec![RmQuery::Users { user: None }, RmQuery::Jobs { user: None }];
    for host in 1..=3 {
        all.push(RmQuery::HostDecisions(format!("h{host}")));
        all.extend((2..12).flat_map(|n| {
            [
                RmQuery::Job(task_id(host, n)),
                RmQuery::TaskDecisions(task_id(host, n)),
            ]
        }));
    }
    all
}

/// Random events without regard to consistency: hosts, tasks, parents and exits in any order.
fn random_events() -> impl Strategy<Value = Vec<(u8, u16, u32, u32, i32)>> {
    prop::collection::vec((0..6_u8, 1..4_u16, 2..12_u32, 0..12_u32, 0..3_i32), 1..80)
}

fn log_of(happenings: &[(u8, u16, u32, u32, i32)]) -> EventLog {
    let (mut log, mut seen) = (EventLog::default(), BTreeSet::new());
    for (n, (what, host, local, other, status)) in happenings.iter().copied().enumerate() {
        let (at, tid) = (n as u64, task_id(host, local));
        let parent = if other < 2 {
            Tid::NONE
        } else {
            task_id(1, other)
        };
        match what {
            0 => {
                log.append(
                    at,
                    1,
                    EventKind::HostAdded {
                        host: host_id(host),
                        name: format!("h{host}"),
                    },
                );
            }
            // Skipped, because a tid is reused only after a quarter of a million other tids.
            1 | 2 if seen.contains(&tid) => {}
            1 | 2 => {
                seen.extend([tid, parent]);
                log.started(at, tid, parent, if other == 0 { "" } else { "worker" });
            }
            3 => log.ended(at, tid, status, u64::from(local)),
            4 => log.moved(at, tid, host, 1 + host % 3, owner()),
            _ => {
                let name = format!("h{host}");
                log.append(
                    at,
                    1,
                    EventKind::HostGone {
                        host: host_id(host),
                        name,
                        why: "lost".into(),
                    },
                );
            }
        }
    }
    log
}

proptest! {
    /// After a crash at any time, the file and the rest of the event log restore the same history
    /// as without a crash.
    #[test]
    fn crash_neither_repeats_nor_loses_events(
        happenings in random_events(), cut in 0..80_usize, lost in 0..20_usize,
    ) {
        let log = log_of(&happenings);
        let whole = history_of(&log);
        let cut = cut.min(log.0.len());
        let (mut before, mut tables) = (History::new(USER, rm_tid()), Tables::new());
        log.0[..cut].iter().for_each(|event| before.apply_event(event));
        apply_batch(&mut tables, before.take_batch());
        // These events were applied but not written before the crash.
        log.0[cut..].iter().take(lost).for_each(|event| before.apply_event(event));
        let mut after = reread(&tables);
        // Some events are applied twice.
        log.0[cut.saturating_sub(3)..].iter().for_each(|event| after.apply_event(event));
        for question in questions() {
            prop_assert_eq!(after.answer(&question), whole.answer(&question), "{:?}", question);
        }
        prop_assert_eq!(after.log_position(), whole.log_position());
    }

    /// At any time, the batches written so far contain the whole history.
    #[test]
    fn batches_contain_whole_history(happenings in random_events(), every in 1..10_usize) {
        let log = log_of(&happenings);
        let (mut history, mut tables) = (History::new(USER, rm_tid()), Tables::new());
        for some in log.0.chunks(every) {
            some.iter().for_each(|event| history.apply_event(event));
            apply_batch(&mut tables, history.take_batch());
            prop_assert!(!history.is_dirty() && history.take_batch().is_empty());
            let again = reread(&tables);
            for question in questions() {
                prop_assert_eq!(again.answer(&question), history.answer(&question), "{:?}", question);
            }
        }
    }

    /// The totals of each job equal the sums over its tasks.
    #[test]
    fn sums_are_sums_of_tasks(happenings in random_events()) {
        let history = history_of(&log_of(&happenings));
        let RmReply::Jobs(jobs) = history.answer(&RmQuery::Jobs { user: None }) else { panic!("no jobs") };
        for one in jobs {
            let RmReply::Job { job, tasks } = history.answer(&RmQuery::Job(one.job)) else { panic!("it was listed") };
            if job.started != one.started {
                continue;
            }
            let mut sums = UsageTotals::default();
            for task in &tasks {
                sums.tasks += 1;
                sums.running += u64::from(task.ended.is_none());
                sums.failed += u64::from(task.ended.is_some_and(|(_, how)| !how.is_success()));
                sums.used = sums.used.plus(task.used);
                sums.wall_time = sums.wall_time + task.ended.map_or(Micros(0), |(at, _)| at.since(task.started));
                sums.migrations += u64::from(task.migrations);
                sums.evictions += u64::from(task.evictions);
            }
            prop_assert_eq!(job.totals, sums);
            prop_assert_eq!(job.ended.is_none(), job.totals.running > 0);
        }
    }
}
