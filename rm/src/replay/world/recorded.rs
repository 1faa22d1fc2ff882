//! Reads the tids and the work of the tasks of each spawn from a recording.

use super::seconds;
use crate::recording::{RecordedInput, RecordingEntry};
use sempa_proto::{Micros, Tid};
use std::collections::{HashMap, VecDeque};

/// Work of a recorded task.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RecordedWork {
    /// Work in seconds of an ordinary processor.
    pub(super) work_s: f64,
    /// Time at which the task last requested a spawn.
    pub(super) last_spawn_at: Micros,
}

/// Returns the recorded tasks of each spawn in task order, by the spawn's requesting task and wait
/// id.
pub(super) fn recorded_tasks(entries: &[RecordingEntry]) -> HashMap<(Tid, i32), Vec<Tid>> {
    let spawn_reply = |entry: &RecordingEntry| match &entry.input {
        RecordedInput::SpawnAnswered { request_id, tids } => Some((*request_id, tids.clone())),
        _ => None,
    };
    entries.iter().filter_map(spawn_reply).collect()
}

/// Returns the recorded work of the tasks of each spawn, by the spawn's requesting task and wait
/// id. The work of a task without a recorded end is infinite.
pub(super) fn recorded_work(
    entries: &[RecordingEntry],
) -> HashMap<(Tid, i32), VecDeque<RecordedWork>> {
    let mut work_by_request = HashMap::<(Tid, i32), VecDeque<RecordedWork>>::new();
    // Tids are reused, so the current spawn of each tid is tracked. The end of a short task may be
    // recorded before the reply to its spawn.
    let (mut current_spawns, mut early_ends) = (
        HashMap::<Tid, ((Tid, i32), usize)>::new(),
        HashMap::<Tid, f64>::new(),
    );
    for entry in entries {
        match &entry.input {
            RecordedInput::SpawnAnswered { request_id, tids } => {
                for (i, tid) in tids.iter().enumerate() {
                    let seconds = early_ends.remove(tid).unwrap_or(f64::INFINITY);
                    work_by_request
                        .entry(*request_id)
                        .or_default()
                        .push_back(RecordedWork {
                            work_s: seconds,
                            ..RecordedWork::default()
                        });
                    current_spawns.insert(*tid, (*request_id, i));
                }
            }
            RecordedInput::TaskEnded { tid, usage } => {
                let usage = seconds(usage.user + usage.system);
                match current_spawns
                    .get(tid)
                    .and_then(|(request_id, i)| work_by_request.get_mut(request_id)?.get_mut(*i))
                {
                    // A task has several recorded ends if its job was restarted from a checkpoint.
                    // Their processor times are added.
                    Some(work) if work.work_s.is_finite() => work.work_s += usage,
                    Some(work) => work.work_s = usage,
                    None => drop(early_ends.insert(*tid, usage)),
                }
            }
            RecordedInput::Spawn {
                request_id: (requester, _),
                ..
            } => {
                if let Some(work) = current_spawns
                    .get(requester)
                    .and_then(|(request_id, i)| work_by_request.get_mut(request_id)?.get_mut(*i))
                {
                    work.last_spawn_at = entry.at;
                }
            }
            _ => {}
        }
    }
    work_by_request
}
