//! Tests dumps during which the engine (CRIU) is killed or hangs, or which are cancelled.

mod common;
use checkpoint::proc;

use common::migration_steps::*;
use common::{Tasker, is_alive, migration_id, shell_path, start_order, tid, wait_until};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{FromTasker, TaskStart, ToTasker};
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Starts a tasker with this engine, and waits until the engine has been probed.
fn start_with_engine(engine: &Path) -> Tasker {
    let mut source = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    source.start_task_and_wait(tid(9), &shell_path(), &["-c", "sleep 1000"]);
    inspect_and_wait(&mut source, tid(9), migration_id(9)).expect("the engine works");
    source
}

/// Starts a tasker and a dump of the counter. The engine of the dump waits until it is killed.
fn start_waiting_dump(dir: &Path, output: &mut Vec<u8>) -> Tasker {
    let mut source = start_with_engine(&write_waiting_wrapper(dir));
    start_stopped_counter(&mut source, dir, output);
    make_wrapper_wait(dir);
    source.send(ToTasker::Dump {
        migration: migration_id(1),
        tid: tid(1),
        image_dir: dir.join("images"),
        memory_socket_path: None,
    });
    source
}

fn kill_engine(engine_pid: i32) -> nix::Result<()> {
    let engine = nix::unistd::Pid::from_raw(engine_pid);
    nix::sys::signal::kill(engine, nix::sys::signal::SIGKILL)
}

/// If a dump is killed, the task continues at the source, and a later migration succeeds.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_dump_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut target = Tasker::start();
    let mut output = Vec::new();
    let mut source = start_waiting_dump(dir.path(), &mut output);
    let engine_pid = wait_for_pid_file(&dir.path().join("pid"));
    kill_engine(engine_pid).expect("kill");
    assert_eq!(
        wait_until_dumped(&mut source, &mut Vec::new()),
        Err(Failure::Killed { signal: 9 })
    );
    make_wrapper_proceed(dir.path());
    assert_counter_continues(&mut source, &mut output);
    migrate_task(&mut source, &mut target, tid(1), 2, &mut output);
    let line_count = count_lines(&output) + 100;
    target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    assert_no_line_lost(&output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// A dump that hangs is attempted a second time. The dump succeeds if the engine does not hang
/// again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn hanging_dump_is_attempted_twice() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut output = Vec::new();
    let mut source = start_waiting_dump(dir.path(), &mut output);
    wait_for_pid_file(&dir.path().join("pid"));
    make_wrapper_proceed(dir.path());
    assert!(
        wait_until_dumped(&mut source, &mut Vec::new())
            .expect("the second attempt works")
            .image_bytes
            > 0
    );
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
}

/// Kills the process `engine_pid` when the task has created CRIU's temporary directory
/// `proc.crtools` in its working directory, which `watch` observes, for the `count`th time.
fn kill_at_nth_creation(watch: &Inotify, engine_pid: i32, count: usize) {
    let mut creation_count = 0;
    while creation_count < count && is_alive(engine_pid) {
        // Whether the engine still lives is checked now and then. If the wait fails, there are no
        // events.
        let _ = poll(
            &mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)],
            PollTimeout::from(10u8),
        );
        let events = watch.read_events().unwrap_or_default();
        creation_count += events
            .iter()
            .filter(|event| event.name.as_deref() == Some(OsStr::new("proc.crtools")))
            .count();
    }
    // The kill fails if the engine has already ended.
    let _ = kill_engine(engine_pid);
}

