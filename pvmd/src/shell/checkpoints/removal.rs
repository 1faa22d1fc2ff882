//! Removal of checkpoints: those that a user selects, and those that the store removes to stay
//! within its limits.

use super::{CheckpointError, CheckpointService, lock};
use crate::shell::input::{Input, InputSender};
use checkpoint::store::{
    CheckpointId, CheckpointInfo, CheckpointStore, StoreError, UnreadableEntries,
};
use pvmd_machine::io::Event;
use sempa_proto::checkpoint::{RemovalRefusal, RemovalResults, RemovalSelection};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// Names of checkpoints, and the time at which their jobs ended for good; `None` if the jobs run
/// again.
type JobEndMark = (Vec<String>, Option<Micros>);

/// Marks that must still be written, and the lock of the writer.
#[derive(Clone, Default)]
pub(super) struct PendingMarks {
    queue: Arc<Mutex<VecDeque<JobEndMark>>>,
    writer_lock: Arc<Mutex<()>>,
}

/// Removes the checkpoints that the store does not retain, and reports them in the log and as
/// [`Event::CheckpointsExpired`].
pub(super) fn remove_superfluous(
    store: &CheckpointStore,
    now: Micros,
    keep: &[String],
    inputs: &InputSender,
) {
    let keep = |set: &CheckpointInfo| keep.contains(&set.id.to_string());
    match store
        .remove_expired(now, keep)
        .map_err(CheckpointError::RemoveExpired)
    {
        Ok(swept) if swept.removed.is_empty() => {}
        Ok(swept) => {
            let checkpoints: Vec<String> =
                swept.removed.iter().map(|set| set.id.to_string()).collect();
            tracing::info!(
                "removed checkpoints beyond the store's limits: {}",
                checkpoints.join(" ")
            );
            let _ = inputs.blocking_send(Input::Event(Event::CheckpointsExpired { checkpoints }));
        }
        Err(why) => tracing::warn!("{why}"),
    }
}

impl CheckpointService {
    /// Removes checkpoints that must not be used. Starts when the task `after` has ended.
    pub(crate) fn discard(&self, sets: Vec<String>, after: Option<JoinHandle<()>>) {
        if !self.store_exists() {
            return;
        }
        self.spawn_after(after, move |store| {
            // Only checkpoints of this virtual machine are removed, even if those of other virtual
            // machines have the same name.
            let remove = |store: CheckpointStore| -> Result<(), StoreError> {
                let (there, _) = store.list_checkpoints()?;
                let gone = there.iter().filter(|set| {
                    store.is_own_checkpoint(set) && sets.contains(&set.id.to_string())
                });
                gone.map(|set| store.remove(&set.id))
                    .filter(|gone| !matches!(gone, Err(StoreError::NoCheckpoint(_))))
                    .collect()
            };
            let removed = store.and_then(|store| remove(store).map_err(CheckpointError::Discard));
            removed.unwrap_or_else(|why| tracing::warn!("{why}"));
        });
    }

    /// Records in the store that the jobs of these checkpoints ended for good at the time `ended`,
    /// or run again. Calls take effect in order.
    pub(crate) fn mark_job_end(&self, sets: Vec<String>, ended: Option<Micros>, keep: Vec<String>) {
        let (marks, inputs) = (self.pending_marks.clone(), self.inputs.clone());
        lock(&marks.queue).push_back((sets, ended));
        self.spawn(move |store| {
            let _turn = lock(&marks.writer_lock);
            let Some((sets, ended)) = lock(&marks.queue).pop_front() else {
                return;
            };
            let ids: Vec<CheckpointId> = sets.iter().filter_map(|set| set.parse().ok()).collect();
            let store = match store {
                Ok(store) => store,
                Err(why) => return tracing::warn!("{why}"),
            };
            let marked = store
                .mark_jobs_ended(&ids, ended)
                .map_err(CheckpointError::MarkJobEnd);
            marked.unwrap_or_else(|why| tracing::warn!("{why}"));
            if let Some(now) = ended {
                remove_superfluous(&store, now, &keep, &inputs);
            }
        });
    }

    /// Removes checkpoints. Reports [`Event::CheckpointsRemoved`].
    pub(crate) fn remove(
        &self,
        (tid, id): (Tid, RequestId),
        selection: RemovalSelection,
        include_foreign: bool,
        refused: BTreeMap<String, RemovalRefusal>,
    ) {
        let is_there = self.store_exists();
        self.spawn_reporting(move |store| {
            let result = match (is_there, selection) {
                (true, selection) => {
                    store.and_then(|store| remove(&store, selection, include_foreign, refused))
                }
                (false, RemovalSelection::Job(_)) => Ok(Vec::new()),
                (false, RemovalSelection::Checkpoints(sets)) => Ok(sets
                    .into_iter()
                    .map(|set| (set, Err(RemovalRefusal::Unknown)))
                    .collect()),
            };
            let result = result.map_err(|e| e.to_string());
            Event::CheckpointsRemoved { tid, id, result }
        });
    }
}

