//! Tests of the journal over a disk in memory, and what they share.

mod corruption;
mod crash_points;
mod errors;
mod faulty_storage;
mod folder;
mod random_scripts;

use super::mirror::Mirror;
use super::recovery::{self, Opened};
use super::*;
use faulty_storage::FaultyStorage;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver};

const PROGRAM: &str = "sieve 1.0";

/// One step of a script.
#[derive(Clone, Debug)]
enum Step {
    Append(Record),
    /// Waits until all records are durable.
    Settle,
    BeginSnapshot,
    /// Waits until no snapshot is written.
    SettleSnapshot,
}

#[derive(Debug)]
enum Event {
    Durable(Lsn),
    Notice(Notice),
}

/// All that was appended in a run, over all of its masters.
#[derive(Clone, Default)]
struct History {
    records: Vec<Record>,
    /// Number of records that were reported durable.
    durable: usize,
    generation: u64,
}

/// The script ended early, because writes fail.
#[derive(Debug, PartialEq)]
struct Interrupted;

/// An open journal over a disk in memory.
struct TestRun {
    journal: Journal,
    events: Receiver<Event>,
    /// Positions of the records of this master, and the number of records before them.
    lsns: Vec<Lsn>,
    records_before: usize,
    /// True if a failed write ends the script. Otherwise the script waits for the next attempt.
    ends_at_errors: bool,
}

impl TestRun {
    /// Opens the journal of `history`.
    fn open(storage: &FaultyStorage, history: &mut History) -> Result<Self, OpenError> {
        let (callbacks, events) = observed_callbacks();
        let storage = Arc::new(storage.clone());
        let (journal, previous) = Journal::open_storage(storage, settings(), callbacks)?;
        history.check(&previous, journal.generation());
        Ok(Self {
            journal,
            events,
            lsns: Vec::new(),
            records_before: history.records.len(),
            ends_at_errors: true,
        })
    }

    /// Opens the journal of `history` on a disk that does not fail.
    fn start(storage: &FaultyStorage, history: &mut History) -> Self {
        Self::open(storage, history).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs steps to their end.
    fn complete(&mut self, steps: &[Step], history: &mut History) {
        assert_eq!(self.run(steps, history), Ok(()));
    }

    fn run(&mut self, steps: &[Step], history: &mut History) -> Result<(), Interrupted> {
        steps.iter().try_for_each(|step| self.step(step, history))
    }

    fn step(&mut self, step: &Step, history: &mut History) -> Result<(), Interrupted> {
        match step {
            Step::Append(record) => {
                history.records.push(record.clone());
                let appended = self.journal.append(record.clone());
                self.lsns.push(appended.expect("the queue has room"));
                Ok(())
            }
            Step::Settle => self.settle(history),
            Step::BeginSnapshot => {
                let count = history.records.len();
                // Another one may be in progress.
                let _ = self
                    .journal
                    .begin_snapshot(driver_state(count), counters(count));
                Ok(())
            }
            Step::SettleSnapshot => {
                while self.journal.is_snapshot_pending() {
                    self.wait_for_event(history)?;
                }
                Ok(())
            }
        }
    }

    fn settle(&mut self, history: &mut History) -> Result<(), Interrupted> {
        while self
            .lsns
            .last()
            .is_some_and(|last| self.journal.durable() < *last)
        {
            self.wait_for_event(history)?;
        }
        self.take_in_durable(self.journal.durable(), history);
        Ok(())
    }

    fn wait_for_event(&mut self, history: &mut History) -> Result<(), Interrupted> {
        match self.events.recv().expect("an open journal") {
            Event::Durable(lsn) => self.take_in_durable(lsn, history),
            Event::Notice(Notice::WritesFail { .. }) if self.ends_at_errors => {
                return Err(Interrupted);
            }
            Event::Notice(_) => {}
        }
        Ok(())
    }

    /// Closes the journal, and counts what was reported durable until then.
    fn close(self, history: &mut History) -> Vec<Notice> {
        drop(self.journal);
        let mut notices = Vec::new();
        for event in self.events.try_iter() {
            match event {
                Event::Durable(lsn) => {
                    let count = self.lsns.iter().filter(|own| **own <= lsn).count();
                    history.durable = history.durable.max(self.records_before + count);
                }
                Event::Notice(notice) => notices.push(notice),
            }
        }
        notices
    }

    fn take_in_durable(&self, lsn: Lsn, history: &mut History) {
        let count = self.lsns.iter().filter(|own| **own <= lsn).count();
        history.durable = history.durable.max(self.records_before + count);
    }
}

impl History {
    /// Checks what a master finds: all durable records, perhaps more, in order and once. Takes the
    /// records that are not there out of the history.
    fn check(&mut self, previous: &Previous, generation: u64) {
        assert!(generation > self.generation, "{generation} is used twice");
        self.generation = generation;
        let found = match previous {
            Previous::Nothing => 0,
            Previous::Finished => panic!("the run was not finished"),
            Previous::Unfinished(recovered) => self.check_recovered(recovered),
        };
        assert!(
            found >= self.durable,
            "{found} of {} durable records",
            self.durable
        );
        self.records.truncate(found);
        self.durable = found;
    }

