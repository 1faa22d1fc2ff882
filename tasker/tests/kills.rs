//! Tests CRIU processes that are killed, hang or are cancelled during a dump.

mod common;
use checkpoint::proc;

use common::moving::*;
use common::{Tasker, is_alive, migration, sh, tid, wait_until};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::ToTasker;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Starts a tasker with this engine, and waits until the engine has been probed.
fn start_with_engine(engine: &Path) -> Tasker {
    let mut here = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    here.run(tid(9), &sh(), &["-c", "sleep 1000"]);
    inspect(&mut here, tid(9), migration(9)).expect("the engine works");
    here
}

/// Starts a tasker and a dump of the counter. The engine waits to be killed.
fn start_waiting_dump(dir: &Path, output: &mut Vec<u8>) -> Tasker {
    let mut here = start_with_engine(&write_waiting_wrapper(dir));
    start_stopped_counter(&mut here, dir, output);
    make_wrapper_wait(dir);
    here.send(ToTasker::Dump {
        migration: migration(1),
        tid: tid(1),
        dir: dir.join("images"),
        memory_socket: None,
    });
    here
}

/// A killed dump leaves the task at the source, and a later migration succeeds.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_dump_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut there = Tasker::start();
    let mut output = Vec::new();
    let mut here = start_waiting_dump(dir.path(), &mut output);
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(engine),
        nix::sys::signal::SIGKILL,
    )
    .expect("kill");
    assert_eq!(
        wait_until_dumped(&mut here, &mut Vec::new()),
        Err(Failure::Killed { signal: 9 })
    );
    make_wrapper_run(dir.path());
    assert_counter_continues(&mut here, &mut output);
    migrate_task(&mut here, &mut there, tid(1), 2, &mut output);
    let more = count_lines(&output) + 100;
    there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
}

/// A dump that hangs is attempted a second time.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn hanging_dump_is_tried_once_more() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut output = Vec::new();
    let mut here = start_waiting_dump(dir.path(), &mut output);
    wait_for_pid_file(&dir.path().join("pid"));
    make_wrapper_run(dir.path());
    assert!(
        wait_until_dumped(&mut here, &mut Vec::new())
            .expect("the second attempt works")
            .bytes
            > 0
    );
    assert_counter_continues(&mut here, &mut output);
    here.stop();
}

/// Returns the number of bytes of memory that a dump has written.
fn pages_written(images: &Path) -> u64 {
    let files = std::fs::read_dir(images).into_iter().flatten().flatten();
    let pages = files.filter(|f| f.file_name().to_string_lossy().starts_with("pages-"));
    pages
        .filter_map(|f| f.metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// If CRIU is killed while it writes memory, the task continues undamaged.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn engine_killed_while_writing_leaves_task_whole() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let d = dir.path().display().to_string();
    let engine = write_engine_wrapper(
        dir.path(),
        &format!("echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid"),
    );
    let mut here = start_with_engine(&engine);
    let mut output = Vec::new();
    let pid = here.run(tid(1), &compile_program(dir.path(), "counter"), &["150"]);
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 10);
    for (number, bytes) in [2 << 20, 20 << 20, 80 << 20].into_iter().enumerate() {
        let id = migration(number as u64 + 1);
        let images = dir.path().join(format!("images-{number}"));
        let mut seen = Vec::new();
        stop(&mut here, tid(1), id, &mut seen);
        std::fs::remove_file(dir.path().join("pid")).expect("an engine ran before");
        here.send(ToTasker::Dump {
            migration: id,
            tid: tid(1),
            dir: images.clone(),
            memory_socket: None,
        });
        let engine = wait_for_pid_file(&dir.path().join("pid"));
        wait_until("it writes", || {
            pages_written(&images) >= bytes || !is_alive(engine)
        });
        // If the engine has already ended, the dump is successful and there is no process to kill.
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(engine),
            nix::sys::signal::SIGKILL,
        );
        let result = wait_until_dumped(&mut here, &mut seen);
        assert!(
            result.is_ok() || result == Err(Failure::Killed { signal: 9 }),
            "{result:?}"
        );
        assert!(is_alive(pid));
        continue_task(&mut here, tid(1), id, &mut seen);
        output.extend(output_of(&seen, tid(1)));
        let more = count_lines(&output) + 50;
        here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
        assert_no_line_lost(&output);
        let status = proc::status(pid).expect("it lives");
        assert_eq!(status.sigblk, 0, "signals stay blocked: {status:?}");
    }
    here.stop();
}

