//! Functions for the steps of a migration, and for a counter task whose output shows any loss.
#![allow(dead_code, unreachable_pub)] // Each test file uses its own part.

use super::{Tasker, WAIT_TIMEOUT, can_make_namespaces, migration_id, tid, user_dir, wait_until};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Usage};
use sempa_proto::tasker::{DumpReport, FromTasker, ToTasker};
use sempa_proto::{Micros, MigrationId, Tid};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Checks that tasks can be migrated on this machine.
///
/// The check starts no tasker: the tasker's probe of the engine takes longer than many tests.
///
/// # Panics
/// CRIU is missing, or the kernel permits no namespaces.
pub fn require_migration() {
    assert!(
        can_make_namespaces(),
        "cannot run here: the kernel grants no process-id namespaces"
    );
    let engine = installed_engine();
    let is_installed = Command::new(&engine)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    assert!(
        is_installed,
        "cannot run here: {engine} is missing or broken"
    );
}

/// Returns the CRIU that a tasker would use: its path, or only its name if it must be searched for.
fn installed_engine() -> String {
    let usual_path = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"]
        .into_iter()
        .find(|path| Path::new(path).is_file());
    std::env::var("SEMPA_CRIU")
        .ok()
        .or(usual_path.map(String::from))
        .unwrap_or_else(|| "criu".into())
}

/// Compiles the C program `name`. Returns the path of the program.
pub fn compile_program(dir: &Path, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(format!("{name}.c"));
    let program_path = dir.join(name);
    let compiler_output = Command::new("gcc")
        .args(["-O1", "-pthread", "-o"])
        .arg(&program_path)
        .arg(source)
        .status()
        .expect("gcc");
    assert!(compiler_output.success());
    program_path
}

/// Writes a script that waits for the request to the engine, runs the shell code `shell_code`, and
/// then executes the real engine. Calls with the argument `--version` skip `shell_code`.
pub fn write_engine_wrapper(dir: &Path, shell_code: &str) -> PathBuf {
    write_idle_engine_wrapper(
        dir,
        &format!("until read -t 0 -u \"$2\"; do sleep 0.01; done\n{shell_code}"),
    )
}

/// As [`write_engine_wrapper`]; the script does not wait for the request.
pub fn write_idle_engine_wrapper(dir: &Path, shell_code: &str) -> PathBuf {
    write_engine_script(
        dir,
        &format!("if [ \"$1\" = swrk ]; then\n{shell_code}\nfi\nexec"),
    )
}

/// Shell code that writes the PID of the shell to the file `pid` in a directory, for
/// [`wait_for_pid_file`].
fn pid_file_code(dir: &Path) -> String {
    let dir_text = dir.display();
    format!("echo $$ > {dir_text}/pid.new; mv {dir_text}/pid.new {dir_text}/pid")
}

/// Writes a script that writes its PID to the file `pid` in `dir` and executes the real engine
/// under this PID. Returns the path of the script.
pub fn write_pid_wrapper(dir: &Path) -> PathBuf {
    write_engine_wrapper(dir, &pid_file_code(dir))
}

/// Writes a script that executes the real engine with additional environment variables (`NAME=VALUE
/// …`). Returns the path of the script.
pub fn write_engine_wrapper_with_env(dir: &Path, variables: &str) -> PathBuf {
    write_engine_script(dir, &format!("exec env {variables}"))
}

fn write_engine_script(dir: &Path, shell_prefix: &str) -> PathBuf {
    let path = dir.join("criu");
    let engine_path = installed_engine();
    let script = format!("#!/bin/bash\n{shell_prefix} {engine_path} \"$@\"\n");
    std::fs::write(&path, script).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
    path
}

pub fn inspect_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
) -> Result<TaskFacts, Refusal> {
    tasker.send(ToTasker::Inspect { migration, tid });
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Inspected { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn prepare_and_wait(
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
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Prepared { verdict, .. } => Some(verdict.clone()),
        _ => None,
    })
}

/// Stops the task and waits for the reply. Earlier messages are added to `messages`, so that no
/// output is lost. On a loaded host the threads of a task may not stop within the tasker's time
/// limit. Then the task continues and is stopped again, as in the daemon's next migration.
pub fn stop_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    messages: &mut Vec<FromTasker>,
) {
    let give_up_at = Instant::now() + WAIT_TIMEOUT;
    loop {
        tasker.send(ToTasker::Stop {
            migration,
            tid,
            memory_write: None,
        });
        let result = tasker.wait_for_value(messages, |m| match m {
            FromTasker::Stopped { result, .. } => Some(result.clone()),
            _ => None,
        });
        match result {
            Err(Failure::Deadline { allowed }) if Instant::now() < give_up_at => {
                eprintln!("{tid} did not stop within {allowed:?}");
                continue_and_wait(tasker, tid, migration, messages);
            }
            result => return assert_eq!(result, Ok(())),
        }
    }
}

