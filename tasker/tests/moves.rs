//! Moving tasks between two taskers on this machine, which stand for two hosts.

mod common;

use common::{Tasker, is_alive, is_root, migration, order, processes_with, sh, tid, wait_until};
use sempa_proto::Micros;
use sempa_proto::migration::{Failure, FileMatch, Refusal, TaskFacts, Usage};
use sempa_proto::tasker::{DumpReport, FromTasker, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// True if tasks can be moved here; otherwise the typed refusal is checked and the reason printed.
fn can_move() -> bool {
    let mut tasker = Tasker::start();
    tasker.run(tid(1), &sh(), &["-c", "sleep 1000"]);
    let result = inspect(&mut tasker, tid(1), migration(1));
    tasker.stop();
    match result {
        Err(Refusal::NoEngine { why, .. }) => {
            eprintln!("nothing can be moved here: {why}");
            assert!(!is_root() || !why.contains("process-id namespaces"), "root can make namespaces");
            false
        }
        other => {
            other.expect("a shell that sleeps can move");
            true
        }
    }
}

/// Compiles one of the test programs.
fn program(dir: &Path, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.c"));
    let out = dir.join(name);
    let done = Command::new("gcc").args(["-O1", "-pthread", "-o"]).arg(&out).arg(source).status().expect("gcc");
    assert!(done.success());
    out
}

/// A script that does something before it becomes the real engine; only for requests, not for `--version`.
fn wrapper(dir: &Path, before: &str) -> PathBuf {
    let real = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"].into_iter().find(|p| Path::new(p).is_file());
    let path = dir.join("criu");
    let real = std::env::var("SEMPA_CRIU").ok().or(real.map(String::from)).unwrap_or_else(|| "criu".into());
    let script = format!("#!/bin/sh\nif [ \"$1\" = swrk ]; then\n{before}\nfi\nexec {real} \"$@\"\n");
    std::fs::write(&path, script).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
    path
}

fn inspect(tasker: &mut Tasker, tid: Tid, migration: MigrationId) -> Result<TaskFacts, Refusal> {
    tasker.send(ToTasker::Inspect { migration, tid });
    tasker.until(&mut Vec::new(), |m| match m {
        FromTasker::Inspected { result, .. } => Some(result.clone()),
        _ => None,
    })
}

fn prepare(tasker: &mut Tasker, tid: Tid, migration: MigrationId, facts: TaskFacts) -> Vec<Refusal> {
    tasker.send(ToTasker::Prepare { migration, tid, facts });
    tasker.until(&mut Vec::new(), |m| match m {
        FromTasker::Prepared { verdict, .. } => Some(verdict.clone()),
        _ => None,
    })
}

/// Everything up to the answer goes to `seen`, so that output is not lost.
fn stop(tasker: &mut Tasker, tid: Tid, migration: MigrationId, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Stop { migration, tid });
    let result = tasker.until(seen, |m| match m {
        FromTasker::Stopped { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Ok(()));
}

fn dump(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    dir: &Path,
    seen: &mut Vec<FromTasker>,
) -> Result<DumpReport, Failure> {
    tasker.send(ToTasker::Dump { migration, tid, dir: dir.into() });
    dumped(tasker, seen)
}

fn dumped(tasker: &mut Tasker, seen: &mut Vec<FromTasker>) -> Result<DumpReport, Failure> {
    tasker.until(seen, |m| match m {
        FromTasker::Dumped { result, .. } => Some(result.clone()),
        _ => None,
    })
}

fn restore(tasker: &mut Tasker, tid: Tid, migration: MigrationId, dir: &Path) -> Result<i32, Failure> {
    tasker.send(ToTasker::Restore { migration, tid, dir: dir.into() });
    tasker.until(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

fn kill_moved(tasker: &mut Tasker, tid: Tid, migration: MigrationId, seen: &mut Vec<FromTasker>) -> Usage {
    tasker.send(ToTasker::KillMoved { migration, tid });
    tasker.until(seen, |m| match m {
        FromTasker::SourceGone { used, .. } => Some(*used),
        _ => None,
    })
}

fn run(tasker: &mut Tasker, migration: MigrationId, used: Usage, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Run { migration, used });
    let result = tasker.until(seen, |m| match m {
        FromTasker::Ran { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Ok(()));
}

fn continue_task(tasker: &mut Tasker, tid: Tid, migration: MigrationId, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Continue { migration, tid });
    tasker.until(seen, |m| matches!(m, FromTasker::Continued { .. }).then_some(()));
}

fn discard(tasker: &mut Tasker, migration: MigrationId, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Discard { migration });
    tasker.until(seen, |m| matches!(m, FromTasker::Discarded { .. }).then_some(()));
}

fn output_of(seen: &[FromTasker], tid: Tid) -> Vec<u8> {
    let chunks = seen.iter().filter_map(|m| match m {
        FromTasker::Output { tid: t, bytes } if *t == tid => Some(bytes.as_slice()),
        _ => None,
    });
    chunks.flatten().copied().collect()
}

fn lines(text: &[u8]) -> usize {
    text.iter().filter(|b| **b == b'\n').count()
}

/// Checks that the counter's output has every number once and in order.
fn assert_no_line_lost(output: &[u8]) {
    for (expected, line) in String::from_utf8_lossy(output).lines().enumerate() {
        assert_eq!(line, expected.to_string(), "line {expected}");
    }
}

/// A whole move; returns how long the task stood still.
fn move_task(from: &mut Tasker, to: &mut Tasker, tid: Tid, number: u64, output: &mut Vec<u8>) -> Duration {
    let id = migration(number);
    let images = tempfile::tempdir().expect("dir");
    let dir = images.path().join("images");
    let mut seen = Vec::new();
    from.send(ToTasker::Inspect { migration: id, tid });
    let facts = from.until(&mut seen, |m| match m {
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
    assert_eq!(std::fs::metadata(&dir).expect("dir").permissions().mode() & 0o777, 0o700);
    restore(to, tid, id, &dir).expect("a restore");
    let used = kill_moved(from, tid, id, &mut seen);
    assert!(used.user + used.system > Micros(0));
    let mut seen_there = Vec::new();
    run(to, id, used, &mut seen_there);
    let still = begin.elapsed();
    eprintln!("move {number}: dump {dumped:?}, {} bytes, still for {still:?}", report.bytes);
    let exits = |m: &FromTasker| matches!(m, FromTasker::Exited { .. });
    assert!(!seen.iter().any(exits), "a moved task is not reported as ended");
    output.extend(output_of(&seen, tid));
    output.extend(output_of(&seen_there, tid));
    still
}

#[test]
fn a_counter_with_threads_and_pipes_moves_back_and_forth_without_losing_a_line() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let counter = program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &counter, &[]);
    let mut output = Vec::new();
    here.output_until(tid(1), &mut output, |text| lines(text) > 100);
    for round in 0..3 {
        move_task(&mut here, &mut there, tid(1), round * 2 + 1, &mut output);
        let more = lines(&output) + 200;
        there.output_until(tid(1), &mut output, |text| lines(text) > more);
        move_task(&mut there, &mut here, tid(1), round * 2 + 2, &mut output);
        let more = lines(&output) + 200;
        here.output_until(tid(1), &mut output, |text| lines(text) > more);
    }
    here.send(ToTasker::Signal { tid: tid(1), signal: libc::SIGTERM });
    let (rest, status, used) = here.to_the_end(tid(1));
    output.extend(rest);
    assert_eq!(status, libc::SIGTERM);
    assert!(used.user + used.system > Micros(0), "{used:?}");
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
    assert_eq!(processes_with(counter.to_str().expect("text")), []);
}