/// If the engine is killed while the task executes the engine's code, another dump of the stopped
/// task succeeds: the engine's code leaves no file descriptor and no directory behind.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn dump_succeeds_after_kill_in_engine_code() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_pid_wrapper(dir.path());
    let mut source = start_with_engine(&engine);
    let mut output = Vec::new();
    // Dumps of other tests do not use this working directory.
    source.send(ToTasker::Start(TaskStart {
        working_dir: dir.path().into(),
        ..start_order(tid(1), &compile_program(dir.path(), "counter"), &[])
    }));
    let pid = source.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::Started { pid, .. } => Some(*pid),
        _ => None,
    });
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 10);
    let descriptor_count = || {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("it lives")
            .count()
    };
    let (initial_descriptor_count, mut kill_count) = (descriptor_count(), 0);
    // The engine creates the directory once at the beginning, and once per thread.
    for creation in 1..=4 {
        let id = migration_id(creation as u64);
        let mut messages = Vec::new();
        stop_and_wait(&mut source, tid(1), id, &mut messages);
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).expect("inotify");
        watch
            .add_watch(dir.path(), AddWatchFlags::IN_CREATE)
            .expect("the directory exists");
        std::fs::remove_file(dir.path().join("pid")).expect("an engine ran before");
        source.send(ToTasker::Dump {
            migration: id,
            tid: tid(1),
            image_dir: dir.path().join(format!("killed-{creation}")),
            memory_socket_path: None,
        });
        let engine = wait_for_pid_file(&dir.path().join("pid"));
        kill_at_nth_creation(&watch, engine, creation);
        // On a loaded host the engine may end before the kill.
        match wait_until_dumped(&mut source, &mut messages) {
            Ok(_) => {}
            result => {
                assert_eq!(result, Err(Failure::Killed { signal: 9 }));
                kill_count += 1;
            }
        }
        assert_eq!(descriptor_count(), initial_descriptor_count);
        assert!(!dir.path().join("proc.crtools").exists());
        let images = dir.path().join(format!("images-{creation}"));
        dump_and_wait(&mut source, tid(1), id, &images, &mut messages)
            .expect("the next dump works");
        continue_and_wait(&mut source, tid(1), id, &mut messages);
        output.extend(output_of(&messages, tid(1)));
        let line_count = count_lines(&output) + 20;
        source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        assert_no_line_lost(&output);
    }
    assert!(kill_count > 0, "every engine ended before the kill");
    source.stop_and_wait();
}

/// Returns the number of bytes of memory that a dump has written so far.
fn written_page_bytes(image_dir: &Path) -> u64 {
    let files = std::fs::read_dir(image_dir).into_iter().flatten().flatten();
    let page_files = files.filter(|f| f.file_name().to_string_lossy().starts_with("pages-"));
    page_files
        .filter_map(|f| f.metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// If the engine is killed while it writes memory, the task continues undamaged.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn engine_killed_while_writing_leaves_task_whole() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_pid_wrapper(dir.path());
    let mut source = start_with_engine(&engine);
    let mut output = Vec::new();
    let pid = source.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &["150"]);
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 10);
    for (index, kill_at_bytes) in [2 << 20, 20 << 20, 80 << 20].into_iter().enumerate() {
        let id = migration_id(index as u64 + 1);
        let images = dir.path().join(format!("images-{index}"));
        let mut messages = Vec::new();
        stop_and_wait(&mut source, tid(1), id, &mut messages);
        std::fs::remove_file(dir.path().join("pid")).expect("an engine ran before");
        source.send(ToTasker::Dump {
            migration: id,
            tid: tid(1),
            image_dir: images.clone(),
            memory_socket_path: None,
        });
        let engine = wait_for_pid_file(&dir.path().join("pid"));
        wait_until("it writes", || {
            written_page_bytes(&images) >= kill_at_bytes || !is_alive(engine)
        });
        // The kill fails if the engine has already ended. Then the dump is successful.
        let _ = kill_engine(engine);
        let result = wait_until_dumped(&mut source, &mut messages);
        assert!(
            result.is_ok() || result == Err(Failure::Killed { signal: 9 }),
            "{result:?}"
        );
        assert!(is_alive(pid));
        continue_and_wait(&mut source, tid(1), id, &mut messages);
        output.extend(output_of(&messages, tid(1)));
        let line_count = count_lines(&output) + 50;
        source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        assert_no_line_lost(&output);
        let status = proc::status(pid).expect("it lives");
        assert_eq!(status.sigblk, 0, "signals stay blocked: {status:?}");
    }
    source.stop_and_wait();
}

/// If a migration is cancelled during the dump, the engine ends and the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_dump_ends_the_engine() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut output = Vec::new();
    let mut source = start_waiting_dump(dir.path(), &mut output);
    let engine_pid = wait_for_pid_file(&dir.path().join("pid"));
    source.send(ToTasker::AbortMigration {
        migration: migration_id(1),
        tid: tid(1),
    });
    assert!(matches!(
        wait_until_dumped(&mut source, &mut Vec::new()),
        Err(Failure::Cancelled(_))
    ));
    assert!(!is_alive(engine_pid));
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
}

