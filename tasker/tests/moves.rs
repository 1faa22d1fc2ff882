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
    let text = String::from_utf8_lossy(output);
    let all: Vec<&str> = text.lines().collect();
    for (expected, line) in all.iter().enumerate() {
        let around = &all[expected.saturating_sub(3)..all.len().min(expected + 4)];
        assert_eq!(*line, expected.to_string(), "line {expected} of {}: {around:?}", all.len());
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
    let (rest, status, used) = here.follow_to_the_end(tid(1));
    output.extend(rest);
    assert_eq!(status, libc::SIGTERM);
    assert!(used.user + used.system > Micros(0), "{used:?}");
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
    assert_eq!(processes_with(counter.to_str().expect("text")), []);
}

#[test]
fn two_hundred_mebibytes_of_memory_move_intact() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let counter = program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &counter, &["200"]);
    let mut output = Vec::new();
    here.output_until(tid(1), &mut output, |text| lines(text) > 10);
    move_task(&mut here, &mut there, tid(1), 1, &mut output);
    let more = lines(&output) + 200;
    there.output_until(tid(1), &mut output, |text| lines(text) > more);
    assert_no_line_lost(&output);
    there.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, used) = there.follow_to_the_end(tid(1));
    assert_eq!(status, libc::SIGKILL);
    assert!(used.resident_max_bytes > 200 << 20, "what it used before counts: {used:?}");
    here.stop();
    there.stop();
}

#[test]
fn children_of_a_task_move_with_it_and_its_end_is_reported_from_there() {
    if !can_move() {
        return;
    }
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let script = "sleep 57721 & echo ready; while kill -0 $! 2>/dev/null; do wait $!; done; echo child gone; exit 9";
    here.run(tid(1), &sh(), &["-c", script]);
    let mut output = Vec::new();
    here.output_until(tid(1), &mut output, |text| text == b"ready\n");
    move_task(&mut here, &mut there, tid(1), 1, &mut output);
    let children = processes_with("sleep 57721");
    let sleeper = children
        .iter()
        .copied()
        .find(|p| std::fs::read_link(format!("/proc/{p}/exe")).is_ok_and(|e| e.ends_with("sleep")));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(sleeper.expect("it moved")), nix::sys::signal::SIGTERM)
        .expect("kill");
    let (rest, status, _) = there.follow_to_the_end(tid(1));
    // Some shells say how the child ended.
    assert_eq!((rest.ends_with(b"child gone\n"), status), (true, 9 << 8), "{}", String::from_utf8_lossy(&rest));
    here.stop();
    there.stop();
    assert_eq!(processes_with("sleep 57721"), []);
}

/// Starts a counter and stops it for a move; the rest of the story is the caller's.
fn stopped_counter(tasker: &mut Tasker, dir: &Path, output: &mut Vec<u8>) -> i32 {
    let pid = tasker.run(tid(1), &program(dir, "counter"), &[]);
    tasker.output_until(tid(1), output, |text| lines(text) > 50);
    let mut seen = Vec::new();
    stop(tasker, tid(1), migration(1), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    pid
}

/// The counter goes on where it is, with nothing lost.
fn goes_on(tasker: &mut Tasker, output: &mut Vec<u8>) {
    let mut seen = Vec::new();
    continue_task(tasker, tid(1), migration(1), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    let more = lines(output) + 200;
    tasker.output_until(tid(1), output, |text| lines(text) > more);
    assert_no_line_lost(output);
}

/// Waits until the wrapper has written its process number there.
fn pid_in(path: &Path) -> i32 {
    let read = || std::fs::read_to_string(path).ok()?.trim().parse().ok();
    wait_until("the engine runs", || read().is_some());
    read().expect("just seen")
}

/// A wrapper that, while the file `wait` exists in the directory, writes its process number and waits to be killed.
fn waiting_wrapper(dir: &Path) -> PathBuf {
    let d = dir.display();
    wrapper(
        dir,
        &format!("if [ -e {d}/wait ]; then echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid; exec sleep 14142; fi"),
    )
}

fn armed(dir: &Path) {
    std::fs::write(dir.join("wait"), "").expect("write");
}

fn disarmed(dir: &Path) {
    std::fs::remove_file(dir.join("wait")).expect("remove");
    let _ = std::fs::remove_file(dir.join("pid"));
}

#[test]
fn a_killed_dump_leaves_the_task_whole_and_a_later_move_succeeds() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let engine = waiting_wrapper(dir.path());
    let mut here = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let mut there = Tasker::start();
    let mut output = Vec::new();
    // Wait for the trial, which uses the wrapper too.
    here.run(tid(9), &sh(), &["-c", "sleep 1000"]);
    inspect(&mut here, tid(9), migration(9)).expect("the engine works");
    stopped_counter(&mut here, dir.path(), &mut output);
    armed(dir.path());
    here.send(ToTasker::Dump { migration: migration(1), tid: tid(1), dir: dir.path().join("images") });
    let engine = pid_in(&dir.path().join("pid"));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(engine), nix::sys::signal::SIGKILL).expect("kill");
    assert_eq!(dumped(&mut here, &mut Vec::new()), Err(Failure::Killed { signal: 9 }));
    disarmed(dir.path());
    goes_on(&mut here, &mut output);
    move_task(&mut here, &mut there, tid(1), 2, &mut output);
    let more = lines(&output) + 100;
    there.output_until(tid(1), &mut output, |text| lines(text) > more);
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
}