pub fn dump_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    dir: &Path,
    messages: &mut Vec<FromTasker>,
) -> Result<DumpReport, Failure> {
    tasker.send(ToTasker::Dump {
        migration,
        tid,
        image_dir: dir.into(),
        memory_socket_path: None,
    });
    wait_until_dumped(tasker, messages)
}

pub fn wait_until_dumped(
    tasker: &mut Tasker,
    messages: &mut Vec<FromTasker>,
) -> Result<DumpReport, Failure> {
    tasker.wait_for_value(messages, |m| match m {
        FromTasker::Dumped { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn restore_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    dir: &Path,
) -> Result<i32, Failure> {
    tasker.send(ToTasker::Restore {
        migration,
        tid,
        image_dir: dir.into(),
        memory_write: None,
        memory_socket_path: None,
    });
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

pub fn kill_source_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    messages: &mut Vec<FromTasker>,
) -> Usage {
    tasker.send(ToTasker::KillSource { migration, tid });
    tasker.wait_for_value(messages, |m| match m {
        FromTasker::SourceKilled { usage: used, .. } => Some(*used),
        _ => None,
    })
}

pub fn run_and_wait(
    tasker: &mut Tasker,
    migration: MigrationId,
    usage: Usage,
    messages: &mut Vec<FromTasker>,
) {
    tasker.send(ToTasker::Run {
        migration,
        earlier_usage: usage,
        stays_paused: false,
    });
    let result = tasker.wait_for_value(messages, |m| match m {
        FromTasker::Running { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Ok(()));
}

pub fn continue_and_wait(
    tasker: &mut Tasker,
    tid: Tid,
    migration: MigrationId,
    messages: &mut Vec<FromTasker>,
) {
    tasker.send(ToTasker::AbortMigration { migration, tid });
    tasker.wait_for_value(messages, |m| {
        matches!(m, FromTasker::MigrationAborted { .. }).then_some(())
    });
}

pub fn discard_and_wait(
    tasker: &mut Tasker,
    migration: MigrationId,
    messages: &mut Vec<FromTasker>,
) {
    tasker.send(ToTasker::Discard { migration });
    tasker.wait_for_value(messages, |m| {
        matches!(m, FromTasker::Discarded { .. }).then_some(())
    });
}

pub fn output_of(messages: &[FromTasker], tid: Tid) -> Vec<u8> {
    let chunks = messages.iter().filter_map(|m| match m {
        FromTasker::Output { tid: t, bytes } if *t == tid => Some(bytes.as_slice()),
        _ => None,
    });
    chunks.flatten().copied().collect()
}

pub fn count_lines(text: &[u8]) -> usize {
    text.iter().filter(|b| **b == b'\n').count()
}

/// Asserts that the counter's output contains each number once and in order. The output may end
/// with the beginning of a line, because the tasker forwards it in pieces.
pub fn assert_no_line_lost(output: &[u8]) {
    let text = String::from_utf8_lossy(output);
    let mut lines: Vec<&str> = text.split('\n').collect();
    let last_piece = lines.pop().unwrap_or_default();
    for (expected_number, line) in lines.iter().enumerate() {
        let nearby_lines =
            &lines[expected_number.saturating_sub(3)..lines.len().min(expected_number + 4)];
        assert_eq!(
            *line,
            expected_number.to_string(),
            "line {expected_number} of {}: {nearby_lines:?}",
            lines.len()
        );
    }
    let next_number = lines.len().to_string();
    assert!(
        next_number.starts_with(last_piece),
        "{last_piece:?} is not the beginning of {next_number}"
    );
}

/// Migrates a task. Returns the duration for which the task was stopped.
pub fn migrate_task(
    source: &mut Tasker,
    target: &mut Tasker,
    tid: Tid,
    migration_number: u64,
    output: &mut Vec<u8>,
) -> Duration {
    migrate_task_while(source, target, tid, migration_number, output, &mut || {}).stopped_duration
}

/// Measurements of a migration.
#[derive(Clone, Copy, Debug)]
pub struct MigrationMeasurements {
    /// Duration for which the task was stopped.
    pub stopped_duration: Duration,
    /// Total length of the task's images in bytes.
    pub image_bytes: u64,
}

/// Migrates a task. Calls `run_meanwhile` while the task exists only as images.
pub fn migrate_task_while(
    source: &mut Tasker,
    target: &mut Tasker,
    tid: Tid,
    migration_number: u64,
    output: &mut Vec<u8>,
    run_meanwhile: &mut dyn FnMut(),
) -> MigrationMeasurements {
    let id = migration_id(migration_number);
    let images = user_dir(source.user);
    let dir = images.path().join("images");
    let mut messages = Vec::new();
    source.send(ToTasker::Inspect { migration: id, tid });
    let facts = source.wait_for_value(&mut messages, |m| match m {
        FromTasker::Inspected { result, .. } => Some(result.clone()),
        _ => None,
    });
    let facts = facts.expect("it can move");
    assert_eq!(prepare_and_wait(target, tid, id, facts), []);
    let started_at = Instant::now();
    stop_and_wait(source, tid, id, &mut messages);
    let report = dump_and_wait(source, tid, id, &dir, &mut messages).expect("a dump");
    let dump_duration = started_at.elapsed();
    assert!(
        (report.image_files > 5 || source.user.is_some()) && report.image_bytes > 4096,
        "{report:?}"
    );
    assert_eq!(
        std::fs::metadata(&dir).expect("dir").permissions().mode() & 0o777,
        0o700
    );
    run_meanwhile();
    restore_and_wait(target, tid, id, &dir).expect("a restore");
    let usage = kill_source_and_wait(source, tid, id, &mut messages);
    assert!(usage.user + usage.system > Micros(0));
    let mut target_messages = Vec::new();
    run_and_wait(target, id, usage, &mut target_messages);
    let stopped_duration = started_at.elapsed();
    eprintln!(
        "move {migration_number}: dump {dump_duration:?}, {} bytes, still for {stopped_duration:?}",
        report.image_bytes
    );
    let is_exit = |m: &FromTasker| matches!(m, FromTasker::Exited { .. });
    assert!(
        !messages.iter().any(is_exit),
        "a moved task is not reported as ended"
    );
    output.extend(output_of(&messages, tid));
    output.extend(output_of(&target_messages, tid));
    MigrationMeasurements {
        stopped_duration,
        image_bytes: report.image_bytes,
    }
}

/// Starts a counter and stops it for a migration. Returns the PID of the counter.
pub fn start_stopped_counter(tasker: &mut Tasker, dir: &Path, output: &mut Vec<u8>) -> i32 {
    let pid = tasker.start_task_and_wait(tid(1), &compile_program(dir, "counter"), &[]);
    tasker.wait_for_output(tid(1), output, |text| count_lines(text) > 50);
    let mut messages = Vec::new();
    stop_and_wait(tasker, tid(1), migration_id(1), &mut messages);
    output.extend(output_of(&messages, tid(1)));
    pid
}

/// Continues the counter at the source, and asserts that its output lacks no line.
pub fn assert_counter_continues(tasker: &mut Tasker, output: &mut Vec<u8>) {
    let mut messages = Vec::new();
    continue_and_wait(tasker, tid(1), migration_id(1), &mut messages);
    output.extend(output_of(&messages, tid(1)));
    let line_count = count_lines(output) + 200;
    tasker.wait_for_output(tid(1), output, |text| count_lines(text) > line_count);
    assert_no_line_lost(output);
}

/// Waits until the wrapper script has written its PID to the file `path`. Returns the PID.
pub fn wait_for_pid_file(path: &Path) -> i32 {
    let read_pid = || std::fs::read_to_string(path).ok()?.trim().parse().ok();
    wait_until("the engine runs", || read_pid().is_some());
    read_pid().expect("just seen")
}

/// Writes a wrapper script for the engine, and returns its path. The script writes its PID. While
/// the file `wait` exists, the script then waits until it is killed.
pub fn write_waiting_wrapper(dir: &Path) -> PathBuf {
    let dir_text = dir.display();
    write_engine_wrapper(
        dir,
        &format!(
            "if [ -e {dir_text}/wait ]; then {}; exec sleep 14142; fi",
            pid_file_code(dir)
        ),
    )
}

pub fn make_wrapper_wait(dir: &Path) {
    std::fs::write(dir.join("wait"), "").expect("write");
}

pub fn make_wrapper_proceed(dir: &Path) {
    std::fs::remove_file(dir.join("wait")).expect("remove");
    let _ = std::fs::remove_file(dir.join("pid"));
}
