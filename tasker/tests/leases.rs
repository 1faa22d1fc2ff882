//! Tests the daemon's lease: a tasker whose daemon hangs freezes its tasks and ends them by
//! itself.

mod common;

use checkpoint::boot_clock;
use common::{
    MECHANISMS, Tasker, cpu_ticks, is_alive, shell_path, start_order, tid, wait_until,
    wait_until_runs,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::Micros;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

/// A program that uses its processor without a pause.
const SPIN: &str = "while :; do :; done";
/// Time for which a frozen task is not ended in a test.
const LONG: Micros = Micros::from_secs(600);

/// Renews the lease and returns the time for which the tasks were frozen.
fn renew_and_wait(tasker: &mut Tasker, freeze_after: Micros, kill_after: Micros) -> Micros {
    let now = boot_clock::now();
    tasker.send(ToTasker::RenewLease {
        freeze_at: now + freeze_after,
        kill_at: now + kill_after,
    });
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::LeaseRenewed { frozen_time } => Some(*frozen_time),
        _ => None,
    })
}

/// Waits until a process uses no processor time, as seen twice in a row.
fn wait_until_still(tasker: &mut Tasker, pid: i32) {
    let (mut last_ticks, mut equal_count) = (cpu_ticks(pid), 0);
    while equal_count < 2 {
        assert!(tasker.wait_briefly_for_report().is_none());
        let ticks = cpu_ticks(pid);
        equal_count = if ticks == last_ticks {
            equal_count + 1
        } else {
            0
        };
        last_ticks = ticks;
    }
}

/// Without a renewal all tasks are stopped and none starts. A renewal lets those run again that
/// nothing else has stopped; meanwhile the daemon's orders took effect.
#[test]
fn tasks_are_frozen_until_the_lease_is_renewed() {
    for env in MECHANISMS {
        let mut tasker = Tasker::start_with_mechanism(env);
        let pids = [1, 2, 3]
            .map(|number| tasker.start_task_and_wait(tid(number), &shell_path(), &["-c", SPIN]));
        let wait_until_paused = |tasker: &mut Tasker, number| {
            tasker.send(ToTasker::Pause {
                tid: tid(number),
                run_time: Micros(0),
            });
            tasker.wait_for_value(&mut Vec::new(), |m| {
                matches!(m, FromTasker::Paused { tid: t } if *t == tid(number)).then_some(())
            });
        };
        wait_until_paused(&mut tasker, 2);
        assert_eq!(renew_and_wait(&mut tasker, LONG, LONG), Micros(0));
        wait_until_runs(pids[0]);
        renew_and_wait(&mut tasker, Micros(0), LONG);
        wait_until_still(&mut tasker, pids[0]);
        wait_until_still(&mut tasker, pids[2]);
        tasker.send(ToTasker::Start(start_order(tid(4), &shell_path(), &[])));
        tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::StartFailed { reason, .. } => {
                assert!(reason.contains("lease"));
                Some(())
            }
            _ => None,
        });
        // The owner leaves task 2 alone, and stops task 3.
        tasker.send(ToTasker::Resume { tid: tid(2) });
        wait_until_paused(&mut tasker, 3);
        wait_until_still(&mut tasker, pids[1]);
        assert!(renew_and_wait(&mut tasker, LONG, LONG) > Micros(0));
        wait_until_runs(pids[0]);
        wait_until_runs(pids[1]);
        wait_until_still(&mut tasker, pids[2]);
        tasker.stop_and_wait();
    }
}

/// Without a renewal the tasker ends all tasks and itself, and gives the reason.
#[test]
fn tasks_end_when_the_lease_has_run_out() {
    for env in MECHANISMS {
        let mut tasker = Tasker::start_with_mechanism(env);
        let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", SPIN]);
        renew_and_wait(&mut tasker, Micros(1), Micros::from_millis(100));
        tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::LeaseExpired { reason } => {
                assert!(reason.contains("renewed"));
                Some(())
            }
            _ => None,
        });
        wait_until("the task has ended", || !is_alive(pid));
        let status = tasker.child.wait().expect("it is a child");
        assert_eq!(status.code(), Some(1));
    }
}