#[test]
fn a_dump_that_hangs_is_tried_once_more() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let engine = waiting_wrapper(dir.path());
    let mut here = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let mut output = Vec::new();
    here.run(tid(9), &sh(), &["-c", "sleep 1000"]);
    inspect(&mut here, tid(9), migration(9)).expect("the engine works");
    stopped_counter(&mut here, dir.path(), &mut output);
    armed(dir.path());
    here.send(ToTasker::Dump { migration: migration(1), tid: tid(1), dir: dir.path().join("images") });
    pid_in(&dir.path().join("pid"));
    disarmed(dir.path());
    assert!(dumped(&mut here, &mut Vec::new()).expect("the second attempt works").bytes > 0);
    goes_on(&mut here, &mut output);
    here.stop();
}

/// Bytes of memory that a dump has written so far.
fn pages_written(images: &Path) -> u64 {
    let files = std::fs::read_dir(images).into_iter().flatten().flatten();
    let pages = files.filter(|f| f.file_name().to_string_lossy().starts_with("pages-"));
    pages.filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum()
}

#[test]
fn the_engine_killed_while_it_writes_memory_does_no_harm() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let d = dir.path().display().to_string();
    let engine = wrapper(dir.path(), &format!("echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid"));
    let mut here = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    here.run(tid(9), &sh(), &["-c", "sleep 1000"]);
    inspect(&mut here, tid(9), migration(9)).expect("the engine works");
    let mut output = Vec::new();
    let pid = here.run(tid(1), &program(dir.path(), "counter"), &["150"]);
    here.output_until(tid(1), &mut output, |text| lines(text) > 10);
    for (number, bytes) in [2 << 20, 20 << 20, 80 << 20].into_iter().enumerate() {
        let id = migration(number as u64 + 1);
        let images = dir.path().join(format!("images-{number}"));
        let mut seen = Vec::new();
        stop(&mut here, tid(1), id, &mut seen);
        std::fs::remove_file(dir.path().join("pid")).expect("an engine ran before");
        here.send(ToTasker::Dump { migration: id, tid: tid(1), dir: images.clone() });
        let engine = pid_in(&dir.path().join("pid"));
        wait_until("it writes", || pages_written(&images) >= bytes || !is_alive(engine));
        // If it was quicker than we, the dump is good and there is nothing to kill.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(engine), nix::sys::signal::SIGKILL);
        let result = dumped(&mut here, &mut seen);
        assert!(result.is_ok() || result == Err(Failure::Killed { signal: 9 }), "{result:?}");
        assert!(is_alive(pid));
        continue_task(&mut here, tid(1), id, &mut seen);
        output.extend(output_of(&seen, tid(1)));
        let more = lines(&output) + 50;
        here.output_until(tid(1), &mut output, |text| lines(text) > more);
        assert_no_line_lost(&output);
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        assert!(status.contains("SigBlk:\t0000000000000000"), "signals stay blocked: {status}");
    }
    here.stop();
}

