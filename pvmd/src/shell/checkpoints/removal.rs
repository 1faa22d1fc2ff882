//! Removal of checkpoints: the checkpoints that a user selects, and the checkpoints that the store
//! removes to stay within its limits.

use super::{CheckpointError, CheckpointService, lock};
use crate::shell::input::{Input, InputSender};
use checkpoint::store::{
    CheckpointId, CheckpointInfo, CheckpointStore, StoreError, UnreadableEntries,
};
use pvmd_machine::io::Event;
use sempa_proto::checkpoint::{RemovalRefusal, RemovalResults, RemovalSelection, StoreFailure};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// Names of checkpoints, and the time at which the job of these checkpoints finally ended; `None`
/// if the job runs again.
type JobEndMark = (Vec<String>, Option<Micros>);

/// Marks that are not written yet, and the lock that a thread holds while it writes marks.
#[derive(Clone, Default)]
pub(super) struct PendingMarks {
    queue: Arc<Mutex<VecDeque<JobEndMark>>>,
    writer_lock: Arc<Mutex<()>>,
}

/// Removes the checkpoints that the store does not retain, except the checkpoints in `is_kept`.
/// Reports the removed checkpoints in the log and as [`Event::CheckpointsExpired`]. If the removal
/// fails, logs the error.
pub(super) fn remove_superfluous(
    store: &CheckpointStore,
    now: Micros,
    is_kept: &[String],
    inputs: &InputSender,
) {
    let is_kept = |checkpoint: &CheckpointInfo| is_kept.contains(&checkpoint.id.to_string());
    match store
        .remove_expired(now, is_kept)
        .map_err(CheckpointError::RemoveExpired)
    {
        Ok(removal) if removal.removed.is_empty() => {}
        Ok(removal) => {
            let removed_names: Vec<String> = removal
                .removed
                .iter()
                .map(|checkpoint| checkpoint.id.to_string())
                .collect();
            tracing::info!(
                "removed checkpoints beyond the store's limits: {}",
                removed_names.join(" ")
            );
            let _ = inputs.blocking_send(Input::Event(Event::CheckpointsExpired {
                checkpoints: removed_names,
            }));
        }
        Err(why) => tracing::warn!("{why}"),
    }
}

impl CheckpointService {
    /// Removes the checkpoints `names`, which must not be used. Starts when the tokio task
    /// `predecessor` has ended. Errors are logged.
    pub(crate) fn discard_checkpoints(
        &self,
        names: Vec<String>,
        predecessor: Option<JoinHandle<()>>,
    ) {
        if !self.store_exists() {
            return;
        }
        self.spawn_after(predecessor, move |store| {
            // Only checkpoints of this virtual machine are removed, even if other virtual machines
            // have checkpoints of the same name.
            let remove_from_store = |store: CheckpointStore| -> Result<(), StoreError> {
                let (checkpoints, _) = store.list_checkpoints()?;
                let discarded = checkpoints.iter().filter(|checkpoint| {
                    store.is_own_checkpoint(checkpoint)
                        && names.contains(&checkpoint.id.to_string())
                });
                discarded
                    .map(|checkpoint| store.remove_checkpoint(&checkpoint.id))
                    .filter(|discarded| !matches!(discarded, Err(StoreError::NoCheckpoint(_))))
                    .collect()
            };
            let remove_result =
                store.and_then(|store| remove_from_store(store).map_err(CheckpointError::Discard));
            remove_result.unwrap_or_else(|why| tracing::warn!("{why}"));
        });
    }