/// A tasker that hung itself kills nothing if the daemon has renewed the lease meanwhile.
#[test]
fn tasks_of_tasker_that_hung_continue() {
    let mut tasker = Tasker::start();
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", SPIN]);
    renew_and_wait(&mut tasker, Micros::from_secs(3), Micros::from_secs(6));
    let tasker_pid = Pid::from_raw(tasker.child.id().cast_signed());
    kill(tasker_pid, Signal::SIGSTOP).expect("it runs");
    let lease_end = boot_clock::now() + Micros::from_secs(8);
    wait_until("the lease has run out", || boot_clock::now() > lease_end);
    let renewed_until = boot_clock::now() + LONG;
    tasker.send(ToTasker::RenewLease {
        freeze_at: renewed_until,
        kill_at: renewed_until,
    });
    kill(tasker_pid, Signal::SIGCONT).expect("it exists");
    tasker.wait_for_value(&mut Vec::new(), |m| {
        matches!(m, FromTasker::LeaseRenewed { .. }).then_some(())
    });
    wait_until_runs(pid);
    // The last resort would follow within 1.5 s.
    let later = boot_clock::now() + Micros::from_secs(3);
    wait_until("a last resort would be over", || boot_clock::now() > later);
    wait_until_runs(pid);
    tasker.stop_and_wait();
}

/// A tasker without tasks waits for the next lease.
#[test]
fn tasker_without_tasks_outlives_the_lease() {
    let mut tasker = Tasker::start();
    renew_and_wait(&mut tasker, Micros(0), Micros(1));
    renew_and_wait(&mut tasker, LONG, LONG);
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", SPIN]);
    tasker.stop_and_wait();
}

/// A python3 program that prints a line when it has done what its argument asks for, and keeps it
/// until it is killed.
struct Holder(Child);

impl Holder {
    fn start(code: &str, argument: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", code, argument])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("it says when");
        assert_eq!(line, "held\n");
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Programs on a file system that hangs cannot be started. The host's other tasks run on, because
/// each attempt ends in time and the renewal of the lease is handled before the next one.
#[test]
#[ignore = "system tier: needs python3"]
fn slow_starts_do_not_end_other_tasks() {
    // A lease on the program's file blocks its exec, as a file system that hangs does.
    const LEASE_HOLDER: &str = "import fcntl, signal, sys, time\n\
        signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
        f = open(sys.argv[1], 'r+b')\n\
        fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
        print('held', flush=True)\n\
        time.sleep(600)\n";
    const SLOW_STARTS: u32 = 3;
    let dir = tempfile::tempdir().expect("dir");
    let program = dir.path().join("slow");
    std::fs::copy(
        std::fs::canonicalize(shell_path()).expect("a shell"),
        &program,
    )
    .expect("copy");
    let _holder = Holder::start(LEASE_HOLDER, program.to_str().expect("text"));
    let mut tasker = Tasker::start();
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", SPIN]);
    renew_and_wait(&mut tasker, Micros::from_secs(4), Micros::from_secs(5));
    for number in 0..SLOW_STARTS {
        tasker.send(ToTasker::Start(start_order(tid(2 + number), &program, &[])));
    }
    let renewed_until = boot_clock::now() + LONG;
    tasker.send(ToTasker::RenewLease {
        freeze_at: renewed_until,
        kill_at: renewed_until,
    });
    for _ in 0..SLOW_STARTS {
        tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::StartFailed { reason, .. } => {
                assert!(reason.contains("within"));
                Some(())
            }
            _ => None,
        });
    }
    wait_until_runs(pid);
    tasker.stop_and_wait();
}

/// If the tasker's main thread is blocked when the lease runs out, the tasker kills itself, and
/// the kernel its tasks.
#[test]
#[ignore = "system tier: needs root and python3"]
fn tasks_of_blocked_tasker_end_with_the_lease() {
    // A debugger that stops only the main thread.
    const THREAD_HOLDER: &str = "import ctypes, os, sys, time\n\
        PTRACE_ATTACH, WALL = 16, 0x40000000\n\
        pid = int(sys.argv[1])\n\
        assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, pid, None, None) == 0\n\
        os.waitpid(pid, WALL)\n\
        print('held', flush=True)\n\
        time.sleep(600)\n";
    let mut tasker = Tasker::start();
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", SPIN]);
    renew_and_wait(&mut tasker, Micros::from_secs(5), Micros::from_secs(6));
    let holder = Holder::start(THREAD_HOLDER, &tasker.child.id().to_string());
    wait_until("the task has ended", || !is_alive(pid));
    // The end of a traced thread is visible to its parent after the tracer has ended.
    drop(holder);
    let status = tasker.child.wait().expect("it is a child");
    assert_eq!(status.signal(), Some(Signal::SIGKILL as i32));
}