#[test]
fn a_move_called_off_during_the_dump_ends_the_engine_and_the_task_goes_on() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let engine = waiting_wrapper(dir.path());
    let mut here = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    here.run(tid(9), &sh(), &["-c", "sleep 1000"]);
    inspect(&mut here, tid(9), migration(9)).expect("the engine works");
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    armed(dir.path());
    here.send(ToTasker::Dump { migration: migration(1), tid: tid(1), dir: dir.path().join("images") });
    let engine = pid_in(&dir.path().join("pid"));
    here.send(ToTasker::Continue { migration: migration(1), tid: tid(1) });
    assert!(matches!(dumped(&mut here, &mut Vec::new()), Err(Failure::CalledOff(_))));
    assert!(!is_alive(engine));
    goes_on(&mut here, &mut output);
    here.stop();
}

#[test]
fn a_killed_restore_leaves_nothing_and_the_source_goes_on() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let engine = waiting_wrapper(dir.path());
    let mut here = Tasker::start();
    let mut there = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    assert_eq!(prepare(&mut there, tid(1), migration(1), facts_of_this_host()), []);
    armed(dir.path());
    there.send(ToTasker::Restore { migration: migration(1), tid: tid(1), dir: images.clone() });
    let engine = pid_in(&dir.path().join("pid"));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(engine), nix::sys::signal::SIGKILL).expect("kill");
    let result = there.until(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    disarmed(dir.path());
    assert_eq!(counters(dir.path()).len(), 1, "only the source is left");
    goes_on(&mut here, &mut output);
    here.stop();
    there.stop();
}

#[test]
fn a_held_copy_can_be_discarded_and_the_source_goes_on() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    assert!(is_alive(copy));
    let mut seen = Vec::new();
    discard(&mut there, migration(1), &mut seen);
    assert!(!is_alive(copy) && output_of(&seen, tid(1)).is_empty());
    goes_on(&mut here, &mut output);
    here.stop();
    there.stop();
}

#[test]
fn a_held_copy_needs_no_engine_and_is_reported_when_it_is_killed() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let d = dir.path().display().to_string();
    let engine = wrapper(dir.path(), &format!("echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid"));
    let mut here = Tasker::start();
    let mut there = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    assert_eq!(prepare(&mut there, tid(1), migration(1), facts_of_this_host()), []);
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    let engine = pid_in(&dir.path().join("pid"));
    assert!(!is_alive(engine), "an engine that is killed from now on could take the only copy along");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(copy), nix::sys::signal::SIGKILL).expect("kill");
    let result = there.until(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(result, Err(Failure::Engine(_))), "{result:?}");
    assert!(!is_alive(copy));
    there.send(ToTasker::Run { migration: migration(1), used: Usage::default() });
    let ran = there.until(&mut Vec::new(), |m| match m {
        FromTasker::Ran { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(ran.is_err());
    goes_on(&mut here, &mut output);
    here.stop();
    there.stop();
}

#[test]
fn damaged_images_fail_in_time_and_leave_nothing() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    let pages = images.join("pages-1.img");
    let length = std::fs::metadata(&pages).expect("pages").len();
    std::fs::File::options().write(true).open(&pages).expect("open").set_len(length - 4096).expect("cut");
    let cut = restore(&mut there, tid(1), migration(1), &images);
    assert!(matches!(&cut, Err(Failure::Images(why)) if why.contains("pages-1.img")), "{cut:?}");
    // In full length again but with another file destroyed, only the engine can notice.
    std::fs::File::options().write(true).open(&pages).expect("open").set_len(length).expect("grow");
    let core = images.join("core-2.img");
    let bytes = std::fs::metadata(&core).expect("core").len() as usize;
    std::fs::write(&core, vec![0u8; bytes]).expect("write");
    let begin = Instant::now();
    let bad = restore(&mut there, tid(1), migration(2), &images);
    assert!(matches!(&bad, Err(Failure::Engine(why)) if why.starts_with("Error")), "{bad:?}");
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(counters(dir.path()).len(), 1, "only the source is left");
    goes_on(&mut here, &mut output);
    here.stop();
    there.stop();
}

#[test]
fn an_engine_that_hangs_is_ended_at_its_deadline() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let engine = waiting_wrapper(dir.path());
    let mut here = Tasker::start();
    let mut there = Tasker::start_with(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    assert_eq!(prepare(&mut there, tid(1), migration(1), facts_of_this_host()), []);
    armed(dir.path());
    let result = restore(&mut there, tid(1), migration(1), &images);
    assert!(matches!(result, Err(Failure::Deadline { .. })), "{result:?}");
    assert!(!is_alive(pid_in(&dir.path().join("pid"))));
    disarmed(dir.path());
    goes_on(&mut here, &mut output);
    here.stop();
    there.stop();
}

#[test]
fn a_tasker_killed_during_a_move_leaves_no_process() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let mut output = Vec::new();
    stopped_counter(&mut here, dir.path(), &mut output);
    let images = dir.path().join("images");
    dump(&mut here, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    there.child.kill().expect("kill");
    wait_until("the held copy is gone", || !is_alive(copy));
    here.child.kill().expect("kill");
    wait_until("the stopped source is gone", || counters(dir.path()).is_empty());
    wait_until("the engine is gone", || processes_with(&format!("criu swrk {}", there.child.id())).is_empty());
}

#[test]
fn a_task_that_ends_while_it_is_stopped_fails_the_move_and_is_reported() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let mut here = Tasker::start();
    stopped_counter(&mut here, dir.path(), &mut Vec::new());
    // A signal waits until the task goes on; the daemon's order to kill does not.
    here.send(ToTasker::Signal { tid: tid(1), signal: libc::SIGCONT });
    here.send(ToTasker::Kill { tid: tid(1) });
    assert_eq!(here.follow_to_the_end(tid(1)).1, libc::SIGKILL);
    let result = dump(&mut here, tid(1), migration(1), &dir.path().join("images"), &mut Vec::new());
    assert_eq!(result, Err(Failure::TaskEnded));
    continue_task(&mut here, tid(1), migration(1), &mut Vec::new());
    here.stop();
}

