//! Functions for the steps of a migration, and for a counter task whose output shows any loss.
#![allow(dead_code, unreachable_pub)] // Each test file uses its own part.

use super::{Tasker, can_make_namespaces, migration, tid, wait_until};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Usage};
use sempa_proto::tasker::{DumpReport, FromTasker, ToTasker};
use sempa_proto::{Micros, MigrationId, Tid};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Panics if no task can be migrated on this machine.
///
/// The check does not start a tasker, because the probe of the engine in the tasker takes longer
/// than many tests.
///
/// # Panics
/// CRIU is missing, or the kernel permits no namespaces.
pub fn require_migration() {
    assert!(
        can_make_namespaces(),
        "cannot run here: the kernel grants no process-id namespaces"
    );
    let engine = real_engine();
    let answers = Command::new(&engine)
        .arg("--version")
        .output()
        .is_ok_and(|done| done.status.success());
    assert!(answers, "cannot run here: {engine} is missing or broken");
}

/// Returns the path of the CRIU that a tasker would use, or its name.
fn real_engine() -> String {
    let usual = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"]
        .into_iter()
        .find(|path| Path::new(path).is_file());
    std::env::var("SEMPA_CRIU")
        .ok()
        .or(usual.map(String::from))
        .unwrap_or_else(|| "criu".into())
}

/// Compiles the test program `name` and returns its path.
pub fn compile_program(dir: &Path, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(format!("{name}.c"));
    let out = dir.join(name);
    let done = Command::new("gcc")
        .args(["-O1", "-pthread", "-o"])
        .arg(&out)
        .arg(source)
        .status()
        .expect("gcc");
    assert!(done.success());
    out
}

/// Writes a script that runs `before` and then executes the real engine. `before` runs only for
/// requests, not for `--version`.
pub fn write_engine_wrapper(dir: &Path, before: &str) -> PathBuf {
    engine_script(
        dir,
        &format!("if [ \"$1\" = swrk ]; then\n{before}\nfi\nexec"),
    )
}

/// Writes a script that executes the real engine with additional environment variables (`NAME=VALUE
/// …`).
pub fn write_engine_wrapper_with_env(dir: &Path, variables: &str) -> PathBuf {
    engine_script(dir, &format!("exec env {variables}"))
}

fn engine_script(dir: &Path, begin: &str) -> PathBuf {
    let path = dir.join("criu");
    let real = real_engine();
    let script = format!("#!/bin/sh\n{begin} {real} \"$@\"\n");
    std::fs::write(&path, script).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
    path
}

pub fn inspect(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
) -> Result<TaskFacts, Refusal> {
    tasker.send(ToTasker::Inspect { migration, tid });
    tasker.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Inspected { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn prepare(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    facts: TaskFacts,
) -> Vec<Refusal> {
    tasker.send(ToTasker::Prepare {
        migration,
        tid,
        facts,
    });
    tasker.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Prepared { verdict, .. } => Some(verdict.clone()),
        _ => None,
    })
}

