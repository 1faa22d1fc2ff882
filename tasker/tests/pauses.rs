//! Tests pausing tasks for the owner of the host.

mod common;

use checkpoint::proc;
use common::migration_steps::*;
use common::{
    Tasker, WAIT_TIMEOUT, cpu_ticks, is_alive, pause_and_wait, shell_path, tid, wait_until,
    wait_until_paused,
};
use procfs::process::{MMapPath, Process};
use sempa_proto::Micros;
use sempa_proto::task::RedirectAddress;
use sempa_proto::tasker::{FromTasker, MemoryWrite, ToTasker};
use std::path::{Path, PathBuf};
use std::time::Instant;

const IMMEDIATELY: Micros = Micros(0);

/// Returns the number of write calls that a process has made. A running counter makes them
/// continuously.
fn write_calls(pid: i32) -> u64 {
    let io = Process::new(pid).and_then(|process| process.io());
    io.expect("the kernel counts them").syscw
}

fn thread_nice_values(pid: i32) -> Vec<String> {
    let threads = proc::thread_ids(pid).expect("it is there");
    let stats = threads.into_iter().filter_map(proc::stat);
    stats.map(|stat| stat.nice.to_string()).collect()
}

/// A paused task uses no processor time. When the task is resumed, no output is lost.
#[test]
#[ignore = "system tier: needs gcc"]
fn paused_task_uses_no_cpu_and_loses_no_output() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start();
    let pid = tasker.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut messages) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    for run_time in [IMMEDIATELY, Micros::from_millis(30), IMMEDIATELY] {
        pause_and_wait(&mut tasker, run_time, &mut messages);
        output.extend(output_of(&std::mem::take(&mut messages), tid(1)));
        let previous_ticks = cpu_ticks(pid);
        assert!(
            tasker.wait_briefly_for_message().is_none()
                && tasker.wait_briefly_for_message().is_none(),
            "it says nothing"
        );
        assert_eq!(cpu_ticks(pid), previous_ticks);
        assert!(
            thread_nice_values(pid).iter().all(|nice| nice == "0"),
            "a dump must not find it lowered"
        );
        // A paused task that is paused again runs for 20 ms before it is stopped.
        pause_and_wait(&mut tasker, Micros::from_millis(20), &mut messages);
        output.extend(output_of(&std::mem::take(&mut messages), tid(1)));
        let previous_ticks = cpu_ticks(pid);
        assert!(tasker.wait_briefly_for_message().is_none());
        assert_eq!(cpu_ticks(pid), previous_ticks);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        let line_count = count_lines(&output) + 200;
        tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    }
    assert_no_line_lost(&output);
    tasker.stop_and_wait();
}

/// If a task is paused and resumed during a migration, the last order takes effect after the
/// migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn last_pause_order_takes_effect_after_a_migration() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start();
    let pid = tasker.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut messages) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    let assert_does_not_run = |tasker: &mut Tasker| {
        let previous_ticks = cpu_ticks(pid);
        assert!(tasker.wait_briefly_for_message().is_none());
        assert_eq!(cpu_ticks(pid), previous_ticks);
    };
    // After a cancelled migration the task is paused or runs, according to the last order. The
    // migration may have let processes run, so the stop is verified and reported again.
    pause_and_wait(&mut tasker, Micros::from_millis(5), &mut messages);
    stop_and_wait(&mut tasker, tid(1), common::migration_id(1), &mut messages);
    continue_and_wait(&mut tasker, tid(1), common::migration_id(1), &mut messages);
    wait_until_paused(&mut tasker, &mut messages);
    assert_does_not_run(&mut tasker);
    // The order to pause arrives while the task is stopped for a migration.
    tasker.send(ToTasker::Resume { tid: tid(1) });
    stop_and_wait(&mut tasker, tid(1), common::migration_id(2), &mut messages);
    pause_and_wait(&mut tasker, Micros::from_millis(30), &mut messages);
    continue_and_wait(&mut tasker, tid(1), common::migration_id(2), &mut messages);
    wait_until_paused(&mut tasker, &mut messages);
    assert_does_not_run(&mut tasker);
    // The order to resume arrives while the task is stopped for a migration.
    stop_and_wait(&mut tasker, tid(1), common::migration_id(3), &mut messages);
    tasker.send(ToTasker::Resume { tid: tid(1) });
    assert_does_not_run(&mut tasker);
    continue_and_wait(&mut tasker, tid(1), common::migration_id(3), &mut messages);
    output.extend(output_of(&messages, tid(1)));
    let line_count = count_lines(&output) + 200;
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    assert_no_line_lost(&output);
    tasker.stop_and_wait();
}

