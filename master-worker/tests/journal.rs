//! The journal in a real folder: a process that appends is killed again and again.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use master_worker::journal::{
    Callbacks, Journal, Notice, Previous, Record, Recovered, RunId, Settings, StoredTask,
};
use std::ffi::OsStr;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Environment variable that makes the test program append to the journal in this folder.
const CHILD_DIR_ENV: &str = "SEMPA_TEST_JOURNAL";
const KILLS: u32 = 20;
/// Acknowledgements that the test waits for before a kill, at most.
const LINES_MAX: u64 = 120;
/// Records between two snapshots of the child process. Some kills meet a snapshot.
const SNAPSHOT_INTERVAL: u64 = 300;

/// Code of the child process that another test starts; without the folder in its environment the
/// function returns immediately. Appends task after task, and prints each durable position.
#[test]
#[ignore = "child process of another test"]
fn subprocess_appends_until_it_is_killed() -> Result<()> {
    let Some(dir) = std::env::var_os(CHILD_DIR_ENV) else {
        return Ok(());
    };
    let callbacks = Callbacks {
        on_durable: Box::new(|lsn| {
            let mut output = std::io::stdout().lock();
            // The test has closed the pipe after the kill.
            let _ = writeln!(output, "durable {lsn}").and_then(|()| output.flush());
        }),
        on_notice: Box::new(|notice| {
            if !matches!(notice, Notice::SnapshotWritten { .. }) {
                eprintln!("{notice}");
            }
        }),
    };
    let (journal, previous) = open(&dir, callbacks)?;
    let mut next_task = match previous {
        Previous::Unfinished(recovered) => task_count(&recovered)?,
        Previous::Nothing | Previous::Finished => 0,
    };
    loop {
        let record = Record::TasksAdded {
            tasks: vec![task(next_task)],
        };
        let lsn = match journal.append(record) {
            Ok(lsn) => lsn,
            Err(e) => bail!("task {next_task}: {e}"),
        };
        // The test maps positions to tasks.
        println!("task {next_task} at {lsn}");
        next_task += 1;
        if next_task.is_multiple_of(SNAPSHOT_INTERVAL) && !journal.is_snapshot_pending() {
            let counters = Bytes::copy_from_slice(&next_task.to_le_bytes());
            journal.begin_snapshot(Bytes::new(), counters)?;
        }
        // A few records share a commit.
        if next_task.is_multiple_of(3) {
            ensure!(journal.wait_durable(lsn, Duration::MAX));
        }
    }
}

/// Every task whose record was reported durable is there after a SIGKILL, in order and once.
#[test]
fn killed_process_leaves_all_acknowledged_records() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("run");
    let random = || RandomState::new().build_hasher().finish();
    let mut last_generation = 0;
    for round in 1..=KILLS {
        let durable_tasks = run_child_until_kill(&dir, random() % LINES_MAX)?;
        let (journal, previous) = open(dir.as_os_str(), silent_callbacks())?;
        let Previous::Unfinished(recovered) = previous else {
            bail!("round {round}: {previous:?} instead of an unfinished run");
        };
        let found = task_count(&recovered)?;
        ensure!(
            found >= durable_tasks,
            "round {round}: {found} tasks were recovered, {durable_tasks} were durable"
        );
        ensure!(journal.generation() > last_generation);
        last_generation = journal.generation();
    }
    let (journal, _) = open(dir.as_os_str(), silent_callbacks())?;
    journal.finish(Duration::from_secs(60))?;
    ensure!(!dir.exists());
    Ok(())
}

/// Runs a child process, kills it after some acknowledgements, and returns the number of tasks that
/// were durable then.
fn run_child_until_kill(dir: &Path, lines: u64) -> Result<u64> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--exact", "--ignored", "--nocapture"])
        .arg("subprocess_appends_until_it_is_killed")
        .env(CHILD_DIR_ENV, dir)
        .stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let pipe = child.stdout.take().context("the output is a pipe")?;
    let (mut output, mut line) = (BufReader::new(pipe), String::new());
    let (mut durable_lines, mut durable) = (0, 0);
    let mut tasks_at = Vec::new();
    while output.read_line(&mut line)? > 0 {
        // The kill may cut the last line.
        let Some(whole_line) = line.strip_suffix('\n') else {
            break;
        };
        match whole_line.split(' ').collect::<Vec<_>>()[..] {
            ["durable", lsn] => {
                durable = durable.max(lsn.parse()?);
                durable_lines += 1;
                if durable_lines == lines + 1 {
                    // Lines that are in the pipe are still read.
                    child.kill()?;
                }
            }
            ["task", task, "at", lsn] => tasks_at.push((task.parse::<u64>()?, lsn.parse::<u64>()?)),
            // The test harness prints other lines.
            _ => {}
        }
        line.clear();
    }
    child.wait()?;
    ensure!(
        durable_lines > lines,
        "the child process has ended by itself"
    );
    let is_durable = |(_, lsn): &&(u64, u64)| *lsn <= durable;
    let durable_tasks = tasks_at.iter().filter(is_durable).map(|(task, _)| task + 1);
    Ok(durable_tasks.max().unwrap_or(0))
}

/// Returns the number of tasks after a check that they are those from 0 on.
fn task_count(recovered: &Recovered) -> Result<u64> {
    let mut tasks = recovered.open_tasks.clone();
    for record in &recovered.records {
        match record {
            Record::TasksAdded { tasks: new_tasks } => tasks.extend(new_tasks.clone()),
            other => bail!("{other:?} was never appended"),
        }
    }
    for (id, found) in (0..).zip(&tasks) {
        ensure!(*found == task(id), "{found:?} instead of task {id}");
    }
    if let Some(counters) = recovered.counters.first_chunk() {
        ensure!(u64::from_le_bytes(*counters) == recovered.open_tasks.len() as u64);
    }
    Ok(tasks.len() as u64)
}

fn task(id: u64) -> StoredTask {
    StoredTask {
        id,
        key: 0.0,
        groups: 1,
        position: 0,
        payload: Bytes::from(vec![id as u8; (id % 500) as usize]),
    }
}

fn open(dir: &OsStr, callbacks: Callbacks) -> Result<(Journal, Previous)> {
    let settings = Settings::new("journal test", RunId([1; 16]));
    Ok(Journal::open(Path::new(dir), settings, callbacks)?)
}

fn silent_callbacks() -> Callbacks {
    Callbacks {
        on_durable: Box::new(|_| {}),
        on_notice: Box::new(|notice| eprintln!("{notice}")),
    }
}