    /// Returns the number of records that were recovered.
    fn check_recovered(&self, recovered: &Recovered) -> usize {
        let base = match recovered.driver_state {
            None => 0,
            Some(_) => usize::from_le_bytes(*recovered.counters.first_chunk().expect("a count")),
        };
        let expected_state =
            (base > 0 || recovered.driver_state.is_some()).then(|| driver_state(base));
        assert_eq!(recovered.driver_state, expected_state);
        let found = base + recovered.records.len();
        assert!(
            found <= self.records.len(),
            "there are records that nobody appended"
        );
        assert_eq!(recovered.records, self.records[base..found]);

        let mut mirror = Mirror::default();
        self.records[..base]
            .iter()
            .for_each(|record| mirror.apply(record));
        let open_tasks: Vec<&StoredTask> = recovered.open_tasks.iter().collect();
        assert_eq!(open_tasks, mirror.open_tasks());
        assert!(recovered.quarantined.iter().eq(mirror.quarantined()));
        let mut failed: Vec<_> = recovered.failed_attempts.iter().collect();
        let mut expected_failed: Vec<_> = mirror.failed_attempts().collect();
        failed.sort_by_key(|failed| failed.task);
        expected_failed.sort_by_key(|failed| failed.task);
        assert_eq!(failed, expected_failed);
        found
    }
}

fn settings() -> Settings {
    Settings {
        retry_min: Duration::from_micros(100),
        retry_max: Duration::from_millis(1),
        ..Settings::new(PROGRAM, RunId([7; 16]))
    }
}

fn observed_callbacks() -> (Callbacks, Receiver<Event>) {
    let (sender, events) = mpsc::channel();
    let notices = sender.clone();
    // The receiver is gone when the test no longer waits.
    let callbacks = Callbacks {
        on_durable: Box::new(move |lsn| drop(sender.send(Event::Durable(lsn)))),
        on_notice: Box::new(move |notice| drop(notices.send(Event::Notice(notice)))),
    };
    (callbacks, events)
}

/// Opens the storage without threads, as far as a master does before its first record.
fn recover(storage: &FaultyStorage) -> Result<Opened, OpenError> {
    recovery::open(storage, &settings())
}

fn recover_valid(storage: &FaultyStorage) -> Opened {
    recover(storage).unwrap_or_else(|error| panic!("{error}"))
}

fn driver_state(records: usize) -> Bytes {
    Bytes::from(format!("driver after {records} records"))
}

fn counters(records: usize) -> Bytes {
    Bytes::copy_from_slice(&records.to_le_bytes())
}

fn task(id: u64) -> StoredTask {
    StoredTask {
        id,
        key: (id % 3) as f64,
        groups: 1 << (id % 5),
        position: 0,
        payload: Bytes::from(format!("payload of task {id}")),
    }
}

fn added(ids: Range<u64>) -> Record {
    Record::TasksAdded {
        tasks: ids.map(task).collect(),
    }
}

fn accepted(id: u64, new_ids: Range<u64>) -> Record {
    Record::Accepted {
        task: id,
        attempt: 1,
        result: Bytes::from(format!("result of task {id}")),
        returned: 0,
        added: new_ids.map(task).collect(),
        stats: TaskStats {
            cpu_us: 5 * id,
            wall_us: 6 * id,
            factor: 0.5,
        },
    }
}

fn failed(id: u64, attempt: u64) -> Record {
    Record::AttemptFailed(FailedAttempt {
        task: id,
        attempt,
        reason: Bytes::from_static(b"host lost"),
    })
}

fn quarantined(id: u64) -> Record {
    Record::Quarantined {
        task: id,
        history: Bytes::from_static(b"four times"),
    }
}