/// A paused task migrates without running. If the target is ordered to keep the task paused, it
/// stays paused.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn paused_task_migrates_without_running() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    source.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut messages) = (Vec::new(), Vec::new());
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    pause_and_wait(&mut source, Micros::from_millis(10), &mut messages);
    output.extend(output_of(&std::mem::take(&mut messages), tid(1)));
    let (id, images) = (common::migration_id(1), dir.path().join("images"));
    let facts = inspect_and_wait(&mut source, tid(1), id).expect("it can move");
    assert_eq!(prepare_and_wait(&mut target, tid(1), id, facts), []);
    stop_and_wait(&mut source, tid(1), id, &mut messages);
    dump_and_wait(&mut source, tid(1), id, &images, &mut messages).expect("a dump");
    assert!(output_of(&messages, tid(1)).is_empty(), "it has run");
    let restored_pid = restore_and_wait(&mut target, tid(1), id, &images).expect("a restore");
    let source_usage = kill_source_and_wait(&mut source, tid(1), id, &mut messages);
    target.send(ToTasker::Run {
        migration: id,
        earlier_usage: source_usage,
        stays_paused: true,
    });
    target.wait_for_value(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
    });
    output.extend(output_of(&messages, tid(1)));
    let previous_ticks = cpu_ticks(restored_pid);
    assert!(
        target.wait_briefly_for_message().is_none() && target.wait_briefly_for_message().is_none(),
        "it says nothing"
    );
    assert_eq!(cpu_ticks(restored_pid), previous_ticks);
    target.send(ToTasker::Resume { tid: tid(1) });
    let line_count = count_lines(&output) + 200;
    target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    assert_no_line_lost(&output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// A paused task that is sent SIGTERM may run to exit. A paused task can also be killed.
#[test]
fn paused_task_can_be_terminated_and_killed() {
    let mut tasker = Tasker::start();
    let exiting_script = "trap 'echo asked; exit 7' TERM; echo ready; while :; do :; done";
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", exiting_script]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    let (last_output, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!((last_output.as_slice(), status), (&b"asked\n"[..], 7 << 8));

    let ignoring_script = "trap '' TERM; echo ready; while :; do :; done";
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", ignoring_script]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    tasker.wait_for_value(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Paused { .. }).then_some(())
    });
    let previous_ticks = cpu_ticks(pid);
    // SIGCONT is stored until the task is resumed.
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGCONT,
    });
    assert!(tasker.wait_briefly_for_message().is_none());
    assert_eq!(cpu_ticks(pid), previous_ticks);
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGKILL,
    });
    let (_, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, libc::SIGKILL);
    tasker.stop_and_wait();
}

