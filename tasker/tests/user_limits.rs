//! Limits of a user hold for all taskers that run tasks of this user.

mod common;

use common::{Tasker, shell_path, start_order, tid};
use sempa_proto::Tid;
use sempa_proto::host_limit::HostLimit;
use sempa_proto::tasker::{FromTasker, TaskStart, ToTasker};
use sempa_service_settings::SETTINGS_VARIABLE;
use sempa_service_settings::host_account::{
    ACCOUNT_DIR_VARIABLE, HostUse, is_running, read_totals, write_guest_cap,
};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// An ordinary user with an account on every machine.
const NOBODY: u32 = 65_534;
const TIMEOUT: Duration = Duration::from_secs(30);
/// Services of a virtual machine that are no guests.
const SERVICES_MAX: u32 = 4;

/// An account and settings for the taskers of one test.
struct Service {
    dir: TempDir,
}

impl Service {
    fn new(settings: &str) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let path = dir.path().join("service.toml");
        fs::write(&path, settings).expect("the test's own directory");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("the test's own file");
        Self { dir }
    }

    fn account_dir(&self) -> PathBuf {
        self.dir.path().join("account")
    }

    fn start_tasker(&self) -> Tasker {
        let settings = self.dir.path().join("service.toml");
        let account = self.account_dir();
        let env = [
            (SETTINGS_VARIABLE, settings.to_str().expect("text")),
            (ACCOUNT_DIR_VARIABLE, account.to_str().expect("text")),
        ];
        Tasker::start_wrapped_for(Some(NOBODY), &[], &env)
    }

    fn usage(&self) -> HostUse {
        let totals = read_totals(&self.account_dir(), is_running).expect("readable");
        totals.of_user(NOBODY)
    }

    /// Waits until the user's use satisfies `is_reached`.
    fn wait_for_usage(&self, is_reached: impl Fn(&HostUse) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !is_reached(&self.usage()) {
            assert!(Instant::now() < deadline, "{:?}", self.usage());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn sleeper(number: u32) -> TaskStart {
    start_order(tid(number), &shell_path(), &["-c", "exec sleep 600"])
}

/// Returns an order for a task that has `mebibytes` MiB of memory.
fn memory_holder(number: u32, mebibytes: usize) -> TaskStart {
    let script =
        format!("import time; held = bytearray(b'x') * ({mebibytes} << 20); time.sleep(600)");
    start_order(tid(number), "/usr/bin/python3".as_ref(), &["-c", &script])
}

/// Starts a task. Returns the reason if it is refused.
fn start(tasker: &mut Tasker, order: TaskStart) -> Result<(), String> {
    tasker.send(ToTasker::Start(order));
    tasker.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::Started { .. } => Some(Ok(())),
        FromTasker::StartFailed { reason, .. } => Some(Err(reason.clone())),
        _ => None,
    })
}

/// Two taskers of a user share the limit. The place of a tasker that was killed is free.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn taskers_of_a_user_share_the_limit() {
    let service = Service::new("tasks = 2\n");
    let (mut first, mut second) = (service.start_tasker(), service.start_tasker());
    assert_eq!(start(&mut first, sleeper(1)), Ok(()));
    assert_eq!(start(&mut second, sleeper(1)), Ok(()));
    let reason = start(&mut second, sleeper(2)).expect_err("the limit is reached");
    assert!(
        reason.ends_with("allows 2 tasks of nobody on this machine, and 2 are present"),
        "{reason}"
    );
    write_guest_cap(&service.account_dir(), Some(1)).expect("the test's own directory");
    first.stop_and_wait();
    let reason = start(&mut second, sleeper(2)).expect_err("the cap is reached");
    assert!(
        reason.ends_with("its owner allows 1 tasks on this machine, and as many are present"),
        "{reason}"
    );
    write_guest_cap(&service.account_dir(), None).expect("the test's own directory");
    assert_eq!(start(&mut second, sleeper(2)), Ok(()));
    second.stop_and_wait();
}

/// A daemon can declare a few tasks to be services, which do not count; the others count.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn only_few_services_are_not_limited() {
    let service = Service::new("tasks = 1\n");
    let mut tasker = service.start_tasker();
    let pinned = |number| TaskStart {
        pinned: true,
        ..sleeper(number)
    };
    for number in 1..=SERVICES_MAX + 1 {
        assert_eq!(start(&mut tasker, pinned(number)), Ok(()), "{number}");
    }
    let reason = start(&mut tasker, pinned(9)).expect_err("a guest is there");
    assert!(reason.contains("and 1 are present"), "{reason}");
    service.wait_for_usage(|usage| (usage.guests, usage.services) == (1, 4));
    tasker.stop_and_wait();
}

/// The largest task of the user is killed, whichever tasker runs it, and no other.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn largest_task_is_killed() {
    let service = Service::new("memory = \"100M\"\n");
    let (mut first, mut second) = (service.start_tasker(), service.start_tasker());
    assert_eq!(start(&mut first, memory_holder(1, 30)), Ok(()));
    assert_eq!(start(&mut second, memory_holder(1, 45)), Ok(()));
    service.wait_for_usage(|usage| usage.memory_bytes > 75 << 20);
    assert_eq!(start(&mut first, memory_holder(2, 40)), Ok(()));
    let (killed, limit) = second.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::KilledForLimit { tid, limit, .. } => Some((*tid, limit.clone())),
        _ => None,
    });
    let HostLimit::MemoryOfUser {
        user,
        used_bytes,
        limit_bytes,
    } = limit
    else {
        panic!("{limit:?}")
    };
    assert_eq!((killed, &*user, limit_bytes), (tid(1), "nobody", 100 << 20));
    assert!((115..160).contains(&(used_bytes >> 20)), "{used_bytes}");
    let (_, status, _) = second.wait_for_exit(tid(1));
    assert_eq!(status, 9);
    service.wait_for_usage(|usage| (60 << 20..100 << 20).contains(&usage.memory_bytes));
    // Longer than two measurements.
    std::thread::sleep(Duration::from_millis(2500));
    let is_end = |message: &FromTasker| matches!(message, FromTasker::Exited { .. });
    while let Some(message) = first.wait_briefly_for_message() {
        assert!(!is_end(&message), "{message:?}");
    }
    first.stop_and_wait();
    second.stop_and_wait();
}

/// What an ended task has left behind counts, and is killed like a task.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn leftovers_are_killed_too() {
    let service = Service::new("memory = \"40M\"\n");
    let mut tasker = service.start_tasker();
    let order = memory_holder(1, 60);
    let script = "\"$@\" & exit 0";
    let python = order.path.to_str().expect("text");
    let code = std::str::from_utf8(&order.argv[2]).expect("text");
    let arguments = ["-c", script, "sh", python, "-c", code];
    let order = start_order(tid(1), &shell_path(), &arguments);
    assert_eq!(start(&mut tasker, order), Ok(()));
    let killed: (Tid, bool) = tasker.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::KilledForLimit { tid, has_ended, .. } => Some((*tid, *has_ended)),
        _ => None,
    });
    assert_eq!(killed, (tid(1), true));
    service.wait_for_usage(|usage| (usage.guests, usage.memory_bytes) == (0, 0));
    tasker.stop_and_wait();
}
