//! Measures the journal on the disk of a folder: `journal_speed DIR`.
//!
//! Prints the rate of durable records of 100 bytes, the time of one durable record alone, and the
//! times of `append` and of durability while a snapshot of 1,000,000 open tasks is written.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use master_worker::journal::{
    AppendError, Callbacks, Journal, Lsn, Notice, Record, RunId, Settings, StoredTask, TaskStats,
};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

const RECORDS: u64 = 1_000_000;
const SINGLE_RECORDS: u64 = 500;
const OPEN_TASKS: u64 = 1_000_000;
const PAYLOAD_BYTES: usize = 100;
/// Time between two records during the snapshot: a busy master.
const PAUSE: Duration = Duration::from_micros(50);
const PATIENCE: Duration = Duration::from_secs(600);

fn main() -> Result<()> {
    let dir = std::env::args_os()
        .nth(1)
        .context("usage: journal_speed DIR")?;
    let dir = PathBuf::from(dir).join("journal-speed");
    measure_rate(&dir)?;
    measure_single_records(&dir)?;
    measure_snapshot(&dir)
}

fn measure_rate(dir: &Path) -> Result<()> {
    let (journal, _events) = open(dir)?;
    append(&journal, tasks(0..RECORDS))?;
    let start = Instant::now();
    let mut last = Lsn::default();
    for id in 0..RECORDS {
        last = append(&journal, result(id))?;
    }
    ensure!(journal.wait_durable(last, PATIENCE));
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "group commit: {:.0} records/s of {PAYLOAD_BYTES} bytes",
        RECORDS as f64 / seconds
    );
    Ok(journal.finish(PATIENCE)?)
}

fn measure_single_records(dir: &Path) -> Result<()> {
    let (journal, _events) = open(dir)?;
    let mut times = Vec::new();
    for id in 0..SINGLE_RECORDS {
        let start = Instant::now();
        let lsn = append(&journal, result(id))?;
        ensure!(journal.wait_durable(lsn, PATIENCE));
        times.push(start.elapsed());
    }
    print_times("one record, durable", times);
    Ok(journal.finish(PATIENCE)?)
}

fn measure_snapshot(dir: &Path) -> Result<()> {
    let (journal, events) = open(dir)?;
    let lsn = append(&journal, tasks(0..OPEN_TASKS))?;
    ensure!(journal.wait_durable(lsn, PATIENCE));
    let start = Instant::now();
    journal.begin_snapshot(Bytes::new(), Bytes::new())?;
    let (mut append_times, mut sent, mut durable_times) = (Vec::new(), Vec::new(), Vec::new());
    let mut notice = None;
    let mut id = 0;
    while notice.is_none() {
        let before = Instant::now();
        // Ids from all over the tasks: the worst case for the copy.
        let lsn = append(&journal, result(id * 7919 % OPEN_TASKS))?;
        append_times.push(before.elapsed());
        sent.push((lsn, before));
        id += 1;
        while before.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        for event in events.try_iter() {
            match event {
                Event::Durable(lsn, at) => {
                    let count = sent.partition_point(|(own, _)| *own <= lsn);
                    durable_times.extend(sent.drain(..count).map(|(_, sent)| at - sent));
                }
                Event::Notice(new_notice) => notice = Some(new_notice),
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    match notice {
        Some(Notice::SnapshotWritten { tasks, bytes, .. }) => println!(
            "snapshot: {tasks} open tasks, {:.0} MB, {seconds:.1} s",
            bytes as f64 / 1e6
        ),
        other => bail!("{other:?}"),
    }
    print_times("append during the snapshot", append_times);
    print_times("durable during the snapshot", durable_times);
    Ok(journal.finish(PATIENCE)?)
}

enum Event {
    Durable(Lsn, Instant),
    Notice(Notice),
}

fn open(dir: &Path) -> Result<(Journal, Receiver<Event>)> {
    let (sender, events) = mpsc::channel();
    let notices = sender.clone();
    let callbacks = Callbacks {
        // The receiver is gone in measurements that do not need events.
        on_durable: Box::new(move |lsn| drop(sender.send(Event::Durable(lsn, Instant::now())))),
        on_notice: Box::new(move |notice| drop(notices.send(Event::Notice(notice)))),
    };
    let settings = Settings::new("journal_speed 1", RunId([0; 16]));
    let (journal, _) = Journal::open(dir, settings, callbacks)?;
    Ok((journal, events))
}

/// Appends, and waits if the queue is full.
fn append(journal: &Journal, mut record: Record) -> Result<Lsn> {
    loop {
        record = match journal.append(record) {
            Ok(lsn) => return Ok(lsn),
            Err(AppendError::Full(record)) => *record,
            Err(e) => return Err(e.into()),
        };
        ensure!(
            journal.wait_for_room(&record, PATIENCE),
            "the disk does not accept records"
        );
    }
}

fn tasks(ids: std::ops::Range<u64>) -> Record {
    let task = |id| StoredTask {
        id,
        key: id as f64,
        groups: 0,
        position: 0,
        payload: Bytes::from(vec![id as u8; PAYLOAD_BYTES]),
    };
    Record::TasksAdded {
        tasks: ids.map(task).collect(),
    }
}

fn result(id: u64) -> Record {
    Record::Accepted {
        task: id,
        attempt: 1,
        result: Bytes::from(vec![id as u8; PAYLOAD_BYTES]),
        returned: 0,
        added: Vec::new(),
        stats: TaskStats::default(),
    }
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let quantile = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!(
        "{what}: {} times, median {:.1?}, p99 {:.1?}, p99.9 {:.1?}, max {:.1?}",
        times.len(),
        quantile(0.5),
        quantile(0.99),
        quantile(0.999),
        quantile(1.0)
    );
}
