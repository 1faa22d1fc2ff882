//! Tests tasks that are paused for the owner of the host.

mod common;

use checkpoint::proc;
use common::moving::*;
use common::{Tasker, WAIT_TIMEOUT, is_alive, sh, tid, wait_until};
use procfs::process::{MMapPath, Process};
use sempa_proto::Micros;
use sempa_proto::task::RedirectAddress;
use sempa_proto::tasker::{FromTasker, MemoryWrite, ToTasker};
use std::path::{Path, PathBuf};
use std::time::Instant;

const IMMEDIATELY: Micros = Micros(0);

fn pause_and_wait(tasker: &mut Tasker, after: Micros, seen: &mut Vec<FromTasker>) {
    tasker.send(ToTasker::Pause {
        tid: tid(1),
        run_for: after,
    });
    tasker.wait_for(seen, |m| {
        matches!(m, FromTasker::Paused { tid: t } if *t == tid(1)).then_some(())
    });
}

/// Returns the processor time of a process in ticks.
fn cpu_ticks(pid: i32) -> u64 {
    let stat = proc::stat(pid).expect("it is there");
    stat.utime + stat.stime
}

/// Returns the number of write calls that a process has made. The counter writes all the time.
fn write_calls(pid: i32) -> u64 {
    let io = Process::new(pid).and_then(|process| process.io());
    io.expect("the kernel counts them").syscw
}

fn thread_nice_values(pid: i32) -> Vec<String> {
    let threads = proc::thread_ids(pid).expect("it is there");
    let stats = threads.into_iter().filter_map(proc::stat);
    stats.map(|stat| stat.nice.to_string()).collect()
}

/// A paused task uses no processor time, and loses no output when it is resumed.
#[test]
#[ignore = "system tier: needs gcc"]
fn held_task_uses_no_cpu_and_loses_nothing() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start();
    let pid = tasker.run(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut seen) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    for after in [IMMEDIATELY, Micros::from_millis(30), IMMEDIATELY] {
        pause_and_wait(&mut tasker, after, &mut seen);
        output.extend(output_of(&std::mem::take(&mut seen), tid(1)));
        let before = cpu_ticks(pid);
        assert!(
            tasker.poll().is_none() && tasker.poll().is_none(),
            "it says nothing"
        );
        assert_eq!(cpu_ticks(pid), before);
        assert!(
            thread_nice_values(pid).iter().all(|nice| nice == "0"),
            "a dump must not find it lowered"
        );
        // Pause the task again: it runs for a short time, then it is stopped.
        pause_and_wait(&mut tasker, Micros::from_millis(20), &mut seen);
        output.extend(output_of(&std::mem::take(&mut seen), tid(1)));
        let before = cpu_ticks(pid);
        assert!(tasker.poll().is_none());
        assert_eq!(cpu_ticks(pid), before);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        let more = count_lines(&output) + 200;
        tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    }
    assert_no_line_lost(&output);
    tasker.stop();
}

/// If a task is paused and resumed in any order during a migration, the last order counts.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn last_order_wins_during_a_migration() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start();
    let pid = tasker.run(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut seen) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    let stands_still = |tasker: &mut Tasker| {
        let before = cpu_ticks(pid);
        assert!(tasker.poll().is_none());
        assert_eq!(cpu_ticks(pid), before);
    };
    // After a cancelled migration the task is paused or runs, as the owner's last order requires.
    pause_and_wait(&mut tasker, Micros::from_millis(5), &mut seen);
    stop(&mut tasker, tid(1), common::migration(1), &mut seen);
    continue_task(&mut tasker, tid(1), common::migration(1), &mut seen);
    stands_still(&mut tasker);
    // The owner appears while the task is stopped for a migration.
    tasker.send(ToTasker::Resume { tid: tid(1) });
    stop(&mut tasker, tid(1), common::migration(2), &mut seen);
    pause_and_wait(&mut tasker, Micros::from_millis(30), &mut seen);
    continue_task(&mut tasker, tid(1), common::migration(2), &mut seen);
    stands_still(&mut tasker);
    // The owner leaves while the task is stopped for a migration.
    stop(&mut tasker, tid(1), common::migration(3), &mut seen);
    tasker.send(ToTasker::Resume { tid: tid(1) });
    stands_still(&mut tasker);
    continue_task(&mut tasker, tid(1), common::migration(3), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    let more = count_lines(&output) + 200;
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    assert_no_line_lost(&output);
    tasker.stop();
}