    /// Records in the store that the jobs of these checkpoints finally ended at the time
    /// `job_ended_at`, or run again if `job_ended_at` is `None`. After an end, removes superfluous
    /// checkpoints except `kept_checkpoints`. Calls take effect in the order in which they are
    /// made.
    pub(crate) fn mark_job_end(
        &self,
        names: Vec<String>,
        job_ended_at: Option<Micros>,
        kept_checkpoints: Vec<String>,
    ) {
        let (marks, inputs) = (self.pending_marks.clone(), self.inputs.clone());
        lock(&marks.queue).push_back((names, job_ended_at));
        self.spawn_work(move |store| {
            let _writer_guard = lock(&marks.writer_lock);
            let Some((names, job_ended_at)) = lock(&marks.queue).pop_front() else {
                return;
            };
            let ids: Vec<CheckpointId> =
                names.iter().filter_map(|name| name.parse().ok()).collect();
            let store = match store {
                Ok(store) => store,
                Err(why) => return tracing::warn!("{why}"),
            };
            let mark_result = store
                .mark_jobs_ended(&ids, job_ended_at)
                .map_err(CheckpointError::MarkJobEnd);
            mark_result.unwrap_or_else(|why| tracing::warn!("{why}"));
            if job_ended_at.is_none() {
                // The job was restarted from these checkpoints, so they are intact.
                for id in &ids {
                    let unmark_result = store.mark_damaged(id, None);
                    unmark_result.unwrap_or_else(|why| tracing::warn!("{why}"));
                }
            }
            if let Some(now) = job_ended_at {
                remove_superfluous(&store, now, &kept_checkpoints, &inputs);
            }
        });
    }

    /// Removes the selected checkpoints except the checkpoints in `refusals`. Checkpoints of other
    /// virtual machines are removed only if `include_foreign` is true. Reports the result for each
    /// checkpoint in [`Event::CheckpointsRemoved`].
    pub(crate) fn remove_selected(
        &self,
        (tid, id): (Tid, RequestId),
        selection: RemovalSelection,
        include_foreign: bool,
        refusals: BTreeMap<String, RemovalRefusal>,
    ) {
        let store_exists = self.store_exists();
        self.spawn_reporting(move |store| {
            let result = match (store_exists, selection) {
                (true, selection) => store.and_then(|store| {
                    remove_selection(&store, selection, include_foreign, refusals)
                }),
                (false, RemovalSelection::Job(_)) => Ok(Vec::new()),
                (false, RemovalSelection::Checkpoints(checkpoints)) => Ok(checkpoints
                    .into_iter()
                    .map(|checkpoint| (checkpoint, Err(RemovalRefusal::NoSuchCheckpoint)))
                    .collect()),
            };
            let result = result.map_err(StoreFailure::from);
            Event::CheckpointsRemoved { tid, id, result }
        });
    }
}

fn remove_selection(
    store: &CheckpointStore,
    selection: RemovalSelection,
    include_foreign: bool,
    mut refusals: BTreeMap<String, RemovalRefusal>,
) -> Result<RemovalResults, CheckpointError> {
    let (checkpoints, unreadable_entries) =
        store.list_checkpoints().map_err(CheckpointError::List)?;
    let names: Vec<String> = match selection {
        RemovalSelection::Checkpoints(names) => {
            let mut seen_names = BTreeSet::new();
            names
                .into_iter()
                .filter(|name| seen_names.insert(name.clone()))
                .collect()
        }
        RemovalSelection::Job(job) => {
            let job_checkpoints = checkpoints.iter().filter(|checkpoint| {
                checkpoint.job == job && (include_foreign || store.is_own_checkpoint(checkpoint))
            });
            job_checkpoints
                .map(|checkpoint| checkpoint.id.to_string())
                .collect()
        }
    };
    let remove_named = |name: String| {
        let outcome = match refusals.remove(&name) {
            Some(why) => Err(why),
            None => remove_one(
                store,
                &name,
                include_foreign,
                &checkpoints,
                &unreadable_entries,
            ),
        };
        (name, outcome)
    };
    Ok(names.into_iter().map(remove_named).collect())
}

