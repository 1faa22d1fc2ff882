use super::*;
use sempa_service_settings::host_account::write_guest_cap;
use std::process::{Child, Command};
use std::sync::Barrier;

/// Number of attempts of two taskers to start a task at the same time.
const RACES: usize = 200;

fn limited_user(uid: u32, tasks_max: u64) -> LimitedUser {
    LimitedUser {
        uid,
        name: format!("user{uid}"),
        tasks_max,
        memory_bytes_max: 1000,
        control_groups_max: 4,
        image_bytes_max: 100,
    }
}

impl HostAccount {
    /// Opens an account whose user may have `groups_max` control groups.
    pub(crate) fn with_group_limit(dir: &Path, groups_max: u64) -> Self {
        let own_pid = std::process::id().cast_signed();
        let start_ticks = proc::stat(own_pid).expect("it runs").starttime;
        let mut user = limited_user(1000, 1);
        user.control_groups_max = groups_max;
        Self::open(dir, SessionId(own_pid), start_ticks, user).expect("a directory")
    }
}

/// A process that stands for a tasker. Dropping this value ends it.
struct OtherProcess(Child);

impl OtherProcess {
    fn start() -> Self {
        let mut command = Command::new("sleep");
        Self(command.arg("600").spawn().expect("sleep"))
    }

    fn open(&self, dir: &Path, user: LimitedUser) -> HostAccount {
        let pid = self.0.id().cast_signed();
        let start_ticks = proc::stat(pid).expect("it runs").starttime;
        HostAccount::open(dir, SessionId(pid), start_ticks, user).expect("a directory")
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }
}

fn guests(guests: u64) -> HostUse {
    HostUse {
        guests,
        ..HostUse::default()
    }
}

fn memory(memory_bytes: u64) -> HostUse {
    HostUse {
        memory_bytes,
        ..guests(1)
    }
}

fn claim(account: &HostAccount, usage: HostUse) -> Result<(), String> {
    let result = account.claim_task(usage, true);
    result.map_err(|error| error.to_string())
}

/// Two taskers of a user want the last place at the same time: one of them gets it.
#[test]
fn last_place_is_given_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let processes = [OtherProcess::start(), OtherProcess::start()];
    let accounts = processes
        .each_ref()
        .map(|process| process.open(dir.path(), limited_user(1000, 1)));
    let barrier = Barrier::new(accounts.len());
    for _ in 0..RACES {
        let won = accounts.each_ref().map(|account| {
            let barrier = &barrier;
            move || {
                barrier.wait();
                account.claim_task(guests(1), true).is_ok()
            }
        });
        let winners: usize = std::thread::scope(|scope| {
            let threads = won.map(|race| scope.spawn(race));
            threads
                .map(|thread| usize::from(thread.join().expect("no panic")))
                .iter()
                .sum()
        });
        assert_eq!(winners, 1);
        accounts
            .iter()
            .for_each(|account| account.record(guests(0)));
    }
}

/// The tasks of all virtual machines of a user count, and those of other users do not. A tasker
/// that has ended does not count.
#[test]
fn tasks_of_a_user_are_limited_together() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (OtherProcess::start(), OtherProcess::start());
    let other_user = OtherProcess::start();
    let first_account = first.open(dir.path(), limited_user(1000, 3));
    let second_account = second.open(dir.path(), limited_user(1000, 3));
    let other_account = other_user.open(dir.path(), limited_user(1001, 3));
    assert_eq!(claim(&first_account, guests(2)), Ok(()));
    assert_eq!(claim(&second_account, guests(1)), Ok(()));
    let reason = "the administrator allows 3 tasks of user1000 on this machine, and 3 are present";
    assert_eq!(claim(&second_account, guests(2)), Err(reason.into()));
    assert_eq!(claim(&other_account, guests(3)), Ok(()));
    // The record remains, as after SIGKILL.
    drop(first);
    assert_eq!(claim(&second_account, guests(3)), Ok(()));
    let record = dir
        .path()
        .join(first_account.account().session.0.to_string());
    assert!(record.exists());
    let third = OtherProcess::start();
    third.open(dir.path(), limited_user(1000, 3));
    assert!(!record.exists());
}

/// The cap counts the tasks of all users, and a check alone claims nothing.
#[test]
fn cap_holds_for_all_users() {
    let parent = tempfile::tempdir().expect("a directory");
    let dir = parent.path().join("account");
    let (first, second) = (OtherProcess::start(), OtherProcess::start());
    let first_account = first.open(&dir, limited_user(1000, 9));
    let second_account = second.open(&dir, limited_user(1001, 9));
    write_guest_cap(&dir, Some(2)).expect("written");
    assert!(first_account.claim_task(guests(1), false).is_ok());
    assert_eq!(claim(&first_account, guests(1)), Ok(()));
    assert_eq!(claim(&second_account, guests(1)), Ok(()));
    let reason = "its owner allows 2 tasks on this machine, and as many are present";
    assert_eq!(claim(&second_account, guests(2)), Err(reason.into()));
    write_guest_cap(&dir, None).expect("removed");
    assert_eq!(claim(&second_account, guests(2)), Ok(()));
}

/// Records that are malformed, or of processes that do not exist, are ignored.
#[test]
fn malformed_records_are_ignored() {
    let dir = tempfile::tempdir().expect("a directory");
    let process = OtherProcess::start();
    let account = process.open(dir.path(), limited_user(1000, 1));
    for (name, text) in [
        ("1", "uid 1000\nstart_ticks x\nguests 9\n"),
        ("2147483647", "uid 1000\nstart_ticks 1\nguests 9\n"),
        ("x", "uid 1000\nstart_ticks 1\nguests 9\n"),
    ] {
        fs::write(dir.path().join(name), text).expect("the test's own directory");
    }
    assert_eq!(claim(&account, guests(1)), Ok(()));
}

#[test]
fn memory_groups_and_images_are_limited_together() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (OtherProcess::start(), OtherProcess::start());
    let first_account = first.open(dir.path(), limited_user(1000, 9));
    let second_account = second.open(dir.path(), limited_user(1000, 9));
    assert_eq!(claim(&first_account, memory(600)), Ok(()));
    let reason = "the tasks of user1000 use 1001 bytes, and the administrator allows 1000 bytes";
    assert_eq!(claim(&second_account, memory(401)), Err(reason.into()));
    assert_eq!(claim(&second_account, memory(400)), Ok(()));

    assert!(first_account.claim_control_groups(3));
    assert!(second_account.claim_control_groups(1) && !second_account.claim_control_groups(2));

    assert!(first_account.claim_images(60).is_ok() && second_account.claim_images(40).is_ok());
    let error = second_account
        .claim_images(1)
        .expect_err("101 of 100 bytes");
    assert!(error.to_string().contains("have 101 bytes"), "{error}");
    first_account.release_images(60);
    assert!(second_account.claim_images(60).is_ok());
    // The tasks are recorded without a change of the images.
    first_account.record(guests(1));
    assert!(first_account.claim_images(1).is_err());
}

/// The tasker with the largest task kills it; of two equal ones that with the lower PID.
#[test]
fn one_tasker_kills_its_task() {
    let others = OtherTaskers {
        own_session: SessionId(7),
        total_bytes: 0,
        largest_tasks: vec![(SessionId(5), 10), (SessionId(9), 20)],
    };
    assert!(others.has_no_larger_task(21) && others.has_no_larger_task(20));
    assert!(!others.has_no_larger_task(19));
    let equal_lower = OtherTaskers {
        largest_tasks: vec![(SessionId(5), 20)],
        ..others
    };
    assert!(!equal_lower.has_no_larger_task(20));
}