/// A paused task migrates without running, and stays paused if the target is ordered to keep it
/// paused.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn held_task_migrates_without_running() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut seen) = (Vec::new(), Vec::new());
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    pause_and_wait(&mut here, Micros::from_millis(10), &mut seen);
    output.extend(output_of(&std::mem::take(&mut seen), tid(1)));
    let (id, images) = (common::migration(1), dir.path().join("images"));
    let facts = inspect(&mut here, tid(1), id).expect("it can move");
    assert_eq!(prepare(&mut there, tid(1), id, facts), []);
    stop(&mut here, tid(1), id, &mut seen);
    dump(&mut here, tid(1), id, &images, &mut seen).expect("a dump");
    assert!(output_of(&seen, tid(1)).is_empty(), "it has run");
    let copy = restore(&mut there, tid(1), id, &images).expect("a restore");
    let used_here = kill_migrated(&mut here, tid(1), id, &mut seen);
    there.send(ToTasker::Run {
        migration: id,
        used: used_here,
        paused: true,
    });
    there.wait_for(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
    });
    output.extend(output_of(&seen, tid(1)));
    let before = cpu_ticks(copy);
    assert!(
        there.poll().is_none() && there.poll().is_none(),
        "it says nothing"
    );
    assert_eq!(cpu_ticks(copy), before);
    there.send(ToTasker::Resume { tid: tid(1) });
    let more = count_lines(&output) + 200;
    there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
}

/// A paused task receives SIGTERM when it is resumed, and can be killed while it is paused.
#[test]
fn held_task_can_be_terminated_and_killed() {
    let mut tasker = Tasker::start();
    let asked = "trap 'echo asked; exit 7' TERM; echo ready; while :; do :; done";
    tasker.run(tid(1), &sh(), &["-c", asked]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    let (rest, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!((rest.as_slice(), status), (&b"asked\n"[..], 7 << 8));

    let deaf = "trap '' TERM; echo ready; while :; do :; done";
    let pid = tasker.run(tid(1), &sh(), &["-c", deaf]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    tasker.wait_for(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Paused { .. }).then_some(())
    });
    let before = cpu_ticks(pid);
    // A signal that would continue the task is kept until it is resumed.
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGCONT,
    });
    assert!(tasker.poll().is_none());
    assert_eq!(cpu_ticks(pid), before);
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGKILL,
    });
    let (_, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, libc::SIGKILL);
    tasker.stop();
}

/// The redirection for a task's library is written into the memory of the stopped task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn redirection_is_written_into_a_stopped_task() {
    require_migration();
    let mut tasker = Tasker::start();
    let script = "w=0123456789; echo ready; while :; do echo $w; sleep 0.01; done";
    let pid = tasker.run(tid(1), &sh(), &["-c", script]);
    let (mut output, mut seen) = (Vec::new(), Vec::new());
    tasker.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 3);
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut seen);
    // Use an address in writable memory after the mapping's first page; any other address in it
    // would do as well.
    let maps = Process::new(pid).and_then(|process| process.maps());
    let maps = maps.expect("it is there");
    let heap = maps.iter().find(|map| map.pathname == MMapPath::Heap);
    let at = heap.expect("a heap").address.0 + 4096;
    let stop = |tasker: &mut Tasker, number: u64, pid: i32, at: u64, seen: &mut Vec<FromTasker>| {
        let redirection = Some(MemoryWrite {
            address: RedirectAddress { pid, address: at },
            bytes: b"sempa".to_vec(),
        });
        tasker.send(ToTasker::Stop {
            migration: common::migration(number),
            tid: tid(1),
            memory_write: redirection,
        });
        let result = tasker.wait_for(seen, |m| match m {
            FromTasker::Stopped { result, .. } => Some(result.clone()),
            _ => None,
        });
        tasker.send(ToTasker::AbortMigration {
            migration: common::migration(number),
            tid: tid(1),
        });
        tasker.wait_for(seen, |m| {
            matches!(m, FromTasker::MigrationAborted { .. }).then_some(())
        });
        result
    };
    let inner = proc::innermost_pid(pid).expect("it is there");
    assert_eq!(stop(&mut tasker, 1, inner, at, &mut seen), Ok(()));
    let mut bytes = [0u8; 5];
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("ours");
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut bytes, at).expect("mapped");
    assert_eq!(&bytes, b"sempa");
    assert!(
        stop(&mut tasker, 2, inner, 8, &mut seen).is_err(),
        "nothing is mapped there"
    );
    assert!(
        stop(&mut tasker, 3, 30_000, at, &mut seen).is_err(),
        "this is none of its processes"
    );
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop();
}