/// The redirect for a task's library is written into the memory of the stopped task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn redirect_is_written_into_a_stopped_task() {
    require_migration();
    let mut tasker = Tasker::start();
    let script = "w=0123456789; echo ready; while :; do echo $w; sleep 0.01; done";
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
    let (mut output, mut messages) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 3);
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut messages);
    // Any address in writable memory is suitable. The test uses the second page of the heap.
    let maps = Process::new(pid).and_then(|process| process.maps());
    let maps = maps.expect("it is there");
    let heap = maps.iter().find(|map| map.pathname == MMapPath::Heap);
    let address = heap.expect("a heap").address.0 + 4096;
    let stop_with_redirect = |tasker: &mut Tasker,
                              migration_number: u64,
                              pid: i32,
                              address: u64,
                              messages: &mut Vec<FromTasker>| {
        let redirect = Some(MemoryWrite {
            address: RedirectAddress { pid, address },
            bytes: b"sempa".to_vec(),
        });
        tasker.send(ToTasker::Stop {
            migration: common::migration_id(migration_number),
            tid: tid(1),
            memory_write: redirect,
        });
        let result = tasker.wait_for_value(messages, |m| match m {
            FromTasker::Stopped { result, .. } => Some(result.clone()),
            _ => None,
        });
        tasker.send(ToTasker::AbortMigration {
            migration: common::migration_id(migration_number),
            tid: tid(1),
        });
        tasker.wait_for_value(messages, |m| {
            matches!(m, FromTasker::MigrationAborted { .. }).then_some(())
        });
        result
    };
    let namespace_pid = proc::innermost_pid(pid).expect("it is there");
    assert_eq!(
        stop_with_redirect(&mut tasker, 1, namespace_pid, address, &mut messages),
        Ok(())
    );
    let mut bytes = [0u8; 5];
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("ours");
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut bytes, address).expect("mapped");
    assert_eq!(&bytes, b"sempa");
    assert!(
        stop_with_redirect(&mut tasker, 2, namespace_pid, 8, &mut messages).is_err(),
        "nothing is mapped there"
    );
    assert!(
        stop_with_redirect(&mut tasker, 3, 30_000, address, &mut messages).is_err(),
        "this is none of its processes"
    );
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop_and_wait();
}

/// Children that the task itself has stopped before its pause stay stopped when the task is
/// resumed.
#[test]
fn children_stopped_by_the_task_stay_stopped() {
    let mut tasker = Tasker::start();
    let script =
        "sh -c 'echo child; kill -STOP $$; echo woken' & wait $!; echo over; wait $!; echo end";
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text.starts_with(b"child"));
    let stopped_children = || {
        common::processes_with_text("echo woken")
            .iter()
            .any(|pid| proc::stat(*pid).is_some_and(|stat| stat.state == 'T'))
    };
    wait_until("the child has stopped itself", stopped_children);
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Resume { tid: tid(1) });
    assert!(
        tasker.wait_briefly_for_message().is_none(),
        "nobody says that it was woken"
    );
    assert!(stopped_children());
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop_and_wait();
}

/// Lets a paused task quiesce. At first, for at most the time `library_only_time`, only the threads
/// of the task's library run.
fn resume_to_quiesce(tasker: &mut Tasker, library_only_time: Micros) {
    tasker.send(ToTasker::ResumeToQuiesce {
        tid: tid(1),
        library_run_time: library_only_time,
        run_time: LONG_DURATION,
    });
}

const LONG_DURATION: Micros = Micros::from_millis(600_000);