#[test]
fn signals_for_a_stopped_task_wait_until_it_goes_on() {
    if !can_move() {
        return;
    }
    let mut here = Tasker::start();
    here.run(tid(1), &sh(), &["-c", "trap 'echo got it; exit 4' TERM; echo ready; while :; do sleep 0.01; done"]);
    here.output_until(tid(1), &mut Vec::new(), |text| text == b"ready\n");
    stop(&mut here, tid(1), migration(1), &mut Vec::new());
    here.send(ToTasker::Signal { tid: tid(1), signal: libc::SIGTERM });
    continue_task(&mut here, tid(1), migration(1), &mut Vec::new());
    let (output, status, _) = here.follow_to_the_end(tid(1));
    assert_eq!((String::from_utf8_lossy(&output).as_ref(), status), ("got it\n", 4 << 8));
    here.stop();
}

#[test]
fn what_does_not_survive_a_move_is_refused_by_name() {
    if !can_move() {
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    let mut here = Tasker::start();
    let holder = program(dir.path(), "holder");
    let cases = [
        ("sysv", "System V shared memory"),
        ("tcp", "a TCP connection to 127.0.0.1:"),
        ("orphan", "a background process"),
        ("lock", "a lock on the file"),
        ("pty", "the controlling end of a pseudo terminal"),
        ("mqueue", "the POSIX message queue"),
        ("cwd", "a working directory that was removed"),
    ];
    for (number, (what, expected)) in cases.into_iter().enumerate() {
        let tid = tid(number as u32 + 1);
        let scratch = dir.path().join(what);
        here.run(tid, &holder, &[what, scratch.to_str().expect("text")]);
        let mut said = Vec::new();
        here.output_until(tid, &mut said, |text| text.ends_with(b"\n"));
        let result = inspect(&mut here, tid, migration(1));
        match (said.as_slice(), what) {
            (b"unable\n", _) => eprintln!("{what}: not possible on this machine"),
            // Both ends inside the task: that one travels.
            (_, "pty") => assert!(result.is_ok(), "{result:?}"),
            _ => assert!(
                matches!(&result, Err(Refusal::Holds { what }) if what.contains(expected)),
                "{what}: {result:?}"
            ),
        }
        here.send(ToTasker::Kill { tid });
        here.follow_to_the_end(tid);
    }
    here.stop();
}

#[test]
fn a_target_that_lacks_something_says_so_before_anything_stops() {
    if !can_move() {
        return;
    }
    let mut there = Tasker::start();
    let mut facts = facts_of_this_host();
    facts.kernel = "0.0.0-other".into();
    facts.cpu_features.push("no_such_feature".into());
    facts.resident_bytes = 1 << 60;
    facts.files.push(sempa_proto::migration::FileFact {
        path: "/no/such/program".into(),
        bytes: 1,
        must: FileMatch::Content("00".into()),
    });
    let verdict = prepare(&mut there, tid(1), migration(1), facts);
    assert_eq!(verdict.len(), 4, "{verdict:?}");
    assert_eq!(prepare(&mut there, tid(1), migration(2), facts_of_this_host()), []);
    discard(&mut there, migration(2), &mut Vec::new());
    there.stop();
}

#[test]
fn a_missing_or_broken_engine_is_told_with_how_to_get_one() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start_with(&[("SEMPA_CRIU", "/no/such/criu")]);
    let why = tasker.ready.engine.clone().expect_err("there is none");
    assert!(why.contains("/no/such/criu") && why.contains("cargo xtask criu"), "{why}");
    tasker.run(tid(1), &sh(), &["-c", "sleep 1000"]);
    let refused = inspect(&mut tasker, tid(1), migration(1));
    assert!(matches!(refused, Err(Refusal::NoEngine { .. })), "{refused:?}");
    tasker.stop();

    // One that has a version number but cannot dump.
    let broken = dir.path().join("criu");
    std::fs::write(&broken, "#!/bin/sh\n[ \"$1\" = --version ] && echo Version: 9.9\n").expect("write");
    std::fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).expect("mode");
    let mut tasker = Tasker::start_with(&[("SEMPA_CRIU", broken.to_str().expect("text"))]);
    tasker.run(tid(1), &sh(), &["-c", "sleep 1000"]);
    let refused = inspect(&mut tasker, tid(1), migration(1));
    assert!(matches!(refused, Err(Refusal::NoEngine { .. })), "{refused:?}");
    tasker.stop();
}