/// Children that a paused task itself has stopped stay stopped when the task is resumed.
#[test]
fn own_stopped_children_stay_stopped() {
    let mut tasker = Tasker::start();
    let script =
        "sh -c 'echo child; kill -STOP $$; echo woken' & wait $!; echo over; wait $!; echo end";
    tasker.run(tid(1), &sh(), &["-c", script]);
    let mut output = Vec::new();
    tasker.wait_for_output(tid(1), &mut output, |text| text.starts_with(b"child"));
    let asleep = || {
        common::processes_with("echo woken")
            .iter()
            .any(|pid| proc::stat(*pid).is_some_and(|stat| stat.state == 'T'))
    };
    wait_until("the child has stopped itself", asleep);
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    tasker.send(ToTasker::Resume { tid: tid(1) });
    assert!(tasker.poll().is_none(), "nobody says that it was woken");
    assert!(asleep());
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop();
}

/// Lets a paused task quiesce. For at most `alone` only its library's threads run.
fn let_quiesce(tasker: &mut Tasker, alone: Micros) {
    tasker.send(ToTasker::ResumeToQuiesce {
        tid: tid(1),
        library_only_for: alone,
        run_for: LONG_TIME,
    });
}

const LONG_TIME: Micros = Micros::from_millis(600_000);

/// If a paused task must quiesce, only its library's threads run at first; the program runs if that
/// is not enough.
#[test]
#[ignore = "system tier: needs gcc"]
fn quiesce_of_held_task_runs_the_library_first() {
    let dir = tempfile::tempdir().expect("dir");
    let program = compile_program(dir.path(), "halves");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut tasker, counts) = (Tasker::start_with_env(env), SharedCounters::new(dir.path()));
        let pid = tasker.run(tid(1), &program, &[counts.0.to_str().expect("text")]);
        let (of_program, of_library) = (
            || counts.counter(0) + counts.counter(2),
            || counts.counter(1),
        );
        counts.wait_for_stopped_process();
        let counts_on = |what: &str, counts: &dyn Fn() -> u64| {
            let before = counts();
            wait_until(what, || counts() > before + 10);
        };
        counts_on("the program runs", &of_program);
        counts_on("the library runs", &of_library);
        let (mut rounds, end) = (0, Instant::now() + WAIT_TIMEOUT);
        while rounds < 5 {
            pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
            let before = of_program();
            let_quiesce(&mut tasker, LONG_TIME);
            counts_on("the library runs alone", &of_library);
            // A second order has no effect.
            let_quiesce(&mut tasker, LONG_TIME);
            counts_on("the library runs alone", &of_library);
            pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
            if of_program() != before {
                // The tasker freezes the program's threads within 20 ms, or lets them run.
                assert!(Instant::now() < end, "the program runs in each round");
                continue;
            }
            rounds += 1;
            let before = (of_library(), before);
            assert!(
                tasker.poll().is_none() && tasker.poll().is_none(),
                "it says nothing"
            );
            assert_eq!((of_library(), of_program()), before, "somebody runs");
            assert!(
                thread_nice_values(pid).iter().all(|nice| nice == "0"),
                "a dump must not find it lowered"
            );
        }
        let_quiesce(&mut tasker, Micros::from_millis(50));
        counts_on(
            "the program runs when the library was alone for long enough",
            &of_program,
        );
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        let_quiesce(&mut tasker, LONG_TIME);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        counts_on("the program goes on", &of_program);
        counts_on("its child does", &|| counts.counter(2));
        // Pause the task while it quiesces.
        tasker.send(ToTasker::Pause {
            tid: tid(1),
            run_for: LONG_TIME,
        });
        let_quiesce(&mut tasker, LONG_TIME);
        let before = of_program();
        counts_on("the library runs alone", &of_library);
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until("the program goes on", || of_program() > before);
        assert_eq!(
            counts.counter(3),
            0,
            "a child that had stopped itself was woken"
        );
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        let_quiesce(&mut tasker, LONG_TIME);
        tasker.send(ToTasker::Kill { tid: tid(1) });
        let (_, status, _) = tasker.wait_for_exit(tid(1));
        assert_eq!(status, libc::SIGKILL, "also while the library runs alone");
        tasker.stop();
    }
}