/// If a paused task must quiesce, at first only its library's threads run. If the library cannot
/// quiesce in that time, the program's threads run, too.
#[test]
#[ignore = "system tier: needs gcc"]
fn quiesce_of_paused_task_runs_the_library_first() {
    let dir = tempfile::tempdir().expect("dir");
    let program = compile_program(dir.path(), "halves");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut tasker, counters) = (Tasker::start_with_env(env), SharedCounters::new(dir.path()));
        let pid =
            tasker.start_task_and_wait(tid(1), &program, &[counters.0.to_str().expect("text")]);
        let (program_count, library_count) = (
            || counters.counter(0) + counters.counter(2),
            || counters.counter(1),
        );
        counters.wait_for_stopped_process();
        let wait_for_increase = |event_name: &str, counters: &dyn Fn() -> u64| {
            let previous_count = counters();
            wait_until(event_name, || counters() > previous_count + 10);
        };
        wait_for_increase("the program runs", &program_count);
        wait_for_increase("the library runs", &library_count);
        let (mut rounds, deadline) = (0, Instant::now() + WAIT_TIMEOUT);
        while rounds < 5 {
            pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
            let previous_count = program_count();
            resume_to_quiesce(&mut tasker, LONG_DURATION);
            wait_for_increase("the library runs alone", &library_count);
            // A second order during the quiesce has no effect.
            resume_to_quiesce(&mut tasker, LONG_DURATION);
            wait_for_increase("the library runs alone", &library_count);
            pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
            if program_count() != previous_count {
                // If the tasker cannot freeze the program's threads within 20 ms, it lets them run.
                // Then the round is repeated.
                assert!(Instant::now() < deadline, "the program runs in each round");
                continue;
            }
            rounds += 1;
            let previous_count = (library_count(), previous_count);
            assert!(
                tasker.wait_briefly_for_message().is_none()
                    && tasker.wait_briefly_for_message().is_none(),
                "it says nothing"
            );
            assert_eq!(
                (library_count(), program_count()),
                previous_count,
                "somebody runs"
            );
            assert!(
                thread_nice_values(pid).iter().all(|nice| nice == "0"),
                "a dump must not find it lowered"
            );
        }
        resume_to_quiesce(&mut tasker, Micros::from_millis(50));
        wait_for_increase(
            "the program runs when the library was alone for long enough",
            &program_count,
        );
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        resume_to_quiesce(&mut tasker, LONG_DURATION);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_for_increase("the program goes on", &program_count);
        wait_for_increase("its child does", &|| counters.counter(2));
        // The order to pause arrives while the task quiesces.
        tasker.send(ToTasker::Pause {
            tid: tid(1),
            run_time: LONG_DURATION,
        });
        resume_to_quiesce(&mut tasker, LONG_DURATION);
        let previous_count = program_count();
        wait_for_increase("the library runs alone", &library_count);
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until("the program goes on", || program_count() > previous_count);
        assert_eq!(
            counters.counter(3),
            0,
            "a child that had stopped itself was woken"
        );
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        resume_to_quiesce(&mut tasker, LONG_DURATION);
        tasker.send(ToTasker::Kill { tid: tid(1) });
        let (_, status, _) = tasker.wait_for_exit(tid(1));
        assert_eq!(status, libc::SIGKILL, "also while the library runs alone");
        tasker.stop_and_wait();
    }
}

/// A paused task of which only the library's threads run can be stopped for a migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn task_with_library_running_alone_migrates() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let previous_program_count = compile_program(dir.path(), "halves");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut source, mut target) = (Tasker::start_with_env(env), Tasker::start_with_env(env));
        let counters = SharedCounters::new(dir.path());
        source.start_task_and_wait(
            tid(1),
            &previous_program_count,
            &[counters.0.to_str().expect("text")],
        );
        wait_until("all run", || {
            [0, 1, 2].iter().all(|index| counters.counter(*index) > 10)
        });
        counters.wait_for_stopped_process();
        let (images, mut messages) = (dir.path().join("images"), Vec::new());
        let program_count = || counters.counter(0) + counters.counter(2);
        let (mut attempts, deadline) = (1, Instant::now() + WAIT_TIMEOUT);
        let (id, previous_count) = loop {
            let id = common::migration_id(attempts);
            let facts = inspect_and_wait(&mut source, tid(1), id).expect("it can migrate");
            assert_eq!(prepare_and_wait(&mut target, tid(1), id, facts), []);
            pause_and_wait(&mut source, IMMEDIATELY, &mut messages);
            let previous_count = program_count();
            resume_to_quiesce(&mut source, LONG_DURATION);
            let previous_library_count = counters.counter(1);
            wait_until("the library runs alone", || {
                counters.counter(1) > previous_library_count + 10
            });
            stop_and_wait(&mut source, tid(1), id, &mut messages);
            if program_count() == previous_count {
                break (id, previous_count);
            }
            // If the tasker cannot freeze the program's threads within 20 ms, it lets them run.
            // Then the attempt is repeated.
            assert!(
                Instant::now() < deadline,
                "the program runs in each attempt"
            );
            continue_and_wait(&mut source, tid(1), id, &mut messages);
            source.send(ToTasker::Resume { tid: tid(1) });
            attempts += 1;
        };
        dump_and_wait(&mut source, tid(1), id, &images, &mut messages).expect("a dump");
        assert_eq!(program_count(), previous_count, "the program has run");
        restore_and_wait(&mut target, tid(1), id, &images).expect("a restore");
        let usage = kill_source_and_wait(&mut source, tid(1), id, &mut messages);
        target.send(ToTasker::Run {
            migration: id,
            earlier_usage: usage,
            stays_paused: false,
        });
        target.wait_for_value(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
        });
        let (previous_program_count, previous_child_count) =
            (counters.counter(0), counters.counter(2));
        wait_until("the program goes on there", || {
            counters.counter(0) > previous_program_count
                && counters.counter(2) > previous_child_count
        });
        assert_eq!(
            counters.counter(3),
            0,
            "a child that had stopped itself was woken"
        );
        target.send(ToTasker::Kill { tid: tid(1) });
        target.wait_for_exit(tid(1));
        source.stop_and_wait();
        target.stop_and_wait();
        std::fs::remove_dir_all(&images).expect("images");
    }
}