/// Stops the task. Messages that arrive before the answer are added to `seen`, so that no output is
/// lost.
pub fn stop(tasker: &mut Tasker, tid: Tid, migration: MigrationId, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Stop {
        migration,
        tid,
        memory_write: None,
    });
    let result = tasker.wait_for(seen, |m| match m {
        FromTasker::Stopped { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Ok(()));
}

pub fn dump(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    dir: &Path,
    seen: &mut Vec<FromTasker>,
) -> Result<DumpReport, Failure> {
    tasker.send(ToTasker::Dump {
        migration,
        tid,
        dir: dir.into(),
        memory_socket: None,
    });
    wait_until_dumped(tasker, seen)
}

pub fn wait_until_dumped(
    tasker: &mut Tasker,
    seen: &mut Vec<FromTasker>,
) -> Result<DumpReport, Failure> {
    tasker.wait_for(seen, |m| match m {
        FromTasker::Dumped { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn restore(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    dir: &Path,
) -> Result<i32, Failure> {
    tasker.send(ToTasker::Restore {
        migration,
        tid,
        dir: dir.into(),
        memory_write: None,
        memory_socket: None,
    });
    tasker.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn kill_migrated(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    seen: &mut Vec<FromTasker>,
) -> Usage {
    tasker.send(ToTasker::KillSource { migration, tid });
    tasker.wait_for(seen, |m| match m {
        FromTasker::SourceGone { used, .. } => Some(*used),
        _ => None,
    })
}

pub fn run(tasker: &mut Tasker, migration: MigrationId, used: Usage, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Run {
        migration,
        used,
        paused: false,
    });
    let result = tasker.wait_for(seen, |m| match m {
        FromTasker::Running { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Ok(()));
}

pub fn continue_task(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    seen: &mut Vec<FromTasker>,
) {
    tasker.send(ToTasker::AbortMigration { migration, tid });
    tasker.wait_for(seen, |m| {
        matches!(m, FromTasker::MigrationAborted { .. }).then_some(())
    });
}

pub fn discard(tasker: &mut Tasker, migration: MigrationId, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Discard { migration });
    tasker.wait_for(seen, |m| {
        matches!(m, FromTasker::Discarded { .. }).then_some(())
    });
}

pub fn output_of(seen: &[FromTasker], tid: Tid) -> Vec<u8> {
    let chunks = seen.iter().filter_map(|m| match m {
        FromTasker::Output { tid: t, bytes } if *t == tid => Some(bytes.as_slice()),
        _ => None,
    });
    chunks.flatten().copied().collect()
}

pub fn count_lines(text: &[u8]) -> usize {
    text.iter().filter(|b| **b == b'\n').count()
}

/// Asserts that the counter's output contains each number once and in order.
pub fn assert_no_line_lost(output: &[u8]) {
    let text = String::from_utf8_lossy(output);
    let all: Vec<&str> = text.lines().collect();
    for (expected, line) in all.iter().enumerate() {
        let around = &all[expected.saturating_sub(3)..all.len().min(expected + 4)];
        assert_eq!(
            *line,
            expected.to_string(),
            "line {expected} of {}: {around:?}",
            all.len()
        );
    }
}

/// Migrates a task and returns the duration for which it was stopped.
pub fn migrate_task(
    from: &mut Tasker,
    to: &mut Tasker,
    tid: Tid,
    number: u64,
    output: &mut Vec<u8>,
) -> Duration {
    migrate_task_while(from, to, tid, number, output, &mut || {}).stopped_duration
}

/// Measurements of a migration.
#[derive(Clone, Copy, Debug)]
pub struct MigrationMeasurements {
    /// Duration for which the task was stopped.
    pub stopped_duration: Duration,
    /// Total length of the task's images in bytes.
    pub image_bytes: u64,
}

/// Migrates a task. Calls `meanwhile` while the task exists only as images.
pub fn migrate_task_while(
    from: &mut Tasker,
    to: &mut Tasker,
    tid: Tid,
    number: u64,
    output: &mut Vec<u8>,
    meanwhile: &mut dyn FnMut(),
) -> MigrationMeasurements {
    let id = migration(number);
    let images = tempfile::tempdir().expect("dir");
    let dir = images.path().join("images");
    let mut seen = Vec::new();
    from.send(ToTasker::Inspect { migration: id, tid });
    let facts = from.wait_for(&mut seen, |m| match m {
        FromTasker::Inspected { result, .. } => Some(result.clone()),
        _ => None,
    });
    let facts = facts.expect("it can move");
    assert_eq!(prepare(to, tid, id, facts), []);
    let begin = Instant::now();
    stop(from, tid, id, &mut seen);
    let report = dump(from, tid, id, &dir, &mut seen).expect("a dump");
    let dumped = begin.elapsed();
    assert!(report.files > 5 && report.bytes > 4096, "{report:?}");
    assert_eq!(
        std::fs::metadata(&dir).expect("dir").permissions().mode() & 0o777,
        0o700
    );
    meanwhile();
    restore(to, tid, id, &dir).expect("a restore");
    let used = kill_migrated(from, tid, id, &mut seen);
    assert!(used.user + used.system > Micros(0));
    let mut seen_there = Vec::new();
    run(to, id, used, &mut seen_there);
    let still = begin.elapsed();
    eprintln!(
        "move {number}: dump {dumped:?}, {} bytes, still for {still:?}",
        report.bytes
    );
    let exits = |m: &FromTasker| matches!(m, FromTasker::Exited { .. });
    assert!(
        !seen.iter().any(exits),
        "a moved task is not reported as ended"
    );
    output.extend(output_of(&seen, tid));
    output.extend(output_of(&seen_there, tid));
    MigrationMeasurements {
        stopped_duration: still,
        image_bytes: report.bytes,
    }
}

/// Starts a counter and stops it for a migration.
pub fn start_stopped_counter(tasker: &mut Tasker, dir: &Path, output: &mut Vec<u8>) -> i32 {
    let pid = tasker.run(tid(1), &compile_program(dir, "counter"), &[]);
    tasker.wait_for_output(tid(1), output, |text| count_lines(text) > 50);
    let mut seen = Vec::new();
    stop(tasker, tid(1), migration(1), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    pid
}

/// Continues the counter at the source, and asserts that no line is lost.
pub fn assert_counter_continues(tasker: &mut Tasker, output: &mut Vec<u8>) {
    let mut seen = Vec::new();
    continue_task(tasker, tid(1), migration(1), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    let more = count_lines(output) + 200;
    tasker.wait_for_output(tid(1), output, |text| count_lines(text) > more);
    assert_no_line_lost(output);
}

/// Waits until the wrapper script has written its PID to the file `path`, and returns the PID.
pub fn wait_for_pid_file(path: &Path) -> i32 {
    let read = || std::fs::read_to_string(path).ok()?.trim().parse().ok();
    wait_until("the engine runs", || read().is_some());
    read().expect("just seen")
}

/// Writes a wrapper script for the engine that writes its PID and, while the file `wait` exists,
/// waits to be killed.
pub fn write_waiting_wrapper(dir: &Path) -> PathBuf {
    let d = dir.display();
    write_engine_wrapper(
        dir,
        &format!(
            "if [ -e {d}/wait ]; then echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid; exec sleep 14142; fi"
        ),
    )
}

pub fn make_wrapper_wait(dir: &Path) {
    std::fs::write(dir.join("wait"), "").expect("write");
}

pub fn make_wrapper_run(dir: &Path) {
    std::fs::remove_file(dir.join("wait")).expect("remove");
    let _ = std::fs::remove_file(dir.join("pid"));
}