/// A task of which only the library's threads run can be stopped and migrated.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn task_with_library_running_alone_migrates() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let program = compile_program(dir.path(), "halves");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut here, mut there) = (Tasker::start_with_env(env), Tasker::start_with_env(env));
        let counts = SharedCounters::new(dir.path());
        here.run(tid(1), &program, &[counts.0.to_str().expect("text")]);
        wait_until("all run", || {
            [0, 1, 2].iter().all(|index| counts.counter(*index) > 10)
        });
        counts.wait_for_stopped_process();
        let (images, mut seen) = (dir.path().join("images"), Vec::new());
        let of_program = || counts.counter(0) + counts.counter(2);
        let (mut attempts, end) = (1, Instant::now() + WAIT_TIMEOUT);
        let (id, before) = loop {
            let id = common::migration(attempts);
            let facts = inspect(&mut here, tid(1), id).expect("it can migrate");
            assert_eq!(prepare(&mut there, tid(1), id, facts), []);
            pause_and_wait(&mut here, IMMEDIATELY, &mut seen);
            let before = of_program();
            let_quiesce(&mut here, LONG_TIME);
            let library = counts.counter(1);
            wait_until("the library runs alone", || {
                counts.counter(1) > library + 10
            });
            stop(&mut here, tid(1), id, &mut seen);
            if of_program() == before {
                break (id, before);
            }
            // The tasker freezes the program's threads within 20 ms, or lets them run.
            assert!(Instant::now() < end, "the program runs in each attempt");
            continue_task(&mut here, tid(1), id, &mut seen);
            here.send(ToTasker::Resume { tid: tid(1) });
            attempts += 1;
        };
        dump(&mut here, tid(1), id, &images, &mut seen).expect("a dump");
        assert_eq!(of_program(), before, "the program has run");
        restore(&mut there, tid(1), id, &images).expect("a restore");
        let used = kill_migrated(&mut here, tid(1), id, &mut seen);
        there.send(ToTasker::Run {
            migration: id,
            used,
            paused: false,
        });
        there.wait_for(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
        });
        let (program, child) = (counts.counter(0), counts.counter(2));
        wait_until("the program goes on there", || {
            counts.counter(0) > program && counts.counter(2) > child
        });
        assert_eq!(
            counts.counter(3),
            0,
            "a child that had stopped itself was woken"
        );
        there.send(ToTasker::Kill { tid: tid(1) });
        there.wait_for_exit(tid(1));
        here.stop();
        there.stop();
        std::fs::remove_dir_all(&images).expect("images");
    }
}

/// Environment in which the tasker pauses tasks by signals, like a tasker that may not create
/// control groups.
const PAUSE_BY_SIGNAL_ENV: &[(&str, &str)] = &[("SEMPA_FREEZER", "off")];

/// Starts a tasker whose freezer the test can inspect.
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
    fn new(dir: &Path) -> SharedCounters {
        let path = dir.join("counts");
        std::fs::write(&path, [0u8; 4096]).expect("written");
        SharedCounters(path)
    }

    fn counter(&self, index: usize) -> u64 {
        let bytes = std::fs::read(&self.0).expect("it is there");
        u64::from_ne_bytes(bytes[index * 8..][..8].try_into().expect("eight"))
    }

    /// Waits until one of the program's processes has stopped itself.
    fn wait_for_stopped_process(&self) {
        let mark = self.0.to_str().expect("text");
        wait_until("one has stopped itself", || {
            common::processes_with(mark)
                .into_iter()
                .any(|pid| proc::stat(pid).is_some_and(|stat| stat.state == 'T'))
        });
    }

    fn steps(&self) -> u64 {
        self.counter(0)
    }

    fn created_processes(&self) -> u64 {
        self.counter(1)
    }

    fn signals(&self) -> (u64, u64) {
        (self.counter(2), self.counter(3))
    }

    /// Runs the program as a task, and pauses and resumes it several times.
    fn run_pause_rounds(&self, tasker: &mut Tasker, program: &Path, how: &str) {
        tasker.run(tid(1), program, &[self.0.to_str().expect("text"), how]);
        for after in [
            IMMEDIATELY,
            Micros::from_millis(10),
            IMMEDIATELY,
            Micros::from_millis(1),
            IMMEDIATELY,
        ] {
            let made = self.created_processes();
            wait_until("more processes are made", || {
                self.created_processes() > made + 20
            });
            pause_and_wait(tasker, after, &mut Vec::new());
            let steps = self.steps();
            assert!(
                tasker.poll().is_none() && tasker.poll().is_none(),
                "it says nothing"
            );
            assert_eq!(self.steps(), steps, "somebody runs");
            tasker.send(ToTasker::Resume { tid: tid(1) });
            wait_until("it goes on", || self.steps() > steps);
        }
    }
}