/// Environment in which the tasker pauses tasks by signals, as if it could not create control
/// groups.
const PAUSE_BY_SIGNAL_ENV: &[(&str, &str)] = &[("SEMPA_FREEZER", "off")];

/// Starts a tasker and asserts that its freezer works. The test can inspect the freezer's control
/// groups.
fn start_with_freezer() -> Tasker {
    let mounts = std::fs::read("/proc/self/mountinfo").expect("it is there");
    assert!(
        sempa_proto::cgroup::find_mount_point(&mounts, None).is_some(),
        "cannot run here: control groups of version 2 are not mounted"
    );
    let tasker = Tasker::start();
    if let Err(why) = &tasker.capabilities.freezer {
        panic!("cannot run here: no freezer: {why}");
    }
    tasker
}

/// Counters in a file that the test program maps into its memory.
struct SharedCounters(PathBuf);

impl SharedCounters {
    fn new(dir: &Path) -> Self {
        let path = dir.join("counts");
        std::fs::write(&path, [0u8; 4096]).expect("written");
        Self(path)
    }

    fn counter(&self, index: usize) -> u64 {
        let bytes = std::fs::read(&self.0).expect("it is there");
        u64::from_ne_bytes(bytes[index * 8..][..8].try_into().expect("eight"))
    }

    /// Waits until one of the program's processes has stopped itself.
    fn wait_for_stopped_process(&self) {
        let counter_path = self.0.to_str().expect("text");
        wait_until("one has stopped itself", || {
            common::processes_with_text(counter_path)
                .into_iter()
                .any(|pid| proc::stat(pid).is_some_and(|stat| stat.state == 'T'))
        });
    }

    fn step_count(&self) -> u64 {
        self.counter(0)
    }

    fn created_process_count(&self) -> u64 {
        self.counter(1)
    }

    fn signal_counts(&self) -> (u64, u64) {
        (self.counter(2), self.counter(3))
    }

    /// Runs the program as a task with the argument `mode`. Pauses and resumes it several times.
    fn run_pause_rounds(&self, tasker: &mut Tasker, program: &Path, mode: &str) {
        tasker.start_task_and_wait(tid(1), program, &[self.0.to_str().expect("text"), mode]);
        for run_time in [
            IMMEDIATELY,
            Micros::from_millis(10),
            IMMEDIATELY,
            Micros::from_millis(1),
            IMMEDIATELY,
        ] {
            let previous_process_count = self.created_process_count();
            wait_until("more processes are made", || {
                self.created_process_count() > previous_process_count + 20
            });
            pause_and_wait(tasker, run_time, &mut Vec::new());
            let previous_step_count = self.step_count();
            assert!(
                tasker.wait_briefly_for_message().is_none()
                    && tasker.wait_briefly_for_message().is_none(),
                "it says nothing"
            );
            assert_eq!(self.step_count(), previous_step_count, "somebody runs");
            tasker.send(ToTasker::Resume { tid: tid(1) });
            wait_until("it goes on", || self.step_count() > previous_step_count);
        }
    }
}