fn remove(
    store: &CheckpointStore,
    selection: RemovalSelection,
    include_foreign: bool,
    mut refused: BTreeMap<String, RemovalRefusal>,
) -> Result<RemovalResults, CheckpointError> {
    let (sets, broken) = store.list_checkpoints().map_err(CheckpointError::List)?;
    let names: Vec<String> = match selection {
        RemovalSelection::Checkpoints(names) => {
            let mut known = BTreeSet::new();
            names
                .into_iter()
                .filter(|name| known.insert(name.clone()))
                .collect()
        }
        RemovalSelection::Job(job) => {
            let of_job = sets
                .iter()
                .filter(|set| set.job == job && (include_foreign || store.is_own_checkpoint(set)));
            of_job.map(|set| set.id.to_string()).collect()
        }
    };
    let one = |name: String| {
        let outcome = match refused.remove(&name) {
            Some(why) => Err(why),
            None => remove_one(store, &name, include_foreign, &sets, &broken),
        };
        (name, outcome)
    };
    Ok(names.into_iter().map(one).collect())
}

fn remove_one(
    store: &CheckpointStore,
    name: &str,
    include_foreign: bool,
    sets: &[CheckpointInfo],
    broken: &UnreadableEntries,
) -> Result<u64, RemovalRefusal> {
    let Ok(id) = name.parse::<CheckpointId>() else {
        // The store never chooses such a name: another program may have created the entry.
        let unreadable = broken.iter().find(|(unreadable, _)| unreadable == name);
        return Err(unreadable.map_or(RemovalRefusal::Unknown, |(_, why)| {
            RemovalRefusal::Store(why.to_string())
        }));
    };
    let known = sets.iter().find(|set| set.id == id);
    if let Some(set) = known.filter(|set| !include_foreign && !store.is_own_checkpoint(set)) {
        return Err(RemovalRefusal::Foreign(set.vm.clone()));
    }
    match store.remove(&id) {
        Ok(()) => Ok(known.map_or(0, |set| set.bytes)),
        Err(StoreError::InUse(_)) => Err(RemovalRefusal::InUse),
        Err(StoreError::NoCheckpoint(_)) => Err(RemovalRefusal::Unknown),
        Err(why) => Err(RemovalRefusal::Store(why.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::store::StoreLimits;

    /// Checkpoints are removed by name or by job; for each checkpoint that is not removed a reason
    /// is reported.
    #[test]
    fn removal_by_name_or_job_reports_each_reason() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (dir, key) = (scratch.path().join("store"), scratch.path().join("key"));
        let store = CheckpointStore::open(&dir, &key, StoreLimits::default())
            .expect("opened")
            .for_vm("mine");
        let make = |store: &CheckpointStore, job: i32, second: u64| {
            let draft = store
                .begin(Tid::from_raw(job), Micros::from_secs(second))
                .expect("begun");
            draft.finish(b"").expect("finished").id.to_string()
        };
        let [a, b, c] = [1, 2, 3].map(|second| make(&store, 0x40001, second));
        let (d, other) = (
            make(&store, 0x40002, 4),
            make(&store.for_vm("other"), 0x40001, 5),
        );
        std::fs::create_dir(dir.join("mess")).expect("made");
        let sets = |names: &[&String]| {
            RemovalSelection::Checkpoints(names.iter().map(|name| name.to_string()).collect())
        };
        let go = |which: RemovalSelection, any: bool, stay: &[(&String, RemovalRefusal)]| {
            let stay = stay
                .iter()
                .map(|(set, why)| (set.to_string(), why.clone()))
                .collect();
            remove(&store, which, any, stay).expect("listed")
        };
        let unknown = "t40001-20000101T000000-1".to_string();
        let bytes = store.list_checkpoints().expect("listed").0[0].bytes;
        let gone = go(
            sets(&[&a, &a, &unknown, &"nonsense".into(), &other]),
            false,
            &[],
        );
        let wanted = [
            (a.clone(), Ok(bytes)),
            (unknown, Err(RemovalRefusal::Unknown)),
            ("nonsense".into(), Err(RemovalRefusal::Unknown)),
            (other.clone(), Err(RemovalRefusal::Foreign("other".into()))),
        ];
        assert_eq!(gone, wanted);
        assert!(
            matches!(&go(sets(&[&"mess".into()]), true, &[])[0].1, Err(RemovalRefusal::Store(why)) if why.contains("mess"))
        );
        let job = Tid::from_raw(0x40001);
        let open = store
            .open_checkpoint(&b.parse().expect("a name"))
            .expect("opened");
        let gone = go(
            RemovalSelection::Job(job),
            false,
            &[(&c, RemovalRefusal::OnlyRestartPoint(job))],
        );
        assert_eq!(
            gone,
            [
                (b.clone(), Err(RemovalRefusal::InUse)),
                (c.clone(), Err(RemovalRefusal::OnlyRestartPoint(job)))
            ]
        );
        drop(open);
        std::fs::write(dir.join(&d).join("manifest"), "changed").expect("written");
        assert_eq!(
            go(sets(&[&d]), false, &[]),
            [(d, Ok(0))],
            "what cannot be read goes by its name"
        );
        let gone = go(RemovalSelection::Job(job), true, &[]);
        assert!(
            gone.iter().map(|(set, _)| set).eq([&b, &c, &other])
                && gone.iter().all(|(_, became)| became.is_ok())
        );
        assert_eq!(go(RemovalSelection::Job(job), true, &[]), []);
    }
}