/// What any task has in common with this host.
fn facts_of_this_host() -> TaskFacts {
    TaskFacts {
        kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("proc").trim().to_string(),
        ..TaskFacts::default()
    }
}

/// Living processes of the counter that was compiled in this directory.
fn counters(dir: &Path) -> Vec<i32> {
    processes_with(dir.join("counter").to_str().expect("text"))
}

#[test]
fn many_tasks_with_one_working_directory_leave_at_once() {
    if !can_move() {
        return;
    }
    const TASKS: u32 = 8;
    let dir = tempfile::tempdir().expect("dir");
    let counter = program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    for n in 1..=TASKS {
        let mut start = order(tid(n), &counter, &[]);
        start.dir = dir.path().into();
        here.send(ToTasker::Start(start));
    }
    let mut seen = Vec::new();
    while (1..=TASKS).any(|n| output_of(&seen, tid(n)).is_empty()) {
        seen.push(here.next());
    }
    let count = |seen: &[FromTasker], what: fn(&FromTasker) -> bool| seen.iter().filter(|m| what(m)).count();
    for n in 1..=TASKS {
        here.send(ToTasker::Stop { migration: migration(n.into()), tid: tid(n) });
    }
    while count(&seen, |m| matches!(m, FromTasker::Stopped { .. })) < TASKS as usize {
        seen.push(here.next());
    }
    for n in 1..=TASKS {
        let dir = dir.path().join(format!("images-{n}"));
        here.send(ToTasker::Dump { migration: migration(n.into()), tid: tid(n), dir });
    }
    while count(&seen, |m| matches!(m, FromTasker::Dumped { .. })) < TASKS as usize {
        seen.push(here.next());
    }
    for message in &seen {
        if let FromTasker::Dumped { migration, result } = message {
            assert!(result.is_ok(), "{migration}: {result:?}");
        }
    }
    for n in 1..=TASKS {
        let id = migration(n.into());
        there.send(ToTasker::Restore { migration: id, tid: tid(n), dir: dir.path().join(format!("images-{n}")) });
    }
    let mut restored = Vec::new();
    while restored.len() < TASKS as usize {
        if let FromTasker::Restored { migration, result } = there.next() {
            result.expect("a restore");
            restored.push(migration);
        }
    }
    let mut seen_there = Vec::new();
    for id in restored {
        let used = kill_moved(&mut here, tid(id.0 as u32), id, &mut seen);
        run(&mut there, id, used, &mut seen_there);
    }
    let left = (1..=TASKS).map(|n| output_of(&seen, tid(n))).collect::<Vec<_>>();
    while (1..=TASKS).any(|n| lines(&output_of(&seen_there, tid(n))) < 20) {
        let message = there.next();
        assert!(!matches!(message, FromTasker::Exited { .. }), "{message:?}");
        seen_there.push(message);
    }
    for (n, mut output) in (1..=TASKS).zip(left) {
        output.extend(output_of(&seen_there, tid(n)));
        assert_no_line_lost(&output);
    }
    here.stop();
    there.stop();
}