/// All processes of a task that forks continuously are paused, by the freezer and by signals.
#[test]
#[ignore = "system tier: needs gcc"]
fn forking_task_is_paused_by_freezer_and_by_signals() {
    let dir = tempfile::tempdir().expect("dir");
    let program = compile_program(dir.path(), "forker");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut tasker, counts) = (Tasker::start_with_env(env), SharedCounters::new(dir.path()));
        counts.run_pause_rounds(&mut tasker, &program, "crowd");
        if tasker.capabilities.freezer.is_ok() {
            assert_eq!(
                counts.signal_counts(),
                (0, 0),
                "no program is told that it was stopped or goes on"
            );
        } else {
            assert!(
                counts.signal_counts().1 > 0,
                "this is what a freezer is for"
            );
        }
        tasker.send(ToTasker::Kill { tid: tid(1) });
        tasker.wait_for_exit(tid(1));
        tasker.stop_and_wait();
    }
}

/// A chain of processes that fork and exit cannot escape the freezer.
#[test]
#[ignore = "system tier: needs root, gcc and control groups of version 2"]
fn fork_chain_does_not_escape_the_freezer() {
    let mut tasker = start_with_freezer();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "chain");
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop_and_wait();
}

/// Returns the directory of the control group of a process.
fn control_group_of(pid: i32) -> PathBuf {
    let read_file = |path: String| std::fs::read(path).expect("it is there");
    let groups = read_file(format!("/proc/{pid}/cgroup"));
    sempa_proto::cgroup::group_dir(&read_file("/proc/self/mountinfo".into()), &groups, None)
        .expect("version 2")
}

fn is_frozen(group: &Path) -> bool {
    std::fs::read_to_string(group.join("cgroup.events")).is_ok_and(|text| text.contains("frozen 1"))
}

/// A paused task that migrates stays frozen until it is stopped, and is frozen again at the target.
#[test]
#[ignore = "system tier: needs CRIU, gcc and control groups of version 2"]
fn paused_task_stays_frozen_through_a_migration() {
    require_migration();
    let source = start_with_freezer();
    assert_frozen_task_migrates(source, Tasker::start());
}

/// Migrates a paused task between two taskers, and asserts that the task is frozen before and after
/// the migration.
fn assert_frozen_task_migrates(mut source: Tasker, mut target: Tasker) {
    let dir = tempfile::tempdir().expect("dir");
    let pid = source.start_task_and_wait(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut messages) = (Vec::new(), Vec::new());
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    pause_and_wait(&mut source, IMMEDIATELY, &mut messages);
    assert!(is_frozen(&control_group_of(pid)));
    let (id, images) = (common::migration_id(1), dir.path().join("images"));
    assert_eq!(
        prepare_and_wait(
            &mut target,
            tid(1),
            id,
            inspect_and_wait(&mut source, tid(1), id).expect("it can move")
        ),
        []
    );
    let previous_write_calls = write_calls(pid);
    stop_and_wait(&mut source, tid(1), id, &mut messages);
    assert!(
        !is_frozen(&control_group_of(pid)),
        "the engine cannot dump what is frozen"
    );
    // The test compares write calls and not processor time: the kernel itself uses processor time
    // for the task during the migration.
    assert_eq!(
        write_calls(pid),
        previous_write_calls,
        "its program does not run in between"
    );
    dump_and_wait(&mut source, tid(1), id, &images, &mut messages).expect("a dump");
    let restored_pid = restore_and_wait(&mut target, tid(1), id, &images).expect("a restore");
    let source_usage = kill_source_and_wait(&mut source, tid(1), id, &mut messages);
    target.send(ToTasker::Run {
        migration: id,
        earlier_usage: source_usage,
        stays_paused: false,
    });
    target.wait_for_value(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
    });
    output.extend(output_of(&messages, tid(1)));
    let line_count = count_lines(&output) + 200;
    target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    let mut messages = Vec::new();
    pause_and_wait(&mut target, Micros::from_millis(5), &mut messages);
    output.extend(output_of(&messages, tid(1)));
    assert!(
        is_frozen(&control_group_of(restored_pid)),
        "{}",
        control_group_of(restored_pid).display()
    );
    target.send(ToTasker::Resume { tid: tid(1) });
    let line_count = count_lines(&output) + 200;
    target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    assert_no_line_lost(&output);
    let group_dir = control_group_of(restored_pid)
        .parent()
        .expect("a tasker's")
        .to_path_buf();
    source.stop_and_wait();
    target.stop_and_wait();
    assert!(!group_dir.exists(), "{} is left", group_dir.display());
}