/// Compiles the library that kills the engine at one of its ptrace calls. Returns the path of the
/// library.
fn compile_killer_library(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/killer.c");
    let library_path = dir.join("killer.so");
    let compiler_output = Command::new("gcc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .arg(&library_path)
        .arg(source)
        .status()
        .expect("gcc");
    assert!(compiler_output.success());
    library_path
}

/// Number of ptrace calls from one call at which the engine is killed to the next such call. A seed
/// selects the first such call. If `SEMPA_TEST_FULL` is set, the engine is killed at every ptrace
/// call.
const PTRACE_CALL_STRIDE: usize = 23;

/// If the engine is killed before or after any of its ptrace calls, the task continues undamaged.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn engine_killed_at_any_ptrace_leaves_task_whole() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (killer_library, kill_point_file) =
        (compile_killer_library(dir.path()), dir.path().join("at"));
    let preload_variable = format!("LD_PRELOAD={}:$LD_PRELOAD", killer_library.display());
    // Only the engine is killed: the wrapper's shell also has this variable, but makes no ptrace
    // calls.
    let engine = write_engine_wrapper_with_env(
        dir.path(),
        &format!(
            "{preload_variable} KILL_AT=$(cat {} 2>/dev/null)",
            kill_point_file.display()
        ),
    );
    let mut source = start_with_engine(&engine);
    let mut output = Vec::new();
    let pid = source.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let read_number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let seed = read_number("SEMPA_TEST_SEED").unwrap_or(0);
    let (stride, first_call) =
        if std::env::var_os("SEMPA_TEST_FULL").is_some_and(|text| !text.is_empty()) {
            (1, 1)
        } else {
            (PTRACE_CALL_STRIDE, 1 + seed % PTRACE_CALL_STRIDE)
        };
    println!("SEMPA_TEST_SEED={seed}");
    let mut kill_count = 0;
    for call in (first_call..).step_by(stride) {
        std::fs::write(&kill_point_file, call.to_string()).expect("write");
        let line_count = count_lines(&output) + 20;
        source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        let id = migration_id(call as u64 + 1);
        let mut messages = Vec::new();
        stop_and_wait(&mut source, tid(1), id, &mut messages);
        let result = dump_and_wait(
            &mut source,
            tid(1),
            id,
            &dir.path().join(format!("images-{call}")),
            &mut messages,
        );
        println!("killed at step {call}");
        wait_until("the task is stopped", || {
            proc::stat(pid).is_some_and(|stat| stat.state == 'T')
        });
        continue_and_wait(&mut source, tid(1), id, &mut messages);
        output.extend(output_of(&messages, tid(1)));
        let line_count = count_lines(&output) + 20;
        source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        assert_no_line_lost(&output);
        let status = proc::status(pid).expect("it lives");
        assert_eq!(status.sigblk, 0, "killed at step {call}: {status:?}");
        match result {
            Ok(_) => break,
            result => assert_eq!(
                result,
                Err(Failure::Killed { signal: 9 }),
                "killed at step {call}"
            ),
        }
        kill_count += 1;
    }
    println!("{kill_count} engines were killed, one every {stride} steps");
    assert!(
        kill_count * stride > 100,
        "the steps were counted: {kill_count}"
    );
    source.stop_and_wait();
}

/// Shell code that adds a line with the engine's PID to the file `starts` in a directory.
fn start_record_code(dir: &Path) -> String {
    format!("echo $$ >> {}/starts", dir.display())
}