/// Cancelling a migration during the dump ends CRIU, and the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_dump_ends_the_engine() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut output = Vec::new();
    let mut here = start_waiting_dump(dir.path(), &mut output);
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    here.send(ToTasker::AbortMigration {
        migration: migration(1),
        tid: tid(1),
    });
    assert!(matches!(
        wait_until_dumped(&mut here, &mut Vec::new()),
        Err(Failure::Cancelled(_))
    ));
    assert!(!is_alive(engine));
    assert_counter_continues(&mut here, &mut output);
    here.stop();
}

/// Compiles the library that kills the engine at one of its ptrace calls.
fn compile_killer_library(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/killer.c");
    let out = dir.join("killer.so");
    let done = Command::new("gcc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .arg(&out)
        .arg(source)
        .status()
        .expect("gcc");
    assert!(done.success());
    out
}

/// Distance between the ptrace calls at which the engine is killed. A seed selects the first of
/// them. If `SEMPA_TEST_FULL` is set, the engine is killed at every ptrace call.
const PTRACE_CALL_STRIDE: usize = 23;

/// If CRIU is killed before or after any of its ptrace calls, the task continues undamaged.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn engine_killed_at_any_ptrace_leaves_task_whole() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (killer, at) = (compile_killer_library(dir.path()), dir.path().join("at"));
    let env = format!("LD_PRELOAD={}:$LD_PRELOAD", killer.display());
    // The variable affects only the engine, because the shell makes no ptrace calls.
    let engine = write_engine_wrapper_with_env(
        dir.path(),
        &format!("{env} KILL_AT=$(cat {} 2>/dev/null)", at.display()),
    );
    let mut here = start_with_engine(&engine);
    let mut output = Vec::new();
    let pid = here.run(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let seed = number("SEMPA_TEST_SEED").unwrap_or(0);
    let (stride, first) =
        if std::env::var_os("SEMPA_TEST_FULL").is_some_and(|text| !text.is_empty()) {
            (1, 1)
        } else {
            (PTRACE_CALL_STRIDE, 1 + seed % PTRACE_CALL_STRIDE)
        };
    println!("SEMPA_TEST_SEED={seed}");
    let mut kills = 0;
    for step in (first..).step_by(stride) {
        std::fs::write(&at, step.to_string()).expect("write");
        let more = count_lines(&output) + 20;
        here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
        let id = migration(step as u64 + 1);
        let mut seen = Vec::new();
        stop(&mut here, tid(1), id, &mut seen);
        let result = dump(
            &mut here,
            tid(1),
            id,
            &dir.path().join(format!("images-{step}")),
            &mut seen,
        );
        println!("killed at step {step}");
        wait_until("the task is stopped", || {
            proc::stat(pid).is_some_and(|stat| stat.state == 'T')
        });
        continue_task(&mut here, tid(1), id, &mut seen);
        output.extend(output_of(&seen, tid(1)));
        let more = count_lines(&output) + 20;
        here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
        assert_no_line_lost(&output);
        let status = proc::status(pid).expect("it lives");
        assert_eq!(status.sigblk, 0, "killed at step {step}: {status:?}");
        match result {
            Ok(_) => break,
            result => assert_eq!(
                result,
                Err(Failure::Killed { signal: 9 }),
                "killed at step {step}"
            ),
        }
        kills += 1;
    }
    println!("{kills} engines were killed, one every {stride} steps");
    assert!(kills * stride > 100, "the steps were counted: {kills}");
    here.stop();
}