/// If no control groups of version 2 are mounted, the tasker mounts them privately.
#[test]
#[ignore = "system tier: needs CRIU, gcc and control groups of version 2"]
fn tasker_mounts_control_groups_privately() {
    let tasker = start_with_freezer();
    tasker.stop_and_wait();
    let unmount_script = "for at in $(findmnt -n -o TARGET -t cgroup2); do umount --lazy $at; done; exec \"$0\" \"$@\"";
    let start_without_mounts = || {
        let tasker =
            Tasker::start_wrapped(&["unshare", "--mount", "sh", "-c", unmount_script], &[]);
        assert_eq!(tasker.capabilities.freezer, Ok(()));
        let mount_table =
            std::fs::read(format!("/proc/{}/mountinfo", tasker.child.id())).expect("it lives");
        assert_eq!(
            sempa_proto::cgroup::find_mount_point(&mount_table, None),
            None,
            "nobody else sees it"
        );
        tasker
    };
    require_migration();
    assert_frozen_task_migrates(start_without_mounts(), start_without_mounts());
    let mut tasker = start_without_mounts();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "chain");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    let counter_path = counts.0.to_str().expect("text").to_string();
    let group = control_group_of(common::processes_with_text(&counter_path)[0]);
    assert!(is_frozen(&group));
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop_and_wait();
    assert!(
        !group.parent().expect("a tasker's").exists(),
        "{} is left",
        group.display()
    );
}

/// A frozen task is killed with its tasker. The next tasker removes the control group of the task.
#[test]
#[ignore = "system tier: needs root, gcc and control groups of version 2"]
fn frozen_task_dies_with_its_tasker() {
    let mut tasker = start_with_freezer();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "chain");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    let counter_path = counts.0.to_str().expect("text").to_string();
    let pids = common::processes_with_text(&counter_path);
    assert!(pids.len() > 1, "{pids:?}");
    let group = control_group_of(pids[0]);
    assert!(is_frozen(&group));
    tasker.child.kill().expect("it is there");
    wait_until("nobody is left", || !pids.iter().any(|pid| is_alive(*pid)));
    wait_until("a new tasker removes the groups of the dead one", || {
        Tasker::start().stop_and_wait();
        !group.exists() && !group.parent().expect("a folder").exists()
    });
}

/// A frozen task with a child between vfork and exec can be stopped for a migration.
#[test]
#[ignore = "system tier: needs root, gcc and control groups of version 2"]
fn frozen_task_with_vfork_child_can_be_stopped() {
    let mut tasker = start_with_freezer();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "vfork");
    for round in 1..=10 {
        let previous_step_count = counts.step_count();
        wait_until("it runs", || counts.step_count() > previous_step_count);
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        stop_and_wait(
            &mut tasker,
            tid(1),
            common::migration_id(round),
            &mut Vec::new(),
        );
        let previous_step_count = counts.step_count();
        continue_and_wait(
            &mut tasker,
            tid(1),
            common::migration_id(round),
            &mut Vec::new(),
        );
        wait_until_paused(&mut tasker, &mut Vec::new());
        assert!(tasker.wait_briefly_for_message().is_none(), "it is held");
        assert_eq!(counts.step_count(), previous_step_count);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until("it goes on", || counts.step_count() > previous_step_count);
    }
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop_and_wait();
}