/// A task that forks continuously is paused as a whole, by the freezer and by signals.
#[test]
#[ignore = "system tier: needs gcc"]
fn forking_task_is_held_by_freezer_and_signal() {
    let dir = tempfile::tempdir().expect("dir");
    let program = compile_program(dir.path(), "forker");
    for env in [&[][..], PAUSE_BY_SIGNAL_ENV] {
        let (mut tasker, counts) = (Tasker::start_with_env(env), SharedCounters::new(dir.path()));
        counts.run_pause_rounds(&mut tasker, &program, "crowd");
        if tasker.capabilities.freezer.is_ok() {
            assert_eq!(
                counts.signals(),
                (0, 0),
                "no program is told that it was stopped or goes on"
            );
        } else {
            assert!(counts.signals().1 > 0, "this is what a freezer is for");
        }
        tasker.send(ToTasker::Kill { tid: tid(1) });
        tasker.wait_for_exit(tid(1));
        tasker.stop();
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
    tasker.stop();
}

/// Returns the control group of a process.
fn control_group_of(pid: i32) -> PathBuf {
    let text = |path: String| std::fs::read(path).expect("it is there");
    let groups = text(format!("/proc/{pid}/cgroup"));
    sempa_proto::cgroup::group_dir(&text("/proc/self/mountinfo".into()), &groups, None)
        .expect("version 2")
}

fn is_frozen(group: &Path) -> bool {
    std::fs::read_to_string(group.join("cgroup.events")).is_ok_and(|text| text.contains("frozen 1"))
}

/// A paused task that migrates is frozen at the target, and is not thawed before it is stopped.
#[test]
#[ignore = "system tier: needs CRIU, gcc and control groups of version 2"]
fn held_task_stays_frozen_through_a_migration() {
    require_migration();
    let here = start_with_freezer();
    assert_frozen_task_migrates(here, Tasker::start());
}

/// Migrates a paused task between two taskers, and asserts that the task is frozen before and
/// after.
fn assert_frozen_task_migrates(mut here: Tasker, mut there: Tasker) {
    let dir = tempfile::tempdir().expect("dir");
    let pid = here.run(tid(1), &compile_program(dir.path(), "counter"), &[]);
    let (mut output, mut seen) = (Vec::new(), Vec::new());
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    pause_and_wait(&mut here, IMMEDIATELY, &mut seen);
    assert!(is_frozen(&control_group_of(pid)));
    let (id, images) = (common::migration(1), dir.path().join("images"));
    assert_eq!(
        prepare(
            &mut there,
            tid(1),
            id,
            inspect(&mut here, tid(1), id).expect("it can move")
        ),
        []
    );
    let before = write_calls(pid);
    stop(&mut here, tid(1), id, &mut seen);
    assert!(
        !is_frozen(&control_group_of(pid)),
        "the engine cannot dump what is frozen"
    );
    // The counter of write calls is used because the kernel itself uses processor time for the task
    // during the migration.
    assert_eq!(
        write_calls(pid),
        before,
        "its program does not run in between"
    );
    dump(&mut here, tid(1), id, &images, &mut seen).expect("a dump");
    let copy = restore(&mut there, tid(1), id, &images).expect("a restore");
    let used_here = kill_migrated(&mut here, tid(1), id, &mut seen);
    there.send(ToTasker::Run {
        migration: id,
        used: used_here,
        paused: false,
    });
    there.wait_for(&mut Vec::new(), |m| {
        matches!(m, FromTasker::Running { result: Ok(()), .. }).then_some(())
    });
    output.extend(output_of(&seen, tid(1)));
    let more = count_lines(&output) + 200;
    there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    let mut seen = Vec::new();
    pause_and_wait(&mut there, Micros::from_millis(5), &mut seen);
    output.extend(output_of(&seen, tid(1)));
    assert!(
        is_frozen(&control_group_of(copy)),
        "{}",
        control_group_of(copy).display()
    );
    there.send(ToTasker::Resume { tid: tid(1) });
    let more = count_lines(&output) + 200;
    there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    assert_no_line_lost(&output);
    let folder = control_group_of(copy)
        .parent()
        .expect("a tasker's")
        .to_path_buf();
    here.stop();
    there.stop();
    assert!(!folder.exists(), "{} is left", folder.display());
}

/// If control groups of version 2 are not mounted, the tasker mounts them privately.
#[test]
#[ignore = "system tier: needs CRIU, gcc and control groups of version 2"]
fn tasker_mounts_the_freezer_for_itself() {
    let tasker = start_with_freezer();
    tasker.stop();
    let hides = "for at in $(findmnt -n -o TARGET -t cgroup2); do umount --lazy $at; done; exec \"$0\" \"$@\"";
    let start = || {
        let tasker = Tasker::start_wrapped(&["unshare", "--mount", "sh", "-c", hides], &[]);
        assert_eq!(tasker.capabilities.freezer, Ok(()));
        let seen =
            std::fs::read(format!("/proc/{}/mountinfo", tasker.child.id())).expect("it lives");
        assert_eq!(
            sempa_proto::cgroup::find_mount_point(&seen, None),
            None,
            "nobody else sees it"
        );
        tasker
    };
    require_migration();
    assert_frozen_task_migrates(start(), start());
    let mut tasker = start();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "chain");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    let mark = counts.0.to_str().expect("text").to_string();
    let group = control_group_of(common::processes_with(&mark)[0]);
    assert!(is_frozen(&group));
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop();
    assert!(
        !group.parent().expect("a tasker's").exists(),
        "{} is left",
        group.display()
    );
}