fn remove_one(
    store: &CheckpointStore,
    name: &str,
    include_foreign: bool,
    checkpoints: &[CheckpointInfo],
    unreadable_entries: &UnreadableEntries,
) -> Result<u64, RemovalRefusal> {
    let Ok(id) = name.parse::<CheckpointId>() else {
        // The store never creates an entry with such a name; another program may have created it.
        let entry = unreadable_entries.iter().find(|(entry, _)| entry == name);
        return Err(entry.map_or(RemovalRefusal::NoSuchCheckpoint, |(_, why)| {
            RemovalRefusal::Store(StoreFailure(why.to_string()))
        }));
    };
    let listed_checkpoint = checkpoints.iter().find(|checkpoint| checkpoint.id == id);
    if let Some(checkpoint) = listed_checkpoint
        .filter(|checkpoint| !include_foreign && !store.is_own_checkpoint(checkpoint))
    {
        return Err(RemovalRefusal::OtherVm(checkpoint.vm.clone()));
    }
    match store.remove_checkpoint(&id) {
        Ok(()) => Ok(listed_checkpoint.map_or(0, |checkpoint| checkpoint.bytes)),
        Err(StoreError::InUse(_)) => Err(RemovalRefusal::InUse),
        Err(StoreError::NoCheckpoint(_)) => Err(RemovalRefusal::NoSuchCheckpoint),
        Err(why) => Err(RemovalRefusal::Store(StoreFailure(why.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::store::StoreLimits;

    /// Checkpoints are removed by name or by job. The result contains a reason for each checkpoint
    /// that is not removed.
    #[test]
    fn removal_by_name_or_job_reports_each_reason() {
        let scratch_dir = tempfile::tempdir().expect("a directory");
        let (dir, key) = (
            scratch_dir.path().join("store"),
            scratch_dir.path().join("key"),
        );
        let store = CheckpointStore::open(&dir, &key, StoreLimits::default())
            .expect("opened")
            .for_vm("mine");
        let create_checkpoint = |store: &CheckpointStore, job: i32, second: u64| {
            let draft = store
                .begin(Tid::from_raw(job), Micros::from_secs(second))
                .expect("begun");
            draft.finish(b"").expect("finished").id.to_string()
        };
        let [a, b, c] = [1, 2, 3].map(|second| create_checkpoint(&store, 0x40001, second));
        let (d, foreign_name) = (
            create_checkpoint(&store, 0x40002, 4),
            create_checkpoint(&store.for_vm("other"), 0x40001, 5),
        );
        std::fs::create_dir(dir.join("mess")).expect("made");
        let checkpoint_selection = |names: &[&String]| {
            RemovalSelection::Checkpoints(names.iter().map(|name| name.to_string()).collect())
        };
        let remove_selected =
            |selection: RemovalSelection,
             include_foreign: bool,
             refused: &[(&String, RemovalRefusal)]| {
                let refused = refused
                    .iter()
                    .map(|(set, why)| (set.to_string(), why.clone()))
                    .collect();
                remove_selection(&store, selection, include_foreign, refused).expect("listed")
            };
        let unknown_name = "t40001-20000101T000000-1".to_string();
        let bytes = store.list_checkpoints().expect("listed").0[0].bytes;
        let results = remove_selected(
            checkpoint_selection(&[&a, &a, &unknown_name, &"nonsense".into(), &foreign_name]),
            false,
            &[],
        );
        let expected_results = [
            (a.clone(), Ok(bytes)),
            (unknown_name, Err(RemovalRefusal::NoSuchCheckpoint)),
            ("nonsense".into(), Err(RemovalRefusal::NoSuchCheckpoint)),
            (
                foreign_name.clone(),
                Err(RemovalRefusal::OtherVm("other".into())),
            ),
        ];
        assert_eq!(results, expected_results);
        assert!(
            matches!(&remove_selected(checkpoint_selection(&[&"mess".into()]), true, &[])[0].1, Err(RemovalRefusal::Store(why)) if why.0.contains("mess"))
        );
        let job = Tid::from_raw(0x40001);
        let opened_checkpoint = store
            .open_checkpoint(&b.parse().expect("a name"))
            .expect("opened");
        let results = remove_selected(
            RemovalSelection::Job(job),
            false,
            &[(&c, RemovalRefusal::OnlyRestartPoint(job))],
        );
        assert_eq!(
            results,
            [
                (b.clone(), Err(RemovalRefusal::InUse)),
                (c.clone(), Err(RemovalRefusal::OnlyRestartPoint(job)))
            ]
        );
        drop(opened_checkpoint);
        std::fs::write(dir.join(&d).join("manifest"), "changed").expect("written");
        assert_eq!(
            remove_selected(checkpoint_selection(&[&d]), false, &[]),
            [(d, Ok(0))],
            "what cannot be read goes by its name"
        );
        let results = remove_selected(RemovalSelection::Job(job), true, &[]);
        assert!(
            results
                .iter()
                .map(|(set, _)| set)
                .eq([&b, &c, &foreign_name])
                && results.iter().all(|(_, outcome)| outcome.is_ok())
        );
        assert_eq!(remove_selected(RemovalSelection::Job(job), true, &[]), []);
    }
}