/// Returns the PIDs of the engines that [`start_record_code`] has recorded, oldest first.
fn started_engines(dir: &Path) -> Vec<i32> {
    let text = std::fs::read_to_string(dir.join("starts")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Waits until one more engine has been started than `previous_count`. Returns its PID.
fn wait_for_engine_start(dir: &Path, previous_count: usize) -> i32 {
    wait_until("an engine waits", || {
        started_engines(dir).len() > previous_count
    });
    let engine_pids = started_engines(dir);
    assert_eq!(engine_pids.len(), previous_count + 1, "{engine_pids:?}");
    engine_pids[previous_count]
}

/// Starts a tasker whose engines record their PIDs in `dir`. The engine has been probed.
fn start_with_recording_engine(dir: &Path) -> Tasker {
    let tasker = start_with_engine(&write_idle_engine_wrapper(dir, &start_record_code(dir)));
    // Two engines for the probe, and one that waits since the task was inspected.
    wait_until("all engines run", || started_engines(dir).len() == 3);
    tasker
}

/// The engines of a migration are started when the task is inspected and its target prepared, and
/// wait; the dump and the restore start no other. An engine that was killed while it waited is
/// replaced, and the task migrates all the same.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn engines_wait_before_the_task_stops() {
    require_migration();
    let (source_dir, target_dir) = (
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    );
    let (source_dir, target_dir) = (source_dir.path(), target_dir.path());
    let mut source = start_with_recording_engine(source_dir);
    let mut target = start_with_recording_engine(target_dir);
    let mut output = Vec::new();
    // Dumps of other tests do not use this working directory, so no dump is repeated.
    source.send(ToTasker::Start(TaskStart {
        working_dir: source_dir.into(),
        ..start_order(tid(1), &compile_program(source_dir, "counter"), &[])
    }));
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 50);
    for (number, is_killed) in [(1, false), (2, true)] {
        let id = migration_id(number);
        let mut messages = Vec::new();
        let (dumps, restores) = (
            started_engines(source_dir).len(),
            started_engines(target_dir).len(),
        );
        source.send(ToTasker::Inspect {
            migration: id,
            tid: tid(1),
        });
        let facts = source.wait_for_value(&mut messages, |m| match m {
            FromTasker::Inspected { result, .. } => Some(result.clone()),
            _ => None,
        });
        let facts = facts.expect("it can migrate");
        let dump_engine = wait_for_engine_start(source_dir, dumps);
        assert_eq!(prepare_and_wait(&mut target, tid(1), id, facts), []);
        let restore_engine = wait_for_engine_start(target_dir, restores);
        if is_killed {
            for engine in [dump_engine, restore_engine] {
                kill_engine(engine).expect("it waits");
                wait_until("it has ended", || {
                    proc::stat(engine).is_none_or(|stat| matches!(stat.state, 'Z' | 'X'))
                });
            }
        }
        let images = tempfile::tempdir().expect("dir");
        let image_dir = images.path().join("images");
        stop_and_wait(&mut source, tid(1), id, &mut messages);
        dump_and_wait(&mut source, tid(1), id, &image_dir, &mut messages).expect("a dump");
        restore_and_wait(&mut target, tid(1), id, &image_dir).expect("a restore");
        let replaced = usize::from(is_killed);
        assert_eq!(started_engines(source_dir).len(), dumps + 1 + replaced);
        assert_eq!(started_engines(target_dir).len(), restores + 1 + replaced);
        if !is_killed {
            // The next round migrates the task again from here.
            discard_and_wait(&mut target, id, &mut Vec::new());
            continue_and_wait(&mut source, tid(1), id, &mut messages);
            output.extend(output_of(&messages, tid(1)));
            continue;
        }
        let usage = kill_source_and_wait(&mut source, tid(1), id, &mut messages);
        output.extend(output_of(&messages, tid(1)));
        run_and_wait(&mut target, id, usage, &mut messages);
        let line_count = count_lines(&output) + 50;
        target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        assert_no_line_lost(&output);
    }
    source.stop_and_wait();
    target.stop_and_wait();
}

/// An engine that waits for a dump ends with the migration, if that is given up before the dump,
/// and with the tasker.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn waiting_engine_ends_with_migration_and_tasker() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut source = start_with_recording_engine(dir.path());
    source.start_task_and_wait(tid(1), &shell_path(), &["-c", "sleep 1000"]);
    let inspect = |source: &mut Tasker, number| {
        let previous_count = started_engines(dir.path()).len();
        inspect_and_wait(source, tid(1), migration_id(number)).expect("it can migrate");
        wait_for_engine_start(dir.path(), previous_count)
    };
    let engine = inspect(&mut source, 1);
    assert!(is_alive(engine));
    continue_and_wait(&mut source, tid(1), migration_id(1), &mut Vec::new());
    assert!(!is_alive(engine), "the migration was given up");
    let engine = inspect(&mut source, 2);
    source.stop_and_wait();
    assert!(!is_alive(engine), "the tasker has ended");
}