/// A frozen task dies with its tasker, and the next tasker removes its control group.
#[test]
#[ignore = "system tier: needs root, gcc and control groups of version 2"]
fn frozen_task_dies_with_its_tasker() {
    let mut tasker = start_with_freezer();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "chain");
    pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
    let mark = counts.0.to_str().expect("text").to_string();
    let pids = common::processes_with(&mark);
    assert!(pids.len() > 1, "{pids:?}");
    let group = control_group_of(pids[0]);
    assert!(is_frozen(&group));
    tasker.child.kill().expect("it is there");
    wait_until("nobody is left", || !pids.iter().any(|pid| is_alive(*pid)));
    wait_until("a new tasker removes the groups of the dead one", || {
        Tasker::start().stop();
        !group.exists() && !group.parent().expect("a folder").exists()
    });
}

/// A frozen task whose child is in vfork can be stopped for a migration.
#[test]
#[ignore = "system tier: needs root, gcc and control groups of version 2"]
fn frozen_task_with_vfork_child_can_be_stopped() {
    let mut tasker = start_with_freezer();
    let dir = tempfile::tempdir().expect("dir");
    let counts = SharedCounters::new(dir.path());
    counts.run_pause_rounds(&mut tasker, &compile_program(dir.path(), "forker"), "vfork");
    for round in 1..=10 {
        let steps = counts.steps();
        wait_until("it runs", || counts.steps() > steps);
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut Vec::new());
        stop(
            &mut tasker,
            tid(1),
            common::migration(round),
            &mut Vec::new(),
        );
        let steps = counts.steps();
        continue_task(
            &mut tasker,
            tid(1),
            common::migration(round),
            &mut Vec::new(),
        );
        assert!(tasker.poll().is_none(), "it is held");
        assert_eq!(counts.steps(), steps);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until("it goes on", || counts.steps() > steps);
    }
    tasker.send(ToTasker::Kill { tid: tid(1) });
    tasker.wait_for_exit(tid(1));
    tasker.stop();
}
