//! Reads the tids and the work of the tasks of each spawn from a recording.

use super::seconds;
use crate::recording::{RecordedInput, RecordingEntry};
use sempa_proto::{Micros, Tid};
use std::collections::{HashMap, VecDeque};

/// Work of a recorded task.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RecordedWork {
    /// Work in seconds of an ordinary processor.
    pub(super) seconds: f64,
    /// Time of the task's last spawn.
    pub(super) last_spawn_at: Micros,
}

/// Returns the recorded tasks of each spawn in task order, by the spawn's requesting task and wait
/// id.
pub(super) fn recorded_tasks(entries: &[RecordingEntry]) -> HashMap<(Tid, i32), Vec<Tid>> {
    let started = |entry: &RecordingEntry| match &entry.input {
        RecordedInput::Started { number, tids } => Some((*number, tids.clone())),
        _ => None,
    };
    entries.iter().filter_map(started).collect()
}

/// Returns the recorded work of the tasks of each spawn, by the spawn's requesting task and wait
/// id. The work of a task without a recorded end is infinite.
pub(super) fn recorded_work(
    entries: &[RecordingEntry],
) -> HashMap<(Tid, i32), VecDeque<RecordedWork>> {
    let mut all = HashMap::<(Tid, i32), VecDeque<RecordedWork>>::new();
    // Tids are reused, so the current spawn of each tid is tracked. The end of a short task may be
    // recorded before the answer to its spawn.
    let (mut current, mut early_ends) = (
        HashMap::<Tid, ((Tid, i32), usize)>::new(),
        HashMap::<Tid, f64>::new(),
    );
    for entry in entries {
        match &entry.input {
            RecordedInput::Started { number, tids } => {
                for (i, tid) in tids.iter().enumerate() {
                    let seconds = early_ends.remove(tid).unwrap_or(f64::INFINITY);
                    all.entry(*number).or_default().push_back(RecordedWork {
                        seconds,
                        ..RecordedWork::default()
                    });
                    current.insert(*tid, (*number, i));
                }
            }
            RecordedInput::Ended { tid, used } => {
                let used = seconds(used.user + used.system);
                match current
                    .get(tid)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    // A task of a job that was restarted from a checkpoint has several recorded
                    // ends.
                    Some(work) if work.seconds.is_finite() => work.seconds += used,
                    Some(work) => work.seconds = used,
                    None => drop(early_ends.insert(*tid, used)),
                }
            }
            RecordedInput::Spawn {
                number: (src, _), ..
            } => {
                if let Some(work) = current
                    .get(src)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    work.last_spawn_at = entry.at;
                }
            }
            _ => {}
        }
    }
    all
}
